"""DINOv2's and CLIP's features, and the two distances over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import said
from PIL import Image
from safetensors.torch import save_file
from scipy import linalg
from scipy.spatial.distance import cdist
from torch import Tensor
from torchvision import transforms

from specbench import cli, metrics
from specbench.config import registry
from specbench.data.base import Item
from specbench.errors import UsageError
from specbench.metrics import clip, dinov2, frechet
from specbench.metrics import features as modern
from specbench.metrics import reference as references
from specbench.metrics.base import Metric, ScoringContext
from specbench.metrics.reference import ReferenceStatistics
from specbench.rows.csv_files import read_rows
from specbench.storage.files import sha256_file

SMALL = dinov2.ViTConfig(dim=32, layers=2, heads=2, positions=37)
TINY: dict[str, Any] = {
    **clip.L14_336,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": 16,
}
SIZES = ((64, 64), (90, 131), (300, 64), (336, 336))


def images_of(sizes: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """One image of each size (H, W), with coarse structure."""
    stream = np.random.default_rng(0)
    small = (Image.fromarray(stream.integers(0, 256, (4, 4, 3), np.uint8)) for _ in sizes)
    return [np.asarray(image.resize(size[::-1], Image.NEAREST)) for image, size in zip(small, sizes)]


def some_items(n: int) -> list[Item]:
    return [Item(i, "", None, f"id{i}") for i in range(n)]


def randomise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Random values that keep the scale of a layer's input, so that outputs differ clearly."""
    stream, values = torch.Generator().manual_seed(0), {}
    for name, old in tensors.items():
        x = torch.randn(old.shape, generator=stream)
        embeds = "embed" in name and "patch" not in name
        scale = 0.1 if old.ndim < 2 or embeds else math.prod(old.shape[1:]) ** -0.5
        values[name] = scale * x + float(old.ndim == 1 and "norm" in name and name.endswith("weight"))
    return values


def place(folder: Path, part: str, file: str, tensors: dict[str, Tensor], patch: pytest.MonkeyPatch) -> Path:
    """A file of weights that counts as the published one."""
    path = folder / part / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.endswith(".safetensors"):
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    patch.setitem(registry.evaluators(), part, replace(registry.evaluators()[part], sha256={file: sha256_file(path)}))
    return path


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with small networks of both layouts."""
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path / "home"))
    state = randomise(dinov2.DINOv2(SMALL).state_dict()) | {"mask_token": torch.zeros(1, 32)}
    place(tmp_path, "dinov2", "dinov2_vitl14_pretrain.pth", state, monkeypatch)
    load, tower = dinov2.load, clip.load_image_tower
    monkeypatch.setattr(dinov2, "load", lambda path, device: load(path, device, SMALL))
    monkeypatch.setattr(clip, "load_image_tower", lambda path, device: tower(path, device, TINY))
    whole = randomise(vision(TINY).state_dict()) | {
        "text_model.final_layer_norm.weight": torch.zeros(3),
        "vision_model.embeddings.position_ids": torch.arange(577)[None],
        "text_projection.weight": torch.zeros(2, 2),
        "logit_scale": torch.tensor(4.6),
    }
    place(tmp_path, modern.CLIP_PART, modern.CLIP_FILE, whole, monkeypatch)
    return tmp_path


def vision(settings: dict[str, Any]) -> torch.nn.Module:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    return CLIPVisionModelWithProjection(CLIPVisionConfig(**settings)).eval()


def outputs(name: str, folder: Path) -> np.ndarray:
    """A scorer's outputs. They must not depend on the batch."""
    scorer = metrics.metric(name, ScoringContext(folder, folder)).scorer()
    together = scorer(images_of(SIZES), some_items(4))
    alone = [scorer([image], [item]) for image, item in zip(images_of(SIZES), some_items(4))]
    assert np.array_equal(together, np.concatenate(alone))
    assert together.dtype == np.float32
    return together


def test_dinov2_s_features_equal_timm(weights: Path) -> None:
    """The reference is timm's vision transformer with the same tensors and position table, and dgm-eval's
    preparation."""
    from timm.models import VisionTransformer

    network = dinov2.load(weights / "dinov2" / "dinov2_vitl14_pretrain.pth", "cpu")
    reference = VisionTransformer(224, 14, embed_dim=32, depth=2, num_heads=2, init_values=1.0, num_classes=0).eval()
    reference.load_state_dict(network.state_dict() | {"pos_embed": network._positions(16)})
    prepare = transforms.Compose(
        [
            transforms.Resize((224, 224), transforms.InterpolationMode.BICUBIC),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    with torch.no_grad():
        expected = reference(torch.stack([prepare(Image.fromarray(image)) for image in images_of(SIZES)])).numpy()
    assert np.ptp(expected, axis=0).mean() > 0.1
    np.testing.assert_allclose(outputs("fd_dinov2", weights), expected, atol=1e-4)
    key = metrics.metric("fd_dinov2", ScoringContext(weights, weights)).cache_key
    assert key.endswith(", 224 bicubic")


def test_positions_are_read_at_the_scale_of_the_official_code() -> None:
    """Row i of 16 is at position (i + 1/2) 37 / 16.1 - 1/2 of 37, and is read with the cubic convolution of -3/4."""
    network = dinov2.DINOv2(replace(SMALL, dim=3, heads=1, layers=0))
    torch.nn.init.normal_(network.pos_embed, generator=torch.Generator().manual_seed(0))
    at = (np.arange(16) + 0.5) * 37 / 16.1 - 0.5
    below, weights = np.floor(at).astype(int), np.zeros((16, 37))
    for step in range(-1, 3):
        t = np.abs(at - below - step)
        near, far = 1.25 * t**3 - 2.25 * t**2 + 1, -0.75 * (t**3 - 5 * t**2 + 8 * t - 4)
        np.add.at(weights, (np.arange(16), np.clip(below + step, 0, 36)), np.where(t <= 1, near, far))
    table = network.pos_embed[0, 1:].detach().numpy().reshape(37, 37, 3)
    expected = np.einsum("ai,bj,ijc->abc", weights, weights, table).reshape(256, 3)
    np.testing.assert_allclose(network._positions(16)[0, 1:].detach(), expected, atol=1e-5)


def test_clip_s_embeddings_equal_open_clip(weights: Path) -> None:
    """The reference is open_clip's tower with the same tensors, and cmmd-pytorch's preparation."""
    import open_clip

    tower = open_clip.model.VisionTransformer(
        336, 14, 32, 2, 2, 2.0, output_dim=16, act_layer=open_clip.transformer.QuickGELU
    ).eval()
    state, converted = torch.load(weights / modern.CLIP_PART / modern.CLIP_FILE, weights_only=True), {}
    v = "vision_model."
    converted["class_embedding"] = state[f"{v}embeddings.class_embedding"]
    converted["positional_embedding"] = state[f"{v}embeddings.position_embedding.weight"]
    converted["conv1.weight"] = state[f"{v}embeddings.patch_embedding.weight"]
    converted["proj"] = state["visual_projection.weight"].T
    for kind in ("weight", "bias"):
        converted[f"ln_pre.{kind}"], converted[f"ln_post.{kind}"] = (
            state[f"{v}{n}.{kind}"] for n in ("pre_layrnorm", "post_layernorm")
        )
        for n in range(2):
            a, b = f"{v}encoder.layers.{n}.", f"transformer.resblocks.{n}."
            converted[f"{b}attn.in_proj_{kind}"] = torch.cat([state[f"{a}self_attn.{x}_proj.{kind}"] for x in "qkv"])
            converted[f"{b}attn.out_proj.{kind}"] = state[f"{a}self_attn.out_proj.{kind}"]
            for x, y in (
                ("ln_1", "layer_norm1"),
                ("ln_2", "layer_norm2"),
                ("mlp.c_fc", "mlp.fc1"),
                ("mlp.c_proj", "mlp.fc2"),
            ):
                converted[f"{b}{x}.{kind}"] = state[f"{a}{y}.{kind}"]
    tower.load_state_dict(converted)

    def prepared(image: np.ndarray) -> Tensor:
        picture = Image.fromarray(image)
        side, (width, height) = min(picture.size), picture.size
        left, top = (width - side) // 2, (height - side) // 2
        picture = picture.crop((left, top, left + side, top + side)).resize((336, 336), Image.BICUBIC)
        statistics = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
        return transforms.Normalize(*statistics)(transforms.ToTensor()(picture))

    with torch.no_grad():
        expected = tower(torch.stack([prepared(image) for image in images_of(SIZES)])).numpy()
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.ptp(expected, axis=0).mean() > 0.02
    np.testing.assert_allclose(outputs("cmmd", weights), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "size", "rest"),
    [
        (dinov2.DINOv2, 1_217_586_395, 150_000),  # one more tensor of 1,024 numbers, and the directory of a zip file
        (lambda: vision(clip.L14_336), 1_711_974_081, None),
    ],
)
def test_a_network_has_the_published_size(build: Any, size: int, rest: int | None) -> None:
    with torch.device("meta"):
        count = sum(t.numel() for t in build().state_dict().values())
    text = 123_650_304 + 1 if rest is None else 0  # CLIP L/14's text tower with its projection, and the scale
    assert 0 < size - 4 * (count + text) < (rest or 250_000)


@pytest.mark.parametrize("name", ["fd_dinov2", "cmmd"])
def test_other_weights_are_refused(weights: Path, name: str) -> None:
    metric = metrics.metric(name, ScoringContext(weights, weights))
    [file] = metric.files
    with file.open("ab") as f:
        f.write(b" ")
    with pytest.raises(UsageError, match="file"):
        metric.scorer()
    file.unlink()
    assert f"specbench fetch metrics={name} metrics_dir={weights}" in metrics.missing(name, metric.context)


def features(n: int, seed: int, d: int = 12, shift: float = 0.0) -> np.ndarray:
    """Vectors (N, d) float32 of length 1, like embeddings."""
    vectors = np.random.default_rng(seed).standard_normal((n, d)) + 1 + shift * np.arange(d) / d
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def metric_against(name: str, real: np.ndarray, weights: Path, monkeypatch: pytest.MonkeyPatch) -> Metric:
    metric = metrics.metric(name, ScoringContext(weights, weights))
    monkeypatch.setattr(type(metric), "width", real.shape[1])
    moments = frechet.Moments.of(torch.from_numpy(real))
    provenance = {"data": "any", "cache_key": metric.cache_key}
    mean, covariance = moments.mean.numpy(), moments.covariance.numpy()
    metric.__dict__["reference"] = ReferenceStatistics(mean, covariance, "any", real, len(real), provenance)
    return metric


def test_fd_dinov2_equals_scipy_s_fréchet_distance(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, fake = features(300, 1), features(200, 2, shift=0.3)
    metric = metric_against("fd_dinov2", real, weights, monkeypatch)
    (score,) = metric.score(fake, some_items(200))
    covariances = [np.cov(f.astype(np.float64), rowvar=False) for f in (fake, real)]
    gap = fake.mean(0, dtype=np.float64) - real.mean(0, dtype=np.float64)
    root = linalg.sqrtm(covariances[0] @ covariances[1]).real
    assert score.value == pytest.approx(gap @ gap + np.trace(covariances[0] + covariances[1] - 2 * root), rel=1e-6)
    assert score.backend.startswith("dinov2-vit-l-14@")
    assert "300 real" in said(score)
    assert said(score).endswith(" any")
    assert metric.score(fake[::-1], some_items(200)[::-1]) == (score,)


def test_cmmd_is_the_discrepancy_over_all_pairs(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modern, "BLOCK", 17)
    real, fake = features(90, 1), features(60, 2, shift=0.3)
    metric = metric_against("cmmd", real, weights, monkeypatch)
    (score,) = metric.score(fake, some_items(60))
    kernels = [np.exp(-(cdist(a, b) ** 2) / 200) for a, b in ((fake, fake), (real, real), (fake, real))]
    within_fake, within_real, cross = (k.mean() for k in kernels)
    assert score.value == pytest.approx(1000 * (within_fake + within_real - 2 * cross), rel=1e-6)
    unbiased = sum((k.sum() - len(k)) / (len(k) * (len(k) - 1)) for k in kernels[:2]) - 2 * cross
    assert "90 real" in said(score)
    assert f" any; n = 60 adds {score.value - 1000 * unbiased:.4f} " in said(score)
    (itself,) = metric_against("cmmd", fake, weights, monkeypatch).score(fake, some_items(60))
    assert itself.value == pytest.approx(0, abs=1e-9)


def test_cmmd_s_standard_error_is_the_spread_over_fresh_draws(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metric = metric_against("cmmd", features(80, 1), weights, monkeypatch)
    scores = [metric.score(features(60, seed, shift=0.3), some_items(60))[0] for seed in range(100, 160)]
    spread = np.std([score.value for score in scores], ddof=1)
    # 60 draws give their spread to 1 / sqrt(2 * 59) = 9 %, one sigma
    assert np.mean([score.stderr for score in scores]) == pytest.approx(spread, rel=0.3)
    # leaving an image out changes the value by 1 / N of its influence
    fake = features(60, 5, shift=0.3)
    influences = metric.influences(fake, some_items(60))
    without = [metric.score(np.delete(fake, i, 0), some_items(59))[0].value for i in range(60)]
    jackknife = 59 * (np.mean(without) - np.array(without))
    assert np.corrcoef(influences, jackknife)[0, 1] > 0.99
    np.testing.assert_allclose(influences.std(), jackknife.std(), rtol=0.05)


def test_a_folder_is_compared_with_a_reference(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`specbench reference`, then `specbench evaluate` twice; the second time no network is loaded."""
    monkeypatch.setattr(modern.FDDINOv2, "width", SMALL.dim)
    monkeypatch.setattr(modern.CMMD, "width", TINY["projection_dim"])
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i, image in enumerate(images_of(SIZES)):
        Image.fromarray(image).save(folder / f"{i}.png")
    options = ("metrics=[fd_dinov2,cmmd]", f"metrics_dir={weights}", "device=cpu")
    assert cli.main(["reference", "data=coco2017", f"images={folder}", *options]) == 0
    (folder / "0.png").unlink()
    words = ["evaluate", str(folder), *options, "out=scored"]
    assert cli.main(words) == 3  # one of the two has no value
    [row] = read_rows(tmp_path / "scored" / "row.csv")
    assert row["fd_dinov2"] is None  # the data set of the real images is not given
    assert "`specbench reference data=NAME images=DIR metrics=fd_dinov2`" in said(row)
    values = []
    for _ in range(2):
        assert cli.main([*words, "reference=coco2017"]) == 0
        [row] = read_rows(tmp_path / "scored" / "row.csv")
        values.append([row["cmmd"], row["fd_dinov2"]])
        out = capsys.readouterr().out
        assert all(f"{value:.4f}" in out for value in values[-1])
        for metric in (modern.CMMD, modern.FDDINOv2):
            monkeypatch.setattr(metric, "scorer", None)
    assert min(values[0]) > 0
    assert values[0] == values[1]
    files = sorted((tmp_path / "home" / "references" / "coco2017").iterdir())
    for name, file, width in zip(("cmmd", "fd_dinov2"), files, (TINY["projection_dim"], SMALL.dim), strict=True):
        assert row[f"{name}_backend"].endswith(f", reference {references.read(file, width).label}")
