"""MAR (Li et al. 2024, arXiv 2406.11838): a masked encoder and decoder over continuous tokens, and a diffusion head.

The encoder reads a class and the known tokens, in any order. The decoder gives the head's condition z of every
position, and the head samples the token of the position under z. Parameter names are as in the official checkpoints.
Facts: reference README (31) to (38), the golden mar and its notes, the manifests of mar_base, mar_large and mar_huge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench.engine.ops import attention, gelu, take
from specbench.models import diffusion
from specbench.models.denoiser import Denoiser, Linear, Sampler, waves


@dataclass(frozen=True)
class MARConfig:
    """The defaults are MAR-B's. length: L tokens of an image, a square number; token_dim: D numbers of a token; buffer:
    positions before the tokens that contain the class; steps: of the diffusion head when it samples; limit: the head's
    estimate of a token's numbers is clamped to plus or minus this value (None: not clamped, as officially). The first
    steps multiply the network's error by hundreds: without a limit, only long training keeps samples near the data."""

    encoder_dim: int = 768
    encoder_depth: int = 12
    encoder_heads: int = 12
    decoder_dim: int = 768
    decoder_depth: int = 12
    decoder_heads: int = 12
    mlp_ratio: float = 4.0
    length: int = 256
    token_dim: int = 16
    classes: int = 1000
    buffer: int = 64
    head_depth: int = 6
    head_width: int = 1024
    steps: int = 100
    norm_eps: float = 1e-6
    limit: float | None = None

    @classmethod
    def even(cls, dim: int, depth: int, heads: int, **others: Any) -> MARConfig:
        """Encoder and decoder of one size."""
        return cls(dim, depth, heads, dim, depth, heads, **others)

    @property
    def side(self) -> int:
        """Tokens in a row of the image."""
        return math.isqrt(self.length)


class MarAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(dim, 3 * dim)
        self.proj = Linear(dim, dim)

    def forward(self, x: Tensor, usable: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = attention(q, k, v, usable, causal=False)
        return self.proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = Linear(dim, hidden)
        self.fc2 = Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu(self.fc1(x)))


class MarBlock(nn.Module):
    def __init__(self, dim: int, heads: int, ratio: float, eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = MarAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = MLP(dim, int(dim * ratio))

    def forward(self, x: Tensor, usable: Tensor | None = None) -> Tensor:
        """usable: mask of the keys that are attended to."""
        x = x + self.attn(self.norm1(x), usable)
        return x + self.mlp(self.norm2(x))


@lru_cache(maxsize=8)
def time_waves(device: torch.device) -> Tensor:
    """Sinusoids (1000, 256) float32 of all trained steps."""
    with torch.inference_mode(False):
        return waves(torch.arange(diffusion.TRAINED_STEPS, device="cpu")).to(device)


def forget_tables() -> None:
    """Drop the cached tables, because tables made with fake tensors have no numbers."""
    diffusion.schedule.cache_clear()
    time_waves.cache_clear()


def _apply_guidance(outputs: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Guided noise and position of the variance, from the network's outputs (2 n, 2 D) with a class, then without."""
    assert scale is not None
    (eps, v), (unconditional, _) = (half.chunk(2, -1) for half in outputs.chunk(2))
    return unconditional + scale.unsqueeze(-1) * (eps - unconditional), v


class DiffLoss(nn.Module):
    """The module that contains the head in official files."""

    def __init__(self, cfg: MARConfig) -> None:
        super().__init__()
        self.net = Denoiser(
            cfg.token_dim, cfg.decoder_dim, cfg.head_width, cfg.head_depth, 2 * cfg.token_dim, cfg.norm_eps
        )


class MAR(nn.Module):
    """Tokens are (R, L, D) in raster order; they can become known in any order."""

    def __init__(self, cfg: MARConfig) -> None:
        super().__init__()
        self.cfg = cfg
        e, d, positions = cfg.encoder_dim, cfg.decoder_dim, cfg.buffer + cfg.length

        def blocks(dim: int, depth: int, heads: int) -> nn.ModuleList:
            return nn.ModuleList(MarBlock(dim, heads, cfg.mlp_ratio, cfg.norm_eps) for _ in range(depth))

        self.class_emb = nn.Embedding(cfg.classes, e)
        self.fake_latent = nn.Parameter(torch.empty(1, e))
        self.z_proj = Linear(cfg.token_dim, e)
        self.z_proj_ln = nn.LayerNorm(e, eps=cfg.norm_eps)
        self.encoder_pos_embed_learned = nn.Parameter(torch.empty(1, positions, e))
        self.encoder_blocks = blocks(e, cfg.encoder_depth, cfg.encoder_heads)
        self.encoder_norm = nn.LayerNorm(e, eps=cfg.norm_eps)
        self.decoder_embed = Linear(e, d)
        self.mask_token = nn.Parameter(torch.empty(1, 1, d))
        self.decoder_pos_embed_learned = nn.Parameter(torch.empty(1, positions, d))
        self.decoder_blocks = blocks(d, cfg.decoder_depth, cfg.decoder_heads)
        self.decoder_norm = nn.LayerNorm(d, eps=cfg.norm_eps)
        self.diffusion_pos_embed_learned = nn.Parameter(torch.empty(1, cfg.length, d))
        self.diffloss = DiffLoss(cfg)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Xavier for matrices, 0.02 for tables and the time embedding, zero for the gates of residual blocks and for
        the head's output."""
        for name, parameter in self.named_parameters():
            if name.endswith(".bias") or "adaLN" in name or "final_layer" in name:
                nn.init.zeros_(parameter)
            elif "norm" in name or "_ln." in name:
                nn.init.ones_(parameter)
            elif "time_embed" in name or not name.endswith("weight") or name == "class_emb.weight":
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.xavier_uniform_(parameter)

    # --- conditions of the head ---------------------------------------------------------------------------------------

    def conditions(self, tokens: Tensor, known: Tensor, labels: Tensor, most: int | None = None) -> Tensor:
        """z (R, L, E) of every position, from tokens (R, L, D). Only the tokens in `known` (R, L) bool are read. labels
        (R,) int64; the value `classes` means no class.

        The z of a row does not depend on the other rows; on the CPU without gradients, this holds bit for bit, because
        all L positions go through the encoder and unknown ones are masked. Otherwise, the row with the most known
        tokens sets the number of positions; an upper bound `most` from the caller avoids a synchronisation with the
        device.
        """
        if tokens.device.type == "cpu" and not torch.is_grad_enabled():
            most = self.cfg.length
        elif most is None:
            most = int(known.sum(1).max())
        return self.decode(*self.encode(tokens, known, labels, most))

    def encode(self, tokens: Tensor, known: Tensor, labels: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """The encoder's output (R, buffer + most, encoder_dim); the tokens `order` (R, most) int64 of its last
        positions, known tokens first, in raster order; and which of these are known, `seen` (R, most) bool."""
        c = self.cfg
        order = known.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        seen = known.gather(1, order)
        values = take(tokens, order).masked_fill(~seen.unsqueeze(-1), 0)  # an attention mask does not remove NaN
        none = (labels == c.classes).unsqueeze(-1)
        start = torch.where(none, self.fake_latent, self.class_emb(labels.clamp_max(c.classes - 1)))
        x = torch.cat([start.unsqueeze(1).expand(-1, c.buffer, -1), self.z_proj(values.to(start.dtype))], 1)
        table = self.encoder_pos_embed_learned.expand(len(x), -1, -1)
        x = self.z_proj_ln(x + torch.cat([table[:, : c.buffer], take(table[:, c.buffer :], order)], 1))
        usable = F.pad(seen, (c.buffer, 0), value=True)[:, None, None]
        for block in self.encoder_blocks:
            x = block(x, usable)
        return self.encoder_norm(x), order, seen

    def decode(self, encoded: Tensor, order: Tensor, seen: Tensor) -> Tensor:
        """z (R, L, E) from the result of `encode`."""
        c = self.cfg
        x = self.decoder_embed(encoded)
        token = self.mask_token.to(x.dtype)
        values = torch.where(seen.unsqueeze(-1), x[:, c.buffer :], token)
        full = token.expand(len(x), c.length, -1).scatter(1, order.unsqueeze(-1).expand_as(values), values)
        x = torch.cat([x[:, : c.buffer], full], 1) + self.decoder_pos_embed_learned
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_norm(x)[:, c.buffer :] + self.diffusion_pos_embed_learned

    # --- the head -----------------------------------------------------------------------------------------------------

    def predict(
        self, x: Tensor, timestep: Tensor, z: Tensor, z_none: Tensor | None = None, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Noise and position of the variance, both (n, D) float32, for x (n, D) at trained steps (n,). Guidance is only
        applied to the noise: u + scale (c - u) (reference README (34))."""
        net, dtype, timestep = self.diffloss.net, self.mask_token.dtype, time_waves(x.device)[timestep]
        if z_none is None:
            eps, v = net(x.to(dtype), timestep, z.to(dtype)).float().chunk(2, -1)
            return eps, v
        outputs = net(torch.cat([x, x]).to(dtype), timestep.repeat(2, 1), torch.cat([z, z_none]).to(dtype)).float()
        return _apply_guidance(outputs, scale)

    def moments(
        self, x: Tensor, index: Tensor, z: Tensor, z_none: Tensor | None = None, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean and log variance, both (n, D) float32, of the state after x (n, D) float32 at step `index` (n,) int64 of
        the head (0 is the last step), under z (n, E). With guidance, `z_none` (n, E) is z without a class and `scale`
        (n,) the strength."""
        s = diffusion.schedule(self.cfg.steps, x.device)
        return self._moments(x, index, *self.predict(x, s.timestep[index], z, z_none, scale))

    def sampler(self, z: Tensor, z_none: Tensor | None = None, scale: Tensor | None = None) -> Sampler:
        """`moments` for complete trajectories under fixed conditions."""
        s = diffusion.schedule(self.cfg.steps, z.device)
        guided = z_none is not None
        condition = torch.cat([z, z_none]) if z_none is not None else z
        output = self.diffloss.net.along(time_waves(z.device)[s.timestep], condition)

        def step(x: Tensor, t: int) -> tuple[Tensor, Tensor]:
            out = output(torch.cat([x, x]) if guided else x, t)
            eps, v = _apply_guidance(out, scale) if guided else out.chunk(2, -1)
            return self._moments(x, slice(t, t + 1), eps, v)

        return step

    def _moments(self, x: Tensor, index: diffusion.Index, eps: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        s = diffusion.schedule(self.cfg.steps, x.device)
        x0, limit = s.x0(x, eps, index), self.cfg.limit
        if limit is not None:
            x0 = x0.clamp(-limit, limit)
        return s.mean(x, x0, index), s.log_variance(v, index)
