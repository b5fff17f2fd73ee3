"""A drafter's card states its distance under the guidance in use; drafters of several strengths can be chosen."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from commands import ROOT
from safetensors.torch import load_file
from test_train_drafter import FAST, SMALL, real, same, trained

from specbench import cli
from specbench.config import configuration, parameters, registry
from specbench.data import scenes
from specbench.decoding.drafters.eagle import Eagle
from specbench.decoding.loop import StepResult
from specbench.decoding.rng import RandomStreams
from specbench.decoding.sampling import Sampling
from specbench.decoding.trees import chain_paths
from specbench.errors import UsageError
from specbench.models.eagle import EagleTraining
from specbench.models.supervision import TargetHead
from specbench.training import drafter
from specbench.training.dataset import LiveDataset
from specbench.training.trainer import Checkpoints, MicroStep, Recipe, fit
from tools.scenes import card


def small_world(count=4, seed=3):
    """A target, its drafter, and sequences with their prompts."""
    target = tiny.llamagen(side=3, vocab=7)
    rng = torch.Generator().manual_seed(seed)
    features = torch.randn(count, tiny.PREFIX, 8, generator=rng)
    tokens = torch.randint(0, 7, (count, 9), generator=rng)

    def conditions(rows):
        return tiny.Conditioning(features[rows], torch.ones(len(rows), tiny.PREFIX, dtype=torch.bool))

    training = EagleTraining(tiny.eagle(target), TargetHead(target))
    return training, LiveDataset(target, tokens.numpy(), conditions)


@torch.inference_mode()
@pytest.mark.parametrize("sampling", [Sampling(0.8, top_k=3, cfg_scale=2.0), Sampling()])
def test_the_stated_distance_is_the_one_between_the_distributions_of_a_decoding(sampling):
    """Sequences are decoded token by token, with draft and target as in a run."""
    training, data = small_world()
    target, chain = training.head.target, Eagle(training.network, chain_paths(1))
    rows, rng = np.arange(4), RandomStreams([(0, i) for i in range(4)])
    session = target.open(data.conditions(rows), 4, sampling.guided, chain.tree.nodes)
    state = chain.open(session, data.conditions(rows), sampling, rng)
    history, apart, first = torch.as_tensor(data.tokens), [], []
    for c in range(target.length):
        count = torch.full((4,), c)
        draft = chain.propose(state, history, count, count)
        logits, hidden = session.forward(draft.tokens, draft.tree, history, count)
        p = sampling.distributions(logits, session, count[:, None] + draft.tree.depth).p[:, 0]
        if c > 0:
            apart.append(0.5 * (p - draft.probs[:, 0]).abs().sum(-1))
            first.append(p.argmax(-1) == draft.probs[:, 0].argmax(-1))
        rejected = SimpleNamespace(path_with_root=torch.zeros(4, 2, dtype=torch.int64), length=torch.zeros(4).long())
        chain.commit(state, StepResult(draft, p, hidden, rejected, count))
    statistics = drafter.evaluate(training, data, rows, batch_size=3, sampling=sampling)
    each = torch.stack(apart).mean(0)
    assert statistics["tv"] == pytest.approx(float(each.mean()), abs=1e-5)
    assert statistics["tv_stderr"] == pytest.approx(float(each.std()) / 2, abs=1e-5)
    assert statistics["top1_agreement"] == pytest.approx(float(torch.stack(first).float().mean()))
    plain = drafter.evaluate(training, data, rows)
    assert statistics.get("tv_unguided", plain["tv"]) == pytest.approx(plain["tv"], abs=1e-6)
    assert "tv_unguided" not in plain


def test_under_guidance_the_label_is_the_targets_guided_distribution():
    training, data = small_world()
    sampling, rows = Sampling(cfg_scale=3.0), np.arange(4)
    terms = drafter.LossTerms(noise=0.0, regression=0.0)
    loss, logged = drafter.loss_of(training, data, rows, 4, terms, sampling)(MicroStep(0, 0))
    assert logged["tv"] == pytest.approx(drafter.evaluate(training, data, rows, sampling=sampling)["tv"], abs=1e-5)
    plain, _ = drafter.loss_of(training, data, rows, 4, terms)(MicroStep(0, 0))
    assert abs(float(loss) - float(plain)) > 0.1


def test_a_checkpoint_has_the_weights_of_a_training_that_ends_there(tmp_path):
    """With averaging, the average replaces the weights at the end, and the next step starts from the weights
    themselves."""

    def ended(steps, kept=()):
        torch.manual_seed(0)
        module, weights = torch.nn.Linear(3, 1), {}

        def loss(micro_step):
            x = torch.as_tensor(micro_step.rng.standard_normal((8, 3)), dtype=torch.float32)
            value = (module(x)[:, 0] - x.sum(1)).pow(2).mean()
            return value, {"loss": float(value.detach())}

        recipe = Recipe(steps=steps, batch=8, lr=1e-2, warmup=100, ema=0.5, precision="float32")  # the rate still rises
        keep = Checkpoints(kept, lambda step: weights.update({step: module.weight.detach().clone()}))
        fit("small", module, loss, recipe, tmp_path / str(steps), checkpoints=keep)
        return module.weight.detach(), weights

    last, kept = ended(7, kept=(3, 5))
    assert set(kept) == {3, 5}
    for step, weight in kept.items():
        assert torch.equal(weight, ended(step)[0])
    (tmp_path / "7").rename(tmp_path / "before")
    assert torch.equal(last, ended(7)[0])


def test_a_training_starts_from_given_weights_and_keeps_checkpoints(tmp_path):
    words = [*real("llamagen_xl", tmp_path), "drafter=eagle", "source=self", *FAST, f"examples={tmp_path / 'examples'}"]
    first = trained([*words, *SMALL, f"out={tmp_path / 'first'}", "checkpoints=[5,10]"])
    same(first, load_file(tmp_path / "first" / "step-10" / registry.DRAFTER_FILE))
    middle = load_file(tmp_path / "first" / "step-5" / registry.DRAFTER_FILE)
    assert not torch.equal(middle["fc.weight"], first["fc.weight"])
    still = [word for word in SMALL if not word.startswith("steps")] + ["steps=1", "lr=1e-12", "weight_decay=0"]
    still = [*(word for word in words if not word.startswith("lr=")), *still, f"out={tmp_path / 'second'}"]
    same(middle, trained([*still, f"start={tmp_path / 'first' / 'step-5'}"]))
    with pytest.raises(UsageError, match="start"):
        trained([*still, f"start={tmp_path / 'first' / 'step-10'}"])
    with pytest.raises(UsageError, match="start"):
        trained([*still, f"start={tmp_path / 'none'}"])


def test_embedded_drafters_are_chosen_by_name(capsys):
    network = registry.drafter_networks()["eagle"]
    for name in network.variants:
        cfg = configuration.compose(["method=eagle1", f"drafter.weights=embedded:{name}"])
        assert cfg.drafter_weights == f"embedded:{name}"  # no path of this machine: rows and hashes name it
        file = registry.ASSETS / f"scenes_eagle_{name}.safetensors"
        assert registry.weights_label(cfg).endswith(f"+{registry.digest(file)}")
    default = configuration.compose(["method=eagle1", "drafter.weights=embedded"])
    assert registry.weights_label(default) == registry.weights_label(configuration.compose(["method=eagle1"]))
    for method, guidance, sentence in (
        ("eagle1", "embedded:steps61", "unknown eagle weights 'steps61' (choose from: "),
        ("medusa", "embedded:steps100", "medusa has only the default embedded weights"),
    ):
        with pytest.raises(UsageError, match=sentence.replace("(", r"\(")):
            configuration.compose([f"method={method}", f"drafter.weights={guidance}"])
    assert cli.main(["list", "drafters"]) == 0
    assert f"Also drafter.weights=embedded:{'|'.join(network.variants)}." in capsys.readouterr().out


def test_a_card_states_every_drafter_under_guidance(tmp_path):
    stated = card.drafter_statistics(scenes.WORLD, registry.ASSETS, torch.device("cpu"), 4)
    assert set(stated) == set(card.DRAFTERS)
    cfg_scale = parameters.default("model", "llamagen_scenes", "cfg_scale")
    drawn = card.Card()
    drawn.add({"eagle3": {"seconds": 1.0}}, "elsewhere", ["eagle3"])
    drawn.add(stated, "here", ["eagle3", *card.DRAFTERS])
    (tmp_path / "card.md").write_text(drawn.render())
    assert card.Card.read(tmp_path / "card.md").render() == drawn.render()
    for name, statistics in stated.items():
        assert statistics["cfg_scale"] == cfg_scale
        if name != "tv_eagle_guided":  # guidance multiplies the errors of logits that were trained without
            assert statistics["tv"] > statistics["tv_unguided"]
    default, guided = stated["tv_eagle"], stated["tv_eagle_guided"]
    assert (guided["tv"] < default["tv"], guided["tv_unguided"] > default["tv_unguided"]) == (True, True)
    # The card's standard error is of 150 scenes; the mean of the first four is within four standard errors of it.
    committed = card.Card.read(ROOT / "results" / "embedded_models.md").statistics
    for name, statistics in stated.items():
        bound = 4 * committed[name]["tv_stderr"] * (150 / 4) ** 0.5
        assert committed[name]["tv"] == pytest.approx(statistics["tv"], abs=bound)
