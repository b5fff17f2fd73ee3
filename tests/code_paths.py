"""Run as a process: does a row depend on the other rows, on the code paths that environments choose?

The argument is a JSON list of [variables of the environment, what is compared]. Prints a list of objects: the
instruction set of torch's own kernels, how many products are computed in which way, and the errors with one and with
two threads. Images are decoded with two threads: in the tests' own processes there is one.

What is compared: "all"; "some", without most images and without products of many outputs, the other products with one
thread or with two; or "functions" and some images, without the products, which are the matrix library's.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import product
from multiprocessing import get_context
from typing import Any

import tiny
import torch
from safetensors import safe_open
from torch import Tensor
from windows import window

from specbench.audit.densities import built_in
from specbench.config.registry import ASSETS
from specbench.decoding import rules
from specbench.decoding.continuous import ContinuousRule
from specbench.decoding.continuous import decode as decode_continuous
from specbench.decoding.drafters.draft_model import DraftModel
from specbench.decoding.drafters.eagle import Eagle
from specbench.decoding.drafters.pjd import ParallelJacobi
from specbench.decoding.loop import DecoderConfig, decode
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import parse
from specbench.engine import invariance, ops
from specbench.engine.masks import TreeMask

KEYS = [(7, i) for i in range(5)]
FULL_SIZE = [(1280, 3456), (192, 2048), (96, 4096)]  # LlamaGen-XL's widest product, and some of few outputs
PARTS = ("scenes_target", "scenes_eagle", "scenes_mar", "textures_target")
SOME = 256  # most outputs of a weight in some products


def shapes() -> list[tuple[int, int]]:
    """(out, in) of every matrix of the embedded models, of the density models, and some of full size."""
    sizes_seen = {(8, 5), (8, 6), (4, 8), (2, 8), *FULL_SIZE}
    for part in PARTS:
        with safe_open(ASSETS / f"{part}.safetensors", "pt") as f:
            sizes = [f.get_slice(name).get_shape() for name in f.keys()]  # noqa: SIM118 (no mapping)
        sizes_seen |= {(size[0], size[1]) for size in sizes if len(size) == 2}
    return sorted(sizes_seen)


def products(every: bool) -> Iterator[str]:
    """Random rows, other than the ones by which a way of computing was chosen. Without `every`, the shapes of few
    outputs, with or without a bias: with one thread those that are left out with two."""
    rng = torch.Generator().manual_seed(99)
    for number, (out, width) in enumerate(shapes()):
        if not every and (out > SOME or (number + torch.get_num_threads()) % 2):
            continue
        x, weight = torch.randn(260, width, generator=rng), torch.randn(out, width, generator=rng) / width**0.5
        biases = (None, torch.randn(out, generator=rng))[: 1 if (out, width) in FULL_SIZE else 2]
        for bias in biases if every else biases[number // 2 % len(biases) :][:1]:
            expected = ops.linear(x, weight, bias)
            order = torch.randperm(len(x), generator=rng)
            parts = [(0, 1), (3, 4), (0, 2), (5, 10), (7, 23), (20, 53), (1, 61), (9, 210)]
            good = all(torch.equal(ops.linear(x[a:b], weight, bias), expected[a:b]) for a, b in parts)
            good &= torch.equal(ops.linear(x[order], weight, bias), expected[order])
            wide = torch.cat([x, x], 1)[:, :width]  # rows that do not follow each other in memory
            good &= torch.equal(ops.linear(wide, weight, bias), expected)
            if not good:
                yield f"linear {width} -> {out}, {'no ' if bias is None else ''}bias"


def functions() -> Iterator[str]:
    rng = torch.Generator().manual_seed(98)
    every: dict[str, Any] = {
        "sum_last": ops.sum_last, "silu": ops.silu, "gelu": ops.gelu, "gelu_tanh": ops.gelu_tanh,
        "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: x.log_softmax(-1),
        "cumsum": lambda x: x.double().cumsum(-1), "exp": torch.exp, "log": torch.log, "tanh": torch.tanh,
    }  # fmt: skip
    for (name, function), width in product(every.items(), (1, 7, 1000, 40_001)):
        x = torch.rand(6, width, generator=rng)
        expected = function(x)
        if not all(torch.equal(function(x[a:b].clone()), expected[a:b]) for a, b in ((0, 1), (1, 2), (2, 5), (1, 6))):
            yield f"{name} of {width}"
    q, k, v = (torch.randn(5, 4, n, 16, generator=rng) for n in (7, 300, 300))
    mask = torch.rand(5, 1, 7, 300, generator=rng) < 0.7
    expected = ops.attention(q, k, v, mask)
    for a, b in ((0, 1), (1, 3), (4, 5)):
        if not torch.equal(ops.attention(q[a:b], k[a:b], v[a:b], mask[a:b]), expected[a:b]):
            yield f"attention of rows {a} to {b}"
    for heads, kv_heads, dim, n, slots in (
        (6, 6, 32, 1, 266),
        (6, 6, 32, 17, 298),
        (4, 2, 64, 26, 316),
        (3, 3, 16, 5, 700),
    ):
        cache = ops.KVCache(1, 3, kv_heads, slots, dim, torch.zeros(1))
        cache.k.uniform_(-3, 3, generator=rng), cache.v.uniform_(-3, 3, generator=rng)
        q = torch.randn(3, n, heads, dim, generator=rng).transpose(1, 2)
        among = torch.ones(1, n, n, dtype=torch.bool).tril()
        for root in range(20, slots - n, 40):
            tree = TreeMask(torch.tensor([0, 0, 7]), torch.tensor([root, root // 2, 9]), among)
            expected = ops.attention(q, cache.k[0], cache.v[0], tree.dense(torch.arange(slots)))
            used = cache.read(tree, heads)
            out = ops.attention(q, cache.k[0, :, :, :used], cache.v[0, :, :, :used], tree.dense(torch.arange(used)))
            if not torch.equal(out, expected):
                yield f"attention of {n} positions over {used} of {slots} slots"


def images(every: bool) -> Iterator[str]:
    """Images of models of discrete and of continuous tokens, in one batch and in several: every kind of draft and of
    target, or one each."""
    target = tiny.llamagen(side=4)
    drafters = {
        "tree": lambda: Eagle(tiny.eagle(target), parse("[[0],[1],[0,0],[0,1],[1,0]]")),
        "draft model": lambda: DraftModel(tiny.llamagen(side=4, seed=5), 3),
        "height": lambda: window(5, coupling="height"),
        "rows": lambda: ParallelJacobi(4, 3, 0.5, "released", "shifted"),
        "window": lambda: window(7, "horizontal_repeat", coupling="maximal", width=2, depth=3),
    }
    conditioning = tiny.prompts(len(KEYS))
    for name, drafter in drafters.items() if every else [("window", drafters["window"])]:

        def decoded(a: int, b: int, make: Any = drafter) -> list[Tensor]:
            config = DecoderConfig(target, make(), rules.cool(2.0, 3), Sampling(cfg_scale=2.0), emitted_draws=4)
            out = decode(config, conditioning.rows(a, b), RandomStreams(KEYS[a:b]))
            return [out.tokens, out.steps, out.accepted, out.trace.log_prob, out.trace.emitted_kl]

        yield from (f"{name}, images {part}" for part in differing(decoded))
    for model, criterion in product(("d1t5", "d2t4"), ("exact", "path")) if every else [("d2t4", "path")]:

        def decoded(a: int, b: int, name: str = model, by: str = criterion) -> list[Tensor]:
            pair = built_in(name)
            out = decode_continuous(
                pair.target, pair.drafter, ContinuousRule(gamma=2, criterion=by), None, RandomStreams(KEYS[a:b])
            )
            return [out.tokens, out.steps, out.accepted]

        yield from (f"{model}, {criterion}, images {part}" for part in differing(decoded))


def differing(decoded: Any) -> Iterator[str]:
    expected = decoded(0, len(KEYS))
    for a, b in ((0, 1), (1, 3), (3, 5)):
        if not all(torch.equal(x, y[a:b]) for x, y in zip(decoded(a, b), expected, strict=True)):
            yield f"{a} to {b}"


def report(chosen: tuple[dict[str, str], str]) -> dict[str, Any]:
    environment, compared = chosen
    os.environ.update(environment)
    faults: dict[str, list[str]] = {}
    with torch.no_grad():
        for threads in (1, 2):
            torch.set_num_threads(threads)
            linear = () if compared == "functions" else products(compared == "all")
            faults[str(threads)] = [*linear, *functions()]
        faults["2"] += images(compared == "all")
    ways = Counter(way.__name__ for way in invariance._chosen.values())
    return {"kernels": torch.backends.cpu.get_cpu_capability(), "ways": ways, "faults": faults}


def main() -> None:
    """One process for every environment, forked before anything is computed: the libraries read theirs when they first
    compute."""
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(json.dumps(pool.map(report, json.loads(sys.argv[1]), chunksize=1)))


if __name__ == "__main__":
    main()
