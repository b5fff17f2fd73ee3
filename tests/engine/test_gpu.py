"""Tests on a CUDA device: whole decodings, recordings, and operations that a step must not use. `pytest -m gpu` selects
these and the tests of kernels. A test also runs on the CPU, where nothing is recorded, unless only a device can answer
its question."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_continuous
import test_engine
import tiny
import torch
from fake_cuda import Lint, fake_cuda, moved, moved_drafter

from specbench import cli
from specbench.audit.tabular import codes
from specbench.config import parameters, registry
from specbench.decoding import rules, trees
from specbench.decoding.drafters.eagle import Eagle
from specbench.decoding.drafters.none import NoDraft
from specbench.decoding.loop import DecoderConfig, Decoding, decode
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.engine.graph import Eager, Graphs
from specbench.errors import RunError
from specbench.harness.pipeline import Pipeline

pytest.importorskip("triton")
from gpu_checks import models, parity

from specbench.engine.kernels import FusedKernels

REAL = [name for name in parameters.choices("model") if name in registry.model_sources()]
HERE = torch.cuda.is_available()
GPU = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="no CUDA device")]
CUDA = pytest.param("cuda", marks=GPU)
ON_CUDA = pytest.mark.parametrize("device", [CUDA])


def on_cuda(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Test parameters of these cases. The last part of each case is the device."""
    return [pytest.param(*case, "cuda", marks=GPU) for case in cases]


SAMPLING = Sampling(cfg_scale=2.0, top_k=4)
ENGINES: dict[str, Callable[[], Any]] = {
    "eager": Eager,
    "graph": Graphs,
    "triton": lambda: Graphs(kernels=FusedKernels()),
}
NO_HYDRA = "the command line needs hydra and omegaconf: carry them as wheels (docs/gpu.md)"


@pytest.fixture(autouse=True)
def device_as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """If a test leaves the device broken, or leaves a stream or a mode set, this test fails and not the ones after
    it."""
    if "device" not in request.fixturenames or request.getfixturevalue("device") != "cuda":
        yield
        return
    stream = torch.cuda.current_stream()
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        left = torch.cuda.current_stream() != stream
        torch.cuda.set_stream(stream)
        gc.collect()
        torch.cuda.synchronize()
        assert not left, "another stream was left the current one"
        assert not torch.cuda.is_current_stream_capturing()
        assert int(torch.ones(3, device="cuda").sum()) == 3


def test_every_test_of_a_kernel_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of kernels use the device where one exists."""
    import conftest

    class Item:
        def __init__(self, name: str) -> None:
            self.path, self.marks = Path(name), []

        def add_marker(self, mark: Any) -> None:
            self.marks.append(mark.name)

    items = [Item(name) for name in ("test_kernels.py", "test_kernel_layers.py", "test_loop.py")]
    for available in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        conftest.pytest_collection_modifyitems(items)
        assert [item.marks for item in items] == [["gpu"] * available, ["gpu"] * available, []]


@ON_CUDA
def test_random_streams_equal_those_of_the_cpu(device: str) -> None:
    keys = [(3, i) for i in range(50)]
    step = torch.arange(50)
    on_cpu = RandomStreams(keys).uniform(step, 7, 11)
    on_device = RandomStreams(keys, device).uniform(step.to(device), 7, 11)
    assert torch.equal(on_device.cpu(), on_cpu)


@pytest.mark.parametrize(("drafting", "engine"), [(engine != "eager", engine) for engine in ENGINES])
@ON_CUDA
def test_a_target_keeps_its_distribution(drafting: bool, engine: str, device: str) -> None:
    """A chi-square test against the distribution that is enumerated on the CPU."""
    target, count = tiny.llamagen(), 4000
    cond = tiny.prompts(count, same=True)
    probs = tiny.sequence_probs(target, cond, 2.0)
    drafter = Eagle(tiny.eagle(target).to(device), trees.parse("[[0],[1],[0,0],[0,1]]")) if drafting else NoDraft()
    config = DecoderConfig(target.to(device), drafter, rules.exact(), Sampling(cfg_scale=2.0))
    out = decode(config, move_conditioning(cond, device), tiny.rng(count, device=device), ENGINES[engine]())
    assert tiny.fit(codes(out.tokens.cpu(), tiny.VOCAB), probs) > 1e-4


@pytest.mark.parametrize(("dtype", "engine"), [("float32", "eager"), ("bfloat16", "triton")])
@pytest.mark.parametrize("model", REAL)
@ON_CUDA
def test_every_real_target_draws_pictures(model: str, dtype: str, engine: str, device: str) -> None:
    pytest.importorskip("hydra", reason=NO_HYDRA)
    from specbench.config import configuration

    words = [f"model={model}", "weights=random", "reduced=true", f"dtype={dtype}", f"device={device}"]
    engine = "graph" if engine == "triton" and parameters.kind("model", model) != "discrete" else engine
    pipeline = Pipeline.load(configuration.compose([*words, f"engine={engine}"]))
    prompts = ["7", "8"]
    out = pipeline.decode(pipeline.encode(prompts), [(0, 0), (0, 1)])
    assert out.tokens.is_cuda
    assert pipeline.pixels(out.tokens).shape == (2, pipeline.resolution, pipeline.resolution, 3)


def move_conditioning(conditioning: Any, device: str, dtype: torch.dtype = torch.float32) -> Any:
    return type(conditioning)(conditioning.features.to(device, dtype), conditioning.valid.to(device))


def config_on(name: str, device: str, dtype: torch.dtype = torch.float32, side: int = 4) -> DecoderConfig:
    """A target and the drafter of this name in test_engine, on the device."""
    target = tiny.llamagen(side=side)
    drafter = test_engine.DRAFTERS[name](target)
    for network in vars(drafter).values():
        if isinstance(network, torch.nn.Module):
            network.to(device, dtype)
    return DecoderConfig(tiny.read_by(target.to(device, dtype), drafter), drafter, rules.exact(), SAMPLING)


def start(config: DecoderConfig, seed: int, device: str, kernels: Any, kind: type[Decoding] = Decoding) -> Decoding:
    dtype = config.target.output.weight.dtype
    conditioning = move_conditioning(test_engine.conditioning(2, seed), device, dtype)
    return kind(config, conditioning, tiny.rng(2, seed, device), kernels=kernels)


def engines(engine: str, device: str) -> tuple[Graphs, Eager]:
    """One engine that records, and one that runs the same kernels one by one. On the CPU nothing is recorded."""
    kernels = FusedKernels() if engine == "triton" else None
    plain = Eager()
    plain.kernels = kernels
    return Graphs(None if device == "cuda" else test_engine.at_once, kernels), plain


def agree(config: DecoderConfig, engine: str, device: str, batches: int = 3) -> None:
    """A recording and plain steps give the same images over some batches."""
    recorded, plain = engines(engine, device)
    dtype = config.target.output.weight.dtype
    for seed in range(batches):
        conditioning = move_conditioning(test_engine.conditioning(2, seed), device, dtype)
        a, b = (decode(config, conditioning, tiny.rng(2, seed, device), engine_run) for engine_run in (recorded, plain))
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.steps, b.steps)
    assert len(recorded._runners) == 1


@pytest.mark.parametrize(
    ("name", "device"),
    [*((name, "cpu") for name in ("tree", "sjd", "dflash")), *on_cuda([(name,) for name in test_engine.DRAFTERS])],
)
def test_a_recorded_step_equals_a_plain_step(name: str, device: str) -> None:
    """Three batches; two of them only replay the recording. (Without a device, test_kernels runs fused steps in
    place.)"""
    if device == "cpu":
        agree(config_on(name, device, side=2), "graph", device, 2)
    else:
        agree(config_on(name, device, torch.float32), "graph", device)
        agree(config_on(name, device, torch.bfloat16), "triton", device)


RULED = [*zip(itertools.cycle(("tree", "sjd")), [name for name in test_engine.RULES if name != "exact"])]


@pytest.mark.parametrize(("name", "rule", "device"), [("tree", "cool", "cpu"), *on_cuda(RULED)])
def test_recorded_steps_of_every_rule(name: str, rule: str, device: str) -> None:
    config = config_on(name, device, side=2 if device == "cpu" else 4)
    ruled = DecoderConfig(config.target, config.drafter, test_engine.RULES[rule](), SAMPLING)
    agree(ruled, "graph" if device == "cpu" else "triton", device, 2)


@pytest.mark.parametrize("name", test_engine.DRAFTERS)
@ON_CUDA
@torch.inference_mode()
def test_no_step_waits_for_the_host(name: str, device: str) -> None:
    for kernels in (None, FusedKernels()):
        torch.cuda.set_sync_debug_mode("default")
        steps = start(config_on(name, device), 0, device, kernels)
        steps.step()  # kernels are compiled, workspaces allocated
        steps.record_stats()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            steps.step()
            steps.record_stats()


@pytest.mark.parametrize("name", ["tree", "medusa", "draft_model", "sjd"])  # a network for each name, and none
def test_everything_these_tests_decode_is_on_the_device(name: str) -> None:
    """Conditioning and networks too. Fake CUDA tensors report the device."""
    config, lint = config_on(name, "cpu"), Lint()
    with fake_cuda():
        moved(config.target)
        moved_drafter(config.drafter)
        steps = start(config, 0, "cuda", None)
        lint.record({"a step": steps.step, "its statistics": steps.record_stats}, torch.device("cuda"))
    assert not lint.faults


class NeedsHost(Decoding):
    """Steps that need a value on the host, so no graph of them can be recorded."""

    def step(self) -> None:
        super().step()
        self.num_committed.sum().item()


@pytest.mark.parametrize("engine", ["graph", "triton"])
@ON_CUDA
def test_a_recording_that_fails_leaves_the_device_usable(engine: str, device: str) -> None:
    config, recorded = config_on("sjd", device), ENGINES[engine]()
    for _ in range(2):
        with torch.inference_mode(), pytest.raises(RunError, match="step"):
            recorded.begin(start(config, 0, device, recorded.kernels, NeedsHost))
        agree(config, engine, device, 1)


@pytest.mark.parametrize("name", test_continuous.HOSTLESS)
@ON_CUDA
@torch.inference_mode()
def test_no_pass_of_vectors_waits_for_the_host(name: str, device: str) -> None:
    images = test_continuous.under_way(test_continuous.RULES[name], 3, device)
    torch.cuda.set_sync_debug_mode("error")
    test_continuous.go_on(images)


@pytest.mark.parametrize(
    ("words", "model"),
    [
        ("method=sjd_pac window=6 width=2", "m4t24"),
        ("method=eagle1 verification=traversal", "v8t4"),
        ("method=eagle2 nodes=4 depth=2 width=2", "v8t4"),
        ("method=cool_sd delta=1.5 drafter=eagle window=3", "v8t4"),
        ("method=eagle1 tree=[[0],[1],[0,0]]", "llamagen_tiny"),
        ("method=cspd gamma=2 model=mar_b weights=random", "d1t5"),
    ],
)
@ON_CUDA
def test_an_audit_on_a_device_gives_the_verdict_of_the_cpu(words: str, model: str, device: str) -> None:
    pytest.importorskip("hydra", reason=NO_HYDRA)
    from specbench.audit import audit, densities, models, tiny
    from specbench.config import configuration

    subject: Any = {"llamagen_tiny": tiny, "d1t5": densities}.get(model, models)
    subject, cfg = subject.built_in(model), configuration.compose(words.split())
    rows = [
        audit.measure(audit.assemble(cfg, subject, torch.device(where)), subject, 20_000, margin=1.0)
        for where in (device, "cpu")
    ]
    first, other = (row["verdict"] for row in rows)
    expected = {"cool_sd": "not lossless", "eagle1": "lossless", "cspd": "not refuted"}
    assert first == other == expected[cfg.method]


@pytest.mark.parametrize(
    ("name", "nodes", "images", "device"),
    [*((name, nodes, 1, "cpu") for name, nodes in zip(models.TARGETS, (1, 6, 26))), *on_cuda(parity.passes())],
)
@torch.inference_mode()
def test_a_fused_pass_errs_like_a_plain_one(name: str, nodes: int, images: int, device: str) -> None:
    """In bfloat16 at real sizes, against float64."""
    assert parity.error_of_pass(name, nodes, images, device) <= parity.MORE


@pytest.mark.parametrize(
    ("size", "shape", "rule", "device"),
    [*((50, shape, "exact", "cpu") for shape in ("chain", "tree")), *on_cuda(parity.verifications())],
)
@torch.inference_mode()
def test_drafts_over_real_vocabularies(size: int, shape: str, rule: str, device: str) -> None:
    plain, fused = parity.verified(size, shape, rule, device)
    for part in ("path", "length", "tokens"):
        assert torch.equal(getattr(plain, part), getattr(fused, part)), part


@pytest.mark.parametrize(
    ("case", "device"),
    [
        ("tree, lantern, released, triton", "cpu"),
        ("eagle2, exact, triton", "cpu"),
        *on_cuda([(x,) for x in models.CASES]),
    ],
)
@torch.inference_mode()
def test_recorded_steps_of_wide_layers(case: str, device: str) -> None:
    """Two batches by one recording and by plain steps; on the CPU one image with fused kernels and without."""
    target, drafter, rule, engine = models.CASES[case]
    config, conditioning = models.configured(target, drafter, rule, device)
    recorded, plain = engines(engine, device)
    plain.kernels = plain.kernels if device == "cuda" else None
    for seed in range(2 if device == "cuda" else 1):
        rng = RandomStreams([(seed, i) for i in range(len(conditioning))], device)
        a, b = (decode(config, conditioning, rng, engine_run) for engine_run in (recorded, plain))
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.steps, b.steps)


@ON_CUDA
def test_a_benchmark_times_recorded_and_plain_steps(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hydra", reason=NO_HYDRA)
    arguments = f"model=llamagen_xl reduced=true weights=random device={device} dtype=bfloat16 bench.steps=5".split()
    for engine in ("eager", "graph", "triton"):
        assert cli.main(["bench", *arguments, f"engine={engine}", "method=cool_sd", "forced_accept=2"]) == 0
        row = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert row["forward_ms"] > 0
        assert row["device"].startswith("cuda")


@pytest.mark.parametrize("features", ["stored", "live"])
@ON_CUDA
def test_a_drafter_is_trained_and_used(tmp_path: Path, features: str, device: str) -> None:
    pytest.importorskip("hydra", reason=NO_HYDRA)
    arguments = ["model=lumina_mgpt", "weights=random", "reduced=true", "data=prompts", f"prompts={tmp_path / 'a.txt'}"]
    (tmp_path / "a.txt").write_text("\n".join(f"number {i}" for i in range(12)))
    small = ["n=12", "batch=4", "steps=10", "warmup=2", "held_out=0.2", f"features={features}", "dtype=bfloat16"]
    out = tmp_path / "out"
    assert cli.main(["train", "drafter=eagle3", "source=self", *arguments, *small, f"out={out}"]) == 0
    run = ["method=eagle3", f"drafter_weights={out}", "n=1", "metrics=none", "warmup=0", "engine=graph"]
    assert cli.main(["run", *arguments, *run, f"out={tmp_path / 'run'}"]) == 0
