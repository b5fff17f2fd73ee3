"""The shape of a drafter's drafts, which is known before any network is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specbench.decoding.parallel_positions import rows_at_once
from specbench.decoding.trees import Tree
from specbench.errors import UsageError


@dataclass(frozen=True, eq=False)
class DraftShape:
    """What a drafter's parameters alone determine. Rules, verifications and checks read this and nothing else of a
    drafter.

    tree: the topology of the drafts. For trees that change from step to step, a tree with as many nodes and the same
        height.
    passes: forward passes of a drafter network in a step.
    carries_over: drafts depend on more than the committed tokens and the step's random numbers. Then only token-wise
        verification is exact.
    biased: tokens are not drawn from the distributions that the drafter reports, or the target's distributions
        differ from raster order's.
    independent: siblings are drawn independently, each from its own distribution (`Draft.node_probs`).
    skips: some tokens are committed without verification.
    lag: for a drafter that decodes rows in parallel, the tokens that a row of the image has when the next one begins;
        `tree` is then the draft of each row. None: raster order.
    """

    tree: Tree
    passes: int = 0
    carries_over: bool = False
    biased: bool = False
    independent: bool = False
    skips: bool = False
    lag: int | None = None

    @property
    def height(self) -> int:
        """Draft tokens of the longest path."""
        return self.tree.height

    def schedule_length(self, rule: str) -> int:
        """The number of depths, at least 1, of a rule's schedule. UsageError for drafts whose tokens have no fixed
        depth."""
        if self.skips:
            raise UsageError(
                f"rule={rule} has a schedule over the depths of a draft, and this drafter's depths change with the path"
                " that it commits without verification: use a rule without a schedule, such as rule=uniform"
            )
        return max(1, self.height)

    def num_chains(self, target: Any) -> int:
        """The number of positions at which a pass extends an image of this target; 1 in raster order."""
        return 1 if self.lag is None else rows_at_once(target.width, self.lag)
