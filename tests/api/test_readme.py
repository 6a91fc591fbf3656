"""The README's Python runs as it stands, block after block."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parents[2] / "README.md"


def test_readme_examples_run():
    pytest.importorskip("flax")
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    assert namespace["dq"].shape == (2, 1024, 8, 64)
    assert namespace["y"].shape == (2, 128, 512)
