"""The parts of a method, built from a checked configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.config import parameters, registry
from specbench.decoding.rules import Rule, Setting
from specbench.decoding.rules.proximity import neighbours
from specbench.decoding.trees import parse
from specbench.decoding.verify import Verification
from specbench.errors import UsageError
from specbench.models.language import Language
from specbench.storage import home
from specbench.storage.files import atomic_path, sha256

_WORTH_KEEPING = 256  # codes


def build_rule(
    cfg: Mapping[str, Any],
    height: int,
    codebook: Callable[[], Tensor],
    near: Callable[..., Tensor] | None = None,
    target: Language | None = None,
) -> Rule:
    """The rule of a configuration, for drafts of this height and a target with this codebook (see `rules.Setting`);
    near: computes tables of neighbours (default: `cached_neighbours`); target: None where it has no embeddings."""
    embeddings = None if target is None else target.embeddings
    setting = Setting(height, codebook, cfg["temperature"] == 0, near or cached_neighbours, embeddings)
    built: Rule = registry.find("rule", cfg["rule"])(cfg, setting)
    return built


def build_verification(cfg: Mapping[str, Any], drafter: Any) -> Verification:
    """The verification of a configuration, for this drafter. Raises UsageError where it does not fit."""
    if getattr(drafter, "skips", False) and cfg["verification"] != "token":
        raise UsageError(
            f"drafter {cfg['drafter']} commits tokens without verification, which verification={cfg['verification']}"
            " does not know: use verification=token"
        )
    built: Verification = registry.find("verification", cfg["verification"])(cfg, drafter)
    return built


def cached_neighbours(codebook: Tensor, k: int, proximity: str = "l2") -> Tensor:
    """`proximity.neighbours`. The table of a large codebook is read from the cache if it exists there."""
    codes = codebook.detach().to("cpu", torch.float32).contiguous()
    if len(codes) < _WORTH_KEEPING:
        return neighbours(codebook, k, proximity)
    k = min(k, int((~codes.isnan().any(-1)).sum()) - 1)
    digest = sha256(codes.numpy().tobytes() + str(tuple(codes.shape)).encode(), 16)
    path = home.home() / "neighbours" / f"{digest}-{proximity}-{k}.npy"
    try:
        with path.open("rb") as f:
            found = np.lib.format.read_array(f, allow_pickle=False)
        if found.shape == (len(codes), k) and found.dtype == np.int32 and 0 <= found.min() <= found.max() < len(codes):
            return torch.from_numpy(found).long().to(codebook.device)
    except (OSError, ValueError):
        pass  # absent or damaged: computed again
    table = neighbours(codebook, k, proximity)
    try:
        with atomic_path(path) as temporary, temporary.open("wb") as f:
            np.save(f, table.int().cpu().numpy())
    except OSError:
        pass  # an unwritable cache only costs time
    return table


def check_draft(cfg: Mapping[str, Any]) -> None:
    """Raises UsageError for a draft that is longer than an image, and where a server decodes; loads no model."""
    if parameters.is_served(cfg):
        raise UsageError(f"engine={cfg['engine']}: a server decodes, and only specbench run asks it")
    module = registry.module("model", cfg["model"])
    tokens = None if cfg.get("reduced") or not hasattr(module, "tokens_of_image") else module.tokens_of_image(cfg)
    if tokens is None:  # only the weights define it
        return
    found = {name: cfg[name] for name in ("window", "nodes") if name in cfg}
    if "tree" in cfg and "window" not in cfg:
        found["tree"] = len(parse(cfg["tree"]))
    for name, count in found.items():
        if count > tokens:
            raise UsageError(
                f"{name} drafts {count} tokens, and an image of {cfg['model']} has {tokens}: give {tokens} at most"
            )
