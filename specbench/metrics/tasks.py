"""GenEval's rules and statistics (Ghosh et al. 2023), for any detector of objects: whether an image solves its task,
and the score of each task with its standard error.

An image solves a task if it shows all objects of `include`, with the right number, colour and position, and fewer
objects than `exclude` names. Of a class, only the most confident detections count, up to the requested number. Imports
nothing heavy.
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
from specbench.rows.remark import remark

if TYPE_CHECKING:
    from torch import Tensor, nn

    from specbench.metrics.mask2former import Instance

#: Two boxes are at different positions along an axis if their centres differ by more than this share of their sizes.
APART = 0.1


@dataclass(frozen=True)
class Detection:
    """An object of an image: its box (x0, y0, x1, y1) in pixels, y downwards, and its colour, if known."""

    box: tuple[float, float, float, float]
    colour: str = ""


#: Class -> its detections, the most confident first.
Detections = Mapping[str, Sequence[Detection]]
#: Detections of a class -> the names of their colours.
Colours = Callable[[Sequence[Detection], str], Sequence[str]]


def solves(metadata: Mapping[str, Any], detections: Detections, colours: Colours) -> bool:
    """Whether an image with these detections shows what the metadata of its prompt states (include, exclude)."""
    groups: list[Sequence[Detection] | None] = []
    for required in metadata.get("include", ()):
        name, count = required["class"], required["count"]
        objects = list(detections.get(name, ()))[:count]
        fits = len(objects) == count
        if fits and "color" in required:
            fits = list(colours(objects, name)).count(required["color"]) == count
        if fits and "position" in required:
            relation, target = required["position"]
            others = groups[target]
            fits = others is not None and all(relation in relations(a, b) for a in objects for b in others)
        groups.append(objects if fits else None)
    too_many = any(len(detections.get(limit["class"], ())) >= limit["count"] for limit in metadata.get("exclude", ()))
    return None not in groups and not too_many


def relations(a: Detection, b: Detection) -> set[str]:
    """The position of `a` relative to `b`: a set of left of, right of, above and below; empty or up to two of them.

    Along each axis, the offset of the centres is reduced by `APART` times both sizes. A direction counts if it has more
    than half the length of the unreduced offset.
    """
    boxes = np.array([a.box, b.box], dtype=np.float64).reshape(2, 2, 2)
    offset = boxes[0].mean(0) - boxes[1].mean(0)
    free = np.maximum(np.abs(offset) - APART * np.abs(boxes[:, 1] - boxes[:, 0]).sum(0), 0) * np.sign(offset)
    if (np.abs(free) < 1e-3).all():
        return set()
    x, y = free / np.linalg.norm(offset)
    tests = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in tests.items() if holds}


class TaskMetric(Metric):
    """The share of images that solve their task, by task, and the mean over the tasks, with equal weights.

    The standard errors are over prompts, because the images of a prompt are not independent.
    """

    counts_prompts = True

    @abstractmethod
    def solved(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray:
        """(N, 6) float64, one column per task of `TASKS`: 1 if the image solves the task, 0 if not, NaN if its prompt
        does not pose it."""

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        solved, groups = self.solved(outputs, items), by_prompt(items)
        backend, scores = self.backend(), []
        for column in solved.T:
            posed = ~np.isnan(column)
            share = summary.ratio(np.where(posed, column, 0).tolist(), posed.tolist(), groups)
            scores.append(Score(share.value, share.stderr, backend, [remark("not_posed")] * (not posed.any())))
        if missing := [task for task, score in zip(TASKS, scores, strict=True) if score.value is None]:
            return (Score.unmeasured(remark("tasks_missing", tasks=missing), backend), *scores)
        influences, value = _influences(solved), float(np.mean([score.value for score in scores]))
        spread = summary.mean(influences.tolist(), groups)
        counts = (~np.isnan(solved)).sum(0).tolist()
        # A task with a single prompt has no error; then the mean has no error either.
        error = None if any(score.stderr is None for score in scores) else spread.stderr
        return (Score(value, error, backend, [remark("tasks", images=counts)]), *scores)

    def backend(self) -> str:
        """See `Score`."""
        return self.cache_key

    def influences(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray | None:
        solved = self.solved(outputs, items)
        return None if np.isnan(solved).all(0).any() else _influences(solved)


def _influences(solved: np.ndarray) -> np.ndarray:
    """The influence of each image on the mean over the tasks: (N,) with mean zero, see `Metric.influences`."""
    shares = (~np.isnan(solved)).mean(0)
    influences: np.ndarray = np.nansum((solved - np.nanmean(solved, 0)) / shares, 1) / len(TASKS)
    return influences


#: The folders of the detector and of CLIP, and the file in each.
FILES = {"mask2former": "pytorch_model.bin", "clip_l14": "model.safetensors"}
THRESHOLD, COUNTING_THRESHOLD = 0.3, 0.9
MOST = 16  # detections per class
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
TEMPLATES = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")
GREY, SIDE = 0x99, 224


def counted(instances: Sequence[Instance], tag: str) -> dict[str, list[Instance]]:
    """GenEval's name of a class -> its detections that count for a task, the most confident first."""
    threshold = COUNTING_THRESHOLD if tag == "counting" else THRESHOLD
    by_class: dict[str, list[Instance]] = {}
    for instance in sorted(instances, key=lambda instance: -instance.score):
        if instance.score > threshold:
            by_class.setdefault(prompts.classes()[instance.label], []).append(instance)
    return {name: detections[:MOST] for name, detections in by_class.items()}


def cut_out(image: np.ndarray, instance: Instance) -> np.ndarray:
    """The box of an instance in an image (H, W, 3) uint8, with grey outside of its mask."""
    x0, y0, x1, y1 = instance.box
    masked = np.where(instance.mask[..., None], image, np.uint8(GREY))
    return np.ascontiguousarray(masked[y0:y1, x0:x1])


class ColourClassifier:
    """CLIP: pieces of an image, which are objects of a class -> the most similar of `COLOURS`."""

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
            embedded = normalize(network.visual_projection(network.vision_model(x).pooler_output), dim=-1)
            return [COLOURS[i] for i in (embedded @ self._described(name).T).argmax(1).tolist()]

    def _described(self, name: str) -> Tensor:
        """The mean embeddings of the colours' descriptions, of unit length."""
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
            instances = mask2former.detect(self.detector, image, self.device, THRESHOLD)
            outputs.append([TASKS.index(metadata["tag"]), self._solves(image, metadata, instances)])
        return np.array(outputs, dtype=np.float32)

    def _solves(self, image: np.ndarray, metadata: Mapping[str, Any], detected: Sequence[Instance]) -> bool:
        instances = counted(detected, metadata["tag"])
        boxes = {name: [Detection(instance.box) for instance in group] for name, group in instances.items()}

        def colours(detections: Sequence[Detection], name: str) -> list[str]:
            return self.colours([cut_out(image, instance) for instance in instances[name][: len(detections)]], name)

        return solves(metadata, boxes, colours)


class GenEval(weights.PublishedMetric, TaskMetric):
    """GenEval (Ghosh et al. 2023): a detector finds the objects that a prompt names, and CLIP their colours. Needs
    items with GenEval's metadata. No options.

    Rules and numbers follow the released code: detections above 0.3 (0.9 for counting), at most 16 per class. The
    object is cut out of the image and put on grey; its colour is the most similar of ten, by CLIP ViT-L/14, with three
    descriptions per colour. The detector differs from the paper's: both are Mask2Former with Swin-S, but the paper uses
    mmdet 2 and weights that mmdet trained; this one uses transformers and the weights of Mask2Former's authors.
    """

    reads_prompt = True  # through the metadata, which the prompt determines
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
        classes = {*prompts.classes()}
        if all(item.metadata and {part["class"] for part in item.metadata["include"]} <= classes for item in items):
            return ""
        return "these prompts come without what must be seen in GenEval's classes: score images of data=geneval"

    def solved(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray:
        solved = np.full((len(outputs), len(TASKS)), np.nan)
        solved[np.arange(len(outputs)), outputs[:, 0].astype(int)] = outputs[:, 1]
        return solved


_HALF = 9.0  # half the side of an object's box in pixels


class ScenesGenEval(EmbeddedMetric, TaskMetric):
    """GenEval's tasks on images of *scenes*, by the embedded reader: no detector and no download.

    The reader's most probable attributes are the detections: one object per position of the layout that it reads, with
    the shape and colour that it reads there. A prompt of `data=scenes_geneval` poses one task; a caption of
    `data=scenes` poses all tasks that it can (see `data.scenes_geneval.tasks_of`). The values are comparable only
    between runs with the same backend. They are not GenEval's scores of a real model.

    Needs items with labels. Scorer outputs (N, 14) float32: the index of the most probable choice of each attribute,
    including attributes of absent objects."""

    evaluator = "reader"

    @property
    def cache_key(self) -> str:
        """Differs from the reward's key, which caches other outputs of the same network."""
        return f"{super().cache_key}, attributes"

    def scorer(self) -> EmbeddedScorer:
        import torch

        from specbench.models import evaluators as ev

        reader = self.network(ev.AttributeReader)

        def read(x: Tensor, items: Sequence[PromptItem]) -> Tensor:
            return torch.stack([logits.argmax(-1) for logits in reader(x)], 1).float()

        return EmbeddedScorer(self, read)

    def refuses(self, images: Images, items: Sequence[PromptItem]) -> str:
        if self.described(items):
            return ""
        return "these prompts come without labels of scenes, so there are no objects to look for"

    def solved(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray:
        from specbench.data.scenes_geneval import tasks_of

        solved = np.full((len(items), len(TASKS)), np.nan)
        for row, labels, item in zip(solved, outputs.astype(int).tolist(), items, strict=True):
            posed = {item.metadata["tag"]: item.metadata} if item.metadata else tasks_of(item.labels or ())
            objects = read_objects(labels)
            for task, metadata in posed.items():
                row[TASKS.index(task)] = solves(metadata, objects, lambda group, _: [item.colour for item in group])
        return solved


def read_objects(labels: Sequence[int]) -> dict[str, list[Detection]]:
    """Shape -> the objects of this shape, from 14 labels of scenes. Labels of absent objects are ignored."""
    from specbench.data import scenes

    choices = dict(zip(scenes.ATTRIBUTES, labels, strict=True))
    by_shape: dict[str, list[Detection]] = {}
    for slot, (x, y) in enumerate(scenes.centres(scenes.LAYOUTS[choices["layout"]])):
        box = (x - _HALF, y - _HALF, x + _HALF, y + _HALF)
        detection = Detection(box, scenes.COLOURS[choices[f"colour{slot}"]])
        by_shape.setdefault(scenes.SHAPES[choices[f"shape{slot}"]], []).append(detection)
    return by_shape
