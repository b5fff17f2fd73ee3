"""Lumina-mGPT 2.0: official files and prompts. Its goldens: test_models; its manifests: test_official, test_pixels."""

from __future__ import annotations

import json

import pytest
import torch
from rehearsal.vocabularies import save_words
from safetensors.torch import save_file
from test_real import TINY, loaded

from specbench.errors import UsageError
from specbench.models.loading import image_tokenizers, lumina2, naming
from specbench.models.loading.official import exported

WORDS = ["<|end|>", "Generate", "an", "<unk>", "image", "of", "32x32", "according", "to", "the", "following"]
WORDS += ["prompt:", "a", "cat"]
NAMED = {"<reserved08706>": 90, "<racm3:break>": 91, "<eoss>": 92, "<reserved08799>": 93, "<reserved08800>": 94}


def save(folder, bundle):
    target = bundle.target
    c = target.cfg
    tensors = exported(target, naming.hugging_face(c.n_layer, c.block))
    head = torch.zeros(c.vocab_size, c.dim)
    head[torch.cat([target.image.ids[:64], torch.tensor([93, 92])])] = tensors.pop("lm_head.weight")
    (folder / "target").mkdir()
    save_file(tensors | {"lm_head.weight": head}, folder / "target/model.safetensors")
    sizes = {"hidden_size": c.dim, "num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head}
    sizes |= {"intermediate_size": c.ffn_hidden, "vocab_size": c.vocab_size, "rms_norm_eps": c.norm_eps}
    sizes |= {"rope_theta": c.rope_base, "vocabulary_map": NAMED}
    (folder / "target/config.json").write_text(json.dumps(sizes))
    save_words(folder / "target/tokenizer.json", WORDS)
    (folder / "target/tokenizer_config.json").write_text(json.dumps({"bos_token": None, "eos_token": "<|end|>"}))
    (folder / "tokenizer").mkdir()
    pixels = exported(bundle.tokenizer, image_tokenizers.taming_table(bundle.tokenizer.cfg))
    torch.save(pixels, folder / "tokenizer/movqgan_270M.ckpt")


@torch.inference_mode()
def test_official_files_are_read(tmp_path):
    _, bundle = loaded("lumina_mgpt2", *TINY)
    save(tmp_path, bundle)
    _, again = loaded("lumina_mgpt2", f"weights={tmp_path}", "reduced=true", "dtype=float32")
    given = again.encode(["a cat"])
    # the name of the beginning is that of the end; height and width are one unit each
    words = list(range(1, 3)) + list(range(4, 14))
    assert given.ids[0, given.valid[0]].tolist() == [0, *words, 90, 91, 95, 95]
    assert given.no_ids[0, given.no_valid[0]].tolist() == [91, 95, 95]
    assert again.image.ids[-2:].tolist() == [93, 92]
    tokens = torch.arange(4)[None]
    found = []
    for one in (bundle, again):
        prefix = one.target.condition(given, False)
        found.append(one.target.head(one.target.uncached(prefix, tokens)))
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)
    codes = torch.arange(16)[None]
    torch.testing.assert_close(again.tokenizer.decode(codes), bundle.tokenizer.decode(codes), rtol=0, atol=1e-6)


def test_another_tokenizer_is_refused(tmp_path):
    save_words(tmp_path / "tokenizer.json", WORDS)
    for name, content in (("config.json", "{}"), ("tokenizer_config.json", '{"eos_token": {"content": "<|end|>"}}')):
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match="lacks the token <eoss>"):
        lumina2.Lumina2Text(tmp_path).ids()
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(UsageError, match=r"config\.json: cannot read it as JSON"):
        lumina2.Lumina2Text(tmp_path)
