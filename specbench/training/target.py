"""Training of the text encoder and of the autoregressive models over its features (target and independent draft
model)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specbench.data import scenes
from specbench.models.llamagen import LlamaGen
from specbench.models.text import TextEncoder
from specbench.training.trainer import Recipe, fit


def train_text(
    text: TextEncoder, captions: list[str], labels: np.ndarray, recipe: Recipe, work: Path
) -> dict[str, float]:
    """Train the text encoder to state what its caption puts where; labels (N, 14) as of `scenes.render`."""
    device = text.places.device
    ids, y = text.tokenize(captions), torch.as_tensor(scenes.placed(labels))

    def loss(rng: np.random.Generator) -> tuple[Tensor, dict[str, float]]:
        picks = torch.as_tensor(rng.integers(0, len(ids), recipe.batch))
        value, right = text.reading_loss(text(ids[picks].to(device)), y[picks].to(device))
        return value, {"loss": float(value.detach()), "right": float(right)}

    return fit("text", text, loss, recipe, work)


@torch.no_grad()
def features_of(text: TextEncoder, captions: list[str], batch: int = 512) -> Tensor:
    """Features (N, tokens, dim) bfloat16 on the CPU, computed once and kept."""
    ids = text.tokenize(captions)
    out = [text(ids[i : i + batch].to(text.places.device)).to(torch.bfloat16).cpu() for i in range(0, len(ids), batch)]
    return torch.cat(out)


def draw_batch(
    rng: np.random.Generator, tokens: np.ndarray, features: Tensor, size: int, dropout: float, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Token rows (size, T) int64, their captions' features (size, P, dim) float32, and which of them (size,) bool lose
    their caption."""
    picks = rng.integers(0, len(tokens), size)
    t = torch.as_tensor(tokens[picks].astype(np.int64)).to(device)
    drop = torch.as_tensor(rng.uniform(size=size) < dropout).to(device)
    return t, features[picks].float().to(device), drop


def train_target(
    name: str, model: LlamaGen, tokens: np.ndarray, features: Tensor, recipe: Recipe, work: Path, dropout: float = 0.1
) -> dict[str, float]:
    """Next-token training with the caption dropped for a share of the rows, so that guidance has its unconditional
    half."""
    device = model.output.weight.device

    def loss(rng: np.random.Generator) -> tuple[Tensor, dict[str, float]]:
        t, captions, drop = draw_batch(rng, tokens, features, recipe.batch, dropout, device)
        value = model.loss(model.train_hidden(t, captions, drop), t)
        return value, {"loss": float(value.detach())}

    return fit(name, model, loss, recipe, work)


@torch.no_grad()
def evaluate_target(model: LlamaGen, tokens: np.ndarray, features: Tensor, batch: int = 64) -> dict[str, float]:
    """Validation loss (nats a token) and the target's mean top-1 probability at temperature 1, without guidance."""
    device = model.output.weight.device
    losses, tops = [], []
    for i in range(0, len(tokens), batch):
        t = torch.as_tensor(tokens[i : i + batch].astype(np.int64)).to(device)
        h = model.train_hidden(
            t, features[i : i + batch].float().to(device), torch.zeros(len(t), dtype=torch.bool, device=device)
        )
        losses.append(float(model.loss(h, t)))
        tops.append(float(model.head(h[:, model.cfg.cls_token_num - 1 :]).float().softmax(-1).amax(-1).mean()))
    return {"loss": float(np.mean(losses)), "top1_probability": float(np.mean(tops))}
