"""Soft-TIFA (Kamath et al. 2025, arXiv 2512.16853): a VQA model answers questions about an image. The score of a
question is the probability of the right answer. The score of an image is the arithmetic mean (AM) or the geometric mean
(GM) of its questions' scores.

The arithmetic follows evaluation.py and soft_tifa_analysis.py of facebookresearch/GenEval2@a6e82d22:

- The score of a question is the sum, over spellings of the answer, of the probability of the spelling's first token.
  Spellings with the same first token count separately, so a score can exceed 1. It is not clipped.
- A question with score 0 makes the geometric mean of its image 0.
- Columns are means times 100: of GM and of AM over the images and, for a skill, over all questions of this skill in all
  images. The note gives the mean GM by the number of atoms of a prompt.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from specbench.data import geneval2
from specbench.metrics import qwen3_vl
from specbench.metrics.base import (
    Images,
    MeanMetric,
    PromptItem,
    QuestionScorer,
    Score,
    ScoringContext,
    by_prompt,
    chosen,
)
from specbench.metrics.scenes import EmbeddedMetric, EmbeddedScorer
from specbench.rows import summary

if TYPE_CHECKING:
    from torch import Tensor

#: Appended to each question.
SUFFIX = " Answer in one word."
_YES = ("Yes", "yes", " yes", " Yes")


def spellings(question: str, answer: str) -> tuple[str, ...]:
    """The texts that count as the right answer to a question of GenEval 2. answer: a number word if the question begins
    with "How many", otherwise Yes."""
    if not question.startswith(geneval2.HOW_MANY):
        return _YES
    words = (answer, answer.capitalize(), str(geneval2.NUMBERS.index(answer) + 1))
    return (*words, *(f" {word}" for word in words))


def question_score(probs: Any, tokens: Sequence[int]) -> float:
    """The sum of probabilities (V,) over the first tokens of the spellings; a repeated token counts repeatedly."""
    return sum(float(probs[token]) for token in tokens)


def geometric_means(scores: np.ndarray) -> np.ndarray:
    """(N,) from question scores (N, Q), padded with NaN if a row has fewer questions."""
    with np.errstate(divide="ignore"):
        means: np.ndarray = np.exp(np.nanmean(np.log(scores), 1))
    return means


class SoftTIFA(MeanMetric):
    """Scorer outputs: the scores of an image's questions (N, Q), padded with NaN. Columns: GM, AM, and one per skill of
    `skills`."""

    reads_prompt = True  # through the metadata or the labels, which the prompt determines
    counts_prompts = True
    skills: ClassVar[tuple[str, ...]]

    @abstractmethod
    def skills_of(self, item: PromptItem) -> Sequence[str]:
        """The skill of each question about an image of this item, in the order of the outputs."""

    @abstractmethod
    def atoms_of(self, item: PromptItem) -> int:
        """The number of atoms of an item's prompt."""

    def per_image(self, outputs: np.ndarray) -> np.ndarray:
        return 100 * geometric_means(outputs.astype(np.float64))

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        groups, scores = by_prompt(items), outputs.astype(np.float64)
        gm, am = self.per_image(scores), 100 * np.nanmean(scores, 1)
        backend = self.backend()
        return (
            Score(*summary.mean(gm.tolist(), groups), backend, self.note(outputs, items)),
            Score(*summary.mean(am.tolist(), groups), backend, ""),
            *(self._of_skill(skill, scores, items, groups) for skill in self.skills),
        )

    def _of_skill(
        self, skill: str, scores: np.ndarray, items: Sequence[PromptItem], groups: Sequence[int] | None
    ) -> Score:
        """The mean over the questions of a skill in all images."""
        has_skill = np.zeros(scores.shape, dtype=bool)
        for row, item in zip(has_skill, items, strict=True):
            of_item = [name == skill for name in self.skills_of(item)]
            row[: len(of_item)] = of_item
        has_skill &= ~np.isnan(scores)
        if not has_skill.any():
            return Score.unmeasured("no prompt asks for it", self.backend())
        sums = 100 * np.where(has_skill, scores, 0).sum(1)
        return Score(*summary.ratio(sums.tolist(), has_skill.sum(1).tolist(), groups), self.backend(), "")

    def note(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> str:
        gm, atoms = self.per_image(outputs), np.array([self.atoms_of(item) for item in items])
        parts = [f"{count}: {gm[atoms == count].mean():.2f}" for count in np.unique(atoms)]
        notes = [f"by number of atoms {', '.join(parts)}"]
        if zeros := int((gm == 0).sum()):
            notes.append(f"{zeros} of {len(gm)} images have a question with score 0 and so a GM of 0")
        if above := int((outputs > 1).sum()):
            notes.append(f"{above} question scores are above 1, since spellings with the same first token count each")
        return "; ".join(notes)


class GenEval2(SoftTIFA):
    """GenEval 2 with its published VQA model, Qwen3-VL-8B-Instruct. Needs items of data=geneval2. No options."""

    skills = geneval2.SKILLS

    def __init__(self, context: ScoringContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, chosen(type(self), options, {}))

    @property
    def cache_key(self) -> str:
        return f"soft-tifa by {qwen3_vl.cache_key(self.context)}, answer in one word"

    def scorer(self) -> QuestionScorer:
        vqa_model = qwen3_vl.VQAModel(self.context)

        def scores(image: np.ndarray, item: PromptItem) -> list[float]:
            of_image = []
            for question, answer in (item.metadata or {})["vqa_list"]:
                tokens = [vqa_model.first_token(text) for text in spellings(question, answer)]
                of_image.append(question_score(vqa_model(image, question + SUFFIX), tokens))
            return of_image

        return QuestionScorer(scores)

    def refuses(self, images: Images, items: Sequence[PromptItem]) -> str:
        if all(item.metadata and "vqa_list" in item.metadata for item in items):
            return ""
        return "these prompts come without GenEval 2's questions: score images of data=geneval2"

    def skills_of(self, item: PromptItem) -> Sequence[str]:
        skills: Sequence[str] = (item.metadata or {})["skills"]
        return skills

    def atoms_of(self, item: PromptItem) -> int:
        return int((item.metadata or {})["atom_count"])


class ScenesSoftTIFA(EmbeddedMetric, SoftTIFA):
    """Soft-TIFA's arithmetic on images of *scenes*, by the embedded reader: no language model and no download.

    The attributes that a caption states are the questions; the score is the reader's probability of the stated choice.
    Skills: the number of objects (count), the arrangement of several objects (position), the shape of each object
    (object), and colour, size, fill and background (attribute). Verbs do not occur. The values are comparable only
    between runs with the same backend. They are not GenEval 2's scores of a real model.

    Needs items with labels. Scorer outputs (N, 15) float32: count, position, background, and shape, colour, size and
    fill of each object; NaN if the labels do not state it.
    """

    evaluator = "reader"
    skills = ("object", "attribute", "count", "position")
    _SKILLS = ("count", "position", "attribute", *3 * ("object", "attribute", "attribute", "attribute"))

    @property
    def cache_key(self) -> str:
        """Differs from the reward's key, which caches other outputs of the same network."""
        return f"{super().cache_key}, soft-tifa"

    def scorer(self) -> EmbeddedScorer:
        import torch

        from specbench.data import scenes
        from specbench.models import evaluators as ev

        reader = ev.load(self.path, ev.AttributeReader, self.context.device)
        objects = torch.tensor([scenes.LAYOUT_COUNT[layout] for layout in scenes.LAYOUTS])

        def scores(x: Tensor, items: Sequence[PromptItem]) -> Tensor:
            labels, logits = torch.tensor([item.labels for item in items]).to(x.device), reader(x)
            probs = ev.captioned_probabilities(logits, labels)
            number = objects.to(x.device)[labels[:, 0]]
            same_number = objects.to(x.device) == number[:, None]
            count = (logits[0].float().softmax(-1) * same_number).sum(1)
            position = torch.where(number > 1, probs[:, 0], torch.nan)
            return torch.cat([count[:, None], position[:, None], probs[:, 1:]], 1)

        return EmbeddedScorer(self, scores)

    def refuses(self, images: Images, items: Sequence[PromptItem]) -> str:
        return "" if self.described(items) else "these prompts come without labels of scenes to ask for"

    def skills_of(self, item: PromptItem) -> Sequence[str]:
        return self._SKILLS

    def atoms_of(self, item: PromptItem) -> int:
        """The number of attributes that a caption states; number and arrangement of objects count as one."""
        from specbench.data.worlds import ABSENT

        return sum(label != ABSENT for label in item.labels or ())
