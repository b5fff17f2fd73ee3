"""Fréchet distance between two sets of features, each seen as a Gaussian (Heusel et al. 2017, Eq. 6).

    d^2 = |mu - mu_r|^2 + Tr(S + S_r - 2 (S S_r)^{1/2})

This part is independent of the network of the features: moments in float64, the distance by torchmetrics, and its
standard error. The distance is biased upwards for few images, see `rows.shown.bias`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

BLOCK = 4096  # features that are converted to float64 at once
#: Of the trapezoidal rule in log t: how far it reaches from the largest eigenvalue, and its step. Together they cost
#: less than 1e-11 of the largest root.
REACH, STEP = 60.0, 0.7


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
    """The influence on the distance of each image, (N,) float64 with mean zero, from its features (N, d) of any float
    type. The reference's mean (d,) and covariance (d, d) are fixed. None for fewer than three images.

    They are the jackknife's: N - 1 times the mean distance without one image minus the distance without image i. So
    sqrt(sum I_i^2 / (N (N - 1))) is the jackknife's standard error, which is too large rather than too small for few
    images (Efron and Stein 1981).

    The distance without each image needs one decomposition. With x_i = f_i - mu,

        (N - 2) S_i = (N - 1) S - N / (N - 1) x_i x_i^T,

    so the eigenvalues of S_r^{1/2} S_i S_r^{1/2} are those of a diagonal matrix D minus a matrix of rank one, z z^T.
    The sum of their roots follows from the determinant lemma and sqrt(a) = 1/(2 pi) int log(1 + a / t) t^{-1/2} dt:

        Tr (D - z z^T)^{1/2} - Tr D^{1/2} = 1/(2 pi) int log(1 - z^T (D + t)^{-1} z) t^{-1/2} dt.

    The trapezoidal rule in log t converges exponentially.
    """
    n = len(features)
    if n < 3:
        return None
    x = features.double()
    shift = x.mean(0) - mean.to(x)
    x = x - x.mean(0)
    values, vectors = torch.linalg.eigh(covariance.to(x))
    y = x @ (vectors * values.clamp(min=0).sqrt())
    of_images = n <= y.shape[1]  # which of the two products with the same eigenvalues is smaller
    values, vectors = torch.linalg.eigh((y @ y.T if of_images else y.T @ y) / (n - 1))
    kept = values > values.max() * 1e-12
    values, vectors = values[kept], vectors[:, kept]
    parts = vectors.square() if of_images else (y @ vectors).square() / ((n - 1) * values)  # z^2 N / ((N - 1) D)
    parts = parts * n / (n - 1)
    roots = _root_changes(values, parts) if len(values) else torch.zeros_like(x[:, 0])
    squares = x.square().sum(1)
    without = -2 * x @ shift / (n - 1) + squares / (n - 1) ** 2 - n * squares / ((n - 1) * (n - 2))
    without -= 2 * math.sqrt((n - 1) / (n - 2)) * roots
    return (n - 1) * (without.mean() - without)


def _root_changes(values: Tensor, parts: Tensor) -> Tensor:
    """Tr (D - z z^T)^{1/2} - Tr D^{1/2} for N vectors z: (N,), from D's positive values (k,) and z^2 / D, `parts`
    (N, k), whose sums are at most 1."""
    middle = math.log(float(values.max()))
    t = torch.arange(middle - REACH, middle + REACH, STEP, dtype=values.dtype, device=values.device).exp()
    shares = values[:, None] / (values[:, None] + t)
    removed = parts @ shares
    # 1 - removed, without cancellation if almost everything is removed
    left = (1 - parts.sum(1, keepdim=True)).clamp(min=0) + parts @ (t / (values[:, None] + t))
    logarithms = torch.where(removed < 0.5, torch.log1p(-removed), left.clamp(min=1e-300).log())
    return (logarithms * t.sqrt()).sum(1) * STEP / (2 * math.pi)


def standard_error(features: Tensor, mean: Tensor, covariance: Tensor) -> float | None:
    """The jackknife's standard error of the distance over the images (see `influences`). It needs no random numbers
    and does not depend on the order."""
    values = influences(features, mean, covariance)
    return None if values is None else float(values.std()) / math.sqrt(len(values))
