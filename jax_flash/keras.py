"""Keras 3 on JAX: a `MultiHeadAttention` layer on the fused attention::

    layer = jax_flash.keras.MultiHeadAttention(num_heads=8, key_dim=64)
    y = layer(x, x, use_causal_mask=True)

It has the weights of the stock layer. Keras has no switch that exchanges the attention function: this overrides the
public method `call`. It differs from the stock layer as `jax_flash` does: a query with nothing to attend to gives
zeros, where Keras gives the mean of the values; and dropout draws its mask from its own generator. The masks of its
inputs stay where they are, where Keras takes them off.
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
    """`keras.layers.MultiHeadAttention` on the fused attention: the same arguments, the same weights.

    Causal masks, windows and padding are never arrays of T x S entries. `flash_attention` has no effect.

    Raises:
      NotImplementedError: `use_gate`; from a call: `return_attention_scores`, inputs that are not [B, length, dim].
      RuntimeError: Keras runs on another backend than JAX.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if keras.backend.backend() != "jax":
            raise RuntimeError(f"jax_flash.keras needs Keras on JAX (KERAS_BACKEND=jax), not {keras.backend.backend()}")
        config = self.get_config()  # Keras before 3.14 has no windows and no gates
        self.sliding_window = config.get("sliding_window")
        if config.get("use_gate"):
            raise NotImplementedError("jax_flash.keras.MultiHeadAttention does not support `use_gate`")
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
        """Projects to queries, keys and values, attends, projects back.

        Args:
          query: [B, T, dim].
          value: [B, S, dim].
          key: [B, S, dim] (default: value).
          query_mask, value_mask, key_mask: [B, T], [B, S] and [B, S], true where there is no padding. Keras sets them.
          attention_mask: true where a query may attend: [T, S], [B, T, S] or [B, num_heads, T, S], sizes full or 1.
          training: whether there is dropout.
          use_causal_mask: query i sees keys j <= i.

        Returns:
          [B, T, output_shape].
        """
        if return_attention_scores:
            raise NotImplementedError(
                "jax_flash.keras.MultiHeadAttention does not support `return_attention_scores`: its attention is one "
                "fused kernel, with no matrix of scores"
            )
        if query.ndim != 3:
            raise NotImplementedError(
                f"jax_flash.keras.MultiHeadAttention takes inputs of shape [B, length, dim], not {query.shape}"
            )
        # Keras's masks are attributes of arrays, which the projections would warn of: copies have none.
        query, key, value = (jnp.array(x) for x in (query, value if key is None else key, value))
        q, k, v = self.query_dense(query), self.key_dense(key), self.value_dense(value)
        query_ids = key_ids = None
        if any(mask is not None for mask in (query_mask, value_mask, key_mask)):  # padding has ids that none else has
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
