"""Equinox: a `MultiheadAttention` module with fused kernels::

    layer = jax_flash.equinox.MultiheadAttention(num_heads=8, query_size=512, key=key)
    y = layer(x, x, x, is_causal=True)

The module has the fields of the stock module, so its parameters load into the stock module and vice versa. The results
differ in two ways. A query that sees no key gives zeros, where Equinox gives the mean of the values. Dropout masks come
from jax_flash's own generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import equinox as eqx
import jax
import jax.numpy as jnp

from jax_flash import arguments, attention
from jax_flash.arguments import SharedOptions

__all__ = ["MultiheadAttention"]

Heads = tuple[jax.Array, jax.Array, jax.Array]


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """Multi-head attention with fused kernels, a drop-in for `equinox.nn.MultiheadAttention`.

    The constructor and the fields are the same as in the stock module. Like every Equinox layer, it takes one example.
    Use `jax.vmap` for a batch: the batch is then one kernel call.
    """

    @arguments.lists_options(SharedOptions)
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
        **options: Unpack[SharedOptions],
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
          options: options of `jax_flash.dot_product_attention`, such as `is_causal`, `local_window_size`,
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
        given = arguments.complete(options, SharedOptions)
        out = attention.dot_product_attention(q, k, v, mask=mask, dropout_rate=dropout_rate, dropout_key=key, **given)
        return jax.vmap(self.output_proj)(out.reshape(out.shape[0], -1))
