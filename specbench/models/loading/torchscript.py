"""The tensors of a TorchScript archive, without its code.

Such an archive is a zip of a pickle (data.pkl) that describes the module's attributes, the bytes of each tensor, and
the code. Here the pickle is read by an unpickler that knows tensors and attributes alone: nothing in the file is run.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.errors import UsageError
from specbench.models.loading.files import CheckpointSource, Info

_TYPES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "BoolStorage": torch.bool,
}


@dataclass(frozen=True)
class _Stored:
    """A tensor of the archive: where its bytes are."""

    dtype: torch.dtype
    record: str
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def build(cls, storage: tuple[torch.dtype, str], first: int, shape: Any, stride: Any, *_: Any) -> _Stored:
        return cls(*storage, first, tuple(shape), tuple(stride))

    @property
    def end(self) -> int:
        """Values of the record up to the tensor's last one."""
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return self.first + last + 1 if all(self.shape) else self.first


class _Module:
    """An object of the archive: its attributes, whatever its class."""

    def __init__(self, *_: Any) -> None:
        self.attributes: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.attributes = dict(state) if isinstance(state, dict) else {}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "__torch__" or module.startswith("__torch__."):
            return _Module
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Stored.build
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *_: data
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _TYPES:
            return _TYPES[name]
        if module == "torch.jit._pickle" and (name.startswith("build_") or name == "restore_type_tag"):
            return lambda data, *_: data
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, record, _device, _count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"a {kind} of an unknown type")
        return dtype, str(record)


class ScriptArchive:
    """One TorchScript file as a shard of a `CheckpointSource`; tensors are named as in its state dict. Raises
    UsageError for what is no such file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            with zipfile.ZipFile(file) as opened:
                inner = [name for name in opened.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
                if len(inner) != 1:
                    raise KeyError("no data.pkl")
                self._root = inner[0].removesuffix("data.pkl")
                with opened.open(inner[0]) as stream:
                    self._tensors = dict(_named(_Unpickler(stream).load()))
                for tensor in self._tensors.values():
                    held = opened.getinfo(f"{self._root}data/{tensor.record}").file_size
                    if min(tensor.first, *tensor.shape, *tensor.stride, 0) < 0:
                        raise ValueError("a negative size")
                    if tensor.end * tensor.dtype.itemsize > held:
                        raise ValueError(f"the record {tensor.record} is too short")
        except Exception as e:  # a broken archive or pickle raises anything
            raise UsageError(
                f"'{file}' is not a readable TorchScript archive ({type(e).__name__}: {e}); fetch it again"
            ) from e

    def infos(self) -> dict[str, Info]:
        return {name: Info(t.shape, t.dtype, self.file) for name, t in self._tensors.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        with zipfile.ZipFile(self.file) as opened:
            for name in names:
                t = self._tensors[name]
                values = torch.frombuffer(bytearray(opened.read(f"{self._root}data/{t.record}")), dtype=t.dtype)
                yield name, values.as_strided(t.shape, t.stride, t.first)


def _named(value: Any, prefix: str = "") -> Iterator[tuple[str, _Stored]]:
    """(name, tensor) of every attribute, the modules' in their depth."""
    for name, inner in value.attributes.items() if isinstance(value, _Module) else ():
        if isinstance(inner, _Stored):
            yield prefix + name, inner
        else:
            yield from _named(inner, f"{prefix}{name}.")


def open_archive(file: Path) -> CheckpointSource:
    """A TorchScript file; a UsageError where it is absent or broken."""
    if not file.is_file():
        raise UsageError(f"there is no file '{file}'; fetch the weights, or correct the path")
    return CheckpointSource(file, [ScriptArchive(file)])
