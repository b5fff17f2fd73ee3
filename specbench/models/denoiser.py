"""The network of a diffusion head: an MLP on noisy tokens whose layers are modulated by the time and the condition
(adaptive LayerNorm). Parameter names are MAR's official ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from specbench.engine.ops import linear, multiply_add, silu

#: Width of the sinusoids of a time.
WAVES = 256
#: Maximal number of modulation values that a trajectory stores at once.
_AT_ONCE = 1 << 24

#: The modulation of a layer: shift, 1 + scale and, for a residual block, the gate; all (..., width).
Modulation = tuple[Tensor, ...]
#: A step of a trajectory: states (n, D) float32 and the number of the step (the same for all) -> moments of the next
#: states.
Sampler = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def waves(time: Tensor) -> Tensor:
    """Sinusoids (..., 256) float32 of times (...): cosines, then sines. The frequencies are computed on the CPU, so
    they are equal on all devices."""
    half = WAVES // 2
    frequency = torch.exp(-math.log(10000) / half * torch.arange(half, device="cpu"))
    angle = time.float()[..., None] * frequency.to(time.device)
    return torch.cat([angle.cos(), angle.sin()], -1)


class Linear(nn.Linear):
    """A linear layer with the project's matrix product: the result of a row does not depend on the number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class SiLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return silu(x)


class TimeEmbedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(Linear(WAVES, width), SiLU(), Linear(width, width))

    def forward(self, sinusoids: Tensor) -> Tensor:
        """Sinusoids of `waves` (..., 256) -> (..., width)."""
        return self.mlp(sinusoids.to(next(self.mlp.parameters()).dtype))


class ResidualBlock(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=eps)
        self.mlp = nn.Sequential(Linear(width, width), SiLU(), Linear(width, width))
        self.adaLN_modulation = nn.Sequential(SiLU(), Linear(width, 3 * width))

    def modulation(self, condition: Tensor) -> Modulation:
        shift, scale, gate = self.adaLN_modulation(condition).chunk(3, -1)
        return shift, 1 + scale, gate

    def forward(self, x: Tensor, modulation: Modulation) -> Tensor:
        shift, factor, gate = modulation
        return multiply_add(self.mlp(multiply_add(self.in_ln(x), factor, shift)), gate, x)


class FinalLayer(nn.Module):
    def __init__(self, width: int, out: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps, elementwise_affine=False)
        self.linear = Linear(width, out)
        self.adaLN_modulation = nn.Sequential(SiLU(), Linear(width, 2 * width))

    def modulation(self, condition: Tensor) -> Modulation:
        shift, scale = self.adaLN_modulation(condition).chunk(2, -1)
        return shift, 1 + scale

    def forward(self, x: Tensor, modulation: Modulation) -> Tensor:
        shift, factor = modulation
        return self.linear(multiply_add(self.norm(x), factor, shift))


class Denoiser(nn.Module):
    """Noisy tokens x (n, token_dim), sinusoids of their times (`waves`, (n, 256)) and conditions z (n, condition) ->
    (n, out)."""

    def __init__(self, token_dim: int, condition: int, width: int, depth: int, out: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.time_embed = TimeEmbedding(width)
        self.cond_embed = Linear(condition, width)
        self.input_proj = Linear(token_dim, width)
        self.res_blocks = nn.ModuleList(ResidualBlock(width, eps) for _ in range(depth))
        self.final_layer = FinalLayer(width, out, eps)

    def forward(self, x: Tensor, sinusoids: Tensor, z: Tensor) -> Tensor:
        return self.denoise(x, self.modulation(self.time_embed(sinusoids) + self.cond_embed(z)))

    def modulation(self, condition: Tensor) -> list[Modulation]:
        """The modulation of each layer, from the sum of time and condition (..., width). It uses half of the head's
        weights and does not need x."""
        return [layer.modulation(condition) for layer in (*self.res_blocks, self.final_layer)]

    def denoise(self, x: Tensor, modulation: list[Modulation]) -> Tensor:
        x = self.input_proj(x)
        for layer, factors in zip((*self.res_blocks, self.final_layer), modulation, strict=True):
            x = layer(x, factors)
        return x

    def along(self, sinusoids: Tensor, z: Tensor) -> Callable[[Tensor, int], Tensor]:
        """A function for complete trajectories under fixed conditions z (n, condition): states x (n, token_dim) and the
        number of a step -> outputs (n, out) float32. Call it from the last step down to 0. sinusoids (T, 256): of the
        steps' times. The modulation is computed for all steps at once, or for as many as fit in `_AT_ONCE`."""
        dtype, steps = self.input_proj.weight.dtype, len(sinusoids)
        time, condition = self.time_embed(sinusoids), self.cond_embed(z.to(dtype))
        numbers = len(condition) * (3 * len(self.res_blocks) + 2) * condition.shape[-1]
        at_once = max(1, min(steps, _AT_ONCE // numbers))
        modulations: list[Modulation] = []

        def step(x: Tensor, t: int) -> Tensor:
            nonlocal modulations
            if t == steps - 1 or t % at_once == at_once - 1:  # from the last step down to the first
                first = t - t % at_once
                modulations = self.modulation(time[first : t + 1, None] + condition)
            modulation = [tuple(part[t % at_once] for part in parts) for parts in modulations]
            return self.denoise(x.to(dtype), modulation).float()

        return step

    def step_layers(self) -> list[nn.Module]:
        """The layers whose weights a step reads. The embeddings of time and condition do not depend on the state, so
        they are not part of a step."""
        return [self.input_proj, self.final_layer.linear, *(block.get_submodule("mlp") for block in self.res_blocks)]
