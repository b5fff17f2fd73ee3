"""Inception Score (Salimans et al. 2016): exp of the mean KL divergence between the class distribution of
an image and the mean one.

The mean over ten splits, as is the convention, by torch-fidelity's function on the logits without bias. It uses no
real images and grows with the number of images in a split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from specbench.metrics.base import PromptItem, Score
from specbench.metrics.compared import order
from specbench.metrics.inception import CLASSES, FEATURES, InceptionMetric


class InceptionScore(InceptionMetric):
    """Options: `splits`. The splits are drawn by the items' ids (see `order`): the order of the images does not
    matter. The standard error is that of a mean over the splits."""

    counts = {"splits": 10}  # noqa: RUF012 (a ClassVar of the base)

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        import torch
        from torch_fidelity.metric_isc import KEY_METRIC_ISC_MEAN, KEY_METRIC_ISC_STD, isc_features_to_metric

        n, splits = len(outputs), self.options["splits"]
        backend = f"{self.cache_key}, {splits} splits"
        if n < splits:
            return (Score.unmeasured(f"an Inception Score in {splits} splits needs as many images", backend),)
        logits = torch.from_numpy(outputs[order(outputs, items)][:, FEATURES:])
        found = isc_features_to_metric(logits, splits, shuffle=False)
        # torch-fidelity divides the squares by the number of splits, an estimate by one less
        stderr = found[KEY_METRIC_ISC_STD] / math.sqrt(splits - 1) if splits > 1 else None
        note = ""
        if n < splits * CLASSES:
            note = (
                f"n = {n} in {splits} splits for {CLASSES} classes: biased downwards, compare only runs of the same n"
            )
        return (Score(found[KEY_METRIC_ISC_MEAN], stderr, backend, note),)
