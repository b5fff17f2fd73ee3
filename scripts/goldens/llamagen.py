"""LlamaGen: text- and class-conditional, in the official layout and in LANTERN's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from goldens.common import Compared, Config, Tensors, guided, load, weights
from specbench.decoding import trees
from specbench.decoding.sampling import Sampling
from specbench.models.language import Language, LanguageSession, Prefix
from specbench.models.llamagen import ClassConditioning, Conditioning, LlamaGen, LlamaGenConfig
from specbench.models.loading import naming, text_official
from specbench.models.loading.llamagen_official import from_lantern


def config(c: Config) -> LlamaGenConfig:
    """The configuration from the official names of hyper-parameters."""
    classes = c["num_classes"] if c.get("model_type") == "c2i" else 0
    same = ("dim", "n_layer", "n_head", "n_kv_head", "ffn_hidden", "vocab_size", "cls_token_num", "caption_dim")
    rest = ("block_size", "rope_base", "norm_eps")
    return LlamaGenConfig(**{name: c[name] for name in (*same, *rest)}, num_classes=classes)


def steps(session: LanguageSession, rows: int, history: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Logits and hidden states of the decode steps through the cache: before the first token, then after each token."""
    out, empty = [], trees.build([])
    for step in range(history.shape[1] + 1):
        tokens = history[:, max(0, step - 1) : max(1, step)]
        out.append(session.forward(tokens, empty, history, torch.full((rows,), step)))
    return out


def cached(model: Language, conditioning: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and hidden states (2B, 1 + n, *) of both streams of guidance, through the cache."""
    rows = len(conditioning)
    logits, hidden = zip(*steps(model.open(conditioning, rows, True, 1), rows, tokens), strict=True)
    return torch.cat(logits, 1), torch.cat(hidden, 1)


def layers(model: Language, prefix: Prefix, tokens: Tensor) -> tuple[list[Tensor], Tensor]:
    """Hidden states (rows, n, dim) of one pass: every block's output, and the last one after the final norm."""
    states: list[Tensor] = []
    handles = [layer.register_forward_hook(lambda _m, _i, out: states.append(out)) for layer in model.layers]
    hidden = model.uncached(prefix, tokens)
    for handle in handles:
        handle.remove()
    return [state.view_as(hidden) for state in states], hidden


def margin(logits: Tensor) -> Tensor:
    """The difference between the largest and the second largest logit."""
    best = logits.topk(2, -1).values
    return best[..., 0] - best[..., 1]


def greedy(model: LlamaGen, conditioning: Conditioning | ClassConditioning, c: Config) -> Tensor:
    """Tokens (B, T) of the images that always take the most likely token; tokens after a golden's interval of guidance,
    if it has one, without guidance."""
    rows = len(conditioning)
    session, history = model.open(conditioning, rows, True, 1), torch.zeros(rows, c["block_size"], dtype=torch.int64)
    for i in range(history.shape[1]):
        root = history[:, max(0, i - 1) : max(1, i)]
        logits, _ = session.forward(root, trees.build([]), history, torch.full((rows,), i))
        after_interval = 0 <= c.get("cfg_interval", -1) < i - 1
        history[:, i] = guided(logits, 1.0 if after_interval else c["cfg_scale"])[:, 0].argmax(-1)
    return history


def llamagen_t2i(t: Tensors, c: Config) -> Compared:
    """Prefill and decode steps through the cache, guidance, and the filters."""
    model = load(lambda: LlamaGen(config(c)), weights(t), naming.llamagen(c["n_layer"], text=True))
    features, valid = text_official.left_pad(t["in/t5_features"], t["in/t5_mask"])
    yield "left_features", features
    yield "left_mask", valid.long()
    conditioning, tokens = Conditioning(features, valid), t["in/step_tokens"]
    rows, before = len(tokens), c["cls_token_num"]
    prefix = model.condition(conditioning, True)
    none = model.cls_embedding.uncond_embedding.expand_as(features)
    yield "cond_combined", torch.cat([features, none])
    states, hidden = layers(model, prefix, torch.cat([tokens, tokens]))
    for i, state in enumerate(states):
        yield f"prefill_hidden_layer{i}", state[:, :before]
    yield "prefill_logits", model.head(hidden[:, :before])
    yield "uncached_logits", model.head(hidden[:, before - 1 :])
    session = model.open(conditioning, rows, True, 1)
    sampling = Sampling(c["temperature"], c["top_k"], c.get("top_p", 1.0), c["cfg_scale"])
    yield "freqs_cis", model.rope(0, 0)[: len(t["out/freqs_cis"])]
    yield "prefill_hidden_final_norm", session.prefix_hidden, t["out/prefill_hidden_final_norm"][:, :-1]
    for i, (logits, _) in enumerate(steps(session, rows, t["in/step_tokens"])):
        yield f"cfg_logits_{i}", guided(logits, c["cfg_scale"])[:, 0], t[f"out/cfg_logits_{i}"].reshape(rows, -1)
        if i == 0:
            yield "probs_0", sampling.probs(guided(logits, c["cfg_scale"]))[:, 0], t["out/probs_0"].reshape(rows, -1)
        else:
            yield f"step_logits_{i}", logits[:, 0]
    cached_keys = session.cache.k[0][:, :, : before + tokens.shape[1]]
    yield "kcache_layer0", cached_keys, t["out/kcache_layer0"][:, : cached_keys.shape[1], : cached_keys.shape[2]]
    yield "greedy_tokens", greedy(model, conditioning, c)


def llamagen_c2i(t: Tensors, c: Config) -> Compared:
    """One pass without a cache, and the cached steps and greedy images if the golden has them."""
    model = load(lambda: LlamaGen(config(c)), weights(t), naming.llamagen(c["n_layer"], text=False))
    labels, tokens = t["in/labels"], t["in/step_tokens"]
    conditioning = ClassConditioning(labels)
    if "out/freqs_cis" in t:  # a session's prefix has one zero row more
        yield "freqs_cis", model.rope(0, 0)[1 : 1 + len(t["out/freqs_cis"])]
    hidden = model.uncached(model.condition(conditioning, True), torch.cat([tokens, tokens]))
    logits = model.head(hidden[:, 1:])
    yield "uncached_logits", logits
    yield "uncached_cfg_logits", guided(logits, c["cfg_scale"])
    if "out/cached_logits" in t:
        cached_length = t["out/cached_logits"].shape[1] - 1
        yield "cached_logits", cached(model, conditioning, tokens[:, :cached_length])[0]
    if "out/greedy_tokens" in t:
        yield "greedy_tokens", greedy(model, conditioning, c)


def llamagen_hf_lantern(t: Tensors, c: Config) -> Compared:
    """LANTERN's layout, and the hidden states of padding that its drafters read."""
    cfg = from_lantern(c)
    model = load(lambda: LlamaGen(cfg), weights(t), naming.lantern_llamagen(cfg.n_layer, cfg.block))
    model.pads_see_all = True
    valid = t["in/left_mask"].bool()
    rows = len(valid)
    session = model.open(Conditioning(t["in/left_features"], valid), rows, True, 1)
    yield "prefill_hidden_all", session.prefix_hidden, t["out/prefill_hidden_all"][:, :-1]
    wanted = t["out/prefill_hidden_valid"][:, :-1]
    yield "prefill_hidden_valid", session.prefix_hidden[:, -wanted.shape[1] :], wanted
    for i, (logits, hidden) in enumerate(steps(session, rows, t["in/step_tokens"])):
        name = f"step_logits_{i}" if i else "prefill_logits_last"
        yield name, logits[:, 0]
        yield f"cfg_logits_{i}", guided(logits, c["cfg_scale"])[:, 0]
        if i:
            yield f"step_hidden_{i}", hidden
        else:
            yield "prefill_hidden_last", hidden, t["out/prefill_hidden_all"][:, -1:]


CHECKS = {
    "llamagen_t2i": llamagen_t2i,
    "llamagen_c2i": llamagen_c2i,
    "llamagen_c2i_gqa": llamagen_c2i,
    "llamagen_hf_lantern": llamagen_hf_lantern,
}
