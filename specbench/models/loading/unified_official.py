"""Targets with one vocabulary for text and images, from Hugging Face folders, and their prompts as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specbench.errors import UsageError
from specbench.models.loading import naming, official
from specbench.models.loading.files import CheckpointSource, Doubled
from specbench.models.loading.prompts import Prompt, left_pad_ids
from specbench.models.unified import ImageTokens, Prompts, Unified, UnifiedConfig

EMBEDDING = "model.embed_tokens.weight"


def padded(given: Sequence[Prompt], length: int, pad: int, device: torch.device) -> Prompts:
    """Prompts as token ids, all padded to `length` positions: independent of the rest of the batch. Raises UsageError
    for a longer one."""
    ids, valid = left_pad_ids([p.conditional for p in given], length, pad)
    no_ids, no_valid = left_pad_ids([p.unconditional for p in given], length, pad)
    return Prompts(ids.to(device), valid.to(device), no_ids.to(device), no_valid.to(device))


def from_hugging_face(c: Mapping[str, Any], qk_norm: int, qkv_bias: bool = False) -> UnifiedConfig:
    """From transformers' names; only the tensors give the rows of the norms of queries and keys, qk_norm, and whether
    queries, keys and values have biases. Raises KeyError, TypeError or ValueError for what does not describe a language
    model."""
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
        qkv_bias=qkv_bias,
    )


def configured(folder: Path, source: official.CheckpointSource) -> UnifiedConfig:
    """From the config.json of a Hugging Face folder: a language model's own, or a complete Chameleon's or Emu3's."""
    content = official.config(folder)
    norm = next((i for n, i in source.tensors.items() if n.endswith("layers.0.self_attn.q_norm.weight")), None)
    biased = any(n.endswith("layers.0.self_attn.q_proj.bias") for n in source.tensors)
    try:
        return from_hugging_face(content.get("text_config", content), norm.shape[0] if norm else 0, biased)
    except (KeyError, TypeError, ValueError) as e:
        raise UsageError(f"{folder / 'config.json'} does not describe a language model ({e}); fetch it again") from e


def tied(source: CheckpointSource, content: Mapping[str, Any]) -> CheckpointSource:
    """The source, with its embedding as the head, too, where its config.json ties both and it holds no head."""
    if content.get("tie_word_embeddings") and "lm_head.weight" not in source.tensors and EMBEDDING in source.tensors:
        return Doubled(source, EMBEDDING, "lm_head.weight")
    return source


def read(folder: Path, image: ImageTokens, device: torch.device, dtype: torch.dtype) -> Unified:
    """A model from a Hugging Face folder; of its head the rows of image tokens."""
    source = tied(official.open_source(folder), official.config(folder))
    cfg = configured(folder, source)
    if int(image.ids.max()) >= cfg.vocab_size:
        raise UsageError(
            f"the tokenizer names id {int(image.ids.max())}, the model in {folder} has {cfg.vocab_size} ids; fetch both"
            " of one release"
        )
    table, ignored = naming.for_language(source.tensors, cfg.n_layer, cfg.block, image.ids, str(folder))
    return official.load(lambda: Unified(cfg, image), source, table, device, dtype, ignored)
