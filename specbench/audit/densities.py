"""The audit of methods for continuous tokens: their real loop, rule and residual sampler decode small models, and the
audit compares the result with samples of the target alone.

The distribution of such a model has no closed form, but samples cost little. The audit compares N decoded sequences
with N samples of the target. These come from a plain loop that shares only the networks with the method, and no random
numbers.

model = built_in("d1t4")
row = audit.measure(assemble(configuration.compose(["method=cspd", "model=mar_b"])), model, 200_000)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from specbench.audit import model_recipes, statistics
from specbench.audit.model_recipes import DensityRecipe
from specbench.audit.verdicts import Counted, Exercised, Progress, of_first_draft
from specbench.config.run_config import RunConfig
from specbench.decoding.continuous import ContinuousRule, ContinuousSession, decode
from specbench.decoding.rng import RandomStreams
from specbench.engine.ops import linear, take
from specbench.engine.state import on_device
from specbench.harness.method import continuous_rule

SAMPLING = ("temperature", "final_noise")
_CONDITION, _HIDDEN = 4, 8  # widths of a condition, and of the head's hidden layer
_CPU = torch.device("cpu")
_KEEP = 0.7  # share of a state in the next one's mean
#: The standard deviation of each kind of weights.
_SPREAD = {"input": 0.5, "input_bias": 0.5, "step": 0.5, "inner": 0.6, "outer": 0.3, "level": 0.2}
_ROWS = 1 << 13  # sequences decoded at once
_PROJECTIONS = 8
_LATER = 1 << 62  # added to the seeds of the target's samples that new sequences are compared with
_ENERGY = 4000  # sequences of each set for the energy distance, which computes a value for every pair


class DensityNetwork(ContinuousSession):
    """A model of continuous tokens, which is its own session: one layer from the known tokens to a condition, and a
    head of two layers.

    input (L E, L (D + 1)) and input_bias (L E,): weights and biases from the tokens of all positions, and from which of
    them are known, to every position's condition; step (T, H), inner (H, D + E), outer (2 D, H): the head; level (T,):
    the log variance to which the learned part is added.
    """

    def __init__(self, recipe: DensityRecipe, weights: Mapping[str, Tensor]) -> None:
        self.dim, self.length, self.steps, self.bend = recipe.dim, recipe.length, recipe.steps, recipe.bend
        self.input, self.input_bias, self.step, self.inner, self.outer, self.level = (weights[name] for name in _SPREAD)

    def on(self, device: torch.device) -> DensityNetwork:
        """The same network on a device."""
        moved = copy.copy(self)
        for name in _SPREAD:
            setattr(moved, name, getattr(self, name).to(device))
        return moved

    def open(self, conditioning: Any, rows: int) -> DensityNetwork:
        return self

    def condition(
        self, tokens: Tensor, known: Tensor, row: Tensor, position: Tensor, done: Tensor, most: int
    ) -> Tensor:
        """z (R, n, E); see `ContinuousSession`."""
        mask = known.unsqueeze(-1)
        inputs = torch.cat([torch.where(mask, tokens, 0.0), mask.to(tokens.dtype)], -1).flatten(1)
        return take(
            torch.tanh(linear(inputs, self.input, self.input_bias)).view(len(tokens), self.length, -1), position
        )

    def moments(self, x: Tensor, index: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance (n, D); see `ContinuousSession`."""
        hidden = torch.tanh(linear(torch.cat([self.bend * x, z], -1), self.inner) + self.step[index])
        shift, spread = linear(hidden, self.outer).chunk(2, -1)
        return _KEEP * x + shift, self.level[index, None] + 0.8 * torch.tanh(spread)


def _weights(recipe: DensityRecipe, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    positions, wide = recipe.length * _CONDITION, recipe.dim + _CONDITION
    shapes: dict[str, tuple[int, ...]] = {
        "input": (positions, recipe.length * (recipe.dim + 1)),
        "input_bias": (positions,),
        "step": (recipe.steps, _HIDDEN),
        "inner": (_HIDDEN, wide),
        "outer": (2 * recipe.dim, _HIDDEN),
        "level": (recipe.steps,),
    }
    return {name: _SPREAD[name] * torch.randn(shape, generator=g) for name, shape in shapes.items()}


@dataclass(frozen=True)
class DensityPair:
    """A target and its drafter."""

    name: str
    target: DensityNetwork
    drafter: DensityNetwork

    @property
    def dim(self) -> int:
        return self.target.dim

    @property
    def length(self) -> int:
        return self.target.length


def built_in(name: str) -> DensityPair:
    recipe = model_recipes.DENSITIES[name]
    weights, noise = _weights(recipe, recipe.seed), _weights(recipe, 100 + recipe.seed)
    # The last step first.
    weights["level"] = weights["level"] + torch.linspace(math.log(0.25), math.log(0.5), recipe.steps)
    near = {name: weights[name] + recipe.distance * noise[name] for name in weights}
    return DensityPair(name, DensityNetwork(recipe, weights), DensityNetwork(recipe, near))


@dataclass
class Sequences:
    """tokens (N, L, D) float32, by position; order (N, L) int64: their positions in the order of generation."""

    tokens: Tensor
    order: Tensor


@torch.inference_mode()
def alone(model: DensityNetwork, rule: ContinuousRule, samples: int, seed: int) -> Sequences:
    """Samples of the target alone, with the rule's temperature and last step."""
    g = torch.Generator().manual_seed(seed)
    parts = []
    for begin in range(0, samples, _ROWS):
        n = min(_ROWS, samples - begin)
        row = torch.arange(n)
        order = torch.rand(n, model.length, generator=g).argsort(-1)
        tokens, known = torch.zeros(n, model.length, model.dim), torch.zeros(n, model.length, dtype=torch.bool)
        for step in range(model.length):
            position = order[:, step : step + 1]
            z = model.condition(tokens, known, row, position, torch.full_like(position, step), step)[:, 0]
            x = torch.randn(n, model.dim, generator=g)
            for t in reversed(range(model.steps)):
                mean, log_variance = model.moments(x, torch.full_like(row, t), z)
                noise = torch.randn(n, model.dim, generator=g)
                wide = rule.temperature if t > 0 or rule.final_noise else 0.0
                x = mean + wide * noise * torch.exp(0.5 * log_variance)
            tokens[row, order[:, step]] = x
            known[row, order[:, step]] = True
        parts.append((tokens, order))
    return Sequences(*(torch.cat(x) for x in zip(*parts, strict=True)))


def numbers(sequences: Sequences) -> Iterator[Tensor]:
    """The statistics of sequences that are compared, one (N,) at a time: every coordinate by position and by order of
    generation, sums and products of consecutively generated tokens, the product of a token's first coordinates, and
    random projections."""
    tokens, order = sequences.tokens, sequences.order
    length, dim = tokens.shape[1:]
    in_order = take(tokens, order)
    for values in (tokens, in_order, in_order[:, 1:] + in_order[:, :-1], in_order[:, 1:] * in_order[:, :-1]):
        yield from values.flatten(1).unbind(1)
    if dim > 1:
        yield from (in_order[:, :, 0] * in_order[:, :, 1]).unbind(1)
    g = torch.Generator().manual_seed(0)
    for values in (tokens, in_order):
        yield from (values.flatten(1) @ torch.randn(length * dim, _PROJECTIONS, generator=g)).unbind(1)


def compare(a: Sequences, b: Sequences) -> tuple[float, float]:
    """The largest Kolmogorov-Smirnov distance of all `numbers` of two sets of sequences, and the p-value of the
    hypothesis that both have the same distribution: Bonferroni over the tests."""
    pairs = zip(numbers(a), numbers(b), strict=True)
    distances = [float(stats.ks_2samp(x.numpy(), y.numpy(), method="asymp").statistic) for x, y in pairs]
    effective = len(a.tokens) * len(b.tokens) / (len(a.tokens) + len(b.tokens))
    p_value = float(stats.kstwobign.sf(max(distances) * math.sqrt(effective)))  # Smirnov's limit
    return max(distances), min(1.0, len(distances) * p_value)


@dataclass(frozen=True)
class DensityMethod:
    """The decoding method; cfg: its configuration."""

    cfg: RunConfig
    rule: ContinuousRule
    device: torch.device

    def counted(self, model: DensityPair, sequences: range, seed: int, progress: Progress | None) -> Counted:
        length, samples, exercised = model.length, len(sequences), Exercised()
        first, per_step = torch.zeros(length + 1, dtype=torch.float64), 0.0
        verified = accepted = fallbacks = 0
        tokens, orders, proposals = [], [], []
        pair = [network.on(self.device) for network in (model.target, model.drafter)]
        for begin in sequences[::_ROWS]:
            keys = [(seed, i) for i in range(begin, min(begin + _ROWS, sequences.stop))]
            on_its_device = decode(pair[0], pair[1], self.rule, None, RandomStreams(keys, self.device))
            out, trace = on_device(on_its_device, _CPU), on_device(on_its_device.trace, _CPU)
            first += of_first_draft(trace, length)
            per_step += float((length / out.steps.double()).sum()) / samples
            verified += int(trace.verified.sum())
            accepted += int(out.accepted.sum())
            # One number per token after a rejection.
            proposals += [number for image in trace.proposals for number in image]
            fallbacks += int(trace.fallbacks.sum())
            exercised.add_chains(trace.accepted, trace.offered, trace.start, length, self.rule.gamma)
            tokens.append(out.tokens)
            orders.append(trace.order)
            if progress is not None:
                progress(len(keys))
        decoded = Sequences(torch.cat(tokens), torch.cat(orders))
        target_seed = 2 * seed if sequences.start == 0 else _LATER + 2 * seed
        target, again = (alone(model.target, self.rule, samples, target_seed + i) for i in range(2))
        ks, p_value = compare(decoded, target)
        energy, energy_noise = statistics.energy_distance(*(s.tokens[:_ENERGY].flatten(1) for s in (decoded, target)))
        # the distance of either set from its distribution exceeds this with probability TAIL / 2 (Dvoretzky, Kiefer,
        # Wolfowitz)
        error = math.sqrt(math.log(4 / statistics.TAIL) / (2 * samples))
        columns = {
            "p_value": p_value,
            "ks": ks,
            "ks_high": min(1.0, ks + 2 * error),
            "ks_noise": compare(again, target)[0],
            "energy": energy,
            "energy_noise": energy_noise,
            "dim": model.dim,
            "acceptance_rate": accepted / verified if verified else None,
            "proposals": sum(proposals) / len(proposals) if proposals else None,
            "proposals_max": max(proposals, default=None),
            "fallbacks": fallbacks if self.rule.gamma else None,
        }
        return Counted(first, per_step, exercised, columns)


def assemble(cfg: RunConfig, device: torch.device = _CPU) -> DensityMethod:
    """The method of a checked configuration. These models have no guidance, and their own number of diffusion steps;
    alone, the target samples one token per pass. Raises UsageError for parameters that do not fit together."""
    return DensityMethod(cfg, continuous_rule(cfg), device)
