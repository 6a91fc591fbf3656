"""The demo at a tiny size, and the other examples: they succeed and write the documented files."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from processes import one_device

pytest.importorskip("flax")
pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs an example in this process. It returns the exit status and what was printed."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*flags: object, example: str = "train_lm.py") -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", [example, *map(str, flags)])
        status: object = 0
        try:
            runpy.run_path(str(EXAMPLES / example), run_name="__main__")
        except SystemExit as exit:
            status = exit.code
        return status, "".join(capsys.readouterr())

    return run


@pytest.fixture
def draw(run, tmp_path):
    """Return a function that runs an example and checks its picture. It returns what was printed."""

    def draw(example: str, *flags: object) -> str:
        status, output = run(*flags, "--output", tmp_path / "picture.png", example=example)
        assert status == 0, output
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
        return output

    return draw


def test_demo(run, tmp_path):
    model = ["--layers", 1, "--width", 16, "--heads", 2, "--kv-heads", 1, "--seq-len", 32]
    training = ["--text-limit", 20_000, "--vocabulary", 100_000, "--batch", 2, "--steps", 8, "--compare-steps", 4]
    checks = ["--long-seq-len", 64, "--prompt", "import os", "--output", tmp_path / "out"]
    status, output = run(*model, *training, *checks)
    assert status == 0, output
    for text in ("tokens/s", "Largest difference", "jax.nn", "import os", "loss.png"):
        assert text in output

    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(written["losses"]) == 8 and len(written["standard_losses"]) == 4
    assert written["largest_difference"] < 1e-4
    assert [row["shape"] for row in written["attention"]] == [[2, 32, 2, 8], [1, 64, 2, 8]]
    assert all(row[name]["seconds"] > 0 for row in written["attention"] for name in ("jax_flash", "jax_nn"))
    assert (tmp_path / "out" / "sample.txt").read_text().startswith("import os")
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_demo_errors(run, tmp_path):
    status, output = run("--width", 100, "--heads", 3)
    assert status == 2 and "--heads 3 must divide --width 100" in output
    status, _ = run("--text-limit", 100, "--output", tmp_path)
    assert "too few for --seq-len 512" in status


def test_pictures_of_programs(draw):
    draw("draw_programs.py")


def test_packed_training(draw):
    """Packed documents have the same losses as one document per row."""
    output = draw("packed_training.py", "--seq-len", 128, "--documents", 8, "--steps", 3, "--width", 16)
    assert float(output.split("Largest difference of the losses: ")[1]) < 1e-4


def test_decoding_with_a_cache(draw):
    output = draw("decode.py", "--prompt", 8, "--length", 32, "--width", 32, "--layers", 1)
    assert "Equal tokens: 100.0%" in output


def test_serving_by_continuous_batching(draw):
    """There are so few pages that a free slot has to wait for them."""
    sizes = ["--requests", 5, "--slots", 3, "--longest", 48, "--pages", 6, "--width", 32, "--layers", 1]
    assert "Tokens equal to those of the sequence alone: 100.0%" in draw("serve.py", *sizes)


def test_latent_attention(draw):
    """The model learns, and serving from the latent cache gives the tokens of the expanded computation."""
    sizes = ["--steps", 40, "--seq-len", 32, "--layers", 1, "--width", 32, "--generate", 12]
    output = draw("latent_attention.py", *sizes)
    losses = [float(line.split("loss ")[1]) for line in output.splitlines() if line.startswith("step ")]
    assert losses[-1] < losses[0] - 1
    assert "Tokens equal to those of the expanded computation: 100.0%" in output


def test_kernel_regression(draw):
    """It learns that the third coordinate has no influence, and removes most of the noise."""
    output = draw("kernel_regression.py", "--points", 400, "--sample", 200, "--steps", 15)
    scales = re.findall(r"length scales \[(.*?)\]", output)[-1].split()
    assert float(scales[0]) < 0.6 < float(scales[2])
    assert float(output.split("Error of the prediction: ")[1].split()[0]) < 0.2


def test_pictures_of_block_masks(draw):
    output = draw("block_mask.py", "--length", 256, "--block", 16, "--heads", 1, "--head-dim", 16)
    assert output.count("times as fast") == 6


def test_vision_transformer_of_odd_length(draw):
    sizes = ["--image", 28, "--batch", 4, "--steps", 2, "--layers", 1, "--width", 16, "--heads", 2]
    output = draw("vision_transformer.py", *sizes)
    assert "50 tokens in an image" in output
    assert float(output.split("materialised attention: ")[1].split()[0]) < 1e-4


def test_mean_flow(draw):
    """A loss with a tangent through attention has the value and the gradients of materialised attention."""
    sizes = ["--image", 8, "--patch", 2, "--batch", 8, "--steps", 30, "--layers", 1, "--width", 16, "--heads", 2]
    output = draw("mean_flow.py", *sizes)
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in output.splitlines() if line.startswith("step ")]
    assert losses[-1] < losses[0]
    assert float(output.split("materialised attention: ")[1]) < 1e-4


@pytest.mark.parametrize("mesh", [(), ("--mesh", 2, 2, 2)], ids=["sequence", "batch, sequence and heads"])
def test_long_sequence_over_several_devices(tmp_path, mesh):
    """Training on one device and on eight gives the same losses. A new process can set the number of devices."""
    sizes = ["--seq-len", 256, "--steps", 4, "--layers", 1, "--width", 16, "--heads", 4]
    flags = map(str, [*sizes, *mesh, "--output", tmp_path / "picture.png"])
    command = [sys.executable, EXAMPLES / "long_sequence.py", *flags]
    output = subprocess.check_output(command, env=one_device(COLUMNS="120"), text=True, timeout=600)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert ("2 × 2 × 2" if mesh else "1 × 8 × 1") in output
    assert float(output.split("Largest difference of the losses: ")[1]) < 1e-5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh", 2, 2, 3], "--mesh 2 2 3 must have a product of 8, the number of devices"),
        (["--mesh", 8, -1, -1], "--mesh 8 -1 -1 must have a product of 8"),
        (["--mesh", 1, 1, 8], "--heads 4 must be a multiple of the 8 devices of `heads`"),
        (["--mesh", 1, 8, 1, "--seq-len", 100], "--seq-len 100 must be a multiple of twice the 8 devices of `seq`"),
        (["--steps", 2], "--steps 2 must be at least 3"),
    ],
)
def test_long_sequence_errors(run, monkeypatch, flags, message):
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)  # the number of devices, too late here
    status, output = run(*flags, example="long_sequence.py")
    assert status == 2 and message in output


def test_learned_score_function(draw):
    """The table of relative positions peaks at the distances that the heads must learn."""
    output = draw("score_function.py", "--seq-len", 128, "--steps", 80, "--distances", 5, 2, "--table-size", 16)
    losses = [float(line.split("loss ")[1]) for line in output.splitlines() if line.startswith("step ")]
    assert losses[0] > 3 and losses[-1] < 0.5
    assert "Peaks of the table: [5, 2]" in output


def test_score_function_errors(run):
    status, output = run("--distances", 31, "--table-size", 32, example="score_function.py")
    assert status == 2 and "--distances must be at least 0" in output
