"""Real models that are small enough to enumerate: the classes of `specbench.models` with random weights.

An audit of them covers everything that tables leave out: prefill and padding, caches and their compaction, rotary
positions, guidance, the image grammar, and drafters that read the target's hidden states. The exact distribution comes
from passes over complete sequences, without a cache.
"""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from specbench.audit import model_recipes
from specbench.audit.statistics import Marginal, filtered, of_sequence
from specbench.audit.tabular import Tables
from specbench.config import registry
from specbench.config.run_config import RunConfig
from specbench.decoding.loop import Drafter
from specbench.decoding.sampling import Sampling
from specbench.errors import UsageError
from specbench.harness.method import build_drafter
from specbench.models.language import Language
from specbench.models.llamagen import Conditioning, LlamaGen, LlamaGenConfig
from specbench.models.loading import emu3
from specbench.models.unified import Prompts, Unified, UnifiedConfig, image_tokens

_IDS = torch.tensor([7, 5, 9, 6])  # ids of the codes in the vocabulary, unordered
_NEW_LINE, _END = 3, 4
_WORDS = 16  # the first text id, above the codes' ids


def _llamagen(layers: int) -> LlamaGen:
    """3 x 3 positions, three codes."""
    return LlamaGen(LlamaGenConfig(16, layers, 2, None, 24, 3, cls_token_num=3, caption_dim=8, block_size=9))


def _chameleon(layers: int) -> Unified:
    """Lumina's grammar: 2 rows of 3 positions, four codes, each row with its new line, then the image's end."""
    cfg = UnifiedConfig(16, layers, 2, 2, 24, 32, qk_norm=1)
    return Unified(cfg, image_tokens(_IDS, 2, 3, _NEW_LINE, [_END]))


def _emu3(layers: int) -> Unified:
    """2 rows of 3 positions, four codes, with Emu3's grammar and grouped heads."""
    cfg = UnifiedConfig(16, layers, 2, 1, 24, emu3.FIRST_CODE, rope_base=1e6)
    return Unified(cfg, emu3.image(_IDS, 2, 3))


#: Factors for the random weights of drafters' networks, which move their distributions away from the target's.
_FACTORS = {"eagle": 2.0, "eagle3": 2.0, "dflash": 2.0}
#: Functions that build the target with a number of layers.
_TARGETS: dict[str, Callable[[int], Language]] = {
    "llamagen_tiny": _llamagen,
    "chameleon_tiny": _chameleon,
    "emu3_tiny": _emu3,
}


def _random(build: Callable[[], nn.Module], seed: int, factor: float) -> Any:
    """A module with weights drawn only from the seed, not from torch's global state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build()
        with torch.no_grad():
            for name, p in module.named_parameters():
                if p.dim() == 2 and "norm" not in name:
                    p.mul_(factor)
    return module.eval().requires_grad_(False)


@dataclass(frozen=True, eq=False)
class TinyModel:
    """A real target and its random drafters; see `models.Subject`."""

    name: str
    target: Language
    guided: bool = True

    def on(self, device: torch.device) -> TinyModel:
        if device.type == "cpu":
            return self
        return replace(self, target=copy.deepcopy(self.target).to(device))

    @property
    def vocab(self) -> int:
        return self.target.grammar.codes if self.target.grammar else self.target.vocab_size

    @property
    def length(self) -> int:
        return len(self._free)

    @property
    def _free(self) -> Tensor:
        """The positions (T,) of tokens that are not forced."""
        grammar = self.target.grammar
        return grammar.free if grammar else torch.arange(self.target.length)

    def drafter_network(self, name: str | Mapping[str, Any]) -> Any:
        """The random network that a drafter declares; a loaded model has the same method."""
        network = registry.network(name)
        loader = pkgutil.resolve_name(network.loader)(self, network.folder)
        factor = _FACTORS.get(network.folder, model_recipes.TINY[self.name] if network.folder == "draft" else 1.0)
        return _random(loader.untrained, loader.seed, factor).to(self.target.output.weight.device)

    def smaller(self) -> Language:
        """An untrained draft model."""
        return _TARGETS[self.name](1)

    def drafter(self, cfg: RunConfig) -> Drafter:
        return build_drafter(cfg, self)

    def prompts(self, rows: int) -> Conditioning | Prompts:
        """A prompt with padding, and an unconditional one with more padding."""
        if isinstance(self.target, LlamaGen):
            features = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(3)).expand(rows, -1, -1)
            return Conditioning(features, torch.tensor([[False, True, True]]).expand(rows, -1))
        ids, unconditional = torch.tensor([[1, 0, _WORDS, _WORDS + 1, 2]]), torch.tensor([[1, 1, 1, 0, 2]])
        fields = (ids, ids != 1, unconditional, unconditional != 1)
        return Prompts(*(x.expand(rows, -1) for x in fields))

    def codebook(self) -> Tensor:
        raise UsageError(f"the rule needs distances between codes, which {self.name} does not have")

    def free(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        grammar = self.target.grammar
        if grammar is None:
            return tokens, torch.ones(len(tokens), dtype=torch.bool)
        code = tokens < grammar.codes
        allowed = torch.where(grammar.forced < 0, code, tokens == grammar.forced).all(1)
        return tokens[:, grammar.free].clamp_max(grammar.codes - 1), allowed

    def marginals(self, sampling: Sampling) -> list[Marginal]:
        return of_sequence([filtered(logits, sampling) for logits in self._logits(sampling.cfg_scale)])

    @torch.inference_mode()
    def _logits(self, scale: float) -> Tables:
        """Guided logits of the codes after every prefix, by the number of codes in it, from passes without a cache."""
        model, grammar, vocab = self.target, self.target.grammar, self.vocab
        num_sequences = vocab ** (self.length - 1)  # every sequence without its last code
        sequence = torch.zeros(num_sequences, model.length, dtype=torch.int64)
        if grammar is not None:
            sequence[:] = grammar.forced.clamp_min(0)
        prefix = torch.arange(num_sequences)
        for t, position in enumerate(self._free[:-1].tolist()):
            sequence[:, position] = prefix // vocab ** (self.length - 2 - t) % vocab
        guided = scale != 1.0
        tables: list[list[Tensor]] = [[] for _ in range(self.length)]
        chosen = self._free.tolist()
        for part in sequence.split(1 << 10):
            prefix_inputs = model.condition(self.prompts(len(part)), guided)
            before = len(prefix_inputs)
            hidden = model.uncached(prefix_inputs, (part.repeat(2, 1) if guided else part)[:, :-1])
            logits = model.head(hidden[:, before - 1 :])
            if guided:
                conditional, unconditional = logits.chunk(2)
                logits = unconditional + scale * (conditional - unconditional)
            for table, position in zip(tables, chosen, strict=True):
                table.append(logits[:, position, :vocab])
        # sequences that share their first t codes share the distribution of the next one
        return [torch.cat(table)[:: vocab ** (self.length - 1 - t)] for t, table in enumerate(tables)]


@cache
def built_in(name: str) -> TinyModel:
    return TinyModel(name, _random(partial(_TARGETS[name], 2), 1, model_recipes.TINY[name]))
