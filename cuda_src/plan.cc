#include "cuda_src/plan.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <stdexcept>

#include "cuda_src/driver.h"
#include "cuda_src/kernels/params.h"

namespace jax_flash {
namespace {

constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();

int64_t DivideUp(int64_t x, int64_t y) { return (x + y - 1) / y; }
int64_t RoundUp(int64_t x, int64_t y) { return DivideUp(x, y) * y; }

// --- Tiles. The first row that fits is taken.
// --------------------------------------------------------------------------

enum class Family { kSm80, kSm90 };
enum class Kernel { kForward, kBackward, kBackwardQuery, kBackwardBias };

struct Tile {
  int rows, cols;  // queries and keys
  int groups;      // warps (sm80), or warpgroups beside the producer's (sm90)
  int stages;
};

constexpr int kAny = -1;

struct Choice {
  Family family;
  Kernel kernel;
  int bytes;       // of an element
  int dim;         // the larger head dim is at most this
  int dropout;     // 0, 1 or kAny
  int scores;      // likewise: is there a bias or soft cap?
  int64_t length;  // keys are at most this
  Tile tile;
};

constexpr int64_t kAnyLength = kMaxSize;

constexpr Choice kChoices[] = {
    {Family::kSm90, Kernel::kForward, 2, 64, 0, kAny, 1024, {256, 64, 4, 4}},
    {Family::kSm90, Kernel::kForward, 2, 64, 0, kAny, kAnyLength, {192, 128, 3, 2}},
    {Family::kSm90, Kernel::kForward, 2, 64, 1, kAny, kAnyLength, {128, 128, 2, 3}},
    {Family::kSm90, Kernel::kForward, 2, 128, kAny, kAny, kAnyLength, {128, 128, 2, 2}},
    {Family::kSm90, Kernel::kForward, 2, 256, 0, kAny, kAnyLength, {128, 64, 2, 2}},
    {Family::kSm90, Kernel::kForward, 2, 256, 1, kAny, kAnyLength, {128, 80, 2, 2}},
    {Family::kSm90, Kernel::kBackward, 2, 64, kAny, 0, kAnyLength, {128, 128, 2, 2}},
    {Family::kSm90, Kernel::kBackward, 2, 128, kAny, kAny, kAnyLength, {64, 128, 2, 2}},
    {Family::kSm90, Kernel::kBackward, 2, 256, kAny, kAny, kAnyLength, {64, 64, 2, 2}},

    {Family::kSm80, Kernel::kForward, 2, 64, kAny, kAny, kAnyLength, {128, 64, 4, 2}},
    {Family::kSm80, Kernel::kForward, 2, 128, kAny, kAny, kAnyLength, {128, 64, 4, 2}},
    {Family::kSm80, Kernel::kForward, 2, 256, kAny, kAny, kAnyLength, {64, 32, 4, 2}},
    {Family::kSm80, Kernel::kForward, 4, 64, kAny, kAny, kAnyLength, {64, 64, 4, 2}},
    {Family::kSm80, Kernel::kForward, 4, 128, kAny, kAny, kAnyLength, {64, 32, 4, 2}},
    {Family::kSm80, Kernel::kForward, 4, 256, kAny, kAny, kAnyLength, {64, 16, 4, 2}},
    {Family::kSm80, Kernel::kBackward, 2, 64, kAny, kAny, kAnyLength, {64, 128, 8, 2}},
    {Family::kSm80, Kernel::kBackward, 2, 128, kAny, kAny, kAnyLength, {64, 64, 8, 2}},
    {Family::kSm80, Kernel::kBackward, 2, 256, kAny, kAny, kAnyLength, {32, 64, 8, 1}},
    {Family::kSm80, Kernel::kBackward, 4, 64, kAny, kAny, kAnyLength, {64, 64, 8, 1}},
    {Family::kSm80, Kernel::kBackward, 4, 128, kAny, kAny, kAnyLength, {32, 32, 4, 1}},
    {Family::kSm80, Kernel::kBackward, 4, 256, kAny, kAny, kAnyLength, {16, 32, 4, 1}},
    {Family::kSm80, Kernel::kBackwardQuery, 2, 128, kAny, kAny, kAnyLength, {64, 64, 4, 2}},
    {Family::kSm80, Kernel::kBackwardQuery, 2, 256, kAny, kAny, kAnyLength, {64, 32, 4, 1}},
    {Family::kSm80, Kernel::kBackwardQuery, 4, 128, kAny, kAny, kAnyLength, {64, 32, 4, 1}},
    {Family::kSm80, Kernel::kBackwardQuery, 4, 256, kAny, kAny, kAnyLength, {32, 16, 2, 1}},
    {Family::kSm80, Kernel::kBackwardBias, 2, 128, kAny, kAny, kAnyLength, {64, 64, 4, 1}},
    {Family::kSm80, Kernel::kBackwardBias, 2, 256, kAny, kAny, kAnyLength, {64, 32, 4, 1}},
    {Family::kSm80, Kernel::kBackwardBias, 4, 128, kAny, kAny, kAnyLength, {32, 32, 2, 1}},
    {Family::kSm80, Kernel::kBackwardBias, 4, 256, kAny, kAny, kAnyLength, {32, 16, 2, 1}},
};

const char* FileOf(Family family, Kernel kernel) {
  switch (kernel) {
    case Kernel::kForward:
      return family == Family::kSm90 ? "forward_sm90.cuh" : "forward_sm80.cuh";
    case Kernel::kBackward:
      return family == Family::kSm90 ? "backward_sm90.cuh" : "backward_sm80.cuh";
    case Kernel::kBackwardQuery:
      return "backward_query_sm80.cuh";
    case Kernel::kBackwardBias:
      return "backward_bias_sm80.cuh";
  }
  return "";
}

int Bytes(const Problem& p) { return p.dtype == DType::kF32 ? 4 : 2; }

const Choice* Choose(Family family, Kernel kernel, const Problem& p) {
  for (const Choice& choice : kChoices) {
    if (choice.family == family && choice.kernel == kernel && choice.bytes == Bytes(p) &&
        std::max(p.qk_dim, p.v_dim) <= choice.dim && (choice.dropout == kAny || choice.dropout == int(p.dropout())) &&
        (choice.scores == kAny || choice.scores == int(p.bias.present || p.soft_cap > 0)) &&
        p.kv_len <= choice.length) {
      return &choice;
    }
  }
  return nullptr;
}

// The family's own choice, or where it has none sm80's.
const Choice& ChooseAny(Family family, Kernel kernel, const Problem& p) {
  const Choice* choice = Choose(family, kernel, p);
  if (!choice) choice = Choose(Family::kSm80, kernel, p);
  if (!choice) throw std::invalid_argument(std::string("there is no ") + FileOf(family, kernel) + " for this problem");
  return *choice;
}

// --- What a kernel is compiled for
// -------------------------------------------------------------------------------------

Unit UnitOf(const Choice& choice, const Problem& p) {
  const bool backward = choice.kernel != Kernel::kForward, main = choice.kernel == Kernel::kBackward;
  Unit unit = {FileOf(choice.family, choice.kernel), {}};
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
  define("DQ", main && p.dq && !p.deterministic);
  define("DK", main && p.dk);
  define("DV", main && p.dv);
  define("ROWS", choice.tile.rows);
  define("COLS", choice.tile.cols);
  define(choice.family == Family::kSm90 ? "CONSUMERS" : "WARPS", choice.tile.groups);
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

// --- Scratch
// -----------------------------------------------------------------------------------------------------------

constexpr int64_t kRowPadding = 128;  // of scratch arrays: no tile of the backward has more queries

bool SumsDQ(const Problem& p) { return p.dq && !p.deterministic; }

// A tile of dbias is one block's, which adds up all tiles of S that the bias is broadcast over; where few tiles have
// much to add up, they are divided into parts.
struct BiasWork {
  int64_t tiles, elements, parts;
};

BiasWork BiasWorkOf(const Problem& p) {
  constexpr int64_t kBlocks = 512;  // enough for any GPU
  const Tile& tile = ChooseAny(Family::kSm80, Kernel::kBackwardBias, p).tile;
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

// --- Launches
// ----------------------------------------------------------------------------------------------------------

void AddSegments(const Problem& p, Plan* plan) {
  if (!p.segments) return;
  plan->units.push_back(SegmentsUnit());
  plan->launches.push_back({int(plan->units.size()) - 1, "jax_flash_segments",
                            p.batch * (DivideUp(p.q_len, 64) + DivideUp(p.kv_len, 64)), 128});
}

// A kernel with tiles in shared memory: a block for each of `tiles`, or, on sm90, for each multiprocessor.
Launch TiledLaunch(const Choice& choice, int unit, const char* entry, int64_t tiles, std::vector<Map> maps) {
  const bool sm90 = choice.family == Family::kSm90;
  Launch launch = {unit, entry, tiles, sm90 ? 128 * (choice.tile.groups + 1) : 32 * choice.tile.groups};
  launch.persistent = sm90;
  launch.dynamic_shared = true;
  if (sm90) launch.maps = std::move(maps);
  return launch;
}

int AddUnit(const Choice& choice, const Problem& p, Plan* plan) {
  plan->units.push_back(UnitOf(choice, p));
  return int(plan->units.size()) - 1;
}

void AddForward(Family family, const Problem& p, Plan* plan) {
  const Choice& choice = ChooseAny(family, Kernel::kForward, p);
  const Tile& tile = choice.tile;
  plan->launches.push_back(TiledLaunch(
      choice, AddUnit(choice, p, plan), "jax_flash_forward", p.batch * p.q_heads * DivideUp(p.q_len, tile.rows),
      {{Mapped::kQuery, 64}, {Mapped::kKey, tile.cols}, {Mapped::kValue, tile.cols}, {Mapped::kO, 64}}));
}

// Of backward_prepare.cuh.
Launch PrepareLaunch(const Problem& p, int unit) {
  int64_t lanes = 1;  // of a row
  while (lanes * 8 < p.v_dim) lanes *= 2;
  return {unit, "jax_flash_backward_prepare",
          DivideUp(p.batch * p.q_heads * RoundUp(p.q_len, kRowPadding) * lanes, 256), 256};
}

// prepare -> backward -> finish. Returns whose it is.
Family AddBackwardMain(Family family, const Problem& p, Plan* plan) {
  const Choice& choice = ChooseAny(family, Kernel::kBackward, p);
  const Tile& tile = choice.tile;
  const int unit = AddUnit(choice, p, plan);
  const int64_t heads = p.batch * p.q_heads, rows = heads * RoundUp(p.q_len, tile.rows);
  const bool sm90 = choice.family == Family::kSm90;
  plan->launches.push_back(sm90 ? Launch{unit, "jax_flash_backward_prepare", rows / 32, 256} : PrepareLaunch(p, unit));
  plan->launches.push_back(TiledLaunch(choice, unit, "jax_flash_backward",
                                       p.batch * p.kv_heads * DivideUp(p.kv_len, tile.cols),
                                       {{Mapped::kQuery, tile.rows},
                                        {Mapped::kKey, tile.cols},
                                        {Mapped::kValue, tile.cols},
                                        {Mapped::kDO, tile.rows},
                                        {Mapped::kDK, 64},
                                        {Mapped::kDV, 64}}));
  if (SumsDQ(p)) {
    const int64_t blocks = sm90 ? rows / 64 : DivideUp(heads * DivideUp(p.q_len, 16) * p.qk_dim, 256);
    plan->launches.push_back({unit, "jax_flash_backward_finish", blocks, 256});
  }
  return choice.family;
}

void AddBackward(Family family, const Problem& p, Plan* plan) {
  bool prepared = false;  // by backward_prepare.cuh
  if (p.dk || p.dv || SumsDQ(p)) prepared = AddBackwardMain(family, p, plan) == Family::kSm80;
  if (p.dq && !SumsDQ(p)) {
    const Choice& choice = ChooseAny(Family::kSm80, Kernel::kBackwardQuery, p);
    plan->launches.push_back(TiledLaunch(choice, AddUnit(choice, p, plan), "jax_flash_backward_query",
                                         p.batch * p.q_heads * DivideUp(p.q_len, choice.tile.rows), {}));
  }
  if (p.dbias) {
    const Choice& choice = ChooseAny(Family::kSm80, Kernel::kBackwardBias, p);
    const int unit = AddUnit(choice, p, plan);
    const BiasWork work = BiasWorkOf(p);
    if (!prepared) plan->launches.push_back(PrepareLaunch(p, unit));
    plan->launches.push_back(TiledLaunch(choice, unit, "jax_flash_backward_bias", work.tiles * work.parts, {}));
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
  if (!refusal.empty()) throw std::invalid_argument(refusal);
  const int capability = std::atoi(arch.c_str() + arch.find('_') + 1);
  if (capability < 80)
    throw std::invalid_argument(arch + ": the kernels need a GPU of compute capability 8.0 or later");
  const char* const forced = std::getenv("JAX_FLASH_CUDA_KERNELS");
  if (forced && forced != std::string("sm80")) {
    throw std::invalid_argument("JAX_FLASH_CUDA_KERNELS=" + std::string(forced) + " is not known: only sm80 is");
  }
  const Family family = capability == 90 && Bytes(p) == 2 && !forced ? Family::kSm90 : Family::kSm80;
  Plan plan;
  if (NothingToCompute(p)) return plan;
  AddSegments(p, &plan);
  if (pass == Pass::kForward) AddForward(family, p, &plan);
  if (pass == Pass::kBackward) AddBackward(family, p, &plan);
  return plan;
}

}  // namespace jax_flash
