"""Prompts by data set and split. Importing this package imports no data set."""

from __future__ import annotations

from dataclasses import dataclass

from specbench.errors import UsageError, unknown

#: Data set -> its splits.
SPLITS: dict[str, tuple[str, ...]] = {"scenes": ("train", "validation")}


@dataclass(frozen=True)
class Item:
    """One prompt of a split. `index` is its place there and, with the seed, the key of its random stream."""

    index: int
    prompt: str
    labels: tuple[int, ...] | None  # attribute classes, for data sets that have them


def load(name: str, split: str, n: int) -> list[Item]:
    """The first `n` prompts of a split, in order; the same for ever. Raises UsageError for an unknown name or split."""
    if name not in SPLITS:
        raise unknown("data", name, SPLITS)
    if split not in SPLITS[name]:
        raise unknown(f"split of {name}", split, SPLITS[name])
    if n < 1:
        raise UsageError(f"n must be a whole number of at least 1 (got {n})")
    from specbench.data import scenes  # draws with torch, which a look at the choices must not import

    samples = (scenes.sample(split, index) for index in range(n))
    return [Item(s.index, s.caption, tuple(s.scene.labels())) for s in samples]
