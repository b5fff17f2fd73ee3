"""The models that an audit decodes: the built-in ones, and tables from a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specbench.audit import arrays, model_recipes
from specbench.audit.statistics import Marginal, filtered, of_grams, of_sequence
from specbench.audit.tabular import (
    Tables,
    TabularDrafter,
    TabularGrower,
    TabularTarget,
    TabularVVS,
    random_tables,
)
from specbench.config import registry
from specbench.config.run_config import RunConfig
from specbench.decoding.loop import Drafter, Target
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import chain_paths, parse
from specbench.errors import UsageError
from specbench.harness.method import build_drafter

#: The parameters that determine the sampling of discrete tokens.
SAMPLING = ("temperature", "top_k", "top_p", "entropy_temperature", "top_n_sigma")
#: The most sequences that an audit counts one by one: 32 MiB per count.
LARGEST = 1 << 22
_MOST_BYTES = 1 << 28  # the most bytes of an array: more than tables of that many sequences have
_ROUNDING = 1e-4  # tolerance of a row's sum around 1; float32 sums are within it, float16 sums are not


class Subject(Protocol):
    """A model of discrete tokens that an audit decodes; its exact distribution is known."""

    @property
    def name(self) -> str: ...

    @property
    def vocab(self) -> int:
        """Tokens of the vocabulary; with a grammar only the tokens that encode pixels."""
        ...

    @property
    def length(self) -> int:
        """Tokens of a sequence that are not forced by a grammar."""
        ...

    @property
    def guided(self) -> bool:
        """Whether the model takes a cfg_scale."""
        ...

    def on(self, device: torch.device) -> Subject:
        """The same model, with target, drafters and codebook on a device."""
        ...

    @property
    def target(self) -> Target: ...

    def drafter(self, cfg: RunConfig) -> Drafter:
        """The real drafter of a configuration. If it needs a network, the model's own drafter replaces it."""
        ...

    def prompts(self, rows: int) -> Any:
        """The conditioning of `rows` rows, which share one prompt."""
        ...

    def codebook(self) -> Tensor:
        """(V, d); UsageError if the model has none."""
        ...

    def marginals(self, sampling: Sampling) -> list[Marginal]:
        """The exact distributions that decoded sequences are compared with."""
        ...

    def free(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """For decoded sequences (N, *): the tokens that are not forced (N, T), and which sequences the grammar allows
        (N,) bool."""
        ...


@dataclass(frozen=True)
class TabularModel:
    """p, q: T tables each, the target's and the drafter's, (V**t, V) float32, or the tables of Markov models; codes (V,
    d) or None: the codebook; grams: for a Markov model, the n of the n-grams that are compared, else 0."""

    name: str
    p: Tables
    q: Tables
    codes: Tensor | None
    grams: int = 0
    guided: bool = False

    @property
    def vocab(self) -> int:
        return self.p[0].shape[1]

    @property
    def length(self) -> int:
        return len(self.p)

    def on(self, device: torch.device) -> TabularModel:
        p, q = ([table.to(device) for table in tables] for tables in (self.p, self.q))
        return replace(self, p=p, q=q, codes=None if self.codes is None else self.codes.to(device))

    @property
    def target(self) -> Target:
        return TabularTarget(self.p)

    def drafter(self, cfg: RunConfig) -> Drafter:
        """The draft tables, in the shape of its drafts, replace a drafter that needs a network: sampled or, for Medusa,
        EAGLE-2 and draft_sampling=deterministic, deterministic."""
        name = cfg.drafter
        chosen = name == "medusa" or cfg.get("draft_sampling") == "deterministic"
        if not registry.drafter_network(name):
            return build_drafter(cfg, None)
        if "nodes" in cfg:
            shape = self.q, cfg.own["nodes"], cfg.own["depth"], cfg.own["width"], cfg.own["ranking"]
            return TabularVVS(*shape, cfg.own["interval"]) if "interval" in cfg else TabularGrower(*shape)
        if "tree" in cfg:
            return TabularDrafter(self.q, parse(cfg.own["tree"]), chosen)
        return TabularDrafter(self.q, chain_paths(cfg.own["window"]), chosen)

    def prompts(self, rows: int) -> Any:
        return None

    def codebook(self) -> Tensor:
        if self.codes is None:
            raise UsageError(f"the rule needs distances between codes: {self.name} has no array codebook, (V, d)")
        return self.codes

    def marginals(self, sampling: Sampling) -> list[Marginal]:
        tables = [filtered(t.log(), sampling) for t in self.p]
        return of_grams(tables, self.grams) if self.grams else of_sequence(tables)

    def free(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return tokens, torch.ones(len(tokens), dtype=torch.bool)


def built_in(name: str) -> TabularModel:
    r = model_recipes.TABLES[name]
    p = random_tables(r.vocab, r.length, r.seed, r.sharpness, order=r.order)
    q = random_tables(r.vocab, r.length, 100 + r.seed, r.sharpness, near=p, distance=r.distance, order=r.order)
    codebook = torch.randn(r.vocab, 4, generator=torch.Generator().manual_seed(200 + r.seed))
    return TabularModel(name, p, q, codebook, r.grams)


def load(path: str) -> TabularModel:
    """A model from an .npz file: arrays p0 .. p{T-1}, q0 .. q{T-1} and, for rules that need it, codebook (V, d). pt is
    (V**t, V), the distribution of token t given the prefix, coded in base V, first token most significant.

    UsageError names the fault of a file.
    """
    named = arrays.of_file(path, "audit.tables", r"[pq](0|[1-9]\d*)|codebook", _MOST_BYTES)
    p, q = (_tables(named, letter, path) for letter in "pq")
    if len(p) != len(q) or p[0].shape != q[0].shape:
        sizes = [f"{letter}: V={t[0].shape[1]}, T={len(t)}" for letter, t in (("p", p), ("q", q))]
        raise UsageError(f"audit.tables: the tables of {path} differ in size ({'; '.join(sizes)})")
    codebook = named.get("codebook")
    if codebook is not None and (codebook.ndim != 2 or len(codebook) != p[0].shape[1] or not codebook.size):
        raise UsageError(
            f"audit.tables: codebook of {path} must be of shape ({p[0].shape[1]}, d), not {codebook.shape}"
        )
    return TabularModel(Path(path).name, p, q, None if codebook is None else torch.from_numpy(codebook).float())


def _tables(named: Mapping[str, np.ndarray], letter: str, path: str) -> Tables:
    length = 1 + max((int(name[1:]) for name in named if name[0] == letter), default=-1)
    missing = [f"{letter}{t}" for t in range(max(1, min(length, len(named)))) if f"{letter}{t}" not in named]
    if missing:
        raise UsageError(f"audit.tables: {path} has no array {missing[0]}")
    first = named[f"{letter}0"]
    vocab = first.shape[-1] if first.ndim else 0
    if first.shape != (1, vocab) or vocab < 2:
        raise UsageError(
            f"audit.tables: {letter}0 of {path} must be of shape (1, V) with at least two tokens, not {first.shape}"
        )
    if vocab**length > LARGEST:
        raise UsageError(
            f"audit.tables: V={vocab} and T={length} make more sequences than an audit can count ({LARGEST:,}); "
            "give fewer tokens"
        )
    tables = []
    for t in range(length):
        table = named[f"{letter}{t}"].astype(np.float64)
        if table.shape != (vocab**t, vocab):
            raise UsageError(
                f"audit.tables: {letter}{t} of {path} must be of shape ({vocab**t}, {vocab}), not {table.shape}"
            )
        if (table < 0).any():
            raise UsageError(f"audit.tables: {letter}{t} of {path} has negative probabilities")
        total = table.sum(-1, keepdims=True)
        if (off := np.abs(total - 1)).max() > _ROUNDING:
            row = int(off.argmax())
            raise UsageError(f"audit.tables: row {row} of {letter}{t} of {path} sums to {total[row, 0]:.6g}, not 1")
        tables.append(torch.from_numpy(table / total).float())
    return tables
