// Score programs as CUDA C++: the header this_program.h that a kernel is compiled with.
#pragma once

#include <string>

#include "common/problem.h"

namespace jax_flash {

// A program of more instructions is a function of its own: inlined for every entry that a lane has, it would take the
// compiler half a minute. A mask_mod is asked in a loop (semantics/tile_mask.cuh), which then is not unrolled.
constexpr int kInlined = 32;

// The functions ScoreMod, MaskMod and ScoreGrad of cuda_src/kernels/semantics/program.cuh, of a problem's programs;
// what it does not have changes nothing. kInBounds: they are asked of an entry within T and S (Facts::within), so that
// indices which are made of its place need not be clamped or counted from the end (a MaskMod always is, ScoreGrad
// never, which has no time for two forms); kInBoundsHelps: does ScoreMod have such indices? kSumOver, of each sum that
// ScoreGrad adds to. kSlopes: does the result of ScoreGrad depend on the score? kMaskRows, kMaskColumns: does MaskMod
// depend on the query, or on the key?
std::string ProgramSource(const Problem& problem);

}  // namespace jax_flash
