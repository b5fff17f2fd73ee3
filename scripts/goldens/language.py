"""Language models over one vocabulary: Chameleon (Lumina-mGPT, Anole), Emu3 and SimpleAR, and their image
grammars."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from goldens.common import Compared, Config, Tensors, fixed, guided, load, weights
from goldens.llamagen import cached, layers, margin
from specbench.decoding.sampling import Sampling
from specbench.models.language import Grammar, Prefix
from specbench.models.loading import chameleon, emu3, lumina2, naming, simplear
from specbench.models.loading.chameleon import lumina_prompt
from specbench.models.loading.unified_official import EMBEDDING, from_hugging_face, left_pad_ids
from specbench.models.unified import ImageTokens, Prompts, Unified, image_tokens


def unified(t: Tensors, c: Config, length: int) -> Unified:
    """The model with every vocabulary entry as a token, in an "image" of `length` free positions."""
    shards = c.get("model_parallel_size", c["num_attention_heads"]) if "qk_norm_eps" in c else 0
    fixed(c, qk_norm_eps=1e-5, head_dim=c["hidden_size"] // c["num_attention_heads"])
    params = weights(t)
    cfg = from_hugging_face(c, shards, "model.layers.0.self_attn.q_proj.bias" in params)
    if c.get("tie_word_embeddings"):
        params.setdefault("lm_head.weight", params[EMBEDDING])
    every = torch.arange(cfg.vocab_size)
    image = ImageTokens(every, Grammar(len(every), torch.full((length,), -1)), length)
    return load(lambda: Unified(cfg, image), params, naming.hugging_face(cfg.n_layer, cfg.block))


def known(model: Unified, ids: Tensor) -> Prefix:
    """Ids (rows, n) as a prefix without padding."""
    return Prefix(model.tok_embeddings(ids), torch.ones_like(ids, dtype=torch.bool), ids)


def uncached_logits(model: Unified, ids: Tensor) -> Tensor:
    """Logits (rows, n, V) of whole sequences of ids (rows, n)."""
    return model.head(model.uncached(known(model, ids[:, :1]), ids[:, 1:]))


def every_layer(model: Unified, prefix: Prefix, tokens: Tensor) -> list[Tensor]:
    """Hidden states (rows, n, dim) of one pass: the embeddings, then every block's output, the last one after the final
    norm."""
    states, hidden = layers(model, prefix, tokens)
    return [torch.cat([prefix.inputs, model.tok_embeddings(model.ids(tokens))], 1), *states[:-1], hidden]


def split(t: Tensors) -> Prompts:
    """The padded batch of a golden as prompts. All rows may share one negative prompt."""
    valid, no_valid = t["in/attention_mask"].bool().chunk(2)
    if "in/both" in t:
        ids, no_ids = t["in/both"].chunk(2)
    else:
        ids, no_ids = t["in/prompt"], t["in/negative"].expand_as(no_valid)
    return Prompts(ids, valid, no_ids, no_valid)


def alone(model: Unified, ids: Tensor, valid: Tensor, tokens: Tensor) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Logits (n, V) and the hidden states of every layer (n, dim) of each row without its padding: prompts (rows, P),
    then tokens (rows, S)."""
    logits, states = [], []
    for i in range(len(ids)):
        row = torch.cat([ids[i, valid[i]], tokens[i]])[None]
        layers = every_layer(model, known(model, row[:, :1]), row[:, 1:])
        logits.append(model.head(layers[-1])[0])
        states.append([x[0] for x in layers])
    return logits, states


def last(rows: list[Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    """Our rows (n, *) and a golden's (B, m, *), cut from the end to the same length: only the golden's have padding."""
    n = min(like.shape[1], *(len(row) for row in rows))
    return torch.stack([row[-n:] for row in rows[: len(like)]]), like[:, -n:]


def language_model(t: Tensors, c: Config) -> Compared:
    """One pass without a cache, then the padded, guided batch through the cache."""
    tokens = t["in/step_tokens"]
    count = tokens.shape[1]
    model = unified(t, c, count + 1)
    prompts = split(t)
    mixed = partial(guided, scale=c["cfg_scale"])
    if "in/both" in t and "in/prompt" in t:
        yield "prompt", prompts.ids, t["in/prompt"]
    logits, states = alone(model, prompts.ids, prompts.valid, tokens)
    yield "uncached_logits", *last(logits, t["out/uncached_logits"])
    for name in t.named("hidden_"):
        yield name, *last([row[int(name.removeprefix("hidden_"))] for row in states], t[f"out/{name}"])
    logits, _ = alone(model, prompts.no_ids, prompts.no_valid, tokens)
    yield "uncond_uncached_logits", *last(logits, t["out/uncond_uncached_logits"])
    logits, hidden = cached(model, prompts, tokens)
    for i in range(count + 1):
        name = f"step_logits_{i}" if i else "prefill_logits_last"
        if f"out/{name}" in t:
            yield name, logits[:, i]
        if f"out/cfg_logits_{i}" in t:
            yield f"cfg_logits_{i}", mixed(logits)[:, i]
    if "out/prefill_hidden_last" in t:
        yield "prefill_hidden_last", hidden[:, 0]
    if "out/cached_logits" in t:
        yield "cached_logits", logits
        yield "cfg_logits", mixed(logits)
    if (name := "cfg_logits_of_log_softmax") and f"out/{name}" in t:  # equal up to a constant
        yield name, mixed(logits).log_softmax(-1), t[f"out/{name}"].log_softmax(-1)


def kinds(forced: Tensor, codes: int, classes: list[int]) -> Tensor:
    """Grammar classes as the goldens number them: 0 for codes, else the class of the forced token."""
    return torch.tensor([0, *classes], dtype=torch.uint8)[(forced - codes + 1).clamp_min(0)]


def sizes(t: Tensors) -> list[tuple[str, int, int]]:
    """Names, widths and heights of the images of a golden, whose names end with both."""
    names = [key.removeprefix("out/").removesuffix("/position_class") for key in t if key.endswith("/position_class")]
    return [(name, *map(int, re.findall(r"(\d+)x(\d+)$", name)[0])) for name in names]


def image_grammar(t: Tensors, c: Config, build_image: Callable[[int, int], ImageTokens]) -> Compared:
    """The ids allowed at each position of an image with this width and height, the number of positions after the image
    start, and the ids of the first and last code and of the grammar's tokens."""
    for name, width, height in sizes(t):
        image = build_image(width, height)
        ours, codes = kinds(image.grammar.forced, image.grammar.codes, [1, 2]), image.grammar.codes
        yield f"{name}/position_class", ours
        expected = torch.tensor([*c["image_ids"], c["new_line"], c["image_end"]])
        yield f"{name}/ids", torch.cat([image.ids[[0, codes - 1]], image.ids[codes:][:2]]), expected
        for key in (k for k in t if k.startswith(f"out/{name}/window_")):
            start, wanted = int(key.rsplit("_", 1)[1]), t[key]
            every = torch.cat([ours, torch.full((len(wanted),), 3, dtype=ours.dtype)])  # after the end: anything
            yield key.removeprefix("out/"), every[start : start + len(wanted)], wanted
    for name, count in c["generated_after_start"].items():
        image = build_image(*map(int, name.split("x")))
        yield f"{name}/generated", torch.tensor(len(image.grammar) + 2), torch.tensor(count)


def lumina_image_grammar(t: Tensors, c: Config) -> Compared:
    """The size tokens come before the grammar."""
    first, final = c["image_ids"]
    yield from image_grammar(t, c, partial(chameleon.lumina_image, torch.arange(first, final + 1)))
    for name in c["generated_after_start"]:
        width, height = map(int, name.split("x"))
        start = lumina_prompt(lambda text: [], "", width, height, "{prompt}").unconditional
        base, unit = c["size_token_base"], c["grid_unit_pixels"]
        yield f"{name}/size_tokens", torch.tensor(start[1:]), torch.tensor([base + x // unit for x in (height, width)])


def lumina2_image_grammar(t: Tensors, c: Config) -> Compared:
    yield from image_grammar(t, c, partial(lumina2.image, lumina2.CODES))


def emu3_image_grammar(t: Tensors, c: Config) -> Compared:
    codes = torch.arange(c["visual_first"], c["visual_last"] + 1)
    for key in (k for k in t if k.endswith("/position_class")):
        name = key.removeprefix("out/")
        width, height = map(int, re.findall(r"(\d+)x(\d+)", name)[0])
        if ratio := re.search(r"_(\d+)to(\d+)/", name):
            rows, columns = emu3.grid(c["image_area"], f"{ratio[1]}:{ratio[2]}", c["spatial_downsample"])
        elif width * height == c["image_area"]:
            rows, columns = emu3.grid(c["image_area"], "1:1", c["spatial_downsample"])
        else:
            rows, columns = width, height  # small ones are named by their rows and columns of latents
        image = emu3.image(codes, rows, columns)
        ours = kinds(image.grammar.forced, image.grammar.codes, [1, 2, 3, 4])
        wanted = t[key]
        yield name, ours, wanted[wanted != 5]  # padding after the end is not generated
        expected = torch.tensor([c["eol_token"], c["eof_token"], c["eoi_token"], c["eos_token"]])
        yield f"{name}/ids", image.ids[image.grammar.codes :][: len(expected)], expected


def of_streams(logits: Tensor, hidden: Tensor) -> Compared:
    """The outputs of both streams of guidance."""
    for name, x, y in zip(("cond", "uncond"), logits.chunk(2), hidden.chunk(2), strict=True):
        yield f"{name}_logits", x
        yield f"{name}_hidden", y


def lumina2_lm(t: Tensors, c: Config) -> Compared:
    """Both streams, and the greedy image under guidance, grammar and top-k. The scale of the official sampler changes
    while it runs, unless it is 4 (reference README_3 (52))."""
    ids, tokens, whole = c["ids"], t["in/step_tokens"], t["in/prompt"]
    model, sequence = unified(t, c, c["generated"]), torch.cat([whole, tokens], 1)
    wanted, prefix = t["out/uncached_logits"], known(model, whole)
    yield "uncached_logits", uncached_logits(model, sequence)[:, -wanted.shape[1] :], wanted
    for i, state in enumerate(every_layer(model, prefix, tokens)):
        yield f"hidden_{i}", state
    seen = (torch.arange(whole.shape[1]) >= whole.shape[1] - 3).expand_as(whole)
    conditioning = Prompts(whole, prefix.valid, torch.where(seen, whole, ids["pad"]), seen)
    logits, hidden = cached(model, conditioning, tokens)
    yield from of_streams(logits, hidden)
    yield "cfg_logits", guided(logits, c["cfg_scale"])
    codes = torch.arange(ids["img0"], ids["img1"] + 1)
    image, drawn = image_tokens(codes, *c["latent_grid"], ids["newline"], [ids["end"]]), t["out/greedy_tokens"]
    cond, uncond = cached(model, conditioning, drawn[:, :-1])[0].chunk(2)
    yield "greedy_cond_logits", cond
    scales, scale = [], float(c["cfg_scale"])
    for n in range(2, 2 + drawn.shape[1]):  # ids after the image start
        scale = 1.0 if scale == 1 else max(4.0, scale * (1 - n / (4 * c["grid_units"][0] * c["grid_units"][1])))
        scales.append(scale)
    yield "greedy_guidance_scale", torch.tensor(scales)
    mixed = uncond + torch.tensor(scales)[None, :, None] * (cond - uncond)
    yield "greedy_mixed_logits", mixed
    allowed = torch.zeros_like(mixed, dtype=torch.bool)
    for i, forced in enumerate(image.grammar.forced.tolist()):
        allowed[:, i, image.ids[forced] if forced >= 0 else codes] = True
    in_top_k = Sampling(top_k=c["image_top_k"]).probs(mixed.masked_fill(~allowed, -1e30)) > 0
    yield "greedy_allowed", in_top_k & allowed, t["out/greedy_allowed"].bool()
    remaining = mixed.masked_fill(~in_top_k | ~allowed, -torch.inf)
    yield "greedy_tokens", remaining.argmax(-1), drawn
    yield "greedy_margin", margin(remaining).clamp_max(99)


def simplear_lm(t: Tensors, c: Config) -> Compared:
    """Both streams, each of its own length, and the greedy image under guidance; the official processor mixes
    log-probabilities, which differ from mixed logits by a constant per row."""
    tokens, codes = t["in/step_tokens"], c["codes"]
    model = unified(t, c, c["image_tokens"])
    sequence = torch.cat([t["in/prompt"], tokens], 1)
    states = every_layer(model, known(model, sequence[:, :1]), sequence[:, 1:])
    yield "uncached_logits", model.head(states[-1])
    for i, state in enumerate(states):
        yield f"hidden_{i}", state
    rows = len(tokens)
    both_rows = [*t["in/prompt"].tolist(), *t["in/negative"].expand(rows, -1).tolist()]
    ids, valid = left_pad_ids(both_rows, max(map(len, both_rows)), 0)
    conditioning = Prompts(ids[:rows], valid[:rows], ids[rows:], valid[rows:])
    mixed = partial(guided, scale=c["cfg_scale"])
    logits, hidden = cached(model, conditioning, tokens)
    yield from of_streams(logits, hidden)
    yield "cfg_logits", mixed(logits)
    yield "cfg_logits_of_log_softmax", mixed(logits.log_softmax(-1))
    ours, golden = (x.log_softmax(-1) for x in (mixed(logits), t["out/cfg_logits_of_log_softmax"]))
    yield "distribution", ours, golden
    drawn = t["out/greedy_tokens"]
    logits = cached(model, conditioning, drawn[:, :-1])[0]
    yield "greedy_cond_logits", logits.chunk(2)[0]
    yield "greedy_mixed", mixed(logits.log_softmax(-1))
    image = mixed(logits).argmax(-1)
    yield "greedy_tokens", image, drawn
    yield "greedy_margin", margin(mixed(logits))
    drawn_ids = simplear.image(c["tokenizer_length"], codes, c["grid"]).ids.argsort()[image]
    yield "greedy_codes", simplear.image_codes(drawn_ids, codes).view_as(t["out/greedy_codes"])


CHECKS = {
    "simplear_lm": simplear_lm,
    "lumina2_lm": lumina2_lm,
    "lumina2_image_grammar": lumina2_image_grammar,
    "lumina_chameleon": language_model,
    "lumina_chameleon_swin": language_model,
    "anole_chameleon": language_model,
    "emu3_lm": language_model,
    "lumina_image_grammar": lumina_image_grammar,
    "emu3_image_grammar": emu3_image_grammar,
}
