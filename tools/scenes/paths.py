"""Trains the smaller MAR of the embedded pair further: on the divergence of its paths of a token from the target's
paths, under the guidance of a run. This divergence limits the acceptance (`criterion=path`)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specbench.data import scenes_classes
from specbench.decoding.continuous import ContinuousRule
from specbench.decoding.continuous.verify import Verifier
from specbench.engine.graph import Eager
from specbench.models import diffusion
from specbench.models.loading.mar_scenes import ScenesMAR
from specbench.models.mar import MAR
from specbench.models.mar_sampling import Guided, MarSession
from specbench.models.pixels import to_float
from specbench.training.drafter import Order
from specbench.training.trainer import MicroStep, Recipe, fit
from tools.scenes.mar_loss import masks

EXAMPLES, HELD_OUT = 1600, 0.06  # images, and the share of them that is not trained on
_UNSEEN = 1  # a seed whose images the pair was not trained on
_RULE = ContinuousRule(gamma=1, criterion="path")
_POSITIONS = 2  # positions per image whose paths are sampled
_BATCH = 32
#: The share of masked tokens in training: its minimum, and the spread of the normal distribution below 1 that it is
#: drawn from. MAR's shares are above 0.7; decoding token by token uses all shares equally.
LEAST, SPREAD = 0.0, 0.5


@torch.inference_mode()
def examples(model: ScenesMAR, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Token distributions (2, count, L, D) float16 and classes (count,) int64 of images that the pair has not seen."""
    images, classes = scenes_classes.portraits("train", count, _UNSEEN)
    parts = [torch.stack(model.token_distribution(x.to(model.device))) for x in to_float(images).split(16)]
    return torch.cat(parts, 1).half().cpu().numpy(), classes


def train(
    model: ScenesMAR, draft: MAR, distributions: np.ndarray, labels: np.ndarray, recipe: Recipe, work: Path
) -> dict[str, float]:
    """Train `draft` in place. Returns the statistics of `evaluate` on the images that are held out, also for the
    weights at the start (..._before)."""
    draft.float().requires_grad_(True)
    model.target.model.requires_grad_(False)
    target: Guided = model.target
    drafter = replace(target, model=draft)
    rows, device = len(labels) - math.ceil(HELD_OUT * len(labels)), model.device
    held_out = distributions[:, rows:], labels[rows:]
    before = evaluate(target, drafter, *held_out)
    order = Order(rows, recipe.batch, recipe.seed)

    def loss(micro_step: MicroStep) -> tuple[Tensor, dict[str, float]]:
        picks = order(micro_step.step)
        generator = micro_step.generator(torch.device("cpu"))
        tokens, classes, masked = draw(distributions[:, picks], labels[picks], generator, device)
        session, z = conditions_of_masked(drafter, tokens, classes, masked)
        teacher, teacher_z = conditions_of_masked(target, tokens, classes, masked)
        value = drafter.steps * divergence(teacher, session, tokens[masked], teacher_z, z, generator).mean()
        return value, {"loss": float(value.detach())}

    spent = fit("mar_draft_path_kl", draft, loss, recipe, work)
    after = evaluate(target, drafter, *held_out)
    return {**spent, **after, **{f"{name}_before": value for name, value in before.items()}}


def evaluate(target: Guided, draft: Guided, distributions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The divergence of the drafter's paths from the target's in nats, and the probability that a path is accepted,
    with standard errors over images, for images of `distributions` (2, N, L, D) and classes `labels` (N,), given their
    tokens at random positions. tokens_per_pass: 1 / (1 - acceptance), of long drafts if every token is accepted with
    this probability."""
    starts = range(0, len(labels), _BATCH)
    batches = ((distributions[:, i : i + _BATCH], labels[i : i + _BATCH], i) for i in starts)
    per_image = torch.cat([_paths(target, draft, *batch) for batch in batches], 1)
    (path_kl, acceptance), errors = per_image.mean(1).tolist(), [0.0, 0.0]
    if len(labels) > 1:
        errors = (per_image.std(1) / math.sqrt(len(labels))).tolist()
    return {
        "path_kl": path_kl,
        "path_kl_stderr": errors[0],
        "acceptance": acceptance,
        "acceptance_stderr": errors[1],
        "tokens_per_pass": 1 / max(1e-9, 1 - acceptance),
    }


@torch.no_grad()
def _paths(target: Guided, draft: Guided, distributions: np.ndarray, labels: np.ndarray, seed: int) -> Tensor:
    """The two statistics of each image, (2, n) float64. A random number of an image's tokens is known; both models draw
    the next tokens of a random order."""
    device, n = target.model.mask_token.device, len(labels)
    generator = torch.Generator().manual_seed(seed)
    tokens, classes, _ = draw(distributions, labels, generator, device)
    order = torch.rand(n, target.length, generator=generator).argsort(1)
    count = torch.randint(target.length - _POSITIONS + 1, (n, 1), generator=generator)
    known = (order.argsort(1) < count).to(device)
    positions = order.gather(1, count + torch.arange(_POSITIONS)).to(device)
    (p, z), (q, z_draft) = (conditions(m, tokens, classes, known, positions) for m in (target, draft))
    verifier, shape = Verifier(p, q, _RULE, Eager()), (2, n * _POSITIONS, target.steps + 1, target.dim)
    noises = torch.randn(shape, generator=generator).to(device)
    _, of_target = verifier.propose_path(z, z_draft, noises[0])
    _, of_draft = verifier.sample(False, z, z_draft, lambda tag: noises[1])
    per_path = torch.stack([of_target, of_draft.clamp_max(0).exp()])
    return per_path.view(2, n, _POSITIONS).mean(-1).cpu()


def draw(
    distributions: np.ndarray, labels: np.ndarray, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (n, L, D) float32 drawn from their distributions (2, n, L, D), the labels (n,) int64, and which tokens are
    masked (n, L) bool: equally many in every image."""
    mean, spread = torch.as_tensor(distributions.astype(np.float32))
    tokens = mean + spread * torch.randn(mean.shape, generator=generator)
    masked = masks(len(tokens), tokens.shape[1], generator, LEAST, SPREAD)
    return tokens.to(device), torch.as_tensor(labels).to(device), masked.to(device)


def conditions(
    model: Guided, tokens: Tensor, labels: Tensor, known: Tensor, positions: Tensor
) -> tuple[MarSession, Tensor]:
    """A session for images with tokens (N, L, D) and classes `labels` (N,), and the conditions (N n, ...) of the tokens
    at `positions` (N, n). Only the tokens in `known` (N, L) bool are read."""
    count = known.sum(1, keepdim=True)
    session = model.open(labels, len(labels))
    rows = torch.arange(len(labels), device=tokens.device)
    z = session.condition(tokens, known, rows, positions, count.expand_as(positions), int(count.max()))
    return session, z.flatten(0, 1)


def conditions_of_masked(model: Guided, tokens: Tensor, labels: Tensor, masked: Tensor) -> tuple[MarSession, Tensor]:
    """`conditions` of the masked (N, L) bool tokens. Every image must have the same number of them."""
    return conditions(model, tokens, labels, ~masked, masked.nonzero()[:, 1].view(len(labels), -1))


def divergence(
    target: MarSession,
    draft: MarSession,
    x0: Tensor,
    z: Tensor,
    z_draft: Tensor,
    generator: torch.Generator,
    repeats: int = 2,
) -> Tensor:
    """KL divergence (repeats n,) in nats between the target's and the draft's distribution of a step, at one random
    sampling step per token x0 (n, D). Its mean times the number of steps is the divergence of complete paths."""
    x0, z, z_draft = (x.repeat(repeats, 1) for x in (x0, z, z_draft))
    schedule = diffusion.schedule(draft.guided.steps, x0.device)
    index = torch.randint(0, len(schedule), (len(x0),), generator=generator).to(x0.device)
    x = schedule.noised(x0, torch.randn(x0.shape, generator=generator).to(x0.device), index)
    mean, log_variance = target.moments(x, index, z)
    draft_mean, draft_log_variance = draft.moments(x, index, z_draft)
    distance = (mean - draft_mean).square()
    return 0.5 * (
        (log_variance - draft_log_variance).exp()
        + distance * (-draft_log_variance).exp()
        - 1
        + draft_log_variance
        - log_variance
    ).sum(-1)
