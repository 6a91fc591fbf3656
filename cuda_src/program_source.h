// Score programs as CUDA C++: the generated header this_program.h, which kernels include.
#pragma once

#include <string>

#include "common/problem.h"

namespace jax_flash {

// Longer programs are not inlined: inlined for every entry of a lane, they would take half a minute to compile. A
// mask_mod is called in a loop instead (semantics/tile_mask.cuh), which is not unrolled then.
constexpr int kMaxInlined = 32;

// Defines ScoreMod, MaskMod and ScoreGrad for a problem (cuda_src/kernels/semantics/program.cuh). Absent programs
// become identities. The template parameter kInBounds means that the entry is within T and S (Facts::within), so
// indices that depend on its position need no clamps. It is always true for MaskMod. It is always false for ScoreGrad,
// because the kernels have no registers for two versions. kClampsIndices: does ScoreMod clamp such indices? kSumOver:
// the kind of each sum that ScoreGrad adds to. kSlopes: does the result of ScoreGrad depend on the score? kMaskRows,
// kMaskColumns: does MaskMod depend on the query, or on the key?
std::string ProgramSource(const Problem& problem);

}  // namespace jax_flash
