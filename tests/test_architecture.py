"""Imports run one way: no cycle between modules, and no arrow that the layers forbid. Classes and files have limits."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from specbench.config.parameter import DEEP, DRAFT
from specbench.decoding import trees

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("specbench", "tools", "scripts")
    for path in (ROOT / folder).rglob("*.py")
}
#: Package -> the packages that its modules import beside their own: each pair is an arrow, and there are no others.
#: The order is the order of the layers: a package imports no package above it in this table.
#: "" is specbench/__init__.py. Tools and scripts are part of a clone; no package imports them.
ARROWS = {
    package: set(imports.split())
    for package, imports in {
        "scripts": "cli tables bench audit harness metrics models rows config decoding engine storage errors",
        "tools": "training harness metrics models data config storage errors",
        "": "api storage errors",
        "api": "compare audit harness rows config decoding errors",
        "cli": "tables training compare bench audit harness metrics rows config storage errors",
        "tables": "compare bench harness rows config storage errors",
        "training": "harness models data config decoding storage errors",
        "compare": "metrics rows data config storage errors",
        "bench": "harness metrics models rows data config decoding engine storage errors",
        "audit": "harness models config decoding engine storage errors",
        "harness": "metrics rows data config decoding engine storage errors",
        "metrics": "models rows data config storage errors",
        "models": "data config engine storage errors",
        "rows": "config storage errors",
        "data": "config storage errors",
        "config": "storage errors",
        "decoding": "engine errors",
        "engine": "errors",
        "storage": "errors",
        "errors": "",
    }.items()
}
#: A new arrow must replace another one: move the common part into a package below both.
MOST_ARROWS = 110
LONGEST = 450  # lines of a file that can be read as a whole


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


GRAPH = {name: set(imported(name)) for name in FILES}


def package(name: str) -> str:
    """specbench.rows.journal -> rows, specbench -> "", tools.scenes.card -> tools."""
    project, *parts = name.split(".")
    return project if project != "specbench" else parts[0] if parts else ""


def test_modules_import_each_other_in_no_circle() -> None:
    assert len(GRAPH) > 250
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as e:
        pytest.fail(" -> ".join(e.args[1]))


def test_packages_import_what_the_table_says() -> None:
    arrows: dict[str, dict[str, str]] = {package(name): {} for name in FILES}
    for name, others in GRAPH.items():
        arrows[package(name)] |= {package(other): f"{name} -> {other}" for other in sorted(others)}
    assert arrows.keys() == ARROWS.keys()
    forbidden = [where for a, to in arrows.items() for b, where in to.items() if b not in {a, *ARROWS[a]}]
    gone = [f"{a} -> {b}" for a, to in ARROWS.items() for b in sorted(to - arrows[a].keys())]
    assert (forbidden, gone) == ([], [])


def test_no_arrow_goes_up() -> None:
    order = list(ARROWS)
    assert [(a, b) for a, to in ARROWS.items() for b in to if order.index(b) <= order.index(a)] == []


def test_there_are_few_arrows() -> None:
    assert sum(map(len, ARROWS.values())) <= MOST_ARROWS
    assert len(ARROWS) <= 22


def test_the_schema_and_the_trees_have_the_same_bounds() -> None:
    """The two layers must not import each other, so both have the numbers."""
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
                arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                long += [f"{name}.{node.name}: {lines}"] * (lines > 60)
                wide += [f"{name}.{node.name}: {len(arguments)}"] * (len(set(arguments) - {"self", "cls"}) > 8)
    assert (long, wide) == ([], [])


def test_the_centre_is_small() -> None:
    """The code that every run uses: configuration, execution and the command line."""
    paths = [path for name, path in FILES.items() if package(name) in ("harness", "config", "cli")]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths) <= 8500


def test_a_class_name_is_defined_once() -> None:
    places = defaultdict(list)
    for name, path in FILES.items():
        if name.startswith("specbench"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(name)
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


def test_no_file_is_too_long_without_a_reason() -> None:
    lengths = {}
    for name, path in FILES.items():
        lines = path.read_text(encoding="utf-8").splitlines()
        if name.startswith("specbench") and lines and "long because" not in lines[0]:
            lengths[name] = len(lines)
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}
