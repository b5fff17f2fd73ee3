"""Fused kernels (Triton) of a decoding step on CUDA, for few rows: they read every weight and every key once, and
almost nothing else. Each computes the same as the plain functions of `models.transformer` and `decoding`, which stay
the specification; they are used with `engine=triton` (`ops.Kernels`).

Measurements behind the choices: results/bench. A kernel that depends on another costs about a microsecond in a graph,
whatever it does, so the norm, SwiGLU and the sum with the residual are part of the matrix product that reads or
produces them; from a few million weights on cuBLAS reads faster than these products do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from specbench.engine.kernels import inputs, sampling, verification, window
from specbench.engine.kernels.block import LayerKernels, Stream
from specbench.engine.kernels.tiles import Tiles
from specbench.engine.kernels.tuning import tune


class FusedKernels:
    """The kernels of one engine, as `ops.Kernels` describes them. It serves one CUDA stream at a time: its kernels
    share counters (`attention.Counters`)."""

    def __init__(self, tiles: Tiles | None = None, dependent: bool = True) -> None:
        """tiles: how the layers' kernels divide their work (default: not tuned); dependent: whether a kernel of a layer
        may begin before the one in front of it has ended, on devices that can."""
        self.layers = LayerKernels(tiles, dependent)

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

    def advance(
        self, history: Tensor, count: Tensor, steps: Tensor, tokens: Tensor, length: Tensor, total: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return verification.advance(history, count, steps, tokens, length, total)

    def keep(self, k: Tensor, v: Tensor, path: Tensor, length: Tensor, count: Tensor, first: int) -> None:
        verification.keep(k, v, path, length, count, first)

    def window(
        self, drafter: Any, state: Any, history: Tensor, count: Tensor, step: Tensor, tags: int, tag: int, noise: int
    ) -> Tensor:
        return window.window(drafter, state, history, count, step, tags, tag, noise)

    def tune(self, blocks: Sequence[Any], rows: Iterable[int]) -> None:
        """Measure tiles for products of so many rows with the weights of some `Block`s, and keep the fastest (see
        `tiles`). Without CUDA nothing happens."""
        tune(self.layers, blocks, rows)

    def inputs(
        self, session: Any, tokens: Tensor, positions: Tensor, count: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return inputs.inputs(session, tokens, positions, count)

    def newest(
        self, session: Any, head: Any, history: Tensor, count: Tensor, fresh: Tensor, known: Tensor, start: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return inputs.newest(session, head, history, count, fresh, known, start)

    def level(self, session: Any, head: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return inputs.level(session, head, *given)

    def rms_norm(self, x: Tensor, norm: Any) -> Tensor:
        return self.layers.rms_norm(x, norm)

    def stream(self, flat: Tensor) -> Stream:
        return Stream(flat)

    def block(self, one: Any, stream: Stream, context: Any, layer: int) -> Stream:
        return self.layers.block(one, stream, context, layer)
