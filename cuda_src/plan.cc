#include "cuda_src/plan.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "cuda_src/driver.h"
#include "cuda_src/kernels/params.h"

namespace jax_flash {
namespace {

constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();

int64_t DivideUp(int64_t x, int64_t y) { return (x + y - 1) / y; }
int64_t RoundUp(int64_t x, int64_t y) { return DivideUp(x, y) * y; }

// dQ grows in memory, in no fixed order. Otherwise a kernel of its own computes it.
bool SumsDQ(const Problem& p) { return p.dq && !p.deterministic; }

// --- Tiles ---

struct Tile {
  int rows, cols;  // queries and keys
  int groups;      // warps, or for sm_90 warpgroups beside the one that loads
  int stages;
};

constexpr int kAny = -1;

struct Choice {
  std::string_view kernel;
  int sm;          // 80: GPUs from compute capability 8.0 on; 90: 9.0 alone
  int shared;      // KiB of shared memory that a block must be able to have
  int bytes;       // of an element
  int dim;         // the larger head dim is at most this
  int dropout;     // 0, 1 or kAny
  int scores;      // likewise: is there a bias or soft cap?
  int64_t length;  // keys are at most this
  Tile tile;
  int causal = kAny;
  int local = kAny;      // is there a window, or are there segments?
  int operands = 2;      // of bias and mask at most
  int64_t parallel = 0;  // tiles of all heads at least
  int full = kAny;       // is it f32 in full precision?
};

constexpr int64_t kAnyLength = kMaxSize;
constexpr int64_t kMultiprocessors = 132;  // of an H100 or H200

// The first that fits is taken.
constexpr Choice kChoices[] = {
    {"forward", 90, 227, 2, 64, 0, kAny, 1024, {256, 64, 4, 4}, kAny, 0, 0, kMultiprocessors},
    {"forward", 90, 227, 2, 64, 0, kAny, kAnyLength, {192, 128, 3, 2}, kAny, 0, 0, kMultiprocessors},
    {"forward", 90, 227, 2, 64, kAny, kAny, kAnyLength, {128, 128, 2, 3}, kAny, kAny, 0},
    {"forward", 90, 227, 2, 64, 0, kAny, kAnyLength, {128, 96, 2, 3}, kAny, 0, 1},
    {"forward", 90, 227, 2, 64, 0, kAny, kAnyLength, {128, 48, 2, 3}},
    {"forward", 90, 227, 2, 64, kAny, kAny, kAnyLength, {128, 32, 2, 3}},
    {"forward", 90, 227, 2, 96, 0, kAny, kAnyLength, {192, 96, 3, 2}, 0, 0, 0, kMultiprocessors},
    {"forward", 90, 227, 2, 128, 1, 1, kAnyLength, {128, 64, 2, 2}, kAny, 1, 0},
    {"forward", 90, 227, 2, 128, kAny, 1, kAnyLength, {128, 96, 2, 2}, kAny, 1, 0},
    {"forward", 90, 227, 2, 128, 0, kAny, kAnyLength, {128, 128, 2, 2}, kAny, kAny, 0},
    {"forward", 90, 227, 2, 128, 1, kAny, kAnyLength, {128, 128, 2, 2}, kAny, 0, 0},
    {"forward", 90, 227, 2, 128, 1, kAny, kAnyLength, {128, 112, 2, 2}, kAny, 1, 0},
    {"forward", 90, 227, 2, 128, 0, kAny, kAnyLength, {128, 64, 2, 2}, kAny, 0, 1},
    {"forward", 90, 227, 2, 128, kAny, kAny, kAnyLength, {128, 32, 2, 2}},
    {"forward", 90, 227, 2, 192, kAny, 1, kAnyLength, {128, 48, 2, 2}, kAny, kAny, 0},
    {"forward", 90, 227, 2, 192, 0, kAny, kAnyLength, {128, 96, 2, 2}, kAny, kAny, 0},
    {"forward", 90, 227, 2, 192, 1, kAny, kAnyLength, {128, 64, 2, 2}, kAny, kAny, 0},
    {"forward", 90, 227, 2, 192, 0, kAny, kAnyLength, {128, 32, 2, 2}, kAny, kAny, 1},
    {"forward", 90, 227, 2, 192, kAny, kAny, kAnyLength, {128, 16, 2, 2}},
    {"forward", 90, 227, 2, 256, kAny, 1, kAnyLength, {128, 32, 2, 2}, kAny, kAny, 0},
    {"forward", 90, 227, 2, 256, 0, kAny, kAnyLength, {128, 64, 2, 2}, kAny, kAny, 0},
    {"forward", 90, 227, 2, 256, 1, kAny, kAnyLength, {128, 48, 2, 2}, kAny, kAny, 0},
    {"forward", 90, 227, 2, 256, 0, kAny, kAnyLength, {128, 32, 2, 2}, kAny, kAny, 1},
    {"forward", 90, 227, 2, 256, kAny, kAny, kAnyLength, {128, 16, 2, 2}, kAny, kAny, 1},
    // A bias may be so large that m + log l forgets l, which is all that this kernel has of both.
    {"backward", 90, 227, 2, 64, kAny, 0, kAnyLength, {128, 128, 2, 2}},
    {"backward", 90, 227, 2, 128, kAny, 0, kAnyLength, {64, 128, 2, 2}},
    {"backward", 90, 227, 2, 128, 0, 1, kAnyLength, {64, 128, 2, 2}, kAny, kAny, 0},
    {"backward", 90, 227, 2, 256, kAny, 0, kAnyLength, {64, 64, 2, 2}, kAny, kAny, 0},

    {"forward", 80, 99, 2, 64, kAny, 0, kAnyLength, {128, 64, 4, 2}},
    {"forward", 80, 99, 2, 64, kAny, kAny, kAnyLength, {64, 64, 4, 2}},
    {"forward", 80, 99, 2, 128, kAny, 0, kAnyLength, {128, 32, 4, 2}},
    {"forward", 80, 99, 2, 128, kAny, kAny, kAnyLength, {64, 32, 4, 2}},
    {"forward", 80, 227, 2, 256, kAny, 0, kAnyLength, {128, 64, 8, 2}},
    {"forward", 80, 99, 2, 256, kAny, kAny, kAnyLength, {64, 32, 4, 2}},
    {"forward", 80, 99, 4, 64, kAny, 0, kAnyLength, {128, 32, 4, 2}},
    {"forward", 80, 99, 4, 64, kAny, kAny, kAnyLength, {64, 32, 4, 2}},
    {"forward", 80, 163, 4, 128, kAny, 0, kAnyLength, {128, 32, 4, 2}, kAny, kAny, 2, 0, 0},
    {"forward", 80, 99, 4, 128, kAny, kAny, kAnyLength, {64, 32, 4, 2}},
    {"forward", 80, 227, 4, 256, kAny, 0, kAnyLength, {64, 32, 4, 2}},
    {"forward", 80, 163, 4, 256, kAny, kAny, kAnyLength, {64, 16, 4, 2}},
    {"forward", 80, 99, 4, 256, kAny, kAny, kAnyLength, {32, 16, 2, 2}},
    {"backward", 80, 227, 2, 64, 0, 0, kAnyLength, {128, 128, 8, 2}},
    {"backward", 80, 163, 2, 64, kAny, kAny, kAnyLength, {64, 64, 4, 2}},
    {"backward", 80, 99, 2, 64, kAny, kAny, kAnyLength, {64, 128, 8, 1}},
    {"backward", 80, 227, 2, 128, kAny, kAny, kAnyLength, {64, 128, 8, 2}},
    {"backward", 80, 163, 2, 128, kAny, 0, kAnyLength, {64, 128, 8, 1}},
    {"backward", 80, 163, 2, 128, kAny, kAny, kAnyLength, {32, 128, 8, 2}},
    {"backward", 80, 99, 2, 128, kAny, kAny, kAnyLength, {64, 64, 8, 1}},
    {"backward", 80, 227, 2, 256, kAny, kAny, kAnyLength, {64, 64, 8, 2}},
    {"backward", 80, 163, 2, 256, kAny, kAny, kAnyLength, {64, 64, 8, 1}},
    {"backward", 80, 99, 2, 256, kAny, kAny, kAnyLength, {32, 32, 8, 1}},
    {"backward", 80, 227, 4, 64, kAny, kAny, kAnyLength, {64, 128, 8, 2}},
    {"backward", 80, 163, 4, 64, kAny, kAny, kAnyLength, {64, 64, 8, 1}},
    {"backward", 80, 99, 4, 64, kAny, kAny, kAnyLength, {32, 64, 8, 1}},
    {"backward", 80, 227, 4, 128, kAny, kAny, kAnyLength, {32, 128, 8, 1}},
    {"backward", 80, 163, 4, 128, kAny, kAny, kAnyLength, {32, 64, 8, 1}},
    {"backward", 80, 99, 4, 128, kAny, kAny, kAnyLength, {32, 32, 8, 1}},
    {"backward", 80, 227, 4, 256, kAny, kAny, kAnyLength, {32, 64, 8, 1}},
    {"backward", 80, 163, 4, 256, kAny, kAny, kAnyLength, {32, 32, 8, 1}},
    {"backward", 80, 99, 4, 256, kAny, kAny, kAnyLength, {16, 16, 8, 1}},
    {"backward_query", 80, 99, 2, 64, kAny, kAny, kAnyLength, {128, 32, 4, 2}, kAny, kAny, 1},
    {"backward_query", 80, 99, 2, 128, kAny, kAny, kAnyLength, {128, 16, 4, 2}, kAny, kAny, 0},
    {"backward_query", 80, 99, 2, 128, kAny, kAny, kAnyLength, {64, 32, 4, 2}},
    {"backward_query", 80, 227, 2, 256, kAny, kAny, kAnyLength, {128, 32, 8, 2}, kAny, kAny, 1},
    {"backward_query", 80, 163, 2, 256, kAny, kAny, kAnyLength, {64, 32, 4, 2}},
    {"backward_query", 80, 99, 2, 256, kAny, kAny, kAnyLength, {64, 16, 4, 2}},
    {"backward_query", 80, 99, 4, 64, kAny, kAny, kAnyLength, {64, 32, 4, 2}},
    {"backward_query", 80, 99, 4, 128, kAny, kAny, kAnyLength, {64, 16, 4, 2}},
    {"backward_query", 80, 227, 4, 256, kAny, kAny, kAnyLength, {64, 16, 4, 2}},
    {"backward_query", 80, 163, 4, 256, kAny, kAny, kAnyLength, {32, 16, 2, 2}},
    {"backward_query", 80, 99, 4, 256, kAny, kAny, kAnyLength, {16, 16, 1, 2}},
    {"backward_bias", 80, 99, 2, 128, kAny, kAny, kAnyLength, {64, 64, 4, 1}},
    {"backward_bias", 80, 99, 2, 256, kAny, kAny, kAnyLength, {64, 32, 4, 1}},
    {"backward_bias", 80, 99, 4, 64, kAny, kAny, kAnyLength, {64, 64, 8, 1}},
    {"backward_bias", 80, 99, 4, 128, kAny, kAny, kAnyLength, {32, 32, 4, 1}},
    {"backward_bias", 80, 99, 4, 256, kAny, kAny, kAnyLength, {16, 32, 2, 1}},
};

int Bytes(const Problem& p) { return p.dtype == DType::kF32 ? 4 : 2; }

// What matters of a GPU.
struct Target {
  bool hopper;
  int shared;  // KiB that a block may have
};

// CUDA C++ Programming Guide, "Compute Capabilities".
int SharedOf(int capability) {
  if (capability == 80 || capability == 87) return 163;
  if (capability < 90 || capability >= 120) return 99;
  return 227;
}

// What every GPU has: CudaScratch must not depend on the GPU.
constexpr Target kAnyGpu = {false, 99};

const Choice& Choose(std::string_view kernel, const Target& target, const Problem& p) {
  const auto is = [](int wanted, bool there) { return wanted == kAny || wanted == int(there); };
  for (const Choice& choice : kChoices) {
    if (choice.kernel == kernel && (choice.sm == 80 || target.hopper) && choice.shared <= target.shared &&
        choice.bytes == Bytes(p) && std::max(p.qk_dim, p.v_dim) <= choice.dim && is(choice.dropout, p.dropout()) &&
        is(choice.full, p.full_precision) && is(choice.scores, p.bias.present || p.soft_cap > 0) &&
        p.kv_len <= choice.length && is(choice.causal, p.causal) &&
        is(choice.local, p.window_left >= 0 || p.window_right >= 0 || p.segments) &&
        p.bias.present + p.mask.present <= choice.operands &&
        p.batch * p.q_heads * DivideUp(p.q_len, choice.tile.rows) >= choice.parallel) {
      return choice;
    }
  }
  throw std::invalid_argument("head dims " + std::to_string(p.qk_dim) + " and " + std::to_string(p.v_dim) +
                              ": the kernel " + std::string(kernel) + " needs more than the " +
                              std::to_string(target.shared) + " KiB of shared memory that this GPU has");
}

// --- What a kernel is compiled for ---

Unit UnitOf(const Choice& choice, const Problem& p) {
  const bool backward = choice.kernel != "forward", main = choice.kernel == "backward";
  Unit unit = {std::string(choice.kernel) + "_sm" + std::to_string(choice.sm) + ".cuh", {}};
  const auto define = [&](const char* name, int64_t value) {
    unit.defines.push_back(std::string("JAX_FLASH_") + name + "=" + std::to_string(value));
  };
  define("DTYPE", int(p.dtype));
  define("BIAS_DTYPE", int(p.bias_dtype));
  define("QK_DIM", p.qk_dim);
  define("V_DIM", p.v_dim);
  define("CAUSAL", p.causal);
  define("WINDOW", p.window_left >= 0 || p.window_right >= 0);
  define("Q_LENGTHS", p.q_lengths);
  define("KV_LENGTHS", p.kv_lengths);
  define("SEGMENTS", p.segments);
  define("QUERY_OFFSET", p.query_offset);
  define("MASK", p.mask.present);
  define("SOFT_CAP", p.soft_cap > 0);
  define("DROPOUT", p.dropout());
  define("FULL_PRECISION", p.dtype == DType::kF32 && p.full_precision);
  define("POSITIVE_SCALE", p.scale > 0);
  define("DLOGSUMEXP", backward && p.dlogsumexp);
  define("DQ", main && SumsDQ(p));
  define("DK", main && p.dk);
  define("DV", main && p.dv);
  define("ROWS", choice.tile.rows);
  define("COLS", choice.tile.cols);
  define(choice.sm == 90 ? "CONSUMERS" : "WARPS", choice.tile.groups);
  define("STAGES", choice.tile.stages);
  return unit;
}

// Nothing in it depends on the problem: one cubin does for all.
Unit SegmentsUnit() {
  Unit unit = {"segments.cuh", {}};
  for (const char* define : {"DTYPE=2", "BIAS_DTYPE=0", "QK_DIM=64", "V_DIM=64", "CAUSAL=0", "WINDOW=0", "Q_LENGTHS=0",
                             "KV_LENGTHS=0", "SEGMENTS=1", "QUERY_OFFSET=0", "MASK=0", "SOFT_CAP=0", "DROPOUT=0",
                             "FULL_PRECISION=0", "POSITIVE_SCALE=1", "DLOGSUMEXP=0", "DQ=0", "DK=0", "DV=0"}) {
    unit.defines.push_back(std::string("JAX_FLASH_") + define);
  }
  return unit;
}

// --- Scratch ---

constexpr int64_t kRowPadding = 128;  // of scratch arrays: no tile of the backward has more queries

// A tile of dbias is one block's, which adds up all tiles of S that the bias is broadcast over; where few tiles have
// much to add up, they are divided into parts.
struct BiasWork {
  int64_t tiles, elements, parts;
};

BiasWork BiasWorkOf(const Problem& p) {
  constexpr int64_t kBlocks = 512;  // enough for any GPU
  const Tile& tile = Choose("backward_bias", kAnyGpu, p).tile;
  BiasWork work = {1, 1, 1};
  int64_t summed = 1;  // tiles of S
  const auto dimension = [&](bool own, int64_t size, int64_t step) {
    (own ? work.tiles : summed) *= DivideUp(size, step);
    if (own) work.elements *= size;
  };
  dimension(p.bias.batch, p.batch, 1);
  dimension(p.bias.heads, p.q_heads, 1);
  dimension(p.bias.rows, p.q_len, tile.rows);
  dimension(p.bias.columns, p.kv_len, tile.cols);
  work.parts = std::min(summed, DivideUp(kBlocks, work.tiles));
  return work;
}

// --- Launches ---

int Add(Unit unit, Plan* plan) {
  plan->units.push_back(std::move(unit));
  return int(plan->units.size()) - 1;
}

void AddSegments(const Problem& p, Plan* plan) {
  const int64_t blocks = p.batch * (DivideUp(p.q_len, 64) + DivideUp(p.kv_len, 64));
  plan->launches.push_back({Add(SegmentsUnit(), plan), "jax_flash_segments", blocks, 128});
}

// The kernel that a file is named after: a block for each of `tiles`, or on sm_90 for each multiprocessor.
Launch MainLaunch(const Choice& choice, int unit, int64_t tiles, std::vector<Map> maps) {
  const bool hopper = choice.sm == 90;
  Launch launch = {unit, "jax_flash_" + std::string(choice.kernel), tiles,
                   hopper ? 128 * (choice.tile.groups + 1) : 32 * choice.tile.groups};
  launch.persistent = hopper;
  launch.dynamic_shared = true;
  if (hopper) launch.maps = std::move(maps);
  return launch;
}

void AddForward(const Target& target, const Problem& p, Plan* plan) {
  const Choice& choice = Choose("forward", target, p);
  const Tile& tile = choice.tile;
  plan->launches.push_back(
      MainLaunch(choice, Add(UnitOf(choice, p), plan), p.batch * p.q_heads * DivideUp(p.q_len, tile.rows),
                 {{Mapped::kQuery, 64}, {Mapped::kKey, tile.cols}, {Mapped::kValue, tile.cols}, {Mapped::kO, 64}}));
}

// Of backward_prepare.cuh.
Launch PrepareLaunch(const Problem& p, int unit) {
  int64_t lanes = 1;  // of a row
  while (lanes * 8 < p.v_dim) lanes *= 2;
  const int64_t threads = p.batch * p.q_heads * RoundUp(p.q_len, kRowPadding) * lanes;
  return {unit, "jax_flash_backward_prepare", DivideUp(threads, 256), 256};
}

void AddBackward(const Target& target, const Problem& p, Plan* plan) {
  const int64_t heads = p.batch * p.q_heads;
  bool prepared = false;  // by backward_prepare.cuh
  if (p.dk || p.dv || SumsDQ(p)) {
    const Choice& choice = Choose("backward", target, p);
    const Tile& tile = choice.tile;
    const int unit = Add(UnitOf(choice, p), plan);
    const int64_t rows = heads * RoundUp(p.q_len, tile.rows);
    prepared = choice.sm == 80;
    plan->launches.push_back(prepared ? PrepareLaunch(p, unit)
                                      : Launch{unit, "jax_flash_backward_prepare", rows / 32, 256});
    // On Hopper, CTAs of 64 keys come in pairs.
    const int64_t columns = prepared ? p.kv_len : RoundUp(p.kv_len, 128);
    plan->launches.push_back(MainLaunch(choice, unit, p.batch * p.kv_heads * DivideUp(columns, tile.cols),
                                        {{Mapped::kQuery, tile.rows},
                                         {Mapped::kKey, tile.cols},
                                         {Mapped::kValue, tile.cols},
                                         {Mapped::kDO, tile.rows},
                                         {Mapped::kDK, 64},
                                         {Mapped::kDV, 64}}));
    if (SumsDQ(p)) {
      const int64_t blocks = choice.sm == 90 ? rows / 64 : DivideUp(heads * DivideUp(p.q_len, 16) * p.qk_dim, 256);
      plan->launches.push_back({unit, "jax_flash_backward_finish", blocks, 256});
    }
  }
  if (p.dq && !SumsDQ(p)) {
    const Choice& choice = Choose("backward_query", target, p);
    const int unit = Add(UnitOf(choice, p), plan);
    plan->launches.push_back(MainLaunch(choice, unit, heads * DivideUp(p.q_len, choice.tile.rows), {}));
  }
  if (p.dbias) {
    const Choice& choice = Choose("backward_bias", kAnyGpu, p);
    const int unit = Add(UnitOf(choice, p), plan);
    const BiasWork work = BiasWorkOf(p);
    if (!prepared) plan->launches.push_back(PrepareLaunch(p, unit));
    plan->launches.push_back(MainLaunch(choice, unit, work.tiles * work.parts, {}));
    if (work.parts > 1) {
      plan->launches.push_back({unit, "jax_flash_backward_bias_finish", DivideUp(work.elements, 256), 256});
    }
  }
}

}  // namespace

std::string CudaRefusal(const Problem& p) {
  const auto sized = [](const char* name, int64_t size) { return std::string(name) + " " + std::to_string(size); };
  if (p.dtype == DType::kF64) return "float64: the CUDA kernels do float16, bfloat16 and float32";
  for (const int64_t dim : {p.qk_dim, p.v_dim}) {
    if (dim % 8 != 0 || dim < 8 || dim > 256) {
      return sized("head dim", dim) + ": the CUDA kernels do multiples of 8 up to 256";
    }
  }
  if (std::max(p.q_len, p.kv_len) > kMaxSize - 512) return "a length of 2^31 or more";
  if (p.batch * p.q_heads > 0 && DivideUp(std::max(p.q_len, p.kv_len), 16) > kMaxSize / p.batch / p.q_heads) {
    return "batch x heads x length is too large for the CUDA kernels";
  }
  return "";
}

bool NothingToCompute(const Problem& p) { return p.batch == 0 || p.q_heads == 0 || p.q_len == 0 || p.kv_len == 0; }

Scratch CudaScratch(const Problem& p, Pass pass) {
  Scratch scratch;
  if (!CudaRefusal(p).empty()) return scratch;
  const auto take = [&](int64_t bytes) {
    const int64_t at = scratch.bytes;
    scratch.bytes += RoundUp(bytes, 256);
    return at;
  };
  if (NothingToCompute(p)) return scratch;
  if (p.segments) {
    scratch.q_bounds = take(p.batch * DivideUp(p.q_len, 64) * int64_t(sizeof(SegmentBounds)));
    scratch.kv_bounds = take(p.batch * DivideUp(p.kv_len, 64) * int64_t(sizeof(SegmentBounds)));
  }
  if (pass == Pass::kBackward) {
    const int64_t rows = p.batch * p.q_heads * RoundUp(p.q_len, kRowPadding);
    if (p.dk || p.dv || SumsDQ(p) || p.dbias) {
      scratch.logsumexp = take(4 * rows);
      scratch.d = take(4 * rows);
    }
    if (SumsDQ(p)) scratch.dq_sum = take(4 * rows * p.qk_dim);
    if (p.dbias) {
      const BiasWork work = BiasWorkOf(p);
      scratch.parts = int(work.parts);
      if (work.parts > 1) scratch.dbias_parts = take(4 * work.parts * work.elements);
    }
  }
  return scratch;
}

std::string ArchOf(int major, int minor) {
  const Nvrtc& nvrtc = CudaNvrtc();
  const int capability = 10 * major + minor;
  int best = 0;  // a cubin runs on later GPUs of the same major capability
  for (const int arch : nvrtc.archs) {
    if (arch / 10 == major && arch <= capability) best = std::max(best, arch);
  }
  const std::string text = std::to_string(major) + "." + std::to_string(minor);
  if (major < 8) throw std::invalid_argument("a GPU of compute capability " + text + ": the kernels need 8.0 or later");
  if (best == 0) {
    throw std::invalid_argument("NVRTC " + std::to_string(nvrtc.major) + "." + std::to_string(nvrtc.minor) + " (" +
                                nvrtc.path + ") does not compile for a GPU of compute capability " + text +
                                ": install a newer one (pip install --upgrade nvidia-cuda-nvrtc)");
  }
  return "sm_" + std::to_string(best) + (best == 90 ? "a" : "");
}

Plan MakePlan(const Problem& p, Pass pass, const std::string& arch) {
  const std::string refusal = CudaRefusal(p);
  if (!refusal.empty()) throw std::invalid_argument(refusal + ". implementation=\"xla\" has no such limit");
  const int capability = std::atoi(arch.c_str() + arch.find('_') + 1);
  if (capability < 80) throw std::invalid_argument(arch + ": the kernels need compute capability 8.0 or later");
  const char* const forced = std::getenv("JAX_FLASH_CUDA_KERNELS");
  if (forced && forced != std::string("sm80")) {
    throw std::invalid_argument("JAX_FLASH_CUDA_KERNELS=" + std::string(forced) + " is not known: only sm80 is");
  }
  const Target target = {capability == 90 && !forced, SharedOf(capability)};
  Plan plan;
  if (NothingToCompute(p)) return plan;
  if (p.segments) AddSegments(p, &plan);
  if (pass == Pass::kForward) AddForward(target, p, &plan);
  if (pass == Pass::kBackward) AddBackward(target, p, &plan);
  return plan;
}

}  // namespace jax_flash
