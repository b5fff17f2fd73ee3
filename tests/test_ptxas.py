"""Every fused kernel, compiled as steps of the real sizes start it: no register is spilled, shared memory suffices."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "specbench" / "engine" / "kernels"
pytest.importorskip("triton")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of every specialisation; in processes of their own, since Triton interprets in this one."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, "-W", "ignore", "-m", "gpu_checks.compiling"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def started_in_source() -> set[str]:
    """The names of the kernels in calls of `launch.start`."""
    calls = [node for file in KERNELS.glob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    return {
        node.args[0].id
        for node in calls
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "launch.start"
        and isinstance(node.args[0], ast.Name)
    }


def test_every_kernel_is_compiled(reports: list[dict[str, Any]]) -> None:
    for capability in (80, 90, 100):
        of = [row for row in reports if row["capability"] == capability]
        assert not [row for row in of if "error" in row]
        assert {row["kernel"] for row in of} == started_in_source()


@pytest.mark.parametrize(("kernel", "binaries"), [("_try_children", 1), ("_candidates", 2), ("_beam", 2)])
def test_one_binary_serves_all_levels_of_a_tree(reports: list[dict[str, Any]], kernel: str, binaries: int) -> None:
    """Triton made one for level 1, one for levels divisible by 16, 0 among them, and one for the others. Of kernels
    that grow trees the root has one of its own."""
    assert len([row for row in reports if row["kernel"] == kernel and row["capability"] == 90]) == binaries


def test_no_kernel_spills_and_shared_memory_suffices(reports: list[dict[str, Any]]) -> None:
    from gpu_checks.compiling import faults

    found = {f"sm_{row['capability']} {row['label']}": some for row in reports if (some := faults(row))}
    assert not found


@pytest.mark.parametrize("kernel", ["_many", "_many_qkv", "_attend"])
def test_operands_of_matrix_units_are_copied_asynchronously(reports: list[dict[str, Any]], kernel: str) -> None:
    """Where the matrix units wait for a load, it is under way before."""
    some = [row for row in reports if row["kernel"] == kernel and row["capability"] == 90]
    assert any(row["copies"] for row in some)


def test_of_equal_kernels_those_of_least_and_most_known_sizes_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are 1 become constants of a binary; a constant of the source makes another kernel."""
    from gpu_checks import compiling

    params = [SimpleNamespace(name="BLOCK", is_constexpr=True), SimpleNamespace(name="n", is_constexpr=False)]
    monkeypatch.setattr(compiling, "_kernel", lambda one: SimpleNamespace(params=params))

    def of(block: int, constants: tuple[tuple[str, Any], ...], *divisible: str) -> compiling.Specialisation:
        given = (("BLOCK", block), *constants)
        return compiling.Specialisation("m", "k", (("x", "*fp32"), ("n", "i32")), given, divisible, ())

    some = [of(16, (), "x"), of(16, ()), of(16, (("n", 1),), "x"), of(32, (), "x")]
    assert set(compiling._extremes(some)) == {some[1], some[2], some[3]}
