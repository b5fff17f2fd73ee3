"""Distributions from logits, and tokens from distributions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels import launch
from specbench.engine.kernels.drawing import draw_row, stream, take_largest, uniform, write_scores

#: Tokens that a program holds in registers (`_probs`, at most 32,767), and that other programs read at once; the
#: compiler's options.
_HELD, _BLOCK, _OPTIONS = 8192, 4096, launch.DISTRIBUTIONS
#: Numbers of a stream that a program computes.
_NUMBERS = 1024


@triton.jit
def _ordered(x):
    """Numbers as unsigned integers in the same order; zero becomes a single integer."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _number(ordered):
    bits = tl.where((ordered >> 31) != 0, ordered ^ 0x80000000, ordered ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _guided(ROW, without, at, vocabulary, scale, forced, codes, temperature, GUIDED: tl.constexpr):
    """Logits of tokens `at`: guided, minus infinity where the grammar forbids, divided by the temperature."""
    inside = at < vocabulary  # true for whole groups of 16; a mask from the grammar would make every load scalar
    allowed = inside & tl.where(forced < 0, at < codes, at == forced)
    x = tl.load(ROW + at, mask=inside, other=0.0).to(tl.float32)
    if GUIDED:
        unconditional = tl.load(ROW + without + at, mask=inside, other=0.0).to(tl.float32)
        x = unconditional + scale * (x - unconditional)
    return tl.where(allowed, tl.div_rn(x, temperature), -float("inf"))


@triton.jit
def _lowest(x):
    """The lowest of the numbers above minus infinity."""
    return tl.min(tl.where(x > -float("inf"), x, float("inf")), 0)


@triton.jit
def _at_least(x, second, third):
    """How many of at most 32,767 numbers are at least `second`, plus 65,536 for each that is at least `third`."""
    return tl.sum((x >= second).to(tl.int32) + (x >= third).to(tl.int32) * 65536, 0)


@triton.jit
def _between(low, high, share: tl.constexpr):
    """An integer of `_ordered` above `low` and below `high`, whose number is near this share of the way."""
    number = _number(low) * (1.0 - share) + _number(high - 1) * share
    return tl.minimum(tl.maximum(_ordered(number), low + 1), high - 1)


@triton.jit
def _weight(x, top, least, CUT: tl.constexpr):
    """Softmax weights; NaN stays."""
    weight = tl.exp(x - top)
    if CUT:
        weight = tl.where((x >= least) | (x != x), weight, 0.0)
    return weight


@triton.jit
def _probs(
    LOGITS, FORCED, POSITIONS, PROBS, nodes, vocabulary, row_stride, node_stride, without, length, codes, scale,
    temperature, top_k, GUIDED: tl.constexpr, GRAMMAR: tl.constexpr, CUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The distribution after one node. Tokens up to BLOCK are held in registers. The logits of the others are stored
    where their probabilities will be."""
    here = tl.program_id(0).to(tl.int64)
    row, out = LOGITS + here // nodes * row_stride + here % nodes * node_stride, PROBS + here * vocabulary
    offsets = tl.arange(0, BLOCK)
    forced = tl.full([], -1, tl.int64)
    if GRAMMAR:
        forced = tl.load(FORCED + tl.minimum(tl.maximum(tl.load(POSITIONS + here), 0), length - 1))
    in_registers = _guided(row, without, offsets, vocabulary, scale, forced, codes, temperature, GUIDED)
    top, least = tl.max(in_registers, 0), _lowest(in_registers)
    for start in range(BLOCK, vocabulary, BLOCK):
        at = start + offsets
        x = _guided(row, without, at, vocabulary, scale, forced, codes, temperature, GUIDED)
        tl.store(out + at, x, mask=at < vocabulary)
        top, least = tl.maximum(top, tl.max(x, 0)), tl.minimum(least, _lowest(x))
    tl.debug_barrier()
    if CUT:  # a number that top_k numbers reach: exactly so many, or it is the top_k-th largest one
        low, high, reached = _ordered(least), _ordered(top) + 1, vocabulary
        while (reached > top_k) & (high > low + 1) & (top < float("inf")):
            second, third = _between(low, high, 1 / 3), _between(low, high, 2 / 3)
            counts = _at_least(in_registers, _number(second), _number(third))
            of_second, of_third = counts % 65536, counts // 65536
            for start in range(BLOCK, vocabulary, BLOCK):
                x = tl.load(out + start + offsets, mask=start + offsets < vocabulary, other=-float("inf"))
                counts = _at_least(x, _number(second), _number(third))
                of_second, of_third = of_second + counts % 65536, of_third + counts // 65536
            high = tl.where(of_third >= top_k, high, tl.where(of_second >= top_k, third, second))
            low = tl.where(of_third >= top_k, third, tl.where(of_second >= top_k, second, low))
            reached = tl.where(of_third >= top_k, of_third, tl.where(of_second >= top_k, of_second, reached))
        least = _number(low)
    weight = _weight(in_registers, top, least, CUT)
    total = tl.sum(weight, 0)
    for start in range(BLOCK, vocabulary, BLOCK):
        x = tl.load(out + start + offsets, mask=start + offsets < vocabulary, other=-float("inf"))
        total += tl.sum(_weight(x, top, least, CUT), 0)
    tl.store(out + offsets, weight / total, mask=offsets < vocabulary)
    for start in range(BLOCK, vocabulary, BLOCK):
        at = start + offsets
        x = tl.load(out + at, mask=at < vocabulary, other=-float("inf"))
        tl.store(out + at, _weight(x, top, least, CUT) / total, mask=at < vocabulary)


def probs(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    scale: float | None = None,
    forced: Tensor | None = None,
    codes: int = 0,
    positions: Tensor | None = None,
) -> Tensor:
    """Distributions (B, n, V) float32 from logits (R, n, V); see `Sampling.distributions`, at a temperature above 0 and
    without top-p. scale: of the guidance, or None without guidance, where R = B; forced (T,) int64: the only token that
    an image position may have, -1 for all `codes`; positions (B, n) int64: in the image."""
    rows, nodes, vocabulary = logits.shape
    if logits.stride(2) != 1:
        logits = logits.contiguous()
    rows = rows if scale is None else rows // 2
    out = logits.new_empty(rows, nodes, vocabulary, dtype=torch.float32)
    grammar = forced is not None and positions is not None
    at = [logits, logits] if forced is None or positions is None else [forced, positions.contiguous()]
    launch.start(_probs, (rows * nodes,),
        logits, *at, out, nodes, vocabulary, logits.stride(0), logits.stride(1), rows * logits.stride(0), len(at[0]),
        codes if grammar else vocabulary, 1.0 if scale is None else scale, temperature, top_k or 0, scale is not None,
        grammar, top_k is not None and top_k < vocabulary,
        min(_HELD, triton.next_power_of_2(vocabulary)), **_OPTIONS,
    )  # fmt: skip
    return out


@triton.jit
def _draw(P, U, OUT, count, p_stride, u_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(OUT + row, draw_row(P + row * p_stride, tl.load(U + row * u_stride), count, BLOCK))


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Tokens (...) int64 from probs (..., V) with uniforms u (...); see `decoding.sampling.draw_exactly`."""
    shape, vocabulary = u.shape, probs.shape[-1]
    if u.dim() != 1 or probs.stride(1) != 1:  # rows of a larger tensor are read in place
        probs, u = probs.contiguous().view(-1, vocabulary), u.contiguous().view(-1)
    out = torch.empty(shape, dtype=torch.int64, device=u.device)
    launch.start(_draw, (u.numel(),),
        probs, u, out, vocabulary, probs.stride(0), u.stride(0), min(_BLOCK, triton.next_power_of_2(vocabulary)),
        **_OPTIONS,
    )  # fmt: skip
    return out


@triton.jit
def _uniforms(
    KEY, STEP, INDEX, OUT, steps_tags, first, tags, count, index_stride, GIVEN: tl.constexpr, BLOCK: tl.constexpr
):
    """Some numbers of one tag of a row."""
    tag_of_row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tag_of_row // tags
    key = stream(tl.load(KEY + row), tl.load(STEP + row) * steps_tags + first + tag_of_row % tags)
    index = at.to(tl.int64)
    if GIVEN:
        index = tl.load(INDEX + row * index_stride + at, mask=at < count, other=0)
    tl.store(OUT + tag_of_row * count + at, uniform(key, index), mask=at < count)


def uniforms(
    key: Tensor, step: Tensor, tags_per_step: int, tag: int, tags: int, count: int, index: Tensor | None = None
) -> Tensor:
    """See `RandomStreams`: numbers (rows, tags, count) of `tags` tags from `tag` on, for rows with `key` (rows,) int64
    at `step` (rows,) int64. index (count,) or (rows, count) int64: the numbers to return, instead of the first ones."""
    rows = len(key)
    out = torch.empty(rows, tags, count, device=key.device)
    if out.numel():
        block = min(_NUMBERS, triton.next_power_of_2(count))
        index = None if index is None else index.contiguous()
        launch.start(_uniforms, (rows * tags, triton.cdiv(count, block)),
            key, step, key if index is None else index, out, tags_per_step, tag, tags, count,
            0 if index is None or index.dim() == 1 else count, index is not None, block,
        )  # fmt: skip
    return out


@triton.jit
def _draw_distinct(P, KEY, STEP, SCORES, OUT, steps_tags, tag, nodes, vocabulary, wanted, BLOCK: tl.constexpr):
    """The tokens after one node, those with the largest p / e; equal ones come in the order of their numbers."""
    here = tl.program_id(0).to(tl.int64)
    row = here // nodes
    key = stream(tl.load(KEY + row), tl.load(STEP + row) * steps_tags + tag)
    scores = SCORES + here * vocabulary
    write_scores(P + here * vocabulary, scores, -1, key, here % nodes * vocabulary, vocabulary, BLOCK)
    for i in range(wanted):
        tl.store(OUT + here * wanted + i, take_largest(scores, vocabulary, BLOCK))


def draw_distinct(probs: Tensor, key: Tensor, step: Tensor, tags_per_step: int, tag: int, count: int) -> Tensor:
    """See `decoding.sampling.sample_distinct`: `count` tokens (B, n, count) int64, at most V, from probs (B, n, V).
    key, step: see `uniforms`."""
    rows, nodes, vocabulary = probs.shape
    assert count <= vocabulary
    probs = probs.contiguous()
    out = torch.empty(rows, nodes, count, dtype=torch.int64, device=probs.device)
    launch.start(_draw_distinct, (rows * nodes,),
        probs, key, step, torch.empty_like(probs), out, tags_per_step, tag, nodes, vocabulary, count,
        min(_BLOCK, triton.next_power_of_2(vocabulary)), **_OPTIONS,
    )  # fmt: skip
    return out
