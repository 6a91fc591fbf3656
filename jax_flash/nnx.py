"""Flax nnx: a `MultiHeadAttention` module, and a `dot_product_attention` to pass as `attention_fn` to the stock one.

    layer = jax_flash.nnx.MultiHeadAttention(num_heads=8, in_features=512, is_causal=True, rngs=rngs)
    layer = nnx.MultiHeadAttention(8, 512, attention_fn=jax_flash.nnx.dot_product_attention, decode=False, rngs=rngs)

Both have the state of the stock module. They differ from it as `jax_flash` does: a query with nothing to attend to
gives zeros, where Flax gives the mean of the values; and dropout draws its mask from its own generator.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Dtype, PrecisionLike, PromoteDtypeFn

from jax_flash import arguments
from jax_flash._flax import append, attend, key_and_value_inputs, refuse
from jax_flash.arguments import Implementation
from jax_flash.block_sparse import BlockMask

__all__ = ["MultiHeadAttention", "dot_product_attention"]


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: PrecisionLike = None,
    module: nnx.Module | None = None,
    promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
    is_causal: bool = False,
    *,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    block_mask: BlockMask | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """`flax.nnx.dot_product_attention`, fused. The keyword-only arguments are those of `jax_flash` (see there).

    Args:
      query: [..., T, N, D], any number of leading dimensions.
      key: [..., S, K, D], with N a multiple of K.
      value: [..., S, K, E].
      bias: added to the scores, broadcastable to [..., N, T, S].
      mask: bool or float, broadcastable to [..., N, T, S]: nonzero where a query may attend.
      broadcast_dropout: one dropout mask [T, S] for all leading dimensions and heads.
      dropout_rng, dropout_rate, deterministic: dropout of the attention weights, unless deterministic.
      dtype: of the computation (default: promoted from query, key and value by `promote_dtype`).
      precision: see `jax.lax.Precision`.
      is_causal: query i attends to keys 0 to i.

    Returns:
      [..., T, N, E].

    Raises:
      NotImplementedError: `module` (sowing the attention weights) is set.
      ValueError: shapes do not match, or there is dropout and no `dropout_rng`.
    """
    refuse("jax_flash.nnx.dot_product_attention", module=module)
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    return attend(
        query,
        key,
        value,
        bias,
        mask,
        dropout_rng=dropout_rng,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        block_mask=block_mask,
        implementation=implementation,
    )


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` on the fused attention: the same arguments and more, the same state.

    Decoding: `init_cache((..., max_length, features))`, then calls with `decode=True` that bring any number T of new
    tokens (a prompt, then one at a time); the stock module takes one. They are written to the cache, and each attends
    to itself and to what came before it. A mask is then broadcastable to [..., num_heads, T, max_length].

    Args:
      num_heads, in_features, ...: those of the stock module (`num_kv_heads` for grouped-query attention among them).
      is_causal: a token attends to itself and to those before it. Always so when decoding.
      local_window_size: (left, right), or one int for both: how far from itself a token attends.
      logits_soft_cap: scores are capped smoothly, cap * tanh(scores / cap).
      implementation: see `jax_flash.dot_product_attention`.

    Raises:
      NotImplementedError: `attention_fn`, or `sow_weights` or `input_positions` in a call, is set.
      ValueError: heads or features not divisible, shapes that do not fit the cache, no `rngs` for dropout.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *args: Any,
        is_causal: bool = False,
        local_window_size: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        implementation: Implementation | None = None,
        **kwargs: Any,
    ):
        refuse("jax_flash.nnx.MultiHeadAttention", attention_fn=kwargs.get("attention_fn"))
        num_kv_heads = kwargs.get("num_kv_heads", args[2] if len(args) > 2 else None)
        if num_kv_heads is not None:
            arguments.integer("num_kv_heads", num_kv_heads, 1)
        super().__init__(num_heads, in_features, *args, **kwargs | {"attention_fn": dot_product_attention})
        self.is_causal = is_causal
        self.local_window_size = local_window_size
        self.logits_soft_cap = logits_soft_cap
        self.implementation = implementation

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        block_mask: BlockMask | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool | None = None,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: jax.Array | None = None,
    ) -> jax.Array:
        """Projects to queries, keys and values, attends, projects back.

        Args:
          inputs_q: [..., T, in_features].
          inputs_k: [..., S, in_kv_features] (default: inputs_q).
          inputs_v: [..., S, in_kv_features] (default: inputs_k).
          mask: bool or float, broadcastable to [..., num_heads, T, S]: nonzero where a query may attend.
          block_mask: blocks that may attend, of T x S entries; leading dimensions count as one batch.
          deterministic, rngs, decode, is_causal: take precedence over what the constructor was given.
          out_sharding, qkv_sharding: of the outputs of the projections.
          input_positions: refused; Flax hands them to an `attention_fn` with rotary embeddings.

        Returns:
          [..., T, out_features].
        """
        refuse("jax_flash.nnx.MultiHeadAttention", sow_weights=sow_weights, input_positions=input_positions)
        inputs_k, inputs_v = key_and_value_inputs(inputs_q, inputs_k, inputs_v)
        if inputs_q.shape[-1] != self.in_features:
            raise ValueError(f"inputs_q must have in_features={self.in_features} features, got shape {inputs_q.shape}")

        query = self.query(inputs_q, out_sharding=qkv_sharding)
        key = self.key(inputs_k, out_sharding=qkv_sharding)
        value = self.value(inputs_v, out_sharding=qkv_sharding)
        if self.normalize_qk:
            assert self.query_ln is not None and self.key_ln is not None
            query, key = self.query_ln(query), self.key_ln(key)

        offset = None
        if self.decode if decode is None else decode:
            if self.cached_key is None or self.cached_value is None or self.cache_index is None:
                raise ValueError("Autoregressive cache not initialized, call `init_cache` first.")
            if query.shape[-3] != key.shape[-3]:
                raise ValueError(f"decoding takes as many queries as keys, got {query.shape} and {key.shape}")
            offset, length = self.cache_index[...], key.shape[-3]
            self.cached_key[...] = key = append(self.cached_key[...], key, offset)
            self.cached_value[...] = value = append(self.cached_value[...], value, offset)
            self.cache_index[...] = offset + length

        dropout_rng = None
        if self.dropout_rate > 0.0:
            deterministic = self.deterministic if deterministic is None else deterministic
            if deterministic is None:
                raise ValueError("dropout_rate > 0 needs `deterministic`, from the constructor, the call or nnx.view")
            if not deterministic:
                rngs = self.rngs if rngs is None else rngs
                if rngs is None:
                    raise ValueError("dropout needs `rngs` in the call if the module was made with keep_rngs=False")
                dropout_rng = rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs()

        query, key, value = dtypes.promote_dtype((query, key, value), dtype=self.dtype)
        x = attend(
            query,
            key,
            value,
            mask=mask,
            dropout_rng=dropout_rng,
            dropout_rate=self.dropout_rate,
            deterministic=bool(deterministic),
            broadcast_dropout=self.broadcast_dropout,
            precision=self.precision,
            query_offset=offset,
            is_causal=(self.is_causal if is_causal is None else is_causal) or offset is not None,
            local_window_size=self.local_window_size,
            logits_soft_cap=self.logits_soft_cap,
            block_mask=block_mask,
            implementation=self.implementation,
        )
        return self.out(x, out_sharding=out_sharding)
