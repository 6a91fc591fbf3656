// Which kernels do a pass of a problem on a GPU, with which tiles, how many blocks, and the scratch memory they share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/problem.h"
#include "cuda_src/jit.h"

namespace jax_flash {

enum class Pass { kForward, kBackward };

// Why no kernels do the problem on any GPU; empty if they do.
std::string CudaRefusal(const Problem& problem);

// The offsets of what a pass keeps in its one scratch buffer, the same on every GPU; -1: not needed.
struct Scratch {
  int64_t q_bounds = -1, kv_bounds = -1;  // SegmentBounds [batch, block of 64]
  int64_t logsumexp = -1, d = -1;         // f32 [batch, head, row padded to 128]
  int64_t maximum = -1;                   // likewise
  int64_t dq_sum = -1;                    // f32 [batch, head, row padded to 128, query's dim]
  int64_t dbias_parts = -1;               // f32 [parts, shape of the bias]
  int64_t o_parts = -1;                   // f32 [parts, batch, head, row, value's dim]
  int64_t l_parts = -1, m_parts = -1;     // f32 [parts, batch, head, row]
  int64_t taken = -1;                     // s32 counters: see kernels/params.h
  int64_t dk_sum = -1, dv_sum = -1;       // f32 [batch, key's head, key padded to 128, dim]
  int64_t zero_bytes = 0;                 // from `taken` on, the sums included: they are 0 at first
  int parts = 1;                          // of the bias, or of the keys
  int heads = 0, last_heads = 0;          // see kernels/params.h
  int64_t bytes = 0;
};
Scratch CudaScratch(const Problem& problem, Pass pass);

// No entry of the results depends on an operand: there is nothing to attend to, or nobody to do it.
bool NothingToCompute(const Problem& problem);

// A [batch, time, heads, dim] array that a kernel wants as a tensor map, in boxes of `rows` x 128 bytes.
enum class Mapped { kQuery, kKey, kValue, kO, kDO, kDK, kDV, kDQ };
struct Map {
  Mapped array;
  int rows;
};

struct Launch {
  int unit;           // of Plan::units
  std::string entry;  // name of the kernel
  int64_t blocks;
  int threads;
  bool persistent = false;      // at most one block a multiprocessor: blocks take their tiles in turn
  bool dynamic_shared = false;  // as much as the file's jax_flash_shared_bytes says
  std::vector<Map> maps = {};   // the kernel's arguments after Params
};

struct Plan {
  std::vector<Unit> units;
  std::vector<Launch> launches;  // one after the other
};

// What NVRTC compiles for to run on a GPU of this compute capability. Throws std::invalid_argument if there is nothing.
std::string ArchOf(int major, int minor);

// `arch`: "sm_80", "sm_90a", ... Throws std::invalid_argument if that GPU cannot do it.
Plan MakePlan(const Problem& problem, Pass pass, const std::string& arch);

}  // namespace jax_flash
