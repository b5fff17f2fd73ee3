"""Rows: columns, CSV files, where a row comes from, and the statistics in it."""
