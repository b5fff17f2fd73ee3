"""The files of models that others publish, at their official sizes and with random numbers: targets, tokenizers, text
encoder and drafters.

Names, shapes and number formats are those that specbench's own tables expect. Matrices inside the layers of a 7B model
and all tensors that no run reads (T5's decoder, Janus's understanding tower) are zeros, and holes in the file: such a
layer passes its input on, and embeddings and head, which are random, keep the distribution of a token from being flat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rehearsal import vocabularies
from rehearsal.formats import entry, of_module, rest, write_json, write_pickled, write_safetensors, write_shards
from specbench.config import parameters, registry
from specbench.models import eagle, emu3_vision, scenes_config, vq
from specbench.models.language import Language
from specbench.models.llamagen import LlamaGen, LlamaGenConfig
from specbench.models.loading import (
    bundle,
    chameleon,
    emu3,
    image_tokenizers,
    janus,
    llamagen_official,
    lumina2,
    naming,
)
from specbench.models.loading.naming import Table
from specbench.models.unified import Unified, UnifiedConfig

#: Words of the captions that are made here.
WORDS = "a red blue cat dog car boat table street small large old on near under with the and two of".split()
GB = 1 << 30
#: Bytes of a target's files where they hold more than a run reads (sums over the reference manifests).
SIZES = {"janus_pro_1b": 4_179_000_000, "janus_pro_7b": 14_840_000_000}
_HOLES = ("layers.",)
Build = Callable[[Path], None]


def built(make: Callable[[], torch.nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def network(file: str, make: Callable[[], torch.nn.Module], table: Callable[[], Table | None], key: str = "") -> Build:
    """A pickled file of a network in float32, by its table of official names; key: of its tensors in the file."""

    def write(folder: Path) -> None:
        write_pickled(folder / file, of_module(built(make), table(), torch.float32), key)

    return write


def words(count: int) -> list[str]:
    of_scenes = scenes_config.WORLDS["scenes"].text("scenes").vocabulary
    return vocabularies.padded([*dict.fromkeys([*WORDS, *of_scenes])], count)


def _config(target: Language, layers: int, **more: Any) -> dict[str, Any]:
    b = target.block
    sizes = {"hidden_size": b.dim, "num_attention_heads": b.n_heads, "num_key_value_heads": b.n_kv_heads}
    sizes |= {"intermediate_size": b.ffn_dim, "vocab_size": len(target.tok_embeddings.weight)}
    return {**sizes, "num_hidden_layers": layers, "rms_norm_eps": 1e-6, **more}


def _eagle(target: Language) -> Build:
    """LANTERN's layout, in float32."""

    def write(folder: Path) -> None:
        cfg = eagle.like_shape(target)
        table = partial(naming.eagle, cfg.block, cfg.input_norm)
        network("pytorch_model.bin", partial(eagle.EagleNetwork, cfg), table)(folder)
        write_json(folder / "config.json", _config(target, 1, rope_theta=cfg.rope_base))

    return write


def _t5(width: int, small: bool) -> Build:
    """google/flan-t5-xl: encoder and decoder in float32, two shards."""

    def write(folder: Path) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        count = vocabularies.save_t5(folder, words(200 if small else 32095), 512)
        sizes = {"d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8} if small else {}
        full = {"d_ff": 5120, "num_layers": 24, "num_heads": 32, "d_kv": 64} | sizes
        rows = count if small else 32128
        more: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
        cfg = T5Config(vocab_size=rows, d_model=width, **full, **more)
        entries = of_module(
            built(lambda: T5ForConditionalGeneration(cfg)), None, torch.float32, holes=("decoder.", "lm_head")
        )
        for copy in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
            entries.pop(copy, None)  # of shared.weight
        write_shards(folder, entries, 9_450_000_000 if not small else 40_000)
        write_json(folder / "config.json", cfg.to_dict() | {"architectures": ["T5ForConditionalGeneration"]})

    return write


def _llamagen_target(name: str, small: bool) -> tuple[LlamaGen, Build]:
    cfg = bundle.shape_of(name, LlamaGenConfig)
    cfg = llamagen_official.reduced(cfg) if small else cfg
    target: LlamaGen = built(lambda: LlamaGen(cfg))
    [file] = registry.model_sources()[name].parts["target"].files
    table = naming.llamagen(cfg.n_layer, text=not cfg.num_classes)
    return target, network(file, lambda: target, lambda: table, "model")


def _llamagen(name: str, small: bool) -> dict[str, Build]:
    target, write_target = _llamagen_target(name, small)
    pixels = vq.LLAMAGEN_16.reduced(target.cfg.vocab_size) if small else vq.LLAMAGEN_16
    entry = registry.model_sources()[name]
    [file] = entry.parts["tokenizer"].files
    table = partial(image_tokenizers.llamagen_table, pixels)
    builds = {"target": write_target, "tokenizer": network(file, partial(vq.VQModel, pixels), table, "model")}
    if "draft" in entry.drafters:
        builds["draft"] = _llamagen_target("llamagen_l", small)[1]
    if "text" in entry.parts:
        builds |= {"text": _t5(target.cfg.caption_dim, small), "eagle": _eagle(target)}
    return builds


def _unified(
    target: Unified, cfg: UnifiedConfig, small: bool, dtype: torch.dtype = torch.bfloat16, **config: Any
) -> Build:
    """A Hugging Face folder with a head of all ids."""

    def write(folder: Path) -> None:
        table = naming.hugging_face(cfg.n_layer, cfg.block, keep=target.image.ids)
        holes = () if small else _HOLES
        entries = of_module(target, table, dtype, cfg.vocab_size, holes)
        write_shards(folder, entries, 100_000 if small else 5 * GB)
        settings = {"rope_theta": cfg.rope_base, "swin_norm": cfg.norms == "after", **config}
        write_json(folder / "config.json", _config(target, cfg.n_layer, **settings) | {"rms_norm_eps": cfg.norm_eps})

    return write


def _chameleon(name: str, small: bool) -> dict[str, Build]:
    lumina = name == "lumina_mgpt"
    pixels = vq.CHAMELEON.reduced(chameleon.REDUCED_CODES) if small else vq.CHAMELEON
    base = chameleon.REDUCED if small else chameleon.FULL
    base = base if lumina else replace(base, qk_norm=base.n_head)
    side = chameleon.REDUCED_SIZE if small else 768 if lumina else chameleon.ANOLE_SIZE
    codes = torch.arange(4, 4 + pixels.codebook_size)
    image = chameleon.lumina_image(codes, side, side) if lumina else chameleon.anole_image(codes, side)
    target: Unified = built(lambda: Unified(base, image))

    def write_tokenizer(folder: Path) -> None:
        names = vocabularies.chameleon_names(range(pixels.codebook_size), 64)
        vocabularies.save_chameleon(folder / "text_tokenizer.json", names, [f"Ġ{word}" for word in words(0)])
        (folder / "vqgan.yaml").write_text("model: {}\n")
        table = partial(image_tokenizers.taming_table, pixels)
        network("vqgan.ckpt", partial(vq.VQModel, pixels), table, "state_dict")(folder)

    write_target = _unified(target, base, small)
    return {"target": write_target, "tokenizer": write_tokenizer, "eagle": _eagle(target)}


def _lumina2(name: str, small: bool) -> dict[str, Build]:
    pixels = vq.MOVQGAN.reduced(lumina2.REDUCED_CODES) if small else vq.MOVQGAN
    base = lumina2.REDUCED if small else lumina2.FULL
    side = lumina2.REDUCED_SIZE if small else lumina2.SIZE
    image = lumina2.image(pixels.codebook_size, side, side)
    target: Unified = built(lambda: Unified(base, image))
    ids, named = lumina2.IDS, {"<reserved08706>": "end_of_turn", "<racm3:break>": "image_start", "<eoss>": "image_end"}
    named |= {"<reserved08799>": "new_line", "<reserved08800>": "size"}
    vocabulary = {token: getattr(ids, field) for token, field in named.items()}

    def write_target(folder: Path) -> None:
        _unified(target, base, small, vocabulary_map=vocabulary)(folder)
        vocabularies.save_words(folder / "tokenizer.json", ["<|end|>", "<unk>", *words(0)], 1)
        write_json(folder / "tokenizer_config.json", {"bos_token": None, "eos_token": "<|end|>"})

    table = partial(image_tokenizers.taming_table, pixels)
    return {"target": write_target, "tokenizer": network("movqgan_270M.ckpt", partial(vq.VQModel, pixels), table)}


def _janus(name: str, small: bool) -> dict[str, Build]:
    pixels = vq.LLAMAGEN_16.reduced(janus.REDUCED_CODES) if small else vq.LLAMAGEN_16
    cfg = janus.REDUCED if small else janus.full(name)
    text = replace(cfg, vocab_size=cfg.vocab_size - pixels.codebook_size)
    side = janus.REDUCED_SIDE if small else janus.SIDE
    image = janus.image(text.vocab_size, pixels.codebook_size, side)
    target: Unified = built(lambda: Unified(text, image))

    def write(folder: Path) -> None:
        (table, _), (input_table, _) = janus.layouts(["gen_embed.weight"], text.n_layer, text.block)
        kind, holes = torch.bfloat16, () if small else _HOLES
        inputs = built(lambda: janus.ImageInputs(pixels.codebook_size, 8, text.dim))
        names = image_tokenizers.janus_layout((), pixels)[0]
        entries = of_module(target, table, kind, holes=holes) | of_module(inputs, input_table, kind)
        entries |= of_module(built(lambda: vq.VQModel(pixels)), names, kind)
        entries["language_model.lm_head.weight"] = entry("lm_head", (text.vocab_size, text.dim), kind, True)
        entries = rest(entries, "vision_model.rest", 0 if small else SIZES[name], kind)
        write_shards(folder, entries, 10 * GB, "bin")
        sizes = _config(target, text.n_layer)
        write_json(folder / "config.json", {"language_config": {n: sizes[n] for n in sizes if n != "rms_norm_eps"}})
        special = ["<｜begin▁of▁sentence｜>", "<｜▁pad▁｜>", "<begin_of_image>"]
        vocabulary = [*special, "<unk>", ":", "<|User|>:", "<|Assistant|>:", *words(0)]
        vocabularies.save_words(folder / "tokenizer.json", vocabulary)

    builds = {"target": write}
    return builds | ({"draft": _janus("janus_pro_1b", small)["target"]} if name == "janus_pro_7b" else {})


def _emu3(name: str, small: bool) -> dict[str, Build]:
    """In float32."""
    sizes = emu3_vision.reduced(emu3.REDUCED_CODES) if small else emu3_vision.OFFICIAL
    shape, base = emu3_vision.configured(sizes), emu3.REDUCED if small else emu3.FULL
    grid = (emu3.REDUCED_SIDE, emu3.REDUCED_SIDE) if small else emu3.grid(emu3.AREA, "1:1", 8)
    image = emu3.image(torch.arange(emu3.FIRST_CODE, emu3.FIRST_CODE + sizes["codebook_size"]), *grid)
    target: Unified = built(lambda: Unified(base, image))

    def write_target(folder: Path) -> None:
        _unified(target, base, small, torch.float32)(folder)
        texts = [parameters.default("model", name, field) for field in ("suffix", "negative")]
        vocabularies.save_ranks(folder / "emu3.tiktoken", [*words(0), *" ".join(texts).split()])
        (folder / "emu3_vision_tokens.txt").write_text("")

    def write_tokenizer(folder: Path) -> None:
        pixels = built(lambda: image_tokenizers.emu3_vision(shape, ()))
        entries = of_module(pixels, image_tokenizers.emu3_layout(shape, ())[0], torch.float32)
        write_safetensors(folder / "model.safetensors", entries)
        write_json(folder / "config.json", sizes | {"model_type": "Emu3VisionVQ"})

    return {"target": write_target, "tokenizer": write_tokenizer}


FAMILIES: Mapping[str, Callable[[str, bool], dict[str, Build]]] = {
    **dict.fromkeys(("llamagen_xl", "llamagen_xl_512", "llamagen_l", "llamagen_xl_c2i", "llamagen_3b"), _llamagen),
    **dict.fromkeys(("lumina_mgpt", "anole"), _chameleon),
    "lumina_mgpt2": _lumina2,
    **dict.fromkeys(("janus_pro_1b", "janus_pro_7b"), _janus),
    "emu3": _emu3,
}


def of_model(name: str, small: bool) -> dict[str, Build]:
    """The files of a model's parts and published drafters, by their folders. small: of reduced=true."""
    return FAMILIES[name](name, small)
