"""Compares the two models' densities of drafted tokens, and samples from the residual distribution."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specbench.decoding.continuous.rule import ContinuousRule
from specbench.decoding.continuous.sessions import ContinuousSession
from specbench.decoding.continuous.trajectory import (
    Trajectory,
    draw_trajectory,
    log_density,
    log_normal,
    normal,
    normal_quantile,
    own_log_density,
)
from specbench.decoding.rng import RandomStreams
from specbench.engine.graph import Eager, Graphs
from specbench.engine.ops import take

# Tags of an image's random numbers. The numbers are keyed by a token's index in the order of generation, not by the
# step, so that a draft, its verification and vanilla decoding share them. The tries of a residual have the tags from
# RETRY on.
ORDER, NOISE, OWN_NOISE, ACCEPT, RETRY = range(5)
_AT_ONCE = 100  # tries of a residual at once, if each is only a last step


class Verifier:
    """compact: only the rows of a residual that still need a proposal get one (`loop.compacts`)."""

    def __init__(
        self,
        target: ContinuousSession,
        drafter: ContinuousSession,
        rule: ContinuousRule,
        engine: Eager | Graphs,
        compact: bool = True,
    ) -> None:
        self.target, self.drafter, self.rule, self.engine, self.compact = target, drafter, rule, engine, compact

    def log_ratios(
        self, drafts: Trajectory, z: Tensor, noise: Callable[[int], Tensor]
    ) -> tuple[Tensor, Trajectory | None, Tensor]:
        """log p / q (n,) of drafted tokens, the target's trajectories if the criterion needs them, and log Sigma (n,).
        z (n, E): the target's; noise: returns the noise of the tokens' trajectories, by tag."""
        rule = self.rule
        zero = torch.zeros(len(z), dtype=torch.float64, device=z.device)
        if rule.criterion == "path":
            return log_density(self.target, drafts, z, rule) - own_log_density(drafts, rule), None, zero
        target_paths = draw_trajectory(self.target, z, noise(NOISE if rule.align else OWN_NOISE), rule, self.engine)
        sigma = zero
        if rule.criterion == "paper":
            sigma = 0.5 * (drafts.log_variance[:, 1:].double() - target_paths.log_variance[:, 1:].double()).sum((1, 2))
        return self._last_step(drafts.token[:, None], target_paths, drafts)[:, 0] + sigma, target_paths, sigma

    def _last_step(self, x: Tensor, target_paths: Trajectory, drafts: Trajectory) -> Tensor:
        """log p(x_0 | x_1^p) - log q(x_0 | x_1^q), (n, k), of k tokens each, x (n, k, D)."""
        rule = self.rule
        p = log_normal(
            x, target_paths.mean[:, :1], target_paths.log_variance[:, :1], rule.temperature, rule.inner_temperature
        )
        q = log_normal(x, drafts.mean[:, :1], drafts.log_variance[:, :1], rule.temperature, rule.inner_temperature)
        return p - q

    def residual(
        self,
        drafts: Trajectory,
        target_paths: Trajectory | None,
        sigma: Tensor,
        z: Tensor,
        z_draft: Tensor,
        rng: RandomStreams,
        number: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (n, D) from Norm([p - q]_+) by acceptance-rejection with the target as proposal (Eq. 10): a proposal
        is accepted with max(0, 1 - q / p). Also the number of proposals (n,) for each token, and whether it is the last
        proposal (n,) because the proposals ran out."""
        most, at_once = self.rule.proposals, _AT_ONCE if target_paths is not None else 1
        token, tries = torch.zeros_like(drafts.token), torch.zeros_like(number)
        unfinished = torch.ones(len(z), dtype=torch.bool, device=z.device)
        rows = torch.arange(len(z), device=z.device)
        for start in range(0, most, at_once):
            streams, count, tag = rng.rows(rows), min(at_once, most - start), RETRY + 2 * start
            if target_paths is None:
                noise = normal(streams, number[rows], tag, *drafts.shape)
                x, log_ratio = self.propose_path(z[rows], z_draft[rows], noise)
                x, log_ratio = x[:, None], log_ratio[:, None]
            else:
                noise = normal_quantile(streams.uniforms(number[rows], tag, 2 * count, token.shape[1])[:, ::2])
                x, log_ratio = self.last_steps(target_paths.rows(rows), drafts.rows(rows), noise)
                log_ratio = log_ratio + sigma[rows, None]
            u = streams.uniforms(number[rows], tag, 2 * count, 1)[:, 1::2, 0].double()
            accepted = ~(u >= -torch.expm1(-log_ratio))  # 1 - q / p; negative where q > p; NaN is not tried again
            success = accepted.any(1)
            last = torch.where(success, accepted.long().argmax(1), count - 1)
            before = unfinished[rows]
            token[rows] = torch.where(before[:, None], take(x, last[:, None])[:, 0], token[rows])
            tries[rows] += torch.where(before, last + 1, 0)
            unfinished[rows] = before & ~success
            if target_paths is None or self.compact:
                rows = rows[~success]
                if not len(rows):
                    break
        return token, tries, unfinished

    def propose_path(self, z: Tensor, z_draft: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """`sample` of the target's tokens from noise (n, T + 1, D), with the criterion `path`."""
        return self.sample(True, z, z_draft, lambda tag: noise)

    def sample(
        self, by_target: bool, z: Tensor, z_draft: Tensor, noise: Callable[[int], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Tokens (n, D) drawn by the target or by the drafter, and log p / q (n,) of everything that was drawn: of the
        path or, with the criterion `exact`, of the last step given the noise of both models. noise: see
        `log_ratios`."""
        rule = self.rule
        if rule.criterion == "path":
            model, other_model = (self.target, self.drafter) if by_target else (self.drafter, self.target)
            z_model, z_other = (z, z_draft) if by_target else (z_draft, z)
            path = draw_trajectory(model, z_model, noise(NOISE), rule, self.engine)
            log_ratio = own_log_density(path, rule) - log_density(other_model, path, z_other, rule)
            return path.token, log_ratio if by_target else -log_ratio
        drafts = draw_trajectory(self.drafter, z_draft, noise(NOISE), rule, self.engine)
        target_paths = draw_trajectory(self.target, z, noise(NOISE if rule.align else OWN_NOISE), rule, self.engine)
        token = target_paths.token if by_target else drafts.token
        return token, self._last_step(token[:, None], target_paths, drafts)[:, 0]

    def last_steps(self, target_paths: Trajectory, drafts: Trajectory, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (n, k, D) of the target from other last steps of its trajectories, and their log p / q (n, k) without
        Sigma. noise (n, k, D)."""
        spread = torch.exp(0.5 * target_paths.log_variance[:, :1]) * self.rule.temperature
        x = target_paths.mean[:, :1] + noise * spread
        return x, self._last_step(x, target_paths, drafts)
