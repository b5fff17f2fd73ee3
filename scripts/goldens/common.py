"""Common code of the checks of all families."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import Tree
from specbench.errors import UsageError
from specbench.models.loading import official
from specbench.models.loading.naming import ParameterSlice

M = TypeVar("M", bound=nn.Module)
Config = dict[str, Any]
#: (name of the output, ours), and the expected tensor if it is not the golden's output of this name.
Pair = tuple[str, Tensor] | tuple[str, Tensor, Tensor]
Compared = Iterator[Pair]


class Tensors(dict[str, Tensor]):
    """A golden's tensors by name; `read` has the names that a check has read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return super().__getitem__(name)

    def named(self, start: str, end: str = "") -> list[str]:
        """The outputs start*end of the golden, without "out/", sorted by the number between start and end."""
        start = f"out/{start}"
        names = [n for n in self if n.startswith(start) and n.endswith(end) and n[len(start) : len(n) - len(end)]]
        middle = {name: name[len(start) : len(name) - len(end)] for name in names}
        numbered = [name for name in names if middle[name].isdecimal()]
        return [name.removeprefix("out/") for name in sorted(numbered, key=lambda name: int(middle[name]))]


def read(path: Path) -> tuple[dict[str, Any], Tensors]:
    """The metadata of a golden's .json, and its tensors. A golden without parameters names another one of its set in
    "parameters" or "model": it then has that golden's parameters, and that golden's configuration in "language_model".
    Raises UsageError for a file that is unusable."""
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        tensors = load_file(path.with_suffix(".safetensors"))
    except (OSError, ValueError, SafetensorError) as e:
        raise UsageError(f"cannot read the golden {path} and its .safetensors ({e})") from e
    if not isinstance(meta, dict) or not isinstance(meta.get("config") or {}, dict):
        raise UsageError(f"the golden {path} is no object with a configuration")
    meta["config"] = config = meta.get("config") or {}
    words = f"{config.get('parameters', '')} {config.get('model', '')}".split()
    if named := [word for word in words if word.endswith("_lm")]:
        other, more = read(path.with_name(f"{named[0]}.json"))
        config["language_model"] = other["config"]
        tensors = {name: x for name, x in more.items() if name.startswith("param/")} | tensors
    return meta, Tensors(tensors)


def weights(t: Tensors, part: str = "") -> dict[str, Tensor]:
    """Parameters by their official names; the parameters of a `part` without the name of the part."""
    names = {name: name.removeprefix("param/").removeprefix(part) for name in t if name.startswith("param/")}
    return {short: t[name].float() for name, short in names.items()}


def load(
    build: Callable[[], M],
    params: Mapping[str, Tensor],
    table: Mapping[str, ParameterSlice],
    ignored: Sequence[str] = (),
) -> M:
    """A module with these parameters, by the naming table that official files use; a UsageError names one that the
    module does not have and that is not `ignored`, or one that is missing."""
    return official.load(build, official.from_tensors(dict(params), "golden"), table, "cpu", torch.float32, ignored)


def guided(logits: Tensor, scale: float) -> Tensor:
    """Logits (B, *) of (2B, *), the conditional rows first; at scale 1 the conditional rows alone."""
    return Sampling(cfg_scale=scale).apply_guidance(logits) if scale != 1 else logits[: len(logits) // 2]


def fixed(c: Config, **values: Any) -> None:
    """UsageError if a golden states another value for a constant of the models here."""
    for name, value in values.items():
        if c.get(name, value) != value:
            raise UsageError(f"the golden states {name}={c[name]}, and the models here have {value}")


def paths(tree: Tree, row: int = 0) -> Tensor:
    """The nodes (leaves, height + 1) of the paths from the root to a leaf of one row's tree, -1 after the leaf; in the
    order of their numbers."""
    ancestors = tree.ancestors[row]
    leaves = (ancestors.sum(0) == 1).nonzero().flatten()  # nobody else's ancestor
    rows = [ancestors[leaf].nonzero().flatten().tolist() for leaf in leaves]
    width = max(map(len, rows))
    return torch.tensor(sorted(row + [-1] * (width - len(row)) for row in rows))


def in_order(rows: Tensor) -> Tensor:
    """Sorted paths, because the released order of paths differs."""
    return torch.tensor(sorted(rows.tolist()))
