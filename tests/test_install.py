"""The packages: what is in them, that they build from a clean clone, that the C++ compiles for another processor."""

import email.parser
import importlib.util
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# The ten lines of the README, more or less.
SMOKE = """
import jax, jax_flash
from jax_flash import _native
q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 32))
loss = lambda attention: jax.jit(jax.grad(lambda q: (attention(q, k, v, is_causal=True) ** 2).sum()))(q)
error = abs(loss(jax_flash.dot_product_attention) - loss(jax.nn.dot_product_attention)).max()
assert error < 1e-3, error
print(jax_flash.__file__, _native.cpu_isa())
"""


def run(*command: object, **options) -> str:
    done = subprocess.run([str(x) for x in command], stdout=subprocess.PIPE, text=True, **options)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="session")
def packages(tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
    """sdist and wheel, the wheel built from the sdist, the sdist from a clean clone."""
    pytest.importorskip("build", reason="needs the extra `ci`")
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    folder = tmp_path_factory.mktemp("packages")
    run("git", "clone", "--quiet", "--no-hardlinks", ROOT, folder / "clone")
    run(sys.executable, "-m", "build", "--outdir", folder, folder / "clone")
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_sdist_has_what_the_build_and_the_two_commands_need(packages):
    with tarfile.open(packages[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = set(run("git", "-C", ROOT, "ls-tree", "-r", "--name-only", "HEAD").splitlines())
    left_out = {name for name in tracked - names if not name.startswith("benchmarks/results/")}
    assert not left_out
    assert names - tracked == {"PKG-INFO"}


@pytest.mark.slow
def test_wheel_has_the_package_and_nothing_else(packages):
    with zipfile.ZipFile(packages[1]) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.parser.Parser().parsestr(archive.read(metadata).decode())
        (native,) = (name for name in names if name.endswith(".so"))
    package = {name for name in names if ".dist-info/" not in name}
    tracked = run("git", "-C", ROOT, "ls-tree", "-r", "--name-only", "HEAD", "jax_flash/").splitlines()
    assert package == {*tracked, native}
    assert {name.split("/")[0] for name in package} == {"jax_flash"}
    assert "jax_flash/py.typed" in package
    required = [x for x in metadata.get_all("Requires-Dist", []) if "extra ==" not in x]
    assert sorted(x.partition(">")[0] for x in required) == ["cuda-pathfinder", "jax", "jaxlib", "numpy"]
    assert packages[1].stat().st_size < 5e6


@pytest.mark.slow
def test_wheel_installs_and_computes(packages, tmp_path):
    """With the newest jax that this Python can have, though it was built against the oldest supported."""
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", packages[1])
    location = run(python, "-c", SMOKE, cwd=tmp_path)
    assert location.startswith(str(tmp_path))
    assert "fused kernels" in run(python, "-m", "jax_flash", cwd=tmp_path)


def aarch64_compiler() -> list[str]:
    if compiler := shutil.which("aarch64-linux-gnu-g++"):
        return [compiler]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu"]
    pytest.skip("no cross compiler: aarch64-linux-gnu-g++, or ziglang from the extra `ci`")


SOURCES = sorted(path for folder in ("common", "cpu_src", "cuda_src") for path in ROOT.glob(f"{folder}/*.cc"))


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_compiles_for_aarch64(source, tmp_path):
    import jax

    include = ["-I", ROOT, "-isystem", jax.ffi.include_dir()]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-DJAX_FLASH_ISA=portable"]
    run(*aarch64_compiler(), *flags, *include, "-c", source, "-o", tmp_path / "object.o", stderr=subprocess.STDOUT)
    header = (tmp_path / "object.o").read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[18:20], "little") == 183  # EM_AARCH64
