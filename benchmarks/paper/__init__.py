"""The claims of the FlashAttention paper (Dao et al., NeurIPS 2022), each measured by a section of its own.

The sections are in `sections`. Beside that folder lies what they share, and what makes tables and figures of them.
"""

import os
import pathlib
import sys
import time

START = time.monotonic()  # of the process, about: nothing large is imported before
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # the other benchmarks, which are run as files

# Whether a problem fits must not depend on how the allocator has grown. The names are those that jax reads when it
# first asks for a device.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # its old name: with both, jax finds no GPU and takes the CPU
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", ".92")
