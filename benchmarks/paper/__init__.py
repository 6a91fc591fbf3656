"""The claims of the FlashAttention paper (Dao et al., NeurIPS 2022). Each is measured by a section.

The sections are in `sections`. The other modules are shared code, and make the tables and figures.
"""

import os
import pathlib
import sys
import time

START = time.monotonic()  # approximately the start of the process: nothing large is imported before
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # the other benchmarks, which are run as files

# Preallocate. Otherwise the history of the allocator would affect whether a problem fits. JAX reads these variables
# when it first initialises a device.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the old name: if both are set, JAX falls back to the CPU
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", ".92")
