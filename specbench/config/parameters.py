"""Every flat parameter of a run, its allowed values, and the part of a method that declares it.

`TABLE` alone documents and checks a parameter's value. `conf/` defines which parameters a run *has*: the keys of
config.yaml and of the chosen model, data, engine, drafter and rule files, and nothing else. A new part therefore
declares its parameters in its own YAML; a parameter that no part had before also gets a line here.

Imports neither torch nor Hydra.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from specbench.errors import UsageError, unknown
from specbench.storage import home

Kind = Literal["integer", "number", "string", "text", "flag", "names", "tree", "path"]

#: The groups of conf/ whose chosen file declares parameters, in the order in which a row names them.
PARAMETER_GROUPS = ("model", "data", "engine", "drafter", "rule")


#: Bounds of counts that a run holds in memory before its work starts; a legitimate run stays well below.
PROMPTS = 1_000_000
DRAFT = 2000  # tokens of a draft: a depth takes up to two of the purposes of a step's random numbers (`PURPOSES`)
DEEP = 1000  # levels of a drafted tree, candidates of a node
LONGEST = 10_000  # characters of an argument: Hydra's grammar takes seconds for more


@dataclass(frozen=True)
class Parameter:
    """One flat parameter: its type, its range and its meaning."""

    kind: Kind
    line: str
    low: float | None = None
    high: float | None = None
    above: bool = False  # `low` itself is excluded
    choices: tuple[str, ...] = ()
    pattern: str = ""  # for words with a free part
    null: str = ""  # the meaning of null; empty: null is an error
    also: tuple[str, ...] = ()  # words that are allowed instead of a number

    def wanted(self) -> str:
        """What a value must be, as text."""
        if self.choices:
            text = "one of " + ", ".join(self.choices)
        elif self.kind == "flag":
            text = "true or false"
        elif self.kind == "names":
            text = "a list of names"
        elif self.kind == "tree":
            text = f"a tree's name or a list of paths such as [[0],[1],[0,0]], at most {DRAFT} of at most {DEEP} each"
        elif self.kind in ("string", "text", "path"):
            text = self.line if self.pattern else f"a {self.kind}"
        else:
            text = "an integer" if self.kind == "integer" else "a number"
            if self.low is not None:
                text += f" {'above' if self.above else 'of at least'} {self.low:g}"
            if self.high is not None:  # every parameter with an upper end has a lower one
                text += f" and at most {self.high if isinstance(self.high, int) else f'{self.high:g}'}"
        text += "".join(f", or {word}" for word in self.also)
        return text + (f", or null ({self.null})" if self.null else "")

    def read(self, value: Any) -> Any:
        """The value in its canonical form; raises ValueError for a value that is not allowed."""
        if value is None:
            if not self.null:
                raise ValueError
            return None
        if isinstance(value, str) and value in self.also:
            return value
        if self.kind == "flag":
            ok = isinstance(value, bool)
        elif self.kind == "integer":
            ok = isinstance(value, int) and not isinstance(value, bool)
        elif self.kind == "number":
            ok = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
            value = float(value) if ok else value
        elif self.kind == "names":
            ok = isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
            value = list(value) if ok else value
        elif self.kind == "tree":
            ok = (isinstance(value, str) and bool(value)) or _is_tree(value)
        elif self.kind == "path":
            ok = isinstance(value, str | int) and not isinstance(value, bool) and str(value) != ""
            value = str(value)  # out=1 is a folder too
        elif self.kind == "text":  # may be empty
            ok = isinstance(value, str)
        else:
            ok = isinstance(value, str) and bool(value)
        if ok and self.kind in ("integer", "number"):
            ok = (self.low is None or value > self.low or (value == self.low and not self.above)) and (
                self.high is None or value <= self.high
            )
        if ok and self.choices:
            ok = value in self.choices
        if ok and self.pattern:
            ok = re.fullmatch(self.pattern, value) is not None
        if not ok:
            raise ValueError
        return value


def _is_tree(value: Any) -> bool:
    """A non-empty list of paths from the root, each a non-empty list of child numbers."""
    return (
        isinstance(value, list | tuple)
        and 0 < len(value) <= DRAFT
        and all(isinstance(path, list | tuple) and 0 < len(path) <= DEEP for path in value)
        and all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= DEEP for path in value for i in path)
    )


#: Every flat parameter, in the order in which a row lists them.
TABLE: dict[str, Parameter] = {
    "model": Parameter("string", "target model"),
    "weights": Parameter("string", "embedded or official (fetched), random, or a folder of weight files"),
    "reduced": Parameter("flag", "the same architecture, small: for tests, and for weights of that size"),
    "size": Parameter("integer", "side of an image in pixels", low=64, high=4096),
    "prompt_length": Parameter("integer", "length that every prompt is padded to, in tokens", low=4, high=8192),
    "instruction": Parameter("string", "text around the prompt, with {width}, {height} and {prompt}"),
    "suffix": Parameter("text", "text after every prompt"),
    "negative": Parameter("text", "negative prompt of the guidance"),
    "method": Parameter("string", "preset of a drafter, a rule and their parameters"),
    "drafter": Parameter("string", "which tokens are drafted, and from which distribution each was sampled"),
    "rule": Parameter("string", "the probability with which a drafted token is accepted"),
    "window": Parameter("integer", "length L of a drafted chain, in tokens", low=1, high=DRAFT),
    "tree": Parameter("tree", "shape of a drafted tree: its name or its paths from the root; for sjd full or comb"),
    "nodes": Parameter("integer", "draft tokens of a dynamic tree (EAGLE-2's total tokens)", low=1, high=DRAFT),
    "depth": Parameter(
        "integer", "levels of a drafted tree; for sjd with tree=full the root is one of them", low=1, high=DEEP
    ),
    "width": Parameter("integer", "candidates per node of a drafted tree; 1 is a chain", low=1, high=DEEP),
    "init": Parameter(
        "string",
        "how new positions of a Jacobi window are initialised",
        choices=("random", "horizontal_repeat", "vertical_repeat", "horizontal_sample", "vertical_sample"),
    ),
    "refine": Parameter("flag", "renew the uncommitted positions of a Jacobi window; else they are initialised again"),
    "coupling": Parameter(
        "string",
        "how a Jacobi window's positions are renewed: none (SJD), maximal (adaptive continuation) or gumbel",
        choices=("none", "maximal", "gumbel"),
    ),
    "gamma": Parameter("integer", "draft length γ of continuous speculative decoding, in tokens", low=1, high=DRAFT),
    "prefill": Parameter("number", "share of the image that the target samples before the first draft", low=0, high=1),
    "align": Parameter("flag", "drafter and target sample a token from the same noise (trajectory alignment)"),
    "criterion": Parameter(
        "string",
        "verification of a continuous token: densities of the last step (exact), with the paper's factor, or of the"
        " path",
        choices=("exact", "paper", "path"),
    ),
    "verify": Parameter(
        "string",
        "whether the target's distribution of a drafted token is conditioned on the drafted tokens before it",
        choices=("causal", "parallel"),
    ),
    "on_reject": Parameter(
        "string", "a rejection drops the tokens after it, or only resamples that one", choices=("stop", "continue")
    ),
    "inner_temperature": Parameter(
        "number", "divides distances before densities are compared; 1 is off", low=0, above=True
    ),
    "tries": Parameter("integer", "most proposals for the token after a rejection", low=1, high=1000),
    "delta": Parameter(
        "number",
        "relaxation budget δ (1 with the uniform rule is exact); LANTERN's bound on the distribution",
        low=0,
        above=True,
    ),
    "lam": Parameter("number", "LANTERN++'s bound λ on a neighbourhood's mass, in units of its token's", low=0),
    "k": Parameter("integer", "nearest codes that may count towards a token", low=1, high=2**20),
    "bound": Parameter(
        "string",
        "what is bounded: the distribution's change (tvd, jsd), or the mass of all (total) or others (neighbours)",
        choices=("tvd", "jsd", "total", "neighbours"),
    ),
    "proximity": Parameter("string", "distance between codes", choices=("l2", "cosine", "random")),
    "group": Parameter("integer", "codes in a group, the token's own included; 1 is exact", low=1, high=2**20),
    "epsilon": Parameter("number", "typical acceptance: probability that always suffices", low=0, high=1),
    "alpha": Parameter("number", "typical acceptance: share of exp(-entropy) that suffices", low=0),
    "nu": Parameter("number", "decay ν of the relaxation over draft positions (Cool-SD Eq. 16); 0 is uniform", low=0),
    "schedule": Parameter("string", "how the relaxation decays over positions", choices=("exponential", "linear")),
    "floor": Parameter("number", "least relaxation ω of any position; 0 is the paper's schedule", low=0),
    "resample": Parameter(
        "string",
        "distribution sampled from after a rejection: Cool-SD Eq. 10 (optimal) or Eq. 11 (vanilla), LANTERN's paper or"
        " released code",
        choices=("optimal", "vanilla", "paper", "released"),
    ),
    "temperature": Parameter("number", "softmax temperature; 0 is greedy", low=0),
    "top_k": Parameter("integer", "keep the k most probable tokens", low=1, high=2**31 - 1, null="off"),
    "top_p": Parameter("number", "keep the smallest set of tokens of this mass; 1 is off", low=0, above=True, high=1),
    "cfg_scale": Parameter("number", "classifier-free guidance scale; 1 is off", low=0),
    "cfg_schedule": Parameter(
        "string", "guidance grows linearly over the image, or stays", choices=("linear", "constant")
    ),
    "iterations": Parameter(
        "integer",
        "passes in which the target alone fills the image (MAR's mask schedule)",
        low=1,
        high=2**16,
        null="one a token",
    ),
    "diffusion_steps": Parameter("integer", "steps in which the diffusion head samples a token", low=2, high=1000),
    "final_noise": Parameter("flag", "also sample the head's last step; MAR's own sampler ends with its mean"),
    "drafter_weights": Parameter(
        "path", "folder of a drafter's weights, as `specbench train` writes it", null="those next to the target's"
    ),
    "protocol": Parameter(
        "string", "protocol that the run follows, name@version", pattern=r"[a-z0-9_]+@[0-9]+", null="none"
    ),
    "data": Parameter("string", "data set of the prompts"),
    "split": Parameter("string", "split of the data set", choices=("train", "validation")),
    "caption": Parameter(
        "string",
        "which of an image's captions is its prompt; random is by seed, running_longest as in SJD's code",
        choices=("first", "longest", "running_longest", "random"),
    ),
    "data_dir": Parameter("path", "folder of the data set's files", null="where `specbench fetch` puts them"),
    "prompts": Parameter("path", "a file of prompts, as in prompts=my.txt", pattern=r"(?s).+"),
    "seed": Parameter(
        "integer",
        "random streams are keyed by (seed, prompt index); chooses the subset of prompts",
        low=0,
        high=2**63 - 1,
    ),
    "n": Parameter(
        "integer",
        "number of prompts; a larger n extends a smaller one; all: every prompt, the default with prompts=FILE",
        low=1,
        high=PROMPTS,
        also=("all",),
    ),
    "batch": Parameter("integer", "prompts decoded together; latency is measured at 1 only", low=1, high=4096),
    "device": Parameter("string", "auto, cpu, cuda or cuda:N", pattern=r"auto|cpu|mps|cuda(:\d+)?"),
    "dtype": Parameter("string", "number format of the models", choices=("float32", "bfloat16", "float16")),
    "engine": Parameter("string", "execution of a step"),
    "metrics": Parameter("names", "quality metrics to compute"),
    "metrics_dir": Parameter(
        "path", "folder of the evaluators' weights, one subfolder each", null="where `specbench fetch` puts them"
    ),
    "reference": Parameter(
        "path", "statistics of real images, .npz", null="what `specbench reference` made for the data set"
    ),
    "baseline": Parameter("flag", "also decode the same prompts with vanilla AR, for the speed-up"),
    "warmup": Parameter("integer", "untimed decodes before the first timed one", low=0, high=1000),
    "workers": Parameter(
        "integer",
        "decoding processes: one per GPU, or of one thread each on a CPU; more than one need Ray",
        low=1,
        high=1024,
    ),
    "ray_address": Parameter("string", "a Ray cluster whose machines decode", null="this machine"),
    "out": Parameter("path", "folder of the run", null="a new folder under runs/"),
}

#: Parameter -> its unit; the others have none.
UNITS = {
    "size": "pixels",
    "prompt_length": "tokens",
    "window": "tokens",
    "nodes": "tokens",
    "depth": "levels",
    "width": "tokens",
    "gamma": "tokens",
    "prefill": "of the image",
    "tries": "proposals",
    "k": "codes",
    "group": "codes",
    "top_k": "tokens",
    "iterations": "passes",
    "diffusion_steps": "steps",
    "n": "prompts",
    "batch": "images",
    "warmup": "images",
    "workers": "processes",
}


# --- conf/ ------------------------------------------------------------------------------------------------------------


#: Keys of the files under conf/ that describe a choice and are not parameters of a run.
METADATA = ("kind", "preferred", "network")


@cache
def conf_dir() -> Path:
    """The folder of configurations: inside the package when installed, next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise UsageError(f"the configurations are missing: no conf/config.yaml in or next to {package}; install again")


@cache
def groups() -> tuple[str, ...]:
    """The groups of conf/ from which a run chooses."""
    return tuple(
        sorted(p.name for p in conf_dir().iterdir() if p.is_dir() and p.name != "hydra" and any(p.glob("*.yaml")))
    )


@cache
def choices(group: str) -> dict[str, str]:
    """Name -> one-line description of every choice of a group: the file's first comment line, a full sentence."""
    found = {}
    for path in sorted((conf_dir() / group).glob("*.yaml")):
        comments = (line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
        found[path.stem] = next((c for c in comments if not c.startswith("@")), "")
    return found


@cache
def content(group: str, name: str) -> dict[str, Any]:
    """The content of a choice's file; empty where there is no such file."""
    path = conf_dir() / group / f"{name}.yaml"
    loaded = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
    assert isinstance(loaded, dict)
    return {str(key): value for key, value in loaded.items()}


@cache
def declared(group: str, name: str) -> frozenset[str]:
    """The flat parameters that a choice of a group declares, including those of the files that it builds on."""
    held = content(group, name)
    inherited = [declared(group, d) for d in held.get("defaults", []) if isinstance(d, str) and d != "_self_"]
    return frozenset(held).difference(("defaults", "hydra", *METADATA)).union(*inherited)


def preferred(model: str) -> dict[str, str]:
    """The data and the method of a model for which the general defaults do not fit, from its file."""
    return dict(default("model", model, "preferred") or {}) if model in choices("model") else {}


def own_data(model: str) -> str:
    """The data set of a model that needs its own prompts (an embedded one, or one of classes); else empty."""
    embedded = default("model", model, "weights") == "embedded"
    return preferred(model).get("data", default_choice("data") if embedded else "")


def default(group: str, name: str, parameter: str) -> Any:
    """The value of a parameter in a choice's file; None where it is not set."""
    return content(group, name).get(parameter)


@cache
def common() -> frozenset[str]:
    """The parameters that every run has."""
    return declared("", "config") | {"method"}


@cache
def method_parameters() -> frozenset[str]:
    """The parameters that a drafter or a rule declares: those of a method, without the model and the sampling."""
    parts = (declared(group, name) for group in ("drafter", "rule") for name in choices(group))
    return frozenset().union(*parts)


def possible(model: str) -> frozenset[str]:
    """The parameters that a run of a model can have: all but those that only other models declare."""
    if model not in choices("model"):
        return frozenset(TABLE)
    others = frozenset().union(*(declared("model", name) for name in choices("model")))
    return frozenset(TABLE) - (others - declared("model", model) - common())


def method_choices(method: str) -> dict[str, str]:
    """Group -> choice in a method's preset: {"drafter": "eagle_tree", "rule": "cool"}."""
    return _chosen(content("method", method))


def of_experiment(name: str) -> dict[str, Any]:
    """The choices and values of an experiment's file, by group and parameter; empty for one that does not exist."""
    held = content("experiment", name) if name in choices("experiment") else {}
    return _chosen(held) | {key: value for key, value in held.items() if key not in ("defaults", "hydra", *METADATA)}


@cache
def default_choice(group: str) -> str:
    """The default choice of a group."""
    return _chosen(content("", "config"))[group]


def _chosen(held: Mapping[str, Any]) -> dict[str, str]:
    """Group -> choice of a file's list of defaults."""
    entries = [d for d in held.get("defaults", []) if isinstance(d, dict)]
    return {key.split("/")[-1]: value for entry in entries for key, value in entry.items()}


def parameters_of(cfg: Mapping[str, Any]) -> list[str]:
    """The parameters of a run with these choices, in the order of `TABLE`."""
    names = common().union(*(declared(group, str(cfg.get(group))) for group in PARAMETER_GROUPS))
    return sorted(names, key=lambda name: list(TABLE).index(name) if name in TABLE else len(TABLE))


def owners(name: str) -> list[str]:
    """The choices that have a parameter: "rule cool (method cool_sd)"."""
    found = []
    for group in PARAMETER_GROUPS:
        for choice in choices(group):
            if name in declared(group, choice):
                presets = [method for method in choices("method") if method_choices(method).get(group) == choice]
                found.append(f"{group} {choice}" + (f" (method {', '.join(presets)})" if presets else ""))
    return found


def no_parameter(name: str, cfg: Mapping[str, Any]) -> UsageError:
    """The error for a parameter that a run with these choices does not have."""
    has = [p for p in parameters_of(cfg) if p not in groups()]
    who = f"method '{cfg.get('method')}' (drafter {cfg.get('drafter')}, rule {cfg.get('rule')})"
    if owned := owners(name):
        return UsageError(
            f"{who} has no parameter '{name}' (it belongs to {_and(owned)}); this choice has: {', '.join(has)}"
        )
    near = difflib.get_close_matches(name, [*TABLE, *groups()], 1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    return UsageError(f"unknown parameter '{name}'{hint}; {who} has: {', '.join(has)}")


# --- a whole configuration --------------------------------------------------------------------------------------------


def check(name: str, value: Any, table: Mapping[str, Parameter] = TABLE) -> Any:
    """One value in its canonical form. Raises UsageError with the allowed values."""
    try:
        return table[name].read(value)
    except ValueError:
        got = "null" if value is None else _short(value)
        raise UsageError(f"{name} must be {table[name].wanted()} (got {got})") from None


def _short(value: Any) -> str:
    """A value as a message displays it."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to format integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]}..., {len(text)} characters"


def validate(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """A composed, flat configuration, checked and in canonical form and order.

    Raises UsageError for an unknown or missing parameter, a wrong type and a value out of range. `delta=2` and
    `delta=2.0` become the same, so that equal runs have equal hashes.
    """
    for group in PARAMETER_GROUPS:
        if cfg.get(group) not in choices(group):
            raise unknown(group, str(cfg.get(group)), choices(group))
    wanted = parameters_of(cfg)
    for name in cfg:
        if name not in wanted or name not in TABLE:
            raise no_parameter(str(name), cfg)
    if missing := [name for name in wanted if name not in cfg]:
        raise UsageError(f"the configuration lacks {_and(missing)}: give {missing[0]}=...")
    checked = {name: check(name, cfg[name]) for name in wanted}
    check_metrics(checked["metrics"])
    _check_kinds(checked)
    own = default("model", checked["model"], "weights")
    if checked["weights"] not in (own, "random"):
        folder = home.expanded(checked["weights"])
        if not folder.is_dir():
            raise UsageError(f"weights must be {own}, random or an existing folder (there is no folder '{folder}')")
        checked["weights"] = str(folder)
    if given := checked.get("drafter_weights"):
        path = home.expanded(given)
        if not path.exists():
            raise UsageError(
                f"drafter_weights: there is no folder '{path}'; train one with `specbench train drafter=...`"
            )
        checked["drafter_weights"] = str(path)
    return checked


#: Values of `kind:` in the file of a model, drafter, rule or method: discrete tokens, continuous tokens, or either.
TOKEN_KINDS = ("discrete", "continuous", "any")


def kind(group: str, name: str) -> str:
    """One of `TOKEN_KINDS`, from the file of a choice or one that it builds on; discrete if none declares it."""
    held = content(group, name)
    if "kind" not in held:
        inherited = [kind(group, d) for d in held.get("defaults", []) if isinstance(d, str) and d != "_self_"]
        return inherited[0] if inherited else "discrete"
    if held["kind"] not in TOKEN_KINDS:
        raise UsageError(f"conf/{group}/{name}.yaml: kind must be one of {', '.join(TOKEN_KINDS)} (got {held['kind']})")
    return str(held["kind"])


def is_continuous(group: str, name: str) -> bool:
    """Whether a choice is only for models with continuous tokens."""
    return kind(group, name) == "continuous"


def _check_kinds(cfg: Mapping[str, Any]) -> None:
    """UsageError unless drafter and rule fit the model: discrete ones need discrete tokens, continuous ones continuous
    tokens."""
    mine = kind("model", cfg["model"])
    parts = {group: cfg[group] for group in ("drafter", "rule") if kind(group, cfg[group]) != "any"}
    kinds = {kind(group, name) for group, name in parts.items()}
    if kinds <= {mine} and (mine == "discrete" or len(parts) != 1):
        return
    suited = [method for method in choices("method") if kind("method", method) in (mine, "any")]
    shown = " and ".join(f"{group} {name}" for group, name in parts.items())
    does = "do" if len(parts) > 1 else "does"
    raise UsageError(
        f"{cfg['model']} has {mine} tokens, which {shown} {does} not support; use method={', '.join(suited)}"
    )


def single_metrics() -> dict[str, str]:
    """Name -> one-line description of every metric that is not a set of others."""
    return {name: line for name, line in choices("metrics").items() if name in declared("metrics", name)}


def metric_columns(name: str) -> tuple[str, ...]:
    """The columns of a row that a metric fills. UsageError for an unknown name."""
    if name not in single_metrics():
        raise unknown("metric", name, single_metrics())
    return tuple(default("metrics", name, name)["columns"])


def check_metrics(names: Iterable[str]) -> None:
    """UsageError for an unknown name, and for two metrics that fill the same column."""
    filled: dict[str, str] = {}
    for name in names:
        for column in metric_columns(name):
            if filled.setdefault(column, name) != name:
                raise UsageError(
                    f"metrics {filled[column]} and {name} both fill the column {column}; measure them in two runs"
                )


def _and(names: Iterable[str]) -> str:
    *head, last = names
    return f"{', '.join(head)} and {last}" if head else last


def settle(cfg: Mapping[str, Any], given: Iterable[str] = ()) -> dict[str, Any]:
    """A configuration as Hydra composed it -> the flat one that `validate` checks.

    The metrics, one switch per file in conf/metrics, become a list of names, and a protocol its name and version. The
    values that a method's preset sets for a replaced part (`method=cool_sd rule=exact`) are dropped, except the names
    `given` by the user: those stay, and `validate` raises that the run does not have them.
    """
    flat = dict(cfg)
    if isinstance(flat.get("protocol"), Mapping):
        flat["protocol"] = f"{flat['protocol']['name']}@{flat['protocol']['version']}"
    if isinstance(flat.get("metrics"), Mapping):
        flat["metrics"] = [name for name, on in flat["metrics"].items() if on]
    run_names = set(parameters_of(flat)) | set(given)
    preset = declared("method", str(flat.get("method")))
    return {name: value for name, value in flat.items() if name in run_names or name not in preset}
