"""Is a method lossless? Its real loop, rule and drafter decode models of known distribution; the audit counts the
sequences.

row = measure(assemble(configuration.compose(["method=sjd", "window=3"]), model), model, 200_000)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench._version import __version__
from specbench.audit import statistics, theorem
from specbench.audit.models import TabularModel, needed_codebook
from specbench.audit.tabular import TabularDrafter, TabularGrower, TabularTarget, codes, sequence_probs
from specbench.config import parameters, registry
from specbench.decoding.loop import DecoderConfig, Drafter, decode
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules import Rule
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import chain_paths, parse
from specbench.harness.method import build_rule
from specbench.rows import provenance

#: The meaning of every column, in order: first those that DESIGN fixes, then what else identifies a row.
COLUMNS = {
    "method": "the preset",
    "V": "tokens of the vocabulary",
    "T": "tokens of a sequence",
    "samples": "decoded sequences",
    "tv": "total variation between the sampled sequences and the target's exact distribution",
    "tv_low": "lower end of the 95 % confidence interval of the method's true total variation",
    "tv_high": "its upper end",
    "tv_noise": "tv of as many samples of a plain sampler: the noise floor",
    "p_value": "goodness of fit, Bonferroni; 0 is beyond float64. Tables: chi-square over the first 1 .. T\n"
    "tokens; continuous tokens: two-sample Kolmogorov-Smirnov over tokens, sums, products, projections",
    "tv_bound": "Cool-SD's Theorem 2 summed over all rounds; for chains sampled from the draft tables",
    "accepted_length": "draft tokens of the first draft that were accepted inside the sequence, plus one; mean",
    "accepted_length_expected": "its expectation by Theorem 2; for chains sampled from the draft tables",
    "verdict": "lossless or not lossless",
    "model": "tables, built-in or of a file, or a built-in model of continuous tokens",
    "accepted_length_low": "lower end of the 95 % confidence interval of accepted_length",
    "accepted_length_high": "its upper end",
    "tokens_per_step": "T / target forward passes over all steps, mean over sequences",
    "tv_exact": "the method's true total variation, enumerated; for chains sampled from the draft tables",
    "drafter": "the drafter; where it needs a network, the model's own drafter replaces it",
    "rule": "the acceptance rule",
    "parameters": "the flat parameters of drafter, rule and sampling",
    "seed": "audit.seed: random streams are keyed by (seed, sequence)",
    "specbench": "version of specbench",
    "commit": "git commit of the code; -dirty where specbench/ or conf/ differed from it",
    "ks": "continuous tokens only, as all below: the largest Kolmogorov-Smirnov distance between the\n"
    "decoded sequences and as many sampled by the target alone",
    "ks_noise": "the same between two sets sampled by the target alone: the noise floor",
    "energy": "energy distance between the decoded sequences and the target's, estimated without bias\n"
    "from the first 4,000 of each",
    "energy_noise": "standard deviation of energy where both sets are the target's",
    "dim": "numbers of a token",
    "acceptance_rate": "accepted / verified draft tokens",
    "tries": "proposals a token sampled after a rejection, mean",
    "fallbacks": "tokens sampled after a rejection for which tries= did not suffice",
}

#: A p-value below it is "not lossless". `--all` tests eleven exact presets on four models each: 44 true hypotheses, so
#: 1e-4 rejects one of them by chance in 44 x 1e-4 = 0.4 % of all seeds. Bonferroni is conservative here, since prefixes
#: contain each other, and sums of tokens contain the tokens. The test still finds a relevant bias: a total variation of
#: 0.02 in a first token of equally likely values gives p near 1e-68 at 200,000 samples, and a Kolmogorov-Smirnov
#: distance of 0.01 gives p near 1e-7.
LEVEL = 1e-4

SAMPLING = ("temperature", "top_k", "top_p")
_AT_ONCE = 1 << 20  # entries of (rows, nodes, V): a few times that fits the cache
_MOST_ROWS = 1 << 15

#: Called with the number of sequences that were decoded since the last call.
Progress = Callable[[int], object]


@dataclass(frozen=True)
class TabularMethod:
    """A decoding method on a tabular model. cfg: its flat parameters."""

    cfg: Mapping[str, Any]
    drafter: Drafter
    rule: Rule
    sampling: Sampling

    @property
    def chain(self) -> int | None:
        """The length of the chain where drafts are chains sampled from the draft tables: the case of Theorem 2."""
        d = self.drafter
        return d.tree.height if isinstance(d, TabularDrafter) and d.tree.is_chain and not d.chosen else None


def assemble(cfg: Mapping[str, Any], model: TabularModel) -> TabularMethod:
    """The method of a checked configuration on a model. Tables have no guidance: cfg_scale is always 1.

    Raises UsageError for parameters that do not go together, and for a rule that needs a codebook the model lacks.
    """
    sampling = Sampling(**{name: cfg[name] for name in SAMPLING})
    drafter = _drafter(cfg, model)
    rule = build_rule(cfg, drafter.tree.height, needed_codebook(model, cfg["rule"]))
    return TabularMethod(cfg, drafter, rule, sampling)


def _drafter(cfg: Mapping[str, Any], model: TabularModel) -> Drafter:
    """The real drafter where it drafts from the target itself. Where it needs a network, the draft tables in the shape
    of its drafts replace it; sampled or, for Medusa and EAGLE-2, deterministic."""
    name = cfg["drafter"]
    if not registry.entry("drafter", name).assets:
        built: Drafter = registry.find("drafter", name)(cfg, None)
        return built
    if "nodes" in cfg:
        return TabularGrower(model.q, cfg["nodes"], cfg["depth"], cfg["width"])
    if "tree" in cfg:
        return TabularDrafter(model.q, parse(cfg["tree"]), chosen=name == "medusa")
    return TabularDrafter(model.q, chain_paths(cfg["window"]))


def measure(
    method: TabularMethod, model: TabularModel, samples: int, seed: int = 0, progress: Progress | None = None
) -> dict[str, Any]:
    """Decode `samples` sequences and return a row (`COLUMNS`); None: does not apply."""
    vocab, length, sampling = model.vocab, model.length, method.sampling
    filtered = [theorem.precise(sampling.probs(t.log())) for t in model.p]
    target_probs = sequence_probs(filtered)
    halves, first, per_step = _decode(method, model, samples, seed, progress)
    counts = halves.sum(0)
    low, high = statistics.true_variation(halves[0], halves[1], target_probs, vocab, length)
    fit = statistics.goodness_of_fit(counts, target_probs, vocab, length)
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    if method.chain is not None:
        drafts = [sampling.probs(t.log()) for t in model.q]
        pre_argmax = None
        if method.rule.uses_pre_argmax_probs and sampling.temperature == 0:
            pre_argmax = [sampling.unfiltered.probs(t.log()) for t in model.p]
        chain = theorem.chain_statistics(filtered, drafts, method.rule, method.chain, pre_argmax)
        row |= {
            "tv_bound": chain.bound,
            "accepted_length_expected": chain.expected,
            "tv_exact": 0.5 * float((chain.probs - target_probs).abs().sum()),
        }
    row |= common_columns(method.cfg, model, samples, seed, first, per_step, fit)
    return row | {
        "V": vocab,
        "tv": statistics.total_variation(counts, target_probs),
        "tv_low": low,
        "tv_high": high,
        "tv_noise": statistics.noise_floor(target_probs, samples, seed),
    }


def common_columns(
    cfg: Mapping[str, Any],
    model: Any,
    samples: int,
    seed: int,
    first: Tensor,
    per_step: float,
    p_value: float,
    sampling: Sequence[str] = SAMPLING,
) -> dict[str, Any]:
    """The columns of models of either kind; first, per_step: see `_decode`."""
    accepted, low, high = (1 + x for x in statistics.mean(first))
    own = parameters.declared("drafter", cfg["drafter"]) | parameters.declared("rule", cfg["rule"])
    own -= {"drafter", "rule", "drafter_weights"}  # an audit's models have drafters of their own
    given = {name: v if isinstance(v, str) else json.dumps(v, separators=(",", ":")) for name, v in cfg.items()}
    return {
        "method": cfg["method"],
        "T": model.length,
        "samples": samples,
        "p_value": p_value,
        "accepted_length": accepted,
        "verdict": "lossless" if p_value >= LEVEL else "not lossless",
        "model": model.name,
        "accepted_length_low": low,
        "accepted_length_high": high,
        "tokens_per_step": per_step,
        "drafter": cfg["drafter"],
        "rule": cfg["rule"],
        "parameters": " ".join(f"{name}={v}" for name, v in given.items() if name in own or name in sampling),
        "seed": seed,
        "specbench": __version__,
        "commit": provenance.commit(),
    }


def _decode(
    method: TabularMethod, model: TabularModel, samples: int, seed: int, progress: Progress | None
) -> tuple[Tensor, Tensor, float]:
    """Counts (2, V**T) of the sequences of even and of odd index, a histogram (T + 1,) of the tokens accepted in the
    first step, and the mean of T / steps."""
    size, length = model.vocab**model.length, model.length
    rows = max(1, min(_MOST_ROWS, _AT_ONCE // (method.drafter.tree.nodes * model.vocab)))
    halves = torch.zeros(2, size, dtype=torch.float64)
    first = torch.zeros(length + 1, dtype=torch.float64)
    steps = torch.zeros(length + 1, dtype=torch.float64)
    config = DecoderConfig(TabularTarget(model.p), method.drafter, method.rule, method.sampling)
    for begin in range(0, samples, rows):
        numbers = range(begin, min(begin + rows, samples))
        out = decode(config, None, RandomStreams([(seed, i) for i in numbers]))
        code = codes(out.tokens, model.vocab)
        odd = torch.arange(begin, numbers.stop) % 2 == 1
        for half, chosen in zip(halves, (~odd, odd)):
            half += torch.bincount(code[chosen], minlength=size)
        first += torch.bincount(out.trace.accepted[:, 0], minlength=length + 1)
        steps += torch.bincount(out.steps, minlength=length + 1)
        if progress is not None:
            progress(len(numbers))
    tokens = length / torch.arange(length + 1, dtype=torch.float64).clamp_min(1)
    return halves, first, float((steps * tokens).sum() / samples)
