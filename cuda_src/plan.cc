#include "cuda_src/plan.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <numeric>
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

// What a problem may have and a choice of tiles may leave to others.
enum Feature : unsigned {
  kCausal = 1,
  kWindow = 2,
  kSegments = 65536,
  kLocal = kWindow | kSegments,
  kSoftCap = 4,
  kBias = 8,
  kMask = 16,
  kBiasAndMask = 32,  // both of them
  kDropout = 64,
  kFullPrecision = 128,  // f32 as three products of TF32
  kManyKeys = 256,       // more than 1024
  kFewTiles = 512,       // of all heads, than an H100 or H200 has multiprocessors
  kBlockMask = 1024,
  kManyRows = 2048,       // of a group's heads together, than a tile has
  kCrowdedBlocks = 4096,  // a block mask beside a window, segments, a mask or dropout
  kSeveral = 8192,        // of a window or segments, a mask and dropout more than one
  kUncommon = 16384,      // head dims that differ or are no multiples of 16
  kNarrow = 32768,        // head dims up to 128
  kOperands = kBias | kMask,
  kScores = kBias | kSoftCap,  // scores are formed entry by entry
};

struct Choice {
  int shared;  // KiB of shared memory that a block must be able to have
  int dim;     // the larger head dim is at most this
  Tile tile;
  unsigned without = 0;  // the problem has none of these features
};

// What may be chosen for a kernel, from the best to what does for all: {shared, dim, {rows, cols, groups, stages},
// without}. The first that fits is taken.

constexpr Choice kForwardSm90[] = {
    {227, 64, {256, 64, 4, 4}, kOperands | kDropout | kLocal | kManyKeys | kFewTiles},
    {227, 64, {192, 128, 3, 2}, kOperands | kDropout | kLocal | kSoftCap | kFewTiles},
    {227, 64, {256, 64, 4, 4}, kOperands | kDropout | kCausal | kFewTiles},
    {227, 64, {192, 112, 3, 2}, kOperands | kDropout | kLocal | kFewTiles},
    {227, 64, {128, 128, 2, 3}, kOperands | kDropout | kLocal | kBlockMask},
    {227, 64, {128, 128, 4, 4}, kOperands | kDropout | kSegments | kCrowdedBlocks},
    {227, 64, {128, 176, 2, 2}, kOperands | kCausal | kLocal | kBlockMask},
    {227, 64, {128, 128, 2, 3}, kOperands},
    {227, 64, {128, 96, 2, 3}, kBiasAndMask | kSeveral},
    {227, 64, {128, 64, 2, 3}, kSeveral},
    {227, 64, {128, 48, 2, 3}, kDropout},
    {227, 64, {128, 32, 2, 3}},
    {227, 96, {192, 96, 3, 2}, kOperands | kDropout | kLocal | kFewTiles},
    {227, 128, {128, 128, 2, 2}, kOperands},
    {227, 128, {128, 112, 2, 2}, kOperands},
    {227, 128, {128, 96, 2, 2}, kOperands},
    {227, 128, {128, 64, 2, 2}, kOperands},
    {227, 128, {128, 64, 2, 2}, kBiasAndMask | kSeveral},
    {227, 128, {128, 32, 2, 2}},
    {227, 192, {128, 96, 2, 2}, kOperands | kSeveral},
    {227, 192, {128, 64, 2, 2}, kOperands},
    {227, 192, {128, 48, 2, 2}, kOperands},
    {227, 192, {128, 32, 2, 2}, kBiasAndMask | kSeveral},
    {227, 192, {128, 32, 2, 2}, kBiasAndMask | kDropout},
    {227, 192, {128, 16, 2, 2}},
    {227, 256, {128, 64, 2, 2}, kOperands | kDropout},
    {227, 256, {128, 48, 2, 2}, kOperands},
    {227, 256, {128, 32, 2, 2}, kOperands},
    {227, 256, {128, 32, 2, 2}, kBiasAndMask | kSeveral},
    {227, 256, {128, 32, 2, 2}, kBiasAndMask | kDropout},
    {227, 256, {128, 16, 2, 2}, kBiasAndMask},
};

// TF32. What is not here would spill registers: above head dim 64 a mask with a bias or dropout.
constexpr Choice kForwardSm90F32[] = {
    {227, 64, {192, 64, 3, 3}, kFullPrecision | kOperands | kDropout | kLocal | kSoftCap | kBlockMask | kFewTiles},
    {227, 64, {128, 128, 2, 2}, kFullPrecision | kOperands | kDropout | kLocal | kSoftCap},
    {227, 64, {128, 64, 2, 3}, kFullPrecision | kOperands},
    {227, 64, {128, 64, 2, 3}, kFullPrecision | kMask | kDropout | kLocal | kBlockMask},
    {227, 64, {128, 32, 2, 3}, kFullPrecision},
    {227, 128, {128, 64, 2, 2}, kFullPrecision | kOperands | kDropout | kLocal},
    {227, 128, {128, 64, 2, 2}, kFullPrecision | kOperands | kDropout | kSoftCap | kBlockMask},
    {227, 128, {128, 32, 2, 2}, kFullPrecision | kMask},
    {227, 128, {128, 32, 2, 2}, kFullPrecision | kBiasAndMask | kDropout},
};

// What is not here would spill registers: a soft cap keeps its slopes beside P, and beside much else above head dim 96;
// a block mask does with a soft cap above 96, and always above 128. Tiles of 64 keys are for wide heads only.
constexpr Choice kBackwardSm90[] = {
    {227, 64, {128, 128, 2, 2}, kScores | kCrowdedBlocks},
    {227, 96, {64, 128, 2, 2}},
    {227, 128, {64, 128, 2, 2}, kSoftCap},
    {227, 128, {64, 128, 2, 2}, kOperands | kBlockMask},
    {227, 192, {64, 64, 2, 2}, kNarrow | kSoftCap | kBlockMask},
    {227, 192, {64, 64, 2, 2}, kNarrow | kOperands | kBlockMask},
    {227, 192, {64, 64, 2, 2}, kNarrow | kBias | kLocal | kBlockMask},
    {227, 256, {64, 64, 2, 2}, kNarrow | kSoftCap | kBias | kBlockMask},
    {227, 256, {64, 64, 2, 2}, kNarrow | kSoftCap | kDropout | kBlockMask},
};

// TF32. A soft cap would keep its slopes in 16 bits; crowded blocks, a bias beside a mask or a block mask, and one
// above head dim 96, would spill registers.
constexpr Choice kBackwardSm90F32[] = {
    {227, 64, {64, 128, 2, 2}, kFullPrecision | kSoftCap | kBias | kCrowdedBlocks},
    {227, 128, {64, 64, 2, 1}, kFullPrecision | kSoftCap | kBias | kCrowdedBlocks},
    {227, 96, {64, 64, 2, 1}, kFullPrecision | kSoftCap | kBiasAndMask | kBlockMask},
};

// The wide tiles of head dim 128 take all registers, and pay where two blocks of them fit on a multiprocessor.
constexpr Choice kForwardSm80[] = {
    {99, 64, {128, 64, 4, 2}, kScores},
    {99, 64, {64, 64, 4, 2}},
    {227, 128, {128, 64, 4, 2}, kScores | kBlockMask | kSeveral | kUncommon},
    {99, 128, {128, 32, 4, 2}, kScores | kCrowdedBlocks},
    {99, 128, {64, 32, 4, 2}},
    {227, 256, {128, 64, 8, 2}, kScores | kCrowdedBlocks},
    {99, 256, {64, 32, 4, 2}},
};

constexpr Choice kForwardSm80F32[] = {
    {227, 64, {256, 32, 8, 2}, kScores | kFewTiles},
    {99, 64, {128, 32, 4, 2}, kScores},
    {99, 64, {64, 32, 4, 2}},
    {227, 128, {256, 32, 8, 2}, kScores | kFullPrecision | kFewTiles},
    {163, 128, {128, 32, 4, 2}, kScores | kFullPrecision | kBlockMask},
    {99, 128, {64, 32, 4, 2}},
    {227, 256, {64, 32, 4, 2}, kScores},
    {163, 256, {64, 16, 4, 2}, kMask},
    {99, 256, {32, 16, 2, 2}},
};

// Rows are those of a group's heads together. (PartWorkOf says how many blocks a multiprocessor has.)
constexpr Choice kForwardSplitSm80[] = {
    {99, 64, {16, 64, 1, 2}, kManyRows},
    {99, 64, {32, 64, 2, 2}, kManyRows},
    {99, 64, {64, 64, 4, 3}, kManyRows},
    {99, 64, {128, 64, 4, 3}, kOperands | kSoftCap | kDropout},
    {99, 64, {64, 64, 4, 3}},
    {99, 128, {16, 32, 1, 3}, kManyRows},
    {99, 128, {32, 32, 2, 2}, kManyRows},
    {99, 128, {64, 32, 4, 3}, kManyRows},
    {99, 128, {128, 32, 4, 3}, kOperands | kSoftCap | kDropout},
    {99, 128, {64, 32, 4, 3}},
    {99, 256, {32, 16, 2, 2}, kManyRows},
    {99, 256, {64, 16, 4, 3}},
};

constexpr Choice kForwardSplitSm80F32[] = {
    {99, 64, {16, 32, 1, 3}, kManyRows}, {99, 64, {64, 32, 4, 3}},  {99, 128, {16, 16, 1, 2}, kManyRows},
    {99, 128, {64, 16, 4, 3}},           {99, 256, {16, 16, 1, 2}},
};

constexpr Choice kBackwardSm80[] = {
    {227, 64, {128, 128, 8, 2}, kScores | kDropout | kBlockMask},
    {163, 64, {64, 64, 4, 2}},
    {99, 64, {64, 128, 8, 1}},
    {227, 128, {64, 128, 8, 2}, kBlockMask},
    {163, 128, {64, 128, 8, 1}, kScores | kBlockMask},
    {163, 128, {32, 128, 8, 2}},
    {99, 128, {64, 64, 8, 1}},
    {227, 256, {64, 64, 8, 2}, kBlockMask},
    {163, 256, {64, 64, 8, 1}},
    {99, 256, {32, 32, 8, 1}},
};

constexpr Choice kBackwardSm80F32[] = {
    {227, 64, {64, 128, 8, 2}},  {163, 64, {64, 64, 8, 1}},  {99, 64, {32, 64, 8, 1}},
    {227, 128, {32, 128, 8, 1}}, {163, 128, {32, 64, 8, 1}}, {99, 128, {32, 32, 8, 1}},
    {227, 256, {32, 64, 8, 1}},  {163, 256, {32, 32, 8, 1}}, {99, 256, {16, 16, 8, 1}},
};

constexpr Choice kBackwardQuerySm80[] = {
    {99, 64, {128, 32, 4, 2}, kBiasAndMask},   {99, 128, {128, 16, 4, 2}, kOperands},      {99, 128, {64, 32, 4, 2}},
    {227, 256, {128, 32, 8, 2}, kBiasAndMask}, {163, 256, {64, 32, 4, 2}, kCrowdedBlocks}, {99, 256, {64, 16, 4, 2}},
};

constexpr Choice kBackwardQuerySm80F32[] = {
    {99, 64, {64, 32, 4, 2}},   {99, 128, {64, 16, 4, 2}}, {227, 256, {64, 16, 4, 2}},
    {163, 256, {32, 16, 2, 2}}, {99, 256, {16, 16, 1, 2}},
};

constexpr Choice kBackwardBiasSm80[] = {
    {99, 128, {64, 64, 4, 1}},
    {99, 256, {64, 32, 4, 1}},
};

constexpr Choice kBackwardBiasSm80F32[] = {
    {99, 64, {64, 64, 8, 1}},
    {99, 128, {32, 32, 4, 1}},
    {99, 256, {16, 32, 2, 1}},
};

struct Table {
  std::string_view kernel;
  int sm;     // 80: GPUs from compute capability 8.0 on; 90: 9.0 alone, where it comes before 80
  int bytes;  // of an element
  const Choice *begin, *end;

  template <size_t kCount>
  constexpr Table(std::string_view kernel, int sm, int bytes, const Choice (&choices)[kCount])
      : kernel(kernel), sm(sm), bytes(bytes), begin(choices), end(choices + kCount) {}
};

constexpr Table kTables[] = {
    {"forward", 90, 2, kForwardSm90},
    {"backward", 90, 2, kBackwardSm90},
    {"forward", 90, 4, kForwardSm90F32},
    {"backward", 90, 4, kBackwardSm90F32},
    {"forward", 80, 2, kForwardSm80},
    {"forward", 80, 4, kForwardSm80F32},
    {"forward_split", 80, 2, kForwardSplitSm80},
    {"forward_split", 80, 4, kForwardSplitSm80F32},
    {"backward", 80, 2, kBackwardSm80},
    {"backward", 80, 4, kBackwardSm80F32},
    {"backward_query", 80, 2, kBackwardQuerySm80},
    {"backward_query", 80, 4, kBackwardQuerySm80F32},
    {"backward_bias", 80, 2, kBackwardBiasSm80},
    {"backward_bias", 80, 4, kBackwardBiasSm80F32},
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

constexpr int64_t kMultiprocessors = 132;  // of an H100 or H200

// `tile`: the one that would be used.
unsigned FeaturesOf(const Problem& p, const Tile& tile) {
  const bool bias = p.bias.present, mask = p.mask.present;
  const auto feature = [](bool there, Feature x) { return there ? unsigned(x) : 0; };
  const bool local = p.window() || p.segments;
  return feature(p.causal, kCausal) | feature(p.window(), kWindow) | feature(p.segments, kSegments) |
         feature(p.soft_cap > 0, kSoftCap) | feature(bias, kBias) | feature(mask, kMask) |
         feature(bias && mask, kBiasAndMask) | feature(p.dropout(), kDropout) |
         feature(p.full_precision, kFullPrecision) | feature(p.kv_len > 1024, kManyKeys) |
         feature(p.block_mask.present, kBlockMask) |
         feature(p.block_mask.present && (local || mask || p.dropout()), kCrowdedBlocks) |
         feature(local + mask + p.dropout() > 1, kSeveral) |
         feature(p.qk_dim != p.v_dim || p.qk_dim % 16 != 0, kUncommon) |
         feature(std::max(p.qk_dim, p.v_dim) <= 128, kNarrow) |
         feature(p.batch * p.q_heads * DivideUp(p.q_len, tile.rows) < kMultiprocessors, kFewTiles) |
         feature(p.q_len * p.group() > tile.rows, kManyRows);
}

// Whether blocks of a block mask are whole tiles, as Hopper's kernels want them.
bool InWholeTiles(const Tile& tile, const Problem& p) {
  return !p.block_mask.present || (p.q_block % tile.rows == 0 && p.kv_block % tile.cols == 0);
}

// The tile, or as much of it as divides the blocks of a block mask. Where each warp has rows of its own, it has at
// least 16.
Tile WithinBlocks(Tile tile, std::string_view kernel, const Problem& p) {
  if (!p.block_mask.present) return tile;
  tile.rows = int(std::gcd(tile.rows, p.q_block));
  tile.cols = int(std::gcd(tile.cols, p.kv_block));
  if (kernel == "forward" || kernel == "backward_query") tile.groups = std::min(tile.groups, tile.rows / 16);
  return tile;
}

// T or S in whole blocks if there is a block mask.
int64_t InBlocks(int64_t size, int64_t block) { return block > 0 ? RoundUp(size, block) : size; }
int64_t RowTiles(const Problem& p, const Tile& tile) { return DivideUp(InBlocks(p.q_len, p.q_block), tile.rows); }
int64_t ColumnTiles(const Problem& p, const Tile& tile) { return DivideUp(InBlocks(p.kv_len, p.kv_block), tile.cols); }

// A kernel's file and tiles.
struct Chosen {
  std::string_view kernel;
  int sm;
  Tile tile;
};

Chosen Choose(std::string_view kernel, const Target& target, const Problem& p) {
  for (const Table& table : kTables) {
    if (table.kernel != kernel || table.bytes != Bytes(p) || (table.sm == 90 && !target.hopper)) continue;
    const Choice* const choice = std::find_if(table.begin, table.end, [&](const Choice& x) {
      return x.shared <= target.shared && std::max(p.qk_dim, p.v_dim) <= x.dim &&
             (x.without & FeaturesOf(p, x.tile)) == 0 && (table.sm == 80 || InWholeTiles(x.tile, p));
    });
    if (choice != table.end) return {kernel, table.sm, WithinBlocks(choice->tile, kernel, p)};
  }
  throw std::invalid_argument("head dims " + std::to_string(p.qk_dim) + " and " + std::to_string(p.v_dim) +
                              ": the kernel " + std::string(kernel) + " needs more than the " +
                              std::to_string(target.shared) + " KiB of shared memory that this GPU has");
}

// Whether a part of the GPU would have nothing to do with the tiles of keys that Hopper's backward has, in pairs if
// causal. (More than a sixth of the time.)
bool LeavesIdle(const Problem& p) {
  const int64_t items = DivideUp(p.batch * p.kv_heads * DivideUp(p.kv_len, 128), p.causal ? 2 : 1);
  return 6 * items < 5 * RoundUp(items, kMultiprocessors);
}

// Whether Hopper's backward does what comes before and after it alongside (backward_alongside_sm90.cuh). Three warps a
// block have to keep up: they do where a row has many keys, or all rows are prepared at once. Not where registers are
// few, beside three masks or dropout and two, or some would be spilled. Heads of Q that share keys are computed one by
// one then, or too many would be under way at a time: which is worth it where they are few. The lists of a block mask
// are taken head by head, and a long one would hold up the heads after its own.
bool Alongside(const Problem& p) {
  const bool few = p.batch * p.q_heads * DivideUp(p.q_len, 64) <= 3 * kMultiprocessors, listed = p.block_mask.present;
  const int64_t keys = listed ? (p.row_list - 2) * p.kv_block : p.kv_len;  // of a row
  if (!few && (keys < 512 || p.q_len > 2 * p.kv_len)) return false;
  const bool narrow = std::max(p.qk_dim, p.v_dim) <= 64;
  const bool long_lists = listed && (p.column_list - 2) * p.q_block > 2048;
  const int masks = p.causal + p.window() + p.segments + (p.q_lengths || p.kv_lengths);
  if (masks + p.query_offset + (p.dropout() ? 1 + p.dlogsumexp : 0) > 2) return false;
  if (listed && (p.group() > 1 || masks > 0 || long_lists || (p.dropout() && !narrow))) return false;
  const bool shared_keys = p.group() > 1 && narrow;
  if (p.dropout() && (p.segments || p.window() || shared_keys)) return false;
  if (p.group() > 1 && !LeavesIdle(p)) return false;
  return Bytes(p) == 2 && std::max(p.qk_dim, p.v_dim) <= 128 && p.soft_cap <= 0 && !p.bias.present && !p.mask.present &&
         SumsDQ(p);
}

// Whether heads of Q that share keys are then computed one by one, and their dK and dV added up in f32: for so many
// keys of all heads of K, in whole tiles.
bool SumsKV(const Problem& p) { return p.group() > 1 && Alongside(p); }
int64_t SummedKeys(const Problem& p) { return p.batch * p.kv_heads * RoundUp(p.kv_len, 128); }

// Whether Hopper's backward walks heads of Q that share keys together: of larger groups, the rows that CTAs are at
// would not fit into the L2. (With masks of wide heads it would spill registers.)
bool Together(const Problem& p) {
  const bool crowded = std::max(p.qk_dim, p.v_dim) > 128 && (p.mask.present || p.bias.present);
  return p.causal && p.group() > 4 && !p.block_mask.present && !crowded;
}

// --- What a kernel is compiled for ---

constexpr int kSegmentThreads = 1024, kMergeThreads = 256;  // of a block
constexpr int kSegmentBlocks = 4;                           // of 64 positions, which a block finds the bounds of

void Define(Unit* unit, const char* name, int64_t value) {
  unit->defines.push_back(std::string("JAX_FLASH_") + name + "=" + std::to_string(value));
}

// What config.cuh reads. `kernel`: its file's name without the architecture.
Unit UnitOf(const std::string& file, std::string_view kernel, const Problem& p) {
  const bool split = kernel == "forward_split", main = kernel == "backward",
             backward = kernel.substr(0, 8) == "backward";
  Unit unit = {file, {}};
  const auto define = [&](const char* name, int64_t value) { Define(&unit, name, value); };
  define("DTYPE", int(p.dtype));
  define("BIAS_DTYPE", int(p.bias_dtype));
  define("QK_DIM", p.qk_dim);
  define("V_DIM", p.v_dim);
  define("CAUSAL", p.causal);
  define("WINDOW", p.window());
  define("Q_LENGTHS", p.q_lengths);
  define("KV_LENGTHS", p.kv_lengths);
  define("SEGMENTS", p.segments);
  define("QUERY_OFFSET", p.query_offset);
  define("MASK", p.mask.present);
  define("Q_BLOCK", p.q_block);
  define("KV_BLOCK", p.kv_block);
  define("SOFT_CAP", p.soft_cap > 0);
  define("DROPOUT", p.dropout());
  define("FULL_PRECISION", p.dtype == DType::kF32 && p.full_precision);
  define("SPLIT", split ? p.group() : 0);
  define("DLOGSUMEXP", backward && p.dlogsumexp);
  define("DQ", main && SumsDQ(p));
  define("DK", main && p.dk);
  define("DV", main && p.dv);
  return unit;
}

Unit UnitOf(const Chosen& choice, const Problem& p) {
  const std::string file = std::string(choice.kernel) + "_sm" + std::to_string(choice.sm) + ".cuh";
  Unit unit = UnitOf(file, choice.kernel, p);
  Define(&unit, "ROWS", choice.tile.rows);
  Define(&unit, "COLS", choice.tile.cols);
  Define(&unit, choice.sm == 90 ? "CONSUMERS" : "WARPS", choice.tile.groups);
  Define(&unit, "STAGES", choice.tile.stages);
  if (choice.kernel == "forward_split") Define(&unit, "MERGE_THREADS", kMergeThreads);
  if (choice.kernel == "backward" && choice.sm == 90) {
    Define(&unit, "ALONGSIDE", Alongside(p));
    Define(&unit, "SUM_KV", SumsKV(p));
    Define(&unit, "TOGETHER", !Alongside(p) && Together(p));
  }
  return unit;
}

// Nothing in it depends on the problem: one cubin does for all.
Unit SegmentsUnit() {
  Problem any;
  any.dtype = DType::kBF16;
  any.qk_dim = any.v_dim = 64;
  any.segments = true;
  Unit unit = UnitOf("segments.cuh", "segments", any);
  Define(&unit, "THREADS", kSegmentThreads);
  Define(&unit, "BLOCKS", kSegmentBlocks);
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
  const Tile tile = Choose("backward_bias", kAnyGpu, p).tile;
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

// Few queries and many keys: with a block for a tile of Q most of the GPU would have nothing to do, or read the keys
// once for each head of a group. Not with a block mask, which the heads of a group need not share.
bool FewQueries(const Problem& p) {
  const bool few = p.q_len <= 16 || (p.q_len <= 64 && p.batch * p.q_heads < kMultiprocessors);
  return few && p.kv_len >= 1024 && !p.block_mask.present;
}

struct PartWork {
  int64_t rows, tiles, parts;  // of Q: its rows, in all heads, and their tiles; of the keys
};

// Enough parts for two blocks on every multiprocessor of an H100 or H200, or for four where these are small and parts
// few enough to be merged quickly, if a part has 4 tiles of keys or more. So 64 KB or more of K and V are on their way
// to a multiprocessor; HBM needs 40 to 60. The merge has a thread for each part.
PartWork PartWorkOf(const Problem& p) {
  const Tile tile = Choose("forward_split", kAnyGpu, p).tile;
  constexpr int64_t kFew = kMultiprocessors / 2, kMost = kMergeThreads;
  const int64_t tiles = p.batch * p.kv_heads * DivideUp(p.q_len * p.group(), tile.rows);
  const int64_t two = 2 * kMultiprocessors / tiles, four = tile.rows <= 32 ? 2 * two : 0;
  const int64_t parts = std::min({std::max(two, std::min(four, kFew)), p.kv_len / (4 * tile.cols), kMost});
  return {p.batch * p.q_heads * p.q_len, tiles, std::max<int64_t>(parts, 1)};
}

// Their forward is one over parts of the keys. Where a part has all keys and one head there is nothing to merge: the
// forward over all keys does it, with the same tiles.
bool SplitsKeys(const Problem& p) { return FewQueries(p) && (p.group() > 1 || PartWorkOf(p).parts > 1); }

// --- Launches ---

int Add(Unit unit, Plan* plan) {
  plan->units.push_back(std::move(unit));
  return int(plan->units.size()) - 1;
}

void AddSegments(const Problem& p, Plan* plan) {
  const int64_t positions = 64 * kSegmentBlocks;
  const int64_t blocks = p.batch * (DivideUp(p.q_len, positions) + DivideUp(p.kv_len, positions));
  plan->launches.push_back({Add(SegmentsUnit(), plan), "jax_flash_segments", blocks, kSegmentThreads});
}

// The kernel that a file is named after: a block for each of `tiles`, or on sm_90 for each multiprocessor.
Launch MainLaunch(const Chosen& choice, int unit, int64_t tiles, std::vector<Map> maps) {
  const bool hopper = choice.sm == 90;
  Launch launch = {unit, "jax_flash_" + std::string(choice.kernel), tiles,
                   hopper ? 128 * (choice.tile.groups + 1) : 32 * choice.tile.groups};
  launch.persistent = hopper;
  launch.dynamic_shared = true;
  if (hopper) launch.maps = std::move(maps);
  return launch;
}

void AddForward(const Target& target, const Problem& p, Plan* plan) {
  if (SplitsKeys(p)) {
    const Chosen choice = Choose("forward_split", kAnyGpu, p);
    const int unit = Add(UnitOf(choice, p), plan);
    const PartWork work = PartWorkOf(p);
    plan->launches.push_back(MainLaunch(choice, unit, work.tiles * work.parts, {}));
    plan->launches.back().entry = "jax_flash_forward";
    plan->launches.push_back({unit, "jax_flash_forward_merge", work.rows, kMergeThreads});
    return;
  }
  const Chosen choice =
      FewQueries(p) ? Chosen{"forward", 80, Choose("forward_split", kAnyGpu, p).tile} : Choose("forward", target, p);
  const Tile& tile = choice.tile;
  plan->launches.push_back(
      MainLaunch(choice, Add(UnitOf(choice, p), plan), p.batch * p.q_heads * RowTiles(p, tile),
                 {{Mapped::kQuery, 64}, {Mapped::kKey, tile.cols}, {Mapped::kValue, tile.cols}, {Mapped::kO, 64}}));
}

// Of how many heads Hopper's backward computes tiles of keys at a time.
int64_t HeadsAtATime(const Problem& p) {
  return std::min(p.batch * p.q_heads, kMultiprocessors / DivideUp(p.kv_len, 128) + 1);
}

// For how many it uses scratch if it does all alongside: four times as many, some before and some after; or six times,
// where not all tiles are computed and it takes less time.
int64_t HeadsInScratch(const Problem& p) {
  return std::min(p.batch * p.q_heads, (p.causal || p.block_mask.present ? 6 : 4) * HeadsAtATime(p));
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
    const Chosen choice = Choose("backward", target, p);
    const Tile& tile = choice.tile;
    const int unit = Add(UnitOf(choice, p), plan);
    const int64_t rows = heads * RoundUp(p.q_len, tile.rows);
    prepared = choice.sm == 80;
    const bool alongside = choice.sm == 90 && Alongside(p);
    if (!alongside) {
      plan->launches.push_back(prepared ? PrepareLaunch(p, unit)
                                        : Launch{unit, "jax_flash_backward_prepare", rows / 64, 256});
    }
    std::vector<Map> maps = {{Mapped::kQuery, tile.rows}, {Mapped::kKey, tile.cols}, {Mapped::kValue, tile.cols},
                             {Mapped::kDO, tile.rows},    {Mapped::kDK, 64},         {Mapped::kDV, 64}};
    if (alongside) maps.insert(maps.end(), {{Mapped::kO, 16}, {Mapped::kDO, 16}, {Mapped::kDQ, 16}});
    // On Hopper, CTAs of 64 keys come in pairs.
    const int64_t tiles = prepared ? ColumnTiles(p, tile) : RoundUp(InBlocks(p.kv_len, p.kv_block), 128) / tile.cols;
    const int64_t tiled_heads = p.batch * (alongside ? p.q_heads : p.kv_heads);
    plan->launches.push_back(MainLaunch(choice, unit, tiled_heads * tiles, std::move(maps)));
    if (choice.sm == 90 && SumsKV(p) && (p.dk || p.dv)) {
      plan->launches.push_back({unit, "jax_flash_backward_finish_keys", SummedKeys(p) / 64, 256});
    }
    if (SumsDQ(p) && !alongside) {
      const int64_t blocks = choice.sm == 90 ? rows / 64 : DivideUp(heads * DivideUp(p.q_len, 16) * p.qk_dim, 256);
      plan->launches.push_back({unit, "jax_flash_backward_finish", blocks, 256});
    }
  }
  if (p.dq && !SumsDQ(p)) {
    const Chosen choice = Choose("backward_query", target, p);
    const int unit = Add(UnitOf(choice, p), plan);
    plan->launches.push_back(MainLaunch(choice, unit, heads * RowTiles(p, choice.tile), {}));
  }
  if (p.dbias) {
    const Chosen choice = Choose("backward_bias", kAnyGpu, p);
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
  const int64_t longest = std::max(InBlocks(p.q_len, p.q_block), InBlocks(p.kv_len, p.kv_block));
  if (longest > kMaxSize - 512) return sized("length", longest) + ": at most " + std::to_string(kMaxSize - 512);
  if (p.batch * p.q_heads > 0 && DivideUp(longest, 16) > kMaxSize / p.batch / p.q_heads) {
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
  const bool alongside = pass == Pass::kBackward && Alongside(p);
  const int64_t first_zero = scratch.bytes;
  if (alongside || p.block_mask.present) scratch.taken = take(4 * (alongside ? 2 + 2 * p.batch * p.q_heads : 1));
  if (pass == Pass::kBackward && SumsKV(p)) {
    if (p.dk) scratch.dk_sum = take(4 * SummedKeys(p) * p.qk_dim);
    if (p.dv) scratch.dv_sum = take(4 * SummedKeys(p) * p.v_dim);
  }
  scratch.zero_bytes = scratch.bytes - first_zero;
  if (pass == Pass::kForward && SplitsKeys(p)) {
    const PartWork work = PartWorkOf(p);
    scratch.parts = int(work.parts);
    scratch.o_parts = take(4 * work.parts * work.rows * p.v_dim);
    scratch.l_parts = take(4 * work.parts * work.rows);
    scratch.m_parts = take(4 * work.parts * work.rows);
  }
  if (pass == Pass::kBackward) {
    const int64_t rows = p.batch * p.q_heads * RoundUp(p.q_len, kRowPadding);
    if (alongside) scratch.heads = int(HeadsInScratch(p)), scratch.last_heads = int(HeadsAtATime(p));
    if (p.dk || p.dv || SumsDQ(p) || p.dbias) {
      scratch.logsumexp = take(4 * rows);
      scratch.d = take(4 * rows);
    }
    if (p.bias.present && (p.dk || p.dv || SumsDQ(p))) scratch.maximum = take(4 * rows);
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
