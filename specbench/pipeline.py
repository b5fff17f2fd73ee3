"""A model, a drafter and a rule put together: prompts in, tokens and pictures out. The harness sees nothing below
this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench import registry
from specbench.decoding.drafters.none import NoDraft
from specbench.decoding.loop import Decoded, Drafter, decode, synchronize
from specbench.decoding.rules import Rule, exact
from specbench.decoding.sampling import Sampling, Streams
from specbench.errors import UsageError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """ "auto" is the GPU where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"device={name} was asked for but no CUDA device is visible (use device=cpu or device=auto)")
    return torch.device(name)


class Pipeline:
    def __init__(
        self, model: Any, drafter: Drafter, rule: Rule, sampling: Sampling, device: torch.device, weights: str
    ) -> None:
        self.model, self._drafter, self._rule, self._sampling = model, drafter, rule, sampling
        self.device = device
        self.weights = weights  # what a row calls them, see registry.weights_label

    @classmethod
    def load(cls, cfg: Mapping[str, Any]) -> Pipeline:
        """From flat parameters: model, weights, device, dtype, drafter, rule, and what those declare."""
        device = resolve_device(cfg["device"])
        if cfg["dtype"] not in _DTYPES:
            raise UsageError(f"dtype={cfg['dtype']} is unknown (choose from: {', '.join(_DTYPES)})")
        model = registry.find("model", cfg["model"])(cfg, device, _DTYPES[cfg["dtype"]])
        drafter = registry.find("drafter", cfg["drafter"])(cfg, model)
        rule = registry.rule(cfg, drafter.tree.height, model.codebook)
        sampling = Sampling(cfg["temperature"], cfg["top_k"], cfg["top_p"], cfg["cfg_scale"])
        label = registry.weights_label(cfg)
        return cls(model, drafter, rule, sampling, device, label)

    def vanilla(self) -> Pipeline:
        """The same loaded target with the empty draft: the baseline."""
        return Pipeline(self.model, NoDraft(), exact(), self._sampling, self.device, self.weights)

    @property
    def resolution(self) -> int:
        return self.model.resolution

    @property
    def tokens_per_image(self) -> int:
        return self.model.tokens_per_image

    def encode(self, prompts: list[str]) -> Any:
        return self.model.encode(prompts)

    def decode(self, conditioning: Any, keys: list[tuple[int, int]]) -> Decoded:
        """One image per (seed, prompt index) in `keys`; conditioning of as many prompts."""
        streams = Streams(keys, self.device)
        return decode(self.model.target, self._drafter, self._rule, self._sampling, conditioning, streams)

    def pixels(self, tokens: Tensor) -> np.ndarray:
        return self.model.pixels(tokens)

    def synchronize(self) -> None:
        synchronize(self.device)
