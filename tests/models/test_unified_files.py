"""Janus-Pro, SimpleAR and Lumina-mGPT 2.0: official files, tokenizers and prompts. Their goldens are in test_models,
their other manifests in test_official and test_pixels."""

from __future__ import annotations

import json
import pickle
import warnings
import zipfile

import pytest
import torch
from reference import manifest, needs_reference
from rehearsal.vocabularies import save_words
from safetensors.torch import save_file
from test_real import TINY, loaded
from tokenizers import pre_tokenizers

from specbench.errors import UsageError
from specbench.models import vq
from specbench.models.loading import image_tokenizers, janus, lumina2, naming, official, simplear
from specbench.models.loading.official import exported, from_tensors
from specbench.models.loading.unified_official import EMBEDDING, from_hugging_face, tied
from specbench.models.unified import Unified


def sizes_of(c):
    """The sizes in a language model's config.json."""
    sizes = {"hidden_size": c.dim, "num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head}
    sizes |= {"num_key_value_heads": c.n_kv_head, "intermediate_size": c.ffn_hidden, "vocab_size": c.vocab_size}
    return sizes | {"rms_norm_eps": c.norm_eps, "rope_theta": c.rope_base}


def save_language(folder, tensors, config, names):
    """A Hugging Face folder whose tokenizer has these names."""
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    save_words(folder / "tokenizer.json", names)


# --- Janus-Pro --------------------------------------------------------------------------------------------------------

JANUS_NAMES = [
    "<｜begin▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<begin_of_image>",
    "<unk>",
    "a",
    "cat",
    ":",
    "<|User|>:",
    "<|Assistant|>:",
]


@needs_reference
def test_every_official_tensor_of_janus_has_one_destination():
    for name in ("Janus-Pro-1B", "Janus-Pro-7B", "Janus-Pro-1B-hf", "Janus-Pro-7B-hf"):
        facts, source = manifest(name)
        cfg = janus.configured(facts["config"]["language_model"], source)
        size = "janus_pro_" + name[10:12].lower()
        expected = janus.full(size)
        assert {**vars(cfg), "vocab_size": cfg.vocab_size + janus.CODES} == vars(expected)
        language, inputs = janus.layouts(source.tensors, cfg.n_layer, cfg.block)
        pixels = image_tokenizers.janus_layout(source.tensors, vq.VQConfig())
        image = janus.image(cfg.vocab_size, janus.CODES, janus.SIDE)
        with torch.device("meta"):
            modules = Unified(cfg, image), janus.ImageInputs(janus.CODES, 8, cfg.dim), vq.VQModel(vq.VQConfig())
        for module, (table, ignored) in zip(modules, (language, inputs, pixels), strict=True):
            official.check(module, source, table, ignored)
        unused = set(source.tensors) - {*language[0], *inputs[0], *pixels[0]}
        understanding = ("vision_model.", "aligner.", "model.vision_model.", "model.aligner.")
        others = {"language_model.lm_head.weight", "lm_head.weight", "gen_vision_model.quantize.codebook_used"}
        assert all(n.startswith(understanding) or n in others for n in unused)


def save_janus(folder, bundle, layout):
    """Official files of a bundle with random weights. The bundle gets the files' table of image inputs."""
    target = bundle.target
    text = target.cfg.vocab_size - janus.REDUCED_CODES
    torch.manual_seed(0)
    inputs = janus.ImageInputs(janus.REDUCED_CODES, 8, target.cfg.dim)
    with torch.no_grad():
        target.tok_embeddings.weight[text:] = inputs.table()
    head = {"official": "gen_embed.weight", "transformers": "model.generation_embeddings.weight"}[layout]
    (table, _), (input_table, _) = janus.layouts([head], target.cfg.n_layer, target.cfg.block)
    state = target.state_dict() | {"tok_embeddings.weight": target.tok_embeddings.weight[:text]}
    tensors = official.exported(_Named(state), table) | official.exported(inputs, input_table)
    marks = {"official": (), "transformers": ("model.vqmodel.quantize.embedding.weight",)}[layout]
    tensors |= official.exported(bundle.tokenizer, image_tokenizers.janus_layout(marks, bundle.tokenizer.cfg)[0])
    tensors["vision_model.x" if layout == "official" else "model.aligner.fc1.bias"] = torch.zeros(2)
    sizes = {n: x for n, x in sizes_of(target.cfg).items() if n not in ("num_key_value_heads", "rope_theta")}
    part = "language_config" if layout == "official" else "text_config"
    save_language(folder, tensors, {part: sizes | {"vocab_size": text}}, JANUS_NAMES)


class _Named(torch.nn.Module):
    """A module with this state."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def state_dict(self, *_a, **_k):
        return self.state


@pytest.mark.parametrize("layout", ["official", "transformers"])
@torch.inference_mode()
def test_janus_s_official_files_are_read(tmp_path, layout):
    _, bundle = loaded("janus_pro_1b", *TINY)
    save_janus(tmp_path / "target", bundle, layout)
    _, again = loaded("janus_pro_1b", f"weights={tmp_path}", "reduced=true", "dtype=float32")
    prompts = again.encode(["a cat", "  cat\n"])
    valid = prompts.valid[0]
    # the roles are plain text here; the prompt's unknown words are one id
    assert prompts.ids[0, valid].tolist() == [0, 7, 4, 5, 8, 2]
    assert prompts.no_ids[0, valid].tolist() == [0, 1, 1, 1, 1, 2]
    assert prompts.ids[1, prompts.valid[1]].tolist() == [0, 7, 5, 8, 2]
    tokens = torch.arange(16).view(2, 8) * 3
    logits = []
    for loaded_bundle in (bundle, again):
        prefix = loaded_bundle.target.condition(prompts, True)
        logits.append(loaded_bundle.target.head(loaded_bundle.target.uncached(prefix, torch.cat([tokens, tokens]))))
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    assert again.image.ids[0] == again.target.cfg.vocab_size - janus.REDUCED_CODES
    codes = torch.arange(16).view(1, 16)
    torch.testing.assert_close(again.tokenizer.decode(codes), bundle.tokenizer.decode(codes))


def test_the_table_of_text_and_codes_is_made_once(tmp_path, monkeypatch):
    """It used to be a copy of the text's table and the codes'. Both were in memory: 2 GB for the 7B model."""
    _, bundle = loaded("janus_pro_1b", *TINY)
    save_janus(tmp_path / "target", bundle, "official")
    tables = []

    def load(*arguments):
        module = read(*arguments)
        tables.extend(p.data_ptr() for name, p in module.named_parameters() if name == "tok_embeddings.weight")
        return module

    read = official.load
    monkeypatch.setattr(official, "load", load)
    source = official.open_source(tmp_path / "target")
    target = janus.read(tmp_path / "target", source, janus.REDUCED_SIDE, torch.device("cpu"), torch.float32)
    assert tables == [target.tok_embeddings.weight.data_ptr()]
    assert len(target.tok_embeddings.weight) == target.cfg.vocab_size == bundle.target.cfg.vocab_size


def test_a_role_that_is_a_token_is_encoded_as_one(tmp_path):
    save_words(tmp_path / "tokenizer.json", [*JANUS_NAMES, "<|User|>", "<|Assistant|>"])
    text = janus.JanusText(tmp_path)
    assert text.template("a cat") == [9, 6, 4, 5, 10, 6]
    assert text.ids() == janus.JanusIds(0, 1, 2)
    save_words(tmp_path / "tokenizer.json", JANUS_NAMES[1:])
    with pytest.raises(UsageError, match="Janus-Pro"):
        janus.JanusText(tmp_path).ids()


def test_a_file_of_another_model_is_refused(tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    save_file({"model.embed_tokens.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 8}))
    with pytest.raises(UsageError, match="Janus"):
        janus.read(folder, official.open_source(folder), 4, torch.device("cpu"), torch.float32)


# --- SimpleAR ---------------------------------------------------------------------------------------------------------

SIMPLEAR_WORDS = ["<unk>", "A", "highly", "realistic", "image", "of", "a", "cat", "An", "aerial", "view"]
SIMPLEAR_NAMES = [
    *SIMPLEAR_WORDS,
    *(f"word{i}" for i in range(22)),
    "<|t2i|>",
    "<|i2t|>",
    "<|soi|>",
    *(f"<|{i}|>" for i in range(4)),
]


@needs_reference
def test_the_official_sizes_of_simplear():
    for name, size in (("simplear_05b", "0.5B"), ("simplear_15b", "1.5B")):
        config = manifest(f"SimpleAR-{size}")[0]["config"]
        assert simplear.full(name) == from_hugging_face(config, 0, True)
        assert simplear.full(name).block.head_dim == config["head_dim"]
        assert (config["tokenizer_length"], config["grid"]) == (simplear.TEXT_IDS, simplear.SIDE)


def archive(tensors, file):
    """A TorchScript file with these attributes, some of which share a module."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if part not in dict(at.named_children()):
                at.add_module(part, torch.nn.Module())
            at = at.get_submodule(part)
        at.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
    root.register_buffer("codes", torch.arange(6).view(2, 3).T)  # not contiguous
    with warnings.catch_warnings():  # newer releases advise against TorchScript
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(root), file)


def save_simplear(folder, bundle):
    """Official files: the head is the embedding, and the archives also contain parts that a still image does not
    need."""
    target = bundle.target
    c = target.cfg
    tensors = exported(target, naming.hugging_face(c.n_layer, c.block))
    del tensors["lm_head.weight"]
    save_language(folder / "target", tensors, {**sizes_of(c), "tie_word_embeddings": True}, SIMPLEAR_NAMES)
    (folder / "tokenizer").mkdir()
    for name, half in (("encoder", bundle.tokenizer.encoding), ("decoder", bundle.tokenizer.decoding)):
        weights = exported(half, image_tokenizers.cosmos_table(half.state_dict()))
        weights[f"{name}.mid.attn_1.1.q.conv3d.weight"] = torch.zeros(2)
        archive({n: t.bfloat16() for n, t in weights.items()}, folder / f"tokenizer/{name}.jit")


@torch.no_grad()
def test_simplear_s_official_files_are_read(tmp_path):
    _, bundle = loaded("simplear_05b", *TINY)
    for layer in bundle.target.layers:  # random models have no biases
        layer.attention.wqkv.bias.normal_()
    for tensor in bundle.tokenizer.parameters():  # the files store these values exactly
        tensor.copy_(tensor.bfloat16())
    save_simplear(tmp_path, bundle)
    words = ["negative=An aerial view", "reduced=true", "dtype=float32"]
    _, again = loaded("simplear_05b", f"weights={tmp_path}", *words)
    prompts = again.encode(["a cat"])
    assert prompts.ids[0, prompts.valid[0]].tolist() == [33, 1, 2, 3, 4, 5, 6, 7, 35]
    assert prompts.no_ids[0, prompts.no_valid[0]].tolist() == [33, 8, 9, 10, 35]
    ids = again.image.ids
    assert ids[:2].tolist() == [40, 41]
    assert ids[64:].tolist() == list(range(40))
    expected = bundle.target.state_dict()
    expected["output.weight"] = expected["tok_embeddings.weight"][ids]
    torch.testing.assert_close(dict(again.target.state_dict()), dict(expected), rtol=0, atol=0)
    smaller = again.read_smaller(tmp_path / "target")  # a drafter of the family
    torch.testing.assert_close(dict(smaller.state_dict()), dict(expected), rtol=0, atol=0)
    read, original = (dict(loaded_bundle.tokenizer.state_dict()) for loaded_bundle in (again, bundle))
    torch.testing.assert_close(read, original, rtol=0, atol=0)


def test_ids_of_text_are_drawn_and_decode_as_code_0():
    _, bundle = loaded("simplear_05b", *TINY)
    assert bundle.target.vocab_size == 40 + 64
    tokens = torch.arange(16)[None]
    text = torch.where(tokens % 2 == 0, 64 + tokens, tokens)
    assert (bundle.pixels(text) == bundle.pixels(torch.where(tokens % 2 == 0, 0, tokens))).all()
    assert bundle.codebook()[64:].isnan().all()
    assert (bundle.codebook()[:64].unique(dim=0)).shape == (64, 6)


def test_the_embedding_is_the_head_where_both_are_tied():
    tensors = {EMBEDDING: torch.ones(2, 3), "other": torch.zeros(1)}
    source = tied(from_tensors(tensors), {"tie_word_embeddings": True})
    assert {name: tensor.sum().item() for name, tensor in source.read(source.tensors)} == {
        EMBEDDING: 6,
        "lm_head.weight": 6,
        "other": 0,
    }
    assert [name for name, _ in source.read(["lm_head.weight"])] == ["lm_head.weight"]
    assert [name for name, _ in source.read(["other", EMBEDDING])] == [EMBEDDING, "other"]
    assert "lm_head.weight" not in tied(from_tensors(tensors), {}).tensors
    with_head = from_tensors(tensors | {"lm_head.weight": torch.zeros(2, 3)})
    assert tied(with_head, {"tie_word_embeddings": True}) is with_head  # the head in the file takes precedence


class Call:
    """The call in a hostile pickle."""

    def __reduce__(self):
        return print, ("run",)


def rewrite(source, file, change):
    """The archive with another data.pkl, or with shorter records."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))


def test_an_archive_runs_nothing_and_is_checked(tmp_path, capsys):
    file, bad = tmp_path / "whole.jit", tmp_path / "bad.jit"
    values = torch.arange(12.0).view(3, 4)
    archive({"encoder.0.weight": values, "bias": values[0].bfloat16()}, file)
    source = image_tokenizers.open_archive(file)
    tensors = dict(source.read(source.tensors))
    assert torch.equal(tensors["encoder.0.weight"], values)
    assert torch.equal(tensors["bias"], values[0].bfloat16())
    assert torch.equal(tensors["codes"], torch.arange(6).view(2, 3).T)
    rewrite(file, bad, lambda name, x: pickle.dumps(Call()) if name.endswith("data.pkl") else x)
    with pytest.raises(UsageError, match="print"):
        image_tokenizers.open_archive(bad)
    rewrite(file, bad, lambda name, x: x[:8] if "/data/" in name else x)
    with pytest.raises(UsageError, match="bounds"):
        image_tokenizers.open_archive(bad)
    bad.write_bytes(file.read_bytes()[:200])
    with pytest.raises(UsageError, match="TorchScript"):
        image_tokenizers.open_archive(bad)
    with pytest.raises(UsageError, match="file"):
        image_tokenizers.open_archive(tmp_path / "absent.jit")
    assert capsys.readouterr().out == ""


def test_older_files_of_a_tokenizer(tmp_path):
    """The bytes of a text, two of them merged; the other ids come by name."""
    vocabulary = [*pre_tokenizers.ByteLevel.alphabet(), "ca"]
    (tmp_path / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(vocabulary)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nc a\n")
    with pytest.raises(UsageError, match="tokenizer"):
        simplear.SimpleARText(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|t2i|>": 257, "<|soi|>": 258}))
    text = simplear.SimpleARText(tmp_path)
    assert (len(text), text.ids()) == (259, simplear.SimpleARIds(257, 258))
    assert [vocabulary[i] for i in text.encode("a cat<|soi|>1e\u0301")] == [*"aĠ", "ca", *"t<|soi|>1", "Ã", "©"]


def test_another_tokenizer_is_refused(tmp_path):
    save_words(tmp_path / "tokenizer.json", SIMPLEAR_WORDS)
    with pytest.raises(UsageError, match=r"<\|t2i\|>"):
        simplear.SimpleARText(tmp_path).ids()


# --- Lumina-mGPT 2.0 --------------------------------------------------------------------------------------------------

LUMINA2_WORDS = ["<|end|>", "Generate", "an", "<unk>", "image", "of", "32x32", "according", "to", "the", "following"]
LUMINA2_WORDS += ["prompt:", "a", "cat"]
LUMINA2_NAMED = {"<reserved08706>": 90, "<racm3:break>": 91, "<eoss>": 92, "<reserved08799>": 93, "<reserved08800>": 94}


def save_lumina2(folder, bundle):
    target = bundle.target
    c = target.cfg
    tensors = exported(target, naming.hugging_face(c.n_layer, c.block))
    head = torch.zeros(c.vocab_size, c.dim)
    head[torch.cat([target.image.ids[:64], torch.tensor([93, 92])])] = tensors.pop("lm_head.weight")
    config = {**sizes_of(c), "vocabulary_map": LUMINA2_NAMED}
    save_language(folder / "target", tensors | {"lm_head.weight": head}, config, LUMINA2_WORDS)
    (folder / "target/tokenizer_config.json").write_text(json.dumps({"bos_token": None, "eos_token": "<|end|>"}))
    (folder / "tokenizer").mkdir()
    pixels = exported(bundle.tokenizer, image_tokenizers.taming_table(bundle.tokenizer.cfg))
    torch.save(pixels, folder / "tokenizer/movqgan_270M.ckpt")


@torch.inference_mode()
def test_lumina2_s_official_files_are_read(tmp_path):
    _, bundle = loaded("lumina_mgpt2", *TINY)
    save_lumina2(tmp_path, bundle)
    _, again = loaded("lumina_mgpt2", f"weights={tmp_path}", "reduced=true", "dtype=float32")
    prompts = again.encode(["a cat"])
    # the name of the beginning equals the name of the end; height and width are one unit each
    words = list(range(1, 3)) + list(range(4, 14))
    assert prompts.ids[0, prompts.valid[0]].tolist() == [0, *words, 90, 91, 95, 95]
    assert prompts.no_ids[0, prompts.no_valid[0]].tolist() == [91, 95, 95]
    assert again.image.ids[-2:].tolist() == [93, 92]
    tokens = torch.arange(4)[None]
    logits = []
    for loaded_bundle in (bundle, again):
        prefix = loaded_bundle.target.condition(prompts, False)
        logits.append(loaded_bundle.target.head(loaded_bundle.target.uncached(prefix, tokens)))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-6)
    codes = torch.arange(16)[None]
    torch.testing.assert_close(again.tokenizer.decode(codes), bundle.tokenizer.decode(codes), rtol=0, atol=1e-6)


def test_lumina2_refuses_another_tokenizer(tmp_path):
    save_words(tmp_path / "tokenizer.json", LUMINA2_WORDS)
    for name, content in (("config.json", "{}"), ("tokenizer_config.json", '{"eos_token": {"content": "<|end|>"}}')):
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match="<eoss>"):
        lumina2.Lumina2Text(tmp_path).ids()
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(UsageError, match=r"config\.json"):
        lumina2.Lumina2Text(tmp_path)
