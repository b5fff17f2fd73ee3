"""Recorded decisions of an engine: right and wrong engines, the calibration of the tests, and bad files."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Call, case, cells_of, refused

import specbench
from specbench.audit import records
from specbench.audit.records import Records, counts, measure, transformed

LINES = 20_000


@pytest.fixture
def call(call: Call) -> Call:
    """Runs `specbench audit ...` in an empty folder -> (exit code, stdout, stderr)."""
    return partial(call, "audit")


def softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray((shares / shares.sum(1, keepdims=True)).astype(np.float32))


def drawn(probs: np.ndarray, u: np.ndarray) -> np.ndarray:
    shares = probs.astype(np.float64).cumsum(1)
    return np.asarray((u[:, None] * shares[:, -1:] >= shares).sum(1))


@dataclass
class Engine:
    """Draws a token of q and verifies it, one line after the other, each with its own p and q."""

    lines: int
    vocab: int = 64
    seed: int = 0
    same_number: bool = False  # one random number for two successive lines
    unnormalised: bool = False  # the residual distribution
    bfloat16: bool = False  # the draft is drawn from sums in bfloat16

    def run(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        target = 2 * rng.normal(size=(self.lines, self.vocab))
        p, q = softmax(target), softmax(0.7 * target + 0.6 * rng.normal(size=target.shape))
        first, second, last = rng.random((3, self.lines))
        drafted = self.in_bfloat16(q, first) if self.bfloat16 else drawn(q, first)
        own = np.arange(self.lines)
        accepted = second < p[own, drafted].astype(np.float64) / q[own, drafted]
        if self.same_number:
            last[1::2] = last[: self.lines // 2 * 2 : 2]
            return {"p": p, "emitted": drawn(p, last)}
        residual = np.maximum(p.astype(np.float64) - q, 0)
        recovered = drawn(residual, last)
        if self.unnormalised:
            recovered = (last[:, None] >= residual.cumsum(1)).sum(1).clip(max=self.vocab - 1)
        return {"p": p, "q": q, "drafted": drafted, "emitted": np.where(accepted, drafted, recovered)}

    @staticmethod
    def in_bfloat16(q: np.ndarray, u: np.ndarray) -> np.ndarray:
        shares = torch.from_numpy(q).cumsum(1).bfloat16().double().numpy()
        return np.asarray((u[:, None] * shares[:, -1:] >= shares).sum(1))


def row_of(named: dict[str, np.ndarray], seed: int = 0) -> dict[str, Any]:
    values = {name: named.get(name) for name in ("q", "drafted")}
    return measure(Records("engine", named["p"], named["emitted"], **values), seed, 0.05)


def test_a_right_engine_is_not_refuted() -> None:
    row = row_of(Engine(LINES).run())
    assert (row["verdict"], row["samples"], row["V"], row["tv_low"]) == ("not refuted", LINES, 64, 0)
    assert min(row["p_value"], row["p_drafted"], row["p_acceptance"]) > 0.001
    # a share of 20,000 has a standard error of 0.0035 at most
    assert row["acceptance_rate"] == pytest.approx(row["acceptance_expected"], abs=0.014)
    # Hoeffding: 2 * 19 * 3 limits, all valid with 95 %: sqrt(ln(2280) / 40,000) = 0.0139
    assert row["ks"] < 0.0139 < row["ks_high"] < 0.03


def test_wrong_engines_are_refuted() -> None:
    row = row_of(Engine(5000, unnormalised=True).run())
    assert row["verdict"] == "not lossless"
    assert row["p_value"] < 1e-6
    assert 0 < row["tv_low"] < row["ks_high"]
    assert row["p_drafted"] > 0.001
    # 1,024 tokens: a token has less than the last bit of a sum near 1
    row = row_of(Engine(5000, vocab=1024, bfloat16=True).run())
    assert row["verdict"] == "not lossless"
    assert max(row["p_value"], row["p_drafted"]) < 1e-6
    row = row_of(Engine(5000, same_number=True).run())
    assert row["verdict"] == "not lossless"
    assert row["p_value"] < 1e-6
    assert row["acceptance_rate"] is None


def test_a_token_without_probability_refutes() -> None:
    named = Engine(1000).run()
    token = named["emitted"][7]
    named["p"][7, token] = 0
    named["p"][7] /= named["p"][7].sum()
    assert row_of(named)["p_value"] == 0
    assert row_of(named)["verdict"] == "not lossless"


def test_p_values_of_right_engines_are_calibrated() -> None:
    """Of 120 engines, each p-value is below 0.05 for 6; more than 17 have a chance of 1 in 10,000 (binomial)."""
    rows = [row_of(Engine(600, vocab=8, seed=seed).run(), seed) for seed in range(120)]
    for name in ("p_value", "p_drafted", "p_acceptance"):
        below = sum(row[name] < 0.05 for row in rows)
        assert below <= 17, name
    assert sum(row["p_acceptance"] < 0.5 for row in rows) > 30
    assert sum(row["tv_low"] > 0 for row in rows) <= 12  # at most 2.5 % each; the limit is wide


def test_the_transform_by_hand() -> None:
    p = np.array([[0.5, 0.2, 0.2, 0.1]] * 3)
    tokens, spread, used = np.array([0, 2, 3]), np.array([0.5, 0.25, 0.0]), np.ones(3, dtype=bool)
    # by falling p: token 0, then 1 and 2 as one value, then 3
    assert transformed(p, tokens, spread, used).tolist() == pytest.approx([0.25, 0.5 + 0.25 * 0.4, 0.9])
    used[1] = False
    assert transformed(p, tokens, spread, used).tolist() == pytest.approx([0.25, 0.9])


def test_equal_lines_give_pearsons_test() -> None:
    """With one p for all lines, d^T C^+ d is Pearson's statistic."""
    from scipy import stats

    p = np.tile([0.4, 0.3, 0.2, 0.1], (1000, 1))
    tokens = drawn(p, np.random.default_rng(0).random(1000))
    wanted = stats.chisquare(np.bincount(tokens, minlength=4), 1000 * p[0]).pvalue
    assert counts(p, tokens, np.ones(1000, dtype=bool)) == pytest.approx(wanted, rel=1e-6)


def test_the_command(call: Call) -> None:
    right, wrong = Engine(4000).run(), Engine(4000, unnormalised=True).run()
    right["drafted"][:100], right["q"][:100] = -1, 0  # lines without a draft
    np.savez("right.npz", **right)
    np.savez("wrong.npz", **wrong)
    np.savez("bare.npz", p=right["p"], emitted=right["emitted"], other=np.full(3, "a"))
    for name, code, verdict in (("right", 0, "not refuted"), ("wrong", 1, "not lossless"), ("bare", 0, "not refuted")):
        got, out, err = call(f"records={name}.npz", "audit.seed=3", "audit.margin=0.1", "out=row.csv")
        [row] = cells_of("row.csv")
        assert (got, row["verdict"], row["method"], row["seed"]) == (code, verdict, f"{name}.npz", "3"), err
        assert f"{name}.npz: {verdict} (" in out
        assert out.endswith("wrote row.csv\n")
        assert bool(row["p_drafted"]) == (name != "bare")
    result = specbench.audit(records=Path("wrong.npz"), quiet=True)
    assert result.verdict == "not lossless"
    assert "wrong.npz" in repr(result)


def test_too_few_lines_are_undecided(call: Call) -> None:
    np.savez("few.npz", **Engine(300).run())
    code, out, _ = call("records=few.npz")
    assert code == 0
    assert "few.npz: undecided" in out
    assert "audit.margin=0.05" in out
    assert "audit.samples" not in out


def changed(**values: Any) -> dict[str, Any]:
    return Engine(120, vocab=3).run() | values


GOOD = Engine(120, vocab=3).run()
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "bad.npz has no p"),
    "no token": ({"p": GOOD["p"]}, "bad.npz has no emitted"),
    "empty": ({"p": np.zeros((0, 3)), "emitted": np.zeros(0)}, "0 lines"),
    "few": ({name: x[:99] for name, x in GOOD.items()}, "99 lines"),
    "a vector": (changed(p=np.ones(120)), r"p of bad.npz must be of shape \(N, V\)"),
    "one token": (changed(p=np.ones((120, 1))), r"\(120, 1\)"),
    "q of another V": (changed(q=np.ones((120, 4)) / 4), r"q of bad.npz must be of shape \(120, 3\)"),
    "fewer tokens": (changed(emitted=GOOD["emitted"][:-1]), r"emitted of bad.npz must be of shape \(120,\)"),
    "NaN": (changed(p=GOOD["p"] * np.nan), "p of bad.npz holds NaN"),
    "NaN in q": (changed(q=GOOD["q"] * np.nan), "q of bad.npz holds NaN"),
    "negative": (changed(p=np.tile([1.2, -0.2, 0], (120, 1))), "line 0 of p .* negative"),
    "not normalised": (changed(p=GOOD["p"] * 1.01), "line [0-9]+ of p .* sums to 1.01"),
    "q not normalised": (changed(q=GOOD["q"] * 0.5), "line [0-9]+ of q .* sums to 0.5"),
    "out of range": (changed(emitted=GOOD["emitted"] + 1), "line [0-9]+ of emitted .* is 3, .* 0 to 2"),
    "no token emitted": (changed(emitted=GOOD["emitted"] - 1), "of emitted .* is -1"),
    "a fraction": (changed(drafted=GOOD["drafted"] + 0.5), "of drafted .* -1 to 2"),
    "below -1": (changed(drafted=GOOD["drafted"] - 2), "of drafted .* is -2"),
    "text": (changed(emitted=np.full(120, "a")), "emitted of bad.npz is not an array of numbers"),
    "objects": (changed(emitted=np.full(120, {}, dtype=object)), "emitted of bad.npz is damaged"),
}


def test_a_bad_file_costs_one_sentence(call: Call) -> None:
    for name, (named, sentence) in BAD.items():
        with case(name):
            np.savez("bad.npz", **named)
            err = refused(call, "records=bad.npz")
            assert re.match(f"specbench: records: .*{sentence}", err)
            assert err.count("\n") == 1
    Path("text.npz").write_text("{}")
    Path("empty.npz").write_text("")
    Path("text.parquet").write_text("{}")
    np.save("one.npy", GOOD["p"])
    for name in ("text.npz", "empty.npz", "one.npy", "absent.npz", "absent.parquet", "text.parquet"):
        with case(name):
            err = refused(call, f"records={name}")
            assert err.startswith("specbench: records: ")
            assert err.count("\n") == 1


def test_arguments_that_do_not_fit(call: Call) -> None:
    np.savez("right.npz", **GOOD)
    for words in (["method=sjd"], ["audit.samples=1000"], ["window=3"], ["verifier=a.py:b"], ["--all"]):
        assert words[0].partition("=")[0] in refused(call, "records=right.npz", *words)


def test_parquet(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns as pandas gives them; reading itself is pandas' work."""
    import pandas as pd

    named = Engine(200, vocab=5).run()
    columns = pd.DataFrame({name: list(x) for name, x in named.items()})
    Path("mine.parquet").write_bytes(b"")
    monkeypatch.setattr(pd, "read_parquet", lambda path: columns)
    read = records.load("mine.parquet")
    assert read.q is not None
    np.testing.assert_array_equal(read.p, named["p"])
    np.testing.assert_array_equal(read.emitted, named["emitted"])
    columns.at[3, "p"] = np.ones(2)
    assert "p of mine.parquet differ in length" in refused(call, "records=mine.parquet")


def test_parquet_needs_a_package(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pyarrow" in refused(call, "records=mine.parquet")
