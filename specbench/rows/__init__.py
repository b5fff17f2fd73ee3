"""Rows: their columns, CSV files, provenance and statistics."""
