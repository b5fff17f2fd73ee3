"""MAR: official numbers and files, independence of the batch, guidance and mask schedules, and training."""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import pytest
import torch
from reference import manifest, needs_reference
from safetensors.torch import save_file
from test_real import TINY, loaded

from specbench.config import configuration
from specbench.decoding import continuous
from specbench.decoding.continuous.rule import tokens_per_iteration
from specbench.decoding.continuous.trajectory import draw_trajectory, own_log_density
from specbench.decoding.rng import RandomStreams
from specbench.engine.graph import Eager
from specbench.errors import UsageError
from specbench.models import denoiser, diffusion, mar_sampling, vq
from specbench.models.loading import image_tokenizers, mar_official, official
from specbench.models.loading.bundle import shape_of
from specbench.models.mar import MAR, MARConfig
from specbench.models.mar_sampling import Guided
from specbench.models.pixels import to_uint8
from tools.scenes import mar_loss
from tools.scenes.mar import loss_of

SMALL = MARConfig(
    48, 2, 3, 40, 1, 2, 2.0, length=16, token_dim=5, classes=4, buffer=3, head_depth=2, head_width=24, steps=6
)


def model_of(cfg=SMALL, seed=0):
    """A MAR in which every weight affects the output."""
    model, rng = MAR(cfg).eval().requires_grad_(False), torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.dim() == 1 and name.endswith("weight"):
            p.uniform_(0.5, 1.5, generator=rng)
        else:
            p.normal_(0, 0.3 if p.dim() == 1 else p[0].numel() ** -0.5, generator=rng)
    return model


def images(count, cfg=SMALL, seed=1):
    """Tokens, which of them are known (a different share for each image), and classes; the last class means no
    class."""
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randn(count, cfg.length, cfg.token_dim, generator=rng)
    known = torch.rand(count, cfg.length, generator=rng) < torch.linspace(0, 1, count)[:, None]
    return tokens, known, torch.arange(count) % (cfg.classes + 1)


def states(count, cfg=SMALL, seed=2):
    """The arguments of `moments`."""
    rng = torch.Generator().manual_seed(seed)
    x, z, free = (torch.randn(count, n, generator=rng) for n in (cfg.token_dim, cfg.decoder_dim, cfg.decoder_dim))
    index = torch.randint(0, cfg.steps, (count,), generator=rng)
    return x, index, z, free, 4 * torch.rand(count, generator=rng)


def bundle_of(model, *words):
    return loaded(model, *words)[1]


@needs_reference
def test_the_published_sizes_have_the_published_tensors():
    for model, size in (("mar_b", "mar_base"), ("mar_l", "mar_large"), ("mar_h", "mar_huge")):
        facts, source = manifest(f"{size}_checkpoint-last.pth")
        c, cfg = facts["config"], shape_of(model, MARConfig.even)
        assert (cfg.encoder_heads, cfg.decoder_heads) == (c["encoder_num_heads"], c["decoder_num_heads"])
        assert (cfg.steps, cfg.norm_eps) == (c["num_sampling_steps"], c["layernorm_eps"])
        assert mar_official.HEADS[cfg.encoder_dim] == cfg.encoder_heads
        with torch.device("meta"):
            built = MAR(cfg)
        official.check(built, source, mar_official.table(cfg))
        assert sum(p.numel() for p in built.parameters()) == facts["n_values"]
        default = configuration.compose([f"model={model}"])
        assert (default.get("cfg_scale"), default.get("cfg_schedule")) == (c["cfg_default"], c["cfg_schedule"])


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others():
    model, (tokens, known, labels) = model_of(), images(17)
    whole = model.conditions(tokens, known, labels)
    x, index, z, free, scale = states(200)
    moments = model.moments(x, index, z, free, scale)
    plain = model.moments(x, index, z)
    for count in (1, 2, 5, 17):
        for start in {0, 17 - count, (17 - count) // 2}:
            rows = slice(start, start + count)
            assert torch.equal(model.conditions(tokens[rows], known[rows], labels[rows]), whole[rows])
        for rows in (slice(0, count), slice(100, 100 + count)):
            part = model.moments(x[rows], index[rows], z[rows], free[rows], scale[rows])
            assert all(torch.equal(a, b[rows]) for a, b in zip(part, moments, strict=True))
            part = model.moments(x[rows], index[rows], z[rows])
            assert all(torch.equal(a, b[rows]) for a, b in zip(part, plain, strict=True))


@torch.inference_mode()
def test_a_sampler_gives_the_moments_whatever_it_caches(monkeypatch):
    """For one step at a time, a few, and all."""
    model = model_of()
    x, _, z, free, scale = states(20)
    for at_once in (1, 3000, 1 << 24):
        monkeypatch.setattr(denoiser, "_AT_ONCE", at_once)
        for args in ((z, free, scale), (z,)):
            step = model.sampler(*args)
            for t in reversed(range(model.cfg.steps)):
                expected = model.moments(x, torch.full((len(x),), t), *args)
                assert all(torch.equal(a, b) for a, b in zip(step(x, t), expected, strict=True))


@torch.inference_mode()
def test_unknown_tokens_are_never_seen():
    model, (tokens, known, labels) = model_of(), images(6)
    z = model.conditions(tokens, known, labels)
    for other in (torch.nan, 1e30):
        assert torch.equal(model.conditions(tokens.masked_fill(~known[..., None], other), known, labels), z)
    changed = model.conditions(tokens + known[..., None], known, labels)
    differs = (changed != z).flatten(1).any(1)
    assert differs.tolist() == known.any(1).tolist()


def test_leaving_unknown_tokens_out_equals_masking_them():
    model, (tokens, known, labels) = model_of(), images(6)
    with torch.inference_mode():
        masked = model.conditions(tokens, known, labels)
        encoded, order, seen = model.encode(tokens[2:4], known[2:4], labels[2:4], int(known[2:4].sum(1).max()))
        assert encoded.shape[1] < SMALL.buffer + SMALL.length
        torch.testing.assert_close(model.decode(encoded, order, seen), masked[2:4], atol=1e-5, rtol=1e-5)
        nothing = model.decode(*model.encode(tokens[:1], known[:1], labels[:1], 0))
        torch.testing.assert_close(nothing, masked[:1], atol=1e-5, rtol=1e-5)
    # With gradients the CPU drops tokens, too, and attention is written out in plain operations.
    torch.testing.assert_close(model.conditions(tokens, known, labels), masked, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.conditions(tokens, known, labels, 16), masked, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_classes_and_their_absence_are_reported_apart():
    model, (tokens, known, _) = model_of(), images(1)
    z = [model.conditions(tokens, known, torch.tensor([c])) for c in range(SMALL.classes + 1)]
    assert not any(torch.allclose(a, b) for i, a in enumerate(z) for b in z[:i])
    model.fake_latent.copy_(model.class_emb.weight[2:3])
    assert torch.equal(model.conditions(tokens, known, torch.tensor([SMALL.classes])), z[2])


@torch.inference_mode()
def test_guidance_mixes_only_the_noise():
    model = model_of()
    x, index, z, free, _ = states(20)
    ones = torch.ones(20)
    mean, log_variance = model.moments(x, index, z)
    for scale, expected in ((ones, mean), (0 * ones, model.moments(x, index, free)[0])):
        guided, variance = model.moments(x, index, z, free, scale)
        torch.testing.assert_close(guided, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(variance, log_variance)
    far = model.moments(x, index, z, free, 3 * ones)[0]
    torch.testing.assert_close(far - mean, 2 * (mean - model.moments(x, index, free)[0]), atol=1e-3, rtol=1e-3)


def test_guidance_grows_with_the_known_tokens_or_stays():
    num_known = torch.tensor([[1, 64], [255, 256], [300, 128]])
    assert mar_sampling.guidance(2.9, "constant", num_known, 256).eq(torch.tensor(2.9)).all()
    linear = mar_sampling.guidance(2.9, "linear", num_known, 256)
    expected = [[1 + 1.9 / 256, 1.475], [1 + 1.9 * 255 / 256] * 2, [1 + 1.9 * 255 / 256, 1.95]]
    torch.testing.assert_close(linear, torch.tensor(expected))
    assert mar_sampling.guidance(1.0, "linear", num_known, 256).eq(1).all()
    with pytest.raises(UsageError, match="'cosine'"):
        mar_sampling.guidance(2.0, "cosine", num_known, 256)


def test_iterations_share_out_every_token():
    assert tokens_per_iteration(256, 256) == [1] * 256
    for length, iterations in ((16, 4), (16, 1), (256, 64), (64, 63), (100, 7)):
        counts = tokens_per_iteration(length, iterations)
        assert (len(counts), sum(counts)) == (iterations, length)
        assert min(counts) >= 1
    assert tokens_per_iteration(256, 8)[0] < tokens_per_iteration(256, 8)[-1]
    for wrong in (0, 17):
        with pytest.raises(UsageError, match="1.*16"):
            tokens_per_iteration(16, wrong)


@torch.inference_mode()
def test_a_session_returns_the_outputs_of_the_networks():
    model, (tokens, known, labels) = model_of(), images(3)
    row, place = torch.tensor([2, 0, 0, 1]), torch.tensor([[1, 15], [3, 3], [0, 7], [9, 2]])
    num_known = torch.tensor([[2, 5], [0, 0], [14, 15], [7, 7]])
    session = Guided(model, 3.0, "linear").open(labels, 3)
    z = session.condition(tokens[row], known[row], row, place, num_known, 16)
    for r, (image, places, before) in enumerate(zip(row, place, num_known, strict=True)):
        image_args = tokens[image][None], known[image][None]
        cond, none = (model.conditions(*image_args, c)[0, places] for c in (labels[image][None], torch.tensor([4])))
        strength = mar_sampling.guidance(3.0, "linear", before + 1, 16)[:, None]
        assert torch.equal(z[r], torch.cat([cond, none, strength], 1))
    x, index = torch.randn(8, 5), torch.arange(8) % SMALL.steps
    flat = z.flatten(0, 1)
    expected = model.moments(x, index, flat[:, :40], flat[:, 40:80], flat[:, 80])
    assert all(map(torch.equal, session.moments(x, index, flat), expected))
    free = Guided(model, 1.0, "linear").open(labels, 3)
    z = free.condition(tokens[row], known[row], row, place, num_known, 16)
    assert z.shape == (4, 2, 40)
    assert all(map(torch.equal, free.moments(x, index, z.flatten(0, 1)), model.moments(x, index, z.flatten(0, 1))))
    with pytest.raises(ValueError, match="3.*2"):
        Guided(model).open(labels, 2)


@torch.inference_mode()
def test_extreme_guidance_and_temperature_stay_finite():
    cfg = replace(SMALL, steps=100, token_dim=16)
    for seed, temperature in enumerate((0.5, 1.2, 0.5, 1.2)):
        model, (tokens, known, labels) = model_of(cfg, seed), images(4, cfg)
        session = Guided(model, 10.0, "constant").open(labels, 4)
        places = torch.arange(16).expand(4, -1)
        z = session.condition(tokens, known, torch.arange(4), places, torch.zeros_like(places), 16).flatten(0, 1)
        noise = torch.randn(64, 101, 16, generator=torch.Generator().manual_seed(seed))
        path = draw_trajectory(session, z, noise, continuous.ContinuousRule(temperature=temperature), Eager())
        density = own_log_density(path, continuous.ContinuousRule())
        for values in (path.states, path.mean, path.log_variance, density):
            assert values.isfinite().all()
        assert path.token.std() > 0.1  # the chain did run


@torch.inference_mode()
def test_a_limit_bounds_the_estimate_of_a_token():
    cfg = replace(SMALL, steps=100)
    free, limited = model_of(cfg), model_of(replace(cfg, limit=0.5))
    x, _, z, none, scale = states(300)
    first, last = torch.full((300,), 99), torch.zeros(300, dtype=torch.int64)
    s = diffusion.schedule(100, "cpu")
    for index in (first, last):
        mean, log_variance = limited.moments(x, index, z, none, scale)
        x0 = (mean - s.posterior_mean_coef2[index, None] * x) / s.posterior_mean_coef1[index, None]
        loose, other = free.moments(x, index, z, none, scale)
        assert torch.equal(log_variance, other)
        assert x0.abs().max() < 0.501
        inside = x0.abs() < 0.499
        torch.testing.assert_close(mean[inside], loose[inside], atol=1e-4, rtol=1e-4)
    assert inside.any()
    assert not inside.all()
    assert not limited.moments(x + torch.nan, last, z)[0].isfinite().any()  # an error is not hidden


@torch.inference_mode()
def test_the_arithmetic_of_a_step_is_float32_whatever_the_weights_are():
    args, (tokens, known, labels) = states(50), images(3)
    wanted, index = model_of().moments(*args), args[1]
    for dtype in (torch.bfloat16, torch.float16):
        model = model_of().to(dtype)
        assert model.conditions(tokens, known, labels).dtype == dtype
        for actual, expected in zip(model.moments(*args), wanted, strict=True):
            assert actual.dtype == torch.float32
            torch.testing.assert_close(actual[index < 5], expected[index < 5], atol=0.1, rtol=0.05)
    assert diffusion.schedule(6, "cpu").sqrt_recip_alphas_cumprod.dtype == torch.float32


def test_a_perfect_network_brings_every_state_back():
    s, x0 = diffusion.schedule(25), torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for t in range(24, -1, -1):
        index = torch.full((7,), t)
        eps = (x - s.sqrt_alphas_cumprod[t] * x0) / s.sqrt_one_minus_alphas_cumprod[t]
        torch.testing.assert_close(s.noised(x0, eps, index), x)
        torch.testing.assert_close(s.x0(x, eps, index), x0)
        x = s.mean(x, s.x0(x, eps, index), index)
    torch.testing.assert_close(x, x0)


def test_a_respaced_chain_has_the_marginals_of_the_complete_one():
    """The variance of x at each kept step, computed with the kept betas, equals the one of the trained schedule."""
    whole = diffusion.schedule(1000)
    for steps in (2, 10, 77):
        s = diffusion.schedule(steps)
        assert s.timestep[[0, -1]].tolist() == [0, 999]
        torch.testing.assert_close(s.alphas_cumprod, whole.alphas_cumprod[s.timestep])
        torch.testing.assert_close((1 - s.betas).cumprod(0), s.alphas_cumprod)
    for wrong in (1, 1001):
        with pytest.raises(UsageError, match="2 to 1000 steps"):
            diffusion.schedule(wrong)


def test_the_bound_is_least_at_the_true_variance_and_leaves_the_mean_alone():
    s, rng = diffusion.schedule(1000), torch.Generator().manual_seed(0)
    x0, noise = (torch.randn(4, 3, dtype=torch.float64, generator=rng) for _ in range(2))
    index = torch.tensor([1, 30, 500, 999])
    x = s.noised(x0, noise, index)
    true = torch.full_like(x0, -1.0)  # the variance of the posterior
    assert mar_loss.bound(s, x0, x, noise, true, index).abs().max() < 1e-9
    for v in (true - 0.1, true + 0.1):
        assert (mar_loss.bound(s, x0, x, noise, v, index) > 0).all()
    eps = (noise + 0.1).requires_grad_()
    place = torch.zeros_like(x0, requires_grad=True)
    mar_loss.bound(s, x0, x, eps, place, index).sum().backward()
    assert eps.grad is None
    assert (place.grad != 0).all()
    # At the last step: bits of a bin of 2 / 255, under a normal distribution with the chosen variance around the
    # estimate.
    last = torch.zeros(4, dtype=torch.int64)
    x = s.noised(x0, noise, last)
    off = noise + torch.tensor([0.0, 0.5, -1.0])
    normal = torch.distributions.Normal(s.x0(x, off, last), (0.5 * s.log_betas[0]).exp())
    bits = -(normal.cdf(x0 + 1 / 255) - normal.cdf(x0 - 1 / 255)).log2().mean(1)
    torch.testing.assert_close(mar_loss.bound(s, x0, x, off, torch.ones_like(x0), last), bits)


def test_training_masks_have_one_share_and_random_positions():
    rng = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(400):
        drawn = mar_loss.masks(3, 1000, rng)
        count = drawn.sum(1)
        assert (count == count[0]).all()
        shares.append(int(count[0]) / 1000)
    assert 0.7 <= min(shares) < 0.71
    assert 0.99 < max(shares) <= 1
    normal = torch.distributions.Normal(0.0, 1.0)  # of the share's distance from 1, in units of 0.25, cut at 1.2
    low = normal.cdf(torch.tensor(-1.2))
    peak = [float(normal.log_prob(torch.tensor(x)).exp()) for x in (-1.2, 0.0)]
    mean = 1 + 0.25 * (peak[0] - peak[1]) / float(0.5 - low)
    assert np.mean(shares) == pytest.approx(mean, abs=0.015)  # three standard errors
    often = torch.stack([mar_loss.masks(1, 8, rng)[0] for _ in range(300)]).float().mean(0)
    assert (often - often.mean()).abs().max() < 0.1


def test_a_toy_of_two_classes_is_learnt():
    """Two classes; each token is near its class's value. The loss falls, every weight takes part, and samples are near
    their class's value."""
    torch.manual_seed(0)
    small = {"length": 4, "token_dim": 2, "classes": 2, "encoder_depth": 1, "head_width": 48}
    cfg = replace(SMALL, **small, steps=20, mlp_ratio=1.0, limit=2.0)
    model, rng = MAR(cfg), torch.Generator().manual_seed(0)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for _ in range(250):
        labels = torch.randint(0, 2, (32,), generator=rng)
        centre = (2 * labels - 1)[:, None, None] * torch.tensor([0.8, -0.5])
        latents = centre + 0.05 * torch.randn(32, 4, 2, generator=rng)
        loss = loss_of(model, latents, labels, mar_loss.masks(32, 4, rng), rng, dropout=0.1)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-20:]) < 0.5 * np.mean(losses[:5])
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    assert not any(torch.equal(p, start[n]) for n, p in model.named_parameters())
    labels = torch.arange(40) % 2
    rule = continuous.ContinuousRule(final_noise=False)
    out = continuous.decode(Guided(model.eval()), None, rule, labels, RandomStreams([(1, i) for i in range(40)]))
    centre = (2 * labels - 1)[:, None, None] * torch.tensor([0.8, -0.5])
    assert (out.tokens - centre).abs().mean() < 0.12  # 0.04 of it is the spread of the data
    assert ((out.tokens - centre).norm(dim=-1) < (out.tokens + centre).norm(dim=-1)).float().mean() > 0.98


def checkpoint(path, model, extra=None):
    """A file as MAR's trainer saves it: the weights, their average as parameters with gradients, and the rest of the
    trainer's state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {n: torch.nn.Parameter(t.clone()) for n, t in model.state_dict().items()}
    last = {n: t.detach() + 1 for n, t in tensors.items()}
    optimiser = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1e-4}]}
    args = argparse.Namespace(model="mar_base", lr=None, batch_size=64)
    content = {"model": last, "model_ema": tensors | (extra or {}), "optimizer": optimiser, "epoch": 799}
    torch.save(content | {"scaler": {"scale": 65536.0}, "args": args}, path)


def pixels_file(folder, model):
    tensors = official.exported(model, image_tokenizers.taming_table(model.cfg))
    folder.mkdir(exist_ok=True)
    content = {"model": tensors | {"loss.discriminator.main.0.weight": torch.zeros(2)}, "args": argparse.Namespace()}
    torch.save(content, folder / "kl16.ckpt")


def files(folder, bundle, drafter=None):
    checkpoint(folder / "target" / "checkpoint-last.pth", bundle.target.model)
    pixels_file(folder / "tokenizer", bundle.tokenizer)
    if drafter is not None:
        checkpoint(folder / "draft" / "checkpoint-last.pth", drafter.model)


def test_official_files_are_read(tmp_path):
    first = bundle_of("mar_l", *TINY)
    drafter = first.drafter_network("cspd")
    files(tmp_path, first, drafter)
    again = bundle_of("mar_l", f"weights={tmp_path}", "reduced=true", "dtype=float32", "diffusion_steps=7")
    pairs = [(again.target.model, first.target.model), (again.tokenizer, first.tokenizer)]
    for read, original in [*pairs, (again.drafter_network("cspd").model, drafter.model)]:
        torch.testing.assert_close(dict(read.state_dict()), dict(original.state_dict()), rtol=0, atol=0)
    assert again.target.steps == again.drafter_network("cspd").steps == 7
    assert again.target.model.cfg == replace(first.target.model.cfg, steps=7)
    assert (again.target.scale, again.target.kind) == (3.0, "linear")
    for path in ("draft", "draft/checkpoint-last.pth"):  # a named drafter, for a target with random weights
        named = bundle_of("mar_l", *TINY, f"drafter.weights={tmp_path / path}").drafter_network("cspd").model
        torch.testing.assert_close(dict(named.state_dict()), dict(drafter.model.state_dict()), rtol=0, atol=0)
    tokens = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))
    assert np.array_equal(again.pixels(tokens), first.pixels(tokens))
    # only one set of tensors, as safetensors
    for part, old in (("target", "checkpoint-last.pth"), ("tokenizer", "kl16.ckpt")):
        tensors = torch.load(tmp_path / part / old, weights_only=False)["model_ema" if part == "target" else "model"]
        save_file(tensors, tmp_path / part / "model.safetensors")
        (tmp_path / part / old).unlink()
    bare = bundle_of("mar_l", f"weights={tmp_path}", "reduced=true", "dtype=float32")
    assert np.array_equal(bare.pixels(tokens), first.pixels(tokens))
    assert torch.equal(bare.target.model.z_proj.weight, first.target.model.z_proj.weight)


def test_files_of_another_model_are_reported(tmp_path):
    large, base = bundle_of("mar_l", *TINY), bundle_of("mar_b", *TINY)
    files(tmp_path, base)
    draft, cfg = tmp_path / "draft" / "x.pth", base.target.model.cfg

    def refused(sentence, model="mar_b"):
        with pytest.raises(UsageError, match=sentence):
            bundle_of(model, f"weights={tmp_path}", "reduced=true", "dtype=float32").drafter_network("cspd")

    refused(r"mar_l.*encoder_depth=1 \(not 2\), decoder_depth=1 \(not 2\), head_depth=1 \(not 2\)", "mar_l")
    refused(r"run `specbench fetch model=mar_b|no weights for draft/|has no draft/")
    checkpoint(draft, MAR(replace(large.target.model.cfg, classes=7)))
    refused("draft has other tokens or classes than the target")
    checkpoint(draft, base.target.model, {"surplus": torch.ones(1)})
    refused("tensor 'surplus' belongs to no part")
    torch.save({"model_ema": {"w": torch.ones(2)}}, draft)
    refused("MAR file")
    checkpoint(draft, MAR(replace(cfg, encoder_dim=96)))
    refused("has no known number of heads for width 96")
    pixels_file(tmp_path / "tokenizer", vq.KLModel(replace(vq.KL16.reduced(0), codebook_embed_dim=4)))
    refused("latents of 4 numbers, the target draws 16")


def test_the_bundle():
    bundle = bundle_of("mar_h", *TINY)
    assert (bundle.resolution, bundle.target.length) == (64, 16)
    labels = bundle.encode(["0", " 999 "])
    assert (labels.tolist(), labels.dtype) == ([0, 999], torch.int64)
    for wrong in ("1000", "a cat", "-1", ""):
        with pytest.raises(UsageError, match="mar_h.*0.*999"):
            bundle.encode([wrong])
    tokens = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(0))
    pictures = bundle.pixels(tokens)
    assert (pictures.shape, pictures.dtype) == ((3, 64, 64, 3), np.uint8)
    assert np.array_equal(bundle.pixels(tokens[2:]), pictures[2:])
    latent = tokens[:1].transpose(1, 2).reshape(1, 16, 4, 4) / 0.2325
    with torch.inference_mode():
        image = bundle.tokenizer.decode_latent(latent)
    assert np.array_equal(pictures[:1], to_uint8(image))
    full = {name: shape_of(name, MARConfig.even) for name in ("mar_b", "mar_l", "mar_h")}
    assert {name: (c.side, vq.KL16.downsample * c.side) for name, c in full.items()} == dict.fromkeys(full, (16, 256))


def test_patches_are_read_row_by_row():
    latent = torch.arange(2 * 3 * 4 * 4.0).view(2, 3, 4, 4)
    for patch in (1, 2):
        tokens = mar_sampling.patchify(latent, patch)
        assert tokens.shape == (2, 16 // patch**2, 3 * patch**2)
        assert torch.equal(mar_sampling.unpatchify(tokens, patch), latent)
    assert torch.equal(mar_sampling.patchify(latent)[1, 6], latent[1, :, 1, 2])
    assert torch.equal(mar_sampling.patchify(latent, 2)[0, 1], latent[0, :, :2, 2:].flatten())
