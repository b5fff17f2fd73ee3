"""Every step can be recorded as a CUDA graph: tested on fake CUDA tensors, without a device."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Self

import pytest
import test_continuous
import test_engine
import tiny
import torch
from fake_cuda import Lint, fake_cuda, moved, moved_drafter

from specbench.decoding import emitted
from specbench.decoding.continuous import ContinuousDecoding, ContinuousRule
from specbench.decoding.loop import DecoderConfig, Decoding
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules import Rule, band, exact
from specbench.decoding.rules.thresholds import Typical
from specbench.decoding.sampling import Sampling
from specbench.decoding.verify import TokenWise, Verification
from specbench.decoding.verify.block import BlockVerification
from specbench.decoding.verify.chains import Longest
from specbench.decoding.verify.traversal import Traversal
from specbench.engine.graph import Graphs
from specbench.models.mar import MAR, MARConfig
from specbench.models.mar_sampling import Guided
from specbench.models.unified import Prompts, Unified, UnifiedConfig, image_tokens

pytest.importorskip("triton")
from specbench.engine.kernels import FusedKernels, launch

TOKEN = TokenWise()


@pytest.fixture(autouse=True)
def few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every halving of a bisection starts the same operations, so two halvings show as much as twenty. Emitted
    distributions are sums over one rejected token and, as with real vocabularies, averages over two draws."""
    monkeypatch.setattr(band, "_PRECISION", 0.25)
    monkeypatch.setattr(emitted, "_EXACT", tiny.VOCAB)


GUIDED = Sampling(cfg_scale=2.0, top_k=4)
SAMPLINGS = {
    "greedy": Sampling(0.0, cfg_scale=2.0),
    "top-p": Sampling(0.8, 4, 0.9, cfg_scale=2.0),
    "not guided": Sampling(),
    "by entropy": Sampling(1.4, 4, cfg_scale=2.0, entropy_temperature=(2.5, 3.0, 0.6)),
}


def llamagen() -> tuple[Any, Any]:
    """A target of one layer, and the conditioning of two images."""
    target, conditioning = tiny.llamagen(side=4), tiny.prompts(2)
    target.layers = target.layers[:1]
    return target, conditioning


def unified() -> tuple[Any, Any]:
    """A target with an image grammar, and padding."""
    image = image_tokens(torch.arange(5), 3, 3, 5, [6])
    valid = torch.tensor([[False, True, True], [True, True, True]])
    ids = torch.zeros(2, 3, dtype=torch.int64)
    return Unified(UnifiedConfig(32, 1, 2, 2, 48, 8, qk_norm=2), image), Prompts(ids, valid, ids, valid)


class Case:
    """A drafter, as `test_engine.DRAFTERS` names it, and a target, both on fake CUDA tensors."""

    def __init__(self, name: str, engine: str, make: Callable[[], tuple[Any, Any]] = llamagen) -> None:
        self.engine, (self.target, self.conditioning) = engine, make()
        self.drafter = test_engine.DRAFTERS[name](self.target)
        self.target = tiny.read_by(self.target, self.drafter)
        self.kept: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._fake = fake_cuda()
        self._fake.__enter__()
        moved(self.target)
        moved_drafter(self.drafter)
        self.conditioning = type(self.conditioning)(*(x.to("cuda") for x in vars(self.conditioning).values()))
        return self

    def __exit__(self, *error: Any) -> None:
        self._fake.__exit__(*error)

    def lint(
        self,
        rule: Rule,
        sampling: Sampling = GUIDED,
        kind: type[Decoding] = Decoding,
        again: bool = False,
        way: Verification = TOKEN,
    ) -> Counter[str]:
        """The operations of a recorded step of two images that a graph cannot record. again: the networks' passes
        return their last results, so that only the rest is checked, and no round comes before the recorded one."""
        lint = Lint(warm=not again)
        kernels = FusedKernels() if self.engine == "triton" else None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "start", lint.start)
            config = DecoderConfig(self.target, self.drafter, rule, sampling, verification=way, emitted_draws=2)
            decoding = kind(config, self.conditioning, RandomStreams([(0, 0), (0, 1)], "cuda"), kernels=kernels)
            for owner, name in ((decoding.session, "forward"), (self.drafter, "propose")):
                patch.setattr(owner, name, self._kept(name, getattr(owner, name), again), raising=False)
            if self.engine == "eager":
                lint.record({"a step": decoding.step, "its statistics": decoding.record_stats}, decoding.state.device)
            else:
                Graphs(lint.record, kernels).begin(decoding)
        assert lint.operations > 30 or lint.faults
        return lint.faults

    def _kept(self, name: str, call: Callable[..., Any], again: bool) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            if not again:
                self.kept[name] = call(*args)
            return self.kept[name]

        return called


#: Drafters whose drafts differ in what verification, the statistics and so the rules see of them: chains and trees,
#: sampled or deterministic, one tree or one a row, levels of one candidate and of several, and several chains a row.
#: Every other drafter's are as one of these: chain's as sjd's, tree's as sjd_pac's, vvs's and medusa's as eagle2's, and
#: dflash's like chain's and medusa's.
KINDS = ("sjd", "jacobi", "sjd_pac", "eagle2", "pjd")
#: Rules that read a draft in their own way: a factor of the draft's probability that is bisected, sums over
#: neighbours. All are checked on trees of several candidates a level; none sees whether a candidate was sampled.
RULES_OF_CLASSES = ("band", "lantern")
#: Rules without a draw: their statistics differ on a sampled chain.
DETERMINISTIC = ("entropy", "typical")


@pytest.mark.parametrize(("name", "engine"), itertools.product(test_engine.DRAFTERS, ("graph", "triton")))
def test_a_step_can_be_recorded(name: str, engine: str) -> None:
    """All drafters with the exact rule; one kind of draft with all rules, on plain tensors and, if they know the rule,
    in the engine's kernels, which take drafts of every kind alike; the other kinds with some rules on plain tensors."""
    which = {"eagle2": test_engine.RULES, "sjd": (*RULES_OF_CLASSES, *DETERMINISTIC)}.get(name, RULES_OF_CLASSES)
    which = () if engine == "triton" and name != "eagle2" else which
    rules = {rule: test_engine.RULES[rule]() for rule in which if name in KINDS and rule != "exact"}
    with Case(name, engine) as case:
        reads = {"exact": case.lint(exact())}
        for rule, built in rules.items():
            if engine == "graph" or built.relaxation() is not None:
                reads[rule] = case.lint(built, again=True)
    assert not {rule: dict(counts) for rule, counts in reads.items() if counts}


def test_every_rule_sees_every_kind_of_draft() -> None:
    target = llamagen()[0]

    def kind(name: str) -> tuple[bool, ...]:
        decoding = Decoding(test_engine.configured(target, name), tiny.prompts(2), tiny.rng(2))
        decoding.step()
        draft = decoding.step_stats.draft
        return draft.tree.width > 1, draft.sampled is None, draft.parallel_positions is not None

    drafting = [name for name, make in test_engine.DRAFTERS.items() if make(target).tree.height]
    with torch.inference_mode():
        assert {kind(name) for name in drafting} == {kind(name) for name in KINDS}


@pytest.mark.parametrize(
    ("name", "way", "engine"),
    [
        ("chain", BlockVerification(), "graph"),
        ("chain", BlockVerification(), "triton"),
        ("eagle2", Traversal(), "graph"),
        ("tree", Traversal(), "triton"),
        ("pathspec", Longest(0.01), "graph"),
        ("pathspec", Longest(0.01), "triton"),
    ],
)
def test_a_step_of_other_verification_can_be_recorded(name: str, way: Verification, engine: str) -> None:
    with Case(name, engine) as case:
        assert not case.lint(exact(), way=way)


@pytest.mark.parametrize(("name", "engine"), [("tree", "graph"), ("eagle2", "triton")])
def test_a_step_of_other_sampling_can_be_recorded(name: str, engine: str) -> None:
    with Case(name, engine) as case:
        reads = {which: case.lint(exact(), sampling) for which, sampling in SAMPLINGS.items()}
    assert not {which: dict(counts) for which, counts in reads.items() if counts}


@pytest.mark.parametrize(("name", "engine"), [("none", "graph"), ("tree", "triton"), ("sjd_vertical", "triton")])
def test_a_step_of_a_target_with_a_grammar_can_be_recorded(name: str, engine: str) -> None:
    with Case(name, engine, unified) as case:
        assert not case.lint(exact())


def planted(fault: Callable[[Decoding], Any]) -> type[Decoding]:
    """Images whose step also does something that a graph cannot record."""

    class Planted(Decoding):
        def step(self) -> None:
            super().step()
            fault(self)

    return Planted


FAULTS: dict[str, tuple[Callable[[Decoding], Any], str]] = {
    "to the host": (lambda d: d.num_committed.cpu(), "_to_copy.default between cpu and cuda"),
    "to the device": (lambda d: torch.arange(3).to("cuda"), "_to_copy.default between cpu and cuda"),
    "into a tensor": (lambda d: d.num_committed.copy_(torch.zeros(2)), "copy_.default between cpu and cuda"),
    "a scalar": (lambda d: d.num_committed.copy_(torch.tensor(1)), "copy_.default between cpu and cuda"),
    "a constant": (lambda d: torch.tensor([1], device="cuda"), "_to_copy.default between cpu and cuda"),
    "an index": (lambda d: d.num_committed[[0]], "_to_copy.default between cpu and cuda"),
    "work on the host": (lambda d: torch.ones(3) + 1, "add.Tensor on the host"),
    "item": (lambda d: d.num_committed[0].item(), "_local_scalar_dense.default asks for data"),
    "a condition": (lambda d: bool(d.num_committed.sum() > 0), "_local_scalar_dense.default asks for data"),
    "nonzero": (lambda d: d.num_committed.nonzero(), "nonzero.default asks for data"),
    "a mask": (lambda d: d.num_committed[d.num_committed > 0], "nonzero.default asks for data"),
    "masked_select": (
        lambda d: d.num_committed.masked_select(d.num_committed > 0),
        "masked_select.default asks for data",
    ),
    "unique": (lambda d: d.num_committed.unique(), "_unique2.default asks for data"),
    "bincount": (lambda d: d.num_committed.bincount(), "bincount.default asks for data"),
    "multinomial": (lambda d: d.num_committed.float().multinomial(1), "multinomial.default makes the host wait"),
    "synchronize": (lambda d: torch.cuda.synchronize(), "the host waits"),
    "a kernel": (
        lambda d: launch.start(SimpleNamespace(__name__="_sum"), (1,), d.num_committed, torch.zeros(3)),
        "_sum: argument 1 on cpu",
    ),
}


def test_what_cannot_be_recorded_is_found() -> None:
    with Case("none", "graph") as case:
        for number, (fault, (does, reported)) in enumerate(FAULTS.items()):
            reads = case.lint(Typical(), kind=planted(does), again=number > 0)
            assert reported in reads, (fault, dict(reads))


#: Each option of the rules whose passes never wait for the host: "released" has those of three others.
@pytest.mark.parametrize("name", ["vanilla", "exact", "not aligned", "released"])
def test_a_pass_of_continuous_tokens_leaves_the_host_alone(name: str) -> None:
    rule = test_continuous.RULES[name]
    rule = replace(rule, prefill=0.1, gamma=2) if rule.gamma else ContinuousRule(tokens_per_pass=(1, 2))
    small = MARConfig(
        32, 1, 2, 32, 1, 2, length=9, token_dim=5, classes=4, buffer=4, head_depth=1, head_width=32, steps=2
    )
    lint = Lint()
    with fake_cuda():
        target, drafter = (Guided(moved(MAR(small).eval()), 2.0) for _ in range(2))
        labels, rng = torch.arange(3, device="cuda"), RandomStreams([(0, i) for i in range(3)], "cuda")
        images = ContinuousDecoding(target, drafter, rule, labels, rng, engine=Graphs(Lint().record))
        lint.record({"a pass": lambda: test_continuous.go_on(images)}, images.device)
    assert lint.operations > 50
    assert not lint.faults
