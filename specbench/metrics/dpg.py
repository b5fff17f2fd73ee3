"""DPG-Bench's score (Hu et al. 2024, arXiv 2403.05135): the share of a prompt's questions that a VQA model answers with
yes. A question counts as no if its parent was not answered with yes.

The arithmetic follows dpg_bench/compute_dpg_bench.py of TencentQQGYLab/ELLA@3c228f1d:

- A question scores 1 if the answer is exactly "yes", else 0. Then, in the order of the file, a question with a parent
  of score 0 is set to 0. A 0 is therefore passed on to grandchildren if these come later in the file.
- The score of an image is the mean over its questions. `dpg` is the mean over images, times 100.
- Values by category are means of the original answers, before any question is set to 0, of the last image of each
  prompt only. The category is the text before "(" in the column tuple; its class is the text before "-".
- The first row below the table's header is not read.
- If a question has a parent that is not in the table, the published code cannot score the image and omits it from all
  means. The images of such a prompt are omitted here, too; a remark counts them.

The published code cuts the four images of a prompt out of a grid (images_per_prompt=4). Here they are separate files.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from specbench.errors import UsageError, one_line
from specbench.metrics import weights
from specbench.metrics.base import (
    Images,
    Metric,
    PromptItem,
    Score,
    Scorer,
    ScoringContext,
    Unavailable,
    by_prompt,
    chosen,
)
from specbench.rows import summary
from specbench.rows.remark import Remark, remark
from specbench.storage.files import cached_sha256
from specbench.storage.reading import read_text

#: An image (H, W, 3) uint8 and a question -> the answer.
Answer = Callable[[np.ndarray, str], str]

CLASSES = ("global", "entity", "attribute", "relation", "other")
PROMPTS, IMAGES = 1065, 4  # of the published score
QUESTIONS, TABLE = "dpg_questions", "dpg_bench.csv"
_COLUMNS = ("item_id", "proposition_id", "dependency", "tuple", "question_natural_language")


@dataclass(frozen=True)
class Question:
    """parents: the numbers of the questions that it depends on; category: such as "entity - whole"."""

    text: str
    parents: tuple[int, ...]
    category: str

    @property
    def of_class(self) -> str:
        return self.category.split("-")[0].strip()


#: The questions of a prompt by their numbers, in the order of the file.
Questions = Mapping[int, Question]


def read(path: Path) -> dict[str, Questions]:
    """Prompt id -> its questions. Raises UsageError for a file that is not the published table."""
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    if missing := [name for name in _COLUMNS if name not in (reader.fieldnames or ())]:
        raise UsageError(f"{path} has no column {missing[0]}: fetch {TABLE} again")
    table: dict[str, dict[int, Question]] = {}
    try:
        next(reader, None)
        for row in reader:
            parents = tuple(number for text in row["dependency"].split(",") if (number := int(text)))
            question = Question(row["question_natural_language"], parents, row["tuple"].split("(")[0].strip())
            table.setdefault(row["item_id"], {})[int(row["proposition_id"])] = question
    except (csv.Error, AttributeError, TypeError, ValueError) as e:  # missing cells, or cells that are not numbers
        raise UsageError(f"{path}, line {reader.line_num}: {e}; fetch {TABLE} again") from None
    for name, questions in table.items():
        if len(questions) > (most := QuestionScorer.MOST - 1):
            raise UsageError(
                f"{path} has {len(questions)} questions about item {name}, more than {most}: fetch {TABLE} again"
            )
    return {**table}


class QuestionScorer(Scorer):
    """A VQA model that answers questions about each image. Images may have different numbers of questions.

    scores: an image and its item -> the score of the image and of each question, in order. Outputs (B, MOST) float64,
    padded with NaN.
    """

    MOST = 128  # all outputs of a scorer have the same width

    def __init__(self, scores: Callable[[np.ndarray, PromptItem], Sequence[float]]) -> None:
        self.scores = scores

    def __call__(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        outputs = np.full((len(images), self.MOST), np.nan)
        for row, image, item in zip(outputs, images, items, strict=True):
            scores = self.scores(image, item)
            row[: len(scores)] = scores
        return outputs


def is_scored(questions: Questions) -> bool:
    """Whether the parents of all questions are in the table."""
    return all(parent in questions for question in questions.values() for parent in question.parents)


def image_score(answers: Sequence[float], questions: Questions) -> float:
    """The score of an image from the answers to its questions: 1 for yes, 0 for other answers."""
    scores = dict(zip(questions, answers, strict=True))
    for number, question in questions.items():
        if any(scores[parent] == 0 for parent in question.parents):
            scores[number] = 0
    return sum(scores.values()) / len(scores)


class DPG(Metric):
    """DPG-Bench's score. No options.

    Scorer outputs (N, `QuestionScorer.MOST`) float64: the score of the image, and the answer to each question (1 for
    yes, 0 for others). All are NaN for the images of an omitted prompt.
    """

    reads_prompt = True  # the prompt determines the questions (the cache key names their table)
    counts_prompts = True

    def __init__(self, context: ScoringContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, chosen(type(self), options, {}))

    @property
    def path(self) -> Path:
        """The table of questions. Raises Unavailable."""
        return weights.find(self.context, "dpg", QUESTIONS, TABLE)

    @cached_property
    def table(self) -> dict[str, Questions]:
        return read(weights.published(self.context, QUESTIONS, self.path))

    @property
    def cache_key(self) -> str:
        return f"dpg-bench by {MPLUG.cache_key(self.context)}, questions {cached_sha256(self.path)[:8]}"

    def scorer(self) -> QuestionScorer:
        vqa_model, table = MPLUG.load(self.context), self.table

        def scores(image: np.ndarray, item: PromptItem) -> list[float]:
            questions = table[item.id]
            if not is_scored(questions):
                return []
            answers = [float(vqa_model(image, question.text) == "yes") for question in questions.values()]
            return [image_score(answers, questions), *answers]

        return QuestionScorer(scores)

    def refuses(self, images: Images, items: Sequence[PromptItem]) -> str:
        if all(item.id in self.table for item in items):
            return ""
        return f"{TABLE} has no questions for some of these prompts: score images of data=dpg"

    def per_image(self, outputs: np.ndarray) -> np.ndarray | None:
        scores: np.ndarray = 100 * outputs[:, 0]
        return None if np.isnan(scores).any() else scores

    def influences(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray | None:
        scores = 100 * outputs[:, 0]
        scored = ~np.isnan(scores)
        return np.where(scored, scores - scores[scored].mean(), 0) / scored.mean() if scored.any() else None

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        scored = np.flatnonzero(~np.isnan(outputs[:, 0])).tolist()
        if not scored:
            return (Score.unmeasured(remark("dpg_missing"), self.cache_key),) * (1 + len(CLASSES))
        rows, scored_items = outputs[scored], [items[i] for i in scored]
        last_images, left_out = _last(scored_items), {item.id for item in items} - {item.id for item in scored_items}
        mean_score = summary.mean((100 * rows[:, 0]).tolist(), by_prompt(scored_items))
        remarks = _counts(scored_items, len(left_out)), self._detail(rows, scored_items, last_images)
        of_classes = (
            self._of_class(name, rows[last_images], [scored_items[i] for i in last_images]) for name in CLASSES
        )
        return (Score(*mean_score, self.cache_key, remarks), *of_classes)

    def _of_class(self, name: str, rows: np.ndarray, items: Sequence[PromptItem]) -> Score:
        """The mean answer to the questions of a class, over one image per prompt."""
        flags_of_class = [[question.of_class == name for question in self.table[item.id].values()] for item in items]
        count = [sum(flags) for flags in flags_of_class]
        yes = [
            100 * float(row[1 : 1 + len(flags)][flags].sum()) for row, flags in zip(rows, map(np.array, flags_of_class))
        ]
        estimate = summary.ratio(yes, count)
        return Score(*estimate, self.cache_key, [remark("not_asked")] * (not any(count)))

    def _detail(self, rows: np.ndarray, items: Sequence[PromptItem], last_images: Sequence[int]) -> Remark:
        """The mean answer by category."""
        answers: dict[str, list[float]] = {}
        for i in last_images:
            for question, answer in zip(self.table[items[i].id].values(), rows[i, 1:].tolist(), strict=False):
                answers.setdefault(question.category, []).append(answer)
        means = {category: 100 * float(np.mean(values)) for category, values in sorted(answers.items())}
        return remark("dpg_answers", categories=means)


def _last(items: Sequence[PromptItem]) -> list[int]:
    """The positions of the last image of each prompt."""
    last: dict[str, int] = {}
    for i, item in enumerate(items):
        if item.id not in last or item.index > items[last[item.id]].index:
            last[item.id] = i
    return list(last.values())


def _counts(items: Sequence[PromptItem], left_out: int) -> Remark:
    """How many prompts and images were scored, and the published numbers."""
    images = Counter(item.id for item in items)
    return remark(
        "dpg_counts",
        prompts=len(images),
        per_prompt=sorted(set(images.values())),
        left_out=left_out,
        published_prompts=PROMPTS,
        published_images=IMAGES,
    )


class MPLUG:
    """mPLUG-large, fine-tuned for visual question answering: the published model, run by the package modelscope."""

    FOLDER, MODEL = "dpg_mplug", "damo/mplug_visual-question-answering_coco_large_en"
    FILE = "pytorch_model.bin"

    @classmethod
    def cache_key(cls, context: ScoringContext) -> str:
        path = context.weights / cls.FOLDER / cls.FILE
        if not path.is_file():
            raise Unavailable(
                f"no {cls.FILE} of mPLUG: run `modelscope download --model {cls.MODEL} --local_dir {path.parent}`"
            )
        return f"mplug-large@{cached_sha256(path)[:8]}"

    @classmethod
    def load(cls, context: ScoringContext) -> Answer:
        """Raises UsageError if the package cannot read the folder, and Unavailable if it cannot be imported."""
        try:
            from modelscope.pipelines import pipeline
            from modelscope.utils.constant import Tasks
        except ImportError as e:
            raise Unavailable(
                f"the package modelscope cannot be imported ({e}): pip install 'modelscope[multi-modal]', in a"
                " separate environment if it needs other versions of packages than specbench"
            ) from e
        folder = context.weights / cls.FOLDER
        try:
            answers = pipeline(Tasks.visual_question_answering, model=str(folder), device=context.device)
        except Exception as e:  # the package's exceptions differ from version to version
            raise UsageError(f"modelscope cannot read {folder} ({one_line(e)[:200]}); download it again") from None
        return lambda image, question: str(answers({"image": Image.fromarray(image), "question": question})["text"])
