"""Results of checks: a JSON line each, written at once, and a table of them all."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

#: The file of tuned tiles, next to the lines.
TILES = "gpu_tiles.json"
#: What a row has of a line, and of its run's first line, the environment.
OF_LINE = "stage check result measured unit gate floor share_of_bandwidth vanilla_ms of_vanilla note seconds".split()
OF_RUN = "device_name driver torch triton python commit time".split()
OUTCOMES = {True: "PASS", False: "FAIL", None: "SKIP"}
#: A check: its name, and a function that returns its measurements. "ok": False in it, or an exception, is a failure.
Check = tuple[str, Callable[[], dict[str, Any]]]


class SkippedError(Exception):
    """A check cannot be done here; the message says why."""


class DeviceLostError(Exception):
    """The device gives errors, so this process can check nothing more."""


def dry(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a check without a device: its times mean nothing, and only a failure counts."""
    line = check()
    if line.get("ok") is False:
        return line
    raise SkippedError("there is no CUDA device; done on small shapes, and not timed")


def append(file: Path, line: dict[str, Any]) -> None:
    """Append a line and flush it, so that a later failure does not lose it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as f:
        f.write(json.dumps(line) + "\n")
        f.flush()


def read(file: Path, run: str) -> list[dict[str, Any]]:
    """The lines of a run; a line that was cut off is left out."""
    lines = []
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if line.get("run") == run:
            lines.append(line)
    return lines


def write_rows(files: Iterable[Path], out: Path) -> None:
    """The lines of some files as rows of a CSV. A check that was repeated, kernel by kernel, has one row."""
    from specbench.storage.csv_text import csv_text

    rows: list[dict[str, Any]] = []
    for file in files:
        lines = [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]
        environments = {line["run"]: line for line in lines if line["stage"] == 0}
        for line in lines:
            if line["stage"] == 0 or line.get("launch_blocking"):
                continue
            cells = {**line, "result": OUTCOMES[line["ok"]], "note": (line.get("note") or "").partition("\n")[0]}
            rows.append({name: _cell(cells.get(name)) for name in OF_LINE})
            rows[-1] |= {name: environments[line["run"]].get(name) for name in OF_RUN}
    out.write_text(csv_text([*OF_LINE, *OF_RUN], rows), encoding="utf-8")


def _cell(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def describe_environment(file: Path, run: str, cuda: bool) -> None:
    """The first line of a run: versions, driver, device and commit."""
    if any(line["stage"] == 0 for line in read(file, run)):
        return
    import torch
    import triton

    from specbench.storage.origin import environment

    here = environment(torch.device("cuda" if cuda else "cpu"))
    here |= {"triton": triton.__version__, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    append(file, {"run": run, "stage": 0, "check": "environment", "ok": True, **here})
    print("  ".join(f"{name} {value}" for name, value in here.items()), flush=True)


def carry_out(checks: Iterable[Check], stage: int, run: str, file: Path, done: set[str], again: bool) -> None:
    """Do the checks whose names are not in `done`, and print one line per check. again: note that kernels were started
    one by one.

    Raises:
        DeviceLostError: after a check whose error no later one survives.
    """
    for name, check in checks:
        if name in done:
            continue
        began = time.perf_counter()
        line: dict[str, Any] = {"run": run, "stage": stage, "check": name, "ok": True}
        lost = False
        try:
            line |= check()
        except SkippedError as e:
            line |= {"ok": None, "note": f"SKIPPED: {e}"}
        except Exception as e:
            where = "".join(traceback.format_exception(e))[-4000:]
            line |= {"ok": False, "note": f"{type(e).__name__}: {e}"[:1500], "traceback": where}
            lost = "CUDA" in str(e) or "Accelerator" in type(e).__name__
        line |= {"seconds": round(time.perf_counter() - began, 3)}
        line |= {"launch_blocking": True} if again else {}
        append(file, line)
        print(described(line), flush=True)
        if lost:
            raise DeviceLostError(name)


def described(line: dict[str, Any]) -> str:
    """A line of the table: PASS, FAIL or SKIP, and for a gate what was measured, its gate and its floor."""
    outcome = OUTCOMES[line["ok"]]
    values = [f"{line['measured']:.3f} {line.get('unit', '')}".strip()] if line.get("measured") is not None else []
    values += [f"{name} {line[name]:.3f}" for name in ("gate", "aim", "floor") if line.get(name) is not None]
    values += [str(line["device"])] if line.get("device") else []
    values += [str(line["note"]).splitlines()[0][:160]] if line.get("note") else []
    return f"{outcome}  stage {line['stage']}  {line['check']:44s}  {'  '.join(values)}".rstrip()


def summary(lines: list[dict[str, Any]]) -> str:
    """The table of a run: what failed, every gate and experiment, and how many checks passed of each stage."""
    # a check that was repeated, kernel by kernel, failed all the same
    failed = [line for line in lines if line["ok"] is False]
    gates = [line for line in lines if line["ok"] and (line["stage"] == 4 or line.get("ratio"))]
    skipped = [line for line in lines if line["ok"] is None]
    rows = [described(line) for line in (*failed, *gates, *skipped)]
    for stage in sorted({line["stage"] for line in lines} - {0}):
        outcomes = [line["ok"] for line in lines if line["stage"] == stage]
        passed, failed, left_out = (outcomes.count(outcome) for outcome in (True, False, None))
        rows.append(f"stage {stage}: {passed} passed, {failed} failed, {left_out} skipped")
    return "\n".join(rows)
