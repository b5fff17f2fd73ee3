"""The evaluators of the embedded worlds: three small networks that score a world's images.

- `Classifier`: the Fréchet distance uses its 64 penultimate features.
- `AttributeReader`: reads the attributes of an image; the reward is computed from its probabilities.
- `TwoTower`: embeds images and captions in one space; the CLIP score is the cosine between them.

They share building blocks but no weights, so that the errors of the three metrics are independent. An evaluator is
stored in one safetensors file, with its configuration in the metadata, and is named by the hash of this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench.config.registry import digest
from specbench.data import scenes, worlds
from specbench.models.loading import checkpoints
from specbench.models.text import TextConfig, TextEncoder


@dataclass(frozen=True, kw_only=True)
class WorldShape:
    """The shape of a network's world: the numbers of choices of the shared attributes and of the attributes of a slot,
    the number of slots, and the images' pixels per side. Files without these fields are networks of scenes."""

    shared: tuple[int, ...] = tuple(map(len, scenes.WORLD.shared.values()))
    slot: tuple[int, ...] = tuple(map(len, scenes.WORLD.slot.values()))
    slots: int = scenes.WORLD.slots
    size: int = scenes.WORLD.size


def shape_of(world: worlds.World) -> dict[str, Any]:
    """The fields of `WorldShape`."""
    sizes = (tuple(map(len, attributes.values())) for attributes in (world.shared, world.slot))
    return dict(zip(("shared", "slot", "slots", "size"), (*sizes, world.slots, world.size), strict=True))


def as_input(images: Tensor) -> Tensor:
    """uint8 (B, 3, H, W) -> float32 in [-1, 1], the input of all evaluators."""
    return images.float() / 127.5 - 1


class _Conv(nn.Sequential):
    """Convolution, batch norm, ReLU."""

    def __init__(self, c_in: int, c_out: int, kernel: int = 3, stride: int = 1) -> None:
        conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False)
        super().__init__(conv, nn.BatchNorm2d(c_out), nn.ReLU(inplace=True))


class _Residual(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_Conv(c, c), nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class _Trunk(nn.Module):
    """Images (B, 3, size, size) -> maps (B, w1, size / 4, size / 4) and (B, w2, size / 8, size / 8)."""

    def __init__(self, widths: tuple[int, int, int]) -> None:
        super().__init__()
        a, b, c = widths
        self.fine = nn.Sequential(_Conv(3, a, 5, 2), _Conv(a, b, 3, 2), _Residual(b))
        self.coarse = nn.Sequential(_Conv(b, c, 3, 2), _Residual(c))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.fine(x)
        return fine, self.coarse(fine)


@dataclass(frozen=True)
class _TrunkConfig(WorldShape):
    widths: tuple[int, int, int] = (32, 64, 96)
    dim: int = 96


class _SlotTrunk(nn.Module):
    """Images (B, 3, size, size) -> the scene (B, dim) and its slots (B, slots, dim).

    The layout determines which slot is the first, so the slots' queries are computed from the scene vector. They attend
    to the fine map, whose keys contain their position.
    """

    def __init__(self, cfg: _TrunkConfig) -> None:
        super().__init__()
        self.slots, dim = cfg.slots, cfg.dim
        _, b, c = cfg.widths
        self.trunk = _Trunk(cfg.widths)
        self.squeeze = nn.Conv2d(c, 16, 1)
        self.scene = nn.Sequential(nn.Linear(16 * (cfg.size // 8) ** 2 + 2 * c, dim), nn.ReLU(inplace=True))
        if not self.slots:
            return
        self.from_fine, self.from_coarse = nn.Conv2d(b, dim, 1), nn.Conv2d(c, dim, 1)
        self.positions = nn.Parameter(torch.empty((cfg.size // 4) ** 2, dim))
        nn.init.normal_(self.positions, std=0.02)
        self.query = nn.Linear(dim, self.slots * dim)
        self.slot = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fine, coarse = self.trunk(x)
        pooled = [self.squeeze(coarse).flatten(1), coarse.mean((2, 3)), coarse.amax((2, 3))]
        scene = self.scene(torch.cat(pooled, 1))
        if not self.slots:
            return scene, scene.new_empty(len(scene), 0, scene.shape[1])
        local = self.from_fine(fine) + F.interpolate(self.from_coarse(coarse), scale_factor=2.0, mode="nearest")
        local = F.relu(local).flatten(2).transpose(1, 2)  # (B, (size / 4)^2, dim)
        queries = self.query(scene).unflatten(1, (self.slots, -1))
        # no projection of keys and values: the linear maps before and after the attention can do the same at lower cost
        attended = F.scaled_dot_product_attention(queries, local + self.positions.to(local.dtype), local)
        return scene, self.slot(torch.cat([attended, scene.unsqueeze(1).expand_as(attended)], -1))


@dataclass(frozen=True)
class ClassifierConfig(_TrunkConfig):
    part: int = 16  # features of the scene, and of each slot


class Classifier(nn.Module):
    """Predicts all attributes from `num_features` numbers by one linear map: the features of the Fréchet distance.

    It also predicts how blurred and how noisy an image is, so that the features describe fidelity and content.
    """

    def __init__(self, cfg: ClassifierConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.num_features = (1 + cfg.slots) * cfg.part
        self.trunk = _SlotTrunk(cfg)
        self.of_scene, self.read_scene = self._features(), nn.Linear(cfg.part, sum(cfg.shared) + 2)
        if cfg.slots:
            self.of_slot, self.read_slot = self._features(), nn.Linear(cfg.part, sum(cfg.slot))

    def _features(self) -> nn.Module:
        """Features of unit variance over the training images: a scale that training cannot change."""
        return nn.Sequential(nn.Linear(self.cfg.dim, self.cfg.part), nn.BatchNorm1d(self.cfg.part, affine=False))

    def features(self, images: Tensor) -> Tensor:
        """Features (N, 64) of images (N, 3, size, size) in [-1, 1]: `part` of the scene, and of each slot."""
        scene, slots = self.trunk(images)
        features: Tensor = self.of_scene(scene)
        if self.cfg.slots:
            features = torch.cat([features, self.of_slot(slots.flatten(0, 1)).view(len(images), -1)], 1)
        return features

    def forward(self, images: Tensor) -> list[Tensor]:
        """Logits (N, choices) per attribute of the world."""
        return self.read(self.features(images))[0]

    def read(self, features: Tensor) -> tuple[list[Tensor], Tensor]:
        """Attribute logits, and strengths (N, 2) of blur and noise, from features (N, 64)."""
        scene, *slots = features.split(self.cfg.part, -1)
        *logits, damage = self.read_scene(scene).split([*self.cfg.shared, 2], -1)
        for slot in slots:
            logits += self.read_slot(slot).split(self.cfg.slot, -1)
        return logits, damage


@dataclass(frozen=True)
class ReaderConfig(_TrunkConfig):
    pass


class AttributeReader(nn.Module):
    """Reads the attributes of an image. All slots, in canonical order, share one reading head."""

    def __init__(self, cfg: ReaderConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.trunk = _SlotTrunk(cfg)
        self.of_scene = nn.Linear(cfg.dim, sum(cfg.shared))
        if cfg.slots:
            self.of_slot = nn.Linear(cfg.dim, sum(cfg.slot))

    def forward(self, images: Tensor) -> list[Tensor]:
        """Logits (N, choices) per attribute of the world, from images (N, 3, size, size) in [-1, 1].

        The logits of a slot are only meaningful if the image has this object.
        """
        scene, slots = self.trunk(images)
        out = list(self.of_scene(scene).split(self.cfg.shared, -1))
        if self.cfg.slots:
            for logits in self.of_slot(slots).unbind(1):
                out += logits.split(self.cfg.slot, -1)
        return out


@dataclass(frozen=True)
class TwoTowerConfig(_TrunkConfig):
    embedding: int = 64
    vocabulary: tuple[str, ...] = ()
    text_dim: int = 96
    text_layers: int = 2
    max_words: int = 40


class TwoTower(nn.Module):
    """Maps images and captions to unit vectors of one space. A caption is near the images that it describes."""

    def __init__(self, cfg: TwoTowerConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.image_trunk = _SlotTrunk(cfg)
        self.image_out = nn.Linear((1 + cfg.slots) * cfg.dim, cfg.embedding)
        text = TextConfig(cfg.vocabulary, cfg.text_dim, cfg.text_layers, max_words=cfg.max_words, tokens=1, classes=1)
        self.text = TextEncoder(text)
        del self.text.reader  # the contrast is its only task
        self.text_out = nn.Linear(cfg.text_dim, cfg.embedding)
        self.log_scale = nn.Parameter(torch.tensor(2.6593))  # log(1 / 0.07), learned, at most log 100

    @property
    def scale(self) -> Tensor:
        """The inverse temperature of the contrastive loss, at most 100."""
        return self.log_scale.clamp(max=4.6052).exp()

    def embed_images(self, images: Tensor) -> Tensor:
        """Unit vectors (N, 64) of images (N, 3, size, size) in [-1, 1]."""
        scene, slots = self.image_trunk(images)
        return F.normalize(self.image_out(torch.cat([scene, slots.flatten(1)], 1)).float(), dim=-1)

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        """Word ids (N, max_words) int64; see `TextEncoder.tokenize`."""
        return self.text.tokenize(list(captions))

    def embed_ids(self, ids: Tensor) -> Tensor:
        """Unit vectors (N, 64) of word ids (N, max_words)."""
        return F.normalize(self.text_out(self.text(ids).flatten(1)).float(), dim=-1)

    def embed_captions(self, captions: Sequence[str]) -> Tensor:
        """Unit vectors (N, 64) of captions, on the device of the weights."""
        return self.embed_ids(self.tokenize(captions).to(self.log_scale.device))

    def unknown_words(self, caption: str) -> list[str]:
        """The words of a caption that are not in the model's vocabulary."""
        return [word for word in worlds.words(caption) if word not in self.text.ids]


def captioned_probabilities(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Probability (N, attributes) float32 that each attribute is as labelled; NaN where the label is `ABSENT`. labels
    (N, attributes) int64."""
    columns = []
    for i, choices in enumerate(logits):
        label = labels[:, i]
        p = choices.float().softmax(-1).gather(1, label.clamp(min=0).unsqueeze(1)).squeeze(1)
        columns.append(torch.where(label == worlds.ABSENT, torch.nan, p))
    return torch.stack(columns, 1)


def read_right(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    """(N, attributes) float32: 1 where the most probable choice is the labelled one, else 0; NaN where `ABSENT`."""
    correct = torch.stack([choices.argmax(-1) for choices in logits], 1) == labels
    return torch.where(labels == worlds.ABSENT, torch.nan, correct.float())


Evaluator = TypeVar("Evaluator", Classifier, AttributeReader, TwoTower)
_KINDS: dict[type[nn.Module], tuple[str, type]] = {
    Classifier: ("classifier", ClassifierConfig),
    AttributeReader: ("reader", ReaderConfig),
    TwoTower: ("two-tower", TwoTowerConfig),
}


def save(module: Classifier | AttributeReader | TwoTower, path: Path) -> None:
    """Write an evaluator as safetensors in float16, with its configuration in the metadata. path:
    WORLD_KIND.safetensors."""
    checkpoints.save(module, path, path.stem.replace("_", "-"))


def load(path: Path, kind: type[Evaluator], device: torch.device | str = "cpu") -> Evaluator:
    """Read an evaluator of class `kind`: float32, in evaluation mode, without gradients.

    Raises UsageError, with the reason, if the file is missing, damaged, or contains another model.
    """
    label, config = _KINDS[kind]
    return checkpoints.load(path, label, kind, config, device)


def backend(path: Path) -> str:
    """The backend's name in a row, such as "scenes-reader@1a2b3c4d": the network and the hash of its file."""
    return f"{path.stem.replace('_', '-')}@{digest(path)}"
