"""The arrangement of a table for readers: no line and no column is empty, and nothing that is left out is lost."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
from commands import ROOT

from specbench.tables import layout, literature, render
from specbench.tables.catalog import TABLES
from specbench.tables.layout import PrintedTable, TableCell, TableSheet

COMMITTED = sorted((ROOT / "results" / "tables").glob("*.md"))


def drawn(name: str, rows: Mapping[str, Mapping[str, str]] | None = None, n_models: int | None = None) -> TableSheet:
    """The sheet of a table with these rows. n_models: how many of the paper's models it has."""
    table, published = TABLES[name], literature.load(name) if name in literature.available() else []
    models = list(dict.fromkeys(row.model for row in published))[:n_models]
    published = [row for row in published if row.model in models]
    return layout.build(table, table.model, rows or {}, published, {}, f"specbench tables {name}")


def some_rows(name: str) -> dict[str, dict[str, str]]:
    """A row for every second line, with a value in every second column."""
    keys = [column.key for column in TABLES[name].columns][::2]
    return {line.key: {"run_id": "r", **dict.fromkeys(keys, "0.5")} for line in TABLES[name].lines[::2]}


def values(cells: Iterable[TableCell]) -> list[tuple[str, str]]:
    return sorted((cell.value, cell.spread) for cell in cells if cell.value)


def line_of(table: PrintedTable, method: str) -> dict[str, TableCell]:
    [line] = [line for line in table.lines if line[0].value == method]
    return dict(zip([header.title for header in table.headers], line, strict=True))


def markdown_tables(text: str) -> Iterator[tuple[int, list[list[str]]]]:
    """Every table of a Markdown text: the number of columns that name a line, and the cells of its lines."""
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        _, rule, *lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
        yield sum(not cell.strip().endswith(":") for cell in rule), lines


def empty(cells: Sequence[str]) -> bool:
    return all(re.sub(r"<sup>.*?</sup>|\*\*", "", cell).strip() in ("", "—") for cell in cells)


def assert_nothing_is_empty(text: str, name: str) -> None:
    for names, lines in markdown_tables(text):
        assert lines, name
        assert not [line[0] for line in lines if empty(line[names:])], name
        columns = list(zip(*lines, strict=True))
        assert not [i for i, column in enumerate(columns) if i >= names and empty(column)], name


def test_the_committed_tables_have_no_empty_line_or_column() -> None:
    assert len(COMMITTED) > 70
    for path in COMMITTED:
        assert_nothing_is_empty(path.read_text(encoding="utf-8"), path.name)


def test_latex_has_every_character_of_the_committed_tables() -> None:
    """Greek letters that LaTeX does not know stopped it."""
    for path in COMMITTED:
        lines = path.with_suffix(".tex").read_text(encoding="utf-8").splitlines()
        assert {c for line in lines if not line.startswith("%") for c in line if not c.isascii()} <= {"é"}, path.name


def test_an_empty_line_or_column_is_found() -> None:
    head = "| Method | a | b |\n| --- | ---: | ---: |\n"
    for lines in ("| x | — | —<sup>a</sup> |\n| y | 1 | 2 |\n", "| x | 1 | — |\n| y | 1 |  |\n"):
        with pytest.raises(AssertionError):
            assert_nothing_is_empty(head + lines, "")
    assert_nothing_is_empty(head + "| x | 1 | — |\n|  | — | **2** |\n", "")


def test_every_value_is_printed_once_and_every_line_without_one_is_named() -> None:
    for name in TABLES:
        for rows in ({}, some_rows(name)):
            sheet = drawn(name, rows)
            table = layout.printed(sheet)
            cells = [cell for line in table.lines for cell in line[table.names :]]
            assert values(cells) == values(cell for e in sheet.entries for cell in e.cells), name
            assert {mark for cell in cells for mark in cell.marks} <= {mark for mark, _ in table.notes}
            named = {cell.value for line in table.lines for cell in line[:1]}
            remarks = " ".join(table.remarks)
            assert all(e.method in named or e.method in remarks for e in sheet.entries), name
            assert_nothing_is_empty(render.markdown(sheet), name)


def test_a_table_without_lines_is_drawn() -> None:
    sheet = replace(drawn("sjd_table8"), entries=())
    for text in (render.markdown(sheet), render.latex(sheet), render.as_csv(sheet)):
        assert text
    assert not layout.printed(sheet).lines


def test_published_lines_without_a_value_are_counted() -> None:
    sheet = drawn("sjdpac_table1", some_rows("sjdpac_table1"))
    published = [e for e in sheet.entries if e.kind == "published"]
    absent = sum(not any(cell.value for cell in e.cells) for e in published)
    assert absent == len(published) - len(literature.load("sjdpac_table1")) > 40
    table = layout.printed(sheet)
    assert sum("published" in line[1].value for line in table.lines) == len(published) - absent
    assert sum(f": {absent}." in remark for remark in table.remarks) == 1
    assert not any(f": {absent}." in remark for remark in sheet.remarks)


def test_a_measured_line_without_a_value_is_named_with_its_reason() -> None:
    table = layout.printed(drawn("sjdpac_table1"))
    [missing] = [remark for remark in table.remarks if "SJD2, other prompts" in remark]
    line = next(line for line in TABLES["sjdpac_table1"].lines if line.label == "SJD2")
    assert line.without in missing
    assert [line[1].value for line in table.lines if line[0].value == "SJD2"] == ["published, Lumina-mGPT 7B"]


def test_a_column_without_a_value_is_named_with_its_reason() -> None:
    rows = {line.key: {"run_id": "r", "clip_score": "0.5"} for line in TABLES["coolsd_table1"].lines}
    table = layout.printed(drawn("coolsd_table1", rows))
    [remark] = [remark for remark in table.remarks if "Fréchet distance, measured" in remark]
    assert "did not measure this" in remark
    shown = [header.title for header in table.headers]
    assert "Fréchet distance, measured" not in shown
    assert "Fréchet distance, published for LlamaGen-XL" in shown


def test_a_method_is_one_line_if_the_paper_has_one_or_two_models() -> None:
    name = "cspd_table3"
    methods = [line.label for line in TABLES[name].lines]
    for n_models in (1, 2, 3):
        table = layout.printed(drawn(name, some_rows(name), n_models))
        named = [line[0].value for line in table.lines if line[0].value]
        assert named == methods
        assert (len(table.lines) == len(methods)) == (n_models < 3)
        sources = [header.source.partition(" ")[0] for header in table.headers[table.names :]]
        assert sources == ([""] if n_models == 3 else ["measured", *["published"] * n_models])
    beside = line_of(layout.printed(drawn(name, some_rows(name), 1)), "γ=32, aligned")
    cells = [(cell.value, cell.bold) for cell in beside.values()]
    assert cells == [("γ=32, aligned", False), ("0.500", True), ("0.34", False)]


def test_a_note_of_all_lines_of_a_source_is_in_the_header() -> None:
    """All published values of this table are hints, and every cell had the mark."""
    name = "gsd_table1"
    sheet = drawn(name, some_rows(name))
    hints = {mark for mark, text in sheet.notes if "hint" in text}
    assert all(set(e.marks) == hints for e in sheet.entries if e.kind == "published" and e.row_id)
    table = layout.printed(sheet)
    [hint] = [mark for mark, text in table.notes if "hint" in text]
    assert {header.source_marks for header in table.headers if "published" in header.source} == {(hint,)}
    assert not any(hint in cell.marks for line in table.lines for cell in line)
    trusted = next(e for e in sheet.entries if e.kind == "published" and e.marks)
    entries = tuple(replace(e, marks=()) if e is trusted else e for e in sheet.entries)
    table = layout.printed(replace(sheet, entries=entries))
    [hint] = [mark for mark, text in table.notes if "hint" in text]
    assert not any(header.source_marks for header in table.headers)
    marked = [cell for line in table.lines for cell in line if hint in cell.marks]
    assert len(marked) == sum(bool(cell.value) for e in entries if e.marks for cell in e.cells)
    assert all(cell.value for cell in marked)


def test_marks_follow_the_order_of_reading_and_stars_stay() -> None:
    sheet = drawn("coolsd_table1", some_rows("coolsd_table1"))
    first = sheet.entries[0]
    starred = replace(first.cells[0], marks=(*first.cells[0].marks, layout.DIFFERS))
    entries = (replace(first, cells=(starred, *first.cells[1:])), *sheet.entries[1:])
    table = layout.printed(replace(sheet, entries=entries, notes=(*sheet.notes, (layout.DIFFERS, "differs"))))
    read = [mark for header in table.headers for mark in (*header.marks, *header.source_marks)]
    read += [mark for line in table.lines for cell in line for mark in cell.marks]
    assert list(dict.fromkeys(mark for mark in read if mark != layout.DIFFERS)) == [m for m, _ in table.notes[:-1]]
    assert table.notes[-1] == (layout.DIFFERS, "differs")
    assert layout.DIFFERS in table.lines[0][1].marks


def test_the_block_above_a_table_has_three_lines_and_commands_are_folded() -> None:
    row = {
        "run_id": "r",
        "clip_score": "0.5",
        "device": "cpu",
        "commit": "c0ffee",
        "model": "m",
        "seed": "0",
        "n": "24",
    }
    sheet = drawn("coolsd_table1", {"vanilla": row | {"data": "scenes", "torch": "2", "time": "2026-11-20T"}})
    sheet = replace(sheet, commands=(("Target Model", "specbench run `x`"),))
    text = render.markdown(sheet)
    block = text[: text.index("| Method")].split("\n\n")[1].splitlines()
    assert [len(re.findall(r"(?:^- |\. )[A-Z]\w+: ", line)) for line in block] == [2, 4, 3]
    assert all(word in " ".join(block) for word in ("cpu", "c0ffee", "2026-11-20", "scenes", "n 24", sheet.paper))
    [folded] = re.findall(r"<details>.*?\n\n(.*)\n\n</details>", text, re.DOTALL)
    assert folded == "- Target Model: `` specbench run `x` ``"
    assert "% Target Model: specbench run `x`" in render.latex(sheet).splitlines()
