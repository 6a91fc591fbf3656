"""Properties that only a GPU can show: TF32, sizes and memory, determinism, CUDA graphs, streams, several devices.

Other tests check the results of the kernels on CPU and GPU (the fixture `device`).
"""

import functools
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import check_tf32
from cases import FEATURES, Case
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.test_util import check_grads

import jax_flash

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


@pytest.fixture(scope="module")
def gpu():
    before = jax.config.jax_default_device
    jax.config.update("jax_default_device", jax.devices("gpu")[0])
    yield jax.devices("gpu")[0]
    jax.config.update("jax_default_device", before)


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def run_program(program, *arguments):
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    result = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cuda"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-5000:]
    return result.stdout


attend = functools.partial(jax_flash.dot_product_attention, implementation="flash")


# --- numbers ---


@pytest.mark.parametrize("case", [case for case in FEATURES if case.E % 8 == 0], ids=str)
def test_tf32(case):
    """At default precision, the error is at most twice the error of standard attention on TF32 operands."""
    check_tf32(case, draws=4)


def test_tf32_large_scores():
    """Forward and backward must round scores in the same way, because exp amplifies differences."""
    check_tf32(Case(T=130, S=150, D=64, E=64, spread=12.0, scale=1.0), draws=8)


@pytest.mark.parametrize("D", range(8, 129, 8))
def test_tf32_head_dim(D):
    check_tf32(Case(B=1, T=70, S=90, N=2, K=1, D=D, E=D, causal=True))
    check_tf32(Case(B=1, T=133, S=1150, N=1, K=1, D=D, E=136 - D, lengths=True))


def test_first_derivatives_against_finite_differences():
    q, k, v = (normal(i, 1, 20, 2, 8, dtype=jnp.float32) for i in range(3))
    with jax.default_matmul_precision("highest"):
        check_grads(functools.partial(attend, is_causal=True), (q, k, v), 1, ["rev"], atol=2e-2, rtol=2e-2, eps=1e-2)


def test_f64_is_refused():
    with jax.enable_x64(True), pytest.raises(Exception, match="float64"):
        attend(*(normal(i, 1, 8, 1, 8, dtype=jnp.float64) for i in range(3))).block_until_ready()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_forward_is_reproducible(dtype):
    q, k, v = (normal(i, 2, 1000, 4, 64, dtype=dtype) for i in range(3))
    function = jax.jit(lambda q, k, v: attend(q, k, v, is_causal=True, return_residual=True))
    first = function(q, k, v)
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, function(q, k, v), first)


SEGMENTS = np.searchsorted([3, 400, 401, 700], np.arange(1100), side="right")[None].repeat(2, 0)
SEPARATE_KEY_RANGES = {
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (100, 0)},
    "both sides": {"local_window_size": (30, 90), "query_offset": np.array([-200, 300], "int32")},
    "segments": {"is_causal": True, "query_segment_ids": SEGMENTS, "key_value_segment_ids": SEGMENTS},
    "soft cap": {"is_causal": True, "logits_soft_cap": 5.0},
}


@pytest.mark.parametrize("options", SEPARATE_KEY_RANGES.values(), ids=SEPARATE_KEY_RANGES)
def test_tiles_of_256_queries(options):
    """Hopper's forward uses these if there are more than SMs. Their warpgroups have separate key ranges."""
    q, k, v = (normal(i, 2, 1100, heads, 64) for i, heads in enumerate((40, 8, 8)))
    function = jax.jit(functools.partial(attend, **options))
    first = function(q, k, v)
    for _ in range(20):
        np.testing.assert_array_equal(function(q, k, v), first)
    expected = jax_flash.dot_product_attention(q, k, v, implementation="xla", **options)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (first, expected)), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [64, 128, 256, 320, 512])
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"local_window_size": (300, 0)}, {"query_seq_lengths": np.array([2000, 700])}],
    ids=str,
)
def test_deterministic_backward_is_reproducible(options, dim, dtype):
    q, k, v = (normal(i, 2, 2000, h, dim, dtype=dtype) for i, h in enumerate((16, 8, 8)))
    sinks = normal(4, 16, dtype=dtype)

    def gradient(**deterministic):
        def loss(q, k, v, sinks):
            o = attend(q, k, v, sinks=sinks, **options, **deterministic)
            return (o.astype(jnp.float32) ** 2).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))

    same = gradient(deterministic=True)
    first = same(q, k, v, sinks)
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, same(q, k, v, sinks), first)
    for x, expected in zip(first, gradient()(q, k, v, sinks), strict=True):
        x, expected = np.asarray(x, np.float32), np.asarray(expected, np.float32)
        np.testing.assert_allclose(x, expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("equal", [False, True], ids=["different lengths", "equal lengths"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_deterministic_backward_of_packed_sequences(dim, causal, equal):
    q, k, v = (normal(i, 5000, h, dim) for i, h in enumerate((16, 8, 8)))
    ends = np.array([0, 100, 100, 1500, 1503, 4900])
    key_ends = ends if equal else np.array([0, 100, 700, 2000, 2400, 5000])

    def gradient(**options):
        def loss(q, k, v):
            o = jax_flash.varlen_attention(q, k, v, ends, key_ends, is_causal=causal, **options)
            return (o.astype(jnp.float32) ** 2).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))

    same = gradient(deterministic=True)
    first = same(q, k, v)
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, same(q, k, v), first)
    for x, expected in zip(first, gradient()(q, k, v), strict=True):
        x, expected = np.asarray(x, np.float32), np.asarray(expected, np.float32)
        np.testing.assert_allclose(x, expected, atol=0.02 * np.abs(expected).max())


def test_deterministic_backward_with_a_bias():
    q, k, v = (normal(i, 2, 1000, h, 64) for i, h in enumerate((4, 2, 2)))
    bias, sinks = normal(3, 1, 4, 1, 1000), normal(4, 4)

    def loss(q, k, v, bias, sinks):
        o = attend(q, k, v, bias, is_causal=True, sinks=sinks, deterministic=True)
        return (o.astype(jnp.float32) ** 2).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4)))
    first = gradient(q, k, v, bias, sinks)
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, gradient(q, k, v, bias, sinks), first)


def test_block_mask_with_short_lists():
    """The single-kernel backward, with far more lists than SMs, and more heads than its scratch holds at a time."""
    arrays = [normal(i, 2, 4096, 24, 64) for i in range(4)]
    block_mask = jax_flash.patterns.local_window(4096, 4096, 300, 300)

    def gradients(**options):
        return jax.jit(lambda q, k, v, do: jax.vjp(functools.partial(attend, **options), q, k, v)[1](do))

    sparse, expected = gradients(block_mask=block_mask), gradients(local_window_size=(300, 300))(*arrays)
    for _ in range(10):
        for x, y in zip(sparse(*arrays), expected, strict=True):
            x, y = (np.asarray(z, np.float32) for z in (x, y))
            assert np.linalg.norm(x - y) <= 0.004 * np.linalg.norm(y)


HOPPER_TESTS = ["test_feature and bfloat16", "test_feature and float16", "(test_head_dim or test_long) and bfloat16"]
HOPPER_TESTS += ["(test_head_dim or test_long) and float16", "test_tf32"]


@pytest.mark.parametrize("tests", HOPPER_TESTS)
def test_every_kernel_family(tests):
    """Run Ampere's kernels for inputs that would use Hopper's by default: 16-bit dtypes and TF32."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    command += ["numerics/test_accuracy.py", "gpu", "-k", f"({tests}) and not test_every_kernel_family"]
    environment = os.environ | {"JAX_FLASH_CUDA_KERNELS": "sm80"}
    result = subprocess.run(command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-5000:]


# --- sizes ---


@functools.partial(jax.jit, static_argnames="window")
def last_rows(q, k, v, window):
    """Standard attention in float32 for the last rows, at most 64, of the last head of the last batch entry."""
    q, k, v = (x[-1, :, -1].astype(jnp.float32) for x in (q, k, v))
    T, S = min(k.shape[0], 64), min(k.shape[0], (window or k.shape[0]) + 64)
    s = jnp.matmul(q[-T:], k[-S:].T, precision="highest") / np.sqrt(q.shape[-1])
    i, j = jnp.arange(T)[:, None], jnp.arange(S)[None] - (S - T)
    visible = (j <= i) & (j >= i - window if window is not None else True)
    p = jax.nn.softmax(jnp.where(visible, s, -jnp.inf))
    return jnp.matmul(p, v[-S:], precision="highest")


@pytest.mark.parametrize("N", [1, 2, 3, 63, 64, 65, 1000, 4096, 16383, 65536])
def test_length(N):
    """The forward, and the backward from the last rows."""
    q, k, v = (normal(i, 1, N, 2, 64) for i in range(3))
    o, pull = jax.vjp(lambda *x: attend(*x, is_causal=True)[0, -64:, -1].astype(jnp.float32), q, k, v)
    expected, expected_pull = jax.vjp(lambda *x: last_rows(*x, None), q, k, v)
    np.testing.assert_allclose(o, expected, atol=0.02)
    do = normal(3, *expected.shape, dtype=jnp.float32)
    for ours, theirs in zip(pull(do), expected_pull(do), strict=True):
        ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
        assert np.linalg.norm(ours - theirs) <= 0.02 * np.linalg.norm(theirs) + 1e-4


def test_more_than_2_31_elements():
    """Forward and backward. A window shortens the test."""
    shape = (2, 65536, 128, 136)
    q, k, v = (normal(i, *shape) for i in range(3))

    @jax.jit
    def step(q, k, v):
        o, pull = jax.vjp(lambda *x: attend(*x, local_window_size=(100, 0)), q, k, v)
        return o, *pull(o)

    o, *gradients = step(q, k, v)
    np.testing.assert_allclose(o[-1, -64:, -1].astype(jnp.float32), last_rows(q, k, v, 100), atol=0.03)
    last = [x[-1:, -256:, -1:] for x in (q, k, v)]
    expected = step(*last)
    for ours, part in zip(gradients, expected[1:], strict=True):
        ours, part = (x[0, -100:, 0].astype(jnp.float32) for x in (ours[-1:, -256:, -1:], part))
        np.testing.assert_allclose(ours, part, atol=0.03)


@pytest.mark.parametrize("causal", [False, True])
def test_more_heads_than_scratch(causal):
    """The backward has scratch for 108 or 212 heads at a time. Calls with fewer heads give the same results."""
    q, k, v = (normal(i, 2, 640, 268 if causal else 150, 64) for i in range(3))

    @jax.jit
    def gradients(q, k, v):
        o, pull = jax.vjp(lambda *x: attend(*x, is_causal=causal), q, k, v)
        return pull(o)

    heads = 50
    parts = [gradients(*(x[:, :, i : i + heads] for x in (q, k, v))) for i in range(0, q.shape[2], heads)]
    for ours, *expected in zip(gradients(q, k, v), *parts, strict=True):
        np.testing.assert_allclose(ours, jnp.concatenate(expected, 2), atol=0.03)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "N", "kv_heads"), [(1, 1000, 1), (4, 1000, 8), (4, 1000, 16), (1, 65536, 8)])
def test_grouped_heads(batch, N, kv_heads, causal, dim):
    """The backward has several loops for heads that share keys. The results equal those with repeated keys."""
    shape = batch, N, 48, dim
    q, do = normal(0, *shape), normal(1, *shape)
    k, v = (normal(i, batch, N, kv_heads, dim) for i in (2, 3))

    @jax.jit
    def gradients(q, k, v):
        return jax.vjp(lambda *x: attend(*x, is_causal=causal), q, k, v)[1](do)

    dq, *per_head = gradients(q, *(jnp.repeat(x, 48 // kv_heads, 2) for x in (k, v)))
    expected = dq, *(x.astype(jnp.float32).reshape(*k.shape[:3], -1, dim).sum(3) for x in per_head)
    for ours, exact in zip(gradients(q, k, v), expected, strict=True):
        np.testing.assert_allclose(ours.astype(jnp.float32), exact, atol=0.02 * float(jnp.abs(exact).max()))


def test_long_sequence_before_short_ones():
    """CTAs that finish short sequences wait for scratch of the long one, and must not keep it from others."""
    q, k, v = (normal(i, 24, 12800, 1, 64) for i in range(3))
    lengths = jnp.ones(24, jnp.int32).at[0].set(12800)

    @jax.jit
    def gradients(q, k, v, lengths):
        o, pull = jax.vjp(lambda *x: attend(*x, query_seq_lengths=lengths), q, k, v)
        return pull(o)

    for ours, alone in zip(gradients(q, k, v, lengths), gradients(q[:1], k[:1], v[:1], lengths[:1]), strict=True):
        np.testing.assert_allclose(ours[:1], alone, atol=0.03)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("N", "dim"), [(1000, 64), (1000, 128), (4096, 64), (4096, 128)])
def test_gradient_of_a_table(N, dim, causal):
    """The gradient of a table of relative positions equals the gradient of the bias, summed along its diagonals."""
    q, k, v, do = (normal(i, 1, N, 2, dim) for i in range(4))
    distances = jnp.arange(N)[:, None] - jnp.arange(N) + N - 1

    def by_program(table):
        return attend(q, k, v, is_causal=causal, score_mod=lambda s, b, h, i, j: s + table[h, i - j + N - 1])

    def by_bias(table):
        return attend(q, k, v, table[:, distances][None], is_causal=causal)

    table = normal(4, 2, 2 * N - 1, dtype=jnp.float32)
    found, expected = (jax.jit(lambda x, f=f: jax.vjp(f, x)[1](do)[0])(table) for f in (by_program, by_bias))
    assert float(jnp.linalg.norm(found - expected)) <= 0.01 * float(jnp.linalg.norm(expected))


@pytest.mark.parametrize("causal", [False, True])
def test_slopes_of_long_distances(causal):
    """Compare ALiBi with and without a query offset. With one, each distance is converted to float separately."""
    q, k, v, do = (normal(i, 1, 65536, 2, 64) for i in range(4))

    @jax.jit
    def results(offset):
        def alibi(s, b, h, i, j):
            return s + 0.7 * jnp.exp2(-8.0 * h) * (j - i if causal else -jnp.abs(j - i))

        o, pull = jax.vjp(lambda *x: attend(*x, is_causal=causal, score_mod=alibi, query_offset=offset), q, k, v)
        return o, *pull(do)

    for ours, expected in zip(results(None), results(jnp.zeros(1, jnp.int32)), strict=True):
        x, y = (z.astype(jnp.float32) for z in (ours, expected))
        assert float(jnp.linalg.norm(x - y)) <= 0.004 * float(jnp.linalg.norm(y))


def test_million_keys():
    q, k, v = (normal(i, 1, 2**20, 1, 64) for i in range(3))
    o = attend(q, k, v, is_causal=True)
    np.testing.assert_allclose(o[0, -64:, 0].astype(jnp.float32), last_rows(q, k, v, None), atol=0.01)


def linear_memory(N, dim):
    """Return 105% of the bytes of q, k, v, O, their gradients, the statistics and one float32 dQ, for 4 heads."""
    arrays, statistics, dq = 8 * 2 * 4 * N * dim, 4 * 4 * 4 * N, 4 * 4 * N * dim
    return 1.05 * (arrays + statistics + dq) + 2**20


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("N", [1024, 16384, 262144])
def test_memory_is_linear(N, dim):
    """Check the memory that XLA plans."""
    x = jax.ShapeDtypeStruct((1, N, 4, dim), jnp.bfloat16)

    def step(q, k, v, do):
        o, pull = jax.vjp(functools.partial(attend, is_causal=True), q, k, v)
        return o, *pull(do)

    memory = jax.jit(step).lower(x, x, x, x).compile().memory_analysis()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert used <= linear_memory(N, dim)


@pytest.mark.parametrize("dim", [64, 128])
def test_peak_memory(dim):
    """Check the peak of the device's allocator for 262144 keys."""
    N = 262144
    program = """
        import sys
        import jax
        import ml_dtypes
        import numpy as np
        import jax_flash

        shape = (1, int(sys.argv[1]), 4, int(sys.argv[2]))
        rng = np.random.default_rng(0)
        arrays = [rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for _ in range(4)]

        def step(q, k, v, do):
            o, pull = jax.vjp(lambda *x: jax_flash.dot_product_attention(*x, is_causal=True), q, k, v)
            return o, *pull(do)

        results = jax.block_until_ready(jax.jit(step)(*map(jax.device_put, arrays)))
        assert all(bool(jax.numpy.isfinite(x[0, -1]).all()) for x in results)
        print(jax.devices()[0].memory_stats()["peak_bytes_in_use"])
    """
    peak = int(run_program(program, N, dim))
    assert peak <= linear_memory(N, dim)


# --- XLA ---


def test_cuda_graphs(tmp_path):
    """XLA captures all calls of a program in one CUDA graph, and launches it with other arrays."""
    program = """
        import functools, pathlib, sys
        import jax
        import jax.numpy as jnp
        import numpy as np
        import jax_flash

        attend = functools.partial(jax_flash.dot_product_attention, implementation="flash", is_causal=True)
        folder = pathlib.Path(sys.argv[1])
        mask = jax_flash.patterns.local_window(300, 300, 150, None)

        def step(q, k, v, segments):
            options = {"query_segment_ids": segments, "key_value_segment_ids": segments}
            o, pull = jax.vjp(functools.partial(attend, **options), q, k, v)
            sparse, pull_sparse = jax.vjp(functools.partial(attend, block_mask=mask), q, k, v)
            long = (jnp.concatenate([x] * 4, axis=1) for x in (k, v))
            decoded = attend(q[:, :1], *long, query_offset=1000)
            return o, *pull(o), sparse, *pull_sparse(o), decoded, attend(*(x.astype(jnp.float32) for x in (q, k, v)))

        def arrays(seed):
            rng = np.random.default_rng(seed)
            qkv = (jnp.asarray(rng.normal(size=(2, 300, 4, 64)), jnp.bfloat16) for _ in range(3))
            return *qkv, np.sort(rng.integers(0, 3, (2, 300)).astype(np.int32))

        inputs = [arrays(seed) for seed in range(4)]
        lowered = jax.jit(step).lower(*inputs[0])
        plain = lowered.compile({"xla_gpu_graph_min_graph_size": 10**6})
        captured = lowered.compile({
            "xla_gpu_graph_min_graph_size": 1,
            "xla_enable_command_buffers_during_profiling": True,
            "xla_dump_to": str(folder),
        })

        captured(*inputs[0])
        with jax.profiler.trace(folder):
            results = jax.block_until_ready([captured(*x) for x in inputs])
        for x, result in zip(inputs, results):
            for ours, expected in zip(result, plain(*x)):
                np.testing.assert_allclose(ours.astype(jnp.float32), expected.astype(jnp.float32), atol=0.02)

        # The compiled program: unindented operations are launched, those inside a graph are indented.
        (path,) = folder.glob("*thunk_sequence_after_thunk_passes.txt")
        operations = path.read_text().splitlines()
        launched = [line for line in operations if line.strip() and not line.startswith(" ")]
        assert len(launched) == 1 and "kCommandBuffer" in launched[0], operations
        assert sum("kCustomCall" in line for line in operations) == 6, operations

        # The driver's calls.
        (path,) = folder.rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        events = [event.name for plane in planes for line in plane.lines for event in line.events]
        assert sum("cuGraphLaunch" in name for name in events) == len(inputs), sorted(set(events))
    """
    run_program(program, tmp_path)


def test_streams_of_several_threads():
    q, k, v = (normal(i, 2, 512, 4, 64) for i in range(3))
    functions = [jax.jit(functools.partial(attend, scale=0.1 + 0.01 * i)) for i in range(8)]
    expected = [f(q, k, v) for f in functions]
    wrong = []

    def work(i):
        for _ in range(50):
            if not (functions[i](q, k, v) == expected[i]).all():
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_several_devices():
    devices = jax.devices("gpu")
    if len(devices) < 2:
        pytest.skip("one GPU only")
    mesh = jax.make_mesh((len(devices),), ("x",), devices=devices)
    q, k, v = (normal(i, 2 * len(devices), 300, 8, 64) for i in range(3))

    def step(q, k, v):
        o, pull = jax.vjp(functools.partial(attend, is_causal=True, deterministic=True), q, k, v)
        return o, *pull(o)

    expected = jax.jit(step)(q, k, v)
    for spec in (PartitionSpec("x"), PartitionSpec(None, None, "x")):
        sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v)]
        compiled = jax.jit(step).lower(*sharded).compile()
        assert "all-gather" not in compiled.as_text()
        jax.tree.map(np.testing.assert_array_equal, list(map(np.asarray, compiled(*sharded))), list(expected))
    parts = [x.reshape(len(devices), 2, *x.shape[1:]) for x in (q, k, v)]
    pmapped = jax.pmap(step, devices=devices)(*parts)
    for x, y in zip(pmapped, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(x).reshape(y.shape), y)


@pytest.mark.parametrize("how", ["contiguous", "zigzag", "jit"])
@pytest.mark.parametrize("K", [1, 4])
def test_sequence_over_several_devices(K, how):
    devices = jax.devices("gpu")
    if len(devices) < 2:
        pytest.skip("one GPU only")
    mesh = jax.make_mesh((len(devices),), ("x",), (AxisType.Auto,), devices=devices)
    length, spec = 512 * len(devices), PartitionSpec(None, "x")
    q, k, v = (normal(i, 2, length, heads, 64) for i, heads in enumerate((4, K, K)))

    def step(q, k, v, **options):
        options |= {"is_causal": True, "dropout_rate": 0.2, "dropout_key": jax.random.key(3)}
        o, pull = jax.vjp(functools.partial(attend, **options), q, k, v)
        return o, *pull(o)

    if how == "jit":
        ours = jax.jit(step)(*(jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v)))
    else:
        mapped = jax.shard_map(
            functools.partial(step, sequence_axis="x", sequence_layout=how),
            mesh=mesh,
            in_specs=(spec,) * 3,
            out_specs=(spec,) * 4,
        )
        lay, back = (
            functools.partial(f, devices=len(devices), axis=1) if how == "zigzag" else (lambda x: x)
            for f in (jax_flash.zigzag, jax_flash.unzigzag)
        )
        ours = map(back, jax.jit(mapped)(*map(lay, (q, k, v))))
    for x, expected in zip(ours, jax.jit(step)(q, k, v), strict=True):
        x, expected = (np.asarray(y, np.float32) for y in (x, expected))
        assert np.abs(x - expected).max() <= 2e-2 * np.abs(expected).max()
