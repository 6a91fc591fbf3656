// The buffers of the two custom calls, checked against the problem (docs/architecture.md lists their shapes). What the
// problem does not have is null.
#pragma once

#include <cstdint>

namespace jax_flash {

struct Operands {
  const void *query, *key, *value, *scale, *bias;
  const uint8_t* mask;
  const int32_t *q_lengths, *kv_lengths, *q_segments, *kv_segments, *query_offset;
  const int32_t *blocks, *row_lists, *column_lists;
  const uint32_t *element_masks, *seed, *batch_id, *head_id;
};

struct ForwardResults {
  void *o, *l, *m;
};

// What the backward reads beside the operands.
struct Cotangents {
  const void *o, *l, *m, *d_o, *dlogsumexp;
};

struct BackwardResults {
  void *dq, *dk, *dv, *dbias;
};

}  // namespace jax_flash
