"""The text encoder of the embedded worlds: a caption -> a fixed number of feature vectors. It replaces LlamaGen's
Flan-T5."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specbench.data import worlds

PAD, UNKNOWN = 0, 1


@dataclass(frozen=True)
class TextConfig:
    vocabulary: tuple[str, ...] = ()
    dim: int = 192
    layers: int = 2
    heads: int = 4
    max_words: int = 48
    tokens: int = 8  # feature vectors per caption
    classes: int = 1  # outputs of the reader, which is only needed in training


class TextEncoder(nn.Module):
    """Words -> features (N, tokens, dim). Trained so that a linear reader of their *mean* recovers the attributes at
    every position of the image.

    It is the mean because LlamaGen's prefix keys vanish (`transformer.grid_rotary`): an image token attends evenly to
    the prefix and only receives a mean of values. Attributes are given by position because an image token knows its
    position: it then finds its object with one lookup instead of two.
    """

    def __init__(self, cfg: TextConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.ids = {w: i + 2 for i, w in enumerate(cfg.vocabulary)}
        self.words = nn.Embedding(len(cfg.vocabulary) + 2, cfg.dim)
        self.positions = nn.Parameter(torch.empty(cfg.max_words, cfg.dim))
        nn.init.normal_(self.positions, std=0.02)
        self.queries = nn.Parameter(torch.empty(cfg.tokens, cfg.dim))
        nn.init.normal_(self.queries, std=0.02)
        layer = nn.TransformerEncoderLayer(
            cfg.dim, cfg.heads, 4 * cfg.dim, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, cfg.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(cfg.dim)
        self.reader = nn.Linear(cfg.dim, cfg.classes)

    def unread(self, caption: str) -> int:
        """The number of words at the end of a caption that are cut off."""
        return max(0, len(worlds.words(caption)) - self.cfg.max_words)

    def tokenize(self, captions: list[str]) -> Tensor:
        """Word ids (N, max_words) int64. All unknown words have the same id; longer captions are cut off."""
        out = torch.full((len(captions), self.cfg.max_words), PAD)
        for row, caption in enumerate(captions):
            ids = [self.ids.get(w, UNKNOWN) for w in worlds.words(caption)][: self.cfg.max_words]
            out[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        return out

    def forward(self, ids: Tensor) -> Tensor:
        """Features (N, tokens, dim) of word ids (N, max_words): learned queries read the words."""
        x = self.words(ids) + self.positions
        queries = self.queries.expand(len(ids), -1, -1)
        hidden = torch.cat([ids == PAD, ids.new_zeros(len(ids), self.cfg.tokens, dtype=torch.bool)], 1)
        y = self.layers(torch.cat([x, queries], 1), src_key_padding_mask=hidden)
        return self.norm(y[:, self.cfg.max_words :])
