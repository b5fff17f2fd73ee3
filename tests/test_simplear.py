"""SimpleAR: official files, TorchScript archives and prompts. Its goldens: test_models; its manifests: test_official
and test_pixels."""

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
from specbench.models.loading import image_tokenizers, naming, simplear
from specbench.models.loading.official import exported, from_tensors
from specbench.models.loading.unified_official import EMBEDDING, from_hugging_face, tied

WORDS = ["<unk>", "A", "highly", "realistic", "image", "of", "a", "cat", "An", "aerial", "view"]
NAMES = [*WORDS, *(f"word{i}" for i in range(22)), "<|t2i|>", "<|i2t|>", "<|soi|>", *(f"<|{i}|>" for i in range(4))]


@needs_reference
def test_the_official_sizes():
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


def save(folder, bundle):
    """Official files: the head is the embedding, and the archives hold what a still image does not need, too."""
    target = bundle.target
    c = target.cfg
    tensors = exported(target, naming.hugging_face(c.n_layer, c.block))
    del tensors["lm_head.weight"]
    (folder / "target").mkdir()
    save_file(tensors, folder / "target/model.safetensors")
    sizes = {"hidden_size": c.dim, "num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head}
    sizes |= {"num_key_value_heads": c.n_kv_head, "intermediate_size": c.ffn_hidden, "vocab_size": c.vocab_size}
    sizes |= {"rms_norm_eps": c.norm_eps, "rope_theta": c.rope_base, "tie_word_embeddings": True}
    (folder / "target/config.json").write_text(json.dumps(sizes))
    save_words(folder / "target/tokenizer.json", NAMES)
    (folder / "tokenizer").mkdir()
    for name, half in (("encoder", bundle.tokenizer.encoding), ("decoder", bundle.tokenizer.decoding)):
        found = exported(half, image_tokenizers.cosmos_table(half.state_dict()))
        found[f"{name}.mid.attn_1.1.q.conv3d.weight"] = torch.zeros(2)
        archive({n: t.bfloat16() for n, t in found.items()}, folder / f"tokenizer/{name}.jit")


@torch.no_grad()
def test_official_files_are_read(tmp_path):
    _, bundle = loaded("simplear_05b", *TINY)
    for layer in bundle.target.layers:  # random models have none
        layer.attention.wqkv.bias.normal_()
    for tensor in bundle.tokenizer.parameters():  # which the files hold exactly
        tensor.copy_(tensor.bfloat16())
    save(tmp_path, bundle)
    words = ["negative=An aerial view", "reduced=true", "dtype=float32"]
    _, again = loaded("simplear_05b", f"weights={tmp_path}", *words)
    given = again.encode(["a cat"])
    assert given.ids[0, given.valid[0]].tolist() == [33, 1, 2, 3, 4, 5, 6, 7, 35]
    assert given.no_ids[0, given.no_valid[0]].tolist() == [33, 8, 9, 10, 35]
    ids = again.image.ids
    assert ids[:2].tolist() == [40, 41]
    assert ids[64:].tolist() == list(range(40))
    wanted = bundle.target.state_dict()
    wanted["output.weight"] = wanted["tok_embeddings.weight"][ids]
    torch.testing.assert_close(dict(again.target.state_dict()), dict(wanted), rtol=0, atol=0)
    smaller = again.read_smaller(tmp_path / "target")  # a drafter of the family
    torch.testing.assert_close(dict(smaller.state_dict()), dict(wanted), rtol=0, atol=0)
    ours, theirs = (dict(one.tokenizer.state_dict()) for one in (again, bundle))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


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
    own = from_tensors(tensors | {"lm_head.weight": torch.zeros(2, 3)})
    assert tied(own, {"tie_word_embeddings": True}) is own  # what the file holds wins


class Call:
    """What a hostile pickle would run."""

    def __reduce__(self):
        return print, ("run",)


def rewritten(source, file, change):
    """The archive with another data.pkl, or with shorter records."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))


def test_an_archive_runs_nothing_and_is_checked(tmp_path, capsys):
    file, bad = tmp_path / "whole.jit", tmp_path / "bad.jit"
    values = torch.arange(12.0).view(3, 4)
    archive({"encoder.0.weight": values, "bias": values[0].bfloat16()}, file)
    source = image_tokenizers.open_archive(file)
    found = dict(source.read(source.tensors))
    assert torch.equal(found["encoder.0.weight"], values)
    assert torch.equal(found["bias"], values[0].bfloat16())
    assert torch.equal(found["codes"], torch.arange(6).view(2, 3).T)
    rewritten(file, bad, lambda name, x: pickle.dumps(Call()) if name.endswith("data.pkl") else x)
    with pytest.raises(UsageError, match="print"):
        image_tokenizers.open_archive(bad)
    rewritten(file, bad, lambda name, x: x[:8] if "/data/" in name else x)
    with pytest.raises(UsageError, match="out of bounds"):
        image_tokenizers.open_archive(bad)
    bad.write_bytes(file.read_bytes()[:200])
    with pytest.raises(UsageError, match="not a readable TorchScript archive"):
        image_tokenizers.open_archive(bad)
    with pytest.raises(UsageError, match="there is no file"):
        image_tokenizers.open_archive(tmp_path / "absent.jit")
    assert capsys.readouterr().out == ""


def test_older_files_of_a_tokenizer(tmp_path):
    """The bytes of a text, of which two are merged; the others' ids come by name."""
    vocabulary = [*pre_tokenizers.ByteLevel.alphabet(), "ca"]
    (tmp_path / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(vocabulary)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nc a\n")
    with pytest.raises(UsageError, match="not a readable tokenizer"):
        simplear.SimpleARText(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|t2i|>": 257, "<|soi|>": 258}))
    text = simplear.SimpleARText(tmp_path)
    assert (len(text), text.ids()) == (259, simplear.SimpleARIds(257, 258))
    assert [vocabulary[i] for i in text.encode("a cat<|soi|>1e\u0301")] == [*"aĠ", "ca", *"t<|soi|>1", "Ã", "©"]


def test_another_tokenizer_is_refused(tmp_path):
    save_words(tmp_path / "tokenizer.json", WORDS)
    with pytest.raises(UsageError, match=r"lacks the token <\|t2i\|>"):
        simplear.SimpleARText(tmp_path).ids()
