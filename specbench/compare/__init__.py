"""The modules of `specbench compare`. The package is also the function `specbench.api.compare`."""

import sys

from specbench.storage.package import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
