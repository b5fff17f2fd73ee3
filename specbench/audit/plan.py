"""The plan of an audit: its arguments -> the measurements, method by method and model by model, and their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specbench.audit import audit, densities, model_recipes, models, records, sizes, tiny
from specbench.audit.audit import Measurement, Subject, assemble
from specbench.audit.audit_arguments import ARGUMENTS, COLUMNS, FEWEST, SAMPLES, SLOWER, VERIFIER_SAMPLES, WORTHWHILE
from specbench.audit.audit_text import described, name_of
from specbench.audit.densities import DensityPair
from specbench.audit.levels import MARGIN
from specbench.audit.models import TabularModel
from specbench.audit.tiny import TinyModel
from specbench.audit.verifier import Function, OutsideParts
from specbench.audit.verifier import loaded as load_function
from specbench.config import command_line, configuration, parameters, registry, variants
from specbench.config.run_config import RunConfig
from specbench.errors import UsageError, unknown, values
from specbench.harness.log import say
from specbench.harness.pipeline import resolve_device
from specbench.storage.csv_text import csv_text
from specbench.storage.files import writable, write_atomically
from specbench.storage.progress import tqdm

#: Parameters of a run -> the audit's parameters with the same meaning.
_INSTEAD = {"n": "audit.samples", "seed": "audit.seed", "model": "audit.model or audit.tables"}


def _discrete() -> tuple[str, ...]:
    return *model_recipes.TABLES, *model_recipes.TINY


_KIND = {False: "discrete tokens", True: "continuous tokens"}
_PARTS = ("drafter", "rule")

# The draft tables replace the network of any preset: these drafters give them the requested shape.
_CHAIN, _TREE = "eagle", "eagle_tree"


@dataclass(frozen=True)
class AuditPlan:
    """measurements: in order; workers: processes, None for the default; out: the file of the rows, or None; recorded:
    returns the row of records, if they are audited instead."""

    measurements: Sequence[Measurement]
    workers: int | None
    out: Path | None
    recorded: Callable[[], dict[str, Any]] | None = None


def planned(
    arguments: Sequence[str],
    all_presets: bool = False,
    of_variants: bool = False,
    outside: Mapping[str, str | Function] | None = None,
) -> AuditPlan:
    """The plan for the arguments of `specbench audit`. all_presets, of_variants: the flags --all and --variants;
    outside: values of `verifier`, `sampler` and `records`, if they are not among the arguments.

    Raises UsageError for bad arguments, a bad file of tables, a function that cannot be used, and a path that cannot be
    written to.
    """
    words = command_line.read(arguments, command_arguments=ARGUMENTS)
    keys = {*map(_key, words), *(outside or {})}
    if keys & {"records", "verifier", "sampler"}:
        settings, overrides = _sorted_out(words)
        plan = _of_records if "records" in keys else _of_verifier
        return plan(settings | dict(outside or {}), overrides, all_presets or of_variants)
    implied = [word for word in configuration.implied(words) if _key(word) not in ("data", "metrics")]
    settings, overrides = _sorted_out([*words, *implied])
    samples = settings.get("audit.samples", SAMPLES)
    many = all_presets or of_variants
    kinds = [False, True] if many else kinds_of(overrides)
    chosen = chosen_models(settings, kinds)
    out = writable(settings["out"]) if "out" in settings else None
    jobs = presets(overrides, chosen, of_variants) if many else _jobs(overrides, chosen, kinds)
    device = resolve_device(settings.get("audit.device", "cpu"))
    for cfg, model in jobs:
        assemble(cfg, model)  # find mistakes before decoding
    seed, margin = settings.get("audit.seed", 0), settings.get("audit.margin", MARGIN)
    fewer = samples if "audit.model" in settings else max(FEWEST, samples // SLOWER)
    measurements = [
        Measurement(cfg, model, fewer if isinstance(model, TinyModel) else samples, seed, margin, device)
        for cfg, model in jobs
    ]
    return AuditPlan(measurements, settings.get("audit.workers") if device.type == "cpu" else 1, out)


def _of_records(settings: Mapping[str, Any], overrides: Sequence[str], many: bool) -> AuditPlan:
    """The plan for `records=`."""
    allowed = ("records", "audit.seed", "audit.margin", "out")
    others = [*(["--all or --variants"] if many else []), *settings, *map(_key, overrides)]
    if other := next((name for name in others if name not in allowed), None):
        raise UsageError(f"records= audits the tokens of a file and takes {', '.join(allowed[1:])}: leave {other} out")
    out = writable(settings["out"]) if "out" in settings else None
    read = records.load(settings["records"])
    seed, margin = settings.get("audit.seed", 0), settings.get("audit.margin", MARGIN)
    return AuditPlan([], 1, out, partial(records.measure, read, seed, margin))


#: Arguments that an audit of a verifier has no use for -> why not.
_NOT_OF_VERIFIER = {
    "audit.workers": "a verifier runs in this process",
    "audit.device": "a verifier decides about arrays on the CPU",
}
#: The tables on which a verifier is audited by default: the ones with short sequences, and one with 64 tokens.
_OF_VERIFIER = ("v3t5", "v8t4", "m64t8")


def _of_verifier(settings: Mapping[str, Any], overrides: Sequence[str], many: bool) -> AuditPlan:
    """The plan for `verifier=`: chains of draft tables or, for a function that takes `parents`, trees."""
    if "verifier" not in settings:
        raise UsageError("sampler= draws the drafts of an outside verifier: give verifier=FILE.py:FUNCTION, too")
    if many:
        raise UsageError("verifier= audits one function, and --all and --variants audit presets: give one of them")
    for name, why in _NOT_OF_VERIFIER.items():
        if name in settings:
            raise UsageError(f"{name}= has no effect with verifier=, since {why}: leave it out")
    verifier = load_function("verifier", settings["verifier"], ("p", "q", "tokens"))
    sampler = load_function("sampler", settings["sampler"], ("q",)) if "sampler" in settings else None
    size = "tree" if "parents" in verifier.by_name else "window"
    allowed = (size, *models.SAMPLING)
    for key in map(_key, overrides):
        if key not in allowed:
            hint = "; a verifier of trees has a parameter `parents`" if key == "tree" else ""
            raise UsageError(
                f"'{key}' is no argument of an audit of {verifier.name}: it takes {', '.join(allowed)}{hint}"
            )
    chosen = chosen_models(settings, [False])
    if "audit.model" not in settings and "audit.tables" not in settings:
        chosen = [models.built_in(name) for name in _OF_VERIFIER]
    if wrong := next((model for model in chosen if not isinstance(model, TabularModel)), None):
        raise UsageError(
            f"{wrong.name} has no draft tables, on which a verifier is audited; use audit.model="
            f"{', '.join(model_recipes.TABLES)}"
        )
    parts = OutsideParts(verifier, sampler)
    arguments = ["method=eagle_chain", f"drafter={_TREE if size == 'tree' else _CHAIN}", *overrides]
    greedy_is_asked = "temperature" in map(_key, overrides)
    out = writable(settings["out"]) if "out" in settings else None
    measurements = [
        Measurement(
            cfg,
            model,
            settings.get("audit.samples", VERIFIER_SAMPLES),
            settings.get("audit.seed", 0),
            settings.get("audit.margin", MARGIN),
            outside=parts,
        )
        for cfg, model in audits(arguments, chosen)
        if cfg.temperature > 0 or greedy_is_asked
    ]
    for job in measurements:
        assemble(job.cfg, job.model, outside=parts)
    return AuditPlan(measurements, 1, out)


def measured(plan: AuditPlan) -> Iterator[dict[str, Any]]:
    """The row of each measurement, in order; each is in the plan's file before it is yielded. On tables, presets with
    the same drafts are measured once."""
    if plan.recorded is not None:
        rows = [plan.recorded()]
        _write(plan.out, rows)
        yield from rows
        return
    jobs, workers = plan.measurements, plan.workers
    keys = [
        (
            job.model.name,
            sizes.same_drafts(job.cfg) if isinstance(job.model, TabularModel) and job.outside is None else number,
        )
        for number, job in enumerate(jobs)
    ]
    first: dict[Any, Measurement] = {}
    for key, job in zip(keys, jobs, strict=True):
        first.setdefault(key, job)
    total = sum(job.samples for job in first.values())
    if workers is None:
        workers = audit.cores() if total >= WORTHWHILE else 1
    by_key: dict[Any, dict[str, Any]] = {}
    rows = []
    with (
        tqdm(total=total, unit="sequence", unit_scale=True) as bar,
        closing(audit.measured(list(first.values()), workers, bar.update)) as decoded,
    ):
        for key, job in zip(keys, jobs, strict=True):
            bar.set_description(f"{job.name} on {job.model.name}")
            if key not in by_key:
                by_key[key] = next(decoded)
            row = by_key[key]
            if job.outside is None and (row["method"], row["variant"]) != (job.cfg.method, job.cfg.variant):
                source = name_of(row) if row["method"] == job.cfg.method else row["method"]
                row = {**row, **described(job.cfg, job.model), "same_as": source}
            rows.append(row)
            _write(plan.out, rows)
            yield row


def _write(out: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    if out is not None:
        write_atomically(out, csv_text(COLUMNS, rows).encode())


def _key(argument: str) -> str:
    return argument.split("=", 1)[0]


def _sorted_out(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The audit's own arguments by name, and the remaining overrides. UsageError for parameters that only a run has."""
    keys = [_key(argument) for argument in arguments]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise UsageError(f"'{twice}' is given {keys.count(twice)} times; give it once")
    audit_arguments = [
        argument for argument in arguments if _key(argument) in ARGUMENTS or argument.startswith("audit.")
    ]
    texts = values(audit_arguments, ARGUMENTS, "parameter")
    settings = {name: ARGUMENTS[name].from_text(name, text) for name, text in texts.items()}
    overrides = [argument for argument in arguments if argument not in audit_arguments]
    for key in map(_key, overrides):
        if key == "cfg_scale" and settings.get("audit.model") not in model_recipes.TINY:
            raise UsageError(
                "only models of real classes have guidance: leave cfg_scale= out, or use"
                f" audit.model={next(iter(model_recipes.TINY))}"
            )
        own_keys = ("method", "variant", *parameters.PARTS, "cfg_scale")
        if key.startswith(("hydra.", "hydra/")) or (key in _of_a_run() and key not in own_keys):
            instead = f"; give {_INSTEAD[key]}" if key in _INSTEAD else ""
            raise UsageError(f"'{key}' belongs to specbench run, an audit has no such parameter{instead}")
    if overrides and (several := configuration.swept(overrides)):
        raise UsageError(f"'{sorted(several)[0]}' names several values; an audit takes one at a time")
    return settings, overrides


def _of_a_run() -> set[str]:
    """The parameters and groups that belong neither to a method nor to the sampling."""
    names = {*parameters.table(), *parameters.groups()}
    return names.difference(parameters.method_parameters(), models.SAMPLING, densities.SAMPLING)


def chosen_models(settings: Mapping[str, Any], kinds: Sequence[bool]) -> list[Subject]:
    """The models that the arguments name, or all built-in ones, discrete tokens first. `kinds`: see `kinds_of`."""
    if "audit.tables" in settings and "audit.model" in settings:
        raise UsageError("audit.tables and audit.model name two different models: give one of them")
    if "audit.tables" in settings:
        return [models.load(settings["audit.tables"])]
    names_of = {False: _discrete(), True: tuple(model_recipes.DENSITIES)}
    names = (*names_of[False], *names_of[True])
    if name := settings.get("audit.model"):
        if name not in names_of[False] + names_of[True]:
            raise unknown("audit.model", name, [n for kind in kinds for n in names_of[kind]])
        names = (name,)
    modules = {**dict.fromkeys(model_recipes.TINY, tiny), **dict.fromkeys(model_recipes.DENSITIES, densities)}
    return [modules.get(name, models).built_in(name) for name in names]


def _suited(chosen: Sequence[Subject], kinds: Sequence[bool]) -> list[Subject]:
    """The models of the first of these kinds that has any."""
    of_kinds = ([model for model in chosen if isinstance(model, DensityPair) == kind] for kind in kinds)
    return next(filter(None, of_kinds), [])


def kinds_of(arguments: Sequence[str]) -> list[bool]:
    """The kinds of tokens that the method of these arguments is for: discrete (False) or continuous (True). Vanilla is
    for both."""
    chosen = {_key(argument): argument.partition("=")[2] for argument in arguments}
    method = chosen.get("method") or configuration.compose().method
    drafter, rule = ({**parameters.method_choices(method), **chosen}.get(group, "") for group in ("drafter", "rule"))
    kinds = [parameters.kind(*part) for part in (("drafter", drafter), ("rule", rule))]
    if kinds == ["any", "any"]:
        return [False, True]
    if "continuous" in kinds and kinds != ["continuous", "continuous"]:
        suited = [
            f"{g} {', '.join(c for c in parameters.choices(g) if parameters.is_continuous(g, c))}" for g in _PARTS
        ]
        raise UsageError(
            f"drafter {drafter} and rule {rule} do not go together: continuous tokens take {' with '.join(suited)}"
        )
    return ["continuous" in kinds]


def _jobs(
    arguments: Sequence[str], chosen: Sequence[Subject], kinds: Sequence[bool]
) -> list[tuple[RunConfig, Subject]]:
    """One method on the models that suit it."""
    if suited := _suited(chosen, kinds):
        return list(audits(arguments, suited))
    [named], [continuous] = chosen, kinds
    names = model_recipes.DENSITIES if continuous else _discrete()
    raise UsageError(
        f"{named.name} is a model of {_KIND[not continuous]}, and the method is for {_KIND[continuous]};"
        f" use audit.model={', '.join(names)}"
    )


def audits(arguments: Sequence[str], suited: Sequence[Subject]) -> Iterator[tuple[RunConfig, Subject]]:
    """One method on each model, with drafts of every size. If there are several models, only those on which its rule
    makes sense."""
    keys = {_key(argument) for argument in arguments}
    for model in suited:
        cfg = _configuration(arguments, isinstance(model, DensityPair))
        if isinstance(model, DensityPair):
            for more in sizes.of_densities(cfg, keys, model):
                yield _configuration([*arguments, *more], True), model
        elif len(suited) == 1 or sizes.meaningful(cfg, model):
            for more in sizes.variants(cfg, keys, model):
                yield _configuration([*arguments, *more], False), model


def _configuration(arguments: Sequence[str], continuous: bool) -> RunConfig:
    """The checked configuration of one method, with draft tables of the shape in the arguments."""
    if continuous:
        name = next(name for name in parameters.choices("model") if parameters.is_continuous("model", name))
        # The model only serves to check the parameters.
        return configuration.compose([*arguments, f"model={name}", "weights=random"])
    keys = {_key(argument) for argument in arguments}
    if "drafter" not in keys and keys & {"window", "tree"}:
        base = configuration.compose(
            [argument for argument in arguments if _key(argument) in ("method", "rule", "verification")]
        )
        if registry.drafter_network(base.drafter):
            if "window" in keys and "window" not in base:
                return configuration.compose([*arguments, f"drafter={_CHAIN}"])
            if "tree" in keys and "tree" not in base:
                return configuration.compose([*arguments, f"drafter={_TREE}"])
    return configuration.compose(arguments)


def presets(
    arguments: Sequence[str], chosen: Sequence[Subject], of_variants: bool = False
) -> list[tuple[RunConfig, Subject]]:
    """The configurations of every preset, or of every variant of the presets that have variants, on the models that
    suit it. The arguments are used where they apply.

    An argument applies to the presets that have its parameter. A preset that cannot take the value (a window too small
    for its tree) keeps its own value, and a preset that cannot be audited on the models is left out. Both are reported
    on stderr. UsageError if no preset is left, or if an argument applies to none.
    """
    parts = [argument for argument in arguments if _key(argument) in _PARTS]
    overrides = [argument for argument in arguments if argument not in parts]
    jobs: list[tuple[RunConfig, Subject]] = []
    notes: list[str] = []
    elsewhere: list[str] = []  # presets for the kind of tokens that the named models do not have
    used: set[str] = set()  # overrides that some preset takes
    left_out: UsageError | None = None  # the first error of a preset that is left out
    refused: dict[str, UsageError] = {}  # override -> the first error of a preset that cannot take it

    for preset in _presets(arguments, of_variants):
        name = " ".join(preset).removeprefix("method=")
        accepted = [*preset, *parts]
        try:
            suited = _suited(chosen, kinds_of(accepted))
            if not suited:
                elsewhere.append(name)
                continue
            cfg = _fitting(accepted, suited[0])
        except UsageError as e:
            left_out = left_out or e
            notes.append(f"{name} is left out: {e}")
            continue
        for argument in overrides:
            if _key(argument) not in cfg:
                continue
            try:
                cfg = _fitting([*accepted, argument], suited[0])
            except UsageError as e:
                refused.setdefault(argument, e)
                notes.append(f"{name} keeps its own {_key(argument)}: {e}")
                continue
            accepted.append(argument)
            used.add(argument)
        jobs += audits(accepted, suited)

    if elsewhere:
        [named] = chosen
        continuous = isinstance(named, DensityPair)
        note = (
            f"{', '.join(elsewhere)} left out: for {_KIND[not continuous]}, and {named.name} is a model of"
            f" {_KIND[continuous]}"
        )
        notes.insert(0, note)
        left_out = left_out or UsageError(note)
    if not jobs:
        assert left_out is not None  # every preset was left out
        raise left_out
    for argument in overrides:
        if argument in used:
            continue
        if argument in refused:
            raise refused[argument]
        cfg, model = jobs[0]
        _fitting([f"method={cfg.method}", *parts, argument], model)
        raise AssertionError(f"{argument} fits {cfg.method}, which does not have it")
    for note in notes:
        say(f"specbench: {note}")
    return jobs


def _presets(arguments: Sequence[str], of_variants: bool) -> list[list[str]]:
    """The arguments that name each preset, or each variant. UsageError if the user's arguments name one."""
    for key in ("method", *(["variant"] if of_variants else [])):
        if key in map(_key, arguments):
            flag = "--variants" if of_variants else "--all"
            raise UsageError(f"{flag} and {key}= contradict each other: give one of them")
    names = parameters.choices("method")
    if of_variants:
        return [[f"method={name}", f"variant={variant}"] for name in names for variant in variants.names(name)]
    return [[f"method={name}"] for name in names]


def _fitting(arguments: Sequence[str], model: Subject) -> RunConfig:
    """The configuration of these arguments, if they fit together and can be built for the model, else UsageError."""
    cfg = _configuration(arguments, True) if isinstance(model, DensityPair) else configuration.compose(arguments)
    assemble(cfg, model)
    return cfg
