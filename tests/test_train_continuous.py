"""`specbench train drafter=cspd`: a drafter learns the paths of continuous tokens, and a run drafts with it."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_mar_scenes
import torch
from commands import row_of
from safetensors.torch import load_file
from test_mar_scenes import QUICK
from test_train_drafter import same

from specbench import cli
from specbench.config import registry
from specbench.decoding.continuous import ContinuousRule
from specbench.errors import UsageError
from specbench.harness.pipeline import Pipeline
from specbench.models import diffusion
from specbench.models.mar import MAR
from specbench.models.mar_sampling import Guided
from specbench.training import command, continuous, recipes, trainer

tiny = test_mar_scenes.tiny
MODEL = ["model=mar_scenes", "weights=random", "diffusion_steps=4"]
SMALL = [*MODEL, "drafter=cspd", "start=null", "n=40", "held_out=0.2", "batch=8", "steps=30", "warmup=2", "lr=1e-2"]
SMALL += ["validate_every=30", "precision=float32", "muon=false"]


def trained(out: Path, *words: str) -> command.TrainingResult:
    named = {word.split("=")[0] for word in words}
    chosen = recipes.plan([*(w for w in SMALL if w.split("=")[0] not in named), *words, f"out={out}"])
    return command.train(chosen, Pipeline.load(chosen.cfg))


@pytest.mark.usefixtures("tiny")
def test_a_drafter_is_trained_saved_and_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the command. Its card has the divergence before and after."""
    out = tmp_path / "out"
    assert cli.main(["train", *SMALL, "objective=path_kl", f"out={out}"]) == 0
    use = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("use them: "))
    assert use.endswith(f"model=mar_scenes method=cspd drafter_weights={out}")
    lines = (out / "card.md").read_text().splitlines()
    table = {k.strip(): v.strip() for k, v in (line.split("|")[1:3] for line in lines if line.count("|") == 3)}
    assert float(table["path_kl"]) < 0.5 * float(table["path_kl_before"])
    assert 0 <= float(table["acceptance"]) < 1
    assert float(table["tokens_per_pass"]) == pytest.approx(1 / (1 - float(table["acceptance"])), rel=1e-2)
    assert table["objective"] == "path_kl"
    assert "cfg_scale=2.0, cfg_schedule=linear, temperature=1.0, diffusion_steps=4" in "".join(lines)
    run = ["run", *MODEL, "method=cspd", "gamma=2", "n=2", "batch=2", *QUICK]
    assert cli.main([*run, f"drafter.weights={out}", f"out={tmp_path}/run"]) == 0
    row = row_of(tmp_path / "run")
    assert row["weights"] == f"random+{registry.digest(out / registry.DRAFTER_FILE)}"
    assert row["drafter_weights"] == str(out)


@pytest.mark.usefixtures("tiny")
def test_the_objective_decides_what_is_learned(tmp_path: Path) -> None:
    """From the same start on the same examples: only the path objective learns a target whose distribution differs from
    the data's."""
    examples = f"examples={tmp_path / 'examples'}"
    of_paths = trained(tmp_path / "path_kl", examples)
    of_data = trained(tmp_path / "denoising", examples, "objective=denoising")
    assert of_paths.statistics["path_kl_before"] == of_data.statistics["path_kl_before"]
    assert of_paths.statistics["path_kl"] < 0.7 * of_data.statistics["path_kl"]
    # The target's own samples can be examples, too, and a training can start from given weights.
    still = ["source=self", "n=4", "held_out=0.5", "batch=2", "steps=1", "lr=1e-12", "weight_decay=0"]
    again = trained(tmp_path / "again", *still, f"start={tmp_path / 'path_kl'}")
    same(load_file(again.file), load_file(of_paths.file))
    assert (load_file(tmp_path / "again" / "examples" / "examples-00000.safetensors")["tokens"][:, 1] == 0).all()


@pytest.mark.usefixtures("tiny")
def test_a_stopped_training_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["steps=6", "save_every=2", "ema=0.9"]
    whole, calls, real = trained(tmp_path / "whole", *words), itertools.count(1), MAR.moments

    def stopped(*arguments: Any, **more: Any) -> Any:
        if torch.is_grad_enabled() and next(calls) == 10:  # target and drafter in turn: within the fifth step
            raise KeyboardInterrupt
        return real(*arguments, **more)

    with monkeypatch.context() as once:
        once.setattr(MAR, "moments", stopped)
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "parts", *words)
    again = trained(tmp_path / "parts", *words)
    same(load_file(again.file), load_file(whole.file))
    spent = ("seconds", "images")
    assert {k: v for k, v in again.statistics.items() if k not in spent} == {
        k: v for k, v in whole.statistics.items() if k not in spent
    }
    with pytest.raises(UsageError, match="has a training with guided=True, objective=path_kl"):
        trained(tmp_path / "parts", *words, "objective=denoising")


@pytest.mark.usefixtures("tiny")
def test_measurements_of_paths(tmp_path: Path) -> None:
    """No divergence for the target itself. For other variances the divergence follows its formula, and the total
    variation is within the bounds of Pinsker and of Bretagnolle and Huber."""
    chosen = recipes.plan([*SMALL, f"out={tmp_path}"])
    task = continuous.ContinuousTask(chosen, Pipeline.load(chosen.cfg), None, trainer.Alone())
    rule, held_out = ContinuousRule(gamma=1, criterion="path"), task.held_out

    def measured(draft: Guided, rows: Any = slice(None)) -> dict[str, float]:
        return continuous.evaluate(task.pipeline, draft, rule, task.distributions[:, rows], task.labels[rows])

    assert {f"{name}_before": value for name, value in measured(task.draft, held_out).items()} == task.before
    itself = measured(task.target)
    assert (itself["path_kl"], itself["acceptance"]) == (pytest.approx(0, abs=1e-5), pytest.approx(1, abs=1e-5))
    near, schedule = copy.deepcopy(task.target.model), diffusion.schedule(4)
    with torch.no_grad():  # the log variance of step t changes by `more` of t, whatever the state
        near.diffloss.net.final_layer.linear.bias[3:] += 1
    more = (schedule.log_betas - schedule.posterior_log_variance_clipped) / 2
    columns = measured(replace(task.target, model=near))
    expected = 3 * 0.5 * float(((-more).exp() - 1 + more).sum())
    assert expected > 0.1
    assert columns["path_kl"] == pytest.approx(expected, abs=4 * columns["path_kl_stderr"])
    slack, distance = 4 * columns["acceptance_stderr"], 1 - columns["acceptance"]  # the total variation
    assert slack < distance < min((expected / 2) ** 0.5, (1 - math.exp(-expected)) ** 0.5) + slack
    assert columns["tokens_per_pass"] == pytest.approx(1 / distance)
