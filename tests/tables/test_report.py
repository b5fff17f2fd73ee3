"""The report: every number has its row and its command, texts are treated as data, and every control works in a
browser."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_pipeline import FakePipeline
from PIL import Image

from specbench.cli.report import report as draw
from specbench.config import configuration, parameters
from specbench.errors import UsageError
from specbench.harness import run
from specbench.rows import baseline, provenance
from specbench.rows.columns import COLUMNS
from specbench.rows.csv_files import read_rows, to_csv
from specbench.rows.remark import as_json, free
from specbench.tables import report

EVIL = "</script><img src=x onerror=alert(1)>&amp; <b>a \\cite{x} | \N{RIGHT-TO-LEFT OVERRIDE}"


def row(run_id: str, *overrides: str, **cells: Any) -> dict[str, Any]:
    """A row as a run with these overrides writes it."""
    cfg = configuration.compose(["n=4", *overrides])
    chosen = {name: value for name, value in cfg.plain().items() if name in COLUMNS}
    origin = {"time": "2026-11-21T10:00:00+00:00", "commit": "c0ffee", "weights": "embedded:1+2", "device": "cpu"}
    names = {"run_id": run_id, "baseline_run_id": f"{run_id}/baseline" if cfg.baseline else None}
    values = {"config_hash": provenance.config_hash(cfg), "accepted_length_mean": 1.0, "perplexity": 8.0}
    return dict.fromkeys(COLUMNS) | chosen | origin | names | values | cells


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of four methods, two of them with images, and audits."""
    folder = tmp_path_factory.mktemp("report")
    wide = dict.fromkeys(["acceptance_rate", "first_accept", "draft_tv", "draft_top1", "peak_memory_mib"], 0.5)
    rows = [
        row("v", "method=vanilla"),
        row("a", "method=cool_sd", "delta=2", accepted_length_mean=2.5, perplexity=9.5, accepted_length_stderr=0.1),
        row("b", "method=eagle1", accepted_length_mean=2.0, perplexity=8.1, drafted_by_position="[0, 0.5, 0.75, 1]"),
        row("c", "method=sjd", accepted_length_mean=1.5, perplexity=8.6, remarks=as_json([free(EVIL)]), **wide),
        row("d", "method=eagle1", "batch=2", accepted_length_mean=1.9, perplexity=8.2, drafted_by_position="[1,0,0,1]"),
    ]
    rng = np.random.default_rng(0)
    for with_images in (rows[1], rows[2], rows[4]):
        run_folder = folder / "runs" / with_images["run_id"]
        (run_folder / "images").mkdir(parents=True)
        (run_folder / "row.csv").write_text(to_csv([with_images]))
        lines = []
        for i in range(3):
            Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(run_folder / "images" / f"{i:05d}.png")
            lines.append(json.dumps({"index": i, "prompt": f"{EVIL} {i}", "image": f"images/{i:05d}.png"}))
        (run_folder / "records.jsonl").write_text("\n".join([*lines, '{"index": 3, "pro']))  # the last line was cut off
    (folder / "rows.csv").write_text(to_csv(rows))
    (folder / "more.csv").write_text(to_csv([rows[0] | {"time": "2025-01-01", "run_id": "old"}]))
    audits = "method,model,samples,tv,tv_noise,p_value,verdict\ncool_sd,v2t10,1000,0.3,0.01,0.0,not lossless\n"
    (folder / "audit.csv").write_text(audits + "sjd,v2t10,1000,0.01,0.01,0.6,lossless\n")
    (folder / "bench.csv").write_text("time,step_ms\n1,2\n")  # neither runs nor audits: not shown on this page
    return folder


@pytest.fixture(scope="module")
def page(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    assert draw([str(results), f"runs={results / 'runs'}", "pictures=2", f"out={out}"]) == 0
    return out


def data(page: Path) -> dict[str, Any]:
    match = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    return dict(json.loads(match[1]))


def test_every_row_is_shown_once_with_its_values(page: Path) -> None:
    content = data(page)
    assert [r["label"] for r in content["rows"]] == ["vanilla", "cool_sd delta=2", "eagle1", "eagle1", "sjd"]
    rows = {r["id"]: r for r in content["rows"]}
    assert set(rows) == {"v", "a", "b", "c", "d"}  # the newer row of vanilla replaces the older one
    assert rows["a"]["values"] == {"accepted_length_mean": 2.5, "perplexity": 9.5}
    assert rows["a"]["errors"] == {"accepted_length_mean": 0.1}
    assert (rows["a"]["facts"]["commit"], rows["a"]["file"]) == ("c0ffee", "rows.csv")
    assert len(content["audits"]) == 2
    assert ["".join(rows[name]["images"]) for name in "vabcd"] == ["", "01", "01", "", "01"]
    assert [rows[name]["map"] for name in "bda"] == [[0.0, 0.5, 0.75, 1.0], [1.0, 0.0, 0.0, 1.0], None]


def test_the_command_of_a_row_gives_its_configuration() -> None:
    for words in (
        "method=vanilla",
        "method=cool_sd delta=2 drafter=eagle window=5",
        "method=lantern k=10 temperature=0 baseline=false batch=50",
        "method=sjd top_k=100 seed=3 metrics=none",
        "method=cspd model=mar_scenes gamma=4 cfg_scale=3",
    ):
        line, exact = report.command(row("x", *words.split()))
        assert exact, words
        again, first = configuration.compose(line.split()[2:]), configuration.compose(["n=4", *words.split()])
        assert provenance.config_hash(again) == provenance.config_hash(first), words
    for name, value, method in (("config_hash", "other", "sjd"), ("method", "gone", "gone")):
        line, exact = report.command(row("x", "method=sjd") | {name: value})
        assert (exact, line.split()[2:4]) == (False, ["model=llamagen_scenes", f"method={method}"])


def test_a_lossless_run_is_exact_and_has_no_measured_divergence() -> None:
    for words, expected in (
        ("method=vanilla", True),
        ("method=sjd", True),
        ("method=sjd_pac", True),
        ("method=sjd coupling=threshold", False),
        ("method=scd variant=released", False),
        ("method=scd variant=released coupling=gumbel", True),  # stored=old has no effect
        ("method=sjd_pac variant=released", False),
        ("method=pathspec", True),
        ("method=pathspec variant=released", False),
        ("method=jacobi_built_in rule=exact", True),
        ("method=jacobi_built_in rule=exact opening=greedy", False),
        ("method=cool_sd", False),
        ("method=eagle2 drafter=vvs", False),
        ("method=zipar", False),  # its rule is exact, and it verifies nothing
        ("method=cspd model=mar_scenes", True),
        ("method=cspd_paper model=mar_scenes", False),
        ("method=cspd model=mar_scenes on_reject=continue", False),
        ("method=vanilla model=mar_scenes iterations=4", False),
    ):
        assert report.is_lossless(row("x", *words.split())) is expected, words
    assert not report.is_lossless(row("x", "method=cool_sd", emitted_kl=1e-14, emitted_tv=5e-8))
    assert report.is_lossless(row("x", "method=sjd", emitted_kl=1e-14, emitted_tv=5e-8))
    assert not report.is_lossless(row("x", "method=sjd", emitted_kl=1e-3))
    assert not report.is_lossless(row("x", "method=sjd", emitted_tv=1e-3))  # an infinite KL is an empty cell


def test_columns_of_interest_are_first_and_runs_are_named_by_what_a_user_sets(tmp_path: Path) -> None:
    cells = {"speedup_latency": 2.0, "step_compression": 3.0, "emitted_kl": 0.1, "image_reward": 0.5, "clip_score": 0.2}
    (tmp_path / "rows.csv").write_text(to_csv([row("a", "method=sjd", "temperature=0.5", **cells)]))
    content = report.page_data(report.gather([tmp_path], [], 0))
    assert [f["key"] for f in content["shown"]] == [
        *("speedup_latency", "step_compression", "emitted_kl", "clip_score", "image_reward"),
        *("accepted_length_mean", "perplexity"),
    ]
    assert {f["key"]: f["axis"] for f in content["shown"][:3]} == {
        "speedup_latency": "x", "step_compression": "x", "emitted_kl": "y"
    }  # fmt: skip
    assert set(content["apart"]) <= {*parameters.table(), "device_name", "run_id"}
    assert content["rows"][0]["sampling"] == {
        "temperature": "0.5", "top_p": "1", "cfg_scale": "3", "weights": "embedded:1"
    }  # fmt: skip


def test_seconds_that_cannot_be_compared_are_marked(tmp_path: Path) -> None:
    timed = {"speedup_latency": 2.0, "timed_pairs": 8, "timing_valid": "true", "threads": 1, "step_compression": 2.0}
    rows = [row(f"r{i}", "method=sjd", f"window={i + 4}", **timed, device_name="A") for i in range(3)]
    rows[1]["device_name"], rows[2]["timed_pairs"], rows[2]["timing_valid"] = "B", 2, "false"
    (tmp_path / "rows.csv").write_text(to_csv(rows))
    content = report.page_data(report.gather([tmp_path], [], 0))
    doubts = {r["id"]: r["doubts"] for r in content["rows"]}
    assert {name: [*found] for name, found in doubts.items()} == {
        "r0": [], "r1": ["speedup_latency"], "r2": ["speedup_latency"]
    }  # fmt: skip
    assert "B instead of A" in doubts["r1"]["speedup_latency"]


def test_images_can_be_kept_without_their_runs(results: Path, page: Path, tmp_path: Path) -> None:
    words, pictures = [str(results), "pictures=2"], tmp_path / "kept"
    assert draw([*words, f"runs={results / 'runs'}", f"keep={pictures}", f"out={tmp_path / 'a.html'}"]) == 0
    assert draw([*words, f"runs={pictures}", f"out={tmp_path / 'b.html'}"]) == 0
    assert data(tmp_path / "a.html") == data(tmp_path / "b.html") == data(page)


def test_texts_are_never_markup(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "onerror" in text
    assert "<img src=x" not in text
    assert text.count("</script>") == 2  # one for the data, one for the program
    assert {r["images"]["1"]["prompt"] for r in data(page)["rows"] if r["images"]} == {f"{EVIL} 1"}
    assert "http://www.w3.org/2000/svg" in text
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)  # nothing is fetched


def test_mistakes_are_usage_errors(results: Path) -> None:
    for words, message in (
        (["nowhere"], "there is no file or folder nowhere"),
        ([str(results / "bench.csv")], "no rows of runs or audits in"),
        ([str(results), "runs=nowhere"], "there is no folder nowhere with runs"),
        ([str(results), "out=page.txt"], "out= must be a .html file"),
        ([str(results), "pictures=few"], "pictures .* 10000"),
        ([str(results), "picture=3"], "unknown file or argument 'picture' .*did you mean pictures"),
        ([str(results), f"runs={results / 'runs'},"], "remove the extra comma"),
        ([str(results), "runs=~nobody-of-this-name/x"], "there is no folder"),
        ([str(results), f"runs={results / 'runs/a/images'}"], "there are no runs in .*images"),
        ([str(results / "runs/a/images")], "there are no runs in .*images"),
    ):
        with pytest.raises(UsageError, match=message):
            draw(words)


def shown(out: str = "report.html") -> dict[str, tuple[str, int]]:
    """run_id -> label and number of images."""
    return {r["id"]: (r["label"], len(r["images"])) for r in data(Path(out))["rows"]}


@pytest.fixture(scope="module")
def grid_and_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grid of four runs and, in a folder inside it, a single run."""
    folder = tmp_path_factory.mktemp("grown")
    jobs = {f"grid/{w},{s}": ["method=sjd", f"window={w}", f"seed={s}"] for w in (4, 8) for s in (0, 1)}
    for out, words in (jobs | {"one/more": ["method=vanilla"]}).items():
        cfg = configuration.compose([*words, "n=2", "metrics=none", "baseline=false"])
        run.run(cfg, str(folder / "deep" / out), loader=FakePipeline)
    return folder


@pytest.fixture
def grid(grid_and_run: Path, tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, which is the working folder and the home."""
    shutil.copytree(grid_and_run / "deep", tmp_path / "deep")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_folders_of_runs_are_shown_with_their_images(grid: Path, call: Any) -> None:
    """One run, many runs and grids, given as folders of rows and with runs=."""
    expected = [("sjd window=4", 1), ("sjd window=4", 1), ("sjd window=8", 1), ("sjd window=8", 1), ("vanilla", 1)]
    for words in (["deep"], ["deep/grid", "deep/one"], ["~/deep"], ["deep/grid", "runs=~/deep/one/more"]):
        code, out, _ = call("report", *words, "pictures=1")
        assert (code, "5 runs, 5 images" in out) == (0, True), words
        assert sorted(shown().values()) == expected
    assert call("report", "deep/one/more")[0] == 0
    assert list(shown().values()) == [("vanilla", 2)]
    (grid / "rows.csv").write_text(to_csv([row("listed", "method=sjd", "seed=9")]))
    for runs, count in (("one/more", 1), ("one", 1), ("grid", 4), ("grid,~/deep/one", 5), ("one,deep", 5)):
        assert call("report", "rows.csv", f"runs=deep/{runs}", "pictures=1")[0] == 0
        labels = shown()
        assert labels.pop("listed") == ("sjd", 0)
        assert [images for _, images in labels.values()] == [1] * count, runs


def test_a_run_is_shown_once_however_often_it_is_found(grid: Path, call: Any) -> None:
    assert call("report", "deep")[0] == 0
    before = shown()
    [vanilla] = [name for name, (label, _) in before.items() if label == "vanilla"]
    shutil.copytree(grid / "deep", grid / "copy")
    for path in (grid / "copy").rglob("images"):
        shutil.rmtree(path)
    rows = [read_rows(path)[0] for path in sorted((grid / "deep").rglob("row.csv"))]
    (grid / "rows.csv").write_text(to_csv(rows))
    assert call("report", "copy", "rows.csv", "deep", "rows.csv", "runs=deep")[0] == 0
    assert shown() == before
    # two runs of one configuration: a table shows the newer one; if both folders are named, both are shown
    again = next(r for r in rows if r["run_id"] == vanilla) | {"run_id": "again", "time": "2099-01-01T00:00:00"}
    (grid / "rows.csv").write_text(to_csv([*rows, again]))
    assert call("report", "rows.csv")[0] == 0
    assert set(shown()) == set(before) - {vanilla} | {"again"}
    assert call("report", "rows.csv", "runs=deep/one")[0] == 0
    assert set(shown()) == {*before, "again"}


def test_damaged_rows_in_a_folder_are_left_out_and_named(grid: Path, call: Any) -> None:
    """A damaged row.csv of one run used to stop the whole report, or gave a traceback if it was a folder."""
    assert call("report", "deep")[0] == 0
    before = shown()
    evaluated = dict.fromkeys(COLUMNS) | {"run_id": "scored", "n": 2}  # like the row of specbench evaluate
    bad = {
        "text": b"\xff\xfe\x00",
        "foreign": b"a,b\n1,2\n",
        "empty": b"",
        "many": to_csv([row(name, "method=vanilla") for name in "xy"]).encode(),
        "short": (grid / "deep/one/more/row.csv").read_bytes() + b"x\n",
        "number": b"run_id,config_hash,steps\na,b,quick\n",
        "scored": to_csv([evaluated]).encode(),
    }
    for name, content in bad.items():
        (grid / "deep/bad" / name).mkdir(parents=True)
        (grid / "deep/bad" / name / "row.csv").write_bytes(content)
    (grid / "deep/bad/folder/row.csv").mkdir(parents=True)
    code, _, err = call("report", "deep")
    assert (code, "Traceback" in err) == (0, False)
    assert {name for name in (*bad, "folder") if f"bad/{name}" in err} == {*bad, "folder"}
    assert shown() == before
    for words in (["deep/bad/foreign"], ["deep/one", "runs=deep/bad/text"], ["deep/bad/folder"], ["deep/bad/many"]):
        code, _, err = call("report", *words)
        assert (code, words[-1].removeprefix("runs=") in err) == (2, True), words


def test_a_run_with_damaged_images_keeps_its_row(grid: Path, call: Any) -> None:
    run_folder = grid / "deep/one/more"
    sorted((run_folder / "images").iterdir())[0].write_bytes(b"no image")
    for count in (1, 0):
        code, _, err = call("report", "deep/one")
        assert (code, "deep/one/more" in err) == (0, True)
        assert list(shown().values()) == [("vanilla", count)]
        if count:
            (run_folder / "records.jsonl").unlink()
            (run_folder / "records.jsonl").mkdir()


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grid of two runs with a baseline each."""
    folder = tmp_path_factory.mktemp("compared")
    for delta in ("1.1", "2"):
        cfg = configuration.compose(["method=cool_sd", f"delta={delta}", "n=3", "metrics=none"])
        run.run(cfg, str(folder / f"delta={delta}"), loader=FakePipeline)
    return folder


def test_the_baseline_is_a_row_with_images(compared: Path, tmp_path: Path) -> None:
    for out, words in (("a", []), ("b", ["runs=kept"])):
        with contextlib.chdir(tmp_path):
            assert draw([str(compared), "pictures=2", f"out={out}.html", *(words or ["keep=kept"])]) == 0
    for name in "ab":
        content = data(tmp_path / f"{name}.html")
        assert [r["label"] for r in content["rows"]] == ["vanilla", "cool_sd", "cool_sd delta=2"]
        assert [len(r["images"]) for r in content["rows"]] == [2, 2, 2]
        vanilla = content["rows"][0]
        assert vanilla["values"]["accepted_length_mean"] == vanilla["values"]["speedup_step"] == 1
        assert vanilla["images"] != content["rows"][1]["images"]
    for text in ("2 runs", "vanilla", "cool_sd", "llamagen_scenes", "3 prompts", "delta"):
        assert text in content["about"]
    assert [row["method"] for row in report.gather([compared], [], 0).rows] == ["cool_sd"] * 2


def test_a_damaged_baseline_is_left_out(compared: Path, tmp_path: Path) -> None:
    content = (compared / "delta=2/baseline.jsonl").read_bytes()
    for i, damaged in enumerate((b"", content[: len(content) // 2], b"{}\n", content.replace(b'"steps"', b'"stops"'))):
        shutil.copytree(compared / "delta=2", tmp_path / str(i))
        (tmp_path / str(i) / "baseline.jsonl").write_bytes(damaged)
        assert report.gather([tmp_path / str(i)], [], 2).baselines == []
    assert len(report.gather([compared / "delta=2"], [], 2).baselines) == 1
    [run_row] = read_rows(compared / "delta=2/row.csv")
    for name, value in (("n", 10**15), ("n", 0), ("n", -1), ("n", None), ("n", "x"), ("images_per_prompt", -3)):
        assert baseline.baseline_row(compared / "delta=2", run_row | {name: value}) is None, value


@pytest.fixture(scope="module")
def browser(page: Path) -> Iterator[Any]:
    """The page in headless Chromium, with its console."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver here (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    words = "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    for word in f"{words} --disable-component-update --disable-sync --window-size=1280,1000".split():
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        opened.get(page.as_uri())
        yield opened
        assert opened.get_log("browser") == []  # no error, no warning, nothing blocked
    finally:
        opened.quit()


PIXEL = "document.getElementById('gap').getContext('2d').getImageData(3, 5, 1, 1).data"


def first_column(browser: Any) -> list[str]:
    script = "return [...document.querySelectorAll('#rows tbody tr td:first-child')].map(c => c.textContent)"
    return list(browser.execute_script(script))


def wait(browser: Any, script: str) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 10).until(lambda b: b.execute_script(f"return {script}"))


def find(browser: Any, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def choose(browser: Any, name: str, value: str) -> None:
    from selenium.webdriver.support.ui import Select

    Select(find(browser, f"#{name}")).select_by_value(value)


def test_the_leaderboard_sorts_and_filters(browser: Any) -> None:
    default = ["eagle1 (batch=1)", "eagle1 (batch=2)", "sjd", "vanilla", "cool_sd delta=2"]
    assert sorted(first_column(browser)[:4]) == default[:4]  # without a speed, only the lossless runs are first
    assert first_column(browser)[4] == default[4]
    assert not browser.find_elements("css selector", "#rows th:not([aria-sort=none])")
    best_first = ["cool_sd delta=2", "eagle1 (batch=1)", "eagle1 (batch=2)", "sjd", "vanilla"]

    def click() -> None:
        heads = browser.find_elements("css selector", "#rows th button")
        next(h for h in heads if h.text.startswith("Accepted length")).click()

    click()
    assert first_column(browser) == best_first
    assert find(browser, "#rows th[aria-sort=descending]").text == "Accepted length ↑ ▼"
    click()
    assert first_column(browser) == best_first[::-1]
    assert find(browser, "#rows th[aria-sort=ascending]").text.startswith("Accepted length")
    browser.switch_to.active_element.send_keys("\n")  # the focus stays on the head
    assert first_column(browser) == best_first
    find(browser, "#filter").send_keys("eagle")
    assert first_column(browser) == best_first[1:3]
    assert find(browser, "#shown").text == "2 of 5 rows"
    find(browser, "#filter").clear()
    find(browser, "#filter").send_keys(" ")
    assert len(first_column(browser)) == 5
    best = browser.execute_script("return [...document.querySelectorAll('#rows td.best')].map(c => c.textContent)")
    assert sorted(best) == ["2.50 ±\xa00.10", "8.00"]
    kinds = "return [...document.querySelectorAll('#rows td .mark')].map(m => m.getAttribute('aria-label'))"
    assert browser.execute_script(kinds) == ["lossy", *["lossless"] * 4]


def test_facts_open_and_close_by_keys(browser: Any) -> None:
    buttons = browser.find_elements("css selector", "#rows tbody button")
    button = next(b for b in buttons if b.text == "sjd")
    button.send_keys("\n")
    assert browser.execute_script("return document.getElementById('facts').open")
    title = "document.getElementById('factsTitle').getBoundingClientRect().top"
    inside = f"return {title} - document.getElementById('facts').getBoundingClientRect().top"
    assert 0 <= browser.execute_script(inside) < 60  # it opens at its top, where its title is
    assert browser.execute_script("return document.getElementById('facts').scrollTop") == 0
    browser.execute_script("document.getElementById('facts').scrollTop = 500")
    find(browser, "#close").send_keys("\n")
    browser.find_elements("css selector", "#rows tbody button")[-1].send_keys("\n")
    assert browser.execute_script("return document.getElementById('facts').scrollTop") == 0  # and so does the next one
    find(browser, "#close").send_keys("\n")
    button.send_keys("\n")
    text = find(browser, "#facts").text
    assert "specbench run model=llamagen_scenes method=sjd n=4" in text
    assert "c0ffee" in text
    assert EVIL.split("\\")[0] in text  # a note is shown as it is written
    find(browser, "#close").send_keys("\n")
    assert not browser.execute_script("return document.getElementById('facts').open")


def test_the_plot_describes_its_points(browser: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    def points() -> list[Any]:
        return list(browser.find_elements("css selector", "#plot .point"))

    def named() -> list[str]:
        return [point.get_attribute("aria-label").partition(":")[0] for point in points()]

    slowest_first = ["vanilla, lossless", "sjd, lossless", "eagle1 (batch=2), lossless", "eagle1 (batch=1), lossless"]
    assert named() == [*slowest_first, "cool_sd delta=2, lossy"]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", points()[0])
    ActionChains(browser).move_to_element(points()[1]).perform()
    assert find(browser, "#point strong").text == "sjd"
    browser.execute_script("arguments[0].focus()", points()[3])
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    text = find(browser, "#point").text
    assert "cool_sd delta=2" in text
    assert "2.50 ± 0.10" in text
    assert [p.get_attribute("tabindex") for p in points()] == [*["-1"] * 4, "0"]  # one stop of the Tab key
    browser.switch_to.active_element.send_keys("\n")
    assert browser.execute_script("return document.getElementById('facts').open")
    find(browser, "#close").send_keys("\n")

    # a frontier for each kind, whose corners are its runs: EAGLE-1 is better than SJD in both columns
    fronts = browser.find_elements("css selector", "#plot polyline")
    assert [front.get_attribute("class") for front in fronts] == ["lossless", "lossy"]
    corners = [len(front.get_attribute("points").split()) for front in fronts]
    assert corners == [2 * 2 + 1, 2 * 1 + 1]
    shapes = "return [...document.querySelectorAll('.point path')].map(p => p.getAttribute('d').includes('a5'))"
    assert browser.execute_script(shapes) == [True] * 4 + [False]


def test_images_are_shown_side_by_side(browser: Any, results: Path) -> None:
    wait(browser, "document.getElementById('gap').dataset.drawn === 'a b'")
    assert find(browser, "#caption").text.startswith(EVIL.split(" ")[0])

    def pixel() -> list[int]:
        return list(browser.execute_script(f"return [...{PIXEL}]"))

    def expected(left: str, right: str, index: int) -> list[int]:
        a, b = (
            np.asarray(Image.open(results / "runs" / run / "images" / f"{index:05d}.png")).astype(int)[5, 3]
            for run in (left, right)
        )
        return [*np.minimum(255, 8 * abs(a - b)).tolist(), 255]

    assert pixel() == expected("a", "b", 0)
    choose(browser, "right", "a")
    wait(browser, "document.getElementById('gap').dataset.drawn === 'a a'")
    assert pixel() == [0, 0, 0, 255]
    choose(browser, "right", "b")
    prompts = browser.execute_script("return [...document.getElementById('prompt').options].map(o => o.value)")
    assert len(prompts) == 2
    choose(browser, "prompt", prompts[1])
    second = expected("a", "b", 1)
    wait(browser, f"{PIXEL}[0] === {second[0]}")
    assert pixel() == second
    assert len(browser.find_elements("css selector", "#strip img")) == 3


def test_runs_are_labelled_by_their_differences(browser: Any) -> None:
    """By what a user sets, otherwise by the run; never by a date or a measured value."""
    facts: list[dict[str, Any]] = [{"seed": 0, "draft_tokens": 61.384}, {"seed": 1, "draft_tokens": 7, "time": "2026"}]
    rows = [{"id": f"r{i}", "label": "sjd", "facts": {"run_id": f"r{i}", "n": 4} | f} for i, f in enumerate(facts)]
    rows += [{"id": "x", "label": "gsd", "facts": {"run_id": "x"}}]
    called = "return [...namesOf(arguments[0]).values()]"
    assert browser.execute_script(called, rows) == ["sjd (seed=0)", "sjd (seed=1)", "gsd"]
    same = [{"id": f"r{i}", "label": "sjd", "facts": {"run_id": f"r{i}", "seed": 0, "draft_tokens": i}} for i in "01"]
    assert browser.execute_script(called, same) == ["sjd (run r0)", "sjd (run r1)"]
    same.append({"id": "r2", "label": "sjd", "facts": {"run_id": "r2", "seed": 1}})
    assert browser.execute_script(called, same) == ["sjd (seed=0, run r0)", "sjd (seed=0, run r1)", "sjd (seed=1)"]
    runs = ["cool_sd delta=2", "eagle1 (batch=1)", "eagle1 (batch=2)"]
    options = "return [...document.getElementById('%s').options].map(o => o.text)"
    assert browser.execute_script(options % "left") == browser.execute_script(options % "right") == runs
    assert browser.execute_script(options % "mapped") == [f"llamagen_scenes, {name}" for name in runs[1:]]


def test_a_name_states_the_differences_from_the_most_similar_runs(browser: Any) -> None:
    def names(*rows: dict[str, Any]) -> list[str]:
        made = [{"id": str(i), "method": "cool_sd", "label": "", **r} for i, r in enumerate(rows)]
        return list(browser.execute_script("return [...namesOf(arguments[0]).values()]", made))

    facts = {"delta": 1.1, "nu": 0.7, "rule": "cool"}
    base, other_delta = (
        {"parameters": {}, "facts": facts},
        {"parameters": {"delta": "2"}, "facts": facts | {"delta": 2}},
    )
    assert names(base) == ["cool_sd"]
    assert names(base, other_delta) == ["cool_sd delta=1.1", "cool_sd delta=2"]
    assert names(base, other_delta | {"method": "other"}) == ["cool_sd", "other delta=2"]
    other_delta_and_nu = {"parameters": {"delta": "2", "nu": "0.5"}, "facts": facts}
    assert names(base, other_delta_and_nu) == ["cool_sd delta=1.1 nu=0.7", "cool_sd delta=2 nu=0.5"]
    assert names(base, other_delta, other_delta_and_nu) == [
        "cool_sd delta=1.1",
        "cool_sd delta=2 nu=0.7",
        "cool_sd delta=2 nu=0.5",
    ]
    exact = {"parameters": {"rule": "exact"}, "facts": {"rule": "exact"}}
    assert names(base, exact) == ["cool_sd rule=cool", "cool_sd rule=exact"]
    sampled = {"parameters": {"top_k": "10"}, "facts": facts | {"top_k": 10}}
    assert names(base, sampled) == ["cool_sd", "cool_sd top_k=10"]  # without a value there is nothing to state
    cold = {"parameters": {"temperature": "0"}, "facts": facts, "sampling": {"temperature": "0"}}
    warm = {"parameters": {}, "facts": facts | {"temperature": 1.0}, "sampling": {"temperature": "1"}}
    assert names(cold, cold | {"method": "sjd"}) == ["cool_sd", "sjd"]  # all rows share it: the page states it once
    assert names(cold, warm) == ["cool_sd temperature=0", "cool_sd temperature=1"]


@pytest.fixture
def other_page(browser: Any, page: Path, tmp_path: Path) -> Iterator[Any]:
    """Two targets with two samplings of the larger one. Lossy runs are faster; one run has a far larger divergence."""
    kls = [0.0, 0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 9.0]
    rows = [
        row(f"r{i}", "method=sjd" if kl == 0 else "method=cool_sd", f"seed={i}", accepted_length_mean=None)
        | {"emitted_kl": kl, "emitted_kl_stderr": 0.001, "step_compression": 1.0 + i, "image_reward": 0.5}
        | ({"image_reward_difference": -0.25, "image_reward_difference_stderr": 0.125} if i == 0 else {})
        for i, kl in enumerate(kls)
    ]
    rows[0]["speedup_latency"], rows[8]["speedup_latency"] = 1.25, 1.5
    rows += [row("cold", "method=sjd", "temperature=0", step_compression=2.0, emitted_kl=0.0)]
    rows += [row("other", "model=llamagen_textures", "method=sjd", "n=100", step_compression=9.0, image_reward=0.1)]
    rows += [row("timed", "model=llamagen_textures", "method=gsd", "n=100", speedup_latency=3.0, image_reward=0.1)]
    (tmp_path / "rows.csv").write_text(to_csv(rows))
    assert draw([str(tmp_path / "rows.csv"), f"out={tmp_path / 'other.html'}"]) == 0
    browser.get((tmp_path / "other.html").as_uri())
    yield browser
    browser.get(page.as_uri())


def point_labels(browser: Any) -> list[str]:
    return [p.get_attribute("aria-label") for p in browser.find_elements("css selector", "#plot .point")]


def test_the_plot_is_first_and_shows_one_target(other_page: Any) -> None:
    def chosen(*names: str) -> list[str]:
        return [find(other_page, f"#{name}").get_attribute("value") for name in names]

    sections = other_page.execute_script("return [...document.querySelectorAll('section')].map(s => s.id)")
    assert sections[:2] == ["trade", "board"]
    assert chosen("target", "sampling", "count") == ["llamagen_scenes, scenes", "temperature=1", "4"]
    assert chosen("x", "y") == ["step_compression", "emitted_kl"]  # two of nine runs have a speed-up in latency
    assert len(point_labels(other_page)) == 9
    assert len(other_page.find_elements("css selector", "#plot polyline")) == 2
    choose(other_page, "x", "speedup_latency")
    choose(other_page, "sampling", "")
    assert len(point_labels(other_page)) == 2  # the chosen axes stay while some run has values
    assert not other_page.find_elements("css selector", "#plot polyline")  # two samplings are two distributions
    choose(other_page, "target", "llamagen_textures, textures")
    assert not find(other_page, "#sampling").is_displayed()
    assert first_column(other_page) == ["sjd", "gsd"]
    assert chosen("x", "y") == ["speedup_latency", "image_reward"]  # half of the runs have it, and none a divergence
    assert [label.partition(":")[0] for label in point_labels(other_page)] == ["gsd, lossy"]


def test_a_run_outside_the_axes_is_marked_at_the_edge(other_page: Any) -> None:
    edge = "return [...document.querySelectorAll('.point')].map(p => p.querySelector('.outside') !== null)"
    assert other_page.execute_script(edge) == [False] * 8 + [True]
    assert "9.0000 ± 0.0010" in point_labels(other_page)[8]
    ticks = other_page.execute_script(
        "return [...document.querySelectorAll('#plot text[text-anchor=end]')].map(t => Number(t.textContent))"
    )
    assert max(ticks) < 0.1


def test_the_table_begins_with_the_fastest_lossless_run(other_page: Any) -> None:
    names = first_column(other_page)
    assert names == [
        *("sjd (seed=0)", "sjd (seed=1)", "cool_sd (seed=8)"),  # of each kind, the timed run is first
        *(f"cool_sd (seed={i})" for i in range(7, 1, -1)),
    ]
    heads = other_page.execute_script("return [...document.querySelectorAll('#rows th')].map(h => h.textContent)")
    assert [head.split(" ")[0] for head in heads[:5]] == ["Method", "Speed-up", "Step", "KL(emitted,", "Reward"]
    quality = other_page.execute_script("return document.querySelector('#rows tbody tr').cells[4].textContent")
    assert quality.replace("\xa0", " ") == "0.5000 Δ −0.2500 ± 0.1250"


def test_print_is_light_and_has_plot_and_table(other_page: Any) -> None:
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}], "media": "print"}
    other_page.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    style = "return getComputedStyle(document.querySelector('%s')).%s"
    assert other_page.execute_script(style % ("body", "backgroundColor")) == "rgb(255, 255, 255)"
    assert other_page.execute_script(style % ("#board .scroll", "overflowX")) == "visible"
    assert find(other_page, "#plot").is_displayed()
    other_page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [], "media": ""})


def test_maps_and_audits_are_drawn(browser: Any) -> None:
    assert "0.00 to 1.00, mean 0.56" in find(browser, "#maps figcaption").text
    corner = "document.querySelector('#maps canvas').getContext('2d').getImageData(%d, %d, 1, 1).data"
    assert list(browser.execute_script(f"return [...{corner % (0, 0)}]")) == [0, 34, 78, 255]
    assert list(browser.execute_script(f"return [...{corner % (1, 1)}]")) == [254, 232, 56, 255]


@pytest.fixture
def phone(browser: Any) -> Iterator[Any]:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": False}
    )
    browser.execute_script("dispatchEvent(new Event('resize'))")
    yield browser
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_fits_a_phone(phone: Any) -> None:
    assert phone.execute_script("return innerWidth") == 390
    wide = phone.execute_script(
        "return [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') && !e.closest('dialog')"
        " && e.getBoundingClientRect().right > 391).map(e => e.tagName + '#' + e.id)"
    )
    assert wide == []
    # heads as narrow as their numbers would be six lines high and mostly empty
    height = "return document.querySelector('#%s thead').getBoundingClientRect().height"
    line = phone.execute_script("return parseFloat(getComputedStyle(document.body).lineHeight)")
    assert max(phone.execute_script(height % name) for name in ("rows", "verdicts")) < 4.5 * line


def test_a_phone_shows_method_speed_and_quality_without_scrolling(phone: Any, other_page: Any) -> None:
    script = (
        "const box = document.querySelector('#board .scroll').getBoundingClientRect();"
        "return [...document.querySelectorAll('#rows tr')].map(r => [...r.cells].slice(0, 4)"
        ".every(c => c.getBoundingClientRect().right <= box.right && c.scrollWidth <= c.clientWidth))"
    )
    assert phone.execute_script("return innerWidth") == 390
    assert phone.execute_script(script) == [True] * 10
    plot = "return document.querySelector('#plot').getBoundingClientRect().%s"
    assert phone.execute_script(plot % "bottom + scrollY") < 844 * 1.1  # most of it on the first screen


def test_methods_stay_visible_when_a_table_is_scrolled(phone: Any) -> None:
    script = (
        "const box = document.querySelector('#board .scroll'), edge = box.getBoundingClientRect();"
        "box.scrollLeft = 200;"
        "const cells = [...box.querySelectorAll('th:first-child, td:first-child')];"
        "return [box.scrollLeft, edge.width, ...cells.map(c => {"
        "  const at = c.getBoundingClientRect();"
        "  const top = document.elementFromPoint(at.left + 8, at.top + at.height / 2);"
        "  return [at.left - edge.left, at.width, c.contains(top), getComputedStyle(c).backgroundColor]; })]"
    )
    phone.execute_script("document.querySelector('#board .scroll').scrollIntoView()")
    for scheme in ("light", "dark"):
        phone.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        scrolled, width, *cells = phone.execute_script(script)
        assert scrolled > 100
        assert len(cells) == 6
        for left, wide, above, colour in cells:
            assert 0 <= left <= 2
            assert wide < width / 2  # the content beside it is visible too
            assert above  # nothing covers it
            assert colour.startswith("rgb(")  # opaque
    phone.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_verdict_is_next_to_its_method(phone: Any) -> None:
    heads = [h.text for h in phone.find_elements("css selector", "#verdicts th")]
    assert heads[:2] == ["method", "verdict"]
    inside = (
        "const box = document.querySelector('#audits .scroll').getBoundingClientRect();"
        "return [...document.querySelectorAll('#verdicts td:nth-child(2)')]"
        ".map(c => [c.textContent, c.getBoundingClientRect().right <= box.right])"
    )
    assert phone.execute_script(inside) == [["not lossless", True], ["lossless", True]]
