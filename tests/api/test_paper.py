"""The benchmarks of the paper's claims: compared methods compute attention; results become tables and figures."""

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
from processes import one_device

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="a source package has no benchmarks")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

TABLES = [f"paper {name}" for name in ("gpt2 problem", "gpt2 counters", "gpt2 operators")]
TABLES += [f"paper {name}" for name in ("figure2", "figure3", "checkpointing", "memory")]


@pytest.fixture
def imported(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # subprocesses share the GPU's memory
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module


def arrays(length):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, length, 2, 16))
    return q, k, v, np.array([length, length - 19], np.int32)


EXACT = [("chunked", {"q_chunk": 16, "k_chunk": 32}), ("local", {}), ("flash", {}), ("xla", {})]


@pytest.mark.parametrize("name, sizes", EXACT)
def test_exact_methods_equal_standard_attention(imported, name, sizes):
    """Compare results and gradients."""
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


def test_local_attention_sees_only_neighbours(imported):
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
def test_dropout_preserves_the_mean(imported, name):
    attentions = imported("benchmarks.paper.attentions")
    q, k, _, lengths = arrays(256)
    o = getattr(attentions, name)(q, k, np.ones_like(k), lengths, jax.random.key(1, impl="rbg"))
    assert 0.99 < o.mean() < 1.01 and o.std() > 1e-3


def test_profiler_output_is_parsed(imported):
    metrics = imported("benchmarks.paper.sections.gpt2_counters").METRICS.values()
    names = ",".join(f'"{name}"' for name in ("ID", "Kernel Name", *metrics))
    text = f'==PROF== Connected\n{names}\n"","","byte","byte","inst","ns"\n"0","a<b, c>","1,024","32","7","1500.5"\n'
    kernels = imported("benchmarks.paper.sections.gpt2_counters").parse(text)
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
    assert "| speed-up over standard attention, N = 128 to 2048 | up to 3 | 3.0 to 5.0 |" in lines
    assert "| speed-up over the faster of the two at each length | – | 2.0 to 5.0 |" in lines
    assert "| Linformer is faster | from N = 512 to 1024 on | from N = 512 on |" in lines
    assert "| local attention is faster | from N = 512 to 1024 on | nowhere |" in lines
    assert "| memory of standard attention ÷ jax_flash | up to 20 | 1.0 (N = 512) |" in lines
    assert "| standard attention | 3.000 | 20 | out of memory |" in lines


def step(attention, length, tokens_per_second, **others):
    """Return a row of a training step. A speed of None means out of memory."""
    row = {"attention": attention, "length": length, "dropout": 0.1, "attention_dropout": 0.1, "batch": 4} | others
    if tokens_per_second is None:
        return row | {"failure": "RESOURCE_EXHAUSTED: Out of memory"}
    speeds = {"steps_per_second": 2.0, "tokens_per_second": tokens_per_second, "model_flop_utilisation": 0.25}
    return row | speeds | {"failure": None, "bytes": 2e9}


def test_table_of_gpt2(imported):
    cells, _ = imported("cells"), imported("paper.tables")
    rows = [step("standard", 1024, 1e4), step("cudnn", 1024, 3e4, attention_dropout=0.0), step("flash", 1024, 2e4)]
    rows += [step("standard", 4096, None), step("flash", 4096, 15e3)]
    lines = cells.TABLES["paper gpt2 small"]({"rows": rows}).splitlines()
    assert "| jax_flash, N = 1024 | 1.7 (Megatron-LM), 3.5 (Hugging Face) | 2.00 |" in lines
    assert "| jax_flash, N = 4096 | 1.3 | 1.50 |" in lines
    assert "| N = 1024, dropout 0.1, jax_flash | 4 | 2.00 | 20.0 | 25.0 | 2.0 | 2.00 |" in lines
    assert "| N = 1024, dropout 0.1, cuDNN, no dropout in attention | 4 | 2.00 | 30.0 | 25.0 | 2.0 | – |" in lines
    assert "| N = 4096, dropout 0.1, standard attention | 4 | out of memory | – | – | – | – |" in lines
    assert "| N = 4096, dropout 0.1, jax_flash | 4 | 2.00 | 15.0 | 25.0 | 2.0 | – |" in lines


def test_table_of_bert(imported):
    cells, _ = imported("cells"), imported("paper.tables")
    rows = [step("standard", 512, 1e4), step("flash", 512, 13e3)]
    lines = cells.TABLES["paper bert"]({"rows": rows}).splitlines()
    assert "| speed-up | 1.15 (over NVIDIA's MLPerf 1.1) | 1.30 (over standard attention) |" in lines


def test_table_of_curves(imported):
    cells, _ = imported("cells"), imported("paper.tables")
    rows = [
        {"attention": "standard", "training": [5.0, 4.0], "held_out": [4.5], "failure": None},
        {"attention": "cudnn", "failure": "no cuDNN"},
        {"attention": "flash", "training": [5.0, 4.001], "held_out": [4.5002], "failure": None},
    ]
    gaps = {"standard and flash": {"training": 0.001, "held_out": 0.0002}}
    results = {"rows": rows, "largest_gap": gaps, "steps": 2, "every": 2, "training_bytes": 3e6, "held_out_bytes": 5e5}
    lines = cells.TABLES["paper gpt2 curves"](results).splitlines()
    assert "| standard attention and jax_flash | 0.0010 | 0.0002 |" in lines
    assert lines[-4:-2] == ["| cuDNN | – | – |", "| jax_flash | 4.0010 | 4.5002 |"]
    assert lines[-1] == "The text has 3.0 MB to train on, and 0.5 MB are held out."
    curves = imported("benchmarks.paper.figures").gpt2_curves(results).axes[0].lines
    assert [(line.get_label(), [*line.get_xdata()], [*line.get_ydata()]) for line in curves] == [
        ("standard attention", [2], [4.5]),
        ("jax_flash", [2], [4.5002]),
    ]


def test_table_of_contexts(imported):
    cells, _ = imported("cells"), imported("paper.tables")
    perplexities = {(1024, 0): 3.0, (4096, 0): 2.75, (1024, 1): 3.5, (4096, 1): 3.0}
    results = {
        "rows": [
            {"length": length, "seed": seed, "perplexity": perplexity, "seconds_a_step": length / 1e4}
            for (length, seed), perplexity in perplexities.items()
        ],
        "perplexity": {"1024": {"mean": 3.25, "spread": 0.5}, "4096": {"mean": 2.875, "spread": 0.25}},
        "difference": {"mean": -0.375, "spread": 0.125, "interval": [-1.5, 0.75], "confidence": 0.95},
        "training_bytes": 3e6,
        "held_out_bytes": 5e5,
        "bytes_seen": 2e6,
        "steps": 10,
    }
    lines = cells.TABLES["paper gpt2 context"](results).splitlines()
    assert lines[0] == "|  | N = 1024 | N = 4096 | difference |"
    assert "| perplexity per byte, seed 1 | 3.5000 | 3.0000 | -0.5000 |" in lines
    assert "| mean of the seeds | 3.2500 | 2.8750 | -0.3750 |" in lines
    assert "| 95% interval of the mean | – | – | -1.5000 to +0.7500 |" in lines
    assert lines[-1].endswith("Each model was trained on 2.0 MB, half of them in its own 10 steps.")


def test_tables_of_long_range_arena(imported):
    cells, _ = imported("cells"), imported("paper.tables")
    speeds = {"listops": (1e4, 2e4, 8e4), "text": (1e4, 8e4, None)}
    rows = [
        step(name, 1024, speed, task=task, kept_blocks=0.25)
        for task, task_speeds in speeds.items()
        for name, speed in zip(("standard", "flash", "block-sparse"), task_speeds, strict=True)
    ]
    lines = cells.TABLES["paper lra speed"]({"rows": rows}).splitlines()
    assert "| jax_flash | 2.4 | 4.00 | 2.00 | 8.00 |" in lines
    assert "| jax_flash, block-sparse | 2.8 | – | 8.00 | – |" in lines
    assert "The block-sparse mask keeps this share of the blocks: 25% (listops), 25% (text)." in lines

    tested = {"accuracy": 0.375, "interval": [0.35, 0.4], "chance": 0.125, "failure": None}
    rows = [{"task": "listops", "attention": "flash", "seed": seed} | tested for seed in (0, 1)]
    rows += [{"task": "text", "attention": "flash", "seed": 0} | tested]
    rows += [{"task": "text", "attention": "flash", "seed": 1, "failure": "out of memory"}]
    lines = cells.TABLES["paper lra accuracy"]({"rows": rows}).splitlines()
    per_seed = "37.5 (35.0 to 40.0)"
    assert f"| listops, jax_flash | 37.6 | 12.5 | {per_seed} | {per_seed} | 37.5 |" in lines
    assert f"| text, jax_flash | – | 12.5 | {per_seed} | – | – |" in lines


def test_table_of_pathfinder(imported):
    cells, _ = imported("cells"), imported("paper.tables")
    stage = {"attention": "flash", "kept_blocks": 1.0, "steps": 7, "images_seen": 5000, "seconds": 240.0}
    stage |= {"training": [0.7, 0.6], "device": "a GPU", "devices": 1, "targets": True}
    rows = [
        stage | {"side": 128, "length": 16384, "accuracy": 0.75, "interval": [0.7, 0.8], "targets": False},
        stage | {"side": 256, "length": 65536, "attention": "block-sparse", "kept_blocks": 0.1},
    ]
    lines = cells.TABLES["paper pathfinder"]({"rows": [*rows, rows[0] | {"devices": 4}]}).splitlines()
    assert lines[4] == lines[2].replace("a GPU", "4 a GPU")
    assert lines[2:4] == [
        "| 128 × 128, N = 16384 | labels only | jax_flash, 100% of the blocks | a GPU | 7 | 5.0 | 4.0 | 0.600 "
        "| 61.4 (Path-X) | 75.0 (70.0 to 80.0) |",
        "| 256 × 256, N = 65536 | pixels and labels | jax_flash, block-sparse, 10% of the blocks | a GPU | 7 | 5.0 "
        "| 4.0 | 0.600 | 63.1 (Path-256) | – |",
    ]


def make_results(imported, path, minutes=5.0, fresh=False, **common):
    results = imported("benchmarks.paper.results").Results(
        path, {"devices": ["cpu"], "python": "3", "versions": {}, "date": "today"}, minutes, fresh
    )
    results.begin(**common)
    return results


def test_section_resumes_from_its_file(imported, tmp_path):
    path, called = tmp_path / "paper_x.json", []

    def measure(length):
        called.append(length)
        return [{"method": method, "time": float("nan")} for method in "ab"]

    make_results(imported, path, shape=(1, 2)).measure([{"length": 1}], measure)
    again = make_results(imported, path, shape=(1, 2))
    again.measure([{"length": 1}, {"length": 2}], measure)
    assert called == [1, 2]
    rows = [{"length": n, "method": method, "time": None} for n in (1, 2) for method in "ab"]
    assert json.loads(path.read_text()) == {"environment": again.environment, "shape": [1, 2], "rows": rows}
    assert make_results(imported, path, shape=(1, 2), fresh=True).rows == []
    assert make_results(imported, path, shape=(1, 3)).rows == []
    assert make_results(imported, path, shape=(1, 2)).rows == rows


def test_section_stops_at_its_time_limit(imported, tmp_path):
    results = make_results(imported, tmp_path / "paper_x.json", minutes=0.0)
    with pytest.raises(imported("benchmarks.paper.results").OutOfTime, match="length = 1, pass = forward; length = 2"):
        results.measure([{"length": 1, "pass": "forward"}, {"length": 2, "pass": "forward"}], None)


def test_failure_does_not_stop_other_measurements(imported):
    passes, attentions = imported("benchmarks.paper.passes"), imported("benchmarks.paper.attentions")
    given = passes.operands((2, 32, 2, 16), True, True)
    found = passes.measured(
        {name: lambda x=name: passes.program(getattr(attentions, x), passes.BOTH, given) for name in ("xla", "flash")}
    )
    assert found["xla"] == (None, None, "jax.nn.dot_product_attention has no dropout")
    assert found["flash"].milliseconds > 0 and found["flash"].failure is None
    assert found["flash"].program.repeats == passes.REPEATS


def test_timeout_ends_all_processes_of_the_profiler(imported, monkeypatch, tmp_path):
    counters = imported("benchmarks.paper.sections.gpt2_counters")
    monkeypatch.setattr(counters, "TIMEOUT", 1)
    written = tmp_path / "written"
    with pytest.raises(subprocess.TimeoutExpired):
        counters.run_to_end(["sh", "-c", f"(sleep 2; echo > {written}) & wait"], dict(os.environ))
    time.sleep(2)
    assert not written.exists()


@pytest.mark.slow
def test_every_section_in_quick_mode(imported, tmp_path):
    tables, main = imported("tables"), imported("benchmarks.paper.__main__")
    made = [name for name in TABLES if name != "paper gpt2 counters"]  # needs a GPU
    files = [file for name in made for file in tables.FILES[name]]
    sections = [name for name in main.SECTIONS if f"paper_{name}" in files]
    for module in (["benchmarks.paper", *sections, "--quick", "--output"], ["benchmarks.paper.figures", "--results"]):
        command = [sys.executable, "-m", *module, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, env=one_device(), capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
    results = {file: json.loads((tmp_path / f"{file}.json").read_text()) for file in files}
    for name in made:
        assert tables.TABLES[name](*(results[file] for file in tables.FILES[name])).startswith("| ")
    command = results["paper_memory"]["environment"]["command"]
    assert command == "python -m benchmarks.paper memory --quick"
    for figure in ("figure2", "figure3"):
        assert (tmp_path / f"paper_{figure}.png").read_bytes().startswith(b"\x89PNG")
