"""Statistics of real images of an embedded world in its classifier's features, which `scenes_fid` and `textures_fid`
compare with."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specbench.data import scenes_classes
from specbench.data.worlds import World
from specbench.metrics.frechet import Moments
from specbench.models import evaluators as ev
from specbench.storage import home
from specbench.storage.files import atomic_path

COUNT = 2000  # validation images to render where those statistics are not at hand
SINGLE = "/portraits"  # stands behind a backend's name where the real images are those with one object


class ScenesReference(Moments):
    """Moments of a set of features, on the CPU; backend: whose features they are."""

    def __init__(self, width: int, backend: str) -> None:
        super().__init__(width)
        self.backend = backend

    @classmethod
    def from_images(
        cls, classifier: ev.Classifier, images: np.ndarray, backend: str, batch: int = 256
    ) -> ScenesReference:
        """Of images (N, 64, 64, 3) uint8."""
        device = next(classifier.parameters()).device
        found = cls(classifier.num_features, backend)
        for i in range(0, len(images), batch):
            x = torch.from_numpy(np.ascontiguousarray(images[i : i + batch])).permute(0, 3, 1, 2).to(device)
            with torch.no_grad():
                found.add(classifier.features(ev.as_input(x)).cpu())
        return found

    def save(self, path: Path) -> None:
        meta = {"specbench": json.dumps({"backend": self.backend, "count": self.count}, sort_keys=True)}
        with atomic_path(path) as temporary:
            save_file({"total": self.total, "outer": self.outer}, temporary, meta)

    @classmethod
    def load(cls, path: Path) -> ScenesReference:
        with safe_open(path, framework="pt") as f:
            meta = json.loads(f.metadata()["specbench"])
            total, outer = f.get_tensor("total"), f.get_tensor("outer")
        found = cls(len(total), meta["backend"])
        found.count, found.total, found.outer = meta["count"], total, outer
        return found


def stored_at(classifier: Path) -> Path:
    """The file of the statistics, next to the classifier's."""
    return classifier.with_name(classifier.name.replace("classifier", "reference"))


def whole_world(world: World, weights: Path, backend: str, device: str) -> ScenesReference:
    """Of a world's validation images, by the classifier `weights`: the stored statistics where they are of these
    weights, else of images rendered now."""
    path = stored_at(weights)
    if path.exists():
        stored = ScenesReference.load(path)
        if stored.backend == backend:
            return stored
    classifier = ev.load(weights, ev.Classifier, device)
    return ScenesReference.from_images(classifier, world.render("validation", range(COUNT))[0], backend)


def single_objects(weights: Path, backend: str, device: str) -> ScenesReference:
    """The same of validation images of scenes with one object: rendered once, which takes seconds, and then kept under
    `home`.

    backend: ends in `SINGLE`.
    """
    path = home.home() / "references" / f"{backend.replace('/', '-')}.safetensors"
    classifier = ev.load(weights, ev.Classifier, device)
    shape = (classifier.num_features,)
    try:
        stored = ScenesReference.load(path)
        if (stored.backend, stored.count, stored.total.shape) == (backend, COUNT, shape):
            return stored
    except (OSError, SafetensorError, LookupError, TypeError, ValueError):
        pass  # not there, or damaged: rendered again
    reference = ScenesReference.from_images(classifier, scenes_classes.portraits("validation", COUNT)[0], backend)
    with suppress(OSError):  # costs the same seconds next time, nothing else
        reference.save(path)
    return reference
