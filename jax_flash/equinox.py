"""Equinox: a `MultiheadAttention` module with fused kernels::

    layer = jax_flash.equinox.MultiheadAttention(num_heads=8, query_size=512, key=key)
    y = layer(x, x, x, is_causal=True)

The module has the fields of the stock module, so its parameters load into the stock module and vice versa. The results
differ in two ways. A query that sees no key gives zeros, where Equinox gives the mean of the values. Dropout masks come
from jax_flash's own generator.
"""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash import attention
from jax_flash.block_sparse import BlockMask
from jax_flash.call import Implementation, explains_names
from jax_flash.layouts import SequenceLayout
from jax_flash.windows import Window

__all__ = ["MultiheadAttention"]

Heads = tuple[jax.Array, jax.Array, jax.Array]


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """Multi-head attention with fused kernels, a drop-in for `equinox.nn.MultiheadAttention`.

    The constructor and the fields are the same as in the stock module. Like every Equinox layer, it takes one example.
    Use `jax.vmap` for a batch: the batch is then one kernel call.
    """

    @explains_names
    def __call__(  # type: ignore[override, unused-ignore]  # `deterministic` is deprecated in Equinox, and not here
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        process_heads: Callable[[jax.Array, jax.Array, jax.Array], Heads] | None = None,
        scale: float | ArrayLike | None = None,
        is_causal: bool = False,
        query_seq_lengths: ArrayLike | None = None,
        key_value_seq_lengths: ArrayLike | None = None,
        local_window_size: Window | None = None,
        implementation: Implementation | None = None,
        sinks: ArrayLike | None = None,
        dropout_batch_ids: ArrayLike | None = None,
        dropout_head_ids: ArrayLike | None = None,
        query_segment_ids: ArrayLike | None = None,
        key_value_segment_ids: ArrayLike | None = None,
        logits_soft_cap: float | None = None,
        query_offset: int | ArrayLike | None = None,
        block_mask: BlockMask | None = None,
        score_mod: Callable[..., jax.Array] | None = None,
        mask_mod: Callable[..., jax.Array] | None = None,
        sequence_axis: str | tuple[str, ...] | None = None,
        sequence_layout: SequenceLayout | None = None,
    ) -> jax.Array:
        """Project the inputs to queries, keys and values, attend, and project the result.

        Args:
          query: array [T, query_size].
          key_: array [S, key_size].
          value: array [S, value_size].
          mask: bool array, broadcastable to [num_heads, T, S]. True means that the query may attend to the key.
          key: JAX PRNG key for dropout.
          inference: whether to turn dropout off. Default: `inference` of the module's `dropout`.
          process_heads: function that takes queries [T, num_heads, qk_size], keys [S, num_heads, qk_size] and values
            [S, num_heads, vo_size] and returns the arrays to use instead, for example with rotary embeddings.
          scale, ...: options of `jax_flash.dot_product_attention`, such as `is_causal`, `local_window_size`,
            `query_segment_ids` [T] and `key_value_segment_ids` [S]. An option with one entry per example, such as
            `key_value_seq_lengths`, has shape [1].

        Returns:
          Array [T, output_size].

        Raises:
          RuntimeError: if dropout is on without `key`.
          ValueError: if shapes do not match or a value is out of range.
          TypeError: if an argument has a wrong type or an unknown name.
        """
        projections = (self.query_proj, query), (self.key_proj, key_), (self.value_proj, value)
        q, k, v = (jax.vmap(project)(x).reshape(x.shape[0], self.num_heads, -1) for project, x in projections)
        if process_heads is not None:
            q, k, v = process_heads(q, k, v)
        dtype = jnp.result_type(q, k, v)
        q, k, v = (x.astype(dtype) for x in (q, k, v))
        inference = self.dropout.inference if inference is None else inference
        dropout_rate = 0.0 if inference else self.dropout.p
        if dropout_rate and key is None:
            raise RuntimeError(f"dropout of {dropout_rate} needs a `key`: pass a JAX PRNG key, or inference=True")
        out = attention.dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            implementation=implementation,
            sinks=sinks,
            dropout_batch_ids=dropout_batch_ids,
            dropout_head_ids=dropout_head_ids,
            query_segment_ids=query_segment_ids,
            key_value_segment_ids=key_value_segment_ids,
            logits_soft_cap=logits_soft_cap,
            query_offset=query_offset,
            block_mask=block_mask,
            score_mod=score_mod,
            mask_mod=mask_mod,
            sequence_axis=sequence_axis,
            sequence_layout=sequence_layout,
            dropout_rate=dropout_rate,
            dropout_key=key,
        )
        return jax.vmap(self.output_proj)(out.reshape(out.shape[0], -1))
