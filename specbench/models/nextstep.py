"""NextStep-1 and NextStep-1.1 (arXiv 2508.10711): a causal Transformer over a prompt and continuous image tokens in
raster order, and a flow-matching head.

A token is a patch of 2 x 2 latents. Tokens enter the Transformer by one linear layer, and its outputs reach the head by
another one. Parameter names of these and of the head are the official ones (vllm-project/vllm-omni,
nextstep_1_1/modeling_nextstep.py, adapted from stepfun-ai/NextStep-1.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal  # noqa: F401 (the documentation resolves inherited annotations in this module)

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench.engine.masks import TreeMask
from specbench.engine.ops import take
from specbench.engine.state import Buffers, within
from specbench.errors import UsageError
from specbench.models.denoiser import Denoiser, Linear, Sampler
from specbench.models.flow import FlowSampler, FlowSteps, flow_steps
from specbench.models.language import LanguageSession
from specbench.models.transformer import line_rotary
from specbench.models.unified import Prompted, Prompts, UnifiedConfig

GUIDANCE = ("constant", "linear")


@dataclass(frozen=True)
class NextStepConfig(UnifiedConfig):
    """The Transformer, with Qwen2.5's sizes. side: tokens per row and per column of the image; token_dim: D numbers of
    a token; head_width, head_depth: of the head."""

    rope_base: float = 1e6
    qkv_bias: bool = True
    side: int = 32
    token_dim: int = 64
    head_width: int = 1536
    head_depth: int = 12


class FlowHead(nn.Module):
    """The module that contains the head in official files."""

    def __init__(self, cfg: NextStepConfig) -> None:
        super().__init__()
        self.net = Denoiser(cfg.token_dim, cfg.dim, cfg.head_width, cfg.head_depth, cfg.token_dim)


class NextStep(Prompted):
    skips_padding = True

    def __init__(self, cfg: NextStepConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.length, self.width, self.vocab_size = cfg.side**2, cfg.side, cfg.vocab_size
        self._build_trunk(cfg.block, cfg.n_layer, cfg.vocab_size)
        self.image_in_projector = Linear(cfg.token_dim, cfg.dim)
        self.image_out_projector = Linear(cfg.dim, cfg.dim)
        self.image_head = FlowHead(cfg)

    def rope(self, positions: int, prefix: int) -> Tensor:
        return line_rotary(positions, self.block.head_dim, self.cfg.rope_base)


@dataclass(frozen=True)
class NextStepTarget:
    """A NextStep with its sampling parameters. scale: guidance of the velocity (1: no guidance); kind: "constant", or
    "linear": decreasing from `scale` at the first token towards 1; use_norm: before a sampled token is read and
    decoded, it is scaled to mean 0 and variance 1 over its numbers (the density is of the unscaled token)."""

    model: NextStep
    sampling: FlowSampler
    scale: float = 1.0
    kind: str = "constant"
    use_norm: bool = False

    def __post_init__(self) -> None:
        if self.kind not in GUIDANCE:
            raise UsageError(f"a guidance schedule '{self.kind}' is unknown (choose from: {', '.join(GUIDANCE)})")

    @property
    def length(self) -> int:
        """Number of tokens of an image."""
        return self.model.length

    @property
    def dim(self) -> int:
        """Number of values of a token."""
        return self.model.cfg.token_dim

    @property
    def steps(self) -> int:
        """Number of steps in which the head samples a token."""
        return self.sampling.steps

    @property
    def halves(self) -> int:
        """Rows per image: one with the prompt and, with guidance, one with the negative prompt."""
        return 1 if self.scale == 1 else 2

    @property
    def net(self) -> Denoiser:
        """The network of the head."""
        return self.model.image_head.net

    def pass_layers(self) -> list[nn.Module]:
        """The layers, except the head, whose weights a pass reads."""
        m = self.model
        return [m.image_in_projector, m.layers, m.norm, m.image_out_projector]

    def pass_positions(self, nodes: int) -> int:
        """Positions per row that a pass computes for `nodes` tokens."""
        return nodes

    def normed(self, tokens: Tensor) -> Tensor:
        """Tokens (..., D) in the form in which they are read and decoded."""
        return F.layer_norm(tokens, tokens.shape[-1:], eps=1e-6) if self.use_norm else tokens

    def strength(self, number: Tensor) -> Tensor:
        """Guidance float32 of tokens `number` (...) int64."""
        if self.kind == "constant":
            return torch.full(number.shape, self.scale, dtype=torch.float32, device=number.device)
        return 1 + (self.scale - 1) * (self.length - number).float() / self.length

    def open(self, conditioning: Prompts, rows: int) -> NextStepSession:
        if len(conditioning) != rows:
            raise ValueError(f"{len(conditioning)} prompts for {rows} rows")
        return NextStepSession(self, conditioning)


class NextStepSession:
    """A batch of B images, for the decode loop (`decoding.continuous.sessions.CausalSession`).

    A sequence is the prefix (P positions) and the tokens. The condition of token j is the output at position P - 1 + j.
    Keys and values of a position are in its slot of the cache. With guidance, a condition contains z, z of the negative
    prompt, and the strength.
    """

    causal = True

    def __init__(self, guided: NextStepTarget, conditioning: Prompts) -> None:
        self.guided, model, guides = guided, guided.model, guided.scale != 1
        self.trunk = LanguageSession(model, model.condition(conditioning, guides), guides, 1)
        self.rows = len(conditioning)

    def buffers(self) -> Buffers:
        """See `ContinuousSession`."""
        return within("trunk", self.trunk.buffers())

    def following(self, tokens: Tensor, row: Tensor, first: Tensor, count: int, changed: int) -> Tensor:
        """See `CausalSession`: z (A, count, E), or with guidance (A, count, 2 E + 1), float32.

        It reads the same number of consecutive positions for every image; it starts earlier if the last ones would be
        beyond the image's end. Images that are not in `row` are finished: the values written for them are never read.
        """
        before, all_rows = self.trunk.prefix_length, len(row) == self.rows
        if not all_rows:
            tokens = tokens.new_zeros(self.rows, *tokens.shape[1:]).index_copy_(0, row, tokens)
            first = first.new_zeros(self.rows).index_copy_(0, row, first)
        end = before + self.guided.length
        nodes = min(changed + count - 1, end)
        start = (before + first - changed).clamp(0, end - nodes)
        positions = start[:, None] + torch.arange(nodes, device=start.device)
        hidden = self._read(tokens, positions)
        offsets = first[:, None] + torch.arange(count, device=first.device)
        index = (offsets + (before - 1) - start[:, None]).clamp(0, nodes - 1)
        z = self.guided.model.image_out_projector(take(hidden, self.trunk.both(index))).float()
        if self.guided.halves == 2:
            z = torch.cat([*z.chunk(2), self.guided.strength(offsets).unsqueeze(-1)], -1)
        return z if all_rows else z[row]

    def _read(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Outputs (R, n, dim) of the Transformer at consecutive positions (B, n), of the prefix and tokens."""
        trunk, model, before = self.trunk, self.guided.model, self.trunk.prefix_length
        values = self.guided.normed(take(tokens, (positions - before).clamp_min(0)))
        x = trunk.both(model.image_in_projector(values.to(model.norm.weight.dtype)))
        text = take(trunk.prefix.inputs, trunk.both(positions.clamp_max(before - 1)))
        x = torch.where(trunk.both(positions < before).unsqueeze(-1), text, x)
        row_positions = trunk.both(positions)
        return trunk.feed(x, row_positions, row_positions, TreeMask.chain(trunk.padding[:, 0], row_positions))

    # --- the head -----------------------------------------------------------------------------------------------------

    @property
    def head(self) -> NextStepTarget:
        """The parameters of `sampler`, apart from z."""
        return self.guided

    def moments(self, x: Tensor, index: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """See `ContinuousSession`."""
        s, net = self._steps(x.device), self.guided.net
        states, conditions, scale = self._split_condition(x, z)
        sinusoids = s.sinusoids[index].repeat(self.guided.halves, 1)
        dtype = net.input_proj.weight.dtype
        out = net(states.to(dtype), sinusoids, conditions.to(dtype)).float()
        return _moments(x, _velocity(out, scale), s.keep[index], s.pull[index], s.log_variance[index])

    def sampler(self, z: Tensor) -> Sampler:
        """See `ContinuousSession`."""
        s = self._steps(z.device)
        _, conditions, scale = self._split_condition(z[:, :0], z)
        output = self.guided.net.along(s.sinusoids, conditions)

        def step(x: Tensor, t: int) -> tuple[Tensor, Tensor]:
            v = _velocity(output(torch.cat([x] * self.guided.halves), t), scale)
            return _moments(x, v, s.keep[t], s.pull[t], s.log_variance[t])

        return step

    def _steps(self, device: torch.device) -> FlowSteps:
        return flow_steps(self.guided.sampling, device, self.guided.net.input_proj.weight.dtype)

    def _split_condition(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """States and conditions of both halves, and the strength, from conditions z (n, ...); see `following`."""
        if self.guided.halves == 1:
            return x, z, None
        half = z.shape[-1] // 2
        return torch.cat([x, x]), torch.cat([z[:, :half], z[:, half:-1]]), z[:, -1:]


def _velocity(out: Tensor, scale: Tensor | None) -> Tensor:
    """The guided velocity (n, D), from the network's outputs (with guidance, of both halves)."""
    if scale is None:
        return out
    v, unconditional = out.chunk(2)
    return unconditional + scale * (v - unconditional)


def _moments(x: Tensor, v: Tensor, keep: Tensor, pull: Tensor, log_variance: Tensor) -> tuple[Tensor, Tensor]:
    return keep * x + pull * v, log_variance.expand_as(x)
