"""`python -m jax_flash io`."""

import pytest

from jax_flash import io_model
from jax_flash.__main__ import main
from jax_flash.io_model import hbm_accesses, report


def test_table(capsys):
    assert main(["io", "--seq-len", "1000", "--head-dim", "32", "--sram", "64KiB", "--dtype", "float32"]) == 0
    table = capsys.readouterr().out
    assert "N = 1000, d = 32, M = 16384 elements of float32" in table
    cells = {
        row[1].strip(): [cell.strip() for cell in row[2:-1]]
        for row in (line.split("│") for line in table.split("\n"))
        if len(row) > 3
    }
    reads, writes = io_model.reads_and_writes("algorithm_4", 1000, 32, 16384)
    standard_backward = hbm_accesses("algorithm_3", 1000, 32, 16384)
    row = cells["4  FlashAttention backward"]
    assert row[:2] == [f"{reads / 1e6:.2f} M", f"{writes / 1e3:.0f} k"]
    assert row[3] == f"{4 * (reads + writes) / 1e6:.2f} MB"
    assert row[4] == f"{standard_backward / (reads + writes):.2f}"
    assert row[5] == f"{10 * 1000**2 * 32 / 1e6:.0f} M"
    assert cells["1  FlashAttention"][6] == "8.00 kB"


@pytest.mark.parametrize(
    ("text", "dtype", "elements"),
    [
        ("192KiB", "float16", 98304),
        ("100 KB", "float32", 25000),
        ("1.5MiB", "float64", 196608),
        ("2MB", "float16", 1000000),
        ("4096", "float32", 4096),
        ("10B", "bfloat16", 5),
    ],
)
def test_sram_sizes(text, dtype, elements):
    assert report.sram_elements(text, dtype) == elements


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 "), (999, "999 "), (999.6, "1.00 k"), (12345, "12.3 k"), (123456789, "123 M"), (4.5e12, "4.50 T")],
)
def test_three_significant_digits(number, text):
    assert report.short(number) == text


def test_figure(tmp_path, capsys):
    path = tmp_path / "io.png"
    assert main(["io", "--seq-len", "300", "--sram", "5000", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--sram 10", "d = 64, M = 10"),
        ("--sram lots", "'lots'"),
        ("--sram 3GB", "'3GB'"),
        ("--sram 1.2.3KiB", "--sram"),
        ("--sram=-5", "'-5'"),
        ("--sram 0", "M = 0"),
        ("--head-dim 0", "d = 0"),
        ("--head-dim -64", "d = -64"),
        ("--seq-len 0", "N = 0"),
        ("--seq-len -3", "N = -3"),
        ("--sparsity 2", "not 2.0"),
        ("--sparsity nan", "not nan"),
        ("--heads 0", "--heads"),
        ("--plot nowhere/io.png", "nowhere/io.png"),
        ("--plot io.nonsense", "nonsense"),
    ],
)
def test_error_messages(capsys, flags, message):
    assert main(["io", *flags.split()]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("package", ["rich.console", "matplotlib"])
def test_missing_packages_are_named(capsys, monkeypatch, tmp_path, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    assert main(["io", "--plot", str(tmp_path / "io.png")]) == 1
    assert f"{package.partition('.')[0]} is not installed: run pip install 'jax-flash[io]'" in capsys.readouterr().err
