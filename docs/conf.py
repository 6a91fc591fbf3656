"""Configuration of the site that `make docs` builds from the Markdown pages and the docstrings."""

import inspect
import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # jax_flash.keras refuses another

from sphinx.pycode import ModuleAnalyzer
from sphinx.util.inspect import stringify_signature
from sphinx.util.typing import stringify_annotation

import jax_flash

project = html_title = "jax-flash"
version = release = jax_flash.__version__
project_copyright = "the jax-flash authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
# Sphinx starts at the repository's root, so that links lead to the same files as in a clone.
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "tools/emulator/README.md"]
exclude_patterns = [".*", "build"]
myst_heading_anchors = 3
default_role = "code"  # docstrings have names in single backticks

html_theme = "furo"
html_theme_options = {"top_of_page_buttons": []}  # the default links to the source text of a page
html_copy_source = False
pygments_dark_style = "github-dark"  # furo's default underlines the names of modules, like links
html_search_scorer = "docs/scorer.js"
copybutton_prompt_text = "$ "

maximum_signature_line_length = 80  # a longer signature has one line per argument
autodoc_member_order = "bysource"
napoleon_use_ivar = True
napoleon_attr_annotations = False


class Name:
    """A default value that is shown by its name: `zeros` in place of `<function zeros>`."""

    def __init__(self, value):
        self.name = getattr(value, "__qualname__", type(value).__qualname__).split(".")[0]

    def __repr__(self):
        return self.name


def signature(app, what, name, subject, options, arguments, result):
    """Return the signature to show, with types as they are written in the code."""
    if not arguments or not subject.__module__.startswith("jax_flash"):
        return None
    analyzer = ModuleAnalyzer.for_module(subject.__module__)  # autodoc would show overloads, which hide the options
    analyzer.analyze()
    analyzer.overloads.clear()
    if what == "class" and name.count(".") == 1:  # functions return the classes of jax_flash; users do not call them
        return "", None
    found = inspect.signature(subject)
    if what == "class" and "args" in found.parameters:  # the constructor adds arguments to those of Flax or Keras
        constructors = [inspect.signature(cls.__init__) for cls in subject.__mro__]
        stock = next(constructor for constructor in constructors if "args" not in constructor.parameters)
        own = {name: p for name, p in constructors[0].parameters.items() if name not in ("args", "kwargs")}
        found = stock.replace(parameters=sorted({**stock.parameters, **own}.values(), key=lambda p: p.kind))
    parameters = [
        parameter.replace(default=Name(parameter.default))
        if parameter.default is not parameter.empty and repr(parameter.default).startswith("<")
        else parameter
        for parameter in found.parameters.values()
        if parameter.name != "self"
    ]
    shown = found.replace(parameters=parameters, return_annotation=found.empty)
    arguments = stringify_signature(shown, unqualified_typehints=True)
    return arguments, None if what == "class" else stringify_annotation(found.return_annotation)


def setup(app):
    app.connect("autodoc-process-signature", signature)
