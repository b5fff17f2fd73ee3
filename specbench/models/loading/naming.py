"""Tables from the tensor names of official checkpoints to specbench's parameter names.

A table depends only on a model's shape. Official names are the names in the published files (reference manifests);
names on the right are the Transformer's, see `specbench.models.transformer`. A list of regular expressions, which match
entire names, covers the tensors of a file that are not needed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specbench.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from specbench.models.transformer import BlockConfig


@dataclass(frozen=True)
class ParameterSlice:
    """The destination of an official tensor.

    `rows` rows of the parameter `name`, from row `start`; rows = None: the whole parameter. pick (rows,) int64: the
    rows of the official tensor that are kept, in this order; None: all rows, in the same order.
    """

    name: str
    start: int = 0
    rows: int | None = None
    pick: Tensor | None = None


Table = dict[str, ParameterSlice]
#: A table, and the names that are ignored in such a file: regular expressions that match entire official names.
Layout = tuple[Table, list[str]]

#: Rotary tables, which specbench computes: LlamaGen's, and the tables that transformers before 4.32 stored.
ROTARY = [r"(model\.)?freqs_cis", r".*\.rotary_emb\.inv_freq"]


def llamagen(layers: int, text: bool) -> Table:
    """LlamaGen's files, text- or class-conditional, without their wrapper: the names are the same."""
    names = ["tok_embeddings.weight", "norm.weight", "output.weight", *_condition(text)]
    block = "attention.wqkv attention.wo feed_forward.w1 feed_forward.w3 feed_forward.w2 attention_norm ffn_norm"
    names += [f"layers.{n}.{part}.weight" for n in range(layers) for part in block.split()]
    return {name: ParameterSlice(name) for name in names}


def hugging_face(
    layers: int, block: BlockConfig, prefix: str = "model.", head: str = "lm_head.weight", keep: Tensor | None = None
) -> Table:
    """The Llama layout of Hugging Face: Lumina-mGPT, Anole, Emu3 and SimpleAR. keep (rows,) int64: the head's rows that
    are kept, in this order."""
    table = {
        f"{prefix}embed_tokens.weight": ParameterSlice("tok_embeddings.weight"),
        f"{prefix}norm.weight": ParameterSlice("norm.weight"),
        head: ParameterSlice("output.weight", pick=keep),
    }
    for n in range(layers):
        table |= _layer(f"{prefix}layers.{n}.", f"layers.{n}.", block)
    return table


def lantern_llamagen(layers: int, block: BlockConfig, text: bool = True) -> Table:
    """LANTERN's release of LlamaGen: the layout of Hugging Face with LlamaGen's condition embedding."""
    return hugging_face(layers, block) | {f"model.{name}": ParameterSlice(name) for name in _condition(text)}


def eagle(block: BlockConfig, input_norm: bool, layers: int = 1, fc_bias: bool = True) -> Table:
    """LANTERN's EAGLE drafters (reference README (11), (12)); LlamaGen's first layer has no input norm."""
    table = {name: ParameterSlice(name) for name in ("embed_tokens.weight", "fc.weight")}
    if fc_bias:
        table["fc.bias"] = ParameterSlice("fc.bias")
    for n in range(layers):
        table |= _layer(f"layers.{n}.", f"layers.{n}.", block, input_norm or n > 0)
    return table


def medusa(heads: int, prefix: str = "medusa_head.") -> Table:
    """Medusa heads with one residual block per head."""
    parts = ("0.linear.weight", "0.linear.bias", "1.weight")
    return {f"{prefix}{n}.{part}": ParameterSlice(f"medusa_head.{n}.{part}") for n in range(heads) for part in parts}


def for_language(
    source_names: Collection[str],
    layers: int,
    block: BlockConfig,
    keep: Tensor | None = None,
    where: str = "the checkpoint",
) -> Layout:
    """The layout of a Lumina-mGPT, Anole, Emu3 or SimpleAR file, from its names. Raises UsageError if no layout fits.

    `model.*` is the official layout, and the layout of transformers' language models. transformers' Emu3 with its
    vision tokenizer writes `text_model.model.*`; in its module, and so in a state dict saved by hand, the same tensors
    are `model.text_model.*`. The pixel tokenizer in such a file is not part of the language model.
    """
    candidates = {
        "model.": ("lm_head.weight", r"(model\.)?vqmodel\..*"),
        "text_model.model.": ("text_model.lm_head.weight", r"vqmodel\..*"),
        "model.text_model.": ("lm_head.weight", r"model\.vqmodel\..*"),
    }
    for prefix, (head, pixels) in candidates.items():
        if f"{prefix}embed_tokens.weight" in source_names:
            return hugging_face(layers, block, prefix, head, keep), [pixels, *ROTARY]
    raise _no_layout(where, source_names, [f"{prefix}embed_tokens.weight" for prefix in candidates])


def for_llamagen(
    source_names: Collection[str], layers: int, block: BlockConfig, text: bool = True, where: str = "the checkpoint"
) -> Layout:
    """The layout of a LlamaGen file, from its names: LlamaGen's or LANTERN's. Raises UsageError if neither fits."""
    if "tok_embeddings.weight" in source_names:
        return llamagen(layers, text), [*ROTARY]
    if "model.embed_tokens.weight" in source_names:
        return lantern_llamagen(layers, block, text), [*ROTARY]
    raise _no_layout(where, source_names, ["tok_embeddings.weight", "model.embed_tokens.weight"])


def for_medusa(source_names: Collection[str], heads: int, where: str = "the checkpoint") -> Layout:
    """The first `heads` heads of a Medusa file: with the prefix `medusa_head.`, or without it, as in Medusa's released
    medusa_lm_head.pt, which has the state dict of the list of heads. Heads are independent, so other heads may be
    unused."""
    for prefix in ("medusa_head.", ""):
        if f"{prefix}0.0.linear.weight" in source_names:
            kept = "|".join(map(str, range(heads)))
            return medusa(heads, prefix), [rf"{re.escape(prefix)}(?!(?:{kept})\.)\d+\..*"]
    raise _no_layout(where, source_names, ["medusa_head.0.0.linear.weight", "0.0.linear.weight"])


def _condition(text: bool) -> list[str]:
    if text:
        return [f"cls_embedding.{part}" for part in ("uncond_embedding", "cap_proj.fc1.weight", "cap_proj.fc2.weight")]
    return ["cls_embedding.embedding_table.weight"]


def _layer(official_prefix: str, own_prefix: str, block: BlockConfig, input_norm: bool = True) -> Table:
    """One layer. q, k and v are consecutive blocks of rows of our wqkv (reference README (8))."""
    q, kv = block.n_heads * block.head_dim, block.n_kv_heads * block.head_dim
    wqkv = f"{own_prefix}attention.wqkv.weight"
    table = {
        f"{official_prefix}self_attn.q_proj.weight": ParameterSlice(wqkv, 0, q),
        f"{official_prefix}self_attn.k_proj.weight": ParameterSlice(wqkv, q, kv),
        f"{official_prefix}self_attn.v_proj.weight": ParameterSlice(wqkv, q + kv, kv),
        f"{official_prefix}self_attn.o_proj.weight": ParameterSlice(f"{own_prefix}attention.wo.weight"),
        f"{official_prefix}mlp.gate_proj.weight": ParameterSlice(f"{own_prefix}feed_forward.w1.weight"),
        f"{official_prefix}mlp.up_proj.weight": ParameterSlice(f"{own_prefix}feed_forward.w3.weight"),
        f"{official_prefix}mlp.down_proj.weight": ParameterSlice(f"{own_prefix}feed_forward.w2.weight"),
    }
    if block.qkv_bias:
        weights = [name for name in table if re.search(r"\.[qkv]_proj\.weight$", name)]
        bias = f"{own_prefix}attention.wqkv.bias"
        table |= {f"{name[:-6]}bias": replace(table[name], name=bias) for name in weights}
    # Chameleon's `swin_norm` moves its norms but keeps their names.
    suffix = "norm" if block.norms == "before" else "after"
    for norm, name in (("input_layernorm", f"attention_{suffix}"), ("post_attention_layernorm", f"ffn_{suffix}")):
        if input_norm or name != "attention_norm":
            table[f"{official_prefix}{norm}.weight"] = ParameterSlice(f"{own_prefix}{name}.weight")
    if block.qk_norm:
        norms = [f"{norm}.{kind}" for norm in ("q_norm", "k_norm") for kind in ("weight", "bias")]
        table |= {
            f"{official_prefix}self_attn.{norm}": ParameterSlice(f"{own_prefix}attention.{norm}") for norm in norms
        }
    return table


def _no_layout(where: str, tensors: Iterable[str], tried: list[str]) -> UsageError:
    names = sorted(tensors)
    few = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return UsageError(
        f"{where} has no known layout of this model: it holds {few or 'no tensors'}, and none of "
        f"{', '.join(tried)}; name the model's own files"
    )
