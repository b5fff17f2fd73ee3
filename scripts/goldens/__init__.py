"""Golden checks, one module per family; see scripts/check_golden.py."""
