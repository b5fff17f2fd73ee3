"""The files and packages of real evaluators: their paths, or one sentence on how to get them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from specbench.config import registry
from specbench.errors import UsageError, install
from specbench.metrics.base import Metric, ScoringContext, Unavailable, chosen
from specbench.storage import home
from specbench.storage.downloads import FetchRecord
from specbench.storage.files import cached_sha256

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def find(context: ScoringContext, choice: str, part: str, *names: str) -> Path:
    """The first of `names` in the folder `part` of the context's weights; Unavailable where there is none.

    choice: the metric whose name fetches them with `specbench fetch metrics=`.
    """
    folder = context.weights / part
    for name in names:
        if (folder / name).is_file():
            return folder / name
    arguments = f"metrics={choice}" + (
        "" if context.weights == home.metrics_folder() else f" metrics_dir={context.weights}"
    )
    raise Unavailable(f"no {names[0]}: run `specbench fetch {arguments}`, or put {names[0]} into {folder}")


def published(context: ScoringContext, part: str, path: Path) -> Path:
    """The path of a file of `part`, where its content is the published one; UsageError where it is another.

    A file is compared with the SHA-256 in `registry.evaluators()`; where none is known, with the one that the hub gave
    when the file was fetched. A file without either was put there by hand, and passes: its cache key names its hash.
    """
    known, where = registry.evaluators()[part].sha256.get(path.name, ""), "the published file"
    if not known:
        recorded = FetchRecord(context.weights).parts.get(part, {"files": {}})["files"].get(path.name, {})
        known, where = str(recorded.get("sha256", "")), "the file that was fetched"
    if known and (found := cached_sha256(path)) != known:
        raise UsageError(f"{path} is not {where}: its SHA-256 begins with {found[:8]}, not {known[:8]}; fetch it again")
    return path


class PublishedMetric(Metric):
    """A metric without options of networks whose files others publish. Subclasses set:

    fetched_by: the choice whose name fetches the files; file_names: folder below the one of metrics -> the file there.
    """

    fetched_by: ClassVar[str]
    file_names: ClassVar[Mapping[str, str]]

    def __init__(self, context: ScoringContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, chosen(type(self), options, {}))

    @property
    def files(self) -> tuple[Path, ...]:
        """The file of each part. Raises Unavailable."""
        return tuple(find(self.context, self.fetched_by, part, name) for part, name in self.file_names.items())

    @property
    def published_files(self) -> tuple[Path, ...]:
        """`files`, where they are the published ones. Raises UsageError where they are not."""
        return tuple(published(self.context, part, path) for part, path in zip(self.file_names, self.files))

    @property
    def hashes(self) -> tuple[str, ...]:
        """The first eight digits of the SHA-256 of each file, for a cache key."""
        return tuple(cached_sha256(path)[:8] for path in self.files)


def tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, with its special tokens. Raises UsageError for a file that holds none."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as e:  # the library has no class of its own
        raise UsageError(f"{path} is not a readable tokenizer ({e}); fetch it again") from None


def need(module: str) -> None:
    """Raises Unavailable where a package of the extra `metrics` is not installed. Imports nothing."""
    if importlib.util.find_spec(module) is None:
        raise Unavailable(f"{module} is not installed: {install('metrics')}")


def package(module: str) -> Any:
    """A package of the extra `metrics`; Unavailable where it cannot be imported."""
    need(module)
    try:
        return importlib.import_module(module)
    except Exception as e:  # such as a torchvision that was built for another torch
        reason = str(e).partition("\n")[0][:200]
        raise Unavailable(f"{module} cannot be imported ({reason}): again, {install('metrics')}") from e
