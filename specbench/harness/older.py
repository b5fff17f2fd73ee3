"""Folders of runs that were written before scores had a journal. To be deleted after 2027-11, with its three calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from PIL import Image

from specbench.config import parameters
from specbench.harness.folder import RunFolder, RunRecords
from specbench.rows.csv_files import read_rows
from specbench.rows.journal import Record
from specbench.rows.scores import Score, ScoreLine, fingerprint, prompts_fingerprint
from specbench.storage.files import sha256


def adopt_scores(folder: RunFolder, records: RunRecords) -> None:
    """Appends the scores in the row of such a folder to its new journal, without their notes, if the row covers the
    images that are there."""
    if folder.scores.exists() or not folder.row.is_file() or not folder.memory_file.is_file() or folder.memory().config:
        return
    held, [row, *_] = json.loads(folder.memory_file.read_bytes()), read_rows(folder.row)
    n, bases = row["n"], held.get("metrics", {})
    if not n or records.method.missing(n, records.each):
        return
    mine = records.method.first(n, records.each)
    if held.get("images") != sha256("".join(record.sha256 for record in mine), 16):
        return
    images, prompts, journal = fingerprint(r.sha256 for r in mine), prompts_fingerprint(mine), folder.open_scores()
    for name in parameters.single_metrics():
        columns = {
            c: Score(row[c], row[f"{c}_stderr"], row[f"{c}_backend"] or "", "") for c in parameters.metric_columns(name)
        }
        if name in bases and any(one.value is not None for one in columns.values()):
            plugins = parameters.plugins_of({"metrics": [name]})
            by = plugins, row["specbench"] or "", row["commit"] or "", row["time"]
            journal.add(ScoreLine(name, "method", len(mine), images, prompts, bases[name], columns, *by))


def with_sizes(images: Sequence[Record], folder: Path) -> list[Record]:
    """The records of images that a server decoded, with the sizes that they lack."""
    found = []
    for record in images:
        if record.request_s is not None and record.size is None:
            with Image.open(folder / record.image) as opened:
                record = replace(record, size=list(opened.size))
        found.append(record)
    return found
