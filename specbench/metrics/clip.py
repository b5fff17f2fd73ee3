"""CLIP in transformers' layout: the networks of files that hold a CLIPModel, such as OpenAI's on the hub.

A network is built from the sizes here, not from a config.json, and filled with the file's tensors by their names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from specbench.models.loading import official
from specbench.models.loading.naming import ParameterSlice

#: OpenAI's ViT-L/14 at 336 pixels.
L14_336: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "hidden_act": "quick_gelu",
    "projection_dim": 768,
}
#: What such a file holds and a tower for images does not need: the tower for text, and positions that are counted.
_TEXT = [r"text_model\..*", r"text_projection\.weight", "logit_scale"]
_COUNTED = [r".*\.position_ids"]


def load_image_tower(path: Path, device: str, settings: dict[str, Any] | None = None) -> nn.Module:
    """CLIPVisionModelWithProjection of a file, in float32. Raises UsageError for a file with other tensors."""

    def build() -> nn.Module:
        return _counted(CLIPVisionModelWithProjection(CLIPVisionConfig(**(settings or L14_336))))

    with torch.device("meta"):
        names = list(build().state_dict())
    table = {name: ParameterSlice(name) for name in names}
    return official.load(build, official.open_source(path), table, device, torch.float32, [*_TEXT, *_COUNTED])


def _counted(network: nn.Module) -> nn.Module:
    """A network on the meta device whose lists of positions, which are in no file, have values."""
    for part in network.modules():
        if "position_ids" in part._buffers:
            count = part._buffers["position_ids"].shape[-1]  # type: ignore[union-attr]
            with torch.device("cpu"):
                part.register_buffer("position_ids", torch.arange(count)[None], persistent=False)
    return network
