"""specbench: a benchmark harness for speculative decoding of autoregressive image models."""

import os


def _library_mode() -> str:
    """One order of summation in Intel's matrix library, whatever the number of rows, threads or the alignment of a
    product: strict conditional numerical reproducibility. Its automatic choice is slow on other vendors' processors.
    """
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="ignore") as f:
            intel = "GenuineIntel" in f.read(200)
    except OSError:
        intel = False
    return "AUTO,STRICT" if intel else "AVX2,STRICT"


# The library reads this once, at its first product. A value that is already set stays.
os.environ.setdefault("MKL_CBWR", _library_mode())
