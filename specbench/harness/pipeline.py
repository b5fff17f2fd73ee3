"""A model, a drafter and a rule combined: prompts in, tokens and images out. The harness uses no layer below this."""

from __future__ import annotations

import importlib.util
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.config import parameters, registry
from specbench.config.run_config import RunConfig
from specbench.decoding import continuous
from specbench.decoding.batch import BatchDecoding, Decoded, decode_stream
from specbench.decoding.drafters.none import NoDraft
from specbench.decoding.loop import DecoderConfig, Decoding, Override, decode
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules import exact
from specbench.decoding.trace import Trace
from specbench.engine.clock import Clock, synchronize
from specbench.engine.graph import Eager, Graphs
from specbench.errors import NumberError, UsageError, check_choice
from specbench.harness.method import build_continuous, build_method
from specbench.storage import home

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """The device of `device=`; "auto" is the GPU if one exists, else the CPU. A numbered GPU becomes the current device
    of this thread, where streams, events, recordings and Triton's kernels are made. UsageError if the device does not
    exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"device={name} needs CUDA, but no CUDA device is visible: use device=cpu or device=auto")
    kind, _, number = name.partition(":")
    if kind == "cuda" and number:
        if int(number) >= (count := torch.cuda.device_count()):
            devices = ", ".join(f"cuda:{i}" for i in range(count))
            raise UsageError(f"device={name} does not exist; the visible CUDA devices are {devices}")
        torch.cuda.set_device(int(number))
    return torch.device(name)


def engine_of(cfg: RunConfig, device: torch.device) -> Eager | Graphs:
    """The engine that executes the steps. Raises UsageError if it cannot run on this device."""
    name = cfg.engine
    if name == "eager":
        return Eager()
    if device.type != "cuda":
        raise UsageError(f"engine={name} records CUDA graphs, but the device is {device}: use engine=eager")
    check_engine(cfg)
    if name != "triton":
        return Graphs()
    if importlib.util.find_spec("triton") is None:
        raise UsageError("engine=triton needs Triton, which comes with PyTorch's CUDA builds: use engine=graph")
    return _fused(device)


def _fused(device: torch.device) -> Graphs:
    """The engine of fused kernels, with the tiles that were tuned for this device, if any."""
    from specbench.engine.kernels import FusedKernels
    from specbench.engine.kernels.tiles import Tiles

    return Graphs(kernels=FusedKernels(Tiles.load(home.tiles_file(torch.cuda.get_device_name(device)))))


def check_engine(cfg: RunConfig) -> None:
    """Raises UsageError if the engine cannot execute the model on any device."""
    if cfg.engine == "triton" and parameters.is_continuous("model", cfg.model):
        raise UsageError(
            f"engine=triton needs discrete tokens, but {cfg.model} has continuous tokens: use engine=graph"
        )


def load_model(cfg: RunConfig) -> tuple[torch.device, Any]:
    """The device and the loaded model of a configuration, without its drafter."""
    device = resolve_device(cfg.device)
    check_choice("dtype", cfg.dtype, tuple(DTYPES))
    if device.type == "cpu" and parameters.world("model", cfg.model) and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # two are hardly faster for its small products, and ten times slower under load
    return device, registry.find("model", cfg.model)(cfg, device, DTYPES[cfg.dtype])


@dataclass
class Finished:
    """Finished images.

    which: their positions among the prompts; decoded: their batch; text_s: seconds of text encoding since the previous
    ones; batch: how many images were decoded together.
    """

    which: list[int]
    decoded: Decoded[Any]
    text_s: float
    batch: int


def in_batches(
    pipeline: Any,
    prompts: Sequence[str],
    keys: Sequence[tuple[int, int]],
    batch: int,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Finished]:
    """Decodes one batch after another until `stop` returns true; keys: (seed, prompt index) of each prompt."""
    for first in range(0, len(prompts), batch):
        if stop():
            return
        part = slice(first, first + batch)
        pipeline.synchronize()
        before = time.perf_counter()
        conditioning = pipeline.encode(list(prompts[part]))
        pipeline.synchronize()
        text_s = time.perf_counter() - before
        decoded = pipeline.decode(conditioning, list(keys[part]))
        which = list(range(len(prompts))[part])
        yield Finished(which, decoded, text_s, len(which))


@contextmanager
def _naming(model: str) -> Iterator[None]:
    """Puts the model's name before the message of a NumberError."""
    try:
        yield
    except NumberError as e:
        raise NumberError(f"{model}: {e}") from None


class BasePipeline(ABC):
    """A loaded model on its device, its name, and the label of its weights in a row (see registry.weights_label)."""

    def __init__(self, model: Any, device: torch.device, name: str, weights: str, engine: Eager | Graphs) -> None:
        self.model, self.device, self.name, self.weights, self.engine = model, device, name, weights, engine

    @property
    def resolution(self) -> int:
        return int(self.model.resolution)

    @property
    def tokens_per_image(self) -> int:
        return int(self.model.target.length)

    def encode(self, prompts: list[str]) -> Any:
        return self.model.encode(prompts)

    def unread_tokens(self, prompt: str) -> int | None:
        """The number of tokens at the end of a prompt that the model does not read; None if it does not say (a
        plug-in's model need not)."""
        count = getattr(self.model, "unread_tokens", None)
        return None if count is None else int(count(prompt))

    @abstractmethod
    def images(self, conditioning: Any, rng: RandomStreams) -> BatchDecoding:
        """A decoding with one image per row of `rng`, to be executed step by step."""

    @abstractmethod
    def decode(self, conditioning: Any, keys: list[tuple[int, int]]) -> Decoded[Any]:
        """Decodes one image per (seed, prompt index) in `keys`; conditioning: of as many prompts."""

    @abstractmethod
    def vanilla(self) -> BasePipeline:
        """The baseline: the same loaded target without a draft, on an engine of the same kind."""

    @property
    @abstractmethod
    def passes(self) -> int:
        """Forward passes of a drafter network in each step."""

    @property
    @abstractmethod
    def uneven(self) -> bool:
        """Whether images can need different numbers of steps."""

    @property
    def stepper(self) -> Eager | Graphs:
        """The engine that executes the steps of `images`."""
        return self.engine

    def stream(
        self,
        prompts: Sequence[str],
        keys: Sequence[tuple[int, int]],
        batch: int,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Finished]:
        """Decodes one image per prompt, `batch` at a time, and yields the images in the order in which they finish.

        If images are uneven, the next image starts as soon as a row of the batch is finished. After `stop` returns
        true, no image is started, and the images in progress are finished. keys: (seed, prompt index) of each prompt.
        """
        if batch == 1 or not self.uneven:
            yield from in_batches(self, prompts, keys, batch, stop)
            return
        spent = 0.0

        def encode(which: list[int]) -> Any:
            nonlocal spent
            self.synchronize()
            before = time.perf_counter()
            conditioning = self.encode([prompts[i] for i in which])
            self.synchronize()
            spent += time.perf_counter() - before
            return conditioning

        def rng(which: list[int]) -> RandomStreams:
            return RandomStreams([keys[i] for i in which], self.device)

        images = decode_stream(self.images, encode, rng, len(prompts), batch, self.stepper, stop)
        while True:
            with _naming(self.name):
                done = next(images, None)
            if done is None:
                return
            yield Finished(*done, spent, min(batch, len(prompts)))
            spent = 0.0

    def pixels(self, tokens: Tensor) -> np.ndarray:
        pixels: np.ndarray = self.model.pixels(tokens)
        return pixels

    def codes(self, tokens: Tensor) -> np.ndarray | None:
        """The codes (B, rows, columns) of images as the pixel tokenizer numbers them, without the tokens between them;
        None if tokens are not codes, or if the model does not define the codes."""
        return None

    def synchronize(self) -> None:
        synchronize(self.device)


class Pipeline(BasePipeline):
    """A model with discrete tokens; `decode` returns tokens (B, T) int64."""

    def __init__(
        self, model: Any, config: DecoderConfig, device: torch.device, name: str, weights: str, engine: Eager | Graphs
    ) -> None:
        super().__init__(model, device, name, weights, engine)
        self.config = config

    @classmethod
    def load(cls, cfg: RunConfig) -> Pipeline | ContinuousPipeline:
        """Loads the pipeline of a configuration: model, weights, device, dtype, drafter, rule and their parameters."""
        return cls.assemble(cfg, *load_model(cfg))

    @classmethod
    def assemble(cls, cfg: RunConfig, device: torch.device, model: Any) -> Pipeline | ContinuousPipeline:
        """Combines a loaded model with the method of a configuration."""
        if parameters.is_continuous("model", cfg.model):
            drafter, rule = build_continuous(cfg, model)
            weights, engine = registry.weights_label(cfg), engine_of(cfg, device)
            return ContinuousPipeline(model, drafter, rule, device, cfg.model, weights, engine)
        method, weights = build_method(cfg, model), registry.weights_label(cfg)
        return cls(model, method, device, cfg.model, weights, engine_of(cfg, device))

    @property
    def passes(self) -> int:
        return self.config.drafter.shape.passes

    def vanilla(self) -> Pipeline:
        sampling, draws = self.config.sampling, self.config.emitted_draws
        return self._of(DecoderConfig(self.model.target, NoDraft(), exact(), sampling, emitted_draws=draws))

    def overridden(self, override: Override) -> Pipeline:
        """The same pipeline with an override of the rule's decisions; does not measure the emitted distribution."""
        return self._of(replace(self.config, override=override, emitted_draws=0))

    def _of(self, config: DecoderConfig) -> Pipeline:
        return Pipeline(self.model, config, self.device, self.name, self.weights, self.engine.fresh())

    def decode(self, conditioning: Any, keys: list[tuple[int, int]]) -> Decoded[Trace]:
        with _naming(self.name):
            return decode(self.config, conditioning, RandomStreams(keys, self.device), self.engine)

    def images(self, conditioning: Any, rng: RandomStreams, clock: Clock | None = None) -> Decoding:
        return Decoding(self.config, conditioning, rng, clock, self.engine.kernels)

    def codes(self, tokens: Tensor) -> np.ndarray | None:
        code_grid = getattr(self.model, "code_grid", None)  # optional in a plug-in's model
        return None if code_grid is None else code_grid(tokens).cpu().numpy()

    @property
    def uneven(self) -> bool:
        return self.config.drafter.shape.height > 0


class ContinuousPipeline(BasePipeline):
    """A model with continuous tokens and its smaller drafter; `decode` returns tokens (B, T, D)."""

    def __init__(
        self,
        model: Any,
        drafter: continuous.ContinuousModel | None,
        rule: continuous.ContinuousRule,
        device: torch.device,
        name: str,
        weights: str,
        engine: Eager | Graphs,
    ) -> None:
        super().__init__(model, device, name, weights, engine)
        self.drafter, self.rule = drafter, rule

    @property
    def passes(self) -> int:
        return self.rule.gamma

    def vanilla(self) -> ContinuousPipeline:
        rule = continuous.ContinuousRule(temperature=self.rule.temperature, final_noise=self.rule.final_noise)
        return ContinuousPipeline(self.model, None, rule, self.device, self.name, self.weights, self.engine.fresh())

    def images(self, conditioning: Any, rng: RandomStreams) -> continuous.ContinuousDecoding:
        target = self.model.target
        return continuous.ContinuousDecoding(target, self.drafter, self.rule, conditioning, rng, engine=self.engine)

    @property
    def uneven(self) -> bool:
        return self.rule.gamma > 0

    @property
    def stepper(self) -> Eager:
        """The host runs each pass, and the engine only the trajectories in it."""
        return Eager()

    def decode(
        self, conditioning: Any, keys: list[tuple[int, int]], clock: Clock | None = None
    ) -> Decoded[continuous.ContinuousTrace]:
        """clock: see `continuous.decode`."""
        rng, target = RandomStreams(keys, self.device), self.model.target
        with _naming(self.name):
            return continuous.decode(
                target, self.drafter, self.rule, conditioning, rng, clock=clock, engine=self.engine
            )
