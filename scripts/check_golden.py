"""Compare the project's implementation with a golden: `python scripts/check_golden.py GOLDEN.json [...]`.

A golden is a .json (configuration, tolerance) beside a .safetensors (`param/*` official weights, `in/*`, `out/*`).
Prints the largest error of each compared output; exits 1 where one is beyond the stated tolerance, 2 where a file is
unusable.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specbench.decoding import rules, trees
from specbench.decoding.rules.lantern import Lantern
from specbench.decoding.sampling import Sampling, Streams
from specbench.decoding.verify import VERIFY, Draft, Verdict, verify
from specbench.errors import UsageError, unknown
from specbench.models import checkpoints
from specbench.models.eagle import Eagle, EagleConfig
from specbench.models.llamagen import Conditioning, LlamaGen, LlamaGenConfig
from specbench.models.vq import VQConfig, VQModel

Tensors = dict[str, Tensor]
#: (name of the output, ours, the golden's)
Compared = Iterator[tuple[str, Tensor, Tensor]]


def weights(t: Tensors) -> Tensors:
    return {k.removeprefix("param/"): v.float() for k, v in t.items() if k.startswith("param/")}


def llamagen_t2i(t: Tensors, c: dict[str, Any]) -> Compared:
    """Prefill and decode steps through the cache, guidance, and the filters."""
    model = LlamaGen(
        LlamaGenConfig(
            dim=c["dim"],
            n_layer=c["n_layer"],
            n_head=c["n_head"],
            n_kv_head=c["n_kv_head"],
            ffn_hidden=c["ffn_hidden"],
            vocab_size=c["vocab_size"],
            cls_token_num=c["cls_token_num"],
            caption_dim=c["caption_dim"],
            block_size=c["block_size"],
            rope_base=c["rope_base"],
            norm_eps=c["norm_eps"],
        )
    )
    checkpoints.fill(model, weights(t), "golden")
    rows = len(t["out/left_mask"])
    session = model.open(Conditioning(t["out/left_features"], t["out/left_mask"].bool()), rows, True, 1)
    sampling = Sampling(c["temperature"], c["top_k"], 1.0, c["cfg_scale"])
    yield "freqs_cis", model.rope()[: len(t["out/freqs_cis"])], t["out/freqs_cis"]
    yield "prefill_hidden_final_norm", session.prefix_hidden, t["out/prefill_hidden_final_norm"][:, :-1]
    history, empty = t["in/step_tokens"], trees.build([])
    for step in range(history.shape[1] + 1):
        tokens = history[:, max(0, step - 1) : max(1, step)]
        logits, _ = session.forward(tokens, empty, history, torch.full((rows,), step))
        yield f"cfg_logits_{step}", sampling.mix(logits)[:, 0], t[f"out/cfg_logits_{step}"].reshape(rows, -1)
        if step == 0:
            yield "probs_0", sampling.law(sampling.mix(logits))[:, 0], t["out/probs_0"].reshape(rows, -1)


def llamagen_vq(t: Tensors, c: dict[str, Any]) -> Compared:
    names = ("ch", "num_res_blocks", "z_channels", "codebook_size", "codebook_embed_dim")
    vq = VQModel(VQConfig(ch_mult=tuple(c["ch_mult"]), norm_groups=c["groupnorm_groups"], **{n: c[n] for n in names}))
    checkpoints.fill(vq, weights(t), "golden")
    yield "decoded", vq.decode(t["in/codes"]), t["out/decoded"]
    yield "pre_quant", vq.pre_quant(t["in/image"]), t["out/pre_quant"]
    yield "encoder_indices", vq.encode(t["in/image"]).flatten(), t["out/encoder_indices"]


def eagle_drafter_llamagen(t: Tensors, c: dict[str, Any]) -> Compared:
    """The prefix pass and a chain of three draft steps, in LANTERN's tensor names."""
    w = weights(t)
    prefix = c["rope_condition_rows"] + 1
    eagle = Eagle(
        EagleConfig(
            dim=c["hidden_size"],
            n_head=c["num_attention_heads"],
            ffn_hidden=c["intermediate_size"],
            vocab_size=c["vocab_size"],
            cls_token_num=prefix,
            block_size=c["block_size"],
            rope_base=c["rope_base"],
            norm_eps=c["rms_norm_eps"],
        )
    )
    attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
    renamed = {
        "layers.0.attention.wqkv.weight": torch.cat([w[f"{attention}{x}_proj.weight"] for x in "qkv"]),
        "layers.0.attention.wo.weight": w[attention + "o_proj.weight"],
        "layers.0.feed_forward.w1.weight": w[mlp + "gate_proj.weight"],
        "layers.0.feed_forward.w3.weight": w[mlp + "up_proj.weight"],
        "layers.0.feed_forward.w2.weight": w[mlp + "down_proj.weight"],
        "layers.0.ffn_norm.weight": w["layers.0.post_attention_layernorm.weight"],
    }
    checkpoints.fill(eagle, renamed | {k: w[k] for k in ("embed_tokens.weight", "fc.weight", "fc.bias")}, "golden")
    rows, known = t["in/hidden"].shape[:2]
    cache = eagle.new_cache(rows, known + 3)
    keys = torch.arange(cache.slots)

    def feed(tokens: Tensor, hidden: Tensor, first: int) -> Tensor:
        places = (first + torch.arange(tokens.shape[1])).expand(rows, -1)
        return eagle.hidden(tokens, hidden, places, (keys <= places.unsqueeze(-1)).unsqueeze(1), cache, places)

    out = feed(t["in/ids"][:, 1:], t["in/hidden"], 0)
    yield "prefix_hidden", out, t["out/prefix_hidden"]
    hidden, mix = out[:, -1:], Sampling(cfg_scale=c["cfg_scale"]).mix
    for i in range(4):
        yield f"chain_logits_{i}", mix(hidden @ w["lm_head.weight"].T)[:, 0], t[f"out/chain_logits_{i}"]
        if i < 3:
            hidden = feed(t["out/chain_tokens"][:, i : i + 1].expand(rows, -1), hidden, known + i)
            yield f"chain_hidden_{i + 1}", hidden, t[f"out/chain_hidden_{i + 1}"]


def lantern_static_trees(t: Tensors, c: dict[str, Any]) -> Compared:
    """Ancestor masks and depths of the named trees, in the released node order (by depth, then by path)."""
    for name in trees.NAMED:
        tree = trees.build(trees.parse(name))
        yield f"{name}/attn_mask", tree.ancestors[0].int(), t[f"{name}/attn_mask"].int()
        yield f"{name}/position_ids", tree.depth[0], t[f"{name}/position_ids"]


class Given(Streams):
    """Streams whose numbers for verification (B, M), one a node, are given."""

    def __init__(self, numbers: Tensor) -> None:
        super().__init__([(0, 0)] * len(numbers))
        self.numbers = numbers

    def uniform(self, step: Tensor, purpose: int, *shape: int) -> Tensor:
        return self.numbers if purpose == VERIFY else super().uniform(step, purpose, *shape)


def verify_in_order(p: Tensor, draft: Draft, rule: rules.Rule, numbers: Tensor) -> tuple[Verdict, int]:
    """The verdict of one row where the candidates use up the numbers (*,) in the order in which they are tried, as in
    the official code, and how many were used.

    A round a depth: the children of the node reached so far get the next numbers, and `verify` says which of them is
    kept. Nodes that were not reached hold the number 1, with which nothing is kept.
    """
    placed = torch.ones(p.shape[:2], dtype=numbers.dtype)
    node = used = depth = 0
    while True:
        children = [c for c in draft.tree.children[0, node].tolist() if c >= 0]
        placed[0, children] = numbers[used : used + len(children)]
        verdict = verify(p, draft, rule, Given(placed), torch.zeros(1).long())
        if int(verdict.length) == depth:
            return verdict, used + len(children)
        node = int(verdict.path[0, depth])
        used += children.index(node) + 1
        depth += 1


def released_rule(near: Tensor, param: dict[str, Any], greedy: bool) -> rules.Rule:
    """What LANTERN's code does with its parameters: a delta above 1 is LANTERN++'s lambda."""
    if not param["relaxed"]:
        return rules.exact()
    name, bound = ("lantern", "tvd") if param["delta"] <= 1 else ("lantern_pp", "total")
    return Lantern(name, near, param["k"], bound, param["delta"], "released", greedy)


def lantern_acceptance(t: Tensors, c: dict[str, Any]) -> Compared:
    """LANTERN's rules on a tree: accepted tokens, the numbers used for them, and the law of the token that follows.

    `sequential` tries chosen candidates, `static` candidates drawn without replacement, `greedy` takes the longest row.
    """
    parent, rows = t["in/node_parent"].clamp_min(0)[None], t["in/retrieve_indices"]
    tree = trees.from_parents(parent, t["in/node_rank"][None], int(t["in/node_rank"].max()) + 1, rows.shape[1] - 1)
    drafted = torch.arange(1, tree.nodes)
    for case, (name, param) in itertools.product(range(c["cases"]), c["params"].items()):
        tokens, logits = t[f"in/case{case}/node_tokens"][None], t[f"in/case{case}/node_logits"][None]
        laws = torch.zeros_like(logits)  # leaves have no children, and so no law
        laws[0, parent[0, drafted]] = t[f"in/case{case}/draft_probs"][t["in/node_draft_row"][drafted]]
        for mode in ("sequential", "static", "greedy"):
            draft = Draft(tree, tokens, laws, torch.ones_like(tokens, dtype=torch.bool))
            draft.drawn = torch.full_like(draft.valid, mode == "static")
            rule = released_rule(t["in/nearest"], param, greedy=mode == "greedy")
            if mode == "greedy":
                p, judged = Sampling(temperature=0).law(logits), logits.softmax(-1) if rule.soft else None
                verdict, used = verify(p, draft, rule, Streams([(0, 0)]), torch.zeros(1).long(), judged), 0
            else:
                p = Sampling(c["temperature"], None, c.get("top_p", 1.0)).law(logits)
                p = Sampling(top_k=c["top_k"]).law(p.log())  # LANTERN filters by top-p first
                verdict, used = verify_in_order(p, draft, rule, t[f"in/case{case}/uniforms"])
            length = int(verdict.length)
            path = torch.cat([torch.zeros(1, dtype=torch.int64), verdict.path[0, :length]])
            row = int((rows[:, : length + 1] == path).all(1).int().argmax())  # the first that goes along the path
            out = f"case{case}/{name}/{mode}"
            yield f"{out}/result", torch.tensor([row, length, used]), t[f"out/{out}/result"]
            yield f"{out}/accepted", tokens[0, path], t[f"out/{out}/accepted"]
            if mode != "greedy":
                yield f"{out}/next_probs", verdict.law[0], t[f"out/{out}/next_probs"]


CHECKS: dict[str, Callable[[Tensors, dict[str, Any]], Compared]] = {
    "llamagen_t2i": llamagen_t2i,
    "llamagen_vq": llamagen_vq,
    "eagle_drafter_llamagen": eagle_drafter_llamagen,
    "lantern_static_trees": lantern_static_trees,
    "lantern_acceptance": lantern_acceptance,
}


@torch.inference_mode()
def check(path: Path) -> bool:
    """Print the largest error of each output of a golden; whether all are within its tolerance."""
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        tensors = load_file(path.with_suffix(".safetensors"))
    except (OSError, ValueError, SafetensorError) as e:
        raise UsageError(f"cannot read the golden {path} and its .safetensors ({e})") from e
    if meta.get("name") not in CHECKS:
        raise unknown("golden", str(meta.get("name")), CHECKS)
    atol, rtol = meta.get("suggested_atol", 0.0), meta.get("suggested_rtol", 0.0)
    good = True
    for name, ours, theirs in CHECKS[meta["name"]](tensors, meta.get("config", {})):
        if ours.shape != theirs.shape:
            print(f"{name:32s} shape {list(ours.shape)}, expected {list(theirs.shape)}")
            good = False
            continue
        error = (ours.double() - theirs.double()).abs()
        fine = bool((error <= atol + rtol * theirs.double().abs()).all())
        print(f"{name:32s} largest error {float(error.max()):.2e}{'' if fine else '  BEYOND THE TOLERANCE'}")
        good &= fine
    return good


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("golden", nargs="+", type=Path)
    try:
        results = [check(path) for path in parser.parse_args(argv).golden]  # all are shown, also after a bad one
        return 0 if all(results) else 1
    except UsageError as e:
        print(f"check_golden: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
