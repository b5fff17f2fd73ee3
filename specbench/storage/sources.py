"""The sources of other people's weights and data: `specbench fetch` uses them, and errors on missing files name them.

The files in conf/ declare them, each with the page that names the repository. A repository is on the Hugging Face hub
unless another site is given. It is pinned to a commit if a public page of that commit lists the files or pins them;
otherwise it is `main`, whose commit a fetch records.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specbench.storage.files import format_size, in_bytes
from specbench.storage.reading import made

#: A licence -> the restriction that is printed with it. Licences that are not listed are permissive.
NON_COMMERCIAL = {
    "Chameleon Research License": "non-commercial: research use only, also for anything made with the weights",
}
#: The required and the optional files of a model's Hugging Face folder; never its code.
_MODEL = ("config.json", "*.safetensors|*.bin")
_ALSO = ("generation_config.json", "*.index.json", "tokenizer*.json", "special_tokens_map.json", "merges.txt")


@dataclass(frozen=True)
class Part:
    """One folder of a model and the repository that fills it.

    `files` are patterns of file names, which must all exist ("a|b": a, else b); default: the files of a model in the
    layout of transformers, one file of tensors, or shards with their index. `also` are optional files. All of them are
    in `subfolder` of the repository. `md5` and `sha256` contain published checksums. With `sizes`, which contains the
    size of every file, the files belong to a release of a GitHub repository, and `revision` is its tag. With `address`,
    they are at that address, `revision` is the commit or the date of their last change, and `repository` is a name;
    without `sizes` the server is asked for them. `listed` has sizes from the repository's own page, or from its
    pointers to large files, as shown without a login: bytes, or three digits and a unit. Only forecasts use them; a
    fetch asks the hub.
    """

    repository: str
    licence: str
    files: tuple[str, ...] = ()
    revision: str = "main"
    also: tuple[str, ...] = ()
    subfolder: str = ""
    md5: Mapping[str, str] = field(default_factory=dict)
    sha256: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    address: str = ""
    listed: Mapping[str, int | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.files:
            object.__setattr__(self, "files", _MODEL)
            object.__setattr__(self, "also", (*_ALSO, *self.also))
        try:
            self.known_sizes  # noqa: B018 (raises)
        except ValueError as e:
            raise ValueError(f"listed must have bytes, or sizes such as 1.5 GB: {e}") from None

    @property
    def known_sizes(self) -> dict[str, float]:
        """Bytes of the files, as far as they are known without a request; 0 for other patterns of `files`."""
        sizes: dict[str, float] = {**{name: in_bytes(text) for name, text in self.listed.items()}, **self.sizes}
        unknown = [p for p in self.files if not any(fnmatch.filter(sizes, part) for part in p.split("|"))]
        return sizes | dict.fromkeys(unknown, 0.0)

    @property
    def pinned(self) -> bool:
        """Whether the files belong to one commit or release, and thus never change. Otherwise they belong to a
        branch."""
        return bool(self.sizes) or re.fullmatch(r"[0-9a-f]{40}", self.revision) is not None


@dataclass(frozen=True)
class ModelSource:
    """The sources of a model. parts: needed by every run; drafters: needed by a drafter in addition; both by folder.
    sizes: the target for each other size, for which no drafter is published; instead: repositories with another layout
    of the same target."""

    parts: Mapping[str, Part]
    drafters: Mapping[str, Part] = field(default_factory=dict)
    sizes: Mapping[str, Part] = field(default_factory=dict)
    instead: tuple[Part, ...] = ()

    def of_size(self, size: str) -> ModelSource:
        """The sources for another size than the model's default: its target, if it is published, and no drafters."""
        others = {name: part for name, part in self.parts.items() if name != "target"}
        target = {"target": self.sizes[size]} if size in self.sizes else {}
        return replace(self, parts={**target, **others}, drafters={})


def model_source(fields: Any, where: str) -> ModelSource:
    """The files of a model: its folders and, under `drafters`, `sizes` and `instead`, the other fields of
    `ModelSource`.

    Raises UsageError, which names `where`, for wrong fields.
    """
    values = dict(fields) if isinstance(fields, Mapping) else {}
    others = {name: values.pop(name) for name in ("drafters", "sizes", "instead") if name in values}
    parts = {name: values[name] for name in [*_ORDER, *values] if name in values}
    return made(ModelSource, {"parts": parts, **others}, where)


#: Folders that most models have, in the order in which they are listed and hashed.
_ORDER = ("target", "tokenizer", "text")


@dataclass(frozen=True)
class File:
    """A file at a plain address. unpack: members of this zip file that are kept. size: its bytes."""

    address: str
    size: int
    sha256: str
    unpack: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]


@dataclass(frozen=True)
class Data:
    """The files of a data set."""

    files: tuple[File, ...]
    licence: str


def sized(size: float) -> str:
    """A file's bytes as text; 0: not known without a request."""
    return format_size(size) if size else "size unknown"


def restricted(licence: str) -> str:
    """A licence, with its restriction if it has one."""
    return f"{licence}, {NON_COMMERCIAL[licence]}" if licence in NON_COMMERCIAL else licence


def part_of(entry: ModelSource, name: str) -> Part | None:
    return entry.parts.get(name) or entry.drafters.get(name)


def listing(parts: Mapping[str, Part]) -> str:
    """The folder for each part's files, as text."""
    return ", ".join(f"{names(part)} into {name}/" for name, part in parts.items())


def names(part: Part) -> str:
    """A part's files as text."""
    folder = f"{part.repository}/{part.subfolder}" if part.subfolder else part.repository
    if any(c in name for name in part.files for c in "*|"):
        return f"the files of {folder}"
    return f"{', '.join(part.files)} of {folder}"
