"""The emitted distribution at a node against a verification written out, candidate by candidate; and over whole
sequences against their enumerated distribution, by the chain rule."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from test_summary import images, trace
from torch import Tensor

from specbench.audit import audit, models, sizes, theorem
from specbench.audit.tabular import TabularDrafter, TabularTarget, codes, random_tables, sequence_probs
from specbench.config import configuration, parameters
from specbench.decoding import emitted, rules
from specbench.decoding.batch import Decoded
from specbench.decoding.emitted import Nodes, distances, distributions
from specbench.decoding.loop import DecoderConfig, decode
from specbench.decoding.rules import Rule
from specbench.decoding.rules.base import neighbours
from specbench.decoding.rules.groups import Grouped, Neighbourhood
from specbench.decoding.rules.lantern import Lantern
from specbench.decoding.rules.thresholds import EntropyAware, Typical
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import chain_paths
from specbench.engine import ops
from specbench.rows import summary
from specbench.rows.remark import remark
from specbench.rows.remarks import emitted_remarks

NEAR = neighbours(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)), 2)
RULES: dict[str, Rule] = {
    "exact": rules.exact(),
    "uniform": rules.uniform(2.0),
    "uniform, vanilla residual": rules.uniform(2.0, "vanilla"),
    "cool": rules.cool(1.5, 3),
    "neighbourhood": Neighbourhood(NEAR[:, :1]),
    "neighbourhood, optimal": Neighbourhood(NEAR[:, :1], "optimal"),
    "gsd": Grouped(torch.tensor([[0.0], [1.0], [1.5], [9.0]]), 3, 0.5, 2.0, "clip"),
    "lantern": Lantern("lantern", NEAR, 1, "tvd", 0.2),
    "lantern, released": Lantern("lantern", NEAR, 1, "tvd", 0.2, "released"),
    "lantern_pp": Lantern("lantern_pp", NEAR, 2, "total", 2.0),
    "lantern_pp, optimal": Lantern("lantern_pp", NEAR, 2, "total", 2.0, "optimal"),
    "entropy": EntropyAware(1.0),
    "typical": Typical(),
    "lantern, greedy": Lantern("lantern", NEAR, 2, "tvd", 0.3, greedy=True),
}
STOCHASTIC = {name: rule for name, rule in RULES.items() if not rule.deterministic}
V = 4


def some(*shape: int, seed: int = 0) -> Tensor:
    """Random distributions (*shape, V)."""
    return (1.5 * torch.randn(*shape, V, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def test_the_acceptance_of_every_token() -> None:
    r, q = some(5, 3, seed=1), some(5, 3, seed=2)
    r[0, 0], q[0, 1], q[1, 1] = torch.eye(V)[2], torch.eye(V)[1], torch.tensor([0.5, 0.5, 0, 0])
    depth = torch.tensor([1, 2, 9]).expand(5, 3)
    for name, rule in RULES.items():
        every = rule.acceptance(r, q, depth)
        for x in range(V):
            acceptance = rule.accept(r, q, torch.full((5, 3), x), depth)
            torch.testing.assert_close(every[..., x], acceptance, msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(every, Rule.acceptance(rule, r, q, depth))  # what a rule without its own has


@pytest.mark.parametrize(
    "limits", [("tvd", 0.4, "paper"), ("tvd", 0.3, "released"), ("jsd", 0.15, "paper"), ("total", 60, "paper")]
)
def test_many_neighbours_are_counted_in_groups(limits: tuple[str, float, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """150 neighbours end within different groups, and each row is as when it is alone, and as on a GPU."""
    generator = torch.Generator().manual_seed(0)
    near = torch.rand(200, 200, generator=generator).fill_diagonal_(2).argsort(1)[:, :151]
    r, q = (torch.randn(3, 200, generator=generator).softmax(-1) for _ in range(2))
    rule, depth = Lantern("lantern", near, 150, *limits), torch.tensor([1, 2, 9])
    every = rule.acceptance(r, q, depth)
    every_token = torch.arange(200).expand(3, 200)
    _, mass, inside = rule.moved(r[:, None].expand(-1, 200, -1), every_token)
    assert len((inside.sum(-1) // 32).unique()) > 1
    gains = rule._gains(r)  # an acceptance is at most 1, which hides most of its mass
    torch.testing.assert_close(gains, mass.sum(-1))
    torch.testing.assert_close(every, Rule.acceptance(rule, r, q, depth))
    assert torch.equal(rule._gains(r[1:2]), gains[1:2])
    assert torch.equal(rule.acceptance(r[1:2], q[1:2], depth[1:2]), every[1:2])
    monkeypatch.setattr(ops, "DYNAMIC_SHAPES", ())
    torch.testing.assert_close(rule._gains(r), gains)
    torch.testing.assert_close(rule.acceptance(r, q, depth), every)


def written_out(p: Tensor, q: Tensor, rule: Rule, depth: int, siblings: int, order: list[int] | None) -> list[Tensor]:
    """The probabilities (V,) with which a node emits each token as its 1st, 2nd, ... candidate, and last as the
    recovered token: verification candidate by candidate, over all possible draws. order: deterministic candidates."""
    out = [torch.zeros(V, dtype=torch.float64) for _ in range(siblings + 1)]
    level = torch.tensor(depth)

    def follow(m: int, r: Tensor, q: Tensor | None, reached: float) -> None:
        if m == siblings or q is None:
            out[siblings].add_(reached * r.double())
            return
        if order is not None:
            q = torch.eye(V)[order[m]]
        for x in (q > 0).nonzero().flatten().tolist():
            token, here = torch.tensor(x), reached * float(q[x])
            keep = float(rule.accept(r, q, token, level))
            out[m][x] += here * keep
            rest = q.index_fill(0, token, 0.0)
            left = rest / rest.sum() if rest.sum() > 0 else q if order is not None else None
            if keep < 1:
                follow(m + 1, rule.residual(r, q, token, level), left, here * (1 - keep))

    follow(0, p, q, 1.0)
    return out


@pytest.mark.parametrize(("name", "sampled"), [(name, i % 3 > 0) for i, name in enumerate([*STOCHASTIC, "exact"])])
def test_the_distribution_of_a_node(name: str, sampled: bool) -> None:
    """Four rows with nodes of three, two, one and no candidates; in one of them the drafter has only two tokens. With V
    = 4 the sum over rejected tokens is exact."""
    rule, p, q = RULES[name], some(4, 4, seed=3), some(4, 4, seed=4)
    q[1] = q[1] * torch.tensor([1.0, 1, 0, 0])
    q[1] /= q[1].sum(-1, keepdim=True)
    tokens = torch.tensor([2, 0, 3]).expand(4, 4, 3)
    live = torch.arange(3) < torch.tensor([3, 2, 1, 0])[:, None]
    depth = torch.tensor([1, 2, 3, 9]).expand(4, 4)
    nodes = Nodes(p, q, tokens, live.expand(4, 4, 3), depth, sampled)
    computed = distributions(nodes, rule, torch.zeros(4, 4, 3, 2))
    assert computed.shape == (4, 4, 1, V)
    for row in range(4):
        for n, count in enumerate((3, 2, 1, 0)):
            order = None if sampled else [2, 0, 3]
            expected = sum(written_out(p[row, n], q[row, n], rule, int(depth[row, n]), count, order))
            torch.testing.assert_close(computed[row, n, 0].double(), expected, rtol=0, atol=1e-6)
    exact = torch.equal(live.any(-1), torch.tensor([True, True, True, False])) and name == "exact"
    assert ((computed[:, :, 0] - p).abs().amax(-1) < 1e-6).all() == exact


@pytest.mark.parametrize("name", ["exact", "uniform", "cool", "neighbourhood", "lantern_pp", "entropy"])
def test_drawn_rejections_average_to_the_distribution(name: str) -> None:
    """20,000 nodes with two draws each: e, and the corrected divergence, which is not biased although e is an average.
    Without the correction `neighbourhood` is off by 11 standard errors."""
    rule, count = RULES[name], 20_000
    p, q = some(1, 1, seed=32), some(1, 1, seed=132)
    nodes = Nodes(
        *(x.expand(count, 1, V) for x in (p, q)),
        torch.zeros(count, 1, 2, dtype=torch.int64),
        torch.ones(count, 1, 2, dtype=torch.bool),
        torch.ones(count, 1, dtype=torch.int64),
        sampled=True,
    )
    u = tiny.rng(count).uniform(torch.zeros(count, dtype=torch.int64), 0, 1, 2, 2)
    assert distributions(nodes, rule, u[..., :0], most=1).isnan().all()
    computed = distributions(nodes, rule, u, most=1)
    expected = sum(written_out(p[0, 0], q[0, 0], rule, 1, 2, None))
    every = computed[:, 0].double()
    assert every.shape == (count, 2, V)
    # five standard errors, and float32
    near = 5 * every.flatten(0, 1).std(0) / math.sqrt(2 * count) + 1e-6
    assert ((every.mean((0, 1)) - expected).abs() < near).all()
    tv, kl, outside, *others = emitted._corrected(nodes.p, computed)[:, :, 0].double()
    assert torch.stack(others).isnan().all()
    exact = distances(p[0, 0].double(), expected)
    assert abs(float(kl.mean() - exact[1])) < 5 * float(kl.std()) / math.sqrt(count) + 1e-6
    assert float(outside.abs().max()) == 0
    if name == "exact":
        assert float(torch.stack([tv, kl]).abs().max()) < 1e-6  # not only on average
    else:
        assert float(exact[1]) > 1e-3


def test_the_distances() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]])
    e = torch.tensor([[0.25, 0.25, 0.5, 0.0], [0.5, 0.25, 0.0, 0.25]])
    tv, kl, outside, reverse, missed = distances(p, e)
    assert tv.tolist() == [0.25, 0.5]
    assert float(kl[0]) == pytest.approx(0.25 * math.log(0.5) + 0.5 * math.log(2))
    assert outside.tolist() == [0, 0.5]
    assert missed.tolist() == [0, 0]
    assert reverse.tolist() == pytest.approx([0.25 * math.log(2), math.log(2)])
    assert distances(e[1], p[1])[1:].tolist() == pytest.approx([math.log(2), 0, 0.5 - 0.5 * math.log(2), 0.5])
    for off in (1e-3, 1e-2, 0.1):  # either side of where the formula changes
        near = p[:1] * (1 + off * torch.tensor([1.0, -1, -1, 0]))
        a, b = near[0, :3].double(), p[0, :3].double()
        for measure, (x, y) in ((1, (a, b)), (3, (b, a))):
            expected = float((x * (x / y).log() - x + y).sum())
            assert float(distances(p[:1], near)[measure, 0]) == pytest.approx(expected, rel=1e-4)


# --- images and rows ------------------------------------------------------------------------------------------------


def test_an_infinite_divergence_is_no_value() -> None:
    records = images(trace(outside=0.09), [4, 9])
    assert [(r.emitted_tv, r.emitted_kl) for r in records] == [(0.25, None), (0.0, 0.0)]
    assert records[0].emitted_outside == pytest.approx(0.01)
    row = summary.columns(records)
    assert (row["emitted_tv"], row["emitted_kl"], row["emitted_kl_stderr"]) == (0.125, None, None)
    cfg = configuration.compose(["method=lantern"])
    [infinite] = emitted_remarks(cfg, records)
    assert (infinite.code, infinite.values["share"]) == ("emitted_infinite", pytest.approx(0.005))
    assert emitted_remarks(cfg, images(trace(), [4, 9])) == []
    missing = images(trace(missed=0.09), [4, 9])
    assert [(r.emitted_kl, r.emitted_kl_reverse) for r in missing] == [(0.5, None), (0.0, 0.0)]
    row = summary.columns(missing)
    assert (row["emitted_kl"], row["emitted_kl_reverse"]) == (0.25, None)


def test_a_missing_measurement_is_no_value() -> None:
    measured, cfg = trace(), configuration.compose(["method=medusa"])
    fields = ["emitted_" + name for name in "tv kl outside kl_reverse missed kl_optimal ratio".split()]
    for absent in (torch.zeros(2, 0), torch.full((2, 9), torch.nan)):
        records = images(replace(measured, **dict.fromkeys(fields, absent)), [4, 9])
        row = summary.columns(records)
        assert [row[c] for c in ("emitted_tv", "emitted_tv_stderr", "emitted_kl", "emitted_kl_stderr")] == [None] * 4
        assert emitted_remarks(cfg, records) == [remark("emitted_tree", "emitted_kl", rule="typical")]
        of_verification = remark("emitted_verification", "emitted_kl", verification="block")
        assert emitted_remarks(cfg.changed(verification="block"), records) == [of_verification]
        assert emitted_remarks(cfg.changed(emitted_draws=0), records) == []
        mixed = [records[0], images(measured, [4, 9])[1]]
        assert emitted_remarks(cfg, mixed) == [remark("emitted_not_recorded", "emitted_kl", images=1)]


# --- whole sequences --------------------------------------------------------------------------------------------------

T = 4
P = random_tables(V, T, seed=1, sharpness=1.5)
Q = random_tables(V, T, seed=2, sharpness=1.5, near=P, distance=0.6)
TARGET = sequence_probs(P)
COUNT = 20_000


def decoded(rule: Rule, paths: Any, chosen: bool = False, count: int = COUNT, draws: int = 4) -> Decoded[Any]:
    drafter = TabularDrafter(Q, paths, chosen)
    config = DecoderConfig(TabularTarget(P), drafter, rule, Sampling(), emitted_draws=draws)
    return decode(config, None, tiny.rng(count))


def kl_of(probs: Tensor) -> float:
    return float((probs * (probs / TARGET).log()).nan_to_num(0).sum())


def enumerated(rule: Rule, paths: list[tuple[int, ...]], chosen: bool) -> tuple[Tensor, Tensor]:
    """The distribution (V**T,) of the sequences, and the expected KL(e || p) at every position (T,)."""
    children = {path: sum(other[:-1] == path for other in paths if other) for path in [(), *paths]}
    states: dict[tuple[int, tuple[int, ...]], float] = {(0, ()): 1.0}  # (code of the prefix, node): probability
    expected = torch.zeros(T, dtype=torch.float64)
    for t in range(T):
        following: dict[tuple[int, tuple[int, ...]], float] = defaultdict(float)
        for (prefix, node), weight in states.items():
            p, q = P[t][prefix], Q[t][prefix]
            order = q.topk(V).indices.tolist() if chosen else None
            parts = written_out(p, q, rule, len(node) + 1, children[node], order)
            e = sum(parts)
            expected[t] += weight * float((e * (e / p).log()).nan_to_num(0).sum())
            for m, part in enumerate(parts):
                onward = (*node, m) if m < children[node] else ()
                for x in range(V):
                    following[prefix * V + x, onward] += weight * float(part[x])
        states = following
    probs = torch.zeros(V**T, dtype=torch.float64)
    for (prefix, _), weight in states.items():
        probs[prefix] += weight
    return probs, expected


FORK = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
COMB = [(0,), (1,), (2,), (0, 0)]


@pytest.mark.parametrize(("name", "paths"), [("cool", chain_paths(2)), ("neighbourhood", FORK), ("uniform", COMB)])
def test_nodes_after_the_end_of_a_path_do_not_matter(
    name: str, paths: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where all nodes are computed. The table is small, so its rows are not aligned to vectors, whose last
    bits differ: single precision."""
    visited = decoded(RULES[name], paths, count=300).trace
    monkeypatch.setattr(ops, "DYNAMIC_SHAPES", ())
    every = decoded(RULES[name], paths, count=300).trace
    for field in ("emitted_tv", "emitted_kl", "emitted_kl_reverse", "emitted_ratio"):
        torch.testing.assert_close(getattr(every, field), getattr(visited, field), atol=1e-6, rtol=1e-5)
    assert visited.emitted_tv.max() > 0.01


@pytest.mark.parametrize(
    ("name", "paths", "chosen"),
    [
        ("exact", FORK, False),
        ("exact", COMB, True),
        ("uniform", chain_paths(2), True),
        ("uniform", COMB, False),
        ("cool", chain_paths(2), False),
        ("cool", FORK, True),
        ("neighbourhood", FORK, False),
        ("neighbourhood", COMB, True),
        ("lantern_pp", chain_paths(2), False),
        ("lantern_pp", FORK, True),
    ],
)
def test_the_sum_over_positions_bounds_the_divergence_of_sequences(name: str, paths: Any, chosen: bool) -> None:
    """Everything is enumerated. The decoded sequences follow the enumerated distribution, the recorded divergences have
    the enumerated mean at every position, and their sum is at least the divergence of that distribution."""
    out = decoded(RULES[name], paths, chosen, 3000)
    probs, expected = enumerated(RULES[name], paths, chosen)
    assert tiny.fit(codes(out.tokens, V), probs / probs.sum()) > 1e-4
    kl = out.trace.emitted_kl.double()
    near = 5 * kl.std(0) / math.sqrt(len(kl)) + 1e-6
    assert ((kl.mean(0) - expected).abs() < near).all()
    total, divergence = float(expected.sum()), kl_of(probs)
    assert total >= divergence - 1e-6
    assert (total > 1e-3) == (name != "exact")


def test_a_deterministic_rule() -> None:
    """The longest accepted path counts: a point mass at each of its tokens, the target at its end."""
    out = decoded(Typical(0.3, 0.9), FORK, chosen=True, count=300)
    tables = torch.stack([P[t][codes(out.tokens[:, :t], V)] for t in range(T)], 1)
    kept = tables.gather(2, out.tokens.unsqueeze(-1)).squeeze(-1)
    ends = (out.trace.accepted + 1).cumsum(1) - 1  # the position of each step's own token
    last = torch.zeros(len(kept), 3 * T).scatter_(1, torch.where(torch.arange(T) < out.steps[:, None], ends, 2 * T), 1)
    on = last[:, :T] == 0
    assert 0 < on.float().mean() < 1
    torch.testing.assert_close(out.trace.emitted_tv, torch.where(on, 1 - kept, 0.0))
    torch.testing.assert_close(out.trace.emitted_kl, torch.where(on, -kept.log(), 0.0))
    assert out.trace.emitted_outside.abs().max() == 0


@pytest.mark.parametrize("rule", [RULES["lantern"], Typical(0.3, 0.9)], ids=lambda rule: rule.name)
def test_the_chain_rule_is_exact_if_the_prefix_determines_the_emitted_distribution(rule: Rule) -> None:
    """Chains as long as the image, and a rule without depth: e at a position is the same in every step and at every
    depth. On trees a deterministic rule has no computed e."""
    out = decoded(rule, chain_paths(T))
    total = out.trace.emitted_kl.double().sum(1)
    divergence = kl_of(theorem.chain_statistics(P, Q, rule, T).probs)
    assert float(total.mean()) == pytest.approx(divergence, abs=5 * float(total.std()) / math.sqrt(COUNT))
    assert decoded(rule, FORK, count=3).trace.emitted_kl.isnan().any(1).all() == rule.deterministic


def test_an_image_does_not_depend_on_the_draws() -> None:
    without, with_draws = (decoded(RULES["cool"], FORK, count=50, draws=draws) for draws in (0, 8))
    assert torch.equal(without.tokens, with_draws.tokens)
    assert without.trace.emitted_kl.shape == (50, 0)


#: Those of discrete tokens whose emitted distribution is measured.
PRESETS = [
    name
    for name in parameters.choices("method")
    if parameters.kind("method", name) != "continuous"
    and parameters.method_choices(name).get("verification", "token") in ("token", "block")
    and parameters.default("drafter", parameters.method_choices(name)["drafter"], "raster") is not False
]


@pytest.mark.parametrize("preset", PRESETS)
def test_an_exact_preset_emits_the_targets_distribution(preset: str) -> None:
    """On a tabular model, with every draft that its audit tries; a relaxed preset does not. V = 8, so that the rejected
    tokens of some nodes are drawn."""
    model, words = models.built_in("v8t4"), [f"method={preset}"]
    cfg = configuration.compose(words)
    for more in sizes.variants(cfg, {"method"}, model):
        cfg = configuration.compose([*words, *more])
        method = audit.assemble(cfg, model)
        out = decode(replace(method.config, emitted_draws=2), None, tiny.rng(40))
        if method.config.drafter.shape.biased:
            assert out.trace.emitted_tv.shape[1] == 0
            continue
        largest = max(float(x.abs().max()) for x in (out.trace.emitted_tv, out.trace.emitted_kl))
        assert out.trace.emitted_outside.abs().max() == 0
        assert largest < 1e-6 if cfg.rule == "exact" else largest > 1e-3, more
