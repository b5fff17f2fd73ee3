"""Fréchet Inception distance (Heusel et al. 2017, Eq. 6), between two Gaussians of Inception-V3 features.

The value is comparable only between runs with the same number of images, the same reference and the same resize (see
`inception`), all of which the row names.
"""

from __future__ import annotations

from specbench.metrics.compared import FrechetMetric
from specbench.metrics.inception import InceptionFeatures


class FID(InceptionFeatures, FrechetMetric):
    """Options: `resize`, `crop`."""
