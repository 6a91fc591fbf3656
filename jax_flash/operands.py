"""The arrays of the three custom calls: `Operands`, and names and dims of every operand and result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from jax_flash import _native

# The dtypes of query, key and value.
DTYPES = ("float16", "bfloat16", "float32", "float64")


class Operands(NamedTuple):
    """The arrays of one problem, in the order of the custom calls' operands. Absent operands are None.

    B batch, T query length, S key/value length, N query heads, K key/value heads, D query/key dim, E value dim.
    """

    query: jax.Array  # [B, T, N, D]
    key: jax.Array  # [B, S, K, D]
    value: jax.Array  # [B, S, K, E]
    scale: jax.Array  # [], the accumulation dtype; positive for the fused calls
    key_pages: jax.Array | None = None  # [pages, page, K, D], replaces key; the next replaces value
    value_pages: jax.Array | None = None  # [pages, page, K, E]
    page_table: jax.Array | None = None  # [B, S / page], int32, the page numbers of each batch entry
    bias: jax.Array | None = None  # [B|1, N|1, T|1, S|1], any float dtype
    mask: jax.Array | None = None  # [B|1, N|1, T|1, S|1], bool
    sinks: jax.Array | None = None  # [B|1, N|1, 1, 1], the accumulation dtype, one more logit in each row's softmax
    query_seq_lengths: jax.Array | None = None  # [B], int32
    key_value_seq_lengths: jax.Array | None = None  # [B], int32
    query_segment_ids: jax.Array | None = None  # [B, T], int32
    key_value_segment_ids: jax.Array | None = None  # [B, S], int32
    keys_of_rows: jax.Array | None = None  # [B, T, 2], int32: the first key that a row sees, and the end
    rows_of_keys: jax.Array | None = None  # [B, S, 2], int32: the first row that sees a key, and the end
    query_offset: jax.Array | None = None  # [B], int32
    row_tiles: jax.Array | None = None  # [T / 16], int32, the global index of each tile of 16 rows
    key_tiles: jax.Array | None = None  # [S / 16], int32
    # [2], int32, multiples of 16, the global indices of the first row and key. In a divided call, a layout's chunks.
    origin: jax.Array | None = None
    blocks: jax.Array | None = None  # [B|1, N|1, U, V], int32, as in BlockMask; so are the next three
    row_lists: jax.Array | None = None  # [B|1, N|1, U, 2 + W], int32
    column_lists: jax.Array | None = None  # [B|1, N|1, V, 2 + W], int32
    element_masks: jax.Array | None = None  # [B|1, P, q_block, words], uint32
    seed: jax.Array | None = None  # [B, 2], uint32
    batch_id: jax.Array | None = None  # [B], uint32
    head_id: jax.Array | None = None  # [N], uint32
    program_batch: jax.Array | None = None  # [B], int32, the batch indices that programs receive
    program_head: jax.Array | None = None  # [N], int32, the head indices that programs receive
    captured: tuple[jax.Array | None, ...] = ()  # [B|1, elements] each, the arrays that programs read

    def arrays(self) -> dict[str, jax.Array]:
        """Return the arrays that are present, by name."""
        named = self._asdict() | dict(zip(CAPTURED, self.captured, strict=False))
        return {name: x for name, x in named.items() if name != "captured" and x is not None}

    @classmethod
    def of(cls, arrays: Mapping[str, jax.Array | None]) -> Operands:
        """Create operands from arrays by name. Other names are ignored."""
        named = {**arrays, "captured": tuple(arrays[name] for name in CAPTURED if name in arrays)}
        return cls._make(named.get(name) for name in cls._fields)

    def replaced(self, arrays: Mapping[str, jax.Array]) -> Operands:
        """Return the operands with these arrays replaced or added."""
        return Operands.of(self.arrays() | dict(arrays))


# The captured arrays of a problem and their gradients.
CAPTURED = tuple(f"captured{i}" for i in range(_native.MAX_CAPTURED))
DCAPTURED = tuple(f"dcaptured{i}" for i in range(_native.MAX_CAPTURED))

# The tables below follow from the tables in common/tables.h. `do` has another name there, because it is a C++ keyword.
_OPERANDS = _native.operands()
_RESULTS = [(name.replace("d_o", "do"), dims) for name, dims in _native.results()]

# The operand of each gradient.
DIFFERENTIATED = {gradient: name for name, _, _, gradient, _ in _OPERANDS if gradient}
_ROLES = {name: role for name, _, _, _, role in _OPERANDS if role}
DIFFERENTIATED |= dict(zip(DCAPTURED, CAPTURED, strict=True))

# The dims of each array after its leading dims. T and S are lengths, N and K heads, D and E head dims, and U and V
# block rows and columns. There are G pages of A keys, and M of a batch entry. "1" is a dim of size 1. For the other
# letters, only the size matters.
DIMS: dict[str, Sequence[str]] = {
    **{name: dims.removeprefix("B") for name, dims, *_ in _OPERANDS},
    **{name: (name,) for name in CAPTURED},
    **{f"{name}_tangent": (name,) for name in CAPTURED},
    **{name: dims.removeprefix("B") for name, dims in _RESULTS},
}
DIMS |= {"m_bits": DIMS["m"], "m_bits64": (*DIMS["m"], "1")}  # m as integer words (`bits.py`)
DIMS |= {gradient: DIMS[name] for gradient, name in DIFFERENTIATED.items()}

# The tangent of each operand that may have one, as an operand of the tangent call.
TANGENTS = {name: f"{name}_tangent" for name in DIFFERENTIATED.values()}


def array_of(name: str) -> str:
    """Return the name in `DIMS` for a name such as "query" or "tangent 1 of query"."""
    return name.split()[-1]


# The operands without leading dims.
UNBATCHED = tuple(name for name, dims, *_ in _OPERANDS if not dims.startswith("B"))

BLOCK_MASK = ("blocks", "row_lists", "column_lists", "element_masks")
# The operands with an `Extent`, except for the arrays of a block mask.
BROADCAST = tuple(name for name, _, broadcast, *_ in _OPERANDS if broadcast and name not in BLOCK_MASK)
# Operands that a batch may share. All or none of the arrays in a group are shared.
SHARED_IN_BATCH = (*((name, f"{name}_tangent") for name in (*BROADCAST, *CAPTURED)), BLOCK_MASK)
# The gradients of operands that batch entries or heads may share. They are summed, and have the shape of the operand.
SHARED_GRADIENTS = tuple(gradient for gradient, name in DIFFERENTIATED.items() if name in (*BROADCAST, *CAPTURED))
# The operands that join each row once, after all keys. For their gradients, the custom call returns the contributions
# of rows, [B, N, T]. JAX sums them.
ONCE_A_ROW = tuple(name for name, role in _ROLES.items() if role == "once a row")
PER_ROW = tuple(gradient for gradient, name in DIFFERENTIATED.items() if name in ONCE_A_ROW)
# The operands with a gradient that no score depends on.
OUTSIDE_SCORES = tuple(name for name, role in _ROLES.items() if role != "scores")
