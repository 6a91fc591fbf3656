// The module `jax_flash._native`: capsules of the handlers, and what tests and the command line want to know.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "common/arrays.h"
#include "common/problem.h"
#include "common/ranges.h"
#include "cpu_src/custom_calls.h"
#include "cuda_src/compiled_plan.h"
#include "cuda_src/custom_calls.h"
#include "cuda_src/driver.h"
#include "cuda_src/jit.h"
#include "cuda_src/plan/plan.h"
#include "cuda_src/program_source.h"

namespace nb = nanobind;

namespace {

using jax_flash::Pass, jax_flash::Problem, jax_flash::Target, jax_flash::Unit;

nb::dict Stages(const jax_flash::CudaHandlers& handlers) {
  nb::dict stages;
  stages["instantiate"] = nb::capsule(handlers.instantiate);
  stages["initialize"] = nb::capsule(handlers.initialize);
  stages["execute"] = nb::capsule(handlers.execute);
  return stages;
}

Problem Decoded(std::string_view text) {
  Problem problem;
  const std::string error = Decode(text, &problem);
  if (!error.empty()) throw std::invalid_argument(error);
  return problem;
}

// The pass of a problem. Only the problem of a tangent has operands with tangents.
Pass PassOf(const Problem& problem, bool backward) {
  return problem.tangent() ? Pass::kTangent : backward ? Pass::kBackward : Pass::kForward;
}

// The plan with its first tiles, or with those that the compiler has enough registers for.
jax_flash::Plan PlanOf(std::string_view text, bool backward, const Target& target, const std::string& arch,
                       bool compiled) {
  const Problem problem = Decoded(text);
  if (!compiled) return MakePlan(problem, PassOf(problem, backward), target);
  const nb::gil_scoped_release release;
  return CompiledPlan(problem, PassOf(problem, backward), target, arch);
}

}  // namespace

NB_MODULE(_native, module) {
  // Limits that Python checks too. Its errors name the user's argument.
  module.attr("PROBLEM_VERSION") = jax_flash::kProblemVersion;
  module.attr("PAGE_STEP") = jax_flash::kPageStep;
  module.attr("MAX_CAPTURED") = jax_flash::kMaxCaptured;
  module.attr("MAX_CAPTURED_DIMS") = jax_flash::kMaxCapturedRank;
  module.attr("MAX_INSTRUCTIONS") = jax_flash::kMaxInstructions;
  module.attr("MAX_DROP_THRESHOLD") = jax_flash::kMaxDropThreshold;
  module.attr("TOLERATED_SPILL") = jax_flash::kToleratedSpill;
#define ENTRY(text, ...) text,
  module.attr("CAPTURED_DTYPES") = std::vector<std::string>{JAX_FLASH_CAPTURED_DTYPES(ENTRY)};
#undef ENTRY

  module.def(
      "registrations",
      [] {
        nb::dict cpu, cuda, platforms;
        cpu["jax_flash_forward"] = nb::capsule(jax_flash::CpuForwardHandler());
        cpu["jax_flash_backward"] = nb::capsule(jax_flash::CpuBackwardHandler());
        cpu["jax_flash_tangent"] = nb::capsule(jax_flash::CpuTangentHandler());
        cuda["jax_flash_forward"] = Stages(jax_flash::CudaForwardHandlers());
        cuda["jax_flash_backward"] = Stages(jax_flash::CudaBackwardHandlers());
        cuda["jax_flash_tangent"] = Stages(jax_flash::CudaTangentHandlers());
        platforms["cpu"] = cpu;
        platforms["CUDA"] = cuda;
        return platforms;
      },
      "The handlers of the custom calls, by platform and name, for jax.ffi.register_ffi_target.");
  module.def("cpu_isa", &jax_flash::CpuIsa,
             "The instruction set that the CPU kernels use here: portable, avx2 or avx512. The environment variable "
             "JAX_FLASH_CPU_ISA asks for a lesser one.");

  module.def(
      "mask_ranges",
      [](std::string_view text, const std::map<int, std::pair<double, double>>& known) {
        const Problem problem = Decoded(text);
        const auto range_of =
            problem.dtype == jax_flash::DType::kF64 ? jax_flash::RangeOf<double> : jax_flash::RangeOf<float>;
        std::vector<std::pair<double, double>> ranges;
        for (const jax_flash::Instruction& x : problem.mask.mask_mod.instructions) {
          jax_flash::Range operands[jax_flash::kMaxCapturedRank + 1] = {};
          for (int k = 0; k < x.count; ++k) operands[k] = {ranges[x.operands[k]].first, ranges[x.operands[k]].second};
          if (x.op == jax_flash::Op::result) break;
          const jax_flash::Range range = range_of(x, operands);
          const auto given = known.find(int(ranges.size()));
          ranges.push_back(given == known.end() ? std::pair(range.low, range.high) : given->second);
        }
        return ranges;
      },
      nb::arg("problem"), nb::arg("known"),
      "What the CPU kernels take the values of a problem's mask_mod to be in a block where some are known: least and "
      "most of each instruction, by its number. (A float is anything where they are NaN.)");

  module.def("problem_fields", &jax_flash::ProblemFields, "The fields of a problem: names and types.");

  module.def(
      "operands",
      [] {
        constexpr const char* kRoles[] = {"scores", "values", "once a row"};
        std::vector<std::tuple<std::string, std::string, bool, std::string, std::string>> operands;
        for (const jax_flash::OperandDeclaration& x : jax_flash::DeclaredOperands())
          operands.emplace_back(x.name, x.dims, x.broadcast, x.gradient, x.gradient.empty() ? "" : kRoles[int(x.role)]);
        return operands;
      },
      "The operands of all custom calls: the name, the dims (a letter each), whether dims may have size 1, the name "
      "of the gradient (empty: none), and what the operand affects.");
  module.def("results", &jax_flash::DeclaredResults,
             "The arrays of custom calls that are not in `operands`, without gradients: names and dims.");
  module.def(
      "array_bytes",
      [](std::string_view problem, bool backward) { return jax_flash::BytesOfArrays(Decoded(problem), backward); },
      nb::arg("problem"), nb::arg("backward"),
      "The bytes of all operands and results of a pass, without captured arrays and their gradients.");

  // A problem is the text of Problem.encode(). What may have to look for NVRTC does not hold the GIL meanwhile: another
  // thread may be looking for it too.
  using NoGil = nb::call_guard<nb::gil_scoped_release>;
  module.def(
      "cuda_reads_latent", [](std::string_view problem) { return jax_flash::ReadsLatent(Decoded(problem)); },
      nb::arg("problem"), "Do the CUDA kernels of a forward read the value from the latent?");
  module.def(
      "cuda_refusal", [](std::string_view problem) { return jax_flash::CudaRefusal(Decoded(problem)); },
      nb::arg("problem"), "Why there are no CUDA kernels for a problem; empty if there are.");
  module.def(
      "cuda_scratch_bytes",
      [](std::string_view problem, bool backward, bool anywhere) {
        const std::vector<Target> targets = anywhere ? std::vector<Target>() : jax_flash::LocalTargets();
        const Problem p = Decoded(problem);
        return jax_flash::ScratchBytes(p, PassOf(p, backward), targets);
      },
      nb::arg("problem"), nb::arg("backward"), nb::arg("anywhere"),
      "The size of a call's last result on a GPU; it has none if it is 0. It does for the GPUs of this process, or, if "
      "there are none or it is to run anywhere, for all.");
  module.def(
      "cuda_plan",
      [](std::string_view problem, bool backward, const std::string& arch, int multiprocessors, bool compiled) {
        std::vector<std::tuple<std::string, std::string, jax_flash::KernelFields>> launches;
        const Target target = jax_flash::TargetOf(arch, multiprocessors);
        const jax_flash::Plan plan = PlanOf(problem, backward, target, arch, compiled);
        for (const jax_flash::Launch& launch : plan.launches) {
          const jax_flash::PlannedUnit& unit = plan.units[launch.unit];
          launches.emplace_back(unit.file, launch.entry, jax_flash::FieldsOf(unit.config));
        }
        return launches;
      },
      nb::arg("problem"), nb::arg("backward"), nb::arg("arch"), nb::arg("multiprocessors") = 0,
      nb::arg("compiled") = false,
      "The launches of a pass on an architecture (\"sm_80\", \"sm_90a\") with so many multiprocessors (0: as many as "
      "is usual): file, kernel and what it is compiled for (the fields of KernelConfig) of each. They have the tiles "
      "that are tried first, or, if `compiled`, those that do not spill: this compiles the kernels.");
  module.def(
      "cuda_explain",
      [](std::string_view problem, bool backward, const std::string& arch, int multiprocessors, bool compiled) {
        const Target target = jax_flash::TargetOf(arch, multiprocessors);
        const jax_flash::Plan plan = PlanOf(problem, backward, target, arch, compiled);
        const Problem p = Decoded(problem);
        const int64_t scratch_bytes = ScratchBytes(p, PassOf(p, backward), {target});
        return std::tuple(target.multiprocessors, scratch_bytes, plan.reasons);
      },
      nb::arg("problem"), nb::arg("backward"), nb::arg("arch"), nb::arg("multiprocessors") = 0,
      nb::arg("compiled") = false,
      "For the plan that `cuda_plan` returns: the multiprocessors, bytes of scratch memory, and why it is not "
      "otherwise.");
  module.def(
      "cuda_compile",
      [](const std::string& file, const jax_flash::KernelFields& fields, const std::string& arch,
         const std::string& programs) {
        const jax_flash::Compilation done = [&] {
          const nb::gil_scoped_release release;
          const std::string source = programs.empty() ? jax_flash::ProgramSource(Problem()) : programs;
          return jax_flash::CompileUnit({file, jax_flash::ConfigOf(fields), source}, arch);
        }();
        const std::string& cubin = done.kernels.cubin;
        return nb::make_tuple(nb::bytes(cubin.data(), cubin.size()), done.log, done.seconds,
                              jax_flash::SharedBytes(cubin));
      },
      nb::arg("file"), nb::arg("fields"), nb::arg("arch"), nb::arg("programs") = "",
      "Compiles a file of cuda_src/kernels, with the text of cuda_programs if there are any: cubin, log with ptxas' "
      "report, seconds, bytes of dynamic shared memory.");
  module.def(
      "cuda_programs", [](std::string_view problem) { return jax_flash::ProgramSource(Decoded(problem)); },
      nb::arg("problem"), "A problem's score programs as CUDA C++.");
  module.def(
      "cuda_cache",
      [](std::string_view problem, bool backward, const std::string& arch) {
        const Problem p = Decoded(problem);
        bool kept = true;
        for (const Target& target : jax_flash::TargetsOf(arch)) {
          const std::vector<Unit> units = UnitsOf(CompiledPlan(p, PassOf(p, backward), target, arch));
          kept &= std::all_of(units.begin(), units.end(), [&](const Unit& unit) { return IsKept(unit, arch); });
        }
        return kept;
      },
      nb::arg("problem"), nb::arg("backward"), nb::arg("arch"), NoGil(),
      "Compiles the kernels of a pass, or takes them from the cache directory, as its first call would: on the GPUs of "
      "this process that take this architecture, or, if none does, on one with as many multiprocessors as is usual. "
      "Has the directory them now?");
  module.def("cuda_cache_directory", &jax_flash::CacheDirectory, "Where compiled kernels are kept; empty: nowhere.");
  module.def("cuda_arch", &jax_flash::ArchOf, nb::arg("major"), nb::arg("minor"), NoGil(),
             "The architecture that is compiled for to run on a compute capability.");
  module.def(
      "cuda_nvrtc",
      [] {
        const jax_flash::Nvrtc& nvrtc = jax_flash::CudaNvrtc();
        return std::tuple(nvrtc.path, nvrtc.major, nvrtc.minor);
      },
      NoGil(), "The NVRTC that is used: path, major and minor version.");
  module.def(
      "cuda_devices",
      [] {
        std::vector<std::tuple<int, int, int>> devices;
        for (const jax_flash::Device& device : jax_flash::CudaDevices()) {
          devices.emplace_back(device.major, device.minor, device.multiprocessors);
        }
        return devices;
      },
      "The GPUs of this process: major and minor compute capability, multiprocessors.");

  // NVRTC is asked for when XLA compiles, on any thread.
  jax_flash::SetNvrtcFinder([] {
    const nb::gil_scoped_acquire acquire;
    try {
      return nb::cast<std::string>(nb::module_::import_("jax_flash.cuda").attr("find_nvrtc")());
    } catch (const nb::python_error& error) {
      throw std::runtime_error(nb::str(error.value()).c_str());
    }
  });
}
