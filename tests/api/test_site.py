"""The site is made of the docs and the docstrings without a warning: `make docs`."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_the_site_is_made(tmp_path):
    pytest.importorskip("furo", reason="needs the extra `docs`")
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-c", "docs", "-d", tmp_path / "doctrees"]
    command = [sys.executable, "-m", "sphinx", *options, ".", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    page = (tmp_path / "site/docs/api/jax_flash.html").read_text()
    assert "drop-in for" in page and "sequence_layout" in page  # the docstring, and a signature with all options
