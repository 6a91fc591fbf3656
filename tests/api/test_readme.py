"""The Python of the README and of the pages for users runs as it stands, block after block."""

import pathlib
import re

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs/guides").glob("*.md")), ROOT / "docs/score-programs.md"]


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_guides_run(page):
    pytest.importorskip("flax")
    run(page)


def test_several_devices_run():
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    page = run(ROOT / "docs/several-devices.md")
    expected = page["dot_product_attention"](*(jax.device_get(page[x]) for x in "qkv"), is_causal=True)
    np.testing.assert_allclose(page["out"], expected, rtol=1e-5, atol=1e-5)
