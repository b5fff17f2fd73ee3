"""`python -m specbench.cli`."""

import sys

from specbench.cli import main

sys.exit(main())
