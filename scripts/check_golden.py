"""Compare the project's implementation with a golden: `python scripts/check_golden.py GOLDEN.json [...]`.

A golden is a .json (configuration, tolerance) with a .safetensors (`param/*` official weights, `in/*`, `out/*`).
Prints the largest error of each compared output; exits 1 where one is beyond the stated tolerance, 2 where a file is
unusable.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from goldens.common import Compared, Tensors
from safetensors import SafetensorError
from safetensors.torch import load_file

from specbench.errors import UsageError, unknown

FAMILIES = ("llamagen", "language", "janus", "eagle", "lantern", "mar", "pixels")
CHECKS: dict[str, Callable[[Tensors, dict[str, Any]], Compared]] = {
    name: check for family in FAMILIES for name, check in importlib.import_module(f"goldens.{family}").CHECKS.items()
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
    parser.add_argument("golden", nargs="*", type=Path)
    parser.add_argument("--list", action="store_true", help="print the names of the goldens that can be compared")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(CHECKS))
        return 0
    try:
        if not args.golden:
            raise UsageError("name a golden: python scripts/check_golden.py GOLDEN.json [...], or --list")
        results = [check(path) for path in args.golden]  # all are shown, also after a bad one
        return 0 if all(results) else 1
    except UsageError as e:
        print(f"check_golden: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
