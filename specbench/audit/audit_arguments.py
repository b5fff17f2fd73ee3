"""The arguments of an audit, and the columns of its rows. Imports no torch."""

from __future__ import annotations

from specbench.audit import model_recipes
from specbench.audit.levels import DOUBT, FURTHER, LEVEL, MARGIN, ROUNDING
from specbench.config.parameter import Parameter
from specbench.rows.columns import shared

SAMPLES, FEWEST, MOST = 200_000, 1000, 10_000_000
SLOWER = 4  # a row of a real model has 1 / SLOWER of the samples
VERIFIER_SAMPLES = 30_000  # per row: Python calls a verifier once per step of a sequence
WORTHWHILE = 1_000_000  # sequences from which on several processes are started
MOST_WORKERS = 256

#: The arguments that only an audit has.
ARGUMENTS = {
    "audit.samples": Parameter(
        "integer",
        f"sequences to decode per row (default: {SAMPLES}; {FEWEST} to {MOST}); for a real model 1/{SLOWER} of them,"
        " unless audit.model names it",
        FEWEST,
        MOST,
    ),
    "audit.margin": Parameter("number", f"the largest distance that counts as lossless (default: {MARGIN})", 0, 1),
    "audit.seed": Parameter("integer", "seed of the random streams and of the noise floor (default: 0)", 0, 2**53),
    "audit.workers": Parameter(
        "integer",
        "processes; the rows do not depend on their number (default: one per core, or 1 for an audit of fewer than"
        f" {WORTHWHILE} sequences)",
        1,
        MOST_WORKERS,
    ),
    "audit.device": Parameter(
        "string",
        "cpu (default), cuda or cuda:N; CUDA uses the fused kernels of engine=triton",
        pattern=r"cpu|cuda(:\d+)?",
    ),
    "audit.model": Parameter(
        "string",
        f"one built-in model (default: every model that suits the method): {', '.join(model_recipes.TABLES)};"
        f" of real classes {', '.join(model_recipes.TINY)}; of continuous tokens {', '.join(model_recipes.DENSITIES)}",
    ),
    "audit.tables": Parameter(
        "path",
        "your own .npz file: p0 .. p{T-1} (target), q0 .. q{T-1} (draft), pt of shape (V**t, V): the"
        " distribution of token t given the prefix, coded in base V, first token most significant; codebook (V, d) for"
        " rules that need it",
    ),
    "verifier": Parameter(
        "string",
        "FILE.py:FUNCTION or MODULE:FUNCTION: a verifier of another engine, which replaces rule and verification, on"
        f" chains or trees of the draft tables ({VERIFIER_SAMPLES} sequences per row, unless audit.samples= is given)",
    ),
    "sampler": Parameter(
        "string", "with verifier=: FILE.py:FUNCTION, which draws each draft token: sampler(q, rng) -> token"
    ),
    "records": Parameter(
        "path",
        "a .npz or .parquet file of recorded decisions of any engine: p (N, V), emitted (N,) and, if known, q (N, V)"
        " and drafted (N,), -1 without a draft; are the emitted tokens samples of p?",
    ),
    "out": Parameter("path", "a .csv file for the rows; it is rewritten atomically after every row"),
}

#: The meaning of every column, in order: first the main columns, then those that further identify a row.
COLUMNS = {
    "method": "the preset",
    "V": "tokens of the vocabulary",
    "T": "tokens of a sequence",
    "samples": "decoded sequences",
    "tv": "total variation between the sampled sequences and the target's exact distribution; for Markov\n"
    "models (m..) the largest over n-grams at every position",
    "tv_low": "lower end of the 95 % confidence interval of the method's true total variation; for records\n"
    "of its mean over lines, which has no upper end",
    "tv_high": "its upper end",
    "tv_noise": "the noise floor: tv of as many samples of a plain sampler",
    "p_value": "goodness of fit, Bonferroni; 0 is below float64's range. Discrete tokens: chi-square over the first\n"
    "1, 2 .. tokens, or over n-grams; continuous tokens: two-sample Kolmogorov-Smirnov over tokens, sums,\n"
    "products, projections; records: chi-square of probability integral transforms, of their pairs, and of tokens",
    "tv_bound": "Cool-SD's Theorem 2 summed over all rounds; for chains sampled from the draft tables",
    "accepted_length": "draft tokens of the first draft that were accepted inside the sequence, plus one; mean",
    "accepted_length_expected": "its expectation by Theorem 2; for chains sampled from the draft tables",
    "verdict": "not lossless: refuted by p_value, tv_exact or emitted_tv; not refuted: tv_high (ks_high for\n"
    "continuous tokens) is at most margin, p_value is not small, and every part in exercised occurred; lossless:\n"
    "the same, and tv_exact or emitted_tv is known and not above rounding; undecided: neither",
    "model": "tables, built-in or from a file, or a built-in model of continuous tokens, or records",
    "accepted_length_low": "lower end of the 95 % confidence interval of accepted_length",
    "accepted_length_high": "its upper end",
    "tokens_per_step": "T / target forward passes of a sequence, mean over sequences (not T / mean passes)",
    "tv_exact": "the method's true total variation, enumerated; for chains sampled from the draft tables",
    "tv_unbiased": "the sampled tv_exact: the share of the decoded sequences that the enumerated method gives more\n"
    "often than the target, minus the target's share; tv itself is biased upwards, by up to tv_noise",
    "kl_exact": "KL(method || target) of whole sequences, in nats, enumerated; for the same chains",
    "kl_bound": "an upper bound of kl_exact: the sum over positions of the mean of log(largest emitted probability /\n"
    "target's); for the same chains",
    "p_enumerated": "goodness of fit of the decoded sequences to the enumerated method, lossless or not; for the\n"
    "same chains",
    "emitted_tv": "the largest total variation, enumerated, between the distribution that the rule emits at a node\n"
    "and the target's, over the visited nodes; for token-wise verification of drafts that were drawn as reported.\n"
    f"Rounding in float32 is below {ROUNDING:g}",
    "emitted_kl_sum": "KL(emitted || target) at the nodes, in nats: the sum over a sequence, mean over sequences.\n"
    "It is an upper bound of KL(method || target)",
    "kl": "KL(method || target) of whole sequences, in nats: of the counts of the decoded sequences, without the bias\n"
    "of first order; about 0 for lossless methods",
    "drafter": "the drafter; if it needs a network, the model's drafter replaces it",
    "rule": "the acceptance rule",
    "variant": "the version of the method (docs/methods.md)",
    "parameters": "the flat parameters of drafter, rule and sampling",
    "seed": "audit.seed: random streams are keyed by (seed, sequence)",
    **shared("specbench commit"),
    "margin": "audit.margin: the largest distance that counts as lossless",
    "same_as": "the method (and variant) whose measurement this row repeats: on tables both have the same drafts",
    **shared("plugins"),
    "ks": "continuous tokens only, like all columns up to fallbacks: the largest Kolmogorov-Smirnov distance between\n"
    "the decoded sequences and as many sampled by the target alone; for records the same between the probability\n"
    "integral transforms and the uniform distribution, at twentieths",
    "ks_noise": "the noise floor: the same between two sets sampled by the target alone",
    "ks_high": "upper end of the 95 % confidence interval of ks's true value",
    "energy": "energy distance between the decoded sequences and the target's, estimated without bias\n"
    "from the first 4,000 of each",
    "energy_noise": "standard deviation of energy if both sets are the target's",
    "dim": "numbers of a token",
    "acceptance_rate": "accepted / verified draft tokens",
    "proposals": "proposals for a token sampled after a rejection, mean",
    "proposals_max": "the most proposals for one token",
    "fallbacks": "tokens sampled after a rejection for which proposals= did not suffice",
    "exercised": "how often each part of the method was used: draft tokens rejected at each depth, bonus tokens,\n"
    "and parts that the drafter reports, such as refills of a window",
    "p_first": f"p_value of the first sequences, if it was from {LEVEL:g} to below {DOUBT:g}; the row then describes\n"
    f"{FURTHER} times as many new sequences",
    "device": "name of the processor that decoded the sequences; a CUDA device uses the fused kernels",
    "acceptance_expected": "records= only, like all columns below: mean of sum min(p, q), the share of drafted tokens\n"
    "that the exact rule accepts with one draft token per position",
    "p_acceptance": "p-value of the difference between it and acceptance_rate; it decides nothing about losslessness",
    "p_drafted": "goodness of fit of the drafted tokens as samples of q",
}
