"""Rows of runs, and drafters, as repositories of a hub: their files and their card.

Rows become a data set: rows.csv and, for every run, its row, configuration, records and contact sheet, so that
`specbench compare`, `breakdown` and `report` can read a downloaded copy. Locations on this machine are removed.
A drafter becomes a model: its weights and the card that `specbench train` wrote.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specbench.config import parameters, registry
from specbench.errors import RunError, UsageError, plain
from specbench.rows import summary
from specbench.rows.columns import COLUMNS, SHOWN, stderr_of
from specbench.rows.csv_files import to_csv
from specbench.rows.journal import TIMINGS
from specbench.rows.provenance import RunMetadata
from specbench.rows.shown import shown
from specbench.storage.files import sha256, write_atomically
from specbench.storage.package import __version__
from specbench.tables import report

#: Files of a run in a data set; images are optional.
_OF_RUN = ("row.csv", "run.json", "records.jsonl", "baseline.jsonl", TIMINGS, "scores.jsonl", "contact_sheet.png")
#: Parameters that name locations on this machine.
_PLACES = ("out", "data_dir", "metrics_dir", "reference", "ray_address", "log_dir", "drafter_weights")
#: Columns of the card's table; shown if some row has a value.
_COLUMNS = (
    "step_compression",
    "acceptance_rate",
    "speedup_latency",
    *parameters.found_choices().columns,
)


@dataclass(frozen=True)
class Upload:
    """kind: of the repository, "dataset" or "model"; files: path in it -> content, or the file with the content."""

    kind: str
    card: str
    files: Mapping[str, bytes | Path]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(f.stat().st_size if isinstance(f, Path) else len(f) for f in self.files.values())


def prepare(paths: Sequence[Path], images: bool) -> Upload:
    """The upload for some paths: files and folders of rows, or the folder of one drafter. images: include the images of
    runs. UsageError if there is neither."""
    drafters = [path for path in paths if (path / registry.DRAFTER_FILE).is_file()]
    if drafters and len(paths) > 1:
        raise UsageError(f"{drafters[0]} is a drafter, which needs its own repository: push it alone")
    return _of_drafter(drafters[0]) if drafters else _of_rows(paths, images)


def write(upload: Upload, folder: Path) -> None:
    """Writes the files into a new or an empty folder. UsageError if it has files or cannot be written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not an empty folder; choose another to=")
    try:
        for name, content in {"README.md": upload.card.encode(), **upload.files}.items():
            write_atomically(folder / name, content if isinstance(content, bytes) else content.read_bytes())
    except OSError as e:
        raise UsageError(f"cannot write into {folder} ({e.strerror}); choose another to=") from None


def send(upload: Upload, repository: str, private: bool) -> str:
    """Creates the repository if necessary, commits the files, and returns its address. UsageError if the hub refuses
    the user, RunError if it fails."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    files = {"README.md": upload.card.encode(), **upload.files}
    operations = [
        CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
        for name, content in files.items()
    ]
    try:
        address = api.create_repo(repository, repo_type=upload.kind, private=private, exist_ok=True)
        message = f"specbench {__version__}: {len(files)} files"
        api.create_commit(repository, operations, commit_message=message, repo_type=upload.kind)
    except Exception as e:  # the client's exceptions differ from version to version
        text = " ".join(str(e).split())[:300]
        status = getattr(getattr(e, "response", None), "status_code", None)
        if status in (401, 403):
            raise UsageError(f"the hub does not let you write {repository} ({text}): run `hf auth login`") from e
        raise RunError(f"cannot push to {repository} ({type(e).__name__}: {text}); the same command tries again") from e
    return str(address)


def _of_rows(paths: Sequence[Path], images: bool) -> Upload:
    content = report.gather(paths, [], 0)
    if not content.rows:
        raise UsageError("there are audits, but no rows of runs")
    rows = [{name: row[name] for name in COLUMNS} for row in content.rows]
    files: dict[str, bytes | Path] = {"rows.csv": to_csv(rows).encode()}
    shown = {str(row["run_id"]) for row in rows}
    for folder, run_id in content.folders:
        if run_id in shown:
            name = "".join(c if c.isalnum() or c in "-_" else "_" for c in run_id)
            files |= {f"runs/{name}/{path}": data for path, data in _of_run(folder, images).items()}
    return Upload("dataset", _rows_card(content.rows), files)


def _of_run(folder: Path, images: bool) -> dict[str, bytes | Path]:
    files: dict[str, bytes | Path] = {name: folder / name for name in _OF_RUN if (folder / name).is_file()}
    if images:
        files |= {p.relative_to(folder).as_posix(): p for part in ("images", "baseline")
                  for p in sorted((folder / part).glob("*.png"))}  # fmt: skip
    try:
        cfg = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return files
    if isinstance(cfg, dict):
        public = {name: None if name in _PLACES and not _is_shipped(value) else value for name, value in cfg.items()}
        if str(public.get("weights", "")).startswith(("/", ".", "~")):
            public["weights"] = "folder"
        text = yaml.safe_dump(public, sort_keys=False, allow_unicode=True).encode()
        files["config.yaml"] = text
        files["run.json"] = RunMetadata.read(folder / "run.json").changed(config=(sha256(text, 16),)).content()
    return files


def _is_shipped(value: object) -> bool:
    """Whether a value names weights that are part of specbench, such as "embedded:guided"."""
    return isinstance(value, str) and value.startswith("embedded:")


def _rows_card(rows: Sequence[Mapping[str, Any]]) -> str:
    present = [name for name in _COLUMNS if any(row.get(name) is not None for row in rows)]
    head = ["model", "method", "prompts", *(SHOWN[name].title for name in present)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        values = (_value(row, name) for name in present)
        cells = [row["model"], report.label(row), f"{row['data']} ({row['n']})", *values]
        lines.append(f"| {' | '.join(_cell(text) for text in cells)} |")
    commands = "\n".join(plain(row["command"]) for row in rows)
    return f"""\
---
tags:
- specbench
configs:
- config_name: rows
  data_files: rows.csv
---

# Runs of specbench

Speculative decoding of autoregressive image models, measured by specbench {__version__}. ± is the standard error.

{chr(10).join(lines)}

`rows.csv` has every column, including commit, device, seeds and the backend of each metric. `runs/` has the records of
each image; `specbench compare`, `specbench breakdown` and `specbench report` can read a downloaded copy.

```
{commands}
```
"""


def _value(row: Mapping[str, Any], name: str) -> str:
    row = shown(row)
    if row.get(name) is None:
        return ""
    return summary.with_error(row[name], row.get(stderr_of(name)), SHOWN[name].decimals)


def _cell(text: object) -> str:
    return plain(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _of_drafter(folder: Path) -> Upload:
    card = folder / "card.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else f"# {folder.name}\n"
    head = "---\ntags:\n- specbench\n- speculative-decoding\nlibrary_name: specbench\n---\n\n"
    use = f"\n\nUse: download `{registry.DRAFTER_FILE}` into a folder and set `drafter_weights=FOLDER`.\n"
    return Upload("model", head + text + use, {registry.DRAFTER_FILE: folder / registry.DRAFTER_FILE})
