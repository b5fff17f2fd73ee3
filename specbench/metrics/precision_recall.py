"""Improved precision and recall (Kynkäänniemi et al. 2019, Eqs. 1 and 2) on Inception-V3 features.

A set of images covers the balls around its members that reach to their k-th neighbour in the set, k = 3. Precision is
the share of the generated images inside what the real ones cover, recall the share of the real ones inside what the
generated ones cover. By torch-fidelity's function. The paper's features are VGG-16's; these are ADM's choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from specbench.metrics.base import PromptItem, Score
from specbench.metrics.compared import order
from specbench.metrics.inception import InceptionFeatures


class PrecisionRecall(InceptionFeatures):
    """Options: `neighbours`. Precision's standard error is a share's, the real images held fixed; recall has none,
    since every generated image changes the others' balls."""

    counts = {"neighbours": 3}  # noqa: RUF012 (a ClassVar of the base)
    needs_features = True

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        import torch
        from torch_fidelity.metric_prc import KEY_METRIC_PRECISION, KEY_METRIC_RECALL, prc_features_to_metric

        real = self.reference.features
        assert real is not None
        n, m, k = len(outputs), len(real), self.options["neighbours"]
        if min(n, m) <= k:
            none = Score.unmeasured(f"precision and recall need more than {k} images a side", self.backend())
            return none, none
        found = prc_features_to_metric(
            self.features_of(outputs[order(outputs, items)]),
            torch.from_numpy(real),
            prc_neighborhood=k,
            prc_batch_size=1000,
            save_cpu_ram=True,  # distances a block at a time
            verbose=False,
        )
        precision, recall = found[KEY_METRIC_PRECISION], found[KEY_METRIC_RECALL]
        note = f"{self.against()}, {n} images to {m}"
        if n != m:
            note += ": both shares depend on the two numbers, compare only runs with the same"
        stderr = math.sqrt(precision * (1 - precision) / n) if 0 < precision < 1 else None  # 0 would mean certainty
        return Score(precision, stderr, self.backend(), note), Score(recall, None, self.backend(), note)
