"""The probe: its distributions along an image equal decoding's, and a hidden token changes only later ones."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import tiny
import torch

from specbench.bench import benchmark_rows
from specbench.bench.distributions import TokenDistributions
from specbench.cli.measurements import probe
from specbench.decoding.drafters.none import NoDraft
from specbench.decoding.loop import DecoderConfig, decode
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules import exact
from specbench.decoding.sampling import Sampling
from specbench.errors import UsageError


def distributions(scale: float, side: int = 3) -> tuple[TokenDistributions, torch.Tensor]:
    """The target's distributions along an image, and their difference from the log-probabilities of decoding."""
    target, sampling = tiny.llamagen(side=side), Sampling(temperature=0.8, cfg_scale=scale)
    config = DecoderConfig(target, NoDraft(), exact(), sampling)
    drawn = decode(config, tiny.prompts(1), RandomStreams([(3, 0)]))
    with torch.inference_mode():
        result = TokenDistributions(target, sampling, tiny.prompts(1), drawn.tokens)
    return result, drawn.trace.log_prob - result.probs.gather(-1, drawn.tokens.unsqueeze(-1)).log().squeeze(-1)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_the_distributions_equal_those_of_decoding(scale: float) -> None:
    result, off = distributions(scale)
    assert off.abs().max() < 1e-4
    assert torch.allclose(result.probs.sum(-1), torch.ones(1, 9))


@torch.inference_mode()
def test_hiding_a_position_moves_only_later_distributions() -> None:
    result, _ = distributions(2.0)
    beyond = result.hidden_at(result.first + 9)
    assert torch.allclose(beyond, result.probs, atol=1e-5)  # no position is that far back
    for distance in (1, 4):
        moved = (result.hidden_at(distance) - result.probs).abs().sum(-1)[0]
        assert (moved > 1e-3).any()
    # the position of the first distribution is the last of the prefix, first - 1; before it only the prefix is hidden
    far = (result.hidden_at(result.first + 4) - result.probs).abs().sum(-1)[0]
    assert far[:5].max() < 1e-5  # none of these positions has one that far before it
    assert far[5:].max() > 1e-4


@torch.inference_mode()
def test_a_hidden_position_is_as_if_it_were_absent() -> None:
    """Each distribution equals the one from plain passes whose mask excludes one position."""
    target, sampling = tiny.llamagen(side=2), Sampling()
    tokens = torch.tensor([[1, 4, 2, 3]])
    result = TokenDistributions(target, sampling, tiny.prompts(1), tokens)
    session = target.open(tiny.prompts(1), 1, False, 4)
    at = result.positions
    mask = session.up_to(at).clone()
    for i in range(at.shape[1]):
        mask[0, 0, i, at[0, i] - 2] = False
    # position by position; plain passes fill the caches
    for i in range(at.shape[1]):
        x = session.embed(tokens[:, i - 1 : i] if i else tokens[:, :1], at[:, i : i + 1])
        hidden = session.feed(x, at[:, i : i + 1], at[:, i : i + 1], mask[:, :, i : i + 1])
        probs = target.head(hidden).softmax(-1)
        assert torch.allclose(result.hidden_at(2)[:, i : i + 1], probs, atol=1e-5)
        session.feed(x, at[:, i : i + 1], at[:, i : i + 1], session.up_to(at[:, i : i + 1]))


def test_a_row_of_the_embedded_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "probe.csv"
    assert probe(["n=2", "probe.offsets=3", "device=cpu", f"out={out}"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    [row] = benchmark_rows.PROBES.read(out)
    top, tv = json.loads(row["top_probabilities"]), json.loads(row["tv_by_distance"])
    assert line["images"] == 2
    assert len(top) == 100
    assert all(a <= b for a, b in itertools.pairwise(top))
    assert 0.2 < top[0] < 0.6 < top[-1] <= 1  # the card's mean top-1 probability is 0.33
    assert len(tv) == 3
    assert tv[0] > tv[2] > 0  # the token before the last matters more than the third
    assert row["width"] == "16"
    assert float(row["entropy"]) > 0


@pytest.mark.parametrize(("words", "message"), [
    (["model=mar_scenes"], "mar_scenes is a model of continuous"),
    (["probe.offsets=256", "n=1", "device=cpu"], "offsets=256 is beyond an image of 256 tokens"),
    (["probe.position=3"], "unknown parameter 'probe.position'"),
    (["method=sjd"], "leave method= out"),
    (["delta=2"], "a probe has no 'delta'"),
])  # fmt: skip
def test_mistakes_are_short_errors(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        probe(words)
