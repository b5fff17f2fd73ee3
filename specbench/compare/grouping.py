"""Breakdowns of passes by category of prompt, caption length and position in the image, and their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specbench import data
from specbench.compare import passes
from specbench.compare.passes import ScoredPass
from specbench.config import indices, parameters
from specbench.errors import UsageError, plain
from specbench.rows.breakdown import STATISTICS, breakdown
from specbench.rows.differences import LEVEL
from specbench.rows.journal import Record

Group = Mapping[str, Any]

_HEADS = {
    "acceptance_rate": "acceptance rate",
    "step_compression": "step compression",
    "speedup_step": "steps saved",
    "speedup_latency": "speed-up in latency",
}


def of_pass(one: ScoredPass) -> list[dict[str, Any]]:
    """The breakdown of a pass, against the vanilla images that its run decoded for it, if there are any.

    Raises UsageError for a pass without steps (a server decoded) and for damaged records.
    """
    images = one.records
    if any(r.request_s is not None for r in images.values()):
        raise UsageError(f"{one.argument}: a server does not tell its steps, so there is nothing to break down")
    vanilla: Mapping[int, Record] = {}
    if not one.baseline and (one.folder / "baseline.jsonl").is_file():
        vanilla = passes.read(str(one.folder / "baseline.jsonl")).records
    indices = sorted(images.keys() & vanilla.keys() if vanilla else images)
    mine = _with_categories([images[i] for i in indices], one.cfg)
    found = _checked(one, mine, [vanilla[i] for i in indices] if vanilla else None, _in_raster_order(one), one.again)
    return [{"run_id": one.run_id, "method": one.method, **row} for row in found]


def groups_of(a: ScoredPass, b: ScoredPass, pairs: Sequence[tuple[Record, Record]]) -> tuple[tuple[Group, Group], ...]:
    """The breakdown of A over these pairs, and that of B with A as its baseline, group by group."""
    first, second = (_with_categories([two[side] for two in pairs], a.cfg) for side in (0, 1))
    if any(r.request_s is not None for r in [*first, *second]):
        return ()
    # A group is named by A's prompts; those of B may differ in nothing but its version's category.
    second = [replace(y, id=x.id, prompt=x.prompt, category=x.category) for x, y in zip(first, second, strict=True)]
    raster = _in_raster_order(a) and _in_raster_order(b) and len({r.tokens for r in [*first, *second]}) == 1
    return tuple(zip(_checked(a, first, None, raster), _checked(b, second, first, raster, b.again), strict=True))


def _checked(
    one: ScoredPass,
    images: Sequence[Record],
    vanilla: Sequence[Record] | None,
    raster: bool,
    again: Sequence[Record] = (),
) -> list[dict[str, Any]]:
    try:
        return breakdown(images, vanilla, raster, again)
    except (ValueError, IndexError, TypeError):
        raise UsageError(f"{one.argument}: the steps in its records are damaged; decode it again") from None


def _in_raster_order(one: ScoredPass) -> bool:
    return parameters.default("drafter", str(one.cfg["drafter"]), "raster") is not False


def _with_categories(images: Sequence[Record], cfg: Mapping[str, Any]) -> list[Record]:
    """Records of older versions have no category: from the prompts of the data set, where these are still there."""
    if not images or any(r.category is not None for r in images):
        return list(images)
    try:
        items = data.load({**cfg, "n": max(indices.prompt_of(r.index) for r in images) + 1})
    except (UsageError, KeyError):
        return list(images)
    here = [items[indices.prompt_of(r.index)] for r in images]
    return [replace(r, category=item.kind) if item.prompt == r.prompt else r for r, item in zip(images, here)]


def table(rows: Sequence[Group]) -> list[str]:
    """A breakdown as lines of text."""
    shown = [name for name in STATISTICS if any(row.get(name) is not None for row in rows)]
    head = ["by", "group", "prompts", "images", *(_HEADS[name] for name in shown)]
    cells = [
        [row["by"], plain(row["group"])[:40], str(row["prompts"]), str(row["images"]), *(_text(row, n) for n in shown)]
        for row in rows
    ]
    return _lines([head, *cells])


def pair_table(groups: Sequence[tuple[Group, Group]]) -> list[str]:
    """The breakdowns of A and B as lines of text."""
    head = ["", "", "prompts", "acceptance A", "acceptance B", "compression A", "compression B", "steps of A / B"]
    cells = [
        [
            a["by"],
            plain(a["group"])[:30],
            str(a["prompts"]),
            *(_text(row, name, False) for name in ("acceptance_rate", "step_compression") for row in (a, b)),
            _text(b, "speedup_step"),
        ]
        for a, b in groups
    ]
    return _lines([head, *cells])


def interval() -> str:
    return f"{LEVEL:.0%} intervals in brackets count a prompt once"


def _text(row: Group, name: str, bounds: bool = True) -> str:
    if row.get(name) is None:
        return "-"
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return f"{row[name]:.3f}" + (f" ({low:.3f} to {high:.3f})" if bounds and low is not None else "")


def _lines(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = 2  # columns of names
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
