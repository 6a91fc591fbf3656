// Conversion of a mask operand and a mask_mod to a block mask. Two launches before the pass compute it, in blocks of
// kMaskBlock x kMaskBlock entries (kernels/scheduler/mask_blocks.cuh).
#pragma once

#include "common/arrays.h"
#include "cuda_src/plan/plan.h"

namespace jax_flash {

// Are they converted? A forward of few queries has few entries, and tests them directly.
bool MakesMaskBlocks(const Problem& p, Pass pass, const Target& target);

// The problem with the resulting block mask, which replaces these masks and its own block mask. For a mask_mod alone,
// it records only empty and full blocks; the kernels evaluate mask_mod in partial blocks. Otherwise each distinct block
// has an element mask.
Problem WithMaskInBlocks(const Problem& p);
// The operands with the resulting block mask, which is in scratch memory.
Operands WithMaskInBlocks(Operands in, const Scratch& layout, char* scratch);

// Adds the launches that compute the block mask.
void AddMaskBlocks(const Problem& p, Plan* plan);

// Call these before adding a launch that reads the element masks of `p`, the problem with the block mask. They reserve
// scratch memory for masks that earlier launches do not need: by rows if the block mask is computed, and transposed.
// They also add the launch that transposes the element masks of an operand.
void PrepareMasksByRow(const Problem& p, Plan* plan);
void PrepareMasksByKey(const Problem& p, Plan* plan);

}  // namespace jax_flash
