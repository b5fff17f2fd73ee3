"""The remarks of a row on its measurement."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from commands import ROOT

from specbench.config import configuration
from specbench.rows import remarks
from specbench.rows.provenance import DecodingProcess
from specbench.rows.remark import Remark, as_json, remark, remarks_of
from specbench.rows.remark_text import SENTENCES, common, kind, said


def test_processes_that_differ_are_named() -> None:
    cfg = configuration.compose(["method=sjd", "timing=false"])
    row: dict[str, Any] = {"timing": False, "baseline_run_id": None}
    one = DecodingProcess("1", "1", "cpu", "A", "2", "", "3.11", 1, "random", 64, 256, 1, "", 7, "2026-11-29", 0.5)
    sessions = {"a": one, "b": replace(one, commit="3")}
    found = remarks.measurement_remarks(cfg, sessions, row)
    assert remark("processes", processes=2, timed=False) in found
    assert [r.values["what"] for r in found if r.code == "processes_differ"] == ["commit"]
    assert not [r for r in remarks.measurement_remarks(cfg, {"a": sessions["a"]}, row) if "process" in r.code]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("method=sjd_pac variant=released", remark("emitted_not_drawn", "emitted_kl")),
        ("method=vvs", remark("emitted_not_verified", "emitted_kl")),
        ("method=zipar", remark("emitted_order", "emitted_kl", drafter="zipar")),
        (
            "method=eagle2 verification=traversal",
            remark("emitted_verification", "emitted_kl", verification="traversal"),
        ),
    ],
)
def test_why_a_row_has_no_emitted_divergence(words: str, expected: Remark) -> None:
    image: Any = SimpleNamespace(drafts=None, emitted_outside=None)
    cfg = configuration.compose(words.split())
    assert remarks.emitted_remarks(cfg, [image]) == [expected]
    outside: list[Any] = [SimpleNamespace(drafts=None, emitted_outside=share) for share in (0.0, 0.5)]
    assert remarks.emitted_remarks(cfg, outside) == [remark("emitted_infinite", "emitted_kl", share=0.25)]
    missing = remark("emitted_not_recorded", "emitted_kl", images=1)
    assert remarks.emitted_remarks(cfg, [*outside, image]) == [missing]


def test_every_remark_is_a_sentence_and_comes_back_from_json() -> None:
    """Each code that the product uses has a sentence, and each sentence a use."""
    files = [path for path in (ROOT / "specbench").rglob("*.py") if path.name != "remark_text.py"]
    source = "".join(path.read_text("utf-8") for path in files)
    assert set(re.findall(r'[rR]emark\(\s*"(\w+)"', source)) <= set(SENTENCES)
    assert not [code for code in SENTENCES if f'"{code}"' not in source]
    given = (remark("batches", batch=16), remark("biased", "fid", per_feature=16, features=64))
    cell = json.dumps(as_json(given))
    assert remarks_of({"remarks": cell}) == remarks_of({"remarks": as_json(given)}) == given
    for damaged in ("{", "[1]", '[{"code": 1}]', "[" * 10_000):
        assert remarks_of({"remarks": damaged}) == ()
    assert said(Remark("of another version", {"x": 1}, "fid")) == "fid: of another version {'x': 1}"


def test_numbers_that_differ_become_a_range() -> None:
    alike = [remark("cut_captions", cut=cut, captions=16, tokens=77) for cut in (3, 1, 2)]
    assert len({kind(r) for r in alike}) == 1
    assert common(alike) == "1 to 3 of 16 captions have more than 77 tokens and lose their end"
    assert kind(remark("text", text="a")) != kind(remark("text", text="b"))
