#include "cuda_src/plan/plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "cuda_src/plan/family.h"

namespace jax_flash {
namespace {

void AddForward(const Target& target, const Problem& p, Plan* plan) {
  if (ampere::FewQueries(target, p)) {
    plan->reasons.push_back(
        "few queries see many keys: that is for the kernels that all GPUs have, which can divide the keys into parts");
    return ampere::AddForward(target, p, plan);
  }
  if (const auto tiling = hopper::Tiling(target, p, Pass::kForward)) return hopper::AddForward(p, *tiling, plan);
  if (target.hopper) {
    plan->reasons.push_back("Hopper's own forward is not taken: " + hopper::WhyNot(target, p, Pass::kForward));
  }
  ampere::AddForward(target, p, plan);
}

void AddBackward(const Target& target, const Problem& p, Plan* plan) {
  bool prepared = false;  // by Ampere's kernels
  if (HasMain(p)) {
    if (const auto tiling = hopper::Tiling(target, p, Pass::kBackward)) {
      hopper::AddBackward(p, *tiling, plan);
    } else {
      if (target.hopper) {
        plan->reasons.push_back("Hopper's own backward is not taken: " + hopper::WhyNot(target, p, Pass::kBackward));
      }
      ampere::AddBackward(target, p, plan);
      prepared = true;
    }
  }
  if (p.dq && p.deterministic) {
    plan->reasons.push_back("deterministic: dQ is a kernel's of its own, which all GPUs have, in a fixed order");
    ampere::AddQuery(target, p, plan);
  }
  if (p.dbias) {
    plan->reasons.push_back("the gradient of the bias is a pass of its own, by a kernel that all GPUs have");
    ampere::AddBias(target, p, prepared, plan);
  }
}

}  // namespace

std::string CudaRefusal(const Problem& p) {
  constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
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

int AddUnit(const std::string& kernel, const Problem& p, const KernelTiling& tiling, Plan* plan) {
  const bool main = kernel == "backward", backward = kernel.substr(0, 8) == "backward";
  KernelConfig config;
  KernelProblem& x = config.problem;
  x.dtype = p.dtype;
  x.bias_dtype = p.bias_dtype;
  x.qk_dim = int(p.qk_dim);
  x.v_dim = int(p.v_dim);
  x.causal = p.causal;
  x.window = p.window();
  x.q_lengths = p.q_lengths;
  x.kv_lengths = p.kv_lengths;
  x.segments = p.segments;
  x.query_offset = p.query_offset;
  x.mask = p.mask.present;
  x.q_block = int(p.q_block);
  x.kv_block = int(p.kv_block);
  x.soft_cap = p.soft_cap > 0;
  x.dropout = p.dropout();
  x.full_precision = p.dtype == DType::kF32 && p.full_precision;
  x.dlogsumexp = backward && p.dlogsumexp;
  x.dq = main && SumsDQ(p);
  x.dk = main && p.dk;
  x.dv = main && p.dv;
  config.tiling = tiling;
  const std::string room = kernel == "segments" ? "scheduler" : tiling.family == Family::kHopper ? "hopper" : "ampere";
  plan->units.push_back({room + "/" + kernel + ".cuh", config});
  return int(plan->units.size()) - 1;
}

Plan MakePlan(const Problem& p, Pass pass, const Target& target) {
  const std::string refusal = CudaRefusal(p);
  if (!refusal.empty()) throw std::invalid_argument(refusal + ". implementation=\"xla\" has no such limit");
  Plan plan;
  if (NothingToCompute(p)) return plan;
  if (target.capability == 90 && !target.hopper) {
    plan.reasons.push_back("JAX_FLASH_CUDA_KERNELS=sm80: Hopper takes the kernels that all GPUs have");
  }
  if (p.segments) ampere::AddSegments(p, &plan);
  (pass == Pass::kForward ? AddForward : AddBackward)(target, p, &plan);
  return plan;
}

}  // namespace jax_flash
