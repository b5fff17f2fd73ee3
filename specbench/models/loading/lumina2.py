"""Lumina-mGPT 2.0: the language model of Lumina-mGPT with another vocabulary, and MoVQGAN.

Facts: reference README_3 (49) to (57) and the manifests of Lumina-mGPT-2.0 and movqgan_270M.ckpt. The official sampler
changes the guidance scale at each step unless it is 4, which is the default here. Other scales are used unchanged here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specbench.config.run_config import RunConfig
from specbench.models import vq
from specbench.models.loading import official
from specbench.models.loading.bundle import shape_of
from specbench.models.loading.chameleon import IMAGE_NAMES, ChameleonIds, lumina_prompt
from specbench.models.loading.image_tokenizers import load_autoencoder
from specbench.models.loading.text_official import NamedText, hashed_ids
from specbench.models.loading.unified_official import Prompt, UnifiedModel
from specbench.models.pixels import to_uint8
from specbench.models.unified import ImageTokens, UnifiedConfig, image_tokens

PATCH, SIZE = 8, 768  # pixels per side of a code and of an image
FIRST_CODE, CODES = 155000, 16384
TEXT_IDS = 151643  # smaller ids are text
#: Used without a tokenizer. The ids of the image are from the manifest; the others are arbitrary.
IDS = ChameleonIds(
    bos=151643,
    pad=151643,
    image_end=151666,
    image_start=151665,
    end_of_turn=151664,
    new_line=151670,
    size=151671,
)

REDUCED = UnifiedConfig(32, 2, 2, 2, 64, FIRST_CODE + 64, qk_norm=1)
REDUCED_CODES, REDUCED_SIZE = 64, 32


class Lumina2Text(NamedText):
    """The tokenizer of Lumina-mGPT 2.0: tokenizer.json, and further names in the vocabulary_map of config.json."""

    model = "Lumina-mGPT 2.0"

    def __init__(self, folder: Path) -> None:
        """Raises UsageError for a folder of another model."""
        super().__init__(folder)
        self._names = {**official.config(folder).get("vocabulary_map", {}), **self._names}
        settings = official.json_object(folder / "tokenizer_config.json")
        first = settings.get("bos_token") or settings.get("eos_token")  # reference README_3 (57)
        self._first = str(first.get("content") if isinstance(first, dict) else first)

    def ids(self) -> ChameleonIds:
        """The special ids, by their names. Raises UsageError if one is missing."""
        return ChameleonIds(**self.named(IMAGE_NAMES | dict.fromkeys(("bos", "pad"), self._first)))


def image(codes: int, width: int, height: int, ids: ChameleonIds = IDS) -> ImageTokens:
    """The grammar after the size tokens: rows of codes, each followed by a new line, then the image's end. width and
    height are in pixels."""
    all_codes = torch.arange(FIRST_CODE, FIRST_CODE + codes)
    return image_tokens(all_codes, height // PATCH, width // PATCH, ids.new_line, [ids.image_end])


class Lumina2(UnifiedModel):
    tokenizer: vq.VQModel

    def read_text(self, cfg: RunConfig) -> None:
        self.resolution = REDUCED_SIZE if self.reduced else SIZE
        self.ids, self.text = IDS, lambda text: hashed_ids(text, 0, TEXT_IDS)
        if self.folder is not None:
            text = Lumina2Text(self.part("target"))
            self.ids, self.text = text.ids(), text.encode
        self.pad = self.ids.pad

    def read_networks(self) -> None:
        if self.folder is None:
            self.tokenizer = self.random_pixels(vq.MOVQGAN, REDUCED_CODES)
        else:
            file = self.part("tokenizer") / "movqgan_270M.ckpt"
            self.tokenizer = load_autoencoder(vq.VQModel, vq.MOVQGAN, file, self.device, llamagen=False)
        self.image = image(self.tokenizer.cfg.codebook_size, self.resolution, self.resolution, self.ids)
        self.target = self.loaded_target(REDUCED if self.reduced else shape_of(self.name, UnifiedConfig))

    def prompt(self, text: str) -> Prompt:
        return lumina_prompt(self.text, text, self.resolution, self.resolution, self.prompting.instruction, self.ids)

    def decode_image(self, codes: Tensor) -> np.ndarray:
        return to_uint8(self.tokenizer.decode(codes))


def tokens_of_image(cfg: RunConfig) -> int:
    """Number of tokens of an image: rows of codes, each with a new line, and the image's end. Loads nothing."""
    side = SIZE // PATCH
    return side * (side + 1) + 1
