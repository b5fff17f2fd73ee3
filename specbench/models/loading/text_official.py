"""Text inputs of the official models: Flan-T5 features for LlamaGen, and the tokenizers of the other models.

Sources of the facts: the reference README, by its numbers, manifests/ and prompt_formats.json. Fixed wordings (an
instruction, a quality suffix, a negative prompt) are settings, which are passed as arguments.

No code in a tokenizer's file is executed, and a user's text never becomes a special token.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor

from specbench.errors import UsageError
from specbench.models.loading import official
from specbench.models.loading.naming import ParameterSlice

#: Parameters of Flan-T5-XL's encoder (its config.json): the table of 32,128 words, 24 layers of four 2048 x 2048
#: matrices of attention, three of 2048 x 5120 and two norms, the biases of 32 positions by 32 heads, and a norm.
T5_XL = 32128 * 2048 + 24 * (4 * 2048**2 + 3 * 2048 * 5120 + 2 * 2048) + 32 * 32 + 2048


#: Names of its table of words, and of the tensors that a file has in addition to the encoder.
_T5_SHARED = ("shared.weight", "encoder.embed_tokens.weight")
_T5_IGNORED = (r"decoder\..*", r"lm_head\.weight", *map(re.escape, _T5_SHARED))


def clean(caption: str) -> str:
    """Cleans a caption written by a person, as in the training of LlamaGen's encoder.

    Like the official cleaning (language/t5.py, called twice there), it decodes %xx, + and HTML entities, lower-cases,
    drops tags, and uses one kind of dash and of quotation mark. It replaces signs such as brackets, & and / by a space,
    adds a space after a comma or a full stop inside a word, drops sizes such as 2x2 and numbers such as #41, and
    collapses white space. It omits the rules for web advertising (addresses, file names, article numbers, shipping,
    ...), the repair of broken Unicode and the removal of Chinese characters.
    """
    for _ in range(2):
        caption = html.unescape(re.sub(r"<[^<>]*>", "", unquote_plus(caption).strip().lower()))
        caption = "".join("-" if unicodedata.category(c) == "Pd" else c for c in caption)
        caption = re.sub(r"[`´«»“”¨]", '"', re.sub("-+", "-", caption)).translate({0x2018: "'", 0x2019: "'"})
        caption = re.sub(r"[\"']{2,}", '"', re.sub(r"\.{2,}", " ", caption))
        caption = re.sub(r"[#®•©™&@·º½¾¿¡§~()\[\]{}|\\/*]+", " ", re.sub(r"#\d{1,3}\b", "", caption))
        caption = re.sub(r"\s+\.\s+", " ", caption)
        if len(re.findall("[-_]", caption)) > 3:
            caption = re.sub("[-_]", " ", caption)
        caption = re.sub(r"\b\d+(\.\d*)?[xх×]\d+(\.\d*)?\b", "", caption.strip())
        caption = re.sub(r"(?<=\D)[,.](?=\w)", r"\g<0> ", re.sub(r"(?<=\w)\s+:\s+", ": ", caption))
        caption = re.sub(r"\s+", " ", caption)
        caption = re.sub(r"^[\"'](.+)[\"']$", r"\1", caption)
        caption = re.sub(r"[-'_,:+]$", "", re.sub(r"^[-'_,:;]", "", caption)).strip()
    return caption


def left_pad(features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Moves the valid part of each row to the end and zeroes the rest (reference README (4)).

    features (N, T, D), padded on the right; mask (N, T), nonzero where valid -> features (N, T, D), valid (N, T) bool.
    """
    positions = features.shape[1]
    source = torch.arange(positions, device=features.device) - (positions - mask.long().sum(1, keepdim=True))
    valid = source >= 0
    moved = features.gather(1, source.clamp_min(0).unsqueeze(-1).expand_as(features))
    return moved.masked_fill(~valid.unsqueeze(-1), 0), valid


class T5Features:
    """Flan-T5-XL's encoder, from a folder with config.json, tokenizer.json and weights, as LlamaGen's prompts need it.

    A prompt is encoded separately and without padding, so its features do not depend on the rest of the batch. Up to
    rounding, they equal the features of the official padded call, which masks padding.
    """

    def __init__(self, folder: Path, device: torch.device | str, dtype: torch.dtype, tokens: int = 120) -> None:
        """tokens: the length of LlamaGen's text prefix. Raises UsageError for a folder that is not such a model."""
        for name in ("config.json", "tokenizer.json"):
            if not (folder / name).is_file():
                raise UsageError(f"{folder} has no {name}: put the files of google/flan-t5-xl there")
        from transformers import AutoTokenizer, T5Config, T5EncoderModel

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            cfg = T5Config.from_dict(official.config(folder))
            with official.shapes_only():
                names = T5EncoderModel(cfg).state_dict()
        except UsageError:
            raise
        except Exception as e:  # for a broken file, the libraries raise many types
            reason = str(e).strip().partition("\n")[0] or type(e).__name__
            raise UsageError(f"{folder} is not a readable T5 model ({reason}); fetch it again") from e
        source = official.open_source(folder)
        shared = next((name for name in _T5_SHARED if name in source.tensors), _T5_SHARED[0])
        table = {name: ParameterSlice(name) for name in names if name not in _T5_SHARED or name == shared}
        # T5 was trained in bfloat16, and its states exceed the range of float16.
        kind = torch.bfloat16 if dtype == torch.float16 else dtype
        self.tokens, self.dim, self.device = tokens, int(cfg.d_model), torch.device(device)
        self._model = official.load(lambda: T5EncoderModel(cfg), source, table, self.device, kind, _T5_IGNORED)

    def _ids(self, prompt: str) -> list[int]:
        ids: list[int] = self._tokenizer(clean(prompt), verbose=False).input_ids
        return ids

    def unread(self, prompt: str) -> int:
        """The number of tokens at the end of a prompt that are cut off."""
        return max(0, len(self._ids(prompt)) - self.tokens)

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """N prompts -> features (N, tokens, dim) of the model's dtype, and valid (N, tokens) bool, padded on the left.

        A prompt of more than `tokens` tokens is cut off (see `unread`).
        """
        features = torch.zeros(len(prompts), self.tokens, self.dim, dtype=self._model.dtype, device=self.device)
        mask = torch.zeros(len(prompts), self.tokens, dtype=torch.bool, device=self.device)
        for row, prompt in enumerate(prompts):
            ids = self._ids(prompt)
            if len(ids) > self.tokens:
                ids = [*ids[: self.tokens - 1], ids[-1]]  # keeps the end of sequence
            states = self._model(input_ids=torch.tensor([ids], device=self.device)).last_hidden_state[0]
            features[row, : len(ids)], mask[row, : len(ids)] = states, True
        return left_pad(features, mask)


def find_file(path: Path, *names: str) -> Path:
    """The file `path`, or the first of `names` in the folder `path`."""
    file = path if path.is_file() else next((path / name for name in names if (path / name).is_file()), None)
    if file is None:
        raise UsageError(f"{path} holds no tokenizer: put {' or '.join(names)} there")
    return file


#: How Emu3 (like Qwen, whose vocabulary it uses) cuts text into pieces, which are then merged separately.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def open_tokenizer(file: Path) -> tuple[Tokenizer, dict[str, int]]:
    """A tokenizer of plain text, and token name -> id, from tokenizer.json, or from Qwen's older vocab.json with
    merges.txt and added_tokens.json in the same folder.

    The special tokens of the file are only in the names: they are not in the tokenizer, so text cannot contain one.
    """
    try:
        if file.name == "vocab.json":
            return _open_byte_level(file)
        content = json.loads(file.read_text(encoding="utf-8"))
        ids = {**content["model"]["vocab"], **{t["content"]: t["id"] for t in content.get("added_tokens") or ()}}
        if not all(isinstance(i, int) for i in ids.values()):
            raise ValueError("an id is not an integer")
        plain = content | dict.fromkeys(("post_processor", "truncation", "padding")) | {"added_tokens": []}
        return Tokenizer.from_str(json.dumps(plain)), ids
    except Exception as e:  # the tokenizers library raises plain Exceptions
        raise UsageError(f"{file} is not a readable tokenizer ({type(e).__name__}: {e}); fetch it again") from e


def _open_byte_level(file: Path) -> tuple[Tokenizer, dict[str, int]]:
    ids: dict[str, int] = json.loads(file.read_text(encoding="utf-8"))
    added: dict[str, int] = json.loads((file.parent / "added_tokens.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer(models.BPE.from_file(str(file), str(file.parent / "merges.txt")))
    cut = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer, {**ids, **added}


class NamedText:
    """A tokenizer of plain text, whose special tokens have names. model: the model's name, in messages."""

    model: str
    files: tuple[str, ...] = ("tokenizer.json",)

    def __init__(self, path: Path) -> None:
        """path: one of `files`, or the folder of one. Raises UsageError for another kind of file."""
        self.file = find_file(path, *self.files)
        self._tokenizer, self._names = open_tokenizer(self.file)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without begin and end tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def named(self, names: Mapping[str, str]) -> dict[str, int]:
        """Maps field -> name of a special token to field -> id. Raises UsageError if a name is missing."""
        if missing := [name for name in names.values() if name not in self._names]:
            raise UsageError(f"{self.file} has no token {missing[0]}: it is not {self.model}'s tokenizer")
        return {field: self._names[name] for field, name in names.items()}


def _hash(*words: Any) -> int:
    """63 bits, which are the same for the same words on all machines."""
    return int.from_bytes(hashlib.blake2b("\n".join(map(str, words)).encode(), digest_size=8).digest()) >> 1


def hashed_ids(text: str, low: int, high: int) -> list[int]:
    """One id in [low, high) per word, by a hash of the word. For weights=random, which are not trained: only the
    equality of words and the length of prompts matter."""
    return [low + _hash(word) % (high - low) for word in text.split()]


def hashed_features(prompts: Sequence[str], tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """Random features in the shape of T5Features: normal numbers, seeded by a hash of the prompt. A prompt has one more
    valid position than words.

    For weights=random, which are not trained. N prompts -> features (N, tokens, dim) float32 on the CPU, and valid
    (N, tokens) bool, padded on the left.
    """
    features = torch.zeros(len(prompts), tokens, dim)
    valid = torch.zeros(len(prompts), tokens, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        count = min(len(prompt.split()) + 1, tokens)
        generator = torch.Generator().manual_seed(_hash("features", prompt))
        features[row, tokens - count :] = torch.randn(count, dim, generator=generator)
        valid[row, tokens - count :] = True
    return features, valid
