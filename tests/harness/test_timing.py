"""Timings: method and vanilla AR alternate; the paired speed-up with its error, the drift, and empty columns."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import said
from fake_pipeline import TOKENS, FakePipeline, at, execute, interrupt
from test_summary import timed

from specbench.config import configuration
from specbench.decoding.batch import synchronize
from specbench.errors import UsageError
from specbench.harness import run
from specbench.rows import provenance, timing
from specbench.rows.columns import TIMED_COLUMNS
from specbench.rows.journal import TIMINGS, Record, TimingJournal, read_records
from specbench.rows.timing import Pair


def passes(out: Path) -> tuple[list[Record], list[Record]]:
    method, vanilla = (read_records(out / f"{name}.jsonl") for name in ("records", "baseline"))
    return method, vanilla


def test_in_batches_the_batches_alternate(tmp_path: Path) -> None:
    row = execute(tmp_path, "batch=2", "timing=true")
    method, vanilla = passes(tmp_path)
    assert [r.timed for r in method] == [1, 1, 4, 4, 5, 5]
    assert [r.timed for r in vanilla] == [2, 2, 3, 3, 6, 6]
    assert row["timed_pairs"] == 3
    assert row["speedup_throughput"] == pytest.approx(6 * TOKENS / 31)
    assert (row["images_per_s"], row["latency_s_mean"], row["speedup_latency"]) == (pytest.approx(6 / 31), None, None)


def test_which_runs_are_timed_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, expected in (
        ((), True),
        (("batch=2",), False),
        (("workers=2",), False),
        (("ray_address=10.0.0.1:6379",), False),
        (("batch=2", "timing=true"), True),
        (("timing=false",), False),
        (("protocol=coolsd_table1", "model=llamagen_scenes"), True),
    ):
        assert timing.is_timed(configuration.compose(words)) is expected, words
    for words in (("workers=2",), ("ray_address=10.0.0.1:6379",)):
        with pytest.raises(UsageError, match="timing=true"):
            configuration.compose(["timing=true", *words])
    monkeypatch.setattr(configuration, "_installed", lambda module: True)
    jobs = ["delta=1,2"]
    assert [timing.is_timed(job.cfg) for job in configuration.grid(jobs, True)] == [True, True]
    jobs.append("hydra/launcher=joblib")
    assert [timing.is_timed(job.cfg) for job in configuration.grid(jobs, True)] == [False, False]
    with pytest.raises(UsageError, match="timing=true"):
        configuration.grid([*jobs, "timing=true"], True)
    # rows without the parameter keep their hash
    hashes = {provenance.config_hash(configuration.compose([f"timing={t}"])) for t in ("null", "true", "false")}
    assert len(hashes) == 1


def test_without_timing_every_column_in_seconds_is_empty(tmp_path: Path) -> None:
    timed_row = execute(tmp_path / "timed")
    assert {name for name in TIMED_COLUMNS if timed_row[name] is None} == {
        "draft_cost", "speedup_expected",  # of continuous tokens
    }  # fmt: skip
    steps = ("accepted_length_mean", "steps", "step_compression", "speedup_step", "acceptance_rate")
    for word in ("timing=false", "batch=2"):
        row = execute(tmp_path / word, word)
        assert {name: row[name] for name in TIMED_COLUMNS if row[name] is not None} == {}
        assert row["timing"] == "false"
        assert {name: row[name] for name in steps} == {name: timed_row[name] for name in steps}


def test_a_folder_may_continue_without_timing_but_not_time_old_images(tmp_path: Path) -> None:
    execute(tmp_path, "timing=false")
    row = execute(tmp_path, "timing=true")
    assert (row["timing"], row["latency_s_mean"]) == ("false", None)
    row = execute(tmp_path, "timing=true", "n=8")
    assert (row["timing"], row["latency_s_mean"]) == ("false", None)


def test_only_neighbours_of_one_process_are_a_pair() -> None:
    def num_pairs(**changes: Any) -> int:
        return len(timing.pairs([timed(0, 1.0, timed=4)], [timed(0, 2.0, **({"timed": 5} | changes))]))

    assert (num_pairs(), num_pairs(timed=3)) == (1, 1)
    for changes in ({"timed": 6}, {"timed": None}, {"session": "another"}, {"batch": 2}):
        assert num_pairs(**changes) == 0, changes
    # if a batch did not fit into memory, some of its images are decoded in smaller batches
    method = [timed(i, 1.0, 2, timed=1) for i in range(2)]
    vanilla = [timed(0, 1.0, 2, timed=2), timed(1, 1.0, 2, timed=3)]
    assert timing.pairs(method, vanilla) == []
    vanilla[1] = timed(1, 2.0, 2, timed=2)
    assert timing.pairs(method, vanilla) == [Pair(2.0, 3.0, (0, 1))]


def drifting_pairs(rng: np.random.Generator, n: int, rho: float, interleaved: bool = True) -> list[Pair]:
    """Latencies on a machine whose log speed is AR(1) over the decodes, with standard deviation 0.3. The method's work
    varies by 5 % over prompts, and its mean is 0.8 of vanilla's."""
    speed = np.empty(2 * n)
    speed[0] = rng.normal()
    for i in range(1, 2 * n):
        speed[i] = rho * speed[i - 1] + math.sqrt(1 - rho**2) * rng.normal()
    factor = np.exp(0.3 * speed)
    work = 0.8 * np.exp(0.05 * rng.normal(size=n))
    if interleaved:
        first, second = factor[::2], factor[1::2]
        even = np.arange(n) % 2 == 0
        method_factor, vanilla_factor = np.where(even, first, second), np.where(even, second, first)
    else:
        method_factor, vanilla_factor = factor[:n], factor[n:]
    return [Pair(m, v, (i,)) for i, (m, v) in enumerate(zip(work * method_factor, vanilla_factor))]


def coverage(draw: Callable[[np.random.Generator], list[Pair]]) -> float:
    """Share of 400 simulated runs whose 95 % interval contains the true speed-up, 1 / 0.8."""
    hits, count = 0, 400
    for seed in range(count):
        value, stderr = timing.speedup(draw(np.random.default_rng(seed)))
        hits += value is not None and stderr is not None and abs(value - 1.25) <= 1.96 * stderr
    return hits / count


def test_the_interval_contains_the_true_speed_up_on_a_drifting_machine() -> None:
    """A coverage of 0.95 is known to sqrt(0.95 * 0.05 / 400) = 1.1 % over 400 runs. A bootstrap of 64 / 4 = 16 blocks
    has a standard error with 15 degrees of freedom, for which 1.96 is a 93.1 % interval (Student's t); minus three
    errors of the count, this gives 0.89. For 16 / 2 = 8 blocks it is 91 %, and with prompts that drift within a block,
    0.85.

    If the method decodes all prompts and then vanilla does, the error includes the effect of a change on one side, but
    the interval still misses the truth in a quarter of the runs (0.73, known to 2.2 %, and three times that)."""
    for n, rho, least in ((64, 0.0, 0.89), (64, 0.99, 0.89), (16, 0.9, 0.85)):
        assert coverage(lambda rng, n=n, rho=rho: drifting_pairs(rng, n, rho)) >= least, (n, rho)
    assert coverage(lambda rng: drifting_pairs(rng, 64, 0.99, interleaved=False)) < 0.8


def test_the_speed_up_is_the_ratio_of_means_and_repeats() -> None:
    pairs = drifting_pairs(np.random.default_rng(0), 32, 0.5)
    estimate = timing.speedup(pairs)
    assert estimate == timing.speedup(pairs)
    assert estimate.value == pytest.approx(sum(p.vanilla_s for p in pairs) / sum(p.method_s for p in pairs))
    assert timing.speedup(pairs[:3]) == (pytest.approx(timing.speedup(pairs[:3]).value), None)  # fewer than two blocks
    assert timing.speedup([]) == (None, None)
    # blocks contain whole cycles
    assert [timing.block_length(n) for n in (1, 4, 16, 64, 500, 5000)] == [2, 2, 2, 4, 8, 18]
    # the machine slows by 1 % with every decode: ABBA gives the true ratio, ABAB would be 1 % off
    slower = [1 + 0.01 * t for t in range(16)]
    pairs = [Pair(slower[2 * i + i % 2], 2 * slower[2 * i + 1 - i % 2], (i,)) for i in range(8)]
    assert timing.speedup(pairs).value == pytest.approx(2, rel=1e-12)


def disturbed_pairs(
    seed: int, n: int, noise: float, vanilla: Any = 1.0, method: Any = 1.0, most: int = 8
) -> list[Pair]:
    """Pairs in ABBA order with relative noise in every decode. The method takes 5 to `most` steps of 1 s where vanilla
    takes 16. vanilla, method: how much slower each side is, as a function of the time from 0 to 1, or a constant."""
    rng, result = np.random.default_rng(seed), []
    for i in range(n):
        steps = int(rng.integers(5, most + 1))
        seconds = {}
        for place, side in enumerate((i % 2, 1 - i % 2)):  # 0: the method
            slower, when = (method, vanilla)[side], (2 * i + place) / (2 * n)
            load = slower(when) if callable(slower) else slower
            seconds[side] = (steps, 16)[side] * load * math.exp(noise * rng.normal())
        result.append(Pair(seconds[0], seconds[1], (i,), steps / 16))
    return result


def share_steady(runs: int = 400, **options: Any) -> float:
    """Share of simulated runs whose timing is valid."""
    return sum(timing.columns(disturbed_pairs(seed, **options))["timing_valid"] for seed in range(runs)) / runs


def test_a_steady_machine_is_rejected_in_a_hundredth_of_the_runs() -> None:
    """The range of a Brownian bridge exceeds 2.0 with a probability of 1.0 %. Of 400 runs these are 4 on average, and
    12 with four standard errors, sqrt(400 * 0.01): 3 %. If noise changes less than the bound of 5 %, no run is
    rejected.

    Eight pairs, with vanilla three times as slow in the second half: there is no noise, but noise could look the
    same."""
    for n, noise in ((timing.FEWEST, 0.3), (timing.FEWEST, 0.0), (16, 0.02), (64, 0.3)):
        assert share_steady(n=n, noise=noise) >= (0.97 if noise > 0.1 else 1.0), (n, noise)
    assert share_steady(1, n=8, noise=0.0, vanilla=lambda t: 1 + 2 * (t > 0.5)) == 0.0
    assert share_steady(100, n=8, noise=0.01) == 1.0


DRIFTS: dict[str, Callable[[float], float]] = {
    "a drift by a half": lambda t: 1 + t / 2,
    "a step": lambda t: 1 + (t > 0.4),
    "a burst in the middle": lambda t: 1 + (0.35 < t < 0.6),
}


def test_a_disturbance_of_both_sides_keeps_the_timing_valid() -> None:
    """Vanilla's halves differ by 20 % and more. Only the pair in which a step or burst begins is uneven."""
    half = DRIFTS["a drift by a half"]
    assert abs(timing.drift(disturbed_pairs(0, 32, 0.02, half, half)) or 0) > 0.2
    for name, load in DRIFTS.items():
        assert share_steady(runs=100, n=32, noise=0.02, vanilla=load, method=load) == 1.0, name


def test_a_disturbance_of_one_side_makes_the_timing_invalid() -> None:
    """A side that takes twice as long in a quarter or more of the run changes the speed-up by a fifth. The drift of
    vanilla did not detect a burst in the middle, and never a slower method."""
    for side in ("vanilla", "method"):
        for load, least in (("a step", 0.2), ("a burst in the middle", 0.15)):
            assert share_steady(runs=100, n=24, noise=0.05, **{side: DRIFTS[load]}) == 0.0, (load, side)
            pairs = disturbed_pairs(0, 24, 0.05, **{side: DRIFTS[load]})
            truth = 16 / np.mean([16 * p.steps for p in pairs])
            assert abs(math.log((timing.speedup(pairs).value or 0) / truth)) > least / 2, (load, side)


def test_the_interval_contains_the_speed_up_although_one_side_slowed() -> None:
    """One side is slower by 8 % in half of the run. This changes the speed-up by 4 %, less than the bound. Without that
    part of the error, the bootstrap's interval contains the truth in 0 and 7 % of the runs. A coverage of 95 % is known
    to sqrt(0.95 * 0.05 / 200) = 1.5 %; bootstraps of 12 blocks have 11 degrees of freedom, for which 1.96 is a 92.4 %
    interval: minus three errors, 0.88. (With noise of 10 % the shift is hidden more often; the coverage is 86 %, and 74
    % without that part.)"""
    for noise in (0.01, 0.03):
        hits = 0
        for seed in range(200):
            pairs = disturbed_pairs(seed, 24, noise, vanilla=lambda t: 1 + 0.08 * (t > 0.5), most=5)
            value, stderr = timing.speedup(pairs)
            truth = 16 / np.mean([16 * pair.steps for pair in pairs])
            hits += value is not None and stderr is not None and abs(value - truth) <= 1.96 * stderr
        assert hits / 200 >= 0.88


class Slowing(FakePipeline):
    """Vanilla takes one second per token, and `factor` times as long from its seventh image until it has decoded
    `until` images."""

    factor, until, count = 1.0, 10**6, 0

    def decode(self, conditioning: list[str], keys: list[tuple[int, int]]) -> Any:
        decoded = super().decode(conditioning, keys)
        Slowing.count += self.empty
        if self.empty and 6 < Slowing.count <= self.until:
            decoded.seconds *= self.factor
        return decoded


def slowing(monkeypatch: pytest.MonkeyPatch, **values: float) -> type[FakePipeline]:
    for name, value in {"factor": 1.0, "until": 10**6, "count": 0, **values}.items():
        monkeypatch.setattr(Slowing, name, value)
    return Slowing


def test_a_row_says_whether_its_timing_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid timing is measured again, each image once; here this does not help."""
    for factor, holds in ((1.08, True), (1.5, False), (0.6, False)):
        row = execute(tmp_path / str(factor), "n=12", loader=slowing(monkeypatch, factor=factor))
        assert row["timing_valid"] == ("true" if holds else "false"), factor
        assert (row["timed_pairs"], row["further_pairs"]) == ((12, 0) if holds else (24, 12)), factor
        assert row["speedup_latency"] is not None  # the row keeps the measured value
        assert ("12 of them" in said(row)) == (not holds), factor


def test_further_pairs_are_measured_until_the_timing_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images, steps and tokens equal a steady machine's, and so does the first journal except for its seconds. The same
    command has nothing left to do."""
    calm = execute(tmp_path / "calm", "n=12", loader=slowing(monkeypatch))
    row = execute(tmp_path / "loaded", "n=12", loader=slowing(monkeypatch, factor=1.12, until=12))
    assert (row["timing_valid"], row["timed_pairs"], row["further_pairs"]) == ("true", 16, 4)
    assert calm["timed_pairs"] == 12
    for steady_pass, loaded_pass in zip(passes(tmp_path / "calm"), passes(tmp_path / "loaded"), strict=True):
        assert [(r.sha256, r.steps, r.accepted_per_step) for r in steady_pass] == [
            (r.sha256, r.steps, r.accepted_per_step) for r in loaded_pass
        ]
    of_process = ("run_id", "time", "baseline_run_id", "peak_memory_mib")  # grows with the process
    same = [name for name in calm if name not in (*TIMED_COLUMNS, *of_process)]
    assert {name: calm[name] for name in same} == {name: row[name] for name in same}
    assert execute(tmp_path / "loaded", "n=12", loader=slowing(monkeypatch)) == row


def test_a_stopped_further_measurement_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill loses only the pair in progress, and no image is measured a third time."""
    row = execute(tmp_path, "n=12", loader=slowing(monkeypatch, factor=1.5))
    file = tmp_path / TIMINGS
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:9]) + lines[9][:40])
    with pytest.raises(run.Stopped, match="12 of 12"):
        execute(tmp_path, "n=12", loader=at(7, interrupt))
    assert [r.index for r in TimingJournal(file)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, 6, 6, 7, 7]
    again = execute(tmp_path, "n=12", loader=slowing(monkeypatch))
    assert (row["further_pairs"], again["further_pairs"]) == (12, 12)
    assert len(TimingJournal(file).lines) == len(lines) + 1
    assert again["timing_valid"] == "false"
    assert execute(tmp_path, "n=12", loader=lambda cfg: pytest.fail("nothing is left")) == again
    file.write_bytes(lines[0].replace(b"decode_s", b"decode_t") + b"".join(lines[1:]))
    with pytest.raises(UsageError, match=f"line 1 of .*{TIMINGS} is not a record"):
        execute(tmp_path, "n=12", loader=slowing(monkeypatch))


def test_the_further_pairs_of_another_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same configuration and complete lines, but run.json does not have their process."""
    for name in ("one", "other"):
        execute(tmp_path / name, "n=12", loader=slowing(monkeypatch, factor=1.5))
    row = (tmp_path / "one/row.csv").read_bytes()
    shutil.copy(tmp_path / "other" / TIMINGS, tmp_path / "one" / TIMINGS)
    with pytest.raises(UsageError, match="run.json"):
        execute(tmp_path / "one", "n=12", loader=slowing(monkeypatch))
    assert (tmp_path / "one/row.csv").read_bytes() == row


def test_a_clock_waits_for_every_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append("cuda"))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    for kind in ("cpu", "cuda", "mps"):
        synchronize(torch.device(kind))
    assert waited == ["cuda", "mps"]


def test_halves_are_in_the_order_of_decoding() -> None:
    """A run that decoded its last prompts first: early images are compared with late ones, not low with high
    indices."""
    method = [timed(i, 1.0, timed=2 * i + 1, done=10.0 - i) for i in range(4)]
    vanilla = [timed(i, 1.0 + (i < 2), timed=2 * i + 2, done=10.0 - i) for i in range(4)]
    assert timing.drift(timing.pairs(method, vanilla)) == pytest.approx(1.0)
    assert timing.drift(timing.pairs(method[:1], vanilla[:1])) is None
