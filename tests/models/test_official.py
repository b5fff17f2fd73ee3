"""Official checkpoints: the destination of each tensor, every format, the error for every mistake, and the memory that
loading needs."""

from __future__ import annotations

import argparse
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from reference import manifest, needs_reference
from safetensors.torch import save_file
from torch import nn

from specbench.errors import UsageError
from specbench.models.eagle import EagleConfig, EagleNetwork
from specbench.models.llamagen import LlamaGen, LlamaGenConfig
from specbench.models.loading import naming, official
from specbench.models.loading.naming import ParameterSlice
from specbench.models.loading.official import Info
from specbench.models.loading.unified_official import from_hugging_face, tied
from specbench.models.medusa import MedusaConfig, MedusaNetwork
from specbench.models.transformer import BlockConfig
from specbench.models.unified import Unified, UnifiedConfig, image_tokens

ROOT = Path(__file__).resolve().parents[2]
LANGUAGE = "Lumina-mGPT-7B-768 Lumina-mGPT-2.0 Anole-7b-v0.1-hf Emu3-Gen SimpleAR-0.5B SimpleAR-1.5B".split()
LLAMAGEN = (
    "t2i_XL_stage1_256 t2i_XL_stage2_512 c2i_B_256 c2i_B_384 c2i_L_256 c2i_L_384 c2i_XL_384 c2i_XXL_384 c2i_3B_384"
)
LLAMAGEN_FILES = [f"{n}.pt" for n in LLAMAGEN.split()]
LLAMAGEN_FILES += [f"LlamaGen-{n}_model.safetensors" for n in ("T2I", "T2I-2")]
DRAFTERS = [f"{n}_drafter_pytorch_model.bin" for n in ("llamagen", "llamagen2", "anole")]
DRAFTERS += ["lumina_mgpt_drafter_model.safetensors", "LANTERN-Lumina-mGPT-7B-768_model.safetensors"]


def language(tensors, c):
    qk_norm = tensors.get("model.layers.0.self_attn.q_norm.weight")
    cfg = from_hugging_face(
        {"rope_theta": 1e4, **c}, 0 if qk_norm is None else qk_norm.shape[0], "q, k, v" in str(c.get("attention_bias"))
    )
    image = image_tokens(torch.arange(4, 260), 16, 16, 8803, [8196])
    return lambda: Unified(cfg, image), naming.for_language(tensors, cfg.n_layer, cfg.block, image.ids)


def llamagen(tensors, c):
    text = "cls_embedding.embedding_table.weight" not in tensors
    names = {"dim": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    names |= {"ffn_hidden": "intermediate_size"}  # LANTERN's name
    sizes = {field: c.get(field, c.get(hf_name)) for field, hf_name in names.items()}
    sizes |= {name: c[name] for name in ("vocab_size", "cls_token_num", "block_size")}
    cfg = LlamaGenConfig(**sizes, num_classes=0 if text else c["num_classes"])
    return lambda: LlamaGen(cfg), naming.for_llamagen(tensors, cfg.n_layer, cfg.block, text)


def drafter(tensors, c):
    qk_norm = tensors.get("layers.0.self_attn.q_norm.weight")
    chameleon = qk_norm is not None
    sizes = [c[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")]
    prefix, cells = (0, 0) if chameleon else (120, 256)
    cfg = EagleConfig(*sizes, prefix, cells, input_norm=chameleon, qk_norm=qk_norm.shape[0] if chameleon else 0)
    return lambda: EagleNetwork(cfg), (naming.eagle(cfg.block, chameleon), ())


@needs_reference
@pytest.mark.parametrize(("kind", "names"), [(language, LANGUAGE), (llamagen, LLAMAGEN_FILES), (drafter, DRAFTERS)])
def test_every_official_tensor_has_one_destination(kind, names):
    """All tensors of Chameleon's files except the pixel tokenizer. Older LlamaGen files also contain freqs_cis
    (reference README (9))."""
    for name in names:
        facts, source = manifest(name)
        source = tied(source, facts["config"])
        tensors = source.tensors
        if kind is llamagen:
            tensors["freqs_cis"] = Info((696, 32, 2), torch.float32, Path(name))
        build, (table, ignored) = kind(tensors, facts["config"])
        with torch.device("meta"):
            module = build()
        official.check(module, source, table, ignored)
        assert all(n == "freqs_cis" or ".vqmodel." in n for n in set(tensors) - set(table)), name


def test_medusa_heads_with_and_without_their_prefix():
    """medusa_lm_head.pt holds the state dict of the list of heads, so its names have no prefix. Its first heads can be
    used alone."""
    torch.manual_seed(0)
    heads, hidden = MedusaNetwork(MedusaConfig(6, 9, 4)), torch.randn(2, 6)

    def loaded(prefix, count):
        tensors = {prefix + name.removeprefix("medusa_head."): t for name, t in heads.state_dict().items()}
        table, ignored = naming.for_medusa(tensors, count)
        build = partial(MedusaNetwork, MedusaConfig(6, 9, count))
        return official.load(build, official.from_tensors(tensors), table, "cpu", torch.float32, ignored)

    for prefix in ("medusa_head.", ""):
        for count in (4, 2):
            torch.testing.assert_close(loaded(prefix, count)(hidden), heads(hidden, count), rtol=0, atol=0)
        with pytest.raises(UsageError, match="4.0.linear.weight"):
            loaded(prefix, 5)


def test_names_that_fit_no_layout_are_reported():
    block = BlockConfig(8, 2, 2, 16)
    names = ["encoder.a", "encoder.b", "encoder.c", "encoder.d"]
    with pytest.raises(UsageError, match="x.pt.*'encoder.a'.*'encoder.b'.*'encoder.c'.*1.*text_model"):
        naming.for_language(names, 2, block, where="x.pt")
    with pytest.raises(UsageError, match="tok_embeddings.weight.*model.embed_tokens.weight"):
        naming.for_llamagen(names, 2, block)
    with pytest.raises(UsageError, match="medusa_head.0.0.linear.weight"):
        naming.for_medusa([], 2)


UNIFIED = UnifiedConfig(dim=32, n_layer=2, n_head=4, n_kv_head=2, ffn_hidden=48, vocab_size=90)
KEEP = torch.tensor([*range(10, 26), 80, 7])
IMAGE = image_tokens(KEEP[:16], 4, 4, 80, [7])  # created before loading, which builds on the meta device


def assert_weights_of(path, prefix, head, cfg=UNIFIED):
    """Checks that a module loaded from a Hugging Face file has the file's weights, each computed by hand. Returns the
    file's source."""
    source = official.open_source(path)
    table, ignored = naming.for_language(source.tensors, cfg.n_layer, cfg.block, KEEP, str(path))
    module = official.load(lambda: Unified(cfg, IMAGE), source, table, "cpu", torch.float32, ignored)
    stored = {name: tensor.clone() for name, tensor in source.read(source.tensors)}
    expected = {
        "output.weight": stored[head][KEEP],
        "tok_embeddings.weight": stored[f"{prefix}embed_tokens.weight"],
        "norm.weight": stored[f"{prefix}norm.weight"],
    }
    for n in range(cfg.n_layer):
        at, prefix_here = f"{prefix}layers.{n}.", f"layers.{n}."
        expected[f"{prefix_here}attention.wqkv.weight"] = torch.cat(
            [stored[f"{at}self_attn.{x}_proj.weight"] for x in "qkv"]
        )
        names = {
            "attention.wo.weight": "self_attn.o_proj.weight",
            "feed_forward.w1.weight": "mlp.gate_proj.weight",
            "feed_forward.w3.weight": "mlp.up_proj.weight",
            "feed_forward.w2.weight": "mlp.down_proj.weight",
            "attention_norm.weight": "input_layernorm.weight",
            "ffn_norm.weight": "post_attention_layernorm.weight",
        }
        if cfg.qk_norm:
            names |= {
                f"attention.{x}": f"self_attn.{x}"
                for x in ("q_norm.weight", "k_norm.weight", "q_norm.bias", "k_norm.bias")
            }
        expected |= {prefix_here + name_here: stored[at + name] for name_here, name in names.items()}
    torch.testing.assert_close(dict(module.state_dict()), expected, rtol=0, atol=0)
    return source


SIZES = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def randomise(model):
    torch.manual_seed(0)
    for parameter in model.parameters():  # norms too, so that no norm can be confused with another
        nn.init.normal_(parameter)
    return model


def test_emu3_files_saved_by_transformers(tmp_path):
    from transformers import Emu3Config, Emu3ForCausalLM, Emu3ForConditionalGeneration, Emu3TextConfig

    randomise(Emu3ForCausalLM(Emu3TextConfig(**SIZES))).save_pretrained(tmp_path / "alone")
    assert_weights_of(tmp_path / "alone", "model.", "lm_head.weight")
    pixels = {"codebook_size": 16, "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "hidden_size": 32}
    pixels |= {"channel_multiplier": [1, 1], "num_res_blocks": 1, "attn_resolutions": []}
    cfg = Emu3Config(vq_config=pixels, text_config=SIZES, vocabulary_map={"<image>": 5})
    model = randomise(Emu3ForConditionalGeneration(cfg))
    model.save_pretrained(tmp_path / "both", max_shard_size="60KB")
    assert len(assert_weights_of(tmp_path / "both", "text_model.model.", "text_model.lm_head.weight").shards) > 2
    torch.save(model.state_dict(), tmp_path / "by_hand.bin")
    assert_weights_of(tmp_path / "by_hand.bin", "model.text_model.", "lm_head.weight")


def test_chameleon_files_saved_by_transformers(tmp_path):
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    pixels = {"embed_dim": 8, "num_embeddings": 16, "latent_channels": 8, "base_channels": 32}
    pixels |= {"channel_multiplier": [1, 1], "num_res_blocks": 1}
    sizes = SIZES | {"num_key_value_heads": 4}  # the norms of q and k have one row per head
    cfg = ChameleonConfig(**sizes, vq_config=pixels, vocabulary_map={"<image>": 5})
    randomise(ChameleonForConditionalGeneration(cfg)).save_pretrained(tmp_path)
    assert_weights_of(tmp_path, "model.", "lm_head.weight", UnifiedConfig(32, 2, 4, 4, 48, 90, qk_norm=4))


class Tiny(nn.Module):
    """Two linear layers with official names that a table renames."""

    def __init__(self):
        super().__init__()
        self.qk = nn.Linear(4, 6, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.full((2,), 7.0, device="cpu"), persistent=False)


TABLE = {"q": ParameterSlice("qk.weight", 0, 4), "k": ParameterSlice("qk.weight", 4, 2)}
TABLE |= {f"n.{name}": ParameterSlice(f"norm.{name}") for name in ("weight", "bias")}
TABLE |= {"n.mean": ParameterSlice("norm.running_mean"), "n.var": ParameterSlice("norm.running_var")}
TABLE["n.count"] = ParameterSlice("norm.num_batches_tracked")


def tiny_tensors():
    torch.manual_seed(0)
    names = {"q": (4, 4), "k": (2, 4), "n.weight": (3,), "n.bias": (3,), "n.mean": (3,), "n.var": (3,)}
    return {name: torch.rand(shape) for name, shape in names.items()} | {"n.count": torch.tensor(12)}


def shards(tensors):
    names = list(tensors)
    return {k: tensors[k] for k in names[:3]}, {k: tensors[k] for k in names[3:]}


def a_file(path, tensors):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)
    return path


def write_shards(folder, tensors, stem="model", suffix="safetensors"):
    index = {}
    for n, part in enumerate(shards(tensors), 1):
        name = f"{stem}-0000{n}-of-00002.{suffix}"
        a_file(folder / name, part)
        index |= dict.fromkeys(part, name)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def old(path, content):
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return path


def parameters(tensors):
    return {name: nn.Parameter(t) if t.is_floating_point() else t for name, t in tensors.items()}


#: The prefix of all names in these formats, which is logged.
PREFIXES = {"parallel": "module.", "compiled": "_orig_mod.", "compiled shards": "_orig_mod.module."}
PREFIXES |= {"both": "module._orig_mod."}


def prefixed(kind, tensors):
    return {PREFIXES[kind] + name: tensor for name, tensor in tensors.items()}


FORMATS = {
    "file": lambda d, t: a_file(d / "x.safetensors", t),
    "folder": lambda d, t: a_file(d / "model.safetensors", t).parent,
    "shards": lambda d, t: write_shards(d, t),
    "bin": lambda d, t: a_file(d / "pytorch_model.bin", t).parent,
    "bin shards": lambda d, t: write_shards(d, t, "pytorch_model", "bin"),
    "index": lambda d, t: write_shards(d, t) / "model.safetensors.index.json",
    "bare": lambda d, t: a_file(d / "x.pt", t),
    "wrapped": lambda d, t: a_file(d / "x.ckpt", {"state_dict": t, "steps": 3, "optimizer": {"state": {}}}),
    "first wrapper": lambda d, t: a_file(d / "x.pth", {"state_dict": {"other": torch.ones(1)}, "model": t}),
    "parameters": lambda d, t: a_file(d / "x.pt", parameters(t)),  # MAR's trainer, and dict(named_parameters())
    "old parameters": lambda d, t: old(d / "x.pt", {"state_dict": parameters(t)}),
    "parameter shards": lambda d, t: write_shards(d, parameters(t), "pytorch_model", "bin"),
    "computed": lambda d, t: a_file(d / "x.pt", {k: v * 1 for k, v in parameters(t).items()}),  # no leaves
    "parallel": lambda d, t: a_file(d / "x.pt", {"model": prefixed("parallel", parameters(t))}),
    "compiled": lambda d, t: a_file(d / "x.safetensors", prefixed("compiled", t)),
    "compiled shards": lambda d, t: write_shards(d, prefixed("compiled shards", t)),
    "both": lambda d, t: old(d / "x.pt", prefixed("both", t)),
    "old": lambda d, t: old(d / "x.pt", {"module": t}),
    "arguments": lambda d, t: a_file(d / "x.pth", {"model": t, "args": argparse.Namespace(lr=0.1, name="a")}),
}


def test_every_format_gives_the_same_module(tmp_path, caplog):
    tensors = tiny_tensors()
    expected = {f"norm.{name}": tensors[f"n.{name}"] for name in ("weight", "bias")}
    expected |= {"norm.running_mean": tensors["n.mean"], "norm.running_var": tensors["n.var"]}
    expected |= {"norm.num_batches_tracked": tensors["n.count"], "qk.weight": torch.cat([tensors["q"], tensors["k"]])}
    for kind, made in FORMATS.items():
        folder = tmp_path / kind
        folder.mkdir()
        path = made(folder, tensors)
        caplog.clear()
        with caplog.at_level(logging.INFO, "specbench"):
            source = official.open_source(path)
            module = official.load(Tiny, source, TABLE, "cpu", torch.float32)
        assert f"loaded 0.00 GB from {path} in 0." in caplog.text
        prefixes = re.findall(r"'((?:module\.|_orig_mod\.)+)'", caplog.text)
        assert prefixes == ([PREFIXES[kind]] if kind in PREFIXES else []), kind
        headers = {n: (i.shape, i.dtype) for n, i in source.tensors.items()}
        assert headers == {n: (t.shape, t.dtype) for n, t in tensors.items()}, kind
        files = {info.file for info in source.tensors.values()}
        assert len(files) == (2 if "shards" in kind or kind == "index" else 1), kind
        torch.testing.assert_close(dict(module.state_dict()), expected, rtol=0, atol=0)
        assert not module.training
        assert not any(p.requires_grad for p in module.parameters())
        assert torch.equal(module.scale, torch.full((2,), 7.0))


def test_values_are_cast_to_the_wanted_type_and_integers_are_not():
    tensors = tiny_tensors()
    tensors["q"] = tensors["q"].double()
    module = official.load(Tiny, official.from_tensors(tensors), TABLE, "cpu", torch.bfloat16)
    assert torch.equal(module.qk.weight, torch.cat([tensors["q"].bfloat16(), tensors["k"].bfloat16()]))
    assert module.norm.running_mean.dtype == torch.bfloat16
    assert module.norm.num_batches_tracked.dtype == torch.int64
    assert module.scale.dtype == torch.float32


def test_tied_parameters_stay_tied():
    def build():
        pair = nn.ModuleList([nn.Linear(3, 3, False), nn.Linear(3, 3, False)])
        pair[1].weight = pair[0].weight
        return pair

    source = official.from_tensors({"w": torch.eye(3)})
    pair = official.load(build, source, {"w": ParameterSlice("1.weight")}, "cpu", torch.float32)
    assert pair[0].weight is pair[1].weight
    assert torch.equal(pair[0].weight, torch.eye(3))


def test_configuration_of_a_folder(tmp_path):
    with pytest.raises(UsageError, match="config.json"):
        official.config(tmp_path)
    for content, sentence in (('{"hidden_size": ', "config.json: cannot read it as JSON"), ("[]", "must be a mapping")):
        text(tmp_path / "config.json", content)
        with pytest.raises(UsageError, match=f"{sentence}.*; fetch it again"):
            official.config(tmp_path)
    text(tmp_path / "config.json", '{"hidden_size": 8}')
    assert official.config(tmp_path) == {"hidden_size": 8}


class Evil:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, folder):
        self.trace = str(folder / "was-here")

    def __reduce__(self):
        return os.mkdir, (self.trace,)


def cut(path, keep=0.5):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    return path


def text(path, content):
    path.write_text(content)
    return path


def write_pickle(path, protocol):
    path.write_bytes(pickle.dumps({"model": Evil(path.parent)}, protocol))
    return path


def script(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)).save(path)
    return path


def edit_index(folder, **changes):
    write_shards(folder, tiny_tensors())
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] |= changes
    file.write_text(json.dumps(index))
    return folder


def remove_shard(folder):
    (write_shards(folder, tiny_tensors()) / SECOND).unlink()
    return folder


def duplicate_tensor(folder):
    first, second = shards(tiny_tensors())
    save_file(second | {"q": first["q"]}, write_shards(folder, tiny_tensors()) / SECOND)
    return folder


SECOND = "model-00002-of-00002.safetensors"
#: How a broken or hostile file is made, and what its error names.
BROKEN = {
    "absent": (lambda d: d / "x.pt", "x.pt"),
    "empty folder": (lambda d: d, r"model.safetensors or .*pytorch_model.bin"),
    "cut safetensors": (lambda d: cut(a_file(d / "x.safetensors", tiny_tensors())), "x.safetensors"),
    "empty safetensors": (lambda d: text(d / "x.safetensors", ""), "x.safetensors"),
    "cut zip": (lambda d: cut(a_file(d / "x.pt", tiny_tensors())), "x.pt"),
    "cut end of a zip": (lambda d: cut(a_file(d / "x.pt", tiny_tensors()), 0.99), "x.pt"),
    "cut old": (lambda d: cut(old(d / "x.pt", tiny_tensors())), "x.pt"),
    "cut head of old": (lambda d: cut(old(d / "x.pt", tiny_tensors()), 0.02), "x.pt"),
    "empty": (lambda d: text(d / "x.pt", ""), "x.pt"),
    "page": (lambda d: text(d / "x.bin", "<html>Not found</html>"), "x.bin"),
    "pointer": (lambda d: text(d / "x.bin", "version https://git-lfs.github.com/spec/v1\n"), "x.bin.*git lfs"),
    "code": (lambda d: a_file(d / "x.pt", {"model": tiny_tensors(), "hook": Evil(d)}), r"x.pt.*(posix|nt).mkdir"),
    "code in old": (lambda d: old(d / "x.pt", {"hook": Evil(d)}), r"x.pt.*(posix|nt).mkdir"),
    "code without torch": (lambda d: write_pickle(d / "x.pt", 2), r"x.pt.*(posix|nt).mkdir"),
    "newer code without torch": (lambda d: write_pickle(d / "x.pt", 5), "x.pt"),
    "program": (lambda d: script(d / "x.pt"), "x.pt"),
    "list": (lambda d: a_file(d / "x.pt", [torch.ones(1)]), "x.pt"),
    "no tensors": (lambda d: a_file(d / "x.pt", {"s": 3, "e": 1}), "x.pt.* model;"),
    "sparse": (lambda d: a_file(d / "x.pt", {"q": torch.eye(4).to_sparse()}), "x.pt"),
    "no shard": (remove_shard, f"index.json names '{SECOND}'"),
    "in two shards": (duplicate_tensor, f"{SECOND}: tensor 'q' .*model-00001-of-00002.safetensors"),
    "elsewhere": (lambda d: edit_index(d, q="../x.safetensors"), "index.json"),
    "nowhere": (lambda d: edit_index(d, q=3), "index.json"),
    "no map": (lambda d: text(d / "model.safetensors.index.json", "{}"), "index.json"),
    "cut index": (lambda d: text(d / "model.safetensors.index.json", '{"weight_map"'), "index.json"),
}


def test_a_broken_or_hostile_file_is_a_clear_error(tmp_path):
    for case, (make, named) in BROKEN.items():
        folder = tmp_path / case
        folder.mkdir()
        path = make(folder)
        with pytest.raises(UsageError) as reported:
            official.open_source(path if path.suffix != ".json" else folder, ("model",))
        assert re.search(named, str(reported.value)), case
        assert "\n" not in str(reported.value), case
        assert not (folder / "was-here").exists(), case


def changed_tensors(**changes):
    """The tensors of the tiny module with some replaced, or removed if the change is None."""
    tensors = tiny_tensors() | {name.replace("_", "."): t for name, t in changes.items()}
    return {name: t for name, t in tensors.items() if t is not None}


#: Tensors of a file that does not fit, and what the error names.
UNFIT = {
    "no tensors": ({}, r"x.safetensors: tensor 'q' \(and 6 more\) is missing"),
    "missing": (changed_tensors(q=None), "x.safetensors: tensor 'q' is missing"),
    "surplus": (changed_tensors(z=torch.ones(1)), "x.safetensors: tensor 'z' belongs"),
    "several surplus": (changed_tensors(z=torch.ones(1), y=torch.ones(1)), r"tensor 'y' \(and 1 more\)"),
    "some with a prefix": (changed_tensors(q=None, module_q=torch.ones(4, 4)), "x.safetensors: tensor 'q' is missing"),
    "odd name": (changed_tensors(**{"z\n\x1b[2J": torch.ones(1)}), r"tensor 'z\\n\\x1b\[2J'"),
    "misshapen": (changed_tensors(k=torch.ones(4, 2)), r"x.safetensors: tensor 'k' .*\[4, 2\], expected \[2, 4\]"),
    "other rank": (changed_tensors(k=torch.ones(8)), r"tensor 'k' .*\[8\], expected \[2, 4\]"),
    "misshapen scalar": (changed_tensors(n_count=torch.tensor([1])), r"tensor 'n.count' .*\[1\], expected \[\]"),
    "integers": (changed_tensors(q=torch.ones(4, 4).int()), "tensor 'q' holds torch.int32"),
    "floats": (changed_tensors(n_count=torch.tensor(1.0)), "tensor 'n.count' holds torch.float32"),
    "NaN": (changed_tensors(n_mean=torch.tensor([0.0, torch.nan, 0.0])), "x.safetensors: tensor 'n.mean' holds NaN"),
    "infinity": (changed_tensors(k=torch.full((2, 4), -torch.inf)), "tensor 'k' holds NaN, infinity"),
    "range": (changed_tensors(q=torch.full((4, 4), 1e30)), "tensor 'q' .* torch.float16 .*dtype="),
}


def test_a_file_that_does_not_fit_is_a_clear_error(tmp_path):
    for case, (tensors, named) in UNFIT.items():
        path = a_file(tmp_path / "x.safetensors", tensors)
        with pytest.raises(UsageError) as reported:
            official.load(Tiny, official.open_source(path), TABLE, "cpu", torch.float16)
        assert re.search(named, str(reported.value)), case
        assert "\n" not in str(reported.value), case


def test_ignored_tensors_have_complete_names():
    tensors = tiny_tensors() | {"freqs_cis": torch.ones(1)}
    source = official.from_tensors(tensors)
    official.load(Tiny, source, TABLE, "cpu", torch.float32, ["freqs_cis", r"vq\..*"])
    with pytest.raises(UsageError, match="'freqs_cis'"):
        official.load(Tiny, source, TABLE, "cpu", torch.float32, ["freqs"])


def test_too_few_rows_to_pick_from_are_reported():
    table = {"w": ParameterSlice("weight", pick=torch.tensor([0, 11]))}
    source = official.from_tensors({"w": torch.ones(11, 4)}, "x.pt")
    with pytest.raises(UsageError, match=r"'w'.*\[11, 4\].*\[12, 4\]"):
        official.load(lambda: nn.Linear(4, 2, False), source, table, "cpu", torch.float32)


def test_a_table_that_does_not_fill_the_module_once_is_an_internal_error():
    source = official.from_tensors(tiny_tensors())
    for change, sentence in (
        ({"z": ParameterSlice("nothing")}, "'z' to 'nothing', which the module does not have"),
        ({"k": ParameterSlice("qk.weight", 4, 1)}, r"fills rows \[\(0, 4\), \(4, 5\)\] of 'qk.weight' \[6, 4\]"),
        ({"k": ParameterSlice("qk.weight", 4, 3)}, r"\(4, 7\)\] of 'qk.weight'"),
        ({"k": ParameterSlice("qk.weight", 3, 3)}, r"\(3, 6\)\] of 'qk.weight'"),
        ({"k": ParameterSlice("qk.weight", 5, 1)}, r"\(5, 6\)\] of 'qk.weight'"),
        ({"n.count": ParameterSlice("norm.bias")}, r"\(0, 3\), \(0, 3\)\] of 'norm.bias'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            official.load(Tiny, source, TABLE | change, "cpu", torch.float32)
    with pytest.raises(ValueError, match=r"\[\].*'norm.bias'"):
        official.load(Tiny, source, {k: v for k, v in TABLE.items() if k != "n.bias"}, "cpu", torch.float32)


def test_a_buffer_that_no_file_holds_must_not_stay_on_the_meta_device():
    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("positions", torch.arange(4), persistent=False)

    with pytest.raises(NotImplementedError, match="meta"):
        official.load(Made, official.from_tensors({}), {}, "cpu", torch.float32)


MEASURE = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from specbench.models.loading import official
from specbench.models.loading.naming import ParameterSlice

torch.set_num_threads(1)

def megabytes(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) / 1024

def build(n):
    return nn.ModuleList(nn.Linear(1024, 2048, False) for _ in range(n))

def load(folder, n):
    table = {f"official.{i}": ParameterSlice(f"{i}.weight") for i in range(n)}
    return official.load(lambda: build(n), official.open_source(Path(folder)), table, "cpu", torch.bfloat16)

load(sys.argv[1], 1)  # whatever the first call imports
before = megabytes("VmRSS")
for folder in sys.argv[2:]:
    load(folder, 15)
peak = megabytes("VmHWM") - before
source = official.open_source(Path(sys.argv[2]))
careless = [tensor.bfloat16() for _, tensor in [*source.read(source.tensors)]]
print(json.dumps([peak, megabytes("VmHWM") - before]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see the peak")
def test_loading_needs_the_model_and_one_shard(tmp_path):
    """Three float32 shards of 40 MB become a bfloat16 module of 60 MB. The peak stays below 60 + 40 + 20 MB; a loader
    that keeps the shards while it casts exceeds this."""
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index = {}
        for shard in range(3):
            names = [f"official.{i}" for i in range(5 * shard, 5 * shard + 5)]
            a_file(tmp_path / suffix / f"{shard}.{suffix}", {name: torch.ones(2048, 1024) for name in names})
            index |= dict.fromkeys(names, f"{shard}.{suffix}")
        (tmp_path / suffix / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": index}))
        a_file(tmp_path / suffix / f"small.{suffix}", {"official.0": torch.ones(2048, 1024)})
    files = ("bin/small.bin", "safetensors", "bin")
    command = [sys.executable, "-c", MEASURE, *(str(tmp_path / file) for file in files)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    peak, careless = json.loads(process.stdout)
    assert 60 < peak < 120
    assert careless > 160


def test_loading_a_large_file_shows_its_progress(capsys, monkeypatch):
    source = official.from_tensors({"weight": torch.ones(3, 2), "bias": torch.ones(3)}, "large.safetensors")
    table = {name: naming.ParameterSlice(name) for name in source.tensors}
    for least, shown in ((37, False), (36, True)):
        monkeypatch.setattr(official, "SHOWN", least)
        official.load(lambda: torch.nn.Linear(2, 3), source, table, "cpu", torch.float32)
        stderr = capsys.readouterr().err
        assert ("large.safetensors" in stderr) == ("36.0/36.0" in stderr) == shown
