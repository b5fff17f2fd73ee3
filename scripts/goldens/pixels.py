"""Pixel decoders: LlamaGen's and Chameleon's tokenizers, MAR's KL autoencoder, Emu3's vision tokenizer, Cosmos."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from goldens.common import Compared, Config, Pair, Tensors, fixed, load, weights
from specbench.models import cosmos, emu3_vision
from specbench.models.loading import image_tokenizers, official
from specbench.models.pixels import to_uint8
from specbench.models.vq import KLModel, VQConfig, VQModel


def sizes(c: Config) -> dict[str, Any]:
    fixed(c, groupnorm_eps=1e-6)
    names = ("ch", "num_res_blocks", "z_channels")
    return {n: c[n] for n in names} | {"ch_mult": tuple(c["ch_mult"]), "norm_groups": c["groupnorm_groups"]}


def tokenizer(model: VQModel, t: Tensors, c: Config) -> Compared:
    """The outputs that both kinds of tokenizer have."""
    grid = (c["grid"],) * 2 if isinstance(c["grid"], int) else tuple(c["grid"])
    yield "decoded", model.decode(t["in/codes"], grid)
    yield "pre_quant", model.pre_quant(t["in/image"])
    codes, seen = model.encode(t["in/image"]), tuple(t["out/pre_quant"].shape[-2:])
    yield "encoder_indices", codes.flatten()
    yield "roundtrip", model.decode(codes, seen)
    if "out/nearest_margin" in t:
        vectors = t["out/pre_quant"].movedim(1, -1).flatten(0, -2)
        if model.cfg.codebook_l2_norm:
            vectors = F.normalize(vectors, dim=-1)
        yield "nearest_margin", margin(vectors, model.quantize.codebook)


def margin(vectors: Tensor, codebook: Tensor) -> Tensor:
    """The squared distance of the second nearest code minus the squared distance of the nearest one (n,), for vectors
    (n, D)."""
    nearest = (vectors[:, None] - codebook).square().sum(-1).topk(2, largest=False).values
    return nearest[:, 1] - nearest[:, 0]


def llamagen_vq(t: Tensors, c: Config, part: str = "") -> Compared:
    """part: the name of the tokenizer's part of a larger checkpoint, or ""."""
    cfg = VQConfig(
        codebook_size=c["codebook_size"],
        codebook_embed_dim=c["codebook_embed_dim"],
        codebook_l2_norm=c["l2_norm"],
        **sizes(c),
    )
    model = load(lambda: VQModel(cfg), weights(t, part), image_tokenizers.llamagen_table(cfg))
    yield from tokenizer(model, t, c)
    yield "codebook_rows", model.quantize.codebook[t["in/codes"].flatten()]
    h, w = t["out/quant"].shape[-2:]
    yield "quant", model.look_up(t["out/encoder_indices"].view(-1, h * w), (h, w))


def chameleon_vqgan(t: Tensors, c: Config) -> Compared:
    model = yield from taming(t, c, False)
    h, w = t["out/quant_from_codes"].shape[-2:]
    yield "quant_from_codes", model.look_up(t["in/codes"], (h, w))


def lumina2_movqgan(t: Tensors, c: Config) -> Compared:
    model = yield from taming(t, c, True)
    h, w = t["out/quant"].shape[-2:]
    yield "quant", model.look_up(t["out/encoder_indices"].view(-1, h * w), (h, w))
    yield "to_uint8", torch.from_numpy(to_uint8(t["out/decoded"])).movedim(-1, 1)


def taming(t: Tensors, c: Config, spatial: bool) -> Generator[Pair, None, VQModel]:
    """Checks and returns a tokenizer in taming-transformers' layout, with attention at the nominal resolutions;
    spatial: with the norms of MoVQGAN in the decoder."""
    attending = tuple(i for i in range(len(c["ch_mult"])) if c["resolution"] / 2**i in c["attn_resolutions"])
    cfg = VQConfig(
        codebook_size=c["n_embed"],
        codebook_embed_dim=c["embed_dim"],
        codebook_l2_norm=False,
        spatial_norm=spatial,
        encoder_attention=attending,
        decoder_attention=attending,
        **sizes(c),
    )
    model = load(lambda: VQModel(cfg), weights(t), image_tokenizers.taming_table(cfg))
    yield from tokenizer(model, t, c)
    return model


def mar_kl16(t: Tensors, c: Config) -> Compared:
    def attending(levels: str) -> tuple[int, ...]:
        """The levels with attention, by the names of the tensors."""
        matches = (re.match(rf"param/{levels}\.(\d+)\.attn\.", name) for name in t)
        return tuple(sorted({int(m[1]) for m in matches if m}))

    cfg = VQConfig(
        codebook_size=0,
        codebook_embed_dim=c["embed_dim"],
        encoder_attention=attending("encoder.down"),
        decoder_attention=attending("decoder.up"),
        **sizes(c),
    )
    model = load(lambda: KLModel(cfg), weights(t), image_tokenizers.taming_table(cfg))
    yield "decoded", model.decode_latent(t["in/latent"])
    scale = 0.2325  # MAR's own latents are this much smaller (reference README (37))
    yield "decoded_scaled", model.decode_latent(t["in/latent"] * scale / scale)
    yield "moments", model.pre_quant(t["in/image"])
    mean, log_variance = model.encode(t["in/image"])
    yield "mode", mean
    yield "std", (log_variance / 2).exp()


def emu3_vision_tokenizer(t: Tensors, c: Config) -> Compared:
    fixed(c, groupnorm_eps=1e-6, batchnorm3d_eps=1e-5)
    params = {name.removeprefix("param/"): t[name] for name in t if name.startswith("param/")}  # counters stay integers
    source = official.from_tensors(params, "golden")
    model = image_tokenizers.load_emu3_vision(emu3_vision.configured(c), source, "cpu", torch.float32)
    h, w = t["in/codes"].shape[1:]
    yield "decoded", model.decode(t["in/codes"].flatten(1), (h, w))
    yield "decoded_all_frames", model.frames(t["in/codes"].flatten(1), (h, w))
    yield "pre_quant", model.pre_quant(t["in/image"])
    h, w = t["out/pre_quant"].shape[-2:]
    yield "encoder_indices", model.encode(t["in/image"]).unflatten(1, (h, w))
    vectors = t["out/pre_quant"].movedim(2, -1).flatten(0, -2)  # (B, frames, D, h, w)
    yield "nearest_margin", margin(vectors, model.codebook())


def simplear_cosmos_dv(t: Tensors, c: Config) -> Compared:
    """A still image: the golden's outputs have one frame."""
    patch = c["patch_size"]
    cfg = cosmos.CosmosConfig(
        c["channels"],
        tuple(c["channels_mult"]),
        c["num_res_blocks"],
        c["z_channels"],
        tuple(c["levels"]),
        round(math.log2(c["spatial_compression"] / patch)),
        round(math.log2(c["temporal_compression"] / patch)),
        patch,
    )
    fixed(c, groupnorm_eps=1e-6, groupnorm_groups=1)
    with torch.device("meta"):
        halves = cosmos.EncoderHalf(cfg), cosmos.DecoderHalf(cfg)
    tables = [image_tokenizers.cosmos_table(half.state_dict()) for half in halves]
    params = weights(t)
    encoder = {name: params.pop(name) for name in tables[0] if name in params}
    model = cosmos.Cosmos(
        cfg,
        load(partial(cosmos.EncoderHalf, cfg), encoder, tables[0]),
        load(partial(cosmos.DecoderHalf, cfg), params, tables[1], image_tokenizers.COSMOS_IGNORED[:3]),
    )
    codes, image = t["in/codes"][:, 0], t["in/image"][:, :, 0]
    grid = (codes.shape[1], codes.shape[2])
    yield "decoded", model.decode(codes.flatten(1), grid).unsqueeze(2)
    yield "codes_vectors", model.look_up(codes.flatten(1), grid).unsqueeze(2)
    pixels = torch.from_numpy(to_uint8(t["out/decoded"][:, :, 0])).movedim(-1, 1)
    yield "to_uint8", pixels
    yield "patched", cosmos.patched(image, patch).unsqueeze(2)
    z = model.pre_quant(image)
    yield "pre_quant", z.unsqueeze(2)
    encoded = model.encode(image)
    golden = t["out/encoder_indices"]
    yield "encoder_indices", encoded.view_as(golden), golden
    h, w = golden.shape[-2:]
    yield "quant", model.look_up(encoded, (h, w)).unsqueeze(2)
    yield "roundtrip", model.decode(encoded, (h, w)).unsqueeze(2)
    edge = cosmos.bounded(z.permute(0, 2, 3, 1), cfg.levels)
    margin = 0.5 - (edge - edge.round()).abs()
    yield "rounding_margin", margin.unsqueeze(1)


CHECKS: dict[str, Callable[[Tensors, Config], Compared]] = {
    "simplear_cosmos_dv": simplear_cosmos_dv,
    "lumina2_movqgan": lumina2_movqgan,
    "llamagen_vq": llamagen_vq,
    "chameleon_vqgan": chameleon_vqgan,
    "mar_kl16": mar_kl16,
    "emu3_vision_tokenizer": emu3_vision_tokenizer,
}
