"""Every column of a row, with its meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbench.config import parameters, plugins
from specbench.config.parameter import ShownColumn

#: A row: column -> value, None if it was not measured. Its columns are `COLUMNS`; a file has its own, see `csv_files`.
Row = Mapping[str, Any]
#: A row, or some of its columns, that its holder may change.
Columns = dict[str, Any]
#: A line of a file of rows, as text.
Cells = Mapping[str, str]

# The order of the metrics' columns. Others that conf/metrics declares follow.
_ORDER = ("fid", "clip_score", "image_reward", "hpsv2", "inception_score", "kid", "precision", "recall")
#: Columns of quality that come from records, not from a metric.
OF_RECORDS = ("perplexity", "emitted_tv", "emitted_kl")

#: Columns of every metric; each also has the columns `_stderr` and `_backend`.
METRICS = tuple(dict.fromkeys((*_ORDER, *OF_RECORDS, *parameters.found_choices().columns)))

#: Statistics of the emitted distribution up to this size, in nats or in probability, are rounding errors of float32:
#: exact methods have 1e-14 and 5e-8.
FLOAT32 = 1e-6

#: Column -> how tables and the report show it, in the report's order. conf/metrics declares the metrics' columns.
SHOWN: dict[str, ShownColumn] = {
    "accepted_length_mean": ShownColumn("Accepted length", "higher", 2),
    "step_compression": ShownColumn("Step compression (×)", "higher", 2),
    "speedup_step": ShownColumn("Steps saved (×)", "higher", 2),
    "speedup_latency": ShownColumn("Speed-up in latency (×)", "higher", 2),
    "speedup_throughput": ShownColumn("Speed-up in throughput (×)", "higher", 2),
    "speedup_expected": ShownColumn("Speed-up by Eq. 35 (×)", "higher", 2),
    "latency_s_mean": ShownColumn("Latency (s)", "lower", 3),
    "images_per_s": ShownColumn("Images/s", "higher", 2),
    "batch_s_p50": ShownColumn("Seconds of a batch, median", "lower", 2),
    "batch_s_p95": ShownColumn("Seconds of a batch, 95th percentile", "lower", 2),
    "acceptance_rate": ShownColumn("Acceptance rate", "higher", 3),
    "draft_acceptance_rate": ShownColumn("Draft acceptance rate", "higher", 3),
    "first_accept": ShownColumn("Acceptance of the first token", "higher", 4),
    "draft_tv": ShownColumn("Total variation of draft and target", "lower", 3),
    "draft_top1": ShownColumn("Top-1 agreement", "higher", 3),
    "draft_top3": ShownColumn("Top-3 agreement", "higher", 3),
    "log_prob_mean": ShownColumn("Log-probability of a token (nats)", "higher", 3, FLOAT32),
    "emitted_kl": ShownColumn("KL(emitted, target) of a token (nats)", "lower", 4, FLOAT32),
    "emitted_tv": ShownColumn("Total variation of emitted and target", "lower", 4, FLOAT32),
    "emitted_kl_reverse": ShownColumn("KL(target, emitted) of a token (nats)", "lower", 4, FLOAT32),
    "emitted_kl_ratio": ShownColumn("KL(emitted, target) / the least possible", "lower", 3),
    "emitted_ratio_max": ShownColumn("Largest emitted / target probability", "lower", 2),
    "perplexity": ShownColumn("Perplexity", "lower", 2),
    **parameters.found_choices().columns,
    "residual_tries": ShownColumn("Tries of a residual", "lower", 2),
    "peak_memory_mib": ShownColumn("Peak memory (MiB)", "lower", 0),
}


IDENTITY = {
    "run_id": "name of the run, unique",
    "time": "when the row was built, UTC",
    "specbench": "version of specbench",
    "commit": "git commit of the code that decoded; ends in -dirty if specbench/ or conf/ had other content",
    "plugins": plugins.MEANING,
    "config_hash": "hash of the configuration, see provenance.config_hash",
    "protocol": "protocol that the run follows, name@version",
}


#: Maximum share of a speed-up by which a change within the run may have moved it, see `timing.steadiness`.
SHIFT_BOUND = 0.05

#: Columns of lists, as JSON.
LISTS = frozenset(
    "acceptance_by_depth accepted_histogram drafted_by_position acceptance_by_step emitted_log_ratio remarks".split()
)
#: The columns of _STATISTICS that hold no number.
_STRINGS = LISTS | {"baseline_run_id", "timing_valid"}
#: Parameters that are not columns: file locations, and parameters that show in the columns that are filled.
_NOT_IN_ROW = frozenset(
    "out data_dir metrics metrics_dir reference baseline workers ray_address log log_project log_dir".split()
)


_LIKELIHOOD = {
    "log_prob_mean": "natural-log probability of a token under the target, with guidance and temperature (1 if it is 0)"
    " but before top-k and top-p, mean over all tokens of all images",
    "log_prob_std": "its standard deviation over all tokens of all images",
    "emitted_kl_reverse": "KL(target || emitted) in nats, mean over all tokens; empty where it is infinite, or known"
    " only by draws of rejected tokens",
    "emitted_kl_optimal": "minimum emitted_kl at the same acceptance at every node, in nats; rule=band reaches it"
    " (docs/band.md); for chains of sampled tokens",
    "emitted_kl_ratio": "emitted_kl / emitted_kl_optimal: 1 is the frontier; empty if both are rounding errors"
    f" ({FLOAT32:g} nats)",
    "emitted_ratio_max": "maximum ratio of an emitted token's probability to the target's at any node, over all tokens"
    " that could have been emitted and all images; empty where it is infinite",
    "emitted_log_ratio": "JSON list over the depths 1, 2, ... of a draft: natural logarithm of that ratio, mean over"
    " images of their means over nodes (the log k of a band). Older rows of trees: see acceptance_rate",
}


_SPEED = {
    "accepted_length_mean": "generated tokens / target forward passes of the decode phase, mean over images",
    "accepted_length_std": "its standard deviation over images",
    "steps": "target forward passes of the decode phase, mean over images",
    "step_compression": "tokens per image / steps",
    "acceptance_rate": "accepted / verified draft tokens of the accepted path and the first rejected one after it, over"
    " all images. A depth of a tree counts once, whichever candidates it has. Rows up to commit 3f95c7a9 also count a"
    " path that ends at a leaf, above the deepest one, as a rejection",
    "draft_acceptance_rate": "accepted / all drafted tokens, including siblings and those below a rejected one",
    "draft_tokens": "draft tokens that the target reads / target forward passes of the decode phase, over all images",
    "acceptance_by_depth": "JSON list over the depths 1, 2, ... of a draft: accepted / verified tokens, where a token"
    " is verified if the depths above it were accepted; empty where steps add tokens in several rows. Older rows: see"
    " acceptance_rate",
    "accepted_histogram": "JSON list: shares of the steps that accepted 0, 1, 2, ... draft tokens, over all images",
    "drafted_by_position": "JSON list over an image's tokens: share of the images in which it was an accepted draft"
    " token; empty where steps add tokens in several rows",
    "acceptance_by_step": "JSON list over the order of generation of the tokens: accepted / verified drafts (continuous"
    " tokens), null if no draft was verified",
    "first_accept": "probability with which the rule keeps a draft's first candidate, mean over all steps with a draft",
    "draft_tv": "total variation between the drafter's and the target's distribution of the next token, mean over the"
    " same steps",
    "draft_top1": "share of the same steps in which the drafter's top-1 next token is the target's top-1",
    "draft_top3": "share of the same steps in which the target's top-1 is in the drafter's top-3, over the steps whose"
    " draft distribution has at least 3 tokens of positive probability; empty without one (temperature 0)."
    " Rows up to commit 3f95c7a9 are over all of the steps",
    "draft_passes": "forward passes of a drafter network in the steps, mean over images; for continuous tokens one per"
    " position of a draft inside the image",
    "residual_tries": "proposals for the token after a rejection, mean over all rejections (continuous tokens)",
    "proposals_mean": "proposals of the target / verified positions, over all images (continuous tokens)",
    "proposals_max": "maximum number of proposals for one token",
    "residual_fallbacks": "rejections after which the proposals did not suffice, over all images",
    "timed_pairs": "pairs of a batch of the method (at batch 1 an image) and the same batch of vanilla AR, decoded one"
    " directly after the other; empty if there are no pairs: not timed, or no baseline",
    "further_pairs": "how many of them decoded the same images again, because the speed-up was not steady",
    "drift": "mean seconds of vanilla AR in the second half of the pairs / in the first, minus 1; a drift of the whole"
    " machine does not change a speed-up",
    "speedup_shift": "share of the speed-up by which a change of one side alone may have moved it, without noise, see"
    " timing.steadiness; part of the standard errors of speedup_latency and speedup_throughput",
    "timing_valid": f"true if at least 4 pairs give a standard error, and speedup_shift is noise or at most"
    f" {SHIFT_BOUND:g}; tables mark the seconds of other rows",
    "draft_cost": "seconds to draft a token / seconds of vanilla AR for one, same batch size (c in CSpD's Eq. 35)",
    "speedup_expected": "CSpD's Eq. 35 from acceptance_rate, gamma and draft_cost; empty for verification=block and"
    " tries > 1, which it does not describe",
    "latency_s_mean": "decode seconds of one image at batch 1, first target forward to last token, mean over images",
    "latency_s_std": "its standard deviation over images",
    "latency_s_p50": "its median",
    "latency_s_p95": "its 95th percentile",
    "batch_s_p50": "decode seconds of a batch, first target forward to the last token of its last image, median over"
    " the timed batches; at batch 1 the latency",
    "batch_s_p95": "its 95th percentile",
    "tokens_per_s": "tokens / decode seconds, over all images",
    "images_per_s": "images / decode seconds, over all images",
    "text_s": "text encoding, seconds per image, not in the latency",
    "pixels_s": "pixel decoding, seconds per image, not in the latency",
    "speedup_latency": "mean latency of vanilla AR / mean latency, over the timed pairs, see timing.speedup",
    "speedup_throughput": "images per second / images per second of vanilla AR, over the timed pairs of batches of the"
    " same size",
    "speedup_step": "mean steps of vanilla AR on the same prompts / mean steps",
    "baseline_run_id": "run that decoded the vanilla AR images",
    "baseline_latency_s": "mean latency of vanilla AR on the same prompts",
    "peak_memory_mib": "peak memory while decoding: device memory on CUDA, otherwise resident memory of the process",
}


#: Columns of `_LIKELIHOOD` and `_SPEED` that are means or ratios over images, and so have a standard error.
_ESTIMATES = frozenset(
    "log_prob_mean accepted_length_mean steps step_compression acceptance_rate draft_acceptance_rate first_accept"
    " draft_tv draft_top1 draft_top3 draft_passes residual_tries proposals_mean latency_s_mean tokens_per_s"
    " images_per_s text_s pixels_s speedup_latency speedup_throughput speedup_step baseline_latency_s"
    " emitted_kl_reverse emitted_kl_optimal emitted_kl_ratio".split()
)


#: Columns of `_SPEED` that a person reads in a file of rows, each with its standard error.
_MAIN_STATISTICS = frozenset(
    name
    for estimate in (
        "accepted_length_mean accepted_length_std steps step_compression acceptance_rate draft_acceptance_rate"
        " draft_tokens timed_pairs timing_valid latency_s_mean latency_s_std latency_s_p50 latency_s_p95 tokens_per_s"
        " images_per_s speedup_latency speedup_throughput speedup_step baseline_run_id peak_memory_mib".split()
    )
    for name in (estimate, f"{estimate.removesuffix('_mean')}_stderr")
)


WHERE = {
    "device": "device that decoded",
    "device_name": "its name",
    "dtype": "number format of the models",
    "engine": "execution of a step",
    "torch": "version of PyTorch",
    "driver": "version of the CUDA driver",
    "python": "version of Python",
    "threads": "CPU threads of PyTorch",
}


def stderr_of(column: str) -> str:
    """The column with the standard error of another column: steps -> steps_stderr, latency_s_mean -> latency_s_stderr
    (next to latency_s_std)."""
    return f"{column.removesuffix('_mean')}_stderr"


def resolved(column: str, value: float) -> float:
    """A value for print: 0 if it is below the column's resolution."""
    return 0.0 if column in SHOWN and abs(value) < SHOWN[column].resolution else value


def _with_errors(lines: Mapping[str, str]) -> dict[str, str]:
    """Columns and their meanings; a column with a standard error is followed by that column."""
    columns: dict[str, str] = {}
    for name, line in lines.items():
        columns[name] = line
        if name in _ESTIMATES:
            columns[stderr_of(name)] = f"standard error of {name} over images, see summary.ratio"
    return columns


def _against_vanilla(metric: str) -> dict[str, str]:
    """Suffix -> meaning of the columns that compare a metric of images with vanilla AR's."""
    return {
        "_difference": f"{metric} minus {metric} of the vanilla AR images of the same prompts",
        "_difference_stderr": f"standard error of {metric}_difference over pairs of images, or over prompts",
    }


_STATISTICS = _with_errors(_LIKELIHOOD) | _with_errors(_SPEED)


#: Meanings in a row, for columns whose parameter or metric has a shorter one.
_OWN_MEANINGS = {
    "weights": "weights that decoded: random, or where they come from and a hash of their content",
    "n": "number of prompts; of images where the column images is empty",
    "prompts": "file of prompts, as given; prompts_hash identifies its content",
    "perplexity": "exp(-log_prob_mean); not a distance: it falls below vanilla's if a method sharpens",
    "emitted_tv": "total variation between the distribution that a token is emitted from and the target's, mean over"
    " all tokens; see decoding.emitted",
    "emitted_kl": "KL divergence between the same distributions in nats, KL(emitted || target), mean over all tokens;"
    " empty if it is infinite (a remark says so)",
    "timing": "whether the seconds were measured; if not, the columns in seconds are empty",
}
#: Every column of a row, in order, with its meaning. The only definition of the format.
COLUMNS: dict[str, str] = {
    **IDENTITY,
    **{k: p.line for k, p in parameters.table().items() if k not in _NOT_IN_ROW | WHERE.keys()},
    "prompts_hash": "hash of the chosen prompts and their ids, in order, see data.prompts_hash",
    "images": "number of images, n times images_per_prompt; their errors are over prompts",
    "resolution": "side of the images in pixels",
    "tokens": "generated tokens per image",
    "degenerate_images": "images of one colour, of few codes, repeated, or equal to another prompt's, see"
    " rows.degenerate",
    **{
        f"{m}{suffix}": line
        for m in METRICS
        for suffix, line in {
            "": f"{SHOWN[m].title}: {SHOWN[m].better} is better",
            "_stderr": f"standard error of {m}",
            "_backend": f"what computed {m}; values of different backends are not comparable",
            **({} if m in OF_RECORDS else _against_vanilla(m)),
        }.items()
    },
    **_STATISTICS,
    **WHERE,
    "remarks": "remarks on the measurement, see rows.remark",
}
COLUMNS |= _OWN_MEANINGS  # the order of the columns does not change


def shared(names: str) -> dict[str, str]:
    """Columns by their names, separated by spaces: those that rows of benchmarks, probes and audits have, too."""
    return {name: COLUMNS[name] for name in names.split()}


#: The further columns of metrics with several columns, whose backend is the first one's.
_FURTHER = frozenset(column for name in parameters.single_metrics() for column in parameters.metric_columns(name)[1:])
_IN_DETAILS = frozenset(
    [name for name in _STATISTICS if name not in (*_MAIN_STATISTICS, *METRICS)]
    + [f"{m}{suffix}" for m in METRICS for suffix in _against_vanilla(m)]
    + [f"{m}_backend" for m in _FURTHER]
    + ["remarks"]
)
#: The columns of a CSV file, and the others, which are in the JSON object of its last column, "details"; in a run's
#: folder they are in details.json.
MAIN = tuple(name for name in COLUMNS if name not in _IN_DETAILS)
DETAILED = tuple(name for name in COLUMNS if name in _IN_DETAILS)
#: Columns that a plug-in's metric may not fill: every row has them already.
TAKEN = frozenset(METRICS) & {*IDENTITY, *_STATISTICS, *WHERE, "prompts_hash", "resolution", "tokens", "remarks"}


#: Columns of seconds, with their spreads: they depend on the machine, and are empty in rows that were not timed.
TIMED_COLUMNS = frozenset(
    name + suffix
    for name in (
        "latency_s_mean latency_s latency_s_p50 latency_s_p95 batch_s_p50 batch_s_p95 tokens_per_s images_per_s text_s"
        " pixels_s draft_cost speedup_latency speedup_throughput speedup_expected baseline_latency_s timed_pairs"
        " further_pairs drift speedup_shift timing_valid".split()
    )
    for suffix in ("", "_stderr", "_std")
).intersection(COLUMNS)
#: Those that say how the seconds were measured.
OF_TIMING = ("timed_pairs", "further_pairs", "drift", "speedup_shift", "timing_valid")
#: Those that compare the seconds of a method with the seconds of vanilla AR.
SPEEDUPS = ("speedup_latency", "speedup_throughput", "speedup_expected")


INTEGERS = frozenset(
    [k for k, p in parameters.table().items() if p.kind == "integer"]
    + "images resolution tokens degenerate_images threads timed_pairs further_pairs proposals_max".split()
    + ["residual_fallbacks"]
).intersection(COLUMNS)
NUMBERS = INTEGERS.union(
    [k for k, p in parameters.table().items() if p.kind == "number"]
    + [m + suffix for m in METRICS for suffix in ("", "_stderr", "_difference", "_difference_stderr")]
    + [k for k in _STATISTICS if k not in _STRINGS]
)
#: Columns of true and false.
FLAGS = frozenset([k for k, p in parameters.table().items() if p.kind == "flag"] + ["timing_valid"]).intersection(
    COLUMNS
)
#: Words that a column of numbers may contain. (In a row, n is always a number.)
WORDS = {k: p.also for k, p in parameters.table().items() if p.also and k != "n"}
