"""`specbench fetch` without a network: a hub made of dictionaries, and a web server on this machine."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import Call
from filelock import FileLock
from reference import REFERENCE, needs_reference
from stub_server import Answers, LoopbackServer, running

from specbench import cli
from specbench.config import configuration, missing_weights, parameters, registry
from specbench.errors import UsageError
from specbench.storage import downloads, home, sources
from specbench.storage.downloads import RemoteFile
from specbench.storage.reading import made
from specbench.storage.sources import Data, File

T2I, T5, DRAFTER = "peizesun/llamagen_t2i", "google/flan-t5-xl", "jadohu/llamagen_drafter"
CHAMELEON = "GAIR/Anole-7b-v0.1"
CHAMELEON_FILES = [f"tokenizer/{name}" for name in ("checklist.chk", "text_tokenizer.json", "vqgan.ckpt", "vqgan.yaml")]
FIRST, LATER = "1" * 40, "2" * 40

T5_TEXTS = ["config.json", "tokenizer.json", "tokenizer_config.json", "spiece.model", "model.safetensors.index.json"]
T5_WEIGHTS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
NOT_NEEDED = ["pytorch_model-00001-of-00002.bin", "modeling.py", "sub/config.json", ".gitattributes"]
HF_FILES = {"config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"pickle", "README.md": b""}


class FakeHub:
    """Repositories as dictionaries; `asked` lists the requests. `before` is called before every download."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {
            T2I: {name: name.encode() for name in ("t2i_XL_stage1_256.pt", "t2i_XL_stage2_512.pt", "vq_ds16_t2i.pt")},
            T5: {name: name.encode() for name in (*T5_TEXTS, *T5_WEIGHTS, *NOT_NEEDED)},
            DRAFTER: HF_FILES,
            CHAMELEON: {name: name.encode() for name in (*CHAMELEON_FILES, "models/7b/consolidated.pth")},
        }
        self.main = FIRST
        self.asked: list[tuple[str, str]] = []
        self.got: list[str] = []
        self.before: Callable[[str], None] = lambda name: None

    def files(self, repository: str, revision: str) -> tuple[str, list[RemoteFile]]:
        self.asked.append((repository, revision))
        content = self.repositories[repository]
        commit = self.main if revision == "main" else revision
        return commit, [
            RemoteFile(name, len(b), None if name.endswith(".json") else hashlib.sha256(b).hexdigest())
            for name, b in content.items()
        ]

    def get(self, repository: str, commit: str, paths: Sequence[str], folder: Path) -> None:
        for name in paths:
            path = folder / name
            if not path.exists():
                self.before(name)
                self.got.append(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.repositories[repository][name])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(downloads, "hub_files", lambda *args: fake.files(*args))
    monkeypatch.setattr(downloads, "hub_download", lambda *args: fake.get(*args))
    entry = registry.model_sources()["llamagen_xl"]  # as if no commit of its target and tokenizer were known
    moving = {name: replace(part, revision="main") for name, part in entry.parts.items() if part.repository == T2I}
    monkeypatch.setitem(registry.model_sources(), "llamagen_xl", replace(entry, parts={**entry.parts, **moving}))
    return fake


@pytest.fixture
def call(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Runs `specbench fetch` with a separate home -> (exit code, stdout, stderr)."""
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(downloads.time, "sleep", lambda seconds: None)
    return partial(call, "fetch")


def refused(call: Call, *arguments: str) -> str:
    """The message of a fetch that fails."""
    code, _, err = call(*arguments, "--yes")
    assert code == 2
    return err


def fetched(call: Call, *arguments: str) -> str:
    """The output of a fetch that succeeds."""
    code, out, err = call(*arguments, "--yes")
    assert (code, "specbench: " in err) == (0, False)
    return out


def stop(*_: Any) -> None:
    raise KeyboardInterrupt


def record_of(folder: Path) -> dict[str, Any]:
    """The content of SOURCE.json for each part."""
    return dict(json.loads((folder / "SOURCE.json").read_text())["parts"])


def tree_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_mistake_is_a_short_error(call: Call, hub: FakeHub) -> None:
    for arguments, names in (
        ([], ("model=", "data=", "metrics=")),
        (["metrics=fid", "data=parti"], ("model=", "data=", "metrics=")),
        (["metrics=clip"], ("'clip'", "clip_b16")),
        (["metrics=fid", "weights=here"], ("'weights'", "metrics=")),
        (["anole"], ("'anole'", "model")),
        (["model=llamagen_scenes"], ("'llamagen_scenes'", "anole")),
        (["data=scenes"], ("data=scenes",)),
        (["model=anole", "data_dir=here"], ("'data_dir'", "model=")),
        (["model=anole", "size=512"], ("anole", "size=")),
        (["model=lumina_mgpt", "size=640"], ("'640'", "1024, 512, 768")),
        (["model=anole", "drafter=sjd"], ("'sjd'", "eagle")),
        (["model=emu3", "drafter=eagle"], ("eagle", "emu3", str(home.model_folder("emu3") / "eagle"))),
        (["model=lumina_mgpt", "size=512", "drafter=eagle"], ("eagle", "lumina_mgpt", "512")),
        (["model=anole", "repository=../x"], ("repository",)),
    ):
        code, out, err = call(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert all(name in err for name in names), err
    assert hub.asked == []


def test_a_model_arrives_with_its_record(call: Call, hub: FakeHub) -> None:
    out = fetched(call, "model=llamagen_xl")
    pinned = registry.model_sources()["llamagen_xl"].parts["text"].revision
    folder = home.model_folder("llamagen_xl")
    texts = {f"text/{name}" for name in (*T5_TEXTS, *T5_WEIGHTS)}
    assert tree_of(folder) == {"SOURCE.json", "target/t2i_XL_stage1_256.pt", "tokenizer/vq_ds16_t2i.pt"} | texts
    assert (folder / "target/t2i_XL_stage1_256.pt").read_bytes() == b"t2i_XL_stage1_256.pt"
    assert f"target/: {T2I}, main, now {FIRST} (MIT)" in out
    assert f"text/: {T5}, {pinned} (Apache 2.0)" in out
    assert "t2i_XL_stage1_256.pt\n" in out
    assert re.search(r"\d+ B; .*[\d.]+ [GM]B", out)
    assert "non-commercial" not in out
    parts = record_of(folder)
    assert (parts["target"]["commit"], parts["target"]["revision"], parts["text"]["commit"]) == (FIRST, "main", pinned)
    assert parts["text"]["licence"] == "Apache 2.0"
    assert parts["text"]["files"]["spiece.model"] == {"size": 12, "sha256": hashlib.sha256(b"spiece.model").hexdigest()}
    assert all(part["complete"] and part["fetched"] for part in parts.values())

    asked = len(hub.asked)
    code, out, _ = call("model=llamagen_xl", "weights=official")
    assert (code, len(hub.asked)) == (0, asked)  # nobody is asked, nothing is confirmed
    assert out.startswith("llamagen_xl: nothing to fetch")
    out = fetched(call, "model=llamagen_xl", "drafter=eagle2")
    assert [name for name, _ in hub.asked[asked:]] == [DRAFTER]
    assert tree_of(folder / "eagle") == {"config.json", "model.safetensors"}  # not the pickle next to it
    (folder / "text/spiece.model").unlink()
    fetched(call, "model=llamagen_xl")
    assert hub.got[-1] == "spiece.model"


def test_the_licence_is_printed_and_metas_checksums_are_kept(
    call: Call, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.repositories["Alpha-VLLM/Lumina-mGPT-7B-512"] = HF_FILES
    code, out, err = call("model=lumina_mgpt", "size=512", f"weights={tmp_path / 'w'}", "--yes")
    assert out.count("(Chameleon Research License, non-commercial") == 2  # target and tokenizer
    assert code == 2
    assert "text_tokenizer.json arrived damaged" in err  # its bytes are made up here
    assert not (tmp_path / "w/tokenizer").exists()
    entry = registry.model_sources()["lumina_mgpt"]
    md5 = {name: hashlib.md5(f"tokenizer/{name}".encode()).hexdigest() for name in entry.parts["tokenizer"].files}
    honest = replace(entry, parts={**entry.parts, "tokenizer": replace(entry.parts["tokenizer"], md5=md5)})
    monkeypatch.setitem(registry.model_sources(), "lumina_mgpt", honest)
    out = fetched(call, "model=lumina_mgpt", "size=512", f"weights={tmp_path / 'w'}")
    assert f"specbench run model=lumina_mgpt size=512 weights={tmp_path / 'w'}" in out
    assert tree_of(tmp_path / "w/tokenizer") == {"text_tokenizer.json", "vqgan.ckpt", "vqgan.yaml"}
    err = refused(call, "model=lumina_mgpt", f"weights={tmp_path / 'w'}")
    assert "Alpha-VLLM/Lumina-mGPT-7B-512" in err
    assert "Alpha-VLLM/Lumina-mGPT-7B-768" in err


def test_an_interrupted_fetch_continues_at_the_same_commit(call: Call, hub: FakeHub) -> None:
    """The branch moves in the meantime: a part that has begun stays at its commit, and the rest is fetched at the
    newest commit."""

    def stop_at_second(name: str) -> None:
        if name == T5_WEIGHTS[1]:
            stop()

    folder = home.model_folder("llamagen_xl")
    hub.before = stop
    assert call("model=llamagen_xl", "--yes")[0] == 130
    hub.before, hub.main = stop_at_second, LATER
    assert call("model=llamagen_xl", "--yes")[0] == 130
    assert (folder / "target").is_dir()
    assert not (folder / "text").exists()  # a folder that is there is complete
    hub.before = lambda name: None
    got = len(hub.got)
    fetched(call, "model=llamagen_xl")
    assert sorted(hub.got[got:]) == sorted([T5_WEIGHTS[1], *T5_TEXTS[1:]])  # the rest, in the order of names
    assert not (folder / downloads.STAGING).exists()
    assert [record_of(folder)[part]["commit"] for part in ("target", "tokenizer")] == [FIRST, LATER]
    err = refused(call, "model=llamagen_xl", f"revision={LATER}")
    assert FIRST in err
    assert LATER in err


def test_revision_and_repository_name_another_target(call: Call, hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories |= {"me/mine": HF_FILES, "jadohu/LlamaGen-T2I": HF_FILES}
    fetched(call, "model=llamagen_xl", "repository=me/mine", "revision=v2", f"weights={tmp_path / 'a'}")
    assert ("me/mine", "v2") in hub.asked
    assert tree_of(tmp_path / "a/target") == {"config.json", "model.safetensors"}
    out = fetched(call, "model=llamagen_xl", "repository=jadohu/LlamaGen-T2I", f"weights={tmp_path / 'b'}")
    assert "(Chameleon Research License, non-commercial" in out
    assert call("model=lumina_mgpt", "size=1024")[0] == 2
    assert hub.asked[-1] == ("Alpha-VLLM/Lumina-mGPT-7B-1024", "main")
    hub.repositories[T2I] = {"README.md": b"", "sub/t2i_XL_stage1_256.pt": b""}
    err = refused(call, "model=llamagen_xl")
    assert all(name in err for name in (T2I, FIRST, "t2i_XL_stage1_256.pt"))


def test_the_user_s_own_files_are_taken_or_refused_but_never_replaced(call: Call, hub: FakeHub) -> None:
    own_file = home.model_folder("llamagen_xl") / "target/t2i_XL_stage1_256.pt"
    own_file.parent.mkdir(parents=True)
    own_file.write_bytes(b"short")
    assert str(own_file) in refused(call, "model=llamagen_xl")
    own_file.write_bytes(b"x" * 20)
    assert str(own_file) in refused(call, "model=llamagen_xl")
    assert own_file.read_bytes() == b"x" * 20
    own_file.write_bytes(b"t2i_XL_stage1_256.pt")
    out = fetched(call, "model=llamagen_xl")
    assert "t2i_XL_stage1_256.pt  (exists)" in out
    assert own_file.name not in hub.got


def test_consent(call: Call, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    code, _, err = call("model=llamagen_xl")
    assert (code, hub.got) == (2, [])
    assert "--yes" in err
    answers = iter(["", "n", "Y"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    for _ in range(2):
        assert (call("model=llamagen_xl")[0], hub.got) == (2, [])
    assert not home.model_folder("llamagen_xl").exists()
    assert call("model=llamagen_xl")[0] == 0


def test_a_folder_that_is_in_use_or_cannot_be_written_to(call: Call, hub: FakeHub, tmp_path: Path) -> None:
    staging = home.model_folder("llamagen_xl") / downloads.STAGING
    staging.mkdir(parents=True)
    with FileLock(staging / "lock"):
        assert str(home.model_folder("llamagen_xl")) in refused(call, "model=llamagen_xl")
    assert hub.got == []
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in refused(call, "model=llamagen_xl", f"weights={tmp_path / 'file'}")


def test_a_damaged_record_is_reported(call: Call, hub: FakeHub) -> None:
    folder = home.model_folder("llamagen_xl")
    folder.mkdir(parents=True)
    for content in ("{", "[]", '{"parts": {"target": 3}}'):
        (folder / "SOURCE.json").write_text(content)
        assert "SOURCE.json is damaged" in refused(call, "model=llamagen_xl")


def test_the_answer_of_the_hub_is_reported(call: Call, hub: FakeHub) -> None:
    import huggingface_hub.errors

    for kind, names in (
        ("GatedRepoError", (f"huggingface.co/{T2I}", "hf auth login")),
        ("RevisionNotFoundError", ("'main'", "revision=")),
        ("RepositoryNotFoundError", ("hf auth login",)),
        ("ConnectError", ("no route", "vq_ds16_t2i.pt", str(home.model_folder("llamagen_xl")))),
    ):
        assert kind == "ConnectError" or hasattr(huggingface_hub.errors, kind)

        def fail(repository: str, revision: str, kind: str = kind) -> Any:
            raise type(kind, (OSError,), {})("no route\nand more")

        hub.files = fail  # type: ignore[method-assign]
        err = refused(call, "model=llamagen_xl")
        assert err.count("\n") == 1
        assert all(name in err for name in (T2I, *names)), err


def test_offline_mode_is_honoured(
    call: Call, hub: FakeHub, parti: Web, evaluators: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for arguments, source in (
        ("data=parti", parti.url),
        ("metrics=fid", evaluators.url),
        ("model=anole", "leloy/Anole-7b-v0.1-hf"),
    ):
        err = refused(call, arguments)
        assert "HF_HUB_OFFLINE" in err
        assert source in err
    assert parti.asked == hub.asked == []


def test_every_real_model_and_drafter_has_its_entry() -> None:
    official = {n for n in parameters.choices("model") if parameters.default("model", n, "weights") == "official"}
    assert official == set(registry.model_sources())
    for name, entry in registry.model_sources().items():
        folders = {"janus": ["target"], "glm": ["target", "processor"]}.get(name.split("_")[0], ["target", "tokenizer"])
        assert list(entry.parts) == [*folders, *(["text"] if name in ("llamagen_xl", "llamagen_xl_512") else [])]
        assert set(entry.drafters) <= set(registry.network_folders().values())
    with_weights = {n for n in parameters.choices("drafter") if "drafter_weights" in parameters.declared("drafter", n)}
    assert with_weights == set(registry.network_folders())
    assert set(registry.data_sources()) < set(parameters.choices("data"))
    assert all("specbench fetch model=" in missing_weights.advice(name) for name in registry.model_sources())


#: Evaluators whose checksum no public page shows: a fetch gets it from the hub.
COMMIT_ALONE = ("mask2former", "pickscore", "dpg_questions")


def test_every_evaluator_is_pinned_and_hashed() -> None:
    for name, part in registry.evaluators().items():
        assert part.licence in ("Apache 2.0", "MIT", "see its page"), name
        assert set(part.sha256) == (set() if name in COMMIT_ALONE else set(part.files))
        assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in part.sha256.values())
        assert part.pinned
    [(name, digest)] = registry.evaluators()["inception"].sha256.items()
    assert name.endswith(f"-{digest[:8]}.pth")


def test_the_help_lists_pinned_commits(call: Call) -> None:
    models = registry.model_sources().values()
    parts = [p for m in models for p in (*m.parts.values(), *m.drafters.values(), *m.sizes.values())]
    out = call("--help")[1]
    message = dict(line.split() for line in out.splitlines() if re.fullmatch(r"  [\w.-]+/[\w.-]+ +\S+", line))
    for part in parts:
        assert message[part.repository] == part.revision
        assert part.revision == "main" or re.fullmatch(r"[0-9a-f]{40}", part.revision), part
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", part.repository)
    for file in itertools.chain.from_iterable(entry.files for entry in registry.data_sources().values()):
        assert re.fullmatch(r"[0-9a-f]{64}", file.sha256)
        servers = "https://raw.githubusercontent.com/", "https://s3.amazonaws.com/images.cocodataset.org/"
        assert file.address.startswith(servers)
    addresses = [downloads.RELEASES, *(part.address for part in registry.evaluators().values() if part.address)]
    assert all(address.startswith("https://") for address in addresses)


@needs_reference
def test_the_tables_agree_with_the_facts_at_hand() -> None:
    def on_disk(manifest: str) -> set[str]:
        return set(json.loads((REFERENCE / "manifests" / f"{manifest}.json").read_text())["files_on_disk"])

    parti = REFERENCE.parent / "data/PartiPrompts.tsv"
    [file] = registry.data_sources()["parti"].files
    assert (parti.stat().st_size, hashlib.sha256(parti.read_bytes()).hexdigest()) == (file.size, file.sha256)
    targets = {
        "llamagen_xl": "t2i_XL_stage1_256.pt",
        "llamagen_xl_512": "t2i_XL_stage2_512.pt",
        "llamagen_3b": "c2i_3B_384.pt",
        "llamagen_xl_c2i": "c2i_XL_384.pt",
        "llamagen_l": "c2i_L_384.pt",
    }
    for model, manifest in targets.items():
        assert set(registry.model_sources()[model].parts["target"].files) == on_disk(manifest)
    assert set(registry.model_sources()["anole"].parts["tokenizer"].files) == on_disk("chameleon_vqgan.ckpt")
    for model in ("janus_pro_1b", "janus_pro_7b"):
        checkpoint = json.loads((REFERENCE / f"manifests/{model.title().replace('_', '-')}.json").read_text())
        assert registry.model_sources()[model].parts["target"].repository.endswith(checkpoint["checkpoint"])
    lumina = registry.model_sources()["lumina_mgpt"].drafters["eagle"]
    assert (REFERENCE / f"manifests/{lumina.repository.split('/')[1]}_model.safetensors.json").is_file()
    facts = json.loads((REFERENCE / "manifests/Lumina-mGPT-7B-768.json").read_text())
    assert registry.model_sources()["lumina_mgpt"].parts["target"].repository.endswith(facts["checkpoint"])


#: Manifest -> the model and the folder that its tensors fill.
TENSORS = {
    "t2i_XL_stage1_256.pt": ("llamagen_xl", "target"),
    "vq_ds16_t2i.pt": ("llamagen_xl", "tokenizer"),
    "c2i_XL_384.pt": ("llamagen_xl_c2i", "target"),
    "Lumina-mGPT-7B-768": ("lumina_mgpt", "target"),
    "LANTERN-Lumina-mGPT-7B-768_model.safetensors": ("lumina_mgpt", "eagle"),
    "Lumina-mGPT-2.0": ("lumina_mgpt2", "target"),
    "Emu3-Gen": ("emu3", "target"),
    "Emu3-VisionTokenizer": ("emu3", "tokenizer"),
    "mar_base_checkpoint-last.pth": ("mar_b", "target"),
    "mar_large_checkpoint-last.pth": ("mar_l", "target"),
    "mar_huge_checkpoint-last.pth": ("mar_h", "target"),
    "kl16.ckpt": ("mar_l", "tokenizer"),
}


@needs_reference
def test_listed_sizes_match_the_tensors() -> None:
    """Within 1 %: a file also has its header, and the page shows three digits."""
    for manifest, (model, folder) in TENSORS.items():
        part = sources.part_of(registry.model_sources()[model], folder)
        assert part is not None
        stored = sum(size for name, size in part.known_sizes.items() if name.endswith((".pt", ".safetensors")))
        facts = json.loads((REFERENCE / "manifests" / f"{manifest}.json").read_text())
        kinds = {kind for _, kind in facts["tensors"].values() if kind != "int64"}
        assert stored == pytest.approx(facts["n_values"] * (2 if kinds == {"bfloat16"} else 4), rel=0.01), manifest


def test_sizes_are_known_by_name_or_not_at_all() -> None:
    fields = {
        "repository": "OWNER/NAME",
        "licence": "MIT",
        "listed": {"model-1.safetensors": "1.5 GB", "config.json": 9},
    }
    part = made(sources.Part, fields, "files of x")
    assert part.known_sizes == {"model-1.safetensors": 1.5e9, "config.json": 9}  # one of *.safetensors and *.bin
    unknown = {"config.json": 0, "*.safetensors|*.bin": 0}
    assert made(sources.Part, {**fields, "listed": {}}, "").known_sizes == unknown
    for wrong in ("1.5 GiB", "many", [1]):
        with pytest.raises(UsageError, match="listed"):
            made(sources.Part, {**fields, "listed": {"config.json": wrong}}, "files of x")


def test_the_error_for_missing_weights_has_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of the next step. It contains the names of the run, and it is a command line of specbench. After it
    the files exist, and the next error has the following step."""
    for case, (words, commands) in enumerate(
        (
            ("model=llamagen_xl method=vanilla", ["specbench fetch model=llamagen_xl"]),
            ("model=llamagen_xl method=eagle1", ["specbench fetch model=llamagen_xl drafter=eagle"]),
            ("model=llamagen_xl method=sjd weights=my", ["specbench fetch model=llamagen_xl weights=my"]),
            ("model=lumina_mgpt size=512 method=sjd", ["specbench fetch model=lumina_mgpt size=512"]),
            # The command that trains the drafter needs the target: that comes first.
            (
                "model=anole method=medusa",
                ["specbench fetch model=anole", "specbench train drafter=medusa model=anole"],
            ),
            ("model=lumina_mgpt size=512 method=eagle1", ["specbench fetch model=lumina_mgpt size=512"]),
        )
    ):
        here = tmp_path / str(case)
        (here / "my").mkdir(parents=True)
        monkeypatch.chdir(here)
        monkeypatch.setenv("SPECBENCH_HOME", str(here / "home"))
        cfg = configuration.compose([*words.split(), "n=1", "data=scenes", "metrics=none"])
        for command in commands:
            with pytest.raises(UsageError) as e:
                missing_weights.check(cfg)
            quoted = re.findall("`([^`]+)`", str(e.value))
            assert quoted == [command]
            assert str(e.value).index(quoted[0]) < str(e.value).index("(or: ")
            for part in registry.model_sources()[cfg.model].parts:
                folder = registry.weights_folder(cfg)
                assert folder
                (folder / part).mkdir(parents=True, exist_ok=True)
            if command.startswith("specbench fetch"):
                assert cli.main([*command.split()[1:], "--dry-run"]) == 0


class Web(LoopbackServer):
    """A web server on this machine. `breaks` are the bytes after which it closes the connection, one per request."""

    def __init__(self) -> None:
        super().__init__(WebHandler)
        self.content: dict[str, bytes] = {}
        self.ranges = True
        self.sends: bytes | None = None  # instead of a file's content, without a length
        self.breaks: list[int] = []
        self.asked: list[tuple[str, str | None]] = []

    def file(self, name: str, content: bytes, unpack: tuple[str, ...] = ()) -> File:
        self.content[f"/{name}"] = content
        return File(f"{self.url}/{name}", len(content), hashlib.sha256(content).hexdigest(), unpack)


class WebHandler(Answers):
    server: Web

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        web, range_header = self.server, self.headers.get("Range")
        web.asked.append((self.path, range_header))
        content = web.content.get(self.path.partition("?")[0])
        start = int(range_header[6:-1]) if range_header and web.ranges else 0
        if content is None:
            self.send_error(404)
        elif web.sends is not None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(web.sends)
        elif start and start >= len(content):
            self.send_error(416)
        else:
            headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": FIRST}  # of the hub
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            rest = content[start:]
            sent = 0 if self.command == "HEAD" else web.breaks.pop(0) if web.breaks else len(rest)
            self.send(rest, 206 if start else 200, cut=max(0, len(rest) - sent), **headers)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(downloads, "_BLOCK", 100)
    with running(Web()) as server:
        yield server


PROMPTS = b"Prompt\tCategory\n" + b"".join(b"a cat number %d\tAnimals\n" % i for i in range(500))


def prompts_file() -> Path:
    return home.data_folder("parti") / "PartiPrompts.tsv"


@pytest.fixture
def parti(web: Web, monkeypatch: pytest.MonkeyPatch) -> Web:
    monkeypatch.setitem(registry.data_sources(), "parti", Data((web.file("PartiPrompts.tsv", PROMPTS),), "Apache 2.0"))
    return web


def test_a_plain_file_arrives_with_its_record(call: Call, parti: Web, tmp_path: Path) -> None:
    out, folder = fetched(call, "data=parti"), home.data_folder("parti")
    assert tree_of(folder) == {"SOURCE.json", "PartiPrompts.tsv"}
    assert prompts_file().read_bytes() == PROMPTS
    assert "licence: Apache 2.0" in out
    entry = record_of(folder)["PartiPrompts.tsv"]
    expected = {"address": f"{parti.url}/PartiPrompts.tsv", "sha256": hashlib.sha256(PROMPTS).hexdigest()}
    assert entry.items() >= expected.items()
    assert entry["files"]["PartiPrompts.tsv"]["size"] == len(PROMPTS)
    assert (call("data=parti")[0], len(parti.asked)) == (0, 1)  # nothing to ask for
    fetched(call, "data=parti", f"data_dir={tmp_path / 'there'}")
    assert "PartiPrompts.tsv" in tree_of(tmp_path / "there")


def test_a_broken_download_continues(call: Call, parti: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same process, in another process, and after Ctrl-C; also from a server that does not support ranges."""
    parti.breaks = [1000, 700]
    fetched(call, "data=parti")
    assert [ranges for _, ranges in parti.asked] == [None, "bytes=1000-", "bytes=1700-"]
    for ranges in (True, False):
        shutil.rmtree(home.data_folder("parti"))
        parti.breaks = [1500, *[0] * 20]
        assert f"{parti.url}/PartiPrompts.tsv" in refused(call, "data=parti")
        parti.breaks, parti.ranges = [], ranges
        fetched(call, "data=parti")
        assert parti.asked[-1][1] == "bytes=1500-"
        assert prompts_file().read_bytes() == PROMPTS
    shutil.rmtree(home.data_folder("parti"))
    parti.breaks, parti.ranges = [2000], True
    with monkeypatch.context() as m:
        m.setattr(downloads.time, "sleep", stop)
        assert call("data=parti", "--yes")[0] == 130
    fetched(call, "data=parti")
    assert parti.asked[-1][1] == "bytes=2000-"


def test_a_partial_file_of_other_content_is_removed(call: Call, parti: Web) -> None:
    partial = home.data_folder("parti") / downloads.STAGING / "PartiPrompts.tsv.part"
    for old in (b"?" * 1000, b"?" * (len(PROMPTS) + 1)):
        partial.parent.mkdir(parents=True)
        partial.write_bytes(old)
        parti.asked.clear()
        while call("data=parti", "--yes")[0]:
            assert len(parti.asked) < 3
        assert prompts_file().read_bytes() == PROMPTS
        shutil.rmtree(home.data_folder("parti"))


def test_a_file_of_another_size_or_content_is_refused(call: Call, parti: Web) -> None:
    for content in (PROMPTS + b"one more\n", PROMPTS[:-9], PROMPTS.replace(b"cat", b"dog")):
        parti.content["/PartiPrompts.tsv"] = content
        for _ in range(2):
            assert "PartiPrompts.tsv" in refused(call, "data=parti")
            assert not prompts_file().exists()
    parti.content["/PartiPrompts.tsv"] = PROMPTS
    fetched(call, "data=parti")


def test_no_file_grows_beyond_its_published_size(call: Call, parti: Web) -> None:
    """Also for an answer without a length."""
    parti.sends = b"?" * 3_000_000
    for _ in range(2):
        assert str(len(PROMPTS)) in refused(call, "data=parti")
        assert all(path.stat().st_size <= len(PROMPTS) for path in home.data_folder("parti").rglob("*"))
    parti.sends = None
    fetched(call, "data=parti")


def test_a_server_that_has_no_such_file_or_is_not_there(call: Call, parti: Web) -> None:
    del parti.content["/PartiPrompts.tsv"]
    assert "404" in refused(call, "data=parti")
    assert len(parti.asked) == 1
    parti.shutdown()
    parti.server_close()
    assert parti.url in refused(call, "data=parti")


def test_a_user_s_own_data_file_is_checked(call: Call, parti: Web) -> None:
    own_file = prompts_file()
    own_file.parent.mkdir(parents=True)
    own_file.write_bytes(b"Prompt\n")
    assert str(own_file) in refused(call, "data=parti")
    own_file.write_bytes(PROMPTS)
    fetched(call, "data=parti")
    assert parti.asked == []


VOCABULARY, REWARD, INCEPTION = b"[PAD]\nred\n", b"reward" * 99, b"inception" * 999


@pytest.fixture
def evaluators(hub: FakeHub, web: Web, monkeypatch: pytest.MonkeyPatch) -> Web:
    """A hub and a server of releases with ImageReward's files and Inception's, which have these few bytes."""
    checksums = {"image_reward": REWARD, "image_reward/text": VOCABULARY, "inception": INCEPTION}
    for name, content in checksums.items():
        part = registry.evaluators()[name]
        [file] = part.files
        if part.sizes:
            web.content[f"/{part.repository}/releases/download/{part.revision}/{file}"] = content
        else:
            hub.repositories[part.repository] = {file: content, "README.md": b"", "test_images.zip": b"large"}
        sizes = {file: len(content)} if part.sizes else part.sizes
        changed = replace(part, sha256={file: hashlib.sha256(content).hexdigest()}, sizes=sizes)
        monkeypatch.setitem(registry.evaluators(), name, changed)
    monkeypatch.setattr(downloads, "RELEASES", web.url)
    return web


def test_evaluators_arrive_where_metrics_look_for_them(call: Call, hub: FakeHub, evaluators: Web) -> None:
    out, folder = fetched(call, "metrics=image_reward,kid"), home.metrics_folder()
    inception = "inception/pt_inception-2015-12-05-6726825d.pth"
    files = {"image_reward/ImageReward.pt": REWARD, "image_reward/text/vocab.txt": VOCABULARY, inception: INCEPTION}
    assert tree_of(folder) == {"SOURCE.json", *files}
    assert all((folder / name).read_bytes() == content for name, content in files.items())
    assert "inception/: mseitzer/pytorch-fid, fid_weights (Apache 2.0)" in out
    commit = registry.evaluators()["image_reward"].revision
    assert f"image_reward/: zai-org/ImageReward, {commit} (Apache 2.0)" in out
    assert "specbench run metrics=image_reward,kid ..." in out
    [file] = record_of(folder)["inception"]["files"].values()
    assert file["sha256"] == hashlib.sha256(INCEPTION).hexdigest()

    asked = len(hub.asked), len(evaluators.asked)
    code, out, _ = call("metrics=fid,image_reward_package")
    assert (code, len(hub.asked), len(evaluators.asked)) == (0, *asked)
    assert re.match("fid,image_reward_package: .*inception/, image_reward/, image_reward/text/", out)


def test_a_set_of_metrics_is_fetched_with_all_it_reads(
    call: Call, hub: FakeHub, evaluators: Web, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("clip_b32", "hpsv2"):
        part = registry.evaluators()[name]
        content = {file: file.encode() for file in part.files}
        hub.repositories[part.repository] = content
        digests = {file: hashlib.sha256(b).hexdigest() for file, b in content.items()}
        monkeypatch.setitem(registry.evaluators(), name, replace(part, sha256=digests))
    out = fetched(call, "metrics=coco", f"metrics_dir={tmp_path / 'here'}")
    folders = {path.name for path in (tmp_path / "here").iterdir()} - {downloads.STAGING}
    assert folders == {"SOURCE.json", "clip_b32", "hpsv2", "image_reward", "inception"}
    assert f"specbench run metrics=coco metrics_dir={tmp_path / 'here'} ..." in out
    code, out, _ = call("metrics=scenes")
    assert (code, out.partition(",")[0]) == (0, "scenes: nothing to fetch")


def test_a_file_at_a_plain_address_is_fetched(call: Call, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """DINOv2's file is on Meta's server and in no repository."""
    part = registry.evaluators()["dinov2"]
    [file] = part.files
    assert part.sizes == {file: 1_217_586_395}
    web.content[f"/models/{file}"] = INCEPTION
    changed = {"address": f"{web.url}/models", "sizes": {file: len(INCEPTION)}}
    digest = {file: hashlib.sha256(INCEPTION).hexdigest()}
    monkeypatch.setitem(registry.evaluators(), "dinov2", replace(part, sha256=digest, **changed))
    out = fetched(call, "metrics=fd_dinov2")
    assert (home.metrics_folder() / "dinov2" / file).read_bytes() == INCEPTION
    assert "dinov2/: facebookresearch/dinov2, 2023-04-13 (Apache 2.0)" in out


def test_a_file_of_unknown_size_is_fetched(call: Call, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is asked for the size. DPG-Bench's table has a published MD5."""
    part, content = registry.evaluators()["dpg_questions"], b"item_id,text\n" * 99
    assert not part.sizes
    web.content["/dpg_bench/dpg_bench.csv"] = content
    changed = replace(part, address=f"{web.url}/dpg_bench", md5={"dpg_bench.csv": hashlib.md5(content).hexdigest()})
    monkeypatch.setitem(registry.evaluators(), "dpg_questions", changed)
    fetched(call, "metrics=dpg")
    assert (home.metrics_folder() / "dpg_questions/dpg_bench.csv").read_bytes() == content
    shutil.rmtree(home.metrics_folder())
    web.content["/dpg_bench/dpg_bench.csv"] = content[:-2] + b"x\n"
    assert "dpg_bench.csv arrived damaged" in refused(call, "metrics=dpg")
    del web.content["/dpg_bench/dpg_bench.csv"]
    assert "dpg_bench.csv" in refused(call, "metrics=dpg")


def test_an_evaluator_with_other_content_is_refused(call: Call, hub: FakeHub, evaluators: Web) -> None:
    """Also a text file, for which the hub gives no checksum."""
    for path, content in evaluators.content.items():
        evaluators.content[path] = content[:-1] + b"?"
    hub.repositories["google-bert/bert-base-uncased"]["vocab.txt"] = VOCABULARY.replace(b"red", b"den")
    for name, file in (("fid", "pt_inception"), ("image_reward", "vocab.txt")):
        assert re.search(f"{file}.* arrived damaged", refused(call, f"metrics={name}"))


def test_evaluators_without_their_file_are_reported(call: Call, hub: FakeHub, evaluators: Web) -> None:
    hub.repositories["zai-org/ImageReward"].pop("ImageReward.pt")
    err = refused(call, "metrics=image_reward")
    assert re.search("ImageReward.pt .*zai-org/ImageReward .*image_reward/", err)


def archive(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        for name, content in members.items():
            z.writestr(name, content)
    return out.getvalue()


PHOTOS = {f"val2017/{i:012d}.jpg": b"photo %d" % i for i in range(20)}
CAPTIONS = {"annotations/captions_val2017.json": b"{}", "annotations/instances_val2017.json": b"large"}


@pytest.fixture
def coco(web: Web, monkeypatch: pytest.MonkeyPatch) -> Web:
    files = (
        web.file("annotations.zip", archive(CAPTIONS), ("annotations/captions_val2017.json",)),
        web.file("val2017.zip", archive({"val2017/": b"", **PHOTOS}), ("val2017/*.jpg",)),
    )
    monkeypatch.setitem(registry.data_sources(), "coco2017", Data(files, "CC BY 4.0"))
    return web


def test_archives_are_unpacked_as_far_as_they_are_needed(call: Call, coco: Web) -> None:
    fetched(call, "data=coco2017")
    folder = home.data_folder("coco2017")
    assert tree_of(folder) == {"SOURCE.json", "annotations/captions_val2017.json", *PHOTOS}
    assert (folder / "val2017/000000000007.jpg").read_bytes() == b"photo 7"
    assert record_of(folder)["val2017.zip"]["files"]["val2017/*.jpg"]["count"] == 20
    assert call("data=coco2017")[0] == 0
    assert len(coco.asked) == 2
    (folder / "val2017/000000000007.jpg").unlink()
    fetched(call, "data=coco2017")
    assert [asked[0] for asked in coco.asked[2:]] == ["/val2017.zip"]
    assert tree_of(folder) == {"SOURCE.json", "annotations/captions_val2017.json", *PHOTOS}


def test_room_for_what_an_archive_holds_is_asked_for(call: Call, coco: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(file.size for file in registry.data_sources()["coco2017"].files)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 2 * size - 1))
    assert "data_dir=DIR" in refused(call, "data=coco2017")
    assert coco.asked == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 2 * size))
    fetched(call, "data=coco2017")


def test_an_archive_that_reaches_outside_or_is_another_is_refused(
    call: Call, web: Web, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for content in (
        archive({"val2017/../../evil.jpg": b"evil"}),  # a hostile name
        archive({"/val2017/evil.jpg": b"evil"}),
        archive({"readme": b""}),
        b"no zip",
    ):
        file = web.file("val2017.zip", content, ("val2017/*.jpg",))
        monkeypatch.setitem(registry.data_sources(), "coco2017", Data((file,), "CC BY 4.0"))
        call("data=coco2017", "--yes")
        outside = [path for path in tmp_path.rglob("evil.jpg") if not path.is_relative_to(home.data_folder("coco2017"))]
        assert not outside
        shutil.rmtree(home.data_folder("coco2017"))
    assert "val2017.zip" in refused(call, "data=coco2017")


def test_the_hub_s_own_client_fetches_from_a_hub(call: Call, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub against a hub on this machine: listing, commit, download, and only the files that are needed."""
    content = {"config.json": b'{"a": 1}', "model.safetensors": b"w" * 300_000, "modeling_x.py": b"never"}
    digest = hashlib.sha256(content["model.safetensors"]).hexdigest()
    lfs = {"model.safetensors": {"lfs": {"sha256": digest, "oid": digest, "size": 300_000, "pointerSize": 130}}}
    siblings = [{"rfilename": name, "size": len(b), "blobId": "0"} | lfs.get(name, {}) for name, b in content.items()]
    tree = [
        {"path": name, "type": "file", "size": len(b), "oid": "0"} | lfs.get(name, {}) for name, b in content.items()
    ]
    web.content = {f"/o/m/resolve/{FIRST}/{name}": b for name, b in content.items()}
    listing = json.dumps({"id": "o/m", "sha": FIRST, "siblings": siblings}).encode()
    web.content |= {f"/api/models/o/m/revision/{name}": listing for name in ("main", FIRST)}
    web.content[f"/api/models/o/m/tree/{FIRST}"] = json.dumps(tree).encode()
    address = f"{web.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", web.url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", address)
    source = sources.ModelSource({"target": sources.Part("o/m", "MIT")})
    monkeypatch.setitem(registry.model_sources(), "anole", source)
    folder, weights = home.model_folder("anole"), f"/o/m/resolve/{FIRST}/model.safetensors"
    web.content[weights] = b"v" * 300_000  # of the same size
    assert "model.safetensors" in refused(call, "model=anole")
    assert not (folder / "target").exists()
    web.content[weights] = content["model.safetensors"]
    fetched(call, "model=anole")
    assert tree_of(folder) == {"SOURCE.json", "target/config.json", "target/model.safetensors"}
    assert (folder / "target/model.safetensors").read_bytes() == content["model.safetensors"]
    part = record_of(folder)["target"]
    assert (part["commit"], part["revision"]) == (FIRST, "main")
    assert not any("modeling_x" in path for path, _ in web.asked)
