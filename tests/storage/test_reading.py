"""The checked reader of files, dataclasses from their annotations, and values from the text of an argument."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from commands import usage_error

from specbench.config import parameters
from specbench.config.parameter import Parameter
from specbench.storage.reading import made, read_json, read_text, read_yaml, typed


@dataclass(frozen=True)
class Inner:
    name: str
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.share > 1:
            raise ValueError("a share is at most 1")


@dataclass(frozen=True)
class Outer:
    side: Literal["higher", "lower"]
    sizes: tuple[int, ...] = ()
    pair: tuple[int, str] | None = None
    inner: Mapping[str, Inner] = field(default_factory=dict)
    more: Sequence[Inner] = ()
    on: bool = False


def test_a_file_that_cannot_be_read_is_a_short_error(tmp_path: Path) -> None:
    expanding = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{next_name}: &{next_name} [{', '.join([f'*{name}'] * 10)}]\n"
        for name, next_name in zip("abcdef", "bcdefg", strict=True)
    )
    for read, content, sentence in (
        (read_text, b"one\n\xff", "file, line 2: this is not UTF-8 text"),
        (read_text, b"one\n\0", "file, line 2: there is a NUL character"),
        (lambda path: read_text(path, largest=3), b"four", "is larger than"),
        (read_json, b"{", "cannot read it as JSON"),
        (read_json, b'{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        (read_json, b"[" * 100_000, "nested too deeply"),
        (
            lambda path: read_json(path, list[str], "name a list"),
            b'["a", 1]',
            "file, 2 must be text (got 1); name a list",
        ),
        (read_yaml, b"a: [", "cannot read "),
        (read_yaml, b"a: 1\na: 2\n", "found duplicate key a"),
        (read_yaml, b"- a\n", "contains no NAME: VALUE lines"),
        (read_yaml, expanding.encode(), "is too large"),
    ):
        (tmp_path / "file").write_bytes(content)
        error = usage_error(read, tmp_path / "file")
        assert sentence in error, (content[:40], error)
        assert str(tmp_path / "file") in error, content[:40]
        assert "\n" not in error, content[:40]
    message = usage_error(read_text, tmp_path / "no", "restore it")
    assert str(tmp_path / "no") in message
    assert "restore it" in message
    assert str(tmp_path) in usage_error(read_json, tmp_path)
    (tmp_path / "file").write_bytes("\ufeffa: 1e-3\n2: ü\n".encode())
    assert read_yaml(tmp_path / "file") == {"a": 0.001, "2": "ü"}
    (tmp_path / "file").write_bytes(b"# nothing\n")
    assert read_yaml(tmp_path / "file") == {}


def test_a_dataclass_is_built_from_its_annotations() -> None:
    fields = {
        "side": "lower",
        "sizes": [1, 2],
        "pair": [1, "x"],
        "inner": {"a": {"name": "b"}},
        "more": [{"name": "c", "share": 1}],
    }
    assert made(Outer, fields, "x") == Outer("lower", (1, 2), (1, "x"), {"a": Inner("b")}, (Inner("c", 1),))
    changes: dict[str, dict[str, Any]] = {
        "x: side must be one of higher, lower": {"side": "best"},
        "x: sizes, 2 ": {"sizes": [1, True]},
        "x: sizes must": {"sizes": 3},
        "x: pair ": {"pair": [1]},
        "x: inner must": {"inner": []},
        "x: inner: a ": {"inner": {"a": {}}},
        "x: more, 1: share ": {"more": [{"name": "c", "share": "all"}]},
        "x: more, 1 ": {"more": [{"name": "c", "share": 2}]},
        "x: on ": {"on": 1},
        "'no'": {"no": 1},
    }
    for name, change in changes.items():
        assert name in usage_error(made, Outer, {**fields, **change}, "x")
    assert re.search(r"^x\b.*\b3\b", usage_error(made, Outer, 3, "x"))
    assert typed(Any, {1: [2]}, "x") == {1: [2]}


@pytest.mark.parametrize("name", ["n", "seed"])
def test_an_integer_has_several_forms(name: str) -> None:
    for text, value in (("1000", 1000), ("1_000", 1000), ("1e3", 1000), ("1000.0", 1000)):
        assert parameters.table()[name].from_text(name, text) == value, text
    for text in ("1.5", "many", "", "1e999", "١", "0x10", "9" * 5000):
        assert f"{name} must be" in usage_error(parameters.table()[name].from_text, name, text), text[:9]


def test_the_text_of_an_argument_becomes_its_value() -> None:
    for parameter, text, value in (
        (Parameter("flag", "x"), "false", False),
        (Parameter("number", "x"), "2", 2.0),
        (Parameter("numbers", "x"), "[1, 2.5]", [1.0, 2.5]),
        (Parameter("numbers", "x", also=("none",)), "none", "none"),
        (Parameter("integers", "x", low=1), "4,1,4", [1, 4]),
        (Parameter("integer", "x", null="off"), "null", None),
        (Parameter("string", "x"), "7", "7"),
        (Parameter("path", "x"), "a, b", "a, b"),
    ):
        parsed = parameter.from_text("x", text)
        assert (parsed, type(parsed)) == (value, type(value)), (parameter.kind, text)
    for parameter, text in (
        (Parameter("flag", "x"), "yes"),
        (Parameter("number", "x"), "1_0"),
        (Parameter("number", "x"), "1,2"),
        (Parameter("integer", "x"), "null"),
        (Parameter("integers", "x", low=1), "0,3"),
        (Parameter("string", "x", choices=("a",)), "b"),
    ):
        assert "x must be " in usage_error(parameter.from_text, "x", text), (parameter.kind, text)
