"""The real targets at reduced size: every method on every target, and the official files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from rehearsal.vocabularies import chameleon_names, save_chameleon
from safetensors.torch import save_file
from test_official import write_shards
from test_pixels import official_file
from test_text_official import t5, tiktoken  # noqa: F401 (fixtures)

from specbench.cli import main
from specbench.config import configuration, parameters, registry
from specbench.decoding.loop import DecoderConfig, decode
from specbench.decoding.rng import RandomStreams
from specbench.errors import UsageError
from specbench.harness.method import build_rule, build_verification, sampling_of
from specbench.models import eagle, emu3_vision
from specbench.models.loading import chameleon, emu3, image_tokenizers, naming
from specbench.models.loading.official import exported
from specbench.models.medusa import MedusaConfig, MedusaNetwork

MODELS = [
    name
    for name in parameters.choices("model")
    if name in registry.model_sources() and parameters.kind("model", name) == "discrete"
]
METHODS = [
    name
    for name in parameters.choices("method")
    if not parameters.is_continuous("rule", parameters.method_choices(name)["rule"])
]
TINY = ("weights=random", "reduced=true", "dtype=float32")
#: Methods in which a row begins before the row above it ends.
PARALLEL = {"zipar": ["window=2"], "pjd": ["lead=3"]}


def loaded(model, *words):
    cfg = configuration.compose([f"model={model}", *words])
    return cfg, registry.find("model", model)(cfg, torch.device("cpu"), torch.float32)


def reload(folder, model):
    return loaded(model, f"weights={folder}", "reduced=true", "dtype=float32")[1]


def prompts_of(bundle, n):
    if getattr(getattr(bundle.target, "cfg", None), "num_classes", 0):
        return [str(i) for i in range(n)]
    return ["a red fox", "two small boats on a lake", "a cup", "snow"][:n]


def check(bundle, tokens):
    """Checks that tokens obey the grammar and become pictures of the right size, each from its own tokens."""
    grammar = bundle.target.grammar
    if grammar is not None:
        fixed = grammar.forced >= 0
        assert (tokens[:, fixed] == grammar.forced[fixed]).all()
        assert (tokens[:, ~fixed] < grammar.codes).all()
    pictures = bundle.pixels(tokens)
    assert pictures.shape == (len(tokens), bundle.resolution, bundle.resolution, 3)
    assert pictures.dtype == np.uint8
    assert np.array_equal(bundle.pixels(tokens[-1:]), pictures[-1:])


#: The target, with a grammar, on which every method runs; and those without a grammar, with captions or classes, on
#: which every drafter runs. A method is nothing more than its drafter, rule and verification.
EVERY, DRAFTERS = "lumina_mgpt", ("llamagen_xl", "llamagen_l")
#: Targets that differ from another one only in their published sizes.
SIZES = ("llamagen_xl_512", "llamagen_3b", "llamagen_xl_c2i", "janus_pro_1b", "simplear_05b")
#: A method for every kind of drafter network, whose sizes are the target's, and the one that reads the rows of the
#: image. Other drafters have one of these networks, or read only what the target computes.
NETWORKS = ("sd", "eagle2", "eagle3", "medusa", "dflash", "zipar")


def one_method_for_every_drafter():
    """The last one."""
    return list({configuration.compose([f"method={name}"]).drafter: name for name in METHODS}.values())


@pytest.mark.parametrize(("model", "rows"), [(model, 1 if model == "llamagen_xl" else 3) for model in MODELS])
def test_every_method_runs_on_every_real_target(model, rows):
    """Targets that are similar to another one run only a selection of the methods."""
    _, bundle = loaded(model, *TINY)
    conditioning = bundle.encode(prompts_of(bundle, rows))
    if model == EVERY:
        methods = METHODS
    elif model in DRAFTERS:
        methods = one_method_for_every_drafter()
    else:
        methods = ("eagle2", "medusa") if model in SIZES else NETWORKS
    for method in methods:
        cfg = configuration.compose([f"model={model}", *TINY, f"method={method}", *PARALLEL.get(method, [])])
        drafter = registry.chosen("drafter", cfg).build(bundle)
        target = tiny.read_by(bundle.target, drafter)
        rule = build_rule(cfg, drafter.shape.height, bundle.codebook)
        sampling = sampling_of(cfg)
        verification = build_verification(cfg, drafter.shape)
        config = DecoderConfig(target, drafter, rule, sampling, verification=verification)
        out = decode(config, conditioning, RandomStreams([(0, i) for i in range(rows)]))
        assert out.tokens.shape == (rows, bundle.target.length), method
        if method in PARALLEL:
            assert (out.steps < bundle.target.length).all(), method
        else:
            assert (out.steps + out.accepted >= bundle.target.length).all(), method
            assert (out.drafted.sum() > 0) == (cfg.drafter != "none"), method
        assert out.trace.log_prob.isfinite().all(), method
    check(bundle, out.tokens)


def test_a_prompt_is_encoded_alone():
    for model in ("llamagen_xl", "lumina_mgpt", "emu3"):
        _, bundle = loaded(model, *TINY)
        together = bundle.encode(prompts_of(bundle, 3))
        single = bundle.encode(prompts_of(bundle, 3)[1:2])
        for name, value in vars(single).items():
            assert torch.equal(getattr(together, name)[1:2], value), (model, name)


def test_random_weights_are_reproducible():
    first, again = (loaded("llamagen_xl", *TINY)[1] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.target.parameters(), again.target.parameters(), strict=True))


def test_every_token_of_a_random_model_has_a_row_of_its_own():
    for model in ("lumina_mgpt", "anole", "emu3", "janus_pro_1b"):
        target = loaded(model, *TINY)[1].target
        assert len(target.embeddings().unique(dim=0)) == target.vocab_size, model


def test_the_unified_models_draw_the_published_number_of_tokens():
    codes = torch.arange(4, 8196)
    for side, after_start in ((768, 2355), (512, 1059)):  # two size tokens are in the prefix
        assert len(chameleon.lumina_image(codes, side, side).grammar) == after_start - 2
    assert len(chameleon.anole_image(codes, 512).grammar) == 1024 + 1
    visual = torch.arange(emu3.FIRST_CODE, emu3.FIRST_CODE + 32768)
    assert len(emu3.image(visual, *emu3.grid(emu3.AREA, "1:1", 8)).grammar) == 8193


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def eagle_config(target, **more):
    b = target.block
    sizes = {"hidden_size": b.dim, "num_attention_heads": b.n_heads, "num_key_value_heads": b.n_kv_heads}
    sizes |= {"intermediate_size": b.ffn_dim, "vocab_size": len(target.tok_embeddings.weight)}
    return {**sizes, "rms_norm_eps": 1e-6, **more}


def save_drafters(folder, bundle):
    """LANTERN's EAGLE layout, and the released layout of Medusa."""
    torch.manual_seed(3)
    head = eagle.EagleNetwork(eagle.like_shape(bundle.target))
    (folder / "eagle").mkdir(parents=True)
    tensors = exported(head, naming.eagle(head.cfg.block, head.cfg.input_norm))
    torch.save(tensors, folder / "eagle" / "pytorch_model.bin")
    write_json(folder / "eagle" / "config.json", eagle_config(bundle.target, rope_theta=head.cfg.rope_base))
    heads = MedusaNetwork(MedusaConfig(bundle.target.block.dim, len(bundle.target.tok_embeddings.weight), 5))
    (folder / "medusa").mkdir()
    torch.save(exported(heads, naming.medusa(5, "")), folder / "medusa" / "pytorch_model.bin")
    return head, heads


def tiny_t5(folder, fixture):
    """The text encoder of the fixture, with the width that a reduced LlamaGen reads."""
    from transformers import T5Config, T5EncoderModel

    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((fixture / name).read_bytes())
    size = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "feed_forward_proj": "gated-gelu"}
    torch.manual_seed(0)
    count = len(json.loads((fixture / "tokenizer.json").read_text())["model"]["vocab"])
    T5EncoderModel(T5Config(vocab_size=count, **size)).save_pretrained(folder)


def llamagen_pt(folder, bundle, t5_folder):
    (folder / "target").mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    text = not bundle.shape.num_classes
    table = naming.llamagen(bundle.shape.n_layer, text)
    content = {"model": exported(bundle.target, table) | {"freqs_cis": torch.zeros(3)}, "steps": 5}
    torch.save(content, folder / "target" / "model.pt")
    pixels = exported(bundle.tokenizer, image_tokenizers.llamagen_table(bundle.tokenizer.cfg))
    pixels["quantize.codebook_used"] = torch.zeros(9)
    torch.save({"model": pixels}, folder / "tokenizer" / "vq.pt")
    if text:
        tiny_t5(folder / "text", t5_folder)


def llamagen_lantern(folder, bundle, t5_folder):
    llamagen_pt(folder, bundle, t5_folder)
    (folder / "target" / "model.pt").unlink()
    c = bundle.target.cfg
    table = naming.lantern_llamagen(c.n_layer, c.block)
    save_file(exported(bundle.target, table), folder / "target" / "model.safetensors")
    more = {"num_hidden_layers": c.n_layer, "vocab_size": c.vocab_size, "cls_token_num": c.cls_token_num}
    more |= {"caption_dim": c.caption_dim, "block_size": c.block_size, "rms_norm_eps": c.norm_eps, "input_type": "t2i"}
    write_json(folder / "target" / "config.json", eagle_config(bundle.target) | more)


def run(folder, model, *words):
    """Runs the public command and returns the picture that it made."""
    out = folder / "run"
    command = ["run", f"model={model}", f"weights={folder}", "reduced=true", "dtype=float32", "device=cpu", "n=1"]
    prompts = [] if parameters.preferred("model", model).get("data") else ["data=geneval"]  # shipped
    code = main([*command, *prompts, "baseline=false", "warmup=0", "metrics=none", f"out={out}", *words])
    assert code == 0
    return Image.open(next((out / "images").iterdir()))


@pytest.mark.parametrize(
    ("model", "write", "method"),
    [
        ("llamagen_xl", llamagen_pt, "cool_sd"),
        ("llamagen_xl", llamagen_lantern, "eagle2"),
        ("llamagen_3b", llamagen_pt, "medusa"),
        ("llamagen_3b", llamagen_pt, "sd"),
    ],
)
def test_llamagen_is_read_from_official_files(tmp_path, model, write, method, t5):  # noqa: F811
    _, bundle = loaded(model, *TINY)
    write(tmp_path, bundle, t5)
    save_drafters(tmp_path, bundle)
    (tmp_path / "draft").symlink_to(tmp_path / "target")
    words = [f"method={method}"]
    if bundle.shape.num_classes:
        (tmp_path / "classes.txt").write_text("207\n")
        words += ["data=prompts", f"prompts={tmp_path / 'classes.txt'}"]
    picture = run(tmp_path, model, *words)
    assert picture.size == (bundle.resolution, bundle.resolution)
    again = reload(tmp_path, model)
    for a, b in ((again.target, bundle.target), (again.tokenizer, bundle.tokenizer)):
        torch.testing.assert_close(dict(a.state_dict()), dict(b.state_dict()), rtol=0, atol=0)
    assert again.target.block == bundle.target.block


def written(bundle):
    """The tensors of a language model in the Hugging Face layout, with a head of all its ids, and its sizes."""
    c = bundle.target.cfg
    head = torch.randn(c.vocab_size, c.dim, generator=torch.Generator().manual_seed(1))
    tensors = exported(bundle.target, naming.hugging_face(c.n_layer, c.block)) | {"lm_head.weight": head}
    more = {"num_hidden_layers": c.n_layer, "rms_norm_eps": c.norm_eps, "rope_theta": c.rope_base}
    return tensors, eagle_config(bundle.target) | more


def read_back(folder, model, bundle):
    """Checks that the bundle that is read back has the target's weights, and the rows of image tokens in its head.
    Returns it."""
    again = reload(folder, model)
    ids = again.target.image.ids
    expected = bundle.target.state_dict() | {"output.weight": written(bundle)[0]["lm_head.weight"][ids]}
    torch.testing.assert_close(dict(again.target.state_dict()), dict(expected), rtol=0, atol=0)
    assert again.target.cfg == bundle.target.cfg
    torch.testing.assert_close(dict(again.tokenizer.state_dict()), dict(bundle.tokenizer.state_dict()), rtol=0, atol=0)
    return again, ids


def chameleon_files(folder, bundle):
    """A sharded Hugging Face folder of the target."""
    tensors, config = written(bundle)
    # not a tensor of the target
    write_shards(folder / "target", tensors | {"model.vqmodel.quant_conv.bias": torch.zeros(3)})
    write_json(folder / "target" / "config.json", config | {"swin_norm": False})


def chameleon_transformers(folder, bundle):
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    pixels = {"embed_dim": 8, "num_embeddings": 16, "latent_channels": 8, "base_channels": 32}
    pixels |= {"channel_multiplier": [1, 1], "num_res_blocks": 1}
    tensors, sizes = written(bundle)
    cfg = ChameleonConfig(**sizes, vq_config=pixels, vocabulary_map={"<image>": 5})
    model = ChameleonForConditionalGeneration(cfg)
    mismatch = model.load_state_dict(tensors, strict=False)
    assert not mismatch.unexpected_keys
    assert all(name.startswith("model.vqmodel.") for name in mismatch.missing_keys)
    model.save_pretrained(folder / "target")


@pytest.mark.parametrize(
    ("model", "write", "method"),
    [
        ("lumina_mgpt", chameleon_files, "eagle1"),
        ("anole", chameleon_files, "medusa"),
        ("anole", chameleon_transformers, "sjd_isp"),
    ],
)
def test_chameleon_is_read_from_official_files(tmp_path, model, write, method):
    _, bundle = loaded(model, *TINY)
    write(tmp_path, bundle)
    (tmp_path / "tokenizer").mkdir()
    pixels = exported(bundle.tokenizer, image_tokenizers.taming_table(bundle.tokenizer.cfg))
    pixels["loss.discriminator.weight"] = torch.zeros(2)
    torch.save({"state_dict": pixels, "epoch": 3}, tmp_path / "tokenizer" / "vqgan.ckpt")
    order = [*range(10, 64), *range(10)]  # ids are not codes
    save_chameleon(tmp_path / "tokenizer" / "text_tokenizer.json", chameleon_names(order))
    _, released = save_drafters(tmp_path, bundle)
    picture = run(tmp_path, model, f"method={method}", "prompt_length=300")  # a token is a letter here
    assert picture.size == (bundle.resolution, bundle.resolution)
    again, ids = read_back(tmp_path, model, bundle)
    assert ids[:3].tolist() == [58, 59, 60]  # after <s>, <pad>, </s>, <unk> and codes 10 to 63
    weight = again.drafter_network("medusa").medusa_head[1][1].weight
    assert torch.equal(weight, released.medusa_head[1][1].weight[ids])


def emu3_files(folder, bundle):
    tensors, config = written(bundle)
    write_shards(folder / "target", tensors)
    write_json(folder / "target" / "config.json", config)
    official_file(bundle.tokenizer, folder / "tokenizer", emu3_vision.reduced(emu3.REDUCED_CODES))


def emu3_transformers(folder, bundle):
    """One folder with everything, as transformers saves it."""
    from transformers import Emu3Config, Emu3ForConditionalGeneration

    tensors, config = written(bundle)
    text = config | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    cfg = Emu3Config(vq_config=bundle.tokenizer.cfg.to_dict(), text_config=text, vocabulary_map={"<image>": 3})
    model = Emu3ForConditionalGeneration(cfg)
    state = {n.replace("model.", "model.text_model.", 1): t for n, t in tensors.items()}
    state |= {f"model.vqmodel.{n.removeprefix('vq.')}": t for n, t in bundle.tokenizer.state_dict().items()}
    model.load_state_dict(state)
    model.save_pretrained(folder / "target")
    (folder / "tokenizer").symlink_to(folder / "target")


@pytest.mark.parametrize(("write", "method"), [(emu3_files, "eagle1"), (emu3_transformers, "sjd_pac")])
def test_emu3_is_read_from_official_files(tmp_path, write, method, tiktoken):  # noqa: F811
    _, bundle = loaded("emu3", *TINY)
    write(tmp_path, bundle)
    (tmp_path / "target" / "emu3.tiktoken").write_bytes((tiktoken[0] / "emu3.tiktoken").read_bytes())
    save_drafters(tmp_path, bundle)
    picture = run(tmp_path, "emu3", f"method={method}", "prompt_length=400")
    assert picture.size == (bundle.resolution, bundle.resolution)
    again, _ = read_back(tmp_path, "emu3", bundle)
    assert again.drafter_network("eagle").cfg.input_norm


def test_missing_parts_are_reported(tmp_path, capsys):
    assert main(["run", "model=llamagen_xl", "data=geneval", f"weights={tmp_path}", "metrics=none"]) == 2
    stderr = capsys.readouterr().err
    assert "target/, tokenizer/, text/" in stderr
    assert "specbench fetch model=llamagen_xl" in stderr
    with pytest.raises(UsageError, match="0.*999.*'a cat'.*data=imagenet"):
        loaded("llamagen_3b", *TINY)[1].encode(["a cat"])
    with pytest.raises(UsageError, match="prompt 1.*prompt_length=8.*8"):
        loaded("emu3", *TINY, "prompt_length=8", "negative=''", "suffix=''")[1].encode(["a b", "a b c d e f g h"])
    with pytest.raises(UsageError, match="size.*512.*768.*1024"):
        loaded("lumina_mgpt", *TINY, "size=640")


def test_each_size_has_its_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path))
    for words, folder in ((), "lumina_mgpt"), (("size=768",), "lumina_mgpt"), (("size=512",), "lumina_mgpt_512"):
        cfg = configuration.compose(["model=lumina_mgpt", *words])
        assert registry.weights_folder(cfg) == tmp_path / "models" / folder


def test_weights_are_named_by_their_content(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path / "home"))
    for part in ("target", "tokenizer", "eagle"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "a.bin").write_bytes(part.encode())
    cfg = configuration.compose(["model=anole", f"weights={tmp_path}", "method=vanilla"])
    first = registry.weights_label(cfg)
    assert first.startswith("folder:")
    assert registry.weights_label(cfg.changed(drafter="eagle")).startswith(first + "+")
    monkeypatch.setattr("specbench.config.registry.LARGE", 1)  # hashed once, then cached
    registry._digest.cache_clear()  # the cache of this process
    large = registry.weights_label(cfg)
    registry._digest.cache_clear()
    assert registry.weights_label(cfg) == large
    assert len(list((tmp_path / "home" / "digests").iterdir())) == 2
    (tmp_path / "target" / "a.bin").write_bytes(b"other")
    assert registry.weights_label(cfg) != large
    with pytest.raises(FileNotFoundError, match="medusa"):
        registry.weights_label(cfg.changed(drafter="medusa"))
