"""Tuning of tiles on a device: each product of few rows is timed with every candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specbench.engine.kernels import tiles
from specbench.engine.kernels.block import LayerKernels, Stream
from specbench.engine.ops import KVCache


def can_measure(device: torch.device) -> bool:
    return device.type == "cuda"


def tune(layers: LayerKernels, blocks: Sequence[Any], rows: Iterable[int]) -> None:
    """Choose the tiles of products of `rows` rows with the weights of all `blocks`, one after the other, so that none
    stays in a cache; each recorded as a graph. Tuned ones are neither measured again nor replaced; new ones are saved.
    Without CUDA nothing happens."""
    if not can_measure(blocks[0].attention.wqkv.weight.device):
        return
    before = len(layers.tiles.tuned)
    for count in rows:
        for kind, weight, run in _products(layers, blocks, count):
            out, width = weight.shape
            out = out // 2 if kind == "qkv" else out
            key = layers.tiles.key(kind, count, out, width, weight.dtype)
            if key in layers.tiles.tuned or not layers.small(count, weight):
                continue

            def timed(tile: tiles.Tile, key: str = key, run: Callable[[], None] = run) -> None:
                layers.tiles.tuned[key] = tile
                run()

            best = None
            try:
                best = tiles.fastest(tiles.candidates(kind, count, width, weight.dtype), timed)
            finally:
                layers.tiles.tuned.pop(key, None)
                if best is not None:
                    layers.tiles.tuned[key] = best
    if len(layers.tiles.tuned) > before:
        layers.tiles.save()


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
