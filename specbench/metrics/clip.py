"""CLIP in transformers' layout: the networks of files that hold a CLIPModel, such as OpenAI's on the hub.

A network is built from the sizes here, not from a config.json, and filled with the file's tensors by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, CLIPVisionConfig, CLIPVisionModelWithProjection

from specbench.metrics import weights
from specbench.models.loading import official

#: OpenAI's tower for images of ViT-L/14 at 336 pixels.
L14_336: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "hidden_act": "quick_gelu",
    "projection_dim": 768,
}
#: Both towers of OpenAI's ViT-L/14 at 224 pixels.
L14: dict[str, Any] = {
    "vision_config": {**L14_336, "image_size": 224},
    "text_config": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_act": "quick_gelu",
        "eos_token_id": 49407,
    },
    "projection_dim": 768,
}
#: Both towers of LAION's ViT-H/14.
H14: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
        "hidden_act": "gelu",
    },
    "text_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "hidden_act": "gelu",
        "eos_token_id": 49407,
    },
    "projection_dim": 1024,
}
#: What such a file holds and a tower for images does not need: the tower for text, and positions that are counted.
_TEXT = [r"text_model\..*", r"text_projection\.weight", "logit_scale"]
_COUNTED = [r".*\.position_ids"]


def load_image_tower(
    path: Path, device: str, settings: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """CLIPVisionModelWithProjection of a file. Raises UsageError for a file with other tensors."""
    config = CLIPVisionConfig(**(settings or L14_336))
    return _load(lambda: CLIPVisionModelWithProjection(config), path, device, _TEXT, dtype)


def load_both(path: Path, device: str, settings: dict[str, Any] | None = None) -> nn.Module:
    """CLIPModel of a file, in float32. Raises UsageError for a file with other tensors."""
    config = CLIPConfig(**(settings or H14))
    return _load(lambda: CLIPModel(config), path, device, [])


def _load(
    build: Callable[[], nn.Module],
    path: Path,
    device: str,
    ignored: Sequence[str],
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    def counted() -> nn.Module:
        network = build()
        for part in network.modules():  # lists of positions, which are in no file
            if (old := part._buffers.get("position_ids")) is not None:
                with torch.device("cpu"):
                    part.register_buffer("position_ids", torch.arange(old.shape[-1])[None], persistent=False)
        return network

    return official.load_by_name(counted, official.open_source(path), device, dtype, [*ignored, *_COUNTED])


class CLIPCaptions:
    """CLIP's tokens as transformers' fast tokenizer computes them, from open_clip's copy of OpenAI's vocabulary.

    open_clip itself first repairs a caption (ftfy: “ becomes ") and unescapes HTML, which transformers does not.
    """

    LENGTH = 77

    def __init__(self) -> None:
        from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

        theirs = weights.package("open_clip").SimpleTokenizer()
        vocabulary = dict(theirs.encoder)
        start, end = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]  # the marks of a caption's ends come last
        merges = sorted(theirs.bpe_ranks, key=theirs.bpe_ranks.__getitem__)
        found = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, end_of_word_suffix="</w>", unk_token=end))
        found.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
        )
        pattern = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
        found.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        found.post_processor = processors.RobertaProcessing(
            (end, vocabulary[end]), (start, vocabulary[start]), trim_offsets=False, add_prefix_space=False
        )
        found.enable_truncation(self.LENGTH)
        found.enable_padding(length=self.LENGTH, pad_id=vocabulary[end], pad_token=end)
        self._tokenizer = found

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """N captions -> ids (N, 77) int64. A longer caption is cut before the mark of its end."""
        return torch.tensor([one.ids for one in self._tokenizer.encode_batch(list(captions))])

    def too_long(self, captions: Sequence[str]) -> int:
        """How many captions lose their end."""
        return sum(bool(one.overflowing) for one in self._tokenizer.encode_batch(list(captions)))


@cache
def captions() -> CLIPCaptions:
    """The tokenizer, made once."""
    return CLIPCaptions()
