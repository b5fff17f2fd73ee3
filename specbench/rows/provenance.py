"""Where a row comes from: the configuration's hash, and run.json of the run's folder."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import Any, Self

from specbench.config.run_config import RunConfig
from specbench.errors import UsageError
from specbench.rows import journal
from specbench.storage.files import content, sha256, write_atomically

#: Parameters that do not count in a hash.
_NOT_HASHED = frozenset(
    "out data_dir metrics_dir protocol workers ray_address timing emitted_draws variant log log_project log_dir".split()
)


def config_hash(config: RunConfig) -> str:
    """Hash of a checked configuration: equal for equal measurements.

    Covers every parameter except locations (`out`, `data_dir`, `metrics_dir`), the parameters of the tracker,
    `workers` and `ray_address` (a row's note reports them), `timing` and `emitted_draws` (columns of the row report
    them), and `protocol` and `variant`, whose values are parameters themselves. `batch`, `device`, `dtype`, `engine`
    and `warmup` count, because a latency depends on them, although on a CPU they change no image.
    """
    return sha256(json.dumps(_hashed(config), sort_keys=True), 12)


#: Parameters that may change between two starts of a run in one folder, because they change no image.
MAY_CHANGE = tuple(
    "n shard metrics metrics_dir reference baseline out data_dir timing emitted_draws workers ray_address log"
    " log_project log_dir".split()
)


def decoding_hash(config: RunConfig, baseline: bool = False) -> str:
    """Hash of the parameters that an image depends on: all except `MAY_CHANGE`, and prompt_length, which may grow where
    padding is skipped. baseline: for an image of vanilla AR."""
    kept = {name: value for name, value in _hashed(config).items() if name not in (*MAY_CHANGE, "prompt_length")}
    return sha256(json.dumps([kept, "vanilla" if baseline else "method"], sort_keys=True), 12)


def _hashed(config: RunConfig) -> dict[str, Any]:
    return {name: value for name, value in config.plain().items() if name not in _NOT_HASHED}


def utc() -> str:
    """The current time, as rows and files record it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def new_run_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


@dataclass(frozen=True)
class DecodingProcess:
    """A process that decoded: the environment of `storage.origin.environment`; its weights; the side of its images in
    pixels, and their tokens; workers: processes that decoded at the same time; plugins: labels, joined by "; ";
    started: when it was ready, UTC; loaded_s: seconds until then; prompt_length: see the parameter."""

    specbench: str
    commit: str
    device: str
    device_name: str
    torch: str
    driver: str
    python: str
    threads: int
    weights: str
    resolution: int
    tokens: int
    workers: int
    plugins: str
    pid: int
    started: str
    loaded_s: float
    prompt_length: int | None = None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Raises TypeError for other values than a run writes."""
        process = cls(**values)
        kinds: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "int | None": (int, NoneType)}
        for field_ in fields(process):
            if not isinstance(getattr(process, field_.name), kinds[str(field_.type)]):
                raise TypeError(field_.name)
        return process


@dataclass(frozen=True)
class RunMetadata:
    """The content of run.json.

    run_id: unique. config: digest of config.yaml; two digests while it is being written. sessions: the processes by
    name. begun: the latest start, seconds since 1970. smallest_batch: the size to which batches shrank because memory
    was too small. logged: tracker -> digest of the row that was written to it. asked: whether the metrics of the latest
    start were requested by name.
    """

    run_id: str
    config: tuple[str, ...] = ()
    sessions: Mapping[str, DecodingProcess] = field(default_factory=dict)
    begun: float | None = None
    smallest_batch: int | None = None
    logged: Mapping[str, str] = field(default_factory=dict)
    asked: bool = False

    @classmethod
    def new(cls) -> Self:
        """The metadata of a new run."""
        return cls(new_run_id())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads run.json. UsageError if a run cannot have written the file, or if it was edited."""
        try:
            values = journal.decode(content(path))
            sessions = {name: DecodingProcess.read(process) for name, process in values["sessions"].items()}
            metadata = cls(**values | {"config": tuple(values["config"]), "sessions": sessions})
            if isinstance(metadata.run_id, str):
                return metadata
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass
        raise UsageError(f"{path} is not as specbench run wrote it; restore the file, or name another folder")

    def write(self, path: Path) -> None:
        """Replaces the file."""
        write_atomically(path, journal.encode(asdict(self)))

    def changed(self, **values: Any) -> Self:
        """A copy with other values."""
        return replace(self, **values)
