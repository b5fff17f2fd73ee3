"""NextStep: its passes against transformers' Qwen2, its head and samplers against plain code, decoding token by token
with and without drafts, losslessness, and the official files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hostless import numbers_unknown
from reachable import tensors, undeclared
from rehearsal import files as rehearsal_files
from rehearsal.vocabularies import save_words
from safetensors.torch import load_file, save_file
from scipy import stats
from test_real import TINY, loaded
from tiny import equal, image, rng

from specbench.audit import causal, densities
from specbench.audit.audit import measure
from specbench.config import configuration
from specbench.decoding.batch import decode_stream
from specbench.decoding.continuous import ContinuousDecoding, ContinuousRule, decode, loop, trajectory
from specbench.decoding.continuous.trajectory import draw_trajectory, normal
from specbench.decoding.continuous.verify import NOISE
from specbench.engine.graph import Eager
from specbench.errors import UsageError
from specbench.harness.method import check
from specbench.models import vq
from specbench.models.flow import FlowSampler
from specbench.models.loading import image_tokenizers
from specbench.models.loading import nextstep as files
from specbench.models.loading.bundle import shape_of
from specbench.models.loading.official import exported
from specbench.models.nextstep import NextStep, NextStepConfig, NextStepSession, NextStepTarget
from specbench.models.unified import Prompts

SMALL = NextStepConfig(24, 2, 3, 1, 40, 30, side=3, token_dim=5, head_width=16, head_depth=2)
PATH = ContinuousRule(gamma=3, criterion="path")


def model_of(cfg=SMALL):
    return causal.network(0, cfg)


def prompts(count, vocab=30):
    """Prompts of different lengths, padded on the left; the negative prompt is shorter."""
    g = torch.Generator().manual_seed(3)
    ids, no_ids = torch.randint(0, vocab, (2, count, 6), generator=g)
    start = torch.arange(count)[:, None] % 4
    at = torch.arange(6)
    return Prompts(ids, at >= start, no_ids, (at >= 4).expand(count, -1))


def guide(model, scale=3.0, kind="linear", steps=4, **others):
    return NextStepTarget(model, FlowSampler(steps, **others), scale, kind, use_norm=others == {})


def qwen(model):
    """transformers' Qwen2 with a model's weights, under its official names."""
    from transformers import Qwen2Config, Qwen2Model

    c = model.cfg
    cfg = Qwen2Config(
        vocab_size=c.vocab_size,
        hidden_size=c.dim,
        intermediate_size=c.ffn_hidden,
        num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head,
        num_key_value_heads=c.n_kv_head,
        rms_norm_eps=c.norm_eps,
        rope_theta=c.rope_base,
    )
    other = Qwen2Model(cfg).eval()
    tensors = {n: t for n, t in exported(model, files.table(c)).items() if not n.startswith("image_")}
    other.load_state_dict(tensors)
    return other


@torch.no_grad()
def expected_conditions(guided, prompt_batch, tokens):
    """z (B, L, ...) of all tokens (B, L, D), computed with transformers' Qwen2 in one pass per row without its
    padding."""
    model, other = guided.model, qwen(guided.model)
    if guided.use_norm:
        mean = tokens.mean(-1, keepdim=True)
        tokens = (tokens - mean) / ((tokens - mean).square().mean(-1, keepdim=True) + 1e-6).sqrt()
    w = dict(model.named_parameters())
    x = tokens @ w["image_in_projector.weight"].T + w["image_in_projector.bias"]
    halves = []
    for ids, valid in ((prompt_batch.ids, prompt_batch.valid), (prompt_batch.no_ids, prompt_batch.no_valid)):
        rows = []
        for i, row in enumerate(x):
            text = other.embed_tokens(ids[i][valid[i]])
            hidden = other(inputs_embeds=torch.cat([text, row[:-1]])[None]).last_hidden_state[0, len(text) - 1 :]
            rows.append(hidden @ w["image_out_projector.weight"].T + w["image_out_projector.bias"])
        halves.append(torch.stack(rows))
    if guided.scale == 1:
        return halves[0]
    number = torch.arange(guided.length).expand(len(tokens), -1)
    strength = 1 + (guided.scale - 1) * (guided.length - number) / guided.length
    strength = strength if guided.kind == "linear" else torch.full_like(strength, guided.scale)
    return torch.cat([*halves, strength[..., None]], -1)


@pytest.mark.parametrize(("scale", "kind"), [(3.0, "linear"), (7.5, "constant"), (1.0, "constant")])
@torch.inference_mode()
def test_a_pass_equals_transformers_qwen2(scale, kind):
    """Token by token, several at once, beyond the end of the image, and only for the rows that are not finished."""
    guided, prompt_batch = guide(model_of(), scale, kind), prompts(4)
    tokens = torch.randn(4, 10, 5, generator=torch.Generator().manual_seed(1))
    expected = expected_conditions(guided, prompt_batch, tokens[:, :9])
    session, every = guided.open(prompt_batch, 4), torch.arange(4)
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    for first in range(3):
        at = torch.full((4,), first)
        close(session.following(tokens, every, at, 1, 1)[:, 0], expected[:, first])
    close(session.following(tokens, every, torch.full((4,), 3), 3, 1), expected[:, 3:6])
    first = torch.tensor([2, 6, 5, 4])  # each image at a different position; the second reads beyond the end
    z = session.following(tokens, every, first, 5, 2)
    for row, begin in enumerate(first.tolist()):
        close(z[row, : 9 - begin], expected[row, begin : begin + 5])
    unfinished = torch.tensor([1, 3])
    changed = tokens.clone()
    changed[:, 5] += 1
    # the changed token is read again
    z = session.following(changed[unfinished], unfinished, torch.tensor([6, 6]), 2, 1)
    close(z, expected_conditions(guided, prompt_batch, changed[:, :9])[unfinished, 6:8])


@torch.inference_mode()
def test_changed_tokens_are_read_and_the_others_are_kept():
    guided, prompt_batch = guide(model_of()), prompts(2)
    tokens = torch.randn(2, 10, 5, generator=torch.Generator().manual_seed(1))
    session, every, at = guided.open(prompt_batch, 2), torch.arange(2), torch.full((2,), 6)
    session.following(tokens, every, at, 1, 7)  # all six tokens before, and the end of the prompt
    other = tokens.clone()
    other[:, :4] = torch.nan
    assert torch.isfinite(session.following(other, every, at, 1, 2)).all()
    other = tokens.clone()
    other[:, 3:6] += 1
    expected = expected_conditions(guided, prompt_batch, other[:, :9])[:, 6]
    torch.testing.assert_close(session.following(other, every, at, 1, 3)[:, 0], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(guided.open(prompt_batch, 2).following(other, every, at, 1, 2)[:, 0], expected, atol=1e-3)


def plain_head(model, x, t, z):
    """The velocity (n, D) of states x at times t (n,)."""
    w = {n.removeprefix("image_head.net."): p for n, p in model.named_parameters() if n.startswith("image_head.")}

    def layer(name, x):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    frequency = 10000 ** (-torch.arange(128) / 128)
    waves = torch.cat([torch.cos(t[:, None] * frequency), torch.sin(t[:, None] * frequency)], 1)
    y = layer("time_embed.mlp.2", F.silu(layer("time_embed.mlp.0", waves))) + layer("cond_embed", z)
    x = layer("input_proj", x)
    for i in range(model.cfg.head_depth):
        at = f"res_blocks.{i}"
        shift, scale, gate = layer(f"{at}.adaLN_modulation.1", F.silu(y)).chunk(3, 1)
        h = F.layer_norm(x, x.shape[-1:], w[f"{at}.in_ln.weight"], w[f"{at}.in_ln.bias"], 1e-6)
        h = h * (1 + scale) + shift
        x = x + gate * layer(f"{at}.mlp.2", F.silu(layer(f"{at}.mlp.0", h)))
    shift, scale = layer("final_layer.adaLN_modulation.1", F.silu(y)).chunk(2, 1)
    return layer("final_layer.linear", F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift)


def published_sampler(velocity, x, noises, steps, shift=1.0):
    """NextStep-1.1's sampler: `steps` steps from 0 to 1, each with noise. noises: in the order of drawing."""
    grid = [k / steps for k in range(steps)]
    grid = [*(t / (shift - (shift - 1) * t) for t in grid), 1.0]
    for t, after, noise in zip(grid[:-1], grid[1:], noises, strict=True):
        v, d = velocity(x, t), after - t
        score = (t * v - x) / (1 - t)
        x = x + (v + (1 - t) * score) * d + math.sqrt(2 * (1 - t) * d) * noise
    return x


def first_version_sampler(velocity, x, noises, steps):
    """NextStep-1's sampler: `steps` points from 0 to 0.96 with noise between them, and a last step of 0.04 without
    noise."""
    grid = np.linspace(0, 0.96, steps)
    for t, after, noise in zip(grid[:-1], grid[1:], noises[:-1], strict=True):
        v, d = velocity(x, t), after - t
        score = (t * v - x) / (1 - t)
        x = x + (v + (1 - t) * score) * d + math.sqrt(2 * (1 - t) * d) * noise
    return x + velocity(x, grid[-1]) * 0.04


def flow_grpo_sampler(velocity, x, noises, steps):
    """The sampler of the training code, at level 0.8."""
    grid = np.linspace(0, 1, steps + 1)
    for t, after, noise in zip(grid[:-1], grid[1:], noises, strict=True):
        v, d, sigma = velocity(x, t), after - t, 1 - t
        deviation = 0.8 * math.sqrt(sigma / (1 - (grid[-2] if sigma == 1 else sigma)))
        start, end = x - v * t, x + v * (1 - t)
        x = start * (1 - after) + end * after - deviation**2 * d / (2 * sigma) * start
        x = x + deviation * math.sqrt(d) * noise
    return x


SAMPLERS = {
    "published": ({}, published_sampler),
    "shifted": ({"shift": 3.2}, partial(published_sampler, shift=3.2)),
    "first version": ({"last_step": 0.04, "noisy": False}, first_version_sampler),
    "flow-grpo": ({"level": 0.8}, flow_grpo_sampler),
}


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("name", SAMPLERS)
@torch.inference_mode()
def test_a_sampler_equals_the_published_one(name, scale):
    options, plain = SAMPLERS[name]
    model, steps, n = model_of(), 7, 6
    guided = NextStepTarget(model, FlowSampler(steps, **options), scale)
    session = guided.open(prompts(1), 1)
    g = torch.Generator().manual_seed(2)
    z, free, noise = (torch.randn(n, *shape, generator=g) for shape in ((24,), (24,), (steps + 1, 5)))

    def velocity(x, t):
        at = torch.full((n,), float(t))
        v = plain_head(model, x, at, z)
        return v if scale == 1 else scale * v + (1 - scale) * plain_head(model, x, at, free)

    conditions = z if scale == 1 else torch.cat([z, free, torch.full((n, 1), scale)], 1)
    rule = ContinuousRule(final_noise=options.get("noisy", True))
    path = draw_trajectory(session, conditions, noise, rule, Eager())
    expected = plain(velocity, noise[:, -1], noise[:, :-1].flip(1).unbind(1), steps)
    torch.testing.assert_close(path.token, expected, rtol=1e-4, atol=1e-4)
    for t in range(steps):  # and `moments`, which computes the same as a sampler
        mean, log_variance = session.moments(path.states[:, t + 1], torch.full((n,), t), conditions)
        torch.testing.assert_close(mean, path.mean[:, t], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(log_variance, path.log_variance[:, t])


@torch.inference_mode()
def test_an_image_is_drawn_token_by_token():
    """The reference uses transformers' Qwen2 without a cache, the plain head and the published sampler, with the same
    noise."""
    guided, prompt_batch, images = guide(model_of()), prompts(3), rng(3)
    out = decode(guided, None, ContinuousRule(), prompt_batch, images)
    tokens = torch.zeros(3, 9, 5)
    for j in range(9):
        z = expected_conditions(guided, prompt_batch, tokens)[:, j]
        noise = normal(images, torch.full((3,), j), NOISE, 5, 5)

        def velocity(x, t, z=z):
            at = torch.full((3,), float(t))
            v, free = (plain_head(guided.model, x, at, half) for half in (z[:, :24], z[:, 24:48]))
            return free + z[:, 48:] * (v - free)

        tokens[:, j] = published_sampler(velocity, noise[:, -1], noise[:, :-1].flip(1).unbind(1), 4)
    # float32 rounds to 6e-8, and an error grows over nine tokens of four steps with guidance 3
    torch.testing.assert_close(out.tokens, tokens, rtol=1e-3, atol=1e-3)
    assert torch.equal(out.trace.order, torch.arange(9).expand(3, -1))
    assert out.steps.tolist() == [9] * 3


RULES = {
    "path": PATH,
    "last step": ContinuousRule(gamma=3),
    "prefill": replace(PATH, prefill=0.4),
    "block": replace(PATH, verification="block"),
    "longer than an image": replace(PATH, gamma=11),
}


@pytest.mark.parametrize("name", RULES)
@torch.inference_mode()
def test_all_drafts_of_the_target_itself_are_accepted(name):
    """Keys and values of accepted, replaced and bonus tokens are in the right places: the images equal vanilla's."""
    guided, prompt_batch = guide(model_of()), prompts(3)
    plain = decode(guided, None, ContinuousRule(), prompt_batch, rng(3))
    out = decode(guided, guided, RULES[name], prompt_batch, rng(3))
    assert torch.equal(out.accepted, out.trace.offered.sum(1))
    assert (out.steps < 9).all()
    if name != "block":  # its passes draw other noise
        torch.testing.assert_close(out.tokens, plain.tokens, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [*RULES, "continue"])
@torch.inference_mode()
def test_an_image_does_not_depend_on_the_others(name, monkeypatch):
    """In a batch, and in two rows where a finished row takes the next image, whether or not the host asks which images
    are done."""
    rule = RULES.get(name) or replace(PATH, on_reject="continue")
    model = model_of()
    target, drafter, prompt_batch = guide(model), guide(causal.near(model, 0.05, 9)), prompts(4)

    def select(indices):
        return Prompts(*(x[indices] for x in vars(prompt_batch).values()))

    together = decode(target, drafter, rule, prompt_batch, rng(4))
    assert 0 < together.accepted.sum() < together.drafted.sum()
    start = partial(ContinuousDecoding, target, drafter, rule)
    alone = [image(decode(target, drafter, rule, select([i]), rng([i])), 0) for i in range(4)]
    for compact in (True, False):
        monkeypatch.setattr(loop, "compacts", lambda device, compact=compact: compact)
        parts = [(range(4), decode(target, drafter, rule, prompt_batch, rng(4)))]
        parts += decode_stream(start, select, rng, 4, 2)
        for indices, out in parts:
            assert all(equal(image(out, row), alone[i]) for row, i in enumerate(indices))


@pytest.mark.parametrize("rule", [ContinuousRule(gamma=3), replace(PATH, gamma=2), replace(PATH, on_reject="continue")])
@torch.inference_mode()
def test_everything_that_changes_in_a_pass_is_declared(rule):
    """See test_recording. Keys and values also keep their addresses."""
    model = model_of()
    pair = guide(model), guide(causal.near(model, 0.05, 9))
    images, other = (ContinuousDecoding(*pair, rule, prompts(2), rng(2, seed)) for seed in (0, 1))
    before = {path: tensor.clone() for path, tensor in undeclared(images).items()}
    assert before
    assert equal(before, undeclared(other))
    addresses = {path: tensor.data_ptr() for path, (_, tensor) in tensors(images).items()}
    for _ in range(2):
        images.step()
        images.record_stats()
    assert equal(undeclared(images), before)
    assert {path: tensor.data_ptr() for path, (_, tensor) in tensors(images).items()} == addresses


@torch.inference_mode()
def test_no_pass_waits_for_the_host(monkeypatch):
    monkeypatch.setattr(loop, "compacts", lambda device: False)
    guided = guide(model_of())
    images = ContinuousDecoding(guided, guided, ContinuousRule(gamma=2, prefill=0.2), prompts(2), rng(2))
    images.step()
    images.record_stats()
    with numbers_unknown(images):
        images.draw_directly(1)
        images.step()
        images.record_stats()


# --- losslessness -----------------------------------------------------------------------------------------------------


def row_of(words, samples=3000, **options):
    """The audit's row for the built-in pair; options change its sampler."""
    cfg = configuration.compose(f"method=cspd model=nextstep_1_1 weights=random reduced=true {words}".split())
    name = "nextstep_tiny"
    distance = options.pop("distance", 0.15)
    pair = causal.pair(name, distance, FlowSampler(5, **options)) if options else causal.built_in(name)
    return measure(densities.assemble(cfg), pair, samples)


#: Parameters of `cspd`, and the sampler's options.
LOSSLESS = {
    "the preset": ("gamma=2", {}),
    "the last step's density": ("gamma=2 criterion=exact", {}),
    "a block": ("gamma=3 verification=block", {}),
    "another temperature, after a prefill": ("gamma=2 temperature=0.8 prefill=0.3", {}),
    "flow-grpo": ("gamma=2", {"level": 0.8}),
    "a short last step, with noise": ("gamma=2", {"last_step": 0.04}),
}


@pytest.mark.usefixtures("rows_together")
@pytest.mark.parametrize("name", LOSSLESS)
def test_drafts_do_not_change_the_distribution(name):
    """The audit compares the loop's images with images from code that shares only the networks with the loop. A
    lossless method fails once in 10,000."""
    words, options = LOSSLESS[name]
    row = row_of(words, **options)
    assert row["verdict"] != "not lossless", row
    assert 0.1 < row["acceptance_rate"] < 0.95
    assert row["fallbacks"] < 0.01 * row["samples"]


@pytest.mark.usefixtures("rows_together")
def test_the_audit_sees_a_density_that_leaves_steps_out(monkeypatch):
    """A path's density is the product over all of its steps."""
    plain = trajectory.log_normal

    def without_most_steps(x, mean, log_variance, *rest):
        return plain(x[..., :1, :], mean[..., :1, :], log_variance[..., :1, :], *rest)

    monkeypatch.setattr(trajectory, "log_normal", without_most_steps)
    assert row_of("gamma=2", 6000)["verdict"] == "not lossless"


@pytest.mark.usefixtures("rows_together")
def test_the_audit_sees_a_cache_that_is_not_renewed(monkeypatch):
    """Keys of a rejected token stay in the place of its replacement's keys."""
    plain = NextStepSession.following

    def stale(self, tokens, row, first, count, changed):
        if count == 3:  # the target's pass over a draft
            tokens = tokens.clone()
            tokens[torch.arange(len(row)), (first - 1).clamp_min(0)] = 0.0
        return plain(self, tokens, row, first, count, changed)

    monkeypatch.setattr(NextStepSession, "following", stale)
    assert row_of("gamma=2", 6000)["verdict"] == "not lossless"


@pytest.mark.usefixtures("rows_together")
def test_the_residual_of_one_token_is_exact():
    """One token of one number with a known distribution: a head that predicts a constant velocity v gives N(v, s^2),
    and target and drafter differ in v."""
    cfg = replace(causal.TINY, side=1, token_dim=1)
    models = [model_of(cfg), model_of(cfg)]
    for model, v in zip(models, (0.7, 0.2), strict=True):
        last = model.image_head.net.final_layer
        last.linear.weight.zero_()
        last.linear.bias.fill_(v)
    target, drafter = (NextStepTarget(m, FlowSampler(4)) for m in models)
    n = 8000
    prompt_batch = causal.CausalNetwork(target).prompts(n)
    out = decode(target, drafter, ContinuousRule(gamma=1, criterion="path"), prompt_batch, rng(n))
    mean, variance = 0.0, 1.0
    for t in (0, 0.25, 0.5, 0.75):  # x' = x + ((1 + t) v - x) / 4 + sqrt(2 (1 - t) / 4) noise
        mean, variance = 0.75 * mean + (1 + t) * 0.7 / 4, 0.75**2 * variance + (1 - t) / 2
    assert 0.2 < float(out.accepted.double().mean()) < 0.95
    assert stats.kstest(out.tokens.flatten().numpy(), stats.norm(mean, variance**0.5).cdf).pvalue > 1e-4


def test_unsupported_features_of_a_causal_target_are_refused():
    guided, prompt_batch = guide(model_of()), prompts(2)
    for rule, sentence in (
        (ContinuousRule(tokens_per_pass=(4, 5)), "leave it out"),
        (replace(PATH, verify="parallel"), "use verify=causal"),
        (replace(PATH, tries=2), "use tries=1"),
    ):
        with pytest.raises(UsageError, match=sentence):
            decode(guided, guided, rule, prompt_batch, rng(2))
    for words, sentence in (("tries=2", "use tries=1"), ("verify=parallel", "use verify=causal")):
        with pytest.raises(UsageError, match=sentence):
            check(configuration.compose(["model=nextstep_1_1", "weights=random", "method=cspd", *words.split()]))
    with pytest.raises(UsageError, match="criterion=path also needs a density of the last step"):
        check(configuration.compose(["model=nextstep_1_1", "weights=random", "method=cspd", "final_noise=false"]))
    with pytest.raises(UsageError, match="no parameter 'iterations'"):
        configuration.compose(["model=nextstep_1_1", "iterations=4"])
    with pytest.raises(UsageError, match="choose from: constant, linear"):
        NextStepTarget(guided.model, FlowSampler(4), 2.0, "rising")
    with pytest.raises(UsageError, match="in 2 steps or more"):
        FlowSampler(1)


# --- files ------------------------------------------------------------------------------------------------------------


def save(folder, draft=False):
    """The reduced model's files in their official layout."""
    made = rehearsal_files.of_model("nextstep_1_1", True)
    for part, build in made.items():
        build(folder / part)
    if draft:
        made["target"](folder / "draft")
    return folder


def load(folder, *words):
    return loaded("nextstep_1_1", f"weights={folder}", *TINY[1:], *words)[1]


def rewrite(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_official_files_are_read(tmp_path):
    bundle = load(save(tmp_path, draft=True))
    assert bundle.target.model.cfg == files.REDUCED
    tensors = {}
    for shard in sorted((tmp_path / "target").glob("*.safetensors")):
        tensors |= load_file(shard)
    assert len(list((tmp_path / "target").glob("*.safetensors"))) > 1
    weights = exported(bundle.target.model, files.table(files.REDUCED))
    assert weights.keys() == tensors.keys() - {"lm_head.weight"}
    assert all(torch.equal(weights[name], tensors[name].float()) for name in weights)
    assert {
        "layers.1.self_attn.k_proj.bias",
        "image_head.net.res_blocks.1.adaLN_modulation.1.weight",
    } < weights.keys()
    assert bundle.drafter_network().model.cfg == files.REDUCED
    prompt_batch = bundle.encode(["a red cat on the table", "two dogs"])
    out = decode(bundle.target, None, ContinuousRule(), prompt_batch, rng(2))
    pictures = bundle.pixels(out.tokens)
    assert pictures.shape == (2, 64, 64, 3)
    assert np.array_equal(bundle.pixels(out.tokens[1:]), pictures[1:])


def test_an_image_is_decoded_from_patches_in_raster_order(tmp_path):
    """A token holds 2 x 2 latents of each of 16 channels, channel first. The file's scale and shift are undone, and
    tokens are normalised if `use_norm` is on."""
    rewrite(save(tmp_path) / "tokenizer/config.json", scaling_factor=0.5, shift_factor=0.25)
    bundle = load(tmp_path)
    latent = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    tokens = torch.stack(
        [latent[0, :, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2].reshape(64) for r in range(4) for c in range(4)]
    )[None]
    seen = []
    bundle.tokenizer.decode_latent = lambda z: seen.append(z) or torch.zeros(1, 3, 64, 64)
    bundle.decode_image(tokens)
    torch.testing.assert_close(seen[0], latent / 0.5 + 0.25)
    normed = load(tmp_path, "use_norm=true")
    normed.tokenizer.decode_latent = bundle.tokenizer.decode_latent
    normed.decode_image(tokens)
    seen = seen[1].unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3)
    mean, spread = tokens.mean(-1), tokens.std(-1, correction=0)
    expected = (tokens - mean[..., None]) / spread[..., None] / 0.5 + 0.25
    torch.testing.assert_close(seen.flatten(1, 2), expected, rtol=1e-4, atol=1e-4)


def test_a_prompt_contains_the_area_its_grid_and_the_begin_of_the_image(tmp_path):
    folder = save(tmp_path)
    names = json.loads((folder / "target/tokenizer.json").read_text())["model"]["vocab"]
    area, boi, grid = names["<|image_area|>"], names["<|begin_of_image|>"], names["4*4"]

    def rows(bundle, prompt):
        prompt_batch = bundle.encode([prompt])
        sequences = (prompt_batch.ids[0][prompt_batch.valid[0]], prompt_batch.no_ids[0][prompt_batch.no_valid[0]])
        return [ids.tolist() for ids in sequences]

    text = [names["red"], names["cat"]]
    words = ('instruction="{prompt} cat"', "negative=blue")
    assert rows(load(folder, *words), "red") == [[*text, area, grid, boi], [names["blue"], area, grid, boi]]
    for begin in ("a", {"content": "a"}):
        (folder / "target/tokenizer_config.json").write_text(json.dumps({"bos_token": begin}))
        frame = [[names["a"], *text, area, grid, boi], [names["a"], names["blue"], area, grid, boi]]
        assert rows(load(folder, *words), "red") == frame
    (folder / "target/tokenizer_config.json").write_text(json.dumps({"bos_token": None}))
    assert rows(load(folder, *words), "")[0] == [names["cat"], area, grid, boi]
    with pytest.raises(UsageError, match="give prompt_length=5"):
        load(folder, "prompt_length=4", *words).encode(["red"])


def test_the_autoencoder_has_the_published_names():
    """The names to which the official script converts them for diffusers (stepfun-ai/NextStep-1,
    inference/gen_pipeline.py)."""
    names = image_tokenizers.taming_table(vq.NEXTSTEP)
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in vq.KLModel(vq.NEXTSTEP).state_dict().items()}
    shape_by_name = {official: tuple(shapes[part.name]) for official, part in names.items()}
    assert shape_by_name["encoder.conv_out.weight"] == (32, 512, 3, 3)
    assert shape_by_name["decoder.conv_in.weight"] == (512, 16, 3, 3)
    assert shape_by_name["decoder.mid.attn_1.proj_out.weight"] == (512, 512, 1, 1)
    # the last level, by resolution
    assert shape_by_name["decoder.up.0.block.0.nin_shortcut.weight"] == (128, 256, 1, 1)
    assert shape_by_name["decoder.up.3.upsample.conv.weight"] == (512, 512, 3, 3)
    assert shape_by_name["encoder.down.2.downsample.conv.weight"] == (512, 512, 3, 3)
    assert not any("quant_conv" in name or ".attn." in name for name in shape_by_name)
    assert vq.NEXTSTEP.downsample == 8


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda f: rewrite(f / "target/config.json", use_gen_pos_embed=True), "use_gen_pos_embed"),
        (lambda f: rewrite(f / "target/config.json", rope_theta=None), "does not describe a language model"),
        (lambda f: save_file({"lm_head.weight": torch.zeros(2)}, f / "target/model.safetensors"), "no image_head.net"),
        (lambda f: (f / "tokenizer/checkpoint.pt").unlink(), "must hold one .pt or .safetensors"),
        (lambda f: save_words(f / "target/tokenizer.json", ["<unk>", "red"], 1), "has no token"),
    ],
)
def test_wrong_files_are_reported(spoil, sentence, tmp_path):
    spoil(save(tmp_path))
    with pytest.raises(UsageError, match=sentence):
        load(tmp_path)


def test_the_published_sizes():
    """14.8 billion parameters, as many as Qwen2.5-14B has, and a head of 157 million (README of
    stepfun-ai/NextStep-1)."""
    with torch.device("meta"):
        model = NextStep(shape_of("nextstep_1_1", NextStepConfig))
    head = sum(p.numel() for p in model.image_head.parameters())
    assert round(head / 1e6) == 157
    text_head = model.tok_embeddings.weight.numel()
    whole = sum(p.numel() for p in model.parameters()) + text_head
    projectors = sum(p.numel() for m in (model.image_in_projector, model.image_out_projector) for p in m.parameters())
    assert whole - head - projectors == 14_770_033_664  # Qwen/Qwen2.5-14B
