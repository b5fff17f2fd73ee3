"""Mask2Former (Cheng et al. 2022) with Swin-S, trained on COCO's instances, in transformers: image -> instances.

The network is transformers', built from its default sizes and filled from the file of
facebook/mask2former-swin-small-coco-instance. Images are prepared and instances scored as in the test configurations of
the authors and of mmdet: the shorter side becomes 800 pixels, the longer side at most 1,333. An instance's score is the
probability of its class times the mean probability of its mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad
from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation

from specbench.errors import UsageError
from specbench.metrics.preparation import IMAGENET, normalised

SETTINGS: dict[str, Any] = {"num_labels": 80}
SHORTER, LONGER = 800, 1333  # sides of a prepared image, in pixels
STRIDE = 32  # of the backbone: prepared images are padded to its multiples
MOST = 100  # instances per image


@dataclass(frozen=True)
class Instance:
    """label: index of its class; box: (x0, y0, x1, y1) in pixels, x1 and y1 excluded; mask: (H, W) bool."""

    label: int
    score: float
    box: tuple[int, int, int, int]
    mask: np.ndarray


def load(path: Path, device: str, settings: Mapping[str, Any] = SETTINGS) -> nn.Module:
    """The network of a weights file, in float32. Raises UsageError for a file with other tensors."""
    config = Mask2FormerConfig(**settings)
    try:
        network, report = Mask2FormerForUniversalSegmentation.from_pretrained(
            path.parent, config=config, local_files_only=True, output_loading_info=True
        )
    except Exception as e:  # other shapes, a truncated file, or a file that is not only weights
        raise UsageError(f"cannot read {path} ({' '.join(str(e).split())[:200]}); fetch it again") from None
    # The loss's weights and the lists of positions may differ.
    other = sorted(
        str(name)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        for name in report[kind]
        if "criterion" not in str(name) and "relative_position_index" not in str(name)
    )
    if other:
        raise UsageError(f"{path} does not fit Mask2Former with Swin-S: {other[0]}; fetch it again")
    loaded: nn.Module = network.float().to(device).eval().requires_grad_(False)
    return loaded


def detect(network: nn.Module, image: np.ndarray, device: str, least: float) -> list[Instance]:
    """The instances of an image (H, W, 3) uint8 with a score above `least`, best first."""
    x, mask, size = prepared(image)
    with torch.inference_mode():
        out = network(pixel_values=x.to(device), pixel_mask=mask.to(device))
        height, width = image.shape[:2]
        classes, masks = out.class_queries_logits[0], out.masks_queries_logits[0]
        return instances(classes, masks, (x.shape[-2], x.shape[-1]), size, (height, width), least)


def prepared(image: np.ndarray) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Image (H, W, 3) uint8 -> input (1, 3, H', W') float32, its mask (1, H', W') int64, and the image's size in it."""
    height, width = image.shape[:2]
    scale = min(SHORTER / min(height, width), LONGER / max(height, width))
    h, w = int(height * scale + 0.5), int(width * scale + 0.5)
    resized = np.asarray(Image.fromarray(image).resize((w, h), Image.Resampling.BILINEAR))
    margins = (0, -w % STRIDE, 0, -h % STRIDE)
    x = pad(normalised(resized, IMAGENET), margins)
    mask = pad(torch.ones(h, w, dtype=torch.int64), margins)
    return x[None], mask[None], (h, w)


def instances(
    classes: Tensor,
    masks: Tensor,
    padded: tuple[int, int],
    size: tuple[int, int],
    original: tuple[int, int],
    least: float,
) -> list[Instance]:
    """Instances from class logits (Q, C + 1), where the last class is "no object", and mask logits (Q, h, w).

    padded, size, original: (height, width) of the input, of the image in it, and of the original image. Each of the
    `MOST` most probable pairs of query and class is an instance if its score is above `least`.
    """
    probabilities = classes.float().softmax(-1)[:, :-1]
    count = probabilities.shape[1]
    best, which = probabilities.flatten().topk(min(MOST, probabilities.numel()))
    likely = best > least  # a score is not larger than its class probability
    best, which = best[likely], which[likely]
    if not len(best):
        return []
    logits = interpolate(masks[which // count][None].float(), padded, mode="bilinear", align_corners=False)
    logits = interpolate(logits[..., : size[0], : size[1]], original, mode="bilinear", align_corners=False)[0]
    binary = logits > 0
    inside = (logits.sigmoid() * binary).flatten(1).sum(1) / (binary.flatten(1).sum(1) + 1e-6)
    scores = (best * inside).tolist()
    detected = []
    for i in sorted(range(len(scores)), key=lambda i: -scores[i]):
        mask = binary[i].cpu().numpy()
        if scores[i] <= least or not mask.any():
            continue
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        box = (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)
        detected.append(Instance(int(which[i]) % count, scores[i], box, mask))
    return detected
