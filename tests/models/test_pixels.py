"""Pixel decoders: official numbers, official files, and pictures that depend only on their own codes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference import manifest, needs_reference
from safetensors.torch import save_file

from specbench.errors import UsageError
from specbench.models import cosmos, emu3_vision, vq
from specbench.models.loading import checkpoints, image_tokenizers, official
from specbench.models.pixels import to_uint8, truncated
from specbench.models.vq import KLModel, VQConfig, VQModel

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = ROOT / "specbench" / "assets" / "scenes_tokenizer.safetensors"

#: `vq_ds8_c2i.pt` (its manifest), which no model of conf/ uses
LLAMAGEN_8 = VQConfig(ch_mult=(1, 2, 2, 4))
#: kind -> a small network of this kind
SMALL = {
    "llamagen": replace(LLAMAGEN_8.reduced(24), ch_mult=(1, 2, 2)),
    "chameleon": replace(vq.CHAMELEON.reduced(24), ch_mult=(1, 2)),
    "kl": replace(vq.KL16.reduced(0), ch_mult=(1, 2)),
}
EMU3 = emu3_vision.reduced(24) | {"ch_mult": [1, 1], "attn_resolutions": [1]}


def build_seeded(build):
    torch.manual_seed(0)
    return build().eval().requires_grad_(False)


def tokenizer(kind):
    return build_seeded(lambda: VQModel(SMALL[kind]))


def emu3():
    """A random network whose stored statistics differ from its initial ones."""
    model = build_seeded(lambda: emu3_vision.Emu3Vision(emu3_vision.configured(EMU3)))
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 1.5)
    return model


def some_codes(rows, count, size=24, seed=1):
    return torch.randint(0, size, (rows, count), generator=torch.Generator().manual_seed(seed))


def some_images(side=8, rows=2):
    return torch.rand(rows, 3, side, side, generator=torch.Generator().manual_seed(2)) * 2 - 1


LLAMAGEN = image_tokenizers.llamagen_table, image_tokenizers.LLAMAGEN_IGNORED
TAMING = image_tokenizers.taming_table, ()


@needs_reference
def test_every_official_tensor_has_one_position():
    for name, cfg, guess, table, ignored in (
        ("vq_ds16_c2i.pt", vq.LLAMAGEN_16, vq.LLAMAGEN_16, *LLAMAGEN),
        ("vq_ds16_t2i.pt", vq.LLAMAGEN_16, vq.LLAMAGEN_16, *LLAMAGEN),
        ("vq_ds8_c2i.pt", LLAMAGEN_8, vq.LLAMAGEN_16, *LLAMAGEN),
        ("chameleon_vqgan.ckpt", vq.CHAMELEON, vq.CHAMELEON, *TAMING),
        ("kl16.ckpt", vq.KL16, vq.KL16, *TAMING),
        ("movqgan_270M.ckpt", vq.MOVQGAN, vq.MOVQGAN, *TAMING),
    ):
        facts, source = manifest(name)
        with torch.device("meta"):
            official.check(KLModel(cfg) if cfg.double_z else VQModel(cfg), source, table(cfg), ignored)
        assert set(source.tensors) - set(table(cfg)) <= {"quantize.codebook_used"}, name
        assert cfg.downsample == facts["config"]["downsample"]
        assert cfg.codebook_l2_norm == facts["config"].get("codebook_l2_norm", True)
        assert image_tokenizers.sized(guess, {tensor: info.shape for tensor, info in source.tensors.items()}) == cfg


@needs_reference
def test_every_official_tensor_of_cosmos_has_one_position():
    cfg = cosmos.COSMOS
    for half, build in (("encoder", cosmos.EncoderHalf), ("decoder", cosmos.DecoderHalf)):
        facts, source = manifest(f"Cosmos-1.0-Tokenizer-DV8x16x16_{half}.jit")
        values = facts["config"]
        assert (cfg.levels, cfg.codebook_size) == (tuple(values["levels"]), values["codebook_size"])
        assert cfg.downsample == values["spatial_compression"]
        with torch.device("meta"):
            module = build(cfg)
        table = image_tokenizers.cosmos_table(module.state_dict())
        official.check(module, source, table, image_tokenizers.COSMOS_IGNORED)
        if half == "encoder":
            shapes = {name: info.shape for name, info in source.tensors.items()}
            other = replace(cfg, ch=1, ch_mult=(), num_res_blocks=1, z_channels=1)
            assert image_tokenizers.cosmos_sized(other, shapes) == cfg


@needs_reference
def test_every_official_tensor_of_emu3s_tokenizer_has_one_position():
    facts, source = manifest("Emu3-VisionTokenizer")
    config = facts["config"]
    assert {name: config[name] for name in emu3_vision.OFFICIAL} == emu3_vision.OFFICIAL
    cfg = emu3_vision.configured(config)
    with torch.device("meta"):
        model = image_tokenizers.emu3_vision(cfg, source.tensors)
    table, ignored = image_tokenizers.emu3_layout(cfg, source.tensors)
    assert not ignored
    official.check(model, source, table)
    assert emu3_vision.downsample(cfg) == config["downsample"]


@pytest.mark.parametrize(
    ("kind", "full", "wrapper", "unused"),
    [
        ("llamagen", vq.LLAMAGEN_16, "model", "quantize.codebook_used"),
        ("chameleon", vq.CHAMELEON, "state_dict", "loss.logvar"),
    ],
)
def test_a_tokenizer_survives_its_official_file(tmp_path, kind, full, wrapper, unused):
    ours, cfg, llamagen = tokenizer(kind), SMALL[kind], kind == "llamagen"
    named = official.exported(ours, (LLAMAGEN if llamagen else TAMING)[0](cfg))
    tensors = named | {unused: torch.zeros(6)}
    torch.save({wrapper: tensors, "steps": 7}, tmp_path / "vq.pt")
    args = VQModel, full, tmp_path / "vq.pt", torch.device("cpu"), llamagen
    checkpoints.save(ours, tmp_path / "vq.safetensors", "tokenizer", torch.float32)
    converted = checkpoints.load(tmp_path / "vq.safetensors", "tokenizer", VQModel, VQConfig)
    codes = some_codes(2, 6)
    for read in (image_tokenizers.load_autoencoder(*args), converted):
        assert read.cfg == cfg
        assert torch.equal(read.decode(codes, (2, 3)), ours.decode(codes, (2, 3)))
        assert torch.equal(read.encode(some_images()), ours.encode(some_images()))
    torch.save({wrapper: tensors | {"other": torch.zeros(1)}}, tmp_path / "vq.pt")
    with pytest.raises(UsageError, match="'other'"):
        image_tokenizers.load_autoencoder(*args)
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    for name, shape in [("encoder.conv_in", (33, 3, 3, 3)), ("post_quant_conv", (32,)), ("quantize.embedding", ())]:
        with pytest.raises(UsageError, match="vq.pt"):
            image_tokenizers.sized(full, shapes | {f"{name}.weight": shape}, "vq.pt")
    with pytest.raises(UsageError):
        image_tokenizers.sized(full, {name: shape for name, shape in shapes.items() if "encoder" not in name})


def test_decoder_levels_of_a_taming_file_are_numbered_from_the_highest_resolution():
    table = image_tokenizers.taming_table(vq.CHAMELEON)
    assert table["decoder.up.4.block.0.conv1.weight"].name == "decoder.conv_blocks.0.res.0.conv1.weight"
    assert table["decoder.up.0.block.2.norm2.bias"].name == "decoder.conv_blocks.4.res.2.norm2.bias"
    assert table["encoder.down.4.block.1.conv1.weight"].name == "encoder.conv_blocks.4.res.1.conv1.weight"
    assert table["decoder.mid.attn_1.q.weight"].name == "decoder.mid.1.q.weight"


def official_file(model, path, config=EMU3):
    """The tensors of `model` under the official names, with 1x1 convolutions where transformers has linear layers."""
    tensors = official.exported(model, image_tokenizers.emu3_layout(model.cfg, ())[0])
    pointwise = tuple(f".{part}.weight" for part in ("q", "k", "v", "proj_out"))
    tensors |= {name: t[..., None, None] for name, t in tensors.items() if name.endswith(pointwise)}
    path.mkdir(exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config | {"model_type": "Emu3VisionVQ", "dropout": 0.0}))


def transformers_file(model, path):
    model.vq.save_pretrained(path)


def transformers_full_file(model, path, by_hand=False):
    from transformers import Emu3Config, Emu3ForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 40, "num_hidden_layers": 1}
    full = Emu3ForConditionalGeneration(
        Emu3Config(vq_config=model.cfg.to_dict(), text_config=sizes | ids, vocabulary_map={"<image>": 3})
    )
    full.model.vqmodel.load_state_dict(model.vq.state_dict())
    if not by_hand:
        return full.save_pretrained(path)
    full.config.save_pretrained(path)
    return torch.save(full.state_dict(), path / "pytorch_model.bin")


def state_dict_file(model, path):
    """The modules' own names for their tensors, which differ from what save_pretrained writes."""
    transformers_full_file(model, path, by_hand=True)


def test_emu3s_tokenizer_is_read_from_every_layout(tmp_path):
    ours, codes = emu3(), some_codes(1, 6)
    for write in (official_file, transformers_file, transformers_full_file, state_dict_file):
        folder = tmp_path / write.__name__
        folder.mkdir()
        write(ours, folder)
        cfg = emu3_vision.configured(official.config(folder))
        read = image_tokenizers.load_emu3_vision(cfg, official.open_source(folder), "cpu", torch.float32)
        torch.testing.assert_close(dict(read.state_dict()), dict(ours.state_dict()), rtol=0, atol=0)
        assert not any(p.requires_grad for p in read.parameters())
        assert torch.equal(read.decode(codes, (2, 3)), ours.decode(codes, (2, 3)))


def test_sizes_that_make_no_tokenizer_are_refused():
    for wrong in (
        {"ch": 33},
        {"ch": "wide"},
        {"ch_mult": 4},
        {"ch_mult": [1, 2], "attn_resolutions": [0]},
        {"z_channels": -4},
    ):
        with pytest.raises(UsageError, match=r"config\.json"):
            emu3_vision.configured(EMU3 | wrong)


BUILDERS = {"llamagen": partial(tokenizer, "llamagen"), "chameleon": partial(tokenizer, "chameleon"), "emu3": emu3}


@pytest.mark.parametrize(
    ("kind", "side", "close", "apart"),
    [("llamagen", 4, 1e-5, 1e-2), ("chameleon", 2, 1e-5, 1e-2), ("emu3", 2, 0, 1e-3)],
)
def test_an_image_depends_only_on_its_own_codes(kind, side, close, apart):
    model, codes = BUILDERS[kind](), some_codes(3, 6)
    together = model.decode(codes, (2, 3))
    assert together.shape == (3, 3, 2 * side, 3 * side)
    torch.testing.assert_close(together[1:2], model.decode(codes[1:2], (2, 3)), atol=close, rtol=close)
    assert not torch.allclose(together[1], together[2], atol=apart)


def test_the_first_frame_of_emu3_is_the_image():
    model, codes = emu3(), some_codes(3, 6)
    together, frames = model.decode(codes, (2, 3)), model.frames(codes, (2, 3))
    assert frames.shape == (3, 4, 3, 4, 6)
    torch.testing.assert_close(frames[:, 0], together, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(frames[:, 1], together, atol=1e-4)
    assert model.codebook().shape == (24, 4)
    assert model.encode(some_images()).shape == (2, 16)


def test_codes_that_do_not_fill_the_grid_are_refused():
    for kind in ("llamagen", "emu3"):
        model = BUILDERS[kind]()
        for count, grid in ((6, (2, 2)), (6, None), (6, (-2, -3)), (0, None)):
            with pytest.raises(ValueError, match=f"{count} codes do not fill"):
                model.decode(some_codes(1, count), grid)
        assert torch.equal(model.decode(some_codes(1, 4)), model.decode(some_codes(1, 4), (2, 2)))


@pytest.mark.parametrize("kind", ["llamagen", "chameleon"])
def test_an_image_is_coded_by_the_nearest_vectors(kind):
    """By brute force: LlamaGen compares directions, Chameleon compares distances to the table as stored."""
    model, images = tokenizer(kind), some_images()
    model.quantize.embedding.weight.uniform_(-2, 2)
    z, table = model.pre_quant(images).permute(0, 2, 3, 1).flatten(1, 2), model.quantize.embedding.weight
    if kind == "llamagen":
        z, table = F.normalize(z, dim=-1), F.normalize(table, dim=-1)
    distances = (z.unsqueeze(2) - table).square().sum(-1)
    codes = model.encode(images)
    assert torch.equal(codes, distances.argmin(-1))
    assert len(codes.unique()) > 1
    latents = model.look_up(codes).flatten(2).transpose(1, 2)
    torch.testing.assert_close(latents, table[codes])


def test_a_kl_autoencoder_gives_a_distribution_and_takes_its_mean():
    model = build_seeded(lambda: KLModel(SMALL["kl"]))
    images = some_images()
    mean, log_variance = model.encode(images)
    assert mean.shape == log_variance.shape == (2, 16, 4, 4)
    assert torch.equal(torch.cat([mean, log_variance], 1), model.pre_quant(images))
    assert model.decode_latent(mean).shape == images.shape
    model.quant_conv.bias.fill_(100)
    assert model.encode(images)[1].eq(20).all()


def test_attention_layers_follow_the_configuration():
    def attention_layers(cfg):
        with torch.device("meta"):
            names = vq.Autoencoder(cfg).state_dict()
        return {name.split(".attn.")[0] for name in names if ".attn." in name}

    lowest = {"encoder.conv_blocks.4", "decoder.conv_blocks.0"}
    assert attention_layers(vq.LLAMAGEN_16) == lowest
    assert attention_layers(vq.CHAMELEON) == set()
    assert attention_layers(vq.KL16) == {"encoder.conv_blocks.4"}
    assert attention_layers(replace(vq.LLAMAGEN_16, attention=False)) == set()
    cfg_of_both = replace(vq.CHAMELEON, encoder_attention=(3, 4), decoder_attention=(3, 4))
    assert attention_layers(cfg_of_both) == lowest | {"encoder.conv_blocks.3", "decoder.conv_blocks.1"}


def by_hand(state, cfg, codes, side):
    """Decodes with plain functions and the tensors by name."""

    def conv(name, x):
        weight = state[f"{name}.weight"]
        return F.conv2d(x, weight, state[f"{name}.bias"], padding=weight.shape[-1] // 2)

    def norm(name, x):
        return F.group_norm(x, cfg.norm_groups, state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    def residual(name, x):
        h = conv(f"{name}.conv1", F.silu(norm(f"{name}.norm1", x)))
        h = conv(f"{name}.conv2", F.silu(norm(f"{name}.norm2", h)))
        return h + (conv(f"{name}.nin_shortcut", x) if f"{name}.nin_shortcut.weight" in state else x)

    def attention(name, x):
        if f"{name}.q.weight" not in state:
            return x
        y = norm(f"{name}.norm", x)
        q, k, v = (conv(f"{name}.{part}", y).flatten(2) for part in "qkv")
        probs = (q.transpose(1, 2) @ k * x.shape[1] ** -0.5).softmax(-1)
        return x + conv(f"{name}.proj_out", (v @ probs.transpose(1, 2)).view_as(x))

    table = F.normalize(state["quantize.embedding.weight"], dim=-1)
    x = conv("post_quant_conv", table[codes].view(len(codes), side, side, -1).permute(0, 3, 1, 2))
    x = residual("decoder.mid.0", conv("decoder.conv_in", x))
    x = residual("decoder.mid.2", attention("decoder.mid.1", x))
    for level in range(len(cfg.ch_mult)):
        name = f"decoder.conv_blocks.{level}"
        for block in range(cfg.num_res_blocks + 1):
            x = attention(f"{name}.attn.{block}", residual(f"{name}.res.{block}", x))
        if level < len(cfg.ch_mult) - 1:
            x = conv(f"{name}.upsample.conv", x.repeat_interleave(2, 2).repeat_interleave(2, 3))
    return conv("decoder.conv_out", F.silu(norm("decoder.norm_out", x)))


def test_decoding_equals_plain_functions():
    model, codes = tokenizer("llamagen"), some_codes(2, 9)
    model.quantize.embedding.weight.mul_(3)  # lengths do not matter
    expected = by_hand(model.state_dict(), model.cfg, codes, 3)
    torch.testing.assert_close(model.decode(codes), expected, atol=1e-5, rtol=1e-5)


def test_the_embedded_tokenizer_does_not_change(tmp_path):
    """Saving it again does not change the bytes, by which rows name it. Its tensors give the same pictures."""
    model = checkpoints.load(EMBEDDED, "scenes-tokenizer", VQModel, VQConfig).float().eval().requires_grad_(False)
    config, tensors = checkpoints.read(EMBEDDED, "scenes-tokenizer")
    assert model.state_dict().keys() == tensors.keys()
    assert config == json.loads(json.dumps(model.cfg.to_dict()))
    copy = Path(shutil.copy(EMBEDDED, tmp_path))
    checkpoints.save(model, copy, "scenes-tokenizer")
    assert copy.read_bytes() == EMBEDDED.read_bytes()
    codes = some_codes(2, 256, model.cfg.codebook_size)
    expected = by_hand({k: v.float() for k, v in tensors.items()}, model.cfg, codes, 16)
    torch.testing.assert_close(model.decode(codes), expected, atol=1e-4, rtol=1e-4)


def test_pixels_become_bytes_as_in_each_pipeline():
    """Chameleon and Emu3 truncate, LlamaGen rounds: grey gives different bytes."""
    values = torch.tensor([-3.0, -1.0, 0.0, 0.999, 1.0, 7.0])
    images = values.view(1, 1, 1, -1).expand(2, 3, 1, -1)
    assert truncated(images).shape == (2, 1, 6, 3)
    assert truncated(images)[1, 0, :, 2].tolist() == [0, 0, 127, 254, 255, 255]
    assert to_uint8(images)[1, 0, :, 2].tolist() == [0, 0, 128, 255, 255, 255]


def test_a_reduced_tokenizer_is_small_and_makes_images_of_the_same_size():
    for cfg in (vq.LLAMAGEN_16, LLAMAGEN_8, vq.CHAMELEON, vq.KL16):
        small = cfg.reduced(0 if cfg.double_z else 40)
        assert (small.downsample, small.double_z) == (cfg.downsample, cfg.double_z)
        assert (small.codebook_l2_norm, small.decoder_attention) == (cfg.codebook_l2_norm, cfg.decoder_attention)
        with torch.device("meta"):
            full, less = (sum(p.numel() for p in vq.Autoencoder(c).parameters()) for c in (cfg, small))
        assert less < full / 20
