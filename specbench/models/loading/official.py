"""Official checkpoints: files in the formats that their authors publish, and the modules that are filled from them.

Safetensors and PyTorch files, single or in shards. A user's file may be hostile or broken: only tensors are unpickled,
and names, shapes and kinds of all tensors are checked before a value is read. Files are mapped into memory: loading
needs memory for the model and one shard, never for the model twice.
"""

from __future__ import annotations

import argparse
import logging
import math
import re
import time
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
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
#: Prefixes that training puts before all names: DistributedDataParallel's and torch.compile's, in any order.
TRAINING = re.compile(r"(?:module\.|_orig_mod\.)*")
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
        for file, opened in self.shards:
            for name, tensor in opened().items():
                if name in self.tensors:
                    raise UsageError(f"{file}: tensor {name!r} is also in {self.tensors[name].file}; fetch both again")
                self.tensors[name] = Info(tuple(tensor.shape), tensor.dtype, file)

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) pairs in the order of the files, without gradients: a file may hold parameters. Delete a
        tensor before reading the next one: its file stays in memory as long as it exists."""
        for _, opened in self.shards:
            tensors = dict(opened())
            for name in [name for name in tensors if name in names]:
                yield name, tensors.pop(name).detach()

    def joined(self, file: Path, opened: Callable[[], Mapping[str, Tensor]]) -> CheckpointSource:
        """A source with additional tensors; `file` is their file in error messages."""
        return CheckpointSource(self.path, [*self.shards, (file, opened)])


def from_tensors(tensors: Mapping[str, Tensor], name: str = "memory") -> CheckpointSource:
    """A source of tensors in memory."""
    return CheckpointSource(Path(name), [(Path(name), lambda: tensors)])


def open_source(path: Path, wrappers: Sequence[str] = WRAPPERS) -> CheckpointSource:
    """A weights file, or a folder that contains one of `NAMES`. Raises UsageError with the reason.

    A PyTorch file may store its tensors under one of the keys `wrappers`, which are tried in order, or be a bare state
    dict. A prefix of `TRAINING` that all names have is removed, with a line in the log.
    """
    files = [path / name for name in NAMES] if path.is_dir() else [path]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise UsageError(f"'{path}' is no weights file, and no folder with {' or '.join(NAMES)}; fetch the weights")
    names = [file.name]
    if file.name.endswith(".index.json"):
        listed = json_object(file).get("weight_map")
        if not isinstance(listed, dict) or any(not isinstance(n, str) or Path(n).name != n for n in listed.values()):
            raise UsageError(f"{file} has no 'weight_map' to files of its folder; fetch it again")
        names = sorted(set(listed.values()))
        if missing := [name for name in names if not (file.parent / name).is_file()]:
            raise UsageError(f"{file} names {_few(missing)}, which are not in its folder; fetch the missing files")
    shards: list[Shard] = [(file.parent / n, partial(_tensors, file.parent / n, wrappers)) for n in names]
    source = CheckpointSource(path, shards)
    prefixes = {match[0] for name in source.tensors if (match := TRAINING.match(name))}
    prefix = prefixes.pop() if len(prefixes) == 1 else ""
    if not prefix:
        return source
    _LOG.info("%s: all names begin with '%s', which is removed", path, prefix)
    return CheckpointSource(path, [(f, partial(_without_prefix, opened, prefix)) for f, opened in shards])


def _without_prefix(opened: Callable[[], Mapping[str, Tensor]], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in opened().items()}


def _tensors(file: Path, wrappers: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory, except torch.save's older format, which is read completely."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        with torch.serialization.safe_globals([argparse.Namespace]):  # trainers store their arguments beside tensors
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as e:  # a broken file raises any type
        reason = re.search(r"GLOBAL [\w.]+", str(e)) or re.match(r".*?(?=\. |\n|$)", str(e))
        raise UsageError(
            f"'{file}' is not a complete file of tensors alone ({reason[0] if reason else type(e).__name__}); fetch it "
            "again (a pointer of Git LFS with `git lfs pull`), or, where you trust it, save its tensors as safetensors"
        ) from e
    if isinstance(content, dict):
        inner = next((content[key] for key in wrappers if isinstance(content.get(key), dict)), content)
        tensors = {name: t for name, t in inner.items() if isinstance(name, str) and isinstance(t, Tensor)}
        if tensors and all(t.layout == torch.strided and not (t.is_quantized or t.is_meta) for t in tensors.values()):
            return tensors
    raise UsageError(f"'{file}' holds no plain tensors by name, also not under {', '.join(wrappers)}; name another")


def config(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder."""
    return json_object(folder / "config.json")


def json_object(file: Path) -> dict[str, Any]:
    """The object in a published JSON file. Raises UsageError if the file does not contain an object."""
    return read_json(file, dict[str, Any], "fetch it again")


def _few(names: Sequence[str]) -> str:
    """The first name, escaped, because names may contain any character, and how many more there are."""
    return f"{names[0]!r}" + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


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
            f"{source.path}: tensor {_few(missing)} is missing; the file is incomplete, or of another model"
        )
    drop = re.compile("|".join(f"(?:{pattern})" for pattern in ignored) or r"(?!)")
    if surplus := [name for name in source.tensors if name not in table and not drop.fullmatch(name)]:
        file = source.tensors[surplus[0]].file
        raise UsageError(f"{file}: tensor {_few(surplus)} belongs to no part of this model; name this model's file")
    for name, dest in table.items():
        info, parameter = source.tensors[name], parameters[dest.name]
        expected = [*parameter.shape] if dest.rows is None else [dest.rows, *parameter.shape[1:]]
        if dest.pick is not None:  # any number of rows from the last one that is kept
            expected[0] = max([int(dest.pick.max()) + 1, *info.shape[:1]])
        if [*info.shape] != expected:
            raise UsageError(f"{info.file}: tensor '{name}' has shape {[*info.shape]}, expected {expected}")
        if info.dtype.is_floating_point != parameter.is_floating_point():
            kind = "floating-point" if parameter.is_floating_point() else "integer"
            raise UsageError(f"{info.file}: tensor '{name}' holds {info.dtype} values, expected {kind} ones")


def _check_table(parameters: Mapping[str, Tensor], table: Mapping[str, ParameterSlice]) -> None:
    """Checks that the table fills every row of every tensor of the module once. A mistake is a bug, not the user's."""
    spans: dict[int, list[tuple[int, int]]] = {id(tensor): [] for tensor in parameters.values()}  # tied ones are one
    for official, dest in table.items():
        if dest.name not in parameters:
            raise ValueError(f"the table maps '{official}' to '{dest.name}', which the module does not have")
        tensor = parameters[dest.name]
        spans[id(tensor)].append((dest.start, dest.start + dest.rows if dest.rows is not None else _rows(tensor)))
    for name, tensor in parameters.items():
        parts = sorted(spans[id(tensor)])
        if [0, *(end for _, end in parts)] != [*(start for start, _ in parts), _rows(tensor)]:
            raise ValueError(f"the table fills rows {parts} of '{name}' {[*tensor.shape]}")


def _rows(tensor: Tensor) -> int:
    return len(tensor) if tensor.ndim else 1


class _Uninitialised(TorchFunctionMode):
    """Does not initialise weights. On the meta device, that has no effect, and takes seconds: PyTorch imports its
    compiler for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return None if getattr(func, "__module__", None) == "torch.nn.init" else func(*args, **(kwargs or {}))


@contextmanager
def shapes_only() -> Iterator[None]:
    """Modules that are built here have shapes, but neither storage nor values."""
    with torch.device("meta"), _Uninitialised():
        yield


def load(
    build: Callable[[], Module],
    source: CheckpointSource,
    table: Mapping[str, ParameterSlice] | None,
    device: torch.device | str,
    dtype: torch.dtype,
    ignored: Sequence[str] = (),
) -> Module:
    """The module of `build`, filled from `source` by `table`: on `device`, floating-point values as `dtype`, in
    evaluation mode, without gradients. table = None: the source has the module's own names.

    `build` runs on the meta device, so it costs nothing. Parameters and persistent buffers come from the source.
    `build` must create all other tensors within torch.device("cpu"); they are moved to `device`. Raises the errors of
    `check`, and UsageError for a value that is not finite, or that `dtype` cannot represent.
    """
    start = time.perf_counter()
    with shapes_only():
        module = build()
    table = own_names(module) if table is None else table
    check(module, source, table, ignored)
    parameters = module.state_dict(keep_vars=True)
    filled = {id(old): _empty(old, device, dtype) for old in {id(old): old for old in parameters.values()}.values()}
    size = sum(source.tensors[name].dtype.itemsize * math.prod(source.tensors[name].shape) for name in table)
    with tqdm(total=size, unit="B", unit_scale=True, desc=source.path.name, disable=size < SHOWN) as bar:
        for name, tensor in source.read(table):
            dest, target = table[name], filled[id(parameters[table[name].name])]
            if dest.rows is not None:
                target = target[dest.start : dest.start + dest.rows]
            target.copy_(tensor if dest.pick is None else tensor[dest.pick])
            if not _is_finite(target):
                raise UsageError(
                    f"{source.tensors[name].file}: tensor '{name}' holds NaN, infinity or values that {dtype} cannot "
                    "hold; fetch the file again, or use dtype=bfloat16 or dtype=float32"
                )
            bar.update(tensor.nbytes)
            del tensor  # before the next shard is opened
    module.load_state_dict({name: filled[id(old)] for name, old in parameters.items()}, assign=True)
    _LOG.info("loaded %.2f GB from %s in %.1f s", size / 1e9, source.path, time.perf_counter() - start)
    return module.to(device).eval().requires_grad_(False)


def _empty(old: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    new = torch.empty(old.shape, device=device, dtype=dtype if old.is_floating_point() else old.dtype)
    return nn.Parameter(new, requires_grad=False) if isinstance(old, nn.Parameter) else new


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = tensor.aminmax()  # both are NaN if a value is NaN
    return bool(low.isfinite() & high.isfinite())


def exported(module: nn.Module, table: Mapping[str, ParameterSlice]) -> dict[str, Tensor]:
    """A module's tensors with their official names, as `load` with the same table reads them. They are copies, because
    a file cannot contain a storage twice. Only for tables that pick no rows."""
    state, tensors = module.state_dict(), {}
    for name, dest in table.items():
        tensor = state[dest.name]
        tensors[name] = (tensor if dest.rows is None else tensor[dest.start : dest.start + dest.rows]).clone()
    return tensors
