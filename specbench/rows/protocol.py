"""What a row says about the protocol of its run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbench.config import parameters, protocols


def remarks(cfg: Mapping[str, Any]) -> list[str]:
    """Remarks on the protocol for a row: where the run departs from it, and which parameters it leaves open.

    cfg: the checked configuration. Empty for a run without a protocol.
    """
    if not cfg["protocol"]:
        return []
    protocol = protocols.read(protocols.name_of(cfg["protocol"]))
    departs, open_, several, code = sentences = (
        f"departs from protocol {protocol.label}",
        f"not stated by protocol {protocol.label}, so the run's own",
        f"one of the values of protocol {protocol.label}",
        f"by the released code of protocol {protocol.label}, not by its paper",
    )
    parts: dict[str, list[str]] = {sentence: [] for sentence in sentences}
    chosen = {"variant": protocol.variant[cfg["method"]]} if cfg["method"] in protocol.variant else {}
    for key, value in (protocol.values_for(cfg["model"], cfg["data"]) | chosen).items():
        if key not in cfg:
            continue
        mine = f"{key} {_shown(key, cfg[key])}"
        options = protocols.options(key, value)
        shown = [_shown(key, option) for option in options]
        if value is None:
            parts[open_].append(mine)
        elif not any(_same(cfg[key], option) for option in options):
            parts[departs].append(f"{mine} (not {' or '.join(shown)})")
        elif len(options) > 1:
            parts[several].append(f"{mine} (of {', '.join(shown)})")
        elif key in protocol.from_code:
            parts[code].append(mine)
    others = f"{', '.join(protocol.models)}, not {cfg['model']}" if protocol.models else "no model"
    found = [] if cfg["model"] in protocol.models else [f"protocol {protocol.label} names {others}"]
    return found + [f"{sentence}: {', '.join(held)}" for sentence, held in parts.items() if held]


def _same(mine: Any, option: Any) -> bool:
    return sorted(mine) == sorted(option) if isinstance(mine, list) and isinstance(option, list) else mine == option


def _shown(name: str, value: Any) -> str:
    if value is None:
        return parameters.table()[name].null
    if isinstance(value, list):
        return " + ".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
