"""`specbench fetch`: weights of models and of evaluators, and data sets, listed before the download."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from specbench.cli.arguments import Arguments, Line, Own, command
from specbench.config import parameters, registry
from specbench.errors import UsageError, unknown
from specbench.storage import downloads, home, sources
from specbench.storage.downloads import FetchRecord
from specbench.storage.files import format_size, size
from specbench.storage.sources import Part

_OF = {
    "model": {"weights", "drafter", "size", "repository", "revision"},
    "data": {"data_dir"},
    "metrics": {"metrics_dir"},
}


def _arguments() -> Arguments:
    models, drafters, data = registry.model_sources(), registry.network_folders(), registry.data_sources()
    return {
        "model=NAME": Own("string", f"the model whose weights to fetch: {', '.join(models)}", offers=lambda: models),
        "weights=DIR": Own("string", "where to put them (default: the folder of weights=official in a run)"),
        "drafter=NAME": Own(
            "string",
            f"a drafter of a run whose published weights to fetch, too: {', '.join(drafters)}",
            offers=lambda: drafters,
        ),
        "size=": Own("string", "of lumina_mgpt: 768 (default), 512 or 1024 pixels, each with its own checkpoint"),
        "repository=OWNER/NAME": Own("string", "another Hugging Face repository for the target"),
        "revision=": Own("string", "branch or commit of the target's repository (default: as listed below)"),
        "data=NAME": Own("string", f"the data set to fetch: {', '.join(data)}", offers=lambda: data),
        "data_dir=DIR": Own("string", "where to put it (default: where a run looks for it)"),
        "metrics=NAME,NAME": Own(
            "string",
            "the metrics, or sets of them, whose networks to fetch: see specbench list metrics",
            offers=lambda: parameters.choices("metrics"),
        ),
        "metrics_dir=DIR": Own("string", "where to put them (default: where a run looks for them)"),
        "--yes": Own("flag", "do not ask"),
    }


_PINNED = "Repositories, pinned to a commit or a release; main: none is known, a fetch takes and records the latest"


@command("fetch", _arguments, tables={_PINNED: "specbench.cli.fetch:revisions"})
def main(line: Line) -> int:
    """Shows the files of a model, of metrics or of a data set, their sizes and licences, asks, and fetches the missing
    ones. After an interruption, the same command continues where it stopped. Set HF_TOKEN, or run `hf auth login`, for
    repositories that require it.

      specbench fetch model=NAME [drafter=NAME] [weights=DIR] [--yes]
      specbench fetch metrics=NAME[,NAME...] [metrics_dir=DIR] [--yes]
      specbench fetch data=NAME [data_dir=DIR] [--yes]
    """
    given = _parse(line)
    try:
        if "model" in given:
            _fetch_model(given, line["--yes"])
        elif "metrics" in given:
            _fetch_metrics(given, line["--yes"])
        else:
            _fetch_data(given, line["--yes"])
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command continues where it stopped") from None
    return 0


def revisions() -> dict[str, str]:
    """Every repository, and the commit that it is pinned to."""
    models = registry.model_sources().values()
    parts = [p for m in models for p in (*m.parts.values(), *m.drafters.values(), *m.sizes.values(), *m.instead)]
    at = {p.repository: p.revision if p.pinned else "main" for p in (*parts, *registry.evaluators().values())}
    return dict(sorted(at.items()))


def _parse(line: Line) -> dict[str, str]:
    given = {name: line[name] for name in line.given if not name.startswith("-")}
    kinds = [kind for kind in _OF if kind in given]
    if len(kinds) != 1:
        raise UsageError(
            "name what to fetch: model=NAME, metrics=NAMES or data=NAME, one of them (see specbench fetch --help)"
        )
    (kind,) = kinds
    if foreign := sorted(set(given) - {kind} - _OF[kind]):
        raise UsageError(f"'{foreign[0]}' has no meaning with {kind}=: leave it out")
    return given


def _fetch_model(given: Mapping[str, str], yes: bool) -> None:
    model = given["model"]
    parts, default = _chosen_parts(given)
    asked = given.get("weights", "official")
    folder = default if asked == "official" else home.expanded(asked)
    if not _fetch_parts(model, parts, folder, given.get("revision"), yes, "weights=DIR"):
        return
    arguments = f"model={model}" + (f" size={given['size']}" if "size" in given else "")
    if folder != home.model_folder(model):
        arguments += f" weights={folder}"
    print(f"{model} is in {folder}: specbench run {arguments} ...")


def _fetch_metrics(given: Mapping[str, str], yes: bool) -> None:
    names = given["metrics"]
    folder = home.expanded(given.get("metrics_dir", home.metrics_folder()))
    parts = {name: registry.evaluators()[name] for name in _evaluators(names.split(","))}
    if not parts:
        print(f"{names}: nothing to fetch, these evaluators are part of specbench")
    elif _fetch_parts(names, parts, folder, None, yes, "metrics_dir=DIR"):
        arguments = f"metrics={names}" + (f" metrics_dir={folder}" if folder != home.metrics_folder() else "")
        print(f"{names}: the weights are in {folder}: specbench run {arguments} ...")


def _evaluators(names: Sequence[str]) -> list[str]:
    """The folders that metrics and sets of metrics read, each once."""
    found: dict[str, None] = {}
    for name in names:
        if name not in parameters.choices("metrics"):
            raise unknown("metric", name, parameters.choices("metrics"))
        for one in sorted(parameters.declared("metrics", name)):
            found |= dict.fromkeys(registry.evaluator_folders(one))
    return list(found)


def _chosen_parts(given: Mapping[str, str]) -> tuple[dict[str, Part], Path]:
    """The parts that the arguments name, and their default folder."""
    model = given["model"]
    if model not in registry.model_sources():
        raise unknown("model", model, registry.model_sources())
    entry, folder = registry.model_sources()[model], home.model_folder(model)
    parts, drafters = dict(entry.parts), entry.drafters
    if "size" in given:
        if not entry.sizes:
            raise UsageError(f"{model} has one size: leave size= out")
        if given["size"] in entry.sizes:
            parts["target"], drafters = entry.sizes[given["size"]], {}
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
        if given["drafter"] not in registry.network_folders():
            raise unknown("drafter with weights", given["drafter"], registry.network_folders())
        name = registry.network_folders()[given["drafter"]]
        if name not in drafters:
            of = f"{model} of size {given['size']}" if drafters != entry.drafters else model
            raise UsageError(f"no {name} weights are published for {of}: put your own into {folder / name}")
        parts[name] = drafters[name]
    return parts, folder


def _fetch_parts(
    title: str, parts: Mapping[str, Part], folder: Path, revision: str | None, yes: bool, other_folder: str
) -> bool:
    """Fetch what is not in `folder` yet; returns whether anything was missing.

    revision: the one that the target must have, if the user gave it. other_folder: the argument that names another
    folder.
    """
    record = FetchRecord(folder)
    todo = {
        name: part
        for name, part in parts.items()
        if not downloads.is_fetched(record, name, part, folder, revision if name == "target" else None, other_folder)
    }
    if not todo:
        print(f"{title}: nothing to fetch, {', '.join(f'{name}/' for name in parts)} are in {folder}")
        return False
    by_hand = f"put {sources.listing(todo)} of {folder}"
    listed = {name: downloads.list_part(name, part, record, by_hand) for name, part in todo.items()}
    total = 0
    print(f"{title} -> {folder}")
    for name, found in listed.items():
        at = f"commit {found.commit}" if found.part.pinned else f"{found.part.revision}, now commit {found.commit}"
        at = f"release {found.commit}" if found.part.sizes else at
        at = f"the file of {found.commit}" if found.part.address else at
        print(f"  {name}/: {found.part.repository}, {at} ({found.part.licence})")
        for file, published in found.files.items():
            here = size(folder / name / file)
            if here not in (None, published.size):  # the user's file, which is never overwritten
                raise UsageError(
                    f"{folder / name / file} has {here} bytes, the one of {found.part.repository} has"
                    f" {published.size}: move it away, or name another folder with {other_folder}"
                )
            total += published.size if here is None else 0
            print(f"    {format_size(published.size):>9}  {file}{'' if here is None else '  (there)'}")
    for licence, meaning in sources.NON_COMMERCIAL.items():
        if names := [f"{name}/" for name, found in listed.items() if found.part.licence == licence]:
            print(f"  licence of {', '.join(names)}: {licence}, {meaning}")
    _confirm(folder, total, total, yes, other_folder)
    with downloads.staged(folder) as staging:
        for name, found in listed.items():
            downloads.fetch_part(record, folder, staging, name, found)
    return True


def _fetch_data(given: Mapping[str, str], yes: bool) -> None:
    name = given["data"]
    if name in parameters.choices("data") and name not in registry.data_sources():
        own = parameters.declared("data", name) & {"prompts", "data_dir"}
        why = "its file comes from you" if own else "it needs no files"
        raise UsageError(f"data={name} has nothing to fetch: {why} (fetched are: {', '.join(registry.data_sources())})")
    if name not in registry.data_sources():
        raise unknown("data", name, registry.data_sources())
    data = registry.data_sources()[name]
    folder = home.expanded(given.get("data_dir", home.data_folder(name)))
    record = FetchRecord(folder)
    todo = [file for file in data.files if not downloads.is_unpacked(record, file, folder)]
    if not todo:
        print(f"{name}: nothing to fetch, it is in {folder}")
        return
    for file in todo:
        if not file.unpack and size(folder / file.name) not in (None, file.size):
            raise UsageError(
                f"{folder / file.name} is not the published file: move it away, or give another data_dir=DIR"
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
    """Check the disk space, then ask for consent. Raises UsageError without either."""
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(above).free
    print(f"  to fetch: {format_size(missing)}; free there: {format_size(free)}", flush=True)
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
