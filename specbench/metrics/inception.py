"""Inception-V3 as a feature extractor: the network of 2015-12-05, which all published FID, KID and IS values use.

Layers and resize are torch-fidelity's, which reproduce TensorFlow's graph; the weights are converted from that graph.
One pass gives the 2048 features of the last pooling and the 1008 logits without bias; all metrics read these.

An image is resized to 299x299 in one of three ways. They give different values, so every row names its resize:

    tf       TensorFlow 1's bilinear of the original graph: no antialiasing, pixels at their corners; then
             (x - 128) / 128. torch-fidelity, ADM.
    clean    PIL's bicubic with antialiasing, each channel as float32, clipped to 0 to 255, not rounded; then as above.
             clean-fid (Parmar et al. 2022), which LANTERN's code uses.
    pytorch  bilinear, no antialiasing, pixels at their centres; then x / 127.5 - 1. pytorch-fid, which SJD's code uses.

`crop` is applied before: the center square is resized to this side with Lanczos (LANTERN's evaluation, for real and
generated images). An image that already is such a square is unchanged.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image

from specbench.errors import UsageError, unknown
from specbench.metrics import weights
from specbench.metrics.base import Metric, PromptItem, Score, Scorer, ScoringContext, SingleImageScorer, chosen
from specbench.metrics.compared import CROP, ComparedMetric, FrechetMetric, order
from specbench.rows.remark import remark
from specbench.storage.files import cached_sha256
from specbench.storage.image_files import center_crop

if TYPE_CHECKING:
    from torch import Tensor, nn

#: The names under which pytorch-fid and torch-fidelity publish the same file, and its SHA-256.
FILES = ("pt_inception-2015-12-05-6726825d.pth", "weights-inception-2015-12-05-6726825d.pth")
SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
SIDE, FEATURES, CLASSES = 299, 2048, 1008
RESIZES = ("tf", "clean", "pytorch")

_FID_OF_RESIZE = {"tf": "fid", "clean": "fid_clean", "pytorch": "fid_pytorch"}  # choices of metrics with them


class InceptionScorer(SingleImageScorer):
    """Outputs (B, 2048 + 1008) float32: the features of the last pooling, then the logits without their bias."""

    def __init__(self, network: nn.Module, resize: str = "tf", crop: int | None = None, device: str = "cpu") -> None:
        """network: the result of `load`, or a `blank` network with other weights."""
        self.network, self.resize, self.crop, self.device = network.to(device), resize, crop, device

    def batch(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            x = torch.cat([self._prepared(image) for image in images])
            for name, layer in self.network.named_children():  # registered in the order of the forward pass
                if name != "fc":
                    x = layer(x)
            features = x.flatten(1)
            weight = self.network.get_parameter("fc.weight")
            outputs: np.ndarray = torch.cat([features, features @ weight.T], 1).cpu().numpy()
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
            small = [np.asarray(band.resize((SIDE, SIDE), Image.Resampling.BICUBIC)).clip(0, 255) for band in bands]
            return (torch.from_numpy(np.stack(small))[None].to(self.device) - 128) / 128
        x = torch.from_numpy(np.array(image)).to(self.device).permute(2, 0, 1)[None].float()
        if self.resize == "pytorch":
            return 2 * F.interpolate(x / 255, size=(SIDE, SIDE), mode="bilinear", align_corners=False) - 1
        return (interpolate_bilinear_2d_like_tensorflow1x(x, size=(SIDE, SIDE), align_corners=False) - 128) / 128


def blank() -> nn.Module:
    """torch-fidelity's network with untrained weights. Its class reads a weights file in a way that lets the file
    execute code; here it reads the bytes of an empty dictionary instead."""
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
    """The network with the weights of a file. Raises UsageError if it is not the published file, or does not fit."""
    import torch

    from specbench.models.loading import checkpoints

    if (digest := cached_sha256(path)) != SHA256:
        raise UsageError(
            f"{path} is not the published file: its SHA-256 begins with {digest[:8]}, not {SHA256[:8]}; fetch it again"
        )
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError) as e:
        raise UsageError(f"{path} cannot be read as weights ({type(e).__name__}); fetch it again") from None
    if not isinstance(tensors, Mapping) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise UsageError(f"{path} does not contain a network's tensors by name; fetch it again")
    network = blank()
    checkpoints.fill(network, dict(tensors), path.name)
    return network


class InceptionMetric(Metric):
    """A statistic over Inception-V3's outputs. Options: `resize`, `crop`, and the integers of `counts`."""

    features = True
    counts: ClassVar[Mapping[str, int]] = {}  # further options and their defaults

    def __init__(self, context: ScoringContext, options: Mapping[str, Any]) -> None:
        defaults = {"resize": "tf", "crop": None, **self.counts}
        super().__init__(context, chosen(type(self), options, defaults))
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
    """A metric that compares the features of the last pooling with the features of real images."""

    @property
    def width(self) -> int:
        return FEATURES

    @property
    def of_real(self) -> str:
        return _FID_OF_RESIZE[self.options["resize"]]

    def others(self, data: str) -> str:
        return ", such as ADM's VIRTUAL_imagenet256_labeled.npz" if data == "imagenet" else ""


class FID(InceptionFeatures, FrechetMetric):
    """Fréchet Inception distance (Heusel et al. 2017, Eq. 6). Options: `resize`, `crop`.

    The value is comparable only between runs with the same number of images, reference and resize. The row names them.
    """


SEED = 2020  # of the subsets; torch-fidelity's default
MOST = 10_000  # images from which the standard error is estimated


class KID(InceptionFeatures):
    """Kernel Inception distance (Bińkowski et al. 2018): the unbiased squared maximum mean discrepancy of the features
    of images and of real images under the kernel k(a, b) = (a . b / 2048 + 1)^3. Options: `subsets`, `subset_size`.

    By convention, the mean over 100 random subsets of 1000 images per side (all images if there are fewer), by
    torch-fidelity's function. It may be negative.
    """

    counts = {"subsets": 100, "subset_size": 1000}  # noqa: RUF012 (a ClassVar of the base)
    needs_features = True

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        import torch
        from torch_fidelity.metric_kid import KEY_METRIC_KID_MEAN, KEY_METRIC_KID_STD, kid_features_to_metric

        real = self.reference.features
        assert real is not None
        n, m, subsets = len(outputs), len(real), self.options["subsets"]
        size = min(self.options["subset_size"], n, m)
        if size < 2:
            return (Score.unmeasured(remark("needs_two_a_side", statistic="a kernel distance"), self.backend()),)
        features = self.features_of(outputs[order(outputs, items)])
        result = kid_features_to_metric(
            features, torch.from_numpy(real), kid_subsets=subsets, kid_subset_size=size, rng_seed=SEED, verbose=False
        )
        drawn = result[KEY_METRIC_KID_STD] ** 2 / subsets if size < max(n, m) else 0.0
        stderr = (float(influences(features.numpy()[:MOST], real).var(ddof=1)) / n + drawn) ** 0.5
        remarks = self.against(), remark("subsets", subsets=subsets, size=size)
        return (Score(result[KEY_METRIC_KID_MEAN], stderr, self.backend(), remarks),)

    def influences(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray | None:
        real = self.reference.features
        assert real is not None
        return influences(self.features_of(outputs).numpy(), real) if 2 <= len(outputs) <= MOST else None


def influences(features: np.ndarray, real: np.ndarray) -> np.ndarray:
    """The influence of each image, (N,) float64 with mean zero, on the squared discrepancy between features (N, d) and
    the fixed features of real images (M, d).

    To first order, image i changes it by 2 / N times its witness minus the mean witness:

        h(x_i) = mean_{j != i} k(x_i, x_j) - mean_j k(x_i, y_j)
    """
    from torch_fidelity.metric_kid import kernel_poly

    features, real = features.astype(np.float64), real.astype(np.float64)
    n, witness = len(features), []
    for start in range(0, n, 1000):
        block = features[start : start + 1000]
        itself = ((block * block).sum(1) / features.shape[1] + 1) ** 3
        among = (kernel_poly(block, features).sum(1) - itself) / (n - 1)
        witness.append(among - kernel_poly(block, real).mean(1))
    h = np.concatenate(witness)
    moved: np.ndarray = 2 * (h - h.mean())
    return moved


class PrecisionRecall(InceptionFeatures):
    """Improved precision and recall (Kynkäänniemi et al. 2019, Eqs. 1 and 2). Options: `neighbours`.

    A set of images covers a ball around each member, which reaches to the member's k-th neighbour in the set (k = 3).
    Precision is the share of generated images that the real images cover; recall is the share of real images that the
    generated images cover. Computed by torch-fidelity's function. The paper uses VGG-16's features; ADM uses these.
    Precision has the standard error of a share, for fixed real images. Recall has no standard error, because every
    generated image changes the balls of the others.
    """

    counts = {"neighbours": 3}  # noqa: RUF012 (a ClassVar of the base)
    needs_features = True

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        import torch
        from torch_fidelity.metric_prc import KEY_METRIC_PRECISION, KEY_METRIC_RECALL, prc_features_to_metric

        real = self.reference.features
        assert real is not None
        n, m, k = len(outputs), len(real), self.options["neighbours"]
        if min(n, m) <= k:
            unmeasured = Score.unmeasured(remark("needs_neighbours", neighbours=k), self.backend())
            return unmeasured, unmeasured
        shares = prc_features_to_metric(
            self.features_of(outputs[order(outputs, items)]),
            torch.from_numpy(real),
            prc_neighborhood=k,
            prc_batch_size=1000,
            save_cpu_ram=True,  # distances in blocks
            verbose=False,
        )
        precision, recall = shares[KEY_METRIC_PRECISION], shares[KEY_METRIC_RECALL]
        remarks = [self.against(), remark("sides", images=n, real=m), *[remark("sides_differ")] * (n != m)]
        # An error of 0 would mean certainty.
        stderr = math.sqrt(precision * (1 - precision) / n) if 0 < precision < 1 else None
        return Score(precision, stderr, self.backend(), remarks), Score(recall, None, self.backend(), remarks)


class InceptionScore(InceptionMetric):
    """Inception Score (Salimans et al. 2016): exp of the mean KL divergence between an image's class distribution and
    the mean distribution. Options: `splits`.

    By convention, the mean over ten splits, by torch-fidelity's function on the logits without bias. It uses no real
    images, and grows with the number of images in a split. The splits depend on the items' ids (see `order`), not on
    the order of the images. The standard error is over the splits.
    """

    counts = {"splits": 10}  # noqa: RUF012 (a ClassVar of the base)

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        import torch
        from torch_fidelity.metric_isc import KEY_METRIC_ISC_MEAN, KEY_METRIC_ISC_STD, isc_features_to_metric

        n, splits = len(outputs), self.options["splits"]
        backend = f"{self.cache_key}, {splits} splits"
        if n < 2 * splits:  # an image alone equals the mean of its split, so that the score would be 1
            return (Score.unmeasured(remark("needs_splits", splits=splits, least=2 * splits), backend),)
        logits = torch.from_numpy(outputs[order(outputs, items)][:, FEATURES:])
        statistics = isc_features_to_metric(logits, splits, shuffle=False)
        # torch-fidelity divides the squares by the number of splits; an unbiased estimate divides by one less
        stderr = statistics[KEY_METRIC_ISC_STD] / math.sqrt(splits - 1) if splits > 1 else None
        few = n < splits * CLASSES
        remarks = [remark("splits_biased", images=n, splits=splits, classes=CLASSES)] * few
        return (Score(statistics[KEY_METRIC_ISC_MEAN], stderr, backend, remarks),)
