"""Sharded calls in two processes of four devices each, and the example in one process and in two."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from processes import one_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="processes would share the GPUs")

EXAMPLE = Path(__file__).parents[2] / "examples" / "packed_sequence.py"

CALLS = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import functools
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jax_flash

inputs = np.random.default_rng(0).normal(size=(3, 2, 512, 8, 16)).astype(np.float32)
on_host = functools.partial(jax.tree.map, jax.numpy.asarray)
ids = np.repeat(np.arange(4), 128)[None].repeat(2, 0)

def gradients(q, k, v, ids, **options):
    def loss(q, k, v):
        o = jax_flash.dot_product_attention(q, k, v, query_segment_ids=ids, key_value_segment_ids=ids, **options)
        return o, o
    o, pull, o = jax.vjp(loss, q, k, v, has_aux=True)
    return (o, *pull(jax.numpy.cos(o)))

for shape, spec in (((8, 1), P(None, "a")), ((2, 4), P("a", "b")), ((8, 1), P(None, None, "a"))):
    for options in ({"is_causal": True}, {"local_window_size": (40, 9), "dropout_rate": 0.3}):
        options = {"dropout_key": jax.random.key(1), **options}
        expected = jax.jit(functools.partial(gradients, **options))(*inputs, ids)
        mesh = jax.make_mesh(shape, ("a", "b"), (AxisType.Auto,) * 2)
        rows = NamedSharding(mesh, P(*spec[:2]))
        put = lambda x, place: jax.make_array_from_callback(x.shape, place, lambda index: x[index])
        arrays = [put(x, NamedSharding(mesh, spec)) for x in inputs]
        with jax.set_mesh(mesh):
            found = jax.jit(functools.partial(gradients, **options))(*arrays, put(ids, rows))
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(process_allgather(x, tiled=True), y, rtol=2e-5, atol=2e-5)
print("equal")
"""


def in_two_processes(*command):
    """Run a command in two processes. It is formatted with the coordinator's address and the number of the process."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, *(part.format(address=address, process=i) for part in command)],
            env=one_device(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        results = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], [error[-2000:] for _, error in results]
    return [output for output, _ in results]


def losses(output, devices):
    (line,) = re.findall(rf"^{devices} devices: losses ([\d. ]+);", output, re.MULTILINE)
    return np.array(line.split(), float)


def test_calls(tmp_path):
    """Under jit: a sequence, batch and sequence, and heads, over the devices of both processes."""
    script = tmp_path / "calls.py"
    script.write_text(CALLS)
    for output in in_two_processes(str(script), "{address}", "{process}"):
        assert output.splitlines()[-1] == "equal"


def test_example():
    """One device, eight devices of one process and four devices of each of two processes give the same losses."""
    sizes = ["--tokens", "2048", "--steps", "3", "--width", "16"]
    one = subprocess.run(
        [sys.executable, EXAMPLE, *sizes], env=one_device(), capture_output=True, text=True, timeout=300, check=True
    ).stdout
    assert float(one.split("Largest difference of the losses: ")[1]) < 2e-3
    where = ["--coordinator", "{address}", "--processes", "2", "--process", "{process}"]
    outputs = in_two_processes(str(EXAMPLE), *sizes, *where)
    for output in outputs:
        np.testing.assert_allclose(losses(output, 8), losses(one, 8), atol=2e-3)
