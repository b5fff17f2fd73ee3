"""The audit's causal model of continuous tokens: the real classes of NextStep with random weights, a padded prompt and
guidance, and a drafter whose weights are near the target's.

The samples of the target alone (`densities.alone`) use conditions from passes over all tokens. These share only the
networks with the session and its cache.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench.audit import recipes
from specbench.audit.densities import DensityPair
from specbench.models.flow import FlowSampler
from specbench.models.nextstep import NextStep, NextStepConfig, NextStepSession, NextStepTarget
from specbench.models.unified import Prompts

#: Four tokens of two numbers.
TINY = NextStepConfig(8, 1, 2, 1, 8, 4, side=2, token_dim=2, head_width=8, head_depth=1)


class CausalNetwork:
    """A NextStep after one prompt; see `densities.AuditedNetwork`."""

    causal = True

    def __init__(self, guided: NextStepTarget) -> None:
        self.guided, self.length, self.dim, self.steps = guided, guided.length, guided.dim, guided.steps

    def on(self, device: torch.device) -> CausalNetwork:
        """The same network on a device."""
        if device.type == "cpu":
            return self
        return CausalNetwork(replace(self.guided, model=copy.deepcopy(self.guided.model).to(device)))

    def open(self, conditioning: Any, rows: int) -> NextStepSession:
        return self.guided.open(self.prompts(rows), rows)

    def prompts(self, rows: int) -> Prompts:
        """A prompt with padding, and a negative prompt with more padding."""
        ids, negative = torch.tensor([[1, 0, 2, 3]]), torch.tensor([[1, 1, 2, 3]])
        device = self.guided.model.norm.weight.device
        return Prompts(*(x.repeat(rows, 1).to(device) for x in (ids, ids != 1, negative, negative != 1)))

    def condition(
        self, tokens: Tensor, known: Tensor, row: Tensor, position: Tensor, done: Tensor, most: int
    ) -> Tensor:
        """z (R, n, ...), by a pass without a cache; see `MaskedSession`."""
        guided, model = self.guided, self.guided.model
        prefix = model.condition(self.prompts(len(tokens)), guided.halves == 2)
        x = model.image_in_projector(guided.normed(torch.where(known.unsqueeze(-1), tokens, 0.0)))
        hidden = model.in_one_pass(prefix, torch.cat([x] * guided.halves))[:, len(prefix) - 1 :]
        at = position.repeat(guided.halves, 1).unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        z: Tensor = model.image_out_projector(hidden.gather(1, at))
        return z if guided.halves == 1 else torch.cat([*z.chunk(2), guided.strength(done).unsqueeze(-1)], -1)

    def moments(self, x: Tensor, index: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """See `ContinuousSession`."""
        return self.open(None, 1).moments(x, index, z)


def network(seed: int, cfg: NextStepConfig = TINY) -> NextStep:
    """A network whose weights have unit gain and are drawn from the seed, so that every weight matters."""
    model, g = NextStep(cfg).eval().requires_grad_(False), torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.dim() == 1 and name.endswith("weight"):
            p.uniform_(0.5, 1.5, generator=g)
        else:
            p.normal_(0, 0.3 if p.dim() == 1 else p[0].numel() ** -0.5, generator=g)
    return model


def near(model: NextStep, distance: float, seed: int) -> NextStep:
    """A copy whose weights are moved by this share of their standard deviation."""
    moved, g = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for p in moved.parameters():
        p.add_(distance * p.std().nan_to_num(0) * torch.randn(p.shape, generator=g))
    return moved


def pair(name: str, distance: float, sampler: FlowSampler, **options: Any) -> DensityPair:
    """options: arguments of `NextStepTarget`."""
    target = network(0)
    models = (CausalNetwork(NextStepTarget(m, sampler, **options)) for m in (target, near(target, distance, 9)))
    return DensityPair(name, *models)


def built_in(name: str) -> DensityPair:
    return pair(name, recipes.CAUSAL[name], FlowSampler(5), scale=1.5, kind="linear")
