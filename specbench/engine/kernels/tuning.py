"""Tuning of tiles on a device: each product of few rows is timed with every candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specbench.engine.kernels import launch, tiles
from specbench.engine.kernels.attention import attend
from specbench.engine.kernels.block import LayerKernels, Stream
from specbench.engine.masks import TreeMask
from specbench.engine.ops import KVCache


def can_measure(device: torch.device) -> bool:
    return device.type == "cuda"


def tune(layers: LayerKernels, blocks: Sequence[Any], nodes: Iterable[int], rows: int, slots: int) -> None:
    """Choose the tiles of passes of `rows` sequences over each number of nodes: of products with the weights of all
    `blocks`, one after the other, so that none stays in a cache, and of attention to caches of `slots` positions. Each
    is recorded as a graph. Tuned ones are neither measured again nor replaced; new ones are saved. Without CUDA nothing
    happens."""
    if not can_measure(blocks[0].attention.wqkv.weight.device):
        return
    table = layers.tiles
    before = len(table.tuned) + len(table.tuned_attention)
    for count in nodes:
        for kind, weight, run in _products(layers, blocks, rows * count):
            out, width = weight.shape
            out = out // 2 if kind == "qkv" else out
            key = table.key(kind, rows * count, out, width, weight.dtype)
            if layers.small(rows * count, weight):
                _choose(table.tuned, key, tiles.candidates(kind, rows * count, width, weight.dtype), run)
        heads, queries, like, attend = _attention(layers, blocks, count, rows, slots)
        shape = queries, like.shape[-1], like.dtype
        tried = tiles.attention_candidates(*shape, launch.can_depend(like.device))
        _choose(table.tuned_attention, table.attention_key(heads, *shape), tried, attend)
    if len(table.tuned) + len(table.tuned_attention) > before:
        table.save()


def _choose(table: dict[str, tiles.T], key: str, tried: Iterable[tiles.T], run: Callable[[], None]) -> None:
    """Put into the table, under a key that it does not have, the tile with which `run` is fastest."""
    if key in table:
        return

    def timed(tile: tiles.T) -> None:
        table[key] = tile
        run()

    best = None
    try:
        best = tiles.fastest(tried, timed)
    finally:
        table.pop(key, None)
        if best is not None:
            table[key] = best


def _attention(
    layers: LayerKernels, blocks: Sequence[Any], nodes: int, rows: int, slots: int
) -> tuple[int, int, Tensor, Callable[[], None]]:
    """Attention of `nodes` nodes of each row to a full cache, in as many layers as there are blocks: heads of keys in
    all rows, queries that share one, queries (R, n, heads, head dim), and a function that computes it."""
    c, like = blocks[0].attention.cfg, blocks[0].attention.wqkv.weight
    q = torch.randn(rows, nodes, c.n_heads, c.head_dim, device=like.device, dtype=like.dtype)
    cache = KVCache(len(blocks), rows, c.n_kv_heads, slots + nodes, c.head_dim, q)
    start = torch.zeros(rows, dtype=torch.int64, device=q.device)
    among = torch.ones(1, nodes, nodes, dtype=torch.bool, device=q.device).tril()
    mask, dependent = TreeMask(start, start + slots, among), layers.depends(q.device)

    def attended() -> None:
        for k, v in zip(cache.k, cache.v, strict=True):
            attend(q, k, v, mask, layers.counters, layers.tiles, dependent)

    return rows * c.n_kv_heads, nodes * c.n_heads // c.n_kv_heads, q, attended


def _products(
    layers: LayerKernels, blocks: Sequence[Any], rows: int
) -> list[tuple[tiles.Kind, Tensor, Callable[[], None]]]:
    """The products of a block: kind, weight, and a function that computes them for all blocks."""
    one, like = blocks[0], blocks[0].attention.wqkv.weight
    c = one.attention.cfg
    x = torch.randn(rows, c.dim, device=like.device, dtype=like.dtype)
    inner = torch.randn(rows, c.ffn_dim, device=like.device, dtype=like.dtype)
    context = SimpleNamespace(
        rows=1,
        nodes=rows,
        rope=torch.zeros(1, rows, c.head_dim // 2, 2, device=like.device),
        slots=torch.arange(rows, device=like.device)[None],
        cache=KVCache(len(blocks), 1, c.n_kv_heads, rows, c.head_dim, x),
    )

    def queries() -> None:
        for i, block in enumerate(blocks):
            layers._queries(block.attention, None if c.post_norm else block.attention_norm, Stream(x), context, i)

    def attended() -> None:
        for block in blocks:
            layers._add(x, block.attention.wo.weight, Stream(x), None, False)

    def gates() -> None:
        for block in blocks:
            layers._gated(Stream(x), None if c.post_norm else block.ffn_norm, block.feed_forward)

    def fed() -> None:
        for block in blocks:
            layers._add(inner, block.feed_forward.w2.weight, Stream(x), None, False)

    found: list[tuple[tiles.Kind, Tensor, Callable[[], None]]] = []
    if not (c.qk_norm or c.qkv_bias):
        found.append(("qkv", like, queries))
    return [
        *found,
        ("add", one.attention.wo.weight, attended),
        ("gate", one.feed_forward.w1.weight, gates),
        ("add", one.feed_forward.w2.weight, fed),
    ]
