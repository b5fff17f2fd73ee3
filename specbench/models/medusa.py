"""Medusa heads (Cai et al. 2024): a residual block and a linear layer per head, on the target's hidden state.

Head k (from 0) reads the hidden state from which the target predicts a token, and predicts the token k + 1 positions
ahead. Tensor names are as in Medusa's released heads, under `medusa_head`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from specbench.engine.ops import linear, silu
from specbench.models.language import Language
from specbench.models.loading import naming, official
from specbench.models.loading.drafter_networks import NetworkLoader
from specbench.models.supervision import Batch, DraftLogits, Training
from specbench.models.unified import Unified


@dataclass(frozen=True)
class MedusaConfig:
    dim: int
    vocab_size: int
    heads: int = 5


class MedusaBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        nn.init.zeros_(self.linear.weight)  # a new head equals the target's
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + silu(linear(x, self.linear.weight, self.linear.bias))


class MedusaOutput(nn.Module):
    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class MedusaNetwork(nn.Module):
    def __init__(self, cfg: MedusaConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.medusa_head = nn.ModuleList(
            nn.Sequential(MedusaBlock(cfg.dim), MedusaOutput(cfg.dim, cfg.vocab_size)) for _ in range(cfg.heads)
        )

    def forward(self, hidden: Tensor, heads: int | None = None) -> Tensor:
        """Logits (..., heads, V) of hidden states (..., dim) after the target's final norm; the first `heads` heads."""
        return torch.stack([head(hidden) for head in self.medusa_head[:heads]], -2)


def like_target(target: Language, heads: int = 5) -> MedusaNetwork:
    """Heads for this target. They start as copies of the target's output layer, if it reads hidden states."""
    medusa = MedusaNetwork(MedusaConfig(target.block.dim, target.vocab_size, heads))
    with torch.no_grad():
        for name, parameter in medusa.named_parameters():
            if name.endswith("1.weight") and target.head_hidden is None:
                parameter.copy_(target.output.weight)
    return medusa


class MedusaLoader(NetworkLoader[MedusaNetwork]):
    title, seed, module, config = "Medusa heads", 6, MedusaNetwork, MedusaConfig

    def untrained(self, heads: int = 5) -> MedusaNetwork:
        return like_target(self.target, heads)

    def fits(self, network: MedusaNetwork) -> bool:
        return (network.cfg.dim, network.cfg.vocab_size) == (self.target.block.dim, self.target.vocab_size)

    def read_official(self, path: Path) -> MedusaNetwork:
        """From Medusa's released layout. Only the rows of image tokens are kept of each head's output."""
        source = official.open_source(path)
        tops = [n for n in source.tensors if n.endswith(".1.weight")]
        cfg = MedusaConfig(self.target.block.dim, self.target.vocab_size, max(1, len(tops)))
        table, ignored = naming.for_medusa(source.tensors, cfg.heads, str(source.path))
        if isinstance(self.target, Unified):
            keep = self.target.image.ids
            table = {n: replace(p, pick=keep) if n.endswith(".1.weight") else p for n, p in table.items()}
        bundle = self.bundle
        return official.load(lambda: MedusaNetwork(cfg), source, table, bundle.device, bundle.dtype, ignored)


class MedusaTraining(Training):
    network: MedusaNetwork

    @property
    def evaluated(self) -> int:  # type: ignore[override]
        return self.network.cfg.heads

    def draft(self, batch: Batch, depth: int, generator: torch.Generator | None = None) -> Iterator[DraftLogits]:
        dim = self.head.target.block.dim
        hidden = batch.hidden[:, batch.valid.shape[1] - 1 : -1, :dim].to(self.dtype)
        logits = self.head.codes(self.network(hidden, depth))  # (N, T - 1, heads, codes)
        for k in range(min(depth, self.network.cfg.heads)):
            yield DraftLogits.after(1 + k, logits[:, : logits.shape[1] - k, k])

    def depth(self, unroll_steps: int) -> int:
        return self.network.cfg.heads
