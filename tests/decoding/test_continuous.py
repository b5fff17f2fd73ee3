"""The loop of continuous speculative decoding against plain loops, closed forms, numerical integrals and simulations
that share no code with it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hostless import numbers_unknown
from scipy import integrate, stats
from test_engine import at_once
from tiny import equal, image, results, rng
from torch._subclasses.fake_tensor import DataDependentOutputException

from specbench.audit.densities import built_in
from specbench.decoding.batch import Decoded, decode_stream
from specbench.decoding.continuous import (
    ContinuousDecoding,
    ContinuousRule,
    ContinuousSession,
    decode,
    loop,
    sessions,
    trajectory,
    verify,
)
from specbench.decoding.continuous.trajectory import (
    Trajectory,
    draw_trajectory,
    log_density,
    log_normal,
    normal,
    own_log_density,
)
from specbench.decoding.rng import RandomStreams
from specbench.engine.graph import Eager, Graphs
from specbench.errors import NumberError, UsageError
from specbench.models.mar import MAR, MARConfig
from specbench.models.mar_sampling import Guided


class Chain(ContinuousSession):
    """A model with closed forms. The condition of a token is the mean of the known tokens, wherever they are; then mean
    = keep[t] x + pull z + shift and log variance = level[t] + swing tanh(z)."""

    def __init__(self, length: int, keep: list[float], level: list[float], shift=0.0, pull=0.0, swing=0.0, dim=1):
        self.length, self.dim, self.steps = length, dim, len(keep)
        self.keep, self.level = torch.tensor(keep), torch.tensor(level)
        self.shift, self.pull, self.swing = shift, pull, swing

    def open(self, conditioning: Any, rows: int) -> Chain:
        return self

    def condition(self, tokens, known, row, positions, done, most):
        seen = torch.where(known[..., None], tokens, 0.0).sum(1) / known.sum(1, keepdim=True).clamp_min(1)
        return seen[:, None].expand(-1, positions.shape[1], -1)

    def moments(self, x, index, z):
        mean = self.keep[index, None] * x + self.pull * z + self.shift
        return mean, self.level[index, None] + self.swing * torch.tanh(z)


def of_pair(pair: Any, rule: ContinuousRule, rng: RandomStreams, **options: Any) -> Decoded:
    return decode(pair.target, pair.drafter, rule, None, rng, **options)


RELEASED = {"criterion": "paper", "verify": "parallel", "on_reject": "continue", "inner_temperature": 42.0}
RULES = {
    "exact": ContinuousRule(gamma=3),
    "not aligned": ContinuousRule(gamma=3, align=False),
    "path": ContinuousRule(gamma=3, criterion="path"),
    "paper": ContinuousRule(gamma=3, criterion="paper"),
    "parallel": ContinuousRule(gamma=3, verify="parallel"),
    "continue": ContinuousRule(gamma=3, on_reject="continue"),
    "released": ContinuousRule(gamma=3, prefill=0.05, final_noise=False, **RELEASED),
    "block": ContinuousRule(gamma=3, verification="block"),
    "block of paths": ContinuousRule(gamma=3, verification="block", criterion="path"),
    "layers": ContinuousRule(gamma=3, tries=2),
    "layers of paths": ContinuousRule(gamma=2, tries=3, criterion="path"),
    "vanilla": ContinuousRule(),
}
#: Their passes never wait for the host.
HOSTLESS = [name for name in RULES if name not in ("path", "block", "block of paths", "layers", "layers of paths")]


def test_log_normal_is_scipys() -> None:
    g = np.random.default_rng(0)
    x, mean, log_variance = g.normal(size=(3, 7, 4))
    spread = 0.7 * np.exp(0.5 * log_variance)
    for inner in (1.0, 42.0):  # it shrinks the distance from the mean; the density's height stays
        density = log_normal(*map(torch.from_numpy, (x, mean, log_variance)), temperature=0.7, inner=inner)
        wanted = stats.norm.logpdf((x - mean) / inner + mean, mean, spread).sum(-1)
        np.testing.assert_allclose(density, wanted, rtol=1e-12)


def test_the_density_of_a_path_is_scipys() -> None:
    model, n, rule = built_in("d2t4").target, 9, ContinuousRule(temperature=0.8)
    g = torch.Generator().manual_seed(0)
    states = torch.randn(n, model.steps + 1, 2, generator=g)
    z = torch.randn(n, 4, generator=g)
    path = Trajectory(states, torch.zeros(n, model.steps, 2), torch.zeros(n, model.steps, 2))
    wanted = np.zeros(n)
    for t in range(model.steps):
        mean, log_variance = model.moments(states[:, t + 1], torch.full((n,), t), z)
        spread = 0.8 * np.exp(0.5 * log_variance.double().numpy())
        wanted += stats.norm.logpdf(states[:, t].double(), mean.double(), spread).sum(-1)
    np.testing.assert_allclose(log_density(model, path, z, rule), wanted, rtol=1e-6)
    # a trajectory that the model drew itself holds the moments that it was drawn from
    drawn = draw_trajectory(model, z, torch.randn(n, model.steps + 1, 2, generator=g), rule, Eager())
    torch.testing.assert_close(own_log_density(drawn, rule), log_density(model, drawn, z, rule))


def test_a_large_batch_of_moments_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rule = built_in("d1t5").target, ContinuousRule()
    g = torch.Generator().manual_seed(0)
    z, noise = torch.randn(70, 4, generator=g), torch.randn(70, model.steps + 1, 1, generator=g)
    path = draw_trajectory(model, z, noise, rule, Eager())
    density = log_density(model, path, z, rule)
    monkeypatch.setattr(trajectory, "HEAD_ROWS", 2)
    # Products of other shapes may sum in another order. Each of the head's two has at most 8 terms and a bias: its
    # result is as with weights that differ by 9 * 2**-24 = 5.4e-7. A relative change of 1e-6 in z moves these states
    # and densities by 1.4e-5 (measured), and 8 steps follow each other: 2 * 0.54 * 1.4e-5 * 8 = 1.2e-4. A wrong row
    # moves them by 1.
    near = {"rtol": 0, "atol": 2e-4}
    torch.testing.assert_close(draw_trajectory(model, z, noise, rule, Eager()).states, path.states, **near)
    torch.testing.assert_close(log_density(model, path, z, rule), density, **near)


def test_the_numbers_are_normal() -> None:
    x = normal(rng(500), torch.arange(500), 1, 400).flatten().numpy()
    assert stats.kstest(x, "norm").pvalue > 1e-4  # one seed in 10,000
    assert np.isfinite(x).all()
    # uniforms are multiples of 2**-23; the ends of their range stay finite and alike
    ends = normal(_Ends(), torch.zeros(1, dtype=torch.int64), 1, 2)
    assert float(ends[0, 1]) == pytest.approx(stats.norm.isf(2.0**-24), rel=1e-4)
    assert float(ends[0, 0]) == pytest.approx(-stats.norm.isf(2.0**-24), rel=1e-4)


class _Ends(RandomStreams):
    def __init__(self) -> None:
        pass

    def uniform(self, step, tag, *shape):
        return torch.tensor([[0.0, 1 - 2.0**-23]])


# One token of one number, whose distribution does not depend on x_T (keep = 0 in the last step, or in all but it): p
# and q are known in closed form. (mean, log variance) of the target's and the drafter's last step:
P, Q = (0.4, -0.3), (-0.2, 0.2)
BY_CRITERION = {
    "exact": ContinuousRule(gamma=1),
    "a lower temperature": ContinuousRule(gamma=1, temperature=0.7),
    "not aligned": ContinuousRule(gamma=1, align=False),
    "paper, Sigma = e**0.45": ContinuousRule(gamma=1, criterion="paper"),
    "softened": ContinuousRule(gamma=1, inner_temperature=3.0),
}


@pytest.mark.parametrize("name", BY_CRITERION)
def test_one_token_against_integrals(name: str) -> None:
    """Two steps; the last one forgets x_1. A draft is kept with min(1, S p' / q') and else drawn from p max(0, 1 -
    q' / S p'), where p' and q' are the softened densities and S is the paper's factor."""
    rule, n = BY_CRITERION[name], 40_000
    # log variances of the first step: Sigma = exp(0.5 (0.6 - -0.3))
    target = Chain(1, [0.0, 0.5], [P[1], -0.3], P[0])
    drafter = Chain(1, [0.0, 0.5], [Q[1], 0.6], Q[0])
    factor = math.exp(0.45) if rule.criterion == "paper" else 1.0

    def density(moments: tuple[float, float], x: np.ndarray, inner: float = 1.0) -> np.ndarray:
        return stats.norm.pdf((x - moments[0]) / inner, 0, rule.temperature * math.exp(moments[1] / 2))

    x = np.linspace(-9, 9, 20_001)
    ratio = factor * density(P, x, rule.inner_temperature) / density(Q, x, rule.inner_temperature)
    kept = integrate.trapezoid(density(Q, x) * np.minimum(1, ratio), x)
    residual = density(P, x) * np.maximum(0, 1 - 1 / ratio)
    mass = integrate.trapezoid(residual, x)
    cdf = integrate.cumulative_trapezoid(residual, x, initial=0) / mass

    out = decode(target, drafter, rule, None, rng(n))
    accepted = out.trace.kept[:, 0]
    assert float(accepted.double().mean()) == pytest.approx(kept, abs=4.5 * math.sqrt(kept * (1 - kept) / n))
    fresh = out.tokens[~accepted].flatten().numpy()
    assert stats.kstest(fresh, lambda t: np.interp(t, x, cdf)).pvalue > 1e-4  # one seed in 10,000
    # the number of proposals is geometric: its mean is 1 / mass, its deviation sqrt(1 - mass) / mass
    tries = torch.tensor([proposals[0] for proposals in out.trace.proposals if proposals]).double()
    assert len(tries) == len(fresh)
    if mass > 0.1:  # fewer than 1 in 10**4 come near the bound of 100
        assert float(tries.mean()) == pytest.approx(1 / mass, abs=4.5 * math.sqrt(1 - mass) / mass / len(tries) ** 0.5)
    if name in ("exact", "a lower temperature", "not aligned"):
        assert kept == pytest.approx(1 - mass, abs=1e-6)  # the rest of q is the mass that p does not have
    first = out.trace.first[:, 0].double()
    assert float(first.mean()) == pytest.approx(kept, abs=4.5 * float(first.std()) / n**0.5)


def test_few_tries_leave_the_targets_own_proposal() -> None:
    """With one try, a rejected token is the target's sample in any case. A fallback is counted for each one that would
    have been proposed again."""
    target, drafter = Chain(1, [0.0], [P[1]], P[0]), Chain(1, [0.0], [Q[1]], Q[0])
    out = decode(target, drafter, ContinuousRule(gamma=1, proposals=1), None, rng(20_000))
    fresh = out.tokens[~out.trace.kept[:, 0]].flatten().numpy()
    assert stats.kstest(fresh, stats.norm(P[0], math.exp(P[1] / 2)).cdf).pvalue > 1e-4
    assert {tries[0] for tries in out.trace.proposals if tries} == {1}
    full = decode(target, drafter, ContinuousRule(gamma=1, proposals=1000), None, rng(20_000))
    assert int(full.trace.fallbacks.sum()) == 0
    assert out.trace.fallbacks.tolist() == [int(tries != [] and tries[0] > 1) for tries in full.trace.proposals]


def simulate(target: Chain, drafter: Chain, rule: ContinuousRule, n: int) -> np.ndarray:
    """The number of accepted tokens of a first draft of rule.gamma, n times, written again in plain NumPy: one draft
    token after another, min(1, p / q)."""
    g = np.random.default_rng(0)
    steps = target.steps
    drafts, alive, accepted = np.zeros((n, 0)), np.ones(n, bool), np.zeros(n, int)

    def step(model: Chain, x: np.ndarray, t: int, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean = float(model.keep[t]) * x + model.pull * z + model.shift
        return mean, rule.temperature * np.exp(0.5 * (float(model.level[t]) + model.swing * np.tanh(z)))

    for i in range(min(rule.gamma, target.length)):
        seen = drafts.mean(1) if i else np.zeros(n)
        verified = np.zeros(n) if rule.verify == "parallel" else seen
        x = g.normal(size=n)
        drawn = x if rule.align else g.normal(size=n)
        log_ratio = np.zeros(n)
        for t in reversed(range(steps)):
            mean_q, wide_q = step(drafter, x, t, seen)
            mean_p, wide_p = step(target, x if rule.criterion == "path" else drawn, t, verified)
            noise = g.normal(size=n)
            x = mean_q + wide_q * noise
            if t == 0 or rule.criterion == "path":
                log_ratio += stats.norm.logpdf(x, mean_p, wide_p) - stats.norm.logpdf(x, mean_q, wide_q)
            drawn = mean_p + wide_p * (noise if rule.align else g.normal(size=n))
            if t > 0 and rule.criterion == "paper":
                log_ratio += np.log(wide_q) - np.log(wide_p)
        alive &= g.uniform(size=n) < np.exp(np.minimum(0, log_ratio))
        accepted += alive
        drafts = np.concatenate([drafts, x[:, None]], 1)
    return accepted


LENGTHS = ("not aligned", "path", "paper", "parallel")


@pytest.mark.parametrize("rule", [*(RULES[name] for name in LENGTHS), ContinuousRule(gamma=7, temperature=0.8)])
def test_the_first_drafts_length_against_a_simulation(rule: ContinuousRule) -> None:
    """The share of every length, from 15,000 images and as many simulated drafts, within 4.5 standard errors of the
    difference; this fails by chance once in 150,000 lengths."""
    n = 15_000
    target = Chain(5, [0.7, 0.6, 0.8], [-1.0, -0.8, -0.6], 0.2, pull=0.5, swing=0.6)
    drafter = Chain(5, [0.65, 0.6, 0.7], [-0.9, -0.8, -0.8], 0.1, pull=0.35, swing=0.3)
    out = decode(target, drafter, rule, None, rng(n))
    assert (out.trace.offered[:, 0] == min(rule.gamma, 5)).all()
    seen = torch.bincount(out.trace.accepted[:, 0], minlength=6).numpy() / n
    wanted = np.bincount(simulate(target, drafter, rule, n), minlength=6) / n
    error = np.sqrt(2 * np.maximum(wanted * (1 - wanted), 1 / n) / n)
    assert (abs(seen - wanted) < 4.5 * error).all()
    assert (seen[: min(rule.gamma, 5) + 1] > 0.01).all()  # every length is put to the test


def plain(model, rule, keys, tokens_per_pass):
    """Decode images one by one, pass by pass, with the loop's noise and an order from its stream."""
    images, orders = [], []
    for key in keys:
        stream = RandomStreams([key])
        order = stream.uniform(torch.zeros(1, dtype=torch.int64), verify.ORDER, model.length)[0].argsort().tolist()
        tokens, known = torch.zeros(model.length, model.dim), torch.zeros(model.length, dtype=torch.bool)
        begin = 0
        for count in tokens_per_pass:
            new = {}
            for number in range(begin, begin + count):
                position = torch.tensor([[order[number]]])
                z = model.condition(
                    tokens[None], known[None], torch.tensor([0]), position, torch.tensor([[number]]), begin
                )[:, 0]
                noise = normal(stream, torch.tensor([number]), verify.NOISE, model.steps + 1, model.dim)[0]
                x = noise[model.steps]
                for t in reversed(range(model.steps)):
                    mean, log_variance = model.moments(x[None], torch.tensor([t]), z)
                    wide = torch.exp(0.5 * log_variance[0]) * rule.temperature
                    x = mean[0] + (noise[t] * wide if t > 0 or rule.final_noise else 0)
                new[order[number]] = x
            for position, x in new.items():
                tokens[position] = x
                known[position] = True
            begin += count
        images.append(tokens)
        orders.append(torch.tensor(order))
    return torch.stack(images), torch.stack(orders)


@pytest.mark.parametrize(
    ("options", "tokens_per_pass"),
    [({}, ()), ({"temperature": 0.7}, (1, 3, 1)), ({"final_noise": False}, (5,)), ({"temperature": 0}, (1, 3, 1))],
)
def test_vanilla_is_a_plain_loop(options: dict[str, Any], tokens_per_pass: tuple[int, ...]) -> None:
    model, keys = built_in("d1t5").target, [(3, i) for i in range(7)]
    rule = ContinuousRule(tokens_per_pass=tokens_per_pass, **options)
    out = decode(model, None, rule, None, RandomStreams(keys))
    tokens, order = plain(model, rule, keys, tokens_per_pass or (1,) * model.length)
    torch.testing.assert_close(out.tokens, tokens, rtol=0, atol=1e-6)
    assert torch.equal(out.trace.order, order)
    assert out.steps.tolist() == [len(tokens_per_pass or order[0])] * 7
    assert int(out.drafted.sum()) == int(out.trace.made.sum()) == int(out.trace.verified.sum()) == 0
    assert len(order.unique(dim=0)) > 1


@pytest.mark.parametrize(("criterion", "gamma"), [("exact", 1), ("paper", 2), ("path", 9), ("exact", 9)])
def test_a_drafter_that_is_the_target_is_vanilla(criterion: str, gamma: int) -> None:
    """The key of a token's noise is its number in the order of generation: draft, verification and vanilla decoding
    share it."""
    for name in ("d1t5", "d2t4"):
        model = built_in(name).target
        for prefill in (0.0, 0.3):
            rule = ContinuousRule(gamma=gamma, criterion=criterion, prefill=prefill)
            alone, out = decode(model, None, ContinuousRule(), None, rng(9)), decode(model, model, rule, None, rng(9))
            torch.testing.assert_close(out.tokens, alone.tokens, rtol=0, atol=1e-6)
            assert torch.equal(out.accepted, out.drafted)
            before = math.ceil(prefill * model.length)
            passes = before + math.ceil((model.length - before) / (gamma + 1))  # a token after each draft is free
            assert out.steps.tolist() == [passes] * 9
            assert sum(map(len, out.trace.proposals)) == 0


@pytest.mark.parametrize("name", ["exact", "path", "released", "block", "layers", "vanilla"])
def test_recorded_trajectories_change_nothing(name: str) -> None:
    """One engine decodes batch after batch, also of other sizes; the results of an earlier batch do not change."""
    pair, engine = built_in("d2t4"), Graphs(at_once)
    batches = [(3, 0), (3, 1), (5, 2)]
    in_place = [results(of_pair(pair, RULES[name], rng(*batch), engine=engine)) for batch in batches]
    assert equal(in_place, [results(of_pair(pair, RULES[name], rng(*batch))) for batch in batches])
    assert 1 < len(engine._calls) <= engine.most_calls


def reduced(steps: int = 2, device: str = "cpu") -> Guided:
    """A MAR with guidance, random weights."""
    head = {"head_depth": 1, "head_width": 32, "steps": steps}
    small = MARConfig(32, 1, 2, 32, 1, 2, length=9, token_dim=5, classes=4, buffer=4, **head)
    return Guided(MAR(small).eval().to(device), 2.0)


def under_way(rule: ContinuousRule, rows: int, device: str = "cpu") -> ContinuousDecoding:
    """The state after a pass of each kind, and before the last one."""
    rule = rule if rule.gamma else ContinuousRule(tokens_per_pass=(1, 2))
    labels, target, drafter = torch.arange(rows, device=device) % 4, reduced(device=device), reduced(device=device)
    images = ContinuousDecoding(target, drafter, replace(rule, prefill=0.1), labels, rng(rows, device=device))
    go_on(images)
    return images


def go_on(images: ContinuousDecoding) -> None:
    images.draw_directly(1)
    if images.rule.gamma:
        images.step()
        images.record_stats()


@pytest.mark.parametrize("name", ["vanilla", "continue"])
@torch.inference_mode()
def test_no_pass_waits_for_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some passes: test_capture, which needs Triton, checks every option."""
    monkeypatch.setattr(loop, "compacts", lambda device: False)
    images = under_way(RULES[name], 3)
    with numbers_unknown(images):
        go_on(images)
        with pytest.raises(DataDependentOutputException):
            images.remaining_tokens(images.rng.keys)


@pytest.mark.parametrize(
    ("name", "built"),
    [
        *((name, True) for name in RULES),
        *((name, False) for name in ("exact", "released", "block", "layers", "vanilla")),
    ],
)
def test_an_image_does_not_depend_on_the_other_images_of_its_batch(
    name: str, built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five images in one batch, and through three rows: each is the same as alone, and takes no more passes, whether
    or not the host asks which images are done. If not, a pass computes all images, also finished ones, which occur with
    the built-in models. MAR's images have a class each."""
    pair = built_in("d1t5")
    target, drafter = (pair.target, pair.drafter) if built else (reduced(), reduced())
    rule, count, labels = replace(RULES[name], prefill=0.2, proposals=4), 5, torch.tensor([2, 0, 3, 1, 1])
    alone = [decode(target, drafter, rule, labels[i : i + 1], rng([i], 1)) for i in range(count)]
    start = partial(ContinuousDecoding, target, drafter, rule)
    for compact in (True, False):
        monkeypatch.setattr(loop, "compacts", lambda device, compact=compact: compact)
        parts = [(range(count), decode(target, drafter, rule, labels, rng(count, 1)))]
        parts += decode_stream(start, lambda rows: labels[rows], partial(rng, seed=1), count, 3)
        for which, out in parts:
            assert all(equal(image(out, row), image(alone[i], 0)) for row, i in enumerate(which))
        assert sorted(i for which, _ in parts[1:] for i in which) == list(range(count))
    if built and name not in ("parallel", "continue", "released", "vanilla", "layers of paths"):
        assert len({int(finished.steps) for finished in alone}) > 1


def test_no_row_waits_for_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, rule, passes = built_in("d2t4"), ContinuousRule(gamma=3), []
    plain = ContinuousDecoding.step
    monkeypatch.setattr(ContinuousDecoding, "step", lambda images: (passes.append(1), plain(images))[1])
    steps = torch.stack([of_pair(pair, rule, rng(range(i, i + 4))).steps for i in range(0, 40, 4)])
    in_batches = int(steps.amax(1).sum())
    assert len(passes) == in_batches
    start = partial(ContinuousDecoding, pair.target, pair.drafter, rule)
    list(decode_stream(start, lambda rows: None, rng, 40, 4))
    assert int(steps.sum()) / 4 <= len(passes) - in_batches < in_batches


def test_many_copies_are_seen_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = built_in("d2t4")
    whole = results(of_pair(pair, RULES["exact"], rng(50)))
    monkeypatch.setattr(sessions, "CHUNK", 17)
    assert equal(results(of_pair(pair, RULES["exact"], rng(50))), whole)


@pytest.mark.parametrize(
    ("name", "gamma", "prefill"),
    [
        (name, gamma, (0.0, 0.3, 1.0)[(i + j) % 3])
        for i, name in enumerate(("exact", "paper", "continue", "parallel", "path", "released"))
        for j, gamma in enumerate((1, 3, 32) if i < 3 else (3,))
    ],
)
def test_every_token_is_accounted_for(name: str, gamma: int, prefill: float) -> None:
    pair = built_in("d1t5")
    length, rule = pair.length, replace(RULES[name], gamma=gamma, prefill=prefill, proposals=6)
    out = of_pair(pair, rule, rng(60))
    trace = out.trace
    before = math.ceil(prefill * length)
    for i in range(60):
        accepted, offered, start, first = (
            getattr(trace, x)[i].tolist() for x in ("accepted", "offered", "start", "first")
        )
        used = int(out.steps[i])
        drafts = range(before, used)  # steps that drafted
        assert all(accepted[s] == offered[s] == 0 for s in range(length) if s not in drafts)
        count, position, residuals, kept, verified = before, before, 0, [False] * before, [False] * before
        for s in drafts:
            assert (start[s], offered[s]) == (count, min(gamma, length - count))
            assert 0 <= first[s] <= 1
            if rule.on_reject == "continue":
                residuals += offered[s] - accepted[s]
                count += offered[s]
                continue
            count += accepted[s]
            kept += [True] * accepted[s]
            verified += [True] * accepted[s]
            if accepted[s] < offered[s]:
                residuals, count = residuals + 1, count + 1
                kept.append(False)
                verified.append(True)
            elif count < length and rule.verify == "causal":
                position, count = position + 1, count + 1
                kept.append(False)
                verified.append(False)
        assert count == length
        assert position + residuals + int(out.accepted[i]) == length
        assert int(out.accepted[i]) == sum(accepted) == int(trace.kept[i].sum())
        assert int(out.drafted[i]) == int(trace.verified[i].sum()) == int(out.accepted[i]) + residuals
        if rule.on_reject == "stop":
            assert (trace.kept[i].tolist(), trace.verified[i].tolist()) == (kept, verified)
        else:
            assert trace.verified[i].tolist() == [number >= before for number in range(length)]
        assert int(trace.made[i]) == sum(offered)
        assert len(trace.proposals[i]) == residuals
        assert all(1 <= t <= 6 for t in trace.proposals[i])
        assert int(trace.fallbacks[i]) <= sum(t == 6 for t in trace.proposals[i])
    assert prefill == 1 or 0 < int(out.accepted.sum()) < int(out.drafted.sum())
    assert sorted(trace.order[0].tolist()) == list(range(length))


def test_a_share_of_the_image_is_drawn_beforehand() -> None:
    """0.28 * 25 is slightly above 7 in floating point; the result must be 7 tokens."""
    assert 0.28 * 25 > 7
    model = Chain(25, [0.5], [0.0])
    for prefill, before in ((0.28, 7), (0.04, 1), (0.05, 2), (0.0, 0)):
        out = decode(model, model, ContinuousRule(gamma=25, prefill=prefill), None, rng(1))
        assert int(out.trace.start[0].max()) == before
        assert int(out.steps[0]) == before + 1


@pytest.mark.parametrize("criterion", ["exact", "path"])
def test_the_kept_tokens_of_a_draft_are_the_drafters(criterion: str) -> None:
    """With the same noise, a first draft as long as the image is the drafter's own image. With `stop` it is kept up to
    a rejection; with `continue` every accepted token stays."""
    pair = built_in("d1t5")
    drafted = decode(pair.drafter, None, ContinuousRule(), None, rng(200))
    target = decode(pair.target, None, ContinuousRule(), None, rng(200))
    for on_reject in ("stop", "continue"):
        rule = ContinuousRule(gamma=5, criterion=criterion, on_reject=on_reject)
        out = of_pair(pair, rule, rng(200))
        of_draft = torch.arange(5) < out.trace.accepted[:, :1] if on_reject == "stop" else out.trace.kept
        kept = torch.zeros_like(of_draft).scatter(1, out.trace.order, of_draft)  # by position
        torch.testing.assert_close(out.tokens[kept], drafted.tokens[kept], rtol=0, atol=1e-6)
        assert torch.isclose(out.tokens[~kept], drafted.tokens[~kept]).double().mean() < 0.01
        assert not torch.isclose(out.tokens[kept], target.tokens[kept]).all()
        later = (~out.trace.kept[:, :1] & out.trace.kept[:, 1:]).sum()  # accepted after a rejected first token
        assert int(later) > 20 if on_reject == "continue" else (of_draft.long().diff() <= 0).all()


def test_sixteen_dimensions_and_drafts_of_32_stay_finite() -> None:
    """Log ratios of 10,000 and more, of either sign."""
    n, length, steps = 4, 33, 15
    keep, level = [0.0] + [0.8] * (steps - 1), [-1.0] * steps  # the last step forgets: only Sigma remains
    aside = {"dim": 16, "pull": 0.3}
    target, forgetful = Chain(length, [0.8] * steps, level, **aside), Chain(length, keep, level, **aside)
    off = Chain(length, [0.8] * steps, level, 10.0, **aside)
    # Sigma = exp(0.5 (steps - 1) 16 delta): 112 delta
    wide, sure = (Chain(length, keep, [-1.0] + [-1.0 + delta] * (steps - 1), **aside) for delta in (100.0, -100.0))
    cases = {
        "far away": (target, off, "exact", -1),
        "far away, the full path": (target, off, "path", -1),
        "too sure": (forgetful, sure, "paper", -1),
        "too wide": (forgetful, wide, "paper", 1),
        "too sure, the full path": (forgetful, Chain(length, keep, [-9.0] * steps, **aside), "path", 0),
    }
    for name, (model, drafter, criterion, sign) in cases.items():
        rule = ContinuousRule(gamma=32, criterion=criterion, proposals=3)
        noise = torch.randn(n, steps + 1, 16, generator=torch.Generator().manual_seed(0))
        verifier, z = verify.Verifier(model, drafter, rule, Eager()), torch.zeros(n, 16)
        gain, _, _ = verifier.log_ratios(draw_trajectory(drafter, z, noise, rule, Eager()), z, lambda tag, x=noise: x)
        assert gain.isfinite().all()
        assert not sign or (sign * gain > 1e4).all(), name
        out = decode(model, drafter, rule, None, rng(n))
        assert out.tokens.isfinite().all()
        assert ((out.trace.first >= 0) & (out.trace.first <= 1)).all()
        if sign:
            assert torch.equal(out.accepted, out.drafted) == (sign > 0)


class Faulty(ContinuousSession):
    """A model that gives NaN for one image once enough tokens are known."""

    def __init__(self, model: Any, image: int, after: int) -> None:
        self.model, self.image, self.after = model, image, after
        self.length, self.dim, self.steps = model.length, model.dim, model.steps

    def open(self, conditioning: Any, rows: int) -> Faulty:
        return self

    def condition(self, tokens, known, row, positions, done, most):
        assert int(known.sum(1).max()) <= most
        z = self.model.condition(tokens, known, row, positions, done, most)
        return torch.where(((row == self.image) & (known.sum(1) == self.after))[:, None, None], math.nan, z)

    def moments(self, x, index, z):
        return self.model.moments(x, index, z)


@pytest.mark.parametrize("name", ["path", "released"])
def test_a_number_that_is_none_names_its_image_and_step(name: str) -> None:
    pair, rule = built_in("d1t5"), RULES[name]
    keys = RandomStreams([(4, i) for i in (9, 8, 7)])
    with pytest.raises(NumberError, match=r"target.*\(4, 8\).*step 3"):
        decode(Faulty(pair.target, 1, 2), None, ContinuousRule(), None, keys)
    # after two tokens of its own the target drafts no more: the first draft is the third step, for everyone
    rule = replace(rule, prefill=0.4)
    for who, models in (
        ("target", (Faulty(pair.target, 1, 2), pair.drafter)),
        ("drafter", (pair.target, Faulty(pair.drafter, 1, 2))),
    ):
        with pytest.raises(NumberError, match=rf"^the {who} .* \(seed, index\) \(4, 8\), step 3: .*cfg_scale"):
            decode(*models, rule, None, keys)


def test_the_token_after_a_draft_is_watched_too() -> None:
    model = built_in("d1t5").target
    with pytest.raises(NumberError, match=r"target.*\(0, 2\).*step 1"):
        decode(Faulty(model, 2, 3), model, ContinuousRule(gamma=3), None, rng(4))


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"gamma": 2, "tokens_per_pass": (3, 2)}, "use iterations=null"),
        ({"gamma": 2, "temperature": 0.0}, "temperature=0 leaves no densities to compare; use method=vanilla"),
        ({"gamma": 2, "criterion": "path", "final_noise": False}, "use final_noise=true"),
        ({"gamma": 2, "criterion": "path", "inner_temperature": 42.0}, "inner_temperature is for"),
    ],
)
def test_parameters_that_do_not_go_together(parameters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as e:
        ContinuousRule(**parameters)
    assert sentence in str(e.value)


def test_models_that_do_not_go_together() -> None:
    target = built_in("d1t4").target
    with pytest.raises(UsageError, match="drafter"):
        decode(target, None, ContinuousRule(gamma=1), None, rng(1))
    for other in ("d1t5", "d2t4"):
        with pytest.raises(UsageError, match="target"):
            decode(target, built_in(other).drafter, ContinuousRule(gamma=1), None, rng(1))


def test_which_rules_are_exact() -> None:
    exact = {name for name, rule in RULES.items() if rule.exact}
    assert exact == {"exact", "not aligned", "path", "block", "block of paths", "layers", "layers of paths", "vanilla"}
    assert not any(ContinuousRule(gamma=1, **x).exact for x in ({"inner_temperature": 2.0}, {"final_noise": False}))
    assert ContinuousRule(final_noise=False, inner_temperature=42.0).exact  # the target alone
