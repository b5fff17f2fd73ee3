"""`specbench audit` on the command line: its rows, its settings, and its messages for bad input."""

from __future__ import annotations

import multiprocessing
import os
import re
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from commands import Call, cells_of, refused

from specbench.audit import audit, densities, model_recipes
from specbench.audit.audit_arguments import COLUMNS
from specbench.audit.models import built_in
from specbench.audit.tabular import random_tables
from specbench.config import parameters, variants
from specbench.errors import RunError
from specbench.harness import processes


@pytest.fixture
def call(call: Call) -> Call:
    """Runs `specbench audit ...` in an empty folder -> (exit code, stdout, stderr)."""
    return partial(call, "audit")


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Energy distances from fewer samples: the verdicts do not use them (tests of them: test_densities)."""
    monkeypatch.setattr(densities, "_ENERGY", 200)


def audit_row(call: Call, *arguments: str) -> dict[str, str]:
    """The only row of an audit. The exit code is 1 if it refutes the method."""
    code = call(*arguments, "out=one.csv")[0]
    [row] = cells_of(Path("one.csv"))
    assert code == (row["verdict"] == "not lossless")
    return row


def arrays(vocab: int = 3, length: int = 3) -> dict[str, np.ndarray]:
    p = random_tables(vocab, length, seed=1)
    q = random_tables(vocab, length, seed=2, near=p)
    named = {f"{letter}{t}": x.numpy() for letter, tables in (("p", p), ("q", q)) for t, x in enumerate(tables)}
    return named | {"codebook": np.random.default_rng(0).normal(size=(vocab, 2))}


def test_an_audit_prints_a_table_and_writes_it(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_recipes, "TINY", {})
    words = "method=sd window=2 temperature=0.7 audit.samples=2e3 audit.seed=3 audit.margin=1 out=a/b.csv"
    code, out, err = call(*words.split())
    assert code == 0
    head, *lines, _, _, _, limit, exercised, wrote = out.splitlines()
    assert re.match(r"sd \(rule exact\): lossless .*TV <= 0\.", limit)
    assert "depths 1 to 2: " in exercised
    columns = ["method", "drafter", "rule", "model"]
    assert head.split() == [*columns, *list(COLUMNS)[1 : list(COLUMNS).index("verdict") + 1]]
    assert [line.split()[:4] for line in lines] == [
        ["sd", "draft_model", "exact", name] for name in model_recipes.TABLES
    ]
    assert all(line.endswith("  lossless") for line in lines)
    assert wrote == "wrote a/b.csv"
    assert "sd on v2t10" in err
    rows = cells_of(tmp_path / "a/b.csv")
    assert list(rows[0]) == list(COLUMNS)
    sizes = [(name, str(built_in(name).vocab), str(built_in(name).length)) for name in model_recipes.TABLES]
    assert [(r["model"], r["V"], r["T"], r["samples"], r["seed"]) for r in rows] == [(*s, "2000", "3") for s in sizes]
    assert rows[0]["parameters"] == "window=2 temperature=0.7 top_k=null top_p=1.0"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b.csv"]


def test_an_audit_names_what_it_audited(call: Call, tmp_path: Path) -> None:
    """`method=cool_sd rule=exact` used to be printed as cool_sd, lossless."""
    words = ["audit.samples=1000", "audit.model=v3t5", "audit.margin=1", "out=a.csv"]
    for choices, drafter, rule, values in (
        (["method=cool_sd", "rule=exact", "tree=mc_sim_7b_63"], "eagle_tree", "exact", "tree=mc_sim_7b_63"),
        (["method=cool_sd", "delta=3", "drafter=eagle", "window=2"], "eagle", "cool", "delta=3.0"),
        (["method=sd", "rule=uniform", "delta=1.5"], "draft_model", "uniform", "delta=1.5"),
    ):
        code, out, _ = call(*choices, *words)
        assert code == (rule != "exact")
        head, line, *_ = out.splitlines()
        printed = dict(zip(head.split(), line.replace(" variant=optimal", "").split(), strict=False))
        row, *_ = cells_of(tmp_path / "a.csv")
        for output in (printed, row):
            assert (output["drafter"], output["rule"]) == (drafter, rule)
        assert values in row["parameters"].split()
        assert f": drafter={drafter} rule={rule} {row['parameters']}\n" in out


def test_tables_of_ones_own(call: Call, tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", **arrays())
    words = ("audit.tables=mine.npz", "audit.samples=4000", "audit.margin=1")
    row = audit_row(call, "method=sjd", "window=1", *words)
    assert (row["model"], row["V"], row["T"], row["verdict"]) == ("mine.npz", "3", "3", "lossless")
    assert row["tv_bound"] == row["accepted_length_expected"] == ""  # not of Theorem 2
    # the draft tables replace a network, whatever the preset's: a chain where window= asks for one
    row = audit_row(call, "method=lantern", "window=2", "k=1", "delta=0.5", *words)
    assert row["parameters"].startswith("window=2 delta=0.5 k=1 ")
    assert row["verdict"] == "not lossless"
    assert float(row["tv_low"]) <= float(row["tv_exact"]) <= float(row["tv_bound"])
    assert float(row["accepted_length_low"]) < float(row["accepted_length_expected"])
    row = audit_row(call, "method=sd", "tree=[[0],[1],[0,0]]", *words)
    assert row["parameters"].startswith("tree=[[0],[1],[0,0]] ")
    assert row["tv_bound"] == ""


def test_the_rows_do_not_depend_on_the_processes(call: Call, tmp_path: Path) -> None:
    """The audit of every preset takes too long on one core, so it runs in several processes."""
    words = ("method=sjd", "audit.model=v3t5", "audit.samples=3000", "audit.margin=1")
    for workers in ("1", "2"):
        assert call(*words, f"audit.workers={workers}", f"out={workers}.csv")[0] == 0
    first, second = ((tmp_path / f"{workers}.csv").read_text() for workers in ("1", "2"))
    assert first == second
    assert len(cells_of(tmp_path / "2.csv")) > 2


def test_the_death_of_a_process_costs_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `fork`, which starts faster than `spawn`."""
    monkeypatch.setattr(processes, "get_context", lambda method: multiprocessing.get_context("fork"))
    job = audit.Measurement(cast(Any, None), cast(Any, Deadly()), 1000, 0, 0.05)
    with pytest.raises(RunError, match=r"audit\.workers.*1"):
        list(audit.measured([job, job], 2, lambda count: None))


class Deadly:
    """A model that ends the process that reads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


OF_VECTORS = ["cspd", "cspd_paper"]


def only_methods(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    shipped = parameters.choices
    few = dict.fromkeys(names, "")
    monkeypatch.setattr(parameters, "choices", lambda kind: few if kind == "method" else shipped(kind))


def test_every_preset_can_be_audited(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_recipes, "TABLES", {"v3t5": model_recipes.TABLES["v3t5"]})
    monkeypatch.setattr(model_recipes, "DENSITIES", {"d2t4": model_recipes.DENSITIES["d2t4"]})
    monkeypatch.setattr(model_recipes, "TINY", {})
    code, out, err = call("--all", "audit.samples=1000", "audit.margin=1", "out=all.csv")
    assert code == 1
    rows = cells_of(tmp_path / "all.csv")
    assert list(dict.fromkeys(row["method"] for row in rows)) == list(parameters.choices("method"))
    assert {row["method"]: row["same_as"] for row in rows if row["same_as"]} == {
        "band_tree": "band",  # a relaxed tree is audited on chains as well
        "eagle3": "eagle2",
        "eagle_traversal": "eagle3_traversal",
        "sd": "eagle_chain",
        "sd_block": "eagle_block",
    }
    continuous = [row["method"] for row in rows if row["model"] == "d2t4"]
    assert list(dict.fromkeys(continuous)) == OF_VECTORS
    assert len(continuous) > len(OF_VECTORS)  # drafts shorter than a sequence
    for row in rows:
        columns = ("dim", "ks", "ks_noise", "energy", "energy_noise", "acceptance_rate", "proposals", "fallbacks")
        assert {bool(row[name]) for name in columns} == {row["model"] == "d2t4"}
        assert {bool(row[name]) for name in ("V", "tv", "tv_low", "tv_noise")} == {row["model"] == "v3t5"}
    tables, vectors, audited, notes, limits = (part.splitlines() for part in out.split("\n\n"))  # a table of each kind
    assert len(tables) == 1 + len(rows) - len(continuous)
    assert [line.split()[0] for line in vectors] == ["method", *continuous]
    assert {line.split(":")[0].split()[0] for line in audited} == {row["method"] for row in rows}
    assert len(notes) >= sum(row["verdict"] == "undecided" for row in rows) > 0
    lines = [line.split()[0] for line in limits if not line.startswith(" ")]
    assert lines == [*dict.fromkeys(row["method"] for row in rows), "smallest", "wrote"]
    assert {line.split()[0]: line.split("  ")[-1] for line in vectors[1:]} == {
        "cspd": "not refuted",
        "cspd_paper": "not lossless",
    }
    assert "left out" not in err


def test_one_model_leaves_out_other_presets(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_methods(monkeypatch, "cspd", "eagle1", "sd", "vanilla")
    for model, count, note in (
        ("d1t4", ["cspd", "vanilla"], "eagle1, sd left out: .* d1t4 .*continuous"),
        ("v3t5", ["eagle1", "sd", "vanilla"], "cspd left out: .* v3t5 .*discrete"),
    ):
        code, _, err = call("--all", f"audit.model={model}", "temperature=0.7", "audit.samples=1000", "out=all.csv")
        assert code == 0
        rows = cells_of(tmp_path / "all.csv")
        assert list(dict.fromkeys(row["method"] for row in rows)) == count
        assert all("temperature=0.7" in row["parameters"] for row in rows)
        assert err.count("left out") == 1
        assert re.search(f"specbench: {note}", err)


def test_a_method_of_vectors(call: Call, tmp_path: Path) -> None:
    words = "gamma=1 prefill=0.3 align=false proposals=50 temperature=0.7 audit.samples=1000 audit.margin=1".split()
    code, out, _ = call("method=cspd", "criterion=exact", *words, "out=a.csv")
    assert code == 0
    rows = cells_of(tmp_path / "a.csv")
    assert list(rows[0]) == list(COLUMNS)
    verdicts = [(r["model"], r["dim"], r["verdict"]) for r in rows]
    assert verdicts == [(name, name[1], "not refuted") for name in model_recipes.DENSITIES]
    assert len(out.splitlines()) == 1 + len(rows) + 6
    assert rows[0]["parameters"] == (
        "gamma=1 prefill=0.3 align=false criterion=exact verify=causal on_reject=stop inner_temperature=1.0 tries=1"
        " proposals=50 temperature=0.7 final_noise=true"
    )
    lossy = ("criterion=exact", "on_reject=continue", "inner_temperature=42", "audit.model=d2t4", "audit.seed=7")
    row = audit_row(call, "method=cspd", *lossy, "audit.samples=3000")
    assert (row["verdict"], row["seed"], row["T"]) == ("not lossless", "7", "4")
    # the released behaviour ends with a mean, as MAR's own sampler does; both can be audited with densities, too
    for word, kept in (("", "final_noise=false"), ("final_noise=true", "final_noise=true")):
        row = audit_row(call, "method=cspd_paper", "audit.model=d1t4", *word.split(), "audit.samples=1000")
        assert row["parameters"].endswith(kept)


def test_arguments_of_all_reach_who_can_take_them(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_methods(monkeypatch, "eagle1", "gsd", "sd", "sjd_pac")
    np.savez(tmp_path / "bare.npz", **without("codebook"))
    code, _, err = call("--all", "window=4", "audit.tables=bare.npz", "audit.samples=1000", "out=all.csv")
    assert code == 0
    parameters = {row["method"]: row["parameters"] for row in cells_of(tmp_path / "all.csv")}
    assert list(parameters) == ["eagle1", "sd", "sjd_pac"]
    assert re.search("specbench: gsd .*bare.npz .*codebook", err)
    assert "tree=[[0],[1],[0,0]]" in parameters["eagle1"]
    assert "window=4 " in parameters["sd"]
    assert re.search("specbench: sjd_pac .*window.* 4 .* 3 .* 20 ", err)
    assert "window=3 " in parameters["sjd_pac"]
    assert "'nu'" in refused(call, "--all", "nu=3", "audit.model=v3t5", "audit.samples=1000")
    assert call("--all", "window=0", "audit.model=v3t5")[0] == 2


def test_every_variant_has_its_row(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ("scd", "sd")
    only_methods(monkeypatch, *few)
    small = ("audit.model=v2t10", "audit.samples=12000", "audit.margin=1")  # at 20,000 its p-value is 9e-21
    code, out, err = call("--variants", "window=4", *small, "out=all.csv")
    assert code == 1, err
    rows = cells_of(tmp_path / "all.csv")
    by_variant = {(row["method"], row["variant"]): row for row in rows}
    assert list(by_variant) == [(name, variant) for name in few for variant in variants.names(name)]
    assert "stored=old" in by_variant["scd", "released"]["parameters"]
    assert "window=4 " in by_variant["scd", "released"]["parameters"]
    assert "\nscd variant=exact (rule exact): lossless" in out
    assert "\nscd variant=released (rule exact): not lossless" in out
    assert re.search(f"TV.*: {float(rows[-1]['tv_low']):.4f} to .*scd variant=released on v2t10\\n", out, re.DOTALL)


def test_what_variants_refuse(call: partial[Any]) -> None:
    for word in ("method=sjd", "variant=released"):
        assert re.search(f"--variants .*{word.partition('=')[0]}=", refused(call, "--variants", word))
    assert "variant of sjd 'exact'" in refused(call, "method=sjd", "variant=exact")
    for wrong in ("[]", "{}", "[printed]"):
        assert "variant of sjd" in refused(call, "method=sjd", f"variant={wrong}")
        assert "variant of sjd" in refused(call.func, "run", "method=sjd", f"variant={wrong}")


MISTAKES = [
    (["audit.sample=5"], "unknown parameter 'audit.sample' (choose from: audit.device, audit.margin, audit.model,"),
    (["audit.samples=999"], "audit.samples must be an integer of at least 1000 and at most"),
    (["audit.samples=1000", "audit.samples=2000"], "'audit.samples' is given 2 times"),
    (["audit.workers=0"], "audit.workers must be an integer of at least 1 and at most 256 (got 0)"),
    (
        ["audit.device=gpu"],
        "audit.device must be cpu",
    ),
    (["audit.device=cuda:99"], "device=cuda:99 "),  # where there is no CUDA, and where there are fewer devices
    (["audit.seed=-1"], "audit.seed must be an integer of at least 0"),
    (
        ["audit.model=v9"],
        "unknown audit.model 'v9' (choose from: chameleon_tiny, emu3_tiny, llamagen_tiny, m4t24, m64t8, v2t10,",
    ),
    (["audit.model=v3t5", "audit.tables=a.npz"], "name two different models"),
    (
        ["method=cspd", "audit.model=v9"],
        "unknown audit.model 'v9' (choose from: d1t4, d1t5, d2t3, d2t4)",
    ),
    (["--all", "audit.model=v9"], "(choose from: chameleon_tiny, d1t4, d1t5, d2t3, d2t4, emu3_tiny,"),
    (
        ["method=sjd", "audit.model=d1t4"],
        "use audit.model=v2t10, v3t5, v4t8, v8t4, m4t24, m64t8, llamagen_tiny, chameleon_tiny, emu3_tiny",
    ),
    (["method=cspd", "audit.model=v3t5"], "use audit.model=d1t4, d1t5, d2t3, d2t4"),
    (["method=cspd", "rule=exact"], "drafter cspd and rule exact do not go together"),
    (["method=sjd", "rule=density"], "drafter sjd and rule density do not go together"),
    (["method=cspd", "temperature=0"], "temperature=0 leaves no densities to compare"),
    (["method=cspd", "criterion=path", "final_noise=false"], "use final_noise=true"),
    (["method=cspd", "diffusion_steps=5"], "'diffusion_steps' belongs to specbench run"),
    (["method=sjd", "final_noise=true"], "method 'sjd' (drafter sjd, rule exact) has no parameter 'final_noise'"),
    (["--all", "audit.model=d1t4", "window=3"], "has no parameter 'window'"),
    (["--all", "audit.model=d1t4", "drafter=sjd"], "drafter sjd and rule density do not go together"),
    (["audit.tables=a.npz"], "audit.tables: there is no file 'a.npz'"),
    (["n=4"], "'n' belongs to specbench run, an audit has no such parameter; give audit.samples"),
    (["hydra.run.dir=x"], "'hydra.run.dir' belongs to specbench run"),
    (["cfg_scale=3"], "only models of real classes have guidance"),
    (["delta=1,2"], "'delta' names several values; an audit takes one at a time"),
    (["method=sjd_pac", "window=3"], "does not fit window=3"),
    (["--all", "method=sd"], "--all and method= contradict each other"),
    (["out=/dev/null/a.csv"], "cannot write /dev/null/a.csv (Not a directory); choose another out=FILE.csv"),
]


def test_a_mistake_costs_one_sentence(call: Call, tmp_path: Path) -> None:
    for words, sentence in MISTAKES:
        err = refused(call, *words)
        assert sentence in err
        assert err.count("\n") == 1, words
    assert list(tmp_path.iterdir()) == []


def changed(name: str, value: Any) -> dict[str, np.ndarray]:
    return arrays() | {name: value}


def without(*names: str) -> dict[str, np.ndarray]:
    return {k: v for k, v in arrays().items() if k not in names}


TWO = np.full((3, 3), 1 / 3)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no target": (without("p0", "p1", "p2"), "bad.npz has no array p0"),
    "no draft": (without("q0", "q1", "q2"), "bad.npz has no array q0"),
    "a gap": (without("p1"), "bad.npz has no array p1"),
    "far away": (changed("p1000000000", TWO), "bad.npz has no array p3"),
    "too short": (without("q2"), "(p: V=3, T=3; q: V=3, T=2)"),
    "another V": (arrays() | {k: v for k, v in arrays(2).items() if k[0] == "q"}, "(p: V=3, T=3; q: V=2, T=3)"),
    "a wrong shape": (changed("p1", TWO[:2]), "p1 of bad.npz must be of shape (3, 3), not (2, 3)"),
    "a vector": (changed("p0", TWO[0]), "p0 of bad.npz must be of shape (1, V)"),
    "a scalar": (changed("p0", 1.0), "p0 of bad.npz must be of shape (1, V)"),
    "one token": ({"p0": np.ones((1, 1)), "q0": np.ones((1, 1))}, "not (1, 1)"),
    "negative": (changed("p0", [[1.2, -0.2, 0.0]]), "p0 of bad.npz has negative probabilities"),
    "not a distribution": (changed("q1", TWO * [[1], [1.01], [1]]), "row 1 of q1 of bad.npz sums to 1.01, not 1"),
    "NaN": (changed("q1", TWO * np.nan), "q1 of bad.npz holds NaN or infinite values"),
    "text": (changed("q1", np.full((3, 3), "a")), "q1 of bad.npz is not an array of numbers"),
    "objects": (changed("q1", np.full((3, 3), {}, dtype=object)), "q1 of bad.npz is damaged or not an array"),
    "a codebook of another V": (changed("codebook", np.ones((4, 2))), "codebook of bad.npz must be of shape (3, d)"),
    "too many": ({"p0": np.full((1, 3000), 1 / 3000), "p1": TWO, "q0": TWO}, "V=3000 and T=2"),
}


def test_a_bad_file_costs_one_sentence(call: Call, tmp_path: Path) -> None:
    for name, (named, sentence) in BAD.items():
        np.savez(tmp_path / "bad.npz", **named)
        err = refused(call, "audit.tables=bad.npz")
        assert sentence in err, name
        assert err.startswith("specbench: audit.tables: ")
        assert err.count("\n") == 1, name
    (tmp_path / "text.npz").write_text("{}")
    assert "text.npz" in refused(call, "audit.tables=text.npz")
    np.save(tmp_path / "one.npy", TWO)
    assert "one.npy" in refused(call, "audit.tables=one.npy")


def test_tables_that_a_method_cannot_use(call: Call, tmp_path: Path) -> None:
    np.savez(tmp_path / "bare.npz", **without("codebook"))
    assert re.search("bare.npz .*discrete", refused(call, "method=cspd", "audit.tables=bare.npz"))
    err = refused(call, "method=lantern", "audit.tables=bare.npz")
    assert re.search(r"bare.npz .*codebook, \(V, d\)", err)
