"""Values that are too large or too long, and paths that are no files, are refused before any work; names mean what a
shell user expects."""

from __future__ import annotations

import os
import re
import shlex
import time
from pathlib import Path

import numpy as np
import pytest
from commands import Call, row_of, usage_error
from fake_pipeline import FakePipeline, at, interrupt
from PIL import Image

from specbench.config import command_line, configuration, parameters
from specbench.config.parameter import DEEP, DRAFT, LONGEST, PROMPTS
from specbench.data import base
from specbench.decoding import trees
from specbench.decoding.drafters.dynamic import Grower
from specbench.decoding.rng import RandomStreams
from specbench.errors import UsageError
from specbench.harness import method, run

FAST = ("run", "metrics=none", "n=2", "baseline=false", "warmup=0")


def picture(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path)


def refused(call: Call, *words: str) -> str:
    """The message of a command that is refused at once."""
    began = time.monotonic()
    code, out, err = call(*words)
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1, err
    assert time.monotonic() - began < 10  # a loaded machine; it takes none of them a second
    return err


def test_a_count_has_a_bound_that_is_named(call: Call) -> None:
    """Such counts took gigabytes, or ended in a traceback."""
    picture(Path("pictures/0.png"))
    for words, limit in [
        ("run n=1000000000", PROMPTS),
        ("evaluate pictures data=scenes n=1000000000", PROMPTS),
        ("probe n=1000000000", PROMPTS),
        ("audit method=sjd audit.samples=1000000000", 10_000_000),
        ("audit audit.seed=100000000000000000000", 2**53),
        ("probe probe.offsets=1000000000", 10_000),
        ("bench bench.steps=1000000000", 10**6),
        ("bench bench.nodes=[1,1000000000]", 10**6),
        ("train drafter=eagle n=1000000000", 10_000_000),
        ("train drafter=eagle batch=1000000000", 2**16),
        ("train drafter=eagle steps=100000000000", 10**9),
        ("report pictures=1000000000", 10_000),
        ("run model=mar_scenes method=cspd gamma=1000000000", DRAFT),
    ]:
        assert re.search(rf"\b{limit}\b", refused(call, *words.split())), words


def test_every_count_of_a_run_is_bounded() -> None:
    """test_configs has a value above each bound."""
    high = {name: p.high for name, p in parameters.table().items() if p.kind == "integer" and not p.choices}
    assert [name for name, most in high.items() if most is None] == []
    expected = {"window": DRAFT, "nodes": DRAFT, "depth": DEEP, "width": DEEP, "seed": 2**63 - 1, "top_k": 2**31 - 1}
    assert high.items() >= expected.items()
    assert (trees.DRAFT, trees.DEEP) == (DRAFT, DEEP)  # the configuration is read without torch, which trees import


def test_the_bounds_refuse_nothing_that_anyone_runs() -> None:
    for word in ("n=50000", "n=1000000", "batch=512", "seed=9223372036854775807", "workers=256"):
        configuration.compose([word])
    run.check(configuration.compose(["weights=random", "method=sjd", "window=256", "device=cpu"]))
    RandomStreams([(2**63 - 1, 999_999)])  # what a seed is for
    with pytest.raises((ValueError, RuntimeError, OverflowError)):
        RandomStreams([(2**63, 0)])


def test_a_number_of_thousands_of_digits_costs_a_sentence(call: Call) -> None:
    for word in ["seed=" + "9" * 6000, "n=" + "9" * 400, "delta=" + "9" * 5000]:
        name = word.partition("=")[0]
        assert re.search(f"{name} .*digits", refused(call, "run", word)), name


def test_an_image_has_fewer_tokens_than_the_draft() -> None:
    """Reported before any model is loaded."""
    for model, words, tokens in (
        ("llamagen_scenes", ["method=sjd", "window=257"], 256),
        ("llamagen_xl_512", ["method=sjd", "window=1025"], 1024),
        ("anole", ["method=sjd", "window=1100"], 1057),
        ("llamagen_scenes", ["method=eagle2", "nodes=300"], 256),
        ("llamagen_scenes", ["method=eagle1", f"tree=[{','.join(f'[{i}]' for i in range(257))}]"], 256),
    ):
        cfg = configuration.compose([f"model={model}", "data=scenes", "weights=random", "device=cpu", *words])
        with pytest.raises(UsageError, match=f"an image of {model} has {tokens}"):
            run.check(cfg)
    method.check(configuration.compose(["model=mar_scenes", "data=scenes_classes"]))  # only its weights tell


def test_the_tokens_that_the_bound_knows_are_the_models() -> None:
    from specbench.models.loading import chameleon, scenes
    from specbench.models.loading.chameleon import ANOLE_SIZE
    from specbench.models.scenes_config import TARGET

    assert scenes.tokens_of_image(configuration.compose()) == TARGET.block_size
    side = ANOLE_SIZE // 16
    assert chameleon.tokens_of_image(configuration.compose(["model=anole"])) == side * (side + 1) + 1


def test_a_tree_is_counted_before_it_is_built() -> None:
    for make in [
        lambda: trees.window_paths(200, 900, 900, "full"),  # 900 ** 899 paths
        lambda: trees.window_paths(200, 900, 900, "comb"),
        lambda: Grower(250, 900, 900),
        lambda: trees.parse([[i % 7] for i in range(1_000_000)]),
        lambda: trees.parse([[0] * 100_000]),
        lambda: trees.parse([[10**9]]),
        lambda: trees.parse("-".join(["9"] * 900)),
        lambda: trees.parse("[" * 100_000),
    ]:
        began = time.process_time()
        assert len(usage_error(make)) < 500, make
        assert time.process_time() - began < 10, make


def test_a_tree_of_a_million_paths_is_refused_as_a_word_and_as_a_list(call: Call) -> None:
    word = f"tree=[{','.join(['[0]'] * 1_000_000)}]"
    assert f"at most {LONGEST}" in refused(call, "run", word)
    with pytest.raises(UsageError, match=f"at most {DRAFT}"):
        parameters.table()["tree"].checked("tree", [[0]] * 1_000_000)


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A folder of things that are not files of prompts."""
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    (tmp_path / "line.txt").write_text("x" * (base.LONGEST + 1))
    with (tmp_path / "big.txt").open("wb") as f:
        f.truncate(2**30)
    return tmp_path


def test_a_path_that_is_no_file_of_prompts_is_named_at_once(call: Call, odd: Path) -> None:
    for name, sentence in [
        ("pipe.txt", "pipe.txt is a pipe or a device"),
        ("zero.txt", "zero.txt is a pipe or a device"),
        ("/dev/zero", "/dev/zero is a pipe or a device"),
        ("folder.txt", "folder.txt is a folder"),
        (".", ". is a folder"),
        ("line.txt", f"shorten it to {base.LONGEST} at most"),
        ("big.txt", "big.txt is larger than 128 MiB"),
        ("~nobody-at-all/x.txt", "there is no file ~nobody-at-all/x.txt"),
    ]:
        assert sentence in refused(call, *FAST, f"prompts={name}", "out=first"), name
        assert not Path("first").exists(), name


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser reads every file")
def test_a_file_that_may_not_be_read(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("a cat\n")
    (tmp_path / "mine.txt").chmod(0)
    assert "mine.txt (Permission denied)" in refused(call, *FAST, "prompts=mine.txt")


def test_a_pipe_is_no_place_for_rows(call: Call, tmp_path: Path) -> None:
    """It used to be replaced by a file, or waited for."""
    os.mkfifo(tmp_path / "rows.csv")
    for command in ["audit method=vanilla", "bench", "probe"]:
        assert "rows.csv" in refused(call, *command.split(), "out=rows.csv"), command
        assert (tmp_path / "rows.csv").is_fifo(), command


def test_a_pipe_among_the_pictures_is_not_waited_for(call: Call, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    os.mkfifo(tmp_path / "pictures/0.png")
    code, _, err = call("evaluate", "pictures", "metrics=scenes_fid", "out=scored")
    assert (code, "0.png is not a file" in err) == (2, True)


NAMES = [
    "ü", "größe", "a b", "a,b", "a=b [x]", "(1)", "it's", 'say "x"', "a$b", "${x}", "{a: b}", "#x", "-x", "~x~",
    "a\\b", "null hypothesis", "true", "1.50", "a'b\"c", "'a' and 'b'", "a;b", "*", "%d", "@x", "!x", "a|b", "x:y",
]  # fmt: skip


def test_a_name_means_itself() -> None:
    """The shell removes its own quotes, and Hydra's grammar used to parse the text in them."""
    for name in NAMES:
        words = [f"prompts={name}.txt", f"out={name}", f"metrics_dir={name}/a", "n=1"]
        for matches in (
            configuration.compose(command_line.read(words)),
            configuration.grid(command_line.read(words), False)[0].cfg,
        ):
            found = matches.get("prompts"), matches.out, matches.metrics_dir
            assert found == (f"{name}.txt", name, f"{name}/a"), name


@pytest.mark.parametrize("name", ["größe, a=b [x] (1)", 'it\'s ${x} \\ "y"', "-~#*;"])
def test_a_run_of_any_name_can_be_continued(
    name: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command that is printed when it stops, by the same command, and by `resume`."""
    (tmp_path / f"{name}.txt").write_text("a cat\na dog\n")
    words = [*FAST, f"prompts={name}.txt", f"out={name}"]
    monkeypatch.setattr(run, "_load_pipeline", at(0, interrupt))
    code, _, err = call(*words)
    assert code == 130, err
    again = shlex.split(err[err.index("to continue: ") + 13 :])  # as a shell would read it
    assert again[0] == "specbench"
    monkeypatch.setattr(run, "_load_pipeline", FakePipeline)
    assert call(*again[1:])[0] == 0
    row = row_of(name)
    assert (row["n"], row["prompts"]) == (2, f"{name}.txt")
    assert "nothing left to do" in call(*words)[1]
    folder = f"./{name}" if name[0] == "-" else name
    assert call("status", folder)[0] == 0
    code, out, err = call("resume", folder, "metrics_dir=a: b, [c]")
    assert (code, "nothing left to do" in out) == (0, True), err
    assert {p.name for p in tmp_path.iterdir()} == {name, f"{name}.txt"}


def test_quotes_that_are_there_stay() -> None:
    for word, value in [
        ("out='\"a, b\"'", '"a, b"'),
        ("out='a, b'", "a, b"),
        ('out="a, b"', "a, b"),
        ("out='it\\'s'", "it's"),
        ("out=null", None),
        ("out=7", "7"),
        ("out=a/b.c-d", "a/b.c-d"),
        ("+out=a b", "a b"),
    ]:
        assert configuration.compose(command_line.read([word])).out == value, word
        assert command_line.read(command_line.read([word])) == command_line.read([word]), word


def test_a_quoted_value_is_read_back() -> None:
    for name in [*NAMES, "a\\", "\\'", "a\\\\b", "a\\\\", " x "]:
        assert configuration.compose([f"out={command_line.quoted(name)}"]).out == name, name


def test_paths_of_a_grid_may_have_any_letters(call: Call, tmp_path: Path) -> None:
    names = ["提示.txt", "é.txt", "b.txt", "a b(1).txt", "c,d.txt", "null.txt", "it's.txt", "[x].txt"]
    for name in names:
        (tmp_path / name).write_text("a red circle")
    cases = [
        (["提示.txt", "é.txt"], "提示.txt,é.txt"),
        (["b.txt", "é.txt", "a b(1).txt"], "b.txt,é.txt,a b(1).txt"),
        (["c,d.txt", "提示.txt"], "'c,d.txt',提示.txt"),
        (["b.txt", "c,d.txt"], 'b.txt, "c,d.txt"'),
        (["null.txt", "it's.txt", "[x].txt"], "null.txt,it's.txt,[x].txt"),
        (["b.txt", "é.txt", "提示.txt"], "choice(b.txt,'é.txt',提示.txt)"),
    ]
    for wanted, value in cases:
        words = command_line.read([f"prompts={value}", "data=prompts", "n=1"], multirun=True)
        assert [job.cfg.get("prompts") for job in configuration.grid(words, multirun=True)] == wanted, value
    words = command_line.read(["drafter_weights=null,official:mar_l", "model=mar_h", "n=1"], multirun=True)
    assert [job.cfg.drafter_weights for job in configuration.grid(words, multirun=True)] == [None, "official:mar_l"]
    assert command_line.read(["prompts=é.txt,b"]) == ["prompts='é.txt,b'"]  # without -m, one path


def test_a_comma_of_a_grids_folder_is_no_sweep(call: Call, tmp_path: Path) -> None:
    for name in ("one.txt", "two, too.txt"):
        (tmp_path / name).write_text("a cat\n")
    words = ("run", "-m", "metrics=none", "n=1", "baseline=false")
    assert call(*words, "delta=1,2", "out=a,b [c]", "prompts=two (1).txt")[0] == 2  # no such file exists
    assert call(*words, "delta=1,2", "out=a,b [c]", "prompts=one.txt")[0] == 0
    assert len(list((tmp_path / "a,b [c]").glob("*/row.csv"))) == 2
    assert call(*words, "prompts=one.txt,'two, too.txt'", "out=c")[0] == 0
    assert {row_of(file.parent)["prompts"] for file in Path("c").glob("*/row.csv")} == {"one.txt", "two, too.txt"}


def test_paths_of_other_commands_mean_themselves(call: Call, tmp_path: Path) -> None:
    assert call("audit", "method=vanilla", "audit.samples=1000", "out=a, b [c].csv")[0] == 0
    assert (tmp_path / "a, b [c].csv").is_file()
    assert "folder d, e" in refused(call, "train", "drafter=eagle", "images=d, e")
    assert "data=coco2017 needs" in refused(call, "probe", "n=1", "data=coco2017", "data_dir=d, e [f]")
    picture(tmp_path / "pictures (1), [x]/0.png")
    (tmp_path / "my, 'own' = [prompts].tsv").write_text("id\tprompt\n0\ta cat\n")
    words = ("metrics=fid", "metrics_dir=no, no", "prompts=my, 'own' = [prompts].tsv", "out=s=[t], u")
    assert call("evaluate", "pictures (1), [x]", *words)[0] == 3  # one image has no Fréchet distance
    assert row_of("s=[t], u")["prompts"] == "my, 'own' = [prompts].tsv"
    assert call("report", "s=[t], u", "out=my, page.html")[0] in (0, 2)
