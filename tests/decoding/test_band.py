"""The band and mentored decoding: the theorem's properties on random nodes of any vocabulary, and whole sequences
against an enumeration. Their formulas: test_rules."""

from __future__ import annotations

from collections import defaultdict

import pytest
import tiny
import torch
from test_rules import PaperBand
from torch import Tensor

from specbench.audit import theorem
from specbench.audit.tabular import TabularDrafter, TabularTarget, codes, random_tables, sequence_probs
from specbench.decoding.emitted import distances
from specbench.decoding.loop import DecoderConfig, decode
from specbench.decoding.rules import Band, Mentored, Rule, cool, exact, uniform
from specbench.decoding.rules.band import least_divergence, lower_limit
from specbench.decoding.rules.base import neighbours
from specbench.decoding.rules.groups import Neighbourhood
from specbench.decoding.rules.lantern import Lantern
from specbench.decoding.rules.thresholds import Typical
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import chain_paths
from specbench.decoding.verify import TokenWise
from specbench.decoding.verify.block import BlockVerification

SIZES = (2, 17, 4096)


def nodes(count: int, size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """p, q (N, V): near and far ones, with zeros in either, point masses, and equal ones."""
    g = torch.Generator().manual_seed(size)
    p = (3 * torch.randn(count, size, generator=g)).softmax(-1)
    far = torch.rand(count, 1, generator=g) * 3
    q = (p.log() + far * torch.randn(count, size, generator=g)).softmax(-1)
    for x, first in ((p, 1), (q, 2)):  # of eight nodes two have zeros, one of them in both
        for half in (x[first::8], x[3::8]):
            half *= torch.rand(half.shape, generator=g) < 0.6
            half[:, 0] += 1e-3
    point = torch.eye(size)[torch.randint(size, (count,), generator=g)]
    p[4::32], q[5::32] = point[4::32], point[5::32]
    q[6::32] = p[6::32]
    p, q = p.to(dtype), q.to(dtype)
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def emitted(rule: Band | Mentored, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """e (N, V) and the acceptance (N,)."""
    depth = torch.ones(len(p), dtype=torch.int64)
    kept = q * rule.acceptance(p, q, depth)
    accepted = kept.sum(-1, keepdim=True)
    return kept + (1 - accepted) * rule.residual(p, q, depth, depth), accepted[:, 0]


def divergence(e: Tensor, p: Tensor) -> Tensor:
    return torch.xlogy(e, torch.where(p > 0, e / p, 1.0)).sum(-1)


@pytest.mark.parametrize("size", SIZES)
def test_emitted_distributions_are_in_the_band(size: int) -> None:
    """Hundreds of nodes in total. A test below shows that no rule with this acceptance has a smaller divergence."""
    count = 200 if size < 1000 else 64
    p, q = nodes(count, size)
    before = 1 - 0.5 * (p - q).abs().sum(-1)
    for strength in (0.0, 0.1, 0.45, 1.5, 6.0):
        rule = Band(strength, 0.0, 1)
        low, high = rule.limits(p, q, torch.ones(count, dtype=torch.int64))
        e, accepted = emitted(rule, p, q)
        torch.testing.assert_close(e.sum(-1), torch.ones(count, dtype=e.dtype), atol=1e-12, rtol=0)
        # `low` has float32's precision, and the raised mass equals a rejection's up to the same absolute error
        assert (e <= high[:, None] * p + 1e-6).all()
        assert (e >= low[:, None] * p - 1e-6).all()
        assert (low <= 1).all()
        assert (high >= 1 - 1e-12).all()
        assert (accepted >= before - 1e-6).all()  # does not decrease in strength
        before = accepted
        assert (divergence(e, p) <= high.log() + 1e-6).all()


@pytest.mark.parametrize("size", SIZES)
def test_mentored_decoding_spends_its_budget(size: int) -> None:
    """Computed from sums over sorted tokens. The band with the same s, computed by bisection over the vocabulary, has
    the same limits."""
    count = 64
    p, q = nodes(count, size)
    ones = torch.ones(count, dtype=torch.int64)
    every = emitted(Band(1e3, 0.0, 1), p, q)[1]
    before = torch.zeros(count)
    for budget in (0.0, 0.003, 0.05, 0.4):
        rule = Mentored(budget)
        low, high = rule.limits(p, q, ones)
        e, accepted = emitted(rule, p, q)
        spent = divergence(e, p)
        torch.testing.assert_close(e.sum(-1), torch.ones(count, dtype=e.dtype), atol=1e-12, rtol=0)
        assert (spent <= budget + 1e-6).all()
        assert ((spent >= budget - 1e-5) | (accepted >= every - 1e-6)).all()  # the widest: or nothing is left to accept
        assert (accepted >= before - 1e-6).all()
        before = accepted
        measurable = low > 0.01  # float32's precision of `low` suffices for s
        spread = (high / low)[measurable]
        same = lower_limit(p[measurable], q[measurable], spread, 30)[:, None]
        again = torch.minimum(
            torch.maximum(q[measurable], same * p[measurable]), spread[:, None] * same * p[measurable]
        )
        assert int(measurable.sum()) > count / 2
        torch.testing.assert_close(again, e[measurable], atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [3, 256, 16_384])
def test_float32_is_enough(size: int) -> None:
    p, q = nodes(64 if size < 10_000 else 16, size, torch.float32)  # 16: each kind of node
    for rule in (Band(0.1, 0.0, 1), Band(0.45, 0.0, 1), Band(5.0, 0.0, 1), Band(1e3, 0.0, 1), Mentored(0.05)):
        e, _ = emitted(rule, p, q)
        exactly, _ = emitted(rule, p.double(), q.double())
        assert ((e - exactly).abs().sum(-1) < 1e-5).all()
        assert not e[p == 0].any()


@pytest.mark.parametrize("size", [2, 17, 256])
def test_no_rule_is_nearer_than_the_band_of_its_acceptance(size: int) -> None:
    """At every node the ratio is at least 1, and it is 1 for the bands. Drafts have only tokens that the target can
    give: rules by nearness accept others, at an infinite divergence."""
    p, q = nodes(60, size)
    q = torch.where(p > 0, q, 0.0)
    p, q = (x[q.sum(-1) > 0.01] for x in (p, q))
    q = q / q.sum(-1, keepdim=True)
    depth = torch.ones(len(p), dtype=torch.int64)
    near = neighbours(torch.randn(size, 3, generator=torch.Generator().manual_seed(0)), 4)
    rules: dict[str, Rule] = {
        "exact": exact(),
        "uniform": uniform(1.5),
        "uniform, strict": uniform(0.7),
        "cool": cool(2.0, 3, 1.5),
        "neighbourhood": Neighbourhood(near[:, :2], "optimal"),
        "lantern": Lantern("lantern", near, 3, "tvd", 0.2, "optimal"),
        "lantern++": Lantern("lantern_pp", near, 3, "total", 2.0, "optimal"),
        "typical": Typical(0.3, 0.9),
        "band": Band(0.45, 0.5, 3),
        "mentored": Mentored(0.05),
    }
    for name, rule in rules.items():
        kept = q * rule.acceptance(p, q, depth)
        accepted = kept.sum(-1)
        e = kept + (1 - accepted)[:, None] * rule.residual(p, q, depth, depth)
        spent, least = distances(p, e)[1], least_divergence(p, q, accepted)
        assert (least >= 0).all()
        assert (spent >= least - 1e-6).all(), name
        if name in ("exact", "band", "mentored"):
            torch.testing.assert_close(spent, least, atol=1e-6, rtol=1e-5)
        elif size > 3 and name != "uniform, strict":  # that one is exact, with Eq. 10
            assert (spent > least + 1e-4).any(), name


def enumerated(p: list[Tensor], q: list[Tensor], strength: float, decay: float, window: int) -> Tensor:
    """The distribution of the sequences of a chain of `window`, token after token, by the band's definition."""
    paper = PaperBand(lambda r, q, i: strength * sum(decay**j for j in range(window - i + 1)))
    states, size = {(0, 0): 1.0}, p[0].shape[1]  # (code of the prefix, accepted tokens of the draft): probability
    for of_target, of_drafter in zip(p, q, strict=True):
        following: dict[tuple[int, int], float] = defaultdict(float)
        for (code, kept), chance in states.items():
            a, b = of_target[code].tolist(), of_drafter[code].tolist()
            low, high = paper.limits(a, b, kept + 1)
            for x in range(size):
                e = min(max(b[x], low * a[x]), high * a[x]) if kept < window else a[x]
                accepted = min(b[x], e) if kept < window else 0.0
                following[code * size + x, kept + 1] += chance * accepted
                following[code * size + x, 0] += chance * (e - accepted)
        states = following
    probs = torch.zeros(size ** len(p), dtype=torch.float64)
    for (code, _), chance in states.items():
        probs[code] += chance
    return probs


def test_block_verification_emits_the_same_and_accepts_more() -> None:
    """With the same s at all depths and drafts that reach the end, every token has the distribution that its prefix
    determines."""
    p = random_tables(3, 4, seed=1, sharpness=1.5)
    q = random_tables(3, 4, seed=2, sharpness=1.5, near=p, distance=0.7)
    rule = Band(0.5, 0.0, 4)
    emitted = [
        rule.output_distribution(a.double(), b.double(), torch.ones(len(a), dtype=torch.int64)) for a, b in zip(p, q)
    ]
    steps = []
    for verification in (TokenWise(), BlockVerification()):
        drafter = TabularDrafter(q, chain_paths(4))
        config = DecoderConfig(TabularTarget(p), drafter, rule, Sampling(), verification=verification)
        out = decode(config, None, tiny.rng(20_000))
        assert tiny.fit(codes(out.tokens, 3), sequence_probs(emitted)) > 1e-4
        assert tiny.fit(codes(out.tokens, 3), sequence_probs(p)) < 1e-6
        steps.append(out.steps.float().mean())
    assert steps[1] < 0.99 * steps[0]


@pytest.mark.parametrize(("strength", "decay", "window"), [(0.5, 0.5, 2), (1.0, 0.0, 3), (0.3, 0.9, 1)])
def test_sequences_match_the_enumeration(strength: float, decay: float, window: int) -> None:
    """Against the audit's own enumeration; and the counts of 8 sequences from the real loop are a sample of that
    distribution."""
    p = random_tables(2, 3, seed=1, sharpness=1.5)
    q = random_tables(2, 3, seed=2, sharpness=1.5, near=p, distance=0.7)
    wanted = enumerated(p, q, strength, decay, window)
    rule = Band(strength, decay, window)
    computed = theorem.chain_statistics(p, q, rule, window)
    assert float((computed.probs - wanted).abs().max()) < 1e-6
    off = 0.5 * float((wanted - sequence_probs(p)).abs().sum())
    assert 0.01 < off <= computed.bound + 1e-6
    samples = 20_000
    config = DecoderConfig(TabularTarget(p), TabularDrafter(q, chain_paths(window)), rule, Sampling())
    tokens = decode(config, None, tiny.rng(samples)).tokens
    assert tiny.fit(codes(tokens, 2), wanted) > 1e-6
    assert tiny.fit(codes(tokens, 2), sequence_probs(p)) < 1e-6
