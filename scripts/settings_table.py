"""The table of docs/models.md: the settings of every real model, and which published protocols and released codes set
others.

python scripts/settings_table.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

CONF = Path(__file__).resolve().parents[1] / "conf"
HEAD = (
    "| model | guidance | temperature | top-k | top-p | published protocols that set others"
    " | released variants that set others |"
)
SAMPLING = ("cfg_scale", "temperature", "top_k", "top_p")
COMPARED = ("unconditional", *SAMPLING)


def _read(folder: str) -> dict[str, dict[str, Any]]:
    return {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((CONF / folder).glob("*.yaml"))
    }


def _text(value: Any) -> str:
    if value is None or value == "off":
        return "off"
    return (
        " or ".join(map(_text, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _others(given: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """What a protocol sets otherwise; null is what its paper does not say."""
    known = {name: given[name] for name in COMPARED if given.get(name) is not None}
    return " ".join(f"{name}={_text(x)}" for name, x in known.items() if _text(x) != _text(own[name]))


def lines() -> Iterator[str]:
    protocols, methods = _read("protocol"), _read("method")
    yield HEAD
    yield "|---" * HEAD[1:].count("|") + "|"
    for model, own in _read("model").items():
        if own.get("weights") != "official" or own["kind"] != "discrete":
            continue
        published: dict[str, list[str]] = {}
        for name, protocol in protocols.items():
            if found := _others(protocol["models"].get(model) or {}, own):
                published.setdefault(found, []).append(f"`{name}`")
        released = [
            f"`{name} variant={variant}`: {' '.join(f'{k}={_text(v)}' for k, v in (values['models'][model]).items())}"
            for name, method in methods.items()
            for variant, values in (method.get("variants") or {}).items()
            if model in (values.get("models") or {})
        ]
        cells = [f"`{model}`", *(_text(own[name]) for name in SAMPLING)]
        cells.append("; ".join(f"{', '.join(names)}: {found}" for found, names in published.items()))
        yield f"| {' | '.join([*cells, '; '.join(released)])} |"


def main() -> int:
    print("\n".join(lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
