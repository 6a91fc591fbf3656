"""Flax linen: a `MultiHeadAttention` module, and a `dot_product_attention` to pass as `attention_fn` to the stock one::

    layer = jax_flash.linen.MultiHeadAttention(num_heads=8, is_causal=True)
    layer = flax.linen.MultiHeadDotProductAttention(num_heads=8, attention_fn=jax_flash.linen.dot_product_attention)

Both have the parameter tree of the stock module. They differ from it as `jax_flash` does: a query with nothing to
attend to gives zeros, where Flax gives the mean of the values; and dropout draws its mask from its own generator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp
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


class LinenOptions(StockOptions, total=False):
    """With what linen's own function has alone, and is not refused."""

    force_fp32_for_softmax: bool


@arguments.lists_options(FlaxOptions, like=nn.dot_product_attention)
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *stock: Any,
    **options: Unpack[LinenOptions],
) -> jax.Array:
    """`flax.linen.dot_product_attention`, fused. It takes that function's arguments, also by position, and more.

    Args:
      query: [..., T, N, D], any number of leading dimensions.
      key: [..., S, K, D], with N a multiple of K.
      value: [..., S, K, E].
      bias: added to the scores, broadcastable to [..., N, T, S].
      mask: bool or float, broadcastable to [..., N, T, S]: nonzero where a query may attend.
      broadcast_dropout: one dropout mask [T, S] for all leading dimensions and heads.
      dropout_rng, dropout_rate, deterministic: dropout of the attention weights, unless deterministic.
      dtype: of the computation (default: promoted from query, key and value).
      precision: see `jax.lax.Precision`.
      force_fp32_for_softmax: no effect: the softmax is always in at least float32, the output in `dtype`.
      options: those of `jax_flash.dot_product_attention`, which says what they mean, where Flax has no name of its own
        for them: `local_window_size`, `logits_soft_cap`, `block_mask` (leading dimensions count as one batch),
        `query_segment_ids` [..., T] and `key_value_segment_ids` [..., S], `query_offset` [...], `scale`, … Leading
        dimensions may be broadcast. `reproducible_gradients` is its `deterministic`: the same bits in every run.

    Returns:
      [..., T, N, E].

    Raises:
      NotImplementedError: `module` (sowing the attention weights), `einsum_dot_general`, `qk_attn_weights_einsum` or
        `attn_weights_value_einsum` is set.
      ValueError: shapes do not match, values are out of range, or there is dropout and no `dropout_rng`.
      TypeError: an argument of a wrong kind, or one that there is not.
    """
    args = (query, key, value, bias, mask, *stock)
    return attend_as(nn.dot_product_attention, "jax_flash.linen.dot_product_attention", args, options)


class MultiHeadAttention(nn.MultiHeadDotProductAttention, Attributes):
    """`flax.linen.MultiHeadDotProductAttention` on the fused attention: the same attributes, the same parameter tree.

    With `decode=True` a call may bring any number T of new tokens (a prompt, then one at a time); the stock module
    takes one. They are written to the cache, and each attends to itself and to what came before it. A mask is then
    broadcastable to [..., num_heads, T, max_length].

    Attributes:
      num_kv_heads: heads of key and value, a divisor of `num_heads` (default: `num_heads`; fewer is grouped-query).
      is_causal: a token attends to itself and to those before it. Always so when decoding.
      local_window_size: (left, right), or one int for both: how far from itself a token attends.
      logits_soft_cap: scores are capped smoothly, cap * tanh(scores / cap).
      pages, page: with `decode=True` and pages > 0 the cache has so many pages, of so many tokens each (a multiple of
        8 from 8 to 1024), which sequences of any lengths share; calls then have `page_table` and `lengths`.
      implementation: see `jax_flash.dot_product_attention`.
      reproducible_gradients: its `deterministic`: the gradients have the same bits in every run on a GPU, too.
      use_sinks: a parameter `sinks` of shape [num_heads], a logit of each head that joins the softmax and has no value.
        It is 0 at first: then a query is as if there were one more key, of score and value 0.

    Raises:
      NotImplementedError: from a call, where `sow_weights`, `attention_fn`, `qk_attn_weights_einsum_cls` or
        `attn_weights_value_einsum_cls` is set.
      ValueError: heads or features not divisible, shapes that do not fit the cache, values out of range.
      TypeError: an option of a wrong kind, or one that there is not.
    """

    attention_fn: Callable[..., jax.Array] = dot_product_attention
    num_kv_heads: int | None = None
    pages: int = 0
    page: int = 64

    @nn.compact
    @arguments.lists_options(FlaxOptions)
    def __call__(  # type: ignore[override]  # `inputs_kv` is deprecated in Flax, and not here
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
        page_table: ArrayLike | None = None,
        lengths: ArrayLike | None = None,
        **options: Unpack[FlaxOptions],
    ) -> jax.Array:
        """Projects to queries, keys and values, attends, projects back.

        Args:
          inputs_q: [..., T, features].
          inputs_k: [..., S, features] (default: inputs_q).
          inputs_v: [..., S, features] (default: inputs_k).
          mask: bool or float, broadcastable to [..., num_heads, T, S]: nonzero where a query may attend.
          deterministic: no dropout; given here or as the attribute, needed if `dropout_rate` > 0.
          dropout_rng: a JAX key (default: `self.make_rng("dropout")`).
          page_table: integer [B, M], the numbers of the pages of each sequence; inputs are then [B, T, features], of
            the last T tokens of each, which enter the cache.
          lengths: integer [B], tokens of each sequence, with these; 0 where there is none. See
            `jax_flash.paged_attention` and `jax_flash.append_to_pages`.
          options: as of this module's `dot_product_attention`: `block_mask`, `query_segment_ids` [..., T] and
            `key_value_segment_ids` [..., S] ([..., max_length] when decoding), `query_offset` [...] (not when
            decoding), …; one that is an attribute, too, goes before it, unless None.

        Returns:
          [..., T, out_features].
        """
        refuse(
            "jax_flash.linen.MultiHeadAttention",
            sow_weights=sow_weights,
            attention_fn=None if self.attention_fn is dot_product_attention else self.attention_fn,
            qk_attn_weights_einsum_cls=self.qk_attn_weights_einsum_cls,
            attn_weights_value_einsum_cls=self.attn_weights_value_einsum_cls,
        )
        inputs_k, inputs_v = key_and_value_inputs(inputs_q, inputs_k, inputs_v)

        qkv_features = self.qkv_features or inputs_q.shape[-1]
        num_heads = num_kv_heads = checks.integer("num_heads", self.num_heads, 1)
        if self.num_kv_heads is not None:
            num_kv_heads = checks.integer("num_kv_heads", self.num_kv_heads, 1)
        if qkv_features % num_heads or num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads={num_heads} must divide qkv_features={qkv_features}, and num_kv_heads={num_kv_heads} "
                "must divide num_heads"
            )
        head_dim = qkv_features // num_heads

        dense = functools.partial(
            nn.DenseGeneral,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
        )
        project = functools.partial(
            dense,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            dot_general=self.qkv_dot_general,
            dot_general_cls=self.qkv_dot_general_cls,
        )
        sinks = None
        if checks.flag("use_sinks", self.use_sinks):
            sinks = self.param("sinks", nn.initializers.zeros_init(), (num_heads,), self.param_dtype)
        query = project((num_heads, head_dim), name="query")(inputs_q)
        key = project((num_kv_heads, head_dim), name="key")(inputs_k)
        value = project((num_kv_heads, head_dim), name="value")(inputs_v)
        if self.normalize_qk:
            norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype)
            query, key = norm(name="query_ln")(query), norm(name="key_ln")(key)

        cached, in_pages = None, False
        if self.decode and self.pages:
            in_pages = not self.is_initializing()  # `init` only makes the cache
            shape = checks.integer("pages", self.pages, 1), checked_page(checks.integer("page", self.page, 1))
            of_keys = self.variable("cache", "key_pages", jnp.zeros, (*shape, *key.shape[-2:]), key.dtype)
            of_values = self.variable("cache", "value_pages", jnp.zeros, (*shape, *value.shape[-2:]), value.dtype)
        elif page_table is not None or lengths is not None:
            raise ValueError("page_table and lengths are for a cache in pages: set decode=True and pages")
        elif self.decode:
            # The first call (`init`) only makes the cache, as long as its inputs.
            is_initialized = self.has_variable("cache", "cached_key")
            cached_key = self.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype)
            cached_value = self.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype)
            cache_index = self.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32))
            if is_initialized:
                cached = cache_index.value
                key, value, cache_index.value = append(cached_key.value, cached_value.value, cached, query, key, value)
                cached_key.value, cached_value.value = key, value

        if dropout.threshold(self.dropout_rate):
            deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        if in_pages:
            x, (of_keys.value, of_values.value) = attend_in_pages(
                self,
                query,
                key,
                value,
                mask,
                (of_keys.value, of_values.value),
                page_table,
                lengths,
                sinks=sinks,
                deterministic=deterministic,
                options=options,
            )
        else:
            x = attend_in(
                self,
                query,
                key,
                value,
                mask,
                sinks=sinks,
                deterministic=deterministic,
                dropout_rng=dropout_rng,
                make_rng=self.make_rng,
                cached=cached,
                options=options,
            )
        return dense(
            self.out_features or inputs_q.shape[-1],
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            dot_general=self.out_dot_general,
            dot_general_cls=self.out_dot_general_cls,
            name="out",
        )(x)
