"""Decodes images of continuous tokens, pass by pass.

On the CPU a pass computes only what it needs. On other devices the host does not synchronize to find out what that is:
a pass computes everything that any image could need, and writes the surplus to an index that is never read. The images
are the same. (Proposals after a rejection with `criterion="path"`, several drafts or a block synchronize on every
device, because each proposal is a trajectory.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.batch import BatchDecoding, Decoded, finished, not_finite
from specbench.decoding.continuous.decide import Compared, Drafts, decide, keyed
from specbench.decoding.continuous.rule import ContinuousRule
from specbench.decoding.continuous.sessions import Conditions, ContinuousModel, ContinuousSession, GenerationOrder
from specbench.decoding.continuous.trajectory import Trajectory, draw_trajectory, normal
from specbench.decoding.continuous.verify import ACCEPT, NOISE, ORDER, Verifier
from specbench.decoding.rng import RandomStreams
from specbench.engine.clock import Clock, Idle
from specbench.engine.graph import Eager, Graphs
from specbench.engine.ops import take
from specbench.engine.state import Buffer, Buffers, DecodeState, within
from specbench.errors import UsageError

_NO_FAULT = 2**62


def compacts(device: torch.device) -> bool:
    """Whether a pass computes only the rows that it needs: on devices whose values the host can read at no cost."""
    return device.type == "cpu"


@torch.inference_mode()
def decode(
    model: ContinuousModel,
    drafter: ContinuousModel | None,
    rule: ContinuousRule,
    conditioning: Any,
    rng: RandomStreams,
    **options: Any,
) -> Decoded[ContinuousTrace]:
    """Decode one image per row of `rng`. Tokens (B, L, D) float32, by position. Arguments, options and errors: see
    `ContinuousDecoding`."""
    start = partial(ContinuousDecoding, model, drafter, rule, conditioning, rng, **options)
    return finished(start, rng, Eager())  # the engine executes trajectories, not steps


@dataclass
class ContinuousTrace:
    """Statistics of every step. accepted, offered, first, start, reach (B, L), by step, zero from `steps` on: draft
    tokens accepted, draft tokens that could be verified, the probability of accepting the first, its index in the order
    of generation, and how many were verified. With several drafts they describe the one that was followed.

    order (B, L): the positions of the tokens in the order of generation. kept, verified (B, L) bool, in that order:
    whether a token was an accepted draft, and whether a draft was verified for it. proposals: by image, the number of
    the target's proposals for every token after a rejection; fallbacks (B,): tokens for which they did not suffice.
    draft_s: seconds spent on drafting; made (B,): tokens drafted, including those that were never verified.
    """

    accepted: Tensor
    offered: Tensor
    first: Tensor
    start: Tensor
    reach: Tensor
    order: Tensor
    kept: Tensor
    verified: Tensor
    proposals: list[list[int]]
    fallbacks: Tensor
    draft_s: float
    made: Tensor


#: The fields of a trace that have one value per step, in a decoding's order.
_BY_STEP = ("accepted", "offered", "first", "start", "reach")


@dataclass
class _StepStats:
    """What a pass computed for its statistics: which drafted tokens were accepted and which verified, (A, gamma) bool;
    the probability (A,) of accepting the first; and how many (A,) other drafted tokens influenced that."""

    drafts: Drafts
    kept: Tensor
    verified: Tensor
    first: Tensor
    others: Tensor


class ContinuousDecoding(BatchDecoding[_StepStats]):
    """B images in progress, one per row of `rng`. The constructor draws the tokens that the target draws alone; the
    rest follows pass by pass. Images advance at their own pace; a finished image no longer changes.

    `clock` records the parts of every pass: draft, forward (of the target's positions), verify, and head, the tokens
    that the target draws itself. `engine` executes the trajectories of the heads. UsageError if the models do not
    match.

    tokens (B, L + 1, D) by position; num_committed (B,): committed tokens. A token's number is its index in `order` (B,
    L + 1). Tensors by position, number or pass have one more entry, which is never read.
    """

    def __init__(
        self,
        model: ContinuousModel,
        drafter: ContinuousModel | None,
        rule: ContinuousRule,
        conditioning: Any,
        rng: RandomStreams,
        clock: Clock | Idle | None = None,
        engine: Eager | Graphs | None = None,
    ) -> None:
        if rule.gamma and drafter is None:
            raise UsageError("a draft length needs a drafter: a smaller model of the target's tokens")
        like = (model.length, model.dim, model.steps)
        if drafter is not None and (drafter.length, drafter.dim, drafter.steps) != like:
            raise UsageError("the drafter's tokens or diffusion steps differ from the target's")
        self.config = model, drafter, rule
        self.rule, self.clock, self.engine = rule, clock or Idle(), engine or Eager()
        self.length, self.dim, self.steps = like
        self.reach = rule.gamma + 1
        self.rng, self.device, rows = rng.copied(), rng.key.device, len(rng)
        self.all_rows, self.numbers = (torch.arange(n, device=self.device) for n in (rows, self.length + self.reach))
        self.compact, self.drafting = compacts(self.device), Clock(self.device)
        zero = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.target: ContinuousSession = model.open(conditioning, rows)
        self.order = GenerationOrder.random(rng, ORDER, self.length)
        self.tokens = torch.zeros(rows, self.length + 1, self.dim, device=self.device)
        self.conditions = Conditions(self.target, self.order)
        self.most = 0  # no image has more tokens
        self.num_committed, self.passes, self.drafted, self.accepted, self.fallbacks, self.made = (
            torch.zeros_like(zero) for _ in range(6)
        )
        self.fault = torch.full_like(zero, _NO_FAULT)
        self.by_step = torch.zeros(len(_BY_STEP), rows, self.length + 1, device=self.device)
        self.kept, self.verified = torch.zeros(2, rows, self.length + 1, dtype=torch.bool, device=self.device)
        self.proposals = torch.zeros_like(self.order.position)
        self.verifier: Verifier | None = None
        if drafter is not None and rule.gamma:
            opened = drafter.open(conditioning, rows)
            self.verifier = Verifier(self.target, opened, rule, self.engine, self.compact)
            self.draft_conditions = Conditions(opened, self.order)
        self.state = DecodeState(rows, self.buffers(), {"all_rows": self.all_rows, "numbers": self.numbers})
        before = self.length if self.verifier is None else math.ceil(round(rule.prefill * self.length, 6))
        for count in rule.tokens_per_pass or (1,) * before:
            self.draw_directly(count)

    def buffers(self) -> Buffers:
        """Everything that a pass reads or writes."""
        names = ("tokens", "num_committed", "passes", "drafted", "accepted", "fallbacks", "made", "fault")
        drafter = self.verifier.drafter.buffers() if self.verifier is not None else {}
        return {
            **{name: Buffer(getattr(self, name)) for name in (*names, "kept", "verified", "proposals")},
            "order": Buffer(self.order.position),
            "rank": Buffer(self.order.rank),
            "by_step": Buffer(self.by_step, 1),
            **within("rng", self.rng.buffers()),
            **within("target", self.target.buffers()),
            **within("drafter", drafter),
        }

    def remaining_tokens(self, keys: Sequence[tuple[int, int]]) -> list[int]:
        faults, counts = torch.stack([self.fault, self.num_committed]).tolist()
        if (first := min(faults)) < _NO_FAULT:
            passes, by_target = divmod(first, 2)
            who, key = "target" if by_target else "drafter", keys[faults.index(first)]
            raise not_finite(who, "a value that is not finite", key, passes)
        self.most = max(counts)
        return [self.length - n for n in counts]

    def series(self, row: Tensor) -> Tensor | int:
        """The series (n,) of the first drafts of images `row` (n,) in this pass, and of the tokens that the target
        draws: see `keyed`."""
        return self.passes[row] if self.rule.verification == "block" else 0

    def noise(self, row: Tensor, key: Tensor, tag: int) -> Tensor:
        """Noise of complete trajectories: (n, T + 1, D)."""
        return normal(self.rng.rows(row), key, tag, self.steps + 1, self.dim)

    def draw_directly(self, count: int) -> None:
        """The target draws the next `count` tokens of all images in one pass."""
        self.clock.begin()
        number = self.num_committed[:, None] + self.numbers[:count]
        if count == 1:
            z = self.conditions.following(self.tokens, self.all_rows, self.num_committed, 1, self.most)
        else:
            before = (self.num_committed[:, None] + (count - 1)).expand(-1, count)
            z = self.conditions.from_prefix(self.tokens, self.all_rows, self.num_committed, number, before, self.most)
        self.clock.lap("forward")
        self.passes += 1
        self._draw(z.flatten(0, 1), self.all_rows.repeat_interleave(count), number.flatten())
        self.num_committed += count
        self.most += count
        self.clock.lap("head")

    def step(self) -> None:
        """Draft tokens of the images, verify them, and commit the result."""
        assert self.verifier is not None, "without a drafter there is nothing left to do"
        active = self.num_committed < self.length
        row = active.nonzero().flatten() if self.compact else self.all_rows
        self.clock.begin()
        self.passes += active
        drafts = self._draft(self.verifier.drafter, row)
        self.clock.lap("draft")
        z, z_after = self._target_conditioning(drafts)
        self.clock.lap("forward")
        compared = self._compare(self.verifier, drafts, z, z_after)
        compared, kept, advance = self._verify(self.verifier, compared)
        self.num_committed[row] += advance
        self.clock.lap("verify")
        if compared.z_after is not None:
            self._draw_bonus(compared, kept)
            self.clock.lap("head")
        self.most = min(self.length, self.most + self.reach)

    def _draft(self, drafter: ContinuousSession, row: Tensor) -> Drafts:
        """Draft tokens of images `row` (A,) one after the other, each conditioned on the ones before. With several
        drafts of an image, all first tokens have the same condition."""
        self.drafting.begin()
        tries = self.rule.tries
        copies = torch.arange(len(row), device=self.device).repeat_interleave(tries)
        series = self.series(row[copies]) + torch.arange(tries, device=self.device).repeat(len(row))
        row = row[copies]
        first = self.num_committed[row]
        room = (self.length - first).clamp_max(self.rule.gamma)
        offsets = self.numbers[: int(room.max()) if self.compact else self.rule.gamma]
        number, valid = first[:, None] + offsets, offsets < room[:, None]
        values, positions = self.tokens[row], self.order.at(row, number)
        paths, z_all = [], []
        for i in range(len(offsets)):
            at = number[:, i : i + 1]
            firsts = slice(None, None, tries if i == 0 else 1)
            z = self.draft_conditions.following(values[firsts], row[firsts], at[firsts, 0], 1, self.most + i)[:, 0]
            z = z[copies] if len(z) < len(row) else z
            noise = self.noise(row, keyed(at[:, 0], series, self.length), NOISE)
            path = draw_trajectory(drafter, z, noise, self.rule, self.engine)
            self._record_faults(path.token, row, valid[:, i], by_target=False)
            values.scatter_(1, positions[:, i, None, None].expand(-1, 1, self.dim), path.token[:, None])
            paths.append(path)
            z_all.append(z)
        self.drafting.lap("draft")
        self.made.index_add_(0, row, room)
        z = torch.stack(z_all, 1).flatten(0, 1)
        return Drafts(row, number, valid, room, series, values, Trajectory.stacked(paths), z)

    def _target_conditioning(self, drafts: Drafts) -> tuple[Tensor, Tensor | None]:
        """The target's z (A * gamma, E) for drafted tokens. If each is conditioned on the ones before it, also (A,
        gamma + 1, E), which includes the bonus token."""
        row, tries, gamma = drafts.row, self.rule.tries, drafts.number.shape[1]
        first = drafts.number[:, 0]
        if self.rule.verify == "parallel":
            z = self.conditions.from_prefix(self.tokens[row], row, first, drafts.number, drafts.number, self.most)
            return z.flatten(0, 1), None
        following = self.conditions.following
        if tries == 1:
            z = following(drafts.values, row, first, gamma + 1, self.most)
        else:  # several first tokens share a condition
            firsts = slice(None, None, tries)
            z = following(drafts.values[firsts], row[firsts], first[firsts], 1, self.most).repeat_interleave(tries, 0)
            z = torch.cat([z, following(drafts.values, row, first + 1, gamma, self.most + 1)], 1)
        return z[:, :gamma].flatten(0, 1), z if self.rule.on_reject == "stop" else None

    def _compare(self, verifier: Verifier, drafts: Drafts, z: Tensor, z_after: Tensor | None) -> Compared:
        """Compare drafts with the target."""
        shape = drafts.valid.shape
        image = drafts.row.repeat_interleave(shape[1])
        key = keyed(drafts.number.clamp_max(self.length - 1), drafts.series[:, None], self.length).flatten()
        log_ratio, target_paths, sigma = verifier.log_ratios(drafts.paths, z, partial(self.noise, image, key))
        self._record_faults(log_ratio[:, None], image, drafts.valid.flatten(), by_target=True)
        u = self.rng.rows(image).uniform(key, ACCEPT, 1).view(shape).double()
        return Compared(drafts, z, z_after, log_ratio.view(shape), target_paths, sigma, u)

    def _verify(self, verifier: Verifier, compared: Compared) -> tuple[Compared, Tensor, Tensor]:
        """Verify drafts and commit the resulting tokens. Returns the drafts that were followed, one per image; which of
        their tokens were accepted (A, gamma); and how far every image advances."""
        first = compared.log_ratio[:: self.rule.tries, 0].clamp_max(0).exp()
        compared, others, result = decide(verifier, compared, self.rng, self.length)
        drafts = compared.drafts
        row, token = drafts.row, drafts.paths.token.clone()
        if (new := result.new) is not None:
            replaced, images = result.replaced.flatten()[new.at], row[new.at // drafts.valid.shape[1]]
            self._record_faults(new.token, images, replaced, by_target=True)
            token[new.at] = torch.where(replaced[:, None], new.token, token[new.at])
            number = drafts.number.flatten()[new.at].clamp_max(self.length - 1)
            self.proposals[images, torch.where(replaced, number, self.length)] = new.proposals
            self.fallbacks.index_add_(0, images, (new.exhausted & replaced).long())
        positions = torch.where(result.kept | result.replaced, self.order.at(row, drafts.number), self.length)
        self.tokens[row[:, None], positions] = token.view(*positions.shape, -1)
        self.step_stats = _StepStats(drafts, result.kept, result.verified, first, others)
        return compared, result.kept, result.advance + (result.advance < drafts.room)

    def _draw_bonus(self, compared: Compared, kept: Tensor) -> None:
        """Draw the bonus token after a fully accepted draft."""
        drafts, z = compared.drafts, compared.z_after
        complete = (kept.sum(1) == drafts.room) & (self.num_committed[drafts.row] < self.length)
        index = self._needed(complete)
        if z is not None and len(index):
            row, needed = drafts.row[index], complete[index]
            z = take(z[index], drafts.room[index][:, None])[:, 0]
            self._draw(z, row, torch.where(needed, self.num_committed[row], self.length))
            self.num_committed[row] += needed

    def _needed(self, mask: Tensor) -> Tensor:
        """Indices where `mask` (n,) is true; all indices where reading the device's values costs time."""
        return mask.nonzero().flatten() if self.compact else torch.arange(len(mask), device=self.device)

    def record(self, stats: _StepStats) -> None:
        drafts, kept, verified, first = stats.drafts, stats.kept, stats.verified, stats.first
        row, start = drafts.row, drafts.number[:, 0]
        step = torch.where(drafts.room > 0, self.passes[row] - 1, self.length)
        for of_step, values in zip(
            self.by_step, (kept.sum(1), drafts.room, first, start, verified.sum(1)), strict=True
        ):
            of_step[row, step] = values.float()
        self.accepted[row] += kept.sum(1)
        self.drafted[row] += verified.sum(1) + stats.others
        number = drafts.number.clamp_max(self.length)
        for recorded, flags in ((self.kept, kept), (self.verified, verified)):
            recorded[row] = recorded[row].scatter(1, number, flags)

    def _draw(self, z: Tensor, row: Tensor, number: Tensor) -> None:
        """The target draws the tokens `number` (n,) itself."""
        noise = self.noise(row, keyed(number, self.series(row), self.length), NOISE)
        path = draw_trajectory(self.target, z, noise, self.rule, self.engine)
        self._record_faults(path.token, row, number < self.length, by_target=True)
        self.tokens[row, self.order.position[row, number]] = path.token

    def _record_faults(self, x: Tensor, row: Tensor, needed: Tensor, by_target: bool) -> None:
        """Record the images `row` (n,) whose values x (n, *) are not finite, where they are `needed` (n,) bool."""
        fault = torch.where(needed & ~x.isfinite().all(1), 2 * self.passes[row] + by_target, _NO_FAULT)
        self.fault.scatter_reduce_(0, row, fault, "amin")

    def result(self, seconds: float, rows: list[int] | None = None) -> Decoded[ContinuousTrace]:
        """The drafting time covers the steps since the last call."""
        draft_s = sum(parts["draft"] for parts in self.drafting.seconds())
        self.drafting = Clock(self.device)
        chosen = slice(None) if rows is None else torch.tensor(rows, device=self.device)

        def select(x: Tensor) -> Tensor:
            return x[chosen][:, : self.length].clone() if x.dim() > 1 else x[chosen].clone()

        by_step = {name: select(x) for name, x in zip(_BY_STEP, self.by_step, strict=True)}
        trace = ContinuousTrace(
            **{name: x if name == "first" else x.long() for name, x in by_step.items()},
            order=select(self.order.position),
            kept=select(self.kept),
            verified=select(self.verified),
            proposals=[[count for count in row if count] for row in select(self.proposals).tolist()],
            fallbacks=select(self.fallbacks),
            draft_s=draft_s,
            made=select(self.made),
        )
        tokens, passes, drafted, accepted = map(select, (self.tokens, self.passes, self.drafted, self.accepted))
        return Decoded(tokens, passes, drafted, accepted, seconds, trace)
