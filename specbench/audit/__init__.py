"""The modules of `specbench audit`. The package itself is also callable: it is the function `specbench.api.audit`."""

import sys

from specbench.storage.package import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
