"""Evaluation of a program at the entries of a tile in plain JAX."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_flash.operands import Operands
from jax_flash.programs.program import Captured, Program


def evaluate(
    program: Program,
    described: Sequence[Captured],
    tile: Operands,
    rows: jax.Array,
    columns: jax.Array,
    s: jax.Array | None = None,
    visible: jax.Array | None = None,
) -> jax.Array:
    """Return the values of a program at each entry of a tile: [B, N, R, C].

    Masked entries are evaluated at the inputs of some visible entry, so their derivatives stay finite. A derivative of
    a masked entry is multiplied by 0, which gives NaN if it is infinite, as in causal log(query - key + 1).
    A tile without visible entries has no derivative.

    Args:
      described: the captured arrays of the problem.
      tile: the operands at these rows and columns.
      rows, columns: int32 [R] and [C], the positions in the call's own arrays.
      s: [B, N, R, C], the scores that a score_mod gets. A mask_mod has none.
      visible: bool [B|1, N|1, R, C], the visible entries. Only for a score_mod.
    """
    assert tile.program_batch is not None and tile.program_head is not None
    offset = jnp.zeros_like(tile.program_batch) if tile.query_offset is None else tile.query_offset
    if tile.origin is not None:
        offset, columns = offset + tile.origin[1], columns + tile.origin[1]
    shaped = [x.reshape(len(x), *of.shape) for x, of in zip(tile.captured, described, strict=True) if x is not None]
    places = (tile.program_batch, tile.program_head, offset[:, None] + rows[None], columns)
    if s is None or visible is None or not s.size:
        return program.on_tile(shaped, s, *places)
    missing = ((1, 2, 3), (0, 2, 3), (1, 3), (0, 1, 2))  # the dims that batch, head, query and key do not have
    full = [jnp.broadcast_to(jnp.expand_dims(x, dims), s.shape) for x, dims in zip(places, missing, strict=True)]
    visible = jnp.broadcast_to(visible, s.shape)
    first, some = jnp.argmax(visible), visible.any()
    shaped = [jnp.where(some, x, jax.lax.stop_gradient(x)) for x in shaped]
    inputs = (jnp.where(visible, x, jax.lax.stop_gradient(x.ravel()[first])) for x in (s, *full))
    return program.on_tile(shaped, *inputs)
