"""The EAGLE drafter: one Transformer layer that predicts the target's next hidden state from (hidden state, next
token).

Entry e of its sequence pairs the target's hidden state at place e with the token at place e + 1, and its output stands
for the hidden state at place e + 1; the target's own head turns it into a law. As in the drafters published for
LlamaGen there is no norm before the layer and none after it, and every prefix place counts as token 0 (reference README
(11) to (16)).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from specbench.engine.ops import KVCache, linear
from specbench.models.llamagen import LlamaGen
from specbench.models.transformer import Block, BlockConfig, grid_rotary, init_weights, run_blocks


@dataclass(frozen=True)
class EagleConfig:
    dim: int
    n_head: int
    ffn_hidden: int
    vocab_size: int
    cls_token_num: int
    block_size: int
    rope_base: float = 10000.0
    norm_eps: float = 1e-6

    @property
    def block(self) -> BlockConfig:
        return BlockConfig(self.dim, self.n_head, self.n_head, self.ffn_hidden, self.norm_eps)

    def to_dict(self) -> dict:
        return asdict(self)


class Eagle(nn.Module):
    def __init__(self, cfg: EagleConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.dim)
        self.fc = nn.Linear(2 * cfg.dim, cfg.dim)
        self.layers = nn.ModuleList([Block(cfg.block, input_norm=False)])
        self._rope: Tensor | None = None
        init_weights(self)

    def rope(self, extra: int = 0) -> Tensor:
        """Entry e turns with the cell of the token it holds: cls_token_num - 1 zero rows, then the grid."""
        rows = self.cfg.cls_token_num - 1 + self.cfg.block_size + extra
        if self._rope is None or len(self._rope) < rows or self._rope.device != self.fc.weight.device:
            side = int(self.cfg.block_size**0.5)
            table = grid_rotary(side, self.cfg.block.head_dim, self.cfg.cls_token_num - 1, extra, self.cfg.rope_base)
            self._rope = table.to(self.fc.weight.device)
        return self._rope

    def new_cache(self, rows: int, slots: int) -> KVCache:
        b = self.cfg.block
        return KVCache(len(self.layers), rows, b.n_kv_heads, slots, b.head_dim, self.fc.weight)

    def hidden(
        self, tokens: Tensor, target_hidden: Tensor, places: Tensor, mask: Tensor, cache: KVCache, slots: Tensor
    ) -> Tensor:
        """Predicted hidden states (rows, n, dim) of entries holding `tokens` (rows, n) beside `target_hidden` (rows, n,
        dim)."""
        x = linear(torch.cat([self.embed_tokens(tokens), target_hidden], -1), self.fc.weight, self.fc.bias)
        return run_blocks(self.layers, x, self.rope()[places], mask, cache, slots)

    def train_hidden(self, target_hidden: Tensor, tokens: Tensor) -> Tensor:
        """Teacher forcing. target_hidden (N, P - 1 + T, dim) as LlamaGen.train_hidden gives it, tokens (N, T).

        Returns (N, T - 1, dim): entry t predicts the hidden state whose law is that of token t + 1.
        """
        prefix = self.cfg.cls_token_num
        ids = torch.cat([tokens.new_zeros(len(tokens), prefix - 1), tokens[:, :-1]], 1)  # token at place e + 1
        x = self.fc(torch.cat([self.embed_tokens(ids), target_hidden[:, :-1]], -1))
        return run_blocks(self.layers, x, self.rope()[: x.shape[1]][None])[:, prefix - 1 :]


def like_target(target: LlamaGen, ffn_hidden: int | None = None) -> Eagle:
    """An untrained drafter that fits a target; its token table starts as the target's."""
    c = target.cfg
    cfg = EagleConfig(
        c.dim, c.n_head, ffn_hidden or c.ffn_hidden, c.vocab_size, c.cls_token_num, c.block_size, c.rope_base
    )
    eagle = Eagle(cfg)
    with torch.no_grad():
        eagle.embed_tokens.weight.copy_(target.tok_embeddings.weight)
    return eagle
