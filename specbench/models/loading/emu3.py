"""Emu3-Gen: a Llama with grouped heads and one vocabulary for text and images.

Facts: reference README (27) to (30) and the manifests of Emu3-Gen and Emu3-VisionTokenizer.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import math
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, pre_tokenizers
from torch import Tensor

from specbench.config.run_config import RunConfig
from specbench.errors import UsageError
from specbench.models import emu3_vision
from specbench.models.language import Grammar
from specbench.models.loading import image_tokenizers, official
from specbench.models.loading.bundle import shape_of
from specbench.models.loading.text_official import PIECES, find_file, hashed_ids, open_tokenizer
from specbench.models.loading.unified_official import Encode, Prompt, UnifiedModel
from specbench.models.pixels import truncated
from specbench.models.unified import ImageTokens, UnifiedConfig, image_tokens

FIRST_CODE = 151854
NEW_LINE, FRAME_END, IMAGE_END, SEQUENCE_END = 151846, 151847, 151853, 151850
AREA = 720 * 720  # pixels of an image
TEXT_IDS = 151643  # smaller ids are text

REDUCED = UnifiedConfig(32, 2, 2, 1, 64, FIRST_CODE + 64, rope_base=1e6)
REDUCED_CODES, REDUCED_SIDE = 64, 4  # codes of a reduced tokenizer, and per row of its image


def grid(area: int, ratio: str, patch: int) -> tuple[int, int]:
    """(rows, columns) of codes of an image of about `area` pixels. ratio: "width:height"; patch: pixels per side of a
    code."""
    width, height = (int(x) for x in ratio.split(":"))
    unit = math.sqrt(area / (width * height))
    return round(height * unit / patch), round(width * unit / patch)


def image(codes: Tensor, rows: int, columns: int) -> ImageTokens:
    """Rows of codes, each followed by a new line, then the ends of frame, image and sequence.

    The official constraint forces a new line at every position where a row would end, even after the image. This is
    visible in images of one or two columns (golden emu3_image_grammar).
    """
    tokens = image_tokens(codes, rows, columns, NEW_LINE, [FRAME_END, IMAGE_END, SEQUENCE_END])
    position = torch.arange(1, len(tokens.grammar) + 1)
    forced = torch.where(position % (columns + 1) == 0, len(codes), tokens.grammar.forced)
    return replace(tokens, grammar=Grammar(len(codes), forced))


@dataclass(frozen=True)
class Emu3Ids:
    """Special ids of Emu3's vocabulary in a prompt (manifest Emu3-Gen)."""

    pad: int = 151643
    bos: int = 151849
    img: int = 151851
    boi: int = 151852


def emu3_prompt(encode: Encode, prompt: str, rows: int, columns: int, suffix: str, negative: str) -> Prompt:
    """[bos] prompt + suffix [boi] "rows*columns" as text [img]. `negative`, in the same format without the suffix,
    replaces an unconditional prompt (manifest Emu3-Gen, reference README (28), (29)).

    rows, columns: numbers of codes, 90 and 90 for 720x720.
    """
    ids = Emu3Ids()
    frame = [ids.boi, *encode(f"{rows}*{columns}"), ids.img]
    return Prompt([ids.bos, *encode(prompt + suffix), *frame], [ids.bos, *encode(negative), *frame])


class Emu3Text:
    """Emu3's tokenizer: the official emu3.tiktoken (one base64 token and its rank per line), or a Hugging Face
    tokenizer.json. Text is first normalised to NFC, as in the official code."""

    def __init__(self, path: Path) -> None:
        """path: the file or its folder. Raises UsageError for another kind of file."""
        self.file = find_file(path, "emu3.tiktoken", "tokenizer.json")
        if self.file.suffix == ".json":
            tokenizer, _ = open_tokenizer(self.file)
            self._encode: Encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        else:
            self._encode = byte_pairs(read_ranks(self.file))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without begin and end tokens."""
        return self._encode(unicodedata.normalize("NFC", text))


def read_ranks(file: Path) -> dict[bytes, int]:
    """Token -> rank, which is its id, from a .tiktoken file. Raises UsageError with the line of a mistake."""
    ranks: dict[bytes, int] = {}
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError) as e:
        raise UsageError(f"{file} is not a readable .tiktoken file ({type(e).__name__}); fetch it again") from e
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            text, rank = line.split()
            token = base64.b64decode(text, validate=True)
            if token in ranks:
                raise ValueError
            ranks[token] = int(rank)
        except (ValueError, binascii.Error):
            raise UsageError(f"{file}, line {number}: not a new token and its rank; fetch the file again") from None
    if missing := [b for b in range(256) if bytes([b]) not in ranks]:
        raise UsageError(f"{file} has no token for the byte {missing[0]}; fetch it again")
    return ranks


def byte_pairs(ranks: Mapping[bytes, int]) -> Encode:
    """Byte-pair encoding from ranks: in a piece of text, the next two neighbours to merge are the pair whose union has
    the lowest rank."""
    cut = pre_tokenizers.Split(Regex(PIECES), "isolated")

    def merge(piece: bytes) -> list[int]:
        parts = [piece] if piece in ranks else [piece[i : i + 1] for i in range(len(piece))]
        while len(parts) > 1:
            unions = [ranks.get(a + b) for a, b in itertools.pairwise(parts)]
            if not (possible := [rank for rank in unions if rank is not None]):
                break
            i = unions.index(min(possible))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return [ranks[part] for part in parts]

    def encode(text: str) -> list[int]:
        return [i for piece, _ in cut.pre_tokenize_str(text) for i in merge(piece.encode())]

    return encode


class Emu3(UnifiedModel):
    pad = Emu3Ids.pad

    def read_text(self, cfg: RunConfig) -> None:
        self.text: Encode = lambda text: hashed_ids(text, 0, TEXT_IDS)
        if self.folder is None:
            values = emu3_vision.reduced(REDUCED_CODES) if self.reduced else emu3_vision.OFFICIAL
        else:
            values = official.config(self.part("tokenizer"))
            self.text = Emu3Text(self.part("target")).encode
        self.shape = emu3_vision.configured(values)
        patch = emu3_vision.downsample(self.shape)
        self.grid = (REDUCED_SIDE, REDUCED_SIDE) if self.reduced else grid(AREA, "1:1", patch)
        self.resolution = self.grid[0] * patch

    def read_networks(self) -> None:
        if self.folder is None:
            self.tokenizer = self.random(lambda: emu3_vision.Emu3Vision(self.shape), 2, torch.float32)
        else:
            source = official.open_source(self.part("tokenizer"))
            self.tokenizer = image_tokenizers.load_emu3_vision(self.shape, source, self.device, torch.float32)
        self.image = image(torch.arange(FIRST_CODE, FIRST_CODE + len(self.tokenizer.codebook())), *self.grid)
        self.target = self.loaded_target(REDUCED if self.reduced else shape_of(self.name, UnifiedConfig))

    def prompt(self, text: str) -> Prompt:
        return emu3_prompt(self.text, text, *self.grid, self.prompting.suffix, self.prompting.negative)

    def decode_image(self, codes: Tensor) -> np.ndarray:
        return truncated(self.tokenizer.decode(codes, self.grid))
