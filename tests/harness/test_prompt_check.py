"""Prompts that a model cannot read are refused before anything is loaded or written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from commands import Call, row_of
from rehearsal.vocabularies import chameleon_names, save_chameleon

from specbench import data
from specbench.config import configuration, registry
from specbench.errors import UsageError
from specbench.harness.run import check_prompts
from specbench.rows.journal import read_records
from specbench.rows.remark import remark, remarks_of

SMALL = ("weights=random", "reduced=true", "dtype=float32", "device=cpu", "warmup=0", "metrics=none")
CAPTIONED = "lumina_mgpt anole emu3 janus_pro_1b simplear_05b lumina_mgpt2".split()
PROMPTS = ["a red fox", "word " * 80, "two boats", "w " * 90, "word " * 80]


def items(prompts: list[str] = PROMPTS) -> list[data.Item]:
    return [data.Item(i, prompt, None, f"p{i}") for i, prompt in enumerate(prompts)]


def test_the_longest_prompt_gives_the_length_that_all_need() -> None:
    """A word is a token, so the prompt p3 needs ten positions more than p1, which is named."""
    for model in CAPTIONED:
        cfg = configuration.compose([f"model={model}", *SMALL, "prompt_length=80"])
        with pytest.raises(UsageError) as refused:
            check_prompts(cfg, items())
        named = re.search(r"prompt (p\d) has (\d+) .*prompt_length=80 .*prompt_length=(\d+)", str(refused.value))
        assert named, model
        assert (named[1], int(named[3])) == ("p1", int(named[2]) + 10), model
        enough = configuration.compose([f"model={model}", *SMALL, f"prompt_length={named[3]}"])
        check_prompts(enough, items())
        model_of = registry.find("model", model)(enough, torch.device("cpu"), torch.float32)
        ids = model_of.encode(PROMPTS)
        assert (int(ids.valid.sum(1).max()), int(ids.valid[1].sum())) == (int(named[3]), int(named[2])), model
        with pytest.raises(UsageError):
            check_prompts(enough, items([*PROMPTS, "w " * 91]))


def test_class_numbers_and_names_are_checked() -> None:
    for model, good, bad, named in (
        ("llamagen_3b", "999", "1000", "p2"),
        ("llamagen_l", "0", "a fox", "p2"),
        ("mar_b", "12", "-1", "p2"),
        ("mar_scenes", "red circle", "purple wombat", "purple wombat"),
    ):
        words = SMALL if registry.model_sources().get(model) else ("weights=random",)
        cfg = configuration.compose([f"model={model}", *words])
        check_prompts(cfg, items([good, good]))
        with pytest.raises(UsageError, match=named):
            check_prompts(cfg, items([good, good, bad]))
    check_prompts(configuration.compose(["model=llamagen_xl", *SMALL]), items())  # captions are cut


def test_a_check_reads_no_weights(tmp_path: Path) -> None:
    """A folder with nothing but Chameleon's tokenizer of text, in which a token is a letter."""
    (tmp_path / "target").mkdir()
    (tmp_path / "tokenizer").mkdir()
    save_chameleon(tmp_path / "tokenizer" / "text_tokenizer.json", chameleon_names(range(64)))
    cfg = configuration.compose(["model=anole", f"weights={tmp_path}", "prompt_length=40"])
    check_prompts(cfg, items(["x" * 37]))  # and a begin token, an end of turn and an image start
    with pytest.raises(UsageError, match=r"p1 has 43 .*prompt_length=43"):
        check_prompts(cfg, items(["x" * 37, "x" * 40]))


def test_a_run_refuses_before_its_first_image_and_the_length_may_grow(tmp_path: Path, call: Call) -> None:
    file, out, other = tmp_path / "prompts.txt", tmp_path / "out", tmp_path / "other"
    file.write_text("\n".join(PROMPTS))
    words = ("run", "model=anole", *SMALL, "method=sjd", "baseline=false", f"prompts={file}")
    code, _, stderr = call(*words, "prompt_length=60", f"out={out}")
    assert (code, "prompt_length=93" in stderr, out.exists()) == (2, True, False)
    code, _, stderr = call(*words, "prompt_length=60", "--dry-run")
    assert (code, "prompt_length=93" in stderr) == (2, True)
    assert call(*words, "prompt_length=60", "n=1", f"out={out}")[0] == 0
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file() and path.name != "run.log"}
    for more in (["prompt_length=60", "n=all"], ["prompt_length=50", "n=1"], ["prompt_length=92"]):
        assert call(*words, *more, f"out={out}")[0] == 2, more
        assert {name: (out / name).read_bytes() for name in before} == before, more
    assert call(*words, "prompt_length=100", f"out={out}")[0] == 0
    assert remark("processes_differ", what="prompt length") in remarks_of(row_of(out))
    assert call(*words, "prompt_length=93", f"out={other}")[0] == 0
    grown, fresh = ([record.sha256 for record in read_records(path / "records.jsonl")] for path in (out, other))
    assert grown == fresh
    assert len(grown) == len(PROMPTS)
