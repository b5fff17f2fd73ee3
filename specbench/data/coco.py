"""MS-COCO's captions (Lin et al. 2014): val2017 (5,000 images), val2014 (40,504), and the training images of both
years. An image has at least five captions; a run takes one of them.

A prompt and its real image are paired by the image's id. The order of the file only determines which caption of an
image is the first.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.config.run_config import PromptSelection
from specbench.data import base
from specbench.data.base import Item
from specbench.errors import UsageError
from specbench.storage.reading import read_json

#: (data set, split) -> its annotation file. The images are in val2017/, train2017/, ..., under their names in this
#: file.
FILES = {
    ("coco2017", "validation"): "captions_val2017.json",
    ("coco2017", "train"): "captions_train2017.json",
    ("coco2014", "validation"): "captions_val2014.json",
    ("coco2014", "train"): "captions_train2014.json",
}


@dataclass(frozen=True)
class Captions:
    """The parameters of conf/data/base/coco.yaml."""

    caption: str
    split: str = "validation"  # folders of older versions have none


def items(wanted: PromptSelection) -> list[Item]:
    """The captions of `n` images, chosen by `seed`. `caption` selects one of an image's captions."""
    chosen = wanted.read(Captions)
    file = FILES[wanted.data, chosen.split]
    return base.subset(read(base.find(wanted, f"annotations/{file}", file), chosen.caption, wanted.seed), wanted)


def read(path: Path, caption: str, seed: int) -> list[Item]:
    """One caption per image: the "first" in the file, the "longest", or a "random" one, drawn by (seed, image id).

    "running_longest" reproduces SJD's released code. It goes through the images by id and keeps the index of the
    longest caption so far, but does not reset it for a new image: the index changes only when a caption is longer than
    all captions before it. An image with fewer captions gives its last one.

    Blank captions do not count; an image without captions is skipped. Raises UsageError for a file that is not an
    annotation file of captions, and if its captions and images do not match.
    """
    coco = _index(read_json(path, way_out="give another file"), path)
    entries: list[Item] = []
    index = length = 0  # of the longest caption so far
    for number, image in sorted(coco.imgs.items()):
        annotations = [a for a in coco.imgToAnns[number] if a["caption"].strip()]
        if not annotations:
            continue
        texts = [base.clean(a["caption"], f"{path}, caption {a['id']}") for a in annotations]
        if caption == "longest":
            text = max(texts, key=len)  # the first of equally long captions
        elif caption == "running_longest":
            for i, annotation in enumerate(annotations):
                if len(annotation["caption"]) > length:  # unstripped, as in the file
                    index, length = i, len(annotation["caption"])
            text = texts[min(index, len(texts) - 1)]
        elif caption == "random":
            text = texts[int.from_bytes(base.key("caption", seed, number)) % len(texts)]
        else:
            text = texts[0]
        entries.append(Item(len(entries), text, None, str(number), image["file_name"]))
    return base.check_ids(entries, path)


def _index(content: Any, path: Path) -> Any:
    """The checked content of an annotation file as a pycocotools COCO."""
    from pycocotools.coco import COCO

    images, annotations = _by_id(content, "images", "image", path), _by_id(content, "annotations", "caption", path)
    for number, image in images.items():
        where = f"{path}, image {number}"
        file = base.clean(image.get("file_name"), where, "file_name")
        if file in (".", "..") or "/" in file or "\\" in file:
            raise UsageError(f"{where}: its file_name is not a plain file name; fetch the file again")
    for number, annotation in annotations.items():
        where = f"{path}, caption {number}"
        if not isinstance(annotation.get("caption"), str):
            raise UsageError(f"{where}: it has no text; fetch the file again (captions, not instances)")
        image_id = _number(annotation.get("image_id"))
        if image_id not in images:
            raise UsageError(f"{where}: the file has no image {str(annotation.get('image_id'))[:100]}; fetch it again")
        annotation["image_id"] = image_id
    coco = COCO()
    coco.dataset = {"images": [*images.values()], "annotations": [*annotations.values()]}
    with contextlib.redirect_stdout(io.StringIO()):  # createIndex prints
        coco.createIndex()
    return coco


def _by_id(content: Any, name: str, what: str, path: Path) -> dict[int, dict[str, Any]]:
    """The entries of a list in the file, by their ids, which must be distinct integers (see `_number`)."""
    entries = content.get(name) if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{path} is not a COCO annotation file: it has no list of {name}; fetch it again")
    by_id: dict[int, dict[str, Any]] = {}
    for number, entry in enumerate(entries, 1):
        if (by := _number(entry.get("id"))) is None:
            found = f"the id {str(entry['id'])[:100]!r}, which is no integer" if "id" in entry else "no id"
            raise UsageError(f"{path}: {what} number {number} has {found}; fetch the file again")
        if by in by_id:
            raise UsageError(f"{path}: the {what} id {by} occurs twice; fetch the file again")
        by_id[by] = {**entry, "id": by}
    return by_id


def _number(value: object) -> int | None:
    """An id as an integer; None if it is not one. Tools that rewrite the file also store 139 as "139", as
    "000000000139" or as 139.0."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 18:
        return int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value if type(value) is int else None
