"""Our own experiment on lossless verification of continuous tokens: what block verification and layered acceptance gain
over token-wise rejection, with the embedded drafter and with the one distilled on its paths.

`specbench tables` runs it only when it is named; `make comparisons` does.
"""

from __future__ import annotations

from specbench.tables.definitions import (
    ACCEPTANCE,
    ACCEPTED_LENGTH,
    STEPS_SAVED,
    Column,
    Line,
    Table,
    TableTest,
)

#: Key of a line -> its label and its overrides.
_LINES = {
    "token": ("token-wise, γ=2", "gamma=2"),
    "block": ("block, γ=4", "gamma=4 verification=block"),
    "tries": ("two first tokens, γ=2", "gamma=2 tries=2"),
    "path_kl_block": (
        "block, γ=4, drafter distilled on paths",
        "gamma=4 verification=block drafter_weights=embedded:path_kl",
    ),
}
_TESTS = (("block", "token"), ("tries", "token"), ("path_kl_block", "block"))
_STEPS = Column("steps", "Target passes of an image", "lower", 1)
_PROPOSALS = Column("proposals_mean", "Proposals", "lower", 2, "of the target, mean over verified positions")


def _gain() -> Table:
    lines = [Line(key, label, f"method=cspd {own}") for key, (label, own) in _LINES.items()]
    return Table(
        "verification_gain_mar",
        "What better lossless verification of continuous tokens gains, and a drafter distilled on its paths",
        paper="this project's own comparison",
        n=24,
        protocol="batch=24 seed=0 baseline=false metrics=none",
        columns=(STEPS_SAVED, _STEPS, ACCEPTED_LENGTH, ACCEPTANCE, _PROPOSALS),
        lines=tuple(lines),
        remarks=("Under block verification all drafted tokens count as verified.",),
        tests=tuple(TableTest("steps", "Target passes", *pair) for pair in _TESTS),
        on_request=True,
        model="mar_scenes",
    )


TABLES = (_gain(),)
