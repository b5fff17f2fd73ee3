"""The sub-commands."""

from __future__ import annotations

#: Sub-command -> the function that takes its arguments, imported when it is called.
COMMANDS = {
    "run": "specbench.cli.run:main",
    "status": "specbench.cli.status:main",
    "resume": "specbench.cli.resume:main",
    "list": "specbench.cli.choices:main",
    "fetch": "specbench.cli.fetch:main",
    "evaluate": "specbench.cli.evaluate:main",
    "compare": "specbench.cli.compare:main",
    "breakdown": "specbench.cli.breakdown:main",
    "reference": "specbench.cli.reference:main",
    "audit": "specbench.cli.audit:main",
    "bench": "specbench.cli.bench:main",
    "probe": "specbench.cli.probe:main",
    "suite": "specbench.cli.suite:main",
    "tables": "specbench.cli.tables:main",
    "show": "specbench.cli.show:main",
    "collect": "specbench.cli.collect:main",
    "report": "specbench.cli.report:main",
    "push": "specbench.cli.push:main",
    "train": "specbench.cli.train:main",
    "convert": "specbench.cli.convert:main",
}
