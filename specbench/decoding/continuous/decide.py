"""Drafts of continuous tokens, their comparison with the target, which of their tokens are accepted, and what follows.

**Several drafts, each with its own first token: layered acceptance.** The first token of each draft k = 1 .. K was
drawn from q. In order, it is accepted with probability clip(p / q - (k - 1), 0, 1). No integral of p or q is needed:
draft k adds a layer of height q to min(p, K q). If all are rejected, the next token is a proposal Y of the target,
accepted with max(0, 1 - N' q(Y) / p(Y)), where N' is the number of tries of another, independent run (K if it accepts
nothing). The expectation of this probability is the residual over p, and every value is in [0, 1]. The run stops as
soon as the decision is certain. The independence of the run makes this exact: with the number of tries of the rejected
run itself, K, too much is rejected, and with one N' for all proposals the two are no longer independent.

**Block verification from density ratios alone.** Let r_i be the ratio p / q of draft token i, P_0 = 1 and P_i = min(1,
P_{i-1} r_i). Block verification of discrete tokens (arXiv 2403.10444) also needs R_i, the integral of [P_i p_i - q_i]_+
over the token after i drafts. A loop of two coins does not need it. After U >= P_L, from i = L - 1 down, repeat: give
up i with probability 1 - P_i; else draw Y from p_i, and stop with Y and i accepted drafts with probability max(0, 1 -
q_i(Y) / (P_i p_i(Y))). The loop stops at i with probability R_i / (R_i + 1 - P_i), and then Y has the residual
distribution Norm([P_i p_i - q_i]_+). On average at most one proposal is made per position.

How much of a draft is accepted depends on all of its tokens. So every pass needs new noise: given the decision, the
noise that made the tokens after the accepted ones is no longer distributed as noise.
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
    """A drafts. row (A,): the image in the batch; drafts of an image are next to each other. number (A, gamma): indices
    in the order of generation; `room` (A,) of them are inside the image, marked `valid`. series (A,): of their random
    numbers, see `keyed`. values (A, L + 1, D): tokens at all positions, including the drafts. paths, z: the drafter's
    trajectories and z of the A * gamma tokens."""

    row: Tensor
    number: Tensor
    valid: Tensor
    room: Tensor
    series: Tensor
    values: Tensor
    paths: Trajectory
    z: Tensor

    def select(self, index: Tensor) -> Drafts:
        """The drafts at `index` (n,)."""
        names = ("row", "number", "valid", "room", "series", "values")
        fields = {name: getattr(self, name)[index] for name in names}
        tokens = of_tokens(index, self.number.shape[1])
        return replace(self, **fields, paths=self.paths.rows(tokens), z=self.z[tokens])


@dataclass
class Compared:
    """Drafts, compared with the target. z (A * gamma, E): the target's, for their tokens; z_after (A, gamma + 1, E):
    the same, plus z of the token after the draft, None if no token may follow; log_ratio (A, gamma) float64: log p / q
    of each token; target_paths: the target's trajectories if the criterion needs them; sigma (A * gamma,): log Sigma; u
    (A, gamma): the uniform number that decides on each token by itself."""

    drafts: Drafts
    z: Tensor
    z_after: Tensor | None
    log_ratio: Tensor
    target_paths: Trajectory | None
    sigma: Tensor
    u: Tensor

    def select(self, index: Tensor) -> Compared:
        """The drafts at `index` (n,)."""
        tokens = of_tokens(index, self.log_ratio.shape[1])
        return Compared(
            self.drafts.select(index),
            self.z[tokens],
            None if self.z_after is None else self.z_after[index],
            self.log_ratio[index],
            None if self.target_paths is None else self.target_paths.rows(tokens),
            self.sigma[tokens],
            self.u[index],
        )


@dataclass
class Replacement:
    """Tokens (n, D) after a rejection, which replace the drafted tokens `at` (n,); the number of `proposals` (n,) for
    each; and `exhausted` (n,): whether it is the last proposal because the proposals ran out."""

    at: Tensor
    token: Tensor
    proposals: Tensor
    exhausted: Tensor


@dataclass
class Decision:
    """Decisions on drafted tokens (A, gamma) bool: which are kept, which were verified, and which are replaced;
    `advance` (A,): how many tokens of a draft count; and `new` tokens, including those that replace others."""

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
    `length` tokens. Vanilla decoding uses series 0. Under block verification every pass has its own series (see
    the module). Otherwise the k-th draft of an image has series k in every pass, since a token after a rejected one
    decides nothing."""
    return number + (length + 1) * series


def decide(
    verifier: Verifier, compared: Compared, rng: RandomStreams, length: int
) -> tuple[Compared, Tensor, Decision]:
    """The draft of each image that is followed; how many (A,) other drafted tokens influenced this: first tokens that
    were tried and, in a block, those after a rejection; and the decision. rng: the batch's; length: tokens of an
    image."""
    rule, room = verifier.rule, compared.drafts.room
    chosen = others = torch.zeros_like(room[:: rule.tries])
    if rule.tries > 1:
        heads = (x[:, 0].unflatten(0, (-1, rule.tries)) for x in (compared.log_ratio, compared.u))
        chosen, tried = choose(*heads)
        compared = compared.select(torch.arange(len(chosen), device=room.device) * rule.tries + chosen)
        others = (tried - 1) * (compared.drafts.room > 0)
    if rule.verification == "block":
        decision = _by_block(verifier, compared, rng, length)
        return compared, room - decision.verified.sum(1), decision
    return compared, others, _by_token(verifier, compared, chosen, rng, length)


def _by_token(verifier: Verifier, compared: Compared, chosen: Tensor, rng: RandomStreams, length: int) -> Decision:
    """Keep each token with min(1, p / q), and the first by the layer of the `chosen` draft (A,), up to the first token
    that is not kept."""
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
        index = rejected.flatten().nonzero().flatten()
    else:  # reading the device's values costs time
        index = _after(advance, gamma) if stop else torch.arange(rejected.numel(), device=valid.device)
    if not len(index):
        return Decision(kept, verified, rejected, advance)
    images, number = drafts.row[index // gamma], drafts.number.flatten()[index].clamp_max(length - 1)
    z, z_draft = compared.z[index], drafts.z[index]
    if rule.tries > 1:

        def streams(rows: Tensor, attempt: int) -> tuple[RandomStreams, Tensor]:
            return rng.rows(images[rows]), keyed(number[rows], rule.tries + attempt, length)

        tries = torch.where(index % gamma == 0, rule.tries, 1)
        residual = residual_of_several(verifier, z, z_draft, tries, streams, drafts.paths.shape)
    else:
        target_paths = compared.target_paths.rows(index) if compared.target_paths is not None else None
        paths, sigma = drafts.paths.rows(index), compared.sigma[index]
        residual = verifier.residual(paths, target_paths, sigma, z, z_draft, rng.rows(images), number)
    return Decision(kept, verified, rejected, advance, Replacement(index, *residual))


def _by_block(verifier: Verifier, compared: Compared, rng: RandomStreams, length: int) -> Decision:
    drafts = compared.drafts
    valid, gamma = drafts.valid, drafts.valid.shape[1]
    key = keyed(drafts.number[:, 0].clamp_max(length - 1), drafts.series, length)
    advance, *replacement = verify_block(verifier, compared, rng.rows(drafts.row), key)
    offsets = torch.arange(gamma, device=valid.device)
    kept, verified = offsets < advance[:, None], (offsets <= advance[:, None]) & valid
    return Decision(kept, verified, verified & ~kept, advance, Replacement(_after(advance, gamma), *replacement))


def _after(advance: Tensor, gamma: int) -> Tensor:
    """The indices (A,) of the drafted tokens after the accepted ones; the last tokens if all are accepted."""
    return torch.arange(len(advance), device=advance.device) * gamma + advance.clamp_max(gamma - 1)


def layer(log_ratio: Tensor, number: Tensor | int) -> Tensor:
    """The probability of keeping draft `number`, counted from 0, from log p / q."""
    return (log_ratio.exp() - number).clamp(0, 1)


def choose(log_ratio: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The number (A,) of the draft whose first token is kept (0 if no token is), and how many first tokens (A,) were
    tried. log_ratio (A, K): of the first tokens; u (A, K): uniform numbers."""
    kept = u < layer(log_ratio, torch.arange(u.shape[1], device=u.device))
    chosen, any_kept = kept.long().argmax(1), kept.any(1)
    return chosen, torch.where(any_kept, chosen + 1, u.shape[1])


def residual_of_several(
    verifier: Verifier,
    z: Tensor,
    z_draft: Tensor,
    tries: Tensor,
    streams: Callable[[Tensor, int], tuple[RandomStreams, Tensor]],
    shape: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (n, D) after all `tries` (n,) drafts of a token were rejected, the number of proposals (n,) for each, and
    whether each (n,) is the last proposal because the proposals ran out. z, z_draft (n, E): the two models'; streams:
    returns, for some rows and a number, random streams and the step (rows,) that keys them; shape: of a token's noise,
    (T + 1, D)."""
    most, largest = verifier.rule.proposals, verifier.rule.tries
    token, proposals = z.new_zeros(len(z), shape[1]), torch.zeros_like(tries)
    rows = torch.arange(len(z), device=z.device)
    for proposal in range(most):

        def fresh(index: Tensor, number: int, by_target: bool, first: int = proposal * largest) -> tuple[Tensor, ...]:
            rng, step = streams(index, first + number)
            noise = partial(_noise, rng, step, shape)
            u = rng.uniform(step, ACCEPT, 1)[:, 0].double()
            return (*verifier.sample(by_target, z[index], z_draft[index], noise), u)

        y, log_ratio, u = fresh(rows, 0, True)
        reach = log_ratio.exp() * (1 - u)  # Y is accepted if N' < reach
        kept = ~(reach <= tries[rows])  # NaN is not proposed again
        undecided = (reach > 1) & ~kept
        for number in range(1, largest):
            index = (undecided & ~kept & (number < reach)).nonzero().flatten()
            if not len(index):
                break
            _, log_ratio, u = fresh(rows[index], number, False)
            kept[index] = u < layer(log_ratio, number - 1)
        token[rows] = y
        proposals[rows] += 1
        rows = rows[~kept]
        if not len(rows):
            break
    exhausted = torch.zeros(len(z), dtype=torch.bool, device=z.device)
    exhausted[rows] = True
    return token, proposals, exhausted


def _noise(rng: RandomStreams, step: Tensor, shape: tuple[int, int], tag: int) -> Tensor:
    return normal(rng, step, tag, *shape)


def verify_block(
    verifier: Verifier, compared: Compared, rng: RandomStreams, step: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each draft: how many of its tokens are accepted (A,); the token (A, D) that follows if not all are; the
    number of proposals (A,); and whether it is the last proposal (A,) because the proposals ran out. rng: of the
    drafts' images; step (A,): keys the random numbers of this pass."""
    drafts, (num_drafts, gamma) = compared.drafts, compared.log_ratio.shape
    mass = log_masses(compared.log_ratio)
    after, dim = drafts.paths.shape
    complete = rng.uniform(step, ACCEPT, 1)[:, 0] < mass.gather(1, drafts.room[:, None])[:, 0].exp()
    at = torch.where(complete, drafts.room, drafts.room - 1)  # how many drafts are accepted if the loop stops now
    token = drafts.paths.token.new_zeros(num_drafts, dim)
    proposals, exhausted = torch.zeros_like(at), torch.zeros_like(complete)
    offsets, rows = torch.arange(gamma, device=at.device), (~complete).nonzero().flatten()
    for attempt in range(verifier.rule.proposals):
        if not len(rows):
            break
        streams, key, tag = rng.rows(rows), step[rows], RETRY + 2 * attempt
        u = streams.uniform(key, tag + 1, gamma + 1).double()
        stays = (u[:, 1:] < mass[rows, :gamma].exp()) & (offsets <= at[rows, None])  # offset 0 always stays: P_0 = 1
        at[rows] = (offsets * stays).amax(1)
        index = rows * gamma + at[rows]
        if compared.target_paths is None:
            noise = normal(streams, key, tag, after, dim)
            y, log_ratio = verifier.propose_path(compared.z[index], drafts.z[index], noise)
        else:
            fresh = normal(streams, key, tag, 1, dim)
            y, log_ratio = verifier.last_steps(compared.target_paths.rows(index), drafts.paths.rows(index), fresh)
            y, log_ratio = y[:, 0], log_ratio[:, 0]
        log_ratio = log_ratio + mass[rows, at[rows]]
        kept = ~(u[:, 0] >= -torch.expm1(-log_ratio))  # NaN is not proposed again
        token[rows] = y
        proposals[rows] += 1
        rows = rows[~kept]
    exhausted[rows] = True
    return at, token, proposals, exhausted
