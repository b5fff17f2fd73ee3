"""CLIP score (Hessel et al. 2021) by OpenAI's ViT-B/32 or ViT-B/16: the mean cosine between an image and its caption.

Papers differ in four ways, each an option:

    model   ViT-B-32 or ViT-B-16
    scale   1 (the cosine, 0.2 to 0.35) or 100 (torchmetrics' definition: the mean times 100, 0 where it is negative)
    prefix  put before each caption, such as Hessel et al.'s "A photo depicts "
    resize  own          what CLIP itself does: PIL's bicubic to 224
            bilinear299  first the whole image to 299x299, bilinear without antialiasing, rounded to integer levels (the
                         released evaluation of SJD, evaluation_metrics.py, which SJD-PAC uses, too)
            lanczos256   first the center square to 256x256, Lanczos, and some levels lowered by one (the released
                         evaluation of LANTERN, eval_fid_clip.py, which goes through floats and truncates)

A caption of more than 77 tokens is cut so that the mark of its end stays, as OpenAI's and LANTERN's code do.
torchmetrics cuts the mark off, too: such captions, which the note counts, score otherwise there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from specbench.errors import UsageError, unknown
from specbench.metrics import towers
from specbench.metrics.base import PromptItem, Score, Scorer, ScoringContext, not_below_zero
from specbench.storage.image_files import center_crop

#: Model -> the folder of its weights, and the name of its files in open_clip's layout.
MODELS = {"ViT-B-32": "clip_b32", "ViT-B-16": "clip_b16"}
FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")


def _bilinear(image: np.ndarray) -> np.ndarray:
    import torch
    from torch.nn.functional import interpolate

    x = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    resized = interpolate(x, size=(299, 299), mode="bilinear", align_corners=False)[0]
    found: np.ndarray = resized.permute(1, 2, 0).contiguous().numpy()
    return found


def _lanczos(image: np.ndarray) -> np.ndarray:
    level = np.arange(256, dtype=np.float32) / np.float32(255)
    lowered = ((level - np.float32(0.5)) / np.float32(0.5) + np.float32(1)) * np.float32(127.5)
    found: np.ndarray = lowered.astype(np.uint8)[center_crop(image, 256)]
    return found


#: Resize -> the step before CLIP's own, and its name in a backend.
RESIZES: dict[str, tuple[towers.Resize | None, str]] = {
    "own": (None, "224 bicubic"),
    "bilinear299": (_bilinear, "299 bilinear, then 224 bicubic"),
    "lanczos256": (_lanczos, "256 Lanczos as LANTERN, then 224 bicubic"),
}


class ClipScore(towers.TowersMetric):
    """Options: `model`, `scale`, `prefix`, `resize`."""

    files = FILES
    known: ClassVar[Mapping[str, Any]] = {"model": "ViT-B-32", "scale": 1, "prefix": "", "resize": "own"}

    def __init__(self, context: ScoringContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        for name, choices in (("model", MODELS), ("resize", RESIZES)):
            if self.options[name] not in choices:
                raise unknown(f"{name} of clip_score", str(self.options[name]), choices)
        if not isinstance(self.options["prefix"], str):
            raise UsageError(f"prefix must be text, not {self.options['prefix']!r}")
        self.part, self.label = MODELS[self.options["model"]], f"clip-{self.options['model'].lower()}"
        self.prefix = self.options["prefix"]
        self.first, self.resize = RESIZES[self.options["resize"]]

    def scorer(self) -> Scorer:
        return self.towers_scorer(f"{self.options['model']}-quickgelu", "shortest", self.first)

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        (score,) = super().score(outputs, items)
        return (score,) if self.options["scale"] == 1 else not_below_zero(score)
