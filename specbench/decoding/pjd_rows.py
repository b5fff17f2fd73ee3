"""The rows of an image under PJD: which rows a pass extends, by how many tokens at most, and what their tokens attend
to. (A row of the image is called a "line" here, because a row is an image of the batch.)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.parallel_positions import ParallelPositions
from specbench.engine.state import Buffer, Buffers


@dataclass
class Roots:
    """The chains' first nodes before a pass, all (B, K). line: of the chain; position, token: of the node; room: the
    tokens by which the line can grow; live: the node exists; extends: the pass extends the line; top: all lines above
    are complete; stand_in: the node's token does not exist, and `token` replaces it; last: it is the last token of a
    complete line."""

    line: Tensor
    position: Tensor
    token: Tensor
    room: Tensor
    live: Tensor
    extends: Tensor
    top: Tensor
    stand_in: Tensor
    last: Tensor


class Lines:
    """Rows of B images whose growth depends on the samples. Chain k decodes the lines k, k + K, ...

    A line begins when the line above has `lag` tokens. It stays at least one token behind the line above until that one
    is complete. Forced tokens at the end of a line (a new line) are known from the start: a line is complete without
    them, and they are fed when the next line begins. Without forced tokens, the token before a new line's first one
    does not exist. The newest token of the second line above replaces it, at its position (for the second line: the
    newest token of the first), as in ZipAR's code. When a line is complete, its last token is fed once more.
    """

    constants = ("position", "column", "lengths", "codes", "needed", "ends", "number", "same_chain", "owner", "slots",
                 "forced")  # fmt: skip

    def __init__(self, session: Any, rows: int, device: torch.device, lag: int, chains: int) -> None:
        total, self.width = session.length, session.width
        self.position = torch.arange(total, device=device)
        self.column = self.position % self.width
        number, first = self.position // self.width, torch.arange(0, total, self.width, device=device)
        self.lengths = (total - first).clamp_max(self.width)
        self.forced = session.forced_tokens
        free = torch.ones_like(self.position) if self.forced is None else (self.forced < 0).long()
        # tokens of a line up to its last free one
        self.codes = torch.zeros_like(first).scatter_reduce(0, number, free * (self.column + 1), "amax")
        self.needed = self.codes.clamp_max(lag)  # tokens of a line when the next one begins
        codes = self.codes[number]
        self.ends = (self.column == codes) & (codes > 0)  # the token after them, which is forced
        self.number = torch.arange(chains, device=device)
        self.same_chain = torch.eye(chains, dtype=torch.bool, device=device)
        # the slots of replacements, and slots that no node attends to, (2, K, 1)
        self.slots = (total + torch.arange(2 * chains, device=device)).view(2, -1, 1)
        self.owner = torch.arange(rows, device=device).repeat_interleave(chains)
        self.line = self.number.repeat(rows, 1)  # (B, K): of each chain
        self.done = torch.zeros(rows, len(first), dtype=torch.int64, device=device)  # tokens of each line

    def buffers(self) -> Buffers:
        """The tensors that steps read or write (see `engine.state`)."""
        return {"line": Buffer(self.line), "done": Buffer(self.done)}

    def roots(self, history: Tensor) -> Roots:
        """The chains' first nodes; history (B, *): the committed tokens at their positions."""
        line = self.line.clamp_max(len(self.lengths) - 1)
        before, first = (line - 1).clamp_min(0), line == 0
        done, above = self.done.gather(1, line), self.done.gather(1, before)
        top = first | (above >= self.codes[before])
        live = (self.line == line) & (first | (above >= self.needed[before]))
        position = line * self.width + done - 1
        token = history.gather(1, position.clamp_min(0))
        missing = ~first & (done == 0)
        if self.forced is not None:
            forced = self.forced[position.clamp_min(0)]
            token = torch.where(missing & (forced >= 0), forced, token)
            missing &= forced < 0
        missing &= ~top
        model = torch.where(line > 1, line - 2, before)  # the line whose newest token replaces the missing one
        newest = model * self.width + self.done.gather(1, model) - 1
        token = torch.where(missing, history.gather(1, newest.clamp_min(0)), token)
        length, codes = self.lengths[line], self.codes[line]
        end = torch.where(done < codes, codes, length)
        room = torch.where(top, end, torch.minimum(end, above)) - done
        last = self._complete(line, done)
        return Roots(line, position, token, room, live, live & (done < length), top, missing, last)

    def _complete(self, line: Tensor, done: Tensor) -> Tensor:
        """Which lines (B, K) with `done` tokens are complete, or would be with their forced tokens."""
        return (self.line == line) & (self.codes[line] > 0) & (done >= self.codes[line])

    def parallel_positions(self, at: Roots, valid: Tensor, keys: Tensor, released: bool) -> ParallelPositions:
        """The positions of chains that begin at `at`. valid (B, K, n): the nodes that exist. A node attends to the
        tokens that exist and to its own line; with `released` also to the drafts that PJD's code shows it."""
        total, offsets = len(self.position), torch.arange(valid.shape[-1], device=valid.device)

        def of_line(x: Tensor) -> Tensor:
            return x.repeat_interleave(self.width, 1)[:, :total]

        exists = (of_line(self.done) > self.column) | (of_line(self.done >= self.needed) & self.ends)
        positions = at.position.unsqueeze(-1) + offsets
        stands = at.stand_in.unsqueeze(-1) & (offsets == 0)
        slots = torch.where(stands, self.slots[0], positions)
        slots = torch.where(valid & at.live.unsqueeze(-1), slots, self.slots[1])
        image = exists[:, None, None] | (self.position >= (at.position + at.stand_in)[:, :, None, None])
        if released:
            image = image | self._shown(at, valid)
        image = image & (self.position <= positions.unsqueeze(-1))
        leads = (at.stand_in.unsqueeze(-1) & self.same_chain).unsqueeze(2).expand(-1, -1, len(offsets), -1)
        sees = torch.cat([torch.ones_like(leads[..., :1]), image, leads], -1).flatten(1, 2)
        return ParallelPositions(positions, slots, sees, keys, at.extends, at.top, self.owner)

    def _shown(self, at: Roots, valid: Tensor) -> Tensor:
        """Which drafts of other lines the nodes attend to in PJD's code, (B, K, n, T) bool.

        A pass there is one sequence: a last token that is fed once more, then the inputs of the lines from above. The
        mask of a line hides the drafts of all lines above it, but it is written to inputs that begin where the running
        sum of running sums ends, not where the line's inputs begin.
        """
        extra, active = at.last.any(1, keepdim=True).float(), at.extends & ~at.last
        inputs = (valid.sum(-1) * active).float()
        above = ((at.line.unsqueeze(1) < at.line.unsqueeze(2)) & active.unsqueeze(1)).float()  # (B, of K, K)

        def sum_above(x: Tensor) -> Tensor:
            return (above @ x.unsqueeze(-1)).squeeze(-1)

        begin = extra + sum_above(inputs)
        written = (extra + sum_above(begin + inputs))[:, None, None]
        number = (begin.unsqueeze(-1) + torch.arange(valid.shape[-1], device=valid.device)).unsqueeze(-1)
        hit = (written <= number) & (number < written + inputs[:, None, None]) & active[:, None, None]
        hidden = hit.float() @ above.unsqueeze(1) > 0  # (B, K, n, of K)
        shown = (above.unsqueeze(2) > 0) & ~hidden
        ahead = self.position - at.position.unsqueeze(-1)
        drafts = (ahead > 0) & (ahead < inputs.unsqueeze(-1))  # (B, K, T)
        return shown.float() @ drafts.float().unsqueeze(1) > 0

    def advance(self, kept: Tensor) -> None:
        """Add the number of tokens `kept` (B, K) that were committed, and move complete lines on to the next ones."""
        end = len(self.lengths) - 1
        line = self.line.clamp_max(end)
        real, fed = self.line == line, self._complete(line, self.done.gather(1, line))
        self.done.scatter_add_(1, line, kept * real)
        complete = real & (self.done.gather(1, line) == self.lengths[line])
        # the last token of a line is fed once more, unless the next line begins with it
        waits = (self.done.gather(1, (line + 1).clamp_max(end)) > 0) & (line < end) & ~fed
        self.line += (complete & ~waits) * len(self.number)


@dataclass
class Fed(ParallelPositions):
    """Positions whose nodes read other tokens than those that are verified: fed (B, K * n)."""

    fed: Tensor

    def forward(self, session: Any, tokens: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(session, self.fed, history)
