"""The drafter networks of a target: read from its folder or from drafter_weights=, created for training, or written in
LANTERN's layout (reference manifests of its drafters)."""

from __future__ import annotations

import math
import pkgutil
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from specbench.config import registry
from specbench.errors import UsageError
from specbench.models import eagle
from specbench.models.eagle import EagleConfig, EagleNetwork
from specbench.models.language import Language
from specbench.models.loading import checkpoints, naming, official
from specbench.models.unified import Unified

N = TypeVar("N", bound=nn.Module)


class Drafters:
    """The drafter networks of a bundle with a discrete target. A subclass has `name`, `target`, `device` and `dtype`,
    and defines where the files are and how a smaller model of its family is read."""

    name: str
    target: Language
    device: torch.device
    dtype: torch.dtype
    drafter_weights: Path | None

    # --- defined by a subclass ----------------------------------------------------------------------------------------

    def drafter_path(self, part: str) -> Path | None:
        """The folder or file of a drafter for the target's weights; None if the weights are random."""
        raise NotImplementedError

    def codes(self, images: Tensor) -> Tensor:
        """Codes (N, h * w) int64 of images (N, 3, H, W) float32 in [-1, 1], as in the target's training."""
        raise NotImplementedError

    def smaller(self) -> Language:
        """An untrained draft model of the family: the target's tokens and prefix, and fewer layers."""
        raise NotImplementedError

    def read_smaller(self, path: Path) -> Language:
        """A draft model from the official files of its family."""
        raise NotImplementedError

    # --- shared by all ------------------------------------------------------------------------------------------------

    def drafter_network(self, name: str | Mapping[str, Any]) -> Any:
        """The network that a drafter declares, with the weights at drafter_weights= or in the target's folder."""
        return self.loader(name).load()

    def untrained(self, name: str, heads: int = 5) -> nn.Module:
        """An untrained drafter network that fits the target. heads: number of Medusa heads."""
        network: nn.Module = self.loader(name).untrained(heads)
        return network

    def trained(self, name: str, path: Path) -> nn.Module:
        """The drafter network in a folder or file."""
        network: nn.Module = self.loader(name).read(path)
        return network

    def loader(self, name: str | Mapping[str, Any]) -> NetworkLoader[Any]:
        """Reads the network that a drafter declares."""
        network = registry.network(name)
        loader: NetworkLoader[Any] = pkgutil.resolve_name(network.loader)(self, network.folder)
        return loader

    def random_network(self, build: Callable[[], Any], seed: int) -> Any:
        torch.manual_seed(seed)
        with torch.device("meta" if self.device.type == "meta" else "cpu"):
            return build().to(self.device, self.dtype).eval().requires_grad_(False)


class NetworkLoader(Generic[N]):
    """Reads a drafter network of one kind for the target of a bundle. A subclass defines the class attributes, and the
    methods that raise NotImplementedError."""

    title: str  # in messages
    seed: int  # of random weights
    module: Callable[[Any], N]  # of a configuration
    config: Callable[..., Any]  # of the fields in a file of specbench's format

    def __init__(self, bundle: Drafters, folder: str) -> None:
        """folder: folder of the weights in the target's folder; also the kind in a file of specbench's format."""
        self.bundle, self.target, self.folder = bundle, bundle.target, folder

    def load(self) -> N:
        path = self.bundle.drafter_weights or self.bundle.drafter_path(self.folder)
        if path is None:
            random: N = self.bundle.random_network(self.untrained, self.seed)
            return random
        return self.read(path)

    def read(self, path: Path) -> N:
        """The network in a folder or file. Raises UsageError if it does not fit the target."""
        file = specbench_file(path)
        network = self._read_file(file) if file is not None else self.read_official(path)
        if not self.fits(network):
            raise UsageError(
                f"the {self.title} in {path} was trained for another target than {self.bundle.name}; train one for this"
            )
        return network

    def _read_file(self, path: Path) -> N:
        bundle = self.bundle
        return checkpoints.load(
            path, self.folder, self.module, self.config, bundle.device, bundle.dtype, self.shared_tensors()
        )

    def shared_tensors(self) -> dict[str, Tensor]:
        """Tensors of the target that a file in specbench's format may omit, by their names in the file."""
        return {}

    def untrained(self, heads: int = 5) -> N:
        raise NotImplementedError

    def read_official(self, path: Path) -> N:
        """From the files that its authors publish."""
        raise NotImplementedError

    def fits(self, network: N) -> bool:
        raise NotImplementedError


class EagleLoader(NetworkLoader[EagleNetwork]):
    title, seed, module, config = "drafter", 5, EagleNetwork, EagleConfig.from_dict

    def untrained(self, heads: int = 5) -> EagleNetwork:
        return eagle.like_target(self.target)

    def shared_tensors(self) -> dict[str, Tensor]:
        table = self.target.tok_embeddings.weight
        return {} if table.is_meta else {"embed_tokens.weight": table}

    def fits(self, network: EagleNetwork) -> bool:
        c, rows = network.cfg, len(self.target.tok_embeddings.weight)
        layers = max(c.aux_hidden_layers, default=0)
        return (c.dim, c.vocab_size) == (self.target.block.dim, rows) and layers < len(self.target.layers)

    def read_official(self, path: Path) -> EagleNetwork:
        """From LANTERN's layout: config.json and the tensors in one folder."""
        source = official.open_source(path)
        cfg = self._config(path, source)
        table = naming.eagle(cfg.block, cfg.input_norm, cfg.n_layer, cfg.fc_bias)
        bundle = self.bundle
        return official.load(lambda: EagleNetwork(cfg), source, table, bundle.device, bundle.dtype, naming.ROTARY)

    def _config(self, path: Path, source: official.CheckpointSource) -> EagleConfig:
        """The shape of a drafter in LANTERN's layout: from its config.json or, if it is missing, from its tensors.
        Tensors do not give the number of heads, so it is then the target's."""
        file = (path if path.is_dir() else path.parent) / "config.json"
        like, shapes = eagle.like_shape(self.target), {name: info.shape for name, info in source.tensors.items()}
        depth = _layers(source)
        c = official.config(file.parent) if file.is_file() else _config_from_shapes(shapes, like)
        for name in ("swin_norm", "rope_scaling", "attention_bias", "mlp_bias"):
            if c.get(name):
                raise UsageError(f"{file}: {name} must be absent, false or null: no known EAGLE drafter has it")
        cfg = EagleConfig(
            **_sizes(file, {"num_hidden_layers": depth, "rope_theta": like.rope_base}, c),
            cls_token_num=like.cls_token_num,
            block_size=like.block_size,
            input_norm="layers.0.input_layernorm.weight" in shapes,
            qk_norm=(shapes.get("layers.0.self_attn.q_norm.weight") or (0,))[0],
            fc_bias=bool(c.get("bias", "fc.bias" in shapes)),
        )
        if cfg.n_layer != depth:
            raise UsageError(
                f"{file} has num_hidden_layers={cfg.n_layer}, and {source.path} holds the tensors of {depth};"
                " take both from one drafter"
            )
        heads, of_norms = cfg.n_head, max(1, cfg.qk_norm)
        if cfg.dim % (2 * heads) or heads % cfg.block.n_kv_heads or heads % of_norms:
            raise UsageError(
                f"{file}: {heads} heads, {cfg.n_kv_head} of keys and {of_norms} of norms do not fit together in"
                f" hidden_size {cfg.dim}; take the one published with the drafter"
            )
        return cfg


class Eagle3Loader(EagleLoader):
    def untrained(self, heads: int = 5) -> EagleNetwork:
        return eagle.like_target(self.target, eagle.default_aux_hidden_layers(self.target))


class DraftModelLoader(NetworkLoader[Language]):
    """A smaller target with the same tokens and prefix."""

    title, seed = "draft model", 3

    def _read_file(self, path: Path) -> Language:
        like: Any = self.target

        def build(cfg: Any) -> Language:
            model: Language = type(like)(cfg, like.image) if isinstance(like, Unified) else type(like)(cfg)
            return model

        return checkpoints.load(path, self.folder, build, type(like.cfg), self.bundle.device, self.bundle.dtype)

    def untrained(self, heads: int = 5) -> Language:
        return self.bundle.smaller()

    def read_official(self, path: Path) -> Language:
        return self.bundle.read_smaller(path)

    def fits(self, network: Language) -> bool:
        """Whether vocabulary, prefix and grid equal the target's."""
        return _interface(network) == _interface(self.target)


def specbench_file(path: Path) -> Path | None:
    """The file in specbench's format at a path, or None."""
    if path.suffix == ".safetensors" and path.name != "model.safetensors":
        return path
    file = path / registry.DRAFTER_FILE
    return file if file.is_file() else None


def _layers(source: official.CheckpointSource) -> int:
    """The number of layers of a drafter, from the names of its tensors."""
    numbers = {int(match[1]) for name in source.tensors if (match := re.match(r"layers\.(\d{1,6})\.", name))}
    if not numbers or numbers != set(range(len(numbers))):
        raise UsageError(
            f"{source.path} has no known layout of an EAGLE drafter: its layers must be layers.0, layers.1, ...; name"
            " the drafter's own files"
        )
    return len(numbers)


def _config_from_shapes(shapes: Mapping[str, tuple[int, ...]], like: EagleConfig) -> dict[str, Any]:
    """The values of config.json, from shapes. A later check reports a missing tensor, or one that is not a matrix."""

    def rows(name: str, otherwise: int) -> int:
        shape = shapes.get(name, ())
        return shape[0] if len(shape) == 2 else otherwise

    dim = rows("fc.weight", like.dim)
    head_dim = max(1, dim // like.n_head)
    return {
        "hidden_size": dim,
        "num_attention_heads": like.n_head,
        "num_key_value_heads": max(1, rows("layers.0.self_attn.k_proj.weight", dim) // head_dim),
        "intermediate_size": rows("layers.0.mlp.gate_proj.weight", like.ffn_hidden),
        "vocab_size": rows("embed_tokens.weight", like.vocab_size),
        "rms_norm_eps": like.norm_eps,
    }


#: The sizes of a drafter in config.json: names there, and here.
_SIZES = {
    "hidden_size": "dim",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "intermediate_size": "ffn_hidden",
    "vocab_size": "vocab_size",
    "num_hidden_layers": "n_layer",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_base",
}
_NUMBERS = ("rms_norm_eps", "rope_theta")  # the others are integers


def _sizes(file: Path, otherwise: Mapping[str, Any], c: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `_SIZES`. otherwise: defaults of values that a config.json `c` may omit."""
    otherwise = {"num_key_value_heads": c.get("num_attention_heads"), **otherwise}
    values = {name: otherwise.get(name) if c.get(name) is None else c[name] for name in _SIZES}
    for name, value in values.items():
        if value is None:
            raise UsageError(f"{file} has no '{name}'; take the one published with the drafter")
        kinds, what = ((int, float), "a number above 0") if name in _NUMBERS else ((int,), "an integer of at least 1")
        if type(value) not in kinds or not 0 < value < math.inf:
            raise UsageError(f"{file}: {name} must be {what} (got {value!r}); correct it")
    return {_SIZES[name]: value for name, value in values.items()}


def _interface(model: Language) -> tuple[Any, ...]:
    """The sizes that a draft model must share with its target."""
    cfg: Any = model.cfg
    return model.vocab_size, model.length, model.width, getattr(cfg, "cls_token_num", None)


def exported(head: EagleNetwork, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors in LANTERN's layout (reference manifests of its drafters). Raises UsageError for a
    drafter that reads several layers, which this layout does not support."""
    c = head.cfg
    if c.aux_hidden_layers:
        raise UsageError("LANTERN's layout cannot hold a drafter that reads several layers of its target")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        **{name: getattr(c, field) for name, field in _SIZES.items()},
        "num_key_value_heads": c.block.n_kv_heads,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if not c.fc_bias:
        config["bias"] = False
    tensors = official.exported(head, naming.eagle(c.block, c.input_norm, c.n_layer, c.fc_bias))
    return config, {name: tensor.to(dtype) for name, tensor in tensors.items()}
