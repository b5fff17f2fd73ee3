"""Shapes of the embedded models: what `make train-scenes` trains and `weights=random` builds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from specbench.data import worlds
from specbench.models.flashar import FlashARConfig
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

#: The class-conditional model that decodes in random orders.
ARPG = LlamaGenConfig(
    dim=128, n_layer=4, n_head=2, ffn_hidden=384, vocab_size=512, cls_token_num=1, block_size=256, num_classes=40
)


@dataclass(frozen=True)
class WorldConfig:
    """Shapes of the networks of a world's text-to-image model."""

    tokenizer: VQConfig
    target: LlamaGenConfig
    draft: LlamaGenConfig

    @property
    def flashar(self) -> FlashARConfig:
        """The target with branches for its anti-diagonals, of one block."""
        return FlashARConfig(**asdict(self.target), branch_layers=1)

    def text(self, world: str) -> TextConfig:
        """Builds the vocabulary, which takes a second."""
        held = worlds.world(world)
        classes = sum(len(choices) + 1 for choices in held.position_attributes.values())
        return TextConfig(vocabulary=tuple(held.vocabulary()), classes=classes)


WORLDS = {
    "scenes": WorldConfig(VQ, TARGET, DRAFT),
    "textures": WorldConfig(
        replace(VQ, ch=24, codebook_size=8192),
        replace(TARGET, vocab_size=8192),
        replace(TARGET, vocab_size=8192, dim=64, n_layer=2, n_head=2, ffn_hidden=192),
    ),
}


@dataclass(frozen=True)
class LatentConfig(VQConfig):
    """A KL autoencoder's shape and the scale of its tokens, which are latents times it: about unit variance."""

    scale: float = 1.0


#: Three levels down: 8 x 8 tokens of 8 numbers. Wide at low resolution, where it costs least.
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
#: Steps of the diffusion head, of the 1000 that it is trained on, that the embedded pair samples with. A token's path
#: has as many steps: half of MAR's 100 halves the time of every decode, and of every verification.
DIFFUSION_STEPS = 50
TOKEN_LIMIT = 4.0  # of a token's numbers, in standard deviations: hardly any is beyond
_MAR: dict[str, Any] = {"length": 64, "token_dim": LATENTS.codebook_embed_dim, "classes": 40, "buffer": 8}
_MAR |= {"steps": DIFFUSION_STEPS, "limit": TOKEN_LIMIT}
MAR_TARGET = MARConfig.even(192, 4, 6, head_depth=3, head_width=256, **_MAR)
MAR_DRAFT = MARConfig.even(96, 2, 3, head_depth=2, head_width=192, **_MAR)

MAR_CONFIGS: dict[str, Any] = {"kl": LATENTS, "mar": MAR_TARGET, "mar_draft": MAR_DRAFT}
