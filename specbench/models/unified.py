"""Targets with one vocabulary for text and images: Chameleon (Lumina-mGPT, Anole) and Emu3.

The prefix is a prompt's token ids, padded on the left; image tokens follow in raster order with the grammar's own
tokens (new lines, the image's end) between and after them. Of the head only the rows of image tokens are kept, since
the grammar forbids every other: a decode step reads less, and its distribution is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.errors import UsageError
from specbench.models import naming, official
from specbench.models.language import Grammar, Language, Prefix
from specbench.models.text_official import Prompt, left_pad_ids
from specbench.models.transformer import BlockConfig, init_weights, line_rotary


@dataclass(frozen=True)
class UnifiedConfig:
    """A Llama over one vocabulary. qk_norm: rows of the LayerNorm on queries and keys (0: none)."""

    dim: int
    n_layer: int
    n_head: int
    n_kv_head: int
    ffn_hidden: int
    vocab_size: int
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm: int = 0
    post_norm: bool = False

    @property
    def block(self) -> BlockConfig:
        return BlockConfig(
            self.dim,
            self.n_head,
            self.n_kv_head,
            self.ffn_hidden,
            self.norm_eps,
            "halves",
            self.qk_norm,
            self.post_norm,
        )

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class ImageTokens:
    """The tokens of an image: ids (V,) int64 names them in the vocabulary (codes first, then the grammar's own), and
    `width` is the positions in a row."""

    ids: Tensor
    grammar: Grammar
    width: int


def image_tokens(codes: Tensor, rows: int, columns: int, new_line: int | None, tail: Sequence[int]) -> ImageTokens:
    """An image of rows x columns codes whose vocabulary ids are codes (C,). With new_line, that id ends every row, the
    last one too; the ids of `tail` follow the image (reference README (23), (28))."""
    count = len(codes)
    own = ([] if new_line is None else [new_line]) + list(tail)
    row = [-1] * columns + ([] if new_line is None else [count])
    behind = range(count + len(own) - len(tail), count + len(own))
    forced = torch.tensor(row * rows + list(behind))
    ids = torch.cat([codes.cpu().long(), torch.tensor(own, dtype=torch.int64)])
    return ImageTokens(ids, Grammar(count, forced), len(row))


@dataclass
class Prompts:
    """Token ids of N prompts, padded on the left: ids (N, P) int64 and valid (N, P) bool, and the same of the
    unconditional (or negative) prompts."""

    ids: Tensor
    valid: Tensor
    no_ids: Tensor
    no_valid: Tensor

    def __len__(self) -> int:
        return len(self.ids)


class Unified(Language):
    def __init__(self, cfg: UnifiedConfig, image: ImageTokens) -> None:
        super().__init__()
        self.cfg, self.image = cfg, image
        self.grammar, self.length, self.width = image.grammar, len(image.grammar), image.width
        self._ids = image.ids
        self._rope: Tensor | None = None
        self._build(cfg.block, cfg.n_layer, cfg.vocab_size, len(image.ids))
        init_weights(self)

    def ids(self, tokens: Tensor) -> Tensor:
        if self._ids.device != tokens.device:
            self._ids = self._ids.to(tokens.device)
        return self._ids[tokens]

    def reserve(self, positions: int) -> None:
        device = self.output.weight.device
        if self._rope is None or len(self._rope) < positions or self._rope.device != device:
            self._rope = line_rotary(positions, self.block.head_dim, self.cfg.rope_base).to(device)

    def rope_at(self, positions: Tensor, padding: Tensor) -> Tensor:
        """Positions count from the first valid one."""
        assert self._rope is not None, "reserve() comes first"
        return self._rope[(positions - padding).clamp_min(0)]

    def condition(self, conditioning: Prompts, guided: bool) -> Prefix:
        ids, valid = conditioning.ids, conditioning.valid
        if guided:
            ids, valid = torch.cat([ids, conditioning.no_ids]), torch.cat([valid, conditioning.no_valid])
        return Prefix(self.tok_embeddings(ids), valid, ids)


def padded(given: Sequence[Prompt], length: int, pad: int, device: torch.device) -> Prompts:
    """Prompts as token ids, all padded to `length` positions: independent of the rest of the batch. Raises UsageError
    for a longer one."""
    ids, valid = left_pad_ids([p.conditional for p in given], length, pad)
    no_ids, no_valid = left_pad_ids([p.unconditional for p in given], length, pad)
    return Prompts(ids.to(device), valid.to(device), no_ids.to(device), no_valid.to(device))


def from_hugging_face(c: Mapping[str, Any], qk_norm: int) -> UnifiedConfig:
    """From transformers' names; qk_norm: rows of the norms of queries and keys, which only the tensors give. Raises
    KeyError, TypeError or ValueError for what does not describe a language model."""
    rotary = c.get("rope_parameters") or {}
    return UnifiedConfig(
        dim=c["hidden_size"],
        n_layer=c["num_hidden_layers"],
        n_head=c["num_attention_heads"],
        n_kv_head=c.get("num_key_value_heads") or c["num_attention_heads"],
        ffn_hidden=c["intermediate_size"],
        vocab_size=c["vocab_size"],
        rope_base=float(c["rope_theta"] if "rope_theta" in c else rotary["rope_theta"]),
        norm_eps=c["rms_norm_eps"],
        qk_norm=qk_norm,
        post_norm=c.get("swin_norm", False),
    )


def configured(folder: Path, source: official.CheckpointSource) -> UnifiedConfig:
    """From the config.json of a Hugging Face folder: a language model's own, or a complete Chameleon's or Emu3's."""
    content = official.config(folder)
    norm = next((i for n, i in source.tensors.items() if n.endswith("layers.0.self_attn.q_norm.weight")), None)
    try:
        return from_hugging_face(content.get("text_config", content), norm.shape[0] if norm else 0)
    except (KeyError, TypeError, ValueError) as e:
        raise UsageError(f"{folder / 'config.json'} does not describe a language model ({e}); fetch it again") from e


def read(folder: Path, image: ImageTokens, device: torch.device, dtype: torch.dtype) -> Unified:
    """A model from a Hugging Face folder; of its head the rows of image tokens."""
    source = official.open_source(folder)
    cfg = configured(folder, source)
    if int(image.ids.max()) >= cfg.vocab_size:
        raise UsageError(
            f"the tokenizer names id {int(image.ids.max())}, the model in {folder} has {cfg.vocab_size} ids; fetch both"
            " of one release"
        )
    table, ignored = naming.for_language(source.tensors, cfg.n_layer, cfg.block, image.ids, str(folder))
    return official.load(lambda: Unified(cfg, image), source, table, device, dtype, ignored)
