"""EAGLE drafters of any depth: read from official layouts, equal to a plain computation, and usable in runs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import tiny
import torch
import torch.nn.functional as F
from PIL import Image
from test_real import eagle_config, loaded

from specbench.cli import main
from specbench.errors import UsageError
from specbench.models.loading import checkpoints, drafter_networks

TINY = ("weights=random", "reduced=true", "dtype=float32")


def config(target, **more):
    """A drafter with its own heads, widths, rope and norms, where a target allows this."""
    settings = {"num_hidden_layers": 2, "num_key_value_heads": 1, "intermediate_size": 24, "rms_norm_eps": 1e-2}
    return eagle_config(target) | settings | {"rope_theta": 77.0, "swin_norm": False, "rope_scaling": None} | more


def tensors(c, chameleon, norms=1, seed=0):
    """A random drafter in the official layout (reference manifests, and the notes of the goldens): LlamaGen's layer 0
    has no input norm, its layers from 1 on have one; Chameleon's layers all have one, and norms of queries and keys."""
    g = torch.Generator().manual_seed(seed)
    dim, wide, kv = c["hidden_size"], c["intermediate_size"], c["num_key_value_heads"]
    head = dim // c["num_attention_heads"]
    shapes = {"embed_tokens.weight": (c["vocab_size"], dim), "fc.weight": (dim, 2 * dim), "fc.bias": (dim,)}
    for n in range(c["num_hidden_layers"]):
        attention = {"q_proj": (dim, dim), "k_proj": (kv * head, dim), "v_proj": (kv * head, dim), "o_proj": (dim, dim)}
        shapes |= {f"layers.{n}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        mlp = {"gate_proj": (wide, dim), "up_proj": (wide, dim), "down_proj": (dim, wide)}
        shapes |= {f"layers.{n}.mlp.{name}.weight": shape for name, shape in mlp.items()}
        shapes[f"layers.{n}.post_attention_layernorm.weight"] = (dim,)
        if chameleon or n:
            shapes[f"layers.{n}.input_layernorm.weight"] = (dim,)
        if chameleon:
            for which, rows in (("q_norm", norms), ("k_norm", min(norms, kv))):
                shapes |= {f"layers.{n}.self_attn.{which}.{kind}": (rows, head) for kind in ("weight", "bias")}
    return {name: torch.randn(shape, generator=g) * (1 if len(shape) < 2 else 0.3) for name, shape in shapes.items()}


def write(folder, c, content):
    folder.mkdir(parents=True)
    if c is not None:
        (folder / "config.json").write_text(json.dumps(c))
    torch.save(content, folder / "pytorch_model.bin")
    return folder


def at(path, model, *words):
    return loaded(model, *TINY, f"drafter_weights={path}", *words)[1]


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def plain(t, c, ids, hidden, angles, side_by_side):
    """Hidden states (n, dim) of n entries, from matrix products alone: no cache, no module of the package. angles (n,
    head_dim / 2), NaN where cosine and sine are both 0."""
    heads, kv, eps = c["num_attention_heads"], c["num_key_value_heads"], c["rms_norm_eps"]
    cos, sin = angles.cos().nan_to_num(0)[:, None], angles.sin().nan_to_num(0)[:, None]
    n = len(ids)
    causal = torch.ones(n, n, dtype=torch.bool).tril()

    def rotated(x):
        a, b = (x[..., ::2], x[..., 1::2]) if side_by_side else x.chunk(2, -1)
        pair = a * cos - b * sin, a * sin + b * cos
        return torch.stack(pair, -1).flatten(-2) if side_by_side else torch.cat(pair, -1)

    x = torch.cat([t["embed_tokens.weight"][ids], hidden], -1) @ t["fc.weight"].T + t.get("fc.bias", 0)
    for layer in range(c["num_hidden_layers"]):
        layer_t = {
            name.removeprefix(f"layers.{layer}."): v for name, v in t.items() if name.startswith(f"layers.{layer}.")
        }
        h = rms(x, layer_t["input_layernorm.weight"], eps) if "input_layernorm.weight" in layer_t else x
        q, k, v = (
            (h @ layer_t[f"self_attn.{name}_proj.weight"].T).view(n, count, -1)
            for name, count in (("q", heads), ("k", kv), ("v", kv))
        )
        if "self_attn.q_norm.weight" in layer_t:
            rows = [layer_t[f"self_attn.{name}_norm.{kind}"] for name in "qk" for kind in ("weight", "bias")]
            q = F.layer_norm(q, q.shape[-1:]) * rows[0] + rows[1]
            k = F.layer_norm(k, k.shape[-1:]) * rows[2] + rows[3]
        q, k = rotated(q), rotated(k)
        out = []
        for head in range(heads):
            group = head // (heads // kv)
            scores = q[:, head] @ k[:, group].T / q.shape[-1] ** 0.5
            out.append(scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v[:, group])
        x = x + torch.cat(out, -1) @ layer_t["self_attn.o_proj.weight"].T
        h = rms(x, layer_t["post_attention_layernorm.weight"], eps)
        gate, up = (h @ layer_t[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ layer_t["mlp.down_proj.weight"].T
    return x


def grid_angles(prefix, side, head_dim, base):
    """prefix - 1 empty rows, then the cells: half of the pairs by the row, half by the column."""
    half = head_dim // 2
    freqs = base ** -(torch.arange(0, half, 2) / half)
    cells = [torch.cat([j // side * freqs, j % side * freqs]) for j in range(side * side)]
    return torch.cat([torch.full((prefix - 1, half), torch.nan), torch.stack(cells)])


@torch.inference_mode()
@pytest.mark.parametrize(
    ("model", "layers"), [("llamagen_xl", 1), ("llamagen_xl", 2), ("lumina_mgpt", 2), ("anole", 1)]
)
def test_hidden_states_equal_a_plain_computation(tmp_path, model, layers):
    _, bundle = loaded(model, *TINY)
    chameleon = model != "llamagen_xl"
    c = config(bundle.target, num_hidden_layers=layers)
    heads, dim = c["num_attention_heads"], c["hidden_size"]
    t = tensors(c, chameleon, heads if model == "anole" else 1)
    head = at(write(tmp_path / "deep", c, t), model).drafter_network("eagle")
    assert (head.cfg.n_layer, head.cfg.n_kv_head, head.cfg.ffn_hidden, head.cfg.norm_eps) == (layers, 1, 24, 1e-2)
    if chameleon:
        n = 9
        angles = torch.arange(n)[:, None] * 77.0 ** -(torch.arange(0, dim // heads, 2) / (dim // heads))
    else:
        angles = grid_angles(bundle.target.cfg.cls_token_num, bundle.target.cfg.side, dim // heads, 77.0)
        n = len(angles)
    g = torch.Generator().manual_seed(1)
    ids, hidden = torch.randint(0, c["vocab_size"], (n,), generator=g), torch.randn(n, dim, generator=g)
    wanted = plain(t, c, ids, hidden, angles, not chameleon)
    head.rope(n)
    cache, entries = head.new_cache(1, n), torch.arange(n)[None]
    rope = head.rope_at(entries, torch.zeros(1, 1, dtype=torch.int64))
    seen = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
    parts = [
        head.hidden(ids[None, s], hidden[None, s], rope[:, s], seen[:, :, s], cache, entries[:, s])
        for s in (slice(0, 5), slice(5, n))  # the second part hears the first from the cache, in every layer
    ]
    torch.testing.assert_close(torch.cat(parts, 1)[0], wanted, atol=1e-4, rtol=1e-4)
    assert len(cache.k) == layers
    assert bool(cache.v[:, 0].abs().sum((1, 3)).gt(0).all())  # (layers, slots): every layer keeps every entry
    # entry e pairs the hidden state of place e with the token of place e + 1
    [unrolled] = head.unroll(torch.cat([hidden, hidden[:1]])[None], ids[None], torch.ones(1, 1, dtype=torch.bool))
    torch.testing.assert_close(unrolled[0], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model", ["llamagen_xl", "anole"])
def test_without_a_config_the_names_and_shapes_tell(tmp_path, model):
    _, bundle = loaded(model, *TINY)
    c = eagle_config(bundle.target, num_hidden_layers=2, intermediate_size=24)
    if model != "llamagen_xl":
        c["rms_norm_eps"] = bundle.target.block.norm_eps
    t = tensors(c, model != "llamagen_xl")
    said = at(write(tmp_path / "said", c, t), model).drafter_network("eagle")
    configured = at(write(tmp_path / "told", None, t), model).drafter_network("eagle")
    assert (said.cfg, said.cfg.n_layer) == (configured.cfg, 2)
    torch.testing.assert_close(dict(said.state_dict()), dict(configured.state_dict()), rtol=0, atol=0)
    file = at(tmp_path / "told" / "pytorch_model.bin", model).drafter_network("eagle")
    assert file.cfg == configured.cfg
    del t["fc.bias"]
    assert not at(write(tmp_path / "bare", c | {"bias": False}, t), model).drafter_network("eagle").cfg.fc_bias


@pytest.mark.parametrize(("model", "method"), [("llamagen_xl", "eagle1"), ("lumina_mgpt", "eagle2")])
def test_a_run_and_convert_take_a_deep_drafter(tmp_path, model, method):
    _, bundle = loaded(model, *TINY)
    c = config(bundle.target)
    t = tensors(c, model != "llamagen_xl")
    released = write(tmp_path / "theirs", c, t)
    words = [f"model={model}", "reduced=true"]
    assert main(["convert", *words, f"drafter_weights={released}", f"out={tmp_path / 'own'}"]) == 0
    assert main(["convert", *words, f"drafter_weights={tmp_path / 'own'}", f"out={tmp_path / 'again'}"]) == 0
    again = torch.load(tmp_path / "again" / "pytorch_model.bin")
    torch.testing.assert_close(again, {name: v.half() for name, v in t.items()}, rtol=0, atol=0)
    kept = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {name: kept[name] for name in c if name in kept} == {name: c[name] for name in c if name in kept}
    assert kept["num_hidden_layers"] == 2
    images = []
    for folder in ("own", "again"):
        out = tmp_path / f"run_{folder}"
        more = ["weights=random", "dtype=float32", "n=1", "baseline=false", "warmup=0", "metrics=none", "data=scenes"]
        arguments = [f"method={method}", f"drafter_weights={tmp_path / folder}", f"out={out}"]
        assert main(["run", *words, *more, *arguments]) == 0
        images.append(Image.open(next((out / "images").iterdir())).tobytes())
    assert images[0] == images[1]


def test_depths_that_contradict_each_other_are_refused(tmp_path):
    _, bundle = loaded("llamagen_xl", *TINY)
    c = config(bundle.target)
    t = tensors(c, False)
    incomplete = {k: v for k, v in t.items() if k != "layers.1.input_layernorm.weight"}
    for name, said, content, sentence in (
        ("one", c | {"num_hidden_layers": 1}, t, "num_hidden_layers=1, and .* holds the tensors of 2"),
        ("three", c | {"num_hidden_layers": 3}, t, "num_hidden_layers=3, and .* holds the tensors of 2"),
        ("many", c | {"num_hidden_layers": 10**9}, t, "num_hidden_layers=1000000000, and"),
        ("text", c | {"num_hidden_layers": "2"}, t, "num_hidden_layers must be"),
        ("gap", c, {k.replace("layers.1", "layers.2"): v for k, v in t.items()}, "must be layers.0, layers.1"),
        ("norm", c, incomplete, "tensor 'layers.1.input_layernorm.weight' is missing"),
        ("heads", c | {"num_attention_heads": 3}, t, "3 heads"),
        ("hidden", c | {"hidden_size": 32}, t, "has shape"),
        ("eps", {k: v for k, v in c.items() if k != "rms_norm_eps"}, t, "has no 'rms_norm_eps'"),
        ("swin", c | {"swin_norm": True}, t, "swin_norm must be absent"),
        ("zero", c | {"rms_norm_eps": 0.0}, t, "rms_norm_eps must be a number above 0"),
        ("minus", c | {"vocab_size": -1}, t, "vocab_size must be an integer of at least 1"),
    ):
        with pytest.raises(UsageError, match=sentence):
            at(write(tmp_path / name, said, content), "llamagen_xl").drafter_network("eagle")


def test_a_file_without_a_token_table_uses_the_targets(tmp_path):
    """A drafter whose table was not trained has the target's, and its file is much smaller without it."""
    target = tiny.llamagen()
    bundle = SimpleNamespace(target=target, name="tiny", device=torch.device("cpu"), dtype=torch.float32)
    loader = drafter_networks.EagleLoader(bundle, "eagle")
    network = tiny.eagle(target)
    network.embed_tokens.weight.data += 1
    file = tmp_path / "eagle.safetensors"
    checkpoints.save(network, file, "eagle", torch.float32)
    whole = loader.read(file)
    assert torch.equal(whole.embed_tokens.weight, network.embed_tokens.weight)  # a table in the file comes first
    checkpoints.save(network, file, "eagle", torch.float32, omitted=loader.shared_tensors())
    parts = loader.read(file)
    assert torch.equal(parts.embed_tokens.weight, target.tok_embeddings.weight)
    assert torch.equal(parts.fc.weight, network.fc.weight)
    checkpoints.save(network, file, "eagle", torch.float32, omitted=("fc.weight",))
    with pytest.raises(UsageError, match=r"fc\.weight"):
        loader.read(file)
