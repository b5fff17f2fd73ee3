"""What is behind the names that can be chosen: looking a name up imports nothing heavy.

A rule is the function `build` of specbench/decoding/rules/NAME.py, a drafter that of specbench/decoding/drafters/
NAME.py, where NAME.yaml stands under conf/: adding one is one module and one YAML. Several names that share a module,
and what needs weights, are listed here.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench import parameters
from specbench.errors import unknown

if TYPE_CHECKING:
    from torch import Tensor

    from specbench.decoding.rules import Rule

#: The weights that the project carries.
ASSETS = Path(__file__).resolve().parent / "assets"


@dataclass(frozen=True)
class Entry:
    """`target` builds the part ("module:name"); `assets` are the weight files it needs under the weights folder."""

    target: str
    assets: tuple[str, ...] = ()


_BUILD = "specbench.decoding.drafters.build"
_EAGLE = ("scenes_eagle.safetensors",)
_LISTED: dict[str, dict[str, Entry]] = {
    "model": {
        "llamagen_scenes": Entry(
            "specbench.models.scenes:load",
            ("scenes_target.safetensors", "scenes_tokenizer.safetensors", "scenes_text.safetensors"),
        ),
    },
    "drafter": {
        "none": Entry(f"{_BUILD}:none"),
        "draft_model": Entry(f"{_BUILD}:draft_model", ("scenes_draft.safetensors",)),
        "eagle": Entry(f"{_BUILD}:eagle", _EAGLE),
        "eagle_tree": Entry(f"{_BUILD}:eagle_tree", _EAGLE),
        "eagle2": Entry(f"{_BUILD}:eagle2", _EAGLE),
        "medusa": Entry(f"{_BUILD}:medusa", ("scenes_medusa.safetensors",)),
        "jacobi": Entry(f"{_BUILD}:jacobi"),
        "sjd": Entry(f"{_BUILD}:sjd"),
    },
    "rule": {
        "exact": Entry("specbench.decoding.rules.relaxed:build_exact"),
        "uniform": Entry("specbench.decoding.rules.relaxed:build_uniform"),
        "cool": Entry("specbench.decoding.rules.relaxed:build_cool"),
        "lantern": Entry("specbench.decoding.rules.lantern:build_lantern"),
        "lantern_pp": Entry("specbench.decoding.rules.lantern:build_lantern_pp"),
    },
}


def entry(kind: str, name: str) -> Entry:
    """What is known of a model, drafter or rule. Raises UsageError with the names there are."""
    if name not in parameters.choices(kind):
        raise unknown(kind, name, parameters.choices(kind))
    return _LISTED[kind].get(name) or Entry(f"specbench.decoding.{kind}s.{name}:build")


def find(kind: str, name: str) -> Any:
    """The object behind a name."""
    module, _, attribute = entry(kind, name).target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def rule(cfg: Mapping[str, Any], height: int, codebook: Callable[[], Tensor]) -> Rule:
    """The rule of a configuration, for drafts of this height and a target with this codebook (see `rules.Setting`)."""
    from specbench.decoding.rules import Setting

    built: Rule = find("rule", cfg["rule"])(cfg, Setting(height, codebook, cfg["temperature"] == 0))
    return built


def weights_folder(weights: str) -> Path | None:
    """The folder behind weights=embedded|DIR; None for weights=random."""
    return None if weights == "random" else ASSETS if weights == "embedded" else Path(weights)


def digest(*paths: Path) -> str:
    """The first eight hexadecimal digits of the SHA-256 over the files, in the given order."""
    h = hashlib.sha256()
    for path in paths:
        h.update(path.read_bytes())
    return h.hexdigest()[:8]


def weights_label(model: str, drafter: str, weights: str) -> str:
    """What a row calls its weights: "random", or "embedded:<digest of the target>+<digest of the drafter>".

    Raises OSError where a file is not there.
    """
    folder = weights_folder(weights)
    if folder is None:
        return "random"
    found = [entry("model", model).assets, entry("drafter", drafter).assets]
    digests = "+".join(digest(*(folder / name for name in assets)) for assets in found if assets)
    return f"{weights if weights == 'embedded' else 'folder'}:{digests}"
