"""Fréchet distance between two sets of pictures, each seen as a Gaussian of features (Heusel et al. 2017, Eq. 6).

    d^2 = |mu - mu_r|^2 + Tr(S + S_r - 2 (S S_r)^{1/2})

torchmetrics accumulates and computes it in float64; the features are those of the embedded classifier, so the value is
comparable only between runs with the same backend. It is never a "FID" of Inception features.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from specbench import home
from specbench.data import scenes, scenes_classes
from specbench.metrics.base import Item, Score
from specbench.metrics.embedded import EmbeddedMetric, as_input, of_classes, of_scenes
from specbench.models import evaluators as ev

if TYPE_CHECKING:
    from torchmetrics.image.fid import FrechetInceptionDistance

REFERENCE = "scenes_reference.safetensors"  # statistics of the real pictures, kept beside the weights
REFERENCE_COUNT = 2000  # validation pictures to render where those statistics are not at hand
SINGLE = "/single"  # stands behind a backend's name where the real pictures are those with one object


class Features(nn.Module):
    """uint8 pictures (B, 3, 64, 64) -> features (B, d) float64, the form torchmetrics asks for."""

    def __init__(self, classifier: ev.Classifier) -> None:
        super().__init__()
        self.classifier = classifier
        self.num_features = classifier.num_features

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.classifier.features(as_input(x)).double()


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
        features = Features(classifier)
        total = torch.zeros(classifier.num_features, dtype=torch.float64, device=device)
        outer = torch.zeros(classifier.num_features, classifier.num_features, dtype=torch.float64, device=device)
        for i in range(0, len(images), batch):
            f = features(torch.from_numpy(np.ascontiguousarray(images[i : i + batch])).permute(0, 3, 1, 2).to(device))
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


def with_reference(features: nn.Module, reference: Reference, device: torch.device) -> FrechetInceptionDistance:
    """torchmetrics' metric over `features`, its real side filled from `reference` and kept over resets."""
    from torchmetrics.image.fid import FrechetInceptionDistance  # takes seconds to import

    metric = FrechetInceptionDistance(features, reset_real_features=False).to(device)
    metric.real_features_sum = reference.total.to(device)
    metric.real_features_cov_sum = reference.outer.to(device)
    metric.real_features_num_samples = torch.tensor(reference.count, device=device)
    return metric


def standard_error(features: Tensor, reference: Reference) -> float | None:
    """Standard error (delta method) of the distance over the pictures with these features (N, d), reference held fixed.

    To first order, picture i moves the distance by 1/N of its influence

        I_i = 2 (mu - mu_r) . x_i + x_i^T (1 - A) x_i - Tr((1 - A) S),   x_i = f_i - mu,

    where A = S_r^{1/2} (S_r^{1/2} S S_r^{1/2})^{-1/2} S_r^{1/2} is the optimal map from N(0, S) to N(0, S_r). Unlike a
    bootstrap this needs no random numbers and knows no order. It asks for a well-conditioned S: None below 4 d
    pictures.
    """
    n, d = features.shape
    if n < 4 * d:
        return None
    mean, x = features.mean(0), features - features.mean(0)
    covariance = x.T @ x / (n - 1)

    def power(matrix: Tensor, exponent: float) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        floor = values.max() * 1e-12  # a direction without any variance has no influence either
        return (vectors * torch.where(values > floor, values.clamp(min=floor) ** exponent, 0.0)) @ vectors.T

    root = power(reference.covariance.to(features), 0.5)
    pull = torch.eye(d).to(features) - root @ power(root @ covariance @ root, -0.5) @ root
    quadratic = ((x @ pull) * x).sum(1)
    influence = 2 * x @ (mean - reference.mean.to(features)) + quadratic - quadratic.mean()
    return float(influence.square().sum().sqrt() / n)


class FrechetDistance(EmbeddedMetric):
    """Fréchet distance of classifier features to those of real validation pictures of *scenes*."""

    weights = ev.CLASSIFIER

    def judge(self, images: np.ndarray, items: Sequence[Item]) -> Score:
        backend = self.backend
        if len(images) < 2:
            return Score.unmeasured("a Fréchet distance needs at least two pictures", backend)
        classifier = ev.load(self.path, ev.Classifier, self.device)
        if all(map(of_classes, items)):
            backend += SINGLE
            reference, shown = self.single_objects(classifier, backend), " of one object"
        else:
            reference, shown = self.reference(classifier, backend), ""
        kept: list[Tensor] = []
        features = Features(classifier)
        features.register_forward_hook(lambda _module, _inputs, output: kept.append(output))
        metric = with_reference(features, reference, torch.device(self.device))
        for _, x in self.batches(images):
            metric.update(x, real=False)
        notes = [f"against {reference.count} real validation pictures{shown}"]
        d = classifier.num_features
        if len(images) < 16 * d:  # an estimated covariance is biased as 1 / n
            far = "far " if len(images) <= d else ""
            notes.append(f"n = {len(images)} for {d} features: biased {far}upwards, compare only runs of the same n")
        if strangers := sum(not of_scenes(item) for item in items):
            notes.append(f"{strangers} of {len(items)} prompts are not of scenes, the real pictures are")
        return Score(float(metric.compute()), standard_error(torch.cat(kept), reference), backend, "; ".join(notes))

    def reference(self, classifier: ev.Classifier, backend: str) -> Reference:
        """The stored statistics where they are of these weights, else those of pictures rendered now."""
        path = self.assets / REFERENCE
        if path.exists():
            stored = Reference.load(path)
            if stored.backend == backend:
                return stored
        return Reference.of(classifier, scenes.render("validation", range(REFERENCE_COUNT))[0], backend)

    def single_objects(self, classifier: ev.Classifier, backend: str) -> Reference:
        """The same of validation pictures with one object: rendered once, which takes seconds, and then kept under
        `home`."""
        path = home.home() / "references" / f"{backend.replace('/', '-')}.safetensors"
        shape = (classifier.num_features,)
        try:
            stored = Reference.load(path)
            if (stored.backend, stored.count, stored.total.shape) == (backend, REFERENCE_COUNT, shape):
                return stored
        except (OSError, SafetensorError, LookupError, TypeError, ValueError):
            pass  # not there, or damaged: rendered anew
        reference = Reference.of(classifier, scenes_classes.pictures("validation", REFERENCE_COUNT)[0], backend)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            mine = path.with_suffix(f".{os.getpid()}.safetensors")
            reference.save(mine)
            mine.replace(path)
        except OSError:
            pass  # costs the same seconds next time, nothing else
        return reference
