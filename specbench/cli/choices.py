"""`specbench list`: the choices for a run, and the plug-ins that add to them."""

from __future__ import annotations

import json
from typing import Any

from specbench.cli.arguments import CommandLine, Own, Words, command
from specbench.config import parameters, registry
from specbench.errors import UsageError, unknown
from specbench.storage import home

GROUPS = "models methods drafters rules data metrics protocols suites plugins".split()


@command(
    "list",
    {
        "GROUP": Words(f"any of {', '.join(GROUPS)} (default: all)", offers=lambda: GROUPS),
        "--json": Own(
            "flag", "as JSON: name, line, weights (true, false, null: needs none), plugin (null: specbench's own)"
        ),
    },
)
def main(line: CommandLine) -> int:
    """The choices for a run, and whether their weights are here."""
    for given in line.words:
        if given not in GROUPS and f"{given}s" not in GROUPS:
            raise unknown("group", given, GROUPS)
    wanted = [name for name in GROUPS if not line.words or {name, name.removesuffix("s")} & set(line.words)]
    found = {name: _plugins() if name == "plugins" else _entries(name) for name in wanted}
    if line["--json"]:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return 0
    for title, entries in found.items():
        print(title)
        width = max((len(entry["name"]) for entry in entries), default=0)
        for entry in entries:
            mark = {True: "  [weights here]", False: "  [weights absent]", None: ""}[entry["weights"]]
            origin = f"  [{entry['plugin']}]" if entry["plugin"] else ""
            print(f"  {entry['name']:<{width}}  {entry['line']}{origin}{mark}")
    return 0


def _entries(title: str) -> list[dict[str, Any]]:
    """Name, line and presence of weights (None: needs none) of every choice of a group."""
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
    except UsageError as e:  # of a plug-in
        return f"{more} {e}", None


def _of_model(name: str) -> tuple[str, bool | None]:
    real = registry.model_sources().get(name)
    parts = [registry.ASSETS / file for file in (parameters.default("model", name, "assets") or ())]
    parts = parts or [home.model_folder(name) / part for part in (real.parts if real else ())]
    return "", all(part.exists() for part in parts) if parts else None


def _of_drafter(name: str) -> tuple[str, bool | None]:
    """As of a model; the weights are those for the embedded target."""
    network = registry.drafter_network(name)
    if network is None:
        return "", None
    more = f" Also drafter.weights=embedded:{'|'.join(network.variants)}." if network.variants else ""
    return more, (registry.ASSETS / network.asset("scenes")).is_file()


def _plugins() -> list[dict[str, Any]]:
    """Every plug-in with its choices."""
    found = parameters.found_choices()
    entries = []
    for plugin in found.plugins:
        every = ((group, *one) for group, choices in sorted(found.choices.items()) for one in choices.items())
        names = [f"{group}={name}" for group, name, one in every if one.plugin == plugin]
        entries.append(_entry(plugin.label, f"{', '.join(names) or 'no choice'}, from {plugin.conf}"))
    return entries
