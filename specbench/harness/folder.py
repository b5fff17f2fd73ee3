"""The folder of a run: its configuration, its metadata (run.json), its journals, its lock and its log."""

from __future__ import annotations

import errno
import json
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from specbench import data
from specbench.config import indices, parameters, registry
from specbench.config.parameter import Parameters
from specbench.config.run_config import RunConfig
from specbench.errors import RunError, UsageError
from specbench.harness.log import logging_to
from specbench.rows import timing
from specbench.rows.columns import Row
from specbench.rows.csv_files import ROW, write_run_row
from specbench.rows.journal import TIMINGS, Journal, Record, TimingJournal
from specbench.rows.provenance import MAY_CHANGE, RunMetadata, decoding_hash
from specbench.rows.scores import ScoreJournal
from specbench.storage.files import (
    append_line,
    check_parent,
    check_regular,
    content,
    is_temporary,
    locked,
    sha256,
    write_atomically,
)
from specbench.storage.reading import from_yaml, yaml_text

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)  # errors that no argument can fix
_DENIED = (errno.EACCES, errno.EPERM)  # of the folder, if it became unwritable, or of another file, such as weights


def new_folder() -> Path:
    """The default folder of a run that starts now: runs/<date>/<time>-<id>."""
    return Path("runs", time.strftime("%Y-%m-%d/%H-%M-%S") + f"-{secrets.token_hex(3)}")


@dataclass(frozen=True)
class DecodingFailure:
    """A line of failures.jsonl: an image of a pass that could not be decoded, even alone. time: UTC; label: of the
    pass, the method or "vanilla"."""

    time: str
    label: str
    index: int
    reason: str

    @classmethod
    def read(cls, line: str) -> Self | None:
        """None for a line that was cut by a kill."""
        try:
            values = json.loads(line)
            return cls(str(values["time"]), str(values["pass"]), int(values["index"]), str(values["reason"]))
        except (ValueError, TypeError, KeyError, RecursionError):
            return None

    def plain(self) -> dict[str, str | int]:
        return {"time": self.time, "pass": self.label, "index": self.index, "reason": self.reason}


@dataclass(frozen=True)
class RunRecords:
    """The records of a run: of the method and, if the run wants one, of the baseline. wanted: numbers of the run's
    images; again: images of both passes that were decoded a second time, for their seconds."""

    method: Journal
    vanilla: Journal | None
    wanted: Sequence[int]
    again: TimingJournal

    @property
    def journals(self) -> list[Journal]:
        return [self.method] if self.vanilla is None else [self.method, self.vanilla]

    @property
    def is_complete(self) -> bool:
        return bool(self.wanted) and not any(journal.missing(self.wanted) for journal in self.journals)

    @property
    def to_time_again(self) -> set[int]:
        """Numbers of the images that have no further pair yet, while the timing is unsteady."""
        method, vanilla = self.wanted_records
        if vanilla is None or not timing.is_unsteady(method, vanilla, self.again.lines):
            return set()
        further = timing.extended(method, vanilla, self.again.lines)[0][len(method) :]
        return {*self.wanted} - {record.index for record in further}

    @property
    def wanted_records(self) -> tuple[list[Record], list[Record] | None]:
        """The records of the run's images: of the method, and of the baseline if the run wants one."""
        vanilla = None if self.vanilla is None else self.vanilla.records_of(self.wanted)
        return self.method.records_of(self.wanted), vanilla

    @property
    def progress(self) -> str:
        count = len(self.wanted)
        done = [f"{count - len(journal.missing(self.wanted))} of {count}" for journal in self.journals]
        return " and ".join(f"{text} {what}" for text, what in zip(done, ("images", "baseline images")))

    def check_prompts(self, items: Sequence[data.Item]) -> None:
        """Raises UsageError if an image was decoded from another prompt."""
        for journal in self.journals:
            for item in items:
                record = journal.records.get(item.index)
                if record and (record.prompt, record.id) != (item.prompt, item.id):
                    raise UsageError(
                        f"the prompts have changed since {journal.path} was written (index"
                        f" {indices.label(item.index)}); choose another out="
                    )


class RunFolder:
    """The files of a run in `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.metadata_file = path / "config.yaml", path / "run.json"
        self.records, self.baseline_records = path / "records.jsonl", path / "baseline.jsonl"
        self.scores, self.timings = path / "scores.jsonl", path / TIMINGS
        self.row, self.sheet = path / ROW, path / "contact_sheet.png"
        self.failures = path / "failures.jsonl"  # images that could not be decoded, one per line
        self.lock = path / ".lock"

    def __str__(self) -> str:
        return str(self.path)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Creates the folder, locks it against a second process, and logs into it."""
        with locked(self.path, self.check_ours):
            try:
                with logging_to(self.path / "run.log"):
                    yield
            except OSError as e:
                if why := self.disk_fault(e):
                    raise RunError(
                        f"cannot write into {self} any more ({why}); every recorded image is safe. Repair that, then"
                        f" continue with: specbench resume {shlex.quote(str(self))}"
                    ) from None
                raise

    def check_ours(self) -> None:
        """UsageError if the folder contains other files, or a link out of it. It need not exist; OSError if it cannot
        be made."""
        if not self.path.exists():
            check_parent(self.path)
            return
        if not self.path.is_dir():
            raise FileExistsError(errno.EEXIST, "File exists")
        check_regular(self.path, {path.name for path in vars(self).values() if path != self.path} | {"run.log"})
        if self.config.exists():
            return
        if self.records.exists():
            raise UsageError(
                f"{self} has records of a run but no {self.config.name}: restore the file, or choose another out="
            )
        # A process that was killed before it wrote config.yaml can leave these files.
        others = {p.name for p in self.path.iterdir() if not is_temporary(p)} - {".lock", "run.log", "run.json"}
        if others:
            raise UsageError(f"{self} holds {sorted(others)[0]} but no run; choose an empty or a new folder as out=")

    def disk_fault(self, error: Exception) -> str:
        """The fault of the disk, or of the folder on it; "" for other errors."""
        if not isinstance(error, OSError):
            return ""
        if not self.path.is_dir():
            return "it is gone"
        denied = error.errno in _DENIED and Path(str(error.filename)).is_relative_to(self.path)
        return error.strerror or "error" if error.errno in _DISK or denied else ""

    # --- configuration ------------------------------------------------------------------------------------------------

    def compare_config(self, config: RunConfig) -> None:
        """UsageError if the configuration in the folder differs in a parameter that must not change, or if its file was
        edited."""
        if not self.config.exists():
            return
        stored, wanted = self.read_config(), config.plain()
        names = dict.fromkeys([*wanted, *stored])
        different = [name for name in names if name not in MAY_CHANGE and wanted.get(name) != stored.get(name)]
        if "prompt_length" in different and _may_grow(stored.get("prompt_length"), config):
            different.remove("prompt_length")
        if different:
            shown = different[:3]
            raise UsageError(
                f"{self} holds a run with {_values(stored, shown)}, not {_values(wanted, shown)}; choose another out=,"
                " or use the parameters in its config.yaml to continue it"
            )

    def read_config(self) -> dict[str, Any]:
        """The content of config.yaml. UsageError if it cannot be read, or was edited after the run wrote it."""
        try:
            text = content(self.config)
            values = dict(from_yaml(text.decode()))
        except Exception:
            exists = self.config.exists()
            way_out = "restore the file, or delete the folder and run its command again"
            raise UsageError(f"cannot read {self.config}: {way_out}" if exists else f"{self} holds no run") from None
        if self.metadata_file.exists() and sha256(text, 16) not in self.metadata().config:
            raise UsageError(
                f"{self.config} was changed since the run wrote it (or {self.metadata_file.name} was): restore it, or"
                " start a run with other parameters in another out="
            )
        return {str(name): value for name, value in values.items()}

    def write_config(self, config: RunConfig) -> None:
        """Writes a configuration. run.json lists its digest before and after, so that a kill in between leaves a
        readable folder."""
        values = config.plain()
        values.pop("out", None)
        text = yaml_text(values).encode()
        digest, metadata = sha256(text, 16), self.metadata()
        if metadata.config == (digest,) and self.config.exists():
            return
        self.update_metadata(config=(*metadata.config[-1:], digest))
        write_atomically(self.config, text)
        self.update_metadata(config=(digest,))

    # --- metadata -----------------------------------------------------------------------------------------------------

    def metadata(self) -> RunMetadata:
        """The content of run.json; for a new run, its initial content."""
        return RunMetadata.read(self.metadata_file) if self.metadata_file.exists() else RunMetadata.new()

    def update_metadata(self, **values: Any) -> None:
        """Writes values into run.json. FileNotFoundError if the folder is gone: it is not created again."""
        self.path.stat()
        self.metadata().changed(**values).write(self.metadata_file)

    def check_same(self, name: str, value: str) -> None:
        """Raises UsageError if an earlier process decoded with another value; name: "weights" or "device"."""
        for process in self.metadata().sessions.values():
            if (earlier := getattr(process, name)) != value:
                raise UsageError(f"{self} was started with {name} {earlier}, not {value}: choose another out=")

    # --- journals -----------------------------------------------------------------------------------------------------

    def open_records(self, config: RunConfig) -> RunRecords:
        """The records of a configuration. UsageError if one was decoded with another configuration."""
        method, vanilla = Journal(self.records), None
        _check_fit(method, decoding_hash(config))
        if config.wants_baseline:
            vanilla = Journal(self.baseline_records)
            _check_fit(vanilla, decoding_hash(config, baseline=True))
        return RunRecords(method, vanilla, indices.of_run(config), TimingJournal(self.timings))

    def open_scores(self) -> ScoreJournal:
        return ScoreJournal(self.scores)

    def read_failures(self) -> list[DecodingFailure]:
        """All decoding failures of the run, oldest first."""
        if not self.failures.is_file():
            return []
        lines = content(self.failures).decode(errors="replace").splitlines()
        return [failure for failure in map(DecodingFailure.read, lines) if failure]

    def add_failure(self, failure: DecodingFailure) -> None:
        append_line(self.failures, json.dumps(failure.plain()).encode() + b"\n")

    def write_row(self, row: Row) -> bool:
        """Writes row.csv and details.json. Returns whether one of them changed."""
        return write_run_row(self.path, row)


def _may_grow(stored: object, config: RunConfig) -> bool:
    """Whether the folder's padded length of prompts may become the configuration's: images do not depend on it where
    the model skips padding."""
    longer, model = config.own.get("prompt_length"), registry.find("model", config.model)
    return type(stored) is type(longer) is int and stored < longer and getattr(model, "skips_padding", False)


def _check_fit(journal: Journal, config: str) -> None:
    """UsageError if a record has another configuration hash."""
    for record in journal.records.values():
        if record.config != config:
            raise UsageError(
                f"{journal.path}: image {indices.label(record.index)} was decoded with configuration {record.config},"
                f" but config.yaml next to it is {config}: restore the file, or choose another out="
            )


def stored(path: Path) -> RunConfig:
    """The checked configuration of the run in a folder. Its weights and prompts need not exist. UsageError if the
    configuration is missing or invalid."""
    folder = RunFolder(path)
    values = folder.read_config()
    try:
        return RunConfig.of(parameters.validate({**values, "out": None}))
    except UsageError as e:
        labels = [label for process in folder.metadata().sessions.values() for label in process.plugins.split("; ")]
        raise UsageError(f"{folder.config}: {e}{parameters.missing_plugins(labels)}") from None


def _values(cfg: Parameters, names: Sequence[str]) -> str:
    return ", ".join(f"{name}={cfg[name]}" if name in cfg else f"no {name}" for name in names)


def current_prompts(config: RunConfig) -> list[data.Item]:
    """The prompts in their files; [] if they have no file, or the file is gone."""
    try:
        return [] if registry.is_drawn(config.data) else data.images_of(config)
    except UsageError:
        return []


def recorded_prompts(records: Sequence[Record], config: RunConfig) -> list[data.Item]:
    """The prompts from the records of a run, for a data set whose files no longer exist."""
    if registry.is_drawn(config.data):
        return data.images_of(config)
    return [data.Item(r.index, r.prompt, None, r.id) for r in records]
