"""Training examples of drafters on disk: sequences of tokens with their prompts, and the target's hidden states.

A folder has shards, examples-00000.safetensors and so on, which are written atomically. A shard contains tokens (n, T)
int32 and, if features are stored, hidden (n, P - 1 + T, width) in the target's dtype, and ids (n, P) int32 and valid
(n, P) bool of the prefix. The shard's metadata have its prompts, the index of its first example and the identity of the
examples. When all shards exist, manifest.json lists them with their digests. After an interruption, the same command
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
from specbench.harness.pipeline import Pipeline
from specbench.models.language import Language
from specbench.models.pixels import to_float
from specbench.models.supervision import Batch
from specbench.storage import image_files
from specbench.storage.files import format_size, sha256, sha256_file, write_atomically
from specbench.training.dataset import Dataset, LiveDataset
from specbench.training.example_prompts import ExamplePrompt, pairs
from specbench.training.recipes import TrainingPlan
from specbench.training.trainer import Processes

SHARD = 256  # maximal number of examples in a shard
LARGEST = 1 << 28  # maximal size of a shard in bytes
MANIFEST = "manifest.json"
_FORMAT = "specbench-examples-1"


def make(
    plan: TrainingPlan, pipeline: Pipeline, aux_hidden_layers: tuple[int, ...], process_group: Processes
) -> Examples:
    """The examples of a plan. Missing examples are made; several processes share the work.

    Raises UsageError if the folder contains other examples, or if the disk is too small.
    """
    target: Language = pipeline.model.target
    classes = int(getattr(getattr(target, "cfg", None), "num_classes", 0))
    prompts = pairs(plan, classes)
    stored = plan["features"] == "stored"
    identity: dict[str, Any] = {}
    if plan["source"] == "self":
        identity = {name: plan.cfg.own[name] for name in ("temperature", "top_k", "top_p", "cfg_scale")}
        for name in ("entropy_temperature", "top_n_sigma"):
            if value := plan.cfg.get(name):
                identity[name] = value
    if stored:
        identity |= {"aux_hidden_layers": list(aux_hidden_layers), "dropout": plan["dropout"]}
    live = LiveDataset(
        target.with_aux_hidden_layers(aux_hidden_layers),
        np.zeros((0, target.length)),
        Encoded(pipeline, [p.prompt for p in prompts]),
    )
    size = bytes_each(target, pipeline.encode, prompts[0].prompt, len(aux_hidden_layers) if stored else None)

    def encode(images: Tensor) -> np.ndarray:
        return in_order(target, pipeline.model.codes(images).cpu()).numpy()

    def shard(part: Sequence[ExamplePrompt], rows: range, bar: Any) -> dict[str, Tensor]:
        tokens = _tokens(plan, pipeline, part, rows.start, bar, encode)
        return {
            "tokens": torch.as_tensor(tokens).int(),
            **(_features(live, tokens, np.array(rows), plan) if stored else {}),
        }

    return Examples(_write(plan, pipeline, prompts, identity, size, shard, process_group), pipeline, stored)


def _write(
    plan: TrainingPlan,
    pipeline: Pipeline,
    prompts: Sequence[ExamplePrompt],
    extra: Mapping[str, Any],
    size: int,
    shard: Callable[[Sequence[ExamplePrompt], range, Any], dict[str, Tensor]],
    process_group: Processes,
) -> list[Path]:
    """The files of the examples; missing files are written.

    extra: further parts of the examples' identity; size: bytes per example; shard: returns the tensors of these
    examples and advances the progress bar.
    """
    identity = _identity(plan, pipeline, prompts, extra)
    per_shard = max(1, min(SHARD, LARGEST // size))
    shards = [range(i, min(i + per_shard, len(prompts))) for i in range(0, len(prompts), per_shard)]
    folder = plan.examples
    folder.mkdir(parents=True, exist_ok=True)
    missing = [rows for rows in shards if not _exists(_file(folder, rows, per_shard), identity, rows)]
    bytes_needed = sum(len(rows) for rows in missing) * size
    if missing and process_group.is_main_process:
        free = shutil.disk_usage(folder).free
        print(
            f"{len(prompts)} examples in {folder}: {sum(map(len, missing))} to make, {format_size(bytes_needed)}, of"
            f" {format_size(free)} free",
            flush=True,
        )
        if bytes_needed > free:
            raise UsageError(
                f"{folder} has {format_size(free)} of free space, not {format_size(bytes_needed)}: use features=live"
            )
    # This process's share of all shards, not of the missing ones: other processes may already have made some.
    share = shards[process_group.process_index :: process_group.num_processes]
    todo = [rows for rows in share if rows in missing]
    with tqdm(total=sum(map(len, todo)), unit="example", desc="examples", disable=not todo) as bar:
        for rows in todo:
            part = [prompts[i] for i in rows]
            tensors = shard(part, rows, bar)
            metadata = {
                "format": _FORMAT,
                "of": identity,
                "first": str(rows.start),
                "prompts": json.dumps([p.prompt for p in part]),
            }
            write_atomically(_file(folder, rows, per_shard), save(tensors, metadata))
    process_group.wait_for_everyone()
    files = [_file(folder, rows, per_shard) for rows in shards]
    if process_group.is_main_process and missing:
        listed = [{"file": f.name, "bytes": f.stat().st_size, "sha256": sha256_file(f)} for f in files]
        manifest = {"format": _FORMAT, "of": json.loads(identity), "examples": len(prompts), "shards": listed}
        write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    return files


def _identity(
    plan: TrainingPlan,
    pipeline: Pipeline,
    prompts: Sequence[ExamplePrompt],
    extra: Mapping[str, Any],
) -> str:
    """The identity of the examples, as JSON: equal for equal examples."""
    cfg = plan.cfg
    names = sha256(json.dumps([[p.name, p.prompt] for p in prompts]), 12)
    identity = {name: cfg.get(name) for name in ("model", "reduced", "size", "dtype", "seed") if name in cfg}
    identity |= {"weights": pipeline.weights, "source": plan["source"], "examples": names}
    return json.dumps({**identity, **extra}, sort_keys=True)


def _file(folder: Path, rows: range, per_shard: int) -> Path:
    return folder / f"examples-{rows.start // per_shard:05d}.safetensors"


def _exists(path: Path, identity: str, rows: range) -> bool:
    """Whether a shard exists and is complete. Raises UsageError if it belongs to other examples."""
    if not path.exists():
        return False
    try:
        with safe_open(path, framework="pt") as f:
            metadata, complete = f.metadata() or {}, f.get_slice("tokens").get_shape()[0] == len(rows)
    except (SafetensorError, OSError):
        return False  # damaged: made again
    if metadata.get("of") != identity or not complete:
        raise UsageError(
            f"{path.parent} contains other examples ({_difference(metadata.get('of', '{}'), identity)});"
            " give another examples= or out=, or remove that folder"
        )
    return True


def _difference(stored: str, requested: str) -> str:
    a, b = json.loads(stored), json.loads(requested)
    return (
        ", ".join(f"{k}: {a.get(k)}, not {b.get(k)}" for k in sorted({*a, *b}) if a.get(k) != b.get(k))
        or "their number"
    )


def bytes_each(target: Language, encode: Callable[[list[str]], Any], prompt: str, aux_hidden_layers: int | None) -> int:
    """Size of one example: its tokens and, unless the number of `aux_hidden_layers` is None, its features."""
    if aux_hidden_layers is None:
        return 4 * target.length
    prefix = len(target.condition(encode([prompt]), False))
    width = target.block.dim * (1 + aux_hidden_layers)
    features = (prefix - 1 + target.length) * width * target.output.weight.element_size()
    return features + 4 * target.length + 5 * prefix


def held_out(count: int, share: float) -> int:
    """How many of `count` examples are for validation."""
    return min(count - 1, max(1, math.ceil(share * count)))


def _tokens(
    plan: TrainingPlan,
    pipeline: Pipeline,
    prompts: Sequence[ExamplePrompt],
    first: int,
    bar: Any,
    encode: Callable[[Tensor], np.ndarray],
) -> np.ndarray:
    """Tokens (n, ...) of the examples `first`, `first` + 1, ...: drawn by the target, or the result of `encode` on
    their images (n, 3, H, W)."""
    batch = plan["decode_batch"]
    if plan["source"] == "self":
        keys = [(plan.cfg.seed, first + i) for i in range(len(prompts))]
        drawn: dict[int, np.ndarray] = {}
        with torch.inference_mode():
            for finished in pipeline.stream([p.prompt for p in prompts], keys, batch):
                drawn |= dict(zip(finished.which, finished.decoded.tokens.cpu().numpy(), strict=True))
                bar.update(len(finished.which))
        return np.stack([drawn[i] for i in range(len(prompts))])
    model, parts = pipeline.model, []
    for i in range(0, len(prompts), batch):
        images = [image_files.center_crop(p.image(), model.resolution) for p in prompts[i : i + batch] if p.image]
        with torch.inference_mode():
            parts.append(encode(to_float(np.stack(images)).to(pipeline.device)))
        bar.update(len(images))
    return np.concatenate(parts)


def in_order(target: Language, codes: Tensor) -> Tensor:
    """Image tokens (N, T) int64 of codes (N, h * w), with the grammar's tokens between them, as a target draws them."""
    if target.grammar is None:
        return codes.long()
    tokens = target.grammar.forced.cpu().expand(len(codes), -1).clone()
    tokens[:, target.grammar.free.cpu()] = codes.long()
    return tokens


def _features(live: LiveDataset, tokens: np.ndarray, rows: np.ndarray, plan: TrainingPlan) -> dict[str, Tensor]:
    """Hidden states and prefixes of one shard. Its prompts are dropped here, once for all epochs."""
    dropped = [np.random.default_rng([plan.cfg.seed, int(i)]).uniform() < plan["dropout"] for i in rows]
    tensors: dict[str, list[Tensor]] = {"hidden": [], "ids": [], "valid": []}
    for i in range(0, len(rows), plan["decode_batch"]):
        part = slice(i, i + plan["decode_batch"])
        batch = live.batch_of(tokens[part], rows[part], np.array(dropped[part]))
        tensors["hidden"].append(batch.hidden.cpu())
        tensors["ids"].append(_prefix_ids(batch).int().cpu())
        tensors["valid"].append(batch.valid.cpu())
    return {name: torch.cat(parts) for name, parts in tensors.items()}


def _prefix_ids(batch: Batch) -> Tensor:
    """The ids (N, P - 1) of the prefix, from its second position."""
    return batch.ids[:, : batch.valid.shape[1] - 1]


class Encoded:
    """Conditioning of prompts. A prompt is encoded once; at most `room` bytes are cached.

    The cache is one tensor per field. Small tensors of their own, between the activations of a training, would split
    the memory of the process into parts that are too small to be used again: 5 MB per step on a CPU.
    """

    def __init__(self, pipeline: Pipeline, prompts: Sequence[str], room: int = 1 << 31) -> None:
        self.pipeline, self.prompts, self.room = pipeline, prompts, room
        self._slots: dict[int, int] = {}  # prompt -> its row of the cache
        self._cache: dict[str, Tensor] = {}

    def __call__(self, rows: np.ndarray) -> Any:
        indices = [int(i) for i in rows]
        new = [i for i in dict.fromkeys(indices) if i not in self._slots]
        fresh = self._encode(new) if new else {}
        columns = {
            name: torch.stack(
                [fresh[name][new.index(i)] if i in new else self._cache[name][self._slots[i]] for i in indices]
            )
            for name in fresh or self._cache
        }
        self._keep(new, fresh)
        return self._conditioning(**{name: column.to(self.pipeline.device) for name, column in columns.items()})

    def _encode(self, rows: list[int]) -> dict[str, Tensor]:
        encoded = self.pipeline.encode([self.prompts[i] for i in rows])
        self._conditioning: Any = type(encoded)
        # cloned, because tensors made in inference mode cannot be used for training
        return {f.name: getattr(encoded, f.name).clone().cpu() for f in fields(encoded)}

    def _keep(self, rows: list[int], fresh: dict[str, Tensor]) -> None:
        if fresh and not self._cache:
            most = self.room // sum(column[0].nbytes for column in fresh.values())
            kept = min(len(self.prompts), most)
            self._cache = {name: column.new_empty(kept, *column.shape[1:]) for name, column in fresh.items()}
        for n, i in enumerate(rows):
            if len(self._slots) < len(next(iter(self._cache.values()))):
                for name, column in fresh.items():
                    self._cache[name][len(self._slots)] = column[n]
                self._slots[i] = len(self._slots)


class Examples:
    """The examples of a folder, in order."""

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
        """The batches of training. target: with its hidden layers selected."""
        return _StoredDataset(self, target) if self.stored else self.live(target)

    def live(self, target: Language) -> LiveDataset:
        """Batches with or without their prompts, as requested; stored features are not used."""
        return LiveDataset(target, self.tokens, Encoded(self.pipeline, self.prompts))

    def split(self, share: float) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the training examples and of the validation examples, which are the last ones."""
        trained = len(self) - held_out(len(self), share)
        return np.arange(trained), np.arange(trained, len(self))


class _StoredDataset:
    """Reads hidden states from the shards. Prompts were dropped when the shards were made."""

    def __init__(self, examples: Examples, target: Language) -> None:
        self.examples, self.target, self.device = examples, target, target.output.weight.device
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, rows: np.ndarray, drop: np.ndarray) -> Batch:
        shards = np.searchsorted(self.examples.starts, rows, side="right") - 1
        examples = [self._read(int(s), int(row) - self.examples.starts[s]) for s, row in zip(shards, rows, strict=True)]
        hidden, ids, valid = (
            torch.cat([example[name] for example in examples]).to(self.device) for name in ("hidden", "ids", "valid")
        )
        tokens = torch.as_tensor(self.examples.tokens[rows].astype(np.int64)).to(self.device)
        follow = torch.cat([ids.long(), self.target.ids(tokens[:, :-1])], 1)
        return Batch(tokens, hidden, follow, valid)

    def _read(self, shard: int, row: int) -> dict[str, Tensor]:
        if shard not in self._open:
            self._open[shard] = safe_open(self.examples.files[shard], framework="pt")
        f = self._open[shard]
        return {name: f.get_slice(name)[row : row + 1] for name in ("hidden", "ids", "valid")}
