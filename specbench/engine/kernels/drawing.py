"""Random numbers, a token drawn by one program from a distribution in memory, and code that all verifications share."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: The fields of a VerificationResult that kernels write: path, length, tokens, next_probs, first.
Written = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@triton.jit
def _mix(x):
    """The finaliser of SplitMix64 on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def stream(key, number):
    """The key (uint64) of the stream with this `number` (int64) of a row with `key` (int64); see
    `decoding.rng.RandomStreams`."""
    return _mix(key.to(tl.uint64, bitcast=True) + (number + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15)


@triton.jit
def _hashes(key, index):
    return _mix(key + (index + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15)


@triton.jit
def _uniform(hashes):
    return (hashes >> 41).to(tl.int32).to(tl.float32) * 1.1920928955078125e-07  # 2**-23


@triton.jit
def uniform(key, index):
    """The numbers (float32) of a stream at `index` (int64) >= 0."""
    return _uniform(_hashes(key, index))


@triton.jit
def exponential(key, index):
    """The exponential noise (float32) of a stream at `index`; see `decoding.rng.exponential`."""
    hashes = _hashes(key, index)
    further = ((hashes >> 17) & 0xFFFFFF).to(tl.int32).to(tl.float32)
    return (further + 0.5) * 7.105427357601002e-15 - tl.log(1.0 - _uniform(hashes))  # 2**-47


@triton.jit
def parts(p):
    """Probabilities as integers; see `decoding.sampling.draw_exactly`."""
    return tl.where(p > 0, p * 274877906944.0, 0.0).to(tl.int64)  # 2**38


@triton.jit
def _parts(ROW, OTHER, others, mass, at, count, LEFT: tl.constexpr):
    p = tl.load(ROW + at, mask=at < count, other=0.0)
    if LEFT:
        p = (p - tl.load(OTHER + at, mask=at < others, other=0.0)) / mass
    return parts(p)


@triton.jit
def draw_residual(ROW, OTHER, others, mass, u, count, LEFT: tl.constexpr, BLOCK: tl.constexpr):
    """The token (int64) that `decoding.sampling.draw_exactly` draws with uniform u from ROW (count,) float32; with
    LEFT, from [ROW - OTHER]_+ / mass, where OTHER (others,) float32 is zero from `others` on."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, count, BLOCK):
        total += _parts(ROW, OTHER, others, mass, start + at, count, LEFT)
    level = ((u * 8388608.0).to(tl.int64) * tl.sum(total, 0)) >> 23
    before, token = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64) + count - 1
    for start in range(0, count, BLOCK):
        block = _parts(ROW, OTHER, others, mass, start + at, count, LEFT)
        after = before + tl.sum(block, 0)
        if (before <= level) & (after > level):
            token = start + tl.sum((before + tl.cumsum(block, 0) <= level).to(tl.int64), 0)
        before = after
    return token


@triton.jit
def draw_row(ROW, u, count, BLOCK: tl.constexpr):
    """The token (int64) that `decoding.sampling.draw_exactly` draws with uniform u from ROW (count,) float32."""
    return draw_residual(ROW, ROW, 0, 1.0, u, count, False, BLOCK)


@triton.jit
def most_probable(ROW, count, BLOCK: tl.constexpr):
    """The first token (int64) with the largest probability of ROW (count,)."""
    best, token = tl.full([BLOCK], -1.0, tl.float32), tl.full([BLOCK], 0, tl.int64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p = tl.load(ROW + at, mask=at < count, other=-1.0)
        best, token = tl.where(p > best, p, best), tl.where(p > best, at, token)
    return tl.min(tl.where(best == tl.max(best, 0), token, count), 0)


@triton.jit
def _scores(ROW, without, at, key, index, count):
    """p / e (float32) of the tokens `at`, where p is from ROW (count,) float32, zero for the token `without`, and e is
    the exponential noise at `index` + `at` of the stream `key`."""
    p = tl.load(ROW + at, mask=at < count, other=0.0)
    return tl.div_rn(tl.where((p > 0) & (at != without), p, 0.0), exponential(key, index + at))


@triton.jit
def race(ROW, key, index, count, BLOCK: tl.constexpr):
    """The first token (int64) with the largest p / e of ROW (count,); see `_scores`."""
    best, token = tl.full([BLOCK], -1.0, tl.float32), tl.full([BLOCK], 0, tl.int64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        score = _scores(ROW, -1, at, key, index, count)
        better = (at < count) & (score > best)
        best, token = tl.where(better, score, best), tl.where(better, at, token)
    return tl.min(tl.where(best == tl.max(best, 0), token, count), 0)


@triton.jit
def write_scores(ROW, SCORES, without, key, index, count, BLOCK: tl.constexpr):
    """Write all `_scores` to SCORES (count,) float32."""
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(SCORES + at, _scores(ROW, without, at, key, index, count), mask=at < count)
    tl.debug_barrier()  # all threads see them


@triton.jit
def take_largest(SCORES, count, BLOCK: tl.constexpr):
    """The first token (int64) with the largest of SCORES (count,), which is set to -1."""
    token = most_probable(SCORES, count, BLOCK)
    tl.debug_barrier()  # no thread writes a value that another one still reads
    tl.store(SCORES + token, -1.0)
    tl.debug_barrier()
    return token


def of_draft(p: Tensor, draft: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[int, ...]]:
    """The arguments that kernels take for a draft with the target's distributions p (B, M, V). DRAFT: p, q, tokens, and
    which nodes are valid and which were sampled, uint8 (the latter does not matter for nodes that are not valid). TREE:
    children, slot, inner, parent, depth. Sizes: nodes, inner nodes, height, trees, vocabulary."""
    tree, valid = draft.tree, draft.valid.contiguous().view(torch.uint8)
    sampled = valid if draft.sampled is None else draft.sampled.contiguous().view(torch.uint8)
    arguments = p.contiguous(), draft.probs.contiguous(), draft.tokens.contiguous(), valid, sampled
    topology = tuple(x.contiguous() for x in (tree.children, tree.slot, tree.inner, tree.parent, tree.depth))
    return arguments, topology, (p.shape[1], tree.children.shape[1], tree.height, len(tree.children), p.shape[2])


def verdict_memory(p: Tensor, height: int) -> Written:
    """Memory for the verdict on drafts of this height, with the target's distributions p (B, M, V)."""
    rows, _, vocabulary = p.shape
    path, chosen = (torch.empty(rows, n, dtype=torch.int64, device=p.device) for n in (height, height + 1))
    length = torch.empty(rows, dtype=torch.int64, device=p.device)
    return path, length, chosen, p.new_empty(rows, vocabulary), p.new_empty(rows)


@triton.jit
def end_walk(
    PATH, LENGTH, CHOSEN, tokens, node, length, height, probs, u, vocabulary, DEEP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store the parts of an image's verdict from the end of its path on: `node` at depth `length`. tokens: of its
    nodes. The next token is drawn with u from probs (vocabulary,)."""
    depth = tl.arange(0, DEEP)
    beyond = (depth >= length) & (depth < height)
    tl.store(PATH + depth, tl.zeros([DEEP], tl.int64) + node, mask=beyond)
    tl.store(LENGTH, length)
    next_token = draw_row(probs, u, vocabulary, BLOCK)
    token = tl.where((depth == length) | (depth == height), next_token, tl.load(tokens + node))
    tl.store(CHOSEN + depth, token, mask=(depth >= length) & (depth <= height))
