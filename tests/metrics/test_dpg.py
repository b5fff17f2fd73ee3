"""DPG-Bench's score: its table, the published arithmetic on hand-made answers, and its VQA model."""

from __future__ import annotations

import csv
import re
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import said

from specbench import metrics
from specbench.config import indices
from specbench.data import Item
from specbench.errors import UsageError
from specbench.metrics import ScoringContext, dpg
from specbench.rows import remarks
from specbench.rows.remark import as_json, free
from specbench.storage.image_files import ImageArray

HEADER = (
    "item_id text keywords proposition_id dependency category_broad category_detailed tuple question_natural_language"
).split()
#: (item, number, parents, tuple): a chain 1 <- 2 <- 3, a question 4 of two parents, and one whose parent follows it.
ROWS = [
    ("0", 1, "0", "entity - whole (cabbages)"),
    ("0", 2, "1", "attribute - color (cabbages, green)"),
    ("0", 3, "2", "attribute - shape (cabbages, round)"),
    ("0", 4, "1, 2", "relation - spatial (cabbages, soil, in)"),
    ("1", 1, "2", "entity - part (truck's paint)"),
    ("1", 2, "0", "entity - whole (truck)"),
    ("1", 3, "1", "global - (photo)"),
]


def write(weights: Path, rows: Sequence[tuple[str, int, str, str]] = ROWS, skipped: str = "not read") -> Path:
    """The table in a folder of weights. Its first row is never read."""
    path = weights / dpg.QUESTIONS / dpg.TABLE
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as f:
        table = csv.writer(f)
        table.writerow(HEADER)
        for item, number, parents, where in [(skipped, 1, "0", "other - count (x)"), *rows]:
            table.writerow([item, "a text, quoted", "", number, parents, "", "", where, f"Is it {number} of {item}?"])
    return path


def answered(context: ScoringContext, answers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A VQA model that answers each question with a given text or with "no". The first value of an image identifies
    it."""
    monkeypatch.setattr(dpg.MPLUG, "cache_key", classmethod(lambda cls, _: "made by hand"))

    def vqa_model(image: np.ndarray, question: str) -> str:
        return answers.get(f"{image[0, 0, 0]} {question}", "no")

    monkeypatch.setattr(dpg.MPLUG, "load", classmethod(lambda cls, _: vqa_model))


def images(*levels: int) -> ImageArray:
    return ImageArray(np.stack([np.full((8, 8, 3), level, np.uint8) for level in levels]))


def item(name: str, repeat: int = 0) -> Item:
    return Item(int(name) + repeat * indices.STRIDE, f"prompt {name}", None, name)


def test_the_score_of_an_image_follows_the_published_arithmetic(tmp_path: Path) -> None:
    """Every combination of answers, against the plain rule: in the order of the file, a question becomes 0 if a parent
    is 0 at that moment."""
    questions = dpg.read(write(tmp_path))
    for answers in np.ndindex(2, 2, 2, 2):
        first, second, third, fourth = answers
        second = second and first
        third = third and second
        fourth = fourth and first and second
        assert dpg.image_score(answers, questions["0"]) == (first + second + third + fourth) / 4
    for answers in np.ndindex(2, 2, 2):
        first, second, third = answers
        first = first and second  # the first question depends on the second, which comes after it
        third = third and first
        assert dpg.image_score(answers, questions["1"]) == (first + second + third) / 3


def test_a_no_passes_on_to_grandchildren_but_not_backwards(tmp_path: Path) -> None:
    questions = dpg.read(write(tmp_path))["0"]
    assert dpg.image_score((0, 1, 1, 1), questions) == 0  # 2 and 4 by their parent 1, and 3 by 2
    late = {1: dpg.Question("", (2,), ""), 2: dpg.Question("", (3,), ""), 3: dpg.Question("", (), "")}
    assert dpg.image_score((1, 1, 0), late) == 1 / 3  # 1 was decided before 2 became 0


def test_the_columns_are_means_of_prompts_and_of_the_last_image_s_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    context = ScoringContext(tmp_path, tmp_path)
    yes = [
        *("10 Is it 1 of 0?", "10 Is it 2 of 0?", "10 Is it 3 of 0?", "10 Is it 4 of 0?"),
        *("11 Is it 2 of 0?", "11 Is it 3 of 0?"),  # all become 0, since question 1 is not answered by yes
        *("12 Is it 1 of 1?", "12 Is it 2 of 1?"),
        *("13 Is it 1 of 1?", "13 Is it 3 of 1?"),
    ]
    answered(context, dict.fromkeys(yes, "yes"), monkeypatch)
    # The order of the images does not matter: the last one of a prompt is the one with the largest number.
    levels, items = [11, 13, 10, 12], [item("0", 1), item("1", 1), item("0"), item("1")]
    columns = metrics.score(["dpg"], images(*levels), items, context)
    scores = {"0": (4 / 4 + 0 / 4) / 2, "1": (2 / 3 + 0 / 3) / 2}
    assert columns["dpg"].value == pytest.approx(100 * (scores["0"] + scores["1"]) / 2)
    last = {"entity": [0, 1, 0], "attribute": [1, 1], "relation": [0], "global": [1]}  # raw answers of images 11 and 13
    for name, answers in last.items():
        assert columns[f"dpg_{name}"].value == pytest.approx(100 * sum(answers) / len(answers)), name
    assert columns["dpg_other"].value is None
    assert said(columns["dpg_other"])
    assert re.match(r"2 prompts of 2 images .*1065 of 4\b", said(columns["dpg"]))
    assert "entity - part 100.00, entity - whole 0.00" in said(columns["dpg"])
    # Over two prompts; the images of a prompt count together.
    spread = np.std([100 * value for value in scores.values()], ddof=1) / np.sqrt(2)
    assert columns["dpg"].stderr == pytest.approx(spread)


@pytest.mark.parametrize("answer", ["Yes", "yes it is", "", "no", " yes"])
def test_only_yes_is_a_hit(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    context = ScoringContext(tmp_path, tmp_path)
    answered(context, {f"10 Is it {number} of 0?": answer for number in (1, 2, 3, 4)}, monkeypatch)
    assert metrics.score(["dpg"], images(10), [item("0")], context)["dpg"].value == 0


def test_a_prompt_whose_parent_is_not_in_the_table_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is a prompt whose parent is the first row, which is never read: the published code fails at such a file and
    leaves it out."""
    write(tmp_path, ROWS[1:], skipped="0")
    context = ScoringContext(tmp_path, tmp_path)
    answered(context, {"20 Is it 2 of 1?": "yes"}, monkeypatch)
    metric = metrics.metric("dpg", context)
    assert not dpg.is_scored(metric.table["0"])  # type: ignore[attr-defined]
    scores = metrics.score(["dpg"], images(10, 20, 30), [item("0"), item("1"), item("1", 1)], context)
    assert scores["dpg"].value == pytest.approx(100 * (1 / 3 + 0) / 2)
    assert re.match(r"1 prompts of 2 images .*1065 of 4\b.* 1 prompts left out", said(scores["dpg"]))
    outputs = metric.scorer()([*images(10, 20, 30)], [item("0"), item("1"), item("1", 1)])
    assert np.isnan(outputs[0]).all()
    assert metric.per_image(outputs) is None
    moved = metric.influences(outputs, [])
    assert moved is not None
    np.testing.assert_allclose(moved, np.array([0, 100 / 6, -100 / 6]) * 3 / 2)
    alone = metrics.score(["dpg"], images(10), [item("0")], context)["dpg"]
    assert (alone.value, said(alone)[:9]) == (None, "no prompt")


def test_prompts_of_another_table_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    context = ScoringContext(tmp_path, tmp_path)
    answered(context, {}, monkeypatch)
    score = metrics.score(["dpg"], images(10), [item("7")], context)["dpg"]
    assert score.value is None
    assert re.match("dpg_bench.csv .*data=dpg", said(score))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("item_id,text\n0,a\n", "column proposition_id.*dpg_bench.csv"),
        (",".join(HEADER) + "\nskipped\n0,a,,1,x,,,entity - whole (a),Is it?\n", "line 3: invalid literal"),
        (",".join(HEADER) + "\nskipped\n0,a,,1\n", "line 3: .*dpg_bench.csv"),
    ],
)
def test_errors_of_the_table_are_named(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "dpg_bench.csv").write_text(text)
    with pytest.raises(UsageError, match=why):
        dpg.read(tmp_path / "dpg_bench.csv")


def test_a_prompt_has_as_many_questions_as_outputs_hold(tmp_path: Path) -> None:
    rows = [("0", number, "0", "other - count (x)") for number in range(1, dpg.QuestionScorer.MOST)]
    assert len(dpg.read(write(tmp_path, rows))["0"]) == 127
    with pytest.raises(UsageError, match="128.*item 0.*127.*dpg_bench.csv"):
        dpg.read(write(tmp_path, [*rows, ("0", 128, "0", "other - count (x)")]))


def test_the_published_vqa_model_is_asked_the_bare_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake of the package modelscope, which is not installed here."""
    asked: list[Any] = []

    def pipeline(task: str, **options: Any) -> Callable[[dict[str, Any]], dict[str, str]]:
        asked.append((task, options))

        def answers(request: dict[str, Any]) -> dict[str, str]:
            asked.append((np.asarray(request["image"]).tolist(), request["question"]))
            return {"text": "yes"}

        return answers

    context = ScoringContext(tmp_path, tmp_path)
    message = metrics.missing("dpg", context)
    assert re.search("pytorch_model.bin .*`modelscope download --model damo/mplug_visual", message)
    folder = tmp_path / dpg.MPLUG.FOLDER
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    write(tmp_path)
    assert metrics.metric("dpg", context).cache_key.startswith("dpg-bench by mplug-large@")
    absent = metrics.score(["dpg"], images(10), [item("1")], context)["dpg"]
    assert "pip install 'modelscope[multi-modal]'" in said(absent)
    for name, content in {
        "modelscope": {},
        "modelscope.pipelines": {"pipeline": pipeline},
        "modelscope.utils": {},
        "modelscope.utils.constant": {"Tasks": types.SimpleNamespace(visual_question_answering="vqa")},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    assert metrics.score(["dpg"], images(10), [item("1")], context)["dpg"].value == 100
    assert asked[0] == ("vqa", {"model": str(folder), "device": "cpu"})
    assert [question for _, question in asked[1:]] == [f"Is it {number} of 1?" for number in (1, 2, 3)]
    assert asked[1][0] == np.full((8, 8, 3), 10).tolist()


def test_why_a_column_with_a_digit_is_empty_is_said() -> None:
    reasons = {"dpg": "no table", "fd_dinov2": "no weights; read them first", "hpsv2": "no file"}
    row = {"remarks": as_json(free(text).about(column) for column, text in reasons.items())}
    reasons = remarks.unmeasured(["dpg", "fd_dinov2", "hpsv2"], row)
    assert reasons == {"dpg": "no table", "fd_dinov2": "no weights; read them first", "hpsv2": "no file"}
