"""`specbench fetch`: weights of models and of evaluators, and data sets, listed before the download."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbench.cli.arguments import Arguments, CommandLine, Own, command
from specbench.config import parameters, registry
from specbench.errors import UsageError, unknown
from specbench.storage import fetching, home, sources
from specbench.storage.files import format_size
from specbench.storage.sources import Data, Part

_OF = {
    "model": {"weights", "drafter", "size", "repository", "revision"},
    "data": {"data_dir"},
    "metrics": {"metrics_dir"},
}
_REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"


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
        "repository=OWNER/NAME": Own("string", "OWNER/NAME on Hugging Face, for the target", pattern=_REPOSITORY),
        "revision=": Own("string", "branch or commit of the target's repository (default: as listed below)"),
        "data=NAME": Own("string", f"the data set to fetch: {', '.join(data)}", offers=lambda: data),
        "data_dir=DIR": Own("path", "where to put it (default: where a run looks for it)"),
        "metrics=NAME,NAME": Own(
            "string",
            "the metrics, or sets of them, whose networks to fetch: see specbench list metrics",
            offers=lambda: parameters.choices("metrics"),
        ),
        "metrics_dir=DIR": Own("path", "where to put them (default: where a run looks for them)"),
        "--yes": Own("flag", "do not ask"),
        "--dry-run": Own("flag", "only show from where the files come; asks no server"),
    }


_PINNED = "Repositories, pinned to a commit or a release; main: none is known, a fetch takes and records the latest"


@command("fetch", _arguments, tables={_PINNED: "specbench.cli.fetch:revisions"})
def main(line: CommandLine) -> int:
    """Shows the files of a model, of metrics or of a data set, their sizes and licences, asks, and fetches the missing
    ones. After an interruption, the same command continues where it stopped. Set HF_TOKEN, or run `hf auth login`, for
    repositories that require it.

      specbench fetch model=NAME [drafter=NAME] [weights=DIR] [--yes] [--dry-run]
      specbench fetch metrics=NAME[,NAME...] [metrics_dir=DIR] [--yes] [--dry-run]
      specbench fetch data=NAME [data_dir=DIR] [--yes] [--dry-run]
    """
    given = _parse(line)
    try:
        if line["--dry-run"]:
            print("\n".join(_origins(given)))
        elif "data" in given:
            fetching.data_set(given["data"], *_data(given), line["--yes"])
        else:
            _fetch_parts(given, line["--yes"])
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command continues where it stopped") from None
    return 0


def _origins(given: Mapping[str, Any]) -> Iterator[str]:
    """From where the files come, and their folders below the one that they are for."""
    if "data" in given:
        data, folder = _data(given)
        yield f"{given['data']} -> {folder}"
        sizes = (format_size(file.size) if file.size else "not known" for file in data.files)
        yield from (f"    {size:>9}  {file.address}" for size, file in zip(sizes, data.files))
        yield f"  licence: {data.licence}"
        return
    parts, folder = _parts(given)
    yield f"{given.get('model', given.get('metrics'))} -> {folder}"
    for name, part in parts.items():
        yield f"  {name}/: {part.repository}, {part.revision} ({part.licence})"
        yield from (f"    {text}" for text in sources.sized(part.known_sizes, part.unknown_sizes))
        yield from [f"    if there: {', '.join(part.also)}"] if part.also else []


def revisions() -> dict[str, str]:
    """Every repository, and the commit that it is pinned to."""
    models = registry.model_sources().values()
    parts = [p for m in models for p in (*m.parts.values(), *m.drafters.values(), *m.sizes.values(), *m.instead)]
    at = {p.repository: p.revision if p.pinned else "main" for p in (*parts, *registry.evaluators().values())}
    return dict(sorted(at.items()))


def _parse(line: CommandLine) -> dict[str, Any]:
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


def _fetch_parts(given: Mapping[str, Any], yes: bool) -> None:
    kind, option = ("model", "weights") if "model" in given else ("metrics", "metrics_dir")
    names, default = given[kind], home.model_folder(given[kind]) if kind == "model" else home.metrics_folder()
    parts, folder = _parts(given)
    if not parts:
        print(f"{names}: nothing to fetch, these evaluators are part of specbench")
    elif fetching.parts(names, parts, folder, given.get("revision"), yes, f"{option}=DIR"):
        arguments = [f"{key}={given[key]}" for key in (kind, "size") if key in given]
        arguments += [f"{option}={folder}"] if folder != default else []
        print(f"{names} is in {folder}: specbench run {' '.join(arguments)} ...")


def _parts(given: Mapping[str, Any]) -> tuple[dict[str, Part], Path]:
    """The parts that the arguments name, each once, and the folder for them."""
    if "model" in given:
        parts, folder = _of_model(given)
        asked = given.get("weights", "official")
        return parts, folder if asked == "official" else home.expanded(asked)
    folders: list[str] = []
    for name in given["metrics"].split(","):
        if name not in parameters.choices("metrics"):
            raise unknown("metric", name, parameters.choices("metrics"))
        for one in sorted(parameters.declared("metrics", name)):
            folders += registry.evaluator_folders(one)
    return {name: registry.evaluators()[name] for name in folders}, given.get("metrics_dir", home.metrics_folder())


def _of_model(given: Mapping[str, Any]) -> tuple[dict[str, Part], Path]:
    """The parts of a model, and their default folder."""
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
        elif given["size"] != (own := str(parameters.default("model", model, "size"))):
            raise unknown("size", given["size"], [own, *entry.sizes])
    if "repository" in given:
        name = given["repository"]
        known = {part.repository: part for part in (*entry.instead, parts["target"], *entry.sizes.values())}
        parts["target"] = known.get(name) or Part(name, "see its page")
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


def _data(given: Mapping[str, Any]) -> tuple[Data, Path]:
    """The files of a data set, and the folder for them. UsageError where it has none to fetch."""
    name, known = given["data"], registry.data_sources()
    if name not in parameters.choices("data"):
        raise unknown("data", name, known)
    if name not in known:
        own = parameters.declared("data", name) & {"prompts", "data_dir"}
        why = "its file comes from you" if own else "it needs no files"
        raise UsageError(f"data={name} has nothing to fetch: {why} (fetched are: {', '.join(known)})")
    return known[name], given.get("data_dir", home.data_folder(name))
