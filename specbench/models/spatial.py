"""Heads that predict hidden states of the target at other cells of the image, to the right and in the rows below
(spatially speculative decoding, arXiv 2606.20543).

A head reads one cell: the hidden state h from which the target drew its token, and the embedding e of this token. It
joins them, z = [h; e], and predicts

    a = W z,    h' = a + SwiGLU(RMSNorm(a)),

the hidden state from which the target draws the token of another cell. The target's head maps h' to the distribution of
this token. Head k to the right (from 0) predicts the cell k + 1 positions ahead in raster order. Head j below predicts
the cell j + 1 rows below, in the same column.

No official code was available. The shape of a head is from a second-hand description. Our choices: h and h' are hidden
states after the target's final norm, as for all drafters here; e is the embedding of the token that was drawn from h;
the width of the SwiGLU; and the loss, which adds a cross-entropy to the smooth L1 distance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specbench.engine.ops import Kernels, linear
from specbench.models.language import Language
from specbench.models.loading.drafters import NetworkLoader
from specbench.models.supervision import Batch, DraftLogits, Training
from specbench.models.transformer import BlockConfig, FeedForward, RMSNorm


@dataclass(frozen=True)
class SpatialConfig:
    """right, below: number of heads per direction; ffn_dim: width of their SwiGLU."""

    dim: int
    ffn_dim: int
    right: int = 5
    below: int = 2
    norm_eps: float = 1e-5


class SpatialHead(nn.Module):
    def __init__(self, cfg: SpatialConfig) -> None:
        super().__init__()
        self.join = nn.Linear(2 * cfg.dim, cfg.dim, bias=False)
        self.norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.feed_forward = FeedForward(BlockConfig(cfg.dim, 1, 1, cfg.ffn_dim))
        with torch.no_grad():  # a new head returns the hidden state that it reads
            self.join.weight.copy_(torch.eye(cfg.dim, 2 * cfg.dim))
            self.feed_forward.w2.weight.zero_()

    def forward(self, cells: Tensor, kernels: Kernels | None = None) -> Tensor:
        """Hidden states (..., dim) from cells (..., 2 dim)."""
        joined = linear(cells, self.join.weight)
        return joined + self.feed_forward(self.norm(joined, kernels))


class SpatialNetwork(nn.Module):
    def __init__(self, cfg: SpatialConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.heads = nn.ModuleList(SpatialHead(cfg) for _ in range(cfg.right + cfg.below))  # to the right, then below

    def forward(self, cells: Tensor, parts: Sequence[tuple[int, slice]], kernels: Kernels | None = None) -> Tensor:
        """Predicted hidden states (R, n, dim). For each (head, slice) of `parts`: the outputs of this head (counted
        over both directions) at this slice of the cells (R, *, 2 dim)."""
        return torch.cat([self.heads[head](cells[:, where], kernels) for head, where in parts], 1)


def like_target(target: Language, right: int = 5) -> SpatialNetwork:
    """Heads for this target."""
    dim = target.block.dim
    return SpatialNetwork(SpatialConfig(dim, max(1, dim // 4), right, norm_eps=target.block.norm_eps))


class SpatialLoader(NetworkLoader[SpatialNetwork]):
    title, seed, module, config = "spatial heads", 7, SpatialNetwork, SpatialConfig

    def untrained(self, heads: int = 5) -> SpatialNetwork:
        return like_target(self.target, heads)

    def fits(self, network: SpatialNetwork) -> bool:
        return network.cfg.dim == self.target.block.dim


class SpatialTraining(Training):
    """All heads, at every position of a sequence; heads to the right come first."""

    network: SpatialNetwork

    @property
    def evaluated(self) -> int:  # type: ignore[override]
        return len(self.network.heads)

    def draft(self, batch: Batch, depth: int, generator: torch.Generator | None = None) -> Iterator[DraftLogits]:
        target, right = self.head.target, self.network.cfg.right
        hidden = batch.hidden[
            :, batch.valid.shape[1] - 1 :
        ]  # at each position, the hidden state from which its token was drawn
        embedded = target.tok_embeddings(target.ids(batch.tokens))
        cells = torch.cat([hidden, embedded], -1).to(self.dtype)
        length = cells.shape[1]
        for i in range(min(depth, len(self.network.heads))):
            ahead = i + 1 if i < right else (i + 1 - right) * target.width
            features = self.network(cells, [(i, slice(length - ahead))])
            yield DraftLogits.after(ahead, features, features, self.head.logits)

    def depth(self, unroll_steps: int) -> int:
        return len(self.network.heads)
