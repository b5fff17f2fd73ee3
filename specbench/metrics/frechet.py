"""Fréchet distance between two sets of features, each seen as a Gaussian (Heusel et al. 2017, Eq. 6).

    d^2 = |mu - mu_r|^2 + Tr(S + S_r - 2 (S S_r)^{1/2})

This part is independent of the network of the features: moments in float64, the distance by torchmetrics, and its
standard error. `rows.shown` says how many images it needs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BLOCK = 4096  # features that are converted to float64 at once


class _Precomputed(nn.Module):
    """Replaces the network in torchmetrics' metric, because the features are already computed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_features = width

    def forward(self, features: Tensor) -> Tensor:
        return features


def distance(features: Tensor, real: Moments) -> float:
    """d^2 between features (N, d) float64, N >= 2, and real features."""
    from torchmetrics.image.fid import FrechetInceptionDistance  # takes seconds to import

    metric = FrechetInceptionDistance(_Precomputed(features.shape[1]), reset_real_features=False).to(features.device)
    metric.real_features_sum = real.total.to(features)
    metric.real_features_cov_sum = real.outer.to(features)
    metric.real_features_num_samples = torch.tensor(real.count, device=features.device)
    metric.update(features, real=False)
    return float(metric.compute())


class Moments:
    """Mean and covariance of features that are added in blocks. It stores their number `count`, their sum `total` (d,)
    and the sum of f f^T, `outer` (d, d), in float64."""

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.count = 0
        self.total = torch.zeros(width, dtype=torch.float64, device=device)
        self.outer = torch.zeros(width, width, dtype=torch.float64, device=device)

    @classmethod
    def of(cls, features: Tensor) -> Moments:
        """The moments of features (N, d) of any float type."""
        moments = cls(features.shape[1], features.device)
        for block in features.split(BLOCK):
            moments.add(block)
        return moments

    @classmethod
    def given(cls, mean: Tensor, covariance: Tensor) -> Moments:
        """Moments with this mean (d,) and covariance (d, d), both float64. Their count is 2: the distance does not
        depend on it."""
        moments = cls(len(mean), mean.device)
        moments.count = 2
        moments.total, moments.outer = 2 * mean, covariance + 2 * torch.outer(mean, mean)
        return moments

    def add(self, features: Tensor) -> None:
        """Adds features (B, d) of any float type."""
        wide = features.double()
        self.count += len(wide)
        self.total += wide.sum(0)
        self.outer += wide.T @ wide

    @property
    def mean(self) -> Tensor:
        """(d,) float64."""
        return self.total / self.count

    @property
    def covariance(self) -> Tensor:
        """(d, d) float64, unbiased; needs at least two features."""
        return (self.outer - self.count * torch.outer(self.mean, self.mean)) / (self.count - 1)


def influences(features: Tensor, mean: Tensor, covariance: Tensor) -> Tensor | None:
    """The influence on the distance of each image, (N,) float64, from its features (N, d) of any float type. The
    reference's mean (d,) and covariance (d, d) are fixed.

    To first order, image i changes the distance by 1/N of its influence

        I_i = 2 (mu - mu_r) . x_i + x_i^T (1 - A) x_i - Tr((1 - A) S),   x_i = f_i - mu,

    where A = S_r^{1/2} (S_r^{1/2} S S_r^{1/2})^{-1/2} S_r^{1/2} is the optimal map from N(0, S) to N(0, S_r). This
    needs a well-conditioned S: None for fewer than 2 d images.
    """
    n, d = features.shape
    if n < 2 * d:
        return None
    moments = Moments.of(features)
    mu, generated = moments.mean, moments.covariance

    def power(matrix: Tensor, exponent: float) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        floor = values.max() * 1e-12  # a direction without variance has no influence
        return (vectors * torch.where(values > floor, values.clamp(min=floor) ** exponent, 0.0)) @ vectors.T

    root = power(covariance.to(generated), 0.5)
    pull = torch.eye(d).to(generated) - root @ power(root @ generated @ root, -0.5) @ root
    linear, quadratic = [], []
    for block in features.split(BLOCK):
        x = block.double() - mu
        linear.append(2 * x @ (mu - mean.to(mu)))
        quadratic.append(((x @ pull) * x).sum(1))
    return torch.cat(linear) + torch.cat(quadratic) - torch.cat(quadratic).mean()


def standard_error(features: Tensor, mean: Tensor, covariance: Tensor) -> float | None:
    """Standard error of the distance over the images, by their `influences` (delta method).

    Unlike a bootstrap, this needs no random numbers and does not depend on the order. It is up to a quarter too large
    for 2 d to 4 d images, and up to a tenth above that (on synthetic features, compared with the spread over new
    draws).
    """
    values = influences(features, mean, covariance)
    return None if values is None else float(values.square().sum().sqrt() / len(values))
