"""Statistics of real images of an embedded world, in its classifier's features, for `scenes_fid` and `textures_fid`."""

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

COUNT = 2000  # validation images to render if the statistics are not stored
SINGLE = "/portraits"  # suffix of the backend's name if the real images have one object


class ScenesReference(Moments):
    """Moments of a set of features, on the CPU. backend: the network of the features."""

    def __init__(self, width: int, backend: str) -> None:
        super().__init__(width)
        self.backend = backend

    @classmethod
    def from_images(
        cls, classifier: ev.Classifier, images: np.ndarray, backend: str, batch: int = 256
    ) -> ScenesReference:
        """The moments of images (N, 64, 64, 3) uint8."""
        device = next(classifier.parameters()).device
        statistics = cls(classifier.num_features, backend)
        for i in range(0, len(images), batch):
            x = torch.from_numpy(np.ascontiguousarray(images[i : i + batch])).permute(0, 3, 1, 2).to(device)
            with torch.no_grad():
                statistics.add(classifier.features(ev.as_input(x)).cpu())
        return statistics

    def save(self, path: Path) -> None:
        meta = {"specbench": json.dumps({"backend": self.backend, "count": self.count}, sort_keys=True)}
        with atomic_path(path) as temporary:
            save_file({"total": self.total, "outer": self.outer}, temporary, meta)

    @classmethod
    def load(cls, path: Path) -> ScenesReference:
        with safe_open(path, framework="pt") as f:
            metadata = json.loads(f.metadata()["specbench"])
            total, outer = f.get_tensor("total"), f.get_tensor("outer")
        statistics = cls(len(total), metadata["backend"])
        statistics.count, statistics.total, statistics.outer = metadata["count"], total, outer
        return statistics


def stored_at(classifier: Path) -> Path:
    """The file of the statistics, next to the classifier's."""
    return classifier.with_name(classifier.name.replace("classifier", "reference"))


def whole_world(world: World, weights: Path, backend: str, device: str) -> ScenesReference:
    """The statistics of a world's validation images, by the classifier `weights`: the stored statistics if they belong
    to these weights; otherwise images are rendered now."""
    path = stored_at(weights)
    if path.exists():
        stored = ScenesReference.load(path)
        if stored.backend == backend:
            return stored
    classifier = ev.load(weights, ev.Classifier, device)
    return ScenesReference.from_images(classifier, world.render("validation", range(COUNT))[0], backend)


def single_objects(weights: Path, backend: str, device: str) -> ScenesReference:
    """The same for validation images of scenes with one object. They are rendered once, in seconds, and the statistics
    are then stored under `home`.

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
        pass  # missing or damaged: rendered again
    reference = ScenesReference.from_images(classifier, scenes_classes.portraits("validation", COUNT)[0], backend)
    with suppress(OSError):  # then the images are rendered again next time
        reference.save(path)
    return reference
