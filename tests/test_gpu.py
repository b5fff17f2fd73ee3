"""The same on a CUDA device: skipped where there is none."""

from __future__ import annotations

import json

import pytest
import test_continuous
import test_engine
import tiny
import torch

from specbench import cli
from specbench.audit.tabular import codes
from specbench.config import configuration, parameters, registry
from specbench.decoding import rules, trees
from specbench.decoding.drafters.eagle import Eagle
from specbench.decoding.drafters.none import NoDraft
from specbench.decoding.loop import DecoderConfig, Decoding, decode
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.engine.graph import Graphs
from specbench.harness.pipeline import Pipeline
from specbench.models.llamagen import Conditioning

REAL = [name for name in parameters.choices("model") if registry.entry("model", name).parts]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_streams_are_those_of_the_cpu():
    keys = [(3, i) for i in range(50)]
    step = torch.arange(50)
    here = RandomStreams(keys).uniform(step, 7, 11)
    there = RandomStreams(keys, "cuda").uniform(step.cuda(), 7, 11)
    assert torch.equal(there.cpu(), here)


@pytest.mark.parametrize("drafting", [False, True])
def test_a_target_keeps_its_distribution(drafting):
    """Against the distribution enumerated on the CPU (chi-square)."""
    target, count = tiny.llamagen(), 4000
    cond = tiny.prompts(count, same=True)
    probs = tiny.sequence_probs(target, cond, 2.0)
    drafter = Eagle(tiny.eagle(target).cuda(), trees.parse("[[0],[1],[0,0],[0,1]]")) if drafting else NoDraft()
    there = Conditioning(cond.features.cuda(), cond.valid.cuda())
    config = DecoderConfig(target.cuda(), drafter, rules.exact(), Sampling(cfg_scale=2.0))
    out = decode(config, there, tiny.rng(count, device="cuda"))
    assert tiny.fit(codes(out.tokens.cpu(), tiny.VOCAB), probs) > 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", REAL)
def test_every_real_target_draws_pictures(model, dtype):
    cfg = configuration.compose([f"model={model}", "weights=random", "reduced=true", f"dtype={dtype}", "device=cuda"])
    pipeline = Pipeline.load(cfg)
    prompts = ["7", "8"]
    out = pipeline.decode(pipeline.encode(prompts), [(0, 0), (0, 1)])
    assert out.tokens.is_cuda
    assert pipeline.pixels(out.tokens).shape == (2, pipeline.resolution, pipeline.resolution, 3)


def there(name, rows, seed):
    """A target, a drafter by the name it has in test_engine, and what is decoded, all on the device."""
    target = tiny.llamagen(side=4)
    drafter = test_engine.DRAFTERS[name](target)
    for network in ("head", "heads", "model"):
        if isinstance(held := getattr(drafter, network, None), torch.nn.Module):
            held.cuda()
    given = test_engine.conditioning(rows, seed)
    there = Conditioning(given.features.cuda(), given.valid.cuda())
    return target.cuda(), drafter, there, tiny.rng(rows, seed, "cuda")


@pytest.mark.parametrize("name", test_engine.DRAFTERS)
def test_a_recorded_step_gives_what_a_plain_one_gives(name):
    """Three batches, two of them by replays alone."""
    engine = Graphs()
    target, drafter, *_ = there(name, 2, 0)
    config = DecoderConfig(target, drafter, rules.exact(), Sampling(cfg_scale=2.0, top_k=4))
    for seed in range(3):
        _, _, cond, rng = there(name, 2, seed)
        recorded = decode(config, cond, rng, engine)
        plain = decode(config, cond, rng)
        assert torch.equal(recorded.tokens, plain.tokens)
        assert torch.equal(recorded.steps, plain.steps)
    assert len(engine._kept) == 1


@pytest.mark.parametrize("name", test_engine.DRAFTERS)
@torch.inference_mode()
def test_no_step_waits_for_the_host(name):
    target, drafter, cond, rng = there(name, 2, 0)
    steps = Decoding(DecoderConfig(target, drafter, rules.exact(), Sampling(cfg_scale=2.0, top_k=4)), cond, rng)
    steps.step()  # what is built once may be brought from the host
    steps.observe()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            steps.step()
            steps.observe()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", [name for name in test_continuous.RULES if name != "path"])
@torch.inference_mode()
def test_no_pass_of_vectors_waits_for_the_host(name):
    images = test_continuous.under_way(test_continuous.RULES[name], 3, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        test_continuous.go_on(images)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_benchmark_times_recorded_and_plain_steps(capsys):
    from specbench import cli

    arguments = "model=llamagen_xl reduced=true weights=random device=cuda dtype=bfloat16 bench.steps=5".split()
    for engine in ("eager", "graph"):
        assert cli.main(["bench", *arguments, f"engine={engine}", "method=cool_sd", "forced_accept=2"]) == 0
        row = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert row["forward_ms"] > 0
        assert row["device"] == "cuda"


@pytest.mark.parametrize("features", ["stored", "live"])
def test_a_drafter_is_trained_and_used(tmp_path, features):
    arguments = ["model=lumina_mgpt", "weights=random", "reduced=true", "data=prompts", f"prompts={tmp_path / 'a.txt'}"]
    (tmp_path / "a.txt").write_text("\n".join(f"number {i}" for i in range(12)))
    small = ["n=12", "batch=4", "steps=10", "warmup=2", "held_out=0.2", f"features={features}", "dtype=bfloat16"]
    out = tmp_path / "out"
    assert cli.main(["train", "drafter=eagle3", "source=self", *arguments, *small, f"out={out}"]) == 0
    run = ["method=eagle3", f"drafter_weights={out}", "n=1", "metrics=none", "warmup=0", "engine=graph"]
    assert cli.main(["run", *arguments, *run, f"out={tmp_path / 'run'}"]) == 0
