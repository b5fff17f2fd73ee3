"""Acceptance rules: pure functions of tensors, one module per family."""

from specbench.decoding.rules.band import Band, Mentored
from specbench.decoding.rules.base import Neighbours, Relaxation, Rule, RuleContext, Threshold, at, normalise, ratio
from specbench.decoding.rules.relaxed import Relaxed, cool, cool_schedule, exact, uniform

__all__ = [
    "Band",
    "Mentored",
    "Neighbours",
    "Relaxation",
    "Relaxed",
    "Rule",
    "RuleContext",
    "Threshold",
    "at",
    "cool",
    "cool_schedule",
    "exact",
    "normalise",
    "ratio",
    "uniform",
]
