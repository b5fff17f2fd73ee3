"""The Python interface: results, errors and arguments. The notebook decodes with it on a real model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from commands import ROOT, Call
from fake_pipeline import FakePipeline

import specbench
from specbench.api import LoadedModel, _overrides
from specbench.config import configuration
from specbench.harness import pipeline


@pytest.fixture
def finished(call: Call) -> specbench.api.RunResult:
    """A run of the fake pipeline (see `conftest.call`)."""
    return specbench.run("sjd", n=4, warmup=0, metrics=[], out="one", quiet=True)


def test_a_result_has_the_row_the_records_and_the_images(finished: specbench.api.RunResult) -> None:
    assert (finished.row["method"], finished.row["n"], finished.config.get("metrics")) == ("sjd", 4, [])
    records = finished.records
    assert isinstance(records, pd.DataFrame)
    assert list(records.index) == [0, 1, 2, 3]
    assert np.isclose(records.steps.mean(), finished.row["steps"])
    sums = finished.traces.accepted.groupby("index").sum()
    assert finished.traces.groupby("index").size().to_list() == records.steps.to_list()
    assert sums.to_list() == records.accepted.to_list()
    assert len(finished.images) == 4
    assert np.array_equal(np.asarray(finished.images[1]), np.asarray([*finished.images][1]))
    assert [np.asarray(image).shape for image in finished.images[2:]] == [np.asarray(finished.images[0]).shape] * 2
    assert finished.sheet.size[0] > 100
    assert "tokens a step" in repr(finished)
    again = specbench.result("one")
    assert (again.row, again.records.equals(records)) == (finished.row, True)


def test_a_folder_may_begin_with_the_users_own(
    finished: specbench.api.RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(finished.folder.absolute().parent))
    again = specbench.result("~/one")
    assert (again.row, again.folder) == (finished.row, finished.folder.absolute())
    assert len(again.records) == len(again.images) == 4
    assert "4 pairs" in repr(specbench.compare("~/one/baseline", Path("~/one")))


def test_several_images_of_a_prompt_are_all_there(call: Call) -> None:
    result = specbench.run("sjd", n=2, images_per_prompt=2, warmup=0, metrics=[], out="two", quiet=True)
    assert len(result.records) == len(result.images) == result.row["images"] == 4
    assert result.records.prompt.nunique() == 2
    assert {"position"} <= {*result.breakdown.by}


def test_two_results_are_compared_in_a_table(finished: specbench.api.RunResult) -> None:
    assert finished.baseline
    comparison = specbench.compare(finished.baseline, finished)
    assert comparison.table.loc["steps", "mean_a"] > comparison.table.loc["steps", "mean_b"]
    assert "4 pairs" in repr(comparison)


def test_an_audit_gives_its_rows_and_its_verdict() -> None:
    result = specbench.audit("uniform_rsd", delta=4.0, window=2, model="v3t5", samples=1000, quiet=True)
    assert result.verdict == "not lossless"
    assert set(result.table.model) == {"v3t5"}
    assert "not lossless" in repr(result)


def test_the_page_shows_what_works(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of docs/api.md run one after the other, with a pipeline without a model."""
    monkeypatch.setattr(pipeline, "load_model", lambda cfg: ("cpu", None))
    monkeypatch.setattr(LoadedModel, "_built", lambda self, cfg: FakePipeline(cfg))
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(re.sub(r"\bn=\d+", "n=3, metrics=[]", block), names)
    assert len(blocks) == 4
    assert names["decoded"].config.get("delta") == 2.0
    assert [row["delta"] for row in names["rows"]] == [1.0, 1.1, 2.0]


def test_a_mistake_is_an_exception_and_no_exit(finished: specbench.api.RunResult) -> None:
    for match, call in (
        ("unknown method 'nope'", lambda: specbench.run("nope")),
        ("delta must be a number", lambda: specbench.run("cool_sd", delta="much")),
        ("delta", lambda: specbench.run("cool_sd", delta={})),
        ("holds a run with method=sjd", lambda: specbench.run("sd", out="one", quiet=True)),
        ("there is no nothing", lambda: specbench.compare("nothing", finished)),
        ("nothing holds no run", lambda: specbench.result("nothing")),
        ("must be an integer", lambda: specbench.audit("sjd", samples="many")),
    ):
        with pytest.raises(specbench.UsageError, match=match):
            call()


def test_values_are_the_same_in_python_and_on_the_command_line(tmp_path: Path) -> None:
    values = {
        "metrics": ["scenes_reward", "scenes_fid"],
        "tree": [[0], [1], [0, 0]],
        "top_k": None,
        "top_p": np.float32(0.5),
        "seed": np.int64(3),
        "baseline": False,
        "out": tmp_path / "a, b {c}",
        "delta": 2,
    }
    cfg = configuration.compose(_overrides("cool_sd", values))
    expected = {**values, "out": str(values["out"]), "delta": 2.0}
    assert {name: cfg.get(name) for name in values} == expected
    assert configuration.compose(_overrides(None, {"metrics": []})).get("metrics") == []


def test_the_first_page_of_the_reference_links_every_function() -> None:
    """pdoc shows the docstring and links full names; the functions themselves it cannot see, for they load lazily."""
    linked = re.findall(r"^- `specbench\.api\.(\w+)`: ", str(specbench.__doc__), re.MULTILINE)
    assert sorted(linked) == sorted(specbench._FUNCTIONS)
    assert all(name in dir(specbench.api) for name in linked)


def test_an_import_loads_nothing_heavy() -> None:
    code = "import sys, specbench; assert not {'torch', 'numpy', 'pandas', 'hydra', 'omegaconf'} & {*sys.modules}"
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=True)
    assert (ROOT / "specbench/py.typed").is_file()
    offered = {"audit", "compare", "load", "result", "run", "RunError", "UsageError"}
    assert offered <= {*dir(specbench)}
    assert all(callable(getattr(specbench, name)) for name in offered)
    with pytest.raises(AttributeError, match="'nope'"):
        _ = specbench.nope
