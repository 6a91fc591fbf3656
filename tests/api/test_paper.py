"""The paper's claims: what is compared computes attention, and what is measured becomes tables and figures."""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="a source package has no benchmarks")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

TABLES = [f"paper {name}" for name in ("gpt2 problem", "gpt2 counters", "gpt2 operators")]
TABLES += [f"paper {name}" for name in ("figure2", "figure3", "checkpointing", "memory")]


@pytest.fixture
def imported(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # of a GPU, processes that are started need some, too
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module


def arrays(length):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, length, 2, 16))
    return q, k, v, np.array([length, length - 19], np.int32)


EXACT = [("chunked", {"q_chunk": 16, "k_chunk": 32}), ("local", {}), ("flash", {}), ("xla", {})]


@pytest.mark.parametrize("name, sizes", EXACT)
def test_exact_ways_are_standard_attention(imported, name, sizes):
    """With their gradients."""
    attentions = imported("benchmarks.paper.attentions")
    *qkv, lengths = arrays(64)

    def both(attend, **sizes):
        o, pull = jax.vjp(lambda *qkv: attend(*qkv, lengths, **sizes), *qkv)
        return o, *pull(o)

    for x, expected in zip(both(getattr(attentions, name), **sizes), both(attentions.standard), strict=True):
        np.testing.assert_allclose(x, expected, atol=5e-5)


def test_standard_attention_has_a_causal_mask(imported):
    attentions = imported("benchmarks.paper.attentions")
    q, k, v, lengths = arrays(64)
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True, key_value_seq_lengths=lengths)
    np.testing.assert_allclose(attentions.standard(q, k, v, lengths, causal=True), expected, atol=2e-5)


def test_local_attention_sees_its_neighbours_alone(imported):
    attentions = imported("benchmarks.paper.attentions")
    q, k, v, lengths = arrays(64)
    changed = attentions.local(q, k.at[:, :16].add(1), v.at[:, :16].add(1), lengths, size=16)
    same = np.isclose(changed, attentions.local(q, k, v, lengths, size=16)).all((0, 2, 3))
    assert not same[:32].any() and same[32:].all()


def test_linformer_with_all_keys_is_standard_attention(imported):
    attentions = imported("benchmarks.paper.attentions")
    q, k, v, _ = arrays(64)
    o = attentions.linformer(q, k, v, projection=np.eye(64, dtype=np.float32))
    np.testing.assert_allclose(o, attentions.standard(q, k, v), atol=2e-5)


@pytest.mark.parametrize("name", ["standard", "chunked", "local"])
def test_dropout_keeps_the_expectation(imported, name):
    attentions = imported("benchmarks.paper.attentions")
    q, k, _, lengths = arrays(256)
    o = getattr(attentions, name)(q, k, np.ones_like(k), lengths, jax.random.key(1, impl="rbg"))
    assert 0.99 < o.mean() < 1.01 and o.std() > 1e-3


def test_kernels_are_read_from_the_profiler(imported):
    metrics = imported("benchmarks.paper.sections.gpt2_counters").METRICS.values()
    names = ",".join(f'"{name}"' for name in ("ID", "Kernel Name", *metrics))
    text = f'==PROF== Connected\n{names}\n"","","byte","byte","inst","ns"\n"0","a<b, c>","1,024","32","7","1500.5"\n'
    kernels = imported("benchmarks.paper.sections.gpt2_counters").parsed(text)
    assert kernels == [
        {"name": "a<b, c>", "bytes_read": 1024, "bytes_written": 32, "instructions": 7, "nanoseconds": 1500.5}
    ]


def test_table_of_counters(imported):
    cells, _ = imported("cells"), imported("paper.tables")
    rows = [
        {"implementation": name, "mask": mask, "dropout": dropout, "bytes_written": 1e9}
        | {"bytes_read": 8e9 if name == "standard" else 1e9, "instructions": 1e9 * (1 + mask + dropout)}
        for name in ("standard", "jax_flash")
        for mask in (False, True)
        for dropout in (False, True)
    ]
    made = cells.TABLES["paper gpt2 counters"]({"rows": rows, "missing": {"cudnn": "no cuDNN"}}).splitlines()
    assert made[-3:] == ["| jax_flash, both | 1.00 | 1.00 | 4.5 | 3.00 | 3.00 |", "", "Not counted, cudnn: no cuDNN"]


def test_claims_of_figure3(imported):
    cells, _ = imported("cells"), imported("paper.tables")

    def row(method, length, milliseconds):
        failure = None if milliseconds else "RESOURCE_EXHAUSTED: Out of memory"
        return {"method": method, "length": length, "milliseconds": milliseconds, "bytes": 2**20, "failure": failure}

    times = {"standard": (3, 20, None), "chunked": (9, 9, 9), "jax_flash": (1, 4, 16)}
    times |= {"linformer": (2, 3, 5), "local": (2, 5, 20), "xla": (2, 24, None), "without_dropout": (1, 3, 12)}
    rows = [row(x, n, t) for x, all_times in times.items() for n, t in zip((128, 512, 4096), all_times, strict=True)]
    lines = cells.TABLES["paper figure3"]({"rows": rows}).splitlines()
    assert "| times as fast as standard attention, N = 128 to 2048 | up to 3 | 3.0 to 5.0 |" in lines
    assert "| as the faster of the two at each length | – | 2.0 to 5.0 |" in lines
    assert "| Linformer is faster | from N = 512 to 1024 on | from N = 512 on |" in lines
    assert "| local attention is faster | from N = 512 to 1024 on | nowhere |" in lines
    assert "| memory of standard attention ÷ ours | up to 20 | 1.0 (N = 512) |" in lines
    assert "| standard attention | 3.000 | 20 | out of memory |" in lines


def make_results(imported, path, minutes=5.0, fresh=False, **common):
    results = imported("benchmarks.paper.results").Results(
        path, {"devices": ["cpu"], "python": "3", "versions": {}, "date": "today"}, minutes, fresh
    )
    results.begin(**common)
    return results


def test_a_section_goes_on_from_its_file(imported, tmp_path):
    path, called = tmp_path / "paper_x.json", []

    def rows_of(length):
        called.append(length)
        return [{"method": method, "time": float("nan")} for method in "ab"]

    make_results(imported, path, shape=(1, 2)).measure([{"length": 1}], rows_of)
    again = make_results(imported, path, shape=(1, 2))
    again.measure([{"length": 1}, {"length": 2}], rows_of)
    assert called == [1, 2]
    rows = [{"length": n, "method": method, "time": None} for n in (1, 2) for method in "ab"]
    assert json.loads(path.read_text()) == {"environment": again.environment, "shape": [1, 2], "rows": rows}
    assert make_results(imported, path, shape=(1, 2), fresh=True).rows == []
    assert make_results(imported, path, shape=(1, 3)).rows == []
    assert make_results(imported, path, shape=(1, 2)).rows == rows


def test_a_section_stops_when_its_minutes_are_over(imported, tmp_path):
    results = make_results(imported, tmp_path / "paper_x.json", minutes=0.0)
    with pytest.raises(imported("benchmarks.paper.results").OutOfTime, match="length = 1, pass = forward; length = 2"):
        results.measure([{"length": 1, "pass": "forward"}, {"length": 2, "pass": "forward"}], None)


def test_a_failure_leaves_the_others_to_be_measured(imported):
    passes, attentions = imported("benchmarks.paper.passes"), imported("benchmarks.paper.attentions")
    given = passes.operands((2, 32, 2, 16), True, True)
    found = passes.measured(
        {name: lambda x=name: passes.program(getattr(attentions, x), passes.BOTH, given) for name in ("xla", "flash")}
    )
    assert found["xla"] == (None, None, "jax.nn.dot_product_attention has no dropout")
    assert found["flash"].milliseconds > 0 and found["flash"].failure is None
    assert found["flash"].program.repeats == passes.REPEATS


def test_what_a_profiler_has_started_ends_with_its_time(imported, monkeypatch, tmp_path):
    counters = imported("benchmarks.paper.sections.gpt2_counters")
    monkeypatch.setattr(counters, "TIMEOUT", 1)
    written = tmp_path / "written"
    with pytest.raises(subprocess.TimeoutExpired):
        counters.finished(["sh", "-c", f"(sleep 2; echo > {written}) & wait"], dict(os.environ))
    time.sleep(2)
    assert not written.exists()


@pytest.mark.slow
def test_every_section_runs_small_and_becomes_its_table(imported, tmp_path):
    tables, main = imported("tables"), imported("benchmarks.paper.__main__")
    made = [name for name in TABLES if name != "paper gpt2 counters"]  # which take a GPU
    files = [file for name in made for file in tables.FILES[name]]
    sections = [name for name in main.SECTIONS if f"paper_{name}" in files]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    for module in (["benchmarks.paper", *sections, "--quick", "--output"], ["benchmarks.paper.figures", "--results"]):
        command = [sys.executable, "-m", *module, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
    results = {file: json.loads((tmp_path / f"{file}.json").read_text()) for file in files}
    for name in made:
        assert tables.TABLES[name](*(results[file] for file in tables.FILES[name])).startswith("| ")
    command = results["paper_memory"]["environment"]["command"]
    assert command == "python -m benchmarks.paper memory --quick"
    for figure in ("figure2", "figure3"):
        assert (tmp_path / f"paper_{figure}.png").read_bytes().startswith(b"\x89PNG")
