"""ARPG (Li et al. 2025, arXiv 2503.10568): tokens in any order, any number of them in a pass.

The first half of the layers reads the class and the existing tokens, at their cells, and gives one set of keys and
values. The second half attends to these with queries: a learned vector, rotated to the cell whose token is requested.
Queries do not see each other, so the tokens of a pass are independent given the earlier tokens. The model is trained
with causal masks in random orders. When it samples, a token sees all existing tokens, including the tokens of its own
pass.

Sizes, names and the sampler follow hp-l33/ARPG, models/arpg.py. Embeddings, rotary table and blocks are LlamaGen's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench.engine.graph import LayerCache
from specbench.engine.masks import TreeMask
from specbench.engine.ops import KVCache, linear
from specbench.models.language import LanguageSession, Prefix
from specbench.models.llamagen import LlamaGen, LlamaGenConfig
from specbench.models.transformer import Block, QueryAttention, RMSNorm, init_weights, rope_factors, rotate, run_blocks


class ARPG(LlamaGen):
    """n_layer counts both halves. The shared keys and values are one more layer of the cache."""

    query_layers: nn.ModuleList

    def __init__(self, cfg: LlamaGenConfig) -> None:
        super().__init__(replace(cfg, n_layer=cfg.n_layer // 2))
        self.cfg = cfg
        b = self.block
        self.query = nn.Parameter(torch.empty(b.dim))
        self.shared_norm = RMSNorm(b.dim, b.norm_eps)
        self.wkv = nn.Linear(b.dim, 2 * b.n_kv_heads * b.head_dim, bias=False)
        self.query_layers = nn.ModuleList(Block(b, attention=QueryAttention) for _ in range(cfg.n_layer // 2))
        nn.init.normal_(self.query, std=0.02)
        init_weights(self.query_layers)
        init_weights(self.wkv)

    @property
    def pass_weights(self) -> list[nn.Module]:
        return [*super().pass_weights, self.shared_norm, self.wkv, self.query_layers]

    @property
    def cache_layers(self) -> int:
        return len(self.layers) + 1

    def shared(self, content: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (R, heads, n, head_dim) of the first half's outputs (R, n, dim) at `rope`'s positions."""
        keys_values = linear(self.shared_norm(content), self.wkv.weight)
        k, v = keys_values.unflatten(-1, (2, self.block.n_kv_heads, -1)).unbind(2)
        rotary = self.block.rotary
        return rotate(k, rope_factors(rope, rotary), rotary).transpose(1, 2), v.transpose(1, 2)

    def attend_queries(self, rope: Tensor, mask: Tensor | None, cache: KVCache, layer: int) -> Tensor:
        """Hidden states (R, n, dim) after the final norm, for queries at the positions of `rope`."""
        x = self.query.expand(*rope.shape[:2], -1)
        out = run_blocks(self.query_layers, x, rope, mask, cache, shared_layer=layer)
        return self.norm(out)

    def hidden_at_positions(
        self, session: LanguageSession, x: Tensor, rope: Tensor, mask: TreeMask, slots: Tensor, parallel: Any
    ) -> Tensor:
        cache, layer = session.cache, len(self.layers)
        bias = mask.bias(cache.read(mask, self.block.n_heads), x.dtype)
        content = run_blocks(self.layers, x, rope, bias, cache, slots)
        cache.write(layer, slots, *self.shared(content, rope))
        targets = session.both(parallel.next_positions + session.prefix_length)
        return self.attend_queries(self.rope_at(session.rope, targets, session.padding), bias, cache, layer)

    def in_order(self, prefix: Prefix, tokens: Tensor, order: Tensor) -> Tensor:
        """Hidden states (N, T, dim) that predict the tokens (N, T) at the positions `order` (N, T); each is conditioned
        on the tokens before it in the order. One causal pass, as in training, with gradients if they are enabled."""
        before = len(prefix)
        table = self.reserved(before + tokens.shape[1], before)
        x = torch.cat([prefix.inputs[:, -1:], self.tok_embeddings(tokens.gather(1, order)[:, :-1])], 1)
        rope = table[F.pad(order[:, :-1] + before, (1, 0), value=before - 1)]
        keys, values = self.shared(run_blocks(self.layers, x, rope), rope)
        return self.attend_queries(table[order + before], None, LayerCache(keys, values), 0)
