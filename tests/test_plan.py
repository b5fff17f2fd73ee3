"""Steps on shapes alone: launches are counted without a device, and the networks have their real sizes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from specbench.bench.devices import DEVICES
from specbench.bench.plan import Memory, plan
from specbench.bench.shapes import (
    DEVICE,
    Launches,
    Shapes,
    count_trajectory,
    counted,
    engine_on_shapes,
    has_triton,
    launches,
    shapes,
)
from specbench.config import configuration
from specbench.decoding.rng import RandomStreams
from specbench.harness.pipeline import Pipeline
from specbench.models import diffusion
from specbench.models.transformer import Block

Call = Callable[..., tuple[int, str, str]]

XL = ("model=llamagen_xl", "weights=random")
REDUCED = (*XL, "reduced=true")


@pytest.fixture(scope="module")
def vanilla() -> Shapes:
    return shapes(configuration.compose([*REDUCED, "method=vanilla"]))


def test_launches_are_what_the_device_would_start(vanilla: Shapes) -> None:
    """Views and allocations are free, a sum into a copy costs the copy, and attention is one launch."""
    counter = Launches()
    with vanilla.entered(), counter.watching():
        x, w = torch.empty(4, 8, device=DEVICE), torch.empty(8, 8, device=DEVICE)
        counter.counting = True
        x.view(2, 16)[:, 1:].transpose(0, 1)
        torch.empty_like(x)
        torch.arange(4)  # on the CPU
        assert counter.total == 0
        torch.addmm(x, x, w)
        assert counter.outside == {"addmm": 2}
        torch.addmm(w[0], x, w)  # a bias is part of the product
        q = x.view(1, 2, 4, 4)
        F.scaled_dot_product_attention(q, q, q)
    assert counter.outside == {"addmm": 3, "scaled_dot_product_attention": 1}
    assert not counter.layers


@pytest.mark.parametrize("engine", ["graph", "triton"])
def test_a_step_is_counted_by_layers_parts_and_kernels(engine: str) -> None:
    if engine == "triton" and not has_triton():
        pytest.skip("needs triton")
    counts = launches(configuration.compose([*REDUCED, "method=eagle_chain", "window=3"]), engine)
    total = counts["layers"] + counts["outside"]
    assert total == sum(counts["by_kernel"].values()) == sum(counts["parts"].values())
    assert list(counts["parts"]) == ["draft", "forward", "verify", "commit", "rest"][: len(counts["parts"])]
    assert counts["layers"] >= 5 * 2  # blocks: two of the target, and one in each pass of the drafter
    fused = {name for name in counts["by_kernel"] if name.startswith("_attend")}
    assert bool(fused) == (engine == "triton")


def test_a_count_covers_one_step_and_is_repeatable(vanilla: Shapes) -> None:
    first = counted(vanilla)
    assert first == counted(vanilla)
    assert first["by_kernel"]["scaled_dot_product_attention"] == 2  # layers


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


def test_blocks_are_counted_separately_from_the_rest(vanilla: Shapes) -> None:
    counter, target = Launches(), vanilla.networks["target"]
    blocks = [module for module in target.modules() if isinstance(module, Block)]
    assert len(blocks) == 2
    with vanilla.entered(), counter.watching():
        decoding = vanilla.pipeline.images(vanilla.conditioning, vanilla.rng)
        counter.counting = True
        decoding.step()
        counter.counting = False
    assert counter.layers["silu"] == 2
    assert not counter.outside["silu"]
    assert engine_on_shapes("graph").kernels is None


def count_bytes(network: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in network.parameters())


def test_planned_bytes_equal_those_of_real_networks_and_caches() -> None:
    words = (*REDUCED, "method=eagle_chain", "window=3", "batch=2", "dtype=bfloat16")
    planned = plan(configuration.compose([*words]))
    real = Pipeline.load(configuration.compose([*words, "device=cpu"]))
    head = real.config.drafter.head
    weights = {"target": real.model.target, "tokenizer": real.model.tokenizer, "drafter head": head}
    assert planned["weights_gb"] == {name: count_bytes(network) / 1e9 for name, network in weights.items()}
    with torch.inference_mode():
        decoding = real.images(real.encode(["a", "b"]), RandomStreams([(0, 0), (0, 1)]))
    caches = [decoding.session.cache, decoding.draft_state.cache]
    sizes = [2 * cache.k.numel() * cache.k.element_size() / 1e9 for cache in caches]
    assert [planned["cache_gb"], planned["draft_cache_gb"]] == sizes
    assert sum(sizes) < planned["state_gb"] < planned["peak_estimate_gb"]


@pytest.mark.skipif(not has_triton(), reason="needs Triton")
def test_weights_that_fused_kernels_join_are_counted_once() -> None:
    """They used to count in the state of a step, too."""
    words = (*REDUCED, "method=eagle_chain", "window=3")
    fused, plain = (plan(configuration.compose([*words, f"engine={name}"])) for name in ("triton", "graph"))
    assert fused["weights_gb"] == plain["weights_gb"]
    counters = 4 << 14  # bytes of `attention.Counters`; the joined weights take another 49 kB
    assert fused["state_gb"] <= plain["state_gb"] + counters / 1e9


def test_planned_bytes_of_continuous_tokens() -> None:
    words = ("model=mar_l", "reduced=true", "weights=random", "method=cspd", "gamma=2", "dtype=float32")
    planned = plan(configuration.compose([*words]))
    real = Pipeline.load(configuration.compose([*words, "device=cpu"]))
    weights = {
        "target": real.model.target.model,
        "tokenizer": real.model.tokenizer,
        "drafter model": real.drafter.model,
    }
    assert planned["weights_gb"] == {name: count_bytes(network) / 1e9 for name, network in weights.items()}
    assert planned["launches"]["forward"]["layers"] > 0
    assert planned["launches"]["diffusion_step"] > 20
    assert float(diffusion.schedule(4).betas[0]) > 0  # no fake tensor is left in a table


def test_a_step_of_the_diffusion_head_starts_few_kernels() -> None:
    """MAR-L has eight blocks, which once had eight launches each. Modulation and gate are one launch each, and no table
    is indexed."""
    assert count_trajectory(configuration.compose(["model=mar_l", "method=vanilla"])) <= 73


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
    assert all(name in out for name in ("peak, estimate", "launches of a step", *DEVICES))


def test_plans_of_a_grid_and_of_a_bandwidth(call: Call) -> None:
    words = (*REDUCED, "method=vanilla", "device=cuda:7")  # the device is not used
    code, out, _ = call("bench", "-m", "--plan", *words, "batch=1,2", "bench.bandwidth=2e3")
    assert code == 0
    first, second = json.loads(out.splitlines()[-1])
    assert (first["rows"], second["rows"]) == (2, 4)
    assert second["cache_gb"] == 2 * first["cache_gb"]
    assert first["devices"] == {
        "device": {
            "bandwidth_gb_s": 2000.0,
            **{f"{part}_floor_ms": pytest.approx(size / 2) for part, size in first["reads_gb"].items()},
            "fits": None,
        }
    }


def test_bad_words_of_a_plan_are_short_errors(call: Call) -> None:
    for words, message in (
        (("--plan", "bench.bandwidth=fast"), "bench.bandwidth must be GB/s"),
        (("--plan", "bench.bandwidth=-1"), "bench.bandwidth must be GB/s"),
        (("bench.bandwidth=h200",), "bench.bandwidth= needs --plan"),
        (("--plan", "method=sjd", "window=300"), "window drafts 300 tokens, but an image of llamagen_xl has 256"),
        (("--plan", "model=mar_b", "engine=triton"), "engine=triton needs discrete tokens"),
    ):
        start = [word for word in XL if not any(word.split("=")[0] == other.split("=")[0] for other in words)]
        code, out, err = call("bench", *start, *words)
        assert (code, out) == (2, ""), words
        assert message in err
        assert err.count("\n") == 1, words
