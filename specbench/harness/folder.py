"""The folder of a run: its configuration, its memory (run.json), its records, its lock and its log."""

from __future__ import annotations

import errno
import json
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from specbench import data
from specbench.config import parameters, registry, variants
from specbench.errors import RunError, UsageError
from specbench.harness.log import logging_to
from specbench.rows import indices
from specbench.rows.csv_files import read_rows, to_csv
from specbench.rows.journal import Journal, read_memory
from specbench.storage.files import is_temporary, locked, sha256, write_atomically

#: Parameters that may change between two runs in the same folder.
MAY_CHANGE = (
    "n",
    "metrics",
    "metrics_dir",
    "reference",
    "baseline",
    "out",
    "data_dir",
    "timing",
    "emitted_draws",
    "workers",
    "ray_address",
    "url",
    "log",
    "log_project",
    "log_dir",
)

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)  # errors that no other argument can fix


def new_folder(now: float | None = None) -> Path:
    """The default folder of a run that starts now: runs/<date>/<time>-<id>."""
    return Path("runs", time.strftime("%Y-%m-%d/%H-%M-%S", time.localtime(now)) + f"-{secrets.token_hex(3)}")


def new_run_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def wants_baseline(cfg: Mapping[str, Any]) -> bool:
    """Whether a run decodes a baseline. Vanilla AR is its own."""
    return bool(cfg.get("baseline")) and not is_vanilla(cfg)


def is_vanilla(cfg: Mapping[str, Any]) -> bool:
    """Whether a run is vanilla AR: its empty draft and one token per pass identify it, not the name of the preset."""
    return cfg["drafter"] == "none" and not cfg.get("iterations")


@dataclass(frozen=True)
class RunRecords:
    """The records of the method, and of the baseline if the run wants one."""

    method: Journal
    vanilla: Journal | None
    each: int = 1  # images of a prompt

    @property
    def journals(self) -> list[Journal]:
        return [self.method] if self.vanilla is None else [self.method, self.vanilla]

    def complete(self, n: int) -> bool:
        return not any(journal.missing(n, self.each) for journal in self.journals)

    def progress(self, n: int) -> str:
        count = n * self.each
        done = [f"{count - len(journal.missing(n, self.each))} of {count}" for journal in self.journals]
        return " and ".join(f"{text} {what}" for text, what in zip(done, ("images", "baseline images")))

    def check_prompts(self, items: Sequence[data.Item]) -> None:
        """Raises UsageError if an image was decoded for another prompt."""
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
        self.config, self.memory_file = path / "config.yaml", path / "run.json"
        self.records, self.baseline_records = path / "records.jsonl", path / "baseline.jsonl"
        self.row, self.sheet = path / "row.csv", path / "contact_sheet.png"
        self.failures = path / "failures.jsonl"  # images that could not be decoded, one per line
        self.lock = path / ".lock"

    def __str__(self) -> str:
        return str(self.path)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Makes the folder, locks it against a second process, and logs into it."""
        with locked(self.path, self._check_ours):
            try:
                with logging_to(self.path / "run.log"):
                    yield
            except OSError as e:
                if why := self.disk_fault(e):
                    raise RunError(
                        f"cannot write into {self} any more ({why}); every recorded image is safe. Fix that, then"
                        f" continue with: specbench resume {shlex.quote(str(self))}"
                    ) from None
                raise

    def _check_ours(self) -> None:
        """UsageError for a folder that holds other things."""
        if self.config.exists():
            return
        # Files that a process killed before it wrote config.yaml can leave.
        others = {p.name for p in self.path.iterdir() if not is_temporary(p)} - {".lock", "run.log"}
        if others:
            raise UsageError(f"{self} holds {sorted(others)[0]} but no run; choose an empty or a new folder as out=")

    def disk_fault(self, error: Exception) -> str:
        """The fault of the disk, or of the folder on it; empty for other errors."""
        if not isinstance(error, OSError):
            return ""
        if not self.path.is_dir():
            return "it is gone"
        return error.strerror or "error" if error.errno in _DISK else ""

    # --- configuration ------------------------------------------------------------------------------------------------

    def compare_config(self, cfg: Mapping[str, Any]) -> dict[str, Any] | None:
        """The configuration in the folder; None if there is none yet. UsageError if it differs from `cfg` in a
        parameter that must not change."""
        if not self.config.exists():
            return None
        mine = _written(cfg)
        try:
            theirs = variants.of_older(_read_yaml(self.config))
        except Exception:
            raise UsageError(f"cannot read {self.config}; choose another out=") from None
        names = dict.fromkeys([*parameters.table(), *theirs])
        different = [name for name in names if name not in MAY_CHANGE and mine.get(name) != theirs.get(name)]
        if different:
            shown = different[:3]
            raise UsageError(
                f"{self} holds a run with {_values(theirs, shown)}, not {_values(mine, shown)}; choose another out=,"
                " or give the parameters in its config.yaml to continue it"
            )
        return theirs

    def write_config(self, cfg: Mapping[str, Any]) -> None:
        """Writes the configuration of the row."""
        text = OmegaConf.to_yaml(OmegaConf.create(_written(cfg))).encode()
        if not self.config.exists() or self.config.read_bytes() != text:
            write_atomically(self.config, text)

    # --- memory -------------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, Any]:
        """run.json: the id of the run, the processes that decoded for it, and what determined the metrics of its
        row."""
        return read_memory(self.memory_file) if self.memory_file.exists() else {"run_id": new_run_id(), "sessions": {}}

    def remember(self, **entries: Any) -> None:
        """Writes entries into run.json."""
        text = json.dumps(self.memory() | entries, indent=1) + "\n"
        write_atomically(self.memory_file, text.encode())

    def check_same(self, name: str, mine: str) -> None:
        """Raises UsageError if an earlier process decoded with another one, of weights or devices."""
        for other in self.memory()["sessions"].values():
            if other.get(name) != mine:
                raise UsageError(f"{self} was started with {name} {other.get(name)}, not {mine}: choose another out=")

    # --- records and row ----------------------------------------------------------------------------------------------

    def open_records(self, cfg: Mapping[str, Any]) -> RunRecords:
        vanilla = Journal(self.baseline_records) if wants_baseline(cfg) else None
        return RunRecords(Journal(self.records), vanilla, indices.images_per_prompt(cfg))

    def read_row(self) -> dict[str, Any] | None:
        rows = read_rows(self.row) if self.row.is_file() else []
        return rows[0] if rows else None

    def read_failures(self) -> list[dict[str, Any]]:
        """Every image that could not be decoded: time, pass, index, reason; of all processes, in their order."""
        if not self.failures.is_file():
            return []
        found = []
        for line in self.failures.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
                found.append(entry | {"pass": str(entry["pass"]), "index": int(entry["index"])})
            except (ValueError, TypeError, KeyError, RecursionError):
                continue  # cut by a kill
        return found

    def write_row(self, row: Mapping[str, Any], journal: Journal, bases: Mapping[str, str]) -> None:
        """Writes the row, and then what determined its metrics."""
        write_atomically(self.row, to_csv([row]).encode())
        self.remember(metrics=dict(bases), images=images_hash(journal, row["n"], row.get("images_per_prompt") or 1))


def images_hash(journal: Journal, n: int, each: int) -> str:
    """Identifies the images of the first n prompts: a hash of their pixels."""
    return sha256("".join(record.sha256 for record in journal.first(n, each)), 16)


def stored(path: Path) -> dict[str, Any]:
    """The checked configuration of the run in a folder. Its weights and prompts need not exist. UsageError if there is
    no configuration, or a bad one."""
    file = path / "config.yaml"
    try:
        theirs = _read_yaml(file)
    except Exception:
        raise UsageError(f"cannot read {file}" if file.exists() else f"{path} holds no run") from None
    # versions without these parameters
    older: dict[str, Any] = {} if parameters.is_served(theirs) else {"timing": None, "emitted_draws": 0}
    older["log"] = "none"
    try:
        return parameters.validate({**older, **variants.of_older(theirs), "out": None})
    except UsageError as e:
        sessions = RunFolder(path).memory()["sessions"].values()
        labels = [label for session in sessions for label in str(session.get("plugins") or "").split("; ")]
        raise UsageError(f"{e}{parameters.plugins_lacking(labels)}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    found = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(found, dict):
        raise TypeError
    return {str(name): value for name, value in found.items()}


def _written(cfg: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in cfg.items() if name != "out"}


def _values(cfg: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name}={cfg[name]}" if name in cfg else f"no {name}" for name in names)


def current_prompts(cfg: Mapping[str, Any]) -> list[data.Item]:
    """The prompts in their files; none if they have no file, or it is gone."""
    try:
        return [] if registry.is_drawn(cfg["data"]) else data.images_of(cfg)
    except UsageError:
        return []


def recorded_prompts(journal: Journal, cfg: Mapping[str, Any]) -> list[data.Item]:
    """The prompts from the records of a run, for a data set whose files are gone."""
    if registry.is_drawn(cfg["data"]):
        return data.images_of(cfg)
    records = journal.first(cfg["n"], indices.images_per_prompt(cfg))
    return [data.Item(r.index, r.prompt, None, r.id) for r in records]
