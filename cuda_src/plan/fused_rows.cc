#include "cuda_src/plan/fused_rows.h"

#include <algorithm>

#include "cuda_src/contract.h"
#include "cuda_src/element.h"
#include "cuda_src/plan/family.h"
#include "cuda_src/plan/features.h"

namespace jax_flash {
namespace {

// Would more than a sixth of the GPU's time be idle with the backward's kv tiles? A CTA takes causal tiles two at a
// time, a long one and a short one (StaticSchedule).
bool LeavesIdle(const Target& target, const Problem& p) {
  const int64_t items = DivideUp(p.batch * p.kv_heads * DivideUp(p.kv_len, kBackwardKeys), p.mask.is_causal ? 2 : 1);
  return 6 * items < 5 * RoundUp(items, target.multiprocessors);
}

}  // namespace

bool FusesRows(const Target& target, const Problem& p) {
  const Features has = FeaturesOf(p);
  const bool all_rows_at_once = p.batch * p.q_heads * DivideUp(p.q_len, kRowBlock) <= 3 * target.multiprocessors;
  const bool listed = has.Any(kListed), dropout = has.Any(kDropout);
  const bool up_to_64 = std::max(p.qk_dim, p.v_dim) <= 64;
  // Upper bounds: of the keys that a row sees, and with a block mask of the rows that see a kv tile. The longest lists
  // have these sizes, with their headers.
  const int64_t keys = listed ? (p.mask.row_list_size - kListHeader) * p.mask.kv_block : p.kv_len;
  const int64_t listed_rows = listed ? (p.mask.column_list_size - kListHeader) * p.mask.q_block : 0;

  // The idle warps must keep up with the consumers. They do if they prepare all rows at the same time, or if rows have
  // enough keys, absolutely and relative to the number of rows.
  if (!all_rows_at_once && (keys < 512 || p.q_len > 2 * p.kv_len)) return false;
  // Registers: at most two of causal, window, segments, lengths, query offset, dropout, and dlogsumexp with dropout.
  if (has.Count(kPositions) + (dropout ? 1 + p.dlogsumexp : 0) > 2) return false;
  // Registers: head dims above 64 with the gradient of sinks, a cotangent of the logsumexp, and rows that may be empty.
  if (p.gradients_of_rows() && p.dlogsumexp && !up_to_64 && p.may_empty_rows) return false;
  // Block masks: only without position masks and shared keys, and with dropout only up to head dim 64. Their lists are
  // taken head by head, so a list of more than 2048 rows would delay later heads.
  if (listed && (p.group() > 1 || has.Any(kPositionMasks) || listed_rows > 2048 || (dropout && !up_to_64)))
    return false;
  // Registers: dropout with a window or segments, or up to head dim 64 with shared keys.
  if (dropout && (has.Any(kLocal) || (p.group() > 1 && up_to_64))) return false;
  // With fused rows, query heads that share keys are computed one by one, and their dK and dV are added in f32.
  // Otherwise too many heads would be in progress. One by one is only worthwhile with few tiles, or if large groups
  // share keys and the rows that see them do not fit into L2: Q and dO of a head have 16 MB from 2^23 entries on, dQ in
  // f32 has another 16 MB, and L2 has 60 MB.
  const bool long_heads = p.q_len * (p.qk_dim + p.v_dim) >= 1 << 23 && p.kv_len <= p.q_len && !has.Any(kLocal);
  if (p.group() > 1 && !LeavesIdle(target, p) && !(long_heads && p.group() >= 4)) return false;
  // The kernel: all arrays have 16 bits, no pairs of CTAs, scores are not formed entry by entry.
  return ElementOf(p.dtype).bytes == 2 && !p.unrounded && has.Any(kHeadDimsUpTo128) && !has.Any(kScoreFeatures) &&
         SumsDQ(p);
}

int64_t HeadsAtATime(const Target& target, const Problem& p) {
  return std::min(p.batch * p.q_heads, target.multiprocessors / DivideUp(p.kv_len, kBackwardKeys) + 1);
}

// Four times the heads that are computed at a time, because some are prepared before and some are converted after. With
// a causal mask or a block mask, heads take less time, so it is six times as many.
int64_t HeadsInScratch(const Target& target, const Problem& p) {
  return std::min(p.batch * p.q_heads, (FeaturesOf(p).Any(kCausal | kListed) ? 6 : 4) * HeadsAtATime(target, p));
}

}  // namespace jax_flash
