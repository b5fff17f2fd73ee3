"""The files and packages of real evaluators: their paths, or a message on how to get them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from specbench.config import registry
from specbench.errors import UsageError, install
from specbench.metrics.base import Metric, ScoringContext, Unavailable, chosen
from specbench.storage import home
from specbench.storage.downloads import FetchRecord
from specbench.storage.files import cached_sha256


def find(context: ScoringContext, choice: str, part: str, *names: str) -> Path:
    """The first existing file of `names` in the folder `part` of the context's weights. Raises Unavailable.

    choice: the metric whose files `specbench fetch metrics=` downloads.
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
    """The path of a file of `part`. Raises UsageError if its content is not the published one.

    Its SHA-256 is compared with `registry.evaluators()` or, if that has none, with the hub's SHA-256 at the time of the
    download. If neither exists, the user put the file there, and it is accepted: its cache key contains its hash.
    """
    expected, name = registry.evaluators()[part].sha256.get(path.name, ""), "the published file"
    if not expected:
        recorded = FetchRecord(context.weights).parts.get(part, {"files": {}})["files"].get(path.name, {})
        expected, name = str(recorded.get("sha256", "")), "the file that was fetched"
    if expected and (actual := cached_sha256(path)) != expected:
        raise UsageError(
            f"{path} is not {name}: its SHA-256 begins with {actual[:8]}, not {expected[:8]}; fetch it again"
        )
    return path


class PublishedMetric(Metric):
    """A metric without options, whose networks others publish. Subclasses set:

    fetched_by: the choice that downloads the files; file_names: sub-folder of the metrics' folder -> the file in it.
    """

    fetched_by: ClassVar[str]
    file_names: ClassVar[Mapping[str, str]]

    def __init__(self, context: ScoringContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, chosen(type(self), options, {}))

    @property
    def files(self) -> tuple[Path, ...]:
        """The paths of the files. Raises Unavailable."""
        return tuple(find(self.context, self.fetched_by, part, name) for part, name in self.file_names.items())

    @property
    def published_files(self) -> tuple[Path, ...]:
        """Like `files`. Raises UsageError for a file that is not the published one."""
        return tuple(published(self.context, part, path) for part, path in zip(self.file_names, self.files))

    @property
    def hashes(self) -> tuple[str, ...]:
        """The first eight digits of the SHA-256 of each file, for a cache key."""
        return tuple(cached_sha256(path)[:8] for path in self.files)


def need(module: str) -> None:
    """Raises Unavailable if a package of the extra `metrics` is not installed. Imports nothing."""
    if importlib.util.find_spec(module) is None:
        raise Unavailable(f"{module} is not installed: {install('metrics')}")


def package(module: str) -> Any:
    """A package of the extra `metrics`. Raises Unavailable if it cannot be imported."""
    need(module)
    try:
        return importlib.import_module(module)
    except Exception as e:  # for example, a torchvision that was built for another torch
        reason = str(e).partition("\n")[0][:200]
        raise Unavailable(f"{module} cannot be imported ({reason}): again, {install('metrics')}") from e
