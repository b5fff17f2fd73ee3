"""Trains a VQ tokenizer: pixel loss, commitment loss, a codebook of moving averages; dead codes are seeded again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench.engine.half import bfloat16_products
from specbench.models.pixels import to_float, to_uint8
from specbench.models.vq import VQModel
from specbench.training.trainer import MicroStep, Recipe, fit

#: A code is dead when it is chosen less often than this share of the expected number of times.
DEAD = 0.02


class _Trainer(nn.Module):
    """The model and the running statistics of its codebook, so that both are resumed."""

    count: Tensor
    total: Tensor
    fresh: Tensor

    def __init__(self, vq: VQModel, expected: float) -> None:
        """expected: vectors of a batch per code. A code that no vector chooses is dead after about 35 steps."""
        super().__init__()
        self.vq = vq
        self.young = 2 * DEAD * expected  # the count of a new code
        size, dim = vq.quantize.embedding.weight.shape
        vq.quantize.embedding.weight.requires_grad_(False)  # set to moving averages, not trained by gradients
        with torch.no_grad():
            vq.quantize.embedding.weight.copy_(F.normalize(torch.randn(size, dim), dim=-1))
        self.register_buffer("count", torch.full((size,), self.young))
        self.register_buffer("total", self.count[:, None] * vq.quantize.embedding.weight.detach())
        self.register_buffer("fresh", torch.zeros(size, dim))  # recent encoder outputs, to seed dead codes with


def train(
    vq: VQModel, images: np.ndarray, recipe: Recipe, work: Path, decay: float = 0.98, commitment: float = 0.5
) -> dict[str, float]:
    """Train `vq` on uint8 images (N, H, W, 3). Returns the last statistics (PSNR in dB, perplexity of the codes)."""
    size, device = vq.quantize.embedding.weight.shape[0], next(vq.parameters()).device
    t = _Trainer(vq, recipe.batch * (images.shape[1] // vq.cfg.downsample) ** 2 / size)
    t.to(device)
    latest: dict[str, Tensor] = {}

    def loss(micro_step: MicroStep) -> tuple[Tensor, dict[str, float]]:
        rng = micro_step.rng
        picks = np.sort(rng.integers(0, len(images), recipe.batch))
        x = to_float(images[picks]).to(device)
        z = F.normalize(vq.pre_quant(x).float().permute(0, 2, 3, 1), dim=-1)
        codes = vq.quantize.nearest(z)
        e = vq.quantize.codebook[codes]
        latest.update(z=z.detach().reshape(-1, z.shape[-1]), codes=codes.reshape(-1))
        through = z + (e - z).detach()
        y = vq.decode_latent(through.permute(0, 3, 1, 2).contiguous())  # channels-last norms are slow on CPUs
        mse = F.mse_loss(y.float(), x)
        usage = torch.bincount(codes.reshape(-1), minlength=size).float()
        p = usage / usage.sum()
        statistics = {
            "psnr": float(10 * torch.log10(4 / mse.detach())),
            "code_perplexity": float(torch.exp(-(p * (p + 1e-9).log()).sum())),
        }
        return mse + commitment * (z - e.detach()).pow(2).sum(-1).mean() * 0.1 + 0.02 * F.l1_loss(
            y.float(), x
        ), statistics

    def upkeep(step: int) -> None:
        z, codes = latest["z"], latest["codes"]
        n = torch.bincount(codes, minlength=size).float()
        s = torch.zeros_like(t.total).index_add_(0, codes, z)
        t.count.lerp_(n, 1 - decay)
        t.total.lerp_(s, 1 - decay)
        pick = np.random.Generator(np.random.Philox(key=[recipe.seed + 1, step])).integers(0, len(z), size)
        t.fresh.copy_(z[torch.as_tensor(pick, device=device)])
        if step % 20 == 19 and step < 0.8 * recipe.steps:
            dead = t.count < DEAD * len(codes) / size
            t.total[dead], t.count[dead] = t.young * t.fresh[dead], t.young
        vq.quantize.embedding.weight.copy_(F.normalize(t.total, dim=-1))

    return fit("tokenizer", t, loss, recipe, work, upkeep)


@torch.no_grad()
def encode_all(vq: VQModel, images: np.ndarray, batch: int = 256) -> np.ndarray:
    """Codes (N, h*w) int16 of uint8 images."""
    device = next(vq.parameters()).device
    out = []
    for i in range(0, len(images), batch):
        out.append(encode(vq, to_float(images[i : i + batch]).to(device)).to(torch.int16).cpu().numpy())
    return np.concatenate(out)


def encode(vq: VQModel, images: torch.Tensor) -> torch.Tensor:
    """Codes (N, h*w) of images (N, 3, H, W), as the target learns them: in bfloat16, which chooses one of the codes
    that are too close together to differ."""
    with bfloat16_products(images.device):
        return vq.encode(images)


@torch.no_grad()
def evaluate(vq: VQModel, images: np.ndarray) -> dict[str, float]:
    """PSNR in dB (mean over images), the share of codes in use, and the perplexity of the codes of `encode`."""
    device = next(vq.parameters()).device
    psnr, counts = [], torch.zeros(vq.cfg.codebook_size, dtype=torch.int64)
    for i in range(0, len(images), 128):
        x = to_float(images[i : i + 128]).to(device)
        codes = encode(vq, x)
        y = vq.decode(codes).clamp(-1, 1)
        psnr.append(10 * torch.log10(4 / (x - y).pow(2).mean((1, 2, 3))).cpu())
        counts += torch.bincount(codes.reshape(-1).cpu(), minlength=len(counts))
    p = counts.double() / counts.sum()
    return {
        "psnr_db": float(torch.cat(psnr).mean()),
        "codes_used": float((counts > 0).double().mean()),
        "code_perplexity": float(torch.special.entr(p).sum().exp()),
    }


#: A code is replaced by its k-th nearest neighbour, or by a random code (k = 0).
NEIGHBOURS = (1, 10, 100, 0)
_REPLACED = 0.1  # of an image's codes


@torch.no_grad()
def replaced(vq: VQModel, images: np.ndarray, neighbour: int, seed: int = 0) -> tuple[np.ndarray, float]:
    """Images (N, H, W, 3) uint8 after the tokenizer, with a tenth of each image's codes replaced, and the root mean
    square change of their pixels (0 to 255). neighbour: see `NEIGHBOURS`."""
    device, rng = next(vq.parameters()).device, torch.Generator().manual_seed(seed)
    table = vq.quantize.codebook
    decoded, squares = [], []
    for i in range(0, len(images), 128):
        codes = encode(vq, to_float(images[i : i + 128]).to(device))
        if neighbour:
            near = (table[codes.flatten()] @ table.T).topk(neighbour + 1).indices[:, -1].view_as(codes)
        else:
            near = torch.randint(len(table), codes.shape, generator=rng).to(device)
        selected = torch.rand(codes.shape, generator=rng).argsort(-1).argsort(-1) < _REPLACED * codes.shape[-1]
        before, after = (to_uint8(vq.decode(x)) for x in (codes, torch.where(selected.to(device), near, codes)))
        decoded.append(after)
        squares.append(np.square(after.astype(np.float64) - before).mean((1, 2, 3)))
    return np.concatenate(decoded), float(np.sqrt(np.concatenate(squares)).mean())
