"""The input of a comparison: the records of a run's pass over its prompts, and the run's metadata. The files are not
trusted: every fault in them is a UsageError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbench.config import parameters
from specbench.errors import UsageError, plain
from specbench.rows import shown, summary
from specbench.rows.journal import TIMINGS, Record, TimingJournal, read_records
from specbench.rows.provenance import MAY_CHANGE, RunMemory
from specbench.storage import home
from specbench.storage.reading import read_yaml


@dataclass(frozen=True)
class ScoredPass:
    """One pass of a run over its prompts: the method's, or vanilla's next to it. `argument`: the user's."""

    argument: str
    folder: Path
    baseline: bool
    cfg: Mapping[str, Any]
    run_id: str
    sessions: Mapping[str, Mapping[str, Any]]
    records: Mapping[int, Record] = field(repr=False)
    again: Sequence[Record] = field(default=(), repr=False)  # images of both passes that were timed again

    @property
    def method(self) -> str:
        return "vanilla" if self.baseline else plain(self.cfg["method"])

    @property
    def path(self) -> str:
        """The folder, and /baseline behind it for the vanilla images."""
        return plain(self.folder / "baseline" if self.baseline else self.folder)


def read(argument: str) -> ScoredPass:
    """The pass that an argument names: a run's folder, DIR/baseline, or one of their .jsonl files.

    Raises UsageError where there is none, or where it is damaged.
    """
    path = home.expanded(argument)
    candidates = {path / "records.jsonl": True, path.parent / "baseline.jsonl": path.name == "baseline"}
    candidates |= {path: path.name in ("records.jsonl", "baseline.jsonl")}
    journal = next((p for p, meant in candidates.items() if meant and p.is_file()), None)
    if journal is None:
        raise UsageError(_no_run(path))
    cfg, memory = _config(journal.with_name("config.yaml")), RunMemory.read(journal.with_name("run.json"))
    baseline = journal.name == "baseline.jsonl"
    again = TimingJournal(journal.with_name(TIMINGS)).lines
    run_id, sessions, records = plain(memory.run_id), memory.sessions, _records(journal)
    return ScoredPass(argument, journal.parent, baseline, cfg, run_id, sessions, records, again)


def _no_run(path: Path) -> str:
    """Why there is no pass in a folder, and what to do."""
    if path.name == "baseline" and (path.parent / "records.jsonl").is_file():
        return f"the run in {path.parent} decoded no baseline; run it again with baseline=true"
    if not path.exists():
        return f"there is no {path}; name the folder of a run"
    inside = sorted(path.glob("*/records.jsonl"))
    if inside:
        return f"{path} is not a run but holds {len(inside)} of them; name one, such as {inside[0].parent}"
    return f"{path} has no records of a run (records.jsonl); name the folder of a run that decoded something"


def _config(path: Path) -> dict[str, Any]:
    """The configuration of a run; its method, drafter and rule are strings."""
    found = read_yaml(path, "compare whole folders of runs")
    if all(isinstance(found.get(name), str) for name in ("method", "drafter", "rule")):
        return {"verification": "token"} | found  # older ones lack it
    raise UsageError(f"{path} is not the configuration of a run; compare folders as specbench run wrote them")


def unsteady(one: ScoredPass) -> str:
    """Why the timing of the run of a pass does not hold; empty where it does, or cannot be told."""
    both = [journal for name in ("records", "baseline") if (journal := one.folder / f"{name}.jsonl").is_file()]
    if len(both) < 2:
        return ""
    mine, vanilla = map(_records, both)
    shared = sorted(mine.keys() & vanilla.keys())
    return shown.unsteady(summary.versus([mine[i] for i in shared], [vanilla[i] for i in shared], one.again))


def _records(path: Path) -> dict[int, Record]:
    """The records of a pass by index. Raises UsageError for one that is damaged, and for two of one index."""
    try:
        read = read_records(path)
    except OSError as e:
        raise UsageError(f"cannot read {path} ({e.strerror}); name another folder") from None
    found: dict[int, Record] = {}
    for record in read:
        if found.setdefault(record.index, record) != record:
            raise UsageError(f"{path} holds two records of index {record.index}; remove one of the lines")
    return found


#: What a timing depends on besides the method: parameters of a run, and facts of its processes.
_OF_TIMINGS = ("device", "device_name", "dtype", "engine", "batch", "warmup", "torch", "driver", "threads")
_FACTS = ("weights", "commit", "device", "device_name", "torch", "driver", "threads")
_LONGEST = 40  # characters of a value


def names(a: ScoredPass, b: ScoredPass) -> tuple[str, str]:
    """The labels of two passes: their methods and, where these are equal, what else differs."""
    labels = [a.method, b.method]
    if labels[0] == labels[1] and not (a.baseline or b.baseline):
        different = [k for k in sorted(parameters.method_parameters()) if a.cfg.get(k) != b.cfg.get(k)]
        for i, one in enumerate((a, b)):
            labels[i] = " ".join([labels[i], *(plain(f"{k}={one.cfg.get(k)}")[:_LONGEST] for k in different)])
    if labels[0] == labels[1]:
        paths = ["/".join(Path(one.path).parts[-2 - one.baseline :]) for one in (a, b)]
        labels = [f"{name} ({path})" for name, path in zip(labels, paths if paths[0] != paths[1] else "AB")]
    return labels[0], labels[1]


def differences(a: ScoredPass, b: ScoredPass, pairs: Sequence[tuple[Record, Record]]) -> list[str]:
    """A sentence on what differs besides the method over these pairs, and what follows; none where nothing differs."""
    mine, theirs = (_facts(one, [two[side] for two in pairs]) for side, one in enumerate((a, b)))
    unlike = [name for name in mine if name in theirs and mine[name] != theirs[name]]
    if not unlike:
        return []
    text = f"A and B differ in more than the method: {_each(unlike, mine, theirs)}."
    if any(name in _OF_TIMINGS for name in unlike):
        text += " Their timings do not compare the methods alone."
    if "seed" in unlike:
        text += " Pairs share the prompt, not the random numbers."
    return [text]


def _each(names: Sequence[str], mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {mine[name][:_LONGEST]} / {theirs[name][:_LONGEST]}" for name in names)


def _facts(one: ScoredPass, mine: Sequence[Record]) -> dict[str, str]:
    """What determines the images and timings of a pass besides its method: name -> value, printable."""
    other = {*parameters.method_parameters(), *MAY_CHANGE, "method", "weights", "prompts", "seed"}
    facts: dict[str, Any] = {name: value for name, value in one.cfg.items() if name not in other}
    sessions = [one.sessions[name] for name in sorted({r.session for r in mine}) if name in one.sessions]
    for name in _FACTS:
        values = {str(session[name]) for session in sessions if session.get(name) not in (None, "")}
        if name == "weights":  # the target's, see registry.weights_label
            values = {value.partition("+")[0] for value in values}
        if values:
            facts[name] = " and ".join(sorted(value[:8] if name == "commit" else value for value in values))
    facts["seed"] = " and ".join(map(str, sorted({r.seed for r in mine})))
    return {name: plain(value) for name, value in facts.items()}
