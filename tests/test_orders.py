"""Models that fill an image in their own order: orders, groups, forward passes, and the distribution of the samples."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from commands import row_of
from test_mar_scenes import read_right
from torch import Tensor

from specbench import cli
from specbench.bench import devices
from specbench.bench.plan import plan
from specbench.config import configuration
from specbench.data import scenes, scenes_classes
from specbench.decoding import rules
from specbench.decoding.continuous.rule import tokens_per_iteration
from specbench.decoding.drafters.none import NoDraft
from specbench.decoding.loop import DecoderConfig, decode
from specbench.decoding.planned import PlannedGroups
from specbench.decoding.sampling import Sampling
from specbench.errors import UsageError
from specbench.harness.pipeline import Pipeline, check_engine
from specbench.models.arpg import ARPG
from specbench.models.llamagen import ClassConditioning, LlamaGenConfig
from specbench.models.loading import naming, official
from specbench.models.loading.ordered_official import ArpgModel, LpdModel
from specbench.models.lpd import LPD
from specbench.models.orders import GroupOrder, group_sizes, locality_order
from specbench.tables import gpu_hours
from specbench.training import recipes
from specbench.training.trainer import Recipe
from tools.scenes import __main__ as tool
from tools.scenes import arpg as training
from tools.scenes.card import Card

SHAPE = LlamaGenConfig(
    dim=64, n_layer=4, n_head=2, ffn_hidden=96, vocab_size=24, cls_token_num=1, block_size=16, num_classes=3
)
SIZES = (1, 3, 2, 5, 4, 1)
CLASSES = (2, 0)


def make_two_orders() -> GroupOrder:
    rng = np.random.default_rng(3)
    return GroupOrder(torch.from_numpy(np.stack([rng.permutation(16) for _ in range(2)])), SIZES)


def model_of(kind: type[Any]) -> Any:
    torch.manual_seed(5)
    model = kind(SHAPE).eval().requires_grad_(False)
    for parameter in model.parameters():  # far from the initial values, so that every part matters
        parameter.add_(torch.randn(parameter.shape) * 0.15)
    model.order = make_two_orders()
    return model


def official_tensors(model: Any) -> dict[str, Tensor]:
    """The tensors under the names of the published files. ARPG's ids are in one table, whose last row is not used."""
    if isinstance(model, LPD):
        return official.exported(model, naming.lpd(model.state_dict()))
    tensors = official.exported(model, naming.arpg(2, model.block))
    parts = [tensors.pop(f"embeddings.{name}") for name in ("codes", "mask", "classes")]
    table = torch.cat([parts[0], parts[1][None], parts[2], torch.full((1, 64), 9.0)])
    return {**tensors, "embeddings.weight": table}


# --- orders and groups ------------------------------------------------------------------------------------------------


def test_group_sizes_are_the_published_ones() -> None:
    """LPD: orders/group_sizes_lookup.json of its code. ARPG: after pass s of 64, int(256 * arccos((s + 1) / 64) / (pi /
    2)) tokens remain, at least one."""
    twenty = (1, 2, 4, 5, 7, 8, 10, 11, 12, 14, 15, 16, 17, 18, 18, 19, 19, 20, 20, 20)
    more = "1 1 2 2 3 3 4 5 5 6 6 7 7 8 8 9 9 10 10 10 11 11 11 11 12 12 12 12 12 12 12 12"
    assert group_sizes(256, 20, "lpd") == twenty
    assert group_sizes(256, 32, "lpd") == tuple(map(int, more.split()))
    left = [256, *(max(1, int(256 * np.arccos((s + 1) / 64) / (math.pi / 2))) for s in range(63)), 0]
    assert group_sizes(256, 64, "arccos") == tuple(a - b for a, b in itertools.pairwise(left))
    assert list(group_sizes(64, 20, "cosine")) == list(tokens_per_iteration(64, 20))  # as MAR
    assert group_sizes(16, None, "arccos") == (1,) * 16
    for passes, schedule in itertools.product((1, 2, 15, 16), ("arccos", "cosine", "lpd")):
        sizes = group_sizes(16, passes, schedule)
        assert (len(sizes), sum(sizes), min(sizes) > 0) == (passes, 16, True)
    with pytest.raises(UsageError, match="an image of 16 tokens takes 1 to 16 iterations \\(got 17\\)"):
        group_sizes(16, 17, "arccos")


def test_an_order_by_locality_takes_near_but_separate_cells() -> None:
    """Every cell of a group against LPD's rule, written out cell by cell."""
    side, sizes = 8, group_sizes(64, 12, "lpd")
    for repulsion in (1, 2):
        order = locality_order(side, sizes, repulsion, np.random.default_rng(repulsion)).tolist()
        assert sorted(order) == list(range(64))
        known: list[int] = []

        def gap(a: int, b: int) -> int:
            return max(abs(a // side - b // side), abs(a % side - b % side))

        def distance(a: int, b: int) -> float:
            return math.hypot(a // side - b // side, a % side - b % side)

        for size in sizes:
            group, chosen = order[len(known) : len(known) + size], list[int]()
            free = [cell for cell in range(64) if cell not in known]
            score = {c: sum(1 / distance(c, k) for k in known if gap(c, k) == 1) for c in free}
            for cell in group:
                open_ = [
                    c for c in free if c not in chosen and score[c] >= 1 and all(gap(c, t) > repulsion for t in chosen)
                ]
                if open_:  # the highest score among the cells that are far enough from the group
                    assert score[cell] == pytest.approx(max(score[c] for c in open_))
                    assert cell in open_
                elif chosen:  # the farthest from the group
                    nearest = {c: min(distance(c, t) for t in chosen) for c in free if c not in chosen}
                    assert nearest[cell] == pytest.approx(max(nearest.values()))
                chosen.append(cell)
            known += group
        assert len(known) == 64


def test_every_token_is_predicted_once_and_then_fed() -> None:
    order, rng = make_two_orders(), tiny.rng(8)
    plan = PlannedGroups(order, rng, SIZES)
    assert set(plan.order_index.tolist()) == {0, 1}
    existing = torch.zeros(8, 16, dtype=torch.bool)
    history = torch.arange(100, 116).repeat(8, 1)
    for number, size in enumerate(SIZES):
        tokens, fronts = plan.parallel_positions(history, torch.full((8,), number))
        end = sum(SIZES[: number + 1])
        for row in range(8):
            positions = order.orders[plan.order_index[row]]
            assert fronts.targets[row, :size, 0].tolist() == positions[end - size : end].tolist()
            assert fronts.extends[row].tolist() == [k < size for k in range(5)]
            fed = fronts.slots[row, :, 0]
            slots = fed[fed < 16].tolist()
            before = positions[: end - size][-SIZES[number - 1] :].tolist() if number else [-1]
            assert slots == before
            assert all(tokens[row, k] == 100 + slot for k, slot in enumerate(slots) if slot >= 0)
            assert len(set(fed.tolist())) == 5  # no two write to one slot
            existing[row, positions[: end - size]] = True
            for k in range(5):
                assert fronts.sees[row, k].tolist() == [True, *existing[row].tolist(), *[False] * 5]
        shares = [[(end - size + k) / 16, end / 16] for k in range(size)]
        torch.testing.assert_close(fronts.progress[0, :size], torch.tensor(shares))


# --- forward passes ---------------------------------------------------------------------------------------------------


def index_of_groups(order: list[int]) -> Tensor:
    """The index of the class (0), and the group number of each token in the order (from 1)."""
    return torch.tensor([0, *(g + 1 for g, size in enumerate(SIZES) for _ in range(size))])


def attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """Attention with two heads: queries and keys (n, heads * d) -> (n, heads * d)."""
    q, k, v = (x.view(len(x), 2, -1).transpose(0, 1) for x in (q, k, v))
    scores = (q @ k.transpose(1, 2)) / math.sqrt(q.shape[-1])
    return (scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)


def plain_arpg(w: dict[str, Tensor], label: int, tokens: Tensor, order: list[int]) -> Tensor:
    """Logits (T, V) of the tokens in the order, without a cache."""

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]

    def rotate(x: Tensor, cells: list[int | None]) -> Tensor:
        """Rotates the pairs of each head: a quarter of its numbers by row and a quarter by column. The class has
        position zero."""
        out = torch.zeros_like(x).view(len(x), 2, 16, 2)
        pairs = x.view(len(x), 2, 16, 2)
        for i, cell in enumerate(cells):
            if cell is None:
                continue
            for j in range(16):
                angle = (cell // 4 if j < 8 else cell % 4) / 10000 ** (2 * (j % 8) / 16)
                a, b = pairs[i, :, j, 0], pairs[i, :, j, 1]
                out[i, :, j, 0] = a * math.cos(angle) - b * math.sin(angle)
                out[i, :, j, 1] = b * math.cos(angle) + a * math.sin(angle)
        return out.view(len(x), -1)

    def fed_forward(x: Tensor, name: str) -> Tensor:
        y = rms(x, f"{name}.ffn_norm")
        inner = F.silu(y @ w[f"{name}.ffn.w1.weight"].T) * (y @ w[f"{name}.ffn.w3.weight"].T)
        return x + inner @ w[f"{name}.ffn.w2.weight"].T

    index, cells = index_of_groups(order), [None, *order]
    x = w["embeddings.weight"][torch.cat([torch.tensor([25 + label]), tokens[order]])]
    for n in range(2):
        y, name = rms(x, f"layers.self_dec.{n}.attn_norm"), f"layers.self_dec.{n}"
        q, k, v = (y @ w[f"{name}.attn.to_{p}.weight"].T for p in "qkv")
        y = attend(rotate(q, cells), rotate(k, cells), v, index <= index[:, None])
        x = fed_forward(x + y @ w[f"{name}.attn.proj.weight"].T, name)
    y = rms(x, "layers.norm")
    k, v = rotate(y @ w["layers.to_k.weight"].T, cells), y @ w["layers.to_v.weight"].T
    x = w["embeddings.weight"][24].expand(16, -1)
    for n in range(2):
        name = f"layers.cross_dec.{n}"
        q = rotate(rms(x, f"{name}.attn_norm") @ w[f"{name}.attn.to_q.weight"].T, list(order))
        y = attend(q, k, v, index < index[1:, None])
        x = fed_forward(x + y @ w[f"{name}.attn.proj.weight"].T, name)
    return rms(x, "norm") @ w["head.weight"].T


def plain_lpd(w: dict[str, Tensor], label: int, tokens: Tensor, order: list[int]) -> Tensor:
    """Logits (T, V) of the tokens in the order, without a cache: first the class and the tokens, then all queries."""

    def norm(x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def layer(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    index, at = index_of_groups(order), torch.tensor([0, *(p + 1 for p in order)])
    start = w["fake_latent"] if label == 3 else w["class_emb.weight"][label][None]
    content = torch.cat([start, w["token_emb.weight"][tokens[order]]]) + w["pos_embed"][0, at]
    queries = w["mask_token"][0] + w["pos_embed"][0, at[1:]]
    x = norm(torch.cat([content, queries]), "z_proj_ln")
    every, is_query = torch.cat([index, index[1:]]), torch.arange(33) >= 17
    sees = torch.where(is_query[:, None], every < every[:, None], every <= every[:, None]) & ~is_query
    sees |= is_query & is_query[:, None] & (every == every[:, None])  # the queries of one group
    for n in range(4):
        q, k, v = layer(norm(x, f"blocks.{n}.norm1"), f"blocks.{n}.attn.qkv").chunk(3, -1)
        x = x + layer(attend(q, k, v, sees), f"blocks.{n}.attn.proj")
        y = layer(norm(x, f"blocks.{n}.norm2"), f"blocks.{n}.mlp.fc1")
        x = x + layer(0.5 * y * (1 + torch.erf(y / math.sqrt(2))), f"blocks.{n}.mlp.fc2")
    return norm(x[17:], "norm") @ w["head.weight"].T


KINDS = [(ARPG, plain_arpg), (LPD, plain_lpd)]


def decode_images(model: Any, sampling: Sampling, classes: tuple[int, ...] = CLASSES, **options: Any) -> Any:
    config = DecoderConfig(model, NoDraft(options.get("singly", False)), rules.exact(), sampling)
    rows = options.get("rows", range(len(classes)))
    return decode(config, ClassConditioning(torch.tensor(classes)), tiny.rng(rows))


def image_order(model: Any, index: int) -> list[int]:
    """The order in which an image is filled."""
    index_of_order = int(PlannedGroups(model.order, tiny.rng([index]), SIZES).order_index)
    return [int(p) for p in model.order.orders[index_of_order]]


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "plain"), KINDS)
@pytest.mark.parametrize("schedule", ["constant", "linear", "linear_by_pass"])
def test_a_token_is_sampled_given_the_groups_before_it(kind: Any, plain: Any, schedule: str) -> None:
    """Caches, slots, masks and guidance, against one pass in plain code with the tensors of the published files."""
    model, scale = model_of(kind), 2.5
    w = official_tensors(model)
    # two images with different orders
    rows = [0, next(i for i in range(1, 9) if image_order(model, i) != image_order(model, 0))]
    out = decode_images(model, Sampling(temperature=0.9, cfg_scale=scale, cfg_schedule=schedule), rows=rows)
    assert out.steps.tolist() == [len(SIZES)] * 2
    ends = [end for size, end in zip(SIZES, itertools.accumulate(SIZES), strict=True) for _ in range(size)]
    for row, label in enumerate(CLASSES):
        order = image_order(model, rows[row])
        share = {
            "constant": [1.0] * 16,
            "linear": [j / 16 for j in range(16)],
            "linear_by_pass": [e / 16 for e in ends],
        }
        strength = 1 + (scale - 1) * torch.tensor(share[schedule])[:, None]
        cond, uncond = (plain(w, c, out.tokens[row], order) for c in (label, 3))
        probs = ((uncond + strength * (cond - uncond)) / 0.9).softmax(-1)
        expected = torch.zeros(16)
        expected[order] = probs.gather(1, out.tokens[row, order][:, None])[:, 0].log()
        torch.testing.assert_close(out.trace.log_prob[row], expected, atol=3e-4, rtol=3e-4)


@torch.inference_mode()
def test_training_is_decoding_token_by_token() -> None:
    model = model_of(ARPG)
    out = decode_images(model, Sampling(), singly=True)
    assert out.steps.tolist() == [16, 16]
    order = torch.tensor([image_order(model, row) for row in range(2)])
    prefix = model.condition(ClassConditioning(torch.tensor(CLASSES)), guided=False)
    with torch.enable_grad():
        hidden = model.in_order(prefix, out.tokens, order)
    log_probs = model.head(hidden).log_softmax(-1).gather(2, out.tokens.gather(1, order).unsqueeze(-1))[..., 0]
    torch.testing.assert_close(out.trace.log_prob.gather(1, order), log_probs, atol=3e-4, rtol=3e-4)


@torch.inference_mode()
@pytest.mark.parametrize("kind", [ARPG, LPD])
def test_an_image_does_not_depend_on_its_batch(kind: Any) -> None:
    """Bit for bit, and also in another order of the prompts."""
    model, sampling = model_of(kind), Sampling(cfg_scale=2.0, cfg_schedule="linear")
    classes = (2, 0, 1, 1)
    together = decode_images(model, sampling, classes)
    rotate = decode_images(model, sampling, classes[::-1], rows=[3, 2, 1, 0])
    assert torch.equal(rotate.tokens.flip(0), together.tokens)
    assert torch.equal(rotate.trace.log_prob.flip(0), together.trace.log_prob)
    for row, label in enumerate(classes):
        alone = decode_images(model, sampling, (label,), rows=[row])
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert torch.equal(alone.trace.log_prob[0], together.trace.log_prob[row])


# --- the distribution of the samples ----------------------------------------------------------------------------------


class JointTarget:
    """Four tokens of two values with a joint distribution (16,). A token is sampled from its conditional given the
    existing tokens."""

    length, width, vocab_size, codes, forced_tokens = 4, 2, 2, 2, None

    def __init__(self, joint: Tensor, order: GroupOrder) -> None:
        self.joint, self.order = joint, order
        self.sequences = torch.tensor(list(itertools.product((0, 1), repeat=4)))

    def open(self, conditioning: Any, rows: int, guided: bool, nodes: int) -> JointTarget:
        return self

    def conditional(self, known: Tensor, tokens: Tensor, target: Tensor) -> Tensor:
        """The distribution (..., 2) of the token at `target` (...), given the tokens (..., 4) where known (..., 4)."""
        agree = ((self.sequences == tokens.unsqueeze(-2)) | ~known.unsqueeze(-2)).all(-1)
        value = F.one_hot(self.sequences.T, 2).float()[target]  # (..., 16, 2)
        probs = ((agree * self.joint).unsqueeze(-2) @ value).squeeze(-2)
        return probs / probs.sum(-1, keepdim=True)

    def forward_at_positions(self, tokens: Tensor, fronts: Any, history: Tensor) -> tuple[Tensor, Tensor]:
        known, targets = fronts.sees[..., 1:5], fronts.next_positions
        stored = history[:, None, :4].expand(known.shape)
        return self.conditional(known, stored, targets).log(), tokens.unsqueeze(-1).float()

    def constrain(self, logits: Tensor, positions: Tensor) -> Tensor:
        return logits

    def buffers(self) -> dict[str, Any]:
        return {}


def test_groups_are_sampled_from_the_models_own_distribution() -> None:
    """The expected distribution is the product of the conditionals in the order; a group is conditioned only on the
    groups before it. Over images it is the mean over the orders. It differs from the joint distribution, which the same
    orders give token by token. tiny.fit is the p-value of a chi-squared test with 20,000 images and a fixed seed."""
    torch.manual_seed(1)
    joint = (2.5 * torch.randn(16)).softmax(0)
    order = GroupOrder(torch.tensor([[2, 0, 3, 1], [1, 3, 0, 2]]), (1, 2, 1))
    target, count = JointTarget(joint, order), 20_000

    def numbers(singly: bool) -> Tensor:
        out = decode(DecoderConfig(target, NoDraft(singly), rules.exact(), Sampling()), None, tiny.rng(count))
        assert out.steps.eq(4 if singly else 3).all()
        return out.tokens @ torch.tensor([8, 4, 2, 1])

    probs = torch.zeros(16, dtype=torch.float64)
    for number, sequence in enumerate(target.sequences):
        for a, b, c, d in order.orders.tolist():
            product = 1.0
            for position, before in ((a, ()), (b, (a,)), (c, (a,)), (d, (a, b, c))):
                known = torch.tensor([p in before for p in range(4)])
                product *= float(target.conditional(known, sequence, torch.tensor(position))[sequence[position]])
            probs[number] += product / 2
    assert float(probs.sum()) == pytest.approx(1)
    assert tiny.fit(numbers(False), probs) > 1e-4
    assert tiny.fit(numbers(False), joint.double()) < 1e-6
    assert tiny.fit(numbers(True), joint.double()) > 1e-4


# --- files, configurations, rows --------------------------------------------------------------------------------------


def test_the_shapes_have_the_published_numbers_of_parameters() -> None:
    """Millions of parameters, from the READMEs. LPD's and ARPG's tensors have the names of their code."""
    for name, kind, millions in (("arpg_l", ArpgModel, 320), ("arpg_xl", ArpgModel, 719), ("lpd_l", LpdModel, 337),
                                 ("lpd_xl", LpdModel, 752)):  # fmt: skip
        cfg = {**configuration.compose([f"model={name}", "weights=random"])}
        model = kind(cfg, torch.device("meta"), torch.float32)
        count = sum(p.numel() for p in model.target.parameters())
        assert count / 1e6 == pytest.approx(millions, abs=1)
        assert len(model.target.order.sizes) == cfg["iterations"]
        assert model.resolution == 256
    assert {p.shape for n, p in model.target.named_parameters() if n == "pos_embed"} == {(1, 257, 1280)}


@pytest.mark.parametrize(("name", "kind"), [("arpg_l", ARPG), ("lpd_l", LPD)])
def test_published_files_are_read(tmp_path: Any, name: str, kind: Any) -> None:
    words = [f"model={name}", "reduced=true", "dtype=float32", "weights=random", "iterations=5"]
    loader = {ARPG: ArpgModel, LPD: LpdModel}[kind]
    made = loader({**configuration.compose(words)}, torch.device("cpu"), torch.float32)
    for folder in ("target", "tokenizer"):
        (tmp_path / folder).mkdir()
    shape = made.shape
    if kind is ARPG:
        tensors = official.exported(made.target, naming.arpg(1, made.target.block))
        parts = [tensors.pop(f"embeddings.{part}") for part in ("codes", "mask", "classes")]
        unused = torch.zeros(1, shape.dim)
        tensors["embeddings.weight"] = torch.cat([parts[0], parts[1][None], parts[2], unused])
        assert len(tensors["embeddings.weight"]) == shape.vocab_size + 1 + 1000 + 2
    else:
        tensors = official.exported(made.target, naming.lpd(made.target.state_dict()))
    torch.save({"model": tensors}, tmp_path / "target" / "one.pt")
    torch.save({"model": made.tokenizer.state_dict()}, tmp_path / "tokenizer" / "vq_ds16_c2i.pt")
    again = loader.__new__(loader)
    again.__dict__ |= {k: v for k, v in vars(made).items() if k != "target"}
    read = again._read(tmp_path / "target")
    conditioning, rng = ClassConditioning(torch.tensor([7, 3])), tiny.rng(2)
    read.order = made.target.order
    sampling = Sampling(cfg_scale=3.0, cfg_schedule="linear")
    token_pair = [
        decode(DecoderConfig(m, NoDraft(), rules.exact(), sampling), conditioning, rng).tokens
        for m in (made.target, read)
    ]
    assert torch.equal(*token_pair)
    again.shape = replace(shape, n_layer=4)
    with pytest.raises(UsageError, match=f"holds another model than {name}: 2 layers of width 64, not 4 of 64"):
        again._read(tmp_path / "target")
    tensors.pop("head.weight")
    torch.save({"model": tensors}, tmp_path / "target" / "one.pt")
    with pytest.raises(UsageError, match=f"is not a file of {name} \\(it has no 'head.weight'\\)"):
        again._read(tmp_path / "target")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("method=sjd", "arpg_scenes has discrete tokens in an order of its own, which drafter sjd does not support; use"
         " method=vanilla"),
        ("method=vanilla rule=lantern", "which rule lantern does not support; use method=vanilla"),
        ("method=vanilla iterations=0", "iterations must be"),
    ],
)  # fmt: skip
def test_methods_in_raster_order_refuse_such_a_target(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        configuration.compose(["model=arpg_scenes", *words.split()])


def test_fused_kernels_and_trained_drafters_refuse_it() -> None:
    for engine in ("triton", "compiled"):
        cfg = configuration.compose(["model=lpd_l", "method=vanilla", f"engine={engine}"])
        with pytest.raises(UsageError, match=f"engine={engine} supports models in raster order only, and lpd_l"):
            check_engine(cfg)
    with pytest.raises(UsageError, match="arpg_scenes decodes in its own order, and no drafter"):
        recipes.plan(["drafter=eagle", "model=arpg_scenes"])


def test_a_plan_reads_the_weights_of_a_pass() -> None:
    """The weights of a pass are everything except the tables of embeddings, in bfloat16."""
    for name, others in (("arpg_l", (16384 + 1001 + 1) * 1024), ("lpd_l", (16384 + 1000 + 257 + 2) * 1024 + 2048)):
        planned = plan({**configuration.compose([f"model={name}", "method=vanilla"])})
        weights = planned["weights_gb"]["target"]
        cached = planned["cache_gb"] * 130 / (2 + 256 + 2 * planned["nodes"])
        assert planned["reads_gb"]["forward"] == pytest.approx(weights - 2 * others / 1e9 + cached, rel=1e-3)


def test_a_forecast_counts_the_passes_of_the_groups_and_of_the_baseline(tmp_path: Any) -> None:
    """Only the model: 20 passes of 20 positions, and 256 passes of one. By the data sheet, all passes take the same
    time."""
    cfg = configuration.compose(["model=lpd_l", "method=vanilla", "orders=1"])
    vanilla, planner = gpu_hours.without_method(cfg), gpu_hours.Planner(tmp_path)
    assert (cfg["iterations"], vanilla["iterations"]) == (20, None)
    groups, singly = (planner.seconds(config, devices.DEVICES["h100"])[0] for config in (cfg, vanilla))
    assert singly / groups == pytest.approx(256 / 20, rel=0.1)


def test_a_run_counts_passes_and_leaves_divergence_empty(tmp_path: Any) -> None:
    words = ["run", "model=arpg_scenes", "weights=random", "method=vanilla", "n=2", "metrics=none", "warmup=0"]
    assert cli.main([*words, "iterations=8", "timing=false", f"out={tmp_path}/run"]) == 0
    row = row_of(tmp_path / "run")
    assert (row["tokens"], row["steps"], row["speedup_step"], row["step_compression"]) == (256, 8, 32, 32)
    assert (row["emitted_tv"], row["emitted_kl"], row["iterations"], row["order"]) == (None, None, 8, "random")
    assert "speed-ups: over arpg_scenes with one token a pass, in the same orders" in row["note"]
    assert "emitted_kl: like emitted_tv not computed for arpg_scenes, whose tokens" in row["note"]
    assert "of each token given those that existed" in row["note"]


def test_the_embedded_model_draws_objects_in_the_colours_of_their_classes() -> None:
    """48 images. By chance a colour of eight is right in 6 of them (a standard deviation of 2.3); 24 is more than seven
    standard deviations above that."""
    pipeline = Pipeline.load(configuration.compose(["model=arpg_scenes", "method=vanilla", "iterations=16"]))
    items = scenes_classes.items({"seed": 0, "n": 48})
    out = pipeline.decode(pipeline.encode([item.prompt for item in items]), [(0, item.index) for item in items])
    assert out.steps.tolist() == [16] * 48
    right = read_right(pipeline.pixels(out.tokens), [item.labels for item in items])
    colour = list(scenes.ATTRIBUTES).index("colour0")
    assert float(right[:, colour].sum()) >= 24


# --- training ---------------------------------------------------------------------------------------------------------


def test_training_learns_the_tokens_of_a_class(tmp_path: Any) -> None:
    """Two images, one for each class: their tokens become likely in any order, starting from log 24 = 3.2 nats. Without
    the class they are less likely, since the first tokens could belong to either image."""
    rng = np.random.default_rng(0)
    codes, classes = rng.integers(0, 24, (2, 16)).astype(np.int16), np.array([0, 2])
    torch.manual_seed(0)
    model = ARPG(replace(SHAPE, dim=32, n_layer=2))
    before = training.evaluate(model, codes, classes)["loss"]
    recipe = Recipe(steps=300, batch=16, lr=1e-2, warmup=10, muon=True, precision="float32")
    training.train(model, codes, classes, recipe, tmp_path)
    assert before > 3
    assert training.evaluate(model, codes, classes)["loss"] < 1
    lost = training.evaluate(model, codes, np.array([3, 3]))["loss"]
    assert training.evaluate(model, codes, classes)["loss"] < lost


def test_the_stage_makes_a_model_that_runs(tmp_path: Any) -> None:
    words = ["--budget", "smoke", "--work", f"{tmp_path}/work", "--assets", f"{tmp_path}/assets"]
    assert tool.main([*words, "--only", "arpg,arpg_samples", "--card", f"{tmp_path}/card.md"]) == 0
    made = {path.name for path in (tmp_path / "assets").iterdir()}
    assert made == {"scenes_arpg.safetensors", "scenes_tokenizer.safetensors"}
    statistics = Card.read(tmp_path / "card.md").statistics
    assert 5 < statistics["arpg"]["loss"] < 8  # after two steps, for 512 tokens: about log 512 = 6.2
    words = ["run", "model=arpg_scenes", f"weights={tmp_path}/assets", "n=2", "metrics=none", "baseline=false"]
    assert cli.main([*words, "warmup=0", "iterations=2", f"out={tmp_path}/run"]) == 0
    assert row_of(tmp_path / "run")["steps"] == 2
