"""LANTERN: named trees and acceptance decisions."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from goldens.common import Compared, Config, Tensors, in_order, paths
from specbench.decoding import rules, trees
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules.base import neighbours
from specbench.decoding.rules.lantern import Lantern
from specbench.decoding.sampling import Sampling
from specbench.decoding.verify import VERIFY, Draft, TokenWise, VerificationResult
from specbench.engine.ops import take


def lantern_static_trees(t: Tensors, c: Config) -> Compared:
    """Ancestor masks and depths of the named trees, in the released node order (by depth, then by path)."""
    for name in dict.fromkeys(key.partition("/")[0] for key in t):
        length = t[f"{name}/retrieve_indices"].shape[1] - 1
        tree = trees.build(trees.chain_paths(length) if name == "chain" else trees.named(name))
        yield f"{name}/attn_mask", tree.ancestors[0].int(), t[f"{name}/attn_mask"].int()
        yield f"{name}/position_ids", tree.depth[0], t[f"{name}/position_ids"]
        yield f"{name}/retrieve_indices", paths(tree), in_order(t[f"{name}/retrieve_indices"])


class Given(RandomStreams):
    """Random streams with given numbers for verification (B, M), one per node."""

    def __init__(self, numbers: Tensor) -> None:
        super().__init__([(0, 0)] * len(numbers))
        self.numbers = numbers

    def uniforms(self, step: Tensor, tag: int, tags: int, count: int) -> Tensor:
        numbers = super().uniforms(step, tag, tags, count)
        if tag == VERIFY:
            numbers[:, 0] = self.numbers
        return numbers


def verify_in_order(p: Tensor, draft: Draft, rule: rules.Rule, numbers: Tensor) -> tuple[VerificationResult, int]:
    """The verdict of one row, and how many of the numbers (*,) were used. The candidates use them in the order in which
    they are tried, as in the official code.

    One round per depth: the children of the last accepted node get the next numbers, and `verify` accepts one of them.
    Nodes that were not reached have the number 1, with which no token is accepted.
    """
    placed = torch.ones(p.shape[:2], dtype=numbers.dtype)
    node = used = depth = 0
    while True:
        slot = int(draft.tree.slot[0, node])  # -1 for a leaf
        children = [c for c in draft.tree.children[0, slot].tolist() if c >= 0] if slot >= 0 else []
        placed[0, children] = numbers[used : used + len(children)]
        verdict = TokenWise().verify(p, draft, rule, Given(placed), torch.zeros(1).long())
        if int(verdict.length) == depth:
            return verdict, used + len(children)
        node = int(verdict.path[0, depth])
        used += children.index(node) + 1
        depth += 1


def released_rule(near: Tensor, param: dict[str, Any], greedy: bool) -> rules.Rule:
    """The rule of LANTERN's code for its parameters: a delta above 1 is LANTERN++'s lambda."""
    if not param["relaxed"]:
        return rules.exact()
    name, bound = ("lantern", "tvd") if param["delta"] <= 1 else ("lantern_pp", "total")
    return Lantern(name, near, param["k"], bound, param["delta"], "released", greedy)


def lantern_acceptance(t: Tensors, c: Config) -> Compared:
    """LANTERN's rules on a tree: accepted tokens, the numbers used for them, and the distribution of the next token.

    `sequential` tries deterministic candidates, `static` candidates sampled without replacement,
    `greedy` the longest row.
    """
    yield "nearest", neighbours(t["in/codebook"], t["in/nearest"].shape[1]), t["in/nearest"]
    parent, rows = t["in/node_parent"].clamp_min(0)[None], t["in/retrieve_indices"]
    tree = trees.from_parents(parent, t["in/node_rank"][None], int(t["in/node_rank"].max()) + 1, rows.shape[1] - 1)
    drafted = torch.arange(1, tree.nodes)
    for case, (name, param) in itertools.product(range(c["cases"]), c["params"].items()):
        tokens, logits = t[f"in/case{case}/node_tokens"][None], t[f"in/case{case}/node_logits"][None]
        draft_probs = torch.zeros_like(logits)  # leaves have no children
        draft_probs[0, parent[0, drafted]] = t[f"in/case{case}/draft_probs"][t["in/node_draft_row"][drafted]]
        for mode in ("sequential", "static", "greedy"):
            draft = Draft(tree, tokens, take(draft_probs, tree.inner), torch.ones_like(tokens, dtype=torch.bool))
            draft.sampled = torch.full_like(draft.valid, mode == "static")
            rule = released_rule(t["in/nearest"], param, greedy=mode == "greedy")
            if mode == "greedy":
                p, used = Sampling(temperature=0).probs(logits), 0
                before = logits.softmax(-1) if rule.uses_pre_argmax_probs else None
                verdict = TokenWise().verify(p, draft, rule, RandomStreams([(0, 0)]), torch.zeros(1).long(), before)
            else:
                p = Sampling(c["temperature"], None, c.get("top_p", 1.0)).probs(logits)
                p = Sampling(top_k=c["top_k"]).probs(p.log())  # LANTERN filters by top-p first
                verdict, used = verify_in_order(p, draft, rule, t[f"in/case{case}/uniforms"])
            length = int(verdict.length)
            path = torch.cat([torch.zeros(1, dtype=torch.int64), verdict.path[0, :length]])
            row = int((rows[:, : length + 1] == path).all(1).int().argmax())  # the first that goes along the path
            out = f"case{case}/{name}/{mode}"
            yield f"{out}/result", torch.tensor([row, length, used])
            yield f"{out}/accepted", tokens[0, path]
            if mode != "greedy":
                yield f"{out}/next_probs", verdict.next_probs[0]


CHECKS = {"lantern_static_trees": lantern_static_trees, "lantern_acceptance": lantern_acceptance}
