"""A command of specbench in a rehearsal: `python command.py full|small ARGUMENT...`.

Evaluators' files are those that were made here, not the published ones; with `small`, CLIP, HPS and ImageReward are
small networks of the same make. With the arguments `load` and parameters of a run, the networks of that run are loaded,
and nothing else is done.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

from specbench import cli
from specbench.config import registry
from specbench.storage import home
from specbench.storage.files import cached_sha256


@contextmanager
def evaluators(small: bool) -> Iterator[None]:
    """The evaluators' sizes and checksums, for the time of a command."""
    from specbench.metrics import blip, inception, towers

    vision = {"image_size": 48, "layers": 2, "width": 64, "patch_size": 16}
    text = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    tower = {"embed_dim": 24, "quick_gelu": True, "vision_cfg": vision, "text_cfg": text}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    weights = home.metrics_folder() / "inception" / inception.FILES[0]
    unpinned = {name: replace(part, sha256={}) for name, part in registry.evaluators().items()}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(registry.evaluators(), unpinned))
        if weights.is_file():
            stack.enter_context(mock.patch.object(inception, "SHA256", cached_sha256(weights)))
        if small:
            for patch in (
                mock.patch.object(towers, "config", return_value=tower),
                mock.patch.dict(blip.VISION, {**sizes, "image_size": 32, "patch_size": 8}),
                mock.patch.dict(blip.TEXT, {**sizes, "vocab_size": 102, "max_position_embeddings": 40}),
                mock.patch.object(blip, "HEAD", (10, 8, 6, 4, 1)),
            ):
                stack.enter_context(patch)
        yield


def load(arguments: list[str]) -> int:
    """Loads the networks of a run and prints their bytes."""
    import gc

    import torch

    from specbench.config import configuration
    from specbench.harness.pipeline import Pipeline

    def tensors() -> list[torch.Tensor]:  # isinstance() would wake deprecated objects of torch
        return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]

    before = {id(tensor) for tensor in tensors()}
    pipeline = Pipeline.load(configuration.compose(arguments))
    storages = [t.untyped_storage() for t in tensors() if id(t) not in before and not t.is_meta]
    bytes_by_storage = {storage.data_ptr(): storage.nbytes() for storage in storages}
    print(f"loaded {sum(bytes_by_storage.values())} bytes of {pipeline.name}")
    return 0


def main(arguments: list[str]) -> int:
    scale, command, *more = arguments
    with evaluators(scale == "small"):
        return load(more) if command == "load" else cli.main([command, *more])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
