"""Multi-head latent attention (MLA): all heads attend to one latent vector for each token (DeepSeek-V2, -V3, Kimi)."""

from __future__ import annotations

import dataclasses
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_flash import arguments, attention, checks, paged
from jax_flash.call import Call, Implementation, explains_names
from jax_flash.operands import Operands
from jax_flash.problem import Problem

STEP, LARGEST = 8, 576  # a head dim is a multiple of STEP, and at most LARGEST


class PagedLatentOptions(TypedDict, total=False):
    """The options of `paged_mla_attention`, for `Problem.of_paged_mla`."""

    scale: float | ArrayLike
    precision: lax.PrecisionLike
    implementation: Implementation | None


class LatentOptions(TypedDict, total=False):
    """The options of `mla_attention`, for `Problem.of_mla`."""

    scale: float | ArrayLike
    is_causal: bool
    query_offset: int | ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    precision: lax.PrecisionLike
    deterministic: bool
    implementation: Implementation | None


@explains_names
def mla_attention(
    query: ArrayLike,
    latent: ArrayLike,
    *,
    value_dim: int = 512,
    scale: float | ArrayLike,
    is_causal: bool = False,
    query_offset: int | ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    precision: lax.PrecisionLike = None,
    deterministic: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Compute multi-head latent attention (arXiv 2405.04434) with absorbed weights.

    All query heads share one key per token, its latent. The value is the first `value_dim` entries of the latent. For
    each batch entry and head this computes::

        softmax(mask(scale · Q Latentᵀ)) Latent[:, :value_dim]

    In DeepSeek-V3, the latent of a token is its compressed keys and values (512 entries), followed by a rotary key (64
    entries). A query is the product of the head's query and the key projection (absorbed weights), followed by the
    rotary query. See docs/guides/mla.md.

    Letters: B batch size, T query length, S key/value length, N heads, D latent dim.

    Args:
      query: array [B, T, N, D] or [T, N, D]; float32, float64, bfloat16 or float16. D is a multiple of 8 up to 576.
      latent: array [B, S, D] or [S, D] in the same dtype. Its gradient includes its use as key and as value.
      value_dim: number of entries of the latent that are the value, a multiple of 8 up to D.
      scale: real scalar. It is required, because D does not determine it. DeepSeek-V3 has 1/√192, since the dim of its
        expanded keys is 192.
      is_causal, query_offset, key_value_seq_lengths, precision, deterministic, implementation: as in
        `dot_product_attention`.

    Returns:
      Array [B, T, N, value_dim] or [T, N, value_dim] in the dtype of the query.

    Raises:
      TypeError, ValueError, NotImplementedError: as in `dot_product_attention`, and if the dims do not fit together.
    """
    call = Call(
        scale=_scale(scale),
        is_causal=is_causal,
        query_offset=query_offset,
        key_value_seq_lengths=key_value_seq_lengths,
        precision=precision,
        deterministic=deterministic,
        implementation=implementation,
    )
    problem, operands = problem_and_operands(query, latent, value_dim, call)
    o, *_ = attention.attend(problem, None, operands, implementation)
    return o[0] if np.ndim(query) == 3 else o


@explains_names
def paged_mla_attention(
    query: ArrayLike,
    latent_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    value_dim: int = 512,
    scale: float | ArrayLike,
    precision: lax.PrecisionLike = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Compute causal latent attention of the last T tokens of each sequence to a paged cache.

    `mla_attention` has the formula, and `paged_attention` explains the pages. `append_to_latent_pages` writes the
    latents of new tokens. Call this function under `jax.jit`.

    Letters: B sequences, T queries per sequence, N heads, D latent dim, M pages per sequence at most.

    Args:
      query: array [B, T, N, D], the queries of the last T tokens; float32, float64, bfloat16 or float16.
      latent_pages: array [pages, page, D] in the same dtype. `page` is a multiple of 8 from 8 to 1024.
      page_table: integer array [B, M], as in `paged_attention`.
      lengths: integer array [B], the tokens of each sequence including the T new ones, as in `paged_attention`.
      value_dim, scale: as in `mla_attention`.
      precision, implementation: as in `dot_product_attention`.

    Returns:
      Array [B, T, N, value_dim] in the dtype of the query.

    Raises:
      TypeError, ValueError, NotImplementedError: as in `mla_attention` and `paged_attention`.
    """
    call = Call(scale=_scale(scale), precision=precision, implementation=implementation)
    problem, operands = paged_problem_and_operands(query, latent_pages, page_table, lengths, value_dim, call)
    return attention.attend(problem, None, operands, implementation)[0]


@arguments.creates_problems("of_mla", LatentOptions)
def problem_and_operands(query: ArrayLike, latent: ArrayLike, value_dim: int, call: Call) -> tuple[Problem, Operands]:
    """Check the arguments of a call of `mla_attention`, and return its problem and arrays."""
    query = checks.floats("query", query)
    key, value = _key_and_value(query, "latent", latent, value_dim)
    if query.ndim not in (3, 4) or key.ndim != query.ndim:
        raise ValueError(
            "query and latent must have shapes [B, T, N, D] and [B, S, D], or [T, N, D] and [S, D], not "
            f"{query.shape} and {np.shape(latent)}"
        )
    if query.ndim == 4 and query.shape[0] != key.shape[0]:
        raise ValueError(
            f"query and latent must have the same batch size, not {query.shape[0]} and {key.shape[0]}: their shapes "
            f"are {query.shape} and {np.shape(latent)}"
        )
    problem, operands = arguments.problem_and_operands(query, key, value, None, None, call)
    return dataclasses.replace(problem, latent=True), operands


@arguments.creates_problems("of_paged_mla", PagedLatentOptions)
def paged_problem_and_operands(
    query: ArrayLike,
    latent_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    value_dim: int,
    call: Call,
) -> tuple[Problem, Operands]:
    """Check the arguments of a call of `paged_mla_attention`, and return its problem and arrays."""
    query = checks.floats("query", query)
    keys, values = _key_and_value(query, "latent_pages", latent_pages, value_dim)
    if not query.ndim == keys.ndim == 4:
        raise ValueError(
            "query and latent_pages must have shapes [B, T, N, D] and [pages, page, D], not "
            f"{query.shape} and {np.shape(latent_pages)}"
        )
    problem, operands = paged.problem_and_operands(query, keys, values, page_table, lengths, call)
    return dataclasses.replace(problem, latent=True), operands


def append_to_latent_pages(
    latent_pages: ArrayLike, latent: ArrayLike, page_table: ArrayLike, lengths: ArrayLike
) -> jax.Array:
    """Write the latents of the last T tokens of each sequence to a paged cache.

    Call it before `paged_mla_attention`. Under `jit` with `donate_argnames="latent_pages"` it writes in place.

    Args:
      latent_pages: array [pages, page, D].
      latent: array [B, T, D]. It is cast to the dtype of latent_pages.
      page_table, lengths: as in `append_to_pages`.

    Returns:
      The updated latent_pages.

    Raises:
      TypeError, ValueError: as in `append_to_pages`.
    """
    pages, new = checks.floats("latent_pages", latent_pages), checks.floats("latent", latent)
    if not pages.ndim == new.ndim == 3 or pages.shape[2] != new.shape[2]:
        raise ValueError(
            f"latent_pages [pages, page, D] takes latent [B, T, D], but their shapes are {pages.shape}, {new.shape}"
        )
    return paged.written((pages,), (new,), page_table, lengths)[0]


def _scale(scale: Any) -> Any:
    if scale is None:
        raise TypeError("scale must be a real number, not None: pass 1/√d for expanded keys of dim d")
    return scale


def _key_and_value(query: jax.Array, name: str, latent: Any, value_dim: int) -> tuple[jax.Array, jax.Array]:
    """Return the keys and the values of the only key/value head, from a latent [..., D]."""
    latent = checks.floats(name, latent)
    if latent.dtype != query.dtype:
        raise TypeError(
            f"{name} has dtype {latent.dtype}, but query has {query.dtype}: cast one of them, such as "
            f"{name}.astype(query.dtype)"
        )
    value_dim = checks.integer("value_dim", value_dim, 1)
    dim = latent.shape[-1] if latent.ndim else 0
    if not query.ndim or query.shape[-1] != dim:
        raise ValueError(
            f"query and {name} must have the same last dim, not {query.shape[-1:]} and {latent.shape[-1:]}: "
            f"their shapes are {query.shape} and {latent.shape}"
        )
    if dim % STEP or not STEP <= dim <= LARGEST:
        raise ValueError(f"the last dim of {name} must be a multiple of {STEP} from {STEP} to {LARGEST}, not {dim}")
    if value_dim % STEP or value_dim > dim:
        raise ValueError(
            f"value_dim must be a multiple of {STEP} and at most {dim}, the last dim of {name}, not {value_dim}"
        )
    key = latent[..., None, :]
    return key, jnp.asarray(key[..., :value_dim])
