"""DINOv2's ViT-L/14 (Oquab et al. 2023) without registers: images -> the features of the class token.

Parameters have the names of the official file. The table of positions is for 37 x 37 patches. At 224 pixels there are
16 x 16 patches: the table is resized with a bicubic filter of scale 16.1 / 37, as in the official code, where the
offset of 0.1 keeps rounding from losing a row. transformers' Dinov2Model uses 16 / 37, which gives other features.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specbench.models.loading import official

_OFFSET = 0.1


@dataclass(frozen=True)
class ViTConfig:
    """A vision transformer. positions: side of the table of positions, in patches."""

    dim: int = 1024
    layers: int = 24
    heads: int = 16
    patch: int = 14
    positions: int = 37


class _ViTAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


class _ViTMLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return y


class _LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class _ViTBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(dim, eps=1e-6), _ViTAttention(dim, heads), _LayerScale(dim)
        self.norm2, self.mlp, self.ls2 = nn.LayerNorm(dim, eps=1e-6), _ViTMLP(dim), _LayerScale(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        y: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return y


class _PatchEmbedding(nn.Module):
    def __init__(self, dim: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(x)
        return y.flatten(2).transpose(1, 2)


class DINOv2(nn.Module):
    """Images (B, 3, S, S) float32, normalised -> features (B, dim): the class token after the last norm."""

    def __init__(self, cfg: ViTConfig = ViTConfig()) -> None:
        super().__init__()
        self.cfg = cfg
        self.cls_token = nn.Parameter(torch.zeros(1, 1, cfg.dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + cfg.positions**2, cfg.dim))
        self.patch_embed = _PatchEmbedding(cfg.dim, cfg.patch)
        self.blocks = nn.ModuleList(_ViTBlock(cfg.dim, cfg.heads) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        side = x.shape[-1] // self.cfg.patch
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.patch_embed(x)], 1) + self._positions(side)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.norm(x[:, 0])
        return y

    def _positions(self, side: int) -> Tensor:
        """The table for side x side patches, (1, 1 + side^2, dim)."""
        table_side = self.cfg.positions
        if side == table_side:
            return self.pos_embed
        table = self.pos_embed[:, 1:].transpose(1, 2).unflatten(2, (table_side, table_side))
        resized = F.interpolate(table, scale_factor=(side + _OFFSET) / table_side, mode="bicubic")
        return torch.cat([self.pos_embed[:, :1], resized.flatten(2).transpose(1, 2)], 1)


def load(path: Path, device: str, cfg: ViTConfig = ViTConfig()) -> DINOv2:
    """The network of the official file, in float32. Raises UsageError for a file with other tensors."""
    source = official.open_source(path)
    return official.load(lambda: DINOv2(cfg), source, None, device, torch.float32, ["mask_token"])
