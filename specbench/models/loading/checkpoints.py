"""Weights on disk: safetensors with the network's configuration in the metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from specbench.data import worlds
from specbench.errors import UsageError, steps
from specbench.models.loading import official
from specbench.storage.files import atomic_path

Module = TypeVar("Module", bound=nn.Module)
_POSITIONS, _IN_FILES = "positions", "places"  # name of a parameter here, and in files
_WORLD = re.compile(f"({'|'.join(worlds.NAMES)})-")  # prefix of an embedded network's kind; optional in drafters' files


def save(
    module: nn.Module, path: Path, kind: str, dtype: torch.dtype = torch.float16, omitted: Collection[str] = ()
) -> None:
    """Write `module` and its configuration `cfg` atomically; floating-point tensors are stored as `dtype`. omitted:
    names of tensors that are not written, because `load` receives them as `defaults`.

    A file with the same content is not rewritten, because rows name weights by their file's digest.
    """
    cfg: Any = module.cfg
    config = json.dumps(cfg.to_dict() if hasattr(cfg, "to_dict") else asdict(cfg))
    tensors = {
        k: v.detach().to(dtype if v.is_floating_point() else v.dtype).cpu().contiguous()
        for k, v in module.state_dict().items()
        if k not in omitted
    }
    if path.exists() and _same(path, kind, config, tensors):
        return
    with atomic_path(path) as temporary:
        named = {k.replace(_POSITIONS, _IN_FILES): v for k, v in tensors.items()}
        save_file(named, temporary, {"format": "specbench-1", "kind": kind, "config": config})
        temporary.chmod(0o644)  # the library creates files that only their owner can read


def _same(path: Path, kind: str, config: str, tensors: dict[str, Tensor]) -> bool:
    try:
        stored_config, stored = read(path, kind)
    except UsageError:
        return False
    same_shape = stored.keys() == tensors.keys() and json.dumps(stored_config) == config
    return same_shape and all(torch.equal(stored[k], v) for k, v in tensors.items())


def read(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config, tensors) of a file written by `save`. Raises UsageError, with the reason, for other files."""
    if not path.exists():
        what = steps(f"run `{_training(path)}` in a clone", "weights=DIR of a folder that has them")
        raise UsageError(f"weights '{path.name}' are not here: {what}")
    try:
        with safe_open(path, framework="pt") as f:
            metadata = f.metadata() or {}
            tensors = {k.replace(_IN_FILES, _POSITIONS): f.get_tensor(k) for k in f.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as e:
        raise UsageError(f"'{path}' is not a readable safetensors file ({e}); fetch or train it again") from e
    if _WORLD.sub("", metadata.get("kind") or "", 1) != _WORLD.sub("", kind, 1):
        raise UsageError(f"'{path}' holds a '{metadata.get('kind', 'foreign')}' model, not a '{kind}'")
    try:
        config = json.loads(metadata["config"])
        if isinstance(config, dict):
            return config, tensors
    except (KeyError, ValueError, RecursionError):
        pass
    raise UsageError(f"'{path}' does not describe its network (no metadata 'config'); fetch or train it again")


def load(
    path: Path,
    kind: str,
    module: Callable[[Any], Module],
    config: Callable[..., Any],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    defaults: Mapping[str, Tensor] | None = None,
) -> Module:
    """The network of a file written by `save`, `module(config)`, for inference (see `official.load`). defaults: the
    tensors that the file may omit, by name."""
    values, tensors = read(path, kind)
    tensors = {**(defaults or {}), **tensors}
    most = sum(tensor.numel() for tensor in tensors.values())  # a size is never larger than the number of weights
    try:
        cfg = config(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
        if any(isinstance(v, int) and abs(v) > most for v in values.values()):
            raise ValueError("a size is larger than the file")
        with official.shapes_only():
            built = module(cfg)
    except Exception as e:  # an invalid network raises many types of exceptions
        raise UsageError(
            f"{path.name} is damaged, or of another version of specbench; run `{_training(path)}` without it"
        ) from e
    source = official.from_tensors(tensors, path.name)
    return official.load(lambda: built, source, official.own_names(built), device, dtype)


def _training(path: Path) -> str:
    """The command that trains the file of an embedded model."""
    world = path.name.partition("_")[0]
    return f"make train-{world if world in worlds.NAMES else worlds.NAMES[0]}"


def fill(module: nn.Module, tensors: dict[str, Tensor], name: str) -> None:
    """Copy tensors of the file `name` into `module`, cast to its dtype. Raises UsageError for a missing, surplus or
    misshapen tensor, and for a value that is not finite."""
    official.check(module, official.from_tensors(tensors, name), official.own_names(module))
    if wrong := [key for key, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise UsageError(f"{name}: tensor '{wrong[0]}' holds NaN or infinity; train or fetch it again")
    module.load_state_dict(tensors)
