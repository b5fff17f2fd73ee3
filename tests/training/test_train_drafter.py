"""`specbench train drafter=...`: training uses the distributions that are drafted, and can be stopped, shared and
used."""

from __future__ import annotations

import csv
import json
import multiprocessing
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import photographs
import pytest
import test_targets as families
import torch
from commands import row_of
from safetensors.torch import load_file
from train_in_process import train_as

from specbench import cli
from specbench.config import configuration, parameters, registry
from specbench.data import fashion
from specbench.decoding import rules, trees
from specbench.decoding.drafters.eagle import Eagle as EagleDrafter
from specbench.decoding.loop import StepResult
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.decoding.verify import TokenWise
from specbench.errors import UsageError
from specbench.harness.pipeline import Pipeline
from specbench.models import eagle
from specbench.models.llamagen import Conditioning
from specbench.models.scenes_config import WORLDS
from specbench.models.supervision import DraftLogits, TargetHead
from specbench.training import command, examples, recipes, trainer
from specbench.training.dataset import LiveDataset
from tools.scenes import __main__ as train_scenes
from tools.scenes import stages


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "aux_hidden_layers", "layers"), [("classes", (), 2), ("lumina", (0, 1), 1), ("emu3", (), 1)]
)
def test_training_uses_the_drafted_distributions(family, aux_hidden_layers, layers):
    """The distributions of a drafted chain, computed with caches, equal training's for the same tokens: depth j
    + 1 in unroll step j, which has the target's hidden states up to the root and the drafter's own outputs after it."""
    model = families.target(family, 3)
    torch.manual_seed(5)
    cfg = replace(eagle.like_shape(model, aux_hidden_layers), n_layer=layers)
    head = families.sharpened(eagle.EagleNetwork(cfg), 2.0)
    drafter = EagleDrafter(head, trees.chain_paths(3))
    aux = model.with_aux_hidden_layers(aux_hidden_layers)
    rng, sampling, conditioning = RandomStreams([(0, 0), (0, 1)]), Sampling(), families.prompts(family, [0, 2])
    session = aux.open(conditioning, 2, False, drafter.tree.nodes)
    state = drafter.open(session, conditioning, sampling, rng)
    history, count = torch.zeros(2, 60, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    reader, compared = TargetHead(aux), 0
    for _ in range(4):
        draft = drafter.propose(state, history, count, torch.zeros(2).long())
        for row in range(2):
            c = int(count[row])
            if c == 0 or c + 4 > model.length:
                continue
            sequence = torch.cat([history[row, :c], draft.tokens[row, 1:], torch.zeros(1, dtype=torch.int64)])
            sequence = torch.nn.functional.pad(sequence, (0, model.length - len(sequence)))[None].repeat(2, 1)
            batch = LiveDataset(aux, sequence.numpy(), lambda rows: conditioning).batch(
                np.arange(2), np.zeros(2, dtype=bool)
            )
            root = batch.valid.shape[1] - 1 + c  # its position; entry root - 1 contains it
            unroll_steps = head.unroll(batch.hidden, batch.ids, batch.valid, 3)
            for j, out in enumerate(unroll_steps):
                place = torch.tensor([[c + j]])
                logits = session.constrain(reader.target.head(out[row, root - 1 + j])[None, None], place)
                torch.testing.assert_close(draft.probs[row, j], sampling.probs(logits)[0, 0], atol=1e-4, rtol=1e-3)
                compared += 1
        logits, hidden = session.forward(draft.tokens, draft.tree, history, count)
        places = count[:, None] + draft.tree.depth
        probs = sampling.probs(session.constrain(logits, places))
        verdict = TokenWise().verify(probs, draft, rules.exact(), rng, torch.zeros(2).long())
        session.commit(verdict, draft.tree, count)
        drafter.commit(state, StepResult(draft, probs, hidden, verdict, count))
        history.scatter_(1, count[:, None] + torch.arange(verdict.tokens.shape[1]), verdict.tokens)
        count += verdict.length + 1
    assert compared >= 9


@torch.inference_mode()
def test_a_share_of_the_positions_has_the_logits_of_all():
    """Their logits are the same, and no others are computed."""
    outputs, table = torch.randn(2, 9, 5), torch.randn(5, 7)
    computed = []

    def head(states):
        computed.append(states.shape[1])
        return states @ table

    every = DraftLogits.after(1, outputs, outputs, head)
    few = every.some(0.4, torch.Generator().manual_seed(0))
    assert few.positions.tolist() == sorted({*few.positions.tolist()})
    torch.testing.assert_close(few.logits, every.logits[:, few.positions - 1])
    assert computed[0] == len(few.positions) == 4  # of 9
    assert torch.equal(few.features, outputs[:, few.positions - 1])
    others = every.some(0.4, torch.Generator().manual_seed(1)).positions
    assert others.tolist() != few.positions.tolist()
    assert every.some(1, None) is every
    assert len(every.some(0.01, None).positions) == 1


def test_training_and_decoding_treat_padding_equally():
    """LlamaGen's drafters read hidden states of padding. They equal a session's (LANTERN's mask)."""
    cfg = recipes.plan(["drafter=eagle", "model=llamagen_xl", "weights=random", "reduced=true"]).cfg
    bundle = Pipeline.load(cfg).model
    conditioning = bundle.encode(["a", "a much longer caption of many words indeed"])
    assert not conditioning.valid[:, 0].all()
    prefix = bundle.target.condition(conditioning, False)
    tokens = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(0))
    alone = bundle.target.uncached(prefix, tokens)
    session = bundle.target.open(conditioning, 2, False, 4)
    torch.testing.assert_close(alone[:, : len(prefix) - 1], session.prefix_hidden, atol=1e-5, rtol=1e-5)
    logits = session.feed_chain(torch.cat([tokens[:, :1], tokens], 1), torch.arange(8).expand(2, -1) + len(prefix) - 1)
    torch.testing.assert_close(bundle.target.head(alone[:, len(prefix) - 1 :]), logits, atol=1e-4, rtol=1e-4)


SMALL = "n=12 batch=4 steps=10 warmup=2 held_out=0.2 save_every=4 validate_every=5 decode_batch=5".split()


def captions(tmp_path, count=12):
    path = tmp_path / "captions.txt"
    path.write_text("\n".join(f"a photo of {i} cats" for i in range(count)))
    return path


def real(model, tmp_path):
    """Arguments for a reduced model with random weights."""
    return [f"model={model}", "weights=random", "reduced=true", "data=prompts", f"prompts={captions(tmp_path)}"]


def numbered(tmp_path, side, classes=False):
    """A folder of pictures with captions, or with a sub-folder per class."""
    from PIL import Image

    rng = np.random.default_rng(0)
    folder = tmp_path / "pictures"
    for i in range(12):
        subfolder = folder / (f"n{i % 3:08d}" if classes else "all")
        subfolder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (side + 7, side, 3), dtype=np.uint8)).save(subfolder / f"{i}.png")
        if not classes:
            (subfolder / f"{i}.txt").write_text(f"noise number {i}")
    return folder


def small(*words):
    """`SMALL` without the parameters that the words give."""
    return [word for word in SMALL if word.split("=")[0] not in {w.split("=")[0] for w in words}]


def train(*words, out):
    assert cli.main(["train", *words, *small(*words), f"out={out}"]) == 0


@pytest.mark.parametrize(
    ("model", "kind", "source", "features"),
    [
        ("llamagen_xl", "eagle3", "self", "live"),
        ("llamagen_l", "eagle", "pairs", "stored"),
        ("lumina_mgpt", "draft_model", "pairs", "live"),
        ("lumina_mgpt", "eagle3", "self", "stored"),
        ("emu3", "medusa", "pairs", "stored"),
        ("emu3", "dflash", "self", "stored"),
    ],
)
def test_a_drafter_for_a_real_target_is_trained_saved_loaded_and_used(tmp_path, capsys, model, kind, source, features):
    words, out = real(model, tmp_path), tmp_path / "out"
    classes = model == "llamagen_l"
    if classes:
        words = words[:3]
    if source == "pairs":
        words.append(f"images={numbered(tmp_path, 40, classes)}")
    train(f"drafter={kind}", f"source={source}", f"features={features}", "checkpoints=[2]", *words, out=out)
    card = (out / "card.md").read_text()
    scale = parameters.default("model", model, "cfg_scale")
    assert f" cfg_scale={scale}, temperature=1.0, top_k=" in card
    for name in ("tv", "tv_stderr", "tv_unguided", "top1_agreement", "top3", "step-2"):
        assert f"| {name} | " in card, name
    curve = list(csv.DictReader((out / "state" / f"{kind}-validation.csv").open()))
    assert [int(row["step"]) for row in curve] == [5, 10]
    assert 0 <= float(curve[-1]["tv"]) <= 1
    shown = capsys.readouterr().out
    use = next(line for line in shown.splitlines() if line.startswith("use them: "))
    method = use.split("method=")[1].split()[0]
    run = [*words[:3], f"method={method}", f"drafter.weights={out}", "n=1", "metrics=none"]
    run += ["data=imagenet"] if classes else words[3:5]
    assert cli.main(["run", *run, f"out={tmp_path / 'run'}", "warmup=0"]) == 0
    row = row_of(tmp_path / "run")
    assert row["weights"] == f"random+{registry.digest(out / registry.DRAFTER_FILE)}"
    assert row["drafter_weights"] == str(out)


def trained(words):
    """The drafter's tensors after a training in this process."""
    chosen = recipes.plan(words)
    pipeline = Pipeline.load(chosen.cfg)
    return load_file(command.train(chosen, pipeline).file)


def same(a, b, tolerance=0):
    torch.testing.assert_close(dict(a), dict(b), atol=tolerance, rtol=tolerance, check_dtype=False)


#: Ten steps that move weights by up to 0.1, fifty times the tolerance below. Weights are stored in half precision,
#: whose last digit is 5e-4 at 1, and Adam divides the differences between sums.
FAST = ["lr=1e-2", "precision=float32"]


def test_stored_and_live_features_train_the_same_drafter(tmp_path):
    """Without dropped prompts and in float32, both give the same drafter, up to the order of sums."""
    words = [*real("lumina_mgpt", tmp_path), *SMALL, "drafter=eagle3", "dropout=0", *FAST]
    live, stored = (trained([*words, f"features={f}", f"out={tmp_path / f}"]) for f in ("live", "stored"))
    same(live, stored, 2e-3)
    manifest = json.loads((tmp_path / "stored" / "examples" / "manifest.json").read_text())
    assert manifest["examples"] == 12
    assert manifest["of"]["aux_hidden_layers"] == [0, 1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The arguments of a training, the tensors after it, and its folder: one process, one pass a step."""
    folder = tmp_path_factory.mktemp("alone")
    words = [*real("llamagen_xl", folder), *SMALL, "drafter=eagle", "source=self", "noise=0", *FAST]
    return words, trained([*words, f"out={folder / 'one'}"]), folder / "one"


def test_passes_that_share_a_step_make_the_same_step(tmp_path, alone):
    words, whole, _ = alone
    parts = trained([*words, "accumulate=2", f"out={tmp_path / 'parts'}"])
    same(whole, parts, 2e-3)


def test_a_stopped_training_ends_with_the_same_weights(tmp_path, monkeypatch):
    """Stopped while it learns, between two saves. The same command continues, and the weights and the curve do not show
    it."""
    longer = ["steps=60", "save_every=40", "drafter=eagle", "source=self"]
    words = [*real("llamagen_xl", tmp_path), *small(*longer), *longer]
    whole = trained([*words, f"out={tmp_path / 'whole'}"])
    broken, log = tmp_path / "broken", trainer._log

    def last(path, row, *more):
        log(path, row, *more)
        if path.stem == "eagle" and row["step"] == 50:
            raise KeyboardInterrupt

    with monkeypatch.context() as once:
        once.setattr(trainer, "_log", last)
        with pytest.raises(KeyboardInterrupt):
            trained([*words, f"out={broken}"])
    assert torch.load(broken / "state" / "eagle.pt", weights_only=True)["step"] == 40
    assert pd.read_csv(broken / "state" / "eagle.csv").step.iloc[-1] == 50
    assert not (broken / registry.DRAFTER_FILE).exists()
    same(whole, trained([*words, f"out={broken}"]))
    for name in ("eagle.csv", "eagle-validation.csv"):
        assert (broken / "state" / name).read_text() == (tmp_path / "whole" / "state" / name).read_text()


def test_a_curve_drops_steps_after_the_saved_state(tmp_path):
    """Killed after steps were logged and before they were saved, or within a line."""
    curve = tmp_path / "eagle.csv"
    curve.write_text("step,loss\r\n50,1.5\r\n100,1.25\r\n150,1.0\r\n200")
    trainer._forget_after(curve, 100)
    assert curve.read_text() == "step,loss\n50,1.5\n100,1.25\n"
    trainer._forget_after(tmp_path / "none.csv", 100)
    assert not (tmp_path / "none.csv").exists()


def test_two_processes_make_the_steps_of_one(tmp_path, alone):
    """On the CPU: they share examples, batches and gradients. Both are forked from a new interpreter that has imported
    their function: autograd's threads do not survive a fork of this process. This process has the store in which they
    meet, as torchrun's would, so no port can be taken twice."""
    pytest.importorskip("accelerate")
    words, single, one = alone
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([train_as.__module__])
    both = [server.Process(target=train_as, args=(i, store.port, [*words, f"out={tmp_path / 'two'}"])) for i in (0, 1)]
    for process in both:
        process.start()
    for process in both:
        process.join(240)
        process.kill()
    assert [process.exitcode for process in both] == [0, 0]
    same(single, load_file(tmp_path / "two" / registry.DRAFTER_FILE), 2e-3)
    curves = [pd.read_csv(out / "state" / "eagle.csv") for out in (one, tmp_path / "two")]
    pd.testing.assert_frame_equal(*curves, rtol=1e-2)  # of the whole batch, though each process saw half of it


def test_mistakes_are_short_errors(tmp_path):
    out = tmp_path / "out"
    words = [*real("llamagen_xl", tmp_path), "drafter=eagle", "source=self"]
    train(*words, out=out)

    def message(*more, folder=out):
        line = [*words, *SMALL, f"out={folder}"]
        named = {w.split("=")[0] for w in more}
        with pytest.raises(UsageError) as e:
            command.main([*(w for w in line if w.split("=")[0] not in named), *more])
        return str(e.value)

    assert "lr=0.0001" in message("lr=1e-3")
    assert "(examples:" in message("n=11", f"examples={out / 'examples'}", folder=tmp_path / "other")
    assert "data=prompts" in message("source=pairs", folder=tmp_path / "other")
    assert re.search(r"batch=20 .*\b9 examples", message("batch=20", folder=tmp_path / "third"))
    (tmp_path / "empty").mkdir()
    pairs = "source=pairs", f"images={tmp_path / 'empty'}"
    assert str(tmp_path / "empty") in message(*pairs, folder=tmp_path / "other")
    shard = out / "examples" / "examples-00000.safetensors"
    before = {name: t.clone() for name, t in load_file(shard).items()}  # the file itself is memory-mapped
    shard.write_bytes(shard.read_bytes()[:1000])  # cut off: it is made again and is the same
    train(*words, out=out)
    same(before, load_file(shard))
    (out / "state" / "plan.json").write_text("{")
    assert "plan.json" in message()
    cfg = configuration.compose(["method=eagle_chain", "window=3", f"drafter_weights={out}"])
    with pytest.raises(UsageError, match="target"):
        Pipeline.load(cfg)


@pytest.fixture
def narrow(monkeypatch):
    """The models of the worlds have their levels, tokens and kinds of layers, but fewer and narrower ones, and train on
    12 images: most of the time would be the tokenizer's, in bfloat16 on a CPU without units for it."""
    for world, shapes in WORLDS.items():
        vq = replace(shapes.tokenizer, ch=8, ch_mult=(1,) * len(shapes.tokenizer.ch_mult), z_channels=16, norm_groups=4)
        networks = {"target": replace(shapes.target, dim=96, n_layer=4, n_head=3, ffn_hidden=128)}
        networks["draft"] = replace(shapes.draft, dim=48, n_layer=1, n_head=3, ffn_hidden=64)
        monkeypatch.setitem(WORLDS, world, replace(shapes, tokenizer=vq, **networks))
        few = replace(stages.BUDGETS[world]["smoke"], train=12, validation=3)
        monkeypatch.setitem(stages.BUDGETS[world], "smoke", few)


def test_the_embedded_drafters_come_from_this_command(tmp_path, narrow):
    """`make train-scenes` in seconds: tokenizer, text encoder and target, then every drafter on the same examples."""
    folders = ["--work", str(tmp_path / "work"), "--assets", str(tmp_path / "assets"), "--card", str(tmp_path / "c.md")]
    first, drafters = ["tokenizer", "text", "target"], ["draft", "eagle", "eagle3", "medusa", "dflash"]
    chosen = ",".join([*first, *drafters, "eagle_steps", "eagle_seed1", "eagle_seed2", "eagle_guided", "drafters"])
    assert train_scenes.main(["--budget", "smoke", "--only", chosen, *folders]) == 0
    drafters += [f"eagle_{name}" for name in registry.drafter_networks()["eagle"].variants]
    assert {p.stem for p in (tmp_path / "assets").iterdir()} == {f"scenes_{name}" for name in [*first, *drafters]}
    assert len({registry.digest(p) for p in (tmp_path / "assets").iterdir()}) == len([*first, *drafters])
    for name in drafters:
        assert f"| tv_{name} | cfg_scale 3, temperature 1, tv 0." in (tmp_path / "c.md").read_text()
    pipeline = Pipeline.load(configuration.compose([f"weights={tmp_path / 'assets'}", "method=sd"]))
    for network, name in ((pipeline.model.target, "target"), (pipeline.config.drafter.model, "draft")):
        same(network.state_dict(), load_file(tmp_path / "assets" / f"scenes_{name}.safetensors"))


def test_a_model_of_classes_is_trained_from_photographs(tmp_path, monkeypatch, narrow):
    """`make train-fashion` in seconds, from photographs that are all black; then a run with these weights."""
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path))
    monkeypatch.setattr(fashion, "FOLDER", tmp_path / "none")
    fashion.photographs.cache_clear()
    for split, count in fashion.COUNTS.items():
        photographs.write(tmp_path / "data" / "fashion", split, np.zeros((count, 28, 28), dtype=np.uint8))
    folders = ["--work", str(tmp_path / "work"), "--assets", str(tmp_path / "assets"), "--card", str(tmp_path / "c.md")]
    networks = ["tokenizer", "target", "draft", "eagle", "eagle3"]
    chosen = ",".join([*networks, "drafters"])
    assert train_scenes.main(["--world", "fashion", "--budget", "smoke", "--only", chosen, *folders]) == 0
    fashion.photographs.cache_clear()
    assert {p.stem for p in (tmp_path / "assets").iterdir()} == {f"fashion_{name}" for name in networks}
    assert "| fashion_tv_eagle3 | cfg_scale " in (tmp_path / "c.md").read_text()
    run = [
        "model=llamagen_fashion",
        f"weights={tmp_path / 'assets'}",
        "method=eagle1",
        "metrics=none",
        "baseline=false",
    ]
    assert cli.main(["run", *run, "n=1", "warmup=0", f"out={tmp_path / 'run'}"]) == 0
    assert row_of(tmp_path / "run")["tokens"] == 256


@pytest.mark.parametrize("model", ["llamagen_xl", "lumina_mgpt", "emu3"])
def test_a_drafter_goes_to_lanterns_layout_and_back(tmp_path, model):
    short = ("n=2", "batch=1", "steps=1", "held_out=0.5")
    train("drafter=eagle", "source=self", *short, *real(model, tmp_path), out=tmp_path / "own")
    words = [f"model={model}", "reduced=true"]
    assert cli.main(["convert", *words, f"drafter_weights={tmp_path / 'own'}", f"out={tmp_path / 'theirs'}"]) == 0
    assert {p.name for p in (tmp_path / "theirs").iterdir()} == {"config.json", "pytorch_model.bin"}
    assert cli.main(["convert", *words, f"drafter_weights={tmp_path / 'theirs'}", f"out={tmp_path / 'back'}"]) == 0
    same(load_file(tmp_path / "own" / registry.DRAFTER_FILE), load_file(tmp_path / "back" / registry.DRAFTER_FILE))


@pytest.mark.parametrize(
    ("cached", "encoded"), [(9, [[2, 0], [1]]), (2, [[2, 0], [1], [1]]), (0, [[2, 0], [2, 1], [1, 2]])]
)
def test_a_prompt_is_encoded_once_while_there_is_room(cached, encoded):
    """room: three prompts of 2 * 4 * 3 + 2 bytes, two, or none."""
    asked = []

    class Model:
        device = torch.device("cpu")

        def encode(self, prompts):
            asked.append([int(p) for p in prompts])
            features = torch.tensor([[[float(p)] * 3] * 2 for p in prompts])
            return Conditioning(features, torch.ones(len(prompts), 2, dtype=torch.bool))

    encoder = examples.Encoded(Model(), ["0", "1", "2"], room=26 * cached)
    for rows in ([2, 0, 2], [2, 1], [1, 2]):
        out = encoder(np.array(rows))
        assert out.features[:, 1, 2].tolist() == rows
        assert out.valid.shape == (len(rows), 2)
    assert asked == encoded


def test_every_recipe_is_complete():
    chosen = {(r, k): recipes.settings(r, k) for r in ("lantern", "coolsd", "scenes") for k in registry.trained()}
    assert all(settings["drafter"] == kind for (_, kind), settings in chosen.items())
    facts = {"n": 100_000, "batch": 16, "lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "schedule": "linear", "epochs": 20}
    facts |= {"warmup": 2000, "dropout": 0.1, "held_out": 0.05, "keep": "top3", "source": "pairs"}
    lantern = chosen["lantern", "eagle"]  # LANTERN, appendix C
    assert {name: lantern[name] for name in facts} == facts
    for kind in registry.trained():  # Cool-SD, appendix C.2
        coolsd = chosen["coolsd", kind]
        assert (coolsd["n"], coolsd["source"], coolsd["dropout"]) == (30_000, "self", 0.1)
        assert coolsd["run"] == {"data": "coco2017", "split": "train"}


WRONG = [
    (["drafter=draft_model", "features=stored"], "a draft model learns from prompts"),
    (["drafter=eagle", "guided=true", "features=stored"], "guided=true needs every example with and without"),
    (["drafter=eagle", "checkpoints=[0]"], "checkpoints must be a list of rising integers of at least 1"),
    (["drafter=eagle", "start=embedded:strongest"], "unknown eagle weights 'strongest' (choose from: "),
    (["drafter=cspd", "model=mar_scenes"], "drafter must be one of"),
    (["drafter=eagle", "model=mar_scenes"], "model=mar_scenes"),
    (["drafter=eagle", "recipe=none"], "unknown recipe 'none'"),
    (["scenes"], "`make train-scenes` in a clone trains the embedded models"),
    (["n=4"], "name the drafter to train: drafter="),
]


def test_a_wrong_plan_is_a_short_error(capsys):
    for words, sentence in WRONG:
        assert cli.main(["train", *words]) == 2, words
        assert sentence in capsys.readouterr().err, words


def test_a_dry_run_counts_disk_and_steps(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE for LlamaGen-XL stores 256 tokens and the prefix (120) of 100,000 examples, with 1,280 numbers for each
    position but the last of the prefix, and its ids and mask. 5 % are held out, and the others trained 20 times in
    batches of 16."""
    monkeypatch.setenv("SPECBENCH_HOME", "/not/there")
    words = ["train", "--dry-run", "drafter=eagle", "model=llamagen_xl", "images=there", "dtype=bfloat16"]
    texts = {}
    for more in ([], ["features=live"]):
        assert cli.main([*words, *more]) == 0
        texts[bool(more)] = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    gb = float(re.findall(r"([\d.]+) GB in", texts[False]["disk"])[0])
    assert gb == pytest.approx(100_000 * (375 * 1280 * 2 + 4 * 256 + 5 * 120) / 1e9, rel=1e-3)
    assert "118,750 of 16" in texts[False]["steps"]
    assert texts[True]["disk"].startswith("102.4 MB in /not/there/models/llamagen_xl/eagle/examples")
