"""A small Qwen3-VL with random weights in the layout of the published folder, in float32, and a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_modern_features import randomise
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specbench.metrics import qwen3_vl

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
MERGES = (("Y", "e"), ("y", "e"), ("n", "o"), ("ye", "s"))  # of the 256 bytes, into further tokens
NO, YES = 256 + 2, 256 + 3
IMAGE = 256 + len(MERGES) + 4
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 256 + len(MERGES) + len(SPECIAL),
    "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True},
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 16,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip


def make(weights: Path) -> Path:
    """Makes the VQA model's folder in the folder of metrics' weights."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    folder = weights / qwen3_vl.FOLDER
    folder.mkdir(parents=True)
    config = Qwen3VLConfig(text_config=TEXT, vision_config=VISION, image_token_id=IMAGE)
    torch.manual_seed(0)
    network = Qwen3VLForConditionalGeneration(config)
    tensors = {name: 2 * x for name, x in randomise(network.state_dict()).items()}
    tensors["lm_head.weight"] /= 4
    tensors["lm_head.weight"][YES] *= 4  # the most probable answer is mostly yes or no
    tensors["lm_head.weight"][NO] = -tensors["lm_head.weight"][YES]
    network.load_state_dict(tensors)
    network.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, *map("".join, MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / qwen3_vl.TOKENIZER))
    return folder


@pytest.fixture
def vqa_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of weights with the small VQA model, which reads images of 64 x 64 without resizing."""
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(qwen3_vl, "LEAST", 32**2)
    make(tmp_path / "weights")
    return tmp_path / "weights"
