"""A run's report as text, from its row: for the screen, a notebook, and the top of the contact sheet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specbench.config import parameters
from specbench.config.run_config import RunConfig
from specbench.rows import remark_text, summary
from specbench.rows.columns import SHIFT_BOUND, stderr_of
from specbench.rows.differences import differences, several
from specbench.rows.journal import Record
from specbench.rows.remark import remarks_of
from specbench.rows.shown import shown, unsteady

_LEAST = 0.05  # seconds; shorter parts of a start are not listed


def describe(cfg: Mapping[str, Any]) -> str:
    """How the images were made: "cool_sd (drafter eagle_tree, rule cool, delta 1.1)"."""
    parts = [f"variant {cfg['variant']}"] if "variant" in cfg else []
    parts += [f"drafter {cfg['drafter']}", f"rule {cfg['rule']}"]
    if (verification := cfg.get("verification", "token")) != "token":
        parts.append(f"verification {verification}")
    parts += [
        f"{name} {cfg[name]:g}" for name in ("window", "delta", "strength", "budget") if cfg.get(name) is not None
    ]
    return f"{cfg['method']} ({', '.join(parts)})"


def title(row: Mapping[str, Any], config: RunConfig, prompts: int) -> str:
    """The title of a contact sheet that shows the first `prompts` prompts of a run."""
    images = prompts * config.images_per_prompt
    part = "" if images == row["images"] else f", first {images}"
    length = f"{row['accepted_length_mean']:.2f} tokens a step"
    return f"{row['model']}: {describe(config)}, {length} ({row['images']} images{part})"


def quality(row: Mapping[str, Any], cfg: Mapping[str, Any]) -> list[str]:
    """The lines of a contact sheet on each metric's difference from vanilla AR."""
    compared = differences(shown(row), _columns(cfg))
    lines = [f"{item.column} {item.value:.4f}, {'; '.join(item.sentences())}" for item in compared]
    return [*lines, *filter(None, [several(compared)])]


def report(row: Mapping[str, Any], cfg: Mapping[str, Any]) -> str:
    """The key values of a row as text, with their standard errors over images."""

    def value(name: str, unit: str = "", digits: int = 2) -> str:
        if row.get(name) is None:
            return "not measured"
        return summary.with_error(row[name], row.get(stderr_of(name)), digits) + unit

    row = shown(row)
    lines = _speed_lines(row, value)
    against_vanilla = {item.column: item for item in differences(row, _columns(cfg))}
    for name in _columns(cfg):
        backend = f"  [{row[f'{name}_backend']}]" if row.get(f"{name}_backend") else ""
        lines.append((name, value(name, digits=4) + backend))
        if name in against_vanilla:
            lines += [("", sentence) for sentence in against_vanilla[name].sentences()]
    lines += [("tests", several(against_vanilla.values())), ("remarks", remark_text.joined(remarks_of(row)))]
    source = "/".join(filter(None, [row["data"], row["split"]]))
    per_prompt = cfg.get("images_per_prompt") or 1
    count = (
        f"n={row['n']}"
        + (f" (shard {row['shard']})" if row.get("shard") else "")
        + (f" with {per_prompt} images each" if per_prompt > 1 else "")
    )
    head = f"{row['model']}: {describe(cfg)}, {source}, {count}, {row['device_name']} (± standard error)"
    return "\n".join([head, *(line(name, text) for name, text in lines if text)])


def line(name: str, text: str) -> str:
    """A line of the report."""
    return f"  {name:<16} {text}"


def _columns(cfg: Mapping[str, Any]) -> list[str]:
    return [column for metric in cfg["metrics"] for column in parameters.metric_columns(metric)]


def _speed_lines(row: Mapping[str, Any], value: Callable[..., str]) -> list[tuple[str, str]]:
    """Name -> text of the speed and the likelihood in a row; value: the function of `report`."""
    lines = [
        ("accepted length", value("accepted_length_mean", " tokens a step")),
        ("acceptance rate", f"{value('acceptance_rate')}, of all drafted tokens {value('draft_acceptance_rate')}"),
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
        valid = "not valid, the speed-up was not steady" if unsteady(row) else "valid"
        verdict = "too few for a standard error" if row["speedup_throughput_stderr"] is None else valid
        count = f"{row['timed_pairs']} pair{'s' if row['timed_pairs'] != 1 else ''}"
        lines.append(("timing", f"over {count} with vanilla{further}: {verdict}"))
    return lines


def step_cost(row: Mapping[str, Any]) -> float | None:
    """Seconds of a step, including drafting, over the seconds of a step of vanilla AR, a pass over one token. It is the
    speed-up in steps (over all images) over the speed-up in seconds (over the timed pairs). None if one is missing.
    row: see `shown`."""
    saved, faster = row.get("speedup_step"), row.get("speedup_throughput")
    return saved / faster if saved and faster else None


def why_slower(row: Mapping[str, Any]) -> str:
    """Why the speed-up in seconds is smaller than in steps, and what the same steps could give. "" if no steps are
    saved, or if a step takes as long as vanilla's to within `SHIFT_BOUND`. row: see `shown`."""
    cost, saved = step_cost(row), row.get("speedup_step")
    if cost is None or saved is None or saved <= 1 or cost <= 1 + SHIFT_BOUND:
        return ""
    parts, extra = [], "verification"
    if row.get("draft_passes"):
        passes = row["draft_passes"] / row["steps"]
        parts.append(f"{passes:.3g} pass{'es' * (passes != 1)} of the drafter")
        if row.get("draft_cost"):
            parts[0] += f" ({row['draft_cost']:.2f}x vanilla's time per token for each)"
        extra = "drafting and verification"
    parts += [f"a target pass over {row['draft_tokens'] + 1:.3g} tokens"] if row.get("draft_tokens") else []
    made_of = f" ({', '.join([*parts, 'verification'])}; specbench bench times each)" if parts else ""
    return (
        f"a step{made_of} takes {cost:.2f}x as long as vanilla's pass over one token:"
        f" {saved:.2f} / {cost:.2f} = {saved / cost:.2f}x. Where a pass takes equally long for any number of"
        f" tokens, these steps give up to {saved:.2f}x, less the time for {extra}"
    )


@dataclass(frozen=True)
class TimeSpent:
    """The times of one start of a run, in seconds since 1970: the start, the end of decoding (including loading), the
    end of scoring, and the end of the run."""

    began: float
    decoded: float
    scored: float
    ended: float

    def parts(
        self, method: str, records: Iterable[Record], sessions: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, float]:
        """Part -> seconds, which sum to the whole.

        Args:
            records: of the method and of vanilla AR, including repeated timings. Records of earlier starts do not
                count.
            sessions: the processes that decoded, see `provenance.RunMetadata`. If several decoded at the same time, the
                seconds of images do not sum to wall time, and decoding is one part.
        """
        decoding, rest = self.decoded - self.began, self.ended - self.scored
        here = [r for r in records if r.done >= self.began]
        used = [sessions.get(name, {}) for name in {r.session for r in here}]
        parts: dict[str, float] = {}
        if here and all(s.get("workers", 1) == 1 for s in used):
            parts = {"loading": sum(float(s.get("loaded_s") or 0) for s in used), "drafting": 0.0}
            for r in here:
                drafting, side = r.draft_s or 0.0, "vanilla" if r.is_baseline else method
                parts["drafting"] += drafting
                parts[side] = parts.get(side, 0.0) + r.text_s + r.decode_s + r.pixels_s - drafting
            parts["warm-up and statistics"] = decoding - sum(parts.values())
        else:
            parts["decoding"] = decoding
        return parts | {"scoring": self.scored - self.decoded, "the rest": rest}

    def sentence(self, method: str, records: Iterable[Record], sessions: Mapping[str, Mapping[str, Any]]) -> str:
        """The parts as text, without very short ones."""
        parts = self.parts(method, records, sessions)
        items = ", ".join(f"{name} {_seconds(spent)}" for name, spent in parts.items() if spent >= _LEAST)
        return f"{_seconds(self.ended - self.began)} s" + (f": {items}" if items else "")


def _seconds(spent: float) -> str:
    return f"{spent:,.0f}" if spent >= 10 else f"{spent:.1f}"
