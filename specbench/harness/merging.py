"""One run of the shards of a run: `specbench merge`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench.config import indices
from specbench.config.run_config import RunConfig
from specbench.errors import UsageError
from specbench.harness.folder import RunFolder, stored
from specbench.harness.run import RunOutcome, rescore
from specbench.rows.journal import Journal, TimingJournal


def merge(shards: Sequence[Path], out: Path, given: Mapping[str, Any]) -> RunOutcome:
    """Makes one run of the finished shards of a run, in a new folder or in one that an interrupted merge left.

    Its records come from the shards, in the order of the prompts; its images are scored as a whole. given: see
    `run.rescore`. Raises UsageError where the shards are not all the parts of one run.
    """
    shards = list(dict.fromkeys(shards))
    configs = [stored(path) for path in shards]
    whole = _whole(shards, configs)
    sessions: dict[str, Mapping[str, Any]] = {}
    for path in shards:
        sessions |= RunFolder(path).memory().sessions
    for name in ("weights", "device"):
        if len(different := sorted({str(session.get(name)) for session in sessions.values()})) > 1:
            raise UsageError(f"the shards were decoded with different {name}: {' and '.join(different[:2])}")
    owners = {index: path for path, config in zip(shards, configs) for index in indices.of_run(config)}
    folder = RunFolder(out)
    with folder.opened():
        folder.compare_config(whole)
        folder.remember(sessions=sessions)
        folder.write_config(whole)
        for journal in (folder.records, folder.baseline_records):
            _copy(journal, shards, owners)
        again = TimingJournal(folder.timings)
        for record in [record for path in shards for record in TimingJournal(RunFolder(path).timings)]:
            if record not in again.lines:
                again.add(record)
    return rescore(out, given)


def _whole(shards: Sequence[Path], configs: Sequence[RunConfig]) -> RunConfig:
    """The configuration of the run of which these are all the shards."""
    whole = configs[0].changed(shard=None)
    for path, config in zip(shards, configs):
        if config["shard"] is None:
            raise UsageError(f"{path} is no shard: its run decoded all prompts")
        if names := sorted(name for name in whole if name != "shard" and config.get(name) != whole[name]):
            raise UsageError(f"{shards[0]} and {path} are of different runs: they differ in {', '.join(names)}")
    parts = int(configs[0]["shard"].partition("/")[2])
    wanted = {f"{part}/{parts}" for part in range(1, min(parts, whole.n) + 1)}
    if missing := wanted.difference(config["shard"] for config in configs):
        raise UsageError(f"shard {min(missing)} is missing: name the folders of all {len(wanted)} shards")
    if len(configs) > len(wanted):
        raise UsageError(f"{len(configs)} folders for {len(wanted)} shards: name each shard once")
    return whole


def _copy(journal: Path, shards: Sequence[Path], owners: Mapping[int, Path]) -> None:
    """Adds to a journal the records of the shards' journals of its name, and their images, in the order of the
    prompts."""
    journals = {path: Journal(file) for path in shards if (file := path / journal.name).is_file()}
    target = Journal(journal)
    for index in sorted(owners, key=lambda i: (indices.prompt_of(i), i)):
        source = journals.get(owners[index])
        if source is not None and index in source and index not in target:
            target.add(source.records[index], source.image(index))
