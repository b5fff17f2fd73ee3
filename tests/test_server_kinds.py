"""engine=vllm_omni and engine=sglang_ar against a server on the loopback that answers like them, or wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Call, row_of
from stub_server import SIDE, StubServer, ar_answer, omni_answer, running

from specbench.config import configuration
from specbench.errors import RunError, UsageError
from specbench.harness import run, served
from specbench.models.loading.glm_image import CODES
from specbench.rows.journal import read_records
from specbench.storage import image_files


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(served, "FIRST_WAIT", 0.01)
    with running(StubServer()) as stub:
        stub.answers["/v1/images/generations"] = omni_answer
        yield stub


@pytest.fixture(scope="session")
def processor(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with transformers' processor of GLM-Image and a tokenizer with a few words."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    words = ["<unk>", *special.values(), "<bos>", "<|user|>", *map(str, range(100)), *"abcdefghijklmnopqrstuvwxyz "]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.add_special_tokens([*special.values(), "<bos>", "<|user|>"])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", unk_token="<unk>", extra_special_tokens=special
    )
    from transformers.models.glm_image import GlmImageProcessor
    from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

    template = "{% for m in messages %}<|user|>{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"
    made = GlmImageProcessor(GlmImageImageProcessorPil(), fast, chat_template=template)
    folder = tmp_path_factory.mktemp("glm") / "processor"
    made.save_pretrained(folder)
    return str(folder)


def omni(server: StubServer, out: Path, *words: str) -> dict[str, Any]:
    more = ["n=3", "metrics=none", "warmup=0", *words]
    cfg = configuration.compose(
        ["engine=vllm_omni", "data=scenes", f"url={server.url}", f"image_size={SIDE}x{SIDE}", *more]
    )
    return dict(run.run(cfg, out).row)


def test_the_fields_of_a_request_to_vllm_omni(server: StubServer, tmp_path: Path) -> None:
    """The size is always sent: the server's default depends on the model and the version."""
    cfg = configuration.compose(["engine=vllm_omni", "data=scenes", "url=http://x"])
    assert cfg["image_size"] == "1024x1024"
    with pytest.raises(UsageError, match="image_size must be"):
        configuration.compose(["engine=vllm_omni", "data=scenes", "url=http://x", "image_size=null"])
    omni(server, tmp_path / "run", "num_inference_steps=30", "guidance_scale=1.5", "negative_prompt=blurry")
    sent = server.seen[0]
    assert {name: sent[name] for name in sent.keys() - {"prompt", "seed"}} == {
        "n": 1, "size": "64x64", "response_format": "b64_json", "output_format": "png", "num_inference_steps": 30,
        "guidance_scale": 1.5, "negative_prompt": "blurry", "return_stage_metrics": True,
    }  # fmt: skip
    assert sent["seed"] == served.seed_of(0, 0)


def test_the_ar_share_of_a_request(server: StubServer, tmp_path: Path) -> None:
    row = omni(server, tmp_path / "run")
    assert row["ar_s_mean"] == pytest.approx(0.03)
    assert row["ar_share"] == pytest.approx(0.03 / row["request_s_mean"])
    assert (row["tokens"], row["note"], row["degenerate_images"]) == (1281, None, 0)
    assert [r.ar_s for r in read_records(tmp_path / "run/records.jsonl")] == [0.03] * 3


#: Metrics of an answer -> the seconds of the AR stage without and with ar_stage=0.
TOLD: list[tuple[dict[str, Any], float | None, float | None]] = [
    ({"stage_metrics": None}, None, 0.03),  # the durations alone do not show which stage is which
    ({"stage_metrics": {}, "stage_durations": None}, None, None),
    ({"stage_metrics": {"0": {"stage_gen_time_ms": 5.0, "num_tokens_out": 0}}, "stage_durations": {}}, None, 0.005),
    ({"stage_metrics": {"0": {"num_tokens_out": 9}}, "stage_durations": {}}, None, None),
    ({"stage_metrics": {"0": {"num_tokens_out": 9, "stage_gen_time_ms": "5"}}}, None, None),
    ({"stage_metrics": {"0": {"num_tokens_out": 9, "stage_gen_time_ms": -1}}}, None, None),
    ({"stage_metrics": [1], "stage_durations": "x"}, None, None),
]


def test_stage_times_that_are_missing_or_wrong_are_never_guessed(server: StubServer, tmp_path: Path) -> None:
    for i, (metrics, alone, named) in enumerate(TOLD):
        server.answers["/v1/images/generations"] = lambda fields, metrics=metrics: omni_answer(fields, **metrics)
        for words, expected in (([], alone), (["ar_stage=0"], named)):
            row = omni(server, tmp_path / f"{i}{len(words)}", "n=1", *words)
            assert (row["ar_s_mean"], row["ar_share"] is None) == (expected, expected is None), (metrics, words)
    for content in (None, 3, []):  # older versions have no metrics at all
        server.answers["/v1/images/generations"] = lambda fields, c=content: omni_answer(fields) | {"metrics": c}
        assert omni(server, tmp_path / f"none{content}", "n=1", "ar_stage=0")["ar_s_mean"] is None


def test_some_answers_without_stage_times_are_named(server: StubServer, tmp_path: Path) -> None:
    server.trouble = lambda h, f, n: len(server.seen) == 2 and h.send(omni_answer(f) | {"metrics": None})  # type: ignore[method-assign]
    row = omni(server, tmp_path / "run")
    assert row["ar_s_mean"] == pytest.approx(0.03)
    assert "ar_s_mean: 2 of 3 answers had the times of the stages" in row["note"]


def test_an_image_of_another_size_and_a_seed_that_does_not_repeat(server: StubServer, tmp_path: Path) -> None:
    """A stored preview has fewer pixels. A server that ignores the seed gives another image for the warm-up."""
    row = omni(server, tmp_path / "size", "image_size=512x512")
    assert "3 of 3 images are not 512x512 as requested (the smallest is 64x64)" in row["note"]
    assert not omni(server, tmp_path / "same", "warmup=1")["note"]
    server.trouble = lambda h, f, n: h.send(omni_answer({**f, "seed": len(server.seen)}))  # type: ignore[method-assign]
    row = omni(server, tmp_path / "other", "warmup=1")
    assert "the server had another image for the same prompt and seed" in row["note"]


def ar(server: StubServer, out: Path, processor: str, *words: str) -> dict[str, Any]:
    options = {"n": "2", "warmup": "0", "image_size": "64x96"} | dict(word.split("=", 1) for word in words)
    more = [f"{name}={value}" for name, value in options.items()]
    cfg = configuration.compose(
        ["engine=sglang_ar", "data=scenes", f"url={server.url}", f"processor={processor}", *more]
    )
    return dict(run.run(cfg, out).row)


def test_only_the_ar_stage(server: StubServer, processor: str, tmp_path: Path) -> None:
    """64x96 pixels are 3 rows of 2 tokens; the preview has int(16 sqrt(1.5)) = 19 rows of int(16 / sqrt(1.5)) = 13."""
    row = ar(server, tmp_path / "run", processor)
    first = server.seen[0]
    assert first["image_data"] == [{"image_grid_thw": [[1, 3, 2], [1, 19, 13]]}]
    assert first["sampling_params"] == {
        "temperature": 0.9, "top_p": 0.75, "max_new_tokens": 19 * 13 + 6 + 1, "ignore_eos": True,
        "sampling_seed": served.seed_of(0, 0),
    }  # fmt: skip
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(processor)
    text = tokenizer.decode(first["input_ids"])
    assert text.replace(" ", "").endswith("<sop>32<eop><sop>1913<eop><bos>")
    assert text.startswith("<|user|>")
    expected = {
        "tokens": 254,
        "ar_s_mean": 0.5,
        "resolution": None,
        "temperature": 0.9,
        "image_size": "64x96",
        "note": None,
    }
    assert {name: row[name] for name in expected} == expected
    # The folder stores the codes as a map, from which they are read again.
    record = read_records(tmp_path / "run/records.jsonl")[0]
    codes = np.array(ar_answer(first)["output_ids"][247:253]).reshape(3, 2)
    stored = image_files.read(tmp_path / "run" / record.image).astype(int)
    assert (stored[..., 0] * 256 + stored[..., 1] == codes).all()
    assert (record.size, record.contrast) == (None, None)


def test_sides_are_rounded_up(server: StubServer, processor: str, tmp_path: Path) -> None:
    """As the diffusion server requests: 500x500 -> 512x512, 1280x720 -> 1280x736."""
    for size, grid in (("500x500", [[1, 16, 16], [1, 16, 16]]), ("1280x720", [[1, 23, 40], [1, 12, 21]])):
        ar(server, tmp_path / size, processor, f"image_size={size}", "n=1")
        assert server.seen[-1]["image_data"] == [{"image_grid_thw": grid}]


#: The answer of an AR server -> the reason of the failure.
FAULTS = {
    "too few": (lambda f: ar_answer(f, list(range(200))), "200 ids instead of 247 of a preview and 6 of the image"),
    "without the preview": (lambda f: ar_answer(f, list(range(7))), "7 ids instead of 247"),
    "too many": (lambda f: ar_answer(f, list(range(300))), "300 ids instead of 247"),
    "an end in the grid": (lambda f: ar_answer(f, [5] * 250 + [16385] * 4), "3 of 253 ids are no codes"),
    "of the text": (lambda f: ar_answer(f, [5] * 252 + [CODES, 1]), f"the first is {CODES}"),
    "negative": (lambda f: ar_answer(f, [-1] * 254), "253 of 253 ids are no codes"),
    "another count": (lambda f: ar_answer(f, completion_tokens=7), "254 ids and reports 7"),
    "no ids": (lambda f: {"text": "a"}, "no output_ids"),
    "ids that are none": (lambda f: ar_answer(f, ["1"] * 254), "no output_ids"),  # type: ignore[list-item]
}


def test_faults_of_an_ar_server(server: StubServer, processor: str, tmp_path: Path) -> None:
    for name, (fault, reason) in FAULTS.items():
        server.answers["/generate"] = fault
        with pytest.raises(RunError, match="1 images could not be decoded"):
            ar(server, tmp_path / name, processor, "n=1")
        assert reason in (tmp_path / name / "failures.jsonl").read_text(), name
    server.answers["/generate"] = lambda f: ar_answer(f, [1])  # the warm-up stops a run before it starts
    with pytest.raises(UsageError, match="answers a request wrongly .the answer has 1 ids instead of 247"):
        ar(server, tmp_path / "first", processor, "warmup=1")
    assert not (tmp_path / "first").exists()
    # In the middle of a run: the others exist, and the same command requests the missing one again.
    server.answers["/generate"] = lambda f: ar_answer(f, [1]) if len(server.seen) == len(FAULTS) + 3 else ar_answer(f)
    with pytest.raises(RunError, match="1 images could not be decoded"):
        ar(server, tmp_path / "middle", processor, "n=3")
    row = ar(server, tmp_path / "middle", processor, "n=3")
    assert (row["images"], row["requests_failed"]) == (3, 1)


def test_seconds_are_empty_if_the_ar_server_reports_none(server: StubServer, processor: str, tmp_path: Path) -> None:
    for i, latency in enumerate((None, "0.5", -1, True)):
        server.answers["/generate"] = lambda f, latency=latency: ar_answer(f, e2e_latency=latency)
        assert ar(server, tmp_path / str(i), processor, "n=1")["ar_s_mean"] is None


def test_degenerate_codes_fail_a_run(server: StubServer, processor: str, call: Call, tmp_path: Path) -> None:
    """Codes of 16 rows of 16: all rows equal, or few different codes."""
    words = ["run", "engine=sglang_ar", "data=scenes", f"url={server.url}", f"processor={processor}", "n=2", "warmup=0"]
    words += ["image_size=512x512"]
    row = np.random.default_rng(0).integers(0, CODES, 16).tolist()
    few = np.random.default_rng(0).integers(0, 4, 256).tolist()
    for name, codes, remark in (("row", row * 16, "repeat a row"), ("few", few, "have few different codes")):
        server.answers["/generate"] = lambda f, codes=codes: ar_answer(f, [7] * 256 + codes + [16385])
        code, _, err = call(*words, f"out={name}")
        assert (code, "2 of 2 images are degenerate" in err) == (4, True)
        assert f"2 of 2 images {remark}" in row_of(name)["note"]
    server.answers["/generate"] = ar_answer
    assert call(*words, "out=sound")[0] == 0


def test_unsupported_features_of_an_ar_server_are_short_errors(server: StubServer, tmp_path: Path) -> None:
    words = ["engine=sglang_ar", "data=scenes", f"url={server.url}", "n=1"]
    for more, sentence in (
        ([], "processor= must be the folder"),
        ([f"processor={tmp_path}"], "cannot read processor="),
        ([f"processor={tmp_path}", "metrics=scenes_clip"], "has codes, but no images to score: leave out metrics="),
        ([f"processor={tmp_path}", "image_size=20x64"], "sides of at least 32 pixels"),
    ):
        with pytest.raises(UsageError, match=sentence):
            run.run(configuration.compose([*words, *more]), tmp_path / "run")
    assert server.seen == []


def test_a_map_of_codes() -> None:
    codes = np.array([[0, 255], [256, 16383]])
    assert image_files.code_map(codes).tolist() == [[[0, 0, 0], [0, 255, 0]], [[1, 0, 0], [63, 255, 0]]]


def test_a_plug_in_brings_another_kind_of_server(server: StubServer, call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "kinds/engine"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(
        "# @package _global_\n# A server of ours.\ndefaults: [http]\nengine: mine\nimplementation: mine:Mine\n"
        "style: plain\nparameters:\n  style: {kind: string, line: style of the images}\n"
    )
    (folder / "mine.py").write_text(
        "from specbench.models.servers import ImagesServer\n\n\n"
        "class Mine(ImagesServer):\n"
        "    def fields(self, prompt, seed):\n"
        "        return super().fields(prompt, seed) | {'style': self.cfg['style'], 'size': '64x64'}\n"
    )
    words = [
        "--include",
        "kinds",
        "engine=mine",
        f"url={server.url}",
        "data=scenes",
        "n=2",
        "metrics=none",
        "style=old",
    ]
    code, _, err = call("run", *words, "out=run")
    assert code == 0, err
    assert {fields["style"] for fields in server.seen} == {"old"}
    assert row_of("run")["engine"] == "mine"
