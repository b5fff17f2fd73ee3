"""Benchmarks of steps: the parts add up, the floors follow from the shapes, and a forced length is reached."""

from __future__ import annotations

import gc
import itertools
import json
import re
import subprocess
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from commands import Call, cells_of
from test_engine import at_once
from torch import Tensor
from windows import window

from specbench.bench import benchmark, floor
from specbench.bench.benchmark import ForcedLength
from specbench.bench.benchmark_rows import COLUMNS, ROWS, describe
from specbench.bench.floor import ATTEMPTS, Bases
from specbench.cli.measurements import bench
from specbench.config import configuration
from specbench.decoding.batch import finished
from specbench.decoding.drafters.dynamic import Eagle2
from specbench.decoding.drafters.eagle import Eagle
from specbench.decoding.drafters.none import NoDraft
from specbench.decoding.loop import DecoderConfig, Decoding
from specbench.decoding.rules import exact
from specbench.decoding.sampling import Sampling
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import build, chain_paths, parse
from specbench.decoding.verify import Draft, VerificationResult
from specbench.engine import clock as clocks
from specbench.engine import ops
from specbench.engine.clock import Clock, Passes
from specbench.engine.graph import Action, Eager, Graphs
from specbench.harness import pipeline
from specbench.storage import home

SMALL = ("model=llamagen_xl", "reduced=true", "weights=random", "device=cpu", "dtype=float32", "bench.steps=3")
TREE = "[[0],[1],[0,0],[0,1],[1,0],[1,0,0]]"  # the deepest path is not the first one


def test_a_clock_adds_up_the_times_between_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 7.0, 10.0, 10.5])
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: next(now))
    clock = Clock(torch.device("cpu"))
    clock.begin()
    for part in ("draft", "forward", "draft"):
        clock.lap(part)
    clock.begin()
    clock.lap("forward")
    assert clock.seconds() == [{"draft": 1 + 4, "forward": 2}, {"forward": 0.5}]


def test_a_mark_waits_for_a_device_without_events(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: done.append("waited"))
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: done.append("read") or 0.0)
    clock = Clock(torch.device("mps"))
    clock.begin()
    clock.lap("forward")
    assert done == ["waited", "read"] * 2


DRAFTERS = {
    "chain": lambda target: Eagle(tiny.eagle(target), chain_paths(4)),
    "tree": lambda target: Eagle(tiny.eagle(target), parse(TREE)),
    "eagle2": lambda target: Eagle2(tiny.eagle(target), nodes=6, depth=3, width=2),
    "window": lambda target: window(4),
    "window_tree": lambda target: window(7, width=2, depth=3, tree="full"),
}


def started(name: str, rows: int, override: Any = None, clock: Clock | None = None) -> Decoding:
    target = tiny.llamagen(side=8)
    config = DecoderConfig(target, DRAFTERS[name](target), exact(), Sampling(cfg_scale=2.0), override)
    return Decoding(config, tiny.prompts(rows), tiny.rng(rows, 3), clock)


@pytest.mark.parametrize("name", DRAFTERS)
@torch.inference_mode()
def test_a_forced_length_is_reached_with_tokens_of_the_draft(name: str) -> None:
    decoding = started(name, 3, ForcedLength(2.73))
    while int(decoding.num_committed.min()) < decoding.total:
        decoding.step()
        decoding.record_stats()
    accepted = decoding.recorder.trace().accepted
    for row, steps in enumerate(decoding.steps.tolist()):
        # EAGLE has nothing to go by in the first step; at the end of the image there is no room
        first = 0 if name.startswith("window") else 1
        pattern = [int((s + 1) * 1.73) - int(s * 1.73) for s in range(steps)]
        assert accepted[row, first : steps - 1].tolist() == pattern[first : steps - 1]


@pytest.mark.parametrize("name", ["tree", "eagle2", "window_tree"])
@torch.inference_mode()
def test_the_forced_tokens_are_a_path_of_the_draft(name: str) -> None:
    """A path from the root, each node a child of the node before, with its tokens."""
    forced, shown = ForcedLength(2.6), []

    def override(verdict: VerificationResult, draft: Draft, step: Tensor) -> VerificationResult:
        shown.append((forced(verdict, draft, step), draft, verdict))
        return shown[-1][0]

    decoding, seen = started(name, 3, override), 0
    for _ in range(7):
        before = decoding.num_committed.clone()
        decoding.step()
        verdict, draft, ruled = shown[-1]
        for b, length in enumerate(verdict.length.tolist()):
            here, parents = 0, draft.tree.parent.expand(3, -1)[b]
            for d, node in enumerate(verdict.path[b, :length].tolist()):
                assert int(parents[node]) == here
                assert bool(draft.valid[b, node])
                assert int(verdict.tokens[b, d]) == int(draft.tokens[b, node])
                here = node
            assert int(verdict.tokens[b, length]) == int(ruled.tokens[b, ruled.length[b]])
            assert verdict.path[b, length:].tolist() == [here] * (verdict.path.shape[1] - length)
            assert int(decoding.num_committed[b] - before[b]) == length + 1
            seen += length
    assert seen >= 3 * 8


@torch.inference_mode()
def test_a_clock_changes_no_token_and_every_part_is_timed() -> None:
    clock = Clock(torch.device("cpu"))
    with_clock, without = started("tree", 2, clock=clock), started("tree", 2)
    for decoding in (with_clock, without):
        finished(lambda timed=decoding: timed, decoding.rng, Eager())
    assert torch.equal(with_clock.history, without.history)
    steps = clock.seconds()
    assert len(steps) >= int(with_clock.steps.max())
    assert all(set(step) == {"draft", "forward", "verify", "commit", "rest"} for step in steps)


def test_floors_are_what_the_shapes_say() -> None:
    target = tiny.llamagen(side=8)
    dim, ffn, layers, vocab = 32, 48, 2, tiny.VOCAB
    block = 4 * dim * dim + 3 * dim * ffn + 2 * dim
    weights = layers * block + dim + vocab * dim
    assert floor.of_target(target) == 4 * weights
    assert floor.of_cache(target, rows=6, context=10) == 4 * 2 * layers * 6 * dim * 10
    assert floor.operations(target, rows=6, context=10) == 6 * (2 * weights + 4 * layers * dim * 10)
    eagle = Eagle(tiny.eagle(target), chain_paths(4))
    first = block - dim  # EAGLE's layer has no first norm
    assert floor.of_drafts(eagle, target) == 4 * 4 * (2 * dim * dim + dim + first + vocab * dim)
    assert floor.of_drafts(NoDraft(), target) == floor.of_drafts(window(4), target) == 0


def test_a_row_is_printed_and_kept(call: Call, tmp_path: Path) -> None:
    words = ("method=eagle_chain", "window=3", "batch=2", "forced_accept=2", "bench.nodes=4,1", "bench.context=20")
    code, out, err = call("bench", *SMALL, *words, "out=mine.csv")
    assert (code, err) == (0, "")
    shown = json.loads(out.splitlines()[-1])
    assert list(shown) == list(COLUMNS)
    [row] = cells_of(tmp_path / "mine.csv")
    assert {k: v for k, v in row.items() if v} == {k: str(v) for k, v in shown.items() if v not in (None, "")}
    parts = [shown[f"{part}_ms"] for part in ("draft", "forward", "verify", "commit", "rest")]
    assert min(parts) > 0
    assert shown["step_ms"] == pytest.approx(sum(parts), rel=1e-4)
    assert shown["passes_share"] > 0  # of two measurements, so that a busy machine may give any ratio
    assert shown["overhead"] == pytest.approx((shown["step_ms"] - shown["forward_ms"]) / shown["forward_ms"], rel=1e-3)
    assert (shown["rows"], shown["nodes"], shown["context"]) == (4, 4, 20)
    read = shown["weights_gb"] + shown["cache_gb"]
    assert shown["forward_floor_ms"] == pytest.approx(1e3 * read / shown["bandwidth_gb_s"], rel=1e-4)
    assert shown["bandwidth_share"] == pytest.approx(shown["forward_floor_ms"] / shown["forward_ms"], rel=1e-4)
    assert list(json.loads(shown["by_nodes"])) == ["1", "4"]
    assert shown["by_nodes_executed"] == "eager"
    assert shown["recorded_step_ms"] is shown["recorded_floor_share"] is None
    assert shown["token_floor_ms"] == pytest.approx(shown["step_floor_ms"] / shown["accepted_length"], rel=1e-4)
    assert json.loads(shown["node_cost"])["1"] == 1
    assert shown["accepted_length"] == pytest.approx(16 / 9, rel=1e-5)  # two a step, but the first has no draft
    assert shown["speedup"] == pytest.approx(shown["vanilla_latency_s"] / shown["latency_s"], rel=1e-4)
    assert shown["tokens_per_s"] == pytest.approx(2 * shown["tokens"] / shown["latency_s"], rel=1e-4)
    for kind in ("svg", "png"):
        assert (tmp_path / f"mine_roofline.{kind}").stat().st_size > 1000


@pytest.fixture
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's speed is not measured, which takes longer than a benchmark of a small network."""
    monkeypatch.setattr(floor, "bandwidth", lambda device: 1e9)
    monkeypatch.setattr(floor, "arithmetic", lambda device, dtype: 1e9)


@pytest.fixture
def recorded(known_speed: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Engines that record: on the CPU the recorder runs the work itself. The list has the recorded functions."""
    works: list[Any] = []

    def recorder(functions: Mapping[str, Action], device: torch.device) -> list[Action]:
        works.append(functions)
        return at_once(functions, device)

    monkeypatch.setattr(pipeline, "engine_of", lambda cfg, device: Graphs(recorder))
    return works


@pytest.mark.usefixtures("known_speed")
def test_one_state_is_held_at_a_time(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys and values of a 7B model's image take gigabytes, and three of them used to be in memory."""
    references: list[weakref.ref[Decoding]] = []
    most, initial = [], Decoding.__init__

    def counted(self: Decoding, *args: Any, **kwargs: Any) -> None:
        references.append(weakref.ref(self))
        most.append(sum(reference() is not None for reference in references))
        initial(self, *args, **kwargs)

    monkeypatch.setattr(Decoding, "__init__", counted)
    gc.disable()  # what only a collection frees is held for as long as it likes
    try:
        code, _, err = call("bench", *SMALL, "method=eagle1", "bench.images=0")
    finally:
        gc.enable()
    assert code == 0, err
    assert len(most) == 3
    assert max(most) == 1


def test_a_cache_takes_memory_as_it_fills() -> None:
    """The cache of Lumina-mGPT 2's image is 10 GB, and an early step writes only a small part of it."""
    dtype = torch.bfloat16
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("only Linux says how much memory of a process is its own")

    def own() -> int:
        rows = (row.split() for row in status.read_text().splitlines())
        return sum(1024 * int(row[1]) for row in rows if row[0] in ("RssAnon:", "RssShmem:"))

    before = own()
    cache = ops.KVCache(2, 2, 4, 65536, 64, torch.zeros(1, dtype=dtype))
    size = 2 * cache.k.numel() * cache.k.element_size()
    k = torch.ones(2, 4, 3, 64, dtype=dtype)
    keys, _ = cache.write(1, torch.tensor([[5, 6, 65535]] * 2), k, 2 * k)
    assert own() - before < size / 8
    assert size >= 2**28
    assert keys[:, :, :8].sum() == 2 * 2 * 4 * 64  # the rest are zeros
    assert cache.v[1, :, :, 65535].eq(2).all()
    assert cache.k[0].count_nonzero() == 0
    for side in (cache.k, cache.v):
        assert side.data_ptr() % 64 == 0
        assert side.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_keeps_what_an_accepted_path_wrote(dtype: torch.dtype) -> None:
    cache = ops.KVCache(1, 1, 1, 8, 1, torch.zeros(1, dtype=dtype))
    drafted = torch.arange(1.5, 6.5, dtype=dtype)[None, None, :, None]
    cache.write(0, torch.arange(2, 7)[None], drafted, -drafted)
    cache.keep(torch.tensor([[2, 4]]), torch.tensor([2]), torch.tensor([1]), 1)
    for stored, sign in ((cache.k, 1), (cache.v, -1)):
        assert stored.flatten()[:5].tolist() == [0, 0, 1.5 * sign, 3.5 * sign, 5.5 * sign]


def test_recorded_steps_are_timed_as_a_whole(call: Call, recorded: list[Any]) -> None:
    """They run in place and are reported, each next to the floor of the bytes that it reads."""
    code, out, err = call("bench", *SMALL, "method=sjd", "window=3", "bench.nodes=1", "bench.images=0")
    assert (code, err) == (0, "")
    shown = json.loads(out.splitlines()[-1])
    for prefix, floor_ms in (("", shown["step_floor_ms"]), ("vanilla_", shown["forward_floor_ms"])):
        ms, share = (shown[f"{prefix}recorded_{name}"] for name in ("step_ms", "floor_share"))
        assert share == pytest.approx(floor_ms / ms, rel=1e-4)
    assert shown["bandwidth_share"] == pytest.approx(shown["forward_floor_ms"] / shown["recorded_forward_ms"], rel=1e-4)
    assert "recorded step" in out


def test_passes_by_number_of_nodes_are_recorded_as_steps_are(call: Call, recorded: list[Any]) -> None:
    """Started kernel by kernel, the host is slower than the device, and 32 nodes would seem to cost as much as one."""
    words = (*SMALL, "method=vanilla", "bench.images=0")
    row = json.loads(call("bench", *words, "bench.nodes=1")[1].splitlines()[-1])
    before = len(recorded)
    other = json.loads(call("bench", *words, "bench.nodes=1,2,5")[1].splitlines()[-1])
    assert len(recorded) - before == before + 2  # a recording for each number of nodes
    assert before == 4  # a step, one of vanilla AR, the step's own pass, and the pass over one node
    assert row["by_nodes_executed"] == other["by_nodes_executed"] == "recorded"
    assert list(json.loads(other["by_nodes"])) == ["1", "2", "5"]


def test_committed_rows_are_readable() -> None:
    files = sorted((Path(__file__).parents[2] / "results" / "bench").glob("*.csv"))
    rows = [row for file in files for row in ROWS.read(file)]
    assert rows
    assert {row["by_nodes_executed"] for row in rows} <= {"", "eager", "recorded"}


def spread(median: float, width: float) -> list[float]:
    """Twenty-one times around a median; the middle half is `width` wide."""
    return [median + width * (i / 11) for i in range(-10, 11)]


def test_two_measurements_of_one_node_agree_within_their_noise() -> None:
    """A committed row once had 3.34 ms in a step and 5.39 ms alone."""
    committed = Bases(spread(3.34e-3, 1e-4), spread(5.39e-3, 1e-4))
    assert committed.difference == pytest.approx(5.39 / 3.34 - 1)
    assert not committed.agree
    assert not Bases(committed.alone, committed.steps).agree
    assert Bases(spread(3.29e-3, 1e-4), spread(3.26e-3, 1e-4)).agree
    # by hand: the median of normal noise has the standard error 1.253 sigma / sqrt(n), sigma = quartiles / 1.349
    wide = Bases(spread(1.0, 0.1), spread(1.06, 0.1))
    error = 1.253 * 0.1 / 1.349 / 21**0.5
    assert wide.noise == pytest.approx(0.05 + 3 * error * (1 + 1 / 1.06**2) ** 0.5)
    assert wide.agree
    assert not Bases(spread(1.0, 0.001), spread(1.06, 0.001)).agree
    assert not Bases(spread(1.0, 0.9), spread(1.2, 0.9)).agree  # noise is no excuse for any difference
    few = Bases([1.0] * 3, [3.0] * 3)
    assert few.noise is None
    assert few.agree


@pytest.fixture
def alone(known_speed: None, monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """The times of passes over one node alone, one list after the other; a pass in a step takes a second."""
    times: list[list[float]] = []

    def passes(pipeline: Any, conditioning: Any, rows: int, tree: Any, *_: Any) -> list[float]:
        return times.pop(0) if tree.nodes == 1 else [3.0] * 5

    monkeypatch.setattr(benchmark, "_pass", passes)
    monkeypatch.setattr(clocks.Clock, "seconds", lambda self: [dict.fromkeys(benchmark.PARTS, 1.0)] * 20)
    return times


QUIET, BUSY = [1.0] * 5, [1.6] * 5
CHECKED = (*(word for word in SMALL if "steps" not in word), "bench.steps=5", "bench.images=0", "bench.nodes=1,6")


def test_a_disturbed_benchmark_is_measured_again(call: Call, alone: list[list[float]]) -> None:
    alone += [BUSY, QUIET]
    code, out, err = call("bench", *CHECKED, "method=vanilla")
    row = json.loads(out.splitlines()[-1])
    assert (code, err, alone) == (0, "", [])
    assert (row["attempts"], row["bases_difference"], row["bases_noise"]) == (2, 0, 0.05)
    assert json.loads(row["node_cost"]) == {"1": 1, "6": 3}


def test_a_benchmark_that_never_agrees_has_no_row(call: Call, alone: list[list[float]], tmp_path: Path) -> None:
    """The other jobs of the grid have their rows."""
    alone += [BUSY] * ATTEMPTS + [QUIET]
    code, out, err = call("bench", "-m", *CHECKED, "method=vanilla,sjd", "out=mine.csv")
    assert (code, alone) == (1, [])
    assert err.count("specbench: ") == 1
    assert "vanilla on llamagen_xl, batch 1: " in err
    assert "differ by 60%" in err
    assert [row["method"] for row in cells_of(tmp_path / "mine.csv")] == ["sjd"]
    assert json.loads(out.splitlines()[-1])["method"] == "sjd"


def test_a_cost_is_a_range_where_the_two_measurements_differ() -> None:
    row = dict.fromkeys(COLUMNS) | {"by_nodes": '{"1": 1.0, "6": 2.0, "16": 1.0}', "node_cost": "{}"}
    row |= {"step_ms": 1.0, "vanilla_step_ms": 1.0, "bandwidth_gb_s": 1.0, "peak_memory_mib": 1.0}
    for executed, cost in (("eager", "6: 1.82 to 2.00, 16: 0.91 to 1.00"), ("recorded", "6: 2.00, 16: 1.00")):
        shown = describe({**row, "vanilla_forward_ms": 1.1, "by_nodes_executed": executed})
        assert f"relative to one ({executed}): {cost}\n" in shown


@pytest.mark.usefixtures("known_speed", "drawn_once")
def test_a_grid_adds_a_row_a_job(call: Call, tmp_path: Path) -> None:
    words = (*SMALL, "bench.images=0", "bench.nodes=1", "out=mine.csv")
    assert call("bench", *words)[0] == 0
    code, out, _ = call("bench", "-m", *words, "method=vanilla,sjd", "batch=1,2")
    assert code == 0
    rows = cells_of(tmp_path / "mine.csv")
    assert [(row["method"], row["batch"]) for row in rows[1:]] == [
        ("vanilla", "1"), ("vanilla", "2"), ("sjd", "1"), ("sjd", "2"),
    ]  # fmt: skip
    assert [row["latency_s"] for row in rows] == [""] * 5
    assert len(json.loads(out.splitlines()[-1])) == 4


@pytest.mark.usefixtures("known_speed")
def test_vectors_are_timed_with_their_diffusion_steps(call: Call) -> None:
    """In any number format: bfloat16 reads half as many bytes."""
    words = ("model=mar_b", "reduced=true", "weights=random", "device=cpu", "method=cspd", "gamma=2")
    read = {}
    for dtype in ("float32", "bfloat16"):
        code, out, err = call("bench", *words, "diffusion_steps=3", "cfg_scale=2", f"dtype={dtype}")
        assert (code, err) == (0, "")
        shown = json.loads(out.splitlines()[-1])
        assert min(shown[f"{part}_ms"] for part in ("draft", "forward", "verify", "diffusion_step")) > 0
        assert (shown["nodes"], shown["rows"], shown["accepted_length"]) == (3, 2, shown["tokens"] / shown["steps"])
        assert shown["by_nodes"] is shown["context"] is None
        assert shown["dtype"] == dtype
        read[dtype] = shown["weights_gb"]
    assert read["bfloat16"] == pytest.approx(read["float32"] / 2)


def test_bad_words_are_short_errors(call: Call, tmp_path: Path) -> None:
    (tmp_path / "foreign.csv").write_text("mine\n1\n")
    for words, name in (
        (("n=4",), "'n'"),
        (("bench.step=4",), "bench.step"),
        (("bench.nodes=0",), "bench.nodes"),
        (("forced_accept=much",), "forced_accept"),
        (("method=sd", "window=3", "forced_accept=4.5"), "forced_accept=4.5"),
        (("bench.context=3",), "bench.context=3"),
        (("window=3,4",), "-m"),
        (("model=mar_b", "method=cspd", "forced_accept=2"), "forced_accept="),
        (("out=foreign.csv",), "foreign.csv"),
    ):
        names = {word.split("=")[0] for word in words}
        start = [word for word in SMALL if word.split("=")[0] not in names]
        method = [] if "method" in names or "window=3,4" not in words else ["method=sjd"]
        code, out, err = call("bench", *start, *method, *words)
        assert (code, out) == (2, ""), words
        assert name in err
        assert err.count("\n") == 1, words


def test_the_benchmarks_of_a_gpu_are_existing_commands(tmp_path: Path) -> None:
    """scripts/bench_gpu.sh, with a command instead of specbench that only writes down its arguments."""
    noted = tmp_path / "noted"
    command = tmp_path / "specbench"
    command.write_text(f'#!/bin/sh\necho "$@" >> {noted}\n')
    command.chmod(0o755)
    script = Path(__file__).parents[2] / "scripts" / "bench_gpu.sh"
    subprocess.run([script, command, tmp_path / "rows"], check=True)
    lines = [line.split() for line in noted.read_text().splitlines()]
    assert len(lines) >= 10
    for name, *words in lines:
        assert name == "bench"
        line = bench.read(words)
        assert line is not None
        cfg = configuration.grid(line.others, multirun=False)[0].cfg
        assert (cfg.weights, cfg.device) == ("random", "cuda")
        assert line["bench.steps"] == 50
        assert line["out"].parent == tmp_path / "rows"
    noted.unlink()
    subprocess.run([script, command, tmp_path / "rows", "triton"], check=True)
    assert {word for line in noted.read_text().splitlines() for word in line.split() if word.startswith("engine=")} == {
        "engine=triton"
    }


def test_a_numbered_device_becomes_the_current_one(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams, events, recordings and Triton's kernels are created on the current device."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert pipeline.resolve_device("cuda:1") == torch.device("cuda", 1)
    assert pipeline.resolve_device("cuda") == torch.device("cuda")
    assert pipeline.resolve_device("cpu:0") == torch.device("cpu", 0)  # what accelerate names a process's device
    assert chosen == [1]
    for device in ("cuda:2", "cuda:99999999999"):
        code, out, err = call("bench", *(word for word in SMALL if "device" not in word), f"device={device}")
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert re.match(f"specbench: device={device} .*cuda:0, cuda:1$", err)
    assert chosen == [1]


def test_fused_kernels_take_the_tiles_of_this_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path))
    tiles = pytest.importorskip("specbench.engine.kernels.tiles")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    here = ["NVIDIA H100 80GB HBM3"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: here[0])
    file = home.tiles_file(here[0])
    assert file.name == "NVIDIA-H100-80GB-HBM3.json"
    tuned = tiles.Tiles(file)
    tuned.tuned["add 1 rows 8 x 8 bfloat16"] = tiles.Tile(2, 0)
    tuned.tuned_attention["2 heads 33 queries 64 bfloat16"] = tiles.AttentionTile(32, 64, 4, 3, 2)
    tuned.save()
    cfg = configuration.compose(["engine=triton", "model=llamagen_xl"])
    for tuned_here in ((tuned.tuned, tuned.tuned_attention), ({}, {})):
        table = pipeline.engine_of(cfg, torch.device("cuda", 0)).kernels.layers.tiles
        assert (table.tuned, table.tuned_attention) == tuned_here
        here[0] = "NVIDIA H200"


def test_tiles_are_tuned_for_the_passes_of_a_method() -> None:
    """For a tree with two, three and one nodes per level, for all seven nodes, and for the requested numbers of nodes,
    each over two sequences."""
    tuned: list[Any] = []
    kernels = SimpleNamespace(tune=lambda *arguments: tuned.append(arguments))
    drafter, target = (
        SimpleNamespace(shape=DraftShape(build(parse(TREE)))),
        SimpleNamespace(layers=["a block"], width=9),
    )
    arguments: Any = SimpleNamespace(
        engine=SimpleNamespace(kernels=kernels),
        config=SimpleNamespace(drafter=drafter, target=target),
        model=SimpleNamespace(target=target),
    )
    benchmark._tune(arguments, (1, 16), 2, 70)
    assert tuned == [(["a block"], [1, 2, 3, 4, 7, 16], 2, 70)]
    arguments.engine = Eager()
    benchmark._tune(arguments, (1,), 2, 70)
    assert len(tuned) == 1


def test_passes_are_timed_without_the_work_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a chain of 4 has one pass of the target and four of the drafter, each with the head; only these are
    counted."""
    ticks = itertools.count()
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: float(next(ticks)))
    target = tiny.llamagen(side=4, vocab=11)
    drafter = Eagle(tiny.eagle(target), chain_paths(4))
    with torch.inference_mode():
        decoding = Decoding(DecoderConfig(target, drafter, exact(), Sampling()), tiny.prompts(1), tiny.rng(1))
        decoding.step()
        before = dict(vars(target))
        with Passes(torch.device("cpu"), floor.passes(target, drafter)) as passes:
            passes.begin()
            decoding.step()
    assert passes.seconds() == [10.0]  # a tick each
    assert vars(target).keys() == before.keys()
