"""`scripts/rehearse.py` with reduced networks: the files, the measurement and the budgets."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from functools import cache
from pathlib import Path

import pytest
import rehearse
import torch
from reference import manifest, needs_reference
from rehearsal import command, files, formats
from rehearse import Measured

from specbench.config import configuration, registry
from specbench.metrics import frechet, inception
from specbench.models.loading import official
from specbench.rows.csv_files import read_rows


def in_process(_: Path, scale: str) -> rehearse.Runner:
    """Runs stages as calls in this process: a new process needs seconds to import torch."""

    def run(stage: rehearse.Stage, log: Path) -> Measured:
        with log.open("w") as f, contextlib.redirect_stdout(f), contextlib.redirect_stderr(f):
            code = command.main([scale, *stage.arguments])
        return Measured(code, 1.0, 10**9, 2 * 10**9)

    return run


@pytest.mark.usefixtures("drawn_once")
@pytest.mark.parametrize(
    ("model", "columns"),
    [("llamagen_xl", ("fid", "kid", "clip_score", "image_reward", "hpsv2")), ("mar_l", ("fid", "kid"))],
)
def test_a_small_rehearsal_passes(
    model: str,
    columns: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Weights are loaded, decoded, scored and drawn, with the commands of the documentation only."""
    work, out = tmp_path / "work", tmp_path / "rows.csv"
    work.mkdir()
    # the square root of a product of 2048 x 2048 takes seconds; test_inception has its values
    monkeypatch.setattr(frechet, "distance", lambda features, real: float(torch.dist(features.mean(0), real.mean)))
    monkeypatch.setattr(inception, "load", cache(inception.load))
    monkeypatch.chdir(work)
    monkeypatch.setenv("SPECBENCH_HOME", str(work / "home"))
    published = dict(registry.evaluators())
    code = rehearse.main([model, "--scale=small", f"--work={work}", f"--out={out}"], in_process)
    assert code == 0, capsys.readouterr().out
    assert published == registry.evaluators()  # the checksums are restored
    rows = rehearse.ROWS.read(out)
    assert [row["stage"] for row in rows] == ["reference", "load", "run", "evaluate", "tables"]
    assert {(row["ok"], row["scale"], row["anonymous_gb"]) for row in rows} == {("true", "small", "1.00")}
    [row] = read_rows(work / "first/row.csv")
    assert row["weights"].startswith("official:")
    assert all(math.isfinite(row[column]) for column in columns)


#: Folder of a drafter -> the kind of its network.
_NETWORKS = {"eagle": "eagle", "draft": "draft_model"}


@pytest.mark.parametrize("model", ["anole", "janus_pro_7b", "lumina_mgpt2", "emu3", "llamagen_3b"])
def test_generated_files_are_read_and_draw(model: str, tmp_path: Path) -> None:
    """For each family: its own loader reads the files, and the distribution of a token is not flat."""
    for part, build in files.of_model(model, True).items():
        build(tmp_path / part)
    cfg = configuration.compose([f"model={model}", f"weights={tmp_path}", "reduced=true", "dtype=float32"])
    bundle = registry.find("model", model)(cfg, torch.device("cpu"), torch.float32)
    conditioning = bundle.encode(["7" if model == "llamagen_3b" else "a red cat on the table"])
    with torch.inference_mode():
        tokens = torch.zeros(2, 4, dtype=torch.int64)
        states = bundle.target.uncached(bundle.target.condition(conditioning, True), tokens)
        logits = bundle.target.head(states)
    assert logits.isfinite().all()
    assert logits.std(-1).min() > 0.1
    for part in ("eagle", "draft"):
        assert not (tmp_path / part).is_dir() or bundle.drafter_network(_NETWORKS[part]) is not None


@needs_reference
@pytest.mark.parametrize(
    ("model", "part", "facts"),
    [
        ("llamagen_xl", "target", "t2i_XL_stage1_256.pt"),
        ("llamagen_xl", "eagle", "llamagen_drafter_pytorch_model.bin"),
        ("llamagen_xl", "tokenizer", "vq_ds16_t2i.pt"),
        ("lumina_mgpt", "target", "Lumina-mGPT-7B-768"),
        ("anole", "target", "Anole-7b-v0.1-hf"),
        ("janus_pro_7b", "target", "Janus-Pro-7B"),
        ("emu3", "target", "Emu3-Gen"),
        ("emu3", "tokenizer", "Emu3-VisionTokenizer"),
    ],
)
def test_tensors_have_the_names_and_shapes_of_the_published_ones(
    model: str, part: str, facts: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: formats.Shapes = {}
    for name in ("write", "write_shards"):
        monkeypatch.setattr(files, name, lambda path, shapes, *more, **others: made.update(shapes))
    files.of_model(model, False)[part](tmp_path)
    _, source = manifest(facts)
    for name in (name for name in made if not name.endswith(".rest")):
        published = source.tensors[name]
        assert (tuple(made[name].shape), made[name].dtype) == (published.shape, published.dtype), name
    whole = sum(i.dtype.itemsize * math.prod(i.shape) for i in source.tensors.values())
    assert sum(tensor.nbytes for tensor in made.values()) == pytest.approx(whole, rel=0.02)


def test_a_stage_outside_of_its_budget_fails(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("printed text")
    stage = rehearse.Stage("run", ("run", "a b"), 2, 10)
    for measured, ok in (
        (Measured(0, 5.0, 10**9, 10**10), "true"),  # mapped files may be larger than the budget
        (Measured(0, 5.0, 3 * 10**9, 3 * 10**9), "false"),
        (Measured(0, 11.0, 10**9, 10**9), "false"),
        (Measured(2, 5.0, 10**9, 10**9), "false"),
    ):
        rows = rehearse.rehearse([stage, stage], lambda *_, measured=measured: measured, tmp_path, {"model": "m"}, None)
        assert [row["ok"] for row in rows] == [ok] * (1 if measured.code else 2), measured
        assert rows[0]["command"] == "specbench run 'a b'"
    (tmp_path / "load.log").write_text("asking\nloaded 4000000000 bytes of llamagen_xl\n")
    load = rehearse.Stage("load", ("load",), 20, 10)
    for gigabytes, ok in ((5, "true"), (8, "false")):  # two copies of the networks in memory
        measured = Measured(0, 1.0, gigabytes * 10**9, 0)
        [row] = rehearse.rehearse([load], lambda *_, measured=measured: measured, tmp_path, {}, None)
        assert (row["ok"], row["budget_gb"]) == (ok, "5.50")


HOLD_MEMORY = """
import mmap, sys, time
private = bytearray(b"x") * (60 << 20)
with open(sys.argv[1], "rb") as f:
    mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
read = sum(mapped[i] for i in range(0, len(mapped), 4096))
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not report it")
def test_memory_of_files_is_separated_from_a_process_s_own(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(80 << 20))

    def run(most: float, seconds: str) -> Measured:
        line = [sys.executable, "-S", "-c", HOLD_MEMORY, str(file), seconds]
        return rehearse.measured(line, tmp_path, dict(os.environ), tmp_path / "log", most, 60)

    measured = run(1e9, "0.3")
    assert measured.code == 0, (tmp_path / "log").read_text()
    assert 60 << 20 <= measured.anonymous < 100 << 20
    assert measured.resident >= measured.anonymous + (80 << 20)
    stopped = run(40e6, "50")
    assert (stopped.stopped, stopped.code) == (True, -9)
    assert stopped.seconds < 40


def test_a_tensor_of_zeros_takes_no_disk_space(tmp_path: Path) -> None:
    shapes = {
        "norm.weight": formats.shape(torch.bfloat16, 3),
        "zeros": formats.shape(torch.float32, 1 << 22, 1),
        "w": formats.shape(torch.float16, 64, 100),
    }
    formats.write(tmp_path / "a.safetensors", shapes, holes="zeros")
    formats.write(tmp_path / "b.bin", shapes, "model", "zeros")
    for name in ("a.safetensors", "b.bin"):
        path = tmp_path / name
        assert path.stat().st_size > 1 << 24
        assert path.stat().st_blocks * 512 < 1 << 20
        weights = dict(official.open_source(path, ("model",)).read(shapes))
        assert {n: (t.shape, t.dtype) for n, t in weights.items()} == {n: (t.shape, t.dtype) for n, t in shapes.items()}
        assert (weights["norm.weight"] == 1).all()
        assert not weights["zeros"].any()
        # unit gain: 0.1 per value; the estimate of 6,400 values is within 6 standard errors of 0.1 / sqrt(12,800)
        assert abs(float(weights["w"].float().std()) - 0.1) < 6 * 0.1 / 12800**0.5
