"""The families of targets, each small enough to enumerate: 2x2 codes of five, with the tokens of its image grammar."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import tiny
import torch
from torch import Tensor
from windows import window

from specbench.audit.tabular import codes
from specbench.decoding import rules, trees
from specbench.decoding.drafters.dflash import DFlash
from specbench.decoding.drafters.draft_model import DraftModel
from specbench.decoding.drafters.dynamic import Eagle2
from specbench.decoding.drafters.eagle import Eagle as EagleDrafter
from specbench.decoding.drafters.medusa import Medusa
from specbench.decoding.drafters.none import NoDraft
from specbench.decoding.drafters.pathspec import PathWindow
from specbench.decoding.loop import DecoderConfig, decode
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules.base import MEASURES, neighbours
from specbench.decoding.sampling import Sampling
from specbench.models import eagle
from specbench.models.language import Language
from specbench.models.llamagen import ClassConditioning, Conditioning, LlamaGen, LlamaGenConfig
from specbench.models.loading import emu3
from specbench.models.unified import Prompts, Unified, UnifiedConfig, image_tokens

CODES = torch.tensor([7, 5, 9, 6, 11])  # ids of the codes, in no order
SIDE, VOCAB = 2, len(CODES)
BUSHY = "[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0],[0,0,1]]"
BASE = UnifiedConfig(32, 2, 2, 2, 48, 24)


def sharpened(module, factor=6.0):
    """Makes distributions far from uniform."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.dim() == 2 and "norm" not in name:
                p.mul_(factor)
    return module.eval().requires_grad_(False)


LLAMAGEN = LlamaGenConfig(32, 2, 2, None, 48, VOCAB, 1, 8)
CONFIGS = {
    "classes": replace(LLAMAGEN, num_classes=7),
    "captions": replace(LLAMAGEN, cls_token_num=3),
    "grouped": replace(LLAMAGEN, n_head=4, n_kv_head=2, num_classes=7),
    "lumina": replace(BASE, qk_norm=1),  # new lines, one norm for all heads
    "swin": replace(BASE, qk_norm=1, norms="after"),
    "anole": replace(BASE, qk_norm=2),  # no new lines, a norm per head
    "simplear": replace(BASE, qkv_bias=True),
    # the largest id belongs to the grammar
    "emu3": replace(BASE, n_kv_head=1, rope_base=1e6, vocab_size=emu3.FIRST_CODE),
}


def target(family: str, side: int = SIDE, seed: int = 0) -> Language:
    torch.manual_seed(seed)
    cfg = CONFIGS[family]
    if isinstance(cfg, LlamaGenConfig):
        return sharpened(LlamaGen(replace(cfg, block_size=side * side)))
    if family == "emu3":
        return sharpened(Unified(cfg, emu3.image(CODES, side, side)))
    return sharpened(Unified(cfg, image_tokens(CODES, side, side, None if family == "anole" else 3, [4])))


FAMILIES = ("classes", "grouped", "lumina", "swin", "anole", "emu3", "simplear")


def prompts(family: str, numbers: list[int]) -> ClassConditioning | Conditioning | Prompts:
    """Prompt number i of every row. In the unified families the prompts have several lengths in one padded batch."""
    if family in ("classes", "grouped"):
        return ClassConditioning(torch.tensor(numbers))
    if family == "captions":
        features = torch.randn(3, 3, 8, generator=torch.Generator().manual_seed(3))
        return Conditioning(features[numbers], torch.ones(3, 3).triu().flip(0).bool()[numbers])
    texts = [[0, 12, 13, 14, 2], [0, 15, 2], [0, 16, 17, 18, 19, 20, 2]]
    length = 9
    ids, valid = (
        torch.ones(len(numbers), length, dtype=torch.int64),
        torch.zeros(len(numbers), length, dtype=torch.bool),
    )
    for row, i in enumerate(numbers):
        ids[row, -len(texts[i]) :], valid[row, -len(texts[i]) :] = torch.tensor(texts[i]), True
    none, none_valid = torch.ones_like(ids), torch.zeros_like(valid)
    none[:, -2:], none_valid[:, -2:] = torch.tensor([0, 2]), True
    return Prompts(ids, valid, none, none_valid)


def alone(family: str, model: Language, i: int, tokens: Tensor, guided: bool) -> Tensor:
    """Logits (2 or 1, n + 1, V) of prompt i without padding and cache: before and after each of the tokens (n,)."""
    prompt = prompts(family, [i])
    if isinstance(prompt, Conditioning):
        prefix = model.condition(prompt, guided)
        return model.head(model.uncached(prefix, tokens.expand(1 + guided, -1)))[:, len(prefix) - 1 :]
    halves = []
    for half in range(2 if guided else 1):
        if isinstance(prompt, Prompts):
            ids, valid = ((prompt.ids, prompt.valid), (prompt.no_ids, prompt.no_valid))[half]
            ids = ids[valid][None]
            half_prompt = Prompts(ids, torch.ones_like(ids, dtype=torch.bool), ids, ids > 0)
        else:
            half_prompt = ClassConditioning(prompt.classes if half == 0 else torch.tensor([7]))
        prefix = model.condition(half_prompt, False)
        halves.append(model.head(model.uncached(prefix, tokens[None]))[:, len(prefix) - 1 :])
    return torch.cat(halves)


def forced_of(model: Language) -> Tensor:
    return model.grammar.forced if model.grammar else torch.full((model.length,), -1)


def side_of(model: Language) -> int:
    return math.isqrt(int((forced_of(model) < 0).sum()))


def sequence_probs(family: str, model: Language, i: int, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Every sequence (n, T) that the grammar allows, and its probability."""
    forced = forced_of(model)
    free = (forced < 0).nonzero().flatten()
    sequences = forced.expand(VOCAB ** len(free), -1).clone()
    sequences[:, free] = torch.tensor(list(itertools.product(range(VOCAB), repeat=len(free))))
    batch = prompts(family, [i] * len(sequences))
    prefix = model.condition(batch, sampling.guided)
    twice = torch.cat([sequences, sequences]) if sampling.guided else sequences
    logits = model.head(model.uncached(prefix, twice[:, :-1])[:, len(prefix) - 1 :])
    probs = sampling.probs(sampling.apply_guidance(logits)[:, free, :VOCAB])
    return sequences, probs.gather(-1, sequences[:, free].unsqueeze(-1)).squeeze(-1).double().prod(1)


def head(model: Language) -> eagle.EagleNetwork:
    torch.manual_seed(5)
    return sharpened(eagle.like_target(model), 2.0)


DRAFTERS = {
    "none": lambda family, model: NoDraft(),
    "draft_model": lambda family, model: DraftModel(target(family, side_of(model), seed=7), 3),
    "eagle": lambda family, model: EagleDrafter(head(model), trees.chain_paths(3)),
    "eagle_tree": lambda family, model: EagleDrafter(head(model), trees.parse(BUSHY)),
    "eagle2": lambda family, model: Eagle2(head(model), nodes=9, depth=3, width=3),
    "dflash": lambda family, model: DFlash(tiny.dflash(model), trees.chain_paths(3)),
    "medusa": lambda family, model: Medusa(tiny.medusa(model, seed=6), trees.parse(BUSHY)),
    "jacobi": lambda family, model: window(3, match=True),
    "sjd": lambda family, model: window(3, init="vertical_sample"),
    "scd": lambda family, model: window(4, init="horizontal_repeat", coupling="gumbel"),
    "sjd_pac": lambda family, model: window(8, width=2, depth=3, coupling="maximal"),
    "pathspec": lambda family, model: PathWindow(3, chains=2),
}
SAMPLING = Sampling(temperature=0.9, cfg_scale=1.5)
#: The drafters for each family. swin and simplear differ from lumina only in their networks' arithmetic, which the test
#: of paths inside trees covers for every family, so they have none. grouped shares keys among heads, which its drafter
#: does, too. classes have one position before the image, anole has no new lines, emu3 has tokens after its image, and
#: captions have no guidance here: a model that drafts with a cache of its own is added.
OWN_CACHE = ("draft_model", "eagle2")
CHOSEN = {"lumina": tuple(DRAFTERS), "grouped": ("eagle2",), "swin": (), "simplear": ()}


@pytest.mark.usefixtures("rows_together")
@pytest.mark.parametrize(
    ("family", "name", "sampling"),
    [
        *((f, d, SAMPLING) for f in FAMILIES for d in CHOSEN.get(f, OWN_CACHE)),
        *(("captions", d, Sampling()) for d in OWN_CACHE),  # without guidance one pass per row
    ],
)
def test_every_family_keeps_its_distribution_under_every_drafter(family, name, sampling):
    """Padding, positions, norms, grammar, caches and guidance together, against the distribution that is enumerated
    without any of them (chi-square; 21 tests at 1e-5). A target's cache that is not compacted is detected by
    lumina with medusa alone; an audit of eagle1 detects it, too (test_mutants_are_caught_and_undone)."""
    model, count = target(family), 1000
    drafter = DRAFTERS[name](family, model)
    config = DecoderConfig(tiny.read_by(model, drafter), drafter, rules.exact(), sampling)
    out = decode(config, prompts(family, [0] * count), tiny.rng(count))
    forced = forced_of(model)
    free = forced < 0
    assert (out.tokens == forced)[:, ~free].all()
    assert (out.tokens[:, free] < VOCAB).all()
    sequences, probs = sequence_probs(family, model, 0, sampling)
    assert float(probs.sum()) == pytest.approx(1, abs=1e-5)
    assert torch.equal(codes(sequences[:, free], VOCAB), torch.arange(len(probs)))
    assert tiny.fit(codes(out.tokens[:, free], VOCAB), probs) > 1e-5
    if name == "none":
        assert out.steps.eq(model.length).all()
    else:
        assert out.accepted.sum() > 0
        assert out.steps.float().mean() < model.length


@torch.inference_mode()
@pytest.mark.parametrize("family", [*FAMILIES, "captions"])
def test_a_path_inside_a_tree_has_the_logits_of_the_path_alone(family):
    """Prompts of several lengths in one padded batch, with rows at different positions."""
    model = target(family, side=4)
    tree = trees.build(trees.parse(BUSHY))
    torch.manual_seed(0)
    tokens, history = torch.randint(0, VOCAB, (3, tree.nodes)), torch.randint(0, VOCAB, (3, 40))
    count, numbers = torch.tensor([3, 5, 4]), [0, 1, 2]
    tokens[:, 0] = history[numbers, count - 1]
    session = model.open(prompts(family, numbers), 3, True, tree.nodes)
    positions = torch.arange(6).expand(3, -1) + session.prefix_length - 1
    session.feed_chain(torch.cat([history[:, :1], history[:, :5]], 1), positions)
    logits, _ = session.forward(tokens, tree, history, count)
    for row, c in enumerate(count.tolist()):
        for node in range(tree.nodes):
            path = [n for n in range(1, tree.nodes) if tree.ancestors[0, node, n]]
            full = torch.cat([history[row, :c], tokens[row, path]])
            expected = alone(family, model, numbers[row], full, guided=True)[:, -1]
            torch.testing.assert_close(logits[[row, row + 3], node], expected, atol=3e-4, rtol=3e-4)


def pairs(first: str, *others: str, without: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """The first family with every drafter, the others with those that read the prompt with a cache of their own."""
    return [(first, name) for name in DRAFTERS if name not in without] + list(itertools.product(others, OWN_CACHE))


@pytest.mark.parametrize(("family", "name"), pairs("lumina", "classes", "captions"))
def test_an_image_does_not_depend_on_its_batch(family, name):
    model, sampling = target(family, side=4), Sampling(cfg_scale=2.0)
    numbers = [0, 1, 2, 1]

    def run(rows):
        drafter = DRAFTERS[name](family, model)
        config = DecoderConfig(tiny.read_by(model, drafter), drafter, rules.cool(2.0, 3), sampling)
        return decode(config, prompts(family, [numbers[i] for i in rows]), RandomStreams([(5, i) for i in rows]))

    together = run(range(4))
    for rows in ([0], [2, 1], [3]):
        part = run(rows)
        assert torch.equal(part.tokens, together.tokens[rows])
        assert torch.equal(part.steps, together.steps[rows])


class RecordingDrafter:
    """A drafter that records its drafts."""

    def __init__(self, drafter):
        self.drafter, self.drafts = drafter, []

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def propose(self, *args):
        self.drafts.append(self.drafter.propose(*args))
        return self.drafts[-1]


def drafts_of(family, model, name, prompt_batch):
    """(the decoded image, the drafts of every step) for one image."""
    drafter = RecordingDrafter(DRAFTERS[name](family, model))
    config = DecoderConfig(tiny.read_by(model, drafter.drafter), drafter, rules.exact(), SAMPLING)
    return decode(config, prompt_batch, RandomStreams([(3, 0)])), drafter.drafts


def add_padding(prompt_batch: Prompts, more: int) -> Prompts:
    """The same prompts with more padding."""
    values = {"ids": 9, "valid": False, "no_ids": 8, "no_valid": False}
    pad = torch.nn.functional.pad
    return Prompts(**{name: pad(getattr(prompt_batch, name), (more, 0), value=value) for name, value in values.items()})


@pytest.mark.parametrize(("family", "name"), pairs("lumina", "anole", "emu3"))
def test_padding_changes_no_draft(family, name):
    """A drafter that reads padding, or counts its positions, would stay lossless but draft worse."""
    model = target(family, side=4)
    (narrow_out, short), (wide_out, long) = (
        drafts_of(family, model, name, add_padding(prompts(family, [1]), more)) for more in (0, 5)
    )
    assert torch.equal(narrow_out.tokens, wide_out.tokens)
    assert torch.equal(narrow_out.steps, wide_out.steps)
    for a, b in zip(short, long, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        torch.testing.assert_close(a.probs, b.probs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "name"), pairs("lumina", "emu3", without=("none",)))
def test_forced_tokens_are_drafted_as_a_point_mass(family, name):
    model = target(family, side=4)
    out, drafts = drafts_of(family, model, name, prompts(family, [1]))
    forced, count, seen = forced_of(model), 0, 0
    assert len(drafts) >= int(out.steps)
    for draft, accepted in zip(drafts, out.trace.accepted[0].tolist(), strict=False):
        if count >= model.length:
            break
        for probs, node in zip(draft.probs[0], draft.tree.inner[0].tolist(), strict=True):
            position = count + int(draft.tree.depth[0, node])
            children = (draft.tree.parent[0] == node) & draft.valid[0] & (draft.tree.depth[0] > 0)
            if position < model.length and forced[position] >= 0 and children.any():
                assert probs[forced[position]] == 1
                seen += 1
        count += accepted + 1
    assert seen > 0


def test_only_image_tokens_stay_in_the_head():
    """The head has only the rows of the image's ids, in the order of the tokens."""
    image = image_tokens(CODES, 2, 3, 3, [4])
    assert image.ids.tolist() == [7, 5, 9, 6, 11, 3, 4]
    assert image.grammar.forced.tolist() == [-1, -1, -1, 5, -1, -1, -1, 5, 6]
    assert image.grammar.free.tolist() == [0, 1, 2, 4, 5, 6]
    assert image.width == 4
    model = Unified(BASE, image)
    assert model.output.weight.shape == (7, 32)
    assert model.ids(torch.tensor([5, 0])).tolist() == [3, 7]


def test_a_large_vocabulary_is_a_multiple_of_a_gpu_read():
    """The tokens after the grammar's own are allowed nowhere."""
    image = image_tokens(torch.arange(8192) + 4, 2, 2, 8803, [8196])
    assert len(image.ids) == 8208
    assert image.ids[8192:].tolist() == [8803, 8196] + [4] * 14
    assert image.grammar.codes == 8192
    assert image.grammar.forced.tolist() == [-1, -1, 8192, -1, -1, 8192, 8193]
    model = Unified(replace(BASE, vocab_size=8804), image)
    session = model.open(Prompts(*[torch.ones(1, 2, dtype=x) for x in (torch.int64, torch.bool)] * 2), 1, False, 0)
    logits = torch.zeros(1, 7, 8208).index_fill_(2, torch.arange(8194, 8208), 9.0)
    probs = session.constrain(logits, torch.arange(7)[None]).softmax(-1)
    assert probs[..., 8194:].eq(0).all()
    assert probs[0, 2, 8192] == 1


def test_a_token_that_is_not_a_code_is_near_only_to_itself():
    """Otherwise a relaxed rule could replace a code by a new line."""
    codes = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    for proximity in MEASURES:
        table = neighbours(torch.cat([codes, torch.full((2, 3), torch.nan)]), 20, proximity)
        assert table.shape == (11, 8)
        assert torch.equal(table[:9], neighbours(codes, 20, proximity))
        assert table[9].eq(9).all()
        assert table[10].eq(10).all()
