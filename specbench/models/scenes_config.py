"""Shapes of the embedded models, which `make train-scenes` trains and `weights=random` builds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from specbench.data import fashion, worlds
from specbench.models.llamagen import LlamaGenConfig
from specbench.models.mar import MARConfig
from specbench.models.text import TextConfig
from specbench.models.vq import VQConfig

VQ = VQConfig(
    ch=16, ch_mult=(1, 2, 4), num_res_blocks=1, z_channels=64, codebook_size=512, norm_groups=8, attention=False
)
TARGET = LlamaGenConfig(
    dim=192, n_layer=6, n_head=6, ffn_hidden=512, vocab_size=512, cls_token_num=8, caption_dim=192, block_size=256
)
DRAFT = replace(TARGET, dim=96, n_layer=2, n_head=3, ffn_hidden=256)


@dataclass(frozen=True)
class WorldConfig:
    """Shapes of the networks of a world's model. Its target reads captions or, with num_classes > 0, classes."""

    tokenizer: VQConfig
    target: LlamaGenConfig
    draft: LlamaGenConfig

    def text(self, world: str) -> TextConfig:
        """The text encoder's configuration."""
        described = worlds.world(world)
        classes = sum(len(choices) + 1 for choices in described.position_attributes.values())
        return TextConfig(vocabulary=described.vocabulary, classes=classes)


WORLDS = {
    "scenes": WorldConfig(VQ, TARGET, DRAFT),
    "textures": WorldConfig(
        replace(VQ, ch=24, codebook_size=8192),
        replace(TARGET, vocab_size=8192),
        replace(TARGET, vocab_size=8192, dim=64, n_layer=1, n_head=2, ffn_hidden=192),
    ),
    "fashion": WorldConfig(  # two levels: 16 x 16 tokens of 32 x 32 pixels
        replace(VQ, ch_mult=(1, 2)),
        replace(TARGET, cls_token_num=1, num_classes=len(fashion.NAMES)),
        replace(DRAFT, cls_token_num=1, num_classes=len(fashion.NAMES)),
    ),
}


@dataclass(frozen=True)
class LatentConfig(VQConfig):
    """The shape of a KL autoencoder, and the scale of its tokens: latents times this scale have about unit variance."""

    scale: float = 1.0


#: Three levels: 8 x 8 tokens of 8 numbers. It is wide at low resolution, where width costs least.
LATENTS = LatentConfig(
    ch=16,
    ch_mult=(1, 2, 4, 6),
    num_res_blocks=1,
    z_channels=32,
    codebook_size=0,
    codebook_embed_dim=8,
    norm_groups=8,
    attention=False,
)
#: Steps of the diffusion head in sampling (of 1000 in training) for the embedded pair. The path of a token has as many
#: steps: half of MAR's 100, which halves the time of decoding and of verification.
DIFFUSION_STEPS = 50
TOKEN_LIMIT = 4.0  # limit of a token's numbers, in standard deviations; hardly any number exceeds it
_MAR: dict[str, Any] = {"length": 64, "token_dim": LATENTS.codebook_embed_dim, "classes": 40, "buffer": 8}
_MAR |= {"steps": DIFFUSION_STEPS, "limit": TOKEN_LIMIT}
MAR_TARGET = MARConfig.even(192, 4, 6, head_depth=3, head_width=256, **_MAR)
MAR_DRAFT = MARConfig.even(96, 2, 3, head_depth=2, head_width=192, **_MAR)

MAR_CONFIGS: dict[str, Any] = {"kl": LATENTS, "mar": MAR_TARGET, "mar_draft": MAR_DRAFT}
