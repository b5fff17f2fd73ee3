"""The inputs of a decode pass in one launch: embeddings, rotary rows and slots of its positions."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels import launch

#: Numbers that a program copies at once.
_BLOCK = 1024


@triton.jit
def _copy(FROM, TO, count, BLOCK: tl.constexpr):
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(TO + at, tl.load(FROM + at, mask=at < count), mask=at < count)


@triton.jit
def _identity(IDS, token, MAPPED: tl.constexpr):
    """The vocabulary id of an image token."""
    if MAPPED:
        token = tl.load(IDS + token)
    return token


@triton.jit
def _inputs(
    TOKENS, POSITIONS, COUNT, IDS, EMBEDDINGS, PREFIX, TABLE, PADDING, X, ROPE, SLOTS, ROOT, rows, nodes, before,
    width, half, token_stride, position_stride,
    ROOTED: tl.constexpr, MAPPED: tl.constexpr, SHIFTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One position of a row of R; `rows`: B."""
    cell = tl.program_id(0).to(tl.int64)
    row, node = cell // nodes, cell % nodes
    image = row % rows
    position = tl.load(POSITIONS + image * position_stride + node)
    slot = position
    if ROOTED:
        root = tl.load(COUNT + image) + before - 1
        position += root
        slot = root + node
        if node == 0:
            tl.store(ROOT + row, root)
    tl.store(SLOTS + cell, slot)
    if position < before:
        source = PREFIX + (row * before + tl.maximum(position, 0)) * width
    else:
        token = tl.load(TOKENS + image * token_stride + node)
        source = EMBEDDINGS + _identity(IDS, token, MAPPED) * width
    _copy(source, X + cell * width, width, BLOCK)
    if SHIFTED:
        position = tl.maximum(position - tl.load(PADDING + row), 0)
    _copy(TABLE + position * half * 2, ROPE + cell * half * 2, half * 2, BLOCK)


def _allocate(x: Tensor, rope: Tensor, rows: int, nodes: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for inputs (R, n, width) like x, rotary rows of the table `rope`, slots (R, n) and the root's slot
    (R,)."""
    slots, root = (torch.empty(shape, dtype=torch.int64, device=x.device) for shape in ((rows, nodes), (rows,)))
    return x.new_empty(rows, nodes, width), rope.new_empty(rows, nodes, *rope.shape[1:]), slots, root


def inputs(
    session: Any, tokens: Tensor, positions: Tensor, num_committed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inputs that a `models.language.LanguageSession` feeds for tokens (B, n): x (R, n, dim), rotary rows (R, n,
    head_dim / 2, 2), slots (R, n) and the root's slot (R,). positions (B, n): in the sequence; they are also the slots
    (and there is no root). With num_committed (B,), positions are depths (1 or B, n) below the root, and the slots
    follow the root's."""
    model, prefix = session.model, session.prefix.inputs
    ids, table, shifted = model.token_ids(), session.rope, model.skips_padding
    embeddings, (rows, before, width) = model.tok_embeddings.weight, prefix.shape
    nodes, half = tokens.shape[1], table.shape[1]
    assert prefix.is_contiguous()
    assert tokens.stride(1) == 1 or nodes == 1
    positions = positions.contiguous()
    x, rope, slots, root = _allocate(embeddings, table, rows, nodes, width)
    launch.start(_inputs, (rows * nodes,),
        tokens, positions, positions if num_committed is None else num_committed, tokens if ids is None else ids,
        embeddings, prefix, table, session.padding, x, rope, slots, root, len(tokens), nodes, before, width, half,
        tokens.stride(0), nodes if len(positions) > 1 else 0, num_committed is not None, ids is not None, shifted,
        min(_BLOCK, triton.next_power_of_2(width)),
    )  # fmt: skip
    return x, rope, slots, root


@triton.jit
def _newest(
    HISTORY, COUNT, FRESH, IDS, PREFIX_IDS, EMBEDDINGS, KNOWN, TABLE, PADDING, START, X, ROPE, SLOTS, ROOT, AMONG,
    rows, nodes, before, width, half, history_stride,
    MAPPED: tl.constexpr, SHIFTED: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One entry of a row."""
    cell = tl.program_id(0).to(tl.int64)
    row, node = cell // nodes, cell % nodes
    image = row % rows
    first = tl.load(COUNT + image) + before - 2 - tl.load(FRESH + image)
    entry = first + node
    tl.store(SLOTS + cell, entry)
    if node == 0:
        tl.store(ROOT + row, first)
    entries = tl.arange(0, WIDE)
    visible = ((entries <= node) & (first + entries >= tl.load(START + row))) | (entries == node)
    tl.store(AMONG + cell * nodes + entries, visible.to(tl.uint8), mask=entries < nodes)
    if entry + 1 < before:
        name = tl.load(PREFIX_IDS + row * before + tl.maximum(entry + 1, 0))
    else:
        name = _identity(IDS, tl.load(HISTORY + image * history_stride + entry + 1 - before), MAPPED)
    _copy(EMBEDDINGS + name * width, X + cell * 2 * width, width, BLOCK)
    _copy(KNOWN + cell * width, X + (cell * 2 + 1) * width, width, BLOCK)
    if SHIFTED:
        entry = entry - tl.load(PADDING + row)
    _copy(TABLE + tl.maximum(entry, 0) * half * 2, ROPE + cell * half * 2, half * 2, BLOCK)


def newest(
    session: Any, head: Any, history: Tensor, num_committed: Tensor, fresh: Tensor, known: Tensor, start: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The inputs of an EAGLE network `head` for the entries that became known with the last verdict, from known (R, n,
    dim): the tokens' embeddings joined with it (R, n, 2 dim), rotary rows, slots (R, n), the first slot (R,), and which
    of them an entry attends to (R, n, n) bool. fresh (B,), start (R,): see `decoding.drafters.eagle.EagleState`."""
    ids = session.model.token_ids()
    table, embeddings, prefix = head.rope(), head.embed_tokens.weight, session.prefix.ids
    (rows, nodes, width), before, half = known.shape, prefix.shape[1], table.shape[1]
    x, rope, slots, root = _allocate(embeddings, table, rows, nodes, 2 * width)
    among = torch.empty(rows, nodes, nodes, dtype=torch.bool, device=x.device)
    launch.start(_newest, (rows * nodes,),
        history, num_committed, fresh, history if ids is None else ids, prefix.contiguous(), embeddings,
        known.contiguous(), table, session.padding, start, x, rope, slots, root, among.view(torch.uint8),
        len(num_committed), nodes, before, width, half, history.stride(0), ids is not None, head.cfg.line,
        triton.next_power_of_2(nodes), min(_BLOCK, triton.next_power_of_2(width)),
    )  # fmt: skip
    return x, rope, slots, root, among


@triton.jit
def _level(
    TOKENS, CHOSEN, PARENTS, COUNT, IDS, EMBEDDINGS, FEATURES, TABLE, PADDING, X, ROPE, SLOTS, ROOT, rows, nodes,
    before, depth, first, num_features, width, half, token_stride, parent_stride,
    PICKED: tl.constexpr, MAPPED: tl.constexpr, SHIFTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One draft node of a row."""
    cell = tl.program_id(0).to(tl.int64)
    row, node = cell // nodes, cell % nodes
    image = row % rows
    base = tl.load(COUNT + image) + before - 1
    tl.store(SLOTS + cell, base + first + node)
    if node == 0:
        tl.store(ROOT + row, base)
    index = node
    if PICKED:
        index = tl.load(CHOSEN + node)
    name = _identity(IDS, tl.load(TOKENS + image * token_stride + index), MAPPED)
    _copy(EMBEDDINGS + name * width, X + cell * 2 * width, width, BLOCK)
    parent = tl.load(PARENTS + image * parent_stride + node)
    _copy(FEATURES + (row * num_features + parent) * width, X + (cell * 2 + 1) * width, width, BLOCK)
    entry = base - 1 + depth
    if SHIFTED:
        entry = entry - tl.load(PADDING + row)
    _copy(TABLE + tl.maximum(entry, 0) * half * 2, ROPE + cell * half * 2, half * 2, BLOCK)


def level(
    session: Any,
    head: Any,
    num_committed: Tensor,
    tokens: Tensor,
    chosen: Tensor | None,
    features: Tensor,
    parents: Tensor,
    depth: int,
    first: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inputs of an EAGLE network `head` for n draft nodes of one depth, numbered from `first` on among the expanded
    nodes: embeddings joined with their parents' outputs (R, n, 2 dim), rotary rows, slots (R, n), and the slot of the
    first expanded node (R,). tokens (B, *): those at `chosen` (n,) are the nodes', or all; features (R, *, dim): those
    at parents (n,) or (B, n) are the parents'."""
    ids = session.model.token_ids()
    table, embeddings = head.rope(), head.embed_tokens.weight
    features, tokens = features.contiguous(), tokens.contiguous()
    assert parents.stride(-1) == 1 or parents.shape[-1] == 1
    (rows, num_features, width), nodes, half = features.shape, parents.shape[-1], table.shape[1]
    x, rope, slots, root = _allocate(embeddings, table, rows, nodes, 2 * width)
    launch.start(_level, (rows * nodes,),
        tokens, tokens if chosen is None else chosen, parents, num_committed, tokens if ids is None else ids,
        embeddings, features, table, session.padding, x, rope, slots, root, len(tokens), nodes, session.prefix_length,
        depth, first, num_features, width, half, tokens.stride(0), parents.stride(0) if parents.dim() > 1 else 0,
        chosen is not None, ids is not None, head.cfg.line, min(_BLOCK, triton.next_power_of_2(width)),
    )  # fmt: skip
    return x, rope, slots, root
