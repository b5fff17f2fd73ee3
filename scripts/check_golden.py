"""Compare the project's implementation with a golden: `python scripts/check_golden.py GOLDEN.json [...]`.

A golden is a .json (configuration, tolerance) beside a .safetensors (`param/*` official weights, `in/*`, `out/*`).
Prints the largest error of each compared output; exits 1 where one is beyond the stated tolerance, 2 where a file is
unusable.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specbench.decoding import trees
from specbench.decoding.sampling import Sampling
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


CHECKS: dict[str, Callable[[Tensors, dict[str, Any]], Compared]] = {
    "llamagen_t2i": llamagen_t2i,
    "llamagen_vq": llamagen_vq,
    "eagle_drafter_llamagen": eagle_drafter_llamagen,
    "lantern_static_trees": lantern_static_trees,
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
