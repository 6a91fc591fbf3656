// The plan of a pass whose kernels spill few or no registers.
#pragma once

#include <string>

#include "cuda_src/plan/plan.h"

namespace jax_flash {

// Compiles the plan's first candidates. If registers of a part spill or its wgmmas are serialized, it tries the part's
// next candidate. If all candidates have such faults, it takes the one with the fewest; it is correct, only slower. The
// kernel caches store ptxas' report, so no later call or process compiles a refused candidate again.
Plan CompiledPlan(const Problem& problem, Pass pass, const Target& target, const std::string& arch);

}  // namespace jax_flash
