"""A trained drafter of a real target: `train` writes it where every command looks for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rehearsal import files

from specbench import cli
from specbench.config import configuration, registry
from specbench.errors import UsageError
from specbench.rows.csv_files import read_rows
from specbench.training import recipes

SMALL = "n=8 batch=4 steps=4 warmup=1 held_out=0.25 save_every=4 validate_every=4 decode_batch=8 precision=float32"


@pytest.mark.parametrize(
    ("model", "data", "more"), [("llamagen_3b", "imagenet", []), ("emu3", "prompts", ["prompts=captions.txt"])]
)
def test_a_run_finds_the_drafter_without_an_argument(
    model: str,
    data: str,
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On files of reduced size. Before the training, the run is refused; after it, `train` printed the command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path / "home"))
    (tmp_path / "captions.txt").write_text("\n".join(f"a photo of {i} cats" for i in range(8)))
    for part, build in files.of_model(model, True).items():
        build(tmp_path / "home/models" / model / part)
    on = [f"model={model}", "reduced=true", "dtype=float32", f"data={data}", *more]
    run = ["run", *on, "method=eagle1", "n=1", "baseline=false", "metrics=none", "warmup=0", "out=run"]
    assert cli.main(run) == 2
    assert f"specbench train drafter=eagle model={model}" in capsys.readouterr().err
    training = ["train", *on, "drafter=eagle", "source=self", "noise=0", "lr=1e-2", *SMALL.split()]
    assert cli.main(training) == 0
    assert "drafter_weights" not in capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / "home/models" / model / "eagle" / registry.DRAFTER_FILE).is_file()
    assert cli.main(run) == 0
    [row] = read_rows(tmp_path / "run/row.csv")
    assert row["weights"].startswith("official:")
    assert row["weights"].count("+") == 1  # of the target and of the drafter
    if model == "llamagen_3b":  # a line without its drafter is named; the others run and are drawn
        assert cli.main(["tables", "lantern_table1", "--model", model, "--n", "1", "reduced=true", "warmup=0"]) == 2
        captured = capsys.readouterr()
        assert "Medusa" in captured.err
        assert "| EAGLE-2 | **" in captured.out
        assert {row["method"] for row in read_rows(tmp_path / "results/lantern_table1.csv")} >= {"eagle2"}


def test_a_published_drafter_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specbench.training import command

    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path))
    plan = recipes.plan(["drafter=eagle", "model=llamagen_xl", "images=there"])
    assert plan.out == tmp_path / "models/llamagen_xl/eagle"
    plan.out.mkdir(parents=True)
    (plan.out / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UsageError, match="out=DIR"):
        command._check_note(plan.out, {})
    cfg = configuration.compose(["model=llamagen_xl", "method=eagle1"])
    (plan.out / registry.TRAINING_STATE).mkdir()
    assert "eagle" in registry.absent_folders(cfg)  # a training that is not finished
