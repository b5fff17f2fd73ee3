"""Loads official files of image tokenizers: LlamaGen's (also in Janus-Pro), Chameleon's and MAR's autoencoders, Emu3's
vision tokenizer and Cosmos."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from specbench.errors import UsageError
from specbench.models.cosmos import Cosmos, CosmosConfig, DecoderHalf, EncoderHalf
from specbench.models.emu3_vision import Emu3Vision
from specbench.models.loading import official
from specbench.models.loading.naming import Layout, ParameterSlice, Table
from specbench.models.loading.official import CheckpointSource
from specbench.models.vq import Autoencoder, VQConfig, VQModel

if TYPE_CHECKING:
    from transformers import Emu3VQVAEConfig

M = TypeVar("M", bound=nn.Module)
Tokenizer = TypeVar("Tokenizer", bound=Autoencoder)


def _taming(name: str, last: int | None = None) -> str:
    """taming-transformers' name of a tensor. last: the number of the decoder's last level if levels are numbered by
    resolution (0: the highest); None if they are numbered in the order in which they run."""
    for own_name, taming_name in (
        ("coder.mid.0.", "coder.mid.block_1."),
        ("coder.mid.1.", "coder.mid.attn_1."),
        ("coder.mid.2.", "coder.mid.block_2."),
        ("encoder.conv_blocks.", "encoder.down."),
        ("decoder.conv_blocks.", "decoder.up."),
        (".res.", ".block."),
    ):
        name = name.replace(own_name, taming_name)
    return name if last is None else re.sub(r"(?<=decoder\.up\.)\d+", lambda m: str(last - int(m[0])), name)


def llamagen_table(cfg: VQConfig) -> Table:
    """The table of `vq_ds*.pt` (under the key "model"): the names are the same."""
    with official.shapes_only():
        return official.own_names(Autoencoder(cfg))


def taming_table(cfg: VQConfig) -> Table:
    """The table of Chameleon's `vqgan.ckpt` (under "state_dict") and MAR's `kl16.ckpt` (under "model"). Their decoder
    levels are numbered by resolution (notes of the golden chameleon_vqgan)."""
    return {_taming(name, len(cfg.ch_mult) - 1): part for name, part in llamagen_table(cfg).items()}


def _janus_prefix(names: Container[str]) -> str:
    return "model.vqmodel." if "model.vqmodel.quantize.embedding.weight" in names else "gen_vision_model."


def janus_layout(names: Container[str], cfg: VQConfig) -> Layout:
    """The table and the ignored names of LlamaGen's tokenizer in a Janus-Pro file. DeepSeek's layout has the prefix
    `gen_vision_model.` and LlamaGen's names; transformers' layout has the prefix `model.vqmodel.`."""
    prefix = _janus_prefix(names)
    is_deepseek = prefix == "gen_vision_model."
    table = {prefix + (name if is_deepseek else _taming(name)): part for name, part in llamagen_table(cfg).items()}
    return table, [rf"(?!{re.escape(prefix)}).*", rf"{re.escape(prefix)}quantize\.codebook_used"]


def load_janus(source: CheckpointSource, published: VQConfig, device: torch.device) -> VQModel:
    """The tokenizer in a Janus-Pro file, in float32. Raises the errors of `sized` and `official.load`."""
    prefix = _janus_prefix(source.tensors)
    shapes = {n.removeprefix(prefix): i.shape for n, i in source.tensors.items() if n.startswith(prefix)}
    cfg = sized(published, shapes, str(source.path))
    table, ignored = janus_layout(source.tensors, cfg)
    return official.load(lambda: VQModel(cfg), source, table, device, torch.float32, ignored)


def _encoder_sizes(shapes: Mapping[str, tuple[int, ...]], first: str, blocks: str) -> dict[str, Any]:
    """Widths and depth of an encoder. first: name of its first convolution; blocks: pattern of the names of residual
    blocks, whose group is the level. Raises LookupError and ZeroDivisionError."""
    widths: dict[int, list[int]] = {}
    for name, shape in shapes.items():
        if m := re.fullmatch(blocks, name):
            widths.setdefault(int(m[1]), []).append(shape[0])
    ch = shapes[first][0]
    mult = tuple(widths[level][0] // ch for level in range(len(widths)))
    return {"ch": ch, "ch_mult": mult, "num_res_blocks": len(widths[0])}


def sized(official: VQConfig, shapes: Mapping[str, tuple[int, ...]], where: str = "the file") -> VQConfig:
    """`official` with the sizes of a file, from the shapes of its tensors (in either naming). Raises UsageError if they
    do not fit an autoencoder.

    The files do not contain sizes. Fields that shapes do not determine (norm groups, use of the codebook, levels with
    attention) are taken from `official`.
    """
    blocks = r"encoder\.(?:conv_blocks|down)\.(\d+)\.(?:res|block)\.\d+\.conv2\.weight"
    try:
        sizes = _encoder_sizes(shapes, "encoder.conv_in.weight", blocks)
        if sizes["ch"] % official.norm_groups:
            raise ValueError("norms would not divide the channels")
        return replace(
            official,
            **sizes,
            z_channels=shapes["decoder.conv_in.weight"][1],
            codebook_size=shapes["quantize.embedding.weight"][0] if official.codebook_size else 0,
            codebook_embed_dim=shapes["post_quant_conv.weight"][1],
        )
    except (LookupError, ValueError, ZeroDivisionError) as e:
        raise UsageError(f"{where} does not hold this kind of image tokenizer; name the official file") from e


#: Names that inference does not use. LlamaGen: the recently used codes. vqgan.ckpt and kl16.ckpt, which the official
#: code reads with strict=False: the discriminator, and a moving average.
LLAMAGEN_IGNORED, TAMING_IGNORED = (r"quantize\.codebook_used",), (r"loss\..*", r"model_ema\..*")


def load_autoencoder(
    module: Callable[[VQConfig], Tokenizer], published: VQConfig, path: Path, device: torch.device, llamagen: bool
) -> Tokenizer:
    """A published kind of autoencoder with the sizes of a file, in float32. llamagen: whether the file has LlamaGen's
    names, otherwise taming-transformers'. Raises the errors of `sized` and `official.load`."""
    source = official.open_source(path)
    cfg = sized(published, {name: info.shape for name, info in source.tensors.items()}, str(source.path))
    table, ignored = (llamagen_table(cfg), LLAMAGEN_IGNORED) if llamagen else (taming_table(cfg), TAMING_IGNORED)
    return official.load(lambda: module(cfg), source, table, device, torch.float32, ignored)


def load_emu3_vision(
    cfg: Emu3VQVAEConfig, source: CheckpointSource, device: torch.device | str, dtype: torch.dtype
) -> Emu3Vision:
    """The tokenizer from files of Emu3-VisionTokenizer or transformers. Raises the errors of `official.load`."""
    table, ignored = emu3_layout(cfg, source.tensors)
    model = official.load(lambda: emu3_vision(cfg, source.tensors), source, table, device, dtype, ignored)
    for layer in _linear(model):
        layer.weight = nn.Parameter(layer.weight.flatten(1), requires_grad=False)
    return model


def emu3_vision(cfg: Emu3VQVAEConfig, names: Container[str]) -> Emu3Vision:
    """The tokenizer, with tensors in the shapes of a file with these names."""
    model = Emu3Vision(cfg)
    if _prefix(names) is None:
        for layer in _linear(model):  # 1x1 convolutions officially
            layer.weight = nn.Parameter(layer.weight[..., None, None])
    return model


def emu3_layout(cfg: Emu3VQVAEConfig, names: Container[str]) -> Layout:
    """The table and the ignored names, from the names in a file: of Emu3-VisionTokenizer, or of transformers, alone or
    in a complete Emu3 (whose other tensors are ignored). If neither fits, the official names."""
    with official.shapes_only():
        own_names = [name.removeprefix("vq.") for name in Emu3Vision(cfg).state_dict()]
    prefix = _prefix(names)
    if prefix is None:
        return {_official(name): ParameterSlice(f"vq.{name}") for name in own_names}, []
    others = [rf"(?!{re.escape(prefix)}).*"] if prefix else []
    return {prefix + name: ParameterSlice(f"vq.{name}") for name in own_names}, others


def _linear(model: nn.Module) -> Iterator[nn.Linear]:
    """The attention's layers, which are the only linear layers of this network."""
    return (layer for layer in model.modules() if isinstance(layer, nn.Linear))


def _prefix(names: Container[str]) -> str | None:
    """The prefix of transformers' names in a file; None for official or unknown names."""
    prefixes = ("vqmodel.", "model.vqmodel.", "")
    return next((p for p in prefixes if f"{p}encoder.down_block.down.0.block.0.conv1.weight" in names), None)


def _official(name: str) -> str:
    """The official name of a tensor, from transformers' name."""
    for pattern, official_name in {
        r"(down|up)_block\.\1\.": r"\1.",
        r"middle_block\.attn_norm\.": "mid.attn_1.norm.",
        r"middle_block\.": "mid.",
        r"attn_norms\.(\d+)\.": r"attn.\1.norm.",
        r"([qkv])_proj\.": r"\1.",
        r"out_proj\.": "proj_out.",
    }.items():
        name = re.sub(pattern, official_name, name)
    return name


def cosmos_table(names: Iterable[str]) -> Table:
    """The table of encoder.jit or decoder.jit, from our names of this half. In the files, names of convolutions and
    norms have an additional part."""

    def official(name: str) -> str:
        layer, _, kind = name.rpartition(".")
        inner = "norm" if "norm" in layer.rpartition(".")[2] else "conv3d"
        return f"{layer}.{inner}.{kind}"

    return {official(name): ParameterSlice(name) for name in names}


#: Tensors that a still image does not need: the queries and keys of attention over one frame, convolutions over time in
#: levels that keep it (missing in a traced archive), and tensors that are not parameters (a table of codes, wavelets).
COSMOS_IGNORED = (
    r"(en|de)coder\.mid\.attn_1\.1\.[qk]\.conv3d\..*",
    r"encoder\.down\.\d+\.downsample\.conv2\.conv3d\..*",
    r"decoder\.up\.\d+\.upsample\.conv1\.conv3d\..*",
    r"(?!.*(conv3d|norm)\.(weight|bias)$).*",
)


def cosmos_sized(
    official: CosmosConfig, shapes: Mapping[str, tuple[int, ...]], where: str = "the file"
) -> CosmosConfig:
    """`official` with the sizes of an encoder.jit, except the levels of its codes, which shapes do not give. Raises
    UsageError if they do not fit."""
    blocks = r"encoder\.down\.(\d+)\.block\.\d+\.conv2\.0\.conv3d\.weight"
    try:
        dim, z_channels = shapes["quant_conv.conv3d.weight"][:2]
        if dim != len(official.levels):
            raise ValueError("other codes")
        sizes = _encoder_sizes(shapes, "encoder.conv_in.0.conv3d.weight", blocks)
        return replace(official, **sizes, z_channels=z_channels)
    except (LookupError, ValueError, ZeroDivisionError) as e:
        raise UsageError(f"{where} does not hold Cosmos's encoder; name the official file") from e


def load_cosmos(published: CosmosConfig, folder: Path, device: torch.device) -> Cosmos:
    """The tokenizer of a folder with encoder.jit and decoder.jit, in float32. Raises the errors of `open_archive`,
    `cosmos_sized` and `official.load`."""
    encoder, decoder = (open_archive(folder / f"{half}.jit") for half in ("encoder", "decoder"))
    cfg = cosmos_sized(published, {name: info.shape for name, info in encoder.tensors.items()}, str(encoder.path))

    def half(build: Callable[[CosmosConfig], M], source: CheckpointSource) -> M:
        with official.shapes_only():
            table = cosmos_table(build(cfg).state_dict())
        return official.load(lambda: build(cfg), source, table, device, torch.float32, COSMOS_IGNORED)

    encoding, decoding = half(EncoderHalf, encoder), half(DecoderHalf, decoder)
    return Cosmos(cfg, encoding, decoding).eval()


# --- TorchScript ------------------------------------------------------------------------------------------------------

_STORAGES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "BoolStorage": torch.bool,
}


class _Module:
    """The attributes of an object of an archive, of any class."""

    def __setstate__(self, state: Any) -> None:
        self.attributes = state if isinstance(state, dict) else {}


class _Unpickler(pickle.Unpickler):
    """Reads an archive's data.pkl. It only accepts modules and tensors, so no code in the file is run."""

    def __init__(self, stream: IO[bytes], record: Callable[[str], bytes]) -> None:
        """record: the bytes of a storage."""
        super().__init__(stream)
        self._record = record

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "__torch__":
            return _Module
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda values, first, shape, stride, *_: values.as_strided(shape, stride, first)
        if (module, name) == ("torch._utils", "_rebuild_parameter") or module == "torch.jit._pickle":
            return lambda data, *_: data
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Tensor:
        _, dtype, record, _, _ = pid
        content = bytearray(self._record(record))
        return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)


def _attributes(value: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs of a module and of the modules in it."""
    for name, inner in value.attributes.items() if isinstance(value, _Module) else ():
        if isinstance(inner, Tensor):
            yield prefix + name, inner
        else:
            yield from _attributes(inner, f"{prefix}{name}.")


def open_archive(file: Path) -> CheckpointSource:
    """The tensors of a TorchScript file, named as in its state dict; its code is not run. Raises UsageError for a
    missing or broken file.

    The file is a zip archive with a pickle of the module's attributes, the bytes of each storage, and the code.
    """
    if not file.is_file():
        raise UsageError(f"there is no file '{file}'; fetch the weights, or correct the path")
    try:
        with zipfile.ZipFile(file) as archive:
            [inner] = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
            storages = inner.removesuffix("data.pkl") + "data/"
            with archive.open(inner) as stream:
                content = _Unpickler(stream, lambda record: archive.read(f"{storages}{record}")).load()
        return official.from_tensors(dict(_attributes(content)), str(file))
    except Exception as e:  # a broken archive or pickle raises any type
        reason = str(e).partition("\n")[0]
        raise UsageError(
            f"'{file}' is not a readable TorchScript archive ({type(e).__name__}: {reason}); fetch it again"
        ) from e
