"""The kernels of Jacobi decoding's window against the plain functions that specify them, over several steps."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from windows import window

from specbench.decoding.drafters.sjd_window import COUPLINGS
from specbench.decoding.drafters.window import INITS, Window, WindowState
from specbench.decoding.loop import StepResult
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import Tree
from specbench.decoding.verify import Draft, VerificationResult

pytest.importorskip("triton")

from specbench.engine.kernels import FusedKernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, SIDE, LENGTH, STEPS = 3, 3, 9, 3


@dataclass
class Grid:
    """The part of a session that the window uses: an image with SIDE columns whose last column is forced by a
    grammar."""

    vocab_size: int
    codes: int
    grammar: bool
    width: int = SIDE
    length: int = LENGTH

    @property
    def forced_tokens(self) -> Tensor | None:
        position = torch.arange(LENGTH, device=DEVICE)
        return torch.where(position % SIDE == SIDE - 1, self.codes, -1) if self.grammar else None

    def forced(self, positions: Tensor) -> Tensor | None:
        return None if self.forced_tokens is None else self.forced_tokens[positions.clamp(0, LENGTH - 1)]


def walk(tree: Tree, generator: torch.Generator) -> Tensor:
    """A path (D,) of accepted nodes with a random end, and its length."""
    node, path = 0, []
    while (slot := int(tree.slot[0, node])) >= 0:
        children = [c for c in tree.children[0, slot].tolist() if c >= 0]
        pick = int(torch.randint(len(children) + 1, (), generator=generator))
        if pick == len(children):
            break
        node = children[pick]
        path.append(node)
    return torch.tensor(path + [node] * (tree.height - len(path)) + [len(path)])


def steps(drafter: Window, session: Grid, kernels: FusedKernels | None) -> list[tuple[Draft, WindowState]]:
    """The drafts of some steps with random targets and verification results, and the states after them."""
    generator = torch.Generator().manual_seed(7)
    state = drafter.open(session, None, Sampling(kernels=kernels), tiny.rng(ROWS, 3, DEVICE))
    history = torch.zeros(ROWS, 2 * LENGTH + 8, dtype=torch.int64, device=DEVICE)
    count, drafts = torch.tensor([0, 1, 6], device=DEVICE), []
    for number in range(STEPS):
        draft = drafter.propose(state, history, count, torch.full_like(count, number))
        seen: Any = SimpleNamespace(**{name: getattr(state, name).clone() for name in ("tokens", "probs", "heights")})
        drafts.append((replace(draft, probs=draft.probs.clone()), seen))
        p = (2 * torch.randn(ROWS, drafter.tree.nodes, session.vocab_size, generator=generator)).softmax(-1)
        paths = torch.stack([walk(drafter.tree, generator) for _ in range(ROWS)]).to(DEVICE)
        path, length = paths[:, :-1].contiguous(), paths[:, -1].contiguous()
        tokens = torch.randint(session.codes, (ROWS, drafter.tree.height + 1), generator=generator).to(DEVICE)
        drafter.commit(
            state,
            StepResult(draft, p.to(DEVICE), p, VerificationResult(path, length, tokens, p[:, 0], p[:, 0, 0]), count),
        )
        for row in range(ROWS):
            history[row, count[row] : count[row] + length[row] + 1] = tokens[row, : length[row] + 1]
        count = count + length + 1
    return drafts


def alive(drafter: Window, state: WindowState, tokens: Tensor) -> Tensor:
    """Nodes (B, M) whose tokens count. A distribution of few tokens has no more candidates, so any token of probability
    zero may fill the remaining nodes."""
    token_probs = state.probs[:, drafter.offsets].gather(-1, tokens[:, 1:, None])[..., 0]
    again = (tokens[:, 1:] == state.tokens[:, drafter.offsets]) & (drafter.choice > 0)
    return torch.cat([torch.ones_like(token_probs[:, :1], dtype=torch.bool), (token_probs > 0) & ~again], 1)


def compare(drafter: Window, session: Grid) -> None:
    with torch.inference_mode():
        plain = steps(drafter, session, None)
        for (draft, state), (fused_draft, fused) in zip(plain, steps(drafter, session, FusedKernels()), strict=True):
            live = alive(drafter, state, draft.tokens)
            assert torch.equal(live, alive(drafter, fused, fused_draft.tokens))
            assert torch.equal(draft.tokens[live], fused_draft.tokens[live])
            assert torch.equal(state.tokens, fused.tokens)
            assert torch.equal(draft.valid, fused_draft.valid)
            assert (draft.sampled is None) == (fused_draft.sampled is None)
            torch.testing.assert_close(fused.probs, state.probs, rtol=1e-6, atol=0)
            torch.testing.assert_close(fused.heights, state.heights, rtol=1e-6, atol=1e-7)
            # None, or the heights of the nodes.
            torch.testing.assert_close(fused_draft.heights, draft.heights, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(fused_draft.probs, draft.probs, rtol=1e-6, atol=0)


#: The couplings differ in how they keep an old token, and gumbel coupling in how it draws new ones. Where a new token
#: comes from is the initialisation's, so two suffice: one that draws new tokens, and one that repeats neighbours.
CHAINS = [
    *((init, "none") for init in INITS),
    *itertools.product(("horizontal_sample", "vertical_repeat"), ("gumbel", "maximal", "height")),
    ("random", "gumbel"),
    ("horizontal_sample", "threshold"),
]


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_chains(coupling: str) -> None:
    for init in (init for init, other in CHAINS if other == coupling):
        compare(window(5, init, coupling=coupling), Grid(21, 19, grammar=init in INITS[1:4]))


def test_trees() -> None:
    for init, coupling in zip(INITS, (*COUPLINGS, "maximal", "none")):
        compare(window(8, init, coupling=coupling, width=2, depth=3), Grid(21, 19, grammar=coupling == "none"))


def test_variants() -> None:
    grid = Grid(21, 19, grammar=False)
    compare(window(4, refine=False), grid)
    compare(window(4, match=True), grid)
    for coupling in ("maximal", "height"):
        compare(window(14, width=4, depth=3, tree="comb", coupling=coupling), grid)


def test_released_codes() -> None:
    grid = Grid(21, 19, grammar=True)
    compare(window(3, fresh="point", plain_until=1, plain_from=-2), grid)
    compare(window(4, "vertical_sample", coupling="gumbel", fresh="point"), grid)
    compare(window(4, coupling="maximal", width=2, depth=2, stored="old", siblings="residual"), grid)


def test_a_vocabulary_of_several_blocks() -> None:
    compare(window(4, "horizontal_sample", coupling="maximal", width=2, depth=2), Grid(4099, 4000, grammar=False))
