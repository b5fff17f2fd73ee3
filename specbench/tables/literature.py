"""The numbers that papers print: one CSV file per table, part of the package, with digits exactly as printed.

An empty cell means that the paper prints no value. evidence: how the number was obtained. The grades in `TRUSTED` may
be shown as "published" without a mark; every other grade is a hint and is marked wherever it is shown.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from specbench.errors import unknown

#: Targets that draft for others -> their names in conf/model. The first one is every model's default.
DRAFTERS = {"MAR-B (208M)": "mar_b", "MAR-L (479M)": "mar_l"}
#: LlamaGen-XL's stages -> their names in conf/model.
STAGES = {"llamagen_xl_stage1": "llamagen_xl", "llamagen_xl_stage2": "llamagen_xl_512"}
TRUSTED = ("seed", "seed+official_repo", "reconstructed", "paper")


@dataclass(frozen=True)
class PublishedRow:
    """One printed line. `cells` maps every column of the file to its text; "1.00" stays "1.00"."""

    row_id: str
    model: str
    model_key: str
    method_key: str
    evidence: str
    cells: Mapping[str, str]

    @property
    def model_name(self) -> str:
        """The model's name in conf/model."""
        return STAGES.get(self.model_key, self.model_key)

    @property
    def drafter_model(self) -> str:
        """The model in conf/model that drafts; "" if no target of another name does."""
        return DRAFTERS.get(self.cells["draft_model"], "")

    def fits(self, values: Mapping[str, str]) -> bool:
        """Whether the row has all of these cells."""
        return all(self.cells.get(name, "") == value for name, value in values.items())

    @property
    def trusted(self) -> bool:
        """Whether the row may be shown as published without a mark."""
        return self.evidence in TRUSTED


def available() -> list[str]:
    """The ids of the tables with published numbers."""
    folder = resources.files("specbench.tables") / "published"
    return sorted(f.name.removesuffix(".csv") for f in folder.iterdir() if f.name.endswith(".csv"))


def load(table: str) -> list[PublishedRow]:
    """The published rows of one table, in the paper's order.

    Raises:
        UsageError: the table has no published numbers.
    """
    if table not in available():
        raise unknown("published table", table, available())
    file = resources.files("specbench.tables") / "published" / f"{table}.csv"
    rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines(), strict=True))
    return [
        PublishedRow(r["row_id"], _model(r, rows), r["model_key"], r["method_key"], r["evidence"], dict(r))
        for r in rows
    ]


def _model(row: Mapping[str, str], rows: Sequence[Mapping[str, str]]) -> str:
    """A model's name, with its drafter's name if the table has several drafters for it."""
    drafters = {r["draft_model"] for r in rows if r["model"] == row["model"] and r["draft_model"]}
    return f"{row['model']} and {row['draft_model']}" if len(drafters) > 1 and row["draft_model"] else row["model"]
