"""The windows of the tests, by the parameters of conf/drafter/sjd.yaml."""

from __future__ import annotations

from typing import Any

from specbench.decoding.drafters.pac_window import PACWindow
from specbench.decoding.drafters.sjd_window import SJDWindow
from specbench.decoding.drafters.window import Window


def window(window: int, init: str = "random", width: int = 1, tree: str = "full", **options: Any) -> Window:
    """Jacobi's window with `match`, SJD-PAC's with a width, else SJD's."""
    if options.get("match"):
        return Window(window, init, **options)
    if width == 1:
        return SJDWindow(window, init, **options)
    return PACWindow(window, init, width=width, form=tree, **options)
