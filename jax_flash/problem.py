"""`Problem`: the static description of one attention call, without its arrays.

It is the Python twin of `common/problem.h`. Its text form is the only attribute of both custom calls.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash import _native, checks
from jax_flash.operands import BROADCAST, CAPTURED, DCAPTURED, DIFFERENTIATED, DIMS, SHARED_GRADIENTS
from jax_flash.programs.program import ALWAYS, SAME_SCORE, Captured, Program, Sizes

# The functions that check a call and return its problem, by the method of `Problem` that calls them. Modules that check
# calls create problems, so they import this module and add their functions here (`arguments.creates_problems`).
CALL_CHECKS: dict[str, Callable[..., Problem]] = {}


class Extent(NamedTuple):
    """The dimensions of a [B, N, T, S] operand that have full size. The others have size 1 and are broadcast."""

    batch: bool
    heads: bool
    rows: bool
    columns: bool

    @classmethod
    def of(cls, x: jax.Array) -> Extent:
        return cls(*(size != 1 for size in x.shape))

    @classmethod
    def of_blocks(cls, blocks: jax.Array | jax.ShapeDtypeStruct) -> Extent:
        """Return the extent of a block mask, which always has rows and columns."""
        return cls(blocks.shape[0] != 1, blocks.shape[1] != 1, True, True)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Problem:
    """The static description of one attention call: shapes, dtypes, masks and options, but no arrays.

    `jax_flash.explain` and `jax_flash.choose_implementation` take a problem. Create one with `of`, `of_varlen` or
    `of_paged`.
    """

    batch: int  # B
    q_len: int  # T
    kv_len: int  # S
    q_heads: int  # N
    kv_heads: int  # K, divides N
    qk_dim: int  # D
    v_dim: int  # E
    dtype: str  # one of DTYPES

    soft_cap: float = 0.0  # 0: none
    causal: bool = False
    window_left: int = -1  # -1: unbounded; the same for window_right
    window_right: int = -1

    bias_dtype: str = "none"
    bias: Extent | None = None
    mask: Extent | None = None
    sinks: Extent | None = None  # without rows and columns
    q_lengths: bool = False  # whether the array is present; the same for the next five
    kv_lengths: bool = False
    segments: bool = False
    ranges: bool = False  # in place of causal masks, windows, q_lengths and segments; kv_lengths are there
    query_offset: bool = False
    origin: bool = False  # for a part of a call: where dropout and programs count rows and keys from

    page: int = 0  # number of keys in a page; 0: keys are not in pages
    pages: int = 0  # number of pages

    block_mask: Extent | None = None
    q_block: int = 0  # number of queries in a block
    kv_block: int = 0
    element_masks: int = 0  # P, the number of them
    row_list: int = 0  # 2 + W, how many numbers a list has
    column_list: int = 0

    captured: tuple[Captured, ...] = ()  # the arrays that programs read
    score_mod: Program | None = None
    mask_mod: Program | None = None
    score_grad: Program | None = None  # only in a backward: the derivative of score_mod

    drop_threshold: int = 0  # below 2^15: an entry is kept if its 15 random bits are at least the threshold
    full_precision: bool = False  # float32 only: no TF32
    deterministic: bool = False  # the backward gives the same bits in every run
    unrounded: bool = False  # O and dQ have the accumulation dtype: the scale's gradient needs them so

    # Only in a backward: whether dlogsumexp is present, and which gradients are requested
    dlogsumexp: bool = False
    dq: bool = False
    dk: bool = False
    dv: bool = False
    dbias: bool = False
    dsinks: bool = False

    def __repr__(self) -> str:
        """Return the fields that differ from their defaults: a jaxpr prints its problem several times."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        shown = ", ".join(f"{name}={value!r}" for name, (value, default) in values.items() if value != default)
        return f"Problem({shown})"

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

        The options are those of `jax_flash.varlen_attention`.
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

        The options are those of `jax_flash.paged_attention`.
        """
        return _of_call("of_paged", options, query, key_pages, value_pages, page_table, lengths)

    def with_block_mask(
        self, arrays: Mapping[str, jax.Array | jax.ShapeDtypeStruct], q_block: int, kv_block: int
    ) -> Problem:
        """Return this problem with a block mask that has these arrays, which are named as in `BLOCK_MASK`."""
        return dataclasses.replace(
            self,
            block_mask=Extent.of_blocks(arrays["blocks"]),
            q_block=q_block,
            kv_block=kv_block,
            element_masks=arrays["element_masks"].shape[1] if "element_masks" in arrays else 0,
            row_list=arrays["row_lists"].shape[-1],
            column_list=arrays["column_lists"].shape[-1],
        )

    def with_arrays(self, arrays: Mapping[str, jax.Array]) -> Problem:
        """Return this problem with the batch size, the numbers of heads and the extents of these operands."""
        extents: dict[str, Any] = {name: Extent.of(arrays[name]) if name in arrays else None for name in BROADCAST}
        return dataclasses.replace(
            self,
            batch=arrays["query"].shape[0],
            q_heads=arrays["query"].shape[2],
            kv_heads=arrays["key_pages" if self.page else "key"].shape[2],
            **extents,
            block_mask=Extent.of_blocks(arrays["blocks"]) if "blocks" in arrays else None,
            captured=tuple(
                x._replace(batch=arrays[name].shape[0] != 1) for name, x in zip(CAPTURED, self.captured, strict=False)
            ),
        )

    def differentiated(self, results: Collection[str], **changes: Any) -> Problem:
        """Return the problem of the backward that computes these gradients, named as in `DIFFERENTIATED`."""
        flags: dict[str, Any] = {name: name in results for name in DIFFERENTIATED if name not in DCAPTURED}
        asked = zip(DCAPTURED, self.captured, strict=False)
        captured = tuple(x._replace(gradient=name in self.differentiable & {*results}) for name, x in asked)
        score_grad = None
        if self.score_mod is not None and not self.score_mod.refusal:
            score_grad = self.score_mod.gradient(captured, self.accumulation_dtype, self.sizes)
        return dataclasses.replace(self, captured=captured, score_grad=score_grad, **flags, **changes)

    @property
    def differentiable(self) -> set[str]:
        """The names of the gradients that the backward can compute. Paged attention has none."""
        if self.page:
            return set()
        floats = {name for name, x in zip(DCAPTURED, self.captured, strict=False) if "float" in x.dtype}
        absent = {name for name in BROADCAST if getattr(self, name) is None}
        return {name for name, operand in DIFFERENTIATED.items() if operand not in (*CAPTURED, *absent)} | floats

    @property
    def gradients(self) -> tuple[str, ...]:
        """The names of the requested gradients, in order."""
        captured = [name for name, x in zip(DCAPTURED, self.captured, strict=False) if x.gradient]
        return (*(name for name in DIFFERENTIATED if name not in DCAPTURED and getattr(self, name)), *captured)

    def flops(self, backward: bool = False) -> int:
        """Return the floating point operations of one pass, counted as model FLOPs (the convention of the papers).

        The forward has 2 · (D + E) operations for each pair of a query and a key that may attend, and for each query
        head. The backward has 2 · (3 D + 2 E), including 2 · D to recompute the scores.

        Only `is_causal` and a `local_window_size` of Python ints reduce the count. A problem does not contain the
        values of arrays. So it ignores masks that are arrays or functions, lengths, segment ids, and traced windows.
        With a `query_offset`, all pairs count, even if `is_causal` is set. The result is then an upper bound.
        `docs/guides/mfu.md` shows how to use it.

        Args:
          backward: whether to count the backward alone instead of the forward.

        Raises:
          TypeError: if `backward` is not a bool.
          ValueError: if a size is symbolic, or for the backward of paged attention, which does not exist.
        """
        self._check_cost("flops", backward)
        by_d, by_e = (3, 2) if backward else (1, 1)  # the products S, dQ, dK over D, and O or dP, dV over E
        each = 2 * self._visible() * (by_d * self.qk_dim + by_e * self.v_dim)
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
        score_mod, mask_mod = self.score_mod and Program(SAME_SCORE), self.mask_mod and Program(ALWAYS)
        problem = dataclasses.replace(self, score_mod=score_mod, mask_mod=mask_mod, score_grad=None)
        if backward and not self.gradients:
            problem = dataclasses.replace(problem, dq=True, dk=True, dv=True)
        captured = 0
        for x in self.captured:
            itemsize = jnp.dtype(x.dtype).itemsize
            if backward and x.gradient:
                itemsize += jnp.dtype(self.accumulation_dtype).itemsize
            captured += math.prod((self.batch if x.batch else 1, *x.shape)) * itemsize
        return _native.array_bytes(problem.encode(), backward) + captured

    def _check_cost(self, name: str, backward: bool) -> None:
        if checks.flag("backward", backward) and not self.differentiable:
            raise ValueError("paged_attention is for inference and has no backward kernels: leave out backward=True")
        if self.symbolic:
            sizes = ", ".join(f"{size} {symbol}" for size, symbol in self.symbolic.items())
            raise ValueError(f"{name} needs a problem with concrete sizes, but these are symbolic: {sizes}")

    def _visible(self) -> int:
        """Return the number of visible entries of one head, from the sizes, the causal mask and the local window."""
        T, S = self.q_len, self.kv_len
        if self.query_offset:
            return T * S
        left, right = (min(x, T + S) if x >= 0 else T + S for x in (self.window_left, self.window_right))
        i = np.arange(T)
        first, end = np.maximum(i - left, 0), np.minimum(i + (0 if self.causal else right) + 1, S)
        return int(np.maximum(end - first, 0).sum())

    @property
    def may_empty_rows(self) -> bool:
        """Whether some query may see no key, because masks hide all keys or all scores are -inf."""
        if self.kv_len == 0:
            return True
        arrays = (self.bias, self.mask, self.block_mask, self.score_mod, self.mask_mod)
        if any(x is not None for x in arrays) or self.q_lengths or self.kv_lengths or self.segments or self.ranges:
            return True
        if self.query_offset and (self.causal or self.window_left >= 0 or self.window_right >= 0):
            return True
        return self.window_left >= 0 and (bool(self.symbolic) or self.window_left < self.q_len - self.kv_len)

    @property
    def programs(self) -> tuple[Program, ...]:
        """The score_mod and the mask_mod, if present."""
        return tuple(x for x in (self.score_mod, self.mask_mod) if x is not None)

    @property
    def symbolic(self) -> dict[str, Any]:
        """The symbolic sizes (`jax.export.symbolic_shape`), by name."""
        sizes = {"batch": self.batch, "query length": self.q_len, "key/value length": self.kv_len}
        return {name: size for name, size in sizes.items() if not isinstance(size, int)}

    @property
    def sizes(self) -> Sizes:
        """The number of values of each index that a program gets."""
        batch, q_len, kv_len = (x if isinstance(x, int) else None for x in (self.batch, self.q_len, self.kv_len))
        return Sizes(batch, self.q_heads, None if self.query_offset else q_len, kv_len)

    @property
    def group(self) -> int:
        """The number of query heads that share one key/value head."""
        return self.q_heads // self.kv_heads

    @property
    def accumulation_dtype(self) -> str:
        """The dtype of all sums, of the statistics and of dbias."""
        return "float64" if self.dtype == "float64" else "float32"

    def result_dtype(self, name: str) -> str:
        """Return the dtype of a result of the custom calls."""
        if name in ("dk", "dv") or (name in ("o", "dq") and not self.unrounded):
            return self.dtype
        return self.accumulation_dtype

    def encode(self) -> str:
        """Return the text attribute of the custom calls: "version=7 batch=2 ... bias=b1ts mask=none ..."."""

        def text(value: object) -> str:
            if value is None:
                return "none"
            if isinstance(value, Extent):
                return "".join(name if there else "1" for name, there in zip("bnts", value, strict=True))
            if isinstance(value, tuple):
                return ",".join(map(str, value)) or "none"
            return str(int(value)) if isinstance(value, bool) else str(value)

        fields = {field.name: text(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return " ".join(f"{name}={value}" for name, value in {"version": _native.PROBLEM_VERSION, **fields}.items())


def checked_problem(x: Any) -> Problem:
    """Return the argument `problem` of a public function."""
    if not isinstance(x, Problem):
        raise TypeError(f"problem must be a jax_flash.Problem, not {checks.described(x)}: create one with Problem.of")
    return x


def _of_call(method: str, options: dict[str, Any], *arrays: Any) -> Problem:
    """Return the problem of a call, whose arguments `CALL_CHECKS[method]` checks.

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
