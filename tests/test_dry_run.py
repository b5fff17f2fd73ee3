"""Dry runs: what runs would do, with times from this machine's rows alone, and nothing done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Call

from specbench.bench import plan
from specbench.tables.catalog import TABLES

SMALL = ("metrics=none", "device=cpu", "warmup=0", "batch=2", "timing=true")


@pytest.fixture
def dry(call: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """`call` with a store, and with memory that takes no time."""
    monkeypatch.delenv("SPECBENCH_STORE")
    gb = {"peak_estimate_gb": 3.5, "runtime_estimate_gb": 1.0, "all_weights_gb": 2.0, "state_gb": 0.25}
    monkeypatch.setattr(plan, "plan", lambda cfg: gb)
    return call


def test_a_dry_run_does_nothing_and_knows_nothing_of_a_new_machine(dry: Call, tmp_path: Path) -> None:
    code, out, _ = dry("run", "--dry-run", "method=sjd", "n=4", *SMALL, "out=one")
    assert code == 0
    assert list(tmp_path.iterdir()) == []
    lines = dict(line.split(maxsplit=1) for line in out.splitlines()[2:])
    assert lines["decode"] == "8 images, 0 of 8 are there"  # the baseline's, too
    several = dry("run", "--dry-run", "method=sjd", "n=4", "images_per_prompt=3", *SMALL, "out=one")[1]
    assert "decode    24 images, 0 of 24 are there" in several
    assert lines["time"] == "unknown for 1 of 1 runs: the store has no such row of this machine"
    assert lines["disk"] == "unknown for llamagen_scenes: no run of it is here"
    assert lines["memory"].startswith(
        "2 GB of weights and 0.25 GB of caches, about 2.5 GB at the peak (llamagen_scenes, "
    )
    assert lines["download"] == "nothing"


def test_time_is_from_rows_of_this_machine(dry: Call) -> None:
    assert dry("run", "method=sjd", "n=4", *SMALL, "out=one")[0] == 0  # 5.5 s an image, 16 s of vanilla
    code, out, _ = dry("run", "--dry-run", "method=sjd", "n=6", "seed=3", *SMALL, "out=two")
    assert code == 0
    assert "time      unknown" in out  # no row of vanilla
    assert dry("run", "method=vanilla", "n=4", *SMALL, "out=base")[0] == 0
    out = dry("run", "--dry-run", "method=sjd", "n=6", *SMALL, "out=two")[1]
    assert "time      0:02:09 of decoding, one run after the other, without scoring\n" in out  # 6 * (5.5 + 16)
    assert "disk      about " in out
    out = dry("run", "--dry-run", "method=sjd", "window=8", "n=6", *SMALL, "out=two")[1]
    assert "(1 by the same method with other parameters)" in out
    out = dry("run", "--dry-run", "method=sjd", "n=6", *SMALL, "out=one")[1]
    assert "decode    4 images, 8 of 12 are there" in out
    assert "time      0:00:43" in out
    assert "finished" in dry("run", "--dry-run", "method=sjd", "n=4", *SMALL, "out=one")[1]


def test_what_is_missing_is_a_download(dry: Call) -> None:
    words = ("model=llamagen_xl", "method=sjd,eagle1", "data=parti", "metrics=clip_b32", "n=2", "device=cpu")
    code, out, _ = dry("run", "-m", "--dry-run", *words)
    assert code == 0
    found = [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("download")]
    assert "parti (123.1 kB): specbench fetch data=parti" in found
    assert any(
        line.startswith("eagle/ of llamagen_xl from ") and line.endswith(" drafter=eagle_tree") for line in found
    )
    assert any(line.endswith("specbench fetch metrics=clip_b32") for line in found)


def test_suites_and_tables_have_dry_runs(dry: Call, tmp_path: Path) -> None:
    held: dict[str, Any] = {"n": 3, "seeds": [0, 1], "timed": 2, "metrics": "none", "lines": {"sjd": {"method": "sjd"}}}
    Path("my.yaml").write_text(yaml.safe_dump(held))
    code, out, _ = dry("suite", "my.yaml", "--dry-run")
    assert code == 0
    assert out.splitlines()[0] == "dry run of my in runs/suites/my: 8 runs, nothing is decoded"
    # of each seed: 3 + 3 of quality, 2 of vanilla and 2 pairs that are timed
    assert f"decode    {2 * (6 + 2 + 4)} images" in out
    out = dry("tables", "eagle3_gain", "--dry-run")[1]
    assert "4 runs, nothing is decoded" in out
    assert f"decode    {4 * TABLES['eagle3_gain'].n} images" in out
    assert [path.name for path in tmp_path.iterdir()] == ["my.yaml"]
