"""Verification beyond token-wise rejection: against enumerations, against token-wise where both agree, and refused
where it would not be exact."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from specbench.audit import audit, models
from specbench.audit.tabular import TabularDrafter, TabularTarget, random_tables, sequence_probs
from specbench.audit.tabular import codes as coded
from specbench.config import configuration
from specbench.decoding import rules
from specbench.decoding.batch import Decoded
from specbench.decoding.loop import DecoderConfig, decode
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import build, chain_paths
from specbench.decoding.verify import Draft, TokenWise, Verdict, Verification, one_hot
from specbench.decoding.verify.block import BlockVerification, masses
from specbench.decoding.verify.selected import Selected
from specbench.decoding.verify.traversal import Traversal
from specbench.errors import UsageError
from specbench.harness import run

#: One test in ten thousand would fail by chance; the seeds are fixed, so none does by accident.
ALPHA = 1e-4
P = random_tables(3, 5, seed=1, sharpness=1.5)
Q = random_tables(3, 5, seed=2, sharpness=1.5, near=P, distance=0.6)


def drafted(rows: int, length: int, vocab: int = 6, seed: int = 0, apart: float = 1.0) -> tuple[Tensor, Draft]:
    """The target's distributions and a chain sampled from others, `apart` from them in logits."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, length + 1, vocab, generator=g)
    other = logits[:, :-1] + apart * torch.randn(rows, length, vocab, generator=g)
    q = other.softmax(-1)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=g).view(rows, length)
    root = torch.zeros(rows, 1, dtype=torch.int64)
    valid = torch.ones(rows, length + 1, dtype=torch.bool)
    return logits.softmax(-1), Draft(build(chain_paths(length)), torch.cat([root, tokens], 1), q, valid)


def verified(way: Verification, p: Tensor, draft: Draft, seed: int = 0) -> Verdict:
    return way.verify(p, draft, rules.exact(), tiny.rng(len(p), seed), torch.zeros(len(p), dtype=torch.int64))


def equal(a: Verdict, b: Verdict) -> bool:
    return tiny.equal(vars(a), vars(b))


def run_on_tables(way: Verification, drafter: Any, p: list[Tensor], images: int, seed: int = 0) -> Decoded[Any]:
    config = DecoderConfig(TabularTarget(p), drafter, rules.exact(), Sampling(), verification=way)
    return decode(config, None, tiny.rng(images, seed))


def test_a_chain_of_one_is_verified_token_by_token() -> None:
    """The same division, the same comparison and the same residual, of sampled and of deterministic tokens."""
    p, draft = drafted(500, 1)
    for sampled in (None, torch.zeros_like(draft.valid)):
        draft = replace(draft, sampled=sampled)
        block, token = verified(BlockVerification(), p, draft), verified(TokenWise(), p, draft)
        assert equal(block, token)
        assert 0 < block.length.float().mean() < 1


def test_greedy_point_masses_are_verified_token_by_token() -> None:
    """Every ratio is 0 or 1, so that no random number matters."""
    p, draft = drafted(300, 4, vocab=3)
    best = p.argmax(-1)
    p, tokens = one_hot(best, 3), torch.cat([draft.tokens[:, :1], best[:, :-1]], 1)
    tokens[::3] = draft.tokens[::3]
    draft = replace(draft, tokens=tokens, sampled=torch.zeros_like(draft.valid))
    token = verified(TokenWise(), p, draft)
    for way in (BlockVerification(), Traversal(), Selected()):
        assert equal(replace(verified(way, p, draft), share=None), token), way.name
    assert set(token.length.tolist()) == {0, 1, 2, 3, 4}


def expected_lengths(p: list[Tensor], q: list[Tensor], length: int) -> Tensor:
    """E[P_0] .. E[P_L]: the probability that block verification accepts so many drafts or more, by enumeration."""
    size = p[0].shape[1]
    weight, mass, found = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64), [1.0]
    for t in range(length):
        weight = (weight[:, None] * q[t].double()).flatten()
        mass = (mass[:, None] * p[t].double() / q[t].double()).clamp_max(1).flatten()
        assert len(mass) == size ** (t + 1)
        found.append(float((weight * mass).sum()))
    return torch.tensor(found, dtype=torch.float64)


def test_block_verification_is_lossless_and_accepts_what_the_formula_says() -> None:
    length = 4
    out = run_on_tables(BlockVerification(), TabularDrafter(Q, chain_paths(length)), P, 30_000)
    assert tiny.fit(coded(out.tokens, 3), sequence_probs(P)) > ALPHA
    at_least = expected_lengths(P, Q, length)
    distribution = at_least - torch.cat([at_least[1:], torch.zeros(1)])
    assert tiny.fit(out.trace.accepted[:, 0], distribution) > ALPHA
    token = run_on_tables(TokenWise(), TabularDrafter(Q, chain_paths(length)), P, 30_000)
    assert out.trace.accepted[:, 0].sum() > token.trace.accepted[:, 0].sum()
    assert torch.equal(out.trace.first[:, 0], token.trace.first[:, 0])  # the same statistic


def test_the_draft_of_the_target_itself_is_accepted() -> None:
    p, draft = drafted(50, 4, apart=0)
    found = verified(BlockVerification(), p, draft)
    assert found.length.eq(4).all()
    assert torch.equal(found.next_probs, p[:, 4])


def test_drafts_that_the_target_never_gives_are_rejected() -> None:
    p, draft = drafted(50, 3, vocab=4)
    p[..., :2], draft.probs[..., 2:] = 0, 0
    p, q = p / p.sum(-1, keepdim=True), draft.probs / draft.probs.sum(-1, keepdim=True)
    found = verified(BlockVerification(), p, replace(draft, probs=q, tokens=draft.tokens % 2))
    assert found.length.eq(0).all()
    torch.testing.assert_close(found.next_probs, p[:, 0])


def test_a_shortened_draft_is_a_shorter_chain() -> None:
    """Nodes that do not exist have tokens and distributions, which must not count."""
    p, draft = drafted(300, 4, seed=3)
    for count in (0, 2):
        found = verified(BlockVerification(), p, replace(draft, valid=draft.valid & (torch.arange(5) <= count)))
        valid, q = draft.valid[:, : count + 1], draft.probs[:, :count]
        alone = Draft(build(chain_paths(count)), draft.tokens[:, : count + 1], q, valid)
        shorter = verified(BlockVerification(), p[:, : count + 1], alone)
        assert torch.equal(found.length, shorter.length)
        assert torch.equal(found.next_probs, shorter.next_probs)
        assert torch.equal(found.first, shorter.first.float())


def test_point_masses_gain_nothing() -> None:
    """Of deterministic tokens the accepted length has the distribution that token-wise verification gives it: the
    product of the target's probabilities."""
    p, draft = drafted(1, 3)
    rows = 40_000
    tokens = torch.cat([torch.zeros(1, 1, dtype=torch.int64), p[:, :-1].argmax(-1)], 1).expand(rows, -1)
    valid = torch.ones(rows, 4, dtype=torch.bool)
    chosen = Draft(draft.tree, tokens, draft.probs.expand(rows, -1, -1), valid, torch.zeros_like(valid))
    found = verified(BlockVerification(), p.expand(rows, -1, -1), chosen)
    kept = torch.cat([torch.ones(1), p[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0].cumprod(0)]).double()
    assert tiny.fit(found.length, kept - torch.cat([kept[1:], torch.zeros(1)])) > ALPHA


def test_a_verdict_depends_on_its_row_alone() -> None:
    p, draft = drafted(40, 5, vocab=50)
    together = verified(BlockVerification(), p, draft)
    for row in range(0, 40, 7):
        own = slice(row, row + 1)
        one = Draft(draft.tree, draft.tokens[own], draft.probs[own], draft.valid[own])
        alone = BlockVerification().verify(
            p[own], one, rules.exact(), tiny.rng([row]), torch.zeros(1, dtype=torch.int64)
        )
        assert equal(alone, Verdict(**{k: x if x is None else x[own] for k, x in vars(together).items()}))


def test_what_would_not_be_exact_is_refused() -> None:
    for words, sentence in (
        ("method=cool_sd verification=block", "has rule cool: use verification=token, or rule=exact"),
        ("method=medusa verification=block", "has rule typical"),
        ("method=sd rule=uniform verification=block", "has rule uniform"),
        ("method=sjd verification=block", "carries over to the next step"),
        ("method=jacobi verification=block", "carries over to the next step"),
        ("method=sjd refine=false coupling=gumbel verification=block", "carries over to the next step"),
        ("method=eagle1 verification=block", "drafts a tree: use verification=traversal"),
        ("method=eagle2 verification=block", "drafts a tree: use verification=traversal"),
    ):
        with pytest.raises(UsageError, match=sentence):
            run.check(configuration.compose(words.split()))


def test_continuous_tokens_have_no_such_verification() -> None:
    with pytest.raises(
        UsageError, match="mar_scenes has continuous tokens, which verification=traversal does not support"
    ):
        configuration.compose(["model=mar_scenes", "method=cspd", "verification=traversal"])


def test_what_is_exact_is_allowed() -> None:
    for words in (
        "method=sd verification=block",
        "method=vanilla verification=block",
        "method=sjd refine=false window=4",
    ):
        run.check(configuration.compose(words.split()))


# --- reference values -------------------------------------------------------------------------------------------------

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "methods" / "block"
needs_values = pytest.mark.skipif(not FOLDER.is_dir(), reason="the reference values are not beside this checkout")
IMAGES = 8000
WIDE = "[[0], [1], [2], [0, 0], [0, 1], [0, 0, 0]]"


def close(out: Decoded[Any], wanted: dict[str, Any]) -> None:
    """The distribution of the tokens accepted in the first round, and the mean of T / rounds within four standard
    errors, of which a true value is outside in one of 16,000 cases."""
    accepted = torch.tensor(wanted["accepted_law"], dtype=torch.float64)
    assert tiny.fit(out.trace.accepted[:, 0], accepted) > ALPHA
    ratio = out.tokens.shape[1] / out.steps.double()
    error = float(ratio.std() / len(ratio) ** 0.5)
    assert abs(float(ratio.mean()) - wanted["tokens_per_round_mean_of_ratios"]) < 4 * error


@needs_values
@pytest.mark.parametrize(("case", "length"), [("block_a", 1), ("block_b", 2), ("block_e", 3), ("block_a", 4)])
def test_chains_reach_the_reference_lengths(case: str, length: int) -> None:
    wanted = json.loads((FOLDER / "expected_block.json").read_text())[case]["chains"][f"window={length}"]
    tables = models.load(str(FOLDER / f"{case}.npz"))
    out = run_on_tables(BlockVerification(), TabularDrafter(tables.q, chain_paths(length)), tables.p, IMAGES)
    close(out, wanted["block"])


@needs_values
@pytest.mark.parametrize(
    ("words", "group", "key", "value"),
    [
        ("eagle_chain verification=block window=3", "chains", "window=3", "block"),
        ("eagle_traversal tree=[[0],[1],[2],[0,0],[0,1],[0,0,0]]", "trees", WIDE, "traversal without"),
    ],
)
def test_the_audit_reports_the_reference_lengths(words: str, group: str, key: str, value: str) -> None:
    """`tokens_per_step` is the mean of T / rounds, which for L = 3 is 0.35 above T / mean rounds. A number in [1, most]
    of mean m has a variance of at most (most - m) (m - 1); four standard errors of it are below 0.1."""
    wanted = json.loads((FOLDER / "expected_block.json").read_text())["block_b"][group][key][value]
    tables = models.load(str(FOLDER / "block_b.npz"))
    row = audit.measure(
        audit.assemble(configuration.compose(f"method={words}".split()), tables), tables, IMAGES, margin=1
    )
    assert row["verdict"] == "lossless"
    for column, mean, most in (
        ("tokens_per_step", wanted["tokens_per_round_mean_of_ratios"], tables.length),
        ("accepted_length", wanted["first_round_length"], len(wanted["accepted_law"])),
    ):
        error = ((most - mean) * (mean - 1) / IMAGES) ** 0.5
        assert abs(row[column] - mean) < 4 * error < 0.1


def test_masses_of_ratios_whose_product_overflows() -> None:
    """P is min(1, P p / q), step by step, whatever the size of the ratios."""
    ratio = torch.tensor([[1e30, 1e30, 1e30, 0.5, 0.5], [1e-30, 1e-30, 1e20, 1e30, 1e30], [0.5, 0.0, 1e30, 1e30, 2.0]])
    expected = [[1, 1, 1, 1, 0.5, 0.25], [1, 1e-30, 1e-60, 1e-40, 1e-10, 1], [1, 0.5, 0, 0, 0, 0]]
    torch.testing.assert_close(masses(ratio), torch.tensor(expected), rtol=1e-5, atol=1e-38)
