"""Tables in the docs match the committed results, links are valid, and pages and pictures follow their rules."""

import fnmatch
import importlib
import pathlib
import re
import subprocess
import sys
import unicodedata

import pytest

import jax_flash
from jax_flash import _native
from jax_flash.operands import BLOCK_MASK, BROADCAST

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks/results").exists(), reason="a source package has no results")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("tables")


def test_tables_match_results():
    done = subprocess.run([sys.executable, ROOT / "benchmarks/tables.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_table_is_used(tables):
    shown = {name for page in PAGES for _, name, *_ in tables.BLOCK.findall(page.read_text())}
    assert shown == set(tables.TABLES)


def test_check_finds_a_changed_figure(tables, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- table: dropout -->\n<!-- end -->\n\nText.\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PAGES", [page])
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    tables.main()
    written = page.read_text()
    row = next(line for line in written.splitlines() if line.startswith("| d = 64 | "))
    assert written.endswith("<!-- end -->\n\nText.\n")

    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    tables.main()
    capsys.readouterr()
    changed = row.replace(" / ", " / 9", 1)
    page.write_text(written.replace(row, changed))
    with pytest.raises(SystemExit, match="run `python benchmarks/tables.py`"):
        tables.main()
    found = capsys.readouterr().out
    assert f"-{changed}" in found and f"+{row}" in found
    assert changed in page.read_text()  # a check writes nothing


def test_unknown_table_is_an_error(tables):
    with pytest.raises(SystemExit, match="unknown table 'nothing'; the tables are .*summary, "):
        tables.filled("<!-- table: nothing -->\n<!-- end -->", ROOT / "README.md")


def test_readme_picture(tables, tmp_path):
    pytest.importorskip("matplotlib")
    importlib.import_module("picture").draw(tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_citation_has_this_version():
    assert f"\nversion: {jax_flash.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_changelog_begins_with_this_version_or_unreleased():
    """The release workflow requires this version."""
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1]
    assert newest in ("Unreleased", jax_flash.__version__)


def test_oldest_jax_is_consistent():
    oldest = re.search(r"^OLDEST_JAX = (.+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1]
    project = (ROOT / "pyproject.toml").read_text()
    assert f'"jax>={oldest}", "jaxlib>={oldest}"' in project and f'"jaxlib=={oldest};' in project
    assert f"| jax | {oldest} or later |" in (ROOT / "docs/guides/what-to-expect.md").read_text()


def test_performance_is_short(tables):
    """At most 12 tables, and 1,500 words outside them, as counted by `wc -w`."""
    text = (ROOT / "docs/performance.md").read_text()
    assert len(tables.BLOCK.sub("", text).split()) <= 1500
    assert text.count("\n| ---") <= 12


def anchors(text):
    """Return the anchors that GitHub generates for the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    kept = ("".join(c for c in h.lower() if c in " -_" or unicodedata.category(c)[0] in "LN") for h in headings)
    return {heading.replace(" ", "-") for heading in kept}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = page if path == "" else page.parent / path
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target.read_text()))):
            broken.append(link)
    assert not broken


def test_pictures_fit_light_and_dark_pages():
    """Pictures in pages have a transparent background, and no black ink."""
    image = pytest.importorskip("matplotlib.image")
    shown = {page.parent / path for page in PAGES for path in re.findall(r"!\[[^]]*\]\((\S+\.png)\)", page.read_text())}
    assert shown
    for path in shown:
        picture = image.imread(path)
        opaque = picture[picture[..., 3] > 0.9]
        assert picture[0, 0, 3] == 0 and opaque[:, :3].max(-1).min() > 0.2, path.name


def documented(declaration: str, name: str, dtype: str, dims: str, condition: str) -> str:
    """Return a row of the operand table in docs/contract.md, from a row of the table in common/tables.h."""
    sizes = {
        "G": "pages",
        "A": "page",
        "M": "S / page",
        "R": "row_list_size",
        "C": "column_list_size",
        "P": "element_masks",
    }
    sizes |= {"Q": "q_block", "W": "⌈kv_block / 32⌉", "X": "2", "H": "⌈T / 16⌉", "I": "⌈S / 16⌉"}
    if name in (*BROADCAST, *BLOCK_MASK):
        sizes |= {dim: f"{dim} or 1" for dim in "BNTS"}
    shape = ", ".join(sizes.get(dim, dim) for dim in dims)
    types = {"int32_t": "s32", "uint32_t": "u32", "uint8_t": "pred"}
    dtype = types.get(declaration, re.sub(r"p\.|\(\)", "", dtype).replace("accumulation_dtype", "accumulation dtype"))
    condition = re.sub(r" \?.*|p\.|\(\)", "", condition).replace("==", "=").replace("true", "always")
    return f"| {name} | [{shape}] | {dtype} | {condition} |"


def test_contract_lists_the_operands():
    header, _, _ = (ROOT / "common/tables.h").read_text().partition("#define JAX_FLASH_FORWARD_RESULTS")
    declared = re.findall(r'  OPERAND\((\w+), (\w+), (\S+), "(\w*)", (.+)\) *\\?', header)
    assert [name for _, name, *_ in declared] == [name for name, *_ in _native.operands()]
    assert "\n".join(documented(*row) for row in declared) in (ROOT / "docs/contract.md").read_text()


def test_tables_of_files_are_complete():
    """Each source file has a row in the architecture or the pipelines, and each file in a row exists."""
    pages = [(ROOT / f"docs/{name}.md").read_text() for name in ("architecture", "pipelines")]
    rows = [line for page in pages for line in page.splitlines() if line.startswith("|")]
    named = re.findall(r"`([^`]+)`", "\n".join(rows))
    patterns = {word for text in named for word in re.findall(r"[\w*]+", text)}
    folders = ("jax_flash", "common", "cpu_src", "cuda_src/plan", "cuda_src/kernels/hopper", "cuda_src/kernels/ampere")
    files = [x for folder in (*folders, "cuda_src") for x in (ROOT / folder).glob("*.*")]
    files = [x for x in files if x.suffix in (".py", ".h", ".cc", ".cuh") and x.name != "__init__.py"]
    assert not [x.name for x in files if not any(fnmatch.fnmatchcase(x.stem, pattern) for pattern in patterns)]
    listed = {word for text in named for word in re.findall(r"\w+\.(?:py|h|cc|cuh)\b", text)}
    searched = [x for x in ROOT.glob("[!.]*") if x.name != "build"]  # not the environments, which have many files
    assert not listed - {x.name for folder in searched for x in (folder, *folder.rglob("*.*"))}


def test_picture_of_the_architecture_is_drawn(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "docs")
    importlib.import_module("draw_architecture").draw(tmp_path / "architecture.png")
    assert (tmp_path / "architecture.png").read_bytes().startswith(b"\x89PNG")


def test_architecture_is_short():
    """The page has at most 2,500 words, as `wc -w` counts."""
    assert len((ROOT / "docs/architecture.md").read_text().split()) <= 2500
