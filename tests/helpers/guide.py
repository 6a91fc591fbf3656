"""The Python of docs/libraries.md, for tests that run it as it stands."""

import pathlib
import re

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "libraries.md"


def run(section: str) -> dict:
    """The names that a section's blocks define, run in their order, but for what is indented: lines for other files."""
    text = re.split(rf"^## {section}$", GUIDE.read_text(), flags=re.MULTILINE)[1].split("\n## ")[0]
    namespace: dict = {}
    for block in re.findall(r"^```python\n(\w.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        exec(compile(block, str(GUIDE), "exec"), namespace)
    return namespace
