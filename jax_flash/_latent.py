"""Shared code of the linen and nnx modules `MultiHeadLatentAttention` (MLA, arXiv 2405.04434).

A module makes the projections and keeps the cache. This code decides what they are, and attends between them. In the
expanded computation, `kv_b_proj` computes a key and a value for each head from the latent. With absorbed weights,
`kv_b_proj` multiplies the queries and the outputs instead, and all heads attend to the latent itself. Both give the
same result up to rounding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx.nn.dtypes import promote_dtype
from flax.typing import Dtype, PrecisionLike
from jax.typing import ArrayLike

from jax_flash import checks
from jax_flash._flax import attend, written
from jax_flash.call import Call, Implementation
from jax_flash.explicit import explicit_mesh
from jax_flash.mla import append_to_latent_pages, mla_attention, paged_mla_attention

Apply = Callable[[str, jax.Array], jax.Array]  # applies the layer of this name


@dataclasses.dataclass(kw_only=True, eq=False)
class LatentAttributes:
    """The attributes of both modules, except for `num_heads`."""

    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_theta: float = 10000.0
    rope_frequencies: tuple[float, ...] | None = None
    scale: float | None = None
    is_causal: bool = True
    use_bias: bool = False
    norm_epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Callable[..., jax.Array] = jax.nn.initializers.lecun_normal()
    implementation: Implementation | None = None
    reproducible_gradients: bool = False

    @property
    def latent_dim(self) -> int:
        """The number of entries that a cache has for each token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """The head dim of queries and of expanded keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """The factor of the scores."""
        return 1 / math.sqrt(self.qk_head_dim) if self.scale is None else self.scale


def layers(of: LatentAttributes, num_heads: int, features: int) -> dict[str, tuple[int, ...]]:
    """Return the layers of a module by name: (inputs, outputs) of a dense layer, or (size,) of an RMSNorm."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    for name in (*names, "q_lora_rank") if of.q_lora_rank is not None else names:
        checks.integer(name, getattr(of, name), 1)
    checks.integer("num_heads", num_heads, 1)
    if of.qk_rope_head_dim % 2:
        raise ValueError(f"qk_rope_head_dim must be even, not {of.qk_rope_head_dim}")
    if of.rope_frequencies is not None and len(of.rope_frequencies) != of.qk_rope_head_dim // 2:
        raise ValueError(
            f"rope_frequencies must have qk_rope_head_dim / 2 = {of.qk_rope_head_dim // 2} numbers, not "
            f"{len(of.rope_frequencies)}"
        )
    query: dict[str, tuple[int, ...]] = {"q_proj": (features, num_heads * of.qk_head_dim)}
    if of.q_lora_rank is not None:
        query = {
            "q_a_proj": (features, of.q_lora_rank),
            "q_a_layernorm": (of.q_lora_rank,),
            "q_b_proj": (of.q_lora_rank, num_heads * of.qk_head_dim),
        }
    return query | {
        "kv_a_proj_with_mqa": (features, of.latent_dim),
        "kv_a_layernorm": (of.kv_lora_rank,),
        "kv_b_proj": (of.kv_lora_rank, num_heads * (of.qk_nope_head_dim + of.v_head_dim)),
        "o_proj": (num_heads * of.v_head_dim, features),
    }


def has_bias(of: LatentAttributes, name: str) -> bool:
    """Return whether a dense layer has a bias. As in DeepSeek-V3, only three of them may have one."""
    return of.use_bias and name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")


def positions_of(
    inputs: jax.Array,
    positions: ArrayLike | None,
    segment_ids: ArrayLike | None,
    cached: jax.Array | None,
    page_table: ArrayLike | None,
    lengths: ArrayLike | None,
) -> Any:
    """Return the positions [..., T] of the inputs [..., T, features] of a call.

    Args:
      positions, segment_ids, page_table, lengths: arguments of the call.
      cached: int32 scalar, the number of tokens in the cache; None without a contiguous cache.
    """
    leading = inputs.shape[:-1]
    own = jnp.arange(leading[-1])
    if cached is None and page_table is None and lengths is None:
        if positions is None:
            return own
        positions = checks.integers("positions", positions)
        fits = 0 < positions.ndim <= len(leading) and positions.shape[-1] == leading[-1]
        if not fits or any(n not in (1, full) for n, full in zip(positions.shape[::-1], leading[::-1], strict=False)):
            raise ValueError(f"positions must have shape {leading} or {leading[-1:]}, not {positions.shape}")
        return positions
    for name, x in {"positions": positions, "segment_ids": segment_ids}.items():
        if x is not None:
            raise ValueError(f"{name} must not be given with a cache, which counts its tokens: leave it out")
    if cached is not None:
        return cached + own
    if page_table is None or lengths is None:
        raise ValueError("a paged cache needs page_table and lengths: pass both in the call")
    if inputs.ndim != 3:
        raise ValueError(f"with a paged cache, inputs must have shape [B, T, features], not {inputs.shape}")
    ends = checks.saturated(checks.shaped("lengths", checks.integers("lengths", lengths), inputs.shape[:1]))
    return (ends[..., None] - len(own) + own).clip(0)  # queries before the first token are padding


def query_and_latent(
    of: LatentAttributes, apply: Apply, inputs: jax.Array, positions: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Return the queries [..., T, N, D] and the latents [..., T, latent_dim], both with rotated last entries."""
    if of.q_lora_rank is None:
        query = apply("q_proj", inputs)
    else:
        query = apply("q_b_proj", apply("q_a_layernorm", apply("q_a_proj", inputs)))
    query = query.reshape(*query.shape[:-1], -1, of.qk_head_dim)
    both = apply("kv_a_proj_with_mqa", inputs)
    compressed = apply("kv_a_layernorm", both[..., : of.kv_lora_rank])
    key = _rotated(of, both[..., None, of.kv_lora_rank :], positions)[..., 0, :]
    still, turned = query[..., : of.qk_nope_head_dim], query[..., of.qk_nope_head_dim :]
    query = jnp.concatenate([still, _rotated(of, turned, positions)], axis=-1)
    return query, jnp.concatenate([compressed, key.astype(compressed.dtype)], axis=-1)


def attend_expanded(
    of: LatentAttributes,
    query: jax.Array,
    latent: jax.Array,
    kernel: jax.Array,
    segment_ids: ArrayLike | None = None,
    cached: jax.Array | None = None,
) -> jax.Array:
    """Return the outputs [..., T, N * v_head_dim] of attention with a key and a value for each head.

    Args:
      latent: array [..., S, latent_dim].
      kernel: the kernel of `kv_b_proj`.
      segment_ids: integer array [..., T] of packed sequences, or None.
      cached: the position of the first query in the cache, or None if the latents are those of the queries.
    """
    query, latent, kernel = promote_dtype((query, latent, kernel), dtype=of.dtype)
    heads = query.shape[-2]
    expanded = jnp.einsum("...sr,rx->...sx", latent[..., : of.kv_lora_rank], kernel, precision=of.precision)
    expanded = expanded.reshape(*expanded.shape[:-1], heads, -1)
    still, rotary = expanded[..., : of.qk_nope_head_dim], latent[..., None, of.kv_lora_rank :]
    shape, spec = (*still.shape[:-1], rotary.shape[-1]), jax.typeof(still).sharding.spec
    rotary = jnp.broadcast_to(rotary, shape, out_sharding=spec if explicit_mesh(still) else None)
    key = jnp.concatenate([still, rotary], axis=-1)
    call = Call(
        scale=of.softmax_scale,
        is_causal=of.is_causal or cached is not None,
        query_offset=cached,
        query_segment_ids=segment_ids,
        key_value_segment_ids=segment_ids,
        implementation=of.implementation,
        precision=of.precision,
        deterministic=of.reproducible_gradients,
    )
    out = attend(query, key, expanded[..., of.qk_nope_head_dim :], None, None, call, deterministic=True)
    return out.reshape(*out.shape[:-2], -1)


def attend_to_cache(
    of: LatentAttributes, query: jax.Array, latent: jax.Array, kernel: jax.Array, cached: jax.Array
) -> jax.Array:
    """Return the outputs of queries at the end of a cache, by the computation with fewer operations."""
    if not absorbs(of, query.shape[-3], latent.shape[-2]):
        return attend_expanded(of, query, latent, kernel, cached=cached)
    query, latent, kernel = promote_dtype((query, latent, kernel), dtype=of.dtype)

    def to_latent(query: jax.Array) -> jax.Array:
        leading = query.shape[:-3]
        out = mla_attention(
            query.reshape(-1, *query.shape[-3:]),
            latent.reshape(-1, *latent.shape[-2:]),
            value_dim=of.kv_lora_rank,
            scale=of.softmax_scale,
            is_causal=True,
            query_offset=cached,
            precision=of.precision,
            deterministic=of.reproducible_gradients,
            implementation=of.implementation,
        )
        return out.reshape(*leading, *out.shape[1:])

    return _absorbed(of, query, kernel, to_latent)


def attend_in_latent_pages(
    of: LatentAttributes,
    query: jax.Array,
    latent: jax.Array,
    kernel: jax.Array,
    pages: jax.Array,
    page_table: ArrayLike,
    lengths: ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """Write the latents [B, T, latent_dim] to pages. Return the outputs of their queries, and the updated pages."""
    query, kernel = promote_dtype((query, kernel), dtype=of.dtype)
    pages = append_to_latent_pages(pages, latent, page_table, lengths)

    def to_pages(query: jax.Array) -> jax.Array:
        return paged_mla_attention(
            query.astype(pages.dtype),
            pages,
            page_table,
            lengths,
            value_dim=of.kv_lora_rank,
            scale=of.softmax_scale,
            precision=of.precision,
            implementation=of.implementation,
        ).astype(query.dtype)

    return _absorbed(of, query, kernel, to_pages), pages


def append_latent(cache: jax.Array, cached: jax.Array, latent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Write latents [..., T, D] to a cache [..., max_length, D] from position `cached` on.

    Returns:
      The updated cache, and its new number of tokens.
    """
    return written("latents", cache, latent, cached, axis=-2), cached + latent.shape[-2]


def absorbs(of: LatentAttributes, q_len: int, kv_len: int) -> bool:
    """Return whether absorbed weights need fewer operations than the expansion of all latents.

    Expanding one latent costs as much as absorbing the weights into one query. For each query and key, an absorbed head
    has wider dims. For the dims of DeepSeek-V3 and many keys, absorbed weights are cheaper up to 170 queries.
    """
    expanded = of.qk_head_dim + of.v_head_dim
    absorbed = of.latent_dim + of.kv_lora_rank
    weights = of.kv_lora_rank * (of.qk_nope_head_dim + of.v_head_dim)
    return q_len * kv_len * absorbed + q_len * weights <= q_len * kv_len * expanded + kv_len * weights


def _absorbed(
    of: LatentAttributes, query: jax.Array, kernel: jax.Array, attend: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Return the outputs [..., T, N * v_head_dim], where `attend` computes attention to the latents."""
    of_heads = kernel.reshape(kernel.shape[0], query.shape[-2], -1)
    to_key, to_value = of_heads[..., : of.qk_nope_head_dim], of_heads[..., of.qk_nope_head_dim :]
    still, turned = query[..., : of.qk_nope_head_dim], query[..., of.qk_nope_head_dim :]
    still = jnp.einsum("...tnd,rnd->...tnr", still, to_key, precision=of.precision)
    latent = attend(jnp.concatenate([still, turned], axis=-1))
    out = jnp.einsum("...tnr,rnd->...tnd", latent, to_value, precision=of.precision)
    return out.reshape(*out.shape[:-2], -1)


def _rotated(of: LatentAttributes, x: jax.Array, positions: ArrayLike) -> jax.Array:
    """Return x [..., T, N, dim] with rotary embeddings. As in DeepSeek-V3, entries 2i and 2i + 1 are a pair."""
    kind = jnp.promote_types(x.dtype, jnp.float32)
    if of.rope_frequencies is None:
        frequencies = of.rope_theta ** -(jnp.arange(0, x.shape[-1], 2, kind) / x.shape[-1])
    else:
        frequencies = jnp.asarray(of.rope_frequencies, kind)
    angles = (jnp.asarray(positions, kind)[..., None] * frequencies)[..., None, :]
    even, odd, cos, sin = x[..., ::2], x[..., 1::2], jnp.cos(angles), jnp.sin(angles)
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape).astype(x.dtype)
