"""Scorers with a tower for images and one for text, as open_clip builds them: the cosine of the two embeddings.

OpenAI's networks use a quick form of GELU. open_clip's configuration of the plain name (ViT-B-32) has the standard
GELU and loads OpenAI's weights from a file without a warning; the names used here end in -quickgelu.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image

from specbench.config import registry
from specbench.errors import UsageError
from specbench.metrics import weights
from specbench.metrics.base import MeanMetric, PromptItem, ScoringContext, SingleImageScorer, chosen, cut_captions

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Image (H, W, 3) uint8 -> one of the network's own size or of any other, (H', W', 3) uint8.
Resize = Callable[[np.ndarray], np.ndarray]


class TowersScorer(SingleImageScorer):
    """Outputs (B, 1) float64: the cosine between an image's and its caption's embeddings, computed in float32."""

    def __init__(self, network: nn.Module, prepared: Callable[[np.ndarray], Tensor], prefix: str, device: str) -> None:
        """network: of `load`; prepared: image (H, W, 3) uint8 -> its input (3, S, S); prefix: put before captions."""
        self.network, self.prepared, self.prefix, self.device = network, prepared, prefix, device

    def batch(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        import torch
        from torch.nn.functional import cosine_similarity

        x = torch.stack([self.prepared(image) for image in images]).to(self.device)
        ids = tokenizer()([self.prefix + item.prompt for item in items]).to(self.device)
        with torch.inference_mode():
            image_embeddings, text_embeddings = self.network.encode_image(x), self.network.encode_text(ids)  # type: ignore[operator]
            cosines: Tensor = cosine_similarity(image_embeddings.double(), text_embeddings.double())
        return cosines[:, None].cpu().numpy()


def config(architecture: str) -> dict[str, Any]:
    """open_clip's configuration of an architecture, by its name there."""
    found: dict[str, Any] = weights.package("open_clip").get_model_config(architecture)
    return found


@cache
def tokenizer() -> Any:
    """CLIP's tokenizer: captions -> (N, 77) int64. A longer caption is cut, its last token is the end of text."""
    return weights.package("open_clip").SimpleTokenizer()


def too_long(captions: Sequence[str]) -> int:
    """The number of captions that do not fit into the text tower."""
    tokens = tokenizer()
    return sum(len(tokens.encode(caption)) + 2 > tokens.context_length for caption in captions)


def load(path: Path, architecture: str, device: str, wrappers: Sequence[str] = ()) -> nn.Module:
    """The network of an open_clip weights file, in float32 and evaluation mode. Raises UsageError for a file that does
    not hold exactly its tensors; `wrappers` are keys under which a PyTorch file may keep them."""
    import torch

    from specbench.models.loading import official

    open_clip, settings = weights.package("open_clip"), config(architecture)

    def build() -> nn.Module:
        network: nn.Module = open_clip.CLIP(**settings)
        side = settings["text_cfg"]["context_length"]
        with torch.device("cpu"):  # in no file
            network.attn_mask = torch.full((side, side), float("-inf")).triu(1)
        return network

    return official.load_by_name(build, official.open_source(path, wrappers), device, torch.float32)


def preparation(size: int, mode: str, first: Resize | None) -> Callable[[np.ndarray], Tensor]:
    """Image (H, W, 3) uint8 -> input (3, size, size) float32: `first`, then open_clip's own preparation, which is
    PIL's antialiased bicubic and CLIP's mean and deviation.

    mode: open_clip's "shortest" (the shorter side becomes `size`, the centre is cut out) or "longest" (the longer side
    does, black is added).
    """
    weights.package("open_clip")
    from open_clip.transform import PreprocessCfg, image_transform_v2

    own = image_transform_v2(PreprocessCfg(size=size, resize_mode=mode), is_train=False)

    def prepared(image: np.ndarray) -> Tensor:
        x: Tensor = own(Image.fromarray(first(image) if first else image))
        return x

    return prepared


class TowersMetric(MeanMetric):
    """The mean cosine, times the option `scale`: 1 or 100. Subclasses set, in a backend's words:

    label: the network's name; resize: how images are resized to its size; prefix: the text before each caption; part,
    files: the folder of its weights and their possible names.
    """

    reads_prompt = True
    known: ClassVar[Mapping[str, Any]]  # options and their defaults
    label: str
    resize: str
    prefix = ""
    part: str
    files: tuple[str, ...]

    def __init__(self, context: ScoringContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, chosen(type(self), options, self.known))
        if self.options["scale"] not in (1, 100):
            raise UsageError(f"scale must be 1 (the cosine) or 100, not {self.options['scale']!r}")

    @property
    def file(self) -> Path:
        """The network's weights. Raises Unavailable."""
        return weights.find(self.context, self.part, self.part, *self.files)

    def towers_scorer(self, architecture: str, mode: str, first: Resize | None, *wrappers: str) -> TowersScorer:
        """With a network of open_clip's; see `load` and `preparation`."""
        file = weights.published(self.context, self.part, self.file)
        network = load(file, architecture, self.context.device, wrappers)
        prepared = preparation(config(architecture)["vision_cfg"]["image_size"], mode, first)
        return TowersScorer(network, prepared, self.prefix, self.context.device)

    @property
    def cache_key(self) -> str:
        weights.need("open_clip")
        prefix = f", prefix '{self.prefix}'" if self.prefix else ""
        return f"{self.label}@{registry.digest(self.file)}, {self.resize}{prefix}"

    def backend(self) -> str:
        scale = self.options["scale"]
        return self.cache_key if scale == 1 else f"{self.cache_key}, x{scale}"

    def note(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> str:
        cut = too_long([self.prefix + item.prompt for item in items])
        return cut_captions(cut, len(items), 77)

    def per_image(self, outputs: np.ndarray) -> np.ndarray:
        return super().per_image(outputs) * self.options["scale"]
