"""A loaded model, and decoding with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specbench.api.arguments import overrides
from specbench.api.results import DecodedPrompts
from specbench.config import configuration, parameters
from specbench.errors import UsageError

if TYPE_CHECKING:
    from specbench.harness.pipeline import ContinuousPipeline, Pipeline

#: Parameters that the loaded networks have; the others can change from one call of `decode` to the next.
_LOADED = (
    "model",
    "weights",
    "reduced",
    "size",
    "prompt_length",
    "instruction",
    "suffix",
    "negative",
    "drafter_weights",
    "device",
    "dtype",
)


class LoadedModel:
    """A target model on its device. Drafters and rules are built when `decode` needs them."""

    def __init__(self, method: str | None, given: Mapping[str, Any]) -> None:
        """method, given: of `specbench.load`."""
        from specbench.harness.pipeline import load_model

        self._method, self._given = method, dict(given)
        self.config = self._configuration(None, {})
        self.device, self._model = load_model(self.config)
        self._pipeline: tuple[str, Pipeline | ContinuousPipeline] | None = None  # the last one, by its configuration

    @property
    def name(self) -> str:
        """Of the model."""
        return str(self.config["model"])

    @property
    def resolution(self) -> int:
        """Side of an image in pixels."""
        return int(self._model.resolution)

    @property
    def tokens_per_image(self) -> int:
        return int(self._model.target.length)

    def __repr__(self) -> str:
        return f"<{self.name} on {self.device}, {self.resolution} pixels, {self.tokens_per_image} tokens an image>"

    def decode(
        self, prompts: str | Sequence[str], method: str | None = None, *, seed: int = 0, first: int = 0, **given: Any
    ) -> DecodedPrompts:
        """Decodes prompts together, as one batch.

        Args:
            prompts: B prompts, or one.
            method: the preset; None takes the one of `specbench.load`, with its parameters.
            seed, first: image i has the random stream (seed, first + i). With first=0, the first prompts of a run with
                this seed become the images of that run.
            given: parameters of the method and of the sampling.

        Raises UsageError for bad parameters, those of `specbench.load`, and absent weights of a drafter.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise UsageError("decode needs one prompt or a list of prompts, each a text")
        cfg = self._configuration(method, {**given, "seed": seed})
        pipeline = self._built(cfg)
        keys = [(seed, first + i) for i in range(len(texts))]
        decoded = pipeline.decode(pipeline.encode(texts), keys)
        pipeline.synchronize()
        return DecodedPrompts(
            texts,
            cfg,
            decoded.tokens.cpu().numpy(),
            pipeline.pixels(decoded.tokens),
            decoded.steps.cpu().numpy(),
            decoded.drafted.cpu().numpy(),
            decoded.accepted.cpu().numpy(),
            decoded.seconds,
            decoded.trace,
        )

    def _configuration(self, method: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
        """The checked configuration of `decode`; of a method that replaces that of `load`, only the parameters that
        every method has are taken over."""
        if fixed := [name for name in given if name in _LOADED]:
            raise UsageError(f"{fixed[0]} belongs to the loaded model: give it to specbench.load")
        taken = self._given
        if method is not None:
            model = str(taken.get("model", parameters.default_choice("model")))
            known = {*parameters.common(), *parameters.declared("model", model), "model"} - {"method"}
            taken = {name: value for name, value in taken.items() if name in known}
        cfg = configuration.compose(overrides(method or self._method, {**taken, **given}))
        return {**cfg, "batch": 1}

    def _built(self, cfg: Mapping[str, Any]) -> Pipeline | ContinuousPipeline:
        from specbench.harness.pipeline import Pipeline
        from specbench.harness.run import check

        key = json.dumps({name: value for name, value in cfg.items() if name != "seed"}, sort_keys=True)
        if self._pipeline is None or self._pipeline[0] != key:
            check(cfg)
            self._pipeline = key, Pipeline.assemble(cfg, self.device, self._model)
        return self._pipeline[1]
