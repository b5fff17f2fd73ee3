"""A comparison as sentences, as a table on the screen and as CSV."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from specbench.compare import breakdown
from specbench.compare.comparison import Comparison, Result
from specbench.errors import plain
from specbench.rows.columns import Columns
from specbench.rows.csv_files import aligned
from specbench.rows.paired import LEVEL, POWER, DistributionTest, holm, pairs_needed, size
from specbench.storage.csv_text import RowFile, csv_text

WIDTH = 120  # columns of the screen
_LONGEST = 9  # maximum characters of a number
_INTERVAL = f"{LEVEL * 100:g} % interval"

#: The columns of a CSV file, with their meanings.
COLUMNS = {
    "statistic": "the compared statistic: accepted_length, steps, acceptance_rate, latency_s (images decoded alone),\n"
    "decode_s (its share of its batch), log_prob_mean, a metric whose scores both runs have,\n"
    "or distribution: whether features of the images have the same distribution, by their energy distance",
    "scorer": "cache key of the scorer or feature extractor; empty if the statistic is not a metric",
    "a": "label of A in the sentences",
    "b": "label of B",
    "run_a": "run_id of A; of means over seeds, all their run_ids",
    "run_b": "run_id of B",
    "pairs": "pairs of images; if prompts have several images, pairs of prompts; for decode_s pairs of batches,\n"
    "whose images share their seconds",
    "mean_a": "mean of A over the pairs; for a statistic of all images together, such as fid, its value",
    "mean_b": "the same for B",
    "difference": "mean_b - mean_a",
    "low": f"lower end of its {_INTERVAL}; empty, as all columns up to effect, if every pair differs by the same",
    "high": "upper end",
    "test_statistic": "t of the paired t-test, or of influences; for distribution the energy distance",
    "df": "its degrees of freedom",
    "p": "its two-sided p-value",
    "p_holm": "the same after Holm's adjustment: for the tests of this comparison or, in the file of a table or a\n"
    "suite, for all tests that it shows",
    "p_wilcoxon": "two-sided p-value of the Wilcoxon signed-rank test",
    "p_wilcoxon_holm": "the same after Holm's adjustment, over the Wilcoxon tests alone",
    "d_z": "Cohen's d_z: mean difference / standard deviation of the differences",
    "effect": "its size: negligible, small (from 0.2), medium (from 0.5), large (from 0.8)",
    "pairs_needed": f"pairs with which a test at the {1 - LEVEL:.0%} level detects a difference of this size with a\n"
    f"probability of {POWER:.0%}",
    "pairs_needed_low": "the same for the end of the interval that is farthest from 0: fewer pairs are too few",
    "tests": "number of tests in the adjustment of p_holm",
    "tests_wilcoxon": "number of tests in the adjustment of p_wilcoxon_holm",
    "remark": "why the difference is no evidence: the bias of a Fréchet distance of few images can differ in A and B",
}


ROWS = RowFile(COLUMNS, "comparisons")


def sentence(result: Result, comparison: Comparison) -> str:
    """A result as a sentence."""
    p, test, (a, b) = result.paired, result.paired.test, comparison.names
    if test is None:
        every = f"{p.n} {result.units}"
        if p.difference:
            return f"{_claim(result, comparison, 4)}, in each of the {every}: there is nothing to test."
        same = "identical" if p.mean_a == p.mean_b else "the same except for rounding"
        return f"{result.statistic.name} is {same} in all {every}: there is nothing to test."
    assert result.p_holm is not None
    decimals, level = _decimals(test.low, test.high), 1 - LEVEL
    how = f"paired t({test.df}) = {test.statistic:.{1 if abs(test.statistic) >= 10 else 2}f}, p {_p(test.p)}"
    if test.d_z is not None:
        how += f", d_z = {test.d_z:.2f}: a {size(test.d_z)} effect"
    difference = (
        f"{'*' * bool(result.remark)}{result.statistic.name}: {b} - {a} = {_signed(p.difference, decimals)}"
        f" ({_INTERVAL} {_range(test.low, test.high, decimals)}, {how})"
    )
    if result.remark:
        return f"{difference}; {result.remark}."
    if test.p < level:
        ends = (test.low, test.high) if p.difference > 0 else (-test.high, -test.low)
        text = f"{_claim(result, comparison, decimals)} ({_INTERVAL} {_range(*ends, decimals)}, {how})"
    else:
        text = f"no significant difference in {difference}"
    least = _least(p.n, _ranked(comparison))
    return text + _adjustment(test.p, result.p_holm, result.wilcoxon_holm, comparison.tests, least)


def _least(pairs: int, tests: int) -> float:
    """The smallest p that the Wilcoxon signed-rank test of n pairs can have after Holm's adjustment for so many such
    tests. If all differences have one sign, p is 2 / 2^n; the adjustment multiplies the smallest p by all tests."""
    return tests * 2.0 ** (1 - pairs)


def _ranked(comparison: Comparison) -> int:
    """The number of Wilcoxon tests."""
    return sum(result.wilcoxon_holm is not None for result in comparison.results)


def _adjustment(p: float, p_holm: float, wilcoxon_holm: float | None, tests: int, least: float = 0.0) -> str:
    """The end of a sentence: the effect of the adjustment. least: see `_least`; two tests disagree only if both could
    have been significant."""
    text, level = "", 1 - LEVEL
    if p < level <= p_holm:
        text += f", but p {_p(p_holm)} after Holm's adjustment for {tests} tests"
    if wilcoxon_holm is not None and min(least, wilcoxon_holm) < level and (wilcoxon_holm < level) != (p_holm < level):
        text += f"; the Wilcoxon signed-rank test disagrees (p {_p(wilcoxon_holm)} after Holm's adjustment)"
    return text + "."


def readjusted(rows: Sequence[Mapping[str, str]], family: Collection[int] | None = None) -> list[dict[str, str]]:
    """Rows of several comparisons, as text, that are printed together: with Holm's adjustment over all tests of the
    rows in `family` (None: all rows). The other rows keep the adjustment of their own comparison."""
    result = [dict(row) for row in rows]
    for name, count in (("p", "tests"), ("p_wilcoxon", "tests_wilcoxon")):
        tested = [i for i, row in enumerate(result) if row[name] and (family is None or i in family)]
        for i, p in zip(tested, holm([float(result[i][name]) for i in tested]), strict=True):
            result[i] |= {f"{name}_holm": repr(p), count: str(len(tested))}
    return result


def distribution_sentence(extractor: str, test: DistributionTest, comparison: Comparison) -> str:
    """A sentence on whether the images of A and B have the same distribution."""
    (a, b), p_holm = comparison.names, comparison.distribution_holm[extractor]
    verdict = "differ" if p_holm < 1 - LEVEL else "do not differ"
    end = _adjustment(test.p, p_holm, None, comparison.tests).removesuffix(".")
    return (
        f"{plain(extractor)} features of {a} and {b} {verdict} significantly: the energy distance of {test.n} pairs of"
        f" features is {test.distance:.3g}, and {test.swapped:.3g} on average if pairs are swapped at random"
        f" (p {_p(test.p)}{end})."
    )


def _claim(result: Result, comparison: Comparison, decimals: int) -> str:
    a, b = comparison.names
    side = result.statistic.sides[result.paired.difference < 0]
    values = {"{a}": a, "{b}": b, "{d}": _number(abs(result.paired.difference), decimals), "{more}": side}
    # a name may contain braces
    return re.sub(r"\{(a|b|d|more)\}", lambda match: values[match[0]], result.statistic.sentence)


def _decimals(low: float, high: float) -> int:
    """Decimals that show one or two significant digits of an interval's half-width."""
    half = (high - low) / 2
    return max(0, min(9, -math.floor(math.log10(half / 3)))) if half > 0 else 4


def _number(value: float, decimals: int) -> str:
    text = f"{value:.{decimals}f}"
    text = text if float(text) else text.removeprefix("-")
    return text if len(text) <= _LONGEST else f"{value:.4g}"


def _signed(value: float, decimals: int) -> str:
    text = _number(value, decimals) if value else "0"
    return f"+{text}" if float(text) > 0 else text


def _range(low: float, high: float, decimals: int) -> str:
    return f"{_number(low, decimals)} to {_number(high, decimals)}"


def _p(p: float) -> str:
    return "< 1e-300" if p < 1e-300 else f"= {p:.1g}" if p < 1e-3 else f"= {p:.2g}"


def report(comparison: Comparison) -> str:
    """The comparison as text: lines of at most `WIDTH` columns, unless a single word is longer. Its sentences say A and
    B, whose names are in the first lines."""
    lines = []
    for side, name, scored_pass in zip("AB", comparison.names, (comparison.a, comparison.b)):
        cfg, count = scored_pass.cfg, len(scored_pass.records)
        source = " ".join(plain(cfg[k]) for k in ("model", "data", "split") if cfg.get(k))
        lines += _wrapped(f"{side}: {name}, {source}, {count} images in {scored_pass.path}", "   ")
    for remark in (f"{comparison.pairs} pairs of the same prompt.", *comparison.remarks):
        lines += _wrapped(remark)
    lines += ["", *_table(comparison.results), ""]
    for text in _findings(replace(comparison, names=("A", "B"))):
        lines += _wrapped(f"- {text}", "  ")
    for left_out in comparison.untested:
        lines += _wrapped(f"- not compared: {left_out}.", "  ")
    ranked, most = _ranked(comparison), max((r.paired.n for r in comparison.results), default=0)
    tests = f"{comparison.tests} statistics were tested" if comparison.tests != 1 else "One statistic was tested"
    tests += f", {ranked} of them also by Wilcoxon's test" * (ranked != comparison.tests)
    adjusted = "A column Holm has the p-values to its left, adjusted for their number."
    last = f"{tests}. {adjusted}" if comparison.tests else "Nothing was tested."
    if ranked and _least(most, ranked) >= 1 - LEVEL:
        last += f" With {most} pairs, no Wilcoxon test can be significant after this adjustment."
    lines += _wrapped(_needed(comparison))
    if comparison.groups:
        lines += ["", f"By prompt and position; {breakdown.INTERVALS}:", *breakdown.pair_table(comparison.groups)]
    return "\n".join([*lines, "", *_wrapped(last)])


def _findings(comparison: Comparison) -> list[str]:
    """A sentence for each significant difference, after the adjustment and by either test, for each that is equal in
    every pair, and for each with a remark; then one for all other statistics."""
    sentences, rest, same = list[str](), list[str](), list[str]()
    for result in comparison.results:
        adjusted = [p for p in (result.p_holm, result.wilcoxon_holm) if p is not None]
        if result.paired.test is None and not result.paired.difference:
            same.append(result.statistic.name)
        elif not adjusted or min(adjusted) < 1 - LEVEL or result.remark:
            sentences.append(sentence(result, comparison))
        else:
            rest.append(result.statistic.name)
    for extractor, test in comparison.distribution_tests.items():
        if comparison.distribution_holm[extractor] < 1 - LEVEL:
            sentences.append(distribution_sentence(extractor, test, comparison))
        else:
            rest.append(f"the distribution of {plain(extractor)} features")
    others = [f"no significant difference in {', '.join(rest)}"] * bool(rest)
    others += [f"the same in every pair, except for rounding: {', '.join(same)}"] * bool(same)
    return [*sentences, *[f"{'; '.join(others)}."] * bool(others)]


def _pairs_needed(result: Result) -> tuple[int, int] | tuple[()]:
    """`pairs_needed`; () if there is no difference, or a biased one."""
    return () if result.remark else pairs_needed(result.paired) or ()


def _needed(comparison: Comparison) -> str:
    """A sentence on the number of pairs for a significant difference, by statistic."""
    results = comparison.results
    counts = [(r.statistic.name, *needed) for r in results if (needed := _pairs_needed(r))]
    if not counts:
        return ""
    items = ", ".join(f"{name} {needed:,} ({least:,})" for name, needed, least in sorted(counts, key=lambda c: c[1]))
    return (
        f"Pairs with which a test at the {1 - LEVEL:.0%} level detects a difference of this size with a probability of"
        f" {POWER:.0%} (in brackets: of the size at the far end of its interval): {items}."
    )


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _table(results: Sequence[Result]) -> list[str]:
    head = ["", "pairs", "mean A", "mean B", "B - A", _INTERVAL, "p (t)", "Holm", "p (Wilcoxon)", "Holm", "d_z"]
    lines = [head, *map(_cells, results)]
    width = sum(2 + max(map(len, column)) for column in list(zip(*lines))[1:])
    return aligned([[name[: max(8, WIDTH - width)], *cells] for name, *cells in lines], 1)


def _cells(result: Result) -> list[str]:
    p, test = result.paired, result.paired.test
    decimals = _decimals(test.low, test.high) if test else 4
    name = "*" * bool(result.remark) + result.statistic.name  # the remark is in the sentence on it
    means = [name, str(p.n), _number(p.mean_a, decimals), _number(p.mean_b, decimals)]
    means.append(_signed(p.difference, decimals))
    if test is None:
        return [*means, *["-"] * 6]
    tests = [test.p, result.p_holm, test.wilcoxon, result.wilcoxon_holm]
    shown = ["-" if p_value is None else _p(p_value).removeprefix("= ") for p_value in tests]
    d_z = "-" if test.d_z is None else f"{test.d_z:.2f}"
    return [*means, _range(test.low, test.high, decimals), *shown, d_z]


def rows(comparison: Comparison) -> list[Columns]:
    """The comparison as rows with the columns of `COLUMNS`, one for each statistic."""
    lines: list[Columns] = []
    (a, b), runs = comparison.names, (comparison.a.run_id, comparison.b.run_id)
    common = {"a": a, "b": b, "run_a": runs[0], "run_b": runs[1]}
    for result in comparison.results:
        p, test = result.paired, result.paired.test
        line: Columns = {
            **common,
            "statistic": result.statistic.name,
            "scorer": result.scorer,
            "pairs": p.n,
            "mean_a": p.mean_a,
            "mean_b": p.mean_b,
            "difference": p.difference,
            "tests": comparison.tests,
            "tests_wilcoxon": _ranked(comparison),
            "remark": result.remark,
        }
        if test is not None:
            line |= {"low": test.low, "high": test.high, "test_statistic": test.statistic, "df": test.df}
            line |= {"p": test.p, "p_holm": result.p_holm}
            line |= {"p_wilcoxon": test.wilcoxon, "p_wilcoxon_holm": result.wilcoxon_holm}
            line |= {"d_z": test.d_z, "effect": None if test.d_z is None else size(test.d_z)}
            line |= dict(zip(("pairs_needed", "pairs_needed_low"), _pairs_needed(result), strict=False))
        lines.append(line)
    for extractor, distribution in comparison.distribution_tests.items():
        line = {"statistic": "distribution", "scorer": extractor, "pairs": distribution.n, "tests": comparison.tests}
        line |= {"test_statistic": distribution.distance, "p": distribution.p}
        line |= {"p_holm": comparison.distribution_holm[extractor]}
        lines.append({**common, **line})
    return lines


def to_csv(comparison: Comparison) -> str:
    """The comparison as CSV."""
    return csv_text(COLUMNS, rows(comparison))
