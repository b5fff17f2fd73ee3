"""Names of everything that can be chosen, as lazy "module:name" strings: looking a name up imports nothing heavy.

Adding a model, drafter or rule is one new module, one YAML under conf/, and one line here.
"""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.errors import unknown

#: The weights that the project carries.
ASSETS = Path(__file__).resolve().parent / "assets"


@dataclass(frozen=True)
class Entry:
    """`target` builds the part; `line` describes it; `assets` are the weight files it needs under the weights
    folder."""

    target: str
    line: str
    assets: tuple[str, ...] = ()


MODELS = {
    "llamagen_scenes": Entry(
        "specbench.models.scenes:load",
        "embedded LlamaGen on scenes, 64x64, 256 tokens, codebook 512",
        ("scenes_target.safetensors", "scenes_tokenizer.safetensors", "scenes_text.safetensors"),
    ),
}
DRAFTERS = {
    "none": Entry("specbench.decoding.drafters.build:none", "empty draft: vanilla autoregression"),
    "draft_model": Entry(
        "specbench.decoding.drafters.build:draft_model",
        "independent smaller model, chain of `window` tokens",
        ("scenes_draft.safetensors",),
    ),
    "eagle": Entry(
        "specbench.decoding.drafters.build:eagle",
        "EAGLE-1 head, chain of `window` tokens",
        ("scenes_eagle.safetensors",),
    ),
    "eagle_tree": Entry(
        "specbench.decoding.drafters.build:eagle_tree",
        "EAGLE-1 head, static tree `tree`",
        ("scenes_eagle.safetensors",),
    ),
}
RULES = {
    "exact": Entry("specbench.decoding.rules:build_exact", "lossless speculative sampling"),
    "uniform": Entry("specbench.decoding.rules:build_uniform", "UniformRSD: one factor `delta` at every depth"),
    "cool": Entry("specbench.decoding.rules:build_cool", "Cool-SD: annealed factors, mean `delta`, decay `nu`"),
}


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
    found = [MODELS[model].assets, DRAFTERS[drafter].assets]
    digests = "+".join(digest(*(folder / name for name in assets)) for assets in found if assets)
    return f"{weights if weights == 'embedded' else 'folder'}:{digests}"


def find(kind: str, table: dict[str, Entry], name: str) -> Any:
    """The object behind a name; a UsageError lists the names there are."""
    if name not in table:
        raise unknown(kind, name, table)
    module, _, attribute = table[name].target.partition(":")
    return getattr(importlib.import_module(module), attribute)
