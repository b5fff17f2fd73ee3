"""Softened acceptance: a token is kept with probability min(1, p / q) ** softness. Softness 1 is the exact rule."""

from specbench.decoding.rules.base import Rule, at, normalise, ratio


class Softened(Rule):
    name = "softened"

    def __init__(self, softness):
        self.softness = softness

    def accept(self, r, q, token, depth):
        return ratio(at(r, token), at(q, token)) ** self.softness

    def residual(self, r, q, token, depth):
        return normalise((r - q).clamp_min(0), r)


def build(cfg, setting):
    return Softened(cfg["softness"])
