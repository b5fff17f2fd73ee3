"""The results of the functions of the Python interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from specbench.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from PIL.Image import Image

    from specbench.compare.comparison import Comparison
    from specbench.decoding.continuous import ContinuousTrace
    from specbench.decoding.trace import Trace
    from specbench.rows.journal import Record


class RunImages(Sequence["Image"]):
    """The images of a run, read from their files on access."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> Image: ...
    @overload
    def __getitem__(self, index: slice) -> RunImages: ...
    def __getitem__(self, index: int | slice) -> Image | RunImages:
        if isinstance(index, slice):
            return RunImages(self.paths[index])
        return _opened(self.paths[index])

    def __iter__(self) -> Iterator[Image]:
        return map(_opened, self.paths)

    def __repr__(self) -> str:
        return f"<{len(self)} images>"


@dataclass(frozen=True, repr=False)
class RunResult:
    """A finished run.

    folder: its files; row: column -> value, None if it was not measured (docs/metrics.md explains the columns);
    config: all parameters.
    """

    folder: Path
    row: Mapping[str, Any]
    config: Mapping[str, Any]

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

        return pd.DataFrame(breakdown.of_pass(passes.read(str(self.folder))), columns=list(breakdown.COLUMNS))

    @cached_property
    def images(self) -> RunImages:
        """The images, in the order of `records`."""
        return RunImages([self.folder / record.image for record in self._records])

    @property
    def sheet(self) -> Image:
        """The contact sheet: the first images with their captions, next to the vanilla images."""
        return _opened(self.folder / "contact_sheet.png")

    @property
    def baseline(self) -> Path | None:
        """The folder of the vanilla images that were decoded for the speed-up, for `specbench.compare`; or None."""
        return self.folder / "baseline" if (self.folder / "baseline.jsonl").is_file() else None

    @cached_property
    def _records(self) -> list[Record]:
        from specbench.config.indices import of_row
        from specbench.rows.journal import read_of

        records = read_of(self.folder / "records.jsonl", of_row(self.row))
        if records is None:
            raise UsageError(f"{self.folder}: records of its row are missing: run it again with `specbench resume`")
        return records

    def __repr__(self) -> str:
        from specbench.rows import report_text

        return f"{report_text.report(self.row, self.config)}\n{report_text.line('folder', str(self.folder))}"


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
    """The rows of an audit, with the columns of `specbench audit out=FILE.csv`."""

    rows: Sequence[Mapping[str, Any]]

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per model and draft size."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    @property
    def verdict(self) -> str:
        """The verdict over all rows: "not lossless" if this holds for a row; "undecided" if the p-value or the limit of
        a row is inconclusive, or if no row exercised a part of the method; else "lossless"."""
        from specbench.audit import verdicts

        return verdicts.verdict(self.rows)

    def __repr__(self) -> str:
        from specbench.audit.rows import table

        return table(self.rows)


@dataclass(frozen=True)
class DecodedPrompts:
    """B images that were decoded together.

    tokens: (B, T) int64, or (B, T, D) float32 for continuous tokens; pixels: (B, H, W, 3) uint8; steps: (B,) target
    forward passes of the decode phase; drafted, accepted: (B,) draft tokens that were verified, and accepted; seconds:
    from the first target forward to the last token of the batch; trace: statistics of every step, as tensors.
    """

    prompts: Sequence[str]
    config: Mapping[str, Any] = field(repr=False)
    tokens: np.ndarray = field(repr=False)
    pixels: np.ndarray = field(repr=False)
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


def _opened(path: Path) -> Image:
    from PIL import Image

    with Image.open(path) as image:
        image.load()
        return image
