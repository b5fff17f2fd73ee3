"""LlamaGen, text-conditional: a Llama over a prefix of caption features and a square grid of image tokens.

Tensor names are those of the official `t2i_XL_stage*.pt`. Facts: reference README (1) to (8).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench.engine.ops import KVCache, linear
from specbench.models.transformer import Block, BlockConfig, RMSNorm, grid_rotary, init_weights, run_blocks


@dataclass(frozen=True)
class LlamaGenConfig:
    dim: int = 1280
    n_layer: int = 36
    n_head: int = 20
    n_kv_head: int | None = None
    ffn_hidden: int = 3584
    vocab_size: int = 16384
    cls_token_num: int = 120
    caption_dim: int = 2048
    block_size: int = 256  # image tokens, a square number
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def side(self) -> int:
        return int(self.block_size**0.5)

    @property
    def block(self) -> BlockConfig:
        return BlockConfig(self.dim, self.n_head, self.n_kv_head or self.n_head, self.ffn_hidden, self.norm_eps)

    def to_dict(self) -> dict:
        return asdict(self)


class CaptionMLP(nn.Module):
    def __init__(self, caption_dim: int, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(caption_dim, dim, bias=False)
        self.fc2 = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(F.gelu(linear(x, self.fc1.weight), approximate="tanh"), self.fc2.weight)


class CaptionEmbedder(nn.Module):
    def __init__(self, caption_dim: int, dim: int, tokens: int) -> None:
        super().__init__()
        self.cap_proj = CaptionMLP(caption_dim, dim)
        self.uncond_embedding = nn.Parameter(torch.randn(tokens, caption_dim) / caption_dim**0.5)


@dataclass
class Conditioning:
    """Caption features of N prompts: `features` (N, P, caption_dim), left-padded, and `valid` (N, P) bool."""

    features: Tensor
    valid: Tensor

    def __len__(self) -> int:
        return len(self.features)

    def rows(self, start: int, stop: int) -> Conditioning:
        return Conditioning(self.features[start:stop], self.valid[start:stop])


class LlamaGen(nn.Module):
    def __init__(self, cfg: LlamaGenConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.cls_embedding = CaptionEmbedder(cfg.caption_dim, cfg.dim, cfg.cls_token_num)
        self.tok_embeddings = nn.Embedding(cfg.vocab_size, cfg.dim)
        self.layers = nn.ModuleList(Block(cfg.block) for _ in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.output = nn.Linear(cfg.dim, cfg.vocab_size, bias=False)
        self._rope: Tensor | None = None
        init_weights(self)

    # --- what a decoding session needs; rows are conditional ones, then (with guidance) as many unconditional ---------

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., vocab_size) of hidden states after the final norm."""
        return linear(hidden, self.output.weight)

    def rope(self, extra: int = 0) -> Tensor:
        """Rotary rows of the prefix, the image tokens, and at least `extra` places beyond the end."""
        rows = self.cfg.cls_token_num + self.cfg.block_size + extra
        if self._rope is None or len(self._rope) < rows or self._rope.device != self.output.weight.device:
            table = grid_rotary(
                self.cfg.side, self.cfg.block.head_dim, self.cfg.cls_token_num, extra, self.cfg.rope_base
            )
            self._rope = table.to(self.output.weight.device)
        return self._rope

    def condition(self, cond: Conditioning, guided: bool) -> tuple[Tensor, Tensor]:
        """Prefix embeddings (rows, P, dim) and validity (rows, P). Guidance appends the unconditional rows, under the
        same padding mask as the conditional ones (reference README (4))."""
        features, valid = cond.features, cond.valid
        if guided:
            features = torch.cat([features, self.cls_embedding.uncond_embedding.expand_as(features).to(features.dtype)])
            valid = torch.cat([valid, valid])
        return self.cls_embedding.cap_proj(features), valid

    def new_cache(self, rows: int, slots: int) -> KVCache:
        b = self.cfg.block
        return KVCache(self.cfg.n_layer, rows, b.n_kv_heads, slots, b.head_dim, self.output.weight)

    def hidden(self, x: Tensor, places: Tensor, mask: Tensor, cache: KVCache, slots: Tensor) -> Tensor:
        """Hidden states after the final norm, (rows, n, dim), of embeddings x at sequence `places` (rows, n); keys go
        to `slots`."""
        y = run_blocks(self.layers, x, self.rope()[places], mask, cache, slots)
        return self.norm(y)

    def open(self, conditioning: Conditioning, rows: int, guided: bool, nodes: int) -> Session:
        if len(conditioning) != rows:
            raise ValueError(f"{len(conditioning)} prompts for {rows} rows")
        return Session(self, conditioning, guided, nodes)

    # --- training -----------------------------------------------------------------------------------------------------

    def train_hidden(self, tokens: Tensor, features: Tensor, drop: Tensor) -> Tensor:
        """Teacher forcing: hidden states (N, P - 1 + T, dim) after the final norm over prefix and tokens[:-1].

        tokens (N, T); features (N, P, caption_dim), all places valid; `drop` (N,) bool replaces a caption by the
        unconditional embedding. Entry P - 1 + t predicts token t.
        """
        features = torch.where(drop[:, None, None], self.cls_embedding.uncond_embedding.to(features.dtype), features)
        x = torch.cat([self.cls_embedding.cap_proj(features), self.tok_embeddings(tokens[:, :-1])], 1)
        rope = self.rope()[: x.shape[1]][None]
        return self.norm(run_blocks(self.layers, x, rope))

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        logits = F.linear(hidden[:, self.cfg.cls_token_num - 1 :], self.output.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten().long())


class Session:
    """One prefilled batch: caches, prefix, and where everything stands.

    A sequence is the prefix (P places) followed by the image tokens; token j is place P + j. All but the prefix's last
    place are prefilled, so that the first draft's root is that last place and every step has the same form. With c
    committed tokens the root is place P - 1 + c, and draft node m of a step is kept in slot P - 1 + c + m until the
    accepted path is compacted.
    """

    def __init__(self, model: LlamaGen, conditioning: Conditioning, guided: bool, nodes: int) -> None:
        self.model, self.guided = model, guided
        self.length, self.width, self.vocab_size = model.cfg.block_size, model.cfg.side, model.cfg.vocab_size
        self.prefix_length = model.cfg.cls_token_num
        self.prefix, valid = model.condition(conditioning, guided)
        rows, device = len(self.prefix), self.prefix.device
        slots = self.prefix_length + self.length + 2 * nodes
        model.rope(2 * nodes)
        self.cache = model.new_cache(rows, slots)
        self.keys = torch.arange(slots, device=device)
        self.usable = torch.cat([valid, valid.new_ones(rows, slots - self.prefix_length)], 1)  # (R, slots)
        before = torch.arange(self.prefix_length - 1, device=device).expand(rows, -1)
        self.prefix_hidden = self.feed(self.prefix[:, :-1], before, before, self.up_to(before))

    def both(self, x: Tensor) -> Tensor:
        """Rows of a batch (B, ...) for the conditional and, with guidance, the unconditional half."""
        return torch.cat([x, x]) if self.guided else x

    def up_to(self, places: Tensor) -> Tensor:
        """Mask (R, 1, n, slots): every usable slot up to and including the own place (R, n)."""
        own = places.unsqueeze(-1)
        return (((self.keys <= own) & self.usable.unsqueeze(1)) | (self.keys == own)).unsqueeze(1)

    def embed(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Inputs (R, n, dim) of sequence places (B, n): prefix entries where a place lies in the prefix, else tokens
        (B, n)."""
        x = self.both(self.model.tok_embeddings(tokens))
        index = self.both(places.clamp_max(self.prefix_length - 1))
        given = self.prefix.gather(1, index.unsqueeze(-1).expand_as(x))
        return torch.where(self.both(places < self.prefix_length).unsqueeze(-1), given, x)

    def feed(self, x: Tensor, places: Tensor, slots: Tensor, mask: Tensor) -> Tensor:
        """Hidden states (R, n, dim) of inputs x; places and slots (R, n), mask (R, 1, n, slots)."""
        return self.model.hidden(x, places, mask, self.cache, slots)

    def feed_chain(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Logits (R, n, V) of consecutive tokens (B, n) at `places` (B, n), each seeing all before it."""
        at = self.both(places)
        return self.model.head(self.feed(self.embed(tokens, places), at, at, self.up_to(at)))

    def forward(self, tokens: Tensor, tree: Any, history: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (R, M, V) and hidden states (R, M, dim) of a draft tree's nodes."""
        nodes = tokens.shape[1]
        root = count[:, None] + (self.prefix_length - 1)  # (B, 1)
        places = root + tree.depth
        x = self.embed(tokens, places)
        root, places = self.both(root), self.both(places)
        slots = root + torch.arange(nodes, device=root.device)
        offset = self.keys - root  # (R, slots): a key's node number, negative for committed places
        shape = (len(root), nodes, len(self.keys))
        among = tree.ancestors.expand(len(count), -1, -1)
        among = self.both(among).gather(2, offset.clamp(0, nodes - 1).unsqueeze(1).expand(shape)) & (
            offset < nodes
        ).unsqueeze(1)
        mask = torch.where((offset < 0).unsqueeze(1), self.usable.unsqueeze(1), among)
        hidden = self.feed(x, places, slots, mask.unsqueeze(1))
        return self.model.head(hidden), hidden

    def commit(self, verdict: Any, tree: Any, count: Tensor) -> None:
        if tree.is_chain:  # a chain's accepted path is where it belongs
            return
        root = count[:, None] + (self.prefix_length - 1)
        lane = torch.arange(1, verdict.path.shape[1] + 1, device=root.device).expand_as(verdict.path)
        kept = lane <= verdict.length[:, None]
        self.cache.keep(self.both(root + torch.where(kept, verdict.path, lane)), self.both(root + lane))
