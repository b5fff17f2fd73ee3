"""A LlamaGen small enough to enumerate: 2x2 tokens, five codes, random weights; and helpers for tests of decodings."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.batch import Decoded
from specbench.decoding.rng import RandomStreams
from specbench.models.dflash import DFlashNetwork
from specbench.models.dflash import like_target as dflash_like_target
from specbench.models.eagle import EagleNetwork, like_shape, like_target
from specbench.models.language import Language
from specbench.models.llamagen import Conditioning, LlamaGen, LlamaGenConfig
from specbench.models.medusa import MedusaNetwork
from specbench.models.medusa import like_target as medusa_like_target

VOCAB, PREFIX = 5, 3


def llamagen(side: int = 2, seed: int = 0, dim: int = 32, vocab: int = VOCAB) -> LlamaGen:
    torch.manual_seed(seed)
    model = LlamaGen(LlamaGenConfig(dim, 2, 2, None, 48, vocab, PREFIX, caption_dim=8, block_size=side * side))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(8)  # distributions far from uniform
    return model.eval().requires_grad_(False)


def eagle(target: LlamaGen, seed: int = 1, layers: int = 1) -> EagleNetwork:
    torch.manual_seed(seed)
    head = like_target(target) if layers == 1 else EagleNetwork(replace(like_shape(target), n_layer=layers))
    with torch.no_grad():
        for p in head.layers.parameters():
            if p.dim() == 2:
                p.mul_(4)
        head.fc.weight.mul_(6)
    return head.eval().requires_grad_(False)


def medusa(target: LlamaGen, seed: int = 1) -> MedusaNetwork:
    torch.manual_seed(seed)
    heads = medusa_like_target(target, heads=3)
    with torch.no_grad():
        for p in heads.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return heads.eval().requires_grad_(False)


def dflash(target: Language, block_size: int = 4, seed: int = 7) -> DFlashNetwork:
    torch.manual_seed(seed)
    network = dflash_like_target(target, block_size)
    with torch.no_grad():
        network.mask.normal_()
        for name, p in network.named_parameters():
            if p.dim() == 2 and "norm" not in name:
                p.mul_(2)
    return network.eval().requires_grad_(False)


def read_by(target: Any, drafter: Any) -> Any:
    """The target, with the hidden layers that a drafter reads."""
    layers = getattr(drafter, "aux_hidden_layers", ())
    return target.with_aux_hidden_layers(layers) if layers else target


def prompts(count: int, same: bool = False) -> Conditioning:
    g = torch.Generator().manual_seed(3)
    features = torch.randn(1 if same else count, PREFIX, 8, generator=g).expand(count, -1, -1).clone()
    return Conditioning(features, torch.ones(count, PREFIX, dtype=torch.bool))


def teacher(model: LlamaGen, tokens: Tensor, features: Tensor) -> Tensor:
    """Hidden states (N, P - 1 + T, dim) over prefix and tokens[:, :-1] in one pass; entry P - 1 + t predicts token t.
    tokens (N, T), features (N, P, caption_dim)."""
    conditioning = Conditioning(features, torch.ones(features.shape[:2], dtype=torch.bool))
    return model.uncached(model.condition(conditioning, False), tokens[:, :-1])


def sequence_probs(model: LlamaGen, cond: Conditioning, cfg_scale: float) -> Tensor:
    """The probability of every token sequence under one prompt, (V**T,), first token most significant, without any
    cache."""
    sequences = torch.tensor(list(itertools.product(range(VOCAB), repeat=model.cfg.block_size)))
    index = torch.zeros(len(sequences), dtype=torch.int64)
    prefix = model.condition(Conditioning(cond.features[index], cond.valid[index]), True)
    hidden = model.uncached(prefix, sequences[:, :-1].repeat(2, 1))[:, PREFIX - 1 :]
    kept, dropped = model.head(hidden).chunk(2)  # with the caption, and without
    probs = (dropped + cfg_scale * (kept - dropped)).softmax(-1)
    return probs.gather(-1, sequences.unsqueeze(-1)).squeeze(-1).double().prod(1)


def verdict(words: str, model: Any, samples: int, **options: Any) -> str:
    """The audit's verdict on a method with a tabular model."""
    from specbench.audit import audit  # not where there is no command line
    from specbench.config import configuration

    method = audit.assemble(configuration.compose(words.split()), model)
    return str(audit.measure(method, model, samples, **options)["verdict"])


def rng(images: int | Iterable[int], seed: int = 0, device: str = "cpu") -> RandomStreams:
    """images: their number, or their indices."""
    return RandomStreams([(seed, i) for i in (range(images) if isinstance(images, int) else images)], device)


def results(out: Decoded[Any]) -> dict[str, Any]:
    """The results of a decoding, without the seconds."""
    values = vars(out) | vars(out.trace)
    return {name: x for name, x in values.items() if name not in ("seconds", "draft_s", "trace")}


def image(out: Decoded[Any], row: int) -> list[Any]:
    """The results of a decoding for one row."""
    return [x[row] for x in results(out).values()]


def equal(a: Any, b: Any) -> bool:
    """Equal bit for bit: tensors, and lists and dictionaries of them. A NaN, which means not computed, equals another
    NaN."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return a == b


def fit(counts: Tensor, probs: Tensor) -> float:
    """p-value of a chi-square test of numbers (N,) against their probabilities; numbers of small expectation are
    pooled."""
    from scipy import stats  # takes as long as all other imports

    seen, expected = torch.bincount(counts, minlength=len(probs)).double(), probs * len(counts)
    assert seen[probs == 0].sum() == 0, "what has probability zero was drawn"
    small = expected < 5
    observed = torch.cat([seen[~small], seen[small].sum()[None]])
    wanted = torch.cat([expected[~small], expected[small].sum()[None]])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) == 1:
        return 1.0
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)
