"""Soft-TIFA: Qwen3-VL as a VQA model, the published arithmetic on hand-made answers, and the embedded reader."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny_vqa
import torch
from PIL import Image
from tiny_vqa import vqa_weights as vqa_weights
from tokenizers import Tokenizer

from specbench import cli, metrics
from specbench.config import configuration
from specbench.data import Item, geneval2, scenes
from specbench.data.worlds import ABSENT
from specbench.errors import UsageError
from specbench.metrics import ASSETS, ScoringContext, qwen3_vl, soft_tifa
from specbench.metrics.base import QuestionScorer, Unavailable
from specbench.models import evaluators as ev
from specbench.storage.image_files import ImageArray

BICYCLES = {
    "prompt": "four white bicycles in front of three plastic cows",
    "atom_count": 7,
    "vqa_list": [
        ["How many bicycles are in the image?", "four"], ["Are the bicycles white?", "Yes"],
        ["Are there any bicycles in the image?", "Yes"], ["Are the bicycles in front of the cows?", "Yes"],
        ["How many cows are in the image?", "three"], ["Are the cows plastic?", "Yes"],
        ["Are there any cows in the image?", "Yes"],
    ],
    "skills": ["count", "attribute", "object", "position", "count", "attribute", "object"],
}  # fmt: skip
DOG = {
    "prompt": "a dog chasing a cat",
    "atom_count": 3,
    "vqa_list": [["Are there any dogs in the image?", "Yes"], ["Is the dog chasing the cat?", "Yes"]],
    "skills": ["object", "verb"],
}
LINES = (BICYCLES, DOG)


def items(*lines: dict[str, Any]) -> list[Item]:
    return [Item(i, line["prompt"], None, str(i + 1), metadata=line) for i, line in enumerate(lines)]


def pictures(*sizes: tuple[int, int]) -> list[np.ndarray]:
    stream = np.random.default_rng(0)
    small = (Image.fromarray(stream.integers(0, 256, (4, 4, 3), np.uint8)) for _ in sizes)
    return [np.asarray(picture.resize(size[::-1], Image.Resampling.NEAREST)) for picture, size in zip(small, sizes)]


def test_the_distribution_of_an_answer_equals_transformers(vqa_weights: Path) -> None:
    """The reference is its image processor and its greedy generation of one token, whose scores the published code
    reads. The text follows the chat template: an image, the question, and the start of the answer."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLForConditionalGeneration

    folder = vqa_weights / qwen3_vl.FOLDER
    vqa_model = qwen3_vl.VQAModel(ScoringContext(vqa_weights, vqa_weights))
    reference: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder).eval()
    processor = Qwen2VLImageProcessor(patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    by_question = []
    for image, shape in zip(pictures((64, 64), (96, 160), (70, 45)), [(64, 64), (96, 160), (64, 32)]):
        resized = Image.fromarray(image).resize(shape[::-1], Image.Resampling.BICUBIC)
        seen = processor(images=[resized], do_resize=False, return_tensors="pt")
        for question in ("Is it red?", "How many are there?"):
            text = (
                "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * (shape[0] * shape[1] // 32**2)
                + f"<|vision_end|>{question} Answer in one word.<|im_end|>\n<|im_start|>assistant\n"
            )  # fmt: skip
            ids = torch.tensor([tokens.encode(text).ids])
            inputs = {"input_ids": ids, "mm_token_type_ids": (ids == tiny_vqa.IMAGE).int(), **seen}
            output = reference.generate(
                **inputs, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, output_scores=True,
                return_dict_in_generate=True,
            )  # fmt: skip
            expected = output.scores[0][0].softmax(-1)
            actual = vqa_model(image, question + soft_tifa.SUFFIX)
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-3)
            by_question.append(expected)
    apart = torch.stack(by_question)
    # every image and question has a different distribution
    assert torch.cdist(apart, apart).add(torch.eye(6)).min() > 1e-3


def test_the_questions_of_a_prompt_fit_into_the_outputs() -> None:
    assert geneval2.MOST == QuestionScorer.MOST


def test_spellings() -> None:
    counted = soft_tifa.spellings("How many cows are in the image?", "four")
    assert sorted(counted) == sorted(["four", "Four", "4", " four", " Four", " 4"])
    assert sorted(soft_tifa.spellings("Are the cows white?", "Yes")) == sorted(["Yes", "yes", " yes", " Yes"])


def test_a_shared_first_token_counts_for_each_spelling(vqa_weights: Path) -> None:
    """The tokenizer of bytes begins " yes" and " Yes" with the same blank, so its probability counts twice, and a
    question's score exceeds 1 if a VQA model is certain."""
    vqa_model = qwen3_vl.VQAModel(ScoringContext(vqa_weights, vqa_weights))
    tokens = [vqa_model.first_token(text) for text in soft_tifa.spellings("Is it red?", "Yes")]
    assert len(tokens) == 4
    assert len(set(tokens)) == 3
    [blank] = {token for token in tokens if tokens.count(token) == 2}
    assert vqa_model.answer(torch.eye(tiny_vqa.IMAGE)[blank]) == " "
    probs = torch.full((tiny_vqa.IMAGE,), 0.001)
    probs[blank] = 0.7
    assert soft_tifa.question_score(probs, tokens) == pytest.approx(0.7 + 0.7 + 0.002)


SCORES = np.array([
    [0.9, 0.8, 1.0, 0.5, 0.3, 0.25, 0.6],  # BICYCLES
    [1.3, 0.7, np.nan, np.nan, np.nan, np.nan, np.nan],  # DOG; one score above 1
    [0.4, 0.0, np.nan, np.nan, np.nan, np.nan, np.nan],  # DOG, too: a score of 0
])  # fmt: skip


def score_prompts(vqa_weights: Path, scores: np.ndarray, prompts: Sequence[Item]) -> dict[str, metrics.Score]:
    metric = metrics.metric("geneval2", ScoringContext(vqa_weights, vqa_weights))
    names = ("gm", "am", *geneval2.SKILLS)
    return dict(zip(names, metric.score(scores, prompts), strict=True))


def test_columns_follow_the_published_arithmetic(vqa_weights: Path) -> None:
    """Written out: the means of prompts, then of the benchmark; skills over all questions; times 100."""
    columns = score_prompts(vqa_weights, SCORES, items(BICYCLES, DOG, {**DOG, "prompt": "a dog"}))
    product = 0.9 * 0.8 * 1.0 * 0.5 * 0.3 * 0.25 * 0.6
    assert columns["gm"].value == pytest.approx(100 * (product ** (1 / 7) + (1.3 * 0.7) ** (1 / 2) + 0) / 3)
    assert columns["am"].value == pytest.approx(100 * (4.35 / 7 + 2.0 / 2 + 0.4 / 2) / 3)
    pools = {
        "count": [0.9, 0.3], "attribute": [0.8, 0.25], "object": [1.0, 0.6, 1.3, 0.4], "position": [0.5],
        "verb": [0.7, 0.0],
    }  # fmt: skip
    for skill, pool in pools.items():
        assert columns[skill].value == pytest.approx(100 * sum(pool) / len(pool)), skill
    note = columns["gm"].note
    assert f"by number of atoms 3: {100 * (0.91**0.5 + 0) / 2:.2f}, 7: {100 * product ** (1 / 7):.2f}" in note
    assert "1 of 3 images have a question with score 0 and so a GM of 0" in note
    assert "1 question scores are above 1" in note


def test_images_of_one_prompt_count_once_in_the_error(vqa_weights: Path) -> None:
    prompts = items(BICYCLES, DOG, {**DOG, "prompt": "a dog"})
    once = score_prompts(vqa_weights, SCORES, prompts)
    twice = score_prompts(vqa_weights, np.concatenate([SCORES, SCORES]), [*prompts, *prompts])
    for name in ("gm", "am", "object"):
        assert twice[name].value == pytest.approx(once[name].value)
        assert twice[name].stderr == pytest.approx(once[name].stderr)
        assert once[name].stderr


def test_a_skill_without_a_question_is_not_measured(vqa_weights: Path) -> None:
    columns = score_prompts(vqa_weights, SCORES[1:2], items(DOG))
    assert (columns["count"].value, columns["count"].note) == (None, "no prompt asks for it")
    assert columns["verb"].value == pytest.approx(70)


def write(folder: Path, *lines: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / geneval2.FILE
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_run_and_a_folder_of_images_are_scored(vqa_weights: Path, tmp_path: Path) -> None:
    """From the command line to the row, with a small VQA model of random weights. `evaluate` gives the same values."""
    write(tmp_path / "data", *LINES)
    where = [f"data_dir={tmp_path / 'data'}", f"metrics_dir={vqa_weights}"]
    arguments = ["method=vanilla", "data=geneval2", "n=all", "metrics=geneval2", "warmup=0", "timing=false", *where]
    assert cli.main(["run", *arguments, f"out={tmp_path / 'run'}"]) == 0
    row = pd.read_csv(tmp_path / "run" / "row.csv").iloc[0]
    records = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    vqa_model = qwen3_vl.VQAModel(ScoringContext(vqa_weights, vqa_weights))
    by_prompt = {line["prompt"]: line for line in LINES}
    means, objects = [], []
    for record in records:
        line = by_prompt[record["prompt"]]
        image = np.asarray(Image.open(next((tmp_path / "run").rglob(f"{record['index']:05d}.png"))))
        scores = []
        for (question, answer), skill in zip(line["vqa_list"], line["skills"]):
            probs = vqa_model(image, f"{question} Answer in one word.")
            if answer == "Yes":
                texts = ["Yes", "yes", " yes", " Yes"]
            else:
                digit = {"four": "4", "three": "3"}[answer]
                texts = [answer, answer.title(), " " + answer, " " + answer.title(), digit, " " + digit]
            scores.append(sum(float(probs[vqa_model.tokenizer.encode(text).ids[0]]) for text in texts))
            objects += scores[-1:] if skill == "object" else []
        means.append(np.prod(scores) ** (1 / len(scores)))
    assert row["soft_tifa_gm"] == pytest.approx(100 * np.mean(means))
    assert row["soft_tifa_object"] == pytest.approx(100 * np.mean(objects))
    assert row["soft_tifa_gm_backend"].startswith("soft-tifa by qwen3-vl-8b-instruct@")
    photos = tmp_path / "photos"
    photos.mkdir()
    for record in records:
        image = next((tmp_path / "run").rglob(f"{record['index']:05d}.png"))
        (photos / f"{record['id']}.png").write_bytes(image.read_bytes())
    words = ["evaluate", str(photos), "data=geneval2", "n=all", "metrics=geneval2", *where]
    assert cli.main([*words, f"out={tmp_path / 'scored'}"]) == 0
    again = pd.read_csv(next((tmp_path / "scored").rglob("row.csv"))).iloc[0]
    assert again["soft_tifa_gm"] == pytest.approx(row["soft_tifa_gm"], rel=1e-6)


def test_prompts_without_questions_are_refused(vqa_weights: Path) -> None:
    context = ScoringContext(vqa_weights, vqa_weights)
    scores = metrics.score(["geneval2"], ImageArray(np.zeros((1, 64, 64, 3), np.uint8)), [Item(0, "a", None)], context)
    assert scores["soft_tifa_gm"].note.endswith("score images of data=geneval2")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"skills": ["object"]}, "2 questions have 1 skills"),
        ({"skills": ["object", "taste"]}, "the skill 'taste' is none of object, attribute"),
        ({"vqa_list": [["Is it red?", "No"], ["Is it?", "Yes"]]}, r"'Is it red\?' has the answer 'No', not Yes or"),
        ({"vqa_list": [["How many are there?", "eleven"], ["Is it?", "Yes"]]}, "has the answer 'eleven'"),
        ({"vqa_list": [["Is it?"], ["Is it?", "Yes"]]}, "a pair of texts"),
        ({"vqa_list": 3}, "must be an integer, vqa_list and skills lists"),
        ({"vqa_list": [], "skills": []}, "0 questions have 0 skills"),
    ],
)
def test_errors_in_the_file_are_named(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=rf"geneval2_data.jsonl, line 2: .*{why}.*fetch GenEval 2's file again"):
        geneval2.read(write(tmp_path, BICYCLES, {**DOG, **change}))
    with pytest.raises(UsageError, match="line 1: atom_count, vqa_list and skills are not all there"):
        geneval2.read(write(tmp_path, {"prompt": "a dog"}))


def test_prompts_are_grouped_by_their_number_of_atoms(tmp_path: Path) -> None:
    path = write(tmp_path, *LINES)
    assert [(item.id, item.kind, item.metadata) for item in geneval2.read(path)] == [
        ("1", "7 atoms", BICYCLES), ("2", "3 atoms", DOG)
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"needs geneval2_data.jsonl, .* run `specbench fetch data=geneval2`"):
        configuration.compose(["data=geneval2", "n=all", f"data_dir={tmp_path / 'empty'}"])


def test_missing_or_wrong_parts_are_named(vqa_weights: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    context, folder = ScoringContext(vqa_weights, vqa_weights), vqa_weights / qwen3_vl.FOLDER
    message = metrics.missing("geneval2", ScoringContext(tmp_path, tmp_path))
    assert message.startswith("no config.json: run `specbench fetch metrics=geneval2 metrics_dir=")
    with monkeypatch.context() as old:
        old.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__="4.56.0"))
        with pytest.raises(
            Unavailable, match=r"needs transformers 4.57 or newer, not 4.56.0: pip install -U transformers"
        ):
            qwen3_vl.VQAModel(context)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "image_token_id": 3}))
    with pytest.raises(UsageError, match="tokenizer.json is not the tokenizer of Qwen3-VL; fetch it again"):
        qwen3_vl.VQAModel(context)
    settings["text_config"]["num_hidden_layers"] = 3
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match=r"does not fit Qwen3-VL: model.language_model.layers.2.*; fetch it again"):
        qwen3_vl.VQAModel(context)
    (folder / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(UsageError, match=r"cannot read .*qwen3_vl_8b .*; fetch it again"):
        qwen3_vl.VQAModel(context)


def images_of_scenes(n: int) -> tuple[np.ndarray, list[Item]]:
    samples = [scenes.sample("validation", i) for i in range(n)]
    made = [Item(s.index, s.caption, tuple(s.scene.labels()), str(s.index)) for s in samples]
    return np.stack([scenes.draw(s) for s in samples]), made


def test_the_embedded_reader_answers_what_captions_state() -> None:
    """The score of each question is a probability of the reader, written out for a scene with one object and one with
    three. Images of other captions score less."""
    images, scene_items = images_of_scenes(40)
    context = ScoringContext(ASSETS, ASSETS)
    scores = metrics.score(["scenes_soft_tifa"], ImageArray(images), scene_items, context)
    shifted = metrics.score(["scenes_soft_tifa"], ImageArray(np.roll(images, 1, 0)), scene_items, context)
    assert (scores["soft_tifa_am"].value or 0) > 90 > 75 > (shifted["soft_tifa_am"].value or 100)
    assert (scores["soft_tifa_gm"].value or 0) > 80 > 30 > (shifted["soft_tifa_gm"].value or 100)
    assert scores["soft_tifa_gm"].backend.startswith("scenes-reader@")
    metric = metrics.metric("scenes_soft_tifa", context)
    outputs = metric.scorer()(list(images), scene_items)
    reader = ev.load(ASSETS / "scenes_reader.safetensors", ev.AttributeReader)
    x = ev.as_input(torch.from_numpy(images).permute(0, 3, 1, 2).contiguous())
    with torch.no_grad():
        probs = dict(zip(scenes.ATTRIBUTES, (logits.softmax(-1).numpy() for logits in reader(x)), strict=True))
    for i, item in enumerate(scene_items):
        labels = dict(zip(scenes.ATTRIBUTES, item.labels or (), strict=True))
        layout = scenes.LAYOUTS[labels["layout"]]
        alike = [scenes.LAYOUTS.index(name) for name, count in scenes.LAYOUT_COUNT.items()
                 if count == scenes.LAYOUT_COUNT[layout]]  # fmt: skip
        expected = [probs["layout"][i][alike].sum()]
        expected += [probs["layout"][i][labels["layout"]]] if layout != "single" else [np.nan]
        stated = [(name, label) for name, label in labels.items() if name != "layout"]
        expected += [probs[name][i][label] if label != ABSENT else np.nan for name, label in stated]
        np.testing.assert_allclose(outputs[i], expected, atol=1e-4)
        present = np.array(expected)[~np.isnan(expected)]
        assert metric.per_image(outputs[i : i + 1]) == pytest.approx(
            100 * present.prod() ** (1 / len(present)), rel=1e-2
        )  # type: ignore[attr-defined]
    skills = dict.fromkeys(("object", "attribute", "count", "position"), 0.0)
    pools: dict[str, list[float]] = {name: [] for name in skills}
    for row, item in zip(outputs, scene_items):
        for skill, value in zip(metric.skills_of(item), row.tolist(), strict=True):  # type: ignore[attr-defined]
            pools[skill] += [] if np.isnan(value) else [value]
    for skill, pool in pools.items():
        assert scores[f"soft_tifa_{skill}"].value == pytest.approx(100 * np.mean(pool), rel=1e-5), skill
    assert len(pools["object"]) == sum(
        scenes.LAYOUT_COUNT[scenes.LAYOUTS[(scene_item.labels or (0,))[0]]] for scene_item in scene_items
    )
