"""The public functions: `dot_product_attention`, and the choice of its implementation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash import arguments, bits, blockwise, checks, custom_calls, partitioning, reference, sequence, vjp
from jax_flash.arguments import Implementation, Options
from jax_flash.problem import Operands, Problem, result_types
from jax_flash.sequence import Division
from jax_flash.varying import varying_alike
from jax_flash.warn import warn


class Statistics(NamedTuple):
    """The softmax statistics of every row, float32 [B, N, T] ([N, T] for unbatched inputs; float64 for float64).

    m counts as a constant when differentiating (a gradient through `l` is that of Σ exp(s - m) at fixed m), so that
    `logsumexp` has its exact gradient.
    """

    l: jax.Array  #: Σ_j exp(s_j - m); 0 for a row with nothing to attend to
    m: jax.Array  #: max_j s_j of the masked, scaled, capped and biased scores; -inf for such a row

    @classmethod
    def of_bits(cls, l: jax.Array, m_bits: jax.Array) -> Statistics:
        """The statistics that `attend` returns."""
        return cls(l, bits.to(l.dtype, m_bits))

    @property
    def logsumexp(self) -> jax.Array:
        """m + log l, the row's log Σ_j exp(s_j); -inf for a row with nothing to attend to."""
        with jax.debug_infs(False):
            empty = self.l == 0
            return jnp.where(empty, -jnp.inf, self.m + jnp.log(jnp.where(empty, 1, self.l)))


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[Options],
) -> jax.Array: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: bool,
    **options: Unpack[Options],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@arguments.lists_options(Options)
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: bool = False,
    **options: Unpack[Options],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Scaled dot-product attention, exact and in linear memory: FlashAttention (arXiv 2205.14135, Algorithms 2 and 4).

    A drop-in for `jax.nn.dot_product_attention`, with more. For every batch entry and head it computes::

        softmax(cap(τ Q Kᵀ) + bias, where attended) V

    or, with `sinks` z, exp(s_ij) / (Σ_k exp(s_ik) + exp(z)) in place of the softmax exp(s_ij) / Σ_k exp(s_ik).

    Letters: B batch, T query length, S key/value length, N query heads, K key/value heads (N a multiple of K:
    multi-head, grouped-query or multi-query attention), D query/key head dim, E value head dim.

    Args:
      query: [B, T, N, D] or [T, N, D]; float32, float64, bfloat16 or float16.
      key: [B, S, K, D] or [S, K, D], same dtype.
      value: [B, S, K, E] or [S, K, E], same dtype.
      bias: added to the scores; broadcastable to [B, N, T, S] (sizes full or 1), any float dtype. Its gradient is
        summed over what was broadcast.
      mask: boolean, true where a query may attend; broadcastable to [B, N, T, S].
      scale: τ, a real scalar; 1/√D by default. It may be traced; new values never recompile. Its gradient is
        Σ query · dquery / τ and has the accuracy of dquery, whose rounding tells in a sum of terms that cancel: give
        float32 inputs for an exact one.
      is_causal: query i sees keys j <= i + query_offset.
      query_seq_lengths: integer [B]: rows from there on are 0.
      key_value_seq_lengths: integer [B]: keys from there on are not attended to.
      local_window_size: w or (left, right): query i sees keys i - left <= j <= i + right (+ query_offset). Each side is
        an int or an integer scalar. A scalar may be traced, so layers in a `jax.lax.scan` can have different windows.
        New values of a traced scalar never recompile, but it is slower than an int
        (`docs/guides/moving-from-jax-nn.md`). For a side without a bound, pass a number as large as the longest
        sequence, such as 2**31 - 1. A negative int is an error. A negative traced value counts as 0.
      sinks: z, [N], any float dtype: attention sinks, a logit of each head that joins the denominator of its softmax
        and has no value, so that a query need not attend to anything (gpt-oss, arXiv 2508.10925; the name is from
        arXiv 2309.17453). -inf is no sink, and +inf takes all of the probability: the rows are 0. They have a gradient.
        The residual is the logsumexp without the sink.
      implementation: None (the fastest that can do the job: `choose_implementation` tells which and why), "flash" (the
        fused custom calls), "xla" (the same algorithm in plain JAX: any platform, forward-mode derivatives) or
        "reference" (materialises [B, N, T, S]). With a symbolic batch or length (`jax.export`) None is "xla".
      return_residual: also return the logsumexp of every row, [B, T, N] or [T, N].
      dropout_rate: up to 255/256, or 1; entries of the attention matrix are dropped with this probability (to 15
        bits), the others scaled so that the expectation is unchanged. The mask depends only on the key and on an
        entry's place, not on the platform, the implementation or the sharding.
      dropout_key: a JAX PRNG key, typed or raw; needed if the rate is above 0.
      broadcast_dropout: one mask for all batch entries and heads.
      dropout_batch_ids, dropout_head_ids: integer [B] and [N], by default 0, 1, …: which batch entries and heads of
        the mask these are. Inside `shard_map`, pass the global ids to get the mask of the unsharded call.
      query_segment_ids, key_value_segment_ids: integer [B, T] and [B, S] (or [T], [S]): a query sees the keys of its
        own segment (packed sequences). Ids have 32 bits, signed or not, and so does the dtype of traced ones.
      logits_soft_cap: c: scores become c tanh(score / c), before the bias is added and before masking. From 3e-31 to
        3e30, for float64 from 6e-301 to 1e300.
      precision: of float32 products, as for `jax.lax.dot` (a `DotAlgorithm` only as a preset); None follows
        `jax.default_matmul_precision`. The CPU kernels always have full float32 accuracy.
      query_offset: int or integer [B]: position of the first query along the keys, for causal masks and windows (cached
        decoding, chunked prefill).
      block_mask: which blocks of entries may attend (`jax_flash.BlockMask`, `jax_flash.patterns`), together with all
        other masks; its rows and columns are those of the arrays, whatever the offset. Empty blocks cost no time.
      score_mod: a function of (score, batch, head, query, key) that returns the score to use, in `jnp` on scalars: the
        scaled, capped and biased score, in float32 (float64 for float64), and int32 indices, where query counts
        query_offset in. It may look things up in arrays that it captures, which have gradients if they are floats.
        What is there of masks and dropout comes after it. (`docs/score-programs.md`)
      mask_mod: a function of (batch, head, query, key) that returns whether the query may attend to the key, likewise.
      sequence_axis: inside `jax.shard_map`, the mesh axis, or axes, that the sequence is divided over; keys and values
        then go round the devices (ring attention, arXiv 2310.01889). T and S are those of this device: it has its own
        rows of the query and what is like it, of a bias and a mask (with all columns, in their natural order), and its
        own keys. Lengths, offsets, a block mask, and the indices that functions are given are of the whole sequence.
        Outside of `shard_map`, a sequence that is sharded is divided without being asked.
      sequence_layout: which rows and keys a device has: "contiguous" ones, or those of `jax_flash.zigzag`.
      deterministic: the gradients, too, have the same bits in every run on one GPU model, and on a CPU whatever the
        number of threads. By default a GPU adds up the gradients of the query and of what score_mod captures in the
        order in which its multiprocessors happen to finish. On a CPU every run with the same number of threads has the
        same bits; the number of threads can change the last bits of gradients. Outputs are always deterministic.

    Returns:
      [B, T, N, E] or [T, N, E], in the dtype of the query; with `return_residual` a pair of it and the logsumexp.

    Raises:
      TypeError: a dtype or a kind of argument that is not supported.
      ValueError: shapes that do not fit together, values out of range, a sequence that does not divide (dropout wants
        parts of a multiple of 16 rows and keys, a block mask of whole blocks; "zigzag" has two parts a device).
      NotImplementedError: symbolic heads or head dims; when a program is lowered, "flash" with a symbolic batch or
        length, or for a platform without kernels. (What a platform's kernels refuse is an error when the program is
        compiled for it.)

    Padding is the tokens beyond `query_seq_lengths` and `key_value_seq_lengths`, and the queries to which the masks
    leave nothing. It may hold anything, NaN and inf included, and so may its cotangents. It affects nothing else,
    forward or backward, and its own output and gradients are 0. If a bias of -inf alone empties a row, this is true of
    the row's cotangents, but the query has to be finite.

    Differences from `jax.nn.dot_product_attention`:
      * a row with nothing to attend to is 0 (there: the mean of the values); so is its gradient;
      * NaN or inf in a masked key or value that is not padding may or may not reach the result: tiles with nothing to
        attend to are not read (there: it always does);
      * the residual is float32 and differentiable (there: the dtype of the key, and not differentiable);
      * a value's head dim may differ from the query's; float64 is computed in float64 throughout;
      * a bias of -inf masks as `mask` does;
      * `implementation="cudnn"` is refused; "flash" is the fused kernel here.
    """
    return_residual = checks.flag("return_residual", return_residual)
    o, *statistics = _attention(query, key, value, bias, mask, options)
    if return_residual:
        return o, by_rows(*statistics)
    return o


@arguments.lists_options(Options)
def attention_with_statistics(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    **options: Unpack[Options],
) -> tuple[jax.Array, Statistics]:
    """`dot_product_attention` with the softmax statistics: (O, (ℓ, m)).

    `merge` makes the result over all keys of two over some each. `sinks` z are left out of the parts then, and O is
    multiplied by ℓ / (ℓ + e^(z-m)) afterwards.

    Arguments and errors: `dot_product_attention`. Returns O [B, T, N, E] and `Statistics` [B, N, T].
    """
    o, *statistics = _attention(query, key, value, bias, mask, options)
    return o, Statistics.of_bits(*statistics)


def _attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    options: Options,
) -> tuple[jax.Array, ...]:
    """The results of `attend`, without a batch dim if the query has none."""
    problem, operands = arguments.problem_and_operands(query, key, value, bias, mask, options)
    results = attend(problem, arguments.division(options), operands, options.get("implementation"))
    return tuple(x[0] for x in results) if np.ndim(query) == 3 else results


def by_rows(l: jax.Array, m_bits: jax.Array) -> jax.Array:
    """The residual that the public functions return, [..., T, N], from what `attend` returns."""
    with jax.debug_infs(False):
        return jnp.swapaxes(Statistics.of_bits(l, m_bits).logsumexp, -1, -2)


def merge(first: tuple[jax.Array, Statistics], second: tuple[jax.Array, Statistics]) -> tuple[jax.Array, Statistics]:
    """Merge attention over two disjoint sets of keys (section 3.1 of arXiv 2205.14135).

    The result equals attention over all of the keys, up to rounding. With m = max(m₁, m₂) it is
    ℓ = e^(m₁-m) ℓ₁ + e^(m₂-m) ℓ₂ and O = (e^(m₁-m) ℓ₁ O₁ + e^(m₂-m) ℓ₂ O₂) / ℓ. A row that sees no keys on one side
    keeps the result of the other side, bit for bit.

    Args:
      first, second: results of `attention_with_statistics` for the same queries, with equal shapes: O [B, T, N, E] and
        statistics [B, N, T], or [T, N, E] and [N, T].

    Returns:
      The merged O, in the dtype of the first, and the merged statistics.

    Raises:
      TypeError: an argument is not such a result, or the statistics differ in dtype.
      ValueError: the shapes differ, or O and its statistics do not fit together.
    """
    parts = _result("first", first), _result("second", second)
    (o1, l1, _), (o2, l2, _) = parts
    if o1.shape != o2.shape:
        raise ValueError(f"first and second must have O of equal shapes, not {o1.shape} and {o2.shape}")
    if l1.dtype != l2.dtype:
        raise TypeError(f"first and second must have statistics of equal dtypes, not {l1.dtype} and {l2.dtype}")
    with jax.debug_infs(False):
        o, l, m = sequence.merge(*parts)
    return o.astype(o1.dtype), Statistics(l, m)


def _result(name: str, given: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """O, l and m of an argument of `merge`."""
    match given:
        case (o, (l, m)):
            o, l, m = (checks.floats(f"{name}'s {of}", x) for of, x in (("O", o), ("l", l), ("m", m)))
        case _:
            raise TypeError(
                f"{name} must be a pair (O, Statistics), as attention_with_statistics returns, "
                f"not {checks.described(given)}; the residual of dot_product_attention does not suffice"
            )
    if o.ndim not in (3, 4):
        raise ValueError(f"{name}'s O must have shape [B, T, N, E] or [T, N, E], not {o.shape}")
    expected = (*o.shape[:-3], o.shape[-2], o.shape[-3])
    if l.shape != expected or m.shape != expected:
        raise ValueError(f"{name}'s O {o.shape} needs l and m of shape {expected}, not {l.shape} and {m.shape}")
    if l.dtype != m.dtype:
        raise TypeError(f"{name}'s l and m must have equal dtypes, not {l.dtype} and {m.dtype}")
    return o, l, m


class Choice(NamedTuple):
    """What `implementation=None` takes, and a sentence for people why."""

    implementation: Implementation  #: what is taken
    reason: str  #: why


def choose_implementation(problem: Problem, platform: str) -> Choice:
    """What `implementation=None` takes for a problem (see `Problem.of`) on a platform ("cpu", "cuda", …), and why.

    The choice is made when a program is lowered for its platform, not when it is traced.
    """
    problem = checks.problem(problem)
    if not isinstance(platform, str):
        raise TypeError(f'platform must be a str, "cpu", "cuda", …, not {checks.described(platform)}')
    if platform == "gpu":
        raise ValueError('a GPU\'s platform is "cuda" or "rocm", not "gpu"')
    refusal = custom_calls.refusal(problem, platform)
    if refusal is None:
        return Choice("flash", f"there are fused kernels for platform {platform!r}")
    return Choice("xla", f"{refusal}; blockwise attention runs anywhere")


def attend(
    problem: Problem, division: Division | None, operands: Operands, implementation: Implementation | None
) -> tuple[jax.Array, ...]:
    """(o, l, bits of m) by an implementation, or the fastest that can do it."""
    try:
        return _attend(problem, division, operands, implementation)
    except TypeError as error:
        if "forward-mode" not in str(error) or implementation not in (None, "flash"):
            raise
        raise TypeError(
            "the fused attention has no forward-mode derivative (jvp, linearize, jacfwd); "
            'implementation="xla" has: it differentiates in any mode'
        ) from error


@functools.partial(jax.jit, static_argnames=("division", "implementation"))  # a call outside of jit is traced once
def _attend(
    problem: Problem, division: Division | None, operands: Operands, implementation: Implementation | None
) -> tuple[jax.Array, ...]:
    operands = varying_alike(operands, operands)
    match implementation:
        case None | "flash":
            _refuse_or_warn(problem, implementation)
            o, l, m = vjp.attention(problem, division, implementation is None, operands)
        case "xla":
            o, l, m = _plain(blockwise.forward, problem, division, operands)
        case "reference":
            o, l, m = _plain(reference.forward, problem, division, operands)
    return o, l, bits.of(m)


def _refuse_or_warn(problem: Problem, implementation: Implementation | None) -> None:
    """Refuses what no kernels do, if they are asked for; says so where others are taken instead.

    Symbolic sizes are no matter here: a program of them may never be lowered.
    """
    on_gpu = jax.default_backend() == "gpu"
    everywhere = next((program.refusal for program in problem.programs if program.refusal), None)
    if implementation == "flash":
        if everywhere:
            raise NotImplementedError(f'implementation="flash": {everywhere}; None and "xla" do it')
        return
    if problem.symbolic:
        return
    refusal = everywhere or (_refused_on_gpu(problem) if on_gpu else None)
    if refusal:
        place = "attention on the GPU" if on_gpu else "attention"
        warn(f'{place} takes implementation="xla", which is slower: {refusal}')


def _refused_on_gpu(problem: Problem) -> str | None:
    """Why the forward, or the backward that may follow, has no kernels there."""
    refusal = custom_calls.refusal(problem, "cuda")
    if refusal or not problem.captured:  # whose gradients are all that only a backward is refused for
        return refusal
    return custom_calls.refusal(problem.differentiated(problem.differentiable), "cuda")


def _plain(
    function: Callable[..., tuple[jax.Array, ...]], problem: Problem, division: Division | None, operands: Operands
) -> tuple[jax.Array, ...]:
    def compute(problem: Problem, arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        return function(problem, Operands.of(arrays))

    if division is not None:
        return sequence.forward(compute, problem, division, operands.arrays())
    types = result_types(problem, ("o", "l", "m"), (problem.batch,), {})
    call = functools.partial(compute, problem)
    return partitioning.automatic(call, problem, operands.arrays(), types)
