"""Sampling from a MAR: guidance, its schedule over the iterations, and the decoding session."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specbench.engine.ops import take
from specbench.engine.state import Buffer, Buffers
from specbench.errors import unknown
from specbench.models.denoiser import Denoiser, Sampler
from specbench.models.mar import MAR

GUIDANCE = ("linear", "constant")


@dataclass(frozen=True)
class MaskedSampling:
    """The parameters of conf/model/base/masked.yaml that the target needs: the guidance, its schedule, and the steps in
    which the head samples a token."""

    cfg_scale: float
    cfg_schedule: str
    diffusion_steps: int

    def guided(self, model: MAR) -> Guided:
        """A MAR with this guidance."""
        return Guided(model, self.cfg_scale, self.cfg_schedule)


@dataclass(frozen=True)
class Guided:
    """A MAR with its guidance: strength `scale` (1: no guidance) and schedule `kind`."""

    model: MAR
    scale: float = 1.0
    kind: str = "constant"

    @property
    def length(self) -> int:
        """Number of tokens of an image."""
        return self.model.cfg.length

    @property
    def dim(self) -> int:
        """Number of values of a token."""
        return self.model.cfg.token_dim

    @property
    def steps(self) -> int:
        """Number of steps in which the head samples a token."""
        return self.model.cfg.steps

    @property
    def halves(self) -> int:
        """Rows per image: one with the class and, with guidance, one without."""
        return 1 if self.scale == 1 else 2

    @property
    def net(self) -> Denoiser:
        """The network of the head."""
        return self.model.diffloss.net

    def pass_layers(self) -> list[nn.Module]:
        """The layers, except the head, whose weights a pass reads."""
        m = self.model
        return [m.z_proj, m.decoder_embed, *m.encoder_blocks, *m.decoder_blocks]

    def open(self, conditioning: Tensor, rows: int) -> MarSession:
        """A session for `rows` images of classes (rows,) int64."""
        if len(conditioning) != rows:
            raise ValueError(f"{len(conditioning)} classes for {rows} rows")
        return MarSession(self, conditioning)


class MarSession:
    """A batch of images of classes `labels` (B,) int64, for the decode loop.

    With guidance, a condition contains z, z without a class, and the strength.
    """

    def __init__(self, guided: Guided, labels: Tensor) -> None:
        self.guided, self.labels = guided, labels.clone()  # a copy, because it is overwritten with another batch

    def buffers(self) -> Buffers:
        """See `ContinuousSession`."""
        return {"labels": Buffer(self.labels)}

    def condition(
        self, tokens: Tensor, known: Tensor, row: Tensor, positions: Tensor, done: Tensor, most: int
    ) -> Tensor:
        """Conditions (R, n, E), or with guidance (R, n, 2 E + 1), float32, of the positions (R, n) int64 of R copies of
        images; row (R,): the image of each copy.

        tokens (R, L, D) are read where `known` (R, L) bool is true, at most `most` per copy. done (R, n) int64: the
        number of tokens that are known before the last token of the position's iteration.
        """
        g, labels = self.guided, self.labels[row]
        if g.scale == 1:
            return take(g.model.conditions(tokens, known, labels, most), positions).float()
        none = torch.full_like(labels, g.model.cfg.classes)
        z = g.model.conditions(tokens.repeat(2, 1, 1), known.repeat(2, 1), torch.cat([labels, none]), most)
        strength = guidance(g.scale, g.kind, done + 1, g.length)
        return torch.cat([*take(z, positions.repeat(2, 1)).float().chunk(2), strength.unsqueeze(-1)], -1)

    def moments(self, x: Tensor, index: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance, both (n, D) float32, of the states after x (n, D) at steps (n,) int64 of the head,
        under conditions z (n, ...) of `condition`."""
        if self.guided.scale == 1:
            return self.guided.model.moments(x, index, z)
        return self.guided.model.moments(x, index, *self._halves(z))

    @property
    def head(self) -> Guided:
        """The parameters of `sampler`, apart from z."""
        return self.guided

    def sampler(self, z: Tensor) -> Sampler:
        """`moments` of all states at one step, from the last step down to 0, under fixed conditions z (n, ...)."""
        return self.guided.model.sampler(z) if self.guided.scale == 1 else self.guided.model.sampler(*self._halves(z))

    @staticmethod
    def _halves(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        half = z.shape[-1] // 2
        return z[:, :half], z[:, half:-1], z[:, -1]


def guidance(scale: float, kind: str, done: Tensor, length: int) -> Tensor:
    """Strengths float32, in the shape of `done` int64: the number of known tokens after the iteration.

    kind: "constant", or "linear": increasing from 1 with the share of known tokens. As in MAR, the last iteration
    counts one token as unknown (reference README (32), (33)).
    """
    if kind not in GUIDANCE:
        raise unknown("guidance schedule", kind, GUIDANCE)
    if kind == "constant":
        return torch.full(done.shape, scale, dtype=torch.float32, device=done.device)
    return 1 + (scale - 1) * done.clamp_max(length - 1).float() / length


def patchify(latent: Tensor, patch: int = 1) -> Tensor:
    """Latents (N, C, H, W) -> tokens (N, H W / patch^2, C patch^2), row by row."""
    n, c, h, w = latent.shape
    parts = latent.view(n, c, h // patch, patch, w // patch, patch)
    return parts.permute(0, 2, 4, 1, 3, 5).reshape(n, -1, c * patch * patch)


def unpatchify(tokens: Tensor, patch: int = 1) -> Tensor:
    """The inverse of `patchify`, for square images."""
    n, length, dim = tokens.shape
    side, c = math.isqrt(length), dim // patch**2
    parts = tokens.view(n, side, side, c, patch, patch)
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(n, c, side * patch, side * patch)
