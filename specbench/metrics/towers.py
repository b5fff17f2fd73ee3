"""CLIP score and HPSv2. Their scorers have an image tower and a text tower, as open_clip builds them; a score is the
cosine of the two embeddings.

OpenAI's networks use an approximation of GELU. open_clip's configuration with the plain name (ViT-B-32) has the
standard GELU and loads OpenAI's weights from a file without a warning. The names used here end in -quickgelu.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image

from specbench.config import registry
from specbench.errors import UsageError, unknown
from specbench.metrics import weights
from specbench.metrics.base import (
    MeanMetric,
    NetworkScorer,
    PromptItem,
    Score,
    Scorer,
    ScoringContext,
    chosen,
    cut_captions,
    not_below_zero,
)
from specbench.rows.remark import Remark
from specbench.storage.image_files import center_crop

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Image (H, W, 3) uint8 -> (H', W', 3) uint8, of any size.
Resize = Callable[[np.ndarray], np.ndarray]


def config(architecture: str) -> dict[str, Any]:
    """open_clip's configuration of an architecture, by its name there."""
    settings: dict[str, Any] = weights.package("open_clip").get_model_config(architecture)
    return settings


@cache
def tokenizer() -> Any:
    """CLIP's tokenizer: captions -> (N, 77) int64. A longer caption is cut off; its last token is the end token."""
    return weights.package("open_clip").SimpleTokenizer()


def too_long(captions: Sequence[str]) -> int:
    """The number of captions that do not fit into the text tower."""
    tokens = tokenizer()
    return sum(len(tokens.encode(caption)) + 2 > tokens.context_length for caption in captions)


def load(path: Path, architecture: str, device: str, wrappers: Sequence[str] = ()) -> nn.Module:
    """The network of an open_clip weights file, in float32 and evaluation mode. Raises UsageError for a file with other
    tensors. wrappers: keys under which a PyTorch file may store the tensors."""
    import torch

    from specbench.models.loading import official

    open_clip, settings = weights.package("open_clip"), config(architecture)

    def build() -> nn.Module:
        network: nn.Module = open_clip.CLIP(**settings)
        side = settings["text_cfg"]["context_length"]
        with torch.device("cpu"):  # no file stores it
            network.attn_mask = torch.full((side, side), float("-inf")).triu(1)
        return network

    return official.load(build, official.open_source(path, wrappers), None, device, torch.float32)


def preparation(size: int, mode: str, first: Resize | None) -> Callable[[np.ndarray], Tensor]:
    """Image (H, W, 3) uint8 -> input (3, size, size) float32: first `first`, then open_clip's preparation, which is
    PIL's antialiased bicubic and CLIP's mean and deviation.

    mode: open_clip's "shortest" (the shorter side becomes `size`, the centre is cut out) or "longest" (the longer side
    becomes `size`, black is added).
    """
    weights.package("open_clip")
    from open_clip.transform import PreprocessCfg, image_transform_v2

    open_clip_transform = image_transform_v2(PreprocessCfg(size=size, resize_mode=mode), is_train=False)

    def prepared(image: np.ndarray) -> Tensor:
        x: Tensor = open_clip_transform(Image.fromarray(first(image) if first else image))
        return x

    return prepared


class TowersMetric(MeanMetric):
    """The mean cosine times the option `scale`, 1 or 100. Subclasses set:

    label: the network's name in a backend; resize: the resize of images, in a backend; prefix: the text before each
    caption; part, files: the folder of the weights and their possible names.
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

    def towers_scorer(self, architecture: str, mode: str, first: Resize | None, *wrappers: str) -> Scorer:
        """The scorer of an open_clip network (see `load` and `preparation`). Outputs (B, 1) float64: the cosine between
        the embeddings of an image and its caption, which are computed in float32."""
        import torch

        device = self.context.device
        network: Any = load(weights.published(self.context, self.part, self.file), architecture, device, wrappers)
        prepared = preparation(config(architecture)["vision_cfg"]["image_size"], mode, first)

        def outputs(images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> Tensor:
            x = torch.stack([prepared(image) for image in images]).to(device)
            ids = tokenizer()([self.prefix + item.prompt for item in items]).to(device)
            return torch.cosine_similarity(network.encode_image(x).double(), network.encode_text(ids).double())[:, None]

        return NetworkScorer(device, outputs)

    @property
    def cache_key(self) -> str:
        weights.need("open_clip")
        prefix = f", prefix '{self.prefix}'" if self.prefix else ""
        return f"{self.label}@{registry.digest(self.file)}, {self.resize}{prefix}"

    def backend(self) -> str:
        scale = self.options["scale"]
        return self.cache_key if scale == 1 else f"{self.cache_key}, x{scale}"

    def remarks(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> list[Remark]:
        cut = too_long([self.prefix + item.prompt for item in items])
        return cut_captions(cut, len(items), 77)

    def per_image(self, outputs: np.ndarray) -> np.ndarray:
        return super().per_image(outputs) * self.options["scale"]


#: Model -> the folder of its weights.
MODELS = {"ViT-B-32": "clip_b32", "ViT-B-16": "clip_b16"}
FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")


def _bilinear(image: np.ndarray) -> np.ndarray:
    import torch
    from torch.nn.functional import interpolate

    x = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    resized = interpolate(x, size=(299, 299), mode="bilinear", align_corners=False)[0]
    rounded: np.ndarray = resized.permute(1, 2, 0).contiguous().numpy()
    return rounded


def _lanczos(image: np.ndarray) -> np.ndarray:
    level = np.arange(256, dtype=np.float32) / np.float32(255)
    lowered = ((level - np.float32(0.5)) / np.float32(0.5) + np.float32(1)) * np.float32(127.5)
    cropped: np.ndarray = lowered.astype(np.uint8)[center_crop(image, 256)]
    return cropped


#: Resize -> the step before CLIP's preparation, and its name in a backend.
RESIZES: dict[str, tuple[Resize | None, str]] = {
    "own": (None, "224 bicubic"),
    "bilinear299": (_bilinear, "299 bilinear, then 224 bicubic"),
    "lanczos256": (_lanczos, "256 Lanczos as LANTERN, then 224 bicubic"),
}


class ClipScore(TowersMetric):
    """CLIP score (Hessel et al. 2021) by OpenAI's ViT-B/32 or ViT-B/16: the mean cosine of an image and its caption.

    Papers differ in four ways; each is an option:

        model   ViT-B-32 or ViT-B-16
        scale   1 (the cosine, 0.2 to 0.35) or 100 (like torchmetrics: the mean times 100, 0 if it is negative)
        prefix  put before each caption, such as Hessel et al.'s "A photo depicts "
        resize  own          as CLIP does it: PIL's bicubic to 224
                bilinear299  first the whole image to 299x299, bilinear without antialiasing, rounded to integer levels
                             (the released evaluation of SJD, evaluation_metrics.py, also used by SJD-PAC)
                lanczos256   first the center square to 256x256, Lanczos; some levels become lower by one (the released
                             evaluation of LANTERN, eval_fid_clip.py, which converts to float and truncates)

    A caption of more than 77 tokens is cut off but keeps its end token, as in OpenAI's and LANTERN's code. torchmetrics
    drops the end token, so such captions score differently there; a remark counts them.
    """

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


#: Version -> the folder of its weights, and the file in it.
VERSIONS = {"v2": ("hpsv2", "HPS_v2_compressed.pt"), "v2.1": ("hpsv21", "HPS_v2.1_compressed.pt")}


class HPSv2(TowersMetric):
    """Human Preference Score v2 and v2.1 (Wu et al. 2023): CLIP ViT-H/14, trained on people's choices between images.
    Options: `version`, `scale`.

    The score is the cosine between image and caption, about 0.2 to 0.3, as the official code returns it. Its benchmark
    and most papers print the mean times 100 (option `scale`). As in that code, the longer side of an image is resized
    to 224, bicubic, and black is added; for square images this is CLIP's preparation. That code computes in float16 on
    a GPU; here it is float32.

    v2 and v2.1 have different weights and are not comparable. The default of the official package is v2.
    """

    known: ClassVar[Mapping[str, Any]] = {"version": "v2", "scale": 1}
    resize = "224 bicubic, padded"

    def __init__(self, context: ScoringContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        if self.options["version"] not in VERSIONS:
            raise unknown("version of hpsv2", str(self.options["version"]), VERSIONS)
        self.part, *files = VERSIONS[self.options["version"]]
        self.files, self.label = tuple(files), f"hps-{self.options['version']}"

    def scorer(self) -> Scorer:
        return self.towers_scorer("ViT-H-14", "longest", None, "state_dict")
