"""Matrix products on the CPU whose rows do not depend on each other.

An image must not depend on the images that are decoded in the same batch. A matrix library may add up a row's products
in another order when the number of rows, the row's position among them, the alignment in memory or the number of
threads changes. Whether it does so differs between processors, libraries and shapes, so it is measured. At the first
use of a shape, products of random rows are compared in many arrangements. The fastest of three methods that passes is
used from then on. Random float32 sums reveal every change of order at once. Shorter formats would often round to the
same bits, so that a comparison proves nothing: for them invariance is not guaranteed.

- all rows at once;
- multiples of `TILE` rows, padded with zeros, because libraries take another path for the rows that fill no tile;
- blocks of exactly `BLOCK` rows, padded with zeros: the library is only ever called with that number of rows;
- row by row: always the same call on the same memory layout, which nothing in the batch can change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

TILE, LARGE = 4, 192  # a product of padded rows has a multiple of TILE rows, and at most LARGE
BLOCK = 16
#: Numbers of rows that are compared. Libraries change their code path at small numbers and at multiples of their tiles.
COUNTS = (*range(1, 10), 12, 15, 16, 17, 20, 24, 28, 31, 32, 33, 36, 40, 48, 63, 64, 65, 96, 100, 128, 200)
#: The fewest sums that are compared for each number of rows. In measurements, another order changed the bits of half
#: the sums of eight products, and of fewer sums with fewer products.
_ENOUGH = 512
#: Rows in the comparison if the weight has at most `_SMALL` elements, so that the comparison costs little.
_MANY, _SMALL = 1000, 1 << 18
_LARGE = 1 << 22  # above this number of elements the weight itself is compared: a random one would take much memory

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_chosen: dict[tuple[object, ...], Product] = {}


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows @ weight.T + bias` (n, out) of contiguous rows (n, in), float32 on the CPU. On one machine and with one
    number of threads, a row's result depends only on that row, bit for bit."""
    key = (weight.shape, bias is None, torch.get_num_threads())
    method = _chosen.get(key)
    if method is None:
        method = _chosen[key] = choose(weight, bias is not None)
    return method(rows, weight, bias)


def together(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """All rows in one product."""
    return F.linear(rows, weight, bias)


def in_multiples(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Products of a multiple of `TILE` rows each, at most `LARGE`."""
    return _padded(rows, weight, bias, TILE, LARGE)


def in_blocks(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Products of exactly `BLOCK` rows each."""
    return _padded(rows, weight, bias, BLOCK, BLOCK)


def one_by_one(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Products of one row each."""
    return _joined(rows.split(1), weight, bias)


def _padded(rows: Tensor, weight: Tensor, bias: Tensor | None, multiple: int, at_most: int) -> Tensor:
    padded = F.pad(rows, (0, 0, 0, -len(rows) % multiple))  # a copy, even without padding: see `_joined`
    if len(padded) <= at_most:
        return F.linear(padded, weight, bias)[: len(rows)]
    return _joined(padded.split(at_most), weight, bias)[: len(rows)]


def _joined(parts: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Copies every part: a copy has the alignment of every new tensor, wherever its part starts."""
    products = [F.linear(part.clone(), weight, bias) for part in parts]
    return products[0] if len(products) == 1 else torch.cat(products)


def choose(weight: Tensor, biased: bool) -> Product:
    """The fastest method whose products with this weight's shape pass `holds`; the last method needs no test."""
    rng = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.empty(shape).uniform_(-1, 1, generator=rng)

    like = weight.detach() if weight.numel() > _LARGE else random(*weight.shape)
    bias = random(len(weight)) if biased else None
    rows = random(_MANY if weight.numel() <= _SMALL else max(COUNTS), weight.shape[1])
    order = torch.randperm(len(rows), generator=rng)
    methods = (together, in_multiples, in_blocks)
    return next((method for method in methods if holds(method, rows, order, like, bias)), one_by_one)


def holds(method: Product, rows: Tensor, order: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a method gives each row the same bits for every number of rows in `COUNTS`, in another `order` (a
    permutation of them) and at another alignment."""
    expected = method(rows, weight, bias)
    shifted = torch.cat([rows.new_zeros(1), rows.flatten()])[1:].view_as(rows)
    return (
        torch.equal(method(rows[order], weight, bias), expected[order])
        and torch.equal(method(shifted, weight, bias), expected)
        and all(torch.equal(*_alone(method, rows, n, expected, weight, bias)) for n in COUNTS)
    )


def _alone(
    method: Product, rows: Tensor, n: int, expected: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Products of n rows at a time, until there are `_ENOUGH` numbers, and the same rows of `expected`."""
    groups = rows.split(n)[: -(-_ENOUGH // (n * len(weight)))]
    products = torch.cat([method(group, weight, bias) for group in groups])
    return products, expected[: len(products)]
