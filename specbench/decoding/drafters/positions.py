"""The positions of a Jacobi window: how their tokens are drafted again, and how new ones begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.decoding.rng import TAGS, RandomStreams, exponential
from specbench.decoding.rules.base import at, normalise, ratio
from specbench.decoding.sampling import draw
from specbench.decoding.verify import DRAFT
from specbench.engine.ops import take

INITS = (
    "random",
    "horizontal_repeat",
    "vertical_repeat",
    "horizontal_sample",
    "vertical_sample",
    "horizontal_mode",
)
COUPLINGS = ("none", "maximal", "gumbel", "height", "threshold")
#: Tags of a step's random numbers. KEEP: whether a token is kept or, under height coupling, a new height.
TOKEN, KEEP, INIT, SIBLING = range(DRAFT, DRAFT + 4)
GUMBEL = TAGS - 1  # of step 0: the noise of a position is the same at every step


# How a token is drafted again


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

    "threshold" keeps the token if p / q > tau, and otherwise draws from p (SJD++, arXiv 2512.07503). This is not exact:
    a kept token was not drawn from p, the distribution that is recorded for it from then on.
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
    u = rng.uniform_at(torch.zeros_like(position[:, 0]), GUMBEL, index.flatten(1))
    return exponential(u).view(*position.shape, size)


def next_heights(token: Tensor, p: Tensor, window: WindowTokens, keep: Tensor, fresh: Tensor) -> Tensor:
    """The heights (B, H) of the tokens that `coupled` returned. fresh (B, H): uniforms."""
    share = at(window.q, token) / at(p, token)
    return torch.where(window.exists, renewed_heights(keep, window.height, fresh, share), fresh)


def renewed_heights(keep: Tensor, u: Tensor, fresh: Tensor, share: Tensor) -> Tensor:
    """Heights of tokens y after a step from distribution q to p, as shares of p(y). Kept tokens (`keep`, bool) have the
    height u q(y); new ones a height from [q(y), p(y)), by a uniform number `fresh`. share: q(y) / p(y). All (B, H)."""
    return torch.where(keep, u * share, share + fresh * (1 - share))


# How a position begins


def sources(init: str, position: Tensor, last: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The image position (B, H) from which a new position takes its token or distribution, and whether no such position
    exists, so that the position starts at random. last (B, 1): the last position that holds something; side: positions
    in a row of the image.

    "random" is uniform over the codes. "horizontal_..." and "vertical_..." take the nearest known position to the left
    or above: "_repeat" its token (a point mass), "_sample" a token drawn from its distribution, and "_mode" the most
    probable token of its distribution (a point mass), as in SJD's code.
    """
    if init == "random":
        return position, torch.ones_like(position, dtype=torch.bool)
    if init.startswith("horizontal"):
        start = position - position % side
        return torch.maximum(start, last), last < start
    up = (position - last + side - 1) // side * side
    return torch.where(position < up, position % side, position - up), position < up


@dataclass
class Renewed:
    """A window after a step: tokens (B, H) and the distributions probs (B, H, V) that they were drawn from. Only the
    first `known` (B,) positions count."""

    known: Tensor
    tokens: Tensor
    probs: Tensor


def repeated(
    renewed: Renewed, source: Tensor, orphan: Tensor, anything: Tensor, history: Tensor, num_committed: Tensor
) -> Tensor:
    """Tokens (B, H) that repeat the tokens of their sources; positions without a source get `anything` (B, H). history
    (B, *): the committed tokens, `num_committed` (B,) of them."""
    begin = num_committed[:, None]
    inside = (source - begin).clamp(0, renewed.tokens.shape[1] - 1)
    earlier = history.gather(1, source.clamp(0, history.shape[1] - 1))
    tokens = torch.where(source < begin, earlier, renewed.tokens.gather(1, inside))
    return torch.where(orphan, anything, tokens)


def source_probs(renewed: Renewed, source: Tensor, past: Tensor, num_committed: Tensor) -> Tensor:
    """The distributions (B, H, V) of the source positions. past (B, K, V): the distributions of the last K committed
    positions."""
    offset, size = source - num_committed[:, None], past.shape[1]
    earlier = take(past, (offset + size).clamp(0, size - 1))
    inside = take(renewed.probs, offset.clamp(0, renewed.probs.shape[1] - 1))
    return torch.where(offset.unsqueeze(-1) < 0, earlier, inside)
