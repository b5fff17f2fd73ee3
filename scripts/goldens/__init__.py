"""Golden checks, one module a family; see scripts/check_golden.py."""
