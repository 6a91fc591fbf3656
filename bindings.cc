// The module `jax_flash._native`: capsules of the handlers, and nothing clever.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include "cpu_src/custom_calls.h"

namespace nb = nanobind;

NB_MODULE(_native, module) {
  module.def(
      "registrations",
      [] {
        nb::dict handlers;
        handlers["jax_flash_forward"] = nb::capsule(jax_flash::CpuForwardHandler());
        handlers["jax_flash_backward"] = nb::capsule(jax_flash::CpuBackwardHandler());
        return handlers;
      },
      "The handlers of the custom calls for platform cpu, by name, as capsules for jax.ffi.register_ffi_target.");
  module.def("cpu_isa", &jax_flash::CpuIsa,
             "The instruction set that the CPU kernels use here: portable, avx2 or avx512. The environment variable "
             "JAX_FLASH_CPU_ISA asks for a lesser one.");
}
