"""Qwen3-VL as a VQA model: a question about an image -> the distribution of the first token of the answer.

The network is transformers' Qwen3VLForConditionalGeneration. An image and a question form one user message, image
first, as in the chat template of the published processor. Sides are multiples of 32 pixels, with at least 256 x 256
pixels in all. An image of 512 x 512 is not resized. Others are resized by PIL's bicubic; the published processor uses
torchvision's, which rounds differently. (Sizes, mean and deviation: preprocessor_config.json of
Qwen/Qwen3-VL-8B-Instruct.) No logits processor is applied: for greedy decoding, the published generation_config.json
has none that changes the logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from specbench.errors import UsageError
from specbench.metrics import preparation, weights
from specbench.metrics.base import ScoringContext, Unavailable
from specbench.storage.files import cached_sha256, sha256

if TYPE_CHECKING:
    from torch import Tensor

#: Folder of the weights of Qwen3-VL-8B-Instruct, which `metrics=geneval2` declares and downloads.
FOLDER, FETCHED_BY = "qwen3_vl_8b", "geneval2"
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
PATCH, MERGE, TIMES = 16, 2, 2  # pixels per patch and patches per token, along a side; copies of an image
LEAST, MOST = 256**2, 4096**2  # pixels of an image
LEVELS = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)  # mean and deviation of a channel
IMAGE = "<|image_pad|>"
_CHAT = "<|im_start|>user\n<|vision_start|>{}<|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n"


def files(context: ScoringContext) -> list[Path]:
    """The files of the configuration, the tokenizer and the tensors, in this order. Raises Unavailable."""
    config, tokenizer = (weights.find(context, FETCHED_BY, FOLDER, name) for name in (CONFIG, TOKENIZER))
    first = weights.find(context, FETCHED_BY, FOLDER, "model.safetensors.index.json", "model.safetensors")
    return [config, tokenizer, *sorted(first.parent.glob("*.safetensors"))]


def cache_key(context: ScoringContext) -> str:
    """The VQA model's name, with a hash of its files. Raises Unavailable if they are missing."""
    return f"qwen3-vl-8b-instruct@{sha256(''.join(map(cached_sha256, files(context))), 8)}"


def _network_class() -> Any:
    """transformers' class. Raises Unavailable if the installed release does not have it."""
    import transformers

    try:
        return transformers.Qwen3VLForConditionalGeneration
    except AttributeError:
        raise Unavailable(
            f"Qwen3-VL needs transformers 4.57 or newer, not {transformers.__version__}: pip install -U transformers"
        ) from None


class VQAModel:
    """Qwen3-VL on a device, with its tokenizer."""

    def __init__(self, context: ScoringContext) -> None:
        """Raises Unavailable, and UsageError for files that are not from one Qwen3-VL."""
        config, tokenizer, *shards = files(context)
        for path in (config, tokenizer, *shards):
            weights.published(context, FOLDER, path)
        self.device = context.device
        self.tokenizer = weights.tokenizer(tokenizer)
        self.network = _load(config.parent, self.device)
        self._image = self.tokenizer.token_to_id(IMAGE)
        if self._image is None or self._image != self.network.config.image_token_id:
            raise UsageError(f"{tokenizer} is not the tokenizer of Qwen3-VL; fetch it again")

    def first_token(self, text: str) -> int:
        """The first token of a text."""
        return int(self.tokenizer.encode(text, add_special_tokens=False).ids[0])

    def answer(self, probs: Tensor) -> str:
        """The text of the most probable token of probabilities (V,)."""
        return self.tokenizer.decode([int(probs.argmax())])

    def __call__(self, image: np.ndarray, question: str) -> Tensor:
        """Image (H, W, 3) uint8 and a question -> probabilities (V,) float32 of the first token of the answer."""
        import torch

        x, grid = patches(image)
        rows, columns = grid[0] // MERGE, grid[1] // MERGE
        text = _CHAT.format(IMAGE * (rows * columns), question)
        ids = torch.tensor(self.tokenizer.encode(text, add_special_tokens=False).ids)
        start = ids.tolist().index(self._image)
        with torch.inference_mode():
            output = self.network(
                input_ids=ids[None].to(self.device),
                attention_mask=torch.ones_like(ids)[None].to(self.device),
                position_ids=positions(len(ids), start, (rows, columns))[:, None].to(self.device),
                pixel_values=x.to(self.device),
                image_grid_thw=torch.tensor([[1, *grid]], device=self.device),
                use_cache=False,
                logits_to_keep=1,
            )
            probs: Tensor = output.logits[0, -1].float().softmax(-1)
        return probs


def positions(length: int, start: int, grid: tuple[int, int]) -> Tensor:
    """Rotary positions (3, length) int64 (time, row, column) of a text whose image tokens, in a grid, begin at `start`.
    Text positions increase equally in all three. Image tokens add their row and column; the text after them continues
    at the larger side of the grid."""
    import torch

    rows, columns = grid
    p = torch.arange(length).repeat(3, 1)
    end = start + rows * columns
    p[0, start:end] = start
    p[1, start:end] = start + torch.arange(rows).repeat_interleave(columns)
    p[2, start:end] = start + torch.arange(columns).repeat(rows)
    p[:, end:] += max(grid) - rows * columns
    return p


def patches(image: np.ndarray) -> tuple[Tensor, tuple[int, int]]:
    """Image (H, W, 3) uint8 -> patches (rows * columns, 3 * 2 * 16 * 16) float32, and their (rows, columns)."""
    height, width = preparation.multiples(image.shape[0], image.shape[1], PATCH * MERGE, LEAST, MOST)
    if image.shape[:2] != (height, width):
        image = np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))
    return preparation.patches(preparation.normalised(image, LEVELS), PATCH, MERGE, TIMES)


def _load(folder: Path, device: str) -> Any:
    """The network, in the dtype that its configuration states. Raises UsageError for other tensors."""
    network_class = _network_class()
    try:
        network, report = network_class.from_pretrained(
            folder, dtype="auto", local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except Exception as e:  # a damaged file, tensors of another shape
        raise UsageError(f"cannot read {folder} ({' '.join(str(e).split())[:200]}); fetch it again") from None
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    if other := sorted(str(name) for kind in kinds for name in report[kind]):
        raise UsageError(f"{folder} does not fit Qwen3-VL: {other[0]}; fetch it again")
    return network.to(device).eval().requires_grad_(False)
