"""The output of the command line, and its exit codes."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import ROOT, Call, case, python, refused, row_of
from fake_pipeline import FakePipeline, at, interrupt
from omegaconf import OmegaConf

from specbench.cli.commands import COMMANDS, find
from specbench.config import composition, configuration, parameters, registry
from specbench.errors import UsageError
from specbench.harness import run
from specbench.rows.csv_files import read_rows
from specbench.storage.package import __version__
from specbench.training import recipes


def test_help_version_and_no_words(call: Call) -> None:
    for words in (["--help"], ["-h"], ["help"], []):
        code, out, _ = call(*words)
        assert code == 0
        assert all(f"\n  {name} " in out for name in ("run", "list", "tables", "train"))
    assert call("--version") == (0, f"specbench {__version__}\n", "")


def test_help_of_run_shows_the_choices_and_the_parameters(call: Call, tmp_path: Path) -> None:
    code, out, err = call("run", "--help")
    assert (code, err) == (0, "")
    assert {(name, value) for name, value, *_ in rows(out)} >= {
        ("delta", "1.1"),
        ("top_k", "null"),
        ("baseline", "true"),
    }
    names = set(re.findall(r"\w+", out.partition("\nnames:")[2]))
    assert all(choice in names for group in parameters.groups() for choice in parameters.choices(group))
    code, out, _ = call("run", "method=sd", "window=3", "--help")
    assert code == 0
    [window] = [row for row in rows(out) if row[0] == "window"]
    assert window[1:3] == ["3", "integer"]
    assert "length" in window
    assert re.search(r"\b1 and at most 2,000\b", out)
    assert ["window", "5"] in [row[:2] for row in rows(call("run", "-m", "method=sd", "window=3,4", "--help")[1])]
    assert ["prompts", "(required)"] in [row[:2] for row in rows(call("run", "data=prompts", "--help")[1])]
    assert call("run", "--hydra-help")[0] == 0
    assert list(tmp_path.iterdir()) == []


def rows(help_: str) -> list[list[str]]:
    """The words of every line of the table that begins with the name of a parameter."""
    return [
        line.split() for line in help_.splitlines() if re.match(r"  \w", line) and line.split()[0] in parameters.table()
    ]


def test_help_of_every_method_and_model_has_every_parameter_and_fits(call: Call) -> None:
    presets = [(parameters.default_choice("model"), method) for method in parameters.choices("method")]
    for model, method in [*presets, *((model, "vanilla") for model in parameters.choices("model"))]:
        _, out, _ = call("run", f"model={model}", f"method={method}", "--help")
        shown = [row[0] for row in rows(out)]
        cfg = {
            "model": model,
            "method": method,
            "data": "scenes",
            "engine": "eager",
            **parameters.method_choices(method),
        }
        wanted = set(parameters.parameters_of(cfg)) - parameters.declared("data", "scenes")
        assert wanted <= set(shown), (model, method)
        assert len(shown) == len(set(shown))
        assert max(map(len, out.splitlines())) <= 120


def test_every_command_lists_its_arguments_and_refuses_a_bad_one(call: Call, tmp_path: Path) -> None:
    for name in COMMANDS:
        command = find(name)
        with case(name):
            code, out, err = call(name, "--help")
            assert (code, err) == (0, "")
            tables = [command.arguments, *(pkgutil.resolve_name(where) for where in command.tables.values())]
            entries = [entry for table in tables for entry in (table() if callable(table) else table)]
            assert all(f"\n  {entry} " in out for entry in entries)
            assert max(map(len, out.splitlines())) <= 120
            assert "unrecognized arguments: --nope" in refused(call, name, "--nope")
            for argument in [argument for argument in command.by_name if argument[0] != "-"][:1]:
                assert f"'{argument}' is given twice" in refused(call, name, f"{argument}=1", f"{argument}=2")
                assert f"'{argument}=' has no value" in refused(call, name, f"{argument}=")
                assert f"write {argument}=x instead of --{argument}" in refused(call, name, f"--{argument}", "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("hydras", [[], ["hydra.job.name=mine"]])
@pytest.mark.parametrize(("arguments", "jobs"), [(["delta=2"], 1), (["-m", "delta=1,2"], 2)])
def test_a_job_is_composed_and_validated_once(
    hydras: list[str], arguments: list[str], jobs: int, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for module, name in ((composition, "compose"), (parameters, "validate")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, real=real, name=name: (calls.append(name), real(*a))[1])
    code, out, _ = call("run", *arguments, *hydras, "metrics=none", "n=1", "out=here")
    assert (code, out.count("tokens a step")) == (0, jobs)
    assert calls[: 2 * jobs] == ["compose", "validate"] * jobs
    assert calls.count("compose") == jobs  # a grid reads the stored configurations again for its last line


def test_the_commands_in_the_help_of_run_work(call: Call, tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("one\ntwo\n")
    commands = re.findall(r"^ +specbench (run .*?)(?:   .*)?$", call("run", "--help")[1], re.MULTILINE)
    assert len(commands) >= 8
    for command in commands:
        if "llamagen_xl" in command:  # which has to be fetched
            assert configuration.compose(command.split()[1:]).n == 5000
            continue
        words = command.replace("n=16", "n=1").split()
        if "-m" in words:
            assert configuration.grid(words[2:], multirun=True)
        elif "--hydra-help" not in words:  # which another test asks for
            small = [word for word in ("metrics=none", "n=1") if word not in words and "--" not in command]
            assert call(*words, *small)[0] == 0, command


def test_cfg_job_shows_what_a_run_would_use(call: Call, tmp_path: Path) -> None:
    words = ("protocol=sjdpac_table1@3", "model=lumina_mgpt", "method=sjd_pac", "+seed=3", "--cfg", "job")
    code, out, _ = call("run", *words)
    assert code == 0
    for line in ("protocol: sjdpac_table1@3", "method: sjd_pac", "caption: running_longest", "size: 768", "seed: 3"):
        assert f"\n{line}\n" in out
    assert call("run", "-m", "delta=1,2", "--cfg", "job")[1].count("\nmethod: cool_sd\n") == 2
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_costs_one_sentence_and_exit_code_2(call: Call, tmp_path: Path) -> None:
    for words, sentence in [
        (
            ["walk"],
            "unknown command 'walk' (choose from: audit, bench, breakdown, collect, compare, convert, evaluate, fetch,",
        ),
        (["run", "--cfg", "jo"], "--cfg must be one of job, hydra, all (got 'jo')"),
        (["run", "method=nope", "--help"], "unknown method 'nope'"),
        (["run", "delta=0"], "delta must be a number above 0 (got 0)"),
        (["run", "data=prompts"], "prompts must be a file of prompts, as in prompts=my.txt (got null)"),
        (["run", "data=coco2017", "n=1", "out=here"], "run `specbench fetch data=coco2017`, or name a folder"),
        (["run", "prompts=absent.txt", "out=here"], "there is no file absent.txt"),
        (["run", "prompts=absent.txt", "split=train"], "has no parameter 'split' (it belongs to data coco2014, "),
        (["run", "n=1", "out=/dev/null/x"], "cannot write into /dev/null/x (Not a directory)"),
        (["run", "-m", "n=1", "delta=1,2", "out=/dev/null/x"], "cannot write into /dev/null/x (Not a directory)"),
        (["list", "colours"], "unknown group 'colours' (choose from: data, drafters"),
    ]:
        err = refused(call, *words)
        assert (sentence in err, err.count("\n")) == (True, 1), words
        assert list(tmp_path.iterdir()) == []  # nothing was started


def test_the_spelling_of_other_tools_is_answered_with_the_right_form(call: Call, tmp_path: Path) -> None:
    for words, right in [
        ("run --method cool_sd", "method=cool_sd"),
        ("run delta=1 --limit 16 --num-samples 16", "n=16 n=16"),
        ("run --n 16", "n=16"),
        ("run -n 16", "n=16"),
        ("run -m --model emu3 --output dir", "model=emu3 out=dir"),
        ("run --seed 1 --batch-size 4 --device cuda", "seed=1 batch=4 device=cuda"),
        ("run --temperature -1", "temperature=-1"),
        ("run --top-k n=3", "top_k=..."),
        ("run --dryrun", "--dry-run"),
        ("bench --steps 3 --batch_size 2", "bench.steps=3 batch=2"),
        ("audit --method sjd --samples 1000", "method=sjd audit.samples=1000"),
        ("train --drafter eagle --batch-size 2 --seed 1", "drafter=eagle batch=2 seed=1"),
        ("resume here --limit 3", "n=3"),
        ("suite glance --seeds 1 --device cuda", "seeds=1 device=cuda"),
        ("tables --modle emu3", "--model emu3"),
    ]:
        assert f"write {right} instead of -" in refused(call, *words.split()), words
        assert list(tmp_path.iterdir()) == [], words


def test_what_no_argument_is_like_is_unrecognized(call: Call) -> None:
    for words in ("run --fast", "run --fast --n 3", "bench --n 3"):  # a benchmark has no n
        assert "unrecognized arguments: --" in refused(call, *words.split())


def test_a_typo_is_answered_with_the_name_that_was_meant(call: Call) -> None:
    for words, meant in [
        ("method=coolsd", "cool_sd"),
        ("method=Cool-SD", "cool_sd"),
        ("method=lanternpp", "lantern_pp"),
        ("method=LANTERN++", "lantern_pp"),
        ("method=medusa2", "medusa"),
        ("rule=neighborhood", "neighbourhood"),
        ("drafter=EAGLE-3", "eagle3"),
        ("verification=Traversal", "traversal"),
        ("model=Janus-Pro-7B", "janus_pro_7b"),
        ("data=COCO-2017", "coco2017"),
        ("metrics=[HPSv2.1]", "hpsv21"),
        ("protocol=SJD-PAC_table1", "sjdpac_table1"),
        ("engine=Triton", "triton"),
        ("Top-K=3", "top_k"),
        ("cfg=3", "cfg_scale"),
        ("batch-size=3", "batch"),
        ("limit=3", "n"),
        ("schedule=Linaer", "linear"),
        ("verification=travrsal", "traversal"),
        ("dtype=bfloat-16", "bfloat16"),
        ("baseline=yeah", None),
        ("method=nothing", None),
        ("zzz=1", None),
    ]:
        match = re.search(r"did you mean (\S+?)\?", refused(call, "run", words))
        assert (match and match[1]) == meant, words


def test_help_of_train_has_type_default_and_meaning_of_every_parameter(call: Call) -> None:
    code, out, err = call("train", "--help")
    assert (code, err) == (0, "")
    table = out.partition("\nrecipes")[0]
    shown = {line.split()[0]: line for line in table.splitlines() if re.match(r"  [a-z]\w* {2,}\S", line)}
    assert shown.keys() >= recipes.TABLE.keys()
    for name, parameter in recipes.TABLE.items():
        assert len(re.split(" {2,}", shown[name].strip())) == 4, name
        assert parameter.line.split()[0] in shown[name]
    assert re.match(r"  lr +0.0015 +number above 0 +peak", shown["lr"])
    assert "at most 0.9999" in " ".join(table.split())


def test_the_listed_recipes_equal_the_settings_of_a_training() -> None:
    """The settings of a training are the table's values, with the changes of its recipe and its drafter, as text."""
    values, changes = recipes.defaults()
    listed: dict[str, tuple[str, dict[str, str]]] = {}
    of_drafter: dict[str, dict[str, dict[str, str]]] = {}
    for name, text in changes:
        settings = dict(word.split("=") for word in text.split() if "=" in word)
        if name.startswith("- "):
            of_drafter[list(listed)[-1]][name.removeprefix("- ")] = settings
        else:
            listed[name], of_drafter[name] = (text.split()[1].rstrip(","), settings), {}
    for name in listed:
        chain = [name]
        while (like := listed[chain[0]][0]) in listed:
            chain.insert(0, like)
        for kind in ("eagle", "eagle3", "medusa", "dflash", "draft_model"):
            wanted = recipes.settings(name, kind)
            texts = [listed[link][1] for link in chain] + [of_drafter[link].get(kind, {}) for link in chain]
            changed = {key: yaml.safe_load(text) for link in texts for key, text in link.items()}
            fixed = {"run", "drafter", "recipe", "out"}
            assert {k: v for k, v in wanted.items() if k not in fixed} == {
                k: {**values, **changed}[k] for k in wanted if k not in fixed
            }, (name, kind)
            # A recipe's data replace another's.
            of_data = next((text for text in reversed(texts) if "data" in text), {})
            assert wanted["run"] == {k: of_data[k] for k in ("data", "split") if k in of_data}, (name, kind)


def test_all_prompts_are_recorded_as_a_number(call: Call, tmp_path: Path) -> None:
    def recorded() -> tuple[int, int, str]:
        row = row_of("here")
        return row["n"], OmegaConf.load(tmp_path / "here/config.yaml").n, row["config_hash"]

    prompts = tmp_path / "my.txt"
    prompts.write_text("one\ntwo\nthree\nfour\nfive\n")
    assert call("run", "prompts=my.txt", "metrics=none", "n=2", "out=here")[0] == 0
    assert call("resume", "here", "n=all")[0] == 0
    assert recorded()[:2] == (5, 5)
    five = recorded()[2]
    prompts.write_text(prompts.read_text() + "six\n")
    assert call("run", "prompts=my.txt", "metrics=none", "out=here")[0] == 0
    assert recorded()[:2] == (6, 6)
    assert recorded()[2] != five
    assert "nothing left to do: 6 images" in call("run", "prompts=my.txt", "metrics=none", "n=6", "out=here")[1]
    assert re.search("n=9.*n=6", refused(call, "run", "prompts=my.txt", "n=9", "out=there"))
    assert "n=all" in refused(call, "run", "metrics=none", "n=all", "out=there")
    prompts.write_text("a prompt\n" * 1001)
    with pytest.raises(UsageError, match="n=all.*1,001.*1,000"):
        configuration.compose(["prompts=my.txt", "images_per_prompt=1000"])
    assert {path.name for path in tmp_path.iterdir()} == {"here", "my.txt"}  # Hydra writes nothing


def test_a_grid_has_a_folder_for_each_job(call: Call, tmp_path: Path) -> None:
    words = ("run", "-m", "metrics=none", "n=1", "delta=1.1,2", "nu=0.5,0.7", "out=grid")
    code, out, err = call(*words)
    assert code == 0
    assert "4 jobs in grid" in err
    assert out.count("tokens a step") == 4
    *_, summary, following = out.splitlines()
    assert summary == "grid: 4 runs, 4 finished; 8 of 8 images"
    assert following.endswith(": specbench show grid")
    assert call("show", "grid", "--format", "csv")[1].count("\n") == 6  # with the header and vanilla
    rows = {job.name: row_of(job) for job in tmp_path.glob("grid/*") if job.is_dir()}
    assert {name: (row["delta"], row["nu"]) for name, row in rows.items()} == {
        "delta=1.1,nu=0.5": (1.1, 0.5),
        "delta=1.1,nu=0.7": (1.1, 0.7),
        "delta=2,nu=0.5": (2.0, 0.5),
        "delta=2,nu=0.7": (2.0, 0.7),
    }
    assert call(*words)[1].count("nothing left to do") == 4
    assert call("run", "n=1", "metrics=none", "out=grid")[0] == 2  # no run of its own
    assert call("run", "-m", "n=1,2", "metrics=none", "out=grid/delta=2,nu=0.5")[0] == 2


def test_a_job_that_fails_does_not_stop_the_grid(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(cfg: Any) -> FakePipeline:
        if cfg.get("delta") == 2:
            raise UsageError("no such thing")
        if cfg.get("delta") == 3:
            raise RuntimeError("out of luck")
        return FakePipeline(cfg)

    monkeypatch.setattr(run, "_load_pipeline", load)
    code, out, err = call("run", "-m", "metrics=none", "n=1", "delta=1,2,4", "out=grid")
    assert code == 2
    assert "grid: 3 runs, 2 finished, 1 not started; 4 of 6 images; continue with specbench resume grid\n" in out
    assert "specbench: no such thing\n" in err
    assert "1 of 3 jobs failed" in err
    assert "specbench run -m metrics=none n=1 delta=1,2,4 out=grid" in err
    assert {p.parent.name for p in tmp_path.glob("grid/*/row.csv")} == {"delta=1", "delta=4"}
    code, out, err = call("run", "-m", "metrics=none", "n=1", "delta=2,3", "out=o n")
    assert code == 1
    # No row to show.
    assert out == "o n: 2 runs, 1 stopped, 1 not started; 0 of 4 images; continue with specbench resume 'o n'\n"
    code, _, err = call("run", "-m", "metrics=none", "n=1", "delta=3,4", "out=other")
    assert code == 1
    assert "RuntimeError: out of luck" in err
    assert "Traceback" not in err
    assert "RuntimeError: out of luck" in (tmp_path / "other/delta=3/run.log").read_text()  # with its traceback


def test_another_grid_in_a_folder_loses_no_job(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["run", "-m", "metrics=none", "out=grid"]
    monkeypatch.setattr(run, "_load_pipeline", at(0, interrupt))
    assert call(*words, "n=2", "delta=1,2")[0] == 130
    monkeypatch.setattr(run, "_load_pipeline", FakePipeline)
    before = (tmp_path / "grid/grid.json").read_bytes()
    for other in (["n=2", "delta=3,4"], ["n=2", "delta=2,3"], ["n=2", "delta=1,2", "seed=1"]):
        err = refused(call, *words, *other)
        assert re.search("grid .*delta=1: .*out=", err)
        assert (tmp_path / "grid/grid.json").read_bytes() == before
    assert call(*words, "n=3", "delta=1,2,3")[0] == 0  # has every job
    assert call(*words, "n=2", "delta=4,5")[0] == 0  # the others are finished
    assert len(list(tmp_path.glob("grid/*/row.csv"))) == 5
    (tmp_path / "grid/grid.json").write_text("{")  # no command can continue it
    assert call(*words, "n=2", "delta=6")[0] == 0


def test_jobs_whose_names_differ_only_in_separators_have_two_folders(call: Call, tmp_path: Path) -> None:
    for name in ("a/b.txt", "a_b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    assert call("run", "-m", "prompts=a/b.txt,a_b.txt", "metrics=none", "out=grid")[0] == 0
    rows = {path.parent.name: row_of(path.parent) for path in tmp_path.glob("grid/*/row.csv")}
    assert {row["prompts"] for row in rows.values()} == {"a/b.txt", "a_b.txt"}
    assert rows["prompts=a_b.txt"]["prompts"] == "a_b.txt"  # a plain name is kept


def test_the_folder_of_a_job_with_long_parameters_has_a_short_name(call: Call, tmp_path: Path) -> None:
    """The tree has a thousand characters, the paths more bytes than the name of a file."""
    long = Path("提示" * 20, "é" * 60)
    long.mkdir(parents=True)
    for name in ("one.txt", "two.txt"):
        (long / name).write_text("a\nb\n")
    wide = str([[i] for i in range(200)]).replace(" ", "")
    trees = f"method=eagle1 tree={wide},4-2-1".split()
    for words in (trees, [f"prompts='{long}/one.txt','{long}/two.txt'", "method=sjd"]):
        code, _, err = call("run", "-m", *words, "n=2", "metrics=none", "out=grid")
        assert code == 0, err
        names = [path.name for path in tmp_path.glob("grid/*/")]
        assert len({name.casefold() for name in names}) == 2
        assert all(len(name) <= 80 and len(name.encode()) <= 160 for name in names)
        assert "2 finished" in call("status", "grid")[1]
        assert call("resume", "grid")[0] == 0
        assert call("collect", "grid", "out=all.csv")[0] == 0
        assert len(read_rows("all.csv")) == 2
        shutil.rmtree("grid")
    lines = {"a" * 300: {"method": "sjd"}, "b" * 300: {"method": "scd"}}
    Path("my.yaml").write_text(yaml.safe_dump({"n": 1, "metrics": "none", "lines": lines}))
    code, _, err = call("suite", "my.yaml", "out=suite")
    assert code == 0, err
    assert "3 finished" in call("status", "suite")[1]


def test_a_metric_that_was_asked_for_and_has_no_value_ends_with_3(call: Call, tmp_path: Path) -> None:
    """The images and the row exist. Default metrics without a value end with 0. A folder remembers which metrics were
    requested."""
    for folder, words, wanted in (
        ("asked", ["metrics=clip_b32"], 3),
        ("none", ["metrics=none"], 0),
        ("default", [], 0),
    ):
        code, _, err = call("run", "n=1", *words, f"out={folder}")
        assert code == wanted
        assert ("specbench: clip_b32 " in err) == (code == 3)
        assert row_of(tmp_path / folder)["n"] == 1
        assert call("resume", folder)[0] == wanted
    assert "specbench fetch metrics=clip_b32" in call("resume", "default", "metrics=clip_b32")[2]
    assert call("resume", "default", "metrics=clip_b32")[0] == 3
    code, _, err = call("run", "-m", "metrics=clip_b32", "n=1", "delta=1.1,2", "out=grid")
    assert code == 3
    assert re.search(r"clip_b32 .*2 of 2 runs \(job 0: delta=1.1, job 1: delta=2\)", err)
    assert call("resume", "grid")[0] == 3


def test_a_defect_costs_one_sentence_and_debug_shows_where(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(cfg: Any) -> FakePipeline:
        raise RuntimeError("out\nof luck")

    monkeypatch.setattr(run, "_load_pipeline", load)
    code, _, err = call("run", "metrics=none", "n=1", "out=here")
    assert code == 1
    assert re.match(r"specbench: RuntimeError: out of luck .*SPECBENCH_DEBUG=1", err.splitlines()[-1])
    assert "Traceback" not in err
    monkeypatch.setenv("SPECBENCH_DEBUG", "1")
    with pytest.raises(RuntimeError):
        call("run", "metrics=none", "n=1", "out=here")
    with pytest.raises(UsageError):
        call("run", "n=0")


def test_jobs_of_a_grid_in_other_processes_tell_their_failures(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    code = "import sys; from specbench import cli; sys.exit(cli.main(sys.argv[1:]))"
    for job in ("n=1", "n=2"):  # which only the jobs themselves see
        (tmp_path / "grid" / job / "mine").mkdir(parents=True)
    words = ["-m", "hydra/launcher=local", "n=1,2", f"out={tmp_path / 'grid'}"]
    done = python(code, "run", *words)
    assert done.returncode == 2
    assert len(re.findall(r"specbench: .*?/n=\d holds mine", done.stderr)) == 2
    assert "job 0: n=1\n" in done.stderr
    assert "job 1: n=2\n" in done.stderr
    assert "2 of 2 jobs failed" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("launcher", "plugin", "wanted"),
    [
        ("local", "joblib", ["n_jobs: 2\n", "JoblibLauncher"]),
        ("slurm", "submitit", ["gpus_per_node: 1\n", "max_num_timeout: 20\n", "submitit_launcher.SlurmLauncher"]),
    ],
)
def test_the_launchers_that_are_shipped(launcher: str, plugin: str, wanted: list[str], call: Call) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{plugin}_launcher")
    code, out, _ = call("run", "-m", f"hydra/launcher={launcher}", "delta=1,2", "--cfg", "hydra")
    assert code == 0
    assert all(line in out for line in wanted)


def test_a_grid_for_slurm_needs_slurm(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    monkeypatch.setenv("PATH", str(tmp_path))
    for launcher in ("slurm", "submitit_slurm"):
        words = ["-m", f"hydra/launcher={launcher}", "method=sjd", "n=1,2", "metrics=none", "out=new/grid"]
        sentence = refused(call, "run", *words)
        assert "sbatch" in sentence
        assert refused(call, "run", *words, "--dry-run") == sentence
        assert not Path("new").exists()
    for name in ("sbatch", "srun"):
        Path(name).touch(0o755)
    assert call("run", *words, "--dry-run")[0] == 0


def test_a_python_without_assertions_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra's parser of functions needs them; everything else works."""
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    values = ("range(1,3)", "choice(1,2)", "sort(2,1)", "1,2")
    lines = [["run", "-m", f"n={value}", "metrics=none", "device=cpu", "--cfg", "job"] for value in values]
    code = "import json, sys; from specbench import cli; print([cli.main(w) for w in json.loads(sys.argv[1])])"
    done = python(code, json.dumps(lines), cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[2, 2, 2, 0]"
    assert done.stderr.count("PYTHONOPTIMIZE") == done.stderr.count("\n") == 3


def test_list_shows_every_choice_with_its_line(call: Call) -> None:
    code, out, _ = call("list")
    assert code == 0
    for group in ("model", "method", "drafter", "rule", "data", "metrics", "protocol"):
        for name in parameters.choices(group):
            assert f"\n  {name} " in out
    code, out, _ = call("list", "methods")
    assert out.splitlines()[0] == "methods"
    assert len(out.splitlines()) == 1 + len(parameters.choices("method"))
    assert call("list", "method") == (code, out, "")
    assert call("list", "--help")[0] == 0


def test_list_tells_whether_weights_are_here(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ASSETS", tmp_path)
    for kind in ("target", "tokenizer", "text", "kl", "mar"):
        (tmp_path / f"scenes_{kind}.safetensors").touch()
    listed = json.loads(call("list", "models", "drafters", "rules", "--json")[1])
    weights = {entry["name"]: entry["weights"] for entries in listed.values() for entry in entries}
    assert weights["llamagen_scenes"] is weights["mar_scenes"] is True
    assert weights["eagle_tree"] is weights["cspd"] is False
    assert weights["none"] is weights["cool"] is None
    assert "[weights here]" in call("list", "models")[1]
    assert "[weights missing]" in call("list", "drafters")[1]
    assert all(set(entry) == {"name", "line", "weights", "plugin"} and entry["line"] for entry in listed["drafters"])


#: Command lines in one process; no line loads torch or a client of the hub.
LIGHT = """
import json, sys
from specbench import cli
from specbench.config import missing_weights
for line in json.loads(sys.argv[1]):
    cli.main(line)
    assert not {"torch", "transformers", "huggingface_hub"} & set(sys.modules), line
missing_weights.advice("anole")
assert not {"torch", "transformers", "huggingface_hub"} & set(sys.modules)
"""


def test_help_and_lists_load_no_torch_in_any_folder(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Help, lists, mistakes and finished runs do not load torch."""
    monkeypatch.setattr(FakePipeline, "weights", "random")
    again = ("run", "weights=random", "metrics=none", "n=1", f"out={tmp_path}/here")
    assert call(*again)[0] == 0
    helps = [[name, "--help"] for name in COMMANDS]
    lines = [
        ["--help"],
        *helps,
        ["list"],
        ["list", "--json"],
        ["run", "delta=0"],
        ["run", "data=coco2017", "n=1"],
        again,
    ]
    done = python(LIGHT, json.dumps(lines))
    assert done.returncode == 0, done.stderr
    assert "nothing left to do" in done.stdout


def test_completion(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for line, completions in [
        (
            "specbench ",
            set("run status resume merge audit bench breakdown compare convert evaluate fetch list probe".split())
            | set("collect reference report show suite tables train".split()),
        ),
        ("specbench l", {"list"}),
        ("specbench run method=", {f"method={name}" for name in parameters.choices("method")}),
        ("specbench list m", {"models", "methods", "metrics"}),
        ("specbench tables coolsd_t", {"coolsd_table1", "coolsd_table2", "coolsd_table3"}),
        ("specbench fetch --yes data=", {"data=coco2014", "data=coco2017", "data=parti"}),
        ("specbench bench method=sd rule=un", {"rule=uniform"}),
        ("specbench run protocol=sjdpac_t", {f"protocol=sjdpac_table{i}" for i in (1, 2, 4)}),
        ("specbench status ", set()),  # names of files, which are the shell's
    ]:
        monkeypatch.setenv("COMP_LINE", line)
        monkeypatch.setenv("COMP_POINT", str(len(line)))
        code, out, _ = call("-sc", "query=bash")
        assert (code, set(out.split())) == (0, completions), line


def test_the_completion_for_a_shell_is_installed_as_help_says(call: Call, tmp_path: Path) -> None:
    (line,) = (line for line in call("--help")[1].splitlines() if "-sc install=bash" in line)
    install = line.split("  ")[1]
    command = tmp_path / "specbench"
    command.write_text(f"#!{sys.executable}\nimport sys\nfrom specbench.cli import main\nsys.exit(main())\n")
    command.chmod(0o755)
    typed = "specbench run method=cool"
    script = (
        f"{install}; COMP_LINE='{typed}' COMP_POINT={len(typed)} COMP_CWORD=2; hydra_bash_completion;"
        ' echo "${COMPREPLY[@]}"; complete -p specbench'
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stderr == ""
    reply, registered = done.stdout.splitlines()
    assert reply == "method=cool_sd"
    assert registered.endswith(" -F hydra_bash_completion specbench")
