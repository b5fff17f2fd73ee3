"""Helpers of the data sets: reading untrusted files, and choosing a subset of prompts."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specbench.config.run_config import PromptSelection
from specbench.errors import MissingFilesError, UsageError
from specbench.storage import home

LONGEST = 10_000  # characters of a prompt


@dataclass(frozen=True)
class Item:
    """One prompt, of a run or of a file from which a run takes a subset.

    `index` is its index among the chosen prompts; with the seed, it is the key of its random stream. `id` is its name
    in the data set; metrics pair prompts by id. Files are named by index, never by id.
    """

    index: int
    prompt: str
    labels: tuple[int, ...] | None  # classes, if the data set has them: the attributes of a scene, an ImageNet class
    id: str = ""
    reference: str | None = None  # file name of the real image that the prompt describes
    metadata: Mapping[str, Any] | None = field(default=None, hash=False)  # what the image must show (GenEval's format)
    category: str | None = None  # of the prompt, for breakdowns; None: GenEval's tag, if it has one

    @property
    def kind(self) -> str | None:
        """The category of the prompt, or GenEval's tag."""
        tag = (self.metadata or {}).get("tag")
        return self.category or (tag if isinstance(tag, str) else None)


def key(*words: object) -> bytes:
    """32 pseudo-random bytes that depend only on the arguments, not on the version of any library."""
    return hashlib.sha256("\n".join(map(str, words)).encode()).digest()


def subset(entries: Sequence[Item], wanted: PromptSelection) -> list[Item]:
    """The first `n` entries (None: all) of a permutation keyed by `seed`, so that a larger n extends a smaller one.

    The permutation sorts by a hash of (seed, id), so the order of the file does not matter. Raises UsageError if there
    are fewer than `n` entries.
    """
    return first(sorted(entries, key=lambda entry: key("subset", wanted.seed, entry.id)), wanted)


def first(entries: Sequence[Item], wanted: PromptSelection) -> list[Item]:
    """The first `n` entries (None: all), in their order. Raises UsageError if there are fewer."""
    n = len(entries) if wanted.n is None else wanted.n
    if n > len(entries):
        raise UsageError(
            f"data={wanted.data} has {len(entries)} prompts here, not n={n}: give n={len(entries)} at most"
        )
    return [replace(entry, index=i) for i, entry in enumerate(entries[:n])]


def spread(classes: int, wanted: PromptSelection) -> list[tuple[int, int, str]]:
    """(index, class number, id) of `n` images, spread evenly: `classes` consecutive images have each class once, in an
    order keyed by `seed`. The id "7-3" is the fourth image of class 7."""
    order = sorted(range(classes), key=lambda label: key("class", wanted.seed, label))
    rounds = ((i, order[i % classes], i // classes) for i in wanted.drawn)
    return [(i, label, f"{label}-{round_}") for i, label, round_ in rounds]


def class_numbers(prompts: Sequence[str], names: Sequence[str], model: str, advice: str) -> list[int]:
    """The classes that the prompts name by their words or numbers. Raises UsageError, with the name of the model and
    advice on how to name a class, for a prompt without a class."""
    return [_class_number(prompt, names, model, advice) for prompt in prompts]


def _class_number(prompt: str, names: Sequence[str], model: str, advice: str) -> int:
    words = " ".join(prompt.lower().split())
    if words in names:
        return names.index(words)
    if re.fullmatch("[0-9]{1,6}", words) and int(words) < len(names):
        return int(words)
    raise UsageError(
        f"{model} draws classes, and '{prompt[:40]}' is not one of them: {advice}, or a number from 0 to"
        f" {len(names) - 1}"
    )


def find(wanted: PromptSelection, *names: str, how: str = "") -> Path:
    """The first of the files `names` that exists in data_dir=, or, if that is null, in the folder of fetched files.

    Raises MissingFilesError if no file exists; `how` is its advice on how to get one (default: `specbench fetch`).
    """
    name, given = wanted.data, wanted.own.get("data_dir")
    folder = home.expanded(given) if given else home.data_folder(name)
    for file in names:
        if os.path.isfile(folder / file):
            return folder / file
    raise MissingFilesError(
        f"data={name} needs {' or '.join(names)}, looked for in {folder}:"
        f" {how or f'run `specbench fetch data={name}`'}, or name a folder that has it with data_dir=DIR",
        is_published=not how,
    )


def clean(text: object, where: str, what: str = "prompt") -> str:
    """A prompt, or an id, without the white space around it. Raises UsageError if it is not a usable text; `where` is
    its location: "FILE, line 3"."""
    if not isinstance(text, str):
        raise UsageError(f"{where}: the {what} must be text, not {type(text).__name__}; put it in quotes")
    text = text.strip()
    if not text:
        raise UsageError(f"{where}: the {what} is empty; fill it in or remove the entry")
    if len(text) > LONGEST:
        raise UsageError(f"{where}: the {what} has {len(text)} characters; shorten it to {LONGEST} at most")
    if "\0" in text:
        raise UsageError(f"{where}: the {what} contains a NUL character; remove it")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{where}: the {what} contains half a character (a lone surrogate); remove it") from None
    return text


def check_ids(entries: Sequence[Item], path: Path) -> list[Item]:
    """Returns the entries. Raises UsageError if there are no entries, or if two have the same id."""
    if not entries:
        raise UsageError(f"{path} contains no prompts; give a file that has some")
    [(twice, count)] = Counter(entry.id for entry in entries).most_common(1)
    if count > 1:
        raise UsageError(f"{path}: the id {twice[:100]!r} occurs twice; give every prompt a different id")
    return list(entries)
