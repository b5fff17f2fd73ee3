"""Jacobi windows as in their authors' codes: the stored distribution of a token, the distribution of siblings,
positions without drafts, and which variants are lossless."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from windows import window

from specbench.audit.models import TabularModel
from specbench.audit.tabular import random_tables
from specbench.config import configuration
from specbench.decoding.drafters.window import Window, WindowState
from specbench.decoding.loop import DecoderConfig, Decoding, StepResult, decode
from specbench.decoding.rules import exact
from specbench.decoding.rules.base import at, normalise, ratio
from specbench.decoding.sampling import Sampling
from specbench.decoding.verify import Draft, VerificationResult
from specbench.rows.remarks import emitted_remarks

V, SIDE, ROWS = 5, 4, 400


def test_a_variant_is_a_bundle_of_settings() -> None:
    def settings(words: str) -> list[Any]:
        cfg = configuration.compose(words.split())
        names = ("window", "width", "fresh", "stored", "siblings", "plain_until", "plain_from")
        return [cfg.get(name) for name in names]

    assert settings("method=sjd") == [16, 1, "uniform", "new", "stored", 0, None]
    assert settings("method=sjd variant=released") == [15, 1, "point", "new", "stored", 1, -18]
    lumina = "model=lumina_mgpt weights=random"
    assert settings(f"method=sjd variant=released {lumina}")[-2:] == [0, -14]
    assert settings("method=scd variant=released") == [31, 1, "point", "old", "stored", 0, None]
    assert settings(f"method=gsd {lumina}") == [15, 1, "point", "new", "stored", 0, -14]
    assert settings("method=sjd_pac variant=released") == [63, 3, "uniform", "new", "residual", 0, None]
    assert settings("method=sjd_pac variant=released width=4")[1] == 4
    for method, name, default, printed in (
        ("sjd_pac", "branch", "always", "rejected"),
        ("cool_sd", "resample", "optimal", "vanilla"),
    ):
        chosen = [configuration.compose([f"method={method}", *more]).get(name) for more in ([], ["variant=printed"])]
        assert chosen == [default, printed]


class Session:
    vocab_size = codes = V
    width, length = SIDE, SIDE * SIDE
    forced_tokens = None

    def forced(self, positions: Tensor) -> None:
        return None


def second_step(drafter: Window, p: Tensor) -> tuple[Any, Draft, WindowState]:
    """The window of the first step, and the draft and state of the second, after a step with distributions p (M, V) in
    which nothing was accepted."""
    state = drafter.open(Session(), None, Sampling(), tiny.rng(ROWS))
    history = torch.zeros(ROWS, 40, dtype=torch.int64)
    counts, step = torch.zeros(2, ROWS, dtype=torch.int64)
    first = drafter.propose(state, history, counts, step)
    seen = SimpleNamespace(tokens=state.tokens.clone(), probs=state.probs.clone())
    zeros, probs = torch.zeros_like(step), p.expand(ROWS, -1, -1)
    path = zeros[:, None].expand(-1, drafter.tree.height)
    verdict = VerificationResult(
        path, zeros, zeros[:, None].expand(-1, drafter.tree.height + 1), probs[:, 0], zeros.float()
    )
    drafter.commit(state, StepResult(first, probs, probs, verdict, counts))
    return seen, drafter.propose(state, history, counts + 1, step + 1), state


def random_probs(nodes: int, seed: int = 0) -> Tensor:
    return (1.5 * torch.randn(nodes, V, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def test_a_kept_token_has_its_old_distribution_in_the_code_of_scd() -> None:
    p = random_probs(5)
    for stored in ("new", "old"):
        seen, _, state = second_step(window(4, coupling="maximal", stored=stored), p)
        old_token = seen.tokens[:, 1]  # at offset 0 of the second step, whose distribution is the one after node 1
        is_kept = state.tokens[:, 0] == old_token
        # kept with min(1, p / q), and never redrawn as itself: tokens with p < q have no mass in [p - q]_+
        rare = p[1, old_token] < 1 / V
        assert (is_kept & rare).any()
        chance = float(ratio(p[1, old_token], torch.full((ROWS,), 1 / V)).mean())
        assert float(is_kept.float().mean()) >= chance - 3 * (chance * (1 - chance) / ROWS) ** 0.5
        old = (state.probs[:, 0] == 1 / V).all(-1)
        new = torch.isclose(state.probs[:, 0], p[1]).all(-1)
        assert (old ^ new).all()
        assert torch.equal(old, is_kept & old)
        assert old[is_kept & rare].all() == (stored == "old")
        assert not old[~is_kept].any()


def test_a_token_is_reused_above_the_threshold() -> None:
    """SJD++. Five tokens are drawn with q = 1/5 each; p / q is 0.75, 2, 1, 0.75, 0.5. With tau = 0.8 the second and
    third token stay, and the others are redrawn from p. All have the distribution p from then on. By hand the token's
    distribution is q + 3/5 p where it stays and 3/5 p elsewhere, 0.16 from p in total variation."""
    p = random_probs(5)
    p[1] = torch.tensor([0.15, 0.4, 0.2, 0.15, 0.1])
    results = []
    for tau in (0.8, 2.5):
        seen, _, state = second_step(window(4, coupling="threshold", tau=tau), p)
        old_token, token = seen.tokens[:, 1], state.tokens[:, 0]
        stays = p[1, old_token] * V > tau
        assert (token[stays] == old_token[stays]).all()
        assert (token[~stays] != old_token[~stays]).any()
        torch.testing.assert_close(state.probs[:, 0], p[1].expand(ROWS, -1))
        results.append((token, stays))
    assert not results[1][1].any()
    assert tiny.fit(results[1][0], p[1].double()) > 1e-4  # nothing stays, so all are drawn from p, as in SJD
    by_hand = torch.tensor([0.09, 0.44, 0.32, 0.09, 0.06], dtype=torch.float64)
    assert tiny.fit(results[0][0], by_hand) > 1e-4
    assert tiny.fit(results[0][0], p[1].double()) < 1e-4
    assert 0.5 * float((by_hand - p[1]).abs().sum()) == pytest.approx(0.16)


def test_siblings_of_the_residual_distribution() -> None:
    p = random_probs(7)
    p[1] = torch.tensor([0.3, 0.3, 0.3, 0.05, 0.05])  # for the offset 1 and, after the step, the offset 0
    for siblings in ("stored", "residual"):
        drafter = window(6, width=2, depth=2, coupling="maximal", siblings=siblings)
        _, draft, _ = second_step(drafter, p)
        first_sibling, second_sibling = draft.tokens[:, 1], draft.tokens[:, 2]
        assert (first_sibling != second_sibling).all()
        assert bool((second_sibling < 3).all()) == (siblings == "residual")
        assert torch.allclose(draft.probs[:, 0], p[1])  # the distribution that verification assumes for them


def emitted_distribution(p: Tensor, q: Tensor, target: Tensor, residual: bool) -> Tensor:
    """The distribution (V,) of the next token with two candidates. The first has distribution p. The second is drawn
    from p, or from [p - q]_+, without the first. Verification assumes that both are drawn from p."""
    rule, depth, out = exact(), torch.tensor(1), torch.zeros(V)
    source = (p - q).clamp_min(0) if residual else p
    for x in range(V):
        keep, left = rule.accept_and_residual(target, p, torch.tensor(x), depth)
        out[x] += p[x] * keep
        rest = p.index_fill(0, torch.tensor(x), 0.0)
        second, drawn = rest / rest.sum(), source.index_fill(0, torch.tensor(x), 0.0)
        drawn = normalise(drawn, second)
        for y in range(V):
            again, last = rule.accept_and_residual(left, second, torch.tensor(y), depth)
            chance = p[x] * (1 - keep) * drawn[y]
            out[y] += chance * again
            out += chance * (1 - again) * last
    return out


def test_siblings_of_the_residual_distribution_are_not_lossless() -> None:
    off = {False: 0.0, True: 0.0}
    for seed in range(5):
        p, q, target = random_probs(3, seed)
        for residual, far in off.items():
            off[residual] = max(far, 0.5 * float((emitted_distribution(p, q, target, residual) - target).abs().sum()))
    assert off[False] < 1e-6
    assert off[True] > 0.04


TABLES = random_tables(3, 5, 2, 2.0)
verdict = partial(tiny.verdict, model=TabularModel("small", TABLES, TABLES, None))


def test_the_audit_detects_the_released_code_of_scd() -> None:
    """Its total variation is 0.08, and 0.03 with point masses for new tokens (40,000 samples)."""
    assert verdict("method=scd window=3", samples=5000) == "lossless"
    assert verdict("method=scd window=3 stored=old", samples=5000) == "not lossless"
    for words in ("sjd variant=released window=2 plain_from=-1", "scd coupling=gumbel fresh=point window=2",
                  "sjd init=horizontal_mode fresh=point window=3"):  # fmt: skip
        assert verdict(f"method={words}", samples=3000) != "not lossless", words


def test_a_fresh_token_is_a_point_mass() -> None:
    for init in ("random", "horizontal_sample", "horizontal_repeat"):
        state = (drafter := window(3, init, fresh="point")).open(Session(), None, Sampling(), tiny.rng(ROWS))
        count = torch.zeros(ROWS, dtype=torch.int64)
        drafter.propose(state, torch.zeros(ROWS, 40, dtype=torch.int64), count, count)
        assert (at(state.probs, state.tokens) == 1).all()
        assert torch.equal(state.probs.sum(-1), torch.ones(ROWS, 3))
        share = (state.tokens[:, 0] == 0).float().mean()  # uniform over the codes, within five standard errors
        assert abs(float(share) - 1 / V) < 5 * (0.16 / ROWS) ** 0.5


def test_the_mode_of_the_left_neighbour() -> None:
    for fresh in ("uniform", "point"):
        p = random_probs(5)
        _, _, state = second_step(window(4, "horizontal_mode", refine=False, fresh=fresh), p)
        assert (state.tokens[:, :3] == p[0].argmax()).all()  # positions 1 to 3 follow the first one
        assert (at(state.probs, state.tokens)[:, :3] == 1).all()
        assert len(state.tokens[:, 3].unique()) == V  # position 4 begins a row
        assert (at(state.probs, state.tokens)[:, 3] == (1 if fresh == "point" else 1 / V)).all()


@torch.inference_mode()
def test_plain_positions_have_no_draft() -> None:
    drafter = window(3, plain_until=3, plain_from=-5)
    steps = Decoding(
        DecoderConfig(tiny.llamagen(side=SIDE), drafter, exact(), Sampling()), tiny.prompts(6), tiny.rng(6)
    )
    seen = []
    for _ in range(SIDE * SIDE):
        before = steps.num_committed.clone()
        steps.step()
        draft = steps.step_stats.draft if steps.step_stats else None
        assert draft is not None
        inside = (before >= 3) & (before < SIDE * SIDE - 5)
        assert torch.equal(draft.valid[:, 1:].any(1), inside)
        assert (inside | (steps.num_committed - before <= 1)).all()
        begins = inside & (before == 3)  # the window begins here and contains nothing from the plain steps
        assert (draft.probs[begins] == 1 / V).all()
        seen.append(begins)
        steps.record_stats()
    assert torch.stack(seen).any(0).all()
    assert (steps.num_committed == SIDE * SIDE).all()


@torch.inference_mode()
@pytest.mark.parametrize("tree", ["full", "comb"])
def test_siblings_only_after_a_rejection(tree: str) -> None:
    """SJD-PAC's Algorithm 1: a step whose accepted path ends at a leaf has rejected nothing, and the first step has no
    step before it. In both cases the next draft is the tree's first path."""
    drafter = window(8, width=2, depth=3, tree=tree, coupling="maximal", branch="rejected")
    parents = drafter.tree.parent[0, 1:].tolist()
    first = [0]
    while first[-1] in parents:  # a node's first child has the smallest index
        first.append(parents.index(first[-1]) + 1)
    chain = torch.isin(torch.arange(drafter.tree.nodes), torch.tensor(first))
    steps = Decoding(
        DecoderConfig(tiny.llamagen(side=SIDE), drafter, exact(), Sampling()), tiny.prompts(40), tiny.rng(40)
    )
    rejected, seen = torch.zeros(40, dtype=torch.bool), []
    for _ in range(8):
        steps.step()
        assert steps.step_stats is not None
        draft, path = steps.step_stats.draft, steps.step_stats.verdict.path_with_root
        assert torch.equal(draft.valid, chain | rejected[:, None])
        assert (draft.valid[:, 1:].sum(1) == torch.where(rejected, 8, len(first) - 1)).all()
        rejected = torch.tensor([int(node) in parents for node in path[:, -1]])
        seen.append(rejected)
        steps.record_stats()
    has_siblings = torch.stack(seen)
    assert has_siblings.any()
    assert (~has_siblings).any()


def test_the_audit_does_not_refute_siblings_only_after_a_rejection() -> None:
    """Whether a position has siblings depends on the tokens before it."""
    for words in ("window=3 width=2 depth=2", "window=6 width=2 depth=3", "window=4 width=2 depth=2 tree=comb"):
        assert verdict(f"method=sjd_pac variant=printed {words}", samples=5000) == "lossless", words


def test_divergence_is_not_computed_if_drafts_have_other_distributions() -> None:
    for setting, biased in (({"stored": "old"}, True), ({"stored": "new"}, False)):
        drafter = window(3, coupling="maximal", **setting)
        config = DecoderConfig(tiny.llamagen(side=2), drafter, exact(), Sampling(), emitted_draws=2)
        out = decode(config, tiny.prompts(2), tiny.rng(2))
        assert (out.trace.emitted_tv.shape[1] == 0) == biased
    assert not window(3, coupling="gumbel", stored="old").shape.biased
    cfg = configuration.compose(["method=scd", "stored=old"])
    image: Any = SimpleNamespace(drafts=None, emitted_outside=None)
    assert [r.code for r in emitted_remarks(cfg, [image])] == ["emitted_not_drawn"]
    greedy = configuration.compose(["method=jacobi_built_in", "opening=greedy"])
    assert [r.code for r in emitted_remarks(greedy, [image])] == ["emitted_not_drawn"]
