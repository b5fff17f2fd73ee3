"""Acceptance, steps and speed-up by category of prompt, caption length, depth in a draft and position in the image,
from records.

Images of one prompt are not independent: every interval counts a prompt once (`summary.ratio` with the prompts as its
groups), and uses the quantiles of a t distribution with as many degrees of freedom as prompts that have data for the
statistic, minus one. It does not leave the range of the statistic, see `interval`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from specbench.compare import passes
from specbench.compare.passes import ScoredPass
from specbench.config import parameters
from specbench.errors import UsageError, plain
from specbench.rows import summary, timing
from specbench.rows.csv_files import aligned
from specbench.rows.journal import Record
from specbench.rows.paired import LEVEL
from specbench.rows.timing import Estimate
from specbench.storage.csv_text import RowFile

BANDS = 8  # maximum number of groups of rows of an image
MOST_TOKENS = 2**20  # maximum number of tokens in an image
_ROUNDING = 1e-12  # relative; a smaller error is rounding
INTERVALS = f"{LEVEL:.0%} intervals in brackets count a prompt once"

#: Statistics of a group, with their meanings; each also has the columns `_low` and `_high`.
STATISTICS = {
    "acceptance_rate": "accepted / verified draft tokens; for depths conditional on accepted depths above; empty for\n"
    "positions, whose verified tokens are not recorded",
    "joint_acceptance": "for depths: drafts that were accepted down to this depth / all drafts",
    "step_compression": "tokens / target forward passes; for rows: tokens / tokens that are not accepted draft tokens",
    "speedup_step": "vanilla's target forward passes on the same prompts (for rows: its tokens that are not accepted\n"
    "draft tokens) / the method's",
    "speedup_latency": "vanilla's seconds / the method's, over the timed pairs at batch 1; empty for positions, and\n"
    "if the timing of the run is not valid (timing_valid)",
}
_SHARES = ("acceptance_rate", "joint_acceptance")
_HEADS = {"speedup_step": "steps saved", "speedup_latency": "speed-up in latency"}
#: The columns of a CSV file, with their meanings.
COLUMNS = {
    "run_id": "run_id of the run",
    "method": "its preset",
    "by": "category (of the prompt, as its data set names it), caption length (thirds of the prompts by words),\n"
    "depth (of a draft token) or position (rows of the image, from the top)",
    "group": "name of the group",
    "prompts": "number of prompts in it; for a depth, of those with a verified draft token there",
    "images": "number of images in it; for a depth, of those with a verified draft token there",
    **{
        f"{name}{suffix}": line
        for name, meaning in STATISTICS.items()
        for suffix, line in {
            "": meaning,
            "_low": f"lower end of the {LEVEL:.0%} interval of {name}, which counts a prompt once",
            "_high": "upper end",
        }.items()
    },
}
ROWS = RowFile(COLUMNS, "breakdowns")


class Ratio(NamedTuple):
    """A ratio over images, and the number of prompts with data for it."""

    estimate: Estimate
    prompts: int


@dataclass(frozen=True)
class Statistic:
    """A value and the ends of its interval; None if it is not known."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Group:
    """The statistics of some images: those of `STATISTICS` that this kind of group has. by, group, prompts, images: see
    `COLUMNS`."""

    by: str
    group: str
    prompts: int
    images: int
    statistics: Mapping[str, Statistic]

    def cells(self) -> dict[str, object]:
        """The group as a line of a file: `COLUMNS` without run_id and method."""
        cells: dict[str, object] = {"by": self.by, "group": self.group, "prompts": self.prompts, "images": self.images}
        for name, statistic in self.statistics.items():
            cells |= {name: statistic.value, f"{name}_low": statistic.low, f"{name}_high": statistic.high}
        return cells


def of_pass(scored_pass: ScoredPass) -> list[Group]:
    """The breakdown of a pass, compared with the vanilla images that its run decoded for it, if any.

    Raises UsageError for damaged records.
    """
    images = scored_pass.records
    vanilla: Mapping[int, Record] = {}
    if not scored_pass.baseline and (scored_pass.folder / "baseline.jsonl").is_file():
        vanilla = passes.read(str(scored_pass.folder / "baseline.jsonl")).records
    shared = sorted(images.keys() & vanilla.keys() if vanilla else images)
    records = [images[i] for i in shared]
    baseline = [vanilla[i] for i in shared] if vanilla else None
    raster = parameters.in_raster_order(scored_pass.drafter)
    return _checked(scored_pass, records, baseline, raster, scored_pass.again, True)


def lines_of(scored_pass: ScoredPass, groups: Sequence[Group]) -> list[dict[str, object]]:
    """The groups of a pass as lines of a file, see `COLUMNS`."""
    return [{"run_id": scored_pass.run_id, "method": scored_pass.method, **group.cells()} for group in groups]


def groups_of(a: ScoredPass, b: ScoredPass, pairs: Sequence[tuple[Record, Record]]) -> tuple[tuple[Group, Group], ...]:
    """The breakdown of A over these pairs, and the breakdown of B with A as its baseline, group by group."""
    first, second = ([pair[side] for pair in pairs] for side in (0, 1))
    # A's prompts name the groups. B's prompts may differ only in the category of another version.
    second = [replace(y, id=x.id, prompt=x.prompt, category=x.category) for x, y in zip(first, second, strict=True)]
    raster = (
        parameters.in_raster_order(a.drafter)
        and parameters.in_raster_order(b.drafter)
        and len({r.tokens for r in [*first, *second]}) == 1
    )
    return tuple(zip(_checked(a, first, None, raster), _checked(b, second, first, raster, b.again), strict=True))


def _checked(scored_pass: ScoredPass, *arguments: Any) -> list[Group]:
    """`breakdown`, with a UsageError for damaged records."""
    try:
        return breakdown(*arguments)
    except (ValueError, IndexError, TypeError):
        raise UsageError(f"{scored_pass.argument}: the steps in its records are damaged; decode it again") from None


def breakdown(
    images: Sequence[Record],
    vanilla: Sequence[Record] | None = None,
    raster: bool = True,
    again: Sequence[Record] = (),
    depths: bool = False,
) -> list[Group]:
    """The groups of some images. A category or a length that all images share is skipped.

    vanilla: the images of vanilla AR on the same prompts, in the same order; raster: whether tokens were committed in
    raster order, without which their positions are not known; again: see `timing.extended`; depths: with groups for
    the depths of a draft.
    """
    if not images:
        return []
    prompts = [r.id for r in images]
    shift = None if vanilla is None else timing.shift(images, vanilla, again)
    groups = []
    for by, labels in (("category", [r.category for r in images]), ("caption length", _lengths(images))):
        names = sorted({label for label in labels if label is not None})
        for name in sorted(names, key=_order) if len(names) > 1 else ():
            members = [i for i, label in enumerate(labels) if label == name]
            part, baseline = [images[i] for i in members], vanilla and [vanilla[i] for i in members]
            groups.append(_group(by, name, part, _whole(part, baseline, shift)))
    if depths and (raster or images[0].drafts is not None):
        groups += [_group("depth", str(depth), part, ratios) for depth, part, ratios in _by_depth(images)]
    if not raster or len({r.tokens for r in [*images, *(vanilla or ())]}) > 1:
        return groups
    members_of, step_ends = _numbers(prompts), _step_ends(images)
    baseline_ends = None if vanilla is None else _step_ends(vanilla)
    for name, first, last in _bands(images[0].tokens):
        steps = step_ends[:, first:last].sum(1).tolist()
        ratios = {"step_compression": _ratio([last - first] * len(steps), steps, members_of)}
        if baseline_ends is not None:
            ratios["speedup_step"] = _ratio(baseline_ends[:, first:last].sum(1).tolist(), steps, members_of)
        groups.append(_group("position", name, images, ratios))
    return groups


def _ratio(above: Sequence[float], below: Sequence[float], groups: Sequence[int]) -> Ratio:
    """`summary.ratio` of images in these groups, one for each prompt."""
    prompts = {group for y, x, group in zip(above, below, groups, strict=True) if y or x}
    return Ratio(summary.ratio(above, below, groups), len(prompts))


def _whole(images: Sequence[Record], vanilla: Sequence[Record] | None, shift: float | None) -> dict[str, Ratio]:
    """The statistics of whole images; shift: see `timing.shift`."""
    groups = _numbers([r.id for r in images])
    ratios = {
        "acceptance_rate": _ratio([r.accepted for r in images], [r.verified for r in images], groups),
        "step_compression": _ratio([r.tokens for r in images], [r.steps for r in images], groups),
    }
    if vanilla is None:
        return ratios
    ratios["speedup_step"] = _ratio([r.steps for r in vanilla], [r.steps for r in images], groups)
    pairs = [pair for pair in timing.pairs(images, vanilla) if len(pair.images) == 1]
    if pairs and shift is not None:
        paired_groups = [groups[pair.images[0]] for pair in pairs]
        faster, prompts = _ratio([p.vanilla_s for p in pairs], [p.method_s for p in pairs], paired_groups)
        if faster.value is not None and faster.stderr is not None:
            faster = Estimate(faster.value, math.hypot(faster.stderr, shift * faster.value))
        ratios["speedup_latency"] = Ratio(faster, prompts)
    return ratios


def _by_depth(images: Sequence[Record]) -> Iterator[tuple[int, list[Record], dict[str, Ratio]]]:
    """For depths 1, 2 ..: the images with a draft token that was verified there, and the acceptance of draft tokens: of
    those that were verified there, and of all drafts, each of which has a token at depth 1. A depth of a tree is one
    event, see `summary.acceptance_by_depth`."""
    groups = _numbers([r.id for r in images])
    drafts = [(r.verified_by_depth or [0])[0] for r in images]
    for depth in range(max(len(r.verified_by_depth) for r in images)):
        accepted, verified = (
            [counts[depth] if depth < len(counts) else 0 for counts in lists]
            for lists in ([r.accepted_by_depth for r in images], [r.verified_by_depth for r in images])
        )
        yield (
            depth + 1,
            [r for r, count in zip(images, verified, strict=True) if count],
            {
                "acceptance_rate": _ratio(accepted, verified, groups),
                "joint_acceptance": _ratio(accepted, drafts, groups),
            },
        )


def _group(by: str, name: str, images: Sequence[Record], ratios: Mapping[str, Ratio]) -> Group:
    statistics = {}
    for statistic, ((value, stderr), prompts) in ratios.items():
        ends = None
        if value is not None and stderr is not None:
            ends = interval(value, stderr, prompts, statistic in _SHARES)
        statistics[statistic] = Statistic(value, *(ends or ()))
    return Group(by, name, len({r.id for r in images}), len(images), statistics)


def interval(value: float, stderr: float, prompts: int, share: bool) -> tuple[float, float] | None:
    """The interval of a share, within [0, 1], or of a ratio above 0, from the standard error over this many prompts.
    None if the error is 0: equal prompts do not show how much prompts vary.

    A share p has Wilson's interval (1927) with the size n of a simple sample of the same error, p (1 - p) / stderr^2,
    and the t quantile: all q with |p - q| <= t sqrt(q (1 - q) / n). For p = 0 and p = 1, where the error is always 0, n
    is the number of prompts, as if all tokens of a prompt agreed. A ratio r has the interval of its logarithm,
    r exp(+- t stderr / r).
    """
    from scipy import stats

    t = float(stats.t.ppf((1 + LEVEL) / 2, prompts - 1))
    is_inner = 0 < value < 1
    if stderr <= _ROUNDING * value and (is_inner or not share):
        return None
    if not share:
        wide = min(t * stderr / value, 100.0)
        return value * math.exp(-wide), value * math.exp(wide)
    added = t * t / (value * (1 - value) / stderr**2 if is_inner else prompts)
    middle, half = value + added / 2, math.sqrt(added * value * (1 - value) + added * added / 4)
    return max(0.0, (middle - half) / (1 + added)), min(1.0, (middle + half) / (1 + added))


def _numbers(names: Sequence[str]) -> list[int]:
    """The number of each name: equal names have the same one."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


def _lengths(images: Sequence[Record]) -> list[str]:
    """For each image, the third of the prompts (by words) that its prompt belongs to: "up to 5 words"."""
    words = {r.id: len(r.prompt.split()) for r in images}
    ordered = sorted(words.values())
    low, high = (ordered[math.ceil(len(ordered) * k / 3) - 1] for k in (1, 2))
    names = {True: f"up to {low} words", False: f"{high + 1} words or more"}
    return [
        names[n <= low] if n <= low or n > high else f"{low + 1} to {high} words" for n in (words[r.id] for r in images)
    ]


def _order(label: str) -> tuple[int, str]:
    """A sort key: lengths from the shortest to the longest, categories by name."""
    kind = 0 if label.startswith("up to ") else 2 if label.endswith(" words or more") else 1
    return kind, label


def _bands(tokens: int) -> list[tuple[str, int, int]]:
    """Groups of rows of a square image, or of positions of another image: name, first token, last token + 1."""
    side = math.isqrt(tokens)
    unit, what, per = (side, "row", side) if side * side == tokens else (tokens, "token", 1)
    edges = np.linspace(0, unit, min(BANDS, unit) + 1).round().astype(int).tolist()
    return [
        (f"{what} {a + 1}" if b == a + 1 else f"{what}s {a + 1} to {b}", a * per, b * per) for a, b in pairwise(edges)
    ]


def _step_ends(images: Sequence[Record]) -> np.ndarray:
    """Whether a step ended at each token (N, T) bool, which is then not an accepted draft token. ValueError for records
    that no image can have."""
    if max(r.tokens for r in images) > MOST_TOKENS:
        raise ValueError(f"an image of more than {MOST_TOKENS} tokens")
    return ~np.stack([summary.is_accepted_draft(r) for r in images])


def table(groups: Sequence[Group]) -> list[str]:
    """A breakdown as lines of text."""
    shown = [name for name in STATISTICS if any(_value(group, name) is not None for group in groups)]
    head = ["by", "group", "prompts", "images", *(_HEADS.get(name, name.replace("_", " ")) for name in shown)]
    cells = [
        [g.by, plain(g.group)[:40], str(g.prompts), str(g.images), *(_text(g, name) for name in shown)] for g in groups
    ]
    return aligned([head, *cells], 2)


def pair_table(groups: Sequence[tuple[Group, Group]]) -> list[str]:
    """The breakdowns of A and B as lines of text."""
    head = ["", "", "prompts", "acceptance A", "acceptance B", "compression A", "compression B", "steps of A / B"]
    cells = [
        [
            a.by,
            plain(a.group)[:30],
            str(a.prompts),
            *(_text(group, name, False) for name in ("acceptance_rate", "step_compression") for group in (a, b)),
            _text(b, "speedup_step"),
        ]
        for a, b in groups
    ]
    return aligned([head, *cells], 2)


def _value(group: Group, name: str) -> float | None:
    return group.statistics[name].value if name in group.statistics else None


def _text(group: Group, name: str, bounds: bool = True) -> str:
    if (value := _value(group, name)) is None:
        return "-"
    low, high = group.statistics[name].low, group.statistics[name].high
    return f"{value:.3f}" + (f" ({low:.3f} to {high:.3f})" if bounds and low is not None else "")
