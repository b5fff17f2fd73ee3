"""Continuous speculative decoding (Wang et al. 2024, arXiv 2411.11925): continuous tokens, distributions as densities.

A target such as MAR fills an image token by token in its own order of generation, and a diffusion head draws each
token: from x_T, normal, through x_{t-1} ~ N(mean_t(x_t), var_t(x_t)), to x_0. A smaller model drafts `gamma` tokens,
and the target verifies them in one pass; vanilla decoding is the same loop with gamma = 0.

- rule.py: how drafts are made and verified, and the protocols of the models.
- trajectory.py: trajectories of the diffusion head, their noise and their densities.
- verify.py: the two models' densities of a drafted token compared, and the residual distribution.
- decide.py: drafts and which of their tokens are accepted: one by one, as a block, or the first of several drafts.
- loop.py: the decoding of images, pass by pass, and its trace.
"""

from specbench.decoding.continuous.loop import ContinuousDecoding, ContinuousTrace, decode
from specbench.decoding.continuous.rule import ContinuousModel, ContinuousRule, ContinuousSession

__all__ = ["ContinuousDecoding", "ContinuousModel", "ContinuousRule", "ContinuousSession", "ContinuousTrace", "decode"]
