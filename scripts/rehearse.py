"""Rehearse a real model without its weights: files of the official names, formats and sizes, with random numbers, are
served on the loopback, and the README's commands for real models run on them, to the letter.

    python scripts/rehearse.py llamagen_xl                      # needs 40 GB of disk, 20 GB of memory, a CPU
    python scripts/rehearse.py llamagen_xl --scale small        # the same with reduced networks, in a minute

Each command is a process of its own, whose time and memory are held against the budgets below. Exit code 1 where a
command fails or leaves its budget. Budgets are of anonymous memory, which a machine must have; mapped pages of files
are part of the resident memory only. LlamaGen-XL runs with its EAGLE drafter, Flan-T5-XL and COCO's metrics; another
model is loaded, and takes one step. The files are removed at the end.

Only the pinned checksums differ from a user's run, since the files do: scripts/rehearsal/command.py replaces them in
the process of a command.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rehearsal import processes
from rehearsal.hub import Hub
from rehearsal.processes import Measured

from specbench.config import registry
from specbench.rows import provenance
from specbench.storage import origin, sources
from specbench.storage.csv_text import RowFile
from specbench.storage.files import format_size

ROOT = Path(__file__).resolve().parents[1]
GB = 1e9
#: Loading may hold this much besides the networks, once: libraries, the file that is read, buffers.
LOADING = 1.5 * GB
_REPLACED = "replaced.json"  # replaces the pinned checksums; read by rehearsal.command
#: The metrics of the small scale: Inception-V3 has no small form.
SMALL_METRICS = "[clip_b32,image_reward,hpsv2]"

ROWS = RowFile(
    {
        "time": "when it was measured, UTC",
        "commit": "of the code",
        "model": "the model",
        "scale": "full: official sizes; small: reduced networks",
        "stage": "the stage",
        "command": "its command; `load` loads the networks of a run and does nothing else",
        "seconds": "its time",
        "budget_s": "the budget of its time",
        "anonymous_gb": "peak anonymous memory of its processes, GB",
        "budget_gb": "the budget of it",
        "resident_gb": "peak resident memory, with mapped pages of files, GB",
        "networks_gb": "bytes of the networks that `load` loaded, GB",
        "ok": "whether it succeeded within its budgets",
        "processor": "the machine's processor",
        "cores": "its cores that the process may use",
        "torch": "version of PyTorch",
    },
    "rehearsals",
)


@dataclass(frozen=True)
class Stage:
    """A command of specbench, and its budget: GB of anonymous memory, and seconds."""

    name: str
    arguments: tuple[str, ...]
    memory: float
    seconds: float

    @property
    def command(self) -> str:
        return shlex.join(["specbench", *self.arguments])


Runner = Callable[[Stage, Path], Measured]


#: Folder of a published drafter -> its drafter and a method with it.
_DRAFTERS = {"eagle": ("eagle", "eagle1"), "draft": ("draft_model", "sd")}


def _is_whole(model: str) -> bool:
    """Whether all commands run on a model, or it is loaded and takes a step."""
    return "text" in registry.model_sources()[model].parts


def stages(model: str, small: bool) -> Iterator[Stage]:
    """The commands of docs/models.md and docs/metrics.md for a model, in their order, with their budgets."""
    reduced = ("reduced=true",) if small else ()
    drafter, method = next((_DRAFTERS[part] for part in registry.model_sources()[model].drafters), ("", "vanilla"))
    fetch = ("fetch", f"model={model}", *((f"drafter={drafter}",) if drafter else ()), "--yes")
    yield Stage("fetch model", fetch, 2, 1800)
    if not _is_whole(model):
        yield Stage("load", ("load", f"model={model}", f"method={method}", *reduced), 24, 600)
        bench = ("bench.images=0", "bench.steps=1", "bench.nodes=1", *(() if small else ("bench.context=256",)))
        # The target's step alone: the drafter is loaded above, and a step with it has not been tried at this size.
        yield Stage("step", ("bench", f"model={model}", "method=vanilla", *reduced, *bench), 24, 1800)
        return
    names = SMALL_METRICS if small else "coco"
    short_run = ("n=1", "warmup=0", *reduced)  # a CPU takes minutes for an image
    run = ("run", "protocol=coolsd_table1", f"model={model}", "method=cool_sd", "delta=1.1", *short_run)
    yield Stage("fetch metrics", ("fetch", f"metrics={names.strip('[]')}", "--yes"), 2, 1800)
    yield Stage("fetch data", ("fetch", "data=coco2017", "--yes"), 2, 600)
    if not small:
        images = "home/data/coco2017/val2017"
        yield Stage("reference", ("reference", "data=coco2017", f"images={images}"), 4, 7200)
    yield Stage("load", ("load", f"model={model}", "method=cool_sd", *reduced), 20, 600)
    yield Stage("run", (*run, *((f"metrics={SMALL_METRICS}",) if small else ()), "out=first"), 20, 7200)
    yield Stage("evaluate", ("evaluate", "first", f"metrics={names}"), 20, 1800)
    table = ("tables", "coolsd_table3", "--model", model, "--n", "1", *(("--no-run",) if small else ()))
    yield Stage("tables", table, 20, 7200)


# --- files ------------------------------------------------------------------------------------------------------------


def make_files(model: str, small: bool, photographs: int, folder: Path) -> tuple[Hub, dict[str, Any]]:
    """Makes the files of a model, and with LlamaGen also the files of the metrics and of COCO. Returns the hub that
    serves them, and the tables that replace the pinned ones in `rehearsal.command`, without the addresses."""
    from rehearsal import command, evaluators, files

    hub, entry = Hub(), registry.model_sources()[model]
    tables: dict[str, Any] = {"files": {}, "data": {}, "releases": "", "inception": "", "small": small}
    wanted = {**entry.parts, **entry.drafters}
    with ExitStack() as stack:
        if small:
            stack.enter_context(command.small_evaluators())
        todo = [(wanted[name], build) for name, build in files.of_model(model, small).items() if name in wanted]
        if _is_whole(model):
            todo += [(registry.evaluators()[name], evaluators.FILES[name]) for name in _evaluators(small)]
            archives = {file.name: file.size for file in registry.data_sources()["coco2017"].files}
            evaluators.coco2017(folder / "coco2017", photographs, {} if small else archives)
        for part, build in todo:
            place = folder / part.repository
            build(place / part.subfolder)
            hub.add(part.repository, place)
            names = {Path(name).name: path for name, path in hub.repositories[part.repository].items()}
            tables["files"][part.repository] = {name: _checksums(hub, path, part) for name, path in names.items()}
            if part.sizes:
                hub.plain |= {f"/{part.repository}/releases/download/{part.revision}/{n}": p for n, p in names.items()}
                tables["inception"] = next(iter(tables["files"][part.repository].values()))["sha256"]
    for path in sorted((folder / "coco2017").glob("*.zip")):
        hub.plain[f"/coco/{path.name}"] = path
    return hub, tables


def _evaluators(small: bool) -> list[str]:
    """The folders of the metrics' evaluators."""
    return ["clip_b32", "image_reward", "image_reward/text", "hpsv2", *([] if small else ["inception"])]


def _checksums(hub: Hub, path: Path, part: sources.Part) -> dict[str, Any]:
    checksums: dict[str, Any] = {"size": path.stat().st_size, "sha256": hub.sha256(path)}
    if path.name in part.md5:
        with path.open("rb") as f:
            checksums["md5"] = hashlib.file_digest(f, "md5").hexdigest()
    return checksums


def addressed(hub: Hub, tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with the addresses of a hub that is serving."""
    served = {}
    for file in registry.data_sources()["coco2017"].files:
        if path := hub.plain.get(f"/coco/{file.name}"):
            entry = {"address": f"{hub.root}/coco/{file.name}", "size": path.stat().st_size, "sha256": hub.sha256(path)}
            served.setdefault("coco2017", []).append(entry)
    return {**tables, "data": served, "releases": hub.root}


# --- running ----------------------------------------------------------------------------------------------------------


def processes_of(work: Path, root: str) -> Runner:
    """Runs each stage as a process in the work folder, with homes there and the hub at `root`."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": root,
        "HF_HOME": str(work / "hf"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "SPECBENCH_HOME": str(work / "home"),
        "HOME": str(work),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
    for name in ("HF_HUB_OFFLINE", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # a user's commands use every core
        environment.pop(name, None)

    def run(stage: Stage, log: Path) -> Measured:
        wrapper = [sys.executable, str(ROOT / "scripts/rehearsal/command.py"), str(work / _REPLACED)]
        most = stage.memory * GB
        return processes.run([*wrapper, *stage.arguments], work, environment, log, most, stage.seconds)

    return run


def rehearse(
    todo: Sequence[Stage], run: Runner, logs: Path, more: Mapping[str, Any], out: Path | None
) -> list[dict[str, Any]]:
    """Runs stages until one fails, prints a line for each, and returns their rows; more: cells that all have."""
    rows = []
    for stage in todo:
        print(f"{stage.name}: {stage.command}", flush=True)
        log = logs / f"{stage.name.replace(' ', '_')}.log"
        measured = run(stage, log)
        text = log.read_text(encoding="utf-8", errors="replace")
        networks = int(m[1]) if (m := re.search(r"^loaded (\d+) bytes", text, re.MULTILINE)) else 0
        budget = networks + LOADING if networks else stage.memory * GB
        done = measured.code in (0, 3)  # 3: a distance of one image has no value
        ok = done and measured.anonymous <= budget and measured.seconds <= stage.seconds
        rows.append(
            {
                "time": provenance.utc(),
                "stage": stage.name,
                "command": stage.command,
                "seconds": f"{measured.seconds:.1f}",
                "budget_s": f"{stage.seconds:g}",
                "anonymous_gb": f"{measured.anonymous / GB:.2f}",
                "budget_gb": f"{budget / GB:.2f}",
                "resident_gb": f"{measured.resident / GB:.2f}",
                "networks_gb": f"{networks / GB:.2f}" if networks else "",
                "ok": str(ok).lower(),
                **more,
            }
        )
        if out is not None:
            ROWS.append(out, rows[-1])
        memory = (
            f"{measured.anonymous / GB:.2f} of {budget / GB:.2f} GB, {measured.resident / GB:.2f} GB with mapped files"
        )
        print(f"  {'ok' if ok else 'FAILED'}: {measured.seconds:.0f} of {stage.seconds:g} s, {memory}", flush=True)
        if not ok:
            why = f"exit code {measured.code}{', stopped at its budget' if measured.stopped else ''}"
            print(f"  {why}; the end of its output:\n{text[-3000:]}", flush=True)
        if not done:
            break
    return rows


def machine() -> dict[str, Any]:
    import torch

    where = origin.environment(torch.device("cpu"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"commit": where["commit"], "processor": where["device_name"], "cores": cores, "torch": where["torch"]}


def _parser() -> argparse.ArgumentParser:
    from rehearsal.files import FAMILIES

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", choices=list(FAMILIES))
    p.add_argument("--scale", choices=["full", "small"], default="full")
    p.add_argument("--photographs", type=int, default=0, help="of COCO; default: 5000, or 4 at the small scale")
    p.add_argument("--memory", type=float, default=1e3, help="GB at which a command is stopped, below its budget, too")
    p.add_argument("--work", type=Path, help="folder for all files (default: a temporary one)")
    p.add_argument("--keep", action="store_true", help="keep that folder")
    p.add_argument("--stages", metavar="NAME,NAME", help="only these, in a kept folder; not those that fetch")
    p.add_argument("--out", type=Path, help="a .csv file for the rows, such as results/rehearsal.csv")
    return p


def main(arguments: Sequence[str] | None = None, runner: Callable[[Path, str], Runner] = processes_of) -> int:
    """runner: a function of the work folder and the hub's address; tests replace it."""
    args = _parser().parse_args(arguments)
    small = args.scale == "small"
    work = (args.work or Path(tempfile.mkdtemp(prefix="rehearsal-"))).resolve()
    todo = [replace(s, memory=min(s.memory, args.memory)) for s in stages(args.model, small)]
    if args.stages is not None:
        names, chosen = [s.name for s in todo if not s.name.startswith("fetch")], args.stages.split(",")
        if not set(chosen) <= set(names) or not (work / _REPLACED).is_file():
            _parser().error(f"--stages takes {', '.join(names)}, and --work the folder of a rehearsal with --keep")
        todo = [stage for stage in todo if stage.name in chosen]
    more = {"model": args.model, "scale": args.scale, **machine()}
    try:
        with ExitStack() as stack:
            root = ""
            if args.stages is None:
                print(f"making the files of {args.model} in {work}", flush=True)
                hub, tables = make_files(args.model, small, args.photographs or (4 if small else 5000), work / "hub")
                root = stack.enter_context(hub.serving()).root
                (work / _REPLACED).write_text(json.dumps(addressed(hub, tables)))
                print(f"serving {format_size(hub.bytes)} at {root}", flush=True)
            rows = rehearse(todo, runner(work, root), work, more, args.out)
    finally:
        if not args.keep:
            shutil.rmtree(work, ignore_errors=True)
    good = len(rows) == len(todo) and all(row["ok"] == "true" for row in rows)
    print(f"{args.model}, {args.scale}: {'passed' if good else 'FAILED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
