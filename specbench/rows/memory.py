"""run.json of a run's folder: its id, the processes that decoded for it, and the digest of its configuration."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from specbench.errors import UsageError
from specbench.rows import checked_lines
from specbench.storage.files import content, write_atomically


def new_run_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


@dataclass(frozen=True)
class RunMemory:
    """run_id: unique. config: digests of config.yaml, the one that it has last; two while it is being written, none in
    folders of older versions. sessions: the processes by name, each with its environment, see `worker.Joined`. begun:
    the latest start, seconds since 1970. smallest_batch: to which a lack of memory led. logged: tracker -> digest of
    the row that it got. asked: whether the metrics of the latest start were asked for by name."""

    run_id: str
    config: tuple[str, ...] = ()
    sessions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    begun: float | None = None
    smallest_batch: int | None = None
    logged: Mapping[str, str] = field(default_factory=dict)
    asked: bool = False

    @classmethod
    def new(cls) -> Self:
        """Of a run that begins."""
        return cls(new_run_id())

    @classmethod
    def read(cls, path: Path) -> Self:
        """UsageError where a run cannot have written the file, or it was changed since."""
        try:
            text = content(path)
            values = json.loads(text)
            if "check" in values or "config" in values:  # older versions wrote neither
                values = checked_lines.decode(text)
            known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
            found = cls(**known | {"config": tuple(values.get("config", ()))})
            sessions = found.sessions.values()
            if isinstance(found.run_id, str) and all(isinstance(one, dict) for one in sessions):
                return found
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass
        raise UsageError(f"{path} is not as specbench run wrote it; restore the file, or name another folder")

    def content(self) -> bytes:
        """The file."""
        return checked_lines.encode(asdict(self))

    def write(self, path: Path) -> None:
        """Replaces the file."""
        write_atomically(path, self.content())

    def changed(self, **values: Any) -> Self:
        """With other values."""
        return replace(self, **values)
