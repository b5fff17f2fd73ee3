"""The statistics of a decoding. They are recorded after each step, outside the timed part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.decoding.emitted import Emitted
from specbench.decoding.parallel_positions import Raster
from specbench.decoding.sampling import Distributions
from specbench.decoding.verify import Draft, VerificationResult
from specbench.engine.ops import sum_last
from specbench.engine.state import Buffer, Buffers


@dataclass
class Trace:
    """Statistics of every step. Column s of a (B, T) tensor belongs to step s; columns from `steps` on are zero.

    accepted: draft tokens accepted inside the image; reach: how many were verified there, the accepted ones and a
    rejected one after them; with several drafts both are sums. first: probability with which the rule accepts the first
    candidate; tv: total variation between the distribution it was drawn from and the target's; top1, top3: 1 if the
    target's most probable token is the drafter's most probable token, or among its three most probable ones, else 0.
    The last four hold only for steps with a draft (reach > 0), and are means over the drafts of a step; top3 over those
    with at least 3 tokens of positive probability, NaN without one.

    log_prob (B, T): natural-log probability of every emitted token under the target, with guidance and temperature but
    before top-k and top-p (at temperature 0: at temperature 1).

    emitted_tv, emitted_kl, emitted_outside, emitted_kl_reverse, emitted_missed, emitted_kl_optimal, emitted_ratio (B,
    T): for every emitted token, the distance of the distribution that it was emitted from to the target's, see
    `emitted.Emitted.step`; (B, 0) if not measured.
    """

    accepted: Tensor
    reach: Tensor
    first: Tensor
    tv: Tensor
    top1: Tensor
    top3: Tensor
    log_prob: Tensor
    emitted_tv: Tensor
    emitted_kl: Tensor
    emitted_outside: Tensor
    emitted_kl_reverse: Tensor
    emitted_missed: Tensor
    emitted_kl_optimal: Tensor
    emitted_ratio: Tensor


#: How far the sum of a distribution may be from 1. (float32 over 200,000 tokens is exact to about 1e-5.)
_TOLERANCE = 1e-3


#: The rows that are recorded for a step: the sums of the target's and the drafter's distributions, then fields of a
#: trace. Vanilla decoding needs only the first row.
_SUMS, _STATISTICS = ("target", "drafter"), ("accepted", "reach", "first", "tv", "top1", "top3")
#: The fields of a trace that `emitted.Emitted.step` computes, in its order.
_DISTANCES = tuple("emitted_" + name for name in "tv kl outside kl_reverse missed kl_optimal ratio".split())


@dataclass
class StepStats:
    """What a step computed for its statistics. target: the target's distributions; num_committed, steps (B,): from
    before the step; active (B,) bool: the image was not complete; kept: see `StepResult`."""

    draft: Draft
    layout: Raster
    verdict: VerificationResult
    target: Distributions
    num_committed: Tensor
    steps: Tensor
    active: Tensor
    kept: Tensor | None = None

    @property
    def rejects(self) -> Tensor:
        """(B,) bool: whether the last node of the path has children in the draft, which were rejected."""
        last = self.verdict.path_with_root[:, -1:]
        return (self.draft.valid & (self.draft.tree.parent == last))[:, 1:].any(1)  # the root is its own parent


def _deviation(sums: Tensor) -> Tensor:
    """Sums of distributions (rows, n) -> how far a row's are from 1 at most (rows,)."""
    return (sums - 1).abs().amax(1)


def _sums_of_drafter(stats: StepStats) -> Tensor:
    """The sums (rows, nodes) of the drafter's distributions that were sampled; 1 elsewhere."""
    draft, rows = stats.draft, len(stats.verdict.length)
    child = draft.tree.children[:, :, 0].expand(rows, -1)
    used = (child >= 0) & draft.valid.gather(1, child.clamp_min(0))
    return torch.where(used, sum_last(draft.probs), 1.0)


class TraceRecorder:
    """Fills a trace without a host round trip, and checks the distributions. For every step it records how far the sums
    of the distributions that were used are from 1 at most: NaN if one is not finite."""

    def __init__(
        self,
        rows: int,
        total: int,
        reach: int,
        device: torch.device,
        emitted: Emitted | None = None,
    ) -> None:
        self.total, self.emitted = total, emitted
        self.names = [*_SUMS, *_STATISTICS]
        self.steps = torch.zeros(len(self.names), rows, total + 1, device=device)  # finished images write to the end
        self.log_prob = torch.zeros(rows, total + 2 * reach, device=device)
        self.distances = torch.zeros(len(_DISTANCES), rows, total + 2 * reach if emitted else 0, device=device)
        self.distances[_DISTANCES.index("emitted_ratio")] = 1  # the value of vanilla decoding

    def buffers(self) -> Buffers:
        buffers = {"steps": Buffer(self.steps, 1), "log_prob": Buffer(self.log_prob)}
        return buffers | {"distances": Buffer(self.distances, 1)} if self.emitted else buffers

    def record(self, stats: StepStats) -> None:
        verdict, layout, active = stats.verdict, stats.layout, stats.active
        # entries after the end of a path repeat its last node, so every entry was visited
        path = layout.among_nodes(verdict.path_with_root)
        drafts = stats.draft.tree.height > 0
        values = {"target": layout.images(_deviation(sum_last(verdict.next_probs).unsqueeze(1))).amax(1)}
        if drafts:
            along = _deviation(sum_last(stats.target.p).gather(1, path))
            values["target"] = torch.maximum(values["target"], along)
            values["drafter"] = layout.images(_deviation(_sums_of_drafter(stats))).amax(1)
            values |= self._statistics(stats)
        row = torch.stack([values[name].float() for name in self.names if name in values])
        index = torch.where(active, stats.steps, self.total).expand(len(row), -1).unsqueeze(-1)
        self.steps[: len(row)].scatter_(2, index, row.unsqueeze(-1))
        positions, tokens, committed = layout.added(verdict, stats.kept, stats.num_committed, active, self.total)
        of_token = stats.target.log_prob(path, tokens)
        self.log_prob.scatter_(1, positions, torch.where(committed, of_token, 0.0))
        if self.emitted is not None and drafts:  # vanilla emits the target's own distribution
            measures = self.emitted.step(stats.draft, verdict, stats.target, stats.steps)
            self.distances.scatter_(2, positions.expand(len(measures), -1, -1), torch.where(committed, measures, 0.0))

    def _statistics(self, stats: StepStats) -> dict[str, Tensor]:
        """A step's statistics for the trace, (B,) tensors."""
        draft, layout = stats.draft, stats.layout
        accepted, reach = layout.inside(stats, self.total)
        q, p = draft.probs[:, 0], layout.chains(stats.target.p)[:, 0]  # the root is the first inner node
        top1 = p.argmax(-1, keepdim=True)
        hits = q.topk(min(3, q.shape[-1]), dim=-1).indices == top1
        means = {"first": stats.verdict.first, "tv": 0.5 * sum_last((q - p).abs()), "top1": hits[:, 0]}
        drafts, wide = layout.images(reach > 0), layout.images((reach > 0) & ((q > 0).sum(-1) >= 3))
        num_drafts = drafts.sum(1).clamp_min(1)
        return {
            "accepted": layout.images(accepted).sum(1),
            "reach": layout.images(reach).sum(1),
            **{name: (layout.images(x).float() * drafts).sum(1) / num_drafts for name, x in means.items()},
            "top3": (layout.images(hits.any(-1)) & wide).sum(1) / wide.sum(1),
        }

    def _valid(self) -> Tensor:
        """(2, B, T) bool: whether the target's and the drafter's distributions of a step sum to 1. At temperature 0 the
        arg max of NaN sums to 1 as well; in that case the token's log-probability is NaN, which is stored by position,
        not by step."""
        return self.steps[:2, :, : self.total] <= _TOLERANCE

    def wrong(self) -> Tensor:
        """(B,) bool: whether a distribution was not finite or did not sum to 1."""
        return ~self._valid().all(-1).all(0) | self.log_prob[:, : self.total].isnan().any(-1)

    def fault(self, row: int) -> tuple[int, str]:
        """The first step, counted from 1, in which a distribution of a row was invalid, and the model that produced
        it."""
        valid = self._valid()[:, row].cpu()
        accepted = self.steps[self.names.index("accepted"), row, : self.total]
        ends = (accepted.cpu().long() + 1).cumsum(0)  # the position after a step's last token
        positions = self.log_prob[row, : self.total].isnan().nonzero().flatten().cpu()
        valid[0, torch.searchsorted(ends, positions, right=True)] = False
        first = int((~valid.all(0)).nonzero()[0])
        return first + 1, "drafter" if valid[0, first] else "target"

    def trace(self) -> Trace:
        inside = slice(self.total)
        columns = dict(zip(self.names[len(_SUMS) :], self.steps[len(_SUMS) :, :, inside].clone(), strict=True))
        columns |= {name: columns[name].long() for name in ("accepted", "reach")}
        distances = dict(zip(_DISTANCES, self.distances[:, :, inside].clone(), strict=True))
        return Trace(**columns, **distances, log_prob=self.log_prob[:, inside].clone())
