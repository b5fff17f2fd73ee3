"""`specbench fetch`: weights of models and of evaluators, data sets, from their publishers, listed before the download,
resumed after an interruption.

Unfinished files are in .fetch/ of the destination and are moved when they are complete, so that an existing folder is
complete. SOURCE.json next to it records the origin of every file.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import http.client
import json
import os
import re
import shutil
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock, Timeout
from tqdm import tqdm

from specbench._version import __version__
from specbench.config import parameters
from specbench.errors import UsageError, parse_arguments, unknown, values
from specbench.storage import home, sources
from specbench.storage.files import format_size, write_atomically
from specbench.storage.sources import Data, File, Part

RECORD, STAGING = "SOURCE.json", ".fetch"
TIMEOUT = 10.0  # seconds without an answer
TRIES, PAUSE = 4, 2.0  # attempts without new bytes, and seconds between them
CHUNK = 1 << 20

#: The arguments of the command, with their meanings.
ARGUMENTS = {
    "model": "the model whose weights to fetch: " + ", ".join(sources.MODELS),
    "weights": "where to put them (default: the folder of weights=official in a run)",
    "drafter": "a drafter of a run whose published weights to fetch, too: " + ", ".join(sources.DRAFTERS),
    "size": "of lumina_mgpt: 768 (default), 512 or 1024 pixels, each with its own checkpoint",
    "repository": "another Hugging Face repository for the target, as in OWNER/NAME",
    "revision": "branch or commit of the target's repository (default: as listed below)",
    "data": "the data set to fetch: " + ", ".join(sources.DATA),
    "data_dir": "where to put it (default: where a run looks for it)",
    "metrics": "the metrics, or sets of them, whose networks to fetch, with commas: see specbench list metrics",
    "metrics_dir": "where to put them (default: where a run looks for them)",
}
_OF = {
    "model": {"weights", "drafter", "size", "repository", "revision"},
    "data": {"data_dir"},
    "metrics": {"metrics_dir"},
}

_HELP = """\
usage: specbench fetch model=NAME [drafter=NAME] [weights=DIR] [--yes]
       specbench fetch metrics=NAME[,NAME...] [metrics_dir=DIR] [--yes]
       specbench fetch data=NAME [data_dir=DIR] [--yes]

Shows the files, their sizes and licences, asks, and fetches the missing ones. After an interruption, the same command
continues where it stopped. Set HF_TOKEN, or run `hf auth login`, for repositories that require it.

"""


def main(arguments: Sequence[str]) -> int:
    """`specbench fetch model=NAME|metrics=NAMES|data=NAME [name=value ...] [--yes]`. Returns the exit status.

    Raises:
        UsageError: bad arguments, no consent, no disk space, no server, or a file that is not the published one.
    """
    line = parse_arguments("fetch", arguments, ["--yes"])
    if line.help:
        print(_HELP + "\n".join(f"  {name + '=':<12} {line}" for name, line in ARGUMENTS.items()))
        print(f"  {'--yes':<12} do not ask\n")
        print("\n".join(_revisions()))
        return 0
    given = _parse(line.arguments)
    try:
        if "model" in given:
            _fetch_model(given, line.yes)
        elif "metrics" in given:
            _fetch_metrics(given, line.yes)
        else:
            _fetch_data(given, line.yes)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command continues where it stopped") from None
    return 0


def _revisions() -> list[str]:
    """For the help: every repository, and the commit that it is pinned to."""
    models = sources.MODELS.values()
    parts = [p for m in models for p in (*m.parts.values(), *m.drafters.values(), *m.sizes.values(), *m.instead)]
    at = {p.repository: p.revision if p.pinned else "main" for p in (*parts, *sources.EVALUATORS.values())}
    width = max(map(len, at))
    head = "Repositories, pinned to a commit or a release; main: none is known, a fetch takes and records the latest"
    return [head, *(f"  {repository:<{width}}  {revision}" for repository, revision in sorted(at.items()))]


def _parse(arguments: Sequence[str]) -> dict[str, str]:
    given = values(arguments, ARGUMENTS)
    kinds = [kind for kind in _OF if kind in given]
    if len(kinds) != 1:
        raise UsageError(
            "name what to fetch: model=NAME, metrics=NAMES or data=NAME, one of them (see specbench fetch --help)"
        )
    (kind,) = kinds
    if foreign := sorted(set(given) - {kind} - _OF[kind]):
        raise UsageError(f"'{foreign[0]}' has no meaning with {kind}=: leave it out")
    return given


# --- the record -------------------------------------------------------------------------------------------------------


class FetchRecord:
    """SOURCE.json: the origin of each part of a folder, and the size and SHA-256 of every file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORD
        self.parts: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            try:
                content = json.loads(self.path.read_text(encoding="utf-8"))
                self.parts = {name: dict(entry, files=dict(entry["files"])) for name, entry in content["parts"].items()}
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
                raise UsageError(
                    f"{self.path} is damaged ({e}); remove it, and run again to check the existing files"
                ) from e

    def save(self) -> None:
        text = json.dumps({"specbench": __version__, "parts": self.parts}, indent=1, ensure_ascii=False)
        write_atomically(self.path, text.encode() + b"\n")

    def begin(self, name: str, origin: Mapping[str, str]) -> None:
        """Keeps the recorded files where the origin is the same."""
        self.parts.setdefault(name, {"files": {}}).update(origin, complete=False)
        self.save()

    def add(self, name: str, file: str, size: int, sha256: str) -> None:
        self.parts[name]["files"][file] = {"size": size, "sha256": sha256}
        self.save()

    def end(self, name: str) -> None:
        self.parts[name].update(complete=True, fetched=datetime.now(UTC).isoformat(timespec="seconds"))
        self.save()


# --- repositories -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HubFile:
    """A file of a repository: its path there, its bytes, and its SHA-256 if the hub provides it."""

    name: str
    size: int
    sha256: str | None = None


class HuggingFace:
    """The hub, with huggingface_hub's own resuming and progress. `files` prints the repository first."""

    def files(self, repository: str, revision: str) -> tuple[str, list[HubFile]]:
        """The commit of a revision, and its files."""
        from huggingface_hub import HfApi

        print(f"asking the Hugging Face hub for {repository} at {revision}", file=sys.stderr, flush=True)
        info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=TIMEOUT)
        listed = [HubFile(f.rfilename, f.size or 0, f.lfs.sha256 if f.lfs else None) for f in info.siblings or ()]
        return str(info.sha), listed

    def get(self, repository: str, commit: str, name: str, folder: Path) -> Path:
        """Puts a file below `folder`, continuing a partial one."""
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repository, name, revision=commit, local_dir=folder))


class Releases:
    """Files of a GitHub repository's release, as `sources` describes them; none are listed over the network."""

    ADDRESS = "https://github.com"

    def __init__(self, part: Part) -> None:
        self._part = part

    def files(self, repository: str, revision: str) -> tuple[str, list[HubFile]]:
        """The tag, and its files."""
        return revision, [HubFile(name, size) for name, size in self._part.sizes.items()]

    def get(self, repository: str, commit: str, name: str, folder: Path) -> Path:
        """Puts a file into `folder`, continuing a partial one."""
        path, size = folder / name, self._part.sizes[name]
        if _size(path) != size:  # else the user put it there, as `download` advises
            folder.mkdir(parents=True, exist_ok=True)
            download(f"{self.ADDRESS}/{repository}/releases/download/{commit}/{name}", path, size)
        return path


def _hub(part: Part) -> HuggingFace | Releases:
    return Releases(part) if part.sizes else HuggingFace()


@contextlib.contextmanager
def _hub_errors(part: Part, revision: str, otherwise: str) -> Iterator[None]:
    """Raise exceptions of the hub's client as UsageError."""
    if part.sizes:  # no client: `download` raises the UsageError
        yield
        return
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise UsageError(f"HF_HUB_OFFLINE forbids requests for {part.repository}: unset it, or {otherwise}")
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
        message = str(e).strip().partition("\n")[0][:200]
        raise UsageError(
            f"cannot get {part.repository} from the Hugging Face hub ({type(e).__name__}: {message}): try again, or"
            f" {otherwise}"
        ) from e


@dataclass(frozen=True)
class Listed:
    """The content of a part: the commit, and its files with their names in the part's folder."""

    part: Part
    commit: str
    files: Mapping[str, HubFile]


def _fetch_parts(
    title: str, parts: Mapping[str, Part], folder: Path, given: Mapping[str, str], yes: bool, other_folder: str
) -> bool:
    """Fetches what is not in `folder` yet; returns whether anything was missing. `elsewhere`: the argument that names
    another folder."""
    record = FetchRecord(folder)
    todo = {
        name: part for name, part in parts.items() if not _is_complete(record, name, part, folder, given, other_folder)
    }
    if not todo:
        print(f"{title}: nothing to fetch, {', '.join(f'{name}/' for name in parts)} are in {folder}")
        return False
    manually = f"put {sources.listing(todo)} of {folder}"
    listed = {name: _list(name, part, record, manually) for name, part in todo.items()}
    missing = {
        name: [file for file in found.files if not _exists(folder, name, file, found, other_folder)]
        for name, found in listed.items()
    }
    size = sum(listed[name].files[file].size for name, files in missing.items() for file in files)
    print(f"{title} -> {folder}")
    for name, found in listed.items():
        at = f"commit {found.commit}" if found.part.pinned else f"{found.part.revision}, now commit {found.commit}"
        at = f"release {found.commit}" if found.part.sizes else at
        print(f"  {name}/: {found.part.repository}, {at} ({found.part.licence})")
        for file, hub_file in found.files.items():
            note = "" if file in missing[name] else "  (there)"
            print(f"    {format_size(hub_file.size):>9}  {file}{note}")
    _print_licences({name: found.part.licence for name, found in listed.items()})
    _confirm(folder, size, size, yes, other_folder)
    with _locked_staging(folder) as staging:
        for name, found in listed.items():
            _fetch_part(record, folder, staging, name, found)
    return True


# --- models and metrics -----------------------------------------------------------------------------------------------


def _fetch_model(given: Mapping[str, str], yes: bool) -> None:
    model = given["model"]
    parts, default = _chosen_parts(given)
    asked = given.get("weights", "official")
    folder = default if asked == "official" else home.expanded(asked)
    if not _fetch_parts(model, parts, folder, given, yes, "weights=DIR"):
        return
    arguments = f"model={model}" + (f" size={given['size']}" if "size" in given else "")
    if folder != home.model_folder(model):
        arguments += f" weights={folder}"
    print(f"{model} is in {folder}: specbench run {arguments} ...")


def _fetch_metrics(given: Mapping[str, str], yes: bool) -> None:
    names = given["metrics"]
    folder = home.expanded(given.get("metrics_dir", home.metrics_folder()))
    parts = {name: sources.EVALUATORS[name] for name in _evaluators(names.split(","))}
    if not parts:
        print(f"{names}: nothing to fetch, these evaluators are part of specbench")
    elif _fetch_parts(names, parts, folder, given, yes, "metrics_dir=DIR"):
        arguments = f"metrics={names}" + (f" metrics_dir={folder}" if folder != home.metrics_folder() else "")
        print(f"{names}: the weights are in {folder}: specbench run {arguments} ...")


def _evaluators(names: Sequence[str]) -> list[str]:
    """The folders that metrics and sets of metrics read, each once."""
    from specbench import metrics

    context = metrics.ScoringContext(metrics.ASSETS, home.metrics_folder())
    found: dict[str, None] = {}
    for name in names:
        if name not in parameters.choices("metrics"):
            raise unknown("metric", name, parameters.choices("metrics"))
        for one in sorted(parameters.declared("metrics", name)):
            found |= dict.fromkeys(metrics.metric(one, context).parts)
    return list(found)


def _chosen_parts(given: Mapping[str, str]) -> tuple[dict[str, Part], Path]:
    """The parts that the arguments name, and their default folder."""
    model = given["model"]
    if model not in sources.MODELS:
        raise unknown("model", model, sources.MODELS)
    entry, folder = sources.MODELS[model], home.model_folder(model)
    parts = dict(entry.parts)
    if "size" in given:
        if not entry.sizes:
            raise UsageError(f"{model} has one size: leave size= out")
        if given["size"] in entry.sizes:
            parts["target"] = entry.sizes[given["size"]]
            folder = home.model_folder(f"{model}_{given['size']}")
        elif given["size"] != "768":
            raise unknown("size", given["size"], ["768", *entry.sizes])
    if "repository" in given:
        name = given["repository"]
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
            raise UsageError(f"'{name}' is not a repository of the Hugging Face hub: write OWNER/NAME")
        known = {part.repository: part for part in (*entry.instead, parts["target"], *entry.sizes.values())}
        parts["target"] = known.get(name) or sources.hugging_face(name, "see its page")
    if "revision" in given:
        parts["target"] = replace(parts["target"], revision=given["revision"])
    if "drafter" in given:
        if given["drafter"] not in sources.DRAFTERS:
            raise unknown("drafter with weights", given["drafter"], sources.DRAFTERS)
        name = sources.DRAFTERS[given["drafter"]]
        if name not in entry.drafters:
            raise UsageError(f"no {name} weights are published for {model}: put your own into {folder / name}")
        parts[name] = entry.drafters[name]
    return parts, folder


def _is_complete(
    record: FetchRecord, name: str, part: Part, folder: Path, given: Mapping[str, str], other_folder: str
) -> bool:
    """Whether a part is completely fetched. Refuses to mix origins."""
    entry = record.parts.get(name)
    if entry is None:
        return False
    if entry.get("repository") != part.repository:
        raise UsageError(
            f"{folder / name} comes from {entry.get('repository')}, not {part.repository}: remove it and its entry in"
            f" {RECORD}, or name another folder with {other_folder}"
        )
    known = entry.get("commit"), entry.get("revision")
    if name == "target" and given.get("revision", known[0]) not in known:
        raise UsageError(
            f"{folder / name} is at commit {known[0]}, not at '{given['revision']}': remove it and its entry in"
            f" {RECORD}, or name another folder with {other_folder}"
        )
    return bool(entry.get("complete")) and all(
        _size(folder / name / file) == noted["size"] for file, noted in entry["files"].items()
    )


def _list(name: str, part: Part, record: FetchRecord, manually: str) -> Listed:
    """The files of a part at its commit: the recorded one where a fetch started before, even if a branch has moved."""
    revision = record.parts.get(name, {}).get("commit") or part.revision
    with _hub_errors(part, revision, manually):
        commit, found = _hub(part).files(part.repository, revision)
    inside = {}
    for file in found:
        path = PurePosixPath(file.name)
        if str(path.parent) == (part.subfolder or ".") and not path.name.startswith("."):
            inside[path.name] = file
    chosen: dict[str, HubFile] = {}
    for needed in part.files:
        matches = next((m for p in needed.split("|") if (m := fnmatch.filter(inside, p))), [])
        if not matches:
            otherwise = "give another revision= or repository=" if name == "target" else manually
            raise UsageError(f"{part.repository} at {commit} has no {needed}: {otherwise}")
        chosen |= {file: inside[file] for file in matches}
    for pattern in part.also:
        chosen |= {file: inside[file] for file in fnmatch.filter(inside, pattern)}
    return Listed(part, commit, dict(sorted(chosen.items())))


def _exists(folder: Path, name: str, file: str, found: Listed, other_folder: str) -> bool:
    """Whether a file exists. One that is not the published file belongs to the user and is never overwritten."""
    size = _size(folder / name / file)
    if size is None:
        return False
    if size != found.files[file].size:
        raise UsageError(
            f"{folder / name / file} has {size} bytes, the one of {found.part.repository} has"
            f" {found.files[file].size}: move it away, or name another folder with {other_folder}"
        )
    return True


def _fetch_part(record: FetchRecord, folder: Path, staging: Path, name: str, found: Listed) -> None:
    part = found.part
    origin = {"repository": part.repository, "revision": part.revision, "commit": found.commit}
    record.begin(name, origin | {"licence": part.licence})
    whole, loose = staging / "whole", staging / "hub" / name
    for file, hub_file in found.files.items():
        placed, staged = folder / name / file, whole / name / file
        if any(_size(path) == hub_file.size for path in (placed, staged)) and file in record.parts[name]["files"]:
            continue
        path = next((p for p in (placed, staged) if p.exists()), None)
        if path is None:
            with _hub_errors(part, found.commit, f"put {file} into {folder / name}"):
                path = _hub(part).get(part.repository, found.commit, hub_file.name, loose)
        known = part.sha256.get(file, hub_file.sha256)
        sha256 = _checked(path, hub_file.size, known, part.md5.get(file), path != placed)
        if path not in (placed, staged):
            staged.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, staged)
        record.add(name, file, hub_file.size, sha256)
        print(f"  {name}/{file} is here", flush=True)
    if (whole / name).exists():
        _move_into(whole / name, folder / name)
    record.end(name)
    shutil.rmtree(loose, ignore_errors=True)


# --- data -------------------------------------------------------------------------------------------------------------


def _fetch_data(given: Mapping[str, str], yes: bool) -> None:
    name = given["data"]
    if name not in sources.DATA:
        raise unknown("data", name, sources.DATA)
    data = sources.DATA[name]
    folder = home.expanded(given.get("data_dir", home.data_folder(name)))
    record = FetchRecord(folder)
    todo = [file for file in data.files if not _unpacked(record, file, folder)]
    if not todo:
        print(f"{name}: nothing to fetch, it is in {folder}")
        return
    for file in todo:
        if not file.unpack and _size(folder / file.name) not in (None, file.size):
            raise UsageError(
                f"{folder / file.name} is not the published file: move it away, or give another data_dir=DIR"
            )
    print(f"{name} -> {folder}")
    for file in todo:
        print(f"    {format_size(file.size):>9}  {file.address}{' (unpacked, then removed)' if file.unpack else ''}")
    print(f"  licence: {data.licence}")
    staged = [folder / STAGING / f"{file.name}{end}" for file in todo for end in ("", ".part")]
    size = max(0, sum(file.size for file in todo) - sum(_size(path) or 0 for path in staged))
    # An archive and its unpacked content exist together for a while, and the compression is small.
    _confirm(folder, size, size + sum(file.size for file in todo if file.unpack), yes, "data_dir=DIR")
    with _locked_staging(folder) as staging:
        for file in todo:
            _fetch_file(record, folder, staging, file, data)
    print(f"{name} is in {folder}")


def _unpacked(record: FetchRecord, file: File, folder: Path) -> bool:
    """Whether a file was fetched before, and its whole content still exists."""
    entry = record.parts.get(file.name)
    if entry is None or not entry.get("complete") or entry.get("sha256") != file.sha256:
        return False
    counts = {pattern: len(list(folder.glob(pattern))) for pattern in file.unpack or (file.name,)}
    return all(pattern in entry["files"] and n >= entry["files"][pattern]["count"] for pattern, n in counts.items())


def _fetch_file(record: FetchRecord, folder: Path, staging: Path, file: File, data: Data) -> None:
    origin = {"address": file.address, "sha256": file.sha256, "licence": data.licence}
    record.begin(file.name, origin)
    path = folder / file.name if not file.unpack and (folder / file.name).exists() else staging / file.name
    if not path.exists():
        download(file.address, path, file.size)
    _checked(path, file.size, file.sha256, None, path.parent == staging)
    kept: dict[str, dict[str, int]]
    if file.unpack:
        kept = _unpack(path, file.unpack, staging / "whole")
        _move_into(staging / "whole", folder)
        path.unlink()
    else:
        kept = {file.name: {"count": 1, "size": file.size}}
        os.replace(path, folder / file.name)
    record.parts[file.name]["files"] = kept
    record.end(file.name)
    print(f"  {file.name} is here", flush=True)


def _unpack(archive: Path, patterns: Sequence[str], into: Path) -> dict[str, dict[str, int]]:
    """Extracts the members that match; -> how many there are of each pattern, and their bytes."""
    kept = {}
    try:
        with zipfile.ZipFile(archive) as z:
            files = [info for info in z.infolist() if not info.is_dir()]
            for pattern in patterns:
                chosen = [info for info in files if fnmatch.fnmatchcase(info.filename, pattern)]
                for info in tqdm(chosen, desc=f"unpacking {archive.name}", unit="file", disable=None):
                    if any(step in ("", ".", "..") for step in info.filename.split("/")) or "\\" in info.filename:
                        raise UsageError(
                            f"{archive} holds the unsafe name {info.filename!r}: it is not the published file"
                        )
                    z.extract(info, into)
                if not chosen:
                    raise UsageError(f"{archive} holds no {pattern}: it is not the published file")
                kept[pattern] = {"count": len(chosen), "size": sum(info.file_size for info in chosen)}
    except (zipfile.BadZipFile, OSError, NotImplementedError) as e:
        raise UsageError(
            f"cannot unpack {archive} ({e}); make room, or remove it and run the same command again"
        ) from e
    return kept


# --- plain addresses --------------------------------------------------------------------------------------------------


def download(address: str, path: Path, size: int) -> None:
    """Fetches a file of a known size into `path`, through `path`.part, continuing a partial one.

    Raises UsageError where the server does not answer or has another file.
    """
    part, mark = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.etag")
    if (_size(part) or 0) > size:
        part.unlink()
    first, failed, vain = _size(part) or 0, "", 0
    with tqdm(total=size, unit="B", unit_scale=True, desc=path.name, disable=None) as bar:
        while (have := _size(part) or 0) < size and vain < TRIES:
            bar.n = have
            try:
                _receive(address, part, mark, size, bar)
                failed = "the connection broke"
            except urllib.error.HTTPError as e:
                failed = f"it answers {e.code} {e.reason}"
                if e.code == 416:  # the partial file is not the start of the server's file
                    part.unlink(missing_ok=True)
                elif e.code < 500:
                    break
            except (OSError, http.client.HTTPException) as e:
                failed = str(getattr(e, "reason", e)) or type(e).__name__
                if isinstance(e, urllib.error.URLError) and have == first:
                    break  # no server
            now = _size(part) or 0
            vain = 0 if now > have else vain + 1
            if now < size:
                time.sleep(PAUSE)
    if _size(part) != size:
        there = f"{format_size(_size(part) or 0)} of {format_size(size)} are there"
        raise UsageError(f"cannot fetch {address} ({failed}); {there}: run the same command again, or put it at {path}")
    os.replace(part, path)
    mark.unlink(missing_ok=True)


def _receive(address: str, part: Path, mark: Path, size: int, bar: Any) -> None:
    """One request, for the missing bytes. Returns when the server closes, with or without all of them."""
    if not address.startswith(("http://", "https://")):
        raise UsageError(f"'{address}' is not an address of a web server")
    have = _size(part) or 0
    request = urllib.request.Request(address, headers={"User-Agent": f"specbench/{__version__}"})  # noqa: S310
    tag = mark.read_text(encoding="ascii") if have and mark.exists() else ""
    if have:
        request.add_header("Range", f"bytes={have}-")
        if tag:
            request.add_header("If-Range", tag)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:  # noqa: S310 (the scheme was checked)
        new, length = answer.headers.get("ETag", ""), answer.headers.get("Content-Length")
        going_on = answer.status == 206
        if going_on and (
            answer.headers.get("Content-Range") != f"bytes {have}-{size - 1}/{size}" or new != (tag or new)
        ):
            part.unlink()  # part of another file: the next try starts again
            return
        if not going_on:
            have = bar.n = 0
            if length is not None and int(length) != size:
                raise UsageError(f"{address} has {length} bytes now, not {size}: it is not the published file any more")
        mark.write_text(new if new.isascii() and not new.startswith("W/") else "", encoding="ascii")
        with part.open("ab" if going_on else "wb") as f:
            while block := answer.read(CHUNK):
                f.write(block)
                bar.update(len(block))
            f.flush()
            os.fsync(f.fileno())


# --- shared -----------------------------------------------------------------------------------------------------------


def _confirm(folder: Path, size: int, needed: int, yes: bool, other_folder: str) -> None:
    """Checks the disk space, then asks for consent. Raises UsageError without either."""
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(above).free
    print(f"  to fetch: {format_size(size)}; free there: {format_size(free)}", flush=True)
    if needed > free:
        raise UsageError(
            f"{folder} has {format_size(free)} of disk space, and {format_size(needed)} are needed: free some, or give"
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


def _print_licences(of: Mapping[str, str]) -> None:
    """Prints the licences that restrict the use."""
    for licence, meaning in sources.NON_COMMERCIAL.items():
        if names := [f"{name}/" for name, found in of.items() if found == licence]:
            print(f"  licence of {', '.join(names)}: {licence}, {meaning}")


@contextlib.contextmanager
def _locked_staging(folder: Path) -> Iterator[Path]:
    """The folder of unfinished files, locked against other processes; removed when all is done."""
    staging = folder / STAGING
    try:
        staging.mkdir(parents=True, exist_ok=True)
        with FileLock(staging / "lock", timeout=0):
            yield staging
    except Timeout:
        raise UsageError(f"another fetch is writing to {folder}: wait for it") from None
    except OSError as e:
        raise UsageError(f"cannot write to {folder} ({e.strerror or e}): make room, or name another folder") from e
    shutil.rmtree(staging, ignore_errors=True)


def _checked(path: Path, size: int, sha256: str | None, md5: str | None, ours: bool) -> str:
    """The SHA-256 of a file, which must be the published one; else UsageError, and the file is removed if `ours`."""
    digest, old = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    with (
        path.open("rb") as f,
        tqdm(total=size, unit="B", unit_scale=True, desc=f"checking {path.name}", disable=None) as b,
    ):
        while block := f.read(CHUNK):
            digest.update(block)
            if md5:
                old.update(block)
            b.update(len(block))
    found = _size(path), digest.hexdigest(), old.hexdigest()
    if found[0] == size and found[1] == (sha256 or found[1]) and found[2] == (md5 or found[2]):
        return found[1]
    if ours:
        path.unlink()
        raise UsageError(f"{path.name} came damaged (SHA-256 {found[1]}) and was removed: run the same command again")
    raise UsageError(f"{path} is not the published file (SHA-256 {found[1]}): move it away")


def _move_into(staged: Path, folder: Path) -> None:
    """Move a staged folder to its destination: as a whole if there is none yet, else file by file, replacing none."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.replace(staged, folder)
        return
    for path in sorted(staged.iterdir()):
        if path.is_dir():
            _move_into(path, folder / path.name)
        elif not (folder / path.name).exists():
            os.replace(path, folder / path.name)
        elif _size(folder / path.name) != _size(path):
            raise UsageError(f"{folder / path.name} is not the published file: move it away")


def _size(path: Path) -> int | None:
    """Bytes of a file; None where there is none."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None
