"""Loss and statistics of a drafter of continuous tokens: the divergence of its paths from the target's paths."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specbench.decoding.continuous import ContinuousRule
from specbench.decoding.continuous.verify import Verifier
from specbench.harness.pipeline import ContinuousPipeline
from specbench.models import diffusion, mar
from specbench.models.mar_sampling import Guided, MarSession
from specbench.training import examples
from specbench.training.drafter import Order
from specbench.training.recipes import TrainingPlan
from specbench.training.trainer import Loss, MicroStep, Processes

HELD, FEWER = 256, 64  # maximal number of held-out images for the final statistics, and for a validation
_POSITIONS = 2  # positions per image whose paths are sampled
_BATCH = 32
#: The share of masked tokens in training: its minimum, and the spread of the normal distribution below 1 that it is
#: drawn from. MAR's shares are above 0.7; decoding token by token uses all shares equally.
LEAST, SPREAD = 0.0, 0.5
#: How often each token of a batch is noised. (The head costs less than the layers before it.)
REPEATS = 4


class ContinuousTask:
    """See `command.TrainingTask`."""

    about = (
        "path_kl: mean divergence (nats) of the drafter's paths of a token from the target's, given the tokens of an"
        " image at random positions; acceptance: probability that a drafted path is accepted (criterion=path);"
        " tokens_per_pass: 1 / (1 - acceptance), of long drafts if every token is accepted with this probability."
        " Measured on paths of held-out images under {sampling}, with their standard errors over images; ..._before:"
        " of the weights that the training started from."
    )
    best = ""

    def __init__(
        self, plan: TrainingPlan, pipeline: ContinuousPipeline, start: Path | None, process_group: Processes
    ) -> None:
        self.plan, self.pipeline = plan, pipeline
        model, kind = pipeline.model, plan["drafter"]
        network = model.trained(kind, start) if start else model.untrained(kind)
        self.network = network.to(pipeline.device, torch.float32).requires_grad_(True)
        self.target: Guided = model.target
        self.target.model.requires_grad_(False)
        self.draft = replace(self.target, model=self.network)
        data = examples.make_continuous(plan, pipeline, process_group)
        self.rows, self.held_out = data.split(plan["held_out"])
        self.distributions = np.moveaxis(data.tokens, 1, 0)  # (2, N, L, D)
        self.labels: np.ndarray = pipeline.encode(data.prompts).cpu().numpy()
        self.rule = ContinuousRule(gamma=1, criterion="path", temperature=plan.cfg["temperature"])
        at_start = self.measure(self.held_out[:HELD]) if process_group.is_main_process else {}
        self.before = {f"{name}_before": value for name, value in at_start.items()}

    def loss(self, batch: int) -> Loss:
        device, order, guided = self.pipeline.device, None, self.plan["guided"]
        target, draft = (m if guided else Guided(m.model) for m in (self.target, self.draft))

        def loss(micro_step: MicroStep) -> tuple[Tensor, dict[str, float]]:
            nonlocal order
            order = order or Order(len(self.rows), batch, micro_step.seed)
            part = slice(micro_step.part, None, micro_step.parts)
            picks = self.rows[order(micro_step.step)][part]
            generator = micro_step.generator(torch.device("cpu"))
            tokens, labels, masked = draw(self.distributions[:, picks], self.labels[picks], generator, device)
            if not guided:
                drop = micro_step.rng.uniform(size=batch)[part] < self.plan["dropout"]
                labels = labels.masked_fill(torch.as_tensor(drop).to(device), draft.model.cfg.classes)
            session, z = conditions_of_masked(draft, tokens, labels, masked)
            if self.plan["objective"] == "denoising":
                value = draft.model.head_loss(tokens[masked], z, generator, REPEATS)
                return value, {"loss": float(value.detach())}
            teacher, teacher_z = conditions_of_masked(target, tokens, labels, masked)
            temperature = self.rule.temperature
            kl = divergence(teacher, session, tokens[masked], teacher_z, z, generator, temperature=temperature)
            value = draft.steps * kl.mean()
            return value, {"loss": float(value.detach())}

        return loss

    def validate(self) -> dict[str, float]:
        return self.measure(self.held_out[:FEWER])

    def final_statistics(self, last: bool) -> dict[str, float]:
        """With the guidance and temperature of a run."""
        return self.measure(self.held_out[:HELD])

    def measure(self, rows: np.ndarray) -> dict[str, float]:
        return evaluate(self.pipeline, self.draft, self.rule, self.distributions[:, rows], self.labels[rows])


def evaluate(
    pipeline: ContinuousPipeline, draft: Guided, rule: ContinuousRule, distributions: np.ndarray, labels: np.ndarray
) -> dict[str, float]:
    """The divergence of the drafter's paths from the target's, and the probability that a path is accepted, with
    standard errors (see `ContinuousTask.about`), for images of `distributions` (2, N, L, D) and classes `labels`
    (N,)."""
    starts = range(0, len(labels), _BATCH)
    batches = ((distributions[:, i : i + _BATCH], labels[i : i + _BATCH], i) for i in starts)
    per_image = torch.cat([_paths(pipeline, draft, rule, *batch) for batch in batches], 1)
    (path_kl, acceptance), errors = per_image.mean(1).tolist(), [0.0, 0.0]
    if len(labels) > 1:
        errors = (per_image.std(1) / math.sqrt(len(labels))).tolist()
    return {
        "path_kl": path_kl,
        "path_kl_stderr": errors[0],
        "acceptance": acceptance,
        "acceptance_stderr": errors[1],
        "tokens_per_pass": 1 / max(1e-9, 1 - acceptance),
    }


@torch.no_grad()
def _paths(
    pipeline: ContinuousPipeline,
    draft: Guided,
    rule: ContinuousRule,
    distributions: np.ndarray,
    labels: np.ndarray,
    seed: int,
) -> Tensor:
    """The two statistics of each image, (2, n) float64. A random number of an image's tokens is known; both models draw
    the next tokens of a random order."""
    target, device, n = pipeline.model.target, pipeline.device, len(labels)
    generator = torch.Generator().manual_seed(seed)
    tokens, classes, _ = draw(distributions, labels, generator, device)
    order = torch.rand(n, target.length, generator=generator).argsort(1)
    count = torch.randint(target.length - _POSITIONS + 1, (n, 1), generator=generator)
    known = (order.argsort(1) < count).to(device)
    positions = order.gather(1, count + torch.arange(_POSITIONS)).to(device)
    (p, z), (q, z_draft) = (conditions(m, tokens, classes, known, positions) for m in (target, draft))
    verifier, shape = Verifier(p, q, rule, pipeline.engine), (2, n * _POSITIONS, target.steps + 1, target.dim)
    noises = torch.randn(shape, generator=generator).to(device)
    _, of_target = verifier.propose_path(z, z_draft, noises[0])
    _, of_draft = verifier.sample(False, z, z_draft, lambda tag: noises[1])
    per_path = torch.stack([of_target, of_draft.clamp_max(0).exp()])
    return per_path.view(2, n, _POSITIONS).mean(-1).cpu()


def draw(
    distributions: np.ndarray, labels: np.ndarray, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (n, L, D) float32 drawn from their distributions (2, n, L, D), the labels (n,) int64, and which tokens are
    masked (n, L) bool: equally many in every image."""
    mean, spread = torch.as_tensor(distributions.astype(np.float32))
    tokens = mean + spread * torch.randn(mean.shape, generator=generator)
    masked = mar.masks(len(tokens), tokens.shape[1], generator, LEAST, SPREAD)
    return tokens.to(device), torch.as_tensor(labels).to(device), masked.to(device)


def conditions(
    model: Guided, tokens: Tensor, labels: Tensor, known: Tensor, positions: Tensor
) -> tuple[MarSession, Tensor]:
    """A session for images with tokens (N, L, D) and classes `labels` (N,), and the conditions (N n, ...) of the tokens
    at `positions` (N, n). Only the tokens in `known` (N, L) bool are read."""
    count = known.sum(1, keepdim=True)
    session = model.open(labels, len(labels))
    rows = torch.arange(len(labels), device=tokens.device)
    z = session.condition(tokens, known, rows, positions, count.expand_as(positions), int(count.max()))
    return session, z.flatten(0, 1)


def conditions_of_masked(model: Guided, tokens: Tensor, labels: Tensor, masked: Tensor) -> tuple[MarSession, Tensor]:
    """`conditions` of the masked (N, L) bool tokens. Every image must have the same number of them."""
    return conditions(model, tokens, labels, ~masked, masked.nonzero()[:, 1].view(len(labels), -1))


def divergence(
    target: MarSession,
    draft: MarSession,
    x0: Tensor,
    z: Tensor,
    z_draft: Tensor,
    generator: torch.Generator,
    repeats: int = 2,
    temperature: float = 1.0,
) -> Tensor:
    """KL divergence (repeats n,) in nats between the target's and the draft's distribution of a step, at one random
    sampling step per token x0 (n, D). Its mean times the number of steps is the divergence of complete paths."""
    x0, z, z_draft = (x.repeat(repeats, 1) for x in (x0, z, z_draft))
    schedule = diffusion.schedule(draft.guided.steps, x0.device)
    index = torch.randint(0, len(schedule), (len(x0),), generator=generator).to(x0.device)
    x = schedule.noised(x0, torch.randn(x0.shape, generator=generator).to(x0.device), index)
    mean, log_variance = target.moments(x, index, z)
    draft_mean, draft_log_variance = draft.moments(x, index, z_draft)
    distance = ((mean - draft_mean) / temperature).square()
    return 0.5 * (
        (log_variance - draft_log_variance).exp()
        + distance * (-draft_log_variance).exp()
        - 1
        + draft_log_variance
        - log_variance
    ).sum(-1)
