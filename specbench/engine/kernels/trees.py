"""Trees that grow in a step: candidates, beams, the selection of the nodes and every tensor of the topology; and the
tree of VVS, a committed path in front of another tree."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels import launch
from specbench.engine.kernels.drawing import stream, uniform

#: Probabilities that a program reads at once, and the compiler's options for it.
_BLOCK, _OPTIONS = 4096, {"num_warps": 16}
#: Candidates of a step, and nodes of a tree with the root, at most: one program of a row ranks them all.
MOST_CANDIDATES, MOST_NODES = 4096, 256
#: Tokens of a history that a program copies at once.
_HISTORY = 1024
#: Numbers that a program compares with all others at once, and that it clears at once.
_COMPARED, _CLEARED = tl.constexpr(32), tl.constexpr(1024)
#: Pairs of numbers that a program compares at once.
_PAIRS = 8192


@triton.jit
def _ahead(X, x, i, count, COMPARED: tl.constexpr):
    """How many of the numbers X (count,) are larger than each of x, or equal to it and in front of its index i."""
    ahead = tl.zeros_like(i)
    for start in range(0, count, COMPARED):
        j = start + tl.arange(0, COMPARED)
        other = tl.load(X + j, mask=j < count, other=0)[None, :]
        first = (other > x[:, None]) | ((other == x[:, None]) & (j[None, :] < i[:, None]))
        ahead += tl.sum((first & (j < count)[None, :]).to(tl.int32), 1)
    return ahead


@triton.jit
def _count_children(PARENT, VALID, n, nodes, ALL: tl.constexpr):
    """How many children each of the nodes n has, or how many that are valid; PARENT, VALID (nodes,) of one row. The
    root is a child of itself."""
    kids = tl.zeros_like(n)
    for start in range(0, nodes, _COMPARED):
        j = start + tl.arange(0, _COMPARED)
        above = tl.load(PARENT + j, mask=j < nodes, other=-1).to(tl.int32)
        if not ALL:
            above = tl.where(tl.load(VALID + j, mask=j < nodes, other=0) != 0, above, -1)
        kids += tl.sum((above[None, :] == n[:, None]).to(tl.int32), 1)
    return kids


@triton.jit
def _clear(X, value, count):
    for start in range(0, count, _CLEARED):
        at = start + tl.arange(0, _CLEARED)
        tl.store(X + at, tl.zeros_like(at) + value, mask=at < count)


@triton.jit
def _topology(
    PARENT, RANK, KIDS, DEPTH, ANCESTORS, INNER, SLOT, CHILDREN, nodes, inner, width, height, NODES: tl.constexpr
):  # fmt: skip
    """What `decoding.trees.from_parents` makes, of one row: PARENT, RANK (nodes,) as there, and memory for `nodes`
    numbers at KIDS."""
    n = tl.arange(0, NODES)
    there = n < nodes
    kids = _count_children(PARENT, PARENT, n, nodes, True) - (n == 0).to(tl.int32)
    more = tl.where(n == 0, kids + nodes, kids)  # the root, then those with most children
    tl.store(KIDS + n, more, mask=there)
    _clear(CHILDREN, -1, inner * width)
    _clear(ANCESTORS, 0, nodes * nodes)
    tl.debug_barrier()
    place = _ahead(KIDS, more, n, nodes, _COMPARED)
    tl.store(INNER + place, n, mask=there & (place < inner))
    slot = tl.where((kids > 0) & (place < inner), place, -1)
    tl.store(SLOT + n, slot, mask=there)
    tl.debug_barrier()
    cell = tl.load(SLOT + tl.load(PARENT + n, mask=there, other=0), mask=there, other=0) * width
    cell += tl.load(RANK + n, mask=there, other=0)
    tl.store(CHILDREN + cell, n, mask=there & (n > 0))
    depth, above = tl.zeros_like(n), n.to(tl.int64)
    for _ in range(height + 1):
        tl.store(ANCESTORS + n * nodes + above, tl.full([NODES], 1, tl.uint8), mask=there)
        depth += (above > 0).to(tl.int32)
        above = tl.load(PARENT + above, mask=there, other=0)
    tl.store(DEPTH + n, depth, mask=there)


@triton.jit(do_not_specialize=("nodes", "begin"))  # one binary for all levels of a tree but the first
def _candidates(
    P, BEST, CHOSEN, SCORES, TOKENS, ABOVE, HOME, nodes, vocabulary, held, begin, width,
    ROOT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The `width` most probable children of one node, of equal ones the first, which are candidates from `begin` on.

    A lane has the tokens lane, lane + BLOCK .. and knows the best of them that was not taken; once it is taken, its
    other tokens are read again."""
    here = tl.program_id(0).to(tl.int64)
    lane, column = tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    probs, cell = P + here * vocabulary, here // nodes * held + begin + here % nodes * width
    best, who = tl.full([BLOCK], -1.0, tl.float32), lane
    for start in range(0, vocabulary, BLOCK):
        at = start + lane
        p = tl.load(probs + at, mask=at < vocabulary, other=-1.0)
        better = p > best  # not NaN
        best, who = tl.where(better, p, best), tl.where(better, at, who)
    above, score = tl.full([], -1, tl.int32), tl.full([], 0.0, tl.float32)
    if not ROOT:
        above, score = tl.load(CHOSEN + here), tl.load(BEST + here)
    for k in range(width):
        top = tl.max(best, 0)
        token = tl.min(tl.where(best == top, who, vocabulary), 0)
        likely = tl.minimum(tl.log(tl.where(top > 0, top, 1.0)), 0.0)
        tl.store(SCORES + cell + k, tl.where(top > 0, score + likely, -float("inf")))
        tl.store(TOKENS + cell + k, token)
        tl.store(ABOVE + cell + k, above)
        tl.store(HOME + cell + k, 0)
        at = column * BLOCK + token % BLOCK
        p = tl.load(probs + at, mask=at < vocabulary, other=-1.0)
        p = tl.where((p < top) | ((p == top) & (at > token)), p, -1.0)
        second = tl.max(p, 0)
        mine = lane == token % BLOCK
        best = tl.where(mine, second, best)
        who = tl.where(mine, tl.min(tl.where(p == second, at, vocabulary), 0), who)


@triton.jit(do_not_specialize=("begin", "count", "first"))
def _beam(
    SCORES, TOKENS, HOME, BEFORE, PICK, PARENTS, CHOSEN, BEST, SEES, held, begin, count, first, width, expanded,
    ROOT: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr, KNOWN: tl.constexpr,
    COMPARED: tl.constexpr,
):  # fmt: skip
    """The best `width` of the `count` candidates of a level of one row, from `begin` on. They are expanded next, and
    numbered from `first` on. BEFORE: what SEES was of the level before."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, COUNT)
    scores = SCORES + row * held + begin
    score = tl.load(scores + i, mask=i < count, other=0.0)
    rank = _ahead(scores, score, i, count, COMPARED)
    chosen, to = (i < count) & (rank < width), row * width + rank
    tl.store(PICK + to, tl.load(TOKENS + row * held + begin + i, mask=chosen, other=0), mask=chosen)
    parent = i * 0
    if not ROOT:
        parent = first - width + 1 + i // width
    tl.store(PARENTS + to, parent, mask=chosen)
    tl.store(CHOSEN + to, begin + i, mask=chosen)
    tl.store(BEST + to, score, mask=chosen)
    tl.store(HOME + row * held + begin + i, first + 1 + rank, mask=chosen)
    tl.debug_barrier()
    w, e = tl.arange(0, WIDE)[:, None], tl.arange(0, KNOWN)[None, :]
    inside, seen = (w < width) & (e < expanded), e == first + w
    if not ROOT:
        above = tl.load(PARENTS + row * width + w, mask=w < width, other=0) - 1 - (first - width)
        seen |= tl.load(BEFORE + (row * width + above) * expanded + e, mask=inside, other=0) != 0
    tl.store(SEES + (row * width + w) * expanded + e, seen.to(tl.uint8), mask=inside)


@triton.jit
def _select_nodes(
    SCORES, TOKENS, ABOVE, HOME, HISTORY, COUNT, MEMORY, PARENT, DEPTH, ANCESTORS, INNER, SLOT, CHILDREN, DRAFT, VALID,
    OF, held, nodes, inner, width, height, history_stride, CANDIDATES: tl.constexpr, NODES: tl.constexpr,
    COMPARED: tl.constexpr,
):  # fmt: skip
    """The best candidates of one row, parents in front of their children, as a draft. MEMORY: for `held` + 3 `nodes`
    numbers: of every candidate its node, of every node its rank, the distribution of its children, and the number of
    these."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, CANDIDATES)
    cell, here, numbers = row * held + i, i < held, MEMORY + row * (held + 3 * nodes)
    ranks, homes, kids = numbers + held, numbers + held + nodes, numbers + held + 2 * nodes
    parents, valid = PARENT + row * nodes, VALID + row * nodes
    score = tl.load(SCORES + cell, mask=here, other=0.0)
    kept = here & (_ahead(SCORES + row * held, score, i, held, COMPARED) < nodes - 1)
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
    _topology(
        parents, ranks, kids, DEPTH + row * nodes, ANCESTORS + row * nodes * nodes, INNER + row * inner,
        SLOT + row * nodes, CHILDREN + row * inner * width, nodes, inner, width, height, NODES,
    )  # fmt: skip
    slot = tl.arange(0, NODES)
    node = tl.load(INNER + row * inner + slot, mask=slot < inner, other=0)
    tl.store(OF + row * inner + slot, tl.load(homes + node, mask=slot < inner, other=0), mask=slot < inner)


class Growth:
    """A tree of each of `rows` images that grows as `decoding.drafters.dynamic.Grower` says: `add` the distributions of
    the root's children, then at every level `beam`, and `add` for its children; `draft` ends it."""

    def __init__(self, grower: Any, rows: int, vocabulary: int, device: torch.device) -> None:
        self.grower, self.rows, self.device = grower, rows, device
        self.width = width = min(grower.width, vocabulary)
        self.held = width + (grower.depth - 1) * width * width  # candidates, in the end
        self.scores = torch.empty(rows, self.held, device=device)
        self.tokens = torch.empty(rows, self.held, dtype=torch.int64, device=device)
        self.above, self.home = torch.empty(2, rows, self.held, dtype=torch.int32, device=device)
        self.chosen = torch.empty(rows, width, dtype=torch.int32, device=device)
        self.best = torch.empty(rows, width, device=device)
        self.sees: Tensor | None = None
        self.begin = self.count = 0  # the candidates of the last level

    def add(self, probs: Tensor) -> None:
        """The candidates of a level, from the distributions (B, n, V) after the n nodes of the last beam, or after the
        root."""
        nodes, vocabulary = probs.shape[1:]
        self.begin, self.count = self.begin + self.count, nodes * self.width
        block = min(_BLOCK, triton.next_power_of_2(vocabulary))
        launch.start(_candidates, (self.rows * nodes,),
            probs.contiguous(), self.best, self.chosen, self.scores, self.tokens, self.above, self.home, nodes,
            vocabulary, self.held, self.begin, self.width, self.begin == 0,
            triton.next_power_of_2(triton.cdiv(vocabulary, block)), block, **_OPTIONS,
        )  # fmt: skip

    def beam(self, depth: int) -> tuple[Tensor, Tensor, int, int, Tensor]:
        """The arguments of `decoding.drafters.dynamic.Expand` for the nodes of a depth from 1 on."""
        width, expanded, first = self.width, self.grower.expanded, (depth - 1) * self.width
        pick, parents = torch.empty(2, self.rows, width, dtype=torch.int64, device=self.device)
        sees = torch.empty(self.rows, width, expanded, dtype=torch.uint8, device=self.device)
        before = sees if self.sees is None else self.sees
        launch.start(_beam, (self.rows,),
            self.scores, self.tokens, self.home, before, pick, parents, self.chosen, self.best, sees, self.held,
            self.begin, self.count, first, width, expanded, self.sees is None, triton.next_power_of_2(self.count),
            triton.next_power_of_2(width), triton.next_power_of_2(expanded), _compared(self.count), num_warps=8,
        )  # fmt: skip
        self.sees = sees
        return pick, parents, depth, first, sees.view(torch.bool)

    def draft(self, history: Tensor, count: Tensor) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]:
        """The tensors of `decoding.trees.topology`, and of the draft behind `count` (B,) tokens of the history (B, *):
        tokens and valid (B, M), and of every inner node (B, I) which of all distributions is that of its children: 0
        the root's, then the distributions of the expanded nodes in order."""
        nodes = 1 + min(self.grower.nodes, self.held)
        inner = min(1 + self.grower.expanded, nodes - 1)
        made = _tensors(self.rows, nodes, inner, self.width, self.device)
        tokens, valid = torch.empty_like(made[0]), torch.empty_like(made[0], dtype=torch.bool)
        of = torch.empty_like(made[3])
        memory = torch.empty(self.rows, self.held + 3 * nodes, dtype=torch.int32, device=self.device)
        launch.start(_select_nodes, (self.rows,),
            self.scores, self.tokens, self.above, self.home, history, count, memory, *_as_bytes(made), tokens,
            valid.view(torch.uint8), of, self.held, nodes, inner, self.width, self.grower.depth, history.stride(0),
            triton.next_power_of_2(self.held), triton.next_power_of_2(nodes), _compared(self.held), num_warps=8,
        )  # fmt: skip
        return made, tokens, valid, of


def _compared(count: int) -> int:
    """With how many of `count` numbers a program compares all of them at once."""
    return min(32, max(1, _PAIRS // triton.next_power_of_2(count)))


def grows(grower: Any) -> bool:
    """Whether one program of a row can rank the candidates and the nodes of a `Grower`, with a path in front of them.
    Larger trees are left to the plain functions."""
    width, expanded = grower.width, grower.expanded
    return width * (1 + expanded) <= MOST_CANDIDATES and 1 + grower.nodes + grower.depth <= MOST_NODES


def _tensors(rows: int, nodes: int, inner: int, width: int, device: torch.device) -> tuple[Tensor, ...]:
    """Memory for the tensors of `decoding.trees.topology`, in its order."""
    parent, depth, slot = torch.empty(3, rows, nodes, dtype=torch.int64, device=device)
    ancestors = torch.empty(rows, nodes, nodes, dtype=torch.bool, device=device)
    order = torch.empty(rows, inner, dtype=torch.int64, device=device)
    children = torch.empty(rows, inner, width, dtype=torch.int64, device=device)
    return parent, depth, ancestors, order, slot, children


def _as_bytes(made: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.view(torch.uint8) if x.dtype == torch.bool else x for x in made]


@triton.jit
def _skip(
    PARENT, DEPTH, VALID, TOKENS, ROUNDS, COUNT, FRESH, KEY, STEP, HISTORY, NODES_OUT, LENGTH, LONGER, COUNT_OUT,
    FRESH_OUT, REUSED, nodes, height, known, held, rows, halves, interval, first, total, tags, tag,
    NODES: tl.constexpr, KNOWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What `decoding.drafters.vvs.VVS.propose` does for one row between its two trees."""
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, NODES)
    there, path = n < nodes, NODES_OUT + row * height
    rounds, count, fresh = tl.load(ROUNDS + row), tl.load(COUNT + row), tl.load(FRESH + row)
    due = (rounds % interval == 1) & (count > first) & (count < total)
    parents, valid = PARENT + row * nodes, VALID + row * nodes
    kids = _count_children(parents, valid, n, nodes, False)
    depth = tl.load(DEPTH + row * nodes + n, mask=there, other=0).to(tl.int32)
    leaf = ((kids == 0) & (tl.load(valid + n, mask=there, other=0) != 0)).to(tl.int32)
    leaves = tl.sum(leaf, 0)
    u = uniform(stream(tl.load(KEY + row), tl.load(STEP + row) * tags + tag), rounds * 0)
    number = (u * leaves.to(tl.float32)).to(tl.int32) + 1
    is_end = (leaf > 0) & (tl.cumsum(leaf, 0) == number)
    node, deep = tl.sum(tl.where(is_end, n, 0), 0).to(tl.int64), tl.sum(tl.where(is_end, depth, 0), 0)
    mean = tl.sum(leaf * (depth + 1), 0) // tl.maximum(leaves, 1)
    length = tl.where(due & (leaves > 0), tl.minimum(deep, mean - 1), 0).to(tl.int64)
    d = tl.arange(0, NODES)
    tl.store(path + d, tl.zeros([NODES], tl.int64) + node, mask=(d >= deep - 1) & (d < height))
    above, at = node, deep - 2
    while at >= 0:
        above = tl.load(parents + above)
        tl.store(path + at, above)
        at -= 1
    tl.debug_barrier()
    for start in range(0, held, BLOCK):
        i = start + tl.arange(0, BLOCK)
        added = (i >= count) & (i < count + length)
        token = tl.load(HISTORY + row * held + i, mask=(i < held) & (added == 0), other=0)
        which = tl.load(path + i - count, mask=added, other=0)
        token = tl.where(added, tl.load(TOKENS + row * nodes + which, mask=added, other=0), token)
        tl.store(LONGER + row * held + i, token, mask=i < held)
    k = tl.arange(0, KNOWN)
    reused = tl.minimum(tl.maximum(fresh + 1 - length, 0) + k, fresh)
    reused = tl.where(length > 0, reused, k)
    for half in range(halves):
        tl.store(REUSED + (half * rows + row) * known + k, reused, mask=k < known)
    tl.store(LENGTH + row, length)
    tl.store(COUNT_OUT + row, count + length)
    tl.store(FRESH_OUT + row, tl.where(length > 0, length - 1, fresh))
    tl.store(ROUNDS + row, rounds + 1 + due.to(tl.int64))


def skip(
    choice: Any, state: Any, draft: Any, history: Tensor, count: Tensor, step: Tensor, known: int, tags: int, tag: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What happens between the two trees of a `decoding.drafters.vvs.VVS`: a path of the first one (`draft`) is chosen,
    and the rounds of `state` are counted. Returns the path (B, D) and its `length` (B,), the history with it, how many
    tokens that has (B,), how many hidden states the second tree begins with, less one (B,), and which of the `known`
    ones these are (R, known)."""
    tree, (rows, nodes), height = draft.tree, draft.tokens.shape, choice.depth
    path, length = count.new_empty(rows, height), torch.empty_like(count)
    longer, further, fresh = torch.empty_like(history), torch.empty_like(count), torch.empty_like(count)
    reused = count.new_empty(state.halves * rows, known)
    launch.start(_skip, (rows,),
        tree.parent, tree.depth, draft.valid.view(torch.uint8), draft.tokens, state.rounds, count, state.fresh,
        state.rng.key, step, history, path, length, longer, further, fresh, reused, nodes, height, known,
        history.shape[1], rows, state.halves, choice.interval, choice.first, state.session.length, tags, tag,
        triton.next_power_of_2(nodes), triton.next_power_of_2(known), _HISTORY,
    )  # fmt: skip
    return path, length, longer, further, fresh, reused


@triton.jit
def _join(
    SLOT_1, TOKENS_1, VALID_1, PATH, LENGTH, PARENT_2, SLOT_2, CHILDREN_2, TOKENS_2, VALID_2, MEMORY, PARENT, DEPTH,
    ANCESTORS, INNER, SLOT, CHILDREN, TOKENS, VALID, UNVERIFIED, OF, first_nodes, second_nodes, second_inner, height,
    nodes, inner, width, NODES: tl.constexpr,
):  # fmt: skip
    """What `decoding.drafters.vvs.Skips.joined` makes, of one row. MEMORY: for 2 `nodes` numbers: ranks, and numbers of
    children. OF: of every inner node, whose distribution that of its children is: that of an inner node of the first
    tree, or -1 less the number of one of the second."""
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, NODES)
    length, path = tl.load(LENGTH + row), PATH + row * height
    chain, behind = (n > 0) & (n <= height), (n > height) & (n < nodes)
    other = tl.where(behind, n - height, 0)  # the number in the second tree
    above = tl.load(PARENT_2 + row * second_nodes + other, mask=behind, other=0)
    parent = tl.where(chain, n - 1, tl.where(above > 0, above + height, length))
    slot = tl.load(SLOT_2 + row * second_nodes + above, mask=behind, other=0)
    rank = tl.where(n == length + 1, width - 1, 0)
    siblings = CHILDREN_2 + (row * second_inner + slot) * (width - 1)
    rank = tl.where(behind, 0, rank)
    for k in range(width - 1):
        rank = tl.where(tl.load(siblings + k, mask=behind, other=-1) == other, k, rank)
    ranks, parents = MEMORY + row * 2 * nodes, PARENT + row * nodes
    tl.store(parents + n, tl.where(n > 0, parent, 0), mask=n < nodes)
    tl.store(ranks + n, tl.where(n > 0, rank, 0), mask=n < nodes)
    skipped = chain & (n <= length)
    first, second = TOKENS_1 + row * first_nodes, TOKENS_2 + row * second_nodes
    which = tl.load(path + n - 1, mask=chain, other=0)
    token = tl.load(first + which, mask=n <= height, other=0)
    token = tl.where(behind, tl.load(second + other, mask=behind, other=0), token)
    valid = skipped.to(tl.uint8)
    valid = tl.where(n == 0, tl.load(VALID_1 + row * first_nodes), valid)
    valid = tl.where(behind, tl.load(VALID_2 + row * second_nodes + other, mask=behind, other=0), valid)
    tl.store(TOKENS + row * nodes + n, token, mask=n < nodes)
    tl.store(VALID + row * nodes + n, valid, mask=n < nodes)
    tl.store(UNVERIFIED + row * nodes + n, skipped.to(tl.uint8), mask=n < nodes)
    tl.debug_barrier()
    _topology(
        parents, ranks, ranks + nodes, DEPTH + row * nodes, ANCESTORS + row * nodes * nodes, INNER + row * inner,
        SLOT + row * nodes, CHILDREN + row * inner * width, nodes, inner, width, 2 * height, NODES,
    )  # fmt: skip
    node = tl.load(INNER + row * inner + n, mask=n < inner, other=0)
    own = (n < inner) & (node < length)  # of the chain, except its end
    before = tl.load(path + node - 1, mask=own & (node > 0), other=0)
    of_first = tl.load(SLOT_1 + row * first_nodes + before, mask=own, other=0)
    later = (n < inner) & (node > height)
    of_second = tl.load(SLOT_2 + row * second_nodes + node - height, mask=later, other=0)
    of = tl.where(own, tl.maximum(of_first, 0), -1 - tl.maximum(of_second, 0))
    tl.store(OF + row * inner + n, of, mask=n < inner)


@triton.jit
def _collect(FIRST, SECOND, OF, OUT, first_inner, second_inner, inner, vocabulary, BLOCK: tl.constexpr):
    """A block of one distribution of either tree."""
    here, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, of = here // inner, tl.load(OF + here)
    probs = FIRST + (row * first_inner + of) * vocabulary
    if of < 0:
        probs = SECOND + (row * second_inner - 1 - of) * vocabulary
    tl.store(OUT + here * vocabulary + at, tl.load(probs + at, mask=at < vocabulary), mask=at < vocabulary)


def join(
    choice: Any, first: Any, path: Tensor, length: Tensor, second: Any
) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor, Tensor]:
    """Join two grown trees as `decoding.drafters.vvs.Skips.joined` does. Returns the tensors of
    `decoding.trees.topology`, and tokens, distributions, valid and unverified of the draft."""
    (rows, nodes), height, width = second.tokens.shape, choice.depth, second.tree.width + 1
    nodes += height
    inner, device, size = min(1 + height + choice.expanded, nodes - 1), path.device, first.probs.shape[-1]
    made = _tensors(rows, nodes, inner, width, device)
    tokens, (valid, unverified) = (
        torch.empty_like(made[0]),
        torch.empty(2, rows, nodes, dtype=torch.bool, device=device),
    )
    of, probs = torch.empty_like(made[3]), first.probs.new_empty(rows, inner, size)
    memory = torch.empty(rows, 2 * nodes, dtype=torch.int32, device=device)
    one, two = first.tree, second.tree
    launch.start(_join, (rows,),
        one.slot, first.tokens, first.valid.view(torch.uint8), path, length, two.parent, two.slot, two.children,
        second.tokens, second.valid.view(torch.uint8), memory, *_as_bytes(made), tokens, valid.view(torch.uint8),
        unverified.view(torch.uint8), of, one.nodes, two.nodes, two.inner.shape[1], height, nodes, inner, width,
        triton.next_power_of_2(nodes), num_warps=8,
    )  # fmt: skip
    block = min(_BLOCK, triton.next_power_of_2(size))
    launch.start(_collect, (rows * inner, triton.cdiv(size, block)),
        first.probs, second.probs, of, probs, one.inner.shape[1], two.inner.shape[1], inner, size, block, num_warps=8,
    )  # fmt: skip
    return made, tokens, probs, valid, unverified
