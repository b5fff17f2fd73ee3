"""The Python interface: `import specbench` provides these names.

    result = specbench.run("cool_sd", model="llamagen_scenes", delta=1.1, n=16)
    result.row["step_compression"], result.records, result.images[0]

The parameters are the same as on the command line. A mistake raises `specbench.UsageError` with the message that the
command line would print. Work that cannot be done raises `specbench.RunError`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.cli.including import report_faults
from specbench.config import command_line, configuration
from specbench.config.run_config import RunConfig
from specbench.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from PIL.Image import Image

    from specbench.compare.comparison import Comparison
    from specbench.decoding.continuous import ContinuousTrace
    from specbench.decoding.trace import Trace
    from specbench.rows.journal import Record

_OF_AUDIT = ("model", "tables", "samples", "margin", "seed", "workers")
#: Parameters of the loaded networks. All others can change between two calls of `decode`.
_LOADED = (
    *("model", "weights", "reduced", "size", "prompt_length", "instruction", "suffix", "negative"),
    *("drafter_weights", "device", "dtype"),
)


def run(method: str | None = None, *, out: str | Path | None = None, quiet: bool = False, **values: Any) -> RunResult:
    """Decodes prompts, scores the images, measures the speed-up over vanilla decoding: `specbench run`.

    method: the preset; None: the model's default. out: the folder of the run; None: a new folder below runs/. If it
    already has a run, this one is continued: a second call with the same arguments only reads the result. quiet: no
    messages and no progress bars. values: the parameters of the command line, such as delta=1.1,
    metrics=["scenes_reward"]; a list is one value. Raises KeyboardInterrupt if the user stops it; finished images are
    kept.
    """
    from specbench.harness.run import run

    report_faults()
    arguments = _overrides(method, {**values, "out": out})
    cfg = configuration.compose(arguments)
    with _silence(quiet):
        outcome = run(cfg, asked=configuration.names_metrics(arguments))
    return RunResult(outcome.folder.path, outcome.row, outcome.config)


def result(folder: str | Path) -> RunResult:
    """The result of an existing run."""
    from specbench.harness.run import stored_outcome

    report_faults()
    outcome = stored_outcome(folder)
    return RunResult(outcome.folder.path, outcome.row, outcome.config)


def compare(a: RunResult | str | Path, b: RunResult | str | Path) -> ComparisonResult:
    """Compares two runs image by image, over the prompts that both decoded: `specbench compare`. a, b: results, or
    folders of runs. `result.baseline` and DIR/baseline are the vanilla images of a run."""
    from specbench.compare import comparison, passes

    report_faults()
    folders = [side.folder if isinstance(side, RunResult) else side for side in (a, b)]
    return ComparisonResult(comparison.compare(*(passes.read(str(folder)) for folder in folders)))


def audit(
    method: str | None = None,
    *,
    verifier: str | Callable[..., Any] | None = None,
    sampler: str | Callable[..., Any] | None = None,
    records: str | Path | None = None,
    every: bool = False,
    quiet: bool = False,
    **values: Any,
) -> AuditResult:
    """Measures whether a method is lossless, on models whose distribution is known: `specbench audit`.

    verifier: a verifier of another engine, verify(p, q, tokens, rng) -> (accepted, next token), instead of a method, as
    a function or as its name (`specbench.audit.verifier`); sampler: draws its draft tokens, draw(q, rng) -> token;
    records: a file of recorded decisions of any engine, instead of a method (`specbench.audit.records`). every: audit
    all presets, like --all. values: parameters of the method, its drafter, its rule and the sampling; and model,
    tables, samples, margin, seed and workers, which are audit.model and so on for the command line.
    """
    from specbench.audit import plan

    report_faults()
    named = {f"audit.{name}" if name in _OF_AUDIT else name: value for name, value in values.items()}
    given = {"verifier": verifier, "sampler": sampler, "records": None if records is None else str(records)}
    outside = {name: value for name, value in given.items() if value is not None}
    with _silence(quiet):
        planned = plan.planned(_overrides(method, named), every, outside=outside)
        return AuditResult(list(plan.measured(planned)))


def load(model: str | None = None, **values: Any) -> LoadedModel:
    """Loads a model once, to decode your own prompts with it.

        model = specbench.load("llamagen_scenes")
        for delta in (1.0, 1.1, 2.0):
            print(model.decode(["a red circle"], "cool_sd", delta=delta).accepted_length)

    model: None: the embedded one. values: parameters of the model, the device and the sampling.
    """
    report_faults()
    return LoadedModel({"model": model, **values})


@dataclass(frozen=True, repr=False)
class RunResult:
    """A finished run.

    folder: its files; row: column -> value, None if it was not measured (docs/metrics.md explains the columns);
    config: all parameters.
    """

    folder: Path
    row: Mapping[str, Any]
    config: RunConfig

    @cached_property
    def _records(self) -> list[Record]:
        from specbench.config.indices import of_row
        from specbench.rows.journal import read_of

        records = read_of(self.folder / "records.jsonl", of_row(self.row))
        if records is None:
            raise UsageError(f"{self.folder}: records of its row are missing: run it again with `specbench resume`")
        return records

    @cached_property
    def records(self) -> pd.DataFrame:
        """One row per image: its counts, times and statistics, as in `specbench.rows.journal.Record`. The index is the
        image's number, which is the number of its prompt; `specbench.config.indices` numbers further images of a
        prompt."""
        import pandas as pd

        return pd.DataFrame([asdict(record) for record in self._records]).set_index("index")

    @cached_property
    def traces(self) -> pd.DataFrame:
        """One row per target forward pass, by image and step (from 1). `accepted`: the number of draft tokens inside
        the image that it accepted."""
        import pandas as pd

        steps = [(r.index, s, a) for r in self._records for s, a in enumerate(r.accepted_per_step, 1)]
        return pd.DataFrame(steps, columns=["index", "step", "accepted"]).set_index(["index", "step"])

    @cached_property
    def breakdown(self) -> pd.DataFrame:
        """One row per prompt category, caption length and band of positions, as `specbench breakdown` prints them."""
        import pandas as pd

        from specbench.compare import breakdown, passes

        method = passes.read(str(self.folder))
        return pd.DataFrame(breakdown.lines_of(method, breakdown.of_pass(method)), columns=list(breakdown.COLUMNS))

    @property
    def images(self) -> RunImages:
        """The images, in the order of `records`."""
        return RunImages([self.folder / record.image for record in self._records])

    @property
    def sheet(self) -> Image:
        """The contact sheet: the first images with their captions, next to the vanilla images."""
        return RunImages([self.folder / "contact_sheet.png"])[0]

    @property
    def baseline(self) -> Path | None:
        """The folder of the vanilla images that were decoded for the speed-up, for `specbench.compare`; or None."""
        return self.folder / "baseline" if (self.folder / "baseline.jsonl").is_file() else None

    def __repr__(self) -> str:
        from specbench.rows import report_text

        return f"{report_text.report(self.row, self.config)}\n{report_text.line('folder', str(self.folder))}"


class RunImages(Sequence[Any]):
    """The images of a run, read from their files on access."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        from PIL import Image

        if isinstance(index, slice):
            return RunImages(self.paths[index])
        with Image.open(self.paths[index]) as image:
            image.load()
            return image


@dataclass(frozen=True, repr=False)
class ComparisonResult:
    """Two runs, image by image. comparison: all statistics, as objects."""

    comparison: Comparison

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per statistic: means, difference, interval, p-values and effect size. The columns are the same as in
        `specbench compare out=FILE.csv`."""
        import pandas as pd

        from specbench.compare import wording

        return pd.DataFrame(wording.rows(self.comparison), columns=list(wording.COLUMNS)).set_index("statistic")

    def __repr__(self) -> str:
        from specbench.compare import wording

        return wording.report(self.comparison)


@dataclass(frozen=True, repr=False)
class AuditResult:
    """The rows of an audit, one per model and draft size, with the columns of `specbench audit out=FILE.csv`."""

    rows: Sequence[Mapping[str, Any]]

    @cached_property
    def table(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(self.rows)

    @property
    def verdict(self) -> str:
        """The verdict over all rows: "not lossless" if this holds for a row; "undecided" if the p-value or the limit of
        a row is inconclusive, or if no row exercised a part of the method; else "lossless" if a row enumerated the
        method's distribution; else "not refuted"."""
        from specbench.audit import verdicts

        return verdicts.verdict(self.rows)

    def __repr__(self) -> str:
        from specbench.audit.audit_text import table

        return table(self.rows)


class LoadedModel:
    """A target model on its device. Drafters and rules are built when `decode` needs them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        from specbench.harness.pipeline import load_model

        self._values, self.config = values, configuration.compose(_overrides(None, values))
        self.device, self._model = load_model(self.config)
        self._pipeline: tuple[str, Any] = "", None  # the last one, after its configuration

    def decode(
        self, prompts: str | Sequence[str], method: str | None = None, *, seed: int = 0, first: int = 0, **values: Any
    ) -> DecodedPrompts:
        """Decodes prompts together, as one batch.

        method: the preset; None: the model's default. values: parameters of the method and of the sampling. Image i has
        the random stream (seed, first + i), so that with first=0 the first prompts of a run with this seed give the
        images of that run.
        """
        if fixed := [name for name in values if name in _LOADED]:
            raise UsageError(f"{fixed[0]} belongs to the loaded model: give it to specbench.load")
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise UsageError("prompts must be a text or a list of texts")
        from specbench.harness.log import say
        from specbench.rows import remark_text
        from specbench.rows.remarks import unread_remarks

        arguments = _overrides(method, {**self._values, **values, "seed": seed})
        cfg = configuration.compose(arguments).changed(batch=1)
        pipeline = self._built(cfg)
        for remark in unread_remarks(map(pipeline.unread_tokens, texts)):
            say(remark_text.said(remark))
        decoded = pipeline.decode(pipeline.encode(texts), [(seed, first + i) for i in range(len(texts))])
        pipeline.synchronize()
        tokens, steps, drafted, accepted = (
            x.cpu().numpy() for x in (decoded.tokens, decoded.steps, decoded.drafted, decoded.accepted)
        )
        pixels, seconds = pipeline.pixels(decoded.tokens), decoded.seconds
        return DecodedPrompts(texts, cfg, pixels, tokens, steps, drafted, accepted, seconds, decoded.trace)

    def _built(self, cfg: RunConfig) -> Any:
        from specbench.harness.pipeline import Pipeline
        from specbench.harness.run import check

        key = json.dumps(cfg.plain() | {"seed": None}, sort_keys=True)
        if self._pipeline[0] != key:
            check(cfg)
            self._pipeline = key, Pipeline.assemble(cfg, self.device, self._model)
        return self._pipeline[1]


@dataclass(frozen=True)
class DecodedPrompts:
    """B images that were decoded together: pixels (B, H, W, 3) uint8; the others as in `decoding.batch.Decoded`."""

    prompts: Sequence[str]
    config: RunConfig = field(repr=False)
    pixels: np.ndarray = field(repr=False)
    tokens: np.ndarray = field(repr=False)
    steps: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    seconds: float
    trace: Trace | ContinuousTrace = field(repr=False)

    @property
    def accepted_length(self) -> np.ndarray:
        """(B,) tokens per target forward pass."""
        length: np.ndarray = self.tokens.shape[1] / self.steps
        return length

    @property
    def images(self) -> list[Image]:
        """The images, which a notebook can display."""
        from PIL import Image

        return [Image.fromarray(image) for image in self.pixels]


def _overrides(method: str | None, values: Mapping[str, Any]) -> list[str]:
    """The arguments of a configuration. None is a value, except for the method, the model, `out` and the audit."""
    given = {name: value for name, value in {"method": method, **values}.items()
             if value is not None or not (name in ("method", "model", "out") or name.startswith("audit."))}  # fmt: skip
    return [f"{k}={'none' if k == 'metrics' and not v else _text_of(v)}" for k, v in given.items()]


def _text_of(value: Any) -> str:
    """A value in Hydra's grammar."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text_of, value))}]"
    if not isinstance(value, str | Path):  # `item`: scalars of NumPy and PyTorch
        return json.dumps(value.item() if hasattr(value, "item") else value, default=str)
    plain = re.fullmatch(r"[A-Za-z_/][\w/.:@-]*", str(value), re.ASCII)
    is_text = plain and str(value).lower() not in command_line.NO_TEXT
    return str(value) if is_text else command_line.quoted(str(value))


def _silence(quiet: bool) -> redirect_stderr[Any]:
    return redirect_stderr(open(os.devnull, "w") if quiet else sys.stderr)
