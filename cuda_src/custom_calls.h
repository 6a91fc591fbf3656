// Handlers of the custom calls for platform CUDA, one for each stage. `bindings.cc` passes them to Python.
#pragma once

namespace jax_flash {

struct CudaHandlers {  // XLA_FFI_Handler*
  void *instantiate, *initialize, *execute;
};

CudaHandlers CudaForwardHandlers();
CudaHandlers CudaBackwardHandlers();
CudaHandlers CudaTangentHandlers();

}  // namespace jax_flash
