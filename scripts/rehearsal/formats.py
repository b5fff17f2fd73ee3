"""Files of tensors in published formats, of any size: filled through a memory map, and a tensor of zeros is a hole."""

from __future__ import annotations

import json
import mmap
import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specbench.models.loading.naming import ParameterSlice, Table

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}
#: Tensors by name, on the meta device: shapes and formats.
Shapes = dict[str, Tensor]


def shape(dtype: torch.dtype, *sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def of_module(module: nn.Module, table: Table | None, dtype: torch.dtype, rows: int = 0) -> Shapes:
    """The official tensors of a module on the meta device, by its table (None: its own names). rows: the rows of an
    official tensor from which the table picks some."""
    state, shapes = module.state_dict(), {}
    for name, dest in (table or {name: ParameterSlice(name) for name in state}).items():
        tensor = state[dest.name]
        count = rows if dest.pick is not None and dest.rows is None else dest.rows
        sizes = tensor.shape if count is None else (count, *tensor.shape[1:])
        shapes[name] = shape(dtype if tensor.is_floating_point() else tensor.dtype, *sizes)
    return shapes


def write(file: Path, shapes: Mapping[str, Tensor], wrapper: str = "", holes: str = "") -> None:
    """A safetensors file, or one of torch.save whose key `wrapper` holds the tensors. They are random weights of unit
    gain, norms of one and biases of zero, as weights=random has them; zeros where `holes` is found in their names."""
    file.parent.mkdir(parents=True, exist_ok=True)
    for name, tensor in (_safetensors if file.suffix == ".safetensors" else _pickled)(file, shapes, wrapper).items():
        if not tensor.is_floating_point() or (holes and tensor.dim() > 1 and re.search(holes, name)):
            continue
        if tensor.dim() < 2 or (tensor.dim() == 2 and "norm" in name):
            tensor.fill_(0.0 if name.endswith(("bias", "running_mean")) else 1.0)
        else:
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            tensor.normal_(0, tensor[0].numel() ** -0.5, generator=draw)


def _safetensors(file: Path, shapes: Mapping[str, Tensor], _: str) -> Shapes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, t in sorted(shapes.items(), key=lambda item: -item[1].itemsize):  # each begins at a multiple of its size
        header[name] = {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [end, end + t.nbytes]}
        end += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        first = f.tell()
        f.truncate(first + end)
    content = torch.from_file(str(file), shared=True, size=first + end, dtype=torch.uint8)
    tensors = {name: content[first:][slice(*header[name]["data_offsets"])] for name in shapes}
    return {name: tensors[name].view(t.dtype).view(t.shape) for name, t in shapes.items()}


def _pickled(file: Path, shapes: Mapping[str, Tensor], wrapper: str) -> Shapes:
    empty = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in shapes.items()}  # no page of it is touched
    with torch.serialization.skip_data():
        torch.save({wrapper: empty} if wrapper else empty, file)
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        content = torch.load(file, mmap=True, weights_only=True)
    return content[wrapper] if wrapper else content


def write_shards(
    folder: Path, shapes: Mapping[str, Tensor], largest: int, ending: str = "safetensors", holes: str = ""
) -> None:
    """A Hugging Face folder's weights: one file, or shards of at most `largest` bytes with their index."""
    stem = "model" if ending == "safetensors" else "pytorch_model"
    parts: list[Shapes] = [{}]
    for name, tensor in shapes.items():
        if parts[-1] and sum(x.nbytes for x in parts[-1].values()) + tensor.nbytes > largest:
            parts.append({})
        parts[-1][name] = tensor
    if len(parts) == 1:
        write(folder / f"{stem}.{ending}", shapes, holes=holes)
        return
    index = {}
    for number, part in enumerate(parts, 1):
        file = f"{stem}-{number:05d}-of-{len(parts):05d}.{ending}"
        write(folder / file, part, holes=holes)
        index |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in shapes.values())
    write_json(folder / f"{stem}.{ending}.index.json", {"metadata": {"total_size": size}, "weight_map": index})


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
