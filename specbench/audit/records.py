"""Are the tokens that an engine emitted samples of the distributions that it recorded?

A line is one decision of the engine: the target's distribution p given everything before, the emitted token and, if the
engine drafted one, the draft token and the distribution q that it was drawn from. Every p is another one, so tokens
cannot be counted as in `statistics`. But if each token is a sample of its p, given the lines before it, then

- the probability integral transform U = P(order below the token) + V P(same order), with V uniform, is uniform and
  independent of the lines before, for every order of the tokens that is known before the token is (Rosenblatt 1952;
  randomised for discrete distributions). The orders are by p; by p / q, along which a wrong acceptance or residual
  moves probability; and by what each token gains if q is added up in bfloat16, as a drafter may have done;
- the number of times that each token is emitted has the mean sum p and the covariance sum diag(p) - p p^T;
- two successive U are independent. Engines invert the cumulative sum of p in the order of the tokens, or by falling p,
  so U in these orders shows a random number that is used twice.

The orders by q suppose that the engine decides each token given p and q alone, as token-wise verification does. A
verification of whole blocks may accept a token by what follows it: leave q out of its records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from specbench.audit import arrays, statistics, verdicts
from specbench.audit.audit_arguments import COLUMNS
from specbench.errors import UsageError, install
from specbench.rows.paired import LEVEL as CONFIDENCE
from specbench.storage import home, origin
from specbench.storage.package import __version__

_NAMES = ("p", "emitted", "q", "drafted")
_FEWEST = 100  # lines: as many as give each of _BINS an expectation of 5
_TOLERANCE = 1e-3  # of the sum of a distribution; probabilities that were recorded in bfloat16 are not within it
_BINS, _SIDE = 20, 8  # bins of U; bins per side of pairs of U
_CELLS = 256  # tokens that are counted one by one; the rarer others are one cell
_AT_ONCE = 1 << 22  # entries of p


@dataclass(frozen=True)
class Records:
    """p, q (N, V) float; emitted, drafted (N,) int64, -1 in `drafted` for a line without a draft. q and drafted are
    None if they were not recorded. Rows of q without a draft are not read."""

    name: str
    p: np.ndarray
    emitted: np.ndarray
    q: np.ndarray | None = None
    drafted: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.p)

    @property
    def has_draft(self) -> np.ndarray:
        return np.ones(len(self), dtype=bool) if self.drafted is None else self.drafted >= 0


def load(path: str) -> Records:
    """The records of an .npz or a Parquet file, with the arrays or columns p, emitted and, if known, q and drafted.

    Raises UsageError, which names the fault of the file."""
    file = home.expanded(path)
    if file.suffix == ".parquet":
        named = _of_parquet(file, path)
    else:
        named = arrays.of_file(path, "records", "|".join(_NAMES))
    where = f"of {path}"
    for name in ("p", "emitted"):
        if name not in named:
            raise UsageError(f"records: {path} has no {name}; it needs p (N, V) and emitted (N,)")
    p = named["p"]
    if p.ndim != 2 or p.shape[1] < 2:
        raise UsageError(f"records: p {where} must be of shape (N, V) with at least two tokens, not {p.shape}")
    if len(p) < _FEWEST:
        raise UsageError(f"records: {path} has {len(p)} lines; record at least {_FEWEST}")
    for name, shape in (("emitted", p.shape[:1]), ("q", p.shape), ("drafted", p.shape[:1])):
        if name in named and named[name].shape != shape:
            raise UsageError(f"records: {name} {where} must be of shape {shape} like p, not {named[name].shape}")
    emitted = _tokens(named["emitted"], "emitted", where, 0, p.shape[1])
    drafted = _tokens(named["drafted"], "drafted", where, -1, p.shape[1]) if "drafted" in named else None
    records = Records(Path(path).name, p, emitted, named.get("q"), drafted)
    _check_probs(p, "p", where, np.ones(len(p), dtype=bool))
    if records.q is not None:
        _check_probs(records.q, "q", where, records.has_draft)
    return records


def _of_parquet(file: Path, path: str) -> dict[str, np.ndarray]:
    import pandas as pd

    if not file.is_file():
        raise UsageError(f"records: there is no file '{path}'")
    try:
        cells = pd.read_parquet(file)
    except ImportError:
        raise UsageError(f"records: Parquet files need pyarrow: {install('parquet')}, or give an .npz file") from None
    except Exception as error:  # for a damaged file, the library raises various errors
        raise UsageError(f"records: cannot read {path} ({type(error).__name__}); give another file") from None
    return {name: arrays.checked(_column(cells[name], name, path), name, path, "records")
            for name in _NAMES if name in cells}  # fmt: skip


def _column(cells: Any, name: str, path: str) -> np.ndarray:
    """A column of numbers, or of equally long lists."""
    values = cells.to_numpy()
    if values.dtype != object or not len(values):
        return np.asarray(values)
    try:
        return np.stack([np.asarray(value) for value in values])
    except ValueError:
        raise UsageError(f"records: the lists in {name} of {path} differ in length") from None


def _tokens(values: np.ndarray, name: str, where: str, low: int, vocab: int) -> np.ndarray:
    wrong = (values != np.floor(values)) | (values < low) | (values >= vocab)
    if wrong.any():
        line = int(wrong.argmax())
        raise UsageError(
            f"records: line {line} of {name} {where} is {values[line]:g}, which must be a token from {low} to"
            f" {vocab - 1}"
        )
    return values.astype(np.int64)


def _check_probs(probs: np.ndarray, name: str, where: str, used: np.ndarray) -> None:
    for part, chosen in _chunks(probs, used):
        if (part < 0).any():
            raise UsageError(
                f"records: line {chosen[(part < 0).any(1)][0]} of {name} {where} has a negative probability"
            )
        total = part.sum(1, dtype=np.float64)
        off = np.abs(total - 1)
        if off.max() > _TOLERANCE:
            line = int(off.argmax())
            raise UsageError(
                f"records: line {chosen[line]} of {name} {where} sums to {total[line]:.6g}, not 1; record the"
                " distribution after temperature and filters, normalised, in float32"
            )


def _chunks(probs: np.ndarray, used: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The used rows, a part at a time, and their numbers."""
    numbers = np.flatnonzero(used)
    count = max(1, _AT_ONCE // probs.shape[1])
    for begin in range(0, len(numbers), count):
        chosen = numbers[begin : begin + count]
        yield probs[chosen], chosen


def measure(records: Records, seed: int, margin: float) -> dict[str, Any]:
    """The row of an audit of records (`COLUMNS`)."""
    spread = np.random.default_rng(seed).random(len(records))  # where a token's mass is cut
    every = np.ones(len(records), dtype=bool)
    transforms = [transformed(records.p, records.emitted, spread, every)]
    if records.q is not None and records.has_draft.any():
        transforms += [
            transformed(records.p, records.emitted, spread, records.has_draft, order, records.q)
            for order in (_ratio, _gain)
        ]
    tests = [_uniform(u) for u in transforms]
    in_order = transformed(records.p, records.emitted, spread, every, _by_number)
    tests += [_independent(u) for u in (in_order, transforms[0])]
    tests.append(counts(records.p, records.emitted, every))
    impossible = bool((np.take_along_axis(records.p, records.emitted[:, None], 1) == 0).any())
    largest, error = _distance(transforms)
    row: dict[str, Any] = {
        **dict.fromkeys(COLUMNS),
        "method": records.name,
        "V": records.p.shape[1],
        "T": 1,
        "samples": len(records),
        "p_value": 0.0 if impossible else min(1.0, len(tests) * min(tests)),
        "model": verdicts.RECORDS,
        "parameters": "",
        "tv_low": max(_lower_limit(u, len(transforms)) for u in transforms),
        "ks": largest,
        "ks_high": min(1.0, largest + error),
        "seed": seed,
        "margin": margin,
        "specbench": __version__,
        "commit": origin.commit(),
        **_of_drafts(records, spread),
    }
    return row | {"verdict": verdicts.verdict([row])}


Order = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _falling(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return -p


def _by_number(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(p.shape[1]), p.shape)


def _ratio(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.divide(p, q, out=np.full_like(p, np.inf), where=q > 0)


def _gain(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The mass of each token if the cumulative sum of q is rounded to bfloat16, over q."""
    rounded = torch.from_numpy(q.cumsum(1)).bfloat16().double().numpy()
    return np.divide(np.diff(rounded, prepend=0.0), q, out=np.ones_like(q), where=q > 0)


def transformed(
    p: np.ndarray,
    tokens: np.ndarray,
    spread: np.ndarray,
    used: np.ndarray,
    order: Order = _falling,
    q: np.ndarray | None = None,
) -> np.ndarray:
    """The probability integral transforms (n,) in [0, 1) of the tokens (N,) of the used lines, with the tokens of the
    vocabulary in an order. Tokens that are equal in order are one value, whose mass `spread` (N,) in [0, 1) cuts."""
    parts = []
    for probs, chosen in _chunks(p, used):
        mass = _normalised(probs)
        values = order(mass, mass if q is None else _normalised(q[chosen]))
        own = np.take_along_axis(values, tokens[chosen, None], 1)
        below, same = ((mass * part).sum(1) for part in (values < own, values == own))
        parts.append(below + spread[chosen] * same)
    return np.concatenate(parts).clip(0, np.nextafter(1, 0))


def _normalised(probs: np.ndarray) -> np.ndarray:
    precise = probs.astype(np.float64)
    return np.asarray(precise / precise.sum(1, keepdims=True))


def _uniform(u: np.ndarray) -> float:
    """p-value of the hypothesis that u is uniform."""
    seen = np.bincount((u * _BINS).astype(np.int64), minlength=_BINS)
    return _chi_square(seen)


def _independent(u: np.ndarray) -> float:
    """p-value of the hypothesis that successive values are independent and uniform. 1 for too few lines."""
    first, second = (u[: len(u) // 2 * 2].reshape(-1, 2).T * _SIDE).astype(np.int64)
    return _chi_square(np.bincount(first * _SIDE + second, minlength=_SIDE**2))


def _chi_square(seen: np.ndarray) -> float:
    equal = torch.full((len(seen),), 1 / len(seen), dtype=torch.float64)
    return statistics.chi_square(torch.from_numpy(seen).double(), equal)


def counts(p: np.ndarray, tokens: np.ndarray, used: np.ndarray) -> float:
    """p-value of the hypothesis that every token occurs as often as its probabilities sum to: d^T C^+ d is chi-square
    with as many degrees of freedom as C has ranks, where d is the difference and C the covariance. The most probable
    tokens that expect 5 or more are cells of their own."""
    vocab = p.shape[1]
    expected = np.zeros(vocab)
    for probs, _ in _chunks(p, used):
        expected += _normalised(probs).sum(0)
    order = np.argsort(-expected)[: _CELLS - 1]
    own = order[expected[order] >= statistics.SMALLEST]
    cell = np.full(vocab, len(own))
    cell[own] = np.arange(len(own))
    seen, mean = np.bincount(cell[tokens[used]], minlength=len(own) + 1), np.zeros(len(own) + 1)
    covariance = np.zeros((len(own) + 1,) * 2)
    for probs, _ in _chunks(p, used):
        mass = _normalised(probs)
        pooled = np.concatenate([mass[:, own], np.delete(mass, own, 1).sum(1, keepdims=True)], 1)
        mean += pooled.sum(0)
        covariance -= pooled.T @ pooled
    covariance += np.diag(mean)
    values, vectors = np.linalg.eigh(covariance)
    free = values > 0.5  # less variance than half a count is rounding, or a cell that expects less than one
    if not free.any():
        return 1.0
    along = vectors[:, free].T @ (seen - mean)
    return float(stats.chi2.sf(float((along**2 / values[free]).sum()), int(free.sum())))


def _of_drafts(records: Records, spread: np.ndarray) -> dict[str, Any]:
    """The columns about drafted tokens: whether they are samples of q, and how many were emitted, compared with the
    share that the exact rule accepts."""
    drafted, q, has_draft = records.drafted, records.q, records.has_draft
    if drafted is None or not has_draft.any():
        return {}
    columns = {"acceptance_rate": float((drafted == records.emitted)[has_draft].mean())}
    if q is None:
        return columns
    tests = [_uniform(transformed(q, drafted, spread, has_draft, order)) for order in (_falling, _gain)]
    tests.append(counts(q, drafted, has_draft))
    impossible = bool((np.take_along_axis(q, drafted.clip(0)[:, None], 1)[has_draft] == 0).any())
    overlap = np.concatenate(
        [np.minimum(_normalised(part), _normalised(q[chosen])).sum(1) for part, chosen in _chunks(records.p, has_draft)]
    ).clip(0, 1)
    variance = float((overlap * (1 - overlap)).sum())
    difference = float(columns["acceptance_rate"] * len(overlap) - overlap.sum())
    return columns | {
        "acceptance_expected": float(overlap.mean()),
        "p_acceptance": 2 * float(stats.norm.sf(abs(difference) / math.sqrt(max(variance, 1e-300)))),
        "p_drafted": 0.0 if impossible else min(1.0, len(tests) * min(tests)),
    }


def _distance(transforms: list[np.ndarray]) -> tuple[float, float]:
    """The largest distance of the cumulative frequency of u from the uniform distribution's, at the bounds of the bins,
    and by how much its true value may be larger (or smaller) at 95 % (Hoeffding and Azuma, Bonferroni)."""
    bounds = np.arange(1, _BINS) / _BINS
    tail = (1 - CONFIDENCE) / (2 * len(bounds) * len(transforms))
    values = [(float(np.abs((u[:, None] < bounds).mean(0) - bounds).max()), _error(len(u), tail)) for u in transforms]
    return max(value for value, _ in values), max(error for _, error in values)


def _lower_limit(u: np.ndarray, tests: int) -> float:
    """A lower limit, at level 1 - TAIL, of the mean over lines of the total variation between p and the distribution
    that the token came from. {U < c} is an event of probability c under p. The first half of the lines chooses c and
    the side, the second half measures."""
    half = len(u) // 2
    bounds = np.arange(1, _BINS) / _BINS
    off = (u[:half, None] < bounds).mean(0) - bounds
    best = int(np.abs(off).argmax())
    measured = float((u[half:] < bounds[best]).mean() - bounds[best])
    excess = measured * math.copysign(1, off[best])
    return max(0.0, excess - _error(len(u) - half, statistics.TAIL / tests))


def _error(lines: int, tail: float) -> float:
    """A mean of numbers in [0, 1] exceeds the mean of their conditional expectations by more with probability `tail` at
    most (Hoeffding 1963 and Azuma 1967)."""
    return math.sqrt(math.log(1 / tail) / (2 * lines))
