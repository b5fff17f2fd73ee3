"""A Transformer block from fused kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from specbench.engine.kernels import launch
from specbench.engine.kernels.attention import _rotate, attend
from specbench.engine.kernels.products import project, rms_norm
from specbench.engine.masks import TreeMask


def block(one: Any, flat: Tensor, context: Any, layer: int) -> Tensor:
    """As of `Block.forward` with a cache, of positions (R n, dim) without padding."""
    rows, nodes, cache = context.rows, context.nodes, context.cache
    assert cache is not None
    assert context.slots is not None
    assert context.mask is not None
    attention, c, feed = one.attention, one.attention.cfg, one.feed_forward
    before, between = (None, None) if one.post_norm else (one.attention_norm, one.ffn_norm)
    qkv = project(flat, attention.wqkv.weight, before)
    q = flat.new_empty(rows, nodes, c.n_heads, c.head_dim)
    k, v = cache.k[layer], cache.v[layer]
    norms: list[Tensor] = [qkv] * 4
    if c.qk_norm:
        norms = [attention.q_norm.weight, attention.q_norm.bias, attention.k_norm.weight, attention.k_norm.bias]
    half = c.head_dim // 2
    launch.start(_rotate, (rows * nodes, c.n_heads + 2 * c.n_kv_heads),
        qkv, context.rope.contiguous(), context.slots.contiguous(), *norms, q, k, v, nodes, k.shape[2],
        len(context.rope), max(1, c.qk_norm), max(1, min(c.qk_norm, c.n_kv_heads)), c.n_heads, c.n_kv_heads, half,
        triton.next_power_of_2(half), c.rotary == "halves", c.qk_norm > 0, num_warps=1,
    )  # fmt: skip
    mask = context.mask
    if isinstance(mask, TreeMask):
        mask = mask.dense(torch.arange(cache.slots, device=flat.device))
    attended = attend(q, k, v, mask).view(rows * nodes, -1)
    if one.post_norm:
        flat = rms_norm(project(attended, attention.wo.weight), one.attention_norm, flat)
        inner = project(flat, feed.w1.weight, None, feed.w3.weight)
        return rms_norm(project(inner, feed.w2.weight), one.ffn_norm, flat)
    flat = project(attended, attention.wo.weight, residual=flat)
    inner = project(flat, feed.w1.weight, between, feed.w3.weight)
    return project(inner, feed.w2.weight, residual=flat)
