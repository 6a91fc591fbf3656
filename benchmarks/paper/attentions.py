"""The implementations of attention that the paper compares, in plain JAX or from a library.

All take query, key and value, [B, N, heads, d]. They also take the sequence lengths without padding (int [B] or None),
and the key for a dropout mask of rate 0.1 (or None). The paper measures without a causal mask. `standard` also has one,
for training.

Arrays are bfloat16. Sums and the softmax are float32 in registers, and all results in memory are bfloat16, except in
`xla`.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

import jax_flash

RATE = 0.1  # dropout
MASKED_SCORE = -1e30  # finite, which gives a block of padding a finite maximum


def standard(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths=None, key=None, *, causal: bool = False, rate: float = RATE
) -> jax.Array:
    """Algorithm 0: S and P are arrays in memory, and XLA fuses the operations between the products."""
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    visible = not_padding(jnp.arange(k.shape[1]), lengths)
    if causal:
        visible = visible & jnp.tri(q.shape[1], k.shape[1], dtype=bool)
    return jnp.einsum("bhqk,bkhd->bqhd", apply_dropout(softmax(s, visible), key, rate), v)


checkpointed = jax.checkpoint(standard)  # the backward recomputes S and P from the inputs


def chunked(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths=None, key=None, q_chunk: int = 1024, k_chunk: int = 4096
) -> jax.Array:
    """Rabe and Staats 2021, arXiv 2112.05682, with their chunk sizes.

    Appendix B.5 of the FlashAttention paper lists three differences. This algorithm reduces memory but not the number
    of accesses, so its chunks are far larger than fast memory. Each chunk of keys has its own output, and all outputs
    are combined at the end. FlashAttention updates a single output. The backward uses `jax.checkpoint`, so it
    recomputes the output of each chunk. FlashAttention only recomputes P.
    """
    q_chunk, k_chunk = min(q_chunk, q.shape[1]), min(k_chunk, k.shape[1])
    chunks = k.shape[1] // k_chunk

    def query_chunk(i: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(q, i * q_chunk, q_chunk, 1)

        @jax.checkpoint  # keeps XLA from merging both computations if the loop has only one chunk
        def summary(j: jax.Array) -> tuple[jax.Array, ...]:
            keys, values = (jax.lax.dynamic_slice_in_dim(x, j * k_chunk, k_chunk, 1) for x in (k, v))
            s = jnp.einsum("bqhd,bkhd->bhqk", rows, keys).astype("float32") * q.shape[-1] ** -0.5
            s = jnp.where(not_padding(j * k_chunk + jnp.arange(k_chunk), lengths), s, MASKED_SCORE)
            m = jax.lax.stop_gradient(s.max(-1, keepdims=True))
            p = jnp.exp(s - m)
            kept = apply_dropout(p.astype(q.dtype), None if key is None else jax.random.fold_in(key, i * chunks + j))
            o = jnp.einsum("bhqk,bkhd->bhqd", kept, values, preferred_element_type="float32")
            return o, p.sum(-1, keepdims=True), m

        o, l, m = jax.lax.map(summary, jnp.arange(chunks))
        weight = jnp.exp(m - m.max(0))
        return ((weight * o).sum(0) / (weight * l).sum(0)).astype(q.dtype)

    o = jax.lax.map(query_chunk, jnp.arange(q.shape[1] // q_chunk))  # [query chunks, B, heads, q_chunk, d]
    return o.transpose(1, 0, 3, 2, 4).reshape(q.shape)


def jax_nn(
    implementation: Literal["xla", "cudnn"], q: jax.Array, k: jax.Array, v: jax.Array, lengths=None, key=None
) -> jax.Array:
    """Call jax.nn's attention. With "xla", it writes S in float32."""
    if key is not None:
        raise NotImplementedError("jax.nn.dot_product_attention has no dropout")
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation=implementation)


xla, cudnn = functools.partial(jax_nn, "xla"), functools.partial(jax_nn, "cudnn")


def flash(q: jax.Array, k: jax.Array, v: jax.Array, lengths=None, key=None, blocks=None) -> jax.Array:
    """Call jax_flash. With a block mask this is Algorithm 5."""
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
    """Wang et al. 2020, arXiv 2006.04768: a matrix [N, few], shared by all heads, projects N keys to a few."""
    present = not_padding(jnp.arange(k.shape[1]), lengths)[:, 0, 0, :, None, None]
    k, v = (jnp.einsum("bshd,sr->brhd", jnp.where(present, x, 0), projection) for x in (k, v))
    return standard(q, k, v, None, key)


def local(q: jax.Array, k: jax.Array, v: jax.Array, lengths=None, key=None, size: int = 256) -> jax.Array:
    """Local attention: a block of queries attends to the same block of keys and to both neighbours."""
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
    return jnp.einsum("bnhqk,bnkhd->bnqhd", apply_dropout(p, key), with_neighbours(v)).reshape(q.shape)


def not_padding(positions: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Return which keys are not padding, bool [B|1, 1, 1, keys]."""
    if lengths is None:
        return jnp.ones((1, 1, 1, positions.size), bool)
    return (positions < lengths[:, None])[:, None, None]


def softmax(s: jax.Array, visible: jax.Array) -> jax.Array:
    return plain_softmax(jnp.where(visible, s, MASKED_SCORE))


@jax.custom_vjp
def plain_softmax(s: jax.Array) -> jax.Array:
    """Compute in float32 registers. The residual is P in its dtype. `jax.nn.softmax` would keep it in float32."""
    return jax.nn.softmax(s.astype("float32")).astype(s.dtype)


def softmax_forward(s: jax.Array) -> tuple[jax.Array, jax.Array]:
    p = plain_softmax(s)
    return p, p


def softmax_backward(p: jax.Array, dp: jax.Array) -> tuple[jax.Array]:
    p32, dp32 = p.astype("float32"), dp.astype("float32")
    return ((p32 * (dp32 - (p32 * dp32).sum(-1, keepdims=True))).astype(p.dtype),)


plain_softmax.defvjp(softmax_forward, softmax_backward)


def apply_dropout(p: jax.Array, key: jax.Array | None, rate: float = RATE) -> jax.Array:
    """Use one random byte per entry, a quarter of `jax.random.bernoulli`'s. The rate is a multiple of 1/256."""
    threshold = round(256 * rate)
    if key is None or not threshold:
        return p
    return jnp.where(jax.random.bits(key, p.shape, "uint8") < threshold, 0, p * (256 / (256 - threshold)))
