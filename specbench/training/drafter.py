"""The losses of each kind of drafter against a frozen target, and the statistics that predict its accepted length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench.models.eagle import Eagle
from specbench.models.language import Language
from specbench.models.medusa import Medusa
from specbench.training.lessons import Lesson, Lessons, Reader, hidden_over, prefixed
from specbench.training.trainer import Loss, Turn


@dataclass(frozen=True)
class Lines:
    """The terms of the loss.

    dropout: share of sequences without their prompt, since guidance drafts those, too; noise: half-width of uniform
    noise on the target's hidden states, against the drafter's own errors; cross, regression: weights of the
    cross-entropy and of the smooth L1 distance to the target's hidden states (EAGLE's two terms); turns: unroll steps
    that an EAGLE drafter learns on its own outputs; decay: weight of an unroll step, or of a Medusa head, relative to
    the one before; labels: the cross-entropy is to the target's distribution (law), or to the token of the sequence.
    """

    dropout: float = 0.1
    noise: float = 0.1
    cross: float = 1.0
    regression: float = 0.5
    turns: int = 1
    decay: float = 0.8
    labels: str = "law"


@dataclass
class Guess:
    """Logits (N, n, codes) of the tokens at image positions `first` to first + n - 1; `features` (N, n, dim), where the
    drafter predicts hidden states too."""

    logits: Tensor
    first: int
    features: Tensor | None = None


class Pupil(Protocol):
    def __call__(self, lesson: Lesson, depth: int) -> Iterator[Guess]:
        """The outputs of a drafter for a batch, for drafted positions 1 .. depth in order."""
        ...


def pupil(network: nn.Module, reader: Reader) -> Pupil:
    """The function that runs a network of one of the kinds of drafters."""
    target, own = reader.target, next(network.parameters()).dtype  # may differ from the target's

    def eagle(lesson: Lesson, depth: int) -> Iterator[Guess]:
        assert isinstance(network, Eagle)
        start = lesson.valid.shape[1] - 1  # the first entry that holds an image token
        outputs = network.teach(lesson.hidden.to(own), lesson.ids, lesson.valid, depth)
        for j, out in enumerate(outputs):
            features = out[:, start + j :]
            yield Guess(reader.logits(features), 1 + j, features)

    def medusa(lesson: Lesson, depth: int) -> Iterator[Guess]:
        assert isinstance(network, Medusa)
        knowing = lesson.hidden[:, lesson.valid.shape[1] - 1 : -1, : target.block.dim].to(own)
        logits = reader.codes(network(knowing, depth))  # (N, T - 1, heads, codes)
        for k in range(min(depth, network.cfg.heads)):
            yield Guess(logits[:, : logits.shape[1] - k, k], 1 + k)

    def draft_model(lesson: Lesson, depth: int) -> Iterator[Guess]:
        assert isinstance(network, Language)
        assert lesson.given is not None
        conditioning, drop = lesson.given
        floats = {
            f.name: value.to(own)
            for f in fields(conditioning)
            if (value := getattr(conditioning, f.name)).is_floating_point()
        }
        hidden = hidden_over(network, prefixed(network, replace(conditioning, **floats), drop), lesson.tokens)
        yield Guess(reader.codes(network.head(hidden[:, lesson.valid.shape[1] - 1 :])), 0)

    if isinstance(network, Eagle):
        return eagle
    return medusa if isinstance(network, Medusa) else draft_model


def depth_of(network: nn.Module, turns: int) -> int:
    """Drafted positions that a network learns."""
    return network.cfg.heads if isinstance(network, Medusa) else turns


class Order:
    """Which examples each step sees: all of them once an epoch, in an order keyed by (seed, epoch)."""

    def __init__(self, count: int, batch: int, seed: int) -> None:
        self.count, self.batch, self.seed = count, batch, seed
        self._epoch, self._permuted = -1, np.zeros(0, dtype=np.int64)

    def __call__(self, step: int) -> np.ndarray:
        """The indices (batch,) of training step `step`, counted from 0."""
        return np.array([self._at(place) for place in range(step * self.batch, (step + 1) * self.batch)])

    def _at(self, place: int) -> int:
        epoch, within = divmod(place, self.count)
        if epoch != self._epoch:
            rng = np.random.Generator(np.random.Philox(key=[self.seed, 2**63 + epoch]))
            self._epoch, self._permuted = epoch, rng.permutation(self.count)
        return int(self._permuted[within])


def loss_of(network: nn.Module, reader: Reader, lessons: Lessons, rows: np.ndarray, batch: int, lines: Lines) -> Loss:
    """The loss of a training over the examples `rows`; see `Lines`."""
    ask, free = pupil(network, reader), reader.free
    order: Order | None = None

    def loss(turn: Turn) -> tuple[Tensor, dict[str, float]]:
        nonlocal order
        order = order or Order(len(rows), batch, turn.seed)
        picks, drop = rows[order(turn.step)], turn.rng.uniform(size=batch) < lines.dropout
        own = slice(turn.part, None, turn.parts)
        lesson = lessons.lesson(picks[own], drop[own])
        told = lesson
        if lines.noise:
            like = lesson.hidden
            shake = torch.rand(
                like.shape, generator=turn.generator(like.device), device=like.device, dtype=torch.float32
            )
            told = Lesson(lesson.tokens, like + (2 * shake - 1) * lines.noise, lesson.ids, lesson.valid, lesson.given)
        total, figures = torch.zeros((), device=free.device), dict[str, float]()
        for j, guess in enumerate(ask(told, depth_of(network, lines.turns))):
            wanted, laws, where = _wanted(lesson, guess, reader, free)
            log_q = guess.logits.log_softmax(-1)
            if lines.labels == "law":
                cross = -(laws * log_q).sum(-1)
            else:  # the grammar's own tokens are masked; any code will do there
                held = lesson.tokens[:, guess.first : guess.first + log_q.shape[1]]
                cross = -log_q.gather(-1, held.clamp_max(log_q.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
            value = lines.cross * _mean(cross, where)
            if lines.regression and guess.features is not None:
                value = value + lines.regression * F.smooth_l1_loss(guess.features.float(), wanted.float())
            total = total + lines.decay**j * value
            if j == 0:
                tv = 0.5 * (laws - log_q.detach().exp()).abs().sum(-1)
                figures["tv"] = float(_mean(tv, where))
        return total, {"loss": float(total.detach()), **figures}

    return loss


def _wanted(lesson: Lesson, guess: Guess, reader: Reader, free: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The target's hidden states and distributions at the positions of a guess, and which of these hold codes."""
    start = lesson.valid.shape[1] - 1 + guess.first
    n = guess.logits.shape[1]
    with torch.no_grad():
        hidden = lesson.hidden[:, start : start + n, : reader.target.block.dim]
        laws = reader.logits(hidden).softmax(-1)
    return hidden, laws, free[guess.first : guess.first + n]


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """Of values (N, n) at the positions `where` (n,) bool."""
    return (values * where).sum() / (where.sum() * len(values)).clamp_min(1)


@torch.no_grad()
def evaluate(
    network: nn.Module,
    reader: Reader,
    lessons: Lessons,
    rows: Sequence[int] | np.ndarray,
    depth: int = 1,
    batch: int = 64,
) -> dict[str, float]:
    """The distance of a drafter from the target at temperature 1 without guidance, one token after the target's last
    hidden state:

    tv: mean total variation of their distributions; top1_agreement, top3: the target's top-1 token is the drafter's
    top-1, or among its three most probable. With depth > 1 also tv_2 ...: the same at later positions, on the drafter's
    own outputs along the given sequence.
    """
    ask, free = pupil(network, reader), reader.free
    sums: dict[str, list[float]] = {}
    weights: list[int] = []
    rows = np.asarray(rows)
    for i in range(0, len(rows), batch):
        some = rows[i : i + batch]
        lesson = lessons.lesson(some, np.zeros(len(some), dtype=bool))
        found: dict[str, Any] = {}
        for j, guess in enumerate(ask(lesson, depth)):
            _, p, where = _wanted(lesson, guess, reader, free)
            q = guess.logits.softmax(-1)
            found["tv" if j == 0 else f"tv_{j + 1}"] = _mean(0.5 * (p - q).abs().sum(-1), where)
            if j == 0:
                hits = q.topk(min(3, q.shape[-1]), dim=-1).indices == p.argmax(-1, keepdim=True)
                found |= {
                    "top1_agreement": _mean(hits[..., 0].float(), where),
                    "top3": _mean(hits.any(-1).float(), where),
                }
        weights.append(len(some))
        for name, value in found.items():
            sums.setdefault(name, []).append(float(value))
    return {name: float(np.average(values, weights=weights)) for name, values in sums.items()}
