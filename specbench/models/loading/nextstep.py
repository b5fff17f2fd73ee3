"""NextStep-1.1 with its official files: text to image, 512x512.

Facts, and where they were seen:

- Sizes: config.json of stepfun-ai/NextStep-1.1. Rotary base and rows of the vocabulary are from Qwen2.5-14B, from which
  the model was trained; the config.json of a file replaces them.
- Names of tensors, the sampler's steps, decreasing guidance: vllm-project/vllm-omni,
  vllm_omni/diffusion/models/nextstep_1_1, adapted from that repository. The weights files were not opened.
- Prompt, autoencoder, order of a patch's numbers: stepfun-ai/NextStep-1 (d6759c2), inference/gen_pipeline.py. That
  script has a different sampler (Flow-GRPO's, `sde_level=0.8`), and its guidance `linear` increases.
- NextStep-1 ends with a step of 0.04 without noise: `last_step=0.04 final_noise=false`.

No smaller model of the family is published: for method=cspd, users need their own weights in this layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.errors import UsageError
from specbench.models import vq
from specbench.models.flow import FlowSampler
from specbench.models.loading import official
from specbench.models.loading.bundle import Bundle, only, shape_of
from specbench.models.loading.image_tokenizers import load_autoencoder
from specbench.models.loading.naming import ROTARY, Table, hugging_face
from specbench.models.loading.text_official import NamedText, hashed_ids
from specbench.models.loading.unified_official import Prompt, described, from_hugging_face, instructed, padded
from specbench.models.mar_sampling import unpatchify
from specbench.models.nextstep import NextStep, NextStepConfig, NextStepTarget
from specbench.models.pixels import to_uint8
from specbench.models.unified import Prompts
from specbench.storage.reading import read_json

SIDE, PATCH = 32, 2
TEXT_IDS = 151665  # ids of Qwen2.5's tokenizer; nine special ids follow
REDUCED = NextStepConfig(32, 2, 2, 1, 64, 60, side=4, head_width=32, head_depth=2)
#: Tensors that are not needed: the text head, and rotary tables.
_IGNORED = [r"lm_head\.weight", *ROTARY]


@dataclass(frozen=True)
class NextStepIds:
    """Special ids of a prompt (config.json of NextStep-1.1; the id of the area is the one before `boi`). bos: the start
    of a prompt, if the tokenizer has one."""

    area: int = 151666
    boi: int = 151667
    bos: int | None = None


class NextStepText(NamedText):
    """NextStep's tokenizer: Qwen2.5's with nine more tokens."""

    model, files = "NextStep", ("tokenizer.json", "vocab.json")

    def ids(self) -> NextStepIds:
        """The special ids, by their names. Raises UsageError if one is missing."""
        special = self.named({"area": "<|image_area|>", "boi": "<|begin_of_image|>"})
        file = self.file.parent / "tokenizer_config.json"
        begin = read_json(file).get("bos_token") if file.is_file() else None
        name = begin.get("content") if isinstance(begin, Mapping) else begin
        return NextStepIds(**special, bos=self.named({"bos": name})["bos"] if name else None)


def nextstep_prompt(text: list[int], negative: list[int], grid: list[int], ids: NextStepIds) -> Prompt:
    """[bos] text [image area] grid [begin of image], and the same with the negative prompt's text. grid: the ids of
    "H*W", in tokens."""
    begin = [] if ids.bos is None else [ids.bos]
    prompts = ([*begin, *part, ids.area, *grid, ids.boi] for part in (text, negative))
    return Prompt(*prompts)


def table(cfg: NextStepConfig) -> Table:
    """transformers' names without a prefix for the Transformer's tensors, the same names for all others."""
    with official.shapes_only():
        same_names = official.own_names(NextStep(cfg))
    language = hugging_face(cfg.n_layer, cfg.block, prefix="")
    del language["lm_head.weight"]
    return language | {name: part for name, part in same_names.items() if name.startswith("image_")}


class NextStepModel(Bundle):
    target: NextStepTarget
    tokenizer: vq.KLModel

    def __init__(self, cfg: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(cfg, device, dtype)
        self.instruction, self.negative = cfg["instruction"], cfg["negative"]
        self.prompt_length: int = cfg["prompt_length"]
        sampling = FlowSampler(
            cfg["diffusion_steps"], cfg["timesteps_shift"], cfg["last_step"], cfg["sde_level"], cfg["final_noise"]
        )
        self._ways = (sampling, cfg["cfg_scale"], cfg["cfg_schedule"], cfg["use_norm"])
        self.shape = REDUCED if self.reduced else shape_of(self.name, NextStepConfig)
        self.scale, self.shift = 1.0, 0.0
        if self.folder is None:
            pixels = vq.NEXTSTEP.reduced(0) if self.reduced else vq.NEXTSTEP
            self.target = self._guided(self.random(lambda: NextStep(self.shape), 1, dtype))
            self.tokenizer = self.random(lambda: vq.KLModel(pixels), 2, torch.float32)
            words = self.shape.vocab_size - 10 if self.reduced else TEXT_IDS
            self.ids, self.text = NextStepIds(words + 1, words + 2), lambda text: hashed_ids(text, 0, words)
        else:
            text = NextStepText(self.part("target"))
            self.ids, self.text = text.ids(), text.encode
            self.target = self._guided(self._read(self.part("target")))
            self.tokenizer = self._pixels(self.part("tokenizer"))
        self.shape = self.target.model.cfg
        self.resolution = self.shape.side * PATCH * self.tokenizer.cfg.downsample

    def _guided(self, model: NextStep) -> NextStepTarget:
        return NextStepTarget(model, *self._ways)

    def _pixels(self, folder: Path) -> vq.KLModel:
        file = only(folder, ".pt", ".safetensors")
        autoencoder = load_autoencoder(vq.KLModel, vq.NEXTSTEP, file, self.device, llamagen=False)
        numbers = autoencoder.cfg.codebook_embed_dim * PATCH**2
        if numbers != self.target.dim:
            raise UsageError(
                f"the autoencoder in {folder} has patches of {numbers} numbers, the target draws {self.target.dim}; put"
                " the files of its own vae/ there"
            )
        if (folder / "config.json").is_file():
            content = official.config(folder)
            self.scale, self.shift = content.get("scaling_factor", 1.0), content.get("shift_factor", 0.0)
        return autoencoder

    def _read(self, folder: Path) -> NextStep:
        source, content = official.open_source(folder), official.config(folder)
        if content.get("use_gen_pos_embed"):
            raise UsageError(
                f"the model in {folder} adds position embeddings (use_gen_pos_embed), which specbench does not support"
            )
        cfg = self._config(folder, source)
        return official.load(lambda: NextStep(cfg), source, table(cfg), self.device, self.dtype, _IGNORED)

    def _config(self, folder: Path, source: official.CheckpointSource) -> NextStepConfig:
        """The configuration: the Transformer's sizes from config.json, the head's sizes from the tensors."""
        shapes = {name: info.shape for name, info in source.tensors.items()}
        biased = "layers.0.self_attn.q_proj.bias" in shapes
        trunk = described(folder, lambda content: from_hugging_face(content, 0, biased))
        blocks = {m[1] for name in shapes if (m := re.match(r"image_head\.net\.res_blocks\.(\d+)\.", name))}
        if "image_head.net.input_proj.weight" not in shapes:
            raise UsageError(f"{folder} holds no NextStep: it has no image_head.net; fetch its files again")
        width, numbers = shapes["image_head.net.input_proj.weight"]
        return NextStepConfig(
            **asdict(trunk), side=self.shape.side, token_dim=numbers, head_width=width, head_depth=len(blocks)
        )

    def drafter_network(self, name: str = "cspd") -> NextStepTarget:
        """A smaller NextStep with the same tokens, at drafter_weights= or in draft/, with the target's sampling."""
        if self.drafter_weights is None and self.folder is None:
            small = replace(self.shape, n_layer=max(1, self.shape.n_layer // 4))
            return self._guided(self.random(lambda: NextStep(small), 3, self.dtype))
        folder = self.drafter_weights or self.part("draft")
        model = self._read(folder)
        if model.cfg.token_dim != self.target.dim:
            raise UsageError(f"{folder} has tokens of {model.cfg.token_dim} numbers, the target {self.target.dim}")
        return self._guided(model)

    def encode(self, prompts: list[str]) -> Prompts:
        """All prompts are padded to `prompt_length` positions, so they do not depend on the rest of the batch."""
        grid, negative = self.text(f"{self.shape.side}*{self.shape.side}"), self.text(self.negative)
        texts = [self.text(instructed(self.instruction, prompt)) for prompt in prompts]
        return padded([nextstep_prompt(t, negative, grid, self.ids) for t in texts], self.prompt_length, 0, self.device)

    def decode_image(self, tokens: Tensor) -> np.ndarray:
        latent = unpatchify(self.target.normed(tokens.float()), PATCH)
        return to_uint8(self.tokenizer.decode_latent(latent / self.scale + self.shift))


def tokens_of_image(cfg: Mapping[str, Any]) -> int:
    """Number of tokens of an image. Loads nothing."""
    return SIDE * SIDE
