"""specbench: a benchmark harness for speculative decoding of autoregressive image models.

    import specbench

    result = specbench.run("cool_sd", model="llamagen_scenes", delta=1.1, n=16)
    result.row["step_compression"], result.records, result.images[0]

The functions are loaded when they are first used. Under their full names, they are:

- `specbench.api.run`: decodes prompts, scores the images and measures the speed-up
- `specbench.api.result`: a run that has a folder
- `specbench.api.compare`: two runs, image by image
- `specbench.api.audit`: whether a method keeps the target's distribution
- `specbench.api.load`: a model, to decode your own prompts

Mistakes raise `specbench.errors.UsageError`, failures `specbench.errors.RunError`.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from specbench.errors import RunError as RunError
from specbench.errors import UsageError as UsageError
from specbench.storage.package import CallablePackage
from specbench.storage.package import __version__ as __version__

if TYPE_CHECKING:
    from specbench.api import audit as audit
    from specbench.api import compare as compare
    from specbench.api import load as load
    from specbench.api import result as result
    from specbench.api import run as run

_FUNCTIONS = ("audit", "compare", "load", "result", "run")


def _function(name: str) -> Any:
    return getattr(importlib.import_module("specbench.api"), name)


CallablePackage.function = staticmethod(_function)

if not TYPE_CHECKING:  # which would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _FUNCTIONS:
            raise AttributeError(f"module 'specbench' has no attribute '{name}'")
        return _function(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_FUNCTIONS})


def _library_mode() -> str:
    """The value of MKL_CBWR for one order of summation in Intel's matrix library, independent of the number of rows,
    threads and the alignment of a product: strict conditional numerical reproducibility. Its automatic choice is slow
    on other vendors' processors.
    """
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="ignore") as f:
            intel = "GenuineIntel" in f.read(200)
    except OSError:
        intel = False
    return "AUTO,STRICT" if intel else "AVX2,STRICT"


# The library reads this once, at its first product. An existing value stays.
os.environ.setdefault("MKL_CBWR", _library_mode())
