"""A draft that costs nothing: the tokens above, from the previous row of the image."""

from dataclasses import dataclass

import torch

from specbench.decoding.shape import DraftShape
from specbench.decoding.trees import build as tree_of
from specbench.decoding.trees import chain_paths
from specbench.decoding.verify import Draft
from specbench.decoding.verify.base import one_hot
from specbench.engine.state import put


@dataclass
class Grid:
    width: int  # tokens in a row of the image
    vocab_size: int

    def buffers(self):
        return {}


class CopyAbove:
    """A chain of `window` tokens. Each is certain, so that the distribution that it is drawn from is a point mass."""

    constants = ("tree", "ahead")  # the tensors that `open` puts on the device

    def __init__(self, shape):
        self.shape, self.tree = shape, shape.tree
        self.ahead = torch.arange(shape.height)

    def open(self, session, conditioning, sampling, rng):
        put(self, rng.key.device)
        return Grid(session.width, session.vocab_size)

    def propose(self, state, history, num_committed, step):
        last = (num_committed - 1).clamp_min(0)[:, None]  # the root of the draft
        above = (num_committed[:, None] + self.ahead - state.width).clamp_min(0)
        root, tokens = history.gather(1, last), history.gather(1, above.minimum(last))
        exists = (num_committed > 0)[:, None].expand_as(tokens)  # nothing is above the first token
        valid = torch.cat([torch.ones_like(root, dtype=torch.bool), exists], 1)
        return Draft(self.tree, torch.cat([root, tokens], 1), one_hot(tokens, state.vocab_size), valid)

    def commit(self, state, result):
        """Nothing to remember: the committed tokens are in the history."""


@dataclass(frozen=True)
class Choice:
    """The parameters of copy_above.yaml."""

    window: int

    @property
    def shape(self):
        return DraftShape(tree_of(chain_paths(self.window)))  # no network, so no passes

    def build(self, model):
        return CopyAbove(self.shape)
