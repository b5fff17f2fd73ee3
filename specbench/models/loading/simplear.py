"""SimpleAR: a Qwen2 with one vocabulary for text and images, and the Cosmos tokenizer.

The official code has no grammar: ids of text compete at every position of an image and decode as code 0. Here, they are
tokens after the codes. Facts: reference README_3 (58) to (68) and the manifests of SimpleAR. The official plain sampler
mixes log-probabilities; here, logits are mixed. Both differ by a constant per row, so the distributions are the same.
It also ends an image at the model's end id and then fails; here, this id is an ordinary text id.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specbench.config.run_config import RunConfig
from specbench.models.cosmos import COSMOS, Cosmos
from specbench.models.language import Grammar
from specbench.models.loading.bundle import shape_of
from specbench.models.loading.image_tokenizers import load_cosmos
from specbench.models.loading.text_official import NamedText, hashed_ids
from specbench.models.loading.unified_official import Encode, Prompt, UnifiedModel
from specbench.models.pixels import to_uint8
from specbench.models.unified import ImageTokens, UnifiedConfig

SIDE = 64  # codes per side of an image of 1024 x 1024 pixels
TEXT_IDS = 151672  # ids of the tokenizer; the last seven are special

_QWEN = {"rope_base": 1e6, "norm_eps": 1e-6, "qkv_bias": True}
REDUCED_SIDE, REDUCED_TEXT_IDS = 4, 40
REDUCED_COSMOS = COSMOS.reduced([2] * 6)
REDUCED = UnifiedConfig(32, 2, 2, 1, 64, REDUCED_TEXT_IDS + REDUCED_COSMOS.codebook_size, **_QWEN)  # type: ignore[arg-type]


def full(model: str) -> UnifiedConfig:
    """The network of a published size."""
    return shape_of(model, UnifiedConfig, vocab_size=TEXT_IDS + COSMOS.codebook_size, **_QWEN)


@dataclass(frozen=True)
class SimpleARIds:
    """Special ids of SimpleAR's vocabulary in a prompt (manifest SimpleAR-0.5B)."""

    text_to_image: int = 151665
    image_start: int = 151667


class SimpleARText(NamedText):
    """SimpleAR's tokenizer, which is Qwen2.5's with seven more tokens: tokenizer.json, or vocab.json, merges.txt and
    added_tokens.json."""

    model, files = "SimpleAR", ("tokenizer.json", "vocab.json")

    def __len__(self) -> int:
        """The number of ids; the first code of an image has the next id."""
        return len(self._names)

    def ids(self) -> SimpleARIds:
        """The special ids, by their names. Raises UsageError if one is missing."""
        return SimpleARIds(**self.named({"text_to_image": "<|t2i|>", "image_start": "<|soi|>"}))


def simplear_prompt(encode: Encode, prompt: str, instruction: str, negative: str, ids: SimpleARIds) -> Prompt:
    """[text to image] instruction [image start]. `negative`, in the same format, replaces an unconditional prompt
    (reference README_3 (61)). `instruction` contains {prompt}."""

    def framed(text: str) -> list[int]:
        return [ids.text_to_image, *encode(text), ids.image_start]

    return Prompt(framed(instruction.replace("{prompt}", prompt)), framed(negative))


def image(text_ids: int, codes: int, side: int) -> ImageTokens:
    """A square of tokens, which may have any id. Tokens are numbered with the codes first, then the ids of text."""
    ids = torch.cat([torch.arange(text_ids, text_ids + codes), torch.arange(text_ids)])
    return ImageTokens(ids, Grammar(len(ids), torch.full((side * side,), -1)), side)


def image_codes(tokens: Tensor, codes: int) -> Tensor:
    """The codes of tokens (...) of `image`. Ids of text become code 0, as in the official code."""
    return torch.where(tokens < codes, tokens, 0)


class SimpleAR(UnifiedModel):
    tokenizer: Cosmos
    pad = 0

    def read_text(self, cfg: RunConfig) -> None:
        if self.folder is None:
            self.text_ids = count = REDUCED_TEXT_IDS if self.reduced else TEXT_IDS
            self.ids, self.text = SimpleARIds(count - 7, count - 5), lambda t: hashed_ids(t, 0, count - 7)
        else:
            text = SimpleARText(self.part("target"))
            self.text_ids, self.ids, self.text = len(text), text.ids(), text.encode

    def read_networks(self) -> None:
        shape, side = (REDUCED_COSMOS, REDUCED_SIDE) if self.reduced else (COSMOS, SIDE)
        if self.folder is None:
            self.tokenizer = self.random(lambda: Cosmos(shape), 2, torch.float32)
        else:
            self.tokenizer = load_cosmos(shape, self.part("tokenizer"), self.device)
        self.image = image(self.text_ids, shape.codebook_size, side)
        self.target = self.loaded_target(REDUCED if self.reduced else full(self.name))
        self.resolution = side * self.tokenizer.cfg.downsample

    def prompt(self, text: str) -> Prompt:
        return simplear_prompt(self.text, text, self.prompting.instruction, self.prompting.negative, self.ids)

    def decode_image(self, codes: Tensor) -> np.ndarray:
        return to_uint8(self.tokenizer.decode(image_codes(codes, self.tokenizer.cfg.codebook_size)))


def tokens_of_image(cfg: RunConfig) -> int:
    """Number of tokens of an image. Loads nothing."""
    return SIDE * SIDE
