"""The convolutional VQ tokenizer of LlamaGen (tensor names of the official `vq_ds*.pt` files).

Encoder: convolutions at falling resolution, attention at the lowest level. The codebook is normalised at look-up, and
so is the encoder's output. Decoder levels are stored in the order they run, lowest resolution first. Facts:
reference README (10) and the manifest of `vq_ds16_t2i`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class VQConfig:
    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2
    z_channels: int = 256
    codebook_size: int = 16384
    codebook_embed_dim: int = 8
    norm_groups: int = 32  # 32 officially; a narrow tokenizer needs fewer, or a group is one channel and loses its mean
    attention: bool = True

    @property
    def downsample(self) -> int:
        return 2 ** (len(self.ch_mult) - 1)

    def to_dict(self) -> dict:
        return asdict(self)


class ResBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, c_in, eps=1e-6)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, c_out, eps=1e-6)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1)
        if c_in != c_out:
            self.nin_shortcut = nn.Conv2d(c_in, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x) + h


class AttnBlock(nn.Module):
    """Single-head attention over all places of a feature map, scaled by channels ** -0.5."""

    def __init__(self, c: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, c, eps=1e-6)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(c, c, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        y = self.norm(x)
        q, k, v = (f(y).flatten(2).transpose(1, 2).unsqueeze(1) for f in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(out.squeeze(1).transpose(1, 2).reshape(b, c, h, w))


class Resample(nn.Module):
    """One level down (stride 2, padded right and bottom only) or up (nearest, then a convolution)."""

    def __init__(self, c: int, down: bool) -> None:
        super().__init__()
        self.down = down
        self.conv = nn.Conv2d(c, c, 3, stride=2 if down else 1, padding=0 if down else 1)

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.conv(F.pad(x, (0, 1, 0, 1)))
            if self.down
            else self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        )


class Level(nn.Module):
    def __init__(self, c_in: int, c_out: int, blocks: int, groups: int, attention: bool, down: bool | None) -> None:
        super().__init__()
        self.res = nn.ModuleList(ResBlock(c_in if i == 0 else c_out, c_out, groups) for i in range(blocks))
        self.attn = nn.ModuleList(AttnBlock(c_out, groups) for _ in range(blocks if attention else 0))
        if down is not None:
            setattr(self, "downsample" if down else "upsample", Resample(c_out, down))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.res):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        for name in ("downsample", "upsample"):
            if hasattr(self, name):
                x = getattr(self, name)(x)
        return x


def _middle(c: int, groups: int, attention: bool) -> nn.ModuleList:
    return nn.ModuleList(
        [ResBlock(c, c, groups), AttnBlock(c, groups) if attention else nn.Identity(), ResBlock(c, c, groups)]
    )


class Encoder(nn.Module):
    def __init__(self, cfg: VQConfig) -> None:
        super().__init__()
        chans = [cfg.ch * m for m in cfg.ch_mult]
        ins = [cfg.ch, *chans[:-1]]
        last = len(chans) - 1
        self.conv_in = nn.Conv2d(3, cfg.ch, 3, padding=1)
        self.conv_blocks = nn.ModuleList(
            Level(a, b, cfg.num_res_blocks, cfg.norm_groups, cfg.attention and i == last, True if i < last else None)
            for i, (a, b) in enumerate(zip(ins, chans, strict=True))
        )
        self.mid = _middle(chans[-1], cfg.norm_groups, cfg.attention)
        self.norm_out = nn.GroupNorm(cfg.norm_groups, chans[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(chans[-1], cfg.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in (*self.conv_blocks, *self.mid):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Decoder(nn.Module):
    def __init__(self, cfg: VQConfig) -> None:
        super().__init__()
        chans = [cfg.ch * m for m in reversed(cfg.ch_mult)]
        ins = [chans[0], *chans[:-1]]
        last = len(chans) - 1
        self.conv_in = nn.Conv2d(cfg.z_channels, chans[0], 3, padding=1)
        self.mid = _middle(chans[0], cfg.norm_groups, cfg.attention)
        self.conv_blocks = nn.ModuleList(
            Level(a, b, cfg.num_res_blocks + 1, cfg.norm_groups, cfg.attention and i == 0, False if i < last else None)
            for i, (a, b) in enumerate(zip(ins, chans, strict=True))
        )
        self.norm_out = nn.GroupNorm(cfg.norm_groups, chans[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(chans[-1], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.conv_in(z)
        for block in (*self.mid, *self.conv_blocks):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Quantizer(nn.Module):
    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, dim)

    @property
    def codebook(self) -> Tensor:
        """(codebook_size, dim) float, rows of unit length."""
        return F.normalize(self.embedding.weight.float(), dim=-1)

    def nearest(self, z: Tensor) -> Tensor:
        """Indices (...,) int64 of the code nearest to each vector of z (..., dim); both are normalised first."""
        return (F.normalize(z.float(), dim=-1) @ self.codebook.T).argmax(-1)


class VQModel(nn.Module):
    """Images (B, 3, H, W) in [-1, 1]  <->  codes (B, H/f * W/f) int64, row by row."""

    def __init__(self, cfg: VQConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.encoder, self.decoder = Encoder(cfg), Decoder(cfg)
        self.quantize = Quantizer(cfg.codebook_size, cfg.codebook_embed_dim)
        self.quant_conv = nn.Conv2d(cfg.z_channels, cfg.codebook_embed_dim, 1)
        self.post_quant_conv = nn.Conv2d(cfg.codebook_embed_dim, cfg.z_channels, 1)

    def pre_quant(self, image: Tensor) -> Tensor:
        """Encoder output before normalisation, (B, dim, h, w)."""
        return self.quant_conv(self.encoder(image))

    def encode(self, image: Tensor) -> Tensor:
        return self.quantize.nearest(self.pre_quant(image).permute(0, 2, 3, 1)).flatten(1)

    def decode_latent(self, z: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(z))

    def decode(self, codes: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Codes (B, h*w) -> images (B, 3, H, W), not clamped. `grid` is (h, w); square when left out."""
        side = int(codes.shape[1] ** 0.5)
        h, w = grid or (side, side)
        if h * w != codes.shape[1]:
            raise ValueError(f"{codes.shape[1]} codes do not fill a {h} x {w} grid")
        z = self.quantize.codebook[codes].view(codes.shape[0], h, w, -1).permute(0, 3, 1, 2)
        return self.decode_latent(z.to(self.post_quant_conv.weight.dtype))
