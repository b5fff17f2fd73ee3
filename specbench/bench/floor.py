"""The memory floor of a step: bytes that must be read, over the measured bandwidth of this device.

Every weight of a network is read once for each of its passes, whatever the number of rows and nodes, and every cached
key and value up to the step's position once for the target's pass. Embedding tables do not count: only rows are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from specbench.decoding.drafters.draft_model import DraftModel
from specbench.decoding.drafters.eagle import Entries
from specbench.decoding.drafters.medusa import Medusa
from specbench.models.language import Language
from specbench.models.mar import MAR


def nbytes(*modules: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for module in modules for p in module.parameters())


def of_target(model: Language) -> int:
    """Bytes of weights that a pass of the target reads."""
    return nbytes(model.layers, model.norm, *model.head_layers)


def of_drafts(drafter: Any, target: Language) -> int:
    """Bytes of weights that drafting for one step reads, in all of its passes; EAGLE's use the target's head."""
    if isinstance(drafter, Entries):
        head = drafter.head
        own = [head.norm] if drafter.aux_hidden_layers else []
        once = nbytes(head.fuse) if drafter.aux_hidden_layers else 0
        return once + drafter.shape.passes * nbytes(head.fc, head.layers, *own, *target.head_layers)
    if isinstance(drafter, Medusa):
        return nbytes(*drafter.heads.medusa_head[: drafter.shape.height])
    if isinstance(drafter, DraftModel):
        return drafter.shape.passes * of_target(drafter.model)
    return 0


def passes(target: Any, drafter: Any) -> list[tuple[nn.Module, str]]:
    """The methods that are a step's passes of networks, the drafter's included, and their owners."""
    networks: list[tuple[nn.Module, str]] = [(target, "hidden"), (target, "head")]
    if isinstance(drafter, Entries):
        networks.append((drafter.head, "hidden"))
    if isinstance(drafter, Medusa):
        networks.append((drafter.heads, "forward"))
    if isinstance(drafter, DraftModel):
        networks += [(drafter.model, "hidden"), (drafter.model, "head")]
    return networks


def of_cache(model: Language, rows: int, context: int) -> int:
    """Bytes of keys and values that a pass reads: of `rows` sequences of `context` positions."""
    b = model.block
    return 2 * len(model.layers) * rows * b.n_kv_heads * b.head_dim * context * model.output.weight.element_size()


def operations(model: Language, rows: int, context: int) -> int:
    """Floating-point operations of a pass for each node: two per weight, and attention over the positions before."""
    weights = of_target(model) // model.output.weight.element_size()
    return rows * (2 * weights + 4 * len(model.layers) * model.block.n_heads * model.block.head_dim * context)


def of_head(model: MAR) -> int:
    """Bytes of weights that one diffusion step of the head reads. The embeddings of step and condition do not depend on
    the state, and so are not part of the step."""
    net = model.diffloss.net
    return nbytes(net.input_proj, net.final_layer.linear) + sum(
        nbytes(block.get_submodule("mlp")) for block in net.res_blocks
    )


def of_encoder_decoder(model: MAR) -> int:
    """Bytes of weights that a pass of encoder and decoder reads."""
    blocks: Iterable[nn.Module] = (*model.encoder_blocks, *model.decoder_blocks)
    return nbytes(model.z_proj, model.decoder_embed, *blocks)


def seconds(call: Callable[[], object], device: torch.device, least: float = 0.05, samples: int = 7) -> list[float]:
    """Seconds of a call, sampled: each sample repeats it until `least` seconds are spent. On CUDA the host waits at a
    sample's end only."""

    def once(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once(2)
    times = max(1, round(least / max(once(1), 1e-7)))
    return [once(times) / times for _ in range(samples)]


def bandwidth(device: torch.device) -> float:
    """Bytes a second read from memory: of the best of several sums over a buffer far larger than any cache."""
    size = (4 << 30 if device.type == "cuda" else 1 << 29) // 4
    buffer = torch.ones(size, device=device)
    into = torch.empty((), device=device)
    return 4 * size / min(seconds(lambda: torch.sum(buffer, dim=0, out=into), device))


def arithmetic(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second, of the best of several products of square matrices."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.ones(n, n, device=device, dtype=dtype) for _ in "ab")
    c: Tensor = torch.empty_like(a)
    return 2 * n**3 / min(seconds(lambda: torch.mm(a, b, out=c), device))
