"""Trains the embedded models on *scenes*: `make train-scenes`, or `python -m tools.scenes` in a clone."""
