"""What a run leaves behind: a record per image, a row, and where both come from.

**Records** (`records.jsonl`, `baseline.jsonl`): one JSON object a line with a checksum of its own, appended and fsynced
only when that image's PNG is safely in its place. A process that is killed at any instant so loses at most the image
that it was decoding. Reading mends what a kill can leave: a half-written last line is dropped, and so is a record whose
picture is gone.

**Rows** (`row.csv`, `results/*.csv`): the columns of `COLUMNS` and no others. An empty cell means: not measured.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import math
import os
import platform
import re
import subprocess
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from PIL import Image

from specbench._version import __version__
from specbench.config import parameters
from specbench.errors import UsageError, plain
from specbench.storage import home, pictures

# --- records ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """One image. Times are wall seconds; those of a batch are shared out evenly over its images."""

    index: int  # place of the prompt among the chosen ones; with the seed, the key of the random stream
    prompt: str
    seed: int
    tokens: int  # generated tokens T
    steps: int  # target forward passes of the decode phase
    drafted: int  # draft tokens verified
    accepted: int  # draft tokens accepted
    accepted_length: float  # tokens / steps
    latency_s: float | None  # decode time of this image alone; None where it was decoded in a batch
    decode_s: float  # its share of the decode time of its batch; at batch 1 the latency
    text_s: float  # its share of the text encoding
    pixels_s: float  # its share of the pixel decoding
    batch: int  # images decoded together
    peak_memory_mib: float  # up to this image: device memory on CUDA, resident memory of the process elsewhere
    image: str  # file name of the PNG, relative to the run's folder
    sha256: str  # of the pixels, row by row, as uint8 RGB
    session: str  # the process that decoded it, an entry of run.json
    # How its steps went (see `statistics`); None in records of older versions. Figures of drafts are over the steps
    # that had one, and None where none had.
    accepted_per_step: list[int] | None = None  # draft tokens accepted inside the image
    accepted_by_depth: list[int] | None = None  # steps that accepted a draft token at depth 1, 2, ...
    verified_by_depth: list[int] | None = None  # steps that verified one there: it was offered, those above it accepted
    log_prob_mean: float | None = None  # natural-log probability of a token under the target, mean over the tokens;
    log_prob_std: float | None = None  # its standard deviation. With guidance and temperature, before top-k and top-p
    draft_tv: float | None = None  # total variation of drafter's and target's laws of the next token, mean of drafts
    first_accept: float | None = None  # probability with which the rule keeps the first candidate, mean of drafts
    draft_top1: float | None = None  # share of drafts whose likeliest next token is the target's likeliest
    draft_top3: float | None = None  # share of drafts that have it among their three likeliest
    draft_passes: int | None = None  # forward passes of a drafter network in its steps
    # Of models of vectors. In the order in which the tokens were drawn: their places, and for each "1" an accepted
    # draft, "0" a rejected one, "." no draft that was judged.
    order: list[int] | None = None
    drafts: str | None = None
    tries: list[int] | None = None  # proposals for each token after a rejection
    fallbacks: int | None = None  # of those, how many were taken for want of further tries
    draft_s: float | None = None  # its share of the drafting time of its batch
    made: int | None = None  # tokens drafted, those that were never judged included
    # Name of the prompt in its data set, under which metrics pair; None in records of older versions.
    id: str | None = None
    done: float | None = None  # when it was decoded, seconds since 1970; None in records of older versions


class Journal:
    """The records of one pass over the prompts, by index, and the only way to add to them. Records of an older version
    are widened."""

    def __init__(self, path: Path) -> None:
        """Reads `path`, and mends it. Raises UsageError for a line that no kill can explain."""
        self.path = path
        self.records: dict[int, Record] = {}
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a file; remove it and run again")
        text = path.read_bytes() if path.exists() else b""
        for number, line, complete in _lines(text):
            try:
                record = _from_line(line)
                if fault := wrong(record):
                    raise ValueError(fault)
            except (ValueError, TypeError, RecursionError):
                if not complete:
                    break  # the process was killed inside this line
                raise UsageError(
                    f"line {number} of {path} is not a record, or was changed; remove that line and run again"
                ) from None
            if record.index not in self.records and (path.parent / record.image).is_file():
                self.records[record.index] = record
        mended = b"".join(map(_to_line, self.records.values()))
        if mended != text:
            write_atomically(path, mended)

    def __contains__(self, index: int) -> bool:
        return index in self.records

    def missing(self, n: int) -> list[int]:
        """The indices below `n` without a record, in order."""
        return [i for i in range(n) if i not in self.records]

    def first(self, n: int) -> list[Record]:
        """The records of the indices below `n`, in order; all must be there."""
        return [self.records[i] for i in range(n)]

    def add(self, record: Record, picture: np.ndarray) -> None:
        """Puts the picture, (H, W, 3) uint8, in its place, and only then appends the record; both are then on disk."""
        if record.index in self.records:
            raise ValueError(f"index {record.index} is already in {self.path}")
        if self.records and not self.path.exists():
            raise FileNotFoundError(errno.ENOENT, "it is gone", str(self.path))
        encoded = io.BytesIO()
        Image.fromarray(picture).save(encoded, "PNG")
        place = self.path.parent / record.image
        place.parent.mkdir(exist_ok=True)  # but not the run's folder: one that was removed is not begun anew
        write_atomically(place, encoded.getvalue())
        append_line(self.path, _to_line(record))
        self.records[record.index] = record

    def picture(self, index: int) -> np.ndarray:
        """The picture of a record, (H, W, 3) uint8. Raises UsageError when it is not the one that was recorded."""
        record = self.records[index]
        path = self.path.parent / record.image
        try:
            pixels = pictures.read(path)
        except UsageError:
            pixels = np.zeros((0, 0, 3), np.uint8)
        if digest(pixels) != record.sha256:
            raise UsageError(f"{path} is not the picture of its record; delete it and run again to decode it anew")
        return pixels


_WHOLE = ("index", "seed", "tokens", "steps", "drafted", "accepted", "batch")
_MEASURED = ("accepted_length", "decode_s", "text_s", "pixels_s", "peak_memory_mib")
_OPTIONAL = (
    "latency_s", "log_prob_mean", "log_prob_std", "draft_tv", "first_accept", "draft_top1", "draft_top3",
    "draft_passes", "fallbacks", "draft_s", "made",
)  # fmt: skip
_LISTS = ("accepted_per_step", "accepted_by_depth", "verified_by_depth", "order", "tries")
_WORDS = ("prompt", "sha256", "session", "image")
PICTURE = r"\w+/\d+\.png"  # an image of a record
_LARGEST = 1e100  # its square is still a number


def wrong(r: Record) -> str:
    """What is wrong with a record that nobody vouches for; empty where nothing is."""
    for name in (*_WHOLE, *_MEASURED, *_OPTIONAL):
        value = getattr(r, name)
        if value is None and name in _OPTIONAL:
            continue
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole or (isinstance(value, float) and name not in _WHOLE)) or not abs(value) < _LARGEST:
            return f"has no {'whole ' if name in _WHOLE else ''}number as {name} ({plain(value):.40})"
        least = 1 if name in ("tokens", "steps", "batch") else 0
        if name != "log_prob_mean" and value < least:
            return f"has {name} {value}"
    for name in _LISTS:
        values = getattr(r, name)
        if values is not None and not (
            isinstance(values, list) and all(type(v) is int and 0 <= v < 2**53 for v in values)
        ):
            return f"has no list of whole numbers as {name}"
    if texts := [name for name in _WORDS if not isinstance(getattr(r, name), str)]:
        return f"has no text as {texts[0]}"
    for name in ("id", "drafts"):
        if not isinstance(getattr(r, name), str | None):
            return f"has no text as {name}"
    # A name as a run gives it, so that no record leads out of the run's folder.
    if not re.fullmatch(PICTURE, r.image):
        return f"has no picture of its run as image ({plain(r.image):.40})"
    return f"accepted {r.accepted} of {r.drafted} drafts" if r.accepted > r.drafted else ""


def read_memory(path: Path) -> dict[str, Any]:
    """What run.json says: run_id, sessions (the processes by name), and maybe metrics (what fixed those of the row).
    UsageError where it is not as a run left it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        run_id, sessions, bases = found["run_id"], found["sessions"], found.get("metrics", {})
        if isinstance(run_id, str) and isinstance(bases, dict) and all(isinstance(s, dict) for s in sessions.values()):
            return {str(name): value for name, value in found.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise UsageError(f"{path} is not what specbench run wrote; take another folder, or one as it left it")


def read_records(path: Path) -> list[Record]:
    """The records of a finished or running pass, by index, without touching the file."""
    records = []
    for _, line, complete in _lines(path.read_bytes()):
        try:
            records.append(_from_line(line))
        except (ValueError, TypeError, RecursionError):
            if complete:
                raise UsageError(f"{path} holds a line that is not a record") from None
    return sorted(records, key=lambda r: r.index)


def _lines(text: bytes) -> Iterator[tuple[int, bytes, bool]]:
    """(line number, line, is it ended by a newline) for every line that is not empty."""
    lines = text.split(b"\n")
    for i, line in enumerate(lines):
        if line:
            yield i + 1, line, i + 1 < len(lines)


def _to_line(record: Record) -> bytes:
    text = json.dumps(asdict(record), ensure_ascii=False, allow_nan=False)
    return f'{text[:-1]}, "check": "{_check(text)}"}}\n'.encode()


def _from_line(line: bytes) -> Record:
    """The record of a line. ValueError, TypeError or RecursionError where it is none, or its checksum is another's; one
    of an older version has none."""
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError("it is no object")
    check = values.pop("check", None)
    if check is not None and check != _check(json.dumps(values, ensure_ascii=False)):
        raise ValueError("the checksum differs")
    return Record(**values)


def _check(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def append_line(path: Path, line: bytes) -> None:
    """Adds a line to a file, on disk when this returns. Where the disk is full, the file stays as it was."""
    with path.open("ab", buffering=0) as f:
        size = f.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[f.write(line) :]
            os.fsync(f.fileno())
        except OSError:
            with suppress(OSError):
                f.truncate(size)
            raise


def digest(pixels: np.ndarray) -> str:
    """SHA-256 of a picture's pixels: independent of how the file is compressed."""
    return hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that a reader, or a process after a kill, finds the old content or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()  # which would hold on to the last bytes of a full disk
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too, must survive
    finally:
        os.close(folder)


def writable(path: str) -> Path:
    """A file that a command is to write; UsageError now, and not after an hour, where it cannot be."""
    file = home.expanded(path)
    try:
        if file.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        if file.exists() and not file.is_file():
            raise FileExistsError(0, "it is a pipe or a device")
        if file.parent.exists() and not file.parent.is_dir():
            raise NotADirectoryError(0, "Not a directory")
        file.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(file.parent, os.W_OK):
            raise PermissionError(0, "Permission denied")
    except OSError as e:
        raise UsageError(f"cannot write {path} ({e.strerror}); choose another out=FILE.csv") from None
    return file


@contextmanager
def locked(folder: Path, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Makes a folder and keeps other processes out of it. UsageError where one is at work there or nothing can be
    written; what `check` raises comes before anything but the folder is made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check()
        lock = FileLock(folder / ".lock", timeout=0)
        lock.acquire()
    except Timeout:
        raise UsageError(f"another process is working in {folder}; wait for it, or choose another out=") from None
    except OSError as e:
        raise UsageError(f"cannot write into {folder} ({e.strerror}); choose another out=") from None
    try:
        yield
    finally:
        lock.release()


# --- rows -------------------------------------------------------------------------------------------------------------

#: Columns of every metric that DESIGN knows; each has `_stderr` and `_backend` beside it.
METRICS = (
    "fid", "clip_score", "image_reward", "hpsv2", "inception_score", "kid", "precision", "recall", "perplexity",
)  # fmt: skip

_IDENTITY = {
    "run_id": "name of the run, unique",
    "time": "when the row was drawn up, UTC",
    "specbench": "version of specbench",
    "commit": "git commit of the code that decoded; -dirty where specbench/ or conf/ differed from it",
    "config_hash": "hash of the configuration, see records.config_hash",
    "protocol": "protocol that the run follows, name@version",
}
_WHERE_PARAMETERS = ("device", "dtype", "engine")  # parameters that the row names under "where"
_TEXTS = (
    "baseline_run_id",
    "acceptance_by_depth",
    "accepted_histogram",
    "drafted_by_place",
    "acceptance_by_turn",
)  # among the figures
# Where things lie, and what the columns show by being filled or by the backends that they name.
_NOT_IN_ROW = ("out", "data_dir", "metrics", "metrics_dir", "reference", "baseline", "workers", "ray_address")
_LIKELIHOOD = {
    "log_prob_mean": "natural-log probability of a token under the target, with guidance and temperature (1 where it is"
    " 0) but before top-k and top-p, mean over all tokens of all images",
    "log_prob_std": "its standard deviation over all tokens of all images",
}
_SPEED = {
    "accepted_length_mean": "generated tokens / target forward passes of the decode phase, mean over images",
    "accepted_length_std": "its standard deviation over images",
    "steps": "target forward passes of the decode phase, mean over images",
    "step_compression": "tokens per image / steps",
    "acceptance_rate": "accepted / verified draft tokens, over all images",
    "acceptance_by_depth": "JSON list over the depths 1, 2, ... of a draft: accepted / verified there, where verified"
    " means that the depths above it were accepted",
    "accepted_histogram": "JSON list: shares of the steps that accepted 0, 1, 2, ... draft tokens, over all images",
    "drafted_by_place": "JSON list over an image's tokens: share of the images in which it was an accepted draft token",
    "acceptance_by_turn": "JSON list over the turns in which the tokens were drawn: accepted / judged drafts (models of"
    " vectors), null where none was judged",
    "first_accept": "probability with which the rule keeps a draft's first candidate, mean over all steps with a draft",
    "draft_tv": "total variation between the drafter's and the target's law of the next token, mean over the same",
    "draft_top1": "share of the same steps in which the drafter's likeliest next token is the target's likeliest",
    "draft_top3": "share of the same steps in which it is among the drafter's three likeliest",
    "draft_passes": "forward passes of a drafter network in the steps, mean over images",
    "residual_tries": "proposals for the token after a rejection, mean over all rejections (models of vectors)",
    "residual_fallbacks": "rejections after which the proposals did not suffice, over all images",
    "draft_cost": "seconds to draft a token / seconds of vanilla AR for one, same batch size (c in CSpD's Eq. 35)",
    "speedup_expected": "CSpD's Eq. 35 from acceptance_rate, gamma and draft_cost",
    "latency_s_mean": "decode seconds of one image at batch 1, first target forward to last token, mean over images",
    "latency_s_std": "its standard deviation over images",
    "latency_s_p50": "its median",
    "latency_s_p95": "its 95th percentile",
    "tokens_per_s": "tokens / decode seconds, over all images",
    "images_per_s": "images / decode seconds, over all images",
    "text_s": "text encoding, seconds per image, not in the latency",
    "pixels_s": "pixel decoding, seconds per image, not in the latency",
    "speedup_latency": "mean latency of vanilla AR on the same prompts / mean latency",
    "speedup_throughput": "images per second / those of vanilla AR on the same prompts in batches of the same size",
    "speedup_step": "mean steps of vanilla AR on the same prompts / mean steps",
    "baseline_run_id": "run that decoded the vanilla AR images",
    "baseline_latency_s": "mean latency of vanilla AR on the same prompts",
    "peak_memory_mib": "peak while decoding: device memory on CUDA, resident memory of the process elsewhere",
}
#: Figures of `_LIKELIHOOD` and `_SPEED` that are means or ratios over images, and so have a standard error.
_ESTIMATES = frozenset(
    "log_prob_mean accepted_length_mean steps step_compression acceptance_rate first_accept draft_tv draft_top1"
    " draft_top3 draft_passes residual_tries latency_s_mean tokens_per_s images_per_s text_s pixels_s speedup_latency"
    " speedup_throughput speedup_step baseline_latency_s".split()
)
_WHERE = {
    "device": "device that decoded",
    "device_name": "its name",
    "dtype": "number format of the models",
    "engine": "how a step was executed",
    "torch": "version of PyTorch",
    "driver": "version of the CUDA driver",
    "python": "version of Python",
    "threads": "CPU threads of PyTorch",
}


def stderr_of(column: str) -> str:
    """The column with the standard error of another: steps -> steps_stderr, latency_s_mean -> latency_s_stderr (beside
    latency_s_std)."""
    return f"{column.removesuffix('_mean')}_stderr"


def _with_errors(lines: Mapping[str, str]) -> dict[str, str]:
    """Columns and their meanings, and the standard errors beside those that have one."""
    found: dict[str, str] = {}
    for name, line in lines.items():
        found[name] = line
        if name in _ESTIMATES:
            found[stderr_of(name)] = f"standard error of {name} over images, see statistics.ratio"
    return found


_FIGURES = _with_errors(_LIKELIHOOD) | _with_errors(_SPEED)

#: Every column of a row, in order, with its meaning. The one place that fixes the format.
COLUMNS: dict[str, str] = {
    **_IDENTITY,
    **{k: p.line for k, p in parameters.TABLE.items() if k not in (*_NOT_IN_ROW, *_WHERE_PARAMETERS)},
    "prompts_hash": "hash of the chosen prompts and their ids, in order, see data.prompts_hash",
    "resolution": "side of the images in pixels",
    "tokens": "generated tokens per image",
    **{
        f"{m}{suffix}": line
        for m in METRICS
        for suffix, line in {
            "": "quality metric",
            "_stderr": f"standard error of {m}",
            "_backend": f"what computed {m}; values of different backends do not compare",
        }.items()
    },
    **_FIGURES,
    **_WHERE,
    "note": "what to watch",
}
COLUMNS["weights"] = "weights that decoded: random, or where they come from and a hash of their content"
COLUMNS["n"] = "number of prompts, and of images"
COLUMNS["prompts"] = "file of prompts, as it was named; prompts_hash tells its content"
COLUMNS["perplexity"] = "exp(-log_prob_mean)"

#: What every row has.
_NEEDED = ("run_id",)
_NUMBERS = frozenset(
    [k for k, p in parameters.TABLE.items() if p.kind in ("whole", "number")]
    + [m + suffix for m in METRICS for suffix in ("", "_stderr")]
    + [k for k in _FIGURES if k not in _TEXTS]
    + ["resolution", "tokens", "threads"]
)


def to_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV text with the header of `COLUMNS`. Raises ValueError for a key that is no column."""
    return csv_text(COLUMNS, [{name: _cell(value) for name, value in row.items()} for row in rows])


def csv_text(columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV text below a header; None or nothing is an empty cell. Raises ValueError for a key that is no
    column."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_read(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row, value for value, as `read_rows` would give it."""
    return {name: _value(name, _cell(row.get(name)), "the row") for name in COLUMNS}


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return json.dumps(value, separators=(",", ":"))
    return str(value)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a CSV, numbers as numbers and empty cells as None; columns that an older version lacked are None.

    Raises UsageError for a file that cannot be read, columns that this version does not know, a number that is none
    and a row without a name.
    """
    columns, lines = csv_lines(Path(path))
    if foreign := [name for name in columns if name not in COLUMNS]:
        raise UsageError(
            f"{path} has columns unknown to specbench {__version__} ({', '.join(foreign[:3])}); choose another file"
        )
    rows = []
    for number, line in lines:
        row = {name: _value(name, line.get(name, ""), f"{path}, line {number}") for name in COLUMNS}
        if lacking := [name for name in _NEEDED if row[name] is None]:
            raise UsageError(f"{path}, line {number}: a row needs its {lacking[0]}; remove the line, or mend it")
        rows.append(row)
    return rows


def _value(name: str, text: str, where: str) -> Any:
    if not text:
        return None
    if name not in _NUMBERS:
        return text
    try:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError
        return int(text) if text.lstrip("-").isdecimal() else number
    except ValueError:
        raise UsageError(
            f"{where}: {name} must be a number, or empty where it was not measured (got {text[:40]!r}); mend the cell"
        ) from None


def csv_lines(path: Path) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """The header of a CSV file, and its rows by column, each with the number of its line. UsageError for what is none:
    no UTF-8, a cell without end, a row that is longer or shorter than the header, a column twice."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as f:
            text = f.read()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no UTF-8 text; save it as UTF-8") from None
    except OSError as e:
        raise UsageError(f"cannot read {path} ({e.strerror}); name another file") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    lines: list[tuple[int, dict[str, str]]] = []
    try:
        columns = next(reader, [])
        if len(set(columns)) < len(columns):
            raise UsageError(f"{path} has a column twice; keep one of them")
        for cells in reader:
            if not cells:
                continue  # a blank line
            if len(cells) != len(columns):
                raise UsageError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells below a header of {len(columns)}; mend the row"
                )
            lines.append((reader.line_num, dict(zip(columns, cells, strict=True))))
    except csv.Error as e:
        raise UsageError(f"{path}, line {reader.line_num}: cannot read this row ({e}); mend it") from None
    return columns, lines


@dataclass(frozen=True)
class Sheet:
    """CSV files of other rows than those of runs, as text. columns: their names and meanings; of: what they hold."""

    columns: Mapping[str, str]
    of: str

    def read(self, path: Path) -> list[dict[str, str]]:
        """The rows of a file, none where there is none yet. UsageError where it holds something else."""
        if not path.is_file() or not path.stat().st_size:
            return []
        columns, lines = csv_lines(path)
        if foreign := [name for name in columns if name not in self.columns]:
            raise UsageError(f"{path} is no file of {self.of} (it has a column {foreign[0]}); choose another out=")
        return [{name: row.get(name, "") for name in self.columns} for _, row in lines]

    def append(self, path: Path, row: Mapping[str, Any]) -> None:
        """Adds a row to a file, under a lock; the file is replaced as a whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            write_atomically(path, csv_text(self.columns, [*self.read(path), row]).encode())


def header(path: Path) -> list[str]:
    """The first line of a CSV file, split; nothing where it cannot be read."""
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as f:
            return next(csv.reader(f), [])
    except (OSError, csv.Error):
        return []


def has_runs(path: Path) -> bool:
    """Whether a CSV file has rows of runs; audits, benchmarks and probes have other ones."""
    return {"run_id", "config_hash"} <= set(header(path))


def append_row(path: str | Path, row: Mapping[str, Any]) -> None:
    """Adds a row to a CSV of rows, under a lock; a row of the same `run_id` is replaced.

    The file is replaced as a whole, so a kill leaves the old one or the new one. A file of an older version, whose
    columns are a subset, is widened. Raises UsageError where it has other columns.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        rows: list[Mapping[str, Any]] = list(read_rows(path)) if path.exists() and path.stat().st_size else []
        places = [i for i, other in enumerate(rows) if other["run_id"] == row["run_id"]]
        if places:
            rows[places[0]] = row
        else:
            rows.append(row)
        write_atomically(path, to_csv(rows).encode())


# --- provenance -------------------------------------------------------------------------------------------------------


#: The embedded metrics were called by their columns before the real ones took these names.
RENAMED = {"fid": "scenes_fid", "clip_score": "scenes_clip", "image_reward": "scenes_reward"}
# A hash exchanges older and newer names, so that rows of that time keep theirs and no two metrics have the same.
_HASHED_AS = RENAMED | {new: old for old, new in RENAMED.items()}


def config_hash(cfg: Mapping[str, Any]) -> str:
    """Hash of a checked configuration: equal for equal measurements.

    Over every parameter but `out`, `data_dir` and `metrics_dir`, which are only where things lie, `workers` and
    `ray_address`, which are only who does the work (a row's note tells), and `protocol`, whose values are parameters
    themselves; `reference` and `drafter_weights` count where they are given. `batch`, `device`, `dtype`, `engine` and
    `warmup` count, because they are part of what a latency means, although on a CPU they leave every image as it is.
    """
    left_out = {"out", "data_dir", "metrics_dir", "protocol", "workers", "ray_address"}
    left_out |= {name for name in ("reference", "drafter_weights") if cfg.get(name) is None}
    kept: dict[str, Any] = {name: value for name, value in cfg.items() if name not in left_out}
    kept["metrics"] = [_HASHED_AS.get(name, name) for name in cfg["metrics"]]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


def commit() -> str:
    """The checkout's commit, with -dirty where its code or configurations differ from it; empty outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if _git(root, "rev-parse", "--show-toplevel") != str(root):
        return ""  # installed somewhere inside another repository
    head = _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    return head and head + ("-dirty" if _git(root, "status", "--porcelain", "--", "specbench", "conf") else "")


def _git(root: Path, *arguments: str) -> str:
    return _output("git", "-C", str(root), *arguments)


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def environment(device: Any) -> dict[str, Any]:
    """Where a process decodes, under the names of a row's columns. `device` is a torch.device. Imports torch."""
    import torch

    cuda = device.type == "cuda"
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else ""
    return {
        "specbench": __version__,
        "commit": commit(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if cuda else _processor(),
        "torch": torch.__version__,
        "driver": driver.splitlines()[0] if driver else "",
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
