"""One run, from its configuration to its row: prompts -> images and a record each -> metrics -> one row.

    row = execute(configuration.compose(["method=cool_sd", "delta=1.1", "n=16"]), "first")

The folder of a run is its memory. Every image has a record (see `records`), every image's random stream is keyed by
(seed, prompt index), so running the same configuration in the same folder goes on where it stopped and ends with the
images of an undisturbed run. `n`, `metrics` with what they read, and `baseline` may change between two runs in one
folder: more prompts are added, metrics are computed on what is there, and the row is drawn up anew over the first n
prompts. Other prompts, and any other parameter but `data_dir`, would mix two measurements in one row, and are refused.
What the metrics' networks said of each picture is kept in the folder, too (see `metrics.outputs`).
"""

from __future__ import annotations

import json
import logging
import os
import resource
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from omegaconf import OmegaConf
from tqdm import tqdm

from specbench import data, home, metrics, parameters, protocols, records, sheet, statistics
from specbench.errors import UsageError

if TYPE_CHECKING:
    import torch

    from specbench.decoding.continuous import Trace as VectorTrace
    from specbench.decoding.loop import Drafter, Trace
    from specbench.pipeline import Finished


class Decoded(Protocol):
    """A decoded batch of B images."""

    @property
    def tokens(self) -> torch.Tensor: ...  # (B, T) int64
    @property
    def steps(self) -> torch.Tensor: ...  # (B,) target forward passes of the decode phase
    @property
    def drafted(self) -> torch.Tensor: ...  # (B,) draft tokens verified
    @property
    def accepted(self) -> torch.Tensor: ...  # (B,) draft tokens accepted
    @property
    def seconds(self) -> float: ...  # first target forward to last token, device-synchronised
    @property
    def trace(self) -> Trace | VectorTrace: ...


class Decoder(Protocol):
    """All that a run asks of a model and its decoding (`specbench.pipeline.Pipeline`)."""

    @property
    def weights(self) -> str: ...  # a short name with a hash of the content
    @property
    def resolution(self) -> int: ...  # side of an image in pixels
    @property
    def tokens_per_image(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    def encode(self, prompts: list[str]) -> Any: ...
    def decode(self, conditioning: Any, keys: list[tuple[int, int]]) -> Decoded: ...  # keys: (seed, prompt index)
    def stream(
        self, prompts: Sequence[str], keys: Sequence[tuple[int, int]], batch: int
    ) -> Iterator[Finished]: ...  # the same, image by image as they are done
    def pixels(self, tokens: torch.Tensor) -> np.ndarray: ...  # (B, T) -> (B, H, W, 3) uint8
    def vanilla(self) -> Decoder: ...  # the same target with the empty draft
    def synchronize(self) -> None: ...


Loader = Callable[[Mapping[str, Any]], Decoder]

#: Parameters that may change between two runs in the same folder.
MAY_CHANGE = ("n", "metrics", "metrics_dir", "reference", "baseline", "out", "data_dir")

_UNMEASURED = "cannot be measured here: "

_LOG = logging.getLogger("specbench")


class Stopped(KeyboardInterrupt):
    """The user stopped a run. The message says how far it came in which folder."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


def execute(cfg: Mapping[str, Any], out: str | Path | None = None, *, loader: Loader | None = None) -> dict[str, Any]:
    """Runs a configuration, or what is left of it, in its folder, and returns its row (`records.COLUMNS`).

    Args:
        cfg: flat parameters, as `configuration.compose` gives them.
        out: the run's folder; None takes `cfg["out"]`, and where that is None, too, a new one under runs/.
        loader: makes the pipeline; None takes `specbench.pipeline.Pipeline.load`.

    Raises UsageError for bad parameters, absent weights and a folder that holds something else, and Stopped on Ctrl-C.
    """
    return Run(cfg, out, loader=loader).execute()


def new_folder(now: float | None = None) -> Path:
    """The default folder of a run that starts now: runs/<date>/<time>-<id>."""
    return Path("runs", time.strftime("%Y-%m-%d/%H-%M-%S", time.localtime(now)) + f"-{secrets.token_hex(3)}")


class Run:
    """A configuration and its folder. `nothing_left` tells after `execute` whether everything was there already."""

    def __init__(self, cfg: Mapping[str, Any], out: str | Path | None = None, *, loader: Loader | None = None) -> None:
        self.cfg = parameters.validate(cfg)
        self.folder = Path(out or self.cfg["out"] or new_folder()).expanduser()
        self.nothing_left = False
        self.judging_device: str = self.cfg["device"]  # of the metrics' networks
        self.judging_batch = metrics.Place.batch
        self._loader = loader or _load_pipeline
        self._made = False  # by this process
        self._session = secrets.token_hex(4)
        # Vanilla AR is its own baseline; it is known by its empty draft and a token a pass, not by the preset's name.
        self.is_vanilla = self.cfg["drafter"] == "none" and not self.cfg.get("iterations")
        self.wants_baseline = self.cfg["baseline"] and not self.is_vanilla

    @property
    def row_path(self) -> Path:
        return self.folder / "row.csv"

    @property
    def sheet_path(self) -> Path:
        return self.folder / "contact_sheet.png"

    def execute(self) -> dict[str, Any]:
        """See `execute`."""
        with self._opened():
            self._check_folder()
            method = records.Journal(self.folder / "records.jsonl")
            vanilla = records.Journal(self.folder / "baseline.jsonl") if self.wants_baseline else None
            try:
                return self._execute(method, vanilla)
            except KeyboardInterrupt:
                n = self.cfg["n"]
                done = f"{n - len(method.missing(n))} of {n} images"
                if vanilla is not None:
                    done += f" and {n - len(vanilla.missing(n))} of {n} baseline images"
                _LOG.info("stopped by the user with %s", done)
                raise Stopped(f"stopped with {done} done in {self.folder}", self.folder) from None
            except UsageError as e:
                _LOG.error("%s", e)
                if self._made and not method.records:
                    shutil.rmtree(self.folder)  # a run that could not begin leaves nothing
                raise
            except Exception:
                _LOG.exception("failed")
                raise

    def _execute(self, method: records.Journal, vanilla: records.Journal | None) -> dict[str, Any]:
        n = self.cfg["n"]
        # A finished run says nothing about weights trained since. (A loader of its own has weights of its own.)
        if self._loader is _load_pipeline and (here := _weights_here(self.cfg)) is not None:
            self._check_same("weights", here)
        left = bool(method.missing(n) or (vanilla is not None and vanilla.missing(n)))
        bases = self._bases()
        if not left and self.sheet_path.exists() and (row := self._finished_row(bases)):
            _check_prompts(method, _prompts_here(self.cfg))
            self.nothing_left = True
            _LOG.info("nothing left to do")
            return row
        items = data.load(self.cfg)
        for journal in (method, vanilla):
            if journal is not None:
                _check_prompts(journal, items)
        if left:
            for name, basis in bases.items():
                if basis.startswith(_UNMEASURED):
                    _say(f"{name} {basis}")
            self._decode_missing(method, vanilla, items)
        return self._draw_up(method, vanilla, items, bases)

    def rescore(self) -> dict[str, Any]:
        """Computes the metrics of a run whose images are all there, and draws up its row anew. Decodes nothing and
        needs no weights but those of the metrics. UsageError where images are missing."""
        with self._opened():
            method = records.Journal(self.folder / "records.jsonl")
            vanilla = records.Journal(self.folder / "baseline.jsonl") if self.wants_baseline else None
            n = self.cfg["n"]
            for journal in (method, vanilla):
                if journal is not None and (missing := journal.missing(n)):
                    raise UsageError(
                        f"{self.folder} has {n - len(missing)} of the {n} images in {journal.path.name}: finish it"
                        f" first, with the `specbench run` that began it and out={self.folder}"
                    )
            items = _prompts_here(self.cfg) or _prompts_of(method, self.cfg)
            _check_prompts(method, items)
            bases = self._bases()
            self._check_folder()
            return self._draw_up(method, vanilla, items, bases)

    def _draw_up(
        self,
        method: records.Journal,
        vanilla: records.Journal | None,
        items: Sequence[data.Item],
        bases: Mapping[str, str],
    ) -> dict[str, Any]:
        """Scores the images, draws the sheet and writes the row."""
        row = self._row(method, vanilla, items, self._score(method, items))
        self._draw_sheet(row, method, vanilla, items)
        records.write_atomically(self.row_path, records.to_csv([row]).encode())
        self._remember(self._memory() | {"metrics": dict(bases)})  # not before the row that they stand for
        _LOG.info("row written to %s", self.row_path)
        return records.read_rows(self.row_path)[0]  # the same, value for value, as a later call would give

    # --- the folder ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Makes the folder, locks it against a second process, and logs into it."""
        self._made = not self.folder.exists()
        with records.locked(self.folder, self._check_ours):
            handler = logging.FileHandler(self.folder / "run.log", encoding="utf-8")
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            _LOG.setLevel(logging.INFO)
            _LOG.propagate = False  # a traceback belongs into the log, not onto the screen
            _LOG.addHandler(handler)
            try:
                yield
            finally:
                _LOG.removeHandler(handler)
                _LOG.propagate = True
                handler.close()

    def _check_ours(self) -> None:
        """A folder that holds other things is not filled with ours."""
        if (self.folder / "config.yaml").exists():
            return
        # What a process that was killed before config.yaml stood can have left.
        others = {p.name for p in self.folder.iterdir()} - {".lock", "run.log", "config.yaml.tmp"}
        if others:
            raise UsageError(
                f"{self.folder} holds {sorted(others)[0]} but no run; choose an empty or a new folder as out="
            )

    def _check_folder(self) -> None:
        """Compares the configuration with the folder's, and leaves it there."""
        path = self.folder / "config.yaml"
        mine = {name: value for name, value in self.cfg.items() if name != "out"}
        if path.exists():
            try:
                theirs = dict(OmegaConf.to_container(OmegaConf.load(path)))  # type: ignore[arg-type]
            except Exception:
                raise UsageError(f"cannot read {path}; choose another out=") from None
            different = [
                name
                for name in [*parameters.TABLE, *theirs]
                if name not in MAY_CHANGE and mine.get(name) != theirs.get(name)
            ]
            if different:
                shown = [name for i, name in enumerate(different) if name not in different[:i]][:3]
                raise UsageError(
                    f"{self.folder} holds a run with {_values(theirs, shown)}, not {_values(mine, shown)};"
                    " choose another out=, or give the parameters in its config.yaml to go on with it"
                )
            if mine == theirs:
                return
        records.write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(mine)).encode())

    def _finished_row(self, bases: Mapping[str, str]) -> dict[str, Any] | None:
        """The row in the folder, if it is this configuration's and its metrics would say the same today."""
        if not self.row_path.exists() or self._memory().get("metrics", {}) != bases:
            return None
        rows = records.read_rows(self.row_path)
        return rows[0] if rows and rows[0]["config_hash"] == records.config_hash(self.cfg) else None

    def _memory(self) -> dict[str, Any]:
        """run.json: the run's name, the processes that decoded for it, and what fixed the metrics of its row."""
        path = self.folder / "run.json"
        if path.exists():
            return records.read_memory(path)
        return {"run_id": f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}", "sessions": {}}

    def _remember(self, memory: Mapping[str, Any]) -> None:
        records.write_atomically(self.folder / "run.json", (json.dumps(memory, indent=1) + "\n").encode())

    def _enter(self, pipeline: Decoder) -> None:
        """Notes this process in run.json. Raises UsageError where it would not continue what the others did."""
        memory = self._memory()
        mine = {
            **records.environment(pipeline.device),
            "weights": pipeline.weights,
            "resolution": pipeline.resolution,
            "tokens": pipeline.tokens_per_image,
            "pid": os.getpid(),
            "started": _utc("microseconds"),
        }
        for name in ("weights", "device"):
            self._check_same(name, mine[name])
        memory["sessions"][self._session] = mine
        self._remember(memory)
        _LOG.info("session %s: %s", self._session, json.dumps(mine))

    def _check_same(self, name: str, mine: str) -> None:
        """Raises UsageError where an earlier process decoded with something else."""
        for other in self._memory()["sessions"].values():
            if other.get(name) != mine:
                raise UsageError(
                    f"{self.folder} was begun with {name} {other.get(name)}, and here are {mine}: choose another out="
                )

    # --- decoding -----------------------------------------------------------------------------------------------------

    def _decode_missing(
        self, method: records.Journal, vanilla: records.Journal | None, items: Sequence[data.Item]
    ) -> None:
        _say(f"loading {self.cfg['model']}")
        began = time.perf_counter()
        pipeline = self._loader(self.cfg)
        _LOG.info("loaded %s in %.1f s", self.cfg["model"], time.perf_counter() - began)
        _say(f"loaded in {time.perf_counter() - began:.1f} s")
        self._enter(pipeline)
        self._decode(pipeline, method, items, "images", self.cfg["method"], _draft_passes(self.cfg))
        if vanilla is not None and vanilla.missing(len(items)):
            self._decode(pipeline.vanilla(), vanilla, items, "baseline", "vanilla", passes=0)

    def _decode(
        self,
        pipeline: Decoder,
        journal: records.Journal,
        items: Sequence[data.Item],
        folder: str,
        label: str,
        passes: int,
    ) -> None:
        """Decodes the prompts that have no record yet, in batches, and records each image; `passes` of a drafter
        network a step."""
        left = journal.missing(len(items))
        size, seed = self.cfg["batch"], self.cfg["seed"]
        for _ in range(self.cfg["warmup"] if left else 0):
            first = left[:size]
            warm = pipeline.decode(pipeline.encode([items[i].prompt for i in first]), [(seed, i) for i in first])
            pipeline.pixels(warm.tokens)
        reset_peak_memory(pipeline.device)
        # Where nobody watches, a line now and then shows that the run is alive.
        interval = 0.2 if sys.stderr.isatty() else 20.0
        with tqdm(
            total=len(items), initial=len(items) - len(left), desc=label, unit="image", mininterval=interval
        ) as bar:
            for finished in pipeline.stream([items[i].prompt for i in left], [(seed, i) for i in left], size):
                for record, picture in self._records_of(pipeline, finished, items, left, folder, passes):
                    journal.add(record, picture)
                    _LOG.info("%s: %s in %d steps, %.3f s", label, record.image, record.steps, record.decode_s)
                    bar.update()

    def _records_of(
        self,
        pipeline: Decoder,
        finished: Finished,
        items: Sequence[data.Item],
        left: Sequence[int],
        folder: str,
        passes: int,
    ) -> list[tuple[records.Record, np.ndarray]]:
        """A record and a picture of each image that is done; `left`: the prompts that were asked for."""
        decoded, rows, seed = finished.decoded, len(finished.which), self.cfg["seed"]
        pipeline.synchronize()
        before_pixels = time.perf_counter()
        pictures = pipeline.pixels(decoded.tokens)
        done = time.perf_counter()
        peak = peak_memory_mib(pipeline.device)
        tokens = int(decoded.tokens.shape[1])
        steps, drafted, accepted = decoded.steps.tolist(), decoded.drafted.tolist(), decoded.accepted.tolist()
        figures = statistics.of_images(decoded.trace, steps, passes)
        return [
            (
                records.Record(
                    index=index,
                    prompt=items[index].prompt,
                    seed=seed,
                    tokens=tokens,
                    steps=steps[b],
                    drafted=drafted[b],
                    accepted=accepted[b],
                    accepted_length=tokens / steps[b],
                    latency_s=decoded.seconds if self.cfg["batch"] == 1 else None,
                    decode_s=decoded.seconds / rows,
                    text_s=finished.text_s / rows,
                    pixels_s=(done - before_pixels) / rows,
                    batch=finished.batch,
                    peak_memory_mib=peak,
                    image=f"{folder}/{index:05d}.png",
                    sha256=records.digest(pictures[b]),
                    session=self._session,
                    id=items[index].id,
                    **figures[b],
                ),
                pictures[b],
            )
            for b, index in enumerate(left[i] for i in finished.which)
        ]

    # --- the row ------------------------------------------------------------------------------------------------------

    def _bases(self) -> dict[str, str]:
        """Metric -> what fixes its value beside the pictures and prompts, or why it has none here."""
        found = {}
        for name in self.cfg["metrics"]:
            try:
                found[name] = metrics.metric(name, judging_place(self.cfg)).basis()
            except metrics.Unavailable as e:
                found[name] = f"{_UNMEASURED}{e}"
        return found

    def _score(self, method: records.Journal, items: Sequence[data.Item]) -> dict[str, Any]:
        """Column -> value of the quality metrics, with their notes under "note"."""
        if not self.cfg["metrics"]:
            return {}
        _say(f"scoring: {', '.join(self.cfg['metrics'])}")
        place = judging_place(self.cfg, judging_device(self.judging_device), self.judging_batch)
        scores = metrics.score(
            self.cfg["metrics"], _Recorded(method, len(items)), items, place, metrics.Outputs(self.folder)
        )
        return quality(scores)

    def _row(
        self,
        method: records.Journal,
        vanilla: records.Journal | None,
        items: Sequence[data.Item],
        quality: Mapping[str, Any],
    ) -> dict[str, Any]:
        memory = self._memory()
        n = self.cfg["n"]
        mine = method.first(n)
        reference = mine if self.is_vanilla else vanilla.first(n) if vanilla is not None else None
        used = {record.session for record in [*mine, *(reference or [])]}
        sessions = {name: session for name, session in memory["sessions"].items() if name in used}
        if unknown := sorted(used - set(sessions)):
            raise UsageError(f"{self.folder}/run.json lacks the process {unknown[0]:.40} of its records; mend it")
        last = sessions[max(sessions, key=lambda name: str(sessions[name].get("started")))]
        row: dict[str, Any] = dict.fromkeys(records.COLUMNS)
        row |= {name: value for name, value in self.cfg.items() if name in records.COLUMNS}
        row |= {name: value for name, value in last.items() if name in records.COLUMNS}
        row |= {"run_id": memory["run_id"], "time": _utc(), "config_hash": records.config_hash(self.cfg)}
        row["prompts_hash"] = data.prompts_hash(items)
        row |= statistics.speed(mine) | statistics.columns(mine)
        if row["perplexity"] is not None:
            row["perplexity_backend"] = _judge(row)
        if reference:
            row |= statistics.versus(mine, reference)
            if "gamma" in self.cfg:
                row |= statistics.expected_speedup(mine, reference, self.cfg["gamma"])
            row["baseline_run_id"] = memory["run_id"] + ("" if self.is_vanilla else "/baseline")
        row |= {name: value for name, value in quality.items() if name != "note"}
        remarks = _remarks(self.cfg, sessions)
        if blind := sum(record.accepted_per_step is None for record in mine):
            remarks.append(
                f"{blind} of {n} images were decoded by an older specbench, which recorded nothing about their steps"
            )
        row["note"] = "; ".join(filter(None, [*remarks, quality.get("note", "")]))
        return row

    def _draw_sheet(
        self,
        row: Mapping[str, Any],
        method: records.Journal,
        vanilla: records.Journal | None,
        items: Sequence[data.Item],
    ) -> None:
        cells = []
        for item in items[: sheet.LIMIT]:
            pair = [(self.cfg["method"], method.picture(item.index))]
            if vanilla is not None:
                pair.insert(0, ("vanilla", vanilla.picture(item.index)))
            cells.append(sheet.Cell(item.prompt, pair))
        shown = "" if len(cells) == len(items) else f", first {len(cells)}"
        title = (
            f"{row['model']}: {describe(self.cfg)}, {row['accepted_length_mean']:.2f} tokens a step"
            f" ({len(items)} images{shown})"
        )
        sheet.save(self.sheet_path, title, cells)


# --- figures ----------------------------------------------------------------------------------------------------------


def judging_place(cfg: Mapping[str, Any], device: str = "cpu", batch: int = metrics.Place.batch) -> metrics.Place:
    """Where the metrics of a configuration work: its `metrics_dir`, `reference` and `data`."""
    folder, reference = cfg["metrics_dir"], cfg["reference"]
    return metrics.Place(
        metrics.ASSETS,
        Path(folder).expanduser() if folder else home.metrics_folder(),
        Path(reference).expanduser() if reference else None,
        cfg["data"],
        device,
        batch,
    )


def judging_device(device: str) -> str:
    """Where the metrics' networks run for device=...; UsageError where that is not here."""
    from specbench.pipeline import resolve_device

    found = str(resolve_device(device))
    return "cpu" if found == "mps" else found  # which has no float64


def quality(scores: Mapping[str, metrics.Score]) -> dict[str, Any]:
    """The columns of a row for the scores of some metrics by column, with their notes under "note"."""
    columns: dict[str, Any] = {}
    for name, score in scores.items():
        columns |= {name: score.value, f"{name}_stderr": score.stderr, f"{name}_backend": score.backend or None}
    columns["note"] = "; ".join(f"{name}: {score.note}" for name, score in scores.items() if score.note)
    return columns


class _Recorded:
    """The pictures of the first n records, each read when it is asked for."""

    def __init__(self, journal: records.Journal, n: int) -> None:
        self._journal = journal
        self.digests = [record.sha256 for record in journal.first(n)]

    def __len__(self) -> int:
        return len(self.digests)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._journal.picture(index)


def _judge(row: Mapping[str, Any]) -> str:
    """What a row's perplexity is measured under: "target:llamagen_scenes@1a2b3c4d, cfg_scale 3, temperature 1"."""
    digest = row["weights"].rpartition(":")[2].partition("+")[0]  # the target's; see registry.weights_label
    return f"target:{row['model']}@{digest}, cfg_scale {row['cfg_scale']:g}, temperature {row['temperature'] or 1:g}"


def _remarks(cfg: Mapping[str, Any], sessions: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a reader of the row must know about how it was measured."""
    remarks = protocols.remarks(cfg)
    if cfg["batch"] > 1:
        remarks.append(f"decoded in batches of {cfg['batch']}: a latency is measured at batch 1 only")
    if len(sessions) > 1:
        remarks.append(f"decoded in {len(sessions)} processes: timings of several processes are mixed")
        for name in ("commit", "device_name", "torch"):
            if len({str(session.get(name)) for session in sessions.values()}) > 1:
                remarks.append(f"the processes differ in {name.replace('_', ' ')}, the last one's is given")
    return remarks


def describe(cfg: Mapping[str, Any]) -> str:
    """A method in words: "cool_sd (drafter eagle_tree, rule cool, delta 1.1)"."""
    parts = [f"drafter {cfg['drafter']}", f"rule {cfg['rule']}"]
    parts += [f"{name} {cfg[name]:g}" for name in ("window", "delta") if cfg.get(name) is not None]
    return f"{cfg['method']} ({', '.join(parts)})"


def _check_prompts(journal: records.Journal, items: Sequence[data.Item]) -> None:
    """Raises UsageError where an image was decoded for another prompt."""
    for item in items:
        record = journal.records.get(item.index)
        if record and (record.prompt != item.prompt or record.id not in (None, item.id)):
            raise UsageError(
                f"the prompts have changed since {journal.path} was written (index {item.index}); choose another out="
            )


def _prompts_here(cfg: Mapping[str, Any]) -> list[data.Item]:
    """The prompts as their files say now; none where they have no file, or it is not here any more."""
    try:
        return [] if cfg["data"] in data.DRAWN else data.load(cfg)
    except UsageError:
        return []


def _prompts_of(journal: records.Journal, cfg: Mapping[str, Any]) -> list[data.Item]:
    """The prompts as they stand in the records of a run, for a data set whose files are not here any more."""
    if cfg["data"] in data.DRAWN:
        return data.load(cfg)
    return [data.Item(r.index, r.prompt, None, r.id or str(r.index)) for r in journal.first(cfg["n"])]


def _values(cfg: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name}={cfg[name]}" if name in cfg else f"no {name}" for name in names)


def _utc(precision: str = "seconds") -> str:
    return datetime.now(UTC).isoformat(timespec=precision)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _load_pipeline(cfg: Mapping[str, Any]) -> Decoder:
    from specbench.pipeline import Pipeline

    check(cfg)
    return Pipeline.load(cfg)


def _weights_here(cfg: Mapping[str, Any]) -> str | None:
    """What a row would call the weights that are here now; None where they are not. Loads nothing."""
    from specbench import registry

    try:
        return registry.weights_label(cfg)
    except OSError:
        return None


class _NoModel:
    """Stands for a model whose drafter networks are not loaded."""

    def draft_model(self) -> None: ...
    def eagle(self, kind: str) -> None: ...
    def medusa(self) -> None: ...


def _draft_passes(cfg: Mapping[str, Any]) -> int:
    """Forward passes of a drafter network in a step."""
    return int(cfg["gamma"]) if "gamma" in cfg else _drafter(cfg).passes


def _drafter(cfg: Mapping[str, Any]) -> Drafter:
    """The drafter of a configuration without its networks: its tree and what a step costs."""
    from specbench import registry

    drafter: Drafter = registry.find("drafter", cfg["drafter"])(cfg, _NoModel())
    return drafter


def check(cfg: Mapping[str, Any]) -> None:
    """Raises UsageError for what can be told before a model is loaded: absent weights, a bad tree, an absent device."""
    import torch

    from specbench import registry
    from specbench.pipeline import engine_of, resolve_device, vector_rule

    engine_of(cfg, resolve_device(cfg["device"]))
    if parameters.of_vectors("model", cfg["model"]):
        vector_rule(cfg, 0)
    else:
        registry.rule(cfg, _drafter(cfg).tree.height, lambda: torch.eye(2))
    registry.check_weights(cfg)


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new peak where the device can; the resident memory of a process has one peak only."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory so far in MiB: allocated on a CUDA device, resident of the process elsewhere."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def report(run: Run, row: Mapping[str, Any]) -> str:
    """The key figures of a row, for people, with their standard errors over images, and where everything lies."""

    def figure(name: str, unit: str = "", digits: int = 2) -> str:
        if row.get(name) is None:
            return "not measured"
        error = row.get(records.stderr_of(name))
        return statistics.with_error(row[name], error, digits) + unit

    lines = [
        ("accepted length", figure("accepted_length_mean", " tokens a step")),
        ("acceptance rate", figure("acceptance_rate")),
        ("perplexity", f"{figure('perplexity')}, drafts' total variation {figure('draft_tv', digits=3)}"),
        ("latency", figure("latency_s_mean", " s an image", 3)),
        ("throughput", figure("tokens_per_s", " tokens/s", 1)),
        ("speed-up", f"{figure('speedup_latency', 'x')} in latency, {figure('speedup_step', 'x')} in steps"),
    ]
    for name in (column for metric in run.cfg["metrics"] for column in metrics.columns(metric)):
        backend = f"  [{row[f'{name}_backend']}]" if row.get(f"{name}_backend") else ""
        lines.append((name, figure(name, digits=4) + backend))
    if row.get("note"):
        lines.append(("note", str(row["note"])))
    lines += [("row", str(run.row_path)), ("contact sheet", str(run.sheet_path))]
    source = "/".join(filter(None, [row["data"], row["split"]]))
    head = f"{row['model']}: {describe(run.cfg)}, {source}, n={row['n']}, {row['device_name']} (± standard error)"
    return "\n".join([head, *(f"  {name:<16} {text}" for name, text in lines)])
