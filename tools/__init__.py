"""Maintainers' programs that are part of no installation."""
