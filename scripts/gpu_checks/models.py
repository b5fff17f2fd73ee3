"""Targets, drafters and rules of the real sizes with random weights, without configuration files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from specbench.decoding.drafters.draft_model import DraftModel
from specbench.decoding.drafters.dynamic import Eagle2
from specbench.decoding.drafters.eagle import Eagle
from specbench.decoding.drafters.medusa import Medusa
from specbench.decoding.drafters.none import NoDraft, ZipAR
from specbench.decoding.drafters.pac_window import PACWindow
from specbench.decoding.drafters.pathspec import PathWindow
from specbench.decoding.drafters.pjd import ParallelJacobi
from specbench.decoding.drafters.sjd_window import SJDWindow
from specbench.decoding.drafters.vvs import VVS
from specbench.decoding.drafters.window import Window
from specbench.decoding.loop import DecoderConfig
from specbench.decoding.rules import Band, Mentored, Rule, cool, exact, uniform
from specbench.decoding.rules.groups import Grouped, Neighbourhood
from specbench.decoding.rules.lantern import Lantern
from specbench.decoding.rules.relaxed import Redraw
from specbench.decoding.rules.thresholds import Typical
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import chain_paths, parse
from specbench.engine.graph import Action
from specbench.models.eagle import EagleNetwork, like_shape
from specbench.models.llamagen import Conditioning, LlamaGen, LlamaGenConfig
from specbench.models.medusa import MedusaConfig, MedusaNetwork
from specbench.models.unified import Prompts, Unified, UnifiedConfig, image_tokens

#: LlamaGen-XL; Lumina-mGPT 7B at 768 pixels (Chameleon); Emu3 8B.
TARGETS = ("xl", "7b", "emu3")
SAMPLING = {
    "xl": Sampling(1.0, 1000, cfg_scale=7.5),
    "7b": Sampling(1.0, 2000, cfg_scale=4.0),
    "emu3": Sampling(1.0, 2048, cfg_scale=3.0),
}
PROMPT = {"xl": 120, "7b": 192, "emu3": 192}
DRAFTERS = (
    "none",
    "chain",
    "tree",
    "eagle2",
    "vvs",
    "medusa",
    "draft_model",
    "jacobi",
    "sjd",
    "sjd_vertical",
    "scd",
    "sjd_pac",
    "pathspec",
)
#: The tree that begins a window of SJD-PAC, of the real size and of a small one.
PAC = ((4, 3), (2, 2))
#: Those out of raster order.
PARALLEL = ("zipar", "pjd")


def _target(name: str, layers: int, small: bool, side: int | None) -> nn.Module:
    if name == "xl":
        cut = {"dim": 8, "n_head": 1, "ffn_hidden": 8, "vocab_size": 13, "block_size": 4, "caption_dim": 8}
        sizes = {**cut, "cls_token_num": 3} if small else {} if side is None else {"block_size": side * side}
        return LlamaGen(LlamaGenConfig(n_layer=layers, **sizes))
    with torch.device("cpu"):  # tables of token ids, never on the meta device
        if small:
            image, shape = (
                image_tokens(torch.arange(12), 2, 2, 12, [13]),
                (16, layers, 2, 1, 16, 20) if name == "emu3" else (8, layers, 1, 1, 8, 20),
            )
        elif name == "7b":
            image, shape = (
                image_tokens(torch.arange(4, 8196), side or 48, side or 48, 8803, [8196]),
                (4096, layers, 32, 32, 11008, 65536),
            )
        else:
            codes = torch.arange(151854, 184622)
            image = image_tokens(codes, side or 90, side or 90, 151846, [151847, 151853, 151850])
            shape = (4096, layers, 32, 8, 14336, 184622)
    return Unified(UnifiedConfig(*shape, qk_norm=int(name == "7b")), image)


def near(size: int, count: int = 8) -> Tensor:
    """Neighbours (size, count) of codes: the codes that follow each one."""
    return (torch.arange(size)[:, None] + torch.arange(1, count + 1)) % size


RULES: Mapping[str, Callable[[int], Rule]] = {
    "uniform": lambda size: uniform(0.8),
    "cool": lambda size: cool(1.3, 3),
    "band": lambda size: Band(0.45, 0.5, 3),
    "mentored": lambda size: Mentored(0.05),
    "lantern": lambda size: Lantern("lantern", near(size), 4, "tvd", 0.2),
    "lantern, released": lambda size: Lantern("lantern", near(size), 4, "jsd", 0.2, "released"),
    "lantern, optimal": lambda size: Lantern("lantern_pp", near(size), 4, "total", 2.0, "optimal"),
    "neighbourhood": lambda size: Neighbourhood(near(size), "optimal"),
    "gsd": lambda size: Grouped(torch.arange(size)[:, None] / 8, 6),
    "typical": lambda size: Typical(),
    "redraw": lambda size: Redraw(),
}


def made(build: Callable[[], nn.Module], device: str, dtype: torch.dtype) -> Any:
    """A network with random weights, created on its device and not in the memory of the host."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            network = build()
    finally:
        torch.set_default_dtype(before)
    return network.to(device).eval().requires_grad_(False)  # tensors that were made on the host on purpose move, too


def target(
    name: str, device: str, dtype: torch.dtype, layers: int, small: bool = False, side: int | None = None
) -> Any:
    """One of `TARGETS` with this number of layers; small: at a size for Triton's interpreter; side: rows and columns of
    an image, if they differ from the real model's."""
    return made(lambda: _target(name, layers, small, side), device, dtype)


def conditioning(name: str, images: int, device: str, dtype: torch.dtype, small: bool = False) -> Any:
    """The conditioning of images of `target(name)`; without padding for LlamaGen, padded for others."""
    length = 3 if small else PROMPT[name]
    valid = torch.ones(images, length, dtype=torch.bool)
    if name == "xl":
        features = torch.randn(images, length, 8 if small else 2048, generator=torch.Generator().manual_seed(images))
        return Conditioning(features.to(device, dtype), valid.to(device))
    valid[0, 0] = False
    ids: Tensor = torch.arange(images * length).view(images, length) % 12
    here = [x.to(device) for x in (ids, valid, ids.flip(1), valid)]
    return Prompts(*here)


def drafter(name: str, model: Any, device: str, dtype: torch.dtype, small: bool = False, window: int = 0) -> Any:
    """One of `DRAFTERS` or `PARALLEL` for a target; window: the length of windows, if it is not the usual one."""
    shape = like_shape(model)
    tree = parse("[[0],[1],[0,0],[0,1],[1,0]]" if small else "mc_sim_7b_63")
    window = window or (4 if small else 32)
    grown = (4, 2, 2) if small else (25, 5, 4)

    def head() -> Any:
        return made(lambda: EagleNetwork(shape), device, dtype)

    if name == "none":
        return NoDraft()
    if name == "zipar":
        return ZipAR(1 if small else 8, "overlap")
    if name == "pjd":
        return ParallelJacobi(*((3, 2) if small else (8, 9)), 0.5, "released", "shifted")
    if name == "chain":
        return Eagle(head(), chain_paths(3 if small else 5))
    if name == "tree":
        return Eagle(head(), tree)
    if name == "eagle2":
        return Eagle2(head(), *grown)
    if name == "vvs":
        return VVS(head(), *grown, "filtered", 2)
    if name == "medusa":
        heads = MedusaConfig(model.block.dim, model.vocab_size, 5)
        return Medusa(made(lambda: MedusaNetwork(heads), device, dtype), tree)
    if name == "draft_model":
        kind = "xl" if isinstance(model, LlamaGen) else "emu3" if model.block.n_kv_heads < model.block.n_heads else "7b"
        return DraftModel(target(kind, device, dtype, 1, small, math.isqrt(model.length)), 3)
    if name == "jacobi":
        return Window(window, match=True)
    if name == "pathspec":
        return PathWindow(window, fresh="point", chains=2)
    if name == "sjd_pac":
        width, depth = PAC[small]
        return PACWindow(window, "horizontal_repeat", coupling="maximal", width=width, depth=depth)
    return SJDWindow(window, **{
        "sjd": {},
        "sjd_vertical": {"init": "vertical_sample"},
        "scd": {"coupling": "gumbel"},
    }[name])  # fmt: skip


#: Tokens in a row of the images of `CASES`, which have 64, and their number.
SIDE = 8
IMAGES = 2
#: By name: target, drafter, rule and engine of steps that tests/engine/test_gpu.py compares with recorded ones; the
#: last target has an image grammar.
CASES = {
    **{f"tree, {rule}, triton": ("xl", "tree", rule, "triton") for rule in RULES},
    **{
        f"{name}, exact, {engine}": ("xl", name, "exact", engine)
        for name in (*DRAFTERS, *PARALLEL)
        for engine in ("triton", "graph")
    },
    **{
        f"{name}, exact, triton, with a grammar": ("7b", name, "exact", "triton")
        for name in ("none", "tree", "sjd_vertical")
    },
}


def configured(target_name: str, drafter_name: str, rule: str, device: str) -> tuple[DecoderConfig, Any]:
    """A case's configuration, with wide layers in bfloat16, or with those for Triton's interpreter on the CPU; and what
    its images are conditioned on."""
    small = device == "cpu"
    dtype = torch.float32 if small else torch.bfloat16
    model = target(target_name, device, dtype, 1 if small else 2, small, SIDE)
    drafting = drafter(drafter_name, model, device, dtype, small)
    chosen = exact() if rule == "exact" else RULES[rule](model.vocab_size)
    conditions = conditioning(target_name, 1 if small else IMAGES, device, dtype, small)
    return DecoderConfig(model, drafting, chosen, SAMPLING[target_name]), conditions


def at_once(functions: Mapping[str, Action], device: torch.device) -> list[Action]:
    """Instead of a recorder, where nothing can be recorded."""
    for function in functions.values():
        function()
    return list(functions.values())
