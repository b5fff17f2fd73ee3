"""`specbench push` to a hub on the loopback, with the hub's own client."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Call
from fake_pipeline import FakePipeline
from stub_server import Answers, LoopbackServer, running

import specbench
from specbench.config import configuration
from specbench.harness import run
from specbench.rows.csv_files import read_rows


class Hub(LoopbackServer):
    """A hub that stores what is committed. refuses: if not 0, the status code of every response."""

    def __init__(self) -> None:
        super().__init__(HubHandler)
        self.refuses = 0
        self.made: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.tokens: set[str] = set()


class HubHandler(Answers):
    server: Hub

    def answer(self, content: dict[str, Any], code: int = 200) -> None:
        self.send(content, code, Content_Type="application/json")

    def do_GET(self) -> None:
        self.answer({}, 404)

    def body(self) -> bytes:
        if self.headers.get("Content-Length"):
            return self.rfile.read(int(self.headers["Content-Length"]))
        parts = []
        while size := int(self.rfile.readline(), 16):  # chunked
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        return b"".join(parts)

    def do_POST(self) -> None:
        hub, body = self.server, self.body()
        hub.tokens.add(self.headers.get("Authorization", ""))
        if hub.refuses:
            self.answer({"error": "no"}, hub.refuses)
        elif self.path == "/api/repos/create":
            hub.made.append(json.loads(body))
            kind = "" if hub.made[-1].get("type", "model") == "model" else "datasets/"
            self.answer({"url": f"{hub.url}/{kind}me/things"})
        elif self.path.endswith("/preupload/main"):
            names = [entry["path"] for entry in json.loads(body)["files"]]
            self.answer({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in names]})
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer({"commitUrl": f"{hub.url}/me/things/commit/{'a' * 40}", "commitOid": "a" * 40, "success": True})
        else:
            self.answer({"errors": [], "warnings": []})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with running(Hub()) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a file of prompts, with a method of any name."""
    folder = tmp_path_factory.mktemp("push")
    (folder / "my.txt").write_text("a | b\n<b>c</b>\nd\n")
    cfg = configuration.compose([f"prompts={folder}/my.txt", "metrics=none", "warmup=0"])
    run.run(cfg.changed(metrics_dir="/secret/place"), folder / "run", loader=FakePipeline)
    return folder / "run"


def test_rows_become_a_data_set_that_can_be_read(hub: Hub, finished: Path, call: Call, tmp_path: Path) -> None:
    code, out, err = call("push", str(finished), "repository=me/things", "private=true")
    assert code == 0, err
    assert f"pushed to {hub.url}/datasets/me/things" in out
    assert (hub.made[0]["name"], hub.made[0]["organization"], hub.made[0]["type"]) == ("things", "me", "dataset")
    assert hub.tokens == {"Bearer hf_secret"}
    copy = tmp_path / "copy"
    for name, content in hub.files.items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(content)
    assert read_rows(copy / "rows.csv") == read_rows(finished / "row.csv")
    _, head, card = (copy / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head)["configs"] == [{"config_name": "rows", "data_files": "rows.csv"}]
    assert "| llamagen_scenes | cool_sd | prompts (3) |" in card
    [folder] = (copy / "runs").iterdir()
    assert yaml.safe_load((folder / "config.yaml").read_text())["metrics_dir"] is None
    assert b"/secret/place" not in b"".join(hub.files.values())
    assert not (folder / "images").exists()
    assert specbench.result(folder).row == read_rows(finished / "row.csv")[0]
    for command in (("compare", f"{folder}/baseline", str(folder)), ("breakdown", str(folder))):
        code, _, err = call(*command)
        assert code == 0, err


def test_images_and_a_dry_run(hub: Hub, finished: Path, call: Call) -> None:
    code, out, _ = call("push", str(finished), "repository=me/things", "images=true", "--dry-run")
    assert code == 0
    assert "images/00002.png" in out
    assert "# Runs of specbench" in out
    assert hub.made == []


def test_a_drafter_becomes_a_model_with_its_card(hub: Hub, call: Call, tmp_path: Path, finished: Path) -> None:
    folder = tmp_path / "eagle"
    folder.mkdir()
    (folder / "specbench.safetensors").write_bytes(b"weights")
    (folder / "card.md").write_text("# eagle for llamagen_scenes\n")
    assert call("push", str(folder), "repository=me/eagle")[0] == 0
    assert hub.made[0].get("type", "model") == "model"
    assert hub.files["specbench.safetensors"] == b"weights"
    assert "# eagle for llamagen_scenes" in hub.files["README.md"].decode()
    code, _, err = call("push", str(folder), str(finished), "repository=me/eagle")
    assert (code, "push it alone" in err) == (2, True)


def test_a_hub_that_refuses(hub: Hub, finished: Path, call: Call) -> None:
    for status, code, sentence in ((401, 2, "run `hf auth login`"), (400, 1, "the same command tries again")):
        hub.refuses = status
        exit_code, _, err = call("push", str(finished), "repository=me/things")
        assert (exit_code, sentence in err, err.count("\n")) == (code, True, 1)


def test_a_mistake_is_a_short_error(call: Call) -> None:
    for arguments in (
        "",
        "repository=me/x",
        "nowhere repository=me/x",
        ". repository=x",
        ". repository=a/b images=1",
        ". repository=a/b to=new",
        ". to=.",
    ):
        code, _, err = call("push", *arguments.split())
        assert (code, err.count("\n")) == (2, 1), arguments
