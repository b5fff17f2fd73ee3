"""The row of a run, a pure function of its configuration, records and scores; and the printed report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specbench import data
from specbench.config import parameters, protocols, variants
from specbench.config.run_config import RunConfig
from specbench.errors import UsageError
from specbench.harness import sheet
from specbench.harness.served import row as served
from specbench.rows import indices, provenance, summary, timing
from specbench.rows.columns import COLUMNS, DRIFT_BOUND, METRICS, stderr_of
from specbench.rows.journal import Journal, Record
from specbench.rows.memory import RunMemory
from specbench.rows.scores import ScoreLine, score_columns


def row(
    config: RunConfig,
    memory: RunMemory,
    records: Sequence[Record],
    baseline: Sequence[Record] | None,
    scores: Iterable[ScoreLine],
) -> dict[str, Any]:
    """The row (`COLUMNS`) of a run. It depends on nothing but its arguments: no file, no clock.

    Args:
        memory: the run's id, and the processes that decoded the records.
        records: of the images of the first n prompts, in order.
        baseline: of vanilla AR on the same prompts; None where the run has no baseline.
        scores: a line for each metric and, with a baseline, one for its difference from it.

    Raises UsageError if `memory` lacks a process of the records.
    """
    scores = list(scores)
    reference = records if config.is_vanilla else baseline
    used = {record.session for record in [*records, *(reference or [])]}
    if unknown := sorted(used - memory.sessions.keys()):
        raise UsageError(f"run.json lacks the process {unknown[0]:.40} of its records; restore the file")
    sessions = {name: session for name, session in memory.sessions.items() if name in used}
    last = sessions[max(sessions, key=lambda name: str(sessions[name].get("started")))]
    found: dict[str, Any] = dict.fromkeys(COLUMNS)
    found |= {name: value for name, value in config.items() if name in COLUMNS}
    found |= {name: value for name, value in last.items() if name in COLUMNS}
    found |= {"run_id": memory.run_id, "config_hash": provenance.config_hash(config)}
    found["time"] = _newest([*records, *(reference or [])], scores)
    found["plugins"] = _plugins(last, scores)
    found["prompts_hash"], found["images"] = data.prompts_hash(records), len(records)
    found |= score_columns(scores)
    if config.is_served:
        found |= served.columns(config, records)
        remarks = served.remarks(config, sessions, found, records)
    else:
        found |= _measured(config, found, records, reference, memory.run_id)
        remarks = _remarks(config, sessions, found) + emitted_remarks(config, records)
    if memory.smallest_batch:
        remarks.append(f"for want of memory some images were decoded in batches of {memory.smallest_batch}")
    found["note"] = "; ".join([*remarks, *notes(scores)])
    return found


def notes(scores: Iterable[ScoreLine]) -> list[str]:
    """What scores say about how to read them, in the order of the columns."""
    found = {name: one.note for line in scores for name, one in line.columns.items() if one.note}
    return [f"{name}: {found[name]}" for name in METRICS if name in found]


def _newest(records: Sequence[Record], scores: Sequence[ScoreLine]) -> str:
    """When the newest of the records and scores was made, in the form of `provenance.utc`."""
    done = datetime.fromtimestamp(max(record.done for record in records), UTC).isoformat(timespec="seconds")
    return max([done, *(line.time for line in scores)])


def against(run: Path, vanilla: Path, n: int) -> dict[str, Any]:
    """The columns of a row against the vanilla AR images that another run decoded, over the first n prompts: those that
    need no seconds, since the two runs did not alternate. UsageError where the other run had other prompts."""
    mine, theirs = (Journal(folder / "records.jsonl").first(n) for folder in (run, vanilla))
    if [(r.index, r.prompt, r.id) for r in mine] != [(r.index, r.prompt, r.id) for r in theirs]:
        raise UsageError(f"{run} and {vanilla} have different prompts; remove one of the folders")
    found = summary.versus(mine, theirs)
    kept = {name: found[name] for name in ("speedup_step", stderr_of("speedup_step"))}
    return {**kept, "baseline_run_id": RunMemory.read(vanilla / "run.json").run_id}


def _measured(
    config: RunConfig,
    row: Mapping[str, Any],
    mine: Sequence[Record],
    reference: Sequence[Record] | None,
    run_id: str,
) -> dict[str, Any]:
    """The columns of images that this process decoded, and of their baseline; row: what they were decoded by."""
    found: dict[str, Any] = {"timing": timing.was_timed([*mine, *(reference or [])])}
    found |= summary.speed(mine) | summary.columns(mine)
    if found.get("perplexity") is not None:
        # as of `Sampling.unfiltered`
        temperature = 1 if row.get("entropy_temperature") is not None else row["temperature"] or 1
        found["perplexity_backend"] = _conditions(row) + f", temperature {temperature:g}"
    for name in ("emitted_tv", "emitted_kl"):
        if found.get(name) is not None:
            found[f"{name}_backend"] = _conditions(row) + _sampling(row)
    if reference:
        found |= summary.versus(mine, reference)
        if "gamma" in config:
            found |= summary.expected_speedup(mine, reference, config["gamma"])
        found["baseline_run_id"] = run_id + ("" if config.is_vanilla else "/baseline")
    return found


def _plugins(session: Mapping[str, Any], scores: Iterable[ScoreLine]) -> str | None:
    """The plug-ins that decoded in a process, and those that scored."""
    decoded = str(session.get("plugins") or "").split("; ")
    return "; ".join(sorted({*decoded, *(label for line in scores for label in line.plugins)} - {""})) or None


def _conditions(row: Mapping[str, Any]) -> str:
    """What a row's likelihoods are measured by: "target:llamagen_scenes@1a2b3c4d, cfg_scale 3"."""
    digest = row["weights"].rpartition(":")[2].partition("+")[0]  # the target's; see registry.weights_label
    return f"target:{row['model']}@{digest}, cfg_scale {row['cfg_scale']:g}"


def _sampling(row: Mapping[str, Any]) -> str:
    """How the target is sampled: ", temperature 1, top_k 100"."""
    given = (("temperature", None), ("top_k", None), ("top_p", 1), ("top_n_sigma", None))
    curve = row.get("entropy_temperature")
    told = f", entropy_temperature {curve}" if curve is not None else ""
    return "".join(f", {name} {row[name]:g}" for name, off in given if row.get(name) not in (None, off)) + told


def emitted_remarks(cfg: Mapping[str, Any], images: Sequence[Record]) -> list[str]:
    """Why a row lacks emitted_tv or emitted_kl."""
    if images[0].drafts is not None or not cfg["emitted_draws"]:
        return []
    outside = [r.emitted_outside for r in images if r.emitted_outside is not None]
    if not outside:
        way = cfg.get("verification", "token")
        what = f"rule {cfg['rule']} on trees of sampled tokens" if way == "token" else f"verification={way}"
        not_drawn = {"stored": "old", "siblings": "residual", "coupling": "threshold", "opening": "greedy"}
        if any(cfg.get(name) == value for name, value in not_drawn.items()):
            what = "tokens that were not drawn from their stored distribution"
        if cfg.get("drafter") == "vvs":
            what = "tokens that are not verified"
        if _leaves_raster_order(cfg):
            what = f"drafter {cfg['drafter']}, whose tokens are not sampled in raster order"
        return [f"emitted_kl: like emitted_tv not computed for {what}"]
    if len(outside) < len(images):
        return [f"emitted_kl: not recorded of {len(images) - len(outside)} images, which an earlier process decoded"]
    share = sum(outside) / len(outside)
    return [f"emitted_kl: infinite, as the target never gives {share:.2g} of the emitted tokens"] * (share > 0)


def _remarks(cfg: Mapping[str, Any], sessions: Mapping[str, Mapping[str, Any]], row: Mapping[str, Any]) -> list[str]:
    """Remarks on how a row was measured."""
    remarks, timed = protocols.remarks(cfg), row["timing"]
    if other := variants.departures(cfg):
        remarks.append(f"departs from variant {cfg['variant']}: {', '.join(other)}")
    if _leaves_raster_order(cfg):
        remarks.append("perplexity, log_prob: of each token given those that existed when it was sampled")
    if cfg["batch"] > 1:
        remarks.append(f"decoded in batches of {cfg['batch']}: a latency is measured at batch 1 only")
    if timing.is_timed(cfg) and not timed:
        remarks.append("some images were decoded without timing: a run in another folder measures seconds")
    elif timed and row["baseline_run_id"]:
        paired, batches = row["timed_pairs"] or 0, -(-cfg["n"] * indices.images_per_prompt(cfg) // cfg["batch"])
        if paired < batches:
            what = "images" if cfg["batch"] == 1 else "batches"
            remarks.append(
                f"{batches - paired} of {batches} {what} were not decoded next to their baseline: they do not count in"
                " speed-ups in seconds"
            )
    if row["drift"] is not None and abs(row["drift"]) > DRIFT_BOUND:
        remarks.append(f"vanilla's latency drifted by {row['drift']:+.0%}, beyond {DRIFT_BOUND:.0%}: measure again")
    num_workers = max(session.get("workers", 1) for session in sessions.values())
    if num_workers > 1:
        remarks.append(f"decoded by {num_workers} workers: no seconds are measured")
    if len(sessions) > 1:
        remarks.append(f"decoded in {len(sessions)} processes" + (": their timings are mixed" if timed else ""))
        for name in ("commit", "plugins", "device_name", "torch"):
            if len({str(session.get(name)) for session in sessions.values()}) > 1:
                remarks.append(f"the processes differ in {name.replace('_', ' ')}, the last one's is given")
    return remarks


def _leaves_raster_order(cfg: Mapping[str, Any]) -> bool:
    return parameters.default("drafter", cfg["drafter"], "raster") is False


def describe(cfg: Mapping[str, Any]) -> str:
    """A method as text: "cool_sd (drafter eagle_tree, rule cool, delta 1.1)"."""
    if parameters.is_served(cfg):
        return served.describe(cfg)
    parts = [f"variant {cfg['variant']}"] if "variant" in cfg else []
    parts += [f"drafter {cfg['drafter']}", f"rule {cfg['rule']}"]
    if (way := cfg.get("verification", "token")) != "token":
        parts.append(f"verification {way}")
    parts += [
        f"{name} {cfg[name]:g}" for name in ("window", "delta", "strength", "budget") if cfg.get(name) is not None
    ]
    return f"{cfg['method']} ({', '.join(parts)})"


def title(row: Mapping[str, Any], config: RunConfig) -> str:
    """The title of a run's contact sheet."""
    shown = min(config.n, max(sheet.LIMIT // config.images_per_prompt, 1)) * config.images_per_prompt
    part = "" if shown == config.images else f", first {shown}"
    length = "" if config.is_served else f", {row['accepted_length_mean']:.2f} tokens a step"
    return f"{row['model']}: {describe(config)}{length} ({config.images} images{part})"


def report(row: Mapping[str, Any], cfg: Mapping[str, Any]) -> str:
    """The key values of a row as text, with their standard errors over images."""

    def value(name: str, unit: str = "", digits: int = 2) -> str:
        if row.get(name) is None:
            return "not measured"
        return summary.with_error(row[name], row.get(stderr_of(name)), digits) + unit

    lines = served.report_lines(row, value) if parameters.is_served(cfg) else _speed_lines(row, value)
    for name in (column for metric in cfg["metrics"] for column in parameters.metric_columns(metric)):
        backend = f"  [{row[f'{name}_backend']}]" if row.get(f"{name}_backend") else ""
        lines.append((name, value(name, digits=4) + backend))
        if row.get(f"{name}_difference") is not None:
            lines.append(("", _against_vanilla(row, name)))
    if row.get("note"):
        lines.append(("note", str(row["note"])))
    source = "/".join(filter(None, [row["data"], row["split"]]))
    where = row["device_name"] or row["server"] or "an unnamed server"
    each = indices.images_per_prompt(cfg)
    count = f"n={row['n']}" + (f" with {each} images each" if each > 1 else "")
    head = f"{row['model']}: {describe(cfg)}, {source}, {count}, {where} (± standard error)"
    return "\n".join([head, *(f"  {name:<16} {text}" for name, text in lines)])


def _against_vanilla(row: Mapping[str, Any], name: str) -> str:
    """Vanilla AR's value of a metric, and the difference from it with its 95 % interval over prompts."""
    difference, stderr = row[f"{name}_difference"], row[f"{name}_difference_stderr"]
    text = f"vanilla {row[name] - difference:.4f}, difference {difference:+.4f}"
    if stderr is None:
        return f"{text} (its error is not known)"
    from scipy.special import stdtrit

    half = float(stdtrit(row["n"] - 1, 0.975)) * stderr
    return f"{text} (95 % interval {difference - half:+.4f} to {difference + half:+.4f})"


def _speed_lines(row: Mapping[str, Any], value: Callable[..., str]) -> list[tuple[str, str]]:
    """Name -> text of the speed and the likelihood in a row; value: as in `report`."""
    lines = [
        ("accepted length", value("accepted_length_mean", " tokens a step")),
        ("acceptance rate", f"{value('acceptance_rate')}, of the first draft token {value('first_accept')}"),
        ("perplexity", f"{value('perplexity')}, drafts' total variation {value('draft_tv', digits=3)}"),
        (
            "emitted",
            f"KL to the target {value('emitted_kl', ' nats', 4)}, TV {value('emitted_tv', digits=4)} (a token)",
        ),
        ("latency", value("latency_s_mean", " s an image", 3)),
        ("throughput", value("tokens_per_s", " tokens/s", 1)),
        ("speed-up", f"{value('speedup_latency', 'x')} in latency, {value('speedup_step', 'x')} in steps"),
    ]
    if row.get("drift") is not None:
        limits = f"the limits are {DRIFT_BOUND:.0%} and 4 pairs"
        holds = "holds" if str(row["timing_valid"]).lower() == "true" else f"does not hold ({limits})"
        lines.append(("drift", f"{row['drift']:+.1%} over {row['timed_pairs']} pairs with vanilla: the timing {holds}"))
    return lines
