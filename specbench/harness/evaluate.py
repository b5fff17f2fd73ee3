"""`specbench evaluate DIR`: scores of existing images from any source.

DIR is a run's folder, whose records pair images and prompts and whose row gets the scores; or any folder of images,
each named by the id of its prompt. Nothing is decoded. Scores join existing scores (see `merge`). Per-image scorer
outputs are cached in the run's folder or in `out=`, so a scoring that was stopped or killed continues where it was.
"""

from __future__ import annotations

import csv
import io
import json
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specbench import data, metrics
from specbench._version import __version__
from specbench.config import configuration, parameters
from specbench.errors import UsageError, plain
from specbench.harness import merge
from specbench.harness.run import Run, quality, scoring_context, scoring_device, stored
from specbench.rows import provenance, summary
from specbench.rows.columns import COLUMNS
from specbench.rows.csv_files import csv_lines, read_rows, to_csv
from specbench.storage import home, image_files
from specbench.storage.files import is_temporary, locked, sha256, sha256_file, write_atomically

#: The arguments after DIR: for a run, and for a folder of images.
_SCORING_ARGUMENTS = ("metrics", "metrics_dir", "reference", "device", "batch")
_ARGUMENTS = (*_SCORING_ARGUMENTS, "prompts", "data", "data_dir", "split", "caption", "seed", "n", "out", "partial")

#: Columns of a row that identify its prompts.
_OF_PROMPTS = ("data", "split", "caption", "prompts", "seed")

_MEMORY = "evaluation.json"  # in out=: the folder of the images, and what determined the scores of the row

_HELP = """\
usage: specbench evaluate DIR [name=value ...]

Scores existing images. DIR is the folder of a run, or any folder of images (including its subfolders).

For the folder of a run, its records pair images and prompts, and the scores go into its row.csv.
Any other folder needs prompts, unless no chosen metric reads them; an image's file name without its extension is the
id of its prompt (0007.png: 0007 or 7). out= holds its row, the scores of each image and the cached scorer outputs.
Existing scores of other metrics stay while the images are the same; changes are printed.

  prompts=FILE        .txt, .tsv, .csv, .json or .jsonl with ids and prompts (see the README); or
  data=NAME           a data set: scenes, coco2017, ... with data_dir=, split=, caption=; n= and seed= choose n of it
                      (default, and n=all: every prompt; of scenes, scenes_classes and imagenet one for each image)
  partial=true        score the existing images although other prompts have none
  metrics=NAME|[..]   what to measure (specbench list metrics); default: for a run its metrics, for scenes scenes,
                      for imagenet imagenet, else coco
  metrics_dir=DIR     weights of the evaluators (default: where `specbench fetch` puts them)
  reference=FILE      statistics of real images (default: what `specbench reference` made for the data set)
  device=, batch=     where the networks run (auto), and the number of images per batch (64)
  out=DIR             a folder for the results (runs/evaluate/...); an existing one continues where it stopped
"""


def main(arguments: Sequence[str]) -> int:
    """`specbench evaluate DIR [name=value ...]`; returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(_HELP, end="")
        return 0
    folder, given = _sorted_out(arguments)
    evaluate = _run if (folder / "config.yaml").is_file() and (folder / "records.jsonl").is_file() else _image_folder
    print(evaluate(folder, given), flush=True)
    return 0


def _sorted_out(arguments: Sequence[str]) -> tuple[Path, dict[str, str]]:
    """The folder, and the parameters as given."""
    folders = []
    given: dict[str, str] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name in _ARGUMENTS and equals:
            if name in given:
                raise UsageError(f"'{name}' is given twice; give it once")
            given[name] = value
        elif home.expanded(argument).is_dir() or not equals:
            folders.append(argument)
        else:
            raise UsageError(
                f"evaluate has no '{name}'; after the folder it takes {', '.join(f'{w}=' for w in _ARGUMENTS)}"
            )
    if len(folders) != 1:
        raise UsageError("name one folder: specbench evaluate DIR [name=value ...] (see specbench evaluate --help)")
    folder = home.expanded(folders[0])
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; name one with images, or the folder of a run")
    return folder, given


def _composed(given: Mapping[str, str], **more: str) -> dict[str, Any]:
    """The checked parameters from the user's arguments; absent ones have their default values."""
    arguments = []
    for name, value in {**more, **given}.items():
        arguments.append(f"{name}={value}")
    return configuration.compose(configuration.quote_paths(arguments))


# --- a run ------------------------------------------------------------------------------------------------------------


def _run(folder: Path, given: Mapping[str, str]) -> str:
    """Scores a run's images; returns the report."""
    for name in given:
        if name not in _SCORING_ARGUMENTS:
            raise UsageError(f"{folder} holds a run, which has its own prompts and folder: leave {name}= out")
    checked = _composed(given)
    try:
        theirs = stored(folder)
    except UsageError as e:
        raise UsageError(f"{e}; score the folder {folder / 'images'} instead") from None
    new = {name: checked[name] for name in given if name in ("metrics", "metrics_dir", "reference")}
    one = Run({**theirs, **new, "weights": "random"}, folder)
    one.cfg["weights"] = theirs.get("weights")  # these need not exist
    if "device" in given:
        one.scoring_device = checked["device"]
    if "batch" in given:
        one.scoring_batch = checked["batch"]
    with _stop_message(folder):
        row = one.rescore()
    filled = [column for name in one.cfg["metrics"] for column in parameters.metric_columns(name)]
    return _table(f"{folder}: {row['n']} images of {row['model']}, method {row['method']}", filled, row, [one.row_path])


# --- images -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Paired:
    """Images and their items, by index; `remark`: what a reader must know about the pairing."""

    paths: list[Path]
    items: list[data.Item]
    remark: str = ""


def _image_folder(folder: Path, given: dict[str, str]) -> str:
    """Scores a folder of images; returns the report."""
    if runs := sorted(path.parent.name for path in folder.glob("*/records.jsonl")):
        raise UsageError(f"{folder} holds {_some(runs, 'runs')}: score them one by one")
    paths = image_files.find(folder)
    if not paths:
        raise UsageError(f"{folder} holds no images ({', '.join(image_files.ENDINGS)}) and no run")
    if "prompts" in given and given.setdefault("data", "prompts") != "prompts":
        raise UsageError("prompts= and data= name two sets of prompts; give one of them")
    if given.get("n") == "all":
        del given["n"]  # the default
    source = given.get("data", "")
    sets = {"scenes": "scenes", "scenes_classes": "scenes", "imagenet": "imagenet"}
    partial = given.pop("partial", "false")
    if partial not in ("true", "false"):
        raise UsageError(f"partial must be true or false (got {partial!r})")
    cfg = _composed(given, metrics=sets.get(source, "coco"), data=source or "scenes")
    if not cfg["metrics"]:
        raise UsageError("no metrics are chosen: name some with metrics=")
    reading = [name for name in cfg["metrics"] if metrics.metric(name, scoring_context(cfg)).reads_prompt]
    pairs = _paired(paths, cfg, given, source, reading, partial == "true")
    out = home.expanded(cfg["out"]) if cfg["out"] else _default_out(folder)
    with _opened(out, folder) as memory, _stop_message(out):
        return _scored(folder, out, memory, pairs, cfg, source, given)


def _paired(
    paths: list[Path],
    cfg: Mapping[str, Any],
    given: Mapping[str, str],
    source: str,
    reading: Sequence[str],
    partial: bool,
) -> _Paired:
    """Images paired with prompts by name; unpaired where no metric reads prompts and the names do not match."""
    unpaired = [data.Item(i, "", None) for i in range(len(paths))]
    if not source:
        if reading:
            raise UsageError(f"{reading[0]} reads prompts: give prompts=FILE, or data=NAME for those of a data set")
        return _Paired(paths, unpaired)
    n = cfg["n"] if "n" in given else len(paths) if source in data.DRAWN else None
    try:
        return _by_name(paths, data.load({**cfg, "n": n}), partial)
    except UsageError as e:
        if reading or "prompts" in given:
            raise
        return _Paired(paths, unpaired, f"not paired with prompts, which no metric here reads ({e})")


def _by_name(paths: list[Path], items: Sequence[data.Item], partial: bool) -> _Paired:
    """Each item with the image whose file is named like its id, or like its real image; in the order of the items.

    UsageError naming images without a prompt, prompts without an image and images of the same prompt.
    """
    known = {item.id: item for item in items}
    for item in items:
        if item.reference:
            known.setdefault(Path(item.reference).stem, item)
    found: dict[int, Path] = {}
    unmatched = []
    for path in paths:
        plain = path.stem if path.stem in known or not path.stem.isdecimal() else str(int(path.stem))
        if plain not in known:
            unmatched.append(path.name)
        elif (other := found.setdefault(known[plain].index, path)) is not path:
            raise UsageError(f"{other} and {path} both have the name of prompt {known[plain].id}; keep one of them")
    missing = [item.id for item in items if item.index not in found]
    faults = []
    if unmatched:
        faults.append(f"no prompt has the id of {_some(unmatched, 'images')}")
    if missing and not (partial and found):
        faults.append(f"no image has the name of {_some(missing, 'prompts')}")
    if faults:
        raise UsageError(
            f"{' and '.join(faults)}: name each image by the id of its prompt, and give the prompts of these images"
            + (" (or partial=true)" if not unmatched and found else "")
        )
    paired = [item for item in items if item.index in found]
    remark = f"{len(missing)} of {len(items)} prompts have no image" if missing else ""
    return _Paired([found[item.index] for item in paired], paired, remark)


def _some(names: Sequence[str], what: str) -> str:
    """ "3 images (a.png, b.png, ...)"."""
    shown = ", ".join(name[:100] for name in names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} {what if len(names) > 1 else what.removesuffix('s')} ({shown})"


def _default_out(folder: Path) -> Path:
    """The same folder always gets the same path, so that scoring continues there."""
    here = folder.resolve()
    return Path("runs", "evaluate", f"{here.name}-{sha256(str(here), 8)}")


@contextmanager
def _opened(out: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Makes and locks the folder of the results, checks that it belongs to these images, and yields its memory: run_id,
    pictures and, once there is a row, what determined its scores."""
    note, origin = out / _MEMORY, str(folder.resolve())
    memory: dict[str, Any] = {
        "pictures": origin,
        "run_id": f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}",
    }

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


def _scored(
    folder: Path,
    out: Path,
    memory: Mapping[str, Any],
    pairs: _Paired,
    cfg: Mapping[str, Any],
    source: str,
    given: Mapping[str, str],
) -> str:
    """Scores the pairs, writes the row and the per-image scores, and returns the report."""
    batch = cfg["batch"] if "batch" in given else metrics.ScoringContext.batch
    context = scoring_context({**cfg, "data": source}, scoring_device(cfg["device"]), batch)
    cache, files = metrics.Outputs(out), image_files.ImageFiles(pairs.paths)
    images_hash, paired = _images_hash(files), _hash([[item.id, item.prompt, item.labels] for item in pairs.items])
    rows = read_rows(out / "row.csv") if (out / "row.csv").is_file() else []
    before = rows[0] if rows else None
    same = before is not None and memory.get("images", images_hash) == images_hash and before["n"] == len(files)
    earlier = [name for name in memory.get("metrics", {}) if name in parameters.single_metrics()] if before else []
    names = merge.names(earlier, cfg["metrics"])
    bases = {name: _basis(name, context) for name in {*earlier, *names}}

    def can_again(name: str) -> bool:
        """Whether an earlier metric may give another value today, and has its inputs."""
        stays = same and bases[name] == memory["metrics"][name] and paired == memory.get("paired")
        return not stays and bool(source or not metrics.metric(name, context).reads_prompt)

    again = [name for name in names if name not in cfg["metrics"] and can_again(name)]
    scores = metrics.score([*cfg["metrics"], *again], files, pairs.items, context, cache)
    messages = []
    for name in cfg["metrics"]:  # a metric without a value leaves the column to the metric that had it
        others = [other for other in merge.rivals(name, earlier) if other not in names]
        if others and all(scores[column].value is None for column in parameters.metric_columns(name)):
            messages.append(
                f"{name} could not be measured ({scores[parameters.metric_columns(name)[0]].note}): the row keeps"
                f" {', '.join(others)}"
            )
            names = [*(other for other in names if other != name), *others]
            scores = {column: one for column, one in scores.items() if column not in parameters.metric_columns(name)}
            more = [other for other in others if can_again(other)]
            scores |= metrics.score(more, files, pairs.items, context, cache) if more else {}
            again += more
    old = merge.scores(before) if before and same else {}
    messages += merge.unmeasured(old, scores)
    both = merge.both(old, scores)
    columns = quality(both)
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {"run_id": memory["run_id"], "time": datetime.now(UTC).isoformat(timespec="seconds")}
    row |= {"specbench": __version__, "commit": provenance.commit(), "n": len(pairs.items)}
    if source:
        own = ("data", *parameters.declared("data", source))
        row |= {name: cfg[name] for name in own if name in COLUMNS}
    if any(item.id for item in pairs.items):
        row["prompts_hash"] = data.prompts_hash(pairs.items)
    if before and same and row["prompts_hash"] is None:  # the scores that stay belong to those prompts
        row |= {name: before[name] for name in ("prompts_hash", *_OF_PROMPTS) if row[name] is None}
    sides = {side for size in files.sizes for side in (size or (None,))}
    row["resolution"] = sides.pop() if len(sides) == 1 else None  # all known, square and equal
    if before and same and None in sides:  # nothing was read
        row["resolution"] = before["resolution"]
    row |= {name: value for name, value in columns.items() if name != "note"}
    row["note"] = "; ".join(filter(None, [f"pictures from {folder.resolve()}", pairs.remark, columns["note"]]))
    if before:
        reasons = {column: one.note for column, one in scores.items() if one.note}
        if not source:
            prompted = (m for m in earlier if m in names and metrics.metric(m, context).reads_prompt)
            reasons |= {
                c: "it reads prompts, and none are given" for m in prompted for c in parameters.metric_columns(m)
            }
        messages += merge.changes(before, row, reasons)
    scored = [m for m in names if m in cache.scorers and any(scores.get(c) for c in parameters.metric_columns(m))]
    each = _each(scored, context, cache, files, pairs, scores)
    if before:
        messages += _keep_columns(out / "pictures.csv", each, {m for m in earlier if m not in names} if same else None)
    write_atomically(out / "pictures.csv", _csv(each).encode())
    write_atomically(out / "row.csv", to_csv([row]).encode())
    pairing = {} if source or not same else {"paired": memory.get("paired")}
    bases = {name: bases[name] if name in (*cfg["metrics"], *again) else memory["metrics"][name] for name in names}
    _remember(out, {**memory, "metrics": bases, "images": images_hash, "paired": paired, **pairing})
    for text in messages:
        print(plain(text), file=sys.stderr, flush=True)
    shown = [*scores, *(name for name in both if name not in scores)]
    return _table(f"{folder}: {len(files)} images", shown, row, [out / "row.csv", out / "pictures.csv"])


def _basis(name: str, context: metrics.ScoringContext) -> str:
    """What determines the value of a metric besides images and prompts, or why it has no value here."""
    try:
        return metrics.metric(name, context).basis()
    except metrics.Unavailable as e:
        return str(e)


def _images_hash(files: image_files.ImageFiles) -> str:
    """Identifies these images, in any order: a hash of the bytes of their files."""
    found = []
    for path in files.paths:
        with suppress(OSError):  # an unreadable file is reported when it is scored
            found.append(sha256_file(_regular(path)))
    return _hash(sorted(found))


def _regular(path: Path) -> Path:
    """The path of a regular file, whose opening does not block; OSError for a pipe and the like."""
    if not path.is_file():
        raise FileNotFoundError(path)
    return path


def _hash(value: object) -> str:
    return sha256(json.dumps(value), 16)


def _each(
    names: Sequence[str],
    context: metrics.ScoringContext,
    cache: metrics.Outputs,
    files: image_files.ImageFiles,
    pairs: _Paired,
    scores: Mapping[str, metrics.Score],
) -> dict[str, Sequence[object]]:
    """Column -> cells, one line per image: its file, id, prompt, and its score by each metric that is a mean over
    images."""
    table: dict[str, Sequence[object]] = {
        "file": [path.name for path in files.paths],
        "id": [item.id for item in pairs.items],
        "prompt": [item.prompt for item in pairs.items],
    }
    for name in names:
        if scores[parameters.metric_columns(name)[0]].value is None:
            continue
        one = metrics.metric(name, context)
        keys = [
            metrics.image_key(digest or "", item.prompt if one.reads_prompt else None)
            for digest, item in zip(files.digests, pairs.items, strict=True)
        ]
        if (values := one.per_image(cache.of(name, keys))) is not None:
            table[name] = values.tolist()
    return table


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


# --- printed output ---------------------------------------------------------------------------------------------------


def _table(head: str, columns: Sequence[str], row: Mapping[str, Any], files: Sequence[Path]) -> str:
    """The scores of a row, with standard errors and backends."""
    lines = []
    for name in columns:
        value, error, backend = (row[f"{name}{end}"] for end in ("", "_stderr", "_backend"))
        shown = "not measured" if value is None else summary.with_error(value, error, 4)
        lines.append((name, shown, f"[{backend}]" if backend else ""))
    wide = max((len(shown) for _, shown, _ in lines), default=0)
    text = [f"{head} (± standard error)", *(f"  {a:<16} {b:<{wide}}  {c}".rstrip() for a, b, c in lines)]
    if row["note"]:
        text.append(f"  {'note':<16} {row['note']}")
    text += [f"  {'written':<16} {path}" for path in files]
    return "\n".join(map(plain, text))
