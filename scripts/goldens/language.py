"""Language models over one vocabulary: Chameleon (Lumina-mGPT, Anole), Emu3 and SimpleAR, and their image
grammars."""

from __future__ import annotations

import re
from functools import partial

import torch
from torch import Tensor

from goldens.common import Compared, Config, Tensors, fixed, guided, load, weights
from goldens.llamagen import steps
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


def uncached_logits(model: Unified, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and final hidden states (rows, n, *) of whole sequences of ids (rows, n)."""
    prefix = Prefix(model.tok_embeddings(ids[:, :1]), torch.ones_like(ids[:, :1], dtype=torch.bool), ids[:, :1])
    hidden = model.uncached(prefix, ids[:, 1:])
    return model.head(hidden), hidden


def every_layer(model: Unified, prefix: Prefix, tokens: Tensor) -> list[Tensor]:
    """Hidden states (rows, n, dim) of one pass: the embeddings, then every block's output, the last one after the final
    norm."""
    states: list[Tensor] = []
    handles = [layer.register_forward_hook(lambda _m, _i, out: states.append(out)) for layer in model.layers]
    hidden = model.uncached(prefix, tokens)
    for handle in handles:
        handle.remove()
    embedded = torch.cat([prefix.inputs, model.tok_embeddings(model.ids(tokens))], 1)
    return [embedded, *(state.view_as(hidden) for state in states[:-1]), hidden]


def split(t: Tensors) -> Prompts:
    """The padded batch of a golden as prompts. A negative prompt may be one for all rows."""
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
        prefix = Prefix(model.tok_embeddings(row[:, :1]), torch.ones_like(row[:, :1], dtype=torch.bool), row[:, :1])
        layers = every_layer(model, prefix, row[:, 1:])
        logits.append(model.head(layers[-1])[0])
        states.append([x[0] for x in layers])
    return logits, states


def last(rows: list[Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    """Our rows (n, *) and a golden's (B, m, *), as far as both go, from the end: only the golden's have padding."""
    n = min(like.shape[1], *(len(row) for row in rows))
    return torch.stack([row[-n:] for row in rows[: len(like)]]), like[:, -n:]


def language_model(t: Tensors, c: Config) -> Compared:
    """One pass without a cache, then the padded, guided batch through the cache."""
    tokens = t["in/step_tokens"]
    rows, count = tokens.shape
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
    session = model.open(prompts, rows, True, 1)
    run = steps(session, rows, tokens)
    cached = torch.cat([logits for logits, _ in run], 1)
    for i in range(count + 1):
        name = f"step_logits_{i}" if i else "prefill_logits_last"
        if f"out/{name}" in t:
            yield name, cached[:, i]
        if f"out/cfg_logits_{i}" in t:
            yield f"cfg_logits_{i}", mixed(cached)[:, i]
    if "out/prefill_hidden_last" in t:
        yield "prefill_hidden_last", run[0][1][:, 0]
    if "out/cached_logits" in t:
        yield "cached_logits", cached
        yield "cfg_logits", mixed(cached)
    if "out/cfg_logits_of_log_softmax" in t:
        known = t["out/cfg_logits_of_log_softmax"]
        yield (
            "cfg_logits_of_log_softmax",
            mixed(cached).log_softmax(-1),
            known.log_softmax(-1),
        )  # equal up to a constant


def kinds(forced: Tensor, codes: int, classes: list[int]) -> Tensor:
    """Grammar classes as the goldens number them: 0 for codes, else that of the forced token."""
    return torch.tensor([0, *classes], dtype=torch.uint8)[(forced - codes + 1).clamp_min(0)]


def sizes(t: Tensors) -> list[tuple[str, int, int]]:
    """Names, widths and heights of the images of a golden, whose names end with both."""
    names = [key.removeprefix("out/").removesuffix("/position_class") for key in t if key.endswith("/position_class")]
    return [(name, *map(int, re.findall(r"(\d+)x(\d+)$", name)[0])) for name in names]


def lumina_image_grammar(t: Tensors, c: Config) -> Compared:
    """Which ids are allowed at each position of an image, and the ids of new lines and sizes."""
    first, final = c["image_ids"]
    for name, width, height in sizes(t):
        image = chameleon.lumina_image(torch.arange(first, final + 1), width, height)
        ours = kinds(image.grammar.forced, image.grammar.codes, [1, 2])
        yield f"{name}/position_class", ours
        own = torch.tensor([c["new_line"], c["image_end"]])
        yield f"{name}/ids", image.ids[image.grammar.codes :][: len(own)], own
        for key in (k for k in t if k.startswith(f"out/{name}/window_")):
            start, wanted = int(key.rsplit("_", 1)[1]), t[key]
            known = torch.cat([ours, torch.full((len(wanted),), 3, dtype=ours.dtype)])  # behind the end: anything
            yield key.removeprefix("out/"), known[start : start + len(wanted)], wanted
    for name, count in c["generated_after_start"].items():  # the size tokens stand before the grammar
        width, height = (int(x) for x in name.split("x"))
        image = chameleon.lumina_image(torch.arange(first, final + 1), width, height)
        yield f"{name}/generated", torch.tensor(len(image.grammar) + 2), torch.tensor(count)
        start = lumina_prompt(lambda text: [], "", width, height, "{prompt}").unconditional
        tokens = torch.tensor(start[1:])
        base, unit = c["size_token_base"], c["grid_unit_pixels"]
        yield f"{name}/size_tokens", tokens, torch.tensor([base + height // unit, base + width // unit])


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
        yield name, ours, wanted[wanted != 5]  # padding behind the end is not generated
        own = torch.tensor([c["eol_token"], c["eof_token"], c["eoi_token"], c["eos_token"]])
        yield f"{name}/ids", image.ids[image.grammar.codes :][: len(own)], own


def lumina2_lm(t: Tensors, c: Config) -> Compared:
    """Both streams, and the greedy image under guidance, grammar and top-k. The scale of the official sampler changes
    while it runs, unless it is 4 (reference README_3 (52))."""
    ids, tokens, whole = c["ids"], t["in/step_tokens"], t["in/prompt"]
    rows, model, sequence = len(whole), unified(t, c, c["generated"]), torch.cat([whole, tokens], 1)
    wanted = t["out/uncached_logits"]
    yield "uncached_logits", uncached_logits(model, sequence)[0][:, -wanted.shape[1] :], wanted
    every = torch.ones_like(whole, dtype=torch.bool)
    for i, one in enumerate(every_layer(model, Prefix(model.tok_embeddings(whole), every, whole), tokens)):
        yield f"hidden_{i}", one

    def streams(given: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and hidden states (2B, 1 + n, *) of both streams through the cache."""
        seen = (torch.arange(whole.shape[1]) >= whole.shape[1] - 3).expand_as(whole)
        both = Prompts(whole, every, torch.where(seen, whole, ids["pad"]), seen)
        run = steps(model.open(both, rows, True, 1), rows, given)
        logits, hidden = (torch.cat(list(x), 1) for x in zip(*run, strict=True))
        return logits, hidden

    logits, hidden = streams(tokens)
    for name, x, y in zip(("cond", "uncond"), logits.chunk(2), hidden.chunk(2), strict=True):
        yield f"{name}_logits", x
        yield f"{name}_hidden", y
    yield "cfg_logits", guided(logits, c["cfg_scale"])
    codes = torch.arange(ids["img0"], ids["img1"] + 1)
    image, drawn = image_tokens(codes, *c["latent_grid"], ids["newline"], [ids["end"]]), t["out/greedy_tokens"]
    cond, uncond = streams(drawn[:, :-1])[0].chunk(2)
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
    found = Sampling(top_k=c["image_top_k"]).probs(mixed.masked_fill(~allowed, -1e30)) > 0
    yield "greedy_allowed", found & allowed, t["out/greedy_allowed"].bool()
    best = mixed.masked_fill(~found | ~allowed, -torch.inf).topk(2, -1)
    yield "greedy_tokens", best.indices[..., 0], drawn
    yield "greedy_margin", (best.values[..., 0] - best.values[..., 1]).clamp_max(99)


def lumina2_image_grammar(t: Tensors, c: Config) -> Compared:
    """Which ids are allowed at each position of an image, and how many follow the image start."""
    first, last = c["image_ids"]
    for name, width, height in sizes(t):
        image = lumina2.image(lumina2.CODES, width, height)
        ours = kinds(image.grammar.forced, image.grammar.codes, [1, 2])
        yield f"{name}/position_class", ours
        own = torch.tensor([first, last, c["new_line"], c["image_end"]])
        yield f"{name}/ids", torch.cat([image.ids[[0, lumina2.CODES - 1]], image.ids[lumina2.CODES :][:2]]), own
    for name, count in c["generated_after_start"].items():
        width, height = (int(x) for x in name.split("x"))
        image = lumina2.image(lumina2.CODES, width, height)
        yield f"{name}/generated", torch.tensor(len(image.grammar) + 2), torch.tensor(count)


def simplear_lm(t: Tensors, c: Config) -> Compared:
    """Both streams, each of its own length, and the greedy image under guidance; the official processor mixes
    log-probabilities, which differ from mixed logits by a constant per row."""
    tokens, codes = t["in/step_tokens"], c["codes"]
    model = unified(t, c, c["image_tokens"])
    sequence = torch.cat([t["in/prompt"], tokens], 1)
    every = torch.ones_like(sequence[:, :1], dtype=torch.bool)
    prefix = Prefix(model.tok_embeddings(sequence[:, :1]), every, sequence[:, :1])
    states = every_layer(model, prefix, sequence[:, 1:])
    yield "uncached_logits", model.head(states[-1])
    for i, one in enumerate(states):
        yield f"hidden_{i}", one
    rows = len(tokens)
    both_rows = [*t["in/prompt"].tolist(), *t["in/negative"].expand(rows, -1).tolist()]
    ids, valid = left_pad_ids(both_rows, max(map(len, both_rows)), 0)
    both = Prompts(ids[:rows], valid[:rows], ids[rows:], valid[rows:])

    def streams(given: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and hidden states (2B, 1 + n, *) of both streams through the cache."""
        run = steps(model.open(both, 1, True, 1), 1, given)
        logits, hidden = (torch.cat(list(x), 1) for x in zip(*run, strict=True))
        return logits, hidden

    def mixed(logits: Tensor) -> Tensor:
        return guided(logits, c["cfg_scale"])

    logits, hidden = streams(tokens)
    for i, name in enumerate(("cond", "uncond")):
        yield f"{name}_logits", logits[i : i + 1]
        yield f"{name}_hidden", hidden[i : i + 1]
    yield "cfg_logits", mixed(logits)
    yield "cfg_logits_of_log_softmax", mixed(logits.log_softmax(-1))
    ours, theirs = (x.log_softmax(-1) for x in (mixed(logits), t["out/cfg_logits_of_log_softmax"]))
    yield "distribution", ours, theirs
    drawn = t["out/greedy_tokens"]
    logits = streams(drawn[:, :-1])[0]
    yield "greedy_cond_logits", logits.chunk(2)[0]
    yield "greedy_mixed", mixed(logits.log_softmax(-1))
    best = mixed(logits).topk(2, -1)
    yield "greedy_tokens", best.indices[..., 0], drawn
    yield "greedy_margin", best.values[..., 0] - best.values[..., 1]
    found = simplear.image(c["tokenizer_length"], codes, c["grid"]).ids.argsort()[best.indices[..., 0]]
    yield "greedy_codes", simplear.known(found, codes).view_as(t["out/greedy_codes"])


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
