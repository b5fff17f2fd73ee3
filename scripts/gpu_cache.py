#!/usr/bin/env python3
"""Compiles the kernels of a GPU call on this machine, into .gpu/cache.tar.xz, so that the call does not spend time on
it. docs/gpu.md says how the file travels. Launchers that an earlier call left in that file are kept.

Triton's cache names a kernel by its code, its options, and the files of Triton itself. Its compiled file differs
between versions of Python. So this needs the wheel of Triton for the GPU machine's Python, unpacked, and runs with the
same version of Triton for this Python:

    scripts/second_triton.sh                     # fetches Triton 3.6.0 for this Python to build/triton-3.6.0
    pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_27_x86_64 \\
        --dest build/wheel triton==3.6.0 && unzip -q build/wheel/triton-*.whl -d build/wheel
    PYTHONPATH=build/triton-3.6.0 python scripts/gpu_cache.py build/wheel/triton
"""

from __future__ import annotations

import hashlib
import json
import os
import pkgutil
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
CACHE, TILES, ARCHIVE = ROOT / "build/gpu_cache", ROOT / "results/gpu/gpu_tiles.json", ROOT / ".gpu/cache.tar.xz"
#: What a program on the GPU machine reads of a compiled kernel, and a launcher, which is compiled there.
SUFFIXES = {".cubin", ".json", ".so"}
os.environ["TRITON_CACHE_DIR"] = str(CACHE)

import triton  # noqa: E402
from gpu_checks import compiling  # noqa: E402
from triton.runtime import cache  # noqa: E402

from specbench.engine.kernels import FusedKernels, tiles  # noqa: E402


def key_of(package: Path) -> str:
    """What `triton.runtime.cache.triton_key` returns where this package is installed. The modules of the two packages
    are the same files, except for the compiled one."""
    files = [package / "runtime/cache.py"]
    for folder in ("compiler", "backends"):
        files += _modules(package, folder)
    files += [*package.glob("_C/libtriton*.so"), *_modules(package, "language")]
    hashes = (hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    return triton.__version__ + "-".join(hashes)


def _modules(package: Path, folder: str) -> list[Path]:
    """The modules of a folder and of its packages, in the order in which Triton reads them."""
    modules = pkgutil.walk_packages([str(package / folder)], prefix=f"triton.{folder}.")
    finders: list[tuple[Any, str]] = [(module.module_finder, module.name) for module in modules]
    return [Path(finder.find_spec(name).origin) for finder, name in finders]


def tuned() -> tiles.Tiles:
    """The tiles that an earlier call tuned, for its device and not for this one."""
    with mock.patch.object(tiles, "made_for", return_value=json.loads(TILES.read_text())["made_for"]):
        return tiles.Tiles.load(TILES)


def main(package: Path) -> int:
    shutil.rmtree(CACHE, ignore_errors=True)  # kernels of an earlier commit
    key, made, known = key_of(package), FusedKernels.__init__, tuned()
    steps = [*compiling.steps(), *compiling.later_stages()]
    jobs = dict.fromkeys(compiling.started([*steps, *compiling.tuning_on_shapes()]))
    with mock.patch.object(FusedKernels, "__init__", lambda self, *_: made(self, known)):
        jobs |= dict.fromkeys(compiling.started(steps))
    with mock.patch.object(cache, "triton_key", return_value=key):
        failed = [row for row in compiling.all_compiled(list(jobs), os.cpu_count() or 1) if "error" in row]
    if ARCHIVE.is_file():
        with tarfile.open(ARCHIVE) as earlier:
            earlier.extractall(CACHE, [member for member in earlier if member.name.endswith(".so")], filter="data")
    ARCHIVE.parent.mkdir(exist_ok=True)
    with tarfile.open(ARCHIVE, "w:xz") as archive:
        for file in sorted(CACHE.rglob("*")):
            if file.suffix in SUFFIXES:
                archive.add(file, str(file.relative_to(CACHE)))
    print(f"{len(jobs) - len(failed)} kernels in {ARCHIVE}; {len(failed)} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
