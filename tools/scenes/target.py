"""Training of the text encoder and of the autoregressive target over its features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.data import scenes
from specbench.models.language import Language
from specbench.models.llamagen import Conditioning, LlamaGen
from specbench.models.supervision import hidden_states, prefixed
from specbench.models.text import TextEncoder
from specbench.training.dataset import LiveDataset
from specbench.training.trainer import MicroStep, Recipe, fit

#: Where the objects of a layout are, slot by slot, of `scenes.POSITIONS`.
LAYOUT_POSITIONS = {
    "single": ("centre",),
    "beside": ("left", "right"),
    "above": ("top", "bottom"),
    "row": ("left", "centre", "right"),
    "column": ("top", "centre", "bottom"),
    "pyramid": ("top", "bottom left", "bottom right"),
}


def labels_by_position(labels: np.ndarray) -> np.ndarray:
    """Labels (N, 14) by slot -> labels (N, 30) by position, in the order of `scenes.POSITION_ATTRIBUTES`; `ABSENT`
    where there is no object."""
    out = np.full((len(labels), len(scenes.POSITION_ATTRIBUTES)), scenes.ABSENT)
    out[:, :2] = labels[:, :2]
    for layout, positions in enumerate(LAYOUT_POSITIONS.values()):
        rows = np.flatnonzero(labels[:, 0] == layout)
        for slot, position in enumerate(positions):
            to = 2 + 4 * scenes.POSITIONS.index(position)
            out[rows, to : to + 4] = labels[rows, 2 + 4 * slot : 6 + 4 * slot]
    return out


def reading_loss(text: TextEncoder, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over attributes, of what `text` reads from features (N, tokens, dim), and the share of the
    present ones read right. labels (N, attributes) as of `labels_by_position`."""
    choices = [len(c) + 1 for c in scenes.POSITION_ATTRIBUTES.values()]  # the last one is "nothing there"
    losses, right, present = [], features.new_zeros(()), labels != scenes.ABSENT
    for i, logits in enumerate(text.reader(features.mean(1)).split(choices, -1)):
        wanted = torch.where(present[:, i], labels[:, i], logits.shape[-1] - 1)
        losses.append(F.cross_entropy(logits.float(), wanted))
        right = right + ((logits.argmax(-1) == wanted) & present[:, i]).sum()
    return torch.stack(losses).sum(), right / present.sum()


def train_text(
    text: TextEncoder, captions: list[str], labels: np.ndarray, recipe: Recipe, work: Path
) -> dict[str, float]:
    """Train the text encoder to predict the scene's attributes by position; labels (N, 14) as of `scenes.render`."""
    device = text.positions.device
    ids, y = text.tokenize(captions), torch.as_tensor(labels_by_position(labels))

    def loss(micro_step: MicroStep) -> tuple[Tensor, dict[str, float]]:
        rng = micro_step.rng
        picks = torch.as_tensor(rng.integers(0, len(ids), recipe.batch))
        value, right = reading_loss(text, text(ids[picks].to(device)), y[picks].to(device))
        return value, {"loss": float(value.detach()), "right": float(right)}

    return fit("text", text, loss, recipe, work)


@torch.no_grad()
def features_of(text: TextEncoder, captions: list[str], batch: int = 512) -> Tensor:
    """Features (N, tokens, dim) bfloat16 on the CPU, computed once and cached."""
    ids = text.tokenize(captions)
    out = [
        text(ids[i : i + batch].to(text.positions.device)).to(torch.bfloat16).cpu() for i in range(0, len(ids), batch)
    ]
    return torch.cat(out)


def dataset(model: LlamaGen, tokens: np.ndarray, features: Tensor) -> LiveDataset:
    """Token rows (N, T) with their captions' features (N, P, dim), which form their prefix."""
    device = model.output.weight.device

    def conditions(rows: np.ndarray) -> Conditioning:
        some = features[rows].float().to(device)
        return Conditioning(some, torch.ones(some.shape[:2], dtype=torch.bool, device=device))

    return LiveDataset(model, tokens, conditions)


def next_token_loss(model: Language, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of tokens (N, T) under hidden states (N, P - 1 + T, dim)."""
    logits = model.head(hidden[:, -tokens.shape[1] :])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def train_target(
    name: str, model: LlamaGen, tokens: np.ndarray, features: Tensor, recipe: Recipe, work: Path, dropout: float = 0.1
) -> dict[str, float]:
    """Next-token training with the caption dropped for a share of the rows, so that guidance has its unconditional
    half."""
    given = dataset(model, tokens, features)

    def loss(micro_step: MicroStep) -> tuple[Tensor, dict[str, float]]:
        rng = micro_step.rng
        picks = rng.integers(0, len(tokens), recipe.batch)
        t, conditioning, drop = given.inputs(picks, rng.uniform(size=recipe.batch) < dropout)
        value = next_token_loss(model, hidden_states(model, prefixed(model, conditioning, drop), t), t)
        return value, {"loss": float(value.detach())}

    return fit(name, model, loss, recipe, work)


@torch.no_grad()
def evaluate_target(model: LlamaGen, tokens: np.ndarray, features: Tensor, batch_size: int = 64) -> dict[str, float]:
    """Validation loss (nats a token) and the target's mean top-1 probability at temperature 1, without guidance."""
    losses, tops, given = [], [], dataset(model, tokens, features)
    for i in range(0, len(tokens), batch_size):
        some = np.arange(i, min(i + batch_size, len(tokens)))
        batch = given.batch(some, np.zeros(len(some), dtype=bool))
        losses.append(float(next_token_loss(model, batch.hidden, batch.tokens)))
        probs = model.head(batch.hidden[:, -batch.tokens.shape[1] :]).float().softmax(-1)
        tops.append(float(probs.amax(-1).mean()))
    return {"loss": float(np.mean(losses)), "top1_probability": float(np.mean(tops))}
