"""Janus-Pro: DeepSeek's layout and transformers', prompts, prefill, cached steps, greedy images, pixels."""

from __future__ import annotations

import torch
from torch import Tensor

from goldens.common import Compared, Config, Tensors, guided, weights
from goldens.language import every_layer
from goldens.llamagen import cached, margin
from goldens.pixels import llamagen_vq
from specbench.models import vq
from specbench.models.loading import image_tokenizers, janus, official
from specbench.models.pixels import truncated
from specbench.models.unified import Prompts, Unified


def target(t: Tensors, c: Config, side: int) -> tuple[Unified, official.CheckpointSource]:
    source = official.from_tensors(weights(t), "golden")
    return janus.load(janus.configured(c, source), source, side, "cpu", torch.float32), source


def prompts(t: Tensors, c: Config) -> Prompts:
    """The prompts of a golden, one per image, or one for all of them; the unconditional ones have this project's
    format."""
    ids = t["in/prompt_ids"].view(-1, t["in/prompt_ids"].shape[-1])
    if len(ids) == 1:
        ids = ids.expand(len(t["out/greedy_tokens"]), -1)
    valid = t["in/attention_mask"].bool() if "in/attention_mask" in t else torch.ones_like(ids, dtype=torch.bool)
    valid = valid.expand_as(ids)
    ids_of_model = janus.JanusIds(c["bos"], c["pad"], c["begin_of_image"])
    no_ids = torch.full_like(ids, ids_of_model.pad)
    for i, row in enumerate(ids):
        text = row[valid[i]].tolist()
        no_ids[i, -len(text) :] = torch.tensor(janus.janus_prompt(text[1:-1], ids_of_model).unconditional)
    return Prompts(ids, valid, no_ids, valid)


def interleaved(x: Tensor) -> Tensor:
    """Conditional rows, then unconditional ones -> pairs of them."""
    return torch.stack(x.chunk(2), 1).flatten(0, 1)


def greedy(model: Unified, conditioning: Prompts, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens (B, T), logits (2B, T, V), hidden states and guided logits of the image that always takes the most likely
    code."""
    tokens = torch.zeros(len(conditioning), model.length, dtype=torch.int64)
    for i in range(model.length):
        logits, hidden = cached(model, conditioning, tokens[:, : max(1, i)])
        tokens[:, i] = guided(logits, scale)[:, i].argmax(-1)
    return tokens, logits, hidden, guided(logits, scale)


def janus_lm(t: Tensors, c: Config) -> Compared:
    """DeepSeek's layout: rows are pairs, and the whole prompt is compared."""
    model, _ = target(t, c, c["grid"])
    conditioning, tokens = prompts(t, c), t["in/step_tokens"]
    yield "prompt_rows", interleaved(torch.cat([conditioning.ids, conditioning.no_ids]))
    prefix = model.condition(conditioning, True)
    stream_tokens = torch.cat([tokens, tokens])
    states = every_layer(model, prefix, stream_tokens)
    for i, state in enumerate(states):
        yield f"hidden_{i}", interleaved(state)
    embedded, hidden, before = states[0], states[-1], conditioning.ids.shape[1]
    yield "prefill_hidden", interleaved(hidden[:, :before])
    yield "image_embeds_0", interleaved(embedded[:, before])
    yield "uncached_logits", interleaved(model.head(hidden[:, before - 1 :]))
    logits, hidden = cached(model, conditioning, tokens)
    yield "cached_logits", interleaved(logits)
    yield "cached_hidden", interleaved(hidden)
    mixed = guided(logits, c["cfg_weight"])
    yield "cfg_logits", mixed
    yield "cfg_probs_0", (mixed[:, 0] / c["temperature"]).softmax(-1)
    image, _, _, mixed = greedy(model, conditioning, c["cfg_weight"])
    yield "greedy_tokens", image
    yield "greedy_margin", margin(mixed)


def janus_hf(t: Tensors, c: Config) -> Compared:
    """transformers' layout: its greedy image, the logits on the way, and the image's pixels."""
    model, source = target(t, c, c["grid"])
    conditioning = prompts(t, c)
    keep = conditioning.valid
    yield "uncond_ids", torch.where(keep, conditioning.no_ids, t["out/uncond_ids"])
    prefix = model.condition(conditioning, True)
    stream_valid = torch.cat([keep, keep])
    yield "prefill_embeds", prefix.inputs[stream_valid], t["out/prefill_embeds"][stream_valid]
    hidden = model.uncached(prefix, torch.zeros(len(stream_valid), 0, dtype=torch.int64))
    yield "prefill_hidden", hidden[stream_valid], t["out/prefill_hidden"][stream_valid]
    image, logits, hidden, mixed = greedy(model, conditioning, c["guidance_scale"])
    yield "greedy_tokens", image
    yield "cached_logits", logits
    yield "cached_hidden", hidden
    yield "cfg_logits", mixed
    yield "greedy_margin", margin(mixed)
    tokenizer = image_tokenizers.load_janus(source, vq.VQConfig(), torch.device("cpu"))
    pixels = tokenizer.decode(image, (c["grid"],) * 2).movedim(1, -1)
    yield "decoded", pixels
    # transformers looks for the nearest code without scaling to unit length, unlike DeepSeek's code and this project
    seen = tokenizer.pre_quant(t["in/image"]).movedim(1, -1).flatten(0, 2)
    nearest = torch.cdist(seen, tokenizer.quantize.embedding.weight).argmin(-1)
    yield "encoder_indices_unnormalised", nearest


def janus_vq(t: Tensors, c: Config) -> Compared:
    yield from llamagen_vq(t, c, "gen_vision_model.")
    yield "to_uint8", torch.from_numpy(truncated(t["out/decoded"]))


CHECKS = {"janus_lm": janus_lm, "janus_hf": janus_hf, "janus_vq": janus_vq}
