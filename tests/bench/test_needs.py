"""Plans on shapes alone: the networks have their real sizes, and memory is counted without a device."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from specbench.bench.devices import DEVICES
from specbench.bench.needs import ImageNeeds, Memory, plan, size
from specbench.bench.shapes import DEVICE, Shapes, shapes
from specbench.config import configuration
from specbench.decoding.rng import RandomStreams
from specbench.harness.pipeline import Pipeline
from specbench.models import diffusion

Call = Callable[..., tuple[int, str, str]]

XL = ("model=llamagen_xl", "weights=random")
REDUCED = (*XL, "reduced=true")


@pytest.fixture(scope="module")
def vanilla() -> Shapes:
    return shapes(configuration.compose([*REDUCED, "method=vanilla"]))


@pytest.mark.parametrize(
    ("words", "millions"),
    [
        ((*XL, "method=eagle1"), 775),
        (("model=lumina_mgpt", "method=sjd"), 6778),
        (("model=mar_l", "method=cspd"), 479),
    ],
)
def test_a_full_size_costs_no_memory(words: tuple[str, ...], millions: int) -> None:
    made = shapes(configuration.compose([*words]))
    target = made.networks["target"]
    assert sum(p.numel() for p in target.parameters()) == pytest.approx(1e6 * millions, rel=0.02)
    assert all(p.device == DEVICE for network in made.networks.values() for p in network.parameters())
    assert ("drafter head" in made.networks) == (words[-1] == "method=eagle1")


def count_bytes(network: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in network.parameters())


def test_planned_bytes_equal_those_of_real_networks_and_caches() -> None:
    words = (*REDUCED, "method=eagle_chain", "window=3", "batch=2", "dtype=bfloat16")
    planned = plan(configuration.compose([*words]))
    real = Pipeline.load(configuration.compose([*words, "device=cpu"]))
    head = real.config.drafter.head
    weights = {"target": real.model.target, "tokenizer": real.model.tokenizer, "drafter head": head}
    assert planned.weights_gb == {name: count_bytes(network) / 1e9 for name, network in weights.items()}
    with torch.inference_mode():
        decoding = real.images(real.encode(["a", "b"]), RandomStreams([(0, 0), (0, 1)]))
    caches = [decoding.session.cache, decoding.draft_state.cache]
    size = sum(2 * cache.k.numel() * cache.k.element_size() for cache in caches) / 1e9
    assert size < planned.state_gb < 2 * size
    parts = sum(getattr(planned, f"{name}_estimate_gb") for name in ("prefill", "step", "pixels"))
    least = planned.all_weights_gb + planned.state_gb + planned.runtime_estimate_gb
    assert least < planned.peak_estimate_gb <= least + parts


def test_a_recorded_engine_holds_its_state_twice() -> None:
    """A later batch is prefilled before its state is copied into the memory of the recorded one."""
    eager, graph = (plan(configuration.compose([*REDUCED, "method=sjd", f"engine={e}"])) for e in ("eager", "graph"))
    assert graph.peak_estimate_gb >= eager.peak_estimate_gb + eager.state_gb


def test_planned_bytes_of_continuous_tokens() -> None:
    words = ("model=mar_l", "reduced=true", "weights=random", "method=cspd", "gamma=2", "dtype=float32")
    planned = plan(configuration.compose([*words]))
    real = Pipeline.load(configuration.compose([*words, "device=cpu"]))
    weights = {
        "target": real.model.target.model,
        "tokenizer": real.model.tokenizer,
        "drafter model": real.drafter.model,
    }
    assert planned.weights_gb == {name: count_bytes(network) / 1e9 for name, network in weights.items()}
    assert planned.reads_gb["forward"] > planned.reads_gb["diffusion_step"] > 0
    assert float(diffusion.schedule(4).betas[0]) > 0  # no fake tensor is left in a table


def test_memory_is_counted_while_tensors_live(vanilla: Shapes) -> None:
    memory = Memory()
    with vanilla.entered(), memory:
        alive = torch.zeros(10, device=DEVICE)
        passing = torch.zeros(100, device=DEVICE)
        view = passing[:50].view(5, 10)
        alive.add_(1)
        torch.zeros(1000)  # on the CPU
        assert memory.live == 4 * 110
        del passing
        assert memory.live == 4 * 110  # the view keeps it alive
        del view
        assert (memory.live, memory.above()) == (40, 400)
        assert memory.above() == 0


def test_a_plan_reads_as_many_bytes_as_a_benchmark(call: Call) -> None:
    words = (*REDUCED, "dtype=float32", "method=sjd", "window=3", "bench.context=20")
    code, out, err = call("bench", "--plan", *words)
    assert (code, err) == (0, "")
    planned = json.loads(out.splitlines()[-1])
    row = json.loads(
        call("bench", *words, "device=cpu", "bench.steps=1", "bench.nodes=1", "bench.images=0")[1].splitlines()[-1]
    )
    for name in ("rows", "context", "nodes"):
        assert planned[name] == row[name]
    assert planned["reads_gb"]["forward"] == pytest.approx(row["weights_gb"] + row["cache_gb"], rel=1e-4)
    h200 = planned["devices"]["h200"]
    assert h200["step_floor_ms"] == pytest.approx(1e3 * planned["reads_gb"]["step"] / 4800)
    assert list(planned["devices"]) == list(DEVICES)
    assert all(name in out for name in DEVICES)


def test_plans_of_a_grid_and_of_a_bandwidth(call: Call) -> None:
    words = (*REDUCED, "method=vanilla", "device=cuda:7")  # the device is not used
    code, out, _ = call("bench", "-m", "--plan", *words, "batch=1,2", "bench.bandwidth=2e3")
    assert code == 0
    first, second = json.loads(out.splitlines()[-1])
    assert (first["rows"], second["rows"]) == (2, 4)
    assert 1.9 * first["state_gb"] < second["state_gb"] <= 2 * first["state_gb"]
    assert first["devices"] == {
        "device": {
            "bandwidth_gb_s": 2000.0,
            **{f"{part}_floor_ms": pytest.approx(size / 2) for part, size in first["reads_gb"].items()},
            "fits": None,
        }
    }


def test_bad_words_of_a_plan_are_short_errors(call: Call) -> None:
    for words, name in (
        (("--plan", "bench.bandwidth=fast"), "bench.bandwidth"),
        (("--plan", "bench.bandwidth=-1"), "bench.bandwidth"),
        (("bench.bandwidth=h200",), "--plan"),
        (("--plan", "method=sjd", "window=300"), "window"),
        (("--plan", "model=mar_b", "engine=triton"), "engine=triton"),
    ):
        start = [word for word in XL if not any(word.split("=")[0] == other.split("=")[0] for other in words)]
        code, out, err = call("bench", *start, *words)
        assert (code, out, err.count("\n")) == (2, "", 1), words
        assert name in err


@pytest.mark.parametrize("words", ["method=sjd_pac batch=2", "method=eagle2 engine=triton", "method=eagle3"])
def test_two_blocks_and_no_step_are_enough(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of passes of all blocks is the same, and what `size` says is in the plan."""
    cfg = configuration.compose(["model=llamagen_l", "device=cuda", *words.split()])
    planned, small = plan(cfg), size(cfg)
    assert small == ImageNeeds(planned.resolution, planned.tokens, planned.reads_gb["forward"])
    monkeypatch.setattr("specbench.bench.needs._few_blocks", nullcontext)
    assert plan(cfg) == planned
