"""Timings: method and vanilla AR alternate; the paired speed-up and its error, the drift, and what is left empty."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import older
from fake_pipeline import TOKENS, FakePipeline
from test_summary import timed

from specbench.config import configuration
from specbench.errors import UsageError
from specbench.harness import run
from specbench.harness.folder import stored
from specbench.rows import provenance, summary, timing
from specbench.rows.columns import DRIFT_BOUND, TIMED_COLUMNS
from specbench.rows.journal import Record, read_records
from specbench.rows.timing import Pair

WORDS = ("metrics=none", "n=6", "warmup=0")


def execute(out: Path, *words: str, loader: Any = FakePipeline) -> dict[str, Any]:
    given = {word.partition("=")[0] for word in words}
    default = [word for word in WORDS if word.partition("=")[0] not in given]
    return run.run(configuration.compose([*default, *words]), out, loader=loader).row


def passes(out: Path) -> tuple[list[Record], list[Record]]:
    method, vanilla = (read_records(out / f"{name}.jsonl") for name in ("records", "baseline"))
    return method, vanilla


def order(out: Path, session: str = "") -> list[str]:
    """m or v and the index of each image of a process, in the order in which the journals number them."""
    both = [(name, r) for name, some in zip("mv", passes(out)) for r in some]
    found = [(r.timed, f"{name}{r.index}") for name, r in both if session in ("", r.session)]
    return [text for _, text in sorted(found)]


def test_the_journals_show_the_abba_order(tmp_path: Path) -> None:
    execute(tmp_path)
    assert " ".join(order(tmp_path)) == "m0 v0 v1 m1 m2 v2 v3 m3 m4 v4 v5 m5"
    method, vanilla = passes(tmp_path)
    assert sorted(r.timed for r in [*method, *vanilla]) == list(range(1, 13))
    assert len({r.session for r in [*method, *vanilla]}) == 1


def test_an_interrupted_pair_is_completed_and_does_not_count(tmp_path: Path) -> None:
    """Killed between the two halves of a pair: its first half cannot get a neighbour any more. The order goes on by
    the index of the prompt."""
    execute(tmp_path / "calm")
    killed = tmp_path / "killed"

    class Killed(FakePipeline):
        def decode(self, conditioning: list[str], keys: list[tuple[int, int]]) -> Any:
            if not self.empty and keys[0][1] == 3:  # prompt 3 begins with vanilla
                raise RuntimeError("killed")
            return super().decode(conditioning, keys)

    with pytest.raises(RuntimeError, match="killed"):
        execute(killed, loader=Killed)
    assert [len(some) for some in passes(killed)] == [3, 4]
    row = execute(killed)
    assert row["timed_pairs"] == 5
    assert row["speedup_latency"] == pytest.approx(5 * TOKENS / sum((4, 5, 6, 4, 5)))  # without prompt 3
    assert "1 of 6 images were not decoded next to their baseline: they do not count in speed-ups" in row["note"]
    assert (row["speedup_step"], row["latency_s_mean"]) == pytest.approx((6 * TOKENS / 31, 31 / 6))
    [*_, last] = sorted((r.done, r.session) for r in passes(killed)[0])
    assert " ".join(order(killed, last[1])) == "m4 v4 v5 m5 m3"
    assert [[r.sha256 for r in some] for some in passes(killed)] == [
        [r.sha256 for r in some] for some in passes(tmp_path / "calm")
    ]


def test_in_batches_the_batches_alternate(tmp_path: Path) -> None:
    row = execute(tmp_path, "batch=2", "timing=true")
    method, vanilla = passes(tmp_path)
    assert [r.timed for r in method] == [1, 1, 4, 4, 5, 5]
    assert [r.timed for r in vanilla] == [2, 2, 3, 3, 6, 6]
    assert row["timed_pairs"] == 3
    assert row["speedup_throughput"] == pytest.approx(6 * TOKENS / 31)
    assert (row["images_per_s"], row["latency_s_mean"], row["speedup_latency"]) == (pytest.approx(6 / 31), None, None)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), True),
        (("batch=2",), False),
        (("workers=2",), False),
        (("ray_address=10.0.0.1:6379",), False),
        (("batch=2", "timing=true"), True),
        (("timing=false",), False),
        (("protocol=coolsd_table1", "model=llamagen_scenes"), True),
    ],
)
def test_what_is_timed_unless_asked_for(words: tuple[str, ...], expected: bool) -> None:
    assert timing.is_timed(configuration.compose(words)) is expected


def test_timing_takes_one_process() -> None:
    for words in (["workers=2"], ["ray_address=10.0.0.1:6379"]):
        with pytest.raises(UsageError, match="timing=true measures one process of this machine: leave workers="):
            configuration.compose(["timing=true", *words])


def test_jobs_side_by_side_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "_installed", lambda module: True)
    words = ["delta=1,2"]
    assert [timing.is_timed(job.cfg) for job in configuration.grid(words, True)] == [True, True]
    words.append("hydra/launcher=joblib")
    assert [timing.is_timed(job.cfg) for job in configuration.grid(words, True)] == [False, False]
    with pytest.raises(UsageError, match="timing=true: jobs side by side would time each other"):
        configuration.grid([*words, "timing=true"], True)


@pytest.mark.parametrize("words", [("timing=false",), ("batch=2",)])
def test_without_timing_every_column_in_seconds_is_empty(words: tuple[str, ...], tmp_path: Path) -> None:
    row = execute(tmp_path / "run", *words)
    assert {name: row[name] for name in TIMED_COLUMNS if row[name] is not None} == {}
    assert row["timing"] == "false"
    steps = ("accepted_length_mean", "steps", "step_compression", "speedup_step", "acceptance_rate")
    timed_row = execute(tmp_path / "timed")
    assert {name: row[name] for name in steps} == {name: timed_row[name] for name in steps}
    assert {name for name in TIMED_COLUMNS if timed_row[name] is None} == {
        "draft_cost", "speedup_expected",  # of continuous tokens
    }  # fmt: skip


def test_a_folder_may_go_on_without_timing_but_not_begin_to_time_old_images(tmp_path: Path) -> None:
    execute(tmp_path, "timing=false")
    row = execute(tmp_path, "timing=true")
    assert (row["timing"], row["latency_s_mean"]) == ("false", None)
    row = execute(tmp_path, "timing=true", "n=8")
    assert (row["timing"], row["latency_s_mean"]) == ("false", None)
    assert "some images were decoded without timing" in row["note"]


def test_a_timed_and_an_untimed_run_are_one_configuration() -> None:
    """So that rows without the parameter keep their hash."""
    hashes = {provenance.config_hash(configuration.compose([f"timing={t}"])) for t in ("null", "true", "false")}
    assert len(hashes) == 1


def test_a_folder_of_a_version_without_timing_can_be_resumed(tmp_path: Path) -> None:
    execute(tmp_path)
    older(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text(file.read_text().replace("timing: null\n", ""))
    assert stored(tmp_path)["timing"] is None
    assert execute(tmp_path)["timed_pairs"] == 6


def test_vanilla_is_its_own_partner(tmp_path: Path) -> None:
    row = execute(tmp_path, "method=vanilla")
    assert [row[name] for name in ("speedup_latency", "speedup_latency_stderr", "timed_pairs")] == [1.0, 0.0, 6]


def test_only_neighbours_of_one_process_are_a_pair() -> None:
    def found(**changes: Any) -> int:
        return len(timing.pairs([timed(0, 1.0, timed=4)], [timed(0, 2.0, **({"timed": 5} | changes))]))

    assert (found(), found(timed=3)) == (1, 1)
    for changes in ({"timed": 6}, {"timed": None}, {"session": "another"}, {"batch": 2}):
        assert found(**changes) == 0


def test_a_batch_that_lost_an_image_is_no_pair() -> None:
    """Of a batch that did not fit into memory, some images are decoded in smaller ones."""
    method = [timed(i, 1.0, 2, timed=1) for i in range(2)]
    vanilla = [timed(0, 1.0, 2, timed=2), timed(1, 1.0, 2, timed=3)]
    assert timing.pairs(method, vanilla) == []
    vanilla[1] = timed(1, 2.0, 2, timed=2)
    assert timing.pairs(method, vanilla) == [Pair(2.0, 3.0, (0, 1))]


def drifting(rng: np.random.Generator, n: int, rho: float, interleaved: bool = True) -> list[Pair]:
    """Latencies on a machine whose log speed is AR(1) over the decodes, with standard deviation 0.3; the method's work
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
        mine, theirs = np.where(even, first, second), np.where(even, second, first)
    else:
        mine, theirs = factor[:n], factor[n:]
    return [Pair(m, v, (i,)) for i, (m, v) in enumerate(zip(work * mine, theirs))]


def coverage(draw: Callable[[np.random.Generator], list[Pair]], sets: int = 400) -> float:
    """Share of simulated runs whose 95 % interval has the true speed-up, 1 / 0.8."""
    hits = 0
    for seed in range(sets):
        value, stderr = timing.speedup(draw(np.random.default_rng(seed)))
        hits += value is not None and stderr is not None and abs(value - 1.25) <= 1.96 * stderr
    return hits / sets


@pytest.mark.parametrize(("n", "rho", "least"), [(64, 0.0, 0.89), (64, 0.9, 0.89), (64, 0.99, 0.89), (16, 0.9, 0.85)])
def test_the_interval_has_the_true_speed_up_on_a_drifting_machine(n: int, rho: float, least: float) -> None:
    """A coverage of 0.95 is known to sqrt(0.95 * 0.05 / 400) = 1.1 % over 400 runs. A bootstrap of 64 / 4 = 16 blocks
    has a standard error with 15 degrees of freedom, for which 1.96 is a 93.1 % interval (Student's t): less three
    errors of the count, 0.89. Of 16 / 2 = 8 blocks: 91 %, and with prompts that drift within a block, 0.85."""
    assert coverage(lambda rng: drifting(rng, n, rho)) >= least


def test_separate_passes_miss_the_true_speed_up_on_a_drifting_machine() -> None:
    """The same machine, all prompts by the method and then all by vanilla: the interval of 95 % has the truth in less
    than half of the runs."""
    assert coverage(lambda rng: drifting(rng, 64, 0.99, interleaved=False)) < 0.5


def loaded(rng: np.random.Generator, phase: float, interleaved: bool, n: int = 32) -> list[Pair]:
    """Latencies next to a process that halves the speed of the machine half of the time: in the first half of a period
    as long as an undisturbed run. phase: where in the period the run begins, from 0 to 1."""
    work = {False: 0.8 * np.exp(0.15 * rng.normal(size=n)), True: np.exp(0.02 * rng.normal(size=n))}
    if interleaved:
        decodes = [(i, vanilla) for i in range(n) for vanilla in (i % 2 == 1, i % 2 == 0)]
    else:
        decodes = [(i, vanilla) for vanilla in (False, True) for i in range(n)]
    period = 1.8 * n
    clock, seconds = phase * period, {}
    for i, vanilla in decodes:
        taken = work[vanilla][i] * (2 if clock % period < period / 2 else 1)
        seconds[i, vanilla] = float(taken)
        clock += taken
    return [Pair(seconds[i, False], seconds[i, True], (i,)) for i in range(n)]


@pytest.mark.parametrize(("interleaved", "least", "most"), [(True, 0.88, 1.0), (False, 0.0, 0.05)])
def test_two_runs_next_to_a_load_agree(interleaved: bool, least: float, most: float) -> None:
    """One begins when the load does, the other when it pauses. Intervals of 95 % that are 1.96 standard errors of 8
    blocks (7 degrees of freedom) cover 91 %, and the difference of two of them 93 % (14 degrees); over 200 sets that is
    known to sqrt(0.93 * 0.07 / 200) = 1.8 %, and three of those less are 0.88. Of separate passes, whose error was the
    delta method's, the load meets the method in one run and vanilla in the other. `scripts/check_drift.py` does the
    same with a real load."""

    def separate(pairs: list[Pair]) -> timing.Estimate:
        return summary.ratio([p.vanilla_s for p in pairs], [p.method_s for p in pairs])

    agree, estimate = 0, timing.speedup if interleaved else separate
    for seed in range(200):
        rng = np.random.default_rng(seed)
        (a, x), (b, y) = (estimate(loaded(rng, phase, interleaved)) for phase in (0.0, 0.5))
        assert None not in (a, b, x, y)
        agree += abs(a - b) <= 1.96 * math.hypot(x, y)
    assert least <= agree / 200 <= most


def test_a_linear_drift_cancels() -> None:
    """The machine slows by 1 % with every decode: ABBA sees the true ratio, ABAB would see it 1 % off."""
    slower = [1 + 0.01 * t for t in range(16)]
    pairs = [Pair(slower[2 * i + i % 2], 2 * slower[2 * i + 1 - i % 2], (i,)) for i in range(8)]
    assert timing.speedup(pairs).value == pytest.approx(2, rel=1e-12)


def test_the_speed_up_is_the_ratio_of_means_and_repeats() -> None:
    pairs = drifting(np.random.default_rng(0), 32, 0.5)
    found = timing.speedup(pairs)
    assert found == timing.speedup(pairs)
    assert found.value == pytest.approx(sum(p.vanilla_s for p in pairs) / sum(p.method_s for p in pairs))
    assert timing.speedup(pairs[:3]) == (pytest.approx(timing.speedup(pairs[:3]).value), None)  # less than two blocks
    assert timing.speedup([]) == (None, None)


def test_blocks_hold_whole_cycles() -> None:
    assert [timing.block_length(n) for n in (1, 4, 16, 64, 500, 5000)] == [2, 2, 2, 4, 8, 18]


class Slowing(FakePipeline):
    """Vanilla takes a second a token, and from image 3 on `factor` times as long."""

    factor = 1.0

    def decode(self, conditioning: list[str], keys: list[tuple[int, int]]) -> Any:
        decoded = super().decode(conditioning, keys)
        if self.empty and keys[0][1] >= 3:
            decoded.seconds *= self.factor
        return decoded


@pytest.mark.parametrize(
    ("factor", "valid"), [(1.0, "true"), (1.09, "true"), (0.92, "true"), (1.2, "false"), (0.8, "false")]
)
def test_a_row_says_whether_its_timing_holds(
    factor: float, valid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slowing, "factor", factor)
    row = execute(tmp_path, loader=Slowing)
    assert (row["drift"], row["timing_valid"]) == (pytest.approx(factor - 1), valid)
    assert ("drifted by" in (row["note"] or "")) == (valid == "false")
    assert abs(factor - 1) <= DRIFT_BOUND or row["speedup_latency"] is not None  # the row keeps what was measured


def test_halves_are_in_the_order_of_decoding() -> None:
    """A run that decoded its last prompts first: what is compared is early against late, not low against high index."""
    method = [timed(i, 1.0, timed=2 * i + 1, done=10.0 - i) for i in range(4)]
    vanilla = [timed(i, 1.0 + (i < 2), timed=2 * i + 2, done=10.0 - i) for i in range(4)]
    assert timing.drift(timing.pairs(method, vanilla)) == pytest.approx(1.0)
    assert timing.drift(timing.pairs(method[:1], vanilla[:1])) is None
