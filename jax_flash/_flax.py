"""Shared code of the linen and nnx modules: it maps Flax's arrays and options to `jax_flash.dot_product_attention`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.nnx.nn.dtypes import promote_dtype
from flax.typing import Dtype, PrecisionLike
from jax import lax
from jax.typing import ArrayLike

from jax_flash import arguments, attention, checks, dropout
from jax_flash.arguments import PER_EXAMPLE, Implementation, SharedOptions
from jax_flash.paged import PagedOptions, append_to_pages, paged_attention
from jax_flash.windows import Window


class FlaxOptions(SharedOptions, total=False):
    """Options of `jax_flash.dot_product_attention` that Flax's own functions lack.

    An array with a batch dimension in `jax_flash` has the query's leading dimensions [...] here, or dimensions that
    broadcast to them.
    """

    reproducible_gradients: bool  # `deterministic` in jax_flash. In Flax `deterministic` means no dropout.


class StockOptions(FlaxOptions, total=False):
    """`FlaxOptions`, and the arguments that both of Flax's own functions take after `mask`."""

    broadcast_dropout: bool
    dropout_rng: jax.Array | None
    dropout_rate: float
    deterministic: bool
    dtype: Dtype | None
    precision: PrecisionLike
    module: Any


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
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    broadcast_dropout: bool,
    dropout_rng: jax.Array | None,
    dropout_rate: float,
    deterministic: bool,
    precision: PrecisionLike,
    **options: Any,
) -> jax.Array:
    """Call `jax_flash.dot_product_attention` with Flax's leading dimensions, masks and dropout arguments.

    Args:
      query, key, value: arrays [..., T, N, D], [..., S, K, D] and [..., S, K, E] of one float dtype. K divides N.
      bias, mask: arrays that broadcast to [..., N, T, S]. A mask has any dtype, and nonzero means may attend.
      options: `FlaxOptions`.

    Returns:
      Array [..., T, N, E] in the dtype of the query.
    """
    if not query.ndim == key.ndim == value.ndim >= 3 or not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            "query, key and value must be [..., length, heads, head dim] with equal leading dimensions, not shapes "
            f"{query.shape}, {key.shape}, {value.shape}"
        )
    drop_threshold = dropout.threshold(dropout_rate)
    if checks.flag("deterministic", deterministic) or not drop_threshold:
        dropout_rate, dropout_rng = 0.0, None
    elif dropout_rng is None:
        raise ValueError(
            f"dropout_rate={dropout_rate} with deterministic=False needs `dropout_rng`: pass a JAX PRNG key"
        )

    leading = query.shape[:-3]
    query, key, value = (x.reshape(math.prod(leading), *x.shape[-3:]) for x in (query, key, value))
    options = arguments.complete(options, FlaxOptions)
    for name, dims in PER_EXAMPLE.items():
        if options[name] is not None:
            options[name] = _fold(name, checks.integers(name, options[name]), leading, dims, whole=True)
    reproducible = checks.flag("reproducible_gradients", options.pop("reproducible_gradients"))
    out = attention.dot_product_attention(
        query,
        key,
        value,
        None if bias is None else _fold("bias", checks.array("bias", bias), leading, 3, whole=False),
        None if mask is None else _fold("mask", checks.array("mask", mask), leading, 3, whole=False).astype(bool),
        dropout_rate=dropout_rate,
        dropout_key=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        deterministic=reproducible,
        **options,
    )
    return out.reshape(*leading, *query.shape[1:3], value.shape[-1])


def attend_as(stock: Callable[..., Any], where: str, args: tuple[Any, ...], given: Mapping[str, Any]) -> jax.Array:
    """Call `attend` with the arguments of Flax's own function `stock` and with `FlaxOptions`."""
    signature = _signature(stock)
    own = FlaxOptions.__annotations__.keys() - signature.parameters.keys()
    options = {name: x for name, x in given.items() if name in own}
    call = signature.bind(*args, **{name: x for name, x in given.items() if name not in own})
    call.apply_defaults()
    left = call.arguments
    promote, dtype = left.pop("promote_dtype", promote_dtype), left.pop("dtype")
    inputs = tuple(checks.array(name, left.pop(name)) for name in ("query", "key", "value"))
    query, key, value = promote(inputs, dtype=dtype)
    left.pop("force_fp32_for_softmax", None)  # the softmax is always in at least float32
    taken = {name: left.pop(name) for name in left.keys() & _TAKEN}
    refuse(where, **left)
    return attend(query, key, value, **taken, **options)


_signature = functools.cache(inspect.signature)
_TAKEN = inspect.signature(attend).parameters.keys() | FlaxOptions.__annotations__.keys()


def attend_in(
    module: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    *,
    sinks: jax.Array | None,
    deterministic: bool | None,
    dropout_rng: jax.Array | None,
    make_rng: Callable[[str], jax.Array],
    cached: jax.Array | None,
    options: Mapping[str, Any],
) -> jax.Array:
    """Attend as a module does between its projections.

    Args:
      module: the module, which has `Attributes` and the stock attributes.
      sinks: the module's parameter; None if the module has no sinks.
      make_rng: a function that returns a key of the named stream. It is called if a key is needed and `dropout_rng` is
        None.
      cached: int32 scalar, the number of keys in the cache before this call; None if the call does not decode.
      options: `FlaxOptions` of the call. They override the module's attributes unless None.
    """
    chosen = _chosen(module, sinks, options)
    if cached is not None:
        if chosen["query_offset"] is not None:
            raise ValueError(
                "query_offset must not be given when decoding: leave it out, because the cache counts its tokens"
            )
        if chosen["sequence_axis"] is not None:
            raise ValueError(
                "sequence_axis must not be given when decoding: leave it out, because each device has its own cache"
            )
        if mask is not None and np.ndim(mask) and np.shape(mask)[-1] not in (1, key.shape[-3]):
            raise ValueError(
                f"mask has shape {np.shape(mask)}, but when decoding its last dimension must be the {key.shape[-3]} "
                "tokens of the cache: leave out a causal mask, because decoding is always causal"
            )
        chosen |= {"is_causal": True, "query_offset": cached}
    deterministic = False if deterministic is None else checks.flag("deterministic", deterministic)
    if dropout.threshold(module.dropout_rate) and not deterministic and dropout_rng is None:
        dropout_rng = make_rng("dropout")
    query, key, value = promote_dtype((query, key, value), dtype=module.dtype)
    return attend(
        query,
        key,
        value,
        mask=mask,
        broadcast_dropout=module.broadcast_dropout,
        dropout_rng=dropout_rng,
        dropout_rate=module.dropout_rate,
        deterministic=deterministic,
        precision=module.precision,
        **chosen,
    )


def attend_in_pages(
    module: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    pages: tuple[jax.Array, jax.Array],
    page_table: ArrayLike | None,
    lengths: ArrayLike | None,
    *,
    sinks: jax.Array | None,
    deterministic: bool | None,
    options: Mapping[str, Any],
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Write the new keys and values to a paged cache, and attend to the cache in its dtype.

    Args:
      query, key, value: arrays [B, T, N, D], [B, T, K, D] and [B, T, K, D] for the last T tokens of each sequence.
      mask: must be None. Options that `paged_attention` lacks must be unset as well.
      pages: the pages of keys and the pages of values.
      page_table, lengths: as in `paged_attention`.
      options: `FlaxOptions` of the call. They override the module's attributes unless None.

    Returns:
      Array [B, T, N, D] in the module's dtype, and the updated pages.
    """
    if page_table is None or lengths is None:
        raise ValueError("a paged cache needs page_table and lengths: pass both in the call")
    chosen = _chosen(module, sinks, options)
    taken = {name: chosen.pop(name) for name in PagedOptions.__annotations__.keys() & chosen.keys()}
    for name, x in {"mask": mask, **chosen}.items():
        if x is not None and name not in ("is_causal", "reproducible_gradients"):
            raise ValueError(f"{name} must not be given with a paged cache, which does not support it: leave it out")
    if dropout.threshold(module.dropout_rate) and not deterministic:
        raise ValueError("a paged cache does not support dropout: call with deterministic=True")
    _check_as_many(query, key)
    (query,) = promote_dtype((query,), dtype=module.dtype)
    pages = append_to_pages(*pages, key, value, page_table, lengths)
    x = paged_attention(query.astype(pages[0].dtype), *pages, page_table, lengths, precision=module.precision, **taken)
    return x.astype(query.dtype), pages


def _chosen(module: Any, sinks: jax.Array | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all of `FlaxOptions`: the call's options, else the module's attributes, and the module's sinks."""
    shared = Attributes.__annotations__.keys() & FlaxOptions.__annotations__.keys()
    attributes = {name: getattr(module, name) for name in shared if options.get(name) is None}
    chosen = arguments.complete({**options, **attributes}, FlaxOptions)
    if sinks is not None:
        if chosen["sinks"] is not None:
            raise ValueError(
                "sinks must not be given with use_sinks=True: leave it out, because the module has its own parameter"
            )
        chosen["sinks"] = sinks
    return chosen


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
    return _written(cached_key, key, index), _written(cached_value, value, index), index + key.shape[-3]


def _check_as_many(query: jax.Array, key: jax.Array) -> None:
    if query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"decoding takes as many queries as keys, but queries have shape {query.shape} and keys {key.shape}: "
            "pass the same new tokens for both"
        )


def _written(cache: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    expected = (*cache.shape[:-3], new.shape[-3], *cache.shape[-2:])
    if new.shape != expected or new.shape[-3] > cache.shape[-3]:
        raise ValueError(
            f"keys and values must have shape {(*cache.shape[:-3], 'T', *cache.shape[-2:])} with "
            f"T <= {cache.shape[-3]} to fit the cache of shape {cache.shape}, not {new.shape}"
        )
    return lax.dynamic_update_slice_in_dim(cache, new.astype(cache.dtype), index, axis=-3)


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
