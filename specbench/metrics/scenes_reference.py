"""Statistics of real pictures of *scenes* in the embedded classifier's features, which `scenes_fid` compares with."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specbench import home
from specbench.data import scenes, scenes_classes
from specbench.metrics.embedded import as_input
from specbench.models import evaluators as ev

FILE = "scenes_reference.safetensors"  # kept beside the weights
COUNT = 2000  # validation pictures to render where those statistics are not at hand
SINGLE = "/single"  # stands behind a backend's name where the real pictures are those with one object


@dataclass(frozen=True)
class Reference:
    """Sufficient statistics of a set of features: total (d,), outer (d, d) = sum of f f^T, both float64, and count."""

    total: Tensor
    outer: Tensor
    count: int
    backend: str  # whose features they are

    @classmethod
    def of(cls, classifier: ev.Classifier, images: np.ndarray, backend: str, batch: int = 256) -> Reference:
        """Statistics of pictures (N, 64, 64, 3) uint8."""
        device = next(classifier.parameters()).device
        total = torch.zeros(classifier.num_features, dtype=torch.float64, device=device)
        outer = torch.zeros(classifier.num_features, classifier.num_features, dtype=torch.float64, device=device)
        for i in range(0, len(images), batch):
            x = torch.from_numpy(np.ascontiguousarray(images[i : i + batch])).permute(0, 3, 1, 2).to(device)
            with torch.no_grad():
                f = classifier.features(as_input(x)).double()
            total += f.sum(0)
            outer += f.T @ f
        return cls(total.cpu(), outer.cpu(), len(images), backend)

    @property
    def mean(self) -> Tensor:
        return self.total / self.count

    @property
    def covariance(self) -> Tensor:
        """Unbiased, (d, d)."""
        return (self.outer - self.count * torch.outer(self.mean, self.mean)) / (self.count - 1)

    def save(self, path: Path) -> None:
        meta = {"specbench": json.dumps({"backend": self.backend, "count": self.count}, sort_keys=True)}
        partial = path.with_suffix(".tmp")
        save_file({"total": self.total, "outer": self.outer}, partial, meta)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Reference:
        with safe_open(path, framework="pt") as f:
            meta = json.loads(f.metadata()["specbench"])
            return cls(f.get_tensor("total"), f.get_tensor("outer"), meta["count"], meta["backend"])


def whole_scenes(assets: Path, backend: str, device: str) -> Reference:
    """Of validation pictures: the stored statistics where they are of these weights, else of pictures rendered now."""
    path = assets / FILE
    if path.exists():
        stored = Reference.load(path)
        if stored.backend == backend:
            return stored
    classifier = ev.load(assets / ev.CLASSIFIER, ev.Classifier, device)
    return Reference.of(classifier, scenes.render("validation", range(COUNT))[0], backend)


def single_objects(assets: Path, backend: str, device: str) -> Reference:
    """The same of validation pictures with one object: rendered once, which takes seconds, and then kept under `home`.

    backend: ends in `SINGLE`.
    """
    path = home.home() / "references" / f"{backend.replace('/', '-')}.safetensors"
    classifier = ev.load(assets / ev.CLASSIFIER, ev.Classifier, device)
    shape = (classifier.num_features,)
    try:
        stored = Reference.load(path)
        if (stored.backend, stored.count, stored.total.shape) == (backend, COUNT, shape):
            return stored
    except (OSError, SafetensorError, LookupError, TypeError, ValueError):
        pass  # not there, or damaged: rendered anew
    reference = Reference.of(classifier, scenes_classes.pictures("validation", COUNT)[0], backend)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mine = path.with_suffix(f".{os.getpid()}.safetensors")
        reference.save(mine)
        mine.replace(path)
    except OSError:
        pass  # costs the same seconds next time, nothing else
    return reference
