"""benchmarks/exchange.py with a synthetic profile: concurrent work hides an exchange."""

import importlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="a source package has no benchmarks")


@pytest.fixture
def exchange(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("exchange")


def test_summary(exchange):
    """In milliseconds: attention 0-4 and 6-8, a merge 4-5, exchanges 1-3 (hidden), 4.5-7 (1 exposed) and 9-10."""
    profile = [
        ("jax_flash_forward", 0, 4),
        ("ncclDevKernel_SendRecv", 1, 3),
        ("loop_multiply_fusion", 4, 5),
        ("ncclDevKernel_SendRecv", 4.5, 7),
        ("jax_flash_forward", 6, 8),
        ("ncclDevKernel_SendRecv", 9, 10),
    ]
    found = exchange.summary([exchange.Event(name, start * 1e6, end * 1e6) for name, start, end in profile])
    assert found == {
        "attention": 6,
        "others": 1,
        "exchange": 5.5,
        "exchange alone": 2,
        "nothing": 1,
        "all": 10,
        "longest of the others": {"loop_multiply_fusion": 1},
    }


def test_needs_several_gpus(exchange, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["exchange.py"])
    with pytest.raises(SystemExit):
        exchange.main()
    assert "this benchmark needs at least two GPUs" in capsys.readouterr().err


def test_overlapping_times_count_once(exchange):
    events = [exchange.Event("x", *times) for times in ((5, 6), (0, 3), (1, 2), (2, 4))]
    assert exchange.covered(events) == 5
    assert exchange.covered([]) == 0
