"""Products in bfloat16 without units for them: those of the library, but for the order of their sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.engine import half

CPU = torch.device("cpu")
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "convolution": lambda x, w: F.conv2d(x, w.view(6, 4, 3, 3), padding=1),
    "linear": lambda x, w: F.linear(x, w.view(6, 36)[:, :5]),
    "product": lambda x, w: x @ w.view(6, 36)[:5, :3],
    "attention": lambda x, w: F.scaled_dot_product_attention(x, x, x),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_and_its_gradients_are_those_of_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result near the middle of two neighbours is rounded to either: at most a unit in the last place, which is 1/128
    of its value. Attention rounds its weights, too."""
    generator = torch.Generator().manual_seed(0)
    results = []
    for units in (True, False):
        monkeypatch.setattr(half, "has_units", lambda units=units: units)
        x = torch.randn(2, 4, 5, 5, generator=generator.manual_seed(1)).requires_grad_()
        w = torch.randn(216, generator=generator).requires_grad_()
        with half.bfloat16_products(CPU):
            y = PRODUCTS[name](x, w)
        y.float().square().sum().backward()
        assert y.dtype == torch.bfloat16
        results.append([y.float(), x.grad, w.grad])
    for library, ours in zip(*results, strict=True):
        if library is not None and ours is not None:
            torch.testing.assert_close(ours, library, rtol=2**-6, atol=2**-6 * float(library.abs().max()))
    library, ours = (result[0] for result in results)
    assert (library == ours).float().mean() > (0.5 if name == "attention" else 0.95)


def test_products_in_float32_and_what_autocast_leaves_alone_stay() -> None:
    x, w = torch.randn(3, 5), torch.randn(4, 5)
    with half.bfloat16_products(CPU, enabled=False):
        assert torch.equal(F.linear(x, w), torch.nn.functional.linear(x, w))
        assert F.linear(x, w).dtype == torch.float32
    with half.bfloat16_products(CPU):
        assert F.linear(x, w).dtype == torch.bfloat16
        assert x.exp().dtype == torch.float32
        with torch.autocast("cpu", enabled=False):
            assert F.linear(x, w).dtype == torch.float32


def test_tensors_in_bfloat16_are_multiplied_without_autocast_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Muon does."""
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = torch.addmm(x, x, x.T, beta=2.0)
    monkeypatch.setattr(half, "has_units", lambda: False)
    rounded, rounding = [], half._rounded
    monkeypatch.setattr(half, "_rounded", lambda value: [rounded.append(value), rounding(value)][1])
    with half.bfloat16_products(CPU, enabled=False):
        torch.mm(x, x)
    assert not rounded  # by the library
    with half.units(CPU):
        torch.mm(x, x)
        assert len(rounded) == 2
        assert (torch.addmm(x, x, x.T, beta=2.0) == expected).float().mean() > 0.9
        assert torch.equal(torch.mm(x.float(), x.float().T), x.float().mm(x.float().T))
        assert torch.mm(x.float(), x.float()).dtype == torch.float32
