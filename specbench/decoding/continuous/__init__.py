"""Continuous speculative decoding (Wang et al. 2024, arXiv 2411.11925): the tokens are continuous, and distributions
are densities.

A target fills an image token by token in a random order, and a diffusion head draws each token: from x_T, normal,
through x_{t-1} ~ N(mean_t(x_t), var_t(x_t)), to x_0. A smaller model drafts `gamma` tokens, and the target verifies
them in one pass. Vanilla decoding is the same loop with gamma = 0.

- sessions.py: the interface of models, and the order of generation.
- rule.py: how drafts are made and verified.
- trajectory.py: trajectories of the diffusion head, their noise and their densities.
- verify.py: compares the two models' densities of a drafted token; the residual distribution.
- decide.py: drafts, and which of their tokens are accepted: one by one, as a block, or the first of several drafts.
- loop.py: the decoding of images, pass by pass, and its trace.
"""

from specbench.decoding.continuous.loop import ContinuousDecoding, ContinuousTrace, decode
from specbench.decoding.continuous.rule import ContinuousRule, NoiseParameters
from specbench.decoding.continuous.sessions import Conditions, ContinuousModel, ContinuousSession, GenerationOrder

__all__ = [
    "Conditions",
    "ContinuousDecoding",
    "ContinuousModel",
    "ContinuousRule",
    "ContinuousSession",
    "ContinuousTrace",
    "GenerationOrder",
    "NoiseParameters",
    "decode",
]
