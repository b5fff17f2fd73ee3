"""The Jacobi modes of Lumina-mGPT 2 and SimpleAR: recorded runs, replayed through the decode loop.

Every draw of the recorded runs takes the most probable token, and the numbers of verification are recorded.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from goldens.common import Compared, Config, Tensors
from goldens.language import uncached_logits, unified
from specbench.decoding import verify
from specbench.decoding.drafters import window as windows
from specbench.decoding.drafters.built_in import BuiltIn
from specbench.decoding.loop import DecoderConfig, Decoding
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules import Rule
from specbench.decoding.rules.relaxed import Redraw
from specbench.decoding.sampling import Sampling
from specbench.decoding.verify.base import VERIFY
from specbench.models.unified import Unified, image_tokens


class Session:
    """A model that computes whole sequences, as the target of one image and its session. prompts: ids of both streams
    of guidance; ids (V,) of the tokens, the first `codes` of them codes, the others of the grammar; forced (T,): the
    grammar's token of each position, or -1."""

    padding = None

    def __init__(self, model: Unified, prompts: list[Tensor], ids: Tensor, forced: Tensor, codes: int) -> None:
        self.model, self.prompts, self.ids, self.forced_tokens, self.codes = model, prompts, ids, forced, codes
        self.length, self.vocab_size = len(forced), len(ids)
        self.width = 1  # a window that begins at random never asks
        self.buffers, self.commit = dict, lambda *verdict: None

    def open(self, conditioning: Any, rows: int, guided: bool, nodes: int) -> Session:
        return self

    def forced(self, positions: Tensor) -> None:
        """Does nothing: the released windows also begin at random where the grammar forces a token."""

    def constrain(self, logits: Tensor, positions: Tensor) -> Tensor:
        only = self.forced_tokens[positions.clamp_max(self.length - 1)].unsqueeze(-1)
        token = torch.arange(self.vocab_size)
        return logits.masked_fill(torch.where(only < 0, token >= self.codes, token != only), -torch.inf)

    def forward(self, tokens: Tensor, tree: Any, history: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        image = self.ids[torch.cat([history[0, : count[0]], tokens[0, 1:]])]
        streams = [uncached_logits(self.model, torch.cat([p, image])[None])[0] for p in self.prompts]
        rows = torch.stack([x[len(x) - tokens.shape[1] :, self.ids] for x in streams])
        return rows, rows


class Recorded(RandomStreams):
    """The numbers of a recorded run: the ones for verification, (n,) per step with the first draft's at 0, and the ones
    that give the recorded new tokens, by step and position."""

    def __init__(self, verifying: list[Tensor], fresh: list[dict[int, int]], codes: int) -> None:
        super().__init__([(0, 0)])
        self.verifying, self.fresh, self.codes = verifying, fresh, codes

    def uniforms(self, step: Tensor, tag: int, tags: int, count: int) -> Tensor:
        out = torch.zeros(1, tags, count)
        if tag == VERIFY:
            recorded = self.verifying[int(step)][: count - 1]
            out[0, 0, 1 : 1 + len(recorded)] = recorded
        return out

    def uniform_at(self, step: Tensor, tag: int, index: Tensor) -> Tensor:
        codes = [self.fresh[int(step)].get(i, 0) for i in index.flatten().tolist()]
        return ((torch.tensor(codes) + 0.5) / self.codes).view(1, -1)


def replayed(session: Any, drafter: BuiltIn, rule: Rule, sampling: Sampling, rng: Recorded) -> list[tuple[int, Tensor]]:
    """Per step the number of tokens before it and the ids of the drafts that exist; at the end the image itself."""
    config: Any = DecoderConfig(session, drafter, rule, sampling)

    def most_likely(probs: Tensor, u: Tensor, kernels: Any = None) -> Tensor:
        return probs.argmax(-1)

    with patch.object(windows, "draw", most_likely), patch.object(verify.base, "draw", most_likely):
        steps, fed = Decoding(config, None, rng), []
        while steps.num_committed < session.length:
            before = int(steps.num_committed)
            steps.step()
            draft = steps.step_stats.draft if steps.step_stats else None
            assert draft is not None
            fed.append((before, session.ids[draft.tokens[0, 1:][draft.valid[0, 1:]]]))
            steps.record_stats()
    return [*fed, (session.length, session.ids[steps.history[0, : session.length]])]


def table(rows: list[tuple[int, Tensor]]) -> Tensor:
    """(steps, 1 + n): a number of tokens, then ids, -1 after the last."""
    width = max(len(row) for _, row in rows)
    return torch.stack([F.pad(F.pad(row, (1, 0), value=n), (0, width - len(row)), value=-1) for n, row in rows])


def lumina2_sjd(t: Tensors, c: Config) -> Compared:
    """Every fed draft and every token, and the model's own output of each pass. The first passes give the tokens before
    the image, one by one."""
    ids, (rows, columns), first = c["ids"], c["latent_grid"], c["no_guidance_passes"]
    image = image_tokens(torch.arange(ids["img0"], ids["img1"] + 1), rows, columns, ids["newline"], [ids["end"]])
    prompt, tokens = t["in/prompt"][0], t["out/tokens"][0]
    positions, counts = t["out/first_place"], t["out/row_length"]
    model = unified(t, c["language_model"], len(tokens))
    streams, start = [prompt, prompt[-1:]], len(prompt) + first  # the ids of the image begin there
    yield from outputs(model, streams, t)
    forced, codes = image.grammar.forced, image.grammar.codes
    session = Session(model, [torch.cat([part, tokens[:first]]) for part in streams], image.ids, forced, codes)
    fed = zip(
        positions[first:].tolist(), counts[first:].tolist(), t["out/input_rows"][first:], t["out/uniforms"][first:]
    )
    passes = [(position + 1 - start, row[1:n], u[1:n]) for position, n, row, u in fed]
    fresh = [{count + i: max(0, x - ids["img0"]) for i, x in enumerate(row.tolist())} for count, row, _ in passes]
    drafter = BuiltIn(c["window"] - 1, plain_until=1, plain_from=c["interval_end"] - first - session.length)
    sampling = Sampling(
        c.get("temperature", 1.0), c["image_top_k"], cfg_scale=c["cfg_scale"], top_n_sigma=float(c["top_n_sigma"])
    )
    rng = Recorded([u for *_, u in passes], fresh, codes)
    *drafts, (_, drawn) = replayed(session, drafter, Redraw("target", sampling.top_n_sigma), sampling, rng)
    yield "input_rows", table(drafts), table([(count, row) for count, row, _ in passes])
    yield "tokens", drawn, tokens[first:]


def outputs(model: Unified, streams: list[Tensor], t: Tensors) -> Compared:
    """The model's output at the last id fed in each pass, computed from whole sequences, and the position of that
    id."""
    tokens, logits, positions = torch.cat([streams[0], t["out/tokens"][0]]), [], []
    for position, n, row in zip(t["out/first_place"].tolist(), t["out/row_length"].tolist(), t["out/input_rows"]):
        whole = torch.cat([tokens[:position], row[:n]])
        rows = [whole, whole[len(streams[0]) - len(streams[1]) :]]
        logits.append(torch.stack([uncached_logits(model, x[None])[0, -1] for x in rows]))
        positions.append([len(x) - 1 for x in rows])
    yield "raw_last_logits", torch.stack(logits)
    yield "last_position_ids", torch.tensor(positions)


def simplear_sjd(t: Tensors, c: Config) -> Compared:
    """Every fed draft and every token. The recorded run always accepts the first draft of a pass: from the third pass
    on that is the token of the last rejection, which is committed at once here."""
    count, size = c["image_tokens"], c["language_model"]["vocab_size"]
    model = unified(t, c["language_model"], count)
    prompts = [t["in/prompt"][0], t["in/negative"][0]]
    session = Session(model, prompts, torch.arange(size), torch.full((count,), -1), size)
    rows, tokens, u = t["out/input_rows"], t["out/tokens"][0], t["out/uniforms"]
    # from the third step on the first position that is not fixed is the root: its number is not used
    rng = Recorded([torch.zeros(0), u[0], *(row[1:] for row in u[1:])], [{}] * len(rows), size)
    sampling = Sampling(c["temperature"], cfg_scale=c["cfg_scale"])
    drafter = BuiltIn(count - 1, opening="greedy")
    *fed, (_, drawn) = replayed(session, drafter, Redraw("vanilla"), sampling, rng)
    yield "input_rows", table(known(fed, count)), table([(n, row[n:]) for (n, _), row in zip(fed, rows, strict=False)])
    yield "tokens", drawn, tokens


def known(fed: list[tuple[int, Tensor]], count: int) -> list[tuple[int, Tensor]]:
    """The drafts inside the image. For the first pass, which has no drafts here: the padding ids that it feeds."""
    first, *others = fed
    return [(first[0], torch.zeros(count - first[0], dtype=torch.int64)), *((n, row[: count - n]) for n, row in others)]


CHECKS = {"lumina2_sjd": lumina2_sjd, "simplear_sjd": simplear_sjd}
