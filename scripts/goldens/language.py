"""Language models over one vocabulary: Chameleon (Lumina-mGPT, Anole) and Emu3, and their image grammars."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from goldens.common import Compared, Tensors, load
from goldens.llamagen import steps
from specbench.decoding.sampling import Sampling
from specbench.models.language import Grammar, Prefix
from specbench.models.loading import chameleon, emu3, naming
from specbench.models.loading.text_official import lumina_prompt
from specbench.models.loading.unified_official import from_hugging_face
from specbench.models.unified import ImageTokens, Prompts, Unified


def unified(t: Tensors, c: dict[str, Any], length: int) -> Unified:
    """The model with every vocabulary entry as a token, in an "image" of `length` free positions."""
    shards = c.get("model_parallel_size", c["num_attention_heads"]) if "qk_norm_eps" in c else 0
    cfg = from_hugging_face(c, shards)
    every = torch.arange(cfg.vocab_size)
    image = ImageTokens(every, Grammar(len(every), torch.full((length,), -1)), length)
    return load(lambda: Unified(cfg, image), t, naming.hugging_face(cfg.n_layer, cfg.block))


def uncached_logits(model: Unified, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and final hidden states (rows, n, *) of whole sequences of ids (rows, n)."""
    prefix = Prefix(model.tok_embeddings(ids[:, :1]), torch.ones_like(ids[:, :1], dtype=torch.bool), ids[:, :1])
    hidden = model.uncached(prefix, ids[:, 1:])
    return model.head(hidden), hidden


def split(t: Tensors) -> Prompts:
    """The padded batch of a golden as prompts."""
    if "in/both" in t:
        ids, no_ids = t["in/both"].chunk(2)
    else:
        ids, no_ids = t["in/prompt"], t["in/negative"]
    valid, no_valid = t["in/attention_mask"].bool().chunk(2)
    return Prompts(ids, valid, no_ids, no_valid)


def language_model(t: Tensors, c: dict[str, Any]) -> Compared:
    """One pass without a cache, then the padded, guided batch through the cache."""
    tokens = t["in/step_tokens"]
    rows, count = tokens.shape
    model = unified(t, c, count + 1)
    prompts = split(t)
    guide = Sampling(cfg_scale=c["cfg_scale"]).apply_guidance
    sequence = torch.cat([prompts.ids, tokens], 1)
    logits, hidden = uncached_logits(model, sequence)
    wanted = t["out/uncached_logits"]
    yield "uncached_logits", logits[:, -wanted.shape[1] :], wanted
    states = sorted(name for name in t if name.startswith("out/hidden_"))
    if states:
        yield states[-1].removeprefix("out/"), hidden, t[states[-1]]
    alone = torch.cat([prompts.no_ids[:, prompts.no_valid[0]], tokens], 1)
    wanted = t["out/uncond_uncached_logits"]
    yield "uncond_uncached_logits", uncached_logits(model, alone)[0][:, -wanted.shape[1] :], wanted
    session = model.open(prompts, rows, True, 1)
    run = steps(session, rows, tokens)
    cached = torch.cat([logits for logits, _ in run], 1)
    for i in range(count + 1):
        name = f"step_logits_{i}" if i else "prefill_logits_last"
        if f"out/{name}" in t:
            yield name, cached[:, i], t[f"out/{name}"]
        if f"out/cfg_logits_{i}" in t:
            yield f"cfg_logits_{i}", guide(cached)[:, i], t[f"out/cfg_logits_{i}"]
    if "out/prefill_hidden_last" in t:
        yield "prefill_hidden_last", run[0][1][:, 0], t["out/prefill_hidden_last"]
    if "out/cached_logits" in t:
        yield "cached_logits", cached, t["out/cached_logits"]
        yield "cfg_logits", guide(cached), t["out/cfg_logits"]
    if "out/cfg_logits_of_log_softmax" in t:
        known = t["out/cfg_logits_of_log_softmax"]
        yield (
            "cfg_logits_of_log_softmax",
            guide(cached).log_softmax(-1),
            known.log_softmax(-1),
        )  # equal up to a constant


def kinds(forced: Tensor, codes: int, classes: list[int]) -> Tensor:
    """Grammar classes as the goldens number them: 0 for codes, else that of the forced token."""
    return torch.tensor([0, *classes], dtype=torch.uint8)[(forced - codes + 1).clamp_min(0)]


def lumina_image_grammar(t: Tensors, c: dict[str, Any]) -> Compared:
    """Which ids are allowed at each position of an image, and the ids of new lines and sizes."""
    sizes = {"768x768": (768, 768), "512x512": (512, 512), "wide_1024x576": (1024, 576), "tiny_64x96": (64, 96)}
    first, last = c["image_ids"]
    for name, (width, height) in sizes.items():
        image = chameleon.lumina_image(torch.arange(first, last + 1), width, height)
        ours = kinds(image.grammar.forced, image.grammar.codes, [1, 2])
        yield f"{name}/position_class", ours, t[f"out/{name}/position_class"]
        own = torch.tensor([c["new_line"], c["image_end"]])
        yield f"{name}/ids", image.ids[image.grammar.codes :], own
        for key in (k for k in t if k.startswith(f"out/{name}/window_")):
            start, wanted = int(key.rsplit("_", 1)[1]), t[key]
            if start + len(wanted) <= len(ours):
                yield key.removeprefix("out/"), ours[start : start + len(wanted)], wanted
    for name, count in c["generated_after_start"].items():  # the size tokens stand before the grammar
        width, height = (int(x) for x in name.split("x"))
        image = chameleon.lumina_image(torch.arange(first, last + 1), width, height)
        yield f"{name}/generated", torch.tensor(len(image.grammar) + 2), torch.tensor(count)
        start = lumina_prompt(lambda text: [], "", width, height, "{prompt}").unconditional
        tokens = torch.tensor(start[1:])
        base, unit = c["size_token_base"], c["grid_unit_pixels"]
        yield f"{name}/size_tokens", tokens, torch.tensor([base + height // unit, base + width // unit])


def emu3_image_grammar(t: Tensors, c: dict[str, Any]) -> Compared:
    codes = torch.arange(c["visual_first"], c["visual_last"] + 1)
    for key in (k for k in t if k.endswith("/position_class")):
        name = key.removeprefix("out/")
        if name.startswith("3x2/"):
            rows, columns = 3, 2
        else:
            rows, columns = emu3.grid(c["image_area"], "16:9" if "16to9" in name else "1:1", c["spatial_downsample"])
        image = emu3.image(codes, rows, columns)
        ours = kinds(image.grammar.forced, image.grammar.codes, [1, 2, 3, 4])
        wanted = t[key]
        yield name, ours, wanted[wanted != 5]  # padding behind the end is not generated
        own = torch.tensor([c["eol_token"], c["eof_token"], c["eoi_token"], c["eos_token"]])
        yield f"{name}/ids", image.ids[image.grammar.codes :], own


CHECKS = {
    "lumina_chameleon": language_model,
    "lumina_chameleon_swin": language_model,
    "anole_chameleon": language_model,
    "emu3_lm": language_model,
    "lumina_image_grammar": lumina_image_grammar,
    "emu3_image_grammar": emu3_image_grammar,
}
