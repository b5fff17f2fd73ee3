"""Imports run one way: no circle between modules, and no import of a layer above."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("specbench", "tools", "scripts")
    for path in (ROOT / folder).rglob("*.py")
}
#: The layers, from the top. "" is specbench/__init__.py.
LAYERS = """
scripts tools - api cli tables training compare bench audit harness metrics models rows data config decoding engine
storage errors
""".replace("-", "''").split()


def imported(name: str) -> Iterator[str]:
    """The modules of the project that a module imports anywhere: in functions and for types, too."""
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: write imports in full"
            imports = [(f"{node.module}.{alias.name}", str(node.module)) for alias in node.names]
            names = [whole if whole in FILES else module for whole, module in imports]
        else:
            continue
        yield from (other for other in names if other in FILES and other != name)


@cache
def graph() -> dict[str, set[str]]:
    return {name: set(imported(name)) for name in FILES}


def layer(name: str) -> int:
    """Index of a module's layer: that of specbench.rows.journal is the one of `rows`."""
    project, *parts = name.split(".")
    return LAYERS.index(project if project != "specbench" else parts[0] if parts else "''")


def test_modules_import_each_other_in_no_circle() -> None:
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as e:
        pytest.fail(" -> ".join(e.args[1]))


def test_no_module_imports_a_layer_above() -> None:
    assert [f"{a} -> {b}" for a, others in graph().items() for b in sorted(others) if layer(b) < layer(a)] == []
