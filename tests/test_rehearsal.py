"""`scripts/rehearse.py` with reduced networks: the files, the servers, the measurement and the budgets."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import rehearse
import torch
from reference import manifest, needs_reference
from rehearsal import command, files, formats, hub, processes
from rehearsal.processes import Measured

from specbench.config import configuration, registry
from specbench.models.loading import official
from specbench.rows.csv_files import read_rows


def in_process(work: Path, root: str) -> rehearse.Runner:
    """Runs stages as calls in this process: a new process needs seconds to import torch."""

    def run(stage: rehearse.Stage, log: Path) -> Measured:
        with log.open("w") as f, contextlib.redirect_stdout(f), contextlib.redirect_stderr(f):
            code = command.main([str(work / "replaced.json"), *stage.arguments])
        return Measured(code, 1.0, 10**9, 2 * 10**9)

    return run


def test_a_small_rehearsal_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights are fetched with the hub's protocol, loaded, decoded, scored and drawn, with the commands of the
    documentation only."""
    work, out = tmp_path / "work", tmp_path / "rows.csv"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name, folder in (("SPECBENCH_HOME", "home"), ("HF_HOME", "hf"), ("HOME", "")):
        monkeypatch.setenv(name, str(work / folder))

    def runner(folder: Path, root: str) -> rehearse.Runner:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", root)
        url = f"{root}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url)
        return in_process(folder, root)

    arguments = ["llamagen_xl", "--scale=small", f"--work={work}", "--keep", f"--out={out}"]
    published = dict(registry.evaluators())
    code = rehearse.main(arguments, runner)
    assert code == 0, capsys.readouterr().out
    assert published == registry.evaluators()  # the checksums are restored
    rows = rehearse.ROWS.read(out)
    assert [row["stage"] for row in rows] == [stage.name for stage in rehearse.stages("llamagen_xl", True)]
    assert {(row["ok"], row["scale"], row["anonymous_gb"]) for row in rows} == {("true", "small", "1.00")}
    [loaded] = [row["networks_gb"] for row in rows if row["networks_gb"]]
    assert loaded == "0.01"  # nearly all of it is the pixel tokenizer
    assert rehearse.main([*arguments, "--stages=tables"], runner) == 0
    assert [row["stage"] for row in rehearse.ROWS.read(out)[len(rows) :]] == ["tables"]
    [row] = read_rows(work / "first/row.csv")
    assert row["weights"].startswith("official:")
    assert all(math.isfinite(row[column]) for column in ("clip_score", "image_reward", "hpsv2"))


#: Folder of a drafter -> the kind of its network.
_NETWORKS = {"eagle": "eagle", "draft": "draft_model"}


@pytest.mark.parametrize("model", ["anole", "janus_pro_7b", "emu3", "llamagen_3b"])
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
    made: dict[str, formats.Entry] = {}
    for name in ("write_pickled", "write_safetensors", "write_shards"):
        monkeypatch.setattr(files, name, lambda path, entries, *more: made.update(entries))
    files.of_model(model, False)[part](tmp_path)
    _, source = manifest(facts)
    surplus = {name for name in made if name.endswith(".rest")}
    for name in set(made) - surplus:
        assert (made[name].shape, made[name].dtype) == (source.tensors[name].shape, source.tensors[name].dtype), name
    whole = sum(i.dtype.itemsize * math.prod(i.shape) for i in source.tensors.values())
    assert sum(e.bytes for e in made.values()) == pytest.approx(whole, rel=0.02)


def test_a_stage_outside_of_its_budget_fails(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("printed text")
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
    log.rename(tmp_path / "load.log").write_text("asking\nloaded 4000000000 bytes of llamagen_xl\n")
    load = rehearse.Stage("load", ("load",), 20, 10)
    for gigabytes, ok in ((5, "true"), (8, "false")):  # two copies of the networks in memory
        measured = Measured(0, 1.0, gigabytes * 10**9, 0)
        [row] = rehearse.rehearse([load], lambda *_, measured=measured: measured, tmp_path, {}, None)
        assert (row["ok"], row["budget_gb"]) == (ok, "5.50")


def test_stages_are_repeated_only_in_an_existing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--stages=run"], ["--stages=fetch data", f"--work={tmp_path}"]):
        with pytest.raises(SystemExit) as e:
            rehearse.main(["llamagen_xl", "--scale=small", *more])
        assert e.value.code == 2
        assert "--stages takes load, run, evaluate, tables" in capsys.readouterr().err


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
        return processes.run(line, tmp_path, dict(os.environ), tmp_path / "log", most, 60)

    measured = run(1e9, "0.3")
    assert measured.code == 0, (tmp_path / "log").read_text()
    assert 60 << 20 <= measured.anonymous < 100 << 20
    assert measured.resident >= measured.anonymous + (80 << 20)
    stopped = run(40e6, "50")
    assert (stopped.stopped, stopped.code) == (True, -9)
    assert stopped.seconds < 40


def test_a_tensor_of_zeros_takes_no_disk_space(tmp_path: Path) -> None:
    entries = {
        "norm.weight": formats.entry("norm.weight", (8,), torch.bfloat16),
        "zeros": formats.entry("zeros", (1 << 22,), torch.float32, hole=True),
        "w": formats.entry("w", (64, 100), torch.float16),
    }
    formats.write_safetensors(tmp_path / "a.safetensors", entries)
    formats.write_pickled(tmp_path / "b.bin", entries, "model")
    for name in ("a.safetensors", "b.bin"):
        path = tmp_path / name
        assert path.stat().st_size > 1 << 24
        assert path.stat().st_blocks * 512 < 1 << 20
        source = official.open_source(path, ("model",))
        weights = dict(source.read(entries))
        assert {n: (t.shape, t.dtype) for n, t in weights.items()} == {
            n: (e.shape, e.dtype) for n, e in entries.items()
        }
        assert (weights["norm.weight"] == 1).all()
        assert not weights["zeros"].any()
        # unit gain: 0.1 per value; the estimate of 6,400 values is within 6 standard errors of 0.1 / sqrt(12,800)
        assert abs(float(weights["w"].float().std()) - 0.1) < 6 * 0.1 / 12800**0.5


def test_the_end_of_a_file_is_served(tmp_path: Path) -> None:
    """An interrupted download continues."""
    (tmp_path / "o").mkdir()
    content = bytes(range(256)) * 8192
    (tmp_path / "o/m.bin").write_bytes(content)
    served = hub.Hub()
    served.add("o/m", tmp_path / "o")
    with served.serving():
        address = f"{served.root}/o/m/resolve/main/m.bin"
        with urlopen(Request(address, headers={"Range": "bytes=2097000-"})) as answer:
            assert (answer.status, answer.read()) == (206, content[2097000:])
            assert answer.headers["Content-Range"] == f"bytes 2097000-{len(content) - 1}/{len(content)}"
