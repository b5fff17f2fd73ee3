"""Trains and measures the evaluators of an embedded world.

The networks score images that a tokenizer has decoded, so half of every training batch is blurred and noisy. The reader
and the two-tower model learn to ignore the damage. The classifier learns to predict it, because its features also
measure fidelity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from specbench import metrics
from specbench.config.registry import ASSETS
from specbench.data import Item
from specbench.data.worlds import ABSENT, DrawnWorld, World
from specbench.metrics import scenes_reference
from specbench.metrics.scenes_reference import ScenesReference
from specbench.models import evaluators as ev
from specbench.models.pixels import to_float
from specbench.storage import home, image_files
from specbench.training.trainer import MicroStep, Recipe, fit
from tools.scenes.world import Split

CLASSIFIER_RECIPE = Recipe(steps=800, batch=128, lr=2e-3, warmup=100, weight_decay=0.05)
READER_RECIPES = {
    world: Recipe(steps=steps, batch=128, lr=2e-3, warmup=100, weight_decay=0.05)
    for world, steps in (("scenes", 1200), ("textures", 3000), ("fashion", 800))
}
TWO_TOWER_RECIPE = Recipe(steps=1000, batch=128, lr=1.5e-3, warmup=150, weight_decay=0.05)

FEATURES = 64  # of the classifier
RETRIEVAL = 100  # captions to choose from in the two-tower model's retrieval accuracy


def degrade(x: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Blur and add noise to the first half of a batch (B, 3, H, W) in [-1, 1], as a tokenizer might.

    Per image: a Gaussian blur of 0.05 to 1.2 pixels, noise of 0 to 0.1, and a colour shift of at most 0.05. Returns the
    batch, and the strengths (B, 2) of blur and noise from 0 to 1.
    """
    n, side = len(x) // 2, x.shape[-1]
    sigma = torch.as_tensor(rng.uniform(0.05, 1.2, (n, 1, 1, 1)), dtype=torch.float32, device=x.device)
    position = torch.arange(side, device=x.device)
    # (n, 1, H, H): one matrix blurs rows and columns
    blur = torch.softmax(-0.5 * ((position[:, None] - position) / sigma) ** 2, -1)
    noise = torch.as_tensor(rng.standard_normal(x[:n].shape, dtype=np.float32), device=x.device)
    noise_level = torch.as_tensor(rng.uniform(0, 0.1, (n, 1, 1, 1)), dtype=torch.float32, device=x.device)
    shift = torch.as_tensor(rng.uniform(-0.05, 0.05, (n, 3, 1, 1)), dtype=torch.float32, device=x.device)
    worse = blur @ x[:n] @ blur.mT + noise_level * noise + shift
    strength = torch.zeros(len(x), 2, device=x.device)
    strength[:n] = torch.cat([sigma / 1.2, noise_level / 0.1], 1).flatten(1)
    return torch.cat([worse.to(x.dtype).clamp(-1, 1), x[n:]]), strength


def _pick(images: np.ndarray, recipe: Recipe, rng: np.random.Generator) -> np.ndarray:
    """Indices of a batch, in random order, because its first half is degraded."""
    return rng.choice(len(images), min(recipe.batch, len(images)), replace=False)


def _attention(device: torch.device) -> Any:
    """On a CPU, training attention over a few dozen tokens is 5x faster with explicit math than fused."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext()


def attribute_loss(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Cross-entropy in nats, averaged over the attributes of the batch. labels (N, attributes); entries that are
    `ABSENT` do not count."""
    losses = [
        F.cross_entropy(choices.float(), labels[:, i], ignore_index=ABSENT, reduction="sum")
        for i, choices in enumerate(logits)
    ]
    return torch.stack(losses).sum() / (labels != ABSENT).sum()


def train_attributes(
    world: World,
    kind: type[ev.Classifier] | type[ev.AttributeReader],
    images: np.ndarray,
    labels: np.ndarray,
    recipe: Recipe,
    work: Path,
    device: torch.device | str = "cpu",
) -> tuple[Any, dict[str, float]]:
    """Train the classifier of the Fréchet distance, or the attribute reader, on uint8 images (N, 64, 64, 3) and labels
    (N, attributes) int64.

    Resumes from `work`. Returns the network, and the last logged statistics of its training.
    """
    classifies = kind is ev.Classifier
    torch.manual_seed(recipe.seed + (not classifies))
    shape, part = ev.shape_of(world), FEATURES // (1 + world.slots)
    config = ev.ClassifierConfig(part=part, **shape) if classifies else ev.ReaderConfig(**shape)
    module: Any = kind(config).to(device)  # type: ignore[arg-type]
    where = torch.device(device)

    def loss(micro_step: MicroStep) -> tuple[Tensor, dict[str, float]]:
        rng = micro_step.rng
        picks = _pick(images, recipe, rng)
        x, y = to_float(images[picks]).to(where), torch.from_numpy(labels[picks]).to(where)
        x, strength = degrade(x, rng)
        with _attention(where):
            if classifies:
                logits, damage = module.read(module.features(x))
                value = attribute_loss(logits, y) + F.mse_loss(damage.float(), strength)
            else:
                logits = module(x)
                value = attribute_loss(logits, y)
        return value, {"loss": float(value.detach()), "right": float(ev.read_right(logits, y).nanmean())}

    return module, fit("classifier" if classifies else "reader", module, loss, recipe, work)


class WordEdits:
    """Changes one word of a caption ("red" for "blue"), or exchanges the colours of two slots, so that it is wrong.

    Random captions differ in many details, so they are easy to distinguish. These differ in one detail only.
    """

    def __init__(self, world: World, ids: dict[str, int]) -> None:
        self.group: dict[int, int] = {}  # word id -> attribute
        self.choices: list[list[int]] = []  # attribute -> its word ids; they all differ in meaning
        for words in (*world.slot.values(), *list(world.shared.values())[1:]):  # captions do not name the layout
            word_ids = [ids[word] for word in words if word in ids]
            self.group |= {i: len(self.choices) for i in word_ids if i not in self.group}
            self.choices.append(word_ids)

    def __call__(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Word ids (N, W) -> the same captions with one edit per caption. A caption without such a word stays."""
        out = rows.copy()
        for row in out:
            positions = [p for p, word in enumerate(row.tolist()) if word in self.group]
            if not positions:
                continue
            p = positions[rng.integers(len(positions))]
            word = int(row[p])
            partners = [q for q in positions if self.group[int(row[q])] == self.group[word] and row[q] != word]
            others = [i for i in self.choices[self.group[word]] if i != word]
            if partners and rng.uniform() < 0.5:
                q = partners[rng.integers(len(partners))]
                row[p], row[q] = row[q], row[p]
            elif others:
                row[p] = others[rng.integers(len(others))]
        return out


def contrastive_loss(
    images: Tensor, captions: Tensor, edited: Tensor, wrong: Tensor, same: Tensor, scale: Tensor
) -> Tensor:
    """Symmetric InfoNCE, in nats, of unit vectors (B, D), with one edited caption per image as a further negative.

    wrong: (B,) bool, whether the edited caption differs from the original. same: (B, B) bool, pairs that show the same
    scene and therefore are no negatives; its diagonal (the positives) is ignored.
    """
    to_captions = scale * images @ captions.T
    off_diagonal = same & ~torch.eye(len(same), dtype=torch.bool, device=same.device)
    to_captions = to_captions.masked_fill(off_diagonal, -torch.inf)
    to_edited = scale * (images * edited).sum(-1, keepdim=True)
    to_edited = to_edited.masked_fill(~wrong.unsqueeze(1), -torch.inf)
    target = torch.arange(len(images), device=images.device)
    of_images = F.cross_entropy(torch.cat([to_captions, to_edited], 1), target)
    return 0.5 * (of_images + F.cross_entropy(to_captions.T, target))


def train_two_tower(
    world: World,
    images: np.ndarray,
    captions: list[str],
    recipe: Recipe,
    work: Path,
    device: torch.device | str = "cpu",
    labels: np.ndarray | None = None,
) -> tuple[ev.TwoTower, dict[str, float]]:
    """Train the two-tower model on uint8 images (N, 64, 64, 3) and their captions. Resumes from `work`.

    With `labels` (N, 14), two images of the same scene are never negatives of each other.
    """
    torch.manual_seed(recipe.seed + 2)
    module = ev.TwoTower(ev.TwoTowerConfig(vocabulary=world.vocabulary, **ev.shape_of(world))).to(device)
    ids = module.tokenize(captions).numpy()
    scene = (
        np.arange(len(captions)) if labels is None else np.unique(labels, axis=0, return_inverse=True)[1].reshape(-1)
    )
    edits = WordEdits(world, module.text.ids)
    where = torch.device(device)

    def loss(micro_step: MicroStep) -> tuple[Tensor, dict[str, float]]:
        rng = micro_step.rng
        picks = _pick(images, recipe, rng)
        right, edited = ids[picks], edits(ids[picks], rng)
        words = torch.from_numpy(np.concatenate([right, edited])).to(where)
        same = torch.from_numpy(scene[picks][:, None] == scene[picks]).to(where)
        with _attention(where):
            embedded = module.embed_images(degrade(to_float(images[picks]).to(where), rng)[0])
            captioned, edited_captioned = module.embed_ids(words).chunk(2)
        wrong = torch.from_numpy((right != edited).any(1)).to(where)
        with torch.autocast(where.type, enabled=False):  # cosines near 1 need more than 8 bits
            value = contrastive_loss(embedded, captioned, edited_captioned, wrong, same, module.scale)
        with torch.no_grad():
            correct, changed = (embedded * captioned).sum(-1), (embedded * edited_captioned).sum(-1)
        statistics = {
            "loss": float(value.detach()),
            "edits_told": float((correct > changed).float().mean()),
            "scale": float(module.scale.detach()),
        }
        return value, statistics

    return module, fit("two_tower", module, loss, recipe, work)


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


@torch.no_grad()
def evaluate_attributes(
    world: World, module: ev.Classifier | ev.AttributeReader, images: np.ndarray, labels: np.ndarray
) -> dict[str, float]:
    """Share of present attributes that are read right: "mean" over all attributes, and one value per attribute.

    images (N, 64, 64, 3) uint8; labels (N, attributes) int64. An attribute that no image has is omitted.
    """
    right = []
    for i in range(0, len(images), 256):
        x = to_float(images[i : i + 256]).to(_device(module))
        logits = [choices.cpu() for choices in module(x)]
        right.append(ev.read_right(logits, torch.from_numpy(labels[i : i + 256])))
    table = torch.cat(right)
    by_attribute = {
        name: float(table[:, i].nanmean()) for i, name in enumerate(world.attributes) if not table[:, i].isnan().all()
    }
    return {"mean": float(table.nanmean()), **by_attribute}


@torch.no_grad()
def evaluate_two_tower(
    world: World, module: ev.TwoTower, images: np.ndarray, captions: list[str], labels: np.ndarray
) -> dict[str, float]:
    """Statistics of the two-tower model on images (N, 64, 64, 3) uint8 with captions and labels (N, attributes).

    - top1: the share of images whose nearest caption, of a group of `RETRIEVAL`, describes their scene. The groups are
      disjoint; a caption of an identical scene counts as right.
    - edits_told: the share of captions that are nearer to their image than the same caption with one wrong word.
    - own_cosine, other_cosine: mean cosine of an image with its own caption, and with the other captions of its group.
    """
    device = _device(module)
    embedded = torch.cat(
        [module.embed_images(to_float(images[i : i + 256]).to(device)) for i in range(0, len(images), 256)]
    )
    ids = module.tokenize(captions)
    edited = torch.from_numpy(
        WordEdits(world, module.text.ids)(ids.numpy(), np.random.Generator(np.random.Philox(key=[0, 0])))
    )
    captioned, edited_captioned = (
        torch.cat([module.embed_ids(part.to(device)) for part in table.split(256)]) for table in (ids, edited)
    )
    group = min(RETRIEVAL, len(images))
    hits, own, other = [], [], []
    for start in range(0, len(images) - group + 1, group):
        rows = slice(start, start + group)
        cosine = (embedded[rows] @ captioned[rows].T).cpu()
        nearest = cosine.argmax(1).numpy()
        hits.append((labels[rows][nearest] == labels[rows]).all(1))
        own.append(cosine.diagonal())
        other.append(cosine[~torch.eye(group, dtype=torch.bool)])
    nearer = (embedded * captioned).sum(-1) > (embedded * edited_captioned).sum(-1)
    changed = (ids != edited).any(1).to(device)
    return {
        "top1": float(np.concatenate(hits).mean()),
        "edits_told": float(nearer[changed].float().mean()),
        "own_cosine": float(torch.cat(own).mean()),
        "other_cosine": float(torch.cat(other).mean()),
    }


def train_all(
    world: World, train: Split, held: Split, work: Path, assets: Path = ASSETS, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Train the evaluators whose files are missing in `assets`, write them, and measure them from the stored files.

    The reference statistics of the Fréchet distance (all of `held`) are stored next to the classifier, and are written
    again when they belong to other weights. Returns flat values such as "reader_accuracy" and "two_tower_top1".
    `fid_of_real` is the distance of as many training images to that reference: the score of a perfect model.
    """
    statistics: dict[str, float] = {}

    def trained(name: str, kind: type[ev.Evaluator], train_it: Callable[[], tuple[Any, dict[str, float]]]) -> Any:
        path = assets / f"{world.name}_{name}.safetensors"
        if not path.exists():
            module, last = train_it()
            ev.save(module, path)
            statistics[f"{name}_seconds"] = last["seconds"]
        return ev.load(path, kind, device)

    def attributes(kind: Any, recipe: Recipe) -> Callable[[], tuple[Any, dict[str, float]]]:
        return lambda: train_attributes(world, kind, train.images, train.labels, recipe, work, device)

    classifier = trained("classifier", ev.Classifier, attributes(ev.Classifier, CLASSIFIER_RECIPE))
    statistics["classifier_accuracy"] = evaluate_attributes(world, classifier, held.images, held.labels)["mean"]

    weights = assets / f"{world.name}_classifier.safetensors"
    name, path = ev.backend(weights), scenes_reference.stored_at(weights)
    reference = ScenesReference.load(path) if path.exists() else None
    if reference is None or reference.backend != name or reference.count != len(held.images):
        reference = ScenesReference.from_images(classifier, held.images, name)
        reference.save(path)
    real = [Item(i, caption, None) for i, caption in enumerate(train.captions[: len(held.images)])]
    context = metrics.ScoringContext(assets, home.metrics_folder(), device=str(device))
    score = metrics.score([f"{world.name}_fid"], image_files.ImageArray(train.images[: len(real)]), real, context)[
        "fid"
    ]
    statistics["fid_of_real"] = float("nan") if score.value is None else score.value

    reader = trained("reader", ev.AttributeReader, attributes(ev.AttributeReader, READER_RECIPES[world.name]))
    for attribute, value in evaluate_attributes(world, reader, held.images, held.labels).items():
        statistics["reader_accuracy" if attribute == "mean" else f"reader_accuracy_{attribute}"] = value

    if not isinstance(world, DrawnWorld):  # its captions are class names, which the reader reads
        return statistics
    towers = trained(
        "two_tower",
        ev.TwoTower,
        lambda: train_two_tower(world, train.images, train.captions, TWO_TOWER_RECIPE, work, device, train.labels),
    )
    tower_statistics = evaluate_two_tower(world, towers, held.images, held.captions, held.labels)
    return statistics | {f"two_tower_{name}": value for name, value in tower_statistics.items()}
