"""Flax nnx: a `MultiHeadAttention` module, and a `dot_product_attention` to pass as `attention_fn` to the stock one::

    layer = jax_flash.nnx.MultiHeadAttention(num_heads=8, in_features=512, is_causal=True, rngs=rngs)
    layer = nnx.MultiHeadAttention(8, 512, attention_fn=jax_flash.nnx.dot_product_attention, decode=False, rngs=rngs)

Both have the state of the stock module. They differ from it as `jax_flash` does: a query with nothing to attend to
gives zeros, where Flax gives the mean of the values; and dropout draws its mask from its own generator.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PromoteDtypeFn
from jax.typing import ArrayLike

from jax_flash import arguments, checks, dropout
from jax_flash._flax import (
    Attributes,
    FlaxOptions,
    StockOptions,
    append,
    attend_as,
    attend_in,
    attend_in_pages,
    key_and_value_inputs,
    refuse,
)
from jax_flash.paged import checked_page

__all__ = ["MultiHeadAttention", "dot_product_attention"]


class NnxOptions(StockOptions, total=False):
    """With what nnx' own function has alone."""

    promote_dtype: PromoteDtypeFn


@arguments.lists_options(FlaxOptions, like=nnx.dot_product_attention)
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *stock: Any,
    **options: Unpack[NnxOptions],
) -> jax.Array:
    """`flax.nnx.dot_product_attention`, fused. It takes that function's arguments, also by position, and more.

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
      options: those of `jax_flash.dot_product_attention`, which says what they mean, where Flax has no name of its own
        for them: `local_window_size`, `logits_soft_cap`, `block_mask` (leading dimensions count as one batch),
        `query_segment_ids` [..., T] and `key_value_segment_ids` [..., S], `query_offset` [...], `scale`, … Leading
        dimensions may be broadcast. `reproducible_gradients` is its `deterministic`: the same bits in every run.

    Returns:
      [..., T, N, E].

    Raises:
      NotImplementedError: `module` (sowing the attention weights) is set.
      ValueError: shapes do not match, values are out of range, or there is dropout and no `dropout_rng`.
      TypeError: an argument of a wrong kind, or one that there is not.
    """
    args = (query, key, value, bias, mask, *stock)
    return attend_as(nnx.dot_product_attention, "jax_flash.nnx.dot_product_attention", args, options)


class MultiHeadAttention(nnx.MultiHeadAttention, Attributes):
    """`flax.nnx.MultiHeadAttention` on the fused attention: the same arguments and more, the same state.

    Decoding: `init_cache((..., max_length, features))`, then calls with `decode=True` that bring any number T of new
    tokens (a prompt, then one at a time); the stock module takes one. They are written to the cache, and each attends
    to itself and to what came before it. A mask is then broadcastable to [..., num_heads, T, max_length].

    Or, with a cache in pages, which sequences of any lengths share: `init_pages(count, page)`, then calls with
    `page_table` and `lengths`.

    Args:
      num_heads, in_features, ...: those of the stock module (`num_kv_heads` for grouped-query attention among them).
      is_causal: a token attends to itself and to those before it. Always so when decoding.
      local_window_size: (left, right), or one int for both: how far from itself a token attends.
      logits_soft_cap: scores are capped smoothly, cap * tanh(scores / cap).
      implementation: see `jax_flash.dot_product_attention`.
      reproducible_gradients: its `deterministic`: the gradients have the same bits in every run on a GPU, too.
      use_sinks: a parameter `sinks` of shape [num_heads], a logit of each head that joins the softmax and has no value.
        It is 0 at first: then a query is as if there were one more key, of score and value 0.

    Raises:
      NotImplementedError: `attention_fn`, or `sow_weights` or `input_positions` in a call, is set.
      ValueError: heads or features not divisible, shapes that do not fit the cache, values out of range, no `rngs` for
        dropout.
      TypeError: an option of a wrong kind, or one that there is not.
    """

    @arguments.lists_options(Attributes, like=nnx.MultiHeadAttention.__init__)
    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *args: Any,
        **kwargs: Any,
    ):
        names = {field.name for field in dataclasses.fields(Attributes)} & kwargs.keys()
        attributes = {name: kwargs.pop(name) for name in names}
        call = inspect.signature(super().__init__).bind_partial(num_heads, in_features, *args, **kwargs)
        refuse("jax_flash.nnx.MultiHeadAttention", attention_fn=call.arguments.get("attention_fn"))
        checks.integer("num_heads", num_heads, 1)
        if call.arguments.get("num_kv_heads") is not None:
            checks.integer("num_kv_heads", call.arguments["num_kv_heads"], 1)
        dropout.threshold(call.arguments.get("dropout_rate", 0.0))
        super().__init__(num_heads, in_features, *args, **kwargs | {"attention_fn": dot_product_attention})
        Attributes.__init__(self, **attributes)
        use_sinks = checks.flag("use_sinks", self.use_sinks)
        self.sinks = nnx.Param(jnp.zeros(num_heads, self.param_dtype)) if use_sinks else None
        self.key_pages: nnx.Cache[jax.Array] | None = nnx.data(None)
        self.value_pages: nnx.Cache[jax.Array] | None = nnx.data(None)

    def init_pages(self, count: int, page: int = 64, dtype: Dtype = jnp.float32) -> None:
        """Makes a cache of `count` pages, of `page` tokens each: a multiple of 8 from 8 to 1024."""
        of_pages = checks.integer("count", count, 1), checked_page(checks.integer("page", page, 1))
        shape = (*of_pages, self.num_kv_heads, self.head_dim)
        self.key_pages, self.value_pages = nnx.Cache(jnp.zeros(shape, dtype)), nnx.Cache(jnp.zeros(shape, dtype))

    @arguments.lists_options(FlaxOptions)
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: jax.Array | None = None,
        page_table: ArrayLike | None = None,
        lengths: ArrayLike | None = None,
        **options: Unpack[FlaxOptions],
    ) -> jax.Array:
        """Projects to queries, keys and values, attends, projects back.

        Args:
          inputs_q: [..., T, in_features].
          inputs_k: [..., S, in_kv_features] (default: inputs_q).
          inputs_v: [..., S, in_kv_features] (default: inputs_k).
          mask: bool or float, broadcastable to [..., num_heads, T, S]: nonzero where a query may attend.
          deterministic, rngs, decode: take precedence over what the constructor was given.
          out_sharding, qkv_sharding: of the outputs of the projections.
          input_positions: refused; Flax hands them to an `attention_fn` with rotary embeddings.
          page_table: integer [B, M], the numbers of the pages of each sequence; inputs are then [B, T, in_features], of
            the last T tokens of each, which enter the cache.
          lengths: integer [B], tokens of each sequence, with these; 0 where there is none. See
            `jax_flash.paged_attention` and `jax_flash.append_to_pages`.
          options: as of this module's `dot_product_attention`: `block_mask`, `query_segment_ids` [..., T] and
            `key_value_segment_ids` [..., S] ([..., max_length] when decoding), `query_offset` [...] (not when
            decoding), …; one that is an attribute, too, goes before it, unless None.

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

        if page_table is not None or lengths is not None:
            if self.key_pages is None or self.value_pages is None:
                raise ValueError("there is no cache in pages: call `init_pages` first")
            x, (self.key_pages[...], self.value_pages[...]) = attend_in_pages(
                self,
                query,
                key,
                value,
                mask,
                (self.key_pages[...], self.value_pages[...]),
                page_table,
                lengths,
                sinks=None if self.sinks is None else self.sinks[...],
                deterministic=self.deterministic if deterministic is None else deterministic,
                options=options,
            )
            return self.out(x, out_sharding=out_sharding)

        cached = None
        if self.decode if decode is None else decode:
            if self.cached_key is None or self.cached_value is None or self.cache_index is None:
                raise ValueError("Autoregressive cache not initialized, call `init_cache` first.")
            cached = self.cache_index[...]
            key, value, self.cache_index[...] = append(
                self.cached_key[...], self.cached_value[...], cached, query, key, value
            )
            self.cached_key[...], self.cached_value[...] = key, value

        if dropout.threshold(self.dropout_rate):
            deterministic = self.deterministic if deterministic is None else deterministic
            if deterministic is None:
                raise ValueError("dropout_rate > 0 needs `deterministic`, from the constructor, the call or nnx.view")

        def make_rng(stream: str) -> jax.Array:
            source = self.rngs if rngs is None else rngs
            if source is None:
                raise ValueError(
                    "dropout_rate > 0 needs `rngs` in the call if the module was made with keep_rngs=False"
                )
            return source[stream]() if isinstance(source, nnx.Rngs) else source()

        x = attend_in(
            self,
            query,
            key,
            value,
            mask,
            sinks=None if self.sinks is None else self.sinks[...],
            deterministic=deterministic,
            dropout_rng=None,
            make_rng=make_rng,
            cached=cached,
            options=options,
        )
        return self.out(x, out_sharding=out_sharding)
