"""A run's report in words, from its row: on the screen, in a notebook, and on top of the contact sheet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specbench.config import parameters
from specbench.config.run_config import RunConfig
from specbench.rows import summary
from specbench.rows.columns import SHIFT_BOUND, stderr_of
from specbench.rows.differences import differences, several
from specbench.rows.journal import Record
from specbench.rows.shown import shown, unsteady

_LEAST = 0.05  # seconds of a part of a start that is named, shown as 0.1


def describe(cfg: Mapping[str, Any]) -> str:
    """How the images were made: "cool_sd (drafter eagle_tree, rule cool, delta 1.1)" or, by a server, "served (4
    requests at a time)"."""
    if parameters.is_served(cfg):
        limit = cfg["concurrency"]
        if cfg["request_rate"] is None:
            return f"served ({limit or 1} request{'s' * (limit not in (None, 1))} at a time)"
        return f"served ({cfg['request_rate']:g} requests/s" + (f", at most {limit} at a time)" if limit else ")")
    parts = [f"variant {cfg['variant']}"] if "variant" in cfg else []
    parts += [f"drafter {cfg['drafter']}", f"rule {cfg['rule']}"]
    if (way := cfg.get("verification", "token")) != "token":
        parts.append(f"verification {way}")
    parts += [
        f"{name} {cfg[name]:g}" for name in ("window", "delta", "strength", "budget") if cfg.get(name) is not None
    ]
    return f"{cfg['method']} ({', '.join(parts)})"


def title(row: Mapping[str, Any], config: RunConfig, prompts: int) -> str:
    """The title of a contact sheet that shows the first `prompts` prompts of a run."""
    images = prompts * config.images_per_prompt
    part = "" if images == row["images"] else f", first {images}"
    length = "" if config.is_served else f", {row['accepted_length_mean']:.2f} tokens a step"
    return f"{row['model']}: {describe(config)}{length} ({row['images']} images{part})"


def quality(row: Mapping[str, Any], cfg: Mapping[str, Any]) -> list[str]:
    """What a contact sheet says about each metric's difference from vanilla AR."""
    found = differences(shown(row), _columns(cfg))
    lines = [f"{one.column} {one.value:.4f}, {'; '.join(one.sentences())}" for one in found]
    return [*lines, *filter(None, [several(found)])]


def report(row: Mapping[str, Any], cfg: Mapping[str, Any]) -> str:
    """The key values of a row that may be shown as text, with their standard errors over images."""

    def value(name: str, unit: str = "", digits: int = 2) -> str:
        if row.get(name) is None:
            return "not measured" if measured.get(name) is None else "not shown"
        return summary.with_error(row[name], row.get(stderr_of(name)), digits) + unit

    measured, row = row, shown(row)
    lines = _served_lines(row, value) if parameters.is_served(cfg) else _speed_lines(row, value)
    against_vanilla = {one.column: one for one in differences(row, _columns(cfg))}
    for name in _columns(cfg):
        backend = f"  [{row[f'{name}_backend']}]" if row.get(f"{name}_backend") else ""
        lines.append((name, value(name, digits=4) + backend))
        if name in against_vanilla:
            lines += [("", sentence) for sentence in against_vanilla[name].sentences()]
    lines += [("tests", several(against_vanilla.values())), ("note", str(row.get("note") or ""))]
    source = "/".join(filter(None, [row["data"], row["split"]]))
    where = row["device_name"] or row["server"] or "an unnamed server"
    each = cfg.get("images_per_prompt") or 1
    count = (
        f"n={row['n']}"
        + (f" (shard {row['shard']})" if row.get("shard") else "")
        + (f" with {each} images each" if each > 1 else "")
    )
    head = f"{row['model']}: {describe(cfg)}, {source}, {count}, {where} (± standard error)"
    return "\n".join([head, *(line(name, text) for name, text in lines if text)])


def line(name: str, text: str) -> str:
    """A line of the report."""
    return f"  {name:<16} {text}"


def _columns(cfg: Mapping[str, Any]) -> list[str]:
    return [column for metric in cfg["metrics"] for column in parameters.metric_columns(metric)]


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
        ("cost of a step", why_slower(row)),
    ]
    if row.get("timed_pairs"):
        further = f" ({row['further_pairs']} measured again)" if row["further_pairs"] else ""
        steady = "does not hold" if unsteady(row) else "holds"
        holds = "too few for a standard error" if row["speedup_throughput_stderr"] is None else steady
        count = f"{row['timed_pairs']} pair{'s' if row['timed_pairs'] != 1 else ''}"
        lines.append(("timing", f"over {count} with vanilla{further}: {holds}"))
    return lines


def step_cost(row: Mapping[str, Any]) -> float | None:
    """Seconds of a step, drafting included, over those of vanilla AR's, a pass over one token: the
    speed-up in steps (over all images) over that in seconds (over the timed pairs). None where a speed-up is absent.
    row: see `shown`."""
    saved, faster = row.get("speedup_step"), row.get("speedup_throughput")
    return saved / faster if saved and faster else None


def why_slower(row: Mapping[str, Any]) -> str:
    """Why more steps are saved than seconds, and what the same steps could give. Empty where that is not so: where no
    steps are saved, and where a step takes as long as vanilla's to within `SHIFT_BOUND`. row: see `shown`."""
    cost, saved = step_cost(row), row.get("speedup_step")
    if cost is None or saved is None or saved <= 1 or cost <= 1 + SHIFT_BOUND:
        return ""
    parts, extra = [], "verification"
    if row.get("draft_passes"):
        passes = row["draft_passes"] / row["steps"]
        parts.append(f"{passes:.3g} pass{'es' * (passes != 1)} of the drafter")
        if row.get("draft_cost"):
            parts[0] += f" ({row['draft_cost']:.2f}x vanilla's time for a token each)"
        extra = "drafting and verification"
    parts += [f"a target pass over {row['draft_tokens'] + 1:.3g} tokens"] if row.get("draft_tokens") else []
    made_of = f" ({', '.join([*parts, 'verification'])}; specbench bench times each)" if parts else ""
    return (
        f"a step{made_of} takes {cost:.2f}x as long as vanilla's pass over one token:"
        f" {saved:.2f} / {cost:.2f} = {saved / cost:.2f}x. Where a pass takes equally long for any number of"
        f" tokens, these steps give up to {saved:.2f}x, less the time for {extra}"
    )


def _served_lines(row: Mapping[str, Any], value: Callable[..., str]) -> list[tuple[str, str]]:
    """Name -> text of what was measured of a server; value: as in `report`."""
    tail = ", ".join(f"p{p} {value(f'request_s_p{p}', digits=3)}" for p in (50, 95, 99))
    lines = [
        ("request latency", f"{value('request_s_mean', ' s', 3)}; {tail}"),
        ("throughput", value("served_images_per_s", " images/s", 3)),
    ]
    if row["latency_bound"] is not None:
        lines.append(("goodput", f"{value('goodput')} of the requests within {row['latency_bound']:g} s"))
    lines.append(("requests", f"{row['request_retries']} attempts repeated, {row['requests_failed']} failed before"))
    return lines


@dataclass(frozen=True)
class TimeSpent:
    """What one start of a run spent its time on: wall times, seconds since 1970, of the start, the end of decoding
    (with loading), of scoring, and of the run."""

    began: float
    decoded: float
    scored: float
    ended: float

    def parts(
        self, method: str, records: Iterable[Record], sessions: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, float]:
        """Part -> seconds, which sum to the whole.

        Args:
            records: of the method and of vanilla AR, repeated timings included. Those of earlier starts do not count.
            sessions: the processes that decoded, see `provenance.RunMetadata`. Where several did at the same time, or a
                server, the seconds of images do not sum to wall time, and decoding is one part.
        """
        decoding, rest = self.decoded - self.began, self.ended - self.scored
        here = [r for r in records if r.done >= self.began]
        used = [sessions.get(name, {}) for name in {r.session for r in here}]
        parts: dict[str, float] = {}
        if here and all(r.request_s is None for r in here) and all(one.get("workers", 1) == 1 for one in used):
            parts = {"loading": sum(float(one.get("loaded_s") or 0) for one in used), "drafting": 0.0}
            for r in here:
                drafting, side = r.draft_s or 0.0, "vanilla" if r.is_baseline else method
                parts["drafting"] += drafting
                parts[side] = parts.get(side, 0.0) + r.text_s + r.decode_s + r.pixels_s - drafting
            parts["warm-up and statistics"] = decoding - sum(parts.values())
        else:
            parts["decoding"] = decoding
        return parts | {"scoring": self.scored - self.decoded, "the rest": rest}

    def sentence(self, method: str, records: Iterable[Record], sessions: Mapping[str, Mapping[str, Any]]) -> str:
        """The parts as text, without those that took next to nothing."""
        parts = self.parts(method, records, sessions)
        each = ", ".join(f"{name} {_seconds(spent)}" for name, spent in parts.items() if spent >= _LEAST)
        return f"{_seconds(self.ended - self.began)} s" + (f": {each}" if each else "")


def _seconds(spent: float) -> str:
    return f"{spent:,.0f}" if spent >= 10 else f"{spent:.1f}"
