"""Trains a FlashAR target, which decodes along anti-diagonals, from a raster target (arXiv 2605.09430; code:
lxazjk/Emu3.5-FlashAR, commit 2d4a74e).

In the first phase the vertical branch and the gate learn while the trunk is frozen; the trunk, in raster order, teaches
the vertical head. In the second phase all parameters learn, without a teacher. The published training has more phases
and a lower learning rate for the trunk. Steps and rates here are chosen for the embedded world.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.models.flashar import FlashAR
from specbench.models.supervision import hidden_states, prefixed
from specbench.training.trainer import MicroStep, Recipe, fit
from tools.scenes import target

#: Weights of the vertical head's two terms (the cross-entropy of the fused logits has weight 1), teacher's temperature.
VERTICAL, TEACHER, TEMPERATURE = 0.05, 0.2, 2.0


def loss_terms(model: FlashAR, conditioning: Any, drop: Tensor, tokens: Tensor, taught: bool) -> dict[str, Tensor]:
    """Cross-entropy in nats of the fused and of the vertical logits, for tokens (N, T). With `taught`, also the
    divergence of the vertical logits from the teacher's, at the teacher's temperature. Cells of the first row have no
    vertical logits. The teacher is the trunk in raster order, which predicts a cell from its left neighbour."""
    prefix = prefixed(model, conditioning, drop)
    states, dim = model.all_cells(prefix, tokens), model.cfg.dim
    fused, vertical = model.head(states), model.vertical(states[:, model.width :, dim : 2 * dim])
    terms = {
        "fused": F.cross_entropy(fused.flatten(0, 1).float(), tokens.flatten()),
        "vertical": F.cross_entropy(vertical.flatten(0, 1).float(), tokens[:, model.width :].flatten()),
    }
    if taught:
        with torch.no_grad():
            hidden = hidden_states(model, prefix, tokens)[:, -vertical.shape[1] :]
            probs = (model.horizontal(hidden).float() / TEMPERATURE).softmax(-1)
        log_q = (vertical.float() / TEMPERATURE).log_softmax(-1)
        terms["teacher"] = F.kl_div(log_q.flatten(0, 1), probs.flatten(0, 1), reduction="batchmean")
    return terms


def train(
    model: FlashAR, codes: np.ndarray, features: Tensor, recipe: Recipe, work: Path, dropout: float = 0.1
) -> dict[str, float]:
    """Train on tokens (N, T) and the features of their captions; a share `dropout` of the rows has no caption. `recipe`
    is for the second phase; the first phase takes a sixth of its steps at twice its rate."""
    data, first = target.dataset(model, codes, features), replace(recipe, steps=-(-recipe.steps // 6), lr=2 * recipe.lr)
    spent = []
    for name, phase, taught in (("flashar-branch", first, True), ("flashar", recipe, False)):
        for parameter in model.trunk:
            parameter.requires_grad_(not taught)

        def loss(micro_step: MicroStep, taught: bool = taught) -> tuple[Tensor, dict[str, float]]:
            rng = micro_step.rng
            picks = rng.integers(0, len(codes), recipe.batch)
            tokens, conditioning, drop = data.inputs(picks, rng.uniform(size=recipe.batch) < dropout)
            terms = loss_terms(model, conditioning, drop, tokens, taught)
            value = terms["fused"] + VERTICAL * terms["vertical"]
            if taught:
                value = value + TEACHER * TEMPERATURE**2 * terms["teacher"]
            return value, {name: float(term.detach()) for name, term in terms.items()}

        spent.append(fit(name, model, loss, phase, work))
    return {name: spent[0][name] + spent[1][name] for name in ("seconds", "images")}


@torch.no_grad()
def evaluate(model: FlashAR, codes: np.ndarray, features: Tensor, batch_size: int = 50) -> dict[str, float]:
    """Cross-entropy in nats per token of the fused and of the vertical logits, with captions, without guidance."""
    data, terms = target.dataset(model, codes, features), []
    for i in range(0, len(codes), batch_size):
        picks = np.arange(i, min(i + batch_size, len(codes)))
        tokens, conditioning, drop = data.inputs(picks, np.zeros(len(picks), dtype=bool))
        values = loss_terms(model, conditioning, drop, tokens, taught=False)
        terms.append([float(values["fused"]), float(values["vertical"])])
    fused, vertical = np.mean(terms, 0)
    return {"loss": float(fused), "vertical_loss": float(vertical)}
