// A mask operand and a mask_mod as the kernels have them: a block mask, which two launches before them make of both, in
// blocks of kMaskBlock x kMaskBlock entries (kernels/scheduler/mask_blocks.cuh).
#pragma once

#include "common/arrays.h"
#include "cuda_src/plan/plan.h"
#include "cuda_src/plan/scratch.h"

namespace jax_flash {

// Whether they are made into one. A forward of few queries has so few entries that it looks at them itself.
bool MakesMaskBlocks(const Problem& p, Pass pass, const Target& target);

// The problem with the block mask that is made of these and its own block mask, and no other. Of a mask_mod alone it
// says no more than which blocks are empty, or full, and the kernels ask for the rest; else an element mask is there
// for each block of the mask, of which there is one where it is broadcast.
Problem WithMaskInBlocks(const Problem& p);
// The operands with this block mask, which is in scratch memory.
Operands WithMaskInBlocks(Operands in, const Scratch& layout, char* scratch);

// Whether there are kernels, of a problem as they have it, that read element masks row by row; and whether there are
// some that read them transposed, key by key.
bool ReadsMasksByRow(const Problem& p, Pass pass, const Target& target);
bool ReadsMasksByKey(const Problem& p, Pass pass, const Target& target);

// The launches: those that make it, ...
void AddMaskBlocks(const Problem& p, Plan* plan);
// ... and one that transposes the element masks of an operand.
void AddTransposedMasks(const Problem& p, Plan* plan);

}  // namespace jax_flash
