// The plan of a pass with the tiles that the compiler has enough registers for.
#pragma once

#include <string>

#include "cuda_src/plan/plan.h"

namespace jax_flash {

// Compiles the plan's first candidates, and takes the next candidate of a part whose registers spill or whose wgmmas
// wait for each other. If all candidates of a part do, it takes the one that spills least: it computes the same, only
// slower. The caches of kernels keep what ptxas found, so no later call or process compiles a refused candidate again.
Plan CompiledPlan(const Problem& problem, Pass pass, const Target& target, const std::string& arch);

}  // namespace jax_flash
