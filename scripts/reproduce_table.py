"""The table of docs/reproduce.md: images, GPU hours, downloads and disk of the tables that the page takes its readers
through, from `specbench tables ... --dry-run`'s own forecast.

python scripts/reproduce_table.py            # print it
python scripts/reproduce_table.py --write    # put it into the page
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from specbench.bench import to_fetch
from specbench.bench.devices import DEVICES
from specbench.storage.files import format_size
from specbench.tables import forecast
from specbench.tables.catalog import TABLES
from specbench.tables.forecast import DryRun
from specbench.tables.table_runs import TablePlan, plan

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reproduce.md"
#: Table, model, prompts a run (None: as many as the paper).
LINES = (
    ("coolsd_table1", "llamagen_xl", None),
    ("coolsd_table1", "lumina_mgpt", None),
    ("lantern_table2", "llamagen_xl", None),
    ("lantern_table3", "llamagen_xl", None),
    ("sjd_table3", "llamagen_xl", None),
    ("sjdpac_table1", "lumina_mgpt", None),
    ("cspd_table1", "mar_l", None),
    ("cspd_table2", "mar_l", None),
)
GPUS = ("h200", "h100", "a100", "rtx4090")
HEAD = f"| `specbench tables` | images | {' | '.join(GPUS)} | to fetch | images and records |"
#: The table in the page.
_TABLE = re.compile(r"^\| `specbench tables` \|(?:.*\n\|)*.*\n", re.MULTILINE)


def planned(table: str, model: str, n: int | None) -> TablePlan:
    """The plan of a table without any finished runs."""
    return plan(TABLES[table], model, n, Path(os.devnull), Path("runs"))


def hours(todo: TablePlan) -> DryRun:
    return forecast.dry_run(todo.missing, {name: DEVICES[name] for name in GPUS}, ROOT / "results")


def fetched(todo: TablePlan) -> str:
    return to_fetch.total(to_fetch.missing(todo.missing))[1]


def lines(chosen: Sequence[tuple[str, str, int | None]] = LINES) -> Iterator[str]:
    for table, model, n in chosen:
        todo = planned(table, model, n)
        estimate = hours(todo)
        cells = [f"`{table} --model {model}`", f"{estimate.images:,}"]
        cells += [forecast.as_text(estimate.hours[name]) for name in GPUS]
        yield f"| {' | '.join([*cells, fetched(todo), format_size(estimate.disk[0])])} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    with tempfile.TemporaryDirectory() as empty:  # with an empty cache, every file must be fetched
        os.environ["SPECBENCH_HOME"] = empty
        drawn = "\n".join([HEAD, f"|{'---|' * (len(GPUS) + 4)}", *lines()])
    if parser.parse_args().write:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(_TABLE.sub(lambda _: f"{drawn}\n", text), encoding="utf-8")
    else:
        print(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
