"""What a recorded step of each method takes at real sizes, alternating with one of vanilla AR, as engine=triton and as
engine=graph execute it. Random weights: a step's time hardly depends on which tokens are accepted. Without a device the
steps are done on small shapes, and nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

from gpu_checks import gates, results
from specbench.engine.graph import Action
from specbench.engine.kernels import FusedKernels

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
    return _recorded(target, engine, "none")


def _recorded(target: str, engine: str, drafter: str, window: int = 0, rule: str | None = None) -> tuple[Action, int]:
    kernels = FusedKernels(gates.stored_tiles()) if engine == "triton" else None
    return gates.recorded(target, drafter, window, gates.CONTEXT[target], rule, kernels=kernels)


def _vanilla(target: str, engine: str) -> dict[str, Any]:
    step, read = _step(target, engine)
    return gates.of_time(gates.timed({"vanilla": step})["vanilla"], read)


def _method(target: str, engine: str, drafter: str, window: int, rule: str | None) -> dict[str, Any]:
    vanilla, _ = _step(target, engine)
    step, read = _recorded(target, engine, drafter, window, rule)
    ms = gates.timed({"vanilla": vanilla, "method": step})
    ratio = ms["method"] / ms["vanilla"]
    row = gates.of_time(ms["method"], read)
    return row | {"vanilla_ms": ms["vanilla"], "of_vanilla": ratio, "note": f"{ratio:.3f} steps"}
