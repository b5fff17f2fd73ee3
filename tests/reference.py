"""Facts about the official models, in a folder beside the checkout if it exists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench.models.loading import official
from specbench.models.loading.official import CheckpointSource

REFERENCE = Path(__file__).resolve().parents[2] / "shared" / "reference"
needs_reference = pytest.mark.skipif(not REFERENCE.exists(), reason="the reference facts are not beside this checkout")


def manifest(name: str) -> tuple[dict[str, Any], CheckpointSource]:
    """(facts, source without values) of an official checkpoint; among the facts its "config"."""
    facts = json.loads((REFERENCE / "manifests" / f"{name}.json").read_text())
    tensors = {
        key: torch.empty(shape, dtype=getattr(torch, kind), device="meta")
        for key, (shape, kind) in facts["tensors"].items()
    }
    return facts, official.from_tensors(tensors, name)
