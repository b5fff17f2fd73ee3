"""Official checkpoints: files in the formats that their authors publish, and the modules that are filled from them.

Safetensors and PyTorch files, single or in shards. A user's file may be hostile or broken: only tensors are unpickled,
and every mistake has a specific message. Files are mapped into memory, and every tensor is checked before its values
are read. Loading needs memory for the model and one shard, never for the model twice.
"""

from __future__ import annotations

import argparse
import logging
import math
import pickle
import re
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from specbench.errors import UsageError
from specbench.models.loading.naming import ParameterSlice, Table
from specbench.storage.reading import read_json

_LOG = logging.getLogger("specbench")
Module = TypeVar("Module", bound=nn.Module)

#: Keys under which trainers store a network's tensors; a bare state dict is also accepted.
WRAPPERS = ("model", "module", "state_dict")
#: The files of a folder that are tried, in this order (as in transformers).
NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
SHOWN = 1 << 29  # loading this many bytes or more shows a progress bar

# --- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Info:
    """Shape, dtype and file of a tensor, known before its values are read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path


#: A file, and the function that opens it: it returns tensors on the CPU, mapped into memory if the format allows it.
Shard = tuple[Path, Callable[[], Mapping[str, Tensor]]]


class CheckpointSource:
    """The tensors of a checkpoint, by their official names. `read` gives their values."""

    def __init__(self, path: Path, shards: Iterable[Shard]) -> None:
        self.path, self.shards = path, list(shards)
        self.tensors: dict[str, Info] = {}
        self._names: list[list[str]] = []  # of each shard
        for file, opened in self.shards:
            tensors = opened()
            if twice := [name for name in tensors if name in self.tensors]:
                first = self.tensors[twice[0]].file.name
                raise UsageError(
                    f"tensor {twice[0]!r} is in {first} and in {file.name} of '{path}'; fetch these files again"
                )
            self.tensors |= {name: Info(tuple(t.shape), t.dtype, file) for name, t in tensors.items()}
            self._names.append(list(tensors))

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) pairs in the order of the files. Delete a tensor before reading the next one: its file stays
        in memory as long as it exists."""
        for (_, opened), stored in zip(self.shards, self._names, strict=True):
            requested = [name for name in stored if name in names]
            tensors = dict(opened()) if requested else {}
            for name in requested:
                yield name, tensors.pop(name)

    def joined(self, file: Path, opened: Callable[[], Mapping[str, Tensor]]) -> CheckpointSource:
        """A source with additional tensors; `file` is their file in error messages."""
        return CheckpointSource(self.path, [*self.shards, (file, opened)])


def from_tensors(tensors: Mapping[str, Tensor], name: str = "memory") -> CheckpointSource:
    """A source of tensors in memory."""
    return CheckpointSource(Path(name), [(Path(name), lambda: tensors)])


def open_source(path: Path, wrappers: Sequence[str] = WRAPPERS) -> CheckpointSource:
    """A weights file, or a folder that contains one of `NAMES`. Raises UsageError with the reason.

    A PyTorch file may store its tensors under one of the keys `wrappers`, which are tried in order, or be a bare state
    dict.
    """
    if path.is_dir():
        file = next((path / name for name in NAMES if (path / name).is_file()), None)
        if file is None:
            raise UsageError(
                f"'{path}' holds none of {', '.join(NAMES)}; fetch the model's files there, or name its weights file"
            )
    elif path.is_file():
        file = path
    else:
        raise UsageError(f"there is no file or folder '{path}'; fetch the weights, or correct the path")
    if not file.name.endswith(".index.json"):
        return CheckpointSource(path, [_shard(file, wrappers)])
    listed = _index(file)
    names = sorted(set(listed.values()))
    if missing := [name for name in names if not (file.parent / name).is_file()]:
        raise UsageError(f"{file} names {few(missing)}, which are not in its folder; fetch the missing files")
    source = CheckpointSource(path, [_shard(file.parent / name, wrappers) for name in names])
    for tensor, name in listed.items():
        if tensor not in source.tensors or source.tensors[tensor].file.name != name:
            raise UsageError(f"{file} maps tensor {tensor!r} to {name}, which does not have it; fetch both again")
    return source


def _index(file: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index of a folder of shards."""
    listed = json_object(file).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise UsageError(f"{file} has no 'weight_map'; fetch it again")
    for tensor, name in listed.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise UsageError(f"{file} puts tensor {tensor!r} into {name!r}, which is not a file name; fetch it again")
    return listed


def _shard(file: Path, wrappers: Sequence[str]) -> Shard:
    return file, partial(_safetensors, file) if file.suffix == ".safetensors" else partial(_pickled, file, wrappers)


def _safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as e:
        raise _unreadable(file, "safetensors file", e) from e


def _pickled(file: Path, wrappers: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of a torch.save file. Zip archives are mapped; files of the older format are read completely."""
    content = _unpickled(file)
    if not isinstance(content, dict):
        raise UsageError(f"'{file}' holds a {type(content).__name__}, not tensors by name; name a weights file")
    inner = next((content[key] for key in wrappers if isinstance(content.get(key), dict)), content)
    tensors = {name: t for name, t in inner.items() if isinstance(name, str) and isinstance(t, Tensor)}
    if not tensors:
        raise UsageError(
            f"'{file}' holds no tensors under {' or '.join([*wrappers, 'its top level'])}, only "
            f"{few([str(key) for key in inner])}; name a weights file"
        )
    if odd := [name for name, t in tensors.items() if t.layout != torch.strided or t.is_quantized or t.is_meta]:
        raise UsageError(
            f"{file}: tensor {few(odd)} is sparse, quantised or without values; name a file of plain tensors"
        )
    return tensors


def _unpickled(file: Path) -> Any:
    head = _head(file)
    try:
        # Trainers store their arguments next to the tensors.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # our messages replace them
            return torch.load(str(file), map_location="cpu", weights_only=True, mmap=head.startswith(b"PK\x03\x04"))
    except Exception as e:  # a broken pickle raises any type
        pickled = head[:2] in (b"PK", *(b"\x80%c" % n for n in range(2, 6)))
        if not (pickled and isinstance(e, pickle.UnpicklingError)) and "TorchScript" not in str(e):
            raise _unreadable(file, "PyTorch file", e) from e
        name = re.search(r"GLOBAL ([\w.]+)", str(e))
        raise UsageError(
            f"'{file}' holds more than tensors{f' ({name[1]})' if name else ''}, and loading it could run code; "
            "where you trust it, save its tensors with safetensors.torch.save_file, and name that file"
        ) from e


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as f:
            return f.read(100)
    except OSError:  # the next read also fails, and reports why
        return b""


def _unreadable(file: Path, kind: str, error: Exception) -> UsageError:
    if _head(file).startswith(b"version https://git-lfs"):
        return UsageError(f"'{file}' is a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`")
    reason = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
    return UsageError(f"'{file}' is not a readable {kind}, or only a part of one ({reason}); fetch it again")


def config(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder."""
    return json_object(folder / "config.json")


def json_object(file: Path) -> dict[str, Any]:
    """The object in a published JSON file. Raises UsageError if the file does not contain an object."""
    return read_json(file, dict[str, Any], "fetch it again")


def few(names: Sequence[str]) -> str:
    return f"{names[0]!r}{_and_more(names)}"  # escaped, because names may contain any character


def _and_more(names: Collection[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


# --- modules ----------------------------------------------------------------------------------------------------------


def own_names(module: nn.Module) -> Table:
    """The table of a file whose tensors have the module's names."""
    return {name: ParameterSlice(name) for name in module.state_dict()}


def check(
    module: nn.Module, source: CheckpointSource, table: Mapping[str, ParameterSlice], ignored: Sequence[str] = ()
) -> None:
    """Checks that `source` contains exactly the tensors that `table` assigns to `module`, by names, shapes and kinds of
    dtype. Reads no values.

    ignored: regular expressions that match entire official names that the module does not need. Raises UsageError for
    mistakes in the file, and ValueError for mistakes in the table.
    """
    parameters = module.state_dict(keep_vars=True)
    _check_table(parameters, table)
    if missing := [name for name in table if name not in source.tensors]:
        raise UsageError(
            f"{source.path}: tensor {few(missing)} is missing; the file is incomplete, or of another model"
        )
    drop = re.compile("|".join(f"(?:{pattern})" for pattern in ignored) or r"(?!)")
    if surplus := [name for name in source.tensors if name not in table and not drop.fullmatch(name)]:
        file = source.tensors[surplus[0]].file
        raise UsageError(f"{file}: tensor {few(surplus)} belongs to no part of this model; name this model's file")
    misshapen, other_kind = {}, {}
    for name, dest in table.items():
        info, parameter = source.tensors[name], parameters[dest.name]
        if expected := _misfit(info.shape, parameter, dest):
            misshapen[name] = f"has shape {list(info.shape)}, expected {expected}"
        if _kind(info.dtype) != _kind(parameter.dtype):
            other_kind[name] = f"holds {_word(info.dtype)} values, expected {_kind(parameter.dtype)} ones"
    for wrong, remedy in (
        (misshapen, "name the file of a model of this size"),
        (other_kind, "name a file that is not quantised"),
    ):
        for name, sentence in wrong.items():
            raise UsageError(f"{source.tensors[name].file}: tensor '{name}' {sentence}{_and_more(wrong)}; {remedy}")


class _Uninitialised(TorchFunctionMode):
    """Does not initialise weights. On the meta device, that has no effect, and takes seconds: PyTorch imports its
    compiler for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Modules that are built here have shapes, but neither storage nor values."""
    with torch.device("meta"), _Uninitialised():
        yield


def load(
    build: Callable[[], Module],
    source: CheckpointSource,
    table: Mapping[str, ParameterSlice],
    device: torch.device | str,
    dtype: torch.dtype,
    ignored: Sequence[str] = (),
) -> Module:
    """The module of `build`, filled from `source` by `table`: on `device`, floating-point values as `dtype`, in
    evaluation mode, without gradients.

    `build` runs on the meta device, so it costs nothing. Parameters and persistent buffers come from the source.
    `build` must create all other tensors within torch.device("cpu"); they are moved to `device`. Raises the errors of
    `check`, and UsageError for a value that is not finite, or that `dtype` cannot represent.
    """
    start = time.perf_counter()
    with shapes_only():
        module = build()
    check(module, source, table, ignored)
    parameters = module.state_dict(keep_vars=True)
    filled = {id(old): _empty(old, device, dtype) for old in {id(old): old for old in parameters.values()}.values()}
    size = sum(info.dtype.itemsize * math.prod(info.shape) for info in map(source.tensors.__getitem__, table))
    for name, tensor in _shown(source, table, size):
        dest = table[name]
        target = filled[id(parameters[dest.name])]
        if dest.rows is not None:
            target = target[dest.start : dest.start + dest.rows]
        target.copy_(tensor if dest.pick is None else tensor[dest.pick])
        if not _is_finite(target):
            where = f"{source.tensors[name].file}: tensor '{name}' holds"
            if not _is_finite(tensor):
                raise UsageError(f"{where} NaN or infinity; fetch the file again")
            raise UsageError(f"{where} values that {_word(dtype)} cannot hold; use dtype=bfloat16 or dtype=float32")
        del tensor  # before the next shard is opened
    module.load_state_dict({name: filled[id(old)] for name, old in parameters.items()}, assign=True)
    _LOG.info("loaded %.2f GB from %s in %.1f s", size / 1e9, source.path, time.perf_counter() - start)
    return module.to(device).eval().requires_grad_(False)


def load_by_name(
    build: Callable[[], Module],
    source: CheckpointSource,
    device: torch.device | str,
    dtype: torch.dtype,
    ignored: Sequence[str] = (),
) -> Module:
    """Like `load`, for a file whose tensors have the module's names."""
    with shapes_only():
        table = own_names(build())
    return load(build, source, table, device, dtype, ignored)


def exported(module: nn.Module, table: Mapping[str, ParameterSlice]) -> dict[str, Tensor]:
    """A module's tensors with their official names, as `load` with the same table reads them. They are copies, because
    a file cannot contain a storage twice. Only for tables that pick no rows."""
    state, tensors = module.state_dict(), {}
    for name, dest in table.items():
        tensor = state[dest.name]
        tensors[name] = (tensor if dest.rows is None else tensor[dest.start : dest.start + dest.rows]).clone()
    return tensors


def _shown(source: CheckpointSource, names: Collection[str], size: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a source, with a progress bar if they have `SHOWN` bytes or more."""
    with tqdm(total=size, unit="B", unit_scale=True, desc=source.path.name, disable=size < SHOWN) as bar:
        for name, tensor in source.read(names):
            count = tensor.nbytes
            yield name, tensor
            del tensor  # before the next shard is opened
            bar.update(count)


def _empty(old: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    new = torch.empty(old.shape, device=device, dtype=dtype if old.is_floating_point() else old.dtype)
    return nn.Parameter(new, requires_grad=False) if isinstance(old, nn.Parameter) else new


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = tensor.aminmax()  # both are NaN if a value is NaN
    return bool(low.isfinite() & high.isfinite())


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "floating-point"
    return "complex" if dtype.is_complex else "bool" if dtype == torch.bool else "integer"


def _misfit(shape: tuple[int, ...], parameter: Tensor, dest: ParameterSlice) -> str:
    """The expected shape of an official tensor; empty if it has this shape."""
    if dest.pick is None:
        expected = [*parameter.shape] if dest.rows is None else [dest.rows, *parameter.shape[1:]]
        return "" if list(shape) == expected else str(expected)
    rows, row = int(dest.pick.max()) + 1, parameter.shape[1:]
    fits = len(shape) == parameter.ndim and shape[0] >= rows and shape[1:] == row
    return "" if fits else f"at least {rows} rows of {list(row)}"


def _check_table(parameters: Mapping[str, Tensor], table: Mapping[str, ParameterSlice]) -> None:
    """Checks that the table fills every row of every tensor of the module once. A mistake is a bug, not the user's."""
    names = {id(tensor): name for name, tensor in parameters.items()}  # tied parameters are one tensor of several names
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in names.values()}
    for official, dest in table.items():
        if dest.name not in parameters:
            raise ValueError(f"the table maps '{official}' to '{dest.name}', which the module does not have")
        tensor = parameters[dest.name]
        rows = len(tensor) if tensor.ndim else 1
        spans[names[id(tensor)]].append((dest.start, rows if dest.rows is None else dest.start + dest.rows))
    for name, parts in spans.items():
        starts, ends = zip(*sorted(parts), strict=True) if parts else ((), ())
        rows = len(parameters[name]) if parameters[name].ndim else 1
        if (0, *ends) != (*starts, rows):
            raise ValueError(f"the table fills rows {sorted(parts)} of '{name}' {list(parameters[name].shape)}")
