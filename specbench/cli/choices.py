"""`specbench list`: the choices for a run, and the plug-ins that add to them."""

from __future__ import annotations

import json
from typing import Any

from specbench.cli.arguments import Argument, CommandLine, Words, command
from specbench.config import parameters, registry
from specbench.errors import UsageError, unknown
from specbench.storage import home

GROUPS = "models methods drafters rules data metrics protocols suites plugins".split()


@command(
    "list",
    {
        "GROUP": Words(f"any of {', '.join(GROUPS)} (default: all)", offers=lambda: GROUPS),
        "--json": Argument(
            "flag", "as JSON: name, line, weights (true, false, null: needs none), plugin (null: specbench's own)"
        ),
    },
)
def main(line: CommandLine) -> int:
    """The choices for a run, and whether their weights exist on this machine."""
    for group in line.words:
        if group not in GROUPS and f"{group}s" not in GROUPS:
            raise unknown("group", group, GROUPS)
    wanted = [name for name in GROUPS if not line.words or {name, name.removesuffix("s")} & set(line.words)]
    by_group = {name: _plugins() if name == "plugins" else _entries(name) for name in wanted}
    if line["--json"]:
        print(json.dumps(by_group, indent=1, ensure_ascii=False))
        return 0
    for title, entries in by_group.items():
        print(title)
        width = max((len(entry["name"]) for entry in entries), default=0)
        for entry in entries:
            mark = {True: "  [weights here]", False: "  [weights missing]", None: ""}[entry["weights"]]
            origin = f"  [{entry['plugin']}]" if entry["plugin"] else ""
            print(f"  {entry['name']:<{width}}  {entry['line']}{origin}{mark}")
    return 0


def _entries(title: str) -> list[dict[str, Any]]:
    """Name, line and presence of weights (None: needs no weights) of every choice of a group."""
    group = title if title == "metrics" else title.removesuffix("s")
    about = {"metrics": _of_metric, "model": _of_model, "drafter": _of_drafter}.get(group, lambda _: ("", None))
    entries = []
    for name, line in parameters.choices(group).items():
        more, here = about(name)
        entries.append(_entry(name, line + more, here, parameters.plugin_of(group, name)))
    return entries


def _entry(name: str, line: str, weights: bool | None = None, plugin: object = None) -> dict[str, Any]:
    label = str(plugin).removeprefix("plug-in ") if plugin else None
    return {"name": name, "line": line, "weights": weights, "plugin": label}


def _of_metric(name: str) -> tuple[str, bool | None]:
    from specbench import metrics

    if name not in parameters.single_metrics():
        return "", None
    columns = parameters.metric_columns(name)
    more = f" Column {', '.join(columns)}: {parameters.found_choices().columns[columns[0]].better} is better."
    try:
        return more, not metrics.missing(name, metrics.ScoringContext(metrics.ASSETS, home.metrics_folder()))
    except UsageError as e:  # raised by a plug-in
        return f"{more} {e}", None


def _of_model(name: str) -> tuple[str, bool | None]:
    real = registry.model_sources().get(name)
    parts = [registry.ASSETS / file for file in (parameters.default("model", name, "assets") or ())]
    parts = parts or [home.model_folder(name) / part for part in (real.parts if real else ())]
    return "", all(part.exists() for part in parts) if parts else None


def _of_drafter(name: str) -> tuple[str, bool | None]:
    """See `_of_model`; the weights are those for the embedded target."""
    network = registry.drafter_network(name)
    if network is None:
        return "", None
    more = f" Also drafter.weights=embedded:{'|'.join(network.variants)}." if network.variants else ""
    return more, (registry.ASSETS / network.asset("scenes")).is_file()


def _plugins() -> list[dict[str, Any]]:
    """Every plug-in with its choices."""
    available = parameters.found_choices()
    entries = []
    for plugin in available.plugins:
        every = ((group, *choice) for group, choices in sorted(available.choices.items()) for choice in choices.items())
        names = [f"{group}={name}" for group, name, choice in every if choice.plugin == plugin]
        entries.append(_entry(plugin.label, f"{', '.join(names) or 'no choice'}, from {plugin.conf}"))
    return entries
