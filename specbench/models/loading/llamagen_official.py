"""LlamaGen with its official files: text-conditional XL in two stages; class-conditional L, XL and 3B.

Facts: reference README (1) to (10) and the manifests of t2i_XL_stage*, c2i_* and vq_ds16_*.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.config.run_config import RunConfig
from specbench.data.base import Item
from specbench.errors import UsageError
from specbench.models import vq
from specbench.models.llamagen import ClassConditioning, Conditioning, LlamaGen, LlamaGenConfig
from specbench.models.loading import naming, official
from specbench.models.loading.bundle import RealModel, check_classes, check_sizes, class_number, only, shape_of
from specbench.models.loading.image_tokenizers import load_autoencoder
from specbench.models.loading.text_official import T5_XL, T5Features, hashed_features
from specbench.models.pixels import to_uint8

#: Width -> number of heads of draft models, which LlamaGen's files (B, L, XL, XXL, 3B) do not contain.
HEADS = {768: 12, 1024: 16, 1280: 20, 1536: 24, 3200: 32}


def reduced(cfg: LlamaGenConfig) -> LlamaGenConfig:
    """The same architecture: 4x4 tokens of 64 codes, two layers."""
    small = replace(cfg, dim=64, n_layer=2, n_head=2, n_kv_head=None, ffn_hidden=96, vocab_size=64, block_size=16)
    return replace(small, cls_token_num=min(cfg.cls_token_num, 12), caption_dim=32)


class LlamaGenModel(RealModel):
    target: LlamaGen
    tokenizer: vq.VQModel

    def __init__(self, cfg: RunConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(cfg, device, dtype)
        self.shape = shape_of(self.name, LlamaGenConfig)
        self.shape = reduced(self.shape) if self.reduced else self.shape
        self.text: T5Features | None = None
        if self.folder is None:
            self.target = self.random(lambda: LlamaGen(self.shape), 1, dtype)
            self.tokenizer = self.random_pixels(vq.LLAMAGEN_16, self.shape.vocab_size)
        else:
            self.target = self._read(self.part("target"), self.shape)
            self.tokenizer = self._pixels(self.part("tokenizer"))
            if not self.shape.num_classes:
                self.text = T5Features(self.part("text"), device, dtype, self.target.cfg.cls_token_num)
                if self.text.dim != self.target.cfg.caption_dim:
                    raise UsageError(
                        f"{self.folder / 'text'} gives features of width {self.text.dim}, the target reads"
                        f" {self.target.cfg.caption_dim}; put the files of google/flan-t5-xl there"
                    )
        # Only drafters read the hidden states of padding, and the published drafters were trained on LANTERN's.
        self.target.pads_see_all = True
        self.resolution = self.target.cfg.side * self.tokenizer.cfg.downsample

    @classmethod
    def check_prompts(cls, cfg: RunConfig, items: Sequence[Item]) -> None:
        """Raises UsageError for a prompt that a class-conditional model cannot draw. Loads nothing."""
        if classes := shape_of(cfg.model, LlamaGenConfig).num_classes:
            check_classes(items, classes, cfg.model)

    def absent(self) -> dict[str, int]:
        """See `Bundle.absent`: the text encoder, whose features are replaced by random ones."""
        return {"text": T5_XL} if self.text is None and not self.shape.num_classes and not self.reduced else {}

    def _pixels(self, folder: Path) -> vq.VQModel:
        file = only(folder, ".pt", ".safetensors")
        tokenizer = load_autoencoder(vq.VQModel, vq.LLAMAGEN_16, file, self.device, llamagen=True)
        if tokenizer.cfg.codebook_size != self.target.cfg.vocab_size:
            raise UsageError(
                f"the tokenizer in {folder} has {tokenizer.cfg.codebook_size} codes, the target"
                f" {self.target.cfg.vocab_size}; put vq_ds16_t2i.pt (text) or vq_ds16_c2i.pt (classes) there"
            )
        return tokenizer

    def _read(self, folder: Path, declared: LlamaGenConfig | None = None) -> LlamaGen:
        """A target from LlamaGen's file or LANTERN's Hugging Face folder. declared: the sizes that it must have; None
        for a draft model."""
        if (folder / "config.json").is_file():
            source = official.open_source(folder)
            try:
                cfg = from_lantern(official.config(folder))
            except KeyError as e:
                raise UsageError(f"{folder / 'config.json'} has no {e}; fetch it again") from e
        else:
            source = official.open_source(only(folder, ".pt", ".safetensors"))
            cfg = self._from_shapes(source, declared)
        if (cfg.block_size, cfg.num_classes > 0) != (self.shape.block_size, self.shape.num_classes > 0):
            raise UsageError(
                f"{folder} holds another LlamaGen than {self.name}: it generates {cfg.block_size} tokens from"
                f" {'classes' if cfg.num_classes else 'text'}; choose its model="
            )
        if declared is not None:
            found, declared = (replace(c, n_kv_head=c.block.n_kv_heads) for c in (cfg, declared))
            check_sizes(found, declared, self.name, folder)
        table, ignored = naming.for_llamagen(
            source.tensors, cfg.n_layer, cfg.block, text=not cfg.num_classes, where=str(folder)
        )
        return official.load(lambda: LlamaGen(cfg), source, table, self.device, self.dtype, ignored)

    def _from_shapes(self, source: official.CheckpointSource, declared: LlamaGenConfig | None) -> LlamaGenConfig:
        """The sizes, which LlamaGen's files do not contain. The image's size is the selected model's. The heads
        follow from the width. Of an unknown width they are `declared`'s, whose width then refuses the file."""
        known = HEADS | {self.shape.dim: self.shape.n_head}
        t = {name: info.shape for name, info in source.tensors.items()}
        layers = {int(m[1]) for name in t if (m := re.match(r"layers\.(\d+)\.", name))}
        try:
            vocab, dim = t["tok_embeddings.weight"]
            rows = t["layers.0.attention.wqkv.weight"][0]
            cfg = replace(
                self.shape,
                dim=dim,
                n_layer=len(layers),
                ffn_hidden=t["layers.0.feed_forward.w1.weight"][0],
                vocab_size=vocab,
            )
            if declared is None or dim in known:
                heads = known[dim]
                cfg = replace(cfg, n_head=heads, n_kv_head=(rows - dim) // 2 // (dim // heads))
            if self.shape.num_classes:
                return replace(cfg, num_classes=t["cls_embedding.embedding_table.weight"][0] - 1)
            tokens, width = t["cls_embedding.uncond_embedding"]
            return replace(cfg, cls_token_num=tokens, caption_dim=width)
        except (KeyError, ValueError) as e:
            raise UsageError(
                f"{source.path} is not a LlamaGen file for {self.name} (it has no {e}); fetch the official one"
            ) from e

    def smaller(self) -> LlamaGen:
        c = self.target.cfg
        return LlamaGen(replace(c, n_layer=max(1, c.n_layer // 4)))

    def read_smaller(self, path: Path) -> LlamaGen:
        return self._read(path)

    def codebook(self) -> Tensor:
        """The stored table (reference README (18))."""
        return self.tokenizer.codebook()

    def unread_tokens(self, prompt: str) -> int:
        return 0 if self.text is None else self.text.unread(prompt)

    @torch.inference_mode()
    def encode(self, prompts: list[str]) -> Conditioning | ClassConditioning:
        """prompts: captions or, for a class-conditional model, class numbers as text."""
        if classes := self.shape.num_classes:
            numbers = [class_number(p, classes, self.name) for p in prompts]
            return ClassConditioning(torch.tensor(numbers, device=self.device))
        if self.text is None:
            c = self.target.cfg
            features, valid = hashed_features(prompts, c.cls_token_num, c.caption_dim)
        else:
            features, valid = self.text(prompts)
        return Conditioning(features.to(self.device, self.dtype), valid.to(self.device))

    def decode_image(self, codes: Tensor) -> np.ndarray:
        return to_uint8(self.tokenizer.decode(codes))


def from_lantern(c: Mapping[str, Any]) -> LlamaGenConfig:
    """The configuration in a config.json of LANTERN's layout. Raises KeyError for a missing value."""
    return LlamaGenConfig(
        dim=c["hidden_size"],
        n_layer=c["num_hidden_layers"],
        n_head=c["num_attention_heads"],
        n_kv_head=c.get("num_key_value_heads"),
        ffn_hidden=c["intermediate_size"],
        vocab_size=c["vocab_size"],
        cls_token_num=c["cls_token_num"],
        caption_dim=c["caption_dim"],
        block_size=c["block_size"],
        rope_base=c.get("rope_base", 10000.0),
        norm_eps=c["rms_norm_eps"],
        num_classes=c["num_classes"] if c.get("input_type") == "c2i" else 0,
    )


def tokens_of_image(cfg: RunConfig) -> int:
    """Number of tokens of an image. Loads nothing."""
    return shape_of(cfg.model, LlamaGenConfig).block_size
