"""Degenerate images: which images count as degenerate, and when a run fails because of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import said

from specbench.cli.commands import code_of
from specbench.config import configuration
from specbench.harness import run
from specbench.harness.pipeline import Pipeline
from specbench.harness.planned import PlannedRun
from specbench.models.vq import VQModel
from specbench.rows import degenerate
from specbench.rows.degenerate import FLAT, ImageFacts, count, findings, pixel_repetition, repetition, statistics
from specbench.rows.journal import read_records
from specbench.rows.remark_text import text
from specbench.storage import image_files

RANDOM = np.random.default_rng(0)
CODES = RANDOM.integers(0, 512, (16, 16))
NOISE = RANDOM.integers(0, 256, (64, 64, 3), np.uint8)
#: Repeated in another way each, from an image of codes or of pixels (64 rows and columns at most).
REPEATS = {
    "row": lambda x: np.broadcast_to(x[3:4], x.shape),
    "column": lambda x: np.broadcast_to(x[:, 3:4], x.shape),
    "tile": lambda x: np.tile(x[: len(x) // 4, : len(x) // 4], (4, 4, *[1] * (x.ndim - 2))),
    "left half": lambda x: np.concatenate([x[:, : len(x) // 2]] * 2, 1),
    "upper half": lambda x: np.concatenate([x[: len(x) // 2]] * 2, 0),
    "loop": lambda x: np.resize(x.reshape(-1, *x.shape[2:])[:3], x.shape),
}


def remarks(prompts: list[str], digests: list[str | None], contrast: int | None = 99) -> list[str]:
    facts = [ImageFacts(p, d, contrast, (64, 64)) for p, d in zip(prompts, digests, strict=True)]
    return [text(finding.remark) for finding in findings(facts)]


def test_equal_and_flat_images() -> None:
    [equal] = remarks(["a cat", "A  cat ", "a dog"], ["x", "x", "y"])  # one prompt for every text encoder
    assert re.match("2 of 3 images equal another image of their prompt ", equal)
    same = findings([ImageFacts("a cat", "x", 99, (64, 64))] * 2)
    assert [finding.degenerate for finding in same] == [False]  # greedy decoding gives them, too
    [equal] = remarks(["a", "b", "b", "c"], ["x", "x", "x", "y"])
    assert equal.startswith("3 of 4 images equal ")
    assert remarks(["a", "b"], [None, None], None) == []  # unknown
    [flat] = remarks(["a", "b"], ["x", "x"], FLAT)
    assert re.match("2 of 2 images .*flat", flat)
    assert remarks(["a", "b"], ["x", "y"], FLAT + 1) == []
    [equal] = remarks(["", ""], ["x", "x"])
    assert re.search("2 images .*equal", equal)
    assert remarks(["", "", ""], ["x", "x", "y"]) == remarks([""], ["x"]) == []  # a folder may hold copies
    assert image_files.contrast(np.full((4, 5, 3), 7, np.uint8)) == 0
    assert image_files.contrast(np.stack([np.array([[0, 9], [4, 3]], np.uint8)] * 3, -1) + np.uint8(1)) == 9


def test_what_repeats_is_found_and_chance_is_not() -> None:
    for name, repeat in REPEATS.items():
        assert repetition(repeat(CODES)) == pytest.approx(1), name
        assert pixel_repetition(repeat(NOISE)) == pytest.approx(1), name
    # 128 or more pairs of 512 equally frequent codes agree by chance in a share of 1/512; of pixels the 64 cells of a
    # column agree by chance with a standard deviation below 1 / sqrt(32 * 64) = 0.022.
    assert repetition(CODES) < 0.05
    assert pixel_repetition(NOISE) < 0.15
    # One code for nine tenths of the positions: they agree by chance, and by no more.
    mostly = np.where(np.random.default_rng(1).random((16, 16)) < 0.9, 7, CODES)
    assert (mostly[:, 4:] == mostly[:, :-4]).mean() > 0.75
    assert repetition(mostly) < 0.3
    # Neighbours that look alike do not repeat: a smooth image, and a small object on one colour.
    ramp = np.linspace(0, 255, 64)
    smooth = (ramp[:, None, None] * 0.5 + ramp[None, :, None] * 0.5).repeat(3, 2).astype(np.uint8)
    dot = np.full((64, 64, 3), 255, np.uint8)
    dot[30:34, 30:34] = 0
    assert pixel_repetition(smooth) < 0.9
    assert pixel_repetition(dot) < 0.1
    assert repetition(np.full((16, 16), 3)) == 1


def test_the_statistics_of_an_image() -> None:
    measured = statistics(NOISE, CODES)
    assert measured == {
        "contrast": 255,
        "distinct": round(len(np.unique(CODES)) / 256, 4),
        "repetition": round(repetition(CODES), 4),
    }
    assert statistics(NOISE, None)["repetition"] == round(pixel_repetition(NOISE), 4)  # of pixels without codes
    assert statistics(NOISE, CODES[:4, :4]) == {"contrast": 255}  # too few codes to tell
    few = np.array([3, 9, 27, 81])[RANDOM.integers(0, 4, (16, 16))]
    assert ImageFacts("a", "x", **statistics(NOISE, few)).has_few_codes
    assert not ImageFacts("a", "x", **statistics(NOISE, CODES)).has_few_codes
    # Pixels must agree more than codes: a sky above a sea is no repeated column.
    assert ImageFacts("a", "x", distinct=0.5, repetition=0.8).is_repeated
    assert not ImageFacts("a", "x", repetition=0.98).is_repeated


def test_an_image_counts_once_and_a_size_does_not_count() -> None:
    facts = [
        ImageFacts("a", "x", 0, (64, 64), 1 / 256, 1.0),  # flat, of one code, repeated, and equal
        ImageFacts("b", "x", 99, (64, 64), 1 / 256, 1.0),
        ImageFacts("c", "y", 99, (64, 64), 0.5, 1.0),
        ImageFacts("d", "z", 99, (15, 32), 0.5, 0.1),
    ]
    problems = findings(facts)
    assert [finding.images for finding in problems] == [{0}, {1}, {2}, {3}]
    assert [finding.degenerate for finding in problems] == [True, True, True, False]
    for finding, words in zip(problems, ("flat", "codes.* 3%", "repeat", "16 pixels .*15x32"), strict=True):
        assert re.match(f"1 of 4 images .*{words}", text(finding.remark))
    assert count(problems) == 3
    assert degenerate.why_failed({"images": 20, "degenerate_images": 2}) == ""  # a tenth may be
    assert re.match(r"3 of 20 .*\b10%", degenerate.why_failed({"images": 20, "degenerate_images": 3}))
    assert degenerate.why_failed({"images": "20", "degenerate_images": "3"})  # of a table, whose cells are text


WORDS = ["batch=4", "emitted_draws=0", "baseline=false", "metrics=none", "warmup=0", "method=vanilla"]


def ended(out: Path, *words: str) -> tuple[dict[str, Any], int]:
    """The row of a run of the embedded models, and its exit code."""
    config = configuration.compose([*WORDS, *words])
    row = run.run(config, out, loader=Pipeline.load).row
    return dict(row), code_of([PlannedRun(out, config)])


def test_a_local_run_passes_and_a_broken_decoder_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Vanilla AR with both kinds of tokens; then pixels that overflowed, which the codes do not show."""
    for name, words in {
        "codes": ["data=scenes", "n=2"],
        "vectors": ["model=mar_scenes", "diffusion_steps=8", "n=1"],
    }.items():
        row, code = ended(tmp_path / name, *words)
        assert (row["degenerate_images"], code) == (0, 0)
    records = [read_records(tmp_path / name / "records.jsonl") for name in ("codes", "vectors")]
    # Of 256 codes; the model with continuous tokens has pixels alone.
    assert all(r.distinct is not None and r.distinct * 256 == pytest.approx(round(r.distinct * 256), abs=0.02)
               for r in records[0])  # fmt: skip
    assert [r.distinct for r in records[1]] == [None]
    assert all(r.repetition is not None and r.repetition < 0.95 for images in records for r in images)
    monkeypatch.setattr(VQModel, "decode", lambda self, codes: torch.zeros(1, 3, 64, 64))
    small = ["model=llamagen_xl", "weights=random", "reduced=true", "dtype=float32"]
    row, code = ended(tmp_path / "black", *small, "data=scenes", "n=2")
    assert (row["degenerate_images"], code) == (2, 4)
    assert re.search("2 of 2 images .*flat", said(row))
    assert re.search(r"specbench: 2 of 2 .*\b10%", capsys.readouterr().err)


def test_the_codes_of_an_image_without_the_ids_between_them() -> None:
    """Ends of rows are not codes."""
    for name in ("emu3", "lumina_mgpt", "janus_pro_1b"):
        pipeline = Pipeline.load(
            configuration.compose([f"model={name}", "weights=random", "method=vanilla", "reduced=true"])
        )
        tokens = torch.arange(pipeline.tokens_per_image)[None]
        grammar = pipeline.model.target.grammar
        codes = pipeline.codes(tokens)
        assert codes is not None
        free = grammar.free.tolist() if grammar is not None else tokens[0].tolist()
        assert len(codes) == 1
        assert codes.reshape(-1).tolist() == free
        assert (np.diff(codes[0], axis=1) == 1).all()  # a row is consecutive
