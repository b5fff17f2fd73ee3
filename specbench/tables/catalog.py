"""Every table there is, by its id."""

from __future__ import annotations

from specbench.tables import (
    comparisons,
    coolsd,
    cspd,
    field,
    jacobi,
    lantern,
    newer,
    sjd,
    sjdpac,
    verification,
    verification_mar,
)
from specbench.tables.definitions import Table

TABLES: dict[str, Table] = {
    table.id: table
    for module in (
        coolsd,
        lantern,
        sjd,
        jacobi,
        newer,
        cspd,
        sjdpac,
        field,
        comparisons,
        verification,
        verification_mar,
    )
    for table in module.TABLES
}
