"""The EAGLE drafter: one Transformer layer that predicts the target's next hidden state from (hidden state, next
token).

Entry e of its sequence pairs the target's hidden state at place e with the token at place e + 1, and its output stands
for the hidden state at place e + 1; the target's own head turns it into a law. There is no norm after the layer. The
published drafters differ in three things (reference README (11) to (17)). LlamaGen's turns an entry with the grid cell
of the token that it holds, has no norm before its layer, and sees the padding of the prompt; every prefix place counts
as token 0. Chameleon's turns it with the target's position of place e, has that norm, and does not see the padding.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from specbench.engine.ops import KVCache, linear
from specbench.models.language import Language
from specbench.models.llamagen import LlamaGen
from specbench.models.transformer import Block, BlockConfig, grid_rotary, init_weights, line_rotary, run_blocks
from specbench.models.unified import Unified


@dataclass(frozen=True)
class EagleConfig:
    """cls_token_num and block_size: places of the prefix and of the image, which size the grid; `line` positions have
    none (block_size 0)."""

    dim: int
    n_head: int
    ffn_hidden: int
    vocab_size: int
    cls_token_num: int
    block_size: int
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    n_kv_head: int | None = None
    input_norm: bool = False
    qk_norm: int = 0

    @property
    def line(self) -> bool:
        """Positions along the sequence, and no sight of padding; else cells of the image's grid."""
        return self.block_size == 0

    @property
    def block(self) -> BlockConfig:
        rotary = "halves" if self.line else "interleaved"
        return BlockConfig(
            self.dim,
            self.n_head,
            self.n_kv_head or self.n_head,
            self.ffn_hidden,
            self.norm_eps,
            rotary,  # type: ignore[arg-type]
            self.qk_norm,
        )

    def to_dict(self) -> dict:
        return asdict(self)


class Eagle(nn.Module):
    def __init__(self, cfg: EagleConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.dim)
        self.fc = nn.Linear(2 * cfg.dim, cfg.dim)
        self.layers = nn.ModuleList([Block(cfg.block, cfg.input_norm)])
        self._rope: Tensor | None = None
        init_weights(self)

    def rope(self, entries: int = 0) -> Tensor:
        """Rotary rows of at least `entries` entries. On the grid an entry turns with the cell of the token it holds:
        cls_token_num - 1 zero rows, then the cells; beyond the end, the last one."""
        c = self.cfg
        known = 0 if c.line else c.cls_token_num - 1 + c.block_size
        rows = max(entries, known)
        if self._rope is None or len(self._rope) < rows or self._rope.device != self.fc.weight.device:
            if c.line:
                table = line_rotary(rows, c.block.head_dim, c.rope_base)
            else:
                side = int(c.block_size**0.5)
                table = grid_rotary(side, c.block.head_dim, c.cls_token_num - 1, rows - known, c.rope_base)
            self._rope = table.to(self.fc.weight.device)
        return self._rope

    def turns(self, entries: Tensor, padding: Tensor) -> Tensor:
        """Rotary rows (R, n, head_dim / 2, 2) of entries (R, n) int64; padding (R, 1): places before the prompt."""
        return self.rope()[(entries - padding).clamp_min(0) if self.cfg.line else entries]

    def new_cache(self, rows: int, slots: int) -> KVCache:
        b = self.cfg.block
        return KVCache(len(self.layers), rows, b.n_kv_heads, slots, b.head_dim, self.fc.weight)

    def hidden(
        self, ids: Tensor, target_hidden: Tensor, turn: Tensor, mask: Tensor, cache: KVCache, slots: Tensor
    ) -> Tensor:
        """Predicted hidden states (rows, n, dim) of entries holding the vocabulary ids (rows, n) beside `target_hidden`
        (rows, n, dim), turned by `turn`; keys go to `slots`."""
        x = linear(torch.cat([self.embed_tokens(ids), target_hidden], -1), self.fc.weight, self.fc.bias)
        return run_blocks(self.layers, x, turn, mask, cache, slots)

    def train_hidden(self, target_hidden: Tensor, tokens: Tensor) -> Tensor:
        """Teacher forcing. target_hidden (N, P - 1 + T, dim) as LlamaGen.train_hidden gives it, tokens (N, T).

        Returns (N, T - 1, dim): entry t predicts the hidden state whose law is that of token t + 1.
        """
        prefix = self.cfg.cls_token_num
        ids = torch.cat([tokens.new_zeros(len(tokens), prefix - 1), tokens[:, :-1]], 1)  # token at place e + 1
        x = self.fc(torch.cat([self.embed_tokens(ids), target_hidden[:, :-1]], -1))
        return run_blocks(self.layers, x, self.rope()[: x.shape[1]][None])[:, prefix - 1 :]


def like_shape(target: Language, ffn_hidden: int | None = None) -> EagleConfig:
    """The configuration of a drafter that fits a target, built as the published ones of its family."""
    if isinstance(target, LlamaGen):
        c = target.cfg
        return EagleConfig(
            c.dim, c.n_head, ffn_hidden or c.ffn_hidden, c.vocab_size, c.prefix_length, c.block_size, c.rope_base
        )
    if not isinstance(target, Unified):
        raise TypeError(f"no EAGLE drafter is known for {type(target).__name__}")
    u = target.cfg
    return EagleConfig(
        dim=u.dim,
        n_head=u.n_head,
        ffn_hidden=ffn_hidden or u.ffn_hidden,
        vocab_size=u.vocab_size,
        cls_token_num=0,
        block_size=0,
        rope_base=u.rope_base,
        norm_eps=u.norm_eps,
        n_kv_head=u.n_kv_head,
        input_norm=True,
        qk_norm=u.qk_norm,
    )


def like_target(target: Language, ffn_hidden: int | None = None) -> Eagle:
    """An untrained drafter that fits a target; its token table starts as the target's."""
    eagle = Eagle(like_shape(target, ffn_hidden))
    with torch.no_grad():
        eagle.embed_tokens.weight.copy_(target.tok_embeddings.weight)
    return eagle
