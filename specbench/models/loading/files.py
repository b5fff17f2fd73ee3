"""Files of weights in the formats their makers publish: safetensors and PyTorch files, single or in shards.

A user's file may be hostile or broken: only tensors are unpickled, and each mistake has its own sentence. Files are
mapped into memory and read one tensor after the other.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specbench.errors import UsageError

#: Keys under which trainers keep a network's tensors, and types that they store next to these.
WRAPPERS, TRAINER_TYPES = ("model", "module", "state_dict"), (argparse.Namespace,)
#: The files that are looked for in a folder, in this order (as transformers does).
NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


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


class Doubled(CheckpointSource):
    """A source in which tensor `name` has the name `second`, too."""

    def __init__(self, source: CheckpointSource, name: str, second: str) -> None:
        super().__init__(source.path, source._shards)
        self._name, self._second = name, second
        self.tensors[second] = self.tensors[name]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        wanted = set(names)
        own = dict.fromkeys(self._name if name == self._second else name for name in self.tensors if name in wanted)
        for name, tensor in super().read(own):
            for given in (name, self._second) if name == self._name else (name,):
                if given in wanted:
                    yield given, tensor


def from_tensors(tensors: Mapping[str, Tensor], name: str = "memory") -> CheckpointSource:
    """A source whose tensors are in memory already."""
    return CheckpointSource(Path(name), [_Memory(Path(name), tensors)])


def joined(source: CheckpointSource, tensors: Mapping[str, Tensor]) -> CheckpointSource:
    """A source with further tensors, which are in memory already."""
    return CheckpointSource(source.path, [*source._shards, _Memory(Path("memory"), tensors)])


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
        raise UsageError(f"{found} names {few(absent)}, which are not next to it; fetch the absent files")
    source = CheckpointSource(path, [_shard(found.parent / name, wrappers, allowed) for name in names])
    for tensor, name in listed.items():
        if tensor not in source.tensors or source.tensors[tensor].file.name != name:
            raise UsageError(f"{found} maps tensor {tensor!r} to {name}, which lacks it; fetch both again")
    return source


def config(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder."""
    return json_object(folder / "config.json")


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
                f"{few([str(key) for key in inner])}; name a weights file"
            )
        plain = (torch.strided, False, False)
        if odd := [name for name, t in tensors.items() if (t.layout, t.is_quantized, values and t.is_meta) != plain]:
            raise UsageError(
                f"{self.file}: tensor {few(odd)} is sparse, quantised or without values; name a file of plain tensors"
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
    listed = json_object(file).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise UsageError(f"{file} has no 'weight_map'; fetch it again")
    for tensor, name in listed.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise UsageError(f"{file} puts tensor {tensor!r} into {name!r}, which is not a file name; fetch it again")
    return listed


def json_object(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises UsageError where it holds none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise UsageError(f"cannot read {file} ({e}); fetch it again") from e
    if not isinstance(content, dict):
        raise UsageError(f"{file} is not a JSON object; fetch it again")
    return content


def few(names: Sequence[str]) -> str:
    return f"{names[0]!r}{and_more(names)}"  # names may hold anything: escaped


def and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
