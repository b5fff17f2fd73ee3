"""DFlash: the outputs of its network, its training, and the drafts of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import test_targets
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.config import configuration, registry
from specbench.decoding import rules, trees
from specbench.decoding.drafters.dflash import DFlash
from specbench.decoding.loop import DecoderConfig, StepResult, decode
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.decoding.verify import TokenWise
from specbench.decoding.verify.block import BlockVerification
from specbench.decoding.verify.traversal import Traversal
from specbench.errors import UsageError
from specbench.models import dflash, eagle
from specbench.models.dflash import DFlashNetwork, DFlashTraining
from specbench.models.language import Language
from specbench.models.llamagen import LlamaGen
from specbench.models.loading import checkpoints
from specbench.models.scenes_config import TARGET
from specbench.models.supervision import Batch, TargetHead, following_ids

GUIDED = Sampling(cfg_scale=2.0)
CHAIN, BUSHY = trees.chain_paths(3), trees.parse("[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0],[0,0,1]]")


def read_by(target: Language, net: DFlashNetwork) -> Language:
    return target.with_aux_hidden_layers(net.cfg.aux_hidden_layers)


def rotated(x: Tensor, table: Tensor, rotary: str) -> Tensor:
    """x (n, head_dim) rotated by table (n, head_dim / 2, 2), pair by pair."""
    out, half = torch.empty_like(x), x.shape[1] // 2
    for i in range(half):
        a, b = (i, i + half) if rotary == "halves" else (2 * i, 2 * i + 1)
        cos, sin = table[:, i, 0], table[:, i, 1]
        out[:, a], out[:, b] = x[:, a] * cos - x[:, b] * sin, x[:, b] * cos + x[:, a] * sin
    return out


def plainly(net: DFlashNetwork, hidden: Tensor, anchor: Tensor, before: Tensor, inside: Tensor) -> Tensor:
    """Outputs (K, dim) of a block of one sequence, head by head and without a cache. hidden (n, width): the target's at
    the positions before the anchor; anchor (dim,); before, inside: rotary rows of the context and of the block."""
    c, eps = net.cfg, net.cfg.norm_eps

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight

    def head_norm(x: Tensor, norm: Any, head: int, heads: int) -> Tensor:
        row = head * len(norm.weight) // heads
        return F.layer_norm(x, x.shape[-1:], norm.weight[row], norm.bias[row])

    context = norm(hidden @ net.fc.weight.T, net.hidden_norm.weight)
    x = torch.cat([anchor[None], net.mask.expand(len(inside) - 1, -1)])
    size, group = c.block.head_dim, c.n_head // c.n_kv_head
    for layer in net.layers:
        normed = norm(x, layer.attention_norm.weight)
        weight, attention, outputs = layer.attention.wqkv.weight, layer.attention, []
        for h in range(c.n_head):
            kv = c.n_head + h // group
            wq, wk, wv = (weight[i * size :][:size] for i in (h, kv, kv + c.n_kv_head))
            q, k = normed @ wq.T, torch.cat([context, normed]) @ wk.T
            if c.qk_norm:
                q = head_norm(q, attention.q_norm, h, c.n_head)
                k = head_norm(k, attention.k_norm, h // group, c.n_kv_head)
            q, k = rotated(q, inside, c.rotary), rotated(k, torch.cat([before, inside]), c.rotary)
            outputs.append((q @ k.T / size**0.5).softmax(-1) @ (torch.cat([context, normed]) @ wv.T))
        x = x + torch.cat(outputs, -1) @ attention.wo.weight.T
        normed, feed = norm(x, layer.ffn_norm.weight), layer.feed_forward
        x = x + (F.silu(normed @ feed.w1.weight.T) * (normed @ feed.w3.weight.T)) @ feed.w2.weight.T
    return norm(x, net.norm.weight)


def logits_of(target: Language, net: DFlashNetwork, conditioning: Any, tokens: Tensor, count: int, size: int) -> Tensor:
    """Logits (R, K - 1, V) of the tokens after the first `count` of tokens (B, n), from passes without a cache."""
    prefix = target.condition(conditioning, True)
    streams = torch.cat([tokens[:, :count]] * 2)
    hidden = read_by(target, net).uncached(prefix, streams)
    root = len(prefix) + count - 1
    positions, padding = torch.arange(root + size), (~prefix.valid).sum(1, keepdim=True)
    rope = target.rope_at(target.reserved(root + size, len(prefix)), positions.expand(len(streams), -1), padding)
    outputs = []
    for row in range(len(streams)):
        seen = torch.cat([prefix.valid[row], torch.ones(count, dtype=torch.bool)])[:root].nonzero().flatten()
        table = rope[row % len(rope)]
        anchor = target.tok_embeddings.weight[target.ids(streams[row, -1])]
        wide = hidden[row, seen, target.block.dim :]
        outputs.append(target.head(plainly(net, wide, anchor, table[seen], table[root:])[1:]))
    return torch.stack(outputs)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["captions", "grouped", "lumina", "swin", "emu3"])
def test_a_step_drafts_from_what_the_network_gives_without_a_cache(family):
    """Also after drafts with rejected tokens: no rejected token stays in the cache."""
    target = test_targets.target(family, 3)
    net, which = tiny.dflash(target), [0, 1, 2]
    drafter, conditioning = DFlash(net, CHAIN), test_targets.prompts(family, which)
    rng, total = RandomStreams([(0, i) for i in which]), target.length
    session = read_by(target, net).open(conditioning, 3, True, drafter.tree.nodes)
    state = drafter.open(session, conditioning, GUIDED, rng)
    history, count, steps = torch.zeros(3, total + 16).long(), torch.zeros(3).long(), torch.zeros(3).long()
    accepted = []
    for _ in range(6):
        draft = drafter.propose(state, history, count, steps)
        for row in range(3):
            c = int(count[row])
            assert draft.valid[row, 1:].all() == (c > 0)  # before the first token there is no anchor
            if not 0 < c < total:
                continue
            single = test_targets.prompts(family, [which[row]])
            logits = logits_of(target, net, single, history[row : row + 1], c, 4)
            guided = session.constrain(GUIDED.apply_guidance(logits), (c + torch.arange(3))[None])
            torch.testing.assert_close(draft.probs[row], guided.softmax(-1)[0], atol=2e-5, rtol=1e-3)
        logits, hidden = session.forward(draft.tokens, draft.tree, history, count)
        p = GUIDED.distributions(logits, session, count[:, None] + draft.tree.depth).p
        verdict = TokenWise().verify(p, draft, rules.exact(), rng, steps)
        session.commit(verdict, draft.tree, count)
        drafter.commit(state, StepResult(draft, p, hidden, verdict, count))
        accepted += verdict.length.tolist()
        history.scatter_(1, count[:, None] + torch.arange(4), verdict.tokens)
        count, steps = (count + verdict.length + 1).clamp_max(total), steps + 1
    assert min(accepted) == 0 < max(accepted)  # the comparison was made after rejections and after acceptances


def batch_of(target: Language, family: str, tokens: Tensor) -> Batch:
    prefix = target.condition(test_targets.prompts(family, [0, 1]), False)
    hidden = target.uncached(prefix, tokens[:, :-1])
    return Batch(tokens, hidden, following_ids(target, prefix, tokens), prefix.valid)


@torch.no_grad()
@pytest.mark.parametrize("family", ["captions", "lumina", "emu3"])
def test_training_sees_what_a_step_sees(family):
    """A block attends to the context before its own anchor and to itself, and to no other anchor of the pass."""
    target = test_targets.target(family, 3)
    net = tiny.dflash(target)
    tokens = torch.randint(5, (2, target.length), generator=torch.Generator().manual_seed(0))
    training = DFlashTraining(net, TargetHead(read_by(target, net)))
    outputs = list(training.draft(batch_of(read_by(target, net), family, tokens), 3))
    assert [len(out.positions) for out in outputs] == [len(range(k, target.length, 3)) for k in (1, 2, 3)]
    seen = 0
    for k, out in enumerate(outputs, start=1):
        for i, position in enumerate(out.positions.tolist()):
            logits = logits_of(target, net, test_targets.prompts(family, [0, 1]), tokens, position - k + 1, 4)
            torch.testing.assert_close(out.logits[:, i], training.head.codes(logits[:2, k - 1]), atol=1e-3, rtol=1e-3)
            seen += 1
    assert seen > target.length // 2


def test_anchors_are_random_in_a_step_and_the_same_in_every_validation():
    target = tiny.llamagen(side=8)
    training = DFlashTraining(tiny.dflash(target), TargetHead(target))
    first, second = (training.anchors(256, torch.device("cpu"), torch.Generator().manual_seed(i)) for i in (0, 1))
    assert not torch.equal(first, second)
    assert len(first) == len(first.unique()) == 255 // 8
    assert int(training.anchors(4000, torch.device("cpu"), torch.Generator()).max()) < 3999
    assert len(training.anchors(40000, torch.device("cpu"), torch.Generator())) == dflash.ANCHORS
    fixed = training.anchors(256, torch.device("cpu"), None)
    assert (fixed % 16).bincount().min() >= 5  # every column of 16


def decoded(verification: Any, paths: Any, deterministic: bool, sampling: Sampling, images: int) -> tuple[Tensor, Any]:
    """The sequences of the enumerable target as numbers, and the decoding."""
    target = tiny.llamagen()
    net = tiny.dflash(target)
    config = DecoderConfig(
        read_by(target, net), DFlash(net, paths, deterministic), rules.exact(), sampling, verification=verification
    )
    out = decode(config, tiny.prompts(images, same=True), tiny.rng(images))
    return (out.tokens * torch.tensor([125, 25, 5, 1])).sum(1), out


@pytest.mark.usefixtures("rows_together")
@pytest.mark.parametrize(
    ("verification", "paths", "deterministic"),
    [
        (TokenWise(), CHAIN, False),
        (TokenWise(), CHAIN, True),
        (BlockVerification(), CHAIN, False),
        (BlockVerification(), CHAIN, True),
        (TokenWise(), BUSHY, False),
        (TokenWise(), BUSHY, True),
        (Traversal(), BUSHY, False),
    ],
)
def test_tokens_have_the_targets_distribution(verification, paths, deterministic):
    """Under an exact method a p-value below 1e-4 has that probability; the seed is fixed."""
    sequences, out = decoded(verification, paths, deterministic, GUIDED, 2000)
    assert out.accepted.sum() > 200  # drafts take part
    probs = tiny.sequence_probs(tiny.llamagen(), tiny.prompts(1), GUIDED.cfg_scale)
    assert tiny.fit(sequences, probs) > 1e-4


def test_a_deterministic_draft_is_accepted_with_the_targets_probability_of_its_token():
    """The token-wise acceptance of the first draft token of a step, over steps: its mean is the mean of p(token)."""
    target = tiny.llamagen(side=4)
    net = tiny.dflash(target)
    drafter, conditioning, rows = DFlash(net, CHAIN, deterministic=True), tiny.prompts(400, same=True), 400
    rng = tiny.rng(rows)
    session = read_by(target, net).open(conditioning, rows, True, drafter.tree.nodes)
    state = drafter.open(session, conditioning, GUIDED, rng)
    history = torch.randint(5, (rows, 32), generator=torch.Generator().manual_seed(1))
    count, steps = torch.zeros(rows).long(), torch.zeros(rows).long()
    state.fresh.zero_()
    with torch.inference_mode():
        tokens = history[:, :1].clone()
        session.forward(tokens, trees.build([]), history, count)  # the last position of the prefix
        count = count + 1
        draft = drafter.propose(state, history, count, steps)
        assert draft.sampled is not None
        assert not draft.sampled.any()
        top = drafter.distributions(state, history, count).logits.argmax(-1)
        assert torch.equal(draft.tokens[:, 1:], top)
        logits, _ = session.forward(draft.tokens, draft.tree, history, count)
        p = GUIDED.distributions(logits, session, count[:, None] + draft.tree.depth).p
        verdict = TokenWise().verify(p, draft, rules.exact(), rng, steps)
    torch.testing.assert_close(verdict.first, p[:, 0].gather(1, top[:, :1])[:, 0])
    # a mean of 400 acceptances has a standard deviation of at most 0.5 / 20; four of them
    assert abs(float((verdict.length > 0).float().mean() - verdict.first.mean())) < 0.1


def test_an_image_does_not_depend_on_the_batch():
    target = tiny.llamagen(side=4)
    net = tiny.dflash(target)
    config = DecoderConfig(read_by(target, net), DFlash(net, CHAIN), rules.exact(), GUIDED)
    together = decode(config, tiny.prompts(4), tiny.rng(4))
    prompts = tiny.prompts(4)
    for row in range(4):
        alone = decode(
            config, type(prompts)(prompts.features[row : row + 1], prompts.valid[row : row + 1]), tiny.rng([row])
        )
        assert tiny.equal(tiny.image(together, row), tiny.image(alone, 0))


def test_it_has_as_many_parameters_as_eagle_and_reads_the_layers_of_the_release():
    """The released drafter of Qwen3-8B, which has 36 layers, reads five of them: 1, 9, 17, 25 and 33 (SpecForge's
    formula)."""
    assert dflash.aux_hidden_layers(36, 5) == (1, 9, 17, 25, 33)
    assert dflash.aux_hidden_layers(36, 1) == (18,)
    assert dflash.aux_hidden_layers(6, 2) == (1, 3)
    assert dflash.aux_hidden_layers(2, 2) == (1,)  # a tiny target has no others
    target = LlamaGen(TARGET)
    ours, eagles = (
        sum(p.numel() for p in net.parameters()) for net in (dflash.like_target(target, 8), eagle.like_target(target))
    )
    assert 0 <= eagles - ours < 2 * 3 * TARGET.dim  # less than one row of the feed-forward parts


def test_a_draft_that_is_longer_than_a_block_is_an_error():
    with pytest.raises(UsageError, match="4.*DFlash.*3.*window=3"):
        DFlash(tiny.dflash(tiny.llamagen()), trees.chain_paths(4))


def test_a_network_of_another_target_and_a_foreign_file_are_refused(tmp_path):
    target = tiny.llamagen(side=4)
    bundle = SimpleNamespace(target=target, name="tiny", device=torch.device("cpu"), dtype=torch.float32)
    loader = dflash.DFlashLoader(bundle, "dflash")
    file = tmp_path / registry.DRAFTER_FILE
    for other, fits in ((target, True), (tiny.llamagen(side=4, dim=64), False), (test_targets.target("emu3"), False)):
        checkpoints.save(tiny.dflash(other), file, "dflash", torch.float32)
        if fits:
            assert loader.read(tmp_path).cfg == tiny.dflash(target).cfg
        else:
            with pytest.raises(UsageError, match="target"):
                loader.read(tmp_path)
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match="published"):
        loader.read(tmp_path)


def test_each_form_is_a_variant():
    for words, draft in (("", "sampled"), ("variant=released", "deterministic"), ("drafter=dflash_tree", "sampled")):
        cfg = configuration.compose(f"method=dflash {words}".split())
        assert registry.chosen("drafter", cfg).draft_sampling == draft
