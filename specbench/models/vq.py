"""One convolutional autoencoder for LlamaGen's tokenizers, Chameleon's VQGAN, MoVQGAN, MAR's KL-16 and the embedded
tokenizer.

The encoder has residual blocks at decreasing resolution, and attention at some levels and in the middle; the decoder
mirrors it. The configuration describes the differences. Our tensor names are as in LlamaGen's `vq_ds*.pt`; decoder
levels are stored in the order in which they run, lowest resolution first. Facts: reference README (10), (26), (37) and
the manifests of the files named at each configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class VQConfig:
    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2
    z_channels: int = 256
    codebook_size: int = 16384  # 0: no codebook; the latent is a mean and a log variance
    codebook_embed_dim: int = 8
    norm_groups: int = 32  # 32 officially; a narrow tokenizer needs fewer: a group of one channel loses its mean
    attention: bool = True  # in the middle, and at the levels below
    #: levels with attention (0: the highest resolution); None: only the lowest resolution
    encoder_attention: tuple[int, ...] | None = None
    decoder_attention: tuple[int, ...] | None = None
    codebook_l2_norm: bool = True  # code vectors and the encoder's output are scaled to unit length before use
    spatial_norm: bool = False  # the decoder's norms are scaled and shifted by the codes (MoVQ, arXiv 2209.09002)

    @property
    def downsample(self) -> int:
        return 2 ** (len(self.ch_mult) - 1)

    @property
    def double_z(self) -> bool:
        """Whether the encoder gives a mean and a log variance."""
        return self.codebook_size == 0

    def to_dict(self) -> dict[str, Any]:
        """The fields, for a file. Fields that were added later are omitted at their defaults, so that the file, and the
        digest by which rows name it, do not change."""
        later = ("encoder_attention", "decoder_attention", "codebook_l2_norm", "spatial_norm")
        defaults = {f.name: f.default for f in fields(self) if f.name in later}
        return {k: v for k, v in asdict(self).items() if k not in defaults or v != defaults[k]}

    def reduced(self, codebook_size: int) -> VQConfig:
        """The same architecture, as narrow as 32 groups allow, with another number of codes."""
        return replace(
            self,
            ch=32,
            num_res_blocks=1,
            z_channels=min(self.z_channels, 32),
            codebook_size=codebook_size,
            codebook_embed_dim=min(self.codebook_embed_dim, 16),
        )


#: `vq_ds16_c2i.pt` and `vq_ds16_t2i.pt` (their manifests)
LLAMAGEN_16 = VQConfig()
#: `vqgan.ckpt` of Chameleon, Lumina-mGPT and Anole (manifest of chameleon_vqgan.ckpt): the codebook is used as stored
CHAMELEON = VQConfig(
    codebook_size=8192, codebook_embed_dim=256, encoder_attention=(), decoder_attention=(), codebook_l2_norm=False
)
#: `movqgan_270M.ckpt`, the tokenizer of Lumina-mGPT 2.0 (its manifest)
MOVQGAN = VQConfig(
    ch=256,
    ch_mult=(1, 2, 2, 4),
    z_channels=4,
    codebook_embed_dim=4,
    codebook_l2_norm=False,
    spatial_norm=True,
)
#: `kl16.ckpt` of MAR (its manifest); the caller must divide latents by 0.2325 before decoding
KL16 = VQConfig(z_channels=16, codebook_size=0, codebook_embed_dim=16, decoder_attention=())


class SpatialNorm(nn.Module):
    """A group norm, scaled and shifted at each position by the vector of its code (reference README_3 (56))."""

    def __init__(self, groups: int, channels: int, dim: int) -> None:
        super().__init__()
        self.norm_layer = nn.GroupNorm(groups, channels, eps=1e-6)
        self.conv_y, self.conv_b = nn.Conv2d(dim, channels, 1), nn.Conv2d(dim, channels, 1)

    def forward(self, x: Tensor, codes: Tensor) -> Tensor:
        """x (B, channels, h, w), codes (B, dim, h / f, w / f)."""
        codes = F.interpolate(codes, size=x.shape[-2:], mode="nearest")
        return self.norm_layer(x) * self.conv_y(codes) + self.conv_b(codes)


def _norm(groups: int, channels: int, dim: int) -> nn.Module:
    """dim: of the codes; 0: a plain norm."""
    return SpatialNorm(groups, channels, dim) if dim else nn.GroupNorm(groups, channels, eps=1e-6)


def _normed(norm: nn.Module, x: Tensor, codes: Tensor | None) -> Tensor:
    return norm(x) if codes is None else norm(x, codes)


#: (channels in, channels out) -> a convolution that keeps the sides.
Convolution = Callable[[int, int], nn.Module]


def _conv(c_in: int, c_out: int) -> nn.Module:
    return nn.Conv2d(c_in, c_out, 3, padding=1)


def _pointwise(c_in: int, c_out: int) -> nn.Module:
    return nn.Conv2d(c_in, c_out, 1)


class ResBlock(nn.Module):
    def __init__(
        self,
        c_in: int,
        c_out: int,
        groups: int,
        dim: int = 0,
        conv: Convolution = _conv,
        pointwise: Convolution = _pointwise,
    ) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(groups, c_in, dim), conv(c_in, c_out)
        self.norm2, self.conv2 = _norm(groups, c_out, dim), conv(c_out, c_out)
        if c_in != c_out:
            self.nin_shortcut = pointwise(c_in, c_out)

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        h = self.conv1(F.silu(_normed(self.norm1, x, codes)))
        h = self.conv2(F.silu(_normed(self.norm2, h, codes)))
        return (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x) + h


class AttnBlock(nn.Module):
    """Single-head attention over all positions of a feature map, scaled by channels ** -0.5."""

    def __init__(self, c: int, groups: int, dim: int = 0, pointwise: Convolution = _pointwise) -> None:
        super().__init__()
        self.norm = _norm(groups, c, dim)
        self.q, self.k, self.v, self.proj_out = (pointwise(c, c) for _ in range(4))

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        b, c, h, w = x.shape
        y = _normed(self.norm, x, codes)
        q, k, v = (f(y).flatten(2).transpose(1, 2).unsqueeze(1) for f in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(out.squeeze(1).transpose(1, 2).reshape(b, c, h, w))


class Resample(nn.Module):
    """One level down (stride 2, padded only right and bottom) or up (nearest, then a convolution)."""

    def __init__(self, c: int, down: bool) -> None:
        super().__init__()
        self.down = down
        self.conv = nn.Conv2d(c, c, 3, stride=2 if down else 1, padding=0 if down else 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)) if self.down else F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    def __init__(
        self, c_in: int, c_out: int, blocks: int, groups: int, attention: bool, down: bool | None, dim: int = 0
    ) -> None:
        super().__init__()
        self.res = nn.ModuleList(ResBlock(c_in if i == 0 else c_out, c_out, groups, dim) for i in range(blocks))
        self.attn = nn.ModuleList(AttnBlock(c_out, groups, dim) for _ in range(blocks if attention else 0))
        if down is not None:
            setattr(self, "downsample" if down else "upsample", Resample(c_out, down))

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        for i, block in enumerate(self.res):
            x = block(x, codes)
            if len(self.attn):
                x = self.attn[i](x, codes)
        for name in ("downsample", "upsample"):
            if hasattr(self, name):
                x = getattr(self, name)(x)
        return x


def _levels(cfg: VQConfig, levels: tuple[int, ...] | None) -> Iterable[int]:
    return () if not cfg.attention else (len(cfg.ch_mult) - 1,) if levels is None else levels


def _middle(c: int, groups: int, attention: bool, dim: int = 0) -> nn.ModuleList:
    between = AttnBlock(c, groups, dim) if attention else _Same()
    return nn.ModuleList([ResBlock(c, c, groups, dim), between, ResBlock(c, c, groups, dim)])


class _Same(nn.Module):
    """The identity, instead of attention."""

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        return x


class VQEncoder(nn.Module):
    def __init__(self, cfg: VQConfig) -> None:
        super().__init__()
        chans = [cfg.ch * m for m in cfg.ch_mult]
        ins = [cfg.ch, *chans[:-1]]
        last = len(chans) - 1
        attending = _levels(cfg, cfg.encoder_attention)
        self.conv_in = nn.Conv2d(3, cfg.ch, 3, padding=1)
        self.conv_blocks = nn.ModuleList(
            Level(a, b, cfg.num_res_blocks, cfg.norm_groups, i in attending, True if i < last else None)
            for i, (a, b) in enumerate(zip(ins, chans, strict=True))
        )
        self.mid = _middle(chans[-1], cfg.norm_groups, cfg.attention)
        self.norm_out = nn.GroupNorm(cfg.norm_groups, chans[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(chans[-1], cfg.z_channels * (2 if cfg.double_z else 1), 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in (*self.conv_blocks, *self.mid):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class VQDecoder(nn.Module):
    def __init__(self, cfg: VQConfig) -> None:
        super().__init__()
        chans = [cfg.ch * m for m in reversed(cfg.ch_mult)]
        ins = [chans[0], *chans[:-1]]
        last = len(chans) - 1
        attending = _levels(cfg, cfg.decoder_attention)
        self.conv_in = nn.Conv2d(cfg.z_channels, chans[0], 3, padding=1)
        dim = cfg.codebook_embed_dim if cfg.spatial_norm else 0
        self.mid = _middle(chans[0], cfg.norm_groups, cfg.attention, dim)
        self.conv_blocks = nn.ModuleList(
            Level(
                a, b, cfg.num_res_blocks + 1, cfg.norm_groups, last - i in attending, False if i < last else None, dim
            )
            for i, (a, b) in enumerate(zip(ins, chans, strict=True))
        )
        self.norm_out = _norm(cfg.norm_groups, chans[-1], dim)
        self.conv_out = nn.Conv2d(chans[-1], 3, 3, padding=1)

    def forward(self, z: Tensor, codes: Tensor | None = None) -> Tensor:
        """codes (B, dim, h, w): the vectors of the codes, if the norms read them."""
        x = self.conv_in(z)
        for block in (*self.mid, *self.conv_blocks):
            x = block(x, codes)
        return self.conv_out(F.silu(_normed(self.norm_out, x, codes)))


def fill(codes: Tensor, grid: tuple[int, int] | None) -> tuple[int, int]:
    """The grid (h, w) of codes (B, h*w), row by row: `grid`, or a square. Raises ValueError if they do not fill it."""
    side = int(codes.shape[1] ** 0.5)
    h, w = grid or (side, side)
    if min(h, w) < 1 or h * w != codes.shape[1]:
        raise ValueError(f"{codes.shape[1]} codes do not fill a {h} x {w} grid")
    return h, w


#: Number of vectors that are compared with a codebook at once; their scores fit into a processor's cache.
_NEAREST_ROWS = 64


class Quantizer(nn.Module):
    def __init__(self, size: int, dim: int, l2_norm: bool) -> None:
        super().__init__()
        self.l2_norm = l2_norm
        self.embedding = nn.Embedding(size, dim)

    @property
    def codebook(self) -> Tensor:
        """(codebook_size, dim) float, the vectors that are decoded; of unit length with `l2_norm`."""
        table = self.embedding.weight.float()
        return F.normalize(table, dim=-1) if self.l2_norm else table

    def nearest(self, z: Tensor) -> Tensor:
        """Indices (...,) int64 of the nearest code of each vector of z (..., dim); the first of equally near codes.
        With `l2_norm`, z is also normalised."""
        table, flat = self.codebook, z.float().flatten(0, -2)
        scores, penalty = table.T.contiguous(), table.square().sum(-1) / 2
        if self.l2_norm:
            flat, penalty = F.normalize(flat, dim=-1), penalty.new_zeros(())
        parts = [(part @ scores - penalty).argmax(-1) for part in flat.split(_NEAREST_ROWS)]
        return torch.cat(parts).view(z.shape[:-1])


class Autoencoder(nn.Module):
    """The base class of tokenizers and KL autoencoders. Images are (B, 3, H, W) in [-1, 1]."""

    quantize: Quantizer

    def __init__(self, cfg: VQConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.encoder, self.decoder = VQEncoder(cfg), VQDecoder(cfg)
        if cfg.codebook_size:
            self.quantize = Quantizer(cfg.codebook_size, cfg.codebook_embed_dim, cfg.codebook_l2_norm)
        double = 2 if cfg.double_z else 1
        self.quant_conv = nn.Conv2d(double * cfg.z_channels, double * cfg.codebook_embed_dim, 1)
        self.post_quant_conv = nn.Conv2d(cfg.codebook_embed_dim, cfg.z_channels, 1)

    def pre_quant(self, image: Tensor) -> Tensor:
        """Encoder output before quantising, (B, dim, h, w); for a KL autoencoder (B, 2 dim, h, w): means, then log
        variances."""
        return self.quant_conv(self.encoder(image))

    def decode_latent(self, z: Tensor) -> Tensor:
        """Latents (B, dim, h, w) -> images, not clamped."""
        return self.decoder(self.post_quant_conv(z), z if self.cfg.spatial_norm else None)


class VQModel(Autoencoder):
    """Images (B, 3, H, W) in [-1, 1]  <->  codes (B, H/f * W/f) int64, row by row."""

    def encode(self, image: Tensor) -> Tensor:
        return self.quantize.nearest(self.pre_quant(image).permute(0, 2, 3, 1)).flatten(1)

    def look_up(self, codes: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Latents (B, dim, h, w) of codes (B, h*w). grid: (h, w); default: square."""
        h, w = fill(codes, grid)
        z = self.quantize.codebook[codes].view(codes.shape[0], h, w, -1).permute(0, 3, 1, 2)
        return z.to(self.decoder.conv_in.weight.dtype)

    def decode(self, codes: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Codes (B, h*w) -> images (B, 3, H, W), not clamped. `grid` as in `look_up`."""
        return self.decode_latent(self.look_up(codes, grid))

    def codebook(self) -> Tensor:
        """The code vectors (V, dim) float in which rules measure proximity: the table as stored, never normalised
        (reference README (18))."""
        return self.quantize.embedding.weight.float()


class KLModel(Autoencoder):
    """Images (B, 3, H, W) in [-1, 1]  <->  latents (B, dim, H/f, W/f), unscaled; `decode_latent` goes back."""

    def encode(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """(mean, log variance) of the latent's normal distribution, each (B, dim, H/f, W/f)."""
        mean, log_variance = self.pre_quant(image).chunk(2, 1)
        return mean, log_variance.clamp(-30, 20)  # the bounds of latent diffusion's autoencoders
