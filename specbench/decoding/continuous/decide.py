"""Drafts of continuous tokens with the target's side of them, which of their tokens are accepted, and what follows.

**Several drafts with first tokens of their own: layered acceptance.** The first token of draft k = 1 .. K was drawn
from q. In order, it is kept with probability clip(p / q - (k - 1), 0, 1), whatever integrals of p and q are: draft k
adds a layer of height q to min(p, K q). If all are rejected, the next token is a proposal Y of the target, kept with
max(0, 1 - N' q(Y) / p(Y)), where N' is the number of tries of another, independent run (K if nothing is kept in it).
The expectation of that is the residual over p, and every value lies in [0, 1]. The run goes only as far as the
decision needs. The run's independence is what makes this exact: with the number of tries of the run that was
rejected, K, too much is rejected, and with one N' for all proposals the two are no longer independent.

**Block verification from density ratios alone.** With r_i the ratio p / q of draft token i, P_0 = 1 and P_i = min(1,
P_{i-1} r_i). Block verification of discrete tokens (arXiv 2403.10444) also needs R_i, the integral of [P_i p_i -
q_i]_+ over the token after i drafts. A loop of two coins does without: after U >= P_L, from i = L - 1 down, repeat:
give up i with probability 1 - P_i; else draw Y from p_i, and stop with it, i drafts accepted, with probability
max(0, 1 - q_i(Y) / (P_i p_i(Y))). It stops at i with R_i / (R_i + 1 - P_i), and then Y has the residual distribution
Norm([P_i p_i - q_i]_+). On average at most one proposal is made per position.

How much of a draft is accepted depends on all of its tokens. So every pass needs fresh noise: what made the tokens
beyond the accepted ones is no longer distributed as noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from specbench.decoding.continuous.trajectory import Trajectory, normal
from specbench.decoding.continuous.verify import ACCEPT, RETRY, Verifier
from specbench.decoding.rng import RandomStreams
from specbench.decoding.verify.block import log_masses


@dataclass
class Drafts:
    """A drafts: `row` (A,) of the batch, whose drafts lie next to each other; indices `number` (A, gamma) in the order
    of generation, of which those inside the image are `valid`, `room` (A,) of them; `series` (A,) of their random
    numbers, as of `keyed`; values (A, L + 1, D) at all positions, including the drafts; the drafter's trajectories and
    z, of A * gamma tokens."""

    row: Tensor
    number: Tensor
    valid: Tensor
    room: Tensor
    series: Tensor
    values: Tensor
    paths: Trajectory
    z: Tensor

    def of(self, index: Tensor) -> Drafts:
        """The drafts `index` (n,)."""
        names = ("row", "number", "valid", "room", "series", "values")
        each = {name: getattr(self, name)[index] for name in names}
        tokens = of_tokens(index, self.number.shape[1])
        return replace(self, **each, paths=self.paths.rows(tokens), z=self.z[tokens])


@dataclass
class Compared:
    """Drafts with the target's z (A * gamma, E) of their tokens and, where a token may follow a draft, z_after
    (A, gamma + 1, E) with that of this one; log_ratio (A, gamma) float64, log p / q of each token; `own` trajectories
    of the target where the criterion needs them, and log Sigma, `sigma` (A * gamma,); u (A, gamma): the uniform number
    that decides on each token by itself."""

    drafts: Drafts
    z: Tensor
    z_after: Tensor | None
    log_ratio: Tensor
    own: Trajectory | None
    sigma: Tensor
    u: Tensor

    def of(self, index: Tensor) -> Compared:
        """The drafts `index` (n,)."""
        tokens = of_tokens(index, self.log_ratio.shape[1])
        return Compared(
            self.drafts.of(index),
            self.z[tokens],
            None if self.z_after is None else self.z_after[index],
            self.log_ratio[index],
            None if self.own is None else self.own.rows(tokens),
            self.sigma[tokens],
            self.u[index],
        )


@dataclass
class Replacement:
    """Tokens (n, D) after a rejection, for the drafted tokens `at` (n,); the number of `proposals` (n,) of each; and
    which (n,) are the last proposal because these ran out, `exhausted`."""

    at: Tensor
    token: Tensor
    proposals: Tensor
    exhausted: Tensor


@dataclass
class Decision:
    """Of drafted tokens (A, gamma) bool: which are kept, which were verified, and which are replaced; `advance` (A,):
    how many tokens of a draft count; and `new` tokens, those that replace others among them."""

    kept: Tensor
    verified: Tensor
    replaced: Tensor
    advance: Tensor
    new: Replacement | None = None


def of_tokens(index: Tensor, gamma: int) -> Tensor:
    """The indices (n gamma,) of the tokens of the drafts `index` (n,)."""
    return (index[:, None] * gamma + torch.arange(gamma, device=index.device)).flatten()


def keyed(number: Tensor, series: Tensor | int, length: int) -> Tensor:
    """The step (n,) of `RandomStreams` that keys the random numbers of tokens `number` (n,) in a series, for images of
    `length` tokens. Series 0 is that of vanilla decoding. Under block verification every pass has its own (see
    above); else the k-th draft of an image has series k at every pass, since a token behind a rejected one decides
    nothing."""
    return number + (length + 1) * series


def decide(
    verifier: Verifier, compared: Compared, rng: RandomStreams, length: int
) -> tuple[Compared, Tensor, Decision]:
    """The draft of each image that is followed; how many (A,) other drafted tokens had a part in it: first tokens that
    were tried and, of a block, those behind a rejection; and the decision. rng: of the batch; length: tokens of an
    image."""
    rule, room = verifier.rule, compared.drafts.room
    chosen = others = torch.zeros_like(room[:: rule.tries])
    if rule.tries > 1:
        heads = (x[:, 0].unflatten(0, (-1, rule.tries)) for x in (compared.log_ratio, compared.u))
        chosen, tried = choose(*heads)
        compared = compared.of(torch.arange(len(chosen), device=room.device) * rule.tries + chosen)
        others = (tried - 1) * (compared.drafts.room > 0)
    if rule.verification == "block":
        decision = _by_block(verifier, compared, rng, length)
        return compared, room - decision.verified.sum(1), decision
    return compared, others, _by_token(verifier, compared, chosen, rng, length)


def _by_token(verifier: Verifier, compared: Compared, chosen: Tensor, rng: RandomStreams, length: int) -> Decision:
    """Keep each token with min(1, p / q), but the first by the layer of the `chosen` draft (A,), up to the first that
    is not kept."""
    rule, drafts = verifier.rule, compared.drafts
    valid, gamma, stop = drafts.valid, drafts.valid.shape[1], rule.on_reject == "stop"
    accept = compared.log_ratio.clamp_max(0).exp()
    if rule.tries > 1:
        accept[:, 0] = layer(compared.log_ratio[:, 0], chosen)
    kept = (compared.u < accept) & valid
    verified, advance = valid, drafts.room
    if stop:
        advance = kept.long().cumprod(1).sum(1)
        offsets = torch.arange(gamma, device=valid.device)
        verified, kept = (offsets <= advance[:, None]) & valid, offsets < advance[:, None]
    rejected = verified & ~kept
    if verifier.compact or rule.tries > 1:
        some = rejected.flatten().nonzero().flatten()
    else:  # reading the device's values costs time
        some = _after(advance, gamma) if stop else torch.arange(rejected.numel(), device=valid.device)
    if not len(some):
        return Decision(kept, verified, rejected, advance)
    of, number = drafts.row[some // gamma], drafts.number.flatten()[some].clamp_max(length - 1)
    z, z_draft = compared.z[some], drafts.z[some]
    if rule.tries > 1:

        def streams(which: Tensor, count: int) -> tuple[RandomStreams, Tensor]:
            return rng.rows(of[which]), keyed(number[which], rule.tries + count, length)

        tries = torch.where(some % gamma == 0, rule.tries, 1)
        found = residual_of_several(verifier, z, z_draft, tries, streams, drafts.paths.shape)
    else:
        own = compared.own.rows(some) if compared.own is not None else None
        paths, sigma = drafts.paths.rows(some), compared.sigma[some]
        found = verifier.residual(paths, own, sigma, z, z_draft, rng.rows(of), number)
    return Decision(kept, verified, rejected, advance, Replacement(some, *found))


def _by_block(verifier: Verifier, compared: Compared, rng: RandomStreams, length: int) -> Decision:
    drafts = compared.drafts
    valid, gamma = drafts.valid, drafts.valid.shape[1]
    key = keyed(drafts.number[:, 0].clamp_max(length - 1), drafts.series, length)
    advance, *found = verify_block(verifier, compared, rng.rows(drafts.row), key)
    offsets = torch.arange(gamma, device=valid.device)
    kept, verified = offsets < advance[:, None], (offsets <= advance[:, None]) & valid
    return Decision(kept, verified, verified & ~kept, advance, Replacement(_after(advance, gamma), *found))


def _after(advance: Tensor, gamma: int) -> Tensor:
    """The indices (A,) of the drafted tokens after the accepted ones; those of the last tokens where all are."""
    return torch.arange(len(advance), device=advance.device) * gamma + advance.clamp_max(gamma - 1)


def layer(log_ratio: Tensor, number: Tensor | int) -> Tensor:
    """The probability of keeping draft `number`, from 0 on, of log p / q."""
    return (log_ratio.exp() - number).clamp(0, 1)


def choose(log_ratio: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Of first tokens (A, K): the number (A,) of the draft whose one is kept, 0 where none is, and how many (A,) were
    tried. u (A, K): uniform numbers."""
    kept = u < layer(log_ratio, torch.arange(u.shape[1], device=u.device))
    chosen, found = kept.long().argmax(1), kept.any(1)
    return chosen, torch.where(found, chosen + 1, u.shape[1])


def residual_of_several(
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


def verify_block(
    verifier: Verifier, compared: Compared, rng: RandomStreams, step: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per draft: how many of its tokens are accepted (A,); where not all of them are, the token (A, D) that follows;
    the number of proposals (A,); and which (A,) are the last proposal because these ran out. rng: of the drafts'
    images; step (A,) keys the random numbers of this pass."""
    drafts, (count, gamma) = compared.drafts, compared.log_ratio.shape
    mass = log_masses(compared.log_ratio)
    after, dim = drafts.paths.shape
    complete = rng.uniform(step, ACCEPT, 1)[:, 0] < mass.gather(1, drafts.room[:, None])[:, 0].exp()
    at = torch.where(complete, drafts.room, drafts.room - 1)  # how many drafts are accepted if the loop stops now
    token = drafts.paths.token.new_zeros(count, dim)
    proposals, exhausted = torch.zeros_like(at), torch.zeros_like(complete)
    offsets, rows = torch.arange(gamma, device=at.device), (~complete).nonzero().flatten()
    for attempt in range(verifier.rule.proposals):
        if not len(rows):
            break
        streams, key, tag = rng.rows(rows), step[rows], RETRY + 2 * attempt
        u = streams.uniform(key, tag + 1, gamma + 1).double()
        stays = (u[:, 1:] < mass[rows, :gamma].exp()) & (offsets <= at[rows, None])  # P_0 = 1 always does
        at[rows] = (offsets * stays).amax(1)
        here = rows * gamma + at[rows]
        if compared.own is None:
            noise = normal(streams, key, tag, after, dim)
            y, log_ratio = verifier.propose_path(compared.z[here], drafts.z[here], noise)
        else:
            fresh = normal(streams, key, tag, 1, dim)
            y, log_ratio = verifier.last_steps(compared.own.rows(here), drafts.paths.rows(here), fresh)
            y, log_ratio = y[:, 0], log_ratio[:, 0]
        log_ratio = log_ratio + mass[rows, at[rows]]
        kept = ~(u[:, 0] >= -torch.expm1(-log_ratio))  # NaN is not proposed again
        token[rows] = y
        proposals[rows] += 1
        rows = rows[~kept]
    exhausted[rows] = True
    return at, token, proposals, exhausted
