"""Traversal verification of trees (arXiv 2505.12398): nodes are decided from the leaves up, and a subtree is rejected
only as a whole. Lossless. On a chain it is block verification."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.decoding.rules.base import at, normalise
from specbench.decoding.trees import Tree
from specbench.decoding.verify.base import (
    Case,
    Draft,
    Verification,
    VerificationResult,
    Verified,
    one_hot,
    remaining,
    without,
)
from specbench.decoding.verify.block import passing, ratios
from specbench.engine.ops import sum_last, take


class Traversal(Verification):
    """Every node has a mass a (the root: 1), and p and q, the distributions of the token that follows. Its children are
    tried in the order drawn. Child x is entered with mass min(1, a p(x) / q(x)). If its whole subtree is rejected,

        a, p <- R / (R + 1 - a), m / R    where m = (a p - q)_+ and R = sum m,

    and q becomes the distribution of the next child. After the last child the node itself passes with the remaining a
    (the root always), and the next token is drawn from the remaining p. The first node in post-order that passes ends
    the accepted path.

    All of this is a function of the drafted tokens alone. So it is computed level by level, and decided once.
    """

    name = "traversal"

    def decide(self, case: Case) -> VerificationResult:
        p, draft = case.p, case.draft
        tree, slot = draft.tree, draft.tree.slot.expand(len(p), -1)
        order = post_order(tree)
        if case.kernels is not None:
            return VerificationResult(*case.kernels.traverse(p, draft, case.numbers, order))
        leave, left, first = _masses(p, draft)
        passed = case.u < leave
        passed[:, 0] = True
        at_end = torch.where(passed, order, p.shape[1])
        node = (at_end == at_end.amin(1, keepdim=True)).long().argmax(1, keepdim=True)
        path, length = path_to(tree, node)
        next_probs = remaining(p, left, slot, node)
        return case.verdict(path, length, next_probs, first)


def _masses(p: Tensor, draft: Draft) -> tuple[Tensor, Tensor, Tensor]:
    """The probability (B, M) with which each node passes once its children are rejected, the distribution (B, I, V) of
    the token that then follows an inner node, and min(1, p / q) of the first candidate (B,)."""
    tree, rows = draft.tree, len(p)
    inner, children = tree.inner.expand(rows, -1), tree.children.expand(rows, -1, -1)
    left, first = take(p, inner), p.new_zeros(rows)
    leave = torch.ones_like(p[..., 0])  # until its level: the mass with which a node is entered
    for depth, (slots, inside) in enumerate(_levels(tree, rows)):
        r, q, kids, above = (_part(x, slots) for x in (left, draft.probs, children, inner))
        mass = leave.gather(1, above)
        for m in range(tree.levels[depth][1]):
            child = kids[:, :, m]
            node = child.clamp_min(0)
            token, exists = draft.tokens.gather(1, node), (child >= 0) & inside
            q_m = q
            if draft.sampled is not None:
                sampled = draft.sampled.gather(1, node)
                q_m = torch.where(sampled.unsqueeze(-1), q, one_hot(token, q.shape[-1]))
            live, entered, r, mass = tried(r, q_m, mass, token, exists & draft.valid.gather(1, node))
            leave.scatter_(1, node, torch.where(exists, entered, leave.gather(1, node)))
            if depth == m == 0:
                first = entered[:, 0]
            if m + 1 < tree.levels[depth][1]:
                q = torch.where(live.unsqueeze(-1), without(q, token), q)
        if isinstance(slots, slice):
            left[:, slots] = r
            leave.scatter_(1, above, mass)
        else:
            left.scatter_(1, slots.unsqueeze(-1).expand_as(r), r)
            leave.scatter_(1, above, torch.where(inside, mass, leave.gather(1, above)))
    return leave, left, first


def tried(p: Tensor, q: Tensor, mass: Tensor, token: Tensor, exists: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For children (B, n) whose tokens were drawn from q (B, n, V), at nodes with p (B, n, V) and mass (B, n): which of
    them could be drawn, the masses with which they are entered, and p and the masses of the nodes after the subtrees of
    these children are rejected."""
    live, ratio = ratios(at(p, token), at(q, token), exists)
    residual = (p * mass.unsqueeze(-1)).sub_(q).clamp_min_(0)
    residual_mass = sum_last(residual)
    left = torch.where(live.unsqueeze(-1), normalise(residual, p), p)
    return live, (mass * ratio).clamp_max(1), left, torch.where(live, passing(residual_mass, mass), mass)


def _levels(tree: Tree, rows: int) -> list[tuple[slice | Tensor, Tensor]]:
    """The inner nodes of each depth: a slice where rows share a topology, else indices (B, n); and (B or 1, n) bool,
    which of them really have that depth."""
    levels: list[tuple[slice | Tensor, Tensor]] = []
    depths = tree.depth.gather(1, tree.inner).expand(rows, -1)
    begin = 0
    for depth, (count, _) in enumerate(tree.levels):
        if tree.post_order is not None:
            slots = slice(begin, begin + count)
            levels.append((slots, depths[:, slots] == depth))
            begin += count
        else:
            at_depth = depths == depth
            index = at_depth.int().sort(dim=1, descending=True, stable=True).indices[:, :count]
            levels.append((index, at_depth.gather(1, index)))
    return levels


def _part(x: Tensor, slots: slice | Tensor) -> Tensor:
    """The entries `slots` of x (B, I, ...)."""
    if isinstance(slots, slice):
        return x[:, slots]
    return x.gather(1, slots) if x.dim() == 2 else take(x, slots)


def post_order(tree: Tree) -> Tensor:
    """The number of every node in post-order (R, M)."""
    if tree.post_order is not None:
        return tree.post_order
    size, nodes = tree.ancestors.sum(1), torch.arange(tree.nodes, device=tree.parent.device)  # sizes of the subtrees
    ranks = torch.arange(tree.width, device=nodes.device).expand_as(tree.children).flatten(1)
    rank = torch.zeros_like(tree.parent).scatter_(1, tree.children.clamp_min(0).flatten(1), ranks)
    siblings = (tree.parent.unsqueeze(1) == tree.parent.unsqueeze(2)) & (nodes > 0)  # the root has no siblings
    elder = siblings & (rank.unsqueeze(1) < rank.unsqueeze(2))
    before = (1 + (elder * size.unsqueeze(1)).sum(2)) * (nodes > 0)
    return (tree.ancestors * before.unsqueeze(1)).sum(2) - tree.depth + size - 1


def path_to(tree: Tree, node: Tensor) -> tuple[Tensor, Tensor]:
    """The nodes by depth (B, D) on the path to a node (B, 1), followed by copies of the node itself, and their number
    (B, 1)."""
    length = tree.depth.expand(len(node), -1).gather(1, node)
    above = tree.ancestors.expand(len(node), -1, -1).gather(1, node.unsqueeze(-1).expand(-1, -1, tree.nodes))
    depths = torch.arange(1, tree.height + 1, device=node.device)
    of_depth = tree.depth.unsqueeze(1) == torch.minimum(depths, length).unsqueeze(-1)
    return (above & of_depth).long().argmax(-1), length


@dataclass(frozen=True)
class Choice:
    """conf/verification/traversal.yaml."""

    def build(self, verified: Verified) -> Verification:
        verified.check_exact("traversal")
        return Traversal()
