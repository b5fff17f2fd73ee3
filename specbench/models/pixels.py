"""Conversions between images in [-1, 1], as tokenizers use them, and pixels."""

from __future__ import annotations

import numpy as np
import torch


def to_float(images: np.ndarray | torch.Tensor) -> torch.Tensor:
    """uint8 (N, H, W, 3) -> float32 (N, 3, H, W) in [-1, 1], the range of all tokenizers here."""
    x = images if isinstance(images, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(images))
    return x.permute(0, 3, 1, 2).contiguous().float() / 127.5 - 1


def to_uint8(images: torch.Tensor) -> np.ndarray:
    """float (N, 3, H, W) in [-1, 1] -> uint8 (N, H, W, 3)."""
    return ((images.float().clamp(-1, 1) + 1) * 127.5 + 0.5).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()


def truncated(images: torch.Tensor) -> np.ndarray:
    """float (B, 3, H, W) in [-1, 1] -> uint8 (B, H, W, 3), clamped and truncated, as in the pipelines of Chameleon
    (notes of the golden chameleon_vqgan) and Emu3. The pipelines of LlamaGen and Lumina-mGPT 2.0 round, like
    `to_uint8`."""
    return ((images.float().clamp(-1, 1) + 1) / 2 * 255).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
