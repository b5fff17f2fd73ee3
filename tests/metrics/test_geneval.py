"""GenEval and DPG-Bench: their prompts, and GenEval's score with small networks of the real layout."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import said
from test_preference import randomise
from torch.nn.functional import normalize

from specbench import data, metrics
from specbench.cli import fetch
from specbench.config import configuration
from specbench.data import Item
from specbench.data import geneval as prompts
from specbench.errors import UsageError
from specbench.metrics import ScoringContext, clip, mask2former, tasks
from specbench.metrics.mask2former import Instance
from specbench.storage.image_files import ImageArray

SWIN = {"embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 4, "image_size": 64}
WIDTHS = ("feature_size", "hidden_dim", "mask_feature_size", "dim_feedforward", "encoder_feedforward_dim")
SMALL_CLIP: dict[str, Any] = {
    "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                      "image_size": 224, "patch_size": 32, "projection_dim": 8},
    "text_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                    "eos_token_id": 49407, "projection_dim": 8},
    "projection_dim": 8,
}  # fmt: skip


def small_detector() -> dict[str, Any]:
    from transformers import SwinConfig

    stages = [f"stage{i}" for i in range(1, 5)]
    sizes = dict.fromkeys(WIDTHS, 32) | {"num_queries": 12, "decoder_layers": 3, "encoder_layers": 1}
    detector = {"num_labels": 80, "num_attention_heads": 2}
    return {**sizes, **detector, "backbone_config": SwinConfig(**SWIN, out_features=stages).to_dict()}


def colour_square(colour: str) -> np.ndarray:
    from PIL import ImageColor

    return np.broadcast_to(np.array(ImageColor.getrgb(colour), np.uint8), (12, 12, 3))


def draw_scene(*objects: tuple[str, str, int, int]) -> tuple[np.ndarray, list[Instance]]:
    """An image of squares (class, colour, x, y), and the instances that a perfect detector returns for it."""
    image, instances = np.full((64, 64, 3), 200, np.uint8), []
    for i, (name, colour, x, y) in enumerate(objects):
        image[y : y + 12, x : x + 12] = colour_square(colour)
        mask = np.zeros((64, 64), bool)
        mask[y : y + 12, x : x + 12] = True
        instances.append(Instance(prompts.classes().index(name), 0.99 - 0.01 * i, (x, y, x + 12, y + 12), mask))
    return image, instances


class NearestColour:
    """Replaces CLIP: returns the colour whose square is most like the piece."""

    def __call__(self, pieces: Any, name: str) -> list[str]:
        means = [piece.reshape(-1, 3).mean(0) for piece in pieces]
        expected = np.array([colour_square(colour)[0, 0] for colour in tasks.COLOURS])
        return [tasks.COLOURS[int(np.abs(expected - mean).sum(1).argmin())] for mean in means]


def make_item(tag: str, containing: str = "") -> Item:
    index, entry = next(
        (i, e) for i, e in enumerate(prompts.entries()) if (e.metadata or {})["tag"] == tag and containing in e.prompt
    )
    return Item(index, entry.prompt, None, entry.id, metadata=entry.metadata)


def solves(item: Item, image: np.ndarray, instances: list[Instance]) -> bool:
    scorer = tasks.GenEvalScorer(torch.nn.Identity(), NearestColour(), "cpu")  # type: ignore[arg-type]
    return scorer._solves(image, item.metadata or {}, instances)


def test_the_prompts_equal_geneval_s() -> None:
    cfg = configuration.compose(["data=geneval", "n=all", "images_per_prompt=4"])
    assert cfg.n == 553
    items = data.load(cfg.prompts)
    counts = Counter((item.metadata or {})["tag"] for item in items)
    assert [counts[task] for task in prompts.TASKS] == [80, 99, 80, 94, 100, 100]
    assert len({item.prompt for item in items}) == len({item.id for item in items}) == 553
    named = {part["class"] for item in items for part in (item.metadata or {})["include"]}
    assert len(prompts.classes()) == 80
    assert named <= set(prompts.classes())
    subset = data.load(cfg.changed(n=30).prompts)
    assert subset == items[:30]
    # not the file's first, which are of one task
    assert len({(item.metadata or {})["tag"] for item in subset}) == 6
    # The id is the number of the line in its file, counted from 0.
    assert next(item for item in items if item.id == "0").prompt == "a photo of a bench"
    assert len(data.images_of(cfg.changed(n=30))) == 120


def test_other_prompts() -> None:
    assert configuration.compose(["data=dpg", "n=all"]).n == 1065
    for name, why in (("geneval", "it needs no files"), ("prompts", "its file comes from you")):
        with pytest.raises(UsageError, match=f"data={name} has nothing to fetch: {why}"):
            fetch.main([f"data={name}"])


def test_drawn_scenes_solve_their_tasks() -> None:
    bench, two = make_item("single_object", "bench"), make_item("counting", "two clocks")
    assert solves(bench, *draw_scene(("bench", "red", 5, 5)))
    assert not solves(bench, *draw_scene(("chair", "red", 5, 5)))
    clocks = [("clock", "red", 5, 5), ("clock", "blue", 40, 5), ("clock", "red", 5, 40)]
    assert solves(two, *draw_scene(*clocks[:2]))
    assert not solves(two, *draw_scene(*clocks))
    assert not solves(two, *draw_scene(*clocks[:1]))
    two_colours = make_item("color_attr", "purple wine glass and a black apple")
    assert solves(two_colours, *draw_scene(("wine glass", "purple", 5, 5), ("apple", "black", 40, 40)))
    assert not solves(two_colours, *draw_scene(("wine glass", "black", 5, 5), ("apple", "purple", 40, 40)))
    position = make_item("position", "dog right of a teddy bear")
    assert solves(position, *draw_scene(("teddy bear", "brown", 5, 20), ("dog", "black", 45, 22)))
    assert not solves(position, *draw_scene(("teddy bear", "brown", 45, 20), ("dog", "black", 5, 22)))


def test_detections_count_above_the_published_thresholds() -> None:
    _, [clock] = draw_scene(("clock", "red", 5, 5))
    detections = [Instance(clock.label, score, clock.box, clock.mask) for score in (0.95, 0.31, 0.3, 0.9, 0.2)]
    assert [len(tasks.counted(detections, tag)["clock"]) for tag in ("colors", "counting")] == [3, 1]
    counted = tasks.counted([Instance(clock.label, 0.5 + i / 100, clock.box, clock.mask) for i in range(20)], "colors")
    assert [x.score for x in counted["clock"]] == sorted((0.5 + i / 100 for i in range(4, 20)), reverse=True)


def test_instances_have_the_scores_boxes_and_sizes_of_their_masks() -> None:
    """Half of the padded input is the image. It was twice as large before, so one mask pixel covers 8 x 8 of its
    pixels."""
    classes, masks = torch.full((3, 5), -20.0), torch.full((3, 16, 16), -30.0)
    classes[0, 2], classes[1, 4], classes[2, 0] = 20.0, 20.0, 20.0  # the last class is no object
    masks[0, 2:5, 1:7], masks[1] = 30.0, 30.0
    masks[2, 9:, 9:] = 30.0  # only in the padding
    [instance] = mask2former.instances(classes, masks, (64, 64), (32, 32), (64, 64), 0.3)
    assert instance.label == 2
    assert instance.score == pytest.approx(1.0, abs=0.05)  # logits fall off at the border
    assert np.abs(np.array(instance.box) - (8, 16, 56, 40)).max() <= 1
    assert instance.mask.shape == (64, 64)
    assert instance.mask.sum() == pytest.approx(48 * 24, rel=0.05)
    # An uncertain mask: the score is the mean probability of its pixels.
    masks[0] = torch.where(masks[0] > 0, 0.1, -30.0)
    [instance] = mask2former.instances(classes, masks, (64, 64), (32, 32), (64, 64), 0.3)
    assert instance.score == pytest.approx(0.52, abs=0.01)


@pytest.mark.parametrize(
    ("shape", "size"), [((256, 256), (800, 800)), ((384, 768), (667, 1333)), ((100, 1000), (133, 1333))]
)
def test_an_image_is_prepared_as_by_the_detector_s_authors(shape: tuple[int, int], size: tuple[int, int]) -> None:
    x, mask, prepared_size = mask2former.prepared(np.full((*shape, 3), 124, np.uint8))
    assert prepared_size == size
    assert x.shape[-1] % 32 == x.shape[-2] % 32 == 0
    assert int(mask.sum()) == size[0] * size[1]
    assert x[0, 0, 0, 0] == pytest.approx((124 / 255 - 0.485) / 0.229, abs=1e-5)
    assert not x[0, :, size[0] :].any()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small versions of both networks, in the layout of the published files."""
    from safetensors.torch import load_file, save_file
    from transformers import CLIPConfig, CLIPModel, Mask2FormerConfig, Mask2FormerForUniversalSegmentation

    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    (folder / "mask2former").mkdir()
    detector = Mask2FormerForUniversalSegmentation(Mask2FormerConfig(**small_detector()))
    detector.save_pretrained(folder / "own")
    torch.save(load_file(folder / "own/model.safetensors"), folder / "mask2former/pytorch_model.bin")
    (folder / "clip_l14").mkdir()
    state = CLIPModel(CLIPConfig(**SMALL_CLIP)).state_dict()
    save_file({name: x.clone() for name, x in randomise(state).items()}, folder / "clip_l14/model.safetensors")
    return folder


@pytest.fixture
def small(weights: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    load, load_both = mask2former.load, clip.load_both
    monkeypatch.setenv("SPECBENCH_HOME", str(weights / "home"))
    monkeypatch.setattr(mask2former, "load", lambda path, device: load(path, device, small_detector()))
    monkeypatch.setattr(mask2former, "SHORTER", 64)
    monkeypatch.setattr(clip, "load_both", lambda path, device, settings: load_both(path, device, SMALL_CLIP))
    monkeypatch.setattr(tasks.weights, "published", lambda context, part, path: path)
    return weights


def test_colours_equal_clip_s_zero_shot_classifier(small: Path) -> None:
    network: Any = clip.load_both(small / "clip_l14/model.safetensors", "cpu", clip.L14)
    pieces = [colour_square("red"), np.random.default_rng(0).integers(0, 256, (20, 33, 3), dtype=np.uint8)]
    predicted = tasks.ColourClassifier(network, "cpu")(pieces, "wine glass")
    x = torch.stack([tasks.normalised(tasks.square(piece, 224), tasks.CLIP) for piece in pieces])
    seen = network.visual_projection(network.vision_model(x).pooler_output)
    for row, colour in zip(seen, predicted):
        cosines = []
        for candidate in tasks.COLOURS:
            texts = [
                f"a photo of a {candidate} wine glass",
                f"a photo of a {candidate}-colored wine glass",
                f"a photo of a {candidate} object",
            ]
            embedded = network.text_projection(network.text_model(clip.captions()(texts)).pooler_output)
            cosines.append(float(torch.cosine_similarity(normalize(embedded, dim=-1).mean(0), row, dim=0)))
        assert tasks.COLOURS[int(np.argmax(cosines))] == colour


def test_a_piece_is_the_object_on_grey() -> None:
    image, [clock] = draw_scene(("clock", "red", 5, 7))
    clock.mask[7, 5] = False
    piece = tasks.cut_out(image, clock)
    assert piece.shape == (12, 12, 3)
    assert (piece[0, 0] == 0x99).all()
    assert (piece[1:] == colour_square("red")[0, 0]).all()


def test_images_are_scored_by_task_whatever_the_batch(small: Path) -> None:
    items = [make_item(tag) for tag in prompts.TASKS]
    images = np.random.default_rng(0).integers(0, 256, (6, 64, 64, 3), dtype=np.uint8)
    context = ScoringContext(small, small)
    scores = metrics.score(["geneval"], ImageArray(images), items, context)
    assert scores["geneval"].value == 0.0  # noise
    assert all(scores[f"geneval_{task}"].value == 0.0 for task in prompts.TASKS)
    assert "mask2former-swin-s@" in scores["geneval"].backend
    assert "not the paper's" in scores["geneval"].backend
    scorer = metrics.metric("geneval", context).scorer()
    outputs = scorer(list(images), items)
    assert outputs[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    alone = [scorer([image], [single]) for image, single in zip(images, items)]
    assert np.array_equal(outputs, np.concatenate(alone))
    refused = metrics.score(["geneval"], ImageArray(images[:1]), [Item(0, "a cup", None, "0")], context)
    assert "data=geneval" in said(refused["geneval"])


def test_weights_of_another_network_are_refused(weights: Path, tmp_path: Path) -> None:
    tensors = torch.load(weights / "mask2former/pytorch_model.bin", weights_only=True)
    path = tmp_path / "pytorch_model.bin"
    torch.save({name: x for name, x in tensors.items() if name != "class_predictor.weight"}, path)
    with pytest.raises(UsageError, match="Swin-S.*class_predictor.weight"):
        mask2former.load(path, "cpu", small_detector())
    path.write_bytes(b"junk")
    with pytest.raises(UsageError, match="pytorch_model.bin"):
        mask2former.load(path, "cpu", small_detector())


def test_the_detector_has_the_published_size() -> None:
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation

    with torch.device("meta"):
        network = Mask2FormerForUniversalSegmentation(Mask2FormerConfig(**mask2former.SETTINGS))
    assert round(sum(p.numel() for p in network.parameters()) / 1e6) == 69  # million, in the paper's table
