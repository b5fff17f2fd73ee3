"""Trains the embedded pair of MAR models: a KL autoencoder, the target on its latents, and a smaller model that learns
the target's distribution and drafts for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.engine.half import bfloat16_products
from specbench.models.loading.mar_scenes import Latents
from specbench.models.mar import MAR
from specbench.models.mar_sampling import Guided
from specbench.models.pixels import to_float
from specbench.training.trainer import MicroStep, Recipe, fit
from tools.scenes.mar_loss import head_loss
from tools.scenes.paths import conditions_of_masked, divergence, draw

#: Weight of the divergence from a standard normal, in nats per latent dimension, relative to the pixels' squared error.
#: A smaller weight makes images sharper. A larger weight adds more noise to every token; a draft model within this
#: noise of the target is accepted. At 10x the weight, half of the dimensions are noise, and shapes are lost.
KL_WEIGHT = 2e-4


def train_kl(kl: Latents, images: np.ndarray, recipe: Recipe, work: Path) -> dict[str, float]:
    """Train on uint8 images (N, H, W, 3), and set the scale that gives the tokens unit variance. Returns the last
    statistics (PSNR in dB, nats per latent dimension)."""
    device = next(kl.parameters()).device

    def loss(micro_step: MicroStep) -> tuple[Tensor, dict[str, float]]:
        rng = micro_step.rng
        picks = np.sort(rng.integers(0, len(images), recipe.batch))
        x = to_float(images[picks]).to(device)
        mean, log_variance = (half.float() for half in kl.encode(x))
        noise = torch.as_tensor(rng.standard_normal(mean.shape, dtype=np.float32)).to(device)
        y = kl.decode_latent(mean + noise * (0.5 * log_variance).exp()).float()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        error = (y - x).square().mean(1)
        statistics = {"psnr": float(10 * torch.log10(4 / error.detach().mean())), "nats": float(divergence.detach())}
        return (vividness(x) * error).mean() + 0.02 * F.l1_loss(y, x) + KL_WEIGHT * divergence, statistics

    statistics = fit("kl", kl, loss, recipe, work)
    kl.cfg = replace(kl.cfg, scale=1.0)
    mean, spread = encode_all(kl, images[:2048]).astype(np.float64)
    kl.cfg = replace(kl.cfg, scale=float(f"{(mean.var() + np.square(spread).mean()) ** -0.5:.4g}"))
    return statistics


def vividness(images: Tensor) -> Tensor:
    """Weights of the pixels, (N, H, W) with mean 1, of images (N, 3, H, W). A third of the weight is equal for all; the
    rest grows with the squared distance from the image's mean colour. An object is small and vivid: without this, its
    outline weighs less than the grain of the background."""
    distance = (images - images.mean((2, 3), keepdim=True)).square().mean(1)
    return (1 + 2 * distance / distance.mean((1, 2), keepdim=True).clamp_min(1e-6)) / 3


@torch.no_grad()
def encode_all(kl: Latents, images: np.ndarray, batch: int = 128) -> np.ndarray:
    """Distributions of the tokens of uint8 images (N, H, W, 3): mean and spread (2, N, L, D) float16."""
    device = next(kl.parameters()).device
    distributions = []
    for i in range(0, len(images), batch):
        with bfloat16_products(device):
            token_distribution = kl.token_distribution(to_float(images[i : i + batch]).to(device))
        distributions.append(torch.stack(token_distribution).half().cpu().numpy())
    return np.concatenate(distributions, axis=1)


def mirrored(images: np.ndarray) -> np.ndarray:
    """Images (N, H, W, 3), followed by their mirror images: (2N, H, W, 3). In scenes with one object, mirror images
    have the same distribution and the same labels."""
    return np.concatenate([images, images[:, :, ::-1]])


@torch.no_grad()
def evaluate_kl(kl: Latents, images: np.ndarray, limit: float) -> dict[str, float]:
    """PSNR in dB (mean over images) of images decoded from sampled tokens, in float32; nats per token; and the share of
    token values beyond `limit`."""
    device = next(kl.parameters()).device
    rng = torch.Generator().manual_seed(0)
    psnr, nats, beyond = [], [], []
    for i in range(0, len(images), 128):
        x = to_float(images[i : i + 128]).to(device)
        mean, spread = kl.token_distribution(x)
        tokens = mean + spread * torch.randn(mean.shape, generator=rng).to(device)
        psnr.append(10 * torch.log10(4 / (x - kl.images(tokens).clamp(-1, 1)).square().mean((1, 2, 3))))
        a, b = (part / kl.cfg.scale for part in (mean, spread))
        nats.append(0.5 * (a.square() + b.square() - 1 - 2 * b.log()).sum(-1).mean(-1))
        beyond.append((tokens.abs() > limit).float().mean((1, 2)))
    names = ("psnr_db", "nats_a_token", "beyond_limit")
    return {name: float(torch.cat(x).mean()) for name, x in zip(names, (psnr, nats, beyond), strict=True)}


def _seeded(
    distributions: np.ndarray, labels: np.ndarray, seed: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, torch.Generator]:
    """The result of `draw`, and the generator for further draws."""
    generator = torch.Generator().manual_seed(seed)
    return *draw(distributions, labels, generator, device), generator


def _draw_some(
    rng: np.random.Generator, distributions: np.ndarray, labels: np.ndarray, size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, torch.Generator]:
    picks = np.sort(rng.integers(0, len(labels), size))
    return _seeded(distributions[:, picks], labels[picks], int(rng.integers(2**62)), device)


def loss_of(
    model: MAR, latents: Tensor, labels: Tensor, masked: Tensor, generator: torch.Generator, dropout: float
) -> Tensor:
    """`head_loss` over masked tokens. latents (N, L, D): sampled tokens; labels (N,) int64, dropped with
    probability `dropout`; masked (N, L) bool: the tokens to predict (see `mar_loss.masks`)."""
    drawn = torch.rand(len(labels), generator=generator, device=generator.device).to(latents.device)
    labels = labels.masked_fill(drawn < dropout, model.cfg.classes)
    z = model.conditions(latents, ~masked, labels)[masked]
    return head_loss(model, latents[masked].float(), z, generator)


def train_target(
    model: MAR, distributions: np.ndarray, labels: np.ndarray, recipe: Recipe, work: Path, dropout: float = 0.1
) -> dict[str, float]:
    """MAR's training on tokens drawn from `distributions` (2, N, L, D), with classes `labels` (N,) int64. A share
    `dropout` of the rows is trained without its class, which guidance needs for its unconditional half."""
    device = model.mask_token.device

    def loss(micro_step: MicroStep) -> tuple[Tensor, dict[str, float]]:
        rng = micro_step.rng
        tokens, classes, masked, generator = _draw_some(rng, distributions, labels, recipe.batch, device)
        value = loss_of(model, tokens, classes, masked, generator, dropout)
        return value, {"loss": float(value.detach())}

    return fit("mar", model, loss, recipe, work)


def train_draft(
    draft: MAR,
    target: MAR | None,
    distributions: np.ndarray,
    labels: np.ndarray,
    recipe: Recipe,
    work: Path,
    dropout: float = 0.3,
) -> dict[str, float]:
    """Train the smaller model in the same way and, unless `target` is None, by distillation: the loss adds the two
    models' `divergence` along a token's path.

    A draft is accepted with probability 1 - TV of the two distributions of a path (criterion=path), and the divergence
    bounds this TV (Pinsker). The data teach the data distribution; a draft need not learn it where the target has not.
    The two models are far apart in the first training steps; the logarithm keeps these from dominating the rest.
    `dropout`: share of unconditional rows, because a guided draft runs those too.
    """
    device = draft.mask_token.device
    if target is not None:
        target.requires_grad_(False)

    def loss(micro_step: MicroStep) -> tuple[Tensor, dict[str, float]]:
        rng = micro_step.rng
        tokens, classes, masked, generator = _draw_some(rng, distributions, labels, recipe.batch, device)
        lost = torch.as_tensor(rng.uniform(size=len(classes)) < dropout).to(device)
        classes, x0 = classes.masked_fill(lost, draft.cfg.classes), tokens[masked]
        session, z = conditions_of_masked(Guided(draft), tokens, classes, masked)
        value = head_loss(draft, x0, z, generator)
        statistics = {"loss": float(value.detach())}
        if target is not None:
            teacher, teacher_z = conditions_of_masked(Guided(target), tokens, classes, masked)
            nats = divergence(teacher, session, x0, teacher_z, z, generator)
            value = value + draft.cfg.steps * nats.log1p().mean()
            statistics["nats"] = draft.cfg.steps * float(nats.detach().mean())
        return value, statistics

    return fit("mar_draft" if target is not None else "mar_draft_alone", draft, loss, recipe, work)


def _batches(
    distributions: np.ndarray, labels: np.ndarray, device: torch.device, batch: int = 64
) -> Iterator[tuple[Tensor, Tensor, Tensor, torch.Generator]]:
    """Batches of `_seeded`: every image once, the same draws in every call."""
    for i in range(0, len(labels), batch):
        yield _seeded(distributions[:, i : i + batch], labels[i : i + batch], i, device)


@torch.no_grad()
def evaluate_target(model: MAR, distributions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The training loss on these images, with their classes, in float32."""
    losses = [
        float(loss_of(model, tokens, classes, masked, generator, dropout=0.0))
        for tokens, classes, masked, generator in _batches(distributions, labels, model.mask_token.device)
    ]
    return {"loss": float(np.mean(losses))}


@torch.no_grad()
def evaluate_draft(target: MAR, draft: MAR, distributions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """`evaluate_target` of the draft, and its divergence from the target in nats per token's path, without guidance."""
    nats = []
    for tokens, classes, masked, generator in _batches(distributions, labels, draft.mask_token.device):
        (p, z), (q, z_draft) = (conditions_of_masked(Guided(m), tokens, classes, masked) for m in (target, draft))
        nats.append(float(divergence(p, q, tokens[masked], z, z_draft, generator).mean()) * draft.cfg.steps)
    return {**evaluate_target(draft, distributions, labels), "nats": float(np.mean(nats))}
