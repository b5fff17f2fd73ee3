"""The embedded pair of MAR models: its data set and the metrics on it, the bundle, and its training."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import row_of, said

from specbench import cli, data, metrics
from specbench.config import configuration, parameters, registry
from specbench.data import Item, scenes, scenes_classes, worlds
from specbench.errors import UsageError
from specbench.harness.pipeline import Pipeline
from specbench.metrics import scenes_reference
from specbench.models import evaluators as ev
from specbench.models.loading import checkpoints, mar_scenes
from specbench.models.loading.mar_scenes import Latents
from specbench.models.mar import MAR, MARConfig
from specbench.models.pixels import to_float
from specbench.models.scenes_config import DIFFUSION_STEPS, MAR_CONFIGS, LatentConfig
from specbench.storage.image_files import ImageArray
from specbench.training.trainer import Recipe
from tools.scenes import __main__ as tool
from tools.scenes import card
from tools.scenes import mar as training

#: Small versions of the same architectures: 4 x 4 tokens of three numbers.
TINY_KL = LatentConfig(8, (1, 1, 1, 1, 2), 1, 8, codebook_size=0, codebook_embed_dim=3, norm_groups=4, attention=False)
_TOKENS = {"length": 16, "token_dim": 3, "classes": 40, "buffer": 2, "steps": 6, "limit": 4.0}
TINY = MARConfig.even(32, 1, 2, mlp_ratio=2.0, head_depth=1, head_width=32, **_TOKENS)
CONFIGS = {"kl": TINY_KL, "mar": TINY, "mar_draft": replace(TINY, encoder_dim=16, decoder_dim=16, head_width=16)}
QUICK = ["metrics=none", "baseline=false", "warmup=0"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def tiny(monkeypatch):
    for kind, cfg in CONFIGS.items():
        monkeypatch.setitem(MAR_CONFIGS, kind, cfg)


def load(*words):
    return data.load(configuration.compose(["model=mar_scenes", *words]).prompts)


def read_right(images, labels, world="scenes"):
    """Whether the committed reader reads the labels correctly from images (N, 64, 64, 3): (N, attributes), NaN where
    no label exists."""
    reader = ev.load(registry.ASSETS / f"{world}_reader.safetensors", ev.AttributeReader, torch.device("cpu"))
    with torch.inference_mode():
        return ev.read_right(reader(to_float(images)), torch.tensor(labels))


def test_classes_are_spread_evenly():
    items = load("n=100")
    counts = Counter(item.prompt for item in items)
    assert len(counts) == 40
    assert set(counts.values()) == {2, 3}
    assert load("n=70") == items[:70]
    assert load("n=70", "seed=1") != items[:70]
    assert len({item.id for item in items}) == 100
    assert all(scenes_classes.NAMES[int(item.id.split("-")[0])] == item.prompt for item in items)
    assert data.prompts_hash(items) == "c596a1d8bb0b"  # must never change


def test_a_class_states_its_attributes_and_no_others():
    for number, name in enumerate(scenes_classes.NAMES):
        stated = dict(zip(scenes.ATTRIBUTES, scenes_classes.labels_of(number), strict=True))
        colour, shape = name.split()
        assert scenes.LAYOUTS[stated.pop("layout")] == "single"
        assert (scenes.COLOURS[stated.pop("colour0")], scenes.SHAPES[stated.pop("shape0")]) == (colour, shape)
        assert set(stated.values()) == {worlds.ABSENT}
        assert scenes_classes.numbers_in([name, str(number), f"0{number}"], "any") == [number] * 3
    assert scenes_classes.numbers_in([" Red  CIRCLE\n"], "any") == [0]


def test_images_show_one_object_of_their_class():
    images, numbers = scenes_classes.portraits("validation", 12)
    singles = [s for s in (scenes.sample("validation", i) for i in range(80)) if s.scene.layout == "single"][:12]
    assert [scenes_classes.NAMES[n] for n in numbers] == [
        f"{s.scene.objects[0].colour} {s.scene.objects[0].shape}" for s in singles
    ]
    assert np.array_equal(images[3], scenes.draw(singles[3], portrait=True))
    right = read_right(images, [scenes_classes.labels_of(int(n)) for n in numbers])
    assert right.nanmean() == 1  # easy to recognise
    labels = np.array([scenes.sample("train", i).scene.labels() for i in range(50)])
    label_numbers = scenes_classes.numbers_of(labels)
    assert ((label_numbers >= 0) == (labels[:, 0] == 0)).all()


@pytest.fixture(scope="module")
def real_pictures():
    """Real pictures of classes, and the items that requested them."""
    images, numbers = scenes_classes.portraits("validation", 48)
    return images, [
        Item(i, scenes_classes.NAMES[n], scenes_classes.labels_of(int(n)), str(i)) for i, n in enumerate(numbers)
    ]


def measure(name, images, items):
    context = metrics.ScoringContext(metrics.ASSETS, metrics.ASSETS)
    [score] = metrics.score([name], ImageArray(images), items, context).values()
    return score


def test_the_reward_reads_the_attributes_of_the_class_alone(real_pictures):
    images, items = real_pictures
    right = measure("scenes_reward", images, items)
    assert right.value > 0.95
    assert "layout 1.0000, shape0 " in said(right)
    assert "background" not in said(right)
    wrong = measure("scenes_reward", images, [replace(i, labels=items[0].labels) for i in items])
    assert wrong.value < 0.7  # the image still shows one object


def test_the_clip_score_knows_the_words(real_pictures):
    images, items = real_pictures
    score = measure("scenes_clip", images, items)
    other = measure("scenes_clip", images, [replace(i, prompt="white cross") for i in items])
    assert score.value > other.value
    assert "names of classes" in said(score)


def test_the_distance_is_to_real_images_of_one_object(real_pictures, home, monkeypatch):
    images, items = real_pictures
    monkeypatch.setattr(scenes_reference, "COUNT", 48)
    again = measure("scenes_fid", images, items)
    assert again.value == pytest.approx(0, abs=1e-4)  # the same pictures
    assert "48 real" in said(again)
    [stored] = (home / "references").iterdir()
    with monkeypatch.context() as once:
        once.setattr(scenes_classes, "portraits", None)  # not rendered a second time
        assert measure("scenes_fid", images, items) == again
    stored.write_bytes(stored.read_bytes()[:100])
    assert measure("scenes_fid", images, items) == again
    whole = [Item(i, "", tuple(scenes.sample("validation", i).scene.labels())) for i in range(48)]
    general = measure("scenes_fid", images, whole)
    assert again.backend == general.backend + "/portraits"
    assert "of one object" not in said(general)


def test_random_weights_run_from_words_to_a_row(tiny, tmp_path, home, monkeypatch):
    monkeypatch.setattr(scenes_reference, "COUNT", 8)
    words = ["run", "model=mar_scenes", "weights=random", "data=scenes_classes", "method=cspd", "gamma=2", "n=2"]
    words += ["batch_size=2", "cfg_scale=1", "diffusion_steps=2", "baseline=false", "warmup=0", f"out={tmp_path}/run"]
    assert cli.main([*words, "metrics=[scenes_fid,scenes_reward,scenes_clip]"]) == 0
    row = row_of(tmp_path / "run")
    assert (row["weights"], row["tokens"], row["resolution"], row["gamma"]) == ("random", 16, 64, 2)
    assert row["fid"] > 0
    assert row["fid_stderr"] is None  # two images have no jackknife
    assert "n < 16 x 64" in said(row)
    assert row["image_reward"] is not None
    assert row["acceptance_rate"] is not None
    records = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    assert [record["prompt"] for record in records] == [item.prompt for item in load("n=2")]


def test_equation_35_is_of_chains_that_are_verified_token_by_token(tiny, tmp_path, home):
    words = ["run", "model=mar_scenes", "weights=random", "data=scenes_classes", "method=cspd", "gamma=2"]
    words += ["n=2", "cfg_scale=1", "diffusion_steps=2", "warmup=0", "metrics=[]"]
    for number, (more, known) in enumerate((("tries=1", True), ("tries=2", False), ("verification=block", False))):
        assert cli.main([*words, more, f"out={tmp_path}/{number}"]) == 0
        row = row_of(tmp_path / str(number))
        assert row["draft_cost"] > 0
        assert (row["speedup_expected"] is not None) == known


def test_absent_weights_are_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(registry, "ASSETS", tmp_path)
    for method, file in (("vanilla", "scenes_mar.safetensors, scenes_kl"), ("cspd", "scenes_mar_draft")):
        assert cli.main(["run", "model=mar_scenes", f"method={method}", f"out={tmp_path}/run"]) == 2
        error = capsys.readouterr().err
        assert file in error
        assert "make train-scenes" in error


def test_prompts_are_names_or_numbers_of_classes(tiny):
    bundle = Pipeline.load(configuration.compose(["model=mar_scenes", "weights=random"])).model
    assert bundle.encode(["red circle", "39", " White  CROSS "]).tolist() == [0, 39, 39]
    for bad in ("a cat", "40", "circle red", "", "²", "1" * 5000):
        with pytest.raises(UsageError, match="colour .*shape"):
            bundle.encode(["red circle", bad])
    tokens = torch.randn(3, 16, 3, generator=torch.Generator().manual_seed(0))
    images = bundle.pixels(tokens)
    assert images.shape == (3, 64, 64, 3)
    assert np.array_equal(bundle.pixels(tokens[1:2])[0], images[1])


def test_shapes_fit_together_and_the_defaults_are_the_trained_ones():
    cfg = configuration.compose(["model=mar_scenes"])
    assert (cfg.data, cfg.method, cfg.weights) == ("scenes_classes", "cspd", "embedded")
    assert cfg.get("diffusion_steps") == DIFFUSION_STEPS
    assert parameters.default("model", "mar_scenes", "cfg_scale") in card.Trial().scales
    size = {}
    for kind, module in (("kl", Latents), ("mar", MAR), ("mar_draft", MAR)):
        with torch.device("meta"):
            size[kind] = sum(p.numel() for p in module(MAR_CONFIGS[kind]).parameters())
    assert size["kl"] < 2e6
    assert 4e6 < size["mar"] < 6e6
    assert size["mar_draft"] < size["mar"] / 4
    others = sum(p.stat().st_size for p in registry.ASSETS.glob("scenes_*.safetensors") if p.stem[7:] not in size)
    assert others + 2 * sum(size.values()) < 64e6
    assert sum(p.stat().st_size for p in registry.ASSETS.glob("textures_*.safetensors")) < 25e6
    assert sum(p.stat().st_size for p in registry.ASSETS.glob("fashion_*.safetensors")) < 12e6


def test_the_committed_pair_draws_its_classes_in_fewer_passes():
    """Exact drafts give the target's distribution, so at least three of the four attributes of two pictures must be
    correct: the goal of the models is three in four (results/embedded_models.md), and a guess would find one in six.
    Some drafts are accepted."""
    cfg = configuration.compose(["model=mar_scenes", "method=cspd", "gamma=1", "diffusion_steps=20"])
    pipeline = Pipeline.load(cfg)
    assert pipeline.rule.exact
    items = load("n=2")
    prompts, keys = [item.prompt for item in items], [(0, item.index) for item in items]
    drafted = pipeline.decode(pipeline.encode(prompts), keys)
    right = read_right(pipeline.pixels(drafted.tokens), [item.labels for item in items])
    assert right[:, scenes_classes._SHAPE].sum() + right[:, scenes_classes._COLOUR].sum() >= 3
    assert (drafted.steps < pipeline.model.target.length).all()


def distributions_of(count, seed=0):
    """Distributions of tokens near their class's value, and the classes."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 40
    centre = np.random.default_rng(1).standard_normal((40, 1, 3))[labels]
    mean = centre + 0.3 * rng.standard_normal((count, 16, 3))
    return np.stack([mean, np.full_like(mean, 0.1)]).astype(np.float16), labels


def test_the_autoencoder_learns_and_its_tokens_have_unit_variance(tmp_path):
    images = scenes.WORLD.render("train", range(24))[0]
    torch.manual_seed(0)
    kl = Latents(replace(TINY_KL, ch_mult=(1, 1, 2, 2), codebook_embed_dim=8))
    before = training.evaluate_kl(kl, images, 4.0)["psnr_db"]
    training.train_kl(kl, images, Recipe(30, 6, 4e-3, warmup=5, precision="float32"), tmp_path)
    statistics = training.evaluate_kl(kl.eval(), images, 4.0)
    assert statistics["psnr_db"] > before + 2
    assert statistics["nats_a_token"] > 0.2
    assert statistics["beyond_limit"] < 0.02
    mean, spread = training.encode_all(kl, images).astype(np.float64)
    assert mean.shape == (24, 64, 8)
    assert mean.var() + (spread**2).mean() == pytest.approx(1, abs=0.02)
    assert kl.cfg.scale != 1
    tokens, _ = kl.token_distribution(to_float(images[:4]))
    latent = kl.encode(to_float(images[:4]))[0]
    torch.testing.assert_close(kl.images(tokens), kl.decode_latent(latent), atol=1e-4, rtol=1e-4)


def test_an_object_counts_more_than_its_background() -> None:
    images = torch.full((2, 3, 64, 64), -0.2)
    images[:, :, ::2] += 0.1  # stripes
    images[0, 0, 20:30, 30:40] = 0.9  # a red square in the first
    weights = training.vividness(images)
    assert torch.allclose(weights.mean((1, 2)), torch.ones(2))
    assert weights[0, 20:30, 30:40].mean() > 10 * weights[0, 40:].mean()
    assert torch.allclose(weights[1], torch.ones(64, 64))  # both stripes are equally far from the mean
    assert torch.allclose(training.vividness(torch.zeros(1, 3, 8, 8)), torch.tensor(1 / 3))  # an image of one colour


def test_mirror_images_are_more_images_of_the_same_classes():
    images = scenes.WORLD.render("train", range(6))[0]
    doubled = training.mirrored(images)
    assert np.array_equal(doubled[:6], images)
    assert np.array_equal(doubled[9], images[3][:, ::-1])


def test_distillation_moves_the_draft_to_the_target(tmp_path):
    """The target's distribution differs from the data's: a draft that learns only from the data stays far from
    it."""
    torch.manual_seed(0)
    target = MAR(TINY)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "final_layer" in name or "adaLN" in name:
                parameter.normal_(0, 0.1)
    target.eval()
    distributions, labels = distributions_of(80)
    nats = {}
    for name, teacher in (("alone", None), ("taught", target)):
        torch.manual_seed(1)
        draft = MAR(CONFIGS["mar_draft"])
        if teacher is None:
            nats["new"] = training.evaluate_draft(target, draft, distributions, labels)["nats"]
        training.train_draft(
            draft, teacher, distributions, labels, Recipe(40, 16, 5e-3, warmup=5, precision="float32"), tmp_path
        )
        nats[name] = training.evaluate_draft(target, draft, distributions, labels)["nats"]
    assert nats["taught"] < 0.5 * min(nats["new"], nats["alone"])
    torch.manual_seed(2)
    same = MAR(TINY)
    same.load_state_dict(target.state_dict())
    assert training.evaluate_draft(target, same, distributions, labels)["nats"] == pytest.approx(0, abs=1e-5)


def test_a_killed_stage_ends_with_the_same_weights(tmp_path, monkeypatch):
    recipe = Recipe(steps=6, batch=8, lr=1e-3, warmup=1, ema=0.9, muon=True, save_every=2)
    torch.manual_seed(0)
    target = MAR(TINY).eval()

    def trained(folder):
        torch.manual_seed(1)
        draft = MAR(CONFIGS["mar_draft"])
        training.train_draft(draft, target, *distributions_of(40), recipe, tmp_path / folder)
        return dict(draft.named_parameters())

    undisturbed, calls, real = trained("whole"), itertools.count(1), training.head_loss

    def killed(*arguments):
        if next(calls) == 6:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as once:
        once.setattr(training, "head_loss", killed)
        with pytest.raises(KeyboardInterrupt):
            trained("parts")
    torch.testing.assert_close(trained("parts"), undisturbed, rtol=0, atol=0)


def train(folder, *words):
    """Runs `make train-scenes` in seconds and returns the digests of the files that it wrote."""
    words = ["--budget", "smoke", "--work", str(folder / "work"), "--assets", str(folder / "assets"), *words]
    assert tool.main([*words, "--card", str(folder / "card.md")]) == 0
    return {p.stem: registry.digest(p) for p in sorted((folder / "assets").iterdir())}


def test_the_stages_write_weights_that_a_run_uses_and_a_card(tiny, tmp_path, capsys):
    (tmp_path / "assets").mkdir()
    shutil.copy(registry.ASSETS / "scenes_reader.safetensors", tmp_path / "assets")
    files = train(tmp_path, "--only", "mar_draft,mar_samples")  # the stages that they need are added
    assert list(files) == ["scenes_kl", "scenes_mar", "scenes_mar_draft", "scenes_reader"]
    cfg = ["model=mar_scenes", f"weights={tmp_path}/assets", "diffusion_steps=3", "gamma=2", "n=3", *QUICK]
    assert cli.main(["run", *cfg, f"out={tmp_path}/run"]) == 0
    row = row_of(tmp_path / "run")
    assert row["weights"].startswith("folder:")
    assert row["tokens"] == 16
    kl = checkpoints.load(tmp_path / "assets" / "scenes_kl.safetensors", "scenes-kl", Latents, LatentConfig)
    assert kl.cfg.scale not in (0, 1)
    bundle = Pipeline.load(configuration.compose(cfg)).model
    assert bundle.autoencoder.cfg == kl.cfg
    assert bundle.target.steps == 3
    # All files exist, so nothing is trained and no file changes.
    capsys.readouterr()
    assert train(tmp_path, "--only", "kl,mar,mar_draft") == files
    written = card.Card.read(tmp_path / "card.md")
    assert list(written.statistics) == ["kl", "mar", "mar_draft", "mar_samples"]
    assert [stages for stages, _ in written.runs] == [["mar_samples"], ["kl", "mar", "mar_draft"]]
    samples = written.statistics["mar_samples"]
    assert samples["tokens_a_pass_path"] >= 1
    assert samples["reader_accuracy_renders"] == 1
    for name in ("reader_accuracy_decoded", "reader_accuracy_cfg_2", "vanilla_one_object", "acceptance_exact"):
        assert 0 <= samples[name] <= 1
    assert samples["reader_accuracy_vanilla"] == samples["reader_accuracy_cfg_2"]
    assert (samples["vanilla_shape"] + samples["vanilla_colour"]) / 2 == samples["reader_accuracy_vanilla"]
    assert written.statistics["mar"]["loss"] > 0
    # Another way to train gives another draft.
    apart = train(tmp_path, "--only", "mar_draft", "--no-distil")
    assert [name for name in files if apart[name] != files[name]] == ["scenes_mar_draft"]
    # A stage that is not chosen is read from its file, not trained again.
    shutil.rmtree(tmp_path / "work")
    again = train(tmp_path, "--only", "mar_draft")
    assert [again[name] for name in ("scenes_kl", "scenes_mar")] == [
        files[name] for name in ("scenes_kl", "scenes_mar")
    ]
    assert card.Card.read(tmp_path / "card.md").runs[-1][0] == ["mar_draft"]


def test_weights_of_two_trainings_are_refused(tiny, tmp_path):
    def save(kind, module):
        checkpoints.save(module, tmp_path / f"scenes_{kind}.safetensors", f"scenes-{kind}")

    def load():
        cfg = configuration.compose(["model=mar_scenes", f"weights={tmp_path}"])
        return mar_scenes.ScenesMAR(cfg, torch.device("cpu"), torch.float32).drafter_network("cspd")

    for kind, module in (("kl", Latents), ("mar", MAR), ("mar_draft", MAR)):
        save(kind, module(CONFIGS[kind]))
    assert load().length == 16
    other = MAR(replace(TINY, token_dim=4))
    for kind, sentence in (("mar_draft", "train one for this target"), ("mar", "scenes_mar and scenes_kl")):
        save(kind, other)
        with pytest.raises(UsageError, match=sentence):
            load()


def test_a_run_uses_the_drafter_that_it_names(tiny, tmp_path):
    """Only the drafter of drafter.weights= drafts. A drafter for other tokens is refused."""

    def drafter_of(*words):
        cfg = configuration.compose(["model=mar_scenes", "weights=random", "method=cspd", *words])
        return Pipeline.load(cfg).drafter

    torch.manual_seed(0)
    network, file = MAR(CONFIGS["mar_draft"]), tmp_path / "own" / registry.DRAFTER_FILE
    file.parent.mkdir()
    checkpoints.save(network, file, registry.drafter_networks()["cspd"].kind, torch.float32)
    for path in (file, file.parent):
        named = drafter_of(f"drafter.weights={path}")
        torch.testing.assert_close(dict(named.model.state_dict()), dict(network.state_dict()), rtol=0, atol=0)
        assert (named.scale, named.steps) == (2.0, DIFFUSION_STEPS)
    assert not torch.equal(drafter_of().model.z_proj.weight, network.z_proj.weight)
    checkpoints.save(MAR(replace(TINY, token_dim=4)), file, registry.drafter_networks()["cspd"].kind)
    with pytest.raises(UsageError, match="target"):
        drafter_of(f"drafter.weights={file}")
    with pytest.raises(UsageError, match=f"holds no {registry.DRAFTER_FILE}"):
        drafter_of(f"drafter.weights={tmp_path}")


def test_a_bad_word_is_a_short_error(tmp_path, capsys):
    for words, sentence in (
        (["--only", "kl,marr"], "unknown stage 'marr'"),
        (["--budget", "smoke"], "--budget smoke has no recipe for evaluators, samples: add --only, of tokenizer,text,"),
    ):
        with pytest.raises(SystemExit) as stopped:
            tool.main([*words, "--work", str(tmp_path / "work")])
        assert stopped.value.code == 2
        assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_recipes_name_stages():
    for world, budgets in tool.BUDGETS.items():
        for budget in budgets.values():
            assert {*budget.recipes, *budget.measured} <= set(tool.STAGES[world])
        everything = budgets["cpu"]
        assert {*everything.recipes, *everything.measured} == set(tool.STAGES[world])


def test_a_card_survives_its_file_and_keeps_older_runs(tmp_path):
    made = card.Card()
    made.add(
        {"kl": {"psnr_db": 27.123456, "seconds": 8.64e4}, "mar": {"loss": float("nan")}}, "a; b `cpu`", ["kl", "mar"]
    )
    (tmp_path / "card.md").write_text(made.render())
    read = card.Card.read(tmp_path / "card.md")
    assert read.render() == made.render()
    read.add({"kl": {"psnr_db": 25.0}}, "later", ["kl", "mar"])
    assert [stages for stages, _ in read.runs] == [["mar"], ["kl"]]
    assert "25 | at least 26 | **missed**" in read.render()
    assert card.Card.read(tmp_path / "none.md") == card.Card()
