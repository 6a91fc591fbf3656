"""Runs the Python code of docs/libraries.md."""

import pathlib
import re

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "libraries.md"


def run(section: str) -> dict:
    """Run the code blocks of a section in order and return the names that they define.

    Blocks that begin with an indented line are skipped: they are excerpts of other files.
    """
    text = re.split(rf"^## {section}$", GUIDE.read_text(), flags=re.MULTILINE)[1].split("\n## ")[0]
    namespace: dict = {}
    for block in re.findall(r"^```python\n(\w.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        exec(compile(block, str(GUIDE), "exec"), namespace)
    return namespace
