"""GLM-Image's autoregressive stage and Emu3.5-Image: networks, files, prompts and grammars. Neither has golden files.
The networks are compared with transformers: with its GLM-Image and, for Emu3.5, with its Qwen3, which has the same
layers."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_real import TINY, loaded
from torch.testing import assert_close

from specbench.bench.plan import plan
from specbench.config import configuration, parameters
from specbench.decoding.sampling import Sampling
from specbench.errors import UsageError
from specbench.harness import method
from specbench.models.loading import emu35, glm_image, unified_official
from specbench.models.loading.text_official import hashed_ids
from specbench.models.unified import Prompts, Unified, places

CPU = torch.device("cpu")
PREVIEW, WHOLE = (1, 2), (3, 4)
TEXTS = ([16520, 16530, 16540, 16550, 16384], [16521, 16522, 16384])


def padded(texts, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    return unified_official.left_pad_ids(texts, max(map(len, texts)), pad)


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    """A tiny GLM-Image of transformers, saved in its own file format."""
    from transformers.models.glm_image import GlmImageConfig, GlmImageForConditionalGeneration

    rotary = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
    text = {"vocab_size": 16600, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rotary, "pad_token_id": 16599}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "image_size": 64, "intermediate_size": 16}
    codes = {"embed_dim": 8, "latent_channels": 16}
    torch.manual_seed(0)
    parts = {"text_config": text, "vision_config": vision, "vq_config": codes}
    model = GlmImageForConditionalGeneration(GlmImageConfig(**parts, image_token_id=16598)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():  # biases and norms that affect the output, and unequal logits
            p.add_(0.3 * torch.randn_like(p)) if p.dim() == 1 else p.mul_(1 if "embed_tokens" in name else 6)
    folder = tmp_path_factory.mktemp("glm")
    model.save_pretrained(folder / "target")
    return model, folder


@torch.inference_mode()
def test_glm_image_equals_transformers(official):
    """Compared with cached generation, for prompts of two lengths, both grids and the token after them. This covers the
    four norms, the biases, the rotary embedding (half of each head, by time, row and column), and the positions of a
    grid that follows another."""
    reference, folder = official
    ids, valid = padded(TEXTS, 16599)
    grids = torch.tensor([[1, *WHOLE], [1, *PREVIEW]] * 2)
    count = 2 + 12 + 1
    generated = reference.generate(
        input_ids=ids, attention_mask=valid.long(), image_grid_thw=grids, images_per_sample=torch.tensor([2, 2]),
        do_sample=False, max_new_tokens=count, output_logits=True, return_dict_in_generate=True, eos_token_id=None,
    )  # fmt: skip
    ours = unified_official.read(folder / "target", glm_image.image(PREVIEW, WHOLE), CPU, torch.float32)
    assert ours.cfg.sections == (1, 1, 2)
    assert (ours.cfg.norms, ours.cfg.qkv_bias, ours.cfg.rope_base) == ("both", True, 300.0)
    tokens = generated.sequences[:, ids.shape[1] :]
    prefix = ours.condition(Prompts(ids, valid, ids, valid), False)
    logits = ours.head(ours.uncached(prefix, tokens[:, :-1]))[:, len(prefix) - 1 :]
    # float32 sums of 64 numbers in another order, two layers
    assert_close(logits, torch.stack(generated.logits, 1), atol=2e-4, rtol=1e-4)
    assert tokens.unique().numel() > 5  # not the same token everywhere, which positions would not change


@pytest.mark.parametrize("wrong", [{"partial_rotary_factor": 1.0}, {"mrope_section": [2, 2, 2]}])
def test_a_config_whose_rotary_numbers_disagree_is_refused(official, tmp_path, wrong):
    """A loader that trusts one of the two numbers would load weights that rotate differently."""
    _, folder = official
    for file in (folder / "target").iterdir():
        (tmp_path / file.name).symlink_to(file)
    content = json.loads((tmp_path / "config.json").read_text())
    content["text_config"]["rope_parameters"] |= wrong
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=re.escape("does not describe a language model (mrope_section rotates")):
        unified_official.read(tmp_path, glm_image.image(PREVIEW, WHOLE), CPU, torch.float32)


def test_glm_image_from_its_folders(official):
    """The codebook is inside the target's file, and the special ids have names."""
    _, folder = official
    words = ["<unk>", "<|dit_token_16384|>", "<sop>", "<eop>", *"a red cat 4 3 1 2 32 16".split()]
    (folder / "processor").mkdir(exist_ok=True)
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "processor" / "tokenizer.json"))
    _, bundle = loaded("glm_image", f"weights={folder}", "dtype=float32")
    frame = [2, words.index("32"), words.index("32"), 3, 2, words.index("16"), words.index("16"), 3, 1]
    assert bundle.prompt("a red cat").conditional == [4, 5, 6, *frame]  # the full grid comes first
    assert bundle.prompt("<sop> cat").conditional[:2] == [2, 6]  # this tokenizer splits only at spaces
    assert bundle.codebook().shape == (16512, 8)
    assert bundle.codebook()[:16384].isfinite().all()
    assert bundle.codebook()[16384:].isnan().all()
    assert bundle.target.length == 256 + 1024 + 1 == glm_image.tokens_of_image({})


def test_positions_of_grids():
    """Text positions count up. A grid begins where the text ends; the next text begins after the grid's longer side."""
    positions = places(2, (PREVIEW, WHOLE), 2 + 2 + 12 + 2).tolist()
    assert positions[:4] == [[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 2, 3]]
    assert positions[4:16] == [[4, 4 + row, 4 + column] for row in range(3) for column in range(4)]
    assert positions[16:] == [[8, 8, 8], [9, 9, 9]]
    assert places(3, (), 2).tolist() == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("size", "preview", "whole"), [((1024, 1024), (16, 16), (32, 32)), ((1152, 768), (19, 13), (36, 24))]
)
def test_grids_of_a_size(size, preview, whole):
    assert glm_image.grids(*size) == (preview, whole)


def test_glm_image_files_hold_tokens():
    """Every token of the full grid can be read back from a pixel; the preview and the end are not drawn."""
    _, bundle = loaded("glm_image", *TINY)
    tokens = torch.randint(0, bundle.ids.outputs, (2, 2 * 2 + 4 * 4 + 1), generator=torch.Generator().manual_seed(0))
    pixels = bundle.pixels(tokens).astype(np.int64)
    assert pixels.shape == (2, 4, 4, 3)
    assert (pixels[..., 0] * 256 + pixels[..., 1]).reshape(2, -1).tolist() == tokens[:, 4:-1].tolist()


def test_images_are_no_examples_of_a_model_without_an_encoder():
    _, bundle = loaded("glm_image", *TINY)
    with pytest.raises(UsageError, match=r"glm_image's image encoder .* \(source=self\)"):
        bundle.codes(torch.zeros(1, 3, 64, 64))


def test_no_metric_of_images_without_images():
    """The error comes before anything is loaded. The default has no metrics."""
    message = r"glm_image produces tokens, .*engine=http\) or stored images .*: use metrics=none"
    with pytest.raises(UsageError, match=message):
        configuration.compose(["model=glm_image", "metrics=clip_b32"])
    assert not configuration.compose(["model=glm_image"])["metrics"]
    assert parameters.no_pixels(configuration.compose(["model=emu35_image"])) == ""


def test_both_are_planned_on_shapes_alone():
    """GLM-Image decodes no pixels. It has no guidance, so one of its tokens costs one pass of one row."""
    words = ("weights=random", "reduced=true", "method=sjd", "window=3")
    glm, emu = (plan(configuration.compose([f"model={name}", *words])) for name in ("glm_image", "emu35_image"))
    assert (glm["tokens"], glm["rows"], glm["pixels_estimate_gb"]) == (21, 1, 0)
    assert (emu["tokens"], emu["rows"]) == (20, 2)
    assert emu["pixels_estimate_gb"] > 0


def test_parallel_rows_of_two_grids_are_refused():
    cfg = configuration.compose(["model=glm_image", "method=zipar", "weights=random"])
    with pytest.raises(UsageError, match="is two grids in sequence: use a drafter in raster order"):
        method.check(cfg)
    method.check(configuration.compose(["model=emu35_image", "method=zipar", "weights=random"]))


@torch.inference_mode()
def test_emu35_is_qwen3_with_another_vocabulary(tmp_path):
    """Each head is normalised before the rotary embedding, and heads are wider than the model's width divided by their
    number. The output head has only the rows of image tokens. transformers has no Emu3.5."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": emu35.FIRST_CODE + 8}
    torch.manual_seed(0)
    reference = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, rope_theta=500.0, tie_word_embeddings=False)).eval()
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.3 * torch.randn_like(p)) if p.dim() == 1 else p.mul_(6)
    reference.save_pretrained(tmp_path)
    image = emu35.image(torch.arange(emu35.FIRST_CODE, emu35.FIRST_CODE + 8), 2, 3)
    ours = unified_official.read(tmp_path, image, CPU, torch.float32)
    assert (ours.cfg.qk_norm, ours.cfg.head_size, ours.cfg.rope_base) == ("rms", 24, 500.0)
    ids, valid = padded(([5, 6, 7, 8], [9, 10]), emu35.Emu35.pad)
    tokens = torch.tensor([[0, 1, 2, 8, 3, 4, 5, 9], [7, 6, 5, 8, 4, 3, 2, 9]])
    prefix = ours.condition(Prompts(ids, valid, ids, valid), False)
    logits = ours.head(ours.uncached(prefix, tokens))[:, len(prefix) - 1 :]
    for row, text in enumerate(([5, 6, 7, 8], [9, 10])):
        whole = reference(torch.tensor([[*text, *ours.ids(tokens)[row].tolist()]])).logits[0, len(text) - 1 :]
        assert_close(logits[row], whole[:, image.ids], atol=2e-4, rtol=1e-4)


def test_emu35_s_grammar():
    """The rule of the official constraint, position by position (counted from 1 after the token before the codes): the
    end of the image at H (W + 1), otherwise a new line after every W codes, otherwise a code."""
    rows, columns = 3, 4
    made = emu35.image(torch.arange(100, 110), rows, columns)
    assert len(made.grammar) == rows * (columns + 1)
    for n, token in enumerate(made.grammar.forced.tolist(), 1):
        if n == rows * (columns + 1):
            assert made.ids[token] == 151853
        elif n % (columns + 1) == 0:
            assert made.ids[token] == 151846
        else:
            assert token == -1
    assert emu35.tokens_of_image({}) == 4160


def test_emu35_s_prompts():
    """As in the official text-to-image configuration: the unconditional prompt keeps both spaces."""
    cfg = configuration.compose(["model=emu35_image"])
    heard = []

    def encode(text: str) -> list[int]:
        heard.append(text)
        return [len(heard)]

    made = emu35.emu35_prompt(encode, "a {cat}", 55, 73, cfg["instruction"], cfg["negative"])
    assert heard == [
        "55*73",
        "You are a helpful assistant for t2i task. USER: a {cat} ASSISTANT: ",
        "You are a helpful assistant. USER:  ASSISTANT: ",
    ]
    assert made.conditional == [151849, 2, 151746, 151852, 1, 151851]
    assert made.unconditional == [151849, 3, 151746, 151852, 1, 151851]


def test_emu35_s_guidance_mixes_log_probabilities():
    """The official code mixes log-probabilities before it masks and keeps 5,120 of them. Here logits are mixed; the
    distribution is the same."""
    rng = torch.Generator().manual_seed(0)
    cond, uncond = 3 * torch.randn(2, 4, 50, generator=rng)
    allowed = torch.arange(50) >= 10
    mixed = (u := uncond.log_softmax(-1)) + 5.0 * (cond.log_softmax(-1) - u)
    mixed = mixed.where(allowed, -torch.inf)
    best = mixed.topk(7, -1).values[..., -1:]
    expected = mixed.where(mixed >= best, -torch.inf).softmax(-1)
    sampling = Sampling(top_k=7, cfg_scale=5.0)
    actual = sampling.probs(sampling.apply_guidance(torch.cat([cond, uncond])).where(allowed, -torch.inf))
    assert_close(actual, expected)


def test_sizes_are_the_published_ones():
    """The blocks have 31.2 billion parameters and both tables 2.9 billion (arXiv 2510.26583), the image tokenizer has
    455 million; GLM-Image's stage is a 9B model. Nothing is allocated."""
    from specbench.models.vq import VQModel

    codes = torch.arange(emu35.FIRST_CODE, emu35.FIRST_CODE + emu35.IBQ.codebook_size)
    image, grids = emu35.image(codes, 2, 2), glm_image.image(PREVIEW, WHOLE)
    with torch.device("meta"):
        emu, glm = Unified(emu35.full("emu35_image"), image), Unified(glm_image.full("glm_image"), grids)
        tokenizer = VQModel(emu35.IBQ)

    def millions(module) -> float:
        return sum(p.numel() for p in module.parameters()) / 1e6

    assert round(millions(emu.layers) / 1e3, 1) == 31.2
    assert round(2 * millions(emu.tok_embeddings) / 1e3, 1) == 2.9
    assert round(millions(tokenizer)) == 455
    assert round(millions(glm) / 1e3) == 9


def test_emu35_from_its_files(tmp_path):
    """Files with official names give the same images as the networks that were saved."""
    from specbench.models.loading import image_tokenizers, naming
    from specbench.models.loading import official as checkpoints

    _, bundle = loaded("emu35_image", *TINY)
    target, cfg = bundle.target, bundle.target.cfg
    whole = Unified(cfg, replace(bundle.image, ids=torch.arange(cfg.vocab_size)))  # a head of all ids
    for name, p in whole.named_parameters():
        p.data = target.get_parameter(name).data if name != "output.weight" else torch.zeros_like(p)
    whole.output.weight.data[bundle.image.ids] = target.output.weight.data
    table = naming.hugging_face(cfg.n_layer, cfg.block)
    (tmp_path / "target").mkdir()
    (tmp_path / "tokenizer").mkdir()
    torch.save(checkpoints.exported(whole, table), tmp_path / "target" / "pytorch_model.bin")
    sizes = {"hidden_size": cfg.dim, "num_hidden_layers": cfg.n_layer, "num_attention_heads": cfg.n_head}
    sizes |= {"num_key_value_heads": cfg.n_kv_head, "intermediate_size": cfg.ffn_hidden, "vocab_size": cfg.vocab_size}
    sizes |= {"rope_theta": cfg.rope_base, "rms_norm_eps": cfg.norm_eps}
    (tmp_path / "target" / "config.json").write_text(json.dumps(sizes))
    (tmp_path / "target" / "emu3.tiktoken").write_text(ranks())
    names = image_tokenizers.taming_table(bundle.tokenizer.cfg)
    torch.save({"state_dict": checkpoints.exported(bundle.tokenizer, names)}, tmp_path / "tokenizer" / "model.ckpt")
    _, again = loaded("emu35_image", f"weights={tmp_path}", "reduced=true", "dtype=float32")
    assert again.target.cfg == cfg
    for name, p in target.named_parameters():
        assert torch.equal(p, again.target.get_parameter(name)), name
    codes = torch.randint(0, 64, (1, 16), generator=torch.Generator().manual_seed(0))
    assert (bundle.decode_image(codes) == again.decode_image(codes)).all()
    assert again.prompt("a").conditional[0] == 151849
    assert hashed_ids("a", 0, 9) != again.text("a") == [97]


def ranks() -> str:
    import base64

    return "".join(f"{base64.b64encode(bytes([b])).decode()} {b}\n" for b in range(256))
