"""Every fused kernel, compiled as the steps of the real sizes start it. Needs no device, and TRITON_INTERPRET unset.

What is compiled is not listed: real steps are done on tensors without values, and every start of a kernel gives what
Triton would specialise on: types, sizes of 1, and whether pointers and integers are divisible by 16.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from gpu_checks import models, parity, speed
from specbench.decoding.loop import DecoderConfig, Decoding
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules import Mentored, Rule, exact
from specbench.decoding.rules.lantern import Lantern
from specbench.decoding.rules.thresholds import Typical
from specbench.decoding.trees import Path, build, chain_paths, parse
from specbench.decoding.verify import Draft, TokenWise, Verification
from specbench.decoding.verify.block import BlockVerification
from specbench.decoding.verify.traversal import Traversal
from specbench.engine.kernels import FusedKernels, launch

#: Without these ptxas reports nothing, or not again.
REPORTING = {"TRITON_DUMP_PTXAS_LOG": "1", "TRITON_ALWAYS_COMPILE": "1"}
#: Bytes of shared memory that a program can have, by compute capability.
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
#: Bytes that a thread may spill, by kernel, minor version of Triton and compute capability, None for all: a few
#: registers on a device for which there are no gates.
SPILLS: dict[tuple[str, str | None, int | None], int] = {("_attend", None, 120): 172, ("_probs", "3.6", 120): 40}

#: Constants with which a kernel does all that it does without them, and more.
ADDING = ("CUT", "GRAMMAR", "NORMED")
#: Constants that say how often something is done, not with how many numbers at a time.
TIMES = ("HEADS", "KV", "GROUP", "SPLITS", "UNROLL")
#: Kernels with matrix units.
MATRIX = ("_attend", "_many", "_many_qkv")
#: A kernel that depends on the device in every way: it has matrix units, and may begin before another has ended.
DEPENDING = "_many"


class NoDevice:
    """The values that Triton asks a driver for when it compiles: the target, and its number, which is the compute
    capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Specialisation:
    """A kernel by module and name, a compute capability, and the specialisation of a start, in the JSON of this version
    of Triton: types and constants of the arguments, the arguments that are divisible by 16, options."""

    module: str
    kernel: str
    capability: int
    start: str

    @property
    def function(self) -> JITFunction[Any]:
        return getattr(import_module(self.module), self.kernel)

    @property
    def types(self) -> dict[str, str]:
        """Types by argument, and by number within a tuple; "constexpr" for a constant, also for a size of 1."""
        types: dict[str, str] = {}
        for name, kind in json.loads(self.start)["signature"].items():
            parts = enumerate(kind) if isinstance(kind, list) else [("", kind)]
            types |= {f"{name}{number}": type_ for number, type_ in parts}
        return types

    def _by_argument(self, what: str) -> dict[str, Any]:
        start = json.loads(self.start)
        names, keys, values = list(start["signature"]), start[f"{what}_keys"], start[f"{what}_vals"]
        return {"".join([names[at], *map(str, within)]): x for (at, *within), x in zip(keys, values, strict=True)}

    @property
    def constants(self) -> dict[str, Any]:
        return self._by_argument("constant")

    @property
    def divisible(self) -> list[str]:
        """The arguments that are known to be divisible by 16."""
        return [name for name, known in self._by_argument("attrs").items() if known]

    @property
    def sizes_of_1(self) -> set[str]:
        return self.constants.keys() - {parameter.name for parameter in self.function.params if parameter.is_constexpr}

    @property
    def code(self) -> str:
        """What makes the kernel another one: the constants that are no sizes, and for matrix units the formats, since
        everything else is computed in float32."""
        sizes = {name for name, x in self.constants.items() if isinstance(x, int) and not isinstance(x, bool)}
        written = {name: x for name, x in self.constants.items() if name not in {*sizes, *ADDING, *self.sizes_of_1}}
        return repr((self.kernel, written, self.kernel in MATRIX and self.formats))

    @property
    def need(self) -> tuple[int, float, int]:
        """Grows with the registers that a thread needs: what the kernel also does, the numbers that a warp has at a
        time, and the sizes of which nothing is known."""
        constants = {name: x for name, x in self.constants.items() if name not in self.sizes_of_1}
        sizes = [x for name, x in constants.items() if isinstance(x, int) and name not in TIMES]
        return (
            sum(constants.get(name, False) for name in ADDING),
            math.prod(max(1, x) for x in sizes) / self.options["num_warps"],
            -len(self.sizes_of_1) - len(self.divisible),
        )

    @property
    def options(self) -> dict[str, Any]:
        return json.loads(self.start)["options"]

    @property
    def formats(self) -> list[str]:
        """The types of the arguments that are tensors of numbers."""
        return sorted({kind for kind in self.types.values() if kind.startswith("*") and "f" in kind})

    @property
    def label(self) -> str:
        options = {name: self.options[name] for name in ("num_warps", "num_stages")}
        described = " ".join(f"{name}={x}" for name, x in (self.constants | options).items() if x is not None)
        return f"{self.kernel} {','.join(self.formats)} {described}"


#: Target, drafter, length of a window, images, format: whose steps start every kernel in every way that matters.
STEPS = (
    *(("xl", name, 0, 1, torch.bfloat16) for name in models.DRAFTERS),
    *(("xl", name, 0, 1, torch.float32) for name in ("none", "tree", "sjd")),
    *(("xl", name, 0, 2, torch.bfloat16) for name in ("none", "tree")),
    *(("7b", name, 0, 1, torch.bfloat16) for name in ("none", "tree", "eagle2", "sjd", "scd")),
    *(("7b", name, 64, 1, torch.bfloat16) for name in ("sjd", "sjd_pac")),
    *(("7b", name, 0, 1, torch.float32) for name in ("none", "sjd")),
    *(("emu3", name, 0, 1, torch.bfloat16) for name in ("none", "sjd")),
)
#: The steps of a quick look: every kernel, attention in both formats, a rotation with each order of the numbers.
FEW = (
    ("xl", "tree", 0, 1, torch.bfloat16),
    ("7b", "sjd_pac", 64, 1, torch.bfloat16),
    ("7b", "none", 0, 1, torch.float32),
    ("xl", "none", 0, 1, torch.bfloat16),
    ("xl", "vvs", 0, 1, torch.bfloat16),
)


def started(work: Iterable[Callable[[], object]], capability: int = 90) -> list[Specialisation]:
    """The kernels that functions start on a device of this compute capability, without compiling them."""
    seen: dict[Specialisation, None] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002
        seen[Specialisation(fn.module, fn.name, capability, compile["specialization_data"])] = None
        return True

    driver.set_active(NoDevice(capability))
    with knobs.runtime.scope(), mock.patch.object(launch, "can_depend", return_value=capability >= 90):
        knobs.runtime.jit_cache_hook = note
        for function in work:
            function()
    return list(seen)


def steps(cases: Any = STEPS) -> list[Callable[[], None]]:
    """Steps at the real sizes, and other verifications."""
    verifications = (
        partial(verify_on_shapes, BlockVerification(), chain_paths(5), 16384),
        *(partial(verify_on_shapes, TokenWise(), parse("mc_sim_7b_63"), 16384, rule=x) for x in rules_on_shapes(16384)),
    )
    return [*_steps(cases), *verifications]


def _steps(cases: Iterable[Any]) -> list[Callable[[], None]]:
    return [partial(step_on_shapes, *case) for case in cases]


def later_steps() -> list[Callable[[], None]]:
    """The kernels that the tests of a device and the times start, so that they are compiled before."""
    passes = [partial(parity.pass_on_shapes, *case) for case in parity.passes()]
    methods = itertools.product(speed.TARGETS, speed.METHODS.values())
    timed = [partial(step_on_shapes, target, *case[:2], 1, torch.bfloat16, case[2]) for target, case in methods]
    return [*passes, *(partial(case_on_shapes, *case) for case in models.CASES.values()), *timed]


def case_on_shapes(target: str, drafter: str, rule: str, engine: str) -> None:
    """A step of one of `models.CASES`."""
    if engine == "triton":
        _first_step(*models.configured(target, drafter, rule, "meta"))


def _first_step(config: DecoderConfig, conditioning: Any) -> None:
    """The first step of a decoding with fused kernels on the meta device: tensors without values."""
    with torch.no_grad():
        rng = RandomStreams([(0, i) for i in range(len(conditioning))], "meta")
        decoding = Decoding(config, conditioning, rng, kernels=FusedKernels())
        decoding.step()
        decoding.record_stats()


def rules_on_shapes(vocabulary: int) -> list[Rule]:
    """Rules on the meta device that start the kernels of token-wise verification in other ways than the exact rule. The
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


def verify_on_shapes(verification: Verification, paths: list[Path], vocabulary: int, rule: Rule | None = None) -> None:
    """The verification of a draft on the meta device; rule: None means the exact rule."""
    tree, rule = build(paths).to("meta"), rule or exact()
    tokens = torch.zeros(1, tree.nodes, dtype=torch.int64, device="meta")
    p, valid = torch.empty(1, tree.nodes, vocabulary, device="meta"), torch.empty_like(tokens, dtype=torch.bool)
    draft = Draft(tree, tokens, p[:, : tree.inner.shape[1]], valid)
    step, rng = tokens[:, 0], RandomStreams([(0, 0)], "meta")
    rng.kernels = FusedKernels()
    rule.open(step.device)
    verification.verify(p, draft, rule, rng, step, kernels=rng.kernels)


def step_on_shapes(
    name: str, drafter: str, window: int, images: int, dtype: torch.dtype, rule: str | None = None
) -> None:
    """A step of a target of two layers. With the exact rule (None) a tree is verified token by token and by
    traversal."""
    network = models.target(name, "meta", dtype, 2)
    drafting = models.drafter(drafter, network, "meta", dtype, window=window)
    conditioning = models.conditioning(name, images, "meta", dtype)
    verifications: list[Verification] = [TokenWise()]
    shape = drafting.shape
    if not (rule or shape.tree.is_chain or shape.carries_over or shape.skips):
        verifications.append(Traversal())
    for verification in verifications:
        chosen = models.RULES[rule](network.vocab_size) if rule else exact()
        config = DecoderConfig(network, drafting, chosen, models.SAMPLING[name], verification=verification)
        _first_step(config, conditioning)


def compiled(spec: Specialisation) -> dict[str, Any]:
    """The report of ptxas: {"kernel", "label", "capability", "registers", "spills" and "shared" in bytes, "copies":
    asynchronous copies, "scalars": loads of one number of 16 or 32 bits, "seconds"}, or "error", or "unknown" if this
    ptxas does not know the capability. The binary is then in Triton's cache, where the recorded start finds it."""
    row: dict[str, Any] = {"kernel": spec.kernel, "label": spec.label, "capability": spec.capability}
    began, log = time.perf_counter(), io.StringIO()
    driver.set_active(NoDevice(spec.capability))
    try:
        with contextlib.redirect_stdout(log):
            done = spec.function.preload(spec.start)
    except Exception as e:
        message = f"{type(e).__name__}: {e} {log.getvalue()}"
        return {**row, ("unknown" if "is not defined for option 'gpu-name'" in message else "error"): message[:500]}
    report = log.getvalue()
    used = re.search(r"Used (\d+) registers", report)
    assert used is not None, "ptxas reported nothing"
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    return {
        **row,
        "registers": int(used.group(1)),
        "spills": sum(map(int, spilled)),
        "shared": int(done.metadata.shared),
        "copies": len(re.findall(r"cp\.async\.c[ag]|cp\.async\.bulk", done.asm["ptx"])),
        "scalars": len(re.findall(r"ld\.global(?!\S*\.v[24])\S*\.[bfsu](?:16|32)\b", done.asm["ptx"])),
        "seconds": round(time.perf_counter() - began, 2),
    }


def all_compiled(jobs: list[Specialisation], workers: int, start: str = "fork") -> Iterator[dict[str, Any]]:
    """`compiled` of all jobs, as they finish, in several processes. start: how they begin; a process that has used a
    device cannot be forked, forked processes need no imports."""
    os.environ |= REPORTING
    with ProcessPoolExecutor(workers, get_context(start)) as pool:
        yield from pool.map(compiled, jobs)


def faults(row: dict[str, Any]) -> list[str]:
    """The limits that a report exceeds: no register may be spilled except as in `SPILLS`, and shared memory must
    suffice."""
    if "error" in row or "unknown" in row:
        return [row["error"]] if "error" in row else []
    capability, version = row["capability"], triton.__version__
    spills = [
        SPILLS.get((row["kernel"], *more), 0)
        for more in itertools.product((version.rpartition(".")[0], None), (capability, None))
    ]
    most = SHARED.get(capability, min(SHARED.values()))
    broken = [f"{row['spills']} bytes spilled, at most {max(spills)}"] if row["spills"] > max(spills) else []
    return broken + ([f"{row['shared']} bytes of shared memory, at most {most}"] if row["shared"] > most else [])


@cache
def jobs() -> list[Specialisation]:
    """A quick look: some steps for Hopper, and one kernel for two other devices."""
    other = [spec for device in (89, 100) for spec in started(_steps(FEW[:1]), device) if spec.kernel == DEPENDING]
    return [*_extremes(started(steps(FEW))), *{spec.capability: spec for spec in other}.values()]


def _extremes(specs: list[Specialisation]) -> list[Specialisation]:
    """Of specialisations of the same code, the one that needs most. Then, since a size of 1 is a constant of the binary
    and has no type of its own, those in which a size of a kernel is 1 that was not in the ones before."""
    alike: dict[str, list[Specialisation]] = {}
    for spec in specs:
        alike.setdefault(spec.code, []).append(spec)
    chosen = [max(group, key=lambda spec: spec.need) for group in alike.values()]
    ones = {spec: {(spec.kernel, name) for name in spec.sizes_of_1} for spec in specs}
    seen = {one for spec in chosen for one in ones[spec]}
    for spec in sorted(specs, key=lambda spec: -len(ones[spec])):
        if ones[spec] - seen:
            chosen.append(spec)
            seen |= ones[spec]
    return chosen


def checks() -> Iterator[speed.Check]:
    """For this device; without a device, one specialisation of each kernel of one step for Hopper."""
    cuda = torch.cuda.is_available()
    major, minor = torch.cuda.get_device_capability() if cuda else (9, 0)
    specs = started([*steps(), *later_steps()] if cuda else steps(FEW[:1]), 10 * major + minor)
    specs = specs if cuda else list({spec.kernel: spec for spec in specs}.values())
    yield "kernels that steps start", partial(_reported, specs, cuda)


def _reported(specs: list[Specialisation], cuda: bool) -> dict[str, Any]:
    rows = list(all_compiled(specs, min(16, os.cpu_count() or 1), "spawn" if cuda else "fork"))
    broken = [f"{row['label']}: {'; '.join(found)}" for row in rows if (found := faults(row))]
    return {"measured": len(rows), "unit": "compiled", "ok": not broken, "note": " | ".join(broken)}


def main() -> None:
    """Prints one line of JSON per specialisation."""
    for row in all_compiled(jobs(), 2):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
