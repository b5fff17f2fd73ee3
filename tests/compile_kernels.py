"""Compiles every fused kernel for compute capability 9.0, which needs no device: run by test_kernels in a process of
its own, where Triton does not interpret. Prints a line a kernel."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specbench.engine.kernels import inputs, sampling, verification, window

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
    every = (inputs, sampling, verification, window)
    for kernel, given, constants, options in (one for module in every for one in module.specialisations()):
        compiled(kernel, given, constants, **options)


if __name__ == "__main__":
    main()
