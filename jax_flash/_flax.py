"""Shared code of the linen and nnx modules: it maps Flax's arrays and options to `jax_flash.dot_product_attention`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.nnx.nn.dtypes import promote_dtype
from flax.typing import Dtype
from jax import lax
from jax.typing import ArrayLike

from jax_flash import attention, checks, dropout
from jax_flash.block_sparse import BlockMask
from jax_flash.call import Call, Implementation
from jax_flash.paged import append_to_pages, paged_attention
from jax_flash.sparse_matrix import Pattern, product
from jax_flash.windows import Window

Value = TypeVar("Value")


# The arrays with one entry per example, and the number of dims of an entry.
PER_EXAMPLE = {
    "query_seq_lengths": 0,
    "key_value_seq_lengths": 0,
    "dropout_batch_ids": 0,
    "query_segment_ids": 1,
    "key_value_segment_ids": 1,
    "query_offset": 0,
}


@dataclasses.dataclass(kw_only=True, eq=False)
class Attributes:
    """Attributes that both modules have in addition to the stock ones.

    An option of a call overrides the attribute of the same name, unless it is None.
    """

    is_causal: bool = False
    local_window_size: Window | None = None
    logits_soft_cap: float | None = None
    implementation: Implementation | None = None
    reproducible_gradients: bool = False
    use_sinks: bool = False


def chosen(option: Value | None, attribute: Value) -> Value:
    """Return the option of a call, or the module's attribute if the option is None."""
    return attribute if option is None else option


def chosen_sinks(sinks: ArrayLike | None, parameter: jax.Array | None) -> ArrayLike | None:
    """Return the sinks of a call, or the module's parameter if it has one."""
    if parameter is None:
        return sinks
    if sinks is not None:
        raise ValueError(
            "sinks must not be given with use_sinks=True: leave it out, because the module has its own parameter"
        )
    return parameter


def refuse(where: str, **given: Any) -> None:
    """Raise NotImplementedError if one of these arguments is set, because a fused kernel cannot support it."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(
                f"{where} does not support `{name}`: its attention is one fused kernel, with no attention weights to "
                "sow and no einsum to replace. Leave it out, or use Flax's own attention."
            )


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    call: Call,
    *,
    deterministic: bool,
) -> jax.Array:
    """Compute `jax_flash.dot_product_attention` with Flax's leading dimensions, masks and dropout arguments.

    Args:
      query, key, value: arrays [..., T, N, D], [..., S, K, D] and [..., S, K, E] of one float dtype. K divides N.
      bias, mask: arrays that broadcast to [..., N, T, S]. A mask has any dtype, and nonzero means may attend.
      call: the options. An array with a batch dimension in `jax_flash` has the query's leading dimensions [...] here,
        or dimensions that broadcast to them.
      deterministic: whether to turn dropout off, as in Flax.

    Returns:
      Array [..., T, N, E] in the dtype of the query.
    """
    if not query.ndim == key.ndim == value.ndim >= 3 or not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            "query, key and value must be [..., length, heads, head dim] with equal leading dimensions, not shapes "
            f"{query.shape}, {key.shape}, {value.shape}"
        )
    drop_threshold = dropout.threshold(call.dropout_rate)
    if checks.flag("deterministic", deterministic) or not drop_threshold:
        call = dataclasses.replace(call, dropout_rate=0.0, dropout_key=None)
    elif call.dropout_key is None:
        raise ValueError(
            f"dropout_rate={call.dropout_rate} with deterministic=False needs `dropout_rng`: pass a JAX PRNG key"
        )

    leading = query.shape[:-3]
    query, key, value = (x.reshape(math.prod(leading), *x.shape[-3:]) for x in (query, key, value))
    folded = {
        name: _fold(name, checks.integers(name, x), leading, dims, whole=True)
        for name, dims in PER_EXAMPLE.items()
        if (x := getattr(call, name)) is not None
    }
    out, *_ = attention.of_call(
        query,
        key,
        value,
        None if bias is None else _fold("bias", checks.array("bias", bias), leading, 3, whole=False),
        None if mask is None else _fold("mask", checks.array("mask", mask), leading, 3, whole=False).astype(bool),
        dataclasses.replace(call, **folded),
    )
    return out.reshape(*leading, *query.shape[1:3], value.shape[-1])


def attend_in(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    call: Call,
    *,
    dtype: Dtype | None,
    deterministic: bool | None,
    make_rng: Callable[[str], jax.Array],
    cached: jax.Array | None,
) -> jax.Array:
    """Attend as a module does between its projections.

    Args:
      call: the options of the call, or the module's attributes where the call has none.
      dtype: the module's dtype.
      make_rng: a function that returns a key of the named stream. It is called if a key is needed and the call has
        none.
      cached: int32 scalar, the number of keys in the cache before this call; None if the call does not decode.
    """
    if cached is not None:
        if call.query_offset is not None:
            raise ValueError(
                "query_offset must not be given when decoding: leave it out, because the cache counts its tokens"
            )
        if call.sequence_axis is not None:
            raise ValueError(
                "sequence_axis must not be given when decoding: leave it out, because each device has its own cache"
            )
        if mask is not None and np.ndim(mask) and np.shape(mask)[-1] not in (1, key.shape[-3]):
            raise ValueError(
                f"mask has shape {np.shape(mask)}, but when decoding its last dimension must be the {key.shape[-3]} "
                "tokens of the cache: leave out a causal mask, because decoding is always causal"
            )
        call = dataclasses.replace(call, is_causal=True, query_offset=cached)
    deterministic = False if deterministic is None else checks.flag("deterministic", deterministic)
    if dropout.threshold(call.dropout_rate) and not deterministic and call.dropout_key is None:
        call = dataclasses.replace(call, dropout_key=make_rng("dropout"))
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    return attend(query, key, value, None, mask, call, deterministic=deterministic)


def attend_in_pages(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    call: Call,
    pages: tuple[jax.Array, jax.Array],
    page_table: ArrayLike | None,
    lengths: ArrayLike | None,
    *,
    dtype: Dtype | None,
    deterministic: bool | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Write the new keys and values to a paged cache, and attend to the cache in its dtype.

    Args:
      query, key, value: arrays [B, T, N, D], [B, T, K, D] and [B, T, K, D] for the last T tokens of each sequence.
      mask: must be None. Options of the call that `paged_attention` lacks must be unset as well.
      call: the options of the call, or the module's attributes where the call has none.
      pages: the pages of keys and the pages of values.
      page_table, lengths: as in `paged_attention`.
      dtype: the module's dtype.

    Returns:
      Array [B, T, N, D] in the module's dtype, and the updated pages.
    """
    if page_table is None or lengths is None:
        raise ValueError("a paged cache needs page_table and lengths: pass both in the call")
    for name, x in {"mask": mask, **{name: getattr(call, name) for name in _NOT_IN_PAGES}}.items():
        if x is not None:
            raise ValueError(f"{name} must not be given with a paged cache, which does not support it: leave it out")
    if dropout.threshold(call.dropout_rate) and not deterministic:
        raise ValueError("a paged cache does not support dropout: call with deterministic=True")
    _check_as_many(query, key)
    (query,) = promote_dtype((query,), dtype=dtype)
    pages = append_to_pages(*pages, key, value, page_table, lengths)
    x = paged_attention(
        query.astype(pages[0].dtype),
        *pages,
        page_table,
        lengths,
        local_window_size=call.local_window_size,
        scale=call.scale,
        logits_soft_cap=call.logits_soft_cap,
        sinks=call.sinks,
        score_mod=call.score_mod,
        mask_mod=call.mask_mod,
        precision=call.precision,
        implementation=call.implementation,
    )
    return x.astype(query.dtype), pages


# The options that the modules accept and `paged_attention` lacks. Attention to pages is always causal.
_NOT_IN_PAGES = (
    "query_seq_lengths",
    "key_value_seq_lengths",
    "dropout_batch_ids",
    "dropout_head_ids",
    "query_segment_ids",
    "key_value_segment_ids",
    "query_offset",
    "block_mask",
    "sequence_axis",
    "sequence_layout",
)


def key_and_value_inputs(
    inputs_q: jax.Array, inputs_k: jax.Array | None, inputs_v: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return inputs_k and inputs_v with their defaults. Raise ValueError if only inputs_v is given."""
    if inputs_k is None:
        if inputs_v is not None:
            raise ValueError("inputs_v is given without inputs_k: pass inputs_k, which is also the default of inputs_v")
        inputs_k = inputs_q
    return inputs_k, inputs_k if inputs_v is None else inputs_v


def append(
    cached_key: jax.Array, cached_value: jax.Array, index: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write new keys and values [..., T, K, D] to caches [..., max_length, K, D] from position `index` on.

    The caller must ensure index + T <= max_length, as in Flax. Otherwise the last positions are overwritten.

    Returns:
      The updated caches, and index + T.
    """
    _check_as_many(query, key)
    keys = written("keys", cached_key, key, index, axis=-3)
    values = written("values", cached_value, value, index, axis=-3)
    return keys, values, index + key.shape[-3]


def _check_as_many(query: jax.Array, key: jax.Array) -> None:
    if query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"decoding takes as many queries as keys, but queries have shape {query.shape} and keys {key.shape}: "
            "pass the same new tokens for both"
        )


def written(name: str, cache: jax.Array, new: jax.Array, index: jax.Array, *, axis: int) -> jax.Array:
    """Write new keys, values or latents, with tokens along a negative axis, to a cache, as in `append`."""
    before, longest, after = cache.shape[:axis], cache.shape[axis], cache.shape[axis:][1:]
    if new.shape != (*before, new.shape[axis], *after) or new.shape[axis] > longest:
        raise ValueError(
            f"{name} must have shape {(*before, 'T', *after)} with T <= {longest} to fit the cache of shape "
            f"{cache.shape}, not {new.shape}"
        )
    return lax.dynamic_update_slice_in_dim(cache, new.astype(cache.dtype), index, axis=axis)


def _fold(name: str, x: Any, leading: tuple[int, ...], dims: int, whole: bool) -> Any:
    """Reshape an array that broadcasts to `leading` and `dims` more dimensions to [prod(leading), ...].

    The result may be [1, ...] unless `whole`.
    """
    shape = (1,) * (len(leading) + dims - x.ndim) + x.shape
    lead, rest = shape[: len(leading)], shape[len(leading) :]
    if len(rest) > dims or any(size not in (1, full) for size, full in zip(lead, leading, strict=True)):
        raise ValueError(
            f"{name} must be broadcastable to the leading dimensions {leading} and {dims} more, not shape {x.shape}"
        )
    x = x.reshape(shape)
    if whole or math.prod(lead) != 1:
        x = (np if isinstance(x, np.ndarray) else jnp).broadcast_to(x, (*leading, *rest))
    return x.reshape(math.prod(x.shape[: len(leading)]), *rest)


# --- block-sparse dense layers ----------------------------------------------------------------------------------------


BlockPattern = BlockMask | Callable[[int, int], BlockMask]


def block_pattern(pattern: BlockPattern, inputs: int, outputs: int) -> Pattern:
    """Return the places of the blocks of a layer's weight."""
    if not (callable(pattern) or isinstance(pattern, BlockMask)):
        raise TypeError(f"pattern must be a BlockMask, or a function that returns one, not {checks.described(pattern)}")
    mask = pattern if isinstance(pattern, BlockMask) else pattern(inputs, outputs)
    places = Pattern.of(mask)
    if places.shape != (inputs, outputs):
        raise ValueError(f"pattern must have in_features x features = {inputs} x {outputs}, not {places.shape}")
    return places


def block_initializer(places: Pattern) -> Callable[[jax.Array, Any, Any], jax.Array]:
    """Return the initializer of the blocks. Outputs have the variance of inputs, as with `lecun_normal` if dense."""

    def initialize(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        if not places.count:
            return jnp.zeros(shape, dtype)
        blocks = jax.nn.initializers.lecun_normal(-2, -1, batch_axis=0)(key, shape, dtype)
        column = places.rows_and_columns[1]
        return blocks * jnp.asarray(np.bincount(column)[column] ** -0.5, dtype)[:, None, None]

    return initialize


def apply_blocks(
    inputs: jax.Array, kernel: jax.Array, bias: jax.Array | None, places: Pattern, dtype: Any
) -> jax.Array:
    """Return the result of a block-sparse dense layer."""
    inputs, kernel, bias = promote_dtype((inputs, kernel, bias), dtype=dtype)
    if inputs.ndim == 0 or inputs.shape[-1] != places.shape[0]:
        raise ValueError(f"inputs must have shape [..., {places.shape[0]}], not {inputs.shape}")
    out = product(inputs, kernel, places)
    return out if bias is None else out + bias.reshape((1,) * (out.ndim - 1) + bias.shape)
