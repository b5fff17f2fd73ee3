"""The embedded class-conditional model with continuous tokens: MAR's architecture over a small KL autoencoder, trained
on the single objects of *scenes*, and the smaller MAR that drafts for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from specbench.config import registry
from specbench.config.run_config import RunConfig
from specbench.data import scenes, scenes_classes
from specbench.data.base import Item
from specbench.errors import UsageError
from specbench.models.loading import checkpoints
from specbench.models.loading.bundle import Bundle
from specbench.models.loading.drafter_networks import specbench_file
from specbench.models.mar import MAR, MARConfig
from specbench.models.mar_sampling import Guided, MaskedSampling, patchify, unpatchify
from specbench.models.pixels import to_uint8
from specbench.models.scenes_config import MAR_CONFIGS, LatentConfig
from specbench.models.vq import KLModel

M = TypeVar("M", bound=nn.Module)


class Latents(KLModel):
    """A KL autoencoder with the scale of its tokens. Tokens are (N, L, D), row by row."""

    cfg: LatentConfig

    def token_distribution(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and spread, both (N, L, D) float32, of the tokens' normal distribution, for images (N, 3, H, W) in
        [-1, 1]."""
        mean, log_variance = self.encode(images)
        return patchify(mean.float()) * self.cfg.scale, patchify((0.5 * log_variance.float()).exp()) * self.cfg.scale

    def images(self, tokens: Tensor) -> Tensor:
        """Images (N, 3, H, W), not clamped, from tokens (N, L, D)."""
        return self.decode_latent(unpatchify(tokens.float() / self.cfg.scale))


class ScenesMAR(Bundle):
    """The model for `pipeline.ContinuousPipeline`. The drafter is loaded when a method needs it."""

    resolution = scenes.SIZE

    def __init__(self, cfg: RunConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(cfg, device, dtype)
        self.sampling = cfg.read(MaskedSampling)
        self.autoencoder = self._load("kl", Latents, LatentConfig, 2, torch.float32)
        self.target = self._guided(self._load("mar", self._mar, MARConfig, 1, self.dtype))
        expected = (len(scenes_classes.NAMES), self.autoencoder.cfg.codebook_embed_dim)
        side = self.target.model.cfg.side * self.autoencoder.cfg.downsample
        if self._tokens(self.target) != (*expected, self.target.length) or side != self.resolution:
            raise UsageError(
                f"scenes_mar and scenes_kl in {self.folder} are not from one training run: run `make"
                " train-scenes` in a clone, or take both from one folder"
            )

    @classmethod
    def check_prompts(cls, cfg: RunConfig, items: Sequence[Item]) -> None:
        """Raises UsageError for a prompt that names no class. Loads nothing."""
        scenes_classes.numbers_in([item.prompt for item in items], cfg.model)

    def _load(self, kind: str, module: Callable[[Any], M], config: Callable[..., Any], seed: int, dtype: Any) -> M:
        if self.folder is None:
            return self.random(lambda: module(MAR_CONFIGS[kind]), seed, dtype)
        return self.embedded(kind, module, config, dtype)

    def _mar(self, cfg: MARConfig) -> MAR:
        return MAR(replace(cfg, steps=self.sampling.diffusion_steps))

    def _guided(self, model: MAR) -> Guided:
        return self.sampling.guided(model)

    @staticmethod
    def _tokens(model: Guided) -> tuple[int, int, int]:
        return model.model.cfg.classes, model.dim, model.length

    def drafter_network(self, name: str = "cspd") -> Guided:
        """The smaller MAR at drafter_weights= or in the target's folder, with the target's guidance."""
        if self.drafter_weights is not None:
            return self._guided(self.trained(name, self.drafter_weights))
        return self._guided(self._fitting(self._load("mar_draft", self._mar, MARConfig, 3, self.dtype)))

    def trained(self, name: str, path: Path) -> MAR:
        """The smaller MAR in a file, or in a folder that has it."""
        if (file := specbench_file(path)) is None:
            raise UsageError(f"{path} holds no {registry.DRAFTER_FILE}")
        kind = registry.network(name).kind
        return self._fitting(checkpoints.load(file, kind, self._mar, MARConfig, self.device, self.dtype))

    def token_distribution(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """See `Latents.token_distribution`."""
        return self.autoencoder.token_distribution(images)

    def _fitting(self, draft: MAR) -> MAR:
        if self._tokens(self._guided(draft)) != self._tokens(self.target):
            raise UsageError("the draft model's classes or tokens differ from the target's; train one for this target")
        return draft

    def encode(self, prompts: list[str]) -> Tensor:
        """Class names ("red circle") or numbers -> labels (n,) int64."""
        return torch.tensor(scenes_classes.numbers_in(prompts, self.name), dtype=torch.int64, device=self.device)

    def decode_image(self, tokens: Tensor) -> np.ndarray:
        return to_uint8(self.autoencoder.images(tokens))
