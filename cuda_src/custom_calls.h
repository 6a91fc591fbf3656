// What `bindings.cc` hands to Python: the handlers of the custom calls for platform CUDA, one for each stage.
#pragma once

namespace jax_flash {

struct CudaHandlers {  // XLA_FFI_Handler*
  void *instantiate, *initialize, *execute;
};

CudaHandlers CudaForwardHandlers();
CudaHandlers CudaBackwardHandlers();

}  // namespace jax_flash
