"""Shapes of the embedded models: what `make train-scenes` trains and `weights=random` builds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specbench.data.scenes import vocabulary
from specbench.models.llamagen import LlamaGenConfig
from specbench.models.text import TextConfig
from specbench.models.vq import VQConfig

VQ = VQConfig(
    ch=16, ch_mult=(1, 2, 4), num_res_blocks=1, z_channels=64, codebook_size=512, norm_groups=8, attention=False
)
TARGET = LlamaGenConfig(
    dim=192, n_layer=6, n_head=6, ffn_hidden=512, vocab_size=512, cls_token_num=8, caption_dim=192, block_size=256
)
DRAFT = replace(TARGET, dim=96, n_layer=2, n_head=3, ffn_hidden=256)


def text() -> TextConfig:
    return TextConfig(vocabulary=tuple(vocabulary()))


CONFIGS: dict[str, Callable[[], Any]] = {
    "tokenizer": lambda: VQ,
    "text": text,
    "target": lambda: TARGET,
    "draft": lambda: DRAFT,
}
