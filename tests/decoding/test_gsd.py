"""GSD's groups: computed by hand, as printed, as released, and as fixed neighbourhoods; and the settings of a
variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specbench.config import configuration, variants
from specbench.decoding.rules import groups
from specbench.decoding.rules.base import RuleContext
from specbench.decoding.rules.groups import Grouped
from specbench.errors import UsageError
from specbench.harness.method import build_rule

# Tokens by their rank in p, least probable first: 2, 4, 0, 5, 1, 3.
P = torch.tensor([0.10, 0.20, 0.02, 0.50, 0.06, 0.12])
Q = torch.tensor([0.20, 0.30, 0.10, 0.10, 0.20, 0.10])
TABLE = torch.tensor([[0.0], [0.5], [0.0], [0.2], [0.1], [0.6]])  # squared distances of tokens 0 and 5: 0.36


def chance(rule: Grouped, token: int) -> float:
    return float(rule.accept(P, Q, torch.tensor(token), torch.tensor(1)))


def test_a_group_is_near_in_rank_probability_and_embedding() -> None:
    wide = Grouped(TABLE, 4, delta=1.0, distance=9.0)  # two before, one after
    assert chance(wide, 0) == pytest.approx((0.02 + 0.06 + 0.10 + 0.12) / (0.10 + 0.20 + 0.20 + 0.10))
    assert chance(wide, 3) == 1.0  # 5, 1 and itself, 0.82 / 0.5: no token is above it
    assert chance(Grouped(TABLE, 4, 0.03, 9.0), 0) == pytest.approx((0.10 + 0.12) / (0.20 + 0.10))
    assert chance(Grouped(TABLE, 4, 1.0, 0.3), 0) == pytest.approx((0.02 + 0.06 + 0.10) / (0.10 + 0.20 + 0.20))
    assert chance(Grouped(TABLE, 1), 0) == pytest.approx(0.10 / 0.20)


def test_at_the_lower_end_the_released_code_tests_a_token_by_itself() -> None:
    released, printed = (Grouped(TABLE, 4, 1.0, 9.0, edge) for edge in ("alone", "clip"))
    assert chance(released, 4) == pytest.approx(0.06 / 0.20)
    assert chance(printed, 4) == pytest.approx((0.02 + 0.06 + 0.10) / (0.10 + 0.20 + 0.20))
    assert chance(released, 1) == chance(printed, 1)


def test_a_rejected_token_leaves_the_ungrouped_residual() -> None:
    left = Grouped(TABLE, 4, 1.0, 9.0).residual(P, Q, torch.tensor(0), torch.tensor(1))
    torch.testing.assert_close(left, torch.tensor([0, 0, 0, 0.40, 0, 0.02]) / 0.42)


def test_the_acceptance_of_all_tokens_equals_the_acceptance_of_each() -> None:
    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(3, 9, generator=g).softmax(-1) for _ in range(2))
    table = 0.4 * torch.randn(9, 2, generator=g)
    table[4] = torch.nan  # the grammar's own
    depth = torch.ones(3, dtype=torch.int64)
    for edge in ("alone", "clip"):
        rule = Grouped(table, 5, 0.1, 0.5, edge)
        every = rule.acceptance(p, q, depth)
        for token in range(9):
            assert torch.equal(every[:, token], rule.accept(p, q, torch.full((3,), token), depth))
        assert torch.equal(every[:, 4], (p / q).clamp_max(1)[:, 4])


class Memory(TorchDispatchMode):
    """Records the bytes of the largest tensor that is created, and of all of them. Views and in-place results create
    none."""

    largest = made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [x.untyped_storage().data_ptr() for x in (*args, *(kwargs or {}).values()) if torch.is_tensor(x)]
        if torch.is_tensor(out) and out.untyped_storage().data_ptr() not in inputs:
            self.largest, self.made = max(self.largest, out.nbytes), self.made + out.nbytes
        return out


def test_the_acceptance_of_all_tokens_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C library returns large blocks to the system, and page faults took most of an image's time. All embeddings
    here take 34 MB; they are gathered, subtracted and squared in the same 1 MiB."""
    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(4, 256, generator=g).softmax(-1) for _ in range(2))
    rule, depth = Grouped(0.05 * torch.randn(256, 600, generator=g)), torch.ones(4, dtype=torch.int64)
    with Memory() as few:
        acceptance = rule.acceptance(p, q, depth)
    assert few.largest <= 1 << 20
    assert few.made < 1 << 23
    monkeypatch.setattr(groups, "_CHUNK_ON_CPU", 1 << 24)
    with Memory() as more:
        assert torch.equal(rule.acceptance(p, q, depth), acceptance)
    assert more.largest > 1 << 25
    assert 0 < acceptance.mean() < 1


def chances(arguments: str) -> list[float]:
    cfg = configuration.compose(["method=gsd", *arguments.split()])
    rule = build_rule(cfg, 4, lambda: TABLE.repeat(4, 1) + torch.arange(24)[:, None] / 50)
    g = torch.Generator().manual_seed(1)
    p, q = (torch.randn(24, generator=g).softmax(-1) for _ in range(2))
    return [float(x) for x in rule.acceptance(p, q, torch.tensor(1))]


def test_the_variants_differ() -> None:
    acceptances = [chances(words) for words in ("variant=printed", "variant=released", "rule=neighbourhood")]
    assert chances("") == acceptances[1]
    assert len({tuple(values) for values in acceptances}) == 3
    assert chances("variant=printed group=14 edge=alone") == acceptances[1]


def test_a_setting_departs_from_its_variant() -> None:
    def departs(words: str) -> dict[str, list[Any]]:
        return variants.departures(configuration.compose(words.split()))

    assert departs("method=gsd") == departs("method=gsd delta=0.2") == departs("method=eagle1") == {}
    assert departs("method=gsd group=3") == {"group": [3, 14]}
    assert departs("method=gsd rule=cool") == {"rule": ["cool", "gsd"]}


def test_a_wrong_variant_is_a_plain_error() -> None:
    with pytest.raises(UsageError, match="'exact'"):
        configuration.compose(["method=gsd", "variant=exact"])
    with pytest.raises(UsageError, match="'variant'"):
        configuration.compose(["method=vanilla", "variant=released"])


def test_the_embedding_belongs_to_the_target() -> None:
    assert torch.equal(RuleContext(1, lambda: TABLE).embedding(), TABLE)
    assert RuleContext(1, lambda: TABLE, embeddings=lambda: 2 * TABLE).embedding()[1] == 1.0
