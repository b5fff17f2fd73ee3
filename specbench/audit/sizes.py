"""The drafts, and the sampling parameters, that the audit of a method tries on a model.

A draft that is longer than a sequence hides mistakes, because nothing after the first step is verified. So the audit
uses drafts of several sizes well below the length of a sequence, and on long sequences also the preset's own size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specbench.audit.densities import DensityPair
from specbench.audit.models import Subject, TabularModel
from specbench.config import parameters, registry
from specbench.config.run_config import RunConfig
from specbench.decoding.trees import parse
from specbench.harness.method import continuous_rule

#: Parameters that set the size of a draft. If one is given, no other size is tried.
SHAPE = ("window", "tree", "nodes", "depth", "width")
SIZES = (*SHAPE, "gamma")
#: The other parameters of a window. If one is given, only that is tried.
_OF_WINDOW = ("init", "refine", "coupling")

_FORK = "[[0],[1],[0,0]]"
_BUSH = "[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0],[0,1,0]]"
_SHORT = 4  # tokens of the shortest sequences
_LONG = 10  # tokens of sequences that are long enough for a preset's own draft

#: Rules that use distances between codes, and typical acceptance, make sense if a neighbourhood, or the draft's
#: candidates, are less than half of the vocabulary.
_NEARNESS = {"lantern": "k", "lantern_pp": "k", "gsd": "group", "neighbourhood": "group"}
_FEWEST = 8  # codes
_APART = 8  # mean squared distance of two codes of the built-in models: about half of them are nearer to a code

#: Parts that are not lossless, by their parameter; they have fewer audits (see `is_exact`).
_RELAXED = {"coupling": ("threshold",), "drafter": ("vvs", "pjd"), "select": ("longest",)}

#: How a model is sampled in addition to temperature 1, for exact rules: filters change the overlap of the drafter's and
#: the target's distributions, and greedy decoding has separate code.
_SAMPLED = {"v8t4": ("temperature=0.8", "top_k=6", "top_p=0.95"), "v3t5": ("temperature=0",)}
#: Additional windows of a preset on a model.
_WINDOWS: dict[tuple[str, str], tuple[tuple[str, ...], ...]] = {
    ("sjd", "v2t10"): (
        ("window=4", "init=vertical_sample"),
        ("window=4", "init=horizontal_sample"),
        ("window=4", "init=vertical_repeat"),
        ("window=4", "refine=false"),
    ),
    ("scd", "v3t5"): (
        ("window=2", "coupling=gumbel"),
        ("window=3", "coupling=gumbel"),
        ("window=3", "coupling=height"),
    ),
    ("scd", "m4t24"): (("window=12", "coupling=gumbel"), ("window=12", "coupling=height")),
    ("sjd_pac", "v4t8"): (
        ("window=4", "width=2", "depth=2", "tree=comb"),
        ("window=6", "width=2", "depth=3", "coupling=none"),
        ("window=6", "width=2", "depth=3", "coupling=height"),
    ),
    ("sjd_pac", "m4t24"): (("window=12", "width=3", "depth=2", "tree=comb", "coupling=none"),),
}


#: How CSpD is audited, in addition to the preset's draft of 8 tokens, on models of 3 to 5 tokens: its other exact
#: criterion, and the parameters that its drafts and densities depend on.
_DENSITIES: dict[str, tuple[tuple[str, ...], ...]] = {
    "d1t4": (("gamma=2",), ("gamma=2", "criterion=exact")),
    "d1t5": (("gamma=2", "prefill=0.4"), ("gamma=3", "criterion=exact")),
    "d2t3": (("gamma=1",), ("gamma=1", "temperature=0.7")),
    "d2t4": (("gamma=2",), ("gamma=2", "criterion=exact", "align=false")),
}


def is_exact(cfg: RunConfig) -> bool:
    """Whether a method is audited as a lossless one is: on real models, with other sampling and with the preset's own
    draft, too. This is not a statement about the method. `zipar` and the released variants of `scd` and `sjd_pac` count
    as exact here, and some of their audits refute them."""
    return cfg.rule == "exact" and not any(cfg.get(name) in values for name, values in _RELAXED.items())


def meaningful(cfg: RunConfig, model: Subject) -> bool:
    """Whether an audit of all models includes this one; see `_NEARNESS`. Real models are audited only with exact rules,
    since their drafters, not their rules, differ from the tables'."""
    if not isinstance(model, TabularModel):
        return is_exact(cfg) or cfg.drafter == "medusa"
    return model.vocab >= _FEWEST or not (cfg.rule in _NEARNESS or cfg.rule == "typical")


def variants(cfg: RunConfig, given_keys: set[str], model: Subject) -> Iterator[list[str]]:
    """The additional arguments of every audit of a method on a model. cfg: the method's configuration; given_keys: the
    keys of the arguments that it was composed from."""
    fixed = [*_rule(cfg, given_keys, model), *_real(cfg, given_keys, model), *_interval(cfg, given_keys, model)]
    drafts = [list(draft) for draft in _drafts(cfg, given_keys, model)] or [[]]
    for draft in drafts:
        yield [*fixed, *draft]
    sampled = _SAMPLED.get(model.name, ())
    if is_exact(cfg) and sampled and not given_keys & {"temperature", "top_k", "top_p"}:
        yield [*fixed, *drafts[-1], *sampled]


def of_densities(cfg: RunConfig, given_keys: set[str], model: DensityPair) -> Iterator[list[str]]:
    """Like `variants`, for a model of continuous tokens. A rule that is not exact is refuted by any draft."""
    yield []
    rule = continuous_rule(cfg)
    if rule.gamma and rule.exact and "gamma" not in given_keys:
        left = given_keys | ({"align"} if "criterion" in given_keys and rule.criterion == "path" else set())
        for arguments in _DENSITIES[model.name]:
            yield [argument for argument in arguments if argument.split("=")[0] not in left]


def _rule(cfg: RunConfig, given_keys: set[str], model: Subject) -> Iterator[str]:
    """The neighbourhood of a rule that uses distances between codes: less than half of the vocabulary."""
    name = _NEARNESS.get(cfg.rule)
    if name and name not in given_keys:
        most = max(2 if name == "group" else 1, (model.vocab - 1) // 2)
        if cfg.own[name] > most:
            yield f"{name}={most}"
    if cfg.rule == "gsd" and cfg.own["group"] > 1 and "distance" not in given_keys:
        yield f"distance={_APART}"


def _real(cfg: RunConfig, given_keys: set[str], model: Subject) -> Iterator[str]:
    """For real models: the rule under which the heads of Medusa are lossless, and guidance."""
    if not isinstance(model, TabularModel):
        if cfg.rule == "typical" and "rule" not in given_keys:
            yield "rule=exact"
        if model.guided and "cfg_scale" not in given_keys:
            yield "cfg_scale=2.0"


def _interval(cfg: RunConfig, given_keys: set[str], model: Subject) -> Iterator[str]:
    """The positions without drafts at the end of an image: at most a fifth of a sequence, if the preset's value would
    be most of it."""
    end = cfg.get("plain_from")
    if end is not None and "plain_from" not in given_keys and -end > model.length // 2:
        yield f"plain_from=-{max(1, model.length // 5)}"


def _drafts(cfg: RunConfig, given_keys: set[str], model: Subject) -> Iterator[tuple[str, ...]]:
    if given_keys & {*SHAPE, *_OF_WINDOW}:
        return
    declared = parameters.declared("drafter", cfg.drafter)
    length = model.length
    short, long = 2, length // 2
    lengths = sorted({short, long, *([3] if length == 5 else [])})
    if "window" in declared and "width" in declared and cfg.own["width"] > 1:
        yield ("window=3", "width=2", "depth=2")
        if long > 3:
            yield (f"window={max(long, 6)}", "width=2", "depth=3")
    elif "first_row" in declared:  # rows in parallel; the last one is raster order
        yield from (("window=1", "first_row=overlap"), ("window=2",), (f"window={length}",))
        return
    elif "lead" in declared:  # rows in parallel; then one after the other, the second one with drafts after a failure
        yield ("window=3", "lead=2")
        yield from ((f"window={window}", f"lead={length + 1}") for window in (2, 4) if window <= model.target.width)
        return
    elif "window" in declared:
        yield from ((f"window={window}",) for window in lengths)
    elif "nodes" in declared:
        yield ("nodes=3", "depth=2", "width=2")
        if long > 3:
            yield ("nodes=8", "depth=3", "width=3")
    elif "tree" in declared:
        yield from _trees(cfg, given_keys, model)
    else:
        return
    # a relaxed rule is refuted by any draft
    if length >= _LONG and cfg.own.get("window", 1) < length and is_exact(cfg):
        yield ()
    yield from _WINDOWS.get((cfg.method, model.name), ())


def _trees(cfg: RunConfig, given_keys: set[str], model: Subject) -> Iterator[tuple[str, ...]]:
    yield (f"tree={_FORK}",)
    if model.length >= 2 * _SHORT and cfg.rule in ("exact", "typical"):
        yield (f"tree={_BUSH}",)
    # relaxed rules on chains: the case of Theorem 2
    if cfg.rule not in ("exact", "typical") and "drafter" not in given_keys and isinstance(model, TabularModel):
        yield ("drafter=eagle", f"window={max(2, model.length // 2)}")


def same_drafts(cfg: RunConfig) -> tuple[Any, ...]:
    """A key of the sequences that a method gives on draft tables: presets with equal keys are audited once."""
    named = ("method", "variant", "drafter", "drafter_weights")
    drafter: str | tuple[str, str] = cfg.drafter
    parameters_left = {name: value for name, value in cfg.plain().items() if name not in named}
    if registry.drafter_network(cfg.drafter):
        kind = next(name for name in ("nodes", "tree", "window") if name in cfg)
        drafter = (kind, "medusa" if drafter == "medusa" else "")
        if "tree" in parameters_left:
            parameters_left["tree"] = tuple(parse(parameters_left["tree"]))
    return (drafter, tuple(sorted((name, str(value)) for name, value in parameters_left.items())))
