"""Runs whose images a server decodes: `engine=http`."""
