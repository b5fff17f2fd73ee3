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

#: Label of a drafter -> its overrides.
_DRAFTERS = {"embedded": "", "path_kl": "drafter_weights=embedded:path_kl"}
#: Label of a scheme -> its overrides; one draft of several first tokens costs as many copies of an image.
_SCHEMES = {
    "token, γ=2": "gamma=2",
    "token, γ=4": "gamma=4",
    "block, γ=4": "gamma=4 verification=block",
    "tries=2, γ=2": "gamma=2 tries=2",
    "tries=4, γ=2": "gamma=2 tries=4",
}
_STEPS = Column("steps", "Target passes of an image", "lower", 1)
_PROPOSALS = Column("proposals_mean", "Proposals", "lower", 2, "of the target, mean over verified positions")


def _key(drafter: str, scheme: str) -> str:
    return f"{drafter}_{scheme}".replace(", γ=", "_").replace("=", "")


def _gain() -> Table:
    lines = [
        Line(_key(drafter, scheme), f"{drafter}: {scheme}", f"method=cspd {own} {weights}".strip())
        for drafter, weights in _DRAFTERS.items()
        for scheme, own in _SCHEMES.items()
    ]
    plain, *better = _SCHEMES
    tests = [(_key(drafter, scheme), _key(drafter, plain)) for drafter in _DRAFTERS for scheme in better]
    tests += [(_key("path_kl", scheme), _key("embedded", scheme)) for scheme in _SCHEMES]
    return Table(
        "verification_gain_mar",
        "What better lossless verification of continuous tokens gains, and a drafter distilled on its paths",
        paper="this project's own comparison",
        n=64,
        protocol="batch=64 seed=0 baseline=false metrics=none",
        columns=(STEPS_SAVED, _STEPS, ACCEPTED_LENGTH, ACCEPTANCE, _PROPOSALS),
        lines=tuple(lines),
        remarks=("Under block verification all drafted tokens count as verified.",),
        tests=tuple(TableTest("steps", "Target passes", *pair) for pair in tests),
        on_request=True,
        model="mar_scenes",
    )


TABLES = (_gain(),)
