"""Equinox: a `MultiheadAttention` module on the fused attention::

    layer = jax_flash.equinox.MultiheadAttention(num_heads=8, query_size=512, key=key)
    y = layer(x, x, x, is_causal=True)

It has the fields of the stock module, so that the leaves of either fit the other. It differs from it as `jax_flash`
does: a query with nothing to attend to gives zeros, where Equinox gives the mean of the values; and dropout draws its
mask from its own generator.
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
    """`equinox.nn.MultiheadAttention` on the fused attention: the same arguments, the same fields.

    As every layer of Equinox it takes one example; `jax.vmap` over a batch is one call of the kernels.
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
        """Projects to queries, keys and values, attends, projects back.

        Args:
          query: [T, query_size].
          key_: [S, key_size].
          value: [S, value_size].
          mask: boolean, true where a query may attend; broadcastable to [num_heads, T, S].
          key: a JAX PRNG key for dropout.
          inference: no dropout (default: as of the module's `dropout`).
          process_heads: a function of queries [T, num_heads, qk_size], keys [S, num_heads, qk_size] and values
            [S, num_heads, vo_size] that returns those to use, such as rotated ones.
          options: those of `jax_flash.dot_product_attention`, which says what they mean: `is_causal`,
            `local_window_size`, `query_segment_ids` [T] and `key_value_segment_ids` [S], … The example is a batch of
            one: what has an entry for each example, such as `key_value_seq_lengths`, is of shape [1].

        Returns:
          [T, output_size].

        Raises:
          RuntimeError: there is dropout and no `key`.
          ValueError: shapes that do not fit together, values out of range.
          TypeError: an argument of a wrong kind, or one that there is not.
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
            raise RuntimeError(f"dropout of {dropout_rate} needs a `key`, unless `inference` is true")
        given = arguments.complete(options, SharedOptions)
        out = attention.dot_product_attention(q, k, v, mask=mask, dropout_rate=dropout_rate, dropout_key=key, **given)
        return jax.vmap(self.output_proj)(out.reshape(out.shape[0], -1))
