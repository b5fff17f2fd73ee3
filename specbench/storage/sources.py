"""Where the weights and data of others come from: what `specbench fetch` gets, and what an absent file's error names.

The files under conf/ say it, each with the page that names the repository. A repository is on the Hugging Face hub
unless another site is given. It is pinned to a commit where a public page of that commit lists the files or pins them;
else it is `main`, whose commit a fetch records.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specbench.storage.files import format_size, in_bytes
from specbench.storage.reading import made

#: A licence -> the restriction that is printed with it; the others are permissive.
NON_COMMERCIAL = {
    "CC BY-NC 4.0": "non-commercial: not for commercial use",
    "Chameleon Research License": "non-commercial: research use only, also of what is made with the weights",
}
#: What a Hugging Face folder of a model has, and what it may have; never its code.
_MODEL = ("config.json", "*.safetensors|*.bin")
_ALSO = ("generation_config.json", "*.index.json", "tokenizer*.json", "special_tokens_map.json", "merges.txt")


@dataclass(frozen=True)
class Part:
    """One folder of a model and the repository that fills it.

    `files` are patterns of file names, each of which must be there ("a|b": a, else b), by default those of a model in
    the layout of transformers: one file of tensors, or shards with their index; `also` is taken where it is there. All
    of them lie in `subfolder` of the repository. `md5` and `sha256` hold published checksums. With `sizes`, which holds
    the size of every file, the files are those of a release of a GitHub repository, `revision` its tag. With `address`
    they are at that address, `revision` is the commit or the date of their last change and `repository` a name; without
    `sizes` the server is asked for these. `listed` has
    sizes as the repository's own page or its pointers to large files showed them without a login: bytes, or three
    digits and a unit. They serve forecasts alone; a fetch asks the hub.
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
        """Bytes of the files whose size is known without asking."""
        return {**{name: in_bytes(text) for name, text in self.listed.items()}, **self.sizes}

    @property
    def unknown_sizes(self) -> list[str]:
        """The patterns of `files` of which no file's size is known."""
        return [one for one in self.files if not any(fnmatch.filter(self.known_sizes, p) for p in one.split("|"))]

    @property
    def pinned(self) -> bool:
        """Whether the files are those of one commit or of a release, today and later; else they are of a branch."""
        return bool(self.sizes) or re.fullmatch(r"[0-9a-f]{40}", self.revision) is not None


@dataclass(frozen=True)
class ModelSource:
    """`parts` is what every run needs, `drafters` what a drafter needs in addition, both by folder; `sizes` holds the
    target of each other size, for which no drafter is published; `instead` holds repositories with another layout of
    the same target."""

    parts: Mapping[str, Part]
    drafters: Mapping[str, Part] = field(default_factory=dict)
    sizes: Mapping[str, Part] = field(default_factory=dict)
    instead: tuple[Part, ...] = ()

    def of_size(self, size: str) -> ModelSource:
        """What is published for another size than the model's own: its target, if there is one, and no drafters."""
        others = {name: one for name, one in self.parts.items() if name != "target"}
        target = {"target": self.sizes[size]} if size in self.sizes else {}
        return replace(self, parts={**target, **others}, drafters={})


def model_source(fields: Any, where: str) -> ModelSource:
    """The files of a model: its folders, and, under `drafters`, `sizes` and `instead`, the others of `ModelSource`.

    Raises UsageError, naming `where`, for wrong fields.
    """
    held = dict(fields) if isinstance(fields, Mapping) else {}
    others = {name: held.pop(name) for name in ("drafters", "sizes", "instead") if name in held}
    parts = {name: held[name] for name in [*_ORDER, *held] if name in held}
    return made(ModelSource, {"parts": parts, **others}, where)


#: Folders that most models have, in the order in which they are listed and hashed.
_ORDER = ("target", "tokenizer", "text")


@dataclass(frozen=True)
class File:
    """A file at a plain address. With `unpack`, it is a zip of which these members are kept, and the rest is not. size:
    its bytes, 0 where no page shows them and a fetch asks the server."""

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


def sized(sizes: Mapping[str, float], unknown: Iterable[str]) -> Iterator[str]:
    """A line for each file, with its bytes where they are known without asking."""
    yield from (f"{format_size(count):>12}  {name}" for name, count in sizes.items())
    yield from (f"size unknown  {name}" for name in unknown)


def part_of(entry: ModelSource, name: str) -> Part | None:
    return entry.parts.get(name) or entry.drafters.get(name)


def listing(parts: Mapping[str, Part]) -> str:
    """The folder of each part's files, as text."""
    return ", ".join(f"{names(part)} into {name}/" for name, part in parts.items())


def names(part: Part) -> str:
    """A part's files as text."""
    folder = f"{part.repository}/{part.subfolder}" if part.subfolder else part.repository
    if any(c in name for name in part.files for c in "*|"):
        return f"the files of {folder}"
    return f"{', '.join(part.files)} of {folder}"
