"""Cosmos DV8x16x16, the tokenizer of SimpleAR, for still images.

It is a video tokenizer. A still image is one latent frame, and every causal convolution over time sees it repeatedly:
its taps add up to a convolution of one frame, and attention over time returns its values. So the network here is
two-dimensional and has only the parameters that a still image needs. Facts: reference README_3 (64) to (68) and the
manifests of Cosmos-1.0-Tokenizer-DV8x16x16.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench.models import vq


@dataclass(frozen=True)
class CosmosConfig:
    """levels: number of values of each coordinate of a code; patch: pixels per side of a position after the wavelet
    transform, and frames that it joins. The first `spatial` levels of resolution halve the sides. The first `temporal`
    levels of the encoder, and as many levels of the decoder after its first one, also resample time."""

    ch: int = 128
    ch_mult: tuple[int, ...] = (2, 4, 4)
    num_res_blocks: int = 2
    z_channels: int = 16
    levels: tuple[int, ...] = (8, 8, 8, 5, 5, 5)
    spatial: int = 2
    temporal: int = 1
    patch: int = 4

    @property
    def bands(self) -> int:
        """Channels after the wavelet transform of an image."""
        return 3 * self.patch**3

    @property
    def codebook_size(self) -> int:
        return math.prod(self.levels)

    @property
    def downsample(self) -> int:
        return self.patch * 2**self.spatial

    def reduced(self, levels: Sequence[int]) -> CosmosConfig:
        """The same kind of network, narrow, with other codes."""
        return replace(self, ch=8, ch_mult=(1, 1, 1), num_res_blocks=1, z_channels=8, levels=tuple(levels))


#: Cosmos-1.0-Tokenizer-DV8x16x16 (its manifests)
COSMOS = CosmosConfig()


class StillConv(nn.Module):
    """A convolution of one frame with a kernel over time and space, with zeros around the frame. All taps over time see
    the same frame, because causal padding repeats the first frame."""

    def __init__(self, c_in: int, c_out: int, time: int, side: int, stride: int = 1) -> None:
        super().__init__()
        self.stride, self.padding = stride, side // 2 if stride == 1 else 0
        self.weight = nn.Parameter(torch.empty(c_out, c_in, time, side, side))
        self.bias = nn.Parameter(torch.empty(c_out))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight.sum(2), self.bias, self.stride, self.padding)


def _norm(channels: int) -> nn.Module:
    return nn.GroupNorm(1, channels, eps=1e-6)


def _factorised(c_in: int, c_out: int) -> nn.Sequential:
    """A convolution over space, then a convolution over time."""
    return nn.Sequential(StillConv(c_in, c_out, 1, 3), StillConv(c_out, c_out, 3, 1))


def _pointwise(c_in: int, c_out: int) -> StillConv:
    return StillConv(c_in, c_out, 1, 1)


def _block(c_in: int, c_out: int) -> vq.ResBlock:
    return vq.ResBlock(c_in, c_out, 1, conv=_factorised, pointwise=_pointwise)


class TimeAttention(nn.Module):
    """Attention over one frame, which returns its values. The file's queries and keys are not needed."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm, self.v, self.proj_out = _norm(c), _pointwise(c, c), _pointwise(c, c)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj_out(self.v(self.norm(x)))


class Middle(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.block_1, self.block_2 = _block(c, c), _block(c, c)
        self.attn_1 = nn.Sequential(vq.AttnBlock(c, 1, pointwise=_pointwise), TimeAttention(c))

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Down(nn.Module):
    """Halves the sides: a convolution plus the mean. If time is halved, too, also a convolution over time plus its
    input."""

    def __init__(self, c: int, time: bool) -> None:
        super().__init__()
        self.conv1 = StillConv(c, c, 1, 3, 2)
        if time:
            self.conv2 = StillConv(c, c, 3, 1)
        self.conv3 = _pointwise(c, c)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(F.pad(x, (0, 1, 0, 1))) + F.avg_pool2d(x, 2)
        if hasattr(self, "conv2"):
            x = x + self.conv2(x)
        return self.conv3(x)


class Up(nn.Module):
    """Doubles the sides. If time is resampled, too, first a convolution over time plus its input, for one frame,
    too."""

    def __init__(self, c: int, time: bool) -> None:
        super().__init__()
        if time:
            self.conv1 = StillConv(c, c, 3, 1)
        self.conv2, self.conv3 = StillConv(c, c, 1, 3), _pointwise(c, c)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "conv1"):
            x = x + self.conv1(x)
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.conv3(x + self.conv2(x))


def _level(c_in: int, c_out: int, blocks: int, resample: Down | Up | None) -> nn.Sequential:
    """Residual blocks, then `resample` (if any), named by its direction."""
    parts = {"block": nn.Sequential(*(_block(c_in if i == 0 else c_out, c_out) for i in range(blocks)))}
    if resample is not None:
        parts["downsample" if isinstance(resample, Down) else "upsample"] = resample  # type: ignore[assignment]
    return nn.Sequential(OrderedDict(parts))


def _encoder(cfg: CosmosConfig) -> nn.Sequential:
    widths = [cfg.ch * m for m in cfg.ch_mult]
    halved = min(cfg.spatial, len(widths) - 1)  # levels that halve the sides
    levels = [
        _level(a, b, cfg.num_res_blocks, Down(b, i < cfg.temporal) if i < halved else None)
        for i, (a, b) in enumerate(zip([cfg.ch, *widths[:-1]], widths, strict=True))
    ]
    parts = {
        "conv_in": _factorised(cfg.bands, cfg.ch),
        "down": nn.Sequential(*levels),
        "mid": Middle(widths[-1]),
        "norm_out": _norm(widths[-1]),
        "activation": nn.SiLU(),
        "conv_out": _factorised(widths[-1], cfg.z_channels),
    }
    return nn.Sequential(OrderedDict(parts))


class CosmosDecoder(nn.Module):
    """Levels are numbered by resolution; 0 is the highest. They run from the last to the first."""

    def __init__(self, cfg: CosmosConfig) -> None:
        super().__init__()
        widths = [cfg.ch * m for m in cfg.ch_mult]
        last = len(widths) - 1
        self.conv_in = _factorised(cfg.z_channels, widths[-1])
        self.mid = Middle(widths[-1])
        lowest = max(0, last - cfg.spatial)  # the last level that keeps the sides
        ups = [Up(b, 0 < last - i <= cfg.temporal) if i > lowest else None for i, b in enumerate(widths)]
        self.up = nn.ModuleList(
            _level(a, b, cfg.num_res_blocks + 1, up)
            for a, b, up in zip([*widths[1:], widths[-1]], widths, ups, strict=True)
        )
        self.norm_out, self.conv_out = _norm(widths[0]), _factorised(widths[0], cfg.bands)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.conv_in(x))
        for level in reversed(self.up):
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class EncoderHalf(nn.Module):
    """The content of encoder.jit."""

    def __init__(self, cfg: CosmosConfig) -> None:
        super().__init__()
        self.encoder, self.quant_conv = _encoder(cfg), _pointwise(cfg.z_channels, len(cfg.levels))


class DecoderHalf(nn.Module):
    """The content of decoder.jit."""

    def __init__(self, cfg: CosmosConfig) -> None:
        super().__init__()
        self.post_quant_conv, self.decoder = _pointwise(len(cfg.levels), cfg.z_channels), CosmosDecoder(cfg)


class Cosmos(nn.Module):
    """Images (B, 3, H, W) in [-1, 1]  <->  codes (B, H/16 * W/16) int64, row by row."""

    def __init__(self, cfg: CosmosConfig, encoding: EncoderHalf | None = None, decoding: DecoderHalf | None = None):
        super().__init__()
        self.cfg = cfg
        self.encoding, self.decoding = encoding or EncoderHalf(cfg), decoding or DecoderHalf(cfg)

    def pre_quant(self, image: Tensor) -> Tensor:
        """The encoder's output (B, dim, h, w) before it is bounded and rounded."""
        return self.encoding.quant_conv(self.encoding.encoder(patched(image, self.cfg.patch)))

    def encode(self, image: Tensor) -> Tensor:
        return nearest(self.pre_quant(image).permute(0, 2, 3, 1), self.cfg.levels).flatten(1)

    def look_up(self, codes: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Vectors (B, dim, h, w) of codes (B, h*w). grid: (h, w); default: square."""
        latent = vectors(codes.unflatten(1, vq.fill(codes, grid)), self.cfg.levels)
        return latent.permute(0, 3, 1, 2).to(self.decoding.post_quant_conv.weight.dtype)

    def decode(self, codes: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Codes (B, h*w) -> images (B, 3, H, W), not clamped. `grid` as in `look_up`."""
        z = self.decoding.post_quant_conv(self.look_up(codes, grid))
        return unpatched(self.decoding.decoder(z), self.cfg.patch)

    def codebook(self) -> Tensor:
        """The code vectors (V, dim) float."""
        device = self.decoding.post_quant_conv.weight.device
        return vectors(torch.arange(self.cfg.codebook_size, device=device), self.cfg.levels)


def vectors(codes: Tensor, levels: Sequence[int]) -> Tensor:
    """The vectors (..., dim) float of codes (...): the digits d of a code, lowest first, as (d - half) / half, with
    half = levels // 2 (finite scalar quantisation, arXiv 2309.15505)."""
    size, weight = _digits(levels, codes.device)
    half = size // 2
    return (codes.unsqueeze(-1) // weight % size - half) / half


def bounded(z: Tensor, levels: Sequence[int]) -> Tensor:
    """Vectors z (..., dim), bounded so that rounding them gives the digits minus half."""
    size, _ = _digits(levels, z.device)
    reach = (size - 1) * 1.001 / 2
    offset = torch.where(size % 2 == 0, 0.5, 0.0)
    return torch.tanh(z.float() + torch.atanh(offset / reach)) * reach - offset


def nearest(z: Tensor, levels: Sequence[int]) -> Tensor:
    """Codes (...) int64 of the encoder's output z (..., dim)."""
    size, weight = _digits(levels, z.device)
    return ((bounded(z, levels).round().long() + size // 2) * weight).sum(-1)


def _digits(levels: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The number of values of each digit, and the digit's weight in a code."""
    size = torch.tensor(levels, device=device)
    return size, torch.cat([size.new_ones(1), size.cumprod(0)[:-1]])


def patched(image: Tensor, patch: int) -> Tensor:
    """The Haar transform over time, height and width, scaled to means, of an image (B, C, H, W) that is constant for
    `patch` frames (a power of 2): (B, C patch**3, H / patch, W / patch). Differences over time are zero."""
    for _ in range(patch.bit_length() - 1):
        a, b, c, d = _corners(image)
        still = [a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d]
        image = torch.cat([x / 4 for x in still] + [torch.zeros_like(a)] * 4, 1)
    return image


def unpatched(x: Tensor, patch: int) -> Tensor:
    """The inverse of `patched` for x (B, C patch**3, H / patch, ...): the last of its frames, (B, C, H, W)."""
    for _ in range(patch.bit_length() - 1):
        low, high = x.chunk(2, 1)
        s, w, h, diagonal = (low - high).chunk(4, 1)
        x = x.new_empty(*s.shape[:2], 2 * s.shape[2], 2 * s.shape[3])
        for corner, value in zip(
            _corners(x),
            (s + w + h + diagonal, s - w + h - diagonal, s + w - h - diagonal, s - w - h + diagonal),
            strict=True,
        ):
            corner.copy_(value)
    return x


def _corners(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of the four corners of each 2 x 2 square, row by row."""
    return x[..., ::2, ::2], x[..., ::2, 1::2], x[..., 1::2, ::2], x[..., 1::2, 1::2]
