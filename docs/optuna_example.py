"""The fastest setting of Cool-SD whose images are not worse than vanilla's by more than a bound, by Optuna.

    python docs/optuna_example.py [TRIALS] [PROMPTS]

Every trial is a run in runs/optuna/, and the study is in runs/optuna.db. The same command continues the study and reads
the runs that exist. A setting is good enough only if the whole 95 % interval of its reward minus vanilla's, prompt by
prompt, is above the bound. With few prompts no setting is. Trials compare steps, so they need no timing.
Measure the winner again with other prompts before you publish it: the best of many trials is also the luckiest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import optuna

import specbench

METRIC, BOUND = "scenes_reward", -0.03  # of the reward's difference from vanilla's
TRIALS, PROMPTS = (int(text) for text in [*sys.argv[1:], *["20", "200"][len(sys.argv) - 1 :]][:2])
COMMON = {"n": PROMPTS, "metrics": [METRIC], "batch": 16, "quiet": True}
ROOT = Path("runs/optuna")


def objective(trial: optuna.Trial) -> float:
    delta = round(trial.suggest_float("delta", 1.0, 4.0), 2)
    nu = round(trial.suggest_float("nu", 0.0, 2.0), 2)
    out = ROOT / f"delta={delta},nu={nu},n={PROMPTS}"
    result = specbench.run("cool_sd", delta=delta, nu=nu, baseline=False, out=out, **COMMON)
    compared = specbench.compare(vanilla, result).table.loc[METRIC]
    worst = (
        compared["low"] if compared["low"] == compared["low"] else compared["difference"]
    )  # no interval if all differences are equal
    trial.set_user_attr("excess", BOUND - float(worst))  # at most 0: good enough
    trial.set_user_attr("folder", str(result.folder))
    return float(result.row["step_compression"])


vanilla = specbench.run("vanilla", out=ROOT / f"vanilla,n={PROMPTS}", **COMMON)
sampler = optuna.samplers.TPESampler(seed=0, constraints_func=lambda trial: (trial.user_attrs["excess"],))
study = optuna.create_study(
    study_name=f"cool_sd, {PROMPTS} prompts",
    storage="sqlite:///runs/optuna.db",
    direction="maximize",
    sampler=sampler,
    load_if_exists=True,
)
study.optimize(objective, n_trials=TRIALS)
good = [
    trial for trial in study.get_trials(states=[optuna.trial.TrialState.COMPLETE]) if trial.user_attrs["excess"] <= 0
]
for trial in sorted(good, key=lambda trial: -(trial.value or 0))[:3]:
    print(f"step compression {trial.value:.3f} with {trial.params} in {trial.user_attrs['folder']}")
if not good:
    print(f"no setting is within the bound for certain: give more prompts than {PROMPTS}, or another BOUND")
