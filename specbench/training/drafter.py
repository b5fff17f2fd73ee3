"""Loss of a drafter of discrete tokens that learns from a frozen target, and statistics that predict its accepted
length."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.config import registry
from specbench.decoding.sampling import Sampling
from specbench.harness.pipeline import Pipeline
from specbench.models.supervision import Batch, DraftLogits, TargetHead, Training
from specbench.training import examples
from specbench.training.dataset import Dataset
from specbench.training.recipes import TrainingPlan
from specbench.training.trainer import Loss, MicroStep, Processes


@dataclass(frozen=True)
class LossTerms:
    """The terms of the loss.

    dropout: share of sequences without their prompt, because guidance also drafts those; noise: half-width of uniform
    noise on the target's hidden states, which makes the drafter robust to its own errors; cross, regression: weights of
    the cross-entropy and of the smooth L1 distance to the target's hidden states (EAGLE's two terms); unroll_steps:
    number of steps that an EAGLE drafter learns on its own outputs; decay: weight of an unroll step, or of a Medusa
    head, relative to the previous one; positions: share of an example's drafted positions, other ones in every step,
    that the loss counts; labels: the cross-entropy is to the target's distribution, or to the token of
    the sequence.
    """

    dropout: float = 0.1
    noise: float = 0.1
    cross: float = 1.0
    regression: float = 0.5
    unroll_steps: int = 1
    decay: float = 0.8
    positions: float = 1.0
    labels: str = "distribution"


class Order:
    """The examples of each step: all examples once per epoch, in an order keyed by (seed, epoch)."""

    def __init__(self, count: int, batch: int, seed: int) -> None:
        self.count, self.batch, self.seed = count, batch, seed
        self._epoch, self._permuted = -1, np.zeros(0, dtype=np.int64)

    def __call__(self, step: int) -> np.ndarray:
        """The indices (batch,) of training step `step`, counted from 0."""
        return np.array([self._at(index) for index in range(step * self.batch, (step + 1) * self.batch)])

    def _at(self, index: int) -> int:
        epoch, within = divmod(index, self.count)
        if epoch != self._epoch:
            rng = np.random.Generator(np.random.Philox(key=[self.seed, 2**63 + epoch]))
            self._epoch, self._permuted = epoch, rng.permutation(self.count)
        return int(self._permuted[within])


PLAIN = Sampling()  # temperature 1, no guidance, no filter


def _batch(dataset: Dataset, rows: np.ndarray, drop: np.ndarray, sampling: Sampling) -> Batch:
    """The batch of examples `rows` (n,). With guidance, 2n sequences: all with their prompt, then all without; `drop`
    is ignored."""
    if not sampling.guided:
        return dataset.batch(rows, drop)
    return dataset.batch(np.tile(rows, 2), np.repeat([False, True], len(rows)))


def loss_of(
    training: Training,
    dataset: Dataset,
    rows: np.ndarray,
    batch_size: int,
    terms: LossTerms,
    guidance: Sampling = PLAIN,
) -> Loss:
    """The loss of a training on the examples `rows`; see `LossTerms`. With guidance, the cross-entropy is between the
    guided distributions of drafter and target."""
    head, free = training.head, training.head.free
    order: Order | None = None

    def loss(micro_step: MicroStep) -> tuple[Tensor, dict[str, float]]:
        nonlocal order
        order = order or Order(len(rows), batch_size, micro_step.seed)
        picks, drop = rows[order(micro_step.step)], micro_step.rng.uniform(size=batch_size) < terms.dropout
        part = slice(micro_step.part, None, micro_step.parts)
        batch = _batch(dataset, picks[part], drop[part], guidance)
        noisy, like = batch, batch.hidden
        generator = micro_step.generator(like.device)
        if terms.noise:
            shake = torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float32)
            noisy = Batch(batch.tokens, like + (2 * shake - 1) * terms.noise, batch.ids, batch.valid, batch.given)
        total, statistics = torch.zeros((), device=free.device), dict[str, float]()
        for j, every in enumerate(training.draft(noisy, training.depth(terms.unroll_steps), generator)):
            drafted = every.some(terms.positions, generator)
            target_hidden, probs, where = _target_outputs(batch, drafted, head, free, guidance)
            log_q = guidance.apply_guidance(drafted.logits).log_softmax(-1)
            if terms.labels == "distribution":
                cross = -(probs * log_q).sum(-1)
            else:  # the grammar's tokens are masked, so any code can replace them
                labels = batch.tokens[: len(log_q), drafted.positions].clamp_max(log_q.shape[-1] - 1)
                cross = -log_q.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
            value = terms.cross * _mean(cross, where)
            if terms.regression and drafted.features is not None:
                value = value + terms.regression * F.smooth_l1_loss(drafted.features.float(), target_hidden.float())
            total = total + terms.decay**j * value
            if j == 0:
                statistics["tv"] = float(_mean(_tv(probs, log_q.detach().exp()), where))
        return total, {"loss": float(total.detach()), **statistics}

    return loss


def _target_outputs(
    batch: Batch, drafted: DraftLogits, head: TargetHead, free: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """The target's hidden states and distributions at the drafted positions, and which of these have codes."""
    before = batch.valid.shape[1] - 1 + drafted.positions  # the previous position predicts a token
    with torch.no_grad():
        hidden = batch.hidden[:, before, : head.target.block.dim]
        probs = sampling.probs(sampling.apply_guidance(head.logits(hidden)))
    return hidden, probs, free[drafted.positions]


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """The mean of values (N, n) at the positions `where` (n,) bool."""
    return (values * where).sum() / (where.sum() * len(values)).clamp_min(1)


@torch.no_grad()
def evaluate(
    training: Training,
    dataset: Dataset,
    rows: Sequence[int] | np.ndarray,
    depth: int = 1,
    batch_size: int = 64,
    sampling: Sampling = PLAIN,
) -> dict[str, float]:
    """The distance of a drafter from the target under `sampling`, one token after the target's last hidden state.

    tv: mean total variation between their distributions; tv_stderr: its standard error over the examples;
    top1_agreement, top3: shares of positions where the target's top-1 token is the drafter's top-1, or in its top 3.
    With depth > 1 also tv_2, ...: the total variation at later positions, on the drafter's own outputs along the given
    sequence. tv_unguided, if `sampling` is not `PLAIN`: the total variation at temperature 1, without guidance and
    filters.
    """
    head, free = training.head, training.head.free
    values: dict[str, list[Tensor]] = {}
    rows = np.asarray(rows)
    for i in range(0, len(rows), batch_size):
        part = rows[i : i + batch_size]
        batch = _batch(dataset, part, np.zeros(len(part), dtype=bool), sampling)
        statistics: dict[str, Tensor] = {}
        for j, drafted in enumerate(training.draft(batch, depth)):
            _, p, where = _target_outputs(batch, drafted, head, free, sampling)
            guided = sampling.apply_guidance(drafted.logits)
            statistics["tv" if j == 0 else f"tv_{j + 1}"] = _example_means(_tv(p, sampling.probs(guided)), where)
            if j == 0:
                hits = guided.topk(min(3, guided.shape[-1]), dim=-1).indices == p.argmax(-1, keepdim=True)
                statistics["top1_agreement"], statistics["top3"] = (
                    _example_means(hits[..., 0], where),
                    _example_means(hits.any(-1), where),
                )
                if sampling != PLAIN:
                    plain = _target_outputs(batch, drafted, head, free, PLAIN)[1]
                    statistics["tv_unguided"] = _example_means(_tv(plain, PLAIN.probs(drafted.logits)), where)[
                        : len(part)
                    ]
        for name, per_example in statistics.items():
            values.setdefault(name, []).append(per_example)
    merged = {name: torch.cat(parts).double() for name, parts in values.items()}
    means = {name: float(per_example.mean()) for name, per_example in merged.items()}
    return means | {"tv_stderr": float(merged["tv"].std() / len(rows) ** 0.5) if len(rows) > 1 else 0.0}


def _tv(p: Tensor, q: Tensor) -> Tensor:
    return 0.5 * (p - q).abs().sum(-1)


def _example_means(values: Tensor, where: Tensor) -> Tensor:
    """Means (N,) of values (N, n) over the positions `where` (n,) bool."""
    return (values * where).sum(1) / where.sum().clamp_min(1)


HELD, FEWER = 1000, 200  # maximal number of held-out examples for the final statistics, and for a validation


class TrainingTask:
    """The loss of a network and its statistics. The constructor makes the examples.

    rows, held_out: indices of the training examples and of the held-out examples; best: the weights with the highest
    value of this statistic are kept (empty: the last weights); about: the meaning of the statistics.
    """

    about = (
        "tv: mean total variation to the target's distribution, one token after the target's last hidden state (tv_2"
        " and on: on the drafter's own outputs), with its standard error; top1_agreement, top3: the target's top-1"
        " token is the drafter's top-1, or among its three most probable. On held-out examples, both distributions"
        " under {sampling}; tv_unguided: at temperature 1 without guidance and filters."
    )

    def __init__(self, plan: TrainingPlan, pipeline: Pipeline, start: Path | None, process_group: Processes) -> None:
        self.plan, self.pipeline = plan, pipeline
        bundle, kind = pipeline.model, plan["drafter"]
        network = bundle.trained(kind, start) if start else bundle.untrained(kind, plan["heads"])
        self.network = network.to(pipeline.device, torch.float32).requires_grad_(True)
        aux_hidden_layers = getattr(network.cfg, "aux_hidden_layers", ())
        target = bundle.target.with_aux_hidden_layers(aux_hidden_layers) if aux_hidden_layers else bundle.target
        self.target = target.requires_grad_(False)
        self.data = examples.make(plan, pipeline, aux_hidden_layers, process_group)
        self.rows, self.held_out = self.data.split(plan["held_out"])
        self.dataset = self.data.dataset(self.target)
        declared = registry.network(kind)
        self.training: Training = pkgutil.resolve_name(declared.training)(network, TargetHead(self.target))
        if plan["freeze"]:
            self.training.freeze()
        self.guidance = Sampling(cfg_scale=plan.cfg.own["cfg_scale"]) if plan["guided"] else PLAIN
        self.best = "" if plan["keep"] == "last" else plan["keep"]

    def loss(self, batch: int) -> Loss:
        """The loss on the examples `rows`, with `batch` examples per step."""
        terms = LossTerms(**{name: self.plan[name] for name in LossTerms.__dataclass_fields__})
        return loss_of(self.training, self.dataset, self.rows, batch, terms, self.guidance)

    def validate(self) -> dict[str, float]:
        """Statistics during the training."""
        return evaluate(self.training, self.dataset, self.held_out[:FEWER], sampling=self.guidance)

    def final_statistics(self, last: bool) -> dict[str, float]:
        """Statistics of the network with stored weights, with the guidance and sampling of a run: of the last weights,
        also at later positions, or, with last = False, of a checkpoint."""
        live, sampling = self.data.live(self.target), self.pipeline.config.sampling
        depth = self.training.evaluated if last else 1
        return evaluate(self.training, live, self.held_out[:HELD], depth, self.plan["decode_batch"], sampling)
