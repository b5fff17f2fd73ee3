"""Fetches missing files: it lists them with sizes and licences, and downloads them after the user has agreed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from specbench.errors import UsageError
from specbench.storage import downloads, sources
from specbench.storage.downloads import FetchRecord
from specbench.storage.files import format_size, size
from specbench.storage.sources import Data, Part


def parts(
    title: str, wanted: Mapping[str, Part], folder: Path, revision: str | None, yes: bool, other_folder: str
) -> bool:
    """Fetch the parts that `folder` does not contain. Returns whether anything was missing.

    revision: the revision of the target, if the user gave one. other_folder: the argument that names another folder,
    for messages.
    """
    record = FetchRecord(folder)
    todo = {
        name: part
        for name, part in wanted.items()
        if not downloads.is_fetched(record, name, part, folder, revision if name == "target" else None, other_folder)
    }
    if not todo:
        print(f"{title}: nothing to fetch, {', '.join(f'{name}/' for name in wanted)} are in {folder}")
        return False
    by_hand = f"put {sources.listing(todo)} of {folder}"
    listed = {name: downloads.list_part(name, part, record, by_hand) for name, part in todo.items()}
    total = 0
    print(f"{title} -> {folder}")
    for name, listing in listed.items():
        at = (
            f"commit {listing.commit}"
            if listing.part.pinned
            else f"{listing.part.revision}, now commit {listing.commit}"
        )
        at = f"release {listing.commit}" if listing.part.sizes else at
        at = f"the file of {listing.commit}" if listing.part.address else at
        print(f"  {name}/: {listing.part.repository}, {at} ({listing.part.licence})")
        for file, published in listing.files.items():
            present = size(folder / name / file)
            if present not in (None, published.size):  # the user's file, which is never overwritten
                raise UsageError(
                    f"{folder / name / file} has {present} bytes, but the file of {listing.part.repository} has"
                    f" {published.size}: move it away, or name another folder with {other_folder}"
                )
            total += published.size if present is None else 0
            print(f"    {format_size(published.size):>9}  {file}{'' if present is None else '  (exists)'}")
    for licence, meaning in sources.NON_COMMERCIAL.items():
        if names := [f"{name}/" for name, listing in listed.items() if listing.part.licence == licence]:
            print(f"  licence of {', '.join(names)}: {licence}, {meaning}")
    _confirm(folder, total, total, yes, other_folder)
    with downloads.staged(folder) as staging:
        for name, listing in listed.items():
            downloads.fetch_part(record, folder, staging, name, listing)
    return True


def data_set(name: str, data: Data, folder: Path, yes: bool) -> None:
    """Fetch the missing files of a data set into `folder`."""
    record = FetchRecord(folder)
    todo = [file for file in data.files if not downloads.is_unpacked(record, file, folder)]
    if not todo:
        print(f"{name}: nothing to fetch, it is in {folder}")
        return
    for file in todo:
        if not file.unpack and size(folder / file.name) not in (None, file.size):
            raise UsageError(
                f"{folder / file.name} is not the published file: move it away, or use another data_dir=DIR"
            )
    print(f"{name} -> {folder}")
    for file in todo:
        print(f"    {format_size(file.size):>9}  {file.address}{' (unpacked, then removed)' if file.unpack else ''}")
    print(f"  licence: {data.licence}")
    partial = [folder / downloads.STAGING / f"{file.name}{end}" for file in todo for end in ("", ".part")]
    missing = max(0, sum(file.size for file in todo) - sum(size(path) or 0 for path in partial))
    # An archive and its unpacked content exist together for a while, and the compression is small.
    _confirm(folder, missing, missing + sum(file.size for file in todo if file.unpack), yes, "data_dir=DIR")
    with downloads.staged(folder) as staging:
        for file in todo:
            downloads.fetch_file(record, folder, staging, file, data)
    print(f"{name} is in {folder}")


def _confirm(folder: Path, missing: int, needed: int, yes: bool, other_folder: str) -> None:
    """Check the disk space, then ask for consent. Raises UsageError if the space or the consent is missing."""
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(above).free
    print(f"  to fetch: {format_size(missing)}; free disk space: {format_size(free)}", flush=True)
    if needed > free:
        raise UsageError(
            f"{folder} has {format_size(free)} of disk space, but {format_size(needed)} are needed: free some, or use"
            f" {other_folder}"
        )
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("there is no terminal to ask on: add --yes to fetch this")
    try:
        answer = input("fetch? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was fetched")
