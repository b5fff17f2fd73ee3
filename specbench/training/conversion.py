"""`specbench convert`: converts an EAGLE drafter from specbench's format to LANTERN's layout, and back."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch

from specbench.config import registry
from specbench.config.run_config import RunConfig
from specbench.models.eagle import EagleNetwork
from specbench.models.loading import checkpoints, drafter_networks
from specbench.models.loading.official import open_source
from specbench.storage.files import write_atomically

#: The files of an EAGLE drafter in LANTERN's layout.
LANTERN_FILES = ("config.json", "pytorch_model.bin")


def converted(cfg: RunConfig, out: Path) -> list[Path]:
    """Writes the EAGLE drafter at drafter_weights= of a run's configuration in the other layout into the folder `out`.
    Returns the files. Only the shape of the target is used. Raises UsageError for other drafters."""
    head, dtype = _stored(cfg)
    if drafter_networks.specbench_file(_path(cfg)) is None:
        checkpoints.save(head, out / registry.DRAFTER_FILE, "eagle", dtype)
        return [out / registry.DRAFTER_FILE]
    config, tensors = drafter_networks.exported(head, dtype)
    file = io.BytesIO()
    torch.save(tensors, file)
    for name, content in zip(LANTERN_FILES, (json.dumps(config, indent=1).encode(), file.getvalue()), strict=True):
        write_atomically(out / name, content)
    return [out / name for name in LANTERN_FILES]


def _path(cfg: RunConfig) -> Path:
    assert cfg.drafter_weights is not None  # the command requires it
    return Path(cfg.drafter_weights)


def _stored(cfg: RunConfig) -> tuple[EagleNetwork, torch.dtype]:
    """The drafter in float32, and the dtype of its file."""
    shape_alone = cfg.model in registry.model_sources()
    bundle = registry.find("model", cfg.model)(cfg, torch.device("meta" if shape_alone else "cpu"), torch.float32)
    bundle.device = torch.device("cpu")
    head: EagleNetwork = bundle.drafter_network("eagle")
    stored = [file for file in registry.drafter_files(_path(cfg)) if file.suffix in (".safetensors", ".bin")]
    dtypes = {info.dtype for file in stored for info in open_source(file).tensors.values()}
    return head, torch.bfloat16 if torch.bfloat16 in dtypes else torch.float16
