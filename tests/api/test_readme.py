"""The Python code in the docs runs: each block of the README alone, the blocks of other pages in order."""

import pathlib
import re

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"


def blocks(page: pathlib.Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
PAGES = [page for page in [*GUIDES, ROOT / "docs/score-programs.md"] if blocks(page)]


def run(page: pathlib.Path) -> dict:
    """Run the blocks of a page in one namespace, and return it."""
    namespace: dict = {}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), namespace)
    return namespace


@pytest.mark.parametrize("block", blocks(README), ids=lambda block: block.strip().splitlines()[-1][:40])
def test_readme_examples_run(block):
    pytest.importorskip("flax")
    exec(compile(block, str(README), "exec"), {})


def test_readme_is_short():
    """At most 1,500 words, as counted by `wc -w`."""
    assert len(README.read_text().split()) <= 1500


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_guides_run(page):
    pytest.importorskip("flax")
    run(page)


def test_the_conversion_of_a_checkpoint_refuses_scales_of_float8():
    pytest.importorskip("flax")
    convert, name = run(ROOT / "docs/guides/mla.md")["convert"], "layer.q_a_proj"
    with pytest.raises(KeyError, match="weight_scale_inv"):
        convert({f"{name}.weight": np.ones((8, 8)), f"{name}.weight_scale_inv": np.ones((1, 1))}, "layer")


def test_several_devices_run():
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    page = run(ROOT / "docs/several-devices.md")
    expected = page["dot_product_attention"](*(jax.device_get(page[x]) for x in "qkv"), is_causal=True)
    np.testing.assert_allclose(page["out"], expected, rtol=1e-5, atol=1e-5)
