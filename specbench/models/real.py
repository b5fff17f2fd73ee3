"""The real targets' common ground: a folder of official files, or random weights, becomes what a pipeline needs.

Folders: target/ (the language model), tokenizer/ (pixels), text/ (LlamaGen's captions), and of drafters eagle/, medusa/
and draft/ (a smaller model of the family), each where a method asks for it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from specbench import registry
from specbench.errors import UsageError
from specbench.models import checkpoints, eagle, naming, official
from specbench.models.eagle import Eagle, EagleConfig
from specbench.models.language import Language
from specbench.models.medusa import Medusa, MedusaConfig
from specbench.models.unified import ImageTokens, Unified, read

M = TypeVar("M", bound=nn.Module)

#: A drafter trained here, in this project's own format, in its sub-folder.
OWN = "specbench.safetensors"
BESIDE = (argparse.Namespace,)  # what trainers store next to the weights


class Bundle:
    """What models of codes and of vectors share: a folder of official files, or random weights."""

    def __init__(self, cfg: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        self.name: str = cfg["model"]
        self.reduced: bool = cfg["reduced"]
        self.device, self.dtype = device, dtype
        self.folder = registry.weights_folder(cfg)
        if self.folder is not None:
            registry.check_weights({**cfg, "drafter": "none"})

    def part(self, name: str) -> Path:
        """A sub-folder of the weights."""
        assert self.folder is not None
        path = self.folder / name
        if not path.is_dir():
            raise UsageError(f"{self.folder} has no {name}/; put the files there, or try weights=random")
        return path

    def picture(self, tokens: Tensor) -> np.ndarray:
        """One picture (1, H, W, 3) uint8 of its codes (1, h * w) or vectors (1, L, D)."""
        raise NotImplementedError

    @torch.inference_mode()
    def pixels(self, tokens: Tensor) -> np.ndarray:
        """Pictures (B, H, W, 3) uint8 of the target's tokens (B, T) or (B, L, D), each decoded on its own."""
        return np.concatenate([self.picture(row[None].to(self.device)) for row in tokens])

    def random(self, build: Callable[[], M], seed: int, dtype: torch.dtype) -> M:
        """A module with random weights of unit gain, made where it shall live: the host never holds it twice."""
        with torch.device("meta"):
            module = build()
        module = module.to(dtype).to_empty(device=self.device)
        rng = torch.Generator(self.device).manual_seed(seed)
        with torch.no_grad():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if not tensor.is_floating_point():
                    tensor.zero_()
                elif tensor.dim() < 2 or "norm" in name:
                    tensor.fill_(0.0 if name.endswith(("bias", "running_mean")) else 1.0)
                else:
                    tensor.normal_(0, tensor[0].numel() ** -0.5, generator=rng)
        return module.eval().requires_grad_(False)


def only(folder: Path, *endings: str) -> Path:
    """The one file of a folder with these endings."""
    found = sorted(p for p in folder.iterdir() if p.suffix in endings)
    if len(found) != 1:
        held = ", ".join(p.name for p in found) or "none"
        raise UsageError(f"{folder} must hold one {' or '.join(endings)} file (it holds {held})")
    return found[0]


def class_number(prompt: str, classes: int, model: str) -> int:
    """A class-conditional model's prompt, which is a number in words."""
    if re.fullmatch(r"\d{1,6}", prompt.strip()) and int(prompt) < classes:
        return int(prompt)
    raise UsageError(
        f"{model} draws classes 0 to {classes - 1}, and '{prompt[:40]}' is none; use data=imagenet, or a file of class"
        " numbers"
    )


class RealModel(Bundle):
    """A model of codes. A subclass builds `target` and `tokenizer`, and says how prompts become conditioning and tokens
    pictures."""

    target: Language
    resolution: int

    # --- what a subclass says -----------------------------------------------------------------------------------------

    def encode(self, prompts: list[str]) -> Any:
        raise NotImplementedError

    def codebook(self) -> Tensor:
        """Code vectors (V, d) of the target's tokens; NaN for the image grammar's own."""
        raise NotImplementedError

    def draft_model(self) -> Language:
        """A smaller target with the same tokens and prefix."""
        raise NotImplementedError

    # --- what all share -----------------------------------------------------------------------------------------------

    def pixels(self, tokens: Tensor) -> np.ndarray:
        grammar = self.target.grammar
        return super().pixels(tokens if grammar is None else tokens[:, grammar.free.to(tokens.device)])

    def eagle(self) -> Eagle:
        """LANTERN's layout (config.json beside the tensors), or a drafter trained here."""
        if self.folder is None:
            like = eagle.like_shape(self.target)
            return self.random(lambda: Eagle(like), 5, self.dtype)
        path = self.part("eagle")
        if (path / OWN).is_file():
            head = checkpoints.load(path / OWN, "eagle", Eagle, EagleConfig)
            head = head.to(self.device, self.dtype).eval().requires_grad_(False)
        else:
            source = official.open_source(path)
            cfg = self._eagle_config(official.config(path), source)
            table = naming.eagle(cfg.block, cfg.input_norm)
            head = official.load(lambda: Eagle(cfg), source, table, self.device, self.dtype, naming.ROTARY)
        own = head.cfg.dim, head.cfg.vocab_size
        if own != (self.target.block.dim, len(self.target.tok_embeddings.weight)):
            raise UsageError(f"the drafter in {path} was trained for another target than {self.name}")
        return head

    def _eagle_config(self, c: Mapping[str, Any], source: official.Source) -> EagleConfig:
        like = eagle.like_shape(self.target)
        shards = source.tensors.get("layers.0.self_attn.q_norm.weight")
        try:
            return EagleConfig(
                dim=c["hidden_size"],
                n_head=c["num_attention_heads"],
                ffn_hidden=c["intermediate_size"],
                vocab_size=c["vocab_size"],
                cls_token_num=like.cls_token_num,
                block_size=like.block_size,
                rope_base=c.get("rope_theta", like.rope_base),
                norm_eps=c["rms_norm_eps"],
                n_kv_head=c["num_key_value_heads"],
                input_norm="layers.0.input_layernorm.weight" in source.tensors,
                qk_norm=shards.shape[0] if shards else 0,
            )
        except KeyError as e:
            raise UsageError(f"{source.path / 'config.json'} lacks {e}; take the one published with the drafter") from e

    def medusa(self) -> Medusa:
        """Heads in Medusa's released layout, or trained here. Of each head's output the rows of image tokens are
        kept."""
        dim, tokens = self.target.block.dim, self.target.vocab_size
        if self.folder is None:
            return self.random(lambda: Medusa(MedusaConfig(dim, tokens)), 6, self.dtype)
        path = self.part("medusa")
        if (path / OWN).is_file():
            heads = checkpoints.load(path / OWN, "medusa", Medusa, MedusaConfig)
            heads = heads.to(self.device, self.dtype).eval().requires_grad_(False)
        else:
            source = official.open_source(path)
            heads = self._released_heads(source)
        if (heads.cfg.dim, heads.cfg.vocab_size) != (dim, tokens):
            raise UsageError(f"the Medusa heads in {path} were trained for another target than {self.name}")
        return heads

    def _released_heads(self, source: official.Source) -> Medusa:
        tops = [n for n in source.tensors if n.endswith(".1.weight")]
        cfg = MedusaConfig(self.target.block.dim, self.target.vocab_size, max(1, len(tops)))
        table, ignored = naming.for_medusa(source.tensors, cfg.heads, str(source.path))
        if isinstance(self.target, Unified):
            keep = self.target.image.ids
            table = {n: replace(p, pick=keep) if n.endswith(".1.weight") else p for n, p in table.items()}
        return official.load(lambda: Medusa(cfg), source, table, self.device, self.dtype, ignored)


class UnifiedModel(RealModel):
    """A target with one vocabulary; `tokenizer.codebook()` gives its code vectors."""

    target: Unified
    image: ImageTokens
    tokenizer: Any

    def draft_model(self) -> Unified:
        if self.folder is None:
            small = replace(self.target.cfg, n_layer=max(1, self.target.cfg.n_layer // 4))
            return self.random(lambda: Unified(small, self.image), 3, self.dtype)
        return read(self.part("draft"), self.image, self.device, self.dtype)

    def codebook(self) -> Tensor:
        """The code vectors as stored (reference README (18)), NaN for the image grammar's own tokens."""
        codes = self.tokenizer.codebook()
        own = codes.new_full((self.target.vocab_size - len(codes), codes.shape[1]), torch.nan)
        return torch.cat([codes, own])
