"""A run's report as text, from its row: for the screen, a notebook, and the top of the contact sheet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specbench.config import parameters
from specbench.config.run_config import RunConfig
from specbench.rows import remark_text, summary
from specbench.rows.columns import SHIFT_BOUND, Row, stderr_of
from specbench.rows.differences import Difference, differences, several
from specbench.rows.journal import Record
from specbench.rows.provenance import DecodingProcess
from specbench.rows.remark import Remark, remarks_of
from specbench.rows.shown import doubt, is_biased, shown

_LEAST = 0.05  # seconds; shorter parts of a start are not listed


def describe(cfg: RunConfig) -> str:
    """How the images were made: "cool_sd (drafter eagle_tree, rule cool, delta 1.1)"."""
    parts = [f"variant {cfg.variant}"] if cfg.variant else []
    parts += [f"drafter {cfg.drafter}", f"rule {cfg.rule}"]
    if (verification := cfg.verification) != "token":
        parts.append(f"verification {verification}")
    parts += [
        f"{name} {value:g}"
        for name in ("window", "delta", "strength", "budget")
        if (value := cfg.own.get(name)) is not None
    ]
    return f"{cfg.method} ({', '.join(parts)})"


def title(row: Row, config: RunConfig, prompts: int) -> str:
    """The title of a contact sheet that shows the first `prompts` prompts of a run."""
    images = prompts * config.images_per_prompt
    part = "" if images == row["images"] else f", first {images}"
    length = f"{row['accepted_length_mean']:.2f} tokens a step"
    return f"{row['model']}: {describe(config)}, {length} ({row['images']} images{part})"


def quality(row: Row, cfg: RunConfig) -> list[str]:
    """The lines of a contact sheet on each metric's difference from vanilla AR."""
    compared = differences(shown(row), _columns(cfg))
    lines = [f"{item.column} {item.value:.4f}, {'; '.join(item.sentences())}" for item in compared]
    return [*lines, *filter(None, [several(compared)])]


def report(row: Row, cfg: RunConfig) -> str:
    """What a run measured, in a few lines: steps and seconds saved, the divergence from the target, each metric with
    vanilla AR's value and the interval of the difference, and what cannot be concluded. row.csv and `specbench compare`
    have the rest."""
    row = shown(row)
    compared = {item.column: item for item in differences(row, _columns(cfg))}
    saved = "step_compression" if row.get("speedup_step") is None else "speedup_step"  # without a baseline
    lines = [
        ("steps", f"{_value(row, saved, 'x')} fewer ({_value(row, 'accepted_length_mean')} tokens a step)"),
        ("seconds", _seconds_saved(row)),
        ("divergence", _divergence(row)),
        *((name, _metric(row, name, compared.get(name))) for name in _columns(cfg)),
        ("inconclusive", _inconclusive(row, cfg, compared.values())),
        ("remarks", remark_text.joined(r for r in remarks_of(row) if not _is_said(r, row, cfg))),
    ]
    source = "/".join(filter(None, [row["data"], row["split"]]))
    count = (
        f"n={row['n']}"
        + (f" (shard {row['shard']})" if row.get("shard") else "")
        + (f" with {cfg.images_per_prompt} images each" if cfg.images_per_prompt > 1 else "")
    )
    head = f"{row['model']}: {describe(cfg)}, {source}, {count}, {row['device_name']} (± standard error)"
    return "\n".join([head, *(line(name, text) for name, text in lines if text)])


def _value(row: Row, name: str, unit: str = "", digits: int = 2) -> str:
    if row.get(name) is None:
        return "not measured"
    return summary.with_error(row[name], row.get(stderr_of(name)), digits) + unit


def _seconds_saved(row: Row) -> str:
    """The speed-up in seconds with its pairs; the seconds alone without a speed-up; "" if nothing was timed."""
    faster = "speedup_latency" if row.get("speedup_latency") is not None else "speedup_throughput"
    taken = f"{_value(row, 'latency_s_mean', digits=3)} s an image" * (row.get("latency_s_mean") is not None)
    taken = taken or f"{_value(row, 'images_per_s')} images a second" * (row.get("images_per_s") is not None)
    if row.get(faster) is None:
        return taken
    pairs = f"{row['timed_pairs']} pair{'s' if row['timed_pairs'] != 1 else ''}"
    text = f"{_value(row, faster, 'x')} vanilla's speed over {pairs}, {taken}"
    cost = step_cost(row)
    if cost is not None and cost > 1 + SHIFT_BOUND:
        text += f"; a step takes {cost:.2f}x as long as vanilla's"
    return f"{text}. {why}" if (why := doubt(row, faster)) else text


def _divergence(row: Row) -> str:
    """The divergence of the emitted distribution from the target's, or why it is not known; "" if it was turned off."""
    if row.get("emitted_kl") is not None:
        kl, tv = _value(row, "emitted_kl", digits=4), _value(row, "emitted_tv", digits=4)
        return f"{kl} nats of KL to the target per token, total variation {tv}"
    return remark_text.of_column(remarks_of(row), "emitted_kl")


def _metric(row: Row, name: str, compared: Difference | None) -> str:
    """A metric's value with vanilla AR's and the interval of the difference, or why there is no value."""
    text = _value(row, name, digits=4)
    if row.get(name) is None:
        return ": ".join(filter(None, [text, remark_text.of_column(remarks_of(row), name)]))
    return f"{text}, {compared.sentences()[0]}" if compared else text


def _is_said(remark: Remark, row: Row, cfg: RunConfig) -> bool:
    """Whether another line of the report has this remark."""
    why_empty = remark.column in _columns(cfg) and row.get(remark.column) is None
    return why_empty or remark.column == "emitted_kl" or remark.code in ("biased", "unsteady")


def _inconclusive(row: Row, cfg: RunConfig, compared: Iterable[Difference]) -> str:
    """What the values do not show."""
    compared = list(compared)
    same = [item.column for item in compared if item.is_tested and not item.is_significant and not item.bias]
    unknown = [item.column for item in compared if item.stderr is None]
    biased = [name for name in _columns(cfg) if is_biased(row, name)]
    parts = [
        f"no difference is shown in {', '.join(same)}, which does not mean equal" * bool(same),
        f"{', '.join(unknown)} has no interval" * bool(unknown),
        f"{', '.join(biased)} is biased at this n: compare only with the same n" * bool(biased),
        several(compared),
    ]
    return "; ".join(filter(None, parts))


def line(name: str, text: str) -> str:
    """A line of the report."""
    return f"  {name:<16} {text}"


def _columns(cfg: RunConfig) -> list[str]:
    return [column for metric in cfg.metrics for column in parameters.metric_columns(metric)]


def step_cost(row: Row) -> float | None:
    """Seconds of a step, including drafting, over the seconds of a step of vanilla AR, a pass over one token. It is the
    speed-up in steps (over all images) over the speed-up in seconds (over the timed pairs). None if one is missing.
    row: see `shown`."""
    saved, faster = row.get("speedup_step"), row.get("speedup_throughput")
    return saved / faster if saved and faster else None


@dataclass(frozen=True)
class TimeSpent:
    """The times of one start of a run, in seconds since 1970: the start, the end of decoding (including loading), the
    end of scoring, and the end of the run."""

    began: float
    decoded: float
    scored: float
    ended: float

    def parts(
        self, method: str, records: Iterable[Record], sessions: Mapping[str, DecodingProcess]
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
        used = [sessions[name] for name in {r.session for r in here}]
        parts: dict[str, float] = {}
        if here and all(process.workers == 1 for process in used):
            parts = {"loading": sum(process.loaded_s for process in used), "drafting": 0.0}
            for r in here:
                drafting, side = r.draft_s or 0.0, "vanilla" if r.is_baseline else method
                parts["drafting"] += drafting
                parts[side] = parts.get(side, 0.0) + r.text_s + r.decode_s + r.pixels_s - drafting
            parts["warm-up and statistics"] = decoding - sum(parts.values())
        else:
            parts["decoding"] = decoding
        return parts | {"scoring": self.scored - self.decoded, "the rest": rest}

    def sentence(self, method: str, records: Iterable[Record], sessions: Mapping[str, DecodingProcess]) -> str:
        """The parts as text, without very short ones."""
        parts = self.parts(method, records, sessions)
        items = ", ".join(f"{name} {_seconds(spent)}" for name, spent in parts.items() if spent >= _LEAST)
        return f"{_seconds(self.ended - self.began)} s" + (f": {items}" if items else "")


def _seconds(spent: float) -> str:
    return f"{spent:,.0f}" if spent >= 10 else f"{spent:.1f}"
