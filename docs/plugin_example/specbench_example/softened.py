"""Softened acceptance: a token is kept with probability min(1, p / q) ** softness. Softness 1 is the exact rule."""

from dataclasses import dataclass

from specbench.decoding.rules.base import Rule, at, normalise, ratio


class Softened(Rule):
    name = "softened"

    def __init__(self, softness):
        self.softness = softness

    def accept(self, r, q, token, depth):
        return ratio(at(r, token), at(q, token)) ** self.softness

    def residual(self, r, q, token, depth):
        return normalise((r - q).clamp_min(0), r)


@dataclass(frozen=True)
class Choice:
    """The parameters of softened.yaml."""

    softness: float

    def build(self, context):
        return Softened(self.softness)
