"""The steps from an image (H, W, 3) uint8 to a network's input. All resizing is PIL's bicubic, which has antialiasing
and rounds to integer levels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from torch import Tensor

#: Mean and standard deviation of the channels: of ImageNet, and of CLIP's training data.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def squeezed(image: np.ndarray, side: int) -> np.ndarray:
    """(side, side, 3) uint8: the whole image, of any shape, resized to a square."""
    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC))


def shortest(image: np.ndarray, side: int) -> np.ndarray:
    """The image, resized to a shorter side of `side`; the longer side is rounded down."""
    height, width = image.shape[:2]
    short = min(height, width)
    size = int(side * width / short), int(side * height / short)
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))


def center_square(image: np.ndarray) -> np.ndarray:
    """The largest square in the centre. If a margin is odd, the top or left part is the smaller one."""
    height, width = image.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return np.ascontiguousarray(image[top : top + side, left : left + side])


def square(image: np.ndarray, side: int) -> np.ndarray:
    """(side, side, 3) uint8: the shorter side is resized to `side` and the centre is cut out. Rounds as torchvision's
    Resize and CenterCrop do."""
    resized = shortest(image, side)
    height, width = resized.shape[:2]
    top, left = round((height - side) / 2), round((width - side) / 2)
    return np.array(resized[top : top + side, left : left + side])


def normalised(image: np.ndarray, statistics: tuple[tuple[float, ...], tuple[float, ...]]) -> Tensor:
    """(3, H, W) float32: levels in [0, 1], minus the mean, divided by the deviation."""
    import torch

    mean, deviation = map(torch.tensor, statistics)
    x: Tensor = ((torch.from_numpy(np.array(image)).float() / 255 - mean) / deviation).permute(2, 0, 1).contiguous()
    return x
