"""From the tensors of an official checkpoint to a module: every tensor is checked before a value is read.

Loading needs the model and one shard in memory, never the model twice.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from specbench.errors import UsageError
from specbench.models.loading.files import CheckpointSource, Info, and_more, config, few, from_tensors, open_source
from specbench.models.loading.naming import ParameterSlice

__all__ = [
    "CheckpointSource",
    "Info",
    "check",
    "config",
    "exported",
    "from_tensors",
    "load",
    "load_by_name",
    "open_source",
]

_LOG = logging.getLogger("specbench")
Module = TypeVar("Module", bound=nn.Module)

CHUNK = 1 << 24  # values that are cast and checked at a time
SHOWN = 1 << 29  # bytes from which on loading has a progress bar


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
            f"{source.path}: tensor {few(missing)} is missing; the file is incomplete, or of another model"
        )
    drop = re.compile("|".join(f"(?:{pattern})" for pattern in ignored) or r"(?!)")
    if surplus := [name for name in source.tensors if name not in table and not drop.fullmatch(name)]:
        file = source.tensors[surplus[0]].file
        raise UsageError(f"{file}: tensor {few(surplus)} belongs to no part of this model; name this model's file")
    wrong = [name for name, dest in table.items() if not _fits(source.tensors[name], own[dest.name], dest)]
    if wrong:
        info, dest = source.tensors[wrong[0]], table[wrong[0]]
        raise UsageError(
            f"{info.file}: tensor '{wrong[0]}' has shape {list(info.shape)}, expected "
            f"{_expected(own[dest.name], dest)}{and_more(wrong)}; name the file of a model of this size"
        )
    kinds = [n for n, dest in table.items() if _kind(source.tensors[n].dtype) != _kind(own[dest.name].dtype)]
    if kinds:
        info = source.tensors[kinds[0]]
        raise UsageError(
            f"{info.file}: tensor '{kinds[0]}' holds {_word(info.dtype)} values, expected "
            f"{_kind(own[table[kinds[0]].name].dtype)} ones{and_more(kinds)}; name a file that is not quantised"
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
    size = sum(info.dtype.itemsize * math.prod(info.shape) for info in map(source.tensors.__getitem__, table))
    for name, tensor in _shown(source, table, size):
        dest = table[name]
        if not _fill(_rows(own[dest.name], dest), tensor, dest.pick):
            where = f"{source.tensors[name].file}: tensor '{name}' holds"
            if not tensor.isfinite().all():
                raise UsageError(f"{where} NaN or infinity; fetch the file again")
            raise UsageError(f"{where} values that {_word(dtype)} cannot hold; use dtype=bfloat16 or dtype=float32")
        del tensor  # before the next shard is opened
    module.eval().requires_grad_(False)
    _LOG.info("loaded %.2f GB from %s in %.1f s", size / 1e9, source.path, time.perf_counter() - start)
    return module


def load_by_name(
    build: Callable[[], Module],
    source: CheckpointSource,
    device: torch.device | str,
    dtype: torch.dtype,
    ignored: Sequence[str] = (),
) -> Module:
    """`load`, of a file whose tensors have the names of the module's own."""
    with torch.device("meta"):
        names = list(build().state_dict())
    return load(build, source, {name: ParameterSlice(name) for name in names}, device, dtype, ignored)


def _shown(source: CheckpointSource, names: Iterable[str], size: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a source, with a bar where they are `SHOWN` bytes or more."""
    with tqdm(total=size, unit="B", unit_scale=True, desc=source.path.name, disable=size < SHOWN) as bar:
        for name, tensor in source.read(names):
            count = tensor.nbytes
            yield name, tensor
            del tensor  # before the next shard is opened
            bar.update(count)


def exported(module: nn.Module, table: Mapping[str, ParameterSlice]) -> dict[str, Tensor]:
    """A module's tensors under their official names, as `load` with the same table reads them; copies, since a file
    holds no storage twice. For tables that pick no rows."""
    state, found = module.state_dict(), {}
    for name, dest in table.items():
        tensor = state[dest.name]
        found[name] = (tensor if dest.rows is None else tensor[dest.start : dest.start + dest.rows]).clone()
    return found


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
