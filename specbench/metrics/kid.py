"""Kernel Inception distance (Bińkowski et al. 2018): the unbiased squared maximum mean discrepancy of Inception-V3
features of images x and real images y under the kernel k(a, b) = (a . b / 2048 + 1)^3.

The mean over 100 random subsets of 1000 images a side, as is the convention, by torch-fidelity's function; of all of
them where there are fewer. It may be below zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbench.metrics.base import PromptItem, Score
from specbench.metrics.compared import order
from specbench.metrics.inception import InceptionFeatures

SEED = 2020  # of the subsets; torch-fidelity's own default
MOST = 10_000  # images from which the standard error is estimated


class KID(InceptionFeatures):
    """Options: `subsets`, `subset_size`."""

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
            return (Score.unmeasured("a kernel distance needs at least two images a side", self.backend()),)
        found = self.features_of(outputs[order(outputs, items)])
        result = kid_features_to_metric(
            found, torch.from_numpy(real), kid_subsets=subsets, kid_subset_size=size, rng_seed=SEED, verbose=False
        )
        drawn = result[KEY_METRIC_KID_STD] ** 2 / subsets if size < max(n, m) else 0.0
        stderr = (float(influences(found.numpy()[:MOST], real).var(ddof=1)) / n + drawn) ** 0.5
        note = f"{self.against()}, {subsets} subsets of {size}"
        return (Score(result[KEY_METRIC_KID_MEAN], stderr, self.backend(), note),)

    def influences(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray | None:
        real = self.reference.features
        assert real is not None
        return influences(self.features_of(outputs).numpy(), real) if 2 <= len(outputs) <= MOST else None


def influences(found: np.ndarray, real: np.ndarray) -> np.ndarray:
    """How each of the images with features `found` (N, d) moves the squared discrepancy to real ones (M, d), which
    are held fixed: (N,) float64 of mean zero.

    To first order image i moves it by 2 / N times its witness, less the mean of all:

        h(x_i) = mean_{j != i} k(x_i, x_j) - mean_j k(x_i, y_j)
    """
    from torch_fidelity.metric_kid import kernel_poly

    found, real = found.astype(np.float64), real.astype(np.float64)
    n, witness = len(found), []
    for start in range(0, n, 1000):
        block = found[start : start + 1000]
        itself = ((block * block).sum(1) / found.shape[1] + 1) ** 3
        among = (kernel_poly(block, found).sum(1) - itself) / (n - 1)
        witness.append(among - kernel_poly(block, real).mean(1))
    h = np.concatenate(witness)
    moved: np.ndarray = 2 * (h - h.mean())
    return moved
