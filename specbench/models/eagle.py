"""The EAGLE drafter: Transformer layers (usually one) that predict the target's next hidden state from (hidden state,
next token).

Entry e of its sequence pairs the target's hidden state at position e with the token at position e + 1. Its output
predicts the hidden state at position e + 1; the target's head maps it to a distribution. The last layer has no norm
after it. The published drafters differ in three ways (reference README (11) to (17)). LlamaGen's drafter rotates an
entry by the grid cell of its token, has no norm before its first layer, and attends to the padding of the prompt; every
prefix position counts as token 0. Chameleon's drafter rotates it by the target's position e, has this norm, and does
not attend to the padding. All further layers have their norms in both families (goldens of the reference, notes).

With `aux_hidden_layers` it is a drafter in the style of EAGLE-3 (Li et al. 2025): it reads the target's hidden states
on several layers, fused into one vector. It is trained on its own outputs, which are normed before the head reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench.engine.masks import TreeMask
from specbench.engine.ops import Kernels, KVCache, attention, linear
from specbench.models.language import Language
from specbench.models.llamagen import LlamaGen
from specbench.models.supervision import Batch, DraftLogits, Training
from specbench.models.transformer import Block, BlockConfig, RMSNorm, grid_rotary, init_weights, line_rotary, run_blocks
from specbench.models.unified import Unified


@dataclass(frozen=True)
class EagleConfig:
    """cls_token_num and block_size: numbers of positions of the prefix and of the image, which size the grid
    (block_size = 0: `line` positions, without a grid). input_norm: whether the first layer has a norm before its
    attention, like all other layers; fc_bias: whether the layer that joins token and hidden state has a bias."""

    dim: int
    n_head: int
    ffn_hidden: int
    vocab_size: int
    cls_token_num: int
    block_size: int
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    n_kv_head: int | None = None
    input_norm: bool = False
    qk_norm: int = 0
    #: Blocks of the target whose outputs are read in addition to its hidden states.
    aux_hidden_layers: tuple[int, ...] = ()
    n_layer: int = 1
    fc_bias: bool = True

    @classmethod
    def from_dict(cls, taps: tuple[int, ...] = (), **fields: Any) -> EagleConfig:
        """The inverse of `to_dict`. Files call the auxiliary hidden layers `taps`."""
        return cls(aux_hidden_layers=taps, **fields)

    @property
    def line(self) -> bool:
        """Whether positions count along the sequence and padding is not attended to; otherwise they are cells of the
        image's grid."""
        return self.block_size == 0

    @property
    def block(self) -> BlockConfig:
        rotary = "halves" if self.line else "interleaved"
        return BlockConfig(
            self.dim,
            self.n_head,
            self.n_kv_head or self.n_head,
            self.ffn_hidden,
            self.norm_eps,
            rotary,  # type: ignore[arg-type]
            self.qk_norm,
        )

    def to_dict(self) -> dict:
        """The fields, for a file. Fields that were added later are omitted at their defaults, because rows name weights
        by the digest of their file."""
        values = {{"aux_hidden_layers": "taps"}.get(name, name): value for name, value in asdict(self).items()}
        for name, default in (("n_layer", 1), ("fc_bias", True)):
            if values[name] == default:
                del values[name]
        return values


class EagleNetwork(nn.Module):
    def __init__(self, cfg: EagleConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.dim)
        self.fc = nn.Linear(2 * cfg.dim, cfg.dim, bias=cfg.fc_bias)
        self.layers = nn.ModuleList([Block(cfg.block, cfg.input_norm or i > 0) for i in range(cfg.n_layer)])
        if cfg.aux_hidden_layers:
            self.fuse = nn.Linear((1 + len(cfg.aux_hidden_layers)) * cfg.dim, cfg.dim, bias=False)
            self.norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self._rope: Tensor | None = None
        init_weights(self)

    def rope(self, entries: int = 0) -> Tensor:
        """Rotary rows of at least `entries` entries. On the grid, an entry is rotated by the cell of its token:
        cls_token_num - 1 zero rows, then the cells; beyond the end, the last cell."""
        c = self.cfg
        positions = 0 if c.line else c.cls_token_num - 1 + c.block_size
        rows = max(entries, positions)
        if self._rope is None or len(self._rope) < rows or self._rope.device != self.fc.weight.device:
            if c.line:
                table = line_rotary(rows, c.block.head_dim, c.rope_base)
            else:
                side = int(c.block_size**0.5)
                table = grid_rotary(side, c.block.head_dim, c.cls_token_num - 1, rows - positions, c.rope_base)
            self._rope = table.to(self.fc.weight.device)
        return self._rope

    def rope_at(self, entries: Tensor, padding: Tensor) -> Tensor:
        """Rotary rows (R, n, head_dim / 2, 2) of entries (R, n) int64; padding (R, 1): positions before the prompt."""
        return self.rope()[(entries - padding).clamp_min(0) if self.cfg.line else entries]

    def new_cache(self, rows: int, slots: int) -> KVCache:
        b = self.cfg.block
        return KVCache(len(self.layers), rows, b.n_kv_heads, slots, b.head_dim, self.fc.weight)

    def hidden(
        self, ids: Tensor, known: Tensor, rope: Tensor, mask: Tensor | TreeMask, cache: KVCache, slots: Tensor
    ) -> Tensor:
        """Predicted hidden states (rows, n, dim) of entries with these vocabulary ids (rows, n) and with the `known`
        vectors of the previous positions: the target's hidden states (wider with `aux_hidden_layers`), or the drafter's
        outputs (rows, n, dim). rope: see `rope_at`; keys are stored in `slots`."""
        return run_blocks(self.layers, self._enter(ids, known), rope, mask, cache, slots)

    def hidden_of_joined(self, x: Tensor, rope: Tensor, mask: Any, cache: KVCache, slots: Tensor) -> Tensor:
        """Like `hidden`, from x (rows, n, 2 dim): embeddings joined with the result of `reduced`."""
        return run_blocks(self.layers, linear(x, self.fc.weight, self.fc.bias), rope, mask, cache, slots)

    def reduced(self, known: Tensor) -> Tensor:
        """Hidden states (..., dim) of the target, also from wider ones (..., dim * (1 + layers))."""
        dim = self.cfg.dim
        if known.shape[-1] == dim:
            return known
        # residual streams grow from layer to layer, so each is scaled to unit size
        parts = [known[..., :dim], *(F.rms_norm(x, (dim,)) for x in known[..., dim:].split(dim, -1))]
        return linear(torch.cat(parts, -1), self.fuse.weight)

    def _enter(self, ids: Tensor, known: Tensor) -> Tensor:
        return linear(torch.cat([self.embed_tokens(ids), self.reduced(known)], -1), self.fc.weight, self.fc.bias)

    def readable(self, features: Tensor, kernels: Kernels | None = None) -> Tensor:
        """Converts outputs (..., dim) to inputs of the target's head."""
        return self.norm(features, kernels) if self.cfg.aux_hidden_layers else features

    def unroll(self, hidden: Tensor, ids: Tensor, valid: Tensor, unroll_steps: int = 1) -> Iterator[Tensor]:
        """Teacher forcing over whole sequences: `readable` outputs (N, S - 1, dim) of each unroll step.

        hidden (N, S, width): the target's hidden states at positions 0 .. S - 1; ids (N, S - 1) int64: the tokens at
        positions 1 .. S - 1; valid (N, P) bool: valid positions of the prefix. In the first unroll step, an entry
        attends to the target's hidden states before it. In unroll step j (from 0), it attends to the target's hidden
        states up to j entries before itself and, as in a draft of this depth, to the outputs of the previous steps
        (EAGLE-3's training-time test). The first j entries are undefined.
        """
        rows, entries = ids.shape
        position = torch.arange(entries, device=ids.device)
        usable = torch.ones(rows, entries, dtype=torch.bool, device=ids.device)
        padding = (~valid).sum(1, keepdim=True)
        self.rope(entries)
        rope = self.rope_at(position.expand(rows, -1), padding)
        if self.cfg.line:
            usable[:, : valid.shape[1] - 1] = valid[:, :-1]
        else:
            usable, rope = usable[:1], rope[:1]
        distance = position[:, None] - position  # (entries, keys): how far a key is before its entry
        cache, known = _UnrollCache(), hidden[:, :-1]
        for j in range(unroll_steps):
            mask = (distance >= j) & usable[:, None]
            if j == 0:
                mask = mask | (distance == 0)
            out = run_blocks(
                self.layers, self._enter(ids, known), rope, mask.unsqueeze(1), cache, position.expand(rows, -1)
            )
            yield self.readable(out)
            known = F.pad(out[:, :-1], (0, 0, 1, 0))


class _UnrollCache(KVCache):
    """Keys and values of every layer and of all unroll steps so far (see `EagleNetwork.unroll`), with gradients.

    An entry attends to one key of each later unroll step: from step j, to entry e - j + i of step i. Each costs one
    product of vectors. With one mask over the keys of all steps, each would cost a product of matrices.
    """

    def __init__(self) -> None:
        self._stored: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attend(self, layer: int, slots: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """mask: which keys of the first unroll step are attended to."""
        groups = q.shape[1] // k.shape[1]
        # norms of queries and keys return float32, but values may have another dtype
        stored = self._stored.setdefault(layer, [])
        stored.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1).to(q.dtype)))
        (first_k, first_v), *later = stored
        if not later:
            return attention(q, k, v, mask)
        assert mask is not None
        steps = len(later)
        moved = [(_shifted(k, steps - i), _shifted(v, steps - i)) for i, (k, v) in enumerate(later, start=1)]
        with torch.autocast(q.device.type, enabled=False):  # it would move the softmax to float32
            scaled = q * q.shape[-1] ** -0.5
            scores = (scaled @ first_k.transpose(-1, -2)).masked_fill(~mask, -1e4)
            later_scores = [(scaled * k).sum(-1, keepdim=True) for k, _ in moved]
            for i, score in enumerate(later_scores[:-1], start=1):  # no entry exists before the start of the image
                later_scores[i - 1] = torch.cat(
                    [torch.full_like(score[:, :, : steps - i], -1e4), score[:, :, steps - i :]], 2
                )
            weights = torch.cat([scores, *later_scores], -1).softmax(-1)
            entries = first_k.shape[2]
            out = weights[..., :entries] @ first_v
            for i, (_, v) in enumerate(moved):
                out = out + weights[..., entries + i, None] * v
        return out


def _shifted(x: Tensor, by: int) -> Tensor:
    """x (rows, heads, n, dim) with entry e - by at index e."""
    return F.pad(x[:, :, : x.shape[2] - by], (0, 0, by, 0))


def like_shape(target: Language, aux_hidden_layers: tuple[int, ...] = ()) -> EagleConfig:
    """The configuration of a drafter that fits a target, built like the published drafters of its family.

    With `aux_hidden_layers` it has as many parameters as without, except for a norm: the feed-forward part is smaller
    by the size of the fusing layer.
    """
    if isinstance(target, LlamaGen):
        c = target.cfg
        like = EagleConfig(c.dim, c.n_head, c.ffn_hidden, c.vocab_size, c.prefix_length, c.block_size, c.rope_base)
    elif isinstance(target, Unified):
        u = target.cfg
        like = EagleConfig(
            dim=u.dim,
            n_head=u.n_head,
            ffn_hidden=u.ffn_hidden,
            vocab_size=u.vocab_size,
            cls_token_num=0,
            block_size=0,
            rope_base=u.rope_base,
            norm_eps=u.norm_eps,
            n_kv_head=u.n_kv_head,
            input_norm=True,
            qk_norm=u.qk_norm,
        )
    else:
        raise TypeError(f"no EAGLE drafter exists for {type(target).__name__}")
    if not aux_hidden_layers:
        return like
    return replace(
        like,
        aux_hidden_layers=aux_hidden_layers,
        ffn_hidden=max(1, like.ffn_hidden - like.dim * (1 + len(aux_hidden_layers)) // 3),
    )


def default_aux_hidden_layers(target: Language) -> tuple[int, ...]:
    """A low and a middle layer of a target; the hidden states after the last layer are always read."""
    layers = len(target.layers)
    return layers // 4, layers // 2


def like_target(target: Language, aux_hidden_layers: tuple[int, ...] = ()) -> EagleNetwork:
    """An untrained drafter that fits a target; its token table starts as the target's."""
    eagle = EagleNetwork(like_shape(target, aux_hidden_layers))
    with torch.no_grad():
        eagle.embed_tokens.weight.copy_(target.tok_embeddings.weight)
    return eagle


class EagleTraining(Training):
    network: EagleNetwork
    evaluated = 3

    def draft(self, batch: Batch, depth: int, generator: torch.Generator | None = None) -> Iterator[DraftLogits]:
        start = batch.valid.shape[1] - 1  # the first entry with an image token
        outputs = self.network.unroll(batch.hidden.to(self.dtype), batch.ids, batch.valid, depth)
        for j, out in enumerate(outputs):
            features = out[:, start + j :]
            yield DraftLogits.after(1 + j, features, features, self.head.logits)

    def depth(self, unroll_steps: int) -> int:
        return unroll_steps

    def freeze(self) -> None:
        self.network.embed_tokens.requires_grad_(False)
