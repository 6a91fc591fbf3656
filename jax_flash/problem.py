"""`Problem`: the static description of one attention call, without its arrays.

It is the Python twin of `common/problem.h`. Its text form is the only attribute of the custom calls.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash import _native, checks
from jax_flash.description import Description, Extent
from jax_flash.masks import Mask
from jax_flash.operands import (
    BROADCAST,
    CAPTURED,
    DCAPTURED,
    DIFFERENTIATED,
    DIMS,
    OUTSIDE_SCORES,
    SHARED_GRADIENTS,
    TANGENTS,
)
from jax_flash.programs.code import Unsupported
from jax_flash.programs.program import ALWAYS, SAME_SCORE, Captured, Program, Sizes
from jax_flash.scores import Score

# The functions that check a call and return its problem, by the method of `Problem` that calls them. Modules that check
# calls create problems, so they import this module and add their functions here (`arguments.creates_problems`).
CALL_CHECKS: dict[str, Callable[..., Problem]] = {}
MOVING = (*(name for name in TANGENTS if name not in CAPTURED), "scale")  # the arguments of calls with tangents


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False)
class Problem(Description):
    """The static description of one attention call: shapes, dtypes, masks and options, but no arrays.

    `jax_flash.explain` and `jax_flash.choose_implementation` take a problem. Create one with `of`, `of_varlen`,
    `of_paged`, `of_mla` or `of_paged_mla`.
    """

    batch: int  # B
    q_len: int  # T
    kv_len: int  # S
    q_heads: int  # N
    kv_heads: int  # K, divides N
    qk_dim: int  # D
    v_dim: int  # E
    dtype: str  # one of DTYPES

    sinks: Extent | None = None  # without rows and columns
    origin: bool = False  # for a part of a call: where dropout and programs count rows and keys from
    dropout_tiles: bool = False  # for a part of chunks: whether dropout takes tables of tiles instead

    page: int = 0  # number of keys in a page; 0: keys are not in pages
    pages: int = 0  # number of pages
    latent: bool = False  # forward only: the value is the start of the key, and kernels may read it there

    captured: tuple[Captured, ...] = ()  # the arrays that programs read
    drop_threshold: int = 0  # below 2^15: an entry is kept if its 15 random bits are at least the threshold
    full_precision: bool = False  # float32 only: no TF32
    deterministic: bool = False  # the backward gives the same bits in every run
    unrounded: bool = False  # O and dQ have the accumulation dtype: tangents and the scale's gradient need them so

    dlogsumexp: bool = False  # only in a backward: whether the array is present
    l_tangent: bool = False  # only in a tangent: whether it is a result, as the logsumexp needs it
    requested: tuple[str, ...] = ()  # only in a backward: the gradients, except of captured arrays; in order
    # Only in a tangent: the operands with tangents, in order. `captured` has the captured arrays, then their tangents.
    moving: tuple[str, ...] = ()

    mask: Mask = Mask()
    score: Score = Score()

    @classmethod
    def of(
        cls,
        query: ArrayLike | jax.ShapeDtypeStruct,
        key: ArrayLike | jax.ShapeDtypeStruct,
        value: ArrayLike | jax.ShapeDtypeStruct,
        bias: ArrayLike | jax.ShapeDtypeStruct | None = None,
        mask: ArrayLike | jax.ShapeDtypeStruct | None = None,
        **options: Any,
    ) -> Problem:
        """Return the problem of a call `jax_flash.dot_product_attention(query, key, value, bias, mask, **options)`::

            q = jax.ShapeDtypeStruct((2, 1024, 8, 64), "bfloat16")
            print(jax_flash.explain(Problem.of(q, q, q, is_causal=True, dropout_rate=0.1), backward=True))

        Nothing is computed. Each array may be a `jax.ShapeDtypeStruct`, including arrays in the options and the arrays
        of a `BlockMask`.

        Args:
          query: array [B, T, N, D] or [T, N, D], or its shape and dtype.
          key: array [B, S, K, D] or [S, K, D], or its shape and dtype.
          value: array [B, S, K, E] or [S, K, E], or its shape and dtype.
          bias: array broadcastable to [B, N, T, S], or its shape and dtype.
          mask: bool array broadcastable to [B, N, T, S], or its shape and dtype.
          options: the options of the call, under the names in `dot_product_attention`. Leave out `return_residual`,
            which does not change the problem. Dropout needs no key here.

        Raises:
          TypeError, ValueError, NotImplementedError: if the call would raise the error.
        """
        return _of_call("of", _with_key(options), query, key, value, bias, mask)

    @classmethod
    def of_varlen(
        cls,
        query: ArrayLike | jax.ShapeDtypeStruct,
        key: ArrayLike | jax.ShapeDtypeStruct,
        value: ArrayLike | jax.ShapeDtypeStruct,
        cu_seqlens_q: ArrayLike | jax.ShapeDtypeStruct,
        cu_seqlens_k: ArrayLike | jax.ShapeDtypeStruct | None = None,
        **options: Any,
    ) -> Problem:
        """Return the problem of a call `jax_flash.varlen_attention(query, …, **options)`. See `of`.

        It takes the options of `jax_flash.varlen_attention`.
        """
        return _of_call("of_varlen", _with_key(options), query, key, value, cu_seqlens_q, cu_seqlens_k)

    @classmethod
    def of_paged(
        cls,
        query: ArrayLike | jax.ShapeDtypeStruct,
        key_pages: ArrayLike | jax.ShapeDtypeStruct,
        value_pages: ArrayLike | jax.ShapeDtypeStruct,
        page_table: ArrayLike | jax.ShapeDtypeStruct,
        lengths: ArrayLike | jax.ShapeDtypeStruct,
        **options: Any,
    ) -> Problem:
        """Return the problem of a call `jax_flash.paged_attention(query, …, **options)`. See `of`.

        It takes the options of `jax_flash.paged_attention`.
        """
        return _of_call("of_paged", options, query, key_pages, value_pages, page_table, lengths)

    @classmethod
    def of_mla(
        cls,
        query: ArrayLike | jax.ShapeDtypeStruct,
        latent: ArrayLike | jax.ShapeDtypeStruct,
        value_dim: int = 512,
        **options: Any,
    ) -> Problem:
        """Return the problem of a call `jax_flash.mla_attention(query, latent, value_dim=value_dim, …)`. See `of`.

        The options are those of `jax_flash.mla_attention`. The scale may be left out.
        """
        return _of_call("of_mla", options, query, latent, value_dim)

    @classmethod
    def of_paged_mla(
        cls,
        query: ArrayLike | jax.ShapeDtypeStruct,
        latent_pages: ArrayLike | jax.ShapeDtypeStruct,
        page_table: ArrayLike | jax.ShapeDtypeStruct,
        lengths: ArrayLike | jax.ShapeDtypeStruct,
        value_dim: int = 512,
        **options: Any,
    ) -> Problem:
        """Return the problem of a call `jax_flash.paged_mla_attention(query, latent_pages, …)`. See `of`.

        The options are those of `jax_flash.paged_mla_attention`. The scale may be left out.
        """
        return _of_call("of_paged_mla", options, query, latent_pages, page_table, lengths, value_dim)

    def with_arrays(self, arrays: Mapping[str, jax.Array]) -> Problem:
        """Return this problem with the batch size, the numbers of heads and the extents of these operands."""
        extents: dict[str, Any] = {name: Extent.of(arrays[name]) if name in arrays else None for name in BROADCAST}
        bias, mask = extents.pop("bias"), extents.pop("mask")
        blocks = Extent.of_blocks(arrays["blocks"]) if "blocks" in arrays else None
        return dataclasses.replace(
            self,
            batch=arrays["query"].shape[0],
            q_heads=arrays["query"].shape[2],
            kv_heads=arrays["key_pages" if self.page else "key"].shape[2],
            mask=dataclasses.replace(self.mask, array=mask, block_mask=blocks),
            score=dataclasses.replace(self.score, bias=bias),
            captured=tuple(
                x._replace(batch=arrays[name].shape[0] != 1) for name, x in zip(CAPTURED, self.captured, strict=False)
            ),
            **extents,
        )

    def differentiated(self, results: Collection[str], **changes: Any) -> Problem:
        """Return the problem of the backward that computes these gradients, named as in `DIFFERENTIATED`."""
        requested = tuple(name for name in DIFFERENTIATED if name in results and name not in DCAPTURED)
        asked = zip(DCAPTURED, self.captured, strict=False)
        captured = tuple(x._replace(gradient=name in self.differentiable & {*results}) for name, x in asked)
        score_mod, score_grad = self.score.score_mod, None
        if score_mod is not None and not score_mod.refusal:
            score_grad = score_mod.gradient(captured, self.accumulation_dtype, self.sizes)
        score = dataclasses.replace(self.score, score_grad=score_grad)
        return dataclasses.replace(self, latent=False, captured=captured, score=score, requested=requested, **changes)

    def with_tangents(self, tangents: Sequence[str]) -> tuple[str, ...]:
        """Return the operands that have tangents if these arguments do. The scale's is a part of the query's.

        Raises:
          TypeError, ValueError: as in `explain`.
        """
        if isinstance(tangents, str):
            raise TypeError(f"tangents must be a sequence of names, not {tangents!r}")
        for name in tangents:
            if name not in MOVING:
                raise ValueError(f"tangents must be some of {', '.join(MOVING)}, not {checks.described(name)}")
            if name in BROADCAST and self.extents[name] is None:
                raise ValueError(f"tangents has {name!r}, but the problem has no {name}")
        if self.page:
            raise ValueError("paged attention is for inference and has no tangent: leave out tangents")
        return tuple(x for x in TANGENTS if x in tangents or (x == "query" and "scale" in tangents))

    def along(self, moving: Sequence[str]) -> Problem:
        """Return the problem of the tangent along the tangents of these operands.

        Args:
          moving: their names. A captured array must be in `scored`.

        Raises:
          Unsupported: if there is no code for the tangent of the score_mod. The message starts with its name.
        """
        own = [i for i, name in enumerate(CAPTURED[: len(self.captured)]) if name in moving]
        numbers = {i: len(self.captured) + k for k, i in enumerate(own)}
        captured = (*self.captured, *(self.captured[i] for i in own))
        if len(captured) > len(CAPTURED):
            raise Unsupported(f"score_mod captures more arrays than the {len(CAPTURED)} that fit with their tangents")
        score_mod, score_tangent = self.score.score_mod, None
        if score_mod is not None and not {*moving}.issubset(OUTSIDE_SCORES):
            score_tangent = score_mod.tangent(captured, numbers, self.accumulation_dtype, self.sizes)
        score = dataclasses.replace(self.score, score_tangent=score_tangent)
        operands = tuple(name for name in TANGENTS if name in moving and name not in CAPTURED)
        assert operands or score_tangent  # otherwise the problem is a forward's
        return dataclasses.replace(self, latent=False, captured=captured, score=score, moving=operands)

    @property
    def differentiable(self) -> set[str]:
        """The names of the gradients that the backward can compute. Paged attention has none."""
        if self.page:
            return set()
        floats = {name for name, x in zip(DCAPTURED, self.captured, strict=False) if "float" in x.dtype}
        absent = {name for name in BROADCAST if self.extents[name] is None}
        return {name for name, operand in DIFFERENTIATED.items() if operand not in (*CAPTURED, *absent)} | floats

    @property
    def gradients(self) -> tuple[str, ...]:
        """The names of the requested gradients, in order."""
        captured = [name for name, x in zip(DCAPTURED, self.captured, strict=False) if x.gradient]
        return (*self.requested, *captured)

    def flops(self, backward: bool = False, tangents: Sequence[str] = ()) -> int:
        """Return the floating point operations of one pass, counted as model FLOPs (the convention of the papers).

        The forward has 2 · (D + E) operations for each pair of a query and a key that may attend, and for each query
        head. The backward has 2 · (3 D + 2 E), including 2 · D to recompute the scores. The tangent pass of forward
        mode has as many if query, key and value have tangents. It needs fewer products if only some of them do.

        Only `is_causal`, a `local_window_size` of Python ints, and a `mask_mod` that equals one of these reduce the
        count. A problem does not contain the values of arrays. So it ignores masks that are arrays or other functions,
        lengths, segment ids, and traced windows. The result is then an upper bound.

        All pairs count, even if `is_causal` is set, with a `query_offset`, in `varlen_attention` and `paged_attention`,
        and with a traced window. But if the traced window becomes a `mask_mod`, `is_causal` and a side that is an int
        still reduce the count. `docs/guides/mfu.md` shows how to use it.

        Args:
          backward: whether to count the backward alone instead of the forward.
          tangents: the arguments that have a tangent, as in `explain`. With them, the tangent pass alone is counted.

        Raises:
          TypeError: if an argument has a wrong type.
          ValueError: if a size is symbolic, if `tangents` has a wrong name or is given with `backward`, or for a
            derivative of paged attention, which does not exist.
        """
        self._check_cost("flops", backward)
        if backward and tangents:
            raise ValueError("tangents are of the forward: leave out backward=True")
        by_d, by_e = (3, 2) if backward else (1, 1)  # the products S, dQ, dK over D, and O or dP, dV over E
        if tangents:
            moving = self.with_tangents(tangents)
            by_d += ("query" in moving) + ("key" in moving)
            by_e = ("value" in moving) + (not {*moving}.issubset(OUTSIDE_SCORES))
        each = 2 * int(self.mask.count(self.q_len, self.kv_len)) * (by_d * self.qk_dim + by_e * self.v_dim)
        return self.batch * self.q_heads * each

    def bytes(self, backward: bool = False) -> int:
        """Return the bytes of the operands and results of one pass, each counted once.

        This is a lower bound of the memory traffic.

        Args:
          backward: whether to count the backward alone instead of the forward. It computes the gradients that the
            problem requests, or by default those for query, key and value.

        Raises:
          TypeError, ValueError: as in `flops`. ValueError also if an array has more than 2^52 elements.
        """
        self._check_cost("bytes", backward)
        # The arrays are the same for any code, and a program may have none.
        mask = dataclasses.replace(self.mask, mask_mod=self.mask.mask_mod and Program(ALWAYS))
        score_mod = self.score.score_mod and Program(SAME_SCORE)
        score = dataclasses.replace(self.score, score_mod=score_mod, score_grad=None, score_tangent=None)
        problem = dataclasses.replace(self, mask=mask, score=score)
        if backward and not self.gradients:
            problem = dataclasses.replace(problem, latent=False, requested=("dq", "dk", "dv"))
        captured = 0
        for x in self.captured:
            itemsize = jnp.dtype(x.dtype).itemsize
            if backward and x.gradient:
                itemsize += jnp.dtype(self.accumulation_dtype).itemsize
            captured += math.prod((self.batch if x.batch else 1, *x.shape)) * itemsize
        return _native.array_bytes(problem.encode(), backward) + captured

    def _check_cost(self, name: str, backward: bool) -> None:
        if checks.flag("backward", backward) and not self.differentiable:
            raise ValueError("paged attention is for inference and has no backward kernels: leave out backward=True")
        if self.symbolic:
            sizes = ", ".join(f"{size} {symbol}" for size, symbol in self.symbolic.items())
            raise ValueError(f"{name} needs a problem with concrete sizes, but these are symbolic: {sizes}")

    @property
    def may_empty_rows(self) -> bool:
        """Whether some query may see no key, because masks hide all keys or all scores are -inf."""
        return self.kv_len == 0 or self.mask.may_empty_rows(self.lengths) or self.score.may_hide_entries

    @property
    def programs(self) -> tuple[Program, ...]:
        """The score_mod and the mask_mod, if present."""
        return tuple(x for x in (self.score.score_mod, self.mask.mask_mod) if x is not None)

    @property
    def scored(self) -> tuple[str, ...]:
        """The names of the captured arrays of the score_mod. A mask_mod has no derivative."""
        score_mod = self.score.score_mod
        return () if score_mod is None else CAPTURED[score_mod.first : score_mod.first + score_mod.count]

    @property
    def lengths(self) -> tuple[int, int]:
        """T and S."""
        return self.q_len, self.kv_len

    @property
    def extents(self) -> dict[str, Extent | None]:
        """The extents of the operands in `BROADCAST`."""
        inside = {"bias": self.score.bias, "mask": self.mask.array}
        return {name: inside[name] if name in inside else getattr(self, name) for name in BROADCAST}

    @property
    def symbolic(self) -> dict[str, Any]:
        """The symbolic sizes (`jax.export.symbolic_shape`), by name."""
        sizes = {"batch": self.batch, "query length": self.q_len, "key/value length": self.kv_len}
        return {name: size for name, size in sizes.items() if not isinstance(size, int)}

    @property
    def sizes(self) -> Sizes:
        """The number of values of each index that a program gets."""
        batch, q_len, kv_len = (x if isinstance(x, int) else None for x in (self.batch, self.q_len, self.kv_len))
        return Sizes(batch, self.q_heads, None if self.mask.query_offset else q_len, kv_len)

    @property
    def group(self) -> int:
        """The number of query heads that share one key/value head."""
        return self.q_heads // self.kv_heads

    @property
    def without_rounding(self) -> Problem:
        """The problem of calls with O and dQ in the accumulation dtype."""
        return dataclasses.replace(self, unrounded=True)

    @property
    def accumulation_dtype(self) -> str:
        """The dtype of all sums, of the statistics and of dbias."""
        return "float64" if self.dtype == "float64" else "float32"

    def result_dtype(self, name: str) -> str:
        """Return the dtype of a result of the custom calls."""
        if name in ("dk", "dv") or (name in ("o", "o_tangent", "dq") and not self.unrounded):
            return self.dtype
        return self.accumulation_dtype

    def encode(self) -> str:
        """Return the text attribute of the custom calls: "version=10 may_empty_rows=0 batch=2 ..."."""
        own = {"version": _native.PROBLEM_VERSION, "may_empty_rows": int(self.may_empty_rows)}
        return " ".join(f"{name}={text}" for name, text in (*own.items(), *self.texts()))


def checked_problem(x: Any) -> Problem:
    """Return the argument `problem` of a public function."""
    if not isinstance(x, Problem):
        raise TypeError(f"problem must be a jax_flash.Problem, not {checks.described(x)}: create one with Problem.of")
    return x


def _of_call(method: str, options: dict[str, Any], *arrays: Any) -> Problem:
    """Return the problem of a call. `CALL_CHECKS[method]` checks its arguments.

    Arrays may be `jax.ShapeDtypeStruct`s.
    """
    if "return_residual" in options:
        raise TypeError("return_residual is not an option of a problem: leave it out, it does not change the problem")
    leaves, tree = jax.tree.flatten((arrays, options))
    described = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)}

    def problem(given: dict[int, jax.Array]) -> Problem:
        arrays, options = jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(leaves)])
        return CALL_CHECKS[method](*arrays, **options)

    with jax.enable_x64(jax.config.read("jax_enable_x64") or any(x.dtype == "float64" for x in described.values())):
        return jax.eval_shape(problem, described)


def _with_key(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with a dropout key. The problem does not depend on the key."""
    return {"dropout_key": jax.eval_shape(jax.random.key, 0)} | options


def result_types(
    problem: Problem, results: Sequence[str], lead: tuple[int, ...], arrays: Mapping[str, jax.Array]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of results of the custom calls, with `lead` as the batch dimensions."""
    sizes = {"T": problem.q_len, "S": problem.kv_len, "N": problem.q_heads, "K": problem.kv_heads}
    sizes |= {"D": problem.qk_dim, "E": problem.v_dim}
    types = {}
    for name in results:
        shared = name in SHARED_GRADIENTS
        shape = arrays[DIFFERENTIATED[name]].shape if shared else (*lead, *(sizes[dim] for dim in DIMS[name]))
        types[name] = jax.ShapeDtypeStruct(shape, problem.result_dtype(name))
    return types
