"""`specbench list`: the choices for a run, and the plug-ins that add to them."""

from __future__ import annotations

import json
from typing import Any

from specbench.cli.arguments import Line, Own, Words, command
from specbench.errors import UsageError, unknown

GROUPS = {
    "models": "model",
    "methods": "method",
    "drafters": "drafter",
    "rules": "rule",
    "data": "data",
    "metrics": "metrics",
    "protocols": "protocol",
    "suites": "suite",
    "plugins": "",
}


@command(
    "list",
    {
        "GROUP": Words(f"any of {', '.join(GROUPS)} (default: all)", offers=lambda: GROUPS),
        "--json": Own(
            "flag", "as JSON: name, line, weights (true, false, null: needs none), plugin (null: specbench's own)"
        ),
    },
)
def main(line: Line) -> int:
    """The choices for a run, and whether their weights are here."""
    wanted = [next((name for name in GROUPS if given in (name, name.removesuffix("s"))), given) for given in line.words]
    for name in wanted:
        if name not in GROUPS:
            raise unknown("group", name, GROUPS)
    found = {
        name: _entries(group) if group else _plugins() for name, group in GROUPS.items() if not wanted or name in wanted
    }
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


def _entries(group: str) -> list[dict[str, Any]]:
    """Name, line and presence of weights (None: needs none) of every choice of a group."""
    from specbench import metrics
    from specbench.config import parameters, registry
    from specbench.storage import home

    lines = dict(parameters.choices(group))
    absent: dict[str, list[str]] = {}  # only for choices that need weights
    if group == "metrics":
        shown = parameters.found_choices().columns
        for name in parameters.single_metrics():
            columns = parameters.metric_columns(name)
            lines[name] += f" Column {', '.join(columns)}: {shown[columns[0]].better} is better."
        context = metrics.ScoringContext(metrics.ASSETS, home.metrics_folder())
        for name in parameters.single_metrics():
            try:
                absent[name] = [text] if (text := metrics.missing(name, context)) else []
            except UsageError as e:  # of a plug-in
                lines[name] += f" {e}"
    elif group in ("model", "drafter"):
        for name in lines:
            network = registry.drafter_network(name) if group == "drafter" else None
            if network and network.variants:
                lines[name] += f" Also drafter.weights=embedded:{'|'.join(network.variants)}."
            real = registry.model_sources().get(name) if group == "model" else None
            # A drafter's are for the embedded target.
            files = [network.asset] if network else parameters.default(group, name, "assets")
            if files:
                absent[name] = [f for f in files if not (registry.ASSETS / f).is_file()]
            elif real:
                absent[name] = [part for part in real.parts if not (home.model_folder(name) / part).is_dir()]
    plugins = {name: plugin for name in lines if (plugin := parameters.plugin_of(group, name))}
    return [
        {
            "name": name,
            "line": line,
            "weights": not absent[name] if name in absent else None,
            "plugin": str(plugins[name]).removeprefix("plug-in ") if name in plugins else None,
        }
        for name, line in lines.items()
    ]


def _plugins() -> list[dict[str, Any]]:
    """Every plug-in with its choices."""
    from specbench.config import parameters

    found = parameters.found_choices()
    entries = []
    for plugin in found.plugins:
        names = [
            f"{group}={name}"
            for group, choices in sorted(found.choices.items())
            for name, one in choices.items()
            if one.plugin == plugin
        ]
        line = f"{', '.join(names) or 'no choice'}, from {plugin.conf}"
        entries.append({"name": plugin.label, "line": line, "weights": None, "plugin": None})
    return entries
