"""The ratio test of Lumina-mGPT 2's Jacobi mode: after a rejection the target samples as if there were no draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from specbench.decoding.rules.base import Relaxation, Rule, Setting, at, normalise, ratio
from specbench.decoding.sampling import within_sigma
from specbench.decoding.shape import DraftShape
from specbench.errors import check_choice

RESAMPLE = ("target", "vanilla")


class Redraw(Rule):
    """Accept x with min(1, r(x) / q(x)), as the exact rule does.

    `resample="target"` continues from r. The code means Norm[r - min(q, 0.99)]_+, but takes r wherever that mass is
    below 1 before it is normalised, so in effect always. What it samples from passes the sampler's filters once more:
    top-k changes nothing then, but the filter `top_n_sigma` does, of log r. "vanilla" continues from Norm[r - q]_+ and
    is exact (SimpleAR).
    """

    name = "redraw"
    residual_by_token = False

    def __init__(self, resample: str = "target", top_n_sigma: float | None = None) -> None:
        check_choice("resample", resample, RESAMPLE, self.name)
        self.resample, self.top_n_sigma = resample, top_n_sigma

    def relaxation(self) -> Relaxation | None:
        filtered = self.resample == "target" and self.top_n_sigma is not None
        return None if filtered else Relaxation(self.resample)

    def accept(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        return ratio(at(r, token), at(q, token))

    def acceptance(self, r: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """As of `Rule`."""
        return ratio(r, q)

    def residual(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        if self.resample == "vanilla":
            return normalise((r - q).clamp_min(0), r)
        return r if self.top_n_sigma is None else within_sigma(r.log(), self.top_n_sigma).softmax(-1)


def check(cfg: Mapping[str, Any], shape: DraftShape) -> None:
    """Raises UsageError for a value that the rule does not have."""
    check_choice("resample", cfg["resample"], RESAMPLE, Redraw.name)


def build(cfg: Mapping[str, Any], setting: Setting) -> Rule:
    return Redraw(cfg["resample"], cfg.get("top_n_sigma"))
