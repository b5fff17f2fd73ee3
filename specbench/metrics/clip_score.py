"""CLIP score (Hessel et al. 2021): the mean cosine between the embeddings of a picture and of its caption.

torchmetrics defines and computes it; the model is the embedded two-tower one, handed over in the form of a CLIP model
and its processor. torchmetrics' scale is 100 max(cos, 0); here it is the cosine itself, as the papers print it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specbench.data import scenes
from specbench.metrics.base import Item, Score, mean_and_stderr
from specbench.metrics.embedded import EmbeddedMetric, as_input, of_classes
from specbench.models import evaluators as ev


class _AsClip(nn.Module):
    """The two-tower model as torchmetrics addresses CLIP; remembers the embeddings of the last call."""

    config = None

    def __init__(self, towers: ev.TwoTower) -> None:
        super().__init__()
        self.towers = towers
        self.seen = self.said = torch.empty(0)

    @torch.no_grad()
    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        self.seen = self.towers.embed_images(pixel_values).double()
        return self.seen

    @torch.no_grad()
    def get_text_features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.said = self.towers.embed_ids(input_ids).double()
        return self.said


class _Processor:
    """Pictures uint8 (3, H, W) or captions -> the model's input."""

    def __init__(self, towers: ev.TwoTower) -> None:
        self.towers = towers

    def __call__(
        self, *, images: list[Tensor] | None = None, text: list[str] | None = None, **_: Any
    ) -> dict[str, Tensor]:
        if images is not None:
            return {"pixel_values": as_input(torch.stack(images))}
        ids = self.towers.tokenize(text or [])
        return {"input_ids": ids, "attention_mask": ids != 0}


class ClipScore(EmbeddedMetric):
    """Mean cosine between pictures and captions of the embedded two-tower model."""

    weights = ev.TWO_TOWER

    def judge(self, images: np.ndarray, items: Sequence[Item]) -> Score:
        towers = ev.load(self.path, ev.TwoTower, self.device)
        unread = sum(not readable(towers, item.prompt) for item in items)
        if unread:
            return Score.unmeasured(
                f"{unread} of {len(items)} captions hold words that the model has never seen, or none: it knows those"
                " of scenes only",
                self.backend,
            )
        from torchmetrics.multimodal.clip_score import CLIPScore  # takes seconds to import

        model = _AsClip(towers)
        as_clip: Any = lambda: (model, _Processor(towers))  # noqa: E731 (typed as transformers' classes)
        metric = CLIPScore(as_clip).to(self.device)
        metric.score = metric.score.double()  # not set_dtype, which would cast the model too
        cosines = []
        for rows, x in self.batches(images):
            metric.update(x, [item.prompt for item in items[rows]])
            cosines.append((model.seen * model.said).sum(-1).cpu().numpy())
        mean, stderr = mean_and_stderr(np.concatenate(cosines))
        notes = ["the mean cosine is negative, which counts as 0"] if mean < 0 else []
        if all(map(of_classes, items)):
            notes.append("the prompts are names of classes, the model has seen whole captions: compare only such runs")
        return Score(float(metric.compute()) / 100, stderr, self.backend, "; ".join(notes))


def readable(towers: ev.TwoTower, caption: str) -> bool:
    """Whether a caption has words, and the model has seen all of them."""
    return bool(scenes.words(caption)) and not towers.unknown_words(caption)
