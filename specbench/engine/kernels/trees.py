"""Trees that grow within a step: candidates, beams, the selection of the nodes and every tensor of the topology."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels import launch

#: Probabilities that a program reads at once, and the compiler's options for it.
_BLOCK, _OPTIONS = 4096, {"num_warps": 16}
#: The most candidates of a step, and the most nodes of a tree with the root: one program per row ranks them all.
MOST_CANDIDATES, MOST_NODES = 4096, 256
#: Numbers that a program compares with all others at once, and that it clears at once.
_COMPARED, _CLEARED = tl.constexpr(32), tl.constexpr(1024)
#: Pairs of numbers that a program compares at once.
_PAIRS = 8192


@triton.jit
def _ahead(X, x, i, count, COMPARED: tl.constexpr):
    """For each of x, how many of the numbers X (count,) are larger, or equal and before its index i."""
    ahead = tl.zeros_like(i)
    for start in range(0, count, COMPARED):
        j = start + tl.arange(0, COMPARED)
        number = tl.load(X + j, mask=j < count, other=0)[None, :]
        first = (number > x[:, None]) | ((number == x[:, None]) & (j[None, :] < i[:, None]))
        ahead += tl.sum((first & (j < count)[None, :]).to(tl.int32), 1)
    return ahead


@triton.jit
def _count_children(PARENT, n, nodes):
    """How many children each of the nodes n has; PARENT (nodes,) of one row. The root is a child of itself."""
    kids = tl.zeros_like(n)
    for start in range(0, nodes, _COMPARED):
        j = start + tl.arange(0, _COMPARED)
        above = tl.load(PARENT + j, mask=j < nodes, other=-1).to(tl.int32)
        kids += tl.sum((above[None, :] == n[:, None]).to(tl.int32), 1)
    return kids


@triton.jit
def _clear(X, value, count):
    for start in range(0, count, _CLEARED):
        at = start + tl.arange(0, _CLEARED)
        tl.store(X + at, tl.zeros_like(at) + value, mask=at < count)


@triton.jit
def _topology(TREE, row, RANK, KIDS, nodes, inner, width, height, NODES: tl.constexpr):
    """See `decoding.trees.from_parents`; for one row of TREE, the tensors of `_tree_memory`. The first of them, the
    parents, is given. RANK (nodes,) as there; KIDS: memory for `nodes` numbers."""
    PARENT, DEPTH, ANCESTORS, INNER, SLOT, CHILDREN = TREE
    PARENT += row * nodes
    DEPTH += row * nodes
    ANCESTORS += row * nodes * nodes
    INNER += row * inner
    SLOT += row * nodes
    CHILDREN += row * inner * width
    n = tl.arange(0, NODES)
    exists = n < nodes
    kids = _count_children(PARENT, n, nodes) - (n == 0).to(tl.int32)
    more = tl.where(n == 0, kids + nodes, kids)  # the root, then the nodes with most children
    tl.store(KIDS + n, more, mask=exists)
    _clear(CHILDREN, -1, inner * width)
    _clear(ANCESTORS, 0, nodes * nodes)
    tl.debug_barrier()
    index = _ahead(KIDS, more, n, nodes, _COMPARED)
    tl.store(INNER + index, n, mask=exists & (index < inner))
    slot = tl.where((kids > 0) & (index < inner), index, -1)
    tl.store(SLOT + n, slot, mask=exists)
    tl.debug_barrier()
    cell = tl.load(SLOT + tl.load(PARENT + n, mask=exists, other=0), mask=exists, other=0) * width
    cell += tl.load(RANK + n, mask=exists, other=0)
    tl.store(CHILDREN + cell, n, mask=exists & (n > 0))
    depth, above = tl.zeros_like(n), n.to(tl.int64)
    for _ in range(height + 1):
        tl.store(ANCESTORS + n * nodes + above, tl.full([NODES], 1, tl.uint8), mask=exists)
        depth += (above > 0).to(tl.int32)
        above = tl.load(PARENT + above, mask=exists, other=0)
    tl.store(DEPTH + n, depth, mask=exists)


@triton.jit(do_not_specialize=("nodes", "begin"))  # one binary for all levels of a tree except the first
def _candidates(
    P, BEST, CHOSEN, CANDIDATES, nodes, vocabulary, num_candidates, begin, width,
    ROOT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The `width` most probable children of one node, which become the candidates from `begin` on; of equal ones the
    first.

    A lane has the tokens lane, lane + BLOCK .. and knows the best of them that was not taken. Once that is taken, its
    other tokens are read again.
    """
    SCORES, TOKENS, ABOVE, HOME = CANDIDATES
    here = tl.program_id(0).to(tl.int64)
    lane, column = tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    probs, cell = P + here * vocabulary, here // nodes * num_candidates + begin + here % nodes * width
    best, token_of_lane = tl.full([BLOCK], -1.0, tl.float32), lane
    for start in range(0, vocabulary, BLOCK):
        at = start + lane
        p = tl.load(probs + at, mask=at < vocabulary, other=-1.0)
        better = p > best  # not NaN
        best, token_of_lane = tl.where(better, p, best), tl.where(better, at, token_of_lane)
    above, score = tl.full([], -1, tl.int32), tl.full([], 0.0, tl.float32)
    if not ROOT:
        above, score = tl.load(CHOSEN + here), tl.load(BEST + here)
    for k in range(width):
        top = tl.max(best, 0)
        token = tl.min(tl.where(best == top, token_of_lane, vocabulary), 0)
        likely = tl.minimum(tl.log(tl.where(top > 0, top, 1.0)), 0.0)
        tl.store(SCORES + cell + k, tl.where(top > 0, score + likely, -float("inf")))
        tl.store(TOKENS + cell + k, token)
        tl.store(ABOVE + cell + k, above)
        tl.store(HOME + cell + k, 0)
        at = column * BLOCK + token % BLOCK
        p = tl.load(probs + at, mask=at < vocabulary, other=-1.0)
        p = tl.where((p < top) | ((p == top) & (at > token)), p, -1.0)
        second = tl.max(p, 0)
        is_lane = lane == token % BLOCK
        best = tl.where(is_lane, second, best)
        token_of_lane = tl.where(is_lane, tl.min(tl.where(p == second, at, vocabulary), 0), token_of_lane)


@triton.jit(do_not_specialize=("begin", "count", "first"))
def _beam(
    CANDIDATES, BEFORE, PICK, PARENTS, CHOSEN, BEST, SEES, num_candidates, begin, count, first, width, expanded,
    ROOT: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr, KNOWN: tl.constexpr,
    COMPARED: tl.constexpr,
):  # fmt: skip
    """The best `width` of the `count` candidates of a level of one row, from `begin` on. They are expanded next, and
    numbered from `first` on. BEFORE: SEES of the level before."""
    SCORES, TOKENS, ABOVE, HOME = CANDIDATES
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, COUNT)
    scores = SCORES + row * num_candidates + begin
    score = tl.load(scores + i, mask=i < count, other=0.0)
    rank = _ahead(scores, score, i, count, COMPARED)
    chosen, to = (i < count) & (rank < width), row * width + rank
    tl.store(PICK + to, tl.load(TOKENS + row * num_candidates + begin + i, mask=chosen, other=0), mask=chosen)
    parent = i * 0
    if not ROOT:
        parent = first - width + 1 + i // width
    tl.store(PARENTS + to, parent, mask=chosen)
    tl.store(CHOSEN + to, begin + i, mask=chosen)
    tl.store(BEST + to, score, mask=chosen)
    tl.store(HOME + row * num_candidates + begin + i, first + 1 + rank, mask=chosen)
    tl.debug_barrier()
    w, e = tl.arange(0, WIDE)[:, None], tl.arange(0, KNOWN)[None, :]
    inside, visible = (w < width) & (e < expanded), e == first + w
    if not ROOT:
        above = tl.load(PARENTS + row * width + w, mask=w < width, other=0) - 1 - (first - width)
        visible |= tl.load(BEFORE + (row * width + above) * expanded + e, mask=inside, other=0) != 0
    tl.store(SEES + (row * width + w) * expanded + e, visible.to(tl.uint8), mask=inside)


@triton.jit
def _select_nodes(
    CANDIDATES, HISTORY, COUNT, MEMORY, TREE, DRAFT, VALID, OF, num_candidates, nodes, inner, width, height,
    history_stride, HELD: tl.constexpr, NODES: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """The best candidates of one row as a draft, parents before their children. MEMORY: for `num_candidates` + 3
    `nodes` numbers: for every candidate its node; for every node its rank, the distribution of its children, and their
    number."""
    SCORES, TOKENS, ABOVE, HOME = CANDIDATES
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, HELD)
    cell, here, numbers = row * num_candidates + i, i < num_candidates, MEMORY + row * (num_candidates + 3 * nodes)
    ranks, homes, kids = (
        numbers + num_candidates,
        numbers + num_candidates + nodes,
        numbers + num_candidates + 2 * nodes,
    )
    parents, valid = TREE[0] + row * nodes, VALID + row * nodes
    score = tl.load(SCORES + cell, mask=here, other=0.0)
    kept = here & (_ahead(SCORES + row * num_candidates, score, i, num_candidates, COMPARED) < nodes - 1)
    number = tl.cumsum(kept.to(tl.int32), 0)
    tl.store(numbers + i, number, mask=kept)
    tl.debug_barrier()
    above = tl.load(ABOVE + cell, mask=kept, other=-1)
    count = tl.load(COUNT + row)
    tl.store(parents + number, tl.load(numbers + above, mask=kept & (above >= 0), other=0), mask=kept)
    tl.store(ranks + number, i % width, mask=kept)
    tl.store(homes + number, tl.load(HOME + cell, mask=kept, other=0), mask=kept)
    tl.store(DRAFT + row * nodes + number, tl.load(TOKENS + cell, mask=kept, other=0), mask=kept)
    # before the first token nothing is drafted
    tl.store(valid + number, ((score > -float("inf")) & (count > 0)).to(tl.uint8), mask=kept)
    root = tl.load(HISTORY + row * history_stride + tl.maximum(count - 1, 0))
    tl.store(parents, 0)
    tl.store(ranks, 0)
    tl.store(homes, 0)
    tl.store(DRAFT + row * nodes, root)
    tl.store(valid, 1)
    tl.debug_barrier()
    _topology(TREE, row, ranks, kids, nodes, inner, width, height, NODES)
    slot = tl.arange(0, NODES)
    node = tl.load(TREE[3] + row * inner + slot, mask=slot < inner, other=0)
    tl.store(OF + row * inner + slot, tl.load(homes + node, mask=slot < inner, other=0), mask=slot < inner)


class Growth:
    """One tree per image of `rows` images that grows as in `decoding.drafters.dynamic.Grower`: `add` the distributions
    of the root's children, then at every level `beam`, and `add` for its children; `draft` ends it."""

    def __init__(self, grower: Any, rows: int, vocabulary: int, device: torch.device) -> None:
        self.grower, self.rows, self.device = grower, rows, device
        self.width = width = min(grower.width, vocabulary)
        self.num_candidates = width + (grower.depth - 1) * width * width  # of all levels
        scores = torch.empty(rows, self.num_candidates, device=device)
        above, home = torch.empty(2, rows, self.num_candidates, dtype=torch.int32, device=device)
        self.candidates = scores, torch.empty_like(scores, dtype=torch.int64), above, home  # tokens are the second
        self.chosen = torch.empty(rows, width, dtype=torch.int32, device=device)
        self.best = torch.empty(rows, width, device=device)
        self.sees: Tensor | None = None
        self.begin = self.count = 0  # the candidates of the last level

    def add(self, probs: Tensor) -> None:
        """Add the candidates of a level, from the distributions (B, n, V) after the n nodes of the last beam, or after
        the root."""
        nodes, vocabulary = probs.shape[1:]
        self.begin, self.count = self.begin + self.count, nodes * self.width
        block = min(_BLOCK, triton.next_power_of_2(vocabulary))
        launch.start(_candidates, (self.rows * nodes,),
            probs.contiguous(), self.best, self.chosen, self.candidates, nodes, vocabulary, self.num_candidates,
            self.begin, self.width, self.begin == 0,
            triton.next_power_of_2(triton.cdiv(vocabulary, block)), block, **_OPTIONS,
        )  # fmt: skip

    def beam(self, depth: int) -> tuple[Tensor, Tensor, int, int, Tensor]:
        """The arguments of `decoding.drafters.dynamic.Expand` for the nodes of a depth, from 1 on."""
        width, expanded, first = self.width, self.grower.expanded, (depth - 1) * self.width
        pick, parents = torch.empty(2, self.rows, width, dtype=torch.int64, device=self.device)
        sees = torch.empty(self.rows, width, expanded, dtype=torch.uint8, device=self.device)
        before = sees if self.sees is None else self.sees
        launch.start(_beam, (self.rows,),
            self.candidates, before, pick, parents, self.chosen, self.best, sees, self.num_candidates, self.begin,
            self.count, first, width, expanded, self.sees is None, triton.next_power_of_2(self.count),
            triton.next_power_of_2(width), triton.next_power_of_2(expanded), _compared(self.count), num_warps=8,
        )  # fmt: skip
        self.sees = sees
        return pick, parents, depth, first, sees.view(torch.bool)

    def draft(self, history: Tensor, num_committed: Tensor) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]:
        """The tensors of `decoding.trees.topology`, and of the draft after `num_committed` (B,) tokens of the history
        (B, *): tokens and valid (B, M), and for every inner node (B, I) the index of its children's distribution among
        all distributions: 0 for the root's, then the expanded nodes' in order."""
        nodes = 1 + min(self.grower.nodes, self.num_candidates)
        inner = min(1 + self.grower.expanded, nodes - 1)
        tensors = _tree_memory(self.rows, nodes, inner, self.width, self.device)
        tokens, valid = torch.empty_like(tensors[0]), torch.empty_like(tensors[0], dtype=torch.bool)
        sources = torch.empty_like(tensors[3])
        workspace = torch.empty(self.rows, self.num_candidates + 3 * nodes, dtype=torch.int32, device=self.device)
        launch.start(_select_nodes, (self.rows,),
            self.candidates, history, num_committed, workspace, _as_bytes(tensors), tokens, valid.view(torch.uint8),
            sources, self.num_candidates, nodes, inner, self.width, self.grower.depth, history.stride(0),
            triton.next_power_of_2(self.num_candidates), triton.next_power_of_2(nodes), _compared(self.num_candidates),
            num_warps=8,
        )  # fmt: skip
        return tensors, tokens, valid, sources


def _compared(count: int) -> int:
    """How many of `count` numbers a program compares with all of them at once."""
    return min(32, max(1, _PAIRS // triton.next_power_of_2(count)))


def grows(grower: Any) -> bool:
    """Whether one program per row can rank the candidates and the nodes of a `Grower`. Larger trees are left to the
    plain functions."""
    width, expanded = grower.width, grower.expanded
    return width * (1 + expanded) <= MOST_CANDIDATES and 1 + grower.nodes <= MOST_NODES


def _tree_memory(rows: int, nodes: int, inner: int, width: int, device: torch.device) -> tuple[Tensor, ...]:
    """Memory for the tensors of `decoding.trees.topology`, in its order."""
    parent, depth, slot = torch.empty(3, rows, nodes, dtype=torch.int64, device=device)
    ancestors = torch.empty(rows, nodes, nodes, dtype=torch.bool, device=device)
    order = torch.empty(rows, inner, dtype=torch.int64, device=device)
    children = torch.empty(rows, inner, width, dtype=torch.int64, device=device)
    return parent, depth, ancestors, order, slot, children


def _as_bytes(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.view(torch.uint8) if x.dtype == torch.bool else x for x in tensors)
