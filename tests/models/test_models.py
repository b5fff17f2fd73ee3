"""The networks and their drafters: official numbers, caches, trees, and independence of the batch."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import check_golden
import made_goldens
import pytest
import test_engine
import tiny
import torch
from safetensors.torch import load_file, save_file
from scipy import stats

from specbench.config import configuration, parameters, registry
from specbench.decoding import rules, trees
from specbench.decoding.drafters.dynamic import Eagle2
from specbench.decoding.drafters.eagle import Eagle as EagleDrafter
from specbench.decoding.drafters.none import NoDraft
from specbench.decoding.loop import DecoderConfig, StepResult, decode
from specbench.decoding.rng import RandomStreams, exponential
from specbench.decoding.rules import RuleContext
from specbench.decoding.sampling import Sampling, draw, draw_distinct
from specbench.decoding.verify import TokenWise
from specbench.engine import ops
from specbench.errors import UsageError
from specbench.models.llamagen import LlamaGen, LlamaGenConfig
from specbench.models.loading import checkpoints
from specbench.models.transformer import run_blocks

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = ROOT.parent / "shared" / "reference" / "goldens"
needs_goldens = pytest.mark.skipif(not GOLDENS.exists(), reason="the reference goldens are not beside this checkout")


def golden(name):
    """The configuration and the tensors of a golden file."""
    return json.loads((GOLDENS / f"{name}.json").read_text())["config"], load_file(GOLDENS / f"{name}.safetensors")


@needs_goldens
@pytest.mark.parametrize("name", check_golden.CHECKS)
def test_the_networks_reproduce_the_official_numbers(name):
    """All outputs are compared; an output that is compared with nothing is an error."""
    assert check_golden.check(GOLDENS / f"{name}.json")


#: Goldens that are made here (name, how): three layers, grouped heads, odd grids, rows of different lengths.
MADE = {
    "lumina_chameleon": lambda to: made_goldens.language(to, "lumina_chameleon", **made_goldens.normed(2)),
    "swin": lambda to: made_goldens.language(to, "lumina_chameleon_swin", swin_norm=True, **made_goldens.normed(1)),
    "anole": lambda to: made_goldens.language(to, "anole_chameleon", qk_norm_eps=1e-5),
    "emu3": lambda to: made_goldens.language(to, "emu3_lm"),
    "simplear": made_goldens.simplear,
    "lumina2": lambda to: made_goldens.lumina2(to, 6.0),
    "lumina2_without_guidance": lambda to: made_goldens.lumina2(to, 1.0),
    "simplear_sjd_hot": lambda to: made_goldens.simplear_jacobi(to, 1.7),
    "simplear_sjd_cold": lambda to: made_goldens.simplear_jacobi(to, 0.6),
    "lumina2_sjd_narrow": lambda to: made_goldens.lumina2_jacobi(to, 4, 4, 8),
    "lumina2_sjd_wide": lambda to: made_goldens.lumina2_jacobi(to, 9, 8, 4),
    # the interval ends before, on and after the end of a row
    **{
        f"lumina2_sjd_{window}_{plain}": partial(
            made_goldens.lumina2_jacobi, window=window, rows=8, columns=4, plain=plain
        )
        for window, plain in ((5, 17), (6, 16), (7, 15), (8, 17), (8, 16), (8, 15))
    },
    "eagle_anole": lambda to: made_goldens.eagle(to, "eagle_drafter_anole"),
    "eagle_lumina": lambda to: made_goldens.eagle(to, "eagle_drafter_lumina"),
}


@torch.inference_mode()
@pytest.mark.parametrize("case", MADE)
def test_goldens_of_other_sizes_pass(tmp_path, case):
    assert check_golden.check(MADE[case](tmp_path))


#: Goldens with one image.
SHARED = {"llamagen_vq", "chameleon_vqgan", "lumina2_movqgan", "janus_vq", "emu3_vision_tokenizer", "mar_kl16"}
SHARED |= {"janus_lm", "janus_hf", "simplear_cosmos_dv", "mar"}


@needs_goldens
@pytest.mark.parametrize("name", sorted(SHARED))
def test_batches_of_two_pass(tmp_path, name):
    config, t = golden(name)
    if name == "janus_lm":  # it has only one prompt, which is not a batch
        t["in/prompt_ids"] = t["in/prompt_ids"][None]
    made = made_goldens.mar_of_two(t) if name == "mar" else made_goldens.doubled(t, blocked=name == "janus_hf")
    assert check_golden.check(made_goldens.write(tmp_path, name, config, made))


@needs_goldens
@pytest.mark.parametrize(("name", "images"), [("janus_lm", 2), ("janus_lm", 3), ("janus_hf", 2)])
def test_one_prompt_of_janus_may_have_several_images(tmp_path, name, images):
    config, t = golden(name)
    made = t
    for _ in range(images - 1):
        more = {n: x for n, x in t.items() if n.startswith("out/") or n == "in/step_tokens"}
        if name == "janus_hf":
            made = made_goldens.doubled(t) | {n: t[n] for n in ("in/prompt_ids", "in/attention_mask")}
        else:
            made = made | {n: torch.cat([made[n], x]) for n, x in more.items()}
    assert check_golden.check(made_goldens.write(tmp_path, name, config, made))


@needs_goldens
def test_a_drafter_of_llamagen_may_have_two_layers_and_images(tmp_path):
    name = "eagle_drafter_llamagen"
    config, t = golden(name)
    assert check_golden.check(made_goldens.write(tmp_path, name, *made_goldens.deeper(config, t)))


@needs_goldens
def test_the_temperature_of_the_golden_is_used(tmp_path):
    name, at = "llamagen_t2i", 0.7
    config, t = golden(name)
    scores = t["out/cfg_logits_0"] / at
    cut = scores.topk(7).values[:, -1:]
    t["out/probs_0"] = scores.masked_fill(scores < cut, -torch.inf).softmax(-1)
    changed = config | {"temperature": at, "top_k": 7}
    assert check_golden.check(made_goldens.write(tmp_path, name, changed, t))


@torch.inference_mode()
def test_a_golden_that_differs_from_the_model_is_an_error(tmp_path):
    path = made_goldens.language(tmp_path, "emu3_lm")
    meta, tensors = json.loads(path.read_text()), load_file(path.with_suffix(".safetensors"))
    for name, value, match in (
        ("out/cached_state", torch.zeros(2), "out/cached_state"),
        ("in/second_mask", torch.zeros(2), "in/second_mask"),
        ("param/model.layers.3.mlp.up_proj.weight", torch.zeros(2), r"model\.layers\.3\.mlp\.up_proj"),
        ("in/step_tokens", None, "has no 'in/step_tokens'"),
        ("param/model.norm.weight", None, r"model\.norm\.weight"),
        ("head_dim", 16, "head_dim=16"),
        ("vocab_size", None, "has no 'vocab_size'"),
    ):
        config, t = dict(meta["config"]), dict(tensors)
        changed = t if "/" in name else config
        changed.pop(name, None)
        if value is not None:
            changed[name] = value
        made_goldens.write(tmp_path, "emu3_lm", config, t)
        with pytest.raises(UsageError, match=match):
            check_golden.check(path)


@needs_goldens
def test_a_tensor_of_a_part_that_the_model_does_not_have_is_an_error(tmp_path):
    name = "simplear_cosmos_dv"
    config, t = golden(name)
    t["param/decoder.up.2.block.9.conv1.0.conv3d.weight"] = torch.zeros(2)
    with pytest.raises(UsageError, match=r"decoder\.up\.2\.block\.9"):
        check_golden.check(made_goldens.write(tmp_path, name, config, t))


def test_goldens_that_disagree_are_reported(tmp_path, capsys):
    path = made_goldens.language(tmp_path, "emu3_lm")
    (tmp_path / "nothing.json").write_text('{"name": "nothing"}')
    save_file({}, tmp_path / "nothing.safetensors")
    t = load_file(path.with_suffix(".safetensors"))
    t["out/cfg_logits"] = t["out/cfg_logits"] + 0.01
    save_file(t, path.with_suffix(".safetensors"))
    assert check_golden.main([str(path)]) == 1
    assert "BEYOND" in capsys.readouterr().out
    assert check_golden.main([str(tmp_path / "nothing.json"), str(path)]) == 2
    out, err = capsys.readouterr()
    assert "BEYOND" in out
    assert "unknown golden" in err


def decode_images(target, drafter, rule, sampling, cond, rows):
    """Images of the prompts `cond`, with the random numbers of the (seed, index) pairs `rows`."""
    return decode(DecoderConfig(target, drafter, rule, sampling), cond, RandomStreams(rows))


def predict(head, ids, features):
    """The drafter's outputs over a whole sequence of entries: one causal pass without a cache."""
    x = head.fc(torch.cat([head.embed_tokens(ids), features], -1))[None]
    return run_blocks(head.layers, x, head.rope()[: x.shape[1]][None])[0]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (lambda head: EagleDrafter(head, trees.chain_paths(3)), 1),
        (lambda head: EagleDrafter(head, trees.parse([[0], [1], [0, 0], [1, 0], [0, 0, 0]])), 2),
        (lambda head: Eagle2(head, nodes=9, depth=3, width=2), 1),
        (lambda head: Eagle2(head, nodes=9, depth=3, width=2), 2),
    ],
)
def test_eagle_drafts_from_the_distributions_of_its_own_network(make, layers):
    """Each distribution equals one computed from scratch: one causal pass, with the draft's features appended."""
    target = tiny.llamagen(side=4, vocab=11)
    head = tiny.eagle(target, layers=layers)
    drafter = make(head)
    cond, rng, sampling = tiny.prompts(2), RandomStreams([(0, 0), (0, 1)]), Sampling()
    session = target.open(cond, 2, False, drafter.tree.nodes)
    state = drafter.open(session, cond, sampling, rng)
    history, count, steps = torch.zeros(2, 40).long(), torch.zeros(2).long(), torch.zeros(2).long()
    compared = 0
    for _ in range(5):
        draft = drafter.propose(state, history, count, steps)
        for row in range(2):
            c = int(count[row])
            if c == 0:
                assert not draft.valid[row, 1:].any()
                continue
            ahead = torch.cat([history[row, :c], torch.zeros(1).long()])[None]
            states = tiny.teacher(target, ahead, cond.features[row : row + 1])[0]
            states = states[: tiny.PREFIX + c - 1]  # hidden states before the root
            ids = torch.cat([torch.zeros(tiny.PREFIX - 1).long(), history[row, :c]])
            tree = draft.tree
            row_of = min(row, len(tree.inner) - 1)
            for i, node in enumerate(tree.inner[row_of].tolist()):
                if tree.children[row_of, i].amax() < 0:
                    continue
                path = [n for n in range(1, node + 1) if tree.ancestors[row_of, node, n]]
                out = predict(head, ids, states)
                features, words = states, ids
                for n in path:
                    features = torch.cat([features, out[-1:]])
                    words = torch.cat([words, draft.tokens[row, n][None]])
                    out = predict(head, words, features)
                expected = sampling.probs(target.head(out[-1]))
                torch.testing.assert_close(draft.probs[row, i], expected, atol=1e-4, rtol=1e-3)
                compared += 1
        logits, hidden = session.forward(draft.tokens, draft.tree, history, count)
        verdict = TokenWise().verify(sampling.probs(logits), draft, rules.exact(), rng, steps)
        session.commit(verdict, draft.tree, count)
        drafter.commit(state, StepResult(draft, sampling.probs(logits), hidden, verdict, count))
        history.scatter_(1, count[:, None] + torch.arange(4), verdict.tokens)
        count, steps = count + verdict.length + 1, steps + 1
    assert compared > 10


DRAFTERS = ("none", "draft_model", "chain", "tree", "eagle2", "medusa", "jacobi", "sjd_vertical", "sjd_pac")
RULES = {
    "exact": {},
    "uniform": {"delta": 2.0, "resample": "optimal"},
    "cool": {
        "delta": 2.0,
        "nu": 0.7,
        "schedule": "exponential",
        "linear_length": 8,
        "floor": 0.0,
        "resample": "optimal",
    },
    "typical": {"epsilon": 0.09, "alpha": 0.3},
    "entropy": {"pivot": 1.0, "calm": 16.0},
    "lantern": {"delta": 0.3, "k": 1000, "bound": "jsd", "proximity": "l2", "resample": "optimal"},
    "lantern_pp": {"lam": 3.0, "k": 2, "bound": "total", "proximity": "cosine", "resample": "paper"},
    "redraw": {"resample": "target"},
    "band": {"strength": 0.5, "decay": 0.5},
    "mentored": {"budget": 0.1},
    "neighbourhood": {"group": 3, "proximity": "l2", "resample": "vanilla"},
    "gsd": {"group": 4, "delta": 0.3, "distance": 20.0, "edge": "clip", "resample": "vanilla"},
}


def test_these_are_all_the_rules():
    assert set(RULES) == {name for name in parameters.choices("rule") if not parameters.is_continuous("rule", name)}


@pytest.mark.parametrize(("first", "name"), enumerate(DRAFTERS))
def test_every_rule_runs_on_every_drafter(first, name):
    """The temperature alternates between 0 and 1. At 0, the exact rule gives the greedy sequence whatever the draft is,
    and so does the typical rule (with every other drafter)."""
    target = tiny.llamagen(side=4)
    drafter = test_engine.DRAFTERS[name](target)
    codebook = torch.randn(tiny.VOCAB, 3, generator=torch.Generator().manual_seed(0))
    for number, (rule, parameters_of_it) in enumerate(RULES.items(), start=first):
        temperature = 0.0 if rule == "exact" else float(number % 2)
        setting = RuleContext(drafter.tree.height, lambda: codebook, temperature == 0)
        built_rule = registry.find("rule", rule)(**parameters_of_it).build(setting)
        sampling = Sampling(temperature=temperature, top_k=4, cfg_scale=2.0)
        args = sampling, tiny.prompts(6), [(0, i) for i in range(6)]
        out = decode_images(target, drafter, built_rule, *args)
        assert out.tokens.min() >= 0
        assert out.tokens.max() < tiny.VOCAB
        assert (out.steps + out.accepted >= 16).all(), rule  # every token was accepted or came from a step
        if name == "none":
            assert out.steps.eq(16).all(), rule
        else:
            assert out.accepted.sum() > 0, rule
            assert out.trace.log_prob.isfinite().all(), rule
        if temperature == 0 and rule in ("exact", "typical"):
            plain = decode_images(target, NoDraft(), rules.exact(), *args)
            assert torch.equal(out.tokens, plain.tokens), rule


def test_draws_follow_their_distribution_and_never_hit_a_zero():
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2, 0.0])
    streams, step = RandomStreams([(0, i) for i in range(50_000)]), torch.zeros(50_000, dtype=torch.int64)
    seen = torch.bincount(draw(probs.expand(50_000, -1), streams.uniform(step, 3, 1)[:, 0]), minlength=5)
    assert seen[1] == seen[4] == 0
    expected = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64) * 50_000
    assert stats.chisquare(seen[[0, 2, 3]], expected).pvalue > 1e-4
    assert int(draw(probs, torch.tensor(1 - 2.0**-23))) == 3
    pairs = draw_distinct(probs.expand(50_000, -1), streams.exponential(step, 3, 5), 2)
    assert (pairs[:, 0] != pairs[:, 1]).all()
    # without replacement: the second given the first has the distribution without the first
    first_is_0 = pairs[pairs[:, 0] == 0, 1]
    seen = torch.bincount(first_is_0, minlength=5)[[2, 3]]
    expected = torch.tensor([0.6, 0.4], dtype=torch.float64) * len(first_is_0)
    assert stats.chisquare(seen, expected).pvalue > 1e-4


def test_streams_are_uniform_and_independent():
    step = torch.zeros(200, dtype=torch.int64)
    u = RandomStreams([(0, i) for i in range(200)]).uniform(step, 1, 500)
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-4
    others = [
        RandomStreams([(seed, i) for i in range(200)]).uniform(step + more, tag, 500)
        for seed, more, tag in ((1, 0, 1), (0, 0, 2), (0, 1, 1))
    ]
    for other in others:  # 100,000 pairs: a correlation beyond 0.014 has probability 1e-5
        assert abs(float(torch.corrcoef(torch.stack([u.flatten(), other.flatten()]))[0, 1])) < 0.014


def test_noise_is_exponential_far_below_the_grid_of_the_uniforms():
    """Else each of many improbable tokens would be drawn as often as one of probability 2**-23."""
    hashes = torch.randint(0, 2**63 - 1, (2000,), generator=torch.Generator().manual_seed(0))
    hashes = torch.cat([hashes, hashes >> torch.arange(1, 47).repeat(44)[:2000]])  # small uniforms, too
    noise = exponential(hashes).double()
    uniform = ((hashes >> 17) + 0.5) * 2.0**-47  # the first of 64 bits is zero here
    small = uniform < 0.6  # where it matters; nearer to 1, an interval of the grid is divided in equal parts
    torch.testing.assert_close(noise[small], -torch.log1p(-uniform[small].double()), rtol=1e-6, atol=0)
    assert (noise[2000:] < 2.0**-30).sum() > 100


def test_a_wrong_tensor_is_named():
    """For other errors in tensors see test_official."""
    tensors = tiny.llamagen().state_dict()
    for wrong, message in (
        ({}, "'norm.weight' is missing"),
        ({"norm.weight": torch.full_like(tensors["norm.weight"], torch.nan)}, "NaN"),
    ):
        changed = {name: tensor for name, tensor in tensors.items() if name != "norm.weight"} | wrong
        with pytest.raises(UsageError, match=message):
            checkpoints.fill(tiny.llamagen(), changed, "file")


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
    with pytest.raises(UsageError, match="'scenes-eagle'"):
        checkpoints.read(path, "scenes-eagle")
    with pytest.raises(UsageError, match="not here"):
        checkpoints.read(tmp_path / "none.safetensors", "scenes-target")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UsageError, match="file"):
        checkpoints.read(path, "scenes-target")


def test_a_wrong_tree_is_a_clear_error():
    for tree, message in (
        ("nope", "unknown tree"),
        ("[[0,0]]", "not its parent"),
        ("[[-1]]", "child numbers"),
        ("[0", "neither"),
        ("2-0", "1 child or more"),
    ):
        with pytest.raises(UsageError, match=message):
            trees.build(trees.parse(tree))


def test_a_tree_by_its_children_per_depth():
    assert trees.parse("2-1") == [(0,), (1,), (0, 0), (1, 0)]
    assert trees.parse("2") == [(0,), (1,)]
    assert configuration.compose(["method=eagle1", "tree=2"]) == configuration.compose(["method=eagle1", "tree='2'"])
    made = trees.build(trees.parse("4-2-1"))
    assert (made.nodes, made.height, made.levels) == (21, 3, ((1, 4), (4, 2), (8, 1)))


def test_a_value_does_not_depend_on_its_position():
    """The fused kernels of some functions compute the ends of a tensor in another way, so an image would depend on its
    batch."""

    def noise(x):
        return exponential((x.double() * 2.0**63).long())

    x = torch.rand(40_000, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for function in (ops.silu, ops.gelu, ops.gelu_tanh, noise, torch.special.ndtri, torch.erf):
            whole = function(x.clone())
            for start in range(1, 17):
                part = function(x[start : 39_000 + 3 * start].clone())
                assert torch.equal(part, whole[start : 39_000 + 3 * start]), function


def test_activations_match_their_names():
    x = torch.linspace(-8, 8, 1000)
    with torch.inference_mode():
        torch.testing.assert_close(ops.silu(x.clone()), torch.nn.functional.silu(x))
        torch.testing.assert_close(ops.gelu(x.clone()), torch.nn.functional.gelu(x), atol=1e-6, rtol=1e-5)
        expected = torch.nn.functional.gelu(x, approximate="tanh")
        torch.testing.assert_close(ops.gelu_tanh(x.clone()), expected, atol=1e-6, rtol=1e-5)
        assert ops.silu(torch.tensor([-200.0, 200.0])).tolist() == [0.0, 200.0]
