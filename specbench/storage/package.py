"""What the package says of itself: its version, which rows and the build read here, and packages that are functions."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

__version__ = "0.3.0"


class CallablePackage(ModuleType):
    """A package that is also the function of the same name: `specbench.audit` and `specbench.compare`.

    function: finds a function by its name; the package `specbench` sets it.
    """

    function: ClassVar[Callable[[str], Callable[..., Any]]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self).function(self.__name__.rpartition(".")[2])(*args, **kwargs)
