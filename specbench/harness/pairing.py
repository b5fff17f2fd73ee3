"""Pairs the images of a folder with prompts by their file names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench import data
from specbench.errors import UsageError


@dataclass(frozen=True)
class Pairs:
    """Images and their items, by index; remark: a note for the row."""

    paths: list[Path]
    items: list[data.Item]
    remark: str = ""


def pair(
    paths: list[Path],
    cfg: Mapping[str, Any],
    given: Collection[str],
    source: str,
    reading: Sequence[str],
    partial: bool,
) -> Pairs:
    """Pairs images with prompts by name. Leaves them unpaired if no metric reads prompts and the names do not match.

    Args:
        cfg: values of the parameters of the prompts. given: those that the user gave.
        source: the data set; empty: no prompts.
        reading: the metrics that read prompts.
        partial: prompts without an image are allowed.
    """
    unpaired = [data.Item(i, "", None) for i in range(len(paths))]
    if not source:
        if reading:
            raise UsageError(
                f"{reading[0]} reads prompts: give prompts=FILE, or data=NAME for those of a data set, or put a file"
                " prompts.jsonl (.txt, .csv, ...) into the folder"
            )
        return Pairs(paths, unpaired)
    n = cfg["n"] if "n" in given else len(paths) if source in data.DRAWN else None
    try:
        return _pair_by_name(paths, data.load({**cfg, "n": n}), partial)
    except UsageError as e:
        if reading or "prompts" in given:
            raise
        return Pairs(paths, unpaired, f"not paired with prompts, which no metric here reads ({e})")


def _pair_by_name(paths: list[Path], items: Sequence[data.Item], partial: bool) -> Pairs:
    """Each item with the image whose file is named like its id, or like its real image; in the order of the items.

    UsageError naming images without a prompt, prompts without an image and images of the same prompt.
    """
    known = {item.id: item for item in items}
    for item in items:
        if item.reference:
            known.setdefault(Path(item.reference).stem, item)
    found: dict[int, Path] = {}
    unmatched = []
    for path in paths:
        names = (path.name, path.stem, str(int(path.stem)) if path.stem.isdecimal() else path.stem)
        plain = next((name for name in names if name in known), path.stem)
        if plain not in known:
            unmatched.append(path.name)
        elif (other := found.setdefault(known[plain].index, path)) is not path:
            raise UsageError(f"{other} and {path} both have the name of prompt {known[plain].id}; keep one of them")
    missing = [item.id for item in items if item.index not in found]
    faults = []
    if unmatched:
        faults.append(f"no prompt has the id of {listed(unmatched, 'images')}")
    if missing and not (partial and found):
        faults.append(f"no image has the name of {listed(missing, 'prompts')}")
    if faults:
        raise UsageError(
            f"{' and '.join(faults)}: name each image by the id of its prompt, and give the prompts of these images"
            + (" (or partial=true)" if not unmatched and found else "")
        )
    paired = [item for item in items if item.index in found]
    remark = f"{len(missing)} of {len(items)} prompts have no image" if missing else ""
    return Pairs([found[item.index] for item in paired], paired, remark)


def listed(names: Sequence[str], what: str) -> str:
    """Names as text: "4 images (a.png, b.png, c.png, ...)"."""
    shown = ", ".join(name[:100] for name in names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} {what if len(names) > 1 else what.removesuffix('s')} ({shown})"
