#include "cuda_src/plan/plan.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <stdexcept>

#include "common/arrays.h"
#include "cuda_src/plan/family.h"
#include "cuda_src/plan/mask_blocks.h"
#include "cuda_src/program_source.h"

namespace jax_flash {
namespace {

void AddSegments(const Problem& p, Plan* plan) {
  Problem any;  // the kernel does not depend on the problem, so all problems share a cubin
  any.dtype = DType::kBF16;
  any.qk_dim = any.v_dim = 64;
  any.mask.segment_ids = true;
  const int64_t positions = kSegmentBlock * kSegmentBlocks;
  const int64_t blocks = p.batch * (DivideUp(p.q_len, positions) + DivideUp(p.kv_len, positions));
  const auto bounds = [&](int64_t length) {
    return p.batch * DivideUp(length, kSegmentBlock) * int64_t(sizeof(SegmentBounds));
  };
  plan->scratch.Reserve(&Scratch::q_bounds, bounds(p.q_len));
  plan->scratch.Reserve(&Scratch::kv_bounds, bounds(p.kv_len));
  const int unit = AddUnit("scheduler/segments.cuh", DependsOn::kEveryPass, any, {Family::kAmpere}, plan);
  plan->launches.push_back({unit, "jax_flash_segments", blocks, kSegmentThreads});
}

// The functions that add the launches of each family's kernels.
struct FamilyKernels {
  Family family;
  const char* name;
  decltype(&hopper::AddForward) add_forward;
  decltype(&hopper::AddTangent) add_tangent;
  decltype(&hopper::AddBackward) add_backward;
  decltype(&hopper::AddQuery) add_query;
  decltype(&hopper::AddBias) add_bias;
};
constexpr FamilyKernels kFamilies[] = {
    {Family::kHopper, "Hopper", hopper::AddForward, hopper::AddTangent, hopper::AddBackward, hopper::AddQuery,
     hopper::AddBias},
    {Family::kAmpere, "Ampere", ampere::AddForward, ampere::AddTangent, ampere::AddBackward, ampere::AddQuery,
     ampere::AddBias},
};
const FamilyKernels& KernelsOf(const KernelTiling& tiling) {
  return *std::find_if(std::begin(kFamilies), std::end(kFamilies),
                       [&](const FamilyKernels& x) { return x.family == tiling.family; });
}

// The chosen candidate of a part.
const KernelTiling& Chosen(Part part, const Tilings& candidates, const Choices& choices, Plan* plan) {
  const int choice = choices[int(part)];
  plan->parts[int(part)].candidates = int(candidates.size());
  for (int i = 0; i < choice; ++i) {
    const KernelTiling& tiling = candidates[i];
    plan->reasons.push_back(std::string(KernelsOf(tiling).name) + " tiles of " + std::to_string(tiling.rows) + " x " +
                            std::to_string(tiling.cols) +
                            (tiling.interleaved_heads ? ", with the heads of a group interleaved," : "") +
                            " are not used: the compiler has too few registers for them");
  }
  return candidates.at(choice);
}

// Records the unit that a part added last.
void SetUnit(Part part, Plan* plan) { plan->parts[int(part)].unit = int(plan->units.size()) - 1; }

void Append(const Tilings& more, Tilings* candidates) {
  candidates->insert(candidates->end(), more.begin(), more.end());
}

void AddForward(const Target& target, const Problem& p, const Choices& choices, Plan* plan) {
  Tilings candidates;
  if (ampere::SplitsKeys(target, p) && hopper::SplitsKeys(target, p)) {
    plan->reasons.push_back("few queries see many keys of a latent: CTAs split the keys");
    return hopper::AddSplitForward(target, p, plan);
  }
  if (p.page > 0) {
    plan->reasons.push_back("keys are in pages: the kernels for Ampere and later load them row by row");
  } else if (ampere::FewQueries(target, p)) {
    plan->reasons.push_back("few queries see many keys: the kernels for Ampere and later can split the keys");
  } else {
    candidates = hopper::Candidates(target, p, Pass::kForward);
    if (target.hopper && candidates.empty()) {
      plan->reasons.push_back("the Hopper forward is not used: " + hopper::WhyNot(target, p, Pass::kForward));
    }
  }
  if (ampere::SplitsKeys(target, p)) return ampere::AddSplitForward(target, p, plan);
  // Hopper's smallest tiles leave as many registers per entry as Ampere's, so Ampere's are no fallback.
  if (candidates.empty()) candidates = ampere::Candidates(target, p, Pass::kForward);
  const KernelTiling& tiling = Chosen(Part::kMain, candidates, choices, plan);
  KernelsOf(tiling).add_forward(target, p, tiling, plan);
  SetUnit(Part::kMain, plan);
}

void AddTangent(const Target& target, const Problem& p, const Choices& choices, Plan* plan) {
  Tilings candidates = hopper::Candidates(target, p, Pass::kTangent);
  if (target.hopper && candidates.empty()) {
    plan->reasons.push_back("the Hopper tangent is not used: " + hopper::WhyNot(target, p, Pass::kTangent));
  }
  if (candidates.empty()) candidates = ampere::Candidates(target, p, Pass::kTangent);
  const KernelTiling& tiling = Chosen(Part::kMain, candidates, choices, plan);
  KernelsOf(tiling).add_tangent(target, p, tiling, plan);
  SetUnit(Part::kMain, plan);
}

// With fused row kernels, Hopper's backward has no candidates from Ampere, which need scratch memory for all heads.
Tilings BackwardCandidates(const Target& target, const Problem& p, Plan* plan) {
  Tilings candidates = hopper::Candidates(target, p, Pass::kBackward);
  if (target.hopper && candidates.empty()) {
    plan->reasons.push_back("the Hopper backward is not used: " + hopper::WhyNot(target, p, Pass::kBackward));
  }
  if (candidates.empty() || !candidates[0].fused_rows)
    Append(ampere::Candidates(target, p, Pass::kBackward), &candidates);
  return candidates;
}

Tilings QueryCandidates(const Target& target, const Problem& p, Plan* plan) {
  Tilings candidates = hopper::QueryCandidates(target, p);
  const std::string kernel = candidates.empty() ? "kernel for Ampere and later" : "kernel";
  plan->reasons.push_back((HasWideHeads(p) ? "head dims above 256" : "deterministic") + (": a separate " + kernel) +
                          " sums dQ in a fixed order");
  Append(ampere::QueryCandidates(target, p), &candidates);
  return candidates;
}

Tilings BiasCandidates(const Target& target, const Problem& p, Plan* plan) {
  Tilings candidates = hopper::BiasCandidates(target, p);
  if (target.hopper && candidates.empty())
    plan->reasons.push_back("the Hopper kernel is not used for it: " + hopper::WhyNotBias(target, p));
  Append(ampere::BiasCandidates(target, p), &candidates);
  return candidates;
}

void AddBackward(const Target& target, const Problem& given, const Choices& choices, Plan* plan) {
  Problem p = given;
  const Tilings ordered = hopper::OrderedCandidates(target, given);
  if (!ordered.empty()) {
    plan->reasons.push_back("deterministic: blocks add to dQ in a fixed order");
    p.deterministic = false;  // the main kernel adds to dQ (SumsDQ), but in order
  }
  std::optional<Family> prepared;  // the family whose kernels have prepared L and D
  if (HasMain(p)) {
    const Tilings candidates = ordered.empty() ? BackwardCandidates(target, p, plan) : ordered;
    const KernelTiling& tiling = Chosen(Part::kMain, candidates, choices, plan);
    KernelsOf(tiling).add_backward(target, p, tiling, plan);
    SetUnit(Part::kMain, plan);
    prepared = tiling.family;
  }
  const bool separate_dq = p.dq && !SumsDQ(p);
  if (!prepared && ((p.gradients_of_rows() && !p.dbias) || (separate_dq && HasWideHeads(p)))) {
    ampere::AddRows(p, plan);
    prepared = Family::kAmpere;
  }
  if (separate_dq) {
    const Tilings candidates = QueryCandidates(target, p, plan);
    const KernelTiling& tiling = Chosen(Part::kQuery, candidates, choices, plan);
    KernelsOf(tiling).add_query(p, tiling, plan);
    SetUnit(Part::kQuery, plan);
  }
  if (p.dbias) {
    plan->reasons.push_back("a separate pass sums the gradient of the bias in a fixed order");
    const Tilings candidates = BiasCandidates(target, p, plan);
    const KernelTiling& tiling = Chosen(Part::kBias, candidates, choices, plan);
    KernelsOf(tiling).add_bias(target, p, tiling, prepared == tiling.family, plan);
    SetUnit(Part::kBias, plan);
  }
}

// The plan of a supported problem, on a GPU that may be too small for its CTAs.
Plan PlanOf(const Problem& p, Pass pass, const Target& target, const Choices& choices) {
  Plan plan;
  if (NothingToCompute(p)) return plan;
  if (target.capability == 90 && !target.hopper) {
    plan.reasons.push_back("JAX_FLASH_CUDA_KERNELS=sm80: Hopper uses the kernels for Ampere and later");
  }
  if (p.mask.segment_ids) AddSegments(p, &plan);
  const bool makes_blocks = MakesMaskBlocks(p, pass, target);
  if (makes_blocks) AddMaskBlocks(p, &plan);
  const Problem& in_blocks = makes_blocks ? WithMaskInBlocks(p) : p;
  const auto add = pass == Pass::kForward ? AddForward : pass == Pass::kBackward ? AddBackward : AddTangent;
  add(target, in_blocks, choices, &plan);
  return plan;
}

// The maximum scratch memory over all choices of candidates.
int64_t MaxScratch(const Problem& p, Pass pass, const Target& target) {
  int64_t bytes = 0;
  Choices choices = {};
  for (int part = 0; part < kParts;) {
    const Plan plan = PlanOf(p, pass, target, choices);
    bytes = std::max(bytes, plan.scratch.bytes);
    // Counts the choices up, like the digits of a number.
    for (part = 0; part < kParts && ++choices[part] >= plan.parts[part].candidates; ++part) choices[part] = 0;
  }
  return bytes;
}

// All GPUs whose plans may differ in scratch memory.
std::vector<Target> AllTargets() {
  std::vector<Target> targets;
  for (int multiprocessors = 1; multiprocessors <= kMaxMultiprocessors; ++multiprocessors) {
    for (const char* const arch : {"sm_80", "sm_89", "sm_90a"}) {  // one for each size of shared memory
      Target target = TargetOf(arch, multiprocessors);
      target.hopper = target.capability == 90;  // also if JAX_FLASH_CUDA_KERNELS takes another family here
      targets.push_back(target);
    }
  }
  return targets;
}

}  // namespace

std::string CudaRefusal(const Problem& p) {
  constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
  const auto sized = [](const char* name, int64_t size) { return std::string(name) + " " + std::to_string(size); };
  if (p.dtype == DType::kF64) return "float64: the CUDA kernels support float16, bfloat16 and float32";
  if (p.tangent() && p.output_dtype() != p.dtype)
    return "a differentiated scale: the CUDA kernels compute tangents of it in 16 bits";
  if (p.tangent() && p.dtype == DType::kF32 && std::max(p.qk_dim, p.v_dim) > 128)
    return "float32 with head dims above 128: the CUDA kernels have no tangent for it";
  if (p.tangent() && HasWideHeads(p)) return "head dims above 256: the CUDA kernels have no tangent for them";
  if (p.dbias && p.dtype == DType::kF32 && HasWideHeads(p))
    return "float32 with head dims above 256: the CUDA kernels have no gradient of a bias for it";
  if (p.deterministic && p.captured_gradients()) {
    return "deterministic gradients of arrays that score_mod captures: the CUDA kernels add them in no fixed order";
  }
#define CHECK(type, name, dtype, dims, there) \
  if (!reads::name && ExtentOf(there).present) return #name ": the CUDA kernels do not read this operand";
  JAX_FLASH_OPERANDS(CHECK)
#undef CHECK
#define CHECK(operand, gradient, ...)                                                                      \
  if (!writes::gradient && p.gradient) return #gradient ": the CUDA kernels do not compute this gradient"; \
  if (!reads::operand##_tangent && p.operand##_tangent) return #operand ": the CUDA kernels do not read its tangent";
  JAX_FLASH_DERIVATIVES(CHECK)
#undef CHECK
  for (const int64_t dim : {p.qk_dim, p.v_dim}) {
    if (dim % 8 != 0 || dim < 8 || dim > kMaxDim) {
      return sized("head dim", dim) + ": the CUDA kernels support multiples of 8 up to " + std::to_string(kMaxDim);
    }
  }
  const int64_t longest = std::max(p.padded_q_len(), p.padded_kv_len());
  if (longest > kMaxLength)
    return sized("length", longest) + ": the CUDA kernels support at most " + std::to_string(kMaxLength);
  if (p.batch * p.q_heads > 0 && DivideUp(longest, 16) > kMaxSize / p.batch / p.q_heads) {
    return "batch x heads x length is too large for the CUDA kernels";
  }
  if (p.page > 0 && p.pages > kMaxLength / p.page) {
    return sized("page", p.page) + " x " + sized("pages", p.pages) + ": the CUDA kernels support at most " +
           std::to_string(kMaxLength);
  }
  return "";
}

bool ReadsLatent(const Problem& p) { return p.latent && HasWideHeads(p); }

bool NothingToCompute(const Problem& p) { return p.batch == 0 || p.q_heads == 0 || p.q_len == 0 || p.kv_len == 0; }

int AddUnit(const std::string& file, DependsOn depends_on, const Problem& p, const KernelTiling& tiling, Plan* plan) {
  const bool main = depends_on == DependsOn::kMain, backward = main || depends_on == DependsOn::kBackward;
  const bool tangent = depends_on == DependsOn::kTangent;
#define VALUE(type, name, ...) __VA_ARGS__,
  const KernelConfig config = {{JAX_FLASH_KERNEL_PROBLEM(VALUE)}, tiling};
#undef VALUE
  plan->units.push_back({file, config, p});
  return int(plan->units.size()) - 1;
}

BiasWork BiasWorkIn(const Problem& p, const KernelTiling& tiling) {
  BiasWork work = {1, 1, p.elements("BNTS", p.score.bias)};
  const auto dimension = [&](bool own, int64_t size, int64_t step) {
    (own ? work.tiles : work.summed) *= DivideUp(size, step);
  };
  dimension(p.score.bias.batch, p.batch, 1);
  dimension(p.score.bias.heads, p.q_heads, 1);
  dimension(p.score.bias.rows, p.q_len, tiling.rows);
  dimension(p.score.bias.columns, p.kv_len, tiling.cols);
  return work;
}

int64_t ReserveRows(const Problem& p, Plan* plan) {
  Scratch& scratch = plan->scratch;
  const int64_t heads = scratch.heads > 0 ? scratch.heads : p.batch * p.q_heads;
  const int64_t rows = heads * RoundUp(p.q_len, kRowPadding);
  scratch.Reserve(&Scratch::logsumexp, 4 * rows);
  scratch.Reserve(&Scratch::d, 4 * rows);
  return rows;
}

void AddBiasFinish(const BiasWork& work, int unit, Plan* plan) {
  plan->scratch.parts = int(work.parts);
  if (work.parts == 1) return;
  plan->scratch.Reserve(&Scratch::dbias_parts, 4 * work.parts * work.elements);
  const int64_t blocks = DivideUp(work.elements, kRowThreads);
  plan->launches.push_back({unit, "jax_flash_backward_bias_finish", blocks, kRowThreads});
}

int64_t BlocksOf(const Launch& launch, int multiprocessors) {
  if (!launch.persistent) return launch.blocks;
  return std::min<int64_t>(launch.blocks, std::max(multiprocessors / launch.cluster, 1) * launch.cluster);
}

Plan MakePlan(const Problem& p, Pass pass, const Target& target, const Choices& choices) {
  const std::string refusal = CudaRefusal(p);
  if (!refusal.empty()) throw std::invalid_argument(refusal + ". implementation=\"xla\" has no such limit");
  Plan plan = PlanOf(p, pass, target, choices);
  for (const Launch& launch : plan.launches) {
    if (launch.blocks > std::numeric_limits<int32_t>::max()) {
      throw std::invalid_argument(launch.entry + " would have " + std::to_string(launch.blocks) +
                                  " blocks: batch x heads x length is too large for the CUDA kernels");
    }
  }
  return plan;
}

std::vector<Unit> UnitsOf(const Plan& plan) {
  std::vector<Unit> units;
  for (const PlannedUnit& x : plan.units) units.push_back({x.file, x.config, ProgramSource(x.problem)});
  return units;
}

int64_t ScratchBytes(const Problem& p, Pass pass, const std::vector<Target>& targets) {
  if (!CudaRefusal(p).empty()) return 0;
  if (targets.empty()) return ScratchBytes(p, pass, AllTargets());
  int64_t bytes = 0;
  for (const Target& target : targets) bytes = std::max(bytes, MaxScratch(p, pass, target));
  return bytes;
}

}  // namespace jax_flash
