"""The package's version, which rows and the build read here, and packages that can be called like functions."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

__version__ = "0.3.0"


class CallablePackage(ModuleType):
    """A package that is also the function of the same name: `specbench.audit` and `specbench.compare`.

    function: returns a function by its name; the package `specbench` sets it.
    """

    function: ClassVar[Callable[[str], Callable[..., Any]]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self).function(self.__name__.rpartition(".")[2])(*args, **kwargs)
