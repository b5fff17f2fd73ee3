"""The statistics of a decoding, recorded after each step and apart from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.decoding.emitted import Emitted
from specbench.decoding.sampling import Distributions
from specbench.decoding.verify import Draft, Verdict
from specbench.engine.ops import sum_last
from specbench.engine.state import Buffer, Buffers


@dataclass
class Trace:
    """Per-step statistics; column s of a (B, T) tensor belongs to step s, beyond `steps` it is zero.

    accepted: draft tokens accepted inside the image; offered: depth of the deepest draft token that was verified inside
    the image; first: probability with which the rule accepts the first candidate; tv: total variation between the
    distribution it was drawn from and the target's; top1, top3: whether the target's most probable token is the
    drafter's most probable token, or among its three most probable. The last four are of the steps with a draft
    (offered > 0).
    log_prob (B, T): of every emitted token, its natural-log probability under the target, with guidance and temperature
    but before top-k and top-p (at temperature 0: at temperature 1).
    emitted_tv, emitted_kl, emitted_outside, emitted_kl_optimal, emitted_ratio (B, T): of every emitted token, how far
    the distribution that it was emitted from is from the target's, see `emitted.Emitted.step`; (B, 0) without it.
    share: as of `Verdict`, NaN in steps without a choice; (B, 0) where nothing is selected.
    """

    accepted: Tensor
    offered: Tensor
    first: Tensor
    tv: Tensor
    top1: Tensor
    top3: Tensor
    log_prob: Tensor
    emitted_tv: Tensor
    emitted_kl: Tensor
    emitted_outside: Tensor
    emitted_kl_optimal: Tensor
    emitted_ratio: Tensor
    share: Tensor


#: How far the sum of a distribution may be from 1. (float32 over 200,000 tokens is exact to about 1e-5.)
_TOLERANCE = 1e-3


@dataclass
class Taken:
    """What a step leaves for its statistics: also the target's distributions `found`; count, steps (B,): from before
    the step; active (B,) bool: whether the image was not complete; kept: as of `Outcome`."""

    draft: Draft
    verdict: Verdict
    found: Distributions
    count: Tensor
    steps: Tensor
    active: Tensor
    kept: Tensor | None = None


class TraceRecorder:
    """Fills a trace without a host round trip, and checks the distributions: for every step it records the product of
    the sums of those that were used, which is 1 where each sums to 1, and NaN where one is not finite."""

    def __init__(
        self,
        rows: int,
        total: int,
        reach: int,
        device: torch.device,
        emitted: Emitted | None = None,
        selects: bool = False,
    ) -> None:
        """selects: verdicts have a `share`."""
        self.total, self.emitted = total, emitted
        # the sums of the target's and the drafter's distributions, then the six of a trace, which vanilla does not
        # need, and the share of selections; finished rows write to the last column
        self.steps = torch.zeros(8 + selects, rows, total + 1, device=device)
        self.steps[:2] = 1
        self.log_prob = torch.zeros(rows, total + 2 * reach, device=device)
        self.distances = torch.zeros(5, rows, total + 2 * reach if emitted else 0, device=device)
        self.distances[4] = 1  # the ratio of vanilla
        self.offsets = torch.arange(reach, device=device)

    def buffers(self) -> Buffers:
        own = {"steps": Buffer(self.steps, 1), "log_prob": Buffer(self.log_prob)}
        return own | {"distances": Buffer(self.distances, 1)} if self.emitted else own

    def record(self, taken: Taken) -> None:
        verdict, count, active = taken.verdict, taken.count, taken.active
        path = verdict.path_with_root  # beyond its end, its last node: every entry was reached
        fronts, kept = taken.draft.fronts, taken.kept
        if fronts is not None and kept is not None:
            positions, tokens, some = fronts.committed(verdict.tokens, kept, self.total)
            first = torch.arange(kept.shape[1], device=path.device)[:, None] * taken.draft.tree.nodes
            path = (fronts.images(path) + first).flatten(1)
        else:
            positions, tokens = count[:, None] + self.offsets, verdict.tokens
            some = active[:, None] & (self.offsets <= verdict.length[:, None])
        if taken.draft.tree.height:
            row = [*self._sums(taken, path), *self._statistics(taken)]
            if verdict.share is not None:
                row.append(verdict.share)
        else:
            last = sum_last(verdict.next_probs)
            row = [last if fronts is None else fronts.images(last).prod(1)]
        index = torch.where(active, taken.steps, self.total).expand(len(row), -1).unsqueeze(-1)
        self.steps[: len(row)].scatter_(2, index, torch.stack([x.float() for x in row]).unsqueeze(-1))
        of_token = taken.found.log_prob(path, tokens)
        self.log_prob.scatter_(1, positions, torch.where(some, of_token, 0.0))
        if self.emitted is not None and taken.draft.tree.height:  # vanilla emits the target's own distribution
            found = self.emitted.step(taken.draft, verdict, taken.found, taken.steps)
            self.distances.scatter_(2, positions.expand(5, -1, -1), torch.where(some, found, 0.0))

    def _statistics(self, taken: Taken) -> list[Tensor]:
        """A step's statistics for the trace, (B,) each."""
        draft, verdict, p = taken.draft, taken.verdict, taken.found.p
        fronts, offered = draft.fronts, (draft.valid * draft.tree.depth).amax(1)
        if fronts is not None and taken.kept is not None:
            p, room = fronts.chains(p), taken.kept.flatten()
        else:
            room = (self.total - taken.count).clamp_min(0)
            offered = torch.minimum(offered, room)
        row = [torch.minimum(verdict.length, room), offered, verdict.first]
        q, p0 = draft.probs[:, 0], p[:, 0]  # the root is the first inner node
        top1 = p0.argmax(-1, keepdim=True)
        hits = q.topk(min(3, q.shape[-1]), dim=-1).indices == top1
        row += [0.5 * sum_last((q - p0).abs()), hits[:, 0], hits.any(-1)]
        if fronts is not None:
            drafts = fronts.images(offered > 0)
            means = [fronts.images(x).float() * drafts for x in row[2:]]
            return [fronts.images(x).sum(1) for x in row[:2]] + [x.sum(1) / drafts.sum(1).clamp_min(1) for x in means]
        return row[:2] + [x * (offered > 0) for x in row[2:]]

    def _sums(self, taken: Taken, path: Tensor) -> list[Tensor]:
        """The products (B,) of the sums of the target's distributions along the accepted path and of the next
        token's, and of the sums of the drafter's distributions that something was drawn from."""
        draft, last = taken.draft, sum_last(taken.verdict.next_probs)
        child = draft.tree.children[:, :, 0].expand(len(last), -1)
        used = (child >= 0) & draft.valid.gather(1, child.clamp_min(0))
        target = sum_last(taken.found.p).gather(1, path).prod(1)
        drafts = torch.where(used, sum_last(draft.probs), 1.0).prod(1)
        if draft.fronts is not None:
            last, drafts = (draft.fronts.images(x).prod(1) for x in (last, drafts))
        return [target * last, drafts]

    def _valid(self) -> Tensor:
        """(2, B, T) bool: whether the target's and the drafter's distributions of a step sum to 1. At temperature 0 the
        arg max of NaN sums to 1 as well; the token's own probability is NaN then, by position, not by step."""
        return (self.steps[:2, :, : self.total] - 1).abs() <= _TOLERANCE

    def wrong(self) -> Tensor:
        """Per row (B,), whether a distribution was not finite or did not sum to 1."""
        return ~self._valid().all(-1).all(0) | self.log_prob[:, : self.total].isnan().any(-1)

    def fault(self, row: int) -> tuple[int, str]:
        """The first step, from 1 on, in which a distribution of a row was invalid, and which model produced it."""
        valid = self._valid()[:, row].cpu()
        ends = (self.steps[2, row, : self.total].cpu().long() + 1).cumsum(0)  # the position after a step's last token
        positions = self.log_prob[row, : self.total].isnan().nonzero().flatten().cpu()
        valid[0, torch.searchsorted(ends, positions, right=True)] = False
        first = int((~valid.all(0)).nonzero()[0])
        return first + 1, "drafter" if valid[0, first] else "target"

    def trace(self) -> Trace:
        accepted, offered, first, tv, top1, top3, *shares = self.steps[2:, :, : self.total].clone()
        share = shares[0] if shares else self.steps.new_empty(self.steps.shape[1], 0)
        log_prob = self.log_prob[:, : self.total].clone()
        distances = self.distances[:, :, : self.total].clone()
        return Trace(accepted.long(), offered.long(), first, tv, top1 > 0, top3 > 0, log_prob, *(*distances, share))
