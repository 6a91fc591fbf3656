"""The Python of the README and of the guides runs as it stands, block after block."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))


def run(page: pathlib.Path) -> dict:
    """What the blocks of a page define."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert blocks
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)
    return namespace


def test_readme_examples_run():
    pytest.importorskip("flax")
    namespace = run(ROOT / "README.md")
    assert namespace["dq"].shape == (2, 1024, 8, 64)
    assert namespace["y"].shape == (2, 128, 512)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_guides_run(page):
    pytest.importorskip("flax")
    run(page)
