"""An image does not depend on the other images in its batch, whichever code paths the machine's libraries take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor
from windows import window

import specbench
from specbench.decoding import rules
from specbench.decoding.loop import DecoderConfig, decode
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.engine import invariance, ops
from specbench.engine.masks import TreeMask

TESTS = Path(__file__).resolve().parents[1]
#: What the environment can choose on one machine, and what is compared then (see `code_paths`). An empty MKL_CBWR is
#: the library's default.
CODE_PATHS: dict[str, tuple[dict[str, str], str]] = {
    "as shipped": ({}, "all"),
    "library's default": ({"MKL_CBWR": ""}, "some"),
    "library's AVX2": ({"MKL_CBWR": "AVX2"}, "some"),
    "library's SSE2": ({"MKL_CBWR": "COMPATIBLE"}, "some"),
    "torch without vectors": ({"ATEN_CPU_CAPABILITY": "default"}, "functions"),  # products are as shipped
    "library without AVX": ({"MKL_CBWR": "", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}, "some"),
}


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    plain = {k: v for k, v in os.environ.items() if k not in ("MKL_CBWR", "ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS")}
    # Threads that wait for each other without sleeping take milliseconds at a time on a processor that others use, too.
    env = plain | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "OMP_WAIT_POLICY": "passive"}
    argv = [sys.executable, TESTS / "code_paths.py", json.dumps(list(CODE_PATHS.values()))]
    process = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    return dict(zip(CODE_PATHS, json.loads(process.stdout), strict=True))


@pytest.mark.parametrize("name", CODE_PATHS)
def test_rows_do_not_depend_on_each_other(name: str, reports: dict[str, Any]) -> None:
    """With one thread and with two."""
    report, compared = reports[name], CODE_PATHS[name][1]
    assert report["faults"] == {"1": [], "2": []}
    assert sum(report["ways"].values()) > {"all": 80, "some": 20, "functions": 5}[compared]
    if "ATEN_CPU_CAPABILITY" in CODE_PATHS[name][0]:
        assert report["kernels"] == "DEFAULT"  # the variable works


def _exact(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Products that do not depend on each other on any machine: an element of each is a sum of its own."""
    products = (rows[:, None] * weight).sum(-1)
    return products if bias is None else products + bias


def _by_count(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A library that sums in another order when there are few rows."""
    out = _exact(rows, weight, bias)
    return out if len(rows) < invariance.TILE else out * (1 + 2**-20)


def _by_size(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A library that sums in another order when there are many rows."""
    return _exact(rows, weight, bias) * (1 + 2**-20 * (len(rows) > invariance.BLOCK))


def _by_position(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A library that sums every third row in another order."""
    return _exact(rows, weight, bias) * (1 + 2**-20 * (torch.arange(len(rows)) % 3 == 2))[:, None]


def _by_alignment(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A library that sums rows in another order if they do not begin at a multiple of 64 bytes."""
    return _exact(rows, weight, bias) * (1 + 2**-20 * (rows.data_ptr() % 64 != 0))


@pytest.mark.parametrize(
    ("library", "product", "biased"),
    [
        (_by_count, invariance.in_multiples, False),
        (_by_size, invariance.in_blocks, False),
        (_by_position, invariance.one_by_one, True),
        (_by_alignment, invariance.in_multiples, True),
    ],
)
def test_a_library_that_mixes_rows_is_called_in_another_way(
    library: Any, product: Any, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariance, "F", type("Library", (), {"linear": staticmethod(library), "pad": F.pad}))
    monkeypatch.setattr(invariance, "_chosen", {})
    g = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(24, 33, generator=g), torch.randn(24, generator=g) if biased else None
    assert invariance.choose(weight, biased) is product
    rows = torch.randn(40, 33, generator=g)
    with torch.no_grad():
        expected = ops.linear(rows, weight, bias)
        torch.testing.assert_close(expected, F.linear(rows, weight, bias), rtol=1e-5, atol=1e-5)
        for begin, end in ((0, 1), (1, 2), (2, 19), (5, 40)):
            assert torch.equal(ops.linear(rows[begin:end], weight, bias), expected[begin:end])
        assert not torch.equal(library(rows[1:3], weight, bias), library(rows, weight, bias)[1:3])


@pytest.mark.parametrize("splits", [False, True])
def test_attention_reads_the_used_slots_where_that_changes_no_bit(
    splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads all slots if the library sums in another order when the number of keys changes."""
    read = []

    def library(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, **_: Any) -> Tensor:
        read.append(k.shape[2])
        assert attn_mask.shape[-1] == v.shape[2] == k.shape[2]
        return q * (1 + 2**-20 * k.shape[2]) if splits else q

    monkeypatch.setattr(ops, "F", type("Library", (), {"scaled_dot_product_attention": staticmethod(library)}))
    monkeypatch.setattr(ops, "_beginning_suffices", ops._beginning_suffices.__wrapped__)
    cache, among = ops.KVCache(1, 2, 2, 200, 16, torch.zeros(1)), torch.ones(1, 5, 5, dtype=torch.bool).tril()
    q = k = v = torch.randn(2, 2, 5, 16)
    for root, used in ((3, 64), (59, 64), (60, 128), (150, 192), (188, 200)):
        mask = TreeMask(torch.zeros(2, dtype=torch.int64), torch.tensor([2, root]), among)
        slots = mask.root[:, None] + torch.arange(5)
        with torch.no_grad():
            keys = cache.read(mask, 2)
            assert keys == (200 if splits else used)
            cache.attend(0, slots, q, k, v, mask.dense(torch.arange(keys)))
        assert read[-1] == keys
        assert cache.read(mask, 2) == 200  # gradients are on
    half = ops.KVCache(1, 2, 2, 200, 16, torch.zeros(1, dtype=torch.bfloat16))
    with torch.no_grad():
        assert half.read(mask, 2) == 200


def test_an_image_does_not_depend_on_the_slots_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    target, conditioning, keys = tiny.llamagen(side=10), tiny.prompts(3), [(7, i) for i in range(3)]
    seen: list[int] = []

    def decoded(a: int, b: int) -> list[Tensor]:
        config = DecoderConfig(target, window(7), rules.exact(), Sampling(cfg_scale=2.0))
        out = decode(config, conditioning.rows(a, b), RandomStreams(keys[a:b]))
        return [out.tokens, out.steps, out.trace.log_prob]

    monkeypatch.setattr(ops, "_beginning_suffices", lambda *shape: bool(seen.append(shape[4])))
    expected = decoded(0, 3)
    assert set(seen) == {64}  # the first steps; later ones would read 128, and the cache has fewer
    monkeypatch.undo()
    for a, b in ((0, 3), (0, 1), (1, 3)):
        assert all(torch.equal(x, y[a:b]) for x, y in zip(decoded(a, b), expected, strict=True))


def test_training_and_short_formats_use_plain_products() -> None:
    """No invariance is promised for them, so they need no slower products."""
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    assert torch.equal(ops.linear(x, weight), F.linear(x, weight))  # gradients are on
    with torch.no_grad():
        assert torch.equal(ops.linear(x.bfloat16(), weight.bfloat16()), F.linear(x.bfloat16(), weight.bfloat16()))


def test_long_sums_are_sums() -> None:
    for width in (1, 1000, 1 << 15, 40_001, 1 << 16):
        x = torch.rand(2, 3, width, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(ops.sum_last(x).double(), x.double().sum(-1), rtol=1e-5, atol=0)


def test_the_package_asks_the_library_for_one_order_before_its_first_product() -> None:
    """In a new process. A value that the user has set stays."""
    show = "import os, specbench; print(os.environ['MKL_CBWR'])"
    plain = {k: v for k, v in os.environ.items() if k != "MKL_CBWR"} | {"PYTHONPATH": str(TESTS.parent)}
    for env, expected in ((plain, specbench._library_mode()), (plain | {"MKL_CBWR": "COMPATIBLE"}, "COMPATIBLE")):
        assert subprocess.check_output([sys.executable, "-c", show], env=env, text=True).strip() == expected
    assert specbench._library_mode().endswith(",STRICT")
