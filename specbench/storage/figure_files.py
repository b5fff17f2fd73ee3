"""Files of figures that matplotlib draws, on any machine: without a window, and in fonts that have the characters."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from specbench.errors import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(make: Callable[[], Figure], folder: Path, stem: str) -> list[Path]:
    """Makes a figure and saves it. The same rows give the same files. Returns the written files."""
    written, mpl = [], matplotlib()
    with mpl.rc_context({"svg.hashsalt": "specbench", "svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # `_further_fonts` says it once
        drawn = make()
        if families := _further_fonts(drawn):
            mpl.rcParams["font.family"] = [*mpl.rcParams["font.family"], *families]
            drawn = make()
        for ending in ("svg", "png"):
            path = folder / f"{stem}.{ending}"
            metadata: dict[str, Any] = {"Date": None} if ending == "svg" else {"Software": None}
            drawn.savefig(path, dpi=150, metadata=metadata)
            written.append(path)
    return written


def _further_fonts(drawn: Figure) -> list[str]:
    """The fonts of this machine that have the characters of a figure that matplotlib's own font does not have, such as
    Chinese ones. Says once which characters no font has."""
    from matplotlib import font_manager, ft2font
    from matplotlib.text import Text

    fonts = font_manager.fontManager
    texts: Any = drawn.findobj(Text)
    missing = {ord(c) for text in texts for c in text.get_text() if not c.isspace()}
    missing -= set(ft2font.FT2Font(font_manager.findfont(font_manager.FontProperties())).get_charmap())
    if not missing:
        return []
    for path in {*font_manager.findSystemFonts()} - {entry.fname for entry in fonts.ttflist}:
        with suppress(Exception):  # not every file is a font that the library reads
            fonts.addfont(path)  # installed since the library listed them
    families = []
    for entry in sorted(fonts.ttflist, key=lambda entry: (entry.name, entry.fname)):
        if missing and entry.style == "normal" and not entry.name.startswith("Last Resort"):  # which draws boxes
            found = missing.intersection(ft2font.FT2Font(entry.fname).get_charmap())
            families += [entry.name] if found else []
            missing -= found
    if missing:
        _say_missing("".join(map(chr, sorted(missing))))
    return families


@cache
def _say_missing(characters: str) -> None:
    print(
        f"specbench: no font here has the characters {plain(characters[:40])}: PNG figures show boxes; install a font,"
        " such as Noto Sans CJK",
        file=sys.stderr,
    )


def matplotlib() -> Any:
    """The library, whatever MPLBACKEND says: a notebook exports the name of its own backend, which cannot be imported
    elsewhere. No backend is needed, because no figure has a window."""
    with mock.patch.dict(os.environ):
        os.environ.pop("MPLBACKEND", None)
        import matplotlib as mpl

    return mpl
