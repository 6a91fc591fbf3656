"""The site from `make docs` has no warnings, lists the API in order of use, and ranks guides first in searches."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import jax_flash

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "benchmarks/results").exists(), reason="a source package has no results"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("furo", reason="needs the extra `docs`")
    folder = tmp_path_factory.mktemp("docs")
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-c", "docs", "-d", folder / "doctrees"]
    command = [sys.executable, "-m", "sphinx", *options, ".", folder / "site"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return folder / "site"


def signatures(site: pathlib.Path, module: str) -> dict[str, str]:
    """Return the text of each signature on a module's page, by object name, in the page's order."""
    page = (site / f"docs/api/{module}.html").read_text()
    found = re.findall(r'<dt class="sig[^>]* id="([^"]+)">(.*?)</dt>', page, flags=re.DOTALL)
    return {name: " ".join(re.sub("<[^>]+>", "", text).split()) for name, text in found}


def test_api_page_has_public_names_only(site):
    shown = [name.removeprefix("jax_flash.") for name in signatures(site, "jax_flash")]
    assert shown[0] == "dot_product_attention"
    assert {name for name in shown if "." not in name} == {*jax_flash.__all__} - {"kernels", "patterns"}
    assert not {"BlockMask.row_lists", "BlockMask.tree_flatten", "Problem.encode", "Statistics.of_bits"} & {*shown}


def test_signatures_have_types_and_all_arguments(site):
    function = signatures(site, "jax_flash")["jax_flash.dot_product_attention"]
    assert "mask: ArrayLike | None = None" in function and "sequence_layout: SequenceLayout | None = None" in function
    nnx = signatures(site, "nnx")["jax_flash.nnx.MultiHeadAttention"]
    assert "num_heads: int" in nnx and "is_causal: bool = False" in nnx and "&lt;" not in nnx
    assert "key_dim" in signatures(site, "keras")["jax_flash.keras.MultiHeadAttention"]
    assert signatures(site, "jax_flash")["jax_flash.Choice.reason"].startswith("reason: str")


def test_search_ranks_guides_first_and_contributor_pages_last(site):
    node = shutil.which("node")
    if node is None:
        pytest.skip("Sphinx searches in JavaScript, which needs node")
    search = """
      const window = globalThis, document = { getElementById: () => null }, SPHINX_HIGHLIGHT_ENABLED = false;
      const _ready = () => {}, _ = (text) => text;
      %s;
      const pages = (query) => Search._performSearch(...Search._parseQuery(query)).map(([page]) => page).reverse();
      console.log(JSON.stringify(["segment", "dropout", "zigzag"].map(pages)));
    """
    scripts = ["_static/language_data.js", "_static/searchtools.js", "searchindex.js"]
    code = search % "\n".join((site / name).read_text() for name in scripts)
    done = subprocess.run([node], input=code, capture_output=True, text=True, check=True)
    segment, dropout, zigzag = json.loads(done.stdout)
    assert segment[0] == "docs/guides/packed-training"
    assert zigzag[0] == "docs/api/jax_flash"

    toctree = (ROOT / "docs/contributors.md").read_text().split("```")[1]
    last = {f"docs/{page}".replace("docs/../", "") for page in toctree.split()} | {"docs/contributors", "CHANGELOG"}
    for pages in (segment, dropout):
        are_last = [page in last or page.startswith("docs/design/") for page in pages]
        assert any(are_last) and are_last == sorted(are_last)
