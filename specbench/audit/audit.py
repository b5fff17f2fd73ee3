"""Is a method lossless? Its real loop, rule and drafter decode models of known distribution; the audit counts the
sequences.

row = measure(assemble(configuration.compose(["method=sjd", "window=3"]), model), model, 200_000)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specbench.audit import statistics, theorem
from specbench.audit.exercised import Exercised
from specbench.audit.marginals import Marginal
from specbench.audit.models import Subject, TabularModel
from specbench.audit.tabular import TabularDrafter
from specbench.audit.verdicts import DOUBT, FURTHER, LEVEL, MARGIN, in_stages
from specbench.config import parameters, plugins
from specbench.decoding.loop import DecoderConfig, decode
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.harness.method import build_method
from specbench.rows import provenance
from specbench.storage.package import __version__

#: The meaning of every column, in order: first those that DESIGN fixes, then what else identifies a row.
COLUMNS = {
    "method": "the preset",
    "V": "tokens of the vocabulary",
    "T": "tokens of a sequence",
    "samples": "decoded sequences",
    "tv": "total variation between the sampled sequences and the target's exact distribution; of Markov\n"
    "models (m..) the largest over n-grams at every position",
    "tv_low": "lower end of the 95 % confidence interval of the method's true total variation",
    "tv_high": "its upper end",
    "tv_noise": "tv of as many samples of a plain sampler: the noise floor",
    "p_value": "goodness of fit, Bonferroni; 0 is beyond float64. Discrete tokens: chi-square over the first\n"
    "1, 2 .. tokens, or over n-grams; continuous tokens: two-sample Kolmogorov-Smirnov over tokens, sums,\n"
    "products, projections",
    "tv_bound": "Cool-SD's Theorem 2 summed over all rounds; for chains sampled from the draft tables",
    "accepted_length": "draft tokens of the first draft that were accepted inside the sequence, plus one; mean",
    "accepted_length_expected": "its expectation by Theorem 2; for chains sampled from the draft tables",
    "verdict": "not lossless: refuted by p_value; lossless: not refuted, tv_high (ks_high for continuous tokens) is\n"
    "at most margin, p_value is not small, and every part in exercised was at work; undecided: neither",
    "model": "tables, built-in or of a file, or a built-in model of continuous tokens",
    "accepted_length_low": "lower end of the 95 % confidence interval of accepted_length",
    "accepted_length_high": "its upper end",
    "tokens_per_step": "T / target forward passes of a sequence, mean over sequences (not T / mean passes)",
    "tv_exact": "the method's true total variation, enumerated; for chains sampled from the draft tables",
    "tv_unbiased": "the sampled tv_exact: the share of the decoded sequences that the enumerated method gives more\n"
    "often than the target, less the target's; tv itself is biased upwards, by up to tv_noise",
    "kl_exact": "KL(method || target) of whole sequences, in nats, enumerated; for the same chains",
    "kl_bound": "the sum over positions of the mean of log(largest emitted probability / target's), which it cannot\n"
    "exceed; for the same chains",
    "drafter": "the drafter; where it needs a network, the model's own drafter replaces it",
    "rule": "the acceptance rule",
    "variant": "the version of the method (docs/methods.md)",
    "parameters": "the flat parameters of drafter, rule and sampling",
    "seed": "audit.seed: random streams are keyed by (seed, sequence)",
    "specbench": "version of specbench",
    "commit": "git commit of the code; -dirty where specbench/ or conf/ differed from it",
    "margin": "audit.margin: the largest distance that counts as lossless",
    "same_as": "the method (and variant) whose measurement this row repeats: on tables both have the same drafts",
    "plugins": plugins.MEANING,
    "ks": "continuous tokens only, as all below: the largest Kolmogorov-Smirnov distance between the\n"
    "decoded sequences and as many sampled by the target alone",
    "ks_noise": "the same between two sets sampled by the target alone: the noise floor",
    "ks_high": "upper end of the 95 % confidence interval of ks's true value",
    "energy": "energy distance between the decoded sequences and the target's, estimated without bias\n"
    "from the first 4,000 of each",
    "energy_noise": "standard deviation of energy where both sets are the target's",
    "dim": "numbers of a token",
    "acceptance_rate": "accepted / verified draft tokens",
    "proposals": "proposals for a token sampled after a rejection, mean",
    "proposals_max": "the most for one token",
    "fallbacks": "tokens sampled after a rejection for which proposals= did not suffice",
    "exercised": "how often each part of the method was at work: draft tokens rejected at each depth, bonus tokens,\n"
    "and what the drafter reports, such as refills of a window",
    "p_first": f"p_value of the first sequences, where it was from {LEVEL:g} to below {DOUBT:g}: the row is of\n"
    f"{FURTHER} times as many further ones",
}

SAMPLING = ("temperature", "top_k", "top_p", "entropy_temperature", "top_n_sigma")
_AT_ONCE = 1 << 20  # entries of (rows, nodes, V): a few times that fits the cache
_MOST_ROWS = 1 << 15

#: Called with the number of sequences that were decoded since the last call.
Progress = Callable[[int], object]


@dataclass(frozen=True)
class Method:
    """A decoding method on a model; cfg: its flat parameters."""

    cfg: Mapping[str, Any]
    config: DecoderConfig

    @property
    def chain(self) -> int | None:
        """The length of the chain where chains are sampled from the draft tables and verified token by token: the case
        of Theorem 2."""
        d = self.config.drafter
        if self.config.verification.name != "token":
            return None
        return d.shape.height if isinstance(d, TabularDrafter) and d.tree.is_chain and not d.chosen else None


def assemble(cfg: Mapping[str, Any], model: Subject) -> Method:
    """The method of a checked configuration on a model. Tables have no guidance: their cfg_scale is always 1.

    Raises UsageError for parameters that do not go together, and for a rule that needs a codebook the model lacks.
    """
    scale = cfg["cfg_scale"] if model.guided else 1.0
    sampling = Sampling.of(cfg, scale)
    return Method(cfg, build_method({**cfg, "emitted_draws": 0}, model, model.drafter(cfg), sampling))


def measure(
    method: Method,
    model: Subject,
    samples: int,
    seed: int = 0,
    progress: Progress | None = None,
    margin: float = MARGIN,
) -> dict[str, Any]:
    """Decode `samples` sequences and return a row (`COLUMNS`); None: does not apply. Where their p-value decides
    nothing, the row is of further ones (`verdicts.in_stages`)."""
    marginals = model.marginals(method.config.sampling)

    def of(sequences: range) -> dict[str, Any]:
        return _row(
            method, model, marginals, _decode(method, model, marginals, sequences, seed, progress), seed, margin
        )

    return in_stages(of, samples)


def _row(
    method: Method, model: Subject, marginals: list[Marginal], counted: _SequenceCounts, seed: int, margin: float
) -> dict[str, Any]:
    """The row of counted sequences, without a verdict."""
    samples = counted.samples
    one, other = counted.halves
    both = [a + b for a, b in zip(one, other, strict=True)]
    low, high = statistics.true_variation(one, other, marginals)
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    if isinstance(model, TabularModel) and not model.grams:
        row |= _theorem(method, model, marginals[0].probs, both[0])
    # a sequence that the grammar forbids is of no marginal
    fit = 0.0 if counted.forbidden else statistics.goodness_of_fit(both, marginals)
    sampling = (*SAMPLING, "cfg_scale") if model.guided else SAMPLING
    row |= common_columns(
        method.cfg, model, samples, seed, counted.first, counted.per_step, fit, counted.exercised, sampling
    )
    off = counted.forbidden / samples
    return row | {
        "V": model.vocab,
        "tv": min(1.0, off + statistics.largest_variation(both, marginals)),
        "tv_low": low,
        "tv_high": min(1.0, off + high),
        "tv_noise": statistics.noise_floor(marginals, samples, seed),
        "margin": margin,
    }


def _theorem(method: Method, model: TabularModel, target_probs: Tensor, counts: Tensor) -> dict[str, Any]:
    """The columns of Theorem 2, for chains sampled from the draft tables; counts (V**T,): of the decoded sequences."""
    if method.chain is None:
        return {}
    sampling = method.config.sampling
    filtered, drafts = ([sampling.probs(t.log()) for t in tables] for tables in (model.p, model.q))
    pre_argmax = None
    if method.config.rule.uses_pre_argmax_probs and sampling.temperature == 0:
        pre_argmax = [sampling.unfiltered.probs(t.log()) for t in model.p]
    chain = theorem.chain_statistics(filtered, drafts, method.config.rule, method.chain, pre_argmax)
    return {
        "tv_bound": chain.bound,
        "accepted_length_expected": chain.expected,
        "tv_exact": 0.5 * float((chain.probs - target_probs).abs().sum()),
        "tv_unbiased": statistics.excess(counts, target_probs, chain.probs > target_probs),
        "kl_exact": float(torch.xlogy(chain.probs, torch.where(chain.probs > 0, chain.probs / target_probs, 1)).sum()),
        "kl_bound": chain.kl_bound,
    }


def common_columns(
    cfg: Mapping[str, Any],
    model: Any,
    samples: int,
    seed: int,
    first: Tensor,
    per_step: float,
    p_value: float,
    exercised: Exercised,
    sampling: Sequence[str] = SAMPLING,
) -> dict[str, Any]:
    """The columns of models of either kind; first, per_step: see `_decode`."""
    accepted, low, high = (1 + x for x in statistics.mean(first))
    return {
        **described(cfg, sampling),
        "T": model.length,
        "samples": samples,
        "p_value": p_value,
        "accepted_length": accepted,
        "model": model.name,
        "accepted_length_low": low,
        "accepted_length_high": high,
        "tokens_per_step": per_step,
        "exercised": str(exercised) or None,
        "seed": seed,
        "specbench": __version__,
        "commit": provenance.commit(),
    }


def described(cfg: Mapping[str, Any], sampling: Sequence[str] = SAMPLING) -> dict[str, Any]:
    """The columns that name a method."""
    own = frozenset().union(*(parameters.declared(part, cfg[part]) for part in parameters.PARTS))
    own -= {"drafter", "rule", "drafter_weights"}  # an audit's models have drafters of their own
    own -= {"verification"} if cfg["verification"] == "token" else set()
    later = ("entropy_temperature", "top_n_sigma")  # rows of earlier versions do not name them
    sampling = [name for name in sampling if name not in later or cfg.get(name) is not None]
    given = {name: v if isinstance(v, str) else json.dumps(v, separators=(",", ":")) for name, v in cfg.items()}
    return {
        "method": cfg["method"],
        "drafter": cfg["drafter"],
        "rule": cfg["rule"],
        "variant": cfg.get("variant"),
        "plugins": "; ".join(parameters.plugins_of(cfg)) or None,
        "parameters": " ".join(f"{name}={v}" for name, v in given.items() if name in own or name in sampling),
    }


@dataclass
class _SequenceCounts:
    """halves: per marginal, the counts of the sequences of even and of odd index; forbidden: sequences that the image
    grammar forbids; first (T + 1,): histogram of the tokens accepted in the first step with a draft; per_step: mean of
    T / steps."""

    samples: int
    halves: tuple[list[Tensor], list[Tensor]]
    first: Tensor
    exercised: Exercised
    forbidden: int = 0
    per_step: float = 0.0


def _decode(
    method: Method,
    model: Subject,
    marginals: Sequence[Marginal],
    sequences: range,
    seed: int,
    progress: Progress | None,
) -> _SequenceCounts:
    def zeros() -> list[Tensor]:
        return [torch.zeros_like(m.probs) for m in marginals]

    samples, exercised = len(sequences), Exercised()
    config = replace(method.config, observer=exercised)
    found = _SequenceCounts(samples, (zeros(), zeros()), torch.zeros(0, dtype=torch.float64), exercised)
    rows = max(1, min(_MOST_ROWS, _AT_ONCE // (method.config.drafter.shape.tree.nodes * model.vocab)))
    steps = torch.zeros(0, dtype=torch.float64)
    for begin in sequences[::rows]:
        numbers = range(begin, min(begin + rows, sequences.stop))
        out = decode(config, model.prompts(len(numbers)), RandomStreams([(seed, i) for i in numbers]))
        tokens, allowed = model.free(out.tokens)
        odd = torch.arange(begin, numbers.stop) % 2 == 1
        for half, chosen in zip(found.halves, (~odd, odd), strict=True):
            some = tokens[chosen & allowed]
            for seen, m in zip(half, marginals, strict=True):
                seen += m.counts(some)
        found.forbidden += int((~allowed).sum())
        length, trace = out.tokens.shape[1], out.trace
        step = (trace.offered > 0).long().argmax(1, keepdim=True)  # a network has no draft before the first token
        first = torch.bincount(trace.accepted.gather(1, step)[:, 0], minlength=length + 1).double()
        count = torch.bincount(out.steps, minlength=length + 1).double()
        found.first = first + (found.first if len(found.first) else 0)
        steps = count + (steps if len(steps) else 0)
        if progress is not None:
            progress(len(numbers))
    per_step = length / torch.arange(length + 1, dtype=torch.float64).clamp_min(1)
    found.per_step = float((steps * per_step).sum() / samples)
    return found
