"""Fréchet Inception distance (Heusel et al. 2017, Eq. 6), between two Gaussians of Inception-V3 features.

    d^2 = |mu - mu_r|^2 + Tr(S + S_r - 2 (S S_r)^{1/2})

Moments in float64, torch-fidelity's function over them. The value is comparable only between runs with the same number
of images, the same reference and the same resize (see `inception`), all of which the row names.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbench.metrics.base import PromptItem, Score
from specbench.metrics.inception import FEATURES, ComparedMetric, features, order
from specbench.rows import sample_size


class FID(ComparedMetric):
    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        import torch
        from torch_fidelity.metric_fid import KEY_METRIC_FID, fid_statistics_to_metric

        from specbench.metrics import frechet

        if few := sample_size.too_few(len(outputs), FEATURES):
            return (Score.unmeasured(few, self.backend()),)
        reference = self.reference
        found = features(outputs[order(outputs, items)])
        moments = frechet.Moments.of(found)
        value = fid_statistics_to_metric(
            {"mu": moments.mean.numpy(), "sigma": moments.covariance.numpy()},
            {"mu": reference.mean, "sigma": reference.covariance},
            verbose=False,
        )[KEY_METRIC_FID]
        mean, covariance = torch.from_numpy(reference.mean), torch.from_numpy(reference.covariance)
        return (Score(value, frechet.standard_error(found, mean, covariance), self.backend(), self.against()),)

    def influences(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray | None:
        import torch

        from specbench.metrics import frechet

        real = torch.from_numpy(self.reference.mean), torch.from_numpy(self.reference.covariance)
        found = frechet.influences(features(outputs), *real)
        return None if found is None else found.numpy()
