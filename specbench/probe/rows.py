"""The rows of `specbench probe`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from specbench.rows import provenance
from specbench.rows.csv_files import RowFile

OFFSETS = 16

COLUMNS = {
    "config_hash": "hash of the configuration, as a run's",
    "time": "when it was measured, UTC",
    "specbench": "version",
    "commit": "of the code; -dirty where specbench/ or conf/ differed from it",
    "model": "target model",
    "weights": "what was loaded",
    "data": "data set of the prompts",
    "split": "its split",
    "seed": "of the images",
    "temperature": "softmax temperature of the distributions, 1 where it is 0",
    "top_k": "of the decoding; the distributions are before it",
    "top_p": "likewise",
    "cfg_scale": "guidance scale",
    "images": "images",
    "top_probabilities": "JSON list: mean mass of the 1, 2, ..., 100 most probable tokens",
    "entropy": "mean entropy of a distribution, nats",
    "entropy_stderr": "its standard error over images",
    "tv_by_distance": "JSON list: mean total variation between a distribution and the one without the token 1, 2, ..."
    " positions before the last one",
    "tv_by_distance_stderr": "their standard errors over images",
    "width": "tokens in a row of the image",
    "device": "device",
    "device_name": "its name",
    "torch": "version of PyTorch",
    "driver": "version of the CUDA driver",
    "python": "version of Python",
    "threads": "CPU threads of PyTorch",
}

ROWS = RowFile(COLUMNS, "probes")


def row(cfg: Mapping[str, Any], offsets: int = OFFSETS) -> dict[str, Any]:
    """The row of a checked configuration."""
    from specbench.harness.pipeline import resolve_device
    from specbench.probe import measure

    found = measure.measure(cfg, offsets)
    values = {
        "config_hash": provenance.config_hash(cfg),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **{name: cfg[name] for name in COLUMNS if name in cfg},
        **provenance.environment(resolve_device(cfg["device"])),
        **{name: _cell(value) for name, value in found.items()},
    }
    return {name: values.get(name) for name in COLUMNS}


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return json.dumps([None if v is None else round(v, 5) for v in value], separators=(",", ":"))
    return float(f"{value:.6g}") if isinstance(value, float) else value
