"""The Jacobi modes of Lumina-mGPT 2 and SimpleAR: against recorded runs of their codes, and by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from reference import REFERENCE, needs_reference
from safetensors.torch import load_file
from torch import Tensor

from specbench.audit import audit, models
from specbench.audit.tabular import TabularTarget, random_tables
from specbench.config import configuration
from specbench.decoding import verify
from specbench.decoding.drafters import window as windows
from specbench.decoding.drafters.built_in import BuiltIn
from specbench.decoding.loop import DecoderConfig, Decoding
from specbench.decoding.rng import RandomStreams
from specbench.decoding.rules import Rule, exact
from specbench.decoding.rules.redraw import Redraw
from specbench.decoding.sampling import Sampling
from specbench.decoding.verify.base import VERIFY
from specbench.models.unified import image_tokens

Tensors = dict[str, Tensor]


def golden(name: str) -> tuple[Tensors, dict[str, Any]]:
    folder = REFERENCE / "goldens"
    return load_file(folder / f"{name}.safetensors"), json.loads((folder / f"{name}.json").read_text())["config"]


def rotated(x: Tensor, base: float) -> Tensor:
    n, _, dim = x.shape
    angle = torch.arange(n)[:, None] / base ** (torch.arange(0, dim, 2) / dim)
    cos, sin = (torch.cat([f(angle), f(angle)], -1)[:, None] for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1) * sin


def logits_of(w: Tensors, c: dict[str, Any], ids: Tensor) -> Tensor:
    """(n, V) of a whole sequence of ids (n,), without a cache, by a golden's parameters."""
    x, n, dim = w["model.embed_tokens.weight"][ids], len(ids), c["head_dim"]
    each = c["num_attention_heads"] // c["num_key_value_heads"]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], c["rms_norm_eps"])

    for layer in (f"model.layers.{i}." for i in range(c["num_hidden_layers"])):

        def linear(name: str, x: Tensor, layer: str = layer) -> Tensor:
            return F.linear(x, w[f"{layer}{name}.weight"], w.get(f"{layer}{name}.bias"))

        h = norm(x, f"{layer}input_layernorm")
        q, k, v = (linear(f"self_attn.{name}_proj", h).view(n, -1, dim) for name in "qkv")
        if c.get("qk_norm_eps"):
            q, k = (
                F.layer_norm(y, (dim,), eps=c["qk_norm_eps"]) * w[f"{layer}self_attn.{name}_norm.weight"]
                + w[f"{layer}self_attn.{name}_norm.bias"]
                for y, name in ((q, "q"), (k, "k"))
            )
        q, k = (rotated(y, c["rope_theta"]) for y in (q, k))
        k, v = (y.repeat_interleave(each, 1) for y in (k, v))
        q, k, v = (y.transpose(0, 1) for y in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear("self_attn.o_proj", seen.transpose(0, 1).flatten(1))
        h = norm(x, f"{layer}post_attention_layernorm")
        x = x + linear("mlp.down_proj", F.silu(linear("mlp.gate_proj", h)) * linear("mlp.up_proj", h))
    return F.linear(norm(x, "model.norm"), w.get("lm_head.weight", w["model.embed_tokens.weight"]))


class Session:
    """A golden's model, which computes whole sequences; also the target. prompts: of the two rows of guidance; ids (V,)
    of the tokens, of which the first `codes` are no grammar's."""

    padding = buffers = None

    def __init__(self, name: str, prompts: list[Tensor], ids: Tensor, forced: Tensor, codes: int, width: int) -> None:
        t, self.cfg = golden(name)
        self.weights = {k.removeprefix("param/"): x.float() for k, x in t.items() if k.startswith("param/")}
        self.prompts, self.ids, self.forced_tokens = prompts, ids, forced
        self.length, self.width, self.vocab_size, self.codes = len(forced), width, len(ids), codes
        self.buffers, self.commit = dict, lambda *verdict: None

    def open(self, conditioning: Any, rows: int, guided: bool, nodes: int) -> Session:
        return self

    def forced(self, positions: Tensor) -> None:
        """The released windows begin at random where the grammar forces a token, too."""

    def constrain(self, logits: Tensor, positions: Tensor) -> Tensor:
        only = self.forced_tokens[positions.clamp_max(self.length - 1)].unsqueeze(-1)
        token = torch.arange(self.vocab_size)
        return logits.masked_fill(torch.where(only < 0, token >= self.codes, token != only), -torch.inf)

    def forward(self, tokens: Tensor, tree: Any, history: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        known = torch.cat([history[0, : count[0]], tokens[0, 1:]])
        found = [logits_of(self.weights, self.cfg, torch.cat([p, self.ids[known]])) for p in self.prompts]
        rows = torch.stack([x[len(x) - tokens.shape[1] :, self.ids] for x in found])
        return rows, rows


class Recorded(RandomStreams):
    """The numbers of a recorded run: those that verify, (steps, n) with the first draft's at `first`, and those that
    give the recorded fresh tokens, by step and position."""

    def __init__(self, verifying: list[Tensor], fresh: list[dict[int, int]], codes: int) -> None:
        super().__init__([(0, 0)])
        self.verifying, self.fresh, self.codes = verifying, fresh, codes

    def uniforms(self, step: Tensor, tag: int, tags: int, count: int) -> Tensor:
        out = torch.zeros(1, tags, count)
        if tag == VERIFY:
            known = self.verifying[int(step)][: count - 1]
            out[0, 0, 1 : 1 + len(known)] = known
        return out

    def uniform_at(self, step: Tensor, tag: int, index: Tensor) -> Tensor:
        codes = [self.fresh[int(step)].get(i, 0) for i in index.flatten().tolist()]
        return ((torch.tensor(codes) + 0.5) / self.codes).view(1, -1)


@pytest.fixture
def greedy_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draw takes the most probable token, as in the recorded runs."""
    for module in (windows, verify.base):
        monkeypatch.setattr(module, "draw", lambda probs, u, kernels=None: probs.argmax(-1))


def replayed(
    session: Session, drafter: BuiltIn, rule: Rule, sampling: Sampling, rng: Recorded
) -> tuple[list[tuple[int, list[int]]], list[int]]:
    """Per step how many tokens there were, and the draft's tokens that exist; and the image."""
    config: Any = DecoderConfig(session, drafter, rule, sampling)
    steps, fed = Decoding(config, None, rng), []
    while steps.count < session.length:
        before = int(steps.count)
        steps.step()
        draft = steps.taken.draft if steps.taken else None
        assert draft is not None
        fed.append((before, session.ids[draft.tokens[0, 1:][draft.valid[0, 1:]]].tolist()))
        steps.observe()
    return fed, session.ids[steps.history[0, : session.length]].tolist()


@needs_reference
@torch.inference_mode()
@pytest.mark.usefixtures("greedy_draws")
def test_a_recorded_run_of_lumina_mgpt2() -> None:
    """Every fed draft, every accepted length and every token. The golden's first pass inside the image is its fourth.
    Its pass 17 begins behind the interval and still feeds two drafts (the interval is that of the length before the
    step): both are rejected, and here that position is plain."""
    t, c = golden("lumina2_sjd")
    ids, (rows, columns) = c["ids"], c["latent_grid"]
    image = image_tokens(torch.arange(ids["img0"], ids["img1"] + 1), rows, columns, ids["newline"], [ids["end"]])
    prompt, tokens = t["in/prompt"][0], t["out/tokens"][0]
    prompts = [torch.cat([part, tokens[:3]]) for part in (prompt, prompt[-1:])]
    forced, codes = image.grammar.forced, image.grammar.codes
    session = Session("lumina2_lm", prompts, image.ids, forced, codes, image.width)
    fed = zip(t["out/first_place"].tolist(), t["out/row_length"].tolist(), t["out/input_rows"], t["out/uniforms"])
    # tokens of the image so far, drafts, and their numbers; of the fourth pass on, which has the last size token
    passes = [(first - len(prompt) - 2, row[1:n].tolist(), u[1:n]) for first, n, row, u in fed][3:]
    fresh = [{count + i: max(0, x - ids["img0"]) for i, x in enumerate(row)} for count, row, _ in passes]
    until = c["interval_end"] - 3
    drafter = BuiltIn(c["window"] - 1, plain_until=1, plain_from=until - session.length)
    sampling = Sampling(top_k=c["image_top_k"], cfg_scale=c["cfg_scale"], top_n_sigma=float(c["top_n_sigma"]))
    rule, rng = Redraw("target", sampling.top_n_sigma), Recorded([u for *_, u in passes], fresh, codes)
    found, image_found = replayed(session, drafter, rule, sampling, rng)
    assert image_found == tokens[3:].tolist()
    late = [(count, len(row)) for count, row, _ in passes if row and count >= until]
    assert late == [(until + 1, 2)]
    wanted = [(count, row if count < until else []) for count, row, _ in passes]
    assert found == wanted


@needs_reference
@torch.inference_mode()
@pytest.mark.usefixtures("greedy_draws")
def test_a_recorded_run_of_simplear() -> None:
    """Every fed draft and every token. The recorded run accepts the first draft of a pass in any case: from the third
    pass on that is the token of the last rejection, which is committed at once here."""
    t, c = golden("simplear_sjd")
    size, count = golden("simplear_lm")[1]["vocab_size"], c["image_tokens"]
    prompts = [t["in/prompt"][0], t["in/negative"][0]]
    session = Session("simplear_lm", prompts, torch.arange(size), torch.full((count,), -1), size, 4)
    rows, tokens, u = t["out/input_rows"], t["out/tokens"][0], t["out/uniforms"]
    rng = Recorded([torch.zeros(0), *u], [{}] * len(rows), size)
    # from the third step on the first unfixed place is the root: its number is not used
    rng.verifying = [torch.zeros(0), u[0], *(row[1:] for row in u[1:])]
    rule = Redraw("vanilla")
    fed, found = replayed(session, BuiltIn(count - 1, "greedy"), rule, Sampling(cfg_scale=c["cfg_scale"]), rng)
    assert found == tokens.tolist()
    assert fed[0] == (0, [])
    assert [before for before, _ in fed[:3]] == [0, 1, 3]
    assert [row[: count - before] for before, row in fed[1:]] == [
        rows[i, before:].tolist() for i, (before, _) in enumerate(fed[1:], start=1)
    ]


def test_the_residual_by_hand() -> None:
    """Where q is below p the exact residual has no mass; here it has the target's. Log p = -0.69, -1.20, -1.61 has the
    root mean square 1.23, and of 0.97 .. 0.01 one of 3.26, so that nothing but the first token stays."""
    r, q = torch.tensor([[0.5, 0.3, 0.2], [0.97, 0.02, 0.01]]), torch.tensor([[0.2, 0.5, 0.3], [0.2, 0.4, 0.4]])
    depth, token = torch.ones(2, dtype=torch.int64), torch.tensor([1, 1])
    target, vanilla = Redraw(), Redraw("vanilla")
    torch.testing.assert_close(target.accept(r, q, token, depth), torch.tensor([0.6, 0.05]))
    assert torch.equal(target.residual(r, q, token, depth), r)
    assert vanilla.residual(r, q, token, depth).tolist() == [[1, 0, 0], [1, 0, 0]]
    torch.testing.assert_close(vanilla.residual(r, q, token, depth), exact().residual(r, q, token, depth))
    again = Redraw("target", 1.0).residual(r, q, token, depth)
    assert again[0].tolist() == pytest.approx([0.5, 0.3, 0.2])
    assert again[1].tolist() == [1, 0, 0]
    # what is emitted: 0.2 stay of the first token, 0.3 and 0.2 of the others, and 0.3 are drawn again from r
    torch.testing.assert_close(target.emits(r[:1], q[:1], depth[:1]), torch.tensor([[0.35, 0.39, 0.26]]))


@torch.inference_mode()
def test_the_greedy_opening_by_hand() -> None:
    """The first token is the most probable one; the second is that of the distribution after token 0 at every
    position, whatever the first one was."""
    tables = random_tables(4, 12, 3, order=1)
    steps = Decoding(
        DecoderConfig(TabularTarget(tables), BuiltIn(11, "greedy"), exact(), Sampling()), None, tiny.rng(60)
    )
    steps.step()
    steps.observe()
    assert steps.count.eq(1).all()
    assert (steps.history[:, 0] == tables[0][0].argmax()).all()
    steps.step()
    draft = steps.taken.draft if steps.taken else None
    assert draft is not None
    likely = torch.stack([tables[i][0].argmax() for i in range(1, 12)])
    assert (draft.tokens[:, 1:] == likely).all()
    torch.testing.assert_close(draft.probs[0], torch.stack([tables[i][0] for i in range(1, 12)]))
    assert (steps.history[:, 1] == likely[0]).all()
    assert steps.count.ge(3).all()
    steps.observe()
    steps.step()
    assert steps.taken is not None
    assert not (steps.taken.draft.unverified if steps.taken.draft.unverified is not None else torch.ones(1)).any()


def test_a_window_ends_before_the_plain_positions() -> None:
    drafter = BuiltIn(4, plain_until=1, plain_from=-3)
    config = DecoderConfig(TabularTarget(random_tables(3, 12, 3, order=1)), drafter, exact(), Sampling())
    with torch.inference_mode():
        steps = Decoding(config, None, tiny.rng(40))
        for _ in range(12):
            before = steps.count.clone()
            steps.step()
            draft = steps.taken.draft if steps.taken else None
            assert draft is not None
            wanted = torch.where(before >= 1, (9 - before).clamp(0, 4), 0)
            assert torch.equal(draft.valid[:, 1:].sum(1), wanted)
            steps.observe()


@pytest.mark.parametrize("variant", ["lumina_mgpt2", "simplear"])
def test_the_audit_refutes_both(variant: str) -> None:
    """With the exact rule and without the greedy opening the windows are lossless."""
    model, words = models.built_in("v2t10"), [f"variant={variant}", "window=4", "plain_from=-2"]
    for more, lossless in (([], False), (["rule=exact", "opening=random"], True)):
        cfg = configuration.compose(["method=jacobi_built_in", *words, *more])
        row = audit.measure(audit.assemble(cfg, model), model, 4000)
        assert (row["verdict"] != "not lossless") == lossless, more
