"""Flax nnx: a `MultiHeadAttention` module, and a `dot_product_attention` for the stock module's `attention_fn`::

    layer = jax_flash.nnx.MultiHeadAttention(num_heads=8, in_features=512, is_causal=True, rngs=rngs)
    layer = nnx.MultiHeadAttention(8, 512, attention_fn=jax_flash.nnx.dot_product_attention, decode=False, rngs=rngs)

Both keep the state of the stock module, so its checkpoints load. The results differ in two ways. A query that sees no
key gives zeros, where Flax gives the mean of the values. Dropout masks come from jax_flash's own generator.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Dtype, PrecisionLike, PromoteDtypeFn
from jax.typing import ArrayLike

from jax_flash import checks, dropout
from jax_flash._flax import (
    Attributes,
    BlockPattern,
    append,
    apply_blocks,
    attend,
    attend_in,
    attend_in_pages,
    block_initializer,
    block_pattern,
    chosen,
    chosen_sinks,
    key_and_value_inputs,
    refuse,
)
from jax_flash._latent import (
    LatentAttributes,
    append_latent,
    attend_expanded,
    attend_in_latent_pages,
    attend_to_cache,
    has_bias,
    layers,
    positions_of,
    query_and_latent,
)
from jax_flash.block_sparse import BlockMask
from jax_flash.call import Call, Implementation, check_names, explains_names
from jax_flash.layouts import SequenceLayout
from jax_flash.paged import checked_page
from jax_flash.windows import Window

__all__ = ["BlockSparseDense", "MultiHeadAttention", "MultiHeadLatentAttention", "dot_product_attention"]


@explains_names
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
    module: Any = None,
    promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
    is_causal: bool = False,
    *,
    scale: float | ArrayLike | None = None,
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
    reproducible_gradients: bool = False,
) -> jax.Array:
    """Compute scaled dot-product attention with `flax.nnx.dot_product_attention`'s arguments, by fused kernels.

    All arguments of Flax's function can be passed, by name or by position. Most options of
    `jax_flash.dot_product_attention` can be passed as well.

    Args:
      query: array [..., T, N, D] with any number of leading dimensions.
      key: array [..., S, K, D], where K divides N.
      value: array [..., S, K, E].
      bias: array that is added to the scores, broadcastable to [..., N, T, S].
      mask: bool or float array, broadcastable to [..., N, T, S]. Nonzero means that the query may attend to the key.
      broadcast_dropout: whether all leading dimensions and heads share one dropout mask [T, S].
      dropout_rng: JAX PRNG key for dropout.
      dropout_rate: probability of dropping an attention weight.
      deterministic: whether to turn dropout off.
      dtype: dtype of the computation. By default `promote_dtype` promotes query, key and value to a common dtype.
      precision: precision of float32 products, as in `jax.lax.Precision`.
      is_causal: whether query i attends to keys 0 to i only.
      scale, ...: options of `jax_flash.dot_product_attention` under the same names. Their arrays have leading
        dimensions, such as `query_segment_ids` [..., T], `key_value_segment_ids` [..., S] and `query_offset` [...].
        Leading dimensions count as one batch and may be broadcast.
      reproducible_gradients: whether gradients have the same bits in every run. `jax_flash.dot_product_attention` calls
        this option `deterministic`.

    Returns:
      Array [..., T, N, E].

    Raises:
      NotImplementedError: if `module` is set, because a fused kernel has no attention weights to sow.
      ValueError: if shapes do not match, a value is out of range, or dropout is on without `dropout_rng`.
      TypeError: if an argument has a wrong type or an unknown name.
    """
    refuse("jax_flash.nnx.dot_product_attention", module=module)
    inputs = checks.array("query", query), checks.array("key", key), checks.array("value", value)
    query, key, value = promote_dtype(inputs, dtype=dtype)
    call = Call(
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
        dropout_key=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        deterministic=checks.flag("reproducible_gradients", reproducible_gradients),
    )
    return attend(query, key, value, bias, mask, call, deterministic=deterministic)


class MultiHeadAttention(nnx.MultiHeadAttention, Attributes):
    """Multi-head attention with fused kernels, a drop-in for `flax.nnx.MultiHeadAttention`.

    The module takes the arguments of the stock module and those below. It has the same state.

    To decode, call `init_cache((..., max_length, features))` once. Then call the module with `decode=True` and any
    number T of new tokens: first the prompt, then one token at a time. (The stock module takes one token per call.)
    The new keys and values enter the cache. Each new token attends to itself and to all earlier tokens. When decoding,
    a mask must be broadcastable to [..., num_heads, T, max_length].

    Sequences of different lengths can share a paged cache. Call `init_pages(count, page)` once, then call the module
    with `page_table` and `lengths`.

    Args:
      num_heads, in_features, ...: arguments of the stock module, including `num_kv_heads` for grouped-query attention.
      is_causal: whether a token attends only to itself and to earlier tokens. Decoding is always causal.
      local_window_size: (left, right), or one int for both: how many tokens before and after itself a token sees.
        Pass a traced integer as an option of the call.
      logits_soft_cap: soft cap of the scores: cap * tanh(scores / cap).
      implementation: as in `jax_flash.dot_product_attention`.
      reproducible_gradients: whether gradients have the same bits in every run. `jax_flash.dot_product_attention` calls
        this option `deterministic`.
      use_sinks: whether the module has a parameter `sinks` [num_heads]: one logit per head that joins the softmax,
        but adds no value vector to the output. It starts at 0, which acts like one more key with score 0 and value 0.

    Raises:
      NotImplementedError: if `attention_fn` is set, or `sow_weights` or `input_positions` in a call.
      ValueError: if heads or features do not divide evenly, a shape does not fit the cache, a value is out of range, or
        dropout is on without `rngs`.
      TypeError: if an option has a wrong type or an unknown name.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *args: Any,
        is_causal: bool = False,
        local_window_size: Window | None = None,
        logits_soft_cap: float | None = None,
        implementation: Implementation | None = None,
        reproducible_gradients: bool = False,
        use_sinks: bool = False,
        **kwargs: Any,
    ):
        call = inspect.signature(super().__init__).bind_partial(num_heads, in_features, *args, **kwargs)
        refuse("jax_flash.nnx.MultiHeadAttention", attention_fn=call.arguments.get("attention_fn"))
        checks.integer("num_heads", num_heads, 1)
        if call.arguments.get("num_kv_heads") is not None:
            checks.integer("num_kv_heads", call.arguments["num_kv_heads"], 1)
        dropout.threshold(call.arguments.get("dropout_rate", 0.0))
        super().__init__(num_heads, in_features, *args, **kwargs | {"attention_fn": dot_product_attention})
        Attributes.__init__(
            self,
            is_causal=is_causal,
            local_window_size=local_window_size,
            logits_soft_cap=logits_soft_cap,
            implementation=implementation,
            reproducible_gradients=reproducible_gradients,
            use_sinks=checks.flag("use_sinks", use_sinks),
        )
        self.sinks = nnx.Param(jnp.zeros(num_heads, self.param_dtype)) if use_sinks else None
        self.key_pages: nnx.Cache[jax.Array] | None = nnx.data(None)
        self.value_pages: nnx.Cache[jax.Array] | None = nnx.data(None)

    def init_pages(self, count: int, page: int = 64, dtype: Dtype = jnp.float32) -> None:
        """Allocate a paged cache for decoding.

        Args:
          count: number of pages.
          page: tokens per page, a multiple of 8 from 8 to 1024.
          dtype: dtype of the cached keys and values.
        """
        of_pages = checks.integer("count", count, 1), checked_page(checks.integer("page", page, 1))
        shape = (*of_pages, self.num_kv_heads, self.head_dim)
        self.key_pages, self.value_pages = nnx.Cache(jnp.zeros(shape, dtype)), nnx.Cache(jnp.zeros(shape, dtype))

    @explains_names
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
        scale: float | ArrayLike | None = None,
        is_causal: bool | None = None,
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
        reproducible_gradients: bool | None = None,
    ) -> jax.Array:
        """Project the inputs to queries, keys and values, attend, and project the result.

        Args:
          inputs_q: array [..., T, in_features].
          inputs_k: array [..., S, in_kv_features]. Default: inputs_q.
          inputs_v: array [..., S, in_kv_features]. Default: inputs_k.
          mask: bool or float array, broadcastable to [..., num_heads, T, S]. Nonzero means that the query may attend to
            the key.
          deterministic: whether to turn dropout off. Default: the constructor's value.
          rngs: random streams for dropout. Default: the constructor's value.
          sow_weights: not supported.
          decode: whether to use the cache. Default: the constructor's value.
          out_sharding: sharding of the output.
          qkv_sharding: sharding of the projected queries, keys and values.
          input_positions: not supported. Flax passes it to an `attention_fn` that applies rotary embeddings.
          page_table: integer array [B, M], the page numbers of each sequence in a paged cache. The inputs are then the
            last T tokens of each sequence, [B, T, in_features], and enter the cache.
          lengths: integer array [B], the tokens of each sequence including the new ones; 0 for an unused row. It goes
            with `page_table`; see `jax_flash.paged_attention` and `jax_flash.append_to_pages`.
          scale, ...: options of `jax_flash.nnx.dot_product_attention`, such as `block_mask`, `query_segment_ids`
            [..., T], `key_value_segment_ids` [..., S] ([..., max_length] when decoding), and `query_offset` [...] (not
            when decoding). An option that is not None overrides the module's attribute of the same name.

        Returns:
          Array [..., T, out_features].
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

        call = Call(
            scale=scale,
            is_causal=chosen(is_causal, self.is_causal),
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=chosen(local_window_size, self.local_window_size),
            implementation=chosen(implementation, self.implementation),
            sinks=chosen_sinks(sinks, None if self.sinks is None else self.sinks[...]),
            dropout_batch_ids=dropout_batch_ids,
            dropout_head_ids=dropout_head_ids,
            query_segment_ids=query_segment_ids,
            key_value_segment_ids=key_value_segment_ids,
            logits_soft_cap=chosen(logits_soft_cap, self.logits_soft_cap),
            query_offset=query_offset,
            block_mask=block_mask,
            score_mod=score_mod,
            mask_mod=mask_mod,
            sequence_axis=sequence_axis,
            sequence_layout=sequence_layout,
            dropout_rate=self.dropout_rate,
            broadcast_dropout=self.broadcast_dropout,
            precision=self.precision,
            deterministic=checks.flag(
                "reproducible_gradients", chosen(reproducible_gradients, self.reproducible_gradients)
            ),
        )
        if page_table is not None or lengths is not None:
            if self.key_pages is None or self.value_pages is None:
                raise ValueError("page_table and lengths need a paged cache: call `init_pages` first")
            x, (self.key_pages[...], self.value_pages[...]) = attend_in_pages(
                query,
                key,
                value,
                mask,
                call,
                (self.key_pages[...], self.value_pages[...]),
                page_table,
                lengths,
                dtype=self.dtype,
                deterministic=self.deterministic if deterministic is None else deterministic,
            )
            return self.out(x, out_sharding=out_sharding)

        cached = None
        if self.decode if decode is None else decode:
            if self.cached_key is None or self.cached_value is None or self.cache_index is None:
                raise ValueError("decode=True needs a cache: call `init_cache` first")
            cached = self.cache_index[...]
            key, value, self.cache_index[...] = append(
                self.cached_key[...], self.cached_value[...], cached, query, key, value
            )
            self.cached_key[...], self.cached_value[...] = key, value

        if dropout.threshold(self.dropout_rate):
            deterministic = self.deterministic if deterministic is None else deterministic
            if deterministic is None:
                raise ValueError(
                    "dropout_rate > 0 needs `deterministic`: pass it to the constructor or the call, or use nnx.view"
                )

        def make_rng(stream: str) -> jax.Array:
            source = self.rngs if rngs is None else rngs
            if source is None:
                raise ValueError(
                    "dropout_rate > 0 needs `rngs`: pass it in the call, because the module has keep_rngs=False"
                )
            return source[stream]() if isinstance(source, nnx.Rngs) else source()

        x = attend_in(
            query,
            key,
            value,
            mask,
            call,
            dtype=self.dtype,
            deterministic=deterministic,
            make_rng=make_rng,
            cached=cached,
        )
        return self.out(x, out_sharding=out_sharding)


class MultiHeadLatentAttention(nnx.Module, LatentAttributes):
    """Multi-head latent attention (MLA, arXiv 2405.04434) with fused kernels, as in DeepSeek-V3 and Kimi K2.

    The cache has one latent of kv_lora_rank + qk_rope_head_dim entries for each token, which all heads share. Without a
    cache, the module expands the latents to a key and a value for each head. With a cache, it absorbs the weights of
    the expansion into queries and outputs, and attends to the latents. For long prompts, it expands the cache if that
    needs fewer operations. All give the same result up to rounding.

    The parameters have the names of DeepSeek-V3. A dense layer has a `kernel`, the transpose of the checkpoint's
    `weight`, and an RMSNorm has a `scale`, equal to its `weight`:

    * `q_a_proj` [features, q_lora_rank], `q_a_layernorm`, `q_b_proj` [q_lora_rank, N · (nope + rope)]; or with
      q_lora_rank=None, `q_proj` [features, N · (nope + rope)];
    * `kv_a_proj_with_mqa` [features, kv_lora_rank + rope] and `kv_a_layernorm`;
    * `kv_b_proj` [kv_lora_rank, N · (nope + v)] and `o_proj` [N · v, features].

    N is num_heads, and nope, rope and v are qk_nope_head_dim, qk_rope_head_dim and v_head_dim.

    To decode, call `init_cache((..., max_length, features))` once. Then call the module with `decode=True` and any
    number T of new tokens. Their latents enter the cache. Tokens beyond max_length overwrite the last ones, without an
    error. For a paged cache, call `init_pages(count, page)` once, then call the module with `page_table` and `lengths`.

    Args:
      num_heads: number of heads.
      in_features: number of input and output features.
      q_lora_rank: dim of the compressed queries. None means that queries are not compressed.
      kv_lora_rank: dim of the compressed keys and values. With a cache it must be a multiple of 8.
      qk_nope_head_dim: dim of the part of a head's queries and keys without rotary embeddings.
      qk_rope_head_dim: dim of the part with rotary embeddings, an even number. All heads share this part of the keys.
        With a cache, kv_lora_rank + qk_rope_head_dim must be a multiple of 8, and at most 576.
      v_head_dim: head dim of the values.
      rope_theta: base of the rotary frequencies. Entries 2i and 2i + 1 are a pair.
      rope_frequencies: tuple of qk_rope_head_dim / 2 angles per position. They replace rope_theta, for example with
        those of YaRN.
      scale: factor of the scores. Default: 1/√(nope + rope). YaRN multiplies it by mscale².
      is_causal: whether a token attends only to itself and to earlier tokens. With a cache, attention is always causal.
      use_bias: whether `q_a_proj`, `kv_a_proj_with_mqa` and `o_proj` have a bias.
      norm_epsilon: epsilon of both RMSNorms.
      dtype: dtype of the computation. Default: the common dtype of inputs and parameters.
      param_dtype: dtype of the parameters.
      precision: precision of float32 products.
      kernel_init: initializer of the kernels.
      implementation: as in `jax_flash.dot_product_attention`.
      reproducible_gradients: whether gradients have the same bits in every run. `jax_flash.dot_product_attention` calls
        this option `deterministic`.
      decode: whether calls use the cache by default.
      rngs: random number generators; `params` initializes the parameters.

    Raises:
      ValueError: if a dim is out of range, a shape does not fit the cache, or an option does not go with a cache.
      TypeError: if an option has a wrong type or an unknown name.
    """

    kv_b_proj: nnx.Linear
    o_proj: nnx.Linear

    def __init__(self, num_heads: int, in_features: int, *, decode: bool = False, rngs: nnx.Rngs, **attributes: Any):
        check_names(attributes, [field.name for field in dataclasses.fields(LatentAttributes)])
        LatentAttributes.__init__(self, **attributes)
        self.num_heads, self.in_features, self.decode = num_heads, in_features, decode
        for name, sizes in layers(self, num_heads, in_features).items():
            if len(sizes) == 1:
                layer: nnx.Module = nnx.RMSNorm(
                    *sizes, epsilon=self.norm_epsilon, dtype=self.dtype, param_dtype=self.param_dtype, rngs=rngs
                )
            else:
                layer = nnx.Linear(
                    *sizes,
                    use_bias=has_bias(self, name),
                    dtype=self.dtype,
                    param_dtype=self.param_dtype,
                    precision=self.precision,
                    kernel_init=self.kernel_init,
                    rngs=rngs,
                )
            setattr(self, name, layer)
        self.cached_latent: nnx.Cache[jax.Array] | None = nnx.data(None)
        self.cache_index: nnx.Cache[jax.Array] | None = nnx.data(None)
        self.latent_pages: nnx.Cache[jax.Array] | None = nnx.data(None)

    def init_cache(self, input_shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> None:
        """Allocate a contiguous cache for inputs of shape (..., max_length, features)."""
        self.cached_latent = nnx.Cache(jnp.zeros((*input_shape[:-1], self.latent_dim), dtype))
        self.cache_index = nnx.Cache(jnp.array(0, jnp.int32))

    def init_pages(self, count: int, page: int = 64, dtype: Dtype = jnp.float32) -> None:
        """Allocate a paged cache for decoding.

        Args:
          count: number of pages.
          page: tokens per page, a multiple of 8 from 8 to 1024.
          dtype: dtype of the cached latents.
        """
        of_pages = checks.integer("count", count, 1), checked_page(checks.integer("page", page, 1))
        self.latent_pages = nnx.Cache(jnp.zeros((*of_pages, self.latent_dim), dtype))

    @explains_names
    def __call__(
        self,
        inputs: jax.Array,
        *,
        positions: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        decode: bool | None = None,
        page_table: ArrayLike | None = None,
        lengths: ArrayLike | None = None,
    ) -> jax.Array:
        """Return the outputs [..., T, features] of inputs [..., T, features].

        Args:
          inputs: array [..., T, features].
          positions: integer array [..., T] for the rotary embeddings. Default: 0, 1, … Not with a cache.
          segment_ids: integer array [..., T]. A token attends only to tokens with its id (packed sequences). Not with a
            cache.
          page_table, lengths: as in `jax_flash.nnx.MultiHeadAttention`, for a paged cache.
          decode: whether to use the contiguous cache. Default: the constructor's value.
        """
        if inputs.shape[-1] != self.in_features:
            raise ValueError(f"inputs must have in_features={self.in_features} features, got shape {inputs.shape}")
        in_pages, cached = page_table is not None or lengths is not None, None
        if in_pages and self.latent_pages is None:
            raise ValueError("page_table and lengths need a paged cache: call `init_pages` first")
        if not in_pages and (self.decode if decode is None else decode):
            if self.cached_latent is None or self.cache_index is None:
                raise ValueError("decode=True needs a cache: call `init_cache` first")
            cached = self.cache_index[...]
        places = positions_of(inputs, positions, segment_ids, cached, page_table, lengths)
        query, latent = query_and_latent(self, lambda name, x: getattr(self, name)(x), inputs, places)
        kernel = self.kv_b_proj.kernel[...]
        if in_pages:
            assert self.latent_pages is not None and page_table is not None and lengths is not None
            x, self.latent_pages[...] = attend_in_latent_pages(
                self, query, latent, kernel, self.latent_pages[...], page_table, lengths
            )
        elif cached is not None:
            assert self.cached_latent is not None and self.cache_index is not None
            self.cached_latent[...], self.cache_index[...] = append_latent(self.cached_latent[...], cached, latent)
            x = attend_to_cache(self, query, self.cached_latent[...], kernel, cached)
        else:
            x = attend_expanded(self, query, latent, kernel, segment_ids)
        return self.o_proj(x)


class BlockSparseDense(nnx.Module):
    """A dense layer whose weight stores only some of its blocks (Pixelated Butterfly, arXiv 2112.00029).

    Time and memory are proportional to the number of stored blocks, forward and backward. The parameters are those of
    `flax.nnx.Linear`, but `kernel` has shape [K, A, B], with the K blocks of A x B that the pattern keeps.
    `jax_flash.matrix_to_blocks` and `blocks_to_matrix` convert the kernel of a checkpoint.

    Args:
      in_features, out_features: number of input and output features.
      pattern: a block mask with in_features x out_features entries, or a function (in_features, out_features) that
        returns one, such as `functools.partial(jax_flash.patterns.butterfly, global_blocks=1)`. All of its blocks are
        full or empty.
      use_bias: whether to add a bias.
      dtype: dtype of the computation. Default: the common dtype of inputs and parameters.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the kernel [K, A, B]. Default: outputs have the variance of the inputs, as with the
        initializer of `flax.nnx.Linear`.
      bias_init: initializer of the bias.
      rngs: random number generators; `params` initializes the parameters.

    Raises:
      TypeError: if the pattern is not a block mask or such a function.
      ValueError: if the pattern has other sizes or partial blocks, or the sizes do not consist of whole blocks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        pattern: BlockPattern,
        *,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Callable[..., jax.Array] | None = None,
        bias_init: Callable[..., jax.Array] = nnx.initializers.zeros,
        rngs: nnx.Rngs,
    ):
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self.places = block_pattern(pattern, in_features, out_features)
        initialize = kernel_init or block_initializer(self.places)
        shape = (self.places.count, *self.places.block)
        self.kernel = nnx.Param(initialize(rngs.params(), shape, param_dtype))
        self.bias = nnx.Param(bias_init(rngs.params(), (out_features,), param_dtype)) if use_bias else None

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Return the outputs [..., out_features] of inputs [..., in_features]."""
        bias = None if self.bias is None else self.bias[...]
        return apply_blocks(inputs, self.kernel[...], bias, self.places, self.dtype)
