"""Loads models from weight files: official checkpoints, specbench's format, and the bundles that a run uses."""
