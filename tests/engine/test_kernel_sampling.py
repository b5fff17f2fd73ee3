"""The kernels of distributions and draws, against the plain functions that specify them: compiled on CUDA, by Triton's
interpreter elsewhere."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from specbench.decoding.rng import BITS, RandomStreams
from specbench.decoding.sampling import Sampling, draw_exactly, sample_distinct
from specbench.models.language import LanguageSession

pytest.importorskip("triton")
from gpu_checks.parity import poisoned

from specbench.engine.kernels import FusedKernels, sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Tokens that a program reads at once. The value is small, so that the tests' vocabularies span several blocks and a
#: part.
BLOCK = 64
REAL = {name: getattr(sampling, name) for name in ("_HELD", "_BLOCK", "_NUMBERS")}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in REAL:
        monkeypatch.setattr(sampling, name, BLOCK)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def on_grid(*shape: int) -> Tensor:
    """Uniforms with the values that random streams can return."""
    whole = torch.randint(1 << BITS, shape, generator=torch.Generator().manual_seed(0))
    return (whole * 2.0**-BITS).to(DEVICE)


def session(forced: list[int] | None, codes: int, size: int) -> Any:
    """The image grammar of a session, without a model."""
    made: Any = SimpleNamespace(length=len(forced or []), codes=codes, vocab_size=size, forced_tokens=None)
    made.forced_tokens = None if forced is None else torch.tensor(forced, device=DEVICE)
    made.forced = lambda positions: LanguageSession.forced(made, positions)
    made.constrain = lambda logits, positions: LanguageSession.constrain(made, logits, positions)
    return made


@pytest.mark.parametrize(("dtype", "top_k", "scale", "grammar"), [
    (torch.bfloat16, None, 3.0, True),
    (torch.bfloat16, 7, 3.0, True),
    (torch.float32, 130, 1.0, True),
    (torch.bfloat16, 1, 1.0, False),
    (torch.float32, 7, 3.0, False),
    (torch.float32, 500, 1.0, False),  # more than the vocabulary has
])  # fmt: skip
@torch.inference_mode()
def test_distributions(dtype: torch.dtype, top_k: int | None, scale: float, grammar: bool) -> None:
    """The vocabulary is two blocks and a part, and its size is not divisible by a power of two."""
    size, rows, nodes = 131, 3, 2
    logits = 3 * normal(rows if scale == 1 else 2 * rows, nodes, size)
    logits[0] = logits[0].round()  # ties, zeros of both signs
    logits[1, :, 3:128] = -torch.inf  # fewer tokens remain than top_k
    if scale != 1:
        logits[rows] = logits[rows].round()
        logits[rows + 1, :, 3:128] = 0
    logits = logits.to(dtype)
    # a forced new line, another forced token, and positions beyond the end
    where = session([-1, 130, 129, -1], 128, size) if grammar else session(None, size, size)
    positions = torch.tensor([[0, 1], [2, 3], [-1, 7]], device=DEVICE)
    plain = Sampling(0.7, top_k, 1.0, scale)
    fused = replace(plain, kernels=FusedKernels())
    expected = plain.distributions(logits, where, positions)
    with poisoned():
        actual = fused.distributions(logits, where, positions)
    assert actual.guided is None  # the kernel computed it
    assert torch.equal(actual.p > 0, expected.p > 0)
    torch.testing.assert_close(actual.p, expected.p, rtol=1e-4, atol=1e-7)
    assert torch.equal(actual.logits, expected.logits)
    torch.testing.assert_close(actual.unfiltered(), expected.unfiltered(), rtol=1e-4, atol=1e-7)
    path, tokens = torch.tensor([[0, 1]] * 2 + [[0, 0]], device=DEVICE), torch.tensor([[2, 130]] * 3, device=DEVICE)
    torch.testing.assert_close(actual.log_prob(path, tokens), expected.log_prob(path, tokens), rtol=1e-4, atol=1e-4)
    alone = fused.distributions(logits[::rows, 1:], where, positions[:1, 1:])
    assert torch.equal(alone.p, actual.p[:1, 1:])  # in any batch


@pytest.mark.parametrize("size", [8195, 32803])
@torch.inference_mode()
def test_real_vocabularies(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled block sizes, for Lumina-mGPT and Emu3; the second vocabulary does not fit in the registers."""
    for name, value in REAL.items():
        monkeypatch.setattr(sampling, name, value)
    logits, where = (3 * normal(2, 1, size)).bfloat16(), session([-1, size - 1], size - 3, size)
    plain, positions = Sampling(1.0, 2000, 1.0, 3.0), torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    with poisoned():
        actual = replace(plain, kernels=FusedKernels()).distributions(logits, where, positions).p
    expected = plain.distributions(logits, where, positions).p
    assert torch.equal(actual > 0, expected > 0)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-8)
    plain_streams, fused, step = streams(1)
    u = plain_streams.uniform(step, 3, 1)
    assert torch.equal(FusedKernels().draw(actual, u), draw_exactly(actual, u))
    assert torch.equal(sample_distinct(actual, fused, step, 9, 4), sample_distinct(actual, plain_streams, step, 9, 4))
    assert torch.equal(fused.uniform(step, 3, size), plain_streams.uniform(step, 3, size))


@torch.inference_mode()
def test_logits_of_a_part_of_the_nodes_are_read_where_they_are() -> None:
    logits, where = normal(2, 5, 70), session(None, 70, 70)
    positions = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    plain = Sampling(1.0, 9, 1.0, 2.0)
    actual = replace(plain, kernels=FusedKernels()).distributions(logits[:, -1:], where, positions).p
    torch.testing.assert_close(actual, plain.distributions(logits[:, -1:], where, positions).p, rtol=1e-4, atol=1e-7)


@torch.inference_mode()
def test_the_threshold_among_logits_of_all_sizes() -> None:
    """Some models mask tokens by the lowest finite number; others have denormal numbers, both zeros, and ties."""
    most = torch.finfo(torch.float32).max
    sizes = torch.tensor([-most, -1e30, -5.0, -1e-40, -0.0, 0.0, 1e-40, 2.0, 2.0, 1e30, most], device=DEVICE)
    logits = torch.cat([sizes, sizes[:8].repeat(9)])[None, None]
    for top_k in (1, 12, 20, 82):  # 2.0 is third to 13th, every smaller number has ten places
        plain = Sampling(1.0, top_k)
        assert torch.equal(replace(plain, kernels=FusedKernels()).probs(logits), plain.probs(logits)), top_k
        low = logits.clamp_max(2)  # equal weights above zero, so the threshold decides
        actual, expected = replace(plain, kernels=FusedKernels()).probs(low), plain.probs(low)
        assert torch.equal(actual > 0, expected > 0), top_k


@torch.inference_mode()
def test_an_invalid_distribution_stays_invalid() -> None:
    """A NaN of the model must reach the check of the distributions, whatever the filter."""
    for value, top_k in itertools.product((torch.nan, -torch.nan, torch.inf), (None, 5)):
        logits = normal(3, 1, 70)
        logits[0, 0, 3], logits[1, 0, 66] = value, value
        logits[2] = -torch.inf
        assert Sampling(1.0, top_k, kernels=FusedKernels()).probs(logits).isnan().all(), (value, top_k)
        assert Sampling(1.0, top_k).probs(logits).isnan().all()


@torch.inference_mode()
def test_greedy_decoding_and_top_p_have_no_kernel() -> None:
    logits, where = normal(2, 3, 100), session(None, 100, 100)
    positions = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    for plain in (Sampling(0.0), Sampling(1.0, None, 0.5)):
        actual = replace(plain, kernels=FusedKernels()).distributions(logits, where, positions)
        assert torch.equal(actual.p, plain.distributions(logits, where, positions).p)
        torch.testing.assert_close(actual.unfiltered(), (logits / 1.0).softmax(-1))


@pytest.mark.parametrize("size", [5, 64, 200, 131])
@torch.inference_mode()
def test_draws(size: int) -> None:
    """Bit for bit the same as the plain integer sums."""
    probs, u = (3 * normal(30, 2, size)).softmax(-1), on_grid(30, 2)
    probs[3:20, :, 1:-2] = 0  # blocks without any probability
    probs[0, 0], probs[0, 1], probs[1, 0] = torch.nan, 0.0, 1 / size
    probs[2] *= 1e-9  # the sum is below the smallest integer part
    u[4], u[5] = 0, 1 - 2.0**-BITS
    kernels = FusedKernels()
    with poisoned():
        drawn = kernels.draw(probs, u)
    assert torch.equal(drawn, draw_exactly(probs, u))
    assert (probs[3:].gather(2, drawn[3:, :, None]) > 0).all()
    # a slice of a tensor, as vanilla decoding draws
    assert torch.equal(kernels.draw(probs[:, 1], u[:, 1]), drawn[:, 1])
    assert torch.equal(kernels.draw(probs[7:8], u[7:8]), drawn[7:8])


def streams(rows: int) -> tuple[RandomStreams, RandomStreams, Tensor]:
    """Streams of one key, without kernels and with them; and the steps."""
    plain, fused = tiny.rng(rows, 7, DEVICE), tiny.rng(rows, 7, DEVICE)
    fused.kernels = FusedKernels()
    return plain, fused, torch.tensor([0, 5, 4096, 1 << 40], device=DEVICE)[:rows]


@torch.inference_mode()
def test_random_numbers() -> None:
    plain, fused, step = streams(4)
    index = torch.randint(1 << 40, (4, 90), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with poisoned():
        for tag in (0, 1, 16, 4095):
            assert torch.equal(fused.uniform(step, tag, 7, 11), plain.uniform(step, tag, 7, 11))
            assert torch.equal(fused.uniforms(step, tag, 3, 70), plain.uniforms(step, tag, 3, 70))
            assert torch.equal(fused.uniform_at(step, tag, index), plain.uniform_at(step, tag, index))
            assert torch.equal(fused.uniform_at(step, tag, index[0]), plain.uniform_at(step, tag, index[0]))
        indices = torch.tensor([2, 0], device=DEVICE)
        assert torch.equal(fused.rows(indices).uniform(step[:2], 1, 3), plain.rows(indices).uniform(step[:2], 1, 3))


@pytest.mark.parametrize(("size", "count"), [(3, 3), (64, 1), (150, 4), (131, 10)])
@torch.inference_mode()
def test_draws_without_replacement(size: int, count: int) -> None:
    plain, fused, step = streams(4)
    probs = (3 * normal(4, 5, size)).softmax(-1)
    probs[2, :, count:] = 0
    with poisoned():
        drawn = sample_distinct(probs, fused, step, 9, count)
    assert torch.equal(drawn, sample_distinct(probs, plain, step, 9, count))
    assert torch.equal(
        drawn[1:2], sample_distinct(probs[1:2], fused.rows(torch.tensor([1], device=DEVICE)), step[1:2], 9, count)
    )


@torch.inference_mode()
def test_equal_scores_come_in_the_order_of_their_numbers() -> None:
    """Noise has 2**23 values, so two tokens of equal probability often have equal scores, and all tokens of probability
    zero do."""
    _, fused, step = streams(2)
    probs = torch.zeros(2, 1, 100, device=DEVICE)
    probs[:, :, 40] = 1
    drawn = sample_distinct(probs, fused, step, 9, 4)
    assert drawn.tolist() == [[[40, 0, 1, 2]]] * 2
