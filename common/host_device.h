// Declares a function for host and device code. It is static: the CPU kernels are compiled once for each instruction
// set, and must not share its code (docs/design/cpu.md).
#pragma once

#ifdef __CUDACC__
#define JAX_FLASH_STATIC_HOST_DEVICE static __host__ __device__ __forceinline__
#else
#define JAX_FLASH_STATIC_HOST_DEVICE static inline
#endif
