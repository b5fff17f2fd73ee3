"""Fréchet distance (see `frechet`) in the embedded classifier's features, to real validation images of *scenes*.

The value is comparable only between runs with the same backend. It is never a "FID" of Inception features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specbench.metrics.base import PromptItem, Score
from specbench.metrics.embedded import EmbeddedMetric, EmbeddedScorer, of_classes, of_scenes
from specbench.rows.shown import too_few

if TYPE_CHECKING:
    from specbench.metrics.scenes_reference import ScenesReference


class ScenesFID(EmbeddedMetric):
    """Scorer outputs: the classifier's features (N, 64) float32."""

    weights = "scenes_classifier.safetensors"
    features = True

    def scorer(self) -> EmbeddedScorer:
        from specbench.models import evaluators as ev

        classifier = ev.load(self.path, ev.Classifier, self.context.device)
        return EmbeddedScorer(self, lambda x, items: classifier.features(x))

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        n, d = outputs.shape
        if few := too_few(n, d):
            return (Score.unmeasured(few, self.cache_key),)
        import torch

        from specbench.metrics import frechet

        reference, single = self._reference(items)
        notes = [f"against {reference.count} real validation images{' of one object' if single else ''}"]
        if strangers := sum(not of_scenes(item) for item in items):
            notes.append(f"{strangers} of {n} prompts are not of scenes, the real images are")
        features = torch.from_numpy(outputs).double()
        value = frechet.distance(features, reference)
        stderr = frechet.standard_error(features, reference.mean, reference.covariance)
        return (Score(value, stderr, reference.backend, "; ".join(notes)),)

    def influences(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray | None:
        import torch

        from specbench.metrics import frechet

        reference, _ = self._reference(items)
        found = frechet.influences(torch.from_numpy(outputs), reference.mean, reference.covariance)
        return None if found is None else found.numpy()

    def _reference(self, items: Sequence[PromptItem]) -> tuple[ScenesReference, bool]:
        """The real images that suit the items, and whether those are the ones with a single object."""
        from specbench.metrics import scenes_reference

        single = all(map(of_classes, items))
        suited = scenes_reference.single_objects if single else scenes_reference.whole_scenes
        backend = self.cache_key + (scenes_reference.SINGLE if single else "")
        return suited(self.context.assets, backend, self.context.device), single
