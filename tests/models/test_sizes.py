"""The sizes of a named model: declared as published, and compared with the file that is loaded."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from reference import manifest, needs_reference
from test_mar import files as mar_files
from test_real import TINY, chameleon_files, emu3_files, llamagen_lantern, llamagen_pt, loaded
from test_text_official import t5, tiktoken  # noqa: F401 (fixtures)
from test_unified_files import save_janus, save_simplear

from specbench.config import configuration, parameters
from specbench.errors import UsageError
from specbench.models import vq
from specbench.models.llamagen import LlamaGen, LlamaGenConfig
from specbench.models.loading import image_tokenizers, llamagen_official, naming, official, unified_official
from specbench.models.loading.bundle import shape_of
from specbench.models.loading.unified_official import configured, tied
from specbench.models.unified import UnifiedConfig

UNIFIED = {"lumina_mgpt": "Lumina-mGPT-7B-768", "lumina_mgpt2": "Lumina-mGPT-2.0", "anole": "Anole-7b-v0.1-hf"}
UNIFIED |= {"emu3": "Emu3-Gen"}
LLAMAGEN = {"llamagen_l": "c2i_L_384", "llamagen_xl_c2i": "c2i_XL_384", "llamagen_3b": "c2i_3B_384"}
LLAMAGEN |= {"llamagen_xl": "t2i_XL_stage1_256", "llamagen_xl_512": "t2i_XL_stage2_512"}
LANTERN = {"llamagen_xl": "LlamaGen-T2I", "llamagen_xl_512": "LlamaGen-T2I-2"}


@needs_reference
def test_the_declared_sizes_are_the_published_ones():
    """Those of Janus-Pro and SimpleAR are in test_unified_files, those of MAR in test_mar."""
    for model, name in UNIFIED.items():
        facts, source = manifest(name)
        published = configured({"rope_theta": 1e4, **facts["config"]}, tied(source, facts["config"]))
        assert published == shape_of(model, UnifiedConfig), model
    for model, name in LLAMAGEN.items():
        facts, source = manifest(f"{name}.pt")
        declared = shape_of(model, LlamaGenConfig)
        assert facts["config"]["n_head"] == declared.n_head == llamagen_official.HEADS[declared.dim], model
        table, ignored = naming.for_llamagen(source.tensors, declared.n_layer, declared.block, not declared.num_classes)
        with torch.device("meta"):
            official.check(LlamaGen(declared), source, table, ignored)
    for model, name in LANTERN.items():
        c = manifest(f"{name}_model.safetensors")[0]["config"]
        declared = shape_of(model, LlamaGenConfig)
        sizes = [c[n] for n in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")]
        assert sizes == [declared.dim, declared.n_layer, declared.n_head, declared.ffn_hidden], model
        assert (c["block_size"], c["cls_token_num"]) == (declared.block_size, declared.cls_token_num), model


def refused(folder, model, *words):
    """What differs: field -> (in the file, declared)."""
    with pytest.raises(UsageError) as reported:
        loaded(model, f"weights={folder}", "dtype=float32", *words)
    assert model in str(reported.value)
    return {m[1]: (m[2], m[3]) for m in re.finditer(r"(\w+)=(\w+) \(not (\w+)\)", str(reported.value))}


@pytest.mark.parametrize("model", ["llamagen_3b", "llamagen_xl"])
def test_another_or_a_cut_llamagen_is_refused(tmp_path, t5, model):  # noqa: F811
    _, bundle = loaded(model, *TINY)
    llamagen_pt(tmp_path, bundle, t5)
    declared = shape_of(model, LlamaGenConfig)
    different = refused(tmp_path, model)
    assert different["n_layer"] == ("2", str(declared.n_layer))
    assert different["ffn_hidden"] == ("96", str(declared.ffn_hidden))
    file = tmp_path / "target" / "model.pt"
    content = torch.load(file, weights_only=True)
    for change, expected in (
        ({n: t for n, t in content["model"].items() if not n.startswith("layers.1.")}, {"n_layer": ("1", "2")}),
        ({n: t for n, t in content["model"].items() if not n.startswith("layers.0.")}, {}),  # not a LlamaGen
        (
            content["model"] | {n.replace("s.1.", "s.2."): t for n, t in content["model"].items() if "s.1." in n},
            {"n_layer": ("3", "2")},
        ),
    ):
        torch.save({"model": change}, file)
        assert refused(tmp_path, model, "reduced=true") == expected


def test_lantern_s_llamagen_is_compared(tmp_path, t5):  # noqa: F811
    _, bundle = loaded("llamagen_xl", *TINY)
    llamagen_lantern(tmp_path, bundle, t5)
    loaded("llamagen_xl", f"weights={tmp_path}", "reduced=true", "dtype=float32")
    file = tmp_path / "target" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"block_size": 256}))
    assert refused(tmp_path, "llamagen_xl")["n_layer"] == ("2", "36")


@pytest.mark.parametrize("model", ["emu3", "janus_pro_7b", "simplear_15b", "mar_h"])
def test_other_real_models_are_compared(tmp_path, model, tiktoken):  # noqa: F811
    """A small file under the name of a published model."""
    _, bundle = loaded(model, *TINY)
    if model.startswith("janus"):
        save_janus(tmp_path / "target", bundle, "official")
    elif model.startswith("simplear"):
        save_simplear(tmp_path, bundle)
    elif model.startswith("mar"):
        mar_files(tmp_path, bundle)
    else:
        emu3_files(tmp_path, bundle)
        (tmp_path / "target" / "emu3.tiktoken").write_bytes((tiktoken[0] / "emu3.tiktoken").read_bytes())
    depth = "encoder_depth" if model == "mar_h" else "n_layer"
    published = {"emu3": "32", "janus_pro_7b": "30", "simplear_15b": "28", "mar_h": "20"}[model]
    assert refused(tmp_path, model)[depth] == ("2", published)


def test_the_sizes_in_a_hugging_face_folder_are_compared(tmp_path):
    """Before a value is read: the config.json of a cut file may say what its tensors say."""
    for model in ("lumina_mgpt", "anole"):
        _, bundle = loaded(model, *TINY)
        folder, cfg = tmp_path / model, bundle.target.cfg
        chameleon_files(folder, bundle)

        def read(shape, folder=folder, model=model, bundle=bundle):
            arguments = torch.device("cpu"), torch.float32, (model, shape)
            return unified_official.read(folder / "target", bundle.image, *arguments).cfg

        assert read(cfg) == cfg
        assert read(replace(cfg, vocab_size=cfg.vocab_size - 3, norm_eps=1e-6)) == cfg  # padding; config.json is right
        for different in ({"n_layer": 3}, {"n_kv_head": 1}, {"qk_norm": 4}, {"vocab_size": cfg.vocab_size + 1}):
            [(name, value)] = different.items()
            with pytest.raises(UsageError, match=rf"{model}.* {name}={getattr(cfg, name)} \(not {value}\)"):
                read(replace(cfg, **different))
        with pytest.raises(UsageError, match=r"n_layer=2 \(not 32\)"):
            read(shape_of(model, UnifiedConfig))
        config = json.loads((folder / "target" / "config.json").read_text())
        (folder / "target" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
        with pytest.raises(UsageError, match=r"n_layer=1 \(not 2\)"):
            read(cfg)


def test_a_model_file_of_one_s_own_declares_its_sizes(tmp_path):
    """Also a number of heads that no tensor shows."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text(
        "# @package _global_\n# Mine.\ndefaults: [base/llamagen_c2i]\nmodel: mine\n"
        "shape: {dim: 48, n_layer: 1, n_head: 6, ffn_hidden: 80, vocab_size: 64, block_size: 16, num_classes: 10}\n"
    )
    (tmp_path / "model/wide.yaml").write_text(
        "# @package _global_\n# Wide.\ndefaults: [base/instructed, base/chameleon]\nmodel: wide\nsize: 512\n"
        'instruction: "{prompt}"\nshape: {n_layer: 48}\n'
    )
    with parameters.including([tmp_path]), configuration.session():
        cfg = shape_of("mine", LlamaGenConfig)
        weights = tmp_path / "weights"
        for part in ("target", "tokenizer"):
            (weights / part).mkdir(parents=True)
        network = LlamaGen(cfg)
        torch.save(dict(network.named_parameters()), weights / "target" / "mine.pt")
        pixels = vq.VQModel(vq.LLAMAGEN_16.reduced(64))
        tensors = official.exported(pixels, image_tokenizers.llamagen_table(pixels.cfg))
        torch.save({"model": tensors}, weights / "tokenizer" / "vq.pt")
        _, bundle = loaded("mine", f"weights={weights}", "dtype=float32")
        assert bundle.target.block.n_heads == 6
        torch.testing.assert_close(dict(bundle.target.state_dict()), dict(network.state_dict()), rtol=0, atol=0)
        wide = shape_of("wide", UnifiedConfig)
        assert (wide.n_layer, wide.dim, wide.vocab_size) == (48, 4096, 65536)
