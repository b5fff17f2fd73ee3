"""Untrusted files: for any content a reader returns a valid value or raises a UsageError.

The first part damages valid files and arguments at random. The second part has the errors of earlier versions.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import checked, usage_error
from fake_pipeline import FakePipeline
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from test_journal import picture, record
from test_report import row
from torch import nn

from specbench import cli
from specbench.audit import models
from specbench.compare import passes
from specbench.config import command_line, configuration, parameters
from specbench.data import prompts
from specbench.errors import UsageError
from specbench.harness import run
from specbench.metrics import reference
from specbench.models.loading import checkpoints
from specbench.rows.columns import COLUMNS
from specbench.rows.csv_files import read_rows, to_csv
from specbench.rows.journal import Journal, to_line
from specbench.rows.provenance import RunMetadata
from specbench.rows.remark import as_json, free
from specbench.storage import image_files
from specbench.storage.csv_text import csv_lines
from specbench.tables import render, report

many = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
few = settings(many, max_examples=40)
Call = Callable[..., tuple[int, str, str]]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ["nan", "inf", "1e999", "-1", "\0", "²", "9" * 400, "</script>", "\\input{x}", "../../x", "\u202e", "[" * 3000]
)
#: The bytes of a file: any, and any text.
BYTES = st.binary(max_size=200) | TEXT.map(str.encode)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def damaged(draw: st.DrawFn, sound: bytes) -> bytes:
    """A file after a full disk, an editor or a person: cut off, overwritten, doubled, or with something inserted."""
    at, length = draw(st.integers(0, len(sound))), draw(st.integers(0, 40))
    return sound[:at] + draw(BYTES) + draw(st.sampled_from([b"", sound[at:], sound[at + length :], sound]))


def content(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def or_usage_error(read: Callable[[], Any]) -> Any:
    """The value that a reader returns; None after a UsageError. Any other exception is a bug."""
    with contextlib.suppress(UsageError):
        return read()
    return None


@pytest.mark.parametrize("ending", [".txt", ".tsv", ".csv", ".json", ".jsonl"])
@many
@given(data=BYTES | JSON.map(lambda value: json.dumps(value).encode()))
def test_prompts(tmp_path: Path, ending: str, data: bytes) -> None:
    items = or_usage_error(lambda: prompts.read(content(tmp_path / f"p{ending}", data)))
    for entry in items or []:
        assert entry.prompt.strip()
        assert "\0" not in entry.prompt + entry.id
    assert items is None or len({entry.id for entry in items}) == len(items) > 0


@many
@given(data=BYTES)
def test_files_of_any_bytes(tmp_path: Path, data: bytes) -> None:
    path = content(tmp_path / "file", data)
    assert or_usage_error(lambda: reference.read(path, 4)) is None
    assert or_usage_error(lambda: models.load(str(path))) is None
    for read in (image_files.read, read_rows, csv_lines, Journal, RunMetadata.read):
        or_usage_error(lambda read=read: read(path))


@many
@given(name=st.sampled_from(list(COLUMNS)), text=TEXT)
def test_a_cell_is_a_number_or_refused(tmp_path: Path, name: str, text: str) -> None:
    out = io.StringIO()
    csv.writer(out).writerows([["run_id", name][name == "run_id" :], ["a", text][name == "run_id" :]])
    for read_row in or_usage_error(lambda: read_rows(content(tmp_path / "rows.csv", out.getvalue().encode()))) or []:
        value = read_row[name]
        assert value is None or isinstance(value, str) or np.isfinite(float(value))


@many
@given(name=st.sampled_from(list(asdict(record(0)))), value=JSON)
def test_a_record_is_valid_or_refused(tmp_path: Path, name: str, value: Any) -> None:
    values = asdict(record(0)) | {name: value}
    line = checked(values)
    path = content(tmp_path / "records.jsonl", line.encode() + b"\n")
    (tmp_path / "images").mkdir(exist_ok=True)
    Image.fromarray(picture(0)).save(tmp_path / "images/00000.png")
    journal = or_usage_error(lambda: Journal(path))
    for kept in journal.records.values() if journal else []:
        assert isinstance(kept.steps, int)
        assert (tmp_path / kept.image).resolve().is_relative_to(tmp_path.resolve())


@cache
def plain_row() -> dict[str, Any]:
    return row("x", "method=vanilla")


@many
@given(text=TEXT)
def test_text_stays_text(text: str) -> None:
    """In LaTeX only the renderer's own commands begin with a backslash; in Markdown no tag exists; in a page no
    character can end its data."""
    latex = render.latex_text(text)
    escapes = r"\\(text(backslash|asciitilde|asciicircum|less|greater|bar|quotedbl|asciigrave)\{\}|[&%$#_{}])"
    escapes += r"|\$\\(pm|times|uparrow|downarrow|delta|lambda|nu|omega)\$|-\{\}"
    assert not re.search(r"[\\%$#&_{}~^]", re.sub(escapes, "", latex))
    markdown = render.markdown_text(text)
    assert not re.search(r"[|*_<>`]", re.sub(r"\\.", "", markdown))
    assert all("\n" not in cell and len(cell.splitlines()) <= 1 for cell in (latex, markdown))
    row = plain_row() | {"remarks": as_json([free(text)]), "prompts": text, "file": text, "command": text}
    row["command_exact"] = True
    shots = {"x": {0: report.Shot(b"", text)}}
    written = report.page(report.ReportContent([row], audits=[{"verdict": text}], shots=shots))
    message = re.search(r'id="data">(.*?)</script>', written, re.DOTALL)
    assert message is not None
    assert not set("<>&") & set(message[1])
    assert json.loads(message[1])["rows"][0]["images"]["0"]["prompt"] == text


@many
@given(name=TEXT)
def test_a_path_is_literal_or_refused(name: str) -> None:
    """With the quotes that a shell leaves."""
    assume(name not in ("", "null") and not re.fullmatch(r"'.*'|\".*\"", name, re.DOTALL))
    cfg = or_usage_error(lambda: configuration.compose(command_line.read([f"out={name}"])))
    assert cfg is None or cfg.out == name


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    run.run(configuration.compose(["n=3", "warmup=0", "metrics=none"]), out, loader=FakePipeline)
    return out


def succeeds_or_refuses(call: Call, *arguments: str) -> None:
    """A command ends with exit code 0, or with 2 and one sentence, and prints no control characters."""
    code, out, err = call(*arguments)
    sentences = [line for line in err.splitlines() if line.startswith("specbench: ")]
    assert code == 0 or (code, len(sentences)) == (2, 1), (arguments, out, err)
    assert not set("\0\x1b\x07") & set(out + err)


@pytest.mark.parametrize("command", [["status"], ["resume"], ["compare"], ["report"]], ids=lambda c: c[0])
@few
@given(data=st.data())
def test_commands_on_a_damaged_run(
    call: Call, finished: Path, tmp_path: Path, command: list[str], data: st.DataObject
) -> None:
    folder = tmp_path / "in/run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(finished, folder)
    text = ("row.csv", "run.json", "config.yaml", "records.jsonl", "baseline.jsonl", "images/00001.png")
    file = folder / data.draw(st.sampled_from([name for name in text if (folder / name).exists()]))
    file.write_bytes(data.draw(damaged(file.read_bytes())))
    more = {"compare": [str(finished)], "report": ["runs=in", "out=x.html", "keep=kept"]}.get(command[0], [])
    succeeds_or_refuses(call, *command, str(folder), *more)
    assert {path.name for path in tmp_path.iterdir()} <= {"in", "kept", "x.html"}


@few
@given(
    command=st.sampled_from(
        "run evaluate compare report audit bench probe tables reference list fetch train x".split()
    ),
    arguments=st.lists(TEXT | st.builds("{}={}".format, st.sampled_from([*parameters.table(), "+x", "~n"]), TEXT)),
)
def test_any_arguments(call: Call, tmp_path: Path, command: str, arguments: list[str]) -> None:
    assume(not any("\0" in argument for argument in arguments))  # no argument of a process has one
    assume(not {"help", "-h", "--help"} & set(arguments))
    succeeds_or_refuses(call, command, *arguments, "nothing=1")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["reference", "tables", "weights", "image"])
@many
@given(data=st.data())
def test_readers_of_a_damaged_file(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    path = tmp_path / kind
    if kind == "reference":
        np.savez(path.open("wb"), mu=np.zeros(4), sigma=np.eye(4))
    elif kind == "tables":
        np.savez(path.open("wb"), **{f"{letter}{t}": np.full((2**t, 2), 0.5) for t in range(2) for letter in "pq"})
    elif kind == "weights":
        save_file(dict(nn.Linear(3, 2).state_dict()), path, {"kind": "line", "config": "{}"})
    else:
        Image.fromarray(picture(0)).save(path, "PNG")
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    readers: dict[str, Callable[[], object]] = {
        "reference": lambda: reference.read(path, 4),
        "tables": lambda: models.load(str(path)),
        "weights": lambda: checkpoints.load(path, "line", lambda c: nn.Linear(c.inside, c.out), Shape),
        "image": lambda: image_files.read(path),
    }
    or_usage_error(readers[kind])


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one-line message of a command that cannot work."""
    assert cli.main([str(argument) for argument in arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("specbench: ")
    return line.removeprefix("specbench: ")


def test_a_row_edited_by_hand_costs_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A word instead of a number was a ValueError; "nan" came through to the page, and JSON cannot contain it."""
    for cell, sentence in [
        ("nan", "got 'nan'"),
        ('"1', "unexpected end of data"),
        ("1,2,3", "5 cells instead of 3"),
        ("\udcff", "not UTF-8"),
    ]:
        row = f"run_id,config_hash,steps\na,b,{cell}\n"
        path = content(tmp_path / "rows.csv", row.encode(errors="surrogateescape"))
        message = refused(capsys, "report", path, f"out={tmp_path / 'x.html'}")
        assert message.startswith(str(path)), cell
        assert sentence in message, cell
        assert not (tmp_path / "x.html").exists(), cell


def run_folder(folder: Path, run_id: str, image: str) -> None:
    """A finished run, with the files that a report reads."""
    (folder / "images").mkdir(parents=True)
    Image.fromarray(picture(0)).save(folder / "images/00000.png")
    (folder / "row.csv").write_text(to_csv([row(run_id, "method=vanilla")]))
    (folder / "records.jsonl").write_text(json.dumps({"index": 0, "prompt": "a", "image": image}) + "\n")


@pytest.mark.parametrize("run_id", ["../../escape", "/tmp/escape-specbench", "..", "a/b"])
def test_the_name_of_a_run_becomes_no_path(tmp_path: Path, run_id: str) -> None:
    """`report keep=` used to make a folder at any path that the run_id of an edited row named."""
    run_folder(tmp_path / "in/run", run_id, "images/00000.png")
    arguments = [tmp_path / "in/run/row.csv", f"runs={tmp_path / 'in'}", f"keep={tmp_path / 'out/kept'}"]
    assert cli.main(["report", *map(str, arguments), f"out={tmp_path / 'out/x.html'}"]) == 0
    [kept] = (tmp_path / "out/kept").iterdir()
    assert re.fullmatch(r"[\w-]+", kept.name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]
    assert not Path("/tmp/escape-specbench").exists()


def test_a_row_may_differ_from_the_row_of_its_folder(tmp_path: Path) -> None:
    """`report keep=` used to look for the prompts of the folder's row under the data of the edited row: a KeyError."""
    run_folder(tmp_path / "in/run", "a", "images/00000.png")
    edited = tmp_path / "edited.csv"
    edited.write_text(to_csv([row("a", "method=vanilla", split="another")]))
    arguments = [edited, f"runs={tmp_path / 'in'}", f"keep={tmp_path / 'kept'}", f"out={tmp_path / 'x.html'}"]
    assert cli.main(["report", *map(str, arguments)]) == 0
    assert json.loads((tmp_path / "kept/a/records.jsonl").read_text())["prompt"] == "a"


@pytest.mark.parametrize("image", ["../secret.png", "images/../../secret.png", "{}/secret.png"])
def test_a_record_shows_no_image_from_another_folder(tmp_path: Path, image: str) -> None:
    """A report used to embed any .png that a record named."""
    Image.fromarray(picture(1)).save(tmp_path / "secret.png")
    run_folder(tmp_path / "in/run", "a", image.format(tmp_path))
    gathered = report.gather([tmp_path / "in/run/row.csv"], [tmp_path / "in"], 8)
    assert gathered.shots == {}
    line = to_line(replace(record(0), image=image.format(tmp_path)))
    with pytest.raises(UsageError, match="line 1"):
        Journal(content(tmp_path / "records.jsonl", line))


def test_a_damaged_run_json_costs_a_sentence(tmp_path: Path) -> None:
    """It used to be a JSONDecodeError, an AssertionError or a KeyError, depending on the command."""
    (tmp_path / "config.yaml").write_text("method: a\ndrafter: b\nrule: c\n")
    (tmp_path / "records.jsonl").write_text("")
    for text in ["", "{", "[]", '{"run_id": 1, "sessions": {}}', '{"run_id": "a", "sessions": {"b": 1}}']:
        (tmp_path / "run.json").write_text(text)
        for read, path in ((RunMetadata.read, tmp_path / "run.json"), (passes.read, str(tmp_path))):
            assert "run.json" in usage_error(read, path), text


def test_a_file_name_reaches_neither_terminal_nor_table_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An escape sequence in a name used to reach the terminal, and a name that is no UTF-8 was a UnicodeEncodeError
    after all images had been scored."""
    (tmp_path / "a").mkdir()
    Image.fromarray(picture(0)).save(tmp_path / "a/\x1b[2J\x1b]0;owned\x07.png")
    message = refused(capsys, "evaluate", tmp_path / "a", "data=scenes", f"out={tmp_path / 'out'}")
    assert message.isprintable()
    assert "?[2J?]0;owned?.png" in message
    (tmp_path / "b").mkdir()
    content(Path(os.fsdecode(os.fsencode(tmp_path) + b"/b/\xff.png")), b"")
    assert "/?.png " in refused(capsys, "evaluate", tmp_path / "b", "data=scenes")


def test_a_header_larger_than_its_file_costs_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """numpy trusts the header of an array, and requests 58 TiB for it."""
    head = "{'descr': '<f8', 'fortran_order': False, 'shape': (1, 8000000000000)}".ljust(117) + "\n"
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as z:
        z.writestr("p0.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + head.encode())
    path = tmp_path / "a.npz"
    message = refused(capsys, "audit", "method=sd", f"audit.tables={path}")
    assert message.startswith(f"audit.tables: p0 of {path}")


@dataclass(frozen=True)
class Shape:
    inside: int = 3
    out: int = 2


def test_weights_that_describe_no_network_cost_a_sentence(tmp_path: Path) -> None:
    """An embedded file states the sizes of its network; any sizes used to be built."""
    path = tmp_path / "w.safetensors"
    for text in [
        "",
        "[]",
        "3",
        '{"inside": "a"}',
        '{"inside": -1}',
        '{"inside": 1e3}',
        '{"no": 1}',
        f'{{"inside": {2**63}}}',
        f'{{"inside": {10**9}}}',
        "[" * 3000,
    ]:
        save_file(dict(nn.Linear(3, 2).state_dict()), path, {"kind": "line", "config": text})
        message = usage_error(checkpoints.load, path, "line", lambda c: nn.Linear(c.inside, c.out), Shape)
        assert "w.safetensors" in message, text
