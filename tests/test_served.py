"""engine=http against a server on the loopback, including one that misbehaves."""

from __future__ import annotations

import base64
import gzip
import io
import json
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Call, row_of
from PIL import Image
from stub_server import SIDE, Handler, StubServer, png, running

import specbench
from specbench.compare import comparison, passes
from specbench.config import configuration
from specbench.errors import RunError, UsageError
from specbench.harness import run, served
from specbench.models.servers import ImagesServer
from specbench.rows.journal import read_records
from specbench.rows.summary import served_columns
from specbench.storage import images_client
from specbench.storage.deadline import within
from specbench.storage.images_client import ImagesClient, RequestError, image_of
from specbench.tables import report


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(served, "FIRST_WAIT", 0.01)
    with running(StubServer()) as stub:
        yield stub


def configured(server: StubServer, *arguments: str) -> dict[str, Any]:
    options = {"n": "4", "metrics": "none", "warmup": "0"} | dict(a.split("=", 1) for a in arguments)
    return configuration.compose(
        ["engine=http", "data=scenes", f"url={server.url}", *(f"{k}={v}" for k, v in options.items())]
    )


def client(server: StubServer, timeout: float = 5.0) -> ImagesClient:
    return ImagesClient(f"{server.url}/v1/", timeout)


def generate(server: StubServer, fields: dict[str, Any], timeout: float = 5.0) -> np.ndarray:
    return image_of(client(server, timeout).post(ImagesServer.path, fields))


def pixels(fields: dict[str, Any]) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png(fields))))


def test_a_run_against_a_server(server: StubServer, call: Call, tmp_path: Path) -> None:
    words = ["run", "engine=http", "data=scenes", f"url={server.url}", "n=4", "metrics=scenes_clip", "out=here"]
    words += ["concurrency=2", "latency_bound=60", "image_size=8x8"]
    words += ["extra_body={guidance_scale:1.5,response_format:null}"]
    code, out, err = call(*words)
    assert code == 0, err
    assert "model GLM-Image" in err
    assert "request latency" in out
    assert "goodput          1.00" in out
    assert "nothing left to do" in call(*words)[1]
    assert len(server.seen) == 5  # the first one was the warm-up
    [row] = report.gather([tmp_path / "here"], [], 1).rows
    expected = {"model": "GLM-Image", "method": "served", "engine": "http", "server": "vllm 0.16.0", "n": 4, "seed": 0,
            "concurrency": 2, "resolution": SIDE, "goodput": 1, "request_retries": 0, "requests_failed": 0}  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert 0 < row["request_s_p50"] <= row["request_s_p95"] <= row["request_s_p99"]
    assert row["served_images_per_s"] > 0
    assert row["clip_score"] is not None
    unknown = "steps accepted_length_mean acceptance_rate step_compression latency_s_mean images_per_s tokens weights"
    unknown += " device device_name dtype drafter rule timing perplexity emitted_kl speedup_step baseline_run_id batch"
    assert [row[name] for name in unknown.split()] == [None] * len(unknown.split())
    assert report.label(row) == "served concurrency=2"
    assert row["command"].startswith("specbench run url=... model_name=GLM-Image ")
    fields = server.seen[1]
    assert {k: fields[k] for k in ("n", "size", "guidance_scale", "output_format")} == {
        "n": 1, "size": "8x8", "guidance_scale": 1.5, "output_format": "png",
    }  # fmt: skip
    assert "response_format" not in fields
    status = call("status", "here")[1]
    assert "finished" in status


def test_seeds_and_images_depend_only_on_seed_and_index(server: StubServer, tmp_path: Path) -> None:
    seeds = {served.seed_of(seed, index) for seed in range(3) for index in range(50)}
    assert len(seeds) == 150
    assert max(seeds) < 2**31
    for out, more in (("a", ["concurrency=3"]), ("b", ["request_rate=500", "concurrency=2"])):
        run.run(configured(server, *more), tmp_path / out)
    a, b = ({r.index: r.sha256 for r in read_records(tmp_path / out / "records.jsonl")} for out in "ab")
    assert a == b
    records = read_records(tmp_path / "a/records.jsonl")
    assert [f["seed"] for f in server.seen if f["prompt"] == records[3].prompt] == [served.seed_of(0, 3)] * 2
    made = served_columns([replace(records[0], failed=1), *records[1:]], 0.0)
    assert made["goodput"] == 0
    assert made["request_s_mean"] == pytest.approx(np.mean([r.request_s for r in records]))
    assert served_columns(records, None).get("goodput") is None
    run.run(configured(server, "seed=1"), tmp_path / "c")
    compared = comparison.compare(passes.read(str(tmp_path / "a")), passes.read(str(tmp_path / "c")))
    assert [r.statistic.name for r in compared.results] == ["request_s"]


def test_a_request_that_fails_once_is_repeated(server: StubServer, tmp_path: Path) -> None:
    """Each of the first requests fails in another way, and its second attempt succeeds."""
    content = json.dumps({"data": [{"b64_json": base64.b64encode(b"no image").decode()}]}).encode()
    troubles = [
        lambda h: h.send({"error": {"message": "broken"}}, 500),
        lambda h: h.send({"detail": "slow down"}, 429, Retry_After="0"),
        lambda h: h.send(b'{"data": [{"b64_js'),
        lambda h: h.send(content),
        lambda h: h.reset(),
        lambda h: h.send(content, cut=9),
        lambda h: h.send({"data": [{"b64_json": "?"}]}),
        lambda h: h.send({"data": []}),
        lambda h: h.send({"data": [{"b64_json": base64.b64encode(png({"prompt": ""})[:-20]).decode()}]}),
    ]  # fmt: skip
    # The prompts of scenes are all different, and are requested one by one.
    server.trouble = lambda h, f, n: n == 1 and troubles[len(set(server.prompts())) - 1](h)  # type: ignore[method-assign]
    row = run.run(configured(server, f"n={len(troubles)}"), tmp_path / "run").row
    assert (row["request_retries"], row["requests_failed"]) == (len(troubles), 0)
    assert all(r.attempts == 2 for r in read_records(tmp_path / "run/records.jsonl"))


def test_permanent_failures_are_counted_and_requested_again_by_the_next_start(
    server: StubServer, tmp_path: Path
) -> None:
    server.trouble = lambda h, f, n: f["seed"] == served.seed_of(0, 1) and h.send({"detail": "too long"}, 400)  # type: ignore[method-assign]
    cfg = configured(server, "latency_bound=60")
    with pytest.raises(RunError, match="1 images could not be decoded"):
        run.run(cfg, tmp_path / "run")
    assert len(server.seen) == 4  # a refusal is not retried
    [failure] = map(json.loads, (tmp_path / "run/failures.jsonl").read_text().splitlines())
    assert (failure["index"], failure["reason"]) == (1, "HTTP 400: too long (attempt 1)")
    server.trouble = lambda *_: False  # type: ignore[method-assign]
    row = run.run(cfg, tmp_path / "run").row
    assert len(server.seen) == 5
    assert (row["requests_failed"], row["goodput"]) == (1, 4 / 5)
    assert "requested by 2 processes" in row["note"]


def test_a_server_that_has_stopped_stops_the_run(server: StubServer, tmp_path: Path) -> None:
    server.trouble = lambda h, f, n: h.send({"detail": "out of memory"}, 503)  # type: ignore[method-assign]
    with pytest.raises(RunError, match="10 images in a row failed, the last one with: HTTP 503: out of memory"):
        run.run(configured(server, "n=30", "retries=1"), tmp_path / "run")
    assert len(server.seen) == 20


#: What a server does, the error, and whether another attempt may succeed.
FAILURES = [
    (lambda h: h.send({"error": {"message": "no"}}, 429, Retry_After="7"), "HTTP 429: no", True),
    (lambda h: time.sleep(0.3), "no answer within 0.1 s", True),
    (lambda h: h.drip(0.4), "no answer within 0.1 s", True),
    (lambda h: h.send({"data": [{"url": "file:///etc/passwd"}]}), "neither http nor https", False),
    (lambda h: h.send({"data": [{"url": "/v1/models"}]}), "not an image in a supported format", True),
    (lambda h: h.send({"data": [{}]}), "neither b64_json nor url", True),
    (lambda h: h.send({"detail": "no"}, 401), "HTTP 401: no", False),
]


def failure(server: StubServer, trouble: Any, timeout: float = 5.0) -> RequestError:
    """The error of a request for which the server causes this trouble."""
    server.trouble = lambda h, f, n: trouble(h) or True  # type: ignore[method-assign]
    with pytest.raises(RequestError) as raised:
        generate(server, {"prompt": "x"}, timeout)
    return raised.value


def test_why_a_request_failed(server: StubServer) -> None:
    for trouble, words, again in FAILURES:
        error = failure(server, trouble, 0.1 if "within" in words else 5)
        assert (words in str(error), error.again) == (True, again), words
        assert error.wait == (7 if "429" in words else None)


def test_an_answer_with_an_address(server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is sent to the server, and to no other address."""
    monkeypatch.setenv("SPECBENCH_API_KEY", "secret")
    fields = {"prompt": "x", "seed": 3}
    code = base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()
    with running(StubServer()) as other:
        for url in (f"/v1/images/{code}", f"{other.url}/v1/images/{code}"):
            server.trouble = lambda h, f, n, url=url: h.send({"data": [{"url": url}]})  # type: ignore[misc]
            assert (generate(server, fields) == pixels(fields)).all()
        assert [h["Authorization"] for h in server.headers] == ["Bearer secret"] * 3
        assert [h["Authorization"] for h in other.headers] == [None]


def test_the_server_and_the_model_are_named(server: StubServer, tmp_path: Path) -> None:
    assert client(server).identity() == ("vllm 0.16.0", ["GLM-Image"])
    server.versions = {
        "/v1/models": {"data": [{"id": "janus", "owned_by": "sglang"}]},
        "/server_info": {"version": "0.5"},
    }
    assert client(server).identity() == ("sglang 0.5", ["janus"])
    server.versions = {"/v1/models": {"data": None}}
    assert client(server).identity() == ("", [])
    unknown = configured(server, "model_name=mine", "n=1", "extra_body={seed:null}")
    note = run.run(unknown, tmp_path / "unknown").row["note"]
    assert "the server does not report its version" in note
    assert "the requests had no seed" in note
    with pytest.raises(UsageError, match="does not name its model: set model_name="):
        run.run(configured(server), tmp_path / "run")
    row = run.run(configured(server, "model_name=mine", "server='my engine 3'", "n=1"), tmp_path / "run").row
    assert (row["model"], row["server"]) == ("mine", "my engine 3")
    server.versions = {"/version": {"version": "3"}}
    unnamed = configured(server, "model_name=mine", "n=2").changed(server=None)
    first = run.run(unnamed.changed(n=1), tmp_path / "told").row
    server.versions = {"/version": {"version": "4"}}
    with pytest.raises(UsageError, match=f"was started with weights mine by {first['server']}, not mine by"):
        run.run(unnamed, tmp_path / "told")


def test_a_server_that_does_not_answer_or_refuses_leaves_nothing(
    server: StubServer, call: Call, tmp_path: Path
) -> None:
    words = ["run", "engine=http", "data=scenes", "metrics=none", "model_name=other", "out=here"]
    with running(StubServer()) as stopped:
        url = stopped.url
    code, _, err = call(*words, f"url={url}")
    assert (code, f"the server at url={url} does not answer" in err) == (2, True)
    server.trouble = lambda h, f, n: h.send({"detail": "unknown model"}, 404)  # type: ignore[method-assign]
    code, _, err = call(*words, f"url={server.url}")
    assert (code, "refuses a request (HTTP 404: unknown model)" in err) == (2, True)
    assert "names its model GLM-Image, not other" in err
    assert not (tmp_path / "here").exists()


def test_a_folder_that_vanishes_is_not_created_again(server: StubServer, tmp_path: Path) -> None:
    """Here during the warm-up, before the first image."""
    out = tmp_path / "run"
    server.trouble = lambda h, f, n: n == 1 and shutil.rmtree(out)  # type: ignore[method-assign, func-returns-value]
    with pytest.raises(RunError, match=f"cannot write into {out} any more .it is gone"):
        run.run(configured(server, "n=1", "warmup=1"), out)
    assert not out.exists()


def test_resume_refuses_parameters_of_a_local_run(server: StubServer, call: Call, tmp_path: Path) -> None:
    run.run(configured(server, "n=1"), tmp_path / "run")
    config = (tmp_path / "run/config.yaml").read_bytes()
    for argument in ("baseline=false", "timing=true", "emitted_draws=2", "workers=1", "shard=1/2"):
        code, _, err = call("resume", "run", argument)
        assert (code, f"has no parameter '{argument.partition('=')[0]}'" in err) == (2, True), err
        assert (tmp_path / "run/config.yaml").read_bytes() == config


def test_requests_at_a_time_and_arrivals(server: StubServer, tmp_path: Path) -> None:
    three = threading.Barrier(3)  # only three requests at a time can pass
    server.trouble = lambda h, f, n: three.wait(60) < 0  # type: ignore[method-assign]
    run.run(configured(server, "n=6", "concurrency=3"), tmp_path / "three")
    assert server.most == 3
    server.most = 0
    server.trouble = lambda h, f, n: time.sleep(0.05) or False  # type: ignore[method-assign, func-returns-value]
    row = run.run(configured(server, "n=6", "request_rate=1000", "concurrency=1"), tmp_path / "late").row
    assert server.most == 1
    # All arrive within a few milliseconds and wait for each other, 0.05 s each. This wait counts.
    assert row["request_s_p99"] > 0.2
    gaps = served.arrivals(5, 4000, 20.0)
    # Exponential gaps with mean 1/20: their mean has the standard error 1/20/sqrt(4000) = 0.0008, and their standard
    # deviation equals the mean within 1/20/sqrt(2000).
    assert gaps.mean() == pytest.approx(0.05, abs=0.004)
    assert gaps.std() == pytest.approx(0.05, abs=0.006)
    assert (served.arrivals(5, 10, 20.0) == gaps[:10]).all()
    assert (served.arrivals(6, 10, 20.0) != gaps[:10]).all()


def test_a_stop_finishes_the_running_requests(server: StubServer) -> None:
    cfg = configured(server, "n=6", "concurrency=2")
    from specbench import data

    items = data.load(cfg)
    server.trouble = lambda h, f, n: time.sleep(0.02) or False  # type: ignore[method-assign, func-returns-value]
    executor = served.ServerExecutor(cfg, items)
    stops: list[int] = []
    made = []
    for [image] in executor.decode(items, stop=lambda: bool(stops)):
        made.append(image.record.index)
        stops.append(1)
    assert sorted(made) == [0, 1]
    assert len(server.seen) == 2


def test_a_bad_argument_is_a_short_error(call: Call) -> None:
    for arguments, sentence in (
        ("engine=http", "url must be the server's address"),
        ("engine=http url=ftp://x", "url must be the server's address"),
        ("engine=http url=http://x model=emu3", "the server has its own model and method: leave model= out"),
        ("engine=http url=http://x rule=exact", "leave rule= out"),
        ("engine=http url=http://x delta=1", "engine=http has no parameter 'delta': a server decodes"),
        ("engine=http url=http://x extra_body=[1]", "extra_body must be fields of a JSON object"),
        ("engine=http url=http://x image_size=12", "image_size must be"),
        ("url=http://x", "it belongs to engine http"),
    ):
        with pytest.raises(UsageError, match=sentence):
            configuration.compose(arguments.split())
    code, _, err = call("bench", "engine=http", "url=http://x")
    assert (code, "use it with specbench run only" in err) == (2, True)


def test_the_python_interface(server: StubServer, tmp_path: Path) -> None:
    body = {"guidance_scale": 2, "style": 'it\'s "quoted"'}
    more = {"metrics": [], "quiet": True, "out": tmp_path / "a"}
    result = specbench.run(engine="http", data="scenes", url=server.url, n=2, extra_body=body, **more)
    assert {name: server.seen[-1][name] for name in body} == body
    assert (result.row["model"], len(result.images), len(result.records)) == ("GLM-Image", 2, 2)


def test_a_dry_run_sends_no_request(server: StubServer, call: Call) -> None:
    code, out, err = call("run", "--dry-run", "engine=http", "data=scenes", f"url={server.url}", "n=4", "metrics=none")
    assert code == 0, err
    assert "served on served, seed 0, n=4: 4 images, time unknown" in out
    assert (server.seen, server.headers) == ([], [])


def as_png(pixels: np.ndarray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def b64(content: bytes) -> dict[str, Any]:
    return {"data": [{"b64_json": base64.b64encode(content).decode()}]}


NOISE = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)


def test_degenerate_images_are_reported(server: StubServer, tmp_path: Path, call: Call) -> None:
    words = ["engine=http", f"url={server.url}", "n=4", "data=scenes", "metrics=none", "warmup=0"]
    tiled = np.tile(NOISE[:16, :16], (4, 4, 1))
    for size, image, remark, expected in (
        ([], NOISE, "4 of 4 images equal the image of another prompt to the pixel", 4),
        ([], NOISE * 0, "4 of 4 images are of one flat colour", 4),
        ([], tiled, "4 of 4 images repeat a row, a column or a tile", 4),
        ([], NOISE[:1, :1], "4 of 4 images have a side below 16 pixels (the smallest is 1x1)", 4),
        (["image_size=256x64"], None, "4 of 4 images are not 256x64 as requested (the smallest is 64x64)", 0),
    ):
        server.trouble = lambda h, f, n, image=image: image is not None and h.send(b64(as_png(image)))  # type: ignore[misc]
        code, out, err = call("run", *words, *size, "out=run")
        assert code == expected, err
        assert ("4 of 4 images are degenerate, more than 10% (the note says how)" in err) == (expected == 4)
        assert remark in out
        assert remark in row_of("run")["note"]
        assert row_of("run")["degenerate_images"] == expected
        assert f"images     {remark}" in call("status", "run")[1]
        assert call("resume", "run")[0] == expected  # also if nothing is left to do
        shutil.rmtree(tmp_path / "run")


def test_images_that_are_not_degenerate(server: StubServer, tmp_path: Path) -> None:
    """A server that decodes greedily ignores the seed: the images of one prompt are equal, images of two prompts are
    not. A single image is not a finding either."""

    def greedy(handler: Any, fields: dict[str, Any], number: int) -> bool:
        return bool(handler.send(b64(png({"prompt": fields["prompt"]}))))

    server.trouble = greedy  # type: ignore[method-assign]
    row = run.run(configured(server, "n=2", "images_per_prompt=3", "request_rate=500"), tmp_path / "greedy").row
    alone = run.run(configured(server, "n=1"), tmp_path / "alone").row
    assert (row["n"], row["images"], len({fields["seed"] for fields in server.seen})) == (2, 6, 6)
    assert not row["note"]
    assert not alone["note"]


def raw(text: bytes) -> Any:
    def answer(handler: Any) -> None:
        handler.wfile.write(text)
        handler.close_connection = True

    return answer


def address(url: str) -> Any:
    return lambda h: h.send({"data": [{"url": url}]})


HEAD = b"HTTP/1.1 200 OK\r\n"
WRONG_ANSWERS = {
    "address_of_no_host": address("http://[::1"),
    "address_of_no_port": address("http://x:port/"),
    "address_without_host": address("http://"),
    "address_with_space": address("http://127.0.0.1/a b"),
    "address_with_newline": address("http://127.0.0.1:1/\r\nX: y"),
    "address_in_no_code": address("http://127.0.0.1/\ud800"),
    "address_of_long_label": address(f"http://{'a' * 70}.example/"),
    "address_of_dots": address("http://..../"),
    "redirected_to_no_host": lambda h: h.send(b"", 302, Location="http://[::1"),
    "redirected_to_a_file": lambda h: h.send(b"", 302, Location="file:///etc/passwd"),
    "redirected_by_ftp": lambda h: h.send(b"", 302, Location="ftp://127.0.0.1:1/x"),
    "redirected_for_ever": lambda h: h.send(b"", 302, Location="/loop"),
    "page": lambda h: h.send(b"<html>hello</html>", Content_Type="text/html"),
    "no_content": lambda h: h.send(b"", 204),
    "two_images": lambda h: h.send({"data": b64(as_png(NOISE))["data"] * 2}),
    "names_twice": lambda h: h.send(b'{"data": [], "data": []}'),
    "deep": lambda h: h.send(b"[" * 9_000),
    "many_values": lambda h: h.send(b'{"data": [' + b"{}," * 100_000 + b"{}]}"),
    "long_number": lambda h: h.send(b'{"data": ' + b"1" * 5000 + b"}"),
    "wrong_checksum": lambda h: h.send(b64(as_png(NOISE)[:60] + b"x" + as_png(NOISE)[61:])),
    "compressed": lambda h: h.send(gzip.compress(bytes(10**6)), Content_Encoding="gzip"),
    "no_length": raw(HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}"),
    "negative_chunk": raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}"),
    "endless_chunk": raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}"),
    "endless_header": raw(HEAD + b"X: " + b"y" * 100_000),
    "many_headers": raw(HEAD + b"X: y\r\n" * 200),
    "no_status": raw(b"SSH-2.0-OpenSSH\r\n"),
    "wait_for_ever": lambda h: h.send({}, 503, Retry_After="9" * 400),
    "wait_until_no_date": lambda h: h.send({}, 503, Retry_After="Mon, 01 Jan 2020 00:00:00 +999999999999"),
    "control_characters": lambda h: h.send({"error": {"message": "\x1b[2J\r\n"}}, 400),
    "endless_error": lambda h: h.send(b" " * 3_000_000, 400),
}


def test_any_wrong_answer_is_one_failure(server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small answer cannot become a large one either, by decompression or as objects, which take 20 times the memory
    of their text."""
    messages = {"compressed": "compressed", "many_values": f"more than {images_client.MOST_VALUES} values"}
    for name, wrong_answer in WRONG_ANSWERS.items():
        monkeypatch.setattr(Handler, "do_GET", wrong_answer)
        error = failure(server, wrong_answer)
        assert (str(error).isprintable(), messages.get(name, "") in str(error)) == (True, True), name
        assert not (name in messages and error.again)


def test_a_body_is_read_up_to_a_size(server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sends until the client closes the connection."""
    monkeypatch.setattr(images_client, "LARGEST", 1 << 20)
    closed = threading.Event()

    def endless(handler: Any, fields: dict[str, Any], number: int) -> bool:
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(b" " * 65536)
        finally:
            closed.set()

    server.trouble = endless  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="larger than 1 MiB"):
        generate(server, {"prompt": "x"}, 60)
    assert closed.wait(60)


def test_a_key_is_not_shown_by_an_error(server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("secr\net", "secr\u00e9t"):
        monkeypatch.setenv("SPECBENCH_API_KEY", key)
        with pytest.raises(UsageError, match="SPECBENCH_API_KEY") as raised:
            client(server)
        assert "secr" not in str(raised.value).replace("SPECBENCH_API_KEY", "")
    monkeypatch.setenv("SPECBENCH_API_KEY", "secret\n")  # as read from a file
    generate(server, {"prompt": "x"})
    assert server.headers[-1]["Authorization"] == "Bearer secret"
    with pytest.raises(UsageError, match="is not an address"):
        ImagesClient("http://[::1", 5)


def drip_headers(handler: Any) -> bool:
    """Sends a header byte by byte; a client cannot know whether it ever ends."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Padding: ")
    while True:
        handler.wfile.write(b"x")
        time.sleep(0.02)


def drip_chunk(handler: Any) -> bool:
    """The same inside the length of a chunk."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        handler.wfile.write(b"0")
        time.sleep(0.02)


def drip_redirections(handler: Any) -> bool:
    time.sleep(0.1)
    handler.send_response(302)
    handler.send_header("Location", f"{handler.server.url}/hop{time.monotonic()}")
    handler.end_headers()
    return True


def drip_body(handler: Any) -> bool:
    return bool(handler.drip(60))


def drip_continue(handler: Any) -> bool:
    while True:
        handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        time.sleep(0.02)


def test_a_server_that_drips_is_bounded_by_the_timeout(server: StubServer, monkeypatch: Any) -> None:
    """The server sends until the client closes the connection, so without a bound the request never ends; the test has
    no limit except the machine's. A timeout counts for the whole request and not for each wait."""
    for trouble in (drip_headers, drip_chunk, drip_redirections, drip_body, drip_continue):
        monkeypatch.setattr(Handler, "do_GET", trouble)
        closed = threading.Event()

        def until_gone(handler: Any, trouble: Any = trouble, closed: threading.Event = closed) -> None:
            try:
                trouble(handler)
            finally:
                closed.set()

        error = within(
            30, lambda until_gone=until_gone: failure(server, until_gone, 0.3)
        )  # a hundred times the timeout
        assert (error.again, "no answer within 0.3 s" in str(error)) == (True, True), trouble
        assert closed.wait(30), trouble  # the connection was closed: no thread of the client continues to read
