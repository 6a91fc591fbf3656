// wgmma: a warpgroup multiplies 64 x k by k x N into f32 registers, asynchronously. k is 32 bytes: 16 elements of 16
// bits, or 8 elements of f32, truncated to TF32. PTX ISA 9.7.15.
//
// A tile in shared memory is a sequence of boxes of 128-byte rows, as TMA writes them with the 128-byte swizzle.
// An accumulator is float[N / 2]. Element 4 c + 2 h + e of lane l of warp w has row 16 w + l / 4 + 8 h and column 8 c +
// 2 (l % 4) + e.
#pragma once

#include "ptx/compiler.cuh"
#include "ptx/types.cuh"

namespace jax_flash {

// The matrix descriptor of a box: address, leading and stride byte offset (each / 16), 128-byte swizzle.
//   K-major (rows are M or N): the stride offset is the distance between groups of 8 rows.
//   MN-major (rows are K): the same, and the leading offset is the distance between boxes of 64 columns. Not for f32.
__device__ __forceinline__ uint64_t Descriptor(const void* shared, uint32_t box_bytes) {
  return uint64_t(1) << 62 | uint64_t(1024 >> 4) << 32 | uint64_t(box_bytes >> 4) << 16 |
         (SharedAddress(shared) & 0x3FFFF) >> 4;
}

__device__ __forceinline__ uint64_t Advance(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

// wgmma.fence: later wgmmas see earlier writes to registers.
__device__ __forceinline__ void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void WgmmaCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// wgmma.wait_group: waits until all but the latest `kPending` groups are complete.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

enum class Major { kK = 0, kMN = 1 };

template <int N>
struct Wgmma;

// Operand lists of 4, 8, ... accumulator registers.
#define JAX_FLASH_D4 "%0,%1,%2,%3"
#define JAX_FLASH_D8 JAX_FLASH_D4 ",%4,%5,%6,%7"
#define JAX_FLASH_D12 JAX_FLASH_D8 ",%8,%9,%10,%11"
#define JAX_FLASH_D16 JAX_FLASH_D12 ",%12,%13,%14,%15"
#define JAX_FLASH_D20 JAX_FLASH_D16 ",%16,%17,%18,%19"
#define JAX_FLASH_D24 JAX_FLASH_D20 ",%20,%21,%22,%23"
#define JAX_FLASH_D28 JAX_FLASH_D24 ",%24,%25,%26,%27"
#define JAX_FLASH_D32 JAX_FLASH_D28 ",%28,%29,%30,%31"
#define JAX_FLASH_D36 JAX_FLASH_D32 ",%32,%33,%34,%35"
#define JAX_FLASH_D40 JAX_FLASH_D36 ",%36,%37,%38,%39"
#define JAX_FLASH_D44 JAX_FLASH_D40 ",%40,%41,%42,%43"
#define JAX_FLASH_D48 JAX_FLASH_D44 ",%44,%45,%46,%47"
#define JAX_FLASH_D52 JAX_FLASH_D48 ",%48,%49,%50,%51"
#define JAX_FLASH_D56 JAX_FLASH_D52 ",%52,%53,%54,%55"
#define JAX_FLASH_D60 JAX_FLASH_D56 ",%56,%57,%58,%59"
#define JAX_FLASH_D64 JAX_FLASH_D60 ",%60,%61,%62,%63"
#define JAX_FLASH_D68 JAX_FLASH_D64 ",%64,%65,%66,%67"
#define JAX_FLASH_D72 JAX_FLASH_D68 ",%68,%69,%70,%71"
#define JAX_FLASH_D76 JAX_FLASH_D72 ",%72,%73,%74,%75"
#define JAX_FLASH_D80 JAX_FLASH_D76 ",%76,%77,%78,%79"
#define JAX_FLASH_D84 JAX_FLASH_D80 ",%80,%81,%82,%83"
#define JAX_FLASH_D88 JAX_FLASH_D84 ",%84,%85,%86,%87"
#define JAX_FLASH_D92 JAX_FLASH_D88 ",%88,%89,%90,%91"
#define JAX_FLASH_D96 JAX_FLASH_D92 ",%92,%93,%94,%95"
#define JAX_FLASH_D100 JAX_FLASH_D96 ",%96,%97,%98,%99"
#define JAX_FLASH_D104 JAX_FLASH_D100 ",%100,%101,%102,%103"
#define JAX_FLASH_D108 JAX_FLASH_D104 ",%104,%105,%106,%107"
#define JAX_FLASH_D112 JAX_FLASH_D108 ",%108,%109,%110,%111"
#define JAX_FLASH_D116 JAX_FLASH_D112 ",%112,%113,%114,%115"
#define JAX_FLASH_D120 JAX_FLASH_D116 ",%116,%117,%118,%119"
#define JAX_FLASH_D124 JAX_FLASH_D120 ",%120,%121,%122,%123"
#define JAX_FLASH_D128 JAX_FLASH_D124 ",%124,%125,%126,%127"
#define JAX_FLASH_F4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define JAX_FLASH_F8 JAX_FLASH_F4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define JAX_FLASH_F12 JAX_FLASH_F8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define JAX_FLASH_F16 JAX_FLASH_F12, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define JAX_FLASH_F20 JAX_FLASH_F16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define JAX_FLASH_F24 JAX_FLASH_F20, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define JAX_FLASH_F28 JAX_FLASH_F24, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define JAX_FLASH_F32 JAX_FLASH_F28, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define JAX_FLASH_F36 JAX_FLASH_F32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define JAX_FLASH_F40 JAX_FLASH_F36, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define JAX_FLASH_F44 JAX_FLASH_F40, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define JAX_FLASH_F48 JAX_FLASH_F44, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define JAX_FLASH_F52 JAX_FLASH_F48, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define JAX_FLASH_F56 JAX_FLASH_F52, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define JAX_FLASH_F60 JAX_FLASH_F56, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define JAX_FLASH_F64 JAX_FLASH_F60, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define JAX_FLASH_F68 JAX_FLASH_F64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define JAX_FLASH_F72 JAX_FLASH_F68, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define JAX_FLASH_F76 JAX_FLASH_F72, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define JAX_FLASH_F80 JAX_FLASH_F76, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define JAX_FLASH_F84 JAX_FLASH_F80, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define JAX_FLASH_F88 JAX_FLASH_F84, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define JAX_FLASH_F92 JAX_FLASH_F88, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define JAX_FLASH_F96 JAX_FLASH_F92, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define JAX_FLASH_F100 JAX_FLASH_F96, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define JAX_FLASH_F104 JAX_FLASH_F100, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define JAX_FLASH_F108 JAX_FLASH_F104, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define JAX_FLASH_F112 JAX_FLASH_F108, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define JAX_FLASH_F116 JAX_FLASH_F112, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define JAX_FLASH_F120 JAX_FLASH_F116, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define JAX_FLASH_F124 JAX_FLASH_F120, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define JAX_FLASH_F128 JAX_FLASH_F124, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// The part of the instruction's name after N. Only 16-bit elements have a choice of major for A and B in shared memory.
#if JAX_FLASH_DTYPE == 3
#define JAX_FLASH_WGMMA_TYPES "k8.f32.tf32.tf32"
#define JAX_FLASH_WGMMA_MAJORS(R)
#else
#define JAX_FLASH_WGMMA_TYPES "k16.f32." JAX_FLASH_PTX_TYPE "." JAX_FLASH_PTX_TYPE
#define JAX_FLASH_WGMMA_MAJORS(R) ", %" #R
#endif

// R = N / 2 registers; the next operands have the numbers R, R + 1, ...
#define JAX_FLASH_WGMMA(N, R, R1, R2, R3, R4, R5, R6)                                                             \
  template <>                                                                                                     \
  struct Wgmma<N> {                                                                                               \
    template <Major kA, Major kB>                                                                                 \
    static __device__ __forceinline__ void SS(float (&d)[R], uint64_t a, uint64_t b, int accumulate) {            \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #R2                                                       \
                   ", 0;\n"                                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #N JAX_FLASH_WGMMA_TYPES " {" JAX_FLASH_D##R               \
                   "}, %" #R ", %" #R1 ", p, 1, 1" JAX_FLASH_WGMMA_MAJORS(R3) JAX_FLASH_WGMMA_MAJORS(R4) ";\n}"   \
                   : JAX_FLASH_F##R                                                                               \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(int(kA)), "n"(int(kB)));                                \
    }                                                                                                             \
    template <Major kB>                                                                                           \
    static __device__ __forceinline__ void RS(float (&d)[R], const uint32_t* a, uint64_t b, int accumulate) {     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #R5                                                       \
                   ", 0;\n"                                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #N JAX_FLASH_WGMMA_TYPES " {" JAX_FLASH_D##R               \
                   "}, {%" #R ",%" #R1 ",%" #R2 ",%" #R3 "}, %" #R4 ", p, 1, 1" JAX_FLASH_WGMMA_MAJORS(R6) ";\n}" \
                   : JAX_FLASH_F##R                                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(int(kB)));          \
    }                                                                                                             \
  };
JAX_FLASH_WGMMA(8, 4, 5, 6, 7, 8, 9, 10)
JAX_FLASH_WGMMA(16, 8, 9, 10, 11, 12, 13, 14)
JAX_FLASH_WGMMA(24, 12, 13, 14, 15, 16, 17, 18)
JAX_FLASH_WGMMA(32, 16, 17, 18, 19, 20, 21, 22)
JAX_FLASH_WGMMA(40, 20, 21, 22, 23, 24, 25, 26)
JAX_FLASH_WGMMA(48, 24, 25, 26, 27, 28, 29, 30)
JAX_FLASH_WGMMA(56, 28, 29, 30, 31, 32, 33, 34)
JAX_FLASH_WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
JAX_FLASH_WGMMA(72, 36, 37, 38, 39, 40, 41, 42)
JAX_FLASH_WGMMA(80, 40, 41, 42, 43, 44, 45, 46)
JAX_FLASH_WGMMA(88, 44, 45, 46, 47, 48, 49, 50)
JAX_FLASH_WGMMA(96, 48, 49, 50, 51, 52, 53, 54)
JAX_FLASH_WGMMA(104, 52, 53, 54, 55, 56, 57, 58)
JAX_FLASH_WGMMA(112, 56, 57, 58, 59, 60, 61, 62)
JAX_FLASH_WGMMA(120, 60, 61, 62, 63, 64, 65, 66)
JAX_FLASH_WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
JAX_FLASH_WGMMA(136, 68, 69, 70, 71, 72, 73, 74)
JAX_FLASH_WGMMA(144, 72, 73, 74, 75, 76, 77, 78)
JAX_FLASH_WGMMA(152, 76, 77, 78, 79, 80, 81, 82)
JAX_FLASH_WGMMA(160, 80, 81, 82, 83, 84, 85, 86)
JAX_FLASH_WGMMA(168, 84, 85, 86, 87, 88, 89, 90)
JAX_FLASH_WGMMA(176, 88, 89, 90, 91, 92, 93, 94)
JAX_FLASH_WGMMA(184, 92, 93, 94, 95, 96, 97, 98)
JAX_FLASH_WGMMA(192, 96, 97, 98, 99, 100, 101, 102)
JAX_FLASH_WGMMA(200, 100, 101, 102, 103, 104, 105, 106)
JAX_FLASH_WGMMA(208, 104, 105, 106, 107, 108, 109, 110)
JAX_FLASH_WGMMA(216, 108, 109, 110, 111, 112, 113, 114)
JAX_FLASH_WGMMA(224, 112, 113, 114, 115, 116, 117, 118)
JAX_FLASH_WGMMA(232, 116, 117, 118, 119, 120, 121, 122)
JAX_FLASH_WGMMA(240, 120, 121, 122, 123, 124, 125, 126)
JAX_FLASH_WGMMA(248, 124, 125, 126, 127, 128, 129, 130)
JAX_FLASH_WGMMA(256, 128, 129, 130, 131, 132, 133, 134)

}  // namespace jax_flash
