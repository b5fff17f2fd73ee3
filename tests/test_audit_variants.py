"""`specbench audit --variants`: every version of the methods that have several."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from commands import Call, refused

from specbench.config import parameters, variants


def test_every_variant_has_its_row(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped, few = parameters.choices, dict.fromkeys(("scd", "sd"), "")
    monkeypatch.setattr(parameters, "choices", lambda kind: few if kind == "method" else shipped(kind))
    small = ("audit.model=v2t10", "audit.samples=12000", "audit.margin=1")  # at 20,000 its p-value is 9e-21
    code, out, err = call("audit", "--variants", "window=4", *small, "out=all.csv")
    assert code == 0, err
    with (tmp_path / "all.csv").open(newline="") as f:
        rows = list(csv.DictReader(f))
    found = {(row["method"], row["variant"]): row for row in rows}
    assert list(found) == [(name, one) for name in few for one in variants.of(name)]
    assert "stored=old" in found["scd", "released"]["parameters"]
    assert "window=4 " in found["scd", "released"]["parameters"]
    assert "\nscd variant=exact (rule exact): lossless" in out
    assert "\nscd variant=released (rule exact): not lossless" in out
    assert f"smallest TV that was refuted: {float(rows[-1]['tv_low']):.4f} to " in out
    assert "of scd variant=released on v2t10\n" in out


def test_what_variants_refuse(call: Call) -> None:
    for word in ("method=sjd", "variant=released"):
        assert f"--variants and {word.partition('=')[0]}= contradict" in refused(call, "audit", "--variants", word)
    assert "unknown variant of sjd 'exact'" in refused(call, "audit", "method=sjd", "variant=exact")
    for wrong in ("[]", "{}", "[printed]"):
        assert "unknown variant of sjd" in refused(call, "audit", "method=sjd", f"variant={wrong}")
        assert "unknown variant of sjd" in refused(call, "run", "method=sjd", f"variant={wrong}")
