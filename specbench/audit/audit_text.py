"""The rows of an audit as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specbench.audit import densities, model_recipes, models, sizes, verdicts
from specbench.audit.audit_arguments import COLUMNS
from specbench.audit.densities import DensityPair
from specbench.audit.levels import FURTHER, LEVEL, ROUNDING
from specbench.audit.models import Subject
from specbench.audit.verdicts import RECORDS, REJECTION, Exercised
from specbench.config import parameters
from specbench.config.run_config import RunConfig

_AFTER = 2  # tokens that a sequence needs after a draft, so that the draft is refilled or has a bonus token
_PARTS = ("drafter", "rule")
_FIRST = ("method", *_PARTS, "model")
_PRINTED = [*_FIRST, *(name for name in COLUMNS if name not in _FIRST)]
_PRINTED = _PRINTED[: _PRINTED.index("verdict") + 1]
_PRINTED_CONTINUOUS = [*_FIRST, *"dim T samples ks ks_noise energy energy_noise p_value accepted_length".split()]
_PRINTED_CONTINUOUS += ["acceptance_rate", "proposals", "fallbacks", "verdict"]
_PRINTED_RECORDS = ["method", "model", "V", "samples", "p_value", "ks", "ks_high", "tv_low", "acceptance_rate"]
_PRINTED_RECORDS += ["acceptance_expected", "p_acceptance", "p_drafted", "verdict"]
_FORMATS = {
    "p_value": ".2g",
    "p_acceptance": ".2g",
    "p_drafted": ".2g",
    "acceptance_expected": ".3f",
    "accepted_length": ".3f",
    "accepted_length_expected": ".3f",
    "energy": ".2g",
    "energy_noise": ".2g",
    "acceptance_rate": ".3f",
    "proposals": ".2f",
}


def described(cfg: RunConfig, model: Subject | DensityPair) -> dict[str, Any]:
    """The columns that describe a method on a model."""
    sampling_names = [*(densities if isinstance(model, DensityPair) else models).SAMPLING]
    if not isinstance(model, DensityPair) and model.guided:
        sampling_names.append("cfg_scale")
    declared = frozenset().union(*(parameters.declared(part, getattr(cfg, part)) for part in parameters.PARTS))
    declared -= {"drafter", "rule", "drafter_weights"}  # an audit's models have their own drafters
    declared -= {"verification"} if cfg.verification == "token" else set()
    only_if_set = ("entropy_temperature", "top_n_sigma")
    sampling = [name for name in sampling_names if name not in only_if_set or cfg.get(name) is not None]
    texts = {name: v if isinstance(v, str) else json.dumps(v, separators=(",", ":")) for name, v in cfg.plain().items()}
    return {
        "method": cfg.method,
        "drafter": cfg.drafter,
        "rule": cfg.rule,
        "variant": cfg.variant,
        "plugins": "; ".join(parameters.plugins_of(cfg.plain())) or None,
        "parameters": " ".join(f"{name}={v}" for name, v in texts.items() if name in declared or name in sampling),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The columns up to the verdict, aligned; rows of continuous tokens have their own table, and a cell that does not
    apply is empty. Then follow the parameters of every audited method, the notes on its verdicts, and a summary."""
    if rows[0]["model"] == RECORDS:
        return "\n\n".join([_aligned(_PRINTED_RECORDS, rows), *("\n".join(_of_records(row)) for row in rows)])
    kinds = (_PRINTED, [r for r in rows if r["dim"] is None]), (_PRINTED_CONTINUOUS, [r for r in rows if r["dim"]])
    audited = dict.fromkeys(f"{name_of(row)}: {_audited(row)}" for row in rows)
    tables = (_aligned(names, selected) for names, selected in kinds if selected)
    return "\n\n".join([*tables, "\n".join(audited), *filter(None, ["\n".join(notes(rows))]), summary(rows)])


def _of_records(row: Mapping[str, Any]) -> Iterator[str]:
    """What the records show."""
    limits = f"KS <= {row['ks_high']:.4f} at 95 %, p = {row['p_value']:.2g}"
    if row["tv_low"] > 0:
        limits = f"mean TV >= {row['tv_low']:.4f} at 95 %, p = {row['p_value']:.2g}"
    yield f"{row['method']}: {row['verdict']} ({limits}), {row['samples']:,} emitted tokens as samples of p"
    if row["verdict"] == "undecided":
        yield from verdicts.doubts(row)
    if (p := row["p_drafted"]) is not None:
        fits = "are not samples of q" if p < LEVEL else "agree with samples of q"
        yield f"  the drafted tokens {fits} (p = {p:.2g})"
        rates = f"{row['acceptance_rate']:.4f} of the drafted tokens were emitted, and the exact rule emits"
        yield f"  {rates} {row['acceptance_expected']:.4f} (p = {row['p_acceptance']:.2g})"


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each row that is undecided, with the reason and what to do, or whose sequences were drawn again."""
    lines = []
    for row in rows:
        sentences = []
        if row["p_first"] is not None:
            first = row["samples"] // FURTHER
            sentences.append(
                f"p = {row['p_first']:.2g} of the first {first:,} sequences decides nothing, so {row['samples']:,} new"
                f" ones were drawn; the row describes these: p = {row['p_value']:.2g}"
            )
        if (p := row["p_enumerated"]) is not None and p < LEVEL:
            sentences.append(
                f"the decoded sequences do not have the enumerated distribution of the method (p = {p:.2g}): the loop"
                " does not do what the rule defines"
            )
        if row["verdict"] == "undecided":
            sentences += [*verdicts.doubts(row), *_unexercised(row)]
        settings = [word for word in row["parameters"].split() if word.split("=")[0] in (*sizes.SIZES, "temperature")]
        where = f"{name_of(row)} on {row['model']} ({' '.join(settings)})"
        lines += [f"{row['verdict']}: {where}: {sentence}" for sentence in sentences]
    return list(dict.fromkeys(lines))


def _unexercised(row: Mapping[str, Any]) -> Iterator[str]:
    """The parts that the row never exercised, and what to do about it."""
    if not (parts := verdicts.missing([row])):
        return
    depth, length = Exercised.read(row["exercised"]).depth, row["T"]
    names = {word.split("=")[0] for word in row["parameters"].split()}
    named = ", ".join(f"{name}=" for name in sizes.SIZES if name in names)
    built_in: Mapping[str, Any] = model_recipes.DENSITIES if row["dim"] else model_recipes.TABLES
    longest = max(built_in, key=lambda name: built_in[name].length)
    if depth <= length - _AFTER:
        ways = ["draw more sequences (audit.samples=)", f"leave out audit.model=, {named} to try several"]
    else:
        ways = [f"choose drafts of at most {length - _AFTER} in depth ({named})"] if length > _AFTER else []
        if depth <= built_in[longest].length - _AFTER:
            ways.append(f"choose audit.model={longest}, whose sequences have {built_in[longest].length} tokens")
    listed = ", ".join(map(_plain, parts))
    advice = " or ".join(ways) or "audit a model of longer sequences"
    yield f"never exercised: {listed} (drafts have {depth} tokens in depth, sequences {length}); {advice}"


def _counts(exercised: Exercised) -> str:
    """How often each part was exercised; rejections by depth are in one list."""
    rejections, others = (
        [(part, f"{count:,}") for part, count in exercised.items() if part.startswith(REJECTION) == of_depth]
        for of_depth in (True, False)
    )
    by_depth = f"rejections at depths 1 to {len(rejections)}: {', '.join(count for _, count in rejections)}"
    return "; ".join([by_depth, *(f"{_plain(part)}s: {count}" for part, count in others)])


def _plain(part: str) -> str:
    """A part in words: rejection_2 -> rejection at depth 2."""
    return part.replace(REJECTION, "rejection at depth ").replace("_", " ")


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """For each method and rule: the verdict over all audited models and drafts, the largest upper limit, which holds
    for the largest of all distances, and how often its parts were exercised."""
    lines = []
    for method, rule in dict.fromkeys((name_of(row), row["rule"]) for row in rows):
        selected = [row for row in rows if (name_of(row), row["rule"]) == (method, rule)]
        verdict = verdicts.verdict(selected)
        biased, limits = verdict == "not lossless", []
        if highs := [row["tv_high"] for row in selected if row["tv_high"] is not None]:
            above = f"{max(row['tv_low'] or 0.0 for row in selected):.4f} <= " if biased else ""
            limits.append(f"{above}TV <= {max(highs):.4f} at 95 %")
        if highs := [row["ks_high"] for row in selected if row["ks_high"] is not None]:
            limits.append(f"KS <= {max(highs):.4f} at 95 %")
        known = [value for row in selected for value in verdicts.exact(row)]
        if known and max(known) <= ROUNDING:
            limits.append(f"TV <= {ROUNDING:g} where it was enumerated")
        elif nodes := [row["emitted_tv"] for row in selected if row["emitted_tv"] is not None]:
            limits.append(f"TV up to {max(nodes):.2g} at a node, enumerated")
        chains = [row for row in selected if row["kl_bound"] is not None]
        if chains and biased:
            far = max(chains, key=lambda row: row["kl_exact"])
            limits.append(f"TV {far['tv_unbiased']:.4f} sampled, {far['tv_exact']:.4f} enumerated")
            limits.append(f"KL {far['kl_exact']:.4f} <= {far['kl_bound']:.4f} nats, the sum of log(largest e / p)")
        worst = min(row["p_value"] for row in selected)
        lines.append(
            f"{method} (rule {rule}): {verdict} ({', '.join(limits)}); {len(selected)} rows, smallest p {worst:.2g}"
        )
        if seen := verdicts.exercised(selected):
            lines.append(f"  exercised: {_counts(seen)}")
        if parts := verdicts.missing(selected):
            lines.append(f"  never exercised: {', '.join(map(_plain, parts))}")
    if refuted := [row for row in rows if row["verdict"] == "not lossless" and row["tv_high"] is not None]:
        least = min(refuted, key=lambda row: row["tv_high"])
        between = f"{least['tv_low']:.4f} to {least['tv_high']:.4f}"
        lines.append(f"smallest TV that was refuted: {between}, of {name_of(least)} on {least['model']}")
    return "\n".join(lines)


def name_of(row: Mapping[str, Any]) -> str:
    """The method of a row, and its variant if it has one."""
    return f"{row['method']} variant={row['variant']}" if row["variant"] else str(row["method"])


def _audited(row: Mapping[str, Any]) -> str:
    """The decoding parts as command-line arguments. The preset's name is not enough, since arguments may override its
    parts."""
    return " ".join([*(f"{part}={row[part]}" for part in _PARTS), row["parameters"]])


def _aligned(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [names, *([name_of(row) if name == "method" else _cell(name, row[name]) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    texts = {*_FIRST, "verdict"}
    lines = []
    for line in cells:
        parts = [
            cell.ljust(width) if name in texts else cell.rjust(width) for name, cell, width in zip(names, line, widths)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    return format(value, _FORMATS.get(name, ".4f")) if isinstance(value, float) else str(value)
