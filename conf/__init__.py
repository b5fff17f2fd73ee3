"""The shipped configurations: one folder a group, one YAML a choice. Every key is a flat, top-level parameter."""
