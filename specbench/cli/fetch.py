"""`specbench fetch`: weights of models and of evaluators, and data sets. Lists the files before the download."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbench.cli.arguments import Argument, Arguments, CommandLine, command
from specbench.config import parameters, registry
from specbench.errors import UsageError, unknown
from specbench.storage import downloads, home, sources
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
        "model=NAME": Argument(
            "string", f"the model whose weights to fetch: {', '.join(models)}", offers=lambda: models
        ),
        "weights=DIR": Argument(
            "string", "where to put them (default: the folder that weights=official reads in a run)"
        ),
        "drafter=NAME": Argument(
            "string",
            f"also fetch the published weights of this drafter: {', '.join(drafters)}",
            offers=lambda: drafters,
        ),
        "size=": Argument(
            "string", "lumina_mgpt only: 768 (default), 512 or 1024 pixels, each with its own checkpoint"
        ),
        "repository=OWNER/NAME": Argument("string", "OWNER/NAME on Hugging Face, for the target", pattern=_REPOSITORY),
        "revision=": Argument("string", "branch or commit of the target's repository (default: as listed below)"),
        "data=NAME": Argument("string", f"the data set to fetch: {', '.join(data)}", offers=lambda: data),
        "data_dir=DIR": Argument("path", "where to put it (default: where a run looks for it)"),
        "metrics=NAME,NAME": Argument(
            "string",
            "the metrics, or sets of them, whose networks to fetch: see specbench list metrics",
            offers=lambda: parameters.choices("metrics"),
        ),
        "metrics_dir=DIR": Argument("path", "where to put them (default: where a run looks for them)"),
        "--yes": Argument("flag", "do not ask"),
        "--dry-run": Argument("flag", "only show where the files come from; contacts no server"),
    }


_PINNED = "Repositories, pinned to a commit or a release; main: not pinned, a fetch takes and records the latest commit"


@command("fetch", _arguments, tables={_PINNED: "specbench.cli.fetch:revisions"})
def main(line: CommandLine) -> int:
    """Shows the files of a model, of metrics or of a data set, with sizes and licences, asks, and fetches the missing
    ones. After an interruption, the same command continues where it stopped. For repositories that need a login, set
    HF_TOKEN or run `hf auth login`.

      specbench fetch model=NAME [drafter=NAME] [weights=DIR] [--yes] [--dry-run]
      specbench fetch metrics=NAME[,NAME...] [metrics_dir=DIR] [--yes] [--dry-run]
      specbench fetch data=NAME [data_dir=DIR] [--yes] [--dry-run]
    """
    args = _parse(line)
    try:
        if line["--dry-run"]:
            print("\n".join(_origins(args)))
        elif "data" in args:
            downloads.fetch_data(args["data"], *_data(args), line["--yes"])
        else:
            _fetch_parts(args, line["--yes"])
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command continues where it stopped") from None
    return 0


def _origins(args: Mapping[str, Any]) -> Iterator[str]:
    """Lines on the sources of the files, and their folders inside the destination."""
    if "data" in args:
        data, folder = _data(args)
        yield f"{args['data']} -> {folder}"
        yield from (f"    {sources.sized(file.size):>12}  {file.address}" for file in data.files)
        yield f"  licence: {data.licence}"
        return
    parts, folder = _parts(args)
    yield f"{args.get('model', args.get('metrics'))} -> {folder}"
    for name, part in parts.items():
        yield f"  {name}/: {part.repository}, {part.revision} ({part.licence})"
        yield from (f"    {sources.sized(size):>12}  {file}" for file, size in part.known_sizes.items())
        yield from [f"    if they exist: {', '.join(part.also)}"] if part.also else []


def revisions() -> dict[str, str]:
    """Every repository, and the commit that it is pinned to."""
    models = registry.model_sources().values()
    parts = [p for m in models for p in (*m.parts.values(), *m.drafters.values(), *m.sizes.values(), *m.instead)]
    at = {p.repository: p.revision if p.pinned else "main" for p in (*parts, *registry.evaluators().values())}
    return dict(sorted(at.items()))


def _parse(line: CommandLine) -> dict[str, Any]:
    args = {name: line[name] for name in line.given if not name.startswith("-")}
    kinds = [kind for kind in _OF if kind in args]
    if len(kinds) != 1:
        raise UsageError(
            "name exactly one thing to fetch: model=NAME, metrics=NAMES or data=NAME (see specbench fetch --help)"
        )
    (kind,) = kinds
    if foreign := sorted(set(args) - {kind} - _OF[kind]):
        raise UsageError(f"'{foreign[0]}' has no meaning with {kind}=: leave it out")
    return args


def _fetch_parts(args: Mapping[str, Any], yes: bool) -> None:
    kind, option = ("model", "weights") if "model" in args else ("metrics", "metrics_dir")
    names, default = args[kind], home.model_folder(args[kind]) if kind == "model" else home.metrics_folder()
    parts, folder = _parts(args)
    if not parts:
        print(f"{names}: nothing to fetch, these evaluators are part of specbench")
    elif downloads.fetch_parts(names, parts, folder, args.get("revision"), yes, f"{option}=DIR"):
        arguments = [f"{key}={args[key]}" for key in (kind, "size") if key in args]
        arguments += [f"{option}={folder}"] if folder != default else []
        print(f"{names} is in {folder}: specbench run {' '.join(arguments)} ...")


def _parts(args: Mapping[str, Any]) -> tuple[dict[str, Part], Path]:
    """The parts that the arguments name, each once, and the folder for them."""
    if "model" in args:
        parts, folder = _of_model(args)
        destination = args.get("weights", "official")
        return parts, folder if destination == "official" else home.expanded(destination)
    folders: list[str] = []
    for name in args["metrics"].split(","):
        if name not in parameters.choices("metrics"):
            raise unknown("metric", name, parameters.choices("metrics"))
        for metric in sorted(parameters.declared("metrics", name)):
            folders += registry.evaluator_folders(metric)
    return {name: registry.evaluators()[name] for name in folders}, args.get("metrics_dir", home.metrics_folder())


def _of_model(args: Mapping[str, Any]) -> tuple[dict[str, Part], Path]:
    """The parts of a model, and their default folder."""
    model = args["model"]
    if model not in registry.model_sources():
        raise unknown("model", model, registry.model_sources())
    entry, folder = registry.model_sources()[model], home.model_folder(model)
    parts, drafters = dict(entry.parts), entry.drafters
    if "size" in args:
        if not entry.sizes:
            raise UsageError(f"{model} has one size: leave size= out")
        if args["size"] in entry.sizes:
            parts["target"], drafters = entry.sizes[args["size"]], {}
            folder = home.model_folder(f"{model}_{args['size']}")
        elif args["size"] != (default := str(parameters.default("model", model, "size"))):
            raise unknown("size", args["size"], [default, *entry.sizes])
    if "repository" in args:
        name = args["repository"]
        known = {part.repository: part for part in (*entry.instead, parts["target"], *entry.sizes.values())}
        parts["target"] = known.get(name) or Part(name, "see its page")
    if "revision" in args:
        parts["target"] = replace(parts["target"], revision=args["revision"])
    if "drafter" in args:
        if args["drafter"] not in registry.network_folders():
            raise unknown("drafter with weights", args["drafter"], registry.network_folders())
        name = registry.network_folders()[args["drafter"]]
        if name not in drafters:
            target = f"{model} of size {args['size']}" if drafters != entry.drafters else model
            raise UsageError(f"no {name} weights are published for {target}: put your own into {folder / name}")
        parts[name] = drafters[name]
    return parts, folder


def _data(args: Mapping[str, Any]) -> tuple[Data, Path]:
    """The files of a data set, and the folder for them. UsageError if it has no files to fetch."""
    name, known = args["data"], registry.data_sources()
    if name not in parameters.choices("data"):
        raise unknown("data", name, known)
    if name not in known:
        is_users = parameters.declared("data", name) & {"prompts", "data_dir"}
        why = "its file comes from you" if is_users else "it needs no files"
        raise UsageError(f"data={name} has nothing to fetch: {why} (data sets with files: {', '.join(known)})")
    return known[name], args.get("data_dir", home.data_folder(name))
