"""What the linen and nnx halves share: Flax's [..., T, N, D] arrays to and from `jax_flash.dot_product_attention`."""

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


class FlaxOptions(SharedOptions, total=False):
    """The options of `jax_flash.dot_product_attention` that Flax has no names of its own for, and one that it has.

    An array with a batch dim there has the leading dims [...] of the query here, or dims that broadcast to them.
    """

    reproducible_gradients: bool  # `deterministic` there, which in Flax means: no dropout


class StockOptions(FlaxOptions, total=False):
    """With the arguments that both of Flax's own functions take after `mask`."""

    broadcast_dropout: bool
    dropout_rng: jax.Array | None
    dropout_rate: float
    deterministic: bool
    dtype: Dtype | None
    precision: PrecisionLike
    module: Any


@dataclasses.dataclass(kw_only=True, eq=False)
class Attributes:
    """The attributes that both modules have beside those of the stock ones; a call's options of the same names go
    before them."""

    is_causal: bool = False
    local_window_size: int | tuple[int, int] | None = None
    logits_soft_cap: float | None = None
    implementation: Implementation | None = None
    reproducible_gradients: bool = False
    use_sinks: bool = False


def refuse(where: str, **given: Any) -> None:
    """Raises NotImplementedError naming the first argument that is set: a fused kernel has no place for any of them."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(
                f"{where} does not support `{name}`: its attention is one fused kernel, with no matrix of weights to "
                "sow and no einsum to replace. Use Flax's own attention where that is needed."
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
    """`jax_flash.dot_product_attention` for any number of leading dimensions and Flax's masks and dropout arguments.

    Args:
      query: [..., T, N, D]; key: [..., S, K, D]; value: [..., S, K, E], of one float dtype; N a multiple of K.
      bias, mask: broadcastable to [..., N, T, S]; a mask of any dtype, nonzero where a query may attend.
      options: `FlaxOptions`.

    Returns:
      [..., T, N, E], in the dtype of the query.
    """
    if not query.ndim == key.ndim == value.ndim >= 3 or not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            "query, key and value must be [..., length, heads, dim] with the same leading dimensions, got shapes "
            f"{query.shape}, {key.shape}, {value.shape}"
        )
    drop_threshold = dropout.threshold(dropout_rate)
    if checks.flag("deterministic", deterministic) or not drop_threshold:
        dropout_rate, dropout_rng = 0.0, None
    elif dropout_rng is None:
        raise ValueError(f"dropout_rate={dropout_rate} with deterministic=False needs a `dropout_rng`")

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
    """`attend` with the arguments of Flax's own function `stock`, and `FlaxOptions` beside them."""
    signature = _signature(stock)
    own = FlaxOptions.__annotations__.keys() - signature.parameters.keys()
    options = {name: x for name, x in given.items() if name in own}
    call = signature.bind(*args, **{name: x for name, x in given.items() if name not in own})
    call.apply_defaults()
    left = call.arguments
    promote, dtype = left.pop("promote_dtype", promote_dtype), left.pop("dtype")
    inputs = tuple(checks.array(name, left.pop(name)) for name in ("query", "key", "value"))
    query, key, value = promote(inputs, dtype=dtype)
    left.pop("force_fp32_for_softmax", None)  # it always is
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
    """What either module does between its projections.

    Args:
      module: it has `Attributes` and those of the stock modules.
      sinks: its parameter; None where it has none.
      make_rng: a key of the stream with this name, if one is needed and there is no `dropout_rng`.
      cached: int32 scalar, the keys that were in the cache before; None where nothing is decoded.
      options: `FlaxOptions` of the call, before the module's attributes unless None.
    """
    chosen = _chosen(module, sinks, options)
    if cached is not None:
        if chosen["query_offset"] is not None:
            raise ValueError("query_offset must not be given when decoding: it is the number of tokens in the cache")
        if chosen["sequence_axis"] is not None:
            raise ValueError("sequence_axis must not be given when decoding: every device has a cache of its own")
        if mask is not None and np.ndim(mask) and np.shape(mask)[-1] not in (1, key.shape[-3]):
            raise ValueError(
                f"mask has shape {np.shape(mask)}, but when decoding its last dim is the {key.shape[-3]} tokens of the "
                "cache: leave out a causal mask, because decoding is causal by itself"
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
    """`attend_in` with a cache in pages: writes the new keys and values to them, and attends in their dtype.

    Args:
      query: [B, T, N, D]; key, value: [B, T, K, D], of the last T tokens of each sequence.
      mask: refused, as are options that pages do not go together with.
      pages: of keys and of values.
      page_table, lengths: as in `paged_attention`.
      options: `FlaxOptions` of the call, before the module's attributes unless None.

    Returns:
      [B, T, N, D] in the dtype that the module computes in, and the pages.
    """
    if page_table is None or lengths is None:
        raise ValueError("a cache in pages needs page_table and lengths in the call")
    chosen = _chosen(module, sinks, options)
    taken = {name: chosen.pop(name) for name in PagedOptions.__annotations__.keys() & chosen.keys()}
    for name, x in {"mask": mask, **chosen}.items():
        if x is not None and name not in ("is_causal", "reproducible_gradients"):
            raise ValueError(f"{name} must not be given with a cache in pages")
    if dropout.threshold(module.dropout_rate) and not deterministic:
        raise ValueError("a cache in pages has no dropout: call with deterministic=True")
    _check_as_many(query, key)
    (query,) = promote_dtype((query,), dtype=module.dtype)
    pages = append_to_pages(*pages, key, value, page_table, lengths)
    x = paged_attention(query.astype(pages[0].dtype), *pages, page_table, lengths, precision=module.precision, **taken)
    return x.astype(query.dtype), pages


def _chosen(module: Any, sinks: jax.Array | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """All of `FlaxOptions`: a call's options before the module's attributes, unless None, and its sinks."""
    shared = Attributes.__annotations__.keys() & FlaxOptions.__annotations__.keys()
    attributes = {name: getattr(module, name) for name in shared if options.get(name) is None}
    chosen = arguments.complete({**options, **attributes}, FlaxOptions)
    if sinks is not None:
        if chosen["sinks"] is not None:
            raise ValueError("sinks must not be given with use_sinks=True: they are a parameter of the module")
        chosen["sinks"] = sinks
    return chosen


def key_and_value_inputs(
    inputs_q: jax.Array, inputs_k: jax.Array | None, inputs_v: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Each by default the one before it. Raises ValueError if only the last is given."""
    if inputs_k is None:
        if inputs_v is not None:
            raise ValueError("inputs_v is given and inputs_k is not: pass inputs_k (inputs_v then defaults to it)")
        inputs_k = inputs_q
    return inputs_k, inputs_k if inputs_v is None else inputs_v


def append(
    cached_key: jax.Array, cached_value: jax.Array, index: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The caches [..., max_length, K, D] with new [..., T, K, D] written from position `index` on, and index + T.

    As in Flax, the caller sees to it that index + T <= max_length: beyond that the last positions are overwritten.
    """
    _check_as_many(query, key)
    return _written(cached_key, key, index), _written(cached_value, value, index), index + key.shape[-3]


def _check_as_many(query: jax.Array, key: jax.Array) -> None:
    if query.shape[-3] != key.shape[-3]:
        raise ValueError(f"decoding takes as many queries as keys, got {query.shape} and {key.shape}")


def _written(cache: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    expected = (*cache.shape[:-3], new.shape[-3], *cache.shape[-2:])
    if new.shape != expected or new.shape[-3] > cache.shape[-3]:
        raise ValueError(
            f"Autoregressive cache shape error: the cache {cache.shape} takes keys and values of shape "
            f"{(*cache.shape[:-3], 'T', *cache.shape[-2:])} with T <= {cache.shape[-3]}, got {new.shape}"
        )
    return lax.dynamic_update_slice_in_dim(cache, new.astype(cache.dtype), index, axis=-3)


def _fold(name: str, x: Any, leading: tuple[int, ...], dims: int, whole: bool) -> Any:
    """Broadcastable to [*leading, ...] with `dims` more -> [prod(leading), ...]; unless `whole` it may be [1, ...]."""
    shape = (1,) * (len(leading) + dims - x.ndim) + x.shape
    lead, rest = shape[: len(leading)], shape[len(leading) :]
    if len(rest) > dims or any(size not in (1, full) for size, full in zip(lead, leading, strict=True)):
        raise ValueError(
            f"{name} must be broadcastable to the leading dimensions {leading} and {dims} more, got shape {x.shape}"
        )
    x = x.reshape(shape)
    if whole or math.prod(lead) != 1:
        x = (np if isinstance(x, np.ndarray) else jnp).broadcast_to(x, (*leading, *rest))
    return x.reshape(math.prod(x.shape[: len(leading)]), *rest)
