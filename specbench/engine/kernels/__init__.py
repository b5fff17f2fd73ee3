"""Fused kernels (Triton) of a decoding step on CUDA, for few rows: they read every weight and every key once, and
almost nothing else. Each computes the same as the plain functions of `models.transformer` and `decoding`, which stay
the specification; they are used with `engine=triton` (`ops.Kernels`).

Measurements behind the choices: results/bench. A kernel that depends on another costs about a microsecond in a graph,
whatever it does, so the norm, SwiGLU and the sum with the residual are part of the matrix product that reads or
produces them; from a few million weights on cuBLAS reads faster than these products do.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specbench.engine.kernels import block, products, sampling, verification, window


class FusedKernels:
    """The kernels of one engine, as `ops.Kernels` describes them."""

    def probs(
        self,
        logits: Tensor,
        temperature: float,
        top_k: int | None,
        scale: float | None = None,
        forced: Tensor | None = None,
        codes: int = 0,
        positions: Tensor | None = None,
    ) -> Tensor:
        return sampling.probs(logits, temperature, top_k, scale, forced, codes, positions)

    def draw(self, probs: Tensor, u: Tensor) -> Tensor:
        return sampling.draw(probs, u)

    def uniforms(
        self,
        key: Tensor,
        step: Tensor,
        tags_per_step: int,
        tag: int,
        tags: int,
        count: int,
        index: Tensor | None = None,
    ) -> Tensor:
        return sampling.uniforms(key, step, tags_per_step, tag, tags, count, index)

    def draw_distinct(
        self, probs: Tensor, key: Tensor, step: Tensor, tags_per_step: int, tag: int, count: int
    ) -> Tensor:
        return sampling.draw_distinct(probs, key, step, tags_per_step, tag, count)

    def verify(
        self, p: Tensor, draft: Any, u: Tensor, omega: Tensor, optimal: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return verification.verify(p, draft, u, omega, optimal)

    def window(
        self, drafter: Any, state: Any, history: Tensor, count: Tensor, step: Tensor, tags: int, tag: int, noise: int
    ) -> Tensor:
        return window.window(drafter, state, history, count, step, tags, tag, noise)

    def rms_norm(self, x: Tensor, norm: Any) -> Tensor:
        return products.rms_norm(x, norm)

    def block(self, one: Any, flat: Tensor, context: Any, layer: int) -> Tensor:
        return block.block(one, flat, context, layer)
