"""Compare the project's implementation with a golden: `python scripts/check_golden.py GOLDEN.json [...]`.

A golden is a .json (configuration, tolerance) with a .safetensors (`param/*` official weights, `in/*`, `out/*`). Sizes,
depths, batches and settings are the golden's own. Prints the largest error of each compared output; exits 1 where one
is beyond the stated tolerance, 2 where a file is unusable or holds a tensor that nothing here reads.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from goldens.common import Compared, Config, Tensors, read

from specbench.errors import UsageError, unknown

FAMILIES = ("llamagen", "language", "janus", "eagle", "lantern", "jacobi", "mar", "pixels")
CHECKS: dict[str, Callable[[Tensors, Config], Compared]] = {
    name: check for family in FAMILIES for name, check in importlib.import_module(f"goldens.{family}").CHECKS.items()
}
#: Tensors (whole names, regular expressions) with which nothing here is compared, and why.
NOT_COMPARED = {
    r"in/position_ids|out/(prefill|step)_position_ids.*": "the models count positions themselves",
    r"out/.*/checked": "at which positions the official processor was asked",
    r"out/topk_kept_(in|out)side_image": "a setting of the official command line",
    r"out/attn_mask": "the official code's mask, of a cache that it rounds up; the models here build none",
    r"out/dyn_cache_length": "how many entries the official drafter's cache keeps",
    r".*/tree_indices|.*/draft_(mask|select|repeat)_\d+": "tables by which the released drafter finds nodes",
    r"in/case\d+/node_q": "what in/draft_probs says, without the earlier siblings",
    r"out/greedy_pixels": "the tokenizer's weights are another golden's, which compares its pixels",
}


@torch.inference_mode()
def check(path: Path) -> bool:
    """Print the largest error of each output of a golden. Returns whether all are within its tolerance. Raises
    UsageError for a golden that is unusable, and for one with a tensor that no check reads."""
    meta, tensors = read(path)
    if meta.get("name") not in CHECKS:
        raise unknown("golden", str(meta.get("name")), CHECKS)
    atol, rtol = meta.get("suggested_atol", 0.0), meta.get("suggested_rtol", 0.0)
    good = True
    try:
        for name, ours, *alternative in CHECKS[meta["name"]](tensors, meta["config"]):
            expected = alternative[0] if alternative else tensors[f"out/{name}"]
            if ours.shape != expected.shape:
                print(f"{name:32s} shape {list(ours.shape)}, expected {list(expected.shape)}")
                good = False
                continue
            error = (ours.double() - expected.double()).abs()
            fine = bool((error <= atol + rtol * expected.double().abs()).all())
            print(f"{name:32s} largest error {float(error.max()):.2e}{'' if fine else '  BEYOND THE TOLERANCE'}")
            good &= fine
    except KeyError as e:
        raise UsageError(f"the golden {path} has no {e}") from e
    if rest := unread(tensors):
        raise UsageError(
            f"the golden {path} has {', '.join(rest)}, which the model here does not have, so that nothing compares it"
        )
    return good


def unread(tensors: Tensors) -> list[str]:
    """The names of the tensors that no check has read, except `NOT_COMPARED`."""
    not_compared = re.compile("|".join(f"(?:{pattern})" for pattern in NOT_COMPARED))
    return sorted(name for name in tensors if name not in tensors.read and not not_compared.fullmatch(name))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("golden", nargs="*", type=Path)
    parser.add_argument("--list", action="store_true", help="print the names of the goldens that can be compared")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(CHECKS))
        return 0
    worst = 0 if args.golden else 2
    if not args.golden:
        print(f"check_golden: name a golden, or --list\n{parser.format_usage()}", file=sys.stderr)
    for path in args.golden:  # all are shown, also after a bad one
        try:
            worst = max(worst, 0 if check(path) else 1)
        except UsageError as e:
            print(f"check_golden: {e}", file=sys.stderr)
            worst = 2
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
