"""The decode loop, one for all methods. Vanilla autoregression is the same loop with an empty draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specbench.decoding.batch import BatchDecoding, Decoded, finished, not_finite
from specbench.decoding.emitted import Emitted
from specbench.decoding.parallel_positions import ParallelPositions, Raster
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules.base import Rule
from specbench.decoding.sampling import Sampling
from specbench.decoding.shape import DraftShape
from specbench.decoding.trace import StepStats, Trace, TraceRecorder
from specbench.decoding.trees import Tree
from specbench.decoding.verify import Draft, TokenWise, Verification, VerificationResult
from specbench.decoding.verify.block import BlockVerification
from specbench.engine.clock import Clock, Idle
from specbench.engine.graph import Eager, Graphs
from specbench.engine.ops import Kernels
from specbench.engine.state import Buffer, Buffers, DecodeState, constants, within


class Session(Protocol):
    """A target (or draft model) with its caches, opened for B prompts.

    Rows of its outputs are R = 2B with guidance (conditional, then unconditional), else R = B. `num_committed` (B,)
    int64 is the number of committed image tokens. The root of a draft is the last committed position.
    """

    length: int
    width: int  # positions in a row of the image, raster order
    vocab_size: int
    codes: int  # tokens 0 .. codes - 1 are indices into the codebook; the image grammar's tokens follow
    forced_tokens: Tensor | None  # (T,): `forced` for all positions

    def forced(self, positions: Tensor) -> Tensor | None:
        """The only token that the image grammar allows at image positions (B, n), or -1 where it allows every code.
        None without a grammar."""
        ...

    def constrain(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Guided logits (B, n, V) of the tokens at image positions (B, n), minus infinity where the grammar forbids a
        token."""
        ...

    def forward(self, tokens: Tensor, tree: Tree, history: Tensor, num_committed: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (R, M, V) and hidden states (R, M, dim) of a draft's nodes, tokens (B, M). history (B, *) int64 holds
        the committed tokens."""
        ...

    def forward_at_positions(
        self, tokens: Tensor, positions: ParallelPositions, history: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`forward` for several chains of an image, tokens (B, K * n). Each node attends to the slots that it sees. Do
        not commit after it: a token that is fed later at its position replaces what a draft wrote."""
        ...

    def commit(self, verdict: VerificationResult, tree: Tree, num_committed: Tensor) -> None:
        """Keep the accepted path in the caches; `num_committed` is the number before the step."""
        ...

    def use(self, kernels: Kernels) -> None:
        """Compute later passes with these kernels; only called if the engine has kernels."""
        ...

    def buffers(self) -> Buffers:
        """The tensors that steps read or write (see `engine.state`)."""
        ...


class Target(Protocol):
    width: int  # see `Session`

    def open(self, conditioning: Any, rows: int, guided: bool, nodes: int) -> Session:
        """Prefill. Leaves room for `nodes` draft nodes after the image's end."""
        ...


@dataclass
class StepResult:
    """Result of a step: the draft, the target's distributions p (B, M, V) and hidden states (R, M, dim) of its nodes,
    the verdict, and the number of committed tokens (B,) before the step. For a draft at parallel positions, p is by
    chain, and `kept` (B, K) is how many tokens of each chain were committed."""

    draft: Draft
    p: Tensor
    hidden: Tensor
    verdict: VerificationResult
    num_committed: Tensor
    kept: Tensor | None = None


class DraftState(Protocol):
    """What a drafter stores for a batch. `propose` and `commit` write its buffers in place."""

    def buffers(self) -> Buffers:
        """The tensors that steps read or write (see `engine.state`)."""
        ...


@dataclass(frozen=True)
class NetworkPass:
    """Passes of a drafter's network in a step: `times` calls of `method` of `owner`; each call reads the weights
    `read`. method: empty if another pass contains this one."""

    owner: nn.Module
    method: str
    read: Sequence[Tensor]
    times: int = 1


class Drafter(Protocol):
    """Proposes drafts of a shape. `open` moves the tensors that a step reads to the device. A drafter with a network
    also has a method `network_passes(target)`, which returns its `NetworkPass`es for a model `target`."""

    shape: DraftShape

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> DraftState:
        """A new state for the rows of a target session."""
        ...

    def propose(self, state: Any, history: Tensor, num_committed: Tensor, step: Tensor) -> Draft: ...

    def commit(self, state: Any, result: StepResult) -> None:
        """Update the state with the result of the step."""
        ...


def last_token(history: Tensor, num_committed: Tensor) -> Tensor:
    """The token (B, 1) of a draft's root; token 0 before the first token."""
    return history.gather(1, (num_committed - 1).clamp_min(0)[:, None])


#: Replaces the rule's verdict, given the draft and the step (B,); benchmarks use it.
Override = Callable[[VerificationResult, Draft, Tensor], VerificationResult]


@dataclass(frozen=True, eq=False)
class DecoderConfig:
    """The target, its drafter, the rule, the verification of drafts, and how the target is sampled.

    emitted_draws: see `Emitted`, which measures the emitted distributions; 0: no measurement. observer is
    called after every step, with the step's statistics and the number of tokens of an image.
    """

    target: Target
    drafter: Drafter
    rule: Rule
    sampling: Sampling
    override: Override | None = None
    verification: Verification = field(default_factory=TokenWise)
    emitted_draws: int = 0
    observer: Callable[[StepStats, int], None] | None = None


class Decoding(BatchDecoding[StepStats]):
    """B images in progress, one per row of `rng`: prefilled on construction, then decoded step by step.

    A step does not synchronize with the device, and writes its buffers in place. Rows advance at their own pace; a
    finished row no longer changes. `clock` records the parts of a step: draft, forward (of the target), verify
    (including guidance and the distributions), commit and rest. `kernels` belong to the engine that executes the steps;
    the prefill does not use them.
    """

    def __init__(
        self,
        config: DecoderConfig,
        conditioning: Any,
        rng: RandomStreams,
        clock: Clock | Idle | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        rng = rng.copied()
        self.config, self.rng, self.clock, self.kernels = config, rng, clock or Idle(), kernels
        self.rng.kernels = kernels
        self.sampling = replace(config.sampling, kernels=kernels)
        device, rows, shape = rng.key.device, len(rng), config.drafter.shape
        config.rule.open(device)
        num_chains = shape.num_chains(config.target)
        self.session = config.target.open(conditioning, rows, config.sampling.guided, num_chains * shape.tree.nodes)
        self.draft_state = config.drafter.open(self.session, conditioning, self.sampling, rng)
        if kernels is not None:
            self.session.use(kernels)
        self.total, self.reach = self.session.length, num_chains * (shape.height + 1)
        self.history = torch.zeros(rows, self.total + 2 * self.reach, dtype=torch.int64, device=device)
        self.num_committed, self.steps, self.drafted = (
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)
        )
        draws = config.emitted_draws
        measured = draws and isinstance(config.verification, TokenWise | BlockVerification)
        emitted = Emitted(config.rule, self.rng, draws) if measured and not shape.biased else None
        self.recorder = TraceRecorder(rows, self.total, self.reach, device, emitted)
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
        buffers = {name: Buffer(getattr(self, name)) for name in ("history", "num_committed", "steps", "drafted")}
        return {
            **buffers,
            **within("rng", self.rng.buffers()),
            **within("session", self.session.buffers()),
            **within("draft", self.draft_state.buffers()),
            **within("trace", self.recorder.buffers()),
        }

    def step(self) -> None:
        config, session, num_committed, clock = self.config, self.session, self.num_committed, self.clock
        drafter, sampling = config.drafter, self.sampling
        self.step_stats = None
        clock.begin()
        draft = drafter.propose(self.draft_state, self.history, num_committed, self.steps)
        clock.lap("draft")
        layout = draft.parallel_positions or Raster(draft.tree, num_committed)
        logits, hidden = layout.forward(session, draft.tokens, self.history)
        clock.lap("forward")
        target = sampling.distributions(logits, session, layout.next_positions)
        p, pre_argmax_probs = layout.chains(target.p), None
        if config.rule.uses_pre_argmax_probs and sampling.temperature == 0:
            pre_argmax_probs = layout.chains(target.unfiltered())
        rng, keys = layout.streams(self.rng, self.steps)
        verdict = config.verification.verify(p, draft, config.rule, rng, keys, pre_argmax_probs, self.kernels)
        if config.override is not None:
            verdict = config.override(verdict, draft, keys)
        clock.lap("verify")
        kept = layout.commit(session, verdict, num_committed, self.total)
        drafter.commit(self.draft_state, StepResult(draft, p, hidden, verdict, num_committed, kept))
        clock.lap("commit")
        images = self.history, num_committed, self.steps
        num_committed, steps, active = layout.advance(verdict, kept, images, self.total, self.kernels)
        self.step_stats = StepStats(draft, layout, verdict, target, num_committed, steps, active, kept)
        clock.lap("rest")

    def record(self, stats: StepStats) -> None:
        self.recorder.record(stats)
        if self.config.observer is not None:
            self.config.observer(stats, self.total)
        if stats.draft.tree.height:
            self.drafted += stats.layout.drafted(stats, self.total)

    def remaining_tokens(self, keys: Sequence[tuple[int, int]]) -> list[int]:
        remaining, wrong = torch.stack(
            [(self.total - self.num_committed).clamp_min(0), self.recorder.wrong().long()]
        ).tolist()
        if any(wrong):
            row = wrong.index(1)
            step, who = self.recorder.fault(row)
            raise not_finite(who, "probabilities that are not finite or do not sum to 1,", keys[row], step)
        return remaining

    def result(self, seconds: float, rows: list[int] | None = None) -> Decoded[Trace]:
        chosen = slice(None) if rows is None else torch.tensor(rows, device=self.num_committed.device)
        tensors = (self.history[:, : self.total], self.steps, self.drafted)
        tokens, steps, drafted = (x[chosen].clone() for x in tensors)
        recorded = self.recorder.trace()
        trace = Trace(*(getattr(recorded, f.name)[chosen] for f in fields(Trace)))
        return Decoded(tokens, steps, drafted, trace.accepted.sum(1), seconds, trace)


@torch.inference_mode()
def decode(
    config: DecoderConfig, conditioning: Any, rng: RandomStreams, engine: Eager | Graphs | None = None
) -> Decoded[Trace]:
    """Decode one image per row of `rng`. `engine` executes the steps."""
    engine = engine or Eager()
    return finished(lambda: Decoding(config, conditioning, rng, kernels=engine.kernels), rng, engine)
