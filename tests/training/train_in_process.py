"""Trains in a process of two. Both fork from an interpreter that imports this file, and no test."""

from __future__ import annotations

import os

import torch

from specbench import cli
from specbench.training import command  # noqa: F401 (imported once, before the processes fork)


def train_as(rank, port, words):
    """Trains in a process of two, which torchrun would start with these variables."""
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update(
        {name: str(value) for name, value in place.items()}, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true"
    )
    assert cli.main(["train", *words]) == 0
    assert not torch.distributed.is_initialized()  # an open group can end the process with SIGABRT
