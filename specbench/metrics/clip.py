"""CLIP in transformers' layout, for files that store a CLIPModel, such as OpenAI's on the Hugging Face hub.

A network is built from the sizes below, not from a config.json, and filled with the file's tensors by name.
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
#: Tensors of such a file that an image tower does not need: the text tower, and lists of positions.
_TEXT = [r"text_model\..*", r"text_projection\.weight", "logit_scale"]
_COUNTED = [r".*\.position_ids"]


def load_image_tower(path: Path, device: str, settings: dict[str, Any] | None = None) -> nn.Module:
    """The CLIPVisionModelWithProjection of a file, in float32. Raises UsageError for a file with other tensors."""
    config = CLIPVisionConfig(**(settings or L14_336))
    return _load(lambda: CLIPVisionModelWithProjection(config), path, device, _TEXT)


def load_both(path: Path, device: str, settings: dict[str, Any] | None = None) -> nn.Module:
    """The CLIPModel of a file, in float32. Raises UsageError for a file with other tensors."""
    config = CLIPConfig(**(settings or H14))
    return _load(lambda: CLIPModel(config), path, device, [])


def _load(build: Callable[[], nn.Module], path: Path, device: str, ignored: Sequence[str]) -> nn.Module:
    def counted() -> nn.Module:
        network = build()
        for part in network.modules():  # lists of positions, which no file stores
            if (old := part._buffers.get("position_ids")) is not None:
                with torch.device("cpu"):
                    part.register_buffer("position_ids", torch.arange(old.shape[-1])[None], persistent=False)
        return network

    return official.load(counted, official.open_source(path), None, device, torch.float32, [*ignored, *_COUNTED])


class CLIPCaptions:
    """CLIP's tokens as transformers' fast tokenizer computes them, from open_clip's copy of OpenAI's vocabulary.

    open_clip first repairs a caption (ftfy: “ becomes ") and unescapes HTML; transformers does not.
    """

    LENGTH = 77

    def __init__(self) -> None:
        from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

        open_clip_tokenizer = weights.package("open_clip").SimpleTokenizer()
        vocabulary = dict(open_clip_tokenizer.encoder)
        start, end = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]  # the start and end tokens come last
        merges = sorted(open_clip_tokenizer.bpe_ranks, key=open_clip_tokenizer.bpe_ranks.__getitem__)
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, end_of_word_suffix="</w>", unk_token=end))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
        )
        pattern = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.post_processor = processors.RobertaProcessing(
            (end, vocabulary[end]), (start, vocabulary[start]), trim_offsets=False, add_prefix_space=False
        )
        tokenizer.enable_truncation(self.LENGTH)
        tokenizer.enable_padding(length=self.LENGTH, pad_id=vocabulary[end], pad_token=end)
        self._tokenizer = tokenizer

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """N captions -> ids (N, 77) int64. A longer caption is cut off and keeps its end token."""
        return torch.tensor([encoded.ids for encoded in self._tokenizer.encode_batch(list(captions))])

    def too_long(self, captions: Sequence[str]) -> int:
        """How many captions are cut off."""
        return sum(bool(encoded.overflowing) for encoded in self._tokenizer.encode_batch(list(captions)))


@cache
def captions() -> CLIPCaptions:
    """The tokenizer, built once."""
    return CLIPCaptions()
