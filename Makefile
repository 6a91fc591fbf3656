# A fresh machine needs Python 3.11 or later, a C++17 compiler and make. Everything else is installed into $(VENV).
VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
# The environment of the demo. It needs fewer packages than the tests, but can use their environment.
DEMO_BUILT = $(firstword $(wildcard $(VENV)/.built) $(VENV)/.demo)
# Leave out what builds packages; `make test PYTEST_ARGS=` runs everything.
PYTEST_ARGS ?= -m "not slow"
# Most of the suite's time is spent compiling, one program a process. A process that is done takes over what another has
# left. A GPU's memory is for one process.
PYTEST = bin/pytest $(if $(GPU),,--numprocesses auto --maxprocesses 8 --dist worksteal)
EXTRAS ?= dev
EMULATED ?= "(test_feature or test_head_dim or test_heads_in_slices or test_few_queries or test_some_queries or whole_tiles) and not f64"
DEMO_ARGS ?=
BENCH_ARGS ?=
SANITIZE_ARGS ?=

OLDEST_JAX = 0.9.2
OLDEST_NVRTC = 13.0.88
PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
  $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))
GPU = $(shell command -v nvidia-smi)
JAX = $(if $(GPU),jax[cuda13],jax)
BUILD_TOOLS = scikit-build-core nanobind cmake ninja
PIP = bin/python -m pip install --disable-pip-version-check
CPP = $(wildcard bindings.cc) $(shell find $(wildcard common cpu_src cuda_src) -name '*.h' -o -name '*.cc' -o -name '*.cuh')
EMULATOR = $(wildcard tools/emulator/*.h tools/emulator/*.cc)
PY = jax_flash tests tools benchmarks examples docs/conf.py docs/draw_architecture.py
BUILD_INPUTS = pyproject.toml $(wildcard CMakeLists.txt) $(CPP)
say = @printf '\n\033[1m==> %s\033[0m\n' "$(1)"

.DEFAULT_GOAL = help
.PHONY: help demo test test-oldest lint format docs emulate sanitize kernels bench bench-gpu clean

help:
	@echo "make demo         train a small GPT on real text through jax_flash (examples/train_lm.py)"
	@echo "make test         the test suite"
	@echo "make lint         formatting, lint, spelling, types and commit subjects"
	@echo "make test-oldest  the test suite with jax $(OLDEST_JAX), the oldest supported, and NVRTC $(OLDEST_NVRTC)"
	@echo "make bench        jax_flash against jax.nn and PyTorch on this CPU (BENCH_ARGS=--quick for a short one)"
	@echo "make bench-gpu    jax_flash against cuDNN, XLA and PyTorch on this GPU"
	@echo "make emulate      runs the CUDA kernels on this CPU, each feature and dtype, for both families (minutes)"
	@echo "make sanitize     runs the CUDA kernels on this GPU under compute-sanitizer (minutes)"
	@echo "make kernels      compiles every CUDA kernel for every architecture, without a GPU: registers, spills (hours)"
	@echo "make docs         a site of the docs and of the API; it goes to build/docs"
	@echo "make format       format Python and C++"
	@echo "make clean        remove the environments and everything built"

demo: $(DEMO_BUILT)
	$(call say,Training a small GPT on the source text of Python's standard library; results go to demo_output/)
	@$(VENV)/bin/python examples/train_lm.py $(DEMO_ARGS)

test: $(VENV)/.built
	$(call say,Running the test suite)
	@$(VENV)/$(PYTEST) $(PYTEST_ARGS)

test-oldest:
	@$(MAKE) --no-print-directory test VENV=$(VENV_OLDEST) EXTRAS=test \
	  JAX='jax==$(OLDEST_JAX) jaxlib==$(OLDEST_JAX) nvidia-cuda-nvrtc==$(OLDEST_NVRTC)'

bench: $(VENV)/.built
	$(call say,Measuring attention on this CPU; results go to benchmarks/results/)
	@$(VENV)/bin/python benchmarks/cpu.py $(BENCH_ARGS)

bench-gpu: $(VENV)/.built
	$(call say,Measuring attention on this GPU; results go to benchmarks/results/)
	@$(VENV)/bin/python benchmarks/attention.py $(BENCH_ARGS)

emulate: $(VENV)/.built
	$(call say,Running the CUDA kernels for Ampere and for Hopper on this CPU)
	@for arch in sm_80 sm_90; do \
	  JAX_FLASH_EMULATE=$$arch $(VENV)/bin/pytest --numprocesses auto --maxprocesses 8 --dist load -m "not gpu" \
	    tests/numerics/test_accuracy.py tests/block_sparse -k $(EMULATED) || exit 1; \
	done

sanitize: $(VENV)/.built
	$(call say,Running the CUDA kernels under compute-sanitizer)
	@$(VENV)/$(PIP) 'nvidia-cuda-sanitizer-api>=13.5' 'cuda-pathfinder>=1.5.1'
	@$(VENV)/bin/python tools/sanitize.py $(SANITIZE_ARGS)

kernels: $(VENV)/.built
	$(call say,Compiling the CUDA kernels; the table goes to build/kernels.csv)
	@$(VENV)/bin/python tools/kernel_variants.py --full

lint: $(VENV)/.built
	$(call say,Checking Python with ruff)
	@$(VENV)/bin/ruff check $(PY)
	@$(VENV)/bin/ruff format --check $(PY)
	$(call say,Checking the format of the C++ with clang-format)
	@$(VENV)/bin/clang-format --dry-run -Werror $(CPP) $(EMULATOR)
	$(call say,Checking spelling with codespell)
	@$(VENV)/bin/codespell
	$(call say,Checking types with mypy)
	@$(VENV)/bin/mypy
	$(call say,Checking that the last 50 commit subjects have at most 72 characters)
	@test ! -e .git || ! git log -50 --no-merges --format=%s | grep -E '^.{73}'

format: $(VENV)/.built
	@$(VENV)/bin/ruff check --fix $(PY)
	@$(VENV)/bin/ruff format $(PY)
	@$(VENV)/bin/clang-format -i $(CPP) $(EMULATOR)

docs: $(VENV)/.docs
	$(call say,Making the site; it goes to build/docs)
	@$(VENV)/bin/python -m sphinx --fail-on-warning --keep-going --quiet -c docs -d build/doctrees . build/docs
	@echo '<meta http-equiv="refresh" content="0; url=docs/index.html">' > build/docs/index.html

clean:
	rm -rf $(VENV) $(VENV_OLDEST) build dist demo_output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(PY) -name __pycache__ -prune -exec rm -rf {} +

# An environment is made once. It is only rebuilt when the C++ or pyproject.toml changes, and CMake compiles what changed.
$(VENV)/.demo: EXTRAS = demo
$(VENV)/.docs: EXTRAS = docs
$(VENV)/.built $(VENV)/.demo $(VENV)/.docs: $(BUILD_INPUTS) $(VENV)/.tools
	$(call say,Compiling jax_flash and installing what it needs into $(VENV))
	@$(VENV)/$(PIP) --no-build-isolation --config-settings=build-dir=$(VENV)/build -e '.[$(EXTRAS)]' $(JAX)
	@touch $@

$(VENV)/.tools:
	@test -n "$(PYTHON)" || { echo "jax_flash needs Python 3.11 or later; set PYTHON=/path/to/python"; exit 1; }
	$(call say,Creating the environment $(VENV) with $(PYTHON): build tools and JAX ($(JAX)))
	@$(PYTHON) -m venv $(VENV) || { echo "On Debian and Ubuntu: sudo apt install python3-venv"; exit 1; }
	@$(VENV)/$(PIP) $(BUILD_TOOLS) $(JAX)
	@touch $@
