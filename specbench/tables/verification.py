"""Our own experiment on lossless verification: what block, traversal and selected verification gain over token-wise
rejection, every one of them at its own best shape of a draft.

Two tables: `verification_shapes` tries shapes on few prompts, and `verification_gain` compares the best of them on
others. `specbench tables` runs them only when they are named; `make comparisons` does.
"""

from __future__ import annotations

from functools import partial

from specbench.tables.definitions import (
    ACCEPTANCE,
    ACCEPTED_LENGTH,
    STEPS_SAVED,
    Column,
    Curve,
    Line,
    Panel,
    Table,
    TableFigure,
    TableTest,
    row_column,
)

#: Label of a drafter -> its overrides, from the nearest to the target to the farthest.
_DRAFTERS = {
    "guided": "drafter_weights=embedded:guided",
    "default": "",
    "steps300": "drafter_weights=embedded:steps300",
}
#: Label of a scheme -> its overrides, without the shape.
_CHAINS = {
    "chain, token": "method=eagle_chain",
    "chain, block": "method=eagle_chain verification=block",
}
_TREES = {
    "tree, token": "method=eagle1",
    "tree, traversal": "method=eagle1 verification=traversal",
    "tree, selected": "method=eagle1 verification=selected",
}
_LENGTHS = ("2", "5", "8", "11", "14")
#: Of 6, 14, 25, 28 and 30 nodes.
_SHAPES = ("2-1-1", "2-2-1-1", "mc_sim_7b_63", "4-2-1-1", "2-2-2-2")
#: Scheme -> the shape that is compared: the best with the default drafter.
_BEST = dict.fromkeys(_CHAINS, "14") | dict.fromkeys(_TREES, "mc_sim_7b_63")

_STEPS = Column("steps", "Steps of an image", "lower", 1)
_DRAFT_TOKENS = Column("draft_tokens", "Draft tokens of a step", "lower", 1, "verified, mean over steps", std_over=None)
_DRAFT_TV = row_column("draft_tv", "TV of draft and target", 3)
#: Steps alone are wanted: no image is scored, and no statistic of what is emitted computed.
_PROTOCOL = "batch={} seed={} baseline=false metrics=none emitted_draws=0"
_table = partial(Table, paper="this project's own comparison", on_request=True)


def _line(drafter: str, scheme: str, shape: str) -> Line:
    method = (_CHAINS | _TREES)[scheme]
    parameter = "window" if scheme in _CHAINS else "tree"
    key = f"{drafter}_{scheme}_{shape}".replace(", ", "_").replace("-", "")
    overrides = f"{method} {_DRAFTERS[drafter]} {parameter}={shape}"
    return Line(key, f"{drafter}: {scheme}, {shape}", " ".join(overrides.split()))


def _shapes() -> Table:
    lines, curves = [], []
    for scheme in (*_CHAINS, *_TREES):
        points = [_line("default", scheme, shape) for shape in (_LENGTHS if scheme in _CHAINS else _SHAPES)]
        lines += points
        curves.append(Curve(scheme, tuple(line.key for line in points)))
    return _table(
        "verification_shapes",
        "Shapes of drafts under four lossless verifications on the embedded model: the search",
        n=24,
        protocol=_PROTOCOL.format(24, 1),
        columns=(STEPS_SAVED, _STEPS, _DRAFT_TOKENS),
        lines=tuple(lines),
        remarks=(
            "In expectation a longer chain never takes more steps, token-wise or by block (specbench probe "
            "drafter=eagle window=14 probe.strengths=none has every length), so that only the shapes of trees "
            "are open. Of those within a standard error of the best, the smallest is compared. The samples are "
            "those of seed 1, and the comparison (verification_gain) has seed 0: what was chosen for its luck "
            "here has none there.",
        ),
        figure=TableFigure(("draft_tokens",), ("step_compression",), "", (Panel("EAGLE-1", tuple(curves)),)),
    )


def _gain() -> Table:
    lines = {
        (drafter, scheme): _line(drafter, scheme, shape) for drafter in _DRAFTERS for scheme, shape in _BEST.items()
    }
    pairs = (("chain, block", "chain, token"), ("tree, traversal", "tree, token"), ("tree, selected", "tree, token"))
    more = (("chain, block", "tree, traversal"), ("tree, selected", "tree, traversal"))
    return _table(
        "verification_gain",
        "What better lossless verification gains: each way at its own best shape of a draft, on the embedded model",
        n=48,
        protocol=_PROTOCOL.format(24, 0),
        columns=(STEPS_SAVED, _STEPS, ACCEPTED_LENGTH, _DRAFT_TOKENS, ACCEPTANCE, _DRAFT_TV),
        lines=tuple(lines.values()),
        figure=TableFigure(
            ("draft_tv",),
            ("step_compression",),
            "",
            (
                Panel(
                    "EAGLE-1, best shape of at most 30 nodes",
                    tuple(
                        Curve(scheme, tuple(lines[drafter, scheme].key for drafter in _DRAFTERS)) for scheme in _BEST
                    ),
                ),
            ),
        ),
        tests=tuple(
            TableTest("steps", "Steps", lines[drafter, one].key, lines[drafter, other].key)
            for drafter in _DRAFTERS
            for one, other in (*pairs, *more)
        ),
    )


TABLES = (_shapes(), _gain())
