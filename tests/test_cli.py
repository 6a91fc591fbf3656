"""`python -m jax_flash`."""

import pathlib
import subprocess
import sys

import jax
import pytest

import jax_flash
from jax_flash.__main__ import main


def test_info_names_versions_and_backends():
    root = pathlib.Path(jax_flash.__file__).parents[1]
    done = subprocess.run([sys.executable, "-m", "jax_flash"], cwd=root, check=True, stdout=subprocess.PIPE, text=True)
    assert f"jax_flash {jax_flash.__version__}, jax {jax.__version__}" in done.stdout
    assert "cpu   fused kernels, instruction set " in done.stdout


@pytest.mark.parametrize(
    ("flags", "implementation"),
    [
        ("--platform cpu", "flash"),
        ("--platform cpu --shape 2 4096 16 128 --causal --dtype bfloat16 --dropout 0.1", "flash"),
        ("--platform cpu --kv-len 77 --kv-heads 2 --value-dim 32 --dtype float64", "flash"),
        ("--platform cpu --window 100 0 --soft-cap 30 --bias --mask --segments", "flash"),
        ("--platform tpu", "xla"),
    ],
)
def test_choose(capsys, flags, implementation):
    assert main(["choose", *flags.split()]) == 0
    chosen, _, reason = capsys.readouterr().out.partition(": ")
    assert chosen == implementation
    assert reason.strip()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--shape 1 64 8 64 --kv-heads 3", "8 heads"),
        ("--shape 1 64 8 -1", "negative"),
        ("--window -1 0", "local_window_size"),
        ("--soft-cap -2", "logits_soft_cap"),
        ("--dropout 1.5", "1.5"),
        ("--shape 1 64 8 512 --platform cpu", "512"),
    ],
)
def test_choose_says_why_there_is_none(capsys, flags, message):
    assert main(["choose", *flags.split()]) == 1
    assert message in capsys.readouterr().err


def test_unknown_flags_and_commands_are_usage_errors(capsys):
    for arguments in (["choose", "--dtype", "int8"], ["chooose"]):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == 2
    assert "usage: python -m jax_flash" in capsys.readouterr().err
