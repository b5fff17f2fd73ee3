"""The base class of autoregressive targets: a Transformer over a prefix and image tokens, and its decoding session.

A model file defines the differences: the prefix (`condition`), the rotary embedding of positions (`rope`), the tokens
that the image grammar forces (`grammar`), and the vocabulary ids of tokens (`ids`).
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
    """The sequence before the image tokens, for R rows: inputs (R, P, dim); valid (R, P) bool, false at the left
    padding; ids (R, P) int64, the vocabulary ids that a drafter embeds instead of the inputs."""

    inputs: Tensor
    valid: Tensor
    ids: Tensor

    def __len__(self) -> int:
        """The number of positions, P."""
        return self.inputs.shape[1]


@dataclass(frozen=True)
class Grammar:
    """The tokens of an image. Tokens 0 .. codes - 1 are codes of the pixel tokenizer. forced (T,) int64: the only
    allowed token of a position, or -1 if all codes are allowed."""

    codes: int
    forced: Tensor

    def __len__(self) -> int:
        """The number of image tokens, T."""
        return len(self.forced)

    @property
    def free(self) -> Tensor:
        """The positions (codes per image,) int64 that have codes, in raster order."""
        return (self.forced < 0).nonzero().flatten()


class Language(nn.Module):
    """A decoder-only Transformer. A subclass calls `_build` in its constructor and defines its prefix."""

    length: int  # image tokens
    width: int  # positions in a row of the image, raster order
    vocab_size: int  # tokens in the head's output
    grammar: Grammar | None = None  # None: all tokens are allowed at all positions
    pads_see_all: bool = False  # see `LanguageSession`
    aux_hidden_layers: tuple[int, ...] = ()  # see `with_aux_hidden_layers`
    skips_padding: bool = False  # whether positions count from the first valid one
    _ropes: tuple[int, Tensor] | None = None  # the last rotary table, and its length of the prefix

    tok_embeddings: nn.Embedding
    layers: nn.ModuleList
    norm: RMSNorm
    head_hidden: nn.Linear | None  # the first layer of a head with two layers and a GELU between them
    output: nn.Linear
    block: BlockConfig

    def _build(self, block: BlockConfig, n_layer: int, vocabulary: int, tokens: int, head_hidden: int = 0) -> None:
        """vocabulary: rows of the input table; tokens: rows of the head; head_hidden: the width between the head's two
        layers, which have biases (0: one layer without bias)."""
        self.block = block
        self.tok_embeddings = nn.Embedding(vocabulary, block.dim)
        self.layers = nn.ModuleList(Block(block) for _ in range(n_layer))
        self.norm = RMSNorm(block.dim, block.norm_eps)
        self.head_hidden = nn.Linear(block.dim, head_hidden) if head_hidden else None
        self.output = nn.Linear(head_hidden or block.dim, tokens, bias=bool(head_hidden))
        self.vocab_size = tokens

    def ids(self, tokens: Tensor) -> Tensor:
        """The vocabulary ids of image tokens."""
        return tokens

    def embeddings(self) -> Tensor:
        """The input embeddings (vocab_size, dim) of the image's tokens."""
        weight = self.tok_embeddings.weight
        return weight[self.ids(torch.arange(self.vocab_size, device=weight.device))]

    def condition(self, conditioning: Any, guided: bool) -> Prefix:
        """The prefix of every row: conditional rows and, with guidance, as many unconditional rows after them."""
        raise NotImplementedError

    def rope(self, positions: int, prefix: int) -> Tensor:
        """Rotary rows (at least `positions`, head_dim / 2, 2) of the positions of a sequence; the first `prefix`
        positions are the prefix. See `skips_padding`."""
        raise NotImplementedError

    def reserved(self, positions: int, prefix: int) -> Tensor:
        """The result of `rope` on the model's device. It is computed once for all sequences with this prefix that are
        not longer."""
        device = self.norm.weight.device
        cached_prefix, table = self._ropes or (-1, None)
        if cached_prefix != prefix or table is None or len(table) < positions or table.device != device:
            table = self.rope(positions, prefix).to(device)
            self._ropes = prefix, table
        return table

    def rope_at(self, table: Tensor, positions: Tensor, padding: Tensor) -> Tensor:
        """Rotary rows (R, n, head_dim / 2, 2) of sequence positions (R, n), from the table of `reserved`. padding (R,
        1): number of positions before the first valid one."""
        return table[(positions - padding).clamp_min(0) if self.skips_padding else positions]

    def token_ids(self) -> Tensor | None:
        """The table of `ids`, on the model's device. None: the tokens are the ids."""
        return None

    def with_aux_hidden_layers(self, aux_hidden_layers: Sequence[int]) -> Self:
        """The same model and weights, with hidden states (..., dim * (1 + layers)): after the final norm, then the
        outputs of the blocks with the numbers `aux_hidden_layers`, for drafters that read several layers."""
        other = copy(self)
        other.aux_hidden_layers = tuple(aux_hidden_layers)
        return other

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., vocab_size) of hidden states after the final norm. Auxiliary hidden states after them are
        ignored."""
        x = hidden[..., : self.block.dim]
        if self.head_hidden is not None:
            x = gelu(linear(x, self.head_hidden.weight, self.head_hidden.bias))
        return linear(x, self.output.weight, self.output.bias)

    @property
    def head_layers(self) -> list[nn.Linear]:
        return [self.output] if self.head_hidden is None else [self.head_hidden, self.output]

    def new_cache(self, rows: int, slots: int) -> KVCache:
        b = self.block
        return KVCache(len(self.layers), rows, b.n_kv_heads, slots, b.head_dim, self.norm.weight)

    def hidden(
        self, x: Tensor, rope: Tensor, mask: Tensor | TreeMask, cache: KVCache | None, slots: Tensor | None
    ) -> Tensor:
        """Hidden states (R, n, dim) after the final norm, of inputs x at the positions of `rope`. Keys are stored in
        `slots`. Wider with `aux_hidden_layers`."""
        out = run_blocks(self.layers, x, rope, mask, cache, slots, self.aux_hidden_layers)
        kernels = None if cache is None else cache.kernels
        if not self.aux_hidden_layers:
            return self.norm(out, kernels)
        top, aux = out.split((self.block.dim, out.shape[-1] - self.block.dim), -1)
        return torch.cat([self.norm(top, kernels), aux], -1)

    @property
    def pass_weights(self) -> list[nn.Module]:
        """The modules whose weights a pass reads."""
        return [self.layers, self.norm, *self.head_layers]

    def uncached(self, prefix: Prefix, tokens: Tensor) -> Tensor:
        """Hidden states (R, P + n, dim) of a prefix and image tokens (R, n), in one pass without a cache. They equal
        the hidden states of a session, and have gradients if these are enabled."""
        rows, before = prefix.inputs.shape[:2]
        x = torch.cat([prefix.inputs, self.tok_embeddings(self.ids(tokens))], 1)
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
    """A mask (R, 1, n, keys), n >= P, of a prefix with `valid` (R, P) positions and the tokens after it. A padding
    position attends to the padding up to itself, and to the keys that are `known` (R, keys). keys (keys,) int64: the
    numbers of the keys."""
    pad = ~valid
    after = mask.shape[2] - pad.shape[1]
    rows = torch.arange(mask.shape[2], device=keys.device)[:, None]
    earlier = F.pad(pad, (0, len(keys) - pad.shape[1])).unsqueeze(1) & (keys <= rows)
    return torch.where(F.pad(pad, (0, after))[:, None, :, None], (earlier | known.unsqueeze(1)).unsqueeze(1), mask)


class LanguageSession:
    """One prefilled batch: caches, prefix, and positions.

    A sequence is the prefix (P positions) followed by the image tokens; token j has position P + j. All positions of
    the prefix except the last are prefilled. The last one is the root of the first draft, so that all steps have the
    same form. With c committed tokens, the root is position P - 1 + c. Draft node m of a step is stored in slot P - 1 +
    c + m until the accepted path is compacted.

    A padding position attends only to itself. With the model's `pads_see_all`, it attends to the padding up to itself
    and to all valid positions of the prefix, as in LANTERN's code. Only drafters read these hidden states, and
    LANTERN's drafters were trained on them (golden llamagen_hf_lantern).
    """

    def __init__(self, model: Language, prefix: Prefix, guided: bool, nodes: int) -> None:
        self.model, self.guided = model, guided
        # copies, because these tensors are overwritten with another batch
        self.prefix = prefix = Prefix(prefix.inputs, prefix.valid.clone(), prefix.ids.clone())
        self.length, self.width, self.vocab_size = model.length, model.width, model.vocab_size
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
        # With pads_see_all, the last position only gives a key.
        through = self.prefix_length - (0 if self.model.pads_see_all else 1)
        positions = torch.arange(through, device=self.keys.device).expand(len(self.usable), -1)
        mask = self.up_to(positions)
        if self.model.pads_see_all:
            mask = pads_see_all(mask, self.prefix.valid, self.keys, self.usable & (self.keys < through))
        return self.feed(self.prefix.inputs[:, :through], positions, positions, mask)[:, : self.prefix_length - 1]

    constants = ("keys", "forced_tokens", "rope")

    def buffers(self) -> Buffers:
        """The tensors that steps read or write (see `engine.state`)."""
        halves = 2 if self.guided else 1
        prefix, session_rows = (
            self.prefix,
            {name: getattr(self, name) for name in ("usable", "padding", "prefix_hidden")},
        )
        rows = {"inputs": prefix.inputs, "valid": prefix.valid, "ids": prefix.ids, **session_rows}
        return {
            **{name: Buffer(tensor, 0, halves) for name, tensor in rows.items()},
            **within("cache", self.cache.buffers(halves)),
        }

    def use(self, kernels: Kernels) -> None:
        """Use these kernels for later passes."""
        self.cache.kernels = kernels

    def both(self, x: Tensor) -> Tensor:
        """The rows of a batch (B, ...), repeated for the unconditional half if guidance is used."""
        return torch.cat([x, x]) if self.guided else x

    def up_to(self, positions: Tensor) -> Tensor:
        """Mask (R, 1, n, slots): all usable slots up to each of `positions` (R, n), and the position itself."""
        query = positions.unsqueeze(-1)
        return (((self.keys <= query) & self.usable.unsqueeze(1)) | (self.keys == query)).unsqueeze(1)

    def forced(self, positions: Tensor) -> Tensor | None:
        """The only token that the image grammar allows at image positions (B, n), -1 where it allows all codes; None
        without a grammar. Positions beyond the image's end count as the last position."""
        return None if self.forced_tokens is None else self.forced_tokens[positions.clamp(0, self.length - 1)]

    def constrain(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Guided logits (B, n, V) at image positions (B, n), with minus infinity for tokens that the grammar
        forbids."""
        forced = self.forced(positions)
        if forced is None:
            return logits
        token = torch.arange(self.vocab_size, device=logits.device)
        allowed = torch.where(forced.unsqueeze(-1) < 0, token < self.codes, token == forced.unsqueeze(-1))
        return logits.masked_fill(~allowed, -torch.inf)

    def ids_at(self, positions: Tensor, history: Tensor) -> Tensor:
        """Vocabulary ids (R, n) at sequence positions (B, n): of the prefix, then of the committed tokens (B, *)."""
        tokens = history.gather(1, (positions - self.prefix_length).clamp_min(0))
        row_positions = self.both(positions)
        prefix_ids = self.prefix.ids.gather(1, row_positions.clamp_max(self.prefix_length - 1))
        return torch.where(row_positions < self.prefix_length, prefix_ids, self.both(self.model.ids(tokens)))

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Inputs (R, n, dim) of sequence positions (B, n): the prefix's inputs for positions of the prefix, otherwise
        tokens (B, n)."""
        x = self.both(self.model.tok_embeddings(self.model.ids(tokens)))
        index = self.both(positions.clamp_max(self.prefix_length - 1))
        prefix_inputs = self.prefix.inputs.gather(1, index.unsqueeze(-1).expand_as(x))
        return torch.where(self.both(positions < self.prefix_length).unsqueeze(-1), prefix_inputs, x)

    def feed(self, x: Tensor, positions: Tensor, slots: Tensor, mask: Tensor | TreeMask) -> Tensor:
        """Hidden states (R, n, dim) of inputs x; positions and slots (R, n); mask (R, 1, n, slots), or of a tree."""
        return self.model.hidden(x, self.model.rope_at(self.rope, positions, self.padding), mask, self.cache, slots)

    def feed_chain(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits (R, n, V) of consecutive tokens (B, n) at `positions` (B, n). A token attends to all earlier ones."""
        if self.cache.kernels is not None:
            x, rope, row_positions, _ = self.cache.kernels.inputs(self, tokens, positions)
            mask = TreeMask.chain(self.padding[:, 0], row_positions)
            return self.model.head(self.model.hidden(x, rope, mask, self.cache, row_positions))
        row_positions = self.both(positions)
        mask = TreeMask.chain(self.padding[:, 0], row_positions)
        return self.model.head(self.feed(self.embed(tokens, positions), row_positions, row_positions, mask))

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
        """Like `forward`, for tokens (B, K * n) at parallel positions of the image (see `decoding.parallel_positions`).
        A token is stored in its slot and attends to the slots that it sees."""
        positions, slots = (x.flatten(1) + self.prefix_length for x in (fronts.positions, fronts.slots))
        start = self.padding[:, 0]
        mask = TreeMask(start, torch.full_like(start, self.prefix_length - 1), fronts.sees)
        if self.cache.kernels is not None:
            x, rope, _, _ = self.cache.kernels.inputs(self, tokens, positions)
        else:
            x = self.embed(tokens, positions)
            rope = self.model.rope_at(self.rope, self.both(positions), self.padding)
        hidden = self.model.hidden(x, rope, mask, self.cache, self.both(slots))
        return self.model.head(hidden), hidden

    def commit(self, verdict: Any, tree: Any, count: Tensor) -> None:
        if tree.is_chain:  # the accepted path of a chain already is in its slots
            return
        self.cache.keep(verdict.path, verdict.length, count, self.prefix_length - 1)
