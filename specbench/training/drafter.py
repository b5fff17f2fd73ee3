"""Training of drafters on a frozen target: an EAGLE head, Medusa heads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.models.eagle import Eagle
from specbench.models.llamagen import LlamaGen
from specbench.models.medusa import Medusa
from specbench.training.target import draw_batch
from specbench.training.trainer import Recipe, fit


def train_eagle(
    eagle: Eagle,
    target: LlamaGen,
    tokens: np.ndarray,
    features: Tensor,
    recipe: Recipe,
    work: Path,
    regression: float = 0.5,
    noise: float = 0.1,
    dropout: float = 0.3,
) -> dict[str, float]:
    """Feature regression (smooth L1) beside cross-entropy to the target's law, as EAGLE does.

    `noise` is the half-width of the uniform noise on the target's hidden states, which prepares the drafter for its own
    errors; `dropout` the share of unconditional rows, since a guided draft runs those too.
    """
    device = target.output.weight.device
    target.requires_grad_(False)
    head = target.output.weight

    def loss(rng: np.random.Generator) -> tuple[Tensor, dict[str, float]]:
        t, captions, drop = draw_batch(rng, tokens, features, recipe.batch, dropout, device)
        with torch.no_grad():
            h = target.train_hidden(t, captions, drop)
            wanted = h[:, target.cfg.cls_token_num :]
            p = F.linear(wanted, head).float().softmax(-1)
            shake = torch.as_tensor(rng.random(h.shape, dtype=np.float32)).to(device)
        out = eagle.train_hidden(h + (2 * shake - 1) * noise, t)
        q = F.linear(out, head).float().log_softmax(-1)
        cross = -(p * q).sum(-1).mean()
        value = cross + regression * F.smooth_l1_loss(out.float(), wanted.float())
        tv = 0.5 * (p - q.detach().exp()).abs().sum(-1).mean()
        return value, {"loss": float(value.detach()), "tv": float(tv)}

    return fit("eagle", eagle, loss, recipe, work)


def train_medusa(
    medusa: Medusa,
    target: LlamaGen,
    tokens: np.ndarray,
    features: Tensor,
    recipe: Recipe,
    work: Path,
    decay: float = 0.8,
    dropout: float = 0.3,
) -> dict[str, float]:
    """Cross-entropy of each head to the target's law at the place it predicts, head k weighted with decay ** k
    (Medusa-1, with the target's law in the place of the token); `dropout`: share of unconditional rows."""
    device = target.output.weight.device
    target.requires_grad_(False)
    prefix, heads = target.cfg.cls_token_num, medusa.cfg.heads

    def loss(rng: np.random.Generator) -> tuple[Tensor, dict[str, float]]:
        t, captions, drop = draw_batch(rng, tokens, features, recipe.batch, dropout, device)
        with torch.no_grad():
            h = target.train_hidden(t, captions, drop)[:, prefix - 1 :]
            p = F.linear(h, target.output.weight).float().softmax(-1)
        q = medusa(h[:, :-1]).float().log_softmax(-1)  # (N, T - 1, heads, V)
        total = q.new_zeros(())
        for k in range(heads):
            reach = p[:, k + 1 :]
            total = total - decay**k * (reach * q[:, : reach.shape[1], k]).sum(-1).mean()
        tv = 0.5 * (p[:, 1:] - q[:, :, 0].detach().exp()).abs().sum(-1).mean()
        return total, {"loss": float(total.detach()), "tv": float(tv)}

    return fit("medusa", medusa, loss, recipe, work)


@torch.no_grad()
def evaluate_drafter(
    target: LlamaGen, draft: Eagle | Medusa | LlamaGen, tokens: np.ndarray, features: Tensor, batch: int = 64
) -> dict[str, float]:
    """Mean total variation between the draft's and the target's law, and their top-1 agreement (temperature 1, no
    guidance), one token ahead of what the target knows."""
    device = target.output.weight.device
    tv, same = [], []
    prefix = target.cfg.cls_token_num
    for i in range(0, len(tokens), batch):
        t = torch.as_tensor(tokens[i : i + batch].astype(np.int64)).to(device)
        f = features[i : i + batch].float().to(device)
        keep = torch.zeros(len(t), dtype=torch.bool, device=device)
        h = target.train_hidden(t, f, keep)
        p = target.head(h[:, prefix:]).float().softmax(-1)
        if isinstance(draft, Eagle):
            q = target.head(draft.train_hidden(h, t)).float().softmax(-1)
        elif isinstance(draft, Medusa):
            q = draft(h[:, prefix - 1 : -1], heads=1)[:, :, 0].float().softmax(-1)
        else:
            q = draft.head(draft.train_hidden(t, f, keep)[:, prefix:]).float().softmax(-1)
        tv.append(float(0.5 * (p - q).abs().sum(-1).mean()))
        same.append(float((p.argmax(-1) == q.argmax(-1)).float().mean()))
    return {"tv": float(np.mean(tv)), "top1_agreement": float(np.mean(same))}
