"""Block verification and layered acceptance of drafts of continuous tokens: both are lossless, have the lengths that
their formulas give, and wrong versions are detected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mutants
import numpy as np
import pytest
import test_densities
import torch
from scipy import integrate, stats
from test_continuous import Chain, of_pair
from test_densities import row_of
from tiny import rng

from specbench.audit.densities import built_in
from specbench.audit.levels import LEVEL
from specbench.audit.model_recipes import DENSITIES
from specbench.decoding.continuous import ContinuousRule, decide, decode
from specbench.errors import UsageError

pytestmark = pytest.mark.usefixtures("rows_together")
few_pairs = test_densities.few_pairs
BLOCK: dict[str, Any] = {"verification": "block"}
SCHEMES: dict[str, dict[str, Any]] = {
    "block": BLOCK | {"gamma": 4, "criterion": "path"},
    "block of last steps": BLOCK | {"gamma": 3},
    "block, not aligned": BLOCK | {"gamma": 2, "align": False},
    "layers": {"tries": 3, "gamma": 2, "criterion": "path"},
    "layers of last steps": {"tries": 2, "gamma": 3},
    "layers, not aligned": {"tries": 2, "gamma": 1, "align": False},
}


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_is_lossless(name: str) -> None:
    """The models alternate. `specbench audit` tries all of them with more samples. A lossless scheme fails once in
    10,000."""
    number = list(SCHEMES).index(name)
    words = {"temperature": 0.7 if number % 2 else 1.0, "prefill": 0.3 if number % 3 == 2 else 0.0}
    row = row_of([*DENSITIES][(number + 1) % 4], 8000, **SCHEMES[name], **words)
    assert row["verdict"] != "not lossless", row  # undecided where the sequence is too short for a part of the scheme
    assert row["fallbacks"] < 0.01 * row["samples"]
    assert row["proposals_max"] >= row["proposals"] >= 1


#: Mistake (`mutants`) -> the part of the scheme that it breaks.
WRONG = {
    "noise_is_carried_over": BLOCK | {"gamma": 3},
    "mass_is_not_bounded": BLOCK | {"gamma": 3},
    "mass_of_small_ratios": BLOCK | {"gamma": 3},
    "number_of_the_rejected_run": {"tries": 2, "gamma": 1},
    "one_run_for_all_proposals": {"tries": 4, "gamma": 1},
}


def worst(words: dict[str, Any]) -> float:
    """The smallest p-value of three tokens and of their sums. Each token is N(0, 1) under the target and N(1, 1) under
    the drafter."""
    target, drafter = Chain(3, [0.0], [0.0]), Chain(3, [0.0], [0.0], 1.0)
    out = decode(target, drafter, ContinuousRule(criterion="path", **words), None, rng(10_000))
    x = out.tokens[..., 0].gather(1, out.trace.order)
    numbers = [*x.unbind(1), *((x[:, 1:] + x[:, :-1]) / 2**0.5).unbind(1)]
    return min(float(stats.kstest(number.numpy(), "norm").pvalue) for number in numbers)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_version_is_caught(wrong: str) -> None:
    """A correct version fails for one seed in 2,000."""
    assert worst(WRONG[wrong]) > 1e-4
    with mutants.applied(mutants.NAMED[wrong]):
        assert worst(WRONG[wrong]) < LEVEL / 10


def test_the_mass_of_a_block() -> None:
    """By the definition, token by token."""
    x = 2 * torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    masses = decide.log_masses(x).exp()
    p = torch.ones(50, dtype=torch.float64)
    for i in range(7):
        torch.testing.assert_close(masses[:, i], p)
        if i < 6:
            p = (p * x[:, i].exp()).clamp_max(1)


def test_the_length_and_the_proposals_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first pass, the mean number of accepted tokens is the sum of P_1 to P_L, and the mean number of proposals
    is the sum of P_0 to P_(L-1), at most one per position. Both hold within 4.5 standard errors of the difference."""
    seen: list[tuple[Any, Any, Any]] = []
    plain = decide.verify_block

    def record_call(verifier: Any, compared: Any, *rest: Any) -> Any:
        result = plain(verifier, compared, *rest)
        seen.append((decide.log_masses(compared.log_ratio).exp(), result[0], result[2]))
        return result

    monkeypatch.setattr(decide, "verify_block", record_call)
    n = 10_000
    of_pair(built_in("d1t5"), ContinuousRule(gamma=4, criterion="path", verification="block"), rng(n))
    mass, length, proposals = seen[0]
    for expected, counts in ((mass[:, 1:].sum(1), length.double()), (mass[:, :-1].sum(1), proposals.double())):
        off = counts - expected
        assert abs(float(off.mean())) < 4.5 * float(off.std()) / n**0.5
    token = of_pair(built_in("d1t5"), ContinuousRule(gamma=4, criterion="path"), rng(n))
    first = token.trace.accepted[:, 0].double()
    assert float(length.double().mean() - first.mean()) > 0.02  # block verification accepts more, by 5 standard errors


P, Q = (0.4, -0.3), (-0.2, 0.2)  # mean and log variance of the only step of target and drafter


@pytest.mark.parametrize("tries", [2, 4])
def test_layers_against_integrals(tries: int) -> None:
    """One token with known distributions: how often one of the drafts is kept, the token's distribution, and one
    proposal of the target per image on average."""
    n, x = 40_000, np.linspace(-9, 9, 20_001)
    target, drafter = (Chain(1, [0.0], [level], mean) for mean, level in (P, Q))
    p, q = (stats.norm.pdf(x, mean, np.exp(level / 2)) for mean, level in (P, Q))
    acceptances = [integrate.trapezoid(q * np.clip(p / q - k, 0, 1), x) for k in range(tries)]
    expected = 1 - np.prod(1 - np.array(acceptances))
    assert expected > acceptances[0] + 0.02
    out = decode(target, drafter, ContinuousRule(gamma=1, tries=tries, criterion="path", proposals=1000), None, rng(n))
    share = float(out.trace.kept[:, 0].double().mean())
    assert share == pytest.approx(expected, abs=4.5 * (expected * (1 - expected) / n) ** 0.5)
    assert stats.kstest(out.tokens.flatten().numpy(), stats.norm(P[0], np.exp(P[1] / 2)).cdf).pvalue > 1e-4
    proposals = torch.tensor([sum(image) for image in out.trace.proposals]).double()
    assert float(proposals.mean()) == pytest.approx(1, abs=4.5 * float(proposals.std()) / n**0.5)
    # the drafts that were tried: k + 1 if k were rejected and the next was kept, or if all were rejected
    reached = np.cumprod([1.0, *(1 - k for k in acceptances[:-1])]).sum()
    assert float(out.drafted.double().mean()) == pytest.approx(reached, abs=4.5 * tries / n**0.5)


@pytest.mark.parametrize("words", [SCHEMES["block"], SCHEMES["layers"]])
def test_every_token_is_accounted_for(words: dict[str, Any]) -> None:
    pair, rule = built_in("d1t5"), ContinuousRule(**words)
    out = of_pair(pair, rule, rng(300))
    trace, per_pass = out.trace, out.trace.accepted + 1
    replaced = torch.tensor([len(image) for image in trace.proposals])
    bonus = ((trace.offered > 0) & (trace.accepted == trace.offered)).sum(1)
    ends = ((trace.start + trace.accepted == 5) & (trace.offered > 0)).sum(1)  # no token follows
    assert torch.equal(out.accepted + replaced + bonus - ends, torch.full((300,), 5))
    assert torch.equal((per_pass * (trace.offered > 0)).sum(1) - ends, torch.full((300,), 5))
    assert torch.equal(trace.reach, torch.minimum(per_pass, trace.offered) * (trace.offered > 0))
    assert torch.equal(trace.kept.sum(1), out.accepted)
    assert torch.equal(trace.made, rule.tries * trace.offered.sum(1))
    if rule.verification == "block":  # all drafted tokens take part in the decision
        assert torch.equal(out.drafted, trace.offered.sum(1))
    else:
        others = out.drafted - trace.reach.sum(1)
        assert ((others >= 0) & (others <= (rule.tries - 1) * out.steps)).all()


def test_all_drafts_of_the_target_itself_are_accepted() -> None:
    model = built_in("d2t4").target
    for words in SCHEMES.values():
        out = decode(model, model, replace(ContinuousRule(**words), align=True), None, rng(50))
        assert torch.equal(out.accepted, out.trace.offered.sum(1))
        assert sum(map(len, out.trace.proposals)) == 0


def test_incompatible_parameters_are_refused() -> None:
    for parameters, sentence in (
        (BLOCK | {"tries": 2, "criterion": "path"}, "verification=block decides on one draft: use tries=1"),
        (BLOCK | {"criterion": "paper"}, "verification=block needs a rule that is exact: criterion=path"),
        (BLOCK | {"verify": "parallel"}, "verify=causal"),
        ({"tries": 3, "on_reject": "continue"}, "tries=3 needs a rule that is exact"),
        ({"tries": 3, "final_noise": False}, "final_noise=true"),
    ):
        with pytest.raises(UsageError, match=sentence):
            ContinuousRule(gamma=2, **parameters)
