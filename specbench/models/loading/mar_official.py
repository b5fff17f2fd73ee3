"""MAR with its official files: B, L and H, class-conditional on ImageNet, 256x256.

Facts: reference README (31) to (38), the manifests of mar_base, mar_large, mar_huge and kl16.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specbench.config.run_config import RunConfig
from specbench.data.base import Item
from specbench.errors import UsageError
from specbench.models import vq
from specbench.models.loading import official
from specbench.models.loading.bundle import Bundle, check_classes, check_sizes, class_number, only, shape_of
from specbench.models.loading.image_tokenizers import load_autoencoder
from specbench.models.loading.naming import Table
from specbench.models.mar import MAR, MARConfig
from specbench.models.mar_sampling import Guided, MaskedSampling, unpatchify
from specbench.models.pixels import to_uint8

_BASE = MARConfig()
#: Width -> number of heads of draft models, which MAR's files do not contain.
HEADS = {768: 12, 1024: 16, 1280: 16}
WRAPPERS = ("model_ema", "model")  # images are generated with the averaged weights (reference README (38))
LATENT_SCALE = 0.2325  # tokens are the autoencoder's latents times this (reference README (37))


def reduced(cfg: MARConfig) -> MARConfig:
    """The same architecture with 4x4 tokens and two layers, or one layer for MAR-B, which drafts."""
    depth = 1 if cfg.encoder_depth == _BASE.encoder_depth else 2
    small = {"length": 16, "buffer": 4, "head_depth": depth, "head_width": 64, "steps": cfg.steps}
    return MARConfig.even(64, depth, 2, **small)


def table(cfg: MARConfig) -> Table:
    """The table of `checkpoint-last.pth` (under "model_ema"): the names are the same."""
    with official.shapes_only():
        return official.own_names(MAR(cfg))


class MARModel(Bundle):
    target: Guided
    tokenizer: vq.KLModel

    def __init__(self, cfg: RunConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(cfg, device, dtype)
        self.sampling = cfg.read(MaskedSampling)
        shape = shape_of(self.name, MARConfig.even)
        self.shape = replace(reduced(shape) if self.reduced else shape, steps=self.sampling.diffusion_steps)
        if self.folder is None:
            pixels = vq.KL16.reduced(0) if self.reduced else vq.KL16
            self.target = self._guided(self.random(lambda: MAR(self.shape), 1, dtype))
            self.tokenizer = self.random(lambda: vq.KLModel(pixels), 2, torch.float32)
        else:
            self.target = self._guided(self._read(self.part("target"), self.shape))
            self.tokenizer = self._pixels(self.part("tokenizer"))
        self.resolution = self.shape.side * self.tokenizer.cfg.downsample

    @classmethod
    def check_prompts(cls, cfg: RunConfig, items: Sequence[Item]) -> None:
        """Raises UsageError for a prompt that is not a class number. Loads nothing."""
        check_classes(items, shape_of(cfg.model, MARConfig.even).classes, cfg.model)

    def _guided(self, model: MAR) -> Guided:
        return self.sampling.guided(model)

    def _pixels(self, folder: Path) -> vq.KLModel:
        file = only(folder, ".ckpt", ".pt", ".safetensors")
        autoencoder = load_autoencoder(vq.KLModel, vq.KL16, file, self.device, llamagen=False)
        if autoencoder.cfg.codebook_embed_dim != self.shape.token_dim:
            raise UsageError(
                f"the autoencoder in {folder} has latents of {autoencoder.cfg.codebook_embed_dim} numbers, the target"
                f" draws {self.shape.token_dim}; put kl16.ckpt there"
            )
        return autoencoder

    def _read(self, path: Path, declared: MARConfig | None = None) -> MAR:
        """The model in a folder or file. declared: the sizes that it must have; None for a draft model."""
        file = path if path.is_file() else only(path, ".pth", ".pt", ".safetensors")
        source = official.open_source(file, WRAPPERS)
        cfg = self._from_shapes(source, declared)
        if declared is not None:
            check_sizes(cfg, declared, self.name, file)
        return official.load(lambda: MAR(cfg), source, table(cfg), self.device, self.dtype)

    def _from_shapes(self, source: official.CheckpointSource, declared: MARConfig | None) -> MARConfig:
        """The sizes, which MAR's files do not contain. The heads follow from the width. Of an unknown width they are
        `declared`'s, whose width then refuses the file."""
        known = HEADS | {self.shape.decoder_dim: self.shape.decoder_heads}
        known |= {self.shape.encoder_dim: self.shape.encoder_heads}
        t = {name: info.shape for name, info in source.tensors.items()}

        def depth(blocks: str) -> int:
            matches = (re.match(rf"{re.escape(blocks)}\.(\d+)\.", name) for name in t)
            return len({m[1] for m in matches if m})

        try:
            encoder, decoder = t["z_proj.weight"][0], t["decoder_embed.weight"][0]
            if unknown := {encoder, decoder} - {*known} if declared is None else ():
                raise LookupError(f"known number of heads for width {min(unknown)}")
            length = t["diffusion_pos_embed_learned"][1]
            return MARConfig(
                encoder_dim=encoder,
                encoder_depth=depth("encoder_blocks"),
                encoder_heads=known.get(encoder, self.shape.encoder_heads),
                decoder_dim=decoder,
                decoder_depth=depth("decoder_blocks"),
                decoder_heads=known.get(decoder, self.shape.decoder_heads),
                mlp_ratio=t["encoder_blocks.0.mlp.fc1.weight"][0] / encoder,
                length=length,
                token_dim=t["z_proj.weight"][1],
                classes=t["class_emb.weight"][0],
                buffer=t["encoder_pos_embed_learned"][1] - length,
                head_depth=depth("diffloss.net.res_blocks"),
                head_width=t["diffloss.net.input_proj.weight"][0],
                steps=self.shape.steps,
            )
        except (LookupError, ArithmeticError) as e:
            raise UsageError(f"{source.path} is not a MAR file (it has no {e}); fetch the official one") from e

    def drafter_network(self, name: str = "cspd") -> Guided:
        """A smaller MAR with the same tokens, at drafter_weights= or in the target's folder, with the target's
        guidance."""
        if self.drafter_weights is None and self.folder is None:
            shape = reduced(_BASE) if self.reduced else _BASE
            if self.shape.encoder_depth == _BASE.encoder_depth:
                shape = replace(shape, encoder_depth=shape.encoder_depth // 4, decoder_depth=shape.decoder_depth // 4)
            return self._guided(self.random(lambda: MAR(replace(shape, steps=self.shape.steps)), 3, self.dtype))
        folder = self.drafter_weights or self.part("draft")
        model = self._read(folder)
        target, draft = ((c.length, c.token_dim, c.classes) for c in (self.shape, model.cfg))
        if target != draft:
            raise UsageError(f"{folder} has other tokens or classes than the target; put a MAR there")
        return self._guided(model)

    def encode(self, prompts: list[str]) -> Tensor:
        """Class numbers as text -> labels (n,) int64."""
        numbers = [class_number(p, self.shape.classes, self.name) for p in prompts]
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def decode_image(self, tokens: Tensor) -> np.ndarray:
        return to_uint8(self.tokenizer.decode_latent(unpatchify(tokens.float()) / LATENT_SCALE))
