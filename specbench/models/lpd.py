"""LPD (Zhang et al. 2025, arXiv 2507.01957): groups of tokens in any order, whose queries see each other.

A pass reads the tokens of the last group and one mask token (a query) per token of the next group, all with learned
position embeddings. A token attends to all existing tokens. A query attends to these and to the queries of its group;
its keys and values are in the slot of its position until the token replaces them.

Sizes, names and masks follow mit-han-lab/lpd, models/lpd.py, mask.py and block.py. The blocks are MAR's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench.engine.masks import TreeMask
from specbench.engine.ops import KVCache
from specbench.models.language import Language, LanguageSession, Prefix
from specbench.models.llamagen import ClassConditioning, LlamaGenConfig
from specbench.models.mar import MarBlock
from specbench.models.transformer import BlockConfig


class LPD(Language):
    """Class-conditional. In the shape, `ffn_hidden` is the width of the feed-forward layers, 4 * dim in the published
    models. Position embedding 0 is for the class."""

    def __init__(self, cfg: LlamaGenConfig) -> None:
        super().__init__()
        self.cfg, dim, eps = cfg, cfg.dim, cfg.norm_eps
        self.length, self.width, self.vocab_size = cfg.block_size, cfg.side, cfg.vocab_size
        self.block = BlockConfig(dim, cfg.n_head, cfg.n_head, cfg.ffn_hidden, eps)
        self.class_emb = nn.Embedding(cfg.num_classes, dim)
        self.fake_latent = nn.Parameter(torch.empty(1, dim))
        self.tok_embeddings = nn.Embedding(cfg.vocab_size, dim)
        self.mask_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, cfg.block_size + 1, dim))
        self.z_proj_ln = nn.LayerNorm(dim, eps=1e-6)
        ratio = cfg.ffn_hidden / dim
        self.layers = nn.ModuleList(MarBlock(dim, cfg.n_head, ratio, eps) for _ in range(cfg.n_layer))
        self.norm = nn.LayerNorm(dim, eps=eps)  # type: ignore[assignment]
        self.head_hidden = None
        self.output = nn.Linear(dim, cfg.vocab_size, bias=False)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        for parameter in (self.fake_latent, self.mask_token, self.pos_embed):
            nn.init.normal_(parameter, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def condition(self, conditioning: ClassConditioning, guided: bool) -> Prefix:
        """A padding position, then the class."""
        x = self.class_emb(conditioning.classes)
        if guided:
            x = torch.cat([x, self.fake_latent.expand_as(x)])
        valid = torch.tensor([False, True], device=x.device).repeat(len(x), 1)
        return Prefix(F.pad(x.unsqueeze(1), (0, 0, 1, 0)), valid, torch.zeros_like(valid, dtype=torch.int64))

    def rope(self, positions: int, prefix: int) -> Tensor:
        """Position embeddings (positions, dim), which are added to the inputs instead of a rotation."""
        index = torch.arange(positions, device=self.pos_embed.device) - (prefix - 1)
        return self.pos_embed[0, index.clamp(0, self.length)]

    def hidden(
        self, x: Tensor, rope: Tensor, mask: Tensor | TreeMask, cache: KVCache | None, slots: Tensor | None
    ) -> Tensor:
        assert cache is not None
        assert slots is not None
        if isinstance(mask, TreeMask):
            mask = mask.bias(cache.read(mask, self.block.n_heads), x.dtype)
        x = self.z_proj_ln(x + rope)
        for i, block in enumerate(self.layers):
            x = block(x, attend=partial(cache.attend, i, slots, mask=mask))
        y: Tensor = self.norm(x)
        return y

    def hidden_at_positions(
        self, session: LanguageSession, x: Tensor, rope: Tensor, mask: TreeMask, slots: Tensor, parallel: Any
    ) -> Tensor:
        targets, asks = parallel.next_positions, parallel.extends
        count = targets.shape[1]
        # an unused query is stored in a slot that is never attended to
        query_slots = torch.where(asks, targets, self.length + torch.arange(count, device=x.device))
        group = torch.zeros_like(mask.among[:, :1]).scatter(2, query_slots.unsqueeze(1) + 1, asks.unsqueeze(1))
        mask_with_queries = TreeMask(mask.start, mask.root, torch.cat([mask.among, mask.among | group], 1))
        before = session.prefix_length
        query_rope = self.rope_at(session.rope, session.both(targets + before), session.padding)
        x = torch.cat([x, self.mask_token.expand(len(x), count, -1)], 1)
        slots = torch.cat([slots, session.both(query_slots + before)], 1)
        return self.hidden(x, torch.cat([rope, query_rope], 1), mask_with_queries, session.cache, slots)[:, count:]
