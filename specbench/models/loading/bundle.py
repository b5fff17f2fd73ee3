"""The base classes of real targets: they load a folder of official files, or random weights, for a pipeline.

Folders: target/ (the language model), tokenizer/ (pixels), text/ (LlamaGen's captions) and, if a method needs them, the
drafters eagle/, eagle3/, medusa/, dflash/ and draft/ (a smaller model of the family).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from specbench.config import missing_weights, parameters, registry
from specbench.config.run_config import RunConfig
from specbench.data.base import Item
from specbench.errors import UsageError, steps
from specbench.models.language import Language
from specbench.models.loading import checkpoints, official
from specbench.models.loading.drafter_networks import Drafters
from specbench.models.vq import VQConfig, VQModel
from specbench.storage.reading import made

M = TypeVar("M", bound=nn.Module)
C = TypeVar("C")


def shape_of(model: str, kind: Callable[..., C], **others: Any) -> C:
    """The network's configuration: the `shape` that the model's file declares, and `others`. Raises UsageError for
    wrong fields."""
    return made(kind, {**others, **(parameters.default("model", model, "shape") or {})}, f"shape of {model}")


#: Fields of a configuration that no tensor shows; a published config.json has the right ones.
_NOT_SIZES = frozenset(("norm_eps", "rope_base", "norms"))


def check_sizes(found: Any, declared: Any, model: str, path: Path) -> None:
    """Raises UsageError if the network in a file has other sizes than its model declares. Its vocabulary may be longer,
    because rows without a meaning may pad it.

    found, declared: configurations of one kind.
    """
    pairs = [(name, getattr(found, name), value) for name, value in vars(declared).items() if name not in _NOT_SIZES]
    if different := [
        f"{name}={here} (not {there})"
        for name, here, there in pairs
        if here != there and not (name == "vocab_size" and here > there)
    ]:
        others = "" if len(different) <= 4 else f" and {len(different) - 4} other sizes"
        raise UsageError(
            f"{path} holds another network than {model}, or a part of it: {', '.join(different[:4])}{others}; choose"
            " its model=, fetch the complete file, or declare these sizes as the shape: of a model file of your own"
        )


class Bundle:
    """The base class of models with discrete and with continuous tokens: a folder of official files, or random
    weights."""

    target: Any

    def __init__(self, cfg: RunConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.name: str = cfg.model
        self.world = registry.world_of(cfg)
        self.reduced = bool(cfg.own.get("reduced"))
        self.device, self.dtype = device, dtype
        self.drafter_weights = registry.drafter_path(cfg)
        self.folder = registry.weights_folder(cfg)
        if self.folder is not None:
            missing_weights.check(cfg, with_drafter=False)

    def absent(self) -> dict[str, int]:
        """Networks that official weights have, but random weights do not need: name -> number of parameters."""
        return {}

    def unread_tokens(self, prompt: str) -> int:
        """The number of tokens at the end of a prompt that its encoder does not read. 0 for a model that has no limit,
        or that refuses a longer prompt."""
        return 0

    def part(self, name: str) -> Path:
        """A sub-folder of the weights."""
        assert self.folder is not None
        path = self.folder / name
        if not path.is_dir():
            raise UsageError(f"{self.folder} has no {name}/: {steps('put the files there', 'weights=random')}")
        return path

    def embedded(self, kind: str, module: Callable[[Any], M], config: Callable[..., Any], dtype: torch.dtype) -> M:
        """A network of an embedded model, from its file in the folder."""
        assert self.folder is not None
        return checkpoints.load(
            self.folder / f"{self.world}_{kind}.safetensors", kind, module, config, self.device, dtype
        )

    def decode_image(self, tokens: Tensor) -> np.ndarray:
        """One image (1, H, W, 3) uint8 from its tokens, discrete (1, h * w) or continuous (1, L, D)."""
        raise NotImplementedError

    @torch.inference_mode()
    def pixels(self, tokens: Tensor) -> np.ndarray:
        """Images (B, H, W, 3) uint8 from the target's tokens (B, T) or (B, L, D), decoded one at a time."""
        return np.concatenate([self.decode_image(row[None].to(self.device)) for row in tokens])

    def code_grid(self, tokens: Tensor) -> Tensor:
        """The codes (B, rows, columns) among the target's tokens (B, T), without the tokens between them."""
        columns, grammar = self.target.width, self.target.grammar
        if grammar is not None:
            free = grammar.free.to(tokens.device)
            tokens, columns = tokens[:, free], int((free < columns).sum())
        return tokens.reshape(len(tokens), -1, columns)

    def random(self, build: Callable[[], M], seed: int, dtype: torch.dtype) -> M:
        """A module with random weights of unit gain, created on its device: the host never stores it twice. Tensors
        that `build` received, such as the ids of an image's tokens, keep their values."""
        with official.shapes_only():
            module = build().to(dtype)
        if self.device.type == "meta":  # only the shapes are needed
            return module.eval().requires_grad_(False)
        kept = {name: tensor for name, tensor in module.named_buffers() if not tensor.is_meta}
        module = module.to_empty(device=self.device)
        for name, tensor in kept.items():
            module.get_buffer(name).copy_(tensor)
        rng = torch.Generator(self.device).manual_seed(seed)
        with torch.no_grad():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if name in kept:
                    continue
                if not tensor.is_floating_point():
                    tensor.zero_()
                elif tensor.dim() < 2 or (tensor.dim() == 2 and "norm" in name):
                    tensor.fill_(0.0 if name.endswith(("bias", "running_mean")) else 1.0)
                else:
                    tensor.normal_(0, tensor[0].numel() ** -0.5, generator=rng)
        return module.eval().requires_grad_(False)


def only(folder: Path, *endings: str) -> Path:
    """The only file of a folder with one of these endings. Raises UsageError for no file or several."""
    files = sorted(p for p in folder.iterdir() if p.suffix in endings)
    if len(files) != 1:
        names = ", ".join(p.name for p in files) or "none"
        raise UsageError(f"{folder} must hold one {' or '.join(endings)} file (it holds {names})")
    return files[0]


def class_number(prompt: str, classes: int, model: str, name: str = "") -> int:
    """The class number in the prompt of a class-conditional model; name: the prompt's id, for the message."""
    if re.fullmatch(r"\d{1,6}", prompt.strip()) and int(prompt) < classes:
        return int(prompt)
    raise UsageError(
        f"{model} draws classes 0 to {classes - 1}, and '{prompt[:40]}'{name and f' (prompt {name})'} is not one; use"
        " data=imagenet, or a file of class numbers"
    )


def check_classes(items: Sequence[Item], classes: int, model: str) -> None:
    """Raises UsageError for a prompt that is not a class number."""
    for item in items:
        class_number(item.prompt, classes, model, item.id or str(item.index))


class RealModel(Drafters, Bundle):
    """A model with discrete tokens. A subclass builds `target` and `tokenizer`, and defines how prompts are encoded and
    tokens are decoded to images."""

    target: Language
    resolution: int
    tokenizer: Any

    # --- defined by a subclass ----------------------------------------------------------------------------------------

    def encode(self, prompts: list[str]) -> Any:
        raise NotImplementedError

    def codebook(self) -> Tensor:
        """Code vectors (V, d) of the target's tokens; NaN for the tokens of the image grammar."""
        raise NotImplementedError

    # --- shared by all ------------------------------------------------------------------------------------------------

    def pixels(self, tokens: Tensor) -> np.ndarray:
        grammar = self.target.grammar
        return super().pixels(tokens if grammar is None else tokens[:, grammar.free.to(tokens.device)])

    def codes(self, images: Tensor) -> Tensor:
        codes: Tensor = self.tokenizer.encode(images.to(self.device))
        return codes

    def random_pixels(self, published: VQConfig, reduced_codes: int) -> VQModel:
        """A tokenizer of a published architecture with random weights."""
        shape = published.reduced(reduced_codes) if self.reduced else published
        return self.random(lambda: VQModel(shape), 2, torch.float32)

    def drafter_path(self, part: str) -> Path | None:
        return None if self.folder is None else self.part(part)

    def random_network(self, build: Callable[[], Any], seed: int) -> Any:
        return self.random(build, seed, self.dtype)
