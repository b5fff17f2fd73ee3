"""ImageReward's two backends: the authors' package and transformers' BLIP. Needs the extra image-reward: `make
test-image-reward`."""

from __future__ import annotations

import math
import string
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from specbench import metrics
from specbench.data.base import Item
from specbench.metrics import blip, weights
from specbench.metrics.base import ScoringContext

pytest.importorskip("ImageReward", reason="the package image-reward needs an environment of its own")

PROMPTS = (
    "a red circle left of a large blue square",
    "A photo of a café, at night.",
    "an armchair in the shape of an avocado, " * 8,  # more than 35 tokens
    "",
)
SIZES = ((256, 256), (512, 512), (300, 401), (97, 64))  # height and width


def random_weights() -> dict[str, Tensor]:
    """Tensors with the names and shapes of ImageReward.pt. Each layer keeps the scale of its input, so that rewards
    differ between images. With the small weights of an initialisation, all rewards of any network are nearly equal."""
    with torch.device("meta"):
        network = blip.Blip().state_dict()
    shapes = {name: tuple(network[place.name].shape) for name, place in blip.table().items()}
    for name, settings in (("vision", blip.VISION), ("text", blip.TEXT)):  # BLIP's projections, which nothing uses
        shapes |= {f"blip.{name}_proj.weight": (256, settings["hidden_size"]), f"blip.{name}_proj.bias": (256,)}
    stream = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=stream)
        if len(shape) == 1:
            tensors[name] = 0.1 * x + ("norm" in name.lower() and name.endswith("weight"))
        elif "embed" in name and "proj" not in name:
            tensors[name] = x
        else:
            tensors[name] = x / math.sqrt(math.prod(shape[1:]))
    return tensors


def vocabulary() -> str:
    """As many entries as bert-base-uncased, with its special tokens at their places, all letters and some words."""
    letters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    entries = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    entries += [*letters, *(f"##{letter}" for letter in letters), "circle", "avocado", "##chair"]
    size = blip.TEXT["vocab_size"] - 2
    return "\n".join([*entries, *(f"word{i}" for i in range(size - len(entries)))]) + "\n"


def test_both_backends_give_the_same_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(weights, "published", lambda context, part, path: path)  # no file of random weights is
    (tmp_path / "image_reward" / "text").mkdir(parents=True)
    torch.save(random_weights(), tmp_path / "image_reward" / "ImageReward.pt")
    (tmp_path / "image_reward" / "text" / "vocab.txt").write_text(vocabulary(), encoding="utf-8")
    stream = np.random.default_rng(0)
    coarse = [stream.integers(0, 256, (8, 8, 3), dtype=np.uint8) for _ in SIZES]
    blocks = [np.kron(c, np.ones((-(-h // 8), -(-w // 8), 1), np.uint8))[:h, :w] for c, (h, w) in zip(coarse, SIZES)]
    items = [Item(i, prompt, None, f"id{i}") for i, prompt in enumerate(PROMPTS)]
    rewards = {}
    for name in ("image_reward", "image_reward_package"):
        rewards[name] = metrics.metric(name, ScoringContext(tmp_path, tmp_path)).scorer()(blocks, items)[:, 0]
    # float32 through 36 layers in two implementations: rewards agree to about 1e-6 of their size. They differ between
    # images by much more, so two networks that disagree would be seen.
    assert np.ptp(rewards["image_reward"]) > 0.01
    np.testing.assert_allclose(rewards["image_reward"], rewards["image_reward_package"], atol=1e-4)
