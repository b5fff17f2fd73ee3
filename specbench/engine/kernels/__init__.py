"""Fused kernels (Triton) of a decoding step on CUDA, for few rows: they read every weight and every key once, and
almost nothing else. Each computes the same as the plain functions of `models.transformer` and `decoding`, which remain
the specification. They are used with `engine=triton` (`ops.Kernels`).

In a graph, a kernel that depends on another costs microseconds, whatever it does. So the norm, SwiGLU and the sum with
the residual are part of the matrix product that reads or produces them. Products of many rows or with large weights are
left to cuBLAS (`block.MOST_ROWS`, `block.MOST_WEIGHTS`), and their shapes are not tuned: at 7B cuBLAS was not slower on
an H200 (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from specbench.engine.kernels import inputs, lossless, sampling, trees, verification, window
from specbench.engine.kernels.block import LayerKernels, Stream, tune
from specbench.engine.kernels.tiles import Tiles


class FusedKernels:
    """The kernels of one engine; see `ops.Kernels`. It serves one CUDA stream at a time, because its kernels share
    counters (`attention.Counters`)."""

    probs, draw = staticmethod(sampling.probs), staticmethod(sampling.draw)
    uniforms, draw_distinct = staticmethod(sampling.uniforms), staticmethod(sampling.draw_distinct)
    verify, advance = staticmethod(verification.verify), staticmethod(verification.advance)
    verify_longest = staticmethod(verification.verify_longest)
    verify_block, traverse = staticmethod(lossless.verify_block), staticmethod(lossless.traverse)
    window = staticmethod(window.window)
    keep = staticmethod(verification.keep)
    inputs, newest, level = staticmethod(inputs.inputs), staticmethod(inputs.newest), staticmethod(inputs.level)
    grows, growth = staticmethod(trees.grows), trees.Growth
    stream = Stream

    def __init__(self, tiles: Tiles | None = None, dependent: bool = True) -> None:
        """tiles: how the layers' kernels divide their work (default: not tuned); dependent: a kernel of a layer may
        begin before the previous one has ended, on devices that support it."""
        self.layers = LayerKernels(tiles, dependent)

    def tune(self, blocks: Sequence[Any], nodes: Iterable[int], rows: int, slots: int) -> None:
        """Measure tiles for passes of `rows` sequences over each number of nodes, with the weights of some `Block`s and
        caches of `slots` positions, and use the fastest (see `tiles`). Does nothing without CUDA."""
        tune(self.layers, blocks, nodes, rows, slots)

    def rms_norm(self, x: Tensor, norm: Any) -> Tensor:
        return self.layers.rms_norm(x, norm)

    def block(self, block: Any, stream: Stream, context: Any, layer: int) -> Stream:
        return self.layers.block(block, stream, context, layer)
