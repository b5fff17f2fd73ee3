"""The window of speculative Jacobi decoding: SJD (Teng et al. 2024, arXiv 2410.01699), SCD (arXiv 2510.24211) and SJD++
(arXiv 2512.07503). Tokens of the last step are kept where a coupling of its distribution and the new one allows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.decoding.drafters.window import GUMBEL, KEEP, TOKEN, Renewed, Window, WindowState
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules.base import at, normalise, ratio
from specbench.decoding.sampling import draw
from specbench.engine.ops import take

COUPLINGS = ("none", "maximal", "gumbel", "height", "threshold")


@dataclass(eq=False)
class SJDWindow(Window):
    """A `Window` whose positions keep tokens of the last step. coupling, tau: see `coupled`.

    stored: the distribution of a token that maximal coupling keeps: this step's ("new"), or the one that it was drawn
        from ("old", as in SCD's code), which is not exact.
    """

    coupling: str = "none"
    tau: float = 0.5
    stored: str = "new"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keeps_old = self.stored == "old" and self.coupling == "maximal"
        carries_over = self.refine or self.coupling in ("gumbel", "height")
        biased = self.keeps_old or self.coupling == "threshold"
        self.shape = replace(self.shape, carries_over=carries_over, biased=biased)

    def _noise(self, state: WindowState, num_committed: Tensor) -> Tensor | None:
        if self.coupling != "gumbel":
            return None
        return gumbel_noise(state.rng, num_committed[:, None] + self.ahead, state.probs.shape[-1])

    def _redraw(
        self, state: WindowState, known: Tensor, p: Tensor, previous: Tensor, step: Tensor, noise: Tensor | None
    ) -> Renewed:
        if noise is not None:
            return Renewed(known, (p / noise).argmax(-1), p)
        if self.coupling == "none":
            return super()._redraw(state, known, p, previous, step, noise)
        height = p.shape[1]

        def numbers(tag: int) -> Tensor:
            return state.rng.uniform(step, tag, height)

        before = (previous + 1).clamp_max(height - 1)
        previous_tokens = WindowTokens(
            token=state.tokens.gather(1, before),
            q=take(state.probs, before),
            height=state.heights.gather(1, before) if self.coupling == "height" else state.heights,
            exists=self.ahead < (known - 1)[:, None],  # the last known position has a distribution, but no token yet
        )
        token, keep = coupled(self.coupling, p, previous_tokens, self.tau, numbers)
        if self.coupling == "height":
            state.heights.copy_(next_heights(token, p, previous_tokens, keep, numbers(KEEP)))
        return Renewed(known, token, torch.where(keep.unsqueeze(-1), previous_tokens.q, p) if self.keeps_old else p)

    def _heights(self, state: WindowState) -> Tensor | None:
        if self.coupling != "height":
            return None
        return F.pad(torch.where(self.choice == 0, state.heights[:, self.offsets], -1.0), (1, 0), value=-1.0)


@dataclass
class WindowTokens:
    """The contents of a window at positions (B, H): a token drawn from q (B, H, V), its height, and whether there is
    one, `exists` (B, H) bool."""

    token: Tensor
    q: Tensor
    height: Tensor
    exists: Tensor


def coupled(
    coupling: str, p: Tensor, window: WindowTokens, tau: float, numbers: Callable[[int], Tensor]
) -> tuple[Tensor, Tensor]:
    """Tokens (B, H) for the distributions p (B, H, V) that now replace q, and which of them (B, H) bool are the
    window's previous tokens. `numbers`: uniforms (B, H) of a tag. (Without coupling, "none", a token is drawn again, as
    in SJD. With "gumbel" it is the arg max of log p + G, with one noise G per position for all steps.)

    "maximal" keeps the token with min(1, p / q), and otherwise draws from Norm([p - q]_+) (SJD-PAC's adaptive
    continuation).

    "height" does this without a new random number per step. A position holds a point (y, g) that is uniform under the
    graph of its distribution, 0 <= g < q(y), and keeps it while g < p(y); else y is drawn from Norm([p - q]_+), and g
    from [q(y), p(y)). Verification is the same test, with the same g. So a token survives all steps with min_j p_j(y) /
    p_0(y), the most that any coupling can give.

    "threshold" keeps the token if p / q > tau, and otherwise draws from p (SJD++, arXiv 2512.07503; tau = 0.5 in
    boyaliao/PJD@e7b93ad3 and Haodong-Lei-Ray/PathSpec@8a3df48). This is not exact: a kept token was not drawn from p,
    the distribution that is recorded for it from then on.
    """
    p_token, q_token = at(p, window.token), at(window.q, window.token)
    if coupling == "threshold":
        keep, source = window.exists & (p_token / q_token > tau), p
    else:
        u = window.height if coupling == "height" else numbers(KEEP)
        keep = window.exists & (u < ratio(p_token, q_token))
        source = torch.where(window.exists.unsqueeze(-1), normalise((p - window.q).clamp_min(0), p), p)
    return torch.where(keep, window.token, draw(source, numbers(TOKEN))), keep


def gumbel_noise(rng: RandomStreams, position: Tensor, size: int) -> Tensor:
    """The exponential noise (B, H, V) of image positions (B, H). The token with the smallest e_i / p_i has distribution
    p, at every step that visits the position."""
    index = position.unsqueeze(-1) * size + torch.arange(size, device=position.device)
    noise = rng.exponential_at(torch.zeros_like(position[:, 0]), GUMBEL, index.flatten(1))
    return noise.view(*position.shape, size)


def next_heights(token: Tensor, p: Tensor, window: WindowTokens, keep: Tensor, fresh: Tensor) -> Tensor:
    """The heights (B, H) of the tokens that `coupled` returned. fresh (B, H): uniforms."""
    share = at(window.q, token) / at(p, token)
    return torch.where(window.exists, renewed_heights(keep, window.height, fresh, share), fresh)


def renewed_heights(keep: Tensor, u: Tensor, fresh: Tensor, share: Tensor) -> Tensor:
    """Heights of tokens y after a step from distribution q to p, as shares of p(y). Kept tokens (`keep`, bool) have the
    height u q(y); new ones a height from [q(y), p(y)), by a uniform number `fresh`. share: q(y) / p(y). All (B, H)."""
    return torch.where(keep, u * share, share + fresh * (1 - share))
