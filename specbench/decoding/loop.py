"""The decode loop. There is one; vanilla autoregression is the same loop with an empty draft."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specbench.decoding.rules import Rule
from specbench.decoding.sampling import Sampling, Streams
from specbench.decoding.trees import Tree
from specbench.decoding.verify import Draft, Verdict, verify


class Session(Protocol):
    """A target (or draft model) with its caches, opened for B prompts.

    Rows of its outputs are R = 2B with guidance (conditional, then unconditional), else R = B. `count` (B,) int64 says
    how many image tokens are committed; the root of a draft is the last committed place.
    """

    length: int
    vocab_size: int

    def forward(self, tokens: Tensor, tree: Tree, history: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (R, M, V) and hidden states (R, M, dim) of a draft's nodes, tokens (B, M); history (B, *) int64 holds
        the committed tokens."""
        ...

    def commit(self, verdict: Verdict, tree: Tree, count: Tensor) -> None:
        """Keep the accepted path in the caches; `count` is still the one from before the step."""
        ...


class Target(Protocol):
    def open(self, conditioning: Any, rows: int, guided: bool, nodes: int) -> Session:
        """Prefill; leave room for `nodes` draft nodes beyond the image's end."""
        ...


class Drafter(Protocol):
    """Proposes drafts. `tree` is the topology of its drafts (for sizing: its node count and height)."""

    tree: Tree

    def open(self, session: Any, conditioning: Any, sampling: Sampling, streams: Streams) -> Any:
        """Fresh state for the rows of a target session."""
        ...

    def propose(self, state: Any, history: Tensor, count: Tensor, step: Tensor) -> Draft: ...

    def commit(self, state: Any, hidden: Tensor, verdict: Verdict, count: Tensor) -> None:
        """Learn the outcome: the target's hidden states (R, M, dim) of the nodes, and what was kept."""
        ...


@dataclass
class Decoded:
    """tokens (B, T) int64; steps (B,): target forward passes of the decode phase; drafted, accepted (B,): draft tokens
    verified and accepted inside the image; seconds: wall time from the first target forward to the last token."""

    tokens: Tensor
    steps: Tensor
    drafted: Tensor
    accepted: Tensor
    seconds: float


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def decode(
    target: Target, drafter: Drafter, rule: Rule, sampling: Sampling, conditioning: Any, streams: Streams
) -> Decoded:
    """Decode one image per row of `streams`.

    Rows advance at their own pace; a finished row stands still. The host looks at the rows only when the slowest could
    be done, that is at most once per `tree.height + 1` tokens it still lacks.
    """
    device, rows, tree = streams.key.device, len(streams), drafter.tree
    synchronize(device)
    began = time.perf_counter()
    session = target.open(conditioning, rows, sampling.guided, tree.nodes)
    state = drafter.open(session, conditioning, sampling, streams)
    total, reach = session.length, tree.height + 1
    history = torch.zeros(rows, total + 2 * reach, dtype=torch.int64, device=device)
    count, steps, drafted, accepted = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(4))
    lane = torch.arange(reach, device=device)
    lacking = total
    while lacking > 0:
        for _ in range(-(-lacking // reach)):
            draft = drafter.propose(state, history, count, steps)
            logits, hidden = session.forward(draft.tokens, draft.tree, history, count)
            verdict = verify(sampling.law(sampling.mix(logits)), draft, rule, streams, steps)
            session.commit(verdict, draft.tree, count)
            drafter.commit(state, hidden, verdict, count)
            active = count < total
            history.scatter_(1, count[:, None] + lane, torch.where(active[:, None], verdict.tokens, 0))
            room = (total - count).clamp_min(0)
            inside = draft.valid[:, 1:] & (draft.tree.depth[:, 1:] <= room[:, None])
            drafted += inside.sum(1)
            accepted += torch.minimum(verdict.length, room)
            count = torch.where(active, count + verdict.length + 1, count)
            steps += active
        lacking = total - int(count.min())
    synchronize(device)
    return Decoded(history[:, :total].clone(), steps, drafted, accepted, time.perf_counter() - began)
