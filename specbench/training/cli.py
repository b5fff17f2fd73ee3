"""`specbench train scenes`: the embedded world's models from nothing, resumable, with the figures they reached."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from specbench.data import scenes
from specbench.errors import UsageError
from specbench.models import checkpoints
from specbench.models.eagle import Eagle, like_target
from specbench.models.llamagen import LlamaGen, LlamaGenConfig
from specbench.models.medusa import Medusa
from specbench.models.medusa import like_target as medusa_like_target
from specbench.models.scenes_config import DRAFT, TARGET, VQ
from specbench.models.scenes_config import text as text_config
from specbench.models.text import TextEncoder
from specbench.models.vq import VQModel
from specbench.registry import ASSETS
from specbench.training import card, drafter, target, tokenizer, world
from specbench.training.trainer import Recipe

TRAIN_SCENES, VALIDATION_SCENES = 80_000, 2_000

#: Steps for two CPU cores (about two hours in all) and for a GPU (minutes).
RECIPES: dict[str, dict[str, Recipe]] = {
    "cpu": {
        "tokenizer": Recipe(steps=1800, batch=48, lr=2e-3),
        "text": Recipe(steps=2000, batch=128, lr=1.5e-3),
        "target": Recipe(steps=9000, batch=32, lr=2e-3, ema=0.998, muon=True),
        "draft": Recipe(steps=1000, batch=32, lr=2e-3, ema=0.995, muon=True),
        "eagle": Recipe(steps=2200, batch=32, lr=1.5e-3, ema=0.995, muon=True),
        "medusa": Recipe(steps=600, batch=32, lr=1e-3, ema=0.99),
    },
    "gpu": {
        "tokenizer": Recipe(steps=6000, batch=128, lr=2e-3),
        "text": Recipe(steps=3000, batch=256, lr=1e-3),
        "target": Recipe(steps=20000, batch=128, lr=2e-3, ema=0.999, muon=True),
        "draft": Recipe(steps=8000, batch=128, lr=2e-3, ema=0.999),
        "eagle": Recipe(steps=6000, batch=128, lr=1e-3, ema=0.999),
        "medusa": Recipe(steps=4000, batch=128, lr=1e-3, ema=0.999),
    },
}
STAGES = ("tokenizer", "text", "target", "draft", "eagle", "medusa", "evaluators", "samples")


class Scenes:
    """The stages, each trained from the outputs of those before it and skipped when its asset is current."""

    def __init__(self, work: Path, assets: Path, recipes: dict[str, Recipe], device: torch.device) -> None:
        self.work, self.assets, self.recipes, self.device = work, assets, recipes, device
        self.train = world.load(work, "train", TRAIN_SCENES)
        self.validation = world.load(work, "validation", VALIDATION_SCENES)
        self.figures: dict[str, dict[str, float]] = {}

    def path(self, kind: str) -> Path:
        return self.assets / f"scenes_{kind}.safetensors"

    def _stage(self, name: str, module: torch.nn.Module, config: dict, fit: Callable[[], dict[str, float]]) -> None:
        spent = fit()
        module.eval()
        checkpoints.save(module, self.path(name), f"scenes-{name}", config)
        # what is measured below is what was saved, half precision included
        checkpoints.fill(module, checkpoints.read(self.path(name), f"scenes-{name}")[1], name)
        self.figures[name] = {k: v for k, v in spent.items() if k in ("seconds", "images")}

    def _cached(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        path = self.work / f"{name}.npy"
        if not path.exists():
            np.save(path, make())
        return np.load(path, mmap_mode="r")

    def tokenizer(self) -> VQModel:
        torch.manual_seed(0)
        vq = VQModel(VQ).to(self.device)
        self._stage(
            "tokenizer",
            vq,
            VQ.to_dict(),
            lambda: tokenizer.train(vq, self.train.images, self.recipes["tokenizer"], self.work),
        )
        self.figures["tokenizer"] |= tokenizer.evaluate(vq, self.validation.images)
        return vq

    def text(self) -> TextEncoder:
        torch.manual_seed(1)
        cfg = text_config()
        text = TextEncoder(cfg).to(self.device)
        self._stage(
            "text",
            text,
            cfg.to_dict(),
            lambda: target.train_text(text, self.train.captions, self.train.labels, self.recipes["text"], self.work),
        )
        with torch.no_grad():
            features = text(text.tokenize(self.validation.captions).to(self.device))
            labels = torch.as_tensor(scenes.placed(self.validation.labels)).to(self.device)
            _, right = text.reading_loss(features, labels)
        self.figures["text"]["attributes_right"] = float(right)
        return text

    def codes(self, vq: VQModel) -> tuple[np.ndarray, np.ndarray]:
        return (
            self._cached("codes-train", lambda: tokenizer.encode_all(vq, self.train.images)),
            self._cached("codes-validation", lambda: tokenizer.encode_all(vq, self.validation.images)),
        )

    def autoregressive(self, name: str, cfg: LlamaGenConfig, codes: tuple, features: tuple) -> LlamaGen:
        torch.manual_seed(2)
        model = LlamaGen(cfg).to(self.device)
        self._stage(
            name,
            model,
            cfg.to_dict(),
            lambda: target.train_target(name, model, codes[0], features[0], self.recipes[name], self.work),
        )
        self.figures[name] |= target.evaluate_target(model, codes[1][:1000], features[1][:1000])
        return model

    def eagle(self, model: LlamaGen, codes: tuple, features: tuple) -> Eagle:
        torch.manual_seed(3)
        eagle = like_target(model).to(self.device)
        self._stage(
            "eagle",
            eagle,
            eagle.cfg.to_dict(),
            lambda: drafter.train_eagle(eagle, model, codes[0], features[0], self.recipes["eagle"], self.work),
        )
        self.figures["eagle"] |= drafter.evaluate_drafter(model, eagle, codes[1][:1000], features[1][:1000])
        return eagle

    def medusa(self, model: LlamaGen, codes: tuple, features: tuple) -> Medusa:
        torch.manual_seed(4)
        medusa = medusa_like_target(model).to(self.device)
        self._stage(
            "medusa",
            medusa,
            medusa.cfg.to_dict(),
            lambda: drafter.train_medusa(medusa, model, codes[0], features[0], self.recipes["medusa"], self.work),
        )
        self.figures["medusa"] |= drafter.evaluate_drafter(model, medusa, codes[1][:1000], features[1][:1000])
        return medusa

    def run(self, until: str) -> None:
        last = STAGES.index(until)
        vq = self.tokenizer()
        text = self.text() if last >= 1 else None
        if text is None or last < 2:
            return
        codes = self.codes(vq)
        features = (target.features_of(text, self.train.captions), target.features_of(text, self.validation.captions))
        model = self.autoregressive("target", TARGET, codes, features)
        if last >= 3:
            small = self.autoregressive("draft", DRAFT, codes, features)
            self.figures["draft"] |= drafter.evaluate_drafter(model, small, codes[1][:1000], features[1][:1000])
        if last >= 4:
            self.eagle(model, codes, features)
        if last >= 5:
            self.medusa(model, codes, features)
        if last >= 6:
            from specbench.training import evaluators

            figures = evaluators.train_all(self.train, self.validation, self.work, self.assets, self.device)
            self.figures["evaluators"] = figures
        if last >= 7:
            self.figures["samples"] = card.sample_figures(self.assets, self.device)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="specbench train", description="Train the embedded models from nothing.")
    parser.add_argument("world", choices=["scenes"])
    parser.add_argument(
        "--work", type=Path, default=Path(".train"), help="checkpoints, rendered scenes, loss curves (resumed from)"
    )
    parser.add_argument("--assets", type=Path, default=ASSETS, help="where the finished weights go")
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="stop after this stage")
    parser.add_argument(
        "--card", type=Path, default=Path("results/embedded_models.md"), help="where the model card goes"
    )
    parser.add_argument("--budget", choices=sorted(RECIPES), default="gpu" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.budget == "gpu" and not torch.cuda.is_available():
        raise UsageError("--budget gpu needs a CUDA device and none is visible; use --budget cpu")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.time()
    stages = Scenes(args.work, args.assets, RECIPES[args.budget], device)
    stages.run(args.until)
    date = time.strftime("%Y-%m-%d", time.gmtime())
    report = card.provenance(device, args.budget, date) | {"stages": stages.figures}
    args.card.parent.mkdir(parents=True, exist_ok=True)
    args.card.write_text(card.render(report))
    for stage, figures in stages.figures.items():
        print(f"{stage:10s} " + "  ".join(f"{k} {v:.4g}" for k, v in figures.items()))
    print(f"weights in {args.assets}, model card in {args.card}, {time.time() - began:.0f} s")
    return 0
