"""Inception-V3 with random weights, as a file where the metrics look for the published one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import nn

from specbench.metrics import inception


def network() -> nn.Module:
    """He's initialisation: with PyTorch's own, the features of all pictures would be the same to six digits."""
    net = inception.blank()
    torch.manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    return net


def write(folder: Path) -> str:
    """Writes the weights into a folder of evaluators' weights, and returns the file's SHA-256."""
    path = folder / "inception" / inception.FILES[0]
    path.parent.mkdir(parents=True)
    torch.save(network().state_dict(), path)
    return hashlib.sha256(path.read_bytes()).hexdigest()
