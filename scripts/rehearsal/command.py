"""A command of specbench in a rehearsal: the checksums of published files are replaced by the checksums of the files
made here.

python command.py REPLACED.json ARGUMENT...

REPLACED.json: "files" (repository -> file -> size, sha256, md5), "data" (data set -> address, size and sha256 of each
file), "releases" (the server of GitHub's releases), "inception" (the SHA-256 of its weights), "small" (whether the
evaluators are small networks). specbench itself has no way to leave a checksum out. With the arguments `load` and
parameters of a run, the networks of that run are loaded, and nothing else is done.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from specbench import cli
from specbench.config import registry
from specbench.storage import downloads, sources


@contextmanager
def replaced(tables: Mapping[str, Any]) -> Iterator[None]:
    """The tables of checksums and addresses, and the sizes of small evaluators, for the time of a command."""
    with ExitStack() as stack:
        put = lambda place, values: stack.enter_context(mock.patch.dict(place, values))  # noqa: E731
        files = tables["files"]
        put(registry.evaluators(), {name: _part(part, files) for name, part in registry.evaluators().items()})
        put(registry.model_sources(), {name: _model(entry, files) for name, entry in registry.model_sources().items()})
        for name, served in tables["data"].items():
            data = registry.data_sources()[name]
            new = tuple(replace(file, **changes) for file, changes in zip(data.files, served, strict=True))
            put(registry.data_sources(), {name: replace(data, files=new)})
        stack.enter_context(mock.patch.object(downloads, "RELEASES", tables["releases"]))
        if tables["inception"]:
            from specbench.metrics import inception

            stack.enter_context(mock.patch.object(inception, "SHA256", tables["inception"]))
        if tables["small"]:
            stack.enter_context(small_evaluators())
        yield


def _model(entry: sources.ModelSource, files: Mapping[str, Any]) -> sources.ModelSource:
    parts = {name: _part(part, files) for name, part in entry.parts.items()}
    return replace(entry, parts=parts, drafters={name: _part(part, files) for name, part in entry.drafters.items()})


def _part(part: sources.Part, files: Mapping[str, Any]) -> sources.Part:
    """The part with the checksums and sizes of the made files, where it had some."""
    made_files = {Path(name).name: file for name, file in files.get(part.repository, {}).items()}
    if not made_files:
        return part
    changes = {
        kind: {name: made_files[name][key] for name in getattr(part, kind) if name in made_files}
        for kind, key in (("md5", "md5"), ("sha256", "sha256"), ("sizes", "size"))
    }
    return replace(part, **changes)


@contextmanager
def small_evaluators() -> Iterator[None]:
    """CLIP, HPS and ImageReward as small networks of the same make."""
    from specbench.metrics import blip, towers

    tower = {"embed_dim": 24, "quick_gelu": True}
    vision = {"image_size": 48, "layers": 2, "width": 64, "patch_size": 16}
    text = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    config = {**tower, "vision_cfg": vision, "text_cfg": text}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(towers, "config", return_value=config))
        stack.enter_context(mock.patch.dict(blip.VISION, {**sizes, "image_size": 32, "patch_size": 8}))
        stack.enter_context(mock.patch.dict(blip.TEXT, {**sizes, "vocab_size": 102, "max_position_embeddings": 40}))
        stack.enter_context(mock.patch.object(blip, "HEAD", (10, 8, 6, 4, 1)))
        yield


def load(arguments: list[str]) -> int:
    """Loads the networks of a run and prints their bytes."""
    import gc

    import torch

    from specbench.config import configuration
    from specbench.harness.pipeline import Pipeline

    cfg = configuration.compose(arguments)

    def tensors() -> list[torch.Tensor]:  # isinstance() would wake deprecated objects of torch
        return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]

    before = {id(tensor) for tensor in tensors()}
    pipeline = Pipeline.load(cfg)
    storages = [t.untyped_storage() for t in tensors() if id(t) not in before and not t.is_meta]
    bytes_by_storage = {storage.data_ptr(): storage.nbytes() for storage in storages}
    print(f"loaded {sum(bytes_by_storage.values())} bytes of {pipeline.name}")
    return 0


def main(arguments: list[str]) -> int:
    tables = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    with replaced(tables):
        return load(arguments[2:]) if arguments[1] == "load" else cli.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
