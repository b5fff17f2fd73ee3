"""GenEval (Ghosh et al. 2023): a detector finds the objects that a prompt names, CLIP their colours.

Rules and numbers are those of its released code: detections above 0.3 (0.9 where objects are counted), at most 16 of a
class; a colour is the most similar of ten by CLIP ViT-L/14, over three descriptions each, of the object cut out of the
image and put on grey (see `tasks` for the rest). The detector is not the paper's: that is Mask2Former with Swin-S, too,
but in mmdet 2, with weights that mmdet trained; this one has its authors' weights in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench.data import geneval as prompts
from specbench.data.geneval import TASKS
from specbench.metrics import weights
from specbench.metrics.base import Images, PromptItem, SingleImageScorer
from specbench.metrics.image_reward import square
from specbench.metrics.preparation import CLIP, normalised
from specbench.metrics.tasks import Detection, TaskMetric, solves

if TYPE_CHECKING:
    from torch import Tensor, nn

    from specbench.metrics.mask2former import Instance

#: The folders of the detector and of CLIP, and the file in each.
FILES = {"mask2former": "pytorch_model.bin", "clip_l14": "model.safetensors"}
THRESHOLD, COUNTING_THRESHOLD = 0.3, 0.9
MOST = 16  # detections of a class
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
TEMPLATES = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")
GREY, SIDE = 0x99, 224


def detections(found: Sequence[Instance], tag: str) -> dict[str, list[Instance]]:
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
        counted = detections(found, metadata["tag"])
        boxes = {name: [Detection(one.box) for one in some] for name, some in counted.items()}

        def colours(some: Sequence[Detection], name: str) -> list[str]:
            return self.colours([cut_out(image, one) for one in counted[name][: len(some)]], name)

        return solves(metadata, boxes, colours)


class GenEval(weights.PublishedMetric, TaskMetric):
    """Needs items with GenEval's metadata. No options."""

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
