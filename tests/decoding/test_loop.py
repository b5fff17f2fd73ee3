"""The decode loop with models whose full distribution is known."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import pytest
import tiny
import torch

from specbench.audit.tabular import TabularDrafter, TabularTarget, codes, random_tables, sequence_probs
from specbench.audit.theorem import chain_statistics
from specbench.decoding import rules, trees
from specbench.decoding.batch import decode_stream
from specbench.decoding.drafters.none import NoDraft
from specbench.decoding.loop import DecoderConfig, Decoding, decode
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import chain_paths, parse
from specbench.decoding.verify.base import accepted_path

P = random_tables(4, 4, seed=1, sharpness=1.5)
Q = random_tables(4, 4, seed=2, sharpness=1.5, near=P, distance=0.6)
COUNT = 20_000
PLAIN = Sampling()
TREES = {
    "chain of 3": chain_paths(3),
    "wide": parse("[[0],[1],[2]]"),
    "bushy": parse("[[0],[1],[0,0],[0,1],[1,0],[0,0,0],[0,1,0]]"),
}


def run(drafter, rule, images=COUNT, sampling=PLAIN, target=P):
    return decode(DecoderConfig(TabularTarget(target), drafter, rule, sampling), None, tiny.rng(images))


def fit(tokens, probs) -> float:
    return tiny.fit(codes(tokens, 4), probs)


# By chance, one test in ten thousand would fail; the seeds are fixed, so no test fails at random.
ALPHA = 1e-4


def test_vanilla_has_the_targets_distribution_and_one_token_per_step():
    out = run(NoDraft(), rules.exact())
    assert fit(out.tokens, sequence_probs(P)) > ALPHA
    assert out.steps.eq(4).all()
    assert out.drafted.eq(0).all()


@pytest.mark.parametrize(("name", "chosen"), [*((name, False) for name in TREES), ("bushy", True)])
def test_the_exact_rule_is_lossless_on_every_tree(name, chosen):
    """With candidates that are drawn, or chosen as the most probable ones."""
    out = run(TabularDrafter(Q, TREES[name], chosen), rules.exact())
    assert fit(out.tokens, sequence_probs(P)) > ALPHA
    assert out.steps.float().mean() < 4  # and it saves steps


def test_a_wrong_residual_is_caught():
    class Broken(rules.Relaxed):
        def residual(self, r, q, token, depth):
            return r

    assert fit(run(TabularDrafter(Q, TREES["chain of 3"]), Broken("broken", [1.0])).tokens, sequence_probs(P)) < 1e-6


def test_filters_apply_to_target_and_draft_alike():
    sampling = Sampling(temperature=0.7, top_k=3, top_p=0.9)
    filtered = [sampling.probs(t.log()) for t in P]
    out = run(TabularDrafter(Q, TREES["bushy"]), rules.exact(), sampling=sampling)
    assert fit(out.tokens, sequence_probs(filtered)) > ALPHA


RELAXED = {
    "exact": rules.exact(),
    "uniform": rules.uniform(1.4),
    "cool": rules.cool(1.1, 3),
    "cool, vanilla residual": rules.cool(1.1, 3, resample="vanilla"),
    "cool, linear": rules.cool(1.3, 3, schedule="linear"),
    "cool, floored": rules.cool(1.1, 3, nu=2.0, floor=1.0),
}


class DraftsOnce(TabularDrafter):
    """Drafts only in the first round. The target samples everything after it: the virtual extension of Cool-SD's
    Theorem 2."""

    def open(self, *args):
        self.first = True
        return super().open(*args)

    def propose(self, *args):
        draft, first, self.first = super().propose(*args), self.first, False
        draft.valid[:, 1:] &= first
        return draft


@pytest.mark.parametrize("name", RELAXED)
def test_theorem_2(name):
    """Expected accepted length (Eq. 7) and the bound on total variation (Eq. 8) of one round; the target samples the
    rest."""
    rule = RELAXED[name]
    statistics = chain_statistics(P[:3], Q[:3], rule, 3)
    expected, bound = statistics.expected, statistics.first
    out = run(DraftsOnce(Q, chain_paths(3)), rule)
    first = 1 + out.accepted.double()
    # 4.5 standard errors: one run in 150,000 by chance
    assert abs(float(first.mean()) - expected) < 4.5 * float(first.std()) / COUNT**0.5
    probs = sequence_probs(P)
    measured = torch.bincount(codes(out.tokens, 4), minlength=len(probs)).double() / COUNT
    tv = 0.5 * float((measured - probs).abs().sum())
    # sampling alone puts a plain sampler this far off: sum sqrt(p (1 - p) / n) bounds twice its mean
    noise = 0.5 * float((probs * (1 - probs) / COUNT).sqrt().sum())
    assert tv < bound + 1.5 * noise
    if name == "exact":
        assert bound < 1e-6
    else:
        assert tv > 3 * noise  # the effect of the relaxation is visible


def test_equation_10_beats_equation_11_where_omega_falls_below_one():
    falling = [rules.cool(1.1, 3, resample=r) for r in ("optimal", "vanilla")]
    assert min(falling[0].omega) < 1
    bounds = [chain_statistics(P[:3], Q[:3], r, 3).first for r in falling]
    assert bounds[0] < bounds[1]
    rising = [rules.uniform(1.5, r) for r in ("optimal", "vanilla")]
    bounds = [chain_statistics(P[:3], Q[:3], r, 3).first for r in rising]
    assert bounds[0] == pytest.approx(bounds[1], abs=1e-6)  # Proposition 1: they agree where omega >= 1


def test_acceptance_is_counted_inside_the_image_only():
    out = run(TabularDrafter(P, chain_paths(3)), rules.exact(), 16)  # the draft is the target, so everything is kept
    assert out.steps.eq(1).all()
    for drafted, inside in ((3, 3), (8, 4)):  # eight are drafted, four of them inside the image
        out = run(TabularDrafter(P, chain_paths(drafted)), rules.exact(), 16)
        assert torch.equal(out.accepted, torch.full((16,), inside))
        assert torch.equal(out.drafted, out.accepted)


def test_the_papers_schedule():
    exponential, linear = (rules.cool_schedule(1.1, 5, 0.7, name) for name in ("exponential", "linear"))
    assert exponential == pytest.approx([2.86, 1.42, 0.70, 0.35, 0.17], abs=0.006)
    assert sum(exponential) / 5 == pytest.approx(1.1)
    assert sum(linear) / 5 == pytest.approx(1.1)
    assert min(rules.cool_schedule(1.1, 5, 0.7, "exponential", floor=1.0)) == 1.0


def test_the_seconds_of_an_image_include_its_prefill_and_its_drafters(monkeypatch):
    """Time stands still but in the prefills: 100 s of the target and 10 s of the drafter, and 1 s of each pass."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Target(TabularTarget):
        def open(self, *arguments):
            now[0] += 100
            session = super().open(*arguments)
            forward = session.forward

            def one_second(*inputs):
                now[0] += 1
                return forward(*inputs)

            session.forward = one_second
            return session

    class Drafter(TabularDrafter):
        def open(self, *arguments):
            now[0] += 10
            return super().open(*arguments)

    config = DecoderConfig(Target(P), Drafter(Q, chain_paths(2)), rules.exact(), PLAIN)
    out = decode(config, None, tiny.rng(3))
    assert out.seconds == 110 + float(out.steps.max())
    results = decode_stream(partial(Decoding, config), lambda which: None, lambda which: tiny.rng(len(which)), 5, 3)
    seconds = [result.seconds for _, result in results]
    assert sum(seconds) == now[0] - out.seconds
    assert sum(seconds) > 2 * 110


def test_numbers_for_several_purposes_at_once_equal_separate_ones() -> None:
    rng, step = RandomStreams([(0, 3), (5, 1)]), torch.tensor([4, 9])
    several = rng.uniforms(step, 2, 6, 3)
    assert torch.equal(several, torch.stack([rng.uniform(step, 2 + i, 3) for i in range(6)], 1))


def test_the_accepted_path_of_a_chain_equals_that_of_a_tree() -> None:
    tree = trees.build(trees.chain_paths(4))
    accepted_child = torch.tensor([[1, 2, 3, 4], [-1, 2, 3, 4], [1, 2, -1, 4], [1, 2, 3, -1]])
    slot = tree.slot.expand(len(accepted_child), -1)
    chain, other = (accepted_path(topology, accepted_child, slot) for topology in (tree, replace(tree, is_chain=False)))
    assert all(torch.equal(a, b) for a, b in zip(chain, other, strict=True))
    assert chain[1].flatten().tolist() == [4, 0, 2, 3]
