"""The stages of the embedded models' training, with their statistics. Every stage can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from specbench.config import registry
from specbench.data import fashion, scenes, scenes_classes
from specbench.data.worlds import DrawnWorld, World
from specbench.harness.pipeline import Pipeline
from specbench.models.llamagen import LlamaGen
from specbench.models.loading import checkpoints
from specbench.models.loading.mar_scenes import Latents
from specbench.models.mar import MAR
from specbench.models.scenes_config import MAR_CONFIGS, TOKEN_LIMIT, WORLDS, WorldConfig
from specbench.models.text import TextEncoder
from specbench.models.vq import VQModel
from specbench.storage.files import write_atomically
from specbench.training import command, recipes
from specbench.training.dataset import Conditions
from specbench.training.trainer import Recipe
from tools.scenes import card, evaluators, mar, paths, target, tokenizer, world


@dataclass(frozen=True)
class DrafterStage:
    """The training of a drafter network. recipe: its recipe, if it is not the default one; start: the stage whose
    weights it starts from; outputs: the weights that it writes, last the final ones, before them checkpoints; seed: of
    the untrained weights and of the order of the examples."""

    network: str
    outputs: tuple[str, ...]
    recipe: str = ""
    start: str = ""
    seed: int = 0


DRAFTERS = {
    **{f: DrafterStage(name, (f,)) for name in registry.trained() for f in [registry.network(name).folder]},
    "eagle_steps": DrafterStage("eagle", ("eagle_steps100", "eagle_steps300", "eagle_steps1000"), "scenes_steps"),
    **{f"eagle_seed{k}": DrafterStage("eagle", (f"eagle_seed{k}",), "scenes_steps", seed=k) for k in (1, 2)},
    "eagle_guided": DrafterStage("eagle", ("eagle_guided",), "scenes_guided", start="eagle"),
}


@dataclass(frozen=True)
class Budget:
    """recipes: the stages' recipes; measured: stages without a recipe; drafters: arguments that override the drafters'
    recipe (conf/recipes.yaml); variants: the same for drafters with another recipe; train, validation: numbers of
    images; evaluated, drafted: the validation images that measure the target, and a drafter; samples: vanilla samples;
    trial: the samples of the continuous pair."""

    recipes: dict[str, Recipe]
    measured: tuple[str, ...] = (*DRAFTERS, "drafters", "evaluators", "samples", "mar_samples")
    drafters: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    train: int = 80_000
    validation: int = 2_000
    evaluated: int = 1_000
    drafted: int = 150
    samples: int = card.SAMPLES
    trial: card.Trial = field(default_factory=card.Trial)


#: The start is near an optimum: 80 steps lose 0.2 nats with a learning rate of 5e-4, and 0.03 with 1e-4. bfloat16 is
#: only faster on CPUs with matrix units.
_PATHS = Recipe(steps=1200, batch=16, lr=1e-4, warmup=20, ema=0.995, muon=True, precision="float32", save_every=100)
_SCENES = {
    # two cores: two hours for the models of discrete tokens, 75 minutes for the continuous ones
    "cpu": Budget(
        {
            "tokenizer": Recipe(steps=1800, batch=48, lr=2e-3),
            "text": Recipe(steps=2000, batch=128, lr=1.5e-3),
            "target": Recipe(steps=9000, batch=32, lr=2e-3, ema=0.998, muon=True),
            "kl": Recipe(steps=1500, batch=48, lr=2e-3),
            "mar": Recipe(steps=3500, batch=64, lr=1e-3, ema=0.998, muon=True),
            "mar_draft": Recipe(steps=1500, batch=64, lr=1e-3, ema=0.998, muon=True),
            "mar_draft_path_kl": _PATHS,
        }
    ),
    "gpu": Budget(  # minutes
        {
            "tokenizer": Recipe(steps=6000, batch=128, lr=2e-3),
            "text": Recipe(steps=3000, batch=256, lr=1e-3),
            "target": Recipe(steps=20000, batch=128, lr=2e-3, ema=0.999, muon=True),
            "kl": Recipe(steps=6000, batch=128, lr=2e-3),
            "mar": Recipe(steps=20000, batch=256, lr=1e-3, ema=0.999, muon=True),
            "mar_draft": Recipe(steps=10000, batch=256, lr=1e-3, ema=0.999, muon=True),
            "mar_draft_path_kl": _PATHS,
        },
        drafters=("steps=6000", "batch=128", "ema=0.999"),
    ),
    "smoke": Budget(  # seconds: checks that everything runs, not that it learns
        {
            name: Recipe(steps=2, batch=2, lr=1e-3, warmup=1, ema=0.5)
            for name in ("tokenizer", "text", "target", "kl", "mar", "mar_draft")
        }
        | {"mar_draft_path_kl": replace(_PATHS, steps=2, batch=2, warmup=1)},
        measured=(*DRAFTERS, "drafters", "mar_samples"),
        drafters=("steps=2", "batch=2", "warmup=1"),
        # Not two steps: these weights would equal the default drafter's.
        variants=("steps=4", "batch=2", "warmup=1", "checkpoints=[1,3]"),
        train=24,
        validation=6,
        drafted=2,
        trial=card.Trial(count=2, drafted=1, gamma=2, scales=(2.0,), overrides=("diffusion_steps=3",)),
    ),
}
_MEASURED = ("draft", "eagle", "eagle3", "drafters", "evaluators", "samples")  # of textures
_FEW = {name: _SCENES["smoke"].recipes[name] for name in ("tokenizer", "text", "target")}
_TEXTURES = {
    "cpu": Budget(  # two cores: under five hours
        {
            "tokenizer": Recipe(steps=1500, batch=48, lr=2e-3),
            "text": Recipe(steps=3000, batch=128, lr=1.5e-3),
            "target": Recipe(steps=4000, batch=32, lr=2e-3, ema=0.998, muon=True),
        },
        measured=_MEASURED,
        train=40_000,
    ),
    "smoke": replace(_SCENES["smoke"], recipes=_FEW, measured=("draft", "eagle", "eagle3", "drafters")),
}
_FASHION = {
    "cpu": Budget(  # two cores: two hours
        {
            "tokenizer": Recipe(steps=900, batch=32, lr=2e-3, save_every=100),
            "target": Recipe(steps=1200, batch=32, lr=2e-3, ema=0.998, muon=True, save_every=100),
        },
        measured=_MEASURED,
        train=fashion.COUNTS["train"],
        validation=fashion.COUNTS["validation"],
        evaluated=fashion.COUNTS["validation"],
        samples=fashion.COUNTS["validation"],
    ),
    "smoke": replace(_TEXTURES["smoke"], recipes={name: _FEW[name] for name in ("tokenizer", "target")}),
}
#: World -> name -> budget.
BUDGETS = {"scenes": _SCENES, "textures": _TEXTURES, "fashion": _FASHION}
DISCRETE = ("tokenizer", "text", "target", *DRAFTERS, "drafters", "evaluators", "samples")
CONTINUOUS = ("kl", "mar", "mar_draft", "mar_draft_path_kl", "mar_samples")
#: World -> its stages, in order. Textures have no Medusa: its heads over 8,192 codes would be larger than the target.
STAGES = {
    "scenes": (*DISCRETE, *CONTINUOUS),
    "textures": ("tokenizer", "text", "target", "draft", "eagle", "eagle3", "drafters", "evaluators", "samples"),
    "fashion": ("tokenizer", "target", "draft", "eagle", "eagle3", "drafters", "evaluators", "samples"),
}


#: Stages that others train from: the seed and the shape of the untrained module.
_MODULES: dict[str, tuple[int, Callable[[World, WorldConfig], nn.Module]]] = {
    "tokenizer": (0, lambda of, shapes: VQModel(shapes.tokenizer)),
    "text": (1, lambda of, shapes: TextEncoder(shapes.text(of.name))),
    "target": (2, lambda of, shapes: LlamaGen(shapes.target)),
    "kl": (5, lambda of, shapes: Latents(MAR_CONFIGS["kl"])),
    "mar": (6, lambda of, shapes: MAR(MAR_CONFIGS["mar"])),
    "mar_draft": (7, lambda of, shapes: MAR(MAR_CONFIGS["mar_draft"])),
}


class Stages:
    """The stages. A stage is trained from the outputs of earlier stages, and is skipped when its training is complete.

    chosen: the stages to train. The others are read from their files; those without a file are trained, too.
    """

    def __init__(
        self,
        work: Path,
        assets: Path,
        budget: Budget,
        device: torch.device,
        distil: bool = True,
        of: World = scenes.WORLD,
        chosen: Collection[str] = (),
    ) -> None:
        self.world, self.shapes, self.chosen = of, WORLDS[of.name], chosen
        self.work, self.assets, self.budget, self.device, self.distil = work, assets, budget, device, distil
        work.mkdir(parents=True, exist_ok=True)
        self.recipes = budget.recipes
        self.statistics: dict[str, dict[str, float]] = {}
        self._made: dict[str, Any] = {}

    @cached_property
    def train(self) -> world.Split:
        return world.load(self.world, self.work, "train", self.budget.train)

    @cached_property
    def validation(self) -> world.Split:
        return world.load(self.world, self.work, "validation", self.budget.validation)

    def make(self, stage: str) -> Any:
        """The output of a stage. The stages that it needs are made first; no stage is made twice."""
        if stage not in self._made:
            if stage not in self.chosen and self.path(stage).is_file():
                build = partial(self._read, stage) if stage in _MODULES else lambda: None
            else:
                build = partial(self._drafter, stage) if stage in DRAFTERS else getattr(self, stage)
            self._made[stage] = build()
        return self._made[stage]

    def path(self, kind: str) -> Path:
        return self.assets / f"{self.world.name}_{kind}.safetensors"

    def _untrained(self, stage: str) -> Any:
        seed, build = _MODULES[stage]
        torch.manual_seed(seed)
        return build(self.world, self.shapes).to(self.device)

    def _stage(self, name: str, module: nn.Module, fit: Callable[[], dict[str, float]]) -> None:
        spent = fit()
        in_file = f"{self.world.name}-{name}"
        checkpoints.save(module.eval(), self.path(name), in_file)
        # load the saved weights back, so that the statistics include half precision
        checkpoints.fill(module, checkpoints.read(self.path(name), in_file)[1], name)
        self.statistics[name] = {k: v for k, v in spent.items() if k in ("seconds", "images")}

    def _read(self, name: str) -> nn.Module:
        like = self._untrained(name)
        in_file = f"{self.world.name}-{name}"
        return checkpoints.load(self.path(name), in_file, type(like), type(like.cfg), self.device)

    def _cached(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        path = self.work / f"{name}.npy"
        if not path.exists():
            np.save(path, make())
        return np.load(path, mmap_mode="r")

    def _encoded(self, name: str, images: Callable[[], np.ndarray]) -> np.ndarray:
        """Tokens of images."""
        vq = self.make("tokenizer")
        name = f"{name}-{registry.digest(self.path('tokenizer'))}"
        return self._cached(name, lambda: tokenizer.encode_all(vq, images()))

    # --- models of discrete tokens ------------------------------------------------------------------------------------

    def tokenizer(self) -> VQModel:
        vq = self._untrained("tokenizer")
        self._stage(
            "tokenizer", vq, lambda: tokenizer.train(vq, self.train.images, self.recipes["tokenizer"], self.work)
        )
        self.statistics["tokenizer"] |= tokenizer.evaluate(vq, self.validation.images)
        return vq

    def text(self) -> TextEncoder:
        text = self._untrained("text")
        self._stage(
            "text",
            text,
            lambda: target.train_text(
                self.world, text, self.train.captions, self.train.labels, self.recipes["text"], self.work
            ),
        )
        with torch.no_grad():
            features = text(text.tokenize(self.validation.captions).to(self.device))
            labels = torch.as_tensor(self.world.by_position(self.validation.labels)).to(self.device)
            _, right = target.reading_loss(self.world, text, features, labels)
        self.statistics["text"]["attributes_right"] = float(right)
        return text

    def codes(self) -> tuple[np.ndarray, np.ndarray]:
        return (
            self._encoded("codes-train", lambda: self.train.images),
            self._encoded("codes-validation", lambda: self.validation.images),
        )

    def conditions(self) -> tuple[Conditions, Conditions]:
        """The conditioning of the training and of the validation images: caption features, or classes."""
        splits = (self.train, self.validation)
        if self.shapes.target.num_classes:
            train, validation = (target.classed(split.labels[:, 0], self.device) for split in splits)
        else:
            text = self.make("text")
            train, validation = (
                target.captioned(target.features_of(text, split.captions), self.device) for split in splits
            )
        return train, validation

    def target(self) -> LlamaGen:
        (codes, held), (conditions, held_conditions) = self.make("codes"), self.make("conditions")
        model = self._untrained("target")
        self._stage(
            "target",
            model,
            lambda: target.train_target("target", model, codes, conditions, self.recipes["target"], self.work),
        )
        measured = target.evaluate_target(model, held[: self.budget.evaluated], held_conditions)
        measured["bits_per_pixel"] = measured["bits_per_token"] * held.shape[1] / self.world.size**2
        self.statistics["target"] |= measured
        return model

    def _drafter(self, stage: str) -> None:
        """Trained by the public command, on examples that the drafters share."""
        drafter = DRAFTERS[stage]
        trained = (stage for stage in ("tokenizer", "text", "target") if stage in self.recipes)
        for needed in (*trained, *filter(None, [drafter.start])):
            self.make(needed)
        wanted_scenes = recipes.settings(drafter.recipe, drafter.network)["n"] if drafter.recipe else self.budget.train
        n = min(wanted_scenes, self.budget.train)
        arguments = [f"drafter={drafter.network}", f"model=llamagen_{self.world.name}", f"n={n}"]
        arguments += [f"recipe={drafter.recipe}", *self.budget.variants] if drafter.recipe else self.budget.drafters
        arguments += [f"weights={card.weights_argument(self.assets)}", f"device={self.device}", f"seed={drafter.seed}"]
        plan = recipes.plan(arguments).replaced(
            out=str(self.work / stage),
            examples=str(self.work / (f"examples-{n}" + f"-seed{drafter.seed}" * bool(drafter.seed))),
            start=str(self.path(drafter.start)) if drafter.start else None,
        )
        pipeline = Pipeline.load(plan.cfg)
        assert isinstance(pipeline, Pipeline)
        shared = pipeline.model.loader(drafter.network).shared_tensors() if plan.arguments.get("freeze") else ()
        result = command.train(plan, pipeline)
        files = [*result.checkpoints, result.file][-len(drafter.outputs) :]
        for name, file in zip(drafter.outputs, files, strict=True):
            if shared:  # frozen, so these tensors are still the target's
                network = pipeline.model.trained(drafter.network, file)
                checkpoints.save(network, self.path(name), registry.network(drafter.network).kind, omitted=shared)
            else:
                write_atomically(self.path(name), file.read_bytes())
        self.statistics[stage] = {name: result.statistics[name] for name in ("seconds", "images")}

    def drafters(self) -> None:
        self.statistics |= card.drafter_statistics(self.world, self.assets, self.device, self.budget.drafted)

    def evaluators(self) -> None:
        statistics = evaluators.train_all(self.world, self.train, self.validation, self.work, self.assets, self.device)
        self.statistics["evaluators"] = statistics

    def samples(self) -> None:
        place = (self.world, self.assets, self.device)
        digest = "-".join(registry.digest(self.path(part)) for part in ("target", "tokenizer"))
        count = self.budget.samples
        parts = [range(i, min(i + card.SAMPLES, count)) for i in range(0, count, card.SAMPLES)]
        images = np.concatenate(
            [
                self._cached(f"samples-{digest}-{rows.start}-{rows.stop}", partial(card.samples, *place, rows))
                for rows in parts
            ]
        )
        self.statistics["samples"] = card.sample_statistics(*place, images) | card.neighbour_statistics(*place)
        if not isinstance(self.world, DrawnWorld):
            self.statistics["samples"] |= card.fidelity_statistics(*place, images)

    # --- models of continuous tokens, for scenes with one object ------------------------------------------------------

    def portraits(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Images of one object, (N, 64, 64, 3) uint8, and their classes (N,) int64: as many as the split has scenes
        with one object."""
        n = (self.budget.train if split == "train" else self.budget.validation) // 3
        images, classes = (self.work / f"portraits-{split}-{n}.{what}.npy" for what in ("images", "classes"))
        if not classes.exists():
            for path, made in zip((images, classes), scenes_classes.portraits(split, n), strict=True):
                np.save(path, made)
        return np.load(images, mmap_mode="c"), np.load(classes)  # "c": PyTorch needs it writable

    def kl(self) -> Latents:
        kl = self._untrained("kl")
        images = self.portraits("train")[0]
        self._stage("kl", kl, lambda: mar.train_kl(kl, images, self.recipes["kl"], self.work))
        self.statistics["kl"] |= mar.evaluate_kl(kl, self.portraits("validation")[0], TOKEN_LIMIT)
        return kl

    def latents(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Token distributions and classes: first of training images and their mirror images, then of validation
        images."""
        kl = self.make("kl")
        images, classes = self.portraits("train")
        validation, validation_classes = self.portraits("validation")
        digest = registry.digest(self.path("kl"))
        distributions = self._cached(f"latents-train-{digest}", lambda: mar.encode_all(kl, mar.mirrored(images)))
        validation_distributions = self._cached(f"latents-validation-{digest}", lambda: mar.encode_all(kl, validation))
        return distributions, np.tile(classes, 2), validation_distributions, validation_classes

    def mar(self) -> MAR:
        distributions, classes, *validation = self.make("latents")
        model = self._untrained("mar")
        self._stage(
            "mar", model, lambda: mar.train_target(model, distributions, classes, self.recipes["mar"], self.work)
        )
        self.statistics["mar"] |= mar.evaluate_target(model, *validation)
        return model

    def mar_draft(self) -> MAR:
        model = self.make("mar")
        distributions, classes, *validation = self.make("latents")
        draft = self._untrained("mar_draft")
        teacher = model if self.distil else None
        self._stage(
            "mar_draft",
            draft,
            lambda: mar.train_draft(draft, teacher, distributions, classes, self.recipes["mar_draft"], self.work),
        )
        self.statistics["mar_draft"] |= mar.evaluate_draft(model, draft, *validation)
        return draft

    def mar_draft_path_kl(self) -> None:
        """The smaller model, trained further on its paths."""
        for needed in ("kl", "mar", "mar_draft"):
            self.make(needed)
        name, model = "mar_draft_path_kl", card.embedded_model(self.assets, self.device, "mar_scenes")
        draft = model.trained("cspd", self.path("mar_draft"))
        data = paths.examples(model, min(paths.EXAMPLES, self.budget.train))
        self.statistics[name] = paths.train(model, draft, *data, self.recipes[name], self.work)
        checkpoints.save(draft, self.path(name), registry.network("cspd").kind)

    def mar_samples(self) -> None:
        trial = self.budget.trial
        self.statistics["mar_samples"] = card.class_statistics(self.assets, self.device, trial)
        self.statistics["mar_samples"] |= card.draft_statistics(self.assets, self.device, trial)
