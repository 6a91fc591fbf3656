// The Hopper family: kernels with TMA and wgmma, for 16-bit elements, and for float32 as TF32 up to head dim 128.
#include <algorithm>

#include "cuda_src/plan/family.h"
#include "cuda_src/plan/fused_rows.h"
#include "cuda_src/plan/mask_blocks.h"
#include "cuda_src/plan/table.h"

namespace jax_flash {
namespace {

// --- Tiles ---

// The features that Hopper's kernels support. All other features, including new ones, use Ampere's kernels. features.h
// lists all features, and explains slopes, the derivatives of scores.
constexpr FeatureBits kDerivatives = kScoreSlopes | kUnkeptSlopes | kSlopesAndSums | kSlopesNotInP | kGradientsOfScore;
constexpr FeatureBits kSupported = kPositions | kListed | kMaskMod | kScoreFeatures | kF32Bias | kBroadcastBias |
                                   kHeavyMod | kDerivatives | kDropout | kMaskCapDropout | kUnpairedBlocks | kSmallCap |
                                   kHeadDimsUpTo128 | kUnrounded | kPreferences;

// A row is {KiB of shared memory, largest head dim, tile sizes, features that exclude the row}. For example
//   {227, 64, {192, 128, 3, 2}, kBias | kDropout}
// fits GPUs with 227 KiB of shared memory for a CTA, and problems with head dims up to 64, without bias and dropout.
// Its tiles have 192 queries and 128 keys. A CTA has 3 consumer warpgroups, and buffers for 2 tiles of K and of V. A
// fifth tile size `true` stands for tiles of a bias, loaded by TMA.
//
// The first row that fits is used, so a row need not exclude what the rows above it take. Rows that only a preference
// excludes (kPreferences in features.h, such as kFewTiles) come last. The measurements are in docs/design/forward.md,
// unless a comment names another page.
constexpr Row kForward[] = {
    // Tiles of a bias: a float32 bias leaves less shared memory at d = 128. (masks-and-biases.md)
    {227, 64, {128, 128, 2, 2, true}},
    {227, 128, {128, 128, 2, 2, true}, kF32Bias},
    {227, 128, {128, 96, 2, 2, true}},
    // The next five rows are for many tiles up to d = 64. Three or four warpgroups hide each other's softmax.
    // Few keys.
    {227, 64, {256, 64, 4, 8}, kAddsToScores | kDropout | kLocal | kManyKeys | kFewTiles},
    // Many keys without a causal or local mask.
    {227, 64, {192, 128, 3, 2}, kAddsToScores | kDropout | kCausal | kLocal | kSoftCap | kFewTiles},
    // Causal and local masks, and soft caps, which the rows around exclude. Each warpgroup visits its own range of
    // keys, which is up to 1.89 times as fast for packed sequences.
    {227, 64, {256, 64, 4, 8}, kAddsToScores | kDropout | kListed | kLongCausal | kFewTiles},
    // Block masks and long causal sequences.
    {227, 64, {192, 128, 3, 2}, kAddsToScores | kDropout | kLocal | kSoftCap | kFewTiles},
    // A light score_mod.
    {227, 64, {192, 112, 3, 2}, kBias | kHeavyMod | kDropout | kLocal | kFewTiles},
    // Few tiles.
    {227, 64, {128, 128, 2, 3}, kAddsToScores | kDropout | kLocal | kListed},
    // Few tiles with a window or a block mask. Two warpgroups share 64 queries, and each has half of the keys.
    {227, 64, {128, 128, 4, 4}, kAddsToScores | kDropout | kSegments | kMaskMod},
    // Dropout without a causal mask: 176 keys are 8% faster with 1024 queries and keys. (dropout.md)
    {227, 64, {128, 176, 2, 2}, kAddsToScores | kSoftCap | kCausal | kLocal | kListed},
    // Dropout with a causal mask.
    {227, 64, {256, 64, 4, 8}, kAddsToScores | kSoftCap | kLengths | kQueryOffset | kListed | kFewTiles},
    // All others. A bias or a score_mod that is added entry by entry leaves room for fewer keys.
    {227, 64, {128, 128, 2, 3}, kAddsToScores},
    {227, 64, {128, 96, 2, 3}},
    // d = 96: +9%. A window, segments or dropout would lose 6 to 14%.
    {227, 96, {192, 96, 3, 2}, kAddsToScores | kDropout | kLocal | kFewTiles},
    // Above: the most keys that registers and shared memory have room for.
    {227, 128, {128, 128, 2, 2}, kBias | kHeavyMod},
    {227, 128, {128, 96, 2, 2}, kAddsToScores},
    {227, 128, {128, 64, 2, 2}},
    {227, 192, {128, 96, 2, 2}, kAddsToScores},
    {227, 256, {128, 64, 2, 2}, kAddsToScores | kDropout},
    {227, 256, {128, 48, 2, 2}, kAddsToScores},
    {227, 256, {128, 32, 2, 2}},
    {227, 256, {128, 16, 2, 2}},
};

// TF32 (tf32.md).
constexpr Row kForwardF32[] = {
    {227, 64, {192, 64, 3, 3}, kAddsToScores | kDropout | kLocal | kSoftCap | kListed | kFewTiles},
    {227, 64, {128, 128, 2, 2}, kAddsToScores | kDropout | kLocal | kSoftCap},
    {227, 64, {128, 64, 2, 3}},
    {227, 128, {128, 64, 2, 2}, kAddsToScores | kDropout},
    {227, 128, {128, 32, 2, 2}},
};

// Wide heads: two CTAs of a cluster share K and V (wide-heads.md).
constexpr FeatureBits kSupportedWide = kPositions | kSegments | kSoftCap | kSmallCap | kUnpairedBlocks | kPreferences;
constexpr Row kWideForward[] = {
    {227, kMaxDim, {128, 64, 2, 1}},
};
// In the backward they have neighbouring rows, or keys. All gradients have the same tiles.
constexpr Row kWideBackward[] = {
    {227, 512, {64, 64, 2, 1}},
};

// Split-KV of a latent: with few rows, a CTA shares keys with no other. (decoding.md)
constexpr Row kLatentForward[] = {
    {227, kMaxDim, {64, 64, 2, 1}, kManyRows},
    {227, kMaxDim, {128, 64, 2, 1}},
};

// The backward does not keep scores, so captured arrays cannot have gradients that depend on them. It has no room for
// two kinds of slopes, or for large slopes in float16.
constexpr FeatureBits kSupportedBackward = kSupported & ~(kGradientsOfScore | kUnkeptSlopes);
constexpr Row kBackward[] = {
    // Large tiles raise 329 TFLOP/s with a soft cap to 346. Its slopes are recomputed from P. That divides rounding
    // errors of log P by the cap, so the cap must not be small. (masks-and-biases.md)
    {227, 64, {128, 128, 2, 2}, kAddsToScores | kSmallCap | kMaskCapDropout},
    {227, 64, {64, 128, 2, 2, true}},
    {227, 128, {64, 128, 2, 2, true}, kF32Bias | kSlopesAndSums},
    {227, 96, {64, 128, 2, 2}},
    // These tiles keep slopes in registers. But above d = 96 with a block mask, they recompute them from P, like the
    // first row.
    {227, 128, {64, 128, 2, 2}, kSmallCap | kSlopesAndSums},
    // Above d = 128, pairs of CTAs share dQ (hopper/backward_pairs.cuh). Their warpgroups exchange P, so slopes
    // must be in P.
    {227, 256, {64, 64, 2, 2}, kHeadDimsUpTo128 | kUnpairedBlocks | kSmallCap | kSlopesNotInP},
};

// TF32 (tf32.md). Slopes are excluded, because the kernels would keep them in 16 bits.
constexpr Row kBackwardF32[] = {
    {227, 64, {64, 128, 2, 2}, kSoftCap | kBias | kScoreSlopes},
    {227, 128, {64, 64, 2, 1}, kSoftCap | kAddsToScores},
    {227, 96, {64, 64, 2, 1}, kSoftCap | kListed | kScoreMod},
};

// The tangent kernel supports no bias, no score_mod, and no float32 results of 16-bit inputs (kUnrounded). Registers
// hold S, Ṡ and A (the sum for Ȯ) in f32, Q, and the left operands of the products with V and V̇. (tangent.md)
constexpr FeatureBits kSupportedTangent = kSupported & ~(kAddsToScores | kUnrounded);
constexpr Row kTangent[] = {
    {227, 64, {128, 96, 2, 2}},
    {227, 64, {128, 64, 2, 3}},  // block masks, whose blocks of 64 or 128 keys are no multiple of 96
    {227, 128, {128, 64, 2, 2}},
};

// dbias, with tiles of the bias if TMA can load them. Windows, segments and a soft cap would leave tiles of 128 keys
// too few registers.
constexpr FeatureBits kSupportedBias = kSupportedBackward & ~(kBroadcastBias | kScoreMod);
constexpr Row kBackwardBias[] = {
    {227, 64, {128, 128, 2, 4}, kLocal | kSoftCap},
    {227, 128, {128, 128, 2, 3}, kLocal | kSoftCap | kF32Bias},
    {227, 128, {128, 128, 2, 2}, kLocal | kSoftCap},
    {227, 128, {128, 64, 2, 4}},
};

constexpr Table kForwardTable = {{kForward, kSupported}, {kForwardF32, kSupported}};
constexpr Table kWideForwardTable = {{kWideForward, kSupportedWide}, {kForwardF32, kSupported}};
constexpr Table kWideBackwardTable = {{kWideBackward, kSupportedWide}, {kBackwardF32, kSupportedBackward}};
constexpr Table kBackwardTable = {{kBackward, kSupportedBackward}, {kBackwardF32, kSupportedBackward}};
constexpr Rows kLatentRows = {kLatentForward, kSupportedWide};
constexpr Rows kTangentRows = {kTangent, kSupportedTangent}, kBackwardBiasRows = {kBackwardBias, kSupportedBias};

const Rows& RowsOf(const Problem& p, Pass pass) {
  if (pass == Pass::kTangent) return kTangentRows;
  if (pass == Pass::kBackward) return (HasWideHeads(p) ? kWideBackwardTable : kBackwardTable).Of(p.dtype);
  return (HasWideHeads(p) ? kWideForwardTable : kForwardTable).Of(p.dtype);
}

// The tilings that fit. Empty if none do, or if the GPU is not Hopper.
Tilings TilingsOf(const Rows& rows, const Target& target, const Problem& p) {
  Tilings tilings;
  if (!target.hopper || ScoreModIsNotInlined(p)) return tilings;
  for (const TileSizes& tile : Candidates(rows, target, p, /*may_divide_blocks=*/false))
    tilings.push_back({Family::kHopper, tile.rows, tile.cols, tile.groups, tile.stages, tile.bias_tiles});
  return tilings;
}

// --- Variants of the backward ---

// Should a kv tile loop over q tiles first, and for each over the query heads of a group? With large groups, the rows
// that concurrent CTAs read would otherwise not fit into L2. With a window or segments, a kv tile has few rows, which
// stay in L2 anyway, and looping head by head is 5 to 12% faster. The loop over the lists of a block mask has no such
// variant.
bool InterleavesHeads(const Problem& p) {
  const Features has = FeaturesOf(p);
  return has.Any(kCausal) && p.group() > 4 && !has.Any(kListed | kLocal);
}

// --- Launches ---

// The launch of a main kernel, with at most one CTA for each SM.
Launch MainLaunch(const std::string& entry, int unit, const KernelTiling& tiling, int64_t tiles, Maps maps) {
  Launch launch = {unit, entry, tiles, kWarpgroup * (tiling.groups + 1)};
  launch.persistent = launch.dynamic_shared = true;
  launch.maps = maps;
  return launch;
}

// The number of tiles of the output.
int64_t Tiles(const Problem& p, const KernelTiling& tiling) { return p.batch * p.q_heads * RowTiles(p, tiling.rows); }

// The number of blocks of kRowBlock rows in scratch, if the backward has tiles of `rows` rows (hopper/row_blocks.cuh).
int64_t RowBlocks(const Problem& p, int64_t rows) {
  return p.batch * p.q_heads * RoundUp(p.q_len, p.score.bias.present ? kRowBlock : rows) / kRowBlock;
}

// The fewest parts that minimize the time until all SMs are done.
BiasWork BiasInParts(const Target& target, const Problem& p, const KernelTiling& tiling) {
  constexpr int64_t kTileOverhead = 2;  // the time to start and write a tile of dbias, in tiles of S
  BiasWork work = BiasWorkIn(p, tiling);
  const auto time = [&](int64_t parts) {
    return DivideUp(work.tiles * parts, target.multiprocessors) * (DivideUp(work.summed, parts) + kTileOverhead);
  };
  const int64_t most = std::min(work.summed, DivideUp(4 * target.multiprocessors, work.tiles));
  for (int64_t parts = 2; parts <= most; ++parts) {
    if (time(parts) < time(work.parts)) work.parts = parts;
  }
  return work;
}

// Reserves scratch memory for each row of Q. Returns the number of rows in it.
int64_t ReserveHopperRows(const Problem& p, Plan* plan) {
  const int64_t rows = ReserveRows(p, plan);
  if (p.score.bias.present || p.score.score_mod.present()) plan->scratch.Reserve(&Scratch::maximum, 4 * rows);
  if (p.may_empty_rows) plan->scratch.Reserve(&Scratch::empty_rows, rows / 8);
  return rows;
}

// The number of heads whose kv tiles are taken together, if kv tiles add to dQ in a fixed order: those whose tiles fit
// into the grid. The kv tiles of a packed sequence without a causal mask start at the same rows and wait for each
// other. So packed sequences have more heads, and fewer tiles of each are in progress. 16 is up to 1.4 times as fast
// as 1.
int64_t OrderedHeadsAtATime(const Target& target, const Problem& p, int cluster) {
  constexpr int64_t kHeadsOfPacks = 16;
  const int64_t tiles = DivideUp(p.padded_kv_len(), kBackwardKeys);
  return std::max<int64_t>(target.multiprocessors / cluster / tiles, p.mask.ranges ? kHeadsOfPacks : 1);
}

// Reserves the scratch memory of the backward. Returns the number of bytes that must be zeroed before the launch:
// counters, and sums of dK and dV.
int64_t ReserveBackward(const Target& target, const Problem& p, const KernelTiling& tiling, Plan* plan) {
  Scratch& scratch = plan->scratch;
  const int64_t before = scratch.bytes, heads = p.batch * p.q_heads;
  if (tiling.fused_rows) {
    // `prepared` counts the row blocks of each head, and `added` its kv tiles (hopper/backward_fused_rows.cuh).
    scratch.Reserve(&Scratch::tile_counter, 4 * (2 + 2 * heads));
    scratch.row_block_counter = scratch.tile_counter + 4;
    scratch.prepared = scratch.row_block_counter + 4;
    scratch.added = scratch.prepared + 4 * heads;
    scratch.heads = int(HeadsInScratch(target, p));
    scratch.heads_at_a_time = int(HeadsAtATime(target, p));
  } else if (tiling.ordered) {
    // Here `added` counts the kv tiles that each CTA of a cluster has added to each q tile
    // (hopper/backward_ordered.cuh).
    const int cluster = kBackwardKeys / tiling.cols;
    scratch.Reserve(&Scratch::tile_counter, 4 * (1 + heads * RowTiles(p, tiling.rows) * cluster));
    scratch.added = scratch.tile_counter + 4;
    scratch.heads_at_a_time = int(OrderedHeadsAtATime(target, p, cluster));
  } else if (FeaturesOf(p).Any(kListed)) {  // CTAs take the lists of a block mask from a counter
    scratch.Reserve(&Scratch::tile_counter, 4);
  }
  if (tiling.sum_kv) {
    const int64_t keys = p.batch * p.kv_heads * RoundUp(p.kv_len, kRowPadding);
    if (p.dk) scratch.Reserve(&Scratch::dk_sum, 4 * keys * p.qk_dim);
    if (p.dv) scratch.Reserve(&Scratch::dv_sum, 4 * keys * p.v_dim);
  }
  const int64_t zero_bytes = scratch.bytes - before, rows = ReserveHopperRows(p, plan);
  if (SumsDQ(p)) scratch.Reserve(&Scratch::dq_sum, 4 * rows * p.qk_dim);
  return zero_bytes;
}

// Adds the launch of a kernel that keeps a tile of Q. CTAs take tiles from a counter if tiles differ in work and there
// are more tiles than CTAs, or with a block mask. kUnevenTiles (scheduler/q_schedule.cuh) has the same condition.
void AddRowLaunch(const Target& target, const Problem& p, Launch launch, Plan* plan) {
  const Features has = FeaturesOf(p);
  const bool uneven = (has.Any(kCausal) && !has.Any(kWindow)) || has.Any(kLengths | kSegments) || p.mask.ranges;
  if (has.Any(kListed) || (uneven && launch.blocks > target.multiprocessors)) {
    const int64_t before = plan->scratch.bytes;
    plan->scratch.Reserve(&Scratch::tile_counter, 4);
    launch.zero_bytes = plan->scratch.bytes - before;
  }
  plan->launches.push_back(launch);
}

// A CTA has 64 queries. A tile of 128 has a cluster of two CTAs.
void AddWideForward(const Problem& p, const KernelTiling& tiling, int64_t tiles, Plan* plan) {
  const int unit = AddUnit("hopper/wide_forward.cuh", DependsOn::kEveryPass, p, tiling, plan);
  const int cluster = tiling.rows / 64;
  Launch launch = MainLaunch("jax_flash_forward", unit, tiling, cluster * tiles, Maps::kForward);
  launch.cluster = cluster;
  plan->launches.push_back(launch);
}

// The number of parts of the keys with which all clusters are done the earliest, if all keys are visible. If lengths
// can differ, clusters have four parts on average, so that one long sequence does not decide the time.
int64_t PartsOfLatent(const Target& target, const Problem& p, const KernelTiling& tiling, int64_t tiles) {
  constexpr int64_t kPartOverhead = 3;              // the time to load Q and to write and merge O, in kv tiles
  constexpr int64_t kMaxBytes = int64_t(64) << 20;  // of O of all parts
  const int64_t bytes = 4 * p.batch * p.q_heads * p.q_len * p.v_dim;  // of O of a part
  const int64_t clusters = std::max(target.multiprocessors / (tiling.rows / 64), 1);
  const int64_t kv_tiles = DivideUp(p.kv_len, tiling.cols);
  const auto time = [&](int64_t parts) {
    return DivideUp(tiles * parts, clusters) * (DivideUp(kv_tiles, parts) + kPartOverhead);
  };
  const bool differ = p.mask.key_value_seq_lengths || p.mask.query_seq_lengths || p.mask.segment_ids || p.mask.ranges;
  const int64_t most =
      std::max<int64_t>(std::min({kv_tiles / kMinKVTiles, int64_t(target.multiprocessors), kMaxBytes / bytes}), 1);
  const int64_t least = p.batch > 1 && differ ? std::min(DivideUp(4 * clusters, tiles), most) : 1;
  int64_t best = least;
  for (int64_t parts = least + 1; parts <= most; ++parts) {
    if (time(parts) < time(best)) best = parts;
  }
  return best;
}

// The kernel of one gradient of wide heads. A cluster of two CTAs has kBackwardKeys keys of a head, or rows.
void AddWideGradient(const std::string& entry, int unit, const KernelTiling& tiling, int64_t heads, int64_t length,
                     Plan* plan) {
  const int cluster = kBackwardKeys / tiling.cols;
  Launch launch = MainLaunch(entry, unit, tiling, heads * DivideUp(length, kBackwardKeys) * cluster, Maps::kBackward);
  launch.cluster = cluster;
  plan->launches.push_back(launch);
}

void AddWideBackward(const Problem& p, const KernelTiling& tiling, Plan* plan) {
  ampere::AddRows(p, plan);
  const int unit = AddUnit("hopper/wide_backward.cuh", DependsOn::kMain, p, tiling, plan);
  const int64_t heads = p.batch * p.kv_heads;
  if (p.dk) AddWideGradient("jax_flash_backward_key", unit, tiling, heads, p.padded_kv_len(), plan);
  if (p.dv) AddWideGradient("jax_flash_backward_value", unit, tiling, heads, p.padded_kv_len(), plan);
}

}  // namespace

Tilings hopper::Candidates(const Target& target, const Problem& p, Pass pass) {
  if (pass == Pass::kTangent && p.dtype == DType::kF32) return {};
  const Tilings tilings = TilingsOf(RowsOf(p, pass), target, p);
  if (pass != Pass::kBackward || HasWideHeads(p)) return tilings;
  const bool fused_rows = FusesRows(target, p), interleaved_heads = !fused_rows && InterleavesHeads(p);
  Tilings candidates;
  for (KernelTiling tiling : tilings) {
    tiling.fused_rows = fused_rows;
    tiling.sum_kv = fused_rows && p.group() > 1;
    if (interleaved_heads) {  // the same tiles head by head come next, if registers spill
      tiling.interleaved_heads = true;
      candidates.push_back(tiling);
      tiling.interleaved_heads = false;
    }
    candidates.push_back(tiling);
  }
  return candidates;
}

// Tilings of a backward that adds to dQ in a fixed order, or none if it cannot. It needs 16-bit types. Features that
// need its last registers or shared memory are excluded, also a window with a query offset. The rows that see a kv tile
// must be contiguous, and so must the keys that a q tile sees, apart from gaps in ranges (kCountsHiddenTiles).
Tilings hopper::OrderedCandidates(const Target& target, const Problem& p) {
  if (!p.deterministic || !p.dq || ElementOf(p.dtype).bytes != 2) return {};
  const Features has = FeaturesOf(p);
  if (has.Any(kScoreFeatures | kSegments | kListed)) return {};
  if (has.Count(kWindow | kQueryOffset) == 2) return {};
  Tilings tilings = TilingsOf(kBackwardTable.of_16_bits, target, p);
  for (KernelTiling& tiling : tilings) tiling.ordered = true;
  return tilings;
}

// Only wide heads have such a kernel.
Tilings hopper::QueryCandidates(const Target& target, const Problem& p) {
  return HasWideHeads(p) ? Candidates(target, p, Pass::kBackward) : Tilings();
}

std::string hopper::WhyNot(const Target& target, const Problem& p, Pass pass) {
  if (ScoreModIsNotInlined(p)) {
    return "its tiles do not support a score_mod, or its derivative, of more than 32 instructions";
  }
  if (pass == Pass::kTangent && p.dtype == DType::kF32) return "it does not support float32";
  return Obstacle(RowsOf(p, pass), target, p);
}

Tilings hopper::BiasCandidates(const Target& target, const Problem& p) {
  if (p.dtype == DType::kF32) return {};
  Tilings tilings = TilingsOf(kBackwardBiasRows, target, p);
  for (KernelTiling& tiling : tilings) tiling.bias_tiles = LoadsBias(p, tiling.cols);
  return tilings;
}

std::string hopper::WhyNotBias(const Target& target, const Problem& p) {
  if (p.dtype == DType::kF32) return "it does not support float32";
  return Obstacle(kBackwardBiasRows, target, p);
}

void hopper::AddForward(const Target& target, const Problem& p, const KernelTiling& tiling, Plan* plan) {
  if (HasWideHeads(p)) return AddWideForward(p, tiling, Tiles(p, tiling), plan);
  PrepareMasksByRow(p, plan);
  const int unit = AddUnit("hopper/forward.cuh", DependsOn::kEveryPass, p, tiling, plan);
  AddRowLaunch(target, p, MainLaunch("jax_flash_forward", unit, tiling, Tiles(p, tiling), Maps::kForward), plan);
}

// The kernel reads V from tiles of K, in halves of whole boxes. TMA loads keys of one page at a time.
bool hopper::SplitsKeys(const Target& target, const Problem& p) {
  const auto boxes = [](int64_t dim) { return DivideUp(dim, 64); };
  return ReadsLatent(p) && p.kv_heads == 1 && ElementOf(p.dtype).bytes == 2 && p.page % 64 == 0 &&
         RoundUp(boxes(p.v_dim), 2) <= boxes(p.qk_dim) && !TilingsOf(kLatentRows, target, p).empty();
}

void hopper::AddSplitForward(const Target& target, const Problem& p, Plan* plan) {
  KernelTiling tiling = TilingsOf(kLatentRows, target, p).front();
  tiling.packed = int(p.group());
  const int64_t tiles = p.batch * DivideUp(p.q_len * p.group(), tiling.rows);
  const int64_t parts = PartsOfLatent(target, p, tiling, tiles);
  AddWideForward(p, tiling, tiles * parts, plan);
  ampere::AddMerge(target, p, parts, plan);
}

void hopper::AddTangent(const Target& target, const Problem& p, const KernelTiling& tiling, Plan* plan) {
  PrepareMasksByRow(p, plan);
  const int unit = AddUnit("hopper/tangent.cuh", DependsOn::kTangent, p, tiling, plan);
  AddRowLaunch(target, p, MainLaunch("jax_flash_tangent", unit, tiling, Tiles(p, tiling), Maps::kTangent), plan);
}

void hopper::AddQuery(const Problem& p, const KernelTiling& tiling, Plan* plan) {
  const int unit = AddUnit("hopper/wide_backward_query.cuh", DependsOn::kBackward, p, tiling, plan);
  AddWideGradient("jax_flash_backward_query", unit, tiling, p.batch * p.q_heads, p.padded_q_len(), plan);
}

void hopper::AddBackward(const Target& target, const Problem& p, const KernelTiling& tiling, Plan* plan) {
  if (HasWideHeads(p)) return AddWideBackward(p, tiling, plan);
  PrepareMasksByKey(p, plan);
  const int unit = AddUnit("hopper/backward.cuh", DependsOn::kMain, p, tiling, plan);
  const int64_t row_blocks = RowBlocks(p, tiling.rows);
  if (!tiling.fused_rows) plan->launches.push_back({unit, "jax_flash_backward_prepare", row_blocks, kRowThreads});
  const int64_t tiles = RoundUp(p.padded_kv_len(), kBackwardKeys) / tiling.cols;
  const int64_t heads = p.batch * (tiling.fused_rows ? p.q_heads : p.kv_heads);
  Launch launch = MainLaunch("jax_flash_backward", unit, tiling, heads * tiles, Maps::kBackward);
  if (!FeaturesOf(p).Any(kHeadDimsUpTo128)) launch.cluster = kBackwardKeys / tiling.cols;
  launch.persistent = !tiling.ordered || launch.cluster == 1;
  launch.zero_bytes = ReserveBackward(target, p, tiling, plan);
  plan->launches.push_back(launch);
  if (tiling.sum_kv && (p.dk || p.dv)) {
    const int64_t key_blocks = p.batch * p.kv_heads * RoundUp(p.kv_len, tiling.cols) / kRowBlock;
    plan->launches.push_back({unit, "jax_flash_backward_finish_keys", key_blocks, kRowThreads});
  }
  if (SumsDQ(p) && !tiling.fused_rows) {
    plan->launches.push_back({unit, "jax_flash_backward_finish", row_blocks, kRowThreads});
  }
}

void hopper::AddBias(const Target& target, const Problem& p, const KernelTiling& tiling, bool prepared, Plan* plan) {
  PrepareMasksByRow(p, plan);
  ReserveHopperRows(p, plan);
  const int unit = AddUnit("hopper/backward_bias.cuh", DependsOn::kBackward, p, tiling, plan);
  const BiasWork work = BiasInParts(target, p, tiling);
  if (!prepared) plan->launches.push_back({unit, "jax_flash_backward_prepare", RowBlocks(p, tiling.rows), kRowThreads});
  plan->launches.push_back(
      MainLaunch("jax_flash_backward_bias", unit, tiling, work.tiles * work.parts, Maps::kBackwardBias));
  AddBiasFinish(work, unit, plan);
}

}  // namespace jax_flash
