"""Configuration of the suite: eight virtual CPU devices, a GPU if there is one, and without one no GPU tests.

With JAX_FLASH_EMULATE=sm_80 or sm_90 the CPU runs the CUDA kernels (tools/emulator/README.md).
"""

import collections
import gc
import importlib.metadata
import importlib.util
import os
import random
import shutil
import tempfile

_EMULATED = os.environ.get("JAX_FLASH_EMULATE", "")
_GPU = shutil.which("nvidia-smi") is not None and not _EMULATED
# Set before JAX initialises its backends. Most of the suite's time is XLA's, for programs that run once on small data.
_FLAGS = "--xla_force_host_platform_device_count=8"
_FLAGS += " --xla_cpu_parallel_codegen_split_count=1"  # one LLVM module per program: the workers use all cores
_MLIR = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) >= (0, 11)
if not _MLIR:  # emit LLVM IR for loops directly instead of by MLIR; later versions have no such option
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"
if not _GPU:  # without LLVM's optimisations, XLA of jax 0.11.2 miscompiles some integer arithmetic for GPUs
    _FLAGS += " --xla_backend_optimization_level=0"
    if _MLIR:  # keep single operations out of fusions, which would be emitted by MLIR
        _FLAGS += " --xla_disable_hlo_passes=fusion-wrapper"
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # programs without the lines of code that made them
os.environ["XLA_FLAGS"] = f"{_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
if "PYTEST_XDIST_WORKER" in os.environ:  # one thread per worker for NumPy's products
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
elif not _GPU:  # the workers share compiled programs: many tests run the same program in different ways
    _PROGRAMS = tempfile.TemporaryDirectory()  # deleted when pytest exits
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _PROGRAMS.name)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
if _GPU:  # the CPU stays the default device, and several processes share the GPU's memory
    os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Tracing allocates millions of objects. With Python's thresholds, garbage collection takes up to a third of the time.
gc.set_threshold(200_000, 20, 100)

if _EMULATED:
    import emulator

    emulator.install(_EMULATED)

import jax  # noqa: E402
import pytest  # noqa: E402

from jax_flash import _native  # noqa: E402

if importlib.util.find_spec("hypothesis"):  # modules with a missing package are skipped
    from hypothesis import settings

    settings.register_profile("ci", derandomize=True, deadline=None, max_examples=40, database=None)
    settings.register_profile("long", deadline=None, max_examples=2000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


pytest.register_assert_rewrite("accuracy", "block_masks", "sequences")


_NEED_GPU = pytest.StashKey[int]()


def pytest_addoption(parser):
    parser.addoption(
        "--each-value",
        action="store_true",
        help="run each test function with a part of its parameter sets, in which every value of each parameter appears",
    )


def _with_each_value(items):
    """Return items in which every value of each parameter of a test function appears, with random values of others."""
    items_of, kept = collections.defaultdict(list), set()
    for item in items:
        items_of[item.nodeid.partition("[")[0]].append(item)
    for function, sets in items_of.items():
        seen = set()
        for item in random.Random(function).sample(sets, len(sets)):  # the same in all processes
            parameters = item.callspec.params if hasattr(item, "callspec") else {"": None}
            values = {(name, id(value)) for name, value in parameters.items()}
            if not values <= seen:
                seen |= values
                kept.add(item)
    return [item for item in items if item in kept]


def pytest_collection_modifyitems(config, items):
    """Without a GPU, leave out the tests that need one. With --each-value, leave out parameter sets."""
    if not _GPU:
        left_out = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)
        config.stash[_NEED_GPU] = len(left_out)
        if hasattr(config, "workeroutput"):  # of pytest-xdist, which sends it to the process that prints
            config.workeroutput["need_gpu"] = len(left_out)
    if config.getoption("--each-value"):
        items[:] = _with_each_value(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[_NEED_GPU] = getattr(node, "workeroutput", {}).get("need_gpu", 0)


def pytest_terminal_summary(terminalreporter, config):
    """Print one line for each reason to skip, and one for the tests that need a GPU."""
    reasons = collections.Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"SKIPPED [{count}] {reason.removeprefix('Skipped: ')}")
    if count := config.stash.get(_NEED_GPU, 0):
        terminalreporter.write_line(f"DESELECTED [{count}] no NVIDIA GPU here")


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    """The device on which a test's programs run. float32 has full precision, which is not a GPU's default."""
    settings = {"jax_default_device": jax.devices(request.param)[0], "jax_default_matmul_precision": "highest"}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield settings["jax_default_device"]
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def x64():
    """64-bit JAX types for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def full_precision():
    """float32 at full precision for one test, also on GPUs."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def nvrtc():
    """Return the path and version of NVRTC, for tests that compile kernels."""
    try:
        return _native.cuda_nvrtc()
    except RuntimeError as error:
        pytest.skip(str(error))
