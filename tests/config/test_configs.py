"""Every shipped configuration composes, and has the parameters that its parts declare."""

from __future__ import annotations

import math
import shutil
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
from commands import usage_error
from hydra._internal.core_plugins import file_config_source
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from specbench.config import composition, configuration, parameters, registry, yaml_files
from specbench.data import worlds
from specbench.decoding.drafters.sjd_window import COUPLINGS
from specbench.decoding.drafters.window import INITS
from specbench.decoding.rules.base import MEASURES
from specbench.errors import UsageError, install

#: Those of models of codes.
RULES, DRAFTERS = (
    [name for name in parameters.choices(group) if not parameters.is_continuous(group, name)]
    for group in ("rule", "drafter")
)
METHODS = [name for name in parameters.choices("method") if parameters.method_choices(name)["rule"] in RULES]


def test_models_of_vectors_have_methods_of_their_own() -> None:
    others = [name for name in parameters.choices("method") if name not in METHODS]
    assert others == ["cspd", "cspd_paper"]
    for model in ("mar_b", "mar_l", "mar_h"):
        assert configuration.compose([f"model={model}"]).method == "cspd"
        for method in (*others, "vanilla"):
            cfg = configuration.compose([f"model={model}", f"method={method}"])
            assert (cfg.drafter, cfg.rule) == (("none", "exact") if method == "vanilla" else ("cspd", "density"))
            assert cfg.get("final_noise") == (method == "cspd")  # densities need it, MAR's own sampler ends with a mean
    paper = configuration.compose(["model=mar_l", "method=cspd_paper", "gamma=32", "batch_size=8"])
    names = ("gamma", "batch", "inner_temperature", "verify")
    assert [paper.get(name) for name in names] == [32, 8, 42.0, "parallel"]


def test_every_choice_composes_with_others_and_the_command_line_wins() -> None:
    """Every preset, rule and drafter at least once, mostly with parts that no preset combines."""
    for number in range(max(len(METHODS), len(RULES), len(DRAFTERS))):
        method, rule = METHODS[number % len(METHODS)], RULES[number % len(RULES)]
        drafter = DRAFTERS[-number % len(DRAFTERS)]
        if drafter in ("none", "zipar"):
            rule = "exact"  # with these, no other rule has an effect
        cfg = configuration.compose([f"method={method}", f"rule={rule}", f"drafter={drafter}"])
        assert (cfg.method, cfg.rule, cfg.drafter) == (method, rule, drafter)
        assert set(cfg.plain()) == set(parameters.parameters_of(cfg.plain())), (method, rule, drafter)


CLASSES = {
    "llamagen_3b",
    "llamagen_l",
    "llamagen_xl_c2i",
    "mar_b",
    "mar_l",
    "mar_h",
}


def test_a_real_model_has_nothing_of_an_embedded_world() -> None:
    """Not by default, not with any prompts, and not on request."""
    for model in [name for name in parameters.choices("model") if parameters.world("model", name) is None]:
        cfg = configuration.compose([f"model={model}"])
        assert cfg.data == ("imagenet" if model in CLASSES else "parti"), model
        for data in parameters.choices("data"):
            cfg = configuration.compose([f"model={model}", f"data={data}", *NEEDED.get(data, [])])
            assert cfg.get("metrics"), (model, data)
            assert not [name for name in cfg.get("metrics") if parameters.world("metrics", name)], (model, data)
        assert "fid" in configuration.compose([f"model={model}", "data=coco2017"]).get("metrics"), model
        for metrics in ("scenes_reward", "[clip_b32,scenes_fid]", "scenes", "textures_reward"):
            assert "embedded world" in usage_error(configuration.compose, [f"model={model}", f"metrics={metrics}"])


def test_embedded_models_have_their_own_world() -> None:
    scored = {world: [f"{world}_{metric}" for metric in ("fid", "clip", "reward")] for world in worlds.NAMES}
    scored["fashion"].remove("fashion_clip")
    models = {"llamagen_scenes": "scenes", "mar_scenes": "scenes_classes"}
    for model, data in {**models, "llamagen_textures": "textures", "llamagen_fashion": "fashion"}.items():
        cfg = configuration.compose([f"model={model}"])
        assert (cfg.data, cfg.get("metrics")) == (data, scored[data.removesuffix("_classes")])


#: Other arguments that a choice needs.
NEEDED = {"prompts": ["prompts=my.txt", "n=1"]}


def test_every_choice_of_the_other_groups_composes() -> None:
    for group in [g for g in parameters.groups() if g not in ("method", "rule", "drafter", "experiment", "protocol")]:
        for choice in parameters.choices(group):
            needed = NEEDED.get(choice, [])
            if group == "metrics" and (world := choice.partition("_")[0]) in worlds.NAMES:
                needed = [f"model=llamagen_{world}"]
            cfg = configuration.compose([f"{group}={choice}", *needed])
            assert group == "metrics" or getattr(cfg, group) == choice, (group, choice)


def test_every_experiment_is_a_valid_grid() -> None:
    for experiment in parameters.choices("experiment"):
        assert len(configuration.grid([f"experiment={experiment}"], multirun=True)) > 1, experiment


def test_every_choice_has_a_line_and_every_parameter_is_documented() -> None:
    for group in parameters.groups():
        for choice, line in parameters.choices(group).items():
            assert line.endswith("."), f"the first comment of {group}/{choice} is no whole sentence: {line!r}"
            if group in parameters.PARAMETER_GROUPS:
                assert parameters.declared(group, choice) <= set(parameters.table())
    assert parameters.common() <= set(parameters.table())


def test_the_choices_of_a_parameter_match_the_code_that_reads_it() -> None:
    """The table of parameters imports no decoder, so both have the list."""
    listed = {"init": INITS, "coupling": COUPLINGS, "proximity": MEASURES}
    assert {name: parameters.table()[name].choices for name in listed} == listed


def test_everything_in_conf_can_be_built() -> None:
    for kind in ("model", *parameters.PARTS):
        for name in parameters.choices(kind):
            assert callable(registry.find(kind, name)), f"{kind} {name}"


def test_metrics_are_chosen_by_name() -> None:
    for overrides, names in [
        ("metrics=none", []),
        ("metrics=[scenes_fid,scenes_clip]", ["scenes_fid", "scenes_clip"]),
        ("metrics=scenes_fid", ["scenes_fid"]),
        ("metrics=[scenes_fid,precision_recall]", ["scenes_fid", "precision_recall"]),
    ]:
        assert configuration.compose([overrides]).get("metrics") == names, overrides


def test_equal_values_are_one_configuration() -> None:
    assert (
        configuration.compose(["delta=2"])
        == configuration.compose(["delta=2.0"])
        == configuration.compose(["+delta=2"])
    )


def test_a_bad_word_costs_one_sentence() -> None:
    for word, sentence in [
        ("delta=0", "delta must be a number above 0 (got 0)"),
        ("delta=null", "delta must be a number above 0 (got null)"),
        ("n=0", "n must be an integer of at least 1 and at most 1000000, or all (got 0)"),
        ("n=al", "n must be an integer of at least 1 and at most 1000000, or all (got 'al')"),
        ("n=all", "data=scenes has no last prompt"),
        ("batch=all", "batch must be an integer of at least 1 and at most 4096 (got 'all')"),
        ("baseline=1", "baseline must be true or false"),
        ("top_k=0", "top_k must be an integer of at least 1 and at most 2147483647, or null (off)"),
        ("device=tpu", "device must be auto, cpu, cuda or cuda:N"),
        ("tree=[[0],[]]", "tree must be"),
        ("tree=[[0],[-1]]", "tree must be"),
        ("tree=-7", "tree must be"),
        ("weights=/nowhere/at/all", "there is no folder '/nowhere/at/all'"),
        ("method=nope", "unknown method 'nope' (choose from: band, "),
        ("drafter=null", "unknown drafter 'null'"),
        ("metrics=[scenes_fid,nope]", "unknown metric 'nope'"),
        ("metrics=[scenes_fid,fid]", "metrics scenes_fid and fid both fill the column fid"),
        ("metrics=[coco,scenes_clip]", "both fill the column clip_score"),
        ("reference=[]", "reference must be a path, or null"),
        ("typo=1", "unknown parameter 'typo'"),
        ("+typo=1", "unknown parameter 'typo'"),
        ("delt=1", "did you mean delta?"),
        ("model.width=1", "unknown parameter 'model.width'"),
        ("~delta", "cannot be removed"),
        ("delta=1,2", "add -m"),
        ("experiment=coolsd_delta", "add -m"),
        ("delta=[", "cannot read 'delta=['"),
        ("delta", "cannot read 'delta'"),
        ("delta=${nothing}", "'nothing' not found"),
        ("model=mar_b top_k=3", "has no parameter 'top_k'"),
        ("model=mar_b method=sjd", "drafter sjd does not support; use method=cspd, "),
        ("model=mar_b method=cspd rule=cool", "which drafter cspd and rule cool do not support"),
        ("method=cspd", "drafter cspd and rule density"),
        (
            "window=3",
            "has no parameter 'window' (it belongs to drafter built_in (method jacobi_built_in), drafter dflash (",
        ),
        ("protocol=nope", "unknown protocol 'nope' (choose from: coolsd_fig4, coolsd_fig5, "),
        ("protocol=sjd_table4@99", "protocol sjd_table4 has version 2 here, not 99"),
        ("protocol=sjd_table4,sjd_table3", "add -m"),
        ("protocol=null,sjd_table4", "null means no protocol"),
        ("protocol=true", "unknown protocol 'True'"),
        ("hydra/launcher=nope", "Could not find 'hydra/launcher/nope'"),
    ]:
        message = usage_error(configuration.grid, word.split(), False)
        assert sentence in message, word
        assert "\n" not in message, word


def test_a_value_outside_its_range_is_refused() -> None:
    for name, p in parameters.table().items():
        outside = ["nope"] if p.choices else []
        if p.low is not None:
            outside = [p.low if p.above else p.low - 1, *([] if p.high is None else [p.high + 1])]
        for value in outside:
            assert f"{name} must be {p.wanted()}" in usage_error(p.checked, name, value), (name, value)


def test_a_launcher_that_is_not_installed_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "_installed", lambda module: False)
    for word, extra in [
        ("hydra/launcher=joblib", "joblib"),
        ("hydra/launcher=local", "joblib"),
        ("hydra/launcher=submitit", "slurm"),
        ("hydra/launcher=slurm", "slurm"),
        ("hydra/launcher=ray", "ray"),
    ]:
        message = usage_error(configuration.grid, [word, "delta=1,2"], True)
        assert word in message, word
        assert message.endswith(install(extra)), word


def test_a_parameter_of_another_rule_names_its_rules_and_the_parameters() -> None:
    with pytest.raises(UsageError) as raised:
        configuration.compose(["method=eagle1", "delta=1.1"])
    assert "method 'eagle1'" in str(raised.value)
    owners = (
        "cool (method cool_sd)",
        "gsd (method gsd)",
        "lantern (method lantern, vvs) and rule uniform (method uniform_rsd)",
    )
    assert ", ".join(f"rule {owner}" for owner in owners) in str(raised.value)
    has = str(raised.value).rpartition("this choice has: ")[2].split(", ")
    assert {"weights", "variant", "tree", "temperature"} <= set(has)
    with pytest.raises(UsageError, match="'delta'"):  # although the preset's own rule has it
        configuration.compose(["method=cool_sd", "rule=exact", "delta=1.1"])


def test_grids() -> None:
    deltas = [job.cfg.get("delta") for job in configuration.grid(["delta=range(1,3,0.5)"], multirun=True)]
    assert deltas == [1.0, 1.5, 2.0, 2.5]
    jobs = configuration.grid(["experiment=coolsd_delta"], multirun=True)
    assert [job.name for job in jobs] == [f"delta={delta}" for delta in ("1.1", "1.5", 2, 3, 4)]
    jobs = configuration.grid(["experiment=coolsd_delta", "delta=3"], multirun=True)  # the command line wins
    assert [job.cfg.get("delta") for job in jobs] == [3.0]
    with pytest.raises(UsageError, match="method=eagle1.*delta=1.*'delta'"):
        configuration.grid(["method=cool_sd,eagle1", "delta=1,2"], multirun=True)
    with pytest.raises(UsageError, match="given 2 times"):
        configuration.grid(["delta=1", "delta=2"], multirun=True)
    with pytest.raises(UsageError, match="values"):
        configuration.grid(["delta=interval(1,2)"], multirun=True)


@example(10**400)
@given(st.floats(allow_nan=True, allow_infinity=True) | st.integers() | st.booleans() | st.text() | st.none())
def test_a_checked_number_is_always_in_range(value: object) -> None:
    try:
        delta = parameters.table()["delta"].checked("delta", value)
    except UsageError:
        assert not (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max)
    else:
        assert isinstance(delta, float)
        assert 0 < delta < math.inf


def test_validate_refuses_missing_values() -> None:
    cfg = configuration.compose().plain()
    del cfg["seed"], cfg["n"]
    with pytest.raises(UsageError, match="seed"):
        parameters.validate(cfg)


def _by_hydra(choices: composition.Choices) -> dict[str, object]:
    words = [f"{group}=[{','.join(v)}]" if isinstance(v, list) else f"{group}={v}" for group, v in choices.items()]
    with configuration.session():
        return configuration._by_hydra(parameters.conf_dir(), tuple(words))


FURTHER = 8  # choices of a preset with another drafter and rule


def _choices() -> list[composition.Choices]:
    """Every file of every group at least once, every preset with its own drafter and rule, some with others: with
    those that no preset has."""
    files = {group: list(parameters.choices(group)) for group in parameters.groups() if group != "experiment"}
    presets = len(files["method"])
    for group in ("drafter", "rule"):
        of_presets = {parameters.method_choices(method).get(group) for method in files["method"]}
        files[group].sort(key=lambda name: name in of_presets)
        assert files[group][FURTHER - 1] in of_presets
    assert max(len(names) for group, names in files.items() if group not in ("drafter", "rule")) <= presets + FURTHER
    choices: list[composition.Choices] = [
        {
            group: names[(i - presets) % len(names) if group in ("drafter", "rule") else i % len(names)]
            for group, names in files.items()
            if i >= presets or group not in ("drafter", "rule")
        }
        for i in range(presets + FURTHER)
    ]
    grids = [
        {"experiment": name, **more} for name in parameters.choices("experiment") for more in ({}, {"rule": "exact"})
    ]
    return [{}, *choices, *grids, {"metrics": ["kid", "clip_b32"]}, {"metrics": []}]


def test_composition_without_hydra_gives_what_hydra_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra reads every file again for every composition: here once."""
    read = cache(OmegaConf.load)
    monkeypatch.setattr(file_config_source.OmegaConf, "load", lambda file: deepcopy(read(file.name)))
    for choices in _choices():
        composed, expected = composition.compose(choices), _by_hydra(choices)
        assert composed == expected, choices
        assert list(composed["metrics"]) == list(expected["metrics"])  # a row names them in their order


def test_what_only_hydra_can_compose_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(parameters.conf_dir(), tmp_path / "conf")
    monkeypatch.setattr(parameters, "conf_dir", lambda: tmp_path / "conf")
    for content in [
        "defaults: [optional other]",
        "defaults: [{override hydra/launcher: local}]",
        "defaults: [{model: anole}]",
        "defaults: [{override /experiment: coolsd_delta}]",  # decided before the method is
        "# @package other\nseed: 1",
        "seed: ${n}",
        "seed: ???",
        "defaults: [sjd, sjd]",
    ]:
        (tmp_path / "conf/method/mine.yaml").write_text(f"{content}\n")
        yaml_files.clear()
        assert composition.compose({"method": "mine"}) is None, content
        assert composition.compose({"method": "sjd"}) is not None, content
        yaml_files.clear()


def test_a_composed_configuration_belongs_to_its_caller() -> None:
    first = composition.compose({"metrics": "fid"})
    assert first
    first["metrics"]["fid"]["resize"] = first["metrics"]["more"] = "changed"
    assert composition.compose({"metrics": "fid"}) == _by_hydra({"metrics": "fid"})
