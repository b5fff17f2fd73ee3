"""Scores of existing images from any source: a run's, or any folder of images. Decodes nothing.

The scores of a run go into its row. Those of other images go into a folder with a row, the scores of each image, and
the cached outputs of the scorers, so that a scoring that was stopped or killed continues there. Scores join existing
scores (see `merge`).
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench import data, metrics
from specbench._version import __version__
from specbench.config import configuration, parameters
from specbench.data.prompts import SUFFIXES
from specbench.errors import UsageError, plain
from specbench.harness import merge
from specbench.harness.digests import StoredDigests
from specbench.harness.folder import new_run_id, stored
from specbench.harness.log import say
from specbench.harness.pairing import Pairs, listed, pair
from specbench.harness.run import Run
from specbench.harness.scoring import basis, score_columns, scoring_context, scoring_device
from specbench.rows import indices, provenance
from specbench.rows.columns import COLUMNS
from specbench.rows.csv_files import csv_lines, read_rows, to_csv
from specbench.storage import home, image_files
from specbench.storage.files import is_temporary, locked, sha256, write_atomically

#: Parameters of the scoring of a run, and of a folder of images.
OF_RUN = ("metrics", "metrics_dir", "reference", "device", "batch")
OF_IMAGES = (*OF_RUN, "prompts", "data", "data_dir", "split", "caption", "seed", "n", "out")

#: Columns of a row that identify its prompts.
_OF_PROMPTS = ("data", "split", "caption", "prompts", "seed")

#: Names, without the extension, of a file of prompts that lies in the folder of its images.
PROMPT_FILES = ("prompts", "captions", "metadata")

_MEMORY = "evaluation.json"  # in the folder of the results: the folder of the images, and what determined the scores


@dataclass(frozen=True)
class Evaluation:
    """A row with scores: its title, the columns of the scores, and the files that were written."""

    title: str
    columns: list[str]
    row: Mapping[str, Any]
    files: list[Path]


def evaluate(folder: Path, given: Mapping[str, Any], partial: bool = False) -> Evaluation:
    """Scores the images in a folder.

    Args:
        folder: a run's folder, or one with images.
        given: checked values of parameters in `OF_IMAGES` (for a run: in `OF_RUN`); others have their defaults.
        partial: prompts without an image are allowed.

    Raises UsageError for images and prompts that do not fit together.
    """
    if (folder / "config.yaml").is_file() and (folder / "records.jsonl").is_file():
        return _evaluate_run(folder, [*given, *(["partial"] if partial else [])], given)
    return _evaluate_images(folder, dict(given), partial)


def _evaluate_run(folder: Path, names: Sequence[str], given: Mapping[str, Any]) -> Evaluation:
    for name in names:
        if name not in OF_RUN:
            raise UsageError(f"{folder} holds a run, which has its own prompts and folder: leave {name}= out")
    try:
        theirs = stored(folder)
    except UsageError as e:
        raise UsageError(f"{e}; score the folder {folder / 'images'} instead") from None
    new = {name: given[name] for name in given if name in ("metrics", "metrics_dir", "reference")}
    with _stop_message(folder):
        outcome = Run({**theirs, **new}, folder).rescore(given.get("device"), given.get("batch"))
    row = outcome.row
    return Evaluation(
        f"{folder}: {row['n']} images of {row['model']}, method {row['method']}",
        [column for name in outcome.cfg["metrics"] for column in parameters.metric_columns(name)],
        row,
        [outcome.folder.row],
    )


def _evaluate_images(folder: Path, given: dict[str, Any], partial: bool) -> Evaluation:
    if runs := sorted(path.parent.name for path in folder.glob("*/records.jsonl")):
        raise UsageError(f"{folder} holds {listed(runs, 'runs')}: score them one by one")
    paths = image_files.find(folder)
    if not paths:
        raise UsageError(f"{folder} holds no images ({', '.join(image_files.ENDINGS)}) and no run")
    if "prompts" in given and given.setdefault("data", "prompts") != "prompts":
        raise UsageError("prompts= and data= name two sets of prompts; give one of them")
    if given.get("n") == "all":
        del given["n"]  # the default
    own = {} if {"prompts", "data"} & given.keys() else _own_prompts(folder)
    cfg = _settings(given | own)
    if not cfg["metrics"]:
        raise UsageError("no metrics are chosen: name some with metrics=")
    context = scoring_context(cfg)
    reading = [name for name in cfg["metrics"] if metrics.metric(name, context).reads_prompt]
    pairs = pair(paths, cfg, given, cfg["data"], reading, partial)
    out = home.expanded(cfg["out"]) if cfg["out"] else _default_out(folder)
    with _opened(out, folder) as memory, _stop_message(out):
        return _Scoring(folder, out, memory, pairs, cfg).run()


def _own_prompts(folder: Path) -> dict[str, Any]:
    """The parameters of the prompts that lie in a folder of images; UsageError where several files could be they."""
    found = [path for name in PROMPT_FILES for path in sorted(folder.glob(f"{name}.*")) if path.suffix in SUFFIXES]
    if len(found) > 1:
        raise UsageError(
            f"{folder} holds {listed([path.name for path in found], 'files of prompts')}: name one, prompts="
        )
    if found:
        say(f"the prompts are those of {plain(found[0])}")
    return {"data": "prompts", "prompts": str(found[0])} if found else {}


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a scoring of images, with defaults. UsageError for one that the data set does not have."""
    source = given.get("data", "")
    own = parameters.declared("data", source) if source else frozenset()
    known = {*OF_RUN, "data", "seed", "n", "out", *own}
    if foreign := [name for name in given if name not in known]:
        where = f"data={source}" if source else "a folder of images without data="
        raise UsageError(f"{where} has no parameter '{foreign[0]}'")
    sets = {"scenes": "scenes", "scenes_classes": "scenes", "imagenet": "imagenet", "scenes_geneval": "scenes_geneval"}
    defaults = {**parameters.content("", "config"), **(parameters.content("data", source) if source else {})}
    defaults |= {"data": source, "batch": metrics.ScoringContext.batch}
    if "metrics" not in given:
        defaults |= configuration.values([f"metrics={sets.get(source, 'coco')}"], ["metrics"])
    cfg = {name: given[name] if name in given else defaults[name] for name in known}
    return cfg | {name: parameters.parameter(name, cfg).checked(name, cfg[name]) for name in own}


def _default_out(folder: Path) -> Path:
    """The same folder always gets the same path, so that scoring continues there."""
    here = folder.resolve()
    return Path("runs", "evaluate", f"{here.name}-{sha256(str(here), 8)}")


@contextmanager
def _opened(out: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Makes and locks the folder of the results, checks that it belongs to these images, and yields its memory: run_id,
    the folder of the images ("pictures"), and, if there is a row, what determined its scores."""
    note, origin = out / _MEMORY, str(folder.resolve())
    memory: dict[str, Any] = {"pictures": origin, "run_id": new_run_id()}

    def check() -> None:
        if not note.exists():
            if others := {p.name for p in out.iterdir() if not is_temporary(p)} - {".lock"}:
                raise UsageError(f"{out} holds {sorted(others)[0]}; choose an empty or a new folder as out=")
            return
        try:
            found = json.loads(note.read_text(encoding="utf-8"))
            theirs, found["run_id"] = str(found["pictures"]), str(found["run_id"])
            if not isinstance(found.setdefault("metrics", {}), dict):
                raise ValueError
            memory.update(found)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise UsageError(f"cannot read {note}; choose another out=") from None
        if theirs != origin:
            raise UsageError(f"{out} holds the scores of {theirs}; choose another out=")

    with locked(out, check):
        check()  # another process may have written before the lock
        if not note.exists():
            _remember(out, memory)
        yield memory


def _remember(out: Path, memory: Mapping[str, Any]) -> None:
    write_atomically(out / _MEMORY, (json.dumps(memory, indent=1) + "\n").encode())


@contextmanager
def _stop_message(out: Path) -> Iterator[None]:
    """Ctrl-C ends with a one-sentence message."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped; the scores so far are cached in {out}, the same command continues there"
        ) from None


class _Scoring:
    """Scores pairs of images and prompts into a folder that holds earlier scores."""

    def __init__(
        self, folder: Path, out: Path, memory: Mapping[str, Any], pairs: Pairs, cfg: Mapping[str, Any]
    ) -> None:
        self.folder, self.out, self.memory, self.pairs, self.cfg = folder, out, memory, pairs, cfg
        self.context = scoring_context(cfg, scoring_device(cfg["device"]), cfg["batch"])
        self.cache, self.files = metrics.Outputs(out), image_files.ImageFiles(pairs.paths)
        self.digests = StoredDigests(out / "digests.json", self.files)
        self.images_hash = _hash(sorted(filter(None, self.digests.contents)))
        self.pairs_hash = _hash([[item.id, item.prompt, item.labels] for item in pairs.items])
        rows = read_rows(out / "row.csv") if (out / "row.csv").is_file() else []
        self.before: dict[str, Any] | None = rows[0] if rows else None
        same = memory.get("images", self.images_hash) == self.images_hash
        #: The earlier row if it is over the same images.
        count = (self.before["images"] or self.before["n"]) if self.before else 0
        self.valid = self.before if same and count == len(self.files) else None
        self.earlier = (
            [name for name in memory.get("metrics", {}) if name in parameters.single_metrics()] if rows else []
        )
        self.messages: list[str] = []

    def run(self) -> Evaluation:
        """Scores, and writes the row and the per-image scores."""
        requested = self.cfg["metrics"]
        names = merge.names(self.earlier, requested)
        bases = {name: basis(name, self.context) for name in {*self.earlier, *names}}
        again = [name for name in names if name not in requested and self._can_repeat(name, bases)]
        scores = self._score([*requested, *again])
        for name in requested:  # a metric without a value leaves the column to the metric that had it
            others = [other for other in merge.rivals(name, self.earlier) if other not in names]
            columns = parameters.metric_columns(name)
            if others and all(scores[column].value is None for column in columns):
                why = scores[columns[0]].note
                self.messages.append(f"{name} could not be measured ({why}): the row keeps {', '.join(others)}")
                names = [*(other for other in names if other != name), *others]
                more = [other for other in others if self._can_repeat(other, bases)]
                scores = {column: one for column, one in scores.items() if column not in columns} | self._score(more)
                again += more
        old = merge.scores(self.valid) if self.valid else {}
        self.messages += merge.unmeasured(old, scores)
        both = merge.both(old, scores)
        row = self._row(score_columns(both))
        if self.before:
            self.messages += merge.changes(self.before, row, self._reasons(scores, names))
        self._write(row, scores, names)
        bases = {name: bases[name] if name in (*requested, *again) else self.memory["metrics"][name] for name in names}
        paired = self.memory.get("paired") if self.valid and not self.cfg["data"] else self.pairs_hash
        _remember(self.out, {**self.memory, "metrics": bases, "images": self.images_hash, "paired": paired})
        for text in self.messages:
            say(plain(text))
        shown = [*scores, *(name for name in both if name not in scores)]
        files = [self.out / "row.csv", self.out / "pictures.csv"]
        return Evaluation(f"{self.folder}: {len(self.files)} images", shown, row, files)

    def _can_repeat(self, name: str, bases: Mapping[str, str]) -> bool:
        """Whether an earlier metric may give another value today, and has its inputs."""
        same = self.valid and bases[name] == self.memory["metrics"][name]
        stays = same and self.pairs_hash == self.memory.get("paired")
        return not stays and bool(self.cfg["data"] or not metrics.metric(name, self.context).reads_prompt)

    def _score(self, names: Sequence[str]) -> dict[str, metrics.Score]:
        if not names:
            return {}
        try:
            return metrics.score(names, self.files, self.pairs.items, self.context, self.cache)
        finally:  # stopped, too
            self.digests.write()

    def _row(self, quality: Mapping[str, Any]) -> dict[str, Any]:
        """The row of these images; quality: the columns of the metrics."""
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        row |= {"run_id": self.memory["run_id"], "time": provenance.utc()}
        row |= {"specbench": __version__, "commit": provenance.commit(), "images": len(self.files)}
        prompts = Counter(indices.prompt_of(item.index) for item in self.pairs.items)
        row["n"] = len(prompts)
        row["images_per_prompt"] = prompts.popitem()[1] if len(set(prompts.values())) == 1 else None
        used = {"metrics": [*self.earlier, *self.cfg["metrics"]], "data": self.cfg["data"]}
        row["plugins"] = "; ".join(parameters.plugins_of(used)) or None
        if source := self.cfg["data"]:
            own = ("data", *parameters.declared("data", source))
            row |= {name: self.cfg[name] for name in own if name in COLUMNS}
        if any(item.id for item in self.pairs.items):
            row["prompts_hash"] = data.prompts_hash(self.pairs.items)
        if self.valid and row["prompts_hash"] is None:  # the scores that stay belong to those prompts
            row |= {name: self.valid[name] for name in ("prompts_hash", *_OF_PROMPTS) if row[name] is None}
        sides = {side for size in self.files.sizes for side in (size or (None,))}
        row["resolution"] = sides.pop() if len(sides) == 1 else None  # all known, square and equal
        if self.valid and None in sides:  # nothing was read
            row["resolution"] = self.valid["resolution"]
        row |= {name: value for name, value in quality.items() if name != "note"}
        origin = f"pictures from {self.folder.resolve()}"
        return row | {"note": "; ".join(filter(None, [origin, self.pairs.remark, quality["note"]]))}

    def _reasons(self, scores: Mapping[str, metrics.Score], names: Sequence[str]) -> dict[str, str]:
        """Column -> why it has no value."""
        reasons = {column: one.note for column, one in scores.items() if one.note}
        if not self.cfg["data"]:
            earlier = (name for name in self.earlier if name in names)
            prompted = (name for name in earlier if metrics.metric(name, self.context).reads_prompt)
            reasons |= {
                c: "it reads prompts, and none are given" for name in prompted for c in parameters.metric_columns(name)
            }
        return reasons

    def _write(self, row: Mapping[str, Any], scores: Mapping[str, metrics.Score], names: Sequence[str]) -> None:
        """Writes the scores of each image, and the row."""
        scored = [
            m for m in names if m in self.cache.scorers and any(scores.get(c) for c in parameters.metric_columns(m))
        ]
        table = self._per_image(scored, scores)
        if self.before:
            replaced = {m for m in self.earlier if m not in names} if self.valid else None
            self.messages += _keep_columns(self.out / "pictures.csv", table, replaced)
        write_atomically(self.out / "pictures.csv", _csv(table).encode())
        write_atomically(self.out / "row.csv", to_csv([row]).encode())

    def _per_image(self, names: Sequence[str], scores: Mapping[str, metrics.Score]) -> dict[str, Sequence[object]]:
        """Column -> cells, one line per image: its file, id, prompt, and its score by each metric that is a mean over
        images."""
        table: dict[str, Sequence[object]] = {
            "file": [path.name for path in self.files.paths],
            "id": [item.id for item in self.pairs.items],
            "prompt": [item.prompt for item in self.pairs.items],
        }
        for name in names:
            if scores[parameters.metric_columns(name)[0]].value is None:
                continue
            one = metrics.metric(name, self.context)
            keys = [
                metrics.image_key(digest or "", item.prompt if one.reads_prompt else None)
                for digest, item in zip(self.files.digests, self.pairs.items, strict=True)
            ]
            if (values := one.per_image(self.cache.of(name, keys))) is not None:
                table[name] = values.tolist()
        return table


def _hash(value: object) -> str:
    return sha256(json.dumps(value), 16)


def _keep_columns(path: Path, table: dict[str, Sequence[object]], gone: set[str] | None) -> list[str]:
    """Adds to a table of per-image scores the columns that it lacks from the table in a file. Returns a sentence for
    each column that is dropped.

    gone: the metrics whose columns others took; None where the table in the file is over other images.
    """
    if not path.is_file():
        return []
    columns, lines = csv_lines(path)
    rows = {line.get("file", ""): line for _, line in lines}
    fits = gone is not None and len(rows) == len(lines) and sorted(rows) == sorted(map(str, table["file"]))
    messages = []
    for name in columns:
        filled = any(line[name] for _, line in lines)
        if name in table and (any(table[name]) or not filled):
            continue
        if fits and name not in (gone or ()):
            table[name] = [rows[str(file)][name] for file in table["file"]]
        elif name not in table or name not in ("id", "prompt"):
            messages.append(f"{name} of each image is no longer in {path}")
    return messages


def _csv(table: Mapping[str, Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table)
    writer.writerows(zip(*table.values(), strict=True))
    return text.getvalue()
