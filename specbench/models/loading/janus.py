"""Janus-Pro: a Llama whose image tokens have inputs and a head of their own.

A code enters through a small embedding and two linear layers. Their product is a table with a row a code, which is
computed once, when the files are read, and follows the rows of the text in the target's table: the id of a code is the
size of the text's vocabulary + the code. Facts: reference README_3 (39) to (48) and the manifests of Janus-Pro.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specbench.engine.ops import gelu, linear
from specbench.errors import UsageError
from specbench.models import vq
from specbench.models.loading import image_tokenizers, naming, official
from specbench.models.loading.bundle import shape_of
from specbench.models.loading.naming import Layout, ParameterSlice
from specbench.models.loading.text_official import NamedText, hashed_ids
from specbench.models.loading.unified_official import Encode, Prompt, UnifiedModel, described, from_hugging_face
from specbench.models.transformer import BlockConfig
from specbench.models.unified import ImageTokens, Unified, UnifiedConfig, image_tokens

_CODES = "inputs of the codes"  # no name of a file's

SIDE, CODES = 24, 16384  # an image of 384 x 384 pixels: rows and columns of codes; the codes
TEXT_IDS = 100000  # ids below are of text


def full(model: str) -> UnifiedConfig:
    """The network of a published size."""
    return shape_of(model, UnifiedConfig, vocab_size=102400 + CODES, norm_eps=1e-6)


REDUCED_CODES, REDUCED_SIDE = 64, 4
REDUCED = UnifiedConfig(32, 2, 2, 2, 64, 100100 + REDUCED_CODES, norm_eps=1e-6, head_hidden=24)

#: What a config.json of the 7B model leaves to the defaults of transformers' Llama (README_3 (47)).
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
}


class ImageInputs(nn.Module):
    """The inputs of image tokens as the files hold them: codes (V, d), then two linear layers."""

    def __init__(self, codes: int, width: int, dim: int) -> None:
        super().__init__()
        self.codes = nn.Embedding(codes, width)
        self.first, self.second = nn.Linear(width, dim), nn.Linear(dim, dim)

    def table(self) -> Tensor:
        """A row (V, dim) of each code."""
        x = gelu(linear(self.codes.weight, self.first.weight, self.first.bias))
        return linear(x, self.second.weight, self.second.bias)


def layouts(names: Collection[str], layers: int, block: BlockConfig) -> tuple[Layout, Layout]:
    """The layouts of the language model and of the image tokens' inputs, from the names in a file: DeepSeek's own
    layout, or transformers'. Raises UsageError where neither fits."""
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
    own = {f"{inputs[0]}.weight": ParameterSlice("codes.weight")}
    for part in ("weight", "bias"):
        table[f"{head}.{inner}.{part}"] = ParameterSlice(f"head_hidden.{part}")
        for ours, theirs in (("first", inputs[1]), ("second", inputs[2])):
            own[f"{theirs}.{part}"] = ParameterSlice(f"{ours}.{part}")
    rest = [*others, *naming.ROTARY]
    return (table, [*map(re.escape, own), *rest]), (own, [*map(re.escape, table), *rest])


@dataclass(frozen=True)
class JanusIds:
    """Special ids of Janus-Pro's vocabulary that a prompt is made of (manifest Janus-Pro-1B)."""

    bos: int = 100000
    pad: int = 100015
    begin_of_image: int = 100016


class JanusText(NamedText):
    """Janus-Pro's tokenizer, tokenizer.json of either layout."""

    model = "Janus-Pro"

    def ids(self) -> JanusIds:
        """The special ids, by their names. Raises UsageError where one is missing."""
        names = {"bos": "<｜begin▁of▁sentence｜>", "pad": "<｜▁pad▁｜>", "begin_of_image": "<begin_of_image>"}
        return JanusIds(**self.named(names))

    def template(self, prompt: str) -> list[int]:
        """The ids of what a user asks and an assistant answers to (prompt_formats_3.json). A role that is a token of
        its own is one id, else text; a prompt cannot spell one."""
        return [*self._role("<|User|>", f": {prompt.strip()}\n\n"), *self._role("<|Assistant|>", ":")]

    def _role(self, name: str, text: str) -> list[int]:
        return [self._names[name], *self.encode(text)] if name in self._names else self.encode(name + text)


def janus_prompt(text: Sequence[int], ids: JanusIds) -> Prompt:
    """[bos] text [begin of image]; the unconditional prompt is as long, with padding instead of the text, which is
    attended to (reference README_3 (39))."""
    return Prompt([ids.bos, *text, ids.begin_of_image], [ids.bos, *[ids.pad] * len(text), ids.begin_of_image])


def configured(content: Mapping[str, Any], source: official.CheckpointSource) -> UnifiedConfig:
    """The language model of a config.json, of either layout, with the rows of its text alone; the tensors give the
    width of the head. Raises KeyError, TypeError or ValueError for what describes none."""
    own = content.get("language_config") or content.get("text_config") or content
    rope = {} if "rope_parameters" in own else {"rope_theta": 10000.0}
    inner = ("gen_head.output_mlp_projector.bias", "model.generation_head.proj_out.bias")
    width = next((source.tensors[name].shape[0] for name in inner if name in source.tensors), 0)
    return replace(from_hugging_face({**_LLAMA, **rope, **own}, 0), head_hidden=width)


def image(text_ids: int, codes: int, side: int) -> ImageTokens:
    """A square of codes, which are the ids after the text's; nothing between or after them."""
    return image_tokens(torch.arange(text_ids, text_ids + codes), side, side, None, [])


def load(
    cfg: UnifiedConfig, source: official.CheckpointSource, side: int, device: torch.device | str, dtype: torch.dtype
) -> Unified:
    """The target of a file of either layout; cfg as of `configured`. Errors are those of `official.load`."""
    (table, ignored), (own, others) = layouts(source.tensors, cfg.n_layer, cfg.block)
    names = {dest.name: name for name, dest in (own | table).items()}
    codes, width = source.tensors[names["codes.weight"]].shape
    inputs = official.load(lambda: ImageInputs(codes, width, cfg.dim), source, own, device, dtype, others)
    drawn, every = image(cfg.vocab_size, codes, side), replace(cfg, vocab_size=cfg.vocab_size + codes)
    # Text and codes are read into one table, which is never in memory twice.
    rows = {_CODES: inputs.table()}
    both = source.joined(Path("memory"), lambda: rows)
    table |= {
        names["tok_embeddings.weight"]: ParameterSlice("tok_embeddings.weight", 0, cfg.vocab_size),
        _CODES: ParameterSlice("tok_embeddings.weight", cfg.vocab_size, codes),
    }
    return official.load(lambda: Unified(every, drawn), both, table, device, dtype, ignored)


def read(
    folder: Path, source: official.CheckpointSource, side: int, device: torch.device, dtype: torch.dtype
) -> Unified:
    """The target of a folder, of which `source` has the tensors. Raises UsageError for what does not describe one."""
    cfg = described(folder, lambda content: configured(content, source))
    return load(cfg, source, side, device, dtype)


class Janus(UnifiedModel):
    tokenizer: vq.VQModel

    def __init__(self, cfg: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(cfg, device, dtype)
        self.side = REDUCED_SIDE if self.reduced else SIDE
        self.ids = JanusIds()
        self.text: Encode = lambda text: hashed_ids(text, 0, TEXT_IDS)
        if self.folder is None:
            self.tokenizer = self.random_pixels(vq.LLAMAGEN_16, REDUCED_CODES)
            base, codes = REDUCED if self.reduced else full(self.name), self.tokenizer.cfg.codebook_size
            self.image = image(base.vocab_size - codes, codes, self.side)
            self.target = self.loaded_target(base)
        else:
            folder = self.part("target")
            source = official.open_source(folder)
            self.tokenizer = image_tokenizers.load_janus(source, vq.LLAMAGEN_16, device)
            text = JanusText(folder)
            self.ids, self.text = text.ids(), text.template
            self.target = read(folder, source, self.side, device, dtype)
            self.image = self.target.image
        self.pad = self.ids.pad
        self.resolution = self.side * self.tokenizer.cfg.downsample

    def prompt(self, text: str) -> Prompt:
        return janus_prompt(self.text(text), self.ids)

    def read_smaller(self, path: Path) -> Unified:
        return read(path, official.open_source(path), self.side, self.device, self.dtype)


def tokens_of_image(cfg: Mapping[str, Any]) -> int:
    """Tokens of an image; loads nothing."""
    return SIDE * SIDE
