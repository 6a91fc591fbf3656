"""Calls with a part of the rows and keys. Masks, dropout and programs use positions in the full sequence."""

import jax.numpy as jnp
import parts
import programs
import pytest
from cases import Case

pytestmark = pytest.mark.usefixtures("device")

TOLERANCES = {"float32": 5e-5, "bfloat16": 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "case",
    [
        Case(B=2, T=64, S=96, N=2, K=1, D=16, E=8, dropout=0.3, segments=True),
        Case(B=1, T=320, S=352, N=2, K=1, D=64, E=64, causal=True, dropout=0.3),
        Case(B=1, T=320, S=352, N=2, K=2, D=128, E=128, window=(200, 3), offset=True, dropout=0.01),
    ],
    ids=str,
)
def test_dropout_and_masks(case, dtype):
    parts.check(case, dtype, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("make", [programs.alibi, programs.relative_table, programs.kinds_of_heads])
def test_programs(make, dtype):
    case = Case(B=1, T=320, S=352, N=2, K=1, D=64, E=64)
    mod = make(case)
    parts.check(case, dtype, TOLERANCES[dtype], **{mod.kind: mod.make(*map(jnp.asarray, mod.arrays))})


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "case",
    [
        Case(B=2, T=160, S=192, N=2, K=1, D=16, E=8, causal=True, segments="mixed", dropout=0.3),
        Case(B=1, T=320, S=352, N=2, K=2, D=64, E=64, window=(200, 3), segments="mixed", dropout=0.3),
        Case(B=1, T=320, S=320, N=2, K=1, D=128, E=128, window=(200, 30), segments=True),
    ],
    ids=str,
)
def test_chunks(case, dtype):
    """Ranges together with segment ids, and the dropout mask by tables of tiles."""
    parts.check_chunks(case, dtype, TOLERANCES[dtype])
