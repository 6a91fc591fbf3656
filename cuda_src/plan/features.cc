#include "cuda_src/plan/features.h"

#include "cuda_src/element.h"
#include "cuda_src/plan/family.h"

namespace jax_flash {

bool BiasByEntry(const Problem& p) {
  const bool loaded =
      p.score.bias_dtype == DType::kF16 || p.score.bias_dtype == DType::kBF16 || p.score.bias_dtype == DType::kF32;
  return p.score.bias.present && !(loaded && p.score.bias.rows && p.score.bias.columns &&
                                   p.kv_len * ElementOf(p.score.bias_dtype).bytes % 16 == 0);
}

bool IsLight(const Program& score_mod) {
  constexpr int64_t kFew = 16;
  return score_mod.size() <= kFew &&
         std::all_of(score_mod.instructions.begin(), score_mod.instructions.end(), [](const Instruction& x) {
           switch (x.op) {
             case Op::min_f:
             case Op::max_f:
             case Op::neg_f:
             case Op::abs_f:
             case Op::add_i:
             case Op::sub_i:
             case Op::mul_i:
             case Op::min_i:
             case Op::max_i:
             case Op::abs_i:
             case Op::select_f:
             case Op::select_i:
             case Op::cast_i_f:
             case Op::result:
               return true;
             default:  // inputs, constants, loads, and the first float functions
               return x.op <= Op::mul_f || (Op::eq_i <= x.op && x.op <= Op::ge_i);
           }
         });
}

#define ADD(name, text, there) has.bits |= (there) ? FeatureBits(name) : 0;

Features FeaturesOf(const Problem& p) {
  Features has;
  JAX_FLASH_FEATURES(ADD)
  return has;
}

Features FeaturesOfTiles(const Problem& p, const Target& target, int rows) {
  Features has;
  JAX_FLASH_TILE_FEATURES(ADD)
  return has;
}

#undef ADD

std::vector<std::string> NamesOf(Features features) {
  std::vector<std::string> names;
#define NAME(name, text, there) \
  if (features.Any(name)) names.push_back(text);
  JAX_FLASH_FEATURES(NAME)
  JAX_FLASH_TILE_FEATURES(NAME)
#undef NAME
  return names;
}

}  // namespace jax_flash
