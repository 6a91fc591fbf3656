// The Ampere family: kernels with mma.sync and cp.async, for every GPU from compute capability 8.0 on.
#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "cuda_src/plan/family.h"
#include "cuda_src/plan/mask_blocks.h"
#include "cuda_src/plan/table.h"

namespace jax_flash {
namespace {

// --- Tiles ---

// At head dim 128, tiles of 128 queries need all registers. They are faster if two CTAs fit on an SM.
constexpr Row kForward[] = {
    {99, 64, {128, 64, 4, 2}, kScoreFeatures},
    {99, 64, {64, 64, 4, 2}},
    {227, 128, {128, 64, 4, 2}, kScoreFeatures | kListed},
    {99, 128, {128, 32, 4, 2}, kScoreFeatures},
    {99, 128, {64, 32, 4, 2}},
    {227, 256, {128, 64, 8, 2}, kScoreFeatures},
    {99, 256, {64, 32, 4, 2}},
};

constexpr Row kForwardF32[] = {
    {227, 64, {256, 32, 8, 2}, kScoreFeatures | kFewTiles},
    {99, 64, {128, 32, 4, 2}, kScoreFeatures},
    {99, 64, {64, 32, 4, 2}},
    {227, 128, {256, 32, 8, 2}, kScoreFeatures | kFullPrecision | kFewTiles},
    {163, 128, {128, 32, 4, 2}, kScoreFeatures | kFullPrecision | kListed},
    {99, 128, {64, 32, 4, 2}},
    {227, 256, {64, 32, 4, 2}, kScoreFeatures},
    {163, 256, {64, 16, 4, 2}},
    {99, 256, {32, 16, 2, 2}},
};

// For wide heads, 8 warps share 32 or more rows, and 4 warps share 16.
constexpr Row kWideForward[] = {
    {163, kMaxDim, {64, 128, 8, 3}},
    {99, 512, {64, 64, 8, 2}},
    {99, kMaxDim, {64, 32, 8, 2}},
};

constexpr Row kWideForwardF32[] = {
    {227, kMaxDim, {64, 64, 8, 2}},
    {163, kMaxDim, {32, 64, 8, 2}},
    {99, kMaxDim, {32, 32, 4, 2}},
};

// Rows are the rows of all heads of a group. PartWorkOf decides the number of CTAs on each SM.
constexpr Row kForwardSplit[] = {
    {99, 64, {16, 64, 1, 2}, kManyRows},
    {99, 64, {32, 64, 2, 2}, kManyRows},
    {99, 64, {64, 64, 4, 3}, kManyRows},
    {99, 64, {128, 64, 4, 3}, kScoreFeatures | kListed | kMaskMod | kDropout},
    {99, 64, {64, 64, 4, 3}},
    {99, 128, {16, 32, 1, 3}, kManyRows},
    {99, 128, {32, 32, 2, 2}, kManyRows},
    {99, 128, {64, 32, 4, 3}, kManyRows},
    {99, 128, {128, 32, 4, 3}, kScoreFeatures | kDropout},
    {99, 128, {64, 32, 4, 3}},
    {99, 256, {32, 16, 2, 2}, kManyRows},
    {99, 256, {64, 16, 4, 3}},
};

constexpr Row kForwardSplitF32[] = {
    {99, 64, {16, 32, 1, 3}, kManyRows}, {99, 64, {64, 32, 4, 3}},  {99, 128, {16, 16, 1, 2}, kManyRows},
    {99, 128, {64, 16, 4, 3}},           {99, 256, {16, 16, 1, 2}},
};

constexpr Row kWideForwardSplit[] = {
    {99, kMaxDim, {16, 64, 4, 3}, kManyRows},
    {99, kMaxDim, {32, 64, 8, 2}, kManyRows},
    {163, kMaxDim, {64, 128, 8, 2}},  // with 3 stages it spills
    {99, 512, {64, 64, 8, 2}},
    {99, kMaxDim, {64, 32, 8, 2}},
};

constexpr Row kWideForwardSplitF32[] = {
    {99, kMaxDim, {16, 64, 4, 2}, kManyRows},
    {163, kMaxDim, {32, 64, 8, 2}},
    {99, kMaxDim, {32, 32, 4, 2}},
};

constexpr Row kBackward[] = {
    {227, 64, {128, 128, 8, 2}, kScoreFeatures | kDropout | kListed},
    {163, 64, {64, 64, 4, 2}},
    {99, 64, {64, 128, 8, 1}},
    {227, 128, {64, 128, 8, 2}, kListed | kScoreMod},
    {163, 128, {64, 128, 8, 1}, kScoreFeatures | kListed},
    {163, 128, {32, 128, 8, 2}},
    {99, 128, {64, 64, 8, 1}},
    {227, 256, {64, 64, 8, 2}, kListed},
    {163, 256, {64, 64, 8, 1}},
    {99, 256, {32, 32, 8, 1}},
};

constexpr Row kBackwardF32[] = {
    {227, 64, {64, 128, 8, 2}},  {163, 64, {64, 64, 8, 1}},  {99, 64, {32, 64, 8, 1}},
    {227, 128, {32, 128, 8, 1}}, {163, 128, {32, 64, 8, 1}}, {99, 128, {32, 32, 8, 1}},
    {227, 256, {32, 64, 8, 1}},  {163, 256, {32, 32, 8, 1}}, {99, 256, {16, 16, 8, 1}},
};

constexpr Row kWideBackward[] = {
    {227, kMaxDim, {64, 64, 8, 3}},
    {163, 512, {64, 64, 8, 2}},
    {163, kMaxDim, {32, 64, 8, 2}},
    {99, kMaxDim, {64, 32, 8, 2}},
};

constexpr Row kWideBackwardF32[] = {
    {227, kMaxDim, {64, 32, 8, 2}},
    {227, kMaxDim, {32, 32, 8, 2}},
    {163, kMaxDim, {64, 16, 4, 2}},
    {99, kMaxDim, {32, 16, 4, 2}},
};

constexpr Row kTangent[] = {
    {99, 64, {64, 64, 4, 2}},   {163, 128, {64, 32, 4, 2}}, {99, 128, {64, 16, 4, 2}},
    {163, 256, {64, 16, 4, 2}}, {99, 256, {16, 16, 1, 2}},
};

constexpr Row kTangentF32[] = {
    {163, 64, {64, 32, 4, 2}}, {99, 64, {32, 32, 2, 2}},   {163, 128, {64, 16, 4, 2}},
    {99, 128, {16, 16, 1, 2}}, {163, 256, {16, 16, 1, 2}},
};

constexpr Row kBackwardQuery[] = {
    {99, 64, {128, 32, 4, 2}},   {99, 128, {128, 16, 4, 2}, kBias}, {99, 128, {64, 32, 4, 2}},
    {227, 256, {128, 32, 8, 2}}, {163, 256, {64, 32, 4, 2}},        {99, 256, {64, 16, 4, 2}},
};

constexpr Row kBackwardQueryF32[] = {
    {99, 64, {64, 32, 4, 2}},   {99, 128, {64, 16, 4, 2}}, {227, 256, {64, 16, 4, 2}},
    {163, 256, {32, 16, 2, 2}}, {99, 256, {16, 16, 1, 2}},
};

constexpr Row kWideBackwardQuery[] = {
    {227, kMaxDim, {64, 64, 8, 3}},
    {163, 512, {64, 64, 8, 2}},
    {163, kMaxDim, {64, 32, 8, 2}},
    {99, kMaxDim, {32, 64, 8, 2}},
};

constexpr Row kWideBackwardQueryF32[] = {
    {227, kMaxDim, {32, 64, 8, 2}},
    {163, kMaxDim, {16, 64, 4, 2}},
    {99, kMaxDim, {16, 32, 4, 2}},
};

constexpr Row kBackwardBias[] = {
    {99, 128, {64, 64, 4, 1}},
    {99, 256, {64, 32, 4, 1}},
    {163, kMaxDim, {32, 32, 4, 1}},
    {99, kMaxDim, {16, 16, 1, 1}},
};

constexpr Row kBackwardBiasF32[] = {
    {99, 64, {64, 64, 8, 1}},
    {99, 128, {32, 32, 4, 1}},
    {99, 256, {16, 32, 2, 1}},
};

constexpr Table kForwardTable = {kForward, kForwardF32}, kForwardSplitTable = {kForwardSplit, kForwardSplitF32},
                kWideForwardTable = {kWideForward, kWideForwardF32},
                kWideForwardSplitTable = {kWideForwardSplit, kWideForwardSplitF32},
                kBackwardTable = {kBackward, kBackwardF32}, kTangentTable = {kTangent, kTangentF32},
                kBackwardQueryTable = {kBackwardQuery, kBackwardQueryF32},
                kBackwardBiasTable = {kBackwardBias, kBackwardBiasF32},
                kWideBackwardTable = {kWideBackward, kWideBackwardF32},
                kWideBackwardQueryTable = {kWideBackwardQuery, kWideBackwardQueryF32};

// The largest tile that divides the blocks of a block mask; the whole tile without one. `warps_have_rows`: each warp
// owns rows, at least 16, or rows of a part of a slice.
KernelTiling WithinBlocks(TileSizes tile, bool warps_have_rows, const Problem& p) {
  tile.rows = int(std::gcd(tile.rows, p.mask.q_block));
  tile.cols = int(std::gcd(tile.cols, p.mask.kv_block));
  if (HasWideHeads(p)) {
    tile.groups = std::min(tile.groups, WideWarps(warps_have_rows ? tile.rows : tile.cols));
  } else if (warps_have_rows) {
    tile.groups = std::min(tile.groups, tile.rows / 16);
  }
  return {Family::kAmpere, tile.rows, tile.cols, tile.groups, tile.stages};
}

Tilings TilingsOf(const Table& table, const Target& target, const Problem& p, bool warps_have_rows = false) {
  Tilings tilings;
  for (const TileSizes& tile : Candidates(table.Of(p.dtype), target, p, /*may_divide_blocks=*/true))
    tilings.push_back(WithinBlocks(tile, warps_have_rows, p));
  if (!tilings.empty()) return tilings;
  throw std::invalid_argument("head dims " + std::to_string(p.qk_dim) + " and " + std::to_string(p.v_dim) +
                              ": a kernel needs more than the " + std::to_string(target.shared) +
                              " KiB of shared memory that this GPU has");
}

KernelTiling SplitTiling(const Target& target, const Problem& p) {
  return TilingsOf(HasWideHeads(p) ? kWideForwardSplitTable : kForwardSplitTable, target, p).front();
}

// --- Launches ---

// A kernel's file, or its counterpart for wide heads.
std::string FileFor(const Problem& p, const std::string& file) {
  return "ampere/" + std::string(HasWideHeads(p) ? "wide_" : "") + file;
}

// The launch of a file's main kernel: one CTA for each of `tiles`.
Launch MainLaunch(const std::string& entry, int unit, const KernelTiling& tiling, int64_t tiles) {
  Launch launch = {unit, entry, tiles, 32 * tiling.groups};
  launch.dynamic_shared = true;
  return launch;
}

// The number of CTAs of ampere/forward_split.cuh that fit into an SM's shared memory.
int BlocksThatFit(const Target& target, const Problem& p, const KernelTiling& tiling) {
  constexpr int64_t kReserved = 1024;  // reserved by CUDA for each CTA
  const auto row = [&](int64_t dim) { return RoundUp(dim, 16) * BytesOf(p.dtype) + 16; };  // a row of a SharedTile
  // Wide heads have slices of K and V, and P.
  const int64_t kv = HasWideHeads(p) ? tiling.stages * tiling.cols * row(kWideSlice) + tiling.rows * row(tiling.cols)
                                     : tiling.stages * tiling.cols * (row(p.qk_dim) + row(p.v_dim));
  return int(target.shared * 1024 / (kv + tiling.rows * row(std::max(p.qk_dim, p.v_dim)) + kReserved));
}

// Can batch entries see different numbers of keys? The kernel counts the kv tiles of all batch entries in an int.
bool Balances(const Problem& p, int64_t tiles, int cols) {
  const bool differ = p.mask.query_seq_lengths || p.mask.key_value_seq_lengths || p.mask.query_offset ||
                      p.mask.segment_ids || p.mask.ranges;
  return p.batch > 1 && differ && tiles * DivideUp(p.kv_len, cols) < int64_t(1) << 31;
}

// The division of a split-KV forward's work.
struct PartWork {
  bool balanced;   // equal stretches over all batch entries, instead of parts of each q tile's keys
  int64_t parts;   // parts of the keys, or stretches
  int64_t blocks;  // CTAs of the grid
  int64_t tiles;   // q tiles of a key/value head, over all batch entries
  int64_t rows;    // rows of O, l and m, over all parts
};

// Parts have at least 4 kv tiles. There are enough parts for two CTAs on every SM, or for four if CTAs are small and
// the parts are few enough to merge quickly. Then at least 64 KB of K and V are in flight for each SM; HBM needs 40 to
// 60 KB. If batch entries can see different numbers of keys, each CTA gets an equal stretch of all their keys, so no
// CTA finishes late. Two or four such CTAs run on every SM, if they fit.
PartWork PartWorkOf(const Target& target, const Problem& p) {
  const KernelTiling tiling = SplitTiling(target, p);
  const int64_t few = target.multiprocessors / 2;
  const int64_t tiles = p.batch * DivideUp(p.q_len * p.group(), tiling.rows), of_all = tiles * p.kv_heads;
  const int64_t least = kMinKVTiles * tiling.cols;
  if (Balances(p, tiles, tiling.cols)) {
    const int64_t blocks = std::min(tiling.rows <= 32 ? 4 : 2, std::max(BlocksThatFit(target, p, tiling), 1));
    const int64_t wanted = std::min(blocks * target.multiprocessors / p.kv_heads, tiles * p.kv_len / least);
    const int64_t stretches = std::max<int64_t>(wanted, 1), parts = tiles + stretches;
    return {true, stretches, stretches * p.kv_heads, tiles, parts * p.kv_heads * tiling.rows};
  }
  const int64_t two = 2 * target.multiprocessors / of_all, four = tiling.rows <= 32 ? 2 * two : 0;
  const int64_t wanted = std::min(std::max(two, std::min(four, few)), p.kv_len / least);
  const int64_t parts = std::max<int64_t>(wanted, 1);
  return {false, parts, of_all * parts, tiles, parts * p.batch * p.q_heads * p.q_len};
}

// The number of rows that a CTA merges: the fewest with which all CTAs run at the same time. An SM can run about four
// of them.
int MergedRows(const Target& target, int64_t rows) {
  int merged = 1;
  while (merged < kMergeThreads / 32 && rows > 4 * target.multiprocessors * merged) merged *= 2;
  return merged;
}

// Reserves the results of parts of the keys.
void ReserveParts(const Problem& p, int64_t parts, int64_t rows, Plan* plan) {
  Scratch& scratch = plan->scratch;
  scratch.parts = int(parts);
  scratch.Reserve(&Scratch::o_parts, 4 * rows * p.v_dim);
  scratch.Reserve(&Scratch::l_parts, 4 * rows);
  scratch.Reserve(&Scratch::m_parts, 4 * rows);
}

// The tiles of a split-KV forward, also for the kernel that merges the parts.
KernelTiling PackedTiling(const Target& target, const Problem& p) {
  KernelTiling tiling = SplitTiling(target, p);
  tiling.packed = int(p.group());
  tiling.merged_rows = MergedRows(target, p.batch * p.q_heads * p.q_len);
  return tiling;
}

Launch MergeLaunch(const Problem& p, const KernelTiling& tiling, int unit) {
  const int64_t rows = p.batch * p.q_heads * p.q_len;
  return {unit, "jax_flash_forward_merge", DivideUp(rows, tiling.merged_rows), kMergeThreads};
}

// The launch of ampere/backward_prepare.cuh.
Launch PrepareLaunch(const Problem& p, int unit) {
  const int64_t threads = p.batch * p.q_heads * RoundUp(p.q_len, kRowPadding) * LanesOfRow(int(p.v_dim));
  return {unit, "jax_flash_backward_prepare", DivideUp(threads, kRowThreads), kRowThreads};
}

// The work on dbias, in enough parts to keep every GPU busy.
BiasWork BiasInParts(const Problem& p, const KernelTiling& tiling) {
  constexpr int64_t kBlocks = 512;
  BiasWork work = BiasWorkIn(p, tiling);
  work.parts = std::min(work.summed, DivideUp(kBlocks, work.tiles));
  return work;
}

}  // namespace

// Is a split-KV forward worthwhile? With one CTA for each q tile, most of the GPU would be idle, or each head of a
// group would read the keys again. It excludes block masks, because the heads of a group may have different masks. With
// many heads it is worthwhile for fewer keys.
bool ampere::FewQueries(const Target& target, const Problem& p) {
  const bool many_heads = p.batch * p.q_heads >= target.multiprocessors;
  const bool few = p.q_len <= 16 || (p.q_len <= 64 && !many_heads);
  return few && p.kv_len >= (many_heads ? 512 : 1024) && !p.mask.block_mask.present;
}

// With a single part and ungrouped heads there is nothing to merge. Then the ordinary forward runs, with the same
// tiles.
bool ampere::SplitsKeys(const Target& target, const Problem& p) {
  if (!FewQueries(target, p)) return false;
  const PartWork work = PartWorkOf(target, p);
  return p.group() > 1 || work.balanced || work.parts > 1;
}

void ampere::AddSplitForward(const Target& target, const Problem& p, Plan* plan) {
  const PartWork work = PartWorkOf(target, p);
  ReserveParts(p, work.parts, work.rows, plan);
  if (work.balanced) plan->scratch.Reserve(&Scratch::tile_parts, work.tiles * int64_t(sizeof(PartsOfTile)));
  KernelTiling tiling = PackedTiling(target, p);
  tiling.balanced = work.balanced;
  const int unit = AddUnit(FileFor(p, "forward_split.cuh"), DependsOn::kEveryPass, p, tiling, plan);
  plan->launches.push_back(MainLaunch("jax_flash_forward", unit, tiling, work.blocks));
  plan->launches.push_back(MergeLaunch(p, tiling, unit));
}

void ampere::AddMerge(const Target& target, const Problem& p, int64_t parts, Plan* plan) {
  ReserveParts(p, parts, parts * p.batch * p.q_heads * p.q_len, plan);
  const KernelTiling tiling = PackedTiling(target, p);
  const int unit = AddUnit("ampere/forward_merge.cuh", DependsOn::kEveryPass, p, tiling, plan);
  plan->launches.push_back(MergeLaunch(p, tiling, unit));
}

Tilings ampere::Candidates(const Target& target, const Problem& p, Pass pass) {
  const bool wide = HasWideHeads(p);
  if (pass == Pass::kBackward) return TilingsOf(wide ? kWideBackwardTable : kBackwardTable, target, p);
  if (pass == Pass::kTangent) return TilingsOf(kTangentTable, target, p, true);
  if (FewQueries(target, p)) return TilingsOf(wide ? kWideForwardSplitTable : kForwardSplitTable, target, p, true);
  return TilingsOf(wide ? kWideForwardTable : kForwardTable, target, p, true);
}

Tilings ampere::QueryCandidates(const Target& target, const Problem& p) {
  return TilingsOf(HasWideHeads(p) ? kWideBackwardQueryTable : kBackwardQueryTable, target, p, true);
}

Tilings ampere::BiasCandidates(const Target& target, const Problem& p) {
  return TilingsOf(kBackwardBiasTable, target, p);
}

void ampere::AddForward(const Target&, const Problem& p, const KernelTiling& tiling, Plan* plan) {
  PrepareMasksByRow(p, plan);
  const int64_t tiles = p.batch * p.q_heads * RowTiles(p, tiling.rows);
  const int unit = AddUnit(FileFor(p, "forward.cuh"), DependsOn::kEveryPass, p, tiling, plan);
  plan->launches.push_back(MainLaunch("jax_flash_forward", unit, tiling, tiles));
}

void ampere::AddTangent(const Target&, const Problem& p, const KernelTiling& tiling, Plan* plan) {
  PrepareMasksByRow(p, plan);
  const int64_t tiles = p.batch * p.q_heads * RowTiles(p, tiling.rows);
  const int unit = AddUnit("ampere/tangent.cuh", DependsOn::kTangent, p, tiling, plan);
  plan->launches.push_back(MainLaunch("jax_flash_tangent", unit, tiling, tiles));
}

void ampere::AddBackward(const Target&, const Problem& p, const KernelTiling& tiling, Plan* plan) {
  PrepareMasksByRow(p, plan);
  const int64_t scratch_rows = ReserveRows(p, plan);
  if (SumsDQ(p)) plan->scratch.Reserve(&Scratch::dq_sum, 4 * scratch_rows * p.qk_dim);
  const int unit = AddUnit(FileFor(p, "backward.cuh"), DependsOn::kMain, p, tiling, plan);
  plan->launches.push_back(PrepareLaunch(p, unit));
  int64_t tiles = p.batch * p.kv_heads * ColumnTiles(p, tiling.cols);
  if (HasWideHeads(p)) tiles *= (p.dk || p.captured_gradients()) + p.dv;  // separate CTAs
  plan->launches.push_back(MainLaunch("jax_flash_backward", unit, tiling, tiles));
  if (SumsDQ(p)) {
    const int64_t threads = p.batch * p.q_heads * DivideUp(p.q_len, kSumRows) * p.qk_dim;
    plan->launches.push_back({unit, "jax_flash_backward_finish", DivideUp(threads, kRowThreads), kRowThreads});
  }
}

void ampere::AddRows(const Problem& p, Plan* plan) {
  ReserveRows(p, plan);
  const int unit = AddUnit("ampere/backward_prepare.cuh", DependsOn::kBackward, p, {Family::kAmpere}, plan);
  plan->launches.push_back(PrepareLaunch(p, unit));
}

void ampere::AddQuery(const Problem& p, const KernelTiling& tiling, Plan* plan) {
  PrepareMasksByRow(p, plan);
  const int unit = AddUnit(FileFor(p, "backward_query.cuh"), DependsOn::kBackward, p, tiling, plan);
  const int64_t tiles = p.batch * p.q_heads * RowTiles(p, tiling.rows);
  plan->launches.push_back(MainLaunch("jax_flash_backward_query", unit, tiling, tiles));
}

void ampere::AddBias(const Target&, const Problem& p, const KernelTiling& tiling, bool prepared, Plan* plan) {
  PrepareMasksByRow(p, plan);
  ReserveRows(p, plan);
  const int unit = AddUnit("ampere/backward_bias.cuh", DependsOn::kBackward, p, tiling, plan);
  const BiasWork work = BiasInParts(p, tiling);
  if (!prepared) plan->launches.push_back(PrepareLaunch(p, unit));
  plan->launches.push_back(MainLaunch("jax_flash_backward_bias", unit, tiling, work.tiles * work.parts));
  AddBiasFinish(work, unit, plan);
}

}  // namespace jax_flash
