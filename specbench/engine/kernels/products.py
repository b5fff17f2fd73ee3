"""Products of few rows with a weight matrix, with the norm, SwiGLU or the residual in the same kernel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from specbench.engine.kernels import launch

#: Rows and weights up to which a product is done here; beyond, by cuBLAS.
MOST_ROWS, MOST_WEIGHTS = 16, 1 << 23
#: Rows up to which products are sums of scalars; above, the matrix units take 16 rows at once.
_FEW = 4


@triton.jit
def _load_rows(X, NORM, scale, rm, rk, rows, k, width, NORMED: tl.constexpr):
    """Inputs (BM, BK) at columns k + rk, after the norm."""
    inside = (rm < rows)[:, None] & (k + rk < width)[None, :]
    x = tl.load(X + rm[:, None] * width + (k + rk)[None, :], mask=inside, other=0.0)
    if NORMED:
        weight = tl.load(NORM + k + rk, mask=k + rk < width, other=0.0)
        x = (x.to(tl.float32) * scale[:, None]).to(x.dtype) * weight[None, :]
    return x


@triton.jit
def _add_product(acc, x, W, rn, rk, k, count, width, MATRIX: tl.constexpr):
    """acc + x (BM, BK) times the weights' columns; scalars are summed at the end, acc (BM, BN, BK)."""
    inside = (rn < count)[:, None] & (k + rk < width)[None, :]
    w = tl.load(
        W + rn[:, None].to(tl.int64) * width + (k + rk)[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
    )
    if MATRIX:
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    else:
        acc += x.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :]
    return acc


@triton.jit
def _project(
    X, W, W3, NORM, RES, Y, rows, count, width, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, MATRIX: tl.constexpr,
):  # fmt: skip
    rn, rm, rk = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BK)
    scale = tl.zeros([BM], tl.float32)
    if NORMED:
        for k in range(0, width, BK):
            x = _load_rows(X, NORM, scale, rm, rk, rows, k, width, False).to(tl.float32)
            scale += tl.sum(x * x, 1)
        scale = tl.rsqrt(scale / width + eps)
    if MATRIX:
        acc = tl.zeros([BM, BN], tl.float32)
        acc3 = tl.zeros([BM, BN], tl.float32)
    else:
        acc = tl.zeros([BM, BN, BK], tl.float32)
        acc3 = tl.zeros([BM, BN, BK], tl.float32)
    for k in range(0, width, BK):
        x = _load_rows(X, NORM, scale, rm, rk, rows, k, width, NORMED)
        acc = _add_product(acc, x, W, rn, rk, k, count, width, MATRIX)
        if GATED:
            acc3 = _add_product(acc3, x, W3, rn, rk, k, count, width, MATRIX)
    if not MATRIX:
        acc = tl.sum(acc, 2)
        if GATED:
            acc3 = tl.sum(acc3, 2)
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc3
    cell = rm[:, None] * count + rn[None, :]
    inside = (rm < rows)[:, None] & (rn < count)[None, :]
    if ADDED:
        acc += tl.load(RES + cell, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + cell, acc.to(Y.dtype.element_ty), mask=inside)


def project(
    x: Tensor,
    weight: Tensor,
    norm: nn.Module | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """norm(x) @ weight.T of x (rows, in): (rows, out); with a `gate` (out, in) SwiGLU of the two products, of which
    weight's is activated; `residual` (rows, out) is added. norm: an RMSNorm, or none."""
    normed = not isinstance(norm, nn.Identity | None)
    rows, width = x.shape
    if rows > MOST_ROWS or weight.numel() > MOST_WEIGHTS:
        x = x if norm is None else rms_norm(x, norm)
        if residual is not None:
            return torch.addmm(residual, x, weight.T)
        y = F.linear(x, weight)
        return y if gate is None else swiglu(y, F.linear(x, gate))
    count, matrix = len(weight), rows > _FEW
    y = x.new_empty(rows, count)
    block = max(16, triton.next_power_of_2(rows)) if matrix else triton.next_power_of_2(rows)
    over, deep = (16, 256) if matrix else (4, 512)
    scale: Any = norm
    launch.start(_project, (triton.cdiv(count, over),),
        x, weight, weight if gate is None else gate, scale.weight if normed else weight,
        x if residual is None else residual, y, rows, count, width, scale.eps if normed else 0.0,
        block, over, min(deep, max(16, triton.next_power_of_2(width))),
        normed, gate is not None, residual is not None, matrix, num_warps=4, num_stages=4 if matrix else 2,
    )  # fmt: skip
    return y


@triton.jit
def _rms_norm(X, NORM, RES, Y, width, eps, BLOCK: tl.constexpr, ADDED: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64) * width, tl.arange(0, BLOCK)
    given = tl.load(X + row + at, mask=at < width, other=0.0)
    x = given.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    y = (x * scale).to(given.dtype) * tl.load(NORM + at, mask=at < width, other=0.0)
    if ADDED:
        y += tl.load(RES + row + at, mask=at < width, other=0.0)
    tl.store(Y + row + at, y, mask=at < width)


def rms_norm(x: Tensor, norm: Any, residual: Tensor | None = None) -> Tensor:
    """As of `RMSNorm`, or of an identity instead, of x (..., dim); `residual`, of the same shape, is added."""
    if isinstance(norm, nn.Identity):
        return x if residual is None else x + residual
    x, width = x.contiguous(), x.shape[-1]
    y = torch.empty_like(x)
    launch.start(_rms_norm, (x.numel() // width,),
        x, norm.weight, x if residual is None else residual, y, width, norm.eps,
        triton.next_power_of_2(width), residual is not None,
    )  # fmt: skip
    return y


@triton.jit
def _swiglu(A, B, Y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(A + at, mask=at < count, other=0.0).to(tl.float32)
    b = tl.load(B + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(Y + at, (a * tl.sigmoid(a) * b).to(Y.dtype.element_ty), mask=at < count)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b of contiguous tensors of one shape."""
    y = torch.empty_like(a)
    launch.start(_swiglu, (triton.cdiv(a.numel(), 1024),), a, b, y, a.numel(), 1024)
    return y
