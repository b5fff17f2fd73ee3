"""Trains ARPG, the embedded model that decodes in random order, on classes of single objects."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.models.arpg import ARPG
from specbench.models.llamagen import ClassConditioning
from specbench.training.trainer import MicroStep, Recipe, fit


def loss_of(model: ARPG, tokens: Tensor, classes: Tensor, generator: torch.Generator) -> Tensor:
    """Mean cross-entropy in nats of tokens (N, T), in a random order per image. classes (N,): the value `num_classes`
    means no class."""
    order = torch.rand(tokens.shape, generator=generator).argsort(1).to(tokens.device)
    hidden = model.in_order(model.condition(ClassConditioning(classes), guided=False), tokens, order)
    logits = model.head(hidden).flatten(0, 1).float()
    return F.cross_entropy(logits, tokens.gather(1, order).flatten())


def train(
    model: ARPG, codes: np.ndarray, classes: np.ndarray, recipe: Recipe, work: Path, dropout: float = 0.1
) -> dict[str, float]:
    """Train on the tokens (N, T) of images of classes (N,). A share `dropout` of the rows is trained without its class,
    which guidance needs for its unconditional half."""
    device = model.output.weight.device

    def loss(micro_step: MicroStep) -> tuple[Tensor, dict[str, float]]:
        rng = micro_step.rng
        picks = rng.integers(0, len(codes), recipe.batch)
        lost = rng.uniform(size=recipe.batch) < dropout
        labels = torch.as_tensor(np.where(lost, model.cfg.num_classes, classes[picks])).to(device)
        generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
        tokens = torch.as_tensor(codes[picks].astype(np.int64)).to(device)
        value = loss_of(model, tokens, labels, generator)
        return value, {"loss": float(value.detach())}

    return fit("arpg", model, loss, recipe, work)


@torch.no_grad()
def evaluate(model: ARPG, codes: np.ndarray, classes: np.ndarray, batch: int = 64) -> dict[str, float]:
    """The training loss on other images, with their classes, in float32."""
    device, losses = model.output.weight.device, []
    for i in range(0, len(codes), batch):
        tokens = torch.as_tensor(codes[i : i + batch].astype(np.int64)).to(device)
        labels = torch.as_tensor(classes[i : i + batch]).to(device)
        losses.append(float(loss_of(model, tokens, labels, torch.Generator().manual_seed(i))))
    return {"loss": float(np.mean(losses))}
