"""Downloads of published files: listed at a pinned revision, resumed, checked against published digests, recorded.

`transfer` downloads the files, from the hub's repositories and from plain addresses. Unfinished files are in .fetch/ of
the destination and are moved when a folder is complete, so that an existing folder is complete. SOURCE.json next to it
records the origin of every file.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock, Timeout
from tqdm import tqdm

from specbench.errors import UsageError, plain
from specbench.storage.deadline import within
from specbench.storage.files import remove_temporary, sha256_file, size, write_atomically
from specbench.storage.package import __version__
from specbench.storage.sources import Data, File, Part
from specbench.storage.transfer import TIMEOUT, check_online, download, first_line, size_at, transfer

RECORD, STAGING = "SOURCE.json", ".fetch"
RELEASES = "https://github.com"  # the server of GitHub's releases
LONGEST = 60.0  # seconds until a listing must be complete


class FetchRecord:
    """SOURCE.json: the origin of each part of a folder, and the size and SHA-256 of every file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORD
        self.parts: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            try:
                content = json.loads(self.path.read_text(encoding="utf-8"))
                self.parts = {name: dict(entry, files=dict(entry["files"])) for name, entry in content["parts"].items()}
            except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
                raise UsageError(
                    f"{self.path} is damaged ({e}); remove it, and run again to check the existing files"
                ) from e

    def _save(self) -> None:
        text = json.dumps({"specbench": __version__, "parts": self.parts}, indent=1, ensure_ascii=False)
        write_atomically(self.path, text.encode() + b"\n")

    def start(self, name: str, origin: Mapping[str, str]) -> None:
        """Record the origin of a part. Recorded files stay."""
        self.parts.setdefault(name, {"files": {}}).update(origin, complete=False)
        self._save()

    def add(self, name: str, file: str, entry: Mapping[str, Any]) -> None:
        self.parts[name]["files"][file] = dict(entry)
        self._save()

    def finish(self, name: str) -> None:
        self.parts[name].update(complete=True, fetched=datetime.now(UTC).isoformat(timespec="seconds"))
        self._save()


@dataclass(frozen=True)
class HubFile:
    """A file of a repository: its path, its bytes, and the digest that the hub publishes: its SHA-256 (large files), or
    its git blob id (other files)."""

    name: str
    size: int
    sha256: str | None = None
    blob: str | None = None


@dataclass(frozen=True)
class Listing:
    """The content of a part: the commit, and its files by their names in the part's folder."""

    part: Part
    commit: str
    files: Mapping[str, HubFile]


def hub_files(repository: str, revision: str) -> tuple[str, list[HubFile]]:
    """The commit of a revision of a Hugging Face repository, and its files."""
    from huggingface_hub import HfApi

    print(f"asking the Hugging Face hub for {repository} at {revision}", file=sys.stderr, flush=True)
    info = within(
        LONGEST, lambda: HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=TIMEOUT)
    )
    listed = [
        # The blob of a large file contains only a pointer to it.
        HubFile(f.rfilename, int(f.size or 0), f.lfs.sha256 if f.lfs else None, None if f.lfs else f.blob_id)
        for f in info.siblings or ()
        if f.rfilename.isprintable()
    ]
    return plain(info.sha), listed


def hub_download(repository: str, commit: str, name: str, count: int, folder: Path) -> Path:
    """Download a file of `count` bytes from a Hugging Face repository into `folder`."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    return transfer(hf_hub_url(repository, name, revision=commit), folder / name, count, build_hf_headers())


@contextmanager
def _hub_errors(part: Part, revision: str, otherwise: str) -> Iterator[None]:
    """Raise exceptions of the hub's client as UsageError."""
    check_online(part.repository, otherwise)
    try:
        yield
    except UsageError:
        raise
    except Exception as e:  # the client's exceptions differ from version to version
        kinds = {kind.__name__ for kind in type(e).__mro__}
        if "GatedRepoError" in kinds:
            raise UsageError(
                f"{part.repository} requires the acceptance of its terms: accept them on huggingface.co/"
                f"{part.repository}, then run `hf auth login`"
            ) from e
        if "RevisionNotFoundError" in kinds:
            raise UsageError(f"{part.repository} has no revision '{revision}': correct revision=") from e
        if "RepositoryNotFoundError" in kinds:
            raise UsageError(
                f"the Hugging Face hub shows no repository {part.repository}: correct its name, or run `hf auth login`"
            ) from e
        raise UsageError(
            f"cannot get {part.repository} from the Hugging Face hub ({type(e).__name__}: {first_line(e)}): try"
            f" again, or {otherwise}"
        ) from e


def list_part(name: str, part: Part, record: FetchRecord, by_hand: str) -> Listing:
    """The files of a part. If a fetch has started before, its commit is used, even if the branch has moved.

    by_hand: the alternative that an error message names.
    """
    revision = record.parts.get(name, {}).get("commit") or part.revision
    if part.sizes:
        commit, files = revision, [HubFile(file, count) for file, count in part.sizes.items()]
    elif part.address:
        commit, files = revision, [HubFile(file, size_at(f"{part.address}/{file}")) for file in part.files]
    else:
        with _hub_errors(part, revision, by_hand):
            commit, files = hub_files(part.repository, revision)
    inside = {}
    for file in files:
        path = PurePosixPath(file.name)
        if str(path.parent) == (part.subfolder or ".") and not path.name.startswith("."):
            inside[path.name] = file
    chosen: dict[str, HubFile] = {}
    for needed in part.files:
        matches = next((m for p in needed.split("|") if (m := fnmatch.filter(inside, p))), [])
        if not matches:
            otherwise = "choose another revision= or repository=" if name == "target" else by_hand
            raise UsageError(f"{part.repository} at {commit} has no {needed}: {otherwise}")
        chosen |= {file: inside[file] for file in matches}
    for pattern in part.also:
        chosen |= {file: inside[file] for file in fnmatch.filter(inside, pattern)}
    return Listing(part, commit, dict(sorted(chosen.items())))


def is_fetched(record: FetchRecord, name: str, part: Part, folder: Path, revision: str | None, other: str) -> bool:
    """Whether a part is completely fetched, at `revision` if it is not None. UsageError for a part of another origin;
    other: the argument that names another folder, for messages."""
    entry = record.parts.get(name)
    if entry is None:
        return False
    way_out = f"remove it and its entry in {RECORD}, or name another folder with {other}"
    if entry.get("repository") != part.repository:
        raise UsageError(f"{folder / name} comes from {entry.get('repository')}, not {part.repository}: {way_out}")
    known = entry.get("commit"), entry.get("revision")
    if revision is not None and revision not in known:
        raise UsageError(f"{folder / name} is at commit {known[0]}, not at '{revision}': {way_out}")
    return bool(entry.get("complete")) and all(
        size(folder / name / file) == noted["size"] for file, noted in entry["files"].items()
    )


def fetch_part(record: FetchRecord, folder: Path, staging: Path, name: str, listing: Listing) -> None:
    """Download the missing files of a part, check all files that are not checked yet, and move them to `folder`."""
    part, checked, loose = listing.part, staging / "checked" / name, staging / "hub" / name
    origin = {"repository": part.repository, "revision": part.revision, "commit": listing.commit}
    record.start(name, origin | {"licence": part.licence})
    for file, published in listing.files.items():
        finals = folder / name / file, checked / file
        if any(size(path) == published.size for path in finals) and file in record.parts[name]["files"]:
            continue
        path = next((path for path in finals if path.exists()), None)
        if path is None and (part.sizes or part.address):
            folder_of = part.address or f"{RELEASES}/{part.repository}/releases/download/{listing.commit}"
            path = download(f"{folder_of}/{published.name}", loose / published.name, published.size)
        elif path is None:
            with _hub_errors(part, listing.commit, f"put {file} into {folder / name}"):
                path = hub_download(part.repository, listing.commit, published.name, published.size, loose)
        digests = {"sha256": part.sha256.get(file, published.sha256), "md5": part.md5.get(file), "git": published.blob}
        sha256 = _check(path, published.size, digests, staging)
        if path not in finals:
            checked.mkdir(parents=True, exist_ok=True)
            os.replace(path, checked / file)
        record.add(name, file, {"size": published.size, "sha256": sha256})
        print(f"  {name}/{file} is here", flush=True)
    if checked.exists():
        _move(checked, folder / name)
    record.finish(name)
    shutil.rmtree(loose, ignore_errors=True)


def is_unpacked(record: FetchRecord, file: File, folder: Path) -> bool:
    """Whether a file was fetched before, and all of its content still exists."""
    entry = record.parts.get(file.name)
    if entry is None or not entry.get("complete") or entry.get("sha256") != file.sha256:
        return False
    counts = {pattern: len(list(folder.glob(pattern))) for pattern in file.unpack or (file.name,)}
    return all(pattern in entry["files"] and n >= entry["files"][pattern]["count"] for pattern, n in counts.items())


def fetch_file(record: FetchRecord, folder: Path, staging: Path, file: File, data: Data) -> None:
    """Download a file of a data set, check it, and move it, or its unpacked content, to `folder`."""
    record.start(file.name, {"address": file.address, "sha256": file.sha256, "licence": data.licence})
    path = folder / file.name
    if file.unpack or not path.exists():
        path = download(file.address, staging / file.name, file.size)
    _check(path, file.size, {"sha256": file.sha256}, staging)
    if file.unpack:
        content = _unpack(path, file.unpack, staging / "checked")
        _move(staging / "checked", folder)
        path.unlink()
    else:
        content = {file.name: {"count": 1, "size": file.size}}
        os.replace(path, folder / file.name)
    record.parts[file.name]["files"] = content
    record.finish(file.name)
    print(f"  {file.name} is here", flush=True)


def _unpack(archive: Path, patterns: Sequence[str], into: Path) -> dict[str, dict[str, int]]:
    """Extract the members that match the patterns. Returns the number and the bytes of the members for each pattern."""
    counts = {}
    try:
        with zipfile.ZipFile(archive) as z:
            members = [info for info in z.infolist() if not info.is_dir()]
            for pattern in patterns:
                chosen = [info for info in members if fnmatch.fnmatchcase(info.filename, pattern)]
                for info in tqdm(chosen, desc=f"unpacking {archive.name}", unit="file", disable=None):
                    if any(step in ("", ".", "..") for step in info.filename.split("/")) or "\\" in info.filename:
                        raise UsageError(
                            f"{archive} contains the unsafe name {info.filename!r}: it is not the published file"
                        )
                    z.extract(info, into)
                if not chosen:
                    raise UsageError(f"{archive} contains no {pattern}: it is not the published file")
                counts[pattern] = {"count": len(chosen), "size": sum(info.file_size for info in chosen)}
    except (zipfile.BadZipFile, OSError, NotImplementedError) as e:
        raise UsageError(
            f"cannot unpack {archive} ({e}); free disk space, or remove it and run the same command again"
        ) from e
    return counts


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """The folder of unfinished files, locked against other processes. It is removed at the end."""
    staging = folder / STAGING
    try:
        staging.mkdir(parents=True, exist_ok=True)
        with FileLock(staging / "lock", timeout=0):
            remove_temporary(folder)
            yield staging
    except Timeout:
        raise UsageError(f"another fetch is writing to {folder}: wait for it") from None
    except OSError as e:
        raise UsageError(f"cannot write to {folder} ({e.strerror or e}): free space, or name another folder") from e
    shutil.rmtree(staging, ignore_errors=True)


def _check(path: Path, count: int, digests: Mapping[str, str | None], staging: Path) -> str:
    """The SHA-256 of a file. UsageError if it is not the published file; a file in `staging` is then removed.

    digests: the published digests, None if unknown: "sha256", "md5", and "git", the SHA-1 of the git blob.
    """
    digest = sha256_file(path)
    good = size(path) == count and digest == (digests.get("sha256") or digest)
    md5 = hashlib.md5(usedforsecurity=False)
    git = hashlib.sha1(b"blob %d\0" % count, usedforsecurity=False)
    for name, start in (("md5", md5), ("git", git)):
        if good and digests.get(name):
            with path.open("rb") as f:
                good = hashlib.file_digest(f, start.copy).hexdigest() == digests[name]
    if good:
        return digest
    if path.is_relative_to(staging):
        path.unlink()
        raise UsageError(f"{path.name} arrived damaged (SHA-256 {digest}) and was removed: run the same command again")
    raise UsageError(f"{path} is not the published file (SHA-256 {digest}): move it away")


def _move(staged: Path, folder: Path) -> None:
    """Move a folder to its destination: as a whole if the destination does not exist, else file by file; replaces
    none."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.replace(staged, folder)
        return
    for path in sorted(staged.iterdir()):
        if path.is_dir():
            _move(path, folder / path.name)
        elif not (folder / path.name).exists():
            os.replace(path, folder / path.name)
        elif size(folder / path.name) != size(path):
            raise UsageError(f"{folder / path.name} is not the published file: move it away")
