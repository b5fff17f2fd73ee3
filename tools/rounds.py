"""Drafted chains of one exact run, replayed under relaxed rules: tokens per round and divergence of every rule on the
same nodes, and the strengths by depth of a band that the full dynamic programme gives.

An exact run draws its prefixes from the target. In each of its rounds the drafted chain x_1 .. x_L has distributions
p_i and q_i at every depth i. A rule reaches depth i with probability f_1 .. f_{i-1}, where f_j is its acceptance of
x_j. There it accepts a token drawn from q_i with probability a_i and emits e_i. Given the chain, the round has in
expectation 1 + sum_i f_1 .. f_{i-1} a_i tokens and a divergence of sum_i f_1 .. f_{i-1} KL(e_i || p_i): chains are
sampled, decisions are not. This ignores that a relaxed rule would reach other prefixes. An image's last round counts
with all its tokens, including those after the image's end.

    python tools/rounds.py n=16 seed=1 drafter=eagle window=14 [strengths=0.25,0.45] [out=FILE.csv]

It takes the arguments of a run that belong to the model, the prompts, the sampling and the drafter. strengths: also
replay UniformRSD, Cool-SD and bands of these strengths.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from specbench import data
from specbench.bench.benchmark_rows import OF_PROBE, WHERE, complete
from specbench.bench.distributions import load
from specbench.config import configuration
from specbench.config.run_config import RunConfig
from specbench.decoding.emitted import distances
from specbench.decoding.rules import Band, Rule, cool, exact, uniform
from specbench.decoding.rules.band import log_ratios
from specbench.decoding.rules.base import at
from specbench.decoding.verify import Case, TokenWise, VerificationResult
from specbench.decoding.verify.block import masses, ratios
from specbench.errors import UsageError
from specbench.harness.pipeline import Pipeline
from specbench.storage.csv_text import RowFile

#: Grid of log(high / low) of bands, and of log(omega) of UniformRSD; curves are interpolated between its values.
_GRID = (0.0, *np.geomspace(0.03, 8, 60).tolist())
_UNIFORM = (1.1, 1.3, 1.7, 2.6, 4.0)  # factors
_COOL = (0.8, 1.1, 1.5, 2.0, 3.0)  # mean factors
#: The columns of a row. Standard errors are jackknifed over images.
COLUMNS = {
    **OF_PROBE,
    "top_k": "top-k of the decoding and of the distributions",
    "top_p": "top-p of the decoding and of the distributions",
    "drafter": "drafter of the chains",
    "drafter_weights": "the parameter drafter_weights",
    "window": "length of the chains",
    "rule": "the rule, here by name: exact, uniform, cool or band",
    "parameters": "its parameter; for exact, the verification and the number of tokens of the chains that it gets",
    "decay": "JSON list: a band's decay by depth; the last row of a strength has the full dynamic programme's",
    "tokens_per_round": "expected tokens per round",
    "tokens_per_round_stderr": "its standard error",
    "tokens_over_token": "for exact decoding: tokens_per_round / tokens_per_round of token-wise verification at the"
    " same length",
    "tokens_over_token_stderr": "its standard error; the chains are the same",
    "kl": "KL(emitted || target) per token, nats",
    "kl_stderr": "its standard error",
    "kl_over_uniform": "kl / kl of UniformRSD at as many tokens per round; empty outside of its range",
    "kl_over_uniform_stderr": "its standard error; the chains are the same",
    **WHERE,
}

ROWS = RowFile(COLUMNS, "replayed rounds")
#: Passes in which a schedule, and the chains that reach a depth under it, converge.
_PASSES = 20


@dataclass(frozen=True)
class Rounds:
    """R chains of L drafted tokens. p, q (R, L, V); tokens, live (R, L): the drafted tokens, and which exist."""

    p: Tensor
    q: Tensor
    tokens: Tensor
    live: Tensor


@dataclass(frozen=True)
class Replayed:
    """What a rule does at the nodes of R chains (R, L), once it reaches them. keeps: probability of accepting the
    drafted token; accepts: of accepting a token drawn from q; divergence: KL(e || p) in nats."""

    keeps: Tensor
    accepts: Tensor
    divergence: Tensor

    @property
    def reach(self) -> Tensor:
        """The probability (R, L) of reaching a node."""
        return torch.cat([torch.ones_like(self.keeps[:, :1]), self.keeps[:, :-1].cumprod(1)], 1)

    def totals(self) -> Tensor:
        """Tokens and divergence of every round (2, R)."""
        return torch.stack([1 + (self.reach * self.accepts).sum(1), (self.reach * self.divergence).sum(1)])


def joined(parts: Sequence[Replayed]) -> Replayed:
    """The chains of several images, as one."""
    return Replayed(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Replayed)))


def replayed(rule: Rule, rounds: Rounds) -> Replayed:
    """Only for rules whose residual does not depend on the rejected token."""
    rule.open(rounds.p.device)
    depth = torch.arange(1, rounds.tokens.shape[1] + 1, device=rounds.p.device).expand_as(rounds.tokens)
    acceptance = rule.acceptance(rounds.p, rounds.q, depth)
    emitted = rule.output_distribution(rounds.p, rounds.q, depth)
    values = (at(acceptance, rounds.tokens), (rounds.q * acceptance).sum(-1), distances(rounds.p, emitted)[1])
    return Replayed(*(torch.where(rounds.live, x, 0).double() for x in values))


class Curves:
    """A rule at the parameters `_GRID`, with the same parameter at every depth. In between it is linearly
    interpolated."""

    def __init__(self, parts: Sequence[Replayed]) -> None:
        self.parts = list(parts)

    @classmethod
    def of(cls, make: Callable[[float], Rule], rounds: Rounds) -> Curves:
        return cls([replayed(make(x), rounds) for x in _GRID])

    @classmethod
    def joined(cls, several: Sequence[Curves]) -> Curves:
        return cls([joined(parts) for parts in zip(*(curves.parts for curves in several), strict=True)])

    def at(self, values: Sequence[float]) -> Replayed:
        """With one value per depth; values beyond the grid count as its last one."""
        columns = []
        for depth, value in enumerate(values):
            below = int(np.clip(np.searchsorted(_GRID, value, side="right") - 1, 0, len(_GRID) - 2))
            share = min(1.0, (value - _GRID[below]) / (_GRID[below + 1] - _GRID[below]))
            pair = self.parts[below], self.parts[below + 1]
            ends = [[getattr(x, field.name)[:, depth] for x in pair] for field in fields(Replayed)]
            columns.append([torch.lerp(low, high, share) for low, high in ends])
        return Replayed(*(torch.stack(column, 1) for column in zip(*columns, strict=True)))

    def schedule(self, strength: float) -> list[float]:
        """log s_1 .. log s_L of the full dynamic programme, with log s_L = strength.

        The cost of an image is rounds + beta x divergence, and c is its optimum per token. Accepting a token at depth i
        saves D_i: D_L = c, and D_i = c + a D_{i+1} - beta KL, with the acceptance a and the divergence of depth i + 1,
        both under relaxation and averaged over the chains that get there. The node's problem gives log s_i = D_i /
        beta, so log s_i = strength + a log s_{i+1} - KL.
        """
        length = self.parts[0].keeps.shape[1]
        values = [strength] * length
        for _ in range(_PASSES):
            replay = self.at(values)
            reach = replay.reach
            means = [(reach * x).sum(0) / reach.sum(0).clamp_min(1e-30) for x in (replay.accepts, replay.divergence)]
            for i in range(length - 2, -1, -1):
                values[i] = strength + float(means[0][i + 1]) * values[i + 1] - float(means[1][i + 1])
        return values


class _Watched(TokenWise):
    """Token-wise verification that records the drafts it decides on."""

    def __init__(self) -> None:
        self.recorded: list[Rounds] = []

    def decide(self, case: Case) -> VerificationResult:
        draft = case.draft
        values = case.p[:, :-1], draft.probs, draft.tokens[:, 1:], draft.valid[:, 1:]
        self.recorded.append(Rounds(*(x.clone() for x in values)))
        return super().decide(case)

    def rounds(self) -> Rounds:
        """All rounds since the last call."""
        rounds = Rounds(*(torch.cat([getattr(each, f.name) for each in self.recorded]) for f in fields(Rounds)))
        self.recorded = []
        return rounds


def measure(cfg: RunConfig, strengths: Sequence[float]) -> list[dict[str, Any]]:
    """The results of a checked configuration with a drafter of chains: exact decoding of its `n` images, verified token
    by token and by block at every length up to the draft's; and, if `strengths` are given, replayed under UniformRSD,
    Cool-SD and bands of these strengths."""
    pipeline = load(cfg.changed(emitted_draws=0))
    shape = pipeline.config.drafter.shape
    if not shape.tree.is_chain or shape.carries_over or cfg.temperature == 0:
        raise UsageError(
            f"rounds can be replayed for chains that are sampled again in every step, and drafter={cfg.drafter} at"
            f" temperature={cfg.temperature:g} has none: choose draft_model, eagle or eagle3"
        )
    watched = _Watched()
    watching = replace(pipeline.config, verification=watched)
    watched_pipeline = Pipeline(
        pipeline.model, watching, pipeline.device, pipeline.name, pipeline.weights, pipeline.engine
    )
    images = []
    with torch.inference_mode():
        for item in tqdm(data.load(cfg.prompts), desc="rounds", unit="image"):
            watched_pipeline.decode(watched_pipeline.encode([item.prompt]), [(cfg.seed, item.index)])
            images.append(_Image.of(watched.rounds(), relaxed=bool(strengths)))
    rows = [*_exact(images), *(_relaxed(images, strengths) if strengths else ())]
    common = {"images": len(images), "weights": pipeline.weights, "window": shape.height}
    return [{**common, **row} for row in rows]


@dataclass(frozen=True)
class _Image:
    """The stored results of the rounds of an image. exact: under the exact rule; by_block (R, L): the probability that
    block verification accepts at least the first 1 .. L tokens; rules, bands, factors: under relaxed rules."""

    exact: Replayed
    by_block: Tensor
    rules: Mapping[tuple[str, str], Replayed]
    bands: Curves | None = None
    factors: Curves | None = None

    @classmethod
    def of(cls, rounds: Rounds, relaxed: bool) -> _Image:
        ratio = ratios(at(rounds.p, rounds.tokens), at(rounds.q, rounds.tokens), rounds.live)[1]
        base = replayed(exact(), rounds), masses(ratio)[:, 1:].double()
        if not relaxed:
            return cls(*base, {})
        length = rounds.tokens.shape[1]
        rules: dict[tuple[str, str], Rule] = {("uniform", f"delta={x:g}"): uniform(x) for x in _UNIFORM}
        rules |= {("cool", f"delta={x:g}"): cool(x, length) for x in _COOL}
        bands = Curves.of(lambda x: Band(x, 0.0, 1), rounds)
        factors = Curves.of(lambda x: uniform(math.exp(x)), rounds)
        return cls(*base, {label: replayed(rule, rounds) for label, rule in rules.items()}, bands, factors)


def _exact(images: Sequence[_Image]) -> list[dict[str, Any]]:
    """Exact decoding, token by token and by block, with the first 1 .. L tokens of the chains."""
    rounds = np.array([len(image.by_block) for image in images])
    token = np.stack([image.exact.keeps.cumprod(1).sum(0).cpu().numpy() for image in images]).cumsum(1)
    block = np.stack([image.by_block.sum(0).cpu().numpy() for image in images]).cumsum(1)
    rows = []
    for i in range(token.shape[1]):
        for verification, more in (("token", token[:, i]), ("block", block[:, i])):
            sums = np.stack([rounds, rounds + more, rounds + token[:, i]])
            names = ("tokens_per_round", "tokens_over_token")
            cells = _jackknifed(names, len(images), partial(_over, sums))
            rows.append(
                {"rule": "exact", "parameters": f"verification={verification} window={i + 1}", "kl": 0.0, **cells}
            )
    return rows


def _over(sums: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Tokens per round, and tokens relative to token-wise verification, for the images `kept`. sums: rounds, tokens and
    token-wise tokens by image."""
    rounds, tokens, token_wise = sums[:, kept].sum(1)
    return np.array([tokens / rounds, tokens / token_wise])


def _relaxed(images: Sequence[_Image], strengths: Sequence[float]) -> list[dict[str, Any]]:
    """Relaxed rules, compared with UniformRSD."""
    image = np.repeat(np.arange(len(images)), [len(each.by_block) for each in images])
    band = Curves.joined([each.bands for each in images if each.bands is not None])
    factor = Curves.joined([each.factors for each in images if each.factors is not None])
    base = joined([each.exact for each in images])
    length, first = base.accepts.shape[1], round(float(base.accepts[:, 0].mean()), 3)
    reference = np.stack([_per_image(factor.at([x] * length), image) for x in _GRID])
    replays: list[tuple[str, str, list[float] | None, Replayed]] = [
        (*label, None, joined([each.rules[label] for each in images])) for label in images[0].rules
    ]
    for strength, decay in itertools.product(strengths, (0.0, first, None)):
        values = band.schedule(strength) if decay is None else log_ratios(strength, decay, length)
        replays.append(("band", f"strength={strength:g}", decays(values), band.at(values)))
    return [
        {"rule": rule, "parameters": parameters, "decay": decay, **_statistics(_per_image(replay, image), reference)}
        for rule, parameters, decay, replay in replays
    ]


def decays(values: Sequence[float]) -> list[float]:
    """`decay` by depth, from 1 to L - 1, with which a band has the log s_1 .. log s_L of a schedule: log s_i = strength
    + decay_i log s_{i+1}, with strength = log s_L."""
    return [(x - values[-1]) / y if y else 0.0 for x, y in itertools.pairwise(values)]


def _per_image(replay: Replayed, image: np.ndarray) -> np.ndarray:
    """Sums over the rounds of each image (N, 3): rounds, tokens, divergence."""
    tokens, divergence = replay.totals().cpu().numpy()
    return np.stack([np.bincount(image, x) for x in (np.ones_like(tokens), tokens, divergence)], 1)


def _statistics(sums: np.ndarray, reference: np.ndarray) -> dict[str, float | None]:
    """Tokens per round, divergence per token, and this divergence relative to UniformRSD's at as many tokens per round,
    with their standard errors by the jackknife over images. sums (N, 3); reference (G, N, 3): of UniformRSD."""

    def values(kept: np.ndarray) -> np.ndarray:
        rounds, tokens, divergence = sums[kept].sum(0)
        totals = reference[:, kept].sum(1)
        per_round, root = totals[:, 1] / totals[:, 0], np.sqrt((totals[:, 2] / totals[:, 1]).clip(0))
        mean_tokens = tokens / rounds
        inside = per_round[0] < mean_tokens <= per_round[-1]
        same = float(np.interp(mean_tokens, per_round, root)) ** 2 if inside else np.nan
        return np.array([mean_tokens, divergence / tokens, divergence / tokens / same if same else np.nan])

    return _jackknifed(("tokens_per_round", "kl", "kl_over_uniform"), len(sums), values)


def _jackknifed(
    names: Sequence[str], num_images: int, values: Callable[[np.ndarray], np.ndarray]
) -> dict[str, float | None]:
    """The statistics `values` over all images (it takes a mask of images), and their standard errors by the jackknife;
    None for NaN."""
    middle = values(np.ones(num_images, dtype=bool))
    errors = np.full(len(names), np.nan)
    if num_images > 1:
        without = np.stack([values(np.arange(num_images) != i) for i in range(num_images)])
        errors = np.sqrt((num_images - 1) / num_images * np.square(without - without.mean(0)).sum(0))
    cells = [*zip(names, middle), *zip((f"{name}_stderr" for name in names), errors)]
    return {name: None if np.isnan(x) else float(x) for name, x in cells}


def main(arguments: Sequence[str]) -> int:
    """Prints the rows as JSON, and adds them to the file."""
    own = dict(a.split("=", 1) for a in arguments if a.startswith(("strengths=", "out=")))
    others = [a for a in arguments if not a.startswith(("strengths=", "out="))]
    cfg = configuration.compose([*others, "method=vanilla"])
    strengths = [float(x) for x in own["strengths"].split(",")] if "strengths" in own else []
    for values in measure(cfg, strengths):
        row = complete(cfg, values, COLUMNS)
        print(json.dumps({name: cell for name, cell in row.items() if cell is not None}))
        if "out" in own:
            ROWS.append(Path(own["out"]), row)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
