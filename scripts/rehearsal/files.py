"""The files that a run reads, at their official or at reduced sizes and with random numbers: targets, tokenizers, text
encoder and drafters of the models, evaluators of the metrics, COCO's photographs and captions.

Names, shapes and number formats are those that specbench's own tables expect. Matrices inside the layers of a 7B model
and all tensors that no run reads (T5's decoder, Janus's understanding tower) are zeros, and holes in the file: such a
layer passes its input on, and embeddings and head, which are random, keep the distribution of a token from being flat.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from rehearsal import vocabularies
from rehearsal.formats import of_module, shape, write, write_json, write_shards
from specbench.config import parameters, registry
from specbench.metrics import blip, inception, towers
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
    mar_official,
    naming,
)
from specbench.models.loading.naming import Table
from specbench.models.mar import MAR, MARConfig
from specbench.models.unified import Unified, UnifiedConfig

#: Words of the captions that are made here.
WORDS = "a red blue cat dog car boat table street small large old on near under with the and two of".split()
GB = 1 << 30
#: Bytes of a target's files where they hold more than a run reads (sums over the reference manifests).
SIZES = {"janus_pro_1b": 4_179_000_000, "janus_pro_7b": 14_840_000_000}
Build = Callable[[Path], None]


def built(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def network(file: str, make: Callable[[], nn.Module], table: Callable[[], Table | None], key: str = "") -> Build:
    """A pickled file of a network in float32, by its table of official names; key: of its tensors in the file."""
    return lambda folder: write(folder / file, of_module(built(make), table(), torch.float32), key)


def words(count: int) -> list[str]:
    of_scenes = scenes_config.WORLDS["scenes"].text("scenes").vocabulary
    return vocabularies.padded([*dict.fromkeys([*WORDS, *of_scenes])], count)


# --- models -----------------------------------------------------------------------------------------------------------


def _config(target: Language, layers: int, **more: Any) -> dict[str, Any]:
    b = target.block
    sizes = {"hidden_size": b.dim, "num_attention_heads": b.n_heads, "num_key_value_heads": b.n_kv_heads}
    sizes |= {"intermediate_size": b.ffn_dim, "vocab_size": len(target.tok_embeddings.weight)}
    return {**sizes, "num_hidden_layers": layers, "rms_norm_eps": 1e-6, **more}


def _eagle(target: Language) -> Build:
    """LANTERN's layout, in float32."""

    def build(folder: Path) -> None:
        cfg = eagle.like_shape(target)
        table = partial(naming.eagle, cfg.block, cfg.input_norm)
        network("pytorch_model.bin", partial(eagle.EagleNetwork, cfg), table)(folder)
        write_json(folder / "config.json", _config(target, 1, rope_theta=cfg.rope_base))

    return build


def _t5(width: int, small: bool) -> Build:
    """google/flan-t5-xl: encoder and decoder in float32, two shards."""

    def build(folder: Path) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        count = vocabularies.save_t5(folder, words(200 if small else 32095), 512)
        sizes = {"d_ff": 5120, "num_layers": 24, "num_heads": 32, "d_kv": 64}
        sizes |= {"d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8} if small else {}
        rows, more = count if small else 32128, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
        cfg = T5Config(vocab_size=rows, d_model=width, **sizes, **more)
        shapes = of_module(built(lambda: T5ForConditionalGeneration(cfg)), None, torch.float32)
        for copy in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
            shapes.pop(copy, None)  # of shared.weight
        write_shards(folder, shapes, 40_000 if small else 9_450_000_000, holes=r"decoder\.|lm_head")
        write_json(folder / "config.json", cfg.to_dict() | {"architectures": ["T5ForConditionalGeneration"]})

    return build


def _llamagen_target(name: str, small: bool) -> tuple[LlamaGen, Build]:
    cfg = bundle.shape_of(name, LlamaGenConfig)
    cfg = llamagen_official.reduced(cfg) if small else cfg
    target: LlamaGen = built(lambda: LlamaGen(cfg))
    [file] = registry.model_sources()[name].parts["target"].files
    table = naming.llamagen(cfg.n_layer, text=not cfg.num_classes)
    return target, network(file, lambda: target, lambda: table, "model")


def _llamagen(name: str, small: bool) -> dict[str, Build]:
    target, build_target = _llamagen_target(name, small)
    pixels = vq.LLAMAGEN_16.reduced(target.cfg.vocab_size) if small else vq.LLAMAGEN_16
    entry = registry.model_sources()[name]
    [file] = entry.parts["tokenizer"].files
    table = partial(image_tokenizers.llamagen_table, pixels)
    builds = {"target": build_target, "tokenizer": network(file, partial(vq.VQModel, pixels), table, "model")}
    if "draft" in entry.drafters:
        builds["draft"] = _llamagen_target("llamagen_l", small)[1]
    if "text" in entry.parts:
        builds |= {"text": _t5(target.cfg.caption_dim, small), "eagle": _eagle(target)}
    return builds


def _unified(
    target: Unified, cfg: UnifiedConfig, small: bool, dtype: torch.dtype = torch.bfloat16, **config: Any
) -> Build:
    """A Hugging Face folder with a head of all ids."""

    def build(folder: Path) -> None:
        shapes = of_module(
            target, naming.hugging_face(cfg.n_layer, cfg.block, keep=target.image.ids), dtype, cfg.vocab_size
        )
        write_shards(folder, shapes, 100_000 if small else 5 * GB, holes="" if small else r"layers\.")
        settings = {"rope_theta": cfg.rope_base, "swin_norm": cfg.norms == "after", "rms_norm_eps": cfg.norm_eps}
        write_json(folder / "config.json", _config(target, cfg.n_layer) | settings | config)

    return build


def _chameleon(name: str, small: bool) -> dict[str, Build]:
    lumina = name == "lumina_mgpt"
    pixels = vq.CHAMELEON.reduced(chameleon.REDUCED_CODES) if small else vq.CHAMELEON
    base = chameleon.REDUCED if small else bundle.shape_of(name, UnifiedConfig)
    base = base if lumina else replace(base, qk_norm=base.n_head)
    side = chameleon.REDUCED_SIZE if small else 768 if lumina else chameleon.ANOLE_SIZE
    codes = torch.arange(4, 4 + pixels.codebook_size)
    image = chameleon.lumina_image(codes, side, side) if lumina else chameleon.anole_image(codes, side)
    target: Unified = built(lambda: Unified(base, image))

    def build_tokenizer(folder: Path) -> None:
        names = vocabularies.chameleon_names(range(pixels.codebook_size), 64)
        vocabularies.save_chameleon(folder / "text_tokenizer.json", names, [f"Ġ{word}" for word in words(0)])
        (folder / "vqgan.yaml").write_text("model: {}\n")
        table = partial(image_tokenizers.taming_table, pixels)
        network("vqgan.ckpt", partial(vq.VQModel, pixels), table, "state_dict")(folder)

    return {"target": _unified(target, base, small), "tokenizer": build_tokenizer, "eagle": _eagle(target)}


def _lumina2(name: str, small: bool) -> dict[str, Build]:
    pixels = vq.MOVQGAN.reduced(lumina2.REDUCED_CODES) if small else vq.MOVQGAN
    base = lumina2.REDUCED if small else bundle.shape_of(name, UnifiedConfig)
    side = lumina2.REDUCED_SIZE if small else lumina2.SIZE
    image = lumina2.image(pixels.codebook_size, side, side)
    target: Unified = built(lambda: Unified(base, image))
    ids, named = lumina2.IDS, {"<reserved08706>": "end_of_turn", "<racm3:break>": "image_start", "<eoss>": "image_end"}
    named |= {"<reserved08799>": "new_line", "<reserved08800>": "size"}

    def build_target(folder: Path) -> None:
        vocabulary = {token: getattr(ids, field) for token, field in named.items()}
        _unified(target, base, small, vocabulary_map=vocabulary)(folder)
        vocabularies.save_words(folder / "tokenizer.json", ["<|end|>", "<unk>", *words(0)], 1)
        write_json(folder / "tokenizer_config.json", {"bos_token": None, "eos_token": "<|end|>"})

    table = partial(image_tokenizers.taming_table, pixels)
    return {"target": build_target, "tokenizer": network("movqgan_270M.ckpt", partial(vq.VQModel, pixels), table)}


def _janus(name: str, small: bool) -> dict[str, Build]:
    pixels = vq.LLAMAGEN_16.reduced(janus.REDUCED_CODES) if small else vq.LLAMAGEN_16
    cfg = janus.REDUCED if small else janus.full(name)
    text = replace(cfg, vocab_size=cfg.vocab_size - pixels.codebook_size)
    side = janus.REDUCED_SIDE if small else janus.SIDE
    image = janus.image(text.vocab_size, pixels.codebook_size, side)
    target: Unified = built(lambda: Unified(text, image))

    def build(folder: Path) -> None:
        (table, _), (input_table, _) = janus.layouts(["gen_embed.weight"], text.n_layer, text.block)
        kind = torch.bfloat16
        inputs = built(lambda: janus.ImageInputs(pixels.codebook_size, 8, text.dim))
        names = image_tokenizers.janus_layout((), pixels)[0]
        shapes = of_module(target, table, kind) | of_module(inputs, input_table, kind)
        shapes |= of_module(built(lambda: vq.VQModel(pixels)), names, kind)
        shapes["language_model.lm_head.weight"] = shape(kind, text.vocab_size, text.dim)
        if not small:
            missing = SIZES[name] - sum(tensor.nbytes for tensor in shapes.values())
            shapes["vision_model.rest"] = shape(kind, missing // 2, 1)
        write_shards(folder, shapes, 10 * GB, "bin", r"lm_head|rest" + ("" if small else r"|layers\."))
        sizes = _config(target, text.n_layer)
        write_json(folder / "config.json", {"language_config": {n: sizes[n] for n in sizes if n != "rms_norm_eps"}})
        special = ["<｜begin▁of▁sentence｜>", "<｜▁pad▁｜>", "<begin_of_image>"]
        vocabulary = [*special, "<unk>", ":", "<|User|>:", "<|Assistant|>:", *words(0)]
        vocabularies.save_words(folder / "tokenizer.json", vocabulary)

    return {"target": build, **({"draft": _janus("janus_pro_1b", small)["target"]} if name == "janus_pro_7b" else {})}


def _emu3(name: str, small: bool) -> dict[str, Build]:
    """In float32."""
    sizes = emu3_vision.reduced(emu3.REDUCED_CODES) if small else emu3_vision.OFFICIAL
    pixels, base = emu3_vision.configured(sizes), emu3.REDUCED if small else bundle.shape_of(name, UnifiedConfig)
    grid = (emu3.REDUCED_SIDE, emu3.REDUCED_SIDE) if small else emu3.grid(emu3.AREA, "1:1", 8)
    image = emu3.image(torch.arange(emu3.FIRST_CODE, emu3.FIRST_CODE + sizes["codebook_size"]), *grid)
    target: Unified = built(lambda: Unified(base, image))

    def build_target(folder: Path) -> None:
        _unified(target, base, small, torch.float32)(folder)
        texts = [parameters.default("model", name, field) for field in ("suffix", "negative")]
        vocabularies.save_ranks(folder / "emu3.tiktoken", [*words(0), *" ".join(texts).split()])
        (folder / "emu3_vision_tokens.txt").write_text("")

    def build_tokenizer(folder: Path) -> None:
        shapes = of_module(
            built(lambda: image_tokenizers.emu3_vision(pixels, ())),
            image_tokenizers.emu3_layout(pixels, ())[0],
            torch.float32,
        )
        write(folder / "model.safetensors", shapes)
        write_json(folder / "config.json", sizes | {"model_type": "Emu3VisionVQ"})

    return {"target": build_target, "tokenizer": build_tokenizer}


def _mar(name: str, small: bool) -> dict[str, Build]:
    """In float32."""

    def target(model: str) -> Build:
        cfg = bundle.shape_of(model, MARConfig.even)
        cfg = mar_official.reduced(cfg) if small else cfg
        [file] = registry.model_sources()[model].parts["target"].files
        return network(file, partial(MAR, cfg), partial(mar_official.table, cfg))

    pixels = vq.KL16.reduced(0) if small else vq.KL16
    tokenizer = network("kl16.safetensors", partial(vq.KLModel, pixels), partial(image_tokenizers.taming_table, pixels))
    return {"target": target(name), "tokenizer": tokenizer, "draft": target("mar_b")}


FAMILIES: Mapping[str, Callable[[str, bool], dict[str, Build]]] = {
    **dict.fromkeys(("llamagen_xl", "llamagen_xl_512", "llamagen_l", "llamagen_xl_c2i", "llamagen_3b"), _llamagen),
    **dict.fromkeys(("lumina_mgpt", "anole"), _chameleon),
    "lumina_mgpt2": _lumina2,
    **dict.fromkeys(("janus_pro_1b", "janus_pro_7b"), _janus),
    "emu3": _emu3,
    **dict.fromkeys(("mar_l", "mar_h"), _mar),
}


def of_model(name: str, small: bool) -> dict[str, Build]:
    """The files of a model's parts and published drafters, by their folders. small: of reduced=true."""
    return FAMILIES[name](name, small)


# --- evaluators and photographs ---------------------------------------------------------------------------------------


def _towers(architecture: str, file: str, dtype: torch.dtype) -> Build:
    """OpenCLIP's towers, as CLIP's file or, pickled, as HPS's."""

    def build(folder: Path) -> None:
        import open_clip

        shapes = of_module(built(lambda: open_clip.CLIP(**towers.config(architecture))), None, dtype)
        write(folder / file, shapes, "state_dict")

    return build


def _vocabulary(folder: Path) -> None:
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    folder.mkdir(parents=True, exist_ok=True)
    entries = vocabularies.padded([*marks, *WORDS, "."], blip.TEXT["vocab_size"] - 2)
    (folder / "vocab.txt").write_text("\n".join(entries) + "\n", encoding="utf-8")


def _inception(folder: Path) -> None:
    """With He's initialisation, under which the features of two images differ."""
    blank = inception.blank()
    torch.manual_seed(0)
    for module in blank.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(blank.state_dict(), folder / inception.FILES[0])


#: Folder of an evaluator -> its files; Inception-V3 has no small form.
EVALUATORS: Mapping[str, Build] = {
    "inception": _inception,
    "clip_b32": _towers("ViT-B-32-quickgelu", "open_clip_model.safetensors", torch.float32),
    "image_reward": network("ImageReward.pt", blip.Blip, blip.table),
    "image_reward/text": _vocabulary,
    "hpsv2": _towers("ViT-H-14", "HPS_v2_compressed.pt", torch.float16),
}


def coco2017(folder: Path, photographs: int) -> None:
    """val2017 and its captions, with so many photographs of noise."""
    draw, noise, images = random.Random(0), np.random.default_rng(0), folder / "val2017"
    ids = range(1, photographs + 1)
    texts = [f"a {' '.join(draw.choices(WORDS, k=6))}." for _ in range(5 * photographs)]
    notes = [{"id": i, "image_id": 1 + i // 5, "caption": text} for i, text in enumerate(texts)]
    listed = [{"id": i, "file_name": f"{i:012d}.jpg"} for i in ids]
    write_json(folder / "annotations/captions_val2017.json", {"images": listed, "annotations": notes})
    images.mkdir(parents=True, exist_ok=True)
    for image in listed:
        pixels = noise.integers(0, 256, (60, 80, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((640, 480)).save(images / image["file_name"], quality=97)
