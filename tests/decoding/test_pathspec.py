"""Several Jacobi chains from one root: what they draft, the exact choice of a chain and the released one, against
enumerations."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from test_emitted import V, some
from torch import Tensor

from specbench.audit.models import TabularModel
from specbench.audit.tabular import random_tables
from specbench.config import configuration
from specbench.decoding import rules
from specbench.decoding.drafters.pathspec import PathWindow
from specbench.decoding.emitted import Nodes, distributions
from specbench.decoding.loop import StepResult
from specbench.decoding.rules.base import Rule, normalise, ratio
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.verify import Draft, TokenWise, Verification, VerificationResult
from specbench.decoding.verify.base import Verified
from specbench.decoding.verify.chains import Longest
from specbench.errors import UsageError
from specbench.harness import run

#: By chance, one test in ten thousand would fail; the seeds are fixed, so no test fails at random.
ALPHA = 1e-4
CHAINS, LENGTH, ROWS = 3, 3, 500
EXACT = rules.exact()


def drafted(length: int, rows: int = ROWS, seed: int = 0) -> tuple[Tensor, Draft]:
    """The target's distributions, and chains whose tokens are drawn from distributions of their own."""
    tree = PathWindow(length, chains=CHAINS).branches
    p, q = some(rows, tree.nodes, seed=seed), some(rows, tree.nodes - 1, seed=seed + 1)
    u = torch.rand(rows, tree.nodes - 1, generator=torch.Generator().manual_seed(seed + 2))
    tokens = torch.cat([torch.zeros(rows, 1, dtype=torch.int64), draw(q, u)], 1)
    probs = torch.cat([q[:, :1], q[:, CHAINS:]], 1)
    valid = torch.ones(rows, tree.nodes, dtype=torch.bool)
    return p, Draft(tree, tokens, probs, valid, node_probs=q)


def verify(verification: Verification, p: Tensor, draft: Draft, rule: Rule = EXACT) -> VerificationResult:
    return verification.verify(p, draft, rule, tiny.rng(len(p)), torch.zeros(len(p), dtype=torch.int64))


def one_node(rows: int) -> tuple[Tensor, Tensor, Draft]:
    """One case, p (V,) and q (CHAINS, V), in many rows with draws of their own."""
    p, draft = drafted(1, rows)
    assert draft.node_probs is not None
    q = draft.node_probs[0]
    u = torch.rand(rows, CHAINS, generator=torch.Generator().manual_seed(9))
    tokens = torch.cat([draft.tokens[:, :1], draw(q.expand(rows, -1, -1), u)], 1)
    node_probs = q.expand(rows, -1, -1)
    return p[0, 0], q, replace(draft, tokens=tokens, probs=node_probs[:, :1], node_probs=node_probs)


def longest_of_one(p: Tensor, q: Tensor, delta: float = 0.0) -> Tensor:
    """The distribution (V,) of the next token if the first accepted one of several tokens is committed, else the
    residual of the first: over all tokens that can be drafted."""
    out, chains = torch.zeros(V, dtype=torch.float64), range(len(q))
    for tokens in itertools.product(range(V), repeat=len(q)):
        none = float(torch.stack([q[c, tokens[c]] for c in chains]).prod())
        for c in chains:
            others = sum(float(p[tokens[other]]) for other in chains if other != c)
            mass = p[tokens[c]] + delta / (len(q) - 1) * others
            chance = float(ratio(mass, q[c, tokens[c]]))
            out[tokens[c]] += none * chance
            none *= 1 - chance
        out += none * normalise((p - q[0]).clamp_min(0), p).double()
    return out


@pytest.mark.parametrize("delta", [0.0, 0.5])
def test_the_longest_chain_is_not_the_targets_distribution(delta: float) -> None:
    """With chains of one token, the longest is the first accepted one."""
    rows = 20_000
    p, q, draft = one_node(rows)
    verdict = verify(Longest(delta), p.expand(rows, 1 + CHAINS, -1), draft)
    expected = longest_of_one(p, q, delta)
    assert float(expected.sum()) == pytest.approx(1, abs=1e-6)
    assert tiny.fit(verdict.tokens[:, 0], expected) > ALPHA
    assert 0.5 * float((expected - p).abs().sum()) > 0.02
    assert tiny.fit(verdict.tokens[:, 0], p.double()) < ALPHA


def test_recursive_rejection_keeps_the_targets_distribution() -> None:
    rows = 60_000
    p, q, draft = one_node(rows)
    verdict = verify(TokenWise(), p.expand(rows, 1 + CHAINS, -1), draft)
    assert tiny.fit(verdict.tokens[:, 0], p.double()) > ALPHA
    other = replace(draft, node_probs=None, probs=q[None, :1].expand(rows, -1, -1))  # as if all were drawn from one
    verdict = verify(TokenWise(), p.expand(rows, 1 + CHAINS, -1), other)
    assert tiny.fit(verdict.tokens[:, 0], p.double()) < ALPHA


def written_out(p: Tensor, q: Tensor, rule: Rule) -> Tensor:
    """The distribution (V,) of the next token by recursive rejection of candidates drawn from q (K, V), over all
    tokens that can be drafted."""
    out, depth = torch.zeros(V, dtype=torch.float64), torch.tensor(1)
    for tokens in itertools.product(range(V), repeat=len(q)):
        r, reached = p, float(torch.stack([q[c, token] for c, token in enumerate(tokens)]).prod())
        for c, number in enumerate(tokens):
            token = torch.tensor(number)
            chance = float(rule.accept(r, q[c], token, depth))
            out[number] += reached * chance
            r, reached = rule.residual(r, q[c], token, depth), reached * (1 - chance)
        out += reached * r.double()
    return out


@pytest.mark.parametrize("name", ["exact", "uniform", "by token"])
def test_the_emitted_distribution_of_independent_siblings(name: str) -> None:
    """`by token`: a rule whose residual depends on the rejected token."""

    class ByToken(Rule):
        def accept(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
            return 0.5 * ratio(r.gather(-1, token.unsqueeze(-1)), q.gather(-1, token.unsqueeze(-1))).squeeze(-1)

        def residual(self, r: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
            return normalise(r.scatter(-1, token.unsqueeze(-1), 0.0), r)

    rule = {"exact": EXACT, "uniform": rules.uniform(1.5), "by token": ByToken()}[name]
    p, q = some(1, 1, seed=5), some(1, 1, CHAINS, seed=6)
    ones = torch.ones(1, 1, CHAINS, dtype=torch.bool)
    nodes = Nodes(p, q[:, :, 0], torch.zeros(1, 1, CHAINS, dtype=torch.int64), ones, ones[..., 0].long(), True, q)
    computed = distributions(nodes, rule, torch.zeros(1, 1, CHAINS, 2))[0, 0, 0].double()
    torch.testing.assert_close(computed, written_out(p[0, 0], q[0, 0], rule), rtol=0, atol=1e-6)
    assert (float((computed - p[0, 0]).abs().max()) < 1e-6) == (name == "exact")


def accepted_alone(p: Tensor, q: Tensor, tokens: list[int], u: list[float], delta: float, rivals: list[Any]) -> int:
    """How many tokens of one chain are accepted."""
    for depth, token in enumerate(tokens):
        mass = p[depth, token] + delta / (CHAINS - 1) * sum(float(p[depth, rival[depth]]) for rival in rivals)
        if u[depth] >= float(ratio(mass, q[depth, token])):
            return depth
    return len(tokens)


@pytest.mark.parametrize("delta", [0.0, 0.3])
def test_the_longest_chain_and_its_residual(delta: float) -> None:
    """Chain by chain, written out; ties occur, and the first chain wins them."""
    p, draft = drafted(LENGTH, rows=60)
    verdict, numbers = verify(Longest(delta), p, draft), tiny.rng(60).uniforms(torch.zeros(60).long(), 0, 2, p.shape[1])
    assert draft.node_probs is not None
    ties, seen = 0, set()
    for row in range(60):
        nodes = [[1 + depth * CHAINS + chain for depth in range(LENGTH)] for chain in range(CHAINS)]
        tokens = [draft.tokens[row, of].tolist() for of in nodes]
        before = [p[row, [0, *of[:-1]]] for of in nodes]
        lengths = [
            accepted_alone(
                before[c], draft.node_probs[row, [n - 1 for n in of]], tokens[c], numbers[row, 0, of].tolist(), delta,
                tokens[:c] + tokens[c + 1 :],
            )
            for c, of in enumerate(nodes)
        ]  # fmt: skip
        best, length = lengths.index(max(lengths)), max(lengths)
        ties += lengths.count(length) > 1
        seen.add((best, length))
        assert verdict.length[row] == length
        assert verdict.path[row, :length].tolist() == nodes[best][:length]
        assert verdict.tokens[row, :length].tolist() == tokens[best][:length]
        end = p[row, ([0, *nodes[best]])[length]]
        if length < LENGTH:
            end = normalise((end - draft.node_probs[row, nodes[best][length] - 1]).clamp_min(0), end)
        torch.testing.assert_close(verdict.next_probs[row], end)
    assert ties > 10
    assert len(seen) > 5


class Session:
    vocab_size = codes = V
    width, length = 4, 16
    forced_tokens = None

    def forced(self, positions: Tensor) -> None:
        return None


@pytest.mark.parametrize("accepted", [0, 1, LENGTH])
def test_every_chain_is_shifted_and_drawn_again(accepted: int) -> None:
    """Each chain has the distributions that the last step computed after its own tokens, and every chain is drawn by
    itself; positions without a distribution begin at random, as point masses."""
    drafter = PathWindow(LENGTH, fresh="point", chains=CHAINS)
    state = drafter.open(Session(), None, Sampling(), tiny.rng(ROWS))
    history, counts = torch.zeros(ROWS, 40, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int64)
    first = drafter.propose(state, history, counts, counts)
    assert first.node_probs is not None
    assert first.node_probs.amax(-1).eq(1).all()
    nodes = drafter.branches.nodes
    p = some(nodes, seed=4).expand(ROWS, -1, -1)
    end = torch.tensor([1 + d * CHAINS for d in range(LENGTH)]).clamp_max(max(1, 1 + (accepted - 1) * CHAINS))
    verdict = VerificationResult(
        end.expand(ROWS, -1), counts + accepted, counts[:, None].expand(-1, LENGTH + 1), p[:, 0], counts.float()
    )
    drafter.commit(state, StepResult(first, p, p, verdict, counts))
    second = drafter.propose(state, history, counts + accepted + 1, counts + 1)
    assert second.node_probs is not None
    for depth, chain in itertools.product(range(LENGTH), range(CHAINS)):
        node = depth * CHAINS + chain
        probs, tokens = second.node_probs[:, node], second.tokens[:, 1 + node]
        if depth < LENGTH - accepted:
            source = p[0, 1 + (depth + accepted) * CHAINS + chain]
            torch.testing.assert_close(probs, source.expand(ROWS, -1), rtol=0, atol=0)
            assert tiny.fit(tokens, source.double()) > ALPHA
        else:
            assert probs.gather(-1, tokens[:, None]).eq(1).all()
            assert tiny.fit(tokens, torch.full((V,), 1 / V, dtype=torch.float64)) > ALPHA
    pairs = second.tokens[:, 1] * V + second.tokens[:, 2]  # of two chains, at one position
    a, b = (second.node_probs[0, chain].double() for chain in range(2))
    uniform = torch.full((V,), 1 / V, dtype=torch.float64)
    a, b = (uniform, uniform) if accepted == LENGTH else (a, b)
    assert tiny.fit(pairs, (a[:, None] * b).flatten()) > ALPHA
    assert torch.equal(second.probs[:, 0], second.node_probs[:, 0])


TABLES = random_tables(3, 5, 2, 2.0)
verdict_of = partial(tiny.verdict, model=TabularModel("small", TABLES, TABLES, None))


def test_the_audit_tells_the_exact_form_from_the_released_one() -> None:
    for words in ("window=2", "window=2 chains=3 fresh=uniform", "window=3 verification=token"):
        assert verdict_of(f"method=pathspec {words}", samples=5000) == "lossless", words
    for words in (
        "method=pathspec variant=released window=2",
        "method=pathrelax path_delta=0.3 window=2 fresh=uniform",
    ):
        assert verdict_of(words, samples=40_000, margin=1.0) == "not lossless", words


def test_chains_with_the_same_random_numbers_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = PathWindow.open

    def same(drafter: PathWindow, *args: Any) -> Any:
        state = opened(drafter, *args)
        state.number.zero_()
        return state

    monkeypatch.setattr(PathWindow, "open", same)
    assert verdict_of("method=pathspec window=2 fresh=uniform", samples=40_000, margin=1.0) == "not lossless"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("pathspec rule=cool", "has rule cool"),
        ("pathspec path_delta=0.1", "select=longest"),
        ("sjd verification=chains", "drafter sjd"),
        ("eagle1 verification=chains", "drafter eagle_tree"),
        ("pathspec verification=traversal", "carries over to the next step"),
        ("pathspec verification=block", "carries over to the next step"),
        ("pathspec rule=cool verification=token", None),
        ("pathspec variant=released path_delta=0.1", None),
    ],
)
def test_other_combinations_are_refused(words: str, sentence: str | None) -> None:
    with pytest.raises(UsageError, match=sentence) if sentence else nullcontext():
        run.check(configuration.compose(f"method={words}".split()))


def test_independent_siblings_need_token_wise_verification() -> None:
    shape: Any = SimpleNamespace(carries_over=False, independent=True)
    with pytest.raises(UsageError, match="each from its own"):
        Verified("another", "exact", shape).check_exact("traversal")


def test_the_variants() -> None:
    def settings(words: str) -> list[Any]:
        cfg = configuration.compose(words.split())
        return [
            cfg.get(name) for name in ("drafter", "verification", "select", "path_delta", "window", "chains", "fresh")
        ]

    draft = [12, 2, "point"]
    assert settings("method=pathspec") == ["pathspec", "chains", "first", 0.0, *draft]
    assert settings("method=pathspec variant=released") == ["pathspec", "chains", "longest", 0.0, *draft]
    assert settings("method=pathrelax") == ["pathspec", "chains", "longest", 0.01, *draft]
