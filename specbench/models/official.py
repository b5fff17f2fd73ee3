"""Weights in the formats their makers publish: safetensors and PyTorch files, single or in shards.

A user's file may be hostile or broken: only tensors are unpickled, everything is checked against the model before a
value is read, and each mistake has its own sentence. Files are mapped into memory and read one
tensor after the other, so that loading needs the model and one shard, never the model twice.
"""

from __future__ import annotations

import json
import logging
import math
import pickle
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from specbench.errors import UsageError
from specbench.models.naming import ParameterSlice

_LOG = logging.getLogger("specbench")
Module = TypeVar("Module", bound=nn.Module)

#: The files that are looked for in a folder, in this order (as transformers does).
NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
CHUNK = 1 << 24  # values that are cast and checked at a time


@dataclass(frozen=True)
class Info:
    """The header of a tensor, before its values are read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path


class Shard(Protocol):
    """One file of tensors."""

    @property
    def file(self) -> Path: ...

    def infos(self) -> dict[str, Info]:
        """Every tensor of the file, without its values."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of these names, on the CPU, with as little of the file in memory as its format allows."""


class CheckpointSource:
    """The tensors of a checkpoint, by their official names; values come from `read`."""

    def __init__(self, path: Path, shards: Sequence[Shard]) -> None:
        self.path = path
        self.files = [shard.file for shard in shards]
        self.tensors: dict[str, Info] = {}
        self._shards = shards
        for shard in shards:
            for name, info in shard.infos().items():
                if name in self.tensors:
                    first = self.tensors[name].file.name
                    raise UsageError(
                        f"tensor {name!r} is in {first} and in {shard.file.name} of '{path}'; fetch these files again"
                    )
                self.tensors[name] = info

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) pairs in the order of the files. Drop a tensor before reading the next one: as long as it
        exists, its file stays in memory."""
        wanted: dict[Path, list[str]] = {}
        for name in names:
            wanted.setdefault(self.tensors[name].file, []).append(name)
        for shard in self._shards:
            yield from shard.read(wanted.get(shard.file, ()))


def from_tensors(tensors: Mapping[str, Tensor], name: str = "memory") -> CheckpointSource:
    """A source whose tensors are in memory already."""
    return CheckpointSource(Path(name), [_Memory(Path(name), tensors)])


def open_source(path: Path, wrappers: Sequence[str] = (), allowed: Sequence[type] = ()) -> CheckpointSource:
    """A weights file, or a folder that holds one of `NAMES`; a UsageError names what is wrong with it.

    A PyTorch file may keep its tensors under one of the keys `wrappers`, which are tried in their order; it may also be
    a bare state dict. `allowed` are types that such a file may hold in addition to tensors, such as
    argparse.Namespace.
    """
    if path.is_dir():
        found = next((path / name for name in NAMES if (path / name).is_file()), None)
        if found is None:
            raise UsageError(
                f"'{path}' holds none of {', '.join(NAMES)}; fetch the model's files there, or name its weights file"
            )
    elif path.is_file():
        found = path
    else:
        raise UsageError(f"there is no file or folder '{path}'; fetch the weights, or correct the path")
    if not found.name.endswith(".index.json"):
        return CheckpointSource(path, [_shard(found, wrappers, allowed)])
    listed = _index(found)
    names = sorted(set(listed.values()))
    if absent := [name for name in names if not (found.parent / name).is_file()]:
        raise UsageError(f"{found} names {_few(absent)}, which are not next to it; fetch the absent files")
    source = CheckpointSource(path, [_shard(found.parent / name, wrappers, allowed) for name in names])
    for tensor, name in listed.items():
        if tensor not in source.tensors or source.tensors[tensor].file.name != name:
            raise UsageError(f"{found} maps tensor {tensor!r} to {name}, which lacks it; fetch both again")
    return source


def config(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder."""
    return _json_object(folder / "config.json")


def check(
    module: nn.Module, source: CheckpointSource, table: Mapping[str, ParameterSlice], ignored: Sequence[str] = ()
) -> None:
    """Checks that `source` holds exactly what `table` assigns to `module`, by names, shapes and kinds of dtype; reads
    no values.

    `ignored` are regular expressions of entire official names that the module does not need. Raises a
    UsageError for what is wrong with the file, a ValueError for what is wrong with the table.
    """
    own = module.state_dict(keep_vars=True)
    _check_table(own, table)
    if missing := [name for name in table if name not in source.tensors]:
        raise UsageError(
            f"{source.path}: tensor {_few(missing)} is missing; the file is incomplete, or of another model"
        )
    drop = re.compile("|".join(f"(?:{pattern})" for pattern in ignored) or r"(?!)")
    if surplus := [name for name in source.tensors if name not in table and not drop.fullmatch(name)]:
        file = source.tensors[surplus[0]].file
        raise UsageError(f"{file}: tensor {_few(surplus)} belongs to no part of this model; name this model's file")
    wrong = [name for name, dest in table.items() if not _fits(source.tensors[name], own[dest.name], dest)]
    if wrong:
        info, dest = source.tensors[wrong[0]], table[wrong[0]]
        raise UsageError(
            f"{info.file}: tensor '{wrong[0]}' has shape {list(info.shape)}, expected "
            f"{_expected(own[dest.name], dest)}{_and_more(wrong)}; name the file of a model of this size"
        )
    kinds = [n for n, dest in table.items() if _kind(source.tensors[n].dtype) != _kind(own[dest.name].dtype)]
    if kinds:
        info = source.tensors[kinds[0]]
        raise UsageError(
            f"{info.file}: tensor '{kinds[0]}' holds {_word(info.dtype)} values, expected "
            f"{_kind(own[table[kinds[0]].name].dtype)} ones{_and_more(kinds)}; name a file that is not quantised"
        )


def load(
    build: Callable[[], Module],
    source: CheckpointSource,
    table: Mapping[str, ParameterSlice],
    device: torch.device | str,
    dtype: torch.dtype,
    ignored: Sequence[str] = (),
) -> Module:
    """The module that `build` makes, filled from `source` by `table`: on `device`, floating values as `dtype`, in
    evaluation mode, without gradients.

    `build` runs on the meta device, so that it costs nothing. Parameters and persistent buffers come from the source;
    other tensors that `build` makes must be made within torch.device("cpu") and are moved to `device`. Errors are those
    of `check`, and a UsageError for a value that is not finite, or not as `dtype`.
    """
    start = time.perf_counter()
    with torch.device("meta"):
        module = build()
    check(module, source, table, ignored)
    _allocate(module, torch.device(device), dtype)
    own = module.state_dict()
    for name, tensor in source.read(table):
        dest = table[name]
        if not _fill(_rows(own[dest.name], dest), tensor, dest.pick):
            where = f"{source.tensors[name].file}: tensor '{name}' holds"
            if not tensor.isfinite().all():
                raise UsageError(f"{where} NaN or infinity; fetch the file again")
            raise UsageError(f"{where} values that {_word(dtype)} cannot hold; use dtype=bfloat16 or dtype=float32")
        del tensor  # before the next shard is opened
    module.eval().requires_grad_(False)
    size = sum(info.dtype.itemsize * math.prod(info.shape) for info in map(source.tensors.__getitem__, table))
    _LOG.info("loaded %.2f GB from %s in %.1f s", size / 1e9, source.path, time.perf_counter() - start)
    return module


def exported(module: nn.Module, table: Mapping[str, ParameterSlice]) -> dict[str, Tensor]:
    """A module's tensors under their official names, as `load` with the same table reads them; copies, since a file
    holds no storage twice. For tables that pick no rows."""
    state, found = module.state_dict(), {}
    for name, dest in table.items():
        tensor = state[dest.name]
        found[name] = (tensor if dest.rows is None else tensor[dest.start : dest.start + dest.rows]).clone()
    return found


# --- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Memory:
    file: Path
    tensors: Mapping[str, Tensor]

    def infos(self) -> dict[str, Info]:
        return {name: Info(tuple(t.shape), t.dtype, self.file) for name, t in self.tensors.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.tensors[name]) for name in names)


@dataclass(frozen=True)
class _Safetensors:
    file: Path

    def infos(self) -> dict[str, Info]:
        found = {}
        with self._open() as f:
            for name in f.keys():  # noqa: SIM118 (no mapping)
                tensor = f.get_tensor(name)  # a view of the mapped file: its values are not read
                found[name] = Info(tuple(tensor.shape), tensor.dtype, self.file)
        return found

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        with self._open() as f:
            for name in names:
                yield name, f.get_tensor(name)

    @contextmanager
    def _open(self) -> Iterator[Any]:
        try:
            with safe_open(self.file, framework="pt") as f:
                yield f
        except (SafetensorError, OSError) as e:
            raise _unreadable(self.file, "safetensors file", e) from e


@dataclass(frozen=True)
class _Pickled:
    """A file of torch.save. Zip archives are mapped; files of the older format have to be read completely."""

    file: Path
    wrappers: Sequence[str]
    allowed: Sequence[type]

    def infos(self) -> dict[str, Info]:
        return {name: Info(tuple(t.shape), t.dtype, self.file) for name, t in self._tensors(values=False).items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        names = list(names)
        tensors = self._tensors(values=True) if names else {}
        for name in names:
            yield name, tensors.pop(name)

    def _tensors(self, values: bool) -> dict[str, Tensor]:
        content = self._content(values)
        if not isinstance(content, dict):
            raise UsageError(
                f"'{self.file}' holds a {type(content).__name__}, not tensors by name; name a weights file"
            )
        inner = next((content[key] for key in self.wrappers if isinstance(content.get(key), dict)), content)
        tensors = {name: t for name, t in inner.items() if isinstance(name, str) and isinstance(t, Tensor)}
        if not tensors:
            raise UsageError(
                f"'{self.file}' holds no tensors under {' or '.join([*self.wrappers, 'its top level'])}, only "
                f"{_few([str(key) for key in inner])}; name a weights file"
            )
        plain = (torch.strided, False, False)
        if odd := [name for name, t in tensors.items() if (t.layout, t.is_quantized, values and t.is_meta) != plain]:
            raise UsageError(
                f"{self.file}: tensor {_few(odd)} is sparse, quantised or without values; name a file of plain tensors"
            )
        return tensors

    def _content(self, values: bool) -> Any:
        head = _head(self.file)
        mapped = head.startswith(b"PK\x03\x04")
        device = "cpu" if mapped or values else "meta"
        try:
            with torch.serialization.safe_globals(list(self.allowed)), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # our sentences replace them
                return torch.load(str(self.file), map_location=device, weights_only=True, mmap=mapped)
        except Exception as e:  # a broken pickle raises anything
            raise self._refused(head, e) from e

    def _refused(self, head: bytes, error: Exception) -> UsageError:
        """The sentence for an error of torch.load: a pickle of more than tensors, or a broken file."""
        refused = isinstance(error, pickle.UnpicklingError) and head[:2] in (
            b"PK",
            *(b"\x80%c" % n for n in range(2, 6)),
        )
        if not refused and "TorchScript" not in str(error):
            return _unreadable(self.file, "PyTorch file", error)
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        return UsageError(
            f"'{self.file}' holds more than tensors{f' ({name[1]})' if name else ''}, and loading it could run code; "
            "where you trust it, save its tensors with safetensors.torch.save_file, and name that file"
        )


def _shard(file: Path, wrappers: Sequence[str], allowed: Sequence[type]) -> Shard:
    return _Safetensors(file) if file.suffix == ".safetensors" else _Pickled(file, wrappers, allowed)


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as f:
            return f.read(100)
    except OSError:  # the read that follows fails, too, and reports why
        return b""


def _unreadable(file: Path, kind: str, error: Exception) -> UsageError:
    if _head(file).startswith(b"version https://git-lfs"):
        return UsageError(f"'{file}' is a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`")
    reason = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
    return UsageError(f"'{file}' is not a readable {kind}, or only a part of one ({reason}); fetch it again")


def _index(file: Path) -> dict[str, str]:
    """Tensor name -> file name, as the index of a folder in shards lists them."""
    listed = _json_object(file).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise UsageError(f"{file} has no 'weight_map'; fetch it again")
    for tensor, name in listed.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise UsageError(f"{file} puts tensor {tensor!r} into {name!r}, which is not a file name; fetch it again")
    return listed


def _json_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise UsageError(f"cannot read {file} ({e}); fetch it again") from e
    if not isinstance(content, dict):
        raise UsageError(f"{file} is not a JSON object; fetch it again")
    return content


# --- checks -----------------------------------------------------------------------------------------------------------


def _few(names: Sequence[str]) -> str:
    return f"{names[0]!r}{_and_more(names)}"  # names may hold anything: escaped


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "floating-point"
    return "complex" if dtype.is_complex else "bool" if dtype == torch.bool else "integer"


def _span(parameter: Tensor, dest: ParameterSlice) -> tuple[int, int]:
    """First row and end row of an entry of the table in a parameter; a scalar counts as one row."""
    rows = parameter.shape[0] if parameter.ndim else 1
    return dest.start, rows if dest.rows is None else dest.start + dest.rows


def _rows(parameter: Tensor, dest: ParameterSlice) -> Tensor:
    first, behind = _span(parameter, dest)
    return (parameter if parameter.ndim else parameter.view(1))[first:behind]


def _fits(info: Info, parameter: Tensor, dest: ParameterSlice) -> bool:
    if dest.pick is None:
        return list(info.shape) == _expected(parameter, dest)
    needed = int(dest.pick.max()) + 1
    return info.shape[1:] == parameter.shape[1:] and len(info.shape) == parameter.ndim and info.shape[0] >= needed


def _expected(parameter: Tensor, dest: ParameterSlice) -> Any:
    """The official tensor's shape, for the check and for its message."""
    if not parameter.ndim:
        return []
    first, behind = _span(parameter, dest)
    if dest.pick is None:
        return [behind - first, *parameter.shape[1:]]
    return f"at least {int(dest.pick.max()) + 1} rows of {list(parameter.shape[1:])}"


def _check_table(own: Mapping[str, Any], table: Mapping[str, ParameterSlice]) -> None:
    """Checks that the table fills every row of every tensor of the module once; mistakes are ours, not the user's."""
    names: dict[int, str] = {}  # tied parameters are one tensor of several names
    spans: dict[int, list[tuple[int, int]]] = {}
    for name, tensor in own.items():
        names.setdefault(id(tensor), name)
        spans.setdefault(id(tensor), [])
    for official, dest in table.items():
        if dest.name not in own:
            raise ValueError(f"the table maps '{official}' to '{dest.name}', which the module does not have")
        first, behind = _span(own[dest.name], dest)
        if dest.pick is not None and len(dest.pick) != behind - first:
            raise ValueError(f"'{official}' gives {len(dest.pick)} rows for {behind - first} of '{dest.name}'")
        spans[id(own[dest.name])].append((first, behind))
    for key, name in names.items():
        at = 0
        for first, behind in sorted(spans[key]):
            if first != at:
                raise ValueError(f"the table fills rows of '{name}' twice or not at all, near row {min(first, at)}")
            at = behind
        if at != _span(own[name], ParameterSlice(name))[1]:
            raise ValueError(f"the table fills {at} rows of '{name}' {list(own[name].shape)}")


# --- filling ----------------------------------------------------------------------------------------------------------


def _allocate(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replace every parameter and persistent buffer by an empty one, and move the module's other tensors."""
    made: dict[Tensor, Tensor] = {}  # tied parameters stay tied

    def empty(old: Tensor) -> Tensor:
        if old not in made:
            kind = dtype if old.is_floating_point() else old.dtype
            new = torch.empty(old.shape, device=device, dtype=kind)
            made[old] = nn.Parameter(new, requires_grad=False) if isinstance(old, nn.Parameter) else new
        return made[old]

    for part in module.modules():
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is None:
                continue
            fixed = name in part._non_persistent_buffers_set
            if fixed and tensor.is_meta:
                raise ValueError(f"buffer '{name}' of {type(part).__name__} is in no file: make it on the CPU")
            setattr(part, name, tensor.to(device) if fixed else empty(tensor))
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ValueError(f"'{name}' of {type(part).__name__} is in no file: make it on the CPU")


def _fill(target: Tensor, tensor: Tensor, pick: Tensor | None) -> bool:
    """Copy a tensor (or the rows that are picked) into target, some rows at a time; whether all values are finite."""
    tensor = tensor if tensor.ndim else tensor.view(1)
    step = max(1, CHUNK // max(1, target[:1].numel()))
    for first in range(0, len(target), step):
        rows = slice(first, first + step)
        piece = target[rows]
        piece.copy_(tensor[rows] if pick is None else tensor[pick[rows]])
        if piece.is_floating_point() and piece.numel():
            low, high = piece.aminmax()  # NaN passes through
            if not bool(low.isfinite() & high.isfinite()):
                return False
    return True
