"""Mistakes in continuous speculative decoding."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mutations import Mutant, Patches, mutant
from specbench.decoding.continuous import decide, verify
from specbench.decoding.continuous.loop import ContinuousDecoding
from specbench.decoding.continuous.trajectory import Trajectory, log_density, log_normal, own_log_density
from specbench.decoding.continuous.verify import Verifier

MUTANTS: list[Mutant] = []
_mutant = partial(mutant, MUTANTS)
#: Mistakes that audits of the built-in models do not show with few samples; `tests/test_lossless_continuous.py` does.
UNSEEN: list[Mutant] = []
_unseen = partial(mutant, UNSEEN)


def _ruled(patch: Patches, **changes: Any) -> None:
    """Drafts are verified by a changed rule."""

    def around(original: Any, self: Any, model: Any, drafter: Any, rule: Any, *rest: Any) -> None:
        original(self, model, drafter, replace(rule, **changes) if rule.gamma else rule, *rest)

    patch.wrap(ContinuousDecoding, "__init__", around)


@_mutant("cspd", "by the criterion of whole paths, the densities of the last step alone are compared")
def path_is_its_last_step(patch: Patches) -> None:
    def last(path: Trajectory) -> Trajectory:
        return Trajectory(path.states[:, :2], path.mean[:, :1], path.log_variance[:, :1])

    patch.set(verify, "log_density", lambda session, path, z, rule: log_density(session, last(path), z, rule))
    patch.set(verify, "own_log_density", lambda path, rule: own_log_density(last(path), rule))


@_mutant("cspd", "the paper's factor multiplies the exact ratio of the last step")
def factor_of_the_paper(patch: Patches) -> None:
    def around(original: Any, self: Verifier, *args: Any) -> Any:
        kept = self.rule
        if kept.criterion == "exact":
            self.rule = replace(kept, criterion="paper")
        found = original(self, *args)
        self.rule = kept
        return found

    patch.wrap(Verifier, "log_ratios", around)


@_mutant("cspd", "a drafted vector is accepted with min(1, q / p)")
def density_ratio_is_reversed(patch: Patches) -> None:
    def around(original: Any, *args: Any) -> Any:
        ratio, own, sigma = original(*args)
        return -ratio, own, sigma

    patch.wrap(Verifier, "log_ratios", around)


@_mutant("cspd", "the target verifies drafts without the drafted tokens before them")
def verified_without_the_drafts(patch: Patches) -> None:
    def around(original: Any, self: ContinuousDecoding, drafts: Any) -> Any:
        _, bonus = original(self, drafts)
        kept, self.rule = self.rule, replace(self.rule, verify="parallel")
        z, _ = original(self, drafts)
        self.rule = kept
        return z, bonus

    patch.wrap(ContinuousDecoding, "_target_conditioning", around)


@_mutant("cspd", "verification goes on after a rejected token")
def drafts_after_a_rejection(patch: Patches) -> None:
    _ruled(patch, on_reject="continue")


@_mutant("cspd", "after a rejection a sample of the target instead of the residual distribution")
def rejected_token_is_the_targets(patch: Patches) -> None:
    _ruled(patch, proposals=1)


@_mutant("cspd", "after a rejection the target's own trajectory, with the noise of the draft")
def residual_reuses_the_noise(patch: Patches) -> None:
    patch.wrap(verify, "normal", lambda f, rng, number, tag, *shape: f(rng, number, verify.NOISE, *shape))


@_mutant("cspd", "a proposal for the residual is accepted with 1 - p / q")
def residual_ratio_is_reversed(patch: Patches) -> None:
    for name in ("propose_path", "last_steps"):

        def around(original: Any, *args: Any) -> Any:
            x, log_ratio = original(*args)
            return x, -log_ratio

        patch.wrap(Verifier, name, around)


@_mutant("cspd", "the residual compares proposals with the draft's first step instead of its last")
def residual_of_the_wrong_step(patch: Patches) -> None:
    def around(original: Any, self: Any, own: Trajectory, drafts: Trajectory, noise: Tensor) -> Any:
        wrong = Trajectory(drafts.states, drafts.mean.flip(1), drafts.log_variance.flip(1))
        return original(self, own, wrong, noise)

    patch.wrap(Verifier, "last_steps", around)


@_mutant("cspd", "the bonus token is drawn under the condition of the last drafted token")
def bonus_under_the_condition_before(patch: Patches) -> None:
    def around(original: Any, self: Any, compared: Any, kept: Tensor) -> None:
        z = compared.z_after
        original(self, replace(compared, z_after=torch.cat([z[:, :1], z[:, :-1]], 1)), kept)

    patch.wrap(ContinuousDecoding, "_draw_bonus", around)


@_mutant("cspd", "densities forget the temperature")
def density_forgets_the_temperature(patch: Patches) -> None:
    patch.everywhere(
        log_normal, lambda x, mean, log_variance, temperature, *inner: log_normal(x, mean, log_variance, 1.0, *inner)
    )


@_mutant("cspd", "the noise is counted from the first token, and again from the first after the prefill")
def prefill_shares_its_noise(patch: Patches) -> None:
    def around(original: Any, self: ContinuousDecoding, row: Tensor, number: Tensor, tag: int) -> Tensor:
        first = math.ceil(round(self.rule.prefill * self.length, 6))
        return original(self, row, torch.where(number >= first, number - first, number), tag)

    patch.wrap(ContinuousDecoding, "noise", around)


@_unseen("cspd verification=block", "a block's noise is that of the position, whatever became of the draft before")
def noise_is_carried_over(patch: Patches) -> None:
    patch.set(ContinuousDecoding, "series", lambda self, row: 0)


@_mutant("cspd verification=block", "the mass of a block is the product of all ratios, not at most 1 on the way")
def mass_is_not_bounded(patch: Patches) -> None:
    patch.set(decide, "log_masses", lambda x: F.pad(x.cumsum(1), (1, 0)))


@_mutant("cspd verification=block", "the mass of a block is the product of the ratios below 1")
def mass_of_small_ratios(patch: Patches) -> None:
    patch.set(decide, "log_masses", lambda x: F.pad(x.clamp_max(0).cumsum(1), (1, 0)))


@_mutant("cspd tries=2", "the residual of two drafts counts the rejected run's own tries")
def number_of_the_rejected_run(patch: Patches) -> None:
    """Every proposal has N = K: the simulated run keeps nothing."""
    patch.wrap(decide, "layer", lambda f, x, number: f(x, number) * torch.is_tensor(number))


@_unseen("cspd tries=4", "all proposals after four rejected drafts share one simulated run")
def one_run_for_all_proposals(patch: Patches) -> None:
    def around(original: Any, verifier: Any, z: Any, z_draft: Any, tries: Any, streams: Any, shape: Any) -> Any:
        most = verifier.rule.tries
        return original(verifier, z, z_draft, tries, lambda some, n: streams(some, n % most or n), shape)

    patch.wrap(decide, "residual_of_several", around)
