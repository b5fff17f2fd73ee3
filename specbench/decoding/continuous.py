"""Continuous speculative decoding (Wang et al. 2024, arXiv 2411.11925): tokens are vectors, laws are densities.

A target such as MAR fills an image token by token in an order of its own, and a diffusion head draws each token: from
x_T, normal, through x_{t-1} ~ N(mean_t(x_t), var_t(x_t)), to x_0. A smaller model drafts `gamma` tokens, and the target
judges them in one pass; vanilla decoding is the same loop with gamma = 0.

What makes a draft acceptable (ERRATA, CSpD). `criterion="exact"`: the two trajectories share their noises down to x_1,
so that a token is judged by p(x_0 | x_1^p) / q(x_0 | x_1^q). `criterion="paper"`: the same times the factor Sigma of
Eqs. 4 and 5, which biases the law. `criterion="path"`: Eq. 1 taken literally, the ratio of the whole trajectory's
densities under the two models; it is exact as well, and the target needs no trajectory of its own to judge one, only
the moments along the draft's, all of them in one call. All arithmetic is in log densities.

Only `verify="causal"` (the target's law of a token sees the drafted ones before it) with `on_reject="stop"` is exact.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from specbench.decoding.loop import Decoded, synchronize
from specbench.decoding.sampling import Streams
from specbench.engine.clock import Clock, Idle
from specbench.engine.graph import Eager, Graphs
from specbench.engine.ops import take
from specbench.errors import NumberError, UsageError

CRITERIA = ("exact", "paper", "path")
VERIFY = ("causal", "parallel")
ON_REJECT = ("stop", "continue")

# Purposes of an image's random numbers; they are keyed by a token's place in the order, not by the step, so that a
# draft, its verification and vanilla decoding share them.
_ORDER, _NOISE, _OWN_NOISE, _ACCEPT, _RETRY = range(5)
_TRIES = 1000  # room for the tries of a residual

#: Rows of a network that are computed at once, and of its head, which is small.
CHUNK = 512
_HEAD_ROWS = 16 * CHUNK


class Session(Protocol):
    """A masked autoregressive model, opened for B images."""

    def condition(self, tokens: Tensor, known: Tensor, row: Tensor, place: Tensor, done: Tensor) -> Tensor:
        """What the head draws a token from, z (R, n, E), for the places (R, n) of R copies of images `row` (R,), whose
        tokens (R, L, D) are known where `known` (R, L) bool says so; done (R, n): how many tokens come before."""
        ...

    def moments(self, x: Tensor, index: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n, D) and log variance (n, D) of the next state, from states x (n, D) at step index (n,) int64, the
        last one 0, under z (n, E)."""
        ...

    def sampler(self, z: Tensor) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
        """`moments` of states that are all at one step, asked for from the first step down to 0, under z that stays; a
        model that can compute something once for all steps has its own."""
        return lambda x, t: self.moments(x, torch.full((len(x),), t, device=x.device), z)

    @property
    def head(self) -> Any:
        """What `sampler` computes with, beside z: sessions that have it in common share recorded trajectories."""
        return self


class Model(Protocol):
    """length: tokens L of an image; dim: numbers D of a token; steps: T of the diffusion head."""

    length: int
    dim: int
    steps: int

    def open(self, conditioning: Any, rows: int) -> Session: ...


@dataclass(frozen=True)
class Rule:
    """How drafts are made and judged.

    turns: how many tokens the target draws in each pass when it draws alone; empty is one (MAR draws several at once,
    independently of each other, which is another law). gamma: tokens a draft; prefill: share of the image that the
    target draws alone beforehand; align: the two models
    share their noises (of `exact` and `paper`); inner_temperature: divides the distance from a mean before densities
    are compared (the released code's 42; 1 is off); tries: at most so many proposals for a residual, after which the
    last one, a sample of the target, is taken; temperature: of every step's noise, but not of x_T; final_noise: the
    last step is drawn too, as a density needs it. MAR's own sampler ends with a mean.
    """

    turns: tuple[int, ...] = ()
    gamma: int = 0
    prefill: float = 0.0
    align: bool = True
    criterion: str = "exact"
    verify: str = "causal"
    on_reject: str = "stop"
    inner_temperature: float = 1.0
    tries: int = 100
    temperature: float = 1.0
    final_noise: bool = True

    def __post_init__(self) -> None:
        for name, choices in (("criterion", CRITERIA), ("verify", VERIFY), ("on_reject", ON_REJECT)):
            if getattr(self, name) not in choices:
                raise UsageError(f"{name}={getattr(self, name)} is unknown (choose from: {', '.join(choices)})")
        if self.gamma and self.turns:
            raise UsageError("a draft is judged token by token: use iterations=null with it")
        if self.gamma and self.temperature == 0:
            raise UsageError(
                "temperature=0 leaves no densities to compare; use method=vanilla, or a temperature above 0"
            )
        if self.gamma and self.criterion == "path" and not self.final_noise:
            raise UsageError("criterion=path needs a density of the last step, too: use final_noise=true")
        if self.tries > _TRIES:
            raise UsageError(f"tries must be at most {_TRIES} (got {self.tries})")

    @property
    def exact(self) -> bool:
        """Whether the tokens have the target's law."""
        if self.gamma == 0:
            return True
        plain = self.inner_temperature == 1 and self.final_noise and self.criterion in ("exact", "path")
        return plain and self.verify == "causal" and self.on_reject == "stop"


@dataclass
class Trace:
    """What the loop saw. accepted, offered, first, start, reach (B, L), by step, zero beyond `steps`: draft tokens
    accepted, draft tokens that could be verified, the probability with which the first was kept, its turn, and how many
    were judged.

    order (B, L): the places of the tokens in the order in which they were drawn. kept, judged (B, L) bool, in that
    order: whether a token was an accepted draft, and whether a draft was judged for it. tries: of every residual that
    was sampled, the number of proposals, by image; fallbacks (B,): residuals for which they did not suffice. draft_s:
    seconds spent on drafting; made (B,): tokens drafted, those that were never judged included.
    """

    accepted: Tensor
    offered: Tensor
    first: Tensor
    start: Tensor
    reach: Tensor
    order: Tensor
    kept: Tensor
    judged: Tensor
    tries: list[list[int]]
    fallbacks: Tensor
    draft_s: float
    made: Tensor


def normal(streams: Streams, number: Tensor, purpose: int, *shape: int) -> Tensor:
    """Standard normal numbers (rows, *shape) float32, by inversion of uniforms; `number` (rows,) as Streams' step."""
    return torch.special.ndtri(streams.uniform(number, purpose, *shape) + 2.0**-24)


def log_normal(x: Tensor, mean: Tensor, log_variance: Tensor, temperature: float, inner: float = 1.0) -> Tensor:
    """Log density (...) float64 of x (..., D) under independent normals whose spread is `temperature` times as wide;
    `inner` divides the distance from the mean."""
    log_spread = 0.5 * log_variance.double() + math.log(temperature)
    distance = (x.double() - mean.double()) * torch.exp(-log_spread) / inner
    return (-0.5 * distance**2 - log_spread - 0.5 * math.log(2 * math.pi)).sum(-1)


@dataclass
class Path:
    """Trajectories of n tokens: states (n, T + 1, D), x_0 first; mean and log_variance (n, T, D) of every step, the
    last step first: those that states[:, t] was drawn from."""

    states: Tensor
    mean: Tensor
    log_variance: Tensor

    @property
    def token(self) -> Tensor:
        return self.states[:, 0]

    def rows(self, index: Tensor) -> Path:
        return Path(self.states[index], self.mean[index], self.log_variance[index])

    @classmethod
    def stacked(cls, paths: Sequence[Path]) -> Path:
        """Those of gamma turns of A images, an image's one after the other."""
        columns = zip(*((p.states, p.mean, p.log_variance) for p in paths), strict=True)
        return cls(*(torch.stack(column, 1).flatten(0, 1) for column in columns))


def trajectory(session: Session, z: Tensor, noise: Tensor, rule: Rule, engine: Eager | Graphs) -> Path:
    """Draw tokens under z (n, E); noise (n, T + 1, D): of x_T last, of the last step first."""
    drawn = partial(_drawn, session, rule.temperature, rule.final_noise)
    of = (session.head, rule.temperature, rule.final_noise)
    parts = [engine.call(of, drawn, *some) for some in zip(z.split(_HEAD_ROWS), noise.split(_HEAD_ROWS), strict=True)]
    return Path(*(column[0] if len(column) == 1 else torch.cat(column) for column in zip(*parts, strict=True)))


def _drawn(session: Session, temperature: float, final_noise: bool, z: Tensor, noise: Tensor) -> list[Tensor]:
    """The fields of a `Path`."""
    steps, moments = noise.shape[1] - 1, session.sampler(z)
    x = noise[:, steps]
    states, means, variances = [x], [], []
    for t in range(steps - 1, -1, -1):
        mean, log_variance = moments(x, t)
        x = mean
        if t > 0 or final_noise:
            x = mean + noise[:, t] * torch.exp(0.5 * log_variance) * temperature
        states.append(x)
        means.append(mean)
        variances.append(log_variance)
    return [torch.stack(values[::-1], 1) for values in (states, means, variances)]


def path_density(session: Session, path: Path, z: Tensor, rule: Rule) -> Tensor:
    """Log density (n,) of whole trajectories under a model's z (n, E), given x_T."""
    n, after, dim = path.states.shape
    index = torch.arange(after - 1, device=z.device).expand(n, -1).flatten()
    wide = z.unsqueeze(1).expand(-1, after - 1, -1).flatten(0, 1)
    states = path.states[:, 1:].flatten(0, 1)
    parts = zip(states.split(_HEAD_ROWS), index.split(_HEAD_ROWS), wide.split(_HEAD_ROWS), strict=True)
    mean, log_variance = map(torch.cat, zip(*(session.moments(*part) for part in parts), strict=True))
    shape = (n, after - 1, dim)
    return log_normal(path.states[:, :-1], mean.view(shape), log_variance.view(shape), rule.temperature).sum(-1)


def own_density(path: Path, rule: Rule) -> Tensor:
    """Log density (n,) of trajectories under the model that drew them, given x_T."""
    return log_normal(path.states[:, :-1], path.mean, path.log_variance, rule.temperature).sum(-1)


class _Judge:
    """Compares the two models' laws of drafted tokens, and samples residuals."""

    def __init__(
        self, target: Session, drafter: Session, rule: Rule, noise: Callable[..., Tensor], engine: Eager | Graphs
    ) -> None:
        self.target, self.drafter, self.rule, self.noise, self.engine = target, drafter, rule, noise, engine

    def weigh(self, drafts: Path, z: Tensor, row: Tensor, number: Tensor) -> tuple[Tensor, Path | None, Tensor]:
        """log p / q (n,) of drafted tokens, the target's own trajectories where the criterion needs them, and
        log Sigma (n,). z (n, E): the target's; row (n,) and number (n,): the images and the tokens' place in the
        order."""
        rule = self.rule
        none = torch.zeros(len(z), dtype=torch.float64, device=z.device)
        if rule.criterion == "path":
            return path_density(self.target, drafts, z, rule) - own_density(drafts, rule), None, none
        shared = self.noise(row, number, _NOISE if rule.align else _OWN_NOISE)
        own = trajectory(self.target, z, shared, rule, self.engine)
        sigma = none
        if rule.criterion == "paper":
            sigma = 0.5 * (drafts.log_variance[:, 1:].double() - own.log_variance[:, 1:].double()).sum((1, 2))
        return self._last(drafts.token, own, drafts) + sigma, own, sigma

    def _last(self, x: Tensor, own: Path, drafts: Path) -> Tensor:
        """log p(x_0 | x_1^p) - log q(x_0 | x_1^q)."""
        rule = self.rule
        p = log_normal(x, own.mean[:, 0], own.log_variance[:, 0], rule.temperature, rule.inner_temperature)
        q = log_normal(x, drafts.mean[:, 0], drafts.log_variance[:, 0], rule.temperature, rule.inner_temperature)
        return p - q

    def residual(
        self,
        drafts: Path,
        own: Path | None,
        sigma: Tensor,
        z: Tensor,
        z_draft: Tensor,
        streams: Streams,
        number: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (n, D) from Norm([p - q]_+) by acceptance-rejection with the target as proposal (Eq. 10): keep a
        proposal with max(0, 1 - q / p). Also the number of proposals (n,) of each, and which (n,) were taken for want
        of further tries."""
        rule, n = self.rule, len(z)
        token = torch.zeros_like(drafts.token)
        tries = torch.zeros(n, dtype=torch.int64, device=z.device)
        left = torch.arange(n, device=z.device)
        for attempt in range(rule.tries):
            some = streams.rows(left)
            purpose = _RETRY + 2 * attempt
            steps, dim = drafts.states.shape[1] - 1, token.shape[1]
            if own is None:
                noise = normal(some, number[left], purpose, steps + 1, dim)
                path = trajectory(self.target, z[left], noise, rule, self.engine)
                gain = own_density(path, rule) - path_density(self.drafter, path, z_draft[left], rule)
                x = path.token
            else:
                mine, theirs = own.rows(left), drafts.rows(left)
                spread = torch.exp(0.5 * mine.log_variance[:, 0]) * rule.temperature
                x = mine.mean[:, 0] + normal(some, number[left], purpose, dim) * spread
                gain = self._last(x, mine, theirs) + sigma[left]
            u = some.uniform(number[left], purpose + 1, 1)[:, 0].double()
            kept = u < -torch.expm1(-gain)  # 1 - q / p; negative where q > p
            token[left] = x
            tries[left] += 1
            left = left[~kept]
            if not len(left):
                break
        short = torch.zeros(n, dtype=torch.bool, device=z.device)
        short[left] = True
        return token, tries, short


@torch.inference_mode()
def decode(
    model: Model,
    drafter: Model | None,
    rule: Rule,
    conditioning: Any,
    streams: Streams,
    clock: Clock | Idle | None = None,
    engine: Eager | Graphs | None = None,
) -> Decoded[Trace]:
    """Decode one image per row of `streams`; tokens (B, L, D) float32, by place. `clock` is told of the parts of every
    pass: draft, forward (of the target's places), verify, and head, the tokens that the target draws itself. `engine`
    executes the trajectories of the heads. Raises NumberError where a number is not finite."""
    if rule.gamma and drafter is None:
        raise UsageError("a draft length needs a drafter: a smaller model of the target's tokens")
    like = (model.length, model.dim, model.steps)
    if drafter is not None and (drafter.length, drafter.dim, drafter.steps) != like:
        raise UsageError("the drafter's tokens or diffusion steps differ from the target's")
    device, rows = streams.key.device, len(streams)
    synchronize(device)
    began = time.perf_counter()
    target = model.open(conditioning, rows)
    own = drafter.open(conditioning, rows) if drafter is not None and rule.gamma else None
    engine = engine or Eager()
    images = _Images(model, streams, rule, clock or Idle(), engine)
    before = model.length if own is None else math.ceil(round(rule.prefill * model.length, 6))
    for share in rule.turns or (1,) * before:
        images.alone(target, share)
    if own is not None:
        judge = _Judge(target, own, rule, images.noise, engine)
        while len(row := (images.count < model.length).nonzero().flatten()):
            images.step(judge, row)
    synchronize(device)
    seconds = time.perf_counter() - began
    return Decoded(images.tokens, images.passes, images.drafted, images.accepted, seconds, images.trace())


@dataclass
class _Drafts:
    """Drafts of A images: `row` (A,) of the batch; turns `number` (A, gamma), of which those inside the image are
    `valid`, `room` (A,) in number; values (A, L, D) of all places, the drafts among them; the trajectories and z of the
    drafter, of A * gamma tokens."""

    row: Tensor
    number: Tensor
    valid: Tensor
    room: Tensor
    values: Tensor
    paths: Path
    z: Tensor


class _Images:
    """B images on their way: tokens (B, L, D) by place, and how many are committed, `count` (B,). A token's number is
    its turn in `order` (B, L)."""

    def __init__(self, model: Model, streams: Streams, rule: Rule, clock: Clock | Idle, engine: Eager | Graphs) -> None:
        self.streams, self.rule, self.clock, self.engine = streams, rule, clock, engine
        self.length, self.dim, self.steps = model.length, model.dim, model.steps
        self.device, rows = streams.key.device, len(streams)
        start = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.order = streams.uniform(start, _ORDER, self.length).argsort(dim=-1, stable=True)
        self.rank = self.order.argsort(-1)  # a place's turn
        self.everything = torch.arange(rows, device=self.device)
        self.tokens = torch.zeros(rows, self.length, self.dim, device=self.device)
        self.count, self.passes, self.drafted, self.accepted, self.fallbacks, self.made = (
            torch.zeros_like(start) for _ in range(6)
        )
        self.seen = torch.zeros(5, rows, self.length, device=self.device)  # the first five of a trace
        self.kept, self.judged = (torch.zeros(rows, self.length, dtype=torch.bool, device=self.device) for _ in "ab")
        self.tries: list[list[int]] = [[] for _ in range(rows)]
        self.draft_s = 0.0

    def noise(self, row: Tensor, number: Tensor, purpose: int) -> Tensor:
        """Of whole trajectories: (n, T + 1, D)."""
        return normal(self.streams.rows(row), number, purpose, self.steps + 1, self.dim)

    def place(self, row: Tensor, number: Tensor) -> Tensor:
        """Where the tokens of turns `number` (n, k) lie; beyond the end, the last one's."""
        return self.order[row].gather(1, number.clamp_max(self.length - 1))

    def alone(self, target: Session, share: int) -> None:
        """The target draws the next tokens of all images, `share` of them in one pass."""
        self.clock.begin()
        number = self.count[:, None] + torch.arange(share, device=self.device)
        done = (self.count[:, None] + (share - 1)).expand(-1, share)
        z = self._see(target, self.tokens, self.everything, self.count, number, done)
        self.clock.lap("forward")
        row = self.everything.repeat_interleave(share)
        self.passes += 1
        self._draw(target, z.flatten(0, 1), row, number.flatten())
        self.count += share
        self.clock.lap("head")

    def step(self, judge: _Judge, row: Tensor) -> None:
        """Draft tokens of the images `row` (A,), judge them, and commit what that comes to."""
        self.clock.begin()
        self.passes[row] += 1
        drafts = self._draft(judge.drafter, row)
        self.clock.lap("draft")
        z, behind = self._look(judge.target, drafts)
        self.clock.lap("forward")
        kept, advance = self._verify(judge, drafts, z)
        self.count[row] += advance
        self.clock.lap("verify")
        if behind is None:
            return
        # A whole draft kept: the token behind it is free.
        whole = ((kept.sum(1) == drafts.room) & (self.count[row] < self.length)).nonzero().flatten()
        if len(whole):
            free = take(behind[whole], drafts.room[whole][:, None])[:, 0]
            self._draw(judge.target, free, row[whole], self.count[row[whole]])
            self.count[row[whole]] += 1
        self.clock.lap("head")

    def _draft(self, drafter: Session, row: Tensor) -> _Drafts:
        """Tokens one after the other, each seeing the ones before."""
        began = time.perf_counter()
        first = self.count[row]
        room = (self.length - first).clamp_max(self.rule.gamma)
        lane = torch.arange(int(room.max()), device=self.device)
        number, valid = first[:, None] + lane, lane < room[:, None]
        values, mine = self.tokens[row], torch.arange(len(row), device=self.device)
        paths, z_all = [], []
        for i in range(len(lane)):
            at = number[:, i : i + 1]
            z = self._see(drafter, values, row, number[:, i], at, at)[:, 0]
            path = trajectory(drafter, z, self.noise(row, number[:, i], _NOISE), self.rule, self.engine)
            self._finite(path.token, row, "the drafter")
            inside = valid[:, i]
            values[mine[inside], self.order[row[inside], number[inside, i]]] = path.token[inside]
            paths.append(path)
            z_all.append(z)
        synchronize(self.device)
        self.draft_s += time.perf_counter() - began
        self.made[row] += room
        return _Drafts(row, number, valid, room, values, Path.stacked(paths), torch.stack(z_all, 1).flatten(0, 1))

    def _look(self, target: Session, drafts: _Drafts) -> tuple[Tensor, Tensor | None]:
        """The target's z (A * gamma, E) of drafted tokens; and, where each sees the ones before it, (A, gamma + 1, E)
        with the one behind the draft."""
        row, gamma = drafts.row, drafts.number.shape[1]
        first = drafts.number[:, 0]
        if self.rule.verify == "parallel":
            z = self._see(target, self.tokens[row], row, first, drafts.number, drafts.number)
            return z.flatten(0, 1), None
        # A copy of the image for every token, and one for the token behind the draft.
        copies = (first[:, None] + torch.arange(gamma + 1, device=self.device)).flatten()
        wide, values = row.repeat_interleave(gamma + 1), drafts.values.repeat_interleave(gamma + 1, 0)
        z = self._see(target, values, wide, copies, copies[:, None], copies[:, None]).view(len(row), gamma + 1, -1)
        return z[:, :gamma].flatten(0, 1), z if self.rule.on_reject == "stop" else None

    def _verify(self, judge: _Judge, drafts: _Drafts, z: Tensor) -> tuple[Tensor, Tensor]:
        """Judge drafts and commit the tokens that stand; which drafts were kept (A, gamma), and how far every image
        is."""
        row, room, valid = drafts.row, drafts.room, drafts.valid
        shape, gamma = valid.shape, valid.shape[1]
        wide = row.repeat_interleave(gamma)
        number = drafts.number.flatten().clamp_max(self.length - 1)
        gain, own, sigma = judge.weigh(drafts.paths, z, wide, number)
        self._finite(torch.where(valid.flatten(), gain, 0.0)[:, None], wide, "the target")
        chance = gain.clamp_max(0).exp().view(shape)
        u = self.streams.rows(wide).uniform(number, _ACCEPT, 1).view(shape).double()
        kept = (u < chance) & valid
        judged, advance = valid, room
        if self.rule.on_reject == "stop":
            advance = kept.long().cumprod(1).sum(1)
            lane = torch.arange(gamma, device=self.device)
            judged, kept = (lane <= advance[:, None]) & valid, lane < advance[:, None]
        at = self.place(row, drafts.number).flatten()
        good = kept.flatten().nonzero().flatten()
        self.tokens[wide[good], at[good]] = drafts.paths.token[good]
        bad = (judged & ~kept).flatten().nonzero().flatten()
        if len(bad):
            path = own.rows(bad) if own is not None else None
            streams = self.streams.rows(wide[bad])
            new, tries, short = judge.residual(
                drafts.paths.rows(bad), path, sigma[bad], z[bad], drafts.z[bad], streams, number[bad]
            )
            self._finite(new, wide[bad], "the target")
            self.tokens[wide[bad], at[bad]] = new
            self.fallbacks.index_add_(0, wide[bad], short.long())
            for image, count in zip(wide[bad].tolist(), tries.tolist(), strict=True):
                self.tries[image].append(count)
            if self.rule.on_reject == "stop":
                advance = advance + (advance < room)
        self._note(drafts, kept, judged, chance[:, 0])
        return kept, advance

    def _note(self, drafts: _Drafts, kept: Tensor, judged: Tensor, chance: Tensor) -> None:
        row, first = drafts.row, drafts.number[:, 0]
        step = (self.passes[row] - 1).clamp_max(self.length - 1)
        for i, values in enumerate((kept.sum(1), drafts.room, chance, first, judged.sum(1))):
            self.seen[i, row, step] = values.float()
        self.accepted[row] += kept.sum(1)
        self.drafted[row] += judged.sum(1)
        turn = drafts.number.clamp_max(self.length - 1)
        for at, flags in ((self.kept, kept), (self.judged, judged)):
            at[row] = at[row].scatter_reduce(1, turn, flags, "amax")

    def _see(
        self, session: Session, values: Tensor, row: Tensor, known: Tensor, number: Tensor, done: Tensor
    ) -> Tensor:
        """z (n, k, E) of the tokens of turns `number` (n, k) in images `row` (n,), the first `known` (n,) turns being
        known; done (n, k): how far the image is, for guidance."""
        parts = []
        for begin in range(0, len(row), CHUNK):
            part = slice(begin, begin + CHUNK)
            told = self.rank[row[part]] < known[part, None]
            at = self.place(row[part], number[part])
            parts.append(session.condition(values[part], told, row[part], at, done[part]))
        return torch.cat(parts)

    def _draw(self, target: Session, z: Tensor, row: Tensor, number: Tensor) -> None:
        """The target's own tokens (n,) of turns `number` (n,)."""
        path = trajectory(target, z, self.noise(row, number, _NOISE), self.rule, self.engine)
        self._finite(path.token, row, "the target")
        self.tokens[row, self.order[row, number]] = path.token

    def _finite(self, x: Tensor, row: Tensor, who: str) -> None:
        if not x.isfinite().all():
            bad = int(row[(~x.isfinite()).flatten(1).any(1).nonzero()[0, 0]])
            raise NumberError(
                f"{who} gave a number that is not finite for the image of (seed, index) {self.streams.keys[bad]},"
                f" step {int(self.passes[bad])}: lower cfg_scale or raise the precision (dtype=float32)"
            )

    def trace(self) -> Trace:
        accepted, offered, first, start, reach = self.seen
        return Trace(
            accepted=accepted.long(),
            offered=offered.long(),
            first=first,
            start=start.long(),
            reach=reach.long(),
            order=self.order,
            kept=self.kept,
            judged=self.judged,
            tries=self.tries,
            fallbacks=self.fallbacks,
            draft_s=self.draft_s,
            made=self.made,
        )
