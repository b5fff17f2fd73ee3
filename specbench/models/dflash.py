"""DFlash (arXiv 2602.06036): a small Transformer that drafts a block of tokens in one pass.

The block is the last committed token, called the anchor, and mask embeddings after it. Its slots attend to each other
in both directions, and to context features: the target's hidden states on several layers at the positions before the
anchor, joined by a linear layer and normed. Every layer computes keys and values of these features with its own
projections; the features are not updated from layer to layer, and get no further norm. Slot k predicts the token at its
own position, k positions after the anchor. Embedding, rotary embedding and output layer are the target's.

Facts: z-lab/dflash@44947fb, dflash/model.py (features, layer, order of norms, layers read); SpecForge@02ab617,
specforge/core/dflash.py (anchors and mask in training). Our choices: layers are built as in the target's family (the
published ones are Qwen3's); the mask is a learned vector, because image vocabularies have no mask token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench.engine.masks import TreeMask
from specbench.engine.ops import Kernels, KVCache, linear
from specbench.errors import UsageError
from specbench.models import eagle
from specbench.models.language import Language
from specbench.models.loading.drafter_networks import NetworkLoader
from specbench.models.supervision import Batch, DraftLogits, Training
from specbench.models.transformer import (
    Attention,
    Block,
    BlockConfig,
    RMSNorm,
    init_weights,
    rope_factors,
    rotate,
    run_blocks,
)

#: Number of layers of a new network, and of target layers that it reads.
LAYERS = 2
#: Maximal number of anchors per sequence in a training step (as in SpecForge).
ANCHORS = 512
#: Distance of the anchors in a validation. Rows of images have an even number of tokens, so all columns have anchors.
_STRIDE = 3


@dataclass(frozen=True)
class DFlashConfig:
    """block_size: slots of the largest block, the anchor included; aux_hidden_layers: the blocks of the target whose
    outputs are read; rotary, qk_norm: see `BlockConfig`."""

    dim: int
    n_head: int
    n_kv_head: int
    ffn_hidden: int
    n_layer: int
    block_size: int
    aux_hidden_layers: tuple[int, ...]
    norm_eps: float = 1e-6
    rotary: Literal["interleaved", "halves"] = "interleaved"
    qk_norm: int = 0

    @property
    def block(self) -> BlockConfig:
        return BlockConfig(
            self.dim,
            self.n_head,
            self.n_kv_head,
            self.ffn_hidden,
            self.norm_eps,
            self.rotary,
            self.qk_norm,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields, for a file."""
        return asdict(self)


class DFlashNetwork(nn.Module):
    def __init__(self, cfg: DFlashConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.fc = nn.Linear(len(cfg.aux_hidden_layers) * cfg.dim, cfg.dim, bias=False)
        self.hidden_norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.mask = nn.Parameter(torch.empty(cfg.dim))
        self.layers = nn.ModuleList(Block(cfg.block) for _ in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.dim, cfg.norm_eps)
        init_weights(self)
        nn.init.normal_(self.mask, std=0.02)

    def new_cache(self, rows: int, slots: int) -> KVCache:
        b = self.cfg.block
        return KVCache(len(self.layers), rows, b.n_kv_heads, slots, b.head_dim, self.fc.weight)

    def features(self, hidden: Tensor, kernels: Kernels | None = None) -> Tensor:
        """Context features (R, n, dim) from the target's hidden states on `aux_hidden_layers` (R, n, dim * layers)."""
        return self.hidden_norm(linear(hidden, self.fc.weight), kernels)

    def context_weights(self) -> list[Tensor]:
        """The weights (2 * kv heads * head_dim, dim) of every layer for keys and values."""
        c = self.cfg.block
        return [attention.wqkv.weight[c.n_heads * c.head_dim :] for attention in self._attentions()]

    def _attentions(self) -> list[Attention]:
        return [layer.get_submodule("attention") for layer in self.layers]  # type: ignore[misc]

    def context(self, features: Tensor, rope: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (R, heads, n, head_dim) of context features (R, n, dim), of every layer; rope
        (R or 1, n, head_dim / 2, 2): the rotary rows of their positions."""
        c = self.cfg.block
        factors, keys_values = rope_factors(rope, c.rotary), []
        for attention, weight in zip(self._attentions(), self.context_weights(), strict=True):
            k, v = linear(features, weight).unflatten(-1, (2, c.n_kv_heads, c.head_dim)).unbind(-3)
            k = rotate(attention.k_norm(k) if c.qk_norm else k, factors, c.rotary)
            keys_values.append((k.transpose(1, 2), v.transpose(1, 2)))
        return keys_values

    def blocks(self, anchors: Tensor, size: int) -> Tensor:
        """Inputs (R, n * size, dim) of n blocks of `size` slots: the anchor's embedding, from `anchors` (R, n, dim),
        then masks."""
        masks = self.mask.to(anchors.dtype).expand(*anchors.shape[:2], size - 1, -1)
        return torch.cat([anchors.unsqueeze(2), masks], 2).flatten(1, 2)

    def hidden(self, x: Tensor, rope: Tensor, mask: Tensor | TreeMask, cache: KVCache, slots: Tensor) -> Tensor:
        """The input of the target's output layer (R, n, dim), for blocks x (R, n, dim). Their keys are stored in
        `slots` (R, n) of the cache, which has the context's keys."""
        return self.norm(run_blocks(self.layers, x, rope, mask, cache, slots), cache.kernels)


class _ContextCache(KVCache):
    """Keys and values of the context, in every layer, with gradients. The blocks of a pass, with `size` slots each,
    attend to the context where the mask allows it, and to themselves.

    A slot only has the keys of the context and of its block. With one mask over the keys of all blocks, it would have
    several times as many.
    """

    def __init__(self, context: Sequence[tuple[Tensor, Tensor]], size: int) -> None:
        self._context, self._size = context, size

    def attend(self, layer: int, slots: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """mask (R, 1, n, context): which context positions are attended to."""
        assert mask is not None
        groups = q.shape[1] // k.shape[1]
        # norms of queries and keys return float32, but values may have another dtype
        before_k, before_v, k, v = (x.to(q).repeat_interleave(groups, 1) for x in (*self._context[layer], k, v))
        k, v = (x.unflatten(2, (-1, self._size)) for x in (k, v))
        with torch.autocast(q.device.type, enabled=False):  # it would move the softmax to float32
            scaled = q * q.shape[-1] ** -0.5
            earlier = (scaled @ before_k.transpose(-1, -2)).masked_fill(~mask, -1e4)
            inside = scaled.unflatten(2, (-1, self._size)) @ k.transpose(-1, -2)
            weights = torch.cat([earlier, inside.flatten(2, 3)], -1).softmax(-1)
            of_context, of_block = weights.split((before_k.shape[2], self._size), -1)
            block_output = of_block.unflatten(2, (-1, self._size)) @ v
            return of_context @ before_v + block_output.flatten(2, 3)


def aux_hidden_layers(layers: int, count: int) -> tuple[int, ...]:
    """The `count` blocks that are read in a target with `layers` blocks: evenly spaced from the second block to the
    third from last, as in the released code."""
    if count == 1:
        return (layers // 2,)
    last = max(1, layers - 3)
    return tuple(sorted({min(layers - 1, round(1 + i * (last - 1) / (count - 1))) for i in range(count)}))


def like_shape(target: Language, block_size: int, layers: int = LAYERS) -> DFlashConfig:
    """The configuration of a network that fits a target. Its layers have the target's shape; the width of the
    feed-forward part gives the network as many parameters as an EAGLE-1 drafter whose token table only has the image's
    tokens. (The network has no token table and no joining layer.)"""
    b = target.block
    cfg = DFlashConfig(
        dim=b.dim,
        n_head=b.n_heads,
        n_kv_head=b.n_kv_heads,
        ffn_hidden=1,
        n_layer=layers,
        block_size=block_size,
        aux_hidden_layers=aux_hidden_layers(len(target.layers), layers),
        norm_eps=b.norm_eps,
        rotary=b.rotary,
        qk_norm=b.qk_norm,
    )
    with torch.device("meta"):
        eagle_size, size = (
            sum(p.numel() for p in network.parameters())
            for network in (eagle.EagleNetwork(eagle.like_shape(target)), DFlashNetwork(cfg))
        )
    of_text = (len(target.tok_embeddings.weight) - target.vocab_size) * b.dim
    return replace(cfg, ffn_hidden=max(1, 1 + (eagle_size - of_text - size) // (3 * b.dim * layers)))


def like_target(target: Language, block_size: int = 16, layers: int = LAYERS) -> DFlashNetwork:
    """An untrained network that fits a target. Its last norm starts as the target's."""
    network = DFlashNetwork(like_shape(target, block_size, layers))
    with torch.no_grad():
        network.norm.weight.copy_(target.norm.weight)
    return network


class DFlashLoader(NetworkLoader[DFlashNetwork]):
    title, seed, module, config = "DFlash network", 7, DFlashNetwork, DFlashConfig

    def untrained(self, heads: int = 15) -> DFlashNetwork:
        return like_target(self.target, 1 + heads)

    def fits(self, network: DFlashNetwork) -> bool:
        like, c = self.target.block, network.cfg
        same = (c.dim, c.block.head_dim, c.rotary) == (like.dim, like.head_dim, like.rotary)
        return same and max(c.aux_hidden_layers) < len(self.target.layers)

    def read_official(self, path: Path) -> DFlashNetwork:
        raise UsageError(
            f"{path} holds no DFlash network of specbench, and image models have no published one: train one with"
            " `specbench train drafter=dflash`"
        )


class DFlashTraining(Training):
    """Blocks at random anchors, which are the same for all sequences of a step. A block attends to the context before
    its anchor, and to itself."""

    network: DFlashNetwork

    @property
    def evaluated(self) -> int:  # type: ignore[override]
        return self.network.cfg.block_size - 1

    def depth(self, unroll_steps: int) -> int:
        return self.network.cfg.block_size - 1

    def anchors(self, length: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
        """Anchors (n,) int64 among the tokens of an image that have a next token: a random eighth of these or, in a
        validation, every third."""
        if generator is None:
            return torch.arange(0, length - 1, _STRIDE, device=device)
        count = min(ANCHORS, max(1, (length - 1) // 8))
        order = torch.randperm(length - 1, generator=generator, device=generator.device)
        return order[:count].sort().values.to(device)

    def draft(self, batch: Batch, depth: int, generator: torch.Generator | None = None) -> Iterator[DraftLogits]:
        network, size, length = self.network, self.network.cfg.block_size, batch.tokens.shape[1]
        anchors = self.anchors(length, batch.tokens.device, generator)
        x = network.blocks(self.embedded(batch, anchors), size)
        hidden = network.hidden(x, *self._surroundings(batch, anchors, size))
        drafted = hidden.unflatten(1, (len(anchors), size))
        for k in range(1, min(depth + 1, size)):
            inside = anchors + k < length
            yield DraftLogits(drafted[:, inside, k], (anchors + k)[inside], head=self.head.logits)

    def embedded(self, batch: Batch, anchors: Tensor) -> Tensor:
        """The target's embeddings (N, n, dim) of the tokens at image positions `anchors`."""
        ids = batch.ids[:, batch.valid.shape[1] - 1 + anchors]  # ids begin at position 1
        return self.head.target.tok_embeddings(ids).to(self.dtype)

    def _surroundings(self, batch: Batch, anchors: Tensor, size: int) -> tuple[Tensor, Tensor, KVCache, Tensor]:
        """The arguments of `DFlashNetwork.hidden` after x: rotary rows of all blocks, mask of the context, its keys and
        values, and slots (which this cache does not use)."""
        target, network = self.head.target, self.network
        before, entries = batch.valid.shape[1], batch.hidden.shape[1]
        positions, padding = torch.arange(entries, device=anchors.device), (~batch.valid).sum(1, keepdim=True)
        root = before + anchors
        block_positions = (root[:, None] + torch.arange(size, device=root.device)).flatten()
        table = target.reserved(before + target.length + size, before)

        def rope(at: Tensor) -> Tensor:
            return target.rope_at(table, at.expand(len(padding), -1), padding)

        hidden = batch.hidden[..., target.block.dim :].to(self.dtype)
        context = network.context(network.features(hidden), rope(positions))
        usable = F.pad(batch.valid, (0, entries - before), value=True)
        earlier = (positions < root.repeat_interleave(size)[:, None]) & usable.unsqueeze(1)
        return rope(block_positions), earlier.unsqueeze(1), _ContextCache(context, size), block_positions
