"""Trains the text encoder, and the autoregressive target on its features, or on classes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.data.worlds import ABSENT, World
from specbench.models.language import Language
from specbench.models.llamagen import ClassConditioning, Conditioning, LlamaGen
from specbench.models.supervision import hidden_states, prefixed
from specbench.models.text import TextEncoder
from specbench.training.dataset import Conditions, LiveDataset
from specbench.training.trainer import MicroStep, Recipe, fit


def reading_loss(world: World, text: TextEncoder, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy, summed over attributes, of the attributes that `text` reads from features (N, tokens, dim), and
    the share of the present attributes that it reads right. labels (N, attributes) of `World.by_position`."""
    choices = [len(c) + 1 for c in world.position_attributes.values()]  # the last one is "nothing there"
    losses, right, present = [], features.new_zeros(()), labels != ABSENT
    for i, logits in enumerate(text.reader(features.mean(1)).split(choices, -1)):
        wanted = torch.where(present[:, i], labels[:, i], logits.shape[-1] - 1)
        losses.append(F.cross_entropy(logits.float(), wanted))
        right = right + ((logits.argmax(-1) == wanted) & present[:, i]).sum()
    return torch.stack(losses).sum(), right / present.sum()


def train_text(
    world: World, text: TextEncoder, captions: list[str], labels: np.ndarray, recipe: Recipe, work: Path
) -> dict[str, float]:
    """Train the text encoder to predict the attributes by position; labels (N, attributes) of `World.render`."""
    device = text.positions.device
    ids, y = text.tokenize(captions), torch.as_tensor(world.by_position(labels))

    def loss(micro_step: MicroStep) -> tuple[Tensor, dict[str, float]]:
        rng = micro_step.rng
        picks = torch.as_tensor(rng.integers(0, len(ids), recipe.batch))
        value, right = reading_loss(world, text, text(ids[picks].to(device)), y[picks].to(device))
        return value, {"loss": float(value.detach()), "right": float(right)}

    return fit("text", text, loss, recipe, work)


@torch.no_grad()
def features_of(text: TextEncoder, captions: list[str], batch: int = 512) -> Tensor:
    """Features (N, tokens, dim) of the captions, bfloat16 on the CPU."""
    ids = text.tokenize(captions)
    out = [
        text(ids[i : i + batch].to(text.positions.device)).to(torch.bfloat16).cpu() for i in range(0, len(ids), batch)
    ]
    return torch.cat(out)


def captioned(features: Tensor, device: torch.device) -> Conditions:
    """The conditioning of examples with caption features (N, tokens, dim)."""

    def conditions(rows: np.ndarray) -> Conditioning:
        prefix = features[rows].float().to(device)
        return Conditioning(prefix, torch.ones(prefix.shape[:2], dtype=torch.bool, device=device))

    return conditions


def classed(numbers: np.ndarray, device: torch.device) -> Conditions:
    """The conditioning of examples with class numbers (N,) int64."""
    return lambda rows: ClassConditioning(torch.as_tensor(numbers[rows]).to(device))


def next_token_loss(model: Language, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of tokens (N, T) under hidden states (N, P - 1 + T, dim)."""
    logits = model.head(hidden[:, -tokens.shape[1] :])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def train_target(
    name: str,
    model: LlamaGen,
    tokens: np.ndarray,
    conditions: Conditions,
    recipe: Recipe,
    work: Path,
    dropout: float = 0.1,
) -> dict[str, float]:
    """Next-token training. A share `dropout` of the rows is trained without its condition, which guidance needs for its
    unconditional half."""
    data = LiveDataset(model, tokens, conditions)

    def loss(micro_step: MicroStep) -> tuple[Tensor, dict[str, float]]:
        rng = micro_step.rng
        picks = rng.integers(0, len(tokens), recipe.batch)
        t, conditioning, drop = data.inputs(picks, rng.uniform(size=recipe.batch) < dropout)
        value = next_token_loss(model, hidden_states(model, prefixed(model, conditioning, drop), t), t)
        return value, {"loss": float(value.detach())}

    return fit(name, model, loss, recipe, work)


@torch.no_grad()
def evaluate_target(
    model: LlamaGen, tokens: np.ndarray, conditions: Conditions, batch_size: int = 64
) -> dict[str, float]:
    """Validation loss in nats and in bits per token, and the target's mean top-1 probability at temperature 1, without
    guidance."""
    losses, tops, data = [], [], LiveDataset(model, tokens, conditions)
    for i in range(0, len(tokens), batch_size):
        rows = np.arange(i, min(i + batch_size, len(tokens)))
        batch = data.batch(rows, np.zeros(len(rows), dtype=bool))
        losses.append(float(next_token_loss(model, batch.hidden, batch.tokens)))
        probs = model.head(batch.hidden[:, -batch.tokens.shape[1] :]).float().softmax(-1)
        tops.append(float(probs.amax(-1).mean()))
    loss = float(np.mean(losses))
    return {"loss": loss, "bits_per_token": loss / math.log(2), "top1_probability": float(np.mean(tops))}
