"""CLIP score, HPS v2 and ImageReward: small networks of the same architectures, with random weights."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from commands import said
from PIL import Image
from safetensors.torch import save_file
from test_modern_features import images_of
from test_preference import ITEMS, PROMPTS, SIZES
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import transforms

from specbench import metrics
from specbench.config import parameters, registry
from specbench.errors import UsageError, install
from specbench.metrics import blip, preference, towers, weights
from specbench.metrics.base import ScoringContext, Unavailable
from specbench.metrics.preparation import CLIP, normalised, square
from specbench.storage import home
from specbench.storage.image_files import read

PUBLISHED = weights.published


def randomise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Random values that keep the scale of a layer's input, so that outputs differ clearly."""
    stream = torch.Generator().manual_seed(0)
    values = {}
    for name, old in tensors.items():
        x = torch.randn(old.shape, generator=stream)
        fan_in = math.prod(old.shape[1:]) if old.ndim > 1 and "embed" not in name else 1
        offset = float("ln_" in name or "norm" in name.lower()) if name.endswith("weight") else 0.0
        values[name] = x / math.sqrt(fan_in) if old.ndim > 1 else offset + 0.1 * x
    return values


def context_at(folder: Path, **more: Any) -> ScoringContext:
    return ScoringContext(folder, folder, **more)


TINY: dict[str, Any] = {
    "embed_dim": 24,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 48, "layers": 2, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


@pytest.fixture(autouse=True)
def _any_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small random weights count as the published ones."""
    monkeypatch.setattr(weights, "published", lambda context, part, path: path)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every architecture is the small one; open_clip knows it as "tiny"."""
    monkeypatch.setattr(towers, "config", lambda architecture: TINY)
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny", TINY)


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return randomise(open_clip.CLIP(**TINY).state_dict())


@pytest.fixture
def clip(tmp_path: Path, state: dict[str, Tensor], tiny: None) -> Path:
    """The folder of metrics with the small CLIP in it."""
    clip_file(tmp_path, state)
    return tmp_path


def clip_file(folder: Path, state: dict[str, Tensor], part: str = "clip_b32") -> Path:
    path = folder / part / "open_clip_model.safetensors"
    path.parent.mkdir(parents=True)
    save_file(state, path)
    return path


def reference(path: Path, prepared: Any, captions: Sequence[str], shown: Sequence[np.ndarray]) -> np.ndarray:
    """Cosines computed with open_clip's loading and towers. If `prepared` is None, its preparation is used, too."""
    network, _, preprocess = open_clip.create_model_and_transforms("tiny", pretrained=str(path))
    network.eval()
    x = torch.stack([(prepared or preprocess)(Image.fromarray(picture)) for picture in shown])
    with torch.no_grad():
        seen = network.encode_image(x, normalize=True)
        text_features = network.encode_text(open_clip.get_tokenizer("tiny")(list(captions)), normalize=True)
    return (seen * text_features).sum(-1).numpy()


def score_outputs(name: str, folder: Path, shown: Sequence[np.ndarray] | None = None) -> np.ndarray:
    return metrics.metric(name, context_at(folder)).scorer()(images_of(SIZES) if shown is None else shown, ITEMS)


def assert_independent_rows(name: str, folder: Path) -> None:
    """Checks that an image's outputs do not depend on the batch."""
    scorer, together = metrics.metric(name, context_at(folder)).scorer(), score_outputs(name, folder)
    alone = np.concatenate([scorer([x], [item]) for x, item in zip(images_of(SIZES), ITEMS)])
    assert np.array_equal(together, alone)
    assert np.array_equal(scorer(images_of(SIZES)[::-1], ITEMS[::-1]), together[::-1])


def test_cosines_equal_open_clip(clip: Path) -> None:
    outputs = score_outputs("clip_b32", clip)
    expected = reference(clip / "clip_b32" / "open_clip_model.safetensors", None, PROMPTS, images_of(SIZES))
    assert outputs.shape == (4, 1)
    assert np.ptp(expected) > 0.05
    np.testing.assert_allclose(outputs[:, 0], expected, atol=1e-6)
    assert_independent_rows("clip_b32", clip)


@pytest.mark.parametrize(
    ("architecture", "gelu", "size", "width", "rest"),
    [
        ("ViT-B-32-quickgelu", True, 605_143_284, 4, 50_000),
        ("ViT-B-16-quickgelu", True, 598_516_980, 4, 50_000),
        ("ViT-H-14", False, 1_972_484_501, 2, 500_000),
    ],
)
def test_a_tower_has_the_published_size(architecture: str, gelu: bool, size: int, width: int, rest: int) -> None:
    """The plain name would also accept OpenAI's weights, but computes another function. `rest`: bytes of the header of
    the published float32 file, or of a zip of 686 float16 tensors."""
    settings = towers.config(architecture)
    assert bool(settings.get("quick_gelu")) is gelu
    with torch.device("meta"):
        count = sum(t.numel() for t in open_clip.CLIP(**settings).state_dict().values())
    assert 0 < size - width * count < rest


def test_a_score_uses_the_chosen_model(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []
    monkeypatch.setattr(towers, "config", lambda architecture: requested.append(architecture) or TINY)
    scores = metrics.score(["clip_b32"], images_of(SIZES), ITEMS, context_at(clip))
    assert set(requested) == {"ViT-B-32-quickgelu"}
    assert list(scores) == ["clip_score"]
    score, each = scores["clip_score"], score_outputs("clip_b32", clip)[:, 0]
    assert score.value == pytest.approx(each.mean(), abs=1e-12)
    assert score.stderr == pytest.approx(each.std(ddof=1) / 2, abs=1e-12)
    assert score.backend == metrics.metric("clip_b32", context_at(clip)).cache_key
    assert score.backend.startswith("clip-vit-b-32@")
    assert score.backend.endswith(", 224 bicubic")
    assert re.search(r"^1 of 4 .*\b77 tokens", said(score))
    shuffled = [2, 0, 3, 1]
    shown, items = [images_of(SIZES)[i] for i in shuffled], [ITEMS[i] for i in shuffled]
    assert metrics.score(["clip_b32"], shown, items, context_at(clip, batch=3)) == scores


def test_times_100_equals_torchmetrics_definition_on_sjd_s_images(
    tmp_path: Path, state: dict[str, Tensor], tiny: None
) -> None:
    """The reference is torchmetrics' CLIPScore with a small model and processor, used as in SJD's evaluation."""
    from torchmetrics.multimodal.clip_score import CLIPScore

    path = clip_file(tmp_path, state, "clip_b16")
    network, _, preprocess = open_clip.create_model_and_transforms("tiny", pretrained=str(path))
    network.eval()

    class Model(nn.Module):
        config = None

        def get_image_features(self, pixel_values: Tensor) -> Tensor:
            return network.encode_image(pixel_values)

        def get_text_features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return network.encode_text(input_ids)

    class Processor:
        def __call__(self, images: Any = None, text: Any = None, **_: Any) -> dict[str, Tensor]:
            if images is not None:
                return {"pixel_values": torch.stack([preprocess(transforms.ToPILImage()(x)) for x in images])}
            ids = open_clip.get_tokenizer("tiny")(text)
            return {"input_ids": ids, "attention_mask": ids != 0}

    clip_score = CLIPScore(lambda: (Model(), Processor()))
    with torch.no_grad():
        for picture, prompt in zip(images_of(SIZES), PROMPTS):
            x = torch.tensor(np.array(Image.fromarray(picture))).unsqueeze(0).permute(0, 3, 1, 2)
            clip_score.update(F.interpolate(x, size=(299, 299), mode="bilinear", align_corners=False), [prompt])
    ours = metrics.score(["clip_b16_x100"], images_of(SIZES), ITEMS, context_at(tmp_path))["clip_score"]
    assert ours.value == pytest.approx(float(clip_score.compute()), abs=1e-4)
    assert ours.backend.endswith(", 299 bilinear, then 224 bicubic, x100")


def test_a_negative_mean_counts_as_zero_only_times_100(clip: Path) -> None:
    outputs, items = np.array([[0.1], [-0.4], [0.1]]), ITEMS[:3]
    [plain] = metrics.metric("clip_b32", context_at(clip)).score(outputs, items)
    metric = metrics.metric("clip_b32_x100", context_at(clip))
    [clamped] = metric.score(outputs, items)
    assert plain.value == pytest.approx(-0.2 / 3)
    assert said(plain) == ""
    assert "counts as 0" in said(clamped)
    assert clamped.value == 0
    assert clamped.stderr == pytest.approx(100 * (plain.stderr or 0))
    np.testing.assert_allclose(metric.per_image(outputs), [10, -40, 10])


def test_lantern_s_prefix_and_images(clip: Path) -> None:
    """LANTERN's code joins the prefix's three tokens to the caption's, and resizes pictures to 256 with torchvision."""
    tokens = open_clip.get_tokenizer("tiny")
    for prompt in PROMPTS:
        caption, prefix = tokens([prompt]), tokens(["A photo depicts "])[:, 1:4]
        joined = torch.cat([caption[:, :1], prefix, caption[:, 1:]], 1)[:, :77]
        if joined[0, 76] > 0:
            joined[0, 76] = 49407
        assert torch.equal(tokens([f"A photo depicts {prompt}"]), joined)

    def prepared(picture: Image.Image) -> Tensor:
        square = transforms.functional.center_crop(picture, [min(picture.size)] * 2)
        resized = transforms.Resize(256, transforms.InterpolationMode.LANCZOS)(square)
        x = transforms.Normalize([0.5] * 3, [0.5] * 3)(transforms.ToTensor()(resized))
        levels = ((x + 1.0) * 127.5).clamp(0, 255).to(torch.uint8)
        tensor: Tensor = open_clip.image_transform(48, is_train=False)(transforms.ToPILImage()(levels))
        return tensor

    path = clip / "clip_b32" / "open_clip_model.safetensors"
    expected = reference(path, prepared, [f"A photo depicts {prompt}" for prompt in PROMPTS], images_of(SIZES))
    np.testing.assert_allclose(score_outputs("clip_b32_lantern", clip)[:, 0], expected, atol=1e-6)
    key = metrics.metric("clip_b32_lantern", context_at(clip)).cache_key
    assert "256 Lanczos as LANTERN, then 224 bicubic, prefix 'A photo depicts '" in key


def test_choices_share_outputs_only_if_they_are_equal(clip: Path, state: dict[str, Tensor]) -> None:
    clip_file(clip, state, "clip_b16")
    names = [name for name in parameters.single_metrics() if name.startswith("clip_")]
    scorers = {name: metrics.metric(name, context_at(clip)).cache_key for name in names}
    assert scorers["clip_b32"] == scorers["clip_b32_x100"]
    assert len(set(scorers.values())) == len(names) - 1


def test_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "published", PUBLISHED)
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path / "home"))
    for name in ("clip_b32", "clip_b16", "hpsv2", "hpsv21", "image_reward"):
        metric = metrics.metric(name, context_at(tmp_path))
        for part in registry.evaluator_folders(name):
            (tmp_path / part).mkdir()
            for file in registry.evaluators()[part].files:
                (tmp_path / part / file).write_bytes(b"others")
        with pytest.raises(UsageError, match="file"):
            metric.scorer()


def test_the_older_name_of_a_weights_file_is_read(clip: Path, state: dict[str, Tensor]) -> None:
    path = clip / "older" / "clip_b32" / "open_clip_pytorch_model.bin"
    path.parent.mkdir(parents=True)
    torch.save(state, path)
    assert np.array_equal(score_outputs("clip_b32", clip / "older"), score_outputs("clip_b32", clip))


@pytest.mark.parametrize(
    ("metric", "options", "sentence"),
    [
        (towers.ClipScore, {"modell": "ViT-B-32"}, "unknown option of ClipScore 'modell' (choose from: model, "),
        (towers.ClipScore, {"model": "ViT-L-14"}, "unknown model of clip_score 'ViT-L-14' (choose from: ViT-B-16"),
        (towers.ClipScore, {"resize": "299"}, "unknown resize of clip_score '299' (choose from: bilinear299"),
        (towers.ClipScore, {"scale": 2.5}, "scale must be 1 (the cosine) or 100, not 2.5"),
        (towers.ClipScore, {"prefix": None}, "prefix must be text"),
        (towers.HPSv2, {"version": "v3"}, "unknown version of hpsv2 'v3' (choose from: v2, v2.1)"),
        (preference.ImageReward, {"scale": 1}, "ImageReward has no options: leave out scale"),
    ],
)
def test_options_are_checked(metric: Any, options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(sentence)):
        metric(context_at(tmp_path), options)


def test_absent_weights_are_reported_with_the_way_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path))
    context = context_at(home.metrics_folder())
    files = dict.fromkeys(("clip_b32", "clip_b16_x100"), "open_clip_model.safetensors")
    files["image_reward"] = "ImageReward.pt"
    files |= {"hpsv2": "HPS_v2_compressed.pt", "hpsv21": "HPS_v2.1_compressed.pt"}
    for name, file in files.items():
        part = name.removesuffix("_x100")
        message = f"no {file}: run `specbench fetch metrics={part}`, or put {file} into {tmp_path / 'metrics' / part}"
        assert metrics.missing(name, context) == message
        assert file in {name for fill in registry.evaluators()[part].files for name in fill.split("|")}
    assert f"metrics=hpsv2 metrics_dir={tmp_path / 'w'}`" in metrics.missing("hpsv2", context_at(tmp_path / "w"))
    scores = metrics.score(["image_reward", "clip_b32"], images_of(SIZES), ITEMS, context)
    assert [s.value for s in scores.values()] == [None, None]
    assert said(scores["image_reward"]).startswith("no ImageReward.pt: ")


def test_a_missing_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip_file(tmp_path, {"x": torch.zeros(1)})
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "open_clip" else original(name, *a)
    )
    message = metrics.missing("clip_b32", context_at(tmp_path))
    assert "open_clip" in message
    assert install("metrics") in message


def test_hps_is_the_cosine_of_padded_images(tmp_path: Path, state: dict[str, Tensor], tiny: None) -> None:
    half = {name: t.half() for name, t in state.items()}
    for part, file in towers.VERSIONS.values():
        (tmp_path / part).mkdir()
        torch.save({"state_dict": half}, tmp_path / part / file)
    whole = clip_file(tmp_path / "reference", {name: t.float() for name, t in half.items()})

    def prepared(picture: Image.Image) -> Tensor:
        """The longer side becomes 48, and black fills the rest."""
        scale = 48 / max(picture.size)
        height, width = round(picture.height * scale), round(picture.width * scale)
        resized = transforms.functional.resize(picture, [height, width], transforms.InterpolationMode.BICUBIC)
        canvas = Image.new("RGB", (48, 48))
        canvas.paste(resized, ((48 - width) // 2, (48 - height) // 2))
        tensor: Tensor = open_clip.image_transform(48, is_train=False)(canvas)
        return tensor

    outputs = score_outputs("hpsv2", tmp_path)
    np.testing.assert_allclose(outputs[:, 0], reference(whole, prepared, PROMPTS, images_of(SIZES)), atol=1e-6)
    score = metrics.score(["hpsv21"], images_of(SIZES), ITEMS, context_at(tmp_path))["hpsv2"]
    assert score.value == pytest.approx(outputs.mean(), abs=1e-12)
    assert score.backend.startswith("hps-v2.1@")
    assert score.backend.endswith(", 224 bicubic, padded")
    [percent] = towers.HPSv2(context_at(tmp_path), {"scale": 100}).score(outputs, ITEMS)
    assert percent.value == pytest.approx(100 * outputs.mean())


LETTERS = [*"abcdefghijklmnopqrstuvwxyz!,&", *(f"##{c}" for c in "acdefglmnoprstw")]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, "red"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A BLIP of the same architecture with small sizes."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3}
    monkeypatch.setattr(blip, "VISION", {**blip.VISION, **vision, "image_size": 32, "patch_size": 8})
    text |= {"vocab_size": len(WORDS) + 2, "max_position_embeddings": 40}
    monkeypatch.setattr(blip, "TEXT", {**blip.TEXT, **text})
    monkeypatch.setattr(blip, "HEAD", (10, 8, 6, 4, 1))


def random_weights(seed: int) -> dict[str, Tensor]:
    """Tensors with ImageReward.pt's names and shapes. Each layer keeps the scale of its input, so that rewards differ
    between images: with the default small random weights, any two networks give equal rewards."""
    with torch.device("meta"):
        network = blip.Blip().state_dict()
    shapes = {name: tuple(network[target.name].shape) for name, target in blip.table().items()}
    # not used by the table
    for name, width in (("vision", blip.VISION["hidden_size"]), ("text", blip.TEXT["hidden_size"])):
        shapes |= {f"blip.{name}_proj.weight": (256, width), f"blip.{name}_proj.bias": (256,)}
    stream = torch.Generator().manual_seed(seed)
    values = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=stream)
        if len(shape) == 1:
            values[name] = 0.1 * x + ("norm" in name.lower() and name.endswith("weight"))
        else:
            values[name] = x if "embed" in name and "proj" not in name else x / math.sqrt(math.prod(shape[1:]))
    return values


@pytest.fixture
def folder(tmp_path: Path, small: None) -> Path:
    """The two files, in the official layout."""
    (tmp_path / "image_reward/text").mkdir(parents=True)
    tensors = random_weights(0)
    tensors["blip.text_encoder.embeddings.position_ids"] = torch.arange(40)[None]
    torch.save(tensors, tmp_path / "image_reward/ImageReward.pt")
    (tmp_path / "image_reward/text/vocab.txt").write_text("\n".join(WORDS) + "\n")
    return tmp_path


def forward(w: dict[str, Tensor], x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """BLIP's forward pass and the head, written with the tensors' official names: x (B, 3, S, S), ids and mask (B, T)
    -> rewards (B,). Vision: the norm is before attention and MLP, and q, k, v are one matrix. Text: BERT, with the norm
    after."""

    def linear(name: str, y: Tensor) -> Tensor:
        return F.linear(y, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(name: str, y: Tensor, eps: float) -> Tensor:
        return F.layer_norm(y, y.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)

    def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, bias: Tensor | float = 0.0) -> Tensor:
        split = [t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v)]
        scores = split[0] @ split[1].transpose(-1, -2) / math.sqrt(split[0].shape[-1]) + bias
        return (scores.softmax(-1) @ split[2]).transpose(1, 2).flatten(2)

    v = "blip.visual_encoder."
    size = blip.VISION["patch_size"]
    y = F.conv2d(x, w[f"{v}patch_embed.proj.weight"], w[f"{v}patch_embed.proj.bias"], stride=size)
    y = torch.cat([w[f"{v}cls_token"].expand(len(x), -1, -1), y.flatten(2).transpose(1, 2)], 1) + w[f"{v}pos_embed"]
    for n in range(blip.VISION["num_hidden_layers"]):
        block = f"{v}blocks.{n}."
        q, k, value = linear(f"{block}attn.qkv", norm(f"{block}norm1", y, 1e-6)).chunk(3, -1)
        y = y + linear(f"{block}attn.proj", attend(q, k, value, blip.VISION["num_attention_heads"]))
        y = y + linear(f"{block}mlp.fc2", F.gelu(linear(f"{block}mlp.fc1", norm(f"{block}norm2", y, 1e-6))))
    y = norm(f"{v}norm", y, 1e-6)

    t = "blip.text_encoder."
    z = w[f"{t}embeddings.word_embeddings.weight"][ids]
    z = norm(f"{t}embeddings.LayerNorm", z + w[f"{t}embeddings.position_embeddings.weight"][: ids.shape[1]], 1e-12)
    padded = (1 - mask[:, None, None].float()) * -10000
    for n in range(blip.TEXT["num_hidden_layers"]):
        layer = f"{t}encoder.layer.{n}."
        for kind, seen, bias in (("attention", None, padded), ("crossattention", y, 0.0)):
            part = f"{layer}{kind}."
            source = z if seen is None else seen
            inputs = (
                linear(f"{part}self.query", z),
                linear(f"{part}self.key", source),
                linear(f"{part}self.value", source),
            )
            update = linear(f"{part}output.dense", attend(*inputs, blip.TEXT["num_attention_heads"], bias))
            z = norm(f"{part}output.LayerNorm", z + update, 1e-12)
        update = linear(f"{layer}output.dense", F.gelu(linear(f"{layer}intermediate.dense", z)))
        z = norm(f"{layer}output.LayerNorm", z + update, 1e-12)
    z = z[:, 0]
    for i in (0, 2, 4, 6, 7):
        z = linear(f"mlp.layers.{i}", z)
    return (z[:, 0] - 0.16717362830052426) / 1.0333394966054072


def prepared(picture: np.ndarray, side: int) -> Tensor:
    """Prepares a picture with torchvision as the package does."""
    steps = [
        transforms.Resize(side, interpolation=transforms.InterpolationMode.BICUBIC),
        transforms.CenterCrop(side),
        transforms.ToTensor(),
        transforms.Normalize((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    ]
    x: Tensor = transforms.Compose(steps)(Image.fromarray(picture))
    return x


def test_rewards_equal_the_official_layout(folder: Path) -> None:
    w = torch.load(folder / "image_reward/ImageReward.pt", weights_only=True)
    outputs = score_outputs("image_reward", folder)
    x = torch.stack([prepared(picture, 32) for picture in images_of(SIZES)])
    ids, mask = blip.Captions(folder / "image_reward/text/vocab.txt")(PROMPTS)
    expected = forward(w, x, ids, mask).numpy()
    assert outputs.shape == (4, 1)
    assert np.ptp(expected) > 0.05
    np.testing.assert_allclose(outputs[:, 0], expected, atol=2e-6)
    swapped = score_outputs("image_reward", folder, images_of(SIZES)[::-1])  # both towers affect the reward
    assert np.abs(swapped - outputs).min() > 1e-4
    assert_independent_rows("image_reward", folder)
    scores = metrics.score(["image_reward"], images_of(SIZES), ITEMS, context_at(folder, batch=3))["image_reward"]
    assert scores.value == pytest.approx(float(outputs.mean()), abs=1e-6)
    assert re.search(r"^1 of 4 .*\b35 tokens", said(scores))
    assert scores.backend.startswith("image-reward@")
    assert scores.backend.endswith(", 224 bicubic")


def test_the_official_file_has_as_many_values_as_the_table() -> None:
    """1,786,880,927 bytes: the table's tensors, the projections and positions, and the overhead of a zip of 625
    tensors."""
    with torch.device("meta"):
        tensors = blip.Blip().state_dict()
    count = sum(tensors[place.name].numel() for place in blip.table().values())
    rest = 1_786_880_927 - 4 * (count + (1024 + 1 + 768 + 1) * 256) - 8 * 512
    assert 0 < rest < 500 * 625


@pytest.mark.parametrize(("height", "width"), [(224, 224), (100, 224), (225, 341), (1000, 223), (480, 640)])
def test_images_are_cropped_as_by_torchvision(height: int, width: int) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    ours = normalised(square(picture, 224), CLIP)
    torch.testing.assert_close(ours, prepared(picture, 224), atol=1e-6, rtol=0)


def test_an_image_that_would_need_gigabytes_is_refused(tmp_path: Path) -> None:
    """The shorter side is resized to 224."""
    Image.new("RGB", (2_000_000, 1)).save(tmp_path / "line.png")
    with pytest.raises(UsageError, match=r"line\.png.*2000000x1"):
        read(tmp_path / "line.png")


def test_captions_are_tokenized_as_by_bert(folder: Path) -> None:
    from transformers import BertTokenizer

    file = folder / "image_reward/text/vocab.txt"
    tokenizer = BertTokenizer(str(file), do_lower_case=True)
    expected = tokenizer(list(PROMPTS), padding="max_length", truncation=True, max_length=35, return_tensors="pt")
    ids, mask = blip.Captions(file)(PROMPTS)
    assert torch.equal(ids, expected["input_ids"])
    assert torch.equal(mask, expected["attention_mask"])
    assert len({tuple(row.tolist()) for row in ids}) == len(PROMPTS)


def test_another_vocabulary_is_refused(folder: Path) -> None:
    file, other = folder / "image_reward/text/vocab.txt", "is not the vocabulary of bert-base-uncased"
    for content, sentence in (
        ("\n".join(WORDS[1:]).encode(), other),
        ("\n".join(WORDS).replace("[CLS]", "[CL]").encode(), other),
        ("\n".join([*WORDS[:-1], "a"]).encode(), other),
        (b"\xff\xfe", "readable vocabulary"),
    ):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=sentence):
            metrics.metric("image_reward", context_at(folder)).scorer()


def test_weights_that_do_not_fit_are_named(clip: Path, folder: Path, state: dict[str, Tensor]) -> None:
    tensors, reward = clip / "clip_b32/open_clip_model.safetensors", folder / "image_reward/ImageReward.pt"
    save_file({**state, "ln_final.weight": torch.zeros(3)}, tensors)
    with pytest.raises(UsageError, match=r"'ln_final.weight'.*\[3\].*\[32\]"):
        metrics.metric("clip_b32", context_at(clip)).scorer()
    tensors.unlink()
    torch.save({"state_dict": types.SimpleNamespace(a=1)}, tensors.with_name("open_clip_pytorch_model.bin"))
    with pytest.raises(UsageError, match="open_clip_pytorch_model.bin"):
        metrics.metric("clip_b32", context_at(clip)).scorer()
    torch.save(torch.load(reward, weights_only=True) | {"blip.itm_head.bias": torch.zeros(2)}, reward)
    with pytest.raises(UsageError, match=r"'blip\.itm_head\.bias'"):
        metrics.metric("image_reward", context_at(folder)).scorer()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces image-reward 1.5: it has the same names, and uses the forward pass above."""
    blip_pretrain = types.ModuleType("ImageReward.models.BLIP.blip_pretrain")

    def init_tokenizer() -> Any:
        raise AssertionError("this fetches bert-base-uncased")

    class ImageReward(nn.Module):
        def __init__(self, med_config: str, device: str = "cpu") -> None:
            super().__init__()
            settings = json.loads(Path(med_config).read_text())
            assert settings["add_cross_attention"]
            assert settings["vocab_size"] == blip.TEXT["vocab_size"]
            self.tokenizer = blip_pretrain.init_tokenizer()
            for name, tensor in random_weights(1).items():
                part: nn.Module = self
                *path, last = name.split(".")
                for step in path:
                    if step not in dict(part.named_children()):
                        part.add_module(step, nn.Module())
                    part = part.get_submodule(step)
                part.register_parameter(last, nn.Parameter(tensor))

        def score(self, prompt: str, image: Image.Image) -> float:
            text = self.tokenizer(prompt, padding="max_length", truncation=True, max_length=35, return_tensors="pt")
            x = prepared(np.array(image), blip.VISION["image_size"])[None]
            return forward(dict(self.state_dict()), x, text["input_ids"], text["attention_mask"]).numpy().item()

    blip_pretrain.init_tokenizer = init_tokenizer  # type: ignore[attr-defined]
    modules = {
        name: types.ModuleType(name) for name in ("ImageReward", "ImageReward.models", "ImageReward.models.BLIP")
    }
    main = types.ModuleType("ImageReward.ImageReward")
    main.ImageReward = ImageReward  # type: ignore[attr-defined]
    modules["ImageReward.models.BLIP"].blip_pretrain = blip_pretrain  # type: ignore[attr-defined]
    modules |= {"ImageReward.ImageReward": main, "ImageReward.models.BLIP.blip_pretrain": blip_pretrain}
    for name, module in modules.items():
        module.__spec__ = importlib.util.spec_from_loader(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.5" if name == "image-reward" else version(name))
    return types.SimpleNamespace(init=init_tokenizer, module=blip_pretrain)


def test_without_the_package_its_environment_is_named(folder: Path) -> None:
    if importlib.util.find_spec("ImageReward"):
        pytest.skip("the package is here")
    message = metrics.missing("image_reward_package", context_at(folder))
    assert install("image-reward") in message


def test_the_package_s_model_is_filled_and_gives_the_same_rewards(folder: Path, package: Any) -> None:
    names = ["image_reward", "image_reward_package"]
    plain, other = (
        metrics.score([name], images_of(SIZES), ITEMS, context_at(folder))["image_reward"] for name in names
    )
    assert other.value == pytest.approx(plain.value, abs=2e-6)
    assert other.backend.startswith("image-reward-package-1.5@")
    assert package.module.init_tokenizer is package.init  # restored
    with pytest.raises(UsageError, match="image_reward.*image_reward_package.*image_reward"):
        metrics.score(names, images_of(SIZES), ITEMS, context_at(folder))


def test_the_package_refuses_a_file_without_a_tensor(folder: Path, package: Any) -> None:
    path = folder / "image_reward/ImageReward.pt"
    tensors = torch.load(path, weights_only=True)
    torch.save({**tensors, "mlp.layers.7.bias": torch.zeros(2)}, path)
    with pytest.raises(UsageError, match="ImageReward"):
        metrics.metric("image_reward_package", context_at(folder)).scorer()
    tensors.pop("mlp.layers.7.bias")
    torch.save(tensors, path)
    with pytest.raises(UsageError, match=r"'mlp\.layers\.7\.bias'"):
        metrics.metric("image_reward_package", context_at(folder)).scorer()


def test_every_metric_says_what_it_reads(tmp_path: Path) -> None:
    read = {part for name in parameters.single_metrics() for part in registry.evaluator_folders(name)}
    assert read == set(registry.evaluators())
    for name in parameters.single_metrics():
        metric = metrics.metric(name, context_at(tmp_path))
        try:
            metric.cache_key  # noqa: B018 (raises)
            needs = False
        except Unavailable as e:
            needs = any(hint in str(e) for hint in ("specbench fetch", "not installed", "modelscope download"))
        folders = registry.evaluator_folders(name)
        assert bool(folders) == needs or name.startswith("scenes_")
        assert folders == list(getattr(metric, "file_names", folders))
        assert not folders or getattr(metric, "part", folders[0]) == folders[0]
    sets = set(parameters.choices("metrics")) - set(parameters.single_metrics())
    for name in sets:
        parameters.check_metrics(sorted(parameters.declared("metrics", name)))  # no two metrics fill the same column
