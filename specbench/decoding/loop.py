"""The decode loop. There is one; vanilla autoregression is the same loop with an empty draft."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules.base import Rule
from specbench.decoding.sampling import Distributions, Sampling
from specbench.decoding.trees import Tree
from specbench.decoding.verify import Draft, Verdict, verify
from specbench.engine.clock import Clock, Idle
from specbench.engine.graph import Eager, Execution, Graphs
from specbench.engine.ops import Kernels, sum_last
from specbench.engine.state import Buffer, Buffers, DecodeState, constants, within
from specbench.errors import NumberError, RunError

T = TypeVar("T")


class Session(Protocol):
    """A target (or draft model) with its caches, opened for B prompts.

    Rows of its outputs are R = 2B with guidance (conditional, then unconditional), else R = B. `count` (B,) int64:
    how many image tokens are committed; the root of a draft is the last committed position.
    """

    length: int
    width: int  # positions in a row of the image, raster order
    vocab_size: int
    codes: int  # tokens 0 .. codes - 1 are indices into the codebook; the image grammar's own follow
    forced_tokens: Tensor | None  # as of `forced`, of all positions (T,)

    def forced(self, positions: Tensor) -> Tensor | None:
        """The only token that the image grammar allows at image positions (B, n), -1 where it allows every code; None
        where there is no grammar."""
        ...

    def constrain(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Guided logits (B, n, V) of the tokens at image positions (B, n), minus infinity where the grammar forbids
        a token."""
        ...

    def forward(self, tokens: Tensor, tree: Tree, history: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (R, M, V) and hidden states (R, M, dim) of a draft's nodes, tokens (B, M); history (B, *) int64 holds
        the committed tokens."""
        ...

    def commit(self, verdict: Verdict, tree: Tree, count: Tensor) -> None:
        """Keep the accepted path in the caches; `count` is the value from before the step."""
        ...

    def use(self, kernels: Kernels) -> None:
        """Compute later passes with these kernels; only called where an engine has some."""
        ...

    def buffers(self) -> Buffers:
        """What steps read or write (see `engine.state`)."""
        ...


class Target(Protocol):
    def open(self, conditioning: Any, rows: int, guided: bool, nodes: int) -> Session:
        """Prefill; leave room for `nodes` draft nodes beyond the image's end."""
        ...


@dataclass
class Outcome:
    """Result of a step: the draft, the target's distributions p (B, M, V) and hidden states (R, M, dim) of its nodes,
    the verdict, and how many tokens `count` (B,) were committed before the step."""

    draft: Draft
    p: Tensor
    hidden: Tensor
    verdict: Verdict
    count: Tensor


class DraftState(Protocol):
    """What a drafter remembers of a batch. `propose` and `commit` write its buffers in place."""

    def buffers(self) -> Buffers:
        """What steps read or write (see `engine.state`)."""
        ...


class Drafter(Protocol):
    """Proposes drafts. `tree` is the topology of its drafts (for sizing: its node count and height); `passes`: forward
    passes of a drafter network in a step. `open` puts what a step reads on the device."""

    tree: Tree
    passes: int

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> Any:
        """Fresh state for the rows of a target session."""
        ...

    def propose(self, state: Any, history: Tensor, count: Tensor, step: Tensor) -> Draft: ...

    def commit(self, state: Any, outcome: Outcome) -> None:
        """Update the state with the outcome."""
        ...


@dataclass
class Decoded(Generic[T]):
    """tokens (B, T) int64 or, continuous ones, (B, T, D) float32; steps (B,): target forward passes of the decode
    phase; drafted, accepted (B,): draft tokens verified and accepted inside the image; seconds: wall time from the
    first target forward to the last token; trace: per-step statistics."""

    tokens: Tensor
    steps: Tensor
    drafted: Tensor
    accepted: Tensor
    seconds: float
    trace: T


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
    """

    accepted: Tensor
    offered: Tensor
    first: Tensor
    tv: Tensor
    top1: Tensor
    top3: Tensor
    log_prob: Tensor


#: How far the sum of a distribution may be from 1. (float32 over 200,000 tokens is exact to about 1e-5.)
_TOLERANCE = 1e-3


@dataclass
class Taken:
    """What a step leaves for its statistics: also the target's distributions `found`; count, steps (B,): from before
    the step; active (B,) bool: whether the image was not complete."""

    outcome: Outcome
    found: Distributions
    count: Tensor
    steps: Tensor
    active: Tensor


class _Recorder:
    """Fills a trace without a host round trip, and checks the distributions: for every step it records the product of
    the sums of those that were used, which is 1 where each sums to 1, and NaN where one is not finite."""

    def __init__(self, rows: int, total: int, reach: int, device: torch.device) -> None:
        self.total = total
        # the sums of the target's and the drafter's distributions, then the six of a trace, which vanilla does not
        # need; finished rows write to the last column
        self.steps = torch.zeros(8, rows, total + 1, device=device)
        self.steps[:2] = 1
        self.log_prob = torch.zeros(rows, total + 2 * reach, device=device)
        self.offsets = torch.arange(reach, device=device)

    def buffers(self) -> Buffers:
        return {"steps": Buffer(self.steps, 1), "log_prob": Buffer(self.log_prob)}

    def record(self, taken: Taken) -> None:
        outcome, count, active = taken.outcome, taken.count, taken.active
        verdict = outcome.verdict
        path = verdict.path_with_root  # beyond its end, its last node: every entry was reached
        if outcome.draft.tree.height:
            row = [*self._sums(outcome, path), *self._statistics(outcome, count)]
        else:
            row = [sum_last(verdict.next_probs)]
        index = torch.where(active, taken.steps, self.total).expand(len(row), -1).unsqueeze(-1)
        self.steps[: len(row)].scatter_(2, index, torch.stack([x.float() for x in row]).unsqueeze(-1))
        of_token = taken.found.log_prob(path, verdict.tokens)
        kept = active[:, None] & (self.offsets <= verdict.length[:, None])
        self.log_prob.scatter_(1, count[:, None] + self.offsets, torch.where(kept, of_token, 0.0))

    def _statistics(self, outcome: Outcome, count: Tensor) -> list[Tensor]:
        """A step's statistics for the trace, (B,) each."""
        draft, verdict, p = outcome.draft, outcome.verdict, outcome.p
        room = (self.total - count).clamp_min(0)
        offered = torch.minimum((draft.valid * draft.tree.depth).amax(1), room)
        row = [torch.minimum(verdict.length, room), offered, verdict.first]
        q, p0 = draft.probs[:, 0], p[:, 0]  # the root is the first inner node
        top1 = p0.argmax(-1, keepdim=True)
        hits = q.topk(min(3, q.shape[-1]), dim=-1).indices == top1
        row += [0.5 * sum_last((q - p0).abs()), hits[:, 0], hits.any(-1)]
        return row[:2] + [x * (offered > 0) for x in row[2:]]

    def _sums(self, outcome: Outcome, path: Tensor) -> list[Tensor]:
        """The products (B,) of the sums of the target's distributions along the accepted path and of the next
        token's, and of the sums of the drafter's distributions that something was drawn from."""
        draft, last = outcome.draft, sum_last(outcome.verdict.next_probs)
        child = draft.tree.children[:, :, 0].expand(len(last), -1)
        used = (child >= 0) & draft.valid.gather(1, child.clamp_min(0))
        target = sum_last(outcome.p).gather(1, path).prod(1)
        return [target * last, torch.where(used, sum_last(draft.probs), 1.0).prod(1)]

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
        accepted, offered, first, tv, top1, top3 = self.steps[2:, :, : self.total].clone()
        log_prob = self.log_prob[:, : self.total].clone()
        return Trace(accepted.long(), offered.long(), first, tv, top1 > 0, top3 > 0, log_prob)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a CUDA device the current one, on which fused kernels start."""
    return torch.cuda.device(device) if device.type == "cuda" and device.index is not None else nullcontext()


class BatchDecoding(ABC):
    """Images in progress, one per row of `rng`. A step adds at least one and at most `reach` tokens to every image
    that is not complete."""

    rng: RandomStreams
    reach: int
    config: Any  # the decoder configuration; see `engine.graph.Steps`
    state: DecodeState

    @abstractmethod
    def step(self) -> None:
        """Draft, verify, commit: what is timed."""

    @abstractmethod
    def observe(self) -> None:
        """Record the statistics of the step before, once. No later step reads them, and their time does not count."""

    @abstractmethod
    def lacking(self, keys: Sequence[tuple[int, int]]) -> list[int]:
        """Tokens that each row lacks; synchronizes with the device. NumberError where a model produced values that are
        not finite, or probabilities that do not sum to 1; `keys`: (seed, index) of the image of each row."""

    @abstractmethod
    def outcome(self, seconds: float, rows: list[int] | None = None) -> Decoded[Any]:
        """The result of the rows (default: all of them)."""


class Progress:
    """Stops a decoding whose steps no longer add tokens, such as a recorded step that lacks its kernels."""

    def __init__(self) -> None:
        self._left: Sequence[int] = ()

    def check(self, left: Sequence[int]) -> None:
        """left: tokens that each row lacks, after at least one step since the last call."""
        if any(now and now >= before for now, before in zip(left, self._left, strict=False)):
            row = next(i for i, now in enumerate(left) if now and now >= self._left[i])
            raise RunError(
                f"decoding stopped: row {row} still lacks {left[row]} tokens, and the last steps added none; this is a"
                " fault of the engine (try engine=eager)"
            )
        self._left = left


def finished(start: Callable[[], BatchDecoding], rng: RandomStreams, engine: Eager | Graphs) -> Decoded[Any]:
    """The result of the images that `start` returns, one per row of `rng`, with the seconds from its call on. The host
    reads the rows only when the slowest could be done, at most once per `reach` tokens that it still lacks."""
    device = rng.key.device
    synchronize(device)
    before = time.perf_counter()
    with current(device):
        execution, aside = engine.begin(start()), Clock(device)
        images, progress = execution.steps, Progress()
        while lacking := max(left := images.lacking(rng.keys)):
            progress.check(left)
            take_steps(execution, -(-lacking // images.reach), aside)
    synchronize(device)
    return images.outcome(time.perf_counter() - before - aside.total())


def take_steps(execution: Execution[Any], count: int, aside: Clock) -> None:
    """Do steps and record their statistics; `aside` measures the seconds of the latter."""
    for _ in range(count):
        execution.step()
        aside.begin()
        execution.observe()
        aside.lap("statistics")


#: Overrides the rule's verdict, as a benchmark does, given the draft and the step (B,).
Override = Callable[[Verdict, Draft, Tensor], Verdict]


@dataclass(frozen=True, eq=False)
class DecoderConfig:
    """Decoder configuration: the target, its drafter, how the drafts are verified, and how the target is sampled."""

    target: Target
    drafter: Drafter
    rule: Rule
    sampling: Sampling
    override: Override | None = None


class Decoding(BatchDecoding):
    """B images in progress, one per row of `rng`: prefilled on construction, then step by step.

    A step does not synchronize with the device, and writes its buffers in place. Rows advance at their own pace; a
    finished row no longer changes. `clock` records a step's parts: draft, forward (of the target), verify (including
    guidance and the distributions), commit and rest. `kernels`: those of the engine that executes the steps; the
    prefill does without.
    """

    def __init__(
        self,
        config: DecoderConfig,
        conditioning: Any,
        rng: RandomStreams,
        clock: Clock | Idle | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        rng = rng.own()
        self.config, self.rng, self.clock, self.kernels = config, rng, clock or Idle(), kernels
        self.rng.kernels = kernels
        self.sampling = replace(config.sampling, kernels=kernels)
        device, rows, tree = rng.key.device, len(rng), config.drafter.tree
        config.rule.open(device)
        self.session = config.target.open(conditioning, rows, config.sampling.guided, tree.nodes)
        self.draft_state = config.drafter.open(self.session, conditioning, self.sampling, rng)
        if kernels is not None:
            self.session.use(kernels)
        self.total, self.reach = self.session.length, tree.height + 1
        self.history = torch.zeros(rows, self.total + 2 * self.reach, dtype=torch.int64, device=device)
        self.count, self.steps, self.drafted = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3))
        self.recorder = _Recorder(rows, self.total, self.reach, device)
        self.taken: Taken | None = None  # from a step to its statistics
        self.state = DecodeState(
            rows,
            self.buffers(),
            {
                **constants("session", self.session),
                **constants("drafter", config.drafter),
                **constants("draft", self.draft_state),
                **constants("rule", config.rule),
            },
        )

    def buffers(self) -> Buffers:
        """Everything that a step reads or writes."""
        own = {name: Buffer(getattr(self, name)) for name in ("history", "count", "steps", "drafted")}
        return {
            **own,
            **within("rng", self.rng.buffers()),
            **within("session", self.session.buffers()),
            **within("draft", self.draft_state.buffers()),
            **within("trace", self.recorder.buffers()),
        }

    def step(self) -> None:
        config, session, count, clock = self.config, self.session, self.count, self.clock
        drafter, sampling = config.drafter, self.sampling
        self.taken = None
        clock.begin()
        draft = drafter.propose(self.draft_state, self.history, count, self.steps)
        clock.lap("draft")
        logits, hidden = session.forward(draft.tokens, draft.tree, self.history, count)
        clock.lap("forward")
        found = sampling.distributions(logits, session, count[:, None] + draft.tree.depth)
        before = config.rule.uses_pre_argmax_probs and sampling.temperature == 0
        pre_argmax_probs = found.unfiltered() if before else None
        verdict = verify(found.p, draft, config.rule, self.rng, self.steps, pre_argmax_probs, self.kernels)
        if config.override is not None:
            verdict = config.override(verdict, draft, self.steps)
        clock.lap("verify")
        session.commit(verdict, draft.tree, count)
        outcome = Outcome(draft, found.p, hidden, verdict, count)
        drafter.commit(self.draft_state, outcome)
        clock.lap("commit")
        self.taken = Taken(outcome, found, *self._advance(verdict))
        clock.lap("rest")

    def _advance(self, verdict: Verdict) -> tuple[Tensor, Tensor, Tensor]:
        """Add a verdict's tokens to the images that are not complete; returns `count` and `steps` from before, and
        which images these are."""
        if self.kernels is not None:
            return self.kernels.advance(
                self.history, self.count, self.steps, verdict.tokens, verdict.length, self.total
            )
        count, steps = self.count.clone(), self.steps.clone()
        active = count < self.total
        tokens = torch.where(active[:, None], verdict.tokens, 0)
        self.history.scatter_(1, count[:, None] + self.recorder.offsets, tokens)
        torch.where(active, count + verdict.length + 1, count, out=self.count)
        self.steps += active
        return count, steps, active

    def observe(self) -> None:
        """As of `BatchDecoding`."""
        taken, self.taken = self.taken, None
        if taken is None:
            raise RuntimeError("the statistics of a step are recorded once, after the step")
        draft = taken.outcome.draft
        self.recorder.record(taken)
        if draft.tree.height:
            inside = draft.valid[:, 1:] & (draft.tree.depth[:, 1:] <= (self.total - taken.count)[:, None])
            self.drafted += inside.sum(1)

    def lacking(self, keys: Sequence[tuple[int, int]]) -> list[int]:
        """As of `BatchDecoding`."""
        left, wrong = torch.stack([(self.total - self.count).clamp_min(0), self.recorder.wrong().long()]).tolist()
        if any(wrong):
            row = wrong.index(1)
            step, who = self.recorder.fault(row)
            raise NumberError(
                f"the {who} produced probabilities that are not finite or do not sum to 1, for the image (seed, index)"
                f" {keys[row]}, step {step}: lower cfg_scale or raise the precision (dtype=float32)"
            )
        return left

    def outcome(self, seconds: float, rows: list[int] | None = None) -> Decoded[Trace]:
        """As of `BatchDecoding`."""
        chosen = slice(None) if rows is None else torch.tensor(rows, device=self.count.device)
        kept = (self.history[:, : self.total], self.steps, self.drafted)
        tokens, steps, drafted = (x[chosen].clone() for x in kept)
        every = self.recorder.trace()
        trace = Trace(*(getattr(every, f.name)[chosen] for f in fields(Trace)))
        return Decoded(tokens, steps, drafted, trace.accepted.sum(1), seconds, trace)


@torch.inference_mode()
def decode(
    config: DecoderConfig, conditioning: Any, rng: RandomStreams, engine: Eager | Graphs | None = None
) -> Decoded[Trace]:
    """Decode one image per row of `rng`; `engine` executes the steps."""
    engine = engine or Eager()
    return finished(lambda: Decoding(config, conditioning, rng, kernels=engine.kernels), rng, engine)


def decode_stream(
    start: Callable[[Any, RandomStreams], BatchDecoding],
    encode: Callable[[list[int]], Any],
    rng_for: Callable[[list[int]], RandomStreams],
    count: int,
    batch: int,
    engine: Eager | Graphs | None = None,
) -> Iterator[tuple[list[int], Decoded[Any]]]:
    """Decode images 0 .. count - 1, `batch` (two or more) at a time: a row that is done takes the next image, so that
    no row waits for the slowest. Yields which images are done, and their result; their seconds are those since the
    previous ones, without `encode`. encode, rng_for: conditioning and random streams of some images.

    Rows are refilled together when a quarter of them are done, since a prefill of several costs as much as one of them.
    start: returns the images of a conditioning and of random streams.
    """
    if batch < 2:
        raise ValueError("a stream needs two rows or more; use decode() for one image after the other")
    engine, rows = engine or Eager(), min(batch, count)
    queue, few = deque(range(count)), max(1, rows // 4)
    owners: list[int | None] = [None] * rows  # by row; None where nothing is left to decode
    keys, done = [(0, 0)] * rows, list(range(rows))
    while queue:
        following = [queue.popleft() for _ in range(min(len(done), len(queue)))]
        for row, owner in zip_longest(done, following):
            owners[row] = owner
        conditioning, rng = encode(following), rng_for(following)
        for row, key in zip(done, rng.keys):
            keys[row] = key
        device = rng.key.device
        synchronize(device)
        before, aside = time.perf_counter(), Clock(device)
        with torch.inference_mode(), current(device):
            fresh = start(conditioning, rng)
            if len(following) == rows:
                execution = engine.begin(fresh)
                images = execution.steps
            else:
                images.state.load_rows(fresh.state, done[: len(following)])
            del fresh  # its values are in `images`
        progress = Progress()
        while True:  # until enough rows are done to be refilled; without a queue, until all are
            with torch.inference_mode(), current(device):
                left = images.lacking(keys)
                progress.check(left)
                under_way = sorted(left[row] for row, owner in enumerate(owners) if owner is not None)
                behind = under_way[: few if queue else None][-1]  # of the row that determines the next look
                take_steps(execution, -(-behind // images.reach), aside)
            if not behind:
                break
        done = [row for row, owner in enumerate(owners) if owner is not None and not left[row]]
        synchronize(device)
        seconds = time.perf_counter() - before - aside.total()
        with torch.inference_mode():
            outcome = images.outcome(seconds, done)
        yield [owner for row in done if (owner := owners[row]) is not None], outcome
