"""How `make docs` makes a site of the Markdown as it is, and of the docstrings."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # jax_flash.keras refuses another

import jax_flash

project = html_title = "jax-flash"
version = release = jax_flash.__version__
html_theme = "furo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# Pages are found from the repository's root, so that their links lead to the same places as in a clone.
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "tools/emulator/README.md"]
exclude_patterns = [".*", "build"]
myst_heading_anchors = 3
default_role = "code"  # docstrings have names in single backticks
autodoc_typehints = "none"  # docstrings say what arrays are, and signatures have all options
maximum_signature_line_length = 100  # of a longer one each argument has a line
autodoc_member_order = "bysource"
napoleon_use_ivar = True
