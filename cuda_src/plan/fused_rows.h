// The Hopper backward as a single kernel. Usually there are three: one before the main kernel computes L and D of each
// row of Q, one after it converts the sums of dQ. Both are row kernels. With fused rows, three warps of each CTA of the
// main kernel do their work head by head, which would be idle otherwise (hopper/backward_fused_rows.cuh).
#pragma once

#include <cstdint>

#include "common/problem.h"
#include "cuda_src/plan/target.h"

namespace jax_flash {

bool FusesRows(const Target& target, const Problem& p);

// With fused rows: the number of heads whose kv tiles are computed at a time, and the number of heads that have scratch
// memory at a time.
int64_t HeadsAtATime(const Target& target, const Problem& p);
int64_t HeadsInScratch(const Target& target, const Problem& p);

}  // namespace jax_flash
