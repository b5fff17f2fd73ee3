"""Mistakes in the decoding of discrete tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mutations import Mutant, Patches, mutant
from specbench.decoding import sampling
from specbench.decoding.drafters import positions, window
from specbench.decoding.drafters.eagle import Entries
from specbench.decoding.drafters.window import Window
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules import Relaxed, base
from specbench.decoding.sampling import Sampling
from specbench.decoding.verify import DRAFT, VERIFY, Verification, token
from specbench.engine.ops import take
from specbench.models.language import LanguageSession

MUTANTS: list[Mutant] = []
_mutant = partial(mutant, MUTANTS)

# --- rules and verification -------------------------------------------------------------------------------------------


@_mutant("sd", "after a rejection the target's distribution instead of the residual one")
def residual_is_target(patch: Patches) -> None:
    patch.wrap(Relaxed, "residual", lambda _, self, r, q, token, depth: r)


@_mutant("sd", "the residual distribution is Norm(|p - q|), not Norm([p - q]_+)")
def residual_is_absolute(patch: Patches) -> None:
    patch.wrap(Relaxed, "residual", lambda _, self, r, q, token, depth: base.normalise((r - q).abs(), r))


@_mutant("sd", "the residual distribution is Norm([q - p]_+)")
def residual_is_reversed(patch: Patches) -> None:
    patch.wrap(Relaxed, "residual", lambda _, self, r, q, token, depth: base.normalise((q - r).clamp_min(0), r))


@_mutant("sd", "a token is accepted with min(1, q / p)")
def ratio_is_reversed(patch: Patches) -> None:
    patch.wrap(Relaxed, "accept", lambda _, self, r, q, token, depth: base.ratio(base.at(q, token), base.at(r, token)))


@_mutant("sd", "a token is accepted with p, as if the draft were deterministic")
def ratio_forgets_the_draft(patch: Patches) -> None:
    patch.wrap(Relaxed, "accept", lambda _, self, r, q, token, depth: base.at(r, token))


@_mutant("eagle_chain", "a token is accepted 5 % too often")
def accepts_too_often(patch: Patches) -> None:
    patch.wrap(Relaxed, "accept", lambda accept, *args: (1.05 * accept(*args)).clamp_max(1))


@_mutant("eagle_chain", "a token is accepted 1 % too often")
def accepts_slightly_too_often(patch: Patches) -> None:
    patch.wrap(Relaxed, "accept", lambda accept, *args: (1.01 * accept(*args)).clamp_max(1))


def verified(patch: Patches, around: Callable[..., tuple[Any, ...]]) -> None:
    """Changes the arguments of `verify`: around(p, draft) -> (p, draft)."""

    def changed(original: Any, self: Any, p: Tensor, draft: Any, *rest: Any) -> Any:
        return original(self, *around(p, draft), *rest)

    patch.wrap(Verification, "verify", changed)


@_mutant("sd", "a token is tested with the q of the depth below its own")
def q_of_the_wrong_depth(patch: Patches) -> None:
    verified(patch, lambda p, d: (p, replace(d, probs=torch.cat([d.probs[:, 1:], d.probs[:, -1:]], 1))))


@_mutant("sd", "a token is tested with the p of the depth below its own")
def p_of_the_wrong_depth(patch: Patches) -> None:
    verified(patch, lambda p, d: (torch.cat([p[:, 1:], p[:, -1:]], 1), d) if d.tree.height else (p, d))


@_mutant("sd", "the bonus token comes from the distribution of the last drafted token")
def bonus_from_the_node_above(patch: Patches) -> None:
    def moved(p: Tensor, d: Any) -> tuple[Tensor, Any]:
        leaf = (d.tree.slot < 0).expand(len(p), -1).unsqueeze(-1)
        return torch.where(leaf, take(p, d.tree.parent.expand(len(p), -1)), p), d

    verified(patch, moved)


@_mutant("eagle2", "deterministic draft tokens are verified as if they had been sampled")
def chosen_tokens_count_as_sampled(patch: Patches) -> None:
    verified(patch, lambda p, d: (p, replace(d, sampled=None)))


@_mutant("sd", "the drafter's probabilities are rounded to multiples of 1/32")
def q_is_rounded(patch: Patches) -> None:
    verified(patch, lambda p, d: (p, replace(d, probs=(d.probs * 32).round().clamp_min(1) / 32)))


@_mutant("eagle1", "the q of the second sibling is not renormalised")
def sibling_is_not_renormalised(patch: Patches) -> None:
    patch.set(token, "without", lambda q, rejected: q.scatter(-1, rejected.unsqueeze(-1), 0.0))


@_mutant("eagle1", "the q of the second sibling still holds the first one")
def sibling_is_not_removed(patch: Patches) -> None:
    patch.set(token, "without", lambda q, rejected: q)


def sort_siblings(patch: Patches) -> None:
    original = sampling.draw_distinct

    def ordered(probs: Tensor, *rest: Any, **named: Any) -> Tensor:
        tokens = original(probs, *rest, **named)
        return tokens.gather(-1, probs.gather(-1, tokens).argsort(-1, descending=True))

    patch.everywhere(original, ordered)


@_mutant("eagle1", "siblings are verified by falling probability, not in the order in which they were drawn")
def siblings_are_sorted(patch: Patches) -> None:
    sort_siblings(patch)


@_mutant("eagle_chain", "a chain goes on after a rejected token")
def path_after_a_rejection(patch: Patches) -> None:
    def counted(original: Any, tree: Any, accepted_child: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        if not tree.is_chain:
            return original(tree, accepted_child, slot)
        length = (accepted_child >= 0).sum(1, keepdim=True)
        return torch.minimum(torch.arange(1, tree.height + 1), length), length

    patch.wrap(token, "accepted_path", counted)


# --- random numbers ---------------------------------------------------------------------------------------------------


@_mutant("sd", "the next token is drawn with the number that tested the first candidate")
def one_number_for_two_decisions(patch: Patches) -> None:
    def shared(original: Any, self: Any, step: Tensor, tag: int, tags: int, count: int, *rest: Any) -> Tensor:
        u = original(self, step, tag, tags, count, *rest)
        return torch.stack([u[:, 0], u[:, 0].roll(-1, -1)], 1) if tag == VERIFY and tags == 2 else u

    patch.wrap(RandomStreams, "uniforms", shared)


@_mutant("sd", "all depths of a draft share one random number")
def one_number_for_all_depths(patch: Patches) -> None:
    patch.wrap(RandomStreams, "uniform", lambda f, self, step, tag, *shape: f(self, step, DRAFT, *shape))


@_mutant("sd", "every step draws the same random numbers")
def the_same_numbers_each_step(patch: Patches) -> None:
    patch.wrap(RandomStreams, "uniforms", lambda f, self, step, *rest: f(self, torch.zeros_like(step), *rest))


@_mutant("vanilla", "the images of a batch share their random numbers in pairs")
def images_share_numbers(patch: Patches) -> None:
    def paired(original: Any, self: Any, keys: Any, *rest: Any) -> None:
        original(self, keys, *rest)
        self.key = self.key[torch.arange(len(self.key)) // 2 * 2]

    patch.wrap(RandomStreams, "__init__", paired)


@_mutant("vanilla", "random numbers have six bits")
def coarse_numbers(patch: Patches) -> None:
    numbers = RandomStreams._numbers
    patch.set(RandomStreams, "_numbers", staticmethod(lambda *args: (numbers(*args) * 64).floor() / 64))


# --- windows ----------------------------------------------------------------------------------------------------------


def _begun(patch: Patches, change: Callable[[Any, Tensor], None]) -> None:
    """change(state, new (B, H)) after the positions that begin after the first step were initialised."""
    names = list(inspect.signature(Window._initialise).parameters)

    def around(original: Any, *args: Any) -> Tensor:
        new: Tensor = original(*args)
        given = dict(zip(names, args, strict=True))
        change(given["state"], new & (given["count"] > 0)[:, None])
        return new

    patch.wrap(Window, "_initialise", around)


@_mutant("sjd", "positions that begin after the first step hold token 0")
def refill_with_token_0(patch: Patches) -> None:
    _begun(patch, lambda state, new: state.tokens.masked_fill_(new, 0))


@_mutant("sjd_isp", "a repeated token counts as drawn from the uniform distribution")
def refill_counts_as_random(patch: Patches) -> None:
    _begun(patch, lambda state, new: state.probs.copy_(torch.where(new.unsqueeze(-1), state.uniform, state.probs)))


@_mutant("sjd", "renewed tokens keep the distributions of the tokens before")
def stale_distribution(patch: Patches) -> None:
    def around(original: Any, self: Any, state: Any, *rest: Any) -> Any:
        found = original(self, state, *rest)
        return replace(found, probs=torch.where(state.started[:, None, None], state.probs, found.probs))

    patch.wrap(Window, "_renew", around)


@_mutant("sjd", "the tokens of a window are shifted by one position more than their distributions")
def window_off_by_one(patch: Patches) -> None:
    def around(original: Any, self: Any, state: Any, *rest: Any) -> Any:
        found = original(self, state, *rest)
        return replace(found, tokens=found.tokens.roll(-1, 1))

    patch.wrap(Window, "_renew", around)


@_mutant("scd", "a token that is not kept is drawn from p, not from the residual distribution")
def coupling_with_a_fresh_draw(patch: Patches) -> None:
    patch.set(positions, "normalise", lambda mass, fallback: fallback)


@_mutant("scd", "a token is kept with min(1, q / p)")
def coupling_is_reversed(patch: Patches) -> None:
    patch.set(positions, "ratio", lambda p, q: base.ratio(q, p))


@_mutant("scd", "a token that is not kept is drawn with the number that decided against the one before it")
def coupling_with_one_number(patch: Patches) -> None:
    def around(original: Any, self: Any, *args: Any) -> Any:
        shared = Patches()
        if self.coupling == "maximal":
            shared.set(positions, "TOKEN", positions.KEEP)
        try:
            return original(self, *args)
        finally:
            shared.undo()

    patch.wrap(Window, "_renew", around)


@_mutant("scd", "the Gumbel noise is one for all positions")
def one_noise_for_all_positions(patch: Patches) -> None:
    patch.wrap(window, "gumbel_noise", lambda f, rng, position, size: f(rng, torch.zeros_like(position), size))


@_mutant("scd", "a new token keeps the height of the one before it")
def stale_height(patch: Patches) -> None:
    patch.set(positions, "renewed_heights", lambda keep, u, fresh, share: torch.where(keep, u * share, u))


@_mutant("scd", "the height of a new token is drawn from [0, p), not from [q, p)")
def height_from_zero(patch: Patches) -> None:
    patch.set(positions, "renewed_heights", lambda keep, u, fresh, share: torch.where(keep, u * share, fresh))


@_mutant("scd", "a token that is kept gets a fresh height")
def fresh_height(patch: Patches) -> None:
    patch.set(positions, "renewed_heights", lambda k, u, fresh, s: torch.where(k, fresh, s + fresh * (1 - s)))


@_mutant("scd", "a height stays the share of its token's old probability")
def height_not_rescaled(patch: Patches) -> None:
    patch.set(positions, "renewed_heights", lambda k, u, fresh, s: torch.where(k, u, s + fresh * (1 - s)))


# --- caches, positions, guidance, filters -----------------------------------------------------------------------------


@_mutant("eagle1", "the accepted path is not compacted in the cache")
def cache_not_compacted(patch: Patches) -> None:
    patch.set(LanguageSession, "commit", lambda self, verdict, tree, count: None)


@_mutant("eagle2", "the cache keeps the nodes before the accepted ones")
def cache_compacted_off_by_one(patch: Patches) -> None:
    def around(original: Any, self: Any, verdict: Any, *rest: Any) -> None:
        original(self, replace(verdict, path=(verdict.path - 1).clamp_min(1)), *rest)

    patch.wrap(LanguageSession, "commit", around)


@_mutant("eagle1", "draft nodes attend to all nodes of the tree")
def tree_without_a_mask(patch: Patches) -> None:
    def around(original: Any, self: Any, tokens: Tensor, tree: Any, *rest: Any) -> Any:
        return original(self, tokens, replace(tree, ancestors=torch.ones_like(tree.ancestors)), *rest)

    patch.wrap(LanguageSession, "forward", around)


@_mutant("sjd", "image tokens are rotated by the next position")
def position_off_by_one(patch: Patches) -> None:
    def around(original: Any, self: Any, x: Tensor, positions: Tensor, *rest: Any) -> Any:
        # not during the prefill, which the session's constructor does
        return original(self, x, positions + hasattr(self, "prefix_hidden"), *rest)

    patch.wrap(LanguageSession, "feed", around)


@_mutant("sd", "the padding of the prompt is attended to")
def padding_is_seen(patch: Patches) -> None:
    def around(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        self.padding = torch.zeros_like(self.padding)

    patch.wrap(LanguageSession, "__init__", around)


@_mutant("vanilla", "guidance mixes probabilities instead of logits")
def guidance_after_softmax(patch: Patches) -> None:
    def mixed(self: Sampling, logits: Tensor) -> Tensor:
        if not self.guided:
            return logits.float()
        cond, uncond = logits.float().softmax(-1).chunk(2)
        return (uncond + self.cfg_scale * (cond - uncond)).clamp_min(1e-9).log()

    patch.set(Sampling, "apply_guidance", mixed)


@_mutant("vanilla", "the rows with and without a prompt are exchanged in guidance")
def guidance_is_reversed(patch: Patches) -> None:
    patch.wrap(Sampling, "apply_guidance", lambda f, self, x: f(self, x.roll(len(x) // 2, 0) if self.guided else x))


@_mutant("sjd", "the image grammar is not applied")
def grammar_is_ignored(patch: Patches) -> None:
    patch.wrap(LanguageSession, "constrain", lambda _, self, logits, positions: logits)


@_mutant("vanilla", "the temperature is applied twice")
def temperature_twice(patch: Patches) -> None:
    patch.wrap(Sampling, "probs", lambda f, self, x: f(self, x / self.temperature if self.temperature else x))


@_mutant(
    "eagle1",
    "an EAGLE drafter applies the guidance twice",
    test="tests/test_drafters.py::test_eagle_drafts_from_the_guided_distribution_of_its_head",
)
def drafts_are_guided_twice(patch: Patches) -> None:
    def around(original: Any, self: Any, state: Any, sampling: Sampling, *rest: Any) -> Any:
        return original(self, state, replace(sampling, cfg_scale=sampling.cfg_scale**2), *rest)

    patch.wrap(Entries, "_distributions", around)


@_mutant(
    "vanilla",
    "top-p leaves out a token before which the others have exactly the share",
    test="tests/test_sampling.py::test_top_p_keeps_the_token_at_which_the_share_is_reached",
)
def top_p_without_ties(patch: Patches) -> None:
    def around(original: Any, self: Sampling, x: Tensor) -> Tensor:
        below = torch.nextafter(torch.tensor(self.top_p), torch.tensor(0.0)).item()  # x > below: x >= top_p
        return original(replace(self, top_p=below) if self.top_p < 1 else self, x)

    patch.wrap(Sampling, "probs", around)


@_mutant("vanilla", "top-k keeps one token more")
def top_k_keeps_one_more(patch: Patches) -> None:
    def around(original: Any, self: Sampling, x: Tensor) -> Tensor:
        return original(replace(self, top_k=self.top_k + 1) if self.top_k else self, x)

    patch.wrap(Sampling, "probs", around)
