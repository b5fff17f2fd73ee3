"""The kernels that verify a draft and what follows from the verdict, against the plain functions that specify them:
compiled on CUDA, by Triton's interpreter elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from specbench.decoding import trees
from specbench.decoding.loop import Decoding
from specbench.decoding.rules import Band, Rule, cool, exact, uniform
from specbench.decoding.sampling import draw_distinct
from specbench.decoding.trees import Tree, build, chain_paths, from_parents, parse, window_paths
from specbench.decoding.verify import Draft, TokenWise, Verdict, Verification
from specbench.engine.ops import KVCache

pytest.importorskip("triton")
from gpu_checks.parity import poisoned

from specbench.engine.kernels import FusedKernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 8
TOKEN = TokenWise()


def uniforms(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def peaked(*shape: int, seed: int = 0) -> Tensor:
    """Distributions (..., V)."""
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).softmax(-1).to(DEVICE)


def shared(paths: list[trees.Path]) -> Tree:
    return build(paths).to(DEVICE)


def grown(nodes: int, height: int, width: int, rows: int = ROWS) -> Tree:
    """A topology of its own for every row, as EAGLE-2 grows them."""
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
    """The target's distributions (B, M, V) and a draft whose distributions have `support` tokens: near enough to each
    other that the walks end at all depths."""
    inner, children = tree.inner.expand(rows, -1), tree.children.expand(rows, -1, -1)
    q = peaked(rows, inner.shape[1], size)
    q[:, :, support:] = 0
    q[0, :, 1:] = 0  # one token: there are no further siblings
    q /= q.sum(-1, keepdim=True)
    p = 0.3 * peaked(rows, tree.nodes, size, seed=1)
    row = torch.arange(rows, device=DEVICE)[:, None]
    p[row, inner] += 0.7 * q
    p[1] = q[1, 0]  # nothing is left when all of q was subtracted
    p /= p.sum(-1, keepdim=True)
    tokens = torch.zeros(rows, tree.nodes + 1, dtype=torch.int64, device=DEVICE)
    drawn = draw_distinct(q, uniforms(*q.shape, seed=2), min(tree.width, size))
    cell = torch.where(children >= 0, children, tree.nodes)[..., : drawn.shape[-1]]
    tokens.scatter_(1, cell.flatten(1), drawn.flatten(1))
    valid = torch.ones(rows, tree.nodes, dtype=torch.bool, device=DEVICE)
    valid[2, 2:] = False
    return p, Draft(tree, tokens[:, :-1].contiguous(), q, valid, sampled)


def judged(
    p: Tensor,
    draft: Draft,
    rule: Rule,
    seed: int = 0,
    kernels: FusedKernels | None = None,
    way: Verification = TOKEN,
) -> Verdict:
    step = torch.arange(len(p), device=DEVICE)
    rule.open(step.device)
    with torch.inference_mode(), poisoned():
        return way.verify(p, draft, rule, tiny.rng(len(p), seed, DEVICE), step, kernels=kernels)


def same(found: Verdict, plain: Verdict) -> None:
    for what in ("path", "length", "tokens"):
        assert torch.equal(getattr(plain, what), getattr(found, what))
    torch.testing.assert_close(found.next_probs, plain.next_probs, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(found.first, plain.first, rtol=1e-5, atol=1e-8)


CHAIN, TREE = chain_paths(3), parse("[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0]]")


@pytest.mark.parametrize("rule", [
    exact(), uniform(0.8), uniform(1.5, "vanilla"), cool(1.5, 3), cool(1.5, 3, resample="vanilla"),
    Band(0.45, 0.5, 3), Band(6.0, 0.0, 3),
], ids=lambda r: f"{r.name}-{r.relaxation().residual}")  # fmt: skip
@pytest.mark.parametrize("paths", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["sampled", "mixed", "deterministic"])
def test_rules(paths: list[trees.Path], rule: Rule, kind: str) -> None:
    """The same path and the same token for the same uniforms, over a vocabulary that no 16 divide."""
    tree = shared(paths)
    number = torch.arange(tree.nodes, device=DEVICE).expand(ROWS, -1)
    sampled = {"sampled": None, "mixed": number % 3 != 2, "deterministic": number < 0}[kind]
    p, draft = drafted(tree, 77, 40, sampled)
    before = p.clone(), draft.probs.clone()
    plain = judged(p, draft, rule)
    same(judged(p, draft, rule, kernels=FusedKernels()), plain)
    assert len(set(plain.length.tolist())) > 1  # it is not settled at the root
    assert torch.equal(p, before[0])
    assert torch.equal(draft.probs, before[1])


def test_a_vocabulary_of_several_blocks() -> None:
    p, draft = drafted(shared(TREE), 9001, 3000, None)
    for rule in (exact(), cool(1.5, 3), Band(0.45, 0.5, 3)):
        same(judged(p, draft, rule, kernels=FusedKernels()), judged(p, draft, rule))


def test_a_band_of_no_strength_is_the_exact_rule() -> None:
    """Bit for bit: the kernel computes the same."""
    p, draft = drafted(shared(TREE), 77, 40, None)
    found, wanted = (judged(p, draft, rule, kernels=FusedKernels()) for rule in (Band(0.0, 0.5, 3), exact()))
    assert tiny.equal(vars(found), vars(wanted))


@pytest.mark.parametrize("rule", [cool(1.5, 3), Band(0.45, 0.5, 3)], ids=lambda r: r.name)
def test_numbers_that_are_not_finite(rule: Rule) -> None:
    """They are rejected and stay in what the next token is drawn from, so that the step's statistics show them."""
    p, draft = drafted(shared(TREE), 77, 40, None)
    p[0] = torch.nan
    p[3, 0, 5] = torch.nan
    draft.probs[4] = torch.nan
    found = judged(p, draft, rule, kernels=FusedKernels())
    plain = judged(p, draft, rule)
    assert torch.equal(found.path, plain.path)
    torch.testing.assert_close(found.next_probs, plain.next_probs, rtol=1e-3, atol=1e-7, equal_nan=True)
    assert found.next_probs[0].isnan().all()
    assert found.tokens[0].max() < 77


@pytest.mark.parametrize("tree", [
    shared(chain_paths(64)),
    shared(window_paths(64, 2, 3, "full")),
    shared(window_paths(64, 4, 3, "comb")),
    shared(parse("mc_sim_7b_63")),
    grown(65, 6, 10),
    grown(9, 3, 2),
], ids=["chain", "pac", "comb", "eagle", "grown", "small"])  # fmt: skip
def test_topologies(tree: Tree) -> None:
    """With 65 nodes, walks that end at the deepest level, and more siblings than the drafter has tokens."""
    lengths: list[int] = []
    for seed, sampled in enumerate((None, torch.zeros(ROWS, tree.nodes, dtype=torch.bool, device=DEVICE))):
        p, draft = drafted(tree, 19, 3, sampled)
        p[3] = 0.05 * p[3]
        row = torch.arange(ROWS, device=DEVICE)[:, None]
        rest = p.clone()
        rest[row, tree.inner.expand(ROWS, -1)] += 20 * draft.probs  # a row whose tokens are nearly all accepted
        p[3] = rest[3] / rest[3].sum(-1, keepdim=True)
        plain = judged(p, draft, exact(), seed)
        same(judged(p, draft, exact(), seed, FusedKernels()), plain)
        lengths += plain.length.tolist()
    assert 0 in lengths
    assert max(lengths) > min(3, tree.height - 1)


@pytest.mark.parametrize(("paths", "dim"), [(TREE, 20), (window_paths(20, 2, 3, "full"), 16)], ids=["tree", "window"])
def test_what_an_accepted_path_wrote_is_kept(paths: list[trees.Path], dim: int) -> None:
    """In both halves of a guided batch, with walks of all lengths, and slots that are read and overwritten."""
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
        verdict = judged(p, draft, exact(), seed)
        lengths += verdict.length.tolist()
        for cache in (plain, fused):
            cache.keep(verdict.path, verdict.length, count, first)
        assert torch.equal(fused.k, plain.k)
        assert torch.equal(fused.v, plain.v)
    assert len(set(lengths)) > 2


def test_images_advance() -> None:
    """Those that are complete stay as they are."""
    tokens, length = torch.arange(1, 1 + 4 * ROWS, device=DEVICE).view(ROWS, 4), torch.arange(ROWS, device=DEVICE) % 4
    decodings = []
    for kernels in (None, FusedKernels()):
        self: Any = SimpleNamespace(kernels=kernels, total=6, recorder=SimpleNamespace(offsets=torch.arange(4)))
        self.recorder.offsets = self.recorder.offsets.to(DEVICE)
        self.history = torch.full((ROWS, 6 + 8), 99, device=DEVICE)
        self.count, self.steps = torch.arange(ROWS, device=DEVICE), torch.arange(ROWS, device=DEVICE) + 7
        verdict: Any = SimpleNamespace(tokens=tokens, length=length)
        with poisoned():
            came = Decoding._advance(self, verdict)
        decodings.append((*came, self.history, self.count, self.steps))
    for plain, fused in zip(*decodings, strict=True):
        assert torch.equal(plain, fused)
