"""The remarks of a row on its measurement."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specbench.config import configuration
from specbench.rows import remarks


def test_processes_that_differ_are_named() -> None:
    cfg = configuration.compose(["method=sjd", "timing=false"])
    row: dict[str, Any] = {"timing": False, "baseline_run_id": None}
    sessions = {"a": {"commit": "1", "torch": "2"}, "b": {"commit": "3", "torch": "2"}}
    texts = remarks.measurement_remarks(cfg, sessions, row)
    assert any("2 processes" in text for text in texts)
    assert [text.split()[4] for text in texts if "differ" in text] == ["commit,"]
    assert not [text for text in remarks.measurement_remarks(cfg, {"a": sessions["a"]}, row) if "process" in text]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("method=sjd_pac variant=released", "stored distribution"),
        ("method=vvs", "not verified"),
        ("method=zipar", "raster order"),
        ("method=eagle2 verification=traversal", "verification=traversal"),
    ],
)
def test_why_a_row_has_no_emitted_divergence(words: str, what: str) -> None:
    image: Any = SimpleNamespace(drafts=None, emitted_outside=None)
    cfg = configuration.compose(words.split())
    [text] = remarks.emitted_remarks(cfg, [image])
    assert text.startswith("emitted_kl: ")
    assert what in text
    outside: list[Any] = [SimpleNamespace(drafts=None, emitted_outside=share) for share in (0.0, 0.5)]
    assert "infinite" in remarks.emitted_remarks(cfg, outside)[0]
    assert "1 images" in remarks.emitted_remarks(cfg, [*outside, image])[0]
