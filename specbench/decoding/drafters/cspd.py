"""Continuous speculative decoding: a smaller model of continuous tokens drafts a chain, in the loop of
`decoding.continuous`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbench.decoding.continuous.session import ContinuousModel
from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import build as build_tree
from specbench.decoding.trees import chain_paths


def shape(cfg: Mapping[str, Any]) -> DraftShape:
    return DraftShape(build_tree(chain_paths(cfg["gamma"])), passes=cfg["gamma"])


def build(cfg: Mapping[str, Any], model: Any) -> ContinuousModel:
    network: ContinuousModel = model.drafter_network("cspd")
    return network
