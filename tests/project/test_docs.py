"""The documents: links have targets, the index lists every page, and the files and commands of the guide work."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import yaml
from commands import ROOT, copy_package, run_copy

from specbench.config import parameters
from specbench.storage.package import __version__

INDEX = ROOT / "docs/index.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
GUIDE = (ROOT / "docs/contributing.md").read_text()
SMALL = {
    "run": ["n=1", "warmup=0", "baseline=false", "device=cpu", "metrics=none", "model=greys"],  # the guide's
    "audit": ["audit.samples=4000", "audit.model=v3t5"],
    "bench": ["device=cpu", "bench.images=0", "bench.nodes=1", "out=bench.csv"],
    "list": [],
    "fetch": [],
}
#: The guide's metric in a row's columns, in a table, in a comparison and in a report: title and better side.
SHOWN = """
from specbench.compare.comparison import _metric_statistic
from specbench.tables import report
from specbench.rows.columns import COLUMNS
from specbench.rows.csv_files import read_rows
from specbench.tables import layout, render
from specbench.tables.catalog import TABLES
from pathlib import Path

assert COLUMNS["brightness"] == "Brightness: higher is better"
assert _metric_statistic("brightness").sentence.startswith("Brightness (brightness) is ")
assert _metric_statistic("brightness").sides[1] == "lower (worse)"
table = TABLES["sjd_table3"]
row = {name: str(value) for name, value in read_rows(Path("run7/row.csv"))[0].items() if value is not None}
drawn = layout.build(table, "greys", {table.lines[0].key: row}, [], {}, "")
assert "| Brightness \u2191" in render.markdown(drawn), render.markdown(drawn)
columns = report.page_data(report.gather([Path("run7")], [], 0))["shown"]
[shown] = [column for column in columns if column["key"] == "brightness"]
assert (shown["title"], shown["better"], shown["decimals"]) == ("Brightness", "higher", 3)
"""


def _links(path: Path) -> list[tuple[str, str]]:
    """The file and the heading of every link to a file."""
    links = re.findall(r"\]\(([^)]+)\)", path.read_text())
    return [link.partition("#")[::2] for link in links if "://" not in link]


def _anchors(path: Path) -> set[str]:
    """The headings of a page in the form that links use."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}


def test_links_lead_somewhere() -> None:
    for path in [ROOT / "README.md", ROOT / "results/README.md", *DOCS]:
        for file, heading in _links(path):
            target = path.parent / file if file else path
            assert target.exists(), (path, file)
            assert not heading or heading in _anchors(target), (path, heading)


def test_no_command_after_a_list_becomes_prose() -> None:
    """An indented block right after a list is a paragraph of its last item, in which lines run together."""
    block = re.compile(r"^ *(?:[-*+]|\d+\.) (?:.+\n)+\n+ {4}(?! *(?:[-*+]|\d+\.) )\S.*", re.MULTILINE)
    assert block.search("- a\n  b\n\n    specbench run\n")
    assert not block.search("- a\n\nTry:\n\n    specbench run\n")
    for path in [ROOT / "README.md", *(ROOT / "results").glob("*.md"), *DOCS]:
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert not (found := block.search(text)), (path, found[0])


def test_files_that_a_page_names_exist() -> None:
    """The changelog also names files that are gone."""
    for path in [ROOT / "README.md", *(page for page in DOCS if page.name != "changelog.md")]:
        named = re.findall(r"`((?:specbench|conf|tests|scripts|results)/[\w./*-]+)`", path.read_text())
        assert [name for name in named if "NAME" not in name and not any(ROOT.glob(name.rstrip("/")))] == [], path


def test_the_index_has_every_page_once() -> None:
    pages = [file for file, _ in _links(INDEX) if "/" not in file]
    assert sorted(pages) == [path.name for path in DOCS if path != INDEX]
    assert ("docs/index.md", "") in _links(ROOT / "README.md")


def test_the_page_of_metrics_lists_every_metric_and_column() -> None:
    table = (ROOT / "docs/metrics.md").read_text().partition("## Quality metrics")[2].partition("\n- ")[0]
    named = set(re.findall(r"`((?:\.\.\.)?[a-z0-9_]+)`", table))
    ends = tuple(name.removeprefix("...") for name in named if name.startswith("..."))  # `..._x100`
    everything = {*parameters.single_metrics(), *parameters.found_choices().columns}
    assert [name for name in sorted(everything - named) if not name.endswith(ends)] == []


def test_the_glossary_is_in_alphabetical_order() -> None:
    terms = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)[1:]
    assert terms == sorted(set(terms), key=str.lower)


def test_the_changelog_begins_with_this_version_and_the_citation_names_it() -> None:
    heading = re.findall(r"^## (\S+) \((\S+)\)$", (ROOT / "docs/changelog.md").read_text(), re.MULTILINE)[0]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert heading == (__version__, str(cited["date-released"]))
    assert cited["version"] == __version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert cited["license"] == project["license"]
    assert sorted(cited["keywords"]) == sorted(project["keywords"])


def test_the_guide_works(tmp_path: Path) -> None:
    """Every file and command of the guide, in their order, in a copy of the package."""
    copy_package(tmp_path)
    lines = []
    for language, block in re.findall(r"```(\w+)\n(.*?)```", GUIDE, re.DOTALL):
        if language == "sh":
            lines += [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
            continue
        head, _, content = block.partition("\n")
        path = tmp_path / head.removeprefix("# ")
        assert not path.exists()
        path.write_text(content)
    for i, arguments in enumerate(lines):
        small = SMALL[arguments[0]] + {"audit": [f"out=audit{i}.csv"], "run": [f"out=run{i}"]}.get(arguments[0], [])
        names = {argument.split("=")[0] for argument in arguments}
        arguments += [argument for argument in small if argument.split("=")[0] not in names]
    printed = run_copy(tmp_path, lines, SHOWN)
    assert [arguments[0] for arguments in lines] == "run audit run audit fetch run bench run list".split()
    for run, mark in ((0, "lazy"), (2, "sjd_uniform"), (5, "greys"), (7, "mean of the pixels")):
        assert mark in (tmp_path / f"run{run}/row.csv").read_text()
    for audit in (1, 3):
        assert "not lossless" in (tmp_path / f"audit{audit}.csv").read_text()
    assert "brightness" in printed
