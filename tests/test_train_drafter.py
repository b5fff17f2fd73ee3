"""`specbench train drafter=...`: what is taught is what is drafted, and a training can be stopped, shared and used."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import test_targets as families
import torch
from safetensors.torch import load_file

from specbench import cli, registry
from specbench.decoding import rules, trees
from specbench.decoding.drafters.eagle import Eagle as EagleDrafter
from specbench.decoding.loop import Outcome
from specbench.decoding.sampling import Sampling, Streams
from specbench.decoding.verify import verify
from specbench.errors import UsageError
from specbench.models import eagle
from specbench.pipeline import Pipeline
from specbench.training import command, recipes
from specbench.training.lessons import Live, Reader


@torch.inference_mode()
@pytest.mark.parametrize("taps", [(), (0, 1)])
@pytest.mark.parametrize("family", ["classes", "lumina", "emu3"])
def test_what_is_taught_is_what_is_drafted(family, taps):
    """The laws of a drafted chain, from caches, are those that teaching gives for the same tokens: depth j + 1 in its
    turn j, which knows the target's hidden states up to the root and own outputs behind it."""
    model = families.target(family, 3)
    torch.manual_seed(5)
    head = families.sharpened(eagle.like_target(model, taps), 2.0)
    drafter = EagleDrafter(head, trees.chain_paths(3))
    tapped = model.tapping(taps)
    streams, sampling, given = Streams([(0, 0), (0, 1)]), Sampling(), families.prompts(family, [0, 2])
    session = tapped.open(given, 2, False, drafter.tree.nodes)
    state = drafter.open(session, given, sampling, streams)
    history, count = torch.zeros(2, 60, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    reader, compared = Reader(tapped), 0
    for _ in range(4):
        draft = drafter.propose(state, history, count, torch.zeros(2).long())
        for row in range(2):
            c = int(count[row])
            if c == 0 or c + 4 > model.length:
                continue
            sequence = torch.cat([history[row, :c], draft.tokens[row, 1:], torch.zeros(1, dtype=torch.int64)])
            sequence = torch.nn.functional.pad(sequence, (0, model.length - len(sequence)))[None].repeat(2, 1)
            lesson = Live(tapped, sequence.numpy(), lambda rows: given).lesson(np.arange(2), np.zeros(2, dtype=bool))
            root = lesson.valid.shape[1] - 1 + c  # its place; entry root - 1 holds it
            turns = head.teach(lesson.hidden, lesson.ids, lesson.valid, 3)
            for j, out in enumerate(turns):
                place = torch.tensor([[c + j]])
                logits = session.constrain(reader.target.head(out[row, root - 1 + j])[None, None], place)
                torch.testing.assert_close(draft.laws[row, j], sampling.law(logits)[0, 0], atol=1e-4, rtol=1e-3)
                compared += 1
        logits, hidden = session.forward(draft.tokens, draft.tree, history, count)
        places = count[:, None] + draft.tree.depth
        law = sampling.law(session.constrain(logits, places))
        verdict = verify(law, draft, rules.exact(), streams, torch.zeros(2).long())
        session.commit(verdict, draft.tree, count)
        drafter.commit(state, Outcome(draft, law, hidden, verdict, count))
        history.scatter_(1, count[:, None] + torch.arange(verdict.tokens.shape[1]), verdict.tokens)
        count += verdict.length + 1
    assert compared >= 9
