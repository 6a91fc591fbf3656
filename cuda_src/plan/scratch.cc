#include "cuda_src/plan/scratch.h"

#include <algorithm>

#include "cuda_src/plan/family.h"
#include "cuda_src/plan/mask_blocks.h"

namespace jax_flash {
namespace {

// Every GPU, as far as scratch memory is concerned.
std::vector<Target> AllTargets() {
  std::vector<Target> targets;
  for (int multiprocessors = 1; multiprocessors <= kMostMultiprocessors; ++multiprocessors) {
    for (const bool hopper : {false, true}) {
      Target target = TargetOf(hopper ? "sm_90a" : "sm_80", multiprocessors);
      target.hopper = hopper;
      targets.push_back(target);
    }
  }
  return targets;
}

}  // namespace

Scratch ScratchOf(const Problem& given, Pass pass, const Target& target) {
  Scratch scratch;
  if (!CudaRefusal(given).empty() || NothingToCompute(given)) return scratch;
  const bool makes_blocks = MakesMaskBlocks(given, pass, target);
  const Problem p = makes_blocks ? WithMaskInBlocks(given) : given;
  const auto take = [&](int64_t bytes) {
    const int64_t at = scratch.bytes;
    scratch.bytes += RoundUp(bytes, 256);
    return at;
  };
  if (p.segments) {
    scratch.q_bounds = take(p.batch * DivideUp(p.q_len, kSegmentBlock) * int64_t(sizeof(SegmentBounds)));
    scratch.kv_bounds = take(p.batch * DivideUp(p.kv_len, kSegmentBlock) * int64_t(sizeof(SegmentBounds)));
  }
  const auto words = [&](const char* dims) { return 4 * p.elements(dims, p.block_mask); };
  if (makes_blocks) {
    scratch.blocks = take(words("BNUV"));
    scratch.listed_rows = take(words("BNUR"));
    scratch.listed_columns = take(words("BNVC"));
    scratch.mask_counts = take(words("BNU") + words("BNV"));
    if (ReadsMasksByRow(p, pass, target)) scratch.mask_bits = take(words("BPQW"));
  }
  if (ReadsMasksByKey(p, pass, target))
    scratch.transposed_bits = take(words("BP") * p.kv_block * WordsOfLine(p.q_block));
  const bool backward = pass == Pass::kBackward, main = backward ? HasMain(p) : !ampere::FewQueries(target, p);
  const std::optional<KernelTiling> hopper = main ? hopper::Tiling(target, p, pass) : std::nullopt;
  const int64_t all_heads = p.batch * p.q_heads, first_zero = scratch.bytes;
  if (hopper && hopper->alongside) {
    scratch.taken = take(4 * (2 + 2 * all_heads));
    scratch.rows_taken = scratch.taken + 4;
    scratch.prepared = scratch.rows_taken + 4;
    scratch.added = scratch.prepared + 4 * all_heads;
    scratch.heads = int(hopper::HeadsInScratch(target, p));
    scratch.last_heads = int(hopper::HeadsAtATime(target, p));
  } else if (hopper && hopper::Counts(target, p, pass, *hopper)) {
    scratch.taken = take(4);
  }
  if (hopper && hopper->sum_kv) {
    const int64_t keys = p.batch * p.kv_heads * RoundUp(p.kv_len, kRowPadding);
    if (p.dk) scratch.dk_sum = take(4 * keys * p.qk_dim);
    if (p.dv) scratch.dv_sum = take(4 * keys * p.v_dim);
  }
  scratch.zero_bytes = scratch.bytes - first_zero;
  if (!backward && ampere::SplitsKeys(target, p)) {
    const ampere::PartWork work = ampere::PartWorkOf(target, p);
    scratch.parts = int(work.parts);
    scratch.o_parts = take(4 * work.rows * p.v_dim);
    scratch.l_parts = take(4 * work.rows);
    scratch.m_parts = take(4 * work.rows);
    if (work.balanced) scratch.tile_parts = take(work.tiles * int64_t(sizeof(PartsOfTile)));
  }
  if (backward) {
    const int64_t rows = (scratch.heads > 0 ? scratch.heads : all_heads) * RoundUp(p.q_len, kRowPadding);
    if (main || p.dbias || p.dsinks) {
      scratch.logsumexp = take(4 * rows);
      scratch.d = take(4 * rows);
    }
    const bool apart = p.bias.present || p.score_mod.present();
    const bool by_hopper = hopper || (p.dbias && hopper::BiasTiling(target, p));
    if (apart && by_hopper) scratch.maximum = take(4 * rows);
    if (p.may_empty_rows() && by_hopper) scratch.empty_rows = take(rows / 8);
    if (SumsDQ(p)) scratch.dq_sum = take(4 * rows * p.qk_dim);
    if (p.dbias) {
      const BiasWork work = BiasWorkOf(target, p);
      scratch.parts = int(work.parts);
      if (work.parts > 1) scratch.dbias_parts = take(4 * work.parts * work.elements);
    }
  }
  return scratch;
}

int64_t ScratchBytes(const Problem& p, Pass pass, const std::vector<Target>& targets) {
  if (targets.empty()) return ScratchBytes(p, pass, AllTargets());
  int64_t bytes = 0;
  for (const Target& target : targets) bytes = std::max(bytes, ScratchOf(p, pass, target).bytes);
  return bytes;
}

}  // namespace jax_flash
