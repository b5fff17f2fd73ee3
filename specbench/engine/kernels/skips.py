"""The tree of VVS: a committed path followed by another tree."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels import launch
from specbench.engine.kernels.drawing import stream, uniform
from specbench.engine.kernels.trees import as_bytes, count_children, topology, tree_memory

#: Probabilities, and tokens of a history, that a program copies at once.
_BLOCK, _HISTORY = 4096, 1024


@triton.jit
def _skip(
    DRAFT, ROUNDS, COUNT, FRESH, KEY, STEP, HISTORY, OUT, nodes, height, known, history_size, rows, halves, interval,
    first, total, tags, tag, NODES: tl.constexpr, KNOWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The part of `decoding.drafters.vvs.VVS.propose` between its two trees, for one row."""
    PARENT, DEPTH, VALID, TOKENS = DRAFT
    NODES_OUT, LENGTH, LONGER, COUNT_OUT, FRESH_OUT, REUSED = OUT
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, NODES)
    exists, path = n < nodes, NODES_OUT + row * height
    rounds, count, fresh = tl.load(ROUNDS + row), tl.load(COUNT + row), tl.load(FRESH + row)
    due = (rounds % interval == 1) & (count > first) & (count < total)
    parents, valid = PARENT + row * nodes, VALID + row * nodes
    kids = count_children(parents, valid, n, nodes, False)
    depth = tl.load(DEPTH + row * nodes + n, mask=exists, other=0).to(tl.int32)
    leaf = ((kids == 0) & (tl.load(valid + n, mask=exists, other=0) != 0)).to(tl.int32)
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
    for start in range(0, history_size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        added = (i >= count) & (i < count + length)
        token = tl.load(HISTORY + row * history_size + i, mask=(i < history_size) & (added == 0), other=0)
        node_of_token = tl.load(path + i - count, mask=added, other=0)
        token = tl.where(added, tl.load(TOKENS + row * nodes + node_of_token, mask=added, other=0), token)
        tl.store(LONGER + row * history_size + i, token, mask=i < history_size)
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
    choice: Any,
    state: Any,
    draft: Any,
    history: Tensor,
    num_committed: Tensor,
    step: Tensor,
    known: int,
    tags: int,
    tag: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The work between the two trees of a `decoding.drafters.vvs.VVS`: a path of the first tree (`draft`) is chosen,
    and the rounds of `state` are counted. Returns the path (B, D) and its `length` (B,), the history including it, the
    number of tokens in that history (B,), the number of hidden states that the second tree begins with, minus one (B,),
    and which of the `known` states these are (R, known)."""
    tree, (rows, nodes), height = draft.tree, draft.tokens.shape, choice.depth
    length, further, fresh = torch.empty(3, rows, dtype=num_committed.dtype, device=num_committed.device)
    path, reused = num_committed.new_empty(rows, height), num_committed.new_empty(state.halves * rows, known)
    out = path, length, torch.empty_like(history), further, fresh, reused
    launch.start(_skip, (rows,),
        (tree.parent, tree.depth, draft.valid.view(torch.uint8), draft.tokens), state.rounds, num_committed,
        state.fresh, state.rng.key, step, history, out, nodes, height, known, history.shape[1], rows, state.halves,
        choice.interval, choice.first, state.session.length, tags, tag, triton.next_power_of_2(nodes),
        triton.next_power_of_2(known), _HISTORY,
    )  # fmt: skip
    return out


@triton.jit
def _join(
    FIRST, SECOND, PATH, LENGTH, MEMORY, TREE, DRAFT, OF, first_nodes, second_nodes, second_inner, height, nodes, inner,
    width, NODES: tl.constexpr,
):  # fmt: skip
    """See `decoding.drafters.vvs.Skips.joined`; for one row. MEMORY: for 2 `nodes` numbers: ranks, and numbers of
    children. OF: for every inner node, the distribution of its children: the number of an inner node of the first tree,
    or -1 minus the number of one of the second."""
    TOKENS_1, VALID_1, SLOT_1 = FIRST
    TOKENS_2, VALID_2, SLOT_2, PARENT_2, CHILDREN_2 = SECOND
    TOKENS, VALID, UNVERIFIED = DRAFT
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, NODES)
    length, path = tl.load(LENGTH + row), PATH + row * height
    chain, in_tree = (n > 0) & (n <= height), (n > height) & (n < nodes)
    number = tl.where(in_tree, n - height, 0)  # the number in the second tree
    above = tl.load(PARENT_2 + row * second_nodes + number, mask=in_tree, other=0)
    parent = tl.where(chain, n - 1, tl.where(above > 0, above + height, length))
    slot = tl.load(SLOT_2 + row * second_nodes + above, mask=in_tree, other=0)
    rank = tl.where(n == length + 1, width - 1, 0)
    siblings = CHILDREN_2 + (row * second_inner + slot) * (width - 1)
    rank = tl.where(in_tree, 0, rank)
    for k in range(width - 1):
        rank = tl.where(tl.load(siblings + k, mask=in_tree, other=-1) == number, k, rank)
    ranks, parents = MEMORY + row * 2 * nodes, TREE[0] + row * nodes
    tl.store(parents + n, tl.where(n > 0, parent, 0), mask=n < nodes)
    tl.store(ranks + n, tl.where(n > 0, rank, 0), mask=n < nodes)
    skipped = chain & (n <= length)
    first, second = TOKENS_1 + row * first_nodes, TOKENS_2 + row * second_nodes
    path_node = tl.load(path + n - 1, mask=chain, other=0)
    token = tl.load(first + path_node, mask=n <= height, other=0)
    token = tl.where(in_tree, tl.load(second + number, mask=in_tree, other=0), token)
    valid = skipped.to(tl.uint8)
    valid = tl.where(n == 0, tl.load(VALID_1 + row * first_nodes), valid)
    valid = tl.where(in_tree, tl.load(VALID_2 + row * second_nodes + number, mask=in_tree, other=0), valid)
    tl.store(TOKENS + row * nodes + n, token, mask=n < nodes)
    tl.store(VALID + row * nodes + n, valid, mask=n < nodes)
    tl.store(UNVERIFIED + row * nodes + n, skipped.to(tl.uint8), mask=n < nodes)
    tl.debug_barrier()
    topology(TREE, row, ranks, ranks + nodes, nodes, inner, width, 2 * height, NODES)
    node = tl.load(TREE[3] + row * inner + n, mask=n < inner, other=0)
    in_chain = (n < inner) & (node < length)  # of the chain, except its end
    before = tl.load(path + node - 1, mask=in_chain & (node > 0), other=0)
    of_first = tl.load(SLOT_1 + row * first_nodes + before, mask=in_chain, other=0)
    later = (n < inner) & (node > height)
    of_second = tl.load(SLOT_2 + row * second_nodes + node - height, mask=later, other=0)
    source = tl.where(in_chain, tl.maximum(of_first, 0), -1 - tl.maximum(of_second, 0))
    tl.store(OF + row * inner + n, source, mask=n < inner)


@triton.jit
def _collect(FIRST, SECOND, OF, OUT, first_inner, second_inner, inner, vocabulary, BLOCK: tl.constexpr):
    """A block of one distribution of either tree."""
    here, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, source = here // inner, tl.load(OF + here)
    probs = FIRST + (row * first_inner + source) * vocabulary
    if source < 0:
        probs = SECOND + (row * second_inner - 1 - source) * vocabulary
    tl.store(OUT + here * vocabulary + at, tl.load(probs + at, mask=at < vocabulary), mask=at < vocabulary)


def join(
    choice: Any, first: Any, path: Tensor, length: Tensor, second: Any
) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor, Tensor]:
    """Join two grown trees as `decoding.drafters.vvs.Skips.joined` does. Returns the tensors of
    `decoding.trees.topology`, and the draft's tokens, distributions, valid and unverified."""
    (rows, nodes), height, width = second.tokens.shape, choice.depth, second.tree.width + 1
    nodes += height
    inner, device, size = min(1 + height + choice.expanded, nodes - 1), path.device, first.probs.shape[-1]
    tensors = tree_memory(rows, nodes, inner, width, device)
    tokens = torch.empty_like(tensors[0])
    valid, unverified = torch.empty(2, rows, nodes, dtype=torch.bool, device=device)
    sources, probs = torch.empty_like(tensors[3]), first.probs.new_empty(rows, inner, size)
    workspace = torch.empty(rows, 2 * nodes, dtype=torch.int32, device=device)
    first_tree, second_tree = first.tree, second.tree
    launch.start(_join, (rows,),
        as_bytes((first.tokens, first.valid, first_tree.slot)),
        as_bytes((second.tokens, second.valid, second_tree.slot, second_tree.parent, second_tree.children)), path,
        length, workspace, as_bytes(tensors), as_bytes((tokens, valid, unverified)), sources, first_tree.nodes,
        second_tree.nodes, second_tree.inner.shape[1], height, nodes, inner, width, triton.next_power_of_2(nodes),
        num_warps=8,
    )  # fmt: skip
    block = min(_BLOCK, triton.next_power_of_2(size))
    launch.start(_collect, (rows * inner, triton.cdiv(size, block)),
        first.probs, second.probs, sources, probs, first_tree.inner.shape[1], second_tree.inner.shape[1], inner, size,
        block, num_warps=8,
    )  # fmt: skip
    return tensors, tokens, probs, valid, unverified
