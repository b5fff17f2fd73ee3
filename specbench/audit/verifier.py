"""A verifier of another engine, as a Python function, instead of ours: the same loop, tables and drafts.

    def verify(p, q, tokens, rng):           # a chain of D draft tokens
        return accepted, next_token

p (D + 1, V): the target's distributions of the token after the prefix, after the first draft token, and so on; q (D,
V): the distribution that each draft token was drawn from; tokens (D,). It returns how many draft tokens it accepts, and
the token that follows them. The function gets p, q and tokens by position, and by name what it has a parameter for:

    rng         a numpy.random.Generator
    uniforms    (D + 1,) numbers in [0, 1) instead
    generator   a torch.Generator; then p, q and tokens are tensors
    parents     (N,) then a draft is a tree of N tokens, and p is (N + 1, V)

In a tree, the draft tokens are the nodes 1 to N and the prefix is node 0. p[n] is the target's distribution after node
n. parents[i] is the node before tokens[i], which is node i + 1; siblings are drawn without replacement, in this order,
and q[i] no longer has the earlier ones. The function returns the last accepted node (0: none) and the token that
follows it. In a chain this is the number of accepted tokens.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.audit.tabular import TabularDrafter, TabularState
from specbench.config.plugins import import_file
from specbench.decoding.loop import DecoderConfig
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules.base import Rule
from specbench.decoding.trees import Tree
from specbench.decoding.verify import DRAFT, VERIFY, Draft, Verification, VerificationResult
from specbench.decoding.verify.base import one_hot, without
from specbench.engine.ops import Kernels, take
from specbench.errors import UsageError, one_line
from specbench.storage import home
from specbench.storage.reading import short

Function = Callable[..., Any]

_RANDOM = ("rng", "uniforms", "generator")


@dataclass(frozen=True)
class Outside:
    """A function of another engine. argument: the argument that names it; name: for messages and rows; by_name: the
    names of the values that it takes by name."""

    argument: str
    name: str
    function: Function
    by_name: frozenset[str]

    @property
    def of_tensors(self) -> bool:
        return "generator" in self.by_name

    def source(self, rng: RandomStreams, step: Tensor, tag: int, count: int) -> Iterator[dict[str, Any]]:
        """The random numbers of one call after the other, by name. One generator, seeded from the stream of the first
        sequence, serves all sequences of a step. count: of the uniforms of a call."""
        generator = np.random.default_rng([int(rng.key[0]) % 2**63, int(step.max()), tag])
        if "uniforms" in self.by_name:
            return ({"uniforms": generator.random(count)} for _ in itertools.count())
        if self.of_tensors:
            return itertools.repeat({"generator": torch.Generator().manual_seed(int(generator.integers(2**63)))})
        return itertools.repeat({"rng": generator} if "rng" in self.by_name else {})

    def arrays(self, x: Tensor) -> Any:
        """Values in a form of their own, which the function may change: tensors, or arrays in which the rows of
        distributions sum to 1 in float64."""
        if self.of_tensors:
            return x.clone()
        if not x.is_floating_point():
            return x.numpy().copy()
        precise = x.double()
        return (precise / precise.sum(-1, keepdim=True)).numpy()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        try:
            return self.function(*arguments, **named)
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"{self.argument}: {self.name} raised {type(error).__name__} ({short(one_line(error), 200)}); correct"
                " the function (SPECBENCH_DEBUG=1 shows the traceback)"
            ) from error

    def integer(self, value: Any, low: int, high: int, meaning: str) -> int:
        """A returned integer from low to high, else UsageError."""
        try:
            number = operator.index(value)
        except (TypeError, ValueError):
            number = low - 1
        if not low <= number <= high:
            raise UsageError(
                f"{self.argument}: {self.name} returned {short(value)} as {meaning}, which must be an integer from"
                f" {low} to {high}"
            )
        return number


def loaded(argument: str, named: str | Function, parameters: Sequence[str]) -> Outside:
    """The function with the name FILE.py:FUNCTION or MODULE:FUNCTION, or a function itself. parameters: the names of
    the values that it gets by position, for messages.

    Raises UsageError if it does not exist, cannot be imported, or does not take these values.
    """
    name, function = (named, _imported(argument, named)) if isinstance(named, str) else (_name(named), named)
    wanted = f"FUNCTION({', '.join(parameters)}, rng)"
    if not callable(function):
        raise UsageError(f"{argument}: {name} is not a function; give {wanted}")
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise UsageError(f"{argument}: the parameters of {name} cannot be read; wrap it in {wanted}") from None
    optional = {"parents"} if argument == "verifier" else set()
    by_name = {p.name for p in found if p.name in {*_RANDOM, *optional} and p.kind != p.POSITIONAL_ONLY}
    positional = [p for p in found if p.name not in by_name and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    too_many = [p.name for p in positional[len(parameters) :] if p.default is p.empty]
    too_many += [p.name for p in found if p.kind == p.KEYWORD_ONLY and p.name not in by_name and p.default is p.empty]
    several = any(p.kind == p.VAR_POSITIONAL for p in found)
    first = [p.name for p in found[: len(parameters)]]
    if too_many or set(first) & by_name or (len(positional) < len(parameters) and not several):
        shown = ", ".join(p.name for p in found)
        raise UsageError(f"{argument}: {name} has the parameters ({shown}); it must be {wanted}, see docs/audit.md")
    if len(by_name & set(_RANDOM)) > 1:
        raise UsageError(f"{argument}: {name} takes several of {', '.join(_RANDOM)}; use one of them")
    return Outside(argument, name, function, frozenset(by_name))


def _name(function: Any) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None) or 'python'}:{name}"


def _imported(argument: str, named: str) -> Any:
    where, colon, name = named.rpartition(":")
    if not colon or not where or not name:
        raise UsageError(f"{argument} must be FILE.py:FUNCTION or MODULE:FUNCTION (got '{named}')")
    path = home.expanded(where)
    is_file = where.endswith(".py")
    if is_file and not path.is_file():
        raise UsageError(f"{argument}: there is no file '{where}'")
    try:
        with _beside(path.parent if is_file else Path.cwd()):
            module = import_file(f"specbench_outside_{path.stem}", path) if is_file else importlib.import_module(where)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{argument}: {where} cannot be imported, {type(error).__name__} ({short(one_line(error), 200)}); correct"
            " the file or the name"
        ) from error
    if not hasattr(module, name):
        raise UsageError(f"{argument}: {where} has no function '{name}'")
    return getattr(module, name)


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Imports find the modules in a folder, as they do for `python FILE.py`."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _in_progress(step: Tensor) -> Tensor:
    """The rows (n,) that are not complete. All rows of an audit's batch start together, and the number of steps of a
    complete row no longer grows."""
    return (step == step.max()).nonzero().flatten()


class OutsideVerification(Verification):
    """Calls the function for one sequence after the other."""

    name = "outside"

    def __init__(self, outside: Outside) -> None:
        self.outside = outside

    def verify(
        self,
        p: Tensor,
        draft: Draft,
        rule: Rule,
        rng: RandomStreams,
        step: Tensor,
        pre_argmax_probs: Tensor | None = None,
        kernels: Kernels | None = None,
    ) -> VerificationResult:
        outside, tree, rows = self.outside, draft.tree, _in_progress(step)
        nodes, parents = _existing(tree, draft.valid[0])
        drafted, vocab = nodes[1:], p.shape[-1]
        q = drawn_from(draft)
        arrays = [outside.arrays(x) for x in (p[rows][:, nodes], q[rows][:, drafted], draft.tokens[rows][:, drafted])]
        numbers = outside.source(rng, step, VERIFY, len(nodes))
        results = []
        for *inputs, number in zip(*arrays, numbers, strict=False):
            more = {"parents": outside.arrays(parents)} if "parents" in outside.by_name else {}
            result = outside(*inputs, **number, **more)
            if not isinstance(result, tuple | list) or len(result) != 2:
                raise UsageError(
                    f"verifier: {outside.name} returned {short(result)}; it must return the number of accepted draft"
                    " tokens and the next token"
                )
            accepted = outside.integer(result[0], 0, len(drafted), "the accepted draft tokens")
            results.append((accepted, outside.integer(result[1], 0, vocab - 1, "the next token")))
        node, next_token = torch.zeros(2, len(p), dtype=torch.int64)
        node[rows], next_token[rows] = torch.tensor(results).T
        return _verdict(p, draft, nodes[node], next_token)

    def decide(self, case: Any) -> VerificationResult:
        raise NotImplementedError  # `verify` has its own random numbers


def _existing(tree: Tree, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The nodes (n,) of a static tree that exist, the root first, and the parent (n - 1,) of each other one, by its
    index among them. valid (M,) bool. A vocabulary may have fewer tokens than a node has children."""
    exists = ~(tree.ancestors[0] & ~valid).any(-1)
    index = exists.long().cumsum(0) - 1
    nodes = exists.nonzero().flatten()
    return nodes, index[tree.parent[0][nodes[1:]]]


def drawn_from(draft: Draft) -> Tensor:
    """The distribution (B, M, V) that the token of each node was drawn from, given its parent and its earlier siblings;
    a point mass for a deterministic token. For static trees; the root's is 0."""
    tree = draft.tree
    q = draft.probs.new_zeros(*draft.tokens.shape, draft.probs.shape[-1])
    for i, children in enumerate(tree.children[0].tolist()):
        remaining = draft.probs[:, i]
        for child in (c for c in children if c >= 0):
            q[:, child] = remaining
            remaining = without(remaining, draft.tokens[:, child])
    if draft.sampled is None:
        return q
    return torch.where(draft.sampled.unsqueeze(-1), q, one_hot(draft.tokens, q.shape[-1]))


def _verdict(p: Tensor, draft: Draft, node: Tensor, next_token: Tensor) -> VerificationResult:
    """The verdict that accepts the path to a node (B,) of a static tree, followed by a token (B,). The distribution of
    that token is not known; the target's stands for it."""
    tree = draft.tree
    paths = torch.zeros(tree.nodes, tree.height, dtype=torch.int64)
    for n in range(1, tree.nodes):
        depth = int(tree.depth[0, n])
        paths[n] = paths[tree.parent[0, n]]
        paths[n, depth - 1 :] = n
    path, length = paths[node], tree.depth[0][node]
    following = next_token[:, None]
    tokens = torch.cat([draft.tokens.gather(1, path), following], 1).scatter(1, length[:, None], following)
    next_probs = take(p, node[:, None]).squeeze(1)
    return VerificationResult(path, length, tokens, next_probs, torch.zeros(len(p)))


class OutsideDrafter(TabularDrafter):
    """Draft tables whose tokens another engine's function draws: sampler(q, rng) -> token, q (V,)."""

    def __init__(self, drafter: TabularDrafter, sampler: Outside) -> None:
        self.lookup, self.tree, self.chosen, self.shape = drafter.lookup, drafter.tree, drafter.chosen, drafter.shape
        self.sampler = sampler

    def sample(self, state: TabularState, probs: Tensor, step: Tensor, node: int, children: int) -> Tensor:
        sampler, size = self.sampler, probs.shape[1]
        picks = torch.zeros(len(probs), min(children, size), dtype=torch.int64)
        rows = _in_progress(step)
        numbers = sampler.source(state.rng, step, DRAFT + node, 1)
        remaining = probs[rows]
        for k in range(picks.shape[1]):
            q = sampler.arrays(remaining)
            values = (sampler(x, **number) for x, number in zip(q, numbers, strict=False))
            tokens = torch.tensor([sampler.integer(value, 0, size - 1, "the draft token") for value in values])
            picks[rows, k], remaining = tokens, without(remaining, tokens)
        return picks


@dataclass(frozen=True)
class OutsideParts:
    """The functions of another engine that replace the verification and, if given, the sampling of the draft tables."""

    verifier: Outside
    sampler: Outside | None = None

    def replaced(self, config: DecoderConfig) -> DecoderConfig:
        drafter = config.drafter
        if self.sampler is not None:
            assert isinstance(drafter, TabularDrafter)
            drafter = OutsideDrafter(drafter, self.sampler)
        return replace(config, drafter=drafter, verification=OutsideVerification(self.verifier))

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of a row that name the functions."""
        drafter = "tables" if self.sampler is None else self.sampler.name
        return {"method": self.verifier.name, "drafter": drafter, "rule": "its own", "variant": None}
