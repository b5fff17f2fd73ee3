"""What the embedded models reached: vanilla samples read back, and the model card that keeps every figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from specbench import records, registry
from specbench.data import scenes
from specbench.models import evaluators as ev
from specbench.pipeline import Pipeline

SAMPLES, BATCH = 256, 16


def sample_figures(assets: Path, device: torch.device) -> dict[str, float]:
    """Attribute accuracy of vanilla samples (validation captions, guidance 3, temperature 1), as the reader sees them.

    `reader_accuracy_vanilla` is the share of stated attributes that are read as stated; `..._renders` the same on the
    real pictures of the same captions, and `..._tokenized` on those after the tokenizer, the ceiling of any sample.
    """
    cfg = {
        "model": "llamagen_scenes",
        "weights": "embedded" if assets == registry.ASSETS else str(assets),
        "device": str(device),
        "dtype": "float32",
        "drafter": "none",
        "rule": "exact",
        "temperature": 1.0,
        "top_k": None,
        "top_p": 1.0,
        "cfg_scale": 3.0,
    }
    pipeline = Pipeline.load(cfg)
    reader = ev.load(assets / ev.READER, ev.AttributeReader, device)
    real, captions, labels = scenes.render("validation", range(SAMPLES))
    pictures = []
    for i in tqdm(range(0, SAMPLES, BATCH), desc="samples"):
        conditioning = pipeline.encode(captions[i : i + BATCH])
        tokens = pipeline.decode(conditioning, [(0, j) for j in range(i, i + BATCH)]).tokens
        pictures.append(pipeline.pixels(tokens))
    tokenizer = pipeline.model.tokenizer
    with torch.inference_mode():
        again = scenes.to_uint8(tokenizer.decode(tokenizer.encode(scenes.to_float(real).to(device))))
    return {
        "reader_accuracy_renders": _read(reader, real, labels),
        "reader_accuracy_tokenized": _read(reader, again, labels),
        "reader_accuracy_vanilla": _read(reader, np.concatenate(pictures), labels),
    }


@torch.inference_mode()
def _read(reader: ev.AttributeReader, images: np.ndarray, labels: np.ndarray) -> float:
    device = next(reader.parameters()).device
    right = ev.read_right(reader(scenes.to_float(images).to(device)), torch.as_tensor(labels).to(device))
    return float(right.nanmean())


#: (stage, figure, what it is, lowest, highest): the figures the embedded world is meant to reach.
GOALS: list[tuple[str, str, str, float, float]] = [
    ("tokenizer", "psnr_db", "tokenizer PSNR on validation renders, dB", 26.0, np.inf),
    ("tokenizer", "codes_used", "share of the codebook in use", 0.80, 1.0),
    ("target", "top1_probability", "mean top-1 probability of the target", 0.25, 0.55),
    ("eagle", "tv", "total variation between EAGLE drafter and target", 0.15, 0.45),
    ("evaluators", "reader_accuracy", "attributes read from real renders", 0.97, 1.0),
    ("samples", "reader_accuracy_vanilla", "attributes read from vanilla samples, guidance 3", 0.85, 1.0),
]


def render(report: Mapping[str, Any]) -> str:
    """The card as Markdown: the goals with what was reached, then every figure of every stage."""
    stages = report["stages"]
    lines = [
        "# The embedded models",
        "",
        "Written by `make train-scenes` (`specbench train scenes`): what the weights under `specbench/assets`",
        "reached on the validation split of *scenes*, measured from the stored half-precision files.",
        "",
        f"Device: {report['device_name']}; torch {report['torch']}; specbench {report['specbench']}, commit "
        f"{report['commit']}; {report['date']}; budget `{report['budget']}`.",
        "",
        "| figure | reached | goal | |",
        "|---|---|---|---|",
    ]
    for stage, name, what, low, high in GOALS:
        if name in stages.get(stage, {}):
            value = stages[stage][name]
            goal = f"at least {low:g}" if high in (1.0, np.inf) else f"{low:g} to {high:g}"
            lines.append(f"| {what} | {value:.3f} | {goal} | {'reached' if low <= value <= high else '**short**'} |")
    lines += ["", "| stage | figures |", "|---|---|"]
    lines += [
        f"| {stage} | " + ", ".join(f"{k} {v:.4g}" for k, v in found.items()) + " |" for stage, found in stages.items()
    ]
    return "\n".join(lines) + "\n"


def provenance(device: torch.device, budget: str, date: str) -> dict[str, Any]:
    """Where, when and with what the figures were reached."""
    found = records.environment(device)
    return {k: found[k] for k in ("device_name", "torch", "specbench", "commit")} | {"budget": budget, "date": date}
