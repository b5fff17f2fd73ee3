"""Janus-Pro: official files of both layouts, their tokenizer and prompts. Its goldens: test_models."""

from __future__ import annotations

import json

import pytest
import torch
from reference import manifest, needs_reference
from rehearsal.vocabularies import save_words
from safetensors.torch import save_file
from test_real import TINY, loaded

from specbench.errors import UsageError
from specbench.models import vq
from specbench.models.loading import image_tokenizers, janus, official
from specbench.models.unified import Unified

NAMES = [
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
def test_every_official_tensor_has_one_destination():
    for name in ("Janus-Pro-1B", "Janus-Pro-7B", "Janus-Pro-1B-hf", "Janus-Pro-7B-hf"):
        facts, source = manifest(name)
        cfg = janus.configured(facts["config"]["language_model"], source)
        size = "janus_pro_" + name[10:12].lower()
        wanted = janus.full(size)
        assert {**vars(cfg), "vocab_size": cfg.vocab_size + janus.CODES} == vars(wanted)
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


def save(folder, bundle, layout):
    """Official files of a bundle with random weights, whose table of image inputs becomes that of the files."""
    target, names = bundle.target, NAMES
    text = target.cfg.vocab_size - janus.REDUCED_CODES
    torch.manual_seed(0)
    inputs = janus.ImageInputs(janus.REDUCED_CODES, 8, target.cfg.dim)
    with torch.no_grad():
        target.tok_embeddings.weight[text:] = inputs.table()
    head = {"official": "gen_embed.weight", "transformers": "model.generation_embeddings.weight"}[layout]
    (table, _), (own, _) = janus.layouts([head], target.cfg.n_layer, target.cfg.block)
    state = target.state_dict() | {"tok_embeddings.weight": target.tok_embeddings.weight[:text]}
    tensors = official.exported(_Named(state), table) | official.exported(inputs, own)
    marks = {"official": (), "transformers": ("model.vqmodel.quantize.embedding.weight",)}[layout]
    tensors |= official.exported(bundle.tokenizer, image_tokenizers.janus_layout(marks, bundle.tokenizer.cfg)[0])
    tensors["vision_model.x" if layout == "official" else "model.aligner.fc1.bias"] = torch.zeros(2)
    folder.mkdir()
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    c = target.cfg
    sizes = {"hidden_size": c.dim, "intermediate_size": c.ffn_hidden, "num_hidden_layers": c.n_layer}
    sizes |= {"num_attention_heads": c.n_head, "vocab_size": text}
    part = "language_config" if layout == "official" else "text_config"
    (folder / "config.json").write_text(json.dumps({part: sizes}))
    save_words(folder / "tokenizer.json", names)


class _Named(torch.nn.Module):
    """A module with this state."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def state_dict(self, *_a, **_k):
        return self.state


@pytest.mark.parametrize("layout", ["official", "transformers"])
@torch.inference_mode()
def test_official_files_are_read(tmp_path, layout):
    _, bundle = loaded("janus_pro_1b", *TINY)
    save(tmp_path / "target", bundle, layout)
    _, again = loaded("janus_pro_1b", f"weights={tmp_path}", "reduced=true", "dtype=float32")
    given = again.encode(["a cat", "  cat\n"])
    kept = given.valid[0]
    # the roles are text here; the prompt's unknown words are one id
    assert given.ids[0, kept].tolist() == [0, 7, 4, 5, 8, 2]
    assert given.no_ids[0, kept].tolist() == [0, 1, 1, 1, 1, 2]
    assert given.ids[1, given.valid[1]].tolist() == [0, 7, 5, 8, 2]
    tokens = torch.arange(16).view(2, 8) * 3
    found = []
    for one in (bundle, again):
        prefix = one.target.condition(given, True)
        found.append(one.target.head(one.target.uncached(prefix, torch.cat([tokens, tokens]))))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    assert again.image.ids[0] == again.target.cfg.vocab_size - janus.REDUCED_CODES
    codes = torch.arange(16).view(1, 16)
    torch.testing.assert_close(again.tokenizer.decode(codes), bundle.tokenizer.decode(codes))


def test_the_table_of_text_and_codes_is_made_once(tmp_path, monkeypatch):
    """It was a copy of the text's table and the codes': both were in memory, of the 7B model 2 GB."""
    _, bundle = loaded("janus_pro_1b", *TINY)
    save(tmp_path / "target", bundle, "official")
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


def test_a_role_that_is_a_token_is_one(tmp_path):
    save_words(tmp_path / "tokenizer.json", [*NAMES, "<|User|>", "<|Assistant|>"])
    text = janus.JanusText(tmp_path)
    assert text.template("a cat") == [9, 6, 4, 5, 10, 6]
    assert text.ids() == janus.JanusIds(0, 1, 2)
    save_words(tmp_path / "tokenizer.json", NAMES[1:])
    with pytest.raises(UsageError, match="it is not Janus-Pro's"):
        janus.JanusText(tmp_path).ids()


def test_another_models_file_is_refused(tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    save_file({"model.embed_tokens.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 8}))
    with pytest.raises(UsageError, match="it is not Janus's"):
        janus.read(folder, official.open_source(folder), 4, torch.device("cpu"), torch.float32)
