"""Tabular models: explicit distributions, with which the output of the loop can be compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import embedding

from specbench.decoding.drafters.dynamic import Eagle2, Grown
from specbench.decoding.drafters.eagle import EagleState, Entries
from specbench.decoding.drafters.vvs import VVS
from specbench.decoding.loop import StepResult, last_token
from specbench.decoding.parallel_positions import ParallelPositions
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Distributions, Sampling, draw, draw_distinct
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import Path, build
from specbench.decoding.verify import DRAFT, Draft, VerificationResult
from specbench.engine.ops import KVCache
from specbench.engine.state import Buffers, put, with_tensors

#: tables[t] (V**t, V): the distribution of token t given the prefix, coded in base V, first token most significant. For
#: a Markov model of order m, (V**min(t, m), V): given the last m tokens.
Tables = list[Tensor]


def random_tables(
    vocab: int,
    length: int,
    seed: int,
    sharpness: float = 1.0,
    near: Tables | None = None,
    distance: float = 0.5,
    order: int | None = None,
) -> Tables:
    """Softmax-normal distributions. `near` mixes in another model's logits, so that `distance` in [0, 1] sets how far
    apart the two are. order: of a Markov model, whose distributions differ from position to position."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for t in range(length):
        logits = sharpness * torch.randn(vocab ** (t if order is None else min(t, order)), vocab, generator=g)
        if near is not None:
            logits = (1 - distance) * near[t].log() + distance * logits
        out.append(logits.softmax(-1))
    return out


def codes(tokens: Tensor, vocab: int) -> Tensor:
    """Tokens (N, T) -> one number per sequence, first token most significant."""
    out = torch.zeros(len(tokens), dtype=torch.int64)
    for t in range(tokens.shape[1]):
        out = out * vocab + tokens[:, t]
    return out


def sequence_probs(tables: Tables) -> Tensor:
    """The distribution of the whole sequence, (V**T,)."""
    probs = torch.ones(1, dtype=torch.float64)
    for table in tables:
        probs = (probs[:, None] * table.double()).flatten()
    return probs


class _Lookup:
    """All tables of a model in one tensor, so that one gather gives a distribution."""

    def __init__(self, tables: Tables) -> None:
        self.length, self.size = len(tables), tables[0].shape[1]
        device = tables[0].device
        # after the end, where results are cut off anyway
        uniform = torch.full((1, self.size), 1.0 / self.size, device=device)
        self.table = torch.cat([*tables, uniform])
        self.logits = self.table.log()
        starts = [0]
        for table in tables:
            starts.append(starts[-1] + len(table))
        self.starts = torch.tensor(starts, device=device)
        self.contexts = max(map(len, tables))  # number of contexts of the next token
        self.context_length = round(math.log(self.contexts, self.size))  # tokens of a context

    def root(self, history: Tensor, num_committed: Tensor) -> Tensor:
        """Codes (B,) of the committed tokens."""
        code = torch.zeros_like(num_committed)
        for before in range(self.context_length, 0, -1):
            index = num_committed - before
            token = history.gather(1, index.clamp_min(0)[:, None])[:, 0]
            code = torch.where(index >= 0, self.after(code, token), code)
        return code

    def after(self, code: Tensor, token: Tensor) -> Tensor:
        """The codes of prefixes with these codes, each followed by a token. A Markov model drops the earliest
        tokens."""
        longer = code * self.size + token
        if self.contexts & (self.contexts - 1) == 0:  # a power of two: the same as the last line, but faster
            return longer & (self.contexts - 1)
        return longer % self.contexts

    def nodes(self, root: Tensor, tokens: Tensor, parent: Tensor, depth: Tensor, height: int) -> Tensor:
        """Codes (B, M) of draft nodes: the committed tokens, then the path from the root to the node itself. The codes
        of nodes after the model's length are arbitrary. parent, depth (B or 1, M): of the tree."""
        code, levels = root[:, None].expand_as(tokens).clone(), range(1, min(height, self.length) + 1)
        if len(depth) == 1:  # all rows have one tree
            for level in ((depth[0] == d).nonzero().flatten() for d in levels):
                code[:, level] = self.after(code[:, parent[0, level]], tokens[:, level])
            return code
        parent = parent.expand_as(tokens)
        for d in levels:
            code = torch.where(depth == d, self.after(code.gather(1, parent), tokens), code)
        return code

    def row(self, code: Tensor, number: Tensor) -> Tensor:
        """The table row of the distribution of the token with index `number` (from 0), after prefixes with these
        codes."""
        return self.starts[number.clamp_max(self.length)] + torch.where(number < self.length, code, 0)

    def rows(self, values: Tensor, code: Tensor, number: Tensor) -> Tensor:
        """The rows (..., V) of `table`, `logits` or values computed from them, after these prefixes."""
        return embedding(self.row(code, number), values)


class TabularTarget:
    """A target for the loop. Its logits are log probabilities, so temperature and filters apply as for any model."""

    def __init__(self, tables: Tables) -> None:
        self.lookup = _Lookup(tables)
        self.width = math.isqrt(self.lookup.length - 1) + 1  # as if the sequence were an image

    def open(self, conditioning: Any, rows: int, guided: bool, nodes: int) -> TabularSession:
        return TabularSession(self.lookup, self.width, rows)


class TabularSession:
    def __init__(self, lookup: _Lookup, width: int, rows: int) -> None:
        self.lookup, self.width = lookup, width
        self.length, self.vocab_size = lookup.length, lookup.size
        self.codes = self.vocab_size
        self.forced_tokens: Tensor | None = None

    def forced(self, positions: Tensor) -> Tensor | None:
        return None

    def constrain(self, logits: Tensor, positions: Tensor) -> Tensor:
        return logits

    def both(self, x: Tensor) -> Tensor:
        return x

    def forward(self, tokens: Tensor, tree: Any, history: Tensor, num_committed: Tensor) -> tuple[Tensor, Tensor]:
        root = self.lookup.root(history, num_committed)
        code = self.lookup.nodes(root, tokens, tree.parent, tree.depth, tree.height)
        logits = self.lookup.rows(self.lookup.logits, code, num_committed[:, None] + tree.depth)
        return logits, tokens.unsqueeze(-1).float()

    def forward_at_positions(
        self, tokens: Tensor, positions: ParallelPositions, history: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tables have no entries for missing tokens: each counts as token 0."""
        at_nodes, slots, total = positions.positions.flatten(1), positions.slots.flatten(1), self.length
        stored = F.pad(history[:, :total], (1, positions.sees.shape[2] - 1 - total + positions.keys.shape[1]))
        stored = stored.scatter(1, slots + 1, tokens).unsqueeze(1)[:, :, 1 : 1 + total]
        # (B, K * n, T): the tokens that a node sees.
        visible = torch.where(positions.sees[..., 1 : 1 + total], stored, 0)
        chains, first = positions.chains(visible), positions.positions[:, :, :1].flatten(0, 1)
        replaced = ((positions.slots[:, :, 0] >= total) & positions.extends).flatten()
        at = first.clamp_min(0).unsqueeze(1).expand(-1, chains.shape[1], -1)
        root = tokens.view_as(positions.positions)[:, :, :1].flatten(0, 1).unsqueeze(1).expand_as(at)
        chains = chains.scatter(2, at, torch.where(replaced[:, None, None], root, chains.gather(2, at)))
        number = (at_nodes + 1).clamp_max(total)
        code = self.lookup.root(chains.flatten(0, 1), number.flatten()).view_as(number)
        return self.lookup.rows(self.lookup.logits, code, number), tokens.unsqueeze(-1).float()

    def buffers(self) -> Buffers:
        return {}

    def use(self, kernels: Any) -> None:
        pass  # a look-up in tables has no kernels

    def commit(self, verdict: VerificationResult, tree: Any, num_committed: Tensor) -> None:
        pass


@dataclass
class TabularState:
    """probs: all rows of the draft tables, as they are sampled."""

    sampling: Sampling
    rng: RandomStreams
    probs: Tensor

    def buffers(self) -> Buffers:
        return {}


class TabularDrafter:
    """Drafts a chain or static tree from its own tables. The children are sampled without replacement or, with
    `chosen`, they are the most probable tokens.

    It is not `drafters.eagle.Eagle` or `Medusa` with tables: a vocabulary may have fewer tokens than a node has
    children, random numbers are drawn per node, not per depth, and Medusa's heads do not know the path.
    """

    def __init__(self, tables: Tables, paths: list[Path], chosen: bool = False) -> None:
        self.lookup, self.tree = _Lookup(tables), build(paths).to(tables[0].device)
        self.chosen, self.shape = chosen, DraftShape(self.tree)

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> TabularState:
        return TabularState(sampling, rng, sampling.probs(self.lookup.logits))

    def sample(self, state: TabularState, probs: Tensor, step: Tensor, node: int, children: int) -> Tensor:
        """The tokens (B, children) of the children of an inner node, drawn from probs (B, V) without replacement; fewer
        if the vocabulary is smaller."""
        if children == 1:
            return draw(probs, state.rng.uniform(step, DRAFT + node, 1)[:, 0])[:, None]
        size = probs.shape[1]
        return draw_distinct(probs, state.rng.exponential(step, DRAFT + node, size), min(children, size))

    def propose(self, state: TabularState, history: Tensor, num_committed: Tensor, step: Tensor) -> Draft:
        tree, lookup, size = self.tree, self.lookup, self.lookup.size
        greedy = state.sampling.temperature == 0 and not tree.is_chain
        tokens = history.new_zeros(len(num_committed), tree.nodes)
        tokens[:, :1] = last_token(history, num_committed)
        valid = torch.ones_like(tokens, dtype=torch.bool)
        draft_probs = []
        inner, depth = tree.inner[0].tolist(), tree.depth[0].tolist()
        codes = {0: lookup.root(history, num_committed)}  # of inner nodes
        for i, node in enumerate(inner):
            number = num_committed + depth[node]
            probs = lookup.rows(state.probs, codes[node], number)
            draft_probs.append(probs)
            kids = [k for k in tree.children[0, i].tolist() if k >= 0]
            picked = min(len(kids), size)
            if self.chosen or greedy:
                picks = lookup.rows(lookup.table, codes[node], number).topk(picked, dim=-1).indices
            else:
                picks = self.sample(state, probs, step, i, len(kids))
            tokens[:, kids[:picked]] = picks
            valid[:, kids[picked:]] = False  # there are no more candidates than tokens in the vocabulary
            for k, kid in enumerate(kids):
                if kid in inner:
                    codes[kid] = lookup.after(codes[node], picks[:, min(k, picked - 1)])
        sampled = torch.zeros_like(valid) if self.chosen or greedy else None
        return Draft(tree, tokens, torch.stack(draft_probs, 1), valid, sampled)

    def commit(self, state: TabularState, outcome: StepResult) -> None:
        pass


class _TableEntries(Entries):
    """Draft tables instead of an EAGLE drafter's network: its outputs (B, n) are the codes of prefixes. Unlike a
    network, tables give a draft before the first token."""

    def __init__(self, head: Tables, shape: DraftShape, expanded: int) -> None:
        self.lookup = _Lookup(head)
        super().__init__(SimpleNamespace(cfg=SimpleNamespace(aux_hidden_layers=())), shape, expanded)

    def open(self, session: Any, conditioning: Any, sampling: Sampling, rng: RandomStreams) -> EagleState:
        rows, device = len(rng), rng.key.device
        put(self, device)
        nothing = torch.zeros(0, device=device)
        start = torch.zeros(rows, dtype=torch.int64, device=device)
        pending = torch.zeros(rows, self.tree.height + 1, 1, device=device)
        cache = KVCache(0, rows, 1, 1, 1, nothing)
        return EagleState(session, sampling, rng, cache, nothing, start, pending, torch.zeros_like(start), halves=1)

    def _newest(self, state: EagleState, history: Tensor, num_committed: Tensor) -> tuple[Tensor, Tensor]:
        return num_committed[:, None], self.lookup.root(history, num_committed)[:, None]

    def _expand(
        self,
        state: EagleState,
        num_committed: Tensor,
        last: Tensor,
        outputs: Tensor,
        tokens: Tensor,
        parents: Tensor,
        *_: Any,
    ) -> Tensor:
        return self.lookup.after(outputs.gather(1, parents), tokens)

    def _distributions(
        self, state: EagleState, sampling: Sampling, features: Tensor, position: Tensor
    ) -> Distributions:
        positions = position[:, None].expand_as(features)
        logits = self.lookup.rows(self.lookup.logits, features, positions)
        return sampling.distributions(logits, state.session, positions)

    def _after_first(self, num_committed: Tensor, nodes: int | None = None) -> Tensor:
        return num_committed.new_ones(len(num_committed), self.tree.nodes if nodes is None else nodes, dtype=torch.bool)

    def commit(self, state: EagleState, outcome: StepResult) -> None:
        pass


class _GrownOnce(Grown, _TableEntries):
    """A grown tree is deterministic: rows with the same prefix have the same tree, so it is grown once per prefix."""

    def grow(self, state: EagleState, history: Tensor, num_committed: Tensor) -> Draft:
        lookup = self.lookup
        prefixes, row = lookup.row(lookup.root(history, num_committed), num_committed).unique(return_inverse=True)
        numbers = torch.arange(len(row), device=row.device)
        example = torch.zeros_like(prefixes).scatter_(0, row, numbers)  # one row for each prefix
        draft = super().grow(state, history[example], num_committed[example])
        tokens = torch.cat([last_token(history, num_committed), draft.tokens[row, 1:]], 1)
        sampled = None if draft.sampled is None else draft.sampled[row]
        return Draft(with_tensors(draft.tree, lambda x: x[row]), tokens, draft.probs[row], draft.valid[row], sampled)


class TabularGrower(_GrownOnce, Eagle2):
    """EAGLE-2 with draft tables instead of the network."""


class TabularVVS(_GrownOnce, VVS):
    """VVS with draft tables instead of the network."""
