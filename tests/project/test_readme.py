"""Every command in README.md and docs/*.md works as it is printed.

Commands are in indented blocks. They run here one after the other, from the top, in one folder with a file of prompts,
images and two small data sets, and with a fake pipeline, so that every method and model decodes at once. `SMALLER`
makes a command quick, and one that several pages print runs once, unless it resumes a run. `NOT_RUN` names the commands
that need weights, a network, a GPU or hours, with the reason; their arguments are checked. Any other command that is
not `specbench` fails.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from commands import ROOT, Call
from PIL import Image

from specbench import cli
from specbench.audit import plan
from specbench.audit.audit_arguments import COLUMNS
from specbench.bench import floor
from specbench.cli import commands as sub_commands
from specbench.cli import fetch, tables
from specbench.config import configuration, parameters, variants
from specbench.config.parameter import METADATA
from specbench.rows import selection
from specbench.tables import table_runs
from specbench.tables.catalog import TABLES
from specbench.training import recipes

FILES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

#: Sub-command -> arguments that replace arguments of the same name; None removes the argument.
SMALLER: dict[str, dict[str, str | None]] = {
    "run": {"n": "3", "warmup": "0", "workers": None, "hydra.launcher.n_jobs": "1", "metrics": "none"},
    "resume": {"workers": "1", "ray_address": None},
    "audit": {"audit.samples": "1000"},
    "bench": {"bench.steps": "2", "bench.images": "0", "bench.nodes": "1"},
}
#: Replaced only in commands that have the argument.
IF_GIVEN = ("workers", "hydra.launcher.n_jobs")

#: Variables with the arguments of the `make test` that may run these tests.
OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "ARGS")

WEIGHTS = "needs a real model's weights"
NETWORK = "fetches gigabytes"
#: The beginning of a command -> why it does not run here.
NOT_RUN = {
    "git clone": NETWORK,
    "make": "sets up an environment first",
    "pytest -m gpu": "needs a GPU",
    'eval "$(specbench -sc install=bash)"': "changes the shell; test_cli has it",
    "uv pip install": NETWORK,
    ".venv/bin/python tools/rounds.py": "decodes for minutes; test_rounds",
    "specbench fetch": NETWORK,
    "specbench reference": WEIGHTS,
    "specbench train": WEIGHTS,
    "accelerate launch": WEIGHTS,
    "specbench bench model=lumina_mgpt weights=random": "needs a GPU",
    "specbench bench -m model=llamagen_xl weights=random": "needs a GPU",
    "specbench audit --variants": "audits for seconds; test_audit_command",
    "specbench audit method=dflash": "audits every model; test_audit_command audits every preset",
    "specbench probe": "draws images; test_probe",
    "specbench bench --plan model=emu3": "takes seconds for its shapes; test_needs",
    "specbench run -m hydra/launcher=slurm": "needs Slurm",
    "specbench suite my.yaml": "test_suite runs one",
    "specbench status runs/suites/my": "the same",
    "specbench resume runs/suites/my": "the same",
    "specbench report runs/suites/my": "the same",
    "specbench run -m --dry-run model=lumina_mgpt": "takes seconds for its shapes; test_dry_run",
    "specbench run --dry-run": "the same",
    "specbench tables coolsd_table1 --model llamagen_xl --dry-run": "the same",
    "specbench tables relaxed": "draws many curves; test_equal draws such a table",
    "specbench show": "needs rows of a reader's own; test_collected has some",
    "specbench collect": "the same",
    "specbench tables verification_gain": "decodes for an hour",
    "specbench tables coolsd_table1 --model": WEIGHTS,
    "python docs/optuna_example.py": "needs Optuna, and decodes for an hour",
    "specbench run method=cool_sd delta=1.1 n=16 log=tensorboard": "needs TensorBoard; test_trackers has a stub",
    "specbench run -m method=cool_sd delta=1.1,2 log=wandb": "needs Weights & Biases",
    "specbench run model=mar_scenes method=cspd gamma=2 drafter.weights=": "needs a trained drafter",
    "scripts/smoke.sh": "installs gigabytes",
    "scripts/second_triton.sh": NETWORK,
    "scripts/gpu_wheels.sh": NETWORK,
}


def commands(path: Path) -> list[str]:
    """The lines of a document's indented blocks, without their comments. Fenced blocks are run by other tests."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    blocks = [block for block in re.split(r"\n\s*\n", text) if re.match(r"\n?    \S", block)]  # not in a list's item
    lines = [line[4:] for block in blocks for line in block.splitlines() if re.match(r"    \S", line)]
    return [re.sub(r"\s+#\s.*", "", line) for line in lines]


ALL = [(path, line) for path in FILES for line in commands(path)]
SKIPPED = {line: why for start, why in NOT_RUN.items() for _, line in ALL if line.startswith(start)}


def make_smaller(arguments: list[str]) -> list[str]:
    """A command's arguments, with the replacements of `SMALLER`."""
    command, *rest = arguments
    if "--help" in rest:
        return arguments
    names = {argument.split("=", 1)[0] for argument in rest}
    replacements = {k: v for k, v in SMALLER.get(command, {}).items() if k in names or k not in IF_GIVEN}
    if "n=all" in rest or "prompts" in names:  # few prompts
        replacements.pop("n")
    if command == "audit" and "audit.model" not in names:  # test_audit_command audits on every model
        [method] = [argument.partition("=")[2] for argument in rest if argument.startswith("method=")]
        replacements["audit.model"] = "d2t4" if parameters.is_continuous("method", method) else "v3t5"
    others = [argument for argument in rest if argument.split("=", 1)[0] not in replacements]
    return [command, *others, *(f"{name}={value}" for name, value in replacements.items() if value is not None)]


@pytest.fixture
def reader(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of a reader: prompts, images, fetched data, a trained drafter, and the project's rows."""
    home = tmp_path / "home"
    (home / "data/parti").mkdir(parents=True)
    (home / "data/parti/PartiPrompts.tsv").write_text("Prompt\tCategory\none\tx\ntwo\tx\nthree\tx\n")
    for name, folder in (("coco2017", "val2017"), ("coco2014", "val2014")):
        made = {
            "images": [{"id": i, "file_name": f"{i:012d}.jpg"} for i in (1, 2, 3)],
            "annotations": [{"id": i, "image_id": i, "caption": f"photograph {i}"} for i in (1, 2, 3)],
        }
        (home / "data" / name).mkdir()
        (home / "data" / name / f"captions_{folder}.json").write_text(json.dumps(made))
    reader_folder = tmp_path / "here"
    (reader_folder / "photos").mkdir(parents=True)
    for i in (1, 2, 3):
        Image.fromarray(np.full((8, 8, 3), 60 * i, np.uint8)).save(reader_folder / f"photos/{i}.png")
    lines = (json.dumps({"file_name": f"{i}.png", "prompt": f"photograph {i}"}) for i in (1, 2, 3))
    (reader_folder / "photos/prompts.jsonl").write_text("\n".join(lines))
    (reader_folder / "drafters/llamagen_xl/eagle").mkdir(parents=True)
    documented = (ROOT / "docs/suites.md").read_text().split("```yaml\n")[1].split("```")[0]
    (reader_folder / "my.yaml").write_text(documented)
    (reader_folder / "my.txt").write_text("a red circle\na blue square\na green star\n")
    shutil.copytree(ROOT / "results", reader_folder / "results", ignore=shutil.ignore_patterns("gallery"))
    monkeypatch.chdir(reader_folder)
    monkeypatch.setenv("SPECBENCH_HOME", str(home))
    return reader_folder


@pytest.mark.usefixtures("rows_together", "drawn_once")  # audits; tables
def test_every_command_works(reader: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for speed in ("bandwidth", "arithmetic"):  # to measure them takes seconds
        monkeypatch.setattr(floor, speed, lambda *_: 1e9)
    run_lines: list[str] = []
    drawn: set[str] = set()
    for path, line in ALL:
        again = line in run_lines and (not line.startswith("specbench run ") or "--help" in line)
        if line in SKIPPED or again:
            continue
        assert line.startswith("specbench "), (
            f"{path.name}: unknown command '{line}'. Name it in NOT_RUN, or let it run"
        )
        arguments = shlex.split(line)[1:]
        if arguments[0] == "tables" and "--list" not in arguments:
            if "--model" not in arguments:  # each table once
                arguments = [argument for argument in arguments if argument not in drawn]
                drawn |= {*arguments} & TABLES.keys()
            if not TABLES.keys() & {*arguments}:
                continue
            missing = _missing_tables(arguments[1:])
            assert not missing, f"{path.name}: {line}: no rows of {', '.join(missing)}, whose runs take hours"
        code, out, err = call(*make_smaller(arguments))
        # the evaluators have no weights, and some audits are of methods that are not lossless
        expected = 3 if " has no value: " in err else int(": not lossless (" in out)
        assert code == expected, f"{path.name}: {line}: {err}"
        run_lines.append(line)
        if run_lines[-2:] == [line, line] and line.startswith("specbench run"):
            assert "nothing left to do" in out
    assert len(run_lines) > 25
    rows = {str(path.parent.relative_to(reader)) for path in reader.rglob("row.csv")}
    assert {"first", "night"} <= rows
    assert len([name for name in rows if name.startswith("grid/")]) == 3


def _missing_tables(arguments: list[str]) -> list[str]:
    """The tables that a command with these arguments draws and that have missing rows."""
    model = arguments[arguments.index("--model") + 1] if "--model" in arguments else None
    tables = (TABLES[name] for name in arguments if name in TABLES)
    plans = (table_runs.plan(table, model or table.model, None, Path("results")) for table in tables)
    return [table_plan.table.id for table_plan in plans if table_plan.missing]


def _check(line: str) -> None:
    """Checks a command's arguments without running it."""
    tool, *arguments = shlex.split(line)
    if tool == "make":
        env = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
        process = subprocess.run([tool, *arguments, "--dry-run"], cwd=ROOT, env=env, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        if "tables" in arguments:  # also the arguments that it forwards
            [forwarded] = re.findall(r'specbench" tables(.*)', process.stdout)
            assert cli.main(["tables", "coolsd_table1", "--list", *shlex.split(forwarded)]) == 0
    elif tool == "uv":
        assert re.fullmatch(r"pip install -e \.\[\w+\]", " ".join(arguments))  # test_packaging knows the extras
    elif tool == "accelerate":
        assert arguments[:4] == ["launch", "--module", "specbench.cli", "train"]
        _check(shlex.join(["specbench", *arguments[3:]]))
    elif tool == "specbench":
        command, *rest = arguments
        bench_parameters = sub_commands.find("bench").by_name
        overrides = [
            argument
            for argument in rest
            if argument not in ("-m", "--plan", "--variants")
            and not argument.startswith("audit.")
            and argument.partition("=")[0] not in bench_parameters
        ]
        check: dict[str, Callable[[], object]] = {
            "fetch": lambda: _fetch_arguments(rest),
            "train": lambda: recipes.plan([word for word in rest if word != "--dry-run"]),
            **dict.fromkeys(("audit", "bench", "probe"), lambda: configuration.grid(overrides, "-m" in rest)),
            "run": lambda: configuration.grid([o for o in overrides if o != "--dry-run"], "-m" in rest),
            "tables": lambda: _listed(rest),
            "suite": lambda: tables._read(rest[0], [argument for argument in rest[1:] if "=" in argument]),
            "show": lambda: [selection.condition(a) for a in sub_commands.find("show").read(rest)["--where"] or ()],
            **dict.fromkeys(("status", "resume"), lambda: None),
            **dict.fromkeys(("reference", "report", "collect"), lambda: sub_commands.find(command).read(rest)),
        }
        check[command]()
    elif tool == "pytest":
        markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
        assert arguments[0] == "-m"
        assert arguments[1] in [marker.partition(":")[0] for marker in markers]
    elif tool not in ("eval", "git"):
        assert (ROOT / (arguments[0] if tool.endswith("python") else tool)).is_file()


def _listed(ids: list[str]) -> None:
    assert cli.main(["tables", "--list", *ids]) == 0


def _fetch_arguments(arguments: list[str]) -> object:
    options = fetch._parse(fetch.main.read(arguments))
    return fetch._data(options) if "data" in options else fetch._parts(options)


def test_a_command_that_does_not_run_here_is_well_formed(reader: Path) -> None:
    for line in sorted(SKIPPED):
        _check(line)


def test_commands_that_are_not_run_still_exist() -> None:
    assert [start for start in NOT_RUN if not any(line.startswith(start) for _, line in ALL)] == []


def table(path: Path, head: str) -> list[list[str]]:
    """The cells of the rows of the document's table whose head begins with `head`."""
    lines = path.read_text(encoding="utf-8").split(f"\n{head}")[1].splitlines()[2:]
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def first_column(path: Path, head: str) -> list[str]:
    """The names in backticks in the first column of that table."""
    return [name for row in table(path, head) for name in re.findall(r"`([a-z]\w+)`", row[0])]


def test_every_preset_is_in_the_table_of_methods():
    """eagle3 was once missing."""
    head, page = "| method | drafter | rule | lossless |", ROOT / "docs/methods.md"
    assert sorted(first_column(page, head)) == sorted(parameters.choices("method"))
    for row in table(page, head):
        for name in re.findall(r"`([a-z]\w+)`", row[0]):
            if name == "eagle_chain":  # in the line of eagle1
                continue
            shown = [variant for variant in row[4].replace("*", "").split(", ") if variant]
            assert shown == list(variants.names(name))
            assert not shown or f"**{parameters.default('method', name, 'variant')}**" in row[4]


def test_every_preset_is_in_the_list_of_the_field() -> None:
    """Presets that only name a baseline are not published methods."""
    rows = table(ROOT / "docs/methods.md", "| published method | ")
    assert {len(row) for row in rows} == {4}
    assert all(row[2] or row[3] for row in rows)  # a method without a preset has a reason
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[2])}
    assert named | {"vanilla"} == set(parameters.choices("method"))


def test_every_variant_is_in_its_table() -> None:
    rows, documented, names = table(ROOT / "docs/methods.md", "| method | variant | what it sets |"), set(), []
    for row in rows:
        names = re.findall(r"`([a-z]\w+)`", row[0]) or names
        variant = re.findall(r"`(\w+)`", row[1])[0]
        documented |= {(name, variant, "(default)" in row[1]) for name in names}
    shipped = {
        (name, shipped_variant, shipped_variant == parameters.default("method", name, "variant"))
        for name in parameters.choices("method")
        for shipped_variant in variants.names(name)
    }
    assert documented == shipped


@pytest.mark.parametrize("group", ["drafter", "rule", "verification"])
def test_every_part_is_in_its_table_with_its_defaults(group: str) -> None:
    rows = table(ROOT / "docs/methods.md", f"| {group} | ")
    documented = {row[0].strip("`"): yaml.safe_load(f"{{{', '.join(_pairs(row[2]))}}}") for row in rows}
    shipped = {}
    for name in parameters.choices(group):
        values = parameters.content(group, name)
        left_out = (group, "drafter_weights", *METADATA)
        shipped[name] = {k: v for k, v in values.items() if k not in left_out}
    assert documented == shipped


def _pairs(cell: str) -> list[str]:
    return [pair.replace("=", ": ") for pair in cell.strip("`").split()]


def test_every_extra_is_in_the_table_of_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = table(ROOT / "docs/install.md", "| extra | adds |")
    assert sorted(name for row in rows for name in re.findall(r"`([\w-]+)`", row[0])) == sorted(extras)


def audit_rows() -> list[dict[str, str]]:
    with (ROOT / "results/audit.csv").open(newline="") as f:
        return list(csv.DictReader(f))


def test_every_preset_has_been_audited() -> None:
    """results/audit.csv has today's columns, except some that its rows can do without. For every preset, it has a row
    with a verdict on every model of the default audit."""
    rows = audit_rows()
    assert list(rows[0]) == [name for name in COLUMNS if name in rows[0]]
    later = {"plugins", "exercised", "p_first", "device", "emitted_tv", "emitted_kl_sum", "kl", "p_enumerated"}
    of_records = {"acceptance_expected", "p_acceptance", "p_drafted"}
    assert set(COLUMNS) - set(rows[0]) <= later | of_records
    audited = {(row["method"], row["model"]) for row in rows if row["verdict"] and row["margin"]}
    jobs = plan.presets([], plan.chosen_models({}, [False, True]))
    missing = sorted({(cfg.method, model.name) for cfg, model in jobs} - audited)
    methods = ", ".join(dict.fromkeys(method for method, _ in missing))
    assert not missing, f"audit {methods}, and add the rows to results/audit.csv; missing: {missing}"


def test_exact_variants_are_lossless_and_the_biased_releases_are_not() -> None:
    with (ROOT / "results/audit_variants.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    refuted = {(row["method"], row["variant"]) for row in rows if row["verdict"] == "not lossless"}
    assert {("scd", "released"), ("sjd_pac", "released"), ("gsd", "released")} <= refuted
    assert not {(row["method"], row["variant"]) for row in rows if row["variant"] == "exact"} & refuted
