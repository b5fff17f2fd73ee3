"""The training of the smaller MAR on its paths: what it learns, what its statistics mean, and its stage."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_mar_scenes
import torch
from commands import row_of
from test_mar_scenes import CONFIGS, QUICK, TINY

from specbench import cli
from specbench.config import configuration, registry
from specbench.harness.pipeline import Pipeline
from specbench.models import diffusion
from specbench.models.loading import checkpoints
from specbench.models.mar import MAR
from specbench.models.mar_sampling import Guided
from specbench.training.trainer import Recipe
from tools.scenes import paths

tiny = test_mar_scenes.tiny
STEPS = 4


@pytest.fixture
def model(tiny: None) -> Any:
    """A small target with random weights."""
    words = ["model=mar_scenes", "weights=random", f"diffusion_steps={STEPS}", "method=vanilla", "device=cpu"]
    return Pipeline.load(configuration.compose(words)).model


def new_draft() -> MAR:
    torch.manual_seed(1)
    return MAR(replace(CONFIGS["mar_draft"], steps=STEPS))


def test_a_draft_learns_the_paths_of_the_target(model: Any, tmp_path: Path) -> None:
    recipe = Recipe(steps=30, batch=8, lr=1e-2, warmup=2, precision="float32", save_every=10)
    statistics = paths.train(model, new_draft(), *paths.examples(model, 40), recipe, tmp_path)
    assert statistics["path_kl"] < 0.5 * statistics["path_kl_before"]
    assert 0 <= statistics["acceptance"] < 1
    assert statistics["tokens_per_pass"] == pytest.approx(1 / (1 - statistics["acceptance"]))


def test_measurements_of_paths(model: Any) -> None:
    """No divergence for the target itself. For other variances the divergence follows its formula, and the total
    variation is within the bounds of Pinsker and of Bretagnolle and Huber."""
    distributions, labels = paths.examples(model, 40)

    def measured(draft: Guided) -> dict[str, float]:
        return paths.evaluate(model.target, draft, distributions, labels)

    itself = measured(model.target)
    assert (itself["path_kl"], itself["acceptance"]) == (pytest.approx(0, abs=1e-5), pytest.approx(1, abs=1e-5))
    near, schedule = copy.deepcopy(model.target.model), diffusion.schedule(STEPS)
    with torch.no_grad():  # the log variance of step t changes by `more` of t, whatever the state
        near.diffloss.net.final_layer.linear.bias[3:] += 0.4
    more = 0.4 * (schedule.log_betas - schedule.posterior_log_variance_clipped) / 2
    columns = measured(replace(model.target, model=near))
    expected = 3 * 0.5 * float(((-more).exp() - 1 + more).sum())
    assert expected > 0.1
    assert columns["path_kl"] == pytest.approx(expected, abs=4 * columns["path_kl_stderr"])
    slack, distance = 4 * columns["acceptance_stderr"], 1 - columns["acceptance"]  # the total variation
    assert slack < distance < min((expected / 2) ** 0.5, (1 - math.exp(-expected)) ** 0.5) + slack
    assert columns["tokens_per_pass"] == pytest.approx(1 / distance)


def test_the_stage_writes_a_drafter_that_a_run_uses(tiny: None, tmp_path: Path) -> None:
    files = test_mar_scenes.train(tmp_path, "--only", "mar_draft_path_kl")  # the stages that it needs are added
    assert files.keys() == {"scenes_kl", "scenes_mar", "scenes_mar_draft", "scenes_mar_draft_path_kl"}
    assert files["scenes_mar_draft"] != files["scenes_mar_draft_path_kl"]
    file = tmp_path / "assets/scenes_mar_draft_path_kl.safetensors"
    config, _ = checkpoints.read(file, registry.network("cspd").kind)
    assert config["encoder_dim"] == CONFIGS["mar_draft"].encoder_dim < TINY.encoder_dim
    run = ["model=mar_scenes", f"weights={tmp_path / 'assets'}", "diffusion_steps=3", "method=cspd", "gamma=2", "n=2"]
    assert cli.main(["run", *run, "batch=2", *QUICK, f"drafter.weights={file}", f"out={tmp_path}/run"]) == 0
    assert row_of(tmp_path / "run")["drafter_weights"] == str(file)
