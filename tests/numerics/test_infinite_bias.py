"""A bias of -inf masks its entry like a mask, for any value of the score_mod at -inf."""

import infinite_bias
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case

import jax_flash

IMPLEMENTATIONS = {"flash": "float32", "xla": "float64", "reference": "float64"}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("make", "case"),
    [
        (infinite_bias.bounded, Case(bias="bnts", soft_cap=2.0, sinks=2.0)),
        (infinite_bias.replaced, Case(bias="1n1s", causal=True, K=4)),
        (infinite_bias.capped, Case(bias="b1t1", lengths=True, dropout=0.3)),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_results(make, case, implementation):
    infinite_bias.check(case, make(case), implementation, IMPLEMENTATIONS[implementation])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_infinite_score(implementation):
    """The sum of an infinite score and a bias of -inf is NaN."""
    key, value = (np.repeat(np.float32(x), 8).reshape(1, 2, 1, 8) for x in ([1e30, 0], [1, 2]))
    o = jax_flash.dot_product_attention(
        np.full((1, 1, 1, 8), 1e30, np.float32),
        key,
        value,
        bias=np.array([-np.inf, 0], np.float32).reshape(1, 1, 1, 2),
        score_mod=lambda s, b, h, q, k: jnp.where(s > -1, s, 1.0),
        implementation=implementation,
    )
    np.testing.assert_array_equal(o, 2)
