"""Flax linen and nnx behind one interface, for tests of what `jax_flash.linen` and `jax_flash.nnx` share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from flax import nnx

import jax_flash.linen
import jax_flash.nnx

BATCH, LENGTH, FEATURES, HEADS = 2, 12, 32, 4  # the CUDA kernels require head dims that are multiples of 8


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


INPUTS = normal(0, BATCH, LENGTH, FEATURES)


class Layer(NamedTuple):
    """An attention module as a function of its parameters, which are nested dicts of arrays, equal in both APIs."""

    params: dict[str, Any]
    cache: dict[str, Any] | None  # sized for the inputs, if the layer decodes
    run: Callable[..., tuple[jax.Array, Any]]  # run(params, *inputs, cache, stream, **options): output, cache

    def __call__(self, *inputs, params=None, **options) -> jax.Array:
        """Return the output of a jitted call, by default with the layer's own parameters."""
        call = jax.jit(lambda params, inputs: self.run(params, *inputs, **options)[0])
        return call(self.params if params is None else params, inputs)


@functools.partial(jax.jit, static_argnums=0, static_argnames="deterministic")
def _init(module: nn.Module, *inputs, deterministic):
    return module.init(jax.random.key(1), *inputs, deterministic=deterministic)


class Linen:
    function, stock_function = jax_flash.linen.dot_product_attention, nn.dot_product_attention
    fused, stock = jax_flash.linen.MultiHeadAttention, nn.MultiHeadDotProductAttention

    @staticmethod
    def layer(kind, *inputs, **options) -> Layer:
        """Make a module of class `kind`, for arrays like `inputs` (default: INPUTS)."""
        module = kind(**{"num_heads": HEADS} | options)
        deterministic = None if "deterministic" in options else True
        variables = _init(module, *(inputs or (INPUTS,)), deterministic=deterministic)

        def run(params, *inputs, cache=None, stream=None, **options):
            variables = {"params": params} if cache is None else {"params": params, "cache": cache}
            rngs = None if stream is None else {"dropout": stream}
            output, updated = module.apply(variables, *inputs, rngs=rngs, mutable=["cache"], **options)
            return output, updated.get("cache")

        return Layer(variables["params"], variables.get("cache"), run)


class Nnx:
    function, stock_function = jax_flash.nnx.dot_product_attention, nnx.dot_product_attention
    fused, stock = jax_flash.nnx.MultiHeadAttention, nnx.MultiHeadAttention

    @staticmethod
    def layer(kind, *inputs, decode=False, **options) -> Layer:
        """Make a module of class `kind`, for arrays like `inputs` (default: INPUTS)."""
        inputs = inputs or (INPUTS,)
        sizes = {"num_heads": HEADS, "in_features": inputs[0].shape[-1], "in_kv_features": inputs[-1].shape[-1]}
        module = kind(**sizes | options, decode=decode, rngs=nnx.Rngs(1))
        if decode:
            module.init_cache(inputs[0].shape)
        graph, *states, rest = nnx.split(module, nnx.Param, nnx.Cache, ...)
        params, empty = map(nnx.to_pure_dict, states)

        def run(params, *inputs, cache=None, stream=None, **options):
            called = nnx.merge(graph, params, empty if cache is None else cache, rest)
            rngs = None if stream is None else nnx.Rngs(dropout=stream)
            output = called(*inputs, rngs=rngs, **options)
            return output, nnx.to_pure_dict(nnx.state(called, nnx.Cache))

        return Layer(params, empty or None, run)
