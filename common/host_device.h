// Of a function that host and device code both have. It is static, since the CPU kernels, which are compiled once per
// instruction set, must not share it (docs/architecture.md, "CPU kernels").
#pragma once

#ifdef __CUDACC__
#define JAX_FLASH_STATIC_HOST_DEVICE static __host__ __device__ __forceinline__
#else
#define JAX_FLASH_STATIC_HOST_DEVICE static inline
#endif
