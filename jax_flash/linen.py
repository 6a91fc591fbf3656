"""Flax linen: a `MultiHeadAttention` module, and a `dot_product_attention` for the stock module's `attention_fn`::

    layer = jax_flash.linen.MultiHeadAttention(num_heads=8, is_causal=True)
    layer = flax.linen.MultiHeadDotProductAttention(num_heads=8, attention_fn=jax_flash.linen.dot_product_attention)

Both keep the parameter tree of the stock module, so its checkpoints load. The results differ in two ways. A query that
sees no key gives zeros, where Flax gives the mean of the values. Dropout masks come from jax_flash's own generator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.nnx.nn.dtypes import promote_dtype
from flax.typing import Dtype, PrecisionLike
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
from jax_flash.call import Call, Implementation, explains_names
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
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    *,
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
    reproducible_gradients: bool = False,
) -> jax.Array:
    """Compute scaled dot-product attention with `flax.linen.dot_product_attention`'s arguments, by fused kernels.

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
      dtype: dtype of the computation. Default: the common dtype of query, key and value.
      precision: precision of float32 products, as in `jax.lax.Precision`.
      force_fp32_for_softmax: no effect. The softmax is always computed in at least float32.
      scale, ...: options of `jax_flash.dot_product_attention` under the same names. Their arrays have leading
        dimensions, such as `query_segment_ids` [..., T], `key_value_segment_ids` [..., S] and `query_offset` [...].
        Leading dimensions count as one batch and may be broadcast.
      reproducible_gradients: whether gradients have the same bits in every run. `jax_flash.dot_product_attention` calls
        this option `deterministic`.

    Returns:
      Array [..., T, N, E] in the dtype of the computation.

    Raises:
      NotImplementedError: if `module`, `einsum_dot_general`, `qk_attn_weights_einsum` or `attn_weights_value_einsum` is
        set. A fused kernel has no attention weights to sow and no einsum to replace.
      ValueError: if shapes do not match, a value is out of range, or dropout is on without `dropout_rng`.
      TypeError: if an argument has a wrong type or an unknown name.
    """
    refuse(
        "jax_flash.linen.dot_product_attention",
        module=module,
        einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
    )
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


class MultiHeadAttention(nn.MultiHeadDotProductAttention, Attributes):
    """Multi-head attention with fused kernels, a drop-in for `flax.linen.MultiHeadDotProductAttention`.

    The module has the attributes of the stock module and those below. It has the same parameter tree.

    With `decode=True`, a call takes any number T of new tokens: first the prompt, then one token at a time. (The stock
    module takes one token per call.) The new keys and values enter the cache. Each new token attends to itself and to
    all earlier tokens. When decoding, a mask must be broadcastable to [..., num_heads, T, max_length].

    Attributes:
      num_kv_heads: number of key/value heads, a divisor of `num_heads`. Default: `num_heads`. A smaller number gives
        grouped-query attention.
      is_causal: whether a token attends only to itself and to earlier tokens. Decoding is always causal.
      local_window_size: (left, right), or one int for both: how many tokens before and after itself a token sees.
        Pass a traced integer as an option of the call.
      logits_soft_cap: soft cap of the scores: cap * tanh(scores / cap).
      pages: number of pages of a paged cache, which sequences of different lengths share. It needs `decode=True`, and
        calls then take `page_table` and `lengths`. 0 means a contiguous cache.
      page: tokens per page, a multiple of 8 from 8 to 1024.
      implementation: as in `jax_flash.dot_product_attention`.
      reproducible_gradients: whether gradients have the same bits in every run. `jax_flash.dot_product_attention` calls
        this option `deterministic`.
      use_sinks: whether the module has a parameter `sinks` [num_heads]: one logit per head that joins the softmax,
        but adds no value vector to the output. It starts at 0, which acts like one more key with score 0 and value 0.

    Raises:
      NotImplementedError: from a call, if `sow_weights`, `attention_fn`, `qk_attn_weights_einsum_cls` or
        `attn_weights_value_einsum_cls` is set.
      ValueError: if heads or features do not divide evenly, a shape does not fit the cache, or a value is out of range.
      TypeError: if an option has a wrong type or an unknown name.
    """

    attention_fn: Callable[..., jax.Array] = dot_product_attention
    num_kv_heads: int | None = None
    pages: int = 0
    page: int = 64

    @nn.compact
    @explains_names
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
          inputs_q: array [..., T, features].
          inputs_k: array [..., S, features]. Default: inputs_q.
          inputs_v: array [..., S, features]. Default: inputs_k.
          mask: bool or float array, broadcastable to [..., num_heads, T, S]. Nonzero means that the query may attend to
            the key.
          deterministic: whether to turn dropout off. If `dropout_rate` > 0, set it here or as the attribute.
          dropout_rng: JAX PRNG key for dropout. Default: `self.make_rng("dropout")`.
          sow_weights: not supported.
          page_table: integer array [B, M], the page numbers of each sequence in a paged cache. The inputs are then the
            last T tokens of each sequence, [B, T, features], and enter the cache.
          lengths: integer array [B], the tokens of each sequence including the new ones; 0 for an unused row. It goes
            with `page_table`; see `jax_flash.paged_attention` and `jax_flash.append_to_pages`.
          scale, ...: options of `jax_flash.linen.dot_product_attention`, such as `block_mask`, `query_segment_ids`
            [..., T], `key_value_segment_ids` [..., S] ([..., max_length] when decoding), and `query_offset` [...] (not
            when decoding). An option that is not None overrides the module's attribute of the same name.

        Returns:
          Array [..., T, out_features].
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
                "num_heads must divide qkv_features, and num_kv_heads must divide num_heads, not "
                f"num_heads={num_heads}, qkv_features={qkv_features}, num_kv_heads={num_kv_heads}"
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
        sinks_parameter = None
        if checks.flag("use_sinks", self.use_sinks):
            sinks_parameter = self.param("sinks", nn.initializers.zeros_init(), (num_heads,), self.param_dtype)
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
            raise ValueError("page_table and lengths need a paged cache: set decode=True and pages on the module")
        elif self.decode:
            # The first call (`init`) only makes the cache, as long as its inputs.
            is_initialized = self.has_variable("cache", "cached_key")
            cached_key = self.variable("cache", "cached_key", jnp.zeros_like, key)
            cached_value = self.variable("cache", "cached_value", jnp.zeros_like, value)
            cache_index = self.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32))
            if is_initialized:
                cached = cache_index.value
                key, value, cache_index.value = append(cached_key.value, cached_value.value, cached, query, key, value)
                cached_key.value, cached_value.value = key, value

        if dropout.threshold(self.dropout_rate):
            deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        call = Call(
            scale=scale,
            is_causal=chosen(is_causal, self.is_causal),
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=chosen(local_window_size, self.local_window_size),
            implementation=chosen(implementation, self.implementation),
            sinks=chosen_sinks(sinks, sinks_parameter),
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
            dropout_key=dropout_rng,
            broadcast_dropout=self.broadcast_dropout,
            precision=self.precision,
            deterministic=checks.flag(
                "reproducible_gradients", chosen(reproducible_gradients, self.reproducible_gradients)
            ),
        )
        if in_pages:
            x, (of_keys.value, of_values.value) = attend_in_pages(
                query,
                key,
                value,
                mask,
                call,
                (of_keys.value, of_values.value),
                page_table,
                lengths,
                dtype=self.dtype,
                deterministic=deterministic,
            )
        else:
            x = attend_in(
                query,
                key,
                value,
                mask,
                call,
                dtype=self.dtype,
                deterministic=deterministic,
                make_rng=self.make_rng,
                cached=cached,
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


class MultiHeadLatentAttention(nn.Module, LatentAttributes):
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

    With `decode=True`, a call takes any number T of new tokens. Their latents enter the cache in the collection
    "cache". `init` makes the cache, as long as its inputs. Tokens beyond that length overwrite the last ones, without
    an error.

    Attributes:
      num_heads: number of heads.
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
      decode: whether to use a cache.
      pages: number of pages of a paged cache, which sequences of different lengths share. It needs `decode=True`, and
        calls then take `page_table` and `lengths`. 0 means a contiguous cache.
      page: tokens per page, a multiple of 8 from 8 to 1024.

    Raises:
      ValueError: if a dim is out of range, a shape does not fit the cache, or an option does not go with a cache.
      TypeError: if an option has a wrong type or an unknown name.
    """

    num_heads: int
    decode: bool = False
    pages: int = 0
    page: int = 64

    @nn.compact
    @explains_names
    def __call__(
        self,
        inputs: jax.Array,
        *,
        positions: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        page_table: ArrayLike | None = None,
        lengths: ArrayLike | None = None,
    ) -> jax.Array:
        """Return the outputs [..., T, features] of inputs [..., T, features].

        Args:
          inputs: array [..., T, features].
          positions: integer array [..., T] for the rotary embeddings. Default: 0, 1, … Not with a cache.
          segment_ids: integer array [..., T]. A token attends only to tokens with its id (packed sequences). Not with a
            cache.
          page_table, lengths: as in `jax_flash.linen.MultiHeadAttention`, for a paged cache.
        """
        sizes = layers(self, self.num_heads, inputs.shape[-1])

        def apply(name: str, x: jax.Array) -> jax.Array:
            if len(sizes[name]) == 1:
                return nn.RMSNorm(self.norm_epsilon, self.dtype, self.param_dtype, name=name)(x)
            return nn.Dense(
                sizes[name][1],
                use_bias=has_bias(self, name),
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                precision=self.precision,
                kernel_init=self.kernel_init,
                name=name,
            )(x)

        in_pages = self.decode and self.pages > 0
        cached = None
        if self.decode and not self.pages:
            is_initialized = self.has_variable("cache", "cache_index")
            index = self.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32))
            cached = index.value if is_initialized else None  # the first call (`init`) only makes the cache
        if (page_table is not None or lengths is not None) and not in_pages:
            raise ValueError("page_table and lengths need a paged cache: set decode=True and pages on the module")
        attends_in_pages = in_pages and not self.is_initializing()
        if attends_in_pages and page_table is None and lengths is None:
            raise ValueError("a paged cache needs page_table and lengths: pass both in the call")
        places = positions_of(inputs, positions, segment_ids, cached, page_table, lengths)
        query, latent = query_and_latent(self, apply, inputs, places)
        kernel = _Kernel(sizes["kv_b_proj"], self.kernel_init, self.param_dtype, name="kv_b_proj")()

        if in_pages:
            shape = checks.integer("pages", self.pages, 1), checked_page(checks.integer("page", self.page, 1))
            pages = self.variable("cache", "latent_pages", jnp.zeros, (*shape, self.latent_dim), latent.dtype)
        elif self.decode:
            cache = self.variable("cache", "cached_latent", jnp.zeros_like, latent)
        if attends_in_pages:
            assert page_table is not None and lengths is not None
            x, pages.value = attend_in_latent_pages(self, query, latent, kernel, pages.value, page_table, lengths)
        elif cached is not None:
            cache.value, index.value = append_latent(cache.value, cached, latent)
            x = attend_to_cache(self, query, cache.value, kernel, cached)
        else:
            x = attend_expanded(self, query, latent, kernel, segment_ids)
        return apply("o_proj", x)


class _Kernel(nn.Module):
    """The kernel of a dense layer, in the parameter tree of `nn.Dense`."""

    shape: tuple[int, ...]
    kernel_init: Callable[..., jax.Array]
    param_dtype: Dtype

    @nn.compact
    def __call__(self) -> jax.Array:
        kernel: jax.Array = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        return kernel


class BlockSparseDense(nn.Module):
    """A dense layer whose weight stores only some of its blocks (Pixelated Butterfly, arXiv 2112.00029).

    Time and memory are proportional to the number of stored blocks, forward and backward. The parameters are those of
    `flax.linen.Dense`, but `kernel` has shape [K, A, B], with the K blocks of A x B that the pattern keeps.
    `jax_flash.matrix_to_blocks` and `blocks_to_matrix` convert the kernel of a checkpoint.

    Args:
      features: number of output features.
      pattern: a block mask with in_features x features entries, or a function (in_features, features) that returns one,
        such as `functools.partial(jax_flash.patterns.butterfly, global_blocks=1)`. All of its blocks are full or empty.
      use_bias: whether to add a bias.
      dtype: dtype of the computation. Default: the common dtype of inputs and parameters.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the kernel [K, A, B]. Default: outputs have the variance of the inputs, as with the
        initializer of `flax.linen.Dense`.
      bias_init: initializer of the bias.

    Raises:
      TypeError: if the pattern is not a block mask or such a function.
      ValueError: if the pattern has other sizes or partial blocks, or the sizes do not consist of whole blocks.
    """

    features: int
    pattern: BlockPattern
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Callable[..., jax.Array] | None = None
    bias_init: Callable[..., jax.Array] = nn.initializers.zeros

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Return the outputs [..., features] of inputs [..., in_features]."""
        if not jnp.ndim(inputs):
            raise ValueError("inputs must have shape [..., in_features], not ()")
        places = block_pattern(self.pattern, jnp.shape(inputs)[-1], self.features)
        initialize = self.kernel_init or block_initializer(places)
        kernel = self.param("kernel", initialize, (places.count, *places.block), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        return apply_blocks(inputs, kernel, bias, places, self.dtype)
