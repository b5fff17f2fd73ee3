"""Contrast of an image: the standard deviation of its grey levels, from 0 to 0.5."""

import numpy as np

from specbench.metrics.base import MeanMetric, Scorer, chosen


class GreyDeviation(Scorer):
    def __call__(self, images, items):
        return np.array([[image.mean(-1).std() / 255] for image in images])


class Contrast(MeanMetric):
    def __init__(self, context, options):
        super().__init__(context, chosen(type(self), options, {}))

    @property
    def cache_key(self):
        return "standard deviation of grey levels"

    def scorer(self):
        return GreyDeviation()
