"""The plan of a drafter's training, from command-line arguments and a recipe in conf/recipes.yaml. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.config import command_line, configuration, parameters, registry
from specbench.config.parameter import Parameter
from specbench.config.run_config import RunConfig
from specbench.errors import UsageError, unknown, values
from specbench.storage import home
from specbench.storage.reading import read_yaml

#: The arguments of a training. All others are arguments of a run: model, weights, data, seed, temperature, ...
TABLE: dict[str, Parameter] = {
    "drafter": Parameter("string", "the network that is trained", choices=registry.trained()),
    "recipe": Parameter(
        "string",
        "the recipe with the defaults of the other arguments: lantern for LlamaGen; coolsd for other real targets;"
        " scenes, textures and fashion for the embedded targets",
    ),
    "out": Parameter("path", "folder of the weights, their card, the curves, the examples and the state for resuming"),
    "examples": Parameter("path", "folder of the examples, for trainings that share them", null="examples/ in out"),
    "start": Parameter(
        "path", "weights that the training starts from, as for drafter.weights=", null="untrained weights"
    ),
    "images": Parameter(
        "path",
        "folder of images: the images of data=, or images with their captions in .txt files next to them; for a"
        " class-conditional model, one folder per class",
        null="the images that data= draws itself",
    ),
    "source": Parameter(
        "string",
        "tokens of images with captions, from the model's tokenizer, or tokens that the target draws",
        choices=("pairs", "self"),
    ),
    "features": Parameter(
        "string",
        "the target's hidden states are stored on disk, or computed during training",
        choices=("stored", "live"),
    ),
    "n": Parameter("integer", "examples", low=2, high=10_000_000),
    "held_out": Parameter(
        "number", "share of the examples that is held out for validation", low=0, above=True, high=0.5
    ),
    "epochs": Parameter("number", "passes over the examples", low=0, high=1e6, above=True, null="given by steps"),
    "steps": Parameter("integer", "optimiser steps", low=1, high=10**9, null="given by epochs"),
    "batch": Parameter("integer", "examples per step", low=1, high=2**16),
    "accumulate": Parameter("integer", "passes that share a step's examples", low=1, high=2**12),
    "decode_batch": Parameter("integer", "images that the target draws, or tokenizes, at once", low=1, high=2**12),
    "lr": Parameter("number", "peak learning rate", low=0, above=True),
    "warmup": Parameter("integer", "steps during which the learning rate rises", low=0, high=10**9),
    "schedule": Parameter(
        "string", "how the learning rate falls: a cosine to 5 %, or a line to 0", choices=("cosine", "linear")
    ),
    "weight_decay": Parameter("number", "weight decay of matrices in AdamW", low=0),
    "beta1": Parameter("number", "AdamW's", low=0, high=0.9999),
    "beta2": Parameter("number", "AdamW's", low=0, high=0.9999),
    "clip": Parameter("number", "largest norm of the gradient", low=0, above=True),
    "ema": Parameter(
        "number", "decay of the moving average that replaces the weights at the end; 0: no average", low=0, high=0.9999
    ),
    "muon": Parameter("flag", "use Muon for the blocks' matrices"),
    "precision": Parameter(
        "string", "dtype of the forward and backward passes; weights are float32", choices=("bfloat16", "float32")
    ),
    "dropout": Parameter("number", "share of examples without their prompt", low=0, high=1),
    "noise": Parameter("number", "half-width of the noise on the target's hidden states", low=0),
    "cross": Parameter("number", "weight of the cross-entropy", low=0),
    "regression": Parameter("number", "weight of the distance to the target's hidden states", low=0),
    "unroll_steps": Parameter(
        "integer", "unroll steps that an EAGLE drafter learns on its own outputs", low=1, high=32
    ),
    "decay": Parameter(
        "number",
        "weight of an unroll step, a Medusa head or a DFlash slot, relative to the previous one",
        low=0,
        high=1,
    ),
    "positions": Parameter(
        "number",
        "share of an example's positions, other ones in every step, that the loss counts: with a large codebook, the"
        " logits are most of the work",
        low=0,
        above=True,
        high=1,
    ),
    "freeze": Parameter("flag", "do not train the token table, which is the target's (EAGLE drafters)"),
    "labels": Parameter(
        "string", "the cross-entropy is to the target's distribution or to the token", choices=("distribution", "token")
    ),
    "guided": Parameter(
        "flag", "drafter and target are compared under the guidance cfg_scale, which takes two passes per example"
    ),
    "heads": Parameter("integer", "Medusa heads, or masks of a DFlash block", low=1, high=64),
    "keep": Parameter(
        "string",
        "the weights with the best top-3 agreement on the held-out examples, or the last weights",
        choices=("top3", "last"),
    ),
    "checkpoints": Parameter(
        "integers", "steps after which the weights are also stored, in step-N/ in out", low=1, high=10**9, null="none"
    ),
    "validate_every": Parameter("integer", "steps between validations", low=1, high=10**9),
    "save_every": Parameter("integer", "steps between saved states", low=1, high=10**9),
    "tensorboard": Parameter("flag", "also write the curves for TensorBoard"),
}
_FILE, _EMBEDDED = "recipes.yaml", "scenes"
_FREE = {"out": None, "examples": None, "images": None, "decode_batch": 16, "tensorboard": False}
#: Arguments that do not affect the weights, and may change when a training is resumed.
WHERE = ("out", "examples", "save_every", "tensorboard", "decode_batch")


@dataclass(frozen=True)
class TrainingPlan:
    """A checked command line: the `arguments` of `TABLE`, and the configuration of a run, which names the target."""

    arguments: Mapping[str, Any]
    cfg: RunConfig

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def out(self) -> Path:
        return home.expanded(self.arguments["out"])

    @property
    def examples(self) -> Path:
        return home.expanded(self.arguments["examples"]) if self.arguments["examples"] else self.out / "examples"

    def replaced(self, **arguments: Any) -> TrainingPlan:
        return dataclasses.replace(self, arguments={**self.arguments, **arguments})


def plan(arguments: Sequence[str]) -> TrainingPlan:
    """The plan of a command line: `plan(["drafter=eagle", "model=llamagen_xl", "images=DIR"])`.

    Raises UsageError for unknown, contradictory or missing arguments.
    """
    training_arguments, run_arguments = _split_arguments(command_line.read(arguments, command_arguments=TABLE))
    kind = training_arguments.get("drafter")
    if kind is None:
        raise UsageError(f"name the drafter to train: drafter={'|'.join(registry.trained())}")
    kind = _checked("drafter", kind)
    run_parameters = values(run_arguments, {w.partition("=")[0] for w in run_arguments})
    model = run_parameters.get("model", parameters.default_choice("model"))
    if model in parameters.choices("model") and parameters.kind("model", model) != "discrete":
        raise UsageError(f"drafter={kind} is for models of discrete tokens, and model={model} is none: name another")
    recipe = training_arguments.get("recipe", _default_recipe(model))
    settled = settings(recipe, kind)
    run = settled.pop("run")
    settled |= {name: _checked(name, text) for name, text in training_arguments.items()} | {"recipe": recipe}
    for length, alternative in (("epochs", "steps"), ("steps", "epochs")):
        if length in training_arguments and alternative not in training_arguments:
            settled[alternative] = None
    if (settled["epochs"] is None) == (settled["steps"] is None):
        raise UsageError("give the length of the training: either epochs= or steps=")
    if settled["source"] == "self" and settled["images"]:
        raise UsageError("images= is for source=pairs; with source=self the target draws the images")
    stored = settled["features"] == "stored"
    if kind == "draft_model" and stored:
        raise UsageError("a draft model learns from prompts, not from hidden states: use features=live")
    if settled["guided"] and stored:
        raise UsageError("guided=true needs every example with and without its prompt: use features=live")
    has_data = settled["images"] or {"data", "prompts"} & set(run_parameters)
    defaults = [] if has_data else [f"{k}={v}" for k, v in run.items() if k not in run_parameters]
    n = [] if settled["images"] else [f"n={settled['n']}"]
    cfg = configuration.compose(["method=vanilla", "metrics=none", "baseline=false", *run_arguments, *defaults, *n])
    settled["out"] = settled["out"] or str(registry.trained_folder(cfg, kind))
    return TrainingPlan(settled, cfg)


def settings(recipe: str, kind: str) -> dict[str, Any]:
    """The settings of a recipe for a kind of drafter; `run`: its arguments of a run. Raises UsageError for an unknown
    recipe, and for missing or unknown settings."""
    recipes = _recipes()
    if recipe not in recipes:
        raise unknown("recipe", recipe, recipes)
    common = recipes[recipe]
    by_drafter = {name: common.pop(name, {}) for name in registry.trained()}
    merged = {**common, **by_drafter[kind]}
    run = merged.pop("run", {})
    required = set(TABLE) - set(_FREE) - {"drafter", "recipe"}
    if odd := sorted(required ^ set(merged)):
        raise UsageError(
            f"recipe {recipe} in conf/{_FILE} must set {', '.join(sorted(required))} (check: {', '.join(odd)})"
        )
    checked = {name: _checked(name, value) for name, value in merged.items()}
    return {**_FREE, **checked, "drafter": kind, "recipe": recipe, "run": run}


def defaults() -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The defaults of all arguments of a training, from the recipe of the embedded target for its EAGLE drafter. Then,
    as (name, text), what each recipe changes, followed by its changes for single drafters."""
    recipes, kinds, changes = _recipes(), registry.trained(), []
    for name, settings in _read_file().items():
        like = settings.pop("like", "")
        by_drafter = [(f"- {kind}", _texts(settings.pop(kind))) for kind in kinds if kind in settings]
        base = recipes[like or _EMBEDDED]
        changed = _texts({key: value for key, value in settings.items() if key == "run" or base.get(key) != value})
        changes += [(name, f"as {like or 'above'}, but {changed}"), *by_drafter]
    merged = {**_FREE, **recipes[_EMBEDDED]}
    return {
        **merged,
        "recipe": "by the model",
        "out": "next to the target's files, or drafters/",
    }, changes


def _texts(values: Mapping[str, Any]) -> str:
    """Settings as on a command line, including the settings of `run`."""
    flat = {**values.get("run", {}), **{name: value for name, value in values.items() if name != "run"}}
    written = {name: value if isinstance(value, str) else json.dumps(value, separators=(",", ":")) for name, value in
               flat.items()}  # fmt: skip
    return " ".join(f"{name}={value}" for name, value in written.items())


def _read_file() -> dict[str, dict[str, Any]]:
    return read_yaml(parameters.conf_dir() / _FILE)


def _recipes() -> dict[str, dict[str, Any]]:
    """All recipes, completed with the values of the recipe that `like` names."""
    content = _read_file()
    return {name: {**content.get(recipe.pop("like", ""), {}), **recipe} for name, recipe in content.items()}


def _default_recipe(model: str) -> str:
    if parameters.default("model", model, "weights") == "embedded":
        return str(parameters.world("model", model))
    return "lantern" if model.startswith("llamagen") else "coolsd"


def _split_arguments(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The arguments of the training, and the arguments of a run."""
    training = [argument for argument in arguments if argument.partition("=")[0] in TABLE]
    return values(training, TABLE), [argument for argument in arguments if argument not in training]


def _checked(name: str, value: Any) -> Any:
    return TABLE[name].from_text(name, value) if isinstance(value, str) else TABLE[name].checked(name, value)
