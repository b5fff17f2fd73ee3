"""Records: one object per image, in an append-only journal.

A record is one line of JSON with its own checksum, appended only after that image's PNG is in place. A process that is
killed at any instant therefore loses at most the image that it was decoding. Reading ignores what a kill can leave: a
half-written last line is dropped, and so is a record whose image is missing. Any other incomplete line was edited.
"""

from __future__ import annotations

import errno
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from specbench.config import indices
from specbench.errors import UsageError, plain
from specbench.storage import image_files
from specbench.storage.files import append_line, content, sha256, write_atomically

T = TypeVar("T")  # a dataclass


def encode(values: Mapping[str, Any]) -> bytes:
    """The line of an object, including the newline. ValueError for a number that JSON cannot represent."""
    text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    return f'{text[:-1]}, "check": "{_check(text)}"}}\n'.encode()


def decode(line: bytes) -> dict[str, Any]:
    """The object of a line. ValueError or RecursionError if it is not an object, or its checksum differs."""
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError("it is not an object")
    if values.pop("check", None) != _check(json.dumps(values, ensure_ascii=False)):
        raise ValueError("the checksum differs")
    return values


def _check(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _objects(text: bytes, read: Callable[[bytes], T], path: Path, kind: str) -> list[T]:
    """The objects in the lines of a file. read: parses a line; kind: the noun for messages, such as "a score". A last
    line that a kill left half-written is dropped. UsageError, with the reason, for any other line that is invalid."""
    *lines, last = text.split(b"\n")
    objects = []
    for number, line in enumerate([*lines, last], 1):
        try:
            objects += [read(line)] if line else []
        except (UsageError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as e:
            if number > len(lines):
                break
            why = f" ({e})" if isinstance(e, UsageError) else ""
            raise UsageError(
                f"line {number} of {path} is not {kind}, or was changed{why}; remove that line and run again"
            ) from None
    return objects


class AppendOnly(Generic[T]):
    """The objects in the lines of a file, in their order, with a method to add one. No line is ever replaced."""

    def __init__(self, path: Path, read: Callable[[bytes], T], kind: str) -> None:
        """Reads `path`; see `_objects`."""
        text = content(path) if path.exists() else b""
        whole = text.rfind(b"\n") + 1  # a killed process may have left an incomplete line
        self._cut = whole if whole < len(text) else None
        self.path, self.lines = path, _objects(text[:whole], read, path, kind)

    def __iter__(self) -> Iterator[T]:
        return iter(self.lines)

    def add(self, item: T) -> None:
        """Appends a line; it is on disk when this returns."""
        if self._cut is not None:
            os.truncate(self.path, self._cut)
            self._cut = None
        append_line(self.path, encode(asdict(item)))  # type: ignore[call-overload]
        self.lines.append(item)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One image. Times are wall seconds; times of a batch are divided evenly over its images."""

    index: int  # of the image (see `indices`); the first image of a prompt has the index of the prompt; with the seed,
    # the key of the random stream
    prompt: str
    seed: int
    tokens: int  # generated tokens T
    steps: int  # target forward passes of the decode phase
    drafted: int  # draft tokens that the target's passes read
    accepted: int  # draft tokens accepted
    accepted_length: float  # tokens / steps
    latency_s: float | None  # decode time of this image alone; None if it was in a batch, or not timed
    decode_s: float  # its share of the decode time of its batch; at batch 1 the latency
    text_s: float  # its share of the text encoding
    pixels_s: float  # its share of the pixel decoding
    batch: int  # images decoded together
    peak_memory_mib: float  # up to this image: device memory on CUDA, otherwise resident memory of the process
    image: str  # file name of the PNG, relative to the run's folder
    sha256: str  # of the pixels, row by row, as uint8 RGB
    session: str  # the process that decoded it, an entry of run.json
    timed: int | None = None  # number of its batch among the timed ones of its process, from 1; None: not timed
    unread: int | None = None  # tokens at the end of the prompt that the model did not read; None: unknown
    # Its steps (`decoding.image_statistics`). Statistics of drafts are over the steps with a draft; None without
    # drafts.
    accepted_per_step: list[int]  # draft tokens accepted inside the image
    accepted_by_depth: list[int]  # steps that accepted a draft token at depth 1, 2, ...; with several drafts in a
    # step (PJD): at least 1, 2, ... tokens, so that only their sum has a meaning
    verified_by_depth: list[int]  # steps that verified one there: those above it were accepted
    log_prob_mean: float | None = None  # natural-log probability of a token under the target, mean over the tokens;
    log_prob_std: float | None = None  # its standard deviation. With guidance and temperature, before top-k and top-p
    draft_tv: float | None = None  # total variation of drafter's and target's next-token distributions, mean of drafts
    first_accept: float | None = None  # probability with which the rule keeps the first candidate, mean of drafts
    draft_top1: float | None = None  # share of drafts whose top-1 next token is the target's top-1
    # Of the drafts whose distribution has at least 3 tokens of positive probability: the share with the target's top-1
    # in their top-3, and their number.
    draft_top3: float | None = None
    draft_top3_steps: int | None = None
    # The distance between the distributions that its tokens were emitted from and the target's (see
    # `decoding.emitted`), means over tokens: total variation; KL divergence in nats, None if it is infinite; mass where
    # the target has none; the divergence the other way round, KL(target || emitted), and the target's mass on tokens
    # that are never emitted.
    emitted_tv: float | None = None
    emitted_kl: float | None = None
    emitted_outside: float | None = None
    emitted_kl_reverse: float | None = None
    emitted_missed: float | None = None
    # For chains of sampled tokens, in nats: the minimum KL divergence at the same acceptance, mean over tokens; and the
    # maximum ratio of a token's emitted probability to the target's: over all tokens, and for each depth at which they
    # were verified, from 1 on, the mean of its natural logarithm.
    emitted_kl_optimal: float | None = None
    emitted_ratio_max: float | None = None
    emitted_log_ratio: list[float] | None = None
    draft_passes: int  # forward passes of a drafter network in its steps
    # For models with continuous tokens. In order of generation: the positions of the tokens, and for each token "1" for
    # an accepted draft, "0" for a rejected one, "." for no verified draft.
    order: list[int] | None = None
    drafts: str | None = None
    tries: list[int] | None = None  # proposals for each token after a rejection
    fallbacks: int | None = None  # how many of those tokens were accepted because no tries remained
    draft_s: float | None = None  # its share of the drafting time of its batch
    made: int | None = None  # tokens drafted, including those that were never verified
    # Whether it is degenerate (see `rows.degenerate`).
    contrast: int | None = None  # the maximum difference of two pixels in a channel
    distinct: float | None = None  # different codes / codes of the image
    repetition: float | None = None  # agreement with itself at a shift, of its codes, or of its pixels without codes
    id: str  # name of the prompt in its data set, by which metrics pair
    category: str | None = None  # of the prompt, as its data set names it
    done: float  # when it was decoded, seconds since 1970
    config: str = ""  # hash of the configuration (`provenance.decoding_hash`), set by the process that writes it

    @property
    def verified(self) -> int:
        """Draft tokens that were verified: those that were accepted, and the first rejected one after them. A depth of
        a tree counts once, whichever candidates it has."""
        return sum(self.verified_by_depth)

    @property
    def all_drafted(self) -> int:
        """Draft tokens, verified or not."""
        return self.drafted if self.made is None else self.made

    @property
    def is_baseline(self) -> bool:
        """Whether it belongs to the baseline, the vanilla AR images of a run with another method."""
        return self.image.startswith("baseline/")


def to_line(record: Record) -> bytes:
    """The line of a record in its journal."""
    return encode(asdict(record))


def from_line(line: bytes) -> Record:
    """The record of a line. ValueError, TypeError or RecursionError if it is not a record, or its checksum differs."""
    return Record(**decode(line))


def _checked(line: bytes) -> Record:
    """The record of an untrusted line. Raises the errors of `from_line`, and UsageError for a `fault`."""
    record = from_line(line)
    if problem := fault(record):
        raise UsageError(problem)
    return record


class Journal:
    """The records of one pass over the prompts, by index, with a method to add one."""

    def __init__(self, path: Path) -> None:
        """Reads `path`. Raises UsageError for a line that no kill can explain. What a kill left is repaired before the
        first record is added."""
        self.path = path
        self.records: dict[int, Record] = {}
        text = content(path) if path.exists() else b""
        for record in _objects(text, _checked, path, "a record"):
            if record.index not in self.records and (path.parent / record.image).is_file():
                self.records[record.index] = record
        repaired = b"".join(to_line(record) for record in self.records.values())
        self._repaired = repaired if repaired != text else None

    def __contains__(self, index: int) -> bool:
        return index in self.records

    def missing(self, wanted: Iterable[int]) -> list[int]:
        """The numbers (see `indices`) of the wanted images that have no record."""
        return [i for i in wanted if i not in self.records]

    def records_of(self, wanted: Iterable[int]) -> list[Record]:
        """The records of the images with these numbers; all must exist."""
        return [self.records[i] for i in wanted]

    def add(self, record: Record, pixels: np.ndarray) -> None:
        """Writes the image, (H, W, 3) uint8, and then appends the record. Both are on disk when this returns."""
        if record.index in self.records:
            raise ValueError(f"index {record.index} is already in {self.path}")
        if self.records and not self.path.exists():
            raise FileNotFoundError(errno.ENOENT, "it is gone", str(self.path))
        path = self.path.parent / record.image
        path.parent.mkdir(exist_ok=True)  # but not the run's folder: a removed one is not created again
        made = image_files.Made(record.id, record.prompt, indices.repeat_of(record.index))
        write_atomically(path, image_files.png(pixels, made))
        if self._repaired is not None:
            write_atomically(self.path, self._repaired)
            self._repaired = None
        append_line(self.path, to_line(record))
        self.records[record.index] = record

    def image(self, index: int) -> np.ndarray:
        """The image of a record, (H, W, 3) uint8. Raises UsageError if its pixels differ from the recorded ones."""
        record = self.records[index]
        path = self.path.parent / record.image
        try:
            pixels = image_files.read(path)
        except UsageError:
            pixels = np.zeros((0, 0, 3), np.uint8)
        if pixel_digest(pixels) != record.sha256:
            raise UsageError(f"{path} is not the image of its record; delete it and run again to decode it again")
        return pixels


TIMINGS = "timings.jsonl"  # in the folder of a run


class TimingJournal(AppendOnly[Record]):
    """Records of images that were decoded again only for their seconds, of both passes, in the order of decoding. Their
    tokens and pixels are the same as before, and are not stored. A new pair does not replace an older one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _checked, "a record")


IMAGE_NAME = r"\w+/\d+(-\d+)?\.png"  # the image of a record


_LARGEST = 1e100  # its square is still a number


def fault(record: Record) -> str:
    """The mistake in an untrusted record; "" if it is valid."""
    for field in fields(record):
        name, value, (kind, _, optional) = field.name, getattr(record, field.name), str(field.type).partition(" | ")
        if value is None and optional:
            continue
        if kind in ("int", "float"):
            number = type(value) is int or (kind == "float" and type(value) is float)
            if not number or not abs(value) < _LARGEST:
                return f"has no {'integer' if kind == 'int' else 'number'} as {name} ({plain(value):.40})"
            least = name in ("batch", "tokens", "steps")
            if name not in ("log_prob_mean", "emitted_tv", "emitted_kl") and value < least:
                return f"has {name} {value}"
        elif kind == "str" and not isinstance(value, str):
            return f"has no text as {name}"
        elif kind == "list[float]" and not (
            isinstance(value, list) and all(type(v) in (int, float) and abs(v) < _LARGEST for v in value)
        ):
            return f"has no list of numbers as {name}"
        elif kind == "list[int]" and not (
            isinstance(value, list) and all(type(v) is int and 0 <= v < 2**53 for v in value)
        ):
            return f"has no list of integers as {name}"
    # A name in the form that a run writes, so that no record points outside the run's folder.
    if not re.fullmatch(IMAGE_NAME, record.image):
        return f"has no image of its run as image ({plain(record.image):.40})"
    return f"accepted {record.accepted} of {record.drafted} drafts" if record.accepted > record.drafted else ""


def read_records(path: Path) -> list[Record]:
    """The records of a finished or running pass, by index. Does not repair the file."""
    return sorted(_objects(content(path), _checked, path, "a record"), key=lambda r: r.index)


def read_of(path: Path, wanted: Sequence[int]) -> list[Record] | None:
    """The records of the images with these numbers; None if some are missing. Does not repair the file."""
    records = {record.index: record for record in read_records(path)} if path.is_file() else {}
    return [records[i] for i in wanted] if records.keys() >= set(wanted) else None


def pixel_digest(pixels: np.ndarray) -> str:
    """SHA-256 of an image's pixels: independent of the compression of the file."""
    return sha256(np.ascontiguousarray(pixels).tobytes())
