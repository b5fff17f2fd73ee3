"""The rows of `specbench probe`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from specbench.config import parameters, plugins
from specbench.rows import provenance
from specbench.rows.csv_files import RowFile
from specbench.rows.summary import with_error

OFFSETS = 16

_OF_RUN = {
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
}
_WHERE = {
    "device": "device",
    "device_name": "its name",
    "torch": "version of PyTorch",
    "driver": "version of the CUDA driver",
    "python": "version of Python",
    "threads": "CPU threads of PyTorch",
    "plugins": plugins.MEANING,
}

COLUMNS = {
    **_OF_RUN,
    "top_probabilities": "JSON list: mean mass of the 1, 2, ..., 100 most probable tokens",
    "entropy": "mean entropy of a distribution, nats",
    "entropy_stderr": "its standard error over images",
    "tv_by_distance": "JSON list: mean total variation between a distribution and the one without the token 1, 2, ..."
    " positions before the last one",
    "tv_by_distance_stderr": "their standard errors over images",
    "width": "tokens in a row of the image",
    **_WHERE,
}
#: Of rules replayed on the chains of one exact run (`rounds`). Standard errors are jackknifed over images.
ROUND_COLUMNS = {
    **_OF_RUN,
    "top_k": "of the decoding and of the distributions",
    "top_p": "likewise",
    "drafter": "drafter of the chains",
    "drafter_weights": "its weights, as given",
    "window": "their length",
    "rule": "the rule, here by name: exact, uniform, cool or band",
    "parameters": "its parameter; of exact, the verification and how many tokens of the chains it is given",
    "decay": "JSON list: a band's decay by depth; the last row of a strength has that of the full dynamic programme",
    "tokens_per_round": "expected tokens of a round",
    "tokens_per_round_stderr": "its standard error",
    "tokens_over_token": "of exact decoding: tokens_per_round over that of token-wise verification at the same length",
    "tokens_over_token_stderr": "its standard error; the chains are the same",
    "kl": "KL(emitted || target) of a token, nats",
    "kl_stderr": "its standard error",
    "kl_over_uniform": "kl over that of UniformRSD at as many tokens per round; empty outside of its range",
    "kl_over_uniform_stderr": "its standard error; the chains are the same",
    **_WHERE,
}

#: Columns of a replayed rule that are printed, with labels and decimals.
_SHOWN = (
    ("tokens_per_round", "tokens per round", 3),
    ("tokens_over_token", "over token-wise", 3),
    ("kl", "KL", 4),
    ("kl_over_uniform", "over UniformRSD's", 3),
)

ROWS = RowFile(COLUMNS, "probes")
ROUNDS = RowFile(ROUND_COLUMNS, "replayed rounds")


def row(cfg: Mapping[str, Any], offsets: int = OFFSETS) -> dict[str, Any]:
    """The row of a checked configuration."""
    from specbench.probe import measure

    return _row(cfg, measure.measure(cfg, offsets), COLUMNS)


def rounds(cfg: Mapping[str, Any], strengths: Sequence[float]) -> list[dict[str, Any]]:
    """The rows of replayed rounds of a checked configuration with a drafter."""
    from specbench.probe import rounds as replay

    return [_row(cfg, found, ROUND_COLUMNS) for found in replay.measure(cfg, strengths)]


def _row(cfg: Mapping[str, Any], found: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    from specbench.harness.pipeline import resolve_device

    values = {
        "config_hash": provenance.config_hash(cfg),
        "plugins": "; ".join(parameters.plugins_of(cfg)) or None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **{name: cfg[name] for name in columns if name in cfg},
        **provenance.environment(resolve_device(cfg["device"])),
        **{name: _cell(value) for name, value in found.items()},
    }
    return {name: values.get(name) for name in columns}


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return json.dumps([None if v is None else round(v, 5) for v in value], separators=(",", ":"))
    return float(f"{value:.6g}") if isinstance(value, float) else value


def describe(row: Mapping[str, Any]) -> str:
    """A probe as text."""
    top, moved = json.loads(row["top_probabilities"]), json.loads(row["tv_by_distance"])
    lines = [
        f"{row['model']}, {row['images']} images: the most probable token has {top[0]:.3f} on average,",
        f"the ten most probable {top[min(9, len(top) - 1)]:.3f}; entropy {row['entropy']:.2f} nats",
    ]
    if moved:
        lines.append("total variation by distance: " + ", ".join(f"{i}: {tv:.3f}" for i, tv in enumerate(moved, 1)))
    return "\n".join(lines)


def describe_rounds(rows: Sequence[Mapping[str, Any]]) -> str:
    """Replayed rounds as text, a line for each rule."""
    first = rows[0]
    lines = [f"{first['model']}, {first['drafter']}, chains of {first['window']}, {first['images']} images"]
    for row in rows:
        cells = [
            f"{label} {with_error(row[name], row[f'{name}_stderr'], digits)}"
            for name, label, digits in _SHOWN
            if row[name] is not None and not (name == "kl" and row["rule"] == "exact")
        ]
        decay = [f"decay={row['decay']}"] if row["decay"] else []
        lines.append(f"{row['rule']} {row['parameters']:27} " + ", ".join([*cells, *decay]))
    return "\n".join(lines)
