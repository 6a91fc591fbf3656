"""The modules of `jax_flash` import each other without a cycle."""

import ast
import graphlib
import pathlib

import jax_flash

ROOT = pathlib.Path(jax_flash.problem.__file__).parent


def imports() -> dict[str, set[str]]:
    """Return the modules that each module imports at the top, inside functions or for type checkers."""
    modules = {
        ".".join(("jax_flash", *path.relative_to(ROOT).with_suffix("").parts)): path for path in ROOT.rglob("*.py")
    }
    names = {module.removesuffix(".__init__"): module for module in modules}

    def imported(node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "import jax_flash by its full name"
            given = [f"{node.module}.{alias.name}" for alias in node.names]
            return [name if name in names else str(node.module) for name in given if name != "jax_flash._native"]
        return []

    return {
        module: {
            names[name] for node in ast.walk(ast.parse(path.read_text())) for name in imported(node) if name in names
        }
        for module, path in modules.items()
    }


def test_no_cycle():
    graph = imports()
    assert "jax_flash.arguments" in graph["jax_flash.varlen"]
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which lists the modules
