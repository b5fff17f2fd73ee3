"""What every autoregressive target shares: a Transformer over a prefix and image tokens, and a decoding session on it.

A model file defines the differences: the prefix (`condition`), the rotary embedding of its positions (`rope`), the
tokens that its image grammar forces (`grammar`), and a token's id in its vocabulary (`ids`).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench.engine.masks import TreeMask
from specbench.engine.ops import Kernels, KVCache, gelu, linear
from specbench.engine.state import Buffer, Buffers, within
from specbench.models.transformer import Block, BlockConfig, RMSNorm, run_blocks


@dataclass
class Prefix:
    """The sequence before the image tokens, for R rows: inputs (R, P, dim); valid (R, P) bool, false on the padding at
    the left; ids (R, P) int64, the vocabulary ids that a drafter embeds instead."""

    inputs: Tensor
    valid: Tensor
    ids: Tensor

    def __len__(self) -> int:
        """Positions, P."""
        return self.inputs.shape[1]


@dataclass(frozen=True)
class Grammar:
    """Which tokens an image is made of. Tokens 0 .. codes - 1 are codes of the pixel tokenizer; forced (T,) int64 holds
    the one token that a position may hold, or -1 where any code may."""

    codes: int
    forced: Tensor

    def __len__(self) -> int:
        """Image tokens, T."""
        return len(self.forced)

    @property
    def free(self) -> Tensor:
        """The positions (codes an image,) int64 that hold codes, in raster order."""
        return (self.forced < 0).nonzero().flatten()


class Language(nn.Module):
    """A decoder-only Transformer. A subclass calls `_build` in its constructor and defines its prefix."""

    length: int  # image tokens
    width: int  # positions in a row of the image, raster order
    vocab_size: int  # tokens in the head's output
    grammar: Grammar | None = None  # None: every position may hold every token
    pads_see_all: bool = False  # see `LanguageSession`
    aux_hidden_layers: tuple[int, ...] = ()  # see `with_aux_hidden_layers`
    order: Any = None  # of a model that leaves raster order; see `decoding.planned.TokenOrder`
    skips_padding: bool = False  # whether positions count from the first valid one
    _ropes: tuple[int, Tensor] | None = None  # the rotary table that was made last, and the prefix that it is for

    tok_embeddings: nn.Embedding
    layers: nn.ModuleList
    norm: RMSNorm
    head_hidden: nn.Linear | None  # a head of two layers with a GELU between them: the first
    output: nn.Linear
    block: BlockConfig

    def _build(self, block: BlockConfig, n_layer: int, vocabulary: int, tokens: int, head_hidden: int = 0) -> None:
        """vocabulary: rows of the input table; tokens: rows of the head; head_hidden: the width between its two layers,
        which have biases (0: one layer, without)."""
        self._build_trunk(block, n_layer, vocabulary)
        self.head_hidden = nn.Linear(block.dim, head_hidden) if head_hidden else None
        self.output = nn.Linear(head_hidden or block.dim, tokens, bias=bool(head_hidden))
        self.vocab_size = tokens

    def _build_trunk(self, block: BlockConfig, n_layer: int, vocabulary: int) -> None:
        """All but the head."""
        self.block = block
        self.tok_embeddings = nn.Embedding(vocabulary, block.dim)
        self.layers = nn.ModuleList(Block(block) for _ in range(n_layer))
        self.norm = RMSNorm(block.dim, block.norm_eps)

    def ids(self, tokens: Tensor) -> Tensor:
        """The vocabulary ids of image tokens."""
        return tokens

    def embeddings(self) -> Tensor:
        """The input embeddings (vocab_size, dim) of the image's tokens."""
        weight = self.tok_embeddings.weight
        return weight[self.ids(torch.arange(self.vocab_size, device=weight.device))]

    def condition(self, conditioning: Any, guided: bool) -> Prefix:
        """The prefix of every row: conditional ones, then with guidance as many unconditional ones."""
        raise NotImplementedError

    def rope(self, positions: int, prefix: int) -> Tensor:
        """Rotary rows (at least `positions`, head_dim / 2, 2) of the positions of a sequence whose first `prefix` ones
        are the prefix; see `skips_padding`."""
        raise NotImplementedError

    def reserved(self, positions: int, prefix: int) -> Tensor:
        """`rope`, on the model's device, made once for sequences of this prefix that are not longer."""
        device = self.norm.weight.device
        known, table = self._ropes or (-1, None)
        if known != prefix or table is None or len(table) < positions or table.device != device:
            table = self.rope(positions, prefix).to(device)
            self._ropes = prefix, table
        return table

    def rope_at(self, table: Tensor, positions: Tensor, padding: Tensor) -> Tensor:
        """Rotary rows (R, n, head_dim / 2, 2) of sequence positions (R, n), from the table that `reserved` returned;
        padding (R, 1): positions before the first valid one."""
        return table[(positions - padding).clamp_min(0) if self.skips_padding else positions]

    def token_ids(self) -> Tensor | None:
        """The ids that `ids` looks up, on the model's device; None where tokens are their own."""
        return None

    def with_aux_hidden_layers(self, aux_hidden_layers: Sequence[int]) -> Self:
        """The same model, the same weights, whose hidden states are (..., dim * (1 + layers)): those after the
        final norm, then the outputs of the blocks numbered `aux_hidden_layers`, which drafters on several layers
        read."""
        other = copy(self)
        other.aux_hidden_layers = tuple(aux_hidden_layers)
        return other

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., vocab_size) of hidden states after the final norm; the auxiliary ones after them are ignored."""
        x = hidden[..., : self.block.dim]
        if self.head_hidden is not None:
            x = gelu(linear(x, self.head_hidden.weight, self.head_hidden.bias))
        return linear(x, self.output.weight, self.output.bias)

    @property
    def head_layers(self) -> list[nn.Linear]:
        return [self.output] if self.head_hidden is None else [self.head_hidden, self.output]

    def new_cache(self, rows: int, slots: int) -> KVCache:
        b = self.block
        return KVCache(self.cache_layers, rows, b.n_kv_heads, slots, b.head_dim, self.norm.weight)

    def hidden(
        self, x: Tensor, rope: Tensor, mask: Tensor | TreeMask, cache: KVCache | None, slots: Tensor | None
    ) -> Tensor:
        """Hidden states after the final norm, (R, n, dim), of inputs x at the positions of `rope`; keys go to `slots`.
        Wider with `aux_hidden_layers`."""
        out = run_blocks(self.layers, x, rope, mask, cache, slots, self.aux_hidden_layers)
        kernels = None if cache is None else cache.kernels
        if not self.aux_hidden_layers:
            return self.norm(out, kernels)
        top, aux = out.split((self.block.dim, out.shape[-1] - self.block.dim), -1)
        return torch.cat([self.norm(top, kernels), aux], -1)

    def at_fronts(
        self, session: LanguageSession, x: Tensor, rope: Tensor, mask: TreeMask, slots: Tensor, fronts: Any
    ) -> Tensor:
        """Hidden states (R, n, dim) that give the tokens at the targets of fronts, of the nodes' inputs x; the rest as
        of `hidden`. In raster order the nodes' own."""
        return self.hidden(x, rope, mask, session.cache, slots)

    @property
    def pass_weights(self) -> list[nn.Module]:
        """The modules whose weights a pass reads."""
        return [self.layers, self.norm, *self.head_layers]

    @property
    def cache_layers(self) -> int:
        """Layers whose keys and values are stored."""
        return len(self.layers)

    def uncached(self, prefix: Prefix, tokens: Tensor) -> Tensor:
        """Hidden states (R, P + n, dim) of a prefix and image tokens (R, n) in one pass, without a cache: those that a
        session has, and with gradients where they are enabled."""
        return self.in_one_pass(prefix, self.tok_embeddings(self.ids(tokens)))

    def in_one_pass(self, prefix: Prefix, inputs: Tensor) -> Tensor:
        """As `uncached`, of image tokens' inputs (R, n, dim)."""
        rows, before = prefix.inputs.shape[:2]
        x = torch.cat([prefix.inputs, inputs], 1)
        positions = torch.arange(x.shape[1], device=x.device)
        rope = self.reserved(x.shape[1], before)
        usable = F.pad(prefix.valid, (0, x.shape[1] - before), value=True)
        mask = ((positions <= positions[:, None]) & usable.unsqueeze(1)) | (positions == positions[:, None])
        if self.pads_see_all:
            mask = pads_see_all(mask.unsqueeze(1), prefix.valid, positions, usable & (positions < before))
        else:
            mask = mask.unsqueeze(1)
        padding = (~prefix.valid).sum(1, keepdim=True)
        return self.hidden(x, self.rope_at(rope, positions.expand(rows, -1), padding), mask, None, None)

    def open(self, conditioning: Any, rows: int, guided: bool, nodes: int) -> LanguageSession:
        if len(conditioning) != rows:
            raise ValueError(f"{len(conditioning)} prompts for {rows} rows")
        return LanguageSession(self, self.condition(conditioning, guided), guided, nodes)


def pads_see_all(mask: Tensor, valid: Tensor, keys: Tensor, known: Tensor) -> Tensor:
    """A mask (R, 1, n, keys), n >= P, of a prefix valid (R, P) and what follows, in which a padding position attends
    to the padding up to itself and to what is `known` (R, keys); keys (keys,) int64 are their numbers."""
    pad = ~valid
    behind = mask.shape[2] - pad.shape[1]
    rows = torch.arange(mask.shape[2], device=keys.device)[:, None]
    earlier = F.pad(pad, (0, len(keys) - pad.shape[1])).unsqueeze(1) & (keys <= rows)
    return torch.where(F.pad(pad, (0, behind))[:, None, :, None], (earlier | known.unsqueeze(1)).unsqueeze(1), mask)


class LanguageSession:
    """One prefilled batch: caches, prefix, and positions.

    A sequence is the prefix (P positions) followed by the image tokens; token j is position P + j. All but the last
    position of the prefix are prefilled: that position is the root of the first draft, and every step has the same
    form. With c committed tokens the root is position P - 1 + c, and draft node m of a step is stored in slot
    P - 1 + c + m until the accepted path is compacted.

    A padding position attends to itself alone. With the model's `pads_see_all` it attends to the padding up to itself
    and to every valid position of the prefix, as in LANTERN's code: only a drafter reads these hidden states, and
    LANTERN's were trained on them (golden llamagen_hf_lantern).
    """

    def __init__(self, model: Language, prefix: Prefix, guided: bool, nodes: int) -> None:
        self.model, self.guided = model, guided
        # what a caller gave is not overwritten with another batch
        self.prefix = prefix = Prefix(prefix.inputs, prefix.valid.clone(), prefix.ids.clone())
        self.length, self.width, self.vocab_size = model.length, model.width, model.vocab_size
        self.order = model.order
        self.codes = model.grammar.codes if model.grammar else model.vocab_size
        self.prefix_length = len(prefix)
        rows, device = len(prefix.inputs), prefix.inputs.device
        self.forced_tokens = model.grammar.forced.to(device) if model.grammar else None
        slots = self.prefix_length + self.length + 2 * nodes
        self.rope = model.reserved(slots, self.prefix_length)
        self.cache = model.new_cache(rows, slots)
        self.keys = torch.arange(slots, device=device)
        beyond = prefix.valid.new_ones(rows, slots - self.prefix_length)
        self.usable = torch.cat([prefix.valid, beyond], 1)  # (R, slots)
        self.padding = (~prefix.valid).sum(1, keepdim=True)  # (R, 1)
        self.prefix_hidden = self._prefill()  # (R, P - 1, dim)

    def _prefill(self) -> Tensor:
        through = self.prefix_length - (0 if self.model.pads_see_all else 1)  # the last one only as a key
        positions = torch.arange(through, device=self.keys.device).expand(len(self.usable), -1)
        mask = self.up_to(positions)
        if self.model.pads_see_all:
            mask = pads_see_all(mask, self.prefix.valid, self.keys, self.usable & (self.keys < through))
        return self.feed(self.prefix.inputs[:, :through], positions, positions, mask)[:, : self.prefix_length - 1]

    constants = ("keys", "forced_tokens", "rope")

    def buffers(self) -> Buffers:
        """What steps read or write (see `engine.state`)."""
        halves = 2 if self.guided else 1
        prefix, own = self.prefix, {name: getattr(self, name) for name in ("usable", "padding", "prefix_hidden")}
        rows = {"inputs": prefix.inputs, "valid": prefix.valid, "ids": prefix.ids, **own}
        return {
            **{name: Buffer(tensor, 0, halves) for name, tensor in rows.items()},
            **within("cache", self.cache.buffers(halves)),
        }

    def use(self, kernels: Kernels) -> None:
        """Compute later passes with these kernels."""
        self.cache.kernels = kernels

    def both(self, x: Tensor) -> Tensor:
        """Rows of a batch (B, ...) for the conditional and, with guidance, the unconditional half."""
        return torch.cat([x, x]) if self.guided else x

    def up_to(self, positions: Tensor) -> Tensor:
        """Mask (R, 1, n, slots): every usable slot up to and including the own position (R, n)."""
        own = positions.unsqueeze(-1)
        return (((self.keys <= own) & self.usable.unsqueeze(1)) | (self.keys == own)).unsqueeze(1)

    def forced(self, positions: Tensor) -> Tensor | None:
        """The one token that the image grammar allows at image positions (B, n), -1 where it allows every code; None
        without a grammar. Beyond the image's end the last position counts."""
        return None if self.forced_tokens is None else self.forced_tokens[positions.clamp(0, self.length - 1)]

    def constrain(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Guided logits (B, n, V) of the tokens at image positions (B, n), minus infinity where the grammar forbids."""
        forced = self.forced(positions)
        if forced is None:
            return logits
        token = torch.arange(self.vocab_size, device=logits.device)
        allowed = torch.where(forced.unsqueeze(-1) < 0, token < self.codes, token == forced.unsqueeze(-1))
        return logits.masked_fill(~allowed, -torch.inf)

    def ids_at(self, positions: Tensor, history: Tensor) -> Tensor:
        """Vocabulary ids (R, n) at sequence positions (B, n): of the prefix, then of the committed tokens (B, *)."""
        held = history.gather(1, (positions - self.prefix_length).clamp_min(0))
        at = self.both(positions)
        given = self.prefix.ids.gather(1, at.clamp_max(self.prefix_length - 1))
        return torch.where(at < self.prefix_length, given, self.both(self.model.ids(held)))

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Inputs (R, n, dim) of sequence positions (B, n): prefix entries where a position lies in the prefix, else
        tokens (B, n)."""
        x = self.both(self.model.tok_embeddings(self.model.ids(tokens)))
        index = self.both(positions.clamp_max(self.prefix_length - 1))
        given = self.prefix.inputs.gather(1, index.unsqueeze(-1).expand_as(x))
        return torch.where(self.both(positions < self.prefix_length).unsqueeze(-1), given, x)

    def feed(self, x: Tensor, positions: Tensor, slots: Tensor, mask: Tensor | TreeMask) -> Tensor:
        """Hidden states (R, n, dim) of inputs x; positions and slots (R, n), mask (R, 1, n, slots) or of a tree."""
        return self.model.hidden(x, self.model.rope_at(self.rope, positions, self.padding), mask, self.cache, slots)

    def feed_chain(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits (R, n, V) of consecutive tokens (B, n) at `positions` (B, n), each attending to all before it."""
        if self.cache.kernels is not None:
            x, rope, at, _ = self.cache.kernels.inputs(self, tokens, positions)
            mask = TreeMask.chain(self.padding[:, 0], at)
            return self.model.head(self.model.hidden(x, rope, mask, self.cache, at))
        at = self.both(positions)
        mask = TreeMask.chain(self.padding[:, 0], at)
        return self.model.head(self.feed(self.embed(tokens, positions), at, at, mask))

    def forward(self, tokens: Tensor, tree: Any, history: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (R, M, V) and hidden states (R, M, dim) of a draft tree's nodes."""
        if self.cache.kernels is not None:
            x, rope, slots, root = self.cache.kernels.inputs(self, tokens, tree.depth, count)
            mask = TreeMask(self.padding[:, 0], root, tree.ancestors)
            hidden = self.model.hidden(x, rope, mask, self.cache, slots)
            return self.model.head(hidden), hidden
        nodes = tokens.shape[1]
        root = count[:, None] + (self.prefix_length - 1)  # (B, 1)
        positions = root + tree.depth
        x = self.embed(tokens, positions)
        root, positions = self.both(root), self.both(positions)
        slots = root + torch.arange(nodes, device=root.device)
        mask = TreeMask(self.padding[:, 0], root[:, 0], tree.ancestors)
        hidden = self.feed(x, positions, slots, mask)
        return self.model.head(hidden), hidden

    def forward_at_positions(self, tokens: Tensor, fronts: Any, history: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, of tokens (B, K * n) at fronts of the image (see `decoding.parallel_positions`), each of which
        is stored in its slot and attends to the slots that it sees."""
        positions, slots = (x.flatten(1) + self.prefix_length for x in (fronts.positions, fronts.slots))
        start = self.padding[:, 0]
        mask = TreeMask(start, torch.full_like(start, self.prefix_length - 1), fronts.sees)
        if self.cache.kernels is not None:
            x, rope, _, _ = self.cache.kernels.inputs(self, tokens, positions)
        else:
            x = self.embed(tokens, positions)
            rope = self.model.rope_at(self.rope, self.both(positions), self.padding)
        hidden = self.model.at_fronts(self, x, rope, mask, self.both(slots), fronts)
        return self.model.head(hidden), hidden

    def commit(self, verdict: Any, tree: Any, count: Tensor) -> None:
        if tree.is_chain:  # a chain's accepted path is in its slots already
            return
        self.cache.keep(verdict.path, verdict.length, count, self.prefix_length - 1)
