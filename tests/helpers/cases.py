"""An attention problem as a test case: the arguments of the public functions, and ways to run them.

Letters: B batch, T query length, S key/value length, N query heads, K key/value heads, D query/key dim, E value dim.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import BlockMask, dropout
from jax_flash.description import Extent
from jax_flash.masks import Mask, WindowSize
from jax_flash.operands import Operands
from jax_flash.problem import Problem
from jax_flash.scores import Score

Arrays = dict[str, Any]  # NumPy arrays, and possibly a BlockMask of NumPy arrays
DIFFERENTIATED = ("query", "key", "value", "bias", "sinks")
EXPORT_CHECKS = jax_flash.export_checks()


@dataclasses.dataclass(frozen=True)
class Case:
    B: int = 2
    T: int = 37
    S: int = 45
    N: int = 4
    K: int = 2
    D: int = 16
    E: int = 16

    causal: bool = False
    window: tuple[int, int] | None = None
    traced: bool = False  # whether the window is traced
    bias: str = ""  # its dims, "bnts", with a 1 for each broadcast dim
    mask: str = ""
    sinks: float = 0.0  # standard deviation of the sinks; 0 means no sinks
    lengths: bool = False
    segments: bool | str = False  # "mixed": the ids are in any order
    offset: bool = False
    soft_cap: float | None = None
    dropout: float = 0.0
    broadcast_dropout: bool = False
    scale: float | None = None
    spread: float = 1.0  # standard deviation of query and key: a large one makes the softmax nearly one-hot
    logsumexp: bool = True  # whether the logsumexp gets a cotangent
    deterministic: bool = False
    block_mask: BlockMask | None = None

    def __str__(self) -> str:
        changed = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        }
        text = "-".join(name if x is True else f"{name}={x}" for name, x in changed.items())
        return text.replace(" ", "") or "plain"

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that are not arrays."""
        return {
            "scale": self.scale,
            "is_causal": self.causal,
            **({} if self.traced else {"local_window_size": self.window}),
            "logits_soft_cap": self.soft_cap,
            "dropout_rate": self.dropout,
            "broadcast_dropout": self.broadcast_dropout,
            "deterministic": self.deterministic,
        }

    def traced_window(self) -> Arrays:
        """Return the window as an argument, if it is traced."""
        if self.window is None or not self.traced:
            return {}
        return {"local_window_size": tuple(np.asarray(x, np.int32) for x in self.window)}

    def shape(self, extent: str) -> tuple[int, ...]:
        return tuple(1 if e == "1" else size for e, size in zip(extent, (self.B, self.N, self.T, self.S), strict=True))

    def arrays(self, dtype: str = "float32", seed: int = 0) -> Arrays:
        """Return the arguments that are arrays. They are equal in every dtype, up to rounding."""
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> np.ndarray:
            return np.asarray(rng.normal(size=shape)).astype(jnp.dtype(dtype))

        B, T, S, N, K, D, E = self.B, self.T, self.S, self.N, self.K, self.D, self.E
        spread = np.asarray(self.spread, jnp.dtype(dtype))
        arrays = {
            "query": normal(B, T, N, D) * spread,
            "key": normal(B, S, K, D) * spread,
            "value": normal(B, S, K, E),
        }
        if self.bias:
            arrays["bias"] = normal(*self.shape(self.bias))
        if self.mask:
            arrays["mask"] = rng.random(self.shape(self.mask)) < 0.7
        if self.lengths:
            arrays["query_seq_lengths"] = rng.integers(0, T + 1, B).astype(np.int32)
            arrays["key_value_seq_lengths"] = rng.integers(0, S + 1, B).astype(np.int32)
        if self.segments == "mixed":
            some = np.array([-(2**31), 0, 5, 2**31 - 1], np.int32)
            for name, size in (("query_segment_ids", T), ("key_value_segment_ids", S)):
                runs = np.cumsum(rng.random((B, size)) < 0.02, axis=1)
                arrays[name] = rng.choice(some, size + 1)[runs]
        elif self.segments:
            arrays["query_segment_ids"] = np.sort(rng.integers(0, 4, (B, T)).astype(np.int32))
            arrays["key_value_segment_ids"] = np.sort(rng.integers(0, 3, (B, S)).astype(np.int32))
        if self.offset:
            arrays["query_offset"] = rng.integers(-T // 2, S, B).astype(np.int32)
        if self.sinks:
            arrays["sinks"] = normal(N) * np.asarray(self.sinks, jnp.dtype(dtype))
        if self.dropout:
            arrays["dropout_key"] = np.asarray(jax.random.PRNGKey(seed + 1))
        if self.block_mask is not None:
            arrays["block_mask"] = self.block_mask
        return arrays | self.traced_window()

    def cotangents(self, dtype: str = "float32", seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return the cotangents of O, [B, T, N, E], and of the logsumexp, [B, N, T]."""
        rng = np.random.default_rng((seed, 1))
        do = np.asarray(rng.normal(size=(self.B, self.T, self.N, self.E))).astype(jnp.dtype(dtype))
        dlogsumexp = rng.normal(size=(self.B, self.N, self.T)) * self.logsumexp
        return do, dlogsumexp.astype(np.float64 if dtype == "float64" else np.float32)


# Every feature alone, and combinations in which one feature could break another.
FEATURES = [
    Case(),
    Case(K=4),
    Case(K=1),
    Case(E=24),
    Case(N=6, K=2, D=40, E=8),
    Case(T=1),
    Case(S=1),
    Case(scale=0.7),
    Case(spread=4.0),
    Case(logsumexp=False),
    Case(causal=True),
    Case(causal=True, T=60, S=30, logsumexp=False),
    Case(causal=True, T=30, S=60),
    Case(window=(5, 9)),
    Case(window=(0, 0)),
    Case(window=(7, 0), causal=True, logsumexp=False),
    Case(window=(2**40, 3)),
    Case(window=(5, 2**31 - 1), traced=True),
    Case(window=(9, 4), traced=True, causal=True, lengths=True, offset=True, sinks=2.0, dropout=0.2),
    Case(window=(9, 4), traced=True, offset=True, mask="b1ts", bias="1nts", segments=True),
    Case(bias="bnts"),
    Case(bias="1nts", logsumexp=False),
    Case(bias="bn1s"),
    Case(bias="b1t1"),
    Case(bias="1111"),
    Case(mask="bnts"),
    Case(mask="b1ts"),
    Case(mask="1n1s"),
    Case(mask="11t1"),
    Case(sinks=2.0),
    Case(sinks=30.0, causal=True, offset=True, logsumexp=False),
    Case(sinks=2.0, bias="1nts", lengths=True, dropout=0.2, K=1, deterministic=True),
    Case(lengths=True),
    Case(segments=True),
    Case(segments=True, causal=True, logsumexp=False),
    Case(offset=True),
    Case(offset=True, causal=True),
    Case(offset=True, window=(6, 2)),
    Case(soft_cap=0.7),
    Case(soft_cap=2.0, bias="1n1s", mask="bnts"),
    Case(dropout=0.3),
    Case(dropout=0.5, broadcast_dropout=True),
    Case(deterministic=True, causal=True, bias="1nts", K=1),
    Case(dropout=0.1, causal=True, bias="1nts", K=1, logsumexp=False),
    Case(causal=True, window=(9, 4), bias="b1ts", mask="bn1s", lengths=True, offset=True, soft_cap=1.5, dropout=0.2),
    Case(N=1, K=1, sinks=1.0, window=(9, 9), bias="111s", mask="b111", segments=True, dropout=0.7, E=5, spread=3.0),
]

# Lengths around the tile sizes.
SIZES = [1, 2, 15, 16, 17, 31, 33, 47, 63, 64, 65, 127, 128, 129, 191, 255, 257, 384]


def upcast(x: Any) -> Any:
    """Return floating-point arrays in float64 and all others unchanged, for the exact result."""

    def cast(leaf: np.ndarray) -> np.ndarray:
        return leaf.astype(np.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, x)


Results = dict[str, np.ndarray]
Attention = Callable[[dict[str, jax.Array]], tuple[jax.Array, jax.Array]]


def with_gradients(attention: Attention, arrays: Any, cotangents: Any, logsumexp: bool = True) -> dict[str, jax.Array]:
    """Return o, logsumexp, and the gradients of all float arrays by name."""
    inputs = {name: arrays[name] for name in DIFFERENTIATED if name in arrays}
    others = {name: x for name, x in arrays.items() if name not in inputs}
    (o, lse), pull = jax.vjp(lambda inputs: attention(inputs | others), inputs)
    if logsumexp:
        (gradients,) = pull((cotangents[0].astype(o.dtype), cotangents[1].astype(lse.dtype)))
    else:
        _, pull = jax.vjp(lambda inputs: attention(inputs | others)[0], inputs)
        (gradients,) = pull(cotangents[0].astype(o.dtype))
    return {"o": o, "logsumexp": lse} | gradients


def problem(case: Case, arrays: Arrays) -> tuple[Problem, Operands]:
    """Return the `Problem` and `Operands` of a case. All gradients are enabled."""
    given = {name: jnp.asarray(x) for name, x in arrays.items() if name in Operands._fields}
    B, N = case.B, case.N
    scale = case.scale if case.scale is not None else max(case.D, 1) ** -0.5
    given["scale"] = np.asarray(scale, "float64" if arrays["query"].dtype == "float64" else "float32")
    if case.sinks:
        given["sinks"] = arrays["sinks"].astype(given["scale"].dtype)[None, :, None, None]
    if case.dropout:
        given["seed"] = dropout.seed_from_key(arrays["dropout_key"], B)
        given["batch_id"] = jnp.arange(B, dtype=jnp.uint32) * (not case.broadcast_dropout)
        given["head_id"] = jnp.arange(N, dtype=jnp.uint32) * (not case.broadcast_dropout)
    if case.block_mask is not None:
        given |= {name: jnp.asarray(x) for name, x in case.block_mask.arrays().items()}
    described = Problem(
        batch=B,
        q_len=case.T,
        kv_len=case.S,
        q_heads=N,
        kv_heads=case.K,
        qk_dim=case.D,
        v_dim=case.E,
        dtype=arrays["query"].dtype.name,
        mask=Mask(
            is_causal=case.causal,
            local_window_size=WindowSize(*(case.window or ())),
            query_seq_lengths=case.lengths,
            key_value_seq_lengths=case.lengths,
            segment_ids=bool(case.segments),
            query_offset=case.offset,
            array=Extent(*(e != "1" for e in case.mask)) if case.mask else None,
        ),
        score=Score(
            logits_soft_cap=case.soft_cap or 0.0,
            bias=Extent(*(e != "1" for e in case.bias)) if case.bias else None,
            bias_dtype=arrays["bias"].dtype.name if case.bias else "none",
        ),
        sinks=Extent.of(given["sinks"]) if case.sinks else None,
        drop_threshold=dropout.threshold(case.dropout),
        deterministic=case.deterministic,
        dlogsumexp=True,
        requested=("dq", "dk", "dv", *["dbias"] * bool(case.bias), *["dsinks"] * bool(case.sinks)),
    )
    if case.block_mask is not None:
        shape = case.block_mask.shape
        blocks = Mask.of_blocks(given, shape.q_block, shape.kv_block)
        described = dataclasses.replace(described, mask=described.mask & blocks)
    return described, Operands(**given)


def refusal(case: Case, arrays: Arrays) -> str:
    """Return why the test device's kernels do not support a case; empty if they do. The CPU kernels support all."""
    device = jax.config.jax_default_device
    platform = "cuda" if device is not None and device.platform == "gpu" else "cpu"
    if platform == "cpu" and not os.environ.get("JAX_FLASH_EMULATE"):
        return ""
    choice = jax_flash.choose_implementation(problem(case, arrays)[0], platform)
    return choice.reason if choice.implementation != "flash" else ""


@functools.cache
def _compiled(case: Case, implementation: str | None) -> Callable[..., dict[str, jax.Array]]:
    def attention(arrays):
        o, statistics = jax_flash.attention_with_statistics(**arrays, **case.options, implementation=implementation)
        return o, statistics.logsumexp

    return jax.jit(functools.partial(with_gradients, attention, logsumexp=case.logsumexp))


def run(case: Case, arrays: Arrays, cotangents: Any, implementation: str | None = "flash") -> Results:
    """Run jax_flash, jitted, forward and backward. Skip if the device's fused kernels do not support the case."""
    if implementation == "flash" and (reason := refusal(case, arrays)):
        pytest.skip(reason)
    with jax.enable_x64(any(x.dtype == np.float64 for x in jax.tree.leaves(arrays))):
        return jax.tree.map(np.asarray, _compiled(case, implementation)(arrays, cotangents))


def data_collectives(compiled: Any) -> list[str]:
    """Return the collectives of a compiled program that move operands between devices. All-reduces are allowed."""
    return re.findall(r"\b(all-gather|all-to-all|collective-permute|all-gather-start)\(", compiled.as_text())


def differentiable(
    case: Case, implementation: str | None, seed: int = 0
) -> tuple[Callable[..., tuple[jax.Array, jax.Array]], list[jax.Array]]:
    """Return a function from differentiable inputs to O and the logsumexp (0 for empty rows), and float64 inputs."""
    arrays = case.arrays("float64", seed)
    names = [name for name in DIFFERENTIATED if name in arrays]
    inputs = [jnp.asarray(arrays.pop(name)) for name in names]

    @jax.jit
    def attention(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        named: dict[str, Any] = dict(zip(names, inputs, strict=True))
        o, statistics = jax_flash.attention_with_statistics(
            **named, **arrays, **case.options, implementation=implementation
        )
        return o, jnp.where(statistics.l == 0, 0, statistics.logsumexp)

    return attention, inputs
