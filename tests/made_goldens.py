"""Goldens of other sizes than the shared ones, in their format: computed here with plain matrix products, without
modules of the package, and with argmax instead of draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Config = dict[str, Any]


def write(folder: Path, name: str, c: Config, t: Tensors) -> Path:
    """Writes a golden and returns the path of its .json."""
    save_file({key: x.contiguous().clone() for key, x in t.items()}, folder / f"{name}.safetensors")
    content = {"name": name, "config": c, "suggested_atol": 1e-4, "suggested_rtol": 1e-4}
    (folder / f"{name}.json").write_text(json.dumps(content))
    return folder / f"{name}.json"


def sizes(**more: Any) -> Config:
    """Three layers, four heads in pairs that share keys, and an odd vocabulary."""
    c = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
    c |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-4, "rope_theta": 300.0}
    return c | more


def normed(rows: int) -> Config:
    """Norms of queries and keys, as Chameleon has them."""
    return {"qk_norm_eps": 1e-5, "model_parallel_size": rows}


def parameters(c: Config, biased: bool = False, seed: int = 0) -> Tensors:
    """A random language model, by its official names."""
    g = torch.Generator().manual_seed(seed)
    dim, wide, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    heads, kv, vocab = c["num_attention_heads"], c["num_key_value_heads"], c["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, dim), "model.norm.weight": (dim,)}
    if not c.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, dim)
    for n in range(c["num_hidden_layers"]):
        layer = f"model.layers.{n}."
        for name, count in (("q", heads), ("k", kv), ("v", kv)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (count * head, dim)
            if biased:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (count * head,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (dim, heads * head)
        shapes |= {f"{layer}mlp.{name}_proj.weight": (wide, dim) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (dim, wide)
        shapes |= {f"{layer}{name}_layernorm.weight": (dim,) for name in ("input", "post_attention")}
        if "qk_norm_eps" in c:
            rows = c.get("model_parallel_size", heads)
            for name, count in (("q", rows), ("k", min(rows, kv))):
                shapes |= {f"{layer}self_attn.{name}_norm.{kind}": (count, head) for kind in ("weight", "bias")}
    return {
        name: torch.randn(shape, generator=g) * 0.4 + (1 if "norm.weight" in name else 0)
        for name, shape in shapes.items()
    }


def rotated(x: Tensor, base: float) -> Tensor:
    """x (n, heads, dim), its halves as pairs, by the positions 0 .. n - 1."""
    n, _, dim = x.shape
    angle = torch.arange(n)[:, None] / base ** (torch.arange(0, dim, 2) / dim)
    cos, sin = (torch.cat([f(angle), f(angle)], -1)[:, None] for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1) * sin


def states(w: Tensors, c: Config, ids: Tensor) -> list[Tensor]:
    """The embeddings of a whole sequence of ids (n,), then every layer's output (n, dim), the last one normed."""
    x, n, dim = w["model.embed_tokens.weight"][ids], len(ids), c["head_dim"]
    each = c["num_attention_heads"] // c["num_key_value_heads"]
    layers = [x]

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + c["rms_norm_eps"]).rsqrt() * w[f"{name}.weight"]

    def head_norm(x: Tensor, name: str) -> Tensor:
        weight, bias = (w[f"{name}.{kind}"] for kind in ("weight", "bias"))
        spread = x.shape[1] // len(weight)
        weight, bias = weight.repeat_interleave(spread, 0), bias.repeat_interleave(spread, 0)
        return F.layer_norm(x, (dim,), eps=c["qk_norm_eps"]) * weight + bias

    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."

        def attention(x: Tensor, layer: str = layer) -> Tensor:
            q, k, v = (
                F.linear(x, w[f"{layer}self_attn.{y}_proj.weight"], w.get(f"{layer}self_attn.{y}_proj.bias"))
                for y in "qkv"
            )
            q, k, v = (y.view(n, -1, dim) for y in (q, k, v))
            if "qk_norm_eps" in c:
                q, k = head_norm(q, f"{layer}self_attn.q_norm"), head_norm(k, f"{layer}self_attn.k_norm")
            q, k = rotated(q, c["rope_theta"]), rotated(k, c["rope_theta"])
            out = []
            for head in range(q.shape[1]):
                scores = q[:, head] @ k[:, head // each].T / dim**0.5
                later = torch.ones(n, n, dtype=torch.bool).triu(1)
                out.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v[:, head // each])
            return torch.cat(out, -1) @ w[f"{layer}self_attn.o_proj.weight"].T

        def mlp(x: Tensor, layer: str = layer) -> Tensor:
            gate, up = (x @ w[f"{layer}mlp.{y}_proj.weight"].T for y in ("gate", "up"))
            return (F.silu(gate) * up) @ w[f"{layer}mlp.down_proj.weight"].T

        for part, name in ((attention, "input_layernorm"), (mlp, "post_attention_layernorm")):
            swin = c.get("swin_norm", False)
            x = x + (norm(part(x), layer + name) if swin else part(norm(x, layer + name)))
        layers.append(x)
    return [*layers[:-1], norm(layers[-1], "model.norm")]


def logits(w: Tensors, hidden: Tensor) -> Tensor:
    return hidden @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def named(w: Tensors) -> Tensors:
    return {f"param/{name}": x for name, x in w.items()}


def guided(cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
    return uncond + scale * (cond - uncond)


def padded(rows: list[list[int]], pad: int = 1) -> tuple[Tensor, Tensor]:
    """Pads on the left -> ids and mask, both (rows, longest) int64."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


PROMPTS, NEGATIVE, STEPS = [[9, 33, 21, 60, 61, 62], [9, 17, 60, 61, 62]], [8, 61, 62], [[40, 41, 55], [77, 2, 9]]


def language(folder: Path, name: str, **more: Any) -> Path:
    """A batch of two prompts of different lengths, for a model like Chameleon or Emu3."""
    c = sizes(cfg_scale=2.5, **more)
    w = parameters(c)
    ids, mask = padded([*PROMPTS, *[NEGATIVE] * 2])
    tokens = torch.tensor(STEPS)
    rows = [states(w, c, torch.tensor([*row, *STEPS[i % 2]])) for i, row in enumerate([*PROMPTS, *[NEGATIVE] * 2])]
    steps = len(STEPS[0]) + 1
    cached = torch.stack([logits(w, row[-1])[-steps:] for row in rows])
    mixed = guided(*cached.chunk(2), c["cfg_scale"])
    width = max(map(len, PROMPTS)) + steps - 1
    whole = [torch.stack([F.pad(x, (0, 0, width - len(x), 0)) for x in layer]) for layer in zip(*rows[:2], strict=True)]
    t = named(w) | {"in/attention_mask": mask, "in/step_tokens": tokens, "out/uncond_uncached_logits": cached[2:]}
    t["out/uncached_logits"] = cached[:2]
    if name == "emu3_lm":
        t |= {"in/prompt": ids[:2], "in/negative": ids[2:3]}
        t |= {f"out/hidden_{i}": x for i, x in enumerate(whole)}
        t |= {"out/cached_logits": cached, "out/cfg_logits": mixed}
        conditional, other = cached.log_softmax(-1).chunk(2)
        t["out/cfg_logits_of_log_softmax"] = guided(conditional, other, c["cfg_scale"])
    elif name == "anole_chameleon":
        t |= {"in/both": ids, "out/cached_logits": cached, "out/cfg_logits": mixed}
        t["out/prefill_hidden_last"] = torch.stack([row[-1][-steps] for row in rows])
    else:
        t |= {"in/both": ids, "in/prompt": ids[:2]} | {f"out/hidden_{i}": x for i, x in enumerate(whole)}
        t |= {f"out/cfg_logits_{i}": mixed[:, i] for i in range(steps)}
        t |= {f"out/step_logits_{i}": cached[:, i] for i in range(1, steps)} | {"out/prefill_logits_last": cached[:, 0]}
    return write(folder, name, c, t)


def streams(w: Tensors, c: Config, rows: tuple[list[int], list[int]], image: list[int]) -> list[Tensor]:
    """Hidden states of both streams of guidance that predict the tokens of an image and the one after it."""
    return [states(w, c, torch.tensor([*row, *image]))[-1][len(row) - 1 :] for row in rows]


def of_steps(w: Tensors, c: Config, rows: tuple[list[int], list[int]], tokens: list[int]) -> Tensors:
    """The outputs of a golden of one image for its first tokens."""
    whole, hidden = states(w, c, torch.tensor([*rows[0], *tokens])), streams(w, c, rows, tokens)
    cond, uncond = (logits(w, x) for x in hidden)
    t = named(w) | {"in/prompt": torch.tensor([rows[0]]), "in/step_tokens": torch.tensor([tokens])}
    t |= {f"out/hidden_{i}": x[None] for i, x in enumerate(whole)}
    t |= {"out/uncached_logits": logits(w, whole[-1])[None], "out/cond_logits": cond[None]}
    t |= {"out/uncond_logits": uncond[None], "out/cond_hidden": hidden[0][None], "out/uncond_hidden": hidden[1][None]}
    return t | {"out/cfg_logits": guided(cond, uncond, c["cfg_scale"])[None]}


def simplear(folder: Path) -> Path:
    """A greedy image of a 3 x 3 grid."""
    c = sizes(tie_word_embeddings=True, cfg_scale=3.0, grid=3, image_tokens=9, tokenizer_length=20, codes=70)
    w, scale, rows, tokens = parameters(c, biased=True), c["cfg_scale"], (PROMPTS[0], NEGATIVE), STEPS[0]
    image: list[int] = []
    for _ in range(9):
        image.append(int(guided(*(logits(w, x)[-1] for x in streams(w, c, rows, image)), scale).argmax()))
    run = [logits(w, x) for x in streams(w, c, rows, image[:-1])]
    best = guided(*run, scale).topk(2).values
    cond, uncond = (logits(w, x) for x in streams(w, c, rows, tokens))
    t = of_steps(w, c, rows, tokens) | {"in/negative": torch.tensor([NEGATIVE])}
    t["out/greedy_cond_logits"] = run[0][None]
    t["out/cfg_logits_of_log_softmax"] = guided(cond.log_softmax(-1), uncond.log_softmax(-1), scale)[None]
    t["out/greedy_mixed"] = guided(*(x.log_softmax(-1) for x in run), scale)[None]
    t |= {"out/greedy_tokens": torch.tensor([image]), "out/greedy_margin": (best[:, 0] - best[:, 1])[None]}
    codes = [x - 20 if x >= 20 else 0 for x in image]
    t["out/greedy_codes"] = torch.tensor(codes).view(1, 1, 3, 3)
    return write(folder, "simplear_lm", c, t)


def simplear_jacobi(folder: Path, temperature: float) -> Path:
    """SimpleAR's own Jacobi decoding of a 3 x 3 grid (reference README_3 (62)); beside `simplear`."""
    c = json.loads((simplear(folder)).read_text())["config"]
    w, g, count = parameters(c, biased=True), torch.Generator().manual_seed(3), 9

    def now(row: list[int]) -> Tensor:
        """Of every place of an image (count, V)."""
        conditional, unconditional = (logits(w, x)[:-1] for x in streams(w, c, (PROMPTS[1], NEGATIVE), row))
        return (guided(conditional, unconditional, 4.0) / temperature).softmax(-1)

    row, rows, numbers = [0] * count, [], []
    rows.append(row)
    q = now(row)
    row, fixed = q.argmax(-1).tolist(), 1
    while fixed < count:
        rows.append(row)
        p, u, row = now(row), torch.rand(count, generator=g), list(row)
        numbers.append(torch.where(torch.arange(count) < count - fixed, u, -1.0))
        place = fixed
        ratio = [p[i, x] / (q[i, x] + 1e-8) for i, x in enumerate(row)]
        while place < count and (place == fixed or u[place - fixed] < ratio[place]):
            place += 1
        if place < count:
            row[place] = int((p[place] - q[place]).clamp_min(0).argmax())
            row[place + 1 :] = p[place + 1 :].argmax(-1).tolist()
        fixed, q = place, p
    t = {"in/prompt": torch.tensor([PROMPTS[1]]), "in/negative": torch.tensor([NEGATIVE])}
    t |= {"out/input_rows": torch.tensor(rows), "out/uniforms": torch.stack(numbers), "out/tokens": torch.tensor([row])}
    config = {"model": "parameters of golden simplear_lm of the same set", "cfg_scale": 4.0, "pad_token_id": 0}
    return write(folder, "simplear_sjd", config | {"temperature": temperature, "image_tokens": count}, t)


IDS = {"start": 3, "end": 4, "newline": 5, "img0": 40, "img1": 79, "size0": 10, "pad": 0, "bos": 1, "turn_end": 6}


def filtered(scores: Tensor, place: int, columns: int, rows: int, top_k: int, sigma: float | None) -> Tensor:
    """Scores (V,) at a position of an image of Lumina-mGPT 2 after its grammar and filters."""
    allowed = torch.zeros_like(scores, dtype=torch.bool)
    if place == rows * (columns + 1):
        allowed[IDS["end"]] = True
    elif place % (columns + 1) == columns:
        allowed[IDS["newline"]] = True
    else:
        allowed[IDS["img0"] : IDS["img1"] + 1] = True
    scores = scores.masked_fill(~allowed, -torch.inf)
    scores = scores.masked_fill(scores < scores.topk(top_k).values[-1], -torch.inf)
    if sigma is not None:
        finite = scores[scores.isfinite()]
        scores = scores.masked_fill(scores < scores.max() - sigma * finite.square().mean().sqrt(), -torch.inf)
    return scores


def lumina2(folder: Path, scale: float) -> Path:
    """A greedy image of 8 x 4 latents; its guidance falls to 4 while it runs, unless it begins at 4."""
    c = sizes(
        latent_grid=[8, 4], grid_units=[2, 1], ids=IDS, cfg_scale=scale, image_top_k=11, generated=41, **normed(2)
    )
    w, count = parameters(c), 41
    prompt = [1, 30, 31, 6, 3, 12, 11]
    rows = (prompt, prompt[-3:])
    image, scales, run, mixed, final, now = [], [], [], [], [], scale
    for i in range(count):
        conditional, unconditional = (logits(w, x)[-1] for x in streams(w, c, rows, image))
        now = 1.0 if now == 1 else max(4.0, now * (1 - (i + 2) / 8))
        scales.append(now)
        run.append(conditional)
        mixed.append(guided(conditional, unconditional, now))
        final.append(filtered(mixed[-1], i, 4, 8, 11, None))
        image.append(int(final[-1].argmax()))
    best = torch.stack(final).topk(2).values
    t = of_steps(w, c, rows, [50, 51, 44]) | {"out/greedy_tokens": torch.tensor([image])}
    t |= {"out/greedy_cond_logits": torch.stack(run)[None], "out/greedy_mixed_logits": torch.stack(mixed)[None]}
    t["out/greedy_allowed"] = torch.stack(final).isfinite().byte()[None]
    t["out/greedy_guidance_scale"] = torch.tensor(scales)
    t["out/greedy_margin"] = (best[:, 0] - best[:, 1]).clamp_max(99)[None]
    return write(folder, "lumina2_lm", c, t)


def lumina2_jacobi(folder: Path, window: int, rows: int, columns: int, plain: int = 6) -> Path:
    """Lumina-mGPT 2's own Jacobi decoding (reference README_3 (54), (55)); beside `lumina2`. plain: how many tokens at
    the image's end are decoded one by one."""
    c = json.loads(lumina2(folder, 4.0).read_text())["config"]
    w, g = parameters(c), torch.Generator().manual_seed(5)
    prompt, start, count = [1, 30, 31, 33, 6], [3, 12, 11], rows * (columns + 1) + 1
    until = count - plain

    def now(image: list[int]) -> tuple[list[Tensor], Tensor]:
        """Logits of both streams after all ids, and the filtered distributions of all places (n + 1, V)."""
        streams = [logits(w, states(w, c, torch.tensor([*p, *start, *image]))[-1]) for p in (prompt, prompt[-1:])]
        ends = [x[-len(image) - 1 :] for x in streams]
        scores = guided(*ends, 3.0)
        places = [filtered(x, i, columns, rows, 13, 1.0) for i, x in enumerate(scores)]
        return [x[-1] for x in ends], torch.stack(places).softmax(-1)

    def forward(row: list[int]) -> Tensor:
        conditional, unconditional = torch.tensor(row), torch.tensor(row[len(prompt) - 1 :])
        return torch.stack([logits(w, states(w, c, ids)[-1])[-1] for ids in (conditional, unconditional)])

    passes: list[tuple[int, list[int], list[float]]] = []
    raw, positions = [], []
    for i in range(4):  # the prompt, then the forced tokens; the fourth pass draws the first token of the image
        row = prompt if i == 0 else [start[i - 1]]
        first = 0 if i == 0 else len(prompt) + i - 1
        passes.append((first, row, [-1.0] * len(row)))
        raw.append(forward([*prompt, *start[:i]]))
        positions.append([len(prompt) + i - 1, i])
    image = [int(now([])[1][0].argmax())]
    kept: list[tuple[int, Tensor]] = []  # tokens of the next positions, and their distributions
    before = 0
    while len(image) < count:
        done = len(image)
        size = min(window - 1, max(0, until - before - 1))  # by the number of tokens before the last pass
        kept = kept[:size]
        while len(kept) < size:
            kept.append((int(torch.randint(40, 80, (1,), generator=g)), torch.tensor(0.0)))
        drafts = [x for x, _ in kept]
        u = torch.rand(len(drafts), generator=g)
        last, p = now([*image, *drafts])
        row = [image[-1], *drafts]
        passes.append((len(prompt) + 2 + done, row, [-1.0, *u.tolist()] if drafts else [-1.0]))
        raw.append(torch.stack(last))
        positions.append([len(prompt) + 2 + done + len(drafts), 3 + done + len(drafts)])
        accepted = 0
        for (x, q), number in zip(kept, u.tolist(), strict=True):
            if number >= p[done + accepted, x] / (q[x] if q.dim() else 1.0):
                break
            accepted += 1
        image += [*drafts[:accepted], int(p[done + accepted].argmax())]
        places = range(len(image), done + len(drafts) + 1)
        kept = [(int(p[i].argmax()), p[i]) for i in places]
        before = done
    width = max(len(row) for _, row, _ in passes)
    t = {"in/prompt": torch.tensor([prompt]), "out/tokens": torch.tensor([start + image[:count]])}
    t["out/first_place"] = torch.tensor([first for first, *_ in passes])
    t["out/row_length"] = torch.tensor([len(row) for _, row, _ in passes])
    t["out/input_rows"] = torch.tensor([row + [-1] * (width - len(row)) for _, row, _ in passes])
    t["out/uniforms"] = torch.tensor([u + [-1.0] * (width - len(u)) for *_, u in passes])
    t |= {"out/raw_last_logits": torch.stack(raw), "out/last_position_ids": torch.tensor(positions)}
    config = {"parameters": "lumina2_lm", "window": window, "interval_start": 3, "interval_end": until + 3}
    config |= {"cfg_scale": 3.0, "image_top_k": 13, "top_n_sigma": 1, "init": "random", "ids": IDS}
    config |= {"latent_grid": [rows, columns], "no_guidance_passes": 3}
    return write(folder, "lumina2_sjd", config, t)


def eagle(folder: Path, name: str) -> Path:
    """A drafter of two layers for two guided images, whose unconditional streams are shorter; a chain of three."""
    c = sizes(num_hidden_layers=2, cfg_scale=2.0, fc_bias=True, prompt_length=6, unconditional_position_shift=4)
    c |= {"qk_norm_eps": 1e-5} | ({"model_parallel_size": 2} if name.endswith("lumina") else {})
    w, g, dim = parameters(c), torch.Generator().manual_seed(9), c["hidden_size"]
    head = w.pop("lm_head.weight") * 0.1
    fc, bias = torch.randn(dim, 2 * dim, generator=g) * 0.3, torch.randn(dim, generator=g) * 0.3
    ids, hidden = torch.randint(8, 90, (4, 9), generator=g), torch.randn(4, 8, dim, generator=g)
    mask = torch.ones(4, 6, dtype=torch.int64)
    ids[2:, :4], mask[2:, :4] = 0, 0
    rows = [(ids[i, 1 + 4 * (i > 1) :], hidden[i, 4 * (i > 1) :]) for i in range(4)]

    def outputs() -> list[Tensor]:
        """For all entries of each row: one more layer of `states`, on the projected joint inputs."""
        outputs = []
        for tokens, hidden in rows:
            x = torch.cat([w["model.embed_tokens.weight"][tokens], hidden], -1) @ fc.T + bias
            table = {**w, "model.embed_tokens.weight": x, "model.norm.weight": torch.ones(dim)}
            outputs.append(unnormed(table, c, torch.arange(len(x))))
        return outputs

    t = {f"param/{n.removeprefix('model.')}": x for n, x in w.items() if n != "model.norm.weight"}
    t |= {"param/fc.weight": fc, "param/fc.bias": bias, "param/lm_head.weight": head}
    t |= {"in/ids": ids, "in/hidden": hidden, "in/attention_mask": mask}
    out, drawn = outputs(), []
    t["out/prefix_hidden"] = torch.stack([F.pad(x, (0, 0, 8 - len(x), 0)) for x in out])
    for i in range(3):
        last = torch.stack([x[-1] for x in out])
        if i:
            t[f"out/chain_hidden_{i}"] = last[:, None]
        t[f"out/chain_logits_{i}"] = guided(*(last @ head.T).chunk(2), 2.0)
        drawn.append(t[f"out/chain_logits_{i}"].argmax(-1))
        rows = [
            (torch.cat([tokens, drawn[-1][j % 2][None]]), torch.cat([hidden, last[j][None]]))
            for j, (tokens, hidden) in enumerate(rows)
        ]
        out = outputs()
    t["out/chain_tokens"] = torch.stack(drawn, 1)
    return write(folder, name, c, t)


def unnormed(w: Tensors, c: Config, ids: Tensor) -> Tensor:
    """The last layer's output before the final norm, computed with one more layer that adds nothing."""
    n = c["num_hidden_layers"]
    zero = {name.replace("layers.0.", f"layers.{n}."): 0 * x for name, x in w.items() if "layers.0." in name}
    return states(w | zero, c | {"num_hidden_layers": n + 1}, ids)[n]


def deeper(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    """A LlamaGen drafter with a second layer that adds nothing, and two images, each the golden's."""
    first = {name: x for name, x in t.items() if name.startswith("param/layers.0.")}
    more = {name.replace("layers.0.", "layers.1."): x for name, x in first.items()}
    more["param/layers.1.input_layernorm.weight"] = more["param/layers.1.post_attention_layernorm.weight"]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        more[f"param/layers.1.{name}.weight"] = 0 * more[f"param/layers.1.{name}.weight"]
    single = ("_position_ids", "freqs_cis_tail", "_retrieve_indices", "_cache_length")
    kept = {name: x for name, x in t.items() if name.startswith("param/") or name.endswith(single)}
    return c | {"num_hidden_layers": 2}, doubled({n: x for n, x in t.items() if n not in kept}) | kept | more


def doubled(t: Tensors, blocked: bool = True) -> Tensors:
    """Inputs and outputs of two images, each the golden's; blocked: of pairs of rows, the two streams of guidance, all
    conditional ones come first."""

    def twice(x: Tensor) -> Tensor:
        return (
            torch.cat([half for half in x.chunk(2) for _ in range(2)]) if blocked and len(x) == 2 else torch.cat([x, x])
        )

    return {name: x if name.startswith("param/") else twice(x) for name, x in t.items()}


def mar_of_two(t: Tensors) -> Tensors:
    """MAR's sampling of two images with the same order and noises; of its diffusion head, which has no images, as it
    is."""
    images = {"in/labels", "in/orders", "in/image_latent", "in/mask", "in/tokens", "out/patchified", "out/unpatchified"}
    images |= {f"out/encoder_{kind}" for kind in ("cond", "uncond")} | {"out/sampled_latent", "out/z_all_masked"}
    images |= {f"out/z_{kind}" for kind in ("cond", "uncond")}
    images |= {
        n for n in t if n.endswith(("_tokens", "_mask", "_latents")) or ("iter" in n and n.endswith("_init_noise"))
    }
    two = t | {name: torch.cat([t[name]] * 2) for name in images}
    two |= {name: torch.cat([x, x], 1) for name, x in t.items() if name.endswith("_step_noise")}
    halves = {name: x.chunk(2) for name, x in t.items() if name.startswith("out/iter") and name.endswith("_z")}
    return two | {name: torch.cat([cond, cond, uncond, uncond]) for name, (cond, uncond) in halves.items()}
