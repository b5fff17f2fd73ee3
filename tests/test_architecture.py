"""Imports run one way: no cycle between modules, and no arrow that the layers forbid."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from specbench.config.parameter import DEEP, DRAFT
from specbench.decoding import trees

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "specbench").rglob("*.py")
}
#: Package -> the packages that its modules may import, beside their own, errors. The order is that of the
#: layers: a package imports none that stands below it in this table.
MAY_IMPORT = {
    "": {"api"},
    "api": {"audit", "compare", "harness", "decoding"},
    "cli": {
        "audit",
        "bench",
        "compare",
        "tables",
        "training",
        "harness",
        "metrics",
        "models",
        "data",
    },
    "tables": {"bench", "compare", "harness"},
    "training": {"harness", "metrics", "models", "data", "decoding"},
    "compare": {"metrics", "data"},
    "bench": {"harness", "metrics", "models", "data", "decoding", "engine"},
    "audit": {"harness", "models", "decoding", "engine"},
    "harness": {"metrics", "models", "data", "decoding", "engine"},
    "metrics": {"models", "data"},
    "models": {"data", "engine"},
    "rows": set(),
    "data": set(),
    "config": {"storage"},
    "decoding": {"engine"},
    "engine": set(),
    "storage": set(),
}
#: Imported by all but the layers at the bottom.
COMMON = {"config", "rows", "storage"}
PURE = {"config", "decoding", "engine", "storage"}


def imported(name: str) -> Iterator[str]:
    """The modules of the project that a module imports anywhere: in functions and for types, too."""
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specbench"):
            both = [(f"{node.module}.{alias.name}", str(node.module)) for alias in node.names]
            found = [whole if whole in FILES else module for whole, module in both]
        else:
            assert not isinstance(node, ast.ImportFrom) or not node.level, f"{name}: write imports in full"
            continue
        yield from (other for other in found if other in FILES and other not in (name, "specbench"))


GRAPH = {name: set(imported(name)) for name in FILES}


def package(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_modules_import_each_other_in_no_circle() -> None:
    assert len(GRAPH) > 150
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as e:
        pytest.fail(" -> ".join(e.args[1]))


def test_packages_import_what_is_below_them() -> None:
    assert {package(name) for name in FILES} == {*MAY_IMPORT, "errors"}
    forbidden = []
    for name, others in GRAPH.items():
        mine = package(name)
        may = {mine, "errors", *MAY_IMPORT.get(mine, ()), *(() if mine in PURE else COMMON)}
        forbidden += [f"{name} -> {other}" for other in sorted(others) if package(other) not in may]
    assert forbidden == []


def test_the_table_of_layers_has_an_order() -> None:
    order = list(MAY_IMPORT)
    upward = [(a, b) for a, others in MAY_IMPORT.items() for b in others if order.index(b) < order.index(a)]
    assert upward == []


def test_the_schema_and_the_trees_have_the_same_bounds() -> None:
    """Two layers that may not import each other."""
    assert (DRAFT, DEEP) == (trees.DRAFT, trees.DEEP)


@pytest.mark.parametrize("part", ["harness", "config", "cli"])
def test_no_function_of_the_centre_is_long_or_has_many_arguments(part: str) -> None:
    long, wide = [], []
    for name, path in FILES.items():
        if package(name) != part:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                given = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                long += [f"{name}.{node.name}: {lines}"] * (lines > 60)
                wide += [f"{name}.{node.name}: {len(given)}"] * (len(set(given) - {"self", "cls"}) > 8)
    assert (long, wide) == ([], [])


def test_the_centre_is_small() -> None:
    """What every run goes through: how it is configured, done and started."""
    held = [path for name, path in FILES.items() if package(name) in ("harness", "config", "cli")]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in held) <= 8500
