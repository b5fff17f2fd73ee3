"""HPS v3's network, its sequence of tokens and its images, with small random weights of the same layout."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from test_modern_features import randomise
from test_preference import ITEMS, PROMPTS, outputs, pictures
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from specbench import metrics
from specbench.errors import UsageError
from specbench.metrics import hpsv3_network, preparation, qwen3_vl
from specbench.metrics.base import ScoringContext

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
TEXT: dict[str, Any] = {
    **hpsv3_network.TEXT,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256 + len(SPECIAL) + 1,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
}
VISION: dict[str, Any] = {**hpsv3_network.VISION, "depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the weights of a small HPS v3 in float32 and a byte tokenizer."""
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(hpsv3_network, "TEXT", TEXT)
    monkeypatch.setattr(hpsv3_network, "VISION", VISION)
    monkeypatch.setattr(hpsv3_network, "PIXELS", 6 * 28**2)
    load = hpsv3_network.load
    monkeypatch.setattr(hpsv3_network, "load", lambda path, device, image: load(path, device, image, torch.float32))
    (tmp_path / "hpsv3" / "text").mkdir(parents=True)
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(tmp_path / "hpsv3" / "text" / "tokenizer.json"))
    network = hpsv3_network.HPSv3Network(hpsv3_network.settings(TEXT, VISION, 260))
    weights = randomise(network.state_dict())
    names = {ours.name: official for official, ours in hpsv3_network.table(network.model).items()}
    file = {names.get(name.removeprefix("model."), name): tensor for name, tensor in weights.items()}
    file["lm_head.weight"] = torch.zeros(TEXT["vocab_size"], 32)
    assert {"model.embed_tokens.weight", "visual.merger.mlp.2.bias", "rm_head.5.weight"} < set(file)
    save_file(file, tmp_path / "hpsv3" / "HPSv3.safetensors")
    return tmp_path


def test_scores_equal_transformers_qwen2_vl(folder: Path) -> None:
    """The reference is its generation model on its chat template's token sequence, its image processor, and a head
    computed by hand. Tokens of images are at consecutive positions, as in HPS v3's code."""
    from transformers import Qwen2VLForConditionalGeneration, Qwen2VLImageProcessor

    context = ScoringContext(folder, folder)
    sequences = hpsv3_network.ChatSequences(folder / "hpsv3" / "text" / "tokenizer.json")
    network = hpsv3_network.load(folder / "hpsv3" / "HPSv3.safetensors", "cpu", sequences.image)
    reference = Qwen2VLForConditionalGeneration(hpsv3_network.settings(TEXT, VISION, 260)).eval()
    reference.model.load_state_dict(network.model.state_dict())
    head: nn.Sequential = network.rm_head
    processor = Qwen2VLImageProcessor()
    tokens = Tokenizer.from_file(str(folder / "hpsv3" / "text" / "tokenizer.json"))
    tokens.add_special_tokens(["<|Reward|>"])
    expected, by_grid = [], []
    for image, prompt in zip(pictures(), PROMPTS):
        height, width = hpsv3_network.resized(*image.shape[:2])
        squeezed = Image.fromarray(image).resize((width, height), Image.BICUBIC)
        seen = processor(images=[squeezed], do_resize=False, return_tensors="pt")
        count = height * width // 28**2
        text = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
            f"{'<|image_pad|>' * count}<|vision_end|>{hpsv3_network._INSTRUCTION}{prompt}\n\n\n\nPlease provide the"
            " overall ratings of this image: <|Reward|>\n\nEND\n<|im_end|>\n<|im_start|>assistant\n"
        )
        ids = torch.tensor([tokens.encode(text).ids])
        kind = (ids == 260).int()
        whole = {"input_ids": ids, "pixel_values": seen["pixel_values"], "image_grid_thw": seen["image_grid_thw"]}
        counted = torch.arange(ids.shape[1]).expand(3, 1, -1)
        with torch.no_grad():
            states = reference.model(**whole, position_ids=counted).last_hidden_state[ids == 261]
            expected.append(head[5](torch.relu(head[3](torch.relu(head[0](states)))))[0].tolist())
            states = reference.model(**whole, mm_token_type_ids=kind).last_hidden_state[ids == 261]
            by_grid.append(head(states)[0].tolist())
    actual = outputs("hpsv3", folder)
    assert np.ptp(expected, axis=0).min() > 0.01
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    assert np.abs(actual - by_grid).max() > 1e-3  # Qwen2-VL's own positions give different scores
    score = metrics.score(["hpsv3"], pictures(), ITEMS, context)["hpsv3"]
    assert score.value == pytest.approx(np.mean(expected, axis=0)[0], abs=2e-5)
    assert score.backend.startswith("hpsv3@")
    assert score.backend.endswith(", 200704 pixels bicubic, bfloat16")


def test_the_instruction_is_the_released_one() -> None:
    """The hash of INSTRUCTION in hpsv3/dataset/data_collator_qwen.py, up to its placeholder."""
    assert hashlib.sha256(hpsv3_network._INSTRUCTION.encode()).hexdigest() == INSTRUCTION


INSTRUCTION = "15e1621b28713545598ab36adf302c509d363605cde96f0d9a54bdeb15632f32"


@pytest.mark.parametrize(
    "unit_and_pixels", [(28, (200704, 200704)), (32, (qwen3_vl.LEAST, qwen3_vl.MOST))], ids=["hpsv3", "qwen3_vl"]
)
def test_sizes_equal_smart_resize(unit_and_pixels: tuple[int, tuple[int, int]]) -> None:
    """Where the last bit of a product decides, too: 768 x 768 becomes 420 x 420."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    unit, (least, most) = unit_and_pixels
    sides = [*range(64, 1100, 61), 256, 384, 512, 576, 720, 768, 1024, 1152, 1280, 4097, 5000, 6144]
    for height, width in itertools.product(sides, sides):
        if max(height, width) < 200 * min(height, width):  # the reference refuses others
            expected = smart_resize(height, width, factor=unit, min_pixels=least, max_pixels=most)
            assert preparation.multiples(height, width, unit, least, most) == expected
    assert hpsv3_network.resized(768, 768) == (420, 420)


def test_a_network_has_the_published_tensors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with torch.device("meta"):
        network = hpsv3_network.HPSv3Network(hpsv3_network.settings(hpsv3_network.TEXT, hpsv3_network.VISION, 151655))
    names = {*hpsv3_network.table(network.model), *(f"rm_head.{name}" for name in network.rm_head.state_dict())}
    assert len(names) == 736 - 1  # and lm_head.weight
    assert network.model.language_model.rotary_emb.inv_freq.shape == (64,)


def test_another_tokenizer_is_refused(folder: Path) -> None:
    path = folder / "hpsv3" / "text" / "tokenizer.json"
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(path))
    with pytest.raises(UsageError, match="is not the tokenizer of Qwen2-VL-7B-Instruct; fetch it again"):
        metrics.metric("hpsv3", ScoringContext(folder, folder)).scorer()
    path.write_text("{")
    with pytest.raises(UsageError, match="is not a readable tokenizer"):
        metrics.metric("hpsv3", ScoringContext(folder, folder)).scorer()
