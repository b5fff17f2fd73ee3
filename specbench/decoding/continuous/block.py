"""Block verification of drafts of continuous tokens, from density ratios alone.

With r_i the ratio p / q of draft token i, P_0 = 1 and P_i = min(1, P_{i-1} r_i). Block verification of discrete tokens
(arXiv 2403.10444) also needs R_i, the integral of [P_i p_i - q_i]_+ over the token after i drafts. A loop of two coins
does without: after U >= P_L, from i = L - 1 down, repeat: give up i with probability 1 - P_i; else draw Y from p_i, and
stop with it, i drafts accepted, with probability max(0, 1 - q_i(Y) / (P_i p_i(Y))). It stops at i with
R_i / (R_i + 1 - P_i), and then Y has the residual distribution Norm([P_i p_i - q_i]_+). On average at most one proposal
is made per position.

How much of a draft is accepted depends on all of its tokens. So every pass needs fresh noise: what made the tokens
beyond the accepted ones is no longer distributed as noise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.decoding.continuous.drafts import Compared
from specbench.decoding.continuous.trajectory import normal
from specbench.decoding.continuous.verify import ACCEPT, RETRY, Verifier
from specbench.decoding.rng import RandomStreams


def log_mass(log_ratio: Tensor) -> Tensor:
    """log P (A, gamma + 1) from log p / q (A, gamma): a running sum that falls back to 0 whenever it exceeds it."""
    total = F.pad(log_ratio.cumsum(1), (1, 0))
    return total - total.cummax(1).values


def verify(
    verifier: Verifier, compared: Compared, rng: RandomStreams, step: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per draft: how many of its tokens are accepted (A,); where not all of them are, the token (A, D) that follows;
    the number of proposals (A,); and which (A,) are the last proposal because these ran out. rng: of the drafts'
    images; step (A,) keys the random numbers of this pass."""
    drafts, (count, gamma) = compared.drafts, compared.log_ratio.shape
    mass = log_mass(compared.log_ratio)
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
