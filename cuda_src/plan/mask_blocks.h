// A mask operand and a mask_mod as the kernels have them: a block mask, which two launches before them make of both, in
// blocks of kMaskBlock x kMaskBlock entries (kernels/scheduler/mask_blocks.cuh).
#pragma once

#include "common/arrays.h"
#include "cuda_src/plan/plan.h"

namespace jax_flash {

// Whether they are made into one. A forward of few queries has so few entries that it looks at them itself.
bool MakesMaskBlocks(const Problem& p, Pass pass, const Target& target);

// The problem with the block mask that is made of these and its own block mask, and no other. Of a mask_mod alone it
// says no more than which blocks are empty, or full, and the kernels ask for the rest; else an element mask is there
// for each block of the mask, of which there is one where it is broadcast.
Problem WithMaskInBlocks(const Problem& p);
// The operands with this block mask, which is in scratch memory.
Operands WithMaskInBlocks(Operands in, const Scratch& layout, char* scratch);

// Adds the launches that make the block mask.
void AddMaskBlocks(const Problem& p, Plan* plan);

// Called before a launch is added that reads the element masks of `p`, the problem with the block mask. They reserve
// the masks in scratch memory that the launches before do not need: those of a block mask that is made, in its own
// order, and transposed masks. They add the launch that transposes the masks of an operand.
void ReadMasksByRow(const Problem& p, Plan* plan);
void ReadMasksByKey(const Problem& p, Plan* plan);

}  // namespace jax_flash
