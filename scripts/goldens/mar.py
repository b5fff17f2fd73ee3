"""MAR: encoder and decoder, the diffusion head with and without guidance, whole trajectories; its schedules."""

from __future__ import annotations

import torch
from torch import Tensor

from goldens.common import Compared, Config, Tensors, fixed, load, weights
from specbench.decoding.continuous import ContinuousRule
from specbench.decoding.continuous.rule import tokens_per_iteration
from specbench.decoding.continuous.trajectory import draw_trajectory
from specbench.engine.graph import Eager
from specbench.models import diffusion, mar_sampling
from specbench.models.denoiser import waves
from specbench.models.loading import mar_official
from specbench.models.mar import MAR, MARConfig
from specbench.models.mar_sampling import Guided

#: The x0 estimate at the highest index multiplies the rounding of eps by 2e4; the golden's notes allow this much more
#: there than the one tolerance of the file.
LOOSER = {"p_pred_xstart": 50.0}


def config(c: Config) -> MARConfig:
    """The configuration from the official names of hyper-parameters."""
    parts = {f"{part}_{ours}": c[f"{part}_{official}"] for part in ("encoder", "decoder") for ours, official in _SAME}
    return MARConfig(
        **parts,
        mlp_ratio=c["mlp_ratio"],
        length=c["seq_len"],
        token_dim=c["token_embed_dim"],
        classes=c["class_num"],
        buffer=c["buffer_size"],
        head_depth=c["diffloss_d"],
        head_width=c["diffloss_w"],
        steps=int(c["num_sampling_steps"]),
        norm_eps=c["layernorm_eps"],
    )


_SAME = (("dim", "embed_dim"), ("depth", "depth"), ("heads", "num_heads"))


def chain(model: MAR, z: Tensor, init: Tensor, noise: Tensor, scale: Tensor | None, temperature: float) -> Tensor:
    """Tokens (n, D) that the decode loop draws with a golden's noises: z as official, the unconditional rows after the
    others if there is a scale (1,); init (n, D); noise (T, n, D), the highest step first."""
    guided = Guided(model) if scale is None else Guided(model, float(scale))
    if scale is not None:
        z = torch.cat([*z.chunk(2), scale.expand(len(init), 1)], -1)
    order = torch.cat([noise.flip(0), init[None]]).transpose(0, 1)
    rule = ContinuousRule(temperature=temperature, final_noise=False)
    return draw_trajectory(guided.open(torch.zeros(1), 1), z, order, rule, Eager()).token


def check(t: Tensors, c: Config) -> Compared:
    cfg = config(c)
    model = load(lambda: MAR(cfg), weights(t), mar_official.table(cfg))
    yield "patchified", mar_sampling.patchify(t["in/image_latent"], c["patch_size"])
    yield "unpatchified", mar_sampling.unpatchify(t["in/tokens"], c["patch_size"])
    yield from networks(model, t, c)
    yield from head(model, t, c)
    yield from sampling(model, t, c)


def networks(model: MAR, t: Tensors, c: Config) -> Compared:
    tokens, known, labels = t["in/tokens"], ~t["in/mask"].bool(), t["in/labels"]
    none = torch.full_like(labels, c["class_num"])
    for name, classes in (("cond", labels), ("uncond", none)):
        encoded, order, seen = model.encode(tokens, known, classes, int(known.sum(1).max()))
        yield f"encoder_{name}", encoded
        yield f"z_{name} of known tokens", model.decode(encoded, order, seen), t[f"out/z_{name}"]
        yield f"z_{name}", model.conditions(tokens, known, classes)
    yield "z_all_masked", model.conditions(tokens, torch.zeros_like(known), labels)


def head(model: MAR, t: Tensors, c: Config) -> Compared:
    net, x, z = model.diffloss.net, t["in/x_t"], t["in/z_c"]
    half, steps = len(x) // 2, diffusion.schedule(model.cfg.steps, "cpu")
    scale = torch.full((half,), c["cfg"])
    for name in t:
        at = name.rpartition("_")[2]
        number = int(at[1:]) if at[1:].isdecimal() else 0
        if name.startswith("out/denoiser_cfg_t"):
            # The golden holds both halves of the batch: the noise is one, the variance each half's own.
            step = torch.full((half,), number)
            eps, v = model.predict(x[:half], step, z[:half], z[half:], scale)
            yield name[4:], torch.cat([eps, v], 1), t[name][:half]
            yield f"{name[4:]}, eps", eps, t[name][half:, : model.cfg.token_dim]
            other = net(x[:half], waves(step), z[half:])[:, model.cfg.token_dim :]
            yield f"{name[4:]}, free variance", other, t[name][half:, model.cfg.token_dim :]
        elif name.startswith("out/denoiser_t"):
            yield name[4:], net(x, waves(torch.full((len(x),), number)), z), t[name]
        elif name.startswith("out/time_embedding_t"):
            yield name[4:], net.time_embed(waves(torch.tensor([number]))), t[name]
        elif name.startswith("out/p_mean_i"):
            index = torch.full((len(x),), number)
            mean, log_variance = model.moments(x, index, z)
            eps, _ = model.predict(x, steps.timestep[index], z)
            by = LOOSER["p_pred_xstart"] if number == len(steps) - 1 else 1.0
            yield f"p_mean_{at}", mean, t[name]
            yield f"p_log_variance_{at}", log_variance
            yield f"p_pred_xstart_{at}", steps.x0(x, eps, index) / by, t[f"out/p_pred_xstart_{at}"] / by
    noises = (t["out/chain_nocfg_init"], t["out/chain_nocfg_noise"])
    yield "chain_nocfg", chain(model, z, *noises, None, c["temperature"])
    noises = (t["out/chain_cfg_init"], t["out/chain_cfg_noise"])
    yield "chain_cfg", chain(model, z, *noises, torch.tensor([c["cfg"]]), c["temperature"])


def sampling(model: MAR, t: Tensors, c: Config) -> Compared:
    """The trajectory from our own tokens: each iteration reads the tokens that earlier iterations sampled."""
    labels, orders = t["in/labels"], t["in/orders"]
    rows, length = orders.shape
    tokens = torch.zeros(rows, length, model.cfg.token_dim)
    masked_after = length
    for i, count in enumerate(tokens_per_iteration(length, c["num_iter"])):
        rank = orders.argsort(1)  # the first of an order stay masked longest
        masked, masked_after = rank < masked_after, masked_after - count
        new = masked & (rank >= masked_after)
        yield f"iter{i}_mask", masked.float(), t[f"out/iter{i}_mask"].float()
        yield f"iter{i}_tokens", tokens
        scale = mar_sampling.guidance(c["cfg"], c["cfg_schedule"], torch.tensor([length - masked_after]), length)
        yield f"iter{i}_cfg", scale
        z = model.conditions(tokens, ~masked, labels)[new]
        if c["cfg"] != 1:
            z = torch.cat([z, model.conditions(tokens, ~masked, torch.full_like(labels, c["class_num"]))[new]])
        yield f"iter{i}_z", z
        noises = t[f"out/iter{i}_init_noise"], t[f"out/iter{i}_step_noise"]
        drawn = chain(model, z, *noises, scale if c["cfg"] != 1 else None, c["temperature"])
        yield f"iter{i}_latents", drawn
        tokens[new] = drawn
    yield "sampled_latent", mar_sampling.unpatchify(tokens, c["patch_size"])


def schedules(t: Tensors, c: Config) -> Compared:
    fixed(c, noise_schedule="cosine", diffusion_steps=1000, max_beta=0.999, offset=0.008, learn_sigma=True)
    for name in t:
        parts = name.split("/")
        if parts[1].startswith("tokens_per_iter_"):
            counts = tokens_per_iteration(int(t[name].sum()), int(parts[1].rpartition("_")[2]))
            yield parts[1], torch.tensor(counts), t[name]
        else:
            steps = diffusion.schedule(int(parts[1].removeprefix("full")))
            ours = getattr(steps, "timestep" if parts[2] == "timestep_map" else parts[2])
            yield "/".join(parts[1:]), ours, t[name]


CHECKS = {"mar": check, "mar_diffusion_schedule": schedules}
