"""The notebook: every cell runs, its outputs are stored, and its numbers equal a run's."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT

NOTEBOOK = json.loads((ROOT / "docs/notebook.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def execute(cell: dict[str, Any], names: dict[str, Any]) -> Any:
    """Executes a cell with these names, as a kernel does. Returns the value of its last line if that is an
    expression."""
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, cell["id"], "exec"), names)
    return eval(compile(ast.Expression(last.value), cell["id"], "eval"), names) if isinstance(last, ast.Expr) else None


def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    values = {cell["id"]: execute(cell, names) for cell in CODE}
    shown = [value for value in values.values() if value is not None]
    assert len(shown) == sum(any("data" in output for output in cell["outputs"]) for cell in CODE)
    assert any(value is True for value in shown)  # decode gives the image of the run
    assert names["audited"].verdict == "not lossless"
    assert len(names["result"].images) == names["result"].row["n"] == 3
    out = capsys.readouterr().out
    assert "'windows'" in out
    assert "did you mean window?" in out
    assert (tmp_path / "runs/notebook/row.csv").is_file()


def test_the_outputs_come_from_one_clean_execution() -> None:
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    images = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(images) == 2
    text = json.dumps(NOTEBOOK)
    assert len(text) < 600_000
    assert os.path.expanduser("~") not in text
    assert "-dirty" not in text
