"""Scores of networks that learned from people's choices, and from questions about images."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import said
from PIL import Image
from safetensors.torch import save_file
from test_modern_features import images_of, randomise
from torch import Tensor
from torchvision import transforms

from specbench import metrics
from specbench.data.base import Item
from specbench.errors import UsageError
from specbench.metrics import clip
from specbench.metrics.base import ScoringContext

PROMPTS = ("a red circle", "“Two” dogs, & a café! it's\n 1234", "", "a small triangle left of a large green star " * 12)
SIZES = ((64, 64), (90, 131), (300, 65), (224, 224))
ITEMS = [Item(i, prompt, None, f"id{i}") for i, prompt in enumerate(PROMPTS)]
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY: dict[str, Any] = {
    "vision_config": {**clip.H14["vision_config"], **SMALL},
    "text_config": {**clip.H14["text_config"], **SMALL},
    "projection_dim": 16,
}


def outputs(name: str, folder: Path) -> np.ndarray:
    """A scorer's outputs. They must not depend on the batch."""
    scorer = metrics.metric(name, ScoringContext(folder, folder)).scorer()
    together = scorer(images_of(SIZES), ITEMS)
    alone = [scorer([image], [item]) for image, item in zip(images_of(SIZES), ITEMS)]
    assert np.array_equal(together, np.concatenate(alone))
    return together


@pytest.fixture
def pick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small PickScore."""
    from transformers import CLIPConfig, CLIPModel

    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path / "home"))
    load = clip.load_both
    monkeypatch.setattr(clip, "load_both", lambda path, device: load(path, device, TINY))
    path = tmp_path / "pickscore" / "model.safetensors"
    path.parent.mkdir()
    state = randomise(CLIPModel(CLIPConfig(**TINY)).state_dict())
    positions = {"text_model.embeddings.position_ids": 77, "vision_model.embeddings.position_ids": 257}
    counted = {name: torch.arange(count)[None] for name, count in positions.items()}
    save_file(state | counted | {"logit_scale": torch.tensor(100.0).log()}, path)
    return tmp_path


def hf_tokenizer() -> Any:
    """transformers' CLIPTokenizer with OpenAI's vocabulary."""
    import open_clip
    from transformers import CLIPTokenizer

    tokenizer = open_clip.SimpleTokenizer()
    marks = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    vocabulary = {marks.get(name, name): i for name, i in tokenizer.encoder.items()}
    merges = sorted(tokenizer.bpe_ranks, key=tokenizer.bpe_ranks.__getitem__)
    return CLIPTokenizer(vocab=vocabulary, merges=merges)


def test_captions_have_the_tokens_of_transformers() -> None:
    """open_clip's tokens differ in the second caption, where it replaces the quotation marks."""
    import open_clip

    whole = hf_tokenizer()(list(PROMPTS), padding="max_length", truncation=True, max_length=77)
    tokens = clip.captions()(PROMPTS)
    assert tokens.tolist() == whole["input_ids"]
    other_tokens = open_clip.tokenize(PROMPTS)
    is_equal = [torch.equal(a[: b.argmax() + 1], b[: b.argmax() + 1]) for a, b in zip(tokens, other_tokens)]
    assert is_equal == [True, False, True, True]
    assert clip.captions().too_long(PROMPTS) == 1


def test_pickscore_equals_its_authors_code(pick: Path) -> None:
    """The reference is transformers' CLIPModel and tokenizer; PIL resizes the shorter side to 224, and the centre crop
    has floored margins."""
    from transformers import CLIPConfig, CLIPModel

    reference = CLIPModel(CLIPConfig(**TINY)).eval()
    load = clip.load_both(pick / "pickscore" / "model.safetensors", "cpu")
    reference.load_state_dict(load.state_dict())

    def prepared(image: np.ndarray) -> Tensor:
        picture = Image.fromarray(image)
        scale = 224 / min(picture.size)
        size = [int(side * scale) if side != min(picture.size) else 224 for side in picture.size]
        picture = picture.resize(size, Image.BICUBIC)
        left, top = (size[0] - 224) // 2, (size[1] - 224) // 2
        statistics = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
        return transforms.Normalize(*statistics)(
            transforms.ToTensor()(picture.crop((left, top, left + 224, top + 224)))
        )

    expected = []
    with torch.no_grad():
        for image, prompt in zip(images_of(SIZES), PROMPTS):
            tokens = hf_tokenizer()([prompt], truncation=True, max_length=77, return_tensors="pt")
            output = reference(pixel_values=prepared(image)[None], **tokens)
            expected.append(float(output.logits_per_image))
    assert np.ptp(expected) > 5
    np.testing.assert_allclose(outputs("pickscore", pick)[:, 0], expected, rtol=1e-4, atol=1e-4)
    score = metrics.score(["pickscore"], images_of(SIZES), ITEMS, ScoringContext(pick, pick))["pickscore"]
    assert score.value == pytest.approx(np.mean(expected), rel=1e-4)
    assert score.stderr == pytest.approx(np.std(expected, ddof=1) / 2, rel=1e-3)
    assert score.backend.startswith("pickscore-v1@")
    assert re.search(r"^1 of 4 .*\b77 tokens", said(score))


def test_weights_that_differ_from_the_fetched_ones_are_refused(pick: Path) -> None:
    """No public page shows PickScore's checksum. The hub gives it when the file is fetched, and the fetch records
    it."""
    entry = {"files": {"model.safetensors": {"size": 1, "sha256": "0" * 64}}}
    (pick / "SOURCE.json").write_text(json.dumps({"parts": {"pickscore": entry}}))
    with pytest.raises(UsageError, match="00000000"):
        metrics.metric("pickscore", ScoringContext(pick, pick)).scorer()


def test_pickscore_has_the_published_size() -> None:
    from transformers import CLIPConfig, CLIPModel

    with torch.device("meta"):
        count = sum(t.numel() for t in CLIPModel(CLIPConfig(**clip.H14)).state_dict().values())
    assert count == 986_109_441  # of CLIP ViT-H/14; 3.94 GB in float32
