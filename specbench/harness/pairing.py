"""Pairs the images of a folder with prompts by their file names."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specbench import data
from specbench.config import indices, registry
from specbench.config.run_config import PromptSelection
from specbench.errors import UsageError
from specbench.rows.remark import Remark, free, remark
from specbench.storage import image_files


@dataclass(frozen=True)
class Pairs:
    """Images and their items, paired by position; remarks: for the row."""

    paths: list[Path]
    items: list[data.Item]
    remarks: Sequence[Remark] = ()


def pair(
    folder: Path,
    paths: list[Path],
    wanted: PromptSelection,
    reading: Sequence[str],
    partial: bool,
) -> Pairs:
    """Pairs images with prompts by file name. Leaves them unpaired if no metric reads prompts and the names do not
    match.

    Args:
        folder, paths: the folder, and the images in it and its subfolders.
        wanted: the prompts; none without a data set. n = None: all of a file; of a data set that is drawn, one for each
            image.
        reading: the metrics that read prompts.
        partial: prompts without an image are allowed.
    """
    unpaired = [data.Item(i, "", None) for i in range(len(paths))]
    if not wanted.data:
        if reading:
            raise UsageError(
                f"{reading[0]} reads prompts: use prompts=FILE, or data=NAME for a data set, or put a file"
                " prompts.jsonl (.txt, .csv, ...) into the folder"
            )
        return Pairs(paths, unpaired)
    if wanted.n is None and registry.is_drawn(wanted.data):
        wanted = replace(wanted, n=len(paths))
    try:
        return _pair_by_name(folder, paths, data.load(wanted), partial)
    except UsageError as e:
        if reading or "prompts" in wanted.own:
            raise
        return Pairs(paths, unpaired, (remark("not_paired", reason=str(e)),))


def _pair_by_name(folder: Path, paths: list[Path], items: Sequence[data.Item], partial: bool) -> Pairs:
    """Pairs each item with its images, in the order of the items. An item with several images appears once for each,
    with the index of that image (see `config.indices`).

    An image of a run states its prompt (`image_files.Made`). Any other image belongs to the item whose id, or whose
    real image, has the name of the file (see `_name`). UsageError names images without a prompt, prompts without an
    image, and two images of the same prompt and number.
    """
    known = {_composed(item.id): item for item in items}
    for item in items:
        if item.reference:
            known.setdefault(_composed(Path(item.reference).stem), item)
    # GenEval's overview of the samples is no image of a prompt.
    paths = [path for path in paths if path.name != "grid.png" or not (path.parent / "samples").is_dir()]
    made = {path: fact for path in paths if (fact := image_files.made(path))}

    matches, unmatched = _matched(folder, paths, items, known, made)
    missing = [item.id for item in items if item.index not in matches]
    offset = "" if made or not (unmatched or missing) else _offset(folder, paths, known)
    faults = []
    if unmatched:
        faults.append(f"no prompt has the id of {listed(unmatched, 'images')}")
    if missing and not (partial and matches):
        faults.append(f"no image has the name of {listed(missing, 'prompts')}")
    if faults:
        hint = f"; {offset}" if offset else " (or partial=true)" if not unmatched and matches else ""
        raise UsageError(
            f"{' and '.join(faults)}: name each image by the id of its prompt, and give the prompts of these images"
            + hint
        )

    remarks = []
    if missing:
        remarks.append(remark("prompts_without", missing=len(missing), prompts=len(items)))
        remarks += [free(offset)] if offset else []
    pairs = [(item, number, path) for item in items for number, path in sorted(matches.get(item.index, {}).items())]
    others = sum(path in made and made[path].prompt != item.prompt for item, _, path in pairs)
    if others:
        remarks.append(remark("other_prompts", images=others, of=len(pairs)))
    numbered = [replace(item, index=item.index + number * indices.STRIDE) for item, number, _ in pairs]
    return Pairs([path for *_, path in pairs], numbered, remarks)


def _matched(
    folder: Path,
    paths: Sequence[Path],
    items: Sequence[data.Item],
    known: Mapping[str, data.Item],
    made: Mapping[Path, image_files.Made],
) -> tuple[dict[int, dict[int, Path]], list[str]]:
    """The images of each item, by its index and by their number, and the names of the images that belong to none.
    UsageError for two images of the same item and number. known: the items by name; made: what images state."""
    ids: dict[str, list[str]] = {}  # by the text of the prompt
    for item in items:
        ids.setdefault(item.prompt, []).append(item.id)
    names = {path: _stated(made.get(path), known, ids) or _name(folder, path, known) for path in paths}
    matches: dict[int, dict[int, Path]] = {}
    unmatched = []
    for path, (name, number) in names.items():
        if name not in known:
            unmatched.append(path.name)
            continue
        other = matches.setdefault(known[name].index, {}).setdefault(number, path)
        if other is not path:
            raise UsageError(f"{other} and {path} are both image {number} of prompt {known[name].id}; keep one of them")
    return matches, unmatched


def _stated(
    made: image_files.Made | None, known: Collection[str], ids: Mapping[str, Sequence[str]]
) -> tuple[str, int] | None:
    """The id of the prompt that an image states, and its number; None if it states none of these prompts. If these
    prompts are numbered differently, the one with the stated text counts; ids: of the prompts with each text."""
    if made is None:
        return None
    same = ids.get(made.prompt, [])
    if made.id not in same and len(same) == 1:
        return _composed(same[0]), made.number
    return (_composed(made.id), made.number) if _composed(made.id) in known else None


def _composed(name: str) -> str:
    """A name with composed characters: some systems write the name of a file with decomposed ones (e and an accent)."""
    return unicodedata.normalize("NFC", name)


def _offset(folder: Path, paths: Sequence[Path], known: Mapping[str, data.Item]) -> str:
    """Says that every image has a prompt if its number is raised or lowered by one; "" if that is not so."""
    for by, direction in ((1, "raised"), (-1, "lowered")):
        shifted = {str(int(name) - by): item for name, item in known.items() if name.isdecimal()}
        if all(_name(folder, path, shifted)[0] in shifted for path in paths):
            return (
                f"every image also fits a prompt if its number is {direction} by one: check that images and prompts"
                " are counted from the same number (lines of a text file are counted from 1; a file with ids counts as"
                " you wish)"
            )
    return ""


def _name(folder: Path, path: Path, known: Collection[str]) -> tuple[str, int]:
    """The id in the name of an image in the folder, and the number of the image of that prompt: "7.png" or "0007.png",
    "7-3.png" for its fourth image, "0007/samples/0003.png" as in GenEval's code, and a path such as "train/0007.png" as
    in the metadata of Hugging Face's folders."""

    def plain(name: str) -> str:
        return name if name in known or not name.isdecimal() else str(int(name))

    path = Path(_composed(str(path.relative_to(folder))))
    for name in (path.as_posix(), path.with_suffix("").as_posix(), path.name):
        if name in known:
            return name, 0
    head, _, tail = path.stem.rpartition("-")
    if path.parent.name == "samples" and path.stem.isdecimal() and plain(path.parent.parent.name) in known:
        return plain(path.parent.parent.name), int(path.stem)
    if plain(path.stem) not in known and tail.isdecimal() and len(tail) <= 6 and plain(head) in known:
        return plain(head), int(tail)
    return plain(path.stem), 0


def listed(names: Sequence[str], what: str) -> str:
    """Names as text: "4 images (a.png, b.png, c.png, ...)"."""
    shown = ", ".join(name[:100] for name in names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} {what if len(names) > 1 else what.removesuffix('s')} ({shown})"
