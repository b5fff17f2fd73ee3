"""The files that define tables and suites, conf/suite/NAME.yaml, a plug-in's, or a user's, and all tables by id.
docs/suites.md explains their keys.

A line with a list instead of a value is a sweep: one line for each value, and one curve of the figure.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

from specbench.config import command_line, configuration, parameters
from specbench.config.parameter import Parameters
from specbench.config.yaml_files import cached
from specbench.errors import UsageError, meant, plain, unknown
from specbench.rows.columns import COLUMNS, LISTS, NUMBERS, SHOWN
from specbench.storage.reading import made, read_yaml, short
from specbench.tables.definitions import (
    AXES,
    BATCH,
    MOST_DECIMALS,
    QUALITY,
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
    Suite,
    Table,
    TableFigure,
    TableTest,
    Values,
    as_overrides,
    named,
    of_world,
    row_column,
)

GROUP = "suite"
T = TypeVar("T")
_UNITS = ("images", "tokens")  # over which rows have standard deviations
#: Keys of a line that are not parameters.
_OF_LINE = ("label", "published", "elsewhere", "without")


@dataclass(frozen=True)
class PanelKeys:
    """A group of lines with its own parameters, `with`. first: the lines at which its curves start, except the curves
    in without_first."""

    lines: Parameters
    with_: Parameters = field(default_factory=dict)
    suffix: str | None = None
    first: Parameters = field(default_factory=dict)
    without_first: tuple[str, ...] = ()
    baseline: str = ""


@dataclass(frozen=True)
class FigureKeys:
    """A figure of curves, or of one of the last three kinds. curves: names other lines than the table's."""

    x: tuple[str, ...] = ()
    y: tuple[str, ...] = ()
    baseline: str = ""
    panel: str | None = None
    curves: dict[str, tuple[str, ...]] = field(default_factory=dict)
    log: bool = False
    series: Parameters = field(default_factory=dict)
    maps: Parameters = field(default_factory=dict)
    stack: Parameters = field(default_factory=dict)


@dataclass(frozen=True)
class PairKeys:
    """Tests: every statistic in `of` (with its label) is tested for each of the pairs of lines."""

    of: dict[str, str]
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Source:
    """A file: its name for messages, and its content."""

    name: str
    content: Mapping[str, Any]

    def fault(self, text: str) -> UsageError:
        return UsageError(f"{self.name}: {text}")

    def check_names(self, where: str, kind: str, names: Iterable[str], choices: Collection[str]) -> None:
        """UsageError for the first of these names that is not one of the choices."""
        for name in names:
            if name not in choices:
                raise self.fault(f"{where}: {unknown(kind, name, choices)}")

    def made(self, where: str, kind: type[T], content: Any) -> T:
        """A dataclass from a mapping. A list with a single entry may be given as the entry."""
        content = self.mapping(where, content)
        hints = {name.rstrip("_"): (name, hint) for name, hint in get_type_hints(kind).items()}
        values = {}
        for key, value in content.items():
            if key not in hints:
                raise self.fault(f"{where} has no '{key}' (choose from: {', '.join(hints)}){meant(key, hints)}")
            name, hint = hints[key]
            is_single = get_origin(hint) is tuple and not isinstance(value, list | tuple | dict)
            values[name] = [value] if is_single else value
        return made(kind, values, f"{self.name}: {where}" if where else self.name)

    def all_of(self, key: str) -> list[Any]:
        """The entries of a list; a single one may be given without the list."""
        value = self.content.get(key, [])
        return value if isinstance(value, list) else [value]

    def mapping(self, where: str, value: Any) -> Parameters:
        """The value as a mapping; {} for null."""
        if not isinstance(value, dict | None):
            raise self.fault(f"{where} must be a mapping of names to values (got {short(value)})")
        return value or {}

    def entries(self, key: str, parameter: str) -> dict[str, Parameters]:
        """Label -> parameters, from a mapping of these, a list of names, or one name. A name is a value of
        `parameter`."""
        value = self.content.get(key) or []
        if not isinstance(value, dict):
            return {str(name): {parameter: name} for name in (value if isinstance(value, list) else [value])}
        entries: dict[str, Parameters] = {}
        for label, entry in value.items():
            default = {parameter: label if entry is None else entry}
            entries[label] = entry if isinstance(entry, dict) else default
        return entries


def names() -> list[str]:
    """The suites that are part of specbench or of a plug-in."""
    return list(parameters.choices(GROUP))


def shipped(name: str) -> Source:
    """A suite by its name. UsageError for an unknown name."""
    return _complete(_shipped(name))


def _shipped(name: str) -> Source:
    if name not in parameters.choices(GROUP):
        raise unknown("suite", plain(name), parameters.choices(GROUP))
    return _read(f"suite {name}", parameters.file_of(GROUP, name))


def of_file(path: Path) -> Source:
    """A suite from a user's file. UsageError if it cannot be read."""
    return _complete(_read(str(path), path))


def _read(name: str, path: Path) -> Source:
    content = read_yaml(path)
    if not content:
        raise UsageError(f"{path} is not a suite: it needs lines; docs/suites.md explains all of its keys")
    return Source(name, _one_line(content))


def _one_line(value: Any) -> Any:
    """A value of YAML with every text in one line, without control characters for a terminal."""
    if isinstance(value, dict):
        return {_one_line(str(key)): _one_line(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_one_line(item) for item in value]
    return plain(" ".join(value.splitlines())) if isinstance(value, str) else value


def _complete(source: Source, seen: tuple[str, ...] = ()) -> Source:
    """Adds the keys of the suites that it names under `defaults`; its own keys have priority."""
    content: dict[str, Any] = {}
    others = source.content.get("defaults", [])
    for name in others if isinstance(others, list) else [others]:
        if name in seen:
            raise source.fault(f"defaults contain {name} in a circle")
        content |= _complete(_shipped(str(name)), (*seen, name)).content
    return replace(source, content=content | {key: value for key, value in source.content.items() if key != "defaults"})


class _Catalog(Mapping[str, Table]):
    """The tables of conf/suite and of plug-ins, each read when it is first used."""

    def __getitem__(self, name: str) -> Table:
        if name not in names():
            raise KeyError(name)
        return _named(name)

    def __iter__(self) -> Iterator[str]:
        return iter(names())

    def __len__(self) -> int:
        return len(names())


@cached
def _named(name: str) -> Table:
    return table(name, shipped(name))


TABLES: Mapping[str, Table] = _Catalog()


#: The keys of a file.
KEYS = ("name", "with", *(f.name for f in fields(Table) if f.name not in ("id", "protocol", "content")))


def table(name: str, source: Source) -> Table:
    """The table in a file. UsageError for invalid content."""
    content = source.content
    if strange := [key for key in content if key not in KEYS]:
        raise source.fault(f"a suite has no '{strange[0]}' (choose from: {', '.join(KEYS)}){meant(strange[0], KEYS)}")
    lines, panels = _lines(source)
    if not lines:
        raise source.fault("it has no lines: give each a label and parameters, such as `sjd: {method: sjd}`")
    tests = [source.made("tests", PairKeys, test) for test in source.all_of("tests")]
    matched = content.get("matched")

    def entries(key: str, parameter: str) -> dict[str, Values]:
        labelled = source.entries(key, parameter).items()
        return {label: named(overrides(source, f"{key}: {label}", values)) for label, values in labelled}

    if "n" in source.mapping("with", content.get("with")):
        raise source.fault("with: n is not a parameter of the runs alone: write n: at the top")
    parsed = {
        "id": name,
        "title": content.get("title") or name,
        "n": (0 if content.get("rows_of") == "bench" else 16) if content.get("n") is None else content["n"],
        "protocol": overrides(source, "with", source.mapping("with", content.get("with"))),
        "columns": [_column(source, entry) for entry in source.all_of("columns")],
        "lines": lines,
        "panels": panels,
        "figure": _figure(source, panels) if content.get("figure") else None,
        "matched": source.made("matched", Matched, matched) if matched else None,
        "tests": [TableTest(*of, *pair) for test in tests for pair in test.pairs for of in test.of.items()],
        "remarks": [REMARKS.get(text, text) if isinstance(text, str) else text for text in source.all_of("remarks")],
        "models": entries("models", "model"),
        "prompts": entries("prompts", "data"),
        "metrics": None if content.get("metrics") is None else _value(source, "metrics", content["metrics"]),
        "baseline": overrides(source, "baseline", source.mapping("baseline", content.get("baseline"))),
        "content": {"name": name, **content},
    }
    made = source.made("", Table, {k: v for k, v in content.items() if k not in ("name", "with")} | parsed)
    shown = [column.key for column in made.columns]
    if missing := [y for y in (made.matched.y if made.matched else ()) if y not in shown]:
        raise source.fault(f"matched: y has {missing[0]}, which is not one of its columns: add it to columns")
    _check_names(source, made)
    return made


def _check_names(source: Source, table: Table) -> None:
    """UsageError for a name in a figure, a test or `matched` that does not exist. Columns are checked only if the file
    names them: a suite has default ones."""
    from specbench.bench import benchmark_rows

    figure, shown = table.figure, [column.key for column in table.columns]
    used: dict[str, Iterable[str]] = {}  # lines, by where they are named
    if isinstance(figure, TableFigure):
        for panel in figure.panels:
            used |= {f"figure: {curve.label}": curve.lines for curve in panel.curves}
        used["figure: baseline"] = [figure.baseline, *(panel.baseline for panel in (*figure.panels, *table.panels))]
        if shown:
            source.check_names("figure: x", "column", figure.x, [*shown, *AXES])
            source.check_names("figure: y", "column", figure.y, shown)
    elif isinstance(figure, Stack):
        source.check_names("figure: stack", "column", figure.keys, shown)
    elif figure is not None:
        lists = (LISTS - {"remarks"}) if table.rows_of == "run" else benchmark_rows.LISTS
        source.check_names("figure: key", "column of lists", [figure.key], lists)
    if table.tests:
        from specbench.compare.comparison import STATISTICS

        statistics = {*(statistic.name for statistic in STATISTICS), *parameters.single_metrics(), "distribution"}
        source.check_names("tests", "statistic", [test.statistic for test in table.tests], statistics)
        used["tests"] = [key for test in table.tests for key in (test.line, test.other)]
    lines = [line.key for line in table.lines]
    for where, keys in used.items():  # a suite adds lines of vanilla AR
        source.check_names(where, "line", [key for key in keys if key and not key.startswith("vanilla")], lines)
    if table.matched and table.matched.lines_of:
        source.check_names("matched: lines_of", "suite", [table.matched.lines_of], names())


def suite(name: str, source: Source) -> Suite:
    """What `specbench suite` runs of a file, with the parameters of its runs of quality. UsageError for invalid
    content."""
    defined, declared = table(name, source), parameters.table()
    if defined.rows_of != "run":
        raise source.fault(f"it shows rows of specbench {defined.rows_of}: draw it with specbench tables {name}")
    if defined.matched is not None:
        raise source.fault(f"it compares pairs of curves: draw it with specbench tables {name}")
    if len(set(defined.seeds)) < len(defined.seeds):
        raise source.fault("seeds contains one seed twice")
    shared = named(defined.protocol)
    models = defined.models or {defined.model: {"model": defined.model}}
    prompts = defined.prompts or {"": {}}
    seeds = defined.seeds or ((declared["seed"].from_text("seed", shared["seed"]),) if "seed" in shared else ())
    batch = declared["batch"].from_text("batch", shared.get("batch", "1"))
    shared = {name: value for name, value in shared.items() if name not in ("seed", "batch", *QUALITY, "n")}
    shared |= {} if defined.metrics is None else {"metrics": defined.metrics}
    if not defined.columns:
        defined = replace(defined, columns=_default_columns(defined, shared, models, prompts))
        _check_names(source, defined)
    shared |= {"batch": str(defined.batch or (batch if batch > 1 else BATCH)), **QUALITY, "n": str(defined.n)}
    timed = defined.timed_prompts(defined.n)
    given = named(defined.protocol)
    if given.get("baseline", "false") != "false":
        raise source.fault("with: a suite decodes vanilla AR once for all of its lines: leave baseline out")
    if given.get("timing", "null") not in ("null", "true" if timed else "false"):
        raise source.fault("with: write timed: N at the top, the prompts of the runs that measure seconds, for timing")
    fixed = (*QUALITY, *(["seed"] if defined.seeds else []))
    return Suite(defined, models, prompts, seeds, shared, fixed, named(defined.baseline or ["method=vanilla"]), timed)


def _default_columns(
    defined: Table, shared: Values, models: Mapping[str, Values], prompts: Mapping[str, Values]
) -> tuple[Column, ...]:
    """Steps, seconds if they are measured, and the columns of the metrics; default: the metrics that its runs have."""
    columns = ["speedup_step", "accepted_length_mean"]
    columns += ["latency_s_mean", "speedup_latency"] if defined.timed else []
    default = {"metrics": parameters.default_choice("metrics")}
    for model, data in itertools.product(models.values(), prompts.values()):
        chosen = {"model": defined.model, **model, **data, **shared}
        run = of_world(chosen["model"], chosen)
        metrics = (default | run | named(configuration.implied(as_overrides(run))))["metrics"]
        for name in metrics.strip("[]").split(","):
            names = (
                parameters.declared("metrics", name.strip()) if name.strip() in parameters.choices("metrics") else ()
            )
            for metric in (m for m in parameters.single_metrics() if m in names):
                columns += parameters.metric_columns(metric)
    return tuple(STANDARD.get(key) or row_column(key) for key in dict.fromkeys(columns))


def overrides(source: Source, where: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Parameters as arguments of a command line."""
    return tuple(f"{name}={_value(source, f'{where}: {name}', value)}" for name, value in values.items())


def _value(source: Source, where: str, value: Any) -> str:
    """A YAML value in Hydra's grammar."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(_value(source, where, item) for item in value)}]"
    if isinstance(value, dict):
        raise source.fault(f"{where} must be a text (got {short(value)})")
    text = str(value)
    return text if re.fullmatch(r"[\w./:+@%-]+", text) else command_line.quoted(text)


def _column(source: Source, entry: Any) -> Column:
    if isinstance(entry, str):
        return _default_column(source, entry, None)
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise source.fault(f"a column is its name, or `name: {{label: ...}}` (got {short(entry)})")
    [(key, more)] = entry.items()
    fields = source.mapping(f"columns: {key}", more)
    if fields.get("better", "higher") not in ("higher", "lower"):
        raise source.fault(f"columns: {key}: better must be higher or lower")
    if fields.get("std_over") not in (None, "", *_UNITS):
        raise source.fault(f"columns: {key}: std_over must be {', '.join(_UNITS)}, '' or null")
    default = _default_column(source, key, fields.get("better"))
    column = source.made(f"columns: {key}", Column, {**vars(default), **fields})
    if not 0 <= column.decimals <= MOST_DECIMALS:
        raise source.fault(f"columns: {key}: decimals must be 0 to {MOST_DECIMALS} (got {column.decimals})")
    return column


def _default_column(source: Source, key: str, better: str | None) -> Column:
    from specbench.bench.benchmark_rows import PROBES, ROWS

    if key in STANDARD:
        return STANDARD[key]
    if key in SHOWN:
        return row_column(key)
    others = {"bench": ROWS.columns, "probe": PROBES.columns}
    if key not in others.get(str(source.content.get("rows_of", "")), COLUMNS):
        raise unknown("column", plain(key), SHOWN)
    if key in COLUMNS and key not in NUMBERS:
        raise source.fault(f"columns: {key} holds no number")
    if better is None:
        raise source.fault(f"column {key} needs its better direction: `{key}: {{better: lower}}`")
    return Column(key, key, better, 2, std_over=None)


# --- lines ------------------------------------------------------------------------------------------------------------


def _lines(source: Source) -> tuple[list[Line], list[Panel]]:
    """All lines, and the panels of a figure of curves."""
    lines: dict[str, Line] = {}
    curves_of_lines = _curves(source, "lines", source.mapping("lines", source.content.get("lines")), lines)
    panels = []
    for label, entry in source.mapping("panels", source.content.get("panels")).items():
        where = f"panels: {label}"
        keys = source.made(where, PanelKeys, entry)
        suffix = label if keys.suffix is None else keys.suffix
        begin = _curves(source, f"{where}: first", keys.first, lines, keys.with_, suffix)
        first = tuple(key for curve in begin for key in curve.lines)
        curves = _curves(source, where, keys.lines, lines, keys.with_, suffix)
        if foreign := set(keys.without_first) - {curve.label for curve in curves}:
            raise source.fault(f"{where}: without_first has {min(foreign)}, but lines has no such entry")
        joined = [c if c.label in keys.without_first else Curve(c.label, (*first, *c.lines)) for c in curves]
        panels.append(Panel(label, tuple(joined), keys.baseline))
    return list(lines.values()), panels or [Panel("", tuple(curves_of_lines))]


def _curves(
    source: Source,
    where: str,
    entries: Mapping[str, Any],
    lines: dict[str, Line],
    shared: Mapping[str, Any] | None = None,
    suffix: str = "",
) -> list[Curve]:
    """Adds lines, including sweeps, and returns a curve for each entry."""
    curves = []
    settings = source.mapping("with", source.content.get("with"))
    ending = f", {suffix}" if suffix else ""
    for name, entry in entries.items():
        values_by_name = source.mapping(f"{where}: {name}", entry)
        label = str(values_by_name.get("label", name))
        swept = {key: value for key, value in values_by_name.items() if _sweeps(key, value)}
        rest = {key: value for key, value in values_by_name.items() if key not in swept}
        if shared:
            head = {"method": rest.pop("method")} if "method" in rest else {}
            rest = {**head, **shared, **rest}
        keys = []
        for values in itertools.product(*swept.values()):
            point = dict(zip(swept, values, strict=True))
            text = _filled(source, f"{where}: {name}", label, {**settings, **rest, **point})
            for parameter, value in point.items():
                if f"{{{parameter}}}" not in label:
                    text += f", {SYMBOLS.get(parameter, parameter)}={_shown(value)}"
            key = "_".join([name, *map(_shown, values)]) + ending
            keys.append(_line(source, key, {**rest, **point, "label": text + ending}, lines))
        curves.append(Curve(name, tuple(keys)))
    return curves


def _filled(source: Source, where: str, label: str, values: Mapping[str, Any]) -> str:
    """A label with the values of the parameters that it names in braces. UsageError for a parameter that the line does
    not set."""

    def value_of(match: re.Match[str]) -> str:
        if match[1] in values and match[1] not in _OF_LINE:
            return _shown(values[match[1]])
        if match[1] in parameters.table():
            raise source.fault(f"{where}: the label names {match[0]}, which the line does not set: give it a value")
        return match[0]

    return re.sub(r"\{(\w+)\}", value_of, label)


def _sweeps(name: str, value: Any) -> bool:
    if name in _OF_LINE or not isinstance(value, list):
        return False
    declared = parameters.table().get(name)
    kind = declared.kind if declared else ""
    if kind == "tree":  # a list of lists is one tree, a list of names is several trees
        return any(isinstance(item, str) for item in value)
    return kind not in ("names", "numbers") or (bool(value) and all(isinstance(item, list) for item in value))


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _line(source: Source, key: str, values: Mapping[str, Any], lines: dict[str, Line]) -> str:
    """Adds a line and returns its key."""
    name = re.sub(r"[^\w.=-]+", "_", key.replace("+", "p"))
    if name in lines:
        raise source.fault(f"two lines are called {name}")
    arguments = {k: v for k, v in values.items() if k not in _OF_LINE}
    published, elsewhere = values.get("published"), values.get("elsewhere")
    lines[name] = Line(
        name,
        values["label"],
        overrides(source, key, arguments) if arguments or "method" in (source.content.get("with") or {}) else None,
        None if published is None else {k: str(v) for k, v in source.mapping(f"{key}: published", published).items()},
        str(values.get("without", Line.without)),
        {} if elsewhere is None else _elsewhere(source, key, arguments, elsewhere),
    )
    return name


def _elsewhere(source: Source, key: str, arguments: Parameters, changes: Any) -> dict[str, tuple[str, ...]]:
    """By model, and "" for any other: the arguments with the changes, null for a parameter that it does not have. A
    mapping among the changes belongs to the model of its name, in addition to the others."""
    changes = source.mapping(f"{key}: elsewhere", changes)
    shared = {name: value for name, value in changes.items() if not isinstance(value, dict)}
    of_model = {"": shared} | {name: shared | value for name, value in changes.items() if isinstance(value, dict)}
    models = parameters.choices("model")
    if strange := of_model.keys() - {"", *models}:
        raise unknown("model", min(strange), models)

    def changed(by: Parameters) -> Parameters:
        return {k: v for k, v in {**arguments, **by}.items() if v is not None or k not in by}

    return {name: overrides(source, key, changed(by)) for name, by in of_model.items()}


# --- figures ----------------------------------------------------------------------------------------------------------


def _figure(source: Source, panels: Sequence[Panel]) -> TableFigure | Series | Maps | Stack:
    keys = source.made("figure", FigureKeys, source.content["figure"])
    kinds: dict[str, type[Series | Maps | Stack]] = {"series": Series, "maps": Maps, "stack": Stack}
    for name, kind in kinds.items():
        if fields := getattr(keys, name):
            return source.made(f"figure: {name}", kind, fields)
    if keys.curves:
        panels = [Panel("", tuple(Curve(label, lines) for label, lines in keys.curves.items()))]
    if keys.panel is not None:
        panels = [replace(panels[0], label=keys.panel)]
    if not keys.x or not keys.y:
        raise source.fault("figure needs x and y: columns of the table, or parameters")
    if keys.log and (len(keys.x) > 1 or len(keys.y) > 1):
        raise source.fault("figure: with log it must have one x and one y")
    return TableFigure(keys.x, keys.y, keys.baseline, tuple(panels), keys.log)
