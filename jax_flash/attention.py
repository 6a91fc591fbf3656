"""`dot_product_attention`, related public functions, and the choice of an implementation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_flash import arguments, bits, blockwise, checks, custom_calls, partitioning, reference, sequence
from jax_flash.block_sparse import BlockMask
from jax_flash.call import Call, Implementation, Options, explains_names
from jax_flash.layouts import SequenceLayout
from jax_flash.operands import Operands
from jax_flash.problem import Problem, checked_problem, result_types
from jax_flash.sequence import Division
from jax_flash.varying import varying_alike
from jax_flash.warn import warn
from jax_flash.windows import Window


class Statistics(NamedTuple):
    """The softmax statistics of every row: arrays [B, N, T] ([N, T] for unbatched inputs).

    The dtype is float32, or float64 for float64 inputs. In derivatives m is a constant, and l has the gradient of
    Σ exp(s - m) at fixed m. `logsumexp` therefore has its exact gradient.
    """

    l: jax.Array  #: Σ_j exp(s_j - m); 0 for a query that sees no key
    m: jax.Array  #: max_j s_j of the scores after scale, cap, bias and masks; -inf for a query that sees no key

    @classmethod
    def of_bits(cls, l: jax.Array, m_bits: jax.Array) -> Statistics:
        """Create the statistics from the results of `attend`."""
        return cls(l, bits.to(l.dtype, m_bits))

    @property
    def logsumexp(self) -> jax.Array:
        """The log Σ_j exp(s_j) = m + log l of each row; -inf for a query that sees no key."""
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
@explains_names
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: Window | None = None,
    implementation: Implementation | None = None,
    sinks: ArrayLike | None = None,
    dropout_batch_ids: ArrayLike | None = None,
    dropout_head_ids: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    query_offset: int | ArrayLike | None = None,
    block_mask: BlockMask | None = None,
    score_mod: Callable[..., jax.Array] | None = None,
    mask_mod: Callable[..., jax.Array] | None = None,
    sequence_axis: str | tuple[str, ...] | None = None,
    sequence_layout: SequenceLayout | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    broadcast_dropout: bool = False,
    precision: lax.PrecisionLike = None,
    deterministic: bool = False,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Compute exact scaled dot-product attention in linear memory with FlashAttention (arXiv 2205.14135).

    A drop-in replacement for `jax.nn.dot_product_attention` with more options. For each batch entry and head it
    computes::

        dropout(softmax(mask(score_mod(cap(scale · Q Kᵀ) + bias)))) V

    With `sinks`, the softmax has one more logit.

    Letters: B batch size, T query length, S key/value length, N query heads, K key/value heads, D query/key head dim, E
    value head dim. K must divide N: K = N is multi-head, K < N grouped-query, and K = 1 multi-query attention.

    Args:
      query: array [B, T, N, D] or [T, N, D]; float32, float64, bfloat16 or float16.
      key: array [B, S, K, D] or [S, K, D] in the same dtype.
      value: array [B, S, K, E] or [S, K, E] in the same dtype.
      bias: float array that is added to the scores. Its shape is [B, N, T, S], where each size may be 1 and leading
        dimensions may be missing. Its gradient has the same shape.
      mask: bool array, broadcastable to [B, N, T, S]. True means that the query may attend to the key.
      scale: real scalar, 1/√D by default. It may be traced, and new values need no compilation. Its gradient is
        Σ(query·dquery) / scale. In 16-bit dtypes, rounding errors can dominate if the terms of this sum cancel. Use
        float32 inputs for a precise gradient.
      is_causal: whether query i sees only keys j <= i + query_offset.
      query_seq_lengths: integer array [B], the number of valid queries per batch entry. Later queries give 0.
      key_value_seq_lengths: integer array [B], the number of valid keys per batch entry. Later keys are masked.
      local_window_size: (left, right), or one number for both sides. Query i sees keys p - left <= j <= p + right,
        where p = i + query_offset. Each side is a Python int or a scalar integer array. An array may be traced, so
        layers in a `jax.lax.scan` can have different windows. New values of a traced scalar need no compilation, but
        ints are faster (`docs/guides/moving-from-jax-nn.md`). For a side without a bound, pass a number as large as the
        longest sequence, such as 2**31 - 1. A negative int is an error, and a negative traced value counts as 0.
      sinks: float array [N] of attention sinks, with gradient (gpt-oss, arXiv 2508.10925). A sink z is one more logit
        in the softmax of its head, but adds no value vector to the output: the softmax is
        exp(s_ij) / (Σ_k exp(s_ik) + exp(z)). -inf turns a sink off, and +inf makes the output 0. The residual does not
        include the sink.
      implementation: None, "flash", "xla" or "reference". "flash" is the fused kernels. "xla" is the same algorithm in
        plain JAX, for any platform. "reference" stores the [B, N, T, S] scores. The default, None, selects "flash" if
        its kernels support the call, and "xla" if not, for example with symbolic sizes (see `choose_implementation`).
      return_residual: whether to return the logsumexp of the scores of each query as well.
      dropout_rate: probability of dropping an entry of the attention matrix, from 0 to 255/256, or 1. It is rounded to
        a multiple of 2^-15. Kept entries are divided by the probability of keeping them. The dropout mask depends only
        on `dropout_key` and on the position in the attention matrix. It is the same for every platform and
        implementation and, under `jit`, every sharding. Inside `shard_map`, pass `dropout_batch_ids` and
        `dropout_head_ids`.
      dropout_key: JAX PRNG key, typed or raw. It is required if the rate is above 0.
      broadcast_dropout: whether all batch entries and heads share one dropout mask.
      dropout_batch_ids: integer array [B], the indices of the batch entries in the dropout mask. Default: 0, 1, …
        Inside `shard_map`, pass global indices to get the mask of the unsharded call.
      dropout_head_ids: integer array [N], the indices of the heads in the dropout mask. Default: 0, 1, …
      query_segment_ids: integer array [B, T] or [T]. A query sees only keys with the same segment id (packed
        sequences). Ids have 32 bits, signed or unsigned.
      key_value_segment_ids: integer array [B, S] or [S], the segment ids of the keys.
      logits_soft_cap: cap c of the scores: c · tanh(score / c), before bias and masks. It must be from 3e-31 to 3e30
        (float64: from 6e-301 to 1e300).
      precision: precision of float32 products, as in `jax.lax.dot`: a `jax.lax.Precision`, a
        `jax.lax.DotAlgorithmPreset`, or the name of one. None uses `jax.default_matmul_precision`. If that is not set,
        GPU kernels use TF32. CPU kernels always have full float32 precision.
      query_offset: int, integer scalar (may be traced) or integer array [B], the position of the first query relative
        to the keys, for causal masks and windows. By default it is 0: the first query is aligned with the first key.
        Use it for decoding with a cache and for chunked prefill.
      block_mask: block-sparse mask (`jax_flash.BlockMask`, `jax_flash.patterns`). The kernels skip its empty blocks.
        All other masks apply as well. Its rows and columns are array indices, so query_offset does not shift it.
      score_mod: function (score, batch, head, query, key) that returns a new score. It takes scalars and uses `jnp`.
        The score is float32 (float64 for float64 inputs) and includes scale, cap and bias. The indices are int32, and
        `query` includes query_offset. The function may read arrays that it captures, and float arrays get gradients.
        Masks and dropout apply afterwards. An entry with a bias of -inf stays masked, whatever the function returns.
        See docs/score-programs.md.
      mask_mod: function (batch, head, query, key) that returns True if the query may attend to the key. Its indices and
        captured arrays follow the rules of score_mod.
      sequence_axis: mesh axis or axes that shard the sequence, inside `jax.shard_map`. Keys and values then travel from
        device to device (ring attention, arXiv 2310.01889). T and S count local queries and keys. A bias or a mask
        has the rows of this device's queries, and all columns in unsharded order. query_seq_lengths,
        key_value_seq_lengths, query_offset and block_mask describe the whole sequence. score_mod and mask_mod receive
        global query and key indices, and local batch and head indices. Outside of `shard_map`, sharded sequences are
        detected, so leave sequence_axis out.
      sequence_layout: order of a sharded sequence: "contiguous", "zigzag" (see `jax_flash.zigzag`), or a
        `jax_flash.Layout` of packed documents (see `jax_flash.balance`).
      deterministic: whether gradients have the same bits in every run on one GPU model with one version of NVRTC, and
        with any number of threads on a CPU. By default, a GPU sums the gradients of the query and of captured arrays in
        varying order, and on a CPU the last bits of gradients can depend on the number of threads. Outputs are always
        deterministic. XLA's flags `--xla_gpu_deterministic_ops` and `--xla_gpu_exclude_nondeterministic_ops` in the
        environment variable XLA_FLAGS turn it on, too.

    Returns:
      Array [B, T, N, E] or [T, N, E] in the dtype of the query. With `return_residual`, a pair of this array and the
      logsumexp [B, T, N] or [T, N].

    Raises:
      TypeError: if an argument has an unsupported dtype or type, or an unknown name.
      ValueError: if shapes do not match, a value is out of range, or a sharded sequence does not divide into equal
        parts: one per device, two with "zigzag", or the chunks of a layout. With dropout, each part must have a
        multiple of 16 queries and keys. With a block mask, each part must consist of whole blocks.
      NotImplementedError: if the number of heads or a head dim is symbolic, or if the kernels of "flash" do not support
        an operation in `score_mod` or `mask_mod`. It is also raised when a program with "flash" is lowered with a
        symbolic batch size or length, or for a platform without kernels.
      jax.errors.JaxRuntimeError: if "flash" is compiled for a GPU, and the GPU kernels do not support the call, such as
        float64 or a head dim above 576.

    Padding: tokens beyond `query_seq_lengths` and `key_value_seq_lengths`, and queries that see no key under the masks,
    are padding. They and their cotangents may hold any value, including NaN. They do not affect other tokens, forward
    or backward. Their output and gradients are 0. A query that sees no key because of a bias of -inf is not padding.
    Its output and gradients are 0 as well, but the query must be finite. Its cotangents need not be finite.

    Differences from `jax.nn.dot_product_attention`:
      * A query that sees no key gives 0 and has zero gradients. (jax.nn gives the mean of the values.)
      * NaN or inf in a masked key or value may reach the output, because only fully masked tiles are skipped. Padding
        never does. (In jax.nn NaN or inf always reaches the output.)
      * The residual is float32 (float64 for float64 inputs) and has a gradient. (In jax.nn it has the dtype of the key
        and no gradient.)
      * The head dim of the value may differ from the head dim of the query. float64 is computed in float64.
      * `implementation="flash"` selects the fused kernels, "xla" is the same algorithm in plain JAX, and "cudnn" is an
        error.
      * Tangents of forward mode (`jax.jvp`, `jax.linearize`, `jax.jacfwd`) run in plain JAX, in linear memory.
    """
    return_residual = checks.flag("return_residual", return_residual)
    call = Call(
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        implementation=implementation,
        sinks=sinks,
        dropout_batch_ids=dropout_batch_ids,
        dropout_head_ids=dropout_head_ids,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        query_offset=query_offset,
        block_mask=block_mask,
        score_mod=score_mod,
        mask_mod=mask_mod,
        sequence_axis=sequence_axis,
        sequence_layout=sequence_layout,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        deterministic=deterministic,
    )
    o, *statistics = of_call(query, key, value, bias, mask, call)
    if return_residual:
        return o, by_rows(*statistics)
    return o


@explains_names
def attention_with_statistics(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: Window | None = None,
    implementation: Implementation | None = None,
    sinks: ArrayLike | None = None,
    dropout_batch_ids: ArrayLike | None = None,
    dropout_head_ids: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    query_offset: int | ArrayLike | None = None,
    block_mask: BlockMask | None = None,
    score_mod: Callable[..., jax.Array] | None = None,
    mask_mod: Callable[..., jax.Array] | None = None,
    sequence_axis: str | tuple[str, ...] | None = None,
    sequence_layout: SequenceLayout | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    broadcast_dropout: bool = False,
    precision: lax.PrecisionLike = None,
    deterministic: bool = False,
) -> tuple[jax.Array, Statistics]:
    """Compute `dot_product_attention` and return its softmax statistics as well.

    Call it on disjoint sets of keys, and use `merge` to combine the results. If you have `sinks` z, leave them out of
    these calls and multiply the merged O by ℓ / (ℓ + e^(z-m)).

    The arguments and errors are those in `dot_product_attention`.

    Returns:
      A pair of O [B, T, N, E] and `Statistics` [B, N, T].
    """
    call = Call(
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        implementation=implementation,
        sinks=sinks,
        dropout_batch_ids=dropout_batch_ids,
        dropout_head_ids=dropout_head_ids,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        query_offset=query_offset,
        block_mask=block_mask,
        score_mod=score_mod,
        mask_mod=mask_mod,
        sequence_axis=sequence_axis,
        sequence_layout=sequence_layout,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        deterministic=deterministic,
    )
    o, *statistics = of_call(query, key, value, bias, mask, call)
    return o, Statistics.of_bits(*statistics)


def of_call(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    call: Call,
) -> tuple[jax.Array, ...]:
    """Return the results of `attend`, without a batch dim if the query has none."""
    problem, operands = arguments.problem_and_operands(query, key, value, bias, mask, call)
    results = attend(problem, call.division, operands, call.implementation)
    return tuple(x[0] for x in results) if np.ndim(query) == 3 else results


def by_rows(l: jax.Array, m_bits: jax.Array) -> jax.Array:
    """Return the residual of the public functions, [..., T, N], from the results of `attend`."""
    with jax.debug_infs(False):
        return jnp.swapaxes(Statistics.of_bits(l, m_bits).logsumexp, -1, -2)


def merge(first: tuple[jax.Array, Statistics], second: tuple[jax.Array, Statistics]) -> tuple[jax.Array, Statistics]:
    """Merge attention over two disjoint sets of keys (section 3.1 of arXiv 2205.14135).

    The result equals attention over the union of the keys, up to rounding. With m = max(m₁, m₂), it is
    ℓ = e^(m₁-m) ℓ₁ + e^(m₂-m) ℓ₂ and O = (e^(m₁-m) ℓ₁ O₁ + e^(m₂-m) ℓ₂ O₂) / ℓ. If a query sees no key on one side,
    the result of the other side is kept bit for bit.

    Args:
      first, second: results of `attention_with_statistics` for the same queries, with equal shapes: O [B, T, N, E] and
        statistics [B, N, T], or [T, N, E] and [N, T].

    Returns:
      The merged O in the dtype of the first O, and the merged statistics.

    Raises:
      TypeError: if an argument is not such a result, or the dtypes of the statistics differ.
      ValueError: if the shapes differ, or O and its statistics do not match.
    """
    parts = _result("first", first), _result("second", second)
    (o1, l1, _), (o2, l2, _) = parts
    if o1.shape != o2.shape:
        raise ValueError(f"O of first and second must have equal shapes, not {o1.shape} and {o2.shape}")
    if l1.dtype != l2.dtype:
        raise TypeError(f"statistics of first and second must have equal dtypes, not {l1.dtype} and {l2.dtype}")
    with jax.debug_infs(False):
        o, l, m = sequence.merge(*parts)
    return o.astype(o1.dtype), Statistics(l, m)


def _result(name: str, given: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return O, l and m of an argument of `merge`, checked."""
    match given:
        case (o, (l, m)):
            o, l, m = (checks.floats(f"{name}'s {of}", x) for of, x in (("O", o), ("l", l), ("m", m)))
        case _:
            raise TypeError(
                f"{name} must be a pair (O, Statistics) from attention_with_statistics, not {checks.described(given)}: "
                "the residual of dot_product_attention is not enough"
            )
    if o.ndim not in (3, 4):
        raise ValueError(f"{name}'s O must have shape [B, T, N, E] or [T, N, E], not {o.shape}")
    expected = (*o.shape[:-3], o.shape[-2], o.shape[-3])
    if l.shape != expected or m.shape != expected:
        raise ValueError(
            f"{name}'s l and m must have shape {expected} for O of shape {o.shape}, not {l.shape} and {m.shape}"
        )
    if l.dtype != m.dtype:
        raise TypeError(f"{name}'s l and m must have equal dtypes, not {l.dtype} and {m.dtype}")
    return o, l, m


class Choice(NamedTuple):
    """The implementation that `implementation=None` selects, and the reason."""

    implementation: Implementation  #: the selected implementation
    reason: str  #: the reason, as a readable sentence


def choose_implementation(problem: Problem, platform: str) -> Choice:
    """Return the implementation that `implementation=None` selects for a problem on a platform, and the reason.

    JAX makes this choice when it lowers a program for its platform, not when it traces the program.

    Args:
      problem: the problem, see `Problem.of`.
      platform: name of the platform in JAX: "cpu", "cuda", "rocm", "tpu", …

    Raises:
      TypeError: if an argument has a wrong type.
      ValueError: if the platform is "gpu". Use "cuda" or "rocm".
    """
    problem = checked_problem(problem)
    if not isinstance(platform, str):
        raise TypeError(f'platform must be a str, such as "cpu" or "cuda", not {checks.described(platform)}')
    if platform == "gpu":
        raise ValueError('platform must be "cuda" or "rocm" for a GPU, not "gpu"')
    refusal = custom_calls.refusal(problem, platform)
    if refusal is None:
        return Choice("flash", f"fused kernels support this problem on platform {platform!r}")
    return Choice("xla", f"{refusal}. Plain JAX runs on any platform")


@functools.partial(jax.jit, static_argnames=("division", "implementation"))  # a call outside of jit is traced once
def attend(
    problem: Problem, division: Division | None, operands: Operands, implementation: Implementation | None
) -> tuple[jax.Array, ...]:
    """Return o, l and the bits of m, computed by an implementation, or by the fastest one that supports the problem."""
    operands = varying_alike(operands, operands)
    match implementation:
        case None | "flash":
            _refuse_or_warn(problem, implementation)
            o, l, m = custom_calls.forward(problem, implementation is None, operands, division)
        case "xla":
            o, l, m = _plain(blockwise.forward, problem, division, operands)
        case "reference":
            o, l, m = _plain(reference.forward, problem, division, operands)
    return o, l, bits.of(m)


def _refuse_or_warn(problem: Problem, implementation: Implementation | None) -> None:
    """Raise an error if "flash" was requested and no kernels support the problem. Warn if None becomes "xla".

    Symbolic sizes are not checked here, because a program with symbolic sizes may never be lowered.
    """
    on_gpu = jax.default_backend() == "gpu"
    everywhere = next((program.refusal for program in problem.programs if program.refusal), None)
    if implementation == "flash":
        if everywhere:
            raise NotImplementedError(
                f'implementation="flash": {everywhere}. Use implementation=None or "xla", which support it'
            )
        return
    if problem.symbolic:
        return
    refusal = everywhere or (custom_calls.refusal(problem, "cuda") if on_gpu else None)
    if refusal:
        place = "attention on the GPU" if on_gpu else "attention"
        warn(f'{place} takes implementation="xla", which is slower: {refusal}')


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
