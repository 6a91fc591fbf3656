// What the host passes to every kernel of a call, beside tensor maps. What the problem does not have is null.
#pragma once

#include <cstdint>

namespace jax_flash {

// A [B, N, T, S] operand with its strides in elements, 0 for a broadcast dimension.
template <typename T>
struct Broadcast {
  T* data;
  int64_t batch, head, row, column;
};

// What the 64 rows of Q of a block can see as far as segment ids tell: keys of `any` at most, all keys of `every`. (And
// the same for 64 keys and the rows that see them.)
struct SegmentBounds {
  int any_lo, any_hi, every_lo, every_hi;
};

// A mask of blocks (jax_flash/block_sparse.py).
struct BlockMask {
  const int32_t *blocks, *row_lists, *column_lists;
  const uint32_t* element_masks;
  int element_mask_count;       // of a batch entry
  int row_width, column_width;  // of the lists
  int batch, head;              // the next batch entry's or head's is so many heads further on; 0: it is the same
};

struct Params {
  int batch, q_heads, kv_heads, q_len, kv_len;
  const float* scale;  // τ
  float soft_cap;
  int64_t window_left, window_right;  // -1: unbounded

  const void *query, *key, *value;
  Broadcast<const void> bias;
  Broadcast<const uint8_t> mask;
  const int32_t *q_lengths, *kv_lengths, *q_segments, *kv_segments, *query_offset;
  SegmentBounds *q_bounds, *kv_bounds;  // scratch: [batch, block of 64 queries or keys]
  const uint32_t *seed, *batch_id, *head_id;
  uint32_t drop_threshold;  // in both halves, for what takes two entries at once
  float keep_scale;

  void* o;       // the forward's result, the backward's operand; so are
  float *l, *m;  // [batch, head, row]

  // The backward only.
  const void* d_o;
  const float* dlogsumexp;  // [batch, head, row]
  float *logsumexp, *d;     // scratch: what a kernel needs of m, l and D, in the kernel's own order
  float* dq_sum;            // scratch: dQ in f32, in the kernel's own order; and
  float *dk_sum, *dv_sum;   // if heads of Q that share keys are computed one by one (kSumKV), 0 at first
  void *dq, *dk, *dv;
  float* dbias;
  float* dbias_parts;  // scratch: the parts of dbias [parts, of its shape]; if there are several
  int parts;           // of dbias; of the keys in a forward over parts of them
  int scratch_heads;   // for how many heads scratch is used at a time, if backward_alongside_sm90.cuh does all
  int last_heads;      // of all heads the last, whose tiles may be taken together; no more than scratch_heads
  float* maximum;      // scratch: m, where the kernel on Hopper takes it apart (kMaximumApart)

  // The forward over parts of the keys only. Scratch, [part, batch, head, row]: what each part has for O, l and m.
  float *o_parts, *l_parts, *m_parts;

  BlockMask block_mask;

  // Scratch, 0 at first: what CTAs on Hopper count.
  int* taken;  // tiles, of which each CTA takes the next
  // In the backward: blocks of 64 rows of Q, likewise; of each head those that are prepared, and the tiles of keys
  // whose dQ has been added.
  int *rows_taken, *prepared, *added;
};

}  // namespace jax_flash
