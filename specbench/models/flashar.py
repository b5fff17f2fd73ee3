"""FlashAR: LlamaGen that decodes an image along anti-diagonals, all cells of a diagonal in one pass (arXiv 2605.09430;
code: lxazjk/Emu3.5-FlashAR, commit 2d4a74e).

It is a different target: nothing is drafted or verified. Cell (r, c) belongs to step r + c, so an image of H rows and W
columns takes H + W - 1 passes. An image position attends to the prefix and to all cells of its own and of earlier
steps. Rotary positions and the layout of a sequence are as in raster order.

Two branches predict a cell. The trunk's final hidden state of the left cell is `h`; the target's head maps it to the
horizontal logits. The vertical branch has copies of the trunk's last layers. They read the hidden states at the entry
of the first copied layer, of image cells only; after a norm they give `v` of the upper cell, and a separate head maps
it to the vertical logits. A gate reads both: logits = g horizontal + (1 - g) vertical, g = sigmoid(MLP[h; v]). The
first row has no upper cells and uses only the horizontal logits; the first column only uses the vertical logits. The
last position of the prefix predicts cell (0, 0).

Our choices where the paper is not specific: at cell (0, 0) the gate is a linear map of the prefix's final hidden state,
and the vertical head reads the prefix's hidden state at the entry of the copied layers, after the same norm.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench.engine.masks import TreeMask
from specbench.engine.ops import linear, sigmoid, silu, take
from specbench.models.language import LanguageSession, Prefix
from specbench.models.llamagen import LlamaGen, LlamaGenConfig
from specbench.models.orders import GroupOrder
from specbench.models.transformer import Block, RMSNorm, run_blocks


@dataclass(frozen=True)
class FlashARConfig(LlamaGenConfig):
    """branch_layers: how many of the trunk's last layers the vertical branch copies (4 in the published
    configuration)."""

    branch_layers: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.branch_layers < self.n_layer:
            raise ValueError(f"branch_layers must be 1 to {self.n_layer - 1} (got {self.branch_layers})")

    @property
    def gate_width(self) -> int:
        return max(64, self.dim // 8)


class FlashAR(LlamaGen):
    cfg: FlashARConfig

    def __init__(self, cfg: FlashARConfig) -> None:
        super().__init__(cfg)
        self.aux_hidden_layers = (cfg.n_layer - cfg.branch_layers - 1,)  # its output enters the copied layers
        self.branch_layers = nn.ModuleList(Block(self.block) for _ in range(cfg.branch_layers))
        self.branch_norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.branch_output = nn.Linear(cfg.dim, cfg.vocab_size, bias=False)
        self.gate_hidden = nn.Linear(2 * cfg.dim, cfg.gate_width)
        self.gate_output = nn.Linear(cfg.gate_width, 1)
        self.first_gate = nn.Linear(cfg.dim, 1)
        for gate in (self.gate_output, self.first_gate):
            nn.init.zeros_(gate.weight)
            nn.init.zeros_(gate.bias)

    @classmethod
    def from_target(cls, target: LlamaGen, branch_layers: int) -> Self:
        """A model whose trunk has the weights of `target`, and whose branch has copies of its last layers, norm and
        head."""
        model = cls(FlashARConfig(**asdict(target.cfg), branch_layers=branch_layers))
        model.load_state_dict(target.state_dict(), strict=False)
        for copy, layer in zip(model.branch_layers, target.layers[-branch_layers:], strict=True):
            copy.load_state_dict(layer.state_dict())
        model.branch_norm.load_state_dict(target.norm.state_dict())
        model.branch_output.load_state_dict(target.output.state_dict())
        return model.to(target.output.weight)

    @property
    def trunk(self) -> list[nn.Parameter]:
        """The parameters that the raster target also has."""
        new = ("branch_", "gate_", "first_gate")
        return [p for name, p in self.named_parameters() if not name.startswith(new)]

    def steps(self, device: torch.device) -> Tensor:
        """The step r + c of every cell, (T,) int64 in raster order."""
        cell = torch.arange(self.length, device=device)
        return cell // self.width + cell % self.width

    @cached_property
    def order(self) -> GroupOrder:
        """Anti-diagonals, each starting at its upper right cell."""
        steps = [row + column for row in range(self.width) for column in range(self.width)]
        cells = sorted(range(self.length), key=steps.__getitem__)
        sizes = tuple(steps.count(step) for step in range(2 * self.width - 1))
        return GroupOrder(torch.tensor([cells]), sizes, whole=True)

    def horizontal(self, h: Tensor) -> Tensor:
        """Logits (..., V) of the cell to the right, by the target's head."""
        return super().head(h)

    def vertical(self, v: Tensor) -> Tensor:
        """Logits (..., V) of the cell below."""
        return linear(v, self.branch_output.weight)

    def gated(self, h: Tensor, v: Tensor, cells: Tensor) -> Tensor:
        """The states that predict `cells` (n,) or (R, n) int64: (R, n, 2 * dim + 1) with h of the left cells, v of the
        upper cells, both (R, n, dim), and the gate. The state of a cell that does not exist is zero."""
        row, column = (cells // self.width).unsqueeze(-1), (cells % self.width).unsqueeze(-1)
        inner = silu(linear(torch.cat([h, v], -1), self.gate_hidden.weight, self.gate_hidden.bias))
        g = sigmoid(linear(inner, self.gate_output.weight, self.gate_output.bias))
        first = sigmoid(linear(h, self.first_gate.weight, self.first_gate.bias))
        g = torch.where(column == 0, torch.where(row == 0, first, 0), torch.where(row == 0, 1, g))
        return torch.cat([h, v, g.to(h.dtype)], -1)

    def head(self, hidden: Tensor) -> Tensor:
        """Fused logits (..., V) of the states that `gated` returns."""
        h, v, g = hidden.split((self.cfg.dim, self.cfg.dim, 1), -1)
        return g * self.horizontal(h) + (1 - g) * self.vertical(v)

    def all_cells(self, prefix: Prefix, tokens: Tensor) -> Tensor:
        """The states (see `gated`) that predict all cells in raster order: (R, T, 2 * dim + 1) from tokens (R, T) or
        (R, T - 1). One pass without a cache, with gradients if they are enabled."""
        before, cells = len(prefix), self.length - 1  # no cell depends on the last one
        x = torch.cat([prefix.inputs, self.tok_embeddings(tokens[:, :cells])], 1)
        positions = torch.arange(before + cells, device=x.device)
        rank = torch.cat([positions[:before], before + self.steps(x.device)[:cells]])  # a query sees no higher rank
        usable = F.pad(prefix.valid, (0, cells), value=True)
        itself = positions == positions[:, None]
        mask = (((rank <= rank[:, None]) & usable.unsqueeze(1)) | itself).unsqueeze(1)
        padding = (~prefix.valid).sum(1, keepdim=True)
        rope = self.rope_at(self.reserved(before + cells, before), positions.expand(len(x), -1), padding)
        h, entry = self.hidden(x, rope, mask, None, None).chunk(2, -1)
        image = run_blocks(self.branch_layers, entry[:, before:], rope[:, before:], mask[..., before:, before:])
        v = self.branch_norm(torch.cat([entry[:, before - 1 : before], image], 1))
        all_cells = torch.arange(self.length, device=x.device)
        left, above = self.neighbours(all_cells)
        return self.gated(_entries(h[:, before - 1 :], left + 1), _entries(v, above + 1), all_cells)

    @property
    def cache_layers(self) -> int:
        return len(self.layers) + len(self.branch_layers)

    @property
    def pass_weights(self) -> list[nn.Module]:
        branch = [self.branch_layers, self.branch_norm, self.branch_output]
        return [*super().pass_weights, *branch, self.gate_hidden, self.gate_output]

    def hidden_at_positions(
        self, session: LanguageSession, x: Tensor, rope: Tensor, mask: TreeMask, slots: Tensor, parallel: Any
    ) -> Tensor:
        """See `gated`, for the next positions. The nodes are the cells of the previous step, or the end of the
        prefix."""
        h, entry = self.hidden(x, rope, mask, session.cache, slots).chunk(2, -1)
        image = mask.among[..., 1:]
        alone = ~image.any(-1, keepdim=True)  # nodes before the first cell, whose results are not read
        among = torch.cat([mask.among[..., :1] & alone, image], -1)
        cells = TreeMask(mask.root, mask.root, among)  # nothing before the end of the prefix
        branch = run_blocks(self.branch_layers, entry, rope, cells, session.cache.after(len(self.layers)), slots)
        fed, targets = parallel.slots.flatten(1), parallel.next_positions
        at_end = session.both(fed < 0).unsqueeze(-1)
        v = self.branch_norm(torch.where(at_end, entry, branch))
        left, above = (session.both(_index(fed, cell)) for cell in self.neighbours(targets))
        return self.gated(_entries(h, left), _entries(v, above), session.both(targets))

    def neighbours(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """The left and the upper neighbours of cells (...) int64. -1: the last position of the prefix, for cell 0; -2:
        no such cell exists."""
        row, column, first = cells // self.width, cells % self.width, cells == 0
        left = torch.where(first | (column > 0), cells - 1, -2)
        above = torch.where(row > 0, cells - self.width, torch.where(first, -1, -2))
        return left, above


def _index(fed: Tensor, cells: Tensor) -> Tensor:
    """The index (B, n) of each of `cells` (B, n) among the cells `fed` (B, m); -1 if it is not among them."""
    same = fed.unsqueeze(1) == cells.unsqueeze(2)
    return torch.where(same.any(-1), same.int().argmax(-1), -1)


def _entries(x: Tensor, index: Tensor) -> Tensor:
    """Entries `index` (n,) or (R, n) of x (R, m, dim); zero where the index is negative."""
    index = index.expand(len(x), -1)
    return take(x, index.clamp_min(0)) * (index >= 0).unsqueeze(-1)
