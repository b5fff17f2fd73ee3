"""Every fused kernel, compiled as the steps of the real sizes start it. Needs no device, and TRITON_INTERPRET unset.

What is compiled is not listed: real steps are done on tensors without values, and every start of a kernel gives what
Triton would specialise on: types, sizes of 1, and whether pointers and integers are divisible by 16.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from gpu_checks import models, results
from specbench.decoding.loop import DecoderConfig, Decoding
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules import Mentored, Rule, exact
from specbench.decoding.rules.lantern import Lantern
from specbench.decoding.rules.typical import Typical
from specbench.decoding.trees import Path, build, chain_paths, parse
from specbench.decoding.verify import Draft, TokenWise, Verification
from specbench.decoding.verify.block import BlockVerification
from specbench.decoding.verify.selected import Selected
from specbench.decoding.verify.traversal import Traversal
from specbench.engine.kernels import FusedKernels, launch

_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
#: Without these ptxas reports nothing, or not again.
_REPORTING = {"TRITON_DUMP_PTXAS_LOG": "1", "TRITON_ALWAYS_COMPILE": "1"}
#: Bytes of shared memory that a program can have, by compute capability.
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


@dataclass(frozen=True)
class Specialisation:
    """A kernel by module and name; the types of its arguments in order, "constexpr" for constants; these constants;
    which arguments are divisible by 16; options of the compiler."""

    module: str
    kernel: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def label(self) -> str:
        kinds = sorted({kind for _, kind in self.types if (kind.startswith("*") and "p" in kind) or "bf" in kind})
        given = " ".join(f"{name}={value}" for name, value in (*self.constants, *self.options))
        return f"{self.kernel} {','.join(kinds)} {given}"


def specialised(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Specialisation:
    """Of a start with these arguments."""
    names = kernel.arg_names
    given = dict(zip(names, arguments)) | {name: x for name, x in options.items() if name in names}
    types, constants, divisible = [], [], []
    for parameter in kernel.params:
        x = given.get(parameter.name, parameter.default)
        plain = not parameter.do_not_specialize
        if parameter.is_constexpr or x is None or (plain and isinstance(x, int) and not isinstance(x, bool) and x == 1):
            types.append((parameter.name, "constexpr"))
            constants.append((parameter.name, x))
            continue
        aligned = False
        if isinstance(x, Tensor):
            kind = "*" + _TYPES[x.dtype]
            aligned = x.storage_offset() * x.element_size() % 16 == 0
        elif isinstance(x, bool):
            kind = "u1"
        elif isinstance(x, int):
            kind, aligned = "i32" if -(2**31) <= x < 2**31 else "i64", x % 16 == 0
        else:
            kind = "fp32"
        types.append((parameter.name, kind))
        if aligned and plain:
            divisible.append(parameter.name)
    rest = tuple(sorted((name, x) for name, x in options.items() if name not in names))
    module = kernel.__module__ if isinstance(kernel.__module__, str) else kernel.fn.__module__
    return Specialisation(module, kernel.__name__, tuple(types), tuple(constants), tuple(divisible), rest)


#: Target, drafter, length of a window, images, format: whose steps start every kernel in every way that matters.
STEPS = (
    *(("xl", name, 0, 1, torch.bfloat16) for name in (*models.DRAFTERS, "pjd")),
    *(("xl", name, 0, 1, torch.float32) for name in ("none", "tree", "sjd")),
    *(("xl", name, 0, 4, torch.bfloat16) for name in ("none", "tree")),
    *(("7b", name, 0, 1, torch.bfloat16) for name in ("none", "tree", "eagle2", "sjd", "scd")),
    *(("7b", name, 64, 1, torch.bfloat16) for name in ("sjd", "sjd_pac")),
    *(("7b", name, 0, 1, torch.float32) for name in ("none", "sjd")),
    *(("emu3", name, 0, 1, torch.bfloat16) for name in ("none", "sjd")),
)
#: Those of which a quick look consists: every kernel, both formats, heads of 64 and 128, grouped heads.
FEW = (
    ("xl", "tree", 0, 1, torch.bfloat16),
    ("7b", "sjd_pac", 64, 1, torch.bfloat16),
    ("emu3", "none", 0, 1, torch.bfloat16),
    ("7b", "none", 0, 1, torch.float32),
    ("xl", "none", 0, 1, torch.bfloat16),
    ("xl", "vvs", 0, 1, torch.bfloat16),
    ("xl", "pjd", 0, 1, torch.bfloat16),
)


def started(steps: Any = STEPS, dependent: bool = True) -> list[Specialisation]:
    """The kernels that some steps start; dependent: where kernels can begin before the one in front of them ends."""
    found: dict[Specialisation, None] = {}

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found[specialised(kernel, arguments, options)] = None

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(launch, "can_depend", return_value=dependent, create=True),
    ):
        for case in steps:
            step_on_shapes(*case)
        verify_on_shapes(BlockVerification(), chain_paths(5), 16384)
        for replacement, tree in ((True, parse("mc_sim_7b_63")), (False, parse("2-2-2"))):
            verify_on_shapes(Selected(), tree, 16384, replacement)
        for rule in rules_on_shapes(16384):
            verify_on_shapes(TokenWise(), parse("mc_sim_7b_63"), 16384, rule=rule)
    return list(found)


def rules_on_shapes(vocabulary: int) -> list[Rule]:
    """Rules that start the kernels of token-wise verification in other ways than the exact one, on the meta device. The
    last one needs most registers."""
    near = torch.empty(vocabulary, 1001, dtype=torch.int64, device="meta")
    return [
        Typical(),
        Lantern("lantern", near, 1000, "tvd", 0.1, greedy=True),
        Lantern("lantern", near, 1000, "tvd", 0.1),
        Lantern("lantern", near, 1000, "jsd", 0.1, "released"),
        Lantern("lantern_pp", near[:, :11], 10, "total", 2.0, "released_p"),
        Mentored(0.05),
    ]


def verify_on_shapes(
    way: Verification, paths: list[Path], vocabulary: int, replacement: bool = False, rule: Rule | None = None
) -> None:
    """The verification of a draft, on the meta device; rule: the exact one where it is None."""
    tree, rule = build(paths).to("meta"), rule or exact()
    tokens = torch.zeros(1, tree.nodes, dtype=torch.int64, device="meta")
    p, valid = torch.empty(1, tree.nodes, vocabulary, device="meta"), torch.empty_like(tokens, dtype=torch.bool)
    draft = Draft(tree, tokens, p[:, : tree.inner.shape[1]], valid, replacement=replacement)
    step, rng = tokens[:, 0], RandomStreams([(0, 0)], "meta")
    rng.kernels = FusedKernels()
    rule.open(step.device)
    way.verify(p, draft, rule, rng, step, kernels=rng.kernels)


def step_on_shapes(name: str, drafter: str, window: int, images: int, dtype: torch.dtype) -> None:
    """The first step of a target of two layers, on the meta device: tensors without values. A tree is verified token by
    token and by traversal."""
    with torch.no_grad():
        network = models.target(name, "meta", dtype, 2)
        drafting = models.drafter(drafter, network, "meta", dtype, window=window)
        given = models.conditioning(name, images, "meta", dtype)
        rng = RandomStreams([(0, i) for i in range(images)], "meta")
        ways: list[Verification] = [TokenWise()]
        shape = drafting.shape
        if not (shape.tree.is_chain or shape.carries_over or shape.skips):
            ways.append(Traversal())
        for way in ways:
            config = DecoderConfig(network, drafting, exact(), models.SAMPLING[name], verification=way)
            decoding = Decoding(config, given, rng, kernels=FusedKernels())
            decoding.step()
            getattr(decoding, "observe", lambda: None)()


def compiled(one: Specialisation, capability: int) -> dict[str, Any]:
    """What ptxas reports: {"kernel", "label", "capability", "registers", "spills" and "shared" in bytes, "copies":
    asynchronous copies, "seconds"}, or "error", or "unknown" where this ptxas does not know the capability."""
    kernel = _kernel(one)
    at = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    constants = {at[name]: value for name, value in one.constants}
    attributes = {at[name]: [["tt.divisibility", 16]] for name in one.divisible}
    row: dict[str, Any] = {"kernel": one.kernel, "label": one.label, "capability": capability}
    began, log = time.perf_counter(), io.StringIO()
    try:
        source = ASTSource(kernel, dict(one.types), constants, attributes)
        with contextlib.redirect_stdout(log):
            done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(one.options))
    except Exception as e:
        message = f"{type(e).__name__}: {e} {log.getvalue()}"
        return {**row, ("unknown" if "is not defined for option 'gpu-name'" in message else "error"): message[:500]}
    report = log.getvalue()
    used = re.search(r"Used (\d+) registers", report)
    assert used is not None, "ptxas reported nothing"
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    ptx = done.asm["ptx"]
    return {
        **row,
        "registers": int(used.group(1)),
        "spills": sum(map(int, spilled)),
        "shared": int(done.metadata.shared),
        "copies": len(re.findall(r"cp\.async\.c[ag]|cp\.async\.bulk", ptx)),
        "seconds": round(time.perf_counter() - began, 2),
    }


def all_compiled(jobs: list[tuple[Specialisation, int]], workers: int) -> Iterator[dict[str, Any]]:
    """`compiled` of all jobs, in some processes, copies of this one, which has used no device; as they come."""
    os.environ |= _REPORTING
    with ProcessPoolExecutor(workers, get_context("fork")) as pool:
        yield from pool.map(compiled, *zip(*jobs, strict=True))


def faults(row: dict[str, Any]) -> list[str]:
    """What a report breaks: no register may be spilled, and shared memory must suffice."""
    if "error" in row or "unknown" in row:
        return [row["error"]] if "error" in row else []
    found = [f"{row['spills']} bytes spilled"] if row["spills"] else []
    most = SHARED.get(row["capability"], min(SHARED.values()))
    return found + ([f"{row['shared']} bytes of shared memory, at most {most}"] if row["shared"] > most else [])


def jobs() -> list[tuple[Specialisation, int]]:
    """A quick look: some steps for Hopper, and one specialisation of each of their kernels for the others."""
    other = [(one, c) for c in (80, 100) for one in {one.kernel: one for one in started(FEW, c >= 90)}.values()]
    return [*((one, 90) for one in _extremes(started(FEW))), *other]


def _extremes(some: list[Specialisation]) -> list[Specialisation]:
    """Of specialisations of a kernel that differ only in what is known of sizes, the one of which least is known, which
    needs most registers, and the one of which most is: there a size of 1 is a constant."""
    alike: dict[Any, list[Specialisation]] = {}
    for one in some:
        constant = {parameter.name for parameter in _kernel(one).params if parameter.is_constexpr}
        pointers = tuple(kind for _, kind in one.types if kind.startswith("*"))
        key = one.kernel, pointers, tuple(c for c in one.constants if c[0] in constant), one.options
        alike.setdefault(key, []).append(one)
    chosen = [
        end(group, key=lambda one: len(one.constants + one.divisible)) for group in alike.values() for end in (min, max)
    ]
    return list(dict.fromkeys(chosen))


def _kernel(one: Specialisation) -> Any:
    return getattr(import_module(one.module), one.kernel)


def checks(cuda: bool, fast: bool) -> Iterator[results.Check]:
    """For this device, or for Hopper where there is none."""
    os.environ |= _REPORTING
    major, minor = torch.cuda.get_device_capability() if cuda else (9, 0)
    capability = 10 * major + minor
    some = started(FEW[:1] if fast else STEPS, capability >= 90)
    if fast:
        yield from ((one.label, partial(lambda x: _checked(compiled(x, capability)), one)) for one in some[:3])
        return
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), get_context("spawn")) as pool:
        futures = [(one.label, pool.submit(compiled, one, capability)) for one in some]
        for label, future in futures:
            yield label, lambda future=future: _checked(future.result())


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    found = faults(row)
    return {**row, "ok": not found, "compile_seconds": row.pop("seconds", None)} | (
        {"note": "; ".join(found)} if found else {}
    )


def main() -> None:
    """A JSON line for each specialisation."""
    for row in all_compiled(jobs(), 2):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
