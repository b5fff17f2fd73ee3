"""Every flat parameter of a run: its type, its range and its meaning. Imports neither torch nor Hydra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbench.config.parameter import DEEP as DEEP
from specbench.config.parameter import DRAFT as DRAFT
from specbench.config.parameter import LONGEST as LONGEST
from specbench.config.parameter import PROMPTS as PROMPTS
from specbench.config.parameter import Parameter as Parameter
from specbench.errors import UsageError

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
    "unconditional": Parameter(
        "string",
        "what the guidance's unconditional context is: the image's header alone, or the prompt's last token before it"
        " (prompt_end)",
        choices=("header", "prompt_end"),
    ),
    "method": Parameter("string", "preset of a drafter, a rule and their parameters"),
    "variant": Parameter("string", "version of the method: as printed, as its released code does, or exact"),
    "drafter": Parameter("string", "which tokens are drafted, and from which distribution each was sampled"),
    "rule": Parameter("string", "the probability with which a drafted token is accepted"),
    "verification": Parameter(
        "string",
        "how a draft's nodes are decided together; token is for every rule, the others for exact, block and selected"
        " also for bands",
    ),
    "select": Parameter(
        "number",
        "probability of following the sibling with the largest p/q, not the first; auto: what accepts most",
        low=0,
        high=1,
        also=("auto",),
    ),
    "select_from": Parameter(
        "string",
        "how the siblings that are selected from are sampled: with replacement, or as pairs of two different tokens",
        choices=("replacement", "pair"),
    ),
    "select_grid": Parameter("integer", "select=auto tries 0, 1/select_grid .. 1", low=1, high=1000),
    "window": Parameter(
        "integer",
        "length L of a drafted chain, in tokens; of ZipAR: tokens that a row of the image has when the next one begins",
        low=1,
        high=DRAFT,
    ),
    "first_row": Parameter(
        "string",
        "whether the second row of an image waits for the whole first one (alone), or begins like the others (overlap)",
        choices=("alone", "overlap"),
    ),
    "t_ctx": Parameter("integer", "tokens that a row of the image has when PJD begins the next one", low=1, high=DRAFT),
    "missing": Parameter(
        "string",
        "what a token attends to at positions that are not decoded yet: nothing (masked), or keys of zeros (zero,"
        " ZipAR's code for LlamaGen)",
        choices=("masked", "zero"),
    ),
    "tree": Parameter(
        "tree",
        "shape of a drafted tree: its name, the children of every node by depth (4-2-1), or its paths from the root;"
        " for sjd full or comb",
    ),
    "nodes": Parameter("integer", "draft tokens of a dynamic tree (EAGLE-2's total tokens)", low=1, high=DRAFT),
    "depth": Parameter(
        "integer", "levels of a drafted tree; for sjd with tree=full the root is one of them", low=1, high=DEEP
    ),
    "width": Parameter("integer", "candidates per node of a drafted tree; 1 is a chain", low=1, high=DEEP),
    "interval": Parameter(
        "integer", "one of so many rounds commits a drafted path without verification (VVS)", low=2, high=2**20
    ),
    "ranking": Parameter(
        "string",
        "probabilities that rank the nodes of a dynamic tree: before top-k and top-p (full), or after them (filtered)",
        choices=("full", "filtered"),
    ),
    "init": Parameter(
        "string",
        "how new positions of a Jacobi window are initialised",
        choices=(
            "random",
            "horizontal_repeat",
            "vertical_repeat",
            "horizontal_sample",
            "vertical_sample",
            "horizontal_mode",
        ),
    ),
    "fresh": Parameter(
        "string",
        "distribution of a token that starts at random in a Jacobi window: uniform, or a point mass",
        choices=("uniform", "point"),
    ),
    "stored": Parameter(
        "string",
        "distribution of a token that maximal coupling keeps: this step's (new), or the earlier one (old, SCD's code)",
        choices=("new", "old"),
    ),
    "siblings": Parameter(
        "string",
        "what a window's further candidates are drawn from: the stored distribution, or the residual (SJD-PAC's code)",
        choices=("stored", "residual"),
    ),
    "plain_until": Parameter("integer", "tokens of an image before a Jacobi window's first draft", low=0, high=2**20),
    "opening": Parameter(
        "string",
        "how a model's own Jacobi window begins: at random, or with most probable tokens (SimpleAR)",
        choices=("random", "greedy"),
    ),
    "plain_from": Parameter(
        "integer",
        "tokens of an image from which on a Jacobi window has no draft; negative: counted from the end",
        low=-(2**20),
        high=2**20,
        null="never",
    ),
    "refine": Parameter("flag", "renew the uncommitted positions of a Jacobi window; else they are initialised again"),
    "coupling": Parameter(
        "string",
        "how a Jacobi window's positions are renewed: none (SJD), maximal (adaptive continuation), gumbel, height or"
        " threshold (SJD++)",
        choices=("none", "maximal", "gumbel", "height", "threshold"),
    ),
    "tau": Parameter(
        "number", "ratio p / q above which coupling=threshold keeps a token; a number of our choice", low=0
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
    "tries": Parameter(
        "integer", "drafts of continuous tokens, each tried after the ones before were rejected", low=1, high=16
    ),
    "proposals": Parameter("integer", "most proposals for the continuous token after a rejection", low=1, high=1000),
    "delta": Parameter(
        "number",
        "relaxation budget δ (1 with the uniform rule is exact); LANTERN's bound on the distribution; GSD's on a"
        " difference of probabilities",
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
    "distance": Parameter("number", "GSD's bound on the squared distance of two tokens' input embeddings", low=0),
    "edge": Parameter(
        "string",
        "group of a token with too few less probable ones: those there are (clip), or itself (alone, GSD's code)",
        choices=("clip", "alone"),
    ),
    "epsilon": Parameter("number", "typical acceptance: probability that always suffices", low=0, high=1),
    "alpha": Parameter(
        "number",
        "typical acceptance: share of exp(-entropy) that suffices; segments: share of a run's probability that is"
        " tested",
        low=0,
    ),
    "nu": Parameter("number", "decay ν of the relaxation over draft positions (Cool-SD Eq. 16); 0 is uniform", low=0),
    "schedule": Parameter("string", "how the relaxation decays over positions", choices=("exponential", "linear")),
    "floor": Parameter("number", "least relaxation ω of any position; 0 is the paper's schedule", low=0),
    "strength": Parameter(
        "number", "relaxation of a band: log(high / low) of the last draft position; 0 is exact", low=0, high=1000
    ),
    "decay": Parameter(
        "numbers",
        "how fast a band's relaxation falls over draft positions: about first_accept; a list: by position",
        low=0,
        high=0.999,
    ),
    "pivot": Parameter(
        "number", "entropy-aware acceptance: entropy E at which the mean threshold on p/q is 0.5", low=0, above=True
    ),
    "calm": Parameter(
        "number", "entropy-aware acceptance: entropy at which the threshold is no longer random", low=0, above=True
    ),
    "budget": Parameter("number", "KL(emitted | target) that mentored decoding allows at a node; 0 is exact", low=0),
    "resample": Parameter(
        "string",
        "distribution sampled from after a rejection: Cool-SD Eq. 10 (optimal) or Eq. 11 (vanilla), LANTERN's paper or"
        " released code (released_p: on Lumina-mGPT), or the target's own (target)",
        choices=("optimal", "vanilla", "paper", "released", "released_p", "target"),
    ),
    "temperature": Parameter("number", "softmax temperature; 0 is greedy", low=0),
    "top_k": Parameter("integer", "keep the k most probable tokens", low=1, high=2**31 - 1, null="off"),
    "top_p": Parameter("number", "keep the smallest set of tokens of this mass; 1 is off", low=0, above=True, high=1),
    "entropy_temperature": Parameter(
        "numbers",
        "[a,b,c]: the temperature is temperature (a exp(-e/b) + c), e the distribution's entropy in nats after top-k"
        " and top-p; [2.5,3,0.6] in the code for LlamaGen",
        low=0,
        above=True,
        null="the same at every entropy",
        count=3,
    ),
    "top_n_sigma": Parameter(
        "number",
        "keep the tokens whose logit is at most so many sigma below the largest, sigma the root mean square of what"
        " top-k and top-p leave (Lumina-mGPT 2's Jacobi mode: 1)",
        low=0,
        above=True,
        null="off",
    ),
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
        "path",
        "folder of a drafter's weights, as `specbench train` writes it, or embedded:NAME (`specbench list drafters`)",
        null="those next to the target's",
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
        "random streams are keyed by (seed, prompt index, image of the prompt); chooses the subset of prompts",
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
    "images_per_prompt": Parameter(
        "integer",
        "images of each prompt; the first is that of a run with one, and no image depends on how many there are",
        low=1,
        high=1000,
    ),
    "batch": Parameter("integer", "images decoded together; latency is measured at 1 only", low=1, high=4096),
    "device": Parameter("string", "auto, cpu, cuda or cuda:N", pattern=r"auto|cpu|mps|cuda(:\d+)?"),
    "dtype": Parameter("string", "number format of the models", choices=("float32", "bfloat16", "float16")),
    "engine": Parameter("string", "execution of a step, or http: a server decodes"),
    "url": Parameter("string", "the server's address, http://HOST:PORT or https://HOST", pattern=r"https?://[^\s/].*"),
    "model_name": Parameter("string", "the served model, as the server names it", null="the server's only one"),
    "server": Parameter(
        "string", "the serving engine and its version, such as 'vllm-omni 0.16'", null="what the server says"
    ),
    "concurrency": Parameter(
        "integer", "most requests at a time", low=1, high=1024, null="1; with request_rate no limit of its own"
    ),
    "request_rate": Parameter(
        "number",
        "requests that arrive per second, at random times (Poisson)",
        low=0,
        above=True,
        null="as fast as concurrency allows",
    ),
    "latency_bound": Parameter(
        "number",
        "latency of a request that counts as good (goodput)",
        low=0,
        above=True,
        null="goodput is not measured",
    ),
    "timeout": Parameter("number", "longest wait for an answer", low=0, above=True, high=86400),
    "retries": Parameter("integer", "further attempts after a failed request, with growing waits", low=0, high=100),
    "image_size": Parameter(
        "string", "size of the images, WIDTHxHEIGHT", pattern=r"[1-9]\d{0,4}x[1-9]\d{0,4}", null="the server's own"
    ),
    "extra_body": Parameter("fields", "further fields of every request; a field that is null is left out", null="none"),
    "metrics": Parameter("names", "quality metrics to compute"),
    "metrics_dir": Parameter(
        "path", "folder of the evaluators' weights, one subfolder each", null="where `specbench fetch` puts them"
    ),
    "reference": Parameter(
        "path",
        "statistics of real images, .npz, or the data set that `specbench reference` made them for",
        null="what `specbench reference` made for the data set",
    ),
    "baseline": Parameter("flag", "also decode the same prompts with vanilla AR, for the speed-up"),
    "warmup": Parameter("integer", "untimed decodes before the first timed one", low=0, high=1000),
    "timing": Parameter(
        "flag",
        "measure seconds, method and vanilla AR alternating; false leaves the columns in seconds empty",
        null="true where one process decodes one image at a time",
    ),
    "emitted_draws": Parameter(
        "integer",
        "draws of the tokens rejected at a node, for emitted_tv and emitted_kl where they are not exact (discrete"
        " tokens); an even number, 0: neither is measured",
        low=0,
        high=1024,
    ),
    "workers": Parameter(
        "integer",
        "decoding processes: one per GPU, or of one thread each on a CPU; more than one need Ray",
        low=1,
        high=1024,
    ),
    "ray_address": Parameter("string", "a Ray cluster whose machines decode", null="this machine"),
    "log": Parameter("string", "experiment tracker that also gets the row"),
    "log_project": Parameter("string", "project (wandb) or experiment (mlflow) of the tracker"),
    "log_dir": Parameter("path", "folder of event files, one subfolder a run", null="tensorboard/ in the run's folder"),
    "out": Parameter("path", "folder of the run", null="a new folder under runs/"),
}

#: The parameters that plug-ins do not add.
BUILT_IN = frozenset(TABLE)

#: Parameter -> its unit; the others have none.
UNITS = {
    "size": "pixels",
    "prompt_length": "tokens",
    "window": "tokens",
    "t_ctx": "tokens",
    "plain_until": "tokens",
    "plain_from": "tokens",
    "nodes": "tokens",
    "interval": "rounds",
    "depth": "levels",
    "width": "tokens",
    "gamma": "tokens",
    "pivot": "nats",
    "calm": "nats",
    "budget": "nats",
    "prefill": "of the image",
    "tries": "drafts",
    "k": "codes",
    "group": "codes",
    "top_k": "tokens",
    "iterations": "passes",
    "diffusion_steps": "steps",
    "n": "prompts",
    "images_per_prompt": "images",
    "batch": "images",
    "warmup": "images",
    "emitted_draws": "draws",
    "workers": "processes",
    "concurrency": "requests",
    "request_rate": "requests/s",
    "latency_bound": "s",
    "timeout": "s",
    "retries": "attempts",
}


def check_value(name: str, value: Any, table: Mapping[str, Parameter] = TABLE) -> Any:
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
