"""Memory at a length where one head's matrix would take 16 GiB, and arrays of more than 2³¹ elements.

Each test runs in a new process, which measures its peak resident memory after it has made the inputs.
"""

import os
import subprocess
import sys
import textwrap

import pytest

MEASURED = """
    import re
    import jax, jax.numpy as jnp, numpy as np
    import jax_flash

    def resident(kind):
        with open("/proc/self/status") as status:
            return 1024 * int(re.search(kind + r":\\s+(\\d+) kB", status.read())[1])

    def numbers(N, d):  # without temporaries, whose freed memory attention could reuse
        x = jax.jit(lambda: jnp.sin(jnp.arange(N * d, dtype=jnp.float32) ** 1.5).reshape(1, N, 1, d))()
        return jax.block_until_ready(x)

    def extra(function, *args):
        # Return the peak memory above the inputs and the results, and the results.
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")
        before = resident("VmRSS")
        results = jax.block_until_ready(function(*args))
        return resident("VmHWM") - before - sum(x.nbytes for x in results), results
"""


def run(*program):
    program = "".join(map(textwrap.dedent, (MEASURED, *program)))
    # Freed memory must return to the system immediately, or it would hide later allocations.
    environment = os.environ | {"XLA_FLAGS": "", "MALLOC_MMAP_THRESHOLD_": "65536"}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    print(result.stdout)
    assert result.returncode == 0, result.stderr[-5000:]


@pytest.mark.slow
def test_long_sequence():
    """N = 65536, one head of dim 64, forward and backward: at most 64 MiB above the inputs and outputs.

    A window shortens the test. The next test shows that memory does not depend on it.
    """
    run(
        """
        N, d = 65536, 64

        def step(q, k, v, window):
            attend = lambda q, k, v: jax_flash.dot_product_attention(
                q, k, v, local_window_size=window, implementation="flash")
            o, pull = jax.vjp(attend, q, k, v)
            return o, *pull(o)

        step = jax.jit(step, static_argnums=3)
        small = jnp.ones((1, 64, 1, d))
        jax.block_until_ready(step(small, small, small, None))  # memory for imports and compilation
        step = step.lower(*[jax.ShapeDtypeStruct((1, N, 1, d), jnp.float32)] * 3, (255, 256)).compile()
        extra, results = extra(step, *(numbers(N, d) for _ in range(3)))
        print(extra / 2**20, "MiB above inputs and outputs")
        assert all(jnp.isfinite(x).all() for x in results)
        assert 4 * 4 * N <= extra < 64 << 20
        """
    )


@pytest.mark.slow
def test_memory_does_not_depend_on_the_window():
    """A quarter of the length, without a window. The full matrix would take 1 GiB."""
    run(
        """
        N, d = 16384, 64
        step = jax.jit(jax.grad(
            lambda q, k, v: jax_flash.dot_product_attention(q, k, v, implementation="flash").sum(), (0, 1, 2)))
        small = jnp.ones((1, 64, 1, d))
        jax.block_until_ready(step(small, small, small))
        step = step.lower(*[jax.ShapeDtypeStruct((1, N, 1, d), jnp.float32)] * 3).compile()
        extra, results = extra(step, *(numbers(N, d) for _ in range(3)))
        print(extra / 2**20, "MiB above inputs and outputs")
        assert extra < 64 << 20
        """
    )


BIG = """
    lengths = 2**31 // 128 + 2048
    rng = np.random.default_rng(0)
    last = jnp.asarray(rng.normal(size=(80, 128)), jnp.float16)
    few = rng.normal(size=(5, 128)).astype(np.float16)

    def softmax(scores, visible=True):
        p = np.where(visible, np.exp(scores - scores.max(-1, keepdims=True)), 0)
        return p / p.sum(-1, keepdims=True)
"""


@pytest.mark.slow
def test_keys_beyond_2_to_the_31_elements():
    """4 GiB of keys and values, of which only the last are visible."""
    run(
        BIG,
        """
        big = jax.jit(lambda: jnp.zeros((1, lengths, 1, 128), jnp.float16).at[0, -80:, 0].set(last))()
        o = jax_flash.dot_product_attention(
            few[None, :, None], big, big, implementation="flash", scale=0.1, local_window_size=40,
            query_offset=lengths - 5)
        few, last = (np.asarray(x, np.float64) for x in (few, last))
        visible = np.arange(80)[None] - 75 >= np.arange(5)[:, None] - 40
        np.testing.assert_allclose(o[0, :, 0], softmax(0.1 * few @ last.T, visible) @ last, rtol=2e-3, atol=2e-3)
        """,
    )


@pytest.mark.slow
def test_rows_beyond_2_to_the_31_elements():
    """4 GiB of output, which is also the cotangent. The test checks the last rows of the output and of the gradient."""
    run(
        BIG,
        """
        key, value = few[:, :1], few
        query = jnp.zeros((1, lengths, 1, 1), jnp.float16).at[0, -80:, 0].set(last[:, :1])
        attend = lambda query: jax_flash.dot_product_attention(
            query, key[None, :, None], value[None, :, None], implementation="flash", scale=1.0)
        o, pull = jax.vjp(attend, query)
        (dq,) = pull(o)
        q, k, v = (np.asarray(x, np.float64) for x in (last[:, :1], key, value))
        p = softmax(q @ k.T)
        expected = p @ v
        np.testing.assert_allclose(o[0, -80:, 0], expected, rtol=2e-3, atol=2e-3)
        do = np.asarray(o[0, -80:, 0], np.float64)
        dp = do @ v.T
        ds = p * (dp - (p * dp).sum(-1, keepdims=True))
        np.testing.assert_allclose(dq[0, -80:, 0], ds @ k, rtol=1e-2, atol=2e-2)
        """,
    )
