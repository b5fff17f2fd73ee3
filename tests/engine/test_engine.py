"""Engines agree: steps whose tensors stay in place give the same images as plain steps."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from gpu_checks.models import at_once
from hostless import numbers_unknown
from reachable import named, tensors, undeclared
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from windows import window

from specbench import cli
from specbench.decoding.batch import decode_stream, watched
from specbench.decoding.drafters.built_in import BuiltIn
from specbench.decoding.drafters.dflash import DFlash
from specbench.decoding.drafters.draft_model import DraftModel
from specbench.decoding.drafters.dynamic import Eagle2
from specbench.decoding.drafters.eagle import Eagle
from specbench.decoding.drafters.medusa import Medusa
from specbench.decoding.drafters.none import NoDraft, ZipAR
from specbench.decoding.drafters.pathspec import PathWindow
from specbench.decoding.drafters.pjd import ParallelJacobi
from specbench.decoding.drafters.vvs import VVS
from specbench.decoding.loop import DecoderConfig, Decoding, decode
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules import Band, Mentored, Rule, cool, exact
from specbench.decoding.rules.groups import Grouped, Neighbourhood
from specbench.decoding.rules.lantern import Lantern
from specbench.decoding.rules.thresholds import EntropyAware, Typical
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import chain_paths, parse
from specbench.engine.graph import Action, Eager, Graphs
from specbench.errors import RunError
from specbench.models.llamagen import Conditioning

TREE = "[[0],[1],[0,0],[0,1],[1,0]]"
GUIDED = Sampling(cfg_scale=2.0)
DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda target: NoDraft(),
    "chain": lambda target: Eagle(tiny.eagle(target), chain_paths(3)),
    "tree": lambda target: Eagle(tiny.eagle(target), parse(TREE)),
    "eagle2": lambda target: Eagle2(tiny.eagle(target, layers=2), nodes=6, depth=3, width=2),
    "vvs": lambda target: VVS(tiny.eagle(target), 5, 2, 2, "full", 2),
    "built_in": lambda target: BuiltIn(4, opening="greedy"),
    "medusa": lambda target: Medusa(tiny.medusa(target), parse(TREE)),
    "dflash": lambda target: DFlash(tiny.dflash(target), chain_paths(3)),
    "dflash_tree": lambda target: DFlash(tiny.dflash(target), parse(TREE), deterministic=True),
    "draft_model": lambda target: DraftModel(tiny.llamagen(side=4, seed=5), 3),
    "jacobi": lambda target: window(4, match=True),
    "sjd": lambda target: window(4),
    "sjd_vertical": lambda target: window(6, "vertical_sample"),
    "scd": lambda target: window(4, coupling="gumbel"),
    "sjd_pac": lambda target: window(7, "horizontal_repeat", coupling="maximal", width=2, depth=3),
    "height": lambda target: window(7, coupling="height", width=2, depth=3),
    "pathspec": lambda target: PathWindow(3, chains=2),
    "zipar": lambda target: ZipAR(1, "overlap"),
    "pjd": lambda target: ParallelJacobi(4, 3, 0.5),
    "pjd_released": lambda target: ParallelJacobi(4, 2, 0.5, "released", "shifted"),
}


def conditioning(rows: int, seed: int) -> Any:
    prompts = tiny.prompts(rows)
    prompts.features = torch.randn(prompts.features.shape, generator=torch.Generator().manual_seed(seed))
    return prompts


def some_of(prompts: Any, seed: int) -> tuple[Callable[[list[int]], Any], Callable[[list[int]], RandomStreams]]:
    """The conditioning and the random streams of some images, for `decode_stream`."""
    return lambda rows: Conditioning(prompts.features[rows], prompts.valid[rows]), partial(tiny.rng, seed=seed)


def configured(target: Any, name: str, rule: str = "exact", sampling: Sampling = GUIDED) -> DecoderConfig:
    drafter = DRAFTERS[name](target)
    return DecoderConfig(tiny.read_by(target, drafter), drafter, RULES[rule](), sampling, emitted_draws=2)


@pytest.mark.parametrize("name", DRAFTERS)
def test_steps_in_place_give_what_plain_steps_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three batches use the memory of the first one, with a batch of another size between them; none overwrites the
    results of an earlier one. Statistics are computed after the drafter has read the verdict, so it must not write its
    next draft over this one."""
    target, engine, compared = tiny.llamagen(side=3), Graphs(at_once), []
    in_place_config, plain_config = configured(target, name), configured(target, name)
    commit = plain_config.drafter.commit

    def committed(state: Any, outcome: Any) -> None:
        draft = outcome.draft
        before = draft.tokens.clone(), draft.probs.clone(), draft.valid.clone()
        commit(state, outcome)
        compared.append(all(map(torch.equal, before, (draft.tokens, draft.probs, draft.valid))))

    monkeypatch.setattr(plain_config.drafter, "commit", committed)
    batches = [(conditioning(rows, seed), tiny.rng(rows, seed)) for rows, seed in ((2, 0), (2, 1), (3, 2), (2, 3))]
    in_place = [tiny.results(decode(in_place_config, *batch, engine)) for batch in batches]
    assert tiny.equal(in_place, [tiny.results(decode(plain_config, *batch)) for batch in batches])
    assert len(engine._runners) == 2
    assert len(compared) > 2
    assert all(compared)


@pytest.mark.parametrize(("name", "engine"), [
    *((name, Graphs(at_once)) for name in DRAFTERS), ("tree", Eager()), ("sjd", Eager()),
])  # fmt: skip
def test_rows_that_are_done_take_the_next_image(name: str, engine: Any) -> None:
    """Four images through two rows: each is the same as alone."""
    target, count, seen = tiny.llamagen(side=3), 4, []
    encode, rng = some_of(conditioning(count, 5), 9)
    start = partial(Decoding, configured(target, name))
    for which, out in decode_stream(start, encode, rng, count, 2, engine):
        assert len(which) == len(out.tokens)
        assert out.seconds > 0
        for row, image in enumerate(which):
            seen.append(image)
            alone = decode(configured(target, name), encode([image]), rng([image]))
            assert tiny.equal(tiny.image(out, row), tiny.image(alone, 0))
    assert sorted(seen) == list(range(count))


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_stream_that_is_stopped_finishes_the_images_in_progress(after: int) -> None:
    """It is stopped after some results: no row is refilled, and every image that was started is finished."""
    target, count, seen, started = tiny.llamagen(side=4), 12, [], set[int]()
    encode, rng = some_of(conditioning(count, 5), 9)

    def start(rows: list[int]) -> Any:
        started.update(rows)
        return encode(rows)

    results = []
    config = configured(target, "sjd")
    for which, _ in decode_stream(partial(Decoding, config), start, rng, count, 4, stop=lambda: len(results) >= after):
        results.append(which)
        seen += which
    assert sorted(seen) == sorted(started)
    assert len(seen) == (0 if after == 0 else 4 + sum(map(len, results[: after - 1])))


def test_no_row_waits_for_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    """If images differ in length, a stream takes fewer steps than one batch after another."""
    target, done = tiny.llamagen(side=8), []
    plain = Decoding.step
    monkeypatch.setattr(Decoding, "step", lambda steps: (done.append(1), plain(steps))[1])
    encode, rng = some_of(conditioning(24, 1), 0)
    config = DecoderConfig(target, window(12), exact(), Sampling(temperature=0.3))
    batches = torch.arange(24).view(6, 4).tolist()
    lengths = [n for part in batches for n in decode(config, encode(part), rng(part)).steps.tolist()]
    in_batches = len(done)
    assert max(lengths) > 1.3 * min(lengths)
    list(decode_stream(partial(Decoding, config), encode, rng, 24, 4))
    assert sum(lengths) / 4 <= len(done) - in_batches < in_batches


def test_a_watcher_hears_of_every_step_and_nothing_is_read_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that moves with images stands still for the minutes of a batch. Vanilla decoding makes one token a
    step, so every part is exact; with drafts it is at most what is done."""
    target, reads, heard = tiny.llamagen(side=8), [], list[float]()
    known = Decoding.remaining_tokens
    monkeypatch.setattr(Decoding, "remaining_tokens", lambda *words: (reads.append(1), known(*words))[1])
    encode, rng = some_of(conditioning(6, 1), 0)
    vanilla = DecoderConfig(target, NoDraft(), exact(), Sampling())
    decode(vanilla, encode([0, 1]), rng([0, 1]))
    silent = len(reads)
    with watched(heard.append):
        steps = decode(vanilla, encode([0, 1]), rng([0, 1])).steps
    assert len(reads) == 2 * silent
    assert heard == pytest.approx([2 * k / len(heard) for k in range(1, int(steps.max()) + 1)])
    for batch in (2, 3):
        heard.clear()
        config = DecoderConfig(target, window(12), exact(), Sampling(temperature=0.3))
        with watched(heard.append):
            for which, out in decode_stream(partial(Decoding, config), encode, rng, 6, batch):
                assert len(which) / 2 < heard[-1] <= batch
                assert len(out.steps) == len(which)
        assert min(heard) > 0
    heard.clear()
    with watched(heard.append), watched(None):
        decode(vanilla, encode([0]), rng([0]))
    assert heard == []


def test_caches_go_when_nobody_needs_them() -> None:
    """They must not stay until Python looks for cycles: by then the caches of a few batches have filled the memory."""

    def alive() -> int:
        return sum(type(x) is Decoding for x in gc.get_objects())

    gc.collect()
    before = alive()
    gc.disable()
    try:
        for name in DRAFTERS:
            config = configured(tiny.llamagen(side=2), name)
            images = decode_stream(partial(Decoding, config), *some_of(conditioning(3, 5), 0), 3, 2)
            for _ in images:
                pass
            del images, _
            assert alive() == before, name
    finally:
        gc.enable()


def plain_values(x: Any, path: str = "", seen: set[int] | None = None) -> dict[str, Any]:
    """The values of an object that are not tensors: a recorded step would not change them."""
    seen = set() if seen is None else seen
    values: dict[str, Any] = {}
    if id(x) in seen or isinstance(x, torch.nn.Module):
        return values
    seen.add(id(x))
    for key, value in named(x):
        if isinstance(value, int | float | str | bool | None):
            values[f"{path}.{key}"] = value
        elif not isinstance(value, Tensor):
            values |= plain_values(value, f"{path}.{key}", seen)
    return values


@pytest.mark.parametrize("name", DRAFTERS)
@torch.inference_mode()
def test_a_step_leaves_everything_but_numbers_on_the_device_as_it_was(name: str) -> None:
    """The addresses of the tensors, their number, and the values that the host keeps."""
    steps = Decoding(configured(tiny.llamagen(side=4), name, sampling=Sampling()), tiny.prompts(2), tiny.rng(2))
    addresses = {path: t.data_ptr() for path, (_, t) in tensors(steps).items()}
    assert len(set(addresses.values()) - {0}) >= 10
    steps.step()
    steps.record_stats()
    host, counts = plain_values(steps), []
    for _ in range(3):
        steps.step()
        steps.record_stats()
        counts.append(int(steps.num_committed.sum()))
        assert {path: t.data_ptr() for path, (_, t) in tensors(steps).items()} == addresses
        assert plain_values(steps) == host
    assert counts == sorted(set(counts))


@pytest.mark.parametrize("name", DRAFTERS)
@torch.inference_mode()
def test_what_changes_is_declared(name: str) -> None:
    """Values that a step does not declare are the same after it, and the same in another batch."""
    config = configured(tiny.llamagen(side=4), name)
    steps, other = (Decoding(config, conditioning(2, seed), tiny.rng(2, seed)) for seed in (0, 1))
    before = {path: tensor.clone() for path, tensor in undeclared(steps).items()}
    assert before
    assert tiny.equal(before, undeclared(other))
    for _ in range(3):
        steps.step()
        steps.record_stats()
    assert tiny.equal(undeclared(steps), before)


NEAR = torch.tensor([[(i + j) % tiny.VOCAB for j in range(1, 4)] for i in range(tiny.VOCAB)])
RULES: dict[str, Callable[[], Rule]] = {
    "exact": exact,
    "cool": lambda: cool(1.3, 3, 0.5, "exponential"),
    "band": lambda: Band(0.5, 0.5, 3),
    "mentored": lambda: Mentored(0.05),
    "lantern": lambda: Lantern("lantern", NEAR, 2, "tvd", 0.2),
    "lantern, released": lambda: Lantern("lantern", NEAR, 2, "jsd", 0.2, "released"),
    "lantern++": lambda: Lantern("lantern_pp", NEAR, 2, "total", 2.0, "optimal"),
    "neighbourhood": lambda: Neighbourhood(NEAR, "optimal"),
    "gsd": lambda: Grouped(torch.arange(tiny.VOCAB)[:, None] / 2, 3),
    "entropy": lambda: EntropyAware(1.0),
    "typical": Typical,
}


@pytest.mark.parametrize(
    ("name", "rule"),
    [("sjd_pac", "exact"), ("pjd", "cool"), ("eagle2", "typical")],
)
@torch.inference_mode()
def test_no_step_waits_for_the_host(name: str, rule: str) -> None:
    """Some drafters and rules: test_capture, which needs Triton, checks all."""
    config = configured(tiny.llamagen(side=4), name, rule, Sampling(cfg_scale=2.0, top_k=4, top_p=0.9))
    steps = Decoding(config, tiny.prompts(2), tiny.rng(2))
    steps.step()  # tensors that are built once may be copied from the host
    steps.record_stats()
    with numbers_unknown(steps):
        steps.step()
        steps.record_stats()
        with pytest.raises(DataDependentOutputException):
            steps.remaining_tokens([(0, 0), (0, 1)])


def on_fake_cuda(module: torch.nn.Module) -> None:
    """Replace parameters and buffers by fake ones on a CUDA device; call it in a FakeTensorMode."""
    for part in module.modules():
        for kind in (part._parameters, part._buffers):
            for name, x in kind.items():
                if x is not None:
                    fake = torch.empty(x.shape, dtype=x.dtype, device="cuda")
                    kind[name] = torch.nn.Parameter(fake, requires_grad=False) if kind is part._parameters else fake


@pytest.mark.parametrize("rule", ["cool", "lantern", "gsd"])
def test_a_decoding_brings_the_constants_of_its_rule_to_the_device(rule: str) -> None:
    """A recorded step must not copy from the host, so the constants are moved before the first step."""
    target, conditioning = tiny.llamagen(side=4), tiny.prompts(2)
    config = configured(target, "tree", rule)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        on_fake_cuda(target)
        on_fake_cuda(config.drafter.head)
        on_device = Conditioning(conditioning.features.to("cuda"), conditioning.valid.to("cuda"))
        Decoding(config, on_device, tiny.rng(2, device="cuda"))
    assert [getattr(config.rule, name).device.type for name in config.rule.constants] == ["cuda"]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_decoding_that_no_longer_advances_stops(batch: int) -> None:
    """For example, a recording without kernels would make the loop endless."""
    engine = Graphs(lambda functions, device: [lambda: None for _ in functions])
    config = configured(tiny.llamagen(), "chain")
    encode, rng = some_of(conditioning(3, 5), 0)
    run: Any = partial(decode, config, encode([0]), rng([0]), engine)
    if batch > 1:
        run = partial(next, decode_stream(partial(Decoding, config), encode, rng, 3, batch, engine))
    with pytest.raises(RunError, match="row 0.*4"):
        run()


def test_only_the_newest_shapes_are_kept() -> None:
    config, engine = configured(tiny.llamagen(), "none"), Graphs(at_once)
    for rows in (1, 2, 3, 4, 5, 2):
        decode(config, tiny.prompts(rows), tiny.rng(rows), engine)
    assert [len(entry.steps.num_committed) for entry in engine._runners.values()] == [3, 4, 5, 2]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_decoding_moves_nothing_that_an_earlier_one_reads(name: str) -> None:
    """A recorded step has fixed addresses: vanilla's must stay when a method with more nodes begins on the same
    target."""
    target = tiny.llamagen(side=4)
    with torch.inference_mode():
        first = Decoding(configured(target, "none"), conditioning(2, 0), tiny.rng(2))
        first.step()
        tensors = [first.state.constants, dict(target.named_parameters()), dict(target.named_buffers())]
        before = [{key: tensor.data_ptr() for key, tensor in group.items()} for group in tensors]
        rope = first.session.rope
        assert any(tensor is rope for tensor in first.state.constants.values())
        second = Decoding(configured(target, name), conditioning(2, 1), tiny.rng(2))
        for _ in range(2):
            second.step()
            second.record_stats()
    tensors[1:] = [dict(target.named_parameters()), dict(target.named_buffers())]
    assert before == [{key: tensor.data_ptr() for key, tensor in group.items()} for group in tensors]


def test_a_repeated_recording_keeps_what_it_reads() -> None:
    """The device only knows addresses: memory without an owner is given to others."""

    def replays(functions: Mapping[str, Action], device: torch.device) -> list[Action]:
        return [lambda: None for _ in functions]

    read = torch.zeros(3)
    seen = weakref.ref(read)

    def work(source: Tensor = read) -> None:
        source.sum()

    repeated = Graphs(replays).repeated(work, torch.device("cpu"))
    del read, work
    gc.collect()
    assert seen() is not None
    del repeated
    gc.collect()
    assert seen() is None


def test_a_function_of_tensors_is_recorded_for_its_shapes() -> None:
    recorded: list[Any] = []

    def function(a: Tensor, b: Tensor) -> list[Tensor]:
        return [a + b, a * b]

    engine = Graphs(lambda functions, device: (recorded.append(functions), at_once(functions, device))[1])
    first = engine.call("sum", function, torch.ones(2), torch.ones(2))
    second = engine.call("sum", function, torch.full((2,), 3.0), torch.ones(2))
    assert [x.tolist() for x in first] == [[2, 2], [1, 1]]  # not overwritten by what came after
    assert [x.tolist() for x in second] == [[4, 4], [3, 3]]
    assert len(recorded) == 1
    for n in range(3, 3 + engine.most_calls):
        engine.call("sum", function, torch.ones(n), torch.ones(n))
    assert len(engine._calls) == engine.most_calls
    engine.call("product", function, torch.ones(9), torch.ones(9))
    assert len(recorded) == 2 + engine.most_calls


def test_an_engine_that_cannot_work_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for engine in ("graph", "triton"):
        assert cli.main(["run", "n=1", f"engine={engine}", "device=cpu"]) == 2
        assert re.search(rf"engine={engine} .*\bcpu\b", capsys.readouterr().err)
    assert cli.main(["run", "n=1", "engine=fast"]) == 2
    assert "engine" in capsys.readouterr().err
