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
from specbench.errors import UsageError, unknown, values
from specbench.storage import home
from specbench.storage.reading import read_yaml

#: Every argument of a training; the others are those of a run: model, weights, data, seed, temperature, ...
TABLE: dict[str, Parameter] = {
    "drafter": Parameter("string", "the network that is trained", choices=registry.trained()),
    "recipe": Parameter(
        "string",
        "the recipe with the defaults of the other arguments: lantern for LlamaGen, coolsd for other real targets,"
        " scenes, textures and mar_scenes for the embedded ones",
    ),
    "out": Parameter("path", "folder of the weights, their card, the curves, the examples and the state for resuming"),
    "examples": Parameter("path", "folder of the examples, for trainings that share them", null="examples/ in out"),
    "start": Parameter(
        "path", "weights that the training starts from, as drafter.weights= takes them", null="untrained ones"
    ),
    "images": Parameter(
        "path",
        "folder of images: those that data= names, or each with its caption in a .txt next to it; for a"
        " class-conditional model a folder per class",
        null="the images that data= draws itself",
    ),
    "source": Parameter(
        "string",
        "tokens of images with captions, by the model's tokenizer, or those that the target draws",
        choices=("pairs", "self"),
    ),
    "features": Parameter(
        "string", "the target's hidden states are stored on disk, or computed on the fly", choices=("stored", "live")
    ),
    "n": Parameter("integer", "examples", low=2, high=10_000_000),
    "held_out": Parameter("number", "share of the examples held out for validation", low=0, above=True, high=0.5),
    "epochs": Parameter("number", "passes over the examples", low=0, high=1e6, above=True, null="given by steps"),
    "steps": Parameter("integer", "optimiser steps", low=1, high=10**9, null="given by epochs"),
    "batch": Parameter("integer", "examples per step", low=1, high=2**16),
    "accumulate": Parameter("integer", "passes that share a step's examples", low=1, high=2**12),
    "decode_batch": Parameter("integer", "images that the target draws, or tokenizes, at once", low=1, high=2**12),
    "lr": Parameter("number", "peak learning rate", low=0, above=True),
    "warmup": Parameter("integer", "steps in which the learning rate rises", low=0, high=10**9),
    "schedule": Parameter("string", "how it falls: a cosine to 5 %, or a line to 0", choices=("cosine", "linear")),
    "weight_decay": Parameter("number", "AdamW's, of matrices", low=0),
    "beta1": Parameter("number", "AdamW's", low=0, high=0.9999),
    "beta2": Parameter("number", "AdamW's", low=0, high=0.9999),
    "clip": Parameter("number", "largest norm of the gradient", low=0, above=True),
    "ema": Parameter(
        "number", "decay of the average that replaces the weights at the end; 0 is none", low=0, high=0.9999
    ),
    "muon": Parameter("flag", "Muon for the blocks' matrices"),
    "precision": Parameter("string", "of the passes; weights are float32", choices=("bfloat16", "float32")),
    "dropout": Parameter("number", "share of examples without their prompt", low=0, high=1),
    "noise": Parameter("number", "half-width of the noise on the target's hidden states", low=0),
    "cross": Parameter("number", "weight of the cross-entropy", low=0),
    "regression": Parameter("number", "weight of the distance to the target's hidden states", low=0),
    "unroll_steps": Parameter(
        "integer", "unroll steps that an EAGLE drafter learns on its own outputs", low=1, high=32
    ),
    "decay": Parameter(
        "number", "weight of an unroll step, a Medusa head or a DFlash slot, relative to the one before", low=0, high=1
    ),
    "freeze": Parameter("flag", "the token table stays the target's (EAGLE drafters)"),
    "objective": Parameter(
        "string",
        "of continuous tokens: the divergence of drafted paths from the target's, or the loss of MAR's own training",
        choices=("path_kl", "denoising"),
    ),
    "labels": Parameter(
        "string", "the cross-entropy is to the target's distribution or to the token", choices=("distribution", "token")
    ),
    "guided": Parameter(
        "flag", "drafter and target are compared under the guidance cfg_scale, which takes two passes an example"
    ),
    "heads": Parameter("integer", "Medusa heads, or masks of a DFlash block", low=1, high=64),
    "keep": Parameter(
        "string",
        "the weights with the best top-3 agreement on the held-out examples, or the last ones",
        choices=("top3", "last"),
    ),
    "checkpoints": Parameter(
        "integers", "steps after which weights are kept too, in step-N/ in out", low=1, high=10**9, null="none"
    ),
    "validate_every": Parameter("integer", "steps between validations", low=1, high=10**9),
    "save_every": Parameter("integer", "steps between saved states", low=1, high=10**9),
    "tensorboard": Parameter("flag", "curves for TensorBoard, too"),
}
_FILE, _EMBEDDED = "recipes.yaml", "scenes"
_FREE = {"out": None, "examples": None, "images": None, "decode_batch": 16, "tensorboard": False}
#: Arguments that do not affect the weights, and may change between one command and the next.
WHERE = ("out", "examples", "save_every", "tensorboard", "decode_batch")
#: Arguments that only drafters of discrete tokens have, and those that only drafters of continuous tokens have.
_DISCRETE = "features noise cross regression unroll_steps decay freeze labels heads keep".split()
_CONTINUOUS = ["objective"]


@dataclass(frozen=True)
class TrainingPlan:
    """A checked command line: `arguments` as of `TABLE`, and the run's configuration, which names the target."""

    arguments: Mapping[str, Any]
    cfg: Mapping[str, Any]

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
    """From a command line: `plan(["drafter=eagle", "model=llamagen_xl", "images=DIR"])`.

    Raises UsageError for what does not exist, does not fit or is missing.
    """
    mine, theirs = _sorted_out(command_line.read(arguments, command_arguments=TABLE))
    kind = mine.get("drafter")
    if kind is None:
        raise UsageError(f"name the drafter to train: drafter={'|'.join(TABLE['drafter'].choices)}")
    kind = _checked("drafter", kind)
    parameters_of = values(theirs, {w.partition("=")[0] for w in theirs})
    model = parameters_of.get("model", parameters.default_choice("model"))
    _check_kind(kind, model, mine)
    recipe = mine.get("recipe", _default_recipe(model))
    settled = settings(recipe, kind)
    run = settled.pop("run")
    settled |= {name: _checked(name, text) for name, text in mine.items()} | {"recipe": recipe}
    if settled.get("objective") == "denoising":
        if "guided" in mine and settled["guided"]:
            raise UsageError(
                "objective=denoising does not compare with the target, so it has no guidance: leave guided= out"
            )
        settled["guided"] = False
    for one, other in (("epochs", "steps"), ("steps", "epochs")):
        if one in mine and other not in mine:
            settled[other] = None
    if (settled["epochs"] is None) == (settled["steps"] is None):
        raise UsageError("give the length of the training: either epochs= or steps=")
    if settled["source"] == "self" and settled["images"]:
        raise UsageError("images= are for source=pairs; with source=self the target draws them")
    stored = settled.get("features") == "stored"
    if kind == "draft_model" and stored:
        raise UsageError("a draft model learns from prompts, not from hidden states: use features=live")
    if settled["guided"] and stored:
        raise UsageError("guided=true needs each example with its prompt and without: use features=live")
    elsewhere = settled["images"] or {"data", "prompts"} & set(parameters_of)
    defaults = [] if elsewhere else [f"{k}={v}" for k, v in run.items() if k not in parameters_of]
    n = [] if settled["images"] else [f"n={settled['n']}"]
    cfg = configuration.compose(["method=vanilla", "metrics=none", "baseline=false", *theirs, *defaults, *n])
    settled["out"] = settled["out"] or f"drafters/{cfg['model']}/{kind}"
    return TrainingPlan(settled, cfg)


def _check_kind(kind: str, model: str, given: Mapping[str, str]) -> None:
    """UsageError unless the drafter is for the model's kind of tokens, and has the given arguments."""
    continuous = is_continuous(kind)
    mine, other = ("continuous", "discrete") if continuous else ("discrete", "continuous")
    if model in parameters.choices("model"):
        if parameters.kind("model", model) != mine:
            if parameters.kind("model", model) == "ordered":
                raise UsageError(f"{model} decodes in an order of its own, and no drafter is for such models")
            suited = [name for name in TABLE["drafter"].choices if is_continuous(name) != continuous]
            raise UsageError(
                f"{model} draws {other} tokens, and drafter={kind} is for {mine} ones: use drafter={'|'.join(suited)},"
                " or another model="
            )
        if continuous and parameters.default("model", model, "weights") != "embedded":
            raise UsageError(
                f"{model} takes a model of its family as its drafter, in draft/ or drafter_weights=; this command"
                " trains the drafter of mar_scenes alone"
            )
    for name in _DISCRETE if continuous else _CONTINUOUS:
        if name in given:
            raise UsageError(f"{name}= is for drafters of {other} tokens, and {kind} drafts {mine} ones: leave it out")


def is_continuous(kind: str) -> bool:
    """Whether a trained drafter is for continuous tokens."""
    return parameters.is_continuous("drafter", kind)


def settings(recipe: str, kind: str) -> dict[str, Any]:
    """The settings of a recipe for a kind of drafter, with `run`, its arguments of a run. UsageError for a recipe that
    does not exist, and for missing or unknown settings."""
    every, continuous = _recipes(), is_continuous(kind)
    known = {name: held for name, held in every.items() if ("objective" in held) == continuous}
    if recipe not in known:
        raise unknown(f"recipe for drafter={kind}", recipe, known)
    held = known[recipe]
    own = {name: held.pop(name, {}) for name in TABLE["drafter"].choices}
    found = {**held, **own[kind]}
    run = found.pop("run", {})
    wanted = set(TABLE) - set(_FREE) - {"drafter", "recipe"} - set(_DISCRETE if continuous else _CONTINUOUS)
    if odd := sorted(wanted ^ set(found)):
        raise UsageError(
            f"recipe {recipe} in conf/{_FILE} must set {', '.join(sorted(wanted))} (check: {', '.join(odd)})"
        )
    checked = {name: _checked(name, value) for name, value in found.items()}
    return {**_FREE, **checked, "drafter": kind, "recipe": recipe, "run": run}


def defaults() -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The default of every argument of a training, in the recipe of the embedded target for its EAGLE drafter; and what
    the recipes set instead, each followed by what it sets for one drafter alone, as name and text."""
    every, kinds, changes = _recipes(), TABLE["drafter"].choices, []
    for name, held in _read_file().items():
        like = held.pop("like", "")
        own = [(f"- {kind}", _texts(held.pop(kind))) for kind in kinds if kind in held]
        before = every[like or _EMBEDDED]
        other = _texts({key: value for key, value in held.items() if key == "run" or before.get(key) != value})
        changes += [(name, f"as {like or 'above'}, but {other}"), *own]
    known = {**_FREE, **every["mar_scenes"], **every[_EMBEDDED]}
    return {**known, "recipe": "by the model", "out": "drafters/MODEL/ DRAFTER"}, changes


def _texts(values: Mapping[str, Any]) -> str:
    """Settings as they are typed; the settings of `run` among the others."""
    flat = {**values.get("run", {}), **{name: value for name, value in values.items() if name != "run"}}
    written = {name: value if isinstance(value, str) else json.dumps(value, separators=(",", ":")) for name, value in
               flat.items()}  # fmt: skip
    return " ".join(f"{name}={value}" for name, value in written.items())


def _read_file() -> dict[str, dict[str, Any]]:
    return read_yaml(parameters.conf_dir() / _FILE)


def _recipes() -> dict[str, dict[str, Any]]:
    """Every recipe, with the values of the one that it is like."""
    held = _read_file()
    return {name: {**held.get(recipe.pop("like", ""), {}), **recipe} for name, recipe in held.items()}


def _default_recipe(model: str) -> str:
    if parameters.default("model", model, "weights") == "embedded":
        return "mar_scenes" if parameters.is_continuous("model", model) else str(parameters.world("model", model))
    return "lantern" if model.startswith("llamagen") else "coolsd"


def _sorted_out(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The training's own arguments, and those of a run."""
    mine = [argument for argument in arguments if argument.partition("=")[0] in TABLE]
    return values(mine, TABLE), [argument for argument in arguments if argument not in mine]


def _checked(name: str, value: Any) -> Any:
    return TABLE[name].from_text(name, value) if isinstance(value, str) else TABLE[name].checked(name, value)
