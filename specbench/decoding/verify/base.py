"""Verification: drafts, verdicts, and the interface of the algorithms that decide on a draft's nodes.

Each algorithm is a module. `token` serves every rule; the others serve the exact rule and, `block`, rules whose emitted
distribution has a closed form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specbench.decoding.parallel_positions import ParallelPositions
from specbench.decoding.rng import TAGS, RandomStreams
from specbench.decoding.rules.base import Rule, normalise
from specbench.decoding.sampling import draw
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import Tree
from specbench.engine.ops import Kernels, take
from specbench.errors import UsageError

# Tags of a step's random numbers. The first two are drawn together. Drafters use DRAFT and above, windows also the last
# tag. EMITTED: for the statistics of emitted distributions.
VERIFY, NEXT, DRAFT, EMITTED = 0, 1, 2, TAGS - 2


@dataclass
class Draft:
    """A drafter's proposal for B rows.

    tokens (B, M) int64: the root's token first.
    probs (B, I, V) float32: for each inner node the distribution from which its children were sampled, in the order of
        the children, without replacement.
    sampled (B, M) bool, or None if all are sampled: False marks a deterministic token (its distribution is a point
        mass).
    valid (B, M) bool: nodes that exist in this step. The ancestors of a valid node are valid.
    heights (B, M) float32 or None: if not negative, the number in [0, 1) that decides on a node, instead of a new one.
        Given the draft it must be uniform and independent of everything that determines the target's distribution of
        the node.
    node_probs (B, M - 1, V) float32 or None: for each node after the root its own distribution, if siblings were drawn
        independently of each other. `probs` then has the first children's. Only token-wise verification, and that of
        chains, support it.
    unverified (B, M) bool or None: nodes that are accepted in any case, each the only valid child of its parent. Only
        token-wise verification supports them.
    greedy (B,) bool or None: images whose next token is the most probable one, not a sample.
    parallel_positions: the positions of the nodes, if they do not follow the committed tokens in raster order. Then
        every row here is one of K chains of an image, (B * K, ...).
    parts: parts of the drafter, by name, that an audit must have exercised, and the nodes (B, M) bool whose tokens come
        from them in this step. Only the plain code reports them, not the kernels.
    """

    tree: Tree
    tokens: Tensor
    probs: Tensor
    valid: Tensor
    sampled: Tensor | None = None
    heights: Tensor | None = None
    node_probs: Tensor | None = None
    unverified: Tensor | None = None
    greedy: Tensor | None = None
    parallel_positions: ParallelPositions | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass
class VerificationResult:
    """path (B, D) int64: the accepted nodes by depth (after `length`: the last of them); length (B,) int64: accepted
    draft tokens; tokens (B, D + 1): the accepted tokens and, at `length`, the recovered or bonus token; next_probs (B,
    V): the distribution of that token; first (B,): the probability with which the rule accepts the first candidate, 0
    without one."""

    path: Tensor
    length: Tensor
    tokens: Tensor
    next_probs: Tensor
    first: Tensor

    @property
    def path_with_root(self) -> Tensor:
        """The accepted path (B, D + 1), starting with the root."""
        return torch.cat([torch.zeros_like(self.length)[:, None], self.path], 1)


def one_hot(token: Tensor, size: int) -> Tensor:
    """Point masses (..., size) float32 on tokens (...)."""
    return torch.zeros(*token.shape, size, device=token.device).scatter_(-1, token.unsqueeze(-1), 1.0)


def chain_probs(draft: Draft) -> Tensor:
    """The distributions (B, L, V) that the tokens of a chain were drawn from; point masses for deterministic tokens."""
    q = draft.probs
    if draft.sampled is None:
        return q
    return torch.where(draft.sampled[:, 1:, None], q, one_hot(draft.tokens[:, 1:], q.shape[-1]))


@dataclass(frozen=True, eq=False)
class Case:
    """The input of a verification: a draft with nodes, the target's distributions p (B, M, V), the rule, and the
    uniform `numbers` (B, 2, M): one per node, `u`, then as many again, `u_next`; the first of these draws the next
    token. decided_by (B, M, V): the distributions by which a rule with `uses_pre_argmax_probs` decides, else p."""

    p: Tensor
    draft: Draft
    rule: Rule
    numbers: Tensor
    decided_by: Tensor
    kernels: Kernels | None

    @property
    def u(self) -> Tensor:
        return self.numbers[:, 0]

    @property
    def u_next(self) -> Tensor:
        return self.numbers[:, 1]

    def verdict(self, path: Tensor, length: Tensor, next_probs: Tensor, first: Tensor) -> VerificationResult:
        """The verdict for an accepted path (B, D) of `length` (B, 1), whose next token is drawn from next_probs (B, 1,
        V)."""
        next_token = draw(next_probs, self.u_next[:, :1], self.kernels)
        tokens = torch.cat([self.draft.tokens.gather(1, path), next_token], 1).scatter(1, length, next_token)
        return VerificationResult(path, length.squeeze(1), tokens, next_probs.squeeze(1), first)


class Verification(ABC):
    """Decides on the nodes of a draft, and on the distribution of the token that follows. `name` is the name of its
    file under conf/verification."""

    name: str

    def verify(
        self,
        p: Tensor,
        draft: Draft,
        rule: Rule,
        rng: RandomStreams,
        step: Tensor,
        pre_argmax_probs: Tensor | None = None,
        kernels: Kernels | None = None,
    ) -> VerificationResult:
        """Accept or reject the draft's nodes, given the target's distributions p (B, M, V). `step` (B,) keys the random
        numbers. A rule with `uses_pre_argmax_probs` decides by `pre_argmax_probs` (B, M, V) if given; the recovered or
        bonus token always comes from p. `kernels` replace the plain code where they can."""
        numbers = rng.uniforms(step, VERIFY, NEXT - VERIFY + 1, p.shape[1])
        if draft.heights is not None:
            numbers[:, 0] = torch.where(draft.heights < 0, numbers[:, 0], draft.heights)
        if draft.unverified is not None:  # below every probability
            numbers[:, 0] = torch.where(draft.unverified, -1.0, numbers[:, 0])
        if not draft.tree.height:  # nothing to decide
            next_token, none = draw(p[:, 0], numbers[:, 1, 0], kernels).unsqueeze(1), torch.zeros_like(step)
            return VerificationResult(none.new_empty(len(p), 0), none, next_token, p[:, 0], none)
        decided_by = p if pre_argmax_probs is None else pre_argmax_probs
        verdict = self.decide(Case(p, draft, rule, numbers, decided_by, kernels))
        if draft.greedy is not None:
            likely = verdict.next_probs.argmax(-1, keepdim=True)
            chosen = verdict.tokens.scatter(1, verdict.length[:, None], likely)
            verdict.tokens = torch.where(draft.greedy[:, None], chosen, verdict.tokens)
        return verdict

    @abstractmethod
    def decide(self, case: Case) -> VerificationResult:
        """`verify` for a draft with nodes."""


@dataclass(frozen=True)
class Verified:
    """What a verification decides on: the names of the drafter and of the rule, and the shape of the drafts."""

    drafter: str
    rule: str
    shape: DraftShape

    def check_exact(self, verification: str, rules: tuple[str, ...] = ("exact",)) -> None:
        """Raises UsageError for a rule that is not among `rules`, and for drafts that only token-wise verification
        treats correctly."""
        self.check_rule(verification, rules)
        if self.shape.carries_over:
            raise UsageError(
                f"verification={verification} decides by all draft tokens of a step, so tokens that drafter"
                f" {self.drafter} carries over to the next step would no longer have the distribution they were drawn"
                " from: use verification=token"
            )
        if self.shape.independent:
            raise UsageError(
                f"verification={verification} expects siblings that are drawn from one distribution, and drafter"
                f" {self.drafter} draws each from its own: use verification=token"
            )

    def check_rule(self, verification: str, rules: tuple[str, ...] = ("exact",)) -> None:
        """Raises UsageError for a rule that is not among `rules`."""
        if self.rule not in rules:
            raise UsageError(
                f"verification={verification} is defined only for rule {' or '.join(rules)}, and the method has rule"
                f" {self.rule}: use verification=token, or rule={rules[0]}"
            )


def without(q: Tensor, token: Tensor) -> Tensor:
    """The distribution q (..., V) of the next sibling, drawn without replacement, after `token` (...) was rejected; q
    if nothing is left."""
    return normalise(q.scatter(-1, token.unsqueeze(-1), 0.0), q)


def remaining(p: Tensor, left: Tensor, slot: Tensor, node: Tensor) -> Tensor:
    """The distributions (B, n, V) of the tokens that follow nodes (B, n): left (B, I, V) for inner nodes, else p (B, M,
    V). slot (B, M): a node's index among the inner nodes."""
    at_slot = slot.gather(1, node)
    return torch.where(at_slot.unsqueeze(-1) >= 0, take(left, at_slot.clamp_min(0)), take(p, node))


def accepted_path(tree: Tree, accepted_child: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """The accepted nodes by depth (B, D), followed by copies of the last one, and their number (B, 1), from the
    accepted child of each inner node (B, I), -1 for none. slot (B, M): a node's index among the inner nodes."""
    if tree.is_chain:  # node d + 1 is the child of node d
        length = (accepted_child >= 0).long().cumprod(1).sum(1, keepdim=True)
        return torch.minimum(torch.arange(1, tree.height + 1, device=length.device), length), length
    node = length = accepted_child.new_zeros(len(accepted_child), 1)
    path: list[Tensor] = []
    for _ in range(tree.height):
        at_slot = slot.gather(1, node)
        child = torch.where(at_slot >= 0, accepted_child.gather(1, at_slot.clamp_min(0)), at_slot)
        accepted = (child >= 0) & (length == len(path))
        node = torch.where(accepted, child, node)
        length = length + accepted
        path.append(node)
    return torch.cat(path, 1), length
