"""`log=`: the data that a tracker gets. The libraries are large (wandb 62 MB, mlflow 40 MB without its own
dependencies). If they are missing, modules with the few functions that are used replace them."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from commands import row_of
from fake_pipeline import FakePipeline

from specbench.config import configuration
from specbench.errors import RunError, UsageError
from specbench.harness import run
from specbench.harness.folder import RunFolder, stored
from specbench.rows import trackers
from specbench.rows.provenance import config_hash

SMALL = ("metrics=none", "n=2", "warmup=0")


class Calls(list):
    """The calls of a stub: name, positional and named arguments."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self.append((name, args, named))

    def by_name(self, name: str) -> list[tuple[Any, ...]]:
        return [(args, named) for called, args, named in self if called == name]


def stub(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


class Context:
    """A run of a stub, open for a `with` block."""

    def __init__(self, calls: Calls, **content: Any) -> None:
        self.calls = calls
        vars(self).update(content)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append(("close", (), {}))


def run_and_log(out: Path, *arguments: str) -> dict[str, Any]:
    return run.run(configuration.compose([*SMALL, *arguments]), out, loader=FakePipeline).row


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trackers") / "run"
    run_and_log(out)
    return out


@pytest.fixture
def folder(finished: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A finished run that no tracker has."""
    run_folder = RunFolder(finished)
    monkeypatch.setattr(run_folder, "update_metadata", lambda **entries: None)
    return run_folder


def write(folder: RunFolder, *arguments: str) -> dict[str, Any]:
    row = row_of(folder.path)
    cfg = configuration.compose([*SMALL, *arguments])
    trackers.write(cfg.log, cfg, row, folder)
    return row


def test_wandb_gets_a_run_of_the_same_id(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    wandb_run = SimpleNamespace(config=calls, log=calls.log, finish=calls.finish, url=None, dir="there")
    stub(monkeypatch, "wandb", init=lambda **named: (calls.append(("init", (), named)), wandb_run)[1], Image=str,
         Settings=lambda **named: named)  # fmt: skip
    monkeypatch.delenv("WANDB_DIR", raising=False)
    row = write(folder, "log=wandb", "log_project=mine")
    [(_, init)] = calls.by_name("init")
    assert (init["project"], init["id"], init["resume"], init["dir"]) == ("mine", row["run_id"], "allow", str(folder))
    assert init["config"]["delta"] == 1.1
    assert init["config"]["commit"] == row["commit"]
    [((numbers,), _)] = calls.by_name("log")
    assert numbers["step_compression"] == row["step_compression"]
    assert numbers["contact_sheet"] == str(folder.sheet)
    assert "delta" not in numbers
    assert calls.by_name("finish")


def test_mlflow_gets_parameters_numbers_and_files(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    mlflow_run = Context(calls, info=SimpleNamespace(run_id="7"))
    names = ("set_experiment", "log_params", "log_metrics", "log_artifact")
    stub(monkeypatch, "mlflow", start_run=lambda **named: (calls.append(("start_run", (), named)), mlflow_run)[1],
         get_tracking_uri=lambda: "here", **{name: getattr(calls, name) for name in names})  # fmt: skip
    row = write(folder, "log=mlflow")
    assert calls.by_name("set_experiment") == [(("specbench",), {})]
    assert calls.by_name("start_run")[0][1]["tags"] == {"specbench.run_id": row["run_id"]}
    [((parameters,), _)] = calls.by_name("log_params")
    assert parameters["method"] == "cool_sd"
    assert all(isinstance(value, str) for value in parameters.values())
    [((numbers,), _)] = calls.by_name("log_metrics")
    assert numbers == trackers.numbers(row)
    assert [args[0] for args, _ in calls.by_name("log_artifact")] == [
        str(folder.path / name) for name in ("row.csv", "details.json", "contact_sheet.png")
    ]


def test_tensorboard_gets_scalars_over_the_prompts(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = Calls()
    made = []

    def writer(where: str) -> Context:
        made.append(where)
        return Context(calls, **{n: getattr(calls, n) for n in ("add_scalar", "add_text", "add_image")})

    stub(monkeypatch, "tensorboard")
    stub(monkeypatch, "torch.utils.tensorboard", SummaryWriter=writer)
    row = write(folder, "log=tensorboard")
    write(folder, "log=tensorboard", f"log_dir={tmp_path}/all")
    assert made == [str(folder.path / "tensorboard"), f"{tmp_path}/all/{row['run_id']}"]
    assert ("steps", row["steps"], 2) in [args for args, _ in calls.by_name("add_scalar")]
    [image, _] = calls.by_name("add_image")
    assert image[0][1].ndim == 3


def test_a_run_is_logged_once_and_again_when_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = []
    stub(monkeypatch, "wandb")
    monkeypatch.setitem(trackers._WRITERS, "wandb", lambda cfg, row, folder: (rows.append(row), "x")[1])
    for n in (2, 2, 3, 2):  # the last one only shows the first two
        run_and_log(tmp_path / "run", "log=wandb", f"n={n}")
    assert [row["n"] for row in rows] == [2, 3, 2]
    assert set(json.loads((tmp_path / "run/run.json").read_text())["logged"]) == {"wandb"}
    assert run_and_log(tmp_path / "run", "n=3") == rows[1]  # a tracker may change within a folder
    assert stored(tmp_path / "run").log == "none"


def test_a_tracker_that_fails_loses_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> str:
        raise ConnectionError("no route\nto host")

    stub(monkeypatch, "mlflow")
    monkeypatch.setitem(trackers._WRITERS, "mlflow", fail)
    with pytest.raises(RunError, match="log=mlflow.*row.csv"):
        run_and_log(tmp_path / "run", "log=mlflow")
    assert row_of(tmp_path / "run")["n"] == 2


def test_a_missing_library_is_reported_before_anything_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="log=wandb"):
        run_and_log(tmp_path / "run", "log=wandb")
    assert not (tmp_path / "run").exists()
    hashes = {config_hash(configuration.compose([f"log={name}"])) for name in ("none", "wandb", "mlflow")}
    assert len(hashes) == 1  # the tracker is not part of the measurement


# --- with the libraries


def test_an_event_file(folder: RunFolder, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    row = write(folder, "log=tensorboard", f"log_dir={tmp_path}")
    events = accumulator.EventAccumulator(str(tmp_path / row["run_id"]))
    events.Reload()
    [event] = events.Scalars("steps")
    assert (event.step, event.value) == (2, row["steps"])


def test_an_offline_run_of_wandb(folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    row = write(folder, "log=wandb")
    assert list(tmp_path.glob(f"wandb/offline-run-*/run-{row['run_id']}.wandb"))


def test_a_run_of_mlflow_on_this_machine(folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions require it
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    row = write(folder, "log=mlflow")
    [mlflow_run] = mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name("specbench").experiment_id])
    assert mlflow_run.data.metrics["steps"] == row["steps"]
    assert mlflow_run.data.tags["specbench.run_id"] == row["run_id"]
