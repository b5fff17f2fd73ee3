"""GenEval's rules and statistics (Ghosh et al. 2023), whatever detects the objects: when an image solves its task, and
the score of each task with its standard error.

An image solves a task if it has every object of `include`, in its number, colour and position, and not as many as
`exclude` names. Only the most confident detections of a class count, as many as are asked for. Imports nothing heavy.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench.data import geneval as prompts
from specbench.data.geneval import TASKS
from specbench.metrics import weights
from specbench.metrics.base import Images, Metric, PromptItem, Score, SingleImageScorer, by_prompt
from specbench.metrics.preparation import CLIP, normalised, square
from specbench.metrics.scenes import EmbeddedMetric, EmbeddedScorer
from specbench.rows import summary

if TYPE_CHECKING:
    from torch import Tensor, nn

    from specbench.metrics.mask2former import Instance

#: Share of two boxes' sizes by which their centres must be apart along an axis, to be at different positions.
APART = 0.1


@dataclass(frozen=True)
class Detection:
    """An object of an image: its box (x0, y0, x1, y1) in pixels, y downwards. colour: its own, where it is known."""

    box: tuple[float, float, float, float]
    colour: str = ""


#: The detections of each class, the most confident first.
Detections = Mapping[str, Sequence[Detection]]
#: Some detections of a class -> the name of each one's colour.
Colours = Callable[[Sequence[Detection], str], Sequence[str]]


def solves(metadata: Mapping[str, Any], found: Detections, colours: Colours) -> bool:
    """Whether an image with these detections has what the metadata of its prompt states (include, exclude)."""
    groups: list[Sequence[Detection] | None] = []
    for wanted in metadata.get("include", ()):
        name, count = wanted["class"], wanted["count"]
        some = list(found.get(name, ()))[:count]
        fits = len(some) == count
        if fits and "color" in wanted:
            fits = list(colours(some, name)).count(wanted["color"]) == count
        if fits and "position" in wanted:
            relation, target = wanted["position"]
            others = groups[target]
            fits = others is not None and all(relation in relations(a, b) for a in some for b in others)
        groups.append(some if fits else None)
    too_many = any(len(found.get(one["class"], ())) >= one["count"] for one in metadata.get("exclude", ()))
    return None not in groups and not too_many


def relations(a: Detection, b: Detection) -> set[str]:
    """Where `a` is, seen from `b`: none to two of left of, right of, above and below.

    Along each axis the offset of the centres is shortened by `APART` of both sizes. The direction counts that has more
    than half the length of the whole offset.
    """
    boxes = np.array([a.box, b.box], dtype=np.float64).reshape(2, 2, 2)
    offset = boxes[0].mean(0) - boxes[1].mean(0)
    free = np.maximum(np.abs(offset) - APART * np.abs(boxes[:, 1] - boxes[:, 0]).sum(0), 0) * np.sign(offset)
    if (np.abs(free) < 1e-3).all():
        return set()
    x, y = free / np.linalg.norm(offset)
    seen = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in seen.items() if holds}


class TaskMetric(Metric):
    """Shares of the images that solve their task, by task, and the mean over the tasks: each task counts the same.

    The standard errors are over prompts: the images of one are not independent of each other.
    """

    counts_prompts = True

    @abstractmethod
    def solved(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray:
        """(N, 6) float64, one column for each of `TASKS`: 1 where the image solves the task, 0 where it does not, NaN
        where its prompt does not pose it."""

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        solved, groups = self.solved(outputs, items), by_prompt(items)
        backend, scores = self.backend(), []
        for column in solved.T:
            posed = ~np.isnan(column)
            found = summary.ratio(np.where(posed, column, 0).tolist(), posed.tolist(), groups)
            scores.append(Score(found.value, found.stderr, backend, "" if posed.any() else "no prompt poses it"))
        if lacking := [task for task, one in zip(TASKS, scores, strict=True) if one.value is None]:
            why = f"the mean of all tasks, and no prompt poses {', '.join(lacking)}"
            return (Score.unmeasured(why, backend), *scores)
        moved, value = _influences(solved), float(np.mean([one.value for one in scores]))
        spread = summary.mean(moved.tolist(), groups)
        counts = ", ".join(map(str, (~np.isnan(solved)).sum(0)))
        # A task with a single prompt has no error, and neither has the mean.
        error = None if any(one.stderr is None for one in scores) else spread.stderr
        return (Score(value, error, backend, f"mean of the {len(TASKS)} tasks of {counts} images"), *scores)

    def backend(self) -> str:
        """See `Score`."""
        return self.cache_key

    def influences(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray | None:
        solved = self.solved(outputs, items)
        return None if np.isnan(solved).all(0).any() else _influences(solved)


def _influences(solved: np.ndarray) -> np.ndarray:
    """How each image moves the mean over the tasks: (N,) of mean zero, see `Metric.influences`."""
    shares = (~np.isnan(solved)).mean(0)
    moved: np.ndarray = np.nansum((solved - np.nanmean(solved, 0)) / shares, 1) / len(TASKS)
    return moved


#: The folders of the detector and of CLIP, and the file in each.
FILES = {"mask2former": "pytorch_model.bin", "clip_l14": "model.safetensors"}
THRESHOLD, COUNTING_THRESHOLD = 0.3, 0.9
MOST = 16  # detections of a class
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
TEMPLATES = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")
GREY, SIDE = 0x99, 224


def counted(found: Sequence[Instance], tag: str) -> dict[str, list[Instance]]:
    """GenEval's name of a class -> its detections that count for a task, the most confident first."""
    least = COUNTING_THRESHOLD if tag == "counting" else THRESHOLD
    by_class: dict[str, list[Instance]] = {}
    for one in sorted(found, key=lambda one: -one.score):
        if one.score > least:
            by_class.setdefault(prompts.classes()[one.label], []).append(one)
    return {name: some[:MOST] for name, some in by_class.items()}


def cut_out(image: np.ndarray, one: Instance) -> np.ndarray:
    """The box of an instance in an image (H, W, 3) uint8, with grey outside of its mask."""
    x0, y0, x1, y1 = one.box
    alone = np.where(one.mask[..., None], image, np.uint8(GREY))
    return np.ascontiguousarray(alone[y0:y1, x0:x1])


class ColourClassifier:
    """CLIP: pieces of an image -> the most similar of `COLOURS`, as objects of a class."""

    def __init__(self, network: nn.Module, device: str) -> None:
        """network: transformers' CLIPModel."""
        self.network, self.device = network, device
        self._texts: dict[str, Tensor] = {}  # class -> (10, d)

    def __call__(self, pieces: Sequence[np.ndarray], name: str) -> list[str]:
        import torch
        from torch.nn.functional import normalize

        network: Any = self.network
        with torch.inference_mode():
            x = torch.stack([normalised(square(piece, SIDE), CLIP) for piece in pieces]).to(self.device)
            seen = normalize(network.visual_projection(network.vision_model(x).pooler_output), dim=-1)
            return [COLOURS[i] for i in (seen @ self._described(name).T).argmax(1).tolist()]

    def _described(self, name: str) -> Tensor:
        """The mean embedding of each colour's descriptions, of unit length."""
        from torch.nn.functional import normalize

        from specbench.metrics import clip

        if name not in self._texts:
            network: Any = self.network
            texts = [template.format(colour=colour, name=name) for colour in COLOURS for template in TEMPLATES]
            ids = clip.captions()(texts).to(self.device)
            embedded = normalize(network.text_projection(network.text_model(ids).pooler_output), dim=-1)
            self._texts[name] = normalize(embedded.unflatten(0, (len(COLOURS), len(TEMPLATES))).mean(1), dim=-1)
        return self._texts[name]


class GenEvalScorer(SingleImageScorer):
    """Outputs (B, 2) float32: the number of the prompt's task, and whether the image solves it."""

    def __init__(self, detector: nn.Module, colours: ColourClassifier, device: str) -> None:
        self.detector, self.colours, self.device = detector, colours, device

    def batch(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        from specbench.metrics import mask2former

        outputs = []
        for image, item in zip(images, items, strict=True):
            metadata = item.metadata or {}
            found = mask2former.detect(self.detector, image, self.device, THRESHOLD)
            outputs.append([TASKS.index(metadata["tag"]), self._solves(image, metadata, found)])
        return np.array(outputs, dtype=np.float32)

    def _solves(self, image: np.ndarray, metadata: Mapping[str, Any], found: Sequence[Instance]) -> bool:
        instances = counted(found, metadata["tag"])
        boxes = {name: [Detection(one.box) for one in some] for name, some in instances.items()}

        def colours(some: Sequence[Detection], name: str) -> list[str]:
            return self.colours([cut_out(image, one) for one in instances[name][: len(some)]], name)

        return solves(metadata, boxes, colours)


class GenEval(weights.PublishedMetric, TaskMetric):
    """GenEval (Ghosh et al. 2023): a detector finds the objects that a prompt names, CLIP their colours. Needs items
    with GenEval's metadata. No options.

    Rules and numbers are as in its released code: detections above 0.3 (0.9 where objects are counted), at most 16
    of a class; a colour is the most similar of ten by CLIP ViT-L/14, over three descriptions each, of the object cut
    out of the image and put on grey. The detector is not the paper's: that is Mask2Former with Swin-S, too, but in
    mmdet 2, with weights that mmdet trained; this one has its authors' weights in transformers.
    """

    reads_prompt = True  # by way of the metadata, which a prompt fixes
    fetched_by, file_names = "geneval", FILES

    @property
    def cache_key(self) -> str:
        weights.need("open_clip")  # CLIP's vocabulary
        detector, colours = self.hashes
        return f"mask2former-swin-s@{detector}, clip-vit-l-14@{colours}"

    def backend(self) -> str:
        return f"{self.cache_key}; the detector is transformers' with its authors' weights, not the paper's"

    def scorer(self) -> GenEvalScorer:
        from specbench.metrics import clip, mask2former

        device = self.context.device
        detector, colours = self.published_files
        network = clip.load_both(colours, device, clip.L14)
        return GenEvalScorer(mask2former.load(detector, device), ColourClassifier(network, device), device)

    def refuses(self, images: Images, items: Sequence[PromptItem]) -> str:
        known = {*prompts.classes()}
        if all(item.metadata and {one["class"] for one in item.metadata["include"]} <= known for item in items):
            return ""
        return "these prompts come without what must be seen in GenEval's classes: score images of data=geneval"

    def solved(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray:
        found = np.full((len(outputs), len(TASKS)), np.nan)
        found[np.arange(len(outputs)), outputs[:, 0].astype(int)] = outputs[:, 1]
        return found


_HALF = 9.0  # half the side of an object's box in pixels


class ScenesGenEval(EmbeddedMetric, TaskMetric):
    """GenEval's tasks on images of *scenes*, by the embedded reader: no detector and no download.

    The reader's most probable attributes are the detections: an object for each position of the layout that it reads,
    with the shape and colour that it reads there. A prompt of `data=scenes_geneval` poses one task; a caption of
    `data=scenes` poses every task that it can (see `data.scenes_geneval.tasks_of`). The values are comparable only
    between runs with the same backend. They are never GenEval's scores of a real model.

    Needs items with labels. Scorer outputs (N, 14) float32: the index of the most probable choice of each attribute,
    of objects that are not there, too."""

    evaluator = "reader"

    @property
    def cache_key(self) -> str:
        """The reward uses the same network and caches other outputs of it."""
        return f"{super().cache_key}, attributes"

    def scorer(self) -> EmbeddedScorer:
        import torch

        from specbench.models import evaluators as ev

        reader = ev.load(self.path, ev.AttributeReader, self.context.device)

        def read(x: Tensor, items: Sequence[PromptItem]) -> Tensor:
            return torch.stack([logits.argmax(-1) for logits in reader(x)], 1).float()

        return EmbeddedScorer(self, read)

    def refuses(self, images: Images, items: Sequence[PromptItem]) -> str:
        if self.described(items):
            return ""
        return "these prompts come without labels of scenes, so there are no objects to look for"

    def solved(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray:
        from specbench.data.scenes_geneval import tasks_of

        found = np.full((len(items), len(TASKS)), np.nan)
        for row, read, item in zip(found, outputs.astype(int).tolist(), items, strict=True):
            posed = {item.metadata["tag"]: item.metadata} if item.metadata else tasks_of(item.labels or ())
            seen = read_objects(read)
            for task, metadata in posed.items():
                row[TASKS.index(task)] = solves(metadata, seen, lambda some, _: [one.colour for one in some])
        return found


def read_objects(labels: Sequence[int]) -> dict[str, list[Detection]]:
    """Shape -> the objects of that shape, from 14 labels of scenes; labels of absent objects are not looked at."""
    from specbench.data import scenes

    read = dict(zip(scenes.ATTRIBUTES, labels, strict=True))
    found: dict[str, list[Detection]] = {}
    for slot, (x, y) in enumerate(scenes.centres(scenes.LAYOUTS[read["layout"]])):
        box = (x - _HALF, y - _HALF, x + _HALF, y + _HALF)
        one = Detection(box, scenes.COLOURS[read[f"colour{slot}"]])
        found.setdefault(scenes.SHAPES[read[f"shape{slot}"]], []).append(one)
    return found
