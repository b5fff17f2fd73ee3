"""What a drafter of discrete tokens learns, and how it is measured."""

from __future__ import annotations

import pkgutil
from pathlib import Path

import torch

from specbench.config import registry
from specbench.decoding.sampling import Sampling
from specbench.harness.pipeline import Pipeline
from specbench.training import drafter, examples
from specbench.training.dataset import TargetHead
from specbench.training.recipes import TrainingPlan
from specbench.training.trainer import Loss, Processes

HELD = 1000  # held-out examples of a validation, at most


class DiscreteTask:
    """As of `command.TrainingTask`."""

    about = (
        "tv: mean total variation to the target's distribution, one token after the target's last hidden state (tv_2"
        " and on: on the drafter's own outputs), with its standard error; top1_agreement, top3: the target's top-1"
        " token is the drafter's top-1, or among its three most probable. On held-out examples, both distributions"
        " under {sampling}; tv_unguided: at temperature 1 without guidance and filters."
    )

    def __init__(self, chosen: TrainingPlan, pipeline: Pipeline, start: Path | None, together: Processes) -> None:
        self.chosen, self.pipeline = chosen, pipeline
        bundle, kind = pipeline.model, chosen["drafter"]
        network = bundle.trained(kind, start) if start else bundle.untrained(kind, chosen["heads"])
        self.network = network.to(pipeline.device, torch.float32).requires_grad_(True)
        aux_hidden_layers = getattr(network.cfg, "aux_hidden_layers", ())
        target = bundle.target.with_aux_hidden_layers(aux_hidden_layers) if aux_hidden_layers else bundle.target
        self.target = target.requires_grad_(False)
        self.found = examples.make(chosen, pipeline, aux_hidden_layers, together)
        self.rows, self.held = self.found.split(chosen["held_out"])
        self.dataset = self.found.dataset(self.target)
        declared = registry.network(kind)
        self.training: drafter.Training = pkgutil.resolve_name(declared.training)(network, TargetHead(self.target))
        if chosen["freeze"]:
            self.training.freeze()
        self.guidance = Sampling(cfg_scale=chosen.cfg["cfg_scale"]) if chosen["guided"] else drafter.PLAIN
        self.best = "" if chosen["keep"] == "last" else chosen["keep"]
        self.before: dict[str, float] = {}

    def loss(self, batch: int) -> Loss:
        terms = drafter.LossTerms(**{name: self.chosen[name] for name in drafter.LossTerms.__dataclass_fields__})
        return drafter.loss_of(self.training, self.dataset, self.rows, batch, terms, self.guidance)

    def validated(self) -> dict[str, float]:
        return drafter.evaluate(self.training, self.dataset, self.held[:HELD], sampling=self.guidance)

    def reached(self, last: bool) -> dict[str, float]:
        """Under the guidance and sampling of a run; of the last weights also at later positions."""
        live, sampling = self.found.live(self.target), self.pipeline.config.sampling
        depth = self.training.evaluated if last else 1
        return drafter.evaluate(self.training, live, self.held[:HELD], depth, self.chosen["decode_batch"], sampling)
