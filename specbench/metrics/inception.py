"""Inception-V3 as a feature extractor: the network of 2015-12-05 behind every published FID, KID and Inception Score.

Layers and resize are torch-fidelity's, which reproduce TensorFlow's graph; the weights are that graph's, converted. One
pass gives the 2048 features of the last pooling and the 1008 logits without their bias, as all the metrics read them.

An image is brought to 299x299 in one of three ways, which give different values and are therefore named in every row:

    tf       TensorFlow 1's bilinear of the original graph: no antialiasing, pixels at their corners; then
             (x - 128) / 128. torch-fidelity, ADM.
    clean    PIL's bicubic with antialiasing, each channel as float32, not rounded; then as above. clean-fid (Parmar et
             al. 2022), which LANTERN's code uses.
    pytorch  bilinear, no antialiasing, pixels at their centres; then x / 127.5 - 1. pytorch-fid, which SJD's code uses.

`crop` comes before: the center square, resized to that side with Lanczos (LANTERN's evaluation, real images and
generated ones alike). An image that is such a square already is left as it is.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image

from specbench.errors import UsageError, unknown
from specbench.metrics import weights
from specbench.metrics.base import Metric, PromptItem, Scorer, ScoringContext, SingleImageScorer, chosen
from specbench.metrics.compared import CROP, ComparedMetric
from specbench.storage.files import cached_sha256
from specbench.storage.image_files import center_crop

if TYPE_CHECKING:
    from torch import Tensor, nn

#: The same file under the names that pytorch-fid and torch-fidelity publish it by, and its SHA-256.
FILES = ("pt_inception-2015-12-05-6726825d.pth", "weights-inception-2015-12-05-6726825d.pth")
SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
SIDE, FEATURES, CLASSES = 299, 2048, 1008
RESIZES = ("tf", "clean", "pytorch")

_FID_OF_RESIZE = {"tf": "fid", "clean": "fid_clean", "pytorch": "fid_pytorch"}  # choices of metrics with them


class InceptionScorer(SingleImageScorer):
    """Outputs (B, 2048 + 1008) float32: the features of the last pooling, then the logits without their bias."""

    def __init__(self, network: nn.Module, resize: str = "tf", crop: int | None = None, device: str = "cpu") -> None:
        """network: of `load`, or a `blank` one filled otherwise."""
        self.network, self.resize, self.crop, self.device = network.to(device), resize, crop, device

    def batch(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            x = torch.cat([self._prepared(image) for image in images])
            for name, layer in self.network.named_children():  # registered in the order of the forward pass
                if name != "fc":
                    x = layer(x)
            found = x.flatten(1)
            weight = self.network.get_parameter("fc.weight")
            outputs: np.ndarray = torch.cat([found, found @ weight.T], 1).cpu().numpy()
        return outputs

    def _prepared(self, image: np.ndarray) -> Tensor:
        """An image (H, W, 3) uint8 -> (1, 3, 299, 299) float32, about -1..1."""
        import torch
        from torch.nn import functional as F
        from torch_fidelity.interpolate_compat_tensorflow import interpolate_bilinear_2d_like_tensorflow1x

        if self.crop is not None:
            image = center_crop(image, self.crop)
        if self.resize == "clean":
            bands = [Image.fromarray(image[..., band].astype(np.float32)) for band in range(3)]
            small = [np.asarray(band.resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for band in bands]
            return (torch.from_numpy(np.stack(small))[None].to(self.device) - 128) / 128
        x = torch.from_numpy(np.array(image)).to(self.device).permute(2, 0, 1)[None].float()
        if self.resize == "pytorch":
            return 2 * F.interpolate(x / 255, size=(SIDE, SIDE), mode="bilinear", align_corners=False) - 1
        return (interpolate_bilinear_2d_like_tensorflow1x(x, size=(SIDE, SIDE), align_corners=False) - 128) / 128


def blank() -> nn.Module:
    """torch-fidelity's network with weights that are not trained. Its class reads a weights file in a way that lets
    the file execute code; here it reads the bytes of an empty dictionary instead."""
    import torch
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    class InceptionNetwork(FeatureExtractorInceptionV3):
        def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
            return super().load_state_dict(state_dict, strict and bool(state_dict), assign)

    nothing = io.BytesIO()
    torch.save({}, nothing)
    nothing.seek(0)
    network: nn.Module = InceptionNetwork(
        "inception", ["2048", "logits_unbiased"], feature_extractor_weights_path=nothing
    )
    return network


def load(path: Path) -> nn.Module:
    """The network with the weights of a file. Raises UsageError where it is not the published one, or does not fit."""
    import torch

    from specbench.models.loading import checkpoints

    if (found := cached_sha256(path)) != SHA256:
        raise UsageError(
            f"{path} is not the published file: its SHA-256 begins with {found[:8]}, not {SHA256[:8]}; fetch it again"
        )
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError) as e:
        raise UsageError(f"{path} cannot be read as weights ({type(e).__name__}); fetch it again") from None
    if not isinstance(tensors, Mapping) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise UsageError(f"{path} does not hold a network's tensors by name; fetch it again")
    network = blank()
    checkpoints.fill(network, dict(tensors), path.name)
    return network


class InceptionMetric(Metric):
    """A statistic over Inception-V3's outputs. Options: `resize`, `crop`, and the integers of `counts`."""

    features = True
    counts: ClassVar[Mapping[str, int]] = {}  # further options and their defaults

    def __init__(self, context: ScoringContext, options: Mapping[str, Any]) -> None:
        known = {"resize": "tf", "crop": None, **self.counts}
        super().__init__(context, chosen(type(self), options, known))
        if self.options["resize"] not in RESIZES:
            raise unknown("resize of Inception", str(self.options["resize"]), RESIZES)
        for name in ("crop", *self.counts):
            value = self.options[name]
            if not (name == "crop" and value is None) and (type(value) is not int or value < 1):
                raise UsageError(f"{name} must be an integer of at least 1, not {value!r}")

    @property
    def cache_key(self) -> str:
        crop = f"{CROP}{self.options['crop']}" if self.options["crop"] else ""
        return f"inception-v3@{cached_sha256(self._weights())[:8]}, {self.options['resize']} resize{crop}"

    def scorer(self) -> Scorer:
        return InceptionScorer(load(self._weights()), self.options["resize"], self.options["crop"], self.context.device)

    def _weights(self) -> Path:
        weights.need("torch_fidelity")
        return weights.find(self.context, "fid", "inception", *FILES)


class InceptionFeatures(InceptionMetric, ComparedMetric):
    """A metric that compares the features of the last pooling with those of real images."""

    @property
    def width(self) -> int:
        return FEATURES

    @property
    def of_real(self) -> str:
        return _FID_OF_RESIZE[self.options["resize"]]

    def others(self, data: str) -> str:
        return ", such as ADM's VIRTUAL_imagenet256_labeled.npz" if data == "imagenet" else ""
