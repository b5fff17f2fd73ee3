"""How the kernels of a layer divide their work: a table of tiles by shape, with defaults, tuned once per device.

Another tile sums in another order, so results differ in their last bits. Two devices, or a device before and after
tuning, agree like two engines do: not bit for bit.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton


@dataclass(frozen=True)
class Tile:
    """The tile of a product. over: outputs that a program computes (pairs of them for queries, keys and values); deep:
    inputs that it takes at once if the matrix units compute. warps, stages: as in Triton."""

    over: int
    deep: int
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True)
class AttentionTile:
    """queries, keys: the numbers that a program takes at once; waves: programs that share the keys, in multiples of the
    device's size."""

    queries: int
    keys: int
    warps: int
    stages: int
    waves: int


T = TypeVar("T", Tile, AttentionTile)
#: Bytes of the registers of a warp.
_WARP_BYTES = 32 * 256 * 4
#: The kinds of products: "qkv" (with the norm and the rotary embedding), "gate" (two products and SwiGLU), "add".
Kind = str


class Tiles:
    """Tiles by kind, rows, outputs, inputs and data type of a product, and by heads, queries, width and data type of
    attention. path: the file of tuned tiles, or None."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.tuned: dict[str, Tile] = {}
        self.tuned_attention: dict[str, AttentionTile] = {}

    @classmethod
    def load(cls, path: Path) -> Tiles:
        """The tiles that `save` wrote for this version of Triton and this device; else the defaults."""
        tiles = cls(path)
        try:
            stored = json.loads(path.read_text())
            if stored["made_for"] == made_for():
                products = {key: Tile(**fields) for key, fields in stored["tiles"].items()}
                attention = {key: AttentionTile(**fields) for key, fields in stored["attention"].items()}
                tiles.tuned, tiles.tuned_attention = products, attention
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return tiles

    def save(self) -> None:
        if self.path is None:
            return
        tables: dict[str, Mapping[str, Any]] = {"tiles": self.tuned, "attention": self.tuned_attention}
        stored: dict[str, Any] = {"made_for": made_for()}
        stored |= {name: {key: asdict(table[key]) for key in sorted(table)} for name, table in tables.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text(json.dumps(stored, indent=1) + "\n")
        new.replace(self.path)

    @staticmethod
    def key(kind: Kind, rows: int, out: int, width: int, dtype: torch.dtype) -> str:
        return f"{kind} {_bucket(rows)} rows {out} x {width} {str(dtype).removeprefix('torch.')}"

    def product(self, kind: Kind, rows: int, out: int, width: int, dtype: torch.dtype) -> Tile:
        """For a product of `rows` rows of `width` inputs each, with `out` outputs (pairs, for "qkv")."""
        return self.tuned.get(self.key(kind, rows, out, width, dtype)) or default(kind, rows, width, dtype)

    @staticmethod
    def attention_key(heads: int, queries: int, dim: int, dtype: torch.dtype) -> str:
        return f"{heads} heads {queries} queries {dim} {str(dtype).removeprefix('torch.')}"

    def attention(self, heads: int, queries: int, dim: int, dtype: torch.dtype, hopper: bool) -> AttentionTile:
        """For attention of `queries` queries that share keys, for each of `heads` heads of keys in all rows."""
        tuned = self.tuned_attention.get(self.attention_key(heads, queries, dim, dtype))
        return tuned or default_attention(queries, dim, dtype, hopper)


def _bucket(rows: int) -> int:
    """Rows that share tiles: each number up to four, then powers of two."""
    return rows if rows <= 4 else triton.next_power_of_2(rows)


def parts(width: int) -> tuple[int, int]:
    """The powers of two in which a width is read at once: the largest in it, and one that covers the rest, or 0."""
    first = triton.next_power_of_2(width + 1) // 2
    return first, triton.next_power_of_2(width - first) if width > first else 0


def default(kind: Kind, rows: int, width: int, dtype: torch.dtype) -> Tile:
    """Few rows: the weights that a program holds at once take about half of its threads' registers."""
    paired = kind != "add"
    if rows > 4:
        deep = 256 if dtype.itemsize <= 2 else 64
        return Tile(16, max(16, min(deep, triton.next_power_of_2(width))), 4, 4 if dtype.itemsize <= 2 else 3)
    over = (32768 // dtype.itemsize) // (sum(parts(width)) * (2 if paired else 1))
    return Tile(max(1, min(triton.next_power_of_2(over + 1) // 2, 2 if kind == "qkv" else 4)), 0, 4, 1)


def default_attention(queries: int, dim: int, dtype: torch.dtype, hopper: bool) -> AttentionTile:
    """Keys are read once for up to 128 queries. Before Hopper, whose matrix units leave sums in shared or tensor
    memory, for up to 64 with wide heads. In float32, which has no matrix units here, for up to 32."""
    block = max(16, triton.next_power_of_2(queries))
    if dtype.itemsize > 2:
        return AttentionTile(min(block, 32 if dim <= 64 else 16), 32 if dim <= 64 else 16, 8, 2, 2)
    block = min(block, 128 if hopper or dim <= 64 else 64)
    if block * dim > 8192:  # blocks of 64 keys would take more registers than a thread has
        return AttentionTile(block, 32, 8, 4, 1)
    return AttentionTile(block, 64, 8 if block * dim > 4096 else 4, 3, 1 if block > 64 else 2)


def attention_candidates(queries: int, dim: int, dtype: torch.dtype, hopper: bool) -> Iterable[AttentionTile]:
    """The tiles that tuning tries, the default first. A block of 64 is half empty for the 33 nodes of a window of 32;
    smaller blocks read the keys from the L2 cache several times."""
    first = default_attention(queries, dim, dtype, hopper)
    yield first
    if dtype.itemsize > 2:
        return
    fit = (block for block in (16, 32, 64, 128) if block * dim <= 8192)
    blocks = [block for block in fit if first.queries <= 4 * block <= 4 * first.queries]
    shapes = ((32, 4, 4, 1), (64, 4, 3, 2), (64, 8, 3, 1), (128, 8, 2, 1))
    tiles = [AttentionTile(block, *shape) for block in blocks for shape in shapes]
    yield from (tile for tile in tiles if tile != first)


def candidates(kind: Kind, rows: int, width: int, dtype: torch.dtype) -> Iterable[Tile]:
    """The tiles that tuning tries, the default first."""
    first = default(kind, rows, width, dtype)
    yield first
    if rows <= 4:
        # a program with one warp sums without shared memory, one with several reads the activations less often; a warp
        # has registers for 32 KB of weights and activations
        vectors, size = 1 if kind == "add" else 2, sum(parts(width)) * dtype.itemsize
        tiles = [
            Tile(over, 0, warps, 1)
            for warps in (1, 2, 4, 8)
            for over in (1, 2, 4, 8)
            if warps <= 2 * over and (vectors * over + rows) * size < warps * _WARP_BYTES
        ]
    else:
        tiles = [
            Tile(over, deep, warps, stages)
            for over in (8, 16, 32)
            for deep, warps, stages in ((128, 4, 5), (256, 4, 3), (256, 4, 4), (512, 4, 2), (256, 8, 3))
            if deep < 2 * width
        ]
    yield from (tile for tile in tiles if tile != first)


def fastest(tiles: Iterable[T], run: Callable[[T], None]) -> T:
    """The tile with which `run` takes the least time on the current CUDA device, recorded as a graph. A tile that does
    not compile, or needs more shared memory than the device has, is skipped. RuntimeError if none works."""
    best, least = None, float("inf")
    for tile in tiles:
        try:
            seconds = _seconds(partial(run, tile))
        except (RuntimeError, triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError):
            continue
        if seconds < least:
            best, least = tile, seconds
    if best is None:
        raise RuntimeError("no tile can be used on this device")
    return best


def _seconds(run: Callable[[], None]) -> float:
    """Seconds of a replay of `run`: the median of five measurements."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    took = []
    for _ in range(5):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(10):
            graph.replay()
        last.record()
        last.synchronize()
        took.append(first.elapsed_time(last))
    return statistics.median(took) / 1e4


def made_for() -> dict[str, str]:
    """The versions that a table of tuned tiles is valid for."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"triton": triton.__version__, "device": device}
