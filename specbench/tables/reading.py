"""Tables and suites from YAML: conf/suite/NAME.yaml, or a user's file. docs/suites.md describes the format.

A line with a list in the place of a value is a sweep: one line for each value, and a curve of the figure.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from specbench.config import command_line, parameters
from specbench.errors import one_line, plain, unknown
from specbench.rows.columns import SHOWN
from specbench.tables.definitions import (
    DEFAULT_MODEL,
    REMARKS,
    STANDARD,
    SYMBOLS,
    Column,
    Curve,
    Line,
    Maps,
    Matched,
    Panel,
    Series,
    Stack,
    Table,
    TableFigure,
    TableTest,
    row_column,
)
from specbench.tables.suite_files import Source, short

#: What a line has next to its parameters.
_OF_LINE = ("label", "published", "elsewhere", "without")


def table(name: str, source: Source) -> Table:
    """The table of a file. UsageError for what it cannot hold."""
    held = source.held
    columns = tuple(_column(source, one) for one in source.sequence("columns", held.get("columns")))
    lines, panels = _lines(source)
    if not lines:
        raise source.fault("there are no lines: give a label and parameters each, such as `sjd: {method: sjd}`")
    rows_of = held.get("rows_of", "run")
    if rows_of not in ("run", "bench", "probe"):
        raise source.fault(f"rows_of must be run, bench or probe (got {short(rows_of)})")
    return Table(
        id=name,
        title=source.text("title", held.get("title", name)),
        paper=source.text("paper", held.get("paper", "own comparison")),
        n=source.integer("n", held["n"]) if "n" in held else 0 if rows_of == "bench" else 16,
        protocol=overrides(source, "with", source.mapping("with", held.get("with"))),
        columns=columns,
        lines=tuple(lines),
        remarks=tuple(_remark(source, one) for one in source.sequence("remarks", held.get("remarks"))),
        figure=_figure(source, panels),
        panels=tuple(panels),
        matched=_matched(source),
        tests=tuple(_tests(source)),
        needs=tuple(source.text("needs", one) for one in source.sequence("needs", held.get("needs"))),
        rows_of=rows_of,
        on_request=bool(held.get("on_request", False)),
        model=source.text("model", held.get("model", DEFAULT_MODEL)),
    )


def _remark(source: Source, one: Any) -> str:
    text = source.text("remarks", one)
    return REMARKS.get(text, text)


def overrides(source: Source, where: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Parameters as arguments of a command line."""
    return tuple(f"{name}={_value(source, f'{where}: {name}', value)}" for name, value in given.items())


def _value(source: Source, where: str, value: Any) -> str:
    """A value of YAML in Hydra's grammar."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(_value(source, where, one) for one in value)}]"
    text = source.text(where, value)
    return text if re.fullmatch(r"[\w./:+@%-]+", text) else command_line.quoted(text)


# --- columns ----------------------------------------------------------------------------------------------------------


def _column(source: Source, one: Any) -> Column:
    if isinstance(one, str):
        return _default_column(source, one, {})
    given = source.mapping("columns", one)
    if len(given) != 1:
        raise source.fault(f"a column is its name, or `name: {{label: ...}}` (got {short(one)})")
    [(key, more)] = given.items()
    more = source.mapping(f"columns: {key}", more)
    allowed = [field.name for field in fields(Column) if field.name != "key"]
    if foreign := [name for name in more if name not in allowed]:
        raise source.fault(f"a column has no '{plain(foreign[0])}' (choose from: {', '.join(allowed)})")
    if more.get("better", "higher") not in ("higher", "lower"):
        raise source.fault(f"columns: {key}: better must be higher or lower")
    return replace(_default_column(source, key, more), **more)


def _default_column(source: Source, key: str, more: Mapping[str, Any]) -> Column:
    from specbench.bench.rows import PROBES, ROWS
    from specbench.rows.columns import COLUMNS

    if key in STANDARD:
        return STANDARD[key]
    if key in SHOWN:
        return row_column(key)
    known = {"bench": ROWS.columns, "probe": PROBES.columns}.get(source.held.get("rows_of", ""))
    if key not in (known or COLUMNS):
        raise unknown("column", plain(key), SHOWN)
    if "better" not in more:
        raise source.fault(f"column {key} needs the side that is better: `{key}: {{better: lower}}`")
    return Column(key, key, more["better"], 2, std_over=None)


# --- lines ------------------------------------------------------------------------------------------------------------


def _lines(source: Source) -> tuple[list[Line], list[Panel]]:
    """All lines, and the panels of a figure of curves."""
    lines: dict[str, Line] = {}
    own = _curves(source, "lines", source.held.get("lines"), lines)
    panels = []
    for label, one in source.mapping("panels", source.held.get("panels")).items():
        held = source.mapping(f"panels: {label}", one)
        if foreign := set(held) - {"with", "lines", "suffix", "first", "without_first", "baseline"}:
            raise source.fault(f"panels: {label} has no '{plain(min(foreign))}'")
        suffix = source.text("suffix", held.get("suffix", label))
        shared = source.mapping(f"panels: {label}: with", held.get("with"))
        first: tuple[str, ...] = ()
        if "first" in held:  # where all curves of the panel begin
            begin = _curves(source, f"panels: {label}: first", held["first"], lines, shared, suffix)
            first = tuple(key for curve in begin for key in curve.lines)
        curves = _curves(source, f"panels: {label}", held.get("lines"), lines, shared, suffix)
        apart = source.sequence(f"panels: {label}: without_first", held.get("without_first"))
        if foreign := set(map(str, apart)) - {curve.label for curve in curves}:
            raise source.fault(f"panels: {label}: without_first has {plain(min(foreign))}, which lines has not")
        joined = tuple(Curve(c.label, c.lines if c.label in apart else (*first, *c.lines)) for c in curves)
        panels.append(Panel(label, joined, source.text("baseline", held.get("baseline", ""))))
    return list(lines.values()), panels or [Panel("", tuple(own))]


def _curves(
    source: Source,
    where: str,
    held: Any,
    lines: dict[str, Line],
    shared: Mapping[str, Any] | None = None,
    suffix: str = "",
) -> list[Curve]:
    """Adds lines, sweeps among them; returns a curve for each entry."""
    curves = []
    for name, one in source.mapping(where, held).items():
        given = source.mapping(f"{where}: {name}", one)
        label = source.text("label", given.pop("label", name))
        swept = {key: value for key, value in given.items() if _sweeps(key, value)}
        rest = {key: value for key, value in given.items() if key not in swept}
        if shared:
            head = {"method": rest.pop("method")} if "method" in rest else {}
            rest = {**head, **shared, **rest}
        ending = f", {suffix}" if suffix else ""
        keys = []
        for values in itertools.product(*swept.values()):
            point = dict(zip(swept, values, strict=True))
            text = label
            for one_name, value in point.items():
                hole = f"{{{one_name}}}"
                told = f", {SYMBOLS.get(one_name, one_name)}={_shown(value)}"
                text = text.replace(hole, _shown(value)) if hole in label else text + told
            key = "_".join([name, *map(_shown, values)]) + ending
            keys.append(_line(source, key, {**rest, **point, "label": text + ending}, lines))
        curves.append(Curve(name, tuple(keys)))
    return curves


def _sweeps(name: str, value: Any) -> bool:
    if name in _OF_LINE or not isinstance(value, list):
        return False
    declared = parameters.table().get(name)
    kind = declared.kind if declared else ""
    if kind == "tree":  # a list of lists is a tree, a list of names is several
        return any(isinstance(one, str) for one in value)
    return kind not in ("names", "numbers") or (bool(value) and all(isinstance(one, list) for one in value))


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _line(source: Source, key: str, given: Mapping[str, Any], lines: dict[str, Line]) -> str:
    """Adds a line; returns its key."""
    name = re.sub(r"[^\w.=-]+", "_", key.replace("+", "p"))
    if name in lines:
        raise source.fault(f"two lines are called {name}")
    own = {k: v for k, v in given.items() if k not in _OF_LINE}
    published, elsewhere = given.get("published"), given.get("elsewhere")
    if elsewhere is not None:  # of another model: what differs, null for a parameter that it does not have
        changed = source.mapping(f"{key}: elsewhere", elsewhere)
        elsewhere = {k: v for k, v in {**own, **changed}.items() if k not in changed or v is not None}
    lines[name] = Line(
        name,
        source.text("label", given["label"]),
        overrides(source, key, own) if own or "method" in (source.held.get("with") or {}) else None,
        None if published is None else {k: str(v) for k, v in source.mapping(f"{key}: published", published).items()},
        source.text("without", given.get("without", Line.without)),
        None if elsewhere is None else overrides(source, key, elsewhere),
    )
    return name


# --- figures and tests ------------------------------------------------------------------------------------------------


def _figure(source: Source, panels: Sequence[Panel]) -> TableFigure | Series | Maps | Stack | None:
    held = source.mapping("figure", source.held.get("figure"))
    if not held:
        return None
    kinds: dict[str, Callable[..., Series | Maps | Stack]] = {"series": Series, "maps": Maps, "stack": Stack}
    for name, kind in kinds.items():
        if name in held:
            given = source.mapping(f"figure: {name}", held[name])
            try:
                return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
            except TypeError as e:
                raise source.fault(f"figure: {name}: {one_line(e)}") from None
    if foreign := set(held) - {"x", "y", "baseline", "panel", "curves", "log"}:
        raise source.fault(f"figure has no '{plain(min(foreign))}' (choose from: x, y, baseline, panel, curves, log)")
    if "curves" in held:
        curves = source.mapping("figure: curves", held["curves"]).items()
        drawn = (Curve(label, tuple(map(str, source.sequence(label, keys)))) for label, keys in curves)
        panels = [Panel("", tuple(drawn))]
    if "panel" in held:
        panels = [replace(panels[0], label=source.text("figure: panel", held["panel"]))]
    x, y = (tuple(source.text(f"figure: {k}", one) for one in source.sequence(k, held.get(k))) for k in ("x", "y"))
    if not x or not y:
        raise source.fault("figure needs x and y: columns of the table, or parameters")
    log = bool(held.get("log", False))
    if log and (len(x) > 1 or len(y) > 1):
        raise source.fault("figure: with log it has one x and one y")
    return TableFigure(x, y, source.text("baseline", held.get("baseline", "")), tuple(panels), log)


def _matched(source: Source) -> Matched | None:
    held = source.mapping("matched", source.held.get("matched"))
    if not held:
        return None
    if foreign := set(held) - {"y", "lines_of"}:
        raise source.fault(f"matched has no '{plain(min(foreign))}' (choose from: y, lines_of)")
    y = tuple(source.text("matched: y", one) for one in source.sequence("matched: y", held.get("y")))
    if not y:
        raise source.fault("matched needs y: columns of the figure's curves")
    return Matched(y, source.text("matched: lines_of", held.get("lines_of", "")))


def _tests(source: Source) -> Iterator[TableTest]:
    """Every statistic of every pair: `{of: {steps: Steps}, pairs: [[line, other], ...]}`."""
    for one in source.sequence("tests", source.held.get("tests")):
        held = source.mapping("tests", one)
        for pair in source.sequence("tests: pairs", held.get("pairs")):
            if not isinstance(pair, list) or len(pair) != 2:
                raise source.fault(f"tests: a pair has two lines (got {short(pair)})")
            for statistic, label in source.mapping("tests: of", held.get("of")).items():
                yield TableTest(statistic, str(label), str(pair[0]), str(pair[1]))
