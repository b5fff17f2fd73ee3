"""Continuous speculative decoding (Wang et al. 2024, arXiv 2411.11925): continuous tokens, distributions as densities.

A target such as MAR fills an image token by token in its own order of generation, and a diffusion head draws each
token: from x_T, normal, through x_{t-1} ~ N(mean_t(x_t), var_t(x_t)), to x_0. A smaller model drafts `gamma` tokens,
and the target verifies them in one pass; vanilla decoding is the same loop with gamma = 0.

Acceptance criteria (ERRATA, CSpD). `criterion="exact"`: the two trajectories share their noises down to x_1, so that
a token is verified by p(x_0 | x_1^p) / q(x_0 | x_1^q). `criterion="paper"`: the same times the factor Sigma of Eqs. 4
and 5, which biases the distribution. `criterion="path"`: Eq. 1 taken literally, the ratio of the whole trajectory's
densities under the two models; it is exact as well, and the target needs no trajectory of its own to verify one, only
the moments along the draft's, all of them in one call. All arithmetic is in log densities.

Only `verify="causal"` (the target's distribution of a token is conditioned on the drafted ones before it) with
`on_reject="stop"` is exact.

On the CPU a pass computes what it needs. Elsewhere the host does not synchronize to find out what that is: a pass
computes what every image could need, and writes the surplus to a position that is never read. The images are the same.
(A residual by `criterion="path"` synchronizes on every device: each of its tries is a trajectory.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.decoding.loop import Decoded, Images, synchronize
from specbench.decoding.rng import RandomStreams
from specbench.engine.clock import Clock, Idle
from specbench.engine.graph import Eager, Graphs
from specbench.engine.ops import take
from specbench.errors import NumberError, UsageError

CRITERIA = ("exact", "paper", "path")
VERIFY = ("causal", "parallel")
ON_REJECT = ("stop", "continue")

# Purposes of an image's random numbers; they are keyed by a token's index in the order of generation, not by the step,
# so that a draft, its verification and vanilla decoding share them.
_ORDER, _NOISE, _OWN_NOISE, _ACCEPT, _RETRY = range(5)
_TRIES = 1000  # room for the tries of a residual
_AT_ONCE = 100  # of them, where each is a last step alone

_NO_FAULT = 2**62

#: Rows of a network that are computed at once, and of its head, which is small.
CHUNK = 512
_HEAD_ROWS = 16 * CHUNK


class ContinuousSession(Protocol):
    """A masked autoregressive model, opened for B images."""

    def condition(self, tokens: Tensor, known: Tensor, row: Tensor, place: Tensor, done: Tensor, most: int) -> Tensor:
        """The conditioning of the head, z (R, n, E), for the positions `place` (R, n) of R copies of images `row`
        (R,), whose tokens (R, L, D) are known where `known` (R, L) bool is true, `most` of a copy or fewer; done
        (R, n): how many tokens come before."""
        ...

    def moments(self, x: Tensor, index: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n, D) and log variance (n, D) of the next state, from states x (n, D) at step index (n,) int64, the
        last one 0, under z (n, E)."""
        ...

    def sampler(self, z: Tensor) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
        """`moments` of states that are all at one step, called from the first step down to 0, under constant z; a
        model that can compute something once for all steps overrides it."""
        return lambda x, t: self.moments(x, torch.full((len(x),), t, device=x.device), z)

    @property
    def head(self) -> Any:
        """What `sampler` computes with, apart from z: sessions with the same head share recorded trajectories."""
        return self


class ContinuousModel(Protocol):
    """length: tokens L of an image; dim: numbers D of a token; steps: T of the diffusion head."""

    length: int
    dim: int
    steps: int

    def open(self, conditioning: Any, rows: int) -> ContinuousSession: ...


@dataclass(frozen=True)
class ContinuousRule:
    """How drafts are made and verified.

    turns: how many tokens the target draws in each pass when it draws alone; empty is one (MAR draws several at once,
    independently of each other, which is another distribution). gamma: tokens per draft; prefill: share of the image
    that the target draws alone beforehand; align: the two models share their noises (of `exact` and `paper`);
    inner_temperature: divides the distance from a mean before densities are compared (the released code's 42; 1 is
    off); tries: the most proposals for a residual, after which the last one, a sample of the target, is taken;
    temperature: of every step's noise, but not of x_T; final_noise: the last step is drawn too, since a density needs
    it. MAR's own sampler ends with a mean.
    """

    tokens_per_pass: tuple[int, ...] = ()
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
        if self.gamma and self.tokens_per_pass:
            raise UsageError("a draft is verified token by token: use iterations=null with it")
        if self.gamma and self.temperature == 0:
            raise UsageError(
                "temperature=0 leaves no densities to compare; use method=vanilla, or a temperature above 0"
            )
        if self.gamma and self.criterion == "path" and not self.final_noise:
            raise UsageError("criterion=path also needs a density of the last step: use final_noise=true")
        if self.tries > _TRIES:
            raise UsageError(f"tries must be at most {_TRIES} (got {self.tries})")

    @property
    def exact(self) -> bool:
        """Whether the tokens have the target's distribution."""
        if self.gamma == 0:
            return True
        plain = self.inner_temperature == 1 and self.final_noise and self.criterion in ("exact", "path")
        return plain and self.verify == "causal" and self.on_reject == "stop"


@dataclass
class ContinuousTrace:
    """Per-step statistics. accepted, offered, first, start, reach (B, L), by step, zero beyond `steps`: draft tokens
    accepted, draft tokens that could be verified, the probability with which the first was kept, its index in the order
    of generation, and how many were verified.

    order (B, L): the positions of the tokens in the order of generation. kept, judged (B, L) bool, in that order:
    whether a token was an accepted draft, and whether a draft was verified for it. tries: of every residual that was
    sampled, the number of proposals, by image; fallbacks (B,): residuals for which they did not suffice. draft_s:
    seconds spent on drafting; made (B,): tokens drafted, including those that were never verified.
    """

    accepted: Tensor
    offered: Tensor
    first: Tensor
    start: Tensor
    reach: Tensor
    order: Tensor
    kept: Tensor
    verified: Tensor
    tries: list[list[int]]
    fallbacks: Tensor
    draft_s: float
    made: Tensor


def _asks(device: torch.device) -> bool:
    """Whether reading a device's values costs nothing."""
    return device.type == "cpu"


def normal(rng: RandomStreams, number: Tensor, tag: int, *shape: int) -> Tensor:
    """Standard normal numbers (rows, *shape) float32, by inversion of uniforms; `number` (rows,) as Streams' step."""
    return _inverted(rng.uniform(number, tag, *shape))


def _inverted(u: Tensor) -> Tensor:
    return torch.special.ndtri(u + 2.0**-24)


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
        """The trajectories of gamma drafted tokens of A images, those of one image next to each other."""
        columns = zip(*((p.states, p.mean, p.log_variance) for p in paths), strict=True)
        return cls(*(torch.stack(column, 1).flatten(0, 1) for column in columns))


def trajectory(
    session: ContinuousSession, z: Tensor, noise: Tensor, rule: ContinuousRule, engine: Eager | Graphs
) -> Path:
    """Draw tokens under z (n, E); noise (n, T + 1, D): of x_T last, of the last step first."""
    drawn = partial(_drawn, session, rule.temperature, rule.final_noise)
    of = (session.head, rule.temperature, rule.final_noise)
    parts = [engine.call(of, drawn, *some) for some in zip(z.split(_HEAD_ROWS), noise.split(_HEAD_ROWS), strict=True)]
    return Path(*(column[0] if len(column) == 1 else torch.cat(column) for column in zip(*parts, strict=True)))


def _drawn(session: ContinuousSession, temperature: float, final_noise: bool, z: Tensor, noise: Tensor) -> list[Tensor]:
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


def path_density(session: ContinuousSession, path: Path, z: Tensor, rule: ContinuousRule) -> Tensor:
    """Log density (n,) of complete trajectories under a model's z (n, E), given x_T."""
    n, after, dim = path.states.shape
    index = torch.arange(after - 1, device=z.device).expand(n, -1).flatten()
    wide = z.unsqueeze(1).expand(-1, after - 1, -1).flatten(0, 1)
    states = path.states[:, 1:].flatten(0, 1)
    parts = zip(states.split(_HEAD_ROWS), index.split(_HEAD_ROWS), wide.split(_HEAD_ROWS), strict=True)
    mean, log_variance = map(torch.cat, zip(*(session.moments(*part) for part in parts), strict=True))
    shape = (n, after - 1, dim)
    return log_normal(path.states[:, :-1], mean.view(shape), log_variance.view(shape), rule.temperature).sum(-1)


def own_density(path: Path, rule: ContinuousRule) -> Tensor:
    """Log density (n,) of trajectories under the model that drew them, given x_T."""
    return log_normal(path.states[:, :-1], path.mean, path.log_variance, rule.temperature).sum(-1)


class _Verifier:
    """Compares the two models' distributions of drafted tokens, and samples residuals."""

    def __init__(
        self, target: ContinuousSession, drafter: ContinuousSession, rule: ContinuousRule, engine: Eager | Graphs
    ) -> None:
        self.target, self.drafter, self.rule, self.engine = target, drafter, rule, engine

    def log_ratios(self, drafts: Path, z: Tensor, noise: Callable[[int], Tensor]) -> tuple[Tensor, Path | None, Tensor]:
        """log p / q (n,) of drafted tokens, the target's own trajectories where the criterion needs them, and
        log Sigma (n,). z (n, E): the target's; noise: returns that of the tokens' trajectories, by purpose."""
        rule = self.rule
        none = torch.zeros(len(z), dtype=torch.float64, device=z.device)
        if rule.criterion == "path":
            return path_density(self.target, drafts, z, rule) - own_density(drafts, rule), None, none
        own = trajectory(self.target, z, noise(_NOISE if rule.align else _OWN_NOISE), rule, self.engine)
        sigma = none
        if rule.criterion == "paper":
            sigma = 0.5 * (drafts.log_variance[:, 1:].double() - own.log_variance[:, 1:].double()).sum((1, 2))
        return self._last(drafts.token[:, None], own, drafts)[:, 0] + sigma, own, sigma

    def _last(self, x: Tensor, own: Path, drafts: Path) -> Tensor:
        """log p(x_0 | x_1^p) - log q(x_0 | x_1^q), (n, k), of k tokens each, x (n, k, D)."""
        rule = self.rule
        p = log_normal(x, own.mean[:, :1], own.log_variance[:, :1], rule.temperature, rule.inner_temperature)
        q = log_normal(x, drafts.mean[:, :1], drafts.log_variance[:, :1], rule.temperature, rule.inner_temperature)
        return p - q

    def residual(
        self,
        drafts: Path,
        own: Path | None,
        sigma: Tensor,
        z: Tensor,
        z_draft: Tensor,
        rng: RandomStreams,
        number: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (n, D) from Norm([p - q]_+) by acceptance-rejection with the target as proposal (Eq. 10): keep a
        proposal with max(0, 1 - q / p). Also the number of proposals (n,) of each, and which (n,) were taken because
        the tries ran out."""
        most, at_once = self.rule.tries, _AT_ONCE if own is not None else 1
        token, tries = torch.zeros_like(drafts.token), torch.zeros_like(number)
        short = torch.ones(len(z), dtype=torch.bool, device=z.device)
        left = torch.arange(len(z), device=z.device)
        for begin in range(0, most, at_once):
            some, count, tag = rng.rows(left), min(at_once, most - begin), _RETRY + 2 * begin
            if own is None:
                x, gain = self._another(drafts.rows(left), z[left], z_draft[left], some, number[left], tag)
            else:
                noise = _inverted(some.uniforms(number[left], tag, 2 * count, token.shape[1])[:, ::2])
                x, gain = self._other_ends(own.rows(left), drafts.rows(left), noise)
                gain = gain + sigma[left, None]
            u = some.uniforms(number[left], tag, 2 * count, 1)[:, 1::2, 0].double()
            kept = ~(u >= -torch.expm1(-gain))  # 1 - q / p; negative where q > p; NaN is not tried again
            found = kept.any(1)
            which = torch.where(found, kept.long().argmax(1), count - 1)
            before = short[left]
            token[left] = torch.where(before[:, None], take(x, which[:, None])[:, 0], token[left])
            tries[left] += torch.where(before, which + 1, 0)
            short[left] = before & ~found
            if own is None or _asks(z.device):
                left = left[~found]
                if not len(left):
                    break
        return token, tries, short

    def _another(
        self, drafts: Path, z: Tensor, z_draft: Tensor, rng: RandomStreams, number: Tensor, tag: int
    ) -> tuple[Tensor, Tensor]:
        """A token (n, 1, D) of the target, and the log p / q (n, 1) of its trajectory."""
        after, dim = drafts.states.shape[1:]
        path = trajectory(self.target, z, normal(rng, number, tag, after, dim), self.rule, self.engine)
        gain = own_density(path, self.rule) - path_density(self.drafter, path, z_draft, self.rule)
        return path.token[:, None], gain[:, None]

    def _other_ends(self, own: Path, drafts: Path, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (n, k, D) of the target by other last steps of its trajectories, and their log p / q (n, k) but for
        Sigma; noise (n, k, D)."""
        spread = torch.exp(0.5 * own.log_variance[:, :1]) * self.rule.temperature
        x = own.mean[:, :1] + noise * spread
        return x, self._last(x, own, drafts)


@torch.inference_mode()
def decode(
    model: ContinuousModel,
    drafter: ContinuousModel | None,
    rule: ContinuousRule,
    conditioning: Any,
    rng: RandomStreams,
    clock: Clock | Idle | None = None,
    engine: Eager | Graphs | None = None,
) -> Decoded[ContinuousTrace]:
    """Decode one image per row of `streams`; tokens (B, L, D) float32, by position. Arguments and errors as of
    `Decoding`."""
    device = rng.key.device
    synchronize(device)
    began = time.perf_counter()
    images = ContinuousDecoding(model, drafter, rule, conditioning, rng, clock, engine)
    images.finish(images.step)
    synchronize(device)
    return images.outcome(time.perf_counter() - began)


@dataclass
class _Drafts:
    """Drafts of A images: `row` (A,) of the batch; indices `number` (A, gamma) in the order of generation, of which
    those inside the image are `valid`, `room` (A,) of them; values (A, L + 1, D) at all positions, including the
    drafts; the drafter's trajectories and z, of A * gamma tokens."""

    row: Tensor
    number: Tensor
    valid: Tensor
    room: Tensor
    values: Tensor
    paths: Path
    z: Tensor


class ContinuousDecoding(Images):
    """B images in progress, one per row of `streams`: the constructor draws what the target draws alone, the rest
    follows pass by pass. Images advance at their own pace; a finished image no longer changes.

    `clock` records the parts of every pass: draft, forward (of the target's positions), verify, and head, the tokens
    that the target draws itself. `engine` executes the trajectories of the heads. Raises UsageError where the models do
    not match.

    tokens (B, L + 1, D) by position; count (B,): how many are committed. A token's number is its index in `order`
    (B, L + 1). Tensors by position, number or pass have one more entry, which is never read.
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
        self.parts = model, drafter, rule
        self.rule, self.clock, self.engine = rule, clock or Idle(), engine or Eager()
        self.length, self.dim, self.steps = like
        self.reach = rule.gamma + 1
        self.rng, self.device, rows = copy(rng), rng.key.device, len(rng)
        self.asks, self.drafting = _asks(self.device), Clock(self.device)
        start = torch.zeros(rows, dtype=torch.int64, device=self.device)
        order = rng.uniform(start, _ORDER, self.length).argsort(dim=-1, stable=True)
        self.rank = order.argsort(-1)  # a position's index in the order of generation
        self.order = F.pad(order, (0, 1), value=self.length)
        self.tokens = torch.zeros(rows, self.length + 1, self.dim, device=self.device)
        self.most = 0  # no image has more tokens
        self.count, self.passes, self.drafted, self.accepted, self.fallbacks, self.made = (
            torch.zeros_like(start) for _ in range(6)
        )
        self.fault = torch.full_like(start, _NO_FAULT)
        self.seen = torch.zeros(5, rows, self.length + 1, device=self.device)  # the first five of a trace
        self.kept, self.verified = torch.zeros(2, rows, self.length + 1, dtype=torch.bool, device=self.device)
        self.tries = torch.zeros_like(self.order)
        self.target, self.verifier = model.open(conditioning, rows), None
        if drafter is not None and rule.gamma:
            self.verifier = _Verifier(self.target, drafter.open(conditioning, rows), rule, self.engine)
        before = self.length if self.verifier is None else math.ceil(round(rule.prefill * self.length, 6))
        for share in rule.tokens_per_pass or (1,) * before:
            self.draw_directly(share)

    def lacking(self, keys: Sequence[tuple[int, int]]) -> list[int]:
        """As of `loop.Images`."""
        faults, count = torch.stack([self.fault, self.count]).tolist()
        if (first := min(faults)) < _NO_FAULT:
            passes, by_target = divmod(first, 2)
            raise NumberError(
                f"the {'target' if by_target else 'drafter'} produced a value that is not finite for the image"
                f" (seed, index) {keys[faults.index(first)]}, step {passes}: lower cfg_scale or raise the precision"
                " (dtype=float32)"
            )
        self.most = max(count)
        return [self.length - n for n in count]

    def noise(self, row: Tensor, number: Tensor, tag: int) -> Tensor:
        """Noise of complete trajectories: (n, T + 1, D)."""
        return normal(self.rng.rows(row), number, tag, self.steps + 1, self.dim)

    def place(self, row: Tensor, number: Tensor) -> Tensor:
        """Positions of the tokens `number` (n, k)."""
        return self.order[row].gather(1, number.clamp_max(self.length))

    @property
    def all_rows(self) -> Tensor:
        """All rows."""
        return torch.arange(len(self.count), device=self.device)

    def draw_directly(self, share: int) -> None:
        """The target draws the next tokens of all images, `share` of them in one pass."""
        self.clock.begin()
        number = self.count[:, None] + torch.arange(share, device=self.device)
        done = (self.count[:, None] + (share - 1)).expand(-1, share)
        z = self._see(self.target, self.tokens, self.all_rows, self.count, number, done, self.most)
        self.clock.lap("forward")
        row = self.all_rows.repeat_interleave(share)
        self.passes += 1
        self._draw(z.flatten(0, 1), row, number.flatten())
        self.count += share
        self.most += share
        self.clock.lap("head")

    def step(self) -> None:
        """Draft tokens of the images, verify them, and commit the result."""
        assert self.verifier is not None, "without a drafter there is nothing left to do"
        active = self.count < self.length
        row = active.nonzero().flatten() if self.asks else self.all_rows
        self.clock.begin()
        self.passes += active
        drafts = self._draft(self.verifier.drafter, row)
        self.clock.lap("draft")
        z, behind = self._look(drafts)
        self.clock.lap("forward")
        kept, advance = self._verify(self.verifier, drafts, z)
        self.count[row] += advance
        self.clock.lap("verify")
        if behind is not None:
            self._go_on(drafts, kept, behind)
            self.clock.lap("head")
        self.most = min(self.length, self.most + self.reach)

    def _draft(self, drafter: ContinuousSession, row: Tensor) -> _Drafts:
        """Draft tokens one after the other, each conditioned on the ones before."""
        self.drafting.begin()
        first = self.count[row]
        room = (self.length - first).clamp_max(self.rule.gamma)
        offsets = torch.arange(int(room.max()) if self.asks else self.rule.gamma, device=self.device)
        number, valid = first[:, None] + offsets, offsets < room[:, None]
        values, place = self.tokens[row], self.place(row, number)
        paths, z_all = [], []
        for i in range(len(offsets)):
            at = number[:, i : i + 1]
            z = self._see(drafter, values, row, at[:, 0], at, at, self.most + i)[:, 0]
            path = trajectory(drafter, z, self.noise(row, at[:, 0], _NOISE), self.rule, self.engine)
            self._watch(path.token, row, valid[:, i], by_target=False)
            values.scatter_(1, place[:, i, None, None].expand(-1, 1, self.dim), path.token[:, None])
            paths.append(path)
            z_all.append(z)
        self.drafting.lap("draft")
        self.made[row] += room
        return _Drafts(row, number, valid, room, values, Path.stacked(paths), torch.stack(z_all, 1).flatten(0, 1))

    def _look(self, drafts: _Drafts) -> tuple[Tensor, Tensor | None]:
        """The target's z (A * gamma, E) of drafted tokens; and, where each is conditioned on the ones before it,
        (A, gamma + 1, E) with that of the bonus token."""
        row, gamma = drafts.row, drafts.number.shape[1]
        first = drafts.number[:, 0]
        if self.rule.verify == "parallel":
            z = self._see(self.target, self.tokens[row], row, first, drafts.number, drafts.number, self.most)
            return z.flatten(0, 1), None
        # A copy of the image for every token, and one for the bonus token.
        copies = (first[:, None] + torch.arange(gamma + 1, device=self.device)).flatten()
        wide, values = row.repeat_interleave(gamma + 1), drafts.values.repeat_interleave(gamma + 1, 0)
        z = self._see(self.target, values, wide, copies, copies[:, None], copies[:, None], self.most + gamma)
        z = z.view(len(row), gamma + 1, -1)
        return z[:, :gamma].flatten(0, 1), z if self.rule.on_reject == "stop" else None

    def _verify(self, verifier: _Verifier, drafts: _Drafts, z: Tensor) -> tuple[Tensor, Tensor]:
        """Verify drafts and commit the resulting tokens; returns which drafts were kept (A, gamma), and how far every
        image advances."""
        row, room, valid = drafts.row, drafts.room, drafts.valid
        shape, gamma = valid.shape, valid.shape[1]
        wide = row.repeat_interleave(gamma)
        number = drafts.number.flatten().clamp_max(self.length - 1)
        gain, own, sigma = verifier.log_ratios(drafts.paths, z, partial(self.noise, wide, number))
        self._watch(gain[:, None], wide, valid.flatten(), by_target=True)
        chance = gain.clamp_max(0).exp().view(shape)
        u = self.rng.rows(wide).uniform(number, _ACCEPT, 1).view(shape).double()
        kept = (u < chance) & valid
        verified, advance, stop = valid, room, self.rule.on_reject == "stop"
        if stop:
            advance = kept.long().cumprod(1).sum(1)
            offsets = torch.arange(gamma, device=self.device)
            verified, kept = (offsets <= advance[:, None]) & valid, offsets < advance[:, None]
        rejected, token = verified & ~kept, drafts.paths.token.clone()
        if stop and not self.asks:  # at most one per image
            some = torch.arange(len(row), device=self.device) * gamma + advance.clamp_max(gamma - 1)
        else:
            some = self._needed(rejected.flatten())
        if len(some):
            sought, image = rejected.flatten()[some], wide[some]
            path = own.rows(some) if own is not None else None
            new, tries, short = verifier.residual(
                drafts.paths.rows(some),
                path,
                sigma[some],
                z[some],
                drafts.z[some],
                self.rng.rows(image),
                number[some],
            )
            self._watch(new, image, sought, by_target=True)
            token[some] = torch.where(sought[:, None], new, token[some])
            self.tries[image, torch.where(sought, number[some], self.length)] = tries
            self.fallbacks.index_add_(0, image, (short & sought).long())
        place = torch.where(kept | rejected, self.place(row, drafts.number), self.length)
        self.tokens[row[:, None], place] = token.view(*shape, -1)
        self._note(drafts, kept, verified, chance[:, 0])
        return kept, advance + (advance < room)

    def _go_on(self, drafts: _Drafts, kept: Tensor, behind: Tensor) -> None:
        """Draw the bonus token after a fully accepted draft; behind (A, gamma + 1, E): the target's z."""
        whole = (kept.sum(1) == drafts.room) & (self.count[drafts.row] < self.length)
        some = self._needed(whole)
        if len(some):
            row, wanted = drafts.row[some], whole[some]
            z = take(behind[some], drafts.room[some][:, None])[:, 0]
            self._draw(z, row, torch.where(wanted, self.count[row], self.length))
            self.count[row] += wanted

    def _needed(self, mask: Tensor) -> Tensor:
        """Indices where `mask` (n,) is true; all of them where reading the device's values costs time."""
        return mask.nonzero().flatten() if self.asks else torch.arange(len(mask), device=self.device)

    def _note(self, drafts: _Drafts, kept: Tensor, verified: Tensor, chance: Tensor) -> None:
        row, first = drafts.row, drafts.number[:, 0]
        step = torch.where(drafts.room > 0, self.passes[row] - 1, self.length)
        for i, values in enumerate((kept.sum(1), drafts.room, chance, first, verified.sum(1))):
            self.seen[i, row, step] = values.float()
        self.accepted[row] += kept.sum(1)
        self.drafted[row] += verified.sum(1)
        turn = drafts.number.clamp_max(self.length)
        for at, flags in ((self.kept, kept), (self.verified, verified)):
            at[row] = at[row].scatter(1, turn, flags)

    def _see(
        self,
        session: ContinuousSession,
        values: Tensor,
        row: Tensor,
        known: Tensor,
        number: Tensor,
        done: Tensor,
        most: int,
    ) -> Tensor:
        """z (n, k, E) of the tokens `number` (n, k) in images `row` (n,), beyond the end the last one's, with the first
        `known` (n,) tokens known, at most `most`; done (n, k): how far the image is, for guidance."""
        parts, most = [], min(most, self.length)
        for begin in range(0, len(row), CHUNK):
            part = slice(begin, begin + CHUNK)
            is_known = self.rank[row[part]] < known[part, None]
            at = self.place(row[part], number[part].clamp_max(self.length - 1))
            parts.append(session.condition(values[part, : self.length], is_known, row[part], at, done[part], most))
        return torch.cat(parts)

    def _draw(self, z: Tensor, row: Tensor, number: Tensor) -> None:
        """Draw the target's own tokens `number` (n,)."""
        path = trajectory(self.target, z, self.noise(row, number, _NOISE), self.rule, self.engine)
        self._watch(path.token, row, number < self.length, by_target=True)
        self.tokens[row, self.order[row, number]] = path.token

    def _watch(self, x: Tensor, row: Tensor, wanted: Tensor, by_target: bool) -> None:
        """Record the images `row` (n,) whose values x (n, *) are not finite, where they are `wanted` (n,) bool."""
        here = torch.where(wanted & ~x.isfinite().all(1), 2 * self.passes[row] + by_target, _NO_FAULT)
        self.fault.scatter_reduce_(0, row, here, "amin")

    def outcome(self, seconds: float, rows: list[int] | None = None) -> Decoded[ContinuousTrace]:
        """As of `loop.Images`; the seconds of drafting are those since the last call."""
        draft_s = sum(parts["draft"] for parts in self.drafting.seconds())
        self.drafting = Clock(self.device)
        chosen = slice(None) if rows is None else torch.tensor(rows, device=self.device)

        def of(x: Tensor) -> Tensor:
            return x[chosen][:, : self.length] if x.dim() > 1 else x[chosen]

        accepted, offered, first, start, reach = map(of, self.seen)
        trace = ContinuousTrace(
            accepted=accepted.long(),
            offered=offered.long(),
            first=first.clone(),
            start=start.long(),
            reach=reach.long(),
            order=of(self.order).clone(),
            kept=of(self.kept).clone(),
            verified=of(self.verified).clone(),
            tries=[[count for count in row if count] for row in of(self.tries).tolist()],
            fallbacks=of(self.fallbacks).clone(),
            draft_s=draft_s,
            made=of(self.made).clone(),
        )
        parts = (self.tokens, self.passes, self.drafted, self.accepted)
        tokens, passes, drafted, accepted = (of(x).clone() for x in parts)
        return Decoded(tokens, passes, drafted, accepted, seconds, trace)
