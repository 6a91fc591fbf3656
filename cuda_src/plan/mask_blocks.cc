#include "cuda_src/plan/mask_blocks.h"

#include "cuda_src/plan/family.h"

namespace jax_flash {
namespace {

// All that the kernels depend on: one cubin does for many problems.
int AddMaskUnit(const Problem& p, Plan* plan) {
  Problem any;
  any.dtype = DType::kBF16;
  any.qk_dim = any.v_dim = 64;
  any.mask = ExtentOf(p.mask.present);
  any.q_block = p.q_block;
  any.kv_block = p.kv_block;
  return AddUnit("scheduler/mask_blocks.cuh", Asks::kOfBoth, any, {Family::kAmpere}, plan);
}

}  // namespace

bool MakesMaskBlocks(const Problem& p, Pass pass, const Target& target) {
  return p.mask.present && !(pass == Pass::kForward && ampere::FewQueries(target, p));
}

Problem WithMaskInBlocks(Problem p) {
  const auto either = [&](bool mask, bool block_mask) { return mask || (p.block_mask.present && block_mask); };
  const bool rows = either(p.mask.rows, true), columns = either(p.mask.columns, true);
  p.block_mask = {true, either(p.mask.batch, p.block_mask.batch), either(p.mask.heads, p.block_mask.heads), true, true};
  p.mask = {};
  p.q_block = p.kv_block = kMaskBlock;
  p.element_masks =
      (p.block_mask.heads ? p.q_heads : 1) * (rows ? p.block_rows() : 1) * (columns ? p.block_columns() : 1);
  p.row_list = kListHeader + p.block_columns();
  p.column_list = kListHeader + p.block_rows();
  return p;
}

bool ReadsMasksByRow(const Problem& p, Pass pass, const Target& target) {
  const bool main = pass == Pass::kForward || (HasMain(p) && !hopper::Tiling(target, p, pass));
  return p.element_masks > 0 && (main || p.dbias || (p.dq && p.deterministic));
}

bool ReadsMasksByKey(const Problem& p, Pass pass, const Target& target) {
  return p.element_masks > 0 && pass == Pass::kBackward && HasMain(p) && hopper::Tiling(target, p, pass);
}

void AddMaskBlocks(const Problem& p, Plan* plan) {
  const int unit = AddMaskUnit(p, plan);
  const Problem made = WithMaskInBlocks(p);
  const int64_t tables = made.block_mask.batch ? p.batch : 1, heads = made.block_mask.heads ? p.q_heads : 1;
  plan->launches.push_back({unit, "jax_flash_mask_blocks", tables * made.element_masks, kMaskThreads});
  plan->launches.push_back({unit, "jax_flash_mask_lists", 2 * tables * heads, kMaskThreads});
}

void AddTransposedMasks(const Problem& p, Plan* plan) {
  const int64_t tables = p.block_mask.batch ? p.batch : 1;
  plan->launches.push_back({AddMaskUnit(p, plan), "jax_flash_mask_transpose", tables * p.element_masks, kMaskThreads});
}

}  // namespace jax_flash
