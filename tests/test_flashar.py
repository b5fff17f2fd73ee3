"""FlashAR: the network against a plain implementation, its mask and gate, its loss and training, and its decoding."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace

import pytest
import tiny
import torch
from commands import row_of
from safetensors.torch import load_file

from specbench import cli
from specbench.bench.plan import plan
from specbench.config import configuration, registry
from specbench.data import scenes
from specbench.decoding.drafters.none import NoDraft
from specbench.decoding.loop import DecoderConfig, decode
from specbench.decoding.rules import exact
from specbench.decoding.sampling import Sampling
from specbench.errors import UsageError
from specbench.harness.pipeline import Pipeline
from specbench.models.flashar import FlashAR, FlashARConfig
from specbench.models.llamagen import Conditioning, LlamaGen, LlamaGenConfig
from specbench.models.pixels import to_float
from specbench.training.trainer import Recipe
from tools.scenes import __main__ as train_scenes
from tools.scenes import flashar as training

PREFIX, VOCAB = 3, 5


def network(side=3, seed=0, layers=3, branch=1):
    """Random weights, far enough from zero that gates and distributions differ."""
    torch.manual_seed(seed)
    shape = FlashARConfig(
        16, layers, 2, None, 24, VOCAB, PREFIX, caption_dim=8, block_size=side * side, branch_layers=branch
    )
    model = FlashAR(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn_like(parameter) * 0.4)
        model.gate_output.bias.fill_(0.3)
        model.branch_norm.weight.add_(0.2 * torch.randn(16))
    return model.eval().requires_grad_(False)


def prefix_of(model, count=2, guided=False):
    features = torch.randn(count, PREFIX, 8, generator=torch.Generator().manual_seed(3))
    return model.condition(Conditioning(features, torch.ones(count, PREFIX, dtype=torch.bool)), guided)


def draw(model, count=2, seed=5):
    return torch.randint(0, VOCAB, (count, model.length), generator=torch.Generator().manual_seed(seed))


def norm(x, weight, eps=1e-5):
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def rotated(x, cell, side):
    """x (heads, 8) at a cell: pairs 0 and 1 rotate with the row, 2 and 3 with the column; no rotation in the prefix."""
    if cell is None:
        return torch.zeros_like(x)
    angles = torch.tensor([at / 10000 ** (i / 2) for at in divmod(cell, side) for i in (0, 1)])
    pairs = torch.view_as_complex(x.reshape(2, 4, 2).contiguous()) * torch.polar(torch.ones(4), angles)
    return torch.view_as_real(pairs).reshape(2, 8)


def plain_block(block, states, sees, cells, side):
    """A block over states (n, 16), position by position: position i attends to the positions of `sees[i]`."""
    normed = [norm(x, block.attention_norm.weight) for x in states]
    q, k, v = zip(*((block.attention.wqkv.weight @ x).view(3, 2, 8) for x in normed), strict=True)
    q, k = ([rotated(x, cell, side) for x, cell in zip(each, cells, strict=True)] for each in (q, k))
    out = []
    for i, x in enumerate(states):
        heads = []
        for head in range(2):
            scores = torch.stack([q[i][head] @ k[j][head] / 8**0.5 for j in sees[i]]).softmax(0)
            heads.append(sum(s * v[j][head] for s, j in zip(scores, sees[i], strict=True)))
        x = x + block.attention.wo.weight @ torch.cat(heads)
        w, y = block.feed_forward, norm(x, block.ffn_norm.weight)
        gate = w.w1.weight @ y
        out.append(x + w.w2.weight @ (gate * torch.sigmoid(gate) * (w.w3.weight @ y)))
    return out


def plain_logits(model, inputs, tokens):
    """Fused logits (T, V) of an image's cells, from its prefix's inputs (P, 16) and tokens (T,)."""
    side, cells = model.width, [None] * PREFIX + list(range(model.length))
    rank = [i if cell is None else PREFIX + sum(divmod(cell, side)) for i, cell in enumerate(cells)]
    sees = [[j for j in range(len(cells)) if rank[j] <= rank[i]] for i in range(len(cells))]
    states = [*inputs, *model.tok_embeddings.weight[tokens]]
    entry = model.cfg.n_layer - model.cfg.branch_layers
    for number, block in enumerate(model.layers):
        if number == entry:
            branch = states[PREFIX:]
            raw = states[PREFIX - 1]
        states = plain_block(block, states, sees, cells, side)
    h = [norm(x, model.norm.weight) for x in states[PREFIX - 1 :]]
    image = [[j - PREFIX for j in row if j >= PREFIX] for row in sees[PREFIX:]]
    for block in model.branch_layers:
        branch = plain_block(block, branch, image, cells[PREFIX:], side)
    v = [norm(x, model.branch_norm.weight) for x in [raw, *branch]]
    out = []
    for cell in range(model.length):
        row, column = divmod(cell, side)
        across = model.output.weight @ h[cell] if column or not cell else None
        down = model.branch_output.weight @ v[cell + 1 - side if cell else 0] if row or not cell else None
        if not cell:
            g = torch.sigmoid(model.first_gate(h[0]))
        elif row and column:
            inner = model.gate_hidden(torch.cat([h[cell], v[cell + 1 - side]]))
            g = torch.sigmoid(model.gate_output(inner * torch.sigmoid(inner)))
        out.append(down if across is None else across if down is None else g * across + (1 - g) * down)
    return torch.stack(out)


@pytest.mark.parametrize(("layers", "branch"), [(3, 1), (4, 2)])
@torch.no_grad()
def test_the_forward_pass_equals_a_plain_implementation(layers, branch):
    model = network(layers=layers, branch=branch)
    model.first_gate.weight.copy_(torch.randn(1, 16))
    prefix, tokens = prefix_of(model), draw(model)
    logits = model.head(model.all_cells(prefix, tokens))
    for row in range(2):
        expected = plain_logits(model, prefix.inputs[row], tokens[row])
        torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_last_cell_is_no_input_and_the_first_row_and_column_have_one_branch():
    model = network()
    prefix, tokens = prefix_of(model), draw(model)
    states = model.all_cells(prefix, tokens)
    assert torch.equal(states, model.all_cells(prefix, tokens[:, :-1]))
    gate = states[..., -1].unflatten(1, (3, 3))
    assert (gate[:, 0, 1:] == 1).all()
    assert (gate[:, 1:, 0] == 0).all()
    inner = gate[:, 1:, 1:]
    assert ((inner > 0) & (inner < 1)).all()
    assert inner.std() > 0.01  # it depends on the cell
    without = states[:, 1:3].clone()
    without[..., 16:32] = 7.0
    assert torch.equal(model.head(without), model.head(states[:, 1:3]))  # no vertical logits in the first row


@torch.no_grad()
def test_a_cell_depends_on_earlier_steps_alone():
    model = network(side=4)
    prefix, tokens, steps = prefix_of(model, 1), draw(model, 1), model.steps(torch.device("cpu"))
    before = model.head(model.all_cells(prefix, tokens))[0]
    for cell in range(model.length):
        other = tokens.clone()
        other[0, cell] = (other[0, cell] + 1) % VOCAB
        moved = (model.head(model.all_cells(prefix, other))[0] != before).any(-1)
        assert torch.equal(moved, steps > steps[cell])  # all later cells, but not its own step's


@torch.no_grad()
def test_a_network_made_of_a_target_begins_with_its_layers_and_an_open_gate():
    target = LlamaGen(LlamaGenConfig(16, 3, 2, None, 24, VOCAB, PREFIX, caption_dim=8, block_size=9))
    model = FlashAR.from_target(target, branch_layers=2).eval().requires_grad_(False)
    prefix, tokens = prefix_of(model), draw(model)
    gate = model.all_cells(prefix, tokens)[..., -1].unflatten(1, (3, 3))
    assert (gate[:, 1:, 1:] == 0.5).all()
    assert (gate[:, 0, 0] == 0.5).all()
    raster = model.uncached(prefix, tokens)[..., :16]
    assert torch.equal(raster, target.eval().requires_grad_(False).uncached(prefix, tokens))
    for copied, layer in zip(model.branch_layers, target.layers[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), layer.parameters(), strict=True))
    assert {id(p) for p in model.trunk} == {
        id(dict(model.named_parameters())[name]) for name, _ in target.named_parameters()
    }


def test_a_branch_leaves_the_trunk_a_layer():
    with pytest.raises(ValueError, match="branch_layers"):
        network(layers=2, branch=2)


def sampled(model, conditions, rows, sampling, observer=None, seed=0):
    config = DecoderConfig(model, NoDraft(), exact(), sampling, observer=observer)
    return decode(config, conditions, tiny.rng(rows, seed))


def conditioning(count, same=False):
    features = torch.randn(1 if same else count, PREFIX, 8, generator=torch.Generator().manual_seed(4))
    return Conditioning(features.expand(count, -1, -1).clone(), torch.ones(count, PREFIX, dtype=torch.bool))


@torch.no_grad()
@pytest.mark.parametrize(("side", "branch"), [(4, 1), (3, 2)])
def test_cached_decoding_is_the_recomputation_without_a_cache_under_guidance_after_the_fusion(side, branch):
    model, conditions, used = network(side=side, layers=3, branch=branch), conditioning(3), []

    def record_stats(stats, total):
        asks = stats.layout.extends
        used.append((stats.layout.next_positions[asks], stats.target.p[asks], asks.nonzero()[:, 0]))

    out = sampled(model, conditions, 3, Sampling(cfg_scale=2.0), record_stats)
    assert out.steps.tolist() == [2 * side - 1] * 3
    with_caption, without = model.head(
        model.all_cells(model.condition(conditions, True), out.tokens.repeat(2, 1))
    ).chunk(2)
    expected = (without + 2 * (with_caption - without)).softmax(-1)
    cells, probs, rows = (torch.cat(parts) for parts in zip(*used, strict=True))
    assert sorted(zip(rows.tolist(), cells.tolist(), strict=True)) == [*itertools.product(range(3), range(side * side))]
    torch.testing.assert_close(probs, expected[rows, cells], rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_an_image_does_not_depend_on_the_batch():
    model, conditions = network(side=4), conditioning(3)
    together = sampled(model, conditions, 3, Sampling(cfg_scale=2.0))
    for row in range(3):
        alone = sampled(model, conditions.rows(row, row + 1), [row], Sampling(cfg_scale=2.0))
        assert tiny.equal(tiny.image(together, row), tiny.image(alone, 0))


@torch.no_grad()
def test_images_have_the_product_of_the_fused_distributions():
    """2x2 images: chi-square over all 625 of them. The threshold is missed by chance once in 10,000 seeds."""
    model, count = network(side=2), 4000
    out = sampled(model, conditioning(count, same=True), count, Sampling())
    images = torch.tensor([*itertools.product(range(VOCAB), repeat=4)])
    prefix = model.condition(conditioning(len(images), same=True), False)
    probs = model.head(model.all_cells(prefix, images)).softmax(-1)
    probs = probs.gather(-1, images.unsqueeze(-1)).squeeze(-1).double().prod(1)
    assert probs.sum() == pytest.approx(1, abs=1e-4)
    numbers = (out.tokens * VOCAB ** torch.tensor([3, 2, 1, 0])).sum(1)
    assert tiny.fit(numbers, probs) > 1e-4


def test_a_run_takes_a_pass_for_each_anti_diagonal_and_names_another_target(tmp_path):
    words = ["run", "model=flashar_scenes", "weights=random", "method=vanilla", "n=1", "metrics=none", "warmup=0"]
    assert cli.main([*words, "timing=false", f"out={tmp_path}/run"]) == 0
    row = row_of(tmp_path / "run")
    assert (row["model"], row["tokens"], row["steps"], row["speedup_step"]) == ("flashar_scenes", 256, 31, 1)
    assert (row["emitted_tv"], row["emitted_kl"]) == (None, None)
    assert "speed-ups: over flashar_scenes itself, whose groups are part of the model" in row["note"]
    cfg = configuration.compose(["model=flashar_scenes", "method=vanilla"])
    assert plan({**cfg})["passes"] == 31
    with pytest.raises(UsageError, match="flashar_scenes has discrete tokens in an order of its own"):
        configuration.compose(["model=flashar_scenes", "method=sjd"])


def test_the_loss_equals_the_plain_formulas():
    model = network()
    tokens = draw(model)
    conditions = Conditioning(torch.randn(2, PREFIX, 8), torch.ones(2, PREFIX, dtype=torch.bool))
    drop = torch.tensor([False, True])
    terms = training.loss_terms(model, conditions, drop, tokens, taught=True)
    conditioned = model.condition(conditions, guided=True)
    prefix = replace(
        conditioned, inputs=conditioned.inputs[[0, 3]], valid=conditioned.valid[[0, 3]], ids=conditioned.ids[[0, 3]]
    )
    states = model.all_cells(prefix, tokens)
    raster = model.uncached(prefix, tokens)[:, PREFIX - 1 : -1, :16] @ model.output.weight.T
    fused, vertical, taught = [], [], []
    for row, cell in itertools.product(range(2), range(model.length)):
        fused.append(-model.head(states)[row, cell].log_softmax(-1)[tokens[row, cell]])
        if cell >= 3:
            logits = model.branch_output.weight @ states[row, cell, 16:32]
            vertical.append(-logits.log_softmax(-1)[tokens[row, cell]])
            p, q = (raster[row, cell] / 2).softmax(-1), (logits / 2).softmax(-1)
            taught.append((p * (p / q).log()).sum())
    for name, values in (("fused", fused), ("vertical", vertical), ("teacher", taught)):
        torch.testing.assert_close(terms[name], torch.stack(values).mean(), rtol=1e-4, atol=1e-5)
    assert set(training.loss_terms(model, conditions, drop, tokens, taught=False)) == {"fused", "vertical"}


def test_the_branch_learns_first_and_then_everything(tmp_path):
    torch.manual_seed(1)
    target = LlamaGen(LlamaGenConfig(16, 3, 2, None, 24, VOCAB, PREFIX, caption_dim=8, block_size=9))
    model = FlashAR.from_target(target, branch_layers=1).requires_grad_(True)
    start = {name: parameter.clone() for name, parameter in model.named_parameters()}
    codes, features = draw(model, 4).numpy(), torch.randn(4, PREFIX, 8)
    before = training.evaluate(model, codes, features)
    recipe = Recipe(steps=60, batch=4, lr=1e-2, warmup=5, precision="float32")
    spent = training.train(model, codes, features, recipe, tmp_path, dropout=0.0)
    assert spent["images"] == (10 + 60) * 4
    after = training.evaluate(model, codes, features)
    assert after["loss"] < before["loss"] / 2  # four images, by heart
    assert after["vertical_loss"] < before["vertical_loss"]
    first = torch.load(tmp_path / "flashar-branch.pt", weights_only=True)["module"]
    new = ("branch_", "gate_", "first_gate")
    assert {name for name in start if not torch.equal(first[name], start[name])} == {
        n for n in start if n.startswith(new)
    }
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, start[name])}
    assert moved == set(start)
    again = FlashAR.from_target(target, branch_layers=1)
    training.train(again, codes, features, recipe, tmp_path, dropout=0.0)  # resumes at the end
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_the_shipped_weights_predict_scenes():
    model = Pipeline.load({**configuration.compose(["model=flashar_scenes", "method=vanilla"]), "device": "cpu"}).model
    images, captions, _ = scenes.render("validation", range(24))
    codes = model.codes(to_float(images)).numpy()
    reached = training.evaluate(model.target, codes, model.encode(captions).features)
    assert reached["loss"] < 2.9  # 2.62 nats a token on the card; before its training 5.05, and 6.2 for equal codes


def test_the_stage_trains_from_the_target_in_the_folder_and_leaves_it(tmp_path):
    assets = tmp_path / "assets"
    assets.mkdir()
    shipped = [f"scenes_{kind}.safetensors" for kind in ("target", "text", "tokenizer")]
    for name in shipped:
        shutil.copy(registry.ASSETS / name, assets)
    words = ["--work", str(tmp_path / "work"), "--assets", str(assets), "--card", str(tmp_path / "card.md")]
    assert train_scenes.main(["--budget", "smoke", "--only", "flashar", *words]) == 0
    assert sorted(path.name for path in assets.iterdir()) == sorted([*shipped, "scenes_flashar.safetensors"])
    assert all((assets / name).read_bytes() == (registry.ASSETS / name).read_bytes() for name in shipped)
    assert "| flashar | seconds " in (tmp_path / "card.md").read_text()
    trained = load_file(assets / "scenes_flashar.safetensors")
    start = load_file(assets / "scenes_target.safetensors")
    name = "layers.0.feed_forward.w1.weight"
    assert 0 < (trained[name].float() - start[name].float()).abs().max() < 0.01  # three steps from the target
