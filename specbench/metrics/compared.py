"""Base classes of metrics that compare the features of images with the features of real images.

The statistics of real images come from the file `context.reference`, or from the file that `specbench reference` made
for the data set of the scoring context. Features are the first columns of a scorer's outputs.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from specbench.errors import UsageError
from specbench.metrics import reference as references
from specbench.metrics.base import Images, Metric, PromptItem, Score, Unavailable
from specbench.metrics.reference import ReferenceStatistics
from specbench.rows.remark import Remark, remark
from specbench.rows.shown import bias
from specbench.storage import image_files

if TYPE_CHECKING:
    from torch import Tensor

    from specbench.metrics.frechet import Moments

CROP = ", crop "  # precedes the crop's side in a `Metric.cache_key`


class ComparedMetric(Metric):
    """A metric of the features of generated and of real images."""

    features = True
    needs_features: ClassVar[bool] = False  # whether it needs the features of single real images

    @property
    @abstractmethod
    def width(self) -> int:
        """Number of features per image."""

    @property
    @abstractmethod
    def of_real(self) -> str:
        """The metric whose name makes `specbench reference` compute these features of real images."""

    def fingerprint(self) -> str:
        return f"{super().fingerprint()} reference {self.reference.label}"

    def refuses(self, images: Images, items: Sequence[PromptItem]) -> str:
        try:
            self.reference  # noqa: B018 (raises)
        except Unavailable as e:
            return str(e)
        return ""

    @cached_property
    def reference(self) -> ReferenceStatistics:
        """Statistics of real images. Raises Unavailable if they are missing, and UsageError if the file is damaged or
        names another feature extractor."""
        cache_key, data = self.cache_key, self.context.data
        crop = f" crop={cache_key.partition(CROP)[2]}" if CROP in cache_key else ""
        command = f"specbench reference data={data or 'NAME'} images=DIR metrics={self.of_real}{crop}"
        path = self.context.reference or references.default_path(data, cache_key)
        if self.context.reference is None and not path.is_file():
            raise Unavailable(
                f"no statistics of real images: run `{command}`, or give the statistics of another data set,"
                f" reference=NAME, or a file, reference=FILE{self.others(data)}"
            )
        statistics = references.read(path, self.width)
        if statistics.cache_key and statistics.cache_key.partition(CROP)[0] != cache_key.partition(CROP)[0]:
            raise UsageError(
                f"{path} is of {statistics.cache_key}, but this metric uses {cache_key}: run `{command}`, or choose"
                " another metric"
            )
        if self.needs_features and statistics.features is None:
            raise Unavailable(f"{path} has only mu and sigma, not the features of single images: run `{command}`")
        return statistics

    def others(self, data: str) -> str:
        """The end of a sentence that names published statistics of the data set; empty if no statistics are known."""
        return ""

    def backend(self) -> str:
        return f"{self.cache_key}, reference {self.reference.label}"

    def against(self) -> Remark:
        """The real images that the images are compared with."""
        reference, crop = self.reference, self.cache_key.partition(CROP)[2]
        if not reference.cache_key:
            return remark("against", reference=reference.name)
        values: dict[str, Any] = {"reference": reference.name, "count": reference.count}
        values |= {"moments": str(moments)} if (moments := reference.provenance.get("moments")) else {}
        values |= {"files_with": files} if (files := _counts(reference.provenance.get("files_with"))) else {}
        if (reference_crop := reference.cache_key.partition(CROP)[2]) != crop:
            values |= {"crop": crop, "reference_crop": reference_crop}
        return Remark("against", values)

    def features_of(self, outputs: np.ndarray) -> Tensor:
        """The features (N, width) float32 of a scorer's outputs."""
        import torch

        return torch.from_numpy(np.ascontiguousarray(outputs[:, : self.width], np.float32))


class FrechetMetric(ComparedMetric):
    """Fréchet distance (see `frechet`) between the features of generated and of real images."""

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        from specbench.metrics import frechet

        if len(outputs) < 2:
            return (Score.unmeasured(remark("needs_two", statistic="a Fréchet distance"), self.backend()),)
        features, real = self.features_of(outputs[order(outputs, items)]), self._real()
        value = frechet.distance(features.double(), real)
        error = frechet.standard_error(features, real.mean, real.covariance)
        return (Score(value, error, self.backend(), (self.against(), *bias(len(outputs), self.width))),)

    def influences(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray | None:
        from specbench.metrics import frechet

        real = self._real()
        influences = frechet.influences(self.features_of(outputs), real.mean, real.covariance)
        return None if influences is None else influences.numpy()

    def _real(self) -> Moments:
        import torch

        from specbench.metrics import frechet

        mean, covariance = torch.from_numpy(self.reference.mean), torch.from_numpy(self.reference.covariance)
        return frechet.Moments.given(mean, covariance)


def _counts(stated: object) -> list[dict[str, Any]]:
    """The counts of image files in a provenance, see `image_files.counted`; [] if it has others."""
    counts = [c for c in stated if isinstance(c, dict)] if isinstance(stated, list) else []
    known = {"trait": str, "count": int, "images": int}
    right = [c for c in counts if c.keys() == known.keys() and all(type(c[k]) is t for k, t in known.items())]
    return [c for c in right if c["trait"] in image_files.TRAITS]


def order(outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray:
    """A pseudo-random permutation (N,) that depends only on the set of (output, item): rows are sorted by a hash of the
    item's id, then of the output. So the splits of two runs over the same prompts contain the same prompts."""
    keys = [
        (hashlib.sha256(item.id.encode("utf-8", "surrogatepass")).digest(), hashlib.sha256(row.tobytes()).digest())
        for item, row in zip(items, outputs)
    ]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__))
