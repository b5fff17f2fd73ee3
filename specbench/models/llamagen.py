"""LlamaGen: a Llama over a prefix (caption features, or one class) and a square grid of image tokens.

Tensor names are as in the official `t2i_XL_stage*.pt` and `c2i_*.pt`. Facts: reference README (1) to (9).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench.engine.ops import gelu_tanh, linear
from specbench.models.language import Language, Prefix
from specbench.models.transformer import BlockConfig, grid_rotary, init_weights


@dataclass(frozen=True)
class LlamaGenConfig:
    """With num_classes > 0 the prefix is the embedding of one class, and cls_token_num is 1."""

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
    num_classes: int = 0

    @property
    def side(self) -> int:
        return int(self.block_size**0.5)

    @property
    def prefix_length(self) -> int:
        """Positions of the prefix in a session, which pads it to at least two."""
        return max(2, self.cls_token_num)

    @property
    def block(self) -> BlockConfig:
        return BlockConfig(self.dim, self.n_head, self.n_kv_head or self.n_head, self.ffn_hidden, self.norm_eps)


class CaptionMLP(nn.Module):
    def __init__(self, caption_dim: int, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(caption_dim, dim, bias=False)
        self.fc2 = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(gelu_tanh(linear(x, self.fc1.weight)), self.fc2.weight)


class CaptionEmbedder(nn.Module):
    def __init__(self, caption_dim: int, dim: int, tokens: int) -> None:
        super().__init__()
        self.cap_proj = CaptionMLP(caption_dim, dim)
        self.uncond_embedding = nn.Parameter(torch.empty(tokens, caption_dim))
        nn.init.normal_(self.uncond_embedding, std=caption_dim**-0.5)


class LabelEmbedder(nn.Module):
    """The last row of the table means no class."""

    def __init__(self, classes: int, dim: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(classes + 1, dim)


@dataclass
class Conditioning:
    """Caption features of N prompts: `features` (N, P, caption_dim), left-padded, and `valid` (N, P) bool."""

    features: Tensor
    valid: Tensor

    def __len__(self) -> int:
        return len(self.features)

    def rows(self, start: int, stop: int) -> Conditioning:
        return Conditioning(self.features[start:stop], self.valid[start:stop])


@dataclass
class ClassConditioning:
    """Classes (N,) int64."""

    classes: Tensor

    def __len__(self) -> int:
        return len(self.classes)


class LlamaGen(Language):
    def __init__(self, cfg: LlamaGenConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.length, self.width = cfg.block_size, cfg.side
        self.cls_embedding: CaptionEmbedder | LabelEmbedder
        if cfg.num_classes:
            self.cls_embedding = LabelEmbedder(cfg.num_classes, cfg.dim)
        else:
            self.cls_embedding = CaptionEmbedder(cfg.caption_dim, cfg.dim, cfg.cls_token_num)
        self._build(cfg.block, cfg.n_layer, cfg.vocab_size, cfg.vocab_size)
        init_weights(self)

    def rope(self, positions: int, prefix: int) -> Tensor:
        """The rows do not depend on padding, because positions of the prefix are not rotated."""
        c = self.cfg
        extra = max(0, positions - c.prefix_length - c.block_size)
        return grid_rotary(c.side, self.block.head_dim, c.prefix_length, extra, c.rope_base)

    def condition(self, conditioning: Conditioning | ClassConditioning, guided: bool) -> Prefix:
        """Guidance appends unconditional rows: with the padding mask of the conditional rows (reference README (4)), or
        with the class that means no class."""
        if isinstance(conditioning, ClassConditioning):
            assert isinstance(self.cls_embedding, LabelEmbedder)
            classes = conditioning.classes[:, None]
            if guided:
                classes = torch.cat([classes, torch.full_like(classes, self.cfg.num_classes)])
            # add a session's padding here, so that positions are the same without a session
            x = F.pad(self.cls_embedding.embedding_table(classes), (0, 0, 1, 0))
            valid = F.pad(torch.ones_like(classes, dtype=torch.bool), (1, 0))
        else:
            assert isinstance(self.cls_embedding, CaptionEmbedder)
            features, valid = conditioning.features, conditioning.valid
            if guided:
                none = self.cls_embedding.uncond_embedding.expand_as(features).to(features.dtype)
                features, valid = torch.cat([features, none]), torch.cat([valid, valid])
            x = self.cls_embedding.cap_proj(features)
        return Prefix(x, valid, torch.zeros_like(valid, dtype=torch.int64))
