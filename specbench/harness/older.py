"""Folders of runs that were written before scores had a journal. To be deleted after 2027-11, with its calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from PIL import Image

from specbench.config import indices, parameters
from specbench.harness.folder import RunFolder
from specbench.rows.csv_files import read_rows
from specbench.rows.journal import Record, read_of
from specbench.rows.scores import Score, ScoreLine, fingerprint, prompts_fingerprint
from specbench.storage.files import content, sha256


def scores(folder: RunFolder) -> list[ScoreLine]:
    """The scores in the row of such a folder, without their notes; none in another folder, and where the row is of
    other images."""
    if folder.scores.exists() or not folder.row.is_file() or not folder.memory_file.is_file() or folder.memory().config:
        return []
    held, [row, *_] = json.loads(content(folder.memory_file)), read_rows(folder.row)
    images = read_of(folder.records, indices.of_row({**row, "n": row["n"] or 0}))
    if images is None or held.get("images") != sha256("".join(r.sha256 for r in images), 16):
        return []
    of = len(images), fingerprint(r.sha256 for r in images), prompts_fingerprint(images)
    by = row["specbench"] or "", row["commit"] or "", row["time"]
    found = []
    for name in set(held.get("metrics", {})).intersection(parameters.single_metrics()):
        columns = {
            column: Score(row[column], row[f"{column}_stderr"], row[f"{column}_backend"] or "", "")
            for column in parameters.metric_columns(name)
        }
        found.append(ScoreLine(name, "method", *of, held["metrics"][name], columns, [], *by))
    return found


def adopt_scores(folder: RunFolder) -> None:
    """Appends the values of `scores` to the new journal of such a folder."""
    lines, journal = scores(folder), folder.open_scores()
    for line in lines:
        if line.is_measured:
            journal.add(line)


def with_sizes(images: Sequence[Record], folder: Path) -> list[Record]:
    """The records of images that a server decoded, with the sizes that they lack."""
    found = []
    for record in images:
        if record.request_s is not None and record.size is None:
            with Image.open(folder / record.image) as opened:
                record = replace(record, size=list(opened.size))
        found.append(record)
    return found
