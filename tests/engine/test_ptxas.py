"""Every fused kernel, compiled as steps of the real sizes start it: no register is spilled, and shared memory
suffices."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "specbench" / "engine" / "kernels"
pytest.importorskip("triton")


#: Compiles as the first stage of `make gpu` does: what `compiling.main` does. Then runs one of the steps whose kernels
#: it compiled, with a driver that launches nothing. Prints the reports, and last how many kernels the step starts, how
#: many of them were compiled, how often Triton had a binary in its cache, and how often it compiled.
STARTS = """
import os
from collections import Counter
from functools import partial
from types import SimpleNamespace
from unittest import mock
from triton import knobs
from triton.runtime.driver import driver
from gpu_checks import compiling
from specbench.engine.kernels import launch

class Device(compiling.NoDevice):
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": compiling.SHARED[90]},
        load_binary=lambda *_: (None, None, 32, 0, 1024),
        unload_module=lambda module: None,
    )
    launcher_cls = staticmethod(lambda source, metadata: lambda *_: None)

compiling.main()
step = partial(compiling.step_on_shapes, *compiling.FEW[1])
jobs = compiling.started([step])
compiled = set(jobs) & set(compiling.jobs())
for name in compiling.REPORTING:
    del os.environ[name]
driver.set_active(Device(90))
seen = Counter()
knobs.compilation.listener = lambda *, cache_hit, **_: seen.update([cache_hit])
with mock.patch.object(launch, "can_depend", return_value=True):
    step()
print([len(jobs), len(compiled), seen[True], seen[False]])
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What `STARTS` prints in a process with its own cache, in which Triton does not interpret."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [ROOT, ROOT / "scripts", os.environ.get("PYTHONPATH", "")]
    env |= {"PYTHONPATH": ":".join(map(str, paths)), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, "-W", "ignore", "-c", STARTS]
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert process.returncode == 0, process.stderr[-2000:]
    return [json.loads(line) for line in process.stdout.splitlines()]


@pytest.fixture(scope="module")
def reports(printed: list[Any]) -> list[dict[str, Any]]:
    """The reports of every specialisation."""
    return printed[:-1]


def test_a_step_reuses_every_kernel_that_the_first_stage_compiled(printed: list[Any]) -> None:
    jobs, compiled, hits, misses = printed[-1]
    assert hits == compiled >= 10
    assert misses == jobs - compiled < 2


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
    """For Hopper; one that depends on the device, for one before it and one after it, too."""
    from gpu_checks.compiling import DEPENDING

    assert not [row for row in reports if "error" in row]
    hopper = {row["kernel"] for row in reports if row["capability"] == 90}
    others = [(row["kernel"], row["capability"], "PDL=True" in row["label"]) for row in reports]
    assert hopper == started_in_source()
    assert [row for row in others if row[1] != 90] == [(DEPENDING, 89, False), (DEPENDING, 100, True)]


def test_one_binary_serves_all_levels_of_a_tree(reports: list[dict[str, Any]]) -> None:
    """Triton used to make one binary for level 1, one for levels divisible by 16 (including 0), and one for the others.
    For kernels that grow trees, the root has its own."""
    binaries = Counter(row["kernel"] for row in reports if row["capability"] == 90)
    assert (binaries["_try_children"], binaries["_candidates"], binaries["_beam"]) == (1, 2, 2)


def test_no_kernel_spills_and_shared_memory_suffices(reports: list[dict[str, Any]]) -> None:
    from gpu_checks.compiling import faults

    faulty = {
        f"sm_{row['capability']} {row['label']}": faults_of_row for row in reports if (faults_of_row := faults(row))
    }
    assert not faulty


def test_operands_of_matrix_units_are_copied_asynchronously(reports: list[dict[str, Any]]) -> None:
    """A load that the matrix units wait for has already started."""
    copying = {row["kernel"] for row in reports if row["capability"] == 90 and row["copies"]}
    assert copying >= {"_many", "_many_qkv", "_attend"}


def test_logits_are_read_by_vectors(reports: list[dict[str, Any]]) -> None:
    """Also for a target with an image grammar, whose vocabulary is padded: without padding, the size and the mask of
    8,194 tokens made every load a single number."""
    selected = [row for row in reports if row["kernel"] == "_probs" and row["capability"] == 90]
    assert {"GRAMMAR=True" in row["label"] for row in selected} == {True, False}
    assert not [row["label"] for row in selected if row["scalars"]]


def test_of_equal_kernels_the_one_that_needs_most_and_each_size_of_1_are_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sizes of 1 become constants of a binary; a constant of the source that is no size makes another kernel, unless it
    only adds something."""
    from gpu_checks import compiling

    names = {"ROOT": True, "CUT": True, "n": False, "BLOCK": True}
    params = [SimpleNamespace(name=name, is_constexpr=written) for name, written in names.items()]
    monkeypatch.setattr(compiling.Specialisation, "function", SimpleNamespace(params=params))

    def specialise(
        block: int, n: int | None = None, divisible: bool = False, cut: bool = False, root: bool = False, warps: int = 4
    ) -> compiling.Specialisation:
        constants = {1: root, 2: cut, 4: block} | ({} if n is None else {3: n})
        start = {
            "signature": {"x": "*fp32", **dict.fromkeys(names, "constexpr")} | ({"n": "i32"} if n is None else {}),
            "constant_keys": [[at] for at in constants],
            "constant_vals": list(constants.values()),
            "attrs_keys": [[0]] if divisible else [],
            "attrs_vals": [[["tt.divisibility", 16]]] if divisible else [],
            "options": {"num_warps": warps},
        }
        return compiling.Specialisation("m", "k", 90, json.dumps(start))

    chosen = compiling._extremes
    known, unknown, wide = specialise(16, divisible=True), specialise(16), specialise(32, divisible=True)
    assert chosen([known, unknown]) == chosen([unknown, known]) == [unknown]
    assert chosen([unknown, wide]) == chosen([wide, unknown, specialise(48, warps=8)]) == [wide]
    assert chosen([wide, cut := specialise(16, cut=True)]) == [cut]
    assert chosen([wide, root := specialise(16, root=True)]) == [wide, root]
    assert chosen([unknown, one := specialise(16, 1)]) == [unknown, one]


def test_a_kernel_may_spill_as_known_for_its_version_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_checks import compiling

    for kernel, version, capability, spilled, fine in (
        ("_probs", "3.6.0", 120, 40, True),
        ("_probs", "3.6.0", 120, 44, False),
        ("_probs", "3.6.0", 90, 8, False),
        ("_probs", "3.9.0", 120, 8, False),
        ("_attend", "3.9.0", 120, 172, True),
    ):
        monkeypatch.setattr("triton.__version__", version)
        row = {"kernel": kernel, "capability": capability, "spills": spilled, "shared": 99 << 10}
        assert (compiling.faults(row) == []) == fine, row
        assert compiling.faults({**row, "spills": 0, "shared": (99 << 10) + 1, "capability": 120}) != []
