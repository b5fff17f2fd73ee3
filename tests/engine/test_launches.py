"""Budgets of kernel launches. In a recorded step every launch costs about a microsecond, so one more launch in every
layer costs milliseconds per image. Counted on tensors without values."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specbench.bench.shapes import DEVICE, Shapes, shapes
from specbench.config import configuration, parameters
from specbench.decoding.loop import Decoding

pytest.importorskip("triton")
from launch_counts import Launches, count_trajectory, launches
from launch_counts import counted as counted_on_shapes

REDUCED = ("model=llamagen_xl", "reduced=true")

#: Maximum number of launches outside the layers for a speculative step. VVS joins two trees and PJD finds the positions
#: of its rows with plain tensor code: their own budgets count.
MOST, PLAIN = 150, ("vvs", "pjd")
#: For every shipped method of discrete tokens, with fused kernels: a target of two layers, LlamaGen and one that has an
#: image grammar in turn, and the launches in the layers and outside. Few layers give the same count outside the layers
#: as all of them.
BUDGETS = {
    "band": ("llamagen_xl", 35, 62), "band_sjd": ("lumina_mgpt", 18, 18), "band_tree": ("llamagen_xl", 43, 74),
    "cool_sd": ("lumina_mgpt", 48, 74), "eagle1": ("llamagen_xl", 43, 74), "eagle2": ("lumina_mgpt", 60, 70),
    "eagle3": ("llamagen_xl", 55, 82), "eagle3_traversal": ("lumina_mgpt", 48, 94),
    "eagle_block": ("llamagen_xl", 61, 88), "eagle_chain": ("lumina_mgpt", 42, 62),
    "eagle_traversal": ("llamagen_xl", 43, 80), "gsd": ("lumina_mgpt", 18, 110), "jacobi": ("llamagen_xl", 18, 18),
    "jacobi_built_in": ("lumina_mgpt", 18, 30), "lantern": ("llamagen_xl", 55, 70),
    "lantern_pp": ("lumina_mgpt", 48, 74), "medusa": ("llamagen_xl", 18, 62), "mentored": ("lumina_mgpt", 42, 62),
    "scd": ("llamagen_xl", 18, 18), "sd": ("llamagen_xl", 35, 94), "sd_block": ("llamagen_xl", 35, 96),
    "sjd": ("lumina_mgpt", 18, 18), "sjd_entropy": ("llamagen_xl", 18, 82), "sjd_isp": ("lumina_mgpt", 18, 18),
    "pjd": ("lumina_mgpt", 12, 198), "sjd_pac": ("llamagen_xl", 18, 22), "sjd_threshold": ("lumina_mgpt", 18, 18),
    "uniform_rsd": ("llamagen_xl", 43, 74), "vanilla": ("lumina_mgpt", 12, 16), "vvs": ("llamagen_xl", 98, 273),
    "zipar": ("lumina_mgpt", 12, 50), "dflash": ("llamagen_xl", 20, 92), "pathspec": ("llamagen_xl", 18, 33),
    "pathrelax": ("lumina_mgpt", 18, 89),
}  # fmt: skip
#: The same for other parameters.
MORE: dict[str, tuple[tuple[str, ...], int, int]] = {
    "XL vanilla": ((*REDUCED, "method=vanilla"), 10, 18),
    "7B SCD 64, heights": (
        ("model=lumina_mgpt", "reduced=true", "method=scd", "window=64", "coupling=height"), 18, 25
    ),
}  # fmt: skip


@cache
def counted(words: tuple[str, ...], engine: str = "triton") -> dict[str, Any]:
    return launches(configuration.compose([*words, "weights=random"]), engine)


@pytest.mark.parametrize("name", MORE)
def test_a_step_stays_within_its_budget(name: str) -> None:
    words, inside, outside = MORE[name]
    counts = counted(words)
    report = f"{counts['layers']} in the layers, {counts['outside']} outside: {counts['parts']} {counts['by_kernel']}"
    assert counts["layers"] <= inside, report
    assert counts["outside"] <= outside, report
    assert counts["layers"] >= 4 * 2  # the layers are seen


def test_every_method_has_a_budget() -> None:
    assert BUDGETS.keys() == {m for m in parameters.choices("method") if not parameters.is_continuous("method", m)}
    assert max(outside for name, (_, _, outside) in BUDGETS.items() if name not in PLAIN) <= MOST


#: Methods whose drafts or rules have their own kernels: the random numbers, one or two kernels, and the draft's. They
#: were hundreds of operations.
VERIFIED = ("lantern", "lantern_pp", "vvs", "mentored", "medusa")


def test_no_method_launches_more_than_its_budget() -> None:
    by_method = {name: of_method(name) for name in BUDGETS}
    seen = {name: (counts["layers"], counts["outside"]) for name, counts in by_method.items()}
    over = {name for name, (_, inside, outside) in BUDGETS.items() if seen[name][0] > inside or seen[name][1] > outside}
    assert not over, {name: (seen[name], by_method[name]["by_kernel"]) for name in over}
    assert min(inside for inside, _ in seen.values()) >= 4 * 2  # the layers are seen
    assert not {name: by_method[name] for name in VERIFIED if by_method[name]["parts"]["verify"] > 7}
    for words in ("method=lantern variant=released", "method=lantern_pp resample=optimal"):
        counts = counted((*REDUCED, *words.split()))
        assert counts["parts"]["verify"] <= 7, (words, counts["by_kernel"])


def test_the_mask_of_a_target_is_computed_once_per_pass() -> None:
    """With a bool mask, attention computes the mask's addend in three operations in every layer. Only EAGLE's network,
    which has one layer, still does so."""
    vanilla, eagle = (counted((*REDUCED, f"method={name}"), "graph")["by_kernel"] for name in ("vanilla", "eagle1"))
    assert "masks of attention" not in vanilla
    passes = eagle["scaled_dot_product_attention"] - vanilla["scaled_dot_product_attention"]
    assert 0 < eagle["masks of attention"] <= 3 * passes
    assert eagle["masks of attention"] % 3 == 0


def of_method(name: str) -> dict[str, Any]:
    """The launches of a method with the target of its budget."""
    return counted((f"model={BUDGETS[name][0]}", "reduced=true", f"method={name}"))


@pytest.mark.parametrize(
    ("name", "token_wise", "more"),
    [("sd_block", "sd", 2), ("eagle_traversal", "eagle1", 6)],  # a kernel per depth, less one
)
def test_verification_beyond_token_wise_launches_few_kernels_more(name: str, token_wise: str, more: int) -> None:
    other, token = of_method(name), of_method(token_wise)
    assert other["layers"] == token["layers"]
    assert other["outside"] <= token["outside"] + more, other["by_kernel"]


@pytest.mark.parametrize(("band", "exact"), [("band_tree", "eagle1"), ("band_sjd", "sjd")])
def test_a_band_launches_no_more_than_the_exact_rule(band: str, exact: str) -> None:
    """The fused verification kernel computes the limits of the band."""
    assert of_method(band)["by_kernel"] == of_method(exact)["by_kernel"]


def test_one_more_launch_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    before, step = of_method("sjd"), Decoding.step

    def longer(decoding: Decoding) -> None:
        step(decoding)
        torch.add(decoding.num_committed, 1, out=decoding.num_committed)

    monkeypatch.setattr(Decoding, "step", longer)
    after = counted.__wrapped__((f"model={BUDGETS['sjd'][0]}", "reduced=true", "method=sjd"))
    assert after["outside"] == before["outside"] + 1
    assert after["layers"] == before["layers"]
    assert after["by_kernel"]["add"] == before["by_kernel"].get("add", 0) + 1


@pytest.fixture(scope="module")
def vanilla() -> Shapes:
    return shapes(configuration.compose([*REDUCED, "weights=random", "method=vanilla"]))


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
    counts = counted((*REDUCED, "method=eagle1"), engine)
    total = counts["layers"] + counts["outside"]
    assert total == sum(counts["by_kernel"].values()) == sum(counts["parts"].values())
    assert list(counts["parts"]) == ["draft", "forward", "verify", "commit", "rest"][: len(counts["parts"])]
    assert counts["layers"] >= 5 * 2  # blocks: two of the target, and one in each pass of the drafter
    fused = {name for name in counts["by_kernel"] if name.startswith("_attend")}
    assert bool(fused) == (engine == "triton")


def test_a_count_covers_one_step_and_is_repeatable(vanilla: Shapes) -> None:
    first = counted_on_shapes(vanilla)
    assert first == counted_on_shapes(vanilla)
    assert first["by_kernel"]["scaled_dot_product_attention"] == 2  # layers


def test_blocks_are_counted_separately_from_the_rest(vanilla: Shapes) -> None:
    counter = Launches()
    with vanilla.entered(), counter.watching():
        decoding = vanilla.pipeline.images(vanilla.conditioning, vanilla.rng)
        counter.counting = True
        decoding.step()
        counter.counting = False
    assert counter.layers["silu"] == 2  # blocks
    assert not counter.outside["silu"]


def test_a_step_of_the_diffusion_head_starts_few_kernels() -> None:
    """MAR-L has eight blocks, which once had eight launches each. Modulation and gate are one launch each, and no table
    is indexed."""
    assert count_trajectory(configuration.compose(["model=mar_l", "method=vanilla"])) <= 73
