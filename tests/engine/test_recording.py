"""Recording without a device: a failed capture leaves nothing to clean up, timings exclude statistics, and a
batch declares its memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import test_continuous
import tiny
import torch
from reachable import tensors, undeclared
from test_engine import at_once, conditioning, configured, some_of

from specbench.decoding import batch
from specbench.decoding.continuous import ContinuousDecoding
from specbench.decoding.loop import Decoding, decode
from specbench.engine import clock, graph
from specbench.engine.graph import Eager, Graphs, cuda_graphs
from specbench.engine.state import Buffer, DecodeState
from specbench.errors import RunError

CUDA = torch.device("cuda", 1)
STREAM_CAPTURE = "operation not permitted when stream is capturing\nCUDA kernel errors might be reported later"


class FakeCuda:
    """The parts of `torch.cuda` that a recording uses. Work on the current stream is launched or captured. A failed
    capture blocks the next one unless it is ended on its own stream and its memory pool is released."""

    def __init__(self) -> None:
        self.device, self.streams, self.capturing, self.invalid = 0, ["default"], None, False
        self.pools: list[Any] = []
        self.launched: list[str] = []
        self.made_on: list[int] = []
        self.resets = 0

    def launch(self, name: str) -> None:
        (self.launched if self.capturing is None else self.capturing.work).append(name)

    def Stream(self, device: int) -> Any:
        self.made_on.append(device)
        return SimpleNamespace(wait_stream=lambda other: None)

    @contextmanager
    def on(self, kind: str, new: Any) -> Iterator[None]:
        before = getattr(self, kind)
        setattr(self, kind, [*before, new] if kind == "streams" else new.index)
        try:
            yield
        finally:
            setattr(self, kind, before)

    def CUDAGraph(self) -> Any:
        cuda = self

        class Graph:
            def __init__(self) -> None:
                self.work: list[str] = []

            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                assert cuda.capturing is None, "a capture is under way"
                assert not cuda.pools, "the allocator still serves another capture"
                cuda.capturing, self.stream, self._pool = self, cuda.streams[-1], pool
                cuda.pools.append(pool)

            def pool(self) -> Any:
                return self._pool

            def capture_end(self) -> None:
                if cuda.capturing is not self:
                    raise RuntimeError("capture_end() called before capture_begin()")
                assert cuda.streams[-1] is self.stream
                cuda.capturing = None
                if cuda.invalid:
                    cuda.invalid = False
                    raise RuntimeError(STREAM_CAPTURE)  # the pool is not released, as in PyTorch 2.9
                cuda.pools.remove(self._pool)
                if not self.work:
                    warnings.warn("The CUDA Graph is empty. This usually means", stacklevel=1)

            def replay(self) -> None:
                cuda.launched.extend(self.work)

            def reset(self) -> None:
                cuda.resets += 1

        return Graph()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("Stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "stream", partial(fake.on, "streams"))
    monkeypatch.setattr(torch.cuda, "device", partial(fake.on, "device"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: fake.device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def synchronize(*_: Any) -> None:
        assert fake.capturing is None

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: fake.pools.remove(pool), False)
    graph._stream.cache_clear()
    return fake


def working(cuda: FakeCuda) -> list[Callable[[], None]]:
    return list(cuda_graphs({"a step": lambda: cuda.launch("a"), "statistics": lambda: cuda.launch("b")}, CUDA))


def test_functions_are_recorded_after_two_rounds_and_replayed_separately(cuda: FakeCuda) -> None:
    step, record_stats = working(cuda)
    assert cuda.launched == ["a", "b", "a", "b"]
    step()
    record_stats()
    step()
    assert cuda.launched[4:] == ["a", "b", "a"]
    assert cuda.made_on == [1]  # not on the first device
    assert cuda.device == 0


def failing(cuda: FakeCuda, error: BaseException | None) -> Callable[[], None]:
    """Fails only in the capture: with an error, or only when the capture ends."""

    def function() -> None:
        cuda.launch("a")
        if cuda.capturing is not None:
            cuda.invalid = True
            if error is not None:
                raise error

    return function


@pytest.mark.parametrize("error", [RuntimeError(STREAM_CAPTURE), None, ValueError("no shape")])
def test_a_capture_that_fails_does_not_poison_the_next(cuda: FakeCuda, error: Exception | None) -> None:
    reason = "no shape" if isinstance(error, ValueError) else "operation not permitted when stream is capturing"
    message = rf"recording a step as a CUDA graph failed \({reason}\); use engine=eager"
    with pytest.raises(RunError, match=message):
        cuda_graphs({"a step": failing(cuda, error)}, CUDA)
    assert (cuda.capturing, cuda.streams, cuda.pools, cuda.resets) == (None, ["default"], [], 1)
    working(cuda)[0]()
    assert cuda.launched[-1] == "a"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("CUDA out of memory")])
def test_an_interruption_or_full_memory_keeps_its_error(cuda: FakeCuda, error: BaseException) -> None:
    with pytest.raises(type(error)):
        cuda_graphs({"a step": failing(cuda, error)}, CUDA)
    working(cuda)


def test_a_recording_without_a_kernel_is_refused(cuda: FakeCuda) -> None:
    with pytest.raises(RunError, match="statistics"):
        cuda_graphs({"a step": lambda: cuda.launch("a"), "statistics": lambda: None}, CUDA)
    working(cuda)


@pytest.mark.parametrize("engine", [Eager(), Graphs(at_once)], ids=["eager", "recorded"])
def test_seconds_exclude_the_statistics(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that only steps (1 s) and statistics (100 s) advance. The recorder's own rounds count."""
    now, step_calls = [0.0], []
    for module in (batch, clock):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Timed(Decoding):
        def step(self) -> None:
            super().step()
            step_calls.append(1)
            now[0] += 1

        def record_stats(self) -> None:
            super().record_stats()
            now[0] += 100

    config = configured(tiny.llamagen(side=4), "sjd")
    recorded = 100 * isinstance(engine, Graphs)
    images = Timed(config, conditioning(2, 0), tiny.rng(2))
    out = batch.finished(lambda: images, images.rng, engine)
    assert out.seconds == len(step_calls) + recorded
    step_calls.clear()
    encode, rng = some_of(conditioning(5, 5), 0)
    stream = batch.decode_stream(partial(Timed, config), encode, rng, 5, 2, engine)
    assert sum(out.seconds for _, out in stream) == len(step_calls)


def test_a_batch_names_a_tensor_on_another_device() -> None:
    on_cpu, on_meta = torch.zeros(2), torch.zeros(2, device="meta")
    with pytest.raises(ValueError, match="rule.omega.*meta.*cpu"):
        DecodeState(2, {"count": Buffer(on_cpu)}, {"rule.omega": on_meta})
    with pytest.raises(ValueError, match="pending.*meta"):
        DecodeState(2, {"count": Buffer(on_cpu), "pending": Buffer(on_meta)}, {})


@pytest.mark.parametrize(("buffer", "message"), [
    (Buffer(torch.zeros(4)), r"x of shape \(4,\) does not have 1 x 2 rows in dimension 0"),
    (Buffer(torch.zeros(2, 3), 1, 2), r"x of shape \(2, 3\) does not have 2 x 2 rows in dimension 1"),
    (Buffer(torch.zeros(1).expand(2)), "x is one row expanded to several"),
])  # fmt: skip
def test_a_buffer_holds_every_row(buffer: Buffer, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodeState(2, {"x": buffer}, {})


def test_rows_are_loaded_along_their_dimension_in_both_halves() -> None:
    """The sizes do not matter: here every dimension has the same length as another."""
    wide = torch.arange(16.0).view(4, 4)
    state = DecodeState(2, {"rows": Buffer(torch.zeros(2, 2)), "halves": Buffer(wide.clone(), 1, 2)}, {})
    new = DecodeState(1, {"rows": Buffer(torch.ones(1, 2)), "halves": Buffer(-torch.ones(4, 2), 1, 2)}, {})
    state.load_rows(new, [1])
    assert state.buffers["rows"].tensor.tolist() == [[0, 0], [1, 1]]
    assert state.buffers["halves"].tensor[:, [1, 3]].eq(-1).all()
    assert torch.equal(state.buffers["halves"].tensor[:, [0, 2]], wide[:, [0, 2]])
    swapped = DecodeState(2, {"rows": Buffer(torch.full((2, 2), 7.0)), "halves": Buffer(wide, 1, 2)}, {})
    state.load_rows(swapped, [1, 0])
    assert state.buffers["halves"].tensor.tolist() == wide[:, [1, 0, 3, 2]].tolist()
    other = DecodeState(1, {"rows": Buffer(torch.ones(1, 2))}, {})
    with pytest.raises(ValueError, match="halves"):
        state.load_rows(other, [0])


@pytest.mark.parametrize("name", ["exact", "path", "continue", "block", "layers"])
@torch.inference_mode()
def test_everything_that_changes_in_a_pass_of_continuous_tokens_is_declared(name: str) -> None:
    """See `test_engine.test_what_changes_is_declared`. Buffers also keep their addresses."""
    pair, rule = [test_continuous.reduced() for _ in range(2)], test_continuous.RULES[name]
    images, other = (
        ContinuousDecoding(*pair, rule, torch.tensor(labels), tiny.rng(2, seed))
        for seed, labels in enumerate(([0, 1], [2, 3]))
    )
    before = {path: tensor.clone() for path, tensor in undeclared(images).items()}
    assert before
    assert tiny.equal(before, undeclared(other))
    addresses = {path: tensor.data_ptr() for path, (_, tensor) in tensors(images).items()}
    start = images.tokens.clone()
    for _ in range(2):
        images.step()
        images.record_stats()
    assert tiny.equal(undeclared(images), before)
    assert {path: tensor.data_ptr() for path, (_, tensor) in tensors(images).items()} == addresses
    assert not torch.equal(images.tokens, start)


def test_the_caller_s_tensors_are_not_overwritten() -> None:
    """Neither the prompts nor the random streams change when another batch uses the same memory."""
    engine, config = Graphs(at_once), configured(tiny.llamagen(), "tree")
    inputs, rng = conditioning(2, 0), tiny.rng(2, 0)
    inputs.valid[0, 0] = False
    copies = inputs.features.clone(), inputs.valid.clone(), rng.key.clone()
    decode(config, inputs, rng, engine)
    decode(config, conditioning(2, 1), tiny.rng(2, 1), engine)
    assert all(map(torch.equal, copies, (inputs.features, inputs.valid, rng.key)))
