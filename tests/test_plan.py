"""Steps on shapes alone: launches are counted without a device, sizes are those of the real networks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specbench.bench.launches import Launches, counted, engine_on_shapes, has_triton, launches
from specbench.bench.shapes import DEVICE, Shapes, shapes
from specbench.config import configuration
from specbench.models.transformer import Block

XL = ("model=llamagen_xl", "weights=random")
REDUCED = (*XL, "reduced=true")


@pytest.fixture(scope="module")
def vanilla() -> Shapes:
    return shapes(configuration.compose([*REDUCED, "method=vanilla"]))


def test_launches_are_what_the_device_would_have_to_start(vanilla: Shapes) -> None:
    """Views and allocations are free, a sum into a copy costs the copy, and attention is one."""
    found = Launches()
    with vanilla.entered(), found.watching():
        x, w = torch.empty(4, 8, device=DEVICE), torch.empty(8, 8, device=DEVICE)
        found.counting = True
        x.view(2, 16)[:, 1:].transpose(0, 1)
        torch.empty_like(x)
        torch.arange(4)  # on the CPU
        assert found.total == 0
        torch.addmm(x, x, w)
        assert found.outside == {"addmm": 2}
        torch.addmm(w[0], x, w)  # a bias is part of the product
        q = x.view(1, 2, 4, 4)
        F.scaled_dot_product_attention(q, q, q)
    assert found.outside == {"addmm": 3, "scaled_dot_product_attention": 1}
    assert not found.layers


@pytest.mark.parametrize("engine", ["graph", "triton"])
def test_a_step_is_counted_by_layers_parts_and_kernels(engine: str) -> None:
    if engine == "triton" and not has_triton():
        pytest.skip("needs triton")
    found = launches(configuration.compose([*REDUCED, "method=eagle_chain", "window=3"]), engine)
    total = found["layers"] + found["outside"]
    assert total == sum(found["by_kernel"].values()) == sum(found["parts"].values())
    assert list(found["parts"]) == ["draft", "forward", "verify", "commit", "rest"][: len(found["parts"])]
    assert found["layers"] >= 5 * 2  # blocks: two of the target, one in each of the drafter's passes
    fused = {name for name in found["by_kernel"] if name.startswith("_attend")}
    assert bool(fused) == (engine == "triton")


def test_a_count_is_of_one_step_and_repeatable(vanilla: Shapes) -> None:
    first = counted(vanilla)
    assert first == counted(vanilla)
    assert first["by_kernel"]["scaled_dot_product_attention"] == 2  # layers


@pytest.mark.parametrize(
    ("words", "millions"),
    [
        ((*XL, "method=eagle1"), 775),
        (("model=lumina_mgpt", "method=sjd"), 6778),
        (("model=emu3", "method=vanilla"), 7870),
        (("model=mar_l", "method=cspd"), 479),
    ],
)
def test_a_full_size_costs_no_memory(words: tuple[str, ...], millions: int) -> None:
    made = shapes(configuration.compose([*words]))
    target = made.networks["target"]
    assert sum(p.numel() for p in target.parameters()) == pytest.approx(1e6 * millions, rel=0.02)
    assert all(p.device == DEVICE for network in made.networks.values() for p in network.parameters())
    assert ("drafter head" in made.networks) == (words[-1] == "method=eagle1")


def test_blocks_are_told_from_the_rest(vanilla: Shapes) -> None:
    found, target = Launches(), vanilla.networks["target"]
    blocks = [module for module in target.modules() if isinstance(module, Block)]
    assert len(blocks) == 2
    with vanilla.entered(), found.watching():
        decoding = vanilla.pipeline.images(vanilla.conditioning, vanilla.rng)
        found.counting = True
        decoding.step()
        found.counting = False
    assert found.layers["silu"] == 2
    assert not found.outside["silu"]
    assert engine_on_shapes("graph").kernels is None
