"""Protocols: the content of their files, their values in a run and in a grid, and the remarks in the row."""

from __future__ import annotations

import csv
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, Call, case, overrides, refused, row_of

from specbench.config import configuration, parameters, protocols, variants, yaml_files
from specbench.config.run_config import RunConfig
from specbench.errors import UsageError
from specbench.harness import run
from specbench.rows import provenance
from specbench.rows.remark import remarks_of as row_remarks
from specbench.rows.remark_text import joined, said
from specbench.rows.remarks import protocol_remarks
from specbench.tables import literature
from specbench.tables.catalog import TABLES

SHARED = ROOT.parent / "shared" / "published"
NAMES = list(parameters.choices("protocol"))
PAIRS = [(name, model) for name in NAMES for model in protocols.read(name).models]
#: A real model, reduced and with random weights, as fast as possible.
TINY = ("weights=random", "reduced=true", "device=cpu", "baseline=false", "warmup=0")


@pytest.fixture(autouse=True)
def _no_fetched_data(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """COCO's captions of both years, and PartiPrompts, with eight prompts each."""
    folder = tmp_path_factory.mktemp("data")
    images = [{"id": i, "file_name": f"{i:012d}.jpg"} for i in range(1, 9)]
    captions = [
        {"id": 10 * i + j, "image_id": i, "caption": f"a{' very' * ((i + j) % 5)} red fox, picture {i}"}
        for i in range(1, 9)
        for j in range(5)
    ]
    for split in ("val2017", "train2017", "val2014"):
        (folder / f"captions_{split}.json").write_text(json.dumps({"images": images, "annotations": captions}))
    rows = [f'two small boats, "number {i}"\tArts\tSimple Detail\t' for i in range(8)]
    (folder / "PartiPrompts.tsv").write_text("\n".join(["Prompt\tCategory\tChallenge\tNote", *rows]) + "\n")
    return folder


def _words(name: str, model: str, *more: str) -> list[str]:
    return [f"protocol={name}", f"model={model}", *more]


def remarks_of(cfg: RunConfig) -> list[str]:
    return [said(remark) for remark in protocol_remarks(cfg)]


def _all_of(protocol: protocols.Protocol) -> list[tuple[str, str, Any]]:
    """(where, parameter, value) for every value in a file; `where` is sets, a data set or a model."""
    parts = {"sets": protocol.sets, **protocol.also, **protocol.models}
    return [(where, key, value) for where, part in parts.items() for key, value in part.items()]


def _options(name: str, value: Any) -> list[Any]:
    """The parameter values that a value of a file allows, as a list."""
    values = value if isinstance(value, list) and name != "metrics" else [value]
    return [None if option == parameters.table()[name].null else option for option in values]


def test_a_file_is_complete_and_its_values_are_valid() -> None:
    served = [table for name in NAMES for table in protocols.read(name).serves]
    assert len(set(served)) == len(served), "two protocols serve the same table"
    for name in NAMES:
        with case(name):
            protocol = protocols.read(name)
            assert protocol.name == name
            assert isinstance(protocol.version, int)
            assert protocol.version >= 1
            assert name in protocol.serves
            assert "arXiv " in protocol.source or "github.com/" in protocol.source
            assert "data" in protocol.sets
            assert protocol.notes
            assert all(note is None or (isinstance(note, str) and note) for note in protocol.notes.values())
            assert set(protocol.models) <= set(parameters.choices("model"))
            assert all(variant in variants.names(method) for method, variant in protocol.variant.items())
            assert set(protocol.also) <= set(parameters.choices("data"))
            for where, key, value in _all_of(protocol):
                if value is not None:
                    options = _options(key, value)
                    assert [parameters.table()[key].checked(key, option) for option in options] == options
                has = parameters.common() | parameters.declared("data", str(protocol.sets["data"])) | {"data"}
                if where in protocol.models:
                    has |= parameters.declared("model", where)
                elif where in protocol.also:
                    has |= parameters.declared("data", where)
                else:  # not stated, whatever the model is
                    has |= parameters.declared("model", "llamagen_xl") if value is None else frozenset()
                assert key in has, f"{where} has no {key}"
                if key in ("data", "metrics"):
                    named = value if isinstance(value, list) else [value]
                    assert set(named) - {None} <= set(parameters.choices(key))
            stated = {key for _, key, value in _all_of(protocol) if value is not None}
            assert set(protocol.from_code) <= stated
            assert len(set(protocol.from_code)) == len(protocol.from_code)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published tables are not here")
def test_every_experiment_of_the_published_table_has_a_protocol() -> None:
    with (SHARED / "protocols.csv").open(newline="", encoding="utf-8") as f:
        rows = [row["index_ids"].split("; ") for row in csv.DictReader(f)]
    newer = {"scd_table1"}  # only the facts have values of newer papers, no protocol does
    assert {ids[0] for ids in rows} == set(NAMES) - newer
    for first, *others in rows:
        served = set(protocols.read(first).serves)
        if first == "lanternpp_tables":  # this names the tables that others made with its code
            assert others == ["coolsd_table1", "sjdpac_table1"]
        else:
            assert set(others) <= served
    with (SHARED / "index.csv").open(newline="", encoding="utf-8") as f:
        published = {row["id"] for row in csv.DictReader(f)}
    assert {table for name in NAMES for table in protocols.read(name).serves} <= published | newer


def test_a_protocol_composes_for_each_of_its_models() -> None:
    """Stated values are the run's; the others are the same as without the protocol. The remarks mention every one of
    them."""
    for name, model in PAIRS:
        with case(name, model):
            protocol = protocols.read(name)
            cfg = configuration.compose(_words(name, model))
            without = configuration.compose([f"model={model}", f"data={cfg.data}"])
            assert cfg.protocol == f"{name}@{protocol.version}"
            stated = {**protocol.sets, **protocol.models[model]}
            for key in parameters.parameters_of(cfg.plain()):
                if key == "metrics" and stated.get(key):  # with KID beside FID
                    assert cfg.get(key)[: len(stated[key])] == stated[key]
                    assert all(metric.startswith("kid") for metric in cfg.get(key)[len(stated[key]) :])
                elif stated.get(key) is not None:
                    assert cfg.get(key) == _options(key, stated[key])[0]
                elif key != "protocol":
                    assert cfg.get(key) == without.get(key)
            remarks = remarks_of(cfg)
            assert not any(remark.startswith(("departs", "protocol ")) for remark in remarks)
            for key, value in stated.items():
                mention = next((remark for remark in remarks if re.search(rf"[:,] {key} ", remark)), "")
                if value is None:
                    assert mention.startswith(f"not stated by protocol {protocol.label}")
                elif len(_options(key, value)) > 1:
                    assert mention.startswith("one of ")
                    assert f" protocol {protocol.label}: " in mention
                elif key in protocol.from_code:
                    assert mention.startswith("by the released code ")
                    assert f" protocol {protocol.label}, " in mention
                else:
                    assert mention == ""
            assert remarks_of(without) == []


SJDPAC = "protocol=sjdpac_table1 model="
MAIN = "protocol=sjd_main_table1 model="
CASES = [
    (  # values that the user gives
        f"{SJDPAC}lumina_mgpt n=4 cfg_scale=4 caption=first metrics=none seed=1",
        {"n": 4, "cfg_scale": 4.0, "caption": "first", "metrics": [], "size": 768},
        [
            "departs from protocol sjdpac_table1@3: caption first (not running_longest), n 4 (not 5000),"
            " metrics none (not fid_pytorch + clip_b16_x100), cfg_scale 4 (not 3)",
            "not stated by protocol sjdpac_table1@3, so the run's own: top_p 1",
            "by the released code of protocol sjdpac_table1@3, not by its paper: seed 1, batch 1,"
            " size 768, unconditional prompt_end",
        ],
    ),
    (  # one of several values
        "protocol=lantern_table3 model=llamagen_xl temperature=0 n=100",
        {},
        ["one of the values of protocol lantern_table3@1: n 100 (of 30000, 100), temperature 0 (of 1, 0)"],
    ),
    # another data set of the experiment
    (f"{SJDPAC}emu3 data=parti", {"data": "parti", "n": 1632, "metrics": ["clip_b16_x100"]}, []),
    (  # data that the experiment does not have: the settings of its own data are dropped, the rest applies
        f"{MAIN}lumina_mgpt prompts=my.txt n=3",
        {"data": "prompts", "prompts": "my.txt", "cfg_scale": 3.0, "n": 3}
        | {"metrics": configuration.compose(["model=lumina_mgpt", "prompts=my.txt", "n=1"]).get("metrics")},
        ["departs from protocol sjd_main_table1@2: data prompts (not coco2017), n 3 (not 5000)"],
    ),
    (
        "protocol=coolsd_fig4 model=llamagen_xl",
        {"data": "coco2017", "metrics": ["fid", "kid"]},
        [
            "protocol coolsd_fig4@2 names no model",
            "not stated by protocol coolsd_fig4@2, so the run's own: cfg_scale 7.5, temperature 1, top_k 1000, top_p 1",
        ],
    ),
    # "off" is a value and not a gap
    ("protocol=lantern_table1 model=llamagen_3b", {"top_k": None, "temperature": 0.0, "data": "imagenet"}, []),
    (
        "protocol=lantern_table1 model=llamagen_3b top_k=2000",
        {"top_k": 2000},
        ["departs from protocol lantern_table1@1: top_k 2000 (not off)"],
    ),
]


def test_values_and_remarks() -> None:
    for words, values, remarks in CASES:
        with case(words):
            cfg = configuration.compose(words.split())
            assert {key: cfg.get(key) for key in values} == values
            actual = remarks_of(cfg)
            assert set(remarks) <= set(actual)
            assert any(r.startswith("departs") for r in actual) == any(r.startswith("departs") for r in remarks)


def test_a_model_that_the_protocol_does_not_name() -> None:
    """It keeps its own sampling, and its own prompts and metrics if no others make sense. n and seed are the
    protocol's."""
    default_data = {"llamagen_scenes": "scenes", "mar_scenes": "scenes_classes", "llamagen_3b": "imagenet"}
    for model, data in (default_data | {"anole": "coco2017"}).items():
        with case(model):
            without = configuration.compose([f"model={model}"])
            cfg = configuration.compose(_words("sjd_main_table1", model))
            assert (cfg.data, cfg.n, cfg.seed) == (data, 5000, 1)
            assert cfg.get("cfg_scale") == without.get("cfg_scale")
            same_data = data == "coco2017"
            expected = ["fid_pytorch", "clip_b16_x100", "kid_pytorch"]
            assert cfg.get("metrics") == (expected if same_data else without.get("metrics"))
            remarks = remarks_of(cfg)
            assert all(name in remarks[0] for name in ("sjd_main_table1@2", "lumina_mgpt", model))
            assert same_data or any(f"sjd_main_table1@2: data {data} (not coco2017)" in remark for remark in remarks)


def test_a_protocol_chooses_the_variant_that_was_measured() -> None:
    def chosen(*words: str) -> tuple[str, list[str]]:
        cfg = configuration.compose(_words("sjdpac_table1", "lumina_mgpt", *words))
        return cfg.variant, [remark for remark in remarks_of(cfg) if "variant" in remark]

    assert chosen("method=gsd") == ("released", [])
    departs = "departs from protocol sjdpac_table1@3: variant printed (not released)"
    assert chosen("method=gsd", "variant=printed") == ("printed", [departs])
    assert chosen("method=sjd_pac") == ("exact", [])
    assert (
        configuration.compose(_words("coolsd_table1", "lumina_mgpt", "method=lantern_pp")).get("bound") == "neighbours"
    )


def test_the_runs_of_a_table_follow_its_protocol() -> None:
    """They differ from `run protocol=NAME` only in the method, and in parameters that a line sets: one of several
    values, a value that the protocol leaves open, or the quantity that varies over the table's lines."""
    for name in (name for name in NAMES if set(protocols.read(name).serves) & set(TABLES)):
        with case(name), configuration.session():
            protocol = protocols.read(name)
            of_method = {*parameters.method_parameters(), *parameters.PARTS, "method", "variant", "drafter_weights"}
            tables = [TABLES[served] for served in protocol.serves if served in TABLES]
            for table, model in itertools.product(tables, protocol.models):
                lines = [words for line in table.lines if (words := overrides(table, line, model))]
                runs = [configuration.compose(words) for words in lines]
                for words, cfg in zip(lines, runs, strict=True):
                    assert cfg.protocol == protocol.label
                    plain = configuration.compose(_words(name, model, f"data={cfg.data}", f"method={cfg.method}"))
                    stated = protocol.values_for(model, cfg.data)
                    for key in (cfg.plain().keys() & plain.plain().keys()) - of_method:
                        if cfg.get(key) != plain.get(key):
                            assert any(word.startswith(f"{key}=") for word in words)
                            goes_over = any(other.get(key) != cfg.get(key) for other in runs)
                            apart = key == "batch" and table.on(model).timed  # seconds are measured by further runs
                            open_value = stated.get(key) is None or cfg.get(key) in _options(key, stated[key])
                            assert open_value or goes_over or apart


def test_without_a_protocol_nothing_changes() -> None:
    table = TABLES["entropy_table1"]
    for model in ("llamagen_scenes", "mar_scenes"):  # a model of an embedded world keeps the table's small protocol
        words = overrides(table, table.lines[0], model) or []
        assert {"n=1024", "batch=16"} <= set(words)
        assert not any(word.startswith("protocol=") for word in words)
    batches = replace(TABLES["coolsd_table1"], batch=16)  # its own batches do not change the paper's timed prompts
    assert [batches.on(model).timed for model in ("llamagen_scenes", "llamagen_xl")] == [24, 100]
    assert configuration.compose().protocol is None
    assert configuration.compose(["protocol=null"]) == configuration.compose()
    cfg = configuration.compose(_words("sjdpac_table1", "emu3"))  # equal measurements have equal hashes
    assert provenance.config_hash(cfg) == provenance.config_hash(cfg.changed(protocol=None))


def test_in_a_grid_every_job_has_its_own_values() -> None:
    arguments = ["protocol=sjd_table3,sjdpac_table1", "model=llamagen_xl,lumina_mgpt,llamagen_scenes", "n=4"]
    names = ("protocol", "model", "data", "cfg_scale", "top_k")
    jobs = [tuple(job.cfg.get(name) for name in names) for job in configuration.grid(arguments, multirun=True)]
    assert jobs == [
        ("sjd_table3@2", "llamagen_xl", "coco2017", 7.5, 1000),
        ("sjd_table3@2", "lumina_mgpt", "coco2017", 4.0, 2000),
        ("sjd_table3@2", "llamagen_scenes", "scenes", 3.0, None),
        ("sjdpac_table1@3", "llamagen_xl", "coco2017", 7.5, 1000),
        ("sjdpac_table1@3", "lumina_mgpt", "coco2017", 3.0, 2000),
        ("sjdpac_table1@3", "llamagen_scenes", "scenes", 3.0, None),
    ]
    with pytest.raises(UsageError, match="protocol=nope.*model=anole.*'nope'"):
        configuration.grid(["protocol=sjd_table4,nope", "model=anole"], multirun=True)
    sizes = configuration.grid(["protocol=sjd_fig12", "model=lumina_mgpt", "size=768,1024"], multirun=True)
    assert [job.cfg.size for job in sizes] == [768, 1024]


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Writes conf/experiment/mine.yaml into a copy of conf/, which replaces the original."""
    conf = shutil.copytree(parameters.conf_dir(), tmp_path / "conf")
    monkeypatch.setattr(parameters, "conf_dir", lambda: conf)

    def write(text: str) -> None:
        (conf / "experiment/mine.yaml").write_text(f"# @package _global_\n# Mine.\n{text}")
        yaml_files.clear()

    yield write
    yaml_files.clear()


def test_an_experiment_overrides_the_protocol_and_the_user_overrides_both(experiment: Callable[[str], None]) -> None:
    experiment("defaults:\n  - override /method: sjd\n  - override /model: anole\nn: 7\n")
    cfg = configuration.compose(["experiment=mine", "protocol=sjd_table4", "seed=5"])
    assert (cfg.model, cfg.method, cfg.n, cfg.seed) == ("anole", "sjd", 7, 5)
    assert (cfg.data, cfg.get("caption"), cfg.temperature) == ("coco2017", "running_longest", 1.0)


def test_an_experiment_may_choose_the_protocol_and_sweep(experiment: Callable[[str], None]) -> None:
    experiment(
        "defaults:\n  - override /protocol: sjd_table3\n  - override /method: sjd\nseed: 3\n"
        "hydra:\n  sweeper:\n    params:\n      model: llamagen_xl,llamagen_xl_512\n      window: 16,32\n"
    )
    jobs = [job.cfg for job in configuration.grid(["experiment=mine", "window=8"], multirun=True)]
    assert [(cfg.protocol, cfg.model, cfg.get("window")) for cfg in jobs] == [
        ("sjd_table3@2", "llamagen_xl", 8),
        ("sjd_table3@2", "llamagen_xl_512", 8),
    ]
    assert all((cfg.n, cfg.seed, cfg.data) == (5000, 3, "coco2017") for cfg in jobs)


def test_parameters_of_some_models_reach_the_jobs_of_a_grid() -> None:
    grid = "protocol=sjd_table3 model=llamagen_xl,lumina_mgpt method=sjd,gsd reduced=true refine=false data_dir=here"
    jobs = configuration.grid(grid.split(), multirun=True)
    assert len(jobs) == 4
    for cfg in (job.cfg for job in jobs):
        assert (cfg.protocol, cfg.data, cfg.get("caption")) == ("sjd_table3@2", "coco2017", "running_longest")
        assert (cfg.get("reduced"), cfg.get("refine"), cfg.get("data_dir")) == (True, False, "here")
        assert (cfg.get("cfg_scale"), cfg.get("top_k")) == ((7.5, 1000) if cfg.model == "llamagen_xl" else (4.0, 2000))


def test_a_grid_over_models_of_vectors_needs_no_other_parameter() -> None:
    """Their default data and method apply in every job without being named."""
    jobs = configuration.grid(["model=mar_b,mar_l", "gamma=4,8", "n=1"], multirun=True)
    assert {(job.name, *(job.cfg.get(name) for name in ("model", "gamma", "data", "method"))) for job in jobs} == {
        (f"gamma={gamma},model={model}", model, gamma, "imagenet", "cspd")
        for model in ("mar_b", "mar_l")
        for gamma in (4, 8)
    }


def test_a_folder_keeps_its_protocol(call: Call, tmp_path: Path) -> None:
    words = ("run", "protocol=sjd_table4", "n=2", "seed=0", "metrics=none", "baseline=false", "out=here")
    assert call(*words)[0] == 0
    row = row_of("here")
    assert row["protocol"] == "sjd_table4@2"
    assert list(row).index("protocol") < list(row).index("model")
    assert all(name in joined(row_remarks(row)).split(";")[0] for name in ("sjd_table4@2", "anole", "llamagen_scenes"))
    assert "protocol: sjd_table4@2" in (tmp_path / "here/config.yaml").read_text()
    assert "nothing left to do" in call(*words)[1]
    assert "nothing left to do" in call("run", "protocol=sjd_table4@2", *words[2:])[1]
    for other in ("protocol=sjd_table3", "protocol=null"):
        message = refused(call, "run", other, *words[2:])
        assert "here" in message
        assert "protocol=sjd_table4@2" in message


def _runs() -> list[tuple[str, str, str]]:
    """(protocol, model, data): one entry for every set of prompts and every family of models that a protocol has."""
    chosen, seen = [], set[str]()
    for name, model in PAIRS:
        protocol, family = protocols.read(name), parameters.default("model", model, "implementation")
        for data in (protocol.sets["data"] or "", *protocol.also):
            if not {f"data {data}", family} <= seen:
                chosen.append((name, model, data))
                seen |= {f"data {data}", family}
    return chosen


@pytest.mark.parametrize(("name", "model", "data"), _runs())
def test_a_protocol_runs_on_a_reduced_random_model(
    name: str, model: str, data: str, data_dir: Path, tmp_path: Path
) -> None:
    words = _words(name, model, "n=4", "batch=4", "metrics=none", *TINY)
    words += ["method=vanilla"] if parameters.is_continuous("model", model) else ["method=sjd", "dtype=float32"]
    words += [f"data={data}"] if data else []
    words += [f"data_dir={data_dir}"] if "data_dir" in configuration.compose(words) else []
    row = run.run(configuration.compose(words), tmp_path / "run").row
    protocol = protocols.read(name)
    assert (row["protocol"], row["n"], row["model"]) == (protocol.label, 4, model)
    assert len(list((tmp_path / "run/images").glob("*.png"))) == 4
    for remark in remarks_of(configuration.compose(words)):
        assert remark in joined(row_remarks(row))
    if ({**protocol.sets, **protocol.also.get(data, {})}).get("n") is not None:  # and no protocol has four
        assert "n 4 (not " in joined(row_remarks(row))


#: Cells of published lines, and the parameters that they state.
_PRINTED = {
    "temperature": "temperature", "top_k": "top_k", "cfg": "cfg_scale", "gamma": "gamma", "prefill_ratio": "prefill",
    "batch_size": "batch", "delta": "delta", "lambda": "lam",
}  # fmt: skip
_DATA = {
    "Parti": "parti",
    "COCO2014": "coco2014",
    "COCO 2014": "coco2014",
    "COCO 2017": "coco2017",
    "COCO2017": "coco2017",
    "COCO": "coco",
    "ImageNet": "imagenet",
}


def _data_of(text: str) -> str:
    return next((data for word, data in _DATA.items() if word in text), "")


def test_every_line_of_a_papers_table_has_its_published_settings() -> None:
    """On the models of the paper: prompts, sampling and the method's parameters, as far as the printed row states
    them. (A window is counted differently in each code.)"""
    compared = 0
    with configuration.session():
        for name in literature.available():
            if (table := TABLES.get(name)) is None or table.rows_of != "run":
                continue
            for printed, line in itertools.product(literature.load(name), table.lines):
                model = printed.model_name
                if line.published is None or not printed.fits(line.published):
                    continue
                if model not in parameters.choices("model"):
                    continue
                if table.no_run(line, model):
                    continue
                suite = table.on(model)
                cfg = configuration.compose(suite.overrides(line, next(suite.cells()), seconds=bool(suite.timed)))
                with case(name, model, line.key):
                    data = _data_of(printed.cells["dataset"]) or _data_of(printed.cells["part"])
                    assert cfg.data.startswith(data)
                    for cell, parameter in _PRINTED.items():
                        with suppress(ValueError):
                            value = float(printed.cells[cell])
                            if parameter in cfg:
                                assert cfg.get(parameter) == value, (
                                    f"{parameter}: {cfg.get(parameter)}, printed {value}"
                                )
                                compared += 1
    assert compared > 300


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published tables are not here")
def test_every_table_has_the_numbers_of_the_published_protocols() -> None:
    """n, seeds, temperature, guidance, the top-k filter, batch and prompts of every line on every model of a protocol,
    where a cell of the published table begins with numbers."""
    cells = {"n_prompts_quality": "n", "temperature": "temperature", "top_k": "top_k", "cfg": "cfg_scale"}
    cells |= {"seeds": "seed", "batch_size": "batch"}
    with (SHARED / "protocols.csv").open(newline="", encoding="utf-8") as f:
        rows = list(csv.DictReader(f))
    compared = 0
    with configuration.session():
        for name in NAMES:
            protocol = protocols.read(name)
            stated = [row for row in rows if row["index_ids"].split("; ")[0] == name]
            for table, model in itertools.product(protocol.serves, protocol.models):
                if table not in TABLES or TABLES[table].papers_protocol != name or TABLES[table].rows_of != "run":
                    continue
                for line in TABLES[table].lines:
                    if TABLES[table].no_run(line, model):
                        continue
                    suite = TABLES[table].on(model)
                    cfg = configuration.compose(suite.overrides(line, next(suite.cells())))
                    own = line.on(model, TABLES[table].model) or {}
                    with case(name, table, model, line.key):
                        for cell, parameter in cells.items():
                            allowed = [number for row in stated for number in _numbers(row[cell])]
                            apart = parameter == "batch" and suite.timed
                            if allowed and parameter in cfg and parameter not in own and not apart:
                                assert cfg.get(parameter) in allowed, (
                                    f"{parameter}: {cfg.get(parameter)}, published {allowed}"
                                )
                                compared += 1
                        words = [word for row in stated for word in row["dataset"].split(";")]
                        named = set(filter(None, map(_data_of, words)))
                        assert not named or any(cfg.data.startswith(data) for data in named)
    assert compared > 300


def _numbers(cell: str) -> list[float]:
    """The numbers with which a cell begins: "0 and 1", "5000; 1632 [data file]", "42-46 (...)".
    "not stated (code: 1)" counts, too."""
    begin = re.match(r"(?:[\d.]+(?:-\d+)?(?:, | and |; )?)*", cell.removeprefix("not stated (code: "))
    assert begin is not None
    numbers: list[float] = []
    for text in re.findall(r"[\d.]+(?:-\d+)?", begin[0]):
        first, _, last = text.partition("-")
        numbers += [float(first)] if not last else [float(i) for i in range(int(first), int(last) + 1)]
    return numbers
