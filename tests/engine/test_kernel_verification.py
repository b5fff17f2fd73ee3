"""The kernels that verify a draft and apply the result, against the plain functions that specify them: compiled on
CUDA, by Triton's interpreter elsewhere. Rows, nodes and tokens are few, because the interpreter runs every program
separately."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from specbench.decoding import trees
from specbench.decoding.parallel_positions import Raster
from specbench.decoding.rules import Band, Mentored, Rule, cool, exact, uniform
from specbench.decoding.rules.lantern import Lantern
from specbench.decoding.rules.relaxed import Redraw
from specbench.decoding.rules.thresholds import Typical
from specbench.decoding.sampling import draw, draw_distinct
from specbench.decoding.trees import Tree, build, chain_paths, from_parents, parse, window_paths
from specbench.decoding.verify import Draft, TokenWise, Verification, VerificationResult
from specbench.decoding.verify.block import BlockVerification
from specbench.decoding.verify.traversal import Traversal
from specbench.engine.ops import KVCache

pytest.importorskip("triton")
from gpu_checks.parity import poisoned

from specbench.engine.kernels import FusedKernels, lossless

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 5
TOKEN = TokenWise()


def uniforms(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def peaked(*shape: int, seed: int = 0) -> Tensor:
    """Distributions (..., V)."""
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).softmax(-1).to(DEVICE)


def shared(paths: list[trees.Path]) -> Tree:
    return build(paths).to(DEVICE)


def grown(nodes: int, height: int, width: int, rows: int = ROWS) -> Tree:
    """A different topology for every row, as EAGLE-2 grows them."""
    generator = torch.Generator().manual_seed(5)
    parents, ranks = [], []
    for _ in range(rows):
        parent, rank, depth, kids = [0], [0], [0], [0]
        while len(parent) < nodes:
            above = int(torch.randint(len(parent), (), generator=generator))
            if depth[above] < height and kids[above] < width:
                parent.append(above)
                rank.append(kids[above])
                depth.append(depth[above] + 1)
                kids[above] += 1
                kids.append(0)
        parents.append(parent)
        ranks.append(rank)
    return from_parents(torch.tensor(parents, device=DEVICE), torch.tensor(ranks, device=DEVICE), width, height)


def drafted(tree: Tree, size: int, support: int, sampled: Tensor | None, rows: int = ROWS) -> tuple[Tensor, Draft]:
    """The target's distributions (B, M, V), and a draft whose distributions have `support` tokens. They are so close
    that walks end at all depths."""
    inner, children = tree.inner.expand(rows, -1), tree.children.expand(rows, -1, -1)
    q = peaked(rows, inner.shape[1], size)
    q[:, :, support:] = 0
    q[0, :, 1:] = 0  # one token: no further siblings exist
    q /= q.sum(-1, keepdim=True)
    p = 0.3 * peaked(rows, tree.nodes, size, seed=1)
    row = torch.arange(rows, device=DEVICE)[:, None]
    p[row, inner] += 0.7 * q
    p[1] = q[1, 0]  # nothing is left after all of q is subtracted
    p /= p.sum(-1, keepdim=True)
    tokens = torch.zeros(rows, tree.nodes + 1, dtype=torch.int64, device=DEVICE)
    drawn = draw_distinct(q, -torch.log1p(-uniforms(*q.shape, seed=2)), min(tree.width, size))
    drawn[0, ::2] = 0  # or repeat that token, which cannot be tried again
    cell = torch.where(children >= 0, children, tree.nodes)[..., : drawn.shape[-1]]
    tokens.scatter_(1, cell.flatten(1), drawn.flatten(1))
    valid = torch.ones(rows, tree.nodes, dtype=torch.bool, device=DEVICE)
    valid[2, 2:] = False
    return p, Draft(tree, tokens[:, :-1].contiguous(), q, valid, sampled)


def verify(
    p: Tensor,
    draft: Draft,
    rule: Rule,
    seed: int = 0,
    kernels: FusedKernels | None = None,
    verification: Verification = TOKEN,
    decided_by: Tensor | None = None,
) -> VerificationResult:
    step = torch.arange(len(p), device=DEVICE)
    rule.open(step.device)
    with torch.inference_mode(), poisoned():
        return verification.verify(p, draft, rule, tiny.rng(len(p), seed, DEVICE), step, decided_by, kernels)


def assert_same(fused: VerificationResult, plain: VerificationResult) -> None:
    for name in ("path", "length", "tokens"):
        assert torch.equal(getattr(plain, name), getattr(fused, name))
    torch.testing.assert_close(fused.next_probs, plain.next_probs, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(fused.first, plain.first, rtol=1e-5, atol=1e-8)


def agree(
    p: Tensor,
    draft: Draft,
    rule: Rule | None = None,
    verification: Verification = TOKEN,
    seed: int = 0,
    decided_by: Tensor | None = None,
) -> VerificationResult:
    """Compares the kernels with the plain functions: the same path and tokens for the same uniforms, and inputs that do
    not change. Returns the plain result."""
    before = p.clone(), draft.probs.clone()
    plain, fused = (
        verify(p, draft, rule or exact(), seed, kernels, verification, decided_by) for kernels in (None, FusedKernels())
    )
    assert_same(fused, plain)
    assert torch.equal(p, before[0])
    assert torch.equal(draft.probs, before[1])
    return plain


def kind_of(tree: Tree, kind: str, rows: int = ROWS) -> Tensor | None:
    """Which nodes (B, M) were sampled: all, two of three, or none (None)."""
    number = torch.arange(tree.nodes, device=DEVICE).expand(rows, -1)
    return {"mixed": number % 3 != 2, "deterministic": number < 0}.get(kind)


CHAIN, TREE = chain_paths(3), parse("[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0]]")


BRANCHES = parse("[[0],[1],[2],[0,0],[0,1]]")


def of_kind(paths: list[trees.Path], size: int, kind: str = "sampled", rows: int = 4) -> tuple[Tensor, Draft]:
    tree = shared(paths)
    return drafted(tree, size, size // 2 + 1, kind_of(tree, kind, rows), rows)


VERIFICATIONS: dict[str, Verification] = {
    "token": TOKEN,
    "block": BlockVerification(),
    "chain": Traversal(),
    "tree": Traversal(),
}
#: The target's distributions and the draft for a vocabulary size, by kind of verification.
DRAFTS: dict[str, Any] = {
    "token": partial(of_kind, TREE),
    "block": partial(of_kind, CHAIN),
    "chain": partial(of_kind, CHAIN),
    "tree": partial(of_kind, BRANCHES),
}


@pytest.mark.parametrize("rule", [
    exact(), uniform(0.8), uniform(1.5, "vanilla"), cool(1.5, 3), cool(1.5, 3, resample="vanilla"),
    Band(0.45, 0.5, 3), Band(6.0, 0.0, 3), Mentored(0.05), Redraw(), Redraw("vanilla"), Typical(),
], ids=lambda r: f"{r.name}-{getattr(r.relaxation(), 'residual', r.relaxation())}")  # fmt: skip
def test_rules(rule: Rule) -> None:
    """The size of the vocabulary is not divisible by 16."""
    for paths, kind in ((CHAIN, "sampled"), (TREE, "mixed"), (TREE, "deterministic")):
        tree = shared(paths)
        plain = agree(*drafted(tree, 77, 40, kind_of(tree, kind)), rule)
        assert len(set(plain.length.tolist())) > 1, kind  # the root does not decide every row


def near(size: int, count: int) -> Tensor:
    """Neighbours (size, count) of codes in no order; token 5 has no code."""
    far = torch.rand(size, size, generator=torch.Generator().manual_seed(3)).fill_diagonal_(2)
    table = far.argsort(-1)[:, :count].to(DEVICE)
    table[5] = 5
    return table


BOUNDS = (
    ("lantern", "tvd", 0.15),
    ("lantern", "jsd", 0.05),
    ("lantern_pp", "total", 2.0),
    ("lantern_pp", "neighbours", 1.5),
)
RESAMPLE = ("paper", "optimal", "released", "released_p")


@pytest.mark.parametrize(("name", "bound", "limit"), BOUNDS)
def test_neighbours(name: str, bound: str, limit: float) -> None:
    """Sampled and chosen candidates, neighbours without mass, and 13 neighbours where only 12 may count."""
    size, ends = 77, set()
    cases = [
        *((paths, resample_mode, False) for paths, resample_mode in zip((CHAIN, TREE) * 2, RESAMPLE)),
        (TREE, "paper", True),
    ]
    for paths, resample, greedy in cases:
        tree, rule = shared(paths), Lantern(name, near(size, 13), 12, bound, limit, resample, greedy)
        p, draft = drafted(tree, size, 40, kind_of(tree, "mixed"))
        decided_by = peaked(*p.shape, seed=1) if greedy else None
        ends |= set(agree(p, draft, rule, decided_by=decided_by).length.tolist())
    assert len(ends) > 1


@pytest.mark.parametrize(("bound", "limit", "resample"), [
    ("tvd", 3 / 64, "paper"), ("total", 4.0, "released"), ("neighbours", 3.0, "paper"),
])  # fmt: skip
def test_a_mass_that_equals_the_bound(bound: str, limit: float, resample: str) -> None:
    """A mass of exactly the bound is inside, or outside, as in the plain code. All tokens have the mass 1 / 64, so this
    is exact."""
    name = "lantern" if bound == "tvd" else "lantern_pp"
    rule, tree = Lantern(name, near(64, 9), 8, bound, limit, resample), shared(chain_paths(1))
    q = torch.full((ROWS, 1, 64), 0.25 / 63, device=DEVICE)
    tokens = torch.tensor([0, 5], device=DEVICE).expand(ROWS, -1) + torch.arange(ROWS, device=DEVICE)[:, None]
    q.scatter_(2, tokens[:, 1:, None], 0.75)
    draft = Draft(tree, tokens, q, torch.ones_like(tokens, dtype=torch.bool))
    p = torch.full((ROWS, 2, 64), 1 / 64, device=DEVICE)
    plain = agree(p, draft, rule)
    assert plain.first[0] * 2 < plain.first[1]  # the first token has no code, so no neighbours


@pytest.mark.parametrize(("size", "rows"), [(97, 4), (1301, 3)])
def test_distributions_with_ties(size: int, rows: int) -> None:
    """Logits in bfloat16, and more neighbours than a program reads at once."""
    tree = shared(TREE)
    p, draft = drafted(tree, size, size // 2, None, rows)
    p, draft.probs = ((x + 1e-6).log().bfloat16().float().softmax(-1) for x in (p, draft.probs))
    table = near(size, size - 1)
    for rule in (
        Lantern("lantern", table, size, "tvd", 0.3), Lantern("lantern_pp", table, size, "total", 2.0, "released"),
        Mentored(0.05), Typical(),
    ):  # fmt: skip
        agree(p, draft, rule)


@pytest.mark.parametrize("rule", [
    exact(), Lantern("lantern", near(19, 7), 6, "tvd", 0.2, "released"), Mentored(0.05), Typical(),
], ids=lambda r: r.name)  # fmt: skip
def test_nodes_that_are_accepted_in_any_case(rule: Rule) -> None:
    """As VVS drafts them: chosen tokens, and a tree per row in which some nodes are the only valid children."""
    tree = grown(12, 4, 3)
    p, draft = drafted(tree, 19, 3, torch.zeros(ROWS, tree.nodes, dtype=torch.bool, device=DEVICE))
    row, kids = torch.arange(ROWS, device=DEVICE), tree.children[:, 0]
    without = (tree.depth == 1) & (torch.arange(tree.nodes, device=DEVICE) != kids[:, :1]) & (row % 2 == 0)[:, None]
    draft.valid &= ~(without.unsqueeze(1) & tree.ancestors).any(-1)
    draft.unverified = torch.zeros_like(draft.valid).scatter_(1, kids[:, :1], (row % 2 == 0)[:, None])
    # Never accepted by itself.
    p.scatter_(2, draft.tokens[row, kids[:, 0]].view(-1, 1, 1).expand(-1, tree.nodes, 1), 0.0)
    p = p / p.sum(-1, keepdim=True)
    plain = agree(p, draft, rule)
    assert plain.length[::2].min() >= 1
    assert torch.equal(plain.path[::2, 0], kids[::2, 0])


@pytest.mark.parametrize("rule", [
    exact(), Lantern("lantern", near(77, 7), 6, "tvd", 0.2, "released"), Mentored(0.05), Typical(),
], ids=lambda r: r.name)  # fmt: skip
def test_siblings_that_are_drawn_each_from_its_own_distribution(rule: Rule) -> None:
    """In two trees; also with a token that two siblings share. Every child of an inner node is accepted somewhere."""
    size, reached = 77, set()
    for paths in (parse("[[0],[1],[2],[0,0],[1,0],[2,0]]"), TREE):
        tree = shared(paths)
        first = tree.children[0, :, 0] - 1
        for seed in range(4):
            own = peaked(ROWS, tree.nodes - 1, size, seed=seed)
            p = 0.5 * peaked(ROWS, tree.nodes, size, seed=9)
            p.scatter_add_(1, tree.parent[:, 1:, None].expand(ROWS, -1, size), own / 6)
            p /= p.sum(-1, keepdim=True)
            tokens = draw(own, uniforms(ROWS, tree.nodes - 1, seed=seed))
            tokens[0] = tokens[0, 0]
            tokens = torch.cat([torch.zeros_like(tokens[:, :1]), tokens], 1)
            valid = torch.ones_like(tokens, dtype=torch.bool)
            draft = Draft(tree, tokens, own[:, first], valid, node_probs=own)
            reached |= set(agree(p, draft, rule, seed=seed).path[:, 0].tolist())
    assert {1, 2, 3} <= reached


@pytest.mark.parametrize("budget", [0.0, 1e-3, 1.0])
def test_the_band_of_a_budget(budget: float) -> None:
    """For pairs of all kinds: equal, similar, very different, each without some of the other's tokens, and nearly a
    point mass."""
    size, rows, rule, chain = 97, 6, Mentored(budget), shared(chain_paths(1))
    p, other = peaked(rows, 1, size), peaked(rows, 1, size, seed=1)
    q = torch.where(torch.arange(size, device=DEVICE) < 60, 0.7 * p + 0.3 * other, 0.0)  # near
    q[1], q[2], q[3] = other[1], p[2], other[3] * (torch.arange(size, device=DEVICE) > 30)
    p[3] = p[3] * (torch.arange(size, device=DEVICE) < 70)
    p[4] = 1e-3 * p[4] + (torch.arange(size, device=DEVICE) == 7)
    p[5] = 0.15 / (size - 1)
    p[5, 0, 7] = 0.85
    q[5] = torch.arange(size, device=DEVICE) == 7  # more than Newton's method can handle at once
    p, q = (x / x.sum(-1, keepdim=True) for x in (p, q))
    limits = rule.limits(p.double(), q.double(), torch.ones(rows, 1, dtype=torch.int64))
    low, high = (x.unsqueeze(-1) for x in limits)
    for token in range(7, size, 30):
        tokens = torch.full((rows, 2), token, device=DEVICE)
        valid = torch.ones_like(tokens, dtype=torch.bool)
        verified = verify(torch.cat([p, p], 1), Draft(chain, tokens, q, valid), rule, token, FusedKernels())
        accept = torch.where(q > 0, (high * p.double() / q).clamp_max(1), 0)[:, 0, token]
        weight = q[:, 0, token].double()  # the limits are not exact enough for tokens that are almost never drafted
        torch.testing.assert_close(weight * verified.first, weight * accept, rtol=0, atol=2e-6)
        left = (low * p - q).clamp_min(0)[:, 0]
        rejected = (verified.length == 0) & (weight > 0) & (left.sum(-1) > 1e-4)
        expected = left / left.sum(-1, keepdim=True)
        torch.testing.assert_close(verified.next_probs.double()[rejected], expected[rejected], rtol=0, atol=2e-4)


def test_of_equally_long_paths_the_earliest_is_accepted() -> None:
    """Siblings are ordered by rank, whatever their indices are."""
    plain = agree(*drafted(grown(20, 4, 3), 19, 3, None), Typical(1e-3, 1e-3))
    assert len(set(plain.length.tolist())) > 1


def test_a_vocabulary_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    p, draft = drafted(shared(TREE), 4099, 3000, None, 4)
    for rule in (cool(1.5, 3), Band(0.45, 0.5, 3), Mentored(0.05), Typical()):
        agree(p, draft, rule)
    monkeypatch.setattr(lossless, "_BLOCK", 16)
    for name in ("block", "tree"):
        agree(*DRAFTS[name](37), verification=VERIFICATIONS[name])


def test_a_band_of_no_strength_is_the_exact_rule() -> None:
    """Bit for bit: the kernel computes the same."""
    p, draft = drafted(shared(TREE), 77, 40, None)
    actual, expected = (verify(p, draft, rule, kernels=FusedKernels()) for rule in (Band(0.0, 0.5, 3), exact()))
    assert tiny.equal(vars(actual), vars(expected))


@pytest.mark.parametrize(("name", "rule"), [
    *((name, exact()) for name in ("block", "tree")), ("token", cool(1.5, 3)),
    ("token", Band(0.45, 0.5, 3)), ("token", Mentored(0.05)), ("token", Typical()),
    ("token", Lantern("lantern", near(19, 13), 12, "tvd", 0.15)),
], ids=lambda x: getattr(x, "name", x))  # fmt: skip
def test_numbers_that_are_not_finite(name: str, rule: Rule) -> None:
    """They are rejected, and stay in the distribution of the next token, so that the step's statistics show them."""
    p, draft = DRAFTS[name](19)
    p[0] = torch.nan
    p[3, 0, 5] = torch.nan
    draft.probs[1] = torch.nan
    fused, plain = (verify(p, draft, rule, 0, kernels, VERIFICATIONS[name]) for kernels in (FusedKernels(), None))
    assert torch.equal(fused.path, plain.path)
    torch.testing.assert_close(fused.next_probs, plain.next_probs, rtol=1e-3, atol=1e-7, equal_nan=True)
    assert fused.next_probs[0].isnan().all()
    assert fused.tokens[0].max() < 19


@pytest.mark.parametrize("tree", [
    shared(chain_paths(64)),
    shared(window_paths(64, 2, 3, "full")),
    shared(window_paths(64, 4, 3, "comb")),
    shared(parse("mc_sim_7b_63")),
    grown(65, 6, 10),
    grown(9, 3, 2),
], ids=["chain", "pac", "comb", "eagle", "grown", "small"])  # fmt: skip
def test_topologies(tree: Tree) -> None:
    """Trees with 65 nodes, walks that end at the deepest level, and more siblings than the drafter has tokens."""
    lengths: list[int] = []
    for seed, sampled in enumerate((None, torch.zeros(ROWS, tree.nodes, dtype=torch.bool, device=DEVICE))):
        p, draft = drafted(tree, 19, 3, sampled)
        p[3] = 0.05 * p[3]
        row = torch.arange(ROWS, device=DEVICE)[:, None]
        rest = p.clone()
        rest[row, tree.inner.expand(ROWS, -1)] += 20 * draft.probs  # a row whose tokens are nearly all accepted
        p[3] = rest[3] / rest[3].sum(-1, keepdim=True)
        lengths += agree(p, draft, exact(), seed=seed).length.tolist()
    assert 0 in lengths
    assert max(lengths) > min(3, tree.height - 1)


# --- block and traversal verification ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kinds"), [
    ("block", ("sampled", "mixed", "deterministic")),
    ("chain", ("sampled",)),
    ("tree", ("sampled", "mixed", "deterministic")),
])  # fmt: skip
def test_lossless_verification(name: str, kinds: tuple[str, ...]) -> None:
    """The size of the vocabulary is not divisible by 16. One row has a shortened draft, and another has fewer tokens
    than siblings."""
    for kind in kinds:
        plain = agree(*DRAFTS[name](19, kind), verification=VERIFICATIONS[name])
        assert len(set(plain.length.tolist())) > 1  # the root does not decide every row


def test_the_output_distribution_of_a_rule() -> None:
    """Where a draft ends early, the next token comes from the target's distribution; the kernel drew it from the rule's
    output distribution."""
    agree(*DRAFTS["block"](19), Band(0.45, 0.5, 3), BlockVerification())
    agree(*DRAFTS["block"](19, "mixed"), Mentored(0.05), BlockVerification())


def test_rows_with_a_tree_of_their_own() -> None:
    """Also with more siblings than the drafter has tokens."""
    agree(*drafted(grown(8, 3, 4, 4), 5, 3, None, 4), verification=Traversal())


def test_a_tree_without_nodes() -> None:
    p, draft = DRAFTS["block"](19)
    empty = replace(draft, tree=build([]).to(DEVICE), tokens=draft.tokens[:, :1], probs=draft.probs[:, :0])
    empty = replace(empty, valid=draft.valid[:, :1])
    for verification in (Traversal(), BlockVerification()):
        assert verify(p[:, :1], empty, exact(), 0, FusedKernels(), verification).length.eq(0).all()


# --- what follows from a verdict --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("paths", "dim"), [(TREE, 20), (window_paths(20, 2, 3, "full"), 16)], ids=["tree", "window"])
def test_the_cache_of_an_accepted_path_is_kept(paths: list[trees.Path], dim: int) -> None:
    """In both halves of a guided batch, with walks of all lengths, and with slots that are read and overwritten."""
    tree, first = shared(paths), 3
    count = torch.arange(ROWS, device=DEVICE) % 5
    plain, fused = (KVCache(2, 2 * ROWS, 3, tree.nodes + 9, dim, count.float()) for _ in range(2))
    for i, (a, b) in enumerate(((plain.k, fused.k), (plain.v, fused.v))):
        a.copy_(uniforms(*a.shape, seed=i))
        b.copy_(a)
    fused.kernels = FusedKernels()
    lengths: list[int] = []
    for seed in range(3):
        p, draft = drafted(tree, 19, 3, None)
        verdict = verify(p, draft, exact(), seed)
        lengths += verdict.length.tolist()
        for cache in (plain, fused):
            cache.keep(verdict.path, verdict.length, count, first)
        assert torch.equal(fused.k, plain.k)
        assert torch.equal(fused.v, plain.v)
    assert len(set(lengths)) > 2


def test_images_advance() -> None:
    """Complete images do not change."""
    tokens, length = torch.arange(1, 1 + 4 * ROWS, device=DEVICE).view(ROWS, 4), torch.arange(ROWS, device=DEVICE) % 4
    decodings = []
    for kernels in (None, FusedKernels()):
        history = torch.full((ROWS, 6 + 8), 99, device=DEVICE)
        count, steps = torch.arange(ROWS, device=DEVICE), torch.arange(ROWS, device=DEVICE) + 7
        verdict: Any = SimpleNamespace(tokens=tokens, length=length)
        with poisoned():
            came = Raster(build([]), count).advance(verdict, None, (history, count, steps), 6, kernels)
        decodings.append((*came, history, count, steps))
    for plain, fused in zip(*decodings, strict=True):
        assert torch.equal(plain, fused)
