"""Downloads of published files: listed with their sizes, fetched at a pinned revision after the user has agreed,
checked against published digests, and recorded.

huggingface_hub fetches from the hub's repositories, `_download` from plain addresses. Unfinished files are in .fetch/
of the destination and are moved when a folder is complete, so that an existing folder is complete. SOURCE.json next to
it records the origin of every file.
"""

from __future__ import annotations

import fnmatch
import hashlib
import http.client
import json
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from filelock import FileLock, Timeout
from tqdm import tqdm

from specbench.errors import UsageError, plain
from specbench.storage import sources
from specbench.storage.files import format_size, remove_temporary, sha256_file, size, write_atomically
from specbench.storage.package import __version__
from specbench.storage.sources import Data, File, Part

RECORD, STAGING = "SOURCE.json", ".fetch"
RELEASES = "https://github.com"  # the server of GitHub's releases
TIMEOUT = 10.0  # seconds without a byte of an answer
ATTEMPTS = 5  # to continue a download that gets no further
_BLOCK = 1 << 20  # bytes that are received at once
#: A range and the length of a compressed answer do not fit the file.
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": f"specbench/{__version__}"}


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

    def start(self, name: str, **origin: str) -> None:
        """Record the origin of a part. Recorded files stay."""
        self.parts.setdefault(name, {"files": {}}).update(origin, complete=False)
        self._save()

    def finish(self, name: str, files: Mapping[str, Any]) -> None:
        self.parts[name] |= {
            "files": files,
            "complete": True,
            "fetched": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._save()


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: its path, its bytes, and its SHA-256 if the hub publishes it, as for large files."""

    path: str
    size: int
    sha256: str | None = None


# --- folders of models and of metrics ---------------------------------------------------------------------------------


def fetch_parts(
    title: str, wanted: Mapping[str, Part], folder: Path, revision: str | None, yes: bool, other_folder: str
) -> bool:
    """Fetch the parts that `folder` does not contain. Returns whether anything was missing.

    revision: the revision of the target, if the user gave one. other_folder: the argument that names another folder,
    for messages.
    """
    record, at = FetchRecord(folder), {"target": revision}
    todo = {name: p for name, p in wanted.items() if not _is_here(record, name, p, folder, at.get(name), other_folder)}
    if not todo:
        print(f"{title}: nothing to fetch, {', '.join(f'{name}/' for name in wanted)} are in {folder}")
        return False
    by_hand = f"put {sources.listing(todo)} of {folder}"
    listed = {name: _listing(name, part, record, by_hand) for name, part in todo.items()}
    total = 0
    print(f"{title} -> {folder}")
    for name, (commit, files) in listed.items():
        part = todo[name]
        moved = "" if part.revision == commit else f"{part.revision}, now "
        print(f"  {name}/: {part.repository}, {moved}{commit} ({sources.restricted(part.licence)})")
        for file, published in files.items():
            present = size(folder / name / file)
            if present not in (None, published.size):  # the user's file, which is never overwritten
                raise UsageError(
                    f"{folder / name / file} has {present} bytes, but the file of {part.repository} has"
                    f" {published.size}: move it away, or name another folder with {other_folder}"
                )
            total += published.size if present is None else 0
            print(f"    {format_size(published.size):>9}  {file}{'' if present is None else '  (exists)'}")
    _confirm(folder, total, total, yes, other_folder)
    with _staged(folder) as staging:
        for name, (commit, files) in listed.items():
            _fetch_part(record, folder, staging, name, todo[name], commit, files)
    return True


def _is_here(record: FetchRecord, name: str, part: Part, folder: Path, revision: str | None, other_folder: str) -> bool:
    """Whether a part is completely fetched, at `revision` if it is not None. UsageError for a part of another
    origin."""
    entry = record.parts.get(name)
    if entry is None:
        return False
    way_out = f"remove it and its entry in {RECORD}, or name another folder with {other_folder}"
    if entry.get("repository") != part.repository:
        raise UsageError(f"{folder / name} comes from {entry.get('repository')}, not {part.repository}: {way_out}")
    known = entry.get("commit"), entry.get("revision")
    if revision is not None and revision not in known:
        raise UsageError(f"{folder / name} is at commit {known[0]}, not at '{revision}': {way_out}")
    files = entry["files"].items()
    return bool(entry.get("complete")) and all(size(folder / name / file) == noted["size"] for file, noted in files)


def _listing(name: str, part: Part, record: FetchRecord, by_hand: str) -> tuple[str, dict[str, RemoteFile]]:
    """The commit of a part, and its files by their names in the part's folder. If a fetch has started before, its
    commit is used, even if the branch has moved. by_hand: the alternative that an error message names."""
    commit = record.parts.get(name, {}).get("commit") or part.revision
    if part.sizes:
        files = [RemoteFile(file, count) for file, count in part.sizes.items()]
    elif part.address:
        files = [RemoteFile(file, _size_at(f"{part.address}/{file}")) for file in part.files]
    else:
        with _hub_errors(part, commit, by_hand):
            commit, files = hub_files(part.repository, commit)
    inside = {}
    for file in files:
        path = PurePosixPath(file.path)
        if str(path.parent) == (part.subfolder or ".") and not path.name.startswith("."):
            inside[path.name] = file
    chosen: dict[str, RemoteFile] = {}
    for needed in part.files:
        matches = next((m for p in needed.split("|") if (m := fnmatch.filter(inside, p))), [])
        if not matches:
            otherwise = "choose another revision= or repository=" if name == "target" else by_hand
            raise UsageError(f"{part.repository} at {commit} has no {needed}: {otherwise}")
        chosen |= {file: inside[file] for file in matches}
    chosen |= {file: inside[file] for pattern in part.also for file in fnmatch.filter(inside, pattern)}
    return commit, dict(sorted(chosen.items()))


def hub_files(repository: str, revision: str) -> tuple[str, list[RemoteFile]]:
    """The commit of a revision of a Hugging Face repository, and its files."""
    from huggingface_hub import HfApi

    print(f"asking the Hugging Face hub for {repository} at {revision}", file=sys.stderr, flush=True)
    info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=TIMEOUT)
    listed = [file for file in info.siblings or () if file.rfilename.isprintable()]
    return plain(info.sha), [RemoteFile(f.rfilename, f.size or 0, f.lfs.sha256 if f.lfs else None) for f in listed]


def hub_download(repository: str, commit: str, paths: Sequence[str], folder: Path) -> None:
    """Download files of a Hugging Face repository into `folder`; a later call continues."""
    from huggingface_hub import snapshot_download

    snapshot_download(repository, revision=commit, allow_patterns=list(paths), local_dir=folder, etag_timeout=TIMEOUT)
    if absent := [path for path in paths if not (folder / path).is_file()]:  # it only warns if it gets no listing
        raise FileNotFoundError(f"no {absent[0]}")


def _fetch_part(
    record: FetchRecord,
    folder: Path,
    staging: Path,
    name: str,
    part: Part,
    commit: str,
    files: Mapping[str, RemoteFile],
) -> None:
    """Download the missing files of a part, check all of them, and move them to `folder`."""
    record.start(name, repository=part.repository, revision=part.revision, commit=commit, licence=part.licence)
    loose, checked = staging / "loose" / name, staging / "checked" / name
    missing = {file: published for file, published in files.items() if not (folder / name / file).exists()}
    if part.sizes or part.address:
        address = part.address or f"{RELEASES}/{part.repository}/releases/download/{commit}"
        for published in missing.values():
            _download(f"{address}/{published.path}", loose / published.path, published.size)
    elif missing:
        with _hub_errors(part, commit, f"put {', '.join(missing)} into {folder / name}"):
            hub_download(part.repository, commit, [published.path for published in missing.values()], loose)
    entries = {}
    for file, published in files.items():
        path = loose / published.path if file in missing else folder / name / file
        digests = {"sha256": part.sha256.get(file, published.sha256), "md5": part.md5.get(file)}
        entries[file] = {"size": published.size, "sha256": _check(path, published.size, digests, staging)}
    checked.mkdir(parents=True, exist_ok=True)
    for file, published in missing.items():
        os.replace(loose / published.path, checked / file)
    _move(checked, folder / name)
    record.finish(name, entries)
    print(f"  {name}/ is here", flush=True)


@contextmanager
def _hub_errors(part: Part, revision: str, otherwise: str) -> Iterator[None]:
    """Raise exceptions of the hub's client as UsageError."""
    _check_online(part.repository, otherwise)
    try:
        yield
    except Exception as e:  # the client's exceptions differ from version to version
        kinds = {kind.__name__ for kind in type(e).__mro__}
        if "GatedRepoError" in kinds:
            page = f"huggingface.co/{part.repository}"
            why = f"requires the acceptance of its terms: accept them on {page}, then run `hf auth login`"
        elif "RevisionNotFoundError" in kinds:
            why = f"has no revision '{revision}': correct revision="
        elif "RepositoryNotFoundError" in kinds:
            why = "is not shown by the Hugging Face hub: correct its name, or run `hf auth login`"
        else:
            why = f"cannot be fetched from the Hugging Face hub ({_first_line(e)}): try again, or {otherwise}"
        raise UsageError(f"{part.repository} {why}") from e


# --- data sets --------------------------------------------------------------------------------------------------------


def fetch_data(name: str, data: Data, folder: Path, yes: bool) -> None:
    """Fetch the missing files of a data set into `folder`."""
    record = FetchRecord(folder)
    todo = [file for file in data.files if not is_unpacked(record, file, folder)]
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
    partial = [folder / STAGING / f"{file.name}{end}" for file in todo for end in ("", ".part")]
    missing = max(0, sum(file.size for file in todo) - sum(size(path) or 0 for path in partial))
    # An archive and its unpacked content exist together for a while, and the compression is small.
    _confirm(folder, missing, missing + sum(file.size for file in todo if file.unpack), yes, "data_dir=DIR")
    with _staged(folder) as staging:
        for file in todo:
            _fetch_file(record, folder, staging, file, data)
    print(f"{name} is in {folder}")


def is_unpacked(record: FetchRecord, file: File, folder: Path) -> bool:
    """Whether a file was fetched before, and all of its content still exists."""
    entry = record.parts.get(file.name)
    if entry is None or not entry.get("complete") or entry.get("sha256") != file.sha256:
        return False
    counts = {pattern: len(list(folder.glob(pattern))) for pattern in file.unpack or (file.name,)}
    return all(pattern in entry["files"] and n >= entry["files"][pattern]["count"] for pattern, n in counts.items())


def _fetch_file(record: FetchRecord, folder: Path, staging: Path, file: File, data: Data) -> None:
    """Download a file of a data set, check it, and move it, or its unpacked content, to `folder`."""
    record.start(file.name, address=file.address, sha256=file.sha256, licence=data.licence)
    path = folder / file.name
    if file.unpack or not path.exists():
        path = _download(file.address, staging / file.name, file.size)
    _check(path, file.size, {"sha256": file.sha256}, staging)
    if file.unpack:
        content = _unpack(path, file.unpack, staging / "checked")
        _move(staging / "checked", folder)
        path.unlink()
    else:
        content = {file.name: {"count": 1, "size": file.size}}
        os.replace(path, folder / file.name)
    record.finish(file.name, content)
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
                    z.extract(info, into)  # never outside of `into`
                counts[pattern] = {"count": len(chosen), "size": sum(info.file_size for info in chosen)}
    except (zipfile.BadZipFile, OSError, NotImplementedError) as e:
        raise UsageError(f"cannot unpack {archive} ({e}); free disk space, or remove it and try again") from e
    if empty := [pattern for pattern, found in counts.items() if not found["count"]]:
        raise UsageError(f"{archive} contains no {empty[0]}: it is not the published file")
    return counts


# --- files at plain addresses -----------------------------------------------------------------------------------------


def _check_online(source: str, otherwise: str) -> None:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise UsageError(f"HF_HUB_OFFLINE forbids requests for {source}: unset it, or {otherwise}")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def _answer(address: str, method: str, **headers: str) -> Any:
    """A server's answer. The addresses are those that conf/ and plug-ins declare."""
    request = Request(address, headers=_HEADERS | headers, method=method)  # noqa: S310
    return urlopen(request, timeout=TIMEOUT)  # noqa: S310


def _size_at(address: str) -> int:
    """The bytes of a file that the server at an address reports. UsageError if it does not answer or reports none."""
    _check_online(address, "fetch it with a browser")
    try:
        with _answer(address, "HEAD") as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, http.client.HTTPException, TypeError, ValueError) as e:
        raise UsageError(f"cannot get the size of {address} ({_first_line(e)}): try again") from e


def _download(address: str, path: Path, count: int) -> Path:
    """Download a file of `count` bytes to `path`, through `path`.part, which a later call continues. UsageError if the
    server does not answer or has another file."""
    if size(path) == count:  # put there by the user, as the error advises
        return path
    _check_online(address, f"put it at {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.part")
    attempts = ATTEMPTS
    while (before := size(partial) or 0) < count:
        try:
            _receive(address, partial, count)
        except (OSError, http.client.HTTPException) as e:
            attempts = ATTEMPTS if (size(partial) or 0) > before else attempts - 1
            if isinstance(e, HTTPError) and e.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                partial.unlink()  # the server's file is shorter
            if isinstance(e, HTTPError) or not attempts:
                raise UsageError(
                    f"cannot fetch {address} ({_first_line(e)}); {format_size(size(partial) or 0)} of"
                    f" {format_size(count)} are downloaded: run the same command again, or put it at {path}"
                ) from e
            time.sleep(1)
    os.replace(partial, path)
    return path


def _receive(address: str, partial: Path, count: int) -> None:
    """Continue a partial file, which never grows beyond `count` bytes, whatever the server sends."""
    start = size(partial) or 0
    with (
        _answer(address, "GET", **({"Range": f"bytes={start}-"} if start else {})) as answer,
        partial.open("ab") as f,
        tqdm(total=count, initial=start, desc=partial.stem, unit="B", unit_scale=True, disable=None) as bar,
    ):
        if start and answer.status != http.client.PARTIAL_CONTENT:  # the server does not support ranges
            f.seek(0)
            f.truncate()
            bar.reset()
        while block := answer.read(_BLOCK):
            if f.tell() + len(block) > count:
                f.truncate(0)
                raise UsageError(f"{address} has more than {count} bytes: it is not the published file any more")
            f.write(block)
            bar.update(len(block))
        if f.tell() < count:
            raise ConnectionError(f"the answer ended after {f.tell()} of {count} bytes")


# --- checks -----------------------------------------------------------------------------------------------------------


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


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
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

    digests: the published digests, None if unknown: "sha256" and "md5".
    """
    digest = sha256_file(path)
    good = size(path) == count and digest == (digests.get("sha256") or digest)
    if good and digests.get("md5"):
        with path.open("rb") as f:
            good = hashlib.file_digest(f, "md5").hexdigest() == digests["md5"]
    if good:
        return digest
    if path.is_relative_to(staging):
        path.unlink()
        raise UsageError(f"{path.name} arrived damaged (SHA-256 {digest}) and was removed: run the same command again")
    raise UsageError(f"{path} is not the published file (SHA-256 {digest}): move it away")


def _move(staged: Path, folder: Path) -> None:
    """Move a folder to its destination: as a whole if the destination does not exist, else the missing files."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.replace(staged, folder)
        return
    for path in (path for path in sorted(staged.rglob("*")) if path.is_file()):
        final = folder / path.relative_to(staged)
        final.parent.mkdir(parents=True, exist_ok=True)
        if not final.exists():
            os.replace(path, final)
