"""The rows of an audit as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbench.audit.audit import COLUMNS

_PARTS = ("drafter", "rule")
_FIRST = ("method", *_PARTS, "model")
_PRINTED = [*_FIRST, *(name for name in COLUMNS if name not in _FIRST)]
_PRINTED = _PRINTED[: _PRINTED.index("verdict") + 1]
_PRINTED_CONTINUOUS = [*_FIRST, *"dim T samples ks ks_noise energy energy_noise p_value accepted_length".split()]
_PRINTED_CONTINUOUS += ["acceptance_rate", "proposals", "fallbacks", "verdict"]
_FORMATS = {
    "p_value": ".2g",
    "accepted_length": ".3f",
    "accepted_length_expected": ".3f",
    "energy": ".2g",
    "energy_noise": ".2g",
    "acceptance_rate": ".3f",
    "proposals": ".2f",
}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The columns up to the verdict, aligned, those of continuous tokens in a table of their own; a cell that does not
    apply is empty. The parameters of every audited method follow."""
    kinds = (_PRINTED, [r for r in rows if r["dim"] is None]), (_PRINTED_CONTINUOUS, [r for r in rows if r["dim"]])
    audited = dict.fromkeys(f"{name_of(row)}: {_audited(row)}" for row in rows)
    return "\n\n".join([*(_aligned(names, some) for names, some in kinds if some), "\n".join(audited), summary(rows)])


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line per method and rule: the verdict over all audited models and drafts, with the largest upper limit, which
    holds for the largest distance of all."""
    lines = []
    for method, rule in dict.fromkeys((name_of(row), row["rule"]) for row in rows):
        mine = [row for row in rows if (name_of(row), row["rule"]) == (method, rule)]
        verdicts = [row["verdict"] for row in mine]
        verdict = next((v for v in ("not lossless", "undecided") if v in verdicts), "lossless")
        limits = [
            f"{name} <= {max(highs):.4f} at 95 %"
            for name, column in (("TV", "tv_high"), ("KS", "ks_high"))
            if (highs := [row[column] for row in mine if row[column] is not None])
        ]
        chains = [row for row in mine if row["kl_bound"] is not None]
        if chains and verdict == "not lossless":
            far = max(chains, key=lambda row: row["kl_exact"])
            limits.append(f"TV {far['tv_unbiased']:.4f} sampled, {far['tv_exact']:.4f} enumerated")
            limits.append(f"KL {far['kl_exact']:.4f} <= {far['kl_bound']:.4f} nats, the sum of log(largest e / p)")
        worst = min(row["p_value"] for row in mine)
        lines.append(
            f"{method} (rule {rule}): {verdict}, {', '.join(limits)}; {len(mine)} rows, smallest p {worst:.2g}"
        )
    if refuted := [row for row in rows if row["verdict"] == "not lossless" and row["tv_high"] is not None]:
        least = min(refuted, key=lambda row: row["tv_high"])
        between = f"{least['tv_low']:.4f} to {least['tv_high']:.4f}"
        lines.append(f"smallest TV that was refuted: {between}, of {name_of(least)} on {least['model']}")
    return "\n".join(lines)


def name_of(row: Mapping[str, Any]) -> str:
    """The method of a row, and its variant if it has one."""
    return f"{row['method']} variant={row['variant']}" if row["variant"] else str(row["method"])


def _audited(row: Mapping[str, Any]) -> str:
    """The decoding parts as command-line arguments: not the preset alone, whose parts the arguments may override."""
    return " ".join([*(f"{part}={row[part]}" for part in _PARTS), row["parameters"]])


def _aligned(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [names, *([name_of(row) if name == "method" else _cell(name, row[name]) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    texts = {*_FIRST, "verdict"}
    lines = []
    for line in cells:
        parts = [
            cell.ljust(width) if name in texts else cell.rjust(width) for name, cell, width in zip(names, line, widths)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    return format(value, _FORMATS.get(name, ".4f")) if isinstance(value, float) else str(value)
