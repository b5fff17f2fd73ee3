"""Is a method lossless? Its real loop, rule and drafter decode models whose distribution is known; the audit counts the
sequences.

row = measure(assemble(configuration.compose(["method=sjd", "window=3"]), model), model, 200_000)

Every sequence has its own random numbers, and a measurement has one thread. So the rows depend neither on how many
sequences are decoded at once nor on the number of processes.
"""

from __future__ import annotations

import importlib.util
import math
import os
import pickle
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specbench.audit import densities, models, statistics, theorem
from specbench.audit.audit_arguments import COLUMNS
from specbench.audit.audit_text import described
from specbench.audit.densities import DensityMethod, DensityPair
from specbench.audit.levels import MARGIN
from specbench.audit.models import TabularModel
from specbench.audit.tabular import TabularDrafter
from specbench.audit.verdicts import Counted, EmittedDistances, Exercised, Progress, in_stages, of_first_draft
from specbench.audit.verifier import OutsideParts
from specbench.config.run_config import RunConfig
from specbench.decoding.batch import Decoded
from specbench.decoding.emitted import Emitted
from specbench.decoding.loop import DecoderConfig, decode
from specbench.decoding.rng import RandomStreams
from specbench.decoding.trace import Trace
from specbench.decoding.verify.token import TokenWise
from specbench.engine.graph import Eager
from specbench.engine.ops import Kernels
from specbench.engine.state import on_device
from specbench.errors import RunError
from specbench.harness import processes
from specbench.harness.method import build_method, sampling_of
from specbench.storage import origin
from specbench.storage.package import __version__

#: The models of an audit.
Subject = models.Subject | DensityPair

CPU = torch.device("cpu")
_AT_ONCE = 1 << 20  # entries of a tensor (rows, nodes, V): a few of these fit in the cache
_MOST_ROWS = 1 << 15
_ENUMERATED = 1024  # sequences at whose nodes the emitted distribution is enumerated
_MOST_TERMS = 1 << 9  # sequences of rejected candidates at a node, at most
_DIED = "a process of the audit died, probably because memory ran out: use audit.workers=1"


def assemble(
    cfg: RunConfig, model: Subject, device: torch.device = CPU, outside: OutsideParts | None = None
) -> Method | DensityMethod:
    """The method of a checked configuration on a model, which decodes on `device`. Tables have no guidance, so their
    cfg_scale is always 1. outside: functions that replace parts of it.

    Raises UsageError for parameters that do not fit together, and for a rule that needs a codebook that the model does
    not have.
    """
    if isinstance(model, DensityPair):
        return densities.assemble(cfg, device)
    sampling, on_device_model = sampling_of(cfg), model.on(device)
    if not model.guided:
        sampling = replace(sampling, cfg_scale=1.0)
    config = build_method(cfg.changed(emitted_draws=0), on_device_model, on_device_model.drafter(cfg), sampling)
    if outside is not None:
        config = outside.replaced(config)
    return Method(cfg, config, device, _fused(device), outside)


def _fused(device: torch.device) -> Kernels | None:
    """The fused kernels of engine=triton on CUDA, so that they are audited; None on other devices."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from specbench.engine.kernels import FusedKernels

    return FusedKernels()


def measure(
    method: Method | DensityMethod,
    model: Any,
    samples: int,
    seed: int = 0,
    progress: Progress | None = None,
    margin: float = MARGIN,
) -> dict[str, Any]:
    """Decode `samples` sequences and return a row (`COLUMNS`); None in a column that does not apply. If their p-value
    decides nothing, the row describes new sequences (`verdicts.in_stages`)."""

    def row(sequences: range) -> dict[str, Any]:
        counted = method.counted(model, sequences, seed, progress)
        accepted, low, high = (1 + x for x in statistics.mean(counted.first))
        return {
            **dict.fromkeys(COLUMNS),
            **described(method.cfg, model),
            "T": model.length,
            "samples": len(sequences),
            "accepted_length": accepted,
            "model": model.name,
            "accepted_length_low": low,
            "accepted_length_high": high,
            "tokens_per_step": counted.per_step,
            "exercised": str(counted.exercised) or None,
            "seed": seed,
            "margin": margin,
            "device": origin.device_name(method.device),
            "specbench": __version__,
            "commit": origin.commit(),
            **counted.columns,
        }

    return in_stages(row, samples)


@dataclass(frozen=True)
class Method:
    """A decoding method on a model of discrete tokens. cfg: its configuration; kernels: compute its steps on
    `device`, if given; outside: the functions that replaced parts of it."""

    cfg: RunConfig
    config: DecoderConfig
    device: torch.device = CPU
    kernels: Kernels | None = None
    outside: OutsideParts | None = None

    @property
    def chain(self) -> int | None:
        """The length of the chain if chains are sampled from the draft tables and verified token by token (the case of
        Theorem 2), else None."""
        d = self.config.drafter
        if self.config.verification.name != "token":
            return None
        return d.shape.height if isinstance(d, TabularDrafter) and d.tree.is_chain and not d.chosen else None

    def counted(self, model: models.Subject, sequences: range, seed: int, progress: Progress | None) -> Counted:
        marginals = model.marginals(self.config.sampling)
        # for each marginal, the counts of the sequences with even and with odd index
        even, odds = ([torch.zeros_like(m.probs) for m in marginals] for _ in range(2))
        exercised = Exercised()
        config = replace(self.config, observer=exercised)
        rows = max(1, min(_MOST_ROWS, _AT_ONCE // (config.drafter.shape.tree.nodes * model.vocab)))
        firsts, steps, forbidden = [], [], 0
        for begin in sequences[::rows]:
            numbers = range(begin, min(begin + rows, sequences.stop))
            out = self._decoded(config, model.prompts(len(numbers)), [(seed, i) for i in numbers])
            tokens, allowed = model.free(out.tokens)
            odd = torch.arange(begin, numbers.stop) % 2 == 1
            for half, chosen in ((even, ~odd), (odds, odd)):
                selected = tokens[chosen & allowed]
                for count, m in zip(half, marginals, strict=True):
                    count += m.counts(selected)
            forbidden += int((~allowed).sum())
            length = out.tokens.shape[1]
            firsts.append(of_first_draft(out.trace, length))
            steps.append(torch.bincount(out.steps, minlength=length + 1).double())
            if progress is not None:
                progress(len(numbers))
        samples, all_counts = len(sequences), [a + b for a, b in zip(even, odds, strict=True)]
        per_step = length / torch.arange(length + 1, dtype=torch.float64).clamp_min(1)
        low, high = statistics.true_variation(even, odds, marginals)
        off = forbidden / samples
        columns: dict[str, Any] = {
            "V": model.vocab,
            "tv": min(1.0, off + statistics.largest_variation(all_counts, marginals)),
            "tv_low": low,
            "tv_high": min(1.0, off + high),
            "tv_noise": statistics.noise_floor(marginals, samples, seed),
            # a sequence that the grammar forbids belongs to no marginal
            "p_value": 0.0 if forbidden else statistics.goodness_of_fit(all_counts, marginals),
            **self._emitted(model, seed),
        }
        if len(marginals) == 1:  # of whole sequences
            columns["kl"] = None if forbidden else statistics.divergence(even[0], odds[0], marginals[0].probs)
        if self.outside is not None:
            columns |= self.outside.columns
        if self.chain and isinstance(model, TabularModel) and not model.grams:
            columns |= self._theorem(model, self.chain, marginals, all_counts)
        mean = float((torch.stack(steps).sum(0) * per_step).sum() / samples)
        return Counted(torch.stack(firsts).sum(0), mean, exercised, columns)

    def _emitted(self, model: models.Subject, seed: int) -> dict[str, float | None]:
        """The columns of what is emitted at the nodes of some sequences, see `EmittedDistances`."""
        if not isinstance(self.config.verification, TokenWise) or self.config.drafter.shape.biased:
            return {"emitted_tv": None, "emitted_kl_sum": None}
        keys = [(seed, i) for i in range(_ENUMERATED)]
        distances = EmittedDistances(Emitted(self.config.rule, None, draws=0, most=_MOST_TERMS))
        self._decoded(replace(self.config, observer=distances), model.prompts(len(keys)), keys)
        known = distances.variation is not None and math.isfinite(distances.divergence)
        total = distances.divergence / len(keys) if known else None
        return {"emitted_tv": distances.variation, "emitted_kl_sum": total}

    def _decoded(self, config: DecoderConfig, prompts: Any, keys: list[tuple[int, int]]) -> Decoded[Trace]:
        """One sequence for each key (seed, number), on the CPU."""
        engine = Eager()
        engine.kernels = self.kernels
        conditioning = None if prompts is None else on_device(prompts, self.device)
        out = decode(config, conditioning, RandomStreams(keys, self.device), engine)
        return replace(on_device(out, CPU), trace=on_device(out.trace, CPU))

    def _theorem(
        self, model: TabularModel, window: int, marginals: Sequence[statistics.Marginal], all_counts: Sequence[Tensor]
    ) -> dict[str, Any]:
        """The columns of Theorem 2, for chains sampled from the draft tables. marginals: the distribution of whole
        sequences; all_counts: of the decoded ones."""
        [whole], [counts] = marginals, all_counts
        target = whole.probs
        sampling, rule = self.config.sampling, self.config.rule
        rule.open(CPU)  # it decoded on another device, and the tables are on the CPU
        filtered, drafts = ([sampling.probs(t.log()) for t in tables] for tables in (model.p, model.q))
        pre_argmax = None
        if rule.uses_pre_argmax_probs and sampling.temperature == 0:
            pre_argmax = [sampling.unfiltered.probs(t.log()) for t in model.p]
        chain = theorem.chain_statistics(filtered, drafts, rule, window, pre_argmax)
        ratio = torch.where(chain.probs > 0, chain.probs / target, 1)
        return {
            "tv_bound": chain.bound,
            "accepted_length_expected": chain.expected,
            "tv_exact": 0.5 * float((chain.probs - target).abs().sum()),
            "tv_unbiased": statistics.excess(counts, target, chain.probs > target),
            "p_enumerated": statistics.goodness_of_fit([counts], [replace(whole, probs=chain.probs)]),
            "kl_exact": float(torch.xlogy(chain.probs, ratio).sum()),
            "kl_bound": chain.kl_bound,
        }


@dataclass(frozen=True)
class Measurement:
    """The measurement of a checked configuration on a model; samples: sequences."""

    cfg: RunConfig
    model: Subject
    samples: int
    seed: int
    margin: float
    device: torch.device = CPU
    outside: OutsideParts | None = None

    @property
    def name(self) -> str:
        return self.cfg.method if self.outside is None else self.outside.verifier.name


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measured(jobs: Sequence[Measurement], workers: int, progress: Progress) -> Generator[dict[str, Any]]:
    """The row of each measurement, in order. Raises RunError if a process dies."""
    if min(workers, len(jobs)) > 1:
        yield from _measured_by_processes(jobs, min(workers, len(jobs)), progress)
        return
    for job in jobs:
        yield _measured(job, progress)


def _measured_by_processes(jobs: Sequence[Measurement], workers: int, progress: Progress) -> Generator[dict[str, Any]]:
    # pickled here, so that models are not sent through shared memory, which is small in containers
    pickled = {id(job.model): pickle.dumps(job.model) for job in jobs}
    with processes.pool(workers, RunError(_DIED)) as pool:
        futures = [
            pool.submit(_measured_elsewhere, pickled[id(job.model)], job.cfg, job.samples, job.seed, job.margin)
            for job in jobs  # on the CPU: a device has one process
        ]
        for job, future in zip(jobs, futures, strict=True):
            row = future.result()
            progress(job.samples)
            yield row


@cache
def _loaded(model: bytes) -> Subject:
    loaded: Subject = pickle.loads(model)  # noqa: S301 (it comes from the process that started this one)
    return loaded


def _measured_elsewhere(model: bytes, cfg: RunConfig, *fields: Any) -> dict[str, Any]:
    return _measured(Measurement(cfg, _loaded(model), *fields))


def _measured(job: Measurement, progress: Progress | None = None) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        method = assemble(job.cfg, job.model, job.device, job.outside)
        return measure(method, job.model, job.samples, job.seed, progress, job.margin)
    finally:
        torch.set_num_threads(threads)
