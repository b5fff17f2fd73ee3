"""Verifiers of another engine: right and wrong ones, in every documented form, and functions that misbehave."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import ROOT, Call, case, cells_of, refused, usage_error

import specbench
from specbench.audit import verifier
from specbench.audit.tabular import TabularDrafter, random_tables
from specbench.audit.verifier import drawn_from
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import parse

SMALL = ("audit.model=v3t5", "window=2", "audit.samples=2000", "audit.margin=1")
PAGE = (ROOT / "docs/audit.md").read_text()


@pytest.fixture
def call(call: Call) -> Call:
    """Runs `specbench audit ...` in an empty folder that has the files of the page -> (exit code, stdout, stderr)."""
    for name, content in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL):
        Path(name).write_text(content)
    return partial(call, "audit")


def verify(p: Any, q: Any, tokens: Any, rng: np.random.Generator) -> tuple[int, int]:
    for d, token in enumerate(tokens):
        if rng.random() >= p[d, token] / q[d, token]:
            residual = np.maximum(p[d] - q[d], 0)
            return d, rng.choice(len(residual), p=residual / residual.sum())
    return len(tokens), rng.choice(p.shape[1], p=p[-1])


def with_uniforms(p: Any, q: Any, tokens: Any, uniforms: Any) -> tuple[int, int]:
    def drawn(r: Any) -> int:
        return min(int(np.searchsorted(np.cumsum(r), uniforms[-1] * r.sum(), side="right")), len(r) - 1)

    for d, token in enumerate(tokens):
        if uniforms[d] >= p[d, token] / q[d, token]:
            return d, drawn(np.maximum(p[d] - q[d], 0))
    return len(tokens), drawn(p[-1])


def with_tensors(p: Any, q: Any, tokens: Any, generator: torch.Generator) -> tuple[int, Any]:
    for d, token in enumerate(tokens.tolist()):
        if torch.rand((), generator=generator) >= p[d, token] / q[d, token]:
            return d, torch.multinomial((p[d] - q[d]).clamp_min(0), 1, generator=generator)
    return len(tokens), torch.multinomial(p[-1], 1, generator=generator)


def of_tree(p: Any, q: Any, tokens: Any, parents: Any, rng: np.random.Generator) -> tuple[int, int]:
    node, r = 0, p[0]
    while True:
        for i in np.flatnonzero(parents == node):
            if rng.random() < r[tokens[i]] / q[i, tokens[i]]:
                node, r = i + 1, p[i + 1]
                break
            r = np.maximum(r - q[i], 0)
            r /= r.sum()
        else:
            return node, rng.choice(len(r), p=r)


def tree_without_residual(p: Any, q: Any, tokens: Any, parents: Any, rng: np.random.Generator) -> tuple[int, int]:
    """Wrong: after a rejection the target's distribution, not the residual one."""
    node = 0
    while True:
        for i in np.flatnonzero(parents == node):
            if rng.random() < p[node, tokens[i]] / q[i, tokens[i]]:
                node = i + 1
                break
        else:
            return node, rng.choice(p.shape[1], p=p[node])


def changes_its_arguments(p: Any, q: Any, tokens: Any, rng: np.random.Generator) -> tuple[int, int]:
    result = verify(p.copy(), q.copy(), tokens.copy(), rng)
    p[:], q[:], tokens[:] = 0, 0, 0
    return result


def audited(function: Callable[..., Any], **values: Any) -> specbench.api.AuditResult:
    chosen = {"model": "v3t5", "samples": 2000, "margin": 1} | values
    return specbench.audit(verifier=function, quiet=True, **chosen)


@pytest.mark.parametrize(
    ("function", "size"),
    [
        (verify, {"window": 2}),
        (with_uniforms, {"window": 2}),
        (with_tensors, {"window": 2}),
        (changes_its_arguments, {"window": 2}),
        (of_tree, {"tree": [[0], [1], [0, 0]]}),
        (of_tree, {"tree": "4-1"}),  # more children than the vocabulary has tokens
    ],
)
def test_a_right_verifier_is_not_refuted(function: Callable[..., Any], size: dict[str, Any]) -> None:
    """With this seed. At another one its p-value is below 0.001 with a probability of 0.001 at most."""
    result = audited(function, **size)
    [row] = result.rows
    assert row["p_value"] > 0.001
    assert row["method"] == f"test_verifier:{function.__name__}"
    assert (row["model"], row["samples"], row["verdict"]) == ("v3t5", 2000, "not refuted")
    assert row["emitted_tv"] is row["tv_exact"] is None
    assert 1 < row["accepted_length"] < 3.5


def test_it_decodes_as_our_own_rule_does() -> None:
    """Accepted lengths of 4,000 sequences agree within five standard errors, of about 0.01 each, with the
    enumeration."""
    [row] = audited(verify, window=2, samples=4000).rows
    own, *_ = specbench.audit("eagle_chain", window=2, model="v3t5", samples=4000, margin=1, quiet=True).rows
    error = (row["accepted_length_high"] - row["accepted_length_low"]) / 4
    assert abs(row["accepted_length"] - own["accepted_length_expected"]) < 5 * error
    assert [word.split("=")[0] for word in row["exercised"].split()] == ["rejection_1", "rejection_2", "bonus_token"]


def test_a_wrong_tree_is_refuted() -> None:
    result = audited(tree_without_residual, tree=[[0], [1], [0, 0]])
    assert result.rows[0]["p_value"] < 1e-6
    assert result.verdict == "not lossless"


def test_the_rows_are_repeated() -> None:
    first, second, other = (audited(verify, window=2, seed=seed, samples=1000).rows[0] for seed in (0, 0, 1))
    assert first == second
    assert first["tv"] != other["tv"]


def test_the_examples_of_the_page(call: Call) -> None:
    """The page's commands, with fewer sequences and one model. The right one is not refuted, the wrong ones are."""
    [block] = [b for b in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if "verifier=" in b]
    fewer = {
        "verifier=right.py:verify": ("audit.model=v3t5", "audit.samples=20000"),
        "top_k=4": ("audit.model=v8t4", "audit.samples=1000"),
        "sampler=bfloat16.py:draw": ("audit.tables=wide.npz", "window=1", "audit.samples=3000"),
    }
    p = random_tables(256, 1, seed=1)  # a token has less than the last bit of a sum near 1
    np.savez("wide.npz", p0=p[0].numpy(), q0=random_tables(256, 1, seed=2, near=p)[0].numpy())
    lines = [line.split()[2:] for line in block.splitlines()]
    assert [words[-1] for words in lines] == list(fewer)
    for words in lines:
        name = words[-1]
        wrong = name != "verifier=right.py:verify"
        code, out, err = call(*words, *fewer[name], "out=row.csv")
        assert code == wrong, out + err
        for row in cells_of("row.csv"):
            assert row["verdict"] == ("not lossless" if wrong else "not refuted")
            assert (float(row["p_value"]) < 1e-6) == wrong


def test_siblings_are_drawn_from_what_is_left() -> None:
    """drawn_from: by hand for the three children of the root."""
    tables = random_tables(5, 3, seed=1)
    drafter = TabularDrafter(tables, parse("3-1"))
    rng = RandomStreams([(0, i) for i in range(4)])
    state = drafter.open(None, None, Sampling(), rng)
    nothing = torch.zeros(4, dtype=torch.int64)
    draft = drafter.propose(state, torch.zeros(4, 8, dtype=torch.int64), nothing, nothing)
    q = drawn_from(draft)
    for row in range(4):
        left = tables[0][0].clone()
        for child in (1, 2, 3):
            torch.testing.assert_close(q[row, child], left / left.sum())
            left[draft.tokens[row, child]] = 0
        second = tables[1][draft.tokens[row, 1]]
        torch.testing.assert_close(q[row, 4], second)


#: The body of a function (p, q, tokens, rng) -> what the sentence names.
FAULTS = {
    "raise ValueError('no cache')": r"raised ValueError .*no cache",
    "raise SystemExit(0)": "raised SystemExit",
    "return p[9]": "raised IndexError",
    "return None": "returned None",
    "return 1, 2, 3": r"returned \(1, 2, 3\)",
    "return len(tokens) + 1, 0": "returned 3 as the accepted draft tokens.* 0 to 2",
    "return -1, 0": "returned -1 as the accepted draft tokens",
    "return 0, 3": "returned 3 as the next token.* 0 to 2",
    "return 0, float('nan')": "returned nan as the next token",
    "return 0.5, 0": "returned 0.5 as the accepted",
    "return 0, p[0]": "returned array.* as the next token",
    "return 0, 'a'": "returned 'a' as the next token",
}


def test_a_function_that_misbehaves_costs_one_sentence(call: Call) -> None:
    for body, sentence in FAULTS.items():
        with case(body):
            Path("mine.py").write_text(f"def verify(p, q, tokens, rng):\n    {body}\n")
            err = refused(call, "verifier=mine.py:verify", *SMALL).splitlines()[-1]
            assert re.search(f"verifier: mine.py:verify {sentence}", err)
            Path("mine.py").write_text("def draw(q, rng):\n    return len(q)\n")
    err = refused(call, "verifier=right.py:verify", "sampler=mine.py:draw", *SMALL).splitlines()[-1]
    assert "sampler: mine.py:draw returned 3 as the draft token" in err


def test_a_function_that_cannot_be_used_costs_one_sentence(call: Call) -> None:
    Path("mine.py").write_text("""
import math
verify, short, value = math.nan, lambda p, q: (0, 0), 3
def more(p, q, tokens, rng, cache): ...
def keyword(p, q, tokens, *, cache): ...
def two(p, q, tokens, rng, generator): ...
def named(rng, p, q, tokens): ...
builtin = dict.fromkeys
""")
    Path("broken.py").write_text("import nothing_of_this_name")
    Path("syntax.py").write_text("def")
    for named, sentence in {
        "mine": "FILE.py:FUNCTION or MODULE:FUNCTION",
        ":verify": "FILE.py:FUNCTION or MODULE:FUNCTION",
        "absent.py:verify": "no file 'absent.py'",
        "absent_module:verify": "absent_module cannot be imported, ModuleNotFoundError",
        "broken.py:verify": "broken.py cannot be imported, ModuleNotFoundError",
        "syntax.py:verify": "syntax.py cannot be imported, SyntaxError",
        "mine.py:absent": "mine.py has no function 'absent'",
        "mine.py:verify": "not a function",
        "mine.py:value": "not a function",
        "mine.py:short": r"has the parameters \(p, q\)",
        "mine.py:more": "parameters .*cache",
        "mine.py:keyword": "parameters .*cache",
        "mine.py:two": "several of rng",
        "mine.py:named": "parameters .*rng",
    }.items():
        with case(named):
            err = refused(call, f"verifier={named}", *SMALL)
            assert err.count("\n") == 1
            assert re.search(f"verifier.*{sentence}", err)


def test_a_module_is_found_in_this_folder(call: Call) -> None:
    Path("helper_of_mine.py").write_text("from right import verify\n")
    assert call("verifier=helper_of_mine:verify", *SMALL)[0] == 0
    Path("folder").mkdir()
    Path("folder/mine.py").write_text("from beside import verify\n")
    Path("folder/beside.py").write_text(Path("right.py").read_text())
    assert call("verifier=folder/mine.py:verify", *SMALL)[0] == 0


def test_arguments_that_do_not_fit(call: Call) -> None:
    right = "verifier=right.py:verify"
    for words, sentence in {
        ("sampler=bfloat16.py:draw",): "verifier=",
        (right, "method=sjd"): "'method'",
        (right, "tree=2-1"): "'tree'.*`parents`",
        (right, "rule=cool"): "'rule'",
        (right, "n=4"): "specbench run",
        (right, "--all"): "--all",
        (right, "audit.workers=2"): "audit.workers",
        (right, "audit.device=cpu"): "audit.device",
        (right, "audit.model=llamagen_tiny"): "llamagen_tiny has no draft tables",
        (right, "audit.model=d1t4"): "d1t4 has no draft tables",
        (right, "records=a.npz"): "verifier",
        (right, right): "verifier.* 2 times",
    }.items():
        with case(*words):
            err = refused(call, *words)
            assert err.count("\n") == 1
            assert re.search(sentence, err)


def test_the_functions_of_python() -> None:
    assert audited(partial(verify), window=2, samples=1000).verdict == "not refuted"
    message = usage_error(partial(audited, lambda p, q, tokens: (0, 99), window=2))
    assert "returned 99" in message
    assert "sampler" in usage_error(partial(specbench.audit, sampler=lambda q, rng: 0))
    assert verifier.loaded("verifier", verify, ("p", "q", "tokens")).by_name == {"rng"}
