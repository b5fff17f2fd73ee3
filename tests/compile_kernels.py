"""Compiles every fused kernel for compute capability 9.0, which needs no device: run by test_kernels in a process of
its own, where Triton does not interpret. Prints a line a kernel."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specbench.engine.kernels import attention, products, sampling, verification, window

HALF, FLOAT, INT, LONG, BYTE = "*bf16", "*fp32", "i32", "*i64", "*u8"


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> None:
    """types: of the arguments that are no constants, by name; the rest are pointers to bfloat16."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, HALF) for n in names}
    source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in constants.items()})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "cubin" in made.asm
    print(kernel.__name__, len(made.asm["cubin"]))


def main() -> None:
    sizes = dict.fromkeys(("rows", "count", "width", "nodes", "slots", "table_rows", "q_rows", "k_rows"), INT)
    types = sizes | dict.fromkeys(("eps", "scale"), "fp32")
    flags = {"NORMED": True, "GATED": True, "ADDED": True}
    for matrix, shape in ((False, {"BM": 2, "BN": 4, "BK": 512}), (True, {"BM": 16, "BN": 16, "BK": 256})):
        compiled(products._project, types, {**shape, **flags, "MATRIX": matrix}, num_warps=4)
    compiled(products._rms_norm, types, {"BLOCK": 4096, "ADDED": True})
    compiled(products._swiglu, types, {"BLOCK": 1024})
    heads = {"HEADS": 32, "KV": 8}
    for halves in (True, False):
        head = {**heads, "HALF": 64, "BLOCK": 64, "HALVES": halves, "NORMED": True}
        compiled(attention._rotate, types | {"TABLE": FLOAT, "SLOTS": LONG}, head, num_warps=1)
    parts = dict.fromkeys(("PART", "TOP", "SUM"), FLOAT)
    shape = {"DIM": 128, "BD": 128, "SPLITS": 16}
    compiled(attention._attend, types | parts | {"MASK": BYTE}, {**heads, **shape, "BQ": 64, "BS": 64}, num_warps=8)
    compiled(attention._combine, types | parts, shape)
    every = (sampling, verification, window)
    for kernel, given, constants, options in (one for module in every for one in module.specialisations()):
        compiled(kernel, given, constants, **options)


if __name__ == "__main__":
    main()
