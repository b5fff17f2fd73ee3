"""`specbench convert`: an EAGLE drafter from LANTERN's layout to this project's own format, or back."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.config import command_line, configuration, networks, registry
from specbench.errors import UsageError, parse_arguments, values
from specbench.models.eagle import EagleNetwork
from specbench.models.loading import checkpoints, drafters, naming, official
from specbench.storage import home
from specbench.storage.files import write_atomically

ARGUMENTS = {
    "drafter_weights": "folder of the drafter: LANTERN's files, config.json among them, or specbench.safetensors",
    "model": "the target that it was trained for",
    "out": "folder of the other layout: config.json and pytorch_model.bin, or specbench.safetensors",
    "reduced": "true for the reduced model of that name",
}
_HELP = """\
usage: specbench convert drafter_weights=DIR model=NAME out=DIR [reduced=true]

Writes an EAGLE drafter that is in LANTERN's layout in this project's own format, and one that is in this format in
LANTERN's layout, which its code reads. (Runs read both.)

  specbench convert drafter_weights=drafters/llamagen_xl/eagle model=llamagen_xl out=for_lantern

"""
_LANTERN = ("config.json", "pytorch_model.bin")


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status. Raises UsageError for bad arguments, and for a drafter that has no such layout."""
    line = parse_arguments("convert", arguments)
    if line.help:
        print(_HELP + "\n".join(f"  {name + '=':<17} {text}" for name, text in ARGUMENTS.items()))
        return 0
    given = values(line.arguments, ARGUMENTS)
    if absent := [name for name in ("drafter_weights", "model", "out") if name not in given]:
        raise UsageError(f"give {absent[0]}=, {ARGUMENTS[absent[0]]}")
    head, dtype = _read(given)
    out = home.expanded(given["out"])
    if drafters.own_file(home.expanded(given["drafter_weights"])) is None:
        checkpoints.save(head, out / networks.FILE, "eagle", dtype)
        print(f"{out / networks.FILE}: for drafter_weights={out}")
        return 0
    config, tensors = lantern(head, dtype)
    file = io.BytesIO()
    torch.save(tensors, file)
    for name, content in zip(_LANTERN, (json.dumps(config, indent=1).encode(), file.getvalue()), strict=True):
        write_atomically(out / name, content)
    print(f"{out}: {' and '.join(_LANTERN)}, as LANTERN's code reads them")
    return 0


def _read(given: dict[str, str]) -> tuple[EagleNetwork, torch.dtype]:
    """The drafter in float32, and the number format it was stored in. Only the target's shape is used."""
    known = ["reduced=true"] if given.get("reduced") == "true" else []
    arguments = [f"model={given['model']}", f"drafter_weights={command_line.quoted(given['drafter_weights'])}", *known]
    cfg = configuration.compose([*arguments, "weights=random", "method=eagle_chain", "device=cpu"])
    shape_alone = registry.source(cfg["model"]) is not None
    bundle = registry.find("model", cfg["model"])(cfg, torch.device("meta" if shape_alone else "cpu"), torch.float32)
    bundle.device = torch.device("cpu")
    head: EagleNetwork = bundle.drafter_network("eagle")
    stored = registry.drafter_files(Path(cfg["drafter_weights"]))
    return head, torch.bfloat16 if _is_bfloat16(stored) else torch.float16


def _is_bfloat16(files: Sequence[Path]) -> bool:
    weights = [file for file in files if file.suffix in (".safetensors", ".bin")]
    return any(info.dtype == torch.bfloat16 for file in weights for info in official.open_source(file).tensors.values())


def lantern(head: EagleNetwork, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor]]:
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
