"""One transformer for all trained models. Only the implementation of attention varies."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_flash
from jax_flash import BlockMask, patterns
from jax_flash.nnx import BlockSparseDense

from .attentions import apply_dropout, standard

Attention = Literal["standard", "cudnn", "flash", "block-sparse"]
LONGEST = 100.0  # tokens: the longest wavelength of rotary positions, divided by 2 pi


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int
    width: int
    heads: int
    hidden: int  # width of the perceptron's hidden layer
    grid: tuple[int, ...]  # layout of the positions: (length,) for text, (rows, columns) for an image
    vocabulary: int
    causal: bool = False
    classes: int = 0  # number of classes for whole sequences; 0: no classification head
    background: int | None = None  # a token that is ignored in the classification of an image
    documents: int = 1  # number of documents that are classified together
    projected: float = 1.0  # fraction of the tokens with features projected to the vocabulary
    dropout: float = 0.1
    rotary: bool = False  # rotary positions instead of learned ones
    attention: Attention = "flash"
    mlp_block: int = 0  # side of the blocks of sparse perceptrons; 0: dense ones
    tile: tuple[int, int] = (1, 1)  # an image's tokens are ordered by tiles of (rows, columns); by default row by row
    reach: int = 0  # block-sparse attention also keeps tiles within this distance in pixels; a tile is a block

    @property
    def length(self) -> int:
        return math.prod(self.grid)

    def flops_per_token(self, parameters: int) -> float:
        """Return the FLOPs of a training step: 6 per parameter, plus 12 · layers · width · N for attention.

        Causal attention counts in full, which is the convention. The vocabulary only counts for projected tokens, since
        a lookup needs no product.
        """
        unused = (1 - self.projected) * self.vocabulary * self.width
        return 6 * (parameters - unused) + 12 * self.layers * self.width * self.length


FLOPS_FORMULA = (
    "6 · parameters + 12 · layers · width · N a token; causal attention counted in full, "
    "the vocabulary for the tokens that are projected to it"
)


class Transformer(nnx.Module):
    """A pre-norm transformer with tied embeddings, like GPT-2.

    Learned positions are the sum of a table per axis of the grid. The weights are float32, computation is in bfloat16.
    Dropout needs a key, and is off without one.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        normal = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(config.vocabulary, config.width, embedding_init=normal, dtype=jnp.bfloat16, rngs=rngs)
        learned = () if config.rotary else config.grid
        self.positions = nnx.List([nnx.Param(normal(rngs.params(), (n, config.width))) for n in learned])
        # The layers' weights are stacked, so a layer is compiled only once.
        stacked = nnx.vmap(lambda rngs: Block(config, rngs), in_axes=(0,), out_axes=0)
        self.blocks = nnx.split_rngs(splits=config.layers)(stacked)(rngs)
        self.norm = nnx.LayerNorm(config.width, dtype=jnp.bfloat16, rngs=rngs)
        if config.classes:
            self.head = nnx.Linear(config.documents * config.width, config.classes, rngs=rngs)

    def __call__(self, tokens: jax.Array, lengths: jax.Array | None = None, key: jax.Array | None = None) -> jax.Array:
        """Return features [B, T, width] for tokens [B, T] and the lengths without padding, [B]."""
        positions = jnp.zeros(self.config.width)
        for axis, table in enumerate(self.positions):
            positions = positions + jnp.expand_dims(table[...], tuple(range(1, len(self.config.grid) - axis)))
        # In float32, because the gradient of a bfloat16 lookup accumulates the rows of a token in bfloat16.
        x = (self.embed.embedding[tokens] + positions.reshape(-1, self.config.width)).astype(jnp.bfloat16)
        first, keys = (None, None) if key is None else split(key, self.config.layers)
        layers = nnx.scan(Block.__call__, in_axes=(0, nnx.Carry, None, 0), out_axes=nnx.Carry)
        return self.norm(layers(self.blocks, apply_dropout(x, first, self.config.dropout), lengths, keys))

    def logits(self, features: jax.Array) -> jax.Array:
        """Return the logits of the tokens, float32 [..., vocabulary]."""
        return self.embed.attend(features).astype(jnp.float32)

    def classify(self, features: jax.Array, counted: jax.Array | None = None) -> jax.Array:
        """Return logits [B / documents, classes] from a row's mean features, over all tokens or the counted ones."""
        where = None if counted is None else counted[..., None]
        pooled = features.astype(jnp.float32).mean(1, where=where)
        return self.head(pooled.reshape(-1, self.config.documents * self.config.width))


class Block(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, dtype=jnp.bfloat16, rngs=rngs)

        def sparse(inputs: int, outputs: int) -> BlockSparseDense:
            block = config.mlp_block
            mask = patterns.butterfly(inputs, outputs, global_blocks=1, q_block=block, kv_block=block)
            return BlockSparseDense(inputs, outputs, mask, dtype=jnp.bfloat16, rngs=rngs)

        self.attention_norm = nnx.LayerNorm(config.width, dtype=jnp.bfloat16, rngs=rngs)
        self.qkv, self.out = linear(config.width, 3 * config.width), linear(config.width, config.width)
        self.mlp_norm = nnx.LayerNorm(config.width, dtype=jnp.bfloat16, rngs=rngs)
        perceptron = sparse if config.mlp_block else linear
        self.up, self.down = perceptron(config.width, config.hidden), perceptron(config.hidden, config.width)

    def __call__(self, x: jax.Array, lengths: jax.Array | None, key: jax.Array | None) -> jax.Array:
        keys = (None, None, None) if key is None else jax.random.split(key, 3)
        parts = jnp.split(self.qkv(self.attention_norm(x)), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], self.config.heads, -1) for part in parts)
        if self.config.rotary:
            positions = tuple(in_tiles(axis, self.config.tile) for axis in np.indices(self.config.grid))
            q, k = rotated(q, positions), rotated(k, positions)
        attended = attend(self.config, q, k, v, lengths, keys[0]).reshape(x.shape)
        x = x + apply_dropout(self.out(attended), keys[1], self.config.dropout)
        return x + apply_dropout(self.down(jax.nn.gelu(self.up(self.mlp_norm(x)))), keys[2], self.config.dropout)


def in_tiles(images: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """Reorder [..., rows, columns] to [..., tokens], with consecutive pixels for each tile."""
    *leading, rows, columns = images.shape
    tiles = images.reshape(*leading, rows // tile[0], tile[0], columns // tile[1], tile[1])
    return tiles.swapaxes(-3, -2).reshape(*leading, rows * columns)


def rotated(x: jax.Array, positions: tuple[np.ndarray, ...]) -> jax.Array:
    """Apply rotary positions (Su et al. 2021, arXiv 2104.09864) to [B, T, heads, d]. The axes share d equally.

    The positions along an axis are [T]. Scores depend only on their differences and not on the size of an image, so
    weights trained on small images are useful for larger ones.
    """
    count = x.shape[-1] // (2 * len(positions))
    frequencies = LONGEST ** -jnp.linspace(0, 1, count)
    angles = jnp.concatenate([jnp.asarray(axis)[:, None, None] * frequencies for axis in positions], -1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], -1).astype(x.dtype)


def attend(
    config: Config,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array | None,
    dropout_key: jax.Array | None,
) -> jax.Array:
    """Compute attention in one of the variants of the model.

    All apply dropout to the attention matrix except cuDNN's, since `jax.nn.dot_product_attention` has no dropout.
    """
    if config.attention == "standard":
        return standard(query, key, value, lengths, dropout_key, causal=config.causal, rate=config.dropout)
    if config.attention == "cudnn":
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            is_causal=config.causal,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )
    return jax_flash.dot_product_attention(
        query,
        key,
        value,
        is_causal=config.causal,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        block_mask=block_mask(config) if config.attention == "block-sparse" else None,
        dropout_rate=0.0 if dropout_key is None else config.dropout,
        dropout_key=dropout_key,
    )


def block_mask(config: Config) -> BlockMask:
    mask = patterns.butterfly(config.length, config.length)
    if config.reach:
        mask = mask | BlockMask.from_dense(neighbours(config.grid, config.tile, config.reach))
    return mask


def neighbours(grid: tuple[int, ...], tile: tuple[int, int], reach: int) -> np.ndarray:
    """Return which tiles are at most `reach` pixels from one another along each axis, bool [tiles, tiles]."""
    rows, columns = (axis.ravel() for axis in np.mgrid[: grid[0] : tile[0], : grid[1] : tile[1]])
    return (np.abs(rows[:, None] - rows) <= reach) & (np.abs(columns[:, None] - columns) <= reach)


def split(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return one key, and `count` others."""
    keys = jax.random.split(key, count + 1)
    return keys[0], keys[1:]


def classified_tokens(config: Config, tokens: jax.Array, lengths: jax.Array | None) -> jax.Array | None:
    """Return which tokens count in the classification, bool [B, T]: not padding or background. None means all."""
    if config.background is not None:
        return tokens != config.background
    return None if lengths is None else jnp.arange(tokens.shape[1]) < lengths[:, None]
