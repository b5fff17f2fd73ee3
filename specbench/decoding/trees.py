"""Draft topologies. A chain is a tree of width one; an empty draft is the root alone.

Node 0 is the root: the last committed position, after which the target already determines the distribution. Every other
node is one draft token. The first dimension of tensors is 1 (one topology for all rows) or B (a topology per row).
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.engine.state import with_tensors
from specbench.errors import UsageError, unknown

Path = tuple[int, ...]

#: The most draft tokens of a step, and the most levels of a tree.
DRAFT, DEEP = 2000, 1000
_COUNTED = 10**6  # stop counting the nodes of a tree that is too large

#: Static trees by name: the child number at each depth, one string of digits per node. `mc_sim_7b_63` (25 nodes, depth
#: 5) is the default of EAGLE-1 on Lumina-mGPT, `naive_extend_57` on LlamaGen (names and node lists: LANTERN's released
#: code).
NAMED: dict[str, str] = {
    "mc_sim_7b_63": "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001",
    "mc_sim_7b_63_balanced": (
        "0 1 2 00 01 02 10 11 12 20 21 000 001 002 010 011 100 101 110 111 0000 0001 0002 00000 00001"
    ),
    "naive_extend_57": (
        "0 1 2 3 4 00 01 02 03 10 11 12 20 21 22 30 31 40 000 001 002 003 010 011 012 020 021 022 030 031 100 "
        "101 110 200 0000 0001 0002 0003 0010 0011 0012 0020 0021 0030 0100 0101 0110 0200 00000 00001 00002 "
        "00010 00011 00100 00101 00110 00200"
    ),
    "medusa_2_7b_63": (
        "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 20 21 30 31 40 50 60 70 000 001 002 "
        "003 004 005 006 007 008 010 011 012 013 020 021 030 040 050 100 101 102 110 200 0000 0001 0002 0003 "
        "0010 0020 0100"
    ),
    "reverse_balanced_25": (
        "0 1 2 00 01 10 20 000 001 002 010 011 100 0000 0001 0002 0010 0011 00000 00001 00002 00003 00010 00011 00012"
    ),
}


def named(name: str) -> list[Path]:
    if name not in NAMED:
        raise unknown("tree", name, NAMED)
    return [tuple(int(c) for c in node) for node in NAMED[name].split()]


def parse(tree: str | Sequence[Sequence[int]]) -> list[Path]:
    """The paths of a tree from its name, from the number of children of every node by depth (4-2-1, or 4 for one
    level), or from a list such as [[0], [1], [0, 0]], also as text. UsageError for anything else, and for a tree that
    is too large."""
    if isinstance(tree, str):
        if re.fullmatch(r"[0-9]{1,4}(-[0-9]{1,4})*", tree):
            return _by_widths([int(width) for width in tree.split("-")])
        if not tree.lstrip().startswith("["):
            return named(tree)
        try:
            tree = ast.literal_eval(tree)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            raise UsageError(
                f"tree={tree[:200]} is neither a tree's name nor a list of paths such as [[0],[1],[0,0]]"
            ) from e
    try:
        paths = [tuple(int(c) for c in path) for path in tree]
    except (TypeError, ValueError) as e:
        raise UsageError(f"tree={str(tree)[:200]} is not a list of paths such as [[0],[1],[0,0]]") from e
    if not paths or any(not p or min(p) < 0 for p in paths):
        raise UsageError("a tree needs at least one path, and every path one or more child numbers >= 0")
    if len(paths) > DRAFT or max(map(len, paths)) > DEEP or max(map(max, paths)) > DEEP:
        raise UsageError(
            f"a tree has at most {DRAFT} paths of at most {DEEP} child numbers, none above {DEEP} (this one has"
            f" {len(paths)}, the longest of {max(map(len, paths))}); give a smaller one"
        )
    return paths


def _by_widths(widths: Sequence[int]) -> list[Path]:
    nodes = 0
    for width in reversed(widths):
        nodes = width * (1 + nodes)
        if not 0 < nodes <= DRAFT or len(widths) > DEEP:
            raise UsageError(
                f"a tree such as 4-2-1 (the children of every node by depth) has 1 child or more at each of at most"
                f" {DEEP} depths, and at most {DRAFT} draft tokens"
            )
    return [path for depth in range(len(widths)) for path in itertools.product(*map(range, widths[: depth + 1]))]


def chain_paths(length: int) -> list[Path]:
    return [(0,) * d for d in range(1, length + 1)]


def sized(nodes: int, height: int) -> Tree:
    """A tree with this many draft tokens and this height. Memory for it is enough for every tree that is not larger."""
    return build([*chain_paths(height), *((i,) for i in range(1, nodes - height + 1))])


def window_paths(window: int, width: int, depth: int, shape: str) -> list[Path]:
    """SJD-PAC's proactive draft of `window` tokens: a small tree, whose first path continues as a chain until the
    window is full (ERRATA, SJD 3).

    "full": `depth` levels, including the root, every node with `width` children; "comb": `width` candidates at each of
    `depth` depths, only the first extended. Width 1 is SJD's chain. UsageError if the tree does not fit the window.
    """
    if width == 1:
        return chain_paths(window)
    # counted before it is built, because width ** depth can exceed any memory
    steps = (width**d for d in range(1, depth)) if shape == "full" else itertools.repeat(width, depth)
    total = 0
    for total in itertools.accumulate(steps):
        if total > _COUNTED:
            break
    if total > window:
        raise UsageError(
            f"a {shape} tree of width {width} and depth {depth} has {total}{' or more' * (total > _COUNTED)} draft "
            f"tokens and does not fit window={window}; give a larger window or a smaller tree"
        )
    if shape == "full":
        levels = depth - 1
        paths = [p for d in range(1, levels + 1) for p in itertools.product(range(width), repeat=d)]
    else:
        levels = depth
        paths = [(0,) * (d - 1) + (c,) for d in range(1, levels + 1) for c in range(width)]
    return paths + [(0,) * (levels + i) for i in range(1, window - len(paths) + 1)]


@dataclass
class Tree:
    """parent, depth (R, M); ancestors (R, M, M) bool: node i attends to node j (itself and the root included); inner
    (R, I): the nodes with children, the root first; slot (R, M): a node's index in `inner`, -1 for leaves; children (R,
    I, W), -1 for none; parents_per_rank (W): how many of the first inner nodes can have a child of that rank; levels:
    per depth, the number of inner nodes and the most children of one of them.

    A tree that all rows share has exactly that many inner nodes, in the order of their depths. Then post_order (1, M)
    is a node's number in post-order, else None.
    """

    parent: Tensor
    depth: Tensor
    ancestors: Tensor
    inner: Tensor
    slot: Tensor
    children: Tensor
    parents_per_rank: tuple[int, ...]
    height: int
    is_chain: bool
    levels: tuple[tuple[int, int], ...]
    post_order: Tensor | None = None

    @property
    def nodes(self) -> int:
        """The number of nodes, including the root."""
        return self.parent.shape[1]

    @property
    def width(self) -> int:
        return self.children.shape[2]

    def to(self, device: torch.device | str) -> Tree:
        return with_tensors(self, lambda x: x.to(device))


def in_order(paths: Iterable[Path]) -> list[Path]:
    """The distinct paths in the order in which `build` numbers their nodes, from 1: by depth, then by child numbers."""
    return sorted(set(paths), key=lambda p: (len(p), p))


def build(paths: Iterable[Path]) -> Tree:
    """The tree of the given paths. Every path needs its parent, else UsageError. Siblings are tried in the order of
    their numbers."""
    ordered = in_order(paths)
    index: dict[Path, int] = {(): 0} | {p: i + 1 for i, p in enumerate(ordered)}
    parent = [0]
    for p in ordered:
        if p[:-1] not in index:
            raise UsageError(f"the tree has the path {list(p)} but not its parent {list(p[:-1])}")
        parent.append(index[p[:-1]])
    count = len(parent)
    depth = [0] + [len(p) for p in ordered]
    ancestors = torch.eye(count, dtype=torch.bool)
    kids: list[list[int]] = [[] for _ in range(count)]
    for node in range(1, count):
        ancestors[node] |= ancestors[parent[node]]
        kids[parent[node]].append(node)
    inner = [n for n in range(count) if kids[n]]
    slot = [inner.index(n) if kids[n] else -1 for n in range(count)]
    width = max((len(k) for k in kids), default=0)
    children = [kids[n] + [-1] * (width - len(kids[n])) for n in inner]
    return Tree(
        parent=torch.tensor([parent]),
        depth=torch.tensor([depth]),
        ancestors=ancestors[None],
        inner=torch.tensor([inner], dtype=torch.int64).reshape(1, len(inner)),
        slot=torch.tensor([slot]),
        children=torch.tensor(children, dtype=torch.int64).reshape(1, len(inner), width),
        parents_per_rank=tuple(max(i + 1 for i, k in enumerate(children) if k[m] >= 0) for m in range(width)),
        height=max(depth),
        is_chain=width <= 1,
        levels=tuple(
            (len(level), max(len(kids[n]) for n in level))
            for d in range(max(depth))
            for level in [[n for n in inner if depth[n] == d]]
        ),
        post_order=torch.tensor([_post_order(kids)]),
    )


def _post_order(kids: list[list[int]]) -> list[int]:
    """The number of every node in post-order: first its children, in their order."""
    order: list[int] = []
    waiting = [0]
    while waiting:  # in reverse: a node, then its children, last child first
        order.append(waiting.pop())
        waiting += kids[order[-1]]
    number = [0] * len(kids)
    for i, node in enumerate(reversed(order)):
        number[node] = i
    return number


def from_parents(
    parent: Tensor, rank: Tensor, width: int, height: int, inner: int | None = None, beam: int | None = None
) -> Tree:
    """A topology per row, on the device. parent (B, M) int64, M > 1: parents come before children, 0 for the root
    itself; rank (B, M): a node's number among its siblings, from 0, below `width`; height: the largest possible depth;
    inner, beam: the most nodes with children, in total and at one depth, if known."""
    rows, count = parent.shape
    nodes = torch.arange(count, device=parent.device)
    edge = torch.zeros(rows, count, count, device=parent.device).scatter_(2, parent.unsqueeze(-1), 1.0)
    edge[:, 0] = 0
    reached = torch.eye(count, device=parent.device).expand(rows, -1, -1)
    sees = reached
    for _ in range(height):
        reached = edge @ reached
        sees = sees + reached
    kids = torch.zeros_like(parent).scatter_add_(1, parent[:, 1:], torch.ones_like(parent[:, 1:]))
    kids[:, 0] += count  # the root, then the nodes with most children
    inner = count - 1 if inner is None else min(inner, count - 1)
    order = kids.sort(dim=1, descending=True, stable=True).indices
    slot = torch.empty_like(order).scatter_(1, order, nodes.expand(rows, -1))
    slot = torch.where((kids > 0) & (slot < inner), slot, -1)
    children = torch.full((rows, inner * width + 1), -1, dtype=torch.int64, device=parent.device)
    cell = torch.where(nodes > 0, slot.gather(1, parent) * width + rank, inner * width)  # the root has no parent
    children.scatter_(1, cell, nodes.expand(rows, -1))
    depth, children = sees.sum(-1).long() - 1, children[:, :-1].reshape(rows, inner, width)
    return topology(parent, depth, sees > 0, order[:, :inner], slot, children, height=height, beam=beam)


def topology(
    parent: Tensor,
    depth: Tensor,
    ancestors: Tensor,
    inner: Tensor,
    slot: Tensor,
    children: Tensor,
    *,
    height: int,
    beam: int | None = None,
) -> Tree:
    """A topology per row from its tensors (see `Tree`), where `inner` is the root, then the nodes with most children.
    height, beam: see `from_parents`."""
    count, (most, width) = parent.shape[1], children.shape[1:]
    return Tree(
        parent,
        depth,
        ancestors,
        inner,
        slot,
        children,
        parents_per_rank=tuple(min(most, 1 + (count - 2) // (m + 1)) for m in range(width)),
        height=height,
        is_chain=False,
        levels=((1, width), *[(min(most if beam is None else beam, most), width)] * (height - 1)),
    )


@dataclass(frozen=True)
class Chain:
    """The parameters of conf/drafter/base/chain.yaml."""

    window: int

    @property
    def paths(self) -> list[Path]:
        return chain_paths(self.window)


@dataclass(frozen=True)
class StaticTree:
    """The parameters of conf/drafter/base/static_tree.yaml."""

    tree: str | Sequence[Sequence[int]]  # see `parse`

    @property
    def paths(self) -> list[Path]:
        return parse(self.tree)
