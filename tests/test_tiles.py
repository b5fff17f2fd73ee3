"""Tiles of products: a table that is tuned once on a device and kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specbench.models.transformer import Block, BlockConfig

pytest.importorskip("triton")
from specbench.engine.kernels import FusedKernels, tiles, tuning
from specbench.engine.kernels.tiles import Tile, Tiles

CFG = BlockConfig(32, 2, 2, 48)


def _tuned(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FusedKernels, list[int]]:
    """Tuned for 2 and 3 rows, on a device where the widest tile is fastest."""
    runs: list[int] = []
    kernels = FusedKernels(Tiles.load(path))

    def seconds(run: Callable[[], None], samples: int) -> float:
        runs.append(samples)
        run()
        return -max(tile.over for tile in kernels.layers.tiles.tuned.values())

    monkeypatch.setattr(tuning, "can_measure", lambda device: True)
    monkeypatch.setattr(tiles, "_seconds", seconds)
    monkeypatch.setattr(tiles, "candidates", lambda *_: [Tile(16, 0), Tile(32, 0)])
    with torch.inference_mode():
        kernels.tune([Block(CFG), Block(CFG)], (2, 3))
    return kernels, runs


def test_tuned_tiles_are_kept_for_the_same_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache" / "tiles.json"
    kernels, runs = _tuned(path, monkeypatch)
    assert len(runs) == 2 * 2 * 4  # rows, tiles, products
    tuned = kernels.layers.tiles
    assert {tile.over for tile in tuned.tuned.values()} <= {16, 32}
    assert tuned.product("gate", 2, 48, 32, torch.float32) in tuned.tuned.values()
    assert Tiles.load(path).tuned == tuned.tuned
    _, runs = _tuned(path, monkeypatch)
    assert not runs  # all are known
    held = json.loads(path.read_text())
    for other in (held | {"made_for": {"triton": "0", "device": "another"}}, [], {"made_for": held["made_for"]}):
        path.write_text(json.dumps(other))
        assert not Tiles.load(path).tuned


def test_nothing_is_measured_without_a_device(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    FusedKernels(Tiles.load(tmp_path / "tiles.json")).tune([Block(CFG)], (1, 2))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_suit_what_kernels_can_take(dtype: torch.dtype) -> None:
    """Powers of two, whose shared memory suffices: all stages of both weights and of 16 rows."""
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


def test_a_window_of_64_reads_the_cache_once() -> None:
    assert Tiles.attention(65, 128, torch.bfloat16, hopper=True).queries == 128
    assert Tiles.attention(65, 64, torch.bfloat16, hopper=False).queries == 128
    assert Tiles.attention(26, 64, torch.bfloat16, hopper=True).queries == 32
