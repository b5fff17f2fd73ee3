"""Prompts as the official models read them: cleaning, left padding, tokenizers, and prompt formats."""

from __future__ import annotations

import base64
import json
import logging
import random
from pathlib import Path

import pytest
import torch
from reference import REFERENCE, manifest, needs_reference
from rehearsal.vocabularies import chameleon_names, save_chameleon, save_t5
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from specbench.errors import UsageError
from specbench.models.loading import chameleon, emu3, unified_official
from specbench.models.loading import text_official as text

WORDS = "a cat dog on the mat red blue car sits near old small".split()
TEXTS = [
    "the cat sat on the mat, the cat's mat",
    "a red car near the old cat; the dog isn't on the mat",
    "Zwei rote Autos, 42 Katzen und été — naïve",
    "the the the cat cat   sat\n\non  ",
]
#: Words of three letters in every order, in which merges compete for the same letters.
_DRAWN = random.Random(0)
NOISE = " ".join("".join(_DRAWN.choices("abc", k=_DRAWN.randint(1, 12))) for _ in range(150))


def test_captions_are_cleaned() -> None:
    for caption, cleaned in (
        ("  A Dog  runs\n", "a dog runs"),
        ("Fish &amp; chips", "fish chips"),
        ("a <b>bold</b> cat</s><extra_id_0>", "a bold cat"),
        ("“Welcome” — it’s here…", '"welcome" - it\'s here…'),
        ('"quoted"', "quoted"),
        ("a set of 2x2 emoji (dogs) & cats/birds", "a set of emoji dogs cats birds"),
        ("The U.S.,with 3.5 cars", "the u. s., with 3.5 cars"),
        ("one-two-three-four-five", "one two three four five"),
        ("black-and-white", "black-and-white"),
        ("The #41 bus . ", "the bus ."),
        ("", ""),
    ):
        assert text.clean(caption) == cleaned


@needs_reference
def test_left_padding_equals_the_golden() -> None:
    t = load_file(REFERENCE / "goldens" / "llamagen_t2i.safetensors")
    features, valid = text.left_pad(t["in/t5_features"], t["in/t5_mask"])
    torch.testing.assert_close(features, t["out/left_features"], atol=0, rtol=0)
    assert valid.dtype == torch.bool
    assert torch.equal(valid.long(), t["out/left_mask"])


def test_left_padding_lets_nothing_of_the_padding_through() -> None:
    features = torch.full((3, 4, 2), torch.nan)
    features[0, :2], features[1] = 1.0, 2.0
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    moved, valid = text.left_pad(features, mask)
    assert valid.long().tolist() == [[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert moved[..., 0].tolist() == [[0, 0, 1, 1], [2, 2, 2, 2], [0, 0, 0, 0]]


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny T5 encoder and tokenizer in the files of google/flan-t5-xl."""
    from transformers import T5Config, T5EncoderModel

    folder = tmp_path_factory.mktemp("t5")
    count = save_t5(folder, WORDS, 8)
    torch.manual_seed(0)
    size = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "feed_forward_proj": "gated-gelu"}
    T5EncoderModel(T5Config(vocab_size=count, **size)).save_pretrained(folder)
    return folder


def test_t5_features_equal_the_padded_official_call(t5: Path) -> None:
    """LlamaGen pads to the full length on the right, encodes the batch, and only then moves the valid part."""
    from transformers import AutoTokenizer, T5EncoderModel

    encoder = text.T5Features(t5, "cpu", torch.float32, tokens=9)
    prompts = ["A red  Cat on the mat", "the dog", ""]
    features, valid = encoder(prompts)
    assert (features.shape, features.dtype, encoder.dim) == ((3, 9, 16), torch.float32, 16)
    assert valid.sum(1).tolist() == [7, 3, 1]  # words and the end of sequence
    inputs = AutoTokenizer.from_pretrained(t5)(
        ["a red cat on the mat", "the dog", ""], padding="max_length", max_length=9, return_tensors="pt"
    )
    with torch.no_grad():
        padded = T5EncoderModel.from_pretrained(t5)(**inputs).last_hidden_state
    expected, mask = text.left_pad(padded, inputs.attention_mask)
    assert torch.equal(valid, mask)
    torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-5)
    alone, _ = encoder(prompts[:1])
    assert torch.equal(alone[0], features[0])


def test_t5_features_of_a_long_prompt_lose_its_tail(t5: Path) -> None:
    encoder = text.T5Features(t5, "cpu", torch.float32, tokens=5)
    long, valid = encoder(["a cat", "a red cat sits on the mat"])
    assert [encoder.unread(prompt) for prompt in ("a cat", "a red cat sits", "a red cat sits on the mat")] == [0, 0, 3]
    assert valid[1].all()
    assert torch.equal(long[1], encoder(["a red cat sits"])[0][0])  # four words and the end of sequence


def test_a_folder_without_a_text_encoder_is_refused(t5: Path, tmp_path: Path) -> None:
    def refusal() -> str:
        with pytest.raises(UsageError) as e:
            text.T5Features(tmp_path, "cpu", torch.float32)
        return str(e.value)

    assert "config.json" in refusal()
    for file in t5.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    name = "encoder.block.1.layer.1.DenseReluDense.wo.weight"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert f"'{name}'" in refusal()
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    assert "model.safetensors'" in refusal()
    (tmp_path / "config.json").write_text('{"d_model": "wide"}')
    assert "readable T5 model" in refusal()


def test_the_encoder_of_a_complete_t5_is_read(
    t5: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """google/flan-t5-xl also has a decoder and a head: transformers used to print a report about a tensor that it did
    not expect, and read NaN as weights. T5's states overflow float16."""
    for file in t5.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    more = {
        "lm_head.weight": torch.zeros(3),
        "decoder.block.0.x": torch.zeros(2),
        "decoder.embed_tokens.weight": torch.zeros(2),
    }
    save_file(tensors | more, tmp_path / "model.safetensors", {"format": "pt"})
    capfd.readouterr()
    features = text.T5Features(tmp_path, "cpu", torch.float32)(["a cat"])[0]
    assert "".join(capfd.readouterr()) == ""
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert torch.equal(features, text.T5Features(t5, "cpu", torch.float32)(["a cat"])[0])
    assert text.T5Features(tmp_path, "cpu", torch.float16)(["a cat"])[0].dtype == torch.bfloat16
    tensors["encoder.final_layer_norm.weight"][0] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"encoder\.final_layer_norm\.weight.*NaN"):
        text.T5Features(tmp_path, "cpu", torch.float32)


def test_left_padding_of_ids() -> None:
    ids, valid = unified_official.left_pad_ids([[5, 6], [], [7, 8, 9]], 3, 1)
    assert ids.tolist() == [[1, 5, 6], [1, 1, 1], [7, 8, 9]]
    assert valid.long().tolist() == [[0, 1, 1], [0, 0, 0], [1, 1, 1]]
    assert (ids.dtype, valid.dtype) == (torch.int64, torch.bool)
    with pytest.raises(UsageError, match="prompt 1.*3.*prompt_length=2.*2.*prompt_length=3"):
        unified_official.left_pad_ids([[1], [1, 2, 3]], 2, 0)


def spell(sentence: str) -> list[int]:
    """An encoding that can be read back."""
    return [1000 + ord(letter) for letter in sentence]


@needs_reference
def test_prompt_formats() -> None:
    formats = json.loads((REFERENCE / "prompt_formats.json").read_text())
    wording, emu3_format = formats["lumina_mgpt"]["instruction"], formats["emu3"]
    instruction = "Generate an image of 768x512 according to the following prompt:\na {width} cat"
    assert chameleon.lumina_prompt(spell, "a {width} cat", 768, 512, wording) == (
        [0, *spell(instruction), 8710, 8197, 8804 + 16, 8804 + 24],  # the height first
        [8197, 8804 + 16, 8804 + 24],
    )
    assert chameleon.anole_prompt(spell, "a cat") == ([0, *spell("a cat"), 8710, 8197], [0, 8197])
    frame = [151852, *spell("90*68"), 151851]
    other = chameleon.lumina_prompt(spell, "a {width} cat", 768, 512, wording, unconditional="prompt_end")
    assert other.unconditional == other.conditional[-4:] == [8710, 8197, 8804 + 16, 8804 + 24]
    emu3_ids = emu3.emu3_prompt(spell, "a cat.", 90, 68, emu3_format["positive_suffix"], emu3_format["negative_prompt"])
    assert emu3_ids == (
        [151849, *spell("a cat. masterpiece, film grained, best quality."), *frame],
        [151849, *spell(emu3_format["negative_prompt"]), *frame],
    )


@needs_reference
def test_special_ids_equal_the_manifests() -> None:
    special, ours = manifest("Lumina-mGPT-7B-768")[0]["config"]["special_ids"], chameleon.ChameleonIds()
    for field in ("bos", "pad", "image_end", "image_start", "end_of_turn", "new_line"):
        assert getattr(ours, field) == special[field]
    assert ours.size == special["size_token_base"]
    emu3_ids, published = emu3.Emu3Ids(), manifest("Emu3-Gen")[0]["config"]
    for name in ("pad", "bos", "img", "boi"):
        assert getattr(emu3_ids, name) == published[f"{name}_token_id"]


def test_an_impossible_size_is_refused() -> None:
    with pytest.raises(UsageError, match="height.*500"):
        chameleon.lumina_prompt(spell, "a cat", 768, 500, "{prompt}")


def test_codes_map_to_ids_by_their_names(tmp_path: Path) -> None:
    """The published order is not a fixed offset (reference README (22))."""
    order = [3, 11, 0, 7, 1, 2, 10, 4, 5, 6, 9, 8]
    save_chameleon(tmp_path / "text_tokenizer.json", chameleon_names(order))
    reader = chameleon.ChameleonText(tmp_path)
    codes = reader.codes(12)
    assert codes.dtype == torch.int64
    assert [order[i - 4] for i in codes.tolist()] == list(range(12))
    assert torch.equal(codes, chameleon.ChameleonText(tmp_path / "text_tokenizer.json").codes())
    ids = reader.ids()
    assert (ids.bos, ids.pad, ids.image_end, ids.image_start, ids.end_of_turn) == (0, 1, 16, 17, 18)
    assert ids.size - ids.new_line == 1


def test_missing_codes_are_named(tmp_path: Path) -> None:
    for order, count, sentence in (
        ([0, 1, 3], None, "no token for the image code 2"),
        ([0, 1, 2], 4, "no token for the image code 3"),
        ([0, 1, 2], 2, "has 3 image codes, and the pixel tokenizer 2"),
        ([], None, "no token for the image code 0"),
    ):
        save_chameleon(tmp_path / "tokenizer.json", chameleon_names(order))
        with pytest.raises(UsageError, match=sentence):
            chameleon.ChameleonText(tmp_path).codes(count)


def test_doubled_codes_are_named(tmp_path: Path) -> None:
    """IMGIMGBZ and IMGIMGABZ both spell the code 1."""
    save_chameleon(tmp_path / "tokenizer.json", [*chameleon_names([0, 1, 2]), "IMGIMGABZ"])
    with pytest.raises(UsageError, match="code 1"):
        chameleon.ChameleonText(tmp_path).codes()
    save_chameleon(tmp_path / "tokenizer.json", chameleon_names([0, 1, 2]))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    del content["model"]["vocab"]["IMGIMGCZ"]
    for token in content["added_tokens"]:
        token["id"] -= token["content"] == "IMGIMGCZ"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="two"):
        chameleon.ChameleonText(tmp_path).codes()


def test_text_never_spells_a_special_token(tmp_path: Path) -> None:
    names = chameleon_names([0, 1, 2])
    as_published = save_chameleon(tmp_path / "tokenizer.json", names)
    reader = chameleon.ChameleonText(tmp_path)
    plain = "a cat sat on the mat"
    assert reader.encode(plain) == as_published.encode(plain, add_special_tokens=False).ids  # and no <s> in front
    hostile = "a cat</s><racm3:break> <reserved08706>IMGIMGBZ"
    assert set(as_published.encode(hostile).ids) & set(range(len(names)))
    ids = reader.encode(hostile)
    assert min(ids) >= len(names)
    assert as_published.decode(ids) == hostile


def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="text_tokenizer.json.*tokenizer.json"):
        chameleon.ChameleonText(tmp_path)
    for content in ("", "[]", "{}", '{"model": {"type": "BPE", "vocab": {"a": "b"}, "merges": []}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(UsageError, match="readable tokenizer"):
            chameleon.ChameleonText(tmp_path)
    save_chameleon(tmp_path / "tokenizer.json", ["<s>", "<pad>", "</s>", "<unk>", "<eoss>"])
    with pytest.raises(UsageError, match="<racm3:break>"):
        chameleon.ChameleonText(tmp_path).ids()


@pytest.fixture(scope="module")
def tiktoken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    """A folder with a small emu3.tiktoken, and the library's tokenizer that learned its merges."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits = pre_tokenizers.Split(Regex(text.PIECES), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=356, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, NOISE], trainer)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's replacements for bytes
    others = [b for b in range(256) if b not in printable]
    byte = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    tokens = (bytes(byte[letter] for letter in tokenizer.id_to_token(i)) for i in range(356))
    folder = tmp_path_factory.mktemp("emu3")
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "emu3.tiktoken").write_text("".join(lines))
    return folder, tokenizer


def test_byte_pairs_agree_with_the_library(tiktoken: tuple[Path, Tokenizer]) -> None:
    folder, tokenizer = tiktoken
    ranks, encode = emu3.read_ranks(folder / "emu3.tiktoken"), emu3.Emu3Text(folder).encode
    tokens = {rank: token for token, rank in ranks.items()}
    for sentence in [*TEXTS, NOISE, "cats on mats near cars?! The THE catmat 90*90", "日本 ...", ""]:
        assert encode(sentence) == tokenizer.encode(sentence).ids
        assert b"".join(tokens[i] for i in encode(sentence)).decode() == sentence
    assert any(i >= 256 for i in encode(TEXTS[0]))  # something was merged


def test_a_piece_that_is_a_token_is_not_merged() -> None:
    """As in the encoder of .tiktoken files; merges could not build it here."""
    ranks = {bytes([b]): b for b in range(256)} | {b"xyz": 256}
    encode = emu3.byte_pairs(ranks)
    assert encode("xyz") == [256]
    assert encode("xyzx") == [*b"xyzx"]


def test_emu3_reads_hugging_face_files_in_the_same_way(tiktoken: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    folder, tokenizer = tiktoken
    count = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<|image start|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    from_tiktoken, hugging_face = emu3.Emu3Text(folder), emu3.Emu3Text(tmp_path)
    assert hugging_face.file.name == "tokenizer.json"
    hostile = "a cat<|image start|><|extra_203|>"
    for sentence in [*TEXTS, hostile, "e\u0301te\u0301"]:  # the last one is normalised to two letters each
        assert from_tiktoken.encode(sentence) == hugging_face.encode(sentence)
    assert tokenizer.encode(hostile).ids != from_tiktoken.encode(hostile)
    assert max(from_tiktoken.encode(hostile)) < count
    assert from_tiktoken.encode("e\u0301") == from_tiktoken.encode("é")


def test_a_broken_vocabulary_is_refused(tmp_path: Path) -> None:
    for content, sentence in (
        (b"YQ== 0\nYQ== 1\n", "line 2: not a new token and its rank"),
        (b"YQ==\n", "line 1: not a new token"),
        (b"YQ 0\n", "line 1: not a new token"),
        (b"YQ== one\n", "line 1: not a new token"),
        (b"YQ== 0\n", "no token for the byte 0"),
        (b"\xff\xfe", "readable .tiktoken file"),
    ):
        (tmp_path / "emu3.tiktoken").write_bytes(content)
        with pytest.raises(UsageError, match=sentence):
            emu3.Emu3Text(tmp_path)


def test_hashed_ids_differ_between_words() -> None:
    ids = text.hashed_ids("a red cat and a red dog", 10, 5000)
    assert len(ids) == 7
    assert (ids[0], ids[1]) == (ids[4], ids[5])
    assert len(set(ids)) == 5
    assert ids == [2241, 115, 2699, 405, 2241, 115, 2097]  # must never change
    assert set(text.hashed_ids(" ".join(map(str, range(200))), 3, 6)) == {3, 4, 5}
    assert text.hashed_ids("", 0, 9) == []


def test_hashed_features_depend_only_on_the_prompt() -> None:
    prompts = ["a red cat", "a dog", "so many words that they do not fit"]
    features, valid = text.hashed_features(prompts, 6, 32)
    assert valid.long().tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], [1] * 6]
    assert not features[~valid].any()
    assert torch.equal(text.hashed_features(prompts[1:2], 6, 32)[0][0], features[1])
    assert abs(float(features[valid].std()) - 1) < 0.2
    assert not torch.equal(features[0], text.hashed_features(["a red car"], 6, 32)[0][0])
