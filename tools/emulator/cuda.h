// CUDA C++ for a host compiler: the keywords and functions that the kernels use. Included before the kernels.
#pragma once

#include <math.h>

#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <utility>

// --- Keywords ---

#define __device__
#define __host__
#define __global__
#define __constant__
#define __grid_constant__
#define __shared__ static  // one block runs at a time; compiler.cc handles dynamic shared memory
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __cluster_dims__(...)  // compiler.cc
#define __align__(bytes) alignas(bytes)

// --- The machine ---

namespace emulator {

uint8_t* DynamicShared();
uint32_t SharedAddress(const void* generic);
void SyncThreads();
[[noreturn]] void Fail(const char* format, ...);
// A collective operation of a warp. The last lane to arrive calls `compute` with the data of all lanes.
void WarpCollective(const void* site, void* mine, void (*compute)(void* const* lanes), const char* what);

// An operand of an asm statement, and the parsed text of a statement.
struct Operand {
  void* data;
  int bytes;

  template <typename T>
  Operand(const T& x) : data(const_cast<T*>(&x)), bytes(sizeof x) {}
};
struct Ptx;
const Ptx* Parse(const char* text);
// `caller` is the return address of the function with the statement.
void Execute(const Ptx* ptx, const void* caller, std::initializer_list<Operand> operands);

// The driver launches this. `arguments` has a pointer to each argument.
struct Kernel {
  void (*call)(void** arguments);
  int cluster;  // blocks
};

template <typename... Arguments, size_t... kIndices>
void Call(void (*kernel)(Arguments...), void** arguments, std::index_sequence<kIndices...>) {
  kernel(*static_cast<Arguments*>(arguments[kIndices])...);
}
template <typename... Arguments>
void Call(void (*kernel)(Arguments...), void** arguments) {
  Call(kernel, arguments, std::index_sequence_for<Arguments...>());
}

}  // namespace emulator

// compiler.cc generates these from `asm` and from a kernel's definition.
#define EMULATED_PTX(text, ...)                                                  \
  do {                                                                           \
    static const emulator::Ptx* const emulated_ptx = emulator::Parse(text);      \
    emulator::Execute(emulated_ptx, __builtin_return_address(0), {__VA_ARGS__}); \
  } while (false)
#define EMULATED_KERNEL(name, cluster) \
  extern "C" const emulator::Kernel emulated_##name = {[](void** x) { emulator::Call(name, x); }, cluster};

// --- Variables and types ---

struct uint3 {
  unsigned x, y, z;
};
extern uint3 threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// --- Functions ---

inline int min(int a, int b) { return b < a ? b : a; }
inline int max(int a, int b) { return a < b ? b : a; }
inline int64_t min(int64_t a, int64_t b) { return b < a ? b : a; }
inline int64_t max(int64_t a, int64_t b) { return a < b ? b : a; }
inline unsigned min(unsigned a, unsigned b) { return b < a ? b : a; }
inline unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }

template <typename To, typename From>
To emulated_bits(From from) {
  To to;
  static_assert(sizeof to == sizeof from);
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
template <typename T>
T __ldcg(const T* x) {
  return *x;
}
template <typename T>
T __ldg(const T* x) {
  return *x;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(unsigned x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __int_as_float(int x) { return emulated_bits<float>(x); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, int n) {
  return unsigned(((unsigned long long)high << 32 | low) >> (n & 31));
}

inline size_t __cvta_generic_to_shared(const void* pointer) { return emulator::SharedAddress(pointer); }

// One thread of a launch runs at a time, so everything between two waits is atomic.
template <typename T>
T atomicAdd(T* x, T y) {
  const T before = *x;
  *x += y;
  return before;
}
template <typename T>
T atomicMin(T* x, T y) {
  const T before = *x;
  if (y < before) *x = y;
  return before;
}
template <typename T>
T atomicMax(T* x, T y) {
  const T before = *x;
  if (before < y) *x = y;
  return before;
}

// Returns `sum` plus the dot product of the bytes.
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  for (int shift = 0; shift < 32; shift += 8) sum += (a >> shift & 0xFF) * (b >> shift & 0xFF);
  return sum;
}

inline void __syncthreads() { emulator::SyncThreads(); }
inline int __syncthreads_or(int x) {
  static int any;
  if (threadIdx.x == 0) any = 0;
  emulator::SyncThreads();
  any |= x != 0;
  emulator::SyncThreads();
  const int all_have = any;
  emulator::SyncThreads();
  return all_have;
}
inline int __syncthreads_and(int x) { return !__syncthreads_or(!x); }
inline void __syncwarp(unsigned mask) {
  if (mask != 0xFFFFFFFF) emulator::Fail("__syncwarp of some lanes");
  static const char site = 0;
  emulator::WarpCollective(&site, nullptr, [](void* const*) {}, "__syncwarp");
}

template <typename T>
struct EmulatedShuffle {
  T x;
  int from;
  T result;
};
template <typename T>
T __shfl_sync(unsigned mask, T x, int from) {
  static const char site = 0;
  if (mask == 1u << threadIdx.x % 32) return x;  // only this lane
  EmulatedShuffle<T> shuffle = {x, from % 32, x};
  const auto compute = [](void* const* lanes) {
    for (int l = 0; l < 32; ++l) {
      EmulatedShuffle<T>& to = *static_cast<EmulatedShuffle<T>*>(lanes[l]);
      to.result = static_cast<EmulatedShuffle<T>*>(lanes[to.from])->x;
    }
  };
  emulator::WarpCollective(&site, &shuffle, compute, "__shfl_sync");
  return shuffle.result;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int lanes) {
  return __shfl_sync(mask, x, int(threadIdx.x % 32) ^ lanes);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T x, int lanes) {
  const int lane = int(threadIdx.x % 32);
  return __shfl_sync(mask, x, lane < lanes ? lane : lane - lanes);
}
inline unsigned __ballot_sync(unsigned, bool x) {
  static const char site = 0;
  unsigned ballot = x;
  const auto compute = [](void* const* lanes) {
    unsigned all = 0;
    for (int l = 0; l < 32; ++l) all |= *static_cast<unsigned*>(lanes[l]) << l;
    for (int l = 0; l < 32; ++l) *static_cast<unsigned*>(lanes[l]) = all;
  };
  emulator::WarpCollective(&site, &ballot, compute, "__ballot_sync");
  return ballot;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, !x) == 0; }

template <int (*combine)(int, int)>
int EmulatedReduction(int x) {
  static const char site = 0;
  const auto compute = [](void* const* lanes) {
    int all = *static_cast<int*>(lanes[0]);
    for (int l = 1; l < 32; ++l) all = combine(all, *static_cast<int*>(lanes[l]));
    for (int l = 0; l < 32; ++l) *static_cast<int*>(lanes[l]) = all;
  };
  emulator::WarpCollective(&site, &x, compute, "__reduce_sync");
  return x;
}
inline int EmulatedSum(int a, int b) { return a + b; }
inline int __reduce_min_sync(unsigned, int x) { return EmulatedReduction<min>(x); }
inline int __reduce_max_sync(unsigned, int x) { return EmulatedReduction<max>(x); }
inline int __reduce_add_sync(unsigned, int x) { return EmulatedReduction<EmulatedSum>(x); }
