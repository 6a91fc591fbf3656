"""One transformer for every model that is trained here. What computes its attention is exchanged, and nothing else."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_flash
from jax_flash import BlockMask, patterns

from .attentions import dropped, standard

Attention = Literal["standard", "cudnn", "flash", "block-sparse"]
LONGEST = 100.0  # tokens: the longest wave of rotary positions, over 2 pi


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int
    width: int
    heads: int
    hidden: int  # width of the perceptron of a block
    grid: tuple[int, ...]  # how the positions are laid out: (length,) of a text, (rows, columns) of an image
    vocabulary: int
    causal: bool = False
    classes: int = 0  # into which a whole sequence is classified; 0: there is no such head
    background: int | None = None  # a token that does not count when a whole image is classified
    documents: int = 1  # how many documents are classified together
    projected: float = 1.0  # share of the tokens whose features go through the vocabulary
    dropout: float = 0.1
    rotary: bool = False  # positions rotate queries and keys, in place of learned ones that are added to the tokens
    attention: Attention = "flash"
    tile: tuple[int, int] = (1, 1)  # the tokens of an image go tile by tile, of (rows, columns); by default row by row
    reach: int = 0  # how many pixels apart tiles, each a block, are kept, beside the butterfly, if block-sparse

    @property
    def length(self) -> int:
        return math.prod(self.grid)

    def flops_per_token(self, parameters: int) -> float:
        """Of a training step, as is usual: 6 a parameter, 12 · layers · width · N for attention, causal or not.

        The vocabulary counts for the tokens that are projected to it, since looking up the others takes no product.
        """
        unused = (1 - self.projected) * self.vocabulary * self.width
        return 6 * (parameters - unused) + 12 * self.layers * self.width * self.length


FLOPS_FORMULA = (
    "6 · parameters + 12 · layers · width · N a token; causal attention counted in full, "
    "the vocabulary for the tokens that are projected to it"
)


class Transformer(nnx.Module):
    """Pre-norm, with tied embeddings, as GPT-2, and learned positions (a table for each axis of the grid, added).

    bfloat16 is computed with, float32 are the weights. A key is needed for dropout; without one nothing is dropped.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        normal = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(config.vocabulary, config.width, embedding_init=normal, dtype=jnp.bfloat16, rngs=rngs)
        learned = () if config.rotary else config.grid
        self.positions = nnx.List([nnx.Param(normal(rngs.params(), (n, config.width))) for n in learned])
        # The layers' weights are stacked, so that a layer is compiled once, however many there are.
        stacked = nnx.vmap(lambda rngs: Block(config, rngs), in_axes=(0,), out_axes=0)
        self.blocks = nnx.split_rngs(splits=config.layers)(stacked)(rngs)
        self.norm = nnx.LayerNorm(config.width, dtype=jnp.bfloat16, rngs=rngs)
        if config.classes:
            self.head = nnx.Linear(config.documents * config.width, config.classes, rngs=rngs)

    def __call__(self, tokens: jax.Array, lengths: jax.Array | None = None, key: jax.Array | None = None) -> jax.Array:
        """Tokens [B, T], and how many of each row are no padding, [B] -> features [B, T, width]."""
        place = jnp.zeros(self.config.width)
        for axis, table in enumerate(self.positions):
            place = place + jnp.expand_dims(table[...], tuple(range(1, len(self.config.grid) - axis)))
        # In float32, since the gradient of a lookup in bfloat16 adds up the rows of a token in bfloat16, one by one.
        x = (self.embed.embedding[tokens] + place.reshape(-1, self.config.width)).astype(jnp.bfloat16)
        first, keys = (None, None) if key is None else split(key, self.config.layers)
        layers = nnx.scan(Block.__call__, in_axes=(0, nnx.Carry, None, 0), out_axes=nnx.Carry)
        return self.norm(layers(self.blocks, dropped(x, first, self.config.dropout), lengths, keys))

    def logits(self, features: jax.Array) -> jax.Array:
        """Float32 [..., vocabulary]: of a token."""
        return self.embed.attend(features).astype(jnp.float32)

    def classify(self, features: jax.Array, counted: jax.Array | None = None) -> jax.Array:
        """Float32 [B / documents, classes], of the mean of a row's features, or of those that count, bool [B, T]."""
        where = None if counted is None else counted[..., None]
        pooled = features.astype(jnp.float32).mean(1, where=where)
        return self.head(pooled.reshape(-1, self.config.documents * self.config.width))


class Block(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, dtype=jnp.bfloat16, rngs=rngs)

        self.attention_norm = nnx.LayerNorm(config.width, dtype=jnp.bfloat16, rngs=rngs)
        self.qkv, self.out = linear(config.width, 3 * config.width), linear(config.width, config.width)
        self.mlp_norm = nnx.LayerNorm(config.width, dtype=jnp.bfloat16, rngs=rngs)
        self.up, self.down = linear(config.width, config.hidden), linear(config.hidden, config.width)

    def __call__(self, x: jax.Array, lengths: jax.Array | None, key: jax.Array | None) -> jax.Array:
        keys = (None, None, None) if key is None else jax.random.split(key, 3)
        parts = jnp.split(self.qkv(self.attention_norm(x)), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], self.config.heads, -1) for part in parts)
        if self.config.rotary:
            places = tuple(in_tiles(axis, self.config.tile) for axis in np.indices(self.config.grid))
            q, k = rotated(q, places), rotated(k, places)
        attended = attend(self.config, q, k, v, lengths, keys[0]).reshape(x.shape)
        x = x + dropped(self.out(attended), keys[1], self.config.dropout)
        return x + dropped(self.down(jax.nn.gelu(self.up(self.mlp_norm(x)))), keys[2], self.config.dropout)


def in_tiles(images: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """[..., rows, columns] -> [..., tokens]: the pixels of a tile follow one another."""
    *leading, rows, columns = images.shape
    tiles = images.reshape(*leading, rows // tile[0], tile[0], columns // tile[1], tile[1])
    return tiles.swapaxes(-3, -2).reshape(*leading, rows * columns)


def rotated(x: jax.Array, places: tuple[np.ndarray, ...]) -> jax.Array:
    """[B, T, heads, d] with rotary positions (Su et al. 2021, arXiv 2104.09864); each axis has a share of d.

    The places along an axis are [T]. Scores depend on their differences alone and not on the size of an image, so that
    what is learned on a small one is of use on a larger one.
    """
    count = x.shape[-1] // (2 * len(places))
    frequencies = LONGEST ** -jnp.linspace(0, 1, count)
    angles = jnp.concatenate([jnp.asarray(place)[:, None, None] * frequencies for place in places], -1)
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
    """What the variants of a model differ in. All drop entries of the attention matrix, except for cuDNN's, where
    `jax.nn.dot_product_attention` has no dropout."""
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
    """Bool [tiles, tiles]: which are at most so many pixels apart along each axis."""
    rows, columns = (place.ravel() for place in np.mgrid[: grid[0] : tile[0], : grid[1] : tile[1]])
    return (np.abs(rows[:, None] - rows) <= reach) & (np.abs(columns[:, None] - columns) <= reach)


def split(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """A key, and so many others."""
    keys = jax.random.split(key, count + 1)
    return keys[0], keys[1:]


def counted(config: Config, tokens: jax.Array, lengths: jax.Array | None) -> jax.Array | None:
    """Bool [B, T]: which tokens tell the class of a row, where not all do: neither padding nor background."""
    if config.background is not None:
        return tokens != config.background
    return None if lengths is None else jnp.arange(tokens.shape[1]) < lengths[:, None]
