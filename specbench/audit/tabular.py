"""Tabular models: laws written down in full, so that what the loop does can be compared with what it should do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.decoding.sampling import Sampling, Streams, draw, draw_distinct
from specbench.decoding.trees import Path, build
from specbench.decoding.verify import DRAFT, Draft, Verdict

#: tables[t] (V**t, V): the law of token t given the prefix coded base V, first token most significant.
Tables = list[Tensor]


def random_tables(
    vocab: int, length: int, seed: int, sharpness: float = 1.0, near: Tables | None = None, distance: float = 0.5
) -> Tables:
    """Softmax-normal laws; `near` mixes in another model's logits, so that `distance` in [0, 1] sets how far apart they
    are."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for t in range(length):
        logits = sharpness * torch.randn(vocab**t, vocab, generator=g)
        if near is not None:
            logits = (1 - distance) * near[t].log() + distance * logits
        out.append(logits.softmax(-1))
    return out


def codes(tokens: Tensor, vocab: int) -> Tensor:
    """Tokens (N, T) -> one number a sequence, first token most significant."""
    out = torch.zeros(len(tokens), dtype=torch.int64)
    for t in range(tokens.shape[1]):
        out = out * vocab + tokens[:, t]
    return out


def sequence_law(tables: Tables) -> Tensor:
    """The law of the whole sequence, (V**T,)."""
    law = torch.ones(1, dtype=torch.float64)
    for table in tables:
        law = (law[:, None] * table.double()).flatten()
    return law


def _node_codes(
    tokens: Tensor, parent: Tensor, depth: Tensor, history: Tensor, count: Tensor, vocab: int, length: int
) -> Tensor:
    """Prefix code (B, M) of each node: the committed tokens, then the path from the root down to the node itself."""
    root = torch.zeros_like(count)
    for t in range(length):
        root = torch.where(count > t, root * vocab + history[:, t], root)
    columns = [root]
    for m in range(1, tokens.shape[1]):
        above = torch.stack(columns, 1).gather(1, parent[:, m : m + 1])[:, 0]
        columns.append(above * vocab + tokens[:, m])
    return torch.stack(columns, 1)


def _lookup(tables: Tables, code: Tensor, place: Tensor) -> Tensor:
    """Laws (B, M, V) at token numbers `place` (B, M); uniform beyond the end, where results are cut anyway."""
    vocab = tables[0].shape[1]
    out = torch.full((*code.shape, vocab), 1.0 / vocab)
    for t, table in enumerate(tables):
        here = table[torch.where(place == t, code, 0).clamp_max(len(table) - 1)]
        out = torch.where((place == t).unsqueeze(-1), here, out)
    return out


class TabularTarget:
    """A target for the loop. Its logits are log probabilities, so temperature and the filters apply as to any model."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    def open(self, conditioning: Any, rows: int, guided: bool, nodes: int) -> TabularSession:
        return TabularSession(self.tables)


class TabularSession:
    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.length, self.vocab_size = len(tables), tables[0].shape[1]

    def forward(self, tokens: Tensor, tree: Any, history: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        rows = len(tokens)
        parent, depth = tree.parent.expand(rows, -1), tree.depth.expand(rows, -1)
        code = _node_codes(tokens, parent, depth, history, count, self.vocab_size, self.length)
        return _lookup(self.tables, code, count[:, None] + depth).log(), tokens.unsqueeze(-1).float()

    def commit(self, verdict: Verdict, tree: Any, count: Tensor) -> None:
        pass


@dataclass
class _State:
    sampling: Sampling
    streams: Streams
    steps: int = 0


class TabularDrafter:
    """Drafts a chain or static tree from its own tables. `rounds` limits how many steps draft at all: with rounds=1
    what follows the first round is the target's own, the virtual extension of Cool-SD's Theorem 2."""

    def __init__(self, tables: Tables, paths: list[Path], rounds: int | None = None) -> None:
        self.tables, self.tree, self.rounds = tables, build(paths), rounds

    def open(self, session: Any, conditioning: Any, sampling: Sampling, streams: Streams) -> _State:
        return _State(sampling, streams)

    def propose(self, state: _State, history: Tensor, count: Tensor, step: Tensor) -> Draft:
        tree, rows, vocab = self.tree, len(count), self.tables[0].shape[1]
        tokens = torch.zeros(rows, tree.nodes, dtype=torch.int64)
        parent, depth = tree.parent.expand(rows, -1), tree.depth.expand(rows, -1)
        laws = torch.zeros(rows, tree.inner.shape[1], vocab)
        for i, node in enumerate(tree.inner[0].tolist()):
            code = _node_codes(tokens, parent, depth, history, count, vocab, len(self.tables))[:, node]
            law = _lookup(self.tables, code[:, None], (count + tree.depth[0, node])[:, None])[:, 0]
            law = state.sampling.law(law.log())
            laws[:, i] = law
            kids = [k for k in tree.children[0, i].tolist() if k >= 0]
            if len(kids) == 1:
                tokens[:, kids[0]] = draw(law, state.streams.uniform(step, DRAFT + i, 1)[:, 0])
            else:
                wanted = min(len(kids), vocab)
                tokens[:, kids[:wanted]] = draw_distinct(law, state.streams.uniform(step, DRAFT + i, vocab), wanted)
        live = self.rounds is None or state.steps < self.rounds
        state.steps += 1
        valid = torch.full((rows, tree.nodes), live)
        valid[:, 0] = True
        return Draft(tree, tokens, laws, valid)

    def commit(self, state: _State, hidden: Tensor, verdict: Verdict, count: Tensor) -> None:
        pass


def load_tables(path: str, prefix: str) -> Tables:
    """`p0 ..` or `q0 ..` of an .npz file (no pickles)."""
    with np.load(path, allow_pickle=False) as f:
        names = sorted((n for n in f.files if n[0] == prefix and n[1:].isdigit()), key=lambda n: int(n[1:]))
        return [torch.as_tensor(f[n]).float() for n in names]
