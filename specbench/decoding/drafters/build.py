"""Drafters from flat parameters. `model` is the loaded model bundle, which contains its own drafter networks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from specbench.decoding.drafters.draft_model import DraftModel
from specbench.decoding.drafters.eagle import Eagle, Eagle2
from specbench.decoding.drafters.medusa import Medusa
from specbench.decoding.drafters.none import NoDraft
from specbench.decoding.drafters.window import Window
from specbench.decoding.loop import Drafter
from specbench.decoding.trees import chain_paths, parse


def none(cfg: Mapping[str, Any], model: Any) -> Drafter:
    return NoDraft()


def draft_model(cfg: Mapping[str, Any], model: Any) -> Drafter:
    return DraftModel(model.drafter_network("draft_model"), cfg["window"])


def eagle(cfg: Mapping[str, Any], model: Any, network: str = "eagle") -> Drafter:
    return Eagle(model.drafter_network(network), chain_paths(cfg["window"]))


def eagle_tree(cfg: Mapping[str, Any], model: Any, network: str = "eagle") -> Drafter:
    return Eagle(model.drafter_network(network), parse(cfg["tree"]), cfg.get("select_from") == "replacement")


def eagle2(cfg: Mapping[str, Any], model: Any, network: str = "eagle") -> Drafter:
    return Eagle2(model.drafter_network(network), cfg["nodes"], cfg["depth"], cfg["width"], cfg["ranking"])


eagle3 = partial(eagle, network="eagle3")
eagle3_tree = partial(eagle_tree, network="eagle3")
eagle3_dynamic = partial(eagle2, network="eagle3")


def medusa(cfg: Mapping[str, Any], model: Any) -> Drafter:
    return Medusa(model.drafter_network("medusa"), parse(cfg["tree"]))


def jacobi(cfg: Mapping[str, Any], model: Any) -> Drafter:
    return Window(cfg["window"], cfg["init"], match=True)


def sjd(cfg: Mapping[str, Any], model: Any) -> Drafter:
    names = "window init refine coupling width depth tree fresh stored siblings plain_until plain_from tau"
    return Window(**{name: cfg[name] for name in names.split()})
