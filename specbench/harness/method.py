"""The parts of a method: checked from a configuration alone, then built once with a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.config import parameters, registry
from specbench.config.run_config import RunConfig
from specbench.decoding.continuous import ContinuousModel, ContinuousRule
from specbench.decoding.continuous import rule as continuous
from specbench.decoding.loop import DecoderConfig, Drafter
from specbench.decoding.rules import Rule, RuleContext
from specbench.decoding.rules.base import neighbours
from specbench.decoding.sampling import Sampling
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import parse
from specbench.decoding.verify import Verification
from specbench.decoding.verify.base import Verified
from specbench.errors import UsageError
from specbench.storage import home
from specbench.storage.files import atomic_path, sha256

_WORTH_KEEPING = 256  # codes; the table of a smaller codebook is computed each time


def shape_of(cfg: RunConfig) -> DraftShape:
    """The shape of a configuration's drafts, computed from its parameters alone. Raises UsageError if they conflict."""
    drafter = registry.chosen("drafter", cfg)
    if not hasattr(drafter, "shape"):
        raise UsageError(
            f"drafter {cfg.drafter} does not declare the shape of its drafts: give {type(drafter).__name__} a"
            " property shape, a specbench.decoding.shape.DraftShape"
        )
    shape: DraftShape = drafter.shape
    return shape


def check(cfg: RunConfig) -> None:
    """Raises UsageError for every mistake in a method that needs no weights to detect: a draft that is longer than an
    image, a window that never drafts, parameters or parts that conflict. Builds no drafter and no rule."""
    _check_length(cfg)
    shape = shape_of(cfg)
    if parameters.is_continuous("model", cfg.model):
        continuous_rule(cfg)
        return
    rule = registry.chosen("rule", cfg)
    if hasattr(rule, "check"):
        rule.check(shape)
    build_verification(cfg, shape)


def build_method(
    cfg: RunConfig,
    model: Any,
    drafter: Drafter | None = None,
    sampling: Sampling | None = None,
    near: Callable[..., Tensor] | None = None,
) -> DecoderConfig:
    """The method of a configuration on a loaded model with discrete tokens.

    Args:
        model: has a `target`, a `codebook` and the `drafter_network` that the drafter needs.
        drafter, sampling: replace the configuration's.
        near: computes tables of neighbours (default: `cached_neighbours`).

    Raises:
        UsageError: parameters or parts conflict, or weights are missing.
    """
    target, drafter = model.target, drafter or build_drafter(cfg, model)
    layers = getattr(drafter, "aux_hidden_layers", ())
    return DecoderConfig(
        target=target.with_aux_hidden_layers(layers) if layers else target,
        drafter=drafter,
        rule=build_rule(cfg, drafter.shape.height, model.codebook, near, target),
        sampling=sampling or sampling_of(cfg),
        verification=build_verification(cfg, drafter.shape),
        emitted_draws=cfg.emitted_draws,
    )


def sampling_of(cfg: RunConfig) -> Sampling:
    """The sampling of a configuration."""
    sampling = cfg.read(Sampling)
    curve = sampling.entropy_temperature
    return replace(sampling, entropy_temperature=curve and (curve[0], curve[1], curve[2]))


def build_continuous(cfg: RunConfig, model: Any) -> tuple[ContinuousModel | None, ContinuousRule]:
    """The drafter and the rule of a configuration on a loaded model with continuous tokens. Without a drafter (None),
    the target draws alone. Raises UsageError as `build_method` does."""
    if cfg.drafter != "none":
        return registry.chosen("drafter", cfg).build(model), continuous_rule(cfg)
    iterations = cfg.read(continuous.NoiseParameters).iterations
    counts = continuous.tokens_per_iteration(model.target.length, iterations) if iterations else ()
    return None, continuous_rule(cfg, counts)


def continuous_rule(cfg: RunConfig, tokens_per_pass: Sequence[int] = ()) -> ContinuousRule:
    """The rule of a configuration for continuous tokens. tokens_per_pass: for a target that draws alone. UsageError for
    parameters that do not fit together."""
    noise = cfg.read(continuous.NoiseParameters)
    temperature, final_noise = noise.temperature, noise.final_noise
    if cfg.drafter == "none":
        return ContinuousRule(tuple(tokens_per_pass), temperature=temperature, final_noise=final_noise)
    if noise.iterations:
        raise UsageError(f"method {cfg.method} verifies token by token: leave iterations= out, or give null")
    rule: continuous.DensityRule = registry.chosen("rule", cfg)
    return rule.build(registry.chosen("drafter", cfg), cfg.verification, temperature, final_noise)


def build_drafter(cfg: RunConfig, model: Any) -> Drafter:
    """The drafter of a configuration, with the network of the loaded model that it needs."""
    drafter: Drafter = registry.chosen("drafter", cfg).build(model)
    if not hasattr(drafter, "shape"):
        raise UsageError(f"drafter {cfg.drafter} has no attribute shape; set it to the DraftShape of its parameters")
    return drafter


def build_rule(
    cfg: RunConfig,
    height: int,
    codebook: Callable[[], Tensor],
    near: Callable[..., Tensor] | None = None,
    target: Any = None,
) -> Rule:
    """The rule of a configuration, for drafts of this height and a target with this codebook (see `rules.RuleContext`);
    near: see `build_method`."""
    embeddings = getattr(target, "embeddings", None)  # targets that are tables have none
    greedy, near = cfg.temperature == 0, near or cached_neighbours
    context = RuleContext(height, codebook, greedy, near, embeddings, cfg.own.get("top_n_sigma"))
    rule: Rule = registry.chosen("rule", cfg).build(context)
    return rule


def build_verification(cfg: RunConfig, shape: DraftShape) -> Verification:
    """The verification of a configuration. Raises UsageError if drafts of this shape do not fit it."""
    if shape.skips and cfg.verification != "token":
        raise UsageError(
            f"drafter {cfg.drafter} commits tokens without verification, and verification={cfg.verification}"
            " does not support that: use verification=token"
        )
    verified = Verified(cfg.drafter, cfg.rule, shape)
    verification: Verification = registry.chosen("verification", cfg).build(verified)
    return verification


def _check_length(cfg: RunConfig) -> None:
    """Raises UsageError for a draft that is longer than an image, and for a window that never drafts."""
    module = registry.module("model", cfg.model)
    tokens = None if cfg.own.get("reduced") or not hasattr(module, "tokens_of_image") else module.tokens_of_image(cfg)
    _check_interval(cfg, tokens)
    if tokens is None:  # the length depends on the weights
        return
    lengths = {name: cfg.own[name] for name in ("window", "nodes") if name in cfg}
    if "tree" in cfg and "window" not in cfg:
        lengths["tree"] = len(parse(cfg.own["tree"]))
    for name, count in lengths.items():
        if count > tokens:
            raise UsageError(
                f"{name} drafts {count} tokens, but an image of {cfg.model} has {tokens}: use at most {tokens}"
            )


def _check_interval(cfg: RunConfig, tokens: int | None) -> None:
    """Raises UsageError if the first token with a draft is not before the end of drafts. tokens: of an image, or None
    if not known; then a negative plain_from can be anywhere."""
    begin, end = cfg.own.get("plain_until", 0), cfg.own.get("plain_from")
    if end is not None and end < 0:
        end = None if tokens is None else tokens + end
    last = min((x for x in (end, tokens) if x is not None), default=None)
    if last is not None and begin >= last:
        raise UsageError(
            f"no step would have a draft, because drafts begin at token {begin} (plain_until) and end before token"
            f" {last} of an image (plain_from): lower plain_until, raise plain_from, or use method=vanilla"
        )


def cached_neighbours(codebook: Tensor, k: int, proximity: str = "l2") -> Tensor:
    """See `rules.base.neighbours`. The table of a large codebook is read from the cache if it exists there."""
    codes = codebook.detach().to("cpu", torch.float32).contiguous()
    if len(codes) < _WORTH_KEEPING:
        return neighbours(codebook, k, proximity)
    k = min(k, int((~codes.isnan().any(-1)).sum()) - 1)
    digest = sha256(codes.numpy().tobytes() + str(tuple(codes.shape)).encode(), 16)
    path = home.home() / "neighbours" / f"{digest}-{proximity}-{k}.npy"
    try:
        with path.open("rb") as f:
            known = np.lib.format.read_array(f, allow_pickle=False)
        if known.shape == (len(codes), k) and known.dtype == np.int32 and 0 <= known.min() <= known.max() < len(codes):
            return torch.from_numpy(known).long().to(codebook.device)
    except (OSError, ValueError):
        pass  # missing or damaged: computed again
    table = neighbours(codebook, k, proximity)
    try:
        with atomic_path(path) as temporary, temporary.open("wb") as f:
            np.save(f, table.int().cpu().numpy())
    except OSError:
        pass  # an unwritable cache only costs time
    return table
