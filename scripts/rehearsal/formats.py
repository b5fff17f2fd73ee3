"""Files of tensors in published formats, of any size: written piece by piece, and a tensor of zeros is a hole."""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specbench.models.loading.naming import ParameterSlice, Table

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.uint8: "U8"}
#: Normal numbers that all tensors are cut from. Their number is prime: no two rows of a matrix are the same.
_NOISE = 4194301


@dataclass(frozen=True)
class Entry:
    """A tensor of a file. deviation: of its normal numbers, or None for a constant one; value: the constant."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    deviation: float | None = None
    value: float = 0.0

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def is_hole(self) -> bool:
        return self.deviation is None and self.value == 0

    def pieces(self, start: int) -> Iterator[Tensor]:
        """Its values in order; start: where in the noise it begins."""
        for at in range(0, self.count, _NOISE):
            size = min(_NOISE, self.count - at)
            if self.deviation is None:
                yield torch.full((size,), self.value, dtype=self.dtype)
            else:
                yield (_noise(start % _NOISE, size) * self.deviation).to(self.dtype)


Entries = dict[str, Entry]
_block: list[Tensor] = []


def _noise(start: int, size: int) -> Tensor:
    if not _block:
        _block.append(torch.randn(_NOISE, generator=torch.Generator().manual_seed(0)))
    [block] = _block
    return block[start : start + size] if start + size <= _NOISE else block.roll(-start)[:size]


def entry(name: str, shape: tuple[int, ...], dtype: torch.dtype, hole: bool = False) -> Entry:
    """Random weights of unit gain, norms of one and biases of zero, as weights=random has them. hole: zeros."""
    if hole or not dtype.is_floating_point:
        return Entry(shape, dtype)
    if len(shape) < 2 or (len(shape) == 2 and "norm" in name):
        return Entry(shape, dtype, None, float(not name.endswith(("bias", "running_mean"))))
    return Entry(shape, dtype, math.prod(shape[1:]) ** -0.5)


def of_module(
    module: nn.Module, table: Table | None, dtype: torch.dtype, rows: int = 0, holes: Collection[str] = ()
) -> Entries:
    """The official tensors of a module on the meta device, by its table (None: its own names).

    rows: the rows of an official tensor from which the table picks some. holes: tensors with one of these parts in
    their names are zeros.
    """
    state, entries = module.state_dict(), {}
    for name, dest in (table or {name: ParameterSlice(name) for name in state}).items():
        tensor = state[dest.name]
        count = rows if dest.pick is not None and dest.rows is None else dest.rows
        shape = tuple(tensor.shape) if count is None else (count, *tensor.shape[1:])
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        entries[name] = entry(name, shape, kind, len(shape) > 1 and any(part in name for part in holes))
    return entries


def rest(entries: Entries, name: str, size: int, dtype: torch.dtype) -> Entries:
    """With one more tensor of zeros, so that the file has its official `size` in bytes: what a run does not read."""
    missing = size - sum(e.bytes for e in entries.values())
    return entries | ({name: Entry((missing // dtype.itemsize,), dtype)} if missing > 0 else {})


def write_safetensors(path: Path, entries: Mapping[str, Entry]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, e in entries.items():
        header[name] = {"dtype": _NAMES[e.dtype], "shape": list(e.shape), "data_offsets": [end, end + e.bytes]}
        end += e.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        first = f.tell()
        for name, e in entries.items():
            if e.is_hole:
                continue
            f.seek(first + header[name]["data_offsets"][0])
            for piece in e.pieces(f.tell()):
                f.write(piece.view(torch.uint8).numpy().data)
        f.truncate(first + end)


def write_pickled(path: Path, entries: Mapping[str, Entry], wrapper: str = "") -> None:
    """A file of torch.save, in the format of a zip archive; wrapper: the key that holds the tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    empty = {name: torch.empty(e.shape, dtype=e.dtype) for name, e in entries.items()}  # no page of it is touched
    with torch.serialization.skip_data():
        torch.save({wrapper: empty} if wrapper else empty, path)
    del empty
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        content = torch.load(path, mmap=True, weights_only=True)
    start = 0
    for name, tensor in (content[wrapper] if wrapper else content).items():
        e, at = entries[name], 0
        start += e.count
        for piece in () if e.is_hole else e.pieces(start):
            tensor.view(-1)[at : at + len(piece)].copy_(piece)
            at += len(piece)


def write_shards(folder: Path, entries: Mapping[str, Entry], largest: int, ending: str = "safetensors") -> None:
    """A Hugging Face folder's weights: one file, or shards of at most `largest` bytes with their index."""
    stem = "model" if ending == "safetensors" else "pytorch_model"
    write = write_safetensors if ending == "safetensors" else write_pickled
    parts: list[Entries] = [{}]
    for name, e in entries.items():
        if parts[-1] and sum(x.bytes for x in parts[-1].values()) + e.bytes > largest:
            parts.append({})
        parts[-1][name] = e
    if len(parts) == 1:
        write(folder / f"{stem}.{ending}", entries)
        return
    index = {}
    for number, part in enumerate(parts, 1):
        file = f"{stem}-{number:05d}-of-{len(parts):05d}.{ending}"
        write(folder / file, part)
        index |= dict.fromkeys(part, file)
    size = sum(e.bytes for e in entries.values())
    write_json(folder / f"{stem}.{ending}.index.json", {"metadata": {"total_size": size}, "weight_map": index})


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
