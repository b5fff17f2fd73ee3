"""The distributions of all tokens of images that the target drew alone.

Concentration: the mean mass of the k most probable tokens (LANTERN, Fig 2c). Dependence on earlier tokens: how much a
distribution changes, in total variation, if its position cannot attend to the keys and values of the position at some
distance before it (SJD-PAC, Fig 4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from specbench import data
from specbench.config.run_config import RunConfig
from specbench.decoding.sampling import Sampling
from specbench.errors import UsageError
from specbench.harness.pipeline import Pipeline
from specbench.models.language import Language
from specbench.rows.summary import mean

#: The number of most probable tokens that are measured one by one.
TOP = 100


def measure(cfg: RunConfig, offsets: int) -> dict[str, Any]:
    """Means over all codes of the first `n` images of a checked configuration, by the names of `PROBE_COLUMNS`; the
    distances are 1 to `offsets`."""
    pipeline = load(cfg.changed(method="vanilla", drafter="none"))
    target, sampling = pipeline.model.target, pipeline.config.sampling
    if offsets >= target.length:
        raise UsageError(f"offsets={offsets} is beyond an image of {target.length} tokens; give a smaller number")
    top: list[Tensor] = []
    entropy: list[Tensor] = []
    moved: list[list[Tensor]] = [[] for _ in range(offsets)]
    with torch.inference_mode():
        for item in tqdm(data.load(cfg.prompts), desc="probe", unit="image"):
            conditioning = pipeline.encode([item.prompt])
            tokens = pipeline.decode(conditioning, [(cfg.seed, item.index)]).tokens
            free = _free(target, tokens.device)
            distributions = TokenDistributions(target, sampling, conditioning, tokens)
            probs = distributions.probs[0, free]
            top.append(probs.topk(min(TOP, probs.shape[-1]), dim=-1).values.cumsum(-1).mean(0))
            entropy.append(-torch.xlogy(probs, probs).sum(-1).mean())
            for i, sums in enumerate(moved):
                hidden = distributions.hidden_at(i + 1)[0, free]
                inside = free > i + 1  # the hidden token belongs to the image
                sums.append(0.5 * (hidden - probs)[inside].abs().sum(-1).mean())
    mean_entropy, *by_distance = (mean([float(value) for value in values]) for values in (entropy, *moved))
    return {
        "images": len(top),
        "top_probabilities": torch.stack(top).mean(0).tolist(),
        "entropy": mean_entropy.value,
        "entropy_stderr": mean_entropy.stderr,
        "tv_by_distance": [estimate.value for estimate in by_distance],
        "tv_by_distance_stderr": [estimate.stderr for estimate in by_distance],
        "width": target.width,
        "weights": pipeline.weights,
    }


def load(cfg: RunConfig) -> Pipeline:
    """A pipeline that decodes exactly, in eager steps. UsageError for a model of continuous tokens."""
    pipeline = Pipeline.load(cfg.changed(rule="exact", verification="token", engine="eager"))
    if not isinstance(pipeline, Pipeline):
        raise UsageError(f"{cfg.model} is a model of continuous tokens; a probe needs discrete tokens, choose another")
    return pipeline


def _free(target: Language, device: torch.device) -> Tensor:
    """The positions of an image (n,) whose tokens the grammar does not force."""
    if target.grammar is None:
        return torch.arange(target.length, device=device)
    return target.grammar.free.to(device)


class TokenDistributions:
    """The guided distributions of the tokens of one image, tokens (1, T): with temperature (1 if it is 0), before top-k
    and top-p."""

    def __init__(self, target: Language, sampling: Sampling, conditioning: Any, tokens: Tensor) -> None:
        self.sampling, length = sampling, tokens.shape[1]
        session = self.session = target.open(conditioning, 1, sampling.guided, length)
        self.first = session.prefix_length
        # the input at position i gives the distribution of the token at position i + 1
        self.positions = torch.arange(self.first - 1, self.first - 1 + length, device=tokens.device)[None]
        self.x = session.embed(torch.cat([tokens[:, :1], tokens[:, :-1]], 1), self.positions)
        at = session.both(self.positions)
        self.probs = self._probs(session.feed(self.x, at, at, session.up_to(at)))

    def hidden_at(self, distance: int) -> Tensor:
        """The distributions (1, T, V) if a position does not attend to the position at `distance` before it, in any
        layer. The other positions are unchanged: their keys and values are already in the cache."""
        session, at = self.session, self.session.both(self.positions)
        slots = at + len(session.keys) - int(self.positions[0, -1]) - 1  # after all others
        queries = at.unsqueeze(-1)
        visible = (session.keys < queries) & session.usable.unsqueeze(1) & (session.keys != queries - distance)
        mask = visible | (session.keys == slots.unsqueeze(-1))
        return self._probs(session.feed(self.x, at, slots, mask.unsqueeze(1)))

    def _probs(self, hidden: Tensor) -> Tensor:
        logits = self.session.model.head(hidden)
        return self.sampling.unfiltered.distributions(logits, self.session, self.positions - (self.first - 1)).p
