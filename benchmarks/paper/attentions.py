"""The ways to compute attention that the paper compares, each in plain JAX unless it is a library's.

All take query, key and value, [B, N, heads, d]; the length of each sequence before its padding, int [B], or None; and
the key of a dropout mask with rate 0.1, or None. The paper measures without a causal mask; `standard` has one, for
training. Arrays are bfloat16; sums and the softmax are float32 in registers, and what is written to memory is bfloat16,
but for `xla`.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

import jax_flash

RATE = 0.1  # of dropout
HIDDEN = -1e30  # a masked score: finite, so that a block with nothing but padding has a maximum


def standard(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths=None, key=None, *, causal: bool = False, rate: float = RATE
) -> jax.Array:
    """Algorithm 0: S and P are arrays in memory, and XLA fuses what is between the two products as it likes."""
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    visible = seen(jnp.arange(k.shape[1]), lengths)
    if causal:
        visible = visible & jnp.tri(q.shape[1], k.shape[1], dtype=bool)
    return jnp.einsum("bhqk,bkhd->bqhd", dropped(softmax(s, visible), key, rate), v)


checkpointed = jax.checkpoint(standard)  # the backward computes S and P again, from the inputs


def chunked(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths=None, key=None, q_chunk: int = 1024, k_chunk: int = 4096
) -> jax.Array:
    """Rabe and Staats 2021, arXiv 2112.05682, with their sizes of chunks.

    Appendix B.5 of the FlashAttention paper names three differences. This algorithm lowers the memory that is needed
    and not the number of accesses, so its chunks are far larger than fast memory. Each chunk of keys has an output of
    its own, and these are combined at the end, where FlashAttention updates a single one. The backward is
    `jax.checkpoint`'s: it computes the output of each chunk again, where FlashAttention computes P alone.
    """
    q_chunk, k_chunk = min(q_chunk, q.shape[1]), min(k_chunk, k.shape[1])
    chunks = k.shape[1] // k_chunk

    def of_queries(i: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(q, i * q_chunk, q_chunk, 1)

        @jax.checkpoint  # which keeps XLA from merging the two computations where the loop has a single chunk
        def summary(j: jax.Array) -> tuple[jax.Array, ...]:
            keys, values = (jax.lax.dynamic_slice_in_dim(x, j * k_chunk, k_chunk, 1) for x in (k, v))
            s = jnp.einsum("bqhd,bkhd->bhqk", rows, keys).astype("float32") * q.shape[-1] ** -0.5
            s = jnp.where(seen(j * k_chunk + jnp.arange(k_chunk), lengths), s, HIDDEN)
            m = jax.lax.stop_gradient(s.max(-1, keepdims=True))
            p = jnp.exp(s - m)
            kept = dropped(p.astype(q.dtype), None if key is None else jax.random.fold_in(key, i * chunks + j))
            o = jnp.einsum("bhqk,bkhd->bhqd", kept, values, preferred_element_type="float32")
            return o, p.sum(-1, keepdims=True), m

        o, l, m = jax.lax.map(summary, jnp.arange(chunks))
        weight = jnp.exp(m - m.max(0))
        return ((weight * o).sum(0) / (weight * l).sum(0)).astype(q.dtype)

    o = jax.lax.map(of_queries, jnp.arange(q.shape[1] // q_chunk))  # [chunks of queries, B, heads, q_chunk, d]
    return o.transpose(1, 0, 3, 2, 4).reshape(q.shape)


def of_jax_nn(
    implementation: Literal["xla", "cudnn"], q: jax.Array, k: jax.Array, v: jax.Array, lengths=None, key=None
) -> jax.Array:
    """It writes S in float32, with "xla"."""
    if key is not None:
        raise NotImplementedError("jax.nn.dot_product_attention has no dropout")
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation=implementation)


xla, cudnn = functools.partial(of_jax_nn, "xla"), functools.partial(of_jax_nn, "cudnn")


def flash(q: jax.Array, k: jax.Array, v: jax.Array, lengths=None, key=None, blocks=None) -> jax.Array:
    """jax_flash; with a block mask, Algorithm 5."""
    return jax_flash.dot_product_attention(
        q,
        k,
        v,
        key_value_seq_lengths=lengths,
        dropout_rate=0.0 if key is None else RATE,
        dropout_key=key,
        block_mask=blocks,
        implementation="flash",
    )


def linformer(q: jax.Array, k: jax.Array, v: jax.Array, lengths=None, key=None, *, projection) -> jax.Array:
    """Wang et al. 2020, arXiv 2006.04768: N keys and values become a few, by a matrix [N, few] that heads share."""
    present = seen(jnp.arange(k.shape[1]), lengths)[:, 0, 0, :, None, None]
    k, v = (jnp.einsum("bshd,sr->brhd", jnp.where(present, x, 0), projection) for x in (k, v))
    return standard(q, k, v, None, key)


def local(q: jax.Array, k: jax.Array, v: jax.Array, lengths=None, key=None, size: int = 256) -> jax.Array:
    """Blocks of queries, each of which attends to its own block of keys and to those on both sides of it."""
    size = min(size, q.shape[1])
    count = q.shape[1] // size

    def blocks(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], count, size, *x.shape[2:])

    def with_neighbours(x: jax.Array) -> jax.Array:
        padded = jnp.pad(blocks(x), ((0, 0), (1, 1), (0, 0), (0, 0), (0, 0)))
        return jnp.concatenate([padded[:, :-2], padded[:, 1:-1], padded[:, 2:]], axis=2)

    positions = size * jnp.arange(count)[:, None] + jnp.arange(-size, 2 * size)
    inside = (positions >= 0) & (positions < q.shape[1])
    if lengths is not None:
        inside = inside & (positions < lengths[:, None, None])
    s = jnp.einsum("bnqhd,bnkhd->bnhqk", blocks(q), with_neighbours(k)) * q.shape[-1] ** -0.5
    p = softmax(s, jnp.broadcast_to(inside, (q.shape[0], *positions.shape))[:, :, None, None])
    return jnp.einsum("bnhqk,bnkhd->bnqhd", dropped(p, key), with_neighbours(v)).reshape(q.shape)


def seen(positions: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Which keys are no padding: bool [B|1, 1, 1, keys]."""
    if lengths is None:
        return jnp.ones((1, 1, 1, positions.size), bool)
    return (positions < lengths[:, None])[:, None, None]


def softmax(s: jax.Array, seen: jax.Array) -> jax.Array:
    return plain_softmax(jnp.where(seen, s, HIDDEN))


@jax.custom_vjp
def plain_softmax(s: jax.Array) -> jax.Array:
    """Float32 in registers. The backward has P as it was written; of `jax.nn.softmax` it would have it in float32."""
    return jax.nn.softmax(s.astype("float32")).astype(s.dtype)


def softmax_forward(s: jax.Array) -> tuple[jax.Array, jax.Array]:
    p = plain_softmax(s)
    return p, p


def softmax_backward(p: jax.Array, dp: jax.Array) -> tuple[jax.Array]:
    p32, dp32 = p.astype("float32"), dp.astype("float32")
    return ((p32 * (dp32 - (p32 * dp32).sum(-1, keepdims=True))).astype(p.dtype),)


plain_softmax.defvjp(softmax_forward, softmax_backward)


def dropped(p: jax.Array, key: jax.Array | None, rate: float = RATE) -> jax.Array:
    """A byte of randomness for each entry, a quarter of what `jax.random.bernoulli` draws; the rate is in 1/256."""
    threshold = round(256 * rate)
    if key is None or not threshold:
        return p
    return jnp.where(jax.random.bits(key, p.shape, "uint8") < threshold, 0, p * (256 / (256 - threshold)))
