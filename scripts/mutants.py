"""Does `specbench audit` catch mistakes? Plausible ones are put into the code, one at a time, and the default audit
of a method runs with growing samples until its verdict is "not lossless". A mistake that leaves the distribution of the
sequences as it is has a test, which must fail.

    python scripts/mutants.py [out=results/mutants.csv] [--most 200000] [--only NAME ...]

With --only the other rows of the file stay as they are.

A mutant changes the code of functions in memory; files stay as they are. One that changes no decoded sequence raises an
error: it no longer bites. One that neither an audit nor its test catches ends the command with exit status 1. The
mutants are in mutations.yaml.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
import yaml

from specbench.audit import plan
from specbench.audit.audit import Subject, assemble, measure
from specbench.audit.densities import DensityPair
from specbench.audit.models import TabularModel
from specbench.decoding import loop
from specbench.decoding.continuous import decode
from specbench.decoding.rng import RandomStreams
from specbench.storage import origin
from specbench.storage.csv_text import csv_lines, csv_text
from specbench.storage.files import write_atomically

COLUMNS = ("mutant", "mistake", "method", "samples", "model", "parameters", "p_value", "tv", "tv_exact", "ks")
COLUMNS += ("commit", "test")
ROOT = Path(__file__).resolve().parents[1]
LADDER = (250, 1000, 4000, 16_000, 64_000, 200_000)
_SHOWN = 300  # sequences in which a mutant must change something
Job = tuple[dict[str, Any], Subject]


@dataclass(frozen=True)
class Mutant:
    """An entry of mutations.yaml. changes: file -> old text -> new text."""

    name: str
    method: str
    mistake: str
    changes: Mapping[str, Mapping[str, str]]
    test: str | None
    unseen: bool


def _mutant(name: str, entry: dict[str, Any]) -> Mutant:
    test, unseen = entry.pop("test", None), entry.pop("unseen", False)
    changes = {file: entry.pop(file) for file in list(entry) if file.endswith(".py")}
    [(method, mistake)] = entry.items()
    return Mutant(name, method, mistake, changes, test, unseen)


_ENTRIES = yaml.safe_load((ROOT / "scripts/mutations.yaml").read_text(encoding="utf-8"))
NAMED = {name: _mutant(name, entry) for name, entry in _ENTRIES.items()}
MUTANTS = [mutant for mutant in NAMED.values() if not mutant.unseen]


def jobs(method: str, models: Sequence[Subject]) -> list[Job]:
    """The default audit of a method, shortest first; of the models, on those that suit it."""
    arguments = f"method={method}".split()
    continuous, *_ = plan.kinds_of(arguments)
    suited = [model for model in models if isinstance(model, DensityPair) == continuous]
    audits = list(plan.audits(arguments, suited))
    return sorted(audits, key=_cost)


def _cost(job: Job) -> tuple[bool, bool]:
    model = job[1]
    return not isinstance(model, TabularModel), isinstance(model, TabularModel) and model.vocab > 8


def decoded(job: Job) -> list[Any]:
    """Tokens, steps and accepted lengths of a few sequences of an audit."""
    cfg, model = job
    rng, method = RandomStreams([(0, i) for i in range(_SHOWN)]), assemble(cfg, model)
    if isinstance(model, DensityPair):
        out: Any = decode(model.target, model.drafter, method.rule, None, rng)
    else:
        out = loop.decode(method.config, model.prompts(_SHOWN), rng)
    return [out.tokens, out.steps, out.accepted]


@contextmanager
def applied(mutant: Mutant) -> Iterator[list[Any]]:
    """Functions have the code of the changed files; gives the functions. RuntimeError where a file does not have the
    old text once."""
    before: list[tuple[Any, CodeType]] = []
    try:
        for file, changes in mutant.changes.items():
            intact = changed = (ROOT / "specbench" / file).read_text(encoding="utf-8")
            for old, new in changes.items():
                if (count := intact.count(old)) != 1:
                    raise RuntimeError(f"{mutant.name}: {file} has {count} times {old}")
                changed = changed.replace(old, new)
            module = import_module(f"specbench.{file.removesuffix('.py').replace('/', '.')}")
            now = _functions(compile(intact, file, "exec", dont_inherit=True))
            for name, code in _functions(compile(changed, file, "exec", dont_inherit=True)).items():
                if code != now[name]:
                    function = attrgetter(name)(module)
                    before.append((function, function.__code__))
                    function.__code__ = code
        yield [function for function, _ in before]
    finally:
        for function, code in reversed(before):
            function.__code__ = code


def _functions(code: CodeType) -> dict[str, CodeType]:
    """The code of the functions and methods of a module, by qualified name."""
    functions: dict[str, CodeType] = {}
    for part in code.co_consts:
        if isinstance(part, CodeType):
            is_function = part.co_flags & inspect.CO_OPTIMIZED
            functions |= {part.co_qualname: part} if is_function else _functions(part)
    return functions


def caught(mutant: Mutant, audits: Sequence[Job], intact: Sequence[list[Any]], most: int) -> dict[str, Any]:
    """The row of a mutant: the first audit, with the smallest samples, that refutes it. `intact`: what the audits
    decode without it. RuntimeError where it changes none of them."""
    row = {"mutant": mutant.name, "mistake": mutant.mistake, "method": mutant.method, "commit": origin.commit()}
    with applied(mutant):
        changed = [
            job
            for job, before in zip(audits, intact, strict=True)
            if not all(torch.equal(a, b) for a, b in zip(decoded(job), before, strict=True))
        ]
        if not changed:
            raise RuntimeError(f"{mutant.name} changes nothing that is decoded: the patch no longer bites")
        for samples in LADDER:
            if samples > most:
                break
            for cfg, model in changed:
                result = measure(assemble(cfg, model), model, samples)
                if result["verdict"] == "not lossless":
                    names = ("samples", "parameters", "p_value", "tv", "tv_exact", "ks")
                    return row | {"model": model.name, **{name: result[name] for name in names}}
    return row


def tested(mutant: Mutant) -> dict[str, Any]:
    """The row of a mutant with a test, which names the test where it fails. RuntimeError where it does not pass without
    the mistake."""
    row = {"mutant": mutant.name, "mistake": mutant.mistake, "method": mutant.method, "commit": origin.commit()}
    arguments = ["-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", str(ROOT / (mutant.test or ""))]
    if pytest.main(arguments) != pytest.ExitCode.OK:
        raise RuntimeError(f"{mutant.test} does not pass without {mutant.name}")
    with applied(mutant):
        failed = pytest.main(arguments) == pytest.ExitCode.TESTS_FAILED
    return row | ({"test": mutant.test} if failed else {})


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--most", type=int, default=LADDER[-1], help="samples of an audit at most")
    parser.add_argument("--only", nargs="*", default=[], help="names of mutants")
    parser.add_argument("out", nargs="?", default="out=results/mutants.csv")
    chosen = parser.parse_args(arguments)
    mutants = [m for m in MUTANTS if m.name in chosen.only or not chosen.only]
    models = plan.chosen_models({}, [False, True])
    out = Path(chosen.out.removeprefix("out="))
    lines = csv_lines(out)[1] if chosen.only and out.is_file() else []
    earlier: dict[str, Any] = {row["mutant"]: row for _, row in lines}
    rows: list[dict[str, Any]] = []
    audited: dict[str, tuple[list[Job], list[list[Any]]]] = {}
    for mutant in mutants:
        started = time.perf_counter()
        if mutant.test:
            rows.append(tested(mutant))
        else:
            if mutant.method not in audited:
                audits = jobs(mutant.method, models)
                audited[mutant.method] = audits, [decoded(job) for job in audits]
            rows.append(caught(mutant, *audited[mutant.method], chosen.most))
        where = f"{rows[-1]['samples']} samples, {rows[-1]['model']}" if "samples" in rows[-1] else "NOT CAUGHT"
        where = rows[-1].get("test", where)
        print(f"{mutant.name}: {where} ({time.perf_counter() - started:.0f} s)", flush=True)
        earlier[mutant.name] = rows[-1]
        every = [earlier[m.name] for m in MUTANTS if m.name in earlier]
        write_atomically(out, csv_text(COLUMNS, every).encode())
    missed = [row["mutant"] for row in rows if not row.keys() & {"samples", "test"}]
    print(f"{len(rows) - len(missed)} of {len(rows)} mutants caught" + (f"; not {', '.join(missed)}" if missed else ""))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
