"""A drafter's network reads the tokens and states that it should: its distributions equal those of passes without a
cache over the tokens so far. Any other draft would keep the output exact, but fewer of its tokens would be accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from specbench.audit.statistics import filtered
from specbench.decoding import rules
from specbench.decoding.drafters.draft_model import DraftModel
from specbench.decoding.drafters.medusa import Medusa
from specbench.decoding.loop import DecoderConfig, decode
from specbench.decoding.sampling import Sampling
from specbench.decoding.trace import StepStats
from specbench.decoding.trees import parse
from specbench.decoding.verify import Draft
from specbench.models.llamagen import LlamaGen

ROWS, SIDE, VOCAB = 4, 4, 7


def uncached(model: LlamaGen, guided: bool) -> Callable[[Tensor], Tensor]:
    """Hidden states (R, c + 1, dim) before each of c tokens and after them. tokens: (B, c) of the images."""
    prefix = model.condition(tiny.prompts(ROWS), guided)
    before = prefix.inputs.shape[1]

    def states(tokens: Tensor) -> Tensor:
        return model.uncached(prefix, tokens.repeat(2, 1) if guided else tokens)[:, before - 1 :]

    return states


def drafter_and_expected(name: str, target: LlamaGen, guided: bool) -> tuple[Any, Callable[[Tensor, Draft], Tensor]]:
    if name == "medusa":
        heads = tiny.medusa(target)
        drafter: Any = Medusa(heads, parse("[[0],[1],[0,0],[0,0,0]]"))
        states = uncached(target, guided)

        def of_heads(tokens: Tensor, draft: Draft) -> Tensor:
            last = states(tokens[:, :-1])[:, -1]  # the last token was drawn from it
            return heads(last, drafter.tree.height)[:, draft.tree.depth[0, draft.tree.inner[0]]]

        return drafter, of_heads
    model = tiny.llamagen(SIDE, seed=9, dim=16, vocab=VOCAB)
    drafter, states = DraftModel(model, 3), uncached(model, guided)

    def of_chain(tokens: Tensor, draft: Draft) -> Tensor:
        return model.head(states(torch.cat([tokens, draft.tokens[:, 1:-1]], 1))[:, tokens.shape[1] :])

    return drafter, of_chain


@torch.inference_mode()
@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("name", ["medusa", "draft model"])
def test_a_network_drafts_from_the_tokens_so_far(name: str, scale: float) -> None:
    target, sampling = tiny.llamagen(SIDE, vocab=VOCAB), Sampling(cfg_scale=scale)
    drafter, expected = drafter_and_expected(name, target, sampling.guided)
    seen: list[StepStats] = []

    def noted(stats: StepStats, total: int) -> None:
        seen.append(replace(stats, num_committed=stats.num_committed.clone(), active=stats.active.clone()))

    config = DecoderConfig(target, drafter, rules.exact(), sampling, observer=noted)
    out = decode(config, tiny.prompts(ROWS), tiny.rng(ROWS))
    checked = 0
    for stats in seen:
        for row in range(ROWS):
            count = int(stats.num_committed[row])
            room = min(drafter.tree.height, SIDE * SIDE - count)
            if not stats.active[row] or count == 0 or room < drafter.tree.height:
                continue
            logits = expected(out.tokens[:, :count], stats.draft)
            conditional, unconditional = logits[row], logits[(ROWS + row) % len(logits)]
            wanted = filtered(unconditional + scale * (conditional - unconditional), sampling)
            # float32 logits of a magnitude near 50 are exact to 1e-5
            torch.testing.assert_close(stats.draft.probs[row].double(), wanted, atol=1e-4, rtol=0)
            checked += 1
    assert checked > 2 * ROWS
    assert out.steps.float().mean() < SIDE * SIDE  # some drafts were accepted, and some rejected
