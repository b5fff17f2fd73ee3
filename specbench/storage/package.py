"""What the package says of itself: its version, which rows and the build read here, and packages that are functions."""

import importlib
from types import ModuleType
from typing import Any

__version__ = "0.3.0"


class CallablePackage(ModuleType):
    """A package that is also the function of the same name: `specbench.audit` and `specbench.compare`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module("specbench.api"), name)(*args, **kwargs)
