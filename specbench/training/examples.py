"""Training examples of drafters: sequences of tokens with their prompts, and the target's hidden states over them, on
disk.

A folder of shards, examples-00000.safetensors and on, each written atomically: tokens (n, T) int32 and, where features
are stored, hidden (n, P - 1 + T, width) in the target's number format, ids (n, P) int32 and valid (n, P) bool of the
prefix. Of continuous tokens: mean and spread of their normal distributions, tokens (n, 2, L, D) float16. A shard's
metadata hold its prompts, the index of its first example and the identity of the examples;
manifest.json lists all shards with their digests when the last one is there. After an interruption, the same command
resumes.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from specbench.errors import UsageError
from specbench.harness.pipeline import ContinuousPipeline, Pipeline
from specbench.models.language import Language
from specbench.models.mar_sampling import Guided
from specbench.models.pixels import to_float
from specbench.models.supervision import Batch
from specbench.storage import image_files
from specbench.storage.files import format_size, sha256, sha256_file, write_atomically
from specbench.training.dataset import Dataset, LiveDataset
from specbench.training.prompts import ExamplePrompt, pairs
from specbench.training.recipes import TrainingPlan
from specbench.training.trainer import Processes

SHARD = 256  # examples in a shard, fewer where those would take more than ...
LARGEST = 1 << 28  # ... bytes
MANIFEST = "manifest.json"
_FORMAT = "specbench-examples-1"


def make(plan: TrainingPlan, pipeline: Pipeline, aux_hidden_layers: tuple[int, ...], together: Processes) -> Examples:
    """The examples of a plan, made where they are missing; several processes share the work.

    Raises UsageError where the folder holds other examples, and where the disk is too small.
    """
    target: Language = pipeline.model.target
    classes = int(getattr(getattr(target, "cfg", None), "num_classes", 0))
    found = pairs(plan, classes)
    stored = plan["features"] == "stored"
    identity: dict[str, Any] = {}
    if plan["source"] == "self":
        identity = {name: plan.cfg[name] for name in ("temperature", "top_k", "top_p", "cfg_scale")}
        for name in ("entropy_temperature", "top_n_sigma"):
            if given := plan.cfg.get(name):
                identity[name] = given
    if stored:
        identity |= {"aux_hidden_layers": list(aux_hidden_layers), "dropout": plan["dropout"]}
    live = LiveDataset(
        target.with_aux_hidden_layers(aux_hidden_layers),
        np.zeros((0, target.length)),
        Encoded(pipeline, [p.prompt for p in found]),
    )
    size = _bytes(target, pipeline, found[0], aux_hidden_layers) if stored else 4 * target.length

    def encode(images: Tensor) -> np.ndarray:
        return in_order(target, pipeline.model.codes(images).cpu()).numpy()

    def shard(some: Sequence[ExamplePrompt], rows: range, bar: Any) -> dict[str, Tensor]:
        tokens = _tokens(plan, pipeline, some, rows.start, bar, encode)
        return {
            "tokens": torch.as_tensor(tokens).int(),
            **(_features(live, tokens, np.array(rows), plan) if stored else {}),
        }

    return Examples(_written(plan, pipeline, found, identity, size, shard, together), pipeline, stored)


def make_continuous(plan: TrainingPlan, pipeline: ContinuousPipeline, together: Processes) -> Examples:
    """The same for a model of continuous tokens; tokens that the target draws have no spread."""
    target: Guided = pipeline.model.target
    found = pairs(plan, target.model.cfg.classes)
    names = ("temperature", "cfg_scale", "cfg_schedule", "diffusion_steps", "final_noise")
    identity = {name: plan.cfg[name] for name in names} if plan["source"] == "self" else {}

    def encode(images: Tensor) -> np.ndarray:
        return torch.stack(pipeline.model.token_distribution(images), 1).half().cpu().numpy()

    def shard(some: Sequence[ExamplePrompt], rows: range, bar: Any) -> dict[str, Tensor]:
        tokens = torch.as_tensor(_tokens(plan, pipeline, some, rows.start, bar, encode)).half()
        return {"tokens": tokens if tokens.dim() == 4 else torch.stack([tokens, torch.zeros_like(tokens)], 1)}

    size = 4 * target.length * target.dim
    return Examples(_written(plan, pipeline, found, identity, size, shard, together), pipeline, False)


def _written(
    plan: TrainingPlan,
    pipeline: Pipeline | ContinuousPipeline,
    found: Sequence[ExamplePrompt],
    more: Mapping[str, Any],
    size: int,
    shard: Callable[[Sequence[ExamplePrompt], range, Any], dict[str, Tensor]],
    together: Processes,
) -> list[Path]:
    """The files of the examples, written where they are missing. more: what of the examples' identity only these have;
    size: bytes of one; shard: returns the tensors of examples with these indices, and moves the progress bar."""
    of = _identity(plan, pipeline, found, more)
    each = max(1, min(SHARD, LARGEST // size))
    shards = [range(i, min(i + each, len(found))) for i in range(0, len(found), each)]
    folder = plan.examples
    folder.mkdir(parents=True, exist_ok=True)
    missing = [rows for rows in shards if not _is_there(_file(folder, rows, each), of, rows)]
    needed = sum(len(rows) for rows in missing) * size
    if missing and together.is_main_process:
        free = shutil.disk_usage(folder).free
        print(
            f"{len(found)} examples in {folder}: {sum(map(len, missing))} to make, {format_size(needed)}, of"
            f" {format_size(free)} free",
            flush=True,
        )
        if needed > free:
            raise UsageError(f"{folder} has room for {format_size(free)}, not {format_size(needed)}: use features=live")
    own = shards[together.process_index :: together.num_processes]  # of all: others may have made some by now
    mine = [rows for rows in own if rows in missing]
    with tqdm(total=sum(map(len, mine)), unit="example", desc="examples", disable=not mine) as bar:
        for rows in mine:
            some = [found[i] for i in rows]
            tensors = shard(some, rows, bar)
            meta = {
                "format": _FORMAT,
                "of": of,
                "first": str(rows.start),
                "prompts": json.dumps([p.prompt for p in some]),
            }
            write_atomically(_file(folder, rows, each), save(tensors, meta))
    together.wait_for_everyone()
    files = [_file(folder, rows, each) for rows in shards]
    if together.is_main_process and missing:
        listed = [{"file": f.name, "bytes": f.stat().st_size, "sha256": sha256_file(f)} for f in files]
        manifest = {"format": _FORMAT, "of": json.loads(of), "examples": len(found), "shards": listed}
        write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    return files


def _identity(
    plan: TrainingPlan,
    pipeline: Pipeline | ContinuousPipeline,
    found: Sequence[ExamplePrompt],
    more: Mapping[str, Any],
) -> str:
    """The identity of examples, in JSON: equal for equal examples."""
    cfg = plan.cfg
    names = sha256(json.dumps([[p.name, p.prompt] for p in found]), 12)
    identity = {name: cfg[name] for name in ("model", "reduced", "size", "dtype", "seed") if name in cfg}
    identity |= {"weights": pipeline.weights, "source": plan["source"], "examples": names}
    return json.dumps({**identity, **more}, sort_keys=True)


def _file(folder: Path, rows: range, each: int) -> Path:
    return folder / f"examples-{rows.start // each:05d}.safetensors"


def _is_there(path: Path, of: str, rows: range) -> bool:
    """Whether a shard is there and complete. UsageError where it is of other examples."""
    if not path.exists():
        return False
    try:
        with safe_open(path, framework="pt") as f:
            meta, complete = f.metadata() or {}, f.get_slice("tokens").get_shape()[0] == len(rows)
    except (SafetensorError, OSError):
        return False  # damaged: made again
    if meta.get("of") != of or not complete:
        raise UsageError(
            f"{path.parent} holds other examples ({_difference(meta.get('of', '{}'), of)}); give another examples= or"
            " out=, or remove that folder"
        )
    return True


def _difference(there: str, wanted: str) -> str:
    a, b = json.loads(there), json.loads(wanted)
    return (
        ", ".join(f"{k}: {a.get(k)}, not {b.get(k)}" for k in sorted({*a, *b}) if a.get(k) != b.get(k))
        or "their number"
    )


def _bytes(target: Language, pipeline: Pipeline, first: ExamplePrompt, aux_hidden_layers: tuple[int, ...]) -> int:
    """Of one example with its features."""
    prefix = len(target.condition(pipeline.encode([first.prompt]), False))
    positions = prefix - 1 + target.length
    width = target.block.dim * (1 + len(aux_hidden_layers))
    return positions * width * target.output.weight.element_size() + 4 * target.length + 5 * prefix


def _tokens(
    plan: TrainingPlan,
    pipeline: Pipeline | ContinuousPipeline,
    some: Sequence[ExamplePrompt],
    first: int,
    bar: Any,
    encode: Callable[[Tensor], np.ndarray],
) -> np.ndarray:
    """Tokens (n, ...) of examples, the first of which has index `first`: those that the target draws, or what `encode`
    returns of images (n, 3, H, W)."""
    batch = plan["decode_batch"]
    if plan["source"] == "self":
        keys = [(plan.cfg["seed"], first + i) for i in range(len(some))]
        drawn: dict[int, np.ndarray] = {}
        with torch.inference_mode():
            for done in pipeline.stream([p.prompt for p in some], keys, batch):
                drawn |= dict(zip(done.which, done.decoded.tokens.cpu().numpy(), strict=True))
                bar.update(len(done.which))
        return np.stack([drawn[i] for i in range(len(some))])
    model, parts = pipeline.model, []
    for i in range(0, len(some), batch):
        images = [image_files.center_crop(p.image(), model.resolution) for p in some[i : i + batch] if p.image]
        with torch.inference_mode():
            parts.append(encode(to_float(np.stack(images)).to(pipeline.device)))
        bar.update(len(images))
    return np.concatenate(parts)


def in_order(target: Language, codes: Tensor) -> Tensor:
    """Image tokens (N, T) int64 of codes (N, h * w): the grammar's own tokens between them, as a target draws them."""
    if target.grammar is None:
        return codes.long()
    tokens = target.grammar.forced.cpu().expand(len(codes), -1).clone()
    tokens[:, target.grammar.free.cpu()] = codes.long()
    return tokens


def _features(live: LiveDataset, tokens: np.ndarray, rows: np.ndarray, plan: TrainingPlan) -> dict[str, Tensor]:
    """Hidden states and prefixes of one shard; its prompts are dropped here, once for all epochs."""
    dropped = [np.random.default_rng([plan.cfg["seed"], int(i)]).uniform() < plan["dropout"] for i in rows]
    made: dict[str, list[Tensor]] = {"hidden": [], "ids": [], "valid": []}
    for i in range(0, len(rows), plan["decode_batch"]):
        part = slice(i, i + plan["decode_batch"])
        batch = live.of(tokens[part], rows[part], np.array(dropped[part]))
        made["hidden"].append(batch.hidden.cpu())
        made["ids"].append(_prefix_ids(batch).int().cpu())
        made["valid"].append(batch.valid.cpu())
    return {name: torch.cat(parts) for name, parts in made.items()}


def _prefix_ids(batch: Batch) -> Tensor:
    """The prefix's ids at positions 1 and on, (N, P - 1)."""
    return batch.ids[:, : batch.valid.shape[1] - 1]


class Encoded:
    """Conditioning of prompts, each encoded once and cached up to `room` bytes."""

    def __init__(self, pipeline: Pipeline, prompts: Sequence[str], room: int = 1 << 31) -> None:
        self.pipeline, self.prompts, self.room = pipeline, prompts, room
        self._cache: dict[int, Any] = {}

    def __call__(self, rows: np.ndarray) -> Any:
        new = [int(i) for i in rows if int(i) not in self._cache]
        fresh = self._encode(new) if new else {}
        each = [self._cache.get(int(i)) or fresh[int(i)] for i in rows]
        for i, one in fresh.items():
            size = sum(getattr(one, f.name).nbytes for f in fields(one))
            if size <= self.room:
                self._cache[i] = one
                self.room -= size
        columns = {f.name: torch.cat([getattr(one, f.name) for one in each]) for f in fields(each[0])}
        return type(each[0])(**{name: column.to(self.pipeline.device) for name, column in columns.items()})

    def _encode(self, rows: list[int]) -> dict[int, Any]:
        found = self.pipeline.encode([self.prompts[i] for i in rows])
        # clones: tensors made in inference mode cannot be trained on
        return {
            i: type(found)(**{f.name: getattr(found, f.name)[n : n + 1].clone().cpu() for f in fields(found)})
            for n, i in enumerate(rows)
        }


class Examples:
    """A folder's examples, in order."""

    def __init__(self, files: Sequence[Path], pipeline: Any, stored: bool) -> None:
        self.files, self.pipeline, self.stored = list(files), pipeline, stored
        tokens, prompts, self.starts = [], list[str](), [0]
        for path in self.files:
            with safe_open(path, framework="pt") as f:
                tokens.append(f.get_tensor("tokens").numpy())
                prompts += json.loads(f.metadata()["prompts"])
            self.starts.append(self.starts[-1] + len(tokens[-1]))
        self.tokens = np.concatenate(tokens)
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.tokens)

    def dataset(self, target: Language) -> Dataset:
        """The batches of training; `target`: with its hidden layers selected."""
        return _StoredDataset(self, target) if self.stored else self.live(target)

    def live(self, target: Language) -> LiveDataset:
        """Batches with or without their prompts, as asked for, whatever is stored."""
        return LiveDataset(target, self.tokens, Encoded(self.pipeline, self.prompts))

    def split(self, share: float) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the examples to train on and of those to validate on: the last ones."""
        held = min(len(self) - 1, max(1, math.ceil(share * len(self))))
        return np.arange(len(self) - held), np.arange(len(self) - held, len(self))


class _StoredDataset:
    """Hidden states from the shards. Their prompts were dropped when the shards were made."""

    def __init__(self, examples: Examples, target: Language) -> None:
        self.examples, self.target, self.device = examples, target, target.output.weight.device
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, rows: np.ndarray, drop: np.ndarray) -> Batch:
        shards = np.searchsorted(self.examples.starts, rows, side="right") - 1
        read = [self._read(int(s), int(row) - self.examples.starts[s]) for s, row in zip(shards, rows, strict=True)]
        hidden, ids, valid = (
            torch.cat([one[name] for one in read]).to(self.device) for name in ("hidden", "ids", "valid")
        )
        tokens = torch.as_tensor(self.examples.tokens[rows].astype(np.int64)).to(self.device)
        follow = torch.cat([ids.long(), self.target.ids(tokens[:, :-1])], 1)
        return Batch(tokens, hidden, follow, valid)

    def _read(self, shard: int, row: int) -> dict[str, Tensor]:
        if shard not in self._open:
            self._open[shard] = safe_open(self.examples.files[shard], framework="pt")
        f = self._open[shard]
        return {name: f.get_slice(name)[row : row + 1] for name in ("hidden", "ids", "valid")}
