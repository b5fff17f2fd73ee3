"""The networks and their drafters: official numbers, caches, trees, and independence of the batch."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from scipy import stats

from specbench.audit.tabular import codes
from specbench.config import parameters, registry
from specbench.decoding import rules, trees
from specbench.decoding.drafters.draft_model import DraftModel
from specbench.decoding.drafters.eagle import Eagle as EagleDrafter
from specbench.decoding.drafters.eagle import Eagle2
from specbench.decoding.drafters.medusa import Medusa
from specbench.decoding.drafters.none import NoDraft
from specbench.decoding.drafters.window import Window
from specbench.decoding.loop import DecoderConfig, Outcome, decode
from specbench.decoding.rng import RandomStreams, exponential
from specbench.decoding.rules import Setting
from specbench.decoding.sampling import Sampling, draw, draw_distinct
from specbench.decoding.verify import verify
from specbench.engine import ops
from specbench.errors import UsageError
from specbench.models.llamagen import LlamaGen, LlamaGenConfig
from specbench.models.loading import checkpoints
from specbench.models.transformer import run_blocks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import check_golden

ROOT = Path(__file__).resolve().parents[1]
GOLDENS = ROOT.parent / "shared" / "reference" / "goldens"
needs_goldens = pytest.mark.skipif(not GOLDENS.exists(), reason="the reference goldens are not beside this checkout")
BUSHY = "[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0],[0,0,1]]"


#: Goldens with outputs that are no result of the networks, or that another output contains.
PARTIAL = {"llamagen_t2i", "lumina_chameleon", "lumina_chameleon_swin", "emu3_lm", "lumina_image_grammar"}
PARTIAL |= {f"eagle_drafter_{name}" for name in ("llamagen", "anole", "lumina")}


@needs_goldens
@pytest.mark.parametrize("name", check_golden.CHECKS)
@torch.inference_mode()
def test_the_networks_reproduce_the_official_numbers(name):
    meta, tensors = json.loads((GOLDENS / f"{name}.json").read_text()), load_file(GOLDENS / f"{name}.safetensors")
    compared = set()
    for output, ours, theirs in check_golden.CHECKS[name](tensors, meta.get("config", {})):
        limits = {"atol": meta.get("suggested_atol", 0), "rtol": meta.get("suggested_rtol", 0), "check_dtype": False}
        torch.testing.assert_close(ours, theirs, **limits, msg=output)
        compared.add(output)
    given = {key.removeprefix("out/") for key in tensors if key.startswith("out/")}
    noises = {key for key in given if key.endswith(("_init", "_noise"))}  # of MAR's goldens: inputs
    assert (not given - noises - compared - {"nearest_margin"}) == (name not in PARTIAL)
    assert len(compared) > 2


@needs_goldens
def test_a_golden_that_disagrees_is_reported(tmp_path, capsys):
    tensors = load_file(GOLDENS / "llamagen_vq.safetensors")
    tensors["out/decoded"] = tensors["out/decoded"] + 0.01
    save_file(tensors, tmp_path / "llamagen_vq.safetensors")
    shutil.copy(GOLDENS / "llamagen_vq.json", tmp_path)
    assert check_golden.main([str(tmp_path / "llamagen_vq.json")]) == 1
    assert "BEYOND" in capsys.readouterr().out
    (tmp_path / "llamagen_vq.json").write_text('{"name": "nothing"}')
    assert check_golden.main([str(tmp_path / "llamagen_vq.json")]) == 2
    assert "unknown golden" in capsys.readouterr().err


@torch.inference_mode()
def test_a_path_inside_a_tree_has_the_logits_of_the_path_alone():
    model = tiny.llamagen(side=4, vocab=11)
    tree = trees.build(trees.parse(BUSHY))
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (2, tree.nodes))
    history = torch.randint(0, 11, (2, 40))
    count = torch.tensor([3, 5])  # rows at different places
    for row, c in enumerate(count.tolist()):
        tokens[row, 0] = history[row, c - 1]
    session = model.open(tiny.prompts(2), 2, True, tree.nodes)
    positions = torch.arange(6).expand(2, -1) + tiny.PREFIX - 1  # the prefix's last place, then the committed tokens
    session.feed_chain(torch.cat([history[:, :1], history[:, :5]], 1), positions)
    logits, _ = session.forward(tokens, tree, history, count)
    for row, c in enumerate(count.tolist()):
        for node in range(tree.nodes):
            path = [n for n in range(1, tree.nodes) if tree.ancestors[0, node, n]]
            complete = torch.cat([history[row, :c], tokens[row, path], torch.zeros(1, dtype=torch.int64)])
            cond = tiny.prompts(2).features[row : row + 1]
            for half, drop in enumerate((False, True)):
                alone = model.head(tiny.teacher(model, complete[None], cond, torch.tensor([drop])))[0, -1]
                torch.testing.assert_close(logits[row + 2 * half, node], alone, atol=2e-4, rtol=1e-4)


DRAFTERS = {
    "none": lambda target: NoDraft(),
    "draft_model": lambda target: DraftModel(tiny.llamagen(side=target.cfg.side, seed=7), 3),
    "eagle": lambda target: EagleDrafter(tiny.eagle(target), trees.chain_paths(3)),
    "eagle_tree": lambda target: EagleDrafter(tiny.eagle(target, layers=2), trees.parse(BUSHY)),
    "eagle2": lambda target: Eagle2(tiny.eagle(target), nodes=9, depth=3, width=3),
    "medusa": lambda target: Medusa(tiny.medusa(target), trees.parse(BUSHY)),
    "jacobi": lambda target: Window(3, match=True),
    "sjd": lambda target: Window(3, init="vertical_sample"),
    "sjd_pac": lambda target: Window(8, width=2, depth=3, coupling="maximal"),
}


@pytest.mark.parametrize("cfg_scale", [1.0, 2.5])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_real_target_keeps_its_distribution_under_every_drafter(name, cfg_scale):
    """Caches, tree masks, compaction and guidance together, against the law enumerated without a cache (chi-square)."""
    target, count = tiny.llamagen(), 6000
    cond = tiny.prompts(count, same=True)
    out = decode(
        DecoderConfig(target, DRAFTERS[name](target), rules.exact(), Sampling(cfg_scale=cfg_scale)),
        cond,
        RandomStreams([(0, i) for i in range(count)]),
    )
    distribution = tiny.sequence_probs(target, cond, cfg_scale)
    assert float(distribution.sum()) == pytest.approx(1, abs=1e-5)
    seen = torch.bincount(codes(out.tokens, tiny.VOCAB), minlength=len(distribution)).double()
    small = distribution * count < 5
    observed = torch.cat([seen[~small], seen[small].sum()[None]])
    wanted = torch.cat([distribution[~small], distribution[small].sum()[None]]) * count
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-4
    if name == "none":
        assert out.steps.eq(4).all()
    else:
        assert 0 < out.accepted.sum() < out.drafted.sum()


def predict(head, ids, features):
    """The drafter's outputs over a whole sequence of entries, one causal pass and no cache."""
    x = head.fc(torch.cat([head.embed_tokens(ids), features], -1))[None]
    return run_blocks(head.layers, x, head.rope()[: x.shape[1]][None])[0]


@torch.inference_mode()
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda head: EagleDrafter(head, trees.chain_paths(3)),
        lambda head: EagleDrafter(head, trees.parse([[0], [1], [0, 0], [1, 0], [0, 0, 0]])),
        lambda head: Eagle2(head, nodes=9, depth=3, width=2),
    ],
)
def test_eagle_drafts_from_the_distributions_of_its_own_network(make, layers):
    """Each law equals the one computed from scratch: one causal pass, the draft's own features appended."""
    target = tiny.llamagen(side=4, vocab=11)
    head = tiny.eagle(target, layers=layers)
    drafter = make(head)
    cond, rng, sampling = tiny.prompts(2), RandomStreams([(0, 0), (0, 1)]), Sampling()
    session = target.open(cond, 2, False, drafter.tree.nodes)
    state = drafter.open(session, cond, sampling, rng)
    history, count, steps = (
        torch.zeros(2, 40, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2).long(),
    )
    compared = 0
    for _ in range(5):
        draft = drafter.propose(state, history, count, steps)
        for row in range(2):
            c = int(count[row])
            if c == 0:
                assert not draft.valid[row, 1:].any()
                continue
            known = tiny.teacher(
                target,
                torch.cat([history[row, :c], torch.zeros(1).long()])[None],
                cond.features[row : row + 1],
                torch.tensor([False]),
            )[0]
            known = known[: tiny.PREFIX + c - 1]  # hidden states before the root
            ids = torch.cat([torch.zeros(tiny.PREFIX - 1).long(), history[row, :c]])
            tree = draft.tree
            row_of = min(row, len(tree.inner) - 1)
            for i, node in enumerate(tree.inner[row_of].tolist()):
                if tree.children[row_of, i].amax() < 0:
                    continue
                path = [n for n in range(1, node + 1) if tree.ancestors[row_of, node, n]]
                out = predict(head, ids, known)
                features, words = known, ids
                for n in path:
                    features = torch.cat([features, out[-1:]])
                    words = torch.cat([words, draft.tokens[row, n][None]])
                    out = predict(head, words, features)
                wanted = sampling.probs(target.head(out[-1]))
                torch.testing.assert_close(draft.probs[row, i], wanted, atol=1e-4, rtol=1e-3)
                compared += 1
        logits, hidden = session.forward(draft.tokens, draft.tree, history, count)
        verdict = verify(sampling.probs(logits), draft, rules.exact(), rng, steps)
        session.commit(verdict, draft.tree, count)
        drafter.commit(state, Outcome(draft, sampling.probs(logits), hidden, verdict, count))
        history.scatter_(1, count[:, None] + torch.arange(4), verdict.tokens)
        count, steps = count + verdict.length + 1, steps + 1
    assert compared > 10


RULES = {
    "exact": {},
    "uniform": {"delta": 2.0, "resample": "optimal"},
    "cool": {"delta": 2.0, "nu": 0.7, "schedule": "exponential", "floor": 0.0, "resample": "optimal"},
    "typical": {"epsilon": 0.09, "alpha": 0.3},
    "lantern": {"delta": 0.3, "k": 1000, "bound": "jsd", "proximity": "l2", "resample": "optimal"},
    "lantern_pp": {"lam": 3.0, "k": 2, "bound": "total", "proximity": "cosine", "resample": "paper"},
    "gsd": {"group": 3, "proximity": "l2", "resample": "vanilla"},
}


def test_these_are_all_the_rules():
    assert set(RULES) == {name for name in parameters.choices("rule") if not parameters.is_continuous("rule", name)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_runs_on_every_drafter(rule, name, temperature):
    target = tiny.llamagen(side=4)
    drafter = DRAFTERS[name](target)
    codebook = torch.randn(tiny.VOCAB, 3, generator=torch.Generator().manual_seed(0))
    setting = Setting(drafter.tree.height, lambda: codebook, temperature == 0)
    scorer = registry.find("rule", rule)(RULES[rule], setting)
    sampling = Sampling(temperature=temperature, top_k=4, cfg_scale=2.0)
    out = decode(
        DecoderConfig(target, drafter, scorer, sampling), tiny.prompts(6), RandomStreams([(0, i) for i in range(6)])
    )
    assert out.tokens.min() >= 0
    assert out.tokens.max() < tiny.VOCAB
    assert (out.steps + out.accepted >= 16).all()  # every token was accepted, or a step's own
    if name == "none":
        assert out.steps.eq(16).all()
    else:
        assert out.accepted.sum() > 0
        assert out.trace.log_prob.isfinite().all()
    if temperature == 0 and rule in ("exact", "typical"):  # the greedy sequence, whatever the draft
        plain = decode(
            DecoderConfig(target, NoDraft(), rules.exact(), sampling),
            tiny.prompts(6),
            RandomStreams([(0, i) for i in range(6)]),
        )
        assert torch.equal(out.tokens, plain.tokens)


@pytest.mark.parametrize("name", DRAFTERS)
def test_an_image_does_not_depend_on_its_batch(name):
    target = tiny.llamagen(side=4)
    sampling = Sampling(cfg_scale=2.0)
    cond = tiny.prompts(9)
    complete = decode(
        DecoderConfig(target, DRAFTERS[name](target), rules.cool(2.0, 3), sampling),
        cond,
        RandomStreams([(5, i) for i in range(9)]),
    )
    for start, stop in ((0, 1), (1, 3), (3, 8), (8, 9)):
        part = decode(
            DecoderConfig(target, DRAFTERS[name](target), rules.cool(2.0, 3), sampling),
            cond.rows(start, stop),
            RandomStreams([(5, i) for i in range(start, stop)]),
        )
        assert torch.equal(part.tokens, complete.tokens[start:stop])
        assert torch.equal(part.steps, complete.steps[start:stop])


def test_draws_follow_their_distribution_and_never_hit_a_zero():
    distribution = torch.tensor([0.5, 0.0, 0.3, 0.2, 0.0])
    u = RandomStreams([(0, i) for i in range(50_000)]).uniform(torch.zeros(50_000, dtype=torch.int64), 3, 5)
    seen = torch.bincount(draw(distribution.expand(50_000, -1), u[:, 0]), minlength=5)
    assert seen[1] == seen[4] == 0
    wanted = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64) * 50_000
    assert stats.chisquare(seen[[0, 2, 3]], wanted).pvalue > 1e-4
    assert int(draw(distribution, torch.tensor(1 - 2.0**-23))) == 3
    pairs = draw_distinct(distribution.expand(50_000, -1), u, 2)
    assert (pairs[:, 0] != pairs[:, 1]).all()
    # without replacement: the second given the first is the law with the first taken out
    first_is_0 = pairs[pairs[:, 0] == 0, 1]
    seen = torch.bincount(first_is_0, minlength=5)[[2, 3]]
    wanted = torch.tensor([0.6, 0.4], dtype=torch.float64) * len(first_is_0)
    assert stats.chisquare(seen, wanted).pvalue > 1e-4


def test_streams_are_uniform_and_apart():
    step = torch.zeros(200, dtype=torch.int64)
    u = RandomStreams([(0, i) for i in range(200)]).uniform(step, 1, 500)
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-4
    others = [
        RandomStreams([(1, i) for i in range(200)]).uniform(step, 1, 500),
        RandomStreams([(0, i) for i in range(200)]).uniform(step, 2, 500),
        RandomStreams([(0, i) for i in range(200)]).uniform(step + 1, 1, 500),
    ]
    for other in others:  # 100,000 pairs: a correlation beyond 0.014 has probability 1e-5
        assert abs(float(torch.corrcoef(torch.stack([u.flatten(), other.flatten()]))[0, 1])) < 0.014


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (lambda t: t.pop("norm.weight"), "'norm.weight' is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "'extra' belongs to no part"),
        (lambda t: t.update({"norm.weight": torch.zeros(3)}), r"has shape \[3\], expected \[32\]"),
        (lambda t: t["norm.weight"].fill_(float("nan")), "NaN"),
    ],
)
def test_a_wrong_tensor_is_named(change, reported):
    tensors = {k: v.clone() for k, v in tiny.llamagen().state_dict().items()}
    change(tensors)
    with pytest.raises(UsageError, match=reported):
        checkpoints.fill(tiny.llamagen(), tensors, "file")


def test_a_file_describes_itself(tmp_path):
    path, model = tmp_path / "m.safetensors", tiny.llamagen()
    checkpoints.save(model, path, "scenes-target", torch.float32)
    config, tensors = checkpoints.read(path, "scenes-target")
    written = path.read_bytes()
    checkpoints.save(model, path, "scenes-target", torch.float32)
    assert path.read_bytes() == written
    again = LlamaGen(LlamaGenConfig(**config))
    checkpoints.fill(again, tensors, path.name)
    assert torch.equal(again.output.weight, model.output.weight)
    with pytest.raises(UsageError, match="not a 'scenes-eagle'"):
        checkpoints.read(path, "scenes-eagle")
    with pytest.raises(UsageError, match="not here"):
        checkpoints.read(tmp_path / "none.safetensors", "scenes-target")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UsageError, match="not a readable safetensors file"):
        checkpoints.read(path, "scenes-target")


@pytest.mark.parametrize(
    ("tree", "reported"),
    [("nope", "unknown tree"), ("[[0,0]]", "not its parent"), ("[[-1]]", "child numbers"), ("[0", "neither")],
)
def test_a_wrong_tree_is_a_sentence(tree, reported):
    with pytest.raises(UsageError, match=reported):
        trees.build(trees.parse(tree))


@pytest.mark.parametrize("function", [ops.silu, ops.gelu, ops.gelu_tanh, exponential, torch.special.ndtri, torch.erf])
def test_a_value_does_not_depend_on_its_position(function):
    """The fused kernels of some functions compute a tensor's ends in another way, and with it an image would depend on
    its batch."""
    x = torch.rand(40_000, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        complete = function(x.clone())
        for start in range(1, 17):
            assert torch.equal(function(x[start : 39_000 + 3 * start].clone()), complete[start : 39_000 + 3 * start])


def test_activations_are_what_they_are_called():
    x = torch.linspace(-8, 8, 1000)
    with torch.inference_mode():
        torch.testing.assert_close(ops.silu(x.clone()), torch.nn.functional.silu(x))
        torch.testing.assert_close(ops.gelu(x.clone()), torch.nn.functional.gelu(x), atol=1e-6, rtol=1e-5)
        wanted = torch.nn.functional.gelu(x, approximate="tanh")
        torch.testing.assert_close(ops.gelu_tanh(x.clone()), wanted, atol=1e-6, rtol=1e-5)
        assert ops.silu(torch.tensor([-200.0, 200.0])).tolist() == [0.0, 200.0]


@pytest.mark.parametrize("width", [64, 512, 768, 896, 1280, 4096])
def test_a_product_does_not_depend_on_the_rows_next_to_it(width):
    """With two threads, among which wide sums are split."""
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=g) for shape in ((150, width), (96, width), (96,)))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with torch.inference_mode():
            together = ops.linear(x, weight, bias)
            torch.testing.assert_close(together, torch.nn.functional.linear(x, weight, bias), atol=1e-3, rtol=1e-3)
            for start, stop in ((0, 1), (3, 5), (7, 40), (20, 149)):
                assert torch.equal(ops.linear(x[start:stop], weight, bias), together[start:stop])
    finally:
        torch.set_num_threads(threads)
