"""What the linen and nnx halves share: Flax's [..., T, N, D] arrays to and from `jax_flash.dot_product_attention`."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_flash import arguments, attention


def refuse(where: str, **arguments: Any) -> None:
    """Raises NotImplementedError naming the first argument that is set: a fused kernel has no place for any of them."""
    for name, value in arguments.items():
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
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    query_offset: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """`jax_flash.dot_product_attention` for any number of leading dimensions and Flax's masks and dropout arguments.

    Args:
      query: [..., T, N, D]; key: [..., S, K, D]; value: [..., S, K, E], of one float dtype; N a multiple of K.
      bias, mask: broadcastable to [..., N, T, S]; a mask of any dtype, nonzero where a query may attend.
      query_offset: int32 scalar, the position of the first query along the keys.
      options: passed on.

    Returns:
      [..., T, N, E], in the dtype of the query.
    """
    if not query.ndim == key.ndim == value.ndim >= 3 or not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            "query, key and value must be [..., length, heads, dim] with the same leading dimensions, got shapes "
            f"{query.shape}, {key.shape}, {value.shape}"
        )
    if arguments.flag("deterministic", deterministic) or dropout_rate == 0.0:
        dropout_rate, dropout_rng = 0.0, None
    elif dropout_rng is None:
        raise ValueError(f"dropout_rate={dropout_rate} with deterministic=False needs a `dropout_rng`")

    leading = query.shape[:-3]
    batch = math.prod(leading)
    query, key, value = (x.reshape(batch, *x.shape[-3:]) for x in (query, key, value))
    out = attention.dot_product_attention(
        query,
        key,
        value,
        bias=None if bias is None else _fold(bias, leading, "bias"),
        mask=None if mask is None else _fold(mask, leading, "mask").astype(bool),
        dropout_rate=dropout_rate,
        dropout_key=dropout_rng,
        query_offset=None if query_offset is None else jnp.broadcast_to(query_offset, (batch,)),
        **options,
    )
    return out.reshape(*leading, *query.shape[1:3], value.shape[-1])


def key_and_value_inputs(
    inputs_q: jax.Array, inputs_k: jax.Array | None, inputs_v: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Each by default the one before it. Raises ValueError if only the last is given."""
    if inputs_k is None:
        if inputs_v is not None:
            raise ValueError("inputs_v is given and inputs_k is not: pass inputs_k (inputs_v then defaults to it)")
        inputs_k = inputs_q
    return inputs_k, inputs_k if inputs_v is None else inputs_v


def append(cache: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    """The cache [..., max_length, K, D] with new [..., T, K, D] written at positions index to index + T - 1.

    As in Flax, the caller sees to it that index + T <= max_length: beyond that the last positions are overwritten.
    """
    expected = (*cache.shape[:-3], new.shape[-3], *cache.shape[-2:])
    if new.shape != expected or new.shape[-3] > cache.shape[-3]:
        raise ValueError(
            f"Autoregressive cache shape error: the cache {cache.shape} takes keys and values of shape "
            f"{(*cache.shape[:-3], 'T', *cache.shape[-2:])} with T <= {cache.shape[-3]}, got {new.shape}"
        )
    return lax.dynamic_update_slice_in_dim(cache, new.astype(cache.dtype), index, axis=-3)


def _fold(x: jax.Array, leading: tuple[int, ...], name: str) -> jax.Array:
    """Broadcastable to [*leading, N, T, S] -> [prod(leading) or 1, N|1, T|1, S|1]."""
    x, rank = arguments.array(name, x), len(leading) + 3
    if x.ndim > rank:
        raise ValueError(f"{name} must be broadcastable to [..., heads, q_length, kv_length], got shape {x.shape}")
    x = x.reshape((1,) * (rank - x.ndim) + x.shape)
    if math.prod(x.shape[:-3]) != 1:
        x = jnp.broadcast_to(x, (*leading, *x.shape[-3:]))
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
