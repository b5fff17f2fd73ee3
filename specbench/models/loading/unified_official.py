"""Targets with one vocabulary for text and images, from Hugging Face folders, and their prompts as token ids.

Sources of the facts on prompts: the reference README and README_3, by their numbers, prompt_formats.json and
prompt_formats_3.json. Fixed wordings (an instruction, a quality suffix, a negative prompt) are settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specbench.config.run_config import RunConfig
from specbench.data.base import Item
from specbench.errors import UsageError
from specbench.models.loading import naming, official
from specbench.models.loading.bundle import RealModel, check_sizes
from specbench.models.loading.official import CheckpointSource
from specbench.models.pixels import truncated
from specbench.models.unified import ImageTokens, Prompts, Unified, UnifiedConfig

EMBEDDING = "model.embed_tokens.weight"

#: Text -> token ids, without special tokens.
Encode = Callable[[str], list[int]]


class Prompt(NamedTuple):
    """Token ids before the first image token, with the prompt and without it (for guidance)."""

    conditional: list[int]
    unconditional: list[int]


def check_lengths(lengths: Sequence[tuple[str, int]], most: int) -> None:
    """Raises UsageError for prompts of more than `most` tokens; lengths: (id, number of tokens) of all prompts."""
    if longer := [(name, count) for name, count in lengths if count > most]:
        name, count = longer[0]
        others = f", and {len(longer) - 1} others are too long" if len(longer) > 1 else ""
        raise UsageError(
            f"prompt {name} has {count} tokens and prompt_length={most} allows {most}{others}: give"
            f" prompt_length={max(count for _, count in longer)} or more, enough for all {len(lengths)} prompts"
        )


def left_pad_ids(rows: Sequence[Sequence[int]], length: int, pad: int) -> tuple[Tensor, Tensor]:
    """N rows of token ids -> ids (N, length) int64, padded on the left with `pad`, and valid (N, length) bool.

    Raises UsageError for a longer row.
    """
    check_lengths([(str(i), len(row)) for i, row in enumerate(rows)], length)
    ids = torch.full((len(rows), length), pad, dtype=torch.int64)
    valid = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        if row:
            ids[i, -len(row) :], valid[i, -len(row) :] = torch.tensor(row), True
    return ids, valid


def padded(prompts: Sequence[Prompt], length: int, pad: int, device: torch.device) -> Prompts:
    """Prompts, padded on the left to `length` positions with the id `pad`, so that they do not depend on each other."""
    halves = [[p.conditional for p in prompts], [p.unconditional for p in prompts]]
    pairs = [left_pad_ids(rows, length, pad) for rows in halves]
    return Prompts(*(tensor.to(device) for pair in pairs for tensor in pair))


@dataclass(frozen=True)
class Prompting:
    """How a model reads a prompt, by the parameters that its file declares: the padded length in tokens, the texts
    around the prompt, and the unconditional context."""

    prompt_length: int
    instruction: str = ""
    negative: str = ""
    suffix: str = ""
    unconditional: str = "header"


class UnifiedModel(RealModel):
    """A target with one vocabulary. A subclass defines the format of a prompt; its `read_text` sets what this needs and
    `pad`, and its `read_networks` sets `image`, `resolution`, `target` and `tokenizer` (whose `codebook()` gives the
    code vectors)."""

    skips_padding = Unified.skips_padding  # so that prompt_length= changes no image
    target: Unified
    image: ImageTokens
    pad: int  # id of the padding before a prompt
    tokenizer: Any

    def __init__(self, cfg: RunConfig, device: torch.device, dtype: torch.dtype, networks: bool = True) -> None:
        """networks: false for prompts alone."""
        super().__init__(cfg, device, dtype)
        self.prompting = cfg.read(Prompting)
        self.read_text(cfg)
        if networks:
            self.read_networks()

    @classmethod
    def check_prompts(cls, cfg: RunConfig, items: Sequence[Item]) -> None:
        """Raises UsageError for prompts that are too long. Reads the files of the text's tokenizer, but no weights."""
        model, first = cls(cfg, torch.device("meta"), torch.float32, networks=False), dict[str, Item]()
        for item in items:
            first.setdefault(item.prompt, item)
        prompts = [(item.id or str(item.index), model.prompt(item.prompt)) for item in first.values()]
        check_lengths([(name, max(map(len, prompt))) for name, prompt in prompts], model.prompting.prompt_length)

    def read_text(self, cfg: RunConfig) -> None:
        raise NotImplementedError

    def read_networks(self) -> None:
        raise NotImplementedError

    def prompt(self, text: str) -> Prompt:
        raise NotImplementedError

    def encode(self, prompts: list[str]) -> Prompts:
        """All prompts are padded to `prompt_length` positions, so they do not depend on the rest of the batch."""
        return padded([self.prompt(text) for text in prompts], self.prompting.prompt_length, self.pad, self.device)

    def decode_image(self, codes: Tensor) -> np.ndarray:
        return truncated(self.tokenizer.decode(codes))

    def loaded_target(self, shape: UnifiedConfig) -> Unified:
        """The target of the folder, which must have this shape; with random weights, a target of this shape."""
        if self.folder is None:
            return self.random(lambda: Unified(shape, self.image), 1, self.dtype)
        return read(self.part("target"), self.image, self.device, self.dtype, (self.name, shape))

    def smaller(self) -> Unified:
        c = self.target.cfg
        return Unified(replace(c, n_layer=max(1, c.n_layer // 4)), self.image)

    def read_smaller(self, path: Path) -> Unified:
        return read(path, self.image, self.device, self.dtype)

    def codebook(self) -> Tensor:
        """The stored code vectors (reference README (18)); NaN for the tokens of the image grammar."""
        codes = self.tokenizer.codebook()
        undefined = codes.new_full((self.target.vocab_size - len(codes), codes.shape[1]), torch.nan)
        return torch.cat([codes, undefined])


def from_hugging_face(c: Mapping[str, Any], qk_norm: int, qkv_bias: bool = False) -> UnifiedConfig:
    """The configuration from transformers' names. The tensors must give qk_norm (norms on queries and keys) and
    qkv_bias (whether queries, keys and values have biases). Raises KeyError, TypeError or ValueError if it does not
    describe a language model."""
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
        norms="after" if c.get("swin_norm", False) else "before",
        qkv_bias=qkv_bias,
    )


def described(folder: Path, configured: Callable[[Mapping[str, Any]], UnifiedConfig]) -> UnifiedConfig:
    """The result of `configured` for a folder's config.json. Raises UsageError if it does not describe a language
    model."""
    try:
        return configured(official.config(folder))
    except (KeyError, TypeError, ValueError) as e:
        raise UsageError(f"{folder / 'config.json'} does not describe a language model ({e}); fetch it again") from e


def configured(content: Mapping[str, Any], source: CheckpointSource) -> UnifiedConfig:
    """The language model of a config.json: of a language model, or of a complete Chameleon or Emu3. The tensors give
    the norms of queries and keys and the biases."""
    first = {n.partition("layers.0.")[2]: i.shape for n, i in source.tensors.items() if "layers.0." in n}
    rows = first.get("self_attn.q_norm.weight", (0,))[0]
    return from_hugging_face(content.get("text_config", content), rows, "self_attn.q_proj.bias" in first)


def tied(source: CheckpointSource, content: Mapping[str, Any]) -> CheckpointSource:
    """The source, with its embedding also used as the head if its config.json ties both and it has no head."""
    if content.get("tie_word_embeddings") and "lm_head.weight" not in source.tensors and EMBEDDING in source.tensors:
        file = source.tensors[EMBEDDING].file
        return source.joined(file, lambda: {"lm_head.weight": dict(source.read([EMBEDDING]))[EMBEDDING]})
    return source


def read(
    folder: Path,
    image: ImageTokens,
    device: torch.device,
    dtype: torch.dtype,
    declared: tuple[str, UnifiedConfig] | None = None,
) -> Unified:
    """A model from a Hugging Face folder; only the rows of image tokens are kept of its head. declared: the name and
    the sizes that it must have; None for a draft model."""
    source = tied(official.open_source(folder), official.config(folder))
    cfg = described(folder, lambda content: configured(content, source))
    if declared is not None:
        check_sizes(cfg, declared[1], declared[0], folder)
    if int(image.ids.max()) >= cfg.vocab_size:
        raise UsageError(
            f"the tokenizer names id {int(image.ids.max())}, the model in {folder} has {cfg.vocab_size} ids; fetch both"
            " of one release"
        )
    table, ignored = naming.for_language(source.tensors, cfg.n_layer, cfg.block, image.ids, str(folder))
    return official.load(lambda: Unified(cfg, image), source, table, device, dtype, ignored)
