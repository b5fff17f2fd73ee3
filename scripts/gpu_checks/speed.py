"""What a recorded step of each method takes at real sizes, next to one of vanilla AR by turns, as engine=triton and as
engine=graph execute it. Random weights: a step's time hardly depends on which tokens are accepted. Without a device the
steps are done on small shapes, and nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

from gpu_checks import gates, results
from specbench.engine.graph import Action

#: Drafter, window and rule of a method.
METHODS = {
    "SJD 32": ("sjd", 32, None),
    "SJD-PAC 64": ("sjd_pac", 64, None),
    "SCD 32": ("scd", 32, None),
    "EAGLE-1, tree of 26": ("tree", 0, None),
    "LANTERN, tree of 26": ("tree", 0, "lantern"),
    "Cool-SD, tree of 26": ("tree", 0, "cool"),
}
TARGETS = ("emu3", "7b", "xl")
ENGINES = ("triton", "graph")


def checks(fast: bool) -> Iterator[results.Check]:
    yield "EMU3 tiles", partial(gates.tuned_of, "emu3")  # the gates tune the others
    for engine in ENGINES:
        for target in TARGETS[:: 1 if engine == "triton" else -1][: 1 if fast else None]:
            yield f"{target.upper()} vanilla, {engine}", partial(_vanilla, target, engine)
            for method, case in list(METHODS.items())[: 2 if fast else None]:
                yield f"{target.upper()} {method}, {engine}", partial(_method, target, engine, *case)


@lru_cache(1)
def _step(target: str, engine: str) -> tuple[Action, int]:
    """Of vanilla AR, kept for the methods that are measured next to it."""
    return gates.recorded(target, "none", 0, gates.CONTEXT[target], fused=engine == "triton")


def _line(ms: float, read: int) -> dict[str, Any]:
    least = 1e3 * read / gates.speed()
    line = {"measured": ms, "unit": "ms", "floor": least, "share_of_bandwidth": least / ms}
    return line | {"device": gates.device_name()}


def _vanilla(target: str, engine: str) -> dict[str, Any]:
    step, read = _step(target, engine)
    return _line(gates.timed({"vanilla": step})["vanilla"], read)


def _method(target: str, engine: str, drafter: str, window: int, rule: str | None) -> dict[str, Any]:
    vanilla, _ = _step(target, engine)
    step, read = gates.recorded(target, drafter, window, gates.CONTEXT[target], rule, fused=engine == "triton")
    ms = gates.timed({"vanilla": vanilla, "method": step})
    ratio = ms["method"] / ms["vanilla"]
    return _line(ms["method"], read) | {"vanilla_ms": ms["vanilla"], "of_vanilla": ratio, "note": f"{ratio:.3f} steps"}
