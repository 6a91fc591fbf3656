"""The claims of the FlashAttention paper (Dao et al., NeurIPS 2022), each measured by a section of its own."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # the other benchmarks, which are run as files
