"""Verification beyond token-wise rejection: against enumerations, plain sequential forms and reference values, against
token-wise verification where both agree, and refused where it would not be exact."""

from __future__ import annotations

import json
from contextlib import nullcontext
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
from specbench.decoding.sampling import Sampling, draw_distinct
from specbench.decoding.trees import Tree, build, chain_paths, from_parents, named, parse
from specbench.decoding.verify import VERIFY, Draft, TokenWise, Verification, VerificationResult, one_hot
from specbench.decoding.verify.block import BlockVerification, masses
from specbench.decoding.verify.traversal import Traversal
from specbench.errors import UsageError
from specbench.harness import run

#: By chance, one test in ten thousand would fail; the seeds are fixed, so no test fails at random.
ALPHA = 1e-4
P = random_tables(3, 5, seed=1, sharpness=1.5)
Q = random_tables(3, 5, seed=2, sharpness=1.5, near=P, distance=0.6)


def drafted(rows: int, length: int, vocab: int = 6, seed: int = 0, apart: float = 1.0) -> tuple[Tensor, Draft]:
    """The target's distributions, and a chain sampled from other distributions, `apart` from them in logits."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, length + 1, vocab, generator=g)
    other = logits[:, :-1] + apart * torch.randn(rows, length, vocab, generator=g)
    q = other.softmax(-1)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=g).view(rows, length)
    root = torch.zeros(rows, 1, dtype=torch.int64)
    valid = torch.ones(rows, length + 1, dtype=torch.bool)
    return logits.softmax(-1), Draft(build(chain_paths(length)), torch.cat([root, tokens], 1), q, valid)


def verify(verification: Verification, p: Tensor, draft: Draft, seed: int = 0) -> VerificationResult:
    return verification.verify(p, draft, rules.exact(), tiny.rng(len(p), seed), torch.zeros(len(p), dtype=torch.int64))


def equal(a: VerificationResult, b: VerificationResult) -> bool:
    return tiny.equal(vars(a), vars(b))


def run_on_tables(verification: Verification, drafter: Any, p: list[Tensor], images: int) -> Decoded[Any]:
    config = DecoderConfig(TabularTarget(p), drafter, rules.exact(), Sampling(), verification=verification)
    return decode(config, None, tiny.rng(images))


def test_a_chain_of_one_is_verified_token_by_token() -> None:
    """The same division, comparison and residual, for sampled and for deterministic tokens."""
    p, draft = drafted(500, 1)
    for sampled in (None, torch.zeros_like(draft.valid)):
        draft = replace(draft, sampled=sampled)
        block, token = verify(BlockVerification(), p, draft), verify(TokenWise(), p, draft)
        assert equal(block, token)
        assert 0 < block.length.float().mean() < 1


def test_greedy_point_masses_are_verified_token_by_token() -> None:
    """Every ratio is 0 or 1, so random numbers do not matter."""
    p, draft = drafted(300, 4, vocab=3)
    best = p.argmax(-1)
    p, tokens = one_hot(best, 3), torch.cat([draft.tokens[:, :1], best[:, :-1]], 1)
    tokens[::3] = draft.tokens[::3]
    draft = replace(draft, tokens=tokens, sampled=torch.zeros_like(draft.valid))
    token = verify(TokenWise(), p, draft)
    for verification in (BlockVerification(), Traversal()):
        assert equal(verify(verification, p, draft), token), verification.name
    assert set(token.length.tolist()) == {0, 1, 2, 3, 4}


def expected_lengths(p: list[Tensor], q: list[Tensor], length: int) -> Tensor:
    """E[P_0] .. E[P_L]: the probability that block verification accepts this many drafts or more, by enumeration."""
    size = p[0].shape[1]
    weight, mass, expected = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64), [1.0]
    for t in range(length):
        weight = (weight[:, None] * q[t].double()).flatten()
        mass = (mass[:, None] * p[t].double() / q[t].double()).clamp_max(1).flatten()
        assert len(mass) == size ** (t + 1)
        expected.append(float((weight * mass).sum()))
    return torch.tensor(expected, dtype=torch.float64)


def test_block_verification_is_lossless_and_accepts_as_the_formula_says() -> None:
    length = 4
    out = run_on_tables(BlockVerification(), TabularDrafter(Q, chain_paths(length)), P, 30_000)
    assert tiny.fit(coded(out.tokens, 3), sequence_probs(P)) > ALPHA
    at_least = expected_lengths(P, Q, length)
    distribution = at_least - torch.cat([at_least[1:], torch.zeros(1)])
    assert tiny.fit(out.trace.accepted[:, 0], distribution) > ALPHA
    token = run_on_tables(TokenWise(), TabularDrafter(Q, chain_paths(length)), P, 30_000)
    assert out.trace.accepted[:, 0].sum() > token.trace.accepted[:, 0].sum()
    assert torch.equal(out.trace.first[:, 0], token.trace.first[:, 0])  # the same statistic


BUSH = parse("[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0],[0,1,0]]")
TREES = {"bush": BUSH, "mc_sim": named("mc_sim_7b_63"), "balanced": named("reverse_balanced_25")}
MODES = ("sampled", "chosen")


def drafted_tree(paths: Any, mode: str = "sampled", rows: int = 100, vocab: int = 8) -> tuple[Tensor, Draft]:
    """The target's distributions, and a tree whose tokens are sampled from other distributions, or chosen."""
    tree, g = build(paths), torch.Generator().manual_seed(5)
    p = (1.5 * torch.randn(rows, tree.nodes, vocab, generator=g)).softmax(-1)
    near = p[:, tree.inner[0]].log() + torch.randn(rows, tree.inner.shape[1], vocab, generator=g)
    q = near.softmax(-1)
    noise = torch.empty(rows, len(q[0]), vocab).exponential_(generator=g)
    width = tree.width
    drawn = q.topk(width, dim=-1).indices if mode == "chosen" else draw_distinct(q, noise, width)
    tokens = torch.zeros(rows, tree.nodes, dtype=torch.int64)
    exists = tree.children[0] >= 0
    tokens[:, tree.children[0][exists]] = drawn[:, exists]
    valid = torch.ones(rows, tree.nodes, dtype=torch.bool)
    return p, Draft(tree, tokens, q, valid, torch.zeros_like(valid) if mode == "chosen" else None)


def sequential(p: Tensor, draft: Draft, row: int, u: Tensor) -> tuple[int, Tensor]:
    """The last accepted node and the distribution of the next token. A child is tried after all subtrees of its elder
    siblings are rejected. In float64."""
    tree = draft.tree

    def visit(node: int, mass: float) -> tuple[int, Tensor] | None:
        left, slot = p[row, node].double(), int(tree.slot[0, node])
        q = draft.probs[row, slot].double()
        for child in tree.children[0, slot].tolist() if slot >= 0 else []:
            if child < 0 or not draft.valid[row, child]:
                continue
            x = int(draft.tokens[row, child])
            proposal = q if draft.sampled is None else torch.eye(len(q), dtype=torch.float64)[x]
            if proposal[x] <= 0:
                continue
            if (result := visit(child, min(1.0, mass * float(left[x] / proposal[x])))) is not None:
                return result
            rest = (mass * left - proposal).clamp_min(0)
            residual_mass = float(rest.sum())
            mass = residual_mass / (residual_mass + 1 - mass) if residual_mass + 1 - mass > 0 else 1.0
            left = rest / residual_mass if residual_mass > 0 else left
            q = q.index_fill(0, torch.tensor(x), 0) / (1 - q[x])
        return (node, left) if node == 0 or u[row, node] < mass else None

    result = visit(0, 1.0)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("name", "mode"), [("bush", "sampled"), ("mc_sim", "sampled"), ("mc_sim", "chosen"), ("balanced", "sampled")]
)
def test_traversal_decides_as_its_sequential_form(name: str, mode: str) -> None:
    """Some nodes do not exist. float32 changes a decision with a probability below 1e-3 in all."""
    p, draft = drafted_tree(TREES[name], mode)
    missing = torch.rand(draft.valid.shape, generator=torch.Generator().manual_seed(1)) < 0.1
    draft.valid &= ~(missing.unsqueeze(1) & draft.tree.ancestors).any(-1) | draft.tree.ancestors[:, :, 0].logical_not()
    draft.valid[:, 0] = True
    u = tiny.rng(len(p)).uniform(torch.zeros(len(p), dtype=torch.int64), VERIFY, draft.tree.nodes)
    result = verify(Traversal(), p, draft)
    assert result.length.float().mean() > 0.5
    for row in range(len(p)):
        node, left = sequential(p, draft, row, u)
        assert int(result.path_with_root[row, -1]) == node
        torch.testing.assert_close(result.next_probs[row], left.float(), atol=1e-4, rtol=1e-3)
        assert int(result.length[row]) == int(draft.tree.depth[0, node])


def test_traversal_at_one_depth_equals_token_wise_verification() -> None:
    """The root's mass stays 1, so every operation is the same."""
    for mode in MODES:
        p, draft = drafted_tree([(c,) for c in range(4)], mode, rows=400)
        assert equal(verify(Traversal(), p, draft), verify(TokenWise(), p, draft)), mode


def per_row(tree: Tree) -> Tree:
    rank = torch.zeros_like(tree.parent)
    for m in range(tree.width):
        rank[0, tree.children[0, :, m].clamp_min(0)] = m
    rank[0, 0] = 0
    return from_parents(tree.parent, rank, tree.width, tree.height)


def test_a_tree_per_row_is_verified_like_a_shared_one() -> None:
    """Like the trees of EAGLE-2, whose inner nodes have another order."""
    p, draft = drafted_tree(TREES["mc_sim"], rows=200)
    tree = per_row(draft.tree)
    inner, order = draft.tree.slot[0], tree.inner[0]
    probs = draft.probs[:, inner[order].clamp_min(0)]
    assert equal(verify(Traversal(), p, draft), verify(Traversal(), p, replace(draft, tree=tree, probs=probs)))


def test_sequences_of_a_traversed_tree_have_the_targets_distribution() -> None:
    out = run_on_tables(Traversal(), TabularDrafter(Q, BUSH), P, 12_000)
    assert tiny.fit(coded(out.tokens, 3), sequence_probs(P)) > ALPHA


def test_on_a_chain_traversal_equals_block_verification() -> None:
    """For sampled and for deterministic tokens, complete and shortened. The tokens and distributions of missing nodes
    do not count."""
    p, draft = drafted(2000, 5)
    valid = torch.arange(6) <= torch.arange(2000)[:, None] % 7
    valid[:, 0] = True
    chosen = replace(draft, valid=valid, sampled=torch.zeros_like(valid))
    for case in (replace(draft, valid=valid), chosen, draft):
        block, other = verify(BlockVerification(), p, case), verify(Traversal(), p, case)
        assert torch.equal(block.path, other.path)
        assert torch.equal(block.tokens, other.tokens)
        torch.testing.assert_close(block.next_probs, other.next_probs, atol=1e-4, rtol=1e-3)
        assert set(block.length.tolist()) == {0, 1, 2, 3, 4, 5}


def test_drafts_of_the_target_itself_are_accepted_and_foreign_ones_rejected() -> None:
    for verification, (p, draft) in (
        (BlockVerification(), drafted(100, 3, vocab=8)),
        (Traversal(), drafted_tree(BUSH)),
    ):
        accepted = verify(verification, p, replace(draft, probs=p[:, draft.tree.inner[0]]))
        assert accepted.length.eq(3).all()
        p[..., :4], q = 0, draft.probs.clone()
        q[..., 4:] = 0
        p, q = (x / x.sum(-1, keepdim=True) for x in (p, q))
        rejected = verify(verification, p, replace(draft, probs=q, tokens=draft.tokens % 4))
        assert rejected.length.eq(0).all()
        torch.testing.assert_close(rejected.next_probs, p[:, 0])


def test_a_result_depends_only_on_its_row() -> None:
    for verification, (p, draft) in (
        (Traversal(), drafted_tree(BUSH, rows=30, vocab=50)),
        (BlockVerification(), drafted(30, 5, vocab=50)),
    ):
        together = verify(verification, p, draft)
        for row in range(0, 30, 7):
            row_slice = slice(row, row + 1)
            row_draft = replace(
                draft, tokens=draft.tokens[row_slice], probs=draft.probs[row_slice], valid=draft.valid[row_slice]
            )
            alone = verification.verify(
                p[row_slice], row_draft, rules.exact(), tiny.rng([row]), torch.zeros(1, dtype=torch.int64)
            )
            assert equal(alone, VerificationResult(**{k: x[row_slice] for k, x in vars(together).items()}))


def test_masses_of_ratios_whose_product_overflows() -> None:
    """P is min(1, P p / q), step by step, whatever the size of the ratios."""
    ratio = torch.tensor([[1e30, 1e30, 1e30, 0.5, 0.5], [1e-30, 1e-30, 1e20, 1e30, 1e30], [0.5, 0.0, 1e30, 1e30, 2.0]])
    expected = [[1, 1, 1, 1, 0.5, 0.25], [1, 1e-30, 1e-60, 1e-40, 1e-10, 1], [1, 0.5, 0, 0, 0, 0]]
    torch.testing.assert_close(masses(ratio), torch.tensor(expected), rtol=1e-5, atol=1e-38)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("cool_sd verification=block", "has rule cool: use verification=token, or rule=exact"),
        ("medusa verification=block", "has rule typical"),
        ("sd rule=uniform verification=block", "has rule uniform"),
        ("cool_sd verification=traversal", "has rule cool"),
        ("sjd verification=block", "carries over to the next step"),
        ("jacobi verification=block", "carries over to the next step"),
        ("sjd refine=false coupling=gumbel verification=block", "carries over to the next step"),
        ("sjd_pac verification=traversal", "carries over to the next step"),
        ("eagle1 verification=block", "drafts a tree: use verification=traversal"),
        ("eagle2 verification=block", "drafts a tree: use verification=traversal"),
        ("vvs rule=exact verification=traversal", "tokens without verification, and verification=traversal"),
        ("cspd model=mar_scenes verification=traversal",
         "mar_scenes has continuous tokens, which verification=traversal does not support"),
        ("sd verification=block", None),
        ("sjd refine=false window=4 verification=block", None),
        # a tree that is ranked by the values of its tokens is exact if these are point masses
        *((f"{w} verification=traversal", None) for w in ("eagle2", "medusa rule=exact", "eagle_chain", "eagle3")),
    ],
)  # fmt: skip
def test_inexact_or_meaningless_verification_is_refused(words: str, sentence: str | None) -> None:
    with pytest.raises(UsageError, match=sentence) if sentence else nullcontext():
        run.check(configuration.compose(f"method={words}".split()))


# --- reference values -------------------------------------------------------------------------------------------------

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "methods" / "block"
needs_values = pytest.mark.skipif(not FOLDER.is_dir(), reason="the reference values are not beside this checkout")
IMAGES = 8000
WIDE, FORK = "[[0], [1], [2], [0, 0], [0, 1], [0, 0, 0]]", "[[0], [0, 0], [0, 1], [0, 0, 0], [0, 1, 0]]"


def reference(case: str, *keys: str) -> tuple[models.TabularModel, dict[str, Any]]:
    content = json.loads((FOLDER / "expected_block.json").read_text())[case]
    for key in keys:
        content = content[key]
    return models.load(str(FOLDER / f"{case}.npz")), content


@needs_values
@pytest.mark.parametrize(
    ("case", "verification", "paths", "mode", "keys"),
    [
        *((case, BlockVerification(), chain_paths(n), "without", ("chains", f"window={n}", "block"))
          for case, n in (("block_a", 1), ("block_b", 2), ("block_e", 3), ("block_a", 4))),
        *((case, Traversal(), parse(paths), mode, ("trees", paths, f"traversal {mode}"))
          for case, paths, mode in (("block_b", WIDE, "without"), ("block_b", FORK, "without"),
                                    ("block_e", WIDE, "chosen"), ("block_e", WIDE, "without"))),
    ],
)  # fmt: skip
def test_drafts_reach_the_reference_lengths(
    case: str, verification: Any, paths: Any, mode: str, keys: tuple[str, ...]
) -> None:
    """The distribution of the number of tokens accepted in the first round, and the mean of T / rounds within four
    standard errors; a true value is outside in one of 16,000 cases."""
    tables, expected = reference(case, *keys)
    drafter = TabularDrafter(tables.q, paths, mode == "chosen")
    out = run_on_tables(verification, drafter, tables.p, IMAGES)
    accepted = torch.tensor(expected["accepted_law"], dtype=torch.float64)
    assert tiny.fit(out.trace.accepted[:, 0], accepted) > ALPHA
    ratio = out.tokens.shape[1] / out.steps.double()
    error = float(ratio.std() / len(ratio) ** 0.5)
    assert abs(float(ratio.mean()) - expected["tokens_per_round_mean_of_ratios"]) < 4 * error


@needs_values
@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("eagle_chain verification=block window=3", ("chains", "window=3", "block")),
        ("eagle_traversal tree=[[0],[1],[2],[0,0],[0,1],[0,0,0]]", ("trees", WIDE, "traversal without")),
    ],
)
def test_the_audit_reports_the_reference_lengths(words: str, keys: tuple[str, ...]) -> None:
    """`tokens_per_step` is the mean of T / rounds, which for L = 3 is 0.35 above T / mean rounds. A number in [1, most]
    with mean m has a variance of at most (most - m) (m - 1); four standard errors of it are below 0.1."""
    tables, expected = reference("block_b", *keys)
    method = audit.assemble(configuration.compose(f"method={words}".split()), tables)
    row = audit.measure(method, tables, IMAGES, margin=1)
    assert row["verdict"] == "not refuted"
    for column, mean, most in (
        ("tokens_per_step", expected["tokens_per_round_mean_of_ratios"], tables.length),
        ("accepted_length", expected["first_round_length"], len(expected["accepted_law"])),
    ):
        error = ((most - mean) * (mean - 1) / IMAGES) ** 0.5
        assert abs(row[column] - mean) < 4 * error < 0.1
