"""Which tokens of a draft are accepted, and what follows a rejection."""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.decoding.continuous import block, layers
from specbench.decoding.continuous.drafts import Compared, Decision, Replacement, keyed
from specbench.decoding.continuous.verify import Verifier
from specbench.decoding.rng import RandomStreams


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
        chosen, tried = layers.choose(*heads)
        compared = compared.of(torch.arange(len(chosen), device=room.device) * rule.tries + chosen)
        others = (tried - 1) * (compared.drafts.room > 0)
    if rule.verification == "block":
        decision = _by_block(verifier, compared, rng, length)
        return compared, room - decision.verified.sum(1), decision
    return compared, others, _by_token(verifier, compared, chosen, rng, length)


def _by_token(verifier: Verifier, compared: Compared, layer: Tensor, rng: RandomStreams, length: int) -> Decision:
    """Keep each token with min(1, p / q), but the first by its `layer` (A,), up to the first that is not kept."""
    rule, drafts = verifier.rule, compared.drafts
    valid, gamma, stop = drafts.valid, drafts.valid.shape[1], rule.on_reject == "stop"
    accept = compared.log_ratio.clamp_max(0).exp()
    if rule.tries > 1:
        accept[:, 0] = layers.layer(compared.log_ratio[:, 0], layer)
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
        found = layers.residual(verifier, z, z_draft, tries, streams, drafts.paths.shape)
    else:
        own = compared.own.rows(some) if compared.own is not None else None
        paths, sigma = drafts.paths.rows(some), compared.sigma[some]
        found = verifier.residual(paths, own, sigma, z, z_draft, rng.rows(of), number)
    return Decision(kept, verified, rejected, advance, Replacement(some, *found))


def _by_block(verifier: Verifier, compared: Compared, rng: RandomStreams, length: int) -> Decision:
    drafts = compared.drafts
    valid, gamma = drafts.valid, drafts.valid.shape[1]
    key = keyed(drafts.number[:, 0].clamp_max(length - 1), drafts.series, length)
    advance, *found = block.verify(verifier, compared, rng.rows(drafts.row), key)
    offsets = torch.arange(gamma, device=valid.device)
    kept, verified = offsets < advance[:, None], (offsets <= advance[:, None]) & valid
    return Decision(kept, verified, verified & ~kept, advance, Replacement(_after(advance, gamma), *found))


def _after(advance: Tensor, gamma: int) -> Tensor:
    """The indices (A,) of the drafted tokens after the accepted ones; those of the last tokens where all are."""
    return torch.arange(len(advance), device=advance.device) * gamma + advance.clamp_max(gamma - 1)
