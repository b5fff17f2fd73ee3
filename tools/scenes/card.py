"""Results of the embedded models: attributes read from vanilla samples, and the model card with all statistics."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from specbench import metrics
from specbench.config import registry
from specbench.config.run_config import PromptSelection
from specbench.data import Item, scenes, scenes_classes
from specbench.data.worlds import World
from specbench.harness.pipeline import ContinuousPipeline, Pipeline
from specbench.models import evaluators as ev
from specbench.models.loading import checkpoints
from specbench.models.pixels import to_float, to_uint8
from specbench.models.supervision import TargetHead
from specbench.models.vq import VQConfig, VQModel
from specbench.storage import home, image_files
from specbench.storage.origin import environment
from specbench.training import drafter
from specbench.training.dataset import LiveDataset
from specbench.training.examples import Encoded
from tools.scenes import tokenizer

SAMPLES, BATCH, DECODED = 256, 16, 64  # DECODED changes no image


def samples(world: World, assets: Path, device: torch.device, rows: range) -> np.ndarray:
    """Vanilla samples (n, size, size, 3) uint8 of the captions of the validation images `rows`, with the model's
    default guidance, at temperature 1."""
    pipeline = _pipeline(assets, device, f"model=llamagen_{world.name}", "method=vanilla", "dtype=float32")
    captions = [world.sample("validation", i).caption for i in rows]
    images = []
    for i in tqdm(range(0, len(rows), DECODED), desc=f"samples from {rows.start}"):
        conditioning = pipeline.encode(captions[i : i + DECODED])
        tokens = pipeline.decode(conditioning, [(0, j) for j in rows[i : i + DECODED]]).tokens
        images.append(pipeline.pixels(tokens))
    return np.concatenate(images)


def sample_statistics(world: World, assets: Path, device: torch.device, images: np.ndarray) -> dict[str, float]:
    """Attribute accuracy of `samples`, measured by the reader.

    `reader_accuracy_vanilla` is the share of stated attributes that the reader reads as stated. `..._renders` is the
    same share on the real images of these captions. `..._tokenized` is the share on the real images after the
    tokenizer: no sample can exceed it.
    """
    reader = ev.load(assets / f"{world.name}_reader.safetensors", ev.AttributeReader, device)
    real, _, labels = world.render("validation", range(len(images)))
    return {
        "reader_accuracy_renders": _read(reader, real, labels),
        "reader_accuracy_tokenized": _read(reader, _reconstructed(world, assets, device, real), labels),
        "reader_accuracy_vanilla": _read(reader, images, labels),
    }


def fidelity_statistics(world: World, assets: Path, device: torch.device, images: np.ndarray) -> dict[str, float]:
    """The Fréchet distance of `samples` from all validation images, and the classifier's accuracy on them.

    `fid_of_training` is the distance of as many training images: the score of a perfect model. `fid_tokenized` is the
    distance of as many validation images after the tokenizer. The classifier gives the features of the distance, so its
    accuracy is no independent one.
    """
    real, _, labels = world.render("validation", range(len(images)))
    training, captions, _ = world.render("train", range(len(images)))
    tokenized = _reconstructed(world, assets, device, real)
    classifier = ev.load(assets / f"{world.name}_classifier.safetensors", ev.Classifier, device)
    context = metrics.ScoringContext(assets, home.metrics_folder(), device=str(device))
    items = [Item(i, caption, None) for i, caption in enumerate(captions)]
    statistics = {"images": float(len(images))}
    for name, of in {"fid": images, "fid_of_training": training, "fid_tokenized": tokenized}.items():
        score = metrics.score([f"{world.name}_fid"], image_files.ImageArray(of), items, context)["fid"]
        assert score.value is not None
        statistics[name] = score.value
    for name, of in {"vanilla": images, "photographs": real, "tokenized": tokenized}.items():
        statistics[f"classifier_accuracy_{name}"] = _read(classifier, of, labels)
    return statistics


@torch.inference_mode()
def _reconstructed(world: World, assets: Path, device: torch.device, images: np.ndarray) -> np.ndarray:
    """Images after the tokenizer."""
    vq = _tokenizer(world, assets, device)
    parts = to_float(images).split(BATCH)
    return np.concatenate([to_uint8(vq.decode(vq.encode(part.to(device)))) for part in parts])


def _tokenizer(world: World, assets: Path, device: torch.device) -> VQModel:
    return checkpoints.load(assets / f"{world.name}_tokenizer.safetensors", "tokenizer", VQModel, VQConfig, device)


def neighbour_statistics(world: World, assets: Path, device: torch.device) -> dict[str, float]:
    """Measures how well a code can be replaced by a near one, as LANTERN assumes.

    A tenth of the codes of validation images is replaced by their k-th neighbour, or by random codes (`random`).
    Returns the change of the pixels (0 to 255), and the share of attributes that the reader reads right.
    """
    vq = _tokenizer(world, assets, device)
    reader = ev.load(assets / f"{world.name}_reader.safetensors", ev.AttributeReader, device)
    images, _, labels = world.render("validation", range(SAMPLES))
    statistics: dict[str, float] = {}
    for k in tokenizer.NEIGHBOURS:
        changed, pixels = tokenizer.replaced(vq, images, k)
        name = f"neighbour_{k}" if k else "random"
        statistics |= {f"pixels_{name}": pixels, f"reader_accuracy_{name}": _read(reader, changed, labels)}
    return statistics


#: Name in the card -> network and weights (a value of drafter_weights=) of every drafter of discrete tokens.
DRAFTERS = {
    f"tv_{network.folder}{variant and f'_{variant}'}": (name, f"embedded{variant and f':{variant}'}")
    for name, network in registry.drafter_networks().items()
    if network.training
    for variant in ("", *network.variants)
}


def drafter_statistics(world: World, assets: Path, device: torch.device, count: int) -> dict[str, dict[str, float]]:
    """For each of the world's drafters in the folder: the model's default guidance and temperature, and the drafter's
    distance from the target with them, on `count` validation images (see `drafter.evaluate`)."""
    pipeline = _pipeline(assets, device, f"model=llamagen_{world.name}", "method=vanilla", "dtype=float32")
    model, sampling = pipeline.model, pipeline.config.sampling
    images, captions, _ = world.render("validation", range(count))
    with torch.inference_mode():
        codes = torch.cat([model.codes(part) for part in to_float(images).split(BATCH)]).cpu().numpy()
    conditions, statistics = Encoded(pipeline, captions), {}
    for name, (kind, drafter_weights) in DRAFTERS.items():
        network = registry.network(kind)
        path = assets / network.path(drafter_weights, world.name).name
        if not path.is_file():
            continue
        drafts = model.trained(kind, path)
        target = model.target.with_aux_hidden_layers(getattr(drafts.cfg, "aux_hidden_layers", ()))
        training = pkgutil.resolve_name(network.training)(drafts, TargetHead(target))
        data = LiveDataset(target, codes, conditions)
        settings = {"cfg_scale": sampling.cfg_scale, "temperature": sampling.temperature}
        statistics[name] = settings | drafter.evaluate(
            training, data, range(count), batch_size=BATCH, sampling=sampling
        )
    return statistics


def embedded_model(assets: Path, device: torch.device, name: str) -> Any:
    """The model of this name with the weights in the folder, in float32."""
    return _pipeline(assets, device, f"model={name}", "method=vanilla", "dtype=float32").model


def weights_argument(assets: Path) -> str:
    """The value of weights= that makes a run use this folder."""
    return "embedded" if assets == registry.ASSETS else str(assets)


@torch.inference_mode()
def _right(reader: ev.AttributeReader | ev.Classifier, images: np.ndarray, labels: np.ndarray) -> Tensor:
    device = next(reader.parameters()).device
    parts = zip(to_float(images).split(SAMPLES), torch.as_tensor(labels).split(SAMPLES), strict=True)
    return torch.cat([ev.read_right(reader(x.to(device)), y.to(device)) for x, y in parts])


def _read(reader: ev.AttributeReader | ev.Classifier, images: np.ndarray, labels: np.ndarray) -> float:
    return float(_right(reader, images, labels).nanmean())


@dataclass(frozen=True)
class Trial:
    """The samples that the card of the pair is computed from.

    `count` vanilla images at each guidance scale of `scales`, which includes the model's default, and `drafted` images
    with drafts of `gamma` tokens. `overrides` sets parameters of the model.
    """

    count: int = 120
    drafted: int = 32
    gamma: int = 4
    scales: tuple[float, ...] = (1.0, 2.0)
    overrides: tuple[str, ...] = ()


def class_statistics(assets: Path, device: torch.device, trial: Trial) -> dict[str, float]:
    """Share of shapes and colours that the reader reads as in the class, by guidance scale. Empty without a reader.

    `reader_accuracy_renders` is this share on real images, and `..._decoded` on real images after the autoencoder.
    `..._vanilla` is the share at the model's default guidance, and is also given by attribute.
    """
    path = assets / "scenes_reader.safetensors"
    if not path.is_file():
        return {}
    reader = ev.load(path, ev.AttributeReader, device)
    real, numbers = scenes_classes.portraits("validation", trial.count)
    labels = np.array([scenes_classes.labels_of(int(number)) for number in numbers])
    default_pipeline = _pipeline(assets, device, "model=mar_scenes", *trial.overrides, "method=vanilla")
    with torch.inference_mode():
        pixels = to_float(real).to(device)
        decoded = [
            default_pipeline.pixels(default_pipeline.model.autoencoder.token_distribution(x)[0])
            for x in pixels.split(50)
        ]
    statistics = {
        "reader_accuracy_renders": _classes_read(reader, real, labels)["shape_and_colour"],
        "reader_accuracy_decoded": _classes_read(reader, np.concatenate(decoded), labels)["shape_and_colour"],
    }
    items = scenes_classes.items(PromptSelection("scenes_classes", trial.count))
    labels = np.array([item.labels for item in items])
    for scale in trial.scales:
        pipeline = _pipeline(
            assets, device, "model=mar_scenes", *trial.overrides, "method=vanilla", f"cfg_scale={scale}"
        )
        accuracies = _classes_read(reader, _sample(pipeline, items)[0], labels)
        statistics[f"reader_accuracy_cfg_{scale:g}"] = accuracies["shape_and_colour"]
        if scale == default_pipeline.model.target.scale:
            statistics["reader_accuracy_vanilla"] = accuracies.pop("shape_and_colour")
            statistics |= {f"vanilla_{name}": value for name, value in accuracies.items()}
    return statistics


def draft_statistics(assets: Path, device: torch.device, trial: Trial) -> dict[str, float]:
    """Share of verified draft tokens that are accepted, and tokens per target pass, for each exact criterion. At the
    model's default guidance; for `path` without guidance, too."""
    statistics = {}
    items = scenes_classes.items(PromptSelection("scenes_classes", trial.drafted))
    for name, arguments in {
        "path": ["criterion=path"],
        "path_cfg_1": ["criterion=path", "cfg_scale=1"],
        "exact": ["criterion=exact"],
    }.items():
        pipeline = _pipeline(
            assets, device, "model=mar_scenes", *trial.overrides, "method=cspd", f"gamma={trial.gamma}", *arguments
        )
        _, steps, drafted, accepted = _sample(pipeline, items)
        statistics[f"acceptance_{name}"] = accepted / drafted
        statistics[f"tokens_a_pass_{name}"] = len(items) * pipeline.tokens_per_image / steps
    return statistics


def _pipeline(assets: Path, device: torch.device, *arguments: str) -> Any:
    from specbench.config import configuration

    cfg = configuration.compose(list(arguments))
    return Pipeline.load(cfg.changed(weights=weights_argument(assets), device=str(device)))


def _sample(
    pipeline: Pipeline | ContinuousPipeline, items: Sequence[Item], batch: int = 64
) -> tuple[np.ndarray, int, int, int]:
    """Images of the items, and the totals of target passes, of verified and of accepted draft tokens."""
    images, counts = [], np.zeros(3, dtype=np.int64)
    for i in tqdm(range(0, len(items), batch), desc="samples of classes"):
        part = items[i : i + batch]
        out = pipeline.decode(pipeline.encode([item.prompt for item in part]), [(0, item.index) for item in part])
        images.append(pipeline.pixels(out.tokens))
        counts += [int(x.sum()) for x in (out.steps, out.drafted, out.accepted)]
    steps, drafted, accepted = counts.tolist()
    return np.concatenate(images), steps, drafted, accepted


def _classes_read(reader: ev.AttributeReader, images: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Share of each class attribute that is read as stated in labels (N, 14)."""
    shares = _right(reader, images, labels).nanmean(0)
    one_object, shape, colour = (
        float(shares[list(scenes.ATTRIBUTES).index(name)]) for name in scenes_classes.ATTRIBUTES
    )
    return {"one_object": one_object, "shape": shape, "colour": colour, "shape_and_colour": (shape + colour) / 2}


#: The goals of the embedded models: (stage, name, meaning, lowest, highest).
GOALS: list[tuple[str, str, str, float, float]] = [
    ("tokenizer", "psnr_db", "PSNR of the tokenizer on validation images, dB", 26.0, np.inf),
    ("tokenizer", "codes_used", "share of the codebook that is used", 0.80, 1.0),
    ("target", "top1_probability", "mean probability of the target's most probable token", 0.25, 0.55),
    ("tv_eagle", "tv", "total variation between EAGLE drafter and target, with the default guidance", 0.35, 0.55),
    ("tv_eagle", "tv_unguided", "total variation between EAGLE drafter and target, without guidance", 0.15, 0.45),
    ("evaluators", "reader_accuracy", "share of attributes that the reader reads right, real images", 0.97, 1.0),
    (
        "samples",
        "reader_accuracy_vanilla",
        "share of attributes that the reader reads right, vanilla samples with guidance 3",
        0.85,
        1.0,
    ),
    ("kl", "psnr_db", "PSNR of the KL autoencoder on validation images of one object, dB", 26.0, np.inf),
    (
        "mar_samples",
        "reader_accuracy_vanilla",
        "share of shapes and colours that the reader reads right, vanilla samples of mar_scenes",
        0.75,
        1.0,
    ),
    ("textures_tokenizer", "psnr_db", "textures: PSNR of the tokenizer on validation images, dB", 24.0, np.inf),
    ("textures_tokenizer", "codes_used", "textures: share of the codebook of 8,192 that is used", 0.80, 1.0),
    ("textures_tokenizer", "code_perplexity", "textures: perplexity of the codes", 3000.0, np.inf),
    (
        "textures_target",
        "top1_probability",
        "textures: mean probability of the target's most probable token",
        0.05,
        0.2,
    ),
    ("textures_tv_eagle", "tv_unguided", "textures: total variation between EAGLE drafter and target", 0.32, 0.38),
    ("textures_evaluators", "reader_accuracy", "textures: share of attributes read right, real images", 0.85, 1.0),
    ("fashion_tokenizer", "psnr_db", "fashion: PSNR of the tokenizer on test photographs, dB", 30.0, np.inf),
    ("fashion_tokenizer", "codes_used", "fashion: share of the codebook that is used", 0.80, 1.0),
    ("fashion_evaluators", "classifier_accuracy", "fashion: accuracy of the classifier, test photographs", 0.85, 1.0),
    ("fashion_samples", "reader_accuracy_vanilla", "fashion: share of classes read right, vanilla samples", 0.75, 1.0),
    (
        "textures_samples",
        "reader_accuracy_vanilla",
        "textures: share of attributes read right, vanilla samples",
        0.7,
        1.0,
    ),
]


def named(world: str, stage: str) -> str:
    """The name of a stage in the card."""
    return stage if world == "scenes" else f"{world}_{stage}"


@dataclass
class Card:
    """The model card. runs: (stages, origin) of every training; statistics: stage -> name -> value."""

    runs: list[tuple[list[str], str]] = field(default_factory=list)
    statistics: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Card:
        """The card in a file, or an empty card if the file does not exist."""
        text = path.read_text() if path.is_file() else ""
        runs = [(stages.split(", "), source) for stages, source in re.findall(r"^- ([a-z0-9_, ]+): (.+)$", text, re.M)]
        statistics = {
            stage: {name: float(value) for name, value in (pair.split(" ") for pair in row.split(", "))}
            for stage, row in re.findall(r"^\| (\w+) \| (\w+ [-+.\w]+(?:, \w+ [-+.\w]+)*) \|$", text, re.M)
        }
        return cls(runs, statistics)

    def add(self, statistics: Mapping[str, dict[str, float]], source: str, order: Iterable[str]) -> None:
        """Replace the statistics of these stages."""
        others = [([stage for stage in stages if stage not in statistics], old) for stages, old in self.runs]
        self.runs = [run for run in others if run[0]] + [(list(statistics), source)]
        merged = self.statistics | dict(statistics)
        self.statistics = {stage: merged[stage] for stage in order if stage in merged}

    def render(self) -> str:
        """The card as Markdown: the goals with the reached values, then all statistics by stage."""
        lines = [
            "# The embedded models",
            "",
            "`make train-scenes`, `make train-textures` and `make train-fashion` write this file. It has statistics of",
            "the weights under `specbench/assets`, measured on the validation split of their world from the stored",
            "half-precision files. The validation split of *fashion* is its 10,000 test photographs. Stages of",
            "*textures* and *fashion* begin with its name.",
            "",
            *(f"- {', '.join(stages)}: {source}" for stages, source in self.runs),
            "",
            "| statistic | value | goal | |",
            "|---|---|---|---|",
        ]
        for stage, name, what, low, high in GOALS:
            if name in self.statistics.get(stage, {}):
                value = self.statistics[stage][name]
                goal = f"at least {low:g}" if high in (1.0, np.inf) else f"{low:g} to {high:g}"
                lines.append(
                    f"| {what} | {value:.4g} | {goal} | {'reached' if low <= value <= high else '**missed**'} |"
                )
        lines += ["", "| stage | statistics |", "|---|---|"]
        lines += [
            f"| {stage} | " + ", ".join(f"{k} {v:.4g}" for k, v in values.items()) + " |"
            for stage, values in self.statistics.items()
        ]
        return "\n".join(lines) + "\n"


def origin(device: torch.device, budget: str, date: str) -> str:
    """The device, versions, date and budget of a training, as text."""
    facts = environment(device)
    return (
        f"{facts['device_name']}; torch {facts['torch']}; specbench {facts['specbench']}, commit {facts['commit']};"
        f" {date}; budget `{budget}`"
    )
