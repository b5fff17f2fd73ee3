"""EAGLE drafters in LANTERN's layout (reference manifests of its drafters) and in this project's own format."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.config import networks, registry
from specbench.errors import UsageError
from specbench.models.eagle import EagleNetwork
from specbench.models.loading import checkpoints, drafters, naming, official
from specbench.storage.files import write_atomically

FILES = ("config.json", "pytorch_model.bin")


def converted(cfg: Mapping[str, Any], out: Path) -> list[Path]:
    """Writes the EAGLE drafter at drafter_weights= of a run's configuration in the other layout, into the folder `out`:
    its files. Of the target, only the shape is used. UsageError for a drafter that has no such layout."""
    head, dtype = _read(cfg)
    if drafters.own_file(Path(cfg["drafter_weights"])) is None:
        checkpoints.save(head, out / networks.FILE, "eagle", dtype)
        return [out / networks.FILE]
    config, tensors = exported(head, dtype)
    file = io.BytesIO()
    torch.save(tensors, file)
    for name, content in zip(FILES, (json.dumps(config, indent=1).encode(), file.getvalue()), strict=True):
        write_atomically(out / name, content)
    return [out / name for name in FILES]


def _read(cfg: Mapping[str, Any]) -> tuple[EagleNetwork, torch.dtype]:
    """The drafter in float32, and the number format it was stored in."""
    shape_alone = cfg["model"] in registry.model_sources()
    bundle = registry.find("model", cfg["model"])(cfg, torch.device("meta" if shape_alone else "cpu"), torch.float32)
    bundle.device = torch.device("cpu")
    head: EagleNetwork = bundle.drafter_network("eagle")
    stored = [
        file for file in registry.drafter_files(Path(cfg["drafter_weights"])) if file.suffix in (".safetensors", ".bin")
    ]
    dtypes = {info.dtype for file in stored for info in official.open_source(file).tensors.values()}
    return head, torch.bfloat16 if torch.bfloat16 in dtypes else torch.float16


def exported(head: EagleNetwork, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors of LANTERN's layout (reference manifests of its drafters). UsageError for a drafter
    on several layers, which has no such layout."""
    c = head.cfg
    if c.aux_hidden_layers:
        raise UsageError("LANTERN's layout cannot hold a drafter that reads several layers of its target")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": c.dim,
        "intermediate_size": c.ffn_hidden,
        "num_attention_heads": c.n_head,
        "num_key_value_heads": c.block.n_kv_heads,
        "num_hidden_layers": c.n_layer,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_base,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if not c.fc_bias:
        config["bias"] = False
    tensors = official.exported(head, naming.eagle(c.block, c.input_norm, c.n_layer, c.fc_bias))
    return config, {name: tensor.to(dtype) for name, tensor in tensors.items()}
