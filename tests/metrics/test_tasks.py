"""GenEval's rules on hand-made detections, its statistics, and the embedded counterpart on drawn scenes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from commands import said

from specbench import metrics
from specbench.config import configuration
from specbench.config.run_config import PromptSelection
from specbench.data import Item, scenes, scenes_geneval, worlds
from specbench.data.geneval import TASKS
from specbench.metrics import ASSETS, ScoringContext
from specbench.metrics.scenes import readable
from specbench.metrics.tasks import Detection, read_objects, relations, solves
from specbench.models import evaluators as ev
from specbench.storage.image_files import ImageArray

N = 60


def box_at(x: float, y: float, colour: str = "") -> Detection:
    return Detection((x - 5, y - 5, x + 5, y + 5), colour)


def own_colours(detections: Any, _: str) -> list[str]:
    return [detection.colour for detection in detections]


def test_a_position_is_given_by_the_centres_with_a_margin() -> None:
    middle = box_at(50, 50)
    assert relations(box_at(20, 50), middle) == {"left of"}
    assert relations(box_at(80, 50), middle) == {"right of"}
    assert relations(box_at(50, 20), middle) == {"above"}
    assert relations(box_at(50, 80), middle) == {"below"}
    # more than half of the offset along both axes
    assert relations(box_at(80, 20), middle) == {"right of", "above"}
    assert relations(box_at(80, 40), middle) == {"right of"}
    # The sizes are 10 + 10: a tenth of both is 2 pixels, which an offset must exceed.
    assert relations(box_at(52, 50), middle) == set()
    # The rest is measured in units of the whole offset: (3 - 2) / 3 is less than half, (5 - 2) / 5 is more.
    assert relations(box_at(53, 50), middle) == set()
    assert relations(box_at(55, 50), middle) == {"right of"}


CUP, TWO = {"class": "cup", "count": 1}, {"class": "cup", "count": 2}


@pytest.mark.parametrize(
    ("metadata", "detections", "solved"),
    [
        ({"include": [CUP]}, {"cup": [box_at(0, 0)]}, True),
        # more objects do not matter
        ({"include": [CUP]}, {"cup": [box_at(0, 0), box_at(9, 9)], "dog": [box_at(5, 5)]}, True),
        ({"include": [CUP]}, {"dog": [box_at(5, 5)]}, False),
        ({"include": [CUP, {"class": "dog", "count": 1}]}, {"cup": [box_at(0, 0)]}, False),
        ({"include": [TWO], "exclude": [{"class": "cup", "count": 3}]}, {"cup": [box_at(0, 0)] * 2}, True),
        ({"include": [TWO], "exclude": [{"class": "cup", "count": 3}]}, {"cup": [box_at(0, 0)] * 3}, False),
        ({"include": [TWO], "exclude": [{"class": "cup", "count": 3}]}, {"cup": [box_at(0, 0)]}, False),
        ({"include": [{**CUP, "color": "red"}]}, {"cup": [box_at(0, 0, "red")]}, True),
        ({"include": [{**CUP, "color": "red"}]}, {"cup": [box_at(0, 0, "blue")]}, False),
        # only the most confident detections count, as many as requested
        ({"include": [{**CUP, "color": "red"}]}, {"cup": [box_at(0, 0, "blue"), box_at(9, 9, "red")]}, False),
        ({"include": [CUP, {"class": "dog", "count": 1, "position": ["left of", 0]}]},
         {"cup": [box_at(50, 0)], "dog": [box_at(0, 0)]}, True),
        ({"include": [CUP, {"class": "dog", "count": 1, "position": ["left of", 0]}]},
         {"cup": [box_at(0, 0)], "dog": [box_at(50, 0)]}, False),
        ({"include": [CUP, {"class": "dog", "count": 1, "position": ["left of", 0]}]}, {"dog": [box_at(50, 0)]}, False),
    ],
)  # fmt: skip
def test_detections_that_solve_a_task(
    metadata: dict[str, Any], detections: dict[str, list[Detection]], solved: bool
) -> None:
    assert solves(metadata, detections, own_colours) is solved


def test_captions_pose_their_task_in_turn_and_are_new_to_the_models() -> None:
    items = scenes_geneval.items(PromptSelection("scenes_geneval", N, 3))
    assert [item.metadata["tag"] for item in items if item.metadata] == list(TASKS) * (N // len(TASKS))
    assert items[:7] == scenes_geneval.items(PromptSelection("scenes_geneval", 7, 0))
    assert all(worlds.is_validation(scenes_geneval.sample(item.index).scene) for item in items)
    towers = ev.load(ASSETS / "scenes_two_tower.safetensors", ev.TwoTower)
    assert all(readable(towers, item.prompt) for item in items)
    counts = [part["count"] for item in items[2::6] for part in (item.metadata or {})["include"]]
    assert max(counts) in (2, 3)
    assert configuration.compose(["data=scenes_geneval", "metrics=scenes_all"]).get("metrics") == [
        "scenes_fid", "scenes_clip", "scenes_reward", "scenes_geneval"
    ]  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_a_scene_solves_the_tasks_of_its_own_caption_but_not_of_others(task: str) -> None:
    number = TASKS.index(task)
    labels = scenes_geneval.sample(number).scene.labels()
    posed = scenes_geneval.tasks_of(labels)
    assert solves(posed[task], read_objects(labels), own_colours)
    others = [scenes_geneval.sample(number + 6 * i).scene.labels() for i in range(1, 12)]
    # by chance, 1 of 5 single shapes is the same, and fewer of the other scenes: never 11 of 11
    assert sum(solves(posed[task], read_objects(other), own_colours) for other in others) < 8


@pytest.fixture(scope="module")
def drawn() -> np.ndarray:
    return np.stack([scenes.draw(scenes_geneval.sample(i)) for i in range(N)])


def score(images: np.ndarray, items: list[Item]) -> dict[str, metrics.Score]:
    return metrics.score(["scenes_geneval"], ImageArray(images), items, ScoringContext(ASSETS, ASSETS))


def test_the_reader_reads_real_scenes_and_not_those_of_other_prompts(drawn: np.ndarray) -> None:
    items = scenes_geneval.items(PromptSelection("scenes_geneval", N))
    scores = score(drawn, items)
    # 0.993 of 6,000 (docs/metrics.md): fewer than 54 of 60 have a probability below 1e-6
    assert (scores["geneval"].value or 0) >= 0.9
    assert scores["geneval"].backend.startswith("scenes-reader@")
    assert re.search("6 tasks .*10, 10, 10, 10, 10, 10", said(scores["geneval"]))
    shifted = score(np.roll(drawn, 6, 0), items)
    assert (shifted["geneval"].value or 0) < 0.5
    parts = [shifted[f"geneval_{task}"] for task in TASKS]
    assert shifted["geneval"].value == pytest.approx(np.mean([part.value for part in parts]))
    # the tasks have different images, so their errors add up
    errors = [part.stderr or 0.0 for part in parts]
    assert shifted["geneval"].stderr == pytest.approx(np.sqrt(np.square(errors).sum()) / 6, rel=0.06)  # 10 / 9, 60 / 59


def test_images_of_one_prompt_count_once_in_the_error(drawn: np.ndarray) -> None:
    items = scenes_geneval.items(PromptSelection("scenes_geneval", N))
    wrong = np.roll(drawn, 6, 0)
    once, twice = score(wrong, items), score(np.concatenate([wrong, wrong]), [*items, *items])
    for name in once:
        assert twice[name].value == pytest.approx(once[name].value)
        assert twice[name].stderr == pytest.approx(once[name].stderr)


def test_captions_of_scenes_pose_every_task_that_they_can() -> None:
    """`specbench run metrics=scenes_geneval` with the default prompts fills every column."""
    samples = [scenes.sample("validation", i) for i in range(80)]
    items = [Item(s.index, s.caption, tuple(s.scene.labels()), str(s.index)) for s in samples]
    scores = score(np.stack([scenes.draw(s) for s in samples]), items)
    assert min(task_score.value or 0 for task_score in scores.values()) > 0.8
    metric = metrics.metric("scenes_geneval", ScoringContext(ASSETS, ASSETS))
    labels = np.array([item.labels for item in items], dtype=np.float32)
    broken = labels.copy()
    broken[::3] = np.roll(labels, 1, 0)[::3]  # a third has other captions
    moved, total = metric.influences(broken, items), metric.score(broken, items)[0]
    assert moved is not None
    assert moved.mean() == pytest.approx(0, abs=1e-12)
    assert total.stderr == pytest.approx(moved.std(ddof=1) / np.sqrt(len(moved)))
    without = [metric.score(np.delete(broken, i, 0), items[:i] + items[i + 1 :])[0].value for i in range(80)]
    jackknife = (np.mean(without) - np.array(without)) * 79
    np.testing.assert_allclose(moved, jackknife, atol=0.25)  # to first order; a task has as few as eight images
    assert np.corrcoef(moved, jackknife)[0, 1] > 0.99


def test_prompts_without_labels_or_tasks_are_refused(drawn: np.ndarray) -> None:
    none = score(drawn[:2], [Item(0, "a cup", None, "0"), Item(1, "a dog", None, "1")])
    assert none["geneval"].value is None
    assert none["geneval_colors"].value is None
    assert said(none["geneval_colors"])
    few = score(drawn[:6:3], [scenes_geneval.items(PromptSelection("scenes_geneval", 4))[i] for i in (0, 3)])
    assert few["geneval"].value is None
    assert said(few["geneval"]).endswith(" two_object, counting, position, color_attr")
    assert few["geneval_colors"].value == 1.0
    # One prompt per task.
    per_task = score(np.roll(drawn[:6], 1, 0), scenes_geneval.items(PromptSelection("scenes_geneval", 6)))
    assert per_task["geneval"].value is not None
    assert {task_score.stderr for task_score in per_task.values()} == {None}
