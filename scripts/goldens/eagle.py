"""LANTERN's EAGLE drafters: prefix and chain, dynamic and static trees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from goldens.common import Compared, Config, Tensors, fixed, guided, in_order, load, paths, weights
from specbench.decoding.drafters.dynamic import Eagle2
from specbench.decoding.drafters.eagle import Eagle as Eagle1
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import parse
from specbench.engine.ops import KVCache
from specbench.errors import UsageError
from specbench.models.eagle import EagleConfig, EagleNetwork
from specbench.models.language import LanguageSession, Prefix
from specbench.models.loading import naming


def drafter(t: Tensors, c: Config) -> EagleNetwork:
    grid = "rope_condition_rows" in c
    fixed(c, qk_norm_eps=1e-5)
    cfg = EagleConfig(
        dim=c["hidden_size"],
        n_head=c["num_attention_heads"],
        ffn_hidden=c["intermediate_size"],
        vocab_size=c["vocab_size"],
        cls_token_num=c["rope_condition_rows"] + 1 if grid else 0,
        block_size=c["block_size"] if grid else 0,
        rope_base=c["rope_base" if grid else "rope_theta"],
        norm_eps=c["rms_norm_eps"],
        n_kv_head=c["num_key_value_heads"],
        input_norm=not grid,
        qk_norm=0 if grid else c.get("model_parallel_size", c["num_attention_heads"]),
        n_layer=c["num_hidden_layers"],
        fc_bias=c["fc_bias"],
    )
    params = {name: value for name, value in weights(t).items() if name != "lm_head.weight"}  # the target's
    return load(lambda: EagleNetwork(cfg), params, naming.eagle(cfg.block, cfg.input_norm, cfg.n_layer, cfg.fc_bias))


class Chain:
    """Feeds entries in order, to all rows at once; entries may attend to the slots in `usable` (rows, slots)."""

    def __init__(self, eagle: EagleNetwork, usable: Tensor, padding: Tensor) -> None:
        self.eagle, self.usable, self.padding = eagle, usable, padding
        eagle.rope(usable.shape[1])
        self.cache: KVCache = eagle.new_cache(*usable.shape)
        self.keys = torch.arange(usable.shape[1])

    def feed(self, ids: Tensor, hidden: Tensor, first: int) -> Tensor:
        entries = (first + torch.arange(ids.shape[1])).expand(len(ids), -1)
        slots = entries.unsqueeze(-1)
        mask = ((self.keys <= slots) & self.usable.unsqueeze(1)) | (self.keys == slots)
        rope = self.eagle.rope_at(entries, self.padding)
        return self.eagle.hidden(ids, hidden, rope, mask.unsqueeze(1), self.cache, entries)


def prefix_and_chain(t: Tensors, c: Config) -> Compared:
    """The prefix pass and a chain of draft steps: rows are B guided images, then their unconditional streams."""
    eagle, head = drafter(t, c), weights(t)["lm_head.weight"]
    rows, length = t["in/hidden"].shape[:2]
    drawn = t["out/chain_tokens"]  # (B, steps + 1)
    usable = torch.ones(rows, length + drawn.shape[1] - 1, dtype=torch.bool)
    padding = torch.zeros(rows, 1, dtype=torch.int64)
    if "in/attention_mask" in t:
        attended = t["in/attention_mask"].bool()
        usable[:, : attended.shape[1]] = attended
        padding = (~attended).sum(1, keepdim=True)
        if not bool((padding[rows // 2 :] == c["unconditional_position_shift"]).all()):
            raise UsageError("the golden's padding and its unconditional_position_shift differ")
    chain = Chain(eagle, usable, padding)
    out = chain.feed(t["in/ids"][:, 1:], t["in/hidden"], 0)
    usable_hidden = usable[:, :length].unsqueeze(-1)
    if "in/attention_mask" in t:  # the row with padding is known from the successor of the last padded entry
        usable_hidden = torch.arange(length)[None, :, None] >= padding.unsqueeze(-1)
    yield "prefix_hidden", out * usable_hidden, t["out/prefix_hidden"] * usable_hidden
    hidden = out[:, -1:]
    for i in range(drawn.shape[1]):
        logits = guided(hidden @ head.T, c["cfg_scale"])[:, 0]
        yield f"chain_logits_{i}", logits
        yield f"chain_tokens of step {i}", logits.argmax(-1), drawn[:, i]
        if i + 1 < drawn.shape[1]:
            hidden = chain.feed(drawn[:, i : i + 1].repeat(2, 1), hidden, length + i)
            yield f"chain_hidden_{i + 1}", hidden


class Recorded(LanguageSession):
    """A session with recorded hidden states of the target (R, L, dim) and ids (R, L + 1): one token after a prefix."""

    def __init__(self, hidden: Tensor, ids: Tensor, head: Tensor, length: int) -> None:
        known_length = hidden.shape[1]
        self.prefix = Prefix(hidden, torch.ones(hidden.shape[:2], dtype=torch.bool), ids[:, :known_length])
        self.guided, self.prefix_length, self.length = True, known_length, length
        self.padding = torch.zeros_like(ids[:, :1])
        self.prefix_hidden = hidden[:, :-1]
        self.model: Any = SimpleNamespace(head=lambda h: h @ head.T, ids=lambda tokens: tokens)
        self.seen: list[Tensor] = []

    def constrain(self, logits: Tensor, positions: Tensor) -> Tensor:
        self.seen.append(logits)
        return logits


def trees(t: Tensors, c: Config) -> Compared:
    """The dynamic tree with its rounds, and the candidates of the static one, with greedy drafting."""
    head, hidden, ids = weights(t)["lm_head.weight"], t["in/hidden"], t["in/ids"]
    images, prefix_length = len(hidden) // 2, hidden.shape[1]
    sampling = Sampling(0.0, cfg_scale=c["cfg_scale"])
    rng, step = RandomStreams([(0, i) for i in range(images)]), torch.zeros(images, dtype=torch.int64)

    def opened(drafter: Eagle1 | Eagle2) -> Any:
        state = drafter.open(Recorded(hidden, ids, head, c["block_size"]), None, sampling, rng)
        state.pending[:, :2] = hidden[:, -2:]  # what the drafter has not been fed with yet
        state.fresh[:] = 1
        return state

    def tokens(all_ids: Tensor) -> tuple[Tensor, Tensor]:
        new = all_ids[:images, prefix_length:]
        return torch.nn.functional.pad(new, (0, 64)), torch.full((images,), new.shape[1])

    # the argument counts the levels after the first
    grown = Eagle2(drafter(t, c), c["nodes_kept"], c["depth"] + 1, c["top_k"])
    table, tail = grown.head.rope(), t["out/freqs_cis_tail"]
    first = c["rope_condition_rows"] - int((tail == 0).flatten(1).all(1).sum())  # it begins with some of the zero rows
    yield "freqs_cis_tail", table[first : first + len(tail)], tail
    state, fed_ids = opened(grown), ids
    rounds = [name.partition("_")[0] for name in t.named("round", "_ids_in")]
    for name in ("dyn", *rounds):
        if name != "dyn":
            fed, fed_ids = t[f"out/{name}_hidden_in"], t[f"out/{name}_ids_in"]
            state.pending[:, : fed.shape[1]] = fed
            state.fresh[:] = fed.shape[1] - 1
        draft = grown.propose(state, *tokens(fed_ids), step)
        yield f"{name}_draft_tokens", draft.tokens
        mask = draft.tree.ancestors.int()
        yield f"{name}_tree_mask", mask, t[f"out/{name}_tree_mask"][:, 0].int()
        depth = draft.tree.depth
        yield f"{name}_tree_position_ids", depth, t[f"out/{name}_tree_position_ids"].expand_as(depth)
        wanted = t[f"out/{name}_retrieve_indices"]
        for i in range(images):
            yield f"{name}_retrieve_indices", paths(draft.tree, i), in_order(wanted if wanted.dim() == 2 else wanted[i])
    static = Eagle1(drafter(t, c), parse("mc_sim_7b_63"))
    state = opened(static)
    static.propose(state, *tokens(ids), step)
    logits = torch.cat(state.session.seen, 1).flatten(0, 1)
    top = logits.topk(t["out/static_topk_tokens"].shape[-1], dim=-1)
    yield "static_topk_tokens", top.indices, t["out/static_topk_tokens"].flatten(0, -2)
    yield "static_topk_logits", top.values, t["out/static_topk_logits"].flatten(0, -2)


def llamagen(t: Tensors, c: Config) -> Compared:
    yield from prefix_and_chain(t, c)
    yield from trees(t, c)


CHECKS = {
    "eagle_drafter_llamagen": llamagen,
    "eagle_drafter_anole": prefix_and_chain,
    "eagle_drafter_lumina": prefix_and_chain,
}
