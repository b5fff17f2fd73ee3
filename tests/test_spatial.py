"""Spatially speculative decoding: the heads' formula and training, the strict rule is exact, and a relaxed row follows
the paper's procedure, enumerated here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import test_targets
import tiny
import torch
from torch import Tensor

from specbench.audit import models, sizes
from specbench.audit.models import TabularModel
from specbench.audit.tabular import TabularSpatial, TabularTarget
from specbench.audit.tiny import built_in as tiny_model
from specbench.config import configuration
from specbench.decoding.drafters.spatial import Spatial
from specbench.decoding.loop import DecoderConfig, Decoding, decode
from specbench.decoding.rules import exact
from specbench.decoding.sampling import Sampling
from specbench.errors import UsageError
from specbench.harness import method
from specbench.models.language import Language
from specbench.models.spatial import SpatialTraining
from specbench.models.supervision import Batch, TargetHead

GUIDED = Sampling(cfg_scale=2.0)


def plain(head: Any, cell: Tensor) -> Tensor:
    """A head's formula for one cell (2 dim,)."""
    a = head.join.weight @ cell
    normed = a / (a.square().mean() + head.norm.eps).sqrt() * head.norm.weight
    gate, up = head.feed_forward.w1.weight @ normed, head.feed_forward.w3.weight @ normed
    return a + head.feed_forward.w2.weight @ (gate * gate.sigmoid() * up)


def test_a_head_computes_the_published_formula() -> None:
    heads, cells = (
        tiny.spatial(tiny.llamagen(side=4)),
        torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(1)),
    )
    with torch.inference_mode():
        outputs = heads(cells, [(0, slice(0, 1)), (2, slice(1, 2)), (4, slice(2, 5))])
    expected = [(0, 0), (2, 1), (4, 2), (4, 3), (4, 4)]
    assert outputs.shape == (2, 5, 32)
    for row, (i, (head, cell)) in itertools.product(range(2), enumerate(expected)):
        assert torch.allclose(outputs[row, i], plain(heads.heads[head], cells[row, cell]), atol=1e-5)


def training_distributions(
    target: Language, heads: Any, conditioning: Any, tokens: Tensor
) -> dict[tuple[int, int], Tensor]:
    """The guided distributions in training for tokens (1, T), by head and position of the drafted token."""
    prefix = target.condition(conditioning, True)
    both_halves = tokens.repeat(2, 1)
    batch = Batch(both_halves, target.uncached(prefix, both_halves[:, :-1]), both_halves, prefix.valid)
    training, distributions = SpatialTraining(heads, TargetHead(target)), {}
    for number, drafted in enumerate(training.draft(batch, len(heads.heads))):
        probs = GUIDED.probs(GUIDED.apply_guidance(drafted.logits))
        distributions |= {(number, int(at)): probs[0, i] for i, at in enumerate(drafted.positions)}
    return distributions


@torch.inference_mode()
@pytest.mark.parametrize(("family", "rounds"), [("grouped", None), ("lumina", None), ("lumina", 1), ("emu3", 1)])
def test_a_draft_equals_the_heads_over_the_finished_image(family: str, rounds: int | None) -> None:
    """Step by step. In the first row, head d of the newest cell drafts; later, the head below of the cell above. Both
    use guidance. A token that the grammar forces is drafted alone."""
    target, conditioning = test_targets.target(family, 3), test_targets.prompts(family, [0])
    heads, forced, width = tiny.spatial(target), test_targets.forced_of(target), target.width
    drafter = Spatial(heads, width, 2, 1, rounds)
    decoding = Decoding(DecoderConfig(target, drafter, exact(), GUIDED), conditioning, tiny.rng(1))
    drafts: list[tuple[int, bool, Any]] = []
    while int(decoding.num_committed[0]) < target.length:
        before, new = int(decoding.num_committed[0]), int(decoding.num_committed[0]) >= int(decoding.draft_state.end[0])
        decoding.step()
        assert decoding.step_stats is not None
        drafts.append((before, new, decoding.step_stats.draft))
    expected = training_distributions(target, heads, conditioning, decoding.history[:, : target.length])
    seen = set()
    for before, new, draft in drafts:
        for d in range(int(draft.valid[0, 1:].sum()) if new else 0):
            at = before + d
            head = d if before < width else heads.cfg.right
            if at >= target.length:
                continue
            if forced[at] >= 0:
                assert draft.probs[0, d, forced[at]] == 1
                assert draft.tokens[0, d + 1] == forced[at]
            else:
                codes = expected[head, at]
                assert torch.allclose(draft.probs[0, d, : len(codes)], codes, atol=2e-5)
                assert torch.all(draft.probs[0, d, len(codes) :] == 0)
            seen.add(head)
    assert seen == {0, 1, heads.cfg.right}


def chain_model(vocab: int, width: int, rows: int, seed: int) -> TabularModel:
    """A token depends only on its left neighbour, and in the first row on nothing. There the drafts have the target's
    distribution, so the whole row is accepted, together with the first token of the next row."""
    g = torch.Generator().manual_seed(seed)
    p, q = ([(2 * torch.randn(1 if t < width else vocab, vocab, generator=g)).softmax(-1) for t in range(rows * width)]
            for _ in "pq")  # fmt: skip
    p[1:width] = [x.expand(vocab, -1) for x in p[1:width]]
    q = [*p[:width], *q[width:]]
    return TabularModel("chain", p, q, None)


def decode_rows(p: Sequence[Tensor], width: int, drafter: Any, count: int) -> Any:
    """Images with rows of `width` tokens."""
    target = TabularTarget(list(p))
    target.width = width
    return decode(DecoderConfig(target, drafter, exact(), Sampling()), None, tiny.rng(count))


def relaxed(p: Sequence[Tensor], q: Sequence[Tensor], first: int, rounds: int) -> dict[tuple[int, ...], float]:
    """The distribution of the cells after the `first` of a row, by the paper's procedure. All cells are drafted from q.
    In every round each cell is kept with min(1, p / q), or drawn again from [p - q]_+; p depends on the tokens at the
    beginning of the round, and becomes q in the next round. p: a matrix for each cell, (left neighbour, token)."""
    vocab, cells = len(q[0]), len(q)
    every = list(itertools.product(range(vocab), repeat=cells))

    def improve(row: tuple[int, ...], q: Sequence[Tensor], left: int) -> dict[tuple[int, ...], float]:
        if not left:
            return {row: 1.0}
        now = [p[i][row[i - 1] if i else first] for i in range(cells)]
        each = []
        for i in range(cells):
            keep = min(1.0, float(now[i][row[i]] / q[i][row[i]]))
            rest = (now[i] - q[i]).clamp_min(0)
            probs = (1 - keep) * rest / rest.sum() if rest.sum() > 1e-12 else torch.zeros(vocab).double()
            probs[row[i]] += keep
            each.append(probs)
        result: dict[tuple[int, ...], float] = dict.fromkeys(every, 0.0)
        for after in every:
            chance = float(torch.stack([each[i][after[i]] for i in range(cells)]).prod())
            if chance:
                for end, share in improve(after, now, left - 1).items():
                    result[end] += chance * share
        return result

    total: dict[tuple[int, ...], float] = dict.fromkeys(every, 0.0)
    for row in every:
        chance = float(torch.stack([q[i][row[i]] for i in range(cells)]).prod())
        for end, share in improve(row, q, rounds).items():
            total[end] += chance * share
    return total


@pytest.mark.parametrize("rounds", [0, 1, 2, 3])
def test_a_relaxed_row_follows_the_papers_procedure(rounds: int) -> None:
    """Chi-square tests of the last three cells of a row of four, given its first one. At p = 1e-4 each, twelve correct
    results fail for 0.1 % of all seeds. With three rounds the row has the target's distribution."""
    vocab, width, count = 3, 4, 30_000
    model = chain_model(vocab, width, 2, seed=4)
    p, q = ([table.double() for table in tables[width + 1 :]] for tables in (model.p, model.q))
    drafter = TabularSpatial(model.q, width, width - 1, 1, rounds)
    out = decode_rows(model.p, width, drafter, count)
    most = 2 + rounds + 1
    assert int(out.steps.min()) >= 3  # one step for the first token, one for the rest of its row
    assert int(out.steps.max()) == (most if rounds < 3 else most - 1)  # three rounds leave nothing to commit
    for first in range(vocab):
        rows = out.tokens[out.tokens[:, width] == first][:, width + 1 :]
        number = rows @ torch.tensor([vocab**2, vocab, 1])
        # a draft does not know its left neighbour in the same draft: tables use token 0
        drafts = [q[0][first], q[1][0], q[2][0]]
        expected = torch.tensor(list(relaxed(p, drafts, first, rounds).values()), dtype=torch.float64)
        assert tiny.fit(number, expected) > 1e-4
        if rounds == 3:
            pairs = itertools.product(range(vocab), repeat=3)
            target = [float(p[0][first, a] * p[1][a, b] * p[2][b, c]) for a, b, c in pairs]
            assert torch.allclose(expected, torch.tensor(target, dtype=torch.float64), atol=1e-9)


@pytest.mark.parametrize(("rounds", "steps"), [(0, 4 + 2 * 1), (1, 4 + 2 * 2), (2, 4 + 2 * 3), (4, 12)])
def test_steps_of_an_image(rounds: int, steps: int) -> None:
    """Three rows of four tokens. Every draft is token 0, and the target gives the left neighbour's successor. So the
    first row takes one step per token. A later row takes `rounds` steps that commit one cell each, and one step
    that commits the rest. With as many rounds as cells, the image is the target's."""
    vocab, width, length = 16, 4, 12
    p = [torch.eye(vocab)[1:2], *([torch.eye(vocab).roll(1, 1)] * (length - 1))]
    q = [torch.eye(vocab)[:1].expand(len(x), -1) for x in p]
    out = decode_rows(p, width, TabularSpatial(q, width, 3, 1, rounds), 2)
    assert out.steps.tolist() == [steps] * 2
    right = out.tokens == torch.arange(1, length + 1)
    assert right[:, :width].all()
    assert right.all() == (rounds == width)


def test_several_rows_at_once() -> None:
    """With rounds=0 an image takes one step for each pair of rows after the first."""
    model = chain_model(3, 4, 5, seed=2)
    for below, steps in ((1, 4), (2, 2)):
        drafter = TabularSpatial(model.q, 4 * below, 3, below, 0)
        assert decode_rows(model.p, 4, drafter, 3).steps.tolist() == [2 + steps] * 3


@pytest.mark.parametrize(
    ("rounds", "samples", "verdict"),
    [
        ("null", 40_000, "lossless"),
        ("0", 4_000, "not lossless"),
        ("1", 4_000, "not lossless"),
        ("2", 4_000, "not lossless"),
    ],
)
def test_an_audit_of_rows_of_five(rounds: str, samples: int, verdict: str) -> None:
    words = f"method=spatial window=5 rounds={rounds}"
    assert tiny.verdict(words, models.built_in("m4t24"), samples) == verdict


def test_an_audit_tries_drafts_that_fit_in_a_row() -> None:
    """A longer draft would have depths that no step reaches. v2t10 has rows of four tokens, chameleon_tiny of three
    codes and a new line."""
    cfg = configuration.compose(["method=spatial", "variant=strict"])
    for model, longest in ((models.built_in("v2t10"), 4), (tiny_model("chameleon_tiny"), 3)):
        tried = [further[-1] for further in sizes.variants(cfg, {"method", "variant"}, model)]
        assert tried == ["window=2", f"window={longest}"]
        assert not sizes.is_exact({**cfg, "rounds": 0})


def test_block_verification_accepts_only_strict_rows() -> None:
    words = "method=spatial verification=block rounds="
    method.check(configuration.compose((words + "null").split()))
    with pytest.raises(UsageError, match="without verification"):
        method.check(configuration.compose((words + "1").split()))


def test_heads_that_a_network_does_not_have() -> None:
    heads = tiny.spatial(tiny.llamagen(side=4))
    for right, below, fault in ((4, 1, "k_h=4, and the network has 3"), (3, 3, "k_v=3, and the network has 2")):
        with pytest.raises(UsageError, match=fault):
            Spatial(heads, 4, right, below, 1)
