"""Tiles of products: a table that is tuned once on a device and stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specbench.models.transformer import Block, BlockConfig

pytest.importorskip("triton")
from specbench.engine.kernels import FusedKernels, block, tiles
from specbench.engine.kernels.tiles import AttentionTile, Tile, Tiles

CFG = BlockConfig(32, 2, 2, 48)


def _tuned(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FusedKernels, list[Callable[[], None]]]:
    """Kernels tuned for 1 and 2 nodes of two rows, on a device where the tile that takes most at once is fastest."""
    runs: list[Callable[[], None]] = []
    kernels = FusedKernels(Tiles.load(path))

    def seconds(run: Callable[[], None]) -> float:
        runs.append(run)
        run()
        table = kernels.layers.tiles
        return -max(t.over for t in table.tuned.values()) - sum(t.keys for t in table.tuned_attention.values())

    monkeypatch.setattr(block, "can_measure", lambda device: True)
    monkeypatch.setattr(tiles, "_seconds", seconds)
    monkeypatch.setattr(block, "candidates", lambda *_: [Tile(16, 0), Tile(32, 16)])
    monkeypatch.setattr(block, "attention_candidates", lambda *_: [AttentionTile(16, n, 4, 1, 1) for n in (16, 32)])
    with torch.inference_mode():
        kernels.tune([Block(CFG), Block(CFG)], (1, 2), 2, 20)
    return kernels, runs


def test_tuned_tiles_are_stored_for_the_same_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache" / "tiles.json"
    kernels, runs = _tuned(path, monkeypatch)
    assert len(runs) == 2 * 2 * 5  # nodes, tiles, products and attention
    tuned = kernels.layers.tiles
    assert tuned.tuned_attention == {f"4 heads {n} queries 16 float32": AttentionTile(16, 32, 4, 1, 1) for n in (1, 2)}
    assert tuned.attention(4, 2, 16, torch.float32, False).keys == 32
    assert tuned.attention(4, 3, 16, torch.float32, False) == tiles.default_attention(3, 16, torch.float32, False)
    assert {tile.over for tile in tuned.tuned.values()} <= {16, 32}
    assert tuned.product("gate", 2, 48, 32, torch.float32) in tuned.tuned.values()
    assert Tiles.load(path).tuned == tuned.tuned
    assert Tiles.load(path).tuned_attention == tuned.tuned_attention
    _, runs = _tuned(path, monkeypatch)
    assert not runs  # all tiles are known
    content = json.loads(path.read_text())
    for other in (content | {"made_for": {"triton": "0", "device": "another"}}, [], {"made_for": content["made_for"]}):
        path.write_text(json.dumps(other))
        assert not Tiles.load(path).tuned


def test_nothing_is_measured_without_a_device(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    FusedKernels(Tiles.load(tmp_path / "tiles.json")).tune([Block(CFG)], (1, 2), 2, 20)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_suit_what_kernels_can_take(dtype: torch.dtype) -> None:
    """The sizes are powers of two, and shared memory suffices for all stages of both weights and of 16 rows."""
    for width in (20, 1280, 3584, 4096):
        for kind in ("qkv", "gate", "add"):
            for rows in (1, 2, 4, 5, 16):
                for tile in (tiles.default(kind, rows, width, dtype), *tiles.candidates(kind, rows, width, dtype)):
                    assert tile.over & (tile.over - 1) == tile.deep & (tile.deep - 1) == 0
                default = tiles.default(kind, rows, width, dtype)
                shared = default.stages * default.deep * (2 * default.over + 16) * dtype.itemsize
                assert shared <= 163 << 10
    assert all(
        first + rest >= width >= first > rest // 2
        for width in (16, 20, 1280, 3584)
        for first, rest in [tiles.parts(width)]
    )


def test_smaller_blocks_are_tried_for_a_window_of_32() -> None:
    """Its 33 nodes fill only half of a block of 64."""
    tried = list(tiles.attention_candidates(33, 128, torch.bfloat16, True))
    assert tried[0] == tiles.default_attention(33, 128, torch.bfloat16, True)
    assert {tile.queries for tile in tried} == {16, 32, 64}
    assert len(set(tried)) == len(tried) < 16
    assert max(tile.queries for tile in list(tiles.attention_candidates(65, 128, torch.bfloat16, True))[1:]) == 64
    assert len(list(tiles.attention_candidates(33, 128, torch.float32, True))) == 1


def test_a_window_of_64_reads_the_cache_once() -> None:
    assert tiles.default_attention(65, 128, torch.bfloat16, hopper=True).queries == 128
    assert tiles.default_attention(65, 64, torch.bfloat16, hopper=False).queries == 128
    assert tiles.default_attention(26, 64, torch.bfloat16, hopper=True).queries == 32


def test_tiles_that_registers_cannot_hold_are_not_tried() -> None:
    """For the products of Lumina-mGPT 7B: the tiles that are left out spill kilobytes when compiled."""
    tried = {tile for tile in tiles.candidates("add", 2, 11008, torch.bfloat16) if tile.warps < 4}
    assert tried == set()
    assert Tile(2, 0, 2, 1) in set(tiles.candidates("gate", 2, 4096, torch.bfloat16))
    assert Tile(4, 0, 2, 1) not in set(tiles.candidates("gate", 2, 4096, torch.bfloat16))
