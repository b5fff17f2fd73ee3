"""Data sets: the prompts of a run, their pairing, and the errors for damaged files."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import said

import specbench
from specbench import data, metrics
from specbench.config import configuration, parameters, registry
from specbench.config.run_config import PromptSelection
from specbench.data import Item, base, coco, prompts, scenes
from specbench.errors import UsageError
from specbench.metrics.scenes import readable
from specbench.models import evaluators
from specbench.rows import provenance
from specbench.storage.image_files import ImageArray

SHARED = Path(specbench.__file__).resolve().parents[2] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real prompt files are not beside the repository")

Load = Callable[..., list[Item]]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Load:
    """The prompts for the words of a command line; the home of fetched files is empty."""
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path / "home"))
    return lambda *words: data.load(configuration.compose(words).prompts)


def pairs(items: list[Item]) -> list[tuple[str, str]]:
    return [(item.id, item.prompt) for item in items]


def annotations(n: int = 12) -> dict[str, Any]:
    """Image 100 + i has the captions "image i, a", "image i, bb", "image i, c". Image 100 has none; image 101 has a
    blank one before the others."""
    images = [{"id": 100 + i, "file_name": f"{100 + i:012d}.jpg", "height": 4, "width": 4} for i in range(n)]
    captions = [
        {"id": 10 * i + k, "image_id": 100 + i, "caption": f"image {i}, {text}"}
        for k, text in enumerate(("a ", "bb", "c\n"))
        for i in range(1, n)
    ]
    captions.insert(0, {"id": 5000, "image_id": 101, "caption": " \n"})
    return {"images": images, "annotations": captions, "info": {}, "licenses": [], "categories": [{"id": 1}]}


def written(folder: Path, content: Any, file: str = "captions_val2017.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(("year", "sub"), [(2014, ""), (2017, "annotations")])
def test_coco_pairs_a_caption_with_its_own_image(year: int, sub: str, load: Load, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"captions_val{year}.json.*{tmp_path}/home/data/coco{year}.*data_dir"):
        load(f"data=coco{year}", "n=1")
    for folder in ("coco", f"home/data/coco{year}"):
        written(tmp_path / folder / sub, annotations(), f"captions_val{year}.json")
    items = load(f"data=coco{year}", "n=11", f"data_dir={tmp_path}/coco")
    assert [item.index for item in items] == list(range(11))
    assert {item.id for item in items} == {str(100 + i) for i in range(1, 12)}  # image 100 has no caption
    for item in items:
        assert item.prompt == f"image {int(item.id) - 100}, a"
        assert item.reference == f"{int(item.id):012d}.jpg"
        assert item.labels is None
    assert load(f"data=coco{year}", "n=3") == items[:3]


def test_the_order_of_the_file_does_not_choose(load: Load, tmp_path: Path) -> None:
    content = annotations()
    straight = load("data=coco2017", "n=5", f"data_dir={written(tmp_path / 'a', content)}")
    random.Random(0).shuffle(content["images"])
    content["annotations"].sort(key=lambda a: (-a["image_id"], a["id"]))  # an image's own captions stay in order
    assert load("data=coco2017", "n=5", f"data_dir={written(tmp_path / 'b', content)}") == straight


def test_captions_first_longest_random(load: Load, tmp_path: Path) -> None:
    written(tmp_path, annotations(300))

    def captions(*words: str) -> dict[str, str]:
        return {item.id: item.prompt for item in load("data=coco2017", "n=299", f"data_dir={tmp_path}", *words)}

    assert {caption.split(", ")[1] for caption in captions("caption=longest").values()} == {"bb"}
    drawn = captions("caption=random")
    assert drawn == captions("caption=random")
    counts = Counter(caption.split(", ")[1] for caption in drawn.values())
    assert all(70 < counts[text] < 130 for text in ("a", "bb", "c"))  # 299 draws of three: 100 +- 8 each
    other = captions("caption=random", "seed=1")
    assert 0.5 < np.mean([drawn[i] != other[i] for i in drawn]) < 0.8  # two thirds expected


BAD_ANNOTATIONS: list[tuple[Any, str]] = [
    (lambda c: [], "no list of images"),
    (lambda c: c | {"annotations": ["x"]}, "no list of annotations"),
    (lambda c: c | {"annotations": []}, "contains no prompts"),
    (lambda c: c | {"images": c["images"] + c["images"][:1]}, "image id 100 .*twice"),
    (lambda c: c | {"annotations": c["annotations"] * 2}, "caption id 5000 .*twice"),
    (lambda c: c | {"images": c["images"][2:]}, "caption 5000: the file has no image 101"),
    (lambda c: c | {"annotations": [{"id": 1, "image_id": [1], "caption": "x"}]}, r"has no image \[1\]"),
    (lambda c: c | {"annotations": [{"id": 1, "image_id": 100, "bbox": []}]}, "caption 1: it has no text"),
    (lambda c: c | {"images": [{"id": "../1", "file_name": "x"}]}, "image number 1 has the id '../1'"),
    (lambda c: c | {"images": [{"id": 1, "file_name": "../../x.jpg"}]}, "image 1: .*file_name"),
    (lambda c: c | {"images": [{"id": 1, "file_name": ".."}]}, "image 1: .*file_name"),
    (lambda c: c | {"images": [{"id": 1}]}, "image 1: the file_name must be text"),
    (lambda c: c | {"annotations": [{"id": 7, "image_id": 100, "caption": "a\0b"}]}, "caption 7: .*NUL"),
    (lambda c: json.dumps(c)[:-9], "cannot read it as JSON"),
]


def test_a_bad_annotation_file_is_named(tmp_path: Path) -> None:
    for change, sentence in BAD_ANNOTATIONS:
        written(tmp_path, change(annotations()))
        with pytest.raises(UsageError) as raised:
            coco.read(tmp_path / "captions_val2017.json", "first", 0)
        assert re.search(sentence, str(raised.value)), sentence


def test_ids_of_other_tools_are_numbers(tmp_path: Path) -> None:
    """Ids as text, with zeros before them, and as floating-point numbers; one kind may differ from the other."""
    written(tmp_path, annotations())
    wanted = coco.read(tmp_path / "captions_val2017.json", "longest", 0)
    forms: list[Callable[[int], Any]] = [str, float, lambda i: f"{i:012d}"]
    for of_image, of_caption in itertools.product([*forms, int], forms):
        content = annotations()
        for image in content["images"]:
            image["id"] = of_image(image["id"])
        for caption in content["annotations"]:
            caption |= {"id": of_caption(caption["id"]), "image_id": of_caption(caption["image_id"])}
        written(tmp_path, content)
        assert coco.read(tmp_path / "captions_val2017.json", "longest", 0) == wanted
    for wrong in (1.5, "1.0", "-", True, None, float("inf"), "²", "1" * 400):
        written(tmp_path, annotations() | {"images": [{"id": wrong, "file_name": "x"}]})
        with pytest.raises(UsageError, match="image number 1 has"):
            coco.read(tmp_path / "captions_val2017.json", "first", 0)


@needs_shared
def test_the_real_files(load: Load) -> None:
    """In PartiPrompts a quotation mark can be part of a prompt."""
    items = load("data=coco2017", f"data_dir={SHARED}", "n=5000")
    assert len({item.id for item in items}) == 5000
    by_id = {item.id: item for item in items}
    assert by_id["179765"].prompt == "A black Honda motorcycle parked in front of a garage."
    assert by_id["179765"].reference == "000000179765.jpg"
    assert all(item.reference == f"{int(item.id):012d}.jpg" and item.prompt == item.prompt.strip() for item in items)
    parti = {item.id: item.prompt for item in load("data=parti", f"data_dir={SHARED}", "n=1632")}
    assert parti["1"] == "bond"
    assert next(p for p in parti.values() if p.startswith('"')).startswith('"G I G G L E" painted')
    for name, count in (("coco2017", 5000), ("parti", 1632)):
        with pytest.raises(UsageError, match=f"data={name} has {count} prompts here, not n={count + 1}"):
            load(f"data={name}", f"data_dir={SHARED}", f"n={count + 1}")


@needs_shared
def test_the_captions_that_sjd_takes_for_the_longest() -> None:
    """Counted on val2017 with SJD's released code: the longest caption of 1037 images and the first caption of 7."""
    first, longest, running = (
        {entry.id: entry.prompt for entry in coco.read(SHARED / "captions_val2017.json", caption, 0)}
        for caption in ("first", "longest", "running_longest")
    )
    raw: dict[str, list[str]] = {}
    for annotation in json.loads((SHARED / "captions_val2017.json").read_text())["annotations"]:
        raw.setdefault(str(annotation["image_id"]), []).append(annotation["caption"])
    most = {name: max(map(len, texts)) for name, texts in raw.items()}
    assert (
        sum(max(len(t) for t in raw[name] if t.strip() == text) == most[name] for name, text in running.items()) == 1037
    )
    assert sum(running[name] == first[name] for name in first) == 7
    assert sum(running[name] == longest[name] for name in first) < 1037  # which is counted without white space


def test_a_running_longest_caption_keeps_its_position(tmp_path: Path) -> None:
    captions = {3: ["c", "cc", "ccc"], 1: ["a", "aaaa", "aa"], 2: ["b ", "bb"], 4: ["dddddd"], 5: ["e", "eee"]}
    rows = [(image, text) for image, texts in captions.items() for text in texts]
    content = {
        "images": [{"id": image, "file_name": f"{image}.jpg"} for image in captions],
        "annotations": [{"id": i, "image_id": image, "caption": text} for i, (image, text) in enumerate(rows)],
    }
    written(tmp_path, content)
    items = coco.read(tmp_path / "captions_val2017.json", "running_longest", 0)
    # By id: 1 sets the place to the second; 2 and 3 have nothing longer than "aaaa"; 4 sets it to the first.
    assert {entry.id: entry.prompt for entry in items} == {"1": "aaaa", "2": "bb", "3": "cc", "4": "dddddd", "5": "e"}


def test_the_training_captions_have_a_file_of_their_own(load: Load, tmp_path: Path) -> None:
    written(tmp_path, annotations(), "captions_val2017.json")
    words = ("data=coco2017", "split=train", "n=3", f"data_dir={tmp_path}")
    with pytest.raises(UsageError, match="data=coco2017.*annotations/captions_train2017.json.*captions_train"):
        load(*words)
    written(tmp_path, annotations(), "captions_train2017.json")
    assert len(load(*words)) == 3


def entries(n: int) -> list[Item]:
    return [Item(i, f"prompt {i}", None, str(i)) for i in range(n)]


def test_a_larger_n_extends_a_smaller_one_and_the_seed_chooses() -> None:
    many = base.subset(entries(500), PromptSelection("x", 500, 0))
    few = base.subset(entries(500)[::-1], PromptSelection("x", 50, 0))
    other = base.subset(entries(500), PromptSelection("x", 500, 1))
    assert many[:50] == few
    assert {item.id for item in many} == {str(i) for i in range(500)}
    assert pairs(many) != pairs(other)
    assert len({item.id for item in few} & {item.id for item in other[:50]}) < 15  # 5 expected
    assert [item.id for item in base.subset(entries(100), PromptSelection("x", 3, 0))] == ["59", "41", "70"]
    # No part of the file is preferred: the mean place of fifty of five hundred is 250 +- 20.
    assert abs(np.mean([int(item.id) for item in few]) - 250) < 60


def test_the_hash_is_over_prompts_and_ids_in_order() -> None:
    first, second = Item(0, "a", None, "1"), Item(1, "b", None, "2")
    third, other, exchanged = (
        Item(0, "a", None, "3"),
        Item(0, "c", None, "1"),
        [Item(0, "b", None, "2"), Item(1, "a", None, "1")],
    )
    hashes = [
        data.prompts_hash(items) for items in ([first, second], [first], [third, second], [other, second], exchanged)
    ]
    assert len(set(hashes)) == 5
    assert hashes[0] == data.prompts_hash([Item(0, "a", (1,), "1", "x.jpg"), second])


def test_scenes_are_the_first_of_their_split_whatever_the_seed(load: Load) -> None:
    items = load("n=4")
    assert load("n=6", "seed=3")[:4] == items
    assert [item.id for item in items] == ["0", "1", "2", "3"]
    assert items[0].prompt == "A picture of a small solid violet rhombus on a gradient background."
    assert all(item.labels and len(item.labels) == 14 for item in items)


def test_parti_is_read_from_its_table(load: Load, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="PartiPrompts.tsv"):
        load("data=parti", "n=1")
    table = 'Prompt\tCategory\tChallenge\tNote\nbond\tAbstract\tBasic\t\n"a" b\tX\tY\tZ\n'
    written(tmp_path, table, "PartiPrompts.tsv")
    items = load("data=parti", f"data_dir={tmp_path}", "n=2")
    assert sorted(pairs(items)) == [("1", "bond"), ("2", '"a" b')]
    assert items[0].reference is None


def test_imagenet_is_spread_evenly(load: Load) -> None:
    items = load("data=imagenet", "n=2300")
    counts = Counter(item.labels for item in items)
    assert len(counts) == 1000
    assert set(counts.values()) == {2, 3}
    assert all(item.labels == (int(item.prompt),) and item.id.startswith(f"{item.prompt}-") for item in items)
    assert len({item.id for item in items}) == 2300
    assert load("data=imagenet", "n=700") == items[:700]
    assert load("data=imagenet", "n=700", "seed=1") != items[:700]
    assert set(Counter(item.prompt for item in load("data=imagenet", "n=50000")).values()) == {50}


PROMPTS = [("x", "a cat, sitting"), ("y/../z", 'a "dog"'), ("3", "ein Schloß 城")]
FORMS = {
    "my.csv": 'id,Prompt,note\nx,"a cat, sitting",1\ny/../z,"a ""dog""",2\n,ein Schloß 城,\n',
    "my.tsv": 'caption\tid\na cat, sitting\tx\na "dog"\ty/../z\nein Schloß 城\t\n',
    "my.json": json.dumps(
        [{"id": "x", "prompt": "a cat, sitting"}, {"id": "y/../z", "caption": 'a "dog"'}, {"text": "ein Schloß 城"}]
    ),
    "a mapping.json": json.dumps({"x": "a cat, sitting", "y/../z": 'a "dog"', "3": "ein Schloß 城"}),
    "my.JSONL": '{"id": "x", "text": "a cat, sitting"}\n{"id": "y/../z", "prompt": "a \\"dog\\""}\n"ein Schloß 城"\n\n',
}


def test_every_form_gives_the_same_prompts(load: Load, tmp_path: Path) -> None:
    for name, content in FORMS.items():
        for mark, end in (("", "\n"), ("\ufeff", "\n"), ("", "\r\n")):
            (tmp_path / name).write_bytes((mark + content.replace("\n", end)).encode())
            items = load(f"prompts='{tmp_path}/{name}'", "n=3", "seed=5")
            assert pairs(items) == PROMPTS, name  # in the order of the file, whatever the seed
            assert [(item.index, item.labels, item.reference) for item in items] == [(i, None, None) for i in range(3)]
    with pytest.raises(UsageError, match="data=prompts.*3.*n=4.*n=3"):
        load(f"prompts={tmp_path}/my.csv", "n=4")


def test_an_id_may_be_a_number(load: Load, tmp_path: Path) -> None:
    """pandas writes a column of integers with a gap as floating-point numbers."""
    lines = ['{"id": 7, "text": "a"}', '{"id": 8.0, "text": "b"}', '{"id": null, "text": "c"}']
    (tmp_path / "my.jsonl").write_text("\n".join(lines))
    assert pairs(load(f"prompts={tmp_path}/my.jsonl", "n=3")) == [("7", "a"), ("8", "b"), ("3", "c")]
    (tmp_path / "my.jsonl").write_text('{"id": 8.5, "text": "b"}')
    with pytest.raises(UsageError, match="line 1: the id must be text, not float"):
        load(f"prompts={tmp_path}/my.jsonl", "n=1")


def test_a_text_has_a_prompt_a_line(load: Load, tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_bytes(b"\xef\xbb\xbf  one \r\n\r\n \t\ntwo\x0cthree\n\nfour")
    assert pairs(load(f"prompts={tmp_path}/my.txt", "n=3")) == [("1", "one"), ("4", "two\x0cthree"), ("6", "four")]
    (tmp_path / "same.txt").write_text("one\none\n")  # the same words twice are two prompts
    assert len(load(f"prompts={tmp_path}/same.txt", "n=2")) == 2


HOSTILE: list[tuple[str, bytes, str]] = [
    ("a.txt", b"\n \n", "a.txt contains no prompts"),
    ("a.txt", b"one\ntwo\xff\n", "a.txt, line 2: this is not UTF-8 text"),
    ("a.txt", b"one\n\ntw\0o", "line 3: there is a NUL"),
    ("a.csv", b"", "contains no prompts"),
    ("a.csv", b"prompt\n", "contains no prompts"),
    ("a.csv", b"name,words\nx,y\n", r"line 1: the header has no column .*it has: 'name', 'words'"),
    ("a.csv", b"id;prompt\n1;x\n", "line 1: .* semicolons"),
    ("a.csv", b"id\tcaption\n1\tx\n", "line 1: .* tabs"),
    ("a.csv", b"prompt,prompt\nx,y\n", "the column prompt twice"),
    ("a.csv", b"id,prompt\n1,x\n\n2, \n", "line 4: the prompt is empty"),
    ("a.csv", b"id,prompt\n1,x\n1,y\n", "id '1' .*twice"),
    ("a.csv", b"prompt,note\na cat, sitting,x\n", "line 2: 3 cells below a header of 2; .*quote a prompt"),
    ("a.csv", b'prompt\n"x\n', "line 2: cannot read this row"),
    ("a.csv", b"prompt\n" + b"x" * 200_000, "cannot read this row"),
    ("a.tsv", b"prompt\tid\nx\n", "line 2: 1 cells below a header of 2"),
    ("a.json", b"3", "must be a JSON list of prompts, or an object"),
    ("a.json", b"[]", "contains no prompts"),
    ("a.json", b'["x", " "]', "entry 2: the prompt is empty"),
    ("a.json", b'["x", 3]', "entry 2: the prompt must be text, not int"),
    ("a.json", b'[{"words": "x"}]', "entry 1: the object has no prompt, caption or text"),
    ("a.json", b'[{"prompt": "x", "id": [1]}]', "entry 1: the id must be text, not list"),
    ("a.json", b'{"": "x"}', "the id is empty"),
    ("a.json", b'{"1": {"prompt": "x"}}', "id '1': the prompt must be text, not dict"),
    ("a.json", b'["x\\u0000y"]', "entry 1: the prompt contains a NUL"),
    ("a.json", b'["x\\ud800y"]', "entry 1: the prompt contains half a character"),
    ("a.json", b"[1", "cannot read it as JSON"),
    ("a.json", b"[" + b"1" * 5000 + b"]", "cannot read it as JSON"),
    ("a.jsonl", b'"x"\n\n{"prompt": ""}\n', "line 3: the prompt is empty"),
    ("a.jsonl", b'"x"\n{"prompt"\n', "line 2: cannot read it as JSON"),
    ("a.jsonl", b'["x"]\n', "line 1: the prompt must be text, not list"),
    ("a.xlsx", b"x", r"must end in .txt, .tsv, .csv, .json, .jsonl"),
]


def test_a_hostile_file_costs_one_sentence(tmp_path: Path) -> None:
    for name, content, sentence in HOSTILE:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError) as raised:
            prompts.read(tmp_path / name)
        assert re.search(sentence, str(raised.value)), (name, content[:50])
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 400 + len(str(tmp_path))


def test_prompts_alone_choose_their_data_set_and_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\n\ntwo\nthree\n")
    (tmp_path / "b.txt").write_text("one\n" * 40)  # more than a run of the embedded prompts has by default
    cfg = configuration.compose(["prompts=a.txt"])
    assert (cfg.data, cfg.get("prompts"), "split" in cfg) == ("prompts", "a.txt", False)
    jobs = configuration.grid(["prompts=a.txt,b.txt", "delta=2"], multirun=True)
    choices = [(job.cfg.data, job.cfg.get("prompts"), job.cfg.n) for job in jobs]
    assert choices == [("prompts", "a.txt", 3), ("prompts", "b.txt", 40)]
    assert [configuration.compose(["prompts=b.txt", word]).n for word in ("n=7", "n=all")] == [7, 40]
    assert configuration.compose(["prompts=b.txt", "protocol=coolsd_table1"]).n == 5000  # which says so


def test_all_prompts_of_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "PartiPrompts.tsv").write_text("Prompt\tCategory\n" + "".join(f"prompt {i}\tx\n" for i in range(5)))
    words = ["data=parti", f"data_dir={tmp_path}"]
    every, five = (configuration.compose([*words, n]) for n in ("n=all", "n=5"))
    assert every == five
    assert provenance.config_hash(every) == provenance.config_hash(five)
    first = [item.id for item in data.load(every.prompts)]
    assert sorted(first) == ["1", "2", "3", "4", "5"]
    assert first != [item.id for item in data.load(every.changed(seed=1).prompts)]  # which chooses, and orders
    assert configuration.compose(words).n == 16
    for name in filter(registry.is_drawn, parameters.choices("data")):
        with pytest.raises(UsageError, match=f"data={name} .*n=all .*n=NUMBER"):
            configuration.compose([f"data={name}", "n=all"])


def test_metrics_of_scenes_do_not_score_other_prompts() -> None:
    decoded_images = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    context = metrics.ScoringContext(metrics.ASSETS, metrics.ASSETS)
    for items in (
        [Item(0, "a zebra on a bicycle", None, "7"), Item(1, "bond", None, "1")],
        [Item(0, "207", (207,), "207-0"), Item(1, "4", (4,), "4-0")],
        [Item(0, "城", None, "1"), Item(1, "A red circle.", None, "2")],
    ):
        scores = metrics.score(["scenes_clip", "scenes_reward"], ImageArray(decoded_images), items, context)
        assert scores["image_reward"].value is None
        assert "labels" in said(scores["image_reward"])
        assert scores["clip_score"].value is None
        assert "of 2 captions" in said(scores["clip_score"])
        assert not any(scenes.WORLD.describes(item.labels) for item in items)  # which the Fréchet distance notes


def test_items_of_scenes_are_scored(load: Load) -> None:
    towers = evaluators.load(metrics.ASSETS / "scenes_two_tower.safetensors", evaluators.TwoTower)
    for item in load("n=300"):
        assert scenes.WORLD.describes(item.labels)
        assert readable(towers, item.prompt)
