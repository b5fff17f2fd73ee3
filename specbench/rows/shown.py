"""A row as it may be shown: in `specbench show`, in the printed report of a run, on the report's page and on cards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbench.rows import sample_size
from specbench.rows.columns import resolved, stderr_of
from specbench.rows.seconds import with_bias, withheld


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without seconds and speed-ups that do not hold and without statistics of too few images, with 0 for what
    is rounding, and with the errors that hold. (Tables do the same with cells: `tables.layout.printable`.)"""
    found = dict(with_bias(row))
    for name, value in row.items():
        if withheld(row, name) or sample_size.withheld(row, name):
            found[name] = None
        elif isinstance(value, float) and value and not resolved(name, value):
            found |= {name: 0.0, stderr_of(name): None}
    return found
