"""Class-conditional models that do not fill an image row by row, with their official files: ARPG and LPD.

Both have LlamaGen's tokenizer and the fields of its shape. Facts: `models.arpg` and `models.lpd`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.errors import UsageError
from specbench.models.arpg import ARPG
from specbench.models.llamagen import LlamaGenConfig
from specbench.models.loading import llamagen_official, naming, official
from specbench.models.loading.bundle import only
from specbench.models.loading.llamagen_official import HEADS, LlamaGenModel
from specbench.models.lpd import LPD
from specbench.models.orders import GroupOrder

tokens_of_image = llamagen_official.tokens_of_image


class OrderedModel(LlamaGenModel):
    """A subclass defines how its files are read."""

    def __init__(self, cfg: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(cfg, device, dtype)
        self.target.pads_see_all = False
        if self.reduced and cfg["iterations"]:  # a reduced image has few tokens
            cfg = {**cfg, "iterations": min(cfg["iterations"], self.target.length // 2)}
        self.target.order = GroupOrder.of(cfg, self.target.cfg.side)

    def _read(self, folder: Path) -> Any:
        source = official.open_source(only(folder, ".pt", ".pth", ".safetensors"))
        shapes = {name: info.shape for name, info in source.tensors.items()}
        try:
            cfg = self._shape_in(shapes)
        except (LookupError, ValueError) as e:
            raise UsageError(
                f"{source.path} is not a file of {self.name} (it has no {e}); fetch the official one"
            ) from e
        if cfg != self.shape:
            raise UsageError(
                f"{folder} holds another model than {self.name}: {cfg.n_layer} layers of width {cfg.dim}, not"
                f" {self.shape.n_layer} of {self.shape.dim}; choose its model="
            )
        return self._filled(source)

    def _shape_in(self, shapes: Mapping[str, tuple[int, ...]]) -> LlamaGenConfig:
        """The shape in a file's tensors. Raises LookupError or ValueError if they have none."""
        raise NotImplementedError

    def _filled(self, source: official.CheckpointSource) -> Any:
        """The target with the model's shape, from its file."""
        raise NotImplementedError


def _layers(shapes: Mapping[str, tuple[int, ...]], pattern: str) -> int:
    return len({match[1] for name in shapes if (match := re.match(pattern, name))})


class ArpgModel(OrderedModel):
    network = ARPG
    target: ARPG

    def _shape_in(self, shapes: Mapping[str, tuple[int, ...]]) -> LlamaGenConfig:
        codes, dim = shapes["head.weight"]
        rows = shapes["embeddings.weight"][0]
        half = _layers(shapes, r"layers\.self_dec\.(\d+)\.")
        return replace(
            self.shape,
            dim=dim,
            n_layer=2 * half,
            n_head=HEADS[dim],
            ffn_hidden=shapes["layers.self_dec.0.ffn.w1.weight"][0],
            vocab_size=codes,
            num_classes=rows - codes - 3,
        )

    def _filled(self, source: official.CheckpointSource) -> ARPG:
        c, (file, _) = self.shape, source.shards[0]

        def parts() -> dict[str, Tensor]:
            """The rows of the table: codes, the mask token, then classes and no class. The last row is not used."""
            [(_, table)] = source.read(["embeddings.weight"])
            first = c.vocab_size + 1
            classes = table[first : first + c.num_classes + 1]
            return {
                "embeddings.codes": table[: c.vocab_size],
                "embeddings.mask": table[c.vocab_size],
                "embeddings.classes": classes,
            }

        table = naming.arpg(c.n_layer // 2, c.block)
        ignored = [r"embeddings\.weight", *naming.ROTARY]
        return official.load(lambda: ARPG(c), source.joined(file, parts), table, self.device, self.dtype, ignored)


class LpdModel(OrderedModel):
    network = LPD
    target: LPD  # type: ignore[assignment]

    def _shape_in(self, shapes: Mapping[str, tuple[int, ...]]) -> LlamaGenConfig:
        codes, dim = shapes["head.weight"]
        return replace(
            self.shape,
            dim=dim,
            n_layer=_layers(shapes, r"blocks\.(\d+)\."),
            n_head=HEADS[dim],
            ffn_hidden=shapes["blocks.0.mlp.fc1.weight"][0],
            vocab_size=codes,
            block_size=shapes["pos_embed"][1] - 1,
            num_classes=shapes["class_emb.weight"][0],
        )

    def _filled(self, source: official.CheckpointSource) -> LPD:
        with official.shapes_only():
            table = naming.lpd(LPD(self.shape).state_dict())
        return official.load(lambda: LPD(self.shape), source, table, self.device, self.dtype)
