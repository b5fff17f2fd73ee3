"""Lumina-mGPT and Anole: Chameleon, a Llama with norms on queries and keys and one vocabulary for text and images.

Facts: reference README (19) to (26) and the manifests of Lumina-mGPT-7B-768, Anole-7b-v0.1-hf and chameleon_vqgan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specbench.config.run_config import RunConfig
from specbench.errors import UsageError
from specbench.models import vq
from specbench.models.loading.bundle import shape_of
from specbench.models.loading.image_tokenizers import load_autoencoder
from specbench.models.loading.text_official import NamedText, hashed_ids
from specbench.models.loading.unified_official import Encode, Prompt, UnifiedModel
from specbench.models.unified import ImageTokens, UnifiedConfig, image_tokens

PATCH = 16  # pixels per side of a code
FIRST_CODE = 4  # without a tokenizer
ANOLE_SIZE = 512

REDUCED = UnifiedConfig(64, 2, 2, 2, 96, 9216, qk_norm=1)
REDUCED_CODES, REDUCED_SIZE = 64, 64


@dataclass(frozen=True)
class ChameleonIds:
    """Special ids of Chameleon's vocabulary (reference README (21)). A side of p pixels is the id size + p / 32."""

    bos: int = 0
    pad: int = 1
    image_end: int = 8196
    image_start: int = 8197
    end_of_turn: int = 8710
    new_line: int = 8803
    size: int = 8804


IDS = ChameleonIds()
#: The names of the special tokens of an image, and of text.
IMAGE_NAMES = {
    "image_end": "<eoss>",
    "image_start": "<racm3:break>",
    "end_of_turn": "<reserved08706>",
    "new_line": "<reserved08799>",
    "size": "<reserved08800>",
}
TEXT_NAMES = {"bos": "<s>", "pad": "<pad>"}


class ChameleonText(NamedText):
    """Chameleon's tokenizer: text_tokenizer.json of Meta's release, or tokenizer.json of a Hugging Face folder."""

    model, files = "Chameleon", ("text_tokenizer.json", "tokenizer.json")

    def ids(self) -> ChameleonIds:
        """The special ids, by their names. Raises UsageError if one is missing."""
        return ChameleonIds(**self.named(TEXT_NAMES | IMAGE_NAMES))

    def codes(self, count: int | None = None) -> Tensor:
        """The vocabulary id of each code of the pixel tokenizer, (C,) int64, by the token's name: IMGIMG, the code's
        digits as letters A to J, Z (reference README (22)).

        Raises UsageError if a code is missing or occurs twice, or if there are not `count` codes.
        """
        ids: dict[int, int] = {}
        for name, i in self._names.items():
            if match := re.fullmatch(r"IMGIMG([A-J]{1,9})Z", name):
                code = int("".join(str(ord(letter) - ord("A")) for letter in match[1]))
                if code in ids:
                    raise UsageError(f"{self.file} names the image code {code} twice; fetch it again")
                ids[code] = i
        expected = len(ids) if count is None else count
        missing = next((code for code in range(expected) if code not in ids), None)
        if missing is not None or not ids:
            raise UsageError(f"{self.file} has no token for the image code {missing or 0}: it is not Chameleon's")
        if len(ids) != expected:
            raise UsageError(f"{self.file} has {len(ids)} image codes, and the pixel tokenizer {expected}")
        if len(set(ids.values())) < len(ids):
            raise UsageError(f"{self.file} gives two image codes one id; fetch it again")
        return torch.tensor([ids[code] for code in range(expected)])


def lumina_prompt(
    encode: Encode,
    prompt: str,
    width: int,
    height: int,
    instruction: str,
    ids: ChameleonIds = IDS,
    unconditional: str = "header",
) -> Prompt:
    """Lumina-mGPT: [bos] instruction [end_of_turn] [image start, height, width]. The unconditional prompt is the last
    three (reference README (21), (24)) or, with unconditional="prompt_end", the last four, as in SJD's released code.

    `instruction` contains {width}, {height} and {prompt}. width and height are pixels, multiples of 32.
    """
    for name, side in (("width", width), ("height", height)):
        if side < 32 or side % 32:
            raise UsageError(f"Lumina-mGPT draws sides of 32, 64, 96, ... pixels: {name} cannot be {side}")
    text = instruction.replace("{width}", str(width)).replace("{height}", str(height)).replace("{prompt}", prompt)
    start = [ids.image_start, ids.size + height // 32, ids.size + width // 32]
    without = [ids.end_of_turn, *start] if unconditional == "prompt_end" else start
    return Prompt([ids.bos, *encode(text), ids.end_of_turn, *start], without)


def anole_prompt(encode: Encode, prompt: str, ids: ChameleonIds = IDS) -> Prompt:
    """Anole: [bos] prompt [end_of_turn, image start]; the unconditional prompt is [bos, image start] (reference README
    (24))."""
    return Prompt([ids.bos, *encode(prompt), ids.end_of_turn, ids.image_start], [ids.bos, ids.image_start])


def lumina_image(codes: Tensor, width: int, height: int, ids: ChameleonIds = IDS) -> ImageTokens:
    """The grammar after the size tokens: rows of codes, each followed by a new line, then the image's end."""
    return image_tokens(codes, height // PATCH, width // PATCH, ids.new_line, [ids.image_end])


def anole_image(codes: Tensor, side: int, ids: ChameleonIds = IDS) -> ImageTokens:
    """A square of codes, then the image's end."""
    return image_tokens(codes, side // PATCH, side // PATCH, None, [ids.image_end])


class Chameleon(UnifiedModel):
    tokenizer: vq.VQModel

    def read_text(self, cfg: RunConfig) -> None:
        self.lumina = "instruction" in cfg
        size = cfg.size or ANOLE_SIZE
        self.resolution = REDUCED_SIZE if self.reduced else size
        published = shape_of(self.name, UnifiedConfig)
        # Anole's norms have one row per head.
        small = replace(REDUCED, qk_norm=1 if published.qk_norm == 1 else REDUCED.n_head)
        self.shape = small if self.reduced else published
        self.text: ChameleonText | None = None
        self.ids, self.encode_text = IDS, lambda text: hashed_ids(text, IDS.size, self.shape.vocab_size)
        if self.folder is not None:
            self.text = ChameleonText(self.part("tokenizer"))
            self.ids, self.encode_text = self.text.ids(), self.text.encode
        self.pad = self.ids.pad

    def read_networks(self) -> None:
        if self.text is None:
            self.tokenizer = self.random_pixels(vq.CHAMELEON, REDUCED_CODES)
            codes = torch.arange(FIRST_CODE, FIRST_CODE + self.tokenizer.cfg.codebook_size)
        else:
            file = self.part("tokenizer") / "vqgan.ckpt"
            self.tokenizer = load_autoencoder(vq.VQModel, vq.CHAMELEON, file, self.device, llamagen=False)
            codes = self.text.codes(self.tokenizer.cfg.codebook_size)
        side = self.resolution
        self.image = lumina_image(codes, side, side, self.ids) if self.lumina else anole_image(codes, side, self.ids)
        self.target = self.loaded_target(self.shape)

    def prompt(self, text: str) -> Prompt:
        if not self.lumina:
            return anole_prompt(self.encode_text, text, self.ids)
        side = self.resolution
        instruction, unconditional = self.prompting.instruction, self.prompting.unconditional
        return lumina_prompt(self.encode_text, text, side, side, instruction, self.ids, unconditional)


def tokens_of_image(cfg: RunConfig) -> int:
    """Number of tokens of an image: rows of codes, each with a new line, and the image's end. Loads nothing."""
    side = (cfg.size or ANOLE_SIZE) // PATCH
    return side * (side + 1) + 1
