"""GLM-Image's autoregressive stage: a GLM-4 that writes a preview grid of codes, then the full grid. The diffusion
stage that reads them is not part of specbench.

Facts: huggingface/transformers@d8c1e284, src/transformers/models/glm_image (network, prompt, positions), and
huggingface/diffusers@3ecf89d0, src/diffusers/pipelines/glm_image/pipeline_glm_image.py (generated tokens). No id is
forbidden: all 16,512 ids of the head, 16,384 of them codes, compete at every position. The official code ends an image
at the model's end id and then fails; here, this id is an ordinary token. The token after the full grid is the end id;
the official code samples it and drops it.

The image tokenizer only has an encoder, a vision Transformer, which is not part of specbench. The image files of a run
show the tokens of the full grid, one pixel per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specbench.errors import UsageError
from specbench.models.language import Grammar
from specbench.models.loading import official
from specbench.models.loading.bundle import shape_of
from specbench.models.loading.naming import ParameterSlice
from specbench.models.loading.text_official import NamedText, hashed_ids
from specbench.models.loading.unified_official import Encode, Prompt, UnifiedModel
from specbench.models.unified import ImageTokens, UnifiedConfig
from specbench.storage import image_files

SIDE, PATCH, PREVIEW = 1024, 32, 16  # pixels per side of an image and of a code; codes per side of a square preview
CODES = 16384
CODEBOOK = "model.vqmodel.quantize.embedding.weight"
#: Number of grids in an image (see `harness.method.check`).
GRIDS = 2

#: Numbers of a head's pairs that time, row and column rotate: half of the pairs. These numbers and theta 10,000 are
#: from a third party's copy of the published config.json; a loaded file gives its own.
_GLM: dict[str, Any] = {"norms": "both", "qkv_bias": True, "rope_base": 10000.0, "norm_eps": 1e-5}


@dataclass(frozen=True)
class Vocabulary:
    """Ids of tokens. The first `codes` ids are codes; the head has the first `outputs` ids, which include `end`, the id
    after an image; ids from there to `text` are text; the input table has `size` ids. The other ids are special: a
    tokenizer, if any, gives the special ids of a prompt by their names."""

    codes: int = CODES
    outputs: int = 16512
    end: int = 16385
    text: int = 150000
    size: int = 168064
    image_start: int = 16384
    grid_start: int = 167845
    grid_end: int = 167846
    pad: int = 167841


PUBLISHED = Vocabulary()
REDUCED_VOCABULARY = Vocabulary(64, 72, 65, 200, 208, image_start=64, grid_start=200, grid_end=201, pad=202)
REDUCED_GRIDS = (2, 2), (4, 4)
REDUCED = UnifiedConfig(32, 2, 2, 1, 64, REDUCED_VOCABULARY.size, sections=(1, 1, 2), **_GLM)


def full(model: str) -> UnifiedConfig:
    """The network of the published size."""
    return shape_of(model, UnifiedConfig, vocab_size=PUBLISHED.size, sections=(8, 12, 12), **_GLM)


def grids(height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(rows, columns) of the preview and of the full grid, for an image of height x width pixels. The preview has about
    PREVIEW * PREVIEW codes and the image's aspect ratio."""
    rows, columns = height // PATCH, width // PATCH
    ratio = rows / columns
    return (int(PREVIEW * math.sqrt(ratio)), int(PREVIEW * math.sqrt(1 / ratio))), (rows, columns)


def image(preview: tuple[int, int], whole: tuple[int, int], vocabulary: Vocabulary = PUBLISHED) -> ImageTokens:
    """A preview grid of (rows, columns), the full grid `whole`, and the end. Both grids may have any id of the head."""
    free = math.prod(preview) + math.prod(whole)
    forced = torch.cat([torch.full((free,), -1), torch.tensor([vocabulary.end])])
    outputs = vocabulary.outputs
    return ImageTokens(torch.arange(outputs), Grammar(outputs, forced), whole[1], (preview, whole))


class GlmText(NamedText):
    """GLM-Image's tokenizer, tokenizer.json."""

    model = "GLM-Image"

    def special_ids(self) -> dict[str, int]:
        """The special ids of a prompt, by their names. Raises UsageError if one is missing."""
        return self.named({"image_start": "<|dit_token_16384|>", "grid_start": "<sop>", "grid_end": "<eop>"})


def glm_prompt(encode: Encode, prompt: str, tokens: ImageTokens, ids: Vocabulary) -> Prompt:
    """prompt [grid start] "H W" [grid end] [grid start] "h w" [grid end] [image start]; the full grid comes before the
    preview. The official code has no guidance in this stage; here, the unconditional prompt is the same without
    text."""
    frame = []
    for rows, columns in reversed(tokens.grids):
        frame += [ids.grid_start, *encode(f"{rows} {columns}"), ids.grid_end]
    frame.append(ids.image_start)
    return Prompt([*encode(prompt), *frame], frame)


class Codes(nn.Module):
    """The code vectors of a tokenizer whose decoder is not part of specbench."""

    def __init__(self, codes: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(codes, width)

    def codebook(self) -> Tensor:
        return self.embedding.weight


class GlmImage(UnifiedModel):
    tokenizer: Codes

    def __init__(self, cfg: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(cfg, device, dtype)
        self.ids = ids = REDUCED_VOCABULARY if self.reduced else PUBLISHED
        self.pad = ids.pad
        self.image = image(*(REDUCED_GRIDS if self.reduced else grids(SIDE, SIDE)), ids)
        self.resolution = self.image.width  # of the files: one pixel per token
        self.text = lambda text: hashed_ids(text, ids.outputs, ids.text)
        if self.folder is None:
            self.tokenizer = self.random(lambda: Codes(ids.codes, 16 if self.reduced else 2048), 2, torch.float32)
        else:
            source = official.open_source(self.part("target"))
            vectors = source.tensors[CODEBOOK].shape
            table = {CODEBOOK: ParameterSlice("embedding.weight")}
            self.tokenizer = official.load(lambda: Codes(*vectors), source, table, device, torch.float32, [".*"])
            text = GlmText(self.part("processor"))
            self.ids, self.text = replace(ids, **text.special_ids()), text.encode
        self.target = self.loaded_target(REDUCED if self.reduced else full(self.name))

    def prompt(self, text: str) -> Prompt:
        return glm_prompt(self.text, text, self.image, self.ids)

    def codes(self, images: Tensor) -> Tensor:
        raise UsageError(
            f"{self.name}'s image encoder is not part of specbench: train on tokens that the target draws (source=self)"
        )

    def decode_image(self, codes: Tensor) -> np.ndarray:
        """The tokens of the full grid as a map of codes (1, rows, columns, 3) uint8."""
        return image_files.code_map(self._full_grid(codes).cpu().numpy())

    def code_grid(self, tokens: Tensor) -> Tensor:
        """The codes without the preview."""
        return self._full_grid(tokens[:, self.image.grammar.free.to(tokens.device)])

    def _full_grid(self, codes: Tensor) -> Tensor:
        """The codes (B, rows, columns) of the full grid, which follow the preview's codes."""
        rows, columns = self.image.grids[-1]
        return codes[:, -rows * columns :].reshape(-1, rows, columns)


def tokens_of_image(cfg: Mapping[str, Any]) -> int:
    """Number of tokens of an image: both grids and the end. Loads nothing."""
    return sum(map(math.prod, grids(SIDE, SIDE))) + 1
