"""A pipeline without a model: it decodes at once, or slowly, and its images depend on (seed, prompt index) alone."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specbench.config import configuration
from specbench.config.run_config import RunConfig
from specbench.decoding.batch import Decoded
from specbench.decoding.trace import Trace
from specbench.harness import run
from specbench.harness.method import shape_of
from specbench.harness.pipeline import in_batches

TOKENS = 16  # per image, a 4x4 grid
SIDE = 8


def trace(steps: list[int], indices: list[int], empty: bool) -> Trace:
    """Steps that accept as evenly as possible, the longer ones first; a draft is five deep. The statistics of
    distributions depend on the index of the image, and on the step or the position."""
    accepted, reach = (torch.zeros(len(steps), TOKENS, dtype=torch.int64) for _ in range(2))
    for b, n in enumerate(steps):
        count = 0
        for s in range(n):
            accepted[b, s] = (TOKENS - n) // n + (s < (TOKENS - n) % n)
            reach[b, s] = 0 if empty else min(accepted[b, s] + 1, TOKENS - count)
            count += int(accepted[b, s]) + 1
    drafts, position, index = reach > 0, torch.arange(TOKENS), torch.tensor(indices)[:, None]
    return Trace(
        accepted=accepted,
        reach=reach,
        first=0.5 * drafts,
        tv=(0.25 + 0.125 * (index % 2)) * drafts,
        top1=drafts & (position % 2 == 0),
        top3=1.0 * drafts,
        log_prob=-1.0 - (index % 4) - 0.5 * (position % 2),
        emitted_tv=0.125 * (1 + index % 2 + position * 0) * (not empty),
        emitted_kl=0.25 * (1 + index % 2 + position * 0) * (not empty),
        emitted_outside=torch.zeros(len(steps), TOKENS),
        emitted_kl_reverse=0.5 * (1 + index % 2 + position * 0) * (not empty),
        emitted_missed=torch.zeros(len(steps), TOKENS),
        emitted_kl_optimal=0.125 * (1 + index % 2 + position * 0) * (not empty),
        emitted_ratio=torch.full((len(steps), TOKENS), 1.0 if empty else 2.0),
    )


class FakePipeline:
    """`steps` of an image: TOKENS for vanilla, 4 + index % 4 for a method; one second of decode time per step."""

    weights = "fake:0"
    resolution = SIDE
    tokens_per_image = TOKENS
    device = torch.device("cpu")

    def __init__(self, cfg: RunConfig, delay: float = 0.0, log: Path | None = None, empty: bool = False) -> None:
        self.model, self.cfg, self.delay, self.log = cfg.model, cfg, delay, log
        self.empty = empty or cfg.drafter == "none"
        self.passes = 0 if self.empty else shape_of(cfg).passes
        self.decoded: list[tuple[str, int]] = []  # (vanilla or method, prompt index), warm-up included

    def encode(self, prompts: list[str]) -> list[str]:
        return prompts

    def unread_tokens(self, prompt: str) -> int:
        """It reads 40 words."""
        return max(0, len(prompt.split()) - 40)

    def decode(self, conditioning: list[str], keys: list[tuple[int, int]]) -> Decoded:
        assert len(conditioning) == len(keys)
        time.sleep(self.delay * len(keys))
        self.decoded += [("vanilla" if self.empty else "method", index) for _, index in keys]
        steps = [TOKENS if self.empty else 4 + index % 4 for _, index in keys]
        rows = [
            [b % 64 for b in hashlib.sha256(f"{prompt} {seed} {index} {self.empty}".encode()).digest()[:TOKENS]]
            for prompt, (seed, index) in zip(conditioning, keys)
        ]
        drafted = torch.tensor([0 if self.empty else 5 * s for s in steps])
        accepted = torch.tensor([TOKENS - s for s in steps])
        how = trace(steps, [index for _, index in keys], self.empty)
        return Decoded(torch.tensor(rows), torch.tensor(steps), drafted, accepted, float(sum(steps)), how)

    stream = in_batches

    def pixels(self, tokens: torch.Tensor) -> np.ndarray:
        grid = tokens.reshape(-1, 4, 4).numpy().astype(np.uint8) * 4
        return np.repeat(grid.repeat(2, 1).repeat(2, 2)[..., None], 3, axis=3)

    def codes(self, tokens: torch.Tensor) -> np.ndarray:
        return tokens.reshape(-1, 4, 4).numpy()

    def vanilla(self) -> FakePipeline:
        twin = type(self)(self.cfg, self.delay, empty=True)
        twin.decoded = self.decoded
        return twin

    def synchronize(self) -> None:
        pass


def at(index: int, what: Callable[[], None], empty: bool = False) -> type[FakePipeline]:
    """A pipeline with an event while it decodes an image of the method, or of the baseline."""

    class Disturbed(FakePipeline):
        def decode(self, conditioning: list[str], keys: list[tuple[int, int]]) -> Any:
            if self.empty == empty and index in [i for _, i in keys]:
                what()
            return super().decode(conditioning, keys)

    return Disturbed


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def hungry(most: int, never: tuple[int, ...] = ()) -> type[FakePipeline]:
    """A pipeline on a device with memory for `most` images at a time; the images in `never` do not fit at all."""

    class Hungry(FakePipeline):
        def decode(self, conditioning: list[str], keys: list[tuple[int, int]]) -> Any:
            if len(keys) > most or any(i in never for _, i in keys):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
            return super().decode(conditioning, keys)

    return Hungry


class Mortal(FakePipeline):
    """A pipeline whose process is killed while it decodes the method's third image, unless `flag` says that this has
    happened."""

    def decode(self, conditioning: list[str], keys: list[tuple[int, int]]) -> Decoded:
        if self.log is not None and 2 in [index for _, index in keys] and not self.log.exists():
            self.log.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().decode(conditioning, keys)


def execute(out: Path, *words: str, loader: Any = FakePipeline) -> dict[str, Any]:
    """The row of a run of six images without scores, or as the words say."""
    default = {"metrics": "none", "n": "6", "warmup": "0"}
    settings = default | dict(word.split("=", 1) for word in words)
    return run.run(
        configuration.compose([f"{name}={value}" for name, value in settings.items()]), out, loader=loader
    ).row
