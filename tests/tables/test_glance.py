"""Figures with a logarithmic y axis, such as the one that shows the field at a glance: zeros have their own line, every
curve has a name, and no name covers another."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import overrides, python
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from specbench.errors import UsageError
from specbench.storage import figure_files
from specbench.tables import catalog, figures
from specbench.tables.catalog import TABLES, Source
from specbench.tables.definitions import TableFigure

TABLE = TABLES["glance"]
assert isinstance(TABLE.figure, TableFigure)
FIGURE = TABLE.figure


def _row(x: float, y: float) -> dict[str, str]:
    cells = {"step_compression": x, "step_compression_stderr": 0.05, "emitted_kl": y, "emitted_kl_stderr": y / 20}
    return {"n": "48"} | {key: str(value) for key, value in cells.items()}


def _rows() -> dict[str, dict[str, str] | None]:
    """Curves that rise together and end within one line of text, and exact methods just as close to each other."""
    rows: dict[str, dict[str, str] | None] = {"vanilla": _row(1, 0)}
    for i, panel in enumerate(FIGURE.panels):
        for j, curve in enumerate(panel.curves):
            for k, key in enumerate(curve.lines):
                relaxed = k > 0 and len(curve.lines) > 2
                rows[key] = _row(4 - i + 0.2 * k + 0.01 * j, 0.001 * 3**k + 1e-5 * j if relaxed else 1e-9 * k)
    return rows


@pytest.fixture(scope="module")
def drawn() -> Figure:
    figure = figures._log_curves(FIGURE, TABLE, _rows())
    figure.draw_without_rendering()
    return figure


def _named(axis: Axes) -> dict[str, Any]:
    # Without the lines that lead to the curves.
    return {text.get_text(): Text.get_window_extent(text) for text in axis.texts}


def test_every_curve_and_every_exact_method_has_its_name_and_none_covers_another(drawn: Figure) -> None:
    strips = list(zip(drawn.axes[::2], drawn.axes[1::2], strict=True))
    assert len(strips) == len(FIGURE.panels)
    for panel, (axis, zeros) in zip(FIGURE.panels, strips, strict=True):
        relaxed = {curve.label for curve in panel.curves if len(curve.lines) > 2}
        assert _named(axis).keys() == relaxed | {panel.label}
        first = next(line.label for line in TABLE.lines if line.key == panel.curves[0].lines[0])
        alone = {curve.label for curve in panel.curves} - relaxed
        assert _named(zeros).keys() == alone | {"vanilla", first.removesuffix(f", {panel.label}")}
        for axes in (axis, zeros):
            boxes = _named(axes)
            assert not [
                names for names in itertools.combinations(boxes, 2) if boxes[names[0]].overlaps(boxes[names[1]])
            ]
            box = axes.get_window_extent()
            assert all(box.x0 < b.x0 and b.x1 < box.x1 and box.y0 < b.y0 and b.y1 < box.y1 for b in boxes.values())


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "no such backend", "QtAgg"])
def test_the_backend_of_a_notebook_ends_no_figure(backend: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Jupyter exports the first to child processes, where it cannot be imported."""
    monkeypatch.setenv("MPLBACKEND", backend)
    code = (
        "import os; from pathlib import Path; from specbench.tables import figures\n"
        "from specbench.storage import figure_files\n"
        "print(figure_files.save(lambda: figures.new_axes(1, 2)[0], Path('.'), 'x'), os.environ['MPLBACKEND'])"
    )
    done = python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.png", "x.svg"]
    assert done.stdout.strip().endswith(backend)  # the user's own code keeps it


def _titled(title: str, folder: Path) -> Figure:
    """A figure with a title, as it was saved."""
    drawn: list[Figure] = []

    def make() -> Figure:
        figure, axes = figures.new_axes(1, 1)
        axes[0, 0].set_title(title)
        drawn.append(figure)
        return figure

    assert all(path.stat().st_size > 1000 for path in figure_files.save(make, folder, "x"))
    return drawn[-1]


def test_a_label_is_drawn_in_a_font_that_has_its_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If there is one on this machine: STIX comes with matplotlib, and DejaVu Sans has no such d. Otherwise one
    sentence says so."""
    figure_files._say_missing.cache_clear()
    families = [
        _titled(title, tmp_path).axes[0].title.get_fontfamily() for title in ("window δ=1", "\u1d81", "\u1d81 \u20ec\n")
    ]
    assert ["STIXGeneral" in names for names in families] == [False, True, True]
    assert capsys.readouterr().err == ""
    for _ in range(2):
        _titled("\U0010fffd", tmp_path)  # of private use
    assert capsys.readouterr().err.count("\n") == 1


def test_zeros_are_on_their_line_and_relaxed_methods_above_it(drawn: Figure) -> None:
    for axis, zeros in zip(drawn.axes[::2], drawn.axes[1::2], strict=True):
        assert axis.get_yscale() == "log"
        assert axis.get_xlim() == zeros.get_xlim() == drawn.axes[0].get_xlim()
        heights = {float(y) for bars in axis.containers for y in bars[0].get_ydata()}
        assert min(heights) > axis.get_ylim()[0] > 0
        assert {float(y) for bars in zeros.containers for y in bars[0].get_ydata()} == {0.0}
        assert len(zeros.containers) >= 2
        assert all(bars.has_xerr for bars in (*axis.containers, *zeros.containers))  # the intervals
        assert all(bars.has_yerr for bars in axis.containers)


def test_a_curve_looks_the_same_in_all_panels_and_unlike_its_neighbours() -> None:
    labels = [["a", "b", "c"], ["a", "d"], ["e", "b", "f", "g", "h"]]
    styles = figures.styles_of(labels)
    assert len(set(styles.values())) == 8
    assert all(len({styles[label][0] for label in names}) == len(names) for names in labels)


def _perceived(colour: str, sight: np.ndarray) -> np.ndarray:
    """CIELAB (3,) of an sRGB colour. A matrix (3, 3) maps its linear values to what a reader perceives."""
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.clip(sight @ np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4), 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in to_xyz @ linear / (0.9505, 1, 1.089))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_every_curve_of_the_figure_has_its_own_colour_also_for_colour_blind_readers() -> None:
    """Entropy once had Cool-SD's colour, and GSD had LANTERN++'s."""
    labels = [[curve.label for curve in panel.curves if len(curve.lines) > 2] for panel in FIGURE.panels]
    styles = figures.styles_of(labels)
    assert len({colour for colour, _ in styles.values()}) == len({marker for _, marker in styles.values()}) == 7
    # Machado, Oliveira and Fernandes (2009), severity 1: protanopia, deuteranopia.
    protan = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    deutan = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    colours = list(dict.fromkeys(colour for colour, _ in figures._STYLES))

    def nearest(palette: list[str]) -> float:
        pairs = itertools.combinations(palette, 2)
        sights = [np.array(sight) for sight in (np.eye(3), protan, deutan)]
        return min(float(np.linalg.norm(_perceived(a, s) - _perceived(b, s))) for a, b in pairs for s in sights)

    assert nearest(colours) >= nearest(colours[:7])  # Okabe and Ito's colours


def test_names_that_would_overlap_move_apart_and_no_others() -> None:
    assert figures.apart([0, 5, 20], [2, 2, 2]) == [0, 5, 20]
    assert figures.apart([0, 0, 20], [2, 2, 2]) == [-1, 1, 20]
    assert figures.apart([0, 1, 2.5], [0, 2, 2]) == pytest.approx([-5 / 6, 7 / 6, 19 / 6])
    assert figures.apart([9, 9.5, 10], [2, 2, 2], most=10) == [6, 8, 10]
    assert figures.apart([], []) == []
    expected = [math.sin(3 * i) + i / 3 for i in range(30)]
    moved = figures.apart(sorted(expected), [0.5] * 30)
    assert all(b - a >= 0.5 - 1e-9 for a, b in itertools.pairwise(moved))
    assert sum(moved) == pytest.approx(sum(expected))


def _rows_of(count: int) -> dict[str, dict[str, str] | None]:
    """The rows of the last panels, of which the last one has the fewest curves."""
    keys = {key for panel in FIGURE.panels[len(FIGURE.panels) - count :] for key in panel.keys}
    return {key: row if key in keys else None for key, row in _rows().items()}


def test_the_figure_is_the_same_file_and_needs_no_row(tmp_path: Path) -> None:
    rows = {**_rows_of(1), "vanilla": _row(1, 0)}
    svg, png = figures.draw(TABLE, rows, tmp_path, "a")
    assert svg.read_text() == figures.draw(TABLE, rows, tmp_path, "b")[0].read_text()
    assert png.stat().st_size > 10_000
    assert len(figures.draw(TABLE, dict.fromkeys(rows), tmp_path, "none")) == 2


def test_a_panel_without_rows_takes_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the height of the picture; without any row, all panels are there."""
    made: list[Figure] = []
    monkeypatch.setattr(figure_files, "save", lambda make, folder, stem: made.append(make()))
    for count in (1, 2, len(FIGURE.panels), 0):
        figures.draw(TABLE, _rows_of(count), tmp_path, "a")
    one, two, every, none = (figure.get_figheight() for figure in made)
    assert one < two < every == none


def test_the_suite_relaxed_has_the_runs_of_all_relaxed_lines() -> None:
    """So the figure needs new runs only for the exact methods."""
    relaxed = TABLES["relaxed"]

    def runs(name: str) -> set[frozenset[str]]:
        table = TABLES[name]
        return {frozenset(overrides(table, line, table.model) or ()) for line in table.lines}

    assert (TABLE.n, TABLE.protocol) == (relaxed.n, relaxed.protocol)
    drawn = runs("glance") | runs("glance_windows")
    relaxed_runs = {run for run in drawn if any(part.startswith(("rule=", "distance=")) for part in run)}
    assert len(relaxed_runs) > 50
    assert relaxed_runs <= runs("relaxed")
    # two more verifications, and SCD and SJD-PAC; the windows of 64 are runs of `windows`
    assert len(drawn - runs("relaxed") - runs("windows")) == 4


def test_windows_and_drafter_networks_are_not_in_one_figure() -> None:
    """The emitted divergence of a window is a looser bound, so one axis of both would compare what is not
    comparable."""
    windows, networks = (
        {part for line in TABLES[name].lines for part in line.overrides or () if part.startswith("method=")}
        for name in ("glance_windows", "glance")
    )
    assert windows & networks == {"method=vanilla"}
    assert len(windows) == 5  # vanilla, SJD, SCD, SJD-PAC, GSD


def test_a_logarithmic_figure_has_one_column() -> None:
    content = {"lines": {"a": {"method": "sjd"}}, "figure": {"x": "n", "y": ["emitted_kl", "fid"], "log": True}}
    with pytest.raises(UsageError, match="log"):
        catalog.table("t", Source("t", content))
