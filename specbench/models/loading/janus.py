"""Janus-Pro: a Llama with separate inputs and a separate head for image tokens.

The input of a code is a small embedding followed by two linear layers. This gives a table with one row per code, which
is computed once, when the files are read. It is appended to the rows of the text in the target's table: the id of a
code is the size of the text's vocabulary + the code. Facts: reference README_3 (39) to (48) and the manifests of
Janus-Pro.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specbench.config.run_config import RunConfig
from specbench.engine.ops import gelu, linear
from specbench.errors import UsageError
from specbench.models import vq
from specbench.models.loading import image_tokenizers, naming, official
from specbench.models.loading.bundle import check_sizes, shape_of
from specbench.models.loading.naming import Layout, ParameterSlice
from specbench.models.loading.text_official import NamedText, hashed_ids
from specbench.models.loading.unified_official import Encode, Prompt, UnifiedModel, described, from_hugging_face
from specbench.models.transformer import BlockConfig
from specbench.models.unified import ImageTokens, Unified, UnifiedConfig, image_tokens

_CODES = "inputs of the codes"  # not a name in a file

SIDE, CODES = 24, 16384  # rows and columns of codes of an image of 384 x 384 pixels; number of codes
TEXT_IDS = 100000  # smaller ids are text


def full(model: str) -> UnifiedConfig:
    """The network of a published size."""
    return shape_of(model, UnifiedConfig, vocab_size=102400 + CODES, norm_eps=1e-6)


REDUCED_CODES, REDUCED_SIDE = 64, 4
REDUCED = UnifiedConfig(32, 2, 2, 2, 64, 100100 + REDUCED_CODES, norm_eps=1e-6, head_hidden=24)

#: Defaults of transformers' Llama that a config.json of the 7B model omits (README_3 (47)).
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
}


class ImageInputs(nn.Module):
    """The inputs of image tokens in the files: codes (V, d), then two linear layers."""

    def __init__(self, codes: int, width: int, dim: int) -> None:
        super().__init__()
        self.codes = nn.Embedding(codes, width)
        self.first, self.second = nn.Linear(width, dim), nn.Linear(dim, dim)

    def table(self) -> Tensor:
        """The inputs of all codes, (V, dim)."""
        x = gelu(linear(self.codes.weight, self.first.weight, self.first.bias))
        return linear(x, self.second.weight, self.second.bias)


def layouts(names: Collection[str], layers: int, block: BlockConfig) -> tuple[Layout, Layout]:
    """The layouts of the language model and of the image tokens' inputs, from the names in a file: DeepSeek's layout,
    or transformers'. Raises UsageError if neither fits."""
    if "gen_embed.weight" in names:
        language, head, inner = "language_model.model.", "gen_head", "output_mlp_projector"
        inputs = ("gen_embed", "gen_aligner.layers.0", "gen_aligner.layers.2")
        others = [r"language_model\.lm_head\.weight", r"(vision_model|aligner|gen_vision_model)\..*"]
    elif "model.generation_embeddings.weight" in names:
        language, head, inner = "model.language_model.", "model.generation_head", "proj_out"
        inputs = (
            "model.generation_embeddings",
            "model.generation_aligner.fc1",
            "model.generation_aligner.hidden_layers.0",
        )
        others = [r"lm_head\.weight", r"model\.(vision_model|aligner|vqmodel)\..*"]
    else:
        raise UsageError(
            "the target's file holds neither gen_embed.weight nor model.generation_embeddings.weight: it is not Janus's"
        )
    table = naming.hugging_face(layers, block, language, f"{head}.vision_head.weight")
    table[f"{head}.vision_head.bias"] = ParameterSlice("output.bias")
    inputs_table = {f"{inputs[0]}.weight": ParameterSlice("codes.weight")}
    for part in ("weight", "bias"):
        table[f"{head}.{inner}.{part}"] = ParameterSlice(f"head_hidden.{part}")
        for layer, official_name in (("first", inputs[1]), ("second", inputs[2])):
            inputs_table[f"{official_name}.{part}"] = ParameterSlice(f"{layer}.{part}")
    ignored = [*others, *naming.ROTARY]
    return (table, [*map(re.escape, inputs_table), *ignored]), (inputs_table, [*map(re.escape, table), *ignored])


@dataclass(frozen=True)
class JanusIds:
    """Special ids of Janus-Pro's vocabulary in a prompt (manifest Janus-Pro-1B)."""

    bos: int = 100000
    pad: int = 100015
    begin_of_image: int = 100016


class JanusText(NamedText):
    """Janus-Pro's tokenizer, tokenizer.json of either layout."""

    model = "Janus-Pro"

    def ids(self) -> JanusIds:
        """The special ids, by their names. Raises UsageError if one is missing."""
        names = {"bos": "<｜begin▁of▁sentence｜>", "pad": "<｜▁pad▁｜>", "begin_of_image": "<begin_of_image>"}
        return JanusIds(**self.named(names))

    def template(self, prompt: str) -> list[int]:
        """The ids of a user's message, and of the start of the assistant's answer (prompt_formats_3.json). A role is
        one id if it is a special token, otherwise text. A prompt cannot contain special tokens."""
        return [*self._role("<|User|>", f": {prompt.strip()}\n\n"), *self._role("<|Assistant|>", ":")]

    def _role(self, name: str, text: str) -> list[int]:
        return [self._names[name], *self.encode(text)] if name in self._names else self.encode(name + text)


def janus_prompt(text: Sequence[int], ids: JanusIds) -> Prompt:
    """[bos] text [begin of image]. The unconditional prompt has the same length, with padding instead of the text; this
    padding is attended to (reference README_3 (39))."""
    return Prompt([ids.bos, *text, ids.begin_of_image], [ids.bos, *[ids.pad] * len(text), ids.begin_of_image])


def configured(content: Mapping[str, Any], source: official.CheckpointSource) -> UnifiedConfig:
    """The language model of a config.json in either layout, only with the rows of its text. The tensors give the width
    of the head. Raises KeyError, TypeError or ValueError if it does not describe a language model."""
    language = content.get("language_config") or content.get("text_config") or content
    rope = {} if "rope_parameters" in language else {"rope_theta": 10000.0}
    inner = ("gen_head.output_mlp_projector.bias", "model.generation_head.proj_out.bias")
    width = next((source.tensors[name].shape[0] for name in inner if name in source.tensors), 0)
    return replace(from_hugging_face({**_LLAMA, **rope, **language}, 0), head_hidden=width)


def image(text_ids: int, codes: int, side: int) -> ImageTokens:
    """A square of codes, whose ids follow the text's ids, without tokens between or after them."""
    return image_tokens(torch.arange(text_ids, text_ids + codes), side, side, None, [])


def load(
    cfg: UnifiedConfig, source: official.CheckpointSource, side: int, device: torch.device | str, dtype: torch.dtype
) -> Unified:
    """The target of a file in either layout. cfg: of `configured`. Raises the errors of `official.load`."""
    (table, ignored), (inputs_table, others) = layouts(source.tensors, cfg.n_layer, cfg.block)
    names = {dest.name: name for name, dest in (inputs_table | table).items()}
    codes, width = source.tensors[names["codes.weight"]].shape
    inputs = official.load(lambda: ImageInputs(codes, width, cfg.dim), source, inputs_table, device, dtype, others)
    drawn, full_cfg = image(cfg.vocab_size, codes, side), replace(cfg, vocab_size=cfg.vocab_size + codes)
    # Text and codes are read into one table, which is not in memory twice.
    rows = {_CODES: inputs.table()}
    joined = source.joined(Path("memory"), lambda: rows)
    table |= {
        names["tok_embeddings.weight"]: ParameterSlice("tok_embeddings.weight", 0, cfg.vocab_size),
        _CODES: ParameterSlice("tok_embeddings.weight", cfg.vocab_size, codes),
    }
    return official.load(lambda: Unified(full_cfg, drawn), joined, table, device, dtype, ignored)


def read(
    folder: Path,
    source: official.CheckpointSource,
    side: int,
    device: torch.device,
    dtype: torch.dtype,
    declared: tuple[str, UnifiedConfig] | None = None,
) -> Unified:
    """The target of a folder; `source` has its tensors. declared: the name and the sizes that it must have, only with
    the ids of its text; None for a draft model. Raises UsageError if the folder does not describe a target."""
    cfg = described(folder, lambda content: configured(content, source))
    if declared is not None:
        check_sizes(cfg, declared[1], declared[0], folder)
    return load(cfg, source, side, device, dtype)


class Janus(UnifiedModel):
    tokenizer: vq.VQModel

    def read_text(self, cfg: RunConfig) -> None:
        self.ids = JanusIds()
        self.text: Encode = lambda text: hashed_ids(text, 0, TEXT_IDS)
        if self.folder is not None:
            text = JanusText(self.part("target"))
            self.ids, self.text = text.ids(), text.template
        self.pad = self.ids.pad

    def read_networks(self) -> None:
        self.side = REDUCED_SIDE if self.reduced else SIDE
        base = REDUCED if self.reduced else full(self.name)
        if self.folder is None:
            self.tokenizer = self.random_pixels(vq.LLAMAGEN_16, REDUCED_CODES)
            codes = self.tokenizer.cfg.codebook_size
            self.image = image(base.vocab_size - codes, codes, self.side)
            self.target = self.loaded_target(base)
        else:
            folder = self.part("target")
            source = official.open_source(folder)
            self.tokenizer = image_tokenizers.load_janus(source, vq.LLAMAGEN_16, self.device)
            text = replace(base, vocab_size=base.vocab_size - (REDUCED_CODES if self.reduced else CODES))
            self.target = read(folder, source, self.side, self.device, self.dtype, (self.name, text))
            self.image = self.target.image
        self.resolution = self.side * self.tokenizer.cfg.downsample

    def prompt(self, text: str) -> Prompt:
        return janus_prompt(self.text(text), self.ids)

    def read_smaller(self, path: Path) -> Unified:
        return read(path, official.open_source(path), self.side, self.device, self.dtype)


def tokens_of_image(cfg: RunConfig) -> int:
    """Number of tokens of an image. Loads nothing."""
    return SIDE * SIDE
