"""Keras 3 on JAX: a `MultiHeadAttention` layer with fused kernels::

    layer = jax_flash.keras.MultiHeadAttention(num_heads=8, key_dim=64)
    y = layer(x, x, use_causal_mask=True)

The layer has the weights of the stock layer, so saved weights load. It overrides the public method `call`. The results
differ in two ways. A query that sees no key gives zeros, where Keras gives the mean of the values. Dropout masks come
from jax_flash's own generator. The layer keeps the Keras masks on its inputs, where the stock layer removes them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras

from jax_flash import attention

__all__ = ["MultiHeadAttention"]


@keras.saving.register_keras_serializable("jax_flash")
class MultiHeadAttention(keras.layers.MultiHeadAttention):
    """Multi-head attention with fused kernels, a drop-in for `keras.layers.MultiHeadAttention`.

    The arguments and the weights are the same as in the stock layer. Causal masks, windows and padding masks never
    become T x S arrays.

    Args:
      num_heads: int, number of heads.
      key_dim: int, head dim of queries and keys.
      value_dim: int, head dim of values. Default: key_dim.
      dropout: float, probability of dropping an attention weight.
      use_bias: bool, whether the projections add a bias.
      output_shape: int or tuple of ints, size of the last dims of the result. Default: the last dim of the query.
      sliding_window: int. A query sees only keys at most sliding_window - 1 positions away.
      flash_attention: no effect, because attention is always fused.
      seed: int, seed for dropout.

    Other arguments are described in Keras.

    Raises:
      NotImplementedError: if `use_gate` is set. From a call, if `return_attention_scores` is set, or if inputs are not
        [B, length, dim].
      RuntimeError: if Keras does not run on JAX.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if keras.backend.backend() != "jax":
            raise RuntimeError(
                f"jax_flash.keras needs Keras on JAX, not on {keras.backend.backend()}: set KERAS_BACKEND=jax"
            )
        config = self.get_config()  # Keras before 3.14 has no windows and no gates
        self.sliding_window = config.get("sliding_window")
        if config.get("use_gate"):
            raise NotImplementedError(
                "jax_flash.keras.MultiHeadAttention does not support `use_gate`: leave it out, or use Keras's own layer"
            )
        if self.dropout:
            self.seed_generator = keras.random.SeedGenerator(config["seed"])

    def call(
        self,
        query: jax.Array,
        value: jax.Array,
        key: jax.Array | None = None,
        query_mask: jax.Array | None = None,
        value_mask: jax.Array | None = None,
        key_mask: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> jax.Array:
        """Project the inputs to queries, keys and values, attend, and project the result.

        Args:
          query: array [B, T, dim].
          value: array [B, S, dim].
          key: array [B, S, dim]. Default: value.
          query_mask: bool array [B, T]. False means padding. Keras sets it.
          value_mask, key_mask: bool arrays [B, S]. False means padding. Keras sets them.
          attention_mask: array [T, S], [B, T, S] or [B, num_heads, T, S]. Each size is full or 1. Nonzero means that
            the query may attend to the key.
          return_attention_scores: not supported.
          training: whether to apply dropout.
          use_causal_mask: whether query i sees only keys j <= i.

        Returns:
          Array [B, T, output_shape].
        """
        if return_attention_scores:
            raise NotImplementedError(
                "jax_flash.keras.MultiHeadAttention does not support `return_attention_scores`, because a fused kernel "
                "computes no matrix of scores: leave it out, or use Keras's own layer"
            )
        if query.ndim != 3:
            raise NotImplementedError(
                f"jax_flash.keras.MultiHeadAttention takes inputs of shape [B, length, dim], not {query.shape}: "
                "reshape them"
            )
        # Keras stores masks as attributes of arrays, and the projections would warn about them. Copies have none.
        query, key, value = (jnp.array(x) for x in (query, value if key is None else key, value))
        q, k, v = self.query_dense(query), self.key_dense(key), self.value_dense(value)
        query_ids = key_ids = None
        if any(mask is not None for mask in (query_mask, value_mask, key_mask)):  # padding gets its own segment ids
            query_ids, key_ids = jnp.zeros(q.shape[:2], jnp.int32), jnp.zeros(k.shape[:2], jnp.int32)
            if query_mask is not None:
                query_ids = jnp.where(jnp.asarray(query_mask), query_ids, 1)
            for mask in (value_mask, key_mask):
                if mask is not None:
                    key_ids = jnp.where(jnp.asarray(mask), key_ids, 2)
        if attention_mask is not None:
            attention_mask = jnp.asarray(attention_mask).astype(bool)
            if attention_mask.ndim == 3:
                attention_mask = attention_mask[:, None]
        dropped = self.dropout > 0 and training
        out = attention.dot_product_attention(
            q,
            k,
            v,
            mask=attention_mask,
            is_causal=use_causal_mask,
            local_window_size=None if self.sliding_window is None else self.sliding_window - 1,
            dropout_rate=self.dropout if dropped else 0.0,
            dropout_key=self.seed_generator.next() if dropped else None,
            query_segment_ids=query_ids,
            key_value_segment_ids=key_ids,
        )
        return self.output_dense(out)
