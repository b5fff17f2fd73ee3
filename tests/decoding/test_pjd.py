"""PJD against a plain simulation of its released code's rules, one input after the other."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import Tensor

from specbench.audit.tabular import TabularTarget, random_tables
from specbench.decoding import rules
from specbench.decoding.drafters.pjd import ParallelJacobi
from specbench.decoding.drafters.window import INIT, TOKEN
from specbench.decoding.loop import DecoderConfig, decode
from specbench.decoding.parallel_positions import rows_at_once
from specbench.decoding.rules.base import normalise
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.verify import VERIFY, one_hot

VOCAB, SIDE, IMAGES = 2, 4, 40
Results = tuple[list[int], Tensor, list[tuple[int, Tensor]]]


class Row:
    """A row of an image: its tokens, its drafts with their distributions, and the distribution of its last token."""

    def __init__(self, number: int) -> None:
        self.number, self.latest = number, torch.zeros(0)
        self.tokens: list[int] = []
        self.drafts: list[tuple[int, Tensor]] = []


class Simulation:
    """One image. A pass is one sequence of inputs, whose offsets are counted as in PJD's code if it is `released`."""

    def __init__(self, tables: list[Tensor], image: int, window: int, lead: int, tau: float, released: bool) -> None:
        self.tables, self.window, self.tau, self.released = tables, window, tau, released
        self.chains, self.needed = rows_at_once(SIDE, lead - 1), min(lead - 1, SIDE)
        self.rng = tiny.rng(image + 1).rows(torch.tensor([image]))
        self.rows = [Row(number) for number in range(len(tables) // SIDE)]
        self.steps, self.extra = 0, False
        self.accepted, self.rejected = 0, 0  # draft tokens

    def key(self, row: Row) -> Tensor:
        return torch.tensor([self.steps * self.chains + row.number % self.chains])

    def numbers(self, row: Row, tag: int, count: int) -> Tensor:
        return self.rng.uniform(self.key(row), tag, count)[0]

    def above(self, row: Row) -> int:
        return len(self.rows[row.number - 1].tokens) if row.number else SIDE

    def top(self, row: Row) -> bool:
        return self.above(row) == SIDE

    def inputs(self, row: Row) -> list[tuple[int, Tensor]]:
        """The root and the drafts of a row, filled with random codes."""
        ahead = SIDE if self.top(row) else self.above(row)
        count = min(ahead - len(row.tokens), self.window) if row.number or row.tokens else 1
        u = self.numbers(row, INIT, self.window - 1)
        drafts = row.drafts[: count - 1]
        for offset in range(len(drafts), count - 1):
            token = int(u[offset] * VOCAB)
            drafts.append((token, one_hot(torch.tensor(token), VOCAB)))
        return [self.root(row), *drafts]

    def root(self, row: Row) -> tuple[int, Tensor]:
        if row.tokens:
            return row.tokens[-1], row.latest
        if self.top(row):
            token = self.rows[row.number - 1].tokens[-1] if row.number else 0
        else:  # the newest token of the second row above
            token = self.rows[max(row.number - 2, 0)].tokens[-1]
        return token, one_hot(torch.tensor(token), VOCAB)

    def hidden(self, active: list[Row], sizes: list[int]) -> list[list[bool]]:
        """For every input, whether the drafts of each active row above are hidden from it."""
        length = sum(sizes) + self.extra
        mask = [[False] * len(active) for _ in range(length)]
        begin, seen = int(self.extra), int(self.extra)
        for number, size in enumerate(sizes):
            for at in range(begin, min(begin + size, length)):
                for upper in range(number):
                    mask[at][upper] = True
            seen += size
            begin = begin + seen if self.released else seen
        return mask[int(self.extra) :]

    def step(self) -> None:
        active = [r for r in self.rows if len(r.tokens) < SIDE and (not r.number or self.above(r) >= self.needed)]
        inputs = [self.inputs(row) for row in active]
        mask, flat, results = self.hidden(active, [len(x) for x in inputs]), 0, []
        for number, row in enumerate(active):
            p = []
            for offset in range(len(inputs[number])):
                seen = [0] * len(self.tables)
                for other in self.rows:
                    for column, token in enumerate(other.tokens):
                        seen[other.number * SIDE + column] = token
                for upper in range(number):
                    if not mask[flat][upper]:
                        first = active[upper].number * SIDE + len(active[upper].tokens)
                        for ahead, (token, _) in enumerate(inputs[upper][1:]):
                            seen[first + ahead] = token
                at = row.number * SIDE + len(row.tokens) - 1
                for ahead in range(offset + 1):
                    if at + ahead >= 0:
                        seen[at + ahead] = inputs[number][ahead][0]
                p.append(self.distribution(seen[: at + offset + 1]))
                flat += 1
            results.append(self.verify(row, inputs[number], p))
        for row, (tokens, latest, drafts) in zip(active, results, strict=True):
            row.tokens += tokens
            row.latest, row.drafts = latest, drafts
        self.steps += 1
        done = [row for row in active if len(row.tokens) == SIDE and row.number + 1 < len(self.rows)]
        self.extra = any(self.rows[row.number + 1].tokens for row in done)

    def distribution(self, prefix: list[int]) -> Tensor:
        code = 0
        for token in prefix:
            code = code * VOCAB + token
        return self.tables[len(prefix)][code]

    def verify(self, row: Row, inputs: list[tuple[int, Tensor]], p: list[Tensor]) -> Results:
        """The tokens that the row gains, the distribution of the last one, and the new drafts."""
        shift = int(self.extra and self.released)
        tested = [inputs[n - shift] for n in range(1, len(inputs))]
        u = self.rng.uniforms(self.key(row), VERIFY, 2, self.window)[0]
        fresh = self.numbers(row, TOKEN, self.window - 1)
        gained: list[int] = []
        latest = row.latest
        for n, (token, q) in enumerate(tested):
            if u[0, n + 1] >= (p[n][token] / q[token]).clamp_max(1):
                self.rejected += 1
                break
            self.accepted += 1
            gained.append(token)
            latest = q
        accepted = len(gained)
        if self.top(row):
            full = accepted == len(tested)
            latest = p[-1] if full else normalise((p[accepted] - tested[accepted][1]).clamp_min(0), p[accepted])
            gained.append(int(draw(latest, u[1, 0])))
        drafts = []
        for index, n in enumerate(range(len(gained), min(len(inputs), len(gained) + self.window - 1))):
            if accepted < n < len(tested):
                token, q = tested[n]
                if (p[n][token] / q[token]).clamp_max(1) > self.tau:
                    drafts.append((token, q))
                    continue
            drafts.append((int(draw(p[n], fresh[index])), p[n]))
        return gained, latest, drafts

    def run(self) -> tuple[list[int], int]:
        while any(len(row.tokens) < SIDE for row in self.rows):
            self.step()
        return [token for row in self.rows for token in row.tokens], self.steps


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize(("window", "lead"), [(3, 2), (2, 2), (4, 10)])
def test_every_token_is_the_simulations(window: int, lead: int, released: bool) -> None:
    """Rows of 4 tokens. With lead=2 up to four rows are in progress, and a complete row's last token is fed while the
    next ones are: the offsets of the released code go wrong. With lead=10 there is one row at a time."""
    tables = random_tables(VOCAB, SIDE * SIDE, 5, 2.0)
    setting = ("released", "shifted") if released else ("meant", "drafts")
    drafter = ParallelJacobi(window, lead, 0.5, *setting)
    config = DecoderConfig(TabularTarget(tables), drafter, rules.exact(), Sampling())
    out = decode(config, None, tiny.rng(IMAGES))
    for image in range(IMAGES):
        simulation = Simulation(tables, image, window, lead, 0.5, released)
        tokens, steps = simulation.run()
        assert out.tokens[image].tolist() == tokens
        assert out.steps[image] == steps
        verified = simulation.accepted + simulation.rejected  # several rows can reject a token in one pass
        assert (int(out.accepted[image]), int(out.trace.reach[image].sum())) == (simulation.accepted, verified)
