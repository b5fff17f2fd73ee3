"""Several images per prompt: their random streams, files and records, and errors that count prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import row_of, said
from fake_pipeline import FakePipeline

from specbench import data
from specbench.compare import comparison, passes
from specbench.config import configuration, indices
from specbench.config.parameter import PROMPTS
from specbench.decoding.rng import RandomStreams
from specbench.errors import UsageError
from specbench.harness import pairing, run, status
from specbench.metrics import ASSETS, Score, ScoringContext
from specbench.metrics.base import over_prompts
from specbench.metrics.scenes import ScenesReward
from specbench.rows import summary
from specbench.rows.journal import read_records


def execute(out: Path, *overrides: str) -> dict[str, Any]:
    cfg = configuration.compose(["metrics=none", "n=3", *overrides])
    return run.run(cfg, out, loader=FakePipeline).row  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "four"
    execute(out, "images_per_prompt=4")
    return out


def pixels(out: Path, name: str = "records.jsonl") -> dict[int, str]:
    return {r.index: r.sha256 for r in read_records(out / name)}


def test_an_images_number_depends_only_on_its_prompt_and_repeat() -> None:
    assert indices.STRIDE > PROMPTS

    def of_run(n: int, images_per_prompt: int) -> list[int]:
        return indices.of(n, images_per_prompt=images_per_prompt)

    assert of_run(3, 1) == [0, 1, 2]
    four = of_run(3, 4)
    assert len(set(four)) == 12
    assert set(of_run(2, 3)) < set(four)
    assert [(indices.prompt_of(i), indices.repeat_of(i)) for i in four] == [(i, j) for i in range(3) for j in range(4)]
    assert [indices.file_name(i) for i in of_run(2, 2)] == [
        "00000.png", "00000-1.png", "00001.png", "00001-1.png"
    ]  # fmt: skip
    with pytest.raises(UsageError, match="images_per_prompt.*1,000,000"):
        configuration.compose(["n=100000", "images_per_prompt=11"])
    cfg = configuration.compose([])
    assert cfg.images_per_prompt == 1


def test_no_two_images_share_their_random_numbers() -> None:
    """Of one prompt, of two prompts, or of two seeds, such as image 1 of seed 0 and image 0 of seed 1."""
    of_run = indices.of(50, images_per_prompt=8)
    streams = RandomStreams([(seed, index) for seed in (0, 1, 2, 49, 2**20) for index in of_run])
    first = streams.uniform(torch.zeros(len(streams), dtype=torch.int64), 0, 4)
    assert len({tuple(numbers) for numbers in first.tolist()}) == len(streams)


def test_the_first_images_equal_a_run_with_one_image_per_prompt(four: Path, tmp_path: Path) -> None:
    one_image, two_images = execute(tmp_path / "one"), execute(tmp_path / "two", "images_per_prompt=2", "batch=2")
    row = row_of(four)
    for name in ("records.jsonl", "baseline.jsonl"):
        alone, half, every = (pixels(out, name) for out in (tmp_path / "one", tmp_path / "two", four))
        assert list(alone) == [0, 1, 2]
        assert alone.items() < half.items() < every.items()
        assert len(set(every.values())) == 12
    assert [(r["n"], r["images_per_prompt"], r["images"]) for r in (one_image, two_images, row)] == [
        (3, 1, 3),
        (3, 2, 6),
        (3, 4, 12),
    ]
    assert one_image["prompts_hash"] == two_images["prompts_hash"] == row["prompts_hash"]
    assert len({r["config_hash"] for r in (one_image, two_images, row)}) == 3
    _, left_out = comparison.pair(passes.read(str(tmp_path / "two")), passes.read(str(tmp_path / "one")))
    assert len(left_out) == 1
    assert "3 of A (index 0-1, 1-1, 2-1)" in left_out[0]
    assert sorted(path.name for path in (four / "images").iterdir())[:4] == [
        "00000-1.png", "00000-2.png", "00000-3.png", "00000.png"
    ]  # fmt: skip


def test_a_stopped_run_continues_where_it_stopped(four: Path, tmp_path: Path) -> None:
    out = tmp_path / "half"
    execute(out, "images_per_prompt=4", "baseline=false")
    lines = (out / "records.jsonl").read_text().splitlines(keepends=True)
    (out / "records.jsonl").write_text("".join(lines[:5]))
    run_status = status.of_run(out)
    assert (run_status.n, run_status.images.done, run_status.images.left) == (3, 5, 7)
    execute(out, "images_per_prompt=4", "baseline=false")
    assert pixels(out) == pixels(four)
    assert status.of_run(out).images.left == 0
    execute(out, "images_per_prompt=4", "baseline=false", "n=4")  # a larger n extends the run
    assert pixels(four).items() < pixels(out).items()
    with pytest.raises(UsageError, match="images_per_prompt=4.*images_per_prompt=2"):
        execute(out, "images_per_prompt=2", "baseline=false")


def test_errors_and_comparisons_count_prompts(four: Path) -> None:
    records = read_records(four / "records.jsonl")
    columns = summary.speed(records)
    steps = np.array([r.steps for r in sorted(records, key=lambda r: (indices.prompt_of(r.index), r.index))]).reshape(
        3, 4
    )
    assert columns["steps"] == pytest.approx(steps.mean())
    assert columns["steps_stderr"] == pytest.approx(steps.mean(1).std(ddof=1) / np.sqrt(3))
    compared = comparison.compare(passes.read(f"{four}/baseline"), passes.read(str(four)))
    assert compared.pairs == 12
    assert any(" 3 prompts" in remark for remark in compared.remarks)
    [result] = [candidate for candidate in compared.results if candidate.statistic.name == "accepted_length"]
    lengths = 16 / steps
    assert (result.units, result.paired.n) == ("prompts", 3)
    assert result.paired.mean_b == pytest.approx(lengths.mean())
    assert result.paired.test is not None
    t = (lengths.mean(1) - 1).mean() / ((lengths.mean(1) - 1).std(ddof=1) / np.sqrt(3))
    assert result.paired.test.statistic == pytest.approx(t)


def test_the_influence_of_a_prompt_is_the_sum_over_its_images() -> None:
    moved = np.random.default_rng(0).normal(size=7)
    prompts = [4, 4, 4, 0, 0, 9, 9]
    grouped = passes.of_prompts(moved, prompts)
    assert grouped.sum() / 3 == pytest.approx(moved.sum() / 7)
    assert grouped[1] / 3 == pytest.approx(moved[:3].sum() / 7)


def test_prompts_that_the_model_does_not_read_to_their_end_are_counted(tmp_path: Path) -> None:
    """A prompt counts once. The fake model reads 40 words."""
    (tmp_path / "p.txt").write_text("\n".join(" ".join(["word"] * n) for n in (39, 40, 41, 45)))
    row = execute(tmp_path / "run", f"prompts={tmp_path}/p.txt", "n=4", "images_per_prompt=2")
    assert "2 of 4 (up to 5 tokens)" in said(row)
    assert said(run.stored_outcome(tmp_path / "run").row) == said(row)
    assert [r.unread for r in read_records(tmp_path / "run/baseline.jsonl")][:4] == [0, 0, 1, 5]
    short = execute(tmp_path / "run", f"prompts={tmp_path}/p.txt", "n=2", "images_per_prompt=2")
    assert "tokens)" not in said(short)


def test_the_error_of_a_metric_is_over_prompts() -> None:
    metric = ScenesReward(ScoringContext(ASSETS, ASSETS), {})
    items = [data.Item(i, "", None, str(i % 3)) for i in range(12)]
    outputs = np.random.default_rng(0).normal(size=(12, 1))
    [score] = over_prompts(metric, (Score(0.5, 0.1, ""),), outputs, items)
    assert score.stderr == pytest.approx(outputs.reshape(4, 3).mean(0).std(ddof=1) / np.sqrt(3))
    alone = [replace(item, id=str(item.index)) for item in items]
    assert over_prompts(metric, (Score(0.5, 0.1, ""),), outputs, alone)[0].stderr == 0.1


def test_files_of_one_prompt_are_paired_with_it(tmp_path: Path) -> None:
    items = [data.Item(i, f"prompt {i}", None, str(i)) for i in range(3)]
    names = ["00000.png", "00000-1.png", "1-0.png", "0001-2.jpg", "0002/samples/0000.png", "0002/samples/0003.png"]
    pairs = pairing._pair_by_name(Path(), [Path(name) for name in names], items, partial=False)
    assert [path.as_posix() for path in pairs.paths] == names
    assert [(item.id, indices.repeat_of(item.index)) for item in pairs.items] == [
        ("0", 0), ("0", 1), ("1", 0), ("1", 2), ("2", 0), ("2", 3)
    ]  # fmt: skip
    (tmp_path / "00001/samples").mkdir(parents=True)
    paths = [tmp_path / "00001/grid.png", tmp_path / "00001/samples/0001.png"]
    assert pairing._pair_by_name(tmp_path, paths, items, partial=True).paths == paths[1:]
    with pytest.raises(UsageError, match="prompt 0"):
        pairing._pair_by_name(Path(), [Path("0.png"), Path("0-0.png")], items[:1], partial=False)
