"""What all ways of verification share: the flags of a draft's nodes, the memory of a verdict, and the end of a walk."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.drawing import draw_row

#: The fields of a Verdict that kernels write: path, length, tokens, next_probs, first.
Written = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def draft_flags(draft: Any) -> tuple[Tensor, Tensor]:
    """Which nodes of a draft are valid, and which tokens were sampled, (B, M) uint8 each. Whether the token of a node
    that is not valid was sampled does not matter."""
    valid = draft.valid.contiguous().view(torch.uint8)
    return valid, valid if draft.sampled is None else draft.sampled.contiguous().view(torch.uint8)


def verdict_memory(p: Tensor, height: int) -> Written:
    """Memory for the verdict of drafts of this height, with the target's distributions p (B, M, V)."""
    rows, _, vocabulary = p.shape
    path, chosen = (torch.empty(rows, n, dtype=torch.int64, device=p.device) for n in (height, height + 1))
    length = torch.empty(rows, dtype=torch.int64, device=p.device)
    return path, length, chosen, p.new_empty(rows, vocabulary), p.new_empty(rows)


@triton.jit
def end_walk(
    PATH, LENGTH, CHOSEN, tokens, node, length, height, probs, u, vocabulary, DEEP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store what a verdict has of an image from the end of its path on, `node` at depth `length`; tokens: of its nodes;
    the token that follows is drawn with u from probs (vocabulary,)."""
    depth = tl.arange(0, DEEP)
    beyond = (depth >= length) & (depth < height)
    tl.store(PATH + depth, tl.zeros([DEEP], tl.int64) + node, mask=beyond)
    tl.store(LENGTH, length)
    next_token = draw_row(probs, u, vocabulary, BLOCK)
    token = tl.where((depth == length) | (depth == height), next_token, tl.load(tokens + node))
    tl.store(CHOSEN + depth, token, mask=(depth >= length) & (depth <= height))
