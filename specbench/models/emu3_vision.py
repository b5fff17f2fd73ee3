"""Emu3's vision tokenizer: transformers' network, with the official tensor names or with transformers' names.

One latent frame is decoded to four frames; a still image is the first of them (reference README (30)). transformers
computes the same as the official code (golden emu3_vision_tokenizer). Only the names differ, and the shape of the
attention's weights: 1x1 convolutions officially, linear layers in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specbench.errors import UsageError
from specbench.models import vq

if TYPE_CHECKING:
    from transformers import Emu3VQVAEConfig

#: Emu3-VisionTokenizer (its manifest), in the official names
OFFICIAL: dict[str, Any] = {
    "codebook_size": 32768,
    "embed_dim": 4,
    "z_channels": 4,
    "ch": 256,
    "ch_mult": [1, 2, 2, 4],
    "num_res_blocks": 2,
    "attn_resolutions": [3],  # level numbers: here, 3 is the lowest resolution
    "temporal_downsample_factor": 4,
}
_TRANSFORMERS = {"z_channels": "latent_channels", "ch": "base_channels", "ch_mult": "channel_multiplier"}


def reduced(codebook_size: int) -> dict[str, Any]:
    """`OFFICIAL`, as narrow as its 32 groups allow, with another number of codes."""
    return OFFICIAL | {"codebook_size": codebook_size, "ch": 32, "ch_mult": [1, 1, 1, 1], "num_res_blocks": 1}


def configured(values: Mapping[str, Any]) -> Emu3VQVAEConfig:
    """transformers' configuration from a config.json: of Emu3-VisionTokenizer, of transformers, or of a complete Emu3
    (its `vq_config`). Missing values are as published. Raises UsageError for invalid sizes."""
    from transformers import Emu3VQVAE, Emu3VQVAEConfig

    try:
        values = values.get("vq_config", values)
        published = {_TRANSFORMERS.get(name, name): value for name, value in OFFICIAL.items()}
        renamed = {_TRANSFORMERS.get(name, name): value for name, value in values.items()}
        cfg = Emu3VQVAEConfig(**{name: renamed.get(name, default) for name, default in published.items()})
        widths = [cfg.base_channels * m for m in cfg.channel_multiplier]
        cfg.hidden_size = widths[-1]
        if any(widths[level] != widths[-1] for level in cfg.attn_resolutions):
            raise ValueError("attention is only possible at the width of the lowest resolution")
        with torch.device("meta"):
            Emu3VQVAE(cfg)
    except Exception as e:  # transformers raises many types for invalid sizes
        reason = " ".join(str(e).split())
        raise UsageError(
            f"no vision tokenizer has these sizes ({reason}); give the config.json that belongs to the weights"
        ) from e
    return cfg


def downsample(cfg: Emu3VQVAEConfig) -> int:
    """Pixels per side of a code."""
    return int(2 ** (len(cfg.channel_multiplier) - 1))


class Emu3Vision(nn.Module):
    """Images (B, 3, H, W) in [-1, 1]  <->  codes (B, H/f * W/f) int64, row by row; f is 8 officially."""

    def __init__(self, cfg: Emu3VQVAEConfig) -> None:
        from transformers import Emu3VQVAE

        super().__init__()
        self.cfg = cfg
        self.vq = Emu3VQVAE(cfg)

    def pre_quant(self, image: Tensor) -> Tensor:
        """Encoder output before quantising, (B, 1, dim, h, w). A still image fills all frames of a latent."""
        frames = image.unsqueeze(1).repeat(1, self.cfg.temporal_downsample_factor, 1, 1, 1)
        return self.vq.quant_conv(self.vq.encoder(frames).transpose(1, 2)).transpose(1, 2)

    def encode(self, image: Tensor) -> Tensor:
        return self.vq.quantize(self.pre_quant(image)).flatten(1)

    def frames(self, codes: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """All frames (B, 4, 3, H, W) of codes (B, h*w), not clamped. grid: (h, w); default: square."""
        return self.vq.decode(codes.unflatten(1, (1, *vq.fill(codes, grid))))

    def decode(self, codes: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Codes (B, h*w) -> images (B, 3, H, W), not clamped: the first of `frames`. Images are decoded one at a time,
        so that they do not depend on each other."""
        return torch.cat([self.frames(row[None], grid)[:, 0] for row in codes])

    def codebook(self) -> Tensor:
        """The code vectors (V, dim) float, as stored and as decoded."""
        return self.vq.quantize.embedding.weight.float()
