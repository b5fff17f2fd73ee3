"""Budgets of kernel launches. In a recorded step every launch costs about a microsecond, so one more launch in every
layer costs milliseconds per image. Counted on fake CUDA tensors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specbench.bench.shapes import Shapes
from specbench.config import configuration, parameters
from specbench.decoding.loop import Decoding

pytest.importorskip("triton")
from launch_counts import DEVICE, Launches, count_trajectory, launches, shapes
from launch_counts import counted as counted_on_shapes

REDUCED = ("model=llamagen_xl", "reduced=true")
XL, LUMINA = (REDUCED, 2), (("model=lumina_mgpt", "reduced=true"), 2)
#: Target and its layers, method, and the launches with fused kernels: in the layers and outside. One target at its full
#: size: the others' layers are alike, so two tell what 32 or 36 do.
BUDGETS: dict[str, tuple[tuple[tuple[str, ...], int], tuple[str, ...], int, int]] = {
    "XL vanilla": ((REDUCED[:1], 36), ("method=vanilla",), 180, 20),
    "XL EAGLE tree of 26": (XL, ("method=eagle1",), 43, 74),
    "XL EAGLE-2": (XL, ("method=eagle2",), 55, 66),
    "7B vanilla": (LUMINA, ("method=vanilla",), 18, 20),
    "7B SJD 64": (LUMINA, ("method=sjd", "window=64"), 18, 22),
    "7B SCD 64, heights": (LUMINA, ("method=scd", "window=64", "coupling=height"), 18, 25),
    "7B SJD-PAC 64": (LUMINA, ("method=sjd_pac", "window=64"), 18, 25),
}

#: Maximum number of launches outside the layers for a speculative step. VVS joins two trees with plain tensor code: its
#: own budget counts.
MOST = 150
#: The same for every shipped method of discrete tokens, with LlamaGen and with a target that has an image grammar.
OUTSIDE = {
    "band": 62, "band_sjd": 18, "band_tree": 74, "cool_sd": 74, "eagle1": 74, "eagle2": 70, "eagle3": 82,
    "eagle3_traversal": 94, "eagle_block": 88, "eagle_chain": 62,
    "eagle_traversal": 80, "gsd": 110, "jacobi": 18, "jacobi_built_in": 30, "lantern": 70, "lantern_pp": 74,
    "medusa": 62, "mentored": 62, "scd": 18, "sd": 94, "sd_block": 96, "sjd": 18, "sjd_entropy": 82,
    "sjd_isp": 18, "sjd_pac": 22, "sjd_threshold": 18, "uniform_rsd": 74, "vanilla": 16,
    "vvs": 273, "zipar": 50, "dflash": 92,
}  # fmt: skip


def counted(words: tuple[str, ...], engine: str = "triton") -> dict[str, Any]:
    return launches(configuration.compose([*words, "weights=random"]), engine)


@pytest.mark.parametrize("name", BUDGETS)
def test_a_step_stays_within_its_budget(name: str) -> None:
    (model, layers), words, inside, outside = BUDGETS[name]
    counts = counted((*model, *words))
    report = f"{counts['layers']} in the layers, {counts['outside']} outside: {counts['parts']} {counts['by_kernel']}"
    assert counts["layers"] <= inside, report
    assert counts["outside"] <= outside, report
    assert counts["layers"] >= 4 * layers  # the layers are seen


def test_every_method_has_a_budget() -> None:
    assert OUTSIDE.keys() == {m for m in parameters.choices("method") if not parameters.is_continuous("method", m)}
    assert max(count for name, count in OUTSIDE.items() if name != "vvs") <= MOST


#: Methods whose drafts or rules have their own kernels: the random numbers, one or two kernels, and the draft's. They
#: were hundreds of operations.
VERIFIED = ("lantern", "lantern_pp", "vvs", "mentored", "medusa")


def test_no_method_launches_more_than_its_budget() -> None:
    """Outside the layers, with LlamaGen or with a target that has an image grammar, in turn. Few layers give the same
    count outside the layers as all of them."""
    models = itertools.cycle(("llamagen_xl", "lumina_mgpt"))
    by_method = {name: counted((f"model={next(models)}", "reduced=true", f"method={name}")) for name in OUTSIDE}
    assert not {name: count for name, count in by_method.items() if count["outside"] > OUTSIDE[name]}
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


@pytest.mark.parametrize(
    ("words", "more"),
    [("eagle_chain verification=block", 2), ("eagle1 verification=traversal", 6)],  # a kernel per depth, less one
)
def test_verification_beyond_token_wise_launches_few_kernels_more(words: str, more: int) -> None:
    method, verification = words.split()
    token, other = (counted((*REDUCED, f"method={method}", *added)) for added in ((), (verification,)))
    assert other["layers"] == token["layers"]
    assert other["outside"] <= token["outside"] + more, other["by_kernel"]


@pytest.mark.parametrize("shape", ["eagle_tree", "sjd"])
def test_a_band_launches_no_more_than_a_factor(shape: str) -> None:
    """The fused verification kernel computes the limits of the band."""
    words = (*REDUCED, "method=vanilla", *f"drafter={shape}".split())
    band, cool = (counted((*words, f"rule={rule}")) for rule in ("band", "cool"))
    assert band["by_kernel"] == cool["by_kernel"]


def test_one_more_launch_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*REDUCED, "method=sjd")
    before, step = counted(words), Decoding.step

    def longer(decoding: Decoding) -> None:
        step(decoding)
        torch.add(decoding.num_committed, 1, out=decoding.num_committed)

    monkeypatch.setattr(Decoding, "step", longer)
    after = counted(words)
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
    counts = counted((*REDUCED, "method=eagle_chain", "window=3"), engine)
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
