"""Tokenizers in the files of the official models, of as many entries as wanted: their special tokens by their official
names, and words."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors


def save_t5(folder: Path, words: Sequence[str], length: int) -> int:
    """tokenizer.json and tokenizer_config.json of T5; length: tokens of a prompt. Returns the number of entries."""
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁{w}", -2.0) for w in words), ("▁", -3.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "extra_ids": 0}
    named |= {"model_max_length": length, "tokenizer_class": "T5Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return len(vocabulary)


def chameleon_names(order: Sequence[int], sizes: int = 2) -> list[str]:
    """Chameleon's special tokens, whose image codes come in this order; sizes: how many size tokens follow."""
    codes = ["IMGIMG" + "".join(chr(ord("A") + int(d)) for d in str(code)) + "Z" for code in order]
    special = [*("<s>", "<pad>", "</s>", "<unk>"), *codes, "<eoss>", "<racm3:break>"]
    return [*special, *(f"<reserved{i:05d}>" for i in (8706, *range(8799, 8800 + sizes)))]


def save_chameleon(path: Path, names: Sequence[str], words: Sequence[str] = ("at",)) -> Tokenizer:
    """text_tokenizer.json of Chameleon: these names, then letters, which merge to the words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = dict.fromkeys((word[:i], word[i]) for word in words for i in range(1, len(word)))
    entries = dict.fromkeys([*names, *letters, *map("".join, merges)])
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(entries)}, list(merges)))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(list(names[:4]))
    tokenizer.add_tokens(list(names[4:]))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def save_words(path: Path, names: Sequence[str], special: int = 3) -> None:
    """tokenizer.json with whole words, <unk> among them; the first `special` ones are special tokens."""
    entries = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(entries, unk_token="<unk>"))  # noqa: S106 (no password)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(names[:special]))
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


def save_ranks(path: Path, words: Sequence[str]) -> None:
    """A .tiktoken file: every byte, and the beginnings of these words after a space."""
    texts = [f" {word}".encode() for word in words]
    tokens = dict.fromkeys([*(bytes([b]) for b in range(256)), *(t[:i] for t in texts for i in range(2, len(t) + 1))])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens)))


def padded(words: Sequence[str], count: int) -> list[str]:
    """The words, and as many more as make `count`."""
    return [*words, *(f"word{i}" for i in range(count - len(words)))]
