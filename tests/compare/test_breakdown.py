"""Breakdowns by category, caption length and position: against records made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Call, cells_of
from scipy import stats
from test_compare import Folders
from test_journal import record

from specbench import data
from specbench.compare import passes
from specbench.compare.breakdown import COLUMNS, Group, breakdown, interval, of_pass
from specbench.compare.comparison import compare
from specbench.config.run_config import PromptSelection
from specbench.errors import UsageError
from specbench.rows import summary
from specbench.rows.columns import COLUMNS as ROW
from specbench.rows.csv_files import to_csv
from specbench.rows.journal import Record
from specbench.tables import report


def image(index: int, per_step: list[int], **changes: Any) -> Record:
    """The record of an image of 16 tokens in 4 rows. Each entry of `per_step` is the number of accepted draft tokens,
    of five."""
    rest = 16 - sum(per_step)
    values = {
        "tokens": 16,
        "steps": rest,
        "drafted": 5 * rest,
        "accepted": sum(per_step),
        "accepted_by_depth": [sum(per_step)],
        "verified_by_depth": [5 * rest],
        "accepted_per_step": per_step,
    }
    values |= {"accepted_length": 16 / rest, "id": str(index), "prompt": "word " * (index + 1)}
    return replace(record(index), **(values | changes))


def vanilla(index: int, **changes: Any) -> Record:
    return image(index, [0] * 16, **changes)


#: Steps that end in the first row four times and then once a row; once a row; every second token.
DENSE, ROWS, PAIRS = [0, 0, 0, 0, 3, 3, 3], [3, 3, 3, 3], [1] * 8


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


def of(groups: list[Group], by: str) -> dict[str, Any]:
    return {group.group: group.cells() for group in groups if group.by == by}


def test_groups_by_hand() -> None:
    kinds = ["b", "a", "b", "b"]
    records = [image(i, steps, category=kinds[i]) for i, steps in enumerate((DENSE, ROWS, PAIRS, ROWS))]
    rows = breakdown(records, [vanilla(i) for i in range(4)])
    group = of(rows, "category")
    assert list(group) == ["a", "b"]
    assert (group["a"]["acceptance_rate"], group["a"]["step_compression"], group["a"]["speedup_step"]) == (
        12 / 20,
        4,
        4,
    )
    assert group["a"]["step_compression_low"] is None  # one prompt has no spread
    steps = np.array([7.0, 8.0, 4.0])
    assert group["b"]["step_compression"] == 48 / steps.sum()
    # the delta method by hand for the logarithm, and t with two degrees of freedom
    moved = 16 / group["b"]["step_compression"] - steps
    half = np.sqrt(3 / 2 * np.square(moved).sum()) / steps.sum() * stats.t.ppf(0.975, 2)
    bounds = [group["b"]["step_compression"] * np.exp(side * half) for side in (-1, 1)]
    assert [group["b"][f"step_compression_{end}"] for end in ("low", "high")] == pytest.approx(bounds)
    assert list(of(rows, "caption length")) == ["up to 2 words", "3 to 3 words", "4 words or more"]
    assert of(rows, "caption length")["up to 2 words"]["prompts"] == 2
    positions = of(rows, "position")
    assert list(positions) == ["row 1", "row 2", "row 3", "row 4"]
    assert [positions[name]["step_compression"] for name in positions] == [16 / 8, *[16 / 5] * 3]  # own: 4, 1, 2, 1
    assert positions["row 1"]["speedup_step"] == 2
    assert "acceptance_rate" not in positions["row 1"]


def test_images_of_one_prompt_count_once() -> None:
    """Twice the images of the same prompts give the same interval, and not a narrower one."""
    once = [image(i, steps, category="ab"[i % 2]) for i, steps in enumerate((DENSE, ROWS, PAIRS, ROWS, DENSE, PAIRS))]
    twice = once + [replace(r, index=r.index + 6) for r in once]
    for group, doubled in zip(breakdown(once), breakdown(twice), strict=True):
        assert doubled.images == 2 * group.images
        assert group.cells() | {"images": doubled.images} == pytest.approx(doubled.cells())


def test_acceptance_by_depth_by_hand() -> None:
    """Conditional: of the drafts verified there; joint: of all drafts. The second image has shorter drafts."""
    records = [
        image(0, DENSE, accepted_by_depth=[6, 3, 1], verified_by_depth=[10, 6, 3]),
        image(1, ROWS, accepted_by_depth=[2], verified_by_depth=[10]),
    ]
    depths = of(breakdown(records, depths=True), "depth")
    assert list(depths) == ["1", "2", "3"]
    assert [row["acceptance_rate"] for row in depths.values()] == [8 / 20, 3 / 6, 1 / 3]
    assert [row["joint_acceptance"] for row in depths.values()] == [8 / 20, 3 / 20, 1 / 20]
    for row in depths.values():
        assert 0 <= row["joint_acceptance_low"] < row["joint_acceptance"] < row["joint_acceptance_high"] <= 1
    assert of(breakdown(records), "depth") == {}  # of a comparison, whose sides have drafts of different depths
    assert of(breakdown(records, raster=False, depths=True), "depth") == {}
    undrafted = [replace(r, accepted_by_depth=[], verified_by_depth=[]) for r in records]
    assert of(breakdown(undrafted, depths=True), "depth") == {}


def test_values_equal_for_all_are_left_out() -> None:
    same = [image(i, ROWS, prompt="one", category=None) for i in range(3)]
    assert {group.by for group in breakdown(same)} == {"position"}
    assert breakdown(same, raster=False) == []
    assert breakdown([]) == []
    names = [group.group for group in breakdown([image(0, [4, 4, 4], tokens=15)])]  # no square
    assert (names[0], names[4], names[-1]) == ("tokens 1 to 2", "token 9", "tokens 14 to 15")


def test_seconds_need_a_timing_that_holds() -> None:
    seconds = [1.0, 1.02, 1.01, 1.0, 1.02, 1.01, 1.0, 1.02]
    timed = [
        image(i, ROWS, category="ab"[i % 2], decode_s=s, latency_s=s, timed=2 * i + 1, done=i)
        for i, s in enumerate(seconds)
    ]
    slow = [vanilla(i, decode_s=3.0, latency_s=3.0, timed=2 * i + 2) for i in range(8)]
    groups = of(breakdown(timed, slow), "category")
    assert groups["a"]["speedup_latency"] == 12 / sum(seconds[::2])
    drifting = [replace(r, decode_s=3.0 + r.index) for r in slow]
    assert "speedup_latency" not in of(breakdown(timed, drifting), "category")["a"]


def test_the_command_and_the_comparison(call: Call, folders: Folders, tmp_path: Path) -> None:
    records = [image(i, (DENSE, ROWS, PAIRS)[i % 3], category="ab"[i % 2]) for i in range(6)]
    first = folders.make("first", records, "method=sjd", baseline=[vanilla(i, category="ab"[i % 2]) for i in range(6)])
    folders.make("second", [image(i, ROWS, category="ab"[i % 2]) for i in range(6)], "method=sjd")
    code, out, _ = call("breakdown", "first", "second", "out=groups.csv")
    assert code == 0
    assert "steps saved" in out
    rows = cells_of("groups.csv")
    assert list(rows[0]) == list(COLUMNS)
    assert {row["run_id"] for row in rows} == {"run-first", "run-second"}
    assert {row["by"] for row in rows} == {"category", "caption length", "depth", "position"}
    assert "joint acceptance" in out
    out = call("compare", "first", "second")[1]
    assert "By prompt and position" in out
    groups = compare(passes.read(first), passes.read(str(tmp_path / "second"))).groups
    # of A, indices 0, 2 and 4 with 7, 8 and 4 steps, and 1, 3 and 5 with 4, 7 and 8; B has 4 each
    assert [b.statistics["speedup_step"].value for _, b in groups if b.by == "category"] == [19 / 12, 19 / 12]
    assert call("breakdown")[0] == call("breakdown", "nowhere")[0] == 2


def test_damaged_records(folders: Folders) -> None:
    huge = [image(i, ROWS, tokens=2**40) for i in range(3)]
    with pytest.raises(UsageError, match="records"):
        of_pass(passes.read(folders.make("huge", huge)))


def test_the_report_shows_them(folders: Folders) -> None:
    records = [image(i, (DENSE, ROWS)[i % 2], category="</script>"[: i % 2 + 1]) for i in range(4)]
    folder = Path(folders.make("one", records, "method=sjd", baseline=[vanilla(i) for i in range(3)]))
    row = dict.fromkeys(ROW) | {"run_id": "run-one", "model": "llamagen_scenes", "method": "sjd", "drafter": "sjd"}
    (folder / "row.csv").write_text(to_csv([row]))
    gathered = report.gather([folder], [], 0)
    groups = gathered.groups["run-one"]
    assert {group.group for group in groups if group.by == "category"} == {"<", "</"}
    assert {group.images for group in groups if group.by == "position"} == {3}  # with a baseline
    [shown] = report.page_data(gathered)["rows"]
    assert shown["groups"] == [group.cells() for group in groups]
    assert "</script>[" not in report.page(gathered)
    for name in ("baseline.jsonl", "records.jsonl"):  # damaged lines are left out
        (folder / name).write_text("not a record\n")
        assert report.gather([folder], [], 0).groups == {}


def test_categories_of_data(tmp_path: Path) -> None:
    (tmp_path / "PartiPrompts.tsv").write_text("Prompt\tCategory\tChallenge\none\tAnimals\tx\ntwo\t\ty\n")
    items = data.load(PromptSelection("parti", None, own={"data_dir": str(tmp_path)}))
    assert {item.prompt: item.kind for item in items} == {"one": "Animals", "two": None}
    [tagged] = data.load(PromptSelection("scenes_geneval", 1))
    assert tagged.kind == "single_object"
    (tmp_path / "mine.csv").write_text("prompt,category\none,a\ntwo,b\n")
    items = data.load(PromptSelection("prompts", None, own={"prompts": str(tmp_path / "mine.csv")}))
    assert [item.kind for item in items] == ["a", "b"]


def test_intervals_stay_where_the_statistic_can_be() -> None:
    """The interval of a share is in [0, 1], and of a ratio above 0, also with few and unequal prompts; the value is
    inside."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        steps = [[int(n) for n in rng.choice([0, 1, 5], size, p=rng.dirichlet([0.3] * 3))] for size in (2, 2, 2, 2)]
        records = [image(i, per_step, category="ab"[i % 2]) for i, per_step in enumerate(steps)]
        for row in of(breakdown(records, [vanilla(i) for i in range(4)]), "category").values():
            for name, top in (("acceptance_rate", 1), ("step_compression", np.inf), ("speedup_step", np.inf)):
                if (low := row[f"{name}_low"]) is None:  # both prompts have the same
                    continue
                assert 0 <= low <= row[name] <= row[f"{name}_high"] <= top
                assert low > 0 or name == "acceptance_rate"


def test_the_interval_of_a_share_is_wilsons() -> None:
    """At its ends |p - q| is t standard errors of q, sqrt(q (1 - q) / n)."""
    p, stderr, prompts = 0.1, 0.06, 4
    t, n = stats.t.ppf(0.975, 3), p * (1 - p) / stderr**2
    low, high = interval(p, stderr, prompts, True) or (0.0, 0.0)
    assert p - t * stderr < 0 < low < p < high
    assert [abs(p - q) / np.sqrt(q * (1 - q) / n) for q in (low, high)] == pytest.approx([t, t])
    # with small errors it is the plain one: the next term is of order t^2 / n = 4e-5
    assert interval(0.4, 0.002, 2000, True) == pytest.approx((0.4 - 0.00392, 0.4 + 0.00392), abs=1e-4)
    # nothing accepted, everything accepted: no error between prompts, but no certainty either
    assert interval(0.0, 0.0, 4, True) == pytest.approx((0, t * t / (4 + t * t)))
    assert interval(1.0, 0.0, 4, True) == pytest.approx((4 / (4 + t * t), 1))
    # equal prompts otherwise: an interval of no width would claim certainty
    assert interval(0.5, 0.0, 4, True) is interval(0.5, 0.0, 4, False) is interval(0.5, 1e-17, 4, False) is None


def test_the_interval_of_a_share_covers_it() -> None:
    """1,000 samples of 8 prompts with 200 tokens each, whose shares vary by prompt as beta variables. The interval
    covers p in 95 % of them, with a tolerance of 4 sqrt(0.95 * 0.05 / 1000) = 2.8 % below, and 1.5 % less for so few
    prompts of a skewed share."""
    for p, between in ((0.03, 0.03), (0.5, 0.1)):
        rng, size = np.random.default_rng(1), p * (1 - p) / between**2 - 1
        shares = rng.binomial(200, rng.beta(p * size, (1 - p) * size, (1000, 8)))
        intervals = [summary.ratio(counts.tolist(), [200] * 8) for counts in shares]
        inside = [interval(e.value or 0.0, e.stderr or 0.0, 8, True) for e in intervals]
        assert sum(low <= p <= high for low, high in filter(None, inside)) >= 907, p


def test_prompts_without_data_do_not_count() -> None:
    """Two of six prompts have a token at depth 2. With six prompts, the interval would begin at 0.48: Wilson's for 2 of
    2, with t of one degree of freedom, begins at 2 / (2 + 12.7^2) = 0.012."""
    deep = {"accepted_by_depth": [8, 3], "verified_by_depth": [16, 3]}
    records = [image(i, PAIRS, **(deep if i < 2 else {})) for i in range(6)]
    depths = of(breakdown(records, depths=True), "depth")
    assert [(row["prompts"], row["images"]) for row in depths.values()] == [(6, 6), (2, 2)]
    t = stats.t.ppf(0.975, 1)
    row = depths["2"]
    assert (row["acceptance_rate"], row["acceptance_rate_high"]) == (1, 1)
    assert row["acceptance_rate_low"] == pytest.approx(2 / (2 + t * t))
    # the share of all drafts, which all six have
    joint = summary.ratio([3, 3, 0, 0, 0, 0], [r.verified_by_depth[0] for r in records])
    wanted = interval(joint.value or 0.0, joint.stderr or 0.0, 6, True)
    assert (row["joint_acceptance_low"], row["joint_acceptance_high"]) == wanted


def test_equal_prompts_have_no_interval() -> None:
    """Two prompts with equal steps used to have an interval of no width."""
    for row in breakdown([image(i, ROWS, category="a" if i < 2 else "b") for i in range(3)]):
        assert row.statistics["step_compression"].low is None, row.group
        assert row.statistics["step_compression"].value == 4


def test_a_group_of_rows_without_an_own_token_counts() -> None:
    """The first prompt accepts all of rows 2 and 3: 4 tokens in 0 steps each. Its tokens count, so it does, too."""
    records = [image(0, [3, 9, 1]), image(1, ROWS), image(2, PAIRS)]
    row = of(breakdown(records), "position")["row 2"]
    assert row["step_compression"] == 12 / 3
    moved = np.array([4.0, 0.0, -4.0])  # 4 - 4 * the steps 0, 1, 2
    error = np.sqrt(3 / 2 * np.square(moved).sum()) / 3
    assert row["step_compression_high"] == pytest.approx(4 * np.exp(stats.t.ppf(0.975, 2) * error / 4))
