"""The modules of `specbench audit`. The package is also the function `specbench.api.audit`."""

import sys

from specbench.storage.package import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
