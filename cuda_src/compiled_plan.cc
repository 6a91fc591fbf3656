#include "cuda_src/compiled_plan.h"

#include <array>
#include <vector>

#include "cuda_src/jit.h"

namespace jax_flash {
namespace {

// The state of a part's candidates so far.
struct CandidateState {
  int best = 0;
  Faults least;
  bool done = false;
};

}  // namespace

Plan CompiledPlan(const Problem& p, Pass pass, const Target& target, const std::string& arch) {
  Choices choices = {};
  std::array<CandidateState, kParts> tried;
  for (;;) {
    Plan plan = MakePlan(p, pass, target, choices);
    const std::vector<Unit> units = UnitsOf(plan);
    CacheKernels(units, arch);
    bool changed = false;
    for (int part = 0; part < kParts; ++part) {
      const PlannedPart& planned = plan.parts[part];
      CandidateState& so_far = tried[part];
      if (planned.candidates == 0 || so_far.done) continue;
      int& choice = choices[part];
      const Faults faults = CachedKernels(units[planned.unit], arch).faults;
      if (choice == 0 || faults < so_far.least) so_far.best = choice, so_far.least = faults;
      so_far.done = !faults.Any() || choice + 1 == planned.candidates;
      const int next = so_far.done ? so_far.best : choice + 1;
      changed |= next != choice;
      choice = next;
    }
    if (changed) continue;
    for (const CandidateState& part : tried) {
      if (part.least.Any()) plan.reasons.push_back("no tiles fit the registers. With these, " + TextOf(part.least));
    }
    return plan;
  }
}

}  // namespace jax_flash
