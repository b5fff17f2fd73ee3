"""The files that others publish, at their official sizes and with random numbers: targets, tokenizers, text encoder,
drafters, evaluators and COCO.

Names, shapes and number formats are those that specbench's own tables expect. Matrices inside the layers of a 7B model
and all tensors that no run reads (T5's decoder, Janus's understanding tower) are zeros, and holes in the file: such a
layer passes its input on, and embeddings and head, which are random, keep the distribution of a token from being flat.
"""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from rehearsal import vocabularies
from rehearsal.formats import (
    Entries,
    entry,
    of_module,
    rest,
    write_json,
    write_pickled,
    write_safetensors,
    write_shards,
)
from specbench.data import scenes
from specbench.metrics import blip, hpsv2, inception, towers
from specbench.models import eagle, vq
from specbench.models.language import Language
from specbench.models.llamagen import LlamaGen
from specbench.models.loading import chameleon, image_tokenizers, janus, llamagen_official, lumina2, naming
from specbench.models.unified import Unified, UnifiedConfig

#: Words of the captions that are made here, and of the embedded model's.
WORDS = "a red blue cat dog car boat table street small large old on near under with the and two of".split()
GB = 1 << 30
#: Bytes of a target's files where they hold more than a run reads (sums over the reference manifests).
SIZES = {"janus_pro_1b": 4_179_000_000, "janus_pro_7b": 14_840_000_000}
_HOLES = ("layers.",)
Build = Callable[[Path], None]


def built(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def words(count: int) -> list[str]:
    return vocabularies.padded([*dict.fromkeys([*WORDS, *scenes.vocabulary()])], count)


def captions(count: int) -> list[str]:
    draw = random.Random(0)
    return [f"a {' '.join(draw.choices(WORDS, k=6))}." for _ in range(count)]


# --- models -----------------------------------------------------------------------------------------------------------


def _config(target: Language, layers: int, **more: Any) -> dict[str, Any]:
    b = target.block
    sizes = {"hidden_size": b.dim, "num_attention_heads": b.n_heads, "num_key_value_heads": b.n_kv_heads}
    sizes |= {"intermediate_size": b.ffn_dim, "vocab_size": len(target.tok_embeddings.weight)}
    return {**sizes, "num_hidden_layers": layers, "rms_norm_eps": 1e-6, **more}


def _eagle(target: Language) -> Build:
    """LANTERN's layout, in float32."""

    def write(folder: Path) -> None:
        cfg = eagle.like_shape(target)
        table = naming.eagle(cfg.block, cfg.input_norm)
        entries = of_module(built(lambda: eagle.EagleNetwork(cfg)), table, torch.float32)
        write_pickled(folder / "pytorch_model.bin", entries)
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
        network = built(lambda: T5ForConditionalGeneration(cfg))
        entries = of_module(network, None, torch.float32, holes=("decoder.", "lm_head"))
        for copy in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
            entries.pop(copy, None)  # of shared.weight
        write_shards(folder, entries, 9_450_000_000 if not small else 40_000)
        write_json(folder / "config.json", cfg.to_dict() | {"architectures": ["T5ForConditionalGeneration"]})

    return write


def _llamagen(name: str, small: bool) -> dict[str, Build]:
    cfg = llamagen_official.SIZES[name]
    cfg = llamagen_official.reduced(cfg) if small else cfg
    pixels = vq.LLAMAGEN_16.reduced(cfg.vocab_size) if small else vq.LLAMAGEN_16
    target: LlamaGen = built(lambda: LlamaGen(cfg))
    file = {"llamagen_xl": "t2i_XL_stage1_256.pt", "llamagen_xl_512": "t2i_XL_stage2_512.pt"}[name]

    def write_target(folder: Path) -> None:
        table = naming.llamagen(cfg.n_layer, text=True)
        write_pickled(folder / file, of_module(target, table, torch.float32), "model")

    def write_pixels(folder: Path) -> None:
        network = built(lambda: vq.VQModel(pixels))
        table = image_tokenizers.llamagen_table(pixels)
        write_pickled(folder / "vq_ds16_t2i.pt", of_module(network, table, torch.float32), "model")

    text = _t5(cfg.caption_dim, small)
    return {"target": write_target, "tokenizer": write_pixels, "text": text, "eagle": _eagle(target)}


def _unified(target: Unified, cfg: UnifiedConfig, more: Entries, small: bool, **config: Any) -> Build:
    """A Hugging Face folder in bfloat16, with a head of all ids."""

    def write(folder: Path) -> None:
        table = naming.hugging_face(cfg.n_layer, cfg.block, keep=target.image.ids)
        holes = () if small else _HOLES
        entries = of_module(target, table, torch.bfloat16, cfg.vocab_size, holes) | more
        write_shards(folder, entries, 100_000 if small else 5 * GB)
        settings = {"rope_theta": cfg.rope_base, "swin_norm": cfg.post_norm, **config}
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
        network = built(lambda: vq.VQModel(pixels))
        table = image_tokenizers.taming_table(pixels)
        write_pickled(folder / "vqgan.ckpt", of_module(network, table, torch.float32), "state_dict")

    write_target = _unified(target, base, {}, small)
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
        _unified(target, base, {}, small, vocabulary_map=vocabulary)(folder)
        vocabularies.save_words(folder / "tokenizer.json", ["<|end|>", "<unk>", *words(0)], 1)
        write_json(folder / "tokenizer_config.json", {"bos_token": None, "eos_token": "<|end|>"})

    def write_pixels(folder: Path) -> None:
        network = built(lambda: vq.VQModel(pixels))
        table = image_tokenizers.taming_table(pixels)
        write_pickled(folder / "movqgan_270M.ckpt", of_module(network, table, torch.float32))

    return {"target": write_target, "tokenizer": write_pixels}


def _janus(name: str, small: bool) -> dict[str, Build]:
    pixels = vq.LLAMAGEN_16.reduced(janus.REDUCED_CODES) if small else vq.LLAMAGEN_16
    cfg = janus.REDUCED if small else janus.FULL[name]
    text = replace(cfg, vocab_size=cfg.vocab_size - pixels.codebook_size)
    side = janus.REDUCED_SIDE if small else janus.SIDE
    image = janus.image(text.vocab_size, pixels.codebook_size, side)
    target: Unified = built(lambda: Unified(text, image))

    def write(folder: Path) -> None:
        (table, _), (own, _) = janus.layouts(["gen_embed.weight"], text.n_layer, text.block)
        kind, holes = torch.bfloat16, () if small else _HOLES
        inputs = built(lambda: janus.ImageInputs(pixels.codebook_size, 8, text.dim))
        network = built(lambda: vq.VQModel(pixels))
        names = image_tokenizers.janus_layout((), pixels)[0]
        entries = of_module(target, table, kind, holes=holes) | of_module(inputs, own, kind)
        entries |= of_module(network, names, kind)
        entries["language_model.lm_head.weight"] = entry("lm_head", (text.vocab_size, text.dim), kind, True)
        entries = rest(entries, "vision_model.rest", 0 if small else SIZES[name], kind)
        write_shards(folder, entries, 10 * GB, "bin")
        sizes = _config(target, text.n_layer)
        write_json(folder / "config.json", {"language_config": {n: sizes[n] for n in sizes if n != "rms_norm_eps"}})
        special = ["<｜begin▁of▁sentence｜>", "<｜▁pad▁｜>", "<begin_of_image>"]
        known = [*special, "<unk>", ":", "<|User|>:", "<|Assistant|>:", *words(0)]
        vocabularies.save_words(folder / "tokenizer.json", known)

    return {"target": write}


FAMILIES: Mapping[str, Callable[[str, bool], dict[str, Build]]] = {
    "llamagen_xl": _llamagen,
    "llamagen_xl_512": _llamagen,
    "lumina_mgpt": _chameleon,
    "anole": _chameleon,
    "lumina_mgpt2": _lumina2,
    "janus_pro_1b": _janus,
    "janus_pro_7b": _janus,
}


def of_model(name: str, small: bool) -> dict[str, Build]:
    """The files of a model's parts and published drafters, by their folders. small: of reduced=true."""
    return FAMILIES[name](name, small)


# --- evaluators -------------------------------------------------------------------------------------------------------


def _towers(architecture: str, write: Callable[[Path, Entries], None], dtype: torch.dtype) -> Build:
    def build(folder: Path) -> None:
        import open_clip

        network = built(lambda: open_clip.CLIP(**towers.config(architecture)))
        write(folder, of_module(network, None, dtype))

    return build


def _clip(architecture: str) -> Build:
    def write(folder: Path, entries: Entries) -> None:
        write_safetensors(folder / "open_clip_model.safetensors", entries)

    return _towers(f"{architecture}-quickgelu", write, torch.float32)


def _hps(file: str) -> Build:
    def write(folder: Path, entries: Entries) -> None:
        write_pickled(folder / file, entries, "state_dict")

    return _towers(hpsv2.ARCHITECTURE, write, torch.float16)


def _image_reward(folder: Path) -> None:
    entries = of_module(built(blip.Blip), blip.table(), torch.float32)
    write_pickled(folder / "ImageReward.pt", entries)


def _vocabulary(folder: Path) -> None:
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    folder.mkdir(parents=True, exist_ok=True)
    entries = vocabularies.padded([*marks, *WORDS, "."], blip.TEXT["vocab_size"] - 2)
    (folder / "vocab.txt").write_text("\n".join(entries) + "\n", encoding="utf-8")


def _inception(folder: Path) -> None:
    """With He's initialisation, under which the features of two images differ."""
    network = inception.blank()
    torch.manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(network.state_dict(), folder / inception.FILES[0])


#: Folder of an evaluator -> its files.
EVALUATORS: Mapping[str, Build] = {
    "inception": _inception,
    "clip_b32": _clip("ViT-B-32"),
    "clip_b16": _clip("ViT-B-16"),
    "image_reward": _image_reward,
    "image_reward/text": _vocabulary,
    "hpsv2": _hps("HPS_v2_compressed.pt"),
    "hpsv21": _hps("HPS_v2.1_compressed.pt"),
}


# --- COCO -------------------------------------------------------------------------------------------------------------


def coco2017(folder: Path, photographs: int, sizes: Mapping[str, int]) -> None:
    """The archives of val2017 and of its annotations, with so many photographs of noise, filled up with a member that
    is not unpacked to the bytes that `sizes` gives by name."""
    ids = range(1, photographs + 1)
    draw = np.random.default_rng(0)

    def photograph() -> bytes:
        noise = Image.fromarray(draw.integers(0, 256, (60, 80, 3), dtype=np.uint8)).resize((640, 480))
        buffer = io.BytesIO()
        noise.save(buffer, "JPEG", quality=97)
        return buffer.getvalue()

    texts = captions(5 * photographs)
    images = [{"id": i, "file_name": f"{i:012d}.jpg"} for i in ids]
    notes = [{"id": 5 * i + j, "image_id": i, "caption": texts[5 * (i - 1) + j]} for i in ids for j in range(5)]
    content = json.dumps({"images": images, "annotations": notes}).encode()
    captions_of = {f"annotations/captions_{split}2017.json": content for split in ("val", "train")}
    pictures = {f"val2017/{i:012d}.jpg": photograph() for i in ids}
    folder.mkdir(parents=True, exist_ok=True)
    for name, members in (("annotations_trainval2017.zip", captions_of), ("val2017.zip", pictures)):
        with zipfile.ZipFile(folder / name, "w") as z:
            for member, data in members.items():
                z.writestr(member, data)
            missing = sizes.get(name, 0) - sum(map(len, members.values()))
            if missing > 0:
                with z.open("instances.json", "w", force_zip64=True) as f:
                    for start in range(0, missing, 1 << 24):
                        f.write(bytes(min(1 << 24, missing - start)))
