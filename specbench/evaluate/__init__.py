"""Scores of existing images from any source: a run's, or any folder of images."""
