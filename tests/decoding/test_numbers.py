"""NaN, infinity and probabilities that do not sum to 1: the discrete loop names the image and the step, and stops. (For
vectors see test_continuous.py.)"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from test_engine import at_once
from torch import Tensor
from windows import window

from specbench.audit.tabular import TabularDrafter, TabularSession, TabularTarget, random_tables
from specbench.config import configuration
from specbench.decoding import rules
from specbench.decoding.batch import decode_stream
from specbench.decoding.drafters.none import NoDraft
from specbench.decoding.loop import DecoderConfig, Decoding, decode
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import chain_paths, parse
from specbench.engine.graph import Eager, Graphs
from specbench.errors import NumberError
from specbench.harness.pipeline import Pipeline

LENGTH = 6
P = random_tables(4, LENGTH, seed=1)
Q = random_tables(4, LENGTH, seed=2, near=P, distance=0.4)
KEYS = [(4, i) for i in (9, 8, 7)]
FAULTS = {"nan": [math.nan, 0.0, 0.0, 0.0], "infinity": [math.inf, 0.0, 0.0, 0.0], "all masked": [-math.inf] * 4}


class FaultyTarget(TabularTarget):
    """The logits of one row are `fault` at one position of the image, in every forward pass."""

    def __init__(self, row: int, position: int, fault: list[float]) -> None:
        super().__init__(P)
        self.fault_at = row, position, fault

    def open(self, conditioning: Any, rows: int, guided: bool, nodes: int) -> TabularSession:
        faulty = self

        class Session(TabularSession):
            def forward(self, tokens: Tensor, tree: Any, history: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
                row, position, fault = faulty.fault_at
                logits, hidden = super().forward(tokens, tree, history, count)
                is_faulty = (count[:, None] + tree.depth == position) & (torch.arange(len(tokens)) == row)[:, None]
                return torch.where(is_faulty.unsqueeze(-1), torch.tensor(fault), logits), hidden

        return Session(self.lookup, self.width, rows)


class FaultyDrafter(TabularDrafter):
    """Distribution `inner` of one row is multiplied by `times`, in the step that begins at one position."""

    def __init__(self, inner: int, position: int, times: float) -> None:
        super().__init__(Q, chain_paths(3))
        self.fault_at = inner, position, times

    def propose(self, state: Any, history: Tensor, count: Tensor, step: Tensor) -> Any:
        inner, position, times = self.fault_at
        draft = super().propose(state, history, count, step)
        is_faulty = (count == position) & (torch.arange(len(count)) == 1)
        draft.probs[:, inner] *= torch.where(is_faulty, times, 1.0)[:, None]
        return draft


@dataclass(frozen=True)
class Short(Sampling):
    """The distribution of a step's first node sums to slightly less than 1. (Its residual sums to 1.)"""

    def probs(self, logits: Tensor) -> Tensor:
        probs = super().probs(logits)
        probs[:, 0] *= 0.99
        return probs


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("words", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.9}])
def test_a_target_without_a_distribution_stops_the_image(fault: str, words: dict[str, Any]) -> None:
    """At temperature 0 and with top-k, arg max and top-k of NaN look like distributions: the image used to continue."""
    config = DecoderConfig(FaultyTarget(1, 2, FAULTS[fault]), NoDraft(), rules.exact(), Sampling(**words))
    with pytest.raises(NumberError, match=r"target.*\(4, 8\).*step 3.*cfg_scale"):
        decode(config, None, RandomStreams(KEYS))


@pytest.mark.parametrize("engine", [Eager(), Graphs(at_once)])
def test_a_recorded_engine_names_its_own_image(engine: Any) -> None:
    """A recorded decoding is reused for other images: the keys of the first batch must not name the second."""
    sound = DecoderConfig(FaultyTarget(1, -1, FAULTS["nan"]), NoDraft(), rules.exact(), Sampling())
    decode(sound, None, RandomStreams([(0, i) for i in range(3)]), engine)
    sound.target.fault_at = 1, 2, FAULTS["nan"]
    with pytest.raises(NumberError, match=r"seed.*\(4, 8\)"):
        decode(sound, None, RandomStreams(KEYS), engine)


@pytest.mark.parametrize("tree", ["[[0]]", "[[0],[1],[0,0],[0,1],[1,0],[0,0,0]]"])
@pytest.mark.parametrize("rule", [rules.exact(), rules.Relaxed("uniform", [2.0] * 3)])
def test_after_a_draft_the_step_that_met_the_fault_is_named(tree: str, rule: Any) -> None:
    target = FaultyTarget(1, 4, FAULTS["nan"])
    drafter = TabularDrafter(Q, parse(tree))
    sound = decode(DecoderConfig(TabularTarget(P), drafter, rule, Sampling()), None, RandomStreams(KEYS))
    reached = (sound.trace.accepted[1] + 1).cumsum(0)
    step = int((reached <= 4).sum()) + 1
    with pytest.raises(NumberError, match=rf"^the target .* \(4, 8\), step {step}:"):
        decode(DecoderConfig(target, drafter, rule, Sampling()), None, RandomStreams(KEYS))


@pytest.mark.parametrize("inner", [0, 2])
@pytest.mark.parametrize("times", [math.nan, 0.5, 2.0])
def test_a_drafter_without_a_distribution_is_named(inner: int, times: float) -> None:
    """A candidate with probability NaN used to be skipped: correct pictures, no speed-up, and no message."""
    config = DecoderConfig(TabularTarget(P), FaultyDrafter(inner, 0, times), rules.exact(), Sampling())
    with pytest.raises(NumberError, match=r"drafter.*\(4, 8\).*step 1"):
        decode(config, None, RandomStreams(KEYS))


@dataclass(frozen=True)
class Rounded(Sampling):
    """Distributions whose sums have the rounding of a large vocabulary."""

    def probs(self, logits: Tensor) -> Tensor:
        return super().probs(logits) * (1 + 2e-5)


def test_rounding_is_not_a_fault_however_long_the_draft() -> None:
    """The largest deviation counts, not the product: SimpleAR's window has 2,000 positions."""
    config = DecoderConfig(TabularTarget(P), window(200), rules.exact(), Rounded())
    assert decode(config, None, RandomStreams(KEYS)).tokens.shape == (3, LENGTH)


def test_distributions_that_do_not_sum_to_one_are_named() -> None:
    for drafter in (NoDraft(), TabularDrafter(Q, chain_paths(3))):
        with pytest.raises(NumberError, match=r"target.*sum.*\(4, 9\).*step 1"):
            decode(DecoderConfig(TabularTarget(P), drafter, rules.exact(), Short()), None, RandomStreams(KEYS))


def test_a_row_that_took_the_next_image_names_it() -> None:
    """Images 0 and 1 begin in two rows. A later image in the second row meets NaN at a position where image 1 did
    not."""
    target = FaultyTarget(1, -1, FAULTS["nan"])
    config = DecoderConfig(target, TabularDrafter(Q, chain_paths(1)), rules.exact(), Sampling())
    owners = []

    def rng(indices: list[int]) -> RandomStreams:
        owners.append(indices)
        return RandomStreams([(4, 10 + i) for i in indices])

    images = decode_stream(partial(Decoding, config), lambda indices: None, rng, 8, 2)
    done, _ = next(images)
    while 1 not in done:  # row 1 has the name of its first image until that one is done
        done, _ = next(images)
    target.fault_at = 1, 0, FAULTS["nan"]
    with pytest.raises(NumberError) as e:
        list(images)
    [named] = [i for indices in owners for i in indices if f"(4, {10 + i}), step 1:" in str(e.value)]
    assert named >= 2


def test_the_pipeline_names_its_model() -> None:
    cfg = configuration.compose(["model=llamagen_xl", "weights=random", "reduced=true", "method=sjd", "window=4"])
    pipeline = Pipeline.load(cfg.changed(device="cpu"))
    next(pipeline.model.target.parameters()).fill_(math.nan)
    for decoded in (
        lambda: pipeline.decode(pipeline.encode(["a", "b"]), KEYS[:2]),
        lambda: list(pipeline.stream(["a", "b", "c"], KEYS, 2)),
    ):
        with pytest.raises(NumberError, match=r"llamagen_xl.*target.*\(4, 9\).*step 1"):
            decoded()
