#include "cuda_src/plan/mask_blocks.h"

#include "cuda_src/plan/family.h"

namespace jax_flash {
namespace {

// Everything that these kernels depend on, so that many problems share a cubin.
int AddMaskUnit(const Problem& p, Plan* plan) {
  Problem any;
  any.dtype = DType::kBF16;
  any.qk_dim = any.v_dim = 64;
  any.mask.array = ExtentOf(p.mask.array.present);
  any.mask.mask_mod = p.mask.mask_mod;
  any.captured = p.captured;
  any.mask.query_offset = p.mask.mask_mod.present() && p.mask.query_offset;
  any.origin = p.mask.mask_mod.present() && p.origin;
  any.q_len = p.q_len, any.kv_len = p.kv_len;  // not for the cubin, but for the ranges of the programs' integers
  any.mask.q_block = p.mask.q_block, any.mask.kv_block = p.mask.kv_block;
  return AddUnit("scheduler/mask_blocks.cuh", DependsOn::kEveryPass, any, {Family::kAmpere}, plan);
}

// Do partial blocks have bits? They do with a mask operand or a block mask, also in addition to a mask_mod. Otherwise
// the kernels evaluate mask_mod for their entries.
bool StoresBits(const Problem& p) { return p.mask.array.present || p.mask.block_mask.present; }

// The number of distinct blocks of a batch entry in the mask made from p's masks. A broadcast dim counts once.
int64_t OwnBlocks(const Problem& p, const Problem& made) {
  const Extent mod = p.mask_mod_extent();
  const bool rows = p.mask.array.rows || mod.rows || p.mask.block_mask.present;
  const bool columns = p.mask.array.columns || mod.columns || p.mask.block_mask.present;
  return made.elements("N", made.mask.block_mask) * (rows ? made.block_rows() : 1) *
         (columns ? made.block_columns() : 1);
}

}  // namespace

bool MakesMaskBlocks(const Problem& p, Pass pass, const Target& target) {
  return (p.mask.array.present || p.mask.mask_mod.present()) &&
         !(pass == Pass::kForward && ampere::FewQueries(target, p));
}

Problem WithMaskInBlocks(const Problem& p) {
  const Extent mask = p.mask.array, mod = p.mask_mod_extent(), blocks = p.mask.block_mask;
  Problem made = p;
  made.mask.block_mask = {true, mask.batch || mod.batch || blocks.batch, mask.heads || mod.heads || blocks.heads, true,
                          true};
  made.mask.array = {};
  if (StoresBits(p)) made.mask.mask_mod = {};
  made.mask.q_block = made.mask.kv_block = kMaskBlock;
  made.mask.element_masks = StoresBits(p) ? OwnBlocks(p, made) : 0;
  made.mask.row_list_size = kListHeader + made.block_columns();
  made.mask.column_list_size = kListHeader + made.block_rows();
  return made;
}

Operands WithMaskInBlocks(Operands in, const Scratch& layout, char* scratch) {
  in.blocks = reinterpret_cast<int32_t*>(scratch + layout.blocks);
  in.row_lists = reinterpret_cast<int32_t*>(scratch + layout.listed_rows);
  in.column_lists = reinterpret_cast<int32_t*>(scratch + layout.listed_columns);
  in.element_masks = layout.mask_bits < 0 ? nullptr : reinterpret_cast<uint32_t*>(scratch + layout.mask_bits);
  return in;
}

void AddMaskBlocks(const Problem& p, Plan* plan) {
  const int unit = AddMaskUnit(p, plan);
  const Problem made = WithMaskInBlocks(p);
  const auto words = [&](const char* dims) { return 4 * made.elements(dims, made.mask.block_mask); };
  plan->scratch.Reserve(&Scratch::blocks, words("BNUV"));
  plan->scratch.Reserve(&Scratch::listed_rows, words("BNUR"));
  plan->scratch.Reserve(&Scratch::listed_columns, words("BNVC"));
  plan->scratch.Reserve(&Scratch::mask_counts, words("BNU") + words("BNV"));
  const auto add = [&](const char* entry, int64_t blocks) {
    plan->launches.push_back({unit, entry, blocks, kMaskThreads});
  };
  add("jax_flash_mask_blocks", made.elements("B", made.mask.block_mask) * OwnBlocks(p, made));
  add("jax_flash_mask_lists", 2 * made.elements("BN", made.mask.block_mask));
}

void PrepareMasksByRow(const Problem& p, Plan* plan) {
  const bool made = plan->scratch.blocks >= 0;
  if (made && p.mask.element_masks > 0)
    plan->scratch.Reserve(&Scratch::mask_bits, 4 * p.elements("BPQW", p.mask.block_mask));
}

void PrepareMasksByKey(const Problem& p, Plan* plan) {
  if (p.mask.element_masks == 0) return;
  const bool made = plan->scratch.blocks >= 0;
  const int64_t masks = p.elements("BP", p.mask.block_mask);
  plan->scratch.Reserve(&Scratch::transposed_bits, 4 * masks * p.mask.kv_block * WordsOfLine(p.mask.q_block));
  if (!made) plan->launches.push_back({AddMaskUnit(p, plan), "jax_flash_mask_transpose", masks, kMaskThreads});
}

}  // namespace jax_flash
