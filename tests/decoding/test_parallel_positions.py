"""Decoding out of raster order: the positions of a pass, what they attend to, and how many passes an image needs."""

from __future__ import annotations

from typing import Any

import pytest
import test_targets
import tiny
import torch
from torch import Tensor

from specbench.audit.tabular import TabularTarget, codes, random_tables, sequence_probs
from specbench.config import configuration, registry
from specbench.decoding import rules
from specbench.decoding.drafters.none import NoDraft, ZipAR
from specbench.decoding.drafters.pjd import ParallelJacobi
from specbench.decoding.loop import DecoderConfig, decode
from specbench.decoding.parallel_positions import rows_at_once
from specbench.decoding.sampling import Sampling
from specbench.decoding.zipar_passes import PlannedRows
from specbench.models.language import Language

SAMPLING = Sampling(temperature=0.9, cfg_scale=1.5)
SIDE, IMAGES = 3, 2


def decode_images(
    target: Any, drafter: Any, conditioning: Any, rows: int = IMAGES, sampling: Sampling = SAMPLING
) -> Any:
    return decode(DecoderConfig(target, drafter, rules.exact(), sampling), conditioning, tiny.rng(rows))


class Grid:
    """An image with this many rows and this many tokens per row, followed by forced tokens."""

    def __init__(self, rows: int, width: int, tail: int = 0) -> None:
        self.length, self.width = rows * width + tail, width
        self.forced_tokens = None


def passes(grid: Grid, window: int, alone: bool) -> int:
    """The number of passes for an image, from the schedule alone. Every token is sampled once."""
    schedule = PlannedRows(grid, 1, torch.device("cpu"), window, alone, True)
    sampled = schedule.nodes[..., 0][schedule.extends] + 1
    assert torch.equal(sampled.sort().values, torch.arange(grid.length))
    return len(schedule.nodes)


def test_the_published_numbers_of_passes() -> None:
    """LlamaGen: C + (R - 2) s + C. With overlap from the first row on: (R - 1) s + C, for Lumina-mGPT (48 rows of 48
    codes and a new line, and the end of the image) and Emu3. A window of one row is raster order."""
    assert passes(Grid(24, 24), 8, alone=True) == 224
    assert passes(Grid(16, 16), 8, alone=True) == 144
    assert passes(Grid(32, 32), 4, alone=True) == 184
    assert passes(Grid(48, 49, 1), 16, alone=False) == 801
    assert passes(Grid(48, 49, 1), 15, alone=False) == 754  # the released code, which counts the new line
    assert passes(Grid(90, 91, 3), 7, alone=False) == 714
    assert passes(Grid(7, 9, 2), 9, alone=False) == 65
    assert [rows_at_once(24, s) for s in (24, 23, 12, 8, 1)] == [1, 2, 3, 4, 25]


def test_the_presets_have_the_published_windows() -> None:
    presets = {}
    for model in ("llamagen_xl_512", "lumina_mgpt", "emu3"):
        for variant in ("printed", "released"):
            cfg = configuration.compose([f"model={model}", "method=zipar", f"variant={variant}"])
            presets[model, variant] = (cfg.get("window"), cfg.get("first_row"), cfg.get("missing"))
            drafter = registry.chosen("drafter", cfg).build(None)
            flags = cfg.get("first_row") == "alone", cfg.get("missing") == "masked"
            assert (drafter.window, drafter.alone, drafter.masked) == (cfg.get("window"), *flags)
    assert presets["llamagen_xl_512", "printed"] == (8, "alone", "masked")
    assert presets["llamagen_xl_512", "released"] == (8, "alone", "zero")
    assert presets["lumina_mgpt", "printed"] == (16, "overlap", "masked")
    assert presets["lumina_mgpt", "released"] == (15, "overlap", "masked")
    assert presets["emu3", "released"] == (8, "overlap", "masked")


@pytest.mark.parametrize(("family", "missing"), [("grouped", "masked"), ("lumina", "masked"), ("grouped", "zero")])
def test_with_a_window_of_a_row_it_is_vanilla_decoding(family: str, missing: str) -> None:
    """Bit for bit: its passes have vanilla's shapes, masks and random numbers."""
    model, conditioning = test_targets.target(family, SIDE), test_targets.prompts(family, [0, 2])
    plain = decode_images(model, NoDraft(), conditioning)
    zipped = decode_images(model, ZipAR(model.width, missing=missing), conditioning)
    assert torch.equal(zipped.tokens, plain.tokens)
    assert torch.equal(zipped.steps, plain.steps)
    assert torch.equal(zipped.trace.log_prob, plain.trace.log_prob)


def sampled_at(model: Language, window: int, alone: bool) -> Tensor:
    """The pass (T,) in which each token is sampled, by the rule: a row begins when the row above has `window`
    tokens."""
    start, passes_of_tokens = 0, []
    for line, first in enumerate(range(0, model.length, model.width)):
        count = min(model.width, model.length - first)
        passes_of_tokens += range(start, start + count)
        start += count if alone and line == 0 else min(window, count)
    return torch.tensor(passes_of_tokens)


def placeholder_of(first: int, width: int, when: Tensor) -> int:
    """The position whose token replaces the one before `first`, the first position of a row. It is the newest of the
    row above that token's row or, in the second row, the newest of the first row."""
    above = range(first - 2 * width, first - width) if first >= 2 * width else range(first - width, first)
    return max(k for k in above if when[k] < when[first])


def without_a_cache(family: str, model: Language, tokens: Tensor, prompt: int, window: int, alone: bool) -> Tensor:
    """Natural-log probabilities (T,) of an image's tokens, computed in one pass. Each is conditioned on the tokens that
    existed when it was sampled. The sequence is the prefix, the tokens, then a placeholder for the token before each
    row that began too early."""
    prefix = model.condition(test_targets.prompts(family, [prompt]), True)
    before, total, width = len(prefix), model.length, model.width
    when, at = sampled_at(model, window, alone), torch.arange(total)
    forced = test_targets.forced_of(model)
    placeholders = []  # position, token, the pass in which it is fed, and its row
    for first in range(width, total, width):
        if when[first] <= when[first - 1]:
            token = forced[first - 1] if forced[first - 1] >= 0 else tokens[placeholder_of(first, width, when)]
            placeholders.append((first - 1, int(token), int(when[first]), first // width))
    spots = torch.cat([at, torch.tensor([s[0] for s in placeholders], dtype=torch.int64)])
    fed = torch.cat([when + 1, torch.tensor([s[2] for s in placeholders], dtype=torch.int64)])
    every = torch.cat([tokens, torch.tensor([s[1] for s in placeholders], dtype=torch.int64)])
    sees = torch.zeros(len(every), len(every), dtype=torch.bool)
    for i in range(len(every)):
        sees[i, :total] = (at < spots[i]) & (when < fed[i])
        sees[i, i] = True
        for n, (_, _, _, line) in enumerate(placeholders):  # a forced token exists before its turn
            in_row = i < total and int(spots[i]) // width == line
            if in_row and forced[line * width - 1] >= 0 and not sees[i, line * width - 1]:
                sees[i, total + n] = True
    x = torch.cat([prefix.inputs, model.tok_embeddings(model.ids(every)).expand(2, -1, -1)], 1)
    mask = torch.zeros(2, 1, before + len(every), before + len(every), dtype=torch.bool)
    mask[:, 0, :before, :before] = prefix.valid[:, None] & torch.ones(before, before).tril().bool()
    mask[:, 0, :before, :before] |= torch.eye(before).bool()
    mask[:, 0, before:, :before] = prefix.valid[:, None]
    mask[:, 0, before:, before:] = sees
    table = model.reserved(before + total, before)
    places = torch.cat([torch.arange(before), before + spots]).expand(2, -1)
    rope = model.rope_at(table, places, (~prefix.valid).sum(1, keepdim=True))
    logits = SAMPLING.apply_guidance(model.head(model.hidden(x, rope, mask, None, None)))[0]
    placeholder_slots = {line * width: before + total + n for n, (*_, line) in enumerate(placeholders)}
    rows = logits[[placeholder_slots.get(j, before + j - 1) for j in range(total)]]
    if model.grammar is not None:
        allowed = torch.where(forced[:, None] < 0, torch.arange(model.vocab_size) < model.grammar.codes,
                              torch.arange(model.vocab_size) == forced[:, None])  # fmt: skip
        rows = rows.masked_fill(~allowed, -torch.inf)
    return SAMPLING.probs(rows).log().gather(1, tokens[:, None])[:, 0]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "window", "alone"), [("grouped", 2, True), ("lumina", 3, False), ("emu3", 1, True), ("anole", 2, False)]
)
def test_a_token_is_sampled_given_what_exists(family: str, window: int, alone: bool) -> None:
    """Positions, cache slots, masks and placeholders of every family, against one pass without a cache; prompts of
    several lengths in one batch."""
    model = test_targets.target(family, SIDE)
    drafter = ZipAR(window, "alone" if alone else "overlap")
    out = decode_images(model, drafter, test_targets.prompts(family, [0, 2]))
    when = sampled_at(model, window, alone)
    assert out.steps.eq(int(when.max()) + 1).all()
    assert out.tokens.max() < model.vocab_size
    for row, prompt in enumerate((0, 2)):
        expected = without_a_cache(family, model, out.tokens[row], prompt, window, alone)
        torch.testing.assert_close(out.trace.log_prob[row], expected, atol=3e-4, rtol=3e-4)


@torch.inference_mode()
def test_the_released_code_attends_to_empty_slots() -> None:
    """Computed token by token, each attending to every slot of the cache up to its own. A placeholder stays until the
    token itself is fed. With a mask, the same tokens have other probabilities."""
    model, conditioning, window = test_targets.target("grouped", SIDE), test_targets.prompts("grouped", [1]), 1
    out = decode_images(model, ZipAR(window, missing="zero"), conditioning, 1)
    tokens, when, width = out.tokens[0], sampled_at(model, window, True), model.width
    session, log_probs = model.open(conditioning, 1, True, 1), torch.zeros(model.length)
    for time in range(int(when.max()) + 1):
        for position in range(-1, model.length - 1):
            follows, first = int(when[position + 1]) == time, (position + 1) % width == 0
            if not follows and not (first and position >= 0 and int(when[position]) == time - 1):
                continue  # it gives no token, and it is not the last of a row
            is_placeholder = first and position >= 0 and when[position] >= time
            token = tokens[placeholder_of(position + 1, width, when) if is_placeholder else max(position, 0)].view(1, 1)
            at = torch.full((1, 1), position + session.prefix_length)
            branches = session.both(at)
            logits = model.head(session.feed(session.embed(token, at), branches, branches, session.up_to(branches)))
            if follows:
                probs = SAMPLING.probs(SAMPLING.apply_guidance(logits))[0, 0]
                log_probs[position + 1] = probs[tokens[position + 1]].log()
    torch.testing.assert_close(out.trace.log_prob[0], log_probs, atol=3e-4, rtol=3e-4)
    masked = without_a_cache("grouped", model, tokens, 1, window, True)
    assert (log_probs - masked).abs().max() > 0.05


def test_tables_count_missing_tokens_as_token_0() -> None:
    """Two rows of two tokens; the second row begins after one token. Its first token follows the first row's first
    token and a placeholder for the second one, which is a copy of the first."""
    tables = random_tables(2, 4, 3, 2.0)
    count = 4000
    out = decode_images(TabularTarget(tables), ZipAR(1, "overlap"), None, count, Sampling())
    assert out.steps.eq(3).all()
    probs = torch.zeros(16, dtype=torch.float64)
    p = [table.double() for table in tables]
    for number in range(16):
        a, b, c, d = (number >> shift & 1 for shift in (3, 2, 1, 0))
        stand_in = p[2][2 * a + a, c]
        probs[number] = p[0][0, a] * p[1][a, b] * stand_in * p[3][4 * a + 2 * b + c, d]
    assert float(probs.sum()) == pytest.approx(1)
    numbers = codes(out.tokens, 2)
    assert tiny.fit(numbers, probs) > 1e-4
    assert tiny.fit(numbers, sequence_probs(tables)) < 1e-6


@torch.inference_mode()
@pytest.mark.parametrize("family", ["grouped", "emu3"])
def test_one_row_at_a_time_sees_everything_before_it(family: str) -> None:
    """Drafts that are written repeatedly, against a pass without a cache. An image never gets more tokens than fit,
    even in its short last row."""
    model, conditioning = test_targets.target(family, SIDE), test_targets.prompts(family, [0, 2])
    out = decode_images(model, ParallelJacobi(3, model.width + 1, 0.5), conditioning)
    for row, prompt in enumerate((0, 2)):
        expected = without_a_cache(family, model, out.tokens[row], prompt, model.width, True)
        torch.testing.assert_close(out.trace.log_prob[row], expected, atol=3e-4, rtol=3e-4)
    wide = test_targets.target(family, 5)  # rows in which two rows have drafts at once
    several = decode_images(wide, ParallelJacobi(3, 2, 0.5), conditioning)
    for result in (out, several):
        assert (result.steps <= result.tokens.shape[1]).all()  # the topmost row gains a token in every pass
        assert (result.accepted <= result.drafted).all()
        assert (result.accepted <= result.tokens.shape[1]).all()
    # The agreement of a step is a share of its rows, not whether any of them agrees.
    shares = several.trace.top1.flatten()
    assert ((shares > 0) & (shares < 1)).any()
    assert set(out.trace.top1.unique().tolist()) == {0, 1}  # one row at a time


class Recording(ParallelJacobi):
    """Records the outcome of every step."""

    def open(self, *args: Any) -> Any:
        self.outcomes: list[Any] = []
        return super().open(*args)

    def commit(self, state: Any, outcome: Any) -> None:
        self.outcomes.append(outcome)
        super().commit(state, outcome)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["grouped", "lumina"])
def test_a_draft_sees_what_is_committed_and_its_own_row(family: str) -> None:
    """A target of one layer, so its keys depend on no other token. The distribution of every node depends only on the
    tokens that were committed before the step and on the node's own chain."""
    model, conditioning = test_targets.target(family, SIDE), test_targets.prompts(family, [2])
    model.layers = model.layers[:1]
    drafter = Recording(3, 2, 0.5)
    tokens = decode_images(model, drafter, conditioning, 1).tokens[0]
    prefix, forced, width = model.condition(conditioning, True), test_targets.forced_of(model), model.width
    before, padding, compared = len(prefix), (~prefix.valid).sum(1, keepdim=True), 0
    when = torch.full((model.length,), 99)
    for step, outcome in enumerate(drafter.outcomes):
        draft, fronts = outcome.draft, outcome.draft.parallel_positions
        for k in fronts.extends[0].nonzero().flatten().tolist():
            root, first = int(fronts.positions[0, k, 0]), int(fronts.positions[0, k, 0] + 1) % width == 0
            row_tokens = draft.tokens[k].clone()
            if root >= 0 and first and when[root] >= step:
                expected_root = tokens[placeholder_of(root + 1, width, when.where(when < step, 99))]
                assert row_tokens[0] == (forced[root] if forced[root] >= 0 else expected_root)
            elif root >= 0:
                assert row_tokens[0] == tokens[root]
            for node in range(min(int(draft.valid[k].sum()), model.length - root - 1)):
                chain = [(p, int(row_tokens[n])) for n in range(node + 1) if (p := root + n) >= 0]
                begun = (when < step).nonzero().flatten() // width  # rows with tokens; the next ones have begun
                ends = [
                    p for p in range(max(root, 0)) if p % width == width - 1 and forced[p] >= 0 and p // width in begun
                ]
                past = [(p, int(tokens[p])) for p in range(max(root, 0)) if when[p] < step or p in ends]
                places, ids = (torch.tensor(x) for x in zip(*past, *chain, strict=True)) if past or chain else ((), ())
                x = prefix.inputs
                spots = torch.arange(before)
                if len(places):
                    x = torch.cat([x, model.tok_embeddings(model.ids(ids)).expand(2, -1, -1)], 1)
                    spots = torch.cat([spots, before + places])
                usable = torch.nn.functional.pad(prefix.valid, (0, len(spots) - before), value=True)
                mask = (usable[:, None] | torch.eye(len(spots)).bool())[:, None]
                table = model.reserved(before + model.length, before)
                rope = model.rope_at(table, spots.expand(2, -1), padding)
                logits = SAMPLING.apply_guidance(model.head(model.hidden(x, rope, mask, None, None)[:, -1:]))[0, 0]
                if model.grammar is not None:
                    only = forced[root + node + 1]
                    number = torch.arange(model.vocab_size)
                    logits = logits.where((number == only) if only >= 0 else number < model.grammar.codes, -torch.inf)
                torch.testing.assert_close(outcome.p[k, node], SAMPLING.probs(logits), atol=3e-4, rtol=3e-3)
                compared += 1
        for k, count in enumerate(outcome.kept[0].tolist()):
            first_position = int(fronts.positions[0, k, 0]) + 1
            when[first_position : first_position + count] = step
    assert (when < 99).all()
    assert compared > model.length
