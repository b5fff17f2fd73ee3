"""Scores existing images from any source: a run, or any folder of images. Decodes nothing.

The scores of a run go into its row. The scores of other images go into a folder with a row, the scores of each image
and the cached outputs of the scorers, so that an interrupted scoring continues there. The requested metrics are added
to the metrics of earlier requests.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specbench import data, metrics
from specbench.config import configuration, indices, parameters
from specbench.config.parameter import Parameters
from specbench.config.run_config import PromptSelection
from specbench.data.prompts import SUFFIXES
from specbench.errors import UsageError, plain
from specbench.harness.folder import stored
from specbench.harness.log import say
from specbench.harness.pairing import Pairs, listed, pair
from specbench.harness.run import Rescoring, rescore
from specbench.harness.scoring import ImageSet, Scoring, joined, request
from specbench.rows import degenerate
from specbench.rows.columns import COLUMNS, Columns, Row
from specbench.rows.csv_files import write_run_row
from specbench.rows.degenerate import ImageFacts
from specbench.rows.provenance import new_run_id
from specbench.rows.remark import Remark, as_json, remark
from specbench.rows.scores import ScoreJournal, ScoreLine, images_fingerprint, score_columns, score_remarks
from specbench.storage import home, image_files
from specbench.storage.csv_text import csv_text
from specbench.storage.files import (
    bounded_name,
    is_temporary,
    locked,
    sha256,
    sha256_if_readable,
    write_atomically,
)
from specbench.storage.image_files import ImageFiles
from specbench.storage.reading import read_json

#: Parameters of the scoring of a run.
OF_RUN = ("metrics", "metrics_dir", "reference", "device", "batch")

#: Columns of a row that identify its prompts.
_OF_PROMPTS = ("data", "split", "caption", "prompts", "seed")

#: Names, without the extension, of a file of prompts in the folder of its images.
PROMPT_FILES = ("prompts", "captions", "metadata")

_METADATA = "evaluation.json"  # in the folder of the results: the folder of the images, and the source of their prompts


@dataclass(frozen=True)
class ScoringConfig:
    """The checked parameters of a scoring of images: those of the metrics, where and in which batches the networks run,
    and the prompts (without a data set: none; n = None: see `pairing.pair`). out: the folder of the results."""

    metrics: tuple[str, ...]
    metrics_dir: str | None
    reference: str | None
    device: str
    batch: int
    prompts: PromptSelection

    @property
    def data(self) -> str:
        return self.prompts.data


@dataclass(frozen=True)
class Evaluation:
    """A row with scores: its title, the columns of the scores, and the files that were written."""

    title: str
    columns: list[str]
    row: Row
    files: list[Path]


def evaluate(folder: Path, arguments: Parameters, partial: bool = False) -> Evaluation:
    """Scores the images in a folder.

    Args:
        folder: a run's folder, or a folder of images.
        arguments: checked values of parameters (for a run: only those in `OF_RUN`); the others have their defaults.
        partial: prompts without an image are allowed.

    Raises UsageError if images and prompts do not fit together.
    """
    if (folder / "config.yaml").is_file() and (folder / "records.jsonl").is_file():
        return _evaluate_run(folder, [*arguments, *(["partial"] if partial else [])], arguments)
    return _evaluate_images(folder, dict(arguments), partial)


def _evaluate_run(folder: Path, names: Sequence[str], arguments: Parameters) -> Evaluation:
    for name in names:
        if name not in OF_RUN:
            raise UsageError(f"{folder} holds a run, which has its own prompts and folder: leave {name}= out")
    try:
        stored(folder)
    except UsageError as e:
        raise UsageError(f"{e}; score the folder {folder / 'images'} instead") from None
    changed = {name: arguments[name] for name in ("metrics_dir", "reference") if name in arguments}
    with _stop_message(folder):
        rescoring = Rescoring(arguments.get("metrics", ()), changed)
        outcome = rescore(folder, rescoring, arguments.get("device"), arguments.get("batch"))
    row = outcome.row
    title = f"{folder}: {row['n']} images of {row['model']}, method {row['method']}"
    return Evaluation(title, _columns(outcome.config.metrics), row, [outcome.folder.row])


def _evaluate_images(folder: Path, arguments: dict[str, Any], partial: bool) -> Evaluation:
    if runs := sorted(path.parent.name for path in folder.glob("*/records.jsonl")):
        raise UsageError(f"{folder} holds {listed(runs, 'runs')}: score them one by one")
    paths = image_files.find(folder)
    if not paths:
        raise UsageError(f"{folder} holds no images ({', '.join(image_files.ENDINGS)}) and no run")
    if "prompts" in arguments and arguments.setdefault("data", "prompts") != "prompts":
        raise UsageError("prompts= and data= name two sets of prompts: use only one of them")
    if arguments.get("n") == "all":
        del arguments["n"]  # the default
    out = home.expanded(arguments["out"]) if arguments.get("out") else _default_out(folder)
    if not {"prompts", "data"} & arguments.keys():
        arguments |= _prompts_in_folder(folder) or _earlier_prompts(out)
    cfg = _config(arguments)
    if not cfg.metrics:
        raise UsageError("no metrics are requested: name some with metrics=")
    context = metrics.scoring_context(cfg)
    reading = [name for name in cfg.metrics if metrics.metric(name, context).reads_prompt]
    pairs = pair(folder, paths, cfg.prompts, reading, partial)
    with _opened(out, folder) as run_id, _stop_message(out):
        prompts = {name: arguments[name] for name in (*_OF_PROMPTS, "data_dir", "n") if name in arguments}
        metadata = _Metadata(str(folder.resolve()), run_id, prompts)
        write_atomically(out / _METADATA, (json.dumps(asdict(metadata), indent=1) + "\n").encode())
        return _score_images(folder, out, run_id, pairs, cfg)


def _prompts_in_folder(folder: Path) -> dict[str, Any]:
    """The parameters of the file of prompts in a folder of images. UsageError if several files qualify."""
    files = [path for name in PROMPT_FILES for path in sorted(folder.glob(f"{name}.*")) if path.suffix in SUFFIXES]
    if len(files) > 1:
        raise UsageError(
            f"{folder} holds {listed([path.name for path in files], 'files of prompts')}: choose one with prompts="
        )
    if files:
        say(f"the prompts come from {plain(files[0])}")
    return {"data": "prompts", "prompts": str(files[0])} if files else {}


def _config(arguments: Parameters) -> ScoringConfig:
    """The parameters of a scoring of images, with defaults. UsageError for a parameter that the data set does not
    have."""
    source = arguments.get("data", "")
    declared = parameters.declared("data", source) if source else frozenset()
    known = {*OF_RUN, "data", "seed", "n", "out", *declared}
    if foreign := [name for name in arguments if name not in known]:
        where = f"data={source}" if source else "a folder of images without data="
        raise UsageError(f"{where} has no parameter '{foreign[0]}'")
    defaults = {**parameters.content("", "config"), **(parameters.content("data", source) if source else {})}
    defaults |= {"data": source, "batch": metrics.ScoringContext.batch}
    if "metrics" not in arguments:
        chosen = parameters.preferred("data", source).get("metrics", "coco")
        defaults |= configuration.values([f"metrics={chosen}"], ["metrics"])
    values = {name: arguments[name] if name in arguments else defaults[name] for name in known}
    own = {name: parameters.in_run(values)[name].checked(name, values[name]) for name in declared - {"data"}}
    return ScoringConfig(
        tuple(values["metrics"]),
        values["metrics_dir"],
        values["reference"],
        values["device"],
        values["batch"],
        PromptSelection(source, arguments.get("n"), values["seed"], own),
    )


def _default_out(folder: Path) -> Path:
    """The default folder of the results. The same images always have the same one, so that scoring continues there."""
    images = folder.resolve()
    return Path("runs", "evaluate", f"{bounded_name(images.name)}-{sha256(str(images), 8)}")


@dataclass(frozen=True)
class _Metadata:
    """The content of `_METADATA`: the folder of the images, the id of the row, and the parameters of the prompts."""

    pictures: str
    run_id: str
    prompts: Parameters = field(default_factory=dict)


def _read_metadata(out: Path) -> _Metadata | None:
    """The metadata of an earlier scoring in `out`; None if there was none. UsageError for a damaged file."""
    path = out / _METADATA
    metadata: _Metadata | None = read_json(path, _Metadata, "choose another out=") if path.exists() else None
    return metadata


def _earlier_prompts(out: Path) -> dict[str, Any]:
    """The parameters of the prompts of an earlier scoring, if their files still exist."""
    prompts = dict(earlier.prompts) if (earlier := _read_metadata(out)) else {}
    file = prompts.get("prompts")
    return {} if file and not home.expanded(file).is_file() else prompts


@contextmanager
def _opened(out: Path, folder: Path) -> Iterator[str]:
    """Creates and locks the folder of the results, checks that it belongs to these images, and yields the row's id."""

    def checked() -> _Metadata | None:
        earlier = _read_metadata(out)
        if earlier is None:
            if others := {p.name for p in out.iterdir() if not is_temporary(p)} - {".lock"}:
                raise UsageError(f"{out} holds {sorted(others)[0]}; choose an empty or a new folder as out=")
        elif earlier.pictures != str(folder.resolve()):
            raise UsageError(f"{out} holds the scores of {earlier.pictures}; choose another out=")
        return earlier

    with locked(out, checked):
        earlier = checked()  # another process may have written before the lock
        yield earlier.run_id if earlier else new_run_id()


@contextmanager
def _stop_message(out: Path) -> Iterator[None]:
    """Gives a Ctrl-C a one-sentence message."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped; the scores so far are cached in {out}; the same command continues from them"
        ) from None


def _score_images(folder: Path, out: Path, run_id: str, pairs: Pairs, cfg: ScoringConfig) -> Evaluation:
    """Scores pairs of images and prompts, and writes the row and the scores of each image. The metrics of earlier
    requests stay in the row as long as the images are the same."""
    files = _CachedFiles(pairs.paths, out / "digests.json")
    content = images_fingerprint(sorted(filter(None, files.contents)))
    labelled = [[item.id, item.prompt, item.labels] for item in pairs.items]
    images = ImageSet("method", files, lambda: pairs.items, content, sha256(json.dumps(labelled), 16))
    earlier = _earlier_lines(ScoreJournal(out / "scores.jsonl"), content)
    context = metrics.scoring_context(cfg)
    names = joined([*earlier], cfg.metrics)
    unpaired = [name for name in names if not cfg.data and metrics.metric(name, context).reads_prompt]
    wanted = {name: request(name, context) for name in names if name not in unpaired}
    scoring = Scoring(cfg, wanted, out, cfg.device, cfg.batch)
    try:
        scored = scoring.score(images)
        for i, digest in enumerate(files.digests):  # of images that no metric read
            if digest is None and files.contents[i]:
                _ = files[i]  # stores its digest
    finally:  # also after a Ctrl-C
        files.write()
    lines = [scored.get(name) or earlier[name] for name in names]
    row = _row(folder, run_id, pairs, files, cfg, lines)
    columns = _per_image(pairs, files, scored, context, scoring.cache)
    image_rows = (dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True))
    write_atomically(out / "pictures.csv", csv_text(columns, image_rows).encode())
    write_run_row(out, row)
    return Evaluation(f"{folder}: {len(files)} images", _columns(names), row, [out / "row.csv", out / "pictures.csv"])


class _CachedFiles(ImageFiles):
    """Image files whose digests, sizes and contrasts are cached in the file `cache`, by the SHA-256 of each file, so
    that an image is decoded only to be scored.

    digests, sizes (H, W), contrasts: of each image; None if it was never read. traits: see `image_files.traits`.
    contents: the SHA-256 of each file, with its traits (other versions prepared such images in another way); None if
    the file cannot be read, which is reported when it is scored.
    """

    def __init__(self, paths: Sequence[Path], cache: Path) -> None:
        super().__init__(paths)
        self._cache = cache
        self.traits = [image_files.traits(path) for path in paths]
        self.contents = [
            digest and " ".join([digest, *traits])
            for digest, traits in zip(map(sha256_if_readable, paths), self.traits, strict=True)
        ]
        self.digests: list[str | None] = [None] * len(paths)
        self.sizes: list[tuple[int, int] | None] = [None] * len(paths)
        self.contrasts: list[int | None] = [None] * len(paths)
        cached: Any = None
        with suppress(OSError, ValueError, RecursionError):  # missing or damaged: the images are read again
            cached = json.loads(cache.read_text(encoding="utf-8"))
        for i, content in enumerate(self.contents):
            match cached.get(content) if isinstance(cached, dict) else None:
                case [str(digest), int(height), int(width), int(contrast)]:
                    self.digests[i], self.sizes[i], self.contrasts[i] = digest, (height, width), contrast

    def __getitem__(self, index: int) -> np.ndarray:
        image = super().__getitem__(index)
        self.digests[index] = self.digests[index] or image_files.digest(image)
        self.sizes[index], self.contrasts[index] = image.shape[:2], image_files.contrast(image)
        return image

    def write(self) -> None:
        """Writes the cache. It contains these images alone, so that it does not grow beyond the folder."""
        rows = zip(self.contents, self.digests, self.sizes, self.contrasts, strict=True)
        cached = {content: [digest, *size, most] for content, digest, size, most in rows if content and digest and size}
        write_atomically(self._cache, json.dumps(cached).encode())


def _columns(names: Iterable[str]) -> list[str]:
    return [column for name in names for column in parameters.metric_columns(name)]


def _earlier_lines(journal: ScoreJournal, images: str) -> dict[str, ScoreLine]:
    """The newest measured line of each metric on these images. Of metrics that fill the same column, the newest one."""
    lines: dict[str, ScoreLine] = {}
    for line in journal:
        if line.is_measured and line.images == images and line.metric in parameters.single_metrics():
            kept = joined([*lines], [line.metric])
            lines = {name: lines[name] for name in kept if name in lines} | {line.metric: line}
    return lines


def _row(
    folder: Path,
    run_id: str,
    pairs: Pairs,
    files: _CachedFiles,
    cfg: ScoringConfig,
    lines: Sequence[ScoreLine],
) -> Columns:
    """The row of these images and scores."""
    row: Columns = dict.fromkeys(COLUMNS)
    newest = max(lines, key=lambda line: line.time)
    row |= {"run_id": run_id, "time": newest.time, "specbench": newest.specbench, "commit": newest.commit}
    prompts = Counter(indices.prompt_of(item.index) for item in pairs.items)
    row |= {"images": len(files), "n": len(prompts)}
    row["images_per_prompt"] = prompts.popitem()[1] if len(set(prompts.values())) == 1 else None
    used = {*(label for line in lines for label in line.plugins), *parameters.plugins_of({"data": cfg.data})}
    row["plugins"] = "; ".join(sorted(used)) or None
    if source := cfg.data:
        of_prompts = {"data": source, **cfg.prompts.own}
        row |= {name: value for name, value in of_prompts.items() if name in COLUMNS}
    if any(item.id for item in pairs.items):
        row["prompts_hash"] = data.prompts_hash(pairs.items)
    sides = {side for size in files.sizes for side in (size or (None,))}
    row["resolution"] = sides.pop() if len(sides) == 1 else None  # all known, square and equal
    row |= score_columns(lines)
    sizes = [size and (size[1], size[0]) for size in files.sizes]
    known = zip(pairs.items, files.digests, files.contrasts, sizes, strict=True)
    wrong = degenerate.findings([ImageFacts(item.prompt, sha, most, size) for item, sha, most, size in known])
    if None not in files.contrasts:
        row["degenerate_images"] = degenerate.count(wrong)
    remarks = [remark("pictures", folder=str(folder.resolve())), *pairs.remarks]
    remarks += [Remark("files", count) for count in image_files.counted(files.traits)]
    remarks += [*(finding.remark for finding in wrong), *score_remarks(lines)]
    return row | {"remarks": as_json(remarks) or None}


def _per_image(
    pairs: Pairs,
    files: _CachedFiles,
    scored: Mapping[str, ScoreLine],
    context: metrics.ScoringContext,
    cache: metrics.Outputs,
) -> dict[str, Sequence[object]]:
    """Column -> cells, with one cell per image: its file, id, prompt, and its score by each metric that is a mean over
    images."""
    table: dict[str, Sequence[object]] = {
        "file": [path.name for path in files.paths],
        "id": [item.id for item in pairs.items],
        "prompt": [item.prompt for item in pairs.items],
    }
    for name, line in scored.items():
        if not line.is_measured or name not in cache.scorers:
            continue
        metric = metrics.metric(name, context)
        keys = [
            metrics.image_key(digest or "", item.prompt if metric.reads_prompt else None)
            for digest, item in zip(files.digests, pairs.items, strict=True)
        ]
        if (values := metric.per_image(cache.of(name, keys))) is not None:
            table[name] = values.tolist()
    return table
