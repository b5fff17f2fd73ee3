"""Several drafts with first tokens of their own: layered acceptance.

The first token of draft k = 1 .. K was drawn from q. In order, it is kept with probability clip(p / q - (k - 1), 0, 1),
whatever integrals of p and q are: draft k adds a layer of height q to min(p, K q). If all are rejected, the next token
is a proposal Y of the target, kept with max(0, 1 - N' q(Y) / p(Y)), where N' is the number of tries of another,
independent run (K if nothing is kept in it). The expectation of that is the residual over p, and every value lies in
[0, 1]. The run goes only as far as the decision needs.

The run's independence is what makes this exact: with the number of tries of the run that was rejected, K, too much is
rejected, and with one N' for all proposals the two are no longer independent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from specbench.decoding.continuous.trajectory import normal
from specbench.decoding.continuous.verify import ACCEPT, Verifier
from specbench.decoding.rng import RandomStreams


def layer(log_ratio: Tensor, number: Tensor | int) -> Tensor:
    """The probability of keeping draft `number`, from 0 on, of log p / q."""
    return (log_ratio.exp() - number).clamp(0, 1)


def choose(log_ratio: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Of first tokens (A, K): the number (A,) of the draft whose one is kept, 0 where none is, and how many (A,) were
    tried. u (A, K): uniform numbers."""
    kept = u < layer(log_ratio, torch.arange(u.shape[1], device=u.device))
    chosen, found = kept.long().argmax(1), kept.any(1)
    return chosen, torch.where(found, chosen + 1, u.shape[1])


def residual(
    verifier: Verifier,
    z: Tensor,
    z_draft: Tensor,
    tries: Tensor,
    streams: Callable[[Tensor, int], tuple[RandomStreams, Tensor]],
    shape: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (n, D) after all `tries` (n,) drafts of theirs were rejected, the number of proposals (n,) of each, and
    which (n,) are the last proposal because these ran out. z, z_draft (n, E): the two models'; streams: for some rows
    and a number, random streams with the step (rows,) that keys them; shape: of a token's noise, (T + 1, D)."""
    most, largest = verifier.rule.proposals, verifier.rule.tries
    token, count = z.new_zeros(len(z), shape[1]), torch.zeros_like(tries)
    rows = torch.arange(len(z), device=z.device)
    for proposal in range(most):

        def fresh(some: Tensor, number: int, by_target: bool, first: int = proposal * largest) -> tuple[Tensor, ...]:
            rng, step = streams(some, first + number)
            noise = partial(_noise, rng, step, shape)
            u = rng.uniform(step, ACCEPT, 1)[:, 0].double()
            return (*verifier.sample(by_target, z[some], z_draft[some], noise), u)

        y, log_ratio, u = fresh(rows, 0, True)
        reach = log_ratio.exp() * (1 - u)  # Y is kept if N' < reach
        kept = ~(reach <= tries[rows])  # NaN is not proposed again
        undecided = (reach > 1) & ~kept
        for number in range(1, largest):
            some = (undecided & ~kept & (number < reach)).nonzero().flatten()
            if not len(some):
                break
            _, log_ratio, u = fresh(rows[some], number, False)
            kept[some] = u < layer(log_ratio, number - 1)
        token[rows] = y
        count[rows] += 1
        rows = rows[~kept]
        if not len(rows):
            break
    exhausted = torch.zeros(len(z), dtype=torch.bool, device=z.device)
    exhausted[rows] = True
    return token, count, exhausted


def _noise(rng: RandomStreams, step: Tensor, shape: tuple[int, int], tag: int) -> Tensor:
    return normal(rng, step, tag, *shape)
