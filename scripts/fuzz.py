"""Hostile input: `python scripts/fuzz.py --inputs 2000 --seed 0` hands files and words that nobody vouches for to the
command line, and fails where one of them brings

- an exit code other than 0 and 2, a traceback, or code 2 without exactly one sentence;
- more than ten seconds of work;
- a file written, moved or removed outside the folder of outputs (an audit hook sees every one);
- an active `<script>` or `\\input` of its own in a page or a table, or a control character on the terminal.

Everything runs in this process, by `specbench.cli.main`, with the embedded or reduced models. Input i depends on the
seed and i alone: `--only i` runs that one again and shows what it was.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import random
import re
import shutil
import signal
import struct
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("MPLBACKEND", "agg")

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from specbench import cli
from specbench.config import parameters
from specbench.config.table import TABLE
from specbench.metrics import reference
from specbench.models import official
from specbench.models.naming import ParameterSlice

LIMIT = 10.0  # seconds
HOSTILE = [
    "",
    " ",
    "\0",
    "../../../escape",
    "/tmp/escape",  # noqa: S108 (a name that must not be written to)
    "..",
    "con/../../x.png",
    "\\input{/etc/passwd}",
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "${oc.env:HOME}",
    "${now:%Y}",
    "$(touch escape)",
    "'; drop table rows; --",
    "\x1b[2J\x1b]0;title\x07",
    "\u202edlrow olleh",
    "שלום עולם",
    "😀" * 50,
    "a\rb\nc",
    "\ud800",
    "\ufeff",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "-1",
    "0",
    "0x10",
    "1_000",
    "9" * 400,
    "true",
    "null",
    "~",
    "[" * 3000,
    "{" * 50,
    "&a [*a,*a]",
    "!!python/object/apply:os.system ['true']",
    '"',
    "'",
    "`",
    "%s%n",
    "{0.__class__}",
    "=1+1",
    "-rf",
    "--help",
    "a,b",
    "x" * 200_000,
    "²³",
    "１２",
]
VALUES: list[Any] = [None, True, -1, 0, 1.5, 10**400, 2**63, [], {}, [[]], {"a": 1}, float("nan"), *HOSTILE]
Make = Callable[[random.Random, Path], "list[str] | Callable[[], object]"]


# --- mutations --------------------------------------------------------------------------------------------------------


def bad_bytes(rng: random.Random, content: bytes) -> bytes:
    """A file as a broken disk, editor or person leaves it."""
    at = rng.randrange(len(content) + 1)
    kind = rng.randrange(9)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + rng.randbytes(rng.randrange(1, 40)) + content[at + rng.randrange(40) :]
    if kind == 2:
        return content[:at] + rng.choice([b"\0", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\r", b"\n\n"]) + content[at:]
    if kind == 3:
        lines = content.splitlines(keepends=True) or [b""]
        return b"".join(lines + rng.choices(lines, k=rng.randrange(1, 4)))
    if kind == 4:
        lines = content.splitlines(keepends=True)
        return b"".join(line for line in lines if rng.random() < 0.7)
    if kind == 5:
        return content[:at] + utf8(rng.choice(HOSTILE)) + content[at:]
    if kind == 6:
        return content.decode("utf-8", "replace").encode(rng.choice(["utf-16", "utf-32", "utf-8-sig"]))
    if kind == 7:
        return rng.randbytes(rng.randrange(300))
    return content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]


def utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def bad_json(rng: random.Random, value: Any) -> Any:
    """A JSON value with one of its parts exchanged, taken away, or added."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key, made = rng.choice(list(value)), dict(value)
        if rng.random() < 0.1:
            del made[key]
        elif rng.random() < 0.1:
            made[rng.choice(HOSTILE)] = made.pop(key)
        else:
            made[key] = bad_json(rng, value[key])
        return made
    if isinstance(value, list) and value and rng.random() < 0.8:
        made = list(value)
        at = rng.randrange(len(made))
        made[at] = bad_json(rng, made[at])
        return made * rng.choice([1, 1, 1, 2])
    return rng.choice(VALUES)


def bad_rows(rng: random.Random, text: str) -> bytes:
    """A CSV with some cells, or a heading, exchanged."""
    rows = list(csv.reader(io.StringIO(text)))
    for _ in range(rng.randrange(1, 4)):
        row = rng.choice(rows if rng.random() < 0.2 else rows[1:] or rows)
        if rng.random() < 0.1:
            row.append(rng.choice(HOSTILE))
        elif rng.random() < 0.1:
            row.pop()
        elif row:
            row[rng.randrange(len(row))] = rng.choice(HOSTILE)
    out = io.StringIO()
    csv.writer(out, lineterminator=rng.choice(["\n", "\r\n"])).writerows(rows)
    return utf8(out.getvalue())


def bad_file(rng: random.Random, path: Path) -> None:
    """A file of a run, exchanged in its own form or as bytes; or taken away, or made a folder."""
    content = path.read_bytes()
    chance = rng.random()
    if chance < 0.05:
        path.unlink()
        if chance < 0.02:
            path.mkdir()
    elif chance < 0.4 and path.suffix in (".json", ".jsonl"):
        lines = [content] if path.suffix == ".json" else content.splitlines()
        at = rng.randrange(len(lines))
        lines[at] = utf8(json.dumps(bad_json(rng, json.loads(lines[at])), ensure_ascii=rng.random() < 0.5))
        path.write_bytes(b"\n".join(lines) + b"\n")
    elif chance < 0.6 and path.suffix == ".csv":
        path.write_bytes(bad_rows(rng, content.decode()))
    elif chance < 0.6 and path.suffix == ".yaml":
        lines = content.splitlines()
        at = rng.randrange(len(lines))
        lines[at] = lines[at].split(b":")[0] + b": " + utf8(rng.choice(HOSTILE))
        path.write_bytes(b"\n".join(lines) + b"\n")
    else:
        path.write_bytes(bad_bytes(rng, content))


# --- what is handed over ----------------------------------------------------------------------------------------------

QUICK = ["device=cpu", "warmup=0", "baseline=false"]
REDUCED = ["model=llamagen_xl", "weights=random", "reduced=true", "metrics=none", *QUICK]
MATERIAL = Path(tempfile.mkdtemp(prefix="specbench-fuzz-"))


def prepare() -> None:
    """Sound files, which the inputs are made of, by the commands themselves."""
    os.chdir(MATERIAL)
    Path("p.txt").write_text("a red circle\na blue square\nthree\n")
    for name, words in (("a", ["method=vanilla"]), ("b", ["method=sjd", "window=4"])):
        assert cli.main(["run", *REDUCED, *words, "prompts=p.txt", "n=3", f"out=runs/{name}"]) == 0
    words = ["method=jacobi", "n=3", "batch=3", "metrics=[scenes_reward]", *QUICK]
    assert cli.main(["run", *words, "out=runs/c"]) == 0
    assert cli.main(["audit", "method=sd", "audit.samples=1000", "audit.model=v3t5", "out=audit.csv"]) == 0
    # What is imported once for all takes its time on a busy machine, and is none of an input's.
    assert cli.main(["evaluate", "runs/c/images", "data=scenes", "metrics=[scenes_fid]", "out=e"]) == 0
    assert cli.main(["compare", "runs/c", "runs/c"]) in (0, 2)
    assert cli.main(["report", "runs/c/row.csv", "out=x.html"]) == 0
    assert cli.main(["tables", "coolsd_table1", "--no-run"]) == 0
    one = {f"{letter}{t}": np.full((2**t, 2), 0.5) for t in range(3) for letter in "pq"}
    np.savez("tables.npz", **one, codebook=np.ones((2, 3)))
    np.savez("reference.npz", mu=np.zeros(8), sigma=np.eye(8))
    module = nn.Linear(4, 3)
    save_file(dict(module.state_dict()), "linear.safetensors")
    torch.save({"model": dict(module.state_dict())}, "linear.pt")


def prompts(rng: random.Random, box: Path) -> list[str]:
    form = rng.choice(["txt", "tsv", "csv", "json", "jsonl"])
    texts = [rng.choice([*HOSTILE, "a red circle", "two blue squares"]) for _ in range(rng.randrange(1, 5))]
    ids = [rng.choice([*HOSTILE, "1", "2", "3"]) for _ in texts]
    rows = [{"id": i, "prompt": t} for i, t in zip(ids, texts)]
    if form in ("tsv", "csv"):
        out = io.StringIO()
        writer = csv.writer(out, delimiter="\t" if form == "tsv" else ",")
        writer.writerows(
            [["id", rng.choice(["prompt", "caption", "Text", "x"])], *([r["id"], r["prompt"]] for r in rows)]
        )
        content = utf8(out.getvalue())
    elif form == "txt":
        content = utf8("\n".join(texts))
    elif form == "json":
        content = utf8(json.dumps(rng.choice([rows, dict(zip(ids, texts)), bad_json(rng, rows)]), ensure_ascii=False))
    else:
        content = utf8("\n".join(json.dumps(row) for row in rows))
    if rng.random() < 0.3:
        content = bad_bytes(rng, content)
    if rng.random() < 0.01:
        content += b"x" * 10_000_000
    path = box / f"in/p.{form}"
    path.write_bytes(content)
    if rng.random() < 0.3:
        names = [f"{i}.png" for i in (1, 2, 3)]
        for name in names:
            shutil.copy(MATERIAL / "runs/c/images/00000.png", box / "in" / name)
        return ["evaluate", "in", f"prompts=in/p.{form}", "metrics=[scenes_reward]", "partial=true", "out=out/e"]
    return ["run", *REDUCED, "method=vanilla", f"prompts=in/p.{form}", f"n={rng.choice([1, 1, 2])}", "out=out/r"]


def pictures(rng: random.Random, box: Path) -> list[str]:
    sound = (MATERIAL / "runs/c/images/00000.png").read_bytes()
    for i in range(rng.randrange(1, 4)):
        ending = rng.choice(["png", "jpg", "gif", "bmp", "webp", "tiff", "ppm"])
        kind = rng.randrange(5)
        if kind == 0:
            content = bad_bytes(rng, sound)
        elif kind == 1:
            made = io.BytesIO()
            mode = rng.choice(["1", "L", "P", "RGB", "RGBA", "CMYK", "I;16", "F", "LA"])
            size = rng.choice([(1, 1), (3, 5), (64, 64), (1, 3000)])
            with contextlib.suppress(OSError, ValueError):  # no such mode in such a file
                Image.new(mode, size).save(made, rng.choice(["PNG", "TIFF", "GIF"]))
            content = made.getvalue()
        elif kind == 2:  # a PNG that says it is huge
            content = sound[:16] + struct.pack(">II", rng.choice([2**31 - 1, 60_000]), 60_000) + sound[24:]
        elif kind == 3:
            content = sound
        else:
            content = rng.randbytes(rng.randrange(100))
        name = rng.choice(
            [str(i).encode(), b"\xff\xfe", "\u202e".encode(), b"-rf", b"a b", b"<b>", b"\x1b[2J", b"a\nb"]
        )
        Path(os.fsdecode(os.fsencode(box / "in") + b"/" + name + f"{i}.{ending}".encode())).write_bytes(content)
    return ["evaluate", "in", "data=scenes", "metrics=[scenes_fid]", "out=out/e", f"batch={rng.choice([1, 64])}"]


def run_folder(rng: random.Random, box: Path) -> list[str]:
    """One file of a finished run is not what it was."""
    name = rng.choice("abc")
    shutil.copytree(MATERIAL / "runs" / name, box / "out/run")
    files = [p for p in sorted((box / "out/run").rglob("*")) if p.is_file()]
    weights = [4 if p.suffix in (".json", ".jsonl", ".yaml", ".csv") else 1 for p in files]
    bad_file(rng, rng.choices(files, weights)[0])
    command = rng.randrange(4)
    if command == 0:
        return ["evaluate", "out/run", "metrics=[scenes_reward]"]
    if command == 1:
        return ["compare", "out/run", str(MATERIAL / "runs" / rng.choice("abc"))]
    if command == 2:
        table = rng.choice(["out/run/row.csv", str(MATERIAL / f"runs/{name}/row.csv")])
        return ["report", table, "runs=out", "out=out/x.html", "keep=out/kept"]
    shutil.copy(MATERIAL / "p.txt", box / "p.txt")
    if name == "c":
        return ["run", "method=jacobi", "n=3", "batch=3", "metrics=[scenes_reward]", *QUICK, "out=out/run"]
    more = ["method=vanilla"] if name == "a" else ["method=sjd", "window=4"]
    return ["run", *REDUCED, *more, "prompts=p.txt", f"n={rng.choice([2, 3])}", "out=out/run"]


def rows(rng: random.Random, box: Path) -> list[str]:
    source = rng.choice(["runs/c/row.csv", "runs/b/row.csv", "audit.csv"])
    text = (MATERIAL / source).read_text()
    content = bad_rows(rng, text) if rng.random() < 0.7 else bad_bytes(rng, text.encode())
    (box / "in/rows.csv").write_bytes(content)
    if source != "audit.csv" and rng.random() < 0.5:
        os.chdir(box / "out")  # where tables are drawn
        Path("results").mkdir()
        (box / "in/rows.csv").rename("results/coolsd_table1.csv")
        return ["tables", "coolsd_table1", "--no-run", "--format", "md,latex,csv"]
    return ["report", "in/rows.csv", "out=out/x.html", f"runs={MATERIAL / 'runs/c'}", "keep=out/kept"]


def arrays(rng: random.Random, box: Path) -> list[str] | Callable[[], object]:
    source = rng.choice(["tables.npz", "reference.npz"])
    with np.load(MATERIAL / source) as found:
        parts: dict[str, Any] = dict(found)
    name = rng.choice(list(parts))
    kind = rng.randrange(8)
    if kind == 0:
        parts[name] = np.array([{"a": 1}], dtype=object)
    elif kind == 1:
        parts[name] = parts[name].astype(rng.choice(["U5", "complex64", "int8", "S3", "bool", "M8[s]"]))
    elif kind == 2:
        parts[name] = parts[name] * rng.choice([np.nan, np.inf, -1, 0, 2, 1e300])
    elif kind == 3:
        parts[name] = np.zeros(rng.choice([(), (0,), (1, 0), (3,), (2, 2, 2)]))
    elif kind == 4:
        parts[f"p{rng.choice([3, 7, 10**30])}"] = parts.pop(name)
    elif kind == 5:
        del parts[name]
    path = box / "in/a.npz"
    np.savez(path, **parts)
    if kind == 6:
        path.write_bytes(bad_bytes(rng, path.read_bytes()))
    elif kind == 7:  # a header that promises more than there is, or another member
        with zipfile.ZipFile(path, "w") as z:
            for key in parts:
                head = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({10 ** rng.randrange(1, 15)}, 8)}}".ljust(
                    117
                )
                z.writestr(f"{key}.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + head.encode() + b"\n")
    if source == "reference.npz":
        return lambda: reference.read(Path("in/a.npz"), 8)
    return ["audit", "method=sd", "audit.samples=1000", "audit.tables=in/a.npz", "out=out/a.csv"]


class Code:
    """What a pickle may carry."""

    def __reduce__(self) -> Any:
        return (os.system, ("touch escape",))


def checkpoints(rng: random.Random, box: Path) -> list[str] | Callable[[], object]:
    if rng.random() < 0.3:
        return embedded(rng, box)
    form = rng.choice(["safetensors", "pt"])
    tensors: dict[str, Any] = load_file(MATERIAL / "linear.safetensors")
    name = rng.choice(list(tensors))
    kind = rng.randrange(8)
    if kind == 0:
        tensors[name] = tensors[name] * rng.choice([float("nan"), float("inf"), 1e38])
    elif kind == 1:
        tensors[name] = tensors[name].to(rng.choice([torch.float16, torch.int8, torch.bool, torch.complex64]))
    elif kind == 2:
        tensors[name] = torch.zeros(rng.choice([(), (0,), (3, 4, 1), (4, 3), (3,)]))
    elif kind == 3:
        tensors[rng.choice([h for h in HOSTILE if "\ud800" not in h])] = tensors.pop(name)
    elif kind == 4 and form == "pt":
        tensors[name] = rng.choice([Code(), [1], None, "text", tensors[name].to_sparse()])
    path = box / f"in/w.{form}"
    if form == "pt":
        torch.save(rng.choice([tensors, {"model": tensors}, {"model": [tensors]}, next(iter(tensors.values()))]), path)
    else:
        save_file({key: t.contiguous() for key, t in tensors.items()}, path)
    if kind >= 6:
        path.write_bytes(bad_bytes(rng, path.read_bytes()))
    table = {"weight": ParameterSlice("weight"), "bias": ParameterSlice("bias")}
    return lambda: official.load(
        lambda: nn.Linear(4, 3), official.open_source(path, ["model"]), table, "cpu", torch.float32
    )


def embedded(rng: random.Random, box: Path) -> list[str]:
    """The embedded model's files, one of them damaged or another's."""
    assets = Path(cli.__file__).parents[1] / "assets"
    names = ["scenes_target", "scenes_tokenizer", "scenes_text"]
    hurt = rng.choice(names)
    for name in names:
        place = box / f"in/{name}.safetensors"
        if name != hurt:
            place.symlink_to(assets / place.name)
            continue
        content = (assets / place.name).read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        kind = rng.randrange(5)
        if kind == 0:
            content = content[: rng.choice([0, 4, 8, 100, len(content) // 2, len(content) - 1])]
        elif kind == 1:
            content = (assets / f"{rng.choice(['scenes_text', 'scenes_reader'])}.safetensors").read_bytes()
        elif kind == 2:  # infinity in the first tensor
            content = content[: 8 + size] + b"\x00\x7c" * 8 + content[8 + size + 16 :]
        else:
            head = json.loads(content[8 : 8 + size])
            meta = head["__metadata__"]
            if kind == 3:
                config = bad_json(rng, json.loads(meta["config"]))
                meta["config"] = json.dumps(config)
            else:
                meta[rng.choice(list(meta))] = rng.choice([h for h in HOSTILE if "\ud800" not in h])
            made = json.dumps(head).encode()
            content = struct.pack("<Q", len(made)) + made + content[8 + size :]
        place.write_bytes(content)
    return ["run", "method=sjd", "weights=in", "n=1", "metrics=none", *QUICK, "out=out/r"]


COMMANDS = "run run run evaluate compare report audit bench probe tables reference list fetch train x".split()
PARAMETERS = (
    "method model drafter rule delta nu n seed tree window top_p dtype device data prompts protocol weights reference"
    " metrics batch +x ~n ++a.b data_dir metrics_dir engine experiment temperature cfg_scale audit.tables"
    " bench.steps"
).split()


def words(rng: random.Random, box: Path) -> list[str]:
    """Command lines: unknown commands, keys and values, and YAML of one's own."""
    command = rng.choice(COMMANDS)
    values = [*HOSTILE, "vanilla", "cool_sd", "llamagen_xl", "1", "2.5", "[1,2]", "{a:1}", "a,b", "in", "out/x"]
    given = []
    for _ in range(rng.randrange(1, 3)):
        value = rng.choice(values)
        given.append(rng.choice([f"{rng.choice(PARAMETERS)}={value}", value]))
    given = [word for word in given if "\0" not in word]  # no argument can hold one
    if command == "run":
        named = {word.split("=")[0].lstrip("+~") for word in given}
        given += [w for w in [*REDUCED, "method=vanilla", "n=1", "out=out/r"] if w.split("=")[0] not in named]
        if not {"n", "model", "reduced", "method", "experiment", "protocol", "out"}.isdisjoint(named):
            given += ["nothing=1"]  # whatever they chose, no job begins
    elif command in ("audit", "bench", "probe", "train", "fetch", "tables", "reference"):
        given += ["nothing=1"]
    elif command == "report":
        given += ["out=out/x.html"]
    return [command, *given]


def counts(rng: random.Random, box: Path) -> list[str]:
    """Counts far above what any run has, which must be refused before anything is made of that size."""
    if rng.random() < 0.3:
        size = [rng.randrange(60, 1000), rng.randrange(60, 1000), rng.randrange(1, 500)]
        dynamic = [f"depth={size[0]}", f"width={size[1]}"]
        if rng.random() < 0.5:
            return ["run", "weights=random", "method=eagle2", *dynamic, "nodes=250", "n=1", *QUICK, "out=out/r"]
        shape = rng.choice(["full", "comb"])
        words = ["method=sjd_pac", *dynamic, f"tree={shape}", f"window={min(size[2], 59)}"]
        return ["run", "weights=random", *words, "n=1", *QUICK, "out=out/r"]
    if rng.random() < 0.2:
        paths = ",".join(f"[{rng.randrange(9)}]" for _ in range(rng.choice([2100, 4000, 1_000_000])))
        return ["run", "method=eagle1", f"tree=[{paths}]", "out=out/r"]
    name = rng.choice([n for n, p in TABLE.items() if p.kind == "integer" and p.high is not None])
    high = TABLE[name].high
    assert high is not None
    value = int(high) + 1 if rng.random() < 0.3 else int(high) * 10 ** rng.choice([1, 3, 9, 50, 300, 5000])
    text = "9" * 5000 if value.bit_length() > 14_000 else str(value)
    own = {
        "n": [
            ["audit", f"audit.samples={text}"],
            ["probe"],
            ["train", "drafter=eagle"],
            ["bench", "bench.steps=" + text],
        ],
        "seed": [["audit", f"audit.seed={text}"], ["probe"]],
    }
    if name in own and rng.random() < 0.5:
        command = rng.choice(own[name])
        return command if any("=" + text in word for word in command) else [*command, f"{name}={text}"]
    owner = re.search(r"(model|drafter|rule|method) (\w+)", " ".join(parameters.owners(name)))
    chosen = [f"{owner[1]}={owner[2]}"] if owner else []
    return ["run", *chosen, f"{name}={text}", "out=out/r"]


def names(rng: random.Random, box: Path) -> list[str]:
    """Files and folders of any name, and what is no file."""
    letters = "aü ,=[](){}'\"$\\~-#*;:%@!|&<>?😀.+"
    name = "".join(rng.choices(letters, k=rng.randrange(1, 9)))
    if rng.random() < 0.2:
        name = rng.choice([h for h in HOSTILE if not {"\0", "\ud800", "/"} & set(h) and len(h) < 60]) + "x"
    path = box / "in" / f"{name}.txt"
    kind = rng.randrange(10)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(rng.choice(["/dev/zero", "/dev/random", "/nowhere", "."]))
    elif kind == 3:
        with path.open("wb") as f:
            f.truncate(2**30)
    else:
        path.write_bytes(rng.choice([b"a cat\n", b"a cat\n", b"", b"\xff\xfe", b"x" * 1_000_000]))
    given = f"prompts=in/{name}.txt" if rng.random() < 0.9 else f"prompts='in/{name}.txt'"
    if rng.random() < 0.2:
        shutil.copy(MATERIAL / "runs/c/images/00000.png", box / "in/1.png")
        return ["evaluate", "in", given, "metrics=[scenes_reward]", "partial=true", f"out=out/{name}"]
    return ["run", *REDUCED, "method=vanilla", given, "n=1", f"out=out/{name}"]


KINDS: dict[str, tuple[Make, int]] = {
    "prompts": (prompts, 4),
    "pictures": (pictures, 3),
    "run folders": (run_folder, 6),
    "rows": (rows, 4),
    "arrays": (arrays, 3),
    "checkpoints": (checkpoints, 3),
    "words": (words, 4),
    "counts": (counts, 2),
    "names": (names, 3),
}


# --- watching ---------------------------------------------------------------------------------------------------------


class Hang(BaseException):
    """Raised by the clock; nothing but this script catches it."""


_watched: Path | None = None  # the only folder that may be written to
_escapes: list[str] = []
_WRITING = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
_FORBIDDEN = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "socket.connect"}


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _watched is None:
        return
    if event in _FORBIDDEN:
        _escapes.append(f"{event} {args!r:.200}")
    elif event == "open":
        path, _, flags = args
        if isinstance(path, int) or not (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            return
        _seen(path, event)
    elif event in _WRITING:
        two = event in ("os.rename", "os.link")
        folders = [fd for fd in args[2 if two else 1 :] if isinstance(fd, int)] if event != "os.chmod" else [args[2]]
        for path, fd in zip(args[: 2 if two else 1], [*folders[-2 if two else -1 :], -1, -1]):
            _seen(path, event, fd)


def _seen(path: Any, event: str, folder: int = -1) -> None:
    """Notes a path that is touched, relative to an open folder where one is given."""
    if isinstance(path, int):
        return
    start = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else ""
    place = os.path.realpath(os.path.join(start, os.fsdecode(path)))
    if place == os.devnull or (event == "os.mkdir" and os.path.isdir(place)):
        return
    if _watched is not None and not Path(place).is_relative_to(_watched):
        _escapes.append(f"{event} {place!r:.200}")


@contextlib.contextmanager
def watch(folder: Path) -> Iterator[None]:
    global _watched

    def ring(*_: object) -> None:
        raise Hang

    _watched = folder.resolve()
    _escapes.clear()
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _watched = None


def run_one(what: list[str] | Callable[[], object]) -> tuple[int, str]:
    """Exit code, and everything that was printed."""
    if callable(what):  # what no quick command reaches
        original, cli.command = cli.command, lambda name: lambda words: (what() and 0) or 0
        try:
            return run_one(["call"])
        finally:
            cli.command = original
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8", "strict", write_through=True)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = cli.main(what)
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 1
    return code, printed.buffer.getvalue().decode()


def faults(code: int, printed: str, seconds: float, out: Path) -> list[str]:
    found = []
    if code not in (0, 2):
        found.append(f"exit code {code}")
    if "Traceback (most recent call last)" in printed:
        found.append("a traceback")
    if code == 2 and sum(line.startswith("specbench: ") for line in printed.splitlines()) != 1:
        found.append("not one sentence")
    if seconds > LIMIT:
        found.append(f"{seconds:.1f} s")
    if any(sign in printed for sign in ("\x1b]", "\x1b[2J", "\0")):
        found.append("control characters on the terminal")
    for path in out.rglob("*"):
        if path.suffix in (".html", ".md", ".tex") and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            if "<script>alert(1)" in text or "<img src=x" in text:
                found.append(f"active markup in {path.name}")
            if path.suffix == ".tex" and re.search(r"\\input\{/etc", text):
                found.append(f"an active command in {path.name}")
    return found + [f"outside: {e}" for e in _escapes]


def one(seed: int, number: int, kind: str | None, verbose: bool) -> tuple[str, list[str], float, int]:
    rng = random.Random(f"{seed}/{number}")
    name = kind or rng.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
    box = Path(tempfile.mkdtemp(prefix="box-", dir=MATERIAL))
    (box / "in").mkdir()
    (box / "out").mkdir()
    os.chdir(box)
    code, printed, hung = -1, "", False
    try:
        what = KINDS[name][0](rng, box)
        began = time.monotonic()
        try:
            with watch(box / "out"):
                code, printed = run_one(what)
        except Hang:
            hung = True
        seconds = time.monotonic() - began
        bad = [f"hung for {LIMIT:g} s"] if hung else faults(code, printed, seconds, box / "out")
        if verbose or bad:
            shown = what if isinstance(what, list) else ["(a call)"]
            print(f"\n#{number} {name} {[w[:120] for w in shown]}")
            print(f"  exit code {code}, {seconds:.2f} s: {'; '.join(bad) or 'good'}")
            print("  " + " ".join(printed.split())[-700:])
        return name, bad, seconds, code
    finally:
        os.chdir(MATERIAL)
        shutil.rmtree(box)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--only", type=int, help="run one input again, and show it")
    asked = parser.parse_args()
    sys.addaudithook(_hook)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            prepare()
        numbers = [asked.only] if asked.only is not None else range(asked.first, asked.first + asked.inputs)
        counts: Counter[tuple[str, int]] = Counter()
        wrong, slowest, began = 0, (0.0, -1), time.monotonic()
        for number in numbers:
            name, bad, seconds, code = one(asked.seed, number, asked.kind, asked.only is not None)
            counts[name, code] += 1
            wrong += bool(bad)
            slowest = max(slowest, (seconds, number))
            if sys.stderr.isatty() or number % 100 == 99:
                print(f"{number + 1 - asked.first} inputs, {wrong} failed", file=sys.stderr)
        for name in KINDS:
            told = ", ".join(f"{n} with exit code {code}" for (k, code), n in sorted(counts.items()) if k == name)
            print(f"{name:<12} {told or 'none'}")
        total, spent = sum(counts.values()), time.monotonic() - began
        print(f"{total} inputs, {wrong} failed, {spent:.0f} s; the slowest was number {slowest[1]}, {slowest[0]:.1f} s")
        return 1 if wrong else 0
    finally:
        os.chdir("/")
        shutil.rmtree(MATERIAL, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
