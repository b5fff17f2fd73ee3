"""Compares two passes image by image: the pairs, and their comparison by every statistic of an image and every score.

A pair is the image of one prompt in A and in B. Several images of a prompt count once, by their mean. A Fréchet
distance, which a single image does not have, is compared by the influence of each pair on the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from specbench.compare import passes
from specbench.compare.breakdown import Group, groups_of
from specbench.compare.passes import MetricOfRun, ScoredPass
from specbench.config import indices, parameters
from specbench.errors import UsageError, plain
from specbench.rows import summary, timing
from specbench.rows.columns import FLOAT32, SHOWN
from specbench.rows.journal import Record
from specbench.rows.paired import DistributionTest, Paired, by_influence, distribution_test, holm, paired
from specbench.rows.shown import bias_of_difference

if TYPE_CHECKING:
    from specbench.metrics.base import Metric
    from specbench.metrics.outputs import OutputCache

FEWEST = 3  # minimum number of pairs; two would leave one degree of freedom
FEW = 20  # pairs; with fewer, the t-test needs nearly normal differences
MOST = 2000  # maximum number of pairs whose features are compared; all their distances are in memory

Pairs = Sequence[tuple[Record, Record]]
Caches = tuple["OutputCache", "OutputCache"]
DistributionTests = dict[str, DistributionTest]  # by cache key of the feature extractor


@dataclass(frozen=True)
class Statistic:
    """A statistic of an image (None if unknown), and the sentence that B has {d} {more} of it than A, where {more} is
    one of `sides`. {a}, {b}, {d} and {more} are placeholders; a name may contain braces of its own."""

    name: str
    value: Callable[[Record], float | None]
    sentence: str
    sides: tuple[str, str] = ("more", "less")

    @property
    def resolution(self) -> float:
        """Differences of an image up to this size are rounding errors."""
        return SHOWN[self.name].resolution if self.name in SHOWN else 0.0


STATISTICS = (
    Statistic(
        "accepted_length",
        lambda r: r.accepted_length or None,
        "{b} accepts {d} {more} tokens a step than {a}",
        ("more", "fewer"),
    ),
    Statistic("steps", lambda r: r.steps or None, "{b} takes {d} {more} steps an image than {a}", ("more", "fewer")),
    Statistic(
        "acceptance_rate",
        lambda r: r.accepted / r.verified if r.verified else None,
        "the acceptance rate of {b} is {d} {more} than the one of {a}",
        ("higher", "lower"),
    ),
    Statistic("latency_s", lambda r: r.latency_s, "{b} needs {d} s {more} for an image than {a}"),
    Statistic(
        "decode_s",
        lambda r: r.decode_s if timing.was_timed([r]) else None,
        "in batches {b} needs {d} s {more} for an image than {a}",
    ),
    Statistic(
        "log_prob_mean",
        lambda r: r.log_prob_mean,
        "the mean log-probability of a token is {d} {more} with {b} than with {a}",
        ("higher", "lower"),
    ),
    Statistic(
        "emitted_kl",
        lambda r: r.emitted_kl,
        "the KL divergence of the emitted distribution from the target is {d} nats per token {more} with {b} than with"
        " {a}",
        ("larger", "smaller"),
    ),
    Statistic(
        "emitted_tv",
        lambda r: r.emitted_tv,
        "the total variation of the emitted distribution and the target is {d} {more} with {b} than with {a}",
        ("larger", "smaller"),
    ),
)


@dataclass(frozen=True)
class Result:
    """The comparison of one statistic. scorer: its cache key; units: the units of a pair; p_holm, wilcoxon_holm:
    adjusted over all statistics that have this test; remark: why the difference is no evidence, "" if it is."""

    statistic: Statistic
    scorer: str
    paired: Paired
    units: str = "images"
    p_holm: float | None = None
    wilcoxon_holm: float | None = None
    remark: str = ""


@dataclass(frozen=True)
class Comparison:
    """names: labels of A and B; remarks: facts that a reader must know first; untested: skipped statistics, and why."""

    a: ScoredPass
    b: ScoredPass
    names: tuple[str, str]
    pairs: int
    remarks: tuple[str, ...]
    results: tuple[Result, ...]
    untested: tuple[str, ...]
    distribution_tests: Mapping[str, DistributionTest] = field(default_factory=dict)  # by feature extractor
    groups: tuple[tuple[Group, Group], ...] = ()  # the breakdown of A, and of B with A as its baseline
    distribution_holm: Mapping[str, float] = field(default_factory=dict)  # the adjusted p of the distribution tests

    @property
    def tests(self) -> int:
        """The number of tested statistics, with the distributions."""
        return sum(r.paired.test is not None for r in self.results) + len(self.distribution_tests)


def compare(a: ScoredPass, b: ScoredPass) -> Comparison:
    """Compares two passes over the prompts that both decoded. The order of their records does not matter.

    Raises UsageError for fewer than `FEWEST` pairs.
    """
    names = passes.names(a, b)
    pairs, alone = pair(a, b)
    remarks = [*alone, *passes.remarks_on_conditions(a, b, pairs)]
    if same := sum(x.sha256 == y.sha256 for x, y in pairs):
        remarks.append(f"In {same} of {len(pairs)} pairs both images are the same, pixel for pixel.")
    if (prompts := len(set(_prompts(pairs)))) < len(pairs):
        remarks.append(f"They belong to {prompts} prompts: the mean over the images of a prompt counts once.")
    if len(pairs) < FEW:
        remarks.append(f"With {len(pairs)} pairs, a t-test is valid only for nearly normal differences.")
    unsteady = next(filter(None, map(passes.unsteady, (a, b))), "")
    results, untested = _compare_statistics(pairs, names, unsteady)
    seconds = [r.statistic.name for r in results if r.statistic.name in ("latency_s", "decode_s")]
    if seconds and not all(timing.neighbours(*two) for two in pairs):
        remarks.append(
            "A and B were timed in separate passes: the speed of the machine, and with it"
            f" {seconds[0]}, may have changed in between."
        )
    scored, unscored, tests = _compare_metrics(a, b, pairs)
    adjusted, of_distributions = _adjusted([*results, *scored], tests)
    left_out, groups = (*untested, *unscored), groups_of(a, b, pairs)
    return Comparison(a, b, names, len(pairs), tuple(remarks), adjusted, left_out, tests, groups, of_distributions)


def over_seeds(runs: Sequence[tuple[ScoredPass, ScoredPass]]) -> Comparison:
    """Compares the means over seeds, from passes A and B of each seed, by every statistic except seconds. A prompt, by
    its id, counts once: its images are not independent. UsageError if A and B of a seed have different prompts."""
    from specbench import metrics

    numbers: dict[str, int] = {}  # of the prompts, by id
    prompts: list[int] = []
    for two in runs:
        first, second = ({indices.prompt_of(i): r.id for i, r in sorted(run.records.items())} for run in two)
        if first != second or len(first) < FEWEST:
            raise UsageError(f"{two[0].path} and {two[1].path} have different, or too few, prompts")
        prompts += [numbers.setdefault(name, len(numbers)) for name in first.values()]
    scored = [metrics.Outputs(run.folder).scorers.keys() for two in runs for run in two]
    names = sorted(set(parameters.single_metrics()).intersection(*scored))
    results, untested = list[Result](), list[str]()
    for statistic in (*(s for s in STATISTICS if not s.name.endswith("_s")), *map(_metric_statistic, names)):
        try:
            parts = [[_of_prompts(statistic, run) for run in two] for two in runs]
            if len(scorers := {part.scorer for sides in parts for part in sides}) > 1:
                raise UsageError(f"scored by {' and by '.join(map(plain, sorted(scorers)))}")
        except UsageError as e:
            untested.append(f"{statistic.name}: {e}")
            continue
        a, b = (float(np.mean([sides[i].value for sides in parts])) for i in (0, 1))
        every = np.concatenate([y.value - x.value + y.influences - x.influences for x, y in parts])
        moved = passes.of_prompts(every - every.mean(), prompts)
        result = by_influence(a, b, 0 * moved, moved, statistic.resolution or FLOAT32 * max(abs(a), abs(b)))
        scorer, images = scorers.pop(), min(len(run.records) for two in runs for run in two)
        results.append(Result(statistic, scorer, result, "prompts", remark=_remark(statistic.name, scorer, images)))
    x, y = (replace(side[0], run_id=" / ".join(run.run_id for run in side)) for side in zip(*runs))
    return Comparison(x, y, passes.names(x, y), len(numbers), (), _adjusted(results, {})[0], tuple(untested))


def _of_prompts(statistic: Statistic, run: ScoredPass) -> MetricOfRun:
    """A statistic over all images of a run, and how each prompt moves it. UsageError if it was not measured."""
    if statistic.name in parameters.single_metrics():
        return passes.of_column(run, parameters.metric_columns(statistic.name)[0])
    values = [statistic.value(r) for r in run.records.values()]
    if None in values:
        raise UsageError(f"{plain(run.argument)} did not measure it")
    known, prompts = np.array(values, dtype=np.float64), [*map(indices.prompt_of, run.records)]
    return MetricOfRun("", float(known.mean()), passes.of_prompts(known - known.mean(), prompts))


def pair(a: ScoredPass, b: ScoredPass) -> tuple[list[tuple[Record, Record]], list[str]]:
    """The pairs, in the order of their index in A, and sentences that name the images without a partner.

    A pair has the same index, prompt and id. If runs of different seeds have their prompts in different orders, as with
    classes, the first image of a prompt in A is paired with the first in B, the second with the second, and so on.
    """
    shared = sorted(a.records.keys() & b.records.keys())
    same = [i for i in shared if (a.records[i].prompt, a.records[i].id) == (b.records[i].prompt, b.records[i].id)]
    others = sorted(set(shared) - set(same))
    if others and not {r.seed for r in a.records.values()} & {r.seed for r in b.records.values()}:
        pairs, alone = _by_prompt(a, b)
        if len(pairs) > max(len(same), FEWEST - 1):
            return pairs, alone
    alone = [
        f"Left out, without a partner: {len(left)} of {side} (index {_listed(left)})."
        for side, left in (("A", sorted(a.records.keys() - b.records)), ("B", sorted(b.records.keys() - a.records)))
        if left
    ]
    if others:
        alone.append(f"Left out, for different prompts in A and B: {len(others)} (index {_listed(others)}).")
    if small := [f"{len(side.records)} in {side.argument}" for side in (a, b) if len(side.records) < FEWEST]:
        raise UsageError(
            f"too few images ({', '.join(small)}): a comparison needs at least {FEWEST} prompts, and {FEW} for a t-test"
            f" of any differences, so decode with a larger n (n={FEW}), or finish the stopped run (`specbench resume"
            " DIR`)"
        )
    if len(same) < FEWEST:
        why = f", and {len(others)} more with different prompts" if others else ""
        raise UsageError(
            f"{a.argument} ({len(a.records)} images) and {b.argument} ({len(b.records)}) share {len(same)} prompts{why}"
            f": {FEWEST} pairs with the same index, prompt and id are needed, so use runs of the same data and split"
        )
    return [(a.records[i], b.records[i]) for i in same], alone


def _by_prompt(a: ScoredPass, b: ScoredPass) -> tuple[list[tuple[Record, Record]], list[str]]:
    """The pairs of runs whose prompts are in different orders, and sentences about them."""
    waiting: dict[str, list[Record]] = {}
    for _, record in sorted(b.records.items(), reverse=True):
        waiting.setdefault(record.prompt, []).append(record)
    pairs = [(x, waiting[x.prompt].pop()) for _, x in sorted(a.records.items()) if waiting.get(x.prompt)]
    remarks = ["A and B have their prompts in different orders: pairs share the prompt, not the index."]
    for side, scored_pass in (("A", a), ("B", b)):
        if left := len(scored_pass.records) - len(pairs):
            remarks.append(f"Left out, without a partner: {left} of {side}.")
    return pairs, remarks


def _listed(left: Sequence[int]) -> str:
    shown = ", ".join(map(indices.label, left[:5]))
    return f"{shown}, ..., {indices.label(left[-1])}" if len(left) > 5 else shown


def _adjusted(results: Sequence[Result], tests: DistributionTests) -> tuple[tuple[Result, ...], dict[str, float]]:
    """The results with Holm's adjustment of each test, over the statistics that have this test, and the adjusted p of
    the distribution tests, which belong to the t-tests."""
    adjusted: list[dict[int | str, float]] = []
    for which, more in (("p", {name: test.p for name, test in tests.items()}), ("wilcoxon", {})):
        p = {i: getattr(r.paired.test, which, None) for i, r in enumerate(results)} | more
        tested = {key: value for key, value in p.items() if value is not None}
        adjusted.append(dict(zip(tested, holm(list(tested.values())))))
    first, second = adjusted
    changed = (replace(r, p_holm=first.get(i), wilcoxon_holm=second.get(i)) for i, r in enumerate(results))
    return tuple(changed), {name: first[name] for name in tests}


def _compare_statistics(pairs: Pairs, names: tuple[str, str], unsteady: str) -> tuple[list[Result], list[str]]:
    """The comparisons of the records' statistics, and sentences about the skipped ones. unsteady: why seconds are not
    compared; "" if they are."""
    results, untested = [], []
    alone = all(r.latency_s is not None for two in pairs for r in two)
    for statistic in STATISTICS:
        if statistic.name == ("decode_s" if alone else "latency_s"):
            continue  # at batch size 1, decode_s is the latency; in a larger batch, an image has no latency
        if unsteady and statistic.name in ("latency_s", "decode_s"):
            untested.append(f"{statistic.name}: {unsteady}")
            continue
        known = [(x, y) for x, y in pairs if statistic.value(x) is not None and statistic.value(y) is not None]
        values = np.array([[statistic.value(r) for r in two] for two in known], dtype=np.float64).reshape(-1, 2)
        units = "images"
        if statistic.name == "decode_s" and known:
            # images that share a batch in A or in B are not independent
            values, units = _means(values, summary.together(*zip(*known))), "batches"
        elif len(set(_prompts(known))) < len(known):
            values, units = _means(values, _prompts(known)), "prompts"
        if len(values) < FEWEST:
            unknown = [all(statistic.value(two[side]) is None for two in pairs) for side in (0, 1)]
            absent = [name for name, is_unknown in zip(names, unknown) if is_unknown]
            more = ", too few: decode with a larger n" if len(known) == len(pairs) else ""
            few = f"only {len(values)} pairs of {units}{more}"
            why = f"{' and '.join(absent)} without one" if absent else few
            untested.append(f"{statistic.name}: {why}")
        else:
            results.append(Result(statistic, "", paired(values[:, 0], values[:, 1], statistic.resolution), units))
    return results, untested


def _prompts(pairs: Pairs) -> list[int]:
    """The index of each pair's prompt in A."""
    return [indices.prompt_of(x.index) for x, _ in pairs]


def _means(values: np.ndarray, groups: Sequence[int]) -> np.ndarray:
    """Means (G, C) of the rows (N, C) of each group, in the order of their numbers."""
    _, members = np.unique(groups, return_inverse=True)
    return np.stack([np.bincount(members, column) / np.bincount(members) for column in values.T], axis=1)


def _compare_metrics(a: ScoredPass, b: ScoredPass, pairs: Pairs) -> tuple[list[Result], list[str], DistributionTests]:
    """The comparisons of metrics' scores if both runs cache outputs of the same scorer, sentences about the skipped
    metrics, and for feature extractors a test whether the features have the same distribution."""
    from specbench import metrics

    outputs = metrics.Outputs(a.folder), metrics.Outputs(b.folder)
    scorers = outputs[0].scorers, outputs[1].scorers
    results, untested, tests = [], [], DistributionTests()
    for name in sorted(scorers[0].keys() | scorers[1].keys()):
        try:
            if name not in parameters.single_metrics():
                raise UsageError("this version has no such metric")
            if absent := [side for side, names in zip("AB", scorers) if name not in names]:
                raise UsageError(f"{absent[0]} was not scored by it; score both with specbench evaluate")
            scorer = scorers[0][name]
            if scorer != scorers[1][name]:
                raise UsageError(f"scored by {plain(scorer)} in A and by {plain(scorers[1][name])} in B")
            caches = outputs[0].cache(scorer), outputs[1].cache(scorer)
            pair_of_metrics = passes.metric(a, name), passes.metric(b, name)
            first = pair_of_metrics[0]
            if scorer not in tests and first.features and (test := _test_distributions(first, caches, pairs)):
                tests[scorer] = test
            result, images = _compare_metric(pair_of_metrics, scorer, (a, b), caches, pairs)
        except UsageError as e:
            untested.append(f"{plain(name)}: {e}")
        except (ArithmeticError, LookupError, RuntimeError, ValueError):  # of another width, or not finite
            untested.append(f"{name}: its cached outputs are damaged; remove the folders scores/ and score again")
        else:
            units = "prompts" if len(set(_prompts(pairs))) < len(pairs) else "images"
            why = _remark(name, scorer, images)
            results.append(Result(_metric_statistic(name), scorer, result, units, remark=why))
    return results, untested, tests


def _remark(name: str, scorer: str, images: int) -> str:
    """That the difference of a metric over this number of images of A and of B may be one of biases alone; "" if not,
    or if the statistic is not a metric."""
    if name not in parameters.single_metrics():
        return ""
    column = parameters.metric_columns(name)[0]
    return bias_of_difference({f"{column}_backend": scorer, "images": images}, column)


def _metric_statistic(name: str) -> Statistic:
    """The first column of a metric, with the better direction from conf/metrics."""
    shown = SHOWN[parameters.metric_columns(name)[0]]
    sides = ("higher (better)", "lower (worse)") if shown.better == "higher" else ("higher (worse)", "lower (better)")
    return Statistic(
        name, lambda r: None, f"{shown.title} ({name}) is {{d}} {{more}} with {{b}} than with {{a}}", sides
    )


def _scored_pairs(metric: Metric, caches: Caches, pairs: Pairs) -> tuple[list[int], list[np.ndarray]]:
    """The pairs in which both images were scored, and the outputs of A and of B. UsageError if there are too few."""
    keys = [passes.keys(metric, two) for two in pairs]
    scored = [i for i, two in enumerate(keys) if two[0] in caches[0] and two[1] in caches[1]]
    if len(scored) < FEWEST:
        raise UsageError(f"both images of only {len(scored)} pairs were scored; score both with specbench evaluate")
    return scored, [cache.rows([keys[i][side] for i in scored]) for side, cache in enumerate(caches)]


def _test_distributions(metric: Metric, caches: Caches, pairs: Pairs) -> DistributionTest | None:
    first = list(dict(zip(_prompts(pairs)[::-1], pairs[::-1])).values())[::-1]  # the first pair of each prompt
    _, (x, y) = _scored_pairs(metric, caches, first[:MOST])
    return distribution_test(passes.finite(x), passes.finite(y))


def _compare_metric(
    by_side: tuple[Metric, Metric],
    scorer: str,
    runs: tuple[ScoredPass, ScoredPass],
    caches: Caches,
    pairs: Pairs,
) -> tuple[Paired, int]:
    """Compares one metric, as in A and as in B, over the pairs in which both images were scored. Also returns their
    number. UsageError, with the reason, if it cannot be compared."""
    from specbench import metrics

    scored, outputs = _scored_pairs(by_side[0], caches, pairs)
    prompts = _prompts([pairs[i] for i in scored])
    x, y = (metric.per_image(rows) for metric, rows in zip(by_side, outputs))
    if x is not None and y is not None:
        if len(set(prompts)) < len(prompts):
            x, y = _means(np.stack([x, y], axis=1), prompts).T
        largest = max(np.abs(x).max(), np.abs(y).max())  # for equal images, batches may change the last digits
        return paired(passes.finite(x), passes.finite(y), FLOAT32 * largest), len(scored)
    try:
        if (
            any(metric.cache_key != scorer for metric in by_side)
            or by_side[0].fingerprint() != by_side[1].fingerprint()
        ):
            raise UsageError("A and B do not share the weights, or the real images, of this machine")
        items = [passes.items(run, [pairs[i][side] for i in scored]) for side, run in enumerate(runs)]
        (value_a, influences_a), (value_b, influences_b) = map(passes.value_and_influences, by_side, outputs, items)
    except metrics.Unavailable as e:
        raise UsageError(str(e)) from None
    if len(set(prompts)) < len(prompts):
        influences_a, influences_b = (passes.of_prompts(part, prompts) for part in (influences_a, influences_b))
    result = by_influence(value_a, value_b, passes.finite(influences_a), passes.finite(influences_b))
    return result, len(scored)
